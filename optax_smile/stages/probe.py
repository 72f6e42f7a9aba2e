"""Whether the parameters arrive where the sampler sent them, from a few entries of each leaf."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

from optax_smile import _check, _joined, _tree
from optax_smile._types import Tree

# Numbers of a leaf that are read; all numbers of a smaller leaf.
MOST_READ = 256
# A masked sum reads one number of a leaf on several devices; of at most this many such leaves, up
# to this size.
MOST_SHARED, LARGEST_SHARED = 16, 2**16
# Rounding of an addition, in units in the last place.
ROUNDING = 4
# Altered calls are averaged over `WINDOW` calls. More than one in a hundred, and at least three,
# are no accident such as a restored checkpoint.
WINDOW, MOST_ALTERED, LEAST_ALTERED = 512, 0.01, 3


class ProbeState(NamedTuple):
    """The entries that are read, and how often they were altered.

    Attributes:
        start: their values in the last call, `[entry]`; 0 where it read none.
        is_known: whether the next call can compare them, `[entry]`; False before the first one and
            after a rejected step.
        num_altered, is_altered: see `state.Stats`.
        num_compared: calls that could compare them, up to `WINDOW`, int32.
        altered_share: share of altered ones among these, later their moving average.
    """

    start: jax.Array
    is_known: jax.Array
    num_altered: jax.Array
    num_compared: jax.Array
    altered_share: jax.Array
    is_altered: jax.Array

    def is_made(self) -> jax.Array:
        """Always true but opaque to XLA; orders writes after the probe's reads."""
        return self.num_altered >= 0


def init(params: optax.Params) -> ProbeState:
    """Begin before the first call."""
    leaves = jax.tree.leaves(params)
    if any(AxisType.Manual in jax.typeof(leaf).sharding.mesh.axis_types for leaf in leaves):
        # Inside a `shard_map` the zeros must vary over its axes, as the leaves do.
        start = jnp.zeros_like(_in_one(entries(params)))
    else:
        # The leaves may be shapes alone.
        like = jax.eval_shape(lambda tree: _in_one(entries(tree)), params)
        start = jnp.zeros(like.shape, like.dtype)
    return ProbeState(
        start=start,
        is_known=jnp.zeros_like(start, bool),
        num_altered=jnp.zeros((), jnp.int32),
        num_compared=jnp.zeros((), jnp.int32),
        altered_share=jnp.zeros((), _tree.dtype(params)),
        is_altered=jnp.zeros((), bool),
    )


def look(
    state: ProbeState, params: optax.Params, moved: list[jax.Array], reject: jax.Array
) -> ProbeState:
    """Compare the parameters of the loop with the values that the last call sent.

    `moved` has the entries of the last displacement, from the state. If the call goes back to where
    the step began, `reject` is true.
    """
    if state.is_known.dtype != bool:
        rule, got = "what `init` or `update` returned", "one whose booleans are numbers"
        remedy = "`reset_state=True` of `optax.lookahead` and `sam` makes draws wrong."
        _check.fail("update", "state", rule, got, remedy)
    found = entries(params)
    rounding = ROUNDING * max((float(jnp.finfo(x.dtype).eps) for x in found), default=0.0)
    here, step = _in_one(found), _in_one(moved)
    is_read = np.concatenate([np.zeros(0, bool), *(is_read for _, is_read in _read(params))])
    known = state.is_known & is_read
    off = jnp.abs(here - (state.start + step))
    off = jnp.where(known & jnp.isfinite(off), off, 0)
    off = jnp.where(off > rounding * jnp.maximum(jnp.abs(here), jnp.abs(state.start)), off, 0)
    numbers = known.astype(off.dtype), off, jnp.abs(step)
    compares, farthest, longest = _tree.reduce(jnp.maximum, numbers, (0,))
    # A short step may be the difference of two long ones.
    compares, altered = compares > 0, farthest > rounding * longest
    num_compared = jnp.minimum(state.num_compared + compares, WINDOW)
    share, number = state.altered_share, num_compared.astype(state.altered_share.dtype)
    change = (altered - share) / jnp.maximum(number, 1)
    share = share + jnp.where(compares, change, 0)
    # Minus half a call: the number is a rounded product.
    is_altered = (share * number > LEAST_ALTERED - 0.5) & (share > MOST_ALTERED)
    return ProbeState(
        start=jnp.where(reject, 0, here),
        is_known=jnp.logical_and(is_read, ~reject),
        num_altered=_tree.count(state.num_altered, altered),
        num_compared=num_compared,
        altered_share=share,
        is_altered=is_altered,
    )


def _read(tree: Tree) -> list[tuple[jax.Array, np.ndarray]]:
    """Leaves, and which numbers on the grid of each are read, in the order of its axes."""
    if isinstance(tree, _joined.Joined):
        small = tree.joined, np.ones(len(_numbers(tree.layout)), bool)
        return [small, *_read(tree.apart)]
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.size]
    # Small ones first, as in a joined tree.
    pairs = zip(_joined.small(leaves), leaves, strict=True)
    leaves = [leaf for _, leaf in sorted(pairs, key=lambda pair: not pair[0])]
    shared = [i for i, leaf in enumerate(leaves) if _tree.is_shared(leaf)]
    number = min(len(shared), MOST_SHARED)
    few = {shared[i * len(shared) // number] for i in range(number)}
    found = []
    for i, leaf in enumerate(leaves):
        numbers = [number for number, _ in _grid(leaf.shape)]
        is_read = np.full(numbers, i not in shared)
        if i in few and leaf.size <= LARGEST_SHARED:
            is_read[tuple(number // 2 for number in numbers)] = True
        found.append((leaf, is_read.reshape(-1)))
    return found


def entries(tree: Tree) -> list[jax.Array]:
    """Read numbers of the leaves on a grid; 0 in the place of those that are not read."""
    if isinstance(tree, _joined.Joined):
        return [tree.joined[_numbers(tree.layout)], *entries(tree.apart)]
    return [
        _on_grid(leaf) if is_read.all() else _single(leaf, is_read) for leaf, is_read in _read(tree)
    ]


def _in_one(numbers: list[jax.Array]) -> jax.Array:
    return jnp.concatenate(numbers) if numbers else jnp.zeros(0)


def _grid(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Number and distance of the places that are read along each axis, beginning with the first."""
    found, room = [(1, 1)] * len(shape), MOST_READ
    for done, axis in enumerate(sorted(range(len(shape)), key=lambda axis: shape[axis])):
        # The longest axis gets all remaining places; a root is rounded down.
        number = min(shape[axis], int(room ** (1 / (len(shape) - done)) + 1e-6))
        found[axis] = number, max(1, (shape[axis] - 1) // max(1, number - 1))
        room //= number
    return found


def _numbers(layout: _joined.Layout) -> np.ndarray:
    """Places of the grids of joined leaves in their array."""
    found, first = [], 0
    for shape, size, is_small in zip(layout.shapes, layout.sizes, layout.is_small, strict=True):
        if is_small:
            axes = [np.arange(number) * stride for number, stride in _grid(shape)]
            places = np.ravel_multi_index(np.ix_(*axes), shape) if shape else np.zeros(1, int)
            found.append(first + np.ravel(places))
            first += size
    return np.concatenate(found)


def _on_grid(leaf: jax.Array) -> jax.Array:
    """All numbers on the grid."""
    grid = _grid(leaf.shape)
    stops = [(number - 1) * stride + 1 for number, stride in grid]
    strides = [stride for _, stride in grid]
    return jax.lax.slice(leaf, [0] * leaf.ndim, stops, strides).reshape(-1)


def _single(leaf: jax.Array, is_read: np.ndarray) -> jax.Array:
    """One number by a masked sum, or none."""
    if not is_read.any():
        return jnp.zeros(len(is_read), leaf.dtype)
    for axis, (number, stride) in enumerate(_grid(leaf.shape)):
        places = jax.lax.broadcasted_iota(jnp.int32, leaf.shape, axis)
        leaf = jnp.where(places == number // 2 * stride, leaf, 0)
    return jnp.where(is_read, jnp.sum(leaf), 0)
