"""How few draws predict as well as all: chosen on validation data, and evenly spaced.

The chains of `psmile` on the problems of `selection.py`, colder than the posterior for images.
`thin_to` chooses 16 draws by their validation densities; the LPPD of the first k of them is that of
the *test* data. Evenly spaced draws are one from each of k equal parts of all chains, laid end to
end; their LPPD is the mean over ten places in the parts.

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
from benchmarks.tabulated.few_draws import NUMBERS, scores
from benchmarks.tabulated.table import markdown

import models
import numpy as np
from scipy.special import logsumexp

import optax_smile

selection.PROBLEMS["LeNet"] = lambda seed: selection.fashion(models.LeNet(), 10_000, 3_000, 1, seed)
# Candidate of `local.network_candidates` whose draws are thinned.
SAMPLERS = {
    "energy": "psmile",
    "digits": "psmile, cold",
    "2,000 images": "psmile, around the start",
    "54,000 images": "psmile, cold",
    "LeNet": "psmile, cold",
}
NUM_SHIFTS = 10


def lppd(density: np.ndarray) -> float:
    """Of the average of draws, from log densities `[draw, target]`."""
    return float(np.mean(logsumexp(density, axis=0) - np.log(len(density))))


def evenly(density: np.ndarray, number: int) -> float:
    """Mean LPPD of so many evenly spaced draws over the shifts of their places."""
    shifts = (np.arange(NUM_SHIFTS) + 0.5) / NUM_SHIFTS
    places = ((np.arange(number) + shifts[:, None]) * len(density) / number).astype(int)
    return float(np.mean([lppd(density[rows]) for rows in places]))


def run_cell(cell: dict[str, Any]) -> dict[str, Any]:
    """Sample, choose on validation data, and score on test data."""
    task, made = selection.problem(cell["problem"], cell["seed"])
    given: dict[str, Any] = task.steps | {"key": cell["seed"], "check": False, "progress": False}
    sampler = made[SAMPLERS[cell["problem"]]]
    draws = optax_smile.sample(task.loss_fn, task.members, task.batches, sampler, **given)

    def predicted(which: str) -> Any:
        inputs, targets = getattr(task, which)
        reading: dict[str, Any] = {"likelihood": task.likelihood, "targets": targets}
        return optax_smile.predict(task.apply_fn, draws, inputs, per="draw", **reading)

    validation, test = predicted("validation"), predicted("test").each.log_density
    began = time.monotonic()
    subset = draws.thin_to(max(NUMBERS), validation).subset
    seconds = time.monotonic() - began
    assert subset is not None
    density = test.reshape(len(draws), -1).astype(float)
    chosen = test[subset.chain, subset.draw].astype(float)
    return {
        "sampler": SAMPLERS[cell["problem"]],
        "num_draws": len(draws),
        "num_validation": len(task.validation[1]),
        "num_test": density.shape[1],
        "chosen": {k: lppd(chosen[:k]) for k in NUMBERS},
        "evenly": {k: evenly(density, k) for k in NUMBERS},
        "all": lppd(density),
        "validation": [round(float(x), 5) for x in subset.lppd],
        "validation_all": float(np.mean(validation.log_density)),
        "num_chains_chosen": len(set(subset.chain.tolist())),
        "seconds": seconds,
    }


def main():
    """Run the cells that are missing, print the table."""
    parser = records.parser(__doc__)
    parser.add_argument("--problems", nargs="+", choices=SAMPLERS, default=list(SAMPLERS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    arguments = parser.parse_args()
    cells = [
        {"problem": name, "seed": seed} for name in arguments.problems for seed in arguments.seeds
    ]
    print(markdown(scores(records.complete(arguments, cells, run_cell, "all"))))


if __name__ == "__main__":
    main()
