"""From records to Markdown: tables declared by rows, columns, filters and reductions.

A table is a `Table`: files of records, what its rows are, and columns, each a header and a cell for
each line of a row. A cell is a text with fields in braces, or a function from a `View` to a text.
Means and errors are exact sums (`statistics`), rounded once, so that a table is the same on every
machine. Nothing but the standard library is needed.
"""

import itertools
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Record = dict[str, Any]
# A path of names, see `look`, or a function of a record.
Value = str | Callable[[Record], Any]
PAPER = "Sommer et al., ICML 2026"
NO_RECORD = "*No record in the repository yet; the command makes one.*"
# More commits than this are written as a range.
FEW = 3


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


# Formats.


def number(value: Any, spec: str = ".3f") -> str:
    """Format a value; nothing for None. A zero has no minus."""
    if value is None:
        return ""
    if isinstance(value, float) and not math.isfinite(value):
        return "lost"
    shown = f"{value:{spec}}"
    is_zero = isinstance(value, float) and shown.startswith("-") and float(shown) == 0
    return shown.replace("-", "+" if "+" in spec else "") if is_zero else shown


def short(value: float | None) -> str:
    """Round to two significant digits."""
    return number(value, ".2g")


def thousands(value: float) -> str:
    """Round to a whole number, or to two digits and a power of ten where it is large."""
    rounded = round(value)
    if abs(rounded) < 100_000:
        return f"{rounded:,}"
    mantissa, power = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(power)}"


def value_error(value: float, error: float | None, digits: int = 3, sign: str = "") -> str:
    """A figure ± its error."""
    shown = number(value, f"{sign}.{digits}f")
    return shown if error is None else f"{shown} ± {number(error, f'.{digits}f')}"


def mean_error(values: Sequence[float], digits: int = 3, sign: str = "") -> str:
    """Mean ± standard error; only the mean of a single value, nothing without values."""
    if not values:
        return ""
    if not all(map(math.isfinite, values)):
        return "lost"
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return value_error(statistics.fmean(values), error, digits, sign)


def spans(values: Iterable[int]) -> str:
    """Write whole numbers: `0 to 4`, `0`, or `0, 2`."""
    found = sorted(set(values))
    if len(found) > 2 and found == list(range(found[0], found[-1] + 1)):
        return f"{found[0]} to {found[-1]}"
    return ", ".join(map(str, found))


# Selection.


def look(record: Record, path: Value) -> list[Any]:
    """What stands at a path such as `scores.*.LPPD`, in the cell first; None is left out.

    `*` are all entries, and a number that of a list.
    """
    if callable(path):
        return [x for x in [path(record)] if x is not None]
    names, cell = path.split("."), record.get("cell", ())
    found: list[Any] = [cell if names[0] in cell else record]
    for name in names:
        if name == "*":
            found = [x for at in found for x in (at.values() if isinstance(at, dict) else at)]
        elif found and isinstance(found[0], list):
            found = [at[int(name)] for at in found]
        else:
            found = [at[name] for at in found if at.get(name) is not None]
    return [x for x in found if x is not None]


def matches(record: Record, wanted: Mapping[str, Any]) -> bool:
    """Whether fields have these values, one of several, or what a function allows.

    A field is one of the cell or of the record; one that is not there is None.
    """
    cell = record.get("cell", ())
    for name, value in wanted.items():
        at = cell[name] if name in cell else record.get(name)
        if isinstance(value, tuple):
            is_met = at in value
        else:
            is_met = value(at) if callable(value) else at == value
        if not is_met:
            return False
    return True


class Pick(NamedTuple):
    """Which records a cell takes, besides the filters of its table and row.

    Attributes:
        where: fields and their values, see `matches`.
        source: file; the first of the table, and only there its filter counts.
        best: field at whose best value records are taken: of those with the most records that with
            the highest mean score.
        score: path of that score.
        last: field of which only the last record of each value is taken.
    """

    where: Mapping[str, Any] = {}
    source: str = ""
    best: str = ""
    score: str = "lppd"
    last: str = ""


ALL = Pick()


def _grouped(records: Iterable[Record], *fields: str) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = {}
    for record in records:
        key = json.dumps([look(record, field) for field in fields], sort_keys=True)
        groups.setdefault(key, []).append(record)
    return groups


class View:
    """What a cell sees of the records; `used` are those that it took."""

    def __init__(
        self,
        files: Mapping[str, Sequence[Record]],
        where: Mapping[str, Any],
        scope: Mapping[str, Any],
        own: Sequence[Record] | None = None,
    ):
        self.files, self.where, self.scope, self.own = files, where, scope, own
        self.used: dict[int, Record] = {}

    def records(self, pick: Pick = ALL) -> list[Record]:
        """Those of the row that `pick` takes."""
        first = next(iter(self.files))
        source = pick.source or first
        wanted = {**(self.where if source == first else {}), **self.scope, **pick.where}
        if self.own is not None and not pick.where and source == first:
            found = list(self.own)
        else:
            found = [record for record in self.files[source] if matches(record, wanted)]
        if pick.best and found:
            groups = _grouped(found, pick.best).values()
            most = max(map(len, groups))
            complete = (group for group in groups if len(group) == most)
            mean_score = lambda of: statistics.fmean(look(r, pick.score)[0] for r in of)  # noqa: E731
            found = max(complete, key=mean_score)
        if pick.last:
            found = [group[-1] for group in _grouped(found, pick.last).values()]
        self.used |= {id(record): record for record in found}
        return found

    def values(self, path: Value, pick: Pick = ALL) -> list[Any]:
        """What stands at a path in these records."""
        return [value for record in self.records(pick) for value in look(record, path)]

    def first(self, path: Value, pick: Pick = ALL) -> Any:
        """The first of them, or the value by which the row was made."""
        if isinstance(path, str) and path in self.scope:
            return self.scope[path]
        return next(iter(self.values(path, pick)), None)

    def gaps(self, path: Value, base: Pick, pick: Pick = ALL, by: str = "seed"):
        """Differences from other records, of the seeds or splits that both have."""
        ours, theirs = (
            {look(r, by)[0]: x for r in self.records(which) for x in look(r, path)}
            for which in (pick, base)
        )
        return [ours[place] - theirs[place] for place in sorted(ours.keys() & theirs.keys())]


# Cells.

Cell = str | Callable[[View], str]
FIELD = re.compile(r"\{([^:}]+):?([^}]*)\}")


def text(cell: Cell, view: View) -> str:
    """Write a cell."""
    if callable(cell):
        return cell(view)
    return FIELD.sub(lambda found: number(view.first(found[1]), found[2]), cell)


def join(*cells: Cell, sep: str = "") -> Cell:
    """Put cells together; empty ones are left out."""
    return lambda view: sep.join(filter(None, (text(cell, view) for cell in cells)))


def plain(*names: str) -> list[tuple[str, Cell]]:
    """Columns of fields under their own names."""
    return [(name, f"{{{name}}}") for name in names]


def under(headers: str, *cells: Cell) -> list[tuple[str, Cell]]:
    """Columns under headers that commas separate."""
    return [*zip(headers.split(", "), cells, strict=True)]


def stat(path: Value, how: Callable[..., Any], spec: str = ".3f", pick: Pick = ALL) -> Cell:
    """Reduce values to one; nothing without values."""
    return lambda view: number(how(of), spec) if (of := view.values(path, pick)) else ""


def mean(
    path: Value, digits: int = 3, sign: str = "", error: bool = True, pick: Pick = ALL
) -> Cell:
    """Mean, with its standard error."""
    if not error:
        return stat(path, statistics.fmean, f"{sign}.{digits}f", pick)
    return lambda view: mean_error(view.values(path, pick), digits, sign)


def gain(path: Value, base: Pick, digits: int = 3) -> Cell:
    """Mean difference from other records, paired by seed; nothing where they are the same."""

    def cell(view: View) -> str:
        if view.records() == view.records(base):
            return ""
        return mean_error(view.gaps(path, base), digits, "+")

    return cell


def minus(first: str, second: str) -> Value:
    """The difference of two fields of a record."""
    return lambda record: look(record, first)[0] - look(record, second)[0]


def versus(header: str, theirs: str, ours: str, digits: int = 4, error: bool = False) -> tuple:
    """A column of three lines: one field, another one, and their difference."""
    cells = (mean(path, digits, error=error) for path in (theirs, ours))
    return header, *cells, mean(minus(ours, theirs), digits, "+")


# Rows: from the records that the table's filter leaves, what is in the cells of each row.

Rows = Callable[[Sequence[Record]], Iterable[tuple[Record, Sequence[Record] | None]]]


def each(**axes: Iterable[Any]) -> Rows:
    """Make a row for each combination of values; one row without any."""
    scopes = [dict(zip(axes, of, strict=True)) for of in itertools.product(*axes.values())]
    return lambda records: [(scope, None) for scope in scopes]


def found(*fields: str, **orders: Iterable[Any]) -> Rows:
    """Make a row for each combination in the records, in their order or that of given values."""

    def rows(records: Sequence[Record]):
        made = []
        for own in _grouped(records, *fields).values():
            made.append(({f: next(iter(look(own[0], f)), None) for f in fields}, own))
        ranks = {name: list(order) for name, order in orders.items()}
        made = [row for row in made if all(row[0][name] in rank for name, rank in ranks.items())]
        return sorted(made, key=lambda row: [rank.index(row[0][x]) for x, rank in ranks.items()])

    return rows


def every(*order: str) -> Rows:
    """Make a row for each record, in their order or that of fields."""
    return lambda records: [
        ({}, [record]) for record in sorted(records, key=lambda r: [look(r, x)[0] for x in order])
    ]


class Table(NamedTuple):
    """A declared table.

    Attributes:
        files: names of the files of records; rows are made from the first.
        rows: see `each`, `found` and `every`. A row that takes no record is left out.
        where: filter of the first file.
        columns: a header and a cell for each line of a row, or a function that makes them.
    """

    files: str
    rows: Rows
    where: Mapping[str, Any] = {}
    columns: Sequence[tuple] | Callable[[View], Sequence[tuple]] = ()

    def shows(self, *columns: tuple) -> "Table":
        """Declare the columns."""
        return self._replace(columns=columns)


def block(table: Table, files: Mapping[str, Sequence[Record]]) -> str:
    """The table in Markdown and a line on its records, or a note that there are none."""
    first = next(iter(files))
    kept = [record for record in files[first] if matches(record, table.where)]
    lines, used, columns = [], {}, []
    for scope, own in table.rows(kept):
        view = View(files, table.where, scope, own)
        columns = table.columns(view) if callable(table.columns) else table.columns
        cells = zip(*(column[1:] for column in columns), strict=True)
        row = [[text(cell, view) for cell in line] for line in cells]
        if view.used:
            lines += row
            used |= view.used
    if not lines:
        return NO_RECORD
    header = [column[0] for column in columns]
    return markdown(header, lines, [*used.values()])


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]], used: Sequence[Record]) -> str:
    """Write header, lines and a line on the records."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + f"\n\n{provenance(used)}"


# Provenance.


def provenance(used: Sequence[Record]) -> str:
    """Commits, dates, devices and seeds of the records, and the places in the paper."""
    parts = []
    papers = sorted({record["where"] for record in used if "where" in record})
    ours = [record for record in used if "where" not in record]
    if ours:
        runs = sorted({(r.get("time", ""), r.get("commit", "")) for r in ours})
        commits = list(dict.fromkeys(commit for _, commit in runs if commit))
        days = sorted({time[:10] for time, _ in runs if time})
        parts.append(f"{len(ours)} record{'s' * (len(ours) > 1)}")
        if not commits:
            parts.append("without commit and date")
        elif len(commits) > FEW:
            parts.append(f"{len(commits)} commits from {commits[0]} to {commits[-1]}")
        else:
            parts.append(f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}")
        parts += [" to ".join(dict.fromkeys((days[0], days[-1])))] if days else []
        parts += sorted({f"{r['device']}, jax {r['jax']}" for r in ours if "device" in r})
        parts += repetitions(ours)
    parts += [f"paper: {PAPER}, {'; '.join(papers)}"] if papers else []
    return f"*{' · '.join(parts)}*"


def repetitions(used: Sequence[Record]) -> list[str]:
    """Seeds, splits, chains and repetitions, where the records have them."""
    found: dict[str, set[int]] = {}
    for record in used:
        settings = record.get("settings", [])
        # Other files have names there.
        settings = settings if isinstance(settings, list) else []
        cell = record.get("cell", {})
        seed = record.get("config", cell).get("seed", settings[0] if settings else None)
        of = {
            # Where a cell may have a seed, it is 0 if there is none.
            "seed": 0 if seed is None and "split" in cell else seed,
            "split": cell.get("split"),
            "chains": cell.get("num_chains", settings[-1] if settings else None),
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
