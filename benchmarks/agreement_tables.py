"""The tables of `agreement.py`, as Markdown."""

from collections.abc import Callable
from typing import Any

import numpy as np

# Fewer independent draws than these do not show whether a bound is met.
ENOUGH_DRAWS = 100
BOUNDS = {"mean": 0.1, "sd": 0.1, "w1": 0.12}


def markdown(header: str, rows: list[list[Any]]) -> str:
    """A table; numbers with three digits after the point."""
    lines = [f"| {header} |", "|---" * (header.count("|") + 1) + "|"]
    for row in rows:
        cells = (f"{x:.3f}" if isinstance(x, float) else str(x) for x in row)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def mean_of(record: dict[str, Any], name: str, kind: str) -> float:
    """A figure of a network, averaged over the starts."""
    return float(np.mean([start[name][kind] for start in record["starts"]]))


def verdict(is_met: bool, ess: float) -> str:
    """Whether bounds are met; few draws cannot show it, since their error is taken off."""
    return "too few draws" if ess < ENOUGH_DRAWS else "yes" if is_met else "no"


def network_row(record: dict[str, Any]) -> list[Any]:
    """Medians over the test inputs, as they are and net of their Monte Carlo error."""
    cell, starts = record["cell"], record["starts"]
    raw, net = (
        [mean_of(record, f"{name} median", kind) for name in BOUNDS] for kind in ("raw", "net")
    )
    ess = float(np.mean([start["ess"] for start in starts]))
    is_met = all(x <= bound for x, bound in zip(net, BOUNDS.values(), strict=True))
    sigma = mean_of(record, "mean log sigma", "raw") if "mean log sigma" in starts[0] else ""
    return [
        *(cell["data"], f"N/{cell['share']}", cell["method"], f"{record['median_step']:.2g}"),
        *(*raw, *net, float(np.mean([x["sd_ratio"] for x in starts]))),
        *(sigma, round(ess), verdict(is_met, ess)),
    ]


def posterior_row(record: dict[str, Any]) -> list[Any]:
    """Largest and 90 % deviations of the parameters; the verdict is on the largest."""
    names = [f"{measure} {name}" for measure in ("mean", "sd") for name in ("max", "p90")]
    is_met = all(record[f"{name} max"]["net"] <= BOUNDS[name] for name in ("mean", "sd"))
    figures = [record[name][kind] for name in names for kind in ("raw", "net")]
    target = record["reference"]
    return [
        *(record["cell"]["data"], record["cell"]["method"], f"{record['median_step']:.2g}"),
        *(
            *figures,
            record["sd_ratio"],
            round(record["smallest_ess"]),
            max(target["rhat"]),
            round(min(target["ess"])),
        ),
        verdict(is_met, record["smallest_ess"]),
    ]


def calibration_row(record: dict[str, Any]) -> list[Any]:
    """Smallest p; mean rank and spread of the quantities in which they are furthest off.

    The mean rank in standard errors sees a shift that chi^2 over 20 bins does not.
    """
    number = np.sum(record["counts"][0])
    shifts = (np.array(record["mean_rank"]) - 0.5) * np.sqrt(12 * number)
    ratios = np.array(record["variance_ratio"])
    return [
        *(record["cell"]["data"], record["cell"]["method"], f"{min(record['p']):.2g}"),
        *(len(record["p"]), float(shifts[np.argmax(np.abs(shifts))])),
        float(ratios[np.argmax(np.abs(ratios - 1))]),
        *(float(np.max(record["lag_one"])), round(np.min(record["ess"])), record["num_lost"]),
        "yes" if record["is_uniform"] else "no",
    ]


TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], list[Any]]]] = {
    "networks": (
        "data | batch | method | step size | mean | sd | W1 | net mean | net sd | net W1"
        " | sd ratio | log sigma | ESS | within bounds",
        network_row,
    ),
    "posteriors": (
        "posterior | method | step size | mean, max | net | mean, 90 % | net | sd, max | net"
        " | sd, 90 % | net | sd ratio, median | ESS, smallest | NUTS: R-hat | ESS | within bounds",
        posterior_row,
    ),
    "calibration": (
        "model | method | smallest p | of | largest shift, s.e. | variance / uniform | lag 1"
        " | ESS of a chain | lost | uniform",
        calibration_row,
    ),
}


def tables(found: list[dict[str, Any]], place: Callable[[dict[str, Any]], Any]) -> str:
    """One table for each part that has records, its cells ordered by `place`."""
    parts = []
    for part, (header, row) in TABLES.items():
        rows = sorted(
            (r for r in found if r["cell"]["part"] == part), key=lambda r: place(r["cell"])
        )
        if rows:
            parts.append(markdown(header, [row(record) for record in rows]))
    return "\n\n".join(parts)
