"""How few draws predict as well as all: chosen on validation data, and evenly spaced.

The chains of `psmile` on the problems of `selection.py`, colder than the posterior for images.
`choose` selects 16 draws by their validation densities; the LPPD of the first k of them is that of
the *test* data. Evenly spaced draws are one from each of k equal parts of all chains, laid end to
end; their LPPD is the mean over ten places in the parts. One network: the average weights of each
chain (`draws.mean()`), beside a trained network and a single draw, means over the chains.

    energy                 UCI, networks 16-16-16, 10 chains of 400 draws
    digits                 of scikit-learn, a layer of 128, 4 chains of 36 draws
    2,000 and 54,000 images   Fashion-MNIST, a layer of 76, 2 chains of 36 draws
    LeNet                  Fashion-MNIST, 10,000 images, 2 chains of 36 draws, 3,000 steps

    python benchmarks/prediction/few_draws.py --output benchmarks/results/few_draws.jsonl

All but digits need `OPTAX_SMILE_DATA`.
"""

import time
from typing import Any

from benchmarks import records
from benchmarks.prediction import selection

import numpy as np
from scipy.special import logsumexp

import optax_smile

selection.PROBLEMS["LeNet"] = lambda seed: selection.images(
    *selection.LENET, seed, 10_000, num_steps=3_000
)
# Candidate of `local.network_candidates` whose draws are thinned.
SAMPLERS = {
    "energy": "psmile",
    "digits": "psmile, cold",
    "2,000 images": "psmile, around the start",
    "54,000 images": "psmile, cold",
    "LeNet": "psmile, cold",
}
NUMBERS, NUM_SHIFTS = (1, 2, 4, 8, 16), 10


def lppd(density: np.ndarray) -> float:
    """Of the average of draws, from log densities `[draw, target]`."""
    return float(np.mean(logsumexp(density, axis=0) - np.log(len(density))))


Draws = optax_smile.Snapshots | optax_smile.StoredSnapshots


def evenly(density: np.ndarray, number: int) -> float:
    """Mean LPPD of this number of evenly spaced draws over shifts of their places."""
    shifts = (np.arange(NUM_SHIFTS) + 0.5) / NUM_SHIFTS
    places = ((np.arange(number) + shifts[:, None]) * len(density) / number).astype(int)
    return float(np.mean([lppd(density[rows]) for rows in places]))


def sampled(
    cell: records.Cell,
) -> tuple[selection.Problem, Draws]:
    """A problem, and the draws of its sampler."""
    task, made = selection.problem(cell["problem"], cell["seed"])
    given: dict[str, Any] = task.steps | {"key": cell["seed"], "check": False, "progress": False}
    sampler = made[SAMPLERS[cell["problem"]]]
    return task, optax_smile.sample(task.loss_fn, task.members, task.batches, sampler, **given)


def predicted(task: selection.Problem, draws: Any, data: Any, **options: Any) -> Any:
    """What draws predict for inputs and targets."""
    options |= {"likelihood": task.likelihood, "targets": data[1]}
    return optax_smile.predict(task.apply_fn, draws, data[0], **options)


def one_network(task: selection.Problem, draws: Draws, test: np.ndarray) -> dict[str, float]:
    """Test LPPD of one forward pass, and of one for each chain; see above."""
    found = {"one draw": float(test.mean())}
    for name, networks in (("trained", task.members), ("average weights", draws.mean())):
        single = optax_smile.Snapshots.from_members(networks)
        density = predicted(task, single, task.test, per="draw").each.log_density[:, 0]
        density = density.reshape(draws.num_chains, -1).astype(float)
        found |= {name: float(density.mean()), f"{name}, of all chains": lppd(density)}
    return found


def run_cell(cell: records.Cell) -> records.Record:
    """Sample, choose on validation data, and score on test data."""
    task, draws = sampled(cell)
    validation = predicted(task, draws, task.validation, per="draw")
    test = predicted(task, draws, task.test, per="draw").each.log_density
    began = time.monotonic()
    densities = validation.each.log_density
    indices = draws.choose(densities, max(NUMBERS))
    seconds = time.monotonic() - began
    density = test.reshape(len(draws), -1).astype(float)
    at = indices % draws.num_chains, indices // draws.num_chains
    seen, chosen = densities[at].astype(float), test[at].astype(float)
    return {
        "sampler": SAMPLERS[cell["problem"]],
        "num_draws": len(draws),
        "num_validation": len(task.validation[1]),
        "num_test": density.shape[1],
        "chosen": {str(k): lppd(chosen[:k]) for k in NUMBERS},
        "evenly": {str(k): evenly(density, k) for k in NUMBERS},
        "all": lppd(density),
        "one": one_network(task, draws, test),
        "validation": [round(lppd(seen[:k]), 5) for k in range(1, len(indices) + 1)],
        "validation_all": float(np.mean(validation.log_density)),
        "num_chains_chosen": len(set(at[0].tolist())),
        "seconds": seconds,
    }


if __name__ == "__main__":
    records.main(__doc__, run_cell, "all", "few-draws", problem=SAMPLERS, seed=range(3))
