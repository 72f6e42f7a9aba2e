"""Test with a few entries of each leaf whether the loop applies the updates unchanged."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType

from optax_smile import _check, _places, _sums, _tree

# Largest number of entries that are read from a leaf.
MOST_READ = 256
# Largest number of leaves on several devices that are read: one entry each, by a sum.
MOST_SHARED = 16
# Rounding error of an addition, in units in the last place.
ROUNDING = 4
# Altered calls are averaged over `WINDOW` calls. More than one in a hundred, and at least three,
# are not due to chance or a restored checkpoint.
WINDOW, MOST_ALTERED, LEAST_ALTERED = 512, 0.01, 3


class ProbeState(NamedTuple):
    """The entries that are read, and counts of altered calls.

    Attributes:
        start: their values in the last call, padded with zeros, `[entry]`.
        num_read: number of entries that the next call can compare, int32; 0 before the first call
            and after a rejected step.
        num_altered, is_altered: see `state.Stats`.
        num_compared: number of calls that compared them, up to `WINDOW`, int32.
        altered_share: share of altered calls among these, later a moving average.
    """

    start: jax.Array
    num_read: jax.Array
    num_altered: jax.Array
    num_compared: jax.Array
    altered_share: jax.Array
    is_altered: jax.Array


def init(params: optax.Params) -> ProbeState:
    """Begin before the first call."""
    leaves = jax.tree.leaves(params)
    grids = [_grid(leaf.shape) for leaf in leaves]
    length = sum(math.prod(number for number, _ in grid) for grid in grids)
    start = jnp.zeros(length, _tree.dtype(params))
    if any(AxisType.Manual in jax.typeof(leaf).sharding.mesh.axis_types for leaf in leaves):
        # Inside a `shard_map`, the zeros must vary over the same axes as the leaves.
        start = jnp.zeros_like(_in_one(entries(params, _places.of(params)), start))
    return ProbeState(
        start=start,
        num_read=jnp.zeros((), jnp.int32),
        num_altered=jnp.zeros((), jnp.int32),
        num_compared=jnp.zeros((), jnp.int32),
        altered_share=jnp.zeros((), _tree.dtype(params)),
        is_altered=jnp.zeros((), bool),
    )


def look(
    state: ProbeState, read: list[jax.Array], moved: list[jax.Array], reject: jax.Array
) -> ProbeState:
    """Compare the parameters of the loop with those to which the last update leads.

    `read` and `moved` have the entries of the parameters and of the last displacement. `reject` is
    true if the call returns to the start of the step.
    """
    if state.is_altered.dtype != bool:
        rule, got = "what `init` or `update` returned", "one whose booleans are numbers"
        remedy = "`reset_state=True` of `optax.lookahead` and `sam` makes draws wrong."
        with _check.called("update"):
            _check.fail("state", rule, got, remedy)
    rounding = ROUNDING * max((float(jnp.finfo(x.dtype).eps) for x in read), default=0.0)
    arrived, step = _in_one(read, state.start), _in_one(moved, state.start)
    # On several devices, fewer entries are read.
    num_read = sum(len(x) for x in read)
    compares = state.num_read == num_read
    off = jnp.abs(arrived - (state.start + step))
    off = jnp.where(jnp.isfinite(off), off, 0)
    off = jnp.where(off > rounding * jnp.maximum(jnp.abs(arrived), jnp.abs(state.start)), off, 0)
    farthest, longest = _sums.reduce(jnp.maximum, (off, jnp.abs(step)), (0,))
    # Compare with the longest step: a short one may be the difference of two long ones.
    altered = compares & (farthest > rounding * longest)
    num_compared = jnp.minimum(state.num_compared + compares, WINDOW)
    share, number = state.altered_share, num_compared.astype(state.altered_share.dtype)
    change = (altered - share) / jnp.maximum(number, 1)
    share = share + jnp.where(compares, change, 0)
    # Subtract half a call, since the product is rounded.
    is_altered = (share * number > LEAST_ALTERED - 0.5) & (share > MOST_ALTERED)
    return ProbeState(
        start=jnp.where(reject, 0, arrived),
        num_read=jnp.where(reject, 0, num_read).astype(jnp.int32),
        num_altered=_tree.count(state.num_altered, altered),
        num_compared=num_compared,
        altered_share=share,
        is_altered=is_altered,
    )


def entries(tree: optax.Params, places: _places.Places) -> list[jax.Array]:
    """Read all entries of small leaves, then entries on a grid of each large leaf.

    Leaves on several devices need a sum across devices: one entry of each of the smallest is read.
    """
    leaves, small = jax.tree.leaves(tree), [x.is_small for x in jax.tree.leaves(places)]
    order = sorted((i for i, x in enumerate(leaves) if x.size), key=lambda i: not small[i])
    shared = [i for i in order if _sums.is_shared(leaves[i])]
    few = sorted(shared, key=lambda i: leaves[i].size)[:MOST_SHARED]

    def read(i: int) -> jax.Array:
        if i in few:
            return _first(leaves[i])
        return leaves[i].ravel() if small[i] else _on_grid(leaves[i])

    return [read(i) for i in order if i in few or i not in shared]


def _first(leaf: jax.Array) -> jax.Array:
    """Read the first entry by a masked sum."""
    is_first = _places.numbers(jnp.zeros((), jnp.uint32), leaf) == 0
    return jnp.sum(jnp.where(is_first, leaf, 0))[None]


def _on_grid(leaf: jax.Array) -> jax.Array:
    """Read all entries on the grid."""
    grid = _grid(leaf.shape)
    stops = [(number - 1) * stride + 1 for number, stride in grid]
    return jax.lax.slice(leaf, [0] * leaf.ndim, stops, [stride for _, stride in grid]).reshape(-1)


def _grid(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Number and stride of the positions to read along each axis, starting at the first."""
    grid, size = [(1, 1)] * len(shape), math.prod(shape)
    if size <= _places.LARGEST:
        return [(number, 1) for number in shape]
    room = MOST_READ
    for done, axis in enumerate(sorted(range(len(shape)), key=lambda axis: shape[axis])):
        # The longest axis gets all remaining positions, since roots are rounded down.
        number = min(shape[axis], int(room ** (1 / (len(shape) - done)) + 1e-6))
        grid[axis] = number, max(1, (shape[axis] - 1) // max(1, number - 1))
        room //= number
    return grid


def _in_one(numbers: list[jax.Array], like: jax.Array) -> jax.Array:
    """Join arrays of entries, and pad with zeros to the length of `like`."""
    joined = jnp.concatenate(numbers) if numbers else like
    return jnp.pad(joined, (0, len(like) - len(joined)))
