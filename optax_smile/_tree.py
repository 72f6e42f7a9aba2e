"""Arithmetic on parameter trees that Optax does not have, and checks of a tree."""

import functools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optax_smile import _check, _places, _xla
from optax_smile._types import Tree

# The sampler keeps full-precision parameters: 1 + 1e-3 is 1 in bfloat16 and float16.
PRECISIONS = (jnp.float32, jnp.float64)

# See `isotropic_like`: from this many parameters on, random signs are as good as normal numbers.
SMALLEST_NETWORK = 500
# Largest size of the blocks in which `sums` adds the numbers of a leaf, and least number of blocks.
LARGEST_BLOCK, SMALLEST_NUMBER = 2**7, 2**7
# Number of independent random signs in a sketch.
NUM_SIGNS = 2
# Length of a `fingerprint`.
FINGERPRINT = 2
# Largest number of leaves on several devices that are summed together.
LARGEST_GROUP = 8

MISSING_PARAMS = (
    "You are using a transformation that requires the current value of parameters, "
    "but you are not passing `params` when calling `update`. Pass them, or use"
    " `optax_smile.tracked(sampler)`, whose state holds them."
)


class Matrix(NamedTuple):
    """A linear map between trees of the same shapes, `[entry, entry]` over all their entries."""

    entries: jax.Array

    def times(self, tree: Tree) -> Tree:
        """Multiply a tree by the matrix."""
        return unflat(product(self.entries, flat(tree)), tree)

    def transposed_times(self, tree: Tree) -> Tree:
        """Multiply a tree by the transpose."""
        return unflat(product(flat(tree), self.entries), tree)


# By what a tree is multiplied: entry by entry, by a matrix, or by one.
Scale = Tree | Matrix | None


def flat(tree: Tree) -> jax.Array:
    """Join all leaves, `[entry]`; those that explicit axes spread over devices are gathered."""

    def whole(leaf: jax.Array) -> jax.Array:
        sharding = jax.typeof(leaf).sharding
        if not any(sharding.spec):
            return leaf
        return jax.sharding.reshard(leaf, NamedSharding(sharding.mesh, PartitionSpec()))

    return jnp.concatenate([whole(leaf).ravel() for leaf in jax.tree.leaves(tree)])


def unflat(entries: jax.Array, like: Tree) -> Tree:
    """Undo `flat` for a tree of the shapes, precisions and shardings of another."""
    leaves, structure = jax.tree.flatten(like)
    parts = jnp.split(entries, np.cumsum([leaf.size for leaf in leaves])[:-1])

    def shaped(part: jax.Array, leaf: jax.Array) -> jax.Array:
        return _placed_as(leaf, part.reshape(leaf.shape).astype(leaf.dtype))

    return jax.tree.unflatten(structure, map(shaped, parts, leaves))


def _placed_as(like: Tree, leaf: jax.Array) -> jax.Array:
    """Spread an array over devices as another, if explicit axes do so."""
    sharding = jax.typeof(like).sharding
    return jax.sharding.reshard(leaf, sharding) if any(sharding.spec) else leaf


def product(first: jax.Array, second: jax.Array) -> jax.Array:
    """Multiply matrices or vectors in the full precision of the numbers."""
    return jnp.matmul(first, second, precision="highest")


def scaled(tree: Tree, scale: Scale) -> Tree:
    """Multiply a tree by a scale."""
    if isinstance(scale, Matrix):
        return scale.times(tree)
    return tree if scale is None else jax.tree.map(jnp.multiply, tree, scale)


def size(tree: Tree) -> int:
    """Count the parameters of all leaves, by their global shapes; leaves may be shapes alone."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def is_floating(leaf: Tree) -> bool:
    """Whether a leaf is an array of floating-point or complex numbers."""
    dtype = getattr(leaf, "dtype", None)
    if not isinstance(dtype, np.dtype) or not hasattr(leaf, "shape"):
        return False
    return jnp.issubdtype(dtype, jnp.inexact)


def strong(leaf: Tree) -> Tree:
    """Let the precision of an array count where it was made from a number of Python."""
    return jnp.asarray(leaf, leaf.dtype) if isinstance(leaf, jax.Array) else leaf


def dtype(tree: Tree) -> jnp.dtype:
    """Return the precision of the scalars that go with a tree."""
    return jnp.result_type(*(jax.tree.leaves(tree) or [jnp.float32]))


def total(tree: Tree) -> jax.Array:
    """Sum all entries of all leaves."""
    return jnp.asarray(sum(jnp.sum(leaf) for leaf in jax.tree.leaves(tree)), dtype(tree))


@jax.jit
def all_finite(tree: Tree) -> jax.Array:
    """Whether all numbers of a tree are finite."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def inner(first: Tree, second: Tree) -> jax.Array:
    """Sum first * second over all leaves."""
    return total(jax.tree.map(jnp.multiply, first, second))


def sums(trees: list[Tree]) -> list[jax.Array]:
    """Sum all entries of each of several trees of the same shapes, in one pass over memory."""
    return sums_and_sketch(trees, None, _places.of(trees[0]))[0]


def sums_and_sketch(
    trees: list[Tree], sketched: Tree, places: Tree
) -> tuple[list[jax.Array], Tree]:
    """Sum all entries of each of several trees, and sketch another, in one pass over memory.

    A sketch consists of sums over blocks of each leaf, with random signs that depend only on the
    place: the mean of its square is that of the tree (Alon, Matias and Szegedy 1996). For a tree
    of many blocks the square has a relative error of sqrt(2 / number of sums); a small leaf is its
    own sketch. The sketch is a tree of the same structure, with the sums for each of `NUM_SIGNS`
    signs along the last axis of a large leaf.

    On one device, one reduction over blocks computes all sums of a leaf and stores none of the
    entries: float32 loses 1 % of ten million numbers that are added one after the other. Across
    devices such a reduction would gather its arrays. There each tree is summed by itself, a few
    leaves at a time, since the compiler joins only a few of the sums that cross devices.

    All trees have the same shapes, and their entries the `places`, see `_places`.
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
            sketch = [] if large is None else [jnp.sum(*_split(x)) for x in _signed(large, place)]
        elif leaves[0].size:
            totals, sketch = _block_sums(leaves, large, place)
            parts.append(totals)
        sketches.append(_xla.stack(sketch) / math.sqrt(NUM_SIGNS) if sketch else leaf)
    parts += _shared_sums([leaves for leaves in shared if leaves[0].size])
    joined = [jnp.concatenate(column) for column in zip(*parts, strict=True)]
    totals = list(jnp.sum(jnp.stack(joined), axis=1))
    return totals, None if sketched is None else jax.tree.unflatten(structure, sketches)


def fingerprint(tree: Tree) -> jax.Array:
    """Compute the norm of a tree and its product with fixed random signs, `[2]`.

    The product is linear in the tree. The signs depend only on the place inside a leaf, so that the
    contribution of a leaf does not depend on the others.
    """
    marked = signed(tree, _places.of(tree))
    return fingerprint_of(*sums([jax.tree.map(jnp.square, tree), marked]))


def fingerprint_of(square: jax.Array, product: jax.Array) -> jax.Array:
    """Compute the fingerprint from the two sums of a tree."""
    return jnp.stack([jnp.sqrt(square), product])


def signed(tree: Tree, places: Tree) -> Tree:
    """Multiply every entry by a random sign, the same in every call."""
    return jax.tree.map(lambda leaf, place: _signed(leaf, place)[0], tree, places)


def empty_sketch(tree: Tree) -> Tree:
    """Sketch of zeros in the place of a tree, sharded as that of its leaves will be."""

    def zeros(leaf, like):
        if leaf.shape == like.shape:
            return jnp.zeros_like(leaf)
        return _placed_as(like, jnp.zeros(like.shape, like.dtype))

    leaves = jax.tree.leaves(tree)
    if any(AxisType.Manual in jax.typeof(leaf).sharding.mesh.axis_types for leaf in leaves):
        # Inside a `shard_map` the zeros must vary over its axes as the leaves do.
        empty = jax.tree.map(jnp.zeros_like, tree)
        return sums_and_sketch([empty], empty, _places.of(tree))[1]
    places = _places.of(tree)
    sketch = jax.eval_shape(lambda x: sums_and_sketch([x], x, places)[1], tree) if leaves else tree
    return jax.tree.map(zeros, tree, sketch)


def distance_square(first: Tree, second: Tree) -> jax.Array:
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
    signed = () if sketched is None else _signed(sketched, place)
    blocks, (axes, *_) = zip(*map(_split, (*leaves, *signed)), strict=True)
    totals = reduce(jnp.add, blocks, axes)
    sums, sketch = [jnp.ravel(x) for x in totals[: len(leaves)]], totals[len(leaves) :]
    # Blocks of blocks, so that there is little to join.
    blocks, (axes, *_) = zip(*map(_split, sums), strict=True)
    return [jnp.ravel(x) for x in reduce(jnp.add, blocks, axes)], sketch


def reduce(
    function: Callable, arrays: Sequence[jax.Array], axes: tuple[int, ...]
) -> list[jax.Array]:
    """Reduce arrays of one shape over some axes in one pass; `function` keeps 0 as it is."""
    zeros = tuple(jnp.zeros((), x.dtype) for x in arrays)
    return list(jax.lax.reduce(tuple(arrays), zeros, _combine(function), axes))


@functools.cache
def _combine(function: Callable) -> Callable:
    """Apply a function to each of several numbers; JAX compiles once for the same object."""
    return functools.partial(jax.tree.map, function)


def _signed(leaf: jax.Array, place: _places.Place) -> list[jax.Array]:
    """Multiply by `NUM_SIGNS` random signs, which depend only on the place inside a leaf."""
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


def count(counter: jax.Array, more: jax.Array | bool = True) -> jax.Array:
    """Add one to a counter where `more`; it stops at its largest value instead of wrapping."""
    return jnp.where(more, optax.safe_increment(counter), counter)


def map_sampled(function: Callable, sampled: Tree, params: Tree) -> Tree:
    """Map over the leaves that the sampler sees, and leave all others of `params` unchanged.

    Leaves are matched by the names on their paths.
    """
    seen = _by_names(sampled)

    def leaf(path, x):
        if (at := _names(path)) not in seen:
            return x
        move = seen.pop(at)
        if jnp.shape(x) != jnp.shape(move) or getattr(x, "dtype", None) != move.dtype:
            place = jax.tree_util.keystr(path)
            rule = f"a tree like the one given to `init`, with {_check.show(move)} at {place}"
            _check.fail("last_accepted", "params", rule, _check.show(x))
        return function(move, x)

    mapped = jax.tree_util.tree_map_with_path(leaf, params)
    if seen:
        rule = "a tree with the leaves of the parameters given to `init`"
        missing = ", ".join(name(zip(at, at, strict=True)) for at in seen)
        _check.fail("last_accepted", "params", rule, f"one without {_check.cut(missing)}")
    return mapped


def without_variables(tree: Tree) -> Tree:
    """Replace variables of Flax nnx by their arrays; there are none before it is imported."""
    return getattr(sys.modules.get("flax.nnx"), "as_pure", lambda same: same)(tree)


def leaves_like(sampled: Tree, tree: Tree) -> list[Tree] | None:
    """Return the leaves of a tree that the sampler sees, matched as by `map_sampled`.

    None if one of them is missing or has another shape, as behind `optax.flatten`.
    """
    leaves = _by_names(tree)
    pairs = [(leaf, leaves.get(at)) for at, leaf in _by_names(sampled).items()]
    if any(leaf is None or jnp.shape(leaf) != jnp.shape(like) for like, leaf in pairs):
        return None
    return [leaf for _, leaf in pairs]


def _by_names(tree: Tree) -> dict[tuple[str | int, ...], Tree]:
    return {_names(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _names(path: Iterable[object]) -> tuple[str | int, ...]:
    return tuple(entry(key)[1] for key in path)


def entry(key: object) -> list[str | int]:
    """Return the kind (`key`, `index` or `attribute`) and the entry of one step of a path."""
    for kind, attribute in (("key", "key"), ("index", "idx"), ("attribute", "name")):
        if hasattr(key, attribute):
            value = getattr(key, attribute)
            return [kind, value if isinstance(value, (str, int)) else str(value)]
    return ["key", str(key)]


def name(path: Iterable[Iterable[str | int]], separator: str = "/") -> str:
    """Join the entries of a path, pairs of kind and entry, to a name that no other path has.

    Inside an entry, `~`, `/` and the separator are written `~0`, `~1` and `~2`.
    """
    codes = {char: f"~{number}" for number, char in enumerate(dict.fromkeys("~/" + separator))}
    return separator.join(str(entry).translate(str.maketrans(codes)) for _, entry in path)


def normal_like(key: jax.Array, tree: Tree) -> Tree:
    """Draw a standard normal tree of the shapes and precision of `tree`."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(key, len(leaves))

    def draw(key: jax.Array, leaf: jax.Array) -> jax.Array:
        sharding = jax.typeof(leaf).sharding
        if any(sharding.spec) and not isinstance(leaf, jax.core.Tracer):
            # Explicit axes outside `jit`, where JAX draws only on the device of the key.
            return jax.device_put(jax.random.normal(key, leaf.shape, leaf.dtype), leaf.sharding)
        spread = {"out_sharding": sharding} if any(sharding.spec) else {}
        return jax.random.normal(key, leaf.shape, leaf.dtype, **spread)

    return jax.tree.unflatten(structure, [draw(*pair) for pair in zip(keys, leaves, strict=True)])


def isotropic_like(key: jax.Array, tree: Tree, places: Tree) -> Tree:
    """Draw a tree of independent entries with mean 0 and variance 1.

    Networks get random signs, which are computed from their place where they are used: normal
    numbers would cost as much as the rest of a call. Trees of a few parameters get normal numbers,
    since there the corners of a cube are not like a sphere.
    """
    if not has_signs(tree):
        return normal_like(key, tree)
    words = jax.random.key_data(key).reshape(-1)

    def signs(leaf: jax.Array, place: _places.Place) -> jax.Array:
        return _signs_like(place.through(leaf, words[0]), words[1], leaf)

    return jax.tree.map(signs, tree, places)


def has_signs(tree: Tree) -> bool:
    """Whether `isotropic_like` draws signs, whose square is one."""
    return size(tree) >= SMALLEST_NETWORK


def _signs_like(bits: jax.Array, second: jax.Array, leaf: jax.Array) -> jax.Array:
    """Draw random signs by a hash of a random number and the numbers of the entries.

    Source: Wellons 2018, "triple32", a mixing of 32 bits by three multiplications. With two
    ("lowbias32") signs at some distances were correlated by .001.
    """
    bits = bits ^ second
    bits = (bits ^ (bits >> 17)) * np.uint32(0xED5AD4BB)
    bits = (bits ^ (bits >> 11)) * np.uint32(0xAC4C1B51)
    bits = (bits ^ (bits >> 15)) * np.uint32(0x31848BAB)
    one = jnp.ones((), leaf.dtype)
    return jnp.where(bits >> 31 == 0, one, -one)


def check_params(where: str, params: Tree, smallest: int):
    """Require a tree of float32 or float64 leaves with at least `smallest` parameters.

    A node without leaves that is no container passes: Optax maps over a state with such a
    placeholder.
    """
    containers = (Mapping, list, tuple, type(None))
    if not isinstance(params, containers) and not jax.tree.leaves(params):
        return
    rule = "a tree of float32 or float64 arrays"
    advice = (
        "Keep the sampled parameters in float32 and cast inside the model. Exclude leaves that are"
        " not sampled with optax.partition and optax.set_to_zero."
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not hasattr(leaf, "dtype") or leaf.dtype not in PRECISIONS:
            got = getattr(leaf, "dtype", type(leaf).__name__)
            at = jax.tree_util.keystr(path) or "the only leaf"
            _check.fail(where, "params", rule, f"{got} at {at}", advice)
    if (number := size(params)) < smallest:
        _check.fail(where, "params", f"a tree of at least {smallest} parameters", number)


def check_gradients(where: str, updates: Tree, params: Tree, name: str):
    """Require gradients of these parameters, of whatever floating-point precision."""
    check_alike(where, "updates", updates, params, name)
    for path, leaf in jax.tree_util.tree_leaves_with_path(updates):
        if not jnp.issubdtype(getattr(leaf, "dtype", type(leaf)), jnp.floating):
            got = f"{_check.show(leaf)} at {jax.tree_util.keystr(path) or 'the only leaf'}"
            _check.fail(where, "updates", "a tree of floating-point gradients", got)


def check_alike(where: str, argument: str, tree: Tree, expected: Tree, expected_name: str):
    """Require the structure and the leaf shapes of `expected`."""
    own, structure = jax.tree.structure(tree), jax.tree.structure(expected)
    if own != structure:
        rule = f"a tree of the structure of {expected_name}, {structure}"
        _check.fail(where, argument, rule, own)
    shapes = jax.tree_util.tree_leaves_with_path(expected)
    for (path, want), leaf in zip(shapes, jax.tree.leaves(tree), strict=True):
        if np.shape(leaf) != np.shape(want):
            at = jax.tree_util.keystr(path) or "the only leaf"
            rule = f"of shape {np.shape(want)} at {at}, as {expected_name}"
            _check.fail(where, argument, rule, np.shape(leaf))
