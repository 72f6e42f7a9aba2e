"""Do the parameters arrive where the sampler sent them? A few entries tell, without a pass."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_smile import _tree

# Leaves that are looked at, spread over the tree.
MOST_LEAVES = 16
# Leaves on several devices are looked at by a masked sum, up to this size.
LARGEST_SHARED = 2**16
# Rounding of an addition, in units in the last place.
ROUNDING = 4
# Share of a step, and calls running, from which on it is no accident.
SMALLEST_SHARE, MOST_RUNNING = 1e-3, 3


class ProbeState(NamedTuple):
    """What is known of the entries that are looked at.

    Attributes:
        start: where the last call found them `[entry]`.
        is_known: whether the next call can tell by them; False before the first one and after a
            rejected step.
        num_altered: calls that found them elsewhere than the last one had sent them, int32.
        num_running: the latest calls in a row that found them off by a share of the step, int32.
        is_altered: whether those are too many for an accident.
    """

    start: jax.Array
    is_known: jax.Array
    num_altered: jax.Array
    num_running: jax.Array
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
        num_running=jnp.zeros((), jnp.int32),
        is_altered=jnp.zeros((), bool),
    )


def look(
    state: ProbeState, found: list[jax.Array], moved: list[jax.Array], reject: jax.Array
) -> ProbeState:
    """Compare where the parameters are with where the last call sent them.

    Args:
        state: of the last call.
        found: entries of the parameters as the loop passes them.
        moved: entries of the displacement of the last call, as its state tells it.
        reject: whether this call goes back to where the step began.
    """
    here, step = _stack(found), _stack(moved)
    rounding = ROUNDING * max((float(jnp.finfo(x.dtype).eps) for x in found), default=0.0)
    size = jnp.maximum(jnp.maximum(jnp.abs(here), jnp.abs(state.start)), jnp.abs(step))
    off = jnp.abs(here - (state.start + step))
    off = jnp.where(state.is_known & jnp.isfinite(off), off, 0)
    altered = jnp.any(off > rounding * size)
    running = altered & (jnp.linalg.norm(off) > SMALLEST_SHARE * jnp.linalg.norm(step))
    row = jnp.where(running, _tree.count(state.num_running), 0)
    row = jnp.where(state.is_known, row, state.num_running)
    return ProbeState(
        start=jnp.where(reject, 0, here),
        is_known=~reject,
        num_altered=_tree.count(state.num_altered, altered),
        num_running=row,
        is_altered=row >= MOST_RUNNING,
    )


def entries(tree: Any) -> list[jax.Array]:
    """One number of each of a few leaves, evenly spread over the tree."""
    return [_middle(leaf) for leaf in _chosen(tree)]


def _chosen(tree: Any) -> list[jax.Array]:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.size]
    number = min(len(leaves), MOST_LEAVES)
    return [leaves[i * len(leaves) // number] for i in range(number)]


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
