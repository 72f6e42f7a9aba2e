"""Training loops of other libraries after one changed line, and the campaigns of tests/faults."""

from collections.abc import Sequence

from benchmarks.tabulated.table import Record, Table, number

RUNS = ("runs, sane", "runs, flagged")
VERDICTS = (*RUNS, "refused, with advice", "failed", "wrong without a word")

COUNTS = ("cases", "silent", "raw", "lost")


def _of(found: Sequence[Record], kind: str) -> list[Record]:
    return [record for record in found if record["kind"] == kind]


def _place(record: Record) -> str:
    """Repository and path, in one cell."""
    return f"{record['cell']['repository']}, {record['cell']['path']}"


def _line(record: Record) -> str:
    """The line as it was, and as it is now."""
    return " → ".join(f"`{part}`" for part in record["line"].split(" -> "))


def counts(found: Sequence[Record]) -> Table:
    """How many loops have each verdict."""
    of = _of(found, "loop")
    verdicts = [record["verdict"] for record in of]
    numbers = {verdict: verdicts.count(verdict) for verdict in VERDICTS if verdicts}
    rows = [[verdict, str(n), f"{n / len(of):.0%}"] for verdict, n in numbers.items()]
    return Table(["verdict", "loops", "share"], rows, of)


def loops(found: Sequence[Record]) -> Table:
    """One row per loop."""
    of = _of(found, "loop")
    rows = [[_place(r), r["version"], _line(r), r["verdict"], r["note"]] for r in of]
    return Table(["loop", "version", "changed line", "verdict", "what was seen"], rows, of)


def fits(found: Sequence[Record]) -> Table:
    """One row per fit that `recorded` watched; the worst chain and weight of each."""
    of = _of(found, "recorded")
    rows = []
    for record in of:
        worst = max(abs(x) for chain in record["mean_off"] for x in chain)
        ratios = [x for chain in record["sd_ratio"] for x in chain]
        spread = f"{number(min(ratios), 2)} to {number(max(ratios), 2)}"
        place = [_place(record), record["version"], _line(record)]
        rows.append([*place, number(worst, 2), spread, record["verdict"], record["note"]])
    header = ["loop", "version", "changed line", "worst mean", "sd", "verdict", "what was seen"]
    return Table(header, rows, of)


def run(found: Sequence[Record]) -> str:
    """How many loops run after the change, of how many."""
    of = _of(found, "loop")
    return f"{sum(record['verdict'] in RUNS for record in of)} of {len(of)}"


def repositories(found: Sequence[Record]) -> str:
    """How many repositories the loops come from."""
    return str(len({record["cell"]["repository"] for record in found}))


def campaigns(found: Sequence[Record]) -> Table:
    """One row per campaign when it last ran as a whole, summed over its parts."""
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
