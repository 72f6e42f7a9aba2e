"""What the scores require of their arrays."""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from optax_smile import _check

# Rows of float32 probabilities, averaged over thousands of draws, miss one by less.
ROW_SUM_TOLERANCE = 1e-3


def numbers(
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


def alike(where: str, **arguments: ArrayLike) -> list[np.ndarray]:
    """Require one shape, so that `[n, 1]` and `[n]` do not broadcast to `[n, n]`."""
    arrays = {name: numbers(where, name, value) for name, value in arguments.items()}
    first, shape = next((name, array.shape) for name, array in arrays.items())
    for name, array in arrays.items():
        if array.shape != shape:
            rule = f"of shape {shape} as `{first}` is"
            _check.fail(where, name, rule, f"shape {array.shape}")
    return list(arrays.values())


def check_classes(where: str, probabilities: ArrayLike, labels: ArrayLike | None = None):
    probabilities = np.asarray(probabilities, float)
    if probabilities.ndim != 2:
        rule = "of shape [input, class]"
        _check.fail(where, "probabilities", rule, f"shape {probabilities.shape}")
    sums = probabilities.sum(axis=1)
    if not np.all(np.abs(sums - 1) <= ROW_SUM_TOLERANCE):
        row = int(np.argmax(~(np.abs(sums - 1) <= ROW_SUM_TOLERANCE)))
        rule = "rows that sum to 1"
        _check.fail(where, "probabilities", rule, f"a sum of {sums[row]} in row {row}")
    numbers(where, "probabilities", probabilities, ">= 0", lambda value: value >= 0)
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


def confident(where: str, probabilities: ArrayLike, labels: ArrayLike):
    probabilities, labels = check_classes(where, probabilities, labels)
    return probabilities.max(axis=1), probabilities.argmax(axis=1) == labels


def share_below(reference: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Share of `reference` below each value, ties half: mid-ranks, from 0 to 1."""
    reference = np.sort(reference)
    twice = np.searchsorted(reference, values, "left") + np.searchsorted(reference, values, "right")
    return twice / (2 * reference.size)


def check_normals(where: str, mean: ArrayLike, std: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the mixture's parts, both `[draw, input]`."""
    mean = numbers(where, "mean", mean, "finite", np.isfinite)
    std = numbers(where, "std", std, "> 0 and finite", lambda std: (std > 0) & np.isfinite(std))
    if mean.ndim not in (1, 2):
        rule = "of shape [input] or [draw, input]"
        _check.fail(where, "mean", rule, f"shape {mean.shape}")
    if std.shape not in ((), mean.shape, (*mean.shape[:-1], 1)):
        rule = f"a scalar or of shape {mean.shape} or {(*mean.shape[:-1], 1)}"
        _check.fail(where, "std", rule, f"shape {std.shape}")
    return np.atleast_2d(mean), np.atleast_2d(np.broadcast_to(std, mean.shape))


def check_scores(
    where: str, inside: ArrayLike, outside: ArrayLike
) -> tuple[np.ndarray, np.ndarray]:
    inside, outside = numbers(where, "inside", inside), numbers(where, "outside", outside)
    for name, scores in (("inside", inside), ("outside", outside)):
        if scores.ndim != 1:
            _check.fail(where, name, "of shape [input]", f"shape {scores.shape}")
    return inside, outside
