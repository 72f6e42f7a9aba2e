r"""Two networks that a laptop can sample: LeNet on Fashion-MNIST and a small GPT on Shakespeare.

Two chains from a short AdamW ensemble, one compiled step per call (convolutions are slower inside a
compiled loop on CPUs), spread over the devices. A cell is one task, seed, method and step size: one
JSON line in the output, and cells that the file already holds are skipped; so is the training of an
ensemble that lies in the folder `--ensembles`. The seed is that of ensemble, batches and chains.

    lenet   61,706 parameters, 4 epochs of AdamW, then 2,400 gradients on batches of 256 images
    gpt     418,688 parameters: 2 layers, 128 wide, context 64, characters; 12 epochs of AdamW,
            then 1,200 gradients on 64 pieces

    JAX_NUM_CPU_DEVICES=2 python benchmarks/lenet_small.py --task gpt --ensembles out/ensembles \
        --output out/lenet_small.jsonl
"""

import functools
import gzip
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import records
from models import GPT, LeNet
from tabulated.lenet import cells as shown
from tabulated.table import markdown

import optax_smile

CHAINS, DRAWS, WARMUP = 2, 32, 1 / 3
NUM_GRADIENTS = {"lenet": 2_400, "gpt": 1_200}
NUM_EPOCHS = {"lenet": 4, "gpt": 12}
MEAN, STD = 0.2860, 0.3530
CONTEXT = 64


class Task(NamedTuple):
    """Data and network.

    Attributes:
        network: of Flax.
        train: inputs and targets.
        test: the same.
        num_data: examples, or tokens.
        likelihood: see `predict`.
        optimizer: of the ensemble, as a function of the number of its steps.
        batch_size: of the ensemble.
        sampling_batch_size: of the chains.
    """

    network: nn.Module
    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    num_data: int
    likelihood: str
    optimizer: Callable[[int], optax.GradientTransformation]
    batch_size: int
    sampling_batch_size: int


def lenet() -> Task:
    """Fashion-MNIST."""
    folder = Path(os.environ["OPTAX_SMILE_DATA"]) / "fashion_mnist"

    def read(part: str):
        images, labels = (
            np.frombuffer(gzip.decompress((folder / f"{part}-{name}.gz").read_bytes()), np.uint8)
            for name in ("images-idx3-ubyte", "labels-idx1-ubyte")
        )
        images = images[16:].reshape(-1, 28, 28, 1) / 255
        return ((images - MEAN) / STD).astype(np.float32), labels[8:].astype(np.int32)

    train = read("train")

    def optimizer(num_steps: int) -> optax.GradientTransformation:
        return optax.adamw(1e-3, weight_decay=0.02)

    return Task(LeNet(), train, read("t10k"), len(train[0]), "categorical", optimizer, 64, 256)


def gpt() -> Task:
    """Characters of modern-English Shakespeare: 90 % to train, the last 5 % to test."""
    folder = Path(os.environ["OPTAX_SMILE_DATA"])
    text = (folder / "text" / "modern_shakespeare.txt").read_text(encoding="utf-8")
    characters, tokens = np.unique(list(text), return_inverse=True)

    def pieces(part):
        rows = part[: (len(part) - 1) // CONTEXT * CONTEXT + 1].astype(np.int32)
        return rows[:-1].reshape(-1, CONTEXT), rows[1:].reshape(-1, CONTEXT)

    train = pieces(tokens[: int(0.9 * len(tokens))])
    test = pieces(tokens[int(0.95 * len(tokens)) :])

    def optimizer(num_steps: int) -> optax.GradientTransformation:
        rate = optax.warmup_cosine_decay_schedule(0, 3e-3, num_steps // 20, num_steps, 1e-4)
        return optax.adamw(rate, b2=0.95, weight_decay=0.05)

    network = GPT(len(characters), context=CONTEXT, features=128, depth=2, num_heads=4)
    return Task(network, train, test, train[0].size, "tokens", optimizer, 64, 64)


TASKS = {"lenet": lenet, "gpt": gpt}


class Batches:
    """Epochs without replacement."""

    def __init__(self, data: tuple[np.ndarray, ...], size: int, seed: int):
        self.data, self.size, self.generator = data, size, np.random.default_rng(seed)

    def __len__(self) -> int:
        return len(self.data[0]) // self.size

    def __iter__(self) -> Iterator[Any]:
        order = self.generator.permutation(len(self.data[0]))
        for start in range(0, len(order) - self.size + 1, self.size):
            yield tuple(array[order[start : start + self.size]] for array in self.data)


def make_psmile(step_size, num_data, key, **options) -> Any:
    """PSMILE, which finds its step size."""
    return optax_smile.psmile(step_size, num_data=num_data, key=key, **options)


METHODS = {
    "psmile": make_psmile,
    "psmile, angle .01": functools.partial(make_psmile, tuner=optax_smile.angle_tuner(0.01)),
    "psmile, angle .04": functools.partial(make_psmile, tuner=optax_smile.angle_tuner(0.04)),
    "psmile, angle .05": functools.partial(make_psmile, tuner=optax_smile.angle_tuner(0.05)),
    "psmile, no explicit noise": functools.partial(make_psmile, decoherence_length=None),
    "psmile published": lambda step_size, num_data, key: optax_smile.published.psmile(
        step_size, num_data=num_data
    ),
    "psmile_naive": lambda step_size, num_data, key: optax_smile.psmile_naive(
        step_size, num_data=num_data
    ),
    "sgld": lambda step_size, num_data, key: optax_smile.sgld(
        step_size, num_data=num_data, key=key
    ),
    "scale_adapted_sghmc": lambda step_size, num_data, key: optax_smile.scale_adapted_sghmc(
        step_size, num_data=num_data, adapt_steps=600, key=key
    ),
}
ALL = ("deep ensemble", *METHODS)


def over_devices() -> jax.sharding.Mesh | None:
    """All devices, if the chains divide among them."""
    count = jax.device_count()
    if count == 1 or CHAINS % count:
        return None
    return jax.make_mesh((count,), ("chain",), axis_types=(jax.sharding.AxisType.Auto,))


@functools.cache
def warm(
    name: str, seed: int, num_epochs: int, ensembles: Path | None
) -> tuple[Task, Any, Any, Any]:
    """Task, deep ensemble, outputs and loss."""
    task = TASKS[name]()

    def outputs_of(params, inputs) -> Any:
        return task.network.apply(params, inputs)

    def mean_loss(params, batch):
        inputs, targets = batch
        logits = outputs_of(params, inputs)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets))

    batches = Batches(task.train, task.batch_size, 2 * seed)
    members = optax_smile.warmstart(
        mean_loss,
        lambda key: task.network.init(key, task.train[0][:1]),
        batches,
        task.optimizer(num_epochs * len(batches)),
        num_members=CHAINS,
        num_epochs=num_epochs,
        key=jax.random.key(2 * seed),
        mesh=over_devices(),
        directory=ensembles and ensembles / f"{name}_{num_epochs}_{seed}",
        progress=False,
    )
    return task, members, outputs_of, mean_loss


def run_cell(cell: dict[str, Any], ensembles: Path | None) -> dict[str, Any]:
    """Sample and score on the test data."""
    seed = cell["seed"]
    task, members, outputs_of, mean_loss = warm(cell["task"], seed, cell["num_epochs"], ensembles)
    told: dict[str, Any] = {}
    draws: Any = optax_smile.Snapshots.from_members(members)
    if cell["method"] in METHODS:
        begun, key = time.monotonic(), jax.random.key(2 * seed + 1)
        sampler = METHODS[cell["method"]](cell["step_size"], task.num_data, key)
        is_published = cell["method"] == "psmile published"
        num_steps = cell["num_gradients"] // (2 if is_published else 1)
        num_warmup = round(num_steps * WARMUP)
        draws = optax_smile.sample(
            mean_loss,
            members,
            Batches(task.train, task.sampling_batch_size, 2 * seed + 1),
            sampler,
            num_warmup=num_warmup,
            num_draws=DRAWS,
            thin=(num_steps - num_warmup) // DRAWS,
            batch_per="step" if is_published else "call",
            key=key,
            mesh=over_devices(),
            progress=False,
        )
        steps = np.median(draws.trace["step_size"], axis=0)
        told = {
            "seconds": time.monotonic() - begun,
            "steps": [float(steps[int(part * len(steps))]) for part in (0.15, 0.5, 0.95)],
            "num_rejected": int(np.sum(draws.trace["num_rejected"][:, -1])),
        }
    inputs, targets = task.test
    arguments = {"likelihood": task.likelihood, "targets": targets, "batch_size": 500}
    try:
        found = optax_smile.predict(outputs_of, draws, inputs, per="chain", **arguments)
    except ValueError as error:
        return told | {"lppd": float("-inf"), "error": str(error)}
    lppd = float(np.mean(found.log_density))
    told |= {"lppd": lppd, "perplexity": float(np.exp(-lppd))}
    told["chain_lppd"] = np.mean(found.each.log_density.reshape(CHAINS, -1), axis=1).tolist()
    if found.mean is not None:
        told["accuracy"] = float(np.mean(np.argmax(found.mean, axis=-1) == targets))
    return told


def main():
    """Run the cells that are missing, print the table."""
    parser = records.parser(__doc__)
    parser.add_argument("--task", choices=TASKS, default="lenet")
    parser.add_argument("--methods", nargs="+", choices=ALL, default=["deep ensemble", "psmile"])
    parser.add_argument("--step-sizes", nargs="+", type=float, default=[None])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-epochs", type=int, help="of the ensemble, instead of the task's")
    parser.add_argument("--num-gradients", type=int, help="per chain, instead of the task's")
    parser.add_argument("--ensembles", type=Path, help="folder that keeps the trained ensembles")
    arguments = parser.parse_args()
    task = arguments.task
    cells = [
        {
            "task": task,
            "method": method,
            "step_size": step_size,
            "seed": arguments.seed,
            "num_epochs": arguments.num_epochs or NUM_EPOCHS[task],
            "num_gradients": arguments.num_gradients or NUM_GRADIENTS[task],
        }
        for method in arguments.methods
        for step_size in (arguments.step_sizes if method in METHODS else [None])
    ]
    run = functools.partial(run_cell, ensembles=arguments.ensembles)
    found = records.complete(arguments, cells, run, "lppd")
    print(markdown(shown(found)))


if __name__ == "__main__":
    main()
