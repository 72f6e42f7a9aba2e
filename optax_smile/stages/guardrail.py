"""Stage 3: which steps are rejected.

Every sampler rejects a step that ends in a non-finite number. With a `reject_quantile` it also
rejects a step whose energy error is an outlier among those before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_smile import _check, _tree
from optax_smile.stages.energy import EnergyAverages, EnergyError, quantile, settled

RejectMomentum = Literal["zero", "refresh"]
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
        redirect: `redirect(reject, direction, key)`, the direction with which the chain goes on.
        restarts_moving: whether a rejected chain has a direction.
        uses_energy: whether it needs the `value` of a loop.
        uses_key: whether it draws random numbers.
        winsor_quantile: of the energies, beyond which they do not enter their averages whole.
    """

    init: Callable[[jnp.dtype], GuardrailState]
    judge: Callable[..., tuple[GuardrailState, jax.Array]]
    redirect: Callable[..., Any]
    restarts_moving: bool
    uses_energy: bool
    uses_key: bool
    winsor_quantile: float


def guardrail(
    where: str = "guardrail",
    reject_quantile: float | None = None,
    reject_momentum: RejectMomentum = "zero",
    key: jax.Array | int | None = None,
) -> Guardrail:
    """Reject non-finite steps, and with a quantile those whose energy error is an outlier.

    Args:
        where: name of the sampler, for errors.
        reject_quantile: of the energy errors, in (0, 1); None rejects non-finite steps alone.
        reject_momentum: of a rejected chain: `"zero"`, or `"refresh"` for a random direction.
        key: with which it is drawn; needed for that alone.

    Raises:
        ValueError: a key that is missing.
    """
    refreshes = reject_momentum == "refresh"
    if refreshes:
        _check.Key(True, 'for reject_momentum="refresh"')(where, "key", key)

    def judge(state, error, energies=None):
        return _judge(state, energies, error, reject_quantile)

    def redirect(reject, direction, key):
        return fresh_momentum(reject, direction, key) if refreshes else direction

    return Guardrail(
        init=init,
        judge=judge,
        redirect=redirect,
        restarts_moving=refreshes,
        uses_energy=reject_quantile is not None,
        uses_key=refreshes,
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


def fresh_momentum(reject: jax.Array, direction: optax.Updates, key: jax.Array) -> optax.Updates:
    """Draw an isotropic unit vector for a rejected chain; `direction` for one that goes on.

    Under `lax.cond`: a step that is kept costs no random numbers, except under `vmap`, where they
    are drawn at every call.
    """

    def draw():
        normal = _tree.normal_like(key, direction)
        norm = jnp.sqrt(_tree.inner(normal, normal))
        return jax.tree.map(lambda z: (z / norm).astype(z.dtype), normal)

    return jax.lax.cond(reject, draw, lambda: direction)
