"""LPPD of a few draws: chosen on validation data, and evenly spaced."""

from collections.abc import Sequence

from tabulated.table import Record, Table, mean_error

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
        # Keys are words in JSON.
        told = {
            kind: [[float(_at(one[kind], k)) for one in of] for k in NUMBERS]
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


def _at(by_number: dict, number: int) -> float:
    return by_number[str(number)] if str(number) in by_number else by_number[number]
