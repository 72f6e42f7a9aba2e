"""A run that is killed at any moment loses no draw and ends with the bits of one never killed.

Started as a script this file is the run: `python test_kill.py DIRECTORY COMPILED MINUTES [PLACE]`.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_smile

# Seconds at every step: 1,500 of them outlast the 25 lives of up to a second on any machine.
PAUSE = 0.02
CHAINS, SAMPLES, KILLS = 3, 1_500, 25
# Seconds that a run may take to start; a machine that compiles the first time needs some.
PATIENCE = 120

# Where a run can be told to die: just before the n-th file operation of a kind, on paths with a
# part, after its first draw. "/run" is the folder itself, opened to make a draw's new name last.
PLACES = {
    "before a draw is written": ("open", "/.draw-", 1),
    "before a draw has its name": ("os.rename", "/.draw-", 3),
    "after a draw has its name": ("open", "/run", 2),
    "before a checkpoint": ("os.mkdir", "checkpoints/", 1),
    "inside a checkpoint": ("os.mkdir", "array_metadatas", 2),
    "in the last act of a checkpoint": ("os.rename", "orbax-checkpoint-tmp", 6),
    "after a checkpoint, on a slow disk": ("os.rmdir", "", 3),
}


def noisy_loss(params, batch, *, key):
    x, y = batch
    x = x + 0.1 * jax.random.normal(key, x.shape)
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2) / 2


def run(directory: Path | None, minutes: float = 60, callback=None) -> Any:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(7, 20, 2)).astype(np.float32)
    y = (x.sum(axis=-1) + generator.normal(size=(7, 20))).astype(np.float32)
    return optax_smile.sample(
        noisy_loss,
        {"w": jnp.arange(2.0 * CHAINS).reshape(CHAINS, 2), "b": jnp.zeros(CHAINS)},
        list(zip(x, y, strict=True)),
        optax_smile.smile_naive(
            0.02,
            num_data=140,
            integrator="minimal_norm",
            decoherence_length=0.1,
            key=jax.random.key(5),
        ),
        num_warmup=5,
        num_draws=SAMPLES,
        thin=1,
        key=jax.random.key(0),
        stochastic=True,
        prefetch=2,
        directory=directory,
        checkpoint_minutes=minutes,
        progress=False,
        callback=callback,
    )


def die_at(place: str, directory: str):
    """Kill this process right before a file operation of `PLACES`."""
    operation, part, left = PLACES[place]
    has_drawn = False

    def watch(event, arguments):
        nonlocal has_drawn, left
        path = str(arguments[0]) if arguments else ""
        if not path.startswith(directory):
            return
        has_drawn = has_drawn or "/.draw-" in path and event == "open"
        if "slow disk" in place and event == "os.rename" and "/.draw-" in path:
            time.sleep(1)
        is_there = path.endswith(part) if part == "/run" else part in path
        if event == operation and has_drawn and is_there:
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def main(directory: str, compiled: str, minutes: str, place: str | None = None):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_compilation_cache_dir", compiled)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    if place is not None:
        die_at(place, directory)
    lines = iter(["running"])

    def tell(step, stats):
        for line in lines:
            print(line, flush=True)
        time.sleep(PAUSE)

    run(Path(directory), float(minutes), tell)
    print("finished", flush=True)


def begin(directory: Path, compiled: Path, minutes: float, *place: str) -> subprocess.Popen:
    arguments = [__file__, str(directory), str(compiled), str(minutes), *place]
    return subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)


def check_draws(directory: Path, expected: Any, at_least: int) -> int:
    """Require draws 0, 1, ... without a gap, no fewer than before, each with the right bits."""
    files = sorted(path.name for path in directory.glob("draw-*"))
    assert files == [f"draw-{i:08d}.chains-00000-00002.safetensors" for i in range(len(files))]
    stored = optax_smile.load_snapshots(directory)
    assert stored.num_draws == len(files) >= at_least
    if not files:
        return 0
    for name, values in stored.params.items():
        wanted = expected.params[name][:, : len(files)]
        assert (values.dtype, values.tobytes()) == (wanted.dtype, wanted.tobytes())
    assert stored.trace["step"].tolist() == [list(range(6, 6 + len(files)))] * CHAINS
    return len(files)


def wait_for_a_draw(directory: Path, num_before: int):
    """However slow the machine is: a life without a draw has nothing to lose."""
    end = time.monotonic() + PATIENCE
    while len(list(directory.glob("draw-*"))) <= num_before:
        assert time.monotonic() < end
        time.sleep(PAUSE)


def finish(directory: Path, compiled: Path, expected: Any):
    with begin(directory, compiled, 60) as process:
        output, _ = process.communicate(timeout=2 * PATIENCE)
    assert process.returncode == 0 and output.endswith("finished\n")
    assert check_draws(directory, expected, SAMPLES) == SAMPLES
    drafts = [path.name for path in directory.iterdir() if path.name.startswith(".draw")]
    assert not drafts


@pytest.fixture(scope="module")
def expected():
    return run(None)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.mark.slow
def test_kill_at_any_moment(tmp_path, compiled, expected):
    """With a checkpoint at every step, and, every other time, with many draws between two."""
    directory, generator, kept = tmp_path / "run", np.random.default_rng(0), [0]
    for kill in range(KILLS):
        with begin(directory, compiled, minutes=0.0 if kill % 2 else 0.003) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "running\n"
            if kill % 2:
                wait_for_a_draw(directory, kept[-1])
            time.sleep(generator.uniform(0, 1))
            assert process.poll() is None, "the run was too short to be killed so often"
            process.kill()
        kept.append(check_draws(directory, expected, kept[-1]))
    assert len(set(kept)) > KILLS / 2, kept
    finish(directory, compiled, expected)


@pytest.mark.slow
def test_kill_at_the_worst_moments(tmp_path, compiled, expected):
    directory, kept = tmp_path / "run", 0
    for place in PLACES:
        with begin(directory, compiled, 0, place) as process:
            process.communicate(timeout=PATIENCE)
        assert process.returncode == -signal.SIGKILL, place
        kept = check_draws(directory, expected, kept)
    assert 0 < kept < 50
    finish(directory, compiled, expected)


if __name__ == "__main__":
    main(*sys.argv[1:])
