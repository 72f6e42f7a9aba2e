"""Does the sampler receive the gradients of the loss, and are they finite?

The state of a sampler keeps a fingerprint of the gradient that it received last: its norm, and its
product with fixed random signs. The product is linear, so that of a mean over several calls, which
`optax.MultiSteps` passes on, is the mean of the products.
"""

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_smile import _check, _tree
from optax_smile.diagnostics.results import Check
from optax_smile.state import SamplerState

# What rounding makes of a product, relative to the norm: twenty times what was seen in float32.
TOLERANCE = 2e-5
# By how much ratios, or the norms of clipped gradients, may vary to count as constant.
CONSTANT = 1e-3
# Share of the calls that may look altered by accident.
MOST_ALTERED = 0.01
# Share of the calls with a clipped gradient, or one that is not finite, that is worth a warning.
MOST_CLIPPED, MOST_NONFINITE_CALLS = 0.01, 0.001

BEFORE = (
    "Remove what comes before the sampler. A sampler has no learning rate, and its prior replaces"
    " weight decay. Only `optax.clip_by_global_norm` may go before it."
)

CLIP = "Clip at a norm that gradients exceed now and then only, or not at all."
NONFINITE = (
    "Their steps were rejected, and the draws are not those of the posterior. Are the batches"
    " finite, and the gradients of the loss where the batches are?"
)


class Gradients(NamedTuple):
    """What was seen of the gradients of one chain.

    Attributes:
        num_calls: gradients of the loss, int32.
        num_nonfinite_calls: of them with an entry or a loss that is not finite, int32.
        starts_finite: whether the first one was finite.
        pending: sum of their fingerprints since the sampler received its last one, `[2]`.
        num_pending: how many these are, int32.
        num_compared: gradients that the sampler received and that could be compared, int32.
        num_shorter: of them shorter, in the same direction, int32.
        num_changed: of them changed in any other way, int32.
        shorter_ratios: smallest and largest ratio of the shorter ones, `[2]`.
        shorter_norms: smallest and largest norm of what was received then, `[2]`.
        changed_ratio: of the last changed one, NaN if its direction is another one.
    """

    num_calls: jax.Array
    num_nonfinite_calls: jax.Array
    starts_finite: jax.Array
    pending: jax.Array
    num_pending: jax.Array
    num_compared: jax.Array
    num_shorter: jax.Array
    num_changed: jax.Array
    shorter_ratios: jax.Array
    shorter_norms: jax.Array
    changed_ratio: jax.Array


def nothing_seen(number: int) -> Gradients:
    """Before the first call, arrays `[chain, ...]`."""
    none, unknown = jnp.zeros(number, jnp.int32), jnp.full(number, jnp.nan, jnp.float32)
    ends = jnp.tile(jnp.array([jnp.inf, -jnp.inf], jnp.float32), (number, 1))
    return Gradients(
        num_calls=none,
        num_nonfinite_calls=none,
        starts_finite=jnp.ones(number, bool),
        pending=jnp.zeros((number, _tree.FINGERPRINT), jnp.float32),
        num_pending=none,
        num_compared=none,
        num_shorter=none,
        num_changed=none,
        shorter_ratios=ends,
        shorter_norms=ends,
        changed_ratio=unknown,
    )


def observe(
    past: Gradients, grads: Any, value: jax.Array, before: jax.Array, state: SamplerState
) -> Gradients:
    """Compare what the sampler received in one call of one chain with the gradient of the loss.

    Args:
        past: of the calls before.
        grads: gradient of the loss.
        value: the loss.
        before: how many gradients the sampler had received before.
        state: of the sampler, after the call.
    """
    seen, last = None, state.last_gradient()
    if last is not None:
        seen = _tree.leaves_like(last[0], grads)
    mark = _tree.fingerprint(grads if seen is None else seen).astype(past.pending.dtype)
    is_finite = jnp.isfinite(mark[0]) & jnp.isfinite(value)
    past = past._replace(
        num_calls=_tree.count(past.num_calls),
        num_nonfinite_calls=_tree.count(past.num_nonfinite_calls, ~is_finite),
        starts_finite=past.starts_finite & (is_finite | (past.num_calls > 0)),
        pending=past.pending + mark,
        num_pending=past.num_pending + 1,
    )
    if last is None or seen is None:
        return past._replace(pending=jnp.zeros_like(mark), num_pending=past.num_pending * 0)
    told = state.stats()
    compared = _compare(past, last[1].astype(mark.dtype), told.accepted)
    return _tree.where(told.num_gradients > before, compared, past)


def _compare(past: Gradients, received: jax.Array, accepted: jax.Array) -> Gradients:
    """Compare the fingerprints of the loss's gradient and of the one that was received."""
    # Of several gradients the mean of the norms, which is no less than the norm of the mean.
    size, own = past.pending / past.num_pending
    norm, theirs = received
    is_one, rounding = past.num_pending == 1, TOLERANCE * size
    # A gradient that these signs hardly see, or none at all, says nothing.
    is_known = accepted & jnp.all(jnp.isfinite(past.pending)) & jnp.all(jnp.isfinite(received))
    is_known &= jnp.abs(own) > rounding / CONSTANT
    own, size = jnp.where(is_known, own, 1), jnp.where(is_known, size, 1)
    ratio = jnp.where(is_one, jnp.sign(theirs * own) * norm / size, theirs / own)
    is_equal = jnp.abs(theirs - own) <= rounding
    is_equal &= ~is_one | (jnp.abs(norm - size) <= rounding)
    # The direction of a mean is not known.
    is_along = ~is_one | (jnp.abs(theirs - ratio * own) <= TOLERANCE * norm)
    is_shorter = is_known & ~is_equal & is_along & (ratio > 0) & (ratio < 1)
    is_changed = is_known & ~is_equal & ~is_shorter

    def ends(before: jax.Array, number: jax.Array) -> jax.Array:
        found = jnp.stack([jnp.minimum(before[0], number), jnp.maximum(before[1], number)])
        return jnp.where(is_shorter, found, before)

    return past._replace(
        pending=jnp.zeros_like(past.pending),
        num_pending=past.num_pending * 0,
        num_compared=_tree.count(past.num_compared, is_known),
        num_shorter=_tree.count(past.num_shorter, is_shorter),
        num_changed=_tree.count(past.num_changed, is_changed),
        shorter_ratios=ends(past.shorter_ratios, ratio),
        shorter_norms=ends(past.shorter_norms, norm),
        changed_ratio=jnp.where(
            is_changed, jnp.where(is_along, ratio, jnp.nan), past.changed_ratio
        ),
    )


def check_start(where: str, seen: Gradients):
    """Require gradients that are finite at the start: a chain would never leave it otherwise."""
    lost = np.flatnonzero(~seen.starts_finite).tolist()
    if lost:
        rule = "a start at which the gradients of every chain are finite"
        got, remedy = f"nan or inf in the chains {lost}", "Are the batches finite?"
        _check.fail(
            where, "params", rule, got, f"{remedy} A loss may be finite where they are not."
        )


def check_received(where: str, seen: Gradients):
    """Require gradients that reach the sampler as they are, or shortened by one clip of their norm.

    Args:
        where: the public function.
        seen: arrays `[chain, ...]` on the host.

    Raises:
        ArgumentError: what comes before the sampler changes them in another way.
    """
    if how := changed(seen):
        rule = "a chain in which the sampler receives the gradients of the loss"
        _check.fail(where, "sampler", rule, f"one in which it receives them {how}", BEFORE)


def changed(seen: Gradients) -> str:
    """Say how gradients are changed, if they are in another way than by one clip of their norm."""
    return _changed(seen) or _rescaled(seen)


def _changed(seen: Gradients) -> str:
    is_changed = seen.num_changed > MOST_ALTERED * seen.num_compared
    if not np.any(is_changed):
        return ""
    ratios = seen.changed_ratio[is_changed]
    if np.any(np.isnan(ratios)):
        return "in another direction"
    return _multiplied(float(np.median(ratios)), float(np.median(ratios)))


def _rescaled(seen: Gradients) -> str:
    """Say by what gradients are multiplied, where they do not all have the length of a clip."""
    is_shorter = seen.num_shorter > 0
    low, high = seen.shorter_ratios[is_shorter].T
    shortest, longest = seen.shorter_norms[is_shorter].T
    varies = longest > (1 + CONSTANT) * shortest
    if not np.any(varies):
        # Those of a clip, or of too few calls to tell.
        return ""
    return _multiplied(float(np.min(low[varies])), float(np.max(high[varies])))


def _multiplied(low: float, high: float) -> str:
    if high < (1 + CONSTANT) * low or low == high:
        by = f"{low:.3g}" if abs(low - 1) > CONSTANT else "a number other than 1"
    else:
        by = f"numbers from {low:.3g} to {high:.3g}"
    return f"times {by}"


def check_clips(seen: Gradients) -> Check:
    """Find a clip before the sampler that acts, and say what it costs."""
    share = float(np.sum(seen.num_shorter) / max(np.sum(seen.num_compared), 1))
    shortest = float(np.nanmin(np.where(seen.num_shorter > 0, seen.shorter_ratios[:, 0], 1)))
    text = (
        f"A clip before the sampler shortens {share:.1%} of the gradients, by up to a factor of"
        f" {1 / shortest:.3g}. Where it acts the draws are of a distribution that is flatter than"
        " the posterior."
    )
    return _of_share("clipped gradients", share, MOST_CLIPPED, text, CLIP)


def check_finite(seen: Gradients) -> Check:
    """Find gradients that are not finite."""
    # Bad data meet every chain; a chain that diverges is alone.
    place = np.argmin(seen.num_nonfinite_calls)
    number, calls = int(seen.num_nonfinite_calls[place]), int(seen.num_calls[place])
    share = number / max(calls, 1)
    text = f"{number} of {calls} losses or gradients of a chain were not finite ({share:.2%})."
    return _of_share("finite gradients", share, MOST_NONFINITE_CALLS, text, NONFINITE)


def _of_share(kind: str, share: float, bound: float, text: str, advice: str) -> Check:
    passed = share <= bound
    text = text if share else "none."
    return Check(kind, (), (share,), bound, passed, "" if passed else advice, text)


def warn(where: str, seen: Gradients):
    """Warn at the end of a run of clipped gradients, and of those that were not finite."""
    if not seen.num_calls.size:
        # A process may hold no chain.
        return
    for found in (check_finite(seen), check_clips(seen)):
        if not found.passed:
            warnings.warn(f"`{where}`: {found.text} {found.advice}", stacklevel=5)
