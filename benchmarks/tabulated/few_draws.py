"""LPPD of a few draws: chosen on validation data, and evenly spaced."""

from collections.abc import Sequence

from benchmarks.tabulated.table import Record, Table, mean_error

NUMBERS = (1, 2, 4, 8, 16)
PROBLEMS = ("energy", "digits", "2,000 images", "54,000 images", "LeNet")


def scores(found: Sequence[Record]) -> Table:
    """Test LPPD by the number of draws, mean over seeds, and the differences by seed."""
    rows, used = [], []
    for problem in PROBLEMS:
        of = [record for record in found if record["cell"]["problem"] == problem]
        used += of
        if not of:
            continue
        told = {
            kind: [[_at(one[kind], k) for one in of] for k in NUMBERS]
            for kind in ("chosen", "evenly")
        }
        whole = [one["all"] for one in of]
        size = f"{of[0]['num_draws']:,}"
        for kind, name in (("chosen", "`thin_to`"), ("evenly", "evenly spaced")):
            cells = [mean_error(values) for values in told[kind]]
            rows.append([problem, name, *cells, f"{mean_error(whole)} ({size})"])
        gaps = [
            mean_error([a - b for a, b in zip(ours, theirs, strict=True)], 3, "+")
            for ours, theirs in zip(told["chosen"], told["evenly"], strict=True)
        ]
        rows.append([problem, "difference, paired", *gaps, ""])
        behind = [
            mean_error([a - b for a, b in zip(ours, whole, strict=True)], 3, "+")
            for ours in told["chosen"]
        ]
        rows.append([problem, "`thin_to` - all, paired", *behind, ""])
    header = ["test LPPD", "draws", *(f"k = {k}" for k in NUMBERS), "all"]
    return Table(header, rows, used)


def optimism(found: Sequence[Record]) -> Table:
    """What 16 chosen draws seem to gain over all draws, and what they gain on test data."""
    rows, used, last = [], [], NUMBERS[-1]
    for problem in PROBLEMS:
        of = [record for record in found if record["cell"]["problem"] == problem]
        used += of
        if of:
            seen = [one["validation"][last - 1] - one["validation_all"] for one in of]
            gain = [_at(one["chosen"], last) - one["all"] for one in of]
            sizes = f"{of[0]['num_validation']:,}", f"{of[0]['num_draws']:,}"
            rows.append([problem, *sizes, mean_error(seen, 3, "+"), mean_error(gain, 3, "+")])
    header = ["data", "validation examples", "draws", "on validation data", "on test data"]
    return Table(header, rows, used)


def _at(by_number: dict, number: int) -> float:
    # Keys are words in JSON.
    return by_number[str(number)] if str(number) in by_number else by_number[number]
