"""Store predictions beside the draws of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from optax_smile import _check, _disk
from optax_smile.draws import _manifest
from optax_smile.draws._stored import FIELDS, FILE, is_name
from optax_smile.draws.prediction import Prediction
from optax_smile.plots import images as _images
from optax_smile.report._scores import classes, score


@_check.arguments(
    "report.store",
    directory=_check.PathLike(),
    name=_check.Where("a name of letters, digits, spaces, - and _, at most 100", is_name),
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
        scores: scores to show, by name; None: those of `score(prediction, targets)`, if there are
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
    _manifest.read("report.store", directory)
    if scores is None:
        with _check.called("report.store", "report.score"):
            scores = {} if targets is None else score(prediction, targets)
    for metric, value in scores.items():
        _check.Real(infinite=True)("report.store", f"scores[{metric!r}]", value)
    scores = {metric: float(value) for metric, value in scores.items()}
    kept = {field: getattr(prediction, field) for field in FIELDS} | {"targets": targets}
    draws = prediction.each
    if draws is not None and np.ndim(draws.log_density) == np.ndim(prediction.log_density) + 2:
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
    shown, kept = _images.keep(images, mean, prediction.total, targets)
    return {"shown": shown, "images": kept}
