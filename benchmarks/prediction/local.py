"""Draws around trained weights of networks with far more parameters than data.

A perceptron on scikit-learn's digits (d = 55,210, N = 1,000) and a convolutional network on MNIST
(d = 52,186, N = 2,048, images of $OPTAX_SMILE_DATA), trained by SGD with momentum. For each seed:
`local_precision` by its defaults, then one chain from the weights with its precision; and, for
comparison, 1,000 calls of `psmile` by its defaults, with the prior N(0, 1). LPPD of the average
over the last half of the first 64, 1,000 and 10,000 calls on test images, loss of single draws, and
of the weights. Batches of 50 and 64 without replacement, in the same order for every run.

    python benchmarks/prediction/local.py --output benchmarks/results/local.jsonl
"""

import time
from typing import Any, NamedTuple

from benchmarks import records

import data
import flax.linen as nn
import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
from sklearn.datasets import load_digits

import optax_smile

NUM_TEST = 2_000
# Calls, and after how many of them a draw is scored.
CALLS = {64: 1, 1_000: 10, 10_000: 50}


class Problem(NamedTuple):
    """A network, its data, and how it is trained."""

    network: nn.Module
    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    batch_size: int
    num_epochs: int


class Convolutions(nn.Module):
    """Two convolutions, each normalised over a batch's images, and a hidden layer of 64."""

    @nn.compact
    def __call__(self, x):
        """Map images to logits."""
        for i, channels in enumerate((8, 16)):
            x = nn.Conv(channels, (3, 3))(x)
            mean, variance = (f(x, (0, 1, 2), keepdims=True) for f in (jnp.mean, jnp.var))
            x = (x - mean) * jax.lax.rsqrt(variance + 1e-5)
            scale = self.param(f"scale_{i}", nn.initializers.ones, (channels,))
            shift = self.param(f"shift_{i}", nn.initializers.zeros, (channels,))
            x = nn.relu(x * scale[None, None, None] + shift[None, None, None])
            x = nn.avg_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Dense(64)(x.reshape(len(x), -1)))
        return nn.Dense(10)(x)


def shuffled(images: np.ndarray, labels: np.ndarray, largest: float) -> tuple[Any, Any]:
    """Images from 0 to 1, and labels."""
    order = np.random.default_rng(0).permutation(len(images))
    return (images[order] / np.float32(largest)).astype(np.float32), labels[order].astype(np.int32)


def mlp() -> Problem:
    """Two hidden layers of 200."""
    images, labels = (np.asarray(x) for x in load_digits(return_X_y=True))
    x, y = shuffled(images, labels, 16)
    network = models.FullyConnected((200, 200), 10)
    return Problem(network, (x[:1000], y[:1000]), (x[1000:], y[1000:]), 50, 40)


def cnn() -> Problem:
    """A part of the 10,000 test images of MNIST."""
    x, y = shuffled(*data.mnist_test(), 255)
    test = x[2048 : 2048 + NUM_TEST], y[2048 : 2048 + NUM_TEST]
    return Problem(Convolutions(), (x[:2048], y[:2048]), test, 64, 8)


PROBLEMS = {"mlp": mlp, "cnn": cnn}


def run(cell: records.Cell) -> records.Record:
    """One chain from the weights of one network, with one prior."""
    problem = PROBLEMS[cell["network"]]()
    num_data, seed = len(problem.train[0]), cell["seed"]

    def logits_of(params, inputs) -> Any:
        return problem.network.apply(params, inputs)

    def loss(params, batch):
        logits = logits_of(params, batch[0])
        return optax.losses.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    trained = optax_smile.warmstart(
        loss,
        lambda key: problem.network.init(key, problem.train[0][:1]),
        data.Batches(problem.train, problem.batch_size, seed),
        optax.sgd(0.01, momentum=0.9),
        num_members=1,
        num_epochs=problem.num_epochs,
        key=seed,
        progress=False,
    )
    weights = jax.tree.map(lambda x: x[0], trained)
    found, began = None, time.perf_counter()
    if cell["prior"] == "local":
        passes = data.Batches(problem.train, 256, 200 + seed)
        options = {"num_data": num_data, "key": seed, "progress": False}
        found = optax_smile.local.local_precision(loss, weights, list(passes), **options)
    searched = time.perf_counter() - began
    plain = optax_smile.psmile(num_data=num_data, key=seed)
    chosen = plain if found is None else found.sampler(key=seed)
    tx = optax.with_extra_args_support(chosen)

    @jax.jit
    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def judge(params):
        logits = logits_of(params, problem.test[0])
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, problem.test[1])
        return -losses, loss(params, problem.train)

    start, start_train = (np.asarray(x, float) for x in judge(weights))
    kept: dict[int, list[Any]] = {calls: [] for calls in cell["calls"]}
    params, state = weights, tx.init(weights)
    sampling = data.Batches(problem.train, problem.batch_size, 100 + seed)
    for call in range(1, max(kept) + 1):
        params, state = step(params, state, sampling[call - 1])
        due = [n for n in kept if n / 2 < call <= n and call % CALLS[n] == 0]
        if due:
            seen = [np.asarray(x, float) for x in judge(optax_smile.last_accepted(state, params))]
            for calls in due:
                kept[calls].append(seen)
    rows = {}
    for calls, seen in kept.items():
        density, train = (np.stack(x) for x in zip(*seen, strict=True))
        average = np.logaddexp.reduce(density, axis=0) - np.log(len(density))
        rows[str(calls)] = {
            "gain": float((average - start).mean()),
            "gain_error": float((average - start).std() / np.sqrt(len(start))),
            "excess": float(start.mean() - density.mean()),
            "train_excess": float(train.mean() - start_train),
        }
    return {
        "num_parameters": sum(x.size for x in jax.tree.leaves(weights)),
        "num_data": num_data,
        "precision": 1.0 if found is None else found.prior_precision,
        "searched_excess": None if found is None else float(found.excess[found.best]),
        "runs": 0 if found is None else len(found.precisions),
        "search_seconds": searched,
        "start_loss": float(-start.mean()),
        "start_train": float(start_train),
        "calls": rows,
    }


def main():
    """Run the cells that are missing."""
    parser = records.parser(__doc__)
    parser.add_argument("--networks", nargs="+", default=list(PROBLEMS), choices=PROBLEMS)
    parser.add_argument("--calls", nargs="+", type=int, default=list(CALLS), choices=list(CALLS))
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    cells = [
        {"network": network, "prior": prior, "seed": seed, "calls": calls}
        for network in arguments.networks
        for seed in range(arguments.seeds)
        for prior, calls in (("local", arguments.calls), ("N(0, 1)", [64, 1_000]))
    ]
    records.complete(arguments, cells, run, "calls")


if __name__ == "__main__":
    main()
