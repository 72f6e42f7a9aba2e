"""Predictions stored on disk, beside the draws they were made from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from optax_smile import _disk
from optax_smile.draws.prediction import Outcome, Prediction

FILE = "prediction-{}.safetensors"
# Fields of a prediction that are stored.
FIELDS = ("mean", "log_density", "total", "aleatoric", "epistemic")


def is_name(name: Any) -> bool:
    """Return whether a name is valid in a file name."""
    is_text = isinstance(name, str) and 0 < len(name) <= 100
    return is_text and all(x.isalnum() or x in " -_" for x in name)


class Stored:
    """A prediction that `report.store` stored.

    Attributes:
        name: name of the data.
        prediction: without curve; `each` is None or an `Outcome` of log density and mean.
        targets: the targets, or None.
        scores: scores by name.
        images: a few of the inputs, as bytes `[shown, height, width, ...]`, or None.
        shown: indices of these inputs.

    Raises:
        ValueError: a damaged file.
    """

    def __init__(self, file: Path):
        self.name = file.stem.removeprefix("prediction-")

        def check(header: Mapping[str, Any]):
            if header["name"] != self.name or not is_name(self.name):
                raise ValueError(f"it holds the prediction named {header['name']!r}")
            if not {type(score) for score in header["scores"].values()} <= {int, float}:
                raise ValueError("its scores are not numbers")

        with _disk.naming(file, "stored prediction", "Remove it, or store it again."):
            header, kept = _disk.read(file, check)
            self.images, self.shown = kept.get("images"), kept.get("shown", np.empty(0, int))
            if self.images is not None:
                number = min(len(kept["mean"]), len(kept["total"]))
                if len(self.images) != len(self.shown) or set(self.shown) - {*range(number)}:
                    raise ValueError("its images do not match its inputs")
        self.scores: dict[str, float] = header["scores"]
        self.targets, each = kept.get("targets"), kept.get("each_log_density")
        outcome = None if each is None else Outcome(kept.get("each_mean"), None, None, each)
        fields = {field: kept.get(field) for field in FIELDS}
        self.prediction = Prediction(**fields, uncertainty=header["uncertainty"], each=outcome)
