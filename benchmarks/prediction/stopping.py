"""When would `sample(stop=...)` have stopped, and what would that have cost?

Whole runs of `psmile` on the problems of `few_draws.py`, judged by `EvidenceStop.judge` on
validation data at alpha = .05, with nine looks. The LPPD of the *test*
data is that of the start, of the draws until the stop, and of all draws.

    digits                 of scikit-learn, a layer of 128, 4 chains of 36 draws
    2,000 images           Fashion-MNIST, a layer of 76, 2 chains of 36 draws
    energy                 UCI, networks 16-16-16, 10 chains of 400 draws

    python benchmarks/prediction/stopping.py --output benchmarks/results/stopping.jsonl

All but digits need `OPTAX_SMILE_DATA`.
"""

from typing import Any

from benchmarks import records
from benchmarks.prediction import few_draws, selection
from benchmarks.tabulated.stopping import saved
from benchmarks.tabulated.table import markdown

import numpy as np

import optax_smile

PROBLEMS = ("digits", "2,000 images", "energy")
NUM_LOOKS = 9


def run_cell(cell: dict[str, Any]) -> dict[str, Any]:
    """Sample a whole run, judge it under both nulls, and score on test data."""
    task, made = selection.problem(cell["problem"], cell["seed"])
    given: dict[str, Any] = task.steps | {"key": cell["seed"], "check": False, "progress": False}
    sampler = made[few_draws.SAMPLERS[cell["problem"]]]
    draws = optax_smile.sample(task.loss_fn, task.members, task.batches, sampler, **given)
    inputs, targets = task.test
    likelihood: Any = task.likelihood
    reading: dict[str, Any] = {"likelihood": likelihood, "targets": targets}
    predicted = optax_smile.predict(task.apply_fn, draws, inputs, per="draw", **reading)
    density = predicted.each.log_density.reshape(draws.num_chains, draws.num_draws, -1)
    members = optax_smile.Snapshots.from_members(task.members)
    start = optax_smile.predict(task.apply_fn, members, inputs, **reading)
    every = max(draws.num_draws // NUM_LOOKS, 1)
    found = {}
    for null in ("improvement", "doubling"):
        rule = optax_smile.EvidenceStop(
            task.apply_fn, task.validation, likelihood=likelihood, null=null, every=every
        )
        judged = rule.judge(draws)
        number = int(judged.num_draws[-1])
        used = density[:, :number].reshape(-1, density.shape[2]).astype(float)
        found[null] = {
            "stopped": judged.has_stopped,
            "num_draws": number,
            "log_e_value": np.round(judged.log_e_value, 3).tolist(),
            "test": few_draws.lppd(used),
        }
    return {
        **found,
        "num_draws": draws.num_draws,
        "num_chains": draws.num_chains,
        "num_warmup": task.steps["num_warmup"],
        "thin": task.steps["thin"],
        "num_validation": len(task.validation[1]),
        "num_test": density.shape[2],
        "start": float(np.mean(start.log_density)),
        "all": float(np.mean(predicted.log_density)),
    }


def main():
    """Run the cells that are missing, print the table."""
    parser = records.parser(__doc__)
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    arguments = parser.parse_args()
    cells = [
        {"problem": name, "seed": seed} for name in arguments.problems for seed in arguments.seeds
    ]
    print(markdown(saved(records.complete(arguments, cells, run_cell, "all"))))


if __name__ == "__main__":
    main()
