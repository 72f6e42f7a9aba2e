"""A run that is killed at any moment loses no draw, and ends with the same bits as without kills.

Forms: `sample`, a loop over `Run`, `sample` on a mesh of two devices, and a start that is trained.
Two processes of two devices give the draws of one of four, also where one of them dies. Started as
a script this file is the run: `python test_kills.py LIFE`.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from jax.sharding import AxisType

import optax_smile

FORMS = ("sample", "loop", "mesh", "warm start")
# Seconds per step and epoch: 60 of them take longer than a life of up to a second.
PAUSE, DRAWS_PER_LIFE = 0.02, 60
CHAINS, DEVICES, EPOCHS, WARMUP = 4, 2, 100, 5
# Kills of a whole campaign, and of its quick form.
KILLS, FEW_KILLS = 25, 5
# Seconds that a run may take to start, including compilation.
PATIENCE = 120

# Places where a run can be killed: just before the n-th file operation of a kind, on paths that
# contain a part, after its first draw. "/run" is the folder itself, opened to sync a new name.
PLACES = {
    "before a draw is written": ("open", "/.draw-", 1),
    "before a draw has its name": ("os.rename", "/.draw-", 3),
    "after a draw has its name": ("open", "/run", 2),
    "before a checkpoint": ("open", "/.checkpoint-", 1),
    "before a checkpoint has its name": ("os.rename", "/.checkpoint-", 2),
    "before an old checkpoint is removed": ("os.remove", "/checkpoint-", 3),
}
# Places that are tested for each pull request.
QUICK = ("before a draw has its name", "before a checkpoint has its name")
# The same while the start is trained, after its first checkpoint is written.
WARM_PLACES = {
    "before a checkpoint of the start": ("open", "/.checkpoint-", 2),
    "before a checkpoint of the start has its name": ("os.rename", "/.checkpoint-", 2),
    "before an old checkpoint of the start is removed": ("os.remove", "/checkpoint-", 1),
}


class Life(NamedTuple):
    """A process: `minutes` between checkpoints, `pause` seconds at every batch, and where it dies.

    Without a directory it keeps its draws in memory.
    """

    form: str
    directory: str | None
    num_draws: int
    minutes: float = 60
    pause: float = 0
    place: str | None = None
    # With several processes: their number, the index of this one, and their meeting point.
    number: int = 1
    process: int = 0
    address: str = ""

    @property
    def folder(self) -> Path:
        assert self.directory is not None
        return Path(self.directory)


def noisy_loss(params, batch, *, key):
    x, y = batch
    return runs.mean_loss(params, (x + 0.1 * jax.random.normal(key, x.shape), y))


def run(life: Life, tell=lambda: None) -> Any:
    """Draws of one of the forms; `tell` is called at every batch."""
    batches, mesh = runs.Watched(runs.regression(), lambda _: tell()), None
    params: Any = {"w": np.arange(2.0 * CHAINS, dtype=np.float32).reshape(CHAINS, 2)}
    params["b"] = np.zeros(CHAINS, np.float32)
    both: Any = {"stochastic": True, "checkpoint_minutes": life.minutes, "key": jax.random.key(0)}
    if life.form.startswith(("mesh", "leave")):
        # The number of devices that share a batch, if it is not one.
        shared = int(life.form.removeprefix("mesh") or 1) if "mesh" in life.form else 1
        devices = jax.devices()[: DEVICES * life.number]
        shape, auto = (len(devices) // shared, shared), (AxisType.Auto,) * 2
        mesh = jax.make_mesh(shape, ("chain", "data"), auto, devices=devices)
    if life.form == "warm start" or life.number > 1 and "mesh" in life.form:
        epochs = EPOCHS if life.number == 1 else 5
        params = optax_smile.warmstart(
            noisy_loss,
            lambda key: {"w": jax.random.normal(key, (2,)), "b": jnp.zeros(())},
            batches,
            optax.adam(0.01),
            **{"num_members": CHAINS, "num_epochs": epochs, "patience": epochs},
            validation=runs.regression()[0],
            directory=life.directory and life.folder.with_name("start"),
            progress=False,
            mesh=mesh,
            **both,
        )
    # The slow case uses a real sampler with control variates.
    start = params, batches, runs.sghmc() if life.form == "loop" else runs.stub(0.02)
    if life.form == "loop":
        both["control_variate"] = runs.regression()
    both |= {"directory": life.directory, "mesh": mesh}
    if life.form == "sample" or "mesh" in life.form:
        steps: Any = {"num_warmup": WARMUP, "num_draws": life.num_draws, "thin": 1}
        return optax_smile.sample(noisy_loss, *start, progress=False, **steps, **both)
    leaving = {"leave alone": [0], "leave together": [0, 1]}.get(life.form, [])
    with optax_smile.Run(noisy_loss, *start, **both) as chains:
        chains.advance(WARMUP)
        for _ in chains.draws(life.num_draws):
            if chains.num_draws == 3 and jax.process_index() in leaving:
                break
        for _ in chains.draws(life.num_draws):
            pass
        return chains.snapshots()


def die_at(place: str, directory: str):
    """Kill this process right before a file operation of `PLACES`."""
    first = "open", "/.draw-"
    if place in WARM_PLACES:
        first, directory = ("os.rename", "/.checkpoint-"), str(Path(directory).with_name("start"))
    operation, part, left = (PLACES | WARM_PLACES)[place]
    has_begun = False

    def watch(event, arguments):
        nonlocal has_begun, left
        path = str(arguments[0]) if arguments else ""
        if not path.startswith(directory):
            return
        has_begun = has_begun or event == first[0] and first[1] in path
        is_there = path.endswith(part) if part == "/run" else part in path
        if event == operation and has_begun and is_there:
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def main(arguments: str):
    life = Life(*json.loads(arguments))
    if life.place is not None:
        die_at(life.place, str(life.folder))
    if life.number > 1:
        place = life.address, life.number, life.process
        jax.distributed.initialize(*place, heartbeat_timeout_seconds=20)
    lines = iter(["running"])

    def tell():
        for line in lines:
            print(line, flush=True)
        time.sleep(life.pause)

    run(life, tell)
    print("finished", flush=True)


def begin(life: Life, output: Any = subprocess.PIPE) -> subprocess.Popen:
    # Other tests must not use the compilation cache of a killed process.
    env = {"JAX_COMPILATION_CACHE_DIR": str(life.folder.with_name("compiled"))}
    env |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(DEVICES)}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    given = {"stdout": output, "stderr": None if output is subprocess.PIPE else output}
    command = [sys.executable, __file__, json.dumps(life)]
    return subprocess.Popen(command, text=True, env=os.environ | env, **given)


def check_draws(life: Life, expected: Any, at_least: int) -> int:
    """Count stored draws, no fewer than before, and require that each has the right bits.

    Where all chains are in one file, there are files of draws 0, 1, ... without a gap.
    """
    if not (life.folder / "manifest.json").exists():
        return 0
    stored = optax_smile.load_snapshots(life.folder)
    number = stored.num_draws
    assert number >= at_least
    if number:
        for name, values in stored.params.items():
            wanted = expected.params[name][:, :number]
            assert (values.dtype, values.tobytes()) == (wanted.dtype, wanted.tobytes())
        steps = [WARMUP + 1 + draw for draw in range(number)]
        assert stored.trace["step"].tolist() == [steps] * CHAINS
    if life.number == 1:
        files = sorted(path.name for path in life.folder.glob("draw-*"))
        chains = f"chains-00000-{CHAINS - 1:05d}"
        assert files == [f"draw-{i:08d}.{chains}.safetensors" for i in range(number)]
    return number


def wait_for_draws(life: Life, number: int, processes=()):
    """Wait for files of draws while all processes live."""
    end = time.monotonic() + PATIENCE
    while len(list(life.folder.glob("draw-*"))) < number:
        assert all(process.poll() is None for process in processes), logs_of(life)
        assert time.monotonic() < end
        time.sleep(PAUSE)


NIGHTLY = (pytest.param(form, marks=pytest.mark.nightly) for form in FORMS)


@pytest.mark.parametrize("form", [pytest.param("quick", marks=pytest.mark.slow), *NIGHTLY])
def test_a_killed_run_loses_no_draw(tmp_path, form, full, record):
    """Kills at named places, then at random times, every second with many draws per checkpoint.

    All places of a warm start, and the first moment, are in its training.
    """
    places = WARM_PLACES if form == "warm start" else QUICK if form == "quick" else PLACES
    kills = 0 if form == "quick" else KILLS if full else FEW_KILLS
    form = form.replace("quick", "loop")
    life = Life(form, str(tmp_path / "run"), (FEW_KILLS + kills) * DRAWS_PER_LIFE)
    expected, kept = run(life._replace(directory=None)), [0]
    for place in places:
        with begin(life._replace(place=place, minutes=0)) as process:
            process.communicate(timeout=PATIENCE)
        assert process.returncode == -signal.SIGKILL, place
        kept.append(check_draws(life, expected, kept[-1]))
    assert kept[-1] < 50 and (kept[-1] > 0) == (form != "warm start")
    record("kills in named places", of=form, cases=len(places), silent=0, raw=0, lost=0)
    generator, first = np.random.default_rng(FORMS.index(form)), len(kept)
    for kill in range(kills):
        with begin(life._replace(minutes=0.0 if kill % 2 else 0.003, pause=PAUSE)) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "running\n"
            if kill % 2 and (form != "warm start" or kill > kills / 2):
                # Require a draw even on slow machines, since otherwise nothing can be lost.
                wait_for_draws(life, kept[-1] + 1)
            time.sleep(generator.uniform(0, 1))
            assert process.poll() is None, "the run was too short to be killed so often"
            process.kill()
        kept.append(check_draws(life, expected, kept[-1]))
    assert len(set(kept[first - 1 :])) > kills / 4, kept
    assert form != "warm start" or kept[first] == 0, kept
    with begin(life) as process:
        output, _ = process.communicate(timeout=2 * PATIENCE)
    assert process.returncode == 0 and output.endswith("finished\n")
    assert check_draws(life, expected, life.num_draws) == life.num_draws
    assert not list(life.folder.glob(".draw*"))
    if kills:
        record("kills at random moments", of=form, cases=kills, silent=0, raw=0, lost=0)


@contextlib.contextmanager
def pair(life: Life):
    """Start two processes that meet at a free port; none of them outlives the test."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        life = life._replace(address=f"127.0.0.1:{free.getsockname()[1]}")
    with contextlib.ExitStack() as ending:
        processes = []
        for number in range(2):
            output = ending.enter_context(log_of(life, number).open("w"))
            processes.append(process := begin(life._replace(process=number), output))
            ending.callback(process.wait)
            ending.callback(process.kill)
        yield processes


def log_of(life: Life, number: int) -> Path:
    return life.folder.with_name(f"log-{number}")


def logs_of(life: Life) -> str:
    return "\n".join(log_of(life, number).read_text() for number in range(2))


def run_pair(life: Life) -> list[int]:
    """Run to the end, and return the exit codes."""
    with pair(life) as processes:
        return [process.wait(2 * PATIENCE) for process in processes]


@pytest.fixture
def life(tmp_path) -> Life:
    return Life("mesh", str(tmp_path / "run"), 200, number=2)


@pytest.mark.slow
def test_processes_that_leave_a_loop_alone_are_told(life):
    assert 0 not in run_pair(life._replace(form="leave alone"))
    for number in range(2):
        text = log_of(life, number).read_text()
        assert "left the loop over `Run.draws`. All must leave" in text, text


@pytest.mark.nightly
@pytest.mark.parametrize("form", ["mesh2", "mesh4", "leave together"])
def test_two_processes_give_the_draws_of_one(life, form):
    """If four devices share a batch, one process holds all chains, and sums round differently."""
    life = life._replace(form=form, num_draws=20)
    # Draws of one process with four devices.
    expected = run(life._replace(directory=None))
    assert run_pair(life) == [0, 0], logs_of(life)
    if form == "mesh4":
        got = optax_smile.load_snapshots(life.folder)
        chex.assert_trees_all_close(got.params, expected.params, rtol=1e-5, atol=1e-5)
    else:
        assert check_draws(life, expected, 20) == 20


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["signal", 0, 1])
def test_one_of_two_processes_is_ended(life, way):
    """A signal ends both cleanly; a kill of one ends the other, and no draw is lost."""
    expected, slow = run(life._replace(directory=None)), life._replace(minutes=0, pause=PAUSE)
    with pair(slow) as processes:
        wait_for_draws(life, 5 * 4, processes)
        if way == "signal":
            processes[1].send_signal(signal.SIGTERM)
            assert [process.wait(PATIENCE) for process in processes] == [0, 0]
            assert logs_of(life).count("`sample` was stopped by SIGTERM") == 2
            assert max(runs.checkpoints_in(life.folder)) == WARMUP + check_draws(life, expected, 5)
        else:
            processes[way].kill()
            assert processes[1 - way].wait(60) != 0
    assert check_draws(life, expected, 5) < life.num_draws
    assert run_pair(life) == [0, 0], logs_of(life)
    assert check_draws(life, expected, life.num_draws) == life.num_draws


if __name__ == "__main__":
    main(*sys.argv[1:])
