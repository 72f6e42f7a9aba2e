"""What transformations before the sampler do to a posterior that is known."""

from collections.abc import Sequence

from benchmarks.tabulated.table import Record, Table, number


def variances(found: Sequence[Record]) -> Table:
    """One row per transformation, in the order of the records."""
    samplers = list(dict.fromkeys(record["cell"]["sampler"] for record in found))
    ways = list(dict.fromkeys(record["cell"]["before"] for record in found))
    last = {(record["cell"]["before"], record["cell"]["sampler"]): record for record in found}
    rows = []
    for way in ways:
        row = [f"`{way}`" if way != "nothing" else way]
        for sampler in samplers:
            if (record := last.get((way, sampler))) is None:
                row += [""] * 3
                continue
            row.append(f"{number(record['ratio'])} ± {number(record['error'])}")
            row.append(f"{number(record['smallest'], 2)} … {number(record['largest'], 2)}")
            row.append(number(record["mean_off"], 2))
        rows.append(row)
    header = ["before the sampler"]
    for sampler in samplers:
        header += [f"{sampler}: variance / true", "from … to", "mean off"]
    return Table(header, rows, list(last.values()))
