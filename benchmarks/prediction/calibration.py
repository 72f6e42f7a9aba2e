"""Calibration after the fact, by one temperature: the quickstart's chains and deep ensemble.

Stored test predictions are split in half twice at random. The temperature is fitted on one half and
judged on the other, in both directions, so each seed gives four splits and the luck of a half
mostly cancels.

    python benchmarks/prediction/calibration.py --output benchmarks/results/calibration.jsonl
"""

import tempfile
from pathlib import Path
from typing import Any

from benchmarks import records

import numpy as np
import quickstart
from compare import fit_temperature, tempered
from safetensors.numpy import load_file

from optax_smile import metrics

METHODS = ("deep ensemble", "psmile")
NUM_HALVINGS = 2


def scores(probabilities: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """ECE and LPPD."""
    log_density = np.log(probabilities[np.arange(len(labels)), labels])
    return {"ECE": metrics.ece(probabilities, labels), "LPPD": metrics.lppd(log_density)}


def halved(probabilities: np.ndarray, labels: np.ndarray, seed: int) -> dict[str, Any]:
    """Scores before and after temperature, fitted on the other half."""
    generator, after, temperatures = np.random.default_rng(seed), [], []
    for _ in range(NUM_HALVINGS):
        halves = np.split(generator.permutation(len(labels)), [len(labels) // 2])
        warmed = np.zeros(probabilities.shape)
        for fit, judge in (halves, halves[::-1]):
            temperatures.append(fit_temperature(probabilities[fit], labels[fit]))
            warmed[judge] = tempered(probabilities[judge], temperatures[-1])
        after.append(scores(warmed, labels))
    return {
        "temperature": temperatures,
        "before": scores(probabilities, labels),
        "after": {name: float(np.mean([one[name] for one in after])) for name in after[0]},
    }


def run_cell(cell: records.Cell) -> records.Record:
    """Run the quickstart, and score its stored predictions."""
    config = quickstart.Config(seed=cell["seed"], progress=False)
    with tempfile.TemporaryDirectory() as folder:
        quickstart.run(config, "psmile", Path(folder))
        paths = {name: Path(folder) / f"prediction-{name}.safetensors" for name in METHODS}
        stored = {name: load_file(path) for name, path in paths.items()}
    return {
        "methods": {k: halved(x["mean"], x["targets"], cell["seed"]) for k, x in stored.items()}
    }


if __name__ == "__main__":
    records.main(__doc__, run_cell, "methods", "temperature", data=["digits"], seed=range(5))
