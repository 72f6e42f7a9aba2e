"""Stage 3: the step size, from the energy error of the last step.

A tuner is a pair of functions on a state with the field `step_size_factor`; the step size is
step_size(count) times that factor, so schedules stay the user's.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_smile import _check, _energy


class Evidence(NamedTuple):
    """What a tuner learns from one closed step.

    Attributes:
        error: energy error of the step.
        averages: of |energy change| over the steps before it.
        num_calls: calls of `update` before this one, int32.
        smallest_factor: factor below which float32 parameters stop moving.
    """

    error: _energy.EnergyError
    averages: _energy.EnergyAverages
    num_calls: jax.Array
    smallest_factor: jax.Array


class Tuner(NamedTuple):
    """A rule for the step size: `init(dtype)` and `update(state, evidence)`, both pure."""

    init: Callable[[jnp.dtype], Any]
    update: Callable[[Any, Evidence], Any]


class FactorState(NamedTuple):
    """State of a tuner that knows its factor alone.

    Attributes:
        step_size_factor: what multiplies the user's step size, scalar > 0. Chains get step sizes
            of their own by `optax.tree.set(state, step_size_factor=...)`.
    """

    step_size_factor: jax.Array


def _start(dtype: jnp.dtype) -> FactorState:
    return FactorState(jnp.ones((), dtype))


def fixed() -> Tuner:
    """Keep the user's step size."""
    return Tuner(init=_start, update=lambda state, evidence: state)


def quantile_tuner(
    adapt_probability: float = 0.1, adapt_rate: float = 0.02, adapt_steps: int | None = None
) -> Tuner:
    """Raise the step size after small energy errors, lower it after large ones.

    With the quantile function Q of a Gamma distribution fitted to the errors so far,
    factor <- factor (1 + adapt_rate) if |dE| < Q(a / 3), factor (1 - adapt_rate) if
    |dE| > Q(1 - 2 a / 3), a = adapt_probability.

    The rule compares errors with each other, not with a target: it has no fixed point, and with
    mini-batch energies the step size falls for as long as it adapts (by about 1e-4 per step in
    our measurements). `adapt_steps` ends that.

    Args:
        adapt_probability: share of the steps that change the step size, in (0, 1).
        adapt_rate: relative change, in (0, 1).
        adapt_steps: number of calls of `update` after which the factor stays; None: never.

    Returns:
        A tuner for the argument `tuner` of `smile` and `psmile`.

    Raises:
        ValueError: an argument out of range.

    Cost: a few scalars; no gradient. Does nothing in a loop that does not pass `value`.

    Example:
        >>> import optax_smile
        >>> tuner = optax_smile.quantile_tuner(adapt_steps=5_000)
        >>> sampler = optax_smile.smile(1e-2, num_data=50_000, tuner=tuner)

    Source: Sommer et al., ICML 2026, equation of the adaptive step size and appendix on the
    Wilson-Hilferty quantiles. Differs: no adaptation below the resolution of float32.
    """
    _check.probability("quantile_tuner", "adapt_probability", adapt_probability)
    _check.probability("quantile_tuner", "adapt_rate", adapt_rate)
    if adapt_steps is not None:
        _check.whole("quantile_tuner", "adapt_steps", adapt_steps, 0)
    low, high = adapt_probability / 3, 1 - 2 * adapt_probability / 3

    def update(state: FactorState, evidence: Evidence) -> FactorState:
        factor = state.step_size_factor
        energy, averages = jnp.abs(evidence.error.change), evidence.averages
        raised = jnp.where(energy < _energy.quantile(averages, low), 1 + adapt_rate, 1)
        lowered = jnp.where(energy > _energy.quantile(averages, high), 1 - adapt_rate, raised)
        floor = jnp.minimum(evidence.smallest_factor, factor)
        adapts = evidence.error.known & _energy.settled(averages)
        adapts &= evidence.num_calls < (math.inf if adapt_steps is None else adapt_steps)
        adapted = jnp.maximum(factor * lowered, floor)
        return FactorState(jnp.where(adapts, adapted, factor).astype(factor.dtype))

    return Tuner(init=_start, update=update)


def check(where: str, tuner: Tuner | None) -> Tuner:
    """Require a tuner or None, which keeps the user's step size."""
    if tuner is None:
        return fixed()
    if not isinstance(tuner, Tuner):
        _check.fail(where, "tuner", "a tuner such as quantile_tuner(), or None", repr(tuner))
    return tuner
