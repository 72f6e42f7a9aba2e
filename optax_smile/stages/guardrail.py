"""Stage 3: which steps are rejected.

Every sampler rejects a step that ends in a non-finite number. With a `reject_quantile` it also
rejects a step whose energy error is an outlier among those before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_smile import _tree
from optax_smile.stages.energy import EnergyAverages, EnergyError, quantile, settled

# A few non-finite inputs are accidents of a batch; from the fifth in a row the step may be to
# blame and is halved, down to a sixteenth, until a hundred good calls have passed.
TOLERATED_NONFINITE = 4
SMALLEST_BACKOFF = 1 / 16
GOOD_CALLS_TO_RESTORE = 100
# Energies enter the averages winsorized at the quantile for outliers; at this one without.
WINSOR_QUANTILE = 0.98


class GuardrailState(NamedTuple):
    """Counters of the guardrail.

    Attributes:
        num_rejected: steps rejected for an outlying energy, int32.
        num_nonfinite: calls with a non-finite gradient or value, int32.
        nonfinite_run: such calls in a row, int32.
        finite_run: good calls since the last such call, int32.
        step_backoff: what multiplies the step size after too many of them, scalar in [1/16, 1].
    """

    num_rejected: jax.Array
    num_nonfinite: jax.Array
    nonfinite_run: jax.Array
    finite_run: jax.Array
    step_backoff: jax.Array


class Guardrail(NamedTuple):
    """A rule for which steps are rejected: pure functions.

    Attributes:
        init: `init(dtype)`, the first state.
        judge: `judge(state, error, energies)`, the next state and whether the call rejects the open
            step; `energies` are the averages before this step, None without energies.
        uses_energy: whether it needs the `value` of a loop.
        winsor_quantile: of the energies, beyond which they do not enter their averages whole.
    """

    init: Callable[[jnp.dtype], GuardrailState]
    judge: Callable[..., tuple[GuardrailState, jax.Array]]
    uses_energy: bool
    winsor_quantile: float


def guardrail(reject_quantile: float | None = None) -> Guardrail:
    """Reject non-finite steps, and with a quantile those whose energy error is an outlier.

    Args:
        reject_quantile: of the energy errors, in (0, 1); None rejects non-finite steps alone.
    """

    def judge(state, error, energies=None):
        return _judge(state, energies, error, reject_quantile)

    return Guardrail(
        init=init,
        judge=judge,
        uses_energy=reject_quantile is not None,
        winsor_quantile=WINSOR_QUANTILE if reject_quantile is None else reject_quantile,
    )


def init(dtype: jnp.dtype) -> GuardrailState:
    """Start with nothing rejected."""
    counters = [jnp.zeros((), jnp.int32) for _ in range(4)]
    return GuardrailState(*counters, step_backoff=jnp.ones((), dtype))


def _judge(
    state: GuardrailState,
    averages: EnergyAverages | None,
    error: EnergyError,
    reject_quantile: float | None,
) -> tuple[GuardrailState, jax.Array]:
    """Decide whether a call rejects the open step, and count.

    It does if a number is not finite, or if |energy change| exceeds the `reject_quantile` of the
    energies before this step; `averages` are None for a sampler without energies.

    Returns:
        The new counters and the decision, a boolean scalar.
    """
    outlier = jnp.zeros((), bool)
    if reject_quantile is not None and averages is not None:
        threshold = quantile(averages, reject_quantile)
        outlier = error.known & settled(averages) & (jnp.abs(error.change) > threshold)

    nonfinite_run = jnp.where(error.finite, 0, optax.safe_increment(state.nonfinite_run))
    finite_run = jnp.where(error.finite, optax.safe_increment(state.finite_run), 0)
    halved = jnp.maximum(state.step_backoff / 2, SMALLEST_BACKOFF)
    restored = jnp.where(finite_run >= GOOD_CALLS_TO_RESTORE, 1, state.step_backoff)
    backoff = jnp.where(nonfinite_run > TOLERATED_NONFINITE, halved, restored)
    counted = GuardrailState(
        num_rejected=_tree.count(state.num_rejected, outlier),
        num_nonfinite=_tree.count(state.num_nonfinite, ~error.finite),
        nonfinite_run=nonfinite_run,
        finite_run=finite_run,
        step_backoff=backoff.astype(state.step_backoff.dtype),
    )
    return counted, outlier | ~error.finite
