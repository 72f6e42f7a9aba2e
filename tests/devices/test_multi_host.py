"""Two processes of two devices give the draws of one of four, also where processes die."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import optax_smile
from optax_smile.draws import _format

EXAMPLE = Path(__file__).parents[2] / "examples" / "multi_host.py"
# Seconds are for two processes that start, compile and sample on one busy core.
SAMPLES, PATIENCE = 30, 300
# Slow tests compare bits with those of a fixture.
OPTIMIZED = False


# A loop over draws that all processes leave at the third draw, or only the first one.
LEAVES = """
import sys
import jax, jax.numpy as jnp, numpy as np, optax_smile

way, _, address, _, number, _, process = sys.argv[1:]
jax.distributed.initialize(address, int(number), int(process))
auto = (jax.sharding.AxisType.Auto,)
mesh = jax.make_mesh((jax.device_count(),), ("chain",), axis_types=auto)
sampler = optax_smile.smile(0.1, num_data=9, key=0)
loss_fn = lambda w, batch: jnp.sum((w - batch) ** 2) / 2
starts = np.arange(8.0, dtype=np.float32).reshape(4, 2)
run = optax_smile.Run(loss_fn, starts, [np.ones(2, np.float32)], sampler, key=0, mesh=mesh)
for draw in run.draws(6, thin=2):
    assert draw.shape == (2, 2)
    if run.num_draws == 3 and (way == "all" or jax.process_index() == 0):
        break
print("draws:", run.snapshots().num_draws)
list(run.draws(6, thin=2))
print("draws:", run.snapshots().num_draws)
"""


def start(directory: Path, log: Path, devices: int, *options: str) -> subprocess.Popen:
    command = [sys.executable, str(EXAMPLE), str(directory), "--smoke", *options]
    command += ["--num-draws", str(SAMPLES)]
    if options[0] in ("all", "one"):
        command = [sys.executable, "-c", LEAVES, *options]
    own = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    with log.open("a") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=own)


@contextlib.contextmanager
def pair(directory: Path, logs: Path, *options: str):
    """Start two processes that meet at a free port; none of them outlives the test."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    options = (*options, "--coordinator", address, "--num-processes", "2", "--process-id")
    names = [(logs / f"process-{number}.log", 2, *options, str(number)) for number in range(2)]
    processes = [start(directory, *each) for each in names]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def draws_in(directory: Path) -> Any:
    return optax_smile.load_snapshots(directory / "draws")


def wait_for_draws(directory: Path, count: int, processes: list[subprocess.Popen]):
    deadline = time.monotonic() + PATIENCE
    written = directory / "draws" / "manifest.json"
    while not (written.exists() and draws_in(directory).num_draws >= count):
        assert all(process.poll() is None for process in processes)
        assert time.monotonic() < deadline
        time.sleep(0.1)


def finish(directory: Path, logs: Path, *options: str, stop=False) -> Any:
    """Run a pair to its end, or send a signal to one of them in the middle."""
    with pair(directory, logs, *options) as processes:
        if stop:
            wait_for_draws(directory, 5, processes)
            processes[1].send_signal(signal.SIGTERM)
        assert [process.wait(PATIENCE) for process in processes] == [0, 0], show(logs)
    return draws_in(directory)


def alone(directory: Path, logs: Path, *options: str) -> Any:
    """One process with four devices."""
    process = start(directory, logs / "one.log", 4, "--num-processes", "1", *options)
    assert process.wait(PATIENCE) == 0, show(logs)
    return draws_in(directory)


def show(logs: Path) -> str:
    return "\n".join(f"{log.name}: {log.read_text()[-3000:]}" for log in logs.glob("*.log"))


def assert_same_bits(actual: Any, expected: Any, count: int = SAMPLES):
    """So many draws are those of the beginning of another run."""
    assert actual.num_draws == count
    mine, other = ((run.params, dict(run.trace)) for run in (actual, expected))
    for x, y in zip(*map(jax.tree.leaves, (mine, other)), strict=True):
        assert x.dtype == y.dtype and x.tobytes() == y[:, :count].tobytes()


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    directory = tmp_path_factory.mktemp("reference")
    draws = alone(directory, directory)
    assert (draws.num_chains, draws.num_draws) == (8, SAMPLES)
    return draws


@pytest.mark.nightly
def test_a_signal_to_one_process_ends_both_in_order(tmp_path, reference):
    """And the two give the draws of one process bit for bit."""
    run = tmp_path / "run"
    some = finish(run, tmp_path, stop=True)
    for number in range(2):
        said = (tmp_path / f"process-{number}.log").read_text()
        assert f"process {number} of 2" in said and "`sample` was stopped by SIGTERM" in said
    assert 5 <= some.num_draws < SAMPLES
    newest = max(_format.find_checkpoints(run / "draws"))
    assert newest == some.trace["step"][0, -1]
    assert len([*run.glob("draws/draw-*")]) == some.num_draws * 4
    assert_same_bits(finish(run, tmp_path), reference)


@pytest.mark.parametrize(
    "way",
    [pytest.param("all", marks=pytest.mark.nightly), pytest.param("one", marks=pytest.mark.slow)],
)
def test_processes_leave_a_loop_together_or_are_told(tmp_path, way):
    with pair(tmp_path, tmp_path, way) as processes:
        codes = [process.wait(PATIENCE) for process in processes]
    said = [(tmp_path / f"process-{number}.log").read_text() for number in range(2)]
    if way == "all":
        assert codes == [0, 0], show(tmp_path)
        assert all("draws: 3" in text and "draws: 6" in text for text in said)
    else:
        assert 0 not in codes, show(tmp_path)
        assert all("left the loop over `Run.draws`. All must leave" in x for x in said)


@pytest.mark.nightly
@pytest.mark.parametrize("killed", [0, 1])
def test_a_dead_process_ends_the_other_and_loses_no_draw(tmp_path, reference, killed):
    run = tmp_path / "run"
    with pair(run, tmp_path) as processes:
        wait_for_draws(run, 5, processes)
        processes[killed].kill()
        kept = draws_in(run)
        assert processes[1 - killed].wait(60) != 0
    stored = draws_in(run)
    assert SAMPLES > stored.num_draws >= kept.num_draws >= 5
    assert_same_bits(stored, reference, stored.num_draws)
    assert_same_bits(finish(run, tmp_path), reference)


@pytest.mark.nightly
@pytest.mark.parametrize("devices_per_batch", [2, 4])
def test_devices_that_share_a_batch(tmp_path, devices_per_batch):
    """Four: one process holds all chains, and sums over two processes are rounded otherwise."""
    option = ("--data", str(devices_per_batch))
    expected = alone(tmp_path / "one", tmp_path, *option)
    actual = finish(tmp_path / "two", tmp_path, *option)
    assert actual.num_draws == expected.num_draws == SAMPLES
    assert len([*tmp_path.glob("two/draws/draw-*")]) == SAMPLES * 4 // devices_per_batch
    if devices_per_batch == 2:
        assert_same_bits(actual, expected)
    for x, y in zip(*map(jax.tree.leaves, (actual.params, expected.params)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
