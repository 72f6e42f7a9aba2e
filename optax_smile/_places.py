"""Positions of the entries of a leaf; random signs and subsamples of entries depend on them."""

from dataclasses import dataclass
from typing import NewType

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

# Largest number of entries of a small leaf: it is its own sketch, and all entries are read.
LARGEST = 2**10


@dataclass(frozen=True)
class Place:
    """The place of a leaf in a tree.

    Attributes:
        start: number of its first entry, counted through the whole tree.
        is_small: whether it has few entries.
    """

    start: int
    is_small: bool

    def inside(self, leaf: jax.Array) -> jax.Array | np.ndarray:
        """Number the entries of the leaf from zero, modulo 2^32."""
        return numbers(jnp.zeros((), jnp.uint32), leaf)

    def through(self, leaf: jax.Array, first: jax.Array) -> jax.Array:
        """Number the entries consecutively through the tree, starting at `first`, modulo 2^32."""
        return numbers(first + np.uint32(self.start % 2**32), leaf)


# A tree with a `Place` for each leaf; for joined leaves see `_joined.JoinedPlace`.
Places = NewType("Places", object)


def of(tree: optax.Params) -> Places:
    """Return a tree with the place of each leaf."""
    leaves, structure = jax.tree.flatten(tree)
    starts = [0, *np.cumsum([leaf.size for leaf in leaves])[:-1].tolist()]
    pairs = zip(starts, leaves, strict=False)
    return jax.tree.unflatten(structure, [Place(x, y.size <= LARGEST) for x, y in pairs])


def numbers(first: jax.Array, leaf: jax.Array) -> jax.Array:
    """Number the entries of a leaf, in the order of its last axis, modulo 2^32."""
    places, stride, sharding = jnp.full((), first), 1, jax.typeof(leaf).sharding
    is_typed = AxisType.Explicit in sharding.mesh.axis_types
    for axis in reversed(range(leaf.ndim)):
        place = jax.lax.broadcasted_iota(
            jnp.uint32, leaf.shape, axis, out_sharding=sharding if is_typed else None
        )
        places = places + place * np.uint32(stride % 2**32)
        stride *= leaf.shape[axis]
    return places
