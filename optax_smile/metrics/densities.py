"""Scores of log densities."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from optax_smile import _check
from optax_smile.metrics._checks import BOOLEAN, DENSITY, MASKED_DENSITY

DENSITIES = _check.Array(each=DENSITY)


@_check.arguments(log_density=DENSITIES)
def lppd(log_density: ArrayLike) -> float:
    """Log pointwise predictive density: the mean of log densities; higher is better.

    As Sommer et al. 2026 report it (Gelman et al. 2014 define the sum).

    Args:
        log_density: of each target, nats, `[input]`, as `Prediction.log_density`.

    Returns:
        Nats per input.

    Raises:
        ValueError: no inputs, NaN.

    Example:
        >>> lppd([-1.0, -2.0])
        -1.5
    """
    return float(np.asarray(log_density).mean())


@_check.arguments(log_density=DENSITIES)
def nll(log_density: ArrayLike) -> float:
    """Negative log likelihood: minus the mean of log densities; lower is better.

    The NLL of single draws appears to be that of Sommer et al. 2026, whose NLL column is not minus
    their LPPD column.

    Args:
        log_density: nats; of `Prediction.log_density` `[input]` it is minus the LPPD, of the log
            densities of single draws `[draw, input]` the average loss of a single draw, never
            smaller.

    Returns:
        Nats per input.

    Raises:
        ValueError: no inputs, NaN.

    Example:
        >>> nll([-1.0, -2.0])
        1.5
    """
    return -float(np.asarray(log_density).mean())


@_check.arguments(
    log_density=_check.Array(each=MASKED_DENSITY),
    mask=_check.Array(each=BOOLEAN, like="log_density", dtype=None) | None,
)
def perplexity(log_density: ArrayLike, mask: ArrayLike | None = None) -> float:
    """Exponential of the mean negative log likelihood of a token; lower is better.

    Args:
        log_density: of every token, nats, `[input, token]` or `[token]`.
        mask: booleans of the same shape, False for tokens that do not count (padding, prompts);
            None: all count.

    Returns:
        At least 1 for probabilities; infinite where float64 ends.

    Raises:
        ValueError: no tokens that count, another shape of the mask, NaN where it is True.

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
