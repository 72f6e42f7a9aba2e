"""Scores of predictions, pure functions on arrays.

Classification: `probabilities` are `[input, class]` with rows that sum to one, `labels` are
integers `[input]`. Regression: the predictive distribution is a normal distribution with `mean` and
`std` `[input]`, or an equally weighted mixture of one normal per draw, with `mean` and `std`
`[draw, input]`; `std` may also be a scalar or `[draw, 1]`. All functions raise ValueError for NaN,
mismatched shapes and empty arrays.
"""

from optax_smile.metrics.classification import (
    Reliability,
    RiskCoverage,
    accuracy,
    aurc,
    auroc,
    brier,
    ece,
    f1,
    ood_auroc,
    reliability,
    risk_coverage,
)
from optax_smile.metrics.densities import (
    coverage,
    crps,
    interval,
    interval_width,
    lppd,
    perplexity,
    rmse,
)

__all__ = [
    "Reliability",
    "RiskCoverage",
    "accuracy",
    "aurc",
    "auroc",
    "brier",
    "coverage",
    "crps",
    "ece",
    "f1",
    "interval",
    "interval_width",
    "lppd",
    "ood_auroc",
    "perplexity",
    "reliability",
    "risk_coverage",
    "rmse",
]
