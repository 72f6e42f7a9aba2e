r"""The paper's large tables: networks on images and text, by samplers, ensembles and others.

A cell is a task in a form, a method with its options, and a seed. Its unit of work is one chain
with its warm start: weights, draws and log-probabilities of the test data go to the folder
`--work`, where what is there is not run again, and what was cut off goes on. When all chains of a
cell are there, it becomes one JSON line.

    python benchmarks/networks.py --table lenet --output benchmarks/results/networks.jsonl
    python benchmarks/networks.py --table lenet --form small --methods "deep ensemble" psmile \
        --seeds 0 1 2 --output benchmarks/results/networks.jsonl
    python benchmarks/networks.py --table resnet18 --form paper --members 0 --work out/networks

`--form paper` is the paper's setting, for a GPU; `small` what two cores can do in an hour; `tiny`
runs every cell in a minute. `--members 0 1` runs these chains alone, without a record: where time
is short, each call goes on where the last one was cut off.
"""

import argparse
import dataclasses
import functools
import json
import resource
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import baselines
import data
import experiment
import jax
import lenet
import nanogpt
import numpy as np
import optax
import records
import resnet
import vit
from experiment import Experiment, Settings
from network_cells import ENSEMBLE, FORMS, TABLES, cells_of
from scipy.special import logsumexp

import optax_smile
from optax_smile import metrics

BUILDS = {
    "lenet": lenet.build,
    "resnet7": functools.partial(resnet.build, network="resnet7"),
    "resnet18": functools.partial(resnet.build, network="resnet18"),
    "vit": vit.build,
    "nanogpt": nanogpt.build,
}
BASELINES = baselines.METHODS
LETTERS = optax_smile.Likelihood(  # "tokens", for large vocabularies, keeps no probabilities
    mean=jax.nn.softmax,
    log_density=lambda x, y: -optax.softmax_cross_entropy_with_integer_labels(x, y),
    entropy=lambda mean: jax.scipy.special.entr(mean).sum(axis=-1),
)
NUM_CORRUPTED, NUM_DRAWS_CORRUPTED, SEVERITIES = 1_000, 16, (1, 3, 5)
# Of the absolute energy error, and its standard deviation.
OVER_TIME = ("step_size", "energy_mean", "energy_std")
PAPER_TUNING = {"reject_quantile": 0.98, "adapt_probability": 0.1}
TWO_GRADIENTS = ("published", "paper's")
# Settings on which the warm start depends.
TRAINING = ("num_epochs", "patience", "batch_size", "num_train", "width", "depth", "context")


def around(cell: dict[str, Any], settings: Settings, work: Path) -> dict[str, Any]:
    """Find a prior around trained weights, by the first member of seed 0 for all; it is kept."""
    allowed, cell = cell["options"]["allowed"], cell | {"seed": 0}
    path = work / (name_of("around", cell["task"], cell["form"], allowed) + ".json")
    if not path.exists():
        task, start = load(cell["task"], settings), warm_member(cell, settings, 0, work)
        few = [tuple(x[i : i + 500] for x in task.splits.train) for i in range(0, 2_000, 500)]
        search = optax_smile.local.local_precision(
            task.mean_loss,
            jax.tree.map(lambda x: x[0], start),
            few,
            num_data=task.num_data,
            allowed=allowed,
            num_chains=1,
            key=cell["seed"],
            check=False,
            progress=False,
        )
        path.write_text(json.dumps(search.prior_precision))
    precision = {"prior_mean": "start", "prior_precision": json.loads(path.read_text())}
    return precision | {"decoherence_length": "turning"}


def make_sampler(cell: dict[str, Any], settings: Settings, work: Path, **common: Any) -> Any:
    """Build the sampler of a cell."""
    method, options = cell["method"], dict(cell["options"])
    num_steps = settings.num_warmup + settings.num_draws * settings.thin
    if method == "paper's smile":
        quantile, probability = (options.pop(name, x) for name, x in PAPER_TUNING.items())
        tuner = optax_smile.quantile_tuner(probability) if probability else None
        options |= {"tuner": tuner, "reject_quantile": quantile}
        options |= {"integrator": "minimal_norm", "reject_momentum": "zero"}
        return optax_smile.smile(**options, decoherence_length=None, key=None, **_keyless(common))
    if "published" in method:
        return getattr(optax_smile.published, method.split()[0])(**options, **_keyless(common))
    if method.endswith("naive"):
        return getattr(optax_smile, method)(**options, **_keyless(common))
    if "allowed" in options:
        del options["allowed"]
        options |= around(cell, settings, work)
    if "angle" in options:
        options["tuner"] = optax_smile.angle_tuner(options.pop("angle"))
    if method == "cyclical_sgld":
        options["total_steps"] = num_steps
    if method == "scale_adapted_sghmc":
        options["adapt_steps"] = max(1, settings.num_warmup)
    return getattr(optax_smile, method)(**options, **common)


def _keyless(common: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in common.items() if name != "key"}


@functools.cache
def load(task: str, settings: Settings) -> Experiment:
    """Network and data."""
    return BUILDS[task](settings)


def name_of(*parts: Any) -> str:
    """Name of a file."""
    text = "-".join(json.dumps(p, sort_keys=True) if isinstance(p, dict) else str(p) for p in parts)
    return "".join(c if c.isalnum() or c in "-." else "_" for c in text)


def member_of(cell: dict[str, Any], member: int) -> int:
    """Seed of a member."""
    return 100 * cell["seed"] + member


def warm_member(cell: dict[str, Any], settings: Settings, member: int, work: Path) -> Any:
    """Train a member, or read it: other methods of the task start from it, too."""
    form, *changed = cell["form"].split()
    training = [x for x in changed if x.split("=")[0] in TRAINING]
    return experiment.warm_start(
        load(cell["task"], settings),
        settings,
        2 * member_of(cell, member),
        1,
        directory=work / name_of("warm", cell["task"], form, *training, cell["seed"], member),
        progress=False,
    )


def over_time(values: np.ndarray) -> list[float | None]:
    """Means of the tenths of a run; None where there is nothing to be told."""
    parts = [part[np.isfinite(part)] for part in np.array_split(values, 10)]
    return [float(part.mean()) if len(part) else None for part in parts]


def chain_of(
    cell: dict[str, Any], settings: Settings, start: Any, member: int, directory: Path
) -> tuple[Any, dict[str, Any]]:
    """Draws of a chain, and how it went."""
    method, seed = cell["method"], member_of(cell, member)
    task = load(cell["task"], settings)
    common = {"num_data": task.num_data, "key": jax.random.key(seed)}
    sampler = make_sampler(cell, settings, directory.parent, **common)
    options: dict[str, Any] = {"check": False, "progress": False, "directory": directory}
    if any(word in method for word in TWO_GRADIENTS):
        options["batch_per"] = "step"
        halves = {name: getattr(settings, name) // 2 for name in ("num_warmup", "thin")}
        settings = dataclasses.replace(settings, **halves)
    draws = experiment.draw(task, settings, start, sampler, 2 * seed + 1, **options)
    trace, *_, last = draws.trace, *draws
    first = jax.tree.map(lambda x: x[0], draws.start)
    gone = optax.tree.norm(jax.tree.map(lambda a, b: a - b, last, first))
    steps = trace["step_size"][0]
    return draws, {
        "precision": (draws.settings or {}).get("prior_precision"),
        "steps": [float(steps[int(part * len(steps))]) for part in (0.15, 0.5, 0.95)],
        "loss": float(np.mean(trace["loss"][0, -(len(steps) // 4) :])),
        "num_rejected": int(trace["num_rejected"][0, -1]),
        **{name: over_time(trace[name][0]) for name in OVER_TIME if name in trace},
        "distance": float(gone),
        "norms": [float(optax.tree.norm(x)) for x in (first, last)],
    }


def path_of(cell: dict[str, Any], member: int, work: Path) -> Path:
    """File of what a chain predicts; its draws are in the folder of the same name."""
    name = name_of(*(cell[x] for x in ("task", "form", "method", "options", "seed")), member)
    return work / f"{name}.npz"


def run_chain(cell: dict[str, Any], settings: Settings, member: int, work: Path) -> Path:
    """Train a member, run a chain from it, and keep what it predicts."""
    path = path_of(cell, member, work)
    if path.exists():
        return path
    begun = time.monotonic()
    start = warm_member(cell, settings, member, work)
    trained, told = time.monotonic() - begun, {}
    draws: Any = optax_smile.Snapshots.from_members(start)
    task, seed = load(cell["task"], settings), member_of(cell, member)
    if cell["method"] in BASELINES:
        baseline = BASELINES[cell["method"]]
        draws = baseline(task, settings, start, 2 * seed + 1, cell["options"])
        told = {"settings": {k: v for k, v in draws.settings.items() if k != "name"}}
    elif cell["method"] != ENSEMBLE:
        draws, told = chain_of(cell, settings, start, member, path.with_suffix(""))
    sampled = time.monotonic() - begun - trained
    found = predictions(task, draws, settings.test_batch_size)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    told |= {"seconds": [trained, sampled], "peak_mib": memory}
    part = path.with_suffix(".part.npz")
    kept: dict[str, Any] = {"told": json.dumps(told), **found}
    np.savez(part, **kept)
    part.rename(path)
    print(path.name, told, flush=True)
    return path


def predictions(task: Experiment, draws: Any, batch_size: int) -> dict[str, np.ndarray]:
    """Log-probabilities `[input, class]` of the average, and the mean log density of each draw."""
    (inputs, targets), likelihood = task.splits.test, task.likelihood
    kept: dict[str, Any] = {"likelihood": LETTERS if likelihood == "tokens" else likelihood}
    kept["batch_size"] = min(batch_size, len(inputs))
    found = optax_smile.predict(task.outputs_of, draws, inputs, targets=targets, per="draw", **kept)
    each = found.each.log_density
    told = {"test": np.log(found.mean), "draws": each.reshape(len(each), -1).mean(axis=-1)}
    if task.unseen:
        unseen = optax_smile.predict(task.outputs_of, draws, task.unseen[1], **kept)
        told["unseen"] = np.log(unseen.mean)
    return told


def run_corrupted(cell: dict[str, Any], settings: Settings, work: Path) -> dict[str, Any]:
    """Scores on corrupted test images, by severity: the mean over the fifteen corruptions.

    Of a chain that has run these are 16 of its draws, on the first 1,000 test images.
    """
    task, seed = load(cell["task"], settings), cell["seed"]
    images, labels = (x[:NUM_CORRUPTED] for x in task.splits.test)
    chains = []
    for member in range(cell["num_chains"]):
        if cell["method"] == ENSEMBLE:
            start = warm_member(cell, settings, member, work)
            chains.append(list(optax_smile.Snapshots.from_members(start)))
        else:
            draws = list(optax_smile.load_snapshots(path_of(cell, member, work).with_suffix("")))
            chains.append(draws[:: max(1, len(draws) // NUM_DRAWS_CORRUPTED)])
    draws = [draw for chain in chains for draw in chain]
    kept = {"likelihood": "categorical", "targets": labels, "batch_size": 500}
    told = {}
    for severity in SEVERITIES:
        rows = []
        for name in data.CORRUPTIONS:
            corrupted = data.corrupt(images, name, severity, seed)
            found = optax_smile.predict(task.outputs_of, draws, corrupted, **kept)
            ece = metrics.ece(found.mean, labels)
            accuracy = metrics.accuracy(found.mean, labels)
            rows.append((metrics.lppd(found.log_density), accuracy, ece))
        means = np.mean(rows, axis=0)
        told[str(severity)] = dict(zip(("lppd", "accuracy", "ece"), map(float, means), strict=True))
        told[str(severity)]["each"] = [float(row[0]) for row in rows]
    return {"severities": told, "lppd": told[str(SEVERITIES[-1])]["lppd"]}


def averaged(chains: list[np.ndarray]) -> np.ndarray:
    """Log of the mean over chains."""
    return logsumexp(np.stack(chains), axis=0) - np.log(len(chains))


def scores(task: Experiment, chains: Sequence[Mapping[str, np.ndarray]]) -> dict[str, float]:
    """Of the average of chains."""
    logs = averaged([chain["test"] for chain in chains])
    logs, targets = logs.reshape(-1, logs.shape[-1]), task.splits.test[1].reshape(-1)
    density = np.take_along_axis(logs, targets[:, None], axis=-1)[:, 0]
    mean = np.exp(logs) / np.exp(logs).sum(axis=-1, keepdims=True)
    told = {
        "lppd": metrics.lppd(density),
        "accuracy": metrics.accuracy(mean, targets),
        "ece": metrics.ece(mean, targets),
        "brier": metrics.brier(mean, targets),
        "f1": metrics.f1(mean, targets),
        "aurc": metrics.aurc(mean, targets),
    }
    if task.likelihood == "tokens":
        told["perplexity"] = metrics.perplexity(density)
    else:
        told["auroc"] = metrics.auroc(mean, targets)
    if "unseen" in chains[0]:
        foreign = np.exp(averaged([chain["unseen"] for chain in chains]))
        entropies = (-np.sum(p * np.log(np.maximum(p, 1e-30)), axis=-1) for p in (mean, foreign))
        told["ood_auroc"] = metrics.ood_auroc(*entropies)
    return {name: float(x) for name, x in told.items()}


def run_cell(cell: dict[str, Any], settings: Settings, work: Path) -> dict[str, Any]:
    """Run all chains of a cell, and score their average and each alone."""
    paths = [run_chain(cell, settings, i, work) for i in range(cell["num_chains"])]
    chains = [dict(np.load(path)) for path in paths]
    task = load(cell["task"], settings)
    alone = [scores(task, [chain]) for chain in chains]
    told = [json.loads(str(chain["told"])) for chain in chains]
    single = {name: float(np.mean([x[name] for x in alone])) for name in alone[0]}
    return scores(task, chains) | {"single": single, "chains": told}


def main():
    """Run the chains that are missing, record the cells that are complete."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", choices=TABLES, default="lenet")
    parser.add_argument("--form", choices=FORMS, default="tiny")
    parser.add_argument("--methods", nargs="+", help="of the table; default: all")
    parser.add_argument("--options", type=json.loads, help="of these methods, JSON; default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--members", type=int, nargs="+", help="chains to run, without a record")
    parser.add_argument("--settings", type=json.loads, default={}, help="other settings, JSON")
    parser.add_argument("--corrupted", action="store_true", help="score corrupted images instead")
    parser.add_argument("--work", type=Path, default=Path("out/networks"))
    arguments = records.arguments_of(parser)
    pairs = [
        (cell, settings)
        for cell, settings in cells_of(
            arguments.table, arguments.form, arguments.seeds, arguments.settings
        )
        if cell["method"] in (arguments.methods or [cell["method"]])
        and arguments.options in (None, cell["options"])
    ]
    if arguments.members is not None:
        for cell, settings in pairs:
            for member in arguments.members:
                run_chain(cell, settings, member, arguments.work)
        return

    def run(cell):
        settings = next(settings for other, settings in pairs if other == cell)
        return (run_corrupted if arguments.corrupted else run_cell)(cell, settings, arguments.work)

    records.complete(arguments, [cell for cell, _ in pairs], run, "lppd")


if __name__ == "__main__":
    main()
