"""Draws on disk: what was sampled comes back, lazily, and damage is named."""

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
from runs import stub, watching

import optax_smile
from optax_smile.draws import _format

CHAINS, DRAWS = 3, 5


def mean_loss(params, batch):
    return jnp.mean((batch - params["layer"][0]["w"] - params["b"]) ** 2)


def start() -> Any:
    w = jnp.arange(2.0 * CHAINS).reshape(CHAINS, 2)
    return {"layer": [{"w": w}, {"unused": jnp.ones((CHAINS, 1, 2))}], "b": jnp.zeros((CHAINS, 2))}


def draw(directory=None, loss=mean_loss, **arguments) -> Any:
    given: dict[str, Any] = {"num_warmup": 2, "num_draws": DRAWS, "thin": 2, "key": 0}
    given |= {"directory": directory, "progress": False} | arguments
    return optax_smile.sample(loss, start(), [jnp.full(2, x) for x in (1.0, 2.0)], stub(), **given)


class Runs(NamedTuple):
    """The same run twice: in memory, and begun in a folder above while another one is the current.

    `seen`: how many of its draws could be read while it ran.
    """

    memory: Any
    disk: Any
    seen: list[int]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    # As in the tests that compare with them; fixtures of a module come before those of a test.
    jax.config.update("jax_disable_most_optimizations", True)
    folder, seen = tmp_path_factory.mktemp("runs"), []
    (folder / "elsewhere").mkdir()

    def look(step, stats):
        os.chdir(folder / "elsewhere")
        if step > 6:
            time.sleep(0.05)
            seen.append(len(list(optax_smile.load_snapshots(folder / "run"))))

    with contextlib.chdir(folder):
        with watching(look):
            disk = draw("run")
    return Runs(draw(), disk, seen)


def write(directory, begin, *draws, dtype=None):
    """Write draws without a run."""
    _format.write_manifest(directory, _format.manifest_of(begin, dtype, {}))
    files = _format.DrawFiles(directory, _format.leaves_of(begin), dtype)
    files.write(_format.START, 0, begin, {})
    for number, params in enumerate(draws):
        files.write(number, 7, params, {"step_size": np.ones(2)})
    return optax_smile.load_snapshots(directory)


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_disk_and_memory_hold_the_same_draws(runs):
    memory, disk, _ = runs
    assert (disk.num_chains, disk.num_draws, len(disk)) == (CHAINS, DRAWS, CHAINS * DRAWS)
    assert_same(disk.params, memory.params)
    assert_same(disk.start, jax.tree.map(np.asarray, start()))
    assert_same(memory.start, disk.start)
    for name, values in memory.trace.items():
        np.testing.assert_array_equal(disk.trace[name], values[:, -DRAWS:])
    assert disk.trace["step"].tolist() == [[4, 6, 8, 10, 12]] * CHAINS
    assert memory.settings == disk.settings
    for at, (one, other) in enumerate(zip(disk, memory, strict=True)):
        number, chain = divmod(at, CHAINS)
        assert_same(one, jax.tree.map(lambda x, at=(chain, number): x[at], memory.params))
        assert_same(other, one)
    thinned = disk.thinned(3)
    assert_same(thinned.params, jax.tree.map(lambda x: x[:, [1, 4]], memory.params))
    assert thinned.trace["step"].tolist() == [[6, 12]] * CHAINS


def test_a_run_is_read_while_it_runs_and_where_it_began(runs, tmp_path):
    _, disk, seen = runs
    assert seen == sorted(seen) and seen[0] >= CHAINS and len(seen) == 3
    folder = disk.directory.parent
    assert not list((folder / "elsewhere").iterdir())
    with contextlib.chdir(folder):
        loaded = optax_smile.load_snapshots("run")
    with contextlib.chdir(tmp_path):
        assert_same(loaded.params, disk.params)
    assert loaded.directory == folder / "run"


def test_rounded_on_disk_alone(runs, tmp_path):
    """The chain itself keeps all digits, and whole numbers are not rounded."""
    halves = draw(tmp_path / "run", dtype="float16")
    expected = jax.tree.map(lambda x: x.astype(np.float16).astype(np.float32), runs.memory.params)
    assert_same(halves.params, expected)
    assert all(x.dtype == np.float32 for x in jax.tree.leaves(halves.params))
    sizes = [sum(x.stat().st_size for x in y.directory.glob("draw*")) for y in (halves, runs.disk)]
    assert sizes[0] < sizes[1]
    begin = {"w": np.zeros((2, 1), np.float32), "count": np.zeros(2, np.int32)}
    counted = {"w": begin["w"] + np.float32(0.1), "count": np.array([2049, 2**24 + 1], np.int32)}
    params = write(tmp_path, begin, counted, dtype="float16").params
    assert params["count"][:, 0].tolist() == [2049, 2**24 + 1]
    assert params["w"].ravel().tolist() == [float(np.float16(0.1))] * 2


@pytest.mark.parametrize("number, fits", [(65_520.0, False), (1e-6, False), (6.2e-5, True)])
def test_a_leaf_too_large_or_small_for_half_precision_keeps_its_own(tmp_path, number, fits):
    """In that draw alone, so that a run that resumes stores the same bits."""
    begin: Any = {"w": np.zeros((2, 2), np.float32), "inf": np.full((2, 1), np.inf, np.float32)}
    draws = [begin | {"w": np.full((2, 2), x, np.float32)} for x in (0.1, number, 0.1)]
    stored = write(tmp_path, begin, *draws, dtype="float16").params
    assert np.isinf(stored["inf"]).all()
    exact = np.float32(number)
    expected = [np.float16(0.1), np.float16(number) if fits else exact, np.float16(0.1)]
    assert stored["w"][0, :, 0].tolist() == [float(x) for x in expected]
    wide = {"w": np.full((2, 1), 1e300), "small": np.full((2, 1), 1e-300)}
    (tmp_path / "double").mkdir()
    single = write(tmp_path / "double", jax.tree.map(np.zeros_like, wide), wide, dtype="float32")
    assert_same(single.params, jax.tree.map(lambda x: x[:, None], wide))


def test_a_start_or_draw_too_large_for_the_stored_precision_is_told(tmp_path):
    def descend(size):
        given: dict[str, Any] = {"num_warmup": 0, "num_draws": 1, "key": 0, "check": False}
        given |= {"directory": tmp_path / str(size), "dtype": "float16", "progress": False}
        params = {"b": jnp.full((2, 3), size) * jnp.arange(1.0, 3)[:, None]}
        loss = lambda params, batch: -1e6 * jnp.sum(params["b"])  # noqa: E731
        return optax_smile.sample(loss, params, [jnp.ones(1)], optax.sgd(1.0), **given)

    message = "`sample`: b had numbers that are too large or too small for float16"
    for size in (1e5, 1.0):
        with pytest.warns(UserWarning) as seen:
            draws = descend(size)
        assert sum(message in str(one.message) for one in seen) == 1
        start = size * np.arange(1.0, 3)
        np.testing.assert_allclose(draws.start["b"][:, 0], start, rtol=1e-5)
        np.testing.assert_allclose(draws.params["b"][:, 0, 0], 1e6 + start, rtol=1e-5)


@pytest.mark.parametrize("number", [0, DRAWS - 1])
def test_missing_files_of_draws_are_named(runs, tmp_path, number):
    """The last one by the newest checkpoint; before the first checkpoint a run has fewer."""
    directory = shutil.copytree(runs.disk.directory, tmp_path / "run")
    (missing,) = directory.glob(f"draw-{number:08d}.*")
    missing.unlink()
    named = (
        rf"directory=...\)` must be a directory with .* all its 5 draws, got .* draw-{number:08d}"
    )
    for where, read in (("load_snapshots", optax_smile.load_snapshots), ("sample", draw)):
        with pytest.raises(ValueError, match=rf"`{where}\({named}\.\*\. Restore it"):
            read(directory)
    for file in directory.glob("checkpoint-*"):
        file.unlink()
    if number == DRAWS - 1:
        assert optax_smile.load_snapshots(directory).num_draws == DRAWS - 1


def hostile(kind: str, path: Path, victim: Path):
    """Put a link, a pipe or another device in the place of a file or folder."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    os.mkfifo(path) if kind == "pipe" else path.symlink_to(
        "/dev/zero" if kind == "zero" else victim
    )


@pytest.mark.parametrize("kind", ["link", "pipe", "zero"])
def test_links_and_devices_in_a_directory_are_refused(runs, tmp_path, kind):
    """Nothing is read, written or deleted through them."""
    (tmp_path / "file").write_text("mine")
    (newest,) = runs.disk.directory.glob("checkpoint-0000000012.*")
    names = [".lock-0", "manifest.json", newest.name, runs.disk.draws[1][0].path.name]
    for number, name in enumerate(names):
        directory = shutil.copytree(runs.disk.directory, tmp_path / str(number))
        hostile(kind, directory / name, tmp_path / "file")
        before = sorted(directory.rglob("*"))
        with pytest.raises(ValueError, match=rf"directory=...\)` must be .*{name}|point .*{name}"):
            draw(directory)
        assert sorted(directory.rglob("*")) == before
        if name in names[1::2]:
            with pytest.raises(ValueError, match=r"`load_snapshots\(directory=...\)` must be"):
                optax_smile.load_snapshots(directory)
    assert (tmp_path / "file").read_text() == "mine"
    # The directory itself may be a link.
    (tmp_path / "link").symlink_to(runs.disk.directory)
    assert optax_smile.load_snapshots(tmp_path / "link").num_draws == DRAWS


def test_files_of_others_in_a_directory_are_left_alone(runs, tmp_path):
    others = ["draw-final.safetensors", "draw-notes.txt", ".mine.json.bak", "start.safetensors"]
    others += ["checkpoint-7.safetensors", "checkpoint-0000000001.ckpt", ".lock-0"]
    for name in others:
        (tmp_path / name).write_text("mine")
    assert_same(draw(tmp_path).params, runs.memory.params)
    assert all((tmp_path / name).read_text() == "mine" for name in others)


def test_a_tilde_is_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    for home in ("~/run", Path("~/other")):
        draw(home, num_draws=1)
        assert optax_smile.load_snapshots(home).num_draws == 1
    with pytest.raises(ValueError, match=r"directory=...\)` must be a path, got '~nobody"):
        optax_smile.load_snapshots("~nobody-of-this-name/run")
    assert sorted(x.name for x in (tmp_path / "home").iterdir()) == ["other", "run"]
    assert [x.name for x in tmp_path.iterdir()] == ["home"]


def test_trees_come_back_nested_flat_or_as_they_were(tmp_path):
    written = ({"a": np.ones((2, 3), np.float32)}, [np.zeros((2,), np.float32)])
    one = jax.tree.map(lambda x: x[0], written)
    (nested, _) = write(tmp_path, jax.tree.map(np.zeros_like, written), written)
    assert_same(nested, [{"a": one[0]["a"]}, [one[1][0]]])
    (flat, _) = optax_smile.load_snapshots(tmp_path, flat=True)
    assert_same(flat, {"0/a": one[0]["a"], "1/0": one[1][0]})
    (original, _) = optax_smile.load_snapshots(tmp_path, like=one)
    assert_same(original, one)


SCRIPT = """
import jax, optax_smile
from jax._src import xla_bridge
def refuse(*_): raise AssertionError("a device was asked for")
jax.devices = jax.local_devices = refuse
draws = optax_smile.load_snapshots("run")
print(len(list(draws)), draws.params["layer"][0]["w"].shape, xla_bridge.backends_are_initialized())
"""


def test_loading_needs_no_device_and_no_training_code(runs):
    folder, command = runs.disk.directory.parent, [sys.executable, "-c", SCRIPT]
    run = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert run.stdout.split() == ["15", "(3,", "5,", "2)", "False"], run.stderr


def test_a_damaged_file_is_named(runs, tmp_path, monkeypatch):
    copied = Path(shutil.copytree(runs.disk.directory, tmp_path / "run"))
    draws = optax_smile.load_snapshots(copied)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "safetensors.numpy", None)
        with pytest.raises(ImportError, match=r"pip install 'optax-smile\[storage\]'"):
            next(iter(draws))
    file = draws.draws[2][0].path
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(ValueError, match=rf"{file} is damaged .* other draws stay readable"):
        list(draws)
    assert [len(draws[:6]), len(draws[9:])] == [6, 6]


def test_a_directory_without_a_manifest_and_a_tree_of_other_leaves(runs, tmp_path):
    other = jax.tree.map(lambda x: x[0], start()) | {"b": jnp.zeros(4)}
    for directory, like, rule in (
        (tmp_path, None, r"directory=...\)` must be .* with a manifest.json, got"),
        (runs.disk.directory, other, r"like=...\)`.*, got \[\('b', \[4\]\)\]"),
    ):
        with pytest.raises(ValueError, match=rf"`load_snapshots\({rule}"):
            optax_smile.load_snapshots(directory, like=like)


def test_a_draw_with_a_gap_between_its_files_is_none(tmp_path):
    """Files of the chains of several processes, one of which was killed."""
    for draw, blocks in enumerate(([(0, 1), (2, 3)], [(2, 3)], [(0, 0), (3, 3)], [(0, 2), (1, 3)])):
        for first, last in blocks:
            name = f"draw-{draw:08d}.chains-{first:05d}-{last:05d}.safetensors"
            (tmp_path / name).touch()
    assert set(_format.find(tmp_path, 4)) == {0, 3}
