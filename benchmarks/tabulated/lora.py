"""Low-rank weights of a small GPT: the average of draws against the MAP."""

from collections.abc import Sequence
from statistics import fmean

from benchmarks.tabulated.table import Record, Table, mean_error, number

MAP = "MAP"
TITLES = {"entropy": "entropy, held-out", "foreign": "entropy, foreign"}


def _best(found: Sequence[Record]) -> dict[str, dict[int, Record]]:
    """Of each method and seed the record whose prior precision is best on validation text."""
    methods = sorted({record["cell"]["method"] for record in found}, key=lambda x: (x != MAP, x))
    best: dict[str, dict[int, Record]] = {method: {} for method in methods}
    for record in sorted(found, key=lambda record: record["valid"]):
        cell = record["cell"]
        best[cell["method"]][cell["seed"]] = record
    return best


def _differences(ours: dict[int, Record], theirs: dict[int, Record]) -> dict[str, list[float]]:
    """Each score of a method minus that of another one, over the seeds of both."""
    seeds = sorted(ours.keys() & theirs.keys())
    names = ours[seeds[0]]["scores"] if seeds else ()
    return {
        name: [ours[seed]["scores"][name] - theirs[seed]["scores"][name] for seed in seeds]
        for name in names
    }


def _windows(ours: dict[int, Record], theirs: dict[int, Record]) -> list[float]:
    """LPPD minus that of another method in each window of the test text, mean over seeds."""
    pairs = [
        zip(ours[seed]["windows"], theirs[seed]["windows"], strict=True)
        for seed in sorted(ours.keys() & theirs.keys())
    ]
    each = [[a - b for a, b in pair] for pair in pairs]
    return [fmean(values) for values in zip(*each, strict=True)]


def scores(found: Sequence[Record]) -> Table:
    """Scores on the test text at the precision of each method that is best on validation text."""
    best = _best(found)
    if not best.get(MAP):
        return Table((), (), ())
    names: list[str] = list(found[0]["scores"])
    rows = []
    for method, records in best.items():
        columns = [[record["scores"][name] for record in records.values()] for name in names]
        rows.append([method, "", *(number(fmean(values), 4) for values in columns)])
    for method, records in best.items():
        if method == MAP:
            continue
        differences = _differences(records, best[MAP])
        shown = [mean_error(values, 4, "+") for values in differences.values()]
        by_window = mean_error(_windows(records, best[MAP]), 4, "+")
        rows.append([f"{method} - MAP", by_window, *shown])
    used = [record for records in best.values() for record in records.values()]
    header = ["held-out text, mean over seeds", "LPPD, ± over windows"]
    return Table([*header, *(TITLES.get(name, name) for name in names)], rows, used)


def cells(found: Sequence[Record]) -> Table:
    """Validation and test LPPD of every method and precision."""
    groups: dict[tuple[str, float], list[Record]] = {}
    for record in found:
        groups.setdefault((record["cell"]["method"], record["cell"]["precision"]), []).append(
            record
        )
    rows = []
    for (method, precision), records in sorted(groups.items()):
        valid = [record["valid"] for record in records]
        test = [record["scores"]["LPPD"] for record in records]
        seeds = ", ".join(str(record["cell"]["seed"]) for record in records)
        rows.append([method, f"{precision:g}", seeds, mean_error(valid, 4), mean_error(test, 4)])
    header = ["method", "prior precision", "seeds", "LPPD, validation", "LPPD, held-out"]
    return Table(header, rows, found)


def difference(method: str, score: str):
    """Make a figure: a score of the method minus that of the MAP."""

    def told(found: Sequence[Record]) -> str:
        best = _best(found)
        if not best.get(method) or not best.get(MAP):
            return ""
        return mean_error(_differences(best[method], best[MAP])[score], 4, "+")

    return told
