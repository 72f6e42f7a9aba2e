"""The local learning coefficient: known values, SGLD, and a transformer."""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.tabulated.table import Record, Table, number, short, thousands

WITHIN = 0.05


def _kind(finding: Any) -> str:
    """Of a finding of a record: a pair of kind and text; records before it have sentences."""
    return finding.partition(":")[0] if isinstance(finding, str) else finding[0]


def _of(found: Sequence[Record], sampler: str) -> dict[str, list[Record]]:
    """Records of a sampler, by model in the order of the file."""
    models: dict[str, list[Record]] = {}
    for record in found:
        if record["cell"]["sampler"] == sampler:
            models.setdefault(record["cell"]["model"], []).append(record)
    return models


def error(record: Record, name: str = "llc") -> float | None:
    """Relative error of the estimate; None where a run was lost."""
    if record[name] is None:
        return None
    return record[name] / record["exact"] - 1


def _percent(value: float | None, sign: str = "+") -> str:
    if value is None:
        return "lost"
    share = 100 * value
    return f"{share:{sign}.1f} %" if abs(share) < 1_000 else f"{share:{sign}.0e} %"


def known(found: Sequence[Record]) -> Table:
    """One row per model: exact value, estimate by defaults, errors of all seeds, the worst."""
    rows, used = [], []
    for model, records in _of(found, "psmile").items():
        first = records[0]
        plain = [error(record, "plain") for record in records]
        errors = [error(record) for record in records]
        row = [model, thousands(first["num_parameters"]), number(first["exact"], 2)]
        row += [number(first["asymptotic"], 2), f"{first['localization']:g}"]
        row += [number(first["llc"], 2), short(first["standard_error"])]
        row += [", ".join(map(_percent, errors)), ", ".join(map(_percent, plain))]
        said = {_kind(found) for record in records for found in record["findings"]}
        rows.append([*row, ", ".join(sorted(said)) or "-"])
        used += records
    header = ["model", "d", "exact", "n → ∞", "gamma", "llc, seed 0", "its error"]
    header += ["off, each seed", "mean loss alone, off", "findings"]
    return Table(header, rows, used)


def beside_sgld(found: Sequence[Record]) -> Table:
    """One row per model: relative error of the mean loss by psmile, and by SGLD at each step."""
    ours, theirs = _of(found, "psmile"), _of(found, "sgld")
    sizes = sorted({r["cell"]["step_size"] for records in theirs.values() for r in records})
    rows, used = [], []
    for model, records in theirs.items():
        by_size = {record["cell"]["step_size"]: record for record in records}
        first = next((r for r in ours.get(model, []) if r["cell"]["seed"] == 0), None)
        cells = [_percent(error(first, "plain")) if first else ""]
        for size in sizes:
            record = by_size.get(size)
            cells.append("" if record is None else _percent(error(record, "plain")))
        rows.append([model, *cells])
        used += records + ([first] if first else [])
    return Table(["model", "psmile", *(f"sgld {size:.0e}" for size in sizes)], rows, used)


def met(found: Sequence[Record], estimate: str) -> str:
    """How many models are within 5 % of the exact value for every seed."""
    models = _of(found, "psmile").values()
    errors = [[error(record, estimate) for record in records] for records in models]
    good = [all(x is not None and abs(x) <= WITHIN for x in of) for of in errors]
    return f"{sum(good)} of {len(good)}"


def sgld_met(found: Sequence[Record]) -> str:
    """At how many models the best single step size of SGLD is within 5 %."""
    theirs = _of(found, "sgld")
    counts: dict[float, int] = {}
    for records in theirs.values():
        for record in records:
            value = error(record, "plain")
            size = record["cell"]["step_size"]
            counts[size] = counts.get(size, 0) + (value is not None and abs(value) <= WITHIN)
    if not counts:
        return ""
    size = max(counts, key=lambda key: counts[key])
    return f"{counts[size]} of {len(theirs)} at {size:.0e}"


def transformer(found: Sequence[Record]) -> Table:
    """One row per localization and length: seeds, and how far they are from their mean."""
    groups: dict[tuple[float, int], list[Record]] = {}
    for record in found:
        cell = record["cell"]
        groups.setdefault((cell["localization"], cell["thin"]), []).append(record)
    rows, shortest = [], {}
    for (localization, thin), records in sorted(groups.items()):
        estimates = [r["llc"] for r in records if r["llc"] is not None]
        if not estimates:
            continue
        mean = statistics.fmean(estimates)
        base = shortest.setdefault(localization, mean)
        spread = max(abs(value / mean - 1) for value in estimates)
        cell = records[0]["cell"]
        steps = cell["num_warmup"] + cell["num_draws"] * thin
        said = {_kind(found) for record in records for found in record["findings"]}
        row = [f"{localization:g}", f"{steps:,}", ", ".join(thousands(x) for x in estimates)]
        row += [_percent(spread, "") if len(estimates) > 1 else "", _percent(mean / base - 1)]
        row += [number(statistics.fmean(r["loss"] for r in records), 4)]
        rows.append([*row, ", ".join(sorted(said)) or "-"])
    header = ["gamma", "gradients per chain", "llc, each seed", "farthest from their mean"]
    header += ["from the shortest run", "loss of the draws", "findings"]
    return Table(header, rows, found)
