"""What the scores share: what they require of their arrays, and ranks."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from optax_smile import _check

# Rows of float32 probabilities, averaged over thousands of draws, miss one by less.
ROW_SUM_TOLERANCE = 1e-3


FINITE: dict[str, Any] = {"rule": "finite", "holds": np.isfinite}


def alike(where: str, require: dict[str, Any], **arguments: ArrayLike) -> list[np.ndarray]:
    """Require one shape, so that `[n, 1]` and `[n]` do not broadcast to `[n, n]`."""
    like, arrays = None, []
    for name, value in arguments.items():
        arrays.append(_check.array(where, name, value, like=like, **require))
        like = like or (name, arrays[0].shape)
    return arrays


def check_probabilities(where: str, probabilities: ArrayLike) -> np.ndarray:
    """Require class probabilities `[input, class]`."""
    rule = {"rule": ">= 0", "holds": lambda value: value >= 0}
    array = _check.array(where, "probabilities", probabilities, "[input, class]", **rule)
    sums = array.sum(axis=1)
    off = ~(np.abs(sums - 1) <= ROW_SUM_TOLERANCE)
    if off.any():
        got = f"a sum of {sums[off][0]} in row {np.argmax(off)}"
        _check.fail(where, "probabilities", "rows that sum to 1", got)
    return array


def check_classes(
    where: str, probabilities: ArrayLike, labels: ArrayLike
) -> tuple[np.ndarray, np.ndarray]:
    """Require class probabilities and the labels that go with them."""
    probabilities = check_probabilities(where, probabilities)
    return probabilities, check_labels(where, labels, *probabilities.shape)


def check_labels(where: str, labels: ArrayLike, num_inputs: int, num_classes: int) -> np.ndarray:
    """Require classes of the inputs."""
    labels = _check.host(where, "labels", labels)
    if labels.shape != (num_inputs,) or not np.issubdtype(labels.dtype, np.integer):
        rule = f"integers of shape ({num_inputs},)"
        _check.fail(where, "labels", rule, f"{labels.dtype} of shape {labels.shape}")
    if not (0 <= labels.min() and labels.max() < num_classes):
        rule = f"classes from 0 to {num_classes - 1}"
        _check.fail(where, "labels", rule, f"{labels.min()} to {labels.max()}")
    return labels


def check_normals(
    where: str, mean: ArrayLike, std: ArrayLike, axes: str = "[input] or [draw, input]"
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the mixture's parts, both `[draw, input]`."""
    mean = _check.array(where, "mean", mean, axes, **FINITE)
    positive = {"rule": "> 0 and finite", "holds": lambda std: (std > 0) & np.isfinite(std)}
    std = _check.array(where, "std", std, **positive)
    if std.shape not in ((), mean.shape, (*mean.shape[:-1], 1)):
        rule = f"a scalar or of shape {mean.shape} or {(*mean.shape[:-1], 1)}"
        _check.fail(where, "std", rule, f"shape {std.shape}")
    return np.atleast_2d(mean), np.atleast_2d(np.broadcast_to(std, mean.shape))


def share_below(reference: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Share of `reference` below each value, ties half: mid-ranks, from 0 to 1."""
    reference = np.sort(reference)
    twice = np.searchsorted(reference, values, "left") + np.searchsorted(reference, values, "right")
    return twice / (2 * reference.size)
