"""Scores of log densities, and of normal distributions and their mixtures."""

from __future__ import annotations

import math
import statistics

import numpy as np
from numpy.typing import ArrayLike

from optax_smile import _check
from optax_smile.metrics._checks import BOOLEAN, DENSITY, FINITE, LEVEL, MASKED_DENSITY, Spreads

# Bisection steps that shrink a bracket to the rounding error of its first width, 2**-53.
BISECTIONS = 53
DENSITIES = _check.Array(each=DENSITY)
NUMBERS = _check.Array(each=FINITE)
MEANS = _check.Array("[input] or [draw, input]", FINITE)
# Ends may be infinite, as those of `calibrate.prediction_intervals`.
ENDS = _check.Array()


@_check.arguments(log_density=_check.Array("[input] or [input, token]", MASKED_DENSITY))
def lppd(log_density: ArrayLike) -> float:
    """Compute the log pointwise predictive density, the mean of log densities; higher is better.

    This is the mean that Sommer et al. 2026 report (Gelman et al. 2014 define the sum).

    Args:
        log_density: log density of each target, nats, `[input]` or `[input, token]`, such as
            `Prediction.log_density`; not that of single draws, `Prediction.each.log_density`. In
            `[input, token]`, NaN stands for padding and does not count.

    Returns:
        Nats per input, or per token.

    Raises:
        ValueError: no inputs, other axes, padding alone, or NaN in `[input]`.

    Example:
        >>> lppd([-1.0, -2.0])
        -1.5
    """
    return float(_of_targets("lppd", log_density).mean())


def _of_targets(where: str, log_density: ArrayLike, mask: ArrayLike | None = None) -> np.ndarray:
    """Return the log densities that count. NaN is padding, except in arrays of one axis."""
    array = np.asarray(log_density)
    keep = np.ones(array.shape, bool) if mask is None else np.asarray(mask)
    if array.ndim > 1:
        keep = keep & ~np.isnan(array)
    array = DENSITIES(where, "log_density", np.where(keep, array, 0))
    if not keep.any():
        argument, rule = ("log_density", "of") if mask is None else ("mask", "True for")
        _check.fail(where, argument, f"{rule} one target or more", "none")
    return array[keep]


@_check.arguments(
    log_density=_check.Array(each=MASKED_DENSITY),
    mask=_check.Array(each=BOOLEAN, like="log_density", dtype=None) | None,
)
def perplexity(log_density: ArrayLike, mask: ArrayLike | None = None) -> float:
    """Compute the exponential of the mean negative log likelihood of a token; lower is better.

    Args:
        log_density: log density of every token, nats, `[input, token]` or `[token]`.
        mask: booleans of the same shape, False for tokens to ignore (padding, prompts); None: all
            tokens count, except padding, which is NaN in `[input, token]`.

    Returns:
        At least 1 for probabilities; infinite where float64 overflows.

    Raises:
        ValueError: no token counts, the mask has another shape, or NaN in `[token]` where the mask
            is True.

    Example:
        >>> round(perplexity([[-1.0, -2.0], [-3.0, -9.0]], [[True, True], [True, False]]), 3)
        7.389

    Source: Jelinek et al. 1977.
    """
    with np.errstate(over="ignore"):
        return float(np.exp(-_of_targets("perplexity", log_density, mask).mean()))


def _normal_cdf(standardized: np.ndarray) -> np.ndarray:
    # NumPy has no error function. SciPy is installed with JAX and needs no x64 mode for float64.
    from scipy.special import ndtr

    return ndtr(standardized)


def _quantile(mean: np.ndarray, std: np.ndarray, probability: float) -> np.ndarray:
    """Find a quantile of the mixture by bisection between the quantiles of its components."""
    quantiles = mean + std * statistics.NormalDist().inv_cdf(probability)
    low, high = quantiles.min(axis=0), quantiles.max(axis=0)
    for _ in range(BISECTIONS):
        middle = low + (high - low) / 2
        below = _normal_cdf((middle - mean) / std).mean(axis=0) < probability
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return low + (high - low) / 2


def _mean_absolute(mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """E|X| of a normal X."""
    z = mean / std
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    return 2 * std * density + mean * (2 * _normal_cdf(z) - 1)


@_check.arguments(mean=NUMBERS, targets=_check.Array(each=FINITE, like="mean"))
def rmse(mean: ArrayLike, targets: ArrayLike) -> float:
    """Compute the root mean squared error; lower is better.

    Args:
        mean: predictions, `[input, ...]`.
        targets: observed values, of exactly the same shape: `[input, 1]` against `[input]` would
            compare every prediction with every target.

    Returns:
        In units of the target, at least 0.

    Raises:
        ValueError: shapes that differ, no inputs, or NaN.

    Example:
        >>> rmse([1.0, 2.0], [4.0, 6.0]) == (25 / 2) ** 0.5
        True
    """
    return float(np.sqrt(np.mean(np.subtract(mean, targets) ** 2)))


@_check.arguments(mean=MEANS, std=Spreads(), level=LEVEL)
def interval(mean: ArrayLike, std: ArrayLike, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """Compute the central predictive interval, with probability (1 - level) / 2 on either side.

    Args:
        mean: of a normal, `[input]`, or of an equally weighted mixture of normals, `[draw, input]`.
        std: of the same shape, a scalar or `[draw, 1]`, > 0.
        level: probability inside the interval, in (0, 1).

    Returns:
        Lower and upper end, both `[input]`, exact to the rounding error of the spread of the draws.

    Raises:
        ValueError: mismatched shapes, no inputs, or numbers out of range.

    Cost: about 100 evaluations of the normal distribution function per draw and input; memory for
    a few arrays `[draw, input]`.

    Example:
        >>> lower, upper = interval([[0.0], [4.0]], 1.0, level=0.9)
        >>> lower.round(3).tolist(), upper.round(3).tolist()
        ([-1.282], [5.282])
    """
    mean, std = np.atleast_2d(mean, std)
    tail = (1 - level) / 2
    # Compute the upper end from the mirrored lower tail, where small probabilities are exact.
    return _quantile(mean, std, tail), -_quantile(-mean, std, tail)


def _require_order(where: str, lower: np.ndarray, upper: np.ndarray):
    outside = ~((lower < np.inf) & (upper >= lower) & (upper > -np.inf))
    if outside.any():
        at = np.argmax(outside)
        got = f"{upper.flat[at]} where `lower` is {lower.flat[at]}"
        swapped = bool(upper.flat[at] < lower.flat[at])
        rule = ">= `lower`" if swapped else "> -inf, with `lower` < inf"
        _check.fail(where, "upper", rule, got, "Are `lower` and `upper` swapped?" * swapped)


@_check.arguments(
    lower=ENDS, upper=_check.Array(like="lower"), targets=_check.Array(each=FINITE, like="lower")
)
def coverage(lower: ArrayLike, upper: ArrayLike, targets: ArrayLike) -> float:
    """Compute the fraction of targets inside their interval, ends included.

    It should be close to the level of the intervals.

    Args:
        lower: lower ends `[input]`, such as those of `interval`; minus infinity if unbounded.
        upper: upper ends `[input]`, >= `lower`; infinity if unbounded.
        targets: observed values, `[input]`.

    Returns:
        A fraction, in [0, 1].

    Raises:
        ValueError: shapes that differ, no inputs, NaN, or ends that cross.

    Example:
        >>> coverage([0.0, 0.0], [1.0, 1.0], [0.5, 2.0])
        0.5
    """
    lower, upper = np.asarray(lower), np.asarray(upper)
    _require_order("coverage", lower, upper)
    return float(np.mean((lower <= targets) & (targets <= upper)))


@_check.arguments(lower=ENDS, upper=_check.Array(like="lower"))
def interval_width(lower: ArrayLike, upper: ArrayLike) -> float:
    """Compute the mean width of intervals; lower is better at equal `coverage`.

    Arguments and errors as for `coverage`.

    Returns:
        In units of the target.

    Example:
        >>> interval_width([0.0, 0.0], [1.0, 3.0])
        2.0
    """
    lower, upper = np.asarray(lower), np.asarray(upper)
    _require_order("interval_width", lower, upper)
    return float(np.mean(upper - lower))


@_check.arguments(mean=MEANS, std=Spreads(), targets=NUMBERS)
def crps(mean: ArrayLike, std: ArrayLike, targets: ArrayLike) -> float:
    """Compute the continuous ranked probability score; lower is better.

    It is the mean over inputs of `∫ (F(x) - [x >= y])² dx = E|X - y| - E|X - X'| / 2`, where F is
    the predictive distribution function, X and X' are independent draws from it and y is the
    target. The formula is in closed form.

    Args:
        mean: `[input]` or `[draw, input]`, see `interval`.
        std: see `interval`.
        targets: observed values, `[input]`.

    Returns:
        In units of the target, at least 0.

    Raises:
        ValueError: mismatched shapes, no inputs, or numbers out of range.

    Cost: (number of draws)² evaluations of the normal distribution function per input; memory for a
    few arrays `[draw, input]`.

    Example:
        >>> round(crps([0.0], 1.0, [0.0]), 4)
        0.2337

    Source: Gneiting and Raftery 2007, equations 20 and 21; mixtures: Grimit et al. 2006.
    """
    mean, std = np.atleast_2d(mean, std)
    _check.Array(like="mean")("crps", "targets", targets, {"mean": mean[0]})
    to_target = _mean_absolute(mean - targets, std).mean(axis=0)
    pairs = zip(mean, std, strict=True)
    between = sum(_mean_absolute(mean - m, np.hypot(std, s)).mean(axis=0) for m, s in pairs)
    return float(np.mean(to_target - between / (2 * len(mean))))
