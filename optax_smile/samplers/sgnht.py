"""SGHMC whose friction adapts to noise of unknown strength: a thermostat."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_smile import _check, _tree
from optax_smile._types import LogPrior, StepSize, Tree
from optax_smile.samplers import _langevin
from optax_smile.samplers._langevin import Move, Rule

# A step loses at most all of its velocity: beyond, the velocity would change sign, then grow.
LARGEST_SHARE = 1.0


class Thermostat(NamedTuple):
    """Memory of the chain besides its velocity.

    Attributes:
        thermostat: share xi of the velocity that the next step loses, scalar, at most 1; where
            it is negative the step gains.
    """

    thermostat: jax.Array


@_langevin.sampler(friction=_check.PROBABILITY)
def sgnht(
    step_size: StepSize,
    *,
    num_data: float | jax.Array,
    prior_precision: Tree = 1.0,
    prior_mean: Tree = 0.0,
    log_prior: LogPrior | None = None,
    temperature: float | jax.Array = 1.0,
    friction: float | jax.Array = 0.05,
    key: jax.Array | int | None = None,
    track_params: bool = False,
) -> Rule:
    """Sample with the stochastic gradient Nosé-Hoover thermostat.

    `sghmc` whose friction xi rises while the velocity r is larger than a standard normal one, and
    falls while it is smaller. For d parameters

        r <- (1 - xi) r - eps grad U + sqrt(2 f) z,  z ~ N(0, I)
        theta <- theta + eps r
        xi <- min(xi + eps^2 ((1 - xi / 2) |r|^2 / d - 1), 1)

    Mini-batch gradients have noise of a variance V, which `sghmc` must know. Here xi settles around
    f + eps^2 V / 2, the friction that balances both noises, with a standard deviation of about
    eps / sqrt(d). It is one number for all parameters: if the noise differs between them, or from
    place to place, it is right only on average. With eps^2 V / 2 near 1 no friction suffices: use
    smaller steps or larger batches.

    Args:
        step_size: eps > 0, about how far one parameter moves in a step, see `sghmc`: a number or
            an Optax schedule of the number of steps.
        friction: share f of the velocity that the added noise balances, in (0, 1); xi starts there.
        key: JAX key or seed, needed. For the other arguments, the return value and the errors see
            `sgld`.

    Cost: as `sgld`, and one scalar of state more.

    Example:
        >>> import jax, jax.numpy as jnp, optax, optax_smile
        >>> tx = optax_smile.sgnht(1e-3, num_data=100, key=jax.random.key(0))
        >>> state = tx.init(jnp.zeros(3))
        >>> round(float(optax.tree.get(state, "thermostat")), 3)
        0.05

    Source: Ding, Fang, Babbush, Chen, Skeel, Neven, NeurIPS 2014, algorithm 2 with h = eps, p = r,
    A = f / eps and their xi times h. Differences from the paper: the kinetic energy |r|^2 has the
    factor 1 - xi / 2, that of velocities halfway through the friction. Without it the velocity of
    the Euler step is held too small, and the variance of theta is xi / 2 of itself too small
    however small the step size. xi is at most 1, else a chain from a bad start may run away. The
    velocity starts at zero.
    """

    def init(params: optax.Params) -> Thermostat:
        return Thermostat(jnp.asarray(friction, _tree.dtype(params)))

    def move(memory: Thermostat, call: Move):
        xi, eps = memory.thermostat, call.step_size
        kept, amplitude = (1 - xi) * call.step_ratio, eps * jnp.sqrt(2 * friction)

        def leaf(displacement, g, z):
            return (kept * displacement - eps**2 * g + amplitude * z).astype(g.dtype)

        displacement = jax.tree.map(leaf, call.displacement, call.gradient, call.noise)
        # eps^2 |r|^2 / d, by which a step size of zero divides nothing.
        square = _tree.inner(displacement, displacement) / _tree.size(displacement)
        xi = jnp.minimum(xi + (1 - xi / 2) * square - eps**2, LARGEST_SHARE)
        return displacement, Thermostat(xi.astype(memory.thermostat.dtype))

    return Rule(move, init)
