"""When would `sample(stop=...)` have stopped, and what would that have cost?

Whole runs of `psmile` on the problems of `few_draws.py`, judged by `EvidenceStop.judge` on
validation data at alpha = .05, with nine looks. The LPPD of the *test*
data is that of the start, of the draws until the stop, and of all draws.

    digits                 of scikit-learn, a layer of 128, 4 chains of 36 draws
    2,000 images           Fashion-MNIST, a layer of 76, 2 chains of 36 draws
    energy                 UCI, networks 16-16-16, 10 chains of 400 draws
    LeNet                  Fashion-MNIST, 10,000 images, 2 chains of 36 draws

    python benchmarks/prediction/stopping.py --output benchmarks/results/stopping.jsonl

All but digits need `OPTAX_SMILE_DATA`.
"""

from benchmarks import records
from benchmarks.prediction import few_draws
from benchmarks.tabulated.draws import STOPPED, stopping

import numpy as np

import optax_smile

NUM_LOOKS = 9


def run_cell(cell: records.Cell) -> records.Record:
    """Sample a whole run, judge it under both nulls, and score on test data."""
    task, draws = few_draws.sampled(cell)
    whole = few_draws.predicted(task, draws, task.test, per="draw")
    density = whole.each.log_density.reshape(draws.num_chains, draws.num_draws, -1)
    members = optax_smile.Snapshots.from_members(task.members)
    start = few_draws.predicted(task, members, task.test)
    every = max(draws.num_draws // NUM_LOOKS, 1)
    found = {}
    for null in ("improvement", "doubling"):
        rule = optax_smile.EvidenceStop(
            task.apply_fn, task.validation, likelihood=task.likelihood, null=null, every=every
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
        "all": float(np.mean(whole.log_density)),
    }


if __name__ == "__main__":
    records.main(__doc__, run_cell, "all", stopping, problem=STOPPED, seed=range(3))
