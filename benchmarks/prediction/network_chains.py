"""Chains of `networks.py`: a member and its draws, kept in files and reused."""

import dataclasses
import functools
import json
import resource
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

from benchmarks import records, samplers
from benchmarks.prediction import baselines
from benchmarks.prediction.network_cells import ENSEMBLE

import experiment
import jax
import lenet
import local_precision
import models
import nanogpt
import numpy as np
import optax
import resnet
import rivals
import vit
from experiment import Experiment, Settings

import optax_smile


def perceptron(settings: Settings) -> Experiment:
    """Two hidden layers of 110 units in place of LeNet; 99,670 weights."""
    network = models.FullyConnected((round(110 * settings.width),) * 2, 10)
    return lenet.build(settings)._replace(network=network)


BUILDS = {
    "perceptron": perceptron,
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
# Of the absolute energy error, and its standard deviation.
OVER_TIME = ("step_size", "energy_mean", "energy_std")
# Expected rise of the loss of a hot `psmile`, nats per example; its temperature is at most 2.
HOT_EXCESS = 0.115
PAPER_TUNING = {"reject_quantile": 0.98, "adapt_probability": 0.1}
# Settings on which the warm start depends.
TRAINING = ("num_epochs", "patience", "batch_size", "num_train", "width", "depth", "context")
TRAINING += ("muon_rate",)


def around(cell: records.Cell, settings: Settings, work: Path) -> dict[str, Any]:
    """Find a prior around trained weights from the first member of seed 0, or read it."""
    allowed, cell = cell["options"]["allowed"], cell | {"seed": 0}
    path = work / (name_of("around", cell["task"], cell["form"], allowed) + ".json")
    if not path.exists():
        task, start = load(cell["task"], settings), warm_member(cell, settings, 0, work)
        end = min(2_000, len(task.splits.train[0]))
        few = [tuple(x[i : i + 500] for x in task.splits.train) for i in range(0, end, 500)]
        found = local_precision.search(
            task.mean_loss,
            jax.tree.map(lambda x: x[0], start),
            few,
            num_data=task.num_data,
            allowed=allowed,
            num_chains=1,
            key=cell["seed"],
        )
        path.write_text(json.dumps(found.prior_precision))
    precision = {"prior_mean": "start", "prior_precision": json.loads(path.read_text())}
    return precision | {"decoherence_length": "turning"}


def make_sampler(
    cell: records.Cell, settings: Settings, start: Any, work: Path, **common: Any
) -> Any:
    """Build the sampler of a cell; a temperature may go with the number of weights."""
    method, options = cell["method"], dict(cell["options"])
    num_steps = settings.num_warmup + settings.num_draws * settings.thin
    if method == "paper's smile":
        quantile, probability = (options.pop(name, x) for name, x in PAPER_TUNING.items())
        tuner = optax_smile.quantile_tuner(probability) if probability else None
        options |= {"tuner": tuner, "reject_quantile": quantile}
        options["integrator"] = "minimal_norm"
        return samplers.build("smile_naive", **options, **common)
    if "published" in method:
        return samplers.build(method, **options, **common)
    if options.pop("schedule", None) == "cosine":
        options["step_size"] = optax.cosine_decay_schedule(options["step_size"], num_steps)
    if "allowed" in options:
        del options["allowed"]
        options |= around(cell, settings, work)
    one = jax.tree.map(lambda x: x[0], start)
    per_excess = 2 * common["num_data"] / sum(x.size for x in jax.tree.leaves(one))
    if "excess" in options:
        options["temperature"] = options.pop("excess") * per_excess
    elif options.get("temperature") == "auto":
        options["temperature"] = optax_smile.cold_temperature(common["num_data"], one)
    elif options.get("temperature") == "hot":
        options["temperature"] = min(2.0, HOT_EXCESS * per_excess)
    if options.get("prior_precision") == "norm":
        precision = optax_smile.local.norm_precision(start, options["temperature"])
        options["prior_precision"] = precision
    if "angle" in options:
        options["tuner"] = optax_smile.angle_tuner(options.pop("angle"))
    if method == "spectral":
        return samplers.build("smile_naive", norm="spectral", **options, **common)
    if method == "cyclical_sgld":
        options["total_steps"] = num_steps
    if method == "scale_adapted_sghmc":
        options["adapt_steps"] = max(1, settings.num_warmup)
    return samplers.build(method, **options, **common)


@functools.cache
def load(task: str, settings: Settings) -> Experiment:
    """Network and data."""
    built, rate = BUILDS[task](settings), settings.muon_rate
    if rate is None:
        return built
    decay = baselines.DEFAULTS["muon"]["weight_decay"]
    return built._replace(optimizer=lambda num_steps: rivals.muon(rate, decay))


def name_of(*parts: Any) -> str:
    """Name of a file."""
    text = "-".join(json.dumps(p, sort_keys=True) if isinstance(p, dict) else str(p) for p in parts)
    return "".join(c if c.isalnum() or c in "-." else "_" for c in text)


def member_of(cell: records.Cell, member: int) -> int:
    """Seed of a member."""
    return 100 * cell["seed"] + member


def warm_member(cell: records.Cell, settings: Settings, member: int, work: Path) -> Any:
    """Train a member, or read it: all methods of the task start from it."""
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
    """Means of the tenths of a run; None where no value is finite."""
    parts = [part[np.isfinite(part)] for part in np.array_split(values, 10)]
    return [float(part.mean()) if len(part) else None for part in parts]


def takes_two(method: str) -> bool:
    """Whether a step takes two gradients."""
    return "published" in method or "paper's" in method


def counted(cell: records.Cell, settings: Settings) -> Settings:
    """Settings in steps of a method, so that all take the same number of gradients.

    Those with two gradients a step make half as many; the paper's own form counts steps. Cycles
    replace the warm-up: each begins with a search, of which no draws are kept.
    """
    if cell["method"] == "cyclical_sgld":
        num_ticks = settings.num_warmup // settings.thin + settings.num_draws
        return dataclasses.replace(settings, num_warmup=0, num_draws=num_ticks)
    if takes_two(cell["method"]) and not cell["form"].startswith("paper"):
        halves = {name: max(1, getattr(settings, name) // 2) for name in ("num_warmup", "thin")}
        return dataclasses.replace(settings, **halves)
    return settings


def chain_of(
    cell: records.Cell, settings: Settings, start: Any, member: int, directory: Path
) -> tuple[Any, dict[str, Any]]:
    """Draws of a chain, and a record of the run."""
    method, seed = cell["method"], member_of(cell, member)
    task = load(cell["task"], settings)
    common = {"num_data": task.num_data, "key": jax.random.key(seed)}
    settings = counted(cell, settings)
    sampler = make_sampler(cell, settings, start, directory.parent, **common)
    options: dict[str, Any] = {"check": False, "progress": False, "directory": directory}
    if takes_two(method):
        options["batch_per"] = "step"
    with warnings.catch_warnings():
        # An interrupted run would be scored as if it were complete.
        warnings.filterwarnings("error", message=records.INTERRUPTED)
        draws = experiment.draw(task, settings, start, sampler, 2 * seed + 1, **options)
    trace, *_, last = draws.trace, *draws
    first = jax.tree.map(lambda x: x[0], draws.start)
    gone = optax.tree.norm(jax.tree.map(lambda a, b: a - b, last, first))
    steps = trace["step_size"][0]
    return draws, {
        "num_draws": draws.num_draws,
        "precision": (draws.settings or {}).get("prior_precision"),
        "steps": [float(steps[int(part * len(steps))]) for part in (0.15, 0.5, 0.95)],
        "loss": float(np.mean(trace["loss"][0, -(len(steps) // 4) :])),
        "num_rejected": int(trace["num_rejected"][0, -1]),
        **{name: over_time(trace[name][0]) for name in OVER_TIME if name in trace},
        "distance": float(gone),
        "norms": [float(optax.tree.norm(x)) for x in (first, last)],
    }


def path_of(cell: records.Cell, member: int, work: Path) -> Path:
    """File of what a chain predicts; its draws are in the folder of the same name."""
    name = name_of(*(cell[x] for x in ("task", "form", "method", "options", "seed")), member)
    return work / f"{name}.npz"


def run_chain(cell: records.Cell, settings: Settings, member: int, work: Path) -> Path:
    """Train a member, run a chain from it, and store its predictions.

    A resumed chain has no time; memory is the peak of the process so far.
    """
    path, used = path_of(cell, member, work), dataclasses.asdict(settings)
    if path.exists():
        _same_settings(path, used)
        return path
    resumed = path.with_suffix("").exists()
    begun = time.monotonic()
    start = warm_member(cell, settings, member, work)
    trained, result = time.monotonic() - begun, {}
    draws: Any = optax_smile.Snapshots.from_members(start)
    task, seed = load(cell["task"], settings), member_of(cell, member)
    if cell["method"] in BASELINES:
        baseline = BASELINES[cell["method"]]
        run = baselines.Run(task, settings, start, 2 * seed + 1, path.with_suffix(""))
        draws = baseline(run, cell["options"])
        result = {"settings": {k: v for k, v in draws.settings.items() if k != "name"}}
    elif cell["method"] != ENSEMBLE:
        draws, result = chain_of(cell, settings, start, member, path.with_suffix(""))
    sampled = time.monotonic() - begun - trained
    found = predictions(task, draws, settings.test_batch_size)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    result |= {"seconds": [trained, None if resumed else sampled], "peak_mib": memory}
    result |= {"used": used, **records.environment(allow_dirty=True)}
    part = path.with_suffix(".part.npz")
    kept: dict[str, Any] = {"told": json.dumps(result), **found}
    np.savez(part, **kept)
    part.rename(path)
    if cell["method"] in BASELINES:
        shutil.rmtree(path.with_suffix(""), ignore_errors=True)
    print(path.name, result, flush=True)
    return path


def _same_settings(path: Path, used: dict[str, Any]):
    """Refuse a chain that was run with other settings."""
    before = json.loads(str(np.load(path)["told"]))["used"]
    differs = [
        f"{name} {before.get(name)}, not {x}" for name, x in used.items() if before.get(name) != x
    ]
    if differs:
        raise SystemExit(
            f"{path} is of other settings: {', '.join(differs)}. Delete it, or `--work`."
        )


def predictions(task: Experiment, draws: Any, batch_size: int) -> dict[str, np.ndarray]:
    """Log-probabilities `[input, class]` of the average, and the log densities of the targets.

    Those of the validation data choose settings and a temperature.
    """
    (inputs, targets), likelihood = task.splits.test, task.likelihood
    kept: dict[str, Any] = {"likelihood": LETTERS if likelihood == "tokens" else likelihood}
    kept["batch_size"] = min(batch_size, len(inputs))
    found = optax_smile.predict(task.outputs_of, draws, inputs, targets=targets, **kept)
    result = {"test": np.log(found.mean), "density": found.log_density}
    inputs, targets = task.splits.valid
    valid = optax_smile.predict(task.outputs_of, draws, inputs, targets=targets, **kept)
    result |= {"valid": np.log(valid.mean), "valid_density": valid.log_density}
    if task.unseen:
        unseen = optax_smile.predict(task.outputs_of, draws, task.unseen[1], **kept)
        result["unseen"] = np.log(unseen.mean)
    return result
