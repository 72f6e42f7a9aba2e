"""The loop around a sampler: warm-up, thinning, draws, and going on after a kill."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from optax_smile import _check, _settings, _tree, parallel
from optax_smile.chains import _data, _gradients, _identity, _loop, _optimizer
from optax_smile.chains._chains import Chains
from optax_smile.chains._checkpoint import any_process
from optax_smile.chains._loop import Position
from optax_smile.chains._run import DirectoryRun, MemoryRun, Place
from optax_smile.chains.stopping import Evidence, EvidenceStop, split
from optax_smile.draws import _format
from optax_smile.draws.snapshots import Snapshots, StoredSnapshots

BatchPer = Literal["gradient", "step"]


class Plan(NamedTuple):
    """What happens at which step.

    Attributes:
        num_steps: of each chain.
        num_warmup: of them before the first draw.
        thin: steps from tick to tick; a tick falls on the end of the warm-up and of the run.
        gradients_per_step: that a step takes.
        gradients_per_batch: gradients from one batch.
        steps_per_dispatch: the most steps run in one go.
        gradient_axis: along which the batches of several gradients are stacked.
    """

    num_steps: int
    num_warmup: int
    thin: int
    gradients_per_step: int
    gradients_per_batch: int
    steps_per_dispatch: int
    gradient_axis: int

    def to_tick(self, step: int) -> int:
        """Steps from here to the next tick."""
        return (self.num_warmup - step - 1) % self.thin + 1


class Dispatch(NamedTuple):
    """Work for the devices.

    Attributes:
        end: gradients that each chain has done after it.
        batch: of one gradient, or of several along an axis of their own.
        is_stacked: whether of several.
        position: in the stream of batches, where it ends a step; None in the middle of one.
    """

    end: int
    batch: Any
    is_stacked: bool
    position: Position | None


@_check.arguments(
    params=parallel.STACKED,
    batches=_check.BATCHES,
    sampler=_check.TRANSFORMATION,
    num_warmup=_check.Whole(0),
    num_draws=_check.Whole(1),
    thin=_check.Whole(1),
    key=_check.Key(needed=True),
    aux=parallel.STACKED | None,
    stochastic=_check.FLAG,
    loss_fn=_loop.Loss(),
    per_chain=_check.FLAG,
    batch_per=_check.OneOf(BatchPer),
    steps_per_dispatch=_check.Whole(1),
    prefetch=_check.Whole(0),
    mesh=parallel.MESH,
    specs=parallel.SPECS,
    directory=_check.PathLike() | None,
    resume=_check.FLAG,
    accept=_identity.ACCEPT,
    check=_check.FLAG,
    checkpoint_minutes=_check.Real(0, infinite=True, traced=False),
    dtype=_check.OneOf(_format.StoredDtype) | None,
    progress=_check.FLAG,
    callback=_check.Function("(step, stats)") | None,
    observe=_check.Function("(draw)") | None,
    stop=_check.kind(EvidenceStop, "an `EvidenceStop`") | None,
)
def sample(
    loss_fn: Callable[..., Any],
    params: optax.Params,
    batches: Iterable[Any],
    sampler: optax.GradientTransformation,
    *,
    num_warmup: int,
    num_draws: int,
    thin: int = 1,
    key: jax.Array | int,
    aux: Any = None,
    stochastic: bool = False,
    per_chain: bool = False,
    batch_per: BatchPer = "gradient",
    steps_per_dispatch: int = 1,
    prefetch: int = 0,
    mesh: Mesh | None = None,
    specs: Any = None,
    directory: str | os.PathLike[str] | None = None,
    resume: bool = True,
    accept: Sequence[_identity.Accepted] = (),
    check: bool = True,
    checkpoint_minutes: float = 5.0,
    dtype: _format.StoredDtype | None = None,
    progress: bool = True,
    callback: Callable[[int, Mapping[str, np.ndarray]], None] | None = None,
    observe: Callable[[Any], Any] | None = None,
    stop: EvidenceStop | None = None,
) -> Snapshots | StoredSnapshots:
    """Run many chains and keep every `thin`-th accepted step end after the warm-up.

    Args:
        loss_fn: mean loss `loss_fn(params, batch)`, scalar, without the prior. With `aux` it is
            called with `aux=` and returns `(loss, new_aux)`; if `stochastic` it gets `key=`.
        params: start of the chains, each leaf `[chain, ...]`, such as `warmstart` returns.
        batches: gone through again when it ends. Batches of one shape compile once. On several
            processes each gets the same ones.
        sampler: a sampler of this library, alone or inside an `optax.chain`; or any Optax
            optimizer, for comparison. The iterates of an optimizer, one per gradient, are kept in
            the place of draws. They are checkpoints, not posterior draws: a warning says so, the
            settings of the draws have `"is_posterior": False`, and `diagnostics.summary` and
            `local` refuse them. An optimizer gets `value`, `grad` and `value_fn` where it takes
            them. A step to parameters that are not finite is left out and counted in
            `num_nonfinite`, and a warning names the chains.
        num_warmup: steps per chain before the first draw counts, >= 0.
        num_draws: draws to keep per chain, >= 1. Where the sampler says that a point is no
            sample (`is_draw` of `optax_smile.stats`: the search of `cyclical_sgld`, the burn-in
            of `scale_adapted_sghmc`), none is kept: there are fewer, and a warning says so.
        thin: steps between draws, >= 1.
        key: JAX key or seed, from which every chain's sampler and loss get one of their own if
            they need one.
        aux: auxiliary state of the model, such as running means of BatchNorm, each leaf
            `[chain, ...]`. It follows the accepted points, and draws are then
            `{"params": ..., "aux": ...}`.
        stochastic: whether the loss draws random numbers, such as dropout: it gets a fresh key at
            each gradient.
        per_chain: whether each batch has a leading chain axis; otherwise chains share them.
        batch_per: `"gradient"`: each gets a batch; `"step"`: the two gradients of a step of
            `"minimal_norm"` share one, as published.
        steps_per_dispatch: steps to run in one go, >= 1, at most up to the next thinning tick. More
            than one pays for small networks, where starting a step costs more than the step; not
            for convolutions on a CPU, whose gradients are many times slower inside a loop.
        prefetch: batches to bring onto the devices ahead of their use, by a thread of its own,
            >= 0.
        mesh: devices with the axes `"chain"`, over which chains are spread, and `"data"`, over
            which the examples of a batch are; see `parallel`. None: one device.
        specs: how the parameters of one chain are sharded, see `parallel.place`.
        directory: where the draws are written, by a thread of its own while the chains run on,
            and checkpoints. None keeps the draws in host memory.
        resume: go on with the run in the directory, if there is one, from its newest checkpoint.
            It must be the same run: the same sampler, key and other arguments, and the same data
            and loss, which are compared where `batches` is a list or a tuple, in whatever order
            the examples come. Draws, `mesh`, `progress` and the like may differ: with more draws
            it goes on, with as many or fewer it gives those that are there and says so. Other
            `params` than those that it began with are not used; a warning says so. False: the
            directory must hold none.
        accept: names of what may differ all the same, `"data"` and `"loss"`.
        check: warn of a loss that looks like a sum over the examples; of a `num_data` of the
            sampler below the size of a batch, or ten times as large or small as the number of
            examples in a list of batches, unless it is about the number of tokens, the entries of
            integer arrays `[example, position]`; of batches of different sizes, which weight their
            examples unequally under a mean loss; and at the end of gradients that were not finite,
            or that a clip before the sampler has shortened. It costs forward passes of two halves
            of a batch, and 33 more with more than 2 `num_data` parameters. See
            `optax_smile.check` for a loop of your own.
        checkpoint_minutes: between two checkpoints, >= 0. There is one at the start and at the end.
        dtype: what the draws are rounded to on disk: `"float16"`, `"float32"`, `"float64"`; None
            rounds nothing, and without a `directory` nothing else will do.
        progress: show a progress bar with step size, energy error and rejected steps, or with the
            loss of an optimizer, if tqdm is installed.
        callback: `callback(step, stats)` at every thinning tick, with the arrays `[chain]` that
            `optax_smile.stats` gives, and `loss` and `start_loss`. Of an optimizer there are the
            same names; step size and energies are NaN.
        observe: `observe(draw)` takes the draws of all chains, arrays `[chain, ...]` on the
            devices, and gives a tree of arrays `[chain, ...]`, such as losses: these are kept in
            place of the draws, with a `directory` as well.
        stop: an `EvidenceStop`, which ends the run before `num_draws` once held-out data give the
            evidence that it asks for; `stopping` of the draws says why. On resume pass the same
            rule and data, which judge the stored draws again, or None to continue without a rule.

    Returns:
        `Snapshots` with `params` `[chain, draw, ...]` and the statistics at every tick; with a
        `directory` the `StoredSnapshots` that `load_snapshots` gives. Ctrl-C, SIGTERM, batches that
        run out, or a batch that is empty or has another structure than the first, end the run
        early: the step is finished, a checkpoint written, a warning given, and the draws made until
        then are returned. Without a directory each of several processes returns its own chains.

    Raises:
        ValueError: an argument out of range, leading axes that disagree, a loss that is not a
            scalar, a loss or gradients that are not finite at the start, chains that are copies
            and would stay so, several samplers, a sampler that is not the last in its chain, whose
            steps do not arrive as they were sent, or that receives other gradients than those of
            the loss but for a clip of their norm, an empty batch in a list, a mesh that does not
            fit, batches that run out before the first draw, a sampler that has not begun to give
            draws at the end; `stop` with `observe` or several processes, or that does not fit the
            model; a `directory` in use, of another run, or whose checkpoints another
            version wrote in another format.
        OSError: a draw or a checkpoint that cannot be written, such as on a full disk: the message
            names the file, and the draws before it can be loaded.
        KeyboardInterrupt: stopped before the first draw, or by a second Ctrl-C.

    Cost: one gradient per chain and step, two with `"minimal_norm"`. Without
    `directory` the draws lie in host memory. With `specs` a draw is brought together on each device
    of its chain before it is kept.

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
    if dtype is not None and directory is None:
        _check.fail("sample", "dtype", "None without a `directory`", repr(dtype))
    # Checking has made a typed key of a seed.
    typed: Any = key
    setup = Setup(
        loss_fn=loss_fn,
        params=params,
        batches=batches,
        sampler=sampler,
        num_warmup=num_warmup,
        thin=thin,
        key=typed,
        aux=aux,
        stochastic=stochastic,
        per_chain=per_chain,
        batch_per=batch_per,
        steps_per_dispatch=steps_per_dispatch,
        prefetch=prefetch,
        mesh=mesh,
        specs=specs,
        directory=directory,
        resume=resume,
        accept=accept,
        check=check,
        checkpoint_minutes=checkpoint_minutes,
        dtype=dtype,
        observe=observe,
        stop=stop,
    )
    num_steps = num_warmup + num_draws * thin
    with ExitStack() as closing:
        run = Run(setup, closing)
        if run.is_optimizer:
            warnings.warn(_optimizer.ANNOUNCEMENT, stacklevel=3)
        bar = closing.enter_context(_loop.Bar(num_steps, "sampling", progress, compiles=True))
        warn = _optimizer.nonfinite_warner()

        def watch(step: int, seen: Mapping[str, np.ndarray] | None):
            _show(bar, step, seen)
            if seen is not None and run.is_optimizer:
                warn(step, seen)
            if seen is not None and callback is not None:
                callback(step, seen)

        is_finished = run.advance(num_steps, watch)
        if not run.has_advanced:
            run.kept.tell_finished(num_draws)
    check_end("sample", run, num_steps, num_draws, not is_finished)
    return run.kept.result(num_draws)


class Setup(NamedTuple):
    """What a run is made of: the arguments of `sample` but for its end and what watches it."""

    loss_fn: Callable[..., Any]
    params: optax.Params
    batches: Iterable[Any]
    sampler: optax.GradientTransformation
    num_warmup: int
    thin: int
    key: jax.Array
    aux: Any = None
    stochastic: bool = False
    per_chain: bool = False
    batch_per: BatchPer = "gradient"
    steps_per_dispatch: int = 1
    prefetch: int = 0
    mesh: Mesh | None = None
    specs: Any = None
    directory: str | os.PathLike[str] | None = None
    resume: bool = True
    accept: Sequence[_identity.Accepted] = ()
    check: bool = True
    checkpoint_minutes: float = 5.0
    dtype: _format.StoredDtype | None = None
    observe: Callable[[Any], Any] | None = None
    stop: EvidenceStop | None = None


class Run:
    """Chains that advance as far as they are asked, and what is kept of them.

    Args:
        setup: of the run.
        closing: closes what is opened here.
    """

    def __init__(self, setup: Setup, closing: ExitStack):
        self.setup, params = setup, setup.params
        _check_stop(setup)
        sampler = optax.with_extra_args_support(setup.sampler)
        self.is_optimizer = _optimizer.is_optimizer(sampler, params)
        if self.is_optimizer:
            sampler = _optimizer.as_sampler(sampler)
        shared: dict[str, Any] = {"stochastic": setup.stochastic, "per_chain": setup.per_chain}
        own = {name: getattr(setup, name) for name in ("aux", "mesh", "specs", "observe")}
        with _check.called("sample", "parallel.place", "parallel.init", tree="params"):
            self.chains = Chains(setup.loss_fn, sampler, params, setup.key, **shared, **own)
        per_step = self.chains.gradients_per_step
        self.plan = Plan(
            num_steps=0,
            num_warmup=setup.num_warmup,
            thin=setup.thin,
            gradients_per_step=per_step,
            gradients_per_batch=per_step if setup.batch_per == "step" else 1,
            steps_per_dispatch=setup.steps_per_dispatch,
            gradient_axis=int(setup.per_chain),
        )
        self.settings = _settings.of(sampler, self.chains.like.params)
        self.stream = _loop.Stream(setup.batches)
        warns = setup.check
        if isinstance(setup.batches, (list, tuple)):
            warns = _check_list(setup.batches, self.settings, setup.per_chain, warns)
        self.watched = _data.Watched("sample", self.stream, setup.per_chain, warns)
        if setup.directory is None:
            self.kept = MemoryRun(self.chains.draw(), self.settings)
        else:
            steps = {name: getattr(setup, name) for name in ("num_warmup", "thin", "batch_per")}
            told = _identity.of_sampler(sampler, self.settings, setup.key, setup.observe)
            if setup.stop is not None:
                told |= {"stop": setup.stop.described()}
            self.kept = DirectoryRun(
                Path(setup.directory),
                self.chains,
                closing,
                settings=steps | shared | told,
                data=_identity.of_batches(setup.batches, setup.per_chain),
                accept=setup.accept,
                dtype=setup.dtype,
                resume=setup.resume,
                minutes=setup.checkpoint_minutes,
            )
        self.place = Place(0, 0, self.stream.position())
        self.is_begun = self.has_advanced = False
        self.gradients: _gradients.Gradients | None = None
        self.evidence: Evidence | None = None
        if setup.stop is not None:
            where = {"mesh": setup.mesh, "specs": setup.specs}
            with _check.called("sample", "Predictor.update"):
                self.evidence = Evidence(setup.stop, self.kept.start, self.chains.number, **where)

    @property
    def is_stopped(self) -> bool:
        """Whether the stopping rule has ended the run."""
        return self.evidence is not None and self.evidence.looks.has_stopped

    @property
    def num_steps(self) -> int:
        """Steps that each chain has done."""
        return self.place.num_gradients // self.plan.gradients_per_step

    def advance(
        self, num_steps: int, watch: Callable[[int, Mapping[str, np.ndarray] | None], None]
    ) -> bool:
        """Run the chains until each has done so many steps, or until someone wishes to stop.

        Args:
            num_steps: in all, at a tick.
            watch: `watch(step, stats)` after each piece of work; stats at a tick, or None.

        Returns:
            Whether nobody wished to stop, nor the stopping rule.
        """
        plan = self.plan._replace(num_steps=num_steps)
        try:
            if not self.is_begun:
                self._begin()
            if self.num_steps >= num_steps or self.is_stopped:
                return True
            self.has_advanced = True
            judge = partial(self.chains.check, settings=self.settings, warns=self.setup.check)
            begun = self.place.num_gradients
            work = _dispatches(self.stream, self.watched, plan, begun, self.chains, judge)
            with _loop.stop_signals() as wish:
                for dispatch in _loop.prefetched(work, self.setup.prefetch):
                    self.chains.advance(dispatch.batch, dispatch.is_stacked)
                    if dispatch.position is not None and self._end_step(dispatch, wish, watch):
                        self.kept.checkpoint(self.chains, self.place)
                        return False
                self.kept.checkpoint(self.chains, self.place)
        except _loop.SecondInterrupt:
            raise
        except KeyboardInterrupt:
            return False
        return True

    def _begin(self):
        """Go on from the newest checkpoint; write the first one where there is none."""
        if found := self.kept.restore(self.chains):
            self.place = found
            self.stream.go_to(found.position)
        else:
            self.kept.checkpoint(self.chains, self.place)
        self.is_begun = True
        draws = self.kept.before(self.place.num_kept)
        for first in range(0, len(draws) if self.evidence else 0, self.chains.number):
            self._look(draws[first : first + self.chains.number])

    def _look(self, trees: Sequence[Any]):
        """Show a draw of each chain to the stopping rule; keep what it finds."""
        if self.evidence is None:
            return
        num_looks = len(self.evidence.looks.found)
        self.evidence.add(trees)
        if len(self.evidence.looks.found) > num_looks:
            self.kept.note(self.evidence.looks.result())

    def _end_step(
        self,
        dispatch: Dispatch,
        wish: Callable[[], Any],
        watch: Callable[[int, Mapping[str, np.ndarray] | None], None],
    ) -> bool:
        """Keep what a tick gives; tell whether someone wishes to stop."""
        step, num_kept = dispatch.end // self.plan.gradients_per_step, self.place.num_kept
        seen = None
        if is_tick := self.plan.to_tick(step) == self.plan.thin:
            seen, self.gradients = self.chains.look()
            _gradients.check_start("sample", self.gradients)
            if not self.is_optimizer:
                _gradients.check_received("sample", self.gradients)
            _check_unaltered(seen)
            self.kept.tick(seen)
            if step > self.plan.num_warmup and np.all(seen["is_draw"]):
                draw = self.chains.draw()
                self.kept.put(num_kept, step, draw, seen)
                num_kept += 1
                if self.evidence is not None:
                    # As the directory will hold it, so that a resumed run finds the same.
                    stored = _format.rounded(_tree.local(draw), self.setup.dtype)
                    self._look(split(stored, self.chains.number))
        self.place = Place(dispatch.end, num_kept, dispatch.position or self.place.position)
        watch(step, seen)
        if not is_tick and jax.process_count() > 1:
            return False
        wishes = wish() is not None or self.is_stopped
        is_stopped, is_due = any_process(wishes, self.kept.is_due())
        if is_due and not is_stopped:
            self.kept.checkpoint(self.chains, self.place)
        return is_stopped


def check_end(where: str, run: Run, num_steps: int, num_draws: int, is_stopped: bool):
    """Say why there are fewer draws than wanted; raise where there are none."""
    step, plan, place = run.num_steps, run.plan, run.place
    if not place.num_kept:
        if is_stopped:
            told = "Without a `directory` nothing of it is kept."
            if (folder := run.setup.directory) is not None:
                told = f"A checkpoint is in {folder}: call it again in the same way to go on."
            raise KeyboardInterrupt(f"`{where}` was stopped before the first draw. {told}")
        if step == num_steps:
            rule = f"so many that the sampler calls one of the {step} steps a draw"
            remedy = "See its argument `adapt_steps` or `exploration`."
            _check.fail(where, "num_draws", rule, num_draws, remedy)
        if run.watched.defect:
            _check.fail(where, "batches", _data.USABLE, run.watched.defect)
        num_batches = num_steps * plan.gradients_per_step // plan.gradients_per_batch
        rule = f"an iterable with a batch for each of the {num_batches} gradients"
        _check.fail(where, "batches", rule, "one that ran out before the first draw")
    if place.num_kept < num_draws and not run.is_stopped:
        early = "ended early" if step < num_steps else "kept what the sampler calls a draw,"
        reason = f": {run.watched.defect}" if run.watched.defect else ""
        message = f"`{where}` {early} with {place.num_kept} of {num_draws} draws per chain{reason}."
        warnings.warn(message, stacklevel=4)
    if run.setup.check and not run.is_optimizer and run.gradients is not None:
        _gradients.warn(where, run.gradients)


def _check_stop(setup: Setup):
    """Require draws that a stopping rule can predict with."""
    if setup.stop is None:
        return
    if setup.observe is not None:
        rule = "None with `observe`, which keeps no draws to predict with"
        _check.fail("sample", "stop", rule, "an `EvidenceStop`")
    if jax.process_count() > 1:
        got = f"an `EvidenceStop` and {jax.process_count()} processes"
        _check.fail("sample", "stop", "None with several processes", got)


def _check_unaltered(stats: Mapping[str, np.ndarray]):
    """Require steps that arrive as the sampler sent them."""
    altered = np.flatnonzero(stats["is_altered"]).tolist()
    if altered:
        rule = "one whose steps arrive as they were sent"
        counts = [
            int(np.asarray(stats[name])[altered[0]]) for name in ("num_altered", "num_gradients")
        ]
        got = f"other parameters in {counts[0]} of {counts[1]} calls, in the chains {altered}"
        remedy = (
            "Nothing may come after the sampler, or around it, that changes its updates: no clip,"
            " learning rate, weight decay, projection or average of parameters."
        )
        _check.fail("sample", "sampler", rule, got, remedy)


def _check_list(
    batches: Sequence[Any], settings: Mapping[str, Any] | None, per_chain: bool, warns: bool
) -> bool:
    """Look at the batches of a list; tell whether a difference in size is still to be found."""
    _data.check_list("sample", batches, per_chain)
    if warns:
        _data.tell("sample", _data.unequal([_data.size(x, per_chain) for x in batches]))
        _data.tell("sample", _data.amount(batches, (settings or {}).get("num_data"), per_chain))
    return False


def _dispatches(
    stream: _loop.Stream,
    watched: Iterator[Any],
    plan: Plan,
    done: int,
    chains: Chains,
    judge: Callable[[Any], None],
) -> Iterator[Dispatch]:
    """Cut the run into pieces of work, from a gradient on; none goes beyond a tick.

    Args:
        stream: whose position is told.
        watched: its batches.
        plan: of the run.
        done: gradients before.
        chains: that put batches onto their devices.
        judge: looks at the first batch.
    """
    num_gradients, is_new = plan.num_steps * plan.gradients_per_step, done == 0
    per_step = plan.gradients_per_step // plan.gradients_per_batch
    while done < num_gradients:
        taken, position = [], None
        step = done // plan.gradients_per_step
        for _ in range(min(plan.steps_per_dispatch, plan.to_tick(step))):
            of_step = list(islice(watched, per_step))
            if len(of_step) < per_step:
                break
            taken += of_step
            position = stream.position()
        if not taken:
            return
        if is_new:
            judge(taken[0])
            is_new = False
        batches = [batch for batch in taken for _ in range(plan.gradients_per_batch)]
        several = len(taken) > per_step
        stacked = _loop.stack(batches, axis=plan.gradient_axis) if several else None
        if stacked is not None:
            done += len(batches)
            yield Dispatch(done, chains.put(stacked, True), True, position)
            continue
        for left, batch in zip(reversed(range(len(batches))), batches, strict=True):
            done += 1
            yield Dispatch(done, chains.put(batch), False, None if left else position)


def _show(bar: _loop.Bar, step: int, stats: Mapping[str, np.ndarray] | None):
    """Move the bar on at a tick, with what a person watches while a chain runs."""
    bar.begin()
    if stats is None:
        return
    if np.all(np.isnan(stats["step_size"])):
        # An optimizer.
        bar.show(step, loss=f"{np.median(stats['loss']):.3g}")
        return
    told = {"step_size": f"{np.median(stats['step_size']):.2e}"}
    if np.all(np.isfinite(stats["energy_mean"])):
        told["energy"] = f"{np.median(stats['energy_mean']):.2g}"
    bar.show(step, **told, rejected=int(np.sum(stats["num_rejected"])))
