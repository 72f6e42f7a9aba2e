"""Scores of class probabilities."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from optax_smile import _check
from optax_smile._types import by_identity
from optax_smile.metrics._checks import Labels, Probabilities, share_below

# What the bins of confidence have in common.
Equal = Literal["width", "mass"]

# Default number of bins of confidence, as in Guo et al. 2017.
NUM_BINS = 15
BINNED: dict[str, _check.Constraint] = {
    "probabilities": Probabilities(),
    "labels": Labels(),
    "num_bins": _check.Whole(1),
    "equal": _check.OneOf(Equal),
}
SCORES = _check.Array("[input]")


@by_identity
class Reliability(NamedTuple):
    """Predictions sorted into bins by confidence, the probability of the predicted class.

    Attributes:
        confidence: mean probability of the predicted class, `[bin]`; NaN for an empty bin.
        accuracy: fraction of correct predictions, `[bin]`; NaN for an empty bin.
        count: number of predictions in the bin, `[bin]`.
    """

    confidence: np.ndarray
    accuracy: np.ndarray
    count: np.ndarray


@by_identity
class RiskCoverage(NamedTuple):
    """Error rate among the `k` most confident predictions, for every `k`.

    Attributes:
        coverage: `k / n`, `[k]`.
        risk: fraction of the `k` predictions that are wrong, `[k]`.
    """

    coverage: np.ndarray
    risk: np.ndarray


def _confident(probabilities: ArrayLike, labels: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Return the probability of the predicted class, and whether that class is correct."""
    return np.max(probabilities, axis=1), np.argmax(probabilities, axis=1) == labels


@_check.arguments(probabilities=Probabilities(), labels=Labels())
def accuracy(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Compute the fraction of inputs whose most probable class is the label; higher is better.

    Args:
        probabilities: class probabilities, `[input, class]`, >= 0, rows that sum to 1.
        labels: true classes, integers `[input]`.

    Returns:
        A fraction, in [0, 1].

    Raises:
        ValueError: no inputs, or invalid probabilities or labels.

    Example:
        >>> accuracy([[0.9, 0.1], [0.8, 0.2]], [0, 1])
        0.5
    """
    return float(np.mean(_confident(probabilities, labels)[1]))


@_check.arguments(probabilities=Probabilities(), labels=Labels())
def f1(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Compute the harmonic mean of precision and recall, averaged over classes; higher is better.

    Per class it is 2 · (correct predictions) / (labels + predictions). The result is the unweighted
    mean over the classes that occur in labels or predictions ("macro"); a class that is never
    predicted correctly scores 0.

    Arguments and errors as for `accuracy`.

    Returns:
        In [0, 1].

    Example:
        >>> round(f1([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]], [0, 1, 1]), 3)
        0.667

    Source: van Rijsbergen 1979.
    """
    labels, predicted = np.asarray(labels), np.argmax(probabilities, axis=1)
    num_classes = np.shape(probabilities)[1]
    right = np.bincount(labels[predicted == labels], minlength=num_classes)
    either = np.bincount(np.concatenate([labels, predicted]), minlength=num_classes)
    return float(np.mean(2 * right[either > 0] / either[either > 0]))


@_check.arguments(probabilities=Probabilities(), labels=Labels())
def auroc(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Compute the area under the receiver operating characteristic; higher is better.

    Pair each input of a class with each input of another class. The area is the fraction of pairs
    in which the first has the higher probability of the class; ties count half. With two classes
    it is that of class 1; with more, the unweighted mean over classes ("one-vs-rest, macro").

    Args:
        probabilities: of two or more classes, `[input, class]`, >= 0, rows that sum to 1.
        labels: true classes, integers `[input]`; every class occurs at least once.

    Returns:
        In [0, 1]; 1/2 is chance level.

    Raises:
        ValueError: no inputs, or invalid probabilities or labels.

    Example:
        >>> auroc([[0.9, 0.1], [0.4, 0.6], [0.3, 0.7], [0.6, 0.4]], [0, 0, 1, 1])
        0.75

    Source: Hanley and McNeil 1982.
    """
    probabilities, labels = np.asarray(probabilities), np.asarray(labels)
    num_classes = probabilities.shape[1]
    if num_classes < 2:
        _check.fail("auroc", "probabilities", "of two or more classes", "one class")
    count = np.bincount(labels, minlength=num_classes)
    if not count.all():
        rule = f"labels of every class from 0 to {num_classes - 1}"
        _check.fail("auroc", "labels", rule, f"none of class {count.argmin()}")
    areas = [
        np.mean(share_below(score[labels != which], score[labels == which]))
        for which, score in enumerate(probabilities.T)
    ]
    return float(areas[1] if num_classes == 2 else np.mean(areas))


@_check.arguments(inside=SCORES, outside=SCORES)
def ood_auroc(inside: ArrayLike, outside: ArrayLike) -> float:
    """Compute the AUROC of out-of-distribution detection; higher is better.

    It is the probability that an out-of-distribution input scores above an in-distribution one.

    Args:
        inside: in-distribution scores, `[input]`, of a score that is higher for unfamiliar inputs,
            such as the entropy of a
            prediction.
        outside: the same score for out-of-distribution inputs, `[input]`.

    Returns:
        A fraction of pairs, ties counted half, in [0, 1]; 1/2 is chance level.

    Raises:
        ValueError: another shape, no inputs, or NaN.

    Example:
        >>> ood_auroc([0.1, 0.3], [0.2, 0.4])
        0.75

    Source: Hendrycks and Gimpel 2017.
    """
    return float(np.mean(share_below(np.asarray(inside), np.asarray(outside))))


@_check.arguments(probabilities=Probabilities(), labels=Labels())
def brier(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Compute the squared distance to the one-hot label, summed over classes; lower is better.

    Arguments and errors as for `accuracy`.

    Returns:
        In [0, 2].

    Example:
        >>> brier([[1.0, 0.0], [1.0, 0.0]], [0, 1])
        1.0

    Source: Brier 1950.
    """
    one_hot = np.eye(np.shape(probabilities)[1])[np.asarray(labels)]
    return float(np.mean(np.sum(np.subtract(probabilities, one_hot) ** 2, axis=1)))


@_check.arguments(**BINNED)
def reliability(
    probabilities: ArrayLike, labels: ArrayLike, num_bins: int = NUM_BINS, equal: Equal = "width"
) -> Reliability:
    """Compare confidence with accuracy in bins of confidence.

    Args:
        probabilities: class probabilities, `[input, class]`, >= 0, rows that sum to 1.
        labels: true classes, integers `[input]`.
        num_bins: number of bins, >= 1.
        equal: `"width"`: bins of equal width on [0, 1], each including its upper edge; `"mass"`:
            bins whose counts differ by at most one, except that equal confidences share a bin.

    Returns:
        A `Reliability`.

    Raises:
        ValueError: no inputs, invalid probabilities or labels, or an option out of range.

    Example:
        >>> reliability([[0.9, 0.1], [0.8, 0.2]], [0, 1], num_bins=2, equal="mass").accuracy
        array([0., 1.])

    Source: DeGroot and Fienberg 1983; equal mass: Nixon et al. 2019.
    """
    confidence, right = _confident(probabilities, labels)
    if equal == "width":
        bins = np.ceil(confidence * num_bins).astype(int) - 1
    else:
        bins = np.floor(share_below(confidence, confidence) * num_bins).astype(int)
    bins = np.clip(bins, 0, num_bins - 1)
    count = np.bincount(bins, minlength=num_bins)
    with np.errstate(invalid="ignore"):
        return Reliability(
            confidence=np.bincount(bins, confidence, num_bins) / count,
            accuracy=np.bincount(bins, right, num_bins) / count,
            count=count,
        )


@_check.arguments(**BINNED)
def ece(
    probabilities: ArrayLike, labels: ArrayLike, num_bins: int = NUM_BINS, equal: Equal = "width"
) -> float:
    """Compute the expected calibration error; lower is better.

    It is the mean of |accuracy - confidence| over bins, weighted by their counts. Arguments and
    errors as for `reliability`.

    Returns:
        In [0, 1].

    Example:
        >>> round(ece([[0.75, 0.25], [0.75, 0.25]], [0, 1], num_bins=10), 3)
        0.25

    Source: Guo et al. 2017; `equal="mass"`: Nixon et al. 2019.
    """
    bins = reliability(probabilities, labels, num_bins, equal)
    gaps = np.where(bins.count > 0, np.abs(bins.accuracy - bins.confidence), 0)
    return float(np.sum(bins.count * gaps) / np.sum(bins.count))


@_check.arguments(probabilities=Probabilities(), labels=Labels())
def risk_coverage(probabilities: ArrayLike, labels: ArrayLike) -> RiskCoverage:
    """Compute the error rate of a classifier that answers only where it is most confident.

    Inputs are sorted by decreasing probability of the predicted class. Risk `k` is the fraction of
    wrong predictions among the first `k`, in expectation over random orders of equal confidences.

    Arguments and errors as for `accuracy`.

    Returns:
        A `RiskCoverage`.

    Example:
        >>> risk_coverage([[0.9, 0.1], [0.8, 0.2]], [0, 1]).risk
        array([0. , 0.5])

    Source: Geifman and El-Yaniv 2017.
    """
    confidence, right = _confident(probabilities, labels)
    _, group, size = np.unique(-confidence, return_inverse=True, return_counts=True)
    # In a random order, each position among ties is wrong at the average rate of the ties.
    wrong = np.repeat(np.bincount(group, ~right) / size, size)
    first = np.arange(1, wrong.size + 1)
    return RiskCoverage(coverage=first / wrong.size, risk=np.cumsum(wrong) / first)


@_check.arguments(probabilities=Probabilities(), labels=Labels())
def aurc(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Compute the area under the risk-coverage curve; lower is better.

    It is the mean of `risk_coverage(...).risk`; arguments and errors as for `risk_coverage`. Sommer
    et al. 2026 write "area under the reliability curve" for AURC; their figures (.016 at 90 %
    accuracy, .065 at 77 %) have the scale of the risk-coverage curve, which is computed here.

    Returns:
        In [0, 1]; chance level is the error rate.

    Example:
        >>> aurc([[0.9, 0.1], [0.8, 0.2]], [0, 1])
        0.25

    Source: Geifman et al. 2019.
    """
    return float(np.mean(risk_coverage(probabilities, labels).risk))
