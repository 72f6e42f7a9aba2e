"""Scores of a prediction, and whether higher or lower is better."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from optax_smile import _check, metrics
from optax_smile.draws.prediction import Prediction

LEVEL = 0.95
# Arguments of `score` that correspond to arguments of metrics.
IN_SCORE = {"labels": "targets", "mask": "targets", "log_density": "prediction"}
IN_SCORE |= dict.fromkeys(("probabilities", "mean", "std"), "prediction")
HIGHER, LOWER = ("↑", "higher is better"), ("↓", "lower is better")
# Arrow and words for each score.
BETTER = dict.fromkeys(("LPPD", "accuracy", "F1"), HIGHER)
BETTER |= dict.fromkeys(("perplexity", "Brier", "ECE", "AURC"), LOWER)
BETTER |= dict.fromkeys(("RMSE", "CRPS", "95 % width"), LOWER)
BETTER |= {"95 % coverage": ("→ 0.95", "nearer to 0.95 is better")}


@_check.arguments(
    "report.score",
    prediction=_check.kind(Prediction, "the result of `predict`"),
    targets=_check.Array(dtype=None),
)
@_check.called("report.score", *metrics.__all__, **IN_SCORE)
def score(prediction: Prediction, targets: ArrayLike) -> dict[str, float]:
    """Compute the usual scores for the kind of prediction.

    Args:
        prediction: result of `predict`, made with targets.
        targets: the same targets.

    Returns:
        Scores of `optax_smile.metrics` by name. For classes: LPPD, accuracy, F1, Brier score, ECE
        and AURC. For predictions with a variance, treated as normal distributions: LPPD, RMSE,
        CRPS, and coverage and width of the 95 % interval. For `"tokens"`: the perplexity alone.

    Raises:
        ValueError: a prediction without log densities, or targets that do not match it.

    Example:
        >>> import numpy as np, optax_smile
        >>> probabilities, density = np.array([[0.9, 0.1]]), np.log([0.9])
        >>> prediction = optax_smile.Prediction(probabilities, density, uncertainty="entropy")
        >>> optax_smile.report.score(prediction, [0])["accuracy"]
        1.0
    """
    if prediction.log_density is None:
        rule, got = "made with targets", "a prediction without log densities"
        _check.fail("report.score", "prediction", rule, got, "Pass `targets` to `predict`.")
    mean, targets = prediction.mean, np.asarray(targets)
    if mean is None and prediction.log_density.ndim == targets.ndim == 2:
        return {"perplexity": metrics.perplexity(prediction.log_density, targets >= 0)}
    scores = {"LPPD": metrics.lppd(prediction.log_density)}
    if prediction.uncertainty == "entropy":
        probabilities, labels = labelled(prediction.mean, targets)
        scorers = {
            "accuracy": metrics.accuracy,
            "F1": metrics.f1,
            "Brier": metrics.brier,
            "ECE": metrics.ece,
            "AURC": metrics.aurc,
        }
        return scores | {name: metric(probabilities, labels) for name, metric in scorers.items()}
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
    """Return probabilities `[input, class]`; of shape `shape` they are those of class 1 of two."""
    mean = np.asarray(mean)
    ones = mean.ravel()
    return np.stack([1 - ones, ones], axis=1) if mean.shape == shape else mean


def labelled(mean: ArrayLike, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return probabilities `[input, class]` and labels `[input]`."""
    is_binary = np.shape(mean) == targets.shape
    return classes(mean, targets.shape), targets.ravel().astype(int) if is_binary else targets
