"""Conversion of arrays of several chains, or from a loader, to the host."""

import hashlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from optax_smile import _check
from optax_smile._types import T

WIDE = (
    "Map identifiers to 0, 1, 2, ..., convert other numbers to floating point, or enable 64 bits:"
    ' jax.config.update("jax_enable_x64", True).'
)


def as_numeric(argument: str, tree: T, *, copy: bool = False) -> T:
    """Convert leaves that `np.asarray` accepts to numeric arrays in native byte order.

    Scalars of Python and arrays of JAX stay as they are. With `copy`, a loader may reuse its
    memory. Integers that do not fit JAX's type are refused, since JAX would silently wrap them.
    """

    def convert(path: tuple[object, ...], leaf: object) -> object:
        if isinstance(leaf, (jax.Array, bool, float, complex)):
            return leaf
        at, advice = jax.tree_util.keystr(path), ""
        got = "an array" if isinstance(leaf, (np.ndarray, int)) else _check.show(leaf)
        try:
            array = np.array(leaf) if copy else np.asarray(leaf)
        except Exception as error:
            # For example a tensor that requires gradients.
            got = f"{got} ({type(error).__name__}: {_check.cut(error)})"
        else:
            if np.ma.is_masked(leaf):
                got += " with masked entries"
            elif not np.can_cast(array.dtype, complex):
                got += f" of dtype {array.dtype}"
            elif wide := _beyond(array):
                got, advice = f"{got} with {wide}", WIDE
            else:
                return leaf if isinstance(leaf, int) else _check.native(array)
        got = f"{got} at {at}" if at else got
        _check.fail(argument, "a tree of arrays of numbers", got, advice)

    return jax.tree_util.tree_map_with_path(convert, tree)


def _beyond(array: np.ndarray) -> str:
    """Write a number that does not fit the integers of JAX; "" if all fit."""
    if array.dtype.kind not in "iu" or not array.size:
        return ""
    own = np.iinfo(jax.dtypes.canonicalize_dtype(array.dtype))
    ends = (array.max(), array.min()) if own.bits < 8 * array.itemsize else ()
    return next((f"{x} (beyond {own.dtype})" for x in ends if not own.min <= x <= own.max), "")


def shapes_of_one(chains: object) -> Any:
    """Return the shapes of one chain of a tree `[chain, ...]`."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), chains)


def local_blocks(tree: object) -> Iterator[tuple[int, int, list[np.ndarray]]]:
    """Copy the chains of this process to the host, each from one of its devices.

    Yields first and last chain of a block, and its leaves `[chain of the block, ...]`. Arrays on
    several processes are sharded only over the chains.
    """
    leaves = jax.tree.leaves(tree)
    if all(getattr(leaf, "is_fully_addressable", True) for leaf in leaves):
        yield 0, leaves[0].shape[0] - 1, [np.asarray(leaf) for leaf in leaves]
        return
    for shards in zip(*(leaf.addressable_shards for leaf in leaves), strict=True):
        if shards[0].replica_id == 0:
            first, stop, _ = shards[0].index[0].indices(leaves[0].shape[0])
            yield first, stop - 1, [np.asarray(shard.data) for shard in shards]


def local(tree: object) -> Any:
    """Copy the chains of this process to the host, `[chain of this process, ...]`.

    If chains have copies in several processes, one process holds them and the others none.
    """
    leaves, structure = jax.tree.flatten(tree)
    none = [np.empty((0, *leaf.shape[1:]), leaf.dtype) for leaf in leaves]
    columns = zip(none, *(block for _, _, block in local_blocks(tree)), strict=True)
    return jax.tree.unflatten(structure, [np.concatenate(column) for column in columns])


def everywhere(tree: object) -> Any:
    """Copy all chains to the host of every process `[chain, ...]`; all processes call this."""
    if jax.process_count() == 1:
        return local(tree)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(tree, tiled=True)


def first_alike(tree: object) -> list[int]:
    """Return, for each chain of arrays `[chain, ...]`, the first chain that is bit-identical."""
    first: dict[bytes, int] = {}
    alike = []
    chains = zip(*map(np.asarray, jax.tree.leaves(tree)), strict=True)
    for chain, leaves in enumerate(chains):
        content = hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).digest()
        alike.append(first.setdefault(content, chain))
    return alike


def num_rows(batch: object, per_chain: bool) -> int | None:
    """Return the length of the example axis; None if leaves, scalars included, disagree."""
    axis = int(per_chain)
    lengths = {np.shape(leaf)[axis : axis + 1] for leaf in jax.tree.leaves(batch)}
    return lengths.pop()[0] if len(lengths) == 1 and lengths != {()} else None


def num_examples(batch: object, per_chain: bool) -> int | None:
    """Return the number of examples of all arrays except scalars; None if they disagree."""
    return num_rows([x for x in jax.tree.leaves(batch) if np.ndim(x) > per_chain], per_chain)
