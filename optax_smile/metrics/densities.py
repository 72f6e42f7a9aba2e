"""Scores of log densities."""

import numpy as np
from numpy.typing import ArrayLike

from optax_smile import _check
from optax_smile.metrics._checks import numbers


def lppd(log_density: ArrayLike) -> float:
    """Log pointwise predictive density in nats, higher is better.

    The mean of `Prediction.log_density` `[input]`, as Sommer et al. 2026 report it (Gelman et al.
    2014 define the sum).

    Example:
        >>> round(lppd([-1.0, -2.0]), 3)
        -1.5
    """
    return float(np.mean(numbers("lppd", "log_density", log_density)))


def nll(log_density: ArrayLike) -> float:
    """Negative log likelihood in nats, minus the mean log density; lower is better.

    Of `Prediction.log_density` `[input]` it is minus the LPPD. Of the log densities of single draws
    `[draw, input]` it is the average loss of a single draw, never smaller. The latter appears to be
    the NLL of Sommer et al. 2026, whose NLL column is not minus their LPPD column.

    Example:
        >>> nll([-1.0, -2.0])
        1.5
    """
    return -float(np.mean(numbers("nll", "log_density", log_density)))


def perplexity(log_density: ArrayLike, mask: ArrayLike | None = None) -> float:
    """Exponential of the mean negative log likelihood of a token, at least 1; lower is better.

    Args:
        log_density: of every token in nats, `[input, token]` or `[token]`.
        mask: booleans of the same shape, False for tokens that do not count (padding, prompts).

    Source: Jelinek et al. 1977.

    Example:
        >>> round(perplexity([[-1.0, -2.0], [-3.0, -9.0]], [[True, True], [True, False]]), 3)
        7.389
    """
    log_density = np.asarray(log_density, float)
    keep = np.ones(log_density.shape, bool) if mask is None else np.asarray(mask)
    if keep.shape != log_density.shape or keep.dtype != bool:
        rule = f"booleans of shape {log_density.shape}"
        _check.fail("perplexity", "mask", rule, f"{keep.dtype} of shape {keep.shape}")
    log_density = numbers("perplexity", "log_density", np.where(keep, log_density, 0))
    if not keep.any():
        _check.fail("perplexity", "mask", "True for one token or more", "False for all")
    with np.errstate(over="ignore"):
        return float(np.exp(-np.mean(log_density[keep])))
