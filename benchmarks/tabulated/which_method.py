"""All methods of `examples/compare.py` on one problem, what to use, and where to look first."""

from collections.abc import Callable, Sequence

from benchmarks.tabulated.table import NO_RECORD, Record, Table, mean_error
from benchmarks.tabulated.uci import OPTIONAL

import verdict

PROBLEMS = {
    "digits": "digits, d / N = 4.5, 4,000 gradients",
    "energy": "energy, d / N = 1.3, 10,000 gradients",
    "airfoil": "airfoil, d / N = 0.63, 10,000 gradients",
}
# Methods and options on LeNet, in the order of the columns.
LENET: tuple[tuple[str, dict], ...] = (
    ("deep ensemble", {}),
    ("checkpoints", {"learning_rate": 0.002}),
    ("psmile", {}),
    ("psmile", {"temperature": "auto", "angle": 0.3}),
    ("", {}),
)
SHOWN = ("deep ensemble", "checkpoints", "psmile", "psmile, cold")


def scores(problem: str) -> Callable[[Sequence[Record]], Table]:
    """Mean and standard error over seeds."""

    def table(found: Sequence[Record]) -> Table:
        used = of(found, problem)
        if not used:
            return Table([], [], [])
        return Table(*verdict.cells([record["methods"] for record in used]), used)

    return table


def short(found: Sequence[Record], networks: Sequence[Record]) -> Table:
    """Test LPPD of the methods of the documentation's page, and the best of all others.

    LeNet is from the benchmark of networks, where the ensemble has only the starts of the chains.
    """
    rows, used = [], []
    for problem, shown in PROBLEMS.items():
        records = of(found, problem)
        if not records:
            continue
        used += records
        results = [record["methods"] for record in records]
        known = [x for x in results[0] if verdict.column(results, x, "lppd")]
        scores = {x: verdict.estimate(verdict.column(results, x, "lppd")) for x in known}
        others = {x: scores[x] for x in known if x not in (*SHOWN, verdict.CHOOSER)}
        best = max(others, key=lambda name: others[name].mean)
        cells = [scores[x].shown() for x in SHOWN]
        rows.append([shown, *cells, f"{best}: {scores[best].shown()}"])
    row = ["LeNet, d / N = 1.1, 12,000 gradients"]
    for method, options in LENET:
        cells = [
            r for r in networks if r["cell"]["task"] == "lenet" and r["cell"]["form"] == "small"
        ]
        cells = [
            r for r in cells if (r["cell"]["method"], r["cell"]["options"]) == (method, options)
        ]
        row.append(verdict.estimate([r["lppd"] for r in cells]).shown() if cells else "")
        used += cells
    rows.append(row)
    return Table(["problem", *SHOWN, "best of the others"], rows, used)


def advice(problem: str) -> Callable[[Sequence[Record]], str]:
    """The three sentences."""

    def text(found: Sequence[Record]) -> str:
        used = of(found, problem)
        return " ".join(verdict.sentences([r["methods"] for r in used])) if used else NO_RECORD

    return text


def of(found: Sequence[Record], problem: str) -> list[Record]:
    """Records of a problem, by seed."""
    cells = [(record["cell"], record) for record in found]
    used = [one for cell, one in cells if cell["problem"] == problem and "smoke" not in cell]
    return sorted(used, key=lambda record: record["cell"]["seed"])


def decisions(
    uci: Sequence[Record],
    networks: Sequence[Record],
    choices: Sequence[Record],
    few: Sequence[Record],
) -> Table:
    """What to try first, by weights per example, budget and deployment, with what was measured."""
    sizes = {
        r["cell"]["problem"]: r["num_parameters"] / r["num_data"]
        for r in choices
        if r["lppd"] is not None
    }
    rows, used = [], []

    def add(case: str, size: str, advice: str, found: Sequence[tuple[Record, Record]], text: str):
        gaps = [a["lppd"] - b["lppd"] for a, b in found]
        rows.append([case, size, advice, f"{mean_error(gaps, 3, '+')} {text}"])
        used.extend(record for pair in found for record in pair)

    for data in ("energy", "airfoil"):
        cells = [r for r in uci if r["cell"]["data"] == data and _is_usual(r["cell"])]
        case = f"tabular data ({data}), thousands of passes over the data, 4,000 draws"
        text = "psmile over checkpoints at their best rate"
        add(case, f"{sizes[data]:.1f}", "psmile", _beside(cells, "psmile", "split"), text)
    small = [r for r in networks if (r["cell"]["task"], r["cell"]["form"]) == ("lenet", "small")]
    cold = [r for r in small if "temperature" in r["cell"]["options"]]
    base = [r for r in small if r["cell"]["method"] == "checkpoints"]
    text = "cold psmile over checkpoints at their best rate"
    pairs = _beside(cold + base, "psmile", "seed")
    # 61,706 weights, 54,000 images.
    add(
        "image network (LeNet), 14 passes over the data, 128 draws",
        "1.1",
        "cold psmile, or checkpoints",
        pairs,
        text,
    )
    first = [r for r in choices if r["cell"]["seed"] == 0]
    seen = {r["cell"]["method"]: r for r in first if r["cell"]["problem"] == "2,000 images"}
    for name in ("psmile, around the start", "psmile"):
        found = [(seen[name], seen["deep ensemble"])]
        advice = "around the start, or the ensemble" if name != "psmile" else "not psmile"
        text = f"{name} over the deep ensemble"
        add("2,000 images, a wide layer", f"{sizes['2,000 images']:.0f}", advice, found, text)
    lenet = [r for r in few if r["cell"]["problem"] == "LeNet"]
    lost = mean_error([r["chosen"]["8"] - r["all"] for r in lenet], 3, "+")
    number = lenet[0]["num_draws"]
    measured = f"{lost}: 8 chosen draws, compared with all {number} (LeNet)"
    rows.append(["at most 8 forward passes per prediction", "", "psmile, then `choose`", measured])
    return Table(["your case", "d / N", "try first", "gain in test LPPD, nats"], rows, used + lenet)


def _is_usual(cell: Record) -> bool:
    usual = "joint", 60_000, 10
    is_usual = (cell["protocol"], cell["num_gradients"], cell["num_chains"]) == usual
    return is_usual and not OPTIONAL & cell.keys()


def _beside(found: Sequence[Record], method: str, by: str) -> list[tuple[Record, Record]]:
    """Pairs of the method and of checkpoints at the rate with the best mean where all have run."""
    ours = {r["cell"][by]: r for r in found if r["cell"]["method"] == method}
    rates: dict[str, dict[int, Record]] = {}
    for record in found:
        cell = record["cell"]
        if cell["method"] == "checkpoints" and cell[by] in ours:
            rate = str(cell.get("step_size", cell.get("options")))
            rates.setdefault(rate, {})[cell[by]] = record
    whole = [group for group in rates.values() if len(group) == len(ours)]
    best = max(whole, key=lambda group: sum(r["lppd"] for r in group.values()))
    return [(ours[place], best[place]) for place in sorted(ours)]
