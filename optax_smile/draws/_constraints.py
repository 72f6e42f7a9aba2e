"""Constraints of the arguments of draws and predictions."""

from dataclasses import dataclass

import jax.core
import numpy as np

from optax_smile import _check, _on_host
from optax_smile.draws import likelihoods
from optax_smile.draws.prediction import Prediction

PREDICTION = _check.kind(Prediction, "what `predict` returned")


def is_list(value: object) -> bool:
    """Whether a value is an iterable such as a list, but not a dict, named tuple or string."""
    is_tree = hasattr(value, "_fields") or isinstance(value, jax.core.Tracer)
    return bool(_check.BATCHES.holds(value)) and not is_tree


SNAPSHOTS = _check.Where(
    "an iterable of parameter trees",
    is_list,
    "Make them with `Snapshots`, `Snapshots.from_members` or `load_snapshots`.",
)


class Reading(_check.Constraint):
    """A likelihood or its name, converted to a `Likelihood`."""

    text = f"{_check.OneOf(likelihoods.Name).rule}, or a `Likelihood`"

    def __call__(self, argument, value, given=_check.NOTHING):
        if not isinstance(value, likelihoods.Likelihood):
            if not isinstance(value, str) or value not in likelihoods.NAMED:
                _check.fail(argument, self.rule, _check.written(value))
            return likelihoods.NAMED[value]
        for name, part in value._asdict().items():
            if part is not None:
                _check.Function(likelihoods.FORMS[name])(f"{argument}.{name}", part)
        return value


@dataclass(frozen=True)
class Numeric(_check.Tree):
    """Arrays, or what NumPy converts to arrays."""

    def __call__(self, argument, value, given=_check.NOTHING):
        return super().__call__(argument, _on_host.as_numeric(argument, value), given)


@dataclass(frozen=True)
class Inputs(Numeric):
    """Arrays of inputs; finite, since XLA can turn NaN into numbers."""

    axes: str = "[input, ...]"
    finite: bool = True


@dataclass(frozen=True)
class Targets(Inputs):
    """Arrays as long as `inputs`; a single one for a named likelihood."""

    like: str = "inputs"
    finite: bool = False

    def __call__(self, argument, value, given=_check.NOTHING):
        if value is None:
            return None
        if given["likelihood"] in likelihoods.NAMED.values():
            value = _check.host(argument, value)
        return super().__call__(argument, value, given)


INPUTS_AND_TARGETS = _check.Where(
    "a pair of inputs and targets",
    lambda value: isinstance(value, (tuple, list)) and len(value) == 2 and value[1] is not None,
)


def log_density_of(axes: tuple[int, int], prediction: Prediction) -> np.ndarray:
    """Return the log likelihoods `[chain, draw, target]` of a prediction by draw."""
    density = None if prediction.each is None else prediction.each.log_density
    if density is None or density.ndim < 3 or density.shape[:2] != axes:
        rule = (
            'made by `predict(..., per="draw", targets=...)` from these draws'
            f" ({axes[0]} chains with {axes[1]} draws each)"
        )
        got = 'one without `per="draw"`' if prediction.each is None else "one without `targets`"
        if density is not None:
            got = f"one with log densities [chain, draw, ...] of shape {density.shape}"
        _check.fail("prediction", rule, got)
    return of_targets(density.astype(float))


def of_targets(log_density: np.ndarray) -> np.ndarray:
    """Return log densities `[chain, draw, target]` without padding, which is NaN in every draw."""
    flat = log_density.reshape(*log_density.shape[:2], -1)
    return flat if log_density.ndim == 3 else flat[:, :, ~np.isnan(flat).all(axis=(0, 1))]
