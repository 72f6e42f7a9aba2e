r"""The paper's large tables: networks on images and text, with samplers, ensembles and others.

A cell is a task in a form, a method with its options, and a seed. Its unit of work is one chain
with its warm start: weights, draws and log-probabilities of the test data go to the folder
`--work`. Chains that are there are not run again, and interrupted ones resume. When all chains of a
cell are there, it becomes one JSON line.

    python benchmarks/prediction/networks.py --table lenet --output out/networks.jsonl
    python benchmarks/prediction/networks.py --table lenet --form small \
        --methods "deep ensemble" psmile --seeds 0 1 2 --output out/networks.jsonl
    python benchmarks/prediction/networks.py --table resnet18 --form paper --members 0

`--form paper` is the paper's setting, for a GPU; `small` what two cores can do in an hour; `tiny`
runs every cell in a minute. `--members 0 1` runs only these chains, without a record; each call
resumes where the last one was interrupted.
"""

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import records
from benchmarks.prediction import network_chains
from benchmarks.prediction.network_cells import FORMS, TABLES, cells_of

import numpy as np
from experiment import Experiment, Settings
from scipy.special import logsumexp

from optax_smile import Prediction, metrics


def averaged(chains: list[np.ndarray]) -> np.ndarray:
    """Log of the mean over chains."""
    return logsumexp(np.stack(chains), axis=0) - np.log(len(chains))


# Parts of the test data whose scores are kept, for errors of differences between methods.
NUM_PARTS = 100


def scores(task: Experiment, chains: Sequence[Mapping[str, np.ndarray]]) -> dict[str, float]:
    """Of the average of chains."""
    logs = averaged([chain["test"] for chain in chains])
    logs, targets = logs.reshape(-1, logs.shape[-1]), task.splits.test[1].reshape(-1)
    density = averaged([chain["density"] for chain in chains]).reshape(-1)
    mean = np.exp(logs) / np.exp(logs).sum(axis=-1, keepdims=True)
    result = {
        "lppd": metrics.lppd(density),
        "accuracy": metrics.accuracy(mean, targets),
        "ece": metrics.ece(mean, targets),
        "brier": metrics.brier(mean, targets),
        "f1": metrics.f1(mean, targets),
        "aurc": metrics.aurc(mean, targets),
    }
    if task.likelihood == "tokens":
        result["perplexity"] = metrics.perplexity(density)
    else:
        result["auroc"] = metrics.auroc(mean, targets)
    if "valid" in chains[0]:
        held_out = averaged([chain["valid"] for chain in chains])
        probabilities = np.exp(held_out).reshape(-1, held_out.shape[-1])
        valid = averaged([chain["valid_density"] for chain in chains])
        found, other = (Prediction(x, None, uncertainty="entropy") for x in (probabilities, mean))
        chosen = metrics.temperature(found, task.splits.valid[1].reshape(-1))
        result |= {"valid_lppd": metrics.lppd(valid), "temperature": chosen}
        result["calibrated_ece"] = metrics.ece(other.tempered(chosen).mean, targets)
    if "unseen" in chains[0]:
        foreign = np.exp(averaged([chain["unseen"] for chain in chains]))
        entropies = (-np.sum(p * np.log(np.maximum(p, 1e-30)), axis=-1) for p in (mean, foreign))
        result["ood_auroc"] = metrics.ood_auroc(*entropies)
    return {name: float(x) for name, x in result.items()}


def run_cell(cell: records.Cell, settings: Settings, work: Path) -> records.Record:
    """Run all chains of a cell, and score their average and each chain."""
    paths = [network_chains.run_chain(cell, settings, i, work) for i in range(cell["num_chains"])]
    chains = [dict(np.load(path)) for path in paths]
    task = network_chains.load(cell["task"], settings)
    alone = [scores(task, [chain]) for chain in chains]
    result = [json.loads(str(chain["told"])) for chain in chains]
    single = {name: float(np.mean([x[name] for x in alone])) for name in alone[0]}
    density = averaged([chain["density"] for chain in chains])
    parts = [round(float(x.mean()), 5) for x in np.array_split(density, NUM_PARTS)]
    return scores(task, chains) | {"parts": parts, "single": single, "chains": result}


def main():
    """Run the chains that are missing, record the cells that are complete."""
    made = records.parser(__doc__)
    made.add_argument("--table", choices=TABLES, default="lenet")
    made.add_argument("--form", choices=FORMS, default="tiny")
    made.add_argument("--seeds", type=int, nargs="+", default=[0])
    made.add_argument("--settings", type=json.loads, default={}, help="other settings, JSON")
    made.add_argument("--work", type=Path, default=Path("out/networks"))
    made.add_argument("--methods", nargs="+", help="of the table; default: all")
    made.add_argument("--options", type=json.loads, help="of these methods, JSON; default: all")
    made.add_argument("--members", type=int, nargs="+", help="chains to run, without a record")
    arguments = made.parse_args()
    pairs = _chosen(made, arguments)
    if arguments.members is not None:
        for cell, settings in pairs:
            for member in arguments.members:
                network_chains.run_chain(cell, settings, member, arguments.work)
        return

    def run(cell):
        settings = next(settings for other, settings in pairs if other == cell)
        return run_cell(cell, settings, arguments.work)

    records.complete(arguments, [cell for cell, _ in pairs], run, "lppd")


def _chosen(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace
) -> list[tuple[dict[str, Any], Settings]]:
    """Requested cells."""
    known = {field.name for field in dataclasses.fields(Settings)}
    if unknown := sorted(set(arguments.settings) - known):
        parser.error(f"--settings must be of {sorted(known)}, got {unknown}")
    if lowest := [x for x in [*arguments.seeds, *(arguments.members or [])] if x < 0]:
        parser.error(f"--seeds and --members must be >= 0, got {lowest[0]}")
    cells = list(cells_of(arguments.table, arguments.form, arguments.seeds, arguments.settings))
    methods = {cell["method"]: None for cell, _ in cells}
    if unknown := [x for x in arguments.methods or [] if x not in methods]:
        parser.error(f"--methods must be of {[*methods]}, got {unknown}")
    if highest := [x for x in arguments.members or [] if x >= cells[0][0]["num_chains"]]:
        count = cells[0][0]["num_chains"]
        parser.error(f"--members must be below the number of chains, {count}, got {highest[0]}")
    pairs = [
        (cell, settings)
        for cell, settings in cells
        if cell["method"] in (arguments.methods or methods)
        and arguments.options in (None, cell["options"])
    ]
    if not pairs:
        options = [cell["options"] for cell, _ in cells]
        parser.error(f"--options must be of {options}, got {arguments.options}")
    return pairs


if __name__ == "__main__":
    main()
