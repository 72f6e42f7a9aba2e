"""A run in a directory that is stopped, killed or made longer gives the draws of one in one go."""

import contextlib
import gc
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
import zlib
from functools import partial
from pathlib import Path
from signal import SIG_IGN, SIGINT, SIGTERM, getsignal, signal
from typing import Any

from benchmarks import records

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from runs import assert_same_bits, at, checkpoints_in, refused, run, send, start, stub, warned
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import optax_smile

# Also slow tests compare bits with those of fixtures.
OPTIMIZED = False
# Draws of a run are at steps 5, 8, 11 and 14.
FIRST, SECOND, THIRD = 5, 8, 11
stop_at_first = partial(runs.run_early, 1, callback=at(FIRST, send(SIGTERM)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Any:
    return run(tmp_path_factory.mktemp("finished"))


@pytest.fixture(scope="module")
def half(tmp_path_factory) -> Path:
    """A run that crashed after two draws, with checkpoints after the last two steps."""
    directory = tmp_path_factory.mktemp("half")
    with pytest.raises(runs.Crash):
        run(directory, callback=at(SECOND + 1, runs.crash), checkpoint_minutes=0)
    assert checkpoints_in(directory) == [7, 8]
    return directory


@pytest.fixture
def copied(half, tmp_path) -> Path:
    return shutil.copytree(half, tmp_path / "copy")


def normalised_loss(params, batch, *, aux, key):
    """Moves a running mean as BatchNorm does, and drops inputs."""
    x, y = batch
    mean = 0.9 * aux["mean"] + 0.1 * jnp.mean(x, axis=0)
    kept = jax.random.bernoulli(key, 0.8, x.shape)
    return runs.mean_loss(params, (jnp.where(kept, x - mean[None], 0.0), y)), {"mean": mean}


def loss_of_wide(params, batch):
    return runs.mean_loss(params, batch) + jnp.sum((params["wide"] - 0 * batch[1].mean()) ** 2) / 2


class Positioned:
    """Endless batches with a place that can be set."""

    at = num_read = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.at, self.num_read = self.at + 1, self.num_read + 1
        if self.at == FIRST and self.num_read == FIRST:
            send(SIGTERM)()
        return runs.regression()[(self.at - 1) % 7]

    def get_state(self):
        return json.dumps({"at": self.at}).encode()

    def set_state(self, state):
        self.at = json.loads(state.decode())["at"]


# Functions, since some iterables remember how far they were read.
CASES: dict[str, Any] = {
    "aux": lambda: {
        "loss": normalised_loss,
        "aux": {"mean": jnp.ones((runs.CHAINS, 2)) * jnp.arange(runs.CHAINS)[:, None]},
        "sampler": stub(kind=runs.TwoGradients),
        **dict(batch_per="step", steps_per_dispatch=3, stochastic=True),
    },
    "a generator": lambda: {
        "sampler": optax.chain(optax.clip_by_global_norm(1.0), runs.sghmc()),
        **dict(batches=(x for x in runs.own_batches(20)), per_chain=True),
        "check": False,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_in_pieces_gives_the_bits_of_one_in_one_go(tmp_path, case):
    """A signal; a crash, whose last checkpoint is before its last draw; the rest."""
    expected, pieces = run(tmp_path / "whole", **CASES[case]()), tmp_path / "pieces"
    stop_at_first(pieces, **CASES[case]())
    with pytest.raises(runs.Crash):
        run(pieces, callback=at(SECOND + 1, runs.crash), **CASES[case]())
    gradients = 2 * FIRST if case == "aux" else FIRST
    assert max(checkpoints_in(pieces)) == gradients
    assert optax_smile.load_snapshots(pieces).num_draws == 2
    assert_same_bits(run(pieces, **CASES[case]()), expected)


def test_batches_with_a_place_are_not_read_again(tmp_path, whole):
    runs.run_early(1, tmp_path, batches=Positioned())
    again = Positioned()
    assert_same_bits(run(tmp_path, batches=again), whole)
    assert again.num_read == runs.STEPS - FIRST


def test_batches_that_ran_out_may_grow(tmp_path):
    """Thirteen batches are six steps of two and a rest, which the next run takes again."""

    def go(name, count, begin=run):
        given: dict[str, Any] = {"sampler": stub(kind=runs.TwoGradients), "num_warmup": 1}
        batches = iter(runs.regression(18)[:count])
        return begin(tmp_path / name, num_draws=2, batches=batches, **given)

    go("pieces", 13, partial(runs.run_early, 1))
    rule = (
        r"`sample\(batches=...\)` must be .* to batch 12 of pass 0, where the run .*, got batch 9"
    )
    refused(rule, go, "pieces", 9)
    assert_same_bits(go("pieces", 18), go("whole", 18))


def test_signals_end_a_run_in_order_and_a_second_control_c_at_once(tmp_path, whole):
    """The step is finished, a checkpoint written; afterwards signals mean what they did before."""
    before = [getsignal(number) for number in (SIGINT, SIGTERM)]
    for number in (SIGTERM, SIGINT):
        directory = tmp_path / number.name
        with pytest.warns(UserWarning) as seen:
            got = run(directory, callback=at(THIRD, send(number)))
        assert got.interrupted == number.name and got.num_draws == 3
        assert max(checkpoints_in(directory)) == THIRD
        # One warning, at the line that calls `sample`.
        (warning,) = seen
        assert f"checkpoint is in {directory}: repeat the call to resume" in str(warning.message)
        # Benchmarks do not record it.
        assert re.match(records.INTERRUPTED, str(warning.message))
        assert "to be restarted must not exit with status 0" in str(warning.message)
        assert warning.filename == runs.__file__
    twice = tmp_path / "twice"
    with pytest.raises(KeyboardInterrupt, match="^Interrupted twice"):
        run(twice, callback=at(THIRD, send(SIGINT, SIGINT)))
    assert [getsignal(number) for number in (SIGINT, SIGTERM)] == before
    resumed = run(twice)
    assert_same_bits(resumed, whole)
    assert resumed.interrupted is None


def test_an_ignored_interrupt_stays_ignored(whole):
    before = signal(SIGINT, SIG_IGN)
    try:
        got = run(callback=at(SECOND, send(SIGINT)))
        np.testing.assert_array_equal(got.params["w"], whole.params["w"])
        assert getsignal(SIGINT) is SIG_IGN
    finally:
        signal(SIGINT, before)


def test_a_run_stopped_before_the_first_draw_goes_on_and_grows(tmp_path, whole):
    stop = at(2, send(SIGTERM))
    message = (
        f"2 steps and 0 draws per chain. A checkpoint is in {tmp_path}: repeat the call to resume"
    )
    with pytest.raises(KeyboardInterrupt, match=message):
        run(tmp_path, callback=stop)
    assert max(checkpoints_in(tmp_path)) == 2
    with pytest.raises(KeyboardInterrupt, match="To be able to resume, pass a `dir"):
        run(callback=stop)
    assert run(tmp_path, num_draws=2).num_draws == 2
    assert_same_bits(run(tmp_path), whole)


def test_a_finished_run_computes_nothing(whole):
    before = runs.content_of(whole.directory)
    with pytest.warns(UserWarning, match="is finished. Its draws are"):
        assert_same_bits(run(whole.directory), whole)
    with pytest.warns(UserWarning, match="Its draws are returned"):
        fewer = run(whole.directory, num_draws=2)
    np.testing.assert_array_equal(fewer.params["w"], whole.params["w"][:, :2])
    after = runs.content_of(whole.directory)
    assert all(after[name] == before[name] for name in before if name.startswith("draw"))


def test_another_start_is_not_used_and_the_same_rounded_is_known(copied, whole, tmp_path):
    other = start() | {"w": start()["w"] + 1}
    with pytest.warns(UserWarning, match="continues from its checkpoint. Your `params` differ"):
        assert_same_bits(run(copied, params=other), whole)
    tenths = start() | {"b": jnp.full(runs.CHAINS, 0.1)}
    halves = partial(run, params=tenths, num_warmup=0, num_draws=1, dtype="float16")
    assert halves(tmp_path / "halves").params["w"].dtype == np.float32
    with pytest.warns(UserWarning) as seen:
        halves(tmp_path / "halves")
    assert len(seen) == 1 and "is finished" in str(seen[0].message)


def test_what_cannot_be_resumed(half, copied):
    form = r"`sample\(directory=...\)` must be "
    (start_file,) = copied.glob("start.*")
    start_file.unlink()
    refused(r"without start.\*", run, copied)
    assert np.all(np.isfinite(optax_smile.load_snapshots(copied).params["w"]))
    for file in copied.glob("checkpoint-*"):
        file.unlink()
    refused(form + "a directory with a checkpoint .* but no check", run, copied)
    shutil.copytree(half, copied, dirs_exist_ok=True)
    (copied / "manifest.json").unlink()
    refused(form + ".* with a manifest.j", run, copied)


def test_a_directory_of_another_format_is_refused_and_its_version_named(copied):
    file = copied / "manifest.json"
    given = json.loads(file.read_text()) | {"format": 3, "versions": {"optax-smile": "0.0.7"}}
    file.write_text(json.dumps(given))
    for name, read in (("sample", run), ("load_snapshots", optax_smile.load_snapshots)):
        rule = rf"`{name}.* of format 5, got format 3 in {file}, written by optax_smile 0.0.7"
        refused(rule, read, copied)


def train(directory, optimizer=None):
    def init(key):
        return {"w": jax.random.normal(key, (2,)), "b": 0.0}

    given: dict[str, Any] = {"num_members": 2, "key": 0, "progress": False, "num_epochs": 1}
    batches, given = runs.regression(), given | {"directory": directory}
    return optax_smile.warmstart(
        runs.mean_loss, init, batches, optimizer or optax.adam(0.1), **given
    )


def test_checkpoints_of_other_states_are_refused(copied, tmp_path):
    rule = r"(?s)The checkpoint .*-0000000008\..*is unknown.*sampler has changed"
    refused(rule, run, copied, sampler=optax.chain(optax.trace(0.9), stub()))
    train(tmp_path / "start")
    with pytest.raises(ValueError, match=r"(?s)The checkpoint .* damaged.*sampler has changed"):
        train(tmp_path / "start", optax.sgd(0.1))
    (file,) = (tmp_path / "start").glob("checkpoint-*")
    shutil.copy(file, copied / "checkpoint-0000000099.part-00000-of-00001.safetensors")
    refused(r"The checkpoint .*-0000000099.* damaged \(it is check", run, copied)
    warned("is finished", train, tmp_path / "start")
    with safe_open(file, "numpy") as content:
        header = json.loads(content.metadata()["optax_smile"])
    text = json.dumps(header | {"formats": [4, 999]})
    checksum = f"{zlib.crc32(text.encode()):08x}"
    save_file(load_file(file), file, {"optax_smile": text, "checksum": checksum})
    rule = r"`warmstart\(directory=...\)` must be .* got \[4, 999\] in .*, written by optax_smile "
    with pytest.raises(optax_smile.ArgumentError, match=rule):
        train(tmp_path / "start")


def test_a_damaged_checkpoint_is_named_and_the_one_before_serves(copied, whole):
    (newest,) = copied.glob("checkpoint-0000000008.*")
    arrays = {name.partition("@")[0]: array.shape for name, array in load_file(newest).items()}
    assert arrays["params.w"] == (runs.CHAINS, 2) and arrays["state.num_gradients"] == (
        runs.CHAINS,
    )
    newest.write_bytes(newest.read_bytes()[:1000])
    refused(f"The checkpoint {newest} is damaged .*one before", run, copied)
    assert len(list(optax_smile.load_snapshots(copied))) == 2 * runs.CHAINS
    newest.unlink()
    assert_same_bits(run(copied), whole)


def test_a_checkpoint_is_written_when_it_is_due(tmp_path, monkeypatch):
    shift, clock = [0.0], time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + shift[0])
    given: dict[str, Any] = {"key": 0, "directory": tmp_path, "checkpoint_minutes": 0.5}
    chains = optax_smile.Run(runs.mean_loss, start(), runs.regression(), stub(), **given)
    for step, seconds, expected in ((1, 20, [0]), (2, 31, [0, 2]), (3, 60, [0, 2])):
        shift[0] = seconds
        chains.advance(step)
        assert checkpoints_in(tmp_path) == expected
    chains.close()


def test_a_full_disk_names_the_file_and_room_lets_it_go_on(tmp_path):
    params = start() | {"wide": jnp.zeros((runs.CHAINS, 6_000))}
    arguments: dict[str, Any] = {"loss": loss_of_wide, "params": params, "check": False}
    expected, pieces = run(tmp_path / "whole", **arguments), tmp_path / "pieces"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_FSIZE, (soft, hard))

        def fill():
            while optax_smile.load_snapshots(pieces).num_draws < 2:
                time.sleep(0.01)
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))

        with pytest.raises(OSError, match=r"could not write .*/pieces/draw-00000002"):
            run(pieces, callback=at(SECOND + 1, fill), **arguments)
    kept = optax_smile.load_snapshots(pieces)
    assert kept.num_draws == 2
    np.testing.assert_array_equal(kept.params["wide"], expected.params["wide"][:, :2])
    assert_same_bits(run(pieces, **arguments), expected)


def test_a_directory_in_use_is_refused_until_its_process_ends(copied, whole):
    hold = "import fcntl, sys; file = open(sys.argv[1], 'a+'); fcntl.flock(file, fcntl.LOCK_EX);"
    hold += "print('held', flush=True); input()"
    command = [sys.executable, "-c", hold, str(copied / ".lock-0")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        rule = r"must be used by no other live run, got .*, which another run is using"
        before = runs.content_of(copied)
        refused(rule, run, copied)
        assert runs.content_of(copied) == before
        other.kill()

    # A process that was forked meanwhile, as by a data loader, has the file open as well.
    def fork():
        opened = {x: os.path.realpath(f"/proc/self/fd/{x}") for x in os.listdir("/proc/self/fd")}
        (held,) = (x for x, file in opened.items() if file == str(copied / ".lock-0"))
        shared.append(os.dup(int(held)))

    shared: list[int] = []
    with pytest.raises(runs.Crash):
        run(copied, callback=lambda number: (fork(), runs.crash()))
    assert_same_bits(run(copied), whole)
    os.close(shared[0])


def test_after_wrong_arguments_the_right_ones_will_do(tmp_path, whole):
    def ends_badly():
        yield from runs.regression()[:5]
        raise runs.Crash

    nan: Any = start() | {"b": jnp.array([0, jnp.nan, 0])}
    rule = r"`sample\(params=...\)` must be a start at .* finite, got nan in the chains \[1\]"
    # Arguments are judged before anything is written.
    with pytest.raises(ValueError, match=r"`sample\(aux=...\)` must be .* axis of 3 chains, got"):
        run(tmp_path / "aux", loss=runs.crash, aux=jnp.zeros((2, 2)))
    assert not (tmp_path / "aux").exists()
    for name, arguments, message in (
        ("rows", {"batches": [np.zeros(3)], "check": False}, None),
        ("later", {"batches": ends_badly()}, None),
        ("start", {"params": nan}, rule),
    ):
        given: dict[str, Any] = arguments
        with pytest.raises((runs.Crash, ValueError, TypeError), match=message):
            run(tmp_path / name, **given)
        assert_same_bits(run(tmp_path / name), whole)


def test_a_checkpoint_waits_for_the_draws_before_it(tmp_path, monkeypatch):
    """However slowly they are written: what it counts is on disk."""
    replace, counted = os.replace, []

    def slow(source, target):
        name = Path(target).name
        if name.startswith("draw-"):
            time.sleep(0.2)
        elif name.startswith("checkpoint-"):
            num_kept = max(0, (int(name[11:21]) - runs.WARMUP) // runs.THIN)
            counted.append((len(list(tmp_path.glob("draw-*.safetensors"))), num_kept))
        replace(source, target)

    monkeypatch.setattr(os, "replace", slow)
    run(tmp_path, checkpoint_minutes=0)
    assert max(kept for _, kept in counted) == runs.DRAWS
    assert all(on_disk >= kept for on_disk, kept in counted)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_draws(tmp_path):
    """500 draws would be 24 MB, on the device or the host, and more than 500 objects."""
    params = {**start(), "wide": jnp.zeros((runs.CHAINS, 4_000))}
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    live, host, blocks = {}, {}, ([], [], [])

    def look(step):
        if step % 100 < 10:
            live[step] = sum(array.nbytes for array in jax.live_arrays())
        if 190 < step % 250 <= 200:
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            host[step] = pages * os.sysconf("SC_PAGE_SIZE")
            blocks[step // 250].append(sys.getallocatedblocks())

    steps: dict[str, Any] = {"num_warmup": 0, "num_draws": 701, "thin": 1, "check": False}
    run(tmp_path, loss=loss_of_wide, params=params, callback=look, **steps)
    early, *later = (max(live[i] for i in range(j - 5, j)) for j in (10, 305, 310, 605, 610))
    # Two draws wait for the disk.
    assert max(later) - early <= 3 * size
    assert host[700] - host[200] < 10e6
    # What waits for the disk, or for another process, comes and goes. What is made once, such as by
    # a garbage collection of other tests, is made in one of the halves.
    assert min(np.diff([min(x) for x in blocks])) < 250
