"""Variances of Gaussians whose gradients have little noise."""

from collections.abc import Sequence

from benchmarks.tabulated.table import Record, Table, number

# b^2 that is allowed where the noise is isotropic, and elsewhere; at least twice that of `smile`.
ISOTROPIC, OTHERWISE = 0.003, 0.01


def _pairs(found: Sequence[Record]) -> dict[str, tuple[Record, Record]]:
    """`smile` and `psmile` for each case that has both."""
    rows = {(r["cell"]["case"], r["cell"]["method"]): r for r in found}
    names = dict.fromkeys(case for case, _ in rows)
    return {
        name: (rows[name, "smile"], rows[name, "psmile"])
        for name in names
        if (name, "smile") in rows and (name, "psmile") in rows
    }


def _bound(case: str, smile: Record) -> float:
    return max(ISOTROPIC if "isotropic" in case else OTHERWISE, 2 * smile["b2"])


def variances(found: Sequence[Record]) -> Table:
    """Every case."""
    rows = []
    for case, (smile, psmile) in _pairs(found).items():
        bound = _bound(case, smile)
        missed = " (missed)" if psmile["b2"] > bound else ""
        rows.append(
            [
                case.replace("|", "abs ", 1).replace("|", ""),
                *(number(smile["b2"], 4), number(smile["worst"], 2)),
                *(number(psmile["b2"], 4), number(psmile["worst"], 2)),
                *(number(psmile["monte_carlo_b2"], 4), number(bound, 4) + missed),
            ]
        )
    header = ["noise of the gradients", "smile: b^2", "worst variance", "psmile: b^2"]
    return Table([*header, "worst variance", "Monte Carlo b^2", "bound"], rows, found)


def met(found: Sequence[Record]) -> str:
    """How many cases are within their bounds."""
    pairs = _pairs(found)
    good = [ours["b2"] <= _bound(case, smile) for case, (smile, ours) in pairs.items()]
    return f"{sum(good)} of {len(good)}"
