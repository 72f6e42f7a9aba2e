r"""The paper's large tables: networks on images and text, by samplers, ensembles and others.

A cell is a task in a form, a method with its options, and a seed. Its unit of work is one chain
with its warm start: weights, draws and log-probabilities of the test data go to the folder
`--work`, where what is there is not run again, and what was cut off goes on. When all chains of a
cell are there, it becomes one JSON line.

    python benchmarks/networks.py --task lenet --methods "deep ensemble" psmile --seeds 0 1 2 \
        --work out/networks --output benchmarks/results/networks.jsonl

`--form paper` is the paper's setting, for a GPU; `small` what two cores can do.
`--members 0 1` runs these chains alone, without a record: with it each call fits ten minutes.
"""

import argparse
import dataclasses
import functools
import json
import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
SCRIPTS = {
    "lenet": lenet,
    "resnet7": resnet,
    "resnet18": resnet,
    "vit": vit,
    "nanogpt": nanogpt,
}
# What a form changes in the preset of the script that has its name.
TINY: dict[str, Any] = {"num_members": 2, "num_epochs": 4, "num_warmup": 300, "num_draws": 10}
TINY |= {"thin": 60, "num_train": 4_000, "num_test": 1_000, "sampling_batch_size": 64}
FORMS = {
    "small": {"resnet7": {"width": 0.25}, "resnet18": {"width": 0.125}},
    "tiny": {
        "lenet": TINY,
        "resnet7": TINY | {"num_train": 2_000, "width": 0.125},
        "resnet18": TINY | {"num_train": 1_000, "width": 0.0625, "num_warmup": 100, "thin": 20},
        "vit": TINY | {"num_train": 2_000, "width": 0.125, "depth": 2},
        "nanogpt": TINY | {"num_test": 200, "depth": 1, "width": 1 / 12},
    },
    "paper": {},
}
# Settings on which the warm start depends.
TRAINING = ("num_epochs", "patience", "batch_size", "num_train", "width", "depth", "context")
ENSEMBLE = "deep ensemble"
LETTERS = optax_smile.Likelihood(  # "tokens", for large vocabularies, keeps no probabilities
    mean=jax.nn.softmax,
    log_density=lambda x, y: -optax.softmax_cross_entropy_with_integer_labels(x, y),
    entropy=lambda mean: jax.scipy.special.entr(mean).sum(axis=-1),
)


def settings_of(task: str, form: str, changed: Mapping[str, Any]) -> Settings:
    """Settings of a form: the script's preset, and what differs from it."""
    preset = SCRIPTS[task].PRESETS["paper" if form == "paper" else "laptop"]
    return dataclasses.replace(preset, **FORMS[form].get(task, {}) | changed)


def make_sampler(method: str, options: Mapping[str, Any], **common: Any) -> Any:
    """Build the sampler of a method."""
    options = dict(options)
    if "angle" in options:
        options["tuner"] = optax_smile.angle_tuner(options.pop("angle"))
    if "published" in method:
        del common["key"]
        return getattr(optax_smile.published, method.split()[0])(**options, **common)
    if method.endswith("naive"):
        del common["key"]
    return getattr(optax_smile, method)(**options, **common)


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


def chain_of(
    cell: dict[str, Any], settings: Settings, start: Any, member: int, directory: Path
) -> tuple[Any, dict[str, Any]]:
    """Draws of a chain, and how it went."""
    method, seed = cell["method"], member_of(cell, member)
    task = load(cell["task"], settings)
    common = {"num_data": task.num_data, "key": jax.random.key(seed)}
    sampler = make_sampler(method, cell["options"], **common)
    options: dict[str, Any] = {"check": False, "progress": False, "directory": directory}
    if "published" in method:
        options["batch_per"] = "step"
        halves = {name: getattr(settings, name) // 2 for name in ("num_warmup", "thin")}
        settings = dataclasses.replace(settings, **halves)
    draws = experiment.draw(task, settings, start, sampler, 2 * seed + 1, **options)
    trace, *_, last = draws.trace, *draws
    first = jax.tree.map(lambda x: x[0], draws.start)
    gone = optax.tree.norm(jax.tree.map(lambda a, b: a - b, last, first))
    steps = trace["step_size"][0]
    return draws, {
        "steps": [float(steps[int(part * len(steps))]) for part in (0.15, 0.5, 0.95)],
        "loss": float(np.mean(trace["loss"][0, -(len(steps) // 4) :])),
        "num_rejected": int(trace["num_rejected"][0, -1]),
        "distance": float(gone),
        "norms": [float(optax.tree.norm(x)) for x in (first, last)],
    }


def run_chain(cell: dict[str, Any], settings: Settings, member: int, work: Path) -> Path:
    """Train a member, run a chain from it, and keep what it predicts."""
    name = name_of(*(cell[x] for x in ("task", "form", "method", "options", "seed")), member)
    path = work / f"{name}.npz"
    if path.exists():
        return path
    begun = time.monotonic()
    start = warm_member(cell, settings, member, work)
    trained, told = time.monotonic() - begun, {}
    draws: Any = optax_smile.Snapshots.from_members(start)
    if cell["method"] != ENSEMBLE:
        draws, told = chain_of(cell, settings, start, member, work / name)
    sampled = time.monotonic() - begun - trained
    found = predictions(load(cell["task"], settings), draws, settings.test_batch_size)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    told |= {"seconds": [trained, sampled], "peak_mib": memory}
    part = path.with_suffix(".part.npz")
    np.savez(part, told=json.dumps(told), **found)
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


def averaged(chains: list[np.ndarray]) -> np.ndarray:
    """Log of the mean over chains."""
    return logsumexp(np.stack(chains), axis=0) - np.log(len(chains))


def scores(task: Experiment, chains: list[Mapping[str, np.ndarray]]) -> dict[str, float]:
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
    parser = argparse.ArgumentParser(description="The paper's networks.")
    parser.add_argument("--task", choices=BUILDS, default="lenet")
    parser.add_argument("--form", choices=FORMS, default="small")
    parser.add_argument("--methods", nargs="+", default=[ENSEMBLE, "psmile"])
    parser.add_argument("--options", type=json.loads, nargs="+", default=[{}], help="JSON objects")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--members", type=int, nargs="+", help="chains to run, without a record")
    parser.add_argument("--settings", type=json.loads, default={}, help="other settings, JSON")
    parser.add_argument("--work", type=Path, default=Path("out/networks"))
    arguments = records.arguments_of(parser)
    settings = settings_of(arguments.task, arguments.form, arguments.settings)
    form = " ".join([arguments.form, *(f"{k}={v}" for k, v in arguments.settings.items())])
    cells = [
        {
            "task": arguments.task,
            "form": form,
            "method": method,
            "options": options if method != ENSEMBLE else {},
            "seed": seed,
            "num_chains": settings.num_members,
        }
        for seed in arguments.seeds
        for method in arguments.methods
        for options in arguments.options
    ]
    if arguments.members is not None:
        for cell in cells:
            for member in arguments.members:
                run_chain(cell, settings, member, arguments.work)
        return
    run = functools.partial(run_cell, settings=settings, work=arguments.work)
    records.complete(arguments, cells, run, "lppd")


if __name__ == "__main__":
    main()
