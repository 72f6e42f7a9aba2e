"""Scores of predictions, pure functions on arrays.

- Classes: `probabilities` are `[input, class]`, >= 0, with rows that sum to 1; `labels` are
  integers `[input]`, classes from 0.
- Numbers: the prediction is a normal distribution with `mean` and `std` `[input]`, or an equally
  weighted mixture of one normal per draw, with `mean` and `std` `[draw, input]`; `std` may also be
  a scalar or `[draw, 1]`. `targets` are `[input]`.

All functions raise ValueError for NaN, masked entries, mismatched shapes and empty arrays. `auroc`
and `ood_auroc` need scikit-learn (`pip install 'optax-smile[eval]'`).
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from optax_smile import _check
from optax_smile._types import by_identity
from optax_smile.draws.prediction import ROW_SUM_TOLERANCE, Prediction

# Default number of bins of confidence, as in Guo et al. 2017.
NUM_BINS = 15
# Bisection steps that shrink a bracket to 2**-53 of its first width, the rounding error.
BISECTIONS = 53
# Range of temperatures of class probabilities, and tolerance of their logarithm.
COLDEST, HOTTEST, TOLERANCE = 0.05, 20.0, 1e-9


@dataclass(frozen=True)
class _Probabilities(_check.Array):
    axes: str = "[input, class]"
    each: _check.Real = _check.Real(0, infinite=True)

    def __call__(self, argument, value, given=_check.NOTHING):
        array = super().__call__(argument, value, given)
        sums = array.sum(axis=1)
        off = ~(np.abs(sums - 1) <= ROW_SUM_TOLERANCE)
        if off.any():
            got = f"a sum of {sums[off][0]} in row {np.argmax(off)}"
            _check.fail(argument, "rows that sum to 1", got)
        return array


class _Labels(_check.Constraint):
    text = "integers [input], one class each"

    def __call__(self, argument, value, given=_check.NOTHING):
        num_inputs, num_classes = given["probabilities"].shape
        labels = _check.host(argument, value)
        if labels.shape != (num_inputs,) or not np.issubdtype(labels.dtype, np.integer):
            got = f"{labels.dtype} of shape {labels.shape}"
            _check.fail(argument, f"integers of shape ({num_inputs},)", got)
        if not (0 <= labels.min() and labels.max() < num_classes):
            got = f"{labels.min()} to {labels.max()}"
            _check.fail(argument, f"classes from 0 to {num_classes - 1}", got)
        return labels


@dataclass(frozen=True)
class _Spreads(_check.Array):
    each: _check.Real = _check.Real(0, open="low", dtype=float)

    def __call__(self, argument, value, given=_check.NOTHING):
        std, shape = super().__call__(argument, value, given), given["mean"].shape
        if std.shape not in ((), shape, (*shape[:-1], 1)):
            rule = f"a scalar or of shape {shape} or {(*shape[:-1], 1)}"
            _check.fail(argument, rule, f"shape {std.shape}")
        return np.broadcast_to(std, shape)


# Scores are computed in float64.
FINITE = _check.Real(dtype=float)
# A target may have probability zero; NaN is padding.
DENSITY = _check.Where("below infinity, not NaN", lambda density: density < np.inf)
PADDED = _check.Where("below infinity", lambda density: density != np.inf)
LOG_DENSITY = _check.Array("[input] or [input, token]", PADDED)
SCORES, NUMBERS, ENDS = _check.Array("[input]"), _check.Array(each=FINITE), _check.Array()
CLASSES = {"probabilities": _Probabilities(), "labels": _Labels()}
NORMALS = {"mean": _check.Array("[input] or [draw, input]", FINITE), "std": _Spreads()}


@by_identity
class Reliability(NamedTuple):
    """Predictions sorted into bins by confidence, the probability of the predicted class.

    The mean `confidence` and the `accuracy`, a fraction, are NaN for an empty bin; all are `[bin]`.
    """

    confidence: np.ndarray
    accuracy: np.ndarray
    count: np.ndarray


@by_identity
class RiskCoverage(NamedTuple):
    """Error rates `risk` `[k]` among the most confident predictions, a share `coverage` `[k]`."""

    coverage: np.ndarray
    risk: np.ndarray


def _confident(probabilities: ArrayLike, labels: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Return the probability of the predicted class, and whether that class is correct."""
    return np.max(probabilities, axis=1), np.argmax(probabilities, axis=1) == labels


@_check.arguments(**CLASSES)
def accuracy(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Compute the fraction of inputs whose most probable class is the label; higher is better."""
    return float(np.mean(_confident(probabilities, labels)[1]))


@_check.arguments(**CLASSES)
def f1(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Compute the harmonic mean of precision and recall; higher is better.

    It is the unweighted mean over the classes that occur in labels or predictions ("macro").
    """
    labels, predicted = np.asarray(labels), np.argmax(probabilities, axis=1)
    num_classes = np.shape(probabilities)[1]
    right = np.bincount(labels[predicted == labels], minlength=num_classes)
    either = np.bincount(np.concatenate([labels, predicted]), minlength=num_classes)
    return float(np.mean(2 * right[either > 0] / either[either > 0]))


def _area(metric: str, is_positive: ArrayLike, scores: ArrayLike) -> float:
    with _check.needed(f"`metrics.{metric}` needs scikit-learn", "eval"):
        from sklearn.metrics import roc_auc_score
    # The area depends only on the order, and scikit-learn rejects infinite scores.
    return float(roc_auc_score(is_positive, np.unique(scores, return_inverse=True)[1]))


@_check.arguments(**CLASSES)
def auroc(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Compute the area under the receiver operating characteristic; higher is better.

    With two classes it is the area of class 1; with more, the unweighted mean over classes
    ("one-vs-rest, macro"). Every class needs a label.
    """
    probabilities, labels = np.asarray(probabilities), np.asarray(labels)
    count = np.bincount(labels, minlength=probabilities.shape[1])
    if len(count) < 2 or not count.all():
        rule = "labels of every class, of two or more classes"
        _check.fail("labels", rule, f"the counts {count.tolist()}")
    which = [1] if len(count) == 2 else range(len(count))
    return float(np.mean([_area("auroc", labels == x, probabilities[:, x]) for x in which]))


@_check.arguments(inside=SCORES, outside=SCORES)
def ood_auroc(inside: ArrayLike, outside: ArrayLike) -> float:
    """Compute the probability that an out-of-distribution input scores above an inside one.

    Higher is better; ties count half. Scores `[input]` are higher for unfamiliar inputs, such as
    the entropy of a prediction.
    """
    is_outside = np.repeat([False, True], [np.size(inside), np.size(outside)])
    return _area("ood_auroc", is_outside, np.append(inside, outside))


@_check.arguments(**CLASSES)
def brier(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Compute the squared distance to the one-hot label, in [0, 2]; lower is better."""
    one_hot = np.eye(np.shape(probabilities)[1])[np.asarray(labels)]
    return float(np.mean(np.sum(np.subtract(probabilities, one_hot) ** 2, axis=1)))


@_check.arguments(**CLASSES, num_bins=_check.Whole(1))
def reliability(
    probabilities: ArrayLike, labels: ArrayLike, num_bins: int = NUM_BINS
) -> Reliability:
    """Compare confidence with accuracy in `num_bins` >= 1 bins of confidence.

    The bins have equal width on [0, 1], and each includes its upper edge.
    """
    confidence, right = _confident(probabilities, labels)
    bins = np.clip(np.ceil(confidence * num_bins).astype(int) - 1, 0, num_bins - 1)
    count = np.bincount(bins, minlength=num_bins)
    with np.errstate(invalid="ignore"):
        means = [np.bincount(bins, x, num_bins) / count for x in (confidence, right)]
    return Reliability(*means, count=count)


@_check.arguments(**CLASSES, num_bins=_check.Whole(1))
def ece(probabilities: ArrayLike, labels: ArrayLike, num_bins: int = NUM_BINS) -> float:
    """Compute the expected calibration error (Guo et al. 2017), in [0, 1]; lower is better.

    It is the mean of |accuracy - confidence| over the bins of `reliability`, weighted by counts.
    """
    bins = reliability(probabilities, labels, num_bins)
    gaps = np.where(bins.count > 0, np.abs(bins.accuracy - bins.confidence), 0)
    return float(np.sum(bins.count * gaps) / np.sum(bins.count))


@_check.arguments(**CLASSES)
def risk_coverage(probabilities: ArrayLike, labels: ArrayLike) -> RiskCoverage:
    """Compute the error rate of a classifier that answers only where it is most confident.

    Risk `k` is the fraction of wrong predictions among the `k` most confident ones, in expectation
    over random orders of equal confidences (Geifman and El-Yaniv 2017).
    """
    confidence, right = _confident(probabilities, labels)
    _, group, size = np.unique(-confidence, return_inverse=True, return_counts=True)
    # In a random order, each position among ties is wrong at the average rate of the ties.
    wrong = np.repeat(np.bincount(group, ~right) / size, size)
    first = np.arange(1, wrong.size + 1)
    return RiskCoverage(coverage=first / wrong.size, risk=np.cumsum(wrong) / first)


@_check.arguments(**CLASSES)
def aurc(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Compute the mean of `risk_coverage(...).risk`; lower is better.

    Sommer et al. 2026 write "area under the reliability curve" for AURC; their figures have the
    scale of the risk-coverage curve.
    """
    return float(np.mean(risk_coverage(probabilities, labels).risk))


@_check.arguments(log_density=LOG_DENSITY)
def lppd(log_density: ArrayLike) -> float:
    """Compute the log pointwise predictive density, the mean of log densities; higher is better.

    Densities are in nats, `[input]`, or `[input, token]` where NaN is padding, such as
    `Prediction.log_density`. Sommer et al. 2026 report this mean (Gelman et al. 2014 the sum).
    """
    array = np.asarray(log_density)
    array = array[~np.isnan(array)] if array.ndim > 1 else array
    return float(_check.Array(each=DENSITY)("log_density", array).mean())


@_check.arguments(log_density=LOG_DENSITY)
@_check.called("perplexity", "lppd")
def perplexity(log_density: ArrayLike) -> float:
    """Compute exp(-`lppd`) of tokens; lower is better.

    To leave out tokens, such as those of a prompt, pass `log_density[mask]`.
    """
    with np.errstate(over="ignore"):
        return float(np.exp(-np.float64(lppd(log_density))))


@_check.arguments(mean=NUMBERS, targets=_check.Array(each=FINITE, like="mean"))
def rmse(mean: ArrayLike, targets: ArrayLike) -> float:
    """Compute the root mean squared error for equal shapes `[input, ...]`; lower is better."""
    return float(np.sqrt(np.mean(np.subtract(mean, targets) ** 2)))


def _quantile(mean: np.ndarray, std: np.ndarray, probability: float) -> np.ndarray:
    """Find a quantile of the mixture by bisection between the quantiles of its components."""
    # NumPy has no error function. SciPy is installed with JAX and needs no x64 mode for float64.
    from scipy.special import ndtr

    quantiles = mean + std * statistics.NormalDist().inv_cdf(probability)
    low, high = quantiles.min(axis=0), quantiles.max(axis=0)
    for _ in range(BISECTIONS):
        middle = low + (high - low) / 2
        below = ndtr((middle - mean) / std).mean(axis=0) < probability
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return low + (high - low) / 2


@_check.arguments(**NORMALS, level=_check.Real(0, 1, open="both", traced=False))
def interval(mean: ArrayLike, std: ArrayLike, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """Compute the central predictive interval, with probability (1 - level) / 2 on either side.

    Both ends `[input]` are exact to the rounding error of the spread of the draws.

    Example:
        >>> lower, upper = interval([[0.0], [4.0]], 1.0, level=0.9)
        >>> lower.round(3).tolist(), upper.round(3).tolist()
        ([-1.282], [5.282])
    """
    mean, std = np.atleast_2d(mean, std)
    tail = (1 - level) / 2
    # Compute the upper end from the mirrored lower tail, where small probabilities are exact.
    return _quantile(mean, std, tail), -_quantile(-mean, std, tail)


@_check.arguments(
    lower=ENDS, upper=_check.Array(like="lower"), targets=_check.Array(each=FINITE, like="lower")
)
def coverage(lower: ArrayLike, upper: ArrayLike, targets: ArrayLike) -> float:
    """Compute the fraction of targets inside their interval, whose ends may be infinite."""
    lower, upper = np.asarray(lower), np.asarray(upper)
    outside = ~((lower < np.inf) & (upper >= lower) & (upper > -np.inf))
    if outside.any():
        at, rule = np.argmax(outside), ">= `lower`, with `lower` < inf and `upper` > -inf"
        _check.fail("upper", rule, f"{upper.flat[at]} where `lower` is {lower.flat[at]}")
    return float(np.mean((lower <= targets) & (targets <= upper)))


def _mean_absolute(mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """E|X| of a normal X."""
    from scipy.special import ndtr

    z = mean / std
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    return 2 * std * density + mean * (2 * ndtr(z) - 1)


@_check.arguments(**NORMALS, targets=NUMBERS)
def crps(mean: ArrayLike, std: ArrayLike, targets: ArrayLike) -> float:
    """Compute the continuous ranked probability score; lower is better.

    It is the mean over inputs of `∫ (F(x) - [x >= y])² dx = E|X - y| - E|X - X'| / 2`, where F is
    the predictive distribution function, X and X' are independent draws from it and y is the target
    (Gneiting and Raftery 2007; mixtures: Grimit et al. 2006). The cost is quadratic in the draws.
    """
    mean, std = np.atleast_2d(mean, std)
    _check.Array(like="mean")("targets", targets, {"mean": mean[0]})
    to_target = _mean_absolute(mean - targets, std).mean(axis=0)
    pairs = zip(mean, std, strict=True)
    between = sum(_mean_absolute(mean - m, np.hypot(std, s)).mean(axis=0) for m, s in pairs)
    return float(np.mean(to_target - between / (2 * len(mean))))


@_check.arguments(
    prediction=_check.kind(Prediction, "the result of `predict`"), targets=_check.Array(dtype=None)
)
@_check.called("temperature", "Prediction.tempered", self="prediction")
def temperature(prediction: Prediction, targets: ArrayLike) -> float:
    """Fit the temperature with which `prediction.tempered` has the largest LPPD.

    Apply it to other predictions of the same draws. A temperature above 1 means that they are
    overconfident. For classes it is at most 20; a fit of at most 0.05 is an error, such as if every
    label has the largest probability. With a variance it is the mean of squared errors / variance.
    Use inputs that were used neither for sampling nor to choose settings.

    Example:
        >>> import numpy as np
        >>> held_out = Prediction(np.full((4, 2), [0.9, 0.1]), None, uncertainty="entropy")
        >>> round(temperature(held_out, [0, 0, 0, 1]), 3)  # 0.9 becomes 0.75
        2.0
    """
    from scipy.optimize import minimize_scalar

    def loss(log_temperature: float) -> float:
        return -lppd(prediction.tempered(np.exp(log_temperature), targets).log_density)

    if prediction.uncertainty == "variance":
        loss(0)  # checks the targets
        return float(np.mean((prediction.mean - np.asarray(targets)) ** 2 / prediction.total))
    ends, options = (math.log(COLDEST), math.log(HOTTEST)), {"xatol": TOLERANCE}
    best: Any = minimize_scalar(loss, bounds=ends, method="bounded", options=options)
    if loss(ends[0]) <= best.fun:
        rule = f"targets for which the best temperature is above {COLDEST:g}, not all predicted"
        advice = "Predict more held-out inputs, or leave the temperature at 1."
        _check.fail("targets", rule, f"an LPPD that still grows at {COLDEST:g}", advice)
    return float(np.exp(best.x))


# Functions that `score` calls, and the arguments that it passes to them.
SCORED = "lppd", "perplexity", "accuracy", "f1", "brier", "ece", "aurc", "rmse", "crps", "coverage"
IN_SCORE = {"labels": "targets", "log_density": "prediction"}
IN_SCORE |= dict.fromkeys(("probabilities", "mean", "std"), "prediction")


@_check.arguments(
    prediction=_check.kind(Prediction, "the result of `predict`"), targets=_check.Array(dtype=None)
)
@_check.called("score", *SCORED, **IN_SCORE)
def score(prediction: Prediction, targets: ArrayLike) -> dict[str, float]:
    """Compute the usual scores of what `predict` returned, with the same `targets`.

    Returns:
        Scores by name. For classes: LPPD, accuracy, F1, Brier score, ECE and AURC. For predictions
        with a variance, treated as normal distributions: LPPD, RMSE, CRPS, and coverage and width
        of the 95 % interval. With `per="draw"` also the NLL of Sommer et al. 2026, minus the mean
        log density of single draws. For `"tokens"`: the perplexity alone.
    """
    if prediction.log_density is None:
        rule, got = "made with targets", "a prediction without log densities"
        _check.fail("prediction", rule, got, "Pass `targets` to `predict`.")
    mean, targets = prediction.mean, np.asarray(targets)
    if mean is None and prediction.log_density.ndim == targets.ndim == 2:
        return {"perplexity": perplexity(prediction.log_density)}
    scores = {"LPPD": lppd(prediction.log_density)}
    alone = None if prediction.each is None else prediction.each.log_density
    if alone is not None and np.ndim(alone) == prediction.log_density.ndim + 2:
        scores["NLL"] = -float(np.mean(alone, dtype=float))
    if prediction.uncertainty == "entropy":
        named = {"accuracy": accuracy, "F1": f1, "Brier": brier, "ECE": ece, "AURC": aurc}
        chances = np.asarray(mean)
        if chances.shape == targets.shape:
            # Probabilities of class 1.
            if (unknown := targets[~np.isin(targets, (0, 1))]).size:
                _check.fail("targets", "0 or 1", unknown[0])
            chances = np.stack([1 - chances.ravel(), chances.ravel()], axis=1)
            targets = targets.ravel().astype(int)
        return scores | {name: metric(chances, targets) for name, metric in named.items()}
    if mean is not None and np.shape(mean) == targets.shape:
        scores["RMSE"] = rmse(mean, targets)
    if prediction.uncertainty != "variance" or mean is None:
        return scores
    mean, std, targets = (np.ravel(x) for x in (mean, np.sqrt(prediction.total), targets))
    lower, upper = interval(mean, std, 0.95)
    return scores | {
        "CRPS": crps(mean, std, targets),
        "95 % coverage": coverage(lower, upper, targets),
        "95 % width": float(np.mean(upper - lower)),
    }
