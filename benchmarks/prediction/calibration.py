"""Calibration after the fact: temperature, and coverage of conformal sets and intervals.

The quickstart's chains and deep ensemble on digits, `BayesianRegressor` and its members on energy.
Stored test predictions are split in half twice at random. A method is fitted on one half and judged
on the other, in both directions, so each seed gives four splits and the luck of a half mostly
cancels.

    python benchmarks/prediction/calibration.py --output benchmarks/results/calibration.jsonl

Energy needs `OPTAX_SMILE_DATA`.
"""

import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import records
from benchmarks.tabulated.ensembles import LEVEL, sets_and_intervals, temperatures

import numpy as np
import quickstart
from compare import fit_temperature, tempered
from safetensors.numpy import load_file

from optax_smile import metrics

NUM_HALVINGS = 2
Scores = dict[str, Any]


def splits(num_inputs: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Halves to fit on and to judge on, in both directions."""
    generator = np.random.default_rng(seed)
    for _ in range(NUM_HALVINGS):
        order = generator.permutation(num_inputs)
        first, second = order[: num_inputs // 2], order[num_inputs // 2 :]
        yield first, second
        yield second, first


def limit(scores: np.ndarray) -> float:
    """The ceil((n + 1) level)-th smallest of n held-out scores: split conformal prediction."""
    rank = math.ceil(round((scores.size + 1) * LEVEL, 9))
    return float(np.sort(scores)[rank - 1])


def of_classes(probabilities: np.ndarray, labels: np.ndarray, seed: int) -> Scores:
    """Scores before and after temperature, fitted on the other half, and prediction sets."""

    def scores(probabilities: np.ndarray) -> dict[str, float]:
        log_density = np.log(probabilities[np.arange(len(labels)), labels])
        return {"ECE": metrics.ece(probabilities, labels), "LPPD": metrics.lppd(log_density)}

    found, after = list(splits(len(labels), seed)), []
    result: Scores = {"temperature": [], "coverage": [], "size": [], "slack": []}
    warmed = np.zeros(probabilities.shape)
    for number, (fit, judge) in enumerate(found, 1):
        temperature = fit_temperature(probabilities[fit], labels[fit])
        warmed[judge] = tempered(probabilities[judge], temperature)
        if number % 2 == 0:
            after.append(scores(warmed))
        sets = -probabilities[judge] <= limit(-probabilities[fit, labels[fit]])
        result["temperature"].append(temperature)
        result["coverage"].append(float(np.mean(sets[np.arange(len(judge)), labels[judge]])))
        result["size"].append(float(np.mean(np.sum(sets, axis=1))))
        result["slack"].append(1 / (len(fit) + 1))
    result["before"] = scores(probabilities)
    result["after"] = {x: float(np.mean([one[x] for one in after])) for x in after[0]}
    return result


def of_normals(mean: np.ndarray, std: np.ndarray, targets: np.ndarray, seed: int) -> Scores:
    """Coverage and width of intervals, and of the model's own ones."""
    result: Scores = {"coverage": [], "size": [], "slack": []}
    for fit, judge in splits(len(targets), seed):
        reach = limit(np.abs(targets[fit] - mean[fit]) / std[fit]) * std[judge]
        ends = mean[judge] - reach, mean[judge] + reach
        result["coverage"].append(metrics.coverage(*ends, targets[judge]))
        result["size"].append(float(np.mean(2 * reach)))
        result["slack"].append(1 / (len(fit) + 1))
    ends = metrics.interval(mean, std, LEVEL)
    size = float(np.mean(ends[1] - ends[0]))
    own = {"coverage": metrics.coverage(*ends, targets), "size": size}
    return result | {"own": own}


def digits(seed: int) -> dict[str, Scores]:
    """Run the quickstart and read its stored predictions."""
    config = quickstart.Config(seed=seed, progress=False)
    with tempfile.TemporaryDirectory() as folder:
        quickstart.run(config, "psmile", Path(folder))
        stored = {
            name: load_file(Path(folder) / f"prediction-{name}.safetensors")
            for name in ("deep ensemble", "psmile")
        }
    return {name: of_classes(x["mean"], x["targets"], seed) for name, x in stored.items()}


def energy(seed: int) -> dict[str, Scores]:
    """Fit half of the rows by default settings, predict the other half."""
    from benchmarks.prediction import estimators

    (x, y), (new_x, new_y) = estimators.split("energy", seed, test_size=0.5)
    estimator = estimators.fitted("energy", x, y, seed)
    return {
        name: of_normals(found.mean, np.sqrt(found.total), new_y, seed)
        for name, found in estimators.predictions(estimator, new_x, new_y).items()
    }


DATA: dict[str, Callable[[int], dict[str, Scores]]] = {"digits": digits, "energy": energy}


def run_cell(cell: records.Cell) -> records.Record:
    """Scores of both methods."""
    return {"methods": DATA[cell["data"]](cell["seed"])}


if __name__ == "__main__":
    tables = temperatures, sets_and_intervals
    records.main(__doc__, run_cell, "methods", *tables, data=DATA, seed=range(5))
