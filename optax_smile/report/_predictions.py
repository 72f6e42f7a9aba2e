"""Predictions beside the draws of a run: how they are stored and read."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from optax_smile import _check, _disk
from optax_smile.draws import _format
from optax_smile.draws.prediction import Outcome, Prediction, classes
from optax_smile.draws.snapshots import load_snapshots
from optax_smile.metrics import score
from optax_smile.plots.predictions import keep

FILE = "prediction-{}.safetensors"
# Fields of a prediction that are stored.
FIELDS = ("mean", "log_density", "total", "aleatoric", "epistemic")
HIGHER, LOWER = ("↑", "higher is better"), ("↓", "lower is better")
# Arrow and words for each score.
BETTER = dict.fromkeys(("LPPD", "accuracy", "F1"), HIGHER)
BETTER |= dict.fromkeys(("perplexity", "Brier", "ECE", "AURC"), LOWER)
BETTER |= dict.fromkeys(("RMSE", "CRPS", "95 % width"), LOWER)
BETTER |= {"95 % coverage": ("→ 0.95", "nearer to 0.95 is better")}


class Stored:
    """A prediction that `report.store` stored; `shown` are the indices of its `images`.

    Raises:
        ValueError: a damaged file.
    """

    def __init__(self, file: Path):
        self.name = file.stem.removeprefix("prediction-")
        with _disk.naming(file, "stored prediction", "Remove it, or store it again."):
            header, kept = _disk.read(file)
            if header["name"] != self.name:
                raise ValueError(f"it holds the prediction named {header['name']!r}")
            self.scores: dict[str, float] = header["scores"]
            self.images, self.shown = kept.get("images"), kept.get("shown", np.empty(0, int))
            self.targets, density = kept.get("targets"), kept.get("each_log_density")
            each = None
            if density is not None:
                each = Outcome(kept.get("each_mean"), None, None, density)
            fields = {field: kept.get(field) for field in FIELDS}
            self.prediction = Prediction(**fields, uncertainty=header["uncertainty"], each=each)


@_check.arguments(
    "report.store",
    directory=_check.PathLike(),
    name=_check.Where(
        "a name of letters, digits, spaces, - and _, at most 100",
        lambda name: isinstance(name, str) and re.fullmatch(r"[\w -]{1,100}", name),
    ),
    prediction=_check.kind(Prediction, "the result of `predict`"),
    targets=_check.Array(dtype=None) | None,
    scores=_check.kind(Mapping, "a dict of numbers by name") | None,
)
def store(
    directory: str | os.PathLike,
    name: str,
    prediction: Prediction,
    *,
    targets: ArrayLike | None = None,
    scores: Mapping[str, float] | None = None,
    images: ArrayLike | None = None,
):
    """Store a prediction beside the draws it was made from, for the report.

    Args:
        directory: directory of the run.
        name: name of the data, such as `"test"` or `"shuffled pixels"`: at most 100 letters,
            digits, spaces, `-` and `_`.
        prediction: result of `predict`. With `per="draw"` the report can compare the chains by
            their predictions, unless draws are added later. From `each`, the `Outcome` of single
            draws, it stores one number per input: log density and mean, not class probabilities.
        targets: observed values.
        scores: scores to show, by name; None: those of `metrics.score`, if there are
            targets.
        images: the inputs, if they are images, `[input, height, width]` or with 1, 3 or 4 channels
            as a last axis. Only the images that the page shows are stored: those with the most
            certain, the least certain and the worst predictions.

    Raises:
        ValueError: a directory without a run, an invalid name, scores that are not numbers, another
            number of images than predictions, or images for a prediction without one uncertainty
            per input.
        OSError: a file that cannot be written.

    Example:
        Beside the draws that the prediction was made from::

            optax_smile.report.store("run", "test", prediction, targets=labels)
    """
    directory = Path(directory)
    _format.read_manifest("report.store", directory)
    if scores is None:
        with _check.called("report.store", "score"):
            scores = {} if targets is None else score(prediction, targets)
    for metric, value in scores.items():
        _check.Real(infinite=True)("report.store", f"scores[{metric!r}]", value)
    scores = {metric: float(value) for metric, value in scores.items()}
    kept = {field: getattr(prediction, field) for field in FIELDS} | {"targets": targets}
    draws = prediction.each
    if draws is not None and np.ndim(draws.log_density) == np.ndim(prediction.log_density) + 2:
        run = load_snapshots(directory)
        chains, number = np.shape(draws.log_density)[:2]
        if chains != run.num_chains or number > run.num_draws:
            of_run = f"{run.num_chains} chains of {run.num_draws} draws"
            rule = f"a prediction from the draws in {directory} ({of_run})"
            got = f"a prediction from {chains} chains of {number}"
            _check.fail("report.store", "prediction", rule, got)
        kept |= {"each_log_density": draws.log_density}
        kept |= {"each_mean": draws.mean if np.ndim(draws.mean) == 3 else None}
    arrays = {field: np.asarray(array) for field, array in kept.items() if array is not None}
    if targets is not None and arrays["targets"].dtype.kind not in "biuf":
        _check.fail("report.store", "targets", "numbers", f"an array of {arrays['targets'].dtype}")
    if images is not None:
        arrays |= _kept(images, prediction, targets)
    header = {"name": name, "scores": scores, "uncertainty": prediction.uncertainty}
    _disk.write(directory / FILE.format(name), _disk.pack(header, arrays))


@_check.called("report.store", "plots.examples", mean="prediction", uncertainty="prediction")
def _kept(
    images: ArrayLike, prediction: Prediction, targets: ArrayLike | None
) -> dict[str, np.ndarray]:
    """Select the images that the page shows."""
    if prediction.mean is None or np.ndim(prediction.total) != 1:
        rule = "None for a prediction without one uncertainty per input"
        _check.fail("report.store", "images", rule, _check.show(images))
    mean = prediction.mean
    if prediction.uncertainty == "entropy":
        mean = classes(mean, np.shape(prediction.total))
    shown, kept = keep(images, mean, prediction.total, targets)
    return {"shown": shown, "images": kept}
