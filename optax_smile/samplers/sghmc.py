"""Stochastic gradient Hamiltonian Monte Carlo."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from optax_smile import _check
from optax_smile._types import LogPrior, PriorMean, StepSize
from optax_smile.samplers import _langevin
from optax_smile.samplers._langevin import Rule, Step


@_langevin.sampler(friction=_check.PROBABILITY, gradient_noise=_check.NONNEGATIVE)
def sghmc(
    step_size: StepSize,
    *,
    num_data: float | jax.Array,
    prior_precision: optax.Params = 1.0,
    prior_mean: PriorMean = 0.0,
    log_prior: LogPrior | None = None,
    temperature: float | jax.Array = 1.0,
    friction: float | jax.Array = 0.05,
    gradient_noise: float | jax.Array = 0.0,
    key: jax.Array | int | None = None,
) -> Rule[None]:
    """Sample with stochastic gradient Hamiltonian Monte Carlo.

    Gradient descent with momentum, whose friction is balanced by noise. With a velocity r that is
    standard normal in the posterior

        r <- (1 - f) r - eps grad U + sqrt(2 f - eps^2 V) z,  z ~ N(0, I)
        theta <- theta + eps r

    For small steps the parameters have the correct variance, and r has 1 / (1 - f / 2). The
    mini-batch gradient has noise, too. Its variance V, if it is known, is subtracted from the
    variance that is added; if V is too large, no noise is added.

    Args:
        step_size: eps > 0, about how far one parameter moves in a step: a number or an Optax
            schedule of the number of steps. `optax.sgd(lr, momentum)` on the mean loss has
            eps = sqrt(lr / num_data) and f = 1 - momentum.
        friction: share f of the velocity that a step loses, in (0, 1).
        gradient_noise: variance V of the mini-batch gradient of U in each parameter, >= 0.
        key: JAX key or seed, needed. For the other arguments, the return value and the errors see
            `sgld`.

    Cost: as `sgld`.

    Example:
        >>> import jax, jax.numpy as jnp, optax_smile
        >>> tx = optax_smile.sghmc(1e-3, num_data=100, key=jax.random.key(0))
        >>> state = tx.init(jnp.zeros(3))

    Source: Chen, Fox, Guestrin, ICML 2014, equation 15 with eta = eps^2, alpha = f and
    beta = eps^2 V / 2. Differences from the paper: the momentum is never resampled.
    """

    def move(memory: None, step: Step) -> tuple[optax.Updates, None]:
        eps = step.step_size
        amplitude = eps * jnp.sqrt(jnp.maximum(2 * friction - eps**2 * gradient_noise, 0))

        def leaf(displacement, g, z):
            kept = (1 - friction) * step.step_ratio * displacement
            return (kept - eps**2 * g + amplitude * z).astype(g.dtype)

        return jax.tree.map(leaf, step.displacement, step.gradient, step.noise), memory

    return Rule(move)
