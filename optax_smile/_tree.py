"""Arithmetic on parameter trees that Optax does not have."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from optax_smile._types import T


class Matrix(NamedTuple):
    """A linear map between trees of the same shapes, `[entry, entry]` over all their entries."""

    entries: jax.Array

    def times(self, tree: T) -> T:
        """Multiply a tree by the matrix."""
        return unflat(product(self.entries, flat(tree)), tree)

    def transposed_times(self, tree: T) -> T:
        """Multiply a tree by the transpose."""
        return unflat(product(flat(tree), self.entries), tree)


# What multiplies a tree: a tree (entry by entry), a matrix, or nothing.
Scale = optax.Params | Matrix | None


def flat(tree: object) -> jax.Array:
    """Join all leaves, `[entry]`; leaves sharded over explicit axes are gathered."""

    def whole(leaf: jax.Array) -> jax.Array:
        sharding = jax.typeof(leaf).sharding
        if not any(sharding.spec):
            return leaf
        return jax.sharding.reshard(leaf, NamedSharding(sharding.mesh, PartitionSpec()))

    return jnp.concatenate([whole(leaf).ravel() for leaf in jax.tree.leaves(tree)])


def unflat(entries: jax.Array, like: T) -> T:
    """Undo `flat` for a tree of the shapes, precisions and shardings of another."""
    leaves, structure = jax.tree.flatten(like)
    parts = jnp.split(entries, np.cumsum([leaf.size for leaf in leaves])[:-1])

    def shaped(part: jax.Array, leaf: jax.Array) -> jax.Array:
        return placed_as(leaf, part.reshape(leaf.shape).astype(leaf.dtype))

    return jax.tree.unflatten(structure, map(shaped, parts, leaves))


def placed_as(like: object, leaf: jax.Array) -> jax.Array:
    """Shard an array like another, if that one is sharded over explicit axes."""
    sharding = jax.typeof(like).sharding
    return jax.sharding.reshard(leaf, sharding) if any(sharding.spec) else leaf


def product(first: jax.Array, second: jax.Array) -> jax.Array:
    """Multiply matrices or vectors in the full precision of the numbers."""
    return jnp.matmul(first, second, precision="highest")


def scaled(tree: T, scale: Scale) -> T:
    """Multiply a tree by a scale."""
    if isinstance(scale, Matrix):
        return scale.times(tree)
    return tree if scale is None else jax.tree.map(jnp.multiply, tree, scale)


def size(tree: object) -> int:
    """Count the parameters of all leaves, by their global shapes; leaves may be shapes alone."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def is_floating(leaf: object) -> bool:
    """Whether a leaf is an array of floating-point or complex numbers."""
    dtype = getattr(leaf, "dtype", None)
    if not isinstance(dtype, np.dtype) or not hasattr(leaf, "shape"):
        return False
    return jnp.issubdtype(dtype, jnp.inexact)


def strong(leaf: object) -> object:
    """Make the dtype of an array that was made from a Python number strong."""
    return jnp.asarray(leaf, leaf.dtype) if isinstance(leaf, jax.Array) else leaf


def dtype(tree: optax.Params) -> jnp.dtype:
    """Return the precision of the scalars that go with a tree."""
    return jnp.result_type(*(jax.tree.leaves(tree) or [jnp.float32]))


def total(tree: optax.Params) -> jax.Array:
    """Sum all entries of all leaves."""
    return jnp.asarray(sum(jnp.sum(leaf) for leaf in jax.tree.leaves(tree)), dtype(tree))


@jax.jit
def all_finite(tree: optax.Params) -> jax.Array:
    """Whether all numbers of a tree are finite."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def inner(first: optax.Params, second: optax.Params) -> jax.Array:
    """Sum first * second over all leaves."""
    return total(jax.tree.map(jnp.multiply, first, second))


def count(counter: jax.Array, more: jax.Array | bool = True) -> jax.Array:
    """Add one to a counter where `more`; it stops at its largest value instead of wrapping."""
    return jnp.where(more, optax.safe_increment(counter), counter)
