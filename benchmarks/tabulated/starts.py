"""Where chains arrive from starts near and far, and whether diagnostics report it."""

import itertools
from collections.abc import Sequence
from statistics import median

from benchmarks.tabulated.table import Record, Table, number, thousands

STARTS = ("mode", "AdamW", "fresh", "ten times fresh", "zeros")
# Problem of the records: what it is.
PROBLEMS = {
    "README": "five parameters",
    "energy": "network, UCI energy",
    "digits": "network, digits",
}


def _rows(found: Sequence[Record]) -> dict[tuple[str, str, str], Record]:
    return {(r["cell"]["problem"], r["cell"]["sampler"], r["cell"]["start"]): r for r in found}


def _reached(record: Record, base: float) -> str:
    """Median and worst chain, in nats above chains from a mode."""
    energies = record["energy"]
    return f"{thousands(median(energies) - base)}, {thousands(max(energies) - base)}"


def summary(found: Sequence[Record]) -> Table:
    """Only `psmile`: energies after the run."""
    cells, rows, used = _rows(found), [], []
    for start in STARTS:
        row = [start]
        for problem in PROBLEMS:
            record = cells.get((problem, "psmile", start))
            mode = cells.get((problem, "psmile", "mode"))
            if record is None or mode is None:
                row.append("")
                continue
            reported = "; is told" if record["is_told"] or record["on_its_way"][-1] > 0.5 else ""
            row.append(_reached(record, median(mode["energy"])) + reported)
            used.append(record)
        rows.append(row)
    header = ["start (nats above chains from a mode: median, worst)", *PROBLEMS.values()]
    return Table(header, rows if used else [], used)


def cells(found: Sequence[Record]) -> Table:
    """Every problem, sampler and start."""
    known, rows = _rows(found), []
    for problem, sampler, start in itertools.product(PROBLEMS, ("psmile", "smile"), STARTS):
        record, mode = (known.get((problem, sampler, name)) for name in (start, "mode"))
        if record is None or mode is None:
            continue
        base = median(mode["energy"])
        shares = ", ".join(number(share, 2) for share in record["on_its_way"])
        there = thousands(record["start_energy"] - base)
        reported = "yes" if record["is_told"] else "no"
        row = [PROBLEMS[problem], sampler, start, there, _reached(record, base), shares, reported]
        rows.append(row)
    header = ["problem", "sampler", "start", "U there", "U in the last quarter: median, worst"]
    return Table([*header, "share on its way", "`summary` tells"], rows, found)
