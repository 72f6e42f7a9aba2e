"""Small leaves of a parameter tree, joined to one array while a call of `update` lasts.

A network has many small leaves, such as biases, and XLA compiles several kernels for each leaf of a
tree. Leaves that are joined share these kernels. Training loops never see a joined tree: the state
keeps the leaves of the parameters.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _xla
from optax_smile._types import Tree

# Number of entries up to which a leaf is small, and of small leaves from which on they are joined.
LARGEST, FEWEST = 2**10, 3


@dataclasses.dataclass(frozen=True)
class Layout:
    """The structure of a tree, the shapes of its leaves, and which of them are joined."""

    structure: Tree
    shapes: tuple[tuple[int, ...], ...]
    is_small: tuple[bool, ...]

    @functools.cached_property
    def sizes(self) -> list[int]:
        """Entries of each leaf."""
        return [math.prod(shape) for shape in self.shapes]

    @functools.cached_property
    def starts(self) -> list[int]:
        """Number of the first entry of each leaf, counted through the whole tree."""
        return [0, *np.cumsum(self.sizes)[:-1].tolist()]

    def numbers(self, from_zero: bool) -> np.ndarray:
        """Number the joined entries through the whole tree, or each leaf from zero on."""
        parts = zip(self.starts, self.sizes, self.is_small, strict=True)
        numbers = [
            np.arange(size, dtype=np.int64) + (0 if from_zero else start)
            for start, size, is_small in parts
            if is_small
        ]
        return np.concatenate(numbers).astype(np.uint32)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["joined", "apart"], meta_fields=["layout"]
)
@dataclasses.dataclass(frozen=True)
class Joined:
    """A tree whose small leaves are joined, one after the other, `[entry]`."""

    joined: jax.Array
    apart: tuple[jax.Array, ...]
    layout: Layout


def choose(params: optax.Params, smallest: int) -> Layout | None:
    """Choose the leaves to join.

    None for a tree of fewer than `smallest` entries or `FEWEST` small leaves, and on a mesh.
    """
    leaves, structure = jax.tree.flatten(params)
    is_small = small(leaves)
    if sum(is_small) < FEWEST or sum(leaf.size for leaf in leaves) < smallest:
        return None
    if not all(jax.typeof(leaf).sharding.mesh.empty for leaf in leaves):
        return None
    return Layout(structure, tuple(leaf.shape for leaf in leaves), tuple(is_small))


def small(leaves: list[jax.Array]) -> list[bool]:
    """Tell which leaves are small and have the precision of the first small one."""
    sizes_fit = [0 < leaf.size <= LARGEST for leaf in leaves]
    dtypes = [leaf.dtype for leaf, fits in zip(leaves, sizes_fit, strict=True) if fits]
    pairs = zip(sizes_fit, leaves, strict=True)
    return [fits and leaf.dtype == dtypes[0] for fits, leaf in pairs]


def join(layout: Layout | None, tree: Tree) -> Tree:
    """Join the small leaves of all subtrees that are like the parameters.

    A subtree is like them if it has their structure and small leaves of their shapes. Its large
    leaves may have other shapes, as those of a sketch have.
    """
    if layout is None:
        return tree

    def is_like(node: Tree) -> bool:
        return jax.tree.structure(node) == layout.structure and all(
            not is_small or jnp.shape(leaf) == shape
            for leaf, shape, is_small in zip(
                jax.tree.leaves(node), layout.shapes, layout.is_small, strict=True
            )
        )

    def joined(node: Tree) -> Tree:
        if not is_like(node):
            return node
        pairs = list(zip(jax.tree.leaves(node), layout.is_small, strict=True))
        few = [jnp.ravel(leaf) for leaf, is_small in pairs if is_small]
        apart = tuple(leaf for leaf, is_small in pairs if not is_small)
        return Joined(jnp.concatenate(few), apart, layout)

    return jax.tree.map(joined, tree, is_leaf=is_like)


def part(tree: Tree) -> Tree:
    """Undo `join`."""

    def is_joined(node: Tree) -> bool:
        return isinstance(node, Joined)

    nodes = jax.tree.leaves(tree, is_leaf=is_joined)
    written = iter(_xla.write_once([node.joined for node in nodes if is_joined(node)]))
    return jax.tree.map(
        lambda node: _leaves(node, next(written)) if is_joined(node) else node,
        tree,
        is_leaf=is_joined,
    )


def _leaves(tree: Joined, joined: jax.Array) -> Tree:
    """Cut the joined leaves out of their array."""
    layout, apart, first, leaves = tree.layout, iter(tree.apart), 0, []
    for shape, size, is_small in zip(layout.shapes, layout.sizes, layout.is_small, strict=True):
        if is_small:
            leaves.append(joined[first : first + size].reshape(shape))
            first += size
        else:
            leaves.append(next(apart))
    return jax.tree.unflatten(layout.structure, leaves)


def starts(tree: Tree) -> list[int | np.ndarray]:
    """Number the first entry of each leaf through the whole tree; of joined leaves all entries."""
    if isinstance(tree, Joined):
        layout = tree.layout
        pairs = zip(layout.starts, layout.is_small, strict=True)
        return [layout.numbers(False), *(start for start, is_small in pairs if not is_small)]
    sizes = [leaf.size for leaf in jax.tree.leaves(tree)]
    return [0, *np.cumsum(sizes)[:-1].tolist()]


def insides(tree: Tree) -> list[np.ndarray | None]:
    """Number the entries of each joined leaf from zero on; None for any other leaf."""
    if isinstance(tree, Joined):
        return [tree.layout.numbers(True), *[None] * len(tree.apart)]
    return [None] * len(jax.tree.leaves(tree))
