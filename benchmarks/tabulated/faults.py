"""What the campaigns of `tests/faults` found when they were last run as a whole."""

from collections.abc import Sequence

from benchmarks.tabulated.table import Record, Table

COUNTS = ("cases", "silent", "raw", "lost")


def campaigns(found: Sequence[Record]) -> Table:
    """One row per campaign, summed over its parts; of each part the last record."""
    parts: dict[str, dict[str, Record]] = {}
    for record in found:
        parts.setdefault(record["campaign"], {})[record.get("of", "")] = record
    rows = []
    for campaign, last in parts.items():
        counts = [f"{sum(record.get(name, 0) for record in last.values()):,}" for name in COUNTS]
        dates = dict.fromkeys(sorted(record["date"] for record in last.values()))
        commands = dict.fromkeys(f"`{record['command']}`" for record in last.values())
        rows.append([campaign, *counts, ", ".join(dates), ", ".join(commands)])
    header = ["campaign", "cases", "silent", "raw", "lost", "date", "command"]
    return Table(header, rows, [record for last in parts.values() for record in last.values()])
