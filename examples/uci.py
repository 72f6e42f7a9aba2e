"""Regression with honest error bars: a small network on UCI data, and a report of the run.

Trains a deep ensemble with AdamW that predicts mean and noise, starts one pSMILE chain from each of
its members, compares the two on test data, and writes everything into a directory, with a report
that tells whether the chains can be trusted.

Data: `energy`, `airfoil` or `concrete` from the folder that OPTAX_SMILE_DATA names, or with
`--download` from OpenML; `diabetes` comes with scikit-learn. A minute on two cores.

    python examples/uci.py --data energy --directory run     # writes run/report.html
    python examples/uci.py --sampler smile                   # another sampler: one changed word
"""

import argparse
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from data import Splits, uci

import optax_smile
from optax_smile import metrics, plots, report


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings."""

    width: int = 16
    num_chains: int = 4
    learning_rate: float = 1e-2
    weight_decay: float = 5e-3
    num_epochs: int = 300
    batch_size: int = 64
    sampling_batch_size: int = 256
    step_size: float | None = None
    num_warmup: int = 20_000
    num_draws: int = 200
    thin: int = 100
    seed: int = 0
    progress: bool = True


class Network(nn.Module):
    """Three hidden layers; mean `[input]` and the log standard deviation that all inputs share."""

    width: int

    @nn.compact
    def __call__(self, x):
        """Map features `[input, feature]` to a normal distribution of the target."""
        for _ in range(3):
            x = nn.relu(nn.Dense(self.width)(x))
        log_std = self.param("log_std", nn.initializers.zeros, ())
        return nn.Dense(1)(x)[:, 0], log_std


def load(name: str, seed: int, download: bool) -> Splits:
    """Data of `data.uci`; what is not to be had ends the script."""
    try:
        return uci(name, seed, download)
    except FileNotFoundError as error:
        raise SystemExit(f"{error}, or take --data diabetes, which needs no network.") from error


def make_sampler(name: str, config: Config, num_data: int):
    """Build the sampler by its name; without a step size it finds its own."""
    key = jax.random.key(config.seed)
    return getattr(optax_smile, name)(config.step_size, num_data=num_data, key=key)


def batches_of(data, batch_size: int, seed: int):
    """Shuffle one epoch into batches of one size, whose noise cancels over the epoch."""
    batch_size = min(batch_size, len(data[0]))
    order = np.random.default_rng(seed).permutation(len(data[0]))
    rows = order[: len(order) // batch_size * batch_size].reshape(-1, batch_size)
    return [tuple(array[batch] for array in data) for batch in rows]


def run(
    config: Config, data: str, sampler: str, directory: Path, download: bool = False
) -> dict[str, dict[str, float]]:
    """Train, sample, predict; scores on test data by method."""
    train, valid, (inputs, targets), _ = load(data, config.seed, download)
    network = Network(config.width)
    key = jax.random.key(config.seed)

    def outputs_of(params, features) -> Any:
        return network.apply(params, features)

    def mean_loss(params, batch):
        features, targets = batch
        mean, log_std = outputs_of(params, features)
        return jnp.mean((targets - mean) ** 2) * jnp.exp(-2 * log_std) / 2 + log_std

    members = optax_smile.warmstart(
        mean_loss,
        lambda key: network.init(key, train[0][:1]),
        batches_of(train, config.batch_size, config.seed),
        optax.adamw(config.learning_rate, weight_decay=config.weight_decay),
        num_members=config.num_chains,
        num_epochs=config.num_epochs,
        validation=valid,
        key=key,
        progress=config.progress,
    )
    epochs = [batches_of(train, config.sampling_batch_size, seed) for seed in range(50)]
    draws = optax_smile.sample(
        mean_loss,
        members,
        [batch for epoch in epochs for batch in epoch],
        make_sampler(sampler, config, num_data=len(train[0])),
        num_warmup=config.num_warmup,
        num_draws=config.num_draws,
        thin=config.thin,
        steps_per_dispatch=100,
        key=key,
        directory=directory,
        progress=config.progress,
    )

    def predict(snapshots):
        return optax_smile.predict(
            outputs_of, snapshots, inputs, likelihood="gaussian", targets=targets, per="draw"
        )

    ensemble = predict(optax_smile.Snapshots.from_members(members))
    posterior = predict(draws)
    print(optax_smile.diagnostics.summary(draws, posterior))
    scores, pictures = {}, {}
    for name, x in {"deep ensemble": ensemble, sampler: posterior}.items():
        scores[name] = metrics.score(x, targets)
        band = plots.regression_band(None, x.mean, np.sqrt(x.total), targets)
        pictures[f"{name}: the band should contain its nominal share of the targets."] = band
    title = f"UCI {data}: {sampler} beside a deep ensemble"
    report.write(directory, title=title, prediction=posterior, pictures=pictures)
    return scores


def main():
    """Parse the arguments, run, print the table, write the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", default="energy", choices=["energy", "airfoil", "concrete", "diabetes"]
    )
    parser.add_argument("--download", action="store_true", help="ask OpenML where data are missing")
    parser.add_argument("--sampler", default="psmile", choices=["psmile", "smile"])
    parser.add_argument("--step-size", type=float, help="instead of the one that the sampler finds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, help="of the run (default: a temporary one)")
    parser.add_argument("--smoke", action="store_true", help="run seconds instead of a minute")
    arguments = parser.parse_args()
    config = Config(seed=arguments.seed, step_size=arguments.step_size)
    if arguments.smoke:
        config = dataclasses.replace(
            config, num_chains=2, num_epochs=2, num_warmup=20, num_draws=10, thin=5
        )
    directory = arguments.directory or Path(tempfile.mkdtemp(prefix="uci-"))

    table = run(config, arguments.data, arguments.sampler, directory, arguments.download)
    print(f"\n{'test set':15}" + "".join(f"{score:>15}" for score in table["deep ensemble"]))
    for name, row in table.items():
        print(f"{name:15}" + "".join(f"{value:15.4f}" for value in row.values()))
    print(f"report: {directory / 'report.html'}")


if __name__ == "__main__":
    main()
