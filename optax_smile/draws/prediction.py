"""Predictions of draws."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from optax_smile import _check, _table
from optax_smile._types import by_identity

Uncertainty = Literal["entropy", "variance"]


@by_identity
class Outcome(NamedTuple):
    """Prediction of one snapshot, or average over several; fields not requested are None.

    Attributes:
        mean: predictive mean or probabilities, `[input, ...]`.
        variance: variance of the predictive distribution, `[input, ...]`.
        entropy: entropy of the predictive distribution, nats, `[input, ...]`.
        log_density: log likelihood of each target, nats, `[input, ...]`; NaN for padding.
    """

    mean: np.ndarray | Any
    variance: np.ndarray | Any
    entropy: np.ndarray | Any
    log_density: np.ndarray | Any

    def __repr__(self) -> str:
        return _table.described("Outcome", _shapes(self))


@by_identity
class Prediction(NamedTuple):
    """Prediction averaged over all snapshots, the result of `predict`, in NumPy arrays.

    Attributes:
        mean: predictive mean or class probabilities, `[input, ...]`; None for `"tokens"`.
        log_density: log of the average likelihood of each target, nats, `[input]` (for `"tokens"`
            `[input, token]`, NaN for padding); `metrics.lppd` averages it. None without targets.
        total: uncertainty of the prediction, `[input, ...]`: entropy in nats for class
            probabilities, else variance. None if the likelihood defines neither.
        aleatoric: average uncertainty of a single snapshot, due to noise in the data.
        epistemic: total minus aleatoric, at least 0, which more data would reduce.
        uncertainty: kind of the uncertainties: `"entropy"`, `"variance"`, or None.
        each: with `per`, an `optax_smile.Outcome` of single draws, arrays
            `[chain, draw, input, ...]`, or of the averages of single chains, `[chain, input, ...]`.
    """

    mean: np.ndarray | Any
    log_density: np.ndarray | Any
    total: np.ndarray | Any = None
    aleatoric: np.ndarray | Any = None
    epistemic: np.ndarray | Any = None
    uncertainty: Uncertainty | None = None
    each: Outcome | Any = None

    def __repr__(self) -> str:
        rows = _shapes(self._replace(uncertainty=None, each=None))
        for name in ("total", "aleatoric", "epistemic", "log_density"):
            if isinstance(x := getattr(self, name), np.ndarray) and x.size:
                kind = "" if name == "log_density" else f" ({self.uncertainty})"
                rows[name] += f", mean {x[~np.isnan(x)].mean():.4f}{kind}"
        if self.each is not None:
            rows["each"] = _table.some(f"{k} {x}" for k, x in _shapes(self.each).items())
        return _table.described("Prediction", rows)


def _shapes(fields: Outcome | Prediction) -> dict[str, str]:
    leaves = {name: jax.tree.leaves(x) for name, x in fields._asdict().items() if x is not None}
    return {name: _table.some(map(_check.show, arrays)) for name, arrays in leaves.items()}
