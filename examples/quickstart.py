"""Quickstart: a Bayesian ensemble of a small network on handwritten digits.

Trains a deep ensemble with AdamW, starts one pSMILE chain from each of its members, and compares
the two on test data, and on digits with shuffled pixels, which the network never saw: a table, and
a report with pictures that tells whether the chains can be trusted. In tempered rows a temperature
T, fitted on validation data, corrects the confidence.

Data: the 1,797 digits that scikit-learn brings along, averaged to 4 x 4 pixels, where they are hard
enough to be uncertain about. Half a minute on two cores.

    python examples/quickstart.py                       # writes quickstart.html
    python examples/quickstart.py --sampler smile       # another sampler: one changed word
"""

import argparse
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import optax_smile
from optax_smile import metrics, plots, report


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings, chosen on splits that are not reported; `step_size` None: the sampler finds it."""

    width: int = 32
    num_members: int = 8
    learning_rate: float = 3e-3
    weight_decay: float = 1e-3
    num_epochs: int = 100
    batch_size: int = 64
    sampling_batch_size: int = 256
    step_size: float | None = None
    prior_precision: float = 1.0
    num_warmup: int = 2_000
    num_draws: int = 100
    thin: int = 60
    seed: int = 0
    progress: bool = True


class Network(nn.Module):
    """Two hidden layers; logits of the ten digits."""

    width: int

    @nn.compact
    def __call__(self, x):
        """Map images `[input, 16]` to logits `[input, 10]`."""
        x = nn.relu(nn.Dense(self.width)(x))
        x = nn.relu(nn.Dense(self.width)(x))
        return nn.Dense(10)(x)


class Batches:
    """Batches of one size, shuffled anew for every pass: their noise cancels over a pass."""

    def __init__(self, images, labels, batch_size, seed):
        self.data, self.batch_size = (images, labels), batch_size
        self.generator = np.random.default_rng(seed)

    def __iter__(self):
        order = self.generator.permutation(len(self.data[0]))
        for start in range(0, len(order) - self.batch_size + 1, self.batch_size):
            rows = order[start : start + self.batch_size]
            yield tuple(array[rows] for array in self.data)


def load(seed: int):
    """Split the digits into training, validation and test images and labels."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 4, 2, 4, 2).mean(axis=(2, 4)).reshape(-1, 16)
    images = (images / 8 - 0.6).astype(np.float32)
    rest, test, rest_labels, test_labels = train_test_split(
        images, labels, test_size=500, random_state=seed, stratify=labels
    )
    train, valid, train_labels, valid_labels = train_test_split(
        rest, rest_labels, test_size=200, random_state=seed, stratify=rest_labels
    )
    return (train, train_labels), (valid, valid_labels), (test, test_labels)


def make_sampler(name: str, config: Config, num_data: int):
    """Build the sampler by its name."""
    return getattr(optax_smile, name)(
        config.step_size,
        num_data=num_data,
        prior_precision=config.prior_precision,
        key=jax.random.key(config.seed),
    )


def run(config: Config, sampler_name: str, directory: Path) -> tuple[dict, Any, Any]:
    """Train, sample, predict; the draws are kept in the directory.

    Returns:
        Scores on test data by method, with the mean entropy (nats) of digits and shuffled pixels,
        and the temperature T; the tempered prediction of the sampler; a plot of the calibration.
    """
    (train, valid, test), network = load(config.seed), Network(config.width)
    key = jax.random.key(config.seed)

    def logits_of(params, images) -> Any:
        return network.apply(params, images)

    def mean_loss(params, batch):
        images, labels = batch
        logits = logits_of(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    members = optax_smile.warmstart(
        mean_loss,
        lambda key: network.init(key, train[0][:1]),
        Batches(*train, config.batch_size, config.seed),
        optax.adamw(config.learning_rate, weight_decay=config.weight_decay),
        num_members=config.num_members,
        num_epochs=config.num_epochs,
        validation=valid,
        key=key,
        progress=config.progress,
    )
    draws = optax_smile.sample(
        mean_loss,
        members,
        Batches(*train, config.sampling_batch_size, config.seed),
        make_sampler(sampler_name, config, num_data=len(train[0])),
        num_warmup=config.num_warmup,
        num_draws=config.num_draws,
        thin=config.thin,
        key=key,
        directory=directory,
        progress=config.progress,
    )

    images, labels = test
    shuffled = np.random.default_rng(0).permuted(images, axis=1)
    table, prediction, axes = {}, None, None
    ensemble = optax_smile.Snapshots.from_members(members)
    for name, snapshots in {"deep ensemble": ensemble, sampler_name: draws}.items():
        test_prediction = optax_smile.predict(
            logits_of, snapshots, images, likelihood="categorical", targets=labels, per="draw"
        )
        held_out, unseen = (
            optax_smile.predict(logits_of, snapshots, x, likelihood="categorical")
            for x in (valid[0], shuffled)
        )
        fitted = metrics.temperature(held_out, valid[1])
        for row, temperature in {name: 1.0, f"{name}, tempered": fitted}.items():
            prediction = test_prediction.tempered(temperature)
            entropies = prediction.total.mean(), unseen.tempered(temperature).total.mean()
            table[row] = metrics.score(prediction, labels)
            table[row] |= {"entropy": entropies[0], "shuffled": entropies[1], "T": temperature}
            axes = plots.reliability(prediction.mean, labels, label=row, ax=axes)
    return table, prediction, axes


def main():
    """Parse the arguments, run, print the table, write the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sampler", default="psmile", choices=["psmile", "smile"])
    parser.add_argument("--step-size", type=float, help="instead of the one that the sampler finds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("quickstart.html"))
    parser.add_argument("--smoke", action="store_true", help="run seconds instead of a minute")
    arguments = parser.parse_args()
    config = Config(seed=arguments.seed, step_size=arguments.step_size)
    if arguments.smoke:
        config = dataclasses.replace(
            config, num_members=2, num_epochs=2, num_warmup=20, num_draws=8, thin=2
        )

    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "quickstart"
        table, prediction, axes = run(config, arguments.sampler, directory)
        print(f"{'test set':23}" + "".join(f"{score:>9}" for score in table["deep ensemble"]))
        for name, row in table.items():
            print(f"{name:23}" + "".join(f"{value:9.4f}" for value in row.values()))
        title = f"Handwritten digits: {arguments.sampler} beside a deep ensemble"
        pictures = {"Dots below the dotted line are overconfident.": axes}
        given = {"title": title, "prediction": prediction, "pictures": pictures}
        print(f"report: {report.write(directory, arguments.output, **given)}")


if __name__ == "__main__":
    main()
