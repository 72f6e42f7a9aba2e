"""Table and closing sentences of `compare.py`, from its results alone; needs no JAX.

Results are a list with one dict per seed: method -> row. A row has numbers by name, or a reason
`why` the method did not run.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Results = Sequence[Mapping[str, Mapping[str, Any]]]

# Heading, name in a row, digits.
COLUMNS = (
    ("LPPD", "lppd", 3),
    ("accuracy", "accuracy", 3),
    ("RMSE", "rmse", 3),
    ("90 % coverage", "coverage", 3),
    ("ECE", "ece", 3),
    ("ECE, tempered", "ece_tempered", 3),
    ("AUROC, foreign", "auroc", 3),
    ("gradients", "gradients", 0),
    ("settings", "runs", 0),
    ("training, s", "seconds", 0),
    ("prediction, s", "prediction_seconds", 2),
    ("forward passes", "passes", 0),
)
# These differ between seeds only by how fast the machine was, or not at all.
WITHOUT_ERROR = ("gradients", "runs", "seconds", "prediction_seconds", "passes")
# It runs the other methods and keeps one of them, so it does not compete with them.
CHOOSER = "select"
DEFAULT = "psmile"
# A difference below this many standard errors counts as none.
ERRORS = 2


class Estimate(NamedTuple):
    """Mean over seeds and its standard error, NaN for a single seed."""

    mean: float
    error: float

    def shown(self, digits: int = 3) -> str:
        """`1.234 ± 0.005`."""
        mean = f"{self.mean:,.{digits}f}"
        return mean if math.isnan(self.error) else f"{mean} ± {self.error:.{digits}f}"


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and standard error of numbers that are all finite."""
    spread = statistics.stdev(values) if len(values) > 1 else math.nan
    return Estimate(statistics.fmean(values), spread / math.sqrt(len(values)))


def column(results: Results, method: str, name: str) -> list[float]:
    """A number of a method for each seed; none if the method did not run."""
    rows = [one[method] for one in results]
    return (
        []
        if any("why" in row or row.get(name) is None for row in rows)
        else [row[name] for row in rows]
    )


def cells(results: Results) -> tuple[list[str], list[list[str]]]:
    """Heading and rows of the table: mean ± standard error over seeds, settings, costs."""
    used = [c for c in COLUMNS if any(column(results, method, c[1]) for method in results[0])]
    rows = []
    for method, first in results[0].items():
        if "why" in first:
            rows.append([method, first["why"], *[""] * len(used)])
            continue
        settings = dict.fromkeys(str(one[method].get("setting", "")) for one in results)
        row = [method, ", ".join(x for x in settings if x)]
        for _, name, digits in used:
            values = column(results, method, name)
            if not all(map(math.isfinite, values)):
                row.append("lost")
            elif not values:
                row.append("")
            elif name in WITHOUT_ERROR:
                row.append(f"{statistics.fmean(values):,.{digits}f}")
            else:
                row.append(estimate(values).shown(digits))
        rows.append(row)
    return ["method", "chosen setting", *(heading for heading, _, _ in used)], rows


def sentences(results: Results) -> list[str]:
    """Say which method to use, how far the next one is, and what the choice costs.

    Methods are ranked by their mean test LPPD. Differences are paired by seed, and count as none
    below two standard errors. `select` is not ranked: it returns the draws of another method.

    Raises:
        ValueError: fewer than two methods have a finite LPPD for all seeds.
    """
    lppd = {
        method: values
        for method in results[0]
        if method != CHOOSER
        and (values := column(results, method, "lppd"))
        and all(map(math.isfinite, values))
    }
    if len(lppd) < 2:
        raise ValueError(f"`sentences` needs two methods with a finite LPPD, got {list(lppd)}.")
    best, second = sorted(lppd, key=lambda method: -statistics.fmean(lppd[method]))[:2]
    gaps = {
        method: estimate([a - b for a, b in zip(lppd[best], values, strict=True)])
        for method, values in lppd.items()
    }
    text = [
        f"Use {best}: its test LPPD of {estimate(lppd[best]).shown()} nats is the highest of "
        f"{len(lppd)} methods.",
        f"Next is {second}, {gaps[second].shown()} nats below, {_verdict(gaps[second], results)}"
        f"{_of_default(best, second, gaps, results)}.",
    ]
    passes = {method: statistics.fmean(column(results, method, "passes")) for method in lppd}
    cheap = min(
        (x for x in lppd if x == best or gaps[x].mean < ERRORS * gaps[x].error),
        key=lambda method: (passes[method], method != best),
    )
    seconds = statistics.fmean(column(results, best, "seconds"))
    cost = f"{best} costs {seconds:,.0f} s of training and {_passes(passes[best])} per prediction"
    if passes[cheap] < passes[best]:
        rest = f"{cheap}, with {_passes(passes[cheap])}, is within {ERRORS} standard errors of it"
    elif passes[best] > min(passes.values()):
        rest = f"no method with fewer passes is within {ERRORS} standard errors of it"
    else:
        rest = "no method needs fewer"
    return [*text, f"{cost}; {rest}."]


def _verdict(gap: Estimate, results: Results) -> str:
    if math.isnan(gap.error):
        return "and one seed has no error bar to judge that by"
    if gap.mean < ERRORS * gap.error:
        return f"within {ERRORS} standard errors, so {len(results)} seeds do not separate the two"
    return f"more than {ERRORS} standard errors"


def _of_default(best: str, second: str, gaps: Mapping[str, Estimate], results: Results) -> str:
    """Say it where the default sampler is not the best."""
    if DEFAULT == best or DEFAULT not in gaps:
        return ""
    if DEFAULT == second:
        return f"; {DEFAULT} is not the best here"
    gap = gaps[DEFAULT]
    return f"; {DEFAULT} is not the best here: {gap.shown()} nats below, {_verdict(gap, results)}"


def _passes(number: float) -> str:
    return f"{number:,.0f} forward pass{'es' * (round(number) != 1)}"
