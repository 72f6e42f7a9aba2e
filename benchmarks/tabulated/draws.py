"""What fewer draws cost: chosen ones, a run that stops early, one network trained on all."""

from collections.abc import Iterator, Sequence

from benchmarks.tabulated.table import Record, Table, mean_error, minus

NUMBERS = (1, 2, 4, 8, 16)
PROBLEMS = ("energy", "digits", "2,000 images", "54,000 images", "LeNet")
STOPPED = ("digits", "2,000 images", "energy", "LeNet")
# Field of the records: name of the row, and forward passes of a prediction.
DISTILLED = {
    "all": ("average of all draws", "{num_draws}"),
    "two": ("average of the best two draws", "2"),
    "single": ("the best draw", "1"),
    "average, mixtures": ("network trained on the average, with mixtures", "1"),
    "average": ("network trained on the average", "1"),
    "labels": ("network trained on labels", "1"),
    "ensemble": ("ensemble of two such networks", "2"),
    "deep ensemble": ("ensemble of all such networks", "{num_members}"),
}


def _by_problem(
    found: Sequence[Record], problems: Sequence[str]
) -> Iterator[tuple[str, list[Record]]]:
    for problem in problems:
        if of := [record for record in found if record["cell"]["problem"] == problem]:
            yield problem, of


def few(found: Sequence[Record]) -> Table:
    """Test LPPD by the number of draws, mean over seeds, and the differences by seed."""
    rows = []
    for problem, of in _by_problem(found, PROBLEMS):
        chosen, evenly = (
            [[one[kind][str(k)] for one in of] for k in NUMBERS] for kind in ("chosen", "evenly")
        )
        whole = [one["all"] for one in of]
        last = f"{mean_error(whole)} ({of[0]['num_draws']:,})"
        gaps = (minus(*pair) for pair in zip(chosen, evenly, strict=True))
        rows += [
            [problem, "`choose`", *map(mean_error, chosen), last],
            [problem, "evenly spaced", *map(mean_error, evenly), last],
            [problem, "difference, paired", *gaps, ""],
            [problem, "`choose` - all, paired", *(minus(x, whole) for x in chosen), ""],
        ]
    return Table(["test LPPD", "draws", *(f"k = {k}" for k in NUMBERS), "all"], rows, found)


def optimism(found: Sequence[Record]) -> Table:
    """What 16 chosen draws seem to gain over all draws, and what they gain on test data."""
    rows, last = [], NUMBERS[-1]
    for problem, of in _by_problem(found, PROBLEMS):
        seen = [one["validation"][last - 1] - one["validation_all"] for one in of]
        gain = [one["chosen"][str(last)] - one["all"] for one in of]
        sizes = f"{of[0]['num_validation']:,}", f"{of[0]['num_draws']:,}"
        rows.append([problem, *sizes, mean_error(seen, 3, "+"), mean_error(gain, 3, "+")])
    header = ["data", "validation examples", "draws", "on validation data", "on test data"]
    return Table(header, rows, found)


def stopping(found: Sequence[Record]) -> Table:
    """Draws at the stop and steps saved for each seed, and differences in test LPPD."""
    rows = []
    for problem, of in _by_problem(found, STOPPED):
        for null in ("improvement", "doubling"):
            test = [one[null]["test"] for one in of]
            rows.append(
                [
                    f"{problem} ({of[0]['num_validation']:,})",
                    f'`"{null}"`',
                    ", ".join(_stop(one, null) for one in of),
                    ", ".join(f"{_share(one, null):.0%}" for one in of),
                    *(minus(test, [one[name] for one in of]) for name in ("start", "all")),
                ]
            )
    header = ["data (validation examples)", "null", "draws per chain at the stop", "steps saved"]
    return Table([*header, "test LPPD - start", "test LPPD - all draws"], rows, found)


def _stop(one: Record, null: str) -> str:
    at = one[null]["num_draws"] if one[null]["stopped"] else "no stop"
    return f"{at} of {one['num_draws']}"


def _share(one: Record, null: str) -> float:
    """Steps saved, as a share of those of the whole run, warm-up included."""
    whole = one["num_warmup"] + one["thin"] * one["num_draws"]
    return one["thin"] * (one["num_draws"] - one[null]["num_draws"]) / whole


def distilled(found: Sequence[Record]) -> Table:
    """LPPD and accuracy on test data, mean over seeds, and the LPPD behind that of all draws."""
    rows, whole = [], [record["scores"]["all"]["lppd"] for record in found]
    for field, (name, passes) in DISTILLED.items():
        of = [record["scores"][field] for record in found]
        lppd = [one["lppd"] for one in of]
        behind = "" if field == "all" else minus(lppd, whole, 4)
        accuracy = mean_error([one["accuracy"] for one in of], 4)
        rows.append([name, passes.format_map(found[0]), mean_error(lppd, 4), behind, accuracy])
    header = ["", "forward passes", "test LPPD", "- that of all draws, paired", "accuracy"]
    return Table(header, rows, found)
