"""Draws on disk: what was sampled comes back, lazily, and damage is named."""

import errno
import json
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
import pytest

import optax_smile
from optax_smile import _disk
from optax_smile.draws import _files, _manifest

CHAINS, SAMPLES = 3, 5


def mean_loss(params, batch):
    return jnp.mean((batch - params["layer"][0]["w"] - params["b"]) ** 2)


def start() -> Any:
    w = jnp.arange(2.0 * CHAINS).reshape(CHAINS, 2)
    return {"layer": [{"w": w}, {"unused": jnp.ones((CHAINS, 1, 2))}], "b": jnp.zeros((CHAINS, 2))}


def draw(directory=None, **arguments) -> Any:
    settings: dict[str, Any] = {"num_warmup": 2, "num_draws": SAMPLES, "thin": 2}
    return optax_smile.sample(
        mean_loss,
        start(),
        [jnp.full(2, 1.0), jnp.full(2, 2.0)],
        optax_smile.psmile_naive(0.1, num_data=20),
        key=jax.random.key(0),
        progress=False,
        directory=directory,
        **settings | arguments,
    )


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_disk_and_memory_hold_the_same_draws(tmp_path):
    stored, kept = draw(tmp_path / "run"), draw()
    assert (stored.num_chains, stored.num_draws, len(stored)) == (CHAINS, SAMPLES, 15)
    assert_same(stored.params, kept.params)
    for name, values in kept.trace.items():
        np.testing.assert_array_equal(stored.trace[name], values[:, -SAMPLES:])
    assert stored.trace["step"].tolist() == [[4, 6, 8, 10, 12]] * CHAINS
    by_draw = [
        jax.tree.map(lambda x, at=(c, s): x[at], kept.params) for s in range(5) for c in range(3)
    ]
    for actual, expected in zip(stored, by_draw, strict=True):
        assert_same(actual, expected)


def test_predict_takes_them(tmp_path):
    def outputs(params, inputs):
        return inputs * params["b"][0] + params["layer"][0]["w"][1], 0.0

    inputs = jnp.arange(4.0)
    expected, actual = (
        optax_smile.predict(outputs, draws, inputs, likelihood="gaussian", targets=inputs)
        for draws in (draw(), draw(tmp_path))
    )
    np.testing.assert_allclose(actual.mean, expected.mean, rtol=1e-5)
    np.testing.assert_allclose(actual.log_density, expected.log_density, rtol=1e-5)


class Network(NamedTuple):
    weight: Any
    bias: Any


def test_trees_come_back_nested_flat_or_as_they_were(tmp_path):
    written = Network({"a": np.ones((2, 3), np.float32)}, [np.zeros((2,), np.float32)])
    _manifest.write(tmp_path, _manifest.of_run(written, None, {}))
    writer = _files.SnapshotWriter(tmp_path, jax.tree.map(np.zeros_like, written))
    writer.put(0, 7, written, {"step_size": np.ones(2)})
    writer.close()
    one = jax.tree.map(lambda x: x[0], written)
    (nested, _) = optax_smile.load_snapshots(tmp_path)
    assert_same(nested, {"weight": {"a": one.weight["a"]}, "bias": [one.bias[0]]})
    (flat, _) = optax_smile.load_snapshots(tmp_path, flat=True)
    assert_same(flat, {"weight/a": one.weight["a"], "bias/0": one.bias[0]})
    (original, _) = optax_smile.load_snapshots(tmp_path, like=one)
    assert_same(original, one)


def test_rounded_on_disk_alone(tmp_path):
    kept, halves, whole = draw(), draw(tmp_path / "half", dtype="float16"), draw(tmp_path / "whole")
    for exact, rounded in zip(*map(jax.tree.leaves, (kept.params, halves.params)), strict=True):
        assert rounded.dtype == np.float32
        np.testing.assert_array_equal(rounded, exact.astype(np.float16))
    sizes = [sum(f.stat().st_size for f in x.directory.glob("draw*")) for x in (halves, whole)]
    assert sizes[0] < sizes[1]


def test_loading_needs_no_device_and_no_training_code(tmp_path):
    draw(tmp_path)
    script = (
        "import jax, optax_smile\n"
        "def refuse(*_): raise AssertionError('a device was asked for')\n"
        "jax.devices = jax.local_devices = refuse\n"
        "from jax.extend import backend\n"
        f"draws = optax_smile.load_snapshots({str(tmp_path)!r})\n"
        "print(len(list(draws)), draws.params['layer'][0]['w'].shape)\n"
        "from jax._src import xla_bridge\n"
        "print(xla_bridge.backends_are_initialized())\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.split("\n")[:2] == ["15 (3, 5, 2)", "False"]


def test_draws_can_be_read_while_more_are_written(tmp_path):
    seen = []

    def look(step, stats):
        if step > 6:
            time.sleep(0.05)
            seen.append(len(list(optax_smile.load_snapshots(tmp_path))))

    draw(tmp_path, callback=look)
    assert seen == sorted(seen) and seen[0] >= CHAINS and len(seen) == 3


def test_nothing_but_whole_files_has_the_name_of_a_draw(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(_disk.os, "fsync", fail)
    with pytest.raises(OSError, match="No space left.*manifest.json"):
        draw(tmp_path / "run")
    assert not [
        file for file in (tmp_path / "run").iterdir() if file.is_file() and file.stat().st_size > 9
    ]


def test_a_full_disk_leaves_the_earlier_draws(tmp_path, monkeypatch):
    write, calls = _disk.write, []

    def full(path, content):
        calls.append(path)
        if len(calls) > 6:  # manifest, start, first checkpoint and session, two draws
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, content)

    monkeypatch.setattr(_disk, "write", full)
    with pytest.raises(OSError, match="No space left on device: .*draw-00000002"):
        draw(tmp_path, num_draws=50)
    expected = draw(num_draws=50).params["b"][:, :2]
    np.testing.assert_array_equal(optax_smile.load_snapshots(tmp_path).params["b"], expected)


@pytest.mark.parametrize("damage", ["truncate", "flip", "foreign", "delete"])
def test_a_damaged_file_is_named(tmp_path, damage):
    draws = draw(tmp_path)
    file = draws.draws[2][0].path
    content = bytearray(file.read_bytes())
    if damage == "delete":
        file.unlink()
    else:
        if damage == "truncate":
            content = content[:-5]
        if damage == "flip":
            content[-3] ^= 1
        if damage == "foreign":
            content = bytearray(b"something else")
        file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{file} is damaged .* other draws stay readable"):
        list(draws)
    file.unlink(missing_ok=True)
    assert len(list(optax_smile.load_snapshots(tmp_path))) == 12


def test_errors_of_load_snapshots(tmp_path):
    start_form = r"`load_snapshots\(directory=...\)` must be "
    with pytest.raises(ValueError, match=start_form + "a directory with a manifest.json, got"):
        optax_smile.load_snapshots(tmp_path)
    draw(tmp_path)
    other = jax.tree.map(lambda x: x[0], start()) | {"b": jnp.zeros(4)}
    with pytest.raises(ValueError, match=r"`load_snapshots\(like=...\)`.*, got \[\('b', \[4\]\)\]"):
        optax_smile.load_snapshots(tmp_path, like=other)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(ValueError, match=start_form + ".* format 3, got format 99 in .*manifest"):
        optax_smile.load_snapshots(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match=start_form + ".* readable manifest.json, got .*manifest"):
        optax_smile.load_snapshots(tmp_path)


def test_errors_before_any_step(tmp_path):
    with pytest.raises(ValueError, match=r"`sample\(dtype=...\)` must be one of .*float16"):
        draw(tmp_path / "run", dtype="int8")
    draw(tmp_path)
    rule = r"`sample\(directory=...\)` must be a directory without draws where `resume` is False"
    with pytest.raises(ValueError, match=rule):
        draw(tmp_path, resume=False)


def test_a_run_that_failed_before_its_first_step_does_not_block_the_directory(tmp_path):
    def fail(params, batch):
        raise FloatingPointError

    arguments: dict[str, Any] = {"num_draws": 1, "key": jax.random.key(3), "progress": False}
    sampler = optax_smile.smile_naive(0.1, num_data=20)
    with pytest.raises(FloatingPointError):
        optax_smile.sample(
            fail,
            start(),
            [jnp.ones(2)],
            sampler,
            num_warmup=7,
            directory=tmp_path,
            **arguments,
        )
    assert_same(draw(tmp_path).params, draw().params)


@pytest.mark.parametrize("batches", [None, 3])
def test_batches_that_are_none_make_no_directory(tmp_path, batches):
    arguments: dict[str, Any] = {"num_warmup": 0, "num_draws": 1, "key": 3, "progress": False}
    with pytest.raises((TypeError, ValueError)):
        optax_smile.sample(
            mean_loss,
            start(),
            batches,
            optax_smile.smile_naive(0.1, num_data=20),
            directory=tmp_path / "run",
            **arguments,
        )
    assert not (tmp_path / "run").exists()


def test_a_run_goes_on_and_is_read_where_it_began(tmp_path, monkeypatch):
    """Whatever folder the process works in meanwhile."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    stored = draw("run", callback=lambda step, stats: os.chdir(tmp_path / "elsewhere"))
    assert_same(stored.params, draw().params)
    os.chdir(tmp_path)
    loaded = optax_smile.load_snapshots("run")
    os.chdir(tmp_path / "elsewhere")
    assert_same(loaded.params, stored.params)
    assert loaded.directory == tmp_path / "run"
    assert not list((tmp_path / "elsewhere").iterdir())


def test_whole_numbers_are_not_rounded(tmp_path):
    begin = {"w": np.zeros((2, 1), np.float32), "count": np.zeros(2, np.int32)}
    counted = {"w": begin["w"] + np.float32(0.1), "count": np.array([2049, 2**24 + 1], np.int32)}
    _manifest.write(tmp_path, _manifest.of_run(begin, "float16", {}))
    writer = _files.SnapshotWriter(tmp_path, begin, dtype="float16")
    writer.put(0, 1, counted, {})
    writer.close()
    params = optax_smile.load_snapshots(tmp_path).params
    assert params["count"][:, 0].tolist() == [2049, 2**24 + 1]
    assert params["w"].ravel().tolist() == [float(np.float16(0.1))] * 2


def test_a_source_tree_needs_no_installation(tmp_path):
    package = Path(optax_smile.__file__).parent
    shutil.copytree(package, tmp_path / "optax_smile", ignore=shutil.ignore_patterns("__pycache__"))
    script = (
        "from importlib import metadata\n"
        "version = metadata.version\n"
        "def missing(name):\n"
        "    if name == 'optax-smile': raise metadata.PackageNotFoundError(name)\n"
        "    return version(name)\n"
        "metadata.version = missing\n"
        "import jax.numpy as jnp, optax_smile\n"
        "draws = optax_smile.sample(lambda params, batch: jnp.sum(params**2), jnp.eye(2),\n"
        "    [0], optax_smile.smile_naive(0.1, num_data=9), num_warmup=0, num_draws=1, key=0,\n"
        "    directory='run', progress=False)\n"
        "print(optax_smile.__file__, draws.manifest['versions']['optax-smile'])\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    expected = f"{tmp_path / 'optax_smile' / '__init__.py'} {optax_smile.__version__}\n"
    assert (run.stdout, run.returncode) == (expected, 0), run.stderr


def test_missing_safetensors_is_no_damage(tmp_path, monkeypatch):
    draws = draw(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(ImportError, match=r"pip install 'optax-smile\[storage\]'"):
        next(iter(draws))


def test_a_leaf_that_moves_in_one_chain_alone_comes_back_right(tmp_path):
    still = np.zeros((2, 3), np.float32)
    begin, moved = (
        {"w": still, "v": still},
        {"w": np.array([[1.0] * 3, [0.0] * 3], np.float32), "v": still},
    )
    writer = _files.SnapshotWriter(tmp_path, begin)
    writer.put(0, 1, moved, {})
    writer.close()
    leaves = _manifest.leaves_of(begin)
    blocks = _files.find(tmp_path, 2)[0]
    got = _files.read_chains(blocks, leaves, 2, lambda: _files.read_start(tmp_path, leaves, 2))
    assert_same(got, moved)
