"""Is this the run that a directory holds: the same data, and the same loss at the start?"""

from collections.abc import Callable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import jax
import numpy as np

from optax_smile import _check, _settings
from optax_smile.chains._loop import num_rows

# What may differ from the run in a directory where the user says so.
Accepted = Literal["data", "loss"]
ACCEPT = _check.Where(
    f"a tuple of names among {get_args(Accepted)}",
    lambda value: (
        isinstance(value, (tuple, list))
        and all(isinstance(name, str) and name in get_args(Accepted) for name in value)
    ),
)
# Relative differences that another machine may make, in the loss and in sums over all examples.
LOSS_TOLERANCE, SUM_TOLERANCE = 1e-3, 1e-6


class Data(NamedTuple):
    """What can be told of batches without changing what comes of them.

    Attributes:
        told: what a file holds, the same in whatever order the examples come: `tree`, `shapes`,
            `num_batches`, and as `examples` number, sum and sum of squares of a projection of
            each. Of batches that are no list or tuple at most their number.
        batch: as many examples as the first batch has, those with the smallest projections, so
            that they are found again after a shuffle; None if there is no list.
    """

    told: dict[str, Any]
    batch: Any


def of_sampler(
    sampler: Any, settings: Mapping[str, Any] | None, key: jax.Array, observe: Any
) -> dict[str, Any]:
    """Tell the transformation, its key, and what is kept of the draws."""
    told = {
        "key": np.asarray(jax.random.key_data(key)).tolist(),
        "sampler": settings,
        "chain": _settings.checksum(sampler),
    }
    return told if observe is None else told | {"observe": _settings.checksum((observe,))}


def of_batches(batches: Any, per_chain: bool) -> Data:
    """Go through a list of batches once; anything else might change by it."""
    number = {"num_batches": len(batches)} if isinstance(batches, Sized) else {}
    if not isinstance(batches, (list, tuple)) or not batches:
        return Data(number, None)
    try:
        return _of_list(batches, per_chain)
    except (TypeError, ValueError, IndexError):
        # No arrays of numbers, or shapes that do not go together: their own checks say so.
        return Data(number, None)


def _of_list(batches: Sequence[Any], per_chain: bool) -> Data:
    structure, rows = jax.tree.structure(batches[0]), num_rows(batches[0], per_chain)
    shapes = {str([(x.shape, str(x.dtype)) for x in _arrays(batch)]) for batch in batches}
    projections = [_project(_examples(batch, per_chain)) for batch in batches]
    values = np.concatenate(projections)
    told = {
        "tree": str(structure),
        "shapes": sorted(shapes),
        "num_batches": len(batches),
        "examples": [values.size, float(values.sum()), float((values**2).sum())],
    }
    ends = np.cumsum([found.size for found in projections])
    chosen = np.argsort(values, kind="stable")[: rows or 1]
    columns: list[list[np.ndarray]] = [[] for _ in jax.tree.leaves(batches[0])]
    for example in chosen:
        of = int(np.searchsorted(ends, example, side="right"))
        for column, leaf in zip(columns, _examples(batches[of], per_chain), strict=True):
            column.append(leaf[example - ends[of]])
    leaves = [np.stack(column) for column in columns]
    if rows is None:
        leaves = [leaf[0] for leaf in leaves]
    elif per_chain:
        chains = len(jax.tree.leaves(batches[0])[0])
        leaves = [np.repeat(leaf[None], chains, axis=0) for leaf in leaves]
    return Data(told, jax.tree.unflatten(structure, leaves))


def _arrays(batch: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(batch)]


def _examples(batch: Any, per_chain: bool) -> list[np.ndarray]:
    """Leaves `[example, ...]`, of all chains together; a batch without rows is one example."""
    leaves = _arrays(batch)
    if num_rows(batch, per_chain) is None:
        return [leaf[None] for leaf in leaves]
    return [leaf.reshape(-1, *leaf.shape[2:]) if per_chain else leaf for leaf in leaves]


def _project(examples: list[np.ndarray]) -> np.ndarray:
    """One number for each example, which hangs on all of it."""
    found = np.zeros(len(examples[0]))
    for place, leaf in enumerate(examples):
        rows = leaf.reshape(len(leaf), -1).astype(float)
        weights = np.random.default_rng(place).standard_normal(rows.shape[1])
        found += rows @ weights / max(rows.shape[1], 1) ** 0.5
    return found


def of_run(data: Data, losses: Callable[[Any], Any]) -> dict[str, Any]:
    """What a run tells of its data and its loss: that of each chain at the start, if it can be."""
    loss = None
    if data.batch is not None:
        found = losses(data.batch)
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            found = multihost_utils.process_allgather(found, tiled=True)
        loss = np.asarray(found, float).tolist()
    return {"data": data.told, "loss": loss}


def check_same(
    where: str,
    directory: Path,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    accept: Sequence[Accepted],
):
    """Require the data and the loss of the run in a directory.

    Args:
        where: the function that asks.
        directory: of the run.
        before: what `of_run` told when it began.
        now: what it tells today.
        accept: names that may differ.

    Raises:
        ValueError: they differ, in the words of the first thing that does.
    """

    def differ(argument: str, what: str, name: str, theirs: Any, mine: Any):
        rule = f"as in the run in {directory}, whose {what} {theirs}"
        remedy = f'Choose another directory, or pass accept=("{name}",) to go on all the same.'
        _check.fail(where, argument, rule, mine, remedy)

    words = {"tree": "are", "shapes": "have the shapes", "num_batches": "are so many:"}
    words |= {"examples": "have the number of examples, and sums over them,"}
    differing = False
    for argument, field in (("batches", "data"), ("validation", "validation")):
        theirs, mine = before.get(field, {}), now.get(field, {})
        for name in words:
            if name in theirs and name in mine and not _is_same(name, theirs[name], mine[name]):
                differing = True
                if "data" not in accept:
                    what = f"{argument} {words[name]}"
                    differ(argument, what, "data", theirs[name], mine[name])
    if differing or "loss" in accept or before["loss"] is None or now["loss"] is None:
        return
    first, second = np.array(before["loss"]), np.array(now["loss"])
    if not np.all(np.abs(first - second) <= LOSS_TOLERANCE * np.abs(first).max()):
        chain = int(np.argmax(np.abs(first - second)))
        told = f"loss at the start of chain {chain} is"
        differ("loss_fn", told, "loss", f"{first[chain]:.6g}", f"{second[chain]:.6g}")


def _is_same(name: str, theirs: Any, mine: Any) -> bool:
    if name != "examples":
        return theirs == mine
    (number, first, square), (others, second, other_square) = theirs, mine
    # Sums of numbers of either sign may be near zero.
    room = SUM_TOLERANCE * (number * square) ** 0.5
    return (
        number == others
        and abs(first - second) <= room
        and abs(square - other_square) <= SUM_TOLERANCE * square
    )
