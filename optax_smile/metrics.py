"""Scores of predictions, pure functions on arrays.

`probabilities` are `[input, class]` with rows that sum to one, `labels` integers `[input]`.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from optax_smile import _check

# Rows of float32 probabilities, averaged over thousands of draws, miss one by less.
ROW_SUM_TOLERANCE = 1e-3


class Reliability(NamedTuple):
    """Predictions sorted into bins of equal width by the probability of the predicted class.

    Attributes:
        confidence: mean probability of the predicted class, `[bin]`; NaN for an empty bin.
        accuracy: share that is right, `[bin]`; NaN for an empty bin.
        count: predictions in the bin, `[bin]`.
    """

    confidence: np.ndarray
    accuracy: np.ndarray
    count: np.ndarray


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
    if labels is None:
        return probabilities, np.empty(0, int)
    labels = np.asarray(labels)
    num_inputs, num_classes = probabilities.shape
    if labels.shape != (num_inputs,) or not np.issubdtype(labels.dtype, np.integer):
        rule = f"integers of shape ({num_inputs},)"
        _check.fail(where, "labels", rule, f"{labels.dtype} of shape {labels.shape}")
    if labels.size and not (0 <= labels.min() and labels.max() < num_classes):
        rule = f"classes from 0 to {num_classes - 1}"
        _check.fail(where, "labels", rule, f"{labels.min()} to {labels.max()}")
    return probabilities, labels


def lppd(log_density: ArrayLike) -> float:
    """Log pointwise predictive density in nats, higher is better.

    The mean of `Prediction.log_density` `[input]`, as Sommer et al. 2026 report it (Gelman et al.
    2014 define the sum).

    Example:
        >>> round(lppd([-1.0, -2.0]), 3)
        -1.5
    """
    return float(np.mean(np.asarray(log_density, float)))


def accuracy(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Share of inputs whose most probable class is the label, in [0, 1].

    Example:
        >>> accuracy([[0.9, 0.1], [0.8, 0.2]], [0, 1])
        0.5
    """
    probabilities, labels = _checked("accuracy", probabilities, labels)
    return float(np.mean(probabilities.argmax(axis=1) == labels))


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


def reliability(probabilities: ArrayLike, labels: ArrayLike, num_bins: int = 15) -> Reliability:
    """Compare confidence with accuracy in bins of equal width.

    A bin holds its upper edge. Source: DeGroot and Fienberg 1983.
    """
    _check.whole("reliability", "num_bins", num_bins, 1)
    probabilities, labels = _checked("reliability", probabilities, labels)
    confidence = probabilities.max(axis=1)
    right = probabilities.argmax(axis=1) == labels
    bins = np.clip(np.ceil(confidence * num_bins).astype(int) - 1, 0, num_bins - 1)
    count = np.bincount(bins, minlength=num_bins)
    with np.errstate(invalid="ignore"):
        return Reliability(
            confidence=np.bincount(bins, confidence, num_bins) / count,
            accuracy=np.bincount(bins, right, num_bins) / count,
            count=count,
        )


def ece(probabilities: ArrayLike, labels: ArrayLike, num_bins: int = 15) -> float:
    """Expected calibration error with bins of equal width, in [0, 1]; lower is better.

    The mean of |accuracy - confidence| over `reliability` bins, weighted with their counts
    (Guo et al. 2017).

    Example:
        >>> round(ece([[0.75, 0.25], [0.75, 0.25]], [0, 1], num_bins=10), 3)
        0.25
    """
    bins = reliability(probabilities, labels, num_bins)
    gaps = np.where(bins.count > 0, np.abs(bins.accuracy - bins.confidence), 0)
    return float(np.sum(bins.count * gaps) / np.sum(bins.count))
