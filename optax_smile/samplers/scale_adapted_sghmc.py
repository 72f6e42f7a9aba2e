"""SGHMC with one mass per parameter, measured during the burn-in."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_smile import _check
from optax_smile._types import LogPrior, PriorMean, StepSize
from optax_smile.samplers import _langevin
from optax_smile.samplers._langevin import Rule, Step

# Added to the root of a parameter's squared gradient, in units of the root of the mean.
SMALLEST_ROOT = 1e-3


class GradientScale(NamedTuple):
    """Averages over a window that adapts to the noise of each gradient.

    Attributes:
        window: length tau of the window in steps, a tree like the parameters.
        gradient_mean: average g of grad U, likewise.
        gradient_square: average V of its square, likewise.
    """

    window: optax.Updates
    gradient_mean: optax.Updates
    gradient_square: optax.Updates


@_langevin.sampler(
    friction=_check.PROBABILITY,
    adapt_steps=_check.Whole(1, traced=True),
)
def scale_adapted_sghmc(
    step_size: StepSize,
    *,
    num_data: float | jax.Array,
    prior_precision: optax.Params = 1.0,
    prior_mean: PriorMean = 0.0,
    log_prior: LogPrior | None = None,
    temperature: float | jax.Array = 1.0,
    friction: float | jax.Array = 0.05,
    adapt_steps: int = 5_000,
    key: jax.Array | int | None = None,
) -> Rule[GradientScale]:
    """Sample like `sghmc` with a mass for each parameter, measured in the first steps.

    The mass is the root of the mean squared gradient. During `adapt_steps` this mean is taken over
    a window tau, which is long where the gradient is mostly noise; then it is frozen:

        g <- g + r (grad U - g),  V <- V + r (grad U^2 - V),  r = 1 / (tau + 1)
        tau <- 1 + tau (1 - g^2 / V)
        v <- (1 - f) v - eps^2 V^(-1/2) grad U + sqrt(2 f eps^2 V^(-1/2) - eps^4) z,  z ~ N(0, I)
        theta <- theta + v

    No noise is added where the root is negative, eps^2 V^(1/2) > 2 f.

    Args:
        step_size: eps > 0, a number or an Optax schedule of the number of steps. One parameter
            moves by about eps V^(-1/4) in a step.
        friction: share f of the velocity that a step loses, in (0, 1).
        adapt_steps: steps during which the mass adapts, >= 1: those of the warm-up. Later points
            are draws.
        key: JAX key or seed, needed. For the other arguments, the return value and the errors see
            `sgld`.

    Cost: as `sgld`, and three parameter-sized arrays of state more.

    Example:
        >>> import jax, jax.numpy as jnp, optax_smile
        >>> tx = optax_smile.scale_adapted_sghmc(1e-2, num_data=100, key=jax.random.key(0))
        >>> state = tx.init(jnp.zeros(3))

    Source: Springenberg, Klein, Falkner, Hutter, NeurIPS 2016, equations 8 to 10.
    Differences from the paper: 1e-3 of the root of the mean V is added to V^(1/2), for parameters
    without a gradient; V starts at zero instead of one, which would depend on the unit of the
    gradient; r is 1 / (tau + 1), as in the authors' code, since a window of one step would never
    grow; eps is not divided by sqrt(num_data).
    """

    def init(params: optax.Params) -> GradientScale:
        return GradientScale(
            window=jax.tree.map(jnp.ones_like, params),
            gradient_mean=jax.tree.map(jnp.zeros_like, params),
            gradient_square=jax.tree.map(jnp.zeros_like, params),
        )

    def adapt(memory: GradientScale, gradient: optax.Updates, adapts: jax.Array) -> GradientScale:
        def leaf(tau, mean, square, g):
            rate = jnp.where(adapts, 1 / (tau + 1), 0)
            new_mean = mean + rate * (g - mean)
            new_square = square + rate * (g**2 - square)
            steady = jnp.where(new_square > 0, new_mean**2 / new_square, 0)
            return jnp.where(adapts, 1 + tau * (1 - steady), tau), new_mean, new_square

        leaves = jax.tree.map(leaf, *memory, gradient)
        return GradientScale(
            *jax.tree.transpose(jax.tree.structure(gradient), jax.tree.structure((0, 0, 0)), leaves)
        )

    def move(memory: GradientScale, step: Step) -> tuple[optax.Updates, GradientScale]:
        memory = adapt(memory, step.gradient, step.num_steps < adapt_steps)
        eps = step.step_size

        metric = _langevin.inverse(jax.tree.map(jnp.sqrt, memory.gradient_square), SMALLEST_ROOT)

        def leaf(displacement, metric, g, z):
            variance = jnp.maximum(2 * friction * eps**2 * metric - eps**4, 0)
            kept = (1 - friction) * step.step_ratio * displacement
            return (kept - eps**2 * metric * g + jnp.sqrt(variance) * z).astype(g.dtype)

        displacement = jax.tree.map(leaf, step.displacement, metric, step.gradient, step.noise)
        return displacement, memory

    return Rule(move, init, is_draw=lambda count: count >= adapt_steps)
