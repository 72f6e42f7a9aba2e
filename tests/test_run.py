"""A run as an iterator: the draws of `sample`, ways out of the loop, and wrong use."""

import contextlib
import signal
import threading
from typing import Any

import jax
import numpy as np
import optax
import pytest
import runs
from runs import DRAWS, STEPS, THIN, WARMUP, assert_same_bits, refused, regression, stub

from optax_smile import Run, parallel

SECOND_DRAW = WARMUP + 2 * THIN


def begin(directory=None, sampler=None, callback: Any = lambda number: None, **given) -> Run:
    given = {"key": 0, "checkpoint_minutes": 60, "directory": directory} | given
    batches = given.pop("batches", runs.Watched(regression(), callback))
    return Run(runs.mean_loss, runs.start(), batches, sampler or stub(), **given)


def warm(directory=None, **given) -> Run:
    """A run whose trace is that of `sample`."""
    run = begin(directory, **given)
    for step in range((WARMUP - 1) % THIN + 1, WARMUP + 1, THIN):
        run.advance(step)
    return run


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    return runs.run(tmp_path_factory.mktemp("whole") / "run")


def test_a_loop_makes_the_draws_of_sample_and_hands_out_copies(tmp_path, stored):
    for directory, whole in ((None, runs.run()), (tmp_path, stored)):
        with warm(directory) as run:
            seen = []
            for number, draw in enumerate(run.draws(DRAWS, thin=THIN), 1):
                assert (run.num_draws, run.num_steps) == (number, WARMUP + number * THIN)
                assert run.stats["num_gradients"].tolist() == [run.num_steps] * runs.CHAINS
                column = number - 1 - DRAWS
                np.testing.assert_array_equal(run.stats["loss"], whole.trace["loss"][:, column])
                jax.tree.map(np.testing.assert_array_equal, draw, run.last_accepted())
                seen.append(jax.tree.map(np.array, draw))
                # What is handed out is the caller's.
                draw["w"] *= np.nan
                run.stats["loss"][:] = 0
                if number == 2:
                    kept = draw
            assert f"{DRAWS} draws of each, every {THIN} steps after {WARMUP}" in repr(run)
        assert np.isnan(kept["w"]).all()
        assert_same_bits(run.snapshots(), whole)
        np.testing.assert_array_equal(np.stack([x["w"] for x in seen], 1), whole.params["w"])


class Counted(runs.StubState):
    """Counts how often the draw of a chain is computed."""

    def last_accepted(self, params):
        jax.debug.callback(lambda: COMPUTED.append(None))
        return super().last_accepted(params)


COMPUTED: list[None] = []


def test_a_draw_is_computed_once_and_the_carry_is_not_copied(tmp_path, monkeypatch):
    """The start is computed as well; a run copies what it is given, and a checkpoint it reads."""
    copies, copy = [], parallel._copy
    monkeypatch.setattr(parallel, "_copy", lambda tree: copies.append(None) or copy(tree))
    for directory in (None, tmp_path / "sample"):
        COMPUTED.clear()
        runs.run(directory, sampler=stub(kind=Counted), num_draws=10, checkpoint_minutes=0)
        jax.effects_barrier()
        assert len(COMPUTED) == 11
    COMPUTED.clear()
    copies.clear()
    with begin(tmp_path / "run", stub(kind=Counted), checkpoint_minutes=0) as run:
        number = len([run.stats for _ in run.draws(3, thin=2)])
    jax.effects_barrier()
    assert number == 3 and len(COMPUTED) == 4
    assert len(copies) <= 4


@pytest.mark.parametrize("way", ["break", "Ctrl-C in the loop", "SIGTERM in a step"])
def test_every_way_out_of_a_loop_loses_nothing(tmp_path, stored, way):
    handlers = [signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)]
    stop = runs.at(SECOND_DRAW, runs.send(signal.SIGTERM))
    run = warm(tmp_path, callback=stop if way == "SIGTERM in a step" else lambda number: None)
    with contextlib.suppress(KeyboardInterrupt):
        for _ in run.draws(DRAWS, thin=THIN):
            if run.num_draws == 2 and way == "break":
                break
            if run.num_draws == 2 and way == "Ctrl-C in the loop":
                signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert run.snapshots().num_draws == run.num_draws == 2
    refused(r"`Run\(directory=...\)` must be used by no other live", begin, tmp_path)
    run.close()
    # What is there is not made again.
    again = begin(tmp_path)
    assert (again.num_steps, again.num_draws) == (SECOND_DRAW, 2)
    again.advance(WARMUP)
    assert len(list(again.draws(DRAWS, thin=THIN))) == DRAWS - 2
    assert_same_bits(again.snapshots(), stored)
    again.close()
    # The lock ends with the run, also without `close`.
    del again
    assert list(begin(tmp_path).draws(DRAWS, thin=THIN)) == []


def test_runs_alternate_in_any_thread_and_are_extended_between_draws():
    whole, got = runs.run(), []

    def alternate():
        first, second = warm(), warm()
        for _ in zip(*(x.draws(DRAWS, thin=THIN) for x in (first, second)), strict=True):
            pass
        got.extend([first.snapshots(), second.snapshots()])

    alternate()
    thread = threading.Thread(target=alternate)
    thread.start()
    thread.join()
    run = warm()
    for number in (1, 3, DRAWS):
        for _ in run.draws(number, thin=THIN):
            # Steps before the next draw change nothing.
            run.advance(run.num_steps + 1, trace=False)
    run.advance(STEPS)
    assert len(got) == 4
    for draws in (*got, run.snapshots()):
        assert_same_bits(draws, whole)


def test_wrong_use_is_told(tmp_path):
    run = begin(tmp_path)
    refused("at least one of the 0 steps is a draw, got 0", run.snapshots)
    run.advance(WARMUP)
    next(run.draws(DRAWS, thin=THIN))
    rule = r"`Run.advance\(num_steps=...\)` must be below 8, the st"
    refused(rule, run.advance, SECOND_DRAW)
    rule = r"`Run.draws\(thin=...\)` must be 3, as for .*, got "
    refused(rule + "4", run.draws, DRAWS, thin=4)
    # Another loop goes on where this one is.
    second = run.draws(DRAWS, thin=THIN)
    next(second)
    run.close()
    assert run.snapshots().num_draws == 2 and "This run is closed" in repr(run)
    for use in (lambda: next(second), lambda: run.draws(9, thin=THIN), lambda: run.advance(99)):
        refused(r"`Run.(draws|advance)`: This run is closed", use)
    refused(rule + "2", lambda: begin(tmp_path).draws(DRAWS, thin=2))
    rule = r"`sample\(thin=...\)` must be 3, as for .*, got 2"
    refused(rule, runs.run, tmp_path, thin=2)
    rule = r"`sample\(num_warmup=...\)` must be 2, as in .*, got 5"
    refused(rule, runs.run, tmp_path, num_warmup=5)
    rule = r"`Run\(batches=...\)` must be a list, which is .* 3 batc"
    refused(rule, lambda: begin(batches=iter(regression()[:3])).advance(4))
    refused(rule, lambda: next(begin(batches=iter(regression()[:3])).draws(2, thin=4)))
    runs.warned("^`Run`: `sampler` is an optimizer", begin, sampler=optax.sgd(0.1))
