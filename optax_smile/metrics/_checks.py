"""Constraints that the scores share, and mid-ranks."""

from dataclasses import dataclass

import numpy as np

from optax_smile import _check

# Rows of float32 probabilities, averaged over thousands of draws, differ from 1 by less.
ROW_SUM_TOLERANCE = 1e-3

# Numbers of scores have float64.
FINITE = _check.Real(dtype=float)
POSITIVE = _check.Real(0, open="low", dtype=float)
NONNEGATIVE = _check.Real(0, infinite=True)
# Nominal coverage of an interval or a set.
LEVEL = _check.Real(0, 1, open="both", traced=False)
# A target may have probability zero.
DENSITY = _check.Where("below infinity, not NaN", lambda density: density < np.inf)
# NaN is allowed for padding, and where a mask excludes it.
MASKED_DENSITY = _check.Where("below infinity", lambda density: density != np.inf)
BOOLEAN = _check.Where("a boolean", lambda array: np.full(array.shape, array.dtype == bool))


@dataclass(frozen=True)
class Probabilities(_check.Array):
    """Class probabilities, rows that sum to 1."""

    axes: str = "[input, class]"
    each: _check.Real = NONNEGATIVE

    def __call__(self, where, argument, value, given=_check.NOTHING):
        array = super().__call__(where, argument, value, given)
        sums = array.sum(axis=1)
        off = ~(np.abs(sums - 1) <= ROW_SUM_TOLERANCE)
        if off.any():
            got = f"a sum of {sums[off][0]} in row {np.argmax(off)}"
            _check.fail(where, argument, "rows that sum to 1", got)
        return array


@dataclass(frozen=True)
class Labels(_check.Constraint):
    """Class labels; `of` names an argument declared earlier, an array `[input, class]`."""

    of: str = "probabilities"
    text: str = "integers [input], one class each"

    def __call__(self, where, argument, value, given=_check.NOTHING):
        num_inputs, num_classes = given[self.of].shape
        labels = _check.host(where, argument, value)
        if labels.shape != (num_inputs,) or not np.issubdtype(labels.dtype, np.integer):
            got = f"{labels.dtype} of shape {labels.shape}"
            _check.fail(where, argument, f"integers of shape ({num_inputs},)", got)
        if not (0 <= labels.min() and labels.max() < num_classes):
            got = f"{labels.min()} to {labels.max()}"
            _check.fail(where, argument, f"classes from 0 to {num_classes - 1}", got)
        return labels


@dataclass(frozen=True)
class Spreads(_check.Array):
    """Standard deviations, broadcast to the shape of the means, the argument `of`."""

    each: _check.Real = POSITIVE
    of: str = "mean"

    def __call__(self, where, argument, value, given=_check.NOTHING):
        std, shape = super().__call__(where, argument, value, given), given[self.of].shape
        if std.shape not in ((), shape, (*shape[:-1], 1)):
            rule = f"a scalar or of shape {shape} or {(*shape[:-1], 1)}"
            _check.fail(where, argument, rule, f"shape {std.shape}")
        return np.broadcast_to(std, shape)


def share_below(reference: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Fraction of `reference` below each value, ties counted half: mid-ranks, from 0 to 1."""
    reference = np.sort(reference)
    twice = np.searchsorted(reference, values, "left") + np.searchsorted(reference, values, "right")
    return twice / (2 * reference.size)
