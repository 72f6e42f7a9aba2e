"""Where default chains arrive from starts near and far, and whether diagnostics report it.

A regression of five parameters (the first block of the README), the network of `uci.py` on energy,
that of the quickstart on digits; chains start at a mode, at AdamW weights, at a fresh
initialization, ten times that, and at zeros. There is no warm-up: the whole path is recorded.

    export OPTAX_SMILE_DATA=path/to/data
    python benchmarks/correctness/starts.py --output benchmarks/results/starts.jsonl
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks import records, samplers
from benchmarks.prediction import uci
from benchmarks.tabulated.starts import cells as shown

import jax
import jax.numpy as jnp
import numpy as np
import optax
import quickstart

import optax_smile

NUM_CHAINS, NUM_GRADIENTS, THIN = 8, 20_000, 100
# Numbers of gradients after which `on_its_way` is recorded.
ASKED = (400, 2_000, NUM_GRADIENTS)
FIT_RATE, MODE_STEPS = 1e-2, 5_000


class Problem(NamedTuple):
    """What is sampled.

    Attributes:
        init: fresh parameters from a key.
        mean_loss: of parameters and batch.
        train: features and targets.
        batch_size: of the sampler.
        num_epochs: of AdamW.
    """

    init: Callable[[jax.Array], Any]
    mean_loss: Callable[..., jax.Array]
    train: tuple[Any, Any]
    batch_size: int
    num_epochs: int


def linear() -> Problem:
    """First block of the README."""
    features = jax.random.normal(jax.random.key(0), (500, 4))
    targets = features @ jnp.array([1.0, -2.0, 0.5, 0.0])

    def init(key):
        return {"w": jax.random.normal(key, (4,)), "b": jnp.zeros(())}

    def mean_loss(params, batch):
        x, y = batch
        return jnp.mean((x @ params["w"] + params["b"] - y) ** 2) / 2

    return Problem(init, mean_loss, (np.asarray(features), np.asarray(targets)), 100, 200)


def energy() -> Problem:
    """UCI energy, first published split, of which the network learns sigma, too."""
    train = uci.load("energy", 0)[0]

    def init(key):
        return uci.NETWORK.init(key, train[0][:1])

    return Problem(init, uci.mean_loss, train, uci.BATCH_SIZE, 200)


def digits() -> Problem:
    """Quickstart, seed 0."""
    config = quickstart.Config()
    train, network = quickstart.load(config.seed)[0], quickstart.Network(config.width)

    def mean_loss(params, batch):
        logits: Any = network.apply(params, batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    def init(key):
        return network.init(key, train[0][:1])

    return Problem(init, mean_loss, train, config.sampling_batch_size, config.num_epochs)


PROBLEMS = {"README": linear, "energy": energy, "digits": digits}
STARTS = ("mode", "AdamW", "fresh", "ten times fresh", "zeros")


def energy_of(problem: Problem, params: Any) -> jax.Array:
    """U of all data with the standard normal prior, in nats."""
    squares = sum(jnp.sum(x**2) for x in jax.tree.leaves(params))
    return len(problem.train[0]) * problem.mean_loss(params, problem.train) + squares / 2


def start_of(problem: Problem, name: str) -> Any:
    """Parameters of all chains `[chain, ...]`."""
    keys = jax.random.split(jax.random.key(1), NUM_CHAINS)
    fresh = jax.vmap(problem.init)(keys)
    if name == "fresh":
        return fresh
    if name in ("ten times fresh", "zeros"):
        return jax.tree.map(lambda x: x * (10 if name != "zeros" else 0), fresh)
    if name == "AdamW":
        return optax_smile.warmstart(
            problem.mean_loss,
            problem.init,
            uci.batches_of(problem.train, 64, 1),
            optax.adamw(FIT_RATE),
            num_members=NUM_CHAINS,
            num_epochs=problem.num_epochs,
            key=jax.random.key(1),
            progress=False,
        )
    optimizer = optax.adam(optax.cosine_decay_schedule(FIT_RATE, MODE_STEPS))

    def step(carry, _):
        params, state = carry
        updates, state = optimizer.update(
            jax.grad(lambda x: energy_of(problem, x))(params), state, params
        )
        return (optax.apply_updates(params, updates), state), None

    def descend(params):
        return jax.lax.scan(step, (params, optimizer.init(params)), length=MODE_STEPS)[0][0]

    return jax.jit(jax.vmap(descend))(fresh)


def run(cell: records.Cell) -> records.Record:
    """Sample, and follow the energy."""
    problem = PROBLEMS[cell["problem"]]()
    start = start_of(problem, cell["start"])
    energies_of = jax.jit(jax.vmap(lambda params: energy_of(problem, params)))
    first = np.asarray(energies_of(start))
    num_data = len(problem.train[0])
    draws = optax_smile.sample(
        problem.mean_loss,
        start,
        uci.batches_of(problem.train, problem.batch_size, 50),
        samplers.build(cell["sampler"], num_data=num_data, key=0),
        num_warmup=0,
        num_draws=NUM_GRADIENTS // THIN,
        thin=THIN,
        steps_per_dispatch=THIN,
        key=jax.random.key(2),
        progress=False,
    )
    params: Any = draws.params
    energies = np.asarray(jax.vmap(energies_of)(params))
    shares = np.asarray(draws.trace["on_its_way"])
    last = energies[:, -energies.shape[1] // 4 :]
    return {
        "start_energy": float(np.median(first)),
        "energy": np.median(last, axis=1).tolist(),
        "num_parameters": sum(x.size for x in jax.tree.leaves(start)) // NUM_CHAINS,
        "on_its_way": [float(np.mean(shares[:, asked // THIN - 1])) for asked in ASKED],
        "is_told": "still on its way" in str(optax_smile.diagnostics.summary(draws)),
    }


if __name__ == "__main__":
    axes = {"problem": PROBLEMS, "sampler": ("psmile", "smile"), "start": STARTS}
    records.main(__doc__, run, "on_its_way", shown, **axes)
