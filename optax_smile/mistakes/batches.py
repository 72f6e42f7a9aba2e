"""Mistakes in the batches: their structure, their sizes, and `num_data`."""

from collections import Counter
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _check, _on_host, _table
from optax_smile._on_host import num_examples
from optax_smile.diagnostics.findings import Check
from optax_smile.mistakes.loss import Divisors, Losses, divisors, some, warn_of

# `num_data` must be less than this many times the number of examples, or tokens, in a list: the
# list may be only a part of the data.
MOST_RATIO, MOST_TOKEN_RATIO = 10, 4
NEARLY_EQUAL = 1.1  # Ratio of the sizes of batches that weight their examples about equally.
NUM_DATA = "Set it to the number of terms of the mean loss over all data: examples, or tokens."
UNEQUAL = "Drop the smaller batch: a mean loss counts its examples more than those of a large one."
PASS = "Pass each example once, in one pass: none dropped, repeated or augmented."
USABLE = "an iterable of batches, numeric arrays with examples, all of the same structure"
SINGLE = "Put a single batch in a list: `[batch]`."
PAIR = "Put the arrays of a single batch in a tuple: `[(x, y)]`."


def require_all(argument: str, rows: int, number: float):
    """Require that a pass has all data; `rows` may be those of a pass that was stopped early."""
    if rows != number:
        rule = f"a pass over all data, `num_data` = {number:g} rows"
        got = f"more than {number:g}" if rows > number else f"{rows}"
        _check.fail(argument, rule, f"{got} rows", PASS)


def is_finite(batch: object) -> bool:
    """Whether all floating-point numbers of a batch are finite."""
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(batch)]
    return all(jnp.isfinite(x).all() for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact))


def defect(batch: object, expected: object, per_chain: bool) -> str:
    """Say why a batch does not fit the structure `expected` of the first; "" if it does."""
    if (structure := jax.tree.structure(batch)) != expected:
        return f"has the structure {structure}, not {expected} as the first"
    try:
        _on_host.as_numeric("batches", batch)
    except _check.ArgumentError as error:
        return f"has {error.got}. {error.advice}".rstrip(". ")
    return "is empty" if num_examples(batch, per_chain) == 0 else ""


def advice_on_single(batches: object) -> str:
    """Say how to pass a single batch, if `batches` may be one; "" if not."""
    are_arrays = isinstance(batches, (list, tuple)) and all(hasattr(x, "shape") for x in batches)
    if isinstance(batches, list):
        return PAIR * (are_arrays and len(batches) > 1)
    return SINGLE * (are_arrays or hasattr(batches, "shape"))


def advice_on_axes(params: optax.Params, batches: object) -> str:
    """Say how `params` and `batches` were understood, for errors of the loss."""
    axes = f"The first axis of `params`, length {len(jax.tree.leaves(params)[0])}, was taken as"
    return f"{axes} chains. {advice_on_single(batches)}".rstrip()


def require_usable(batches: Sequence, per_chain: bool):
    """Require a list of usable batches."""
    if not batches:
        _check.fail("batches", "a list with at least one batch", "an empty list")
    expected = jax.tree.structure(batches[0])
    for number, batch in enumerate(batches):
        if reason := defect(batch, expected, per_chain):
            _check.fail("batches", USABLE, f"batches[{number}], which {reason}")


def warn_of_list(batches: Sequence, losses: Losses):
    """Warn of unequal sizes, a wrong `num_data`, or a single batch passed as a list."""
    hint, kind = advice_on_single(batches), type(batches).__name__
    batches = [_on_host.as_numeric("batches", batch) for batch in batches]
    if hint and len({(x.shape[1:], x.dtype) for x in batches}) > 1:
        # Batches in a list may be sequences or images of several sizes.
        are_tokens = all(x.dtype.kind in "iu" for x in batches)
        are_few = len(batches) < 4 and len({*map(len, batches)}) == 1
        if kind == "tuple" or are_few and not are_tokens:
            text = f"each array of the {kind} `batches` is taken as a batch."
            warn_of([Check.of("batches", (), 0.0, False, text, hint)])
    warn_of(checks(batches, losses, True))


def checks(batches: Sequence[object], losses: Losses, is_whole: bool) -> Iterator[Check]:
    """Test the sizes of batches, and `num_data`; `is_whole`: these are all batches."""
    sizes = unequal([num_examples(batch, losses.per_chain) for batch in batches])
    if len(batches) > 1:
        yield sizes
    divided = divisors(batches, losses)
    if sizes.passed and divided is not None and divided.depends:
        yield unequal_terms(divided)
    if test := amount(batches, losses, divided, is_whole):
        yield test


def unequal(sizes: Sequence[int | None]) -> Check:
    """Find batches of several sizes: their mean losses weight examples unequally."""
    counts = Counter(rows for rows in sizes if rows is not None)
    passed = len(counts) < 2 or max(counts) <= NEARLY_EQUAL * min(counts)
    text = "batches have the same size."
    if not passed:
        parts = [f"{counts[rows]} of {rows}" for rows in sorted(counts, reverse=True)]
        text = f"batches have different sizes: {_table.some(parts)} examples."
    return Check.of("batch sizes", tuple(map(float, sorted(counts))), 1.0, passed, text, UNEQUAL)


def unequal_terms(divided: Divisors) -> Check:
    """Find a loss that divides by a number that depends on the batch, such as unpadded tokens."""
    low, high, mean = (float(f(divided.each)) for f in (np.min, np.max, np.mean))
    passed = high <= NEARLY_EQUAL * low
    text = f"`loss_fn` divides by a number of the batch, which is {low:.4g} to {high:.4g}."
    advice = (
        f"The terms of a batch with a small number count more. Divide by their mean, {mean:.6g}."
    )
    return Check.of("batch terms", (low, high), NEARLY_EQUAL, passed, text, advice)


def amount(
    batches: Sequence[object], losses: Losses, divided: Divisors | None, is_whole: bool
) -> Check | None:
    """Compare `num_data` with the first batch and the whole list; None if `num_data` is unknown.

    A list may be a part of the data, hold several passes, or be augmented. So `num_data` passes if
    it is at least the size of the first batch and less than `MOST_RATIO` times that of the list,
    unless it equals the number of batches or the size of one. If the program of the loss shows that
    the mean is over other terms, such as tokens, they are counted instead of examples.
    """
    number, per_chain = losses.num_data, losses.per_chain
    sizes = [num_examples(batch, per_chain) or 0 for batch in batches]
    if not sizes[0] or not isinstance(number, int | float):
        return None
    terms = divided.each if divided is not None and divided.are_terms else None
    first = sizes[0] if terms is None else int(terms[0])
    if number < first or not is_whole or 0 in sizes:
        kind, passed = "tokens" if first > sizes[0] else "examples", number >= first
        text = (
            f"num_data={number}, {'and' if passed else 'but'} the first batch has {first} {kind}."
        )
        return Check.of("num_data", (float(number),), float(first), passed, text, NUM_DATA)
    each = 1.0 if terms is None else float(np.mean(terms) / np.mean(some(sizes)))
    # The chains have different examples of the same data.
    copies = len(jax.tree.leaves(batches[0])[0]) if per_chain else 1
    examples, kind = sum(sizes) * copies, "tokens" if each > 1 else "examples"
    # The same batch may be in the list several times.
    arrays = [tuple(map(id, jax.tree.leaves(batch))) for batch in batches]
    distinct = sum(dict(zip(arrays, sizes, strict=True)).values()) * copies
    wrong: dict[float, str] = {len(batches): "number of batches", first: "size of a batch"}
    wrong |= {examples: "number of sequences"} if each > 1 else {}
    what = f" is the {wrong[number]}" if number < distinct * each and number in wrong else ""
    total = examples * each
    others = [] if terms is not None else _tokens(batches, per_chain)
    if divided is not None and terms is None:
        # Users often mistake a mean over outputs for one over examples.
        others.append(int(divided.number / sizes[0] * examples))
    most = max(MOST_RATIO * total, *(MOST_TOKEN_RATIO * x for x in others), 0)
    passed = not what and number < most
    has = f"{'and' if passed else 'but'} the batches have {total:,.0f} {kind}."
    text = f"num_data={number:g}{what}, {has}"
    return Check.of("num_data", (number / total,), MOST_RATIO, passed, text, NUM_DATA)


def _tokens(batches: Sequence[object], per_chain: bool) -> list[int]:
    """Count the entries of each integer array `[example, position]`, over all batches."""
    return [
        sum(map(np.size, leaves))
        for leaves in zip(*map(jax.tree.leaves, batches), strict=False)
        if np.ndim(leaves[0]) == 2 + per_chain
        and np.issubdtype(jnp.result_type(leaves[0]), np.integer)
    ]
