"""Sums over all entries of trees, in one pass over memory, and sketches of a tree."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NewType

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

from optax_smile import _places, _tree, _xla
from optax_smile._places import Places
from optax_smile._types import T

# Largest block size when `sums` adds the numbers of a leaf, and smallest number of blocks.
LARGEST_BLOCK, SMALLEST_NUMBER = 2**7, 2**7
# Number of independent random signs in a sketch.
NUM_SIGNS = 2
# Length of a `fingerprint`.
FINGERPRINT = 2
# Largest number of leaves on several devices that are summed together.
LARGEST_GROUP = 8
# A tree of arrays, one per leaf, made by `sums_and_sketch`.
Sketch = NewType("Sketch", object)
Combine = Callable[[jax.Array, jax.Array], jax.Array]


def sums(trees: Sequence[optax.Params]) -> list[jax.Array]:
    """Sum all entries of each of several trees of the same shapes, in one pass over memory."""
    return sums_and_sketch(trees, None, _places.of(trees[0]))[0]


def sums_and_sketch(
    trees: Sequence[optax.Params], sketched: optax.Params | None, places: Places
) -> tuple[list[jax.Array], Sketch]:
    """Sum all entries of each of several trees, and sketch another, in one pass over memory.

    A sketch consists of sums over blocks of each leaf, with random signs that depend only on the
    position. The expected squared norm of the sketch is that of the tree (Alon, Matias and Szegedy
    1996). For a tree of many blocks the square has a relative error of sqrt(2 / number of sums); a
    small leaf is its own sketch. The sketch is a tree of the same structure, with the sums for each
    of `NUM_SIGNS` signs along the last axis of a large leaf.

    On one device, one reduction over blocks computes all sums of a leaf and stores no intermediate
    entries. Blocks are needed: a sequential float32 sum of ten million numbers loses 1 %. Across
    devices such a reduction would gather its arrays. There each tree is summed separately, a few
    leaves at a time, since the compiler merges only a few of the sums that cross devices.

    All trees have the same shapes; `places` are the positions of their entries, see `_places`.
    """
    columns = list(zip(*(jax.tree.leaves(tree) for tree in trees), strict=True))
    signed, structure = jax.tree.flatten(sketched)
    signed = signed or [None] * len(columns)
    parts, shared, sketches = [], [], []
    for leaves, leaf, place in zip(columns, signed, jax.tree.leaves(places), strict=True):
        large = None if place.is_small else leaf
        sketch = []
        if is_shared(leaves[0]):
            shared.append(leaves)
            sketch = (
                [] if large is None else [jnp.sum(*_split(x)) for x in _fixed_signs(large, place)]
            )
        elif leaves[0].size:
            totals, sketch = _block_sums(leaves, large, place)
            parts.append(totals)
        sketches.append(_xla.stack(sketch) / math.sqrt(NUM_SIGNS) if sketch else leaf)
    parts += _shared_sums([leaves for leaves in shared if leaves[0].size])
    joined = [jnp.concatenate(column) for column in zip(*parts, strict=True)]
    totals = list(jnp.sum(jnp.stack(joined), axis=1))
    return totals, Sketch(None if sketched is None else jax.tree.unflatten(structure, sketches))


def fingerprint(tree: optax.Updates) -> jax.Array:
    """Compute the norm of a tree and its product with fixed random signs, `[2]`.

    The product is linear in the tree. The signs depend only on the position inside a leaf, so the
    contribution of a leaf does not depend on the other leaves.
    """
    marked = signed(tree, _places.of(tree))
    return fingerprint_of(*sums([jax.tree.map(jnp.square, tree), marked]))


def fingerprint_of(square: jax.Array, product: jax.Array) -> jax.Array:
    """Compute the fingerprint from the two sums of a tree."""
    return jnp.stack([jnp.sqrt(square), product])


def signed(tree: T, places: Places) -> T:
    """Multiply every entry by a random sign, the same in every call."""
    return jax.tree.map(lambda leaf, place: _fixed_signs(leaf, place)[0], tree, places)


def empty_sketch(tree: optax.Params) -> Sketch:
    """Make a sketch of zeros for a tree, with the sharding that its sketch will have."""

    def zeros(leaf, like):
        if leaf.shape == like.shape:
            return jnp.zeros_like(leaf)
        return _tree.placed_as(like, jnp.zeros(like.shape, like.dtype))

    leaves = jax.tree.leaves(tree)
    if any(AxisType.Manual in jax.typeof(leaf).sharding.mesh.axis_types for leaf in leaves):
        # Inside a `shard_map`, the zeros must vary over the same axes as the leaves.
        empty = jax.tree.map(jnp.zeros_like, tree)
        return sums_and_sketch([empty], empty, _places.of(tree))[1]
    places = _places.of(tree)
    sketch = jax.eval_shape(lambda x: sums_and_sketch([x], x, places)[1], tree) if leaves else tree
    return jax.tree.map(zeros, tree, sketch)


def distance_square(first: Sketch, second: Sketch) -> jax.Array:
    """Estimate |x - y|^2 from the sketches of two trees x and y."""
    leaves = jax.tree.leaves(jax.tree.map(lambda x, y: jnp.square(x - y), first, second))
    parts = [jnp.sum(leaf)[None] for leaf in leaves if not is_shared(leaf)]
    parts += [part for (part,) in _shared_sums([(leaf,) for leaf in leaves if is_shared(leaf)])]
    return jnp.sum(jnp.concatenate(parts))


def is_shared(leaf: jax.Array) -> bool:
    """Whether an array may lie on several devices, as far as a compiled program knows."""
    mesh = jax.typeof(leaf).sharding.mesh
    axes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return any(size > 1 and kind != AxisType.Manual for size, kind in axes)


def _blocks(shape: tuple[int, ...]) -> tuple[tuple[int, ...], int, int, tuple[int, ...]]:
    """Split a leaf into blocks of entries that lie side by side, along its axes.

    Returns:
        Outer axes, length of the axis that is split, length of its pieces, and inner axes that
        belong to a block as a whole.
    """
    most = min(LARGEST_BLOCK, max(1, math.prod(shape) // SMALLEST_NUMBER))
    *outer, long = (1, *shape)
    inner: list[int] = []
    while outer and long * math.prod(inner) <= most:
        inner.insert(0, long)
        long = outer.pop()
    room = most // math.prod(inner)
    # A piece that divides the axis needs no padding.
    piece = next((n for n in range(room, room // 2, -1) if long % n == 0), room)
    return tuple(outer), long, piece, tuple(inner)


def _split(leaf: jax.Array) -> tuple[jax.Array, tuple[int, ...]]:
    """Reshape a leaf so that blocks have their own axes, and return these axes."""
    outer, long, piece, inner = _blocks(leaf.shape)
    leaf = leaf.reshape((*outer, long, *inner))
    if missing := -long % piece:
        widths = [(0, 0)] * leaf.ndim
        widths[len(outer)] = (0, missing)
        leaf = jnp.pad(leaf, widths)
    leaf = leaf.reshape((*outer, -(-long // piece), piece, *inner))
    return leaf, tuple(range(len(outer) + 1, leaf.ndim))


def _block_sums(
    leaves: tuple[jax.Array, ...], sketched: jax.Array | None, place: _places.Place
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Sum blocks of arrays of one shape, `[block]` for each of them, and sketch another array."""
    if leaves[0].size < SMALLEST_NUMBER:
        return reduce(jnp.add, [jnp.ravel(x)[None] for x in leaves], (1,)), []
    signed = () if sketched is None else _fixed_signs(sketched, place)
    blocks, (axes, *_) = zip(*map(_split, (*leaves, *signed)), strict=True)
    totals = reduce(jnp.add, blocks, axes)
    sums, sketch = [jnp.ravel(x) for x in totals[: len(leaves)]], totals[len(leaves) :]
    # Sum blocks of blocks, so that the last sum is short.
    blocks, (axes, *_) = zip(*map(_split, sums), strict=True)
    return [jnp.ravel(x) for x in reduce(jnp.add, blocks, axes)], sketch


def reduce(
    function: Combine, arrays: Sequence[jax.Array], axes: tuple[int, ...]
) -> list[jax.Array]:
    """Reduce arrays of one shape over some axes in one pass; `function` keeps 0 as it is."""
    zeros = tuple(jnp.zeros((), x.dtype) for x in arrays)
    return list(jax.lax.reduce(tuple(arrays), zeros, _combine(function), axes))


@functools.cache
def _combine(function: Combine) -> Callable[..., tuple[jax.Array, ...]]:
    """Apply a function to each of several numbers; JAX compiles once for the same object."""
    return functools.partial(jax.tree.map, function)


def _fixed_signs(leaf: jax.Array, place: _places.Place) -> list[jax.Array]:
    """Multiply by `NUM_SIGNS` random signs, which depend only on the position inside a leaf."""
    bits = place.inside(leaf) * np.uint32(0x9E3779B9)
    bits = (bits ^ (bits >> 15)) * np.uint32(0x2C1B3C6D)
    bits = bits ^ (bits >> 13)
    return [jnp.where((bits >> (31 - sign)) % 2 == 0, leaf, -leaf) for sign in range(NUM_SIGNS)]


def _shared_sums(columns: list[tuple[jax.Array, ...]]) -> list[list[jax.Array]]:
    """Sum arrays that may lie on several devices, a few of one shape and sharding at a time."""
    alike: dict[object, list[tuple[jax.Array, ...]]] = {}
    for leaves in columns:
        alike.setdefault((leaves[0].shape, jax.typeof(leaves[0]).sharding), []).append(leaves)
    groups = [
        group[first : first + LARGEST_GROUP]
        for group in alike.values()
        for first in range(0, len(group), LARGEST_GROUP)
    ]
    return [
        [jnp.sum(functools.reduce(jnp.add, terms))[None] for terms in zip(*group, strict=True)]
        for group in groups
    ]
