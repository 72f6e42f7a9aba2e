"""Permutations and batches with replacement, on a posterior that is known."""

from collections.abc import Sequence

from benchmarks.tabulated.table import Record, Table, number

ORDERS = ("permutations", "replacement")


def known(found: Sequence[Record]) -> Table:
    """A row for each number of batches in a pass."""
    cells = {(r["cell"]["batches"], r["cell"]["order"]): r for r in found}
    rows = []
    for batches in dict.fromkeys(count for count, _ in cells):
        row = [str(batches)]
        for order in ORDERS:
            record = cells.get((batches, order))
            for name, digits in ("b2", 4), ("change_share", 2), ("step_size", 3):
                row.append(number(record[name] if record else None, digits))
        rows.append(row)
    header = [f"{order}: {name}" for order in ORDERS for name in ("b^2", "share", "step")]
    return Table(["batches per pass", *header], rows, found)
