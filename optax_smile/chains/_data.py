"""What the batches show before a chain meets them: their sizes, and how many examples there are."""

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_smile import _check
from optax_smile.chains._loop import Stream
from optax_smile.diagnostics.results import Check

# `num_data` and the examples of a list may differ by less than this factor: lists may be a part of
# the data, or hold several passes.
MUCH = 10
# And `num_data` and the tokens of a list by this one: padding, and targets that are not counted.
TOKENS = 4
# Sizes of batches that differ by less weight no example by much more than another.
NEARLY = 1.1
NUM_DATA = (
    "Set it to the number of terms that the mean loss averages over the whole data set: examples,"
    " or tokens for a language model."
)


def size(batch: Any, per_chain: bool) -> int | None:
    """Number of examples: the length of the first axis, after that of chains, if any.

    Scalars do not count. None where the arrays disagree, as those of nodes and edges of graphs do.
    """
    axis = int(per_chain)
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(batch)]
    lengths = {shape[axis] for shape in shapes if len(shape) > axis}
    return lengths.pop() if len(lengths) == 1 else None


USABLE = "an iterable of batches, numeric arrays with examples, all of the same structure"


def defect(batch: Any, expected: Any, per_chain: bool) -> str:
    """Say why a batch cannot be used; "" if it can.

    Args:
        batch: of any structure.
        expected: structure of the first batch, as `jax.tree.structure` gives it.
        per_chain: whether arrays have a leading chain axis.
    """
    leaves, structure = jax.tree.flatten(batch)
    if structure != expected:
        return f"has the structure {structure}, not {expected} as the first"
    for leaf in leaves:
        dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
        if isinstance(dtype, np.dtype) and dtype.kind in "OSU":
            return f"has an array of dtype {dtype}"
    return "is empty" if size(batch, per_chain) == 0 else ""


def check_list(where: str, batches: Any, per_chain: bool):
    """Require batches of a list that can be used."""
    expected = jax.tree.structure(batches[0]) if batches else None
    for number, batch in enumerate(batches):
        if reason := defect(batch, expected, per_chain):
            _check.fail(where, "batches", USABLE, f"batches[{number}], which {reason}")


def unequal(sizes: Sequence[int | None]) -> Check:
    """Find batches of several sizes, whose mean losses weight their examples unequally."""
    counts = Counter(rows for rows in sizes if rows is not None)
    passed = len(counts) < 2 or max(counts) <= NEARLY * min(counts)
    parts = [f"{counts[rows]} of {rows}" for rows in sorted(counts, reverse=True)]
    shown = " and ".join(parts) if len(parts) < 4 else f"{', '.join(parts[:3])}, ..."
    text = "batches have the same size."
    if not passed:
        text = (
            f"batches have different sizes: {shown} examples. Under a mean loss the examples of a"
            " small batch count for more than those of a large one, and the posterior is not that"
            " of the data."
        )
    return Check(
        kind="batch sizes",
        chains=(),
        value=tuple(map(float, sorted(counts))),
        bound=1.0,
        passed=passed,
        advice="" if passed else "Drop the last batch, or pad it and mask the loss.",
        text=text,
    )


def at_least(batch: Any, number: Any, per_chain: bool) -> Check | None:
    """Require `num_data` to be no less than the examples of a batch; None if one is unknown."""
    rows = size(batch, per_chain)
    if rows is None or not isinstance(number, int | float):
        return None
    passed = number >= rows
    than = f"the {rows} examples of the first batch"
    return Check(
        kind="num_data",
        chains=(),
        value=(float(number),),
        bound=float(rows),
        passed=passed,
        advice="" if passed else NUM_DATA,
        text=f"num_data={number}, {'at least' if passed else 'fewer than'} {than}.",
    )


def amount(batches: Sequence[Any], number: Any, per_chain: bool) -> Check | None:
    """Compare `num_data` with the examples of a list of batches; None where it cannot be told.

    A list may be a part of the data, hold several passes, or have been augmented: only a factor of
    `MUCH` is told, and where the list is longer, only if its examples are different ones. Where
    `num_data` is about the number of entries of an integer array `[example, position]`, it counts
    tokens.
    """
    sizes = [size(batch, per_chain) for batch in batches]
    is_known = sizes and None not in sizes and 0 not in sizes and isinstance(number, int | float)
    if not is_known or number < (sizes[0] or 0):
        # Of fewer than a batch has `at_least` tells.
        return None
    examples = sum(rows for rows in sizes if rows is not None)
    if per_chain:
        # Chains have examples of their own, of the same data.
        examples *= np.shape(jax.tree.leaves(batches[0])[0])[0]
    if number / examples <= 1 / MUCH:
        examples = _distinct(batches, per_chain)
    tokens = _tokens(batches, per_chain)
    ratio = number / examples
    counts_tokens = any(1 / TOKENS < number / count < TOKENS for count in tokens if count)
    passed = counts_tokens or 1 / MUCH < ratio < MUCH
    text = f"num_data={number:g} for the {examples:,} examples of the batches"
    what = "than there are" if ratio > 1 else "than there are different ones"
    return Check(
        kind="num_data",
        chains=(),
        value=(ratio,),
        bound=float(MUCH),
        passed=passed,
        advice="" if passed else NUM_DATA,
        text=f"{text}." if passed else f"{text}: far {'more' if ratio > 1 else 'fewer'} {what}.",
    )


def _tokens(batches: Sequence[Any], per_chain: bool) -> list[int]:
    """Entries of the integer arrays `[example, position]` of all batches, by their place."""
    axes = 2 + per_chain
    counts: Counter = Counter()
    for batch in batches:
        for place, leaf in enumerate(jax.tree.leaves(batch)):
            kind = getattr(leaf, "dtype", np.dtype(float))
            if np.ndim(leaf) == axes and jnp.issubdtype(kind, jnp.integer):
                counts[place] += np.size(leaf)
    return list(counts.values())


def _distinct(batches: Sequence[Any], per_chain: bool) -> int:
    """Count the different examples."""
    found = set()
    for batch in batches:
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(batch) if np.ndim(leaf) > per_chain]
        if per_chain:
            leaves = [leaf.reshape(-1, *leaf.shape[2:]) for leaf in leaves]
        for example in zip(*leaves, strict=True):
            found.add(hash(b"".join(np.ascontiguousarray(part).tobytes() for part in example)))
    return len(found)


class Watched:
    """A stream that ends at a batch that cannot be used, and warns once of another size.

    Attributes:
        defect: what is wrong with that batch; "" if there was none.
    """

    def __init__(self, where: str, stream: Stream, per_chain: bool, warns: bool):
        self.where, self.stream, self.per_chain = where, stream, per_chain
        self.warns, self.defect = warns, ""
        self.structure, self.rows = None, None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self.stream)
        if self.structure is None:
            self.structure = jax.tree.structure(batch)
        if reason := defect(batch, self.structure, self.per_chain):
            number, of_pass = self.stream.taken, self.stream.passes + 1
            self.defect = f"batch {number} of pass {of_pass} {reason}"
            raise StopIteration
        rows = size(batch, self.per_chain)
        if rows is not None and self.warns:
            self.rows = rows if self.rows is None else self.rows
            found = unequal([self.rows, rows])
            self.warns = found.passed
            tell(self.where, found)
        return batch


def tell(where: str, found: Check | None):
    """Warn of what a check found, if it did not pass."""
    if found is not None and not found.passed:
        warnings.warn(f"`{where}`: {found.text} {found.advice}", stacklevel=2)
