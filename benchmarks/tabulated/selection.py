"""Which candidate `select` chose, beside what each of them predicts."""

from collections.abc import Sequence

from benchmarks.tabulated.table import Record, Table, number

NAMES = ("psmile", "psmile, cold", "psmile, long steps", "psmile, around the start", "optimizer")


def choices(found: Sequence[Record]) -> Table:
    """Test LPPD on every problem; the chosen candidate is bold."""
    cells = {(r["cell"]["problem"], r["cell"]["seed"], r["cell"]["method"]): r for r in found}
    rows = []
    for problem, seed, method in cells:
        if method != "select":
            continue
        alone = {name: cells.get((problem, seed, name), {}).get("lppd") for name in NAMES}
        chosen, ensemble = (cells.get((problem, seed, x)) for x in ("select", "deep ensemble"))
        assert chosen is not None
        known = [value for value in alone.values() if value is not None]
        mine = alone.get(chosen["chosen"])
        shown = [
            f"**{number(value)}**" if name == chosen["chosen"] else number(value) or "–"
            for name, value in alone.items()
        ]
        rows.append(
            [
                f"{problem}, {seed}",
                f"{chosen['num_parameters'] / chosen['num_data']:.2g}",
                number(ensemble["lppd"] if ensemble else None),
                *shown,
                number(None if mine is None else max(known) - mine),
                f"{chosen['cost']:.2f}",
            ]
        )
    header = ["problem, seed", "d / N", "deep ensemble", *NAMES, "best - chosen", "cost"]
    return Table(header, rows, found)
