"""From records to Markdown: the functions that all tables share.

Means and errors are exact sums (`statistics`), rounded once, so that a table is the same on every
machine.
"""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Record = dict[str, Any]
PAPER = "Sommer et al., ICML 2026"
NO_RECORD = "*No record in the repository yet; the command makes one.*"
# More commits than this are written as a range.
FEW = 3


class Table(NamedTuple):
    """A table and the records from which it is made.

    Attributes:
        header: names of the columns.
        rows: text of the cells.
        used: records from which the rows are made, including those of the paper.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    used: Sequence[Record]


def read(path: Path | None) -> list[Record]:
    """All records of a file; an incomplete line is skipped."""
    if path is None or not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def number(value: float | None, digits: int = 3, sign: str = "") -> str:
    """Round; nothing for None. A zero has no minus."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return "lost"
    shown = f"{value:{sign}.{digits}f}"
    return shown.replace("-", "+" if sign else "") if float(shown) == 0 else shown


def short(value: float | None) -> str:
    """Round to two significant digits."""
    return "" if value is None else f"{value:.2g}"


def thousands(value: float) -> str:
    """Round to a whole number, or to two digits and a power of ten where it is large."""
    rounded = round(value)
    if abs(rounded) < 100_000:
        return f"{rounded:,}"
    mantissa, power = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(power)}"


def standard_error(values: Sequence[float]) -> float | None:
    """Standard error of the mean; None for a single value, or where a run was lost."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    return statistics.stdev(values) / math.sqrt(len(values))


def mean_error(values: Sequence[float], digits: int = 3, sign: str = "") -> str:
    """Mean ± standard error; only the mean of a single value, nothing without values."""
    if not values:
        return ""
    if not all(map(math.isfinite, values)):
        return "lost"
    error = standard_error(values)
    mean = number(statistics.fmean(values), digits, sign)
    return mean if error is None else f"{mean} ± {number(error, digits)}"


def minus(ours: Sequence[float], theirs: Sequence[float], digits: int = 3) -> str:
    """Mean difference of pairs ± standard error, with a sign."""
    return mean_error([a - b for a, b in zip(ours, theirs, strict=True)], digits, "+")


def value_error(value: float, error: float | None, digits: int = 3) -> str:
    """A figure ± its error."""
    shown = number(value, digits)
    return shown if error is None else f"{shown} ± {number(error, digits)}"


def markdown(table: Table) -> str:
    """The table, or a note that there is no record."""
    if not table.rows:
        return NO_RECORD
    lines = [table.header, ["---"] * len(table.header), *table.rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def spans(values: Iterable[int]) -> str:
    """Write whole numbers: `0 to 4`, `0`, or `0, 2`."""
    found = sorted(set(values))
    if len(found) > 2 and found == list(range(found[0], found[-1] + 1)):
        return f"{found[0]} to {found[-1]}"
    return ", ".join(map(str, found))


def provenance(used: Sequence[Record]) -> str:
    """Commits, dates, devices and seeds of the records, and the places in the paper."""
    parts = []
    papers = sorted({record["where"] for record in used if "where" in record})
    ours = [record for record in used if "where" not in record]
    if ours:
        runs = sorted({(r.get("time", ""), r.get("commit", "")) for r in ours})
        commits = list(dict.fromkeys(commit for _, commit in runs if commit))
        days = sorted({time[:10] for time, _ in runs if time})
        devices = sorted({f"{r['device']}, jax {r['jax']}" for r in ours if "device" in r})
        parts.append(f"{len(ours)} record{'s' * (len(ours) > 1)}")
        if not commits:
            parts.append("without commit and date")
        elif len(commits) > FEW:
            parts.append(f"{len(commits)} commits from {commits[0]} to {commits[-1]}")
        else:
            parts.append(f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}")
        parts += [" to ".join(dict.fromkeys((days[0], days[-1])))] if days else []
        parts += devices
        parts += repetitions(ours)
    parts += [f"paper: {PAPER}, {'; '.join(papers)}"] if papers else []
    return f"*{' · '.join(parts)}*"


def repetitions(used: Sequence[Record]) -> list[str]:
    """Seeds, splits, chains and repetitions, where the records have them."""
    found: dict[str, set[int]] = {}
    for record in used:
        cell, settings = record.get("cell", {}), record.get("settings", [])
        # Other files have strings there, and names.
        cell = cell if isinstance(cell, dict) else {}
        settings = settings if isinstance(settings, list) else []
        seed = record.get("config", cell).get("seed", settings[0] if settings else None)
        # Where a cell may have a seed, it is 0 if there is none.
        seed = 0 if seed is None and "split" in cell else seed
        chains = cell.get("num_chains", settings[-1] if settings else None)
        for name, value in (
            ("seed", seed),
            ("split", cell.get("split")),
            ("chains", chains),
            ("repetitions", record.get("repetitions")),
        ):
            if value is not None:
                found.setdefault(name, set()).add(value)
    texts = []
    for name, values in found.items():
        if name in ("seed", "split"):
            texts.append(f"{name}{'s' * (len(values) > 1)} {spans(values)}")
        else:
            texts.append(f"{spans(values)} {name}")
    return texts


def block(table: Table) -> str:
    """The content between the markers: the table, and a line on its records."""
    if not table.rows:
        return NO_RECORD
    return f"{markdown(table)}\n\n{provenance(table.used)}"
