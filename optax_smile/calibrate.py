"""Calibration after the fact, on held-out predictions: pure functions on arrays.

What is fitted here sees predictions that are averages already, `Prediction.mean` as it was stored,
and the targets of inputs that neither the chains nor the choice of their settings saw. Arrays are
as in `optax_smile.metrics`.
"""

from __future__ import annotations

import math
import warnings
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike

from optax_smile import _check
from optax_smile.metrics._checks import BOOLEAN, FINITE, LEVEL, Labels, Probabilities, Spreads

__all__ = [
    "fit_temperature",
    "prediction_intervals",
    "prediction_sets",
    "set_coverage",
    "set_size",
    "with_temperature",
]

# Halvings that shrink a bracket to the rounding error of its upper end.
BISECTIONS = 53
POSITIVE = _check.Real(0, open="low", traced=False)
MEANS = _check.Array("[input]", FINITE)
SETS = _check.Array("[input, class]", BOOLEAN, dtype=None)


def _log(probabilities: np.ndarray) -> np.ndarray:
    """Logarithms relative to the largest of a row, so that a uniform row has exact zeros."""
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
    """Temperature of averaged probabilities under which held-out labels are most likely.

    With p the average and b = 1 / T the mean of `-log(p_y^b / sum_c p_c^b)` is convex in b. Its
    derivative, the mean of `sum_c q_c log p_c - log p_y` with q the tempered probabilities, is
    brought to zero by bisection. It falls (or rises) to an end of the range where every label is
    the most (or on average less than a middling) probable class: that end is returned, with a
    warning. Where no temperature matters, rows being uniform over what they allow, it is 1.

    Args:
        probabilities: of the classes, averaged over draws, `[input, class]`, >= 0, rows that sum
            to 1, > 0 for every label.
        labels: true classes, integers `[input]`.
        smallest: temperature, > 0.
        largest: temperature, > 0, and > `smallest`.

    Returns:
        Temperature, in [smallest, largest]: above 1 for overconfident predictions.

    Raises:
        ValueError: no inputs, probabilities or labels that are none, an option out of range; a
            label of probability 0, which no temperature makes possible.

    Cost: 55 passes over the probabilities; memory for a few such arrays in float64.

    Example:
        >>> round(fit_temperature([[0.8, 0.2], [0.8, 0.2], [0.2, 0.8]], [0, 1, 1]), 2)
        2.0

    Source: Guo et al. 2017, who temper the logits of one network. Differs: the average over draws
    is tempered, as Rahaman and Thiery 2021 recommend ("pool, then calibrate").
    """
    where = "fit_temperature"
    probabilities, labels = np.asarray(probabilities), np.asarray(labels)
    if not smallest < largest:
        _check.fail(where, "largest", f"> `smallest`, {smallest}", largest)
    of_label = probabilities[np.arange(len(labels)), labels]
    if not of_label.all():
        remedy = "Mix a little of the uniform distribution into all rows."
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
        message = f"the likelihood still rises where the range ends at {end:g}"
        warnings.warn(f"`{where}`: {message}; more held-out inputs?", stacklevel=3)
        return end
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return 2 / (low + high)


@_check.arguments(probabilities=Probabilities(), temperature=POSITIVE)
def with_temperature(probabilities: ArrayLike, temperature: float) -> np.ndarray:
    """Temper probabilities: `p_c^(1/T) / sum_k p_k^(1/T)`.

    Args:
        probabilities: of the classes, averaged over draws, `[input, class]`, >= 0, rows that sum
            to 1; what is 0 stays 0.
        temperature: > 0: above 1 less certain, below 1 more; as of `fit_temperature`.

    Returns:
        Probabilities `[input, class]`, float64.

    Raises:
        ValueError: no inputs, probabilities that are none, a temperature out of range.

    Example:
        >>> with_temperature([[0.8, 0.2]], 2.0).round(3).tolist()
        [[0.667, 0.333]]

    Source: Guo et al. 2017.
    """
    return _tempered(_log(np.asarray(probabilities)), 1 / temperature)


def _limit(where: str, scores: np.ndarray, level: float) -> float:
    """Score that a new one does not exceed with probability `level`; infinite if too few."""
    # The level as it is written: in floating point 0.55 * 100 is above 55.
    written = Fraction(repr(float(level)))
    rank = math.ceil((scores.size + 1) * written)
    if rank <= scores.size:
        return float(np.partition(scores, rank - 1)[rank - 1])
    takes = math.ceil(written / (1 - written))
    message = f"{scores.size} held-out inputs are too few for level {level}, which takes {takes}"
    warnings.warn(f"`{where}`: {message}: nothing is left out.", stacklevel=4)
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
    """Sets of classes that hold the label of a new input with probability `level` or more.

    Split conformal prediction with the score 1 - p_y: a class is in the set if its score is at most
    the `ceil((n + 1) level)`-th smallest of n held-out ones. If held-out and new inputs are
    exchangeable, coverage on average over both is at least `level`, and without ties less than
    `level + 1 / (n + 1)`, whatever the model. A single held-out part has its own, off by about
    `sqrt(level (1 - level) / n)`. A set may be empty.

    Args:
        probabilities: of the classes for held-out inputs, `[input, class]`, >= 0, rows that sum to
            1.
        labels: true classes of these, integers `[input]`.
        new_probabilities: for the inputs whose sets are asked, `[new input, class]`, >= 0, rows
            that sum to 1.
        level: in (0, 1).

    Returns:
        Booleans `[new input, class]`. Where n < level / (1 - level) all are True, and a warning
        says so.

    Raises:
        ValueError: no inputs, probabilities or labels that are none, numbers of classes that
            differ, a level out of range.

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
    # Minus p orders as 1 - p does, and rounds nothing.
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
    """Intervals that hold the target of a new input with probability `level` or more.

    Split conformal prediction with the score |y - mean| / std: new_mean ± q new_std, q the
    `ceil((n + 1) level)`-th smallest of n held-out scores. The promise is that of
    `prediction_sets`. `metrics.coverage` and `metrics.interval_width` judge the intervals.

    Args:
        mean: predictive mean for held-out inputs, `[input]`, as `Prediction.mean`.
        std: predictive standard deviation, `[input]` or a scalar, > 0, as the root of
            `Prediction.total`.
        targets: what was observed, `[input]`.
        new_mean: for the inputs whose intervals are asked, `[new input]`.
        new_std: their standard deviation, `[new input]` or a scalar, > 0.
        level: in (0, 1).

    Returns:
        Lower and upper ends, both `[new input]`, in units of the target; infinite where
        n < level / (1 - level), and a warning says so.

    Raises:
        ValueError: no inputs, shapes that do not fit, numbers out of range.

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
    """Share of labels inside their set; best near its level.

    Args:
        sets: booleans `[input, class]`, as of `prediction_sets`.
        labels: true classes, integers `[input]`.

    Returns:
        A share, in [0, 1].

    Raises:
        ValueError: no inputs, sets or labels that are none.

    Example:
        >>> set_coverage([[True, True], [True, False]], [0, 1])
        0.5
    """
    sets, labels = np.asarray(sets), np.asarray(labels)
    return float(np.mean(sets[np.arange(len(labels)), labels]))


@_check.arguments(sets=SETS)
def set_size(sets: ArrayLike) -> float:
    """Mean number of classes in a set; lower is better at equal `set_coverage`.

    Args:
        sets: booleans `[input, class]`, as of `prediction_sets`.

    Returns:
        In [0, number of classes].

    Raises:
        ValueError: no inputs, sets that are none.

    Example:
        >>> set_size([[True, True], [True, False]])
        1.5
    """
    return float(np.mean(np.sum(sets, axis=1)))
