"""Run the chains of a sampler: warm-up, thinning, draws, and resuming after a kill."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import compress, islice
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from optax_smile import _check, _tree, parallel
from optax_smile._types import Batch, Output, Tree
from optax_smile._warn import warn
from optax_smile.chains import _checks, _directory, _host, _optimizer
from optax_smile.chains._chains import BatchPer, Chains, Setup
from optax_smile.chains._directory import DirectoryRun, MemoryRun, how_to_resume
from optax_smile.draws import _format
from optax_smile.draws.snapshots import Snapshots, StoredSnapshots

RESTART = "A generator cannot be restarted: pass a list."
Watch = Callable[[int, Mapping[str, np.ndarray] | None], None]


@_check.arguments(
    params=_checks.Starts(),
    batches=_check.BATCHES,
    sampler=_check.TRANSFORMATION,
    num_warmup=_check.Whole(0),
    num_draws=_check.Whole(1),
    thin=_check.Whole(1),
    key=_check.Key(needed=True),
    aux=parallel.STACKED | None,
    loss_fn=_checks.Loss(),
    batch_per=_check.OneOf(BatchPer),
    steps_per_dispatch=_check.Whole(1),
    mesh=parallel.MESH,
    specs=parallel.SPECS,
    directory=_check.PathLike() | None,
    checkpoint_minutes=_check.Real(0, infinite=True, traced=False),
    dtype=_check.OneOf(_format.StoredDtype) | None,
    callback=_check.Function("(step, stats)") | None,
    observe=_check.Function("(draw)") | None,
)
@_check.on_host
def sample(
    loss_fn: Callable[..., Output],
    params: optax.Params,
    batches: Iterable[Batch],
    sampler: optax.GradientTransformation,
    *,
    num_warmup: int,
    num_draws: int,
    thin: int = 1,
    key: jax.Array | int,
    aux: Tree = None,
    stochastic: bool = False,
    per_chain: bool = False,
    batch_per: BatchPer = "gradient",
    steps_per_dispatch: int = 1,
    mesh: Mesh | None = None,
    specs: Tree = None,
    directory: str | os.PathLike[str] | None = None,
    resume: bool = True,
    check: bool = True,
    checkpoint_minutes: float = 5.0,
    dtype: _format.StoredDtype | None = None,
    progress: bool = True,
    callback: Callable[[int, Mapping[str, np.ndarray]], None] | None = None,
    observe: Callable[[Tree], Tree] | None = None,
) -> Snapshots | StoredSnapshots:
    """Run many chains. After a warm-up, store their current draws every `thin` steps.

    Args:
        loss_fn: scalar mean loss `loss_fn(params, batch)`. It must not include the prior. If `aux`
            is given, `sample` calls it as `loss_fn(params, batch, aux=aux)`, and it returns
            `(loss, new_aux)`. If `stochastic` is True, it also receives `key=`.
        params: initial parameters of all chains, each leaf `[chain, ...]`, as `warmstart` returns
            them.
        batches: iterable of batches, arrays or what `np.asarray` converts to them. When it is
            exhausted, `sample` iterates over it again. A generator cannot be restarted: when it is
            exhausted, the run ends. If a step takes two of an even number of batches, every second
            pass begins with the second and ends with the first, so that both gradients of a step
            see all batches. Each new batch shape causes a compilation. In a multi-process run,
            every process gets the same batches.
        sampler: a sampler of this library, alone or last in an `optax.chain`. A step of one in
            `optax.MultiSteps` takes several batches. For comparison, `sampler` may be any Optax
            optimizer. `sample` then stores its iterates instead of draws, and one step is one
            gradient. Iterates are not posterior draws. `sample` warns of this, the settings of the
            result have `"is_posterior": False`, and `diagnostics.summary` and `local` refuse the
            result.
            An optimizer gets `value`, `grad` and `value_fn` if it takes them. Its steps to
            non-finite parameters are skipped and counted in `num_nonfinite`, with a warning.
        num_warmup: steps of each chain without draws, >= 0. The first draw is step
            num_warmup + thin.
        num_draws: draws to store per chain, >= 1. Steps with `stats(state).is_draw` False are not
            stored: the exploration of `cyclical_sgld`, and the burn-in of `scale_adapted_sghmc`.
            The result then has fewer draws, with a warning.
        thin: steps between draws, >= 1.
        key: JAX key or seed. The sampler and the loss of each chain get their own keys.
        aux: auxiliary state of the model, such as running means of BatchNorm, each leaf
            `[chain, ...]`. Rejected steps leave it unchanged. Draws are then
            `{"params": ..., "aux": ...}`.
        stochastic: whether the loss is random, as with dropout. It then receives a new `key=` for
            each gradient.
        per_chain: whether each batch has a leading chain axis; otherwise chains share batches.
        batch_per: `"gradient"`: each gradient gets its own batch. `"step"`: with the integrator
            `"minimal_norm"`, both gradients of a step use the same batch, as in Sommer et al. 2026.
        steps_per_dispatch: largest number of steps per compiled call, >= 1; a call also ends every
            `thin` steps. A larger number is faster for small networks, where starting a call takes
            longer than a step. For convolutions on a CPU use 1: their gradients are many times
            slower inside a compiled loop.
        mesh: devices with an axis `"chain"`, over which chains are spread, and optionally an axis
            `"data"`, over which the examples of a batch are spread; see `parallel`. None: one
            device.
        specs: how the parameters of one chain are sharded, see `parallel.place`.
        directory: directory for draws and checkpoints, written while the chains run. None: keep
            the draws in host memory.
        resume: True: if the directory holds a run, continue it from its newest checkpoint. These
            must be unchanged: sampler, key, shapes, `dtype`, `num_warmup`, `thin`, `batch_per`,
            `stochastic`, `per_chain` and, if `batches` is a list or tuple, their number and the
            shapes of the first. There is a warning if `params` differ (the new ones are ignored).
            The loss, the examples and the code of functions are not compared. Other arguments may
            differ. A larger `num_draws` extends a
            finished run; without it, the stored draws are returned, with a warning. False: the
            directory must not hold a run.
        check: warn if the loss looks like a sum (not tested if `stochastic`), if `num_data` does
            not fit the examples (or tokens) of the batches, if batches differ in size (a mean loss
            then weights their examples unequally), or if the loss of the draws is predicted to be
            far above the loss at the start. At the end, warn if gradients were not finite, or if a
            clip before the sampler shortened them. This costs a few forward passes. The prediction
            takes 32 more, and is only made if the number of parameters exceeds
            2 * num_data / temperature. For your own loop, see `optax_smile.check`.
        checkpoint_minutes: minutes between checkpoints, >= 0. A checkpoint is always written at the
            start and at the end.
        dtype: precision of the draws on disk: `"float16"`, `"float32"` or `"float64"`; None: that
            of the parameters. Requires a `directory`. An array whose largest number is too large or
            too small for it (in `"float16"` above 65504 or below 6e-5) is stored in its own
            precision in that draw, with a warning; it is an error if the start is too large. Other
            numbers below 6e-5 lose digits in `"float16"`, and below 3e-8 they become 0.
        progress: show a progress bar, if tqdm is installed. It has the step size, the moving mean
            of |energy change| and the number of rejected steps; for an optimizer, the loss.
        callback: `callback(step, stats)`, called every `thin` steps with a new dict of arrays
            `[chain]`: the fields of `optax_smile.stats`, `loss`, and `start_loss`, the loss of the
            first batch at the start. For an optimizer, step size and energies are NaN.
        observe: function `observe(draw)`. It receives the current draw of all chains, arrays
            `[chain, ...]` on the devices, and returns a tree of arrays `[chain, ...]`, such as
            losses. `sample` stores these instead of the draws.

    Returns:
        `Snapshots` with `params` `[chain, draw, ...]` and statistics every `thin` steps; with a
        `directory`, the `StoredSnapshots` that `load_snapshots` returns. A run ends early on Ctrl-C
        or SIGTERM, when the batches run out, or when a batch is empty or differs in structure from
        the first. It then finishes the step, writes a checkpoint, warns, and returns the draws so
        far. After a signal, `interrupted` of the draws is `"SIGINT"` or `"SIGTERM"`, else None. A
        scheduler such as Slurm takes a script that exits with status 0 as finished: see the page on
        long runs. In a multi-process run without a directory, each process returns only its own
        chains.

    Raises:
        ValueError: an argument is out of range, or:

            - `loss_fn`: not a scalar, or the loss or its gradients are not finite at the start.
            - `params`: leading axes that disagree; or identical chains, if neither the sampler nor
              the loss uses random numbers and the chains share batches.
            - `batches`: a list with a batch that is empty or differs in structure; or the batches
              run out before the first draw.
            - `sampler`: an `optax.chain` with several samplers; with a transformation before the
              sampler that changes gradients (a clip of their norm is allowed); or with one after
              the sampler that changes updates.
            - `num_draws`: `is_draw` is False at all steps that would be stored.
            - `mesh`: invalid.
            - `directory`: in use, not writable, of another run, or of another version's format.
        OSError: a draw or a checkpoint could not be written, such as on a full disk. The message
            names the file; earlier draws can be loaded.
        KeyboardInterrupt: the run was interrupted before the first draw, or by a second Ctrl-C.

    The flags `jax_debug_nans`, `jax_debug_infs`, `jax_disable_jit` and strict promotion of dtypes
    do not act inside.

    Cost: one gradient per chain and step, two with `"minimal_norm"`. Without a `directory`, the
    draws take host memory. With `specs`, every device that holds a part of a chain gathers the
    whole parameters of a draw before the draw is stored.

    Example:
        >>> import jax, jax.numpy as jnp, optax_smile
        >>> loss_fn = lambda params, batch: jnp.sum((params["w"] - batch) ** 2) / 2
        >>> draws = optax_smile.sample(
        ...     loss_fn, {"w": jnp.eye(3, 2)}, [jnp.ones(2)],
        ...     optax_smile.smile(0.1, num_data=10, decoherence_length=None),
        ...     num_warmup=20, num_draws=5, thin=2, key=jax.random.key(0), progress=False,
        ... )
        >>> draws.params["w"].shape
        (3, 5, 2)
    """
    given = locals()  # The arguments, with a typed `key`.
    if dtype is not None and directory is None:
        _check.fail("sample", "dtype", "None without a `directory`", repr(dtype))
    setup = Setup(**{name: given[name] for name in Setup._fields})
    num_steps = num_warmup + num_draws * thin
    with ExitStack() as closing:
        run = Run(setup, closing)
        if run.is_optimizer:
            warn(_optimizer.ANNOUNCEMENT)
        bar = closing.enter_context(_host.Bar(num_steps, "sampling", progress, compiles=True))
        may_warn = run.is_optimizer

        def watch(step: int, stats: Mapping[str, np.ndarray] | None):
            nonlocal may_warn
            _show(bar, step, stats)
            if stats is None:
                return
            may_warn = may_warn and not _optimizer.warn_of_nonfinite(step, stats)
            if callback is not None:
                callback(step, jax.tree.map(np.array, stats))

        is_finished = run.advance(num_steps, watch)
        if not run.has_advanced and run.place.num_kept:
            warn(
                f"`sample`: the run in {directory} is finished. Its"
                f" {min(num_draws, run.place.num_kept)} draws per chain are returned. A larger"
                " `num_draws` extends it."
            )
    check_end("sample", run, num_steps, num_draws, not is_finished)
    return run.result(num_draws)


class Place(NamedTuple):
    """Progress of a run.

    Attributes:
        num_gradients: gradients of each chain.
        num_kept: stored draws of each chain.
        position: position of the next batch.
    """

    num_gradients: int
    num_kept: int
    position: _host.Position


class Run:
    """Chains that advance on request, and what is kept of them."""

    def __init__(self, setup: Setup, closing: ExitStack):
        self.setup, params = setup, setup.params
        sampler = optax.with_extra_args_support(setup.sampler)
        self.is_optimizer = _optimizer.is_optimizer(sampler, params)
        if self.is_optimizer:
            sampler = _optimizer.as_sampler(sampler)
        with _check.called("sample", "parallel.place", "parallel.init", tree="params"):
            self.chains = Chains(setup, sampler)
        self.per_step = self.chains.gradients_per_step
        if self.chains.accumulates and self.per_step > 1:
            rule = 'one with `integrator="leapfrog"` inside `optax.MultiSteps`'
            _check.fail("sample", "sampler", rule, "one with two gradients per step")
        self.batches_per_step = 1 if setup.batch_per == "step" else self.per_step
        self.stream = _host.Stream(setup.batches, alternates=self.batches_per_step == 2)
        warns = setup.check
        if isinstance(setup.batches, (list, tuple)):
            num_data = (self.chains.settings or {}).get("num_data")
            _checks.check_list("sample", setup.batches, num_data, setup.per_chain, warns)
            warns = False
        self.watched = _checks.watched(
            "sample", self.stream, setup.per_chain, warns, self.chains.misfit
        )
        self.kept = self._open(closing)
        self.position = self.stream.position()
        self.place = Place(0, 0, self.position)
        self.is_begun = self.has_advanced = False
        self.interrupted: str | None = None
        self.gradients: _checks.Gradients | None = None

    def _open(self, closing: ExitStack) -> MemoryRun | DirectoryRun:
        setup, chains = self.setup, self.chains
        begun = {"num_warmup": setup.num_warmup, "thin": setup.thin}
        if setup.directory is None:
            kept = MemoryRun(_tree.local(chains.draw()), chains.settings)
        else:
            kept = DirectoryRun(
                setup.directory,
                chains.draw(),
                {
                    "key": np.asarray(jax.random.key_data(setup.key)).tolist(),
                    "sampler": chains.settings,
                    "batch_per": setup.batch_per,
                    "stochastic": setup.stochastic,
                    "per_chain": setup.per_chain,
                    "batches": _directory.describe_batches("sample", setup.batches),
                },
                dtype=setup.dtype,
                resume=setup.resume,
                minutes=setup.checkpoint_minutes,
                closing=closing,
            )
        if kept.begun is None:
            kept.begin(**begun)
        elif setup.directory is not None:
            _directory.check_settings("sample", Path(setup.directory), kept.begun, begun)
        return kept

    def _checkpoint(self):
        place = self.place._asdict() | {"position": self.place.position._asdict()}
        self.kept.checkpoint(self.chains.tree, place)

    @property
    def num_steps(self) -> int:
        """Steps of the sampler so far."""
        return self.place.num_gradients // self.per_step

    def result(self, num_draws: int) -> Snapshots | StoredSnapshots:
        """Return the draws, and which signal ended the run."""
        draws = self.kept.result(num_draws)
        vars(draws).update(interrupted=self.interrupted)
        return draws

    def to_tick(self, step: int) -> int:
        """Return the number of steps to the next tick, at which a draw may be kept.

        Ticks are `thin` steps apart; the warm-up and the run end at one.
        """
        return (self.setup.num_warmup - step - 1) % self.setup.thin + 1

    def advance(self, num_steps: int, watch: Watch) -> bool:
        """Run the chains to a number of steps, or until a signal ends the run.

        Args:
            num_steps: total number of steps, at a tick.
            watch: `watch(step, stats)`, called after each dispatch; stats at a tick, else None.

        Returns:
            False if a signal ended this call. True otherwise, also if the batches ran out.
        """
        try:
            if not self.is_begun:
                self._begin()
            if self.num_steps >= num_steps:
                return True
            self.has_advanced = True
            with _host.stop_signals() as stop_requested:
                for batches in self._dispatches(num_steps):
                    self.chains.advance(batches)
                    if self._end_step(len(batches), stop_requested, watch):
                        self._checkpoint()
                        return False
                self._checkpoint()
        except _host.SecondInterrupt:
            raise
        except KeyboardInterrupt:
            self.interrupted = "SIGINT"
            return False
        return True

    def _begin(self):
        """Resume from the newest checkpoint, or write the first one."""
        restored = self.kept.restore(self.chains.tree)
        if restored is None:
            self._checkpoint()
        else:
            self.chains.tree, place = restored
            position = _host.Position(**place["position"])
            self.place = Place(place["num_gradients"], place["num_kept"], position)
            self.stream.go_to(position)
        self.is_begun = True

    def _end_step(
        self, num_new: int, stop_requested: Callable[[], str | None], watch: Watch
    ) -> bool:
        """Keep the results of a tick; return whether the run has to stop."""
        num_gradients, num_kept = self.place.num_gradients + num_new, self.place.num_kept
        if self.chains.accumulates:
            num_gradients = self.chains.num_gradients()
        step = num_gradients // self.per_step
        stats = None
        if is_tick := step > self.num_steps and self.to_tick(step) == self.setup.thin:
            stats, self.gradients = self.chains.record()
            _checks.check_first_gradients("sample", self.gradients)
            if not self.is_optimizer:
                _checks.check_received("sample", self.gradients)
            _check_unaltered(stats)
            is_draw = step > self.setup.num_warmup and bool(np.all(stats["is_draw"]))
            draw = self.chains.draw() if is_draw else None
            if is_draw and not num_kept and self.setup.check:
                found = _checks.check_step_size(self.chains.settings, self.chains.tree.state)
                _checks.warn_if_failed("sample", found)
            self.kept.put(num_kept, step, stats, draw)
            num_kept += is_draw
        self.place = Place(num_gradients, num_kept, self.position)
        watch(step, stats)
        if not is_tick and jax.process_count() > 1:
            return False
        received = [stop_requested() == name for name in _host.SIGNALS]
        *received, is_due = _host.any_process(*received, self.kept.is_due())
        self.interrupted = next(compress(_host.SIGNALS, received), None)
        must_stop = self.interrupted is not None
        if is_due and not must_stop:
            self._checkpoint()
        return must_stop

    def _dispatches(self, num_steps: int) -> Iterator[list[Batch]]:
        """Yield batches of some steps, one for each gradient, up to a tick or less."""
        repeats = self.per_step // self.batches_per_step
        while self.num_steps < num_steps:
            taken: list[Batch] = []
            number = min(self.setup.steps_per_dispatch, self.to_tick(self.num_steps))
            for _ in range(number):
                of_step = list(islice(self.watched, self.batches_per_step))
                if len(of_step) < self.batches_per_step:
                    break
                taken += of_step
                self.position = self.stream.position()
            if not taken:
                return
            if not (self.place.num_gradients or self.place.position.taken):
                self.chains.check(taken[0], self.setup.check)
            yield [batch for batch in taken for _ in range(repeats)]


def check_end(where: str, run: Run, num_steps: int, num_draws: int, is_stopped: bool):
    """Warn if there are fewer draws than requested; raise if there are none."""
    step, place, resume = run.num_steps, run.place, how_to_resume(run.setup.directory)
    if not place.num_kept:
        if is_stopped:
            raise KeyboardInterrupt(f"`{where}` was stopped before the first draw. {resume}")
        if step == num_steps:
            rule = f"large enough that at least one of the {step} steps is a draw"
            advice = "Run longer, or lower `adapt_steps` or `exploration` of the sampler."
            _check.fail(where, "num_draws", rule, num_draws, advice)
        if run.stream.defect:
            advice = _checks.advice_on_single(given := run.setup.batches)
            got = f"{_check.show(given) if advice else 'one'} whose {run.stream.defect}"
            _check.fail(where, "batches", _checks.USABLE, got, advice)
        taken, needed = run.stream.taken, num_steps * run.batches_per_step
        rule = f"a list, which is restarted, or batches for {needed} gradients"
        advice = RESTART if taken else ""
        _check.fail(where, "batches", rule, f"{taken or 'no'} batches", advice)
    if place.num_kept < num_draws:
        if step == num_steps:
            fewer = f"{place.num_kept} draws per chain instead of {num_draws}"
            warn(f"`{where}` kept {fewer}. At the other steps, `stats(state).is_draw` is False.")
        else:
            reason = "" if is_stopped else f": {run.stream.defect or 'the batches ran out'}"
            if not is_stopped and not run.stream.defect:
                resume = f"{RESTART} {resume}" if run.setup.directory else RESTART
            if run.interrupted is not None:
                name = "draws" if where == "sample" else "selection"
                resume += (
                    f" `{name}.interrupted` is {run.interrupted!r}: a script that is to be started"
                    " again must exit with a status other than 0."
                )
            fewer = f"{place.num_kept} of {num_draws} draws per chain"
            warn(f"`{where}` ended early with {fewer}{reason}. {resume}")
    if run.setup.check and not run.is_optimizer and run.gradients is not None:
        _checks.warn_of_gradients(where, run.gradients)


def _check_unaltered(stats: Mapping[str, np.ndarray]):
    """Require parameters that are those which the sampler's updates lead to."""
    altered = np.flatnonzero(stats["is_altered"]).tolist()
    if altered:
        rule = "a sampler whose updates are applied unchanged"
        number, calls = (stats[x][altered[0]] for x in ("num_altered", "num_gradients"))
        got = f"changed updates in {number} of {calls} calls, in the chains {altered}"
        advice = (
            "Nothing after or around the sampler may change its updates: no clip, learning rate,"
            " weight decay, projection or average of parameters."
        )
        _check.fail("sample", "sampler", rule, got, advice)


def _show(bar: _host.Bar, step: int, stats: Mapping[str, np.ndarray] | None):
    """Update the progress bar at a tick."""
    bar.begin()
    if stats is None:
        return
    if np.all(np.isnan(stats["step_size"])):
        # An optimizer.
        bar.show(step, loss=f"{np.median(stats['loss']):.3g}")
        return
    figures = {"step_size": f"{np.median(stats['step_size']):.2e}"}
    if np.all(np.isfinite(stats["energy_mean"])):
        figures["energy"] = f"{np.median(stats['energy_mean']):.2g}"
    bar.show(step, **figures, rejected=int(np.sum(stats["num_rejected"])))
