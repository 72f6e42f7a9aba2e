"""Arithmetic on parameter trees that Optax does not have, and the checks of a tree."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _check

# The sampler keeps full-precision parameters: 1 + 1e-3 is 1 in bfloat16 and float16.
PRECISIONS = (jnp.float32, jnp.float64)

# See `isotropic_like`: random signs are as good as normal numbers from so many parameters on, and
# leaves of no more than so many are drawn together.
SMALLEST_NETWORK = 500
SMALL_LEAF = 2**14
# Of a random number.
BITS = 32

MISSING_PARAMS = (
    "You are using a transformation that requires the current value of parameters, "
    "but you are not passing `params` when calling `update`."
)


def size(tree: Any) -> int:
    """Count the scalar parameters of all leaves (global shapes under sharding)."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def dtype(tree: Any) -> jnp.dtype:
    """Return the precision of the scalars that go with a tree."""
    return jnp.result_type(*(jax.tree.leaves(tree) or [jnp.float32]))


def total(tree: Any) -> jax.Array:
    """Sum all entries of all leaves."""
    return jnp.asarray(sum(jnp.sum(leaf) for leaf in jax.tree.leaves(tree)), dtype(tree))


def inner(first: Any, second: Any) -> jax.Array:
    """Sum first * second over all leaves."""
    return total(jax.tree.map(jnp.multiply, first, second))


def count(counter: jax.Array, more: jax.Array | bool = True) -> jax.Array:
    """Add one to a counter where `more`; at its largest value it stops instead of wrapping."""
    return jnp.where(more, optax.safe_increment(counter), counter)


def where(condition: jax.Array, yes: Any, no: Any) -> Any:
    """Select between two trees with one boolean scalar."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), yes, no)


def map_sampled(function: Callable, sampled: Any, params: Any) -> Any:
    """Map over the leaves that the sampler sees; the others, masked by Optax, stay as they are."""

    def is_masked(node):
        return isinstance(node, optax.MaskedNode)

    def leaf(seen, x):
        return x if is_masked(seen) else function(seen, x)

    return jax.tree.map(leaf, sampled, params, is_leaf=is_masked)


def local_blocks(tree: Any) -> Iterator[tuple[int, int, list[np.ndarray]]]:
    """Bring the chains that this process holds to the host, each from one of its devices.

    Args:
        tree: arrays `[chain, ...]`, sharded over the chains alone if they lie on several processes.

    Yields:
        First and last chain of a block, and its leaves `[chain of the block, ...]`.
    """
    leaves = jax.tree.leaves(tree)
    if all(getattr(leaf, "is_fully_addressable", True) for leaf in leaves):
        yield 0, leaves[0].shape[0] - 1, [np.asarray(leaf) for leaf in leaves]
        return
    for shards in zip(*(leaf.addressable_shards for leaf in leaves), strict=True):
        if shards[0].replica_id == 0:
            first, stop, _ = shards[0].index[0].indices(leaves[0].shape[0])
            yield first, stop - 1, [np.asarray(shard.data) for shard in shards]


def local(tree: Any) -> Any:
    """Bring the chains that this process holds to the host `[chain of this process, ...]`.

    Where chains have copies in several processes, one of them holds them and the others none.
    """
    leaves, structure = jax.tree.flatten(tree)
    none = [np.empty((0, *leaf.shape[1:]), leaf.dtype) for leaf in leaves]
    columns = zip(none, *(block for _, _, block in local_blocks(tree)), strict=True)
    return jax.tree.unflatten(structure, [np.concatenate(column) for column in columns])


def normal_like(key: jax.Array, tree: Any) -> Any:
    """Draw a standard normal tree of the shapes and precision of `tree`."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(key, len(leaves))
    draws = [
        jax.random.normal(k, leaf.shape, leaf.dtype, out_sharding=jax.typeof(leaf).sharding)
        for k, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, draws)


def isotropic_like(key: jax.Array, tree: Any) -> Any:
    """Draw a tree of independent entries with mean 0 and variance 1.

    Networks get random signs, 32 from one random number: normal numbers would cost a small network
    a third of a step. Those of small leaves are drawn together. Trees of a few parameters, in which
    the corners of a cube are not like a sphere, get normal numbers.
    """
    if size(tree) < SMALLEST_NETWORK:
        return normal_like(key, tree)
    leaves, structure = jax.tree.flatten(tree)
    num_large = sum(leaf.size > SMALL_LEAF for leaf in leaves)
    small_key, *large_keys = jax.random.split(key, num_large + 1) if num_large else [key]
    small = jnp.zeros(sum(leaf.size for leaf in leaves if leaf.size <= SMALL_LEAF), dtype(tree))
    small, start, drawn = _signs_like(small_key, small), 0, []
    for leaf in leaves:
        if leaf.size > SMALL_LEAF:
            drawn.append(_signs_like(large_keys.pop(), leaf))
            continue
        sharding = jax.typeof(leaf).sharding
        entries = small[start : start + leaf.size].astype(leaf.dtype)
        drawn.append(entries.reshape(leaf.shape, out_sharding=sharding))
        start += leaf.size
    return jax.tree.unflatten(structure, drawn)


def _signs_like(key: jax.Array, leaf: jax.Array) -> jax.Array:
    """Draw random signs; the last axis comes from the bits of words, the others may be sharded."""
    sharding = jax.typeof(leaf).sharding
    of_words = sharding.update(spec=jax.P(*sharding.spec[:-1], None))
    shape = (*leaf.shape[:-1], -(-leaf.shape[-1] // BITS))
    words = jax.random.bits(key, shape, jnp.uint32, out_sharding=of_words)
    place = jnp.arange(BITS, dtype=jnp.uint32).reshape(*[1] * leaf.ndim, BITS)
    bits = jnp.right_shift(words[..., None], place) & 1
    bits = bits.reshape(*shape[:-1], shape[-1] * BITS)[..., : leaf.shape[-1]]
    if not sharding.mesh.empty:
        bits = jax.sharding.reshard(bits, sharding)
    return 2 * bits.astype(leaf.dtype) - 1


def check_params(where: str, params: Any, smallest: int):
    """Require a tree of float32 or float64 leaves with at least `smallest` parameters.

    A leafless node that is no container passes: Optax maps over a state with such a placeholder.

    Raises:
        ValueError: naming the path of the leaf that does not fit.
    """
    containers = (dict, list, tuple, type(None))
    if not isinstance(params, containers) and not jax.tree.leaves(params):
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not hasattr(leaf, "dtype") or leaf.dtype not in PRECISIONS:
            name = jax.tree_util.keystr(path) or "the only leaf"
            got = getattr(leaf, "dtype", type(leaf).__name__)
            _check.fail(
                where,
                "params",
                "a tree of float32 or float64 arrays",
                f"{got} at {name}",
                "Keep the sampled parameters in float32 and cast inside the model; take the"
                " leaves that are not sampled out with optax.partition and optax.set_to_zero.",
            )
    if size(params) < smallest:
        _check.fail(where, "params", f"a tree of at least {smallest} parameters", f"{size(params)}")


def check_alike(where: str, argument: str, tree: Any, expected: Any, expected_name: str):
    """Require the structure and the leaf shapes of `expected`."""
    if jax.tree.structure(tree) != jax.tree.structure(expected):
        _check.fail(
            where,
            argument,
            f"a tree of the structure of {expected_name}, {jax.tree.structure(expected)}",
            jax.tree.structure(tree),
        )
    shapes = jax.tree_util.tree_leaves_with_path(expected)
    for (path, want), leaf in zip(shapes, jax.tree.leaves(tree), strict=True):
        if jnp.shape(leaf) != jnp.shape(want):
            _check.fail(
                where,
                argument,
                f"of shape {jnp.shape(want)} at {jax.tree_util.keystr(path)}, as {expected_name}",
                jnp.shape(leaf),
            )
