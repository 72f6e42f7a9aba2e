"""UCI in the protocol of the paper, batch-wise and epoch-wise, beside the paper's figures."""

from collections.abc import Sequence

from benchmarks.tabulated.table import Record, Table, mean_error, short, value_error
from benchmarks.tabulated.uci import select

DATA = ("energy", "airfoil", "bikesharing")
# Row: method of our records, that of the paper, gradients of our run on each data set.
BATCH_WISE = (
    ("scale_adapted_sghmc", "scale_adapted_sghmc", (60_000, 60_000, 60_000)),
    ("smile_naive as shipped", "smile_naive", (120_000, 120_000, 120_000)),
    ("smile_naive published", "smile_naive", (120_000, 120_000, 120_000)),
    ("psmile_naive as shipped", "psmile_naive", (120_000, 120_000, 120_000)),
    ("psmile_naive published", "psmile_naive", (120_000, 120_000, 120_000)),
    ("psmile", "", (60_000, 60_000, 60_000)),
    ("mile", "mile", (120_000, 120_000, 120_000)),
)
# As many passes as full-batch MILE makes steps: 2, 4 and 47 batches a pass.
EPOCH_WISE = (
    ("scale_adapted_sghmc", "scale_adapted_sghmc", (120_000, 240_000, 2_820_000)),
    ("smile_naive published", "smile_naive", (240_000, 480_000, 5_640_000)),
    ("psmile_naive relative bounds", "psmile_naive", (240_000, 480_000, 5_640_000)),
    ("psmile", "", (120_000, 240_000, 2_820_000)),
    ("mile", "mile", (120_000, 120_000, 120_000)),
)


def _given(paper: Sequence[Record], budget: str, data: str, method: str) -> list[Record]:
    budgets = ("full batch",) if method == "mile" else (budget,)
    return [
        record
        for record in paper
        if record["quantity"] == "lppd"
        and record["cell"]["data"] == data
        and record["cell"].get("method") == method
        and record["cell"]["budget"] in budgets
    ]


def _table(budget: str, plan, found: Sequence[Record], paper: Sequence[Record]) -> Table:
    rows, used = [], []
    for method, theirs, gradients in plan:
        cells = []
        for data, count in zip(DATA, gradients, strict=True):
            wanted = {"protocol": "paper", "data": data, "method": method, "num_gradients": count}
            ours = select(found, **wanted)
            given = _given([r for r in paper if "data" in r["cell"]], budget, data, theirs)
            used += [*ours, *given]
            text = mean_error([record["lppd"] for record in ours])
            cells.append(f"{text} ({len(ours)})" if ours else "not run")
            cells.append("".join(value_error(r["value"], r["error"]) for r in given))
        rows.append([method, *cells])
    header = ["LPPD (number of splits)"]
    header += [name for data in DATA for name in (data, "paper")]
    return Table(header, rows, used)


def batch_wise(found: Sequence[Record], paper: Sequence[Record]) -> Table:
    """As many steps for every method."""
    return _table("batch-wise", BATCH_WISE, found, paper)


def epoch_wise(found: Sequence[Record], paper: Sequence[Record]) -> Table:
    """As many passes through the data for every method."""
    return _table("epoch-wise", EPOCH_WISE, found, paper)


def distributional(found: Sequence[Record]) -> Table:
    """LPPD on bike sharing by step size and batches of a pass; other methods in batches of 256."""
    wanted = {"protocol": "distributional", "data": "bikesharing", "num_chains": 3}
    found = [r for r in found if wanted.items() <= r["cell"].items()]
    counts = sorted({r["cell"].get("batches_per_pass", 0) for r in found} - {0}, reverse=True)
    rows: dict[str, dict[int | None, list[float]]] = {}
    for record in found:
        cell = record["cell"]
        step = f", step {short(cell['step_size'])}" if cell["step_size"] else ""
        row = rows.setdefault(cell["method"] + step, {})
        row.setdefault(cell.get("batches_per_pass"), []).append(record["lppd"])
    cells = [
        [name, *(mean_error(row.get(n, [])) for n in (*counts, None))] for name, row in rows.items()
    ]
    header = ["method", *(f"{n} batches a pass" for n in counts), "256 rows a batch"]
    return Table(header, cells, found)
