"""Runs in a directory that are stopped in every way and resumed, compared with an undisturbed run.

A state machine chooses the next event: `pytest tests/faults/test_runs.py --full` for longer.
Messages, costs and a full disk have their own tests below.
"""

import contextlib
import functools
import gc
import json
import os
import re
import resource
import shutil
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from signal import SIG_IGN, SIGINT, SIGTERM, getsignal, raise_signal, signal
from typing import Any
from unittest import mock

from benchmarks import records

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from runs import CHAINS, THIN, WARMUP, assert_same_bits, checkpoints_in, refused, send, stub

import optax_smile

# Slow tests, too, compare bits with results of fixtures.
OPTIMIZED = False
# Draws of the undisturbed run, at steps 5, 8, 11, 14 and 17.
MOST = 5
STEPS = WARMUP + MOST * THIN
HANDLERS = [getsignal(number) for number in (SIGINT, SIGTERM)]
# Names that need care.
NAMES = "a.b", "a/b", "__metadata__"
NAMED = runs.start() | {x: jnp.full((CHAINS, 1), 2.0) for x in NAMES}
NAMED |= {"a": {"b": jnp.ones((CHAINS, 1))}}


def normalised_loss(params, batch, *, aux, key):
    """Moves a running mean as BatchNorm does, and drops inputs."""
    x, y = batch
    mean = 0.9 * aux["mean"] + 0.1 * jnp.mean(x, axis=0)
    kept = jax.random.bernoulli(key, 0.8, x.shape)
    return runs.mean_loss(params, (jnp.where(kept, x - mean[None], 0.0), y)), {"mean": mean}


class Placed(runs.Watched):
    """Endless batches with a place that can be set."""

    at = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.callback(self.at)
        self.at += 1
        return self.batches[(self.at - 1) % len(self.batches)]

    def get_state(self):
        return json.dumps({"at": self.at}).encode()

    def set_state(self, state):
        self.at = json.loads(state.decode())["at"]


# Arguments of a run; `batches` makes those up to a number, which call `see` when they are read.
KINDS: dict[str, dict[str, Any]] = {
    "a place": {"params": NAMED, "batches": lambda see, _: Placed(runs.regression(), see)},
    "state of the model": {
        "loss": normalised_loss,
        "aux": {"mean": jnp.ones((CHAINS, 2)) * jnp.arange(CHAINS)[:, None]},
        "sampler": stub(kind=runs.TwoGradients),
        "batches": lambda see, _: runs.Watched(runs.regression(), see),
        **dict(batch_per="step", steps_per_dispatch=3, stochastic=True),
    },
    "a generator": {
        "sampler": optax.chain(optax.clip_by_global_norm(1.0), stub(kind=runs.TwoGradients)),
        "batches": lambda see, count: (x for x in runs.Watched(runs.own_batches(40)[:count], see)),
        "per_chain": True,
    },
}
GRADIENTS = {"a place": 1, "state of the model": 2, "a generator": 2}


def given_of(kind: str, see=lambda number: None, count=None, **others) -> dict[str, Any]:
    given = KINDS[kind]
    return {**given, "batches": given["batches"](see, count), "check": False, **others}


@functools.cache
def undisturbed(kind: str) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        whole = runs.run(directory, num_draws=MOST, **given_of(kind))
        return optax_smile.Snapshots(whole.params, whole.trace)


def first(number: int, draws: Any) -> Any:
    """The first draws of each chain."""
    params, trace = jax.tree.map(lambda x: x[:, :number], (draws.params, draws.trace))
    return optax_smile.Snapshots(params, trace)


@contextlib.contextmanager
def power_failure(directory: Path, copy: Path, number: int):
    """Copy a directory right before a rename, as it would be found after a power failure.

    A file that was not synced is empty, and a draw whose folder was not synced has no name yet.
    Draws are slow to be written, so that nothing precedes them by chance. Another thread may be
    writing one from the beginning.
    """
    replace, fsync, synced, unsynced, nameless = os.replace, os.fsync, set(), set(), set()
    turn = threading.RLock()

    @functools.cache
    def fail():
        copy.mkdir()
        for file in directory.iterdir():
            with contextlib.suppress(FileNotFoundError):
                shutil.copy(file, copy)
        for file in unsynced:
            (copy / file).write_bytes(b"")
        for file in nameless:
            (copy / file).unlink()

    def note_sync(descriptor):
        fsync(descriptor)
        with turn:
            synced.add(path := os.path.realpath(f"/proc/self/fd/{descriptor}"))
            if Path(path) == directory:
                nameless.clear()

    def note_name(draft, path):
        nonlocal number
        is_draw, name = Path(path).name.startswith("draw-"), Path(path).name
        time.sleep(0.02 * is_draw)
        with turn:
            if number == 0:
                fail()
            number -= 1
            replace(draft, path)
            nameless.update([name] * is_draw)
            unsynced.update([name] * (str(draft) not in synced))

    with mock.patch.object(os, "fsync", note_sync):
        synced.update(map(str, directory.glob(".*")))
        with mock.patch.object(os, "replace", note_name):
            yield
            with turn:
                fail()


# At a draw, in the body of the loop, or where a batch is read.
IN_BODY = {"break": None, "Ctrl-C": lambda: raise_signal(SIGINT), "an error": runs.crash}
IN_BATCHES = {
    "SIGTERM": send(SIGTERM),
    "Ctrl-C in a step": send(SIGINT),
    "Ctrl-C twice": send(SIGINT, SIGINT),
    "an error of a loader": runs.crash,
}
# Here the chains may be within a step.
CLOSING = "an error", "Ctrl-C twice", "an error of a loader"
is_closed = precondition(lambda self: self.run is None)
MINUTES = st.sampled_from([0, 60])


class Disturbed(RuleBasedStateMachine):
    """A directory, the open run in it if there is one, and the step of its newest checkpoint."""

    kind: str

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp()).resolve()
        self.directory, self.whole = self.folder / "run", undisturbed(self.kind)
        self.number = self.num_read = self.minutes = self.kept = 0
        self.run: Any = None
        self.trap: Any = None

    def see(self, _):
        """Record that a batch is read, and trigger the planned event."""
        self.num_read += 1
        if self.trap and self.num_read >= self.trap[0]:
            happens, self.trap = self.trap[1], None
            happens()

    def new_folder(self) -> Path:
        self.number += 1
        return self.folder / str(self.number)

    def newest(self) -> int:
        return max(checkpoints_in(self.directory), default=0) // GRADIENTS[self.kind]

    def begin(self, **others) -> optax_smile.Run:
        self.num_read = 0
        run = runs.begin(self.directory, **given_of(self.kind, self.see) | others)
        assert self.kind != "a place" or self.num_read == 0
        return run

    def sample(self, directory, num_draws=MOST, **others) -> Any:
        return runs.run(directory, num_draws=num_draws, **given_of(self.kind, **others))

    def loop(self, number: int):
        """Check draws in a loop, and overwrite the yielded copies."""
        self.run.advance(WARMUP)
        for draw in self.run.draws(min(self.run.num_draws + number, MOST), thin=THIN):
            row, stats = self.run.num_draws - 1, self.run.stats
            params, trace = jax.tree.map(
                lambda x, row=row: x[:, row], (self.whole.params, self.whole.trace)
            )
            chex.assert_trees_all_equal(draw, self.run.last_accepted(), params)
            assert self.run.num_steps == WARMUP + (row + 1) * THIN == trace["step"][0]
            np.testing.assert_array_equal(stats["loss"], trace["loss"])
            np.testing.assert_array_equal(stats["num_gradients"], trace["num_gradients"])
            jax.tree.map(lambda x: x.fill(0), (draw, stats))
            yield

    def leave(self, num_draws: int):
        """Require the stored draws, at least so many, once no run is open."""
        self.run, self.kept = None, self.newest()
        if (self.directory / "manifest.json").exists():
            stored = optax_smile.load_snapshots(self.directory)
            assert stored.num_draws >= num_draws
            if stored.num_draws:
                assert_same_bits(stored, first(stored.num_draws, self.whole))

    def resume(self, minutes: int):
        """Resume unless a run is open; a second run is rejected meanwhile."""
        if self.run:
            return
        self.minutes, self.run = minutes, self.begin(checkpoint_minutes=minutes)
        num_draws = max(self.kept - WARMUP, 0) // THIN
        assert (self.run.num_steps, self.run.num_draws) == (self.kept, num_draws)
        before = runs.content_of(self.directory)
        refused(r"`Run\(directory=...\)` must be used by no other live run", self.begin)
        assert runs.content_of(self.directory) == before

    @rule(number=st.integers(1, 2), minutes=MINUTES)
    def advance(self, number, minutes):
        """Advance to the first draw, or to the step before the next one."""
        self.resume(minutes)
        now = self.run.num_steps
        end = WARMUP if self.run.num_warmup is None else now + (WARMUP - 1 - now) % THIN
        self.run.advance(min(now + number, end), trace=False)
        self.kept = self.kept if self.minutes else self.run.num_steps

    @rule(
        way=st.sampled_from([*IN_BODY, *IN_BATCHES]),
        number=st.integers(1, 3),
        wait=st.integers(1, 6),
        minutes=MINUTES,
    )
    def draw(self, way, number, wait, minutes):
        self.resume(minutes)
        run, happens = self.run, IN_BATCHES.get(way)
        self.trap = happens and (self.num_read + wait, happens)
        closing = run if way in CLOSING else contextlib.nullcontext()
        with contextlib.suppress(KeyboardInterrupt, runs.Crash), closing:
            for made, _ in enumerate(self.loop(number), 1):
                if made < number:
                    continue
                if way == "break":
                    break
                IN_BODY.get(way, lambda: None)()
        has_ended, self.trap = happens and self.trap is None and way not in CLOSING, None
        if has_ended or not self.minutes:
            self.kept = run.num_steps
        assert self.newest() == self.kept or "This run is closed" in repr(run)
        if way in CLOSING:
            assert self.newest() >= self.kept
            self.leave(run.num_draws)

    @rule(ends=st.booleans(), minutes=MINUTES)
    def store(self, ends, minutes):
        """After a crash there may be more draws than the newest checkpoint counts."""
        self.resume(minutes)
        run = self.run
        if run.num_draws and not ends:
            assert_same_bits(got := run.snapshots(), first(got.num_draws, self.whole))
            assert got.num_draws >= run.num_draws and self.newest() == run.num_steps
            self.kept = run.num_steps
        elif ends:
            run.close()
            self.leave(run.num_draws)
            assert self.kept == run.num_steps

    @rule(number=st.integers(0, 8))
    def fail(self, number):
        copy = self.new_folder()
        with power_failure(self.directory, copy, number):
            self.run = self.run or self.begin(checkpoint_minutes=0)
            for _ in self.loop(2):
                pass
        before, self.directory = self.kept, copy
        self.leave(max(before - WARMUP, 0) // THIN)
        assert self.kept >= before

    @is_closed
    @rule(num_draws=st.integers(1, MOST), is_elsewhere=st.booleans())
    def finish(self, num_draws=MOST, is_elsewhere=False):
        """Another start is ignored, and a finished run takes no further steps."""
        is_elsewhere, end = is_elsewhere and self.kept > 0, WARMUP + num_draws * THIN
        params = KINDS[self.kind].get("params", runs.start())
        params = jax.tree.map(lambda x: x + is_elsewhere, params)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            got = self.sample(self.directory, num_draws, params=params)
        told, is_finished = " ".join(str(x.message) for x in seen), self.kept >= end
        texts = "is finished. Its draws are returned", "Your `params` differ from its start"
        assert [text in told for text in texts] == [is_finished, is_elsewhere], told
        assert len(seen) == is_finished + is_elsewhere and got.interrupted is None
        assert_same_bits(got, first(num_draws, self.whole))
        self.kept = max(self.kept, end)
        assert self.kept == self.newest()

    @is_closed
    @precondition(lambda self: self.kind == "a generator" and self.kept < STEPS - 1)
    @rule(left=st.sampled_from([-1, *range(2, 12)]))
    def run_out_of_batches(self, left):
        """Batches after the last whole step are read again, if the next run provides them."""
        taken, per_step = self.kept * GRADIENTS[self.kind], GRADIENTS[self.kind]
        count = min(max(taken + left, 0), STEPS * per_step - 1)
        go = functools.partial(self.sample, self.directory, count=count)
        if count < taken:
            refused(rf"return to batch {taken} of pass 0, .*, got batch {count}", go)
        elif count // per_step < WARMUP + THIN:
            refused(r"`sample\(batches=...\)` must be a list, .*, got (no|\d+) batches", go)
        else:
            runs.warned("^`sample` ended early with . of 5 draws .*: the batches ran out", go)
        self.kept = max(taken, count) // per_step
        assert self.kept == self.newest()

    @invariant()
    def signals_mean_what_they_did(self):
        assert [getsignal(number) for number in (SIGINT, SIGTERM)] == HANDLERS

    def teardown(self):
        """Even without `close`, a directory is released once its run is deleted."""
        self.run = None
        self.kept = self.newest()
        self.finish()
        assert not list(self.directory.glob(".draw*")) and len(checkpoints_in(self.directory)) <= 2
        shutil.rmtree(self.folder)


@pytest.mark.parametrize("number", [2, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_happens_the_draws_are_those_of_a_run_in_peace(kind, number, full):
    settings = hypothesis.settings(
        max_examples=5 * number if full else number,
        stateful_step_count=20 if full else 8,
        derandomize=not full,
        # Without the shrinking phase, which takes many minutes.
        phases=[hypothesis.Phase.generate],
        suppress_health_check=[*hypothesis.HealthCheck],  # pyright: ignore
        deadline=None,
        database=None,
    )
    run_machine(type("Disturbed", (Disturbed,), {"kind": kind}), settings=settings)


@pytest.mark.parametrize("way", [*IN_BODY, *IN_BATCHES])
def test_every_way_out_of_a_loop_loses_nothing(way):
    """In step 6, after a draw that is slow to be written."""
    machine = type("Disturbed", (Disturbed,), {"kind": "a place"})()
    with power_failure(machine.directory, machine.new_folder(), -1):
        machine.draw(way, 2, 6, 60)
        machine.resume(0)
    machine.store(True, 0)
    machine.finish(1, True)
    machine.teardown()


def test_a_run_of_two_gradients_goes_on_in_the_order_of_its_batches(tmp_path):
    """Every second pass over an even number of batches begins with the second."""
    given: Any = {"sampler": stub(kind=runs.TwoGradients), "batches": runs.regression(6)}
    whole = runs.run(tmp_path / "whole", **given)
    for number in range(1, runs.DRAWS):
        runs.run(tmp_path / str(number), num_draws=number, **given)
        assert_same_bits(runs.run(tmp_path / str(number), **given), whole)


def test_leaves_of_any_name_have_flat_names(tmp_path):
    runs.run(tmp_path, num_draws=1, **given_of("a place"))
    (stored,) = {tuple(draw) for draw in optax_smile.load_snapshots(tmp_path, flat=True)}
    assert set(stored) == {"b", "w", "a.b", "a/b", "a~1b", "~__metadata__"}


def test_loops_in_memory_take_turns_in_any_thread_and_are_extended():
    whole, got = runs.run(), []

    def alternate():
        first, second = pair = runs.begin(), runs.begin()
        for run in pair:
            run.advance(WARMUP)
        loops = (run.draws(runs.DRAWS, thin=THIN) for run in pair)
        for draw in (x for draws in zip(*loops, strict=True) for x in draws):
            jax.tree.map(lambda x: x.fill(0), (draw, first.stats, second.stats))
        got.extend(run.snapshots() for run in pair)

    thread = threading.Thread(target=alternate)
    thread.start()
    thread.join()
    run = runs.begin()
    run.advance(WARMUP)
    for number in (1, 3, runs.DRAWS):
        for _ in run.draws(number, thin=THIN):
            pass
    assert f"{runs.DRAWS} draws of each, every {THIN} steps after {WARMUP}" in repr(run)
    assert len(got) == 2
    for draws in (*got, run.snapshots()):
        assert_same_bits(draws, whole)


class Counted(runs.StubState):
    """Counts how often the draw of a chain is computed."""

    def last_accepted(self, params):
        jax.debug.callback(lambda: COMPUTED.append(None))
        return super().last_accepted(params)


COMPUTED: list[None] = []


def test_a_draw_is_computed_once(tmp_path):
    """The start is computed as well."""
    for directory in (None, tmp_path):
        COMPUTED.clear()
        with runs.begin(directory, sampler=stub(kind=Counted), checkpoint_minutes=0) as run:
            number = len([run.stats for _ in run.draws(3, thin=2)])
        jax.effects_barrier()
        assert number == 3 and len(COMPUTED) == 4


def test_signals_end_sample_in_order_and_a_second_control_c_at_once(tmp_path):
    """There is one warning, at the caller's line, and benchmarks do not record it."""
    in_first_draw = functools.partial(runs.at, WARMUP + THIN)
    for number in (SIGTERM, SIGINT):
        with pytest.warns(UserWarning) as seen:
            got = runs.run(tmp_path / number.name, callback=in_first_draw(send(number)))
        assert got.interrupted == number.name and got.num_draws == 1
        (warning,) = seen
        told = f"checkpoint is in {tmp_path / number.name}: repeat the call to resume"
        assert re.search(f"{told}.*restarted must not exit with status 0", str(warning.message))
        assert re.match(records.INTERRUPTED, str(warning.message))
        assert warning.filename == runs.__file__
    for directory, text in ((tmp_path, f"is in {tmp_path}: repeat"), (None, "pass a `directory`")):
        with pytest.raises(KeyboardInterrupt, match=f"2 steps and 0 draws per chain. .*{text}"):
            runs.run(directory, callback=runs.at(2, send(SIGTERM)))
    with pytest.raises(KeyboardInterrupt, match="^Interrupted twice"):
        runs.run(tmp_path, callback=in_first_draw(send(SIGINT, SIGINT)))
    before = signal(SIGINT, SIG_IGN)
    try:
        # An ignored one stays ignored.
        assert runs.run(tmp_path, callback=in_first_draw(send(SIGINT))).interrupted is None
        assert getsignal(SIGINT) is SIG_IGN
    finally:
        signal(SIGINT, before)


def test_wrong_use_is_told(tmp_path):
    run, second_draw = runs.begin(tmp_path / "run"), WARMUP + 2 * THIN
    refused("at least one of the 0 steps is a draw, got 0", run.snapshots)
    run.advance(WARMUP)
    next(run.draws(runs.DRAWS, thin=THIN))
    message = rf"`Run.advance\(num_steps=...\)` must be below {second_draw}, the st"
    refused(message, run.advance, second_draw)
    thin = r"`Run.draws\(thin=...\)` must be 3, as for .*, got "
    refused(thin + "4", run.draws, runs.DRAWS, thin=4)
    # A second loop continues at the step of the first.
    second = run.draws(runs.DRAWS, thin=THIN)
    next(second)
    run.close()
    assert run.snapshots().num_draws == 2 and "This run is closed" in repr(run)
    for use in (lambda: next(second), lambda: run.draws(9, thin=THIN), lambda: run.advance(99)):
        refused(r"`Run.(draws|advance)`: This run is closed", use)
    refused(thin + "2", lambda: runs.begin(tmp_path / "run").draws(runs.DRAWS, thin=2))
    message = r"`Run\(batches=...\)` must be a list, which is .* 3 batc"
    refused(message, lambda: runs.begin(batches=iter(runs.regression()[:3])).advance(4))
    refused(message, lambda: next(runs.begin(batches=iter(runs.regression()[:3])).draws(2, thin=4)))
    runs.warned("^`Run`: `sampler` is an optimizer", runs.begin, sampler=optax.sgd(0.1))
    # Arguments are checked before anything is written.
    message, aux = r"`sample\(aux=...\)` must be .* axis of 3 chains, got", jnp.zeros((2, 2))
    refused(message, runs.run, tmp_path / "aux", loss=runs.crash, aux=aux)
    assert not (tmp_path / "aux").exists()
    same = jax.tree.map(jnp.zeros_like, runs.start())
    message = r"`sample\(params=...\)` .* in the chains \[1, 2\]"
    refused(message, runs.run, params=same, sampler=runs.quiet())
    # In a `named_chain` the order is lost, so that the structure cannot tell.
    sgld = optax_smile.sgld(0.02, num_data=runs.NUM_DATA, key=0)
    late = optax.named_chain(("sampler", sgld), ("decay", optax.add_decayed_weights(0.1)))
    ones = runs.start() | {"b": jnp.ones(CHAINS)}
    message = r"`sample\(sampler=...\)` .* in the chains \[0, 1, 2\]"
    refused(message, runs.run, sampler=late, params=ones, check=False)


def test_a_start_that_is_rounded_on_disk_is_known(tmp_path):
    tenths = runs.start() | {"b": jnp.full(CHAINS, 0.1)}
    given: Any = {"params": tenths, "num_warmup": 0, "num_draws": 1, "dtype": "float16"}
    assert runs.run(tmp_path, **given).params["w"].dtype == np.float32
    with pytest.warns(UserWarning) as seen:
        runs.run(tmp_path, **given)
    assert len(seen) == 1 and "is finished" in str(seen[0].message)


def test_a_checkpoint_is_written_when_it_is_due(tmp_path, monkeypatch):
    shift, clock = [0.0], time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + shift[0])
    with runs.begin(tmp_path, checkpoint_minutes=0.5) as run:
        for step, seconds, expected in ((1, 20, [0]), (2, 31, [0, 2]), (3, 60, [0, 2])):
            shift[0] = seconds
            run.advance(step)
            assert checkpoints_in(tmp_path) == expected


def loss_of_wide(params, batch):
    return runs.mean_loss(params, batch) + jnp.sum((params["wide"] - 0 * batch[1].mean()) ** 2) / 2


def test_a_full_disk_names_the_file_and_room_lets_it_go_on(tmp_path):
    params = runs.start() | {"wide": jnp.zeros((CHAINS, 6_000))}
    given: Any = {"loss": loss_of_wide, "params": params, "sampler": runs.sghmc(), "check": False}
    go = functools.partial(runs.run, **given)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill():
        while optax_smile.load_snapshots(tmp_path).num_draws < 2:
            time.sleep(0.01)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))

    try:
        with pytest.raises(OSError, match=rf"could not write .*{tmp_path}/draw-00000002"):
            go(tmp_path, callback=runs.at(WARMUP + 2 * THIN + 1, fill))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    kept, whole = optax_smile.load_snapshots(tmp_path), go(tmp_path / "whole")
    assert kept.num_draws == 2
    assert_same_bits(kept, first(2, whole))
    assert_same_bits(go(tmp_path), whole)


def test_a_process_forked_meanwhile_does_not_keep_the_directory(tmp_path):
    """Such as to load data: it has the file of the lock open as well."""
    with runs.begin(tmp_path):
        opened = {x: os.path.realpath(f"/proc/self/fd/{x}") for x in os.listdir("/proc/self/fd")}
        (held,) = (x for x, file in opened.items() if file == str(tmp_path / ".lock-0"))
        shared = os.dup(int(held))
    runs.begin(tmp_path).close()
    os.close(shared)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_draws(tmp_path):
    """500 draws would be 24 MB, on the device or the host, and 250 as many objects or more."""
    params = {**runs.start(), "wide": jnp.zeros((CHAINS, 4_000))}
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    live, host, blocks = {}, {}, ([], [], [], [], [])

    def look(step):
        if step % 100 < 10:
            live[step] = sum(array.nbytes for array in jax.live_arrays())
        if 190 < step % 250 <= 200:
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            host[step] = pages * os.sysconf("SC_PAGE_SIZE")
            blocks[step // 250].append(sys.getallocatedblocks())

    steps: dict[str, Any] = {"num_warmup": 0, "num_draws": 1_201, "thin": 1, "check": False}
    runs.run(tmp_path, loss=loss_of_wide, params=params, callback=look, **steps)
    early, *later = (max(live[i] for i in range(j - 5, j)) for j in (10, 305, 310, 605, 610))
    # Two draws wait for the disk.
    assert max(later) - early <= 3 * size
    assert host[700] - host[200] < 10e6
    # Objects that wait for the disk or another process are temporary. Objects that are made once,
    # such as by a garbage collection, do not appear in all quarters.
    assert min(np.diff([min(x) for x in blocks])) < 250
