"""SGLD whose step size falls in cycles: find a mode, sample it, leave it."""

from __future__ import annotations

import jax
import jax.core
import jax.numpy as jnp
import optax

from optax_smile import _check
from optax_smile._types import LogPrior, PriorMean, StepSize
from optax_smile.samplers import _langevin, _transformation
from optax_smile.samplers._langevin import Rule, Step

# 5,000 steps per cycle, a third of it exploration, as in Sommer et al. 2026.
TOTAL_STEPS = 20_000
NUM_CYCLES = 4
EXPLORATION = 0.33


@_langevin.sampler(
    total_steps=_check.Whole(1, traced=True),
    num_cycles=_check.Whole(1, traced=True),
    exploration=_check.Real(0, 1, open="high"),
)
def cyclical_sgld(
    step_size: StepSize,
    *,
    num_data: float | jax.Array,
    prior_precision: optax.Params = 1.0,
    prior_mean: PriorMean = 0.0,
    log_prior: LogPrior | None = None,
    temperature: float | jax.Array = 1.0,
    total_steps: int = TOTAL_STEPS,
    num_cycles: int = NUM_CYCLES,
    exploration: float = EXPLORATION,
    key: jax.Array | int | None = None,
) -> Rule[None]:
    """Sample like `sgld` in cycles, each of which begins with a search for a new mode.

        eps_k = eps / 2 (1 + cos(pi r)),  r = (k mod K) / K,  K = ceil(total_steps / num_cycles)
        theta <- theta - eps_k grad U + sqrt(2 eps_k) z where r >= exploration, else without z

    Points of the exploration are not draws: `stats(state).is_draw` is False there, and `sample`
    keeps none of them.

    Args:
        step_size: largest eps > 0 of a cycle, see `sgld`: a number or an Optax schedule of the
            number of steps.
        total_steps: number of steps that the cycles divide, >= 1 and >= `num_cycles`. A longer run
            continues in cycles of the same length.
        num_cycles: number of cycles in `total_steps`, >= 1.
        exploration: share of a cycle without noise, in [0, 1).
        key: JAX key or seed, needed. For the other arguments, the return value and the errors see
            `sgld`.

    Cost: as `sgld`.

    Example:
        >>> import jax, jax.numpy as jnp, optax_smile
        >>> tx = optax_smile.cyclical_sgld(1e-4, num_data=100, key=jax.random.key(0))
        >>> state = tx.init(jnp.zeros(3))

    Source: Zhang, Li, Zhang, Chen, Wilson, ICLR 2020, equation 1 and algorithm 1, without the
    share of the noise that the gradient brings.
    """
    is_traced = any(isinstance(x, jax.core.Tracer) for x in (total_steps, num_cycles))
    if not is_traced and total_steps < num_cycles:
        rule = f"an integer >= {num_cycles}, a step for each of `num_cycles`"
        _check.fail("total_steps", rule, total_steps)
    schedule = _transformation.schedule(step_size)
    cycle_length = -(-total_steps // num_cycles)

    def is_draw(count: jax.Array) -> jax.Array:
        # A hundredth of a step keeps rounding from moving the boundary.
        in_cycle = jnp.asarray(count) % cycle_length + 0.01
        return (in_cycle >= exploration * cycle_length) & (count >= 0)

    def size(count: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
        largest = schedule(count)
        place = (jnp.asarray(count) % cycle_length) / cycle_length
        # Equal to (1 + cos(pi r)) / 2, which would cancel at the end of a cycle.
        return largest * jnp.cos(jnp.pi / 2 * place) ** 2

    def move(memory: None, step: Step) -> tuple[optax.Updates, None]:
        amplitude = jnp.where(is_draw(step.num_steps), jnp.sqrt(2 * step.step_size), 0)
        return _langevin.euler_step(step, amplitude), memory

    return Rule(move, is_draw=is_draw, step_size=size)
