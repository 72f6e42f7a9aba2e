"""What a step, a prediction and the loop of `sample` cost."""

from collections.abc import Sequence

from benchmarks.tabulated.table import Record, Table, number

USUAL = {"part": "update", "leaves": 20, "chains": 1, "grads": "float32"}
LARGE = 10**7
SUMMARY = ("sgd", "sgld", "smile_naive", "smile", "psmile_naive", "psmile")
DETAILS = {
    "time / AdamW": "ratio",
    "ms": "ms",
    "arrays moved": "traffic",
    "temporary": "temporary",
    "peak": "peak",
    "compilation, s": "compile_s",
}


def _name(record: Record) -> str:
    cell = record["cell"]
    chains = f", {cell['chains']} chains" if cell["chains"] > 1 else ""
    if cell["part"] == "network":
        loop = ", Python loop" if "per_program" in cell else ""
        return f"whole step, {cell['network']}{chains}{loop}"
    leaves = (
        ""
        if cell["leaves"] == 20
        else f", {cell['leaves']} {'leaf' if cell['leaves'] == 1 else 'leaves'}"
    )
    kind = "" if cell["grads"] == "float32" else f", {cell['grads']}"
    return f"update, 10^{len(str(cell['parameters'])) - 1} parameters{leaves}{kind}{chains}"


def _methods(found: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(name for record in found for name in record["methods"]))


def _ratios(found: Sequence[Record], title: str, field: str, names: Sequence[str]) -> Table:
    rows = [
        [_name(r), *(number(r["methods"].get(name, {}).get(field), 2) for name in names)]
        for r in found
    ]
    return Table([title, *names], rows, found)


def steps(found: Sequence[Record]) -> Table:
    """Time of everything, in that of AdamW."""
    return _ratios(found, "time / AdamW", "ratio", _methods(found))


def steps_summary(found: Sequence[Record]) -> Table:
    """The same for updates of two sizes, and whole steps of one chain."""
    few = [
        record
        for record in found
        if record["cell"]["part"] == "network"
        and record["cell"]["chains"] == 1
        or USUAL.items() <= record["cell"].items()
        and record["cell"]["parameters"] in (1_000, LARGE)
    ]
    return _ratios(few, "time / AdamW", "ratio", SUMMARY)


def _digits(value: float | None) -> str:
    """Three digits, and no more than three after the point."""
    return "" if value is None else f"{round(value, 3):.3g}"


def compilation(found: Sequence[Record]) -> Table:
    """Time to compile, in that of AdamW."""
    return _ratios(found, "compilation / AdamW", "compile_ratio", _methods(found))


def details(found: Sequence[Record]) -> Table:
    """Everything about an update of 10^7 parameters."""
    used = [r for r in found if (USUAL | {"parameters": LARGE}).items() <= r["cell"].items()]
    rows = [
        [name, *(_digits(numbers.get(field)) for field in DETAILS.values())]
        for record in used[:1]
        for name, numbers in record["methods"].items()
    ]
    return Table(["update, 10^7 parameters, 20 leaves", *DETAILS], rows, used[:1])


def whole_step(found: Sequence[Record], network: str, method: str) -> str:
    """Time of a whole step of a network in that of AdamW."""
    cells = [r for r in found if (r["cell"].get("network"), r["cell"]["chains"]) == (network, 1)]
    return number(cells[0]["methods"][method]["ratio"], 2)


def update(found: Sequence[Record], method: str) -> str:
    """Time of an update of 10^7 parameters in that of AdamW."""
    wanted = USUAL | {"parameters": LARGE}
    cells = [record for record in found if wanted.items() <= record["cell"].items()]
    return number(cells[0]["methods"][method]["ratio"], 1)


def predictions(found: Sequence[Record]) -> Table:
    """Time of `Predictor` in that of the bare forward passes."""
    rows = [
        [
            f"{record['batch_size']:,}",
            number(record["ratio"], 2),
            f"{number(record['lower_quartile'], 2)}, {number(record['upper_quartile'], 2)}",
            f"{record['added_mib']:.0f}",
        ]
        for record in found
    ]
    header = ["batch of inputs", "time / bare passes", "quartiles", "MiB added"]
    return Table(header, rows, found)


def loops(found: Sequence[Record]) -> Table:
    """Time of `sample` in that of another loop."""
    rows = [
        [
            record["what"],
            record["against"],
            number(record["ratio"], 2),
            ", ".join(number(x, 2) for x in record["quartiles"]),
        ]
        for record in found
    ]
    return Table(["time of", "in that of", "ratio", "quartiles"], rows, found)
