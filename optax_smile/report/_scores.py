"""Scores of a prediction, and which way of each is better."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from optax_smile import _check, metrics
from optax_smile.draws.prediction import Prediction

LEVEL = 0.95
# What `score` calls the arguments of metrics.
IN_SCORE = {"labels": "targets", "mask": "targets", "log_density": "prediction"}
IN_SCORE |= dict.fromkeys(("probabilities", "mean", "std"), "prediction")
HIGHER, LOWER = ("↑", "higher is better"), ("↓", "lower is better")
# Sign and words for the scores of `score`.
BETTER = dict.fromkeys(("LPPD", "accuracy", "F1"), HIGHER)
BETTER |= dict.fromkeys(("perplexity", "Brier", "ECE", "AURC"), LOWER)
BETTER |= dict.fromkeys(("RMSE", "CRPS", "95 % width"), LOWER)
BETTER |= {"95 % coverage": ("→ 0.95", "nearer to 0.95 is better")}


@_check.arguments(
    "report.score",
    prediction=_check.kind(Prediction, "what `predict` returned"),
    targets=_check.Array(dtype=None),
)
@_check.called("report.score", *metrics.__all__, **IN_SCORE)
def score(prediction: Prediction, targets: ArrayLike) -> dict[str, float]:
    """Score a prediction by what is usual for its kind.

    Args:
        prediction: what `predict` gave, with targets.
        targets: the same ones.

    Returns:
        Scores of `optax_smile.metrics` by name: LPPD with accuracy, F1, Brier score, ECE and AURC
        for classes; with RMSE, CRPS, and the coverage and width of the 95 % interval where there is
        a variance, for which the prediction counts as a normal distribution. The perplexity alone
        for `"tokens"`.

    Raises:
        ValueError: a prediction without log densities, targets that do not fit.

    Example:
        >>> import numpy as np, optax_smile
        >>> probabilities, density = np.array([[0.9, 0.1]]), np.log([0.9])
        >>> prediction = optax_smile.Prediction(probabilities, density, uncertainty="entropy")
        >>> optax_smile.report.score(prediction, [0])["accuracy"]
        1.0
    """
    if prediction.log_density is None:
        rule = "one made with targets"
        _check.fail("report.score", "prediction", rule, "none", "Give them to `predict`.")
    mean, targets = prediction.mean, np.asarray(targets)
    if mean is None and prediction.log_density.ndim == targets.ndim == 2:
        return {"perplexity": metrics.perplexity(prediction.log_density, targets >= 0)}
    scores = {"LPPD": metrics.lppd(prediction.log_density)}
    if prediction.uncertainty == "entropy":
        probabilities, labels = labelled(prediction.mean, targets)
        of = {
            "accuracy": metrics.accuracy,
            "F1": metrics.f1,
            "Brier": metrics.brier,
            "ECE": metrics.ece,
            "AURC": metrics.aurc,
        }
        return scores | {name: metric(probabilities, labels) for name, metric in of.items()}
    if mean is not None and np.shape(mean) == targets.shape:
        scores["RMSE"] = metrics.rmse(mean, targets)
    if prediction.uncertainty != "variance" or mean is None:
        return scores
    mean, std, targets = (np.ravel(x) for x in (mean, np.sqrt(prediction.total), targets))
    ends = metrics.interval(mean, std, LEVEL)
    return scores | {
        "CRPS": metrics.crps(mean, std, targets),
        "95 % coverage": metrics.coverage(*ends, targets),
        "95 % width": metrics.interval_width(*ends),
    }


def classes(mean: ArrayLike, shape: tuple[int, ...]) -> np.ndarray:
    """Probabilities `[input, class]`; those of 1, of the shape of the targets, are two classes."""
    mean = np.asarray(mean)
    ones = mean.ravel()
    return np.stack([1 - ones, ones], axis=1) if mean.shape == shape else mean


def labelled(mean: ArrayLike, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities `[input, class]` and labels `[input]`."""
    is_binary = np.shape(mean) == targets.shape
    return classes(mean, targets.shape), targets.ravel().astype(int) if is_binary else targets
