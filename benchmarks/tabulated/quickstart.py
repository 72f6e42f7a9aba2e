"""Quickstart over seeds: the sampler against the deep ensemble that it starts from."""

from collections.abc import Sequence
from statistics import fmean

from benchmarks.tabulated.table import Record, Table, mean_error, number

ENSEMBLE = "deep ensemble"
TITLES = {"entropy": "entropy, digits", "shuffled": "entropy, shuffled pixels"}


def _columns(found: Sequence[Record], method: str) -> dict[str, list[float]]:
    """Each score of a method, over the seeds."""
    names = found[0]["scores"][method]
    return {name: [record["scores"][method][name] for record in found] for name in names}


def _differences(found: Sequence[Record]) -> dict[str, list[float]]:
    ours, theirs = _columns(found, found[0]["sampler"]), _columns(found, ENSEMBLE)
    return {name: [a - b for a, b in zip(ours[name], theirs[name], strict=True)] for name in theirs}


def scores(found: Sequence[Record]) -> Table:
    """Test scores, and their differences by seed."""
    if not found:
        return Table((), (), ())
    sampler, difference = found[0]["sampler"], _differences(found)
    rows = [
        [name, *(number(fmean(values), 4) for values in _columns(found, name).values())]
        for name in (ENSEMBLE, sampler)
    ]
    rows.append(["difference, paired", *(mean_error(x, 4, "+") for x in difference.values())])
    header = ["test, mean over seeds", *(TITLES.get(name, name) for name in difference)]
    return Table(header, rows, found)


def difference(score: str):
    """Make a figure: a score of the sampler minus that of the deep ensemble."""

    def told(found: Sequence[Record]) -> str:
        return mean_error(_differences(found)[score], 4, "+")

    return told
