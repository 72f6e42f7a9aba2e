"""Calibration after the fact: temperature, conformal sets and intervals."""

from collections.abc import Callable, Sequence
from statistics import fmean

from benchmarks.tabulated.table import Record, Table, mean_error, number

LEVEL = 0.9
METHODS = ("deep ensemble", "psmile")
SCORES = ("ECE", "LPPD")


def _of(found: Sequence[Record], data: str) -> list[Record]:
    return [record for record in found if record["cell"]["data"] == data]


def _values(used: Sequence[Record], method: str, when: str, score: str) -> list[float]:
    return [record["methods"][method][when][score] for record in used]


def temperatures(found: Sequence[Record]) -> Table:
    """ECE and LPPD of the quickstart before and after, and their differences by seed."""
    used = _of(found, "digits")
    if not used:
        return Table((), (), ())
    columns = [(when, score) for score in SCORES for when in ("before", "after")]
    rows = [
        [
            method,
            mean_error([fmean(record["methods"][method]["temperature"]) for record in used]),
            *(mean_error(_values(used, method, *column), 4) for column in columns),
        ]
        for method in METHODS
    ]
    rows.append(["difference, paired", "", *(_difference(used, *column) for column in columns)])
    header = ["quickstart, mean over seeds", "temperature"]
    return Table(header + [f"{score}, {when}" for when, score in columns], rows, used)


def _difference(used: Sequence[Record], when: str, score: str) -> str:
    theirs, ours = (_values(used, method, when, score) for method in METHODS)
    return mean_error([a - b for a, b in zip(ours, theirs, strict=True)], 4, "+")


def after(score: str) -> Callable[[Sequence[Record]], str]:
    """Make a figure: a score of psmile minus the deep ensemble's, both after temperature."""

    def told(found: Sequence[Record]) -> str:
        return _difference(_of(found, "digits"), "after", score)

    return told


def sets_and_intervals(found: Sequence[Record]) -> Table:
    """Coverage over all splits, what is allowed, and how large sets and intervals are."""
    rows = []
    for data in ("digits", "energy"):
        used = _of(found, data)
        for method in METHODS if used else ():
            of = [record["methods"][method] for record in used]
            num_splits = sum(len(one["coverage"]) for one in of)
            # The splits of a seed share their rows.
            coverage = [fmean(one["coverage"]) for one in of]
            slack = fmean(x for one in of for x in one["slack"])
            is_met = LEVEL - 0.01 <= fmean(coverage) <= LEVEL + 0.01 + slack
            own = [one["own"]["coverage"] for one in of if "own" in one]
            size = [fmean(one["size"]) for one in of]
            bounds = f"{number(LEVEL - 0.01, 4)} to {number(LEVEL + 0.01 + slack, 4)}"
            cells = [str(num_splits), mean_error(coverage, 4), bounds]
            rows.append([data, method, *cells, "yes" if is_met else "no", mean_error(size)])
            rows[-1].append(mean_error(own, 4))
    header = ["data", "predictions", "splits", f"coverage of {LEVEL:.0%}", "allowed", "met"]
    return Table([*header, "classes or width", "own interval's coverage"], rows, found)
