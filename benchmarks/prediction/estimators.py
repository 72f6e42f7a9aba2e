"""Estimators of scikit-learn by their default settings, against the deep ensemble of their members.

`BayesianClassifier` on digits, `BayesianRegressor` on diabetes and two UCI tables: a fifth of the
rows is test data. The deep ensemble is the members that the chains began at. Regression targets
are standardized, so that LPPD is in nats of that. Every seed has its own split, members and chains.

    python benchmarks/prediction/estimators.py --output benchmarks/results/estimators.jsonl

UCI tables need `OPTAX_SMILE_DATA`.
"""

import copy
import time
from typing import Any

from benchmarks import records
from benchmarks.tabulated.ensembles import DATA, estimators

import numpy as np
from data import uci
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import optax_smile
from optax_smile import interop

Rows = tuple[np.ndarray, np.ndarray]


def split(data: str, seed: int, test_size: float = 0.2) -> tuple[Rows, Rows]:
    """Features and targets to fit, and to test."""
    if data == "digits":
        x, y = load_digits(return_X_y=True)
    else:
        splits = uci(data, seed)
        rows = splits.train, splits.valid, splits.test
        x, y = (np.concatenate([part[axis] for part in rows]) for axis in range(2))
    parts: Any = train_test_split(x, y, test_size=test_size, random_state=seed)
    x, new_x, y, new_y = parts
    return (x, y), (new_x, new_y)


def fitted(data: str, x: np.ndarray, y: np.ndarray, seed: int) -> Any:
    """Fit the estimator of the data."""
    of = interop.estimators
    kind = of.BayesianClassifier if data == "digits" else of.BayesianRegressor
    return kind(random_state=seed).fit(x, y)


def predictions(estimator: Any, x: np.ndarray, y: np.ndarray) -> dict[str, optax_smile.Prediction]:
    """What its members predict, and its draws."""
    members = copy.copy(estimator)
    members.draws_ = optax_smile.Snapshots.from_members(estimator.members_)
    return {"deep ensemble": members.prediction(x, y), "psmile": estimator.prediction(x, y)}


def run_cell(cell: records.Cell) -> records.Record:
    """Fit, and score."""
    (x, y), (new_x, new_y) = split(**cell)
    begun = time.process_time()
    estimator = fitted(cell["data"], x, y, cell["seed"])
    seconds = time.process_time() - begun
    found = predictions(estimator, new_x, new_y)
    result = {name: optax_smile.metrics.score(one, new_y) for name, one in found.items()}
    return {"scores": result, "num_rows": len(x), "cpu_seconds": seconds}


if __name__ == "__main__":
    records.main(__doc__, run_cell, "scores", estimators, seed=range(5), data=DATA)
