r"""What angle, and what prior, from ten thousand weights to ten million?

A perceptron with two hidden layers on Fashion-MNIST, 54,000 images, at each of four sizes: two
networks trained with AdamW and stopped early, a `psmile` chain from each. One run answers for two
budgets: its draws from 1,000 to 3,000 gradients, and from 4,000 to 12,000. Scores on 2,000 test
images. Priors: N(0, 1) on each weight; variances by the number of inputs of each weight; around the
start, with the precision of `examples/local_precision.py`. "cold" is `cold_temperature` under
N(0, 1). "training on" is AdamW at 1e-3 instead of a chain; its angle is ignored.

    python benchmarks/prediction/ladder.py --sizes 1e4 1e5 1e6 --output out/ladder.jsonl
    python benchmarks/prediction/ladder.py --sizes 1e7 --chains 1 --steps 3000 --output ...
"""

import functools
import math
import time
from pathlib import Path
from typing import Any

from benchmarks import records

import arviz
import data
import experiment
import jax
import jax.numpy as jnp
import local_precision
import models
import numpy as np
import optax
from experiment import Experiment, Settings

import optax_smile

WIDTHS = {"1e4": 12, "1e5": 110, "1e6": 678, "1e7": 2_790}
PRIORS = ("N(0, 1)", "fan in", "around the start", "cold", "training on")
EVERY, NUM_TEST, NUM_SEARCH = 100, 2_000, 4_000
BUDGETS = (1_000, 3_000, 12_000)


@functools.cache
def build(size: str) -> Experiment:
    """Network and data."""
    splits = data.fashion_mnist(0)
    test = tuple(x[:NUM_TEST] for x in splits.test)
    return Experiment(
        models.FullyConnected((WIDTHS[size],) * 2, 10),
        splits._replace(test=test),
        "categorical",
        lambda num_steps: optax.adamw(1e-3, weight_decay=0.02),
        functools.partial(data.standardize, name="fashion_mnist"),
    )


def prior_of(name: str, task: Experiment, start: Any, seed: int) -> dict[str, Any]:
    """Arguments of the sampler."""
    if name in ("N(0, 1)", "training on"):
        return {}
    one = jax.tree.map(lambda x: x[0], start)
    if name == "cold":
        return {"temperature": optax_smile.cold_temperature(task.num_data, one)}
    if name == "fan in":
        precision = jax.tree.map(lambda x: math.prod(x.shape[:-1]) if x.ndim > 1 else 1, one)
        return {"prior_precision": precision}
    few = [tuple(x[i : i + 1_000] for x in task.splits.train) for i in range(0, NUM_SEARCH, 1_000)]
    found = local_precision.search(task.mean_loss, one, few, num_data=task.num_data, key=seed)
    return {
        "prior_mean": "start",
        "prior_precision": found.prior_precision,
        "decoherence_length": "turning",
    }


def run_cell(cell: records.Cell, work: Path) -> records.Record:
    """Scores of the draws, and their distance from the start."""
    task, seed, chains = build(cell["size"]), cell["seed"], cell["num_chains"]
    settings = Settings(num_epochs=6, patience=2, batch_size=256)
    start = experiment.warm_start(
        task,
        settings,
        seed,
        chains,
        directory=work / f"ladder-{cell['size']}-{chains}-{seed}",
        progress=False,
    )
    inputs, targets = task.splits.test
    few = tuple(x[:NUM_TEST] for x in task.splits.train)

    @jax.jit
    def observe(draws: Any) -> dict[str, Any]:
        def of_one(params, first):
            log = jax.nn.log_softmax(task.outputs_of(params, inputs))
            gone = optax.tree.norm(jax.tree.map(jnp.subtract, params, first))
            loss = task.mean_loss(params, few)
            norm = optax.tree.norm(params)
            return {"log": log, "loss": loss, "distance": gone, "norm": norm}

        return jax.vmap(of_one)(draws, start)

    before = observe(start)
    prior = prior_of(cell["prior"], task, start, seed)
    tuner = optax_smile.angle_tuner(cell["angle"])
    sampler = optax_smile.psmile(num_data=task.num_data, key=seed, tuner=tuner, **prior)
    if cell["prior"] == "training on":
        sampler = optax.adamw(1e-3, weight_decay=0.02)
    begun = time.monotonic()
    batches = task.batches(64, seed + 1)
    run = optax_smile.Run(task.mean_loss, start, batches, sampler, key=seed + 1, check=False)
    looks, trace = [], []
    for draw in run.draws(cell["num_gradients"] // EVERY, thin=EVERY):
        looks.append(jax.tree.map(np.asarray, observe(draw)))
        trace.append(run.stats["step_size"])
    seen = jax.tree.map(lambda *x: np.stack(x, axis=1), *looks)
    step_size, seconds = np.stack(trace, axis=1), time.monotonic() - begun
    result: dict[str, Any] = {
        "num_parameters": sum(x[0].size for x in jax.tree.leaves(start)),
        "num_data": task.num_data,
        "precision": None if cell["prior"] == "fan in" else prior.get("prior_precision", 1.0),
        "seconds": seconds,
        "ensemble": scores(np.asarray(before["log"])[:, None], targets)
        | {name: float(before[name].mean()) for name in ("loss", "norm")},
    }
    for budget in BUDGETS:
        if budget <= cell["num_gradients"]:
            kept = slice(budget // EVERY // 3, budget // EVERY)
            logs = seen["log"][:, kept]
            shown = {n: float(seen[n][:, kept].mean()) for n in ("loss", "norm")}
            result[str(budget)] = (
                scores(logs, targets)
                | shown
                | {
                    "distance": float(seen["distance"][:, kept.stop - 1].mean()),
                    "step_size": float(step_size[:, kept.stop - 1].mean()),
                    "r_hat": r_hat(logs, targets),
                }
            )
    result["lppd"] = result[str(min(3_000, cell["num_gradients"]))]["lppd"]
    return result


def density_of(logs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Log densities `[chain, draw, input]`."""
    return np.take_along_axis(logs, targets[None, None, :, None], axis=-1)[..., 0]


def scores(logs: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """LPPD and accuracy of the average, and the mean log density of single draws."""
    density = density_of(logs, targets)
    mean = np.exp(logs).mean(axis=(0, 1))
    return {
        "lppd": float(np.log(np.exp(density).mean(axis=(0, 1))).mean()),
        "accuracy": float(np.mean(mean.argmax(axis=-1) == targets)),
        "single": float(density.mean()),
    }


def r_hat(logs: np.ndarray, targets: np.ndarray) -> float:
    """Median over 200 test images of the split R-hat of their log densities."""
    density = density_of(logs, targets)[:, :, ::10]
    found: Any = arviz.rhat({"x": density}, method="split")
    return float(np.nanmedian(found["x"]))


def main():
    """Run the cells that are missing."""
    axes = {"size": ["1e4"], "prior": [PRIORS[0]], "angle": [0.003, 0.01, 0.03, 0.1], "seed": [0]}
    parser = records.parser(__doc__, **axes)
    parser.add_argument("--steps", type=int, choices=BUDGETS, default=12_000)
    parser.add_argument("--chains", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path("out/networks"))
    arguments = parser.parse_args()
    lengths = {"num_gradients": arguments.steps, "num_chains": arguments.chains}
    cells = records.cells_of(arguments, **lengths)
    run = functools.partial(run_cell, work=arguments.work)
    records.complete(arguments, cells, run, "lppd", "ladder")


if __name__ == "__main__":
    main()
