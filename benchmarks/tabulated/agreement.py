"""Draws against long NUTS runs, and calibration by ranks."""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean

from benchmarks.tabulated.table import Record, Table, number

# Fewer independent draws than these do not show whether a bound is met.
ENOUGH_DRAWS = 100
BOUNDS = {"mean": 0.1, "sd": 0.1, "w1": 0.12}


def _of(found: Iterable[Record], part: str) -> list[Record]:
    return [record for record in found if record["cell"]["part"] == part]


def verdict(is_met: bool, ess: float) -> str:
    """Whether bounds are met; few draws cannot show it, since their error is subtracted."""
    return "too few draws" if ess < ENOUGH_DRAWS else "yes" if is_met else "no"


def posterior_verdict(record: Record) -> str:
    """Whether the largest errors of mean and deviation, net of the Monte Carlo error, are small."""
    is_met = all(record[f"{name} max"]["net"] <= BOUNDS[name] for name in ("mean", "sd"))
    return verdict(is_met, record["smallest_ess"])


def posteriors(found: Sequence[Record]) -> Table:
    """Largest error over the parameters of each posterior."""
    rows, used = [], _of(found, "posteriors")
    for record in used:
        figures = [
            number(record[f"{name} max"][kind])
            for name in ("mean", "sd")
            for kind in ("raw", "net")
        ]
        ess = f"{record['smallest_ess']:,.0f}"
        cell = record["cell"]
        rows.append([cell["data"], cell["method"], *figures, ess, posterior_verdict(record)])
    header = ["posterior", "sampler", "mean", "net", "sd", "net", "smallest ESS"]
    return Table([*header, "within 0.1"], rows, used)


def posteriors_met(found: Sequence[Record]) -> str:
    """How many posteriors are within the bounds."""
    verdicts = [posterior_verdict(record) for record in _of(found, "posteriors")]
    return f"{verdicts.count('yes')} of {len(verdicts)}"


def _network_cell(record: Record) -> str:
    starts = record["starts"]
    net = [fmean(start[f"{name} median"]["net"] for start in starts) for name in BOUNDS]
    ess = fmean(start["ess"] for start in starts)
    figures = ", ".join(number(x, 2) for x in net)
    is_met = all(x <= bound for x, bound in zip(net, BOUNDS.values(), strict=True))
    text = f"{figures} ({ess:,.0f})"
    return f"**{text}**" if verdict(is_met, ess) == "yes" else text


def networks(found: Sequence[Record]) -> Table:
    """Median errors of mean, deviation and W1 over the test inputs, and the ESS."""
    used = _of(found, "networks")
    cells = {(r["cell"]["method"], r["cell"]["data"], r["cell"]["share"]): r for r in used}
    methods = list(dict.fromkeys(method for method, *_ in cells))
    columns = sorted({(data, share) for _, data, share in cells})
    rows = []
    for method in methods:
        records = [cells.get((method, *column)) for column in columns]
        rows.append([method, *("" if r is None else _network_cell(r) for r in records)])
    header = ["mean, sd, W1 (ESS)"]
    header += [f"{data}, {'N' if share == 1 else f'N/{share}'}" for data, share in columns]
    return Table(header, rows, used)


def calibration(found: Sequence[Record]) -> Table:
    """Smallest p; mean rank and spread of the quantities in which they are furthest off.

    The mean rank in standard errors sees a shift that chi^2 over 20 bins does not.
    """
    rows, used = [], _of(found, "calibration")
    for record in used:
        count = sum(record["counts"][0])
        shifts = [(rank - 0.5) * math.sqrt(12 * count) for rank in record["mean_rank"]]
        ratio = max(record["variance_ratio"], key=lambda x: abs(x - 1))
        rows.append(
            [
                *(record["cell"]["data"], record["cell"]["method"], str(count)),
                *(f"{min(record['p']):.2g}", str(len(record["p"]))),
                *(number(max(shifts, key=abs), 1), number(ratio, 2), str(record["num_lost"])),
                "yes" if record["is_uniform"] else "no",
            ]
        )
    header = ["model", "sampler", "data sets", "smallest p", "of", "largest shift, s.e."]
    return Table([*header, "variance / uniform", "lost", "uniform"], rows, used)


def references(found: Sequence[Record]) -> Table:
    """How good the NUTS runs are."""
    rows, used = [], []
    for part in ("posteriors", "networks"):
        for record in {r["cell"]["data"]: r for r in _of(found, part)}.values():
            target = record["reference"]
            worst = f"{min(target['ess']):,.0f}"
            rows.append([f"{record['cell']['data']} ({part})", number(max(target["rhat"])), worst])
            used.append(record)
    return Table(["reference", "largest R-hat", "smallest ESS"], rows, used)
