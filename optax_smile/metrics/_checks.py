"""Constraints that scores share, and ranks."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from optax_smile import _check

# Rows of float32 probabilities, averaged over thousands of draws, miss one by less.
ROW_SUM_TOLERANCE = 1e-3


class Double(_check.Real):
    """A number in an interval, finite in float64, in which scores are computed."""

    def holds(self, numbers: Any) -> Any:
        """Whether numbers lie in the interval."""
        with jax.enable_x64(True):
            return super().holds(numbers)


class Density(_check.Real):
    """A log density; minus infinity where a target is impossible."""

    @property
    def rule(self) -> str:
        """The range."""
        return "below infinity, not NaN"

    def holds(self, numbers: Any) -> Any:
        """Whether numbers can be log densities."""
        return numbers < np.inf


class Unchecked(_check.Real):
    """Any number: which ones count depends on another argument."""

    def holds(self, numbers: Any) -> Any:
        """Whether numbers are numbers."""
        return np.ones_like(numbers, bool)


FINITE = Double()
NUMBERS = _check.Array(each=FINITE)
DENSITIES = _check.Array(each=Density())


@dataclass(frozen=True)
class Probabilities(_check.Array):
    """Class probabilities, rows that sum to 1."""

    axes: str = "[input, class]"
    each: _check.Real = Double(0, infinite=True)

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
    """Classes of inputs.

    Attributes:
        of: argument declared before, an array `[input, class]`.
    """

    of: str = "probabilities"

    @property
    def rule(self) -> str:
        """What they go with."""
        return f"integers [input], classes of `{self.of}`"

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
    """Standard deviations, broadcast to the shape of the means.

    Attributes:
        of: argument declared before, the means.
    """

    each: _check.Real = Double(0, open="low")
    of: str = "mean"

    def __call__(self, where, argument, value, given=_check.NOTHING):
        std, shape = super().__call__(where, argument, value, given), given[self.of].shape
        if std.shape not in ((), shape, (*shape[:-1], 1)):
            rule = f"a scalar or of shape {shape} or {(*shape[:-1], 1)}"
            _check.fail(where, argument, rule, f"shape {std.shape}")
        return np.broadcast_to(std, shape)


@dataclass(frozen=True)
class Booleans(_check.Array):
    """Booleans, and no numbers that stand for them."""

    dtype: Any = None

    @property
    def rule(self) -> str:
        """Its axes."""
        return super().rule.replace("array", "array of booleans")

    def __call__(self, where, argument, value, given=_check.NOTHING):
        array = super().__call__(where, argument, value, given)
        if array.dtype != bool:
            _check.fail(where, argument, self.rule, f"{array.dtype} of shape {array.shape}")
        return array


def share_below(reference: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Share of `reference` below each value, ties half: mid-ranks, from 0 to 1."""
    reference = np.sort(reference)
    twice = np.searchsorted(reference, values, "left") + np.searchsorted(reference, values, "right")
    return twice / (2 * reference.size)
