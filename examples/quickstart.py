"""Quickstart: a calibrated Bayesian ensemble of a small network on handwritten digits.

Trains a deep ensemble with AdamW, starts one pSMILE chain from each of its members, and compares
the two on test data: a table, and a picture of the chains, the calibration, and the uncertainty on
digits against digits with shuffled pixels, which the network never saw.

Data: the 1,797 digits that scikit-learn brings along, averaged to 4 x 4 pixels, where they are hard
enough to be uncertain about. Half a minute on two cores.

    python examples/quickstart.py                       # writes quickstart.png
    python examples/quickstart.py --sampler smile       # another sampler: one changed word
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import optax_smile
from optax_smile import metrics


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings; those of the sampler were chosen on splits that are not reported."""

    width: int = 32
    num_members: int = 8
    learning_rate: float = 3e-3
    weight_decay: float = 1e-3
    num_epochs: int = 100
    batch_size: int = 64
    sampling_batch_size: int = 256
    step_size: float = 0.1
    prior_precision: float = 1.0
    reset_quantile: float = 0.9999
    num_warmup: int = 2_000
    num_samples: int = 100
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
    """Shuffled batches of one size; one pass is one epoch."""

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
    """Build the sampler by its name; all of them keep one step size and have one prior."""
    arguments: dict[str, Any] = {"num_data": num_data, "prior_precision": config.prior_precision}
    if not name.endswith("naive"):
        arguments |= {
            "tuner": None,
            "reset_quantile": config.reset_quantile,
            "reset_momentum": "refresh",
            "key": jax.random.key(config.seed),
        }
    return getattr(optax_smile, name)(config.step_size, **arguments)


def scores(prediction, labels) -> dict[str, float]:
    """Score a prediction."""
    return {
        "LPPD": metrics.lppd(prediction.log_density),
        "accuracy": metrics.accuracy(prediction.mean, labels),
        "Brier": metrics.brier(prediction.mean, labels),
        "ECE": metrics.ece(prediction.mean, labels),
    }


def run(config: Config, sampler_name: str = "psmile"):
    """Train, sample, predict.

    Returns:
        Scores on test data by method, and what the picture shows.
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
        num_samples=config.num_samples,
        thin=config.thin,
        key=key,
        progress=config.progress,
    )

    images, labels = test
    shuffled = np.random.default_rng(0).permuted(images, axis=1)
    table, pictured = {}, {"trace": draws.trace, "labels": labels}
    ensemble = optax_smile.Snapshots.from_members(members)
    for name, snapshots in {"deep ensemble": ensemble, sampler_name: draws}.items():
        prediction = optax_smile.predict(
            logits_of, snapshots, images, likelihood="categorical", targets=labels
        )
        unseen = optax_smile.predict(logits_of, snapshots, shuffled, likelihood="categorical")
        table[name] = scores(prediction, labels)
        pictured[name] = (np.asarray(prediction.mean), np.asarray(unseen.mean))
    return table, pictured


def draw(pictured, names, thin: int, path: Path):
    """Draw the traces, the reliability diagram and the entropies."""
    import matplotlib.pyplot as plt

    figure, ((sizes, energies), (reliable, entropies)) = plt.subplots(
        2, 2, figsize=(10, 7.5), layout="constrained"
    )
    colors = dict(zip(names, ("#999999", "#0072B2"), strict=True))
    trace = pictured["trace"]
    steps = thin * np.arange(1, trace["step_size"].shape[1] + 1)

    sizes.plot(steps, trace["step_size"].T, lw=0.8, alpha=0.8)
    sizes.set(title="Step size, one line a chain", xlabel="step", ylabel="step size")
    sizes.set_ylim(bottom=0)
    energies.plot(steps, np.abs(trace["energy_change"]).T, ".", ms=2, alpha=0.4)
    energies.plot(steps, trace["energy_mean"].mean(axis=0), "k", lw=1.5, label="moving average")
    energies.set(title="Energy error", xlabel="step", ylabel="|energy change| (nats)")
    energies.set_yscale("log")
    energies.legend()

    reliable.plot([0, 1], [0, 1], "k:", lw=1)
    for name in names:
        bins = metrics.reliability(pictured[name][0], pictured["labels"], num_bins=10)
        reliable.plot(bins.confidence, bins.accuracy, color=colors[name], lw=1)
        areas = 30 * np.log1p(bins.count)
        reliable.scatter(bins.confidence, bins.accuracy, areas, colors[name], label=name)
    reliable.set(
        title="Reliability on test digits (large dots: many)",
        xlabel="confidence",
        ylabel="accuracy",
    )
    reliable.legend()

    edges = np.linspace(0, np.log(10), 30)
    for name in names:
        for probabilities, style, what in zip(
            pictured[name], ("-", "--"), ("digits", "shuffled pixels"), strict=True
        ):
            heights, _ = np.histogram(metrics.entropy(probabilities), edges, density=True)
            entropies.stairs(heights, edges, color=colors[name], ls=style, label=f"{name}, {what}")
    entropies.set(title="Predictive entropy", xlabel="entropy (nats)", ylabel="density")
    entropies.set_yscale("log")
    entropies.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main():
    """Parse the arguments, run, print the table, write the picture."""
    parser = argparse.ArgumentParser(description="A Bayesian ensemble on handwritten digits.")
    parser.add_argument(
        "--sampler",
        default="psmile",
        choices=["psmile", "smile", "psmile_naive", "smile_naive"],
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("quickstart.png"))
    parser.add_argument("--smoke", action="store_true", help="run seconds instead of a minute")
    arguments = parser.parse_args()
    config = Config(seed=arguments.seed)
    if arguments.smoke:
        config = dataclasses.replace(
            config, num_members=2, num_epochs=2, num_warmup=20, num_samples=5, thin=2
        )

    table, pictured = run(config, arguments.sampler)
    print(f"{'test set':15}" + "".join(f"{score:>10}" for score in table["deep ensemble"]))
    for name, row in table.items():
        print(f"{name:15}" + "".join(f"{value:10.4f}" for value in row.values()))
    draw(pictured, list(table), config.thin, arguments.output)
    print(f"picture: {arguments.output}")


if __name__ == "__main__":
    main()
