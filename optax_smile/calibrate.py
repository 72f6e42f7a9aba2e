"""Post-hoc calibration on held-out predictions: pure functions on arrays.

Fit on averaged predictions, such as a stored `Prediction.mean`, and on the targets of held-out
inputs that were used neither for sampling nor to choose settings. Arrays have the forms described
in `optax_smile.metrics`.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike

from optax_smile import _check
from optax_smile._warn import warn
from optax_smile.metrics._checks import BOOLEAN, FINITE, LEVEL, Labels, Probabilities, Spreads

__all__ = [
    "fit_temperature",
    "prediction_intervals",
    "prediction_sets",
    "set_coverage",
    "set_size",
    "with_temperature",
]

# Bisection steps that shrink a bracket to the rounding error of its upper end.
BISECTIONS = 53
POSITIVE = _check.Real(0, open="low", traced=False)
MEANS = _check.Array("[input]", FINITE)
SETS = _check.Array("[input, class]", BOOLEAN, dtype=None)


def _log(probabilities: np.ndarray) -> np.ndarray:
    """Compute logarithms relative to the row maximum, so that a uniform row has exact zeros."""
    with np.errstate(divide="ignore"):
        return np.log(probabilities / probabilities.max(axis=1, keepdims=True))


def _tempered(log: np.ndarray, inverse: float) -> np.ndarray:
    weights = np.exp(inverse * log)
    return weights / weights.sum(axis=1, keepdims=True)


@_check.arguments(
    probabilities=Probabilities(), labels=Labels(), smallest=POSITIVE, largest=POSITIVE
)
def fit_temperature(
    probabilities: ArrayLike,
    labels: ArrayLike,
    *,
    smallest: float = 0.05,
    largest: float = 20.0,
) -> float:
    """Find the temperature of averaged probabilities that maximises the held-out likelihood.

    With p the average and b = 1 / T, the mean of `-log(p_y^b / sum_c p_c^b)` is convex in b.
    Bisection finds the root of its derivative, the mean of `sum_c q_c log p_c - log p_y` with q the
    tempered probabilities. If every label is the most probable class, the optimum is at the lower
    end of the range; if labels are on average less probable than the other classes, at the upper
    end. The function then returns that end and warns. If every row is uniform over its possible
    classes, it returns 1.

    Args:
        probabilities: class probabilities averaged over draws, `[input, class]`, >= 0, rows that
            sum to 1, > 0 for every label.
        labels: true classes, integers `[input]`.
        smallest: lowest temperature, > 0.
        largest: highest temperature, > 0, and > `smallest`.

    Returns:
        Temperature, in [smallest, largest]: above 1 for overconfident predictions.

    Raises:
        ValueError: no inputs, invalid probabilities or labels, or an option out of range; a label
            of probability 0, which no temperature makes possible.

    Cost: 55 passes over the probabilities; memory for a few such arrays in float64.

    Example:
        >>> round(fit_temperature([[0.8, 0.2], [0.8, 0.2], [0.2, 0.8]], [0, 1, 1]), 2)
        2.0

    Source: Guo et al. 2017, who temper the logits of one network. Differences from the paper: it
    tempers the average over draws, as Rahaman and Thiery 2021 recommend ("pool, then calibrate").
    """
    where = "fit_temperature"
    probabilities, labels = np.asarray(probabilities), np.asarray(labels)
    if not smallest < largest:
        _check.fail(where, "largest", f"> `smallest`, {smallest}", largest)
    of_label = probabilities[np.arange(len(labels)), labels]
    if not of_label.all():
        remedy = "Mix a small share of the uniform distribution into all rows."
        got = f"0.0 in row {of_label.argmin()}"
        _check.fail(where, "probabilities", "> 0 for every label", got, remedy)
    log = _log(probabilities)
    log_label = log[np.arange(len(labels)), labels]
    # An impossible class has weight 0 at every temperature.
    possible = np.where(np.isfinite(log), log, 0)

    def slope(inverse: float) -> float:
        weighted = np.sum(_tempered(log, inverse) * possible, axis=1)
        return float(np.mean(weighted - log_label))

    low, high = 1 / largest, 1 / smallest
    first, last = slope(low), slope(high)
    if first == last == 0:
        return 1.0
    if first >= 0 or last <= 0:
        end = float(largest if first >= 0 else smallest)
        message = f"the likelihood is highest at the end of the range, {end:g}"
        warn(f"`{where}`: {message}. Try more held-out inputs.")
        return end
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return 2 / (low + high)


@_check.arguments(probabilities=Probabilities(), temperature=POSITIVE)
def with_temperature(probabilities: ArrayLike, temperature: float) -> np.ndarray:
    """Temper probabilities: `p_c^(1/T) / sum_k p_k^(1/T)`.

    Args:
        probabilities: class probabilities averaged over draws, `[input, class]`, >= 0, rows that
            sum to 1; zeros stay zero.
        temperature: > 0, such as `fit_temperature` returns: above 1 less certain, below 1 more.

    Returns:
        Probabilities `[input, class]`, float64.

    Raises:
        ValueError: no inputs, invalid probabilities, or a temperature out of range.

    Example:
        >>> with_temperature([[0.8, 0.2]], 2.0).round(3).tolist()
        [[0.667, 0.333]]

    Source: Guo et al. 2017.
    """
    return _tempered(_log(np.asarray(probabilities)), 1 / temperature)


def _limit(where: str, scores: np.ndarray, level: float) -> float:
    """Find the score that a new one does not exceed with probability `level`; may be infinite."""
    # Use the decimal value of the level: in floating point 0.55 * 100 is above 55.
    written = Fraction(repr(float(level)))
    rank = math.ceil((scores.size + 1) * written)
    if rank <= scores.size:
        return float(np.partition(scores, rank - 1)[rank - 1])
    takes = math.ceil(written / (1 - written))
    message = f"level {level} needs {takes} held-out inputs, but there are only {scores.size}"
    effect = "sets contain all classes" if where == "prediction_sets" else "intervals are unbounded"
    warn(f"`{where}`: {message}. So {effect}.")
    return math.inf


@_check.arguments(
    probabilities=Probabilities(),
    labels=Labels(),
    new_probabilities=Probabilities(),
    level=LEVEL,
)
def prediction_sets(
    probabilities: ArrayLike,
    labels: ArrayLike,
    new_probabilities: ArrayLike,
    level: float = 0.9,
) -> np.ndarray:
    """Compute sets of classes that contain the label of a new input with probability `level`.

    Uses split conformal prediction with the score 1 - p_y: a class is in the set if its score is at
    most the `ceil((n + 1) level)`-th smallest of n held-out scores. If held-out and new inputs are
    exchangeable, coverage averaged over both is at least `level`, for any model, and without ties
    less than `level + 1 / (n + 1)`. The coverage for one given held-out set deviates from this by
    about `sqrt(level (1 - level) / n)`. A set may be empty.

    Args:
        probabilities: class probabilities of held-out inputs, `[input, class]`, >= 0, rows that sum
            to 1.
        labels: true classes of the held-out inputs, integers `[input]`.
        new_probabilities: class probabilities of new inputs, `[new input, class]`, >= 0, rows that
            sum to 1.
        level: probability of coverage, in (0, 1).

    Returns:
        Booleans `[new input, class]`. If n < level / (1 - level), all are True and the function
        warns.

    Raises:
        ValueError: no inputs, invalid probabilities or labels, different numbers of classes, or a
            level out of range.

    Example:
        >>> held_out, labels = [[0.9, 0.1], [0.6, 0.4], [0.3, 0.7]], [0, 0, 1]
        >>> prediction_sets(held_out, labels, [[0.5, 0.5], [0.35, 0.65]], level=0.7).tolist()
        [[False, False], [False, True]]

    Source: Sadinle et al. 2019; Vovk et al. 2005; coverage: Lei et al. 2018, theorem 2.
    """
    where, new = "prediction_sets", np.asarray(new_probabilities)
    probabilities, labels = np.asarray(probabilities), np.asarray(labels)
    num_classes = probabilities.shape[1]
    if new.shape[1] != num_classes:
        _check.fail(where, "new_probabilities", f"of {num_classes} classes", f"shape {new.shape}")
    # -p has the order of 1 - p without rounding.
    return -new <= _limit(where, -probabilities[np.arange(len(labels)), labels], level)


@_check.arguments(
    mean=MEANS,
    std=Spreads(),
    targets=_check.Array(each=FINITE, like="mean"),
    new_mean=MEANS,
    new_std=Spreads(of="new_mean"),
    level=LEVEL,
)
def prediction_intervals(
    mean: ArrayLike,
    std: ArrayLike,
    targets: ArrayLike,
    new_mean: ArrayLike,
    new_std: ArrayLike,
    level: float = 0.9,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute intervals that contain the target of a new input with probability `level`.

    Uses split conformal prediction with the score |y - mean| / std: new_mean ± q new_std, where q
    is the `ceil((n + 1) level)`-th smallest of n held-out scores. The guarantee is that of
    `prediction_sets`. Score the intervals with `metrics.coverage` and `metrics.interval_width`.

    Args:
        mean: predictive mean of held-out inputs, `[input]`, such as `Prediction.mean`.
        std: predictive standard deviation, `[input]` or a scalar, > 0, such as the square root of
            `Prediction.total`.
        targets: observed values, `[input]`.
        new_mean: predictive mean of new inputs, `[new input]`.
        new_std: their standard deviation, `[new input]` or a scalar, > 0.
        level: probability of coverage, in (0, 1).

    Returns:
        Lower and upper ends, both `[new input]`, in units of the target. If n < level / (1 -
        level), they are infinite and the function warns.

    Raises:
        ValueError: no inputs, mismatched shapes, or numbers out of range.

    Example:
        >>> lower, upper = prediction_intervals(
        ...     [0.0, 0.0, 0.0], [1.0, 1.0, 2.0], [0.5, -2.0, 6.0], [10.0], [0.1], level=0.75
        ... )
        >>> lower.round(2).tolist(), upper.round(2).tolist()
        ([9.7], [10.3])

    Source: Lei et al. 2018, section 5.2; Papadopoulos et al. 2008.
    """
    scores = np.abs(np.subtract(targets, mean)) / std
    reach = np.multiply(_limit("prediction_intervals", scores, level), new_std)
    return new_mean - reach, new_mean + reach


@_check.arguments(sets=SETS, labels=Labels(of="sets"))
def set_coverage(sets: ArrayLike, labels: ArrayLike) -> float:
    """Compute the fraction of labels inside their set, which should be close to the level.

    Args:
        sets: booleans `[input, class]`, such as `prediction_sets` returns.
        labels: true classes, integers `[input]`.

    Returns:
        A fraction, in [0, 1].

    Raises:
        ValueError: no inputs, or invalid sets or labels.

    Example:
        >>> set_coverage([[True, True], [True, False]], [0, 1])
        0.5
    """
    sets, labels = np.asarray(sets), np.asarray(labels)
    return float(np.mean(sets[np.arange(len(labels)), labels]))


@_check.arguments(sets=SETS)
def set_size(sets: ArrayLike) -> float:
    """Compute the mean number of classes in a set; lower is better at equal `set_coverage`.

    Args:
        sets: booleans `[input, class]`, such as `prediction_sets` returns.

    Returns:
        In [0, number of classes].

    Raises:
        ValueError: no inputs, or invalid sets.

    Example:
        >>> set_size([[True, True], [True, False]])
        1.5
    """
    return float(np.mean(np.sum(sets, axis=1)))
