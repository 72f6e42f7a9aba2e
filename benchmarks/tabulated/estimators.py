"""Estimators of scikit-learn by default settings, against the deep ensemble of their members."""

from collections.abc import Sequence
from statistics import fmean

from benchmarks.tabulated.table import Record, Table, mean_error, number

DATA = ("digits", "diabetes", "energy", "concrete")
METHODS = ("deep ensemble", "psmile")
# The score beside LPPD.
SECOND = {"digits": "accuracy"}


def scores(found: Sequence[Record]) -> Table:
    """LPPD and accuracy or RMSE, and their differences by seed."""
    rows, used = [], []
    for data in DATA:
        group = [record for record in found if record["cell"]["data"] == data]
        if not group:
            continue
        used += group
        second = SECOND.get(data, "RMSE")
        cells = [data]
        for score in ("LPPD", second):
            theirs, ours = ([r["scores"][m][score] for r in group] for m in METHODS)
            differences = [a - b for a, b in zip(ours, theirs, strict=True)]
            cells += [mean_error(theirs), mean_error(ours), mean_error(differences, sign="+")]
        cells.insert(4, second)
        seconds = number(fmean(record["cpu_seconds"] for record in group), 0)
        rows.append([*cells, str(sum(_above(group))) + f" of {len(group)}", seconds])
    header = ["data", *(f"LPPD, {method}" for method in METHODS), "difference, paired"]
    header += ["beside it", *METHODS, "difference, paired", "seeds above it in LPPD", "CPU s"]
    return Table(header, rows, used)


def _above(group: Sequence[Record]) -> list[bool]:
    values = [[r["scores"][m]["LPPD"] for m in METHODS] for r in group]
    return [ours > theirs for theirs, ours in values]


def won(found: Sequence[Record]) -> str:
    """Figure: on how many data sets LPPD is above the deep ensemble's."""
    means = []
    for data in DATA:
        group = [r["scores"] for r in found if r["cell"]["data"] == data]
        if group:
            means.append(fmean(x["psmile"]["LPPD"] - x["deep ensemble"]["LPPD"] for x in group))
    return f"{sum(mean > 0 for mean in means)} of {len(means)}"
