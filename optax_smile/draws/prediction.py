"""Predictions of draws."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from numpy.typing import ArrayLike

from optax_smile import _check, _table
from optax_smile._types import by_identity

Uncertainty = Literal["entropy", "variance"]
# Rows of float32 probabilities, averaged over thousands of draws, differ from 1 by less.
ROW_SUM_TOLERANCE = 1e-3
# Lower bound of probabilities: float32 rounds small ones to zero.
SMALLEST = 1e-12
NUMBERS = _check.Array(each=_check.Real(dtype=float), like="mean")
POSITIVE = _check.Array(each=_check.Real(0, open="low", dtype=float))


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
        temperature: temperature of the average, if it is `tempered`; it does not affect `each`.
    """

    mean: np.ndarray | Any
    log_density: np.ndarray | Any
    total: np.ndarray | Any = None
    aleatoric: np.ndarray | Any = None
    epistemic: np.ndarray | Any = None
    uncertainty: Uncertainty | None = None
    each: Outcome | Any = None
    temperature: float | None = None

    @_check.arguments(
        "Prediction.tempered",
        temperature=_check.Real(0, open="low", traced=False),
        targets=_check.Array(dtype=None) | None,
    )
    def tempered(self, temperature: float, targets: ArrayLike | None = None) -> Prediction:
        """Return this prediction at a temperature T > 0, such as that of `metrics.temperature`.

        Class probabilities p become p^(1 / T), divided by their sum (Guo et al. 2017). `total` is
        their entropy, `aleatoric` and `epistemic` are None: the average is tempered, not the draws.

        A variance is multiplied by T, and the distribution is taken as normal. Its `log_density` is
        None without `targets`. Several binary outputs, treated as independent, have none either.

        Example:
            >>> import numpy as np, optax_smile
            >>> found = optax_smile.Prediction(np.array([[0.8, 0.2]]), None, uncertainty="entropy")
            >>> found.tempered(2.0).mean.round(3).tolist()
            [[0.667, 0.333]]
        """
        from scipy.special import entr, log_softmax

        new = self._replace(temperature=(self.temperature or 1) * temperature)
        if self.uncertainty == "variance":
            parts = {x: getattr(self, x) for x in ("total", "aleatoric", "epistemic")}
            parts = {x: part * temperature for x, part in parts.items() if part is not None}
            density = None
            if targets is not None:
                targets = NUMBERS("targets", targets, {"mean": self.mean})
                variance = POSITIVE("self", parts["total"])
                density = (targets - self.mean) ** 2 / variance + np.log(2 * np.pi * variance)
                density = _over_outputs(-density / 2)
            return new._replace(log_density=density, **parts)
        chances = np.asarray(self.mean, float)
        if is_binary := chances.ndim == 1 or np.shape(self.total) == chances.shape:
            chances = np.stack([1 - chances, chances], axis=-1)
        is_sum = np.abs(chances.sum(axis=-1, keepdims=True) - 1) <= ROW_SUM_TOLERANCE
        if self.uncertainty != "entropy" or not np.all(is_sum & (chances >= 0)):
            rule = "one with a variance, or with probabilities of classes that sum to 1"
            got = f"the mean {_check.show(self.mean)} with the uncertainty {self.uncertainty!r}"
            _check.fail("self", rule, got)
        hot, density = np.log(np.maximum(chances, SMALLEST)) / temperature, None
        logs = log_softmax(hot, axis=-1)
        if targets is not None:
            known = np.arange(chances.shape[-1])
            label = _check.Where(f"a class from 0 to {known[-1]}", lambda x: np.isin(x, known))
            labels = _check.Array(each=label, like="mean")(
                "targets", targets, {"mean": hot[..., 0]}
            )
            density = np.take_along_axis(logs, labels[..., None].astype(int), axis=-1)[..., 0]
            density = _over_outputs(density) if is_binary else density
        elif np.shape(self.log_density) == hot.shape[:-1]:
            density = np.float64(self.log_density) / temperature - (hot - logs)[..., 0]
        mean = np.exp(logs)
        new = new._replace(total=entr(mean).sum(axis=-1), aleatoric=None, epistemic=None)
        return new._replace(mean=mean[..., 1] if is_binary else mean, log_density=density)

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


def _over_outputs(log_density: np.ndarray) -> np.ndarray:
    """Sum over the outputs of each input."""
    return log_density.reshape(len(log_density), -1).sum(axis=1)
