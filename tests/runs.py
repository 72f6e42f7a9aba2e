"""A small regression and runs of it, for the tests of `sample`, and chains by hand."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_smile

CHAINS, NUM_DATA, DRAWS, THIN, WARMUP = 3, 140, 4, 3, 2
STEPS = WARMUP + DRAWS * THIN


def regression(count: int = 7, size: int = 20) -> list[Any]:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(count, size, 2)).astype(np.float32)
    y = (x.sum(axis=-1) + generator.normal(size=(count, size))).astype(np.float32)
    return list(zip(x, y, strict=True))


def own_batches(count: int = 7) -> list[Any]:
    """A batch for each chain, along a leading axis."""
    rows = regression(count * CHAINS)
    groups = [rows[i : i + CHAINS] for i in range(0, len(rows), CHAINS)]
    return [jax.tree.map(lambda *x: np.stack(x), *group) for group in groups]


def mean_loss(params, batch):
    x, y = batch
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2) / 2


def start() -> Any:
    return {"w": jnp.arange(2.0 * CHAINS).reshape(CHAINS, 2) / 10, "b": jnp.zeros(CHAINS)}


def quiet(step_size: Any = 0.02, **arguments):
    """A sampler without noise."""
    arguments = {"decoherence_length": None, "num_data": NUM_DATA, **arguments}
    return optax_smile.smile(step_size, **arguments)


def noisy(step_size: Any = 0.02, **arguments):
    """A sampler with a random number for each step."""
    return quiet(step_size, decoherence_length=0.1, key=5, **arguments)


def run(directory: Any = None, loss=mean_loss, params=None, sampler=None, **arguments):
    """Sample, with a checkpoint at the start and at the end unless asked for others."""
    defaults: dict[str, Any] = {
        "num_warmup": WARMUP,
        "num_draws": DRAWS,
        "thin": THIN,
        "key": 0,
        "progress": False,
        "checkpoint_minutes": 60,
    }
    return optax_smile.sample(
        loss,
        start() if params is None else params,
        arguments.pop("batches", regression()),
        noisy() if sampler is None else sampler,
        directory=directory,
        **defaults | arguments,
    )


class Crash(Exception):
    """What a test throws into a run."""


def crash_at(at: int):
    def callback(step, stats):
        if step == at:
            raise Crash

    return callback


def signal_at(at: int, *numbers: signal.Signals):
    def callback(step, stats):
        if step == at:
            for number in numbers:
                os.kill(os.getpid(), number)

    return callback


def refuse(*_, **__):
    raise AssertionError("this must not be called")


def copy(directory: Path, to: Path) -> Path:
    return Path(shutil.copytree(directory, to / "copy"))


def content_of(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file() and path.name[0] != ".")
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def assert_same_bits(actual: Any, expected: Any):
    """Draws and their trace, bit for bit."""
    for mine, other in ((actual.params, expected.params), (actual.trace, expected.trace)):
        assert jax.tree.structure(mine) == jax.tree.structure(other)
        for x, y in zip(jax.tree.leaves(mine), jax.tree.leaves(other), strict=True):
            assert (x.shape, x.dtype, x.tobytes()) == (y.shape, y.dtype, y.tobytes())


def follow(tx, key, params, gradient, calls, see=None, **given) -> Any:
    """Draws `[call, ...]` of a chain with `gradient(params, call)`, or `see(state, draw, updates)`.

    Compiled as one program; `given` goes to `update`.
    """
    state: Any = optax.tree.set(tx.init(params), key=jax.random.key_data(key))

    def step(carry, call):
        params, state = carry
        updates, state = tx.update(gradient(params, call), state, params, **given)
        params = optax.apply_updates(params, updates)
        draw = optax_smile.last_accepted(state, params)
        return (params, state), draw if see is None else see(state, draw, updates)

    return jax.lax.scan(step, (params, state), calls)[1]
