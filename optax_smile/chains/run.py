"""A run of many chains, which advances on request."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal, cast

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from optax_smile import _check, _on_host, _settings, _table, mistakes, parallel
from optax_smile._types import Options
from optax_smile._warn import warn
from optax_smile.chains import _centers, _directory, _host, _optimizer, _renewal
from optax_smile.chains._chains import Chains
from optax_smile.draws import _format
from optax_smile.draws.snapshots import Snapshots, StoredSnapshots
from optax_smile.mistakes.loss import warn_of
from optax_smile.state import AFTER

BatchPer = Literal["gradient", "step"]
RESTART = "A generator cannot be restarted: pass a list."
AGREE_EVERY = 100  # Steps after which several processes agree on signals and checkpoints.
LEFT = "A process left the loop over `Run.draws`. All must leave it at the same draw."
# Appended to the message of an interrupt after which the draws so far are returned.
EXIT = "A script that is to be restarted must not exit with status 0: see `interrupted`."


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM, between two steps."""


def _method(function: _check.Function_) -> _check.Function_:
    """Disable JAX's debugging flags in a method, and name `Run` in its errors."""
    named = _check.called("Run", "parallel.place", "parallel.init", tree="params")
    return _check.on_host(named(function))


class Run:
    """Many chains that advance on request, and their draws.

    `sample` is a run from start to end. Use `Run` to look at draws while they are made, to decide
    when to stop, or to let several runs take turns:

        with optax_smile.Run(loss_fn, params, batches, sampler, key=0, directory="run") as run:
            run.advance(1_000)
            for draw in run.draws(200, thin=50):
                ...
        draws = run.snapshots()

    With a `directory`, the same program resumes where an earlier one was stopped, bit-identically.
    The directory is locked until `close`, the end of the `with` block, or of the process. A `break`
    or an exception in the body loses no draw. Checkpoints are written every `checkpoint_minutes`,
    by `snapshots` and by `close`. After Ctrl-C or SIGTERM between two draws, the chains finish the
    step and write a checkpoint; then `KeyboardInterrupt` is raised. Several processes must make the
    same calls, and leave a loop at the same draw.

    The arguments are those of `sample` without `num_warmup`, `num_draws`, `thin` and `progress`.

    Raises:
        ValueError: see `sample`.

    Example:
        >>> import jax.numpy as jnp, optax_smile
        >>> loss_fn = lambda w, batch: jnp.sum((w - batch) ** 2) / 2
        >>> sampler = optax_smile.sgld(0.01, num_data=10, key=0)
        >>> run = optax_smile.Run(loss_fn, jnp.eye(3, 2), [jnp.ones(2)], sampler, key=0)
        >>> run.advance(20)
        >>> norms = [float(jnp.linalg.norm(draw)) for draw in run.draws(5, thin=2)]
        >>> run.num_steps, len(norms), run.snapshots().params.shape
        (30, 5, (3, 5, 2))
    """

    # Values before the first step. The record of the gradients is that of the last tick.
    _num_gradients = _num_kept = 0
    _gradients: mistakes.gradients.Gradients | None = None
    _stats: Mapping[str, np.ndarray] | None = None
    # Number of draws that the newest loop over `draws` asked for, and its last step.
    _asked = 0, 0
    _draw: Any = None  # The draw at which the loop pauses.
    _signal: Callable[[], str | None] | None = None
    _interrupted: str | None = None  # The signal that ended the last call.
    _refusal = ""  # Reason why the run cannot go on.

    @_check.arguments(
        "Run",
        params=mistakes.start.STARTS,
        batches=_check.BATCHES,
        sampler=_check.TRANSFORMATION,
        key=_check.Key(needed=True),
        aux=mistakes.start.AUX | None,
        batch_per=_check.OneOf(BatchPer),
        control_variate=_renewal.GIVEN | None,
        steps_per_dispatch=_check.Whole(1),
        mesh=parallel.MESH,
        specs=parallel.SPECS,
        directory=_check.PathLike() | None,
        checkpoint_minutes=_check.Real(0, infinite=True, traced=False),
        dtype=_check.OneOf(_format.StoredDtype) | None,
    )
    @_method
    def __init__(
        self,
        loss_fn: Callable[..., object],
        params: optax.Params,
        batches: Iterable[object],
        sampler: optax.GradientTransformation,
        *,
        key: jax.Array | int,
        aux: object = None,
        stochastic: bool = False,
        per_chain: bool = False,
        batch_per: BatchPer = "gradient",
        control_variate: Iterable[object] | None = None,
        steps_per_dispatch: int = 1,
        mesh: Mesh | None = None,
        specs: object = None,
        directory: str | os.PathLike[str] | None = None,
        check: bool = True,
        checkpoint_minutes: float = 5.0,
        dtype: _format.StoredDtype | None = None,
    ):
        if dtype is not None and directory is None:
            _check.fail("dtype", "None without a `directory`", repr(dtype))
        self._batches, self._warns, self._directory = batches, check, directory
        self._steps_per_dispatch = steps_per_dispatch
        stored = _centers.num_stored(control_variate, batches, params, specs, stochastic)
        given: Options = {"key": key, "aux": aux, "stochastic": stochastic, "per_chain": per_chain}
        given |= {"mesh": mesh, "specs": specs, "num_stored": stored}
        given["hint"] = mistakes.batches.advice_on_axes(params, batches)
        made = _optimizer.as_sampler(sampler, params)
        self._chains = Chains(loss_fn, params, made, **given)
        settings = self._chains.settings or {}
        self._is_optimizer, self._centers = settings == _settings.OPTIMIZER, None
        if control_variate is not None:
            number = settings.get("num_data")
            self._centers = _renewal.Centers(control_variate, number, per_chain)
        self._per_step = self._chains.gradients_per_step
        if self._chains.accumulates and self._per_step > 1:
            rule = 'one with `integrator="leapfrog"` inside `optax.MultiSteps`'
            _check.fail("sampler", rule, "one with two gradients per step")
        self._batches_per_step = 1 if batch_per == "step" else self._per_step
        self._stream = _host.Stream(batches, alternates=self._batches_per_step == 2)
        self._position = self._stream.position()
        is_list = isinstance(batches, (list, tuple))
        if is_list:
            mistakes.batches.require_usable(batches, per_chain)
            if check:
                mistakes.batches.warn_of_list(batches, self._chains.losses)
        self._checked = _usable(self._stream, self._chains, check and not is_list)
        same: Options = {"batch_per": batch_per, "control_variate": control_variate is not None}
        same |= {"stochastic": stochastic, "per_chain": per_chain}
        same["key"] = np.asarray(jax.random.key_data(cast(jax.Array, key))).tolist()
        self._begin(same, dtype, checkpoint_minutes)
        # `select` passes an optimizer that it has already converted.
        if made.init != sampler.init:
            what = "Its iterates are checkpoints, not posterior draws."
            warn(f"`{_check.function_name()}`: `sampler` is an optimizer. {what}")

    def _begin(self, same: Options, dtype: _format.StoredDtype | None, minutes: float):
        """Store draws in memory or in the directory, and resume a run with the `same` settings."""
        start, settings = self._chains.draw(), self._chains.settings
        self._kept: _directory.MemoryRun | _directory.DirectoryRun
        closing = contextlib.ExitStack()
        self._close = weakref.finalize(self, closing.close)
        try:
            if self._directory is None:
                self._kept = _directory.MemoryRun(_on_host.local(start), settings)
                return
            batches = _directory.describe_batches(self._batches)
            same = {**same, "sampler": settings, "batches": batches}
            closing.enter_context(_directory.lock(Path(self._directory)))
            given = same, dtype, minutes, closing
            self._kept = _directory.DirectoryRun(self._directory, start, *given)
            self._resume(self._kept)
        except BaseException:
            self._close()
            raise

    def _resume(self, kept: _directory.DirectoryRun):
        """Continue from the newest checkpoint, or write the first one."""
        if (restored := kept.restore(self._chains.tree)) is None:
            self.checkpoint()
            return
        self._chains.tree, place = restored
        self._num_gradients, self._num_kept = place["num_gradients"], place["num_kept"]
        self._position = _host.Position(**place["position"])
        if self._centers is not None:
            self._chains.plan = _centers.Plan(**place["centers"])
        self._stream.go_to(self._position)

    @property
    def num_steps(self) -> int:
        """Steps of each chain so far."""
        return self._num_gradients // self._per_step

    @property
    def num_warmup(self) -> int | None:
        """Steps of each chain after which its draws began; None before."""
        return None if self._kept.begun is None else self._kept.begun["num_warmup"]

    @property
    def num_draws(self) -> int:
        """Draws of each chain so far."""
        return self._num_kept

    @property
    @_method
    def stats(self) -> dict[str, np.ndarray]:
        """Statistics of the chains now, arrays `[chain]`.

        They are the fields of `optax_smile.stats`, `loss`, and `start_loss`, the mean loss of the
        first eight gradients. For an optimizer, step size and energies are NaN.
        """
        if self._stats is None:
            self._stats, _ = self._chains.record()
        return {name: np.array(x) for name, x in self._stats.items()}

    @_method
    def last_accepted(self) -> Any:
        """Copy the current point of all chains to the host, arrays `[chain, ...]`.

        With `aux` it is `{"params": ..., "aux": ...}`. Each of several processes gets its chains.
        """
        return _on_host.local(self._chains.draw())

    @_method
    @_check.arguments("Run.advance", num_steps=_check.Whole(0))
    def advance(self, num_steps: int, *, trace: bool = True):
        """Run the chains up to a total number of steps, without keeping draws.

        Args:
            num_steps: steps of each chain since the start, >= 0. Once the draws have begun, the
                next draw must come after them.
            trace: whether the trace gets the statistics at the end of the call.

        Raises:
            ValueError: the call would pass the step of a draw; the run is closed; the batches run
                out; see also `sample`.
            KeyboardInterrupt: after Ctrl-C or SIGTERM and a checkpoint.
        """
        self._require_open("Run.advance")
        if self.num_steps >= num_steps:
            return
        if self._kept.begun is not None and num_steps >= (place := self._next_draw()):
            rule = f"below {place}, the step of the next draw"
            _check.fail("num_steps", rule, num_steps, "Go on with `draws`.")
        if not self._go_to(num_steps, trace):
            self._refuse_batches(num_steps * self._batches_per_step)

    @_method
    @_check.arguments("Run.draws", num_draws=_check.Whole(1), thin=_check.Whole(1))
    def draws(self, num_draws: int, *, thin: int = 1) -> Iterator[Any]:
        """Make draws, keep each of them, and iterate over them.

        The first call fixes their steps: `thin` steps apart, after the steps made before. The loop
        ends early, with a warning, if the batches run out.

        Args:
            num_draws: total number of draws per chain, >= 1. It includes draws that the run already
                has, which are not returned again. Steps where `is_draw` is False have no draw.
            thin: steps between draws, >= 1.

        Yields:
            The draw of all chains, a copy as from `last_accepted`.

        Raises:
            ValueError: `thin` differs from that of earlier draws; the run is closed; the batches
                ran out before the first draw; see also `sample`.
            KeyboardInterrupt: after Ctrl-C or SIGTERM and a checkpoint.
        """
        return (_on_host.local(self._draw) for _ in self.making(num_draws, thin))

    def making(self, num_draws: int, thin: int) -> Iterator[None]:
        """Make draws as `draws` does, and pause after each, without copies for the caller."""
        begun = self._kept.begun
        if begun is not None and begun["thin"] != thin:
            _check.fail("thin", f"{begun['thin']}, as for the draws that the run has", thin)
        self._require_open("Run.draws")
        if begun is None:
            self._kept.begin(self.num_steps, thin)
        return self._iterate(num_draws, thin)

    def _iterate(self, num_draws: int, thin: int) -> Iterator[None]:
        end = (self.num_warmup or 0) + num_draws * thin
        self._asked = num_draws, end
        while self.num_steps < end:
            number = self._num_kept
            if not self._go_to(self._next_draw()):
                self._warn_of_batches(num_draws, end)
                return
            if self._num_kept > number:
                yield from self._hand_over(num_draws)

    def _next_draw(self) -> int:
        """Return the step of the next draw."""
        num_warmup, thin = (cast(dict, self._kept.begun)[x] for x in ("num_warmup", "thin"))
        passed = max(self.num_steps - num_warmup, 0)
        return num_warmup + (passed // thin + 1) * thin

    def _hand_over(self, num_draws: int) -> Iterator[None]:
        """Pause at a draw; with several processes, require that all of them return or none."""
        is_left = True
        try:
            yield
            is_left = False
        finally:
            self._draw = None
            if jax.process_count() > 1 and self._num_kept < num_draws:
                if all(_host.any_process(is_left, not is_left)):
                    self._refusal = LEFT
        self._require_open("Run.draws")

    @_method
    def snapshots(self) -> Snapshots | StoredSnapshots:
        """Return all draws so far, as `sample` does; with a directory, after a checkpoint.

        It warns if gradients were not finite, or if a clip before the sampler shortened them.

        Raises:
            ValueError: there are none.
        """
        number, (wanted, end) = self._num_kept, self._asked
        if not number:
            rule = f"large enough that at least one of the {self.num_steps} steps is a draw"
            advice = "Run longer, or lower `adapt_steps` or `exploration` of the sampler."
            with _check.called("Run.draws"):
                _check.fail("num_draws", rule, wanted, advice)
        if number < wanted and self.num_steps == end:
            fewer = f"{number} draws per chain instead of {wanted}"
            name = _check.function_name()
            warn(f"`{name}` kept {fewer}: at the other steps, `is_draw` is False.")
        if self._close.alive:
            self.checkpoint()
        if self._is_optimizer:
            _optimizer.warn_of_nonfinite(self.stats["num_nonfinite"])
        elif self._warns and (seen := self._gradients) is not None and seen.num_calls.size:
            # A process may hold no chain.
            warn_of(mistakes.gradients.checks(seen, self.stats))
        if self._gradients is not None:
            warn_of(mistakes.gradients.lost_numbers(self._gradients, self._chains.like.aux))
        draws = self._kept.result()
        draws.interrupted = self._interrupted
        return draws

    @_method
    def close(self):
        """Write a checkpoint, release the directory, and end the run. `snapshots` still works."""
        try:
            if self._close.alive:
                self.checkpoint()
        finally:
            self._refusal = self._refusal or "This run is closed."
            self._close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object):
        if kind is None:
            self.close()
        else:
            # A failed call may have left the chains within a step.
            self._refusal = "This run is closed."
            self._close()

    def __repr__(self) -> str:
        rows = {"sampler": str((self._chains.settings or {}).get("name"))}
        begun = self._kept.begun
        if begun is not None:
            counted = _table.counted(self._num_kept, "draw")
            places = f"every {begun['thin']} steps after {begun['num_warmup']}"
            rows["draws"] = f"{counted} of each, {places}"
        if self._directory is not None:
            rows["folder"] = str(self._directory)
        if self._refusal:
            rows["state"] = self._refusal
        chains = _table.counted(self._chains.number, "chain")
        steps = _table.counted(self.num_steps, "step")
        return _table.described(f"Run: {chains} after {steps}", rows)

    def _require_open(self, method: str):
        if self._refusal:
            raise ValueError(f"`{method}`: {self._refusal}")

    @contextlib.contextmanager
    def heeding(self) -> Iterator[None]:
        """Make signals end the run between two steps, also outside of its methods."""
        if self._signal is not None:
            yield
            return
        with _host.stop_signals() as self._signal:
            try:
                yield
            finally:
                self._signal = None

    @_method
    def _go_to(self, end: int, trace: bool = True) -> bool:
        """Run to a step, and record its statistics; return False if the batches run out first."""
        self._interrupted = None
        is_place = self._kept.begun is not None and end == self._next_draw()
        with self.heeding():
            for batches, places, position in self._dispatches(end):
                if self._centers is not None:
                    number = self._batches_per_step
                    self._centers.look(self._chains, self.num_steps, batches, number)
                self._chains.advance(batches, places)
                self._num_gradients += len(batches)
                if self._chains.accumulates:
                    self._num_gradients = self._chains.num_gradients()
                self._position, self._stats = position, None
                is_tick = self.num_steps == end
                if is_tick:
                    self._tick(end, is_place, trace)
                self._heed(is_tick)
        is_there = self.num_steps == end
        if not is_there:
            self.checkpoint()
        return is_there

    def _dispatches(self, end: int) -> Iterator[tuple[list[object], list[int], _host.Position]]:
        """Yield batches of some steps, one for each gradient, their indices, and the position."""
        repeats, position = self._per_step // self._batches_per_step, self._position
        while self.num_steps < end:
            taken, places = list[object](), list[int]()
            most = min(self._steps_per_dispatch, self._chains.plan.interval or end)
            for _ in range(min(most, end - self.num_steps)):
                of_step = [
                    (batch, self._stream.place)
                    for batch in islice(self._checked, self._batches_per_step)
                ]
                if len(of_step) < self._batches_per_step:
                    break
                taken += [batch for batch, _ in of_step for _ in range(repeats)]
                places += [place for _, place in of_step for _ in range(repeats)]
                position = self._stream.position()
            if not taken:
                return
            if not (self._num_gradients or self._position.taken):
                self._check_start(taken[0])
            yield taken, places, position

    def _check_start(self, batch: object):
        """Require a sound start, and warn of mistakes."""
        losses, chains = self._chains.losses, self._chains.tree
        mistakes.start.require(losses, chains, batch)
        if self._warns:
            mistakes.loss.warn_of_sum(losses, chains, batch)
            warn_of(mistakes.before(losses, chains, batch))

    def _tick(self, step: int, is_place: bool, trace: bool):
        """Check the chains, and record their statistics and, at the step of a draw, the draw."""
        self._stats, self._gradients = self._chains.record()
        aux = self._chains.like.aux
        mistakes.gradients.require_received(self._gradients, aux)
        if altered := np.flatnonzero(self._stats["is_altered"]).tolist():
            rule = "a sampler whose updates are applied unchanged"
            number, calls = (self._stats[x][altered[0]] for x in ("num_altered", "num_gradients"))
            got = f"changed updates in {number} of {calls} calls, in the chains {altered}"
            _check.fail("sampler", rule, got, AFTER)
        is_draw = is_place and bool(np.all(self._stats["is_draw"]))
        if is_draw and not self._num_kept and self._warns:
            warn_of(mistakes.start.step_size(self._chains.settings, self._chains.tree.state))
        if trace:
            self._draw = self._chains.draw() if is_draw else None
            self._kept.put(self._num_kept, step, self._stats, self._draw)
            self._num_kept += is_draw

    def _heed(self, is_tick: bool):
        """Write a checkpoint if one is due, and end the call after a signal."""
        assert self._signal is not None
        if jax.process_count() > 1 and not is_tick and self.num_steps % AGREE_EVERY:
            return
        signal, is_due = _host.agree(self._signal(), self._kept.is_due())
        if is_due or signal is not None:
            self.checkpoint()
        if signal is not None:
            self._interrupted = signal
            steps = _table.counted(self.num_steps, "step")
            made = f"{steps} and {_table.counted(self._num_kept, 'draw')} per chain"
            raise Interrupted(_directory.stopped(signal, made, self._directory))

    @_method
    def checkpoint(self):
        """Write a checkpoint, after the draws before it; without a directory, do nothing."""
        if isinstance(self._kept, _directory.DirectoryRun):
            place = {"num_gradients": self._num_gradients, "num_kept": self._num_kept}
            place["position"] = self._position._asdict()
            if self._centers is not None:
                place["centers"] = self._chains.plan._asdict()
            self._kept.checkpoint(self._chains.tree, place)

    @_method
    def _warn_of_batches(self, num_draws: int, end: int):
        """Say why the run ends before all draws are made; raise if there are none."""
        if not self._num_kept:
            self._refuse_batches(end * self._batches_per_step)
        resume = "" if self._directory is None else f" {_directory.how_to_resume(self._directory)}"
        defect = self._stream.defect
        reason = f"{defect}." if defect else f"the batches ran out. {RESTART}"
        fewer = f"{self._num_kept} of {num_draws} draws per chain"
        warn(f"`{_check.function_name()}` ended early with {fewer}: {reason}{resume}")

    @_method
    def _refuse_batches(self, needed: int):
        """Say why the batches ended before the first draw."""
        if self._stream.defect:
            advice = mistakes.batches.advice_on_single(self._batches)
            got = f"{_check.show(self._batches) if advice else 'one'} whose {self._stream.defect}"
            _check.fail("batches", mistakes.batches.USABLE, got, advice)
        rule = f"a list, which is restarted, or batches for {needed} gradients"
        advice = RESTART if self._stream.taken else ""
        _check.fail("batches", rule, f"{self._stream.taken or 'no'} batches", advice)


def _usable(stream: _host.Stream, chains: Chains, warns: bool) -> Iterator[object]:
    """Yield batches until one has a `stream.defect`, and warn once if one has another size."""
    structure, first, known = None, None, set()
    for batch in stream:
        structure = structure or jax.tree.structure(batch)
        reason = mistakes.batches.defect(batch, structure, chains.per_chain)
        shapes = tuple(map(np.shape, jax.tree.leaves(batch)))
        # The caller checks the loss on the first batch.
        if not reason and known and shapes not in known:
            reason = chains.misfit(batch)
        if reason:
            stream.defect = f"batch {stream.taken} of pass {stream.passes + 1} {reason}"
            return
        rows = _on_host.num_examples(batch, chains.per_chain)
        if warns and not known:
            warn_of(mistakes.batches.checks([batch], chains.losses, False))
        known.add(shapes)
        if rows and warns:
            first = first or rows
            check = mistakes.batches.unequal([first, rows])
            warns = check.passed
            warn_of([check])
        yield batch
