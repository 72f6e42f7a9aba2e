"""Scores of predictions, pure functions on arrays.

Classification: `probabilities` are `[input, class]` with rows that sum to one, `labels` integers
`[input]`. Regression: the predictive distribution is a normal with `mean` and `std` `[input]`, or
the mixture in equal parts of one normal per draw, `mean` and `std` `[draw, input]`; `std` may also
be a scalar or `[draw, 1]`. All raise ValueError for NaN, shapes that do not fit and empty arrays.
"""

import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from optax_smile import _check

# Rows of float32 probabilities, averaged over thousands of draws, miss one by less.
ROW_SUM_TOLERANCE = 1e-3
# Halvings that shrink a bracket to the rounding error of its first width, 2**-53.
BISECTIONS = 53


class Reliability(NamedTuple):
    """Predictions sorted into bins by confidence, the probability of the predicted class.

    Attributes:
        confidence: mean probability of the predicted class, `[bin]`; NaN for an empty bin.
        accuracy: share that is right, `[bin]`; NaN for an empty bin.
        count: predictions in the bin, `[bin]`.
    """

    confidence: np.ndarray
    accuracy: np.ndarray
    count: np.ndarray


class RiskCoverage(NamedTuple):
    """Error rate among the `k` most confident predictions, for every `k`.

    Attributes:
        coverage: `k / n`, `[k]`.
        risk: share of the `k` that is wrong, `[k]`.
    """

    coverage: np.ndarray
    risk: np.ndarray


def _numbers(
    where: str,
    argument: str,
    value: ArrayLike,
    rule: str = "free of NaN",
    holds: Callable[[np.ndarray], np.ndarray] = lambda value: ~np.isnan(value),
) -> np.ndarray:
    array = np.asarray(value, float)
    if array.size == 0:
        _check.fail(where, argument, "not empty", f"shape {array.shape}")
    wrong = ~holds(array)
    if wrong.any():
        index = tuple(np.argwhere(wrong)[0].tolist())
        _check.fail(where, argument, rule, f"{array[index]} at {index}")
    return array


def _alike(where: str, **arguments: ArrayLike) -> list[np.ndarray]:
    """Require one shape, so that `[n, 1]` and `[n]` do not broadcast to `[n, n]`."""
    arrays = {name: _numbers(where, name, value) for name, value in arguments.items()}
    first, shape = next((name, array.shape) for name, array in arrays.items())
    for name, array in arrays.items():
        if array.shape != shape:
            rule = f"of shape {shape} as `{first}` is"
            _check.fail(where, name, rule, f"shape {array.shape}")
    return list(arrays.values())


def _checked(where: str, probabilities: ArrayLike, labels: ArrayLike | None = None):
    probabilities = np.asarray(probabilities, float)
    if probabilities.ndim != 2:
        rule = "of shape [input, class]"
        _check.fail(where, "probabilities", rule, f"shape {probabilities.shape}")
    sums = probabilities.sum(axis=1)
    if not np.all(np.abs(sums - 1) <= ROW_SUM_TOLERANCE):
        row = int(np.argmax(~(np.abs(sums - 1) <= ROW_SUM_TOLERANCE)))
        rule = "rows that sum to 1"
        _check.fail(where, "probabilities", rule, f"a sum of {sums[row]} in row {row}")
    _numbers(where, "probabilities", probabilities, ">= 0", lambda value: value >= 0)
    if labels is None:
        return probabilities, np.empty(0, int)
    labels = np.asarray(labels)
    num_inputs, num_classes = probabilities.shape
    if labels.shape != (num_inputs,) or not np.issubdtype(labels.dtype, np.integer):
        rule = f"integers of shape ({num_inputs},)"
        _check.fail(where, "labels", rule, f"{labels.dtype} of shape {labels.shape}")
    if not (0 <= labels.min() and labels.max() < num_classes):
        rule = f"classes from 0 to {num_classes - 1}"
        _check.fail(where, "labels", rule, f"{labels.min()} to {labels.max()}")
    return probabilities, labels


def _confidence(where: str, probabilities: ArrayLike, labels: ArrayLike):
    probabilities, labels = _checked(where, probabilities, labels)
    return probabilities.max(axis=1), probabilities.argmax(axis=1) == labels


def _share_below(reference: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Share of `reference` below each value, ties half: mid-ranks, from 0 to 1."""
    reference = np.sort(reference)
    twice = np.searchsorted(reference, values, "left") + np.searchsorted(reference, values, "right")
    return twice / (2 * reference.size)


def _normals(where: str, mean: ArrayLike, std: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the mixture's parts, both `[draw, input]`."""
    mean = _numbers(where, "mean", mean, "finite", np.isfinite)
    std = _numbers(where, "std", std, "> 0 and finite", lambda std: (std > 0) & np.isfinite(std))
    if mean.ndim not in (1, 2):
        rule = "of shape [input] or [draw, input]"
        _check.fail(where, "mean", rule, f"shape {mean.shape}")
    if std.shape not in ((), mean.shape, (*mean.shape[:-1], 1)):
        rule = f"a scalar or of shape {mean.shape} or {(*mean.shape[:-1], 1)}"
        _check.fail(where, "std", rule, f"shape {std.shape}")
    return np.atleast_2d(mean), np.atleast_2d(np.broadcast_to(std, mean.shape))


def _normal_cdf(standardized: np.ndarray) -> np.ndarray:
    # NumPy has no error function; JAX needs SciPy, so it is there, and has float64 without x64.
    from scipy.special import ndtr

    return ndtr(standardized)


def _scores(where: str, inside: ArrayLike, outside: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    inside, outside = _numbers(where, "inside", inside), _numbers(where, "outside", outside)
    for name, scores in (("inside", inside), ("outside", outside)):
        if scores.ndim != 1:
            _check.fail(where, name, "of shape [input]", f"shape {scores.shape}")
    return inside, outside


def _quantile(mean: np.ndarray, std: np.ndarray, probability: float) -> np.ndarray:
    """Quantile of the mixture by bisection; it lies between those of the parts."""
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


def lppd(log_density: ArrayLike) -> float:
    """Log pointwise predictive density in nats, higher is better.

    The mean of `Prediction.log_density` `[input]`, as Sommer et al. 2026 report it (Gelman et al.
    2014 define the sum).

    Example:
        >>> round(lppd([-1.0, -2.0]), 3)
        -1.5
    """
    return float(np.mean(_numbers("lppd", "log_density", log_density)))


def nll(log_density: ArrayLike) -> float:
    """Negative log likelihood in nats, minus the mean log density; lower is better.

    Of `Prediction.log_density` `[input]` it is minus the LPPD. Of the log densities of single draws
    `[draw, input]` it is the average loss of a single draw, never smaller. The latter appears to be
    the NLL of Sommer et al. 2026, whose NLL column is not minus their LPPD column.

    Example:
        >>> nll([-1.0, -2.0])
        1.5
    """
    return -float(np.mean(_numbers("nll", "log_density", log_density)))


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
    log_density = _numbers("perplexity", "log_density", np.where(keep, log_density, 0))
    if not keep.any():
        _check.fail("perplexity", "mask", "True for one token or more", "False for all")
    with np.errstate(over="ignore"):
        return float(np.exp(-np.mean(log_density[keep])))


def rmse(mean: ArrayLike, targets: ArrayLike) -> float:
    """Root of the mean squared error, in units of the target, at least 0; lower is better.

    Both are `[input, ...]` of the very same shape: `[input, 1]` against `[input]` is an error, it
    would compare every prediction with every target.

    Example:
        >>> rmse([1.0, 2.0], [4.0, 6.0]) == (25 / 2) ** 0.5
        True
    """
    mean, targets = _alike("rmse", mean=mean, targets=targets)
    return float(np.sqrt(np.mean((mean - targets) ** 2)))


def accuracy(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Share of inputs whose most probable class is the label, in [0, 1].

    Example:
        >>> accuracy([[0.9, 0.1], [0.8, 0.2]], [0, 1])
        0.5
    """
    probabilities, labels = _checked("accuracy", probabilities, labels)
    return float(np.mean(probabilities.argmax(axis=1) == labels))


def f1(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Harmonic mean of precision and recall, averaged over classes, in [0, 1]; higher is better.

    Per class 2 · (labels predicted) / (labels + predictions), a plain mean over the classes that
    occur in either ("macro"); a class that is never predicted rightly has 0.

    Source: van Rijsbergen 1979.

    Example:
        >>> round(f1([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]], [0, 1, 1]), 3)
        0.667
    """
    probabilities, labels = _checked("f1", probabilities, labels)
    num_classes = probabilities.shape[1]
    predicted = probabilities.argmax(axis=1)
    right = np.bincount(labels[predicted == labels], minlength=num_classes)
    either = np.bincount(np.concatenate([labels, predicted]), minlength=num_classes)
    return float(np.mean(2 * right[either > 0] / either[either > 0]))


def auroc(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Area under the receiver operating characteristic, in [0, 1]; higher is better, 1/2 is chance.

    The share of pairs of an input of the class and one of another class in which the first has the
    higher probability of the class, ties half. Two classes: of class 1. More: each against the
    rest, a plain mean ("one-vs-rest, macro"). Every class has to occur in the labels.

    Source: Hanley and McNeil 1982.

    Example:
        >>> auroc([[0.9, 0.1], [0.4, 0.6], [0.3, 0.7], [0.6, 0.4]], [0, 0, 1, 1])
        0.75
    """
    probabilities, labels = _checked("auroc", probabilities, labels)
    num_classes = probabilities.shape[1]
    if num_classes < 2:
        _check.fail("auroc", "probabilities", "of two classes or more", "one class")
    count = np.bincount(labels, minlength=num_classes)
    if not count.all():
        rule = f"of every class from 0 to {num_classes - 1}"
        _check.fail("auroc", "labels", rule, f"none of class {count.argmin()}")
    areas = [
        np.mean(_share_below(score[labels != which], score[labels == which]))
        for which, score in enumerate(probabilities.T)
    ]
    return float(areas[1] if num_classes == 2 else np.mean(areas))


def brier(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Squared distance to the one-hot label, summed over classes, in [0, 2]; lower is better.

    Source: Brier 1950.

    Example:
        >>> brier([[1.0, 0.0], [1.0, 0.0]], [0, 1])
        1.0
    """
    probabilities, labels = _checked("brier", probabilities, labels)
    one_hot = np.eye(probabilities.shape[1])[labels]
    return float(np.mean(np.sum((probabilities - one_hot) ** 2, axis=1)))


def entropy(probabilities: ArrayLike) -> np.ndarray:
    """Entropy of every row in nats, `[input]`, in [0, log(number of classes)].

    Example:
        >>> entropy([[1.0, 0.0], [0.5, 0.5]]).round(3).tolist()
        [0.0, 0.693]
    """
    probabilities, _ = _checked("entropy", probabilities)
    positive = np.where(probabilities > 0, probabilities, 1)
    return np.sum(positive * np.log(1 / positive), axis=1)


def reliability(
    probabilities: ArrayLike, labels: ArrayLike, num_bins: int = 15, equal: str = "width"
) -> Reliability:
    """Compare confidence with accuracy in bins of confidence.

    Args:
        probabilities: `[input, class]`.
        labels: `[input]`.
        num_bins: at least 1.
        equal: `"width"`, bins cut [0, 1] evenly and hold their upper edge; or `"mass"`, bins hold
            counts that differ by one at most, except that equal confidences stay together.

    Source: DeGroot and Fienberg 1983; equal mass: Nixon et al. 2019.

    Example:
        >>> reliability([[0.9, 0.1], [0.8, 0.2]], [0, 1], num_bins=2, equal="mass").accuracy
        array([0., 1.])
    """
    _check.whole("reliability", "num_bins", num_bins, 1)
    _check.choice("reliability", "equal", equal, ("width", "mass"))
    confidence, right = _confidence("reliability", probabilities, labels)
    if equal == "width":
        bins = np.ceil(confidence * num_bins).astype(int) - 1
    else:
        bins = np.floor(_share_below(confidence, confidence) * num_bins).astype(int)
    bins = np.clip(bins, 0, num_bins - 1)
    count = np.bincount(bins, minlength=num_bins)
    with np.errstate(invalid="ignore"):
        return Reliability(
            confidence=np.bincount(bins, confidence, num_bins) / count,
            accuracy=np.bincount(bins, right, num_bins) / count,
            count=count,
        )


def ece(
    probabilities: ArrayLike, labels: ArrayLike, num_bins: int = 15, equal: str = "width"
) -> float:
    """Expected calibration error, in [0, 1]; lower is better.

    The mean of |accuracy - confidence| over `reliability` bins, weighted with their counts.

    Source: Guo et al. 2017; `equal="mass"`: Nixon et al. 2019.

    Example:
        >>> round(ece([[0.75, 0.25], [0.75, 0.25]], [0, 1], num_bins=10), 3)
        0.25
    """
    bins = reliability(probabilities, labels, num_bins, equal)
    gaps = np.where(bins.count > 0, np.abs(bins.accuracy - bins.confidence), 0)
    return float(np.sum(bins.count * gaps) / np.sum(bins.count))


def risk_coverage(probabilities: ArrayLike, labels: ArrayLike) -> RiskCoverage:
    """Error rate of a classifier that answers only where it is most confident.

    Inputs sorted by falling probability of the predicted class; risk `k` is the share of wrong ones
    among the first `k`, in expectation over random orders of equal confidences.

    Source: Geifman and El-Yaniv 2017.

    Example:
        >>> risk_coverage([[0.9, 0.1], [0.8, 0.2]], [0, 1]).risk
        array([0. , 0.5])
    """
    confidence, right = _confidence("risk_coverage", probabilities, labels)
    _, group, size = np.unique(-confidence, return_inverse=True, return_counts=True)
    # In a random order every place among equals is wrong as often as they are on average.
    wrong = np.repeat(np.bincount(group, ~right) / size, size)
    first = np.arange(1, wrong.size + 1)
    return RiskCoverage(coverage=first / wrong.size, risk=np.cumsum(wrong) / first)


def aurc(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Area under the risk-coverage curve, in [0, 1]; lower is better, the error rate is chance.

    The mean of `risk_coverage(...).risk`. Sommer et al. 2026 write "area under the reliability
    curve" for AURC; their figures (.016 at 90 % accuracy, .065 at 77 %) have the scale of the
    risk-coverage curve, which is what is computed here.

    Source: Geifman et al. 2019.

    Example:
        >>> aurc([[0.9, 0.1], [0.8, 0.2]], [0, 1])
        0.25
    """
    return float(np.mean(risk_coverage(probabilities, labels).risk))


def ood_auroc(inside: ArrayLike, outside: ArrayLike) -> float:
    """Chance that an input from outside scores above one from inside, ties half, in [0, 1].

    Higher is better, 1/2 is chance. `inside` and `outside`, `[input]` each, are a score that is
    higher for foreign inputs, such as `entropy`, of inputs like the training data and of others.

    Source: Hendrycks and Gimpel 2017.

    Example:
        >>> ood_auroc([0.1, 0.3], [0.2, 0.4])
        0.75
    """
    inside, outside = _scores("ood_auroc", inside, outside)
    return float(np.mean(_share_below(inside, outside)))


def fpr95(inside: ArrayLike, outside: ArrayLike) -> float:
    """Share of foreign inputs taken for familiar where 95 % of the familiar are, in [0, 1].

    Lower is better, .95 is chance. Inside counts as positive: the threshold is the smallest score
    with at least 95 % of `inside` at or below it, the result the share of `outside` at or below it.
    `inside` and `outside`, `[input]` each, are as in `ood_auroc`.

    Source: Liang et al. 2018. (Hendrycks et al. 2019 count outside as positive: other results.)

    Example:
        >>> fpr95(range(100), [93, 94, 95, 96])
        0.5
    """
    inside, outside = _scores("fpr95", inside, outside)
    kept = -(-95 * inside.size // 100)  # 95 % rounded up, in integers as 0.95 is not exact
    return float(np.mean(outside <= np.sort(inside)[kept - 1]))


def interval(mean: ArrayLike, std: ArrayLike, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """Central interval of the predictive distribution, (1 - level) / 2 of it on either side.

    Args:
        mean: `[input]` of a normal, or `[draw, input]` of a mixture of normals in equal parts.
        std: of the same shape, a scalar or `[draw, 1]`, > 0.
        level: probability inside, between 0 and 1.

    Returns:
        Lower and upper end, both `[input]`, to rounding error of the spread of the draws.

    Cost: about 100 evaluations of the normal distribution function per draw and input; memory for
    a few arrays `[draw, input]`.

    Example:
        >>> lower, upper = interval([[0.0], [4.0]], 1.0, level=0.9)
        >>> lower.round(3).tolist(), upper.round(3).tolist()
        ([-1.282], [5.282])
    """
    _check.probability("interval", "level", level)
    mean, std = _normals("interval", mean, std)
    tail = (1 - level) / 2
    # The upper end from the mirrored lower tail, where small probabilities are exact.
    return _quantile(mean, std, tail), -_quantile(-mean, std, tail)


def coverage(lower: ArrayLike, upper: ArrayLike, targets: ArrayLike) -> float:
    """Share of targets inside their interval, ends included, in [0, 1]; best near its level.

    All three are `[input]`, the ends as from `interval`.

    Example:
        >>> coverage([0.0, 0.0], [1.0, 1.0], [0.5, 2.0])
        0.5
    """
    lower, upper, targets = _alike("coverage", lower=lower, upper=upper, targets=targets)
    return float(np.mean((lower <= targets) & (targets <= upper)))


def interval_width(lower: ArrayLike, upper: ArrayLike) -> float:
    """Mean width of intervals, in units of the target; lower is better at equal `coverage`.

    Example:
        >>> interval_width([0.0, 0.0], [1.0, 3.0])
        2.0
    """
    lower, upper = _alike("interval_width", lower=lower, upper=upper)
    return float(np.mean(upper - lower))


def crps(mean: ArrayLike, std: ArrayLike, targets: ArrayLike) -> float:
    """Continuous ranked probability score, in units of the target, at least 0; lower is better.

    The mean over inputs of `∫ (F(x) - [x >= y])² dx = E|X - y| - E|X - X'| / 2`, F the predictive
    distribution function, X and X' independent draws from it, y the target; in closed form.

    Targets are `[input]`; mean and standard deviation as in `interval`.

    Cost: (number of draws)² normal distribution functions per input; memory for a few arrays
    `[draw, input]`.

    Source: Gneiting and Raftery 2007, equations 20 and 21; mixtures: Grimit et al. 2006.

    Example:
        >>> round(crps([0.0], 1.0, [0.0]), 4)
        0.2337
    """
    mean, std = _normals("crps", mean, std)
    _, targets = _alike("crps", mean=mean[0], targets=targets)
    to_target = _mean_absolute(mean - targets, std).mean(axis=0)
    pairs = zip(mean, std, strict=True)
    between = sum(_mean_absolute(mean - m, np.hypot(std, s)).mean(axis=0) for m, s in pairs)
    return float(np.mean(to_target - between / (2 * len(mean))))
