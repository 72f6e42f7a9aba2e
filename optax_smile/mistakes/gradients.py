"""Mistakes between the loss and the sampler: clips, learning rates, numbers that are not finite.

The state of a sampler stores a fingerprint of the last gradient that it received: its norm, and its
product with fixed random signs. The product is linear, so the product of a mean of several
gradients, which `optax.MultiSteps` passes on, is the mean of the products.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _check, _paths, _sums, _tree
from optax_smile.diagnostics.findings import Check
from optax_smile.state import AFTER, AT_REST, SamplerState

# Rounding errors of a fingerprint, relative to the norm: twenty times those seen in float32.
TOLERANCE = 2e-5
# Ratios, and norms of clipped gradients, with less relative variation count as constant.
CONSTANT = 1e-3
# The squares of shorter gradients underflow, as if a network fits a batch exactly.
SHORTEST = 1e-12
MOST_ALTERED = 0.01  # Share of the calls that may look altered by chance.
# Share of the calls with a clipped or non-finite gradient above which to warn.
MOST_CLIPPED, MOST_NONFINITE_CALLS = 0.01, 0.001
LOST = "These steps were rejected, and `aux` stays as it was. Are there batches of one example?"
# Fewer calls that move leaves uphill, or draws with a zero gradient, may be chance.
LEAST_UPHILL, LEAST_SEEN = 8, 20
BEFORE = (
    "Remove what comes before the sampler. A sampler has no learning rate, and its prior replaces"
    " weight decay. Only `optax.clip_by_global_norm` may go before it."
)
CLIP = "Clip at a norm that gradients rarely exceed, or not at all."
NOT_FINITE = "Are the batches finite, and the labels in their range?"
NONFINITE = "Their steps were rejected, which biases the draws. Are the batches finite?"
STOPPED = "Without a gradient, only prior and noise move it. To freeze it, leave it out of the"
STOPPED += " sampler, with `optax.partition` and `optax.set_to_zero`, or with `eqx.partition`."


class Gradients(NamedTuple):
    """Record of the gradients of one chain; counters are int32."""

    num_calls: jax.Array  # Gradients of the loss.
    num_nonfinite_calls: jax.Array  # Of these, gradients or losses with a non-finite entry.
    starts_finite: jax.Array  # Whether the first one was finite.
    pending: jax.Array  # Sum of fingerprints `[2]` since the last gradient of the sampler.
    num_pending: jax.Array  # Number of these fingerprints.
    num_compared: jax.Array  # Gradients that the sampler received and that could be compared.
    num_shorter: jax.Array  # Of these, shorter ones in the same direction.
    num_changed: jax.Array  # Of these, ones changed in any other way.
    shorter_ratios: jax.Array  # Smallest and largest ratio of the shorter ones, `[2]`.
    shorter_norms: jax.Array  # Smallest and largest norm of the shorter ones, `[2]`.
    changed_ratio: jax.Array  # Ratio of the last changed one, NaN if its direction differs.
    num_uphill: jax.Array  # Calls that moved leaves that are not sampled along the gradient.
    num_lost: jax.Array | None  # Calls that made an array of `aux` non-finite, `[array]`.


def no_gradients(number: int, aux: object) -> Gradients:
    """Return the record before the first call, arrays `[chain, ...]`."""
    ends = jnp.tile(jnp.array([jnp.inf, -jnp.inf], jnp.float32), (number, 1))
    counters = {name for name in Gradients._fields if name.startswith("num_")} - {"num_lost"}
    arrays = len(jax.tree.leaves(aux))
    lost = jnp.zeros((number, arrays), jnp.int32) if arrays else None
    return Gradients(
        **dict.fromkeys(counters, jnp.zeros(number, jnp.int32)),
        num_lost=lost,
        starts_finite=jnp.ones(number, bool),
        pending=jnp.zeros((number, _sums.FINGERPRINT), jnp.float32),
        shorter_ratios=ends,
        shorter_norms=ends,
        changed_ratio=jnp.full(number, jnp.nan, jnp.float32),
    )


def keep_finite(new: object, old: object, value: jax.Array) -> tuple[Any, jax.Array | None]:
    """Return the new `aux`, or the old one if numbers are lost, and which arrays lose numbers.

    A number is lost if it becomes NaN or infinite. The flags are `[array]`, None without arrays.
    They are false if the loss `value` is also not finite.
    """

    def loses(x: jax.Array, y: jax.Array) -> jax.Array:
        return ~jnp.all(jnp.isfinite(x) | (x == y)) if _tree.is_floating(x) else jnp.zeros((), bool)

    flags = jax.tree.leaves(jax.tree.map(loses, new, old))
    if not flags:
        return new, None
    are_lost = jnp.stack(flags)
    return optax.tree.where(jnp.any(are_lost), old, new), are_lost & jnp.isfinite(value)


def count_others(
    past: Gradients,
    grads: optax.Updates,
    updates: optax.Updates,
    state: SamplerState,
    are_lost: jax.Array | None,
) -> Gradients:
    """Count losses of numbers in `aux`, and calls that add raw gradients to leaves not sampled.

    `optax.masked` passes such gradients on as updates.
    """
    if are_lost is not None and past.num_lost is not None:
        past = past._replace(num_lost=_tree.count(past.num_lost, are_lost))
    received = state.last_received()
    seen = {*_paths.names(grads if received is None else received[0])}
    pairs = zip(_paths.names(grads), jax.tree.leaves(grads), jax.tree.leaves(updates), strict=True)
    others = [(g, u) for name, g, u in pairs if name not in seen]
    if not others:
        return past
    raw, moves = map(list, zip(*others, strict=True))
    along = _tree.inner(raw, moves)
    length = jnp.sqrt(_tree.inner(raw, raw) * _tree.inner(moves, moves))
    is_uphill = (along > 0) & (along > (1 - CONSTANT) * length)
    return past._replace(num_uphill=_tree.count(past.num_uphill, is_uphill))


def record_gradient(
    past: Gradients, grads: optax.Updates, value: jax.Array, before: jax.Array, state: SamplerState
) -> Gradients:
    """Compare the gradient that the sampler received in one call with the gradient of the loss.

    `before` counts the gradients received before the call; `state` is the state after it.
    """
    sampled, last = None, state.last_received()
    if last is not None:
        sampled = _paths.leaves_like(last[0], grads)
    mark = _sums.fingerprint(grads if sampled is None else sampled).astype(past.pending.dtype)
    is_finite = jnp.isfinite(mark[0]) & jnp.isfinite(value)
    past = past._replace(
        num_calls=_tree.count(past.num_calls),
        num_nonfinite_calls=_tree.count(past.num_nonfinite_calls, ~is_finite),
        starts_finite=past.starts_finite & (is_finite | (past.num_calls > 0)),
        pending=past.pending + mark,
        num_pending=past.num_pending + 1,
    )
    if last is None or sampled is None:
        none = past.num_pending * 0  # Before JAX 0.7, only this form varies over chains on a mesh.
        return past._replace(pending=none + jnp.zeros_like(mark), num_pending=none)
    stats = state.stats()
    compared = _compare(past, last[1].astype(mark.dtype), stats.accepted)
    return optax.tree.where(stats.num_gradients > before, compared, past)


def _compare(past: Gradients, received: jax.Array, accepted: jax.Array) -> Gradients:
    """Compare the fingerprints of the gradient of the loss and of the received gradient."""
    # For several gradients this is the mean of the norms, an upper bound of the norm of the mean.
    size, own = past.pending / past.num_pending
    norm, theirs = received
    is_one, rounding = past.num_pending == 1, TOLERANCE * size
    # A gradient whose product with the signs is nearly zero is not informative.
    is_known = accepted & jnp.all(jnp.isfinite(past.pending)) & jnp.all(jnp.isfinite(received))
    is_known &= (jnp.abs(own) > rounding / CONSTANT) & (size > SHORTEST)
    own, size = jnp.where(is_known, own, 1), jnp.where(is_known, size, 1)
    ratio = jnp.where(is_one, jnp.sign(theirs * own) * norm / size, theirs / own)
    is_equal = jnp.abs(theirs - own) <= rounding
    is_equal &= ~is_one | (jnp.abs(norm - size) <= rounding)
    # The direction of a mean is unknown.
    is_along = ~is_one | (jnp.abs(theirs - ratio * own) <= TOLERANCE * norm)
    is_shorter = is_known & ~is_equal & is_along & (ratio > 0) & (ratio < 1)
    is_changed = is_known & ~is_equal & ~is_shorter

    def ends(before: jax.Array, number: jax.Array) -> jax.Array:
        extended = jnp.stack([jnp.minimum(before[0], number), jnp.maximum(before[1], number)])
        return jnp.where(is_shorter, extended, before)

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


def checks(
    seen: Gradients, stats: dict[str, np.ndarray], broken: Sequence[int] = ()
) -> Iterator[Check]:
    """Test the chains by the record of their gradients and their statistics.

    `broken` are the indices of batches that led to non-finite numbers.
    """
    # Bad data affect every chain; divergence affects only some.
    place = np.argmin(seen.num_nonfinite_calls)
    number, calls = int(seen.num_nonfinite_calls[place]), int(seen.num_calls[place])
    share = number / max(calls, 1)
    text = f"{number} of {calls} losses or gradients of a chain were not finite ({share:.2%})."
    text += f" They come from the batches {broken[:4]}." if broken else ""
    text = text if share or broken else "none."
    passed, bound = share <= MOST_NONFINITE_CALLS and not broken, MOST_NONFINITE_CALLS
    yield Check.of("non-finite gradients", (share,), bound, passed, text, NONFINITE)
    how = changed(seen)
    text = f"the sampler receives the gradients of the loss{f' {how}' if how else ''}."
    yield Check.of("before the sampler", (), 0.0, not how, text, BEFORE)
    if not how:
        share = float(np.sum(seen.num_shorter) / max(np.sum(seen.num_compared), 1))
        shortest = float(np.nanmin(np.where(seen.num_shorter > 0, seen.shorter_ratios[:, 0], 1)))
        text = (
            f"A clip before the sampler shortens {share:.1%} of the gradients, by up to a factor of"
            f" {1 / shortest:.3g}. Where it acts, the draws come from a distribution that is"
            " flatter than the posterior."
        )
        text, passed = text if share else "none.", share <= MOST_CLIPPED
        yield Check.of("clipped gradients", (share,), MOST_CLIPPED, passed, text, CLIP)
    if adds_gradients(seen):
        text = "leaves that are not sampled move along their gradients."
        yield Check.of("other leaves", (), 0.0, False, text, AT_REST)
    altered, calls = (int(np.sum(stats[name])) for name in ("num_altered", "num_gradients"))
    text = f"{altered} of {calls} updates were changed."
    yield Check.of("after the sampler", (float(altered),), 0.0, not altered, text, AFTER)


def lost_numbers(seen: Gradients, aux: object) -> Iterator[Check]:
    """Find arrays of an auxiliary state that lose numbers."""
    if (lost := seen.num_lost) is not None:
        share = float(np.max(lost, initial=0)) / max(int(np.max(seen.num_calls, initial=0)), 1)
        at = listed(aux, np.any(lost, axis=0))
        text = f"`aux` would not be finite at {at} after {share:.2%} of the calls of `loss_fn`."
        text = text if share else "none."
        yield Check.of("auxiliary state", (share,), 0.0, not share, text, LOST)


def resting(leaves: Sequence[str], num_draws: int) -> Check:
    """Find leaves whose gradient was zero at all draws."""
    passed = not leaves or num_draws < LEAST_SEEN
    text = f"the gradient of {', '.join(leaves)} was zero at all {num_draws} draws."
    return Check.of("gradients", (float(len(leaves)),), 0.0, passed, text, STOPPED)


def adds_gradients(seen: Gradients) -> bool:
    """Whether leaves that are not sampled move along their gradients, uphill."""
    calls = np.maximum(seen.num_calls - seen.num_nonfinite_calls, LEAST_UPHILL)
    return bool(np.any(seen.num_uphill > 0.9 * calls))


def listed(tree: object, flags: np.ndarray) -> str:
    """List the names of the leaves with a flag."""
    return ", ".join(name for name, flag in zip(_paths.names(tree), flags, strict=True) if flag)


def require_received(seen: Gradients, aux: object):
    """Require finite gradients at the start that reach the sampler unchanged; a clip is allowed.

    At least one call must leave `aux` finite, and leaves that are not sampled may not move uphill.
    """
    lost = np.flatnonzero(~seen.starts_finite).tolist()
    if lost:
        rule = "a start at which the gradients of every chain are finite"
        advice = f"{NOT_FINITE} A loss may be finite where its gradient is not."
        _check.fail("params", rule, f"nan or inf in the chains {lost}", advice)
    if seen.num_lost is not None:
        always = np.any(seen.num_lost == seen.num_calls[:, None], axis=0)
        if np.any(always & np.any(seen.num_calls)):
            got = f"nan or inf at {listed(aux, always)} after every call of `loss_fn`"
            _check.fail("aux", "finite after a call of `loss_fn`", got)
    if adds_gradients(seen):
        rule = "one beside which the other leaves rest or are optimized"
        _check.fail("sampler", rule, "one beside which their gradients are added", AT_REST)
    if how := changed(seen):
        rule = "a chain in which the sampler receives the gradients of the loss"
        _check.fail("sampler", rule, f"gradients {how}", BEFORE)


def changed(seen: Gradients) -> str:
    """Say how gradients are changed, except by one clip of their norm; "" if they are not."""
    is_changed = seen.num_changed > MOST_ALTERED * seen.num_compared
    if np.any(is_changed):
        ratios = seen.changed_ratio[is_changed]
        if np.any(np.isnan(ratios)):
            return "with another direction"
        low = high = float(np.median(ratios))
    else:
        is_shorter = seen.num_shorter > 0
        lows, highs = seen.shorter_ratios[is_shorter].T
        shortest, longest = seen.shorter_norms[is_shorter].T
        # Clipped gradients all have the same length.
        varies = longest > (1 + CONSTANT) * shortest
        if not np.any(varies):
            return ""
        low, high = float(np.min(lows[varies])), float(np.max(highs[varies]))
    if low < high and high >= (1 + CONSTANT) * low:
        return f"multiplied by numbers from {low:.3g} to {high:.3g}"
    return f"multiplied by {low:.6g}"
