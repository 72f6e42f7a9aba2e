"""Does `select` choose well? Each of its candidates alone, and what it chooses.

On every problem the candidates of `local.network_candidates` run alone, at the same number of
steps, and then `select` runs with all of them. The chosen one has the draws of its run alone, so
that the loss of a choice is the test LPPD of the best candidate minus that of the chosen one.

    energy, airfoil        UCI, networks 16-16-16, 10 members, 60,000 steps of 256 rows
    digits                 of scikit-learn, a layer of 128, 4 members, 12,000 steps of 128
    2,000 and 54,000 images   Fashion-MNIST, a layer of 76, 2 members, 12,000 steps of 64
    LeNet                  Fashion-MNIST, 2 members, 6,000 steps of 64
    GPT                    modern Shakespeare, a block of width 32, 2 members, 2,000 steps of 32
    yacht                  UCI, as energy
    CIFAR                  CIFAR-10, LeNet, 2 members, 2,000 steps of 64
    concrete, kin8nm       UCI, as energy
    5,000 images           Fashion-MNIST, LeNet, 2 members, 3,000 steps of 64
    Imagenette             3,600 images of 32 x 32 pixels, LeNet, 2 members, 800 steps of 64

The networks of the last two were trained with a patience of 20 epochs, other image networks with 3.

    python benchmarks/prediction/selection.py --output benchmarks/results/selection.jsonl

All but digits need `OPTAX_SMILE_DATA`.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks import records
from benchmarks.prediction import uci
from benchmarks.tables import CANDIDATES

import data
import experiment
import jax
import models
import nanogpt
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import optax_smile
from optax_smile import local


class Problem(NamedTuple):
    """Trained networks, and how to go on with them.

    Attributes:
        loss_fn: mean loss.
        apply_fn: outputs of one network.
        members: `[member, ...]`.
        batches: of the chains.
        validation, test: inputs and targets.
        likelihood: see `predict`.
        num_data: size of the training data.
        optimizer: trains on.
        steps: `num_warmup`, `num_draws`, `thin` and `steps_per_dispatch`.
    """

    loss_fn: Callable[..., Any]
    apply_fn: Callable[..., Any]
    members: Any
    batches: Any
    validation: Any
    test: Any
    likelihood: Any
    num_data: int
    optimizer: optax.GradientTransformation
    steps: dict[str, int]


def table(name: str, seed: int) -> Problem:
    """UCI data; the split is the seed."""
    (train, validation, test), members = uci.warm(name, seed, "joint", 10)
    return Problem(
        uci.mean_loss,
        uci.outputs_of,
        members,
        uci.batches_of(train, uci.BATCH_SIZE, 50),
        validation,
        test,
        "gaussian",
        len(train[0]),
        optax.adamw(3e-3, weight_decay=5e-3),
        {"num_warmup": 20_000, "num_draws": 400, "thin": 100, "steps_per_dispatch": 100},
    )


def network(
    of: Any, splits: Any, prepare: Any, num_members: int, seed: int, patience: int = 3, **steps: int
) -> Problem:
    """A classifier, trained by AdamW until validation data stop it; see `problem_of`."""
    task = experiment.Experiment(
        of, splits, "categorical", lambda _: optax.adamw(1e-3, weight_decay=0.02), prepare
    )
    settings = experiment.Settings(num_epochs=60, patience=patience, batch_size=64)
    members = experiment.warm_start(task, settings, seed, num_members, progress=False)
    return problem_of(task, members, seed, **steps)


def problem_of(
    task: experiment.Experiment,
    members: Any,
    seed: int,
    num_steps: int,
    batch_size: int = 64,
    steps_per_dispatch: int = 1,
) -> Problem:
    """Trained networks of an experiment; a quarter of the steps is the warm-up of 36 draws."""
    num_warmup = num_steps // 4
    return Problem(
        task.mean_loss,
        task.outputs_of,
        members,
        task.batches(batch_size, seed + 1),
        task.splits.valid,
        task.splits.test,
        task.likelihood,
        task.num_data,
        optax.adamw(1e-3, weight_decay=0.02),
        {
            "num_warmup": num_warmup,
            "num_draws": 36,
            "thin": (num_steps - num_warmup) // 36,
            "steps_per_dispatch": steps_per_dispatch,
        },
    )


def gpt(seed: int) -> Problem:
    """Text, letter by letter."""
    settings = dataclasses.replace(
        nanogpt.PRESETS["laptop"], depth=1, width=1 / 12, num_epochs=10, patience=2
    )
    task = nanogpt.build(settings)
    members = experiment.warm_start(task, settings, seed, 2, progress=False)
    return problem_of(task, members, seed, 2_000, 32)


def digits(seed: int) -> Problem:
    """1,797 images of 8 x 8 pixels."""
    inputs, targets = load_digits(return_X_y=True)
    both: Any = (inputs / 16).astype(np.float32), targets.astype(np.int32)
    split: Any = train_test_split(*both, test_size=0.2, random_state=seed)
    x, rest_x, y, rest_y = split
    half = len(rest_x) // 2
    valid, test = ((rest_x[part], rest_y[part]) for part in np.s_[:half, half:])
    splits = data.Splits((x, y), valid, test)
    steps = {"num_steps": 12_000, "batch_size": 128, "steps_per_dispatch": 100}
    return network(models.FullyConnected((128,), 10), splits, lambda x: x, 4, seed, **steps)


def images(
    read: Any, of: Any, seed: int, num_train: int | None = None, patience: int = 3, **steps: int
) -> Problem:
    """Images, some of those to train on or all."""
    splits = read(seed)
    splits = splits._replace(
        train=tuple(x[:num_train] for x in splits.train),
        valid=tuple(x[:num_train] for x in splits.valid),
    )
    prepare = functools.partial(data.standardize, name=read.__name__)
    return network(of, splits, prepare, 2, seed, patience, **steps)


def imagenette(seed: int) -> data.Splits:
    """3,600 photographs to train on, reduced to 32 x 32 pixels."""
    return data.imagenette(seed, 32)


IMAGES = data.fashion_mnist, models.FullyConnected((76,), 10)
LENET = data.fashion_mnist, models.LeNet()
MANY: dict[str, int] = {"num_steps": 12_000, "steps_per_dispatch": 20}
PROBLEMS: dict[str, Callable[[int], Problem]] = {
    "energy": lambda seed: table("energy", seed),
    "airfoil": lambda seed: table("airfoil", seed),
    "digits": digits,
    "2,000 images": lambda seed: images(*IMAGES, seed, 2_000, **MANY),
    "54,000 images": lambda seed: images(*IMAGES, seed, **MANY),
    "LeNet": lambda seed: images(*LENET, seed, num_steps=6_000),
    "GPT": gpt,
    "yacht": lambda seed: table("yacht", seed),
    "CIFAR": lambda seed: images(data.cifar10, models.LeNet(), seed, num_steps=2_000),
    "concrete": lambda seed: table("concrete", seed),
    "kin8nm": lambda seed: table("kin8nm", seed),
    "5,000 images": lambda seed: images(*LENET, seed, 5_000, patience=20, num_steps=3_000),
    "Imagenette": lambda seed: images(imagenette, models.LeNet(), seed, patience=20, num_steps=800),
}


@functools.cache
def problem(name: str, seed: int) -> tuple[Problem, dict[str, Any]]:
    """A problem and its candidates."""
    found = PROBLEMS[name](seed)
    batches = list(found.batches) if not isinstance(found.batches, list) else found.batches
    made = local.network_candidates(
        found.loss_fn,
        found.members,
        batches,
        found.optimizer,
        num_data=found.num_data,
        key=seed,
    )
    return found, made


def density(task: Problem, draws: Any, which: str) -> np.ndarray:
    """Log density of each target."""
    inputs, targets = getattr(task, which)
    given: dict[str, Any] = {"likelihood": task.likelihood, "targets": targets}
    return np.asarray(optax_smile.predict(task.apply_fn, draws, inputs, **given).log_density)


def run_cell(cell: dict[str, Any]) -> dict[str, Any]:
    """Test LPPD of a candidate, or the choice."""
    task, made = problem(cell["problem"], cell["seed"])
    began = time.monotonic()
    given: dict[str, Any] = task.steps | {"key": cell["seed"], "check": False, "progress": False}
    chosen = {}
    if cell["method"] == "deep ensemble":
        draws = optax_smile.Snapshots.from_members(task.members)
    elif cell["method"] == "select":
        found = optax_smile.select(
            task.loss_fn,
            task.members,
            task.batches,
            made,
            task.apply_fn,
            task.validation,
            likelihood=task.likelihood,
            **given,
        )
        print(found, flush=True)
        draws = found.draws
        scores = {"rounds": found.lppd, "projected": found.projected}
        chosen = {
            what: {name: column.tolist() for name, column in zip(made, values.T, strict=True)}
            for what, values in scores.items()
        }
        chosen |= {"chosen": found.best, "cost": found.cost}
    elif cell["method"] not in made:
        return {"lppd": None}
    else:
        sampler = made[cell["method"]]
        draws = optax_smile.sample(task.loss_fn, task.members, task.batches, sampler, **given)
    test = density(task, draws, "test")
    settings = getattr(draws, "settings", None) or {}
    return {
        "lppd": float(test.mean()),
        "density": np.round(test, 4).tolist() if len(test) <= MOST_KEPT else None,
        "validation_lppd": float(density(task, draws, "validation").mean()),
        "temperature": settings.get("temperature"),
        "precision": settings.get("prior_precision"),
        "num_parameters": sum(x[0].size for x in jax.tree.leaves(task.members)),
        "num_data": task.num_data,
        "seconds": time.monotonic() - began,
        **chosen,
    }


# Test points of which each density is kept.
MOST_KEPT = 400
METHODS = ("deep ensemble", *CANDIDATES, "select")


if __name__ == "__main__":
    axes = {"problem": PROBLEMS, "seed": [0], "method": METHODS}
    records.main(__doc__, run_cell, "lppd", "selection", **axes)
