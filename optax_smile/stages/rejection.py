"""Rejection of steps.

Every sampler rejects a step that ends in a non-finite number. With a `reject_quantile` it also
rejects a step whose energy error is an outlier compared with earlier ones.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_smile import _tree

# A few non-finite inputs may come from bad batches. From the fifth in a row, the step size may be
# the cause: it is halved, down to a sixteenth, until a hundred calls in a row are finite.
TOLERATED_NONFINITE = 4
SMALLEST_BACKOFF = 1 / 16
GOOD_CALLS_TO_RESTORE = 100


class GuardrailState(NamedTuple):
    """Counters of rejected steps, int32; for those that are not listed see `state.Stats`.

    Attributes:
        nonfinite_run: non-finite calls in a row.
        finite_run: finite calls since the last non-finite call.
        step_backoff: factor of the step size after too many non-finite calls, scalar in [1/16, 1].
    """

    num_rejected: jax.Array
    num_nonfinite: jax.Array
    nonfinite_run: jax.Array
    finite_run: jax.Array
    step_backoff: jax.Array


def init(dtype: jnp.dtype) -> GuardrailState:
    """Start without rejections."""
    counters = [jnp.zeros((), jnp.int32) for _ in range(4)]
    return GuardrailState(*counters, step_backoff=jnp.ones((), dtype))


def judge(
    state: GuardrailState,
    is_finite: jax.Array,
    is_outlier: jax.Array | bool = False,
    is_refused: jax.Array | None = None,
) -> tuple[GuardrailState, jax.Array]:
    """Count a call, and decide whether it rejects the open step.

    `is_finite`: all numbers that the call received are finite, and its step size is not negative.
    `is_outlier`: the energy error of the step is an outlier. `is_refused`: the loop rejects the
    step, and counts this itself.
    """
    nonfinite_run = jnp.where(is_finite, 0, optax.safe_increment(state.nonfinite_run))
    finite_run = jnp.where(is_finite, optax.safe_increment(state.finite_run), 0)
    halved = jnp.maximum(state.step_backoff / 2, SMALLEST_BACKOFF)
    restored = jnp.where(finite_run >= GOOD_CALLS_TO_RESTORE, 1, state.step_backoff)
    backoff = jnp.where(nonfinite_run > TOLERATED_NONFINITE, halved, restored)
    counted = GuardrailState(
        num_rejected=_tree.count(state.num_rejected, is_outlier),
        num_nonfinite=_tree.count(state.num_nonfinite, ~is_finite),
        nonfinite_run=nonfinite_run,
        finite_run=finite_run,
        step_backoff=backoff.astype(state.step_backoff.dtype),
    )
    reject = is_outlier | ~is_finite
    return counted, reject if is_refused is None else reject | is_refused
