"""Draws around trained weights of networks with far more parameters than data.

A perceptron on scikit-learn's digits (d = 55,210, N = 1,000) and a convolutional network on MNIST
(d = 52,186, N = 2,048, images of $OPTAX_SMILE_DATA), trained by SGD with momentum. For each seed:
`local_precision` by its defaults, then one chain from the weights with its precision; and, for
comparison, 1,000 calls of `psmile` by its defaults, with the prior N(0, 1). LPPD of the average
over the last half of the first 64, 1,000 and 10,000 calls on test images, loss of single draws, and
of the weights. Batches of 50 and 64 without replacement, in the same order for every run.

    python benchmarks/prediction/local.py --output benchmarks/results/local.jsonl
"""

import gzip
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import records

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import optax_smile

NUM_TEST = 2_000
CALLS = {64: 1, 1_000: 10, 10_000: 50}
SEEDS = 3


class Problem(NamedTuple):
    """A network and its data."""

    init: Callable[[jax.Array], Any]
    apply: Callable[[Any, Any], jax.Array]
    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    batch_size: int
    epochs: int
    learning_rate: float


def dense(key: jax.Array, inputs: int, outputs: int) -> dict[str, jax.Array]:
    """Weights of a layer by LeCun's rule."""
    scale = np.sqrt(1 / inputs)
    return {"w": scale * jax.random.normal(key, (inputs, outputs)), "b": jnp.zeros(outputs)}


def linear(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """A dense layer."""
    return x @ layer["w"] + layer["b"][None]


def mlp() -> Problem:
    """Two hidden layers of 200."""
    digits: Any = load_digits()
    x, y = digits.data, digits.target
    order = np.random.default_rng(0).permutation(len(x))
    x, y = (x[order] / 16).astype(np.float32), y[order].astype(np.int32)

    def init(key):
        widths = [(64, 200), (200, 200), (200, 10)]
        return [dense(k, *w) for k, w in zip(jax.random.split(key, 3), widths, strict=True)]

    def apply(params, x):
        for layer in params[:-1]:
            x = jax.nn.relu(linear(layer, x))
        return linear(params[-1], x)

    return Problem(init, apply, (x[:1000], y[:1000]), (x[1000:], y[1000:]), 50, 40, 0.01)


def read(path: Path, offset: int) -> np.ndarray:
    """Bytes of a file of the MNIST format."""
    return np.frombuffer(gzip.open(path).read(), np.uint8, offset=offset)


def cnn() -> Problem:
    """Two convolutions, each normalised over a batch's images, and a hidden layer of 64."""
    folder = os.environ.get("OPTAX_SMILE_DATA")
    if folder is None:
        raise SystemExit("cnn: set OPTAX_SMILE_DATA to the folder with mnist/ (10,000 images).")
    mnist = Path(folder) / "mnist"
    x = read(mnist / "t10k-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28, 1) / np.float32(255)
    y = read(mnist / "t10k-labels-idx1-ubyte.gz", 8).astype(np.int32)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], y[order]

    def convolution(key, inputs, outputs):
        kernel = jax.random.normal(key, (3, 3, inputs, outputs)) / np.sqrt(9 * inputs)
        zeros = jnp.zeros(outputs)
        return {"w": kernel, "b": zeros, "scale": jnp.ones(outputs), "shift": zeros}

    def init(key):
        keys = jax.random.split(key, 4)
        convolutions = [convolution(keys[0], 1, 8), convolution(keys[1], 8, 16)]
        return convolutions, [dense(keys[2], 784, 64), dense(keys[3], 64, 10)]

    def block(layer, x):
        axes = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, layer["w"], (1, 1), "SAME", dimension_numbers=axes)
        mean, variance = (f(x, (0, 1, 2), keepdims=True) for f in (jnp.mean, jnp.var))
        x = (x - mean) * jax.lax.rsqrt(variance + 1e-5)
        x = jax.nn.relu(x * layer["scale"][None, None, None] + layer["shift"][None, None, None])
        images, height, width, channels = x.shape
        return x.reshape(images, height // 2, 2, width // 2, 2, channels).mean((2, 4))

    def apply(params, x):
        convolutions, (hidden, last) = params
        for layer in convolutions:
            x = block(layer, x)
        return linear(last, jax.nn.relu(linear(hidden, x.reshape(len(x), -1))))

    test = x[2048 : 2048 + NUM_TEST], y[2048 : 2048 + NUM_TEST]
    return Problem(init, apply, (x[:2048], y[:2048]), test, 64, 8, 0.01)


class Batches(NamedTuple):
    """Passes through the data in an order of their own, the same for each of several readers."""

    arrays: tuple[np.ndarray, np.ndarray]
    size: int
    seed: int
    passes: int

    def __iter__(self) -> Iterator[Any]:
        rng, number = np.random.default_rng(self.seed), len(self.arrays[0])
        for _ in range(self.passes):
            order = rng.permutation(number)
            for first in range(0, number - self.size + 1, self.size):
                rows = order[first : first + self.size]
                yield tuple(x[rows] for x in self.arrays)


def fit(problem: Problem, loss: Callable, seed: int) -> Any:
    """Train one network by SGD with momentum."""
    params, tx = problem.init(jax.random.key(seed)), optax.sgd(problem.learning_rate, momentum=0.9)

    @jax.jit
    def step(params, state, batch):
        updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for batch in Batches(problem.train, problem.batch_size, seed, problem.epochs):
        params, state = step(params, state, batch)
    return params


def run(cell: dict[str, Any]) -> dict[str, Any]:
    """One chain from the weights of one network, with one prior."""
    problem = {"mlp": mlp, "cnn": cnn}[cell["network"]]()
    num_data, seed = len(problem.train[0]), cell["seed"]

    def loss(params, batch):
        logits = problem.apply(params, batch[0])
        return optax.losses.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    weights = fit(problem, loss, seed)
    found, began = None, time.perf_counter()
    if cell["prior"] == "local":
        passes = Batches(problem.train, 256, 200 + seed, 1)
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
        logits = problem.apply(params, problem.test[0])
        log_density = jnp.take_along_axis(jax.nn.log_softmax(logits), problem.test[1][:, None], 1)
        return log_density[:, 0], loss(params, problem.train)

    start, start_train = (np.asarray(x, float) for x in judge(weights))
    kept: dict[int, list[Any]] = {calls: [] for calls in cell["calls"]}
    params, state = weights, tx.init(weights)
    sampling = Batches(problem.train, problem.batch_size, 100 + seed, 10_000)
    for call, batch in enumerate(sampling, 1):
        params, state = step(params, state, batch)
        due = [n for n in kept if n / 2 < call <= n and call % CALLS[n] == 0]
        if due:
            seen = [np.asarray(x, float) for x in judge(optax_smile.last_accepted(state, params))]
            for calls in due:
                kept[calls].append(seen)
        if call == max(kept):
            break
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


if __name__ == "__main__":
    parser = records.parser(__doc__)
    parser.add_argument("--networks", nargs="+", default=["mlp", "cnn"], choices=["mlp", "cnn"])
    parser.add_argument("--calls", nargs="+", type=int, default=list(CALLS), choices=list(CALLS))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    arguments = parser.parse_args()
    cells = [
        {"network": network, "prior": prior, "seed": seed, "calls": calls}
        for network in arguments.networks
        for seed in range(arguments.seeds)
        for prior, calls in (("local", arguments.calls), ("N(0, 1)", [x for x in CALLS if x < 9e3]))
    ]
    records.complete(arguments, cells, run, told="calls")
