"""Scores of log densities."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from optax_smile import _check
from optax_smile.metrics._checks import BOOLEAN, DENSITY, MASKED_DENSITY

DENSITIES = _check.Array(each=DENSITY)


@_check.arguments(log_density=DENSITIES)
def lppd(log_density: ArrayLike) -> float:
    """Compute the log pointwise predictive density, the mean of log densities; higher is better.

    This is the mean that Sommer et al. 2026 report (Gelman et al. 2014 define the sum).

    Args:
        log_density: log density of each target, nats, `[input]`, such as `Prediction.log_density`.

    Returns:
        Nats per input.

    Raises:
        ValueError: no inputs, or NaN.

    Example:
        >>> lppd([-1.0, -2.0])
        -1.5
    """
    return float(np.asarray(log_density).mean())


@_check.arguments(
    log_density=_check.Array(each=MASKED_DENSITY),
    mask=_check.Array(each=BOOLEAN, like="log_density", dtype=None) | None,
)
def perplexity(log_density: ArrayLike, mask: ArrayLike | None = None) -> float:
    """Compute the exponential of the mean negative log likelihood of a token; lower is better.

    Args:
        log_density: log density of every token, nats, `[input, token]` or `[token]`.
        mask: booleans of the same shape, False for tokens to ignore (padding, prompts); None: all
            tokens count.

    Returns:
        At least 1 for probabilities; infinite where float64 overflows.

    Raises:
        ValueError: no token counts, the mask has another shape, or NaN where the mask is True.

    Example:
        >>> round(perplexity([[-1.0, -2.0], [-3.0, -9.0]], [[True, True], [True, False]]), 3)
        7.389

    Source: Jelinek et al. 1977.
    """
    keep = np.ones(np.shape(log_density), bool) if mask is None else np.asarray(mask)
    tokens = DENSITIES("perplexity", "log_density", np.where(keep, log_density, 0))
    if not keep.any():
        _check.fail("perplexity", "mask", "True for one token or more", "False for all")
    with np.errstate(over="ignore"):
        return float(np.exp(-np.mean(tokens[keep])))
