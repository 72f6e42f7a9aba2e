"""Variances of known Gaussians: little noise, the order of batches, what comes before a sampler."""

from collections.abc import Sequence

from benchmarks.tabulated.table import Record, Table, number, value_error

# b^2 that is allowed where the noise is isotropic, and elsewhere; at least twice that of `smile`.
ISOTROPIC, OTHERWISE = 0.003, 0.01
ORDERS = ("permutations", "replacement")


def _pairs(found: Sequence[Record]) -> list[tuple[str, Record, Record, float]]:
    """Case, `smile`, `psmile` and the bound on the latter, for each case that has both."""
    rows = {(r["cell"]["case"], r["cell"]["method"]): r for r in found}
    pairs = []
    for case in dict.fromkeys(case for case, _ in rows):
        smile, psmile = (rows.get((case, method)) for method in ("smile", "psmile"))
        if smile and psmile:
            bound = max(ISOTROPIC if "isotropic" in case else OTHERWISE, 2 * smile["b2"])
            pairs.append((case, smile, psmile, bound))
    return pairs


def small_noise(found: Sequence[Record]) -> Table:
    """Every case."""
    rows = [
        [
            case.replace("|", "abs ", 1).replace("|", ""),
            *(number(smile["b2"], 4), number(smile["worst"], 2)),
            *(number(psmile["b2"], 4), number(psmile["worst"], 2)),
            number(psmile["monte_carlo_b2"], 4),
            number(bound, 4) + (" (missed)" if psmile["b2"] > bound else ""),
        ]
        for case, smile, psmile, bound in _pairs(found)
    ]
    header = ["noise of the gradients", "smile: b^2", "worst variance", "psmile: b^2"]
    return Table([*header, "worst variance", "Monte Carlo b^2", "bound"], rows, found)


def small_noise_met(found: Sequence[Record]) -> str:
    """How many cases are within their bounds."""
    good = [psmile["b2"] <= bound for _, _, psmile, bound in _pairs(found)]
    return f"{sum(good)} of {len(good)}"


def order(found: Sequence[Record]) -> Table:
    """A row for each number of batches in a pass."""
    cells = {(r["cell"]["batches"], r["cell"]["order"]): r for r in found}
    columns = (("b2", 4), ("change_share", 2), ("step_size", 3))
    rows = []
    for batches in dict.fromkeys(count for count, _ in cells):
        records = [cells.get((batches, order), {}) for order in ORDERS]
        figures = (number(r.get(name), digits) for r in records for name, digits in columns)
        rows.append([str(batches), *figures])
    header = [f"{order}: {name}" for order in ORDERS for name in ("b^2", "share", "step")]
    return Table(["batches per pass", *header], rows, found)


def before_sampler(found: Sequence[Record]) -> Table:
    """One row per transformation, in the order of the records."""
    samplers = list(dict.fromkeys(record["cell"]["sampler"] for record in found))
    last = {(record["cell"]["before"], record["cell"]["sampler"]): record for record in found}
    rows = []
    for way in dict.fromkeys(way for way, _ in last):
        row = [f"`{way}`" if way != "nothing" else way]
        for record in (last[way, sampler] for sampler in samplers):
            row.append(value_error(record["ratio"], record["error"]))
            row.append(f"{number(record['smallest'], 2)} … {number(record['largest'], 2)}")
            row.append(number(record["mean_off"], 2))
        rows.append(row)
    header = ["before the sampler"]
    for sampler in samplers:
        header += [f"{sampler}: variance / true", "from … to", "mean off"]
    return Table(header, rows, list(last.values()))


# Of a mean in Monte Carlo errors, and of a variance.
MOST_OFF, MOST_WRONG = 4, 0.15


def is_right(found: Record) -> bool:
    """Whether means and variances of a way are those of the posterior."""
    is_near = 1 - MOST_WRONG <= found["smallest"] and found["largest"] <= 1 + MOST_WRONG
    return is_near and found["mean_off"] <= MOST_OFF


def ways(found: Sequence[Record]) -> Table:
    """A row for each way to sample."""
    last = {record["cell"]["way"]: record for record in found}
    rows = []
    for name, r in last.items():
        ratios = f"{number(r['smallest'], 2)} … {number(r['largest'], 2)}"
        row = [number(r["mean_off"], 1), number(r["mean_error"], 3), ratios]
        rows.append([name + " (wrong)" * (not is_right(r)), *row, number(r["variance_error"], 3)])
    header = ["way", "mean off, in its errors", "its error, in posterior sd"]
    return Table([*header, "variance / true", "± at most"], rows, list(last.values()))


def ways_right(found: Sequence[Record]) -> str:
    """How many ways are right."""
    last = {record["cell"]["way"]: record for record in found}
    return f"{sum(map(is_right, last.values()))} of {len(last)}"
