"""Networks on tables: control variates whose centres move along, against larger batches.

The networks, ensembles and splits of `uci.py`, mean and sigma from the network. Each chain gets the
gradients of as many examples as 60,000 batches of 100 have, passes of the centres included; the
last two thirds are sampled. Batches divide the training data evenly; fewer than one row per batch
is left out, for all methods. Rates, batch sizes and angles are chosen by validation data.

    psmile            new batches in each pass
    larger angle      the same at the angle .12, twice the default
    centres           a list of batches, whose gradients at the centre are stored
    two gradients     new batches in each pass, and the gradients of both points in each call
    AdamW, Muon       training goes on; the iterates are averaged like draws

    python benchmarks/prediction/centers.py --output benchmarks/results/centers.jsonl
"""

import time
import warnings
from collections.abc import Iterator
from typing import Any

from benchmarks import records
from benchmarks.prediction import uci

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import stats

import optax_smile

NUM_EXAMPLES, NUM_CHAINS, NUM_DRAWS, WARMUP = 6_000_000, 10, 400, 1 / 3
PROTOCOL = "distributional"
FULL = "full"
BATCHES = (100, 400, 1_600, FULL)
RATES = (1e-3, 3e-3, 1e-2)
OPTIMIZERS = {"AdamW": optax.adamw, "Muon": optax.contrib.muon}
TRAINING: dict[str, list[tuple[Any, float | None]]]
TRAINING = {name: [(100, x) for x in RATES] for name in OPTIMIZERS}
# Batch sizes, and learning rates or angles (None: the default).
SETTINGS: dict[str, list[tuple[Any, float | None]]] = {
    "psmile": [(size, None) for size in BATCHES],
    "centres": [(size, None) for size in BATCHES[:2]],
    "two gradients": [(100, None)],
    "larger angle": [(100, 0.12)],
    **TRAINING,
    "deep ensemble": [(None, None)],
    "CatBoost": [(None, None)],
}


class Shuffled:
    """A number of batches of equal size, other ones in each pass."""

    def __init__(self, data, number: int):
        self.data, self.number, self.random = data, number, np.random.default_rng(0)

    def __iter__(self):
        order = self.random.permutation(len(self.data[0])).reshape(self.number, -1)
        yield from (tuple(x[rows] for x in self.data) for rows in order)


def divided(data, size: Any) -> tuple[Any, int]:
    """Data without the rows that do not divide evenly, and the number of batches."""
    rows = len(data[0])
    number = 1 if size == FULL else max(round(rows / size), 1)
    kept = np.random.default_rng(0).permutation(rows)[: rows // number * number]
    return tuple(x[kept] for x in data), number


def trees(parts) -> dict[str, float]:
    """LPPD of boosted trees with mean and variance."""
    model, found = uci.boosted(parts[0], parts[1], 0), {}
    for name, (inputs, targets) in zip(("valid", "lppd"), parts[1:], strict=True):
        mean, variance = model.predict(inputs).T
        found[name] = float(stats.norm.logpdf(targets, mean, np.sqrt(variance)).mean())
    return found


def scores(draws, parts) -> dict[str, Any]:
    """LPPD of validation and test data."""
    valid = uci.score(optax_smile.Snapshots(draws.params), parts[1])["lppd"]
    return {"valid": valid, **uci.score(draws, parts[2])}


def run_cell(cell: records.Cell) -> records.Record:
    """Run the chains to the budget, and score the average of their draws."""
    warnings.filterwarnings("ignore", message="`Run`: `(sampler` is an optim|control_variate)")
    name, size, setting = (cell[x] for x in ("method", "batch", "setting"))
    parts, members = uci.warm(cell["data"], cell["split"], PROTOCOL, NUM_CHAINS)
    if name == "CatBoost":
        return trees(parts)
    if name == "deep ensemble":
        return scores(optax_smile.Snapshots.from_members(members), parts)
    data, number = divided(parts[0], size)
    if number == 1 and size != FULL:
        return {"lppd": float("nan"), "note": "a single batch"}
    batches: Any = Shuffled(data, number)
    control = None
    if is_centred := name in ("centres", "two gradients"):
        batches = list(batches) if name == "centres" else batches
        control = batches if name == "centres" else [data]
    if name in OPTIMIZERS:
        sampler = OPTIMIZERS[name](setting, weight_decay=5e-3)
    else:
        angle: Any = {} if setting is None else {"tuner": optax_smile.angle_tuner(setting)}
        sampler = optax_smile.psmile(num_data=len(data[0]), key=0, **angle)
    run = optax_smile.Run(
        uci.mean_loss, jax.tree.map(jnp.copy, members), batches, sampler,
        key=1_000 + cell["split"], steps_per_dispatch=50, check=False, control_variate=control,
    )  # fmt: skip

    def spent() -> float:
        """Gradients of a batch so far; a pass comes with a measurement of two gradients."""
        of = {x: float(np.mean(run.stats[x])) for x in run.stats if x.startswith("num_")}
        extra = of["num_passes"] * (number + 2) if is_centred else 0
        return of["num_gradients"] + extra + of.get("num_reduced", 0) * (name == "two gradients")

    budget, began = NUM_EXAMPLES * number / len(data[0]), time.monotonic()
    while spent() < WARMUP * budget:
        run.advance(run.num_steps + max(round(budget / 100), 1))
    per_step = spent() / run.num_steps
    thin = max(round((budget - spent()) / per_step / NUM_DRAWS), 1)
    for _ in run.draws(10**6, thin=thin):
        if spent() >= budget:
            break
    draws = run.snapshots()
    seconds, used = time.monotonic() - began, run.stats
    found: Any = {
        "seconds": seconds,
        "num_steps": run.num_steps,
        "spent": spent(),
        "rows": len(data[0]),
    }
    if name in OPTIMIZERS:
        draws = optax_smile.Snapshots(draws.params)
    else:
        found |= {x: float(np.median(used[x])) for x in ("step_size", "change_share")}
    if is_centred:
        found |= {x: float(np.median(used[x])) for x in ("noise_left", "num_passes", "num_reduced")}
    return scores(draws, parts) | found


def cells_of(arguments) -> Iterator[records.Cell]:
    """Requested cells, at the settings of each method."""
    for cell in records.cells_of(arguments):
        for batch, setting in SETTINGS[cell["method"]]:
            yield cell | {"batch": batch, "setting": setting}


def main():
    """Run the cells that are missing."""
    parser = records.parser(__doc__, method=SETTINGS, split=range(3), data=uci.FILES)
    arguments = parser.parse_args()
    records.complete(arguments, cells_of(arguments), run_cell, "lppd")


if __name__ == "__main__":
    main()
