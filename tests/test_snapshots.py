"""Draws on disk: they are read lazily and correctly, and errors name damaged files."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from runs import Watched, refused, stub

import optax_smile

CHAINS, DRAWS = 3, 5


def mean_loss(params, batch):
    return jnp.mean((batch - params["layer"][0]["w"] - params["b"]) ** 2)


def start() -> Any:
    w = jnp.arange(2.0 * CHAINS).reshape(CHAINS, 2)
    return {"layer": ({"w": w}, {"unused": jnp.ones((CHAINS, 1, 2))}), "b": jnp.zeros((CHAINS, 2))}


def draw(directory=None, look=lambda number: None, **arguments) -> Any:
    given: dict[str, Any] = {"num_warmup": 2, "num_draws": DRAWS, "thin": 2, "key": 0}
    given |= {"directory": directory, "progress": False} | arguments
    batches = Watched([jnp.full(2, x) for x in (1.0, 2.0)], look)
    return optax_smile.sample(mean_loss, start(), batches, stub(), **given)


class Runs(NamedTuple):
    """The same run in memory and in a directory, and how many draws could be read meanwhile."""

    memory: Any
    disk: Any
    seen: list[int]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The current directory changes while the run goes on in a relative one."""
    folder, seen = tmp_path_factory.mktemp("runs"), []
    (folder / "elsewhere").mkdir()

    def look(number):
        os.chdir(folder / "elsewhere")
        if number > 7:
            time.sleep(0.05)
            seen.append(len(list(optax_smile.load_snapshots(folder / "run"))))

    with contextlib.chdir(folder):
        disk = draw("run", look)
    return Runs(draw(), disk, seen)


@pytest.fixture
def copied(runs, tmp_path) -> Path:
    return Path(shutil.copytree(runs.disk.directory, tmp_path / "copy"))


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_disk_and_memory_hold_the_same_draws(runs):
    memory, disk, _ = runs
    assert (disk.num_chains, disk.num_draws, len(disk)) == (CHAINS, DRAWS, CHAINS * DRAWS)
    assert_same(disk.params, memory.params)
    for draws in runs[:2]:
        assert_same(draws.start, jax.tree.map(np.asarray, start()))
    assert disk.trace["step"].tolist() == [[4, 6, 8, 10, 12]] * CHAINS
    for name, values in memory.trace.items():
        np.testing.assert_array_equal(disk.trace[name], values[:, -DRAWS:])
    assert memory.settings == disk.settings
    for at, (one, other) in enumerate(zip(disk, memory, strict=True)):
        number, chain = divmod(at, CHAINS)
        assert_same(one, jax.tree.map(lambda x, at=(chain, number): x[at], memory.params))
        assert_same(other, one)
    thinned = disk.thinned(3)
    assert_same(thinned.params, jax.tree.map(lambda x: x[:, [1, 4]], memory.params))
    assert thinned.trace["step"].tolist() == [[6, 12]] * CHAINS
    # Trees come back as they were, nested or flat.
    like, (nested, *_) = memory[0], optax_smile.load_snapshots(disk.directory)
    original = optax_smile.load_snapshots(disk.directory, like=like)
    assert_same(original[0], disk[0])
    assert_same(nested, disk[0] | {"layer": [*disk[0]["layer"]]})
    (flat, *_) = optax_smile.load_snapshots(disk.directory, flat=True)
    assert flat.keys() == {"layer/0/w", "layer/1/unused", "b"}
    np.testing.assert_array_equal(flat["layer/0/w"], disk[0]["layer"][0]["w"])
    other, rule = like | {"b": jnp.zeros(4)}, r"`load_snapshots\(like=...\)`.*\('b', \[4\]\)\]"
    refused(rule, optax_smile.load_snapshots, disk.directory, like=other)


class Network(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(2, 3, rngs=rngs), nnx.Linear(3, 1, rngs=rngs)])
        self.norm = nnx.BatchNorm(3, rngs=rngs)

    def __call__(self, x):
        return self.layers[1](self.norm(self.layers[0](x)))


def test_a_state_of_flax_nnx_comes_back_as_from_memory(tmp_path):
    """Next to an auxiliary state, whose variables stay as they are."""
    parts = [nnx.split(Network(nnx.Rngs(i)), nnx.Param, nnx.BatchStat) for i in range(CHAINS)]
    graph, first, statistics = parts[0]
    _, *stacked = (jax.tree.map(lambda *x: jnp.stack(x), *x) for x in zip(*parts, strict=True))
    params, aux = stacked
    batches, like = [np.ones((4, 2), np.float32)], {"params": first, "aux": statistics}

    def loss_fn(params, batch, aux):
        model = nnx.merge(graph, params, aux, copy=True)
        return jnp.mean((model(batch) - 1) ** 2), nnx.state(model, nnx.BatchStat)

    given: dict[str, Any] = {"num_warmup": 2, "num_draws": DRAWS, "key": 0, "progress": False}
    given["aux"] = aux
    memory = optax_smile.sample(loss_fn, params, batches, stub(), **given)
    optax_smile.sample(loss_fn, params, batches, stub(), directory=tmp_path, **given)
    for tree in (like, jax.eval_shape(lambda: like), memory[0]):
        disk = optax_smile.load_snapshots(tmp_path, like=tree)
        assert_same(disk.params, memory.params)
        assert_same(disk[4], memory[4])
    assert nnx.merge(graph, disk[4]["params"], disk[4]["aux"])(batches[0]).shape == (4, 1)
    other = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    refused(r"`load_snapshots\(like=", optax_smile.load_snapshots, tmp_path, like=other)


def test_mean_of_each_chain_is_that_in_float64(runs, tmp_path):
    """A sum of the numbers in their own precision would lose the digits that differ."""
    memory, disk, _ = runs
    assert_same(disk.mean(), memory.mean())
    values = (1e4 + np.random.default_rng(0).normal(size=(2, 300, 3))).astype(np.float32)
    half = jnp.asarray(values % 1, jnp.bfloat16)
    number = np.arange(600, dtype=np.int32).reshape(2, 300)
    found = optax_smile.Snapshots({"w": values, "half": half, "number": number}).mean()
    exact = values.astype(np.float64).mean(axis=1).astype(np.float32)
    np.testing.assert_array_equal(found["w"], exact)
    assert found["half"].dtype == jnp.bfloat16 and found["number"].tolist() == [0, 300]
    optax_smile.Run(mean_loss, start(), [jnp.ones(2)], stub(), directory=tmp_path, key=0)
    refused("`mean` needs at least one draw", optax_smile.load_snapshots(tmp_path).mean)


def test_a_run_is_read_while_it_runs_and_where_it_began(runs, tmp_path):
    _, disk, seen = runs
    assert seen == sorted(seen) and seen[0] >= CHAINS and len(seen) == 5
    folder = disk.directory.parent
    assert not list((folder / "elsewhere").iterdir())
    with contextlib.chdir(folder):
        loaded = optax_smile.load_snapshots("run")
    with contextlib.chdir(tmp_path):
        assert_same(*map(jax.tree.leaves, (loaded.params, disk.params)))
    assert loaded.directory == folder / "run"


def visit(directory, numbers, dtype: Any = "float16", start=0.0, **aux) -> Any:
    """Draws of 0.1 and of some numbers, beside an auxiliary state; and the warnings."""

    def step_size(count):
        return jnp.asarray([*numbers, 0.1])[count // 2] * jnp.where(count % 2, -1, 1)

    def loss(params, batch, *, aux, key):
        return -jnp.sum(params["w"]), aux

    given: dict[str, Any] = {"num_warmup": 1, "num_draws": len(numbers) - 1, "thin": 2, "key": 0}
    given |= {"progress": False, "dtype": dtype, "check": False, "directory": directory}
    given |= {"stochastic": True, "aux": {name: jnp.tile(x, (2, 1)) for name, x in aux.items()}}
    params = {"w": jnp.full((2, 2), start)}
    with pytest.warns(UserWarning) as seen:
        draws = optax_smile.sample(loss, params, [()], optax.sgd(step_size), **given)
    told = [str(one.message) for one in seen]
    return draws, [text for text in told if "is an optimizer" not in text]


def test_a_leaf_too_large_or_small_for_half_precision_keeps_its_own(tmp_path):
    """In that draw alone, so that a run that resumes stores the same bits; and it is told once."""
    count, inf = np.array([2049, 2**24 + 1], np.int32), np.array([np.inf], np.float32)
    numbers = 0.1, 65_520.0, 0.1, 1e-6, 6.2e-5
    draws, told = visit(tmp_path / "run", (0, *numbers), count=count, inf=inf)
    aux, own = draws.params["aux"], (np.float32(65_520), np.float32(1e-6))
    assert np.isinf(aux["inf"]).all() and (aux["count"] == count).all()
    half = np.float16(0.1)
    expected = [float(x) for x in (half, own[0], half, own[1], np.float16(6.2e-5))]
    assert draws.params["params"]["w"][0, :, 0].tolist() == expected
    message = "`sample`: params/w had numbers that are too large or too small for float16"
    assert len(told) == 1 and message in told[0]
    # The same for a start, and for doubles.
    draws, told = visit(tmp_path / "start", (0, 0.1), start=1e5, inf=inf)
    assert (draws.start["params"]["w"] == 1e5).all() and len(told) == 1 and message in told[0]
    with jax.enable_x64(True):
        wide: Any = {"large": np.array([1e300]), "small": np.array([1e-300])}
        draws, _ = visit(tmp_path / "double", (0, 0.1), "float32", **wide)
    assert_same(draws.params["aux"], {name: np.tile(x, (2, 1, 1)) for name, x in wide.items()})


def test_missing_files_of_draws_are_named(copied):
    """The newest checkpoint says how many there have to be."""
    named = r"directory=...\)` must be a directory with .* all its 5 draws, got .*"
    for number in (DRAWS - 1, 0):
        next(copied.glob(f"draw-{number:08d}.*")).unlink()
        for where, read in (("load_snapshots", optax_smile.load_snapshots), ("sample", draw)):
            refused(rf"`{where}\({named} draw-{number:08d}\.\*\. Restore it", read, copied)


# Chains of the files of a draw, and whether they are all: processes may be killed between them.
@pytest.mark.parametrize(
    "blocks, is_whole",
    [("", 0), ("01", 0), ("12", 0), ("00 22", 0), ("01 22", 1), ("02 11", 1)],
)
def test_a_draw_without_the_files_of_some_chains_is_none(copied, blocks, is_whole):
    (last,) = copied.glob(f"draw-{DRAWS - 1:08d}.*")
    for file in (last, *copied.glob("checkpoint-*")):
        file.unlink()
    for first, end in blocks.split():
        (copied / f"{last.name[:13]}.chains-0000{first}-0000{end}.safetensors").touch()
    assert optax_smile.load_snapshots(copied).num_draws == DRAWS - 1 + is_whole


@pytest.mark.parametrize("is_pipe", [False, True])
def test_links_and_pipes_in_a_directory_are_refused(runs, tmp_path, is_pipe):
    (tmp_path / "file").write_text("mine")
    patterns = ".lock-0", "manifest.json", "checkpoint-0000000012.*", "draw-00000001.*"
    names = [next(runs.disk.directory.glob(pattern)).name for pattern in patterns]
    for number, name in enumerate(names):
        directory = shutil.copytree(runs.disk.directory, tmp_path / str(number))
        (path := directory / name).unlink(missing_ok=True)
        os.mkfifo(path) if is_pipe else path.symlink_to(tmp_path / "file")
        before = sorted(directory.rglob("*"))
        refused(rf"directory=...\)` must be .*{name}|point .*{name}", draw, directory)
        assert sorted(directory.rglob("*")) == before
        if name in names[1::2]:
            rule = r"`load_snapshots\(directory=...\)` must be"
            refused(rule, optax_smile.load_snapshots, directory)
    assert (tmp_path / "file").read_text() == "mine"
    # The directory itself may be a link.
    (tmp_path / "link").symlink_to(runs.disk.directory)
    assert optax_smile.load_snapshots(tmp_path / "link").num_draws == DRAWS


def test_rounded_on_disk_alone_where_files_of_others_are_left_alone(runs, tmp_path):
    """The chain itself keeps all digits."""
    others = ["draw-final.safetensors", "draw-notes.txt", ".mine.json.bak", "start.safetensors"]
    others += ["checkpoint-7.safetensors", "checkpoint-0000000001.ckpt", ".lock-0"]
    for name in others:
        (tmp_path / name).write_text("mine")
    halves = draw(tmp_path, dtype="float16")
    expected = jax.tree.map(lambda x: x.astype(np.float16).astype(np.float32), runs.memory.params)
    assert_same(halves.params, expected)
    files = (runs_.directory.glob("draw-0*") for runs_ in (halves, runs.disk))
    small, large = (sum(file.stat().st_size for file in found) for found in files)
    assert small < large
    assert all((tmp_path / name).read_text() == "mine" for name in others)


def test_a_tilde_is_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    draw("~/run", num_draws=1)
    assert optax_smile.load_snapshots("~/run").num_draws == 1 and (tmp_path / "home/run").exists()
    rule = r"directory=...\)` must be a path, got '~nobody"
    refused(rule, optax_smile.load_snapshots, "~nobody-of-this-name/run")


SCRIPT = """
import jax, optax_smile
from jax._src import xla_bridge
def refuse(*_): raise AssertionError("a device was asked for")
jax.devices = jax.local_devices = refuse
draws = optax_smile.load_snapshots("run")
assert len(list(draws)) == 15 and draws.params["layer"][0]["w"].shape == (3, 5, 2)
assert not xla_bridge.backends_are_initialized()
"""


def test_loading_needs_no_device_and_no_training_code(runs):
    command = [sys.executable, "-c", SCRIPT]
    subprocess.run(command, check=True, cwd=runs.disk.directory.parent)


def test_a_missing_package_is_named(runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(ImportError, match=r"pip install 'optax-smile\[storage\]'"):
        next(iter(runs.disk))
