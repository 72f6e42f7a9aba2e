"""A small regression and runs of it, for the tests of `sample`, and chains by hand."""

import os
import signal
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_smile

CHAINS, NUM_DATA, DRAWS, THIN, WARMUP = 3, 140, 4, 3, 2
STEPS = WARMUP + DRAWS * THIN


def regression(count: int = 7, size: int = 20) -> list[Any]:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(count, size, 2)).astype(np.float32)
    y = (x.sum(axis=-1) + generator.normal(size=(count, size))).astype(np.float32)
    return list(zip(x, y, strict=True))


def aligned(*shape: int) -> np.ndarray:
    """Memory that JAX uses without a copy."""
    memory = np.zeros(np.prod(shape) + 16, np.float32)
    return memory[-memory.ctypes.data // 4 % 16 :][: np.prod(shape)].reshape(shape)


class Reused:
    """Batches that can be read again, all in the same memory, which is spoilt after each pass."""

    def __init__(self, batches, memory: Any = None):
        self.batches = batches
        self.memory = jax.tree.map(np.array, batches[0]) if memory is None else memory

    def __iter__(self):
        for batch in [*self.batches, jax.tree.map(lambda x: x * np.nan, self.batches[0])]:
            jax.tree.map(np.copyto, self.memory, batch)
            if not np.isnan(jax.tree.leaves(batch)[0]).any():
                yield self.memory


class Shuffled:
    """Batches of some rows, in another order in each pass unless `order` gives that of one."""

    def __init__(self, data, size: int, order: Any = None):
        self.data, self.size, self.random = data, size, np.random.default_rng(0)
        number = len(jax.tree.leaves(data)[0])
        self.order = order or (lambda: self.random.permutation(number))

    def __iter__(self):
        order = self.order()
        for first in range(0, len(order), self.size):
            rows = order[first : first + self.size]
            yield jax.tree.map(lambda x, rows=rows: np.asarray(x)[rows], self.data)


class Tensor:
    """An object that `np.asarray` converts: a data frame, or a tensor with its own dtype."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, "float"

    def __array__(self, dtype=None, copy=None):
        return np.array(self.array, dtype)

    def __getitem__(self, rows):
        return Tensor(self.array[rows])


def posterior(x, y) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of the weights of a linear regression with unit noise and prior."""
    x, y = np.asarray(x, float), np.asarray(y, float)
    covariance = np.linalg.inv(x.T @ x + np.eye(x.shape[1]))
    return covariance @ x.T @ y, covariance


def own_batches(count: int = 7) -> list[Any]:
    """A batch for each chain, along a leading axis."""
    x, y = (np.stack(part) for part in zip(*regression(count * CHAINS), strict=True))
    return list(zip(x.reshape(count, CHAINS, -1, 2), y.reshape(count, CHAINS, -1), strict=True))


def mean_loss(params, batch):
    x, y = batch
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2) / 2


def start() -> Any:
    return {"w": jnp.arange(2.0 * CHAINS).reshape(CHAINS, 2) / 10, "b": jnp.zeros(CHAINS)}


def quiet(step_size: Any = 0.02, **arguments):
    """A sampler without noise."""
    arguments = {"decoherence_length": None, "num_data": NUM_DATA, **arguments}
    return optax_smile.smile(step_size, **arguments)


def sghmc():
    """A sampler whose state has a momentum and a key; half of what that of `smile` costs."""
    return optax_smile.sghmc(1e-3, num_data=NUM_DATA, key=5)


class StubState(NamedTuple):
    """Number of calls, and the key that each chain gets of its own."""

    num_gradients: jax.Array
    key: jax.Array
    gradients_per_step = 1

    def stats(self) -> optax_smile.Stats:
        return optax_smile.Stats.of(self.num_gradients)

    def last_accepted(self, params: Any) -> Any:
        return params

    def last_received(self):
        return None


class TwoGradients(StubState):
    gradients_per_step = 2


class Exploring(StubState):
    """Half of the time: three of six steps give no draws."""

    def stats(self) -> optax_smile.Stats:
        return super().stats()._replace(is_draw=self.num_gradients % 6 >= 3)


def stub(step_size: float = 0.1, noise: float = 1.0, kind: Any = StubState) -> Any:
    """Descent with noise: by far the cheapest to compile, for tests that are not about samplers."""

    def init(params):
        return kind(jnp.zeros((), jnp.int32), jax.random.key_data(jax.random.key(0)))

    def update(updates, state, params=None, **_):
        count = optax.safe_increment(state.num_gradients)
        push = noise * jnp.sin((state.key[-1] % 997).astype(float) + count)
        updates = jax.tree.map(lambda g: step_size * (push - g), updates)
        return updates, state._replace(num_gradients=count)

    return optax.GradientTransformationExtraArgs(init, update)


class Watched:
    """Batches that can be read again; `callback` gets the number of each before it is read."""

    def __init__(self, batches, callback):
        self.batches, self.callback, self.number = batches, callback, 0

    def __iter__(self):
        for batch in self.batches:
            self.number += 1
            self.callback(self.number)
            yield batch


def run(directory: Any = None, loss=mean_loss, params=None, sampler=None, **arguments):
    """Sample, with a checkpoint at the start and at the end unless asked for others."""
    defaults: dict[str, Any] = {"num_warmup": WARMUP, "num_draws": DRAWS, "thin": THIN, "key": 0}
    defaults |= {"progress": False, "checkpoint_minutes": 60}
    params, sampler = params or start(), sampler or stub()
    batches = arguments.pop("batches", regression())
    if callback := arguments.pop("callback", None):
        batches = Watched(batches, callback)
    given = defaults | arguments
    return optax_smile.sample(loss, params, batches, sampler, directory=directory, **given)


def begin(directory: Any = None, loss=mean_loss, params=None, sampler=None, **arguments):
    """The same as a run that advances on request."""
    given = {"key": 0, "checkpoint_minutes": 60, "batches": regression(), **arguments}
    if callback := given.pop("callback", None):
        given["batches"] = Watched(given["batches"], callback)
    what: Any = loss, params or start(), given.pop("batches"), sampler or stub()
    return optax_smile.Run(*what, directory=directory, **given)


def train(directory: Any = None, loss=mean_loss, batches=None, optimizer=None, **arguments) -> Any:
    """Train two members."""

    def init(key):
        return {"w": jax.random.normal(key, (2,)), "b": jnp.zeros(())}

    given = {"num_members": 2, "num_epochs": 2, "key": 0, "progress": False, **arguments}
    what: Any = loss, init, batches or regression(), optimizer or optax.adam(0.1)
    return optax_smile.warmstart(*what, directory=directory, **given)


def refused(message: str, function, *given, **arguments):
    """Call, and require a ValueError that says so."""
    with pytest.raises(ValueError, match=message):
        function(*given, **arguments)


def warned(message: str, function, *given, **arguments):
    """Call, and require a warning that says so."""
    with pytest.warns(UserWarning, match=message):
        return function(*given, **arguments)


def said(function, *given, **arguments) -> list[str]:
    """Call, and return what all warnings say."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        function(*given, **arguments)
    return [str(each.message) for each in seen]


def nightly(*case):
    """A case of a test that has a cheaper representative."""
    return pytest.param(*case, marks=pytest.mark.nightly)


class Crash(Exception): ...


def crash(*_, **__):
    raise Crash


def send(*numbers: signal.Signals):
    return lambda: [os.kill(os.getpid(), number) for number in numbers]


def at(number: int, happens):
    """A callback that does something where the batch of a gradient is read."""
    return lambda now: happens() if now == number else None


def checkpoints_in(directory: Path) -> list[int]:
    """Numbers of gradients of the checkpoints."""
    return sorted({int(file.name[11:21]) for file in directory.glob("checkpoint-*.part-*")})


DAMAGES = "flip", "cut", "lengthen", "blank", "delete", "swap"


def hurt(kind: str, files: list[Path], generator: np.random.Generator) -> list[Path]:
    """Change the content of a file, delete it, or swap it with another, and return which."""
    file, other = (files[generator.integers(len(files))] for _ in range(2))
    mine, theirs = file.read_bytes(), other.read_bytes()
    at, bit = generator.integers(len(mine)), 1 << generator.integers(8)
    contents = {
        "flip": mine[:at] + bytes([mine[at] ^ bit]) + mine[at + 1 :],
        "cut": mine[:at],
        "lengthen": mine + generator.bytes(int(generator.integers(1, 100))),
        # Like a disk that has lost a sector.
        "blank": mine[:at] + bytes(len(mine[at : at + 64])) + mine[at + 64 :],
        "swap": theirs,
    }
    file.unlink() if kind == "delete" else file.write_bytes(contents[kind])
    if kind != "swap":
        return [file]
    other.write_bytes(mine)
    return [file, other]


def content_of(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file() and path.name[0] != ".")
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def assert_same_bits(actual: Any, expected: Any):
    """Draws and their trace, bit for bit."""
    mine, other = ((one.params, one.trace) for one in (actual, expected))
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


def as_read(tree: Any, other: Any) -> Any:
    """Ignore the state of the probe, which reads fewer entries of sharded leaves."""

    def forget(node: Any, beside: Any) -> Any:
        if not hasattr(node, "unpack"):
            return node
        return node._replace(start=beside.start, num_read=beside.num_read)

    return jax.tree.map(forget, tree, other, is_leaf=lambda node: hasattr(node, "unpack"))
