"""Small arrays that travel together: starting a compiled step costs about 2 us for each array."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# From about 4,000 entries on copying an array costs as much as passing it.
SMALL = 1024


class Packed(NamedTuple):
    """A tree with its small leaves joined.

    Attributes:
        small: dtype to the entries of all small leaves, flat.
        large: the other leaves, in their order.
    """

    small: dict[str, jax.Array]
    large: list[Any]


class Packing:
    """How the leaves of a tree are joined and taken apart again.

    Args:
        tree: arrays or their shapes.
        largest: number of entries up to which a leaf is small; 0 joins nothing.
    """

    def __init__(self, tree: Any, largest: int = SMALL):
        leaves, self.structure = jax.tree.flatten(tree)
        self.shapes = [leaf.shape for leaf in leaves]
        self.sizes = [math.prod(shape) for shape in self.shapes]
        self.groups: dict[str, list[int]] = {}
        for place, leaf in enumerate(leaves):
            is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
            if self.sizes[place] <= largest and not is_key:
                self.groups.setdefault(str(leaf.dtype), []).append(place)
        joined = {place for places in self.groups.values() for place in places}
        self.large = [place for place in range(len(leaves)) if place not in joined]

    def split(self, tree: Any) -> tuple[list[Any], list[Any]]:
        """Part the small leaves from the large ones."""
        leaves = jax.tree.leaves(tree)
        small = [leaves[place] for places in self.groups.values() for place in places]
        return small, [leaves[place] for place in self.large]

    def join(self, small: list[Any]) -> dict[str, jax.Array]:
        """Join small leaves."""
        leaves = iter(small)
        return {
            dtype: jnp.concatenate([next(leaves).reshape(-1) for _ in places])
            for dtype, places in self.groups.items()
        }

    def pack(self, tree: Any) -> Packed:
        """Join the small leaves of a tree."""
        small, large = self.split(tree)
        return Packed(self.join(small), large)

    def part(self, joined: dict[str, jax.Array]) -> list[Any]:
        """Take joined leaves apart, in the order in which `split` gives them."""
        small = []
        for dtype, places in self.groups.items():
            begun = 0
            for place in places:
                end = begun + self.sizes[place]
                small.append(joined[dtype][begun:end].reshape(self.shapes[place]))
                begun = end
        return small

    def assemble(self, small: list[Any], large: list[Any]) -> Any:
        """Build the tree of the leaves that `split` gives."""
        places = [place for places in self.groups.values() for place in places] + self.large
        leaves = dict(zip(places, [*small, *large], strict=True))
        return jax.tree.unflatten(self.structure, [leaves[place] for place in range(len(leaves))])

    def unpack(self, packed: Packed) -> Any:
        """Take the small leaves of a tree apart."""
        return self.assemble(self.part(packed.small), packed.large)
