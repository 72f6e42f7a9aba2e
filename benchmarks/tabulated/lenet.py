"""LeNet on Fashion-MNIST and a small GPT on Shakespeare; the angles on all data."""

from collections.abc import Callable, Sequence
from statistics import fmean

from benchmarks.tabulated.table import Record, Table, mean_error, number, short
from benchmarks.tabulated.uci import DATA, USUAL, by_split, select

TASKS = {"lenet": "LeNet", "gpt": "small GPT"}
ANGLES = {"psmile": "0.03", "psmile, angle .04": "0.04", "psmile, angle .05": "0.05"}


def paper_gain(method: str) -> Callable[[Sequence[Record]], str]:
    """Make a figure: LPPD of a method of the paper above its deep ensemble of LeNets."""

    def told(paper: Sequence[Record]) -> str:
        wanted = {"task": "lenet", "method": method}
        of = [r for r in paper if wanted.items() <= r["cell"].items()]
        return "".join(number(r["value"], 4, "+") for r in of if r["quantity"].startswith("lppd"))

    return told


def cells(found: Sequence[Record]) -> Table:
    """Every run."""
    ordered = sorted(found, key=lambda r: (list(TASKS).index(r["cell"]["task"]), r["cell"]["seed"]))
    rows = []
    for record in ordered:
        cell, steps = record["cell"], record.get("steps", [])
        size = short(cell["step_size"]) if cell["step_size"] else ""
        size = size or " ... ".join(short(step) for step in steps[:: max(len(steps) - 1, 1)])
        rows.append(
            [
                *(TASKS[cell["task"]], str(cell["seed"]), cell["method"], size),
                *(number(record["lppd"], 4), number(record.get("accuracy"), 4)),
                number(record.get("perplexity"), 3) if cell["task"] == "gpt" else "",
            ]
        )
    header = ["task", "seed", "method", "step size", "test LPPD", "accuracy", "perplexity"]
    return Table(header, rows, ordered)


def angles(uci: Sequence[Record], earlier: Sequence[Record], networks: Sequence[Record]) -> Table:
    """Test LPPD at three angles; differences paired by split or seed.

    On UCI the three angles ran on the scale of `uci_before.jsonl`.
    """
    rows, used = [], []
    for data in DATA:
        groups = []
        for method in ANGLES:
            source = earlier if method == "psmile" else uci
            groups.append(select(source, data=data, method=method, **USUAL))
        used += [record for group in groups for record in group]
        rows.append(_angle_row(data, [by_split(group) for group in groups]))
    for task in TASKS:
        groups = []
        for method in ANGLES:
            group = [
                r for r in networks if (r["cell"]["task"], r["cell"]["method"]) == (task, method)
            ]
            used += group
            groups.append({record["cell"]["seed"]: record["lppd"] for record in group})
        rows.append(_angle_row(TASKS[task], groups))
    pairs = [f"{angle} - 0.03" for angle in list(ANGLES.values())[1:]]
    return Table(["test LPPD, angle", *ANGLES.values(), *pairs], rows, used)


def _angle_row(name: str, groups: list[dict[int, float]]) -> list[str]:
    means = [number(fmean(x.values()), 4) if x else "not run" for x in groups]
    differences = []
    for other in groups[1:]:
        shared = sorted(other.keys() & groups[0].keys())
        differences.append(mean_error([other[s] - groups[0][s] for s in shared], 4, "+"))
    return [name, *means, *differences]
