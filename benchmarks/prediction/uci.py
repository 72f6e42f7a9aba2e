"""Regression on UCI data: every sampler at the same number of gradients, from the same warm start.

A deep ensemble is trained by the likelihood; every method then takes 60,000 gradients from each
network, of which the last two thirds are sampled. Networks 16-16-16-1, under these protocols:

    joint            one log sigma for all inputs, trained and sampled with the weights
    distributional   the network predicts log sigma for each input
    published        trained by squared error, sampled from log sigma = 0 with the last sixth kept
    tabular          distributional, with four layers of 16 as in the table of bde's authors
    tabular mean     joint, with four layers of 16

CatBoost (`pip install catboost`) is at its defaults; the validation data choose how many trees. It
predicts mean and variance for `tabular`, else the mean, and has the variance of the validation
errors. A cell is one protocol, data set, split, method and setting.

    python benchmarks/prediction/uci.py --data energy airfoil --output out/uci.jsonl
"""

import functools
import importlib
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks import records, samplers

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import stats

import optax_smile

FILES = {
    "energy": "energy.data",
    "airfoil": "airfoil.data",
    "bikesharing": "bikesharing.data",
    "concrete": "concrete.txt",
    "yacht": "yacht.txt",
    "kin8nm": "kin8nm.txt.gz",
    "power": "power-plant.txt",
}
# Seeds of the published splits of the first three data sets; the rest is made by the same rule.
SEEDS = {"energy": (1, 3), "airfoil": (1, 3), "bikesharing": (1,)}
BATCH_SIZE = 256
# The share of the warm-up and the number of draws.
USUAL: tuple[float, int] = 1 / 3, 400
PROTOCOLS = dict.fromkeys(("joint", "distributional", "tabular", "tabular mean"), USUAL)
PROTOCOLS |= {"published": (5 / 6, 1_000)}
# Of each chain.
NUM_GRADIENTS = 60_000
# LPPD of a constant prediction with the mean and variance of the targets.
USELESS = -1.42
# Largest number of test points whose R-hat is computed.
MAX_INPUTS = 500


class Network(nn.Module):
    """Mean `[input]` and log sigma: one for all inputs, or `[input]`."""

    predicts_sigma: bool = False
    num_layers: int = 3

    @nn.compact
    def __call__(self, x):
        """Map features `[input, feature]`."""
        for _ in range(self.num_layers):
            x = nn.relu(nn.Dense(16)(x))
        if self.predicts_sigma:
            x = nn.Dense(2)(x)
            return x[:, 0], x[:, 1]
        return nn.Dense(1)(x)[:, 0], self.param("log_std", nn.initializers.zeros, ())


def network_of(protocol: str) -> Network:
    """Build the network of a protocol."""
    num_layers = 4 if protocol.startswith("tabular") else 3
    return Network(protocol in ("distributional", "tabular"), num_layers)


def outputs_of(params, features) -> Any:
    """Mean and log sigma."""
    layers = [*params["params"]]
    num_layers = sum(name.startswith("Dense") for name in layers) - 1
    return Network("log_std" not in layers, num_layers).apply(params, features)


def mean_loss(params, batch):
    """Negative log likelihood per example, up to a constant."""
    features, targets = batch
    mean, log_std = outputs_of(params, features)
    return jnp.mean((targets - mean) ** 2 * jnp.exp(-2 * log_std) / 2 + log_std)


def squared_error(params, batch):
    """Half the mean squared error."""
    features, targets = batch
    return jnp.mean((targets - outputs_of(params, features)[0]) ** 2) / 2


def load(name: str, split: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Training, validation and test data, standardized over the whole file as published."""
    folder = Path(os.environ["OPTAX_SMILE_DATA"])
    if split < len(SEEDS.get(name, ())):
        seed = SEEDS[name][split]
        with np.load(folder / "uci_reference_splits" / f"{name}_seed{seed}.npz") as arrays:
            return [
                (arrays[f"x_{part}"], arrays[f"y_{part}"]) for part in ("train", "valid", "test")
            ]
    table = np.loadtxt(folder / "uci" / FILES[name])
    table = (table - table.mean(0)) / np.maximum(table.std(0), 1e-12)
    order = np.random.default_rng(split).permutation(len(table))
    num_valid = len(order) // 10
    test = order[: 2 * num_valid]
    if name not in SEEDS:
        stem = FILES[name].split(".")[0]
        with np.load(folder / "uci" / f"{stem}.splits.npz") as arrays:
            test = arrays["test_idx"][split]
    rest = order[~np.isin(order, test)]
    parts = rest[num_valid:], rest[:num_valid], test
    return [(table[p, :-1].astype(np.float32), table[p, -1].astype(np.float32)) for p in parts]


def batches_of(data, size: int, num_epochs: int) -> list[Any]:
    """Epochs without replacement; rows that do not fill a batch are left out of an epoch."""
    rng, size = np.random.default_rng(0), min(size, len(data[0]))
    orders = (rng.permutation(len(data[0])) for _ in range(num_epochs))
    rows = [row for order in orders for row in order[: len(order) // size * size].reshape(-1, size)]
    return [tuple(array[row] for array in data) for row in rows]


@functools.cache
def warm(data: str, split: int, protocol: str, num_chains: int) -> tuple[Any, Any]:
    """Split and deep ensemble."""
    parts = load(data, split)
    network = network_of(protocol)
    members = optax_smile.warmstart(
        squared_error if protocol == "published" else mean_loss,
        lambda key: network.init(key, parts[0][0][:1]),
        batches_of(parts[0], 64, 1),
        optax.adamw(1e-2, weight_decay=5e-3),
        num_members=num_chains,
        num_epochs=200,
        validation=parts[1],
        key=jax.random.key(split),
        progress=False,
    )
    return parts, members


class Run(NamedTuple):
    """What a sampler is told of a run: examples, steps of the warm-up and of the chain, a key."""

    data: str
    num_data: int
    num_warmup: int
    num_steps: int
    key: jax.Array


class Method(NamedTuple):
    """A sampler of the table.

    Attributes:
        make: from step size (None: its own) and run.
        batch_per: see `sample`: `"step"` for minimal norm, two gradients a step, as published.
        step_sizes: the grid of which a table takes the best.
    """

    make: Any
    batch_per: Literal["gradient", "step"]
    step_sizes: tuple[float | None, ...]


def method(name: str, *step_sizes: float | None, batch_per: Any = "gradient", **options) -> Method:
    """Build a method that is one function of the library; options may be functions of the run."""

    def make(step_size, run):
        rest = {name: of(run) if callable(of) else of for name, of in options.items()}
        return samplers.build(name, step_size, num_data=run.num_data, key=run.key, **rest)

    return Method(make, batch_per, step_sizes)


def training(step_size, run):
    """Continue AdamW at a constant rate; its iterates are kept as if they were draws."""
    return optax.adamw(step_size, weight_decay=5e-3)


FULL_BATCH, CHECKPOINTS, TREES = "mile", "checkpoints", "CatBoost"
METHODS = {
    CHECKPOINTS: Method(training, "gradient", (1e-3, 3e-3, 1e-2)),
    # L and the grid around the choice of the published tuner.
    FULL_BATCH: method(
        "mclmc",
        *(0.01, 0.02, 0.04),
        batch_per="step",
        decoherence_length=lambda run: 14.0 if run.data == "airfoil" else 11.0,
    ),
    "sgld": method("sgld", 1e-7, 1e-6, 1e-5, 1e-4),
    # The mass adapts during the whole warm-up, as published.
    "scale_adapted_sghmc": method(
        "scale_adapted_sghmc",
        *(1e-4, 1e-3, 3e-3, 1e-2, 2e-2, 1e-1),
        adapt_steps=lambda run: run.num_warmup,
    ),
    # Four cycles over the whole run.
    "cyclical_sgld": method(
        "cyclical_sgld", 1e-7, 1e-6, 1e-5, 1e-4, total_steps=lambda run: run.num_steps
    ),
    **{
        f"{name} published": method(f"{name} published", *step_sizes, batch_per="step")
        for name, step_sizes in (
            ("smile_naive", (1e-4, 1e-3, 3e-3, 1e-2)),
            ("psmile_naive", (1e-4, 1e-3, 3e-3, 1e-2)),
            ("smile", (1e-3, 1e-2)),
            ("psmile", (1e-3, 1e-2)),
        )
    },
    "psmile_naive": method("psmile_naive", 5e-4, 1e-3, 2e-3, 4e-3),
    "smile": method("smile", None),
    "psmile": method("psmile", None),
    "psmile, full matrix": method("psmile", None, largest_matrix=1_000),
}
ALL = ("deep ensemble", TREES, *METHODS)


def errors(mean: np.ndarray, std: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """RMSE, and coverage of normal 90 % intervals."""
    low, high = optax_smile.metrics.interval(mean, std, 0.9)
    return {
        "rmse": float(np.sqrt(np.mean((mean - targets) ** 2))),
        "coverage": float(np.mean((low <= targets) & (targets <= high))),
    }


def boosted(train, validation, seed: int, loss: str = "RMSEWithUncertainty") -> Any:
    """Boosted trees, stopped by validation data; targets have a mean and a variance, or a mean."""
    model = importlib.import_module("catboost").CatBoostRegressor(
        loss_function=loss, random_seed=seed, verbose=False, allow_writing_files=False
    )
    return model.fit(*train, eval_set=validation)


def trees(cell: records.Cell) -> dict[str, float]:
    """Scores of boosted trees."""
    train, (inputs, targets), test = load(cell["data"], cell["split"])
    if cell["protocol"] == "tabular":
        model = boosted(train, (inputs, targets), cell["split"])
        mean, variance = model.predict(test[0]).T
    else:
        model = boosted(train, (inputs, targets), cell["split"], "RMSE")
        mean, variance = model.predict(test[0]), np.mean((model.predict(inputs) - targets) ** 2)
    std = np.sqrt(variance)
    lppd = stats.norm.logpdf(test[1], mean, std).mean()
    return {"lppd": float(lppd), **errors(mean, std, test[1])}


def score(snapshots: Any, test) -> dict[str, Any]:
    """Scores of the predictions, and whether the chains agree."""
    inputs, targets = test
    try:
        found = optax_smile.predict(
            outputs_of, snapshots, inputs, likelihood="gaussian", targets=targets, per="draw"
        )
    except ValueError as error:
        return {"lppd": float("-inf"), "error": str(error)}
    result = errors(found.mean, np.sqrt(found.total), targets)
    result["lppd"] = float(np.mean(found.log_density))
    if snapshots.trace:
        summary = optax_smile.diagnostics.summary(snapshots, found, max_inputs=MAX_INPUTS)
        result |= {
            "chain_lppd": np.round(summary.chain_lppd, 3).tolist(),
            "num_lost": int(np.sum(~(summary.chain_lppd > USELESS))),
            "rhat_across": float(np.mean(summary.rhat_across < 1.05)),
            "rhat_within": float(np.mean(summary.rhat_within < 1.05)),
        }
        if "log_std" in snapshots.params["params"]:
            log_std = np.mean(np.asarray(snapshots.params["params"]["log_std"]), axis=0)
            result["sigma"] = np.exp(log_std)[[0, len(log_std) // 2, -1]].tolist()
    return result


def run_cell(cell: records.Cell) -> records.Record:
    """Sample and score."""
    warnings.filterwarnings("ignore", message="`sample`: `sampler` is an optimizer")
    of = (cell[name] for name in ("data", "split", "protocol", "num_chains"))
    if cell["method"] == TREES:
        return trees(cell)
    (train, _, test), members = warm(*of)
    if cell["method"] == "deep ensemble":
        return score(optax_smile.Snapshots.from_members(members), test)
    members = jax.tree.map(jnp.copy, members)
    key = jax.random.key(1_000 + cell["split"])
    began = time.monotonic()
    chosen = METHODS[cell["method"]]
    num_steps = cell["num_gradients"] // (2 if chosen.batch_per == "step" else 1)
    share, num_draws = PROTOCOLS[cell["protocol"]]
    num_warmup = round(share * num_steps)
    num_draws = min(num_draws, num_steps - num_warmup)
    run = Run(cell["data"], len(train[0]), num_warmup, num_steps, key)
    is_full = cell["method"] == FULL_BATCH
    draws = optax_smile.sample(
        mean_loss,
        members,
        [train] if is_full else batches_of(train, BATCH_SIZE, 50),
        chosen.make(cell["step_size"], run),
        num_warmup=num_warmup,
        num_draws=num_draws,
        thin=(num_steps - num_warmup) // num_draws,
        steps_per_dispatch=100,
        batch_per=chosen.batch_per,
        key=key,
        progress=False,
    )
    seconds = time.monotonic() - began
    if cell["method"] == CHECKPOINTS:
        return score(optax_smile.Snapshots(draws.params), test)
    steps = np.median(draws.trace["step_size"], axis=0)
    places = {"second": 0.15, "middle": 0.5, "last": 0.95}
    return {
        **score(draws, test),
        "seconds": seconds,
        "steps": {name: float(steps[int(part * len(steps))]) for name, part in places.items()},
        "num_rejected": int(np.sum(draws.trace["num_rejected"][:, -1])),
    }


def cells_of(arguments) -> Iterator[records.Cell]:
    """Requested cells, at the step sizes of each method."""
    rest = {"num_chains": arguments.num_chains, "num_gradients": arguments.num_gradients}
    for cell in records.cells_of(arguments, protocol=arguments.protocol, **rest):
        is_sampled = cell["method"] in METHODS
        own = METHODS[cell["method"]].step_sizes if is_sampled else (None,)
        for step_size in arguments.step_sizes if is_sampled and arguments.step_sizes else own:
            yield cell | {"step_size": step_size}


def main():
    """Run the cells that are missing."""
    parser = records.parser(__doc__, data=FILES, split=range(3), method=ALL)
    parser.add_argument("--protocol", choices=PROTOCOLS, default="joint")
    parser.add_argument("--step-sizes", nargs="+", type=float, help="instead of the methods' own")
    parser.add_argument("--num-chains", type=int, default=10)
    parser.add_argument("--num-gradients", type=int, default=NUM_GRADIENTS, help="per chain")
    arguments = parser.parse_args()
    records.complete(arguments, cells_of(arguments), run_cell, "lppd", "uci")


if __name__ == "__main__":
    main()
