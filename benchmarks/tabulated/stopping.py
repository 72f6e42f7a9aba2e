"""When the stopping rule would have stopped."""

from collections.abc import Sequence

from benchmarks.tabulated.table import Record, Table, mean_error

PROBLEMS = ("digits", "2,000 images", "energy")


def saved(found: Sequence[Record]) -> Table:
    """Draws at the stop and steps saved for each seed, and differences in test LPPD."""
    rows, used = [], []
    for problem in PROBLEMS:
        of = [record for record in found if record["cell"]["problem"] == problem]
        used += of
        for null in ("improvement", "doubling") if of else ():
            gained = [one[null]["test"] - one["start"] for one in of]
            lost = [one[null]["test"] - one["all"] for one in of]
            rows.append(
                [
                    f"{problem} ({of[0]['num_validation']:,})",
                    f'`"{null}"`',
                    ", ".join(_stop(one, null) for one in of),
                    ", ".join(f"{_share(one, null):.0%}" for one in of),
                    mean_error(gained, 3, "+"),
                    mean_error(lost, 3, "+"),
                ]
            )
    header = ["data (validation examples)", "null", "draws per chain at the stop", "steps saved"]
    header += ["test LPPD - start", "test LPPD - all draws"]
    return Table(header, rows, used)


def _stop(one: Record, null: str) -> str:
    at = one[null]["num_draws"] if one[null]["stopped"] else "no stop"
    return f"{at} of {one['num_draws']}"


def _share(one: Record, null: str) -> float:
    """Steps saved, as a share of those of the whole run, warm-up included."""
    whole = one["num_warmup"] + one["thin"] * one["num_draws"]
    return one["thin"] * (one["num_draws"] - one[null]["num_draws"]) / whole
