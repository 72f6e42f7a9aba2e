"""Records as data frames, how tables write numbers, and the line below a table on its records.

A frame has a row for each record. Its columns are the fields of the cell and of the result, nested
ones with dots (`mixing.bias`); `record` is the record as it was written. A field that a record
lacks is NaN.
"""

import json
import math
import re
import statistics
from collections.abc import Iterable
from typing import Any

from benchmarks.records import ROOT, Record

import pandas as pd

RESULTS = ROOT / "benchmarks" / "results"
PAPER = "Sommer et al., ICML 2026"
NO_RECORD = "*No record in the repository yet; the command makes one.*"
# More commits than this are written as a range.
FEW = 3


def frame(records: list[Record]) -> pd.DataFrame:
    """A row for each record; `options` of a cell are JSON, as `text_of` writes them."""
    rows = [record | record.get("cell", {}) for record in records]
    rows = [row | {"options": text_of(row["options"])} if "options" in row else row for row in rows]
    made = pd.json_normalize([{k: x for k, x in row.items() if k != "cell"} for row in rows])
    return made.assign(record=records)


def text_of(options: dict[str, Any]) -> str:
    """Options of a method, to be compared."""
    return json.dumps(options, sort_keys=True)


def ordered(runs: Any, **orders: Iterable[Any]) -> pd.DataFrame:
    """Rows whose fields have one of these values each, sorted by the places of these."""
    for name, values in reversed(orders.items()):
        places = {value: place for place, value in enumerate(values)}
        runs = runs[runs[name].isin(places)]
        runs = runs.sort_values(name, key=lambda x, of=places: x.map(of), kind="stable")
    return runs


def best(runs: Any, *by: str, setting: str, score: str) -> pd.DataFrame:
    """Of each group, the rows at the setting with the highest mean score.

    Only settings with as many rows as any other of the group compete.
    """
    groups = runs.groupby([*by, setting], sort=False, dropna=False)[score]
    places = groups.ngroup()
    ranked = runs.assign(place=places, size=groups.transform("size"), mean=groups.transform("mean"))
    ranked = ranked.sort_values(["size", "mean"], ascending=False, kind="stable")
    return runs[places.isin(ranked.drop_duplicates([*by])["place"])]


def number(value: Any, spec: str = ".3f") -> str:
    """Format a value; nothing for None and NaN. A zero has no minus."""
    if value is None or value != value:
        return ""
    if isinstance(value, float) and math.isinf(value):
        return "lost"
    # A minus before nothing but zeros.
    return re.sub(r"^-(?=[0.]+$)", "+" if "+" in spec else "", f"{value:{spec}}")


def short(value: float | None) -> str:
    """Round to two significant digits."""
    return number(value, ".2g")


def numbers(values: pd.Series, spec: str = ".3f") -> pd.Series:
    """Format a column, see `number`."""
    return values.map(lambda value: number(value, spec))


def value_error(value: Any, error: Any, digits: int = 3, sign: str = "") -> str:
    """A figure ± its error."""
    parts = number(value, f"{sign}.{digits}f"), number(error, f".{digits}f")
    return " ± ".join(filter(None, parts))


def mean_error(values: Iterable[float], digits: int = 3, sign: str = "") -> str:
    """Mean ± standard error; only the mean of a single value, nothing without values.

    Sums are exact and rounded once, so that a table is the same on every machine.
    """
    known = [float(value) for value in values if value == value]
    if not known:
        return ""
    if any(map(math.isinf, known)):
        return "lost"
    error = statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else None
    return value_error(statistics.fmean(known), error, digits, sign)


def mean(values: Iterable[float], digits: int = 3, sign: str = "") -> str:
    """The mean alone."""
    return mean_error(values, digits, sign).split(" ± ")[0]


def spans(values: Iterable[int]) -> str:
    """Write whole numbers: `0 to 4`, `0`, or `0, 2`."""
    found = sorted(set(values))
    if len(found) > 2 and found == list(range(found[0], found[-1] + 1)):
        return f"{found[0]} to {found[-1]}"
    return ", ".join(map(str, found))


def markdown(table: pd.DataFrame, used: pd.DataFrame) -> str:
    """A table of texts and the line on its records; levels of the index become columns.

    Titles are stripped, so that two columns may have the same one.
    """
    if table.index.names != [None]:
        table = table.reset_index()
    table = table.astype(object).where(table.notna(), "").rename(columns=str.strip)
    shown = table.to_markdown(index=False, tablefmt="github", stralign=None, disable_numparse=True)
    header, _, *lines = shown.splitlines()
    rule = "|" + " --- |" * table.shape[1]
    return "\n".join([header, rule, *lines]) + f"\n\n{provenance(used)}"


def provenance(used: pd.DataFrame) -> str:
    """Commits, dates, devices and seeds of the records, and the places in the paper."""
    parts = []
    found = {id(record): record for record in used["record"]}.values()
    papers = sorted({record["where"] for record in found if "where" in record})
    ours = [record for record in found if "where" not in record]
    if ours:
        runs = sorted({(r.get("time", ""), r.get("commit", "")) for r in ours})
        commits = list(dict.fromkeys(commit for _, commit in runs if commit))
        days = sorted({time[:10] for time, _ in runs if time})
        parts.append(f"{len(ours)} record{'s' * (len(ours) > 1)}")
        if len(commits) > FEW:
            parts.append(f"{len(commits)} commits from {commits[0]} to {commits[-1]}")
        else:
            parts.append(f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}")
        parts += [" to ".join(dict.fromkeys((days[0], days[-1])))] if days else []
        parts += sorted({f"{r['device']}, jax {r['jax']}" for r in ours if "device" in r})
        parts += repetitions(ours)
    parts += [f"paper: {PAPER}, {'; '.join(papers)}"] if papers else []
    return f"*{' · '.join(parts)}*"


def repetitions(used: Iterable[Record]) -> list[str]:
    """Seeds, splits, chains and repetitions, where the records have them."""
    found: dict[str, set[int]] = {}
    for record in used:
        cell = record.get("cell", {})
        # Of `analytic.py`: the seed and two numbers of chains.
        seed, *chains = record.get("settings", [record.get("config", cell).get("seed")])
        of = {
            # Where a cell may have a seed, it is 0 if there is none.
            "seed": 0 if seed is None and "split" in cell else seed,
            "split": cell.get("split"),
            "chains": cell.get("num_chains", chains[-1] if chains else None),
            "repetitions": record.get("repetitions"),
        }
        for name, value in of.items():
            if value is not None:
                found.setdefault(name, set()).add(value)
    return [
        f"{name}{'s' * (len(of) > 1)} {spans(of)}"
        if name in ("seed", "split")
        else f"{spans(of)} {name}"
        for name, of in found.items()
    ]
