"""Plots of a run and its predictions: did the chains run well, and can the result be trusted?

Each function draws one plot onto `ax`, or onto a new figure, and returns the axes for further
changes. Plots need matplotlib: `pip install 'optax-smile[plots]'`. A `trace`
is the attribute `.trace` of what `sample` returns: arrays `[chain, tick]`, warm-up included.

Example:
    >>> import numpy as np
    >>> from matplotlib.figure import Figure
    >>> from optax_smile import plots
    >>> left, right = Figure(figsize=(10, 4), layout="constrained").subplots(1, 2)
    >>> probabilities, labels = np.array([[0.9, 0.1], [0.4, 0.6]]), np.array([0, 1])
    >>> plots.reliability(probabilities, labels, ax=left).get_xlabel()
    'confidence'
    >>> plots.risk_coverage(probabilities, labels, ax=right) is right
    True
"""

from optax_smile.plots.predictions import (
    entropy,
    examples,
    lppd,
    regression_band,
    reliability,
    risk_coverage,
)
from optax_smile.plots.run import chain_paths, energy_error, rejections, step_size
from optax_smile.plots.searches import (
    learning_coefficient,
    precision_search,
    selection,
    stopping,
)

__all__ = [
    "chain_paths",
    "energy_error",
    "entropy",
    "examples",
    "learning_coefficient",
    "lppd",
    "precision_search",
    "regression_band",
    "reliability",
    "rejections",
    "risk_coverage",
    "selection",
    "step_size",
    "stopping",
]
