"""Do the parameters arrive where the sampler sent them? A few entries tell, without a pass."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_smile import _check, _tree

# Leaves of which one number is read, evenly spread over the tree.
MOST_LEAVES = 16
# A leaf on several devices is read by a masked sum, up to this size.
LARGEST_SHARED = 2**16
# Rounding of an addition, in units in the last place.
ROUNDING = 4
# Calls over which altered ones are averaged; more than one in a hundred of them, and at least
# three, are no accident such as a checkpoint that is restored.
WINDOW, MOST_ALTERED, LEAST_ALTERED = 512, 0.01, 3


class ProbeState(NamedTuple):
    """What is known of the entries that are read.

    Attributes:
        start: where the last call found them, `[entry]`.
        is_known: whether the next call can compare them; False before the first one and after a
            rejected step.
        num_altered: calls that found them elsewhere than the last one had sent them, int32.
        num_compared: calls that could compare them, up to `WINDOW`, int32.
        altered_share: share of altered ones among these, later their moving average.
        is_altered: whether the altered calls are too many for an accident.
    """

    start: jax.Array
    is_known: jax.Array
    num_altered: jax.Array
    num_compared: jax.Array
    altered_share: jax.Array
    is_altered: jax.Array

    def is_made(self) -> jax.Array:
        """True, which the compiler cannot know: what waits for it is written after the look."""
        return self.num_altered >= 0


def init(params: optax.Params) -> ProbeState:
    """Nothing is known before the first call."""
    return ProbeState(
        start=_stack([jnp.zeros((), leaf.dtype) for leaf in _chosen(params)]),
        is_known=jnp.zeros((), bool),
        num_altered=jnp.zeros((), jnp.int32),
        num_compared=jnp.zeros((), jnp.int32),
        altered_share=jnp.zeros((), _tree.dtype(params)),
        is_altered=jnp.zeros((), bool),
    )


def look(
    state: ProbeState, params: optax.Params, moved: list[jax.Array], reject: jax.Array
) -> ProbeState:
    """Compare where the parameters are with where the last call sent them.

    Args:
        state: of the last call.
        params: the parameters as the loop passes them.
        moved: entries of the displacement of the last call, as its state has it.
        reject: whether this call goes back to where the step began.

    Raises:
        ValueError: another transformation has computed with the state.
    """
    if state.is_known.dtype != bool:
        rule, got = "what `init` or `update` returned", "one whose booleans are numbers"
        remedy = "`reset_state=True` of `optax.lookahead` and `sam` does that: no draws are right."
        _check.fail("update", "state", rule, got, remedy)
    found = entries(params)
    rounding = ROUNDING * max((float(jnp.finfo(x.dtype).eps) for x in found), default=0.0)
    here, step = _stack(found), _stack(moved)
    off = jnp.abs(here - (state.start + step))
    off = jnp.where(jnp.isfinite(off), off, 0)
    off = jnp.where(off > rounding * jnp.maximum(jnp.abs(here), jnp.abs(state.start)), off, 0)
    farthest, longest = _largest(off, jnp.abs(step))
    # A short step may be the difference of terms as large as the longest one.
    altered = state.is_known & (farthest > rounding * longest)
    num_compared = jnp.minimum(state.num_compared + state.is_known, WINDOW)
    share = state.altered_share
    number = num_compared.astype(share.dtype)
    change = (altered - share) / jnp.maximum(number, 1)
    share = share + jnp.where(state.is_known, change, 0)
    # Half a call less: the number is a rounded product.
    is_altered = (share * number > LEAST_ALTERED - 0.5) & (share > MOST_ALTERED)
    return ProbeState(
        start=jnp.where(reject, 0, here),
        is_known=~reject,
        num_altered=_tree.count(state.num_altered, altered),
        num_compared=num_compared,
        altered_share=share,
        is_altered=is_altered,
    )


def entries(tree: Any) -> list[jax.Array]:
    """Read one number of each of a few leaves, evenly spread over the tree."""
    return [_middle(leaf) for leaf in _chosen(tree)]


def _chosen(tree: Any) -> list[jax.Array]:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.size]
    number = min(len(leaves), MOST_LEAVES)
    return [leaves[i * len(leaves) // number] for i in range(number)]


def _largest(*numbers: jax.Array) -> tuple[jax.Array, ...]:
    """The largest of each of several lists of as many positive numbers, in one pass."""
    zeros = tuple(jnp.zeros((), x.dtype) for x in numbers)
    return jax.lax.reduce(numbers, zeros, functools.partial(jax.tree.map, jnp.maximum), (0,))


def _stack(numbers: list[jax.Array]) -> jax.Array:
    return jnp.stack(numbers) if numbers else jnp.zeros(0)


def _middle(leaf: jax.Array) -> jax.Array:
    """The number in the middle of a leaf; 0 if it is large and lies on several devices."""
    place = tuple(length // 2 for length in leaf.shape)
    if not _tree.is_shared(leaf):
        return jax.lax.slice(leaf, place, tuple(at + 1 for at in place)).reshape(())
    if leaf.size > LARGEST_SHARED:
        return jnp.zeros((), leaf.dtype)
    for axis, at in enumerate(place):
        here = jax.lax.broadcasted_iota(jnp.int32, leaf.shape, axis) == at
        leaf = jnp.where(here, leaf, 0)
    return jnp.sum(leaf)
