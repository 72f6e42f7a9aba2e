"""Small leaves of a parameter tree, joined into one array during a call of `update`.

A network has many small leaves, such as biases, and XLA compiles several kernels for each leaf of a
tree. Joined leaves share these kernels. The code inside a call does not depend on it: it gets the
positions of the entries, see `_places`.
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _places, _xla
from optax_smile._types import T

# Smallest number of small leaves, and of entries of the tree, for which leaves are joined.
FEWEST, SMALLEST = 3, 500


S = TypeVar("S")


@dataclass(frozen=True)
class Layout:
    """The structure and shapes of a tree, and which leaves are joined, all of one dtype."""

    structure: object
    shapes: tuple[tuple[int, ...], ...]
    is_small: tuple[bool, ...]
    dtype: jnp.dtype

    def split(self, leaves: list[T]) -> tuple[list[T], list[T]]:
        """Return the leaves that are joined, and the others."""
        others = [not x for x in self.is_small]
        return [*itertools.compress(leaves, self.is_small)], [*itertools.compress(leaves, others)]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["joined", "apart"], meta_fields=["layout"]
)
@dataclass(frozen=True)
class Joined:
    """A tree whose small leaves are joined, one after the other, `[entry]`."""

    joined: "jax.Array | JoinedPlace"
    apart: tuple[jax.Array | _places.Place, ...]
    layout: Layout


@dataclass(frozen=True)
class JoinedPlace:
    """The counterpart of `_places.Place` for joined leaves: the numbers of all entries."""

    in_leaf: np.ndarray
    in_tree: np.ndarray
    is_small = True

    def inside(self, leaf: jax.Array) -> np.ndarray:
        """Number the entries of each leaf from zero."""
        return self.in_leaf

    def through(self, leaf: jax.Array, first: jax.Array) -> jax.Array:
        """Number the entries consecutively through the tree."""
        return first + self.in_tree


def around(process: Callable[[Any, S], T]) -> Callable[[Any, S], T]:
    """Join the small leaves in the arguments of a function, and split its results again."""

    def run(call: Any, state: S) -> T:
        if (layout := choose(call.params)) is None:
            return process(call, state)
        given, inside = join(layout, (call._replace(places=None), state))
        return part(process(given._replace(places=_places_of(layout, call.places)), inside))

    return run


def choose(params: optax.Params) -> Layout | None:
    """Choose the leaves to join: those that are small.

    None for a tree with fewer than `SMALLEST` entries or `FEWEST` small leaves, for a tree on a
    mesh, and if small leaves have different precisions.
    """
    leaves, structure = jax.tree.flatten(params)
    is_small = tuple(0 < leaf.size <= _places.LARGEST for leaf in leaves)
    few = [*itertools.compress(leaves, is_small)]
    if len(few) < FEWEST or sum(leaf.size for leaf in leaves) < SMALLEST:
        return None
    layout = Layout(structure, tuple(leaf.shape for leaf in leaves), is_small, few[0].dtype)
    on_mesh = any(not jax.typeof(leaf).sharding.mesh.empty for leaf in leaves)
    return None if on_mesh or len({leaf.dtype for leaf in few}) > 1 else layout


def _places_of(layout: Layout, places: _places.Places) -> _places.Places:
    few, apart = layout.split(jax.tree.leaves(places))
    sizes = [math.prod(shape) for shape in layout.split(list(layout.shapes))[0]]
    inside = [np.arange(size, dtype=np.int64) for size in sizes]
    through = [x + place.start for x, place in zip(inside, few, strict=True)]
    joined = (np.concatenate(numbers).astype(np.uint32) for numbers in (inside, through))
    return _places.Places(Joined(JoinedPlace(*joined), tuple(apart), layout))


def join(layout: Layout, tree: T) -> T:
    """Join the small leaves of all subtrees that match the parameters.

    A subtree matches if it has their structure, and its small leaves have their shapes and
    precision. Its large leaves may have other shapes, as in a sketch.
    """
    shapes, _ = layout.split(list(layout.shapes))

    def is_like(node: object) -> bool:
        if jax.tree.structure(node) != layout.structure:
            return False
        few, _ = layout.split(jax.tree.leaves(node))
        is_alike = [jnp.shape(leaf) for leaf in few] == shapes
        return is_alike and all(jnp.result_type(leaf) == layout.dtype for leaf in few)

    def joined(node: object) -> object:
        if not is_like(node):
            return node
        few, apart = layout.split(jax.tree.leaves(node))
        return Joined(jnp.concatenate([jnp.ravel(leaf) for leaf in few]), tuple(apart), layout)

    return jax.tree.map(joined, tree, is_leaf=is_like)


def part(tree: T) -> T:
    """Undo `join`."""

    def is_joined(node: object) -> bool:
        return isinstance(node, Joined)

    nodes = jax.tree.leaves(tree, is_leaf=is_joined)
    written = iter(_xla.write_once([node.joined for node in nodes if is_joined(node)]))
    return jax.tree.map(
        lambda node: _leaves(node, next(written)) if is_joined(node) else node,
        tree,
        is_leaf=is_joined,
    )


def _leaves(tree: Joined, joined: jax.Array) -> optax.Params:
    """Split the array of joined leaves."""
    layout, apart, first, leaves = tree.layout, iter(tree.apart), 0, []
    for shape, is_small in zip(layout.shapes, layout.is_small, strict=True):
        if is_small:
            last = first + math.prod(shape)
            leaves.append(joined[first:last].reshape(shape))
            first = last
        else:
            leaves.append(next(apart))
    return jax.tree.unflatten(layout.structure, leaves)
