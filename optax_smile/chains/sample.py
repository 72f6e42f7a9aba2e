"""The loop around a sampler: warm-up, thinning, draws, and going on after a kill."""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from optax_smile import _check, _settings
from optax_smile.chains import _loop
from optax_smile.chains._chains import Chains
from optax_smile.chains._checkpoint import any_process
from optax_smile.chains._run import DirectoryRun, MemoryRun
from optax_smile.draws import _files
from optax_smile.draws.snapshots import Snapshots, StoredSnapshots

BATCH_PER = ("gradient", "step")


class Plan(NamedTuple):
    """What happens at which step.

    Attributes:
        num_steps: of each chain.
        num_warmup: of them before the first draw.
        thin: steps from tick to tick; a tick falls on the end of the warm-up and of the run.
        gradients_per_step: gradients per step.
        gradients_per_batch: gradients from one batch.
        steps_per_dispatch: the most steps run in one go.
        gradient_axis: along which the batches of several calls are stacked.
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
        end: calls that each chain has done after it.
        batch: of one call, or of several along an axis of their own.
        is_stacked: whether of several.
        place: in the stream of batches, where it ends a step; None in the middle of one.
    """

    end: int
    batch: Any
    is_stacked: bool
    place: dict[str, Any] | None


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
    batch_per: str = "gradient",
    steps_per_dispatch: int = 1,
    prefetch: int = 0,
    mesh: Mesh | None = None,
    specs: Any = None,
    directory: str | os.PathLike | None = None,
    resume: bool = True,
    checkpoint_minutes: float = 5.0,
    dtype: str | None = None,
    progress: bool = True,
    callback: Callable[[int, Mapping[str, np.ndarray]], None] | None = None,
) -> Snapshots | StoredSnapshots:
    """Run many chains and keep every `thin`-th accepted step end after the warm-up.

    Args:
        loss_fn: mean loss `loss_fn(params, batch)`, scalar, without the prior. With `aux` it is
            called with `aux=` and returns `(loss, new_aux)`; if `stochastic` it gets `key=`.
        params: start of the chains, each leaf `[chain, ...]`, such as `warmstart` returns.
        batches: gone through again when it ends. Batches of one shape compile once. On several
            processes each gets the same ones.
        sampler: a sampler of this library, alone or inside an `optax.chain`.
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
            each call.
        per_chain: whether each batch has a leading chain axis; otherwise chains share them.
        batch_per: `"gradient"`: each gets a batch; `"step"`: the two gradients of a step of
            `"minimal_norm"` share one, as published.
        steps_per_dispatch: steps to run in one go, >= 1, at most up to the next thinning tick. More
            than one pays for small networks, where starting a step costs more than the step.
        prefetch: batches to bring onto the devices ahead of their use, by a thread of its own,
            >= 0.
        mesh: devices with the axes `"chain"`, over which chains are spread, and `"data"`, over
            which the examples of a batch are; see `parallel`. None: one device.
        specs: how the parameters of one chain are sharded, see `parallel.place`.
        directory: where the draws are written, by a thread of its own while the chains run on,
            and checkpoints. None keeps the draws in host memory.
        resume: go on with the run in the directory, if there is one, from its newest checkpoint;
            it may ask for more draws than before. False: the directory must hold none.
        checkpoint_minutes: between two checkpoints, >= 0. There is one at the start and at the end.
        dtype: what the draws are rounded to on disk: `"float16"`, `"float32"`, `"float64"`; None
            rounds nothing.
        progress: show a progress bar with step size, energy error and rejections, if tqdm is
            installed.
        callback: `callback(step, stats)` at every thinning tick, with the arrays `[chain]` that
            `optax_smile.stats` gives.

    Returns:
        `Snapshots` with `params` `[chain, draw, ...]` and the statistics at every tick; with a
        `directory` the `StoredSnapshots` that `load_snapshots` gives. Ctrl-C, SIGTERM, or batches
        that run out, end the run early: the step is finished, a checkpoint written, a warning
        given, and the draws made until then are returned. Without a directory each of several
        processes returns its own chains.

    Raises:
        ValueError: an argument out of range, leading axes that disagree, a loss that is not a
            scalar or not finite at the start, a state without a sampler, a mesh that does not fit,
            batches that run out before the first draw, a sampler that has not begun to sample at
            the end; a `directory` in use, or of another run.
        OSError: a draw or a checkpoint that cannot be written, such as on a full disk: the message
            names the file, and the draws before it can be loaded.
        KeyboardInterrupt: stopped before the first draw, or by a second Ctrl-C.

    Cost: one gradient per chain and call (a step of `"minimal_norm"` is two calls). Without
    `directory` the draws lie in host memory. With `specs` a draw is brought together on each device
    of its chain before it is kept.

    Example:
        >>> import jax, jax.numpy as jnp, optax_smile
        >>> loss_fn = lambda params, batch: jnp.sum((params["w"] - batch) ** 2) / 2
        >>> draws = optax_smile.sample(
        ...     loss_fn, {"w": jnp.zeros((3, 2))}, [jnp.ones(2)],
        ...     optax_smile.smile_naive(0.1, num_data=10),
        ...     num_warmup=20, num_draws=5, thin=2, key=jax.random.key(0), progress=False,
        ... )
        >>> draws.params["w"].shape
        (3, 5, 2)
    """
    for name, value, smallest in (
        ("num_warmup", num_warmup, 0),
        ("num_draws", num_draws, 1),
        ("thin", thin, 1),
        ("steps_per_dispatch", steps_per_dispatch, 1),
        ("prefetch", prefetch, 0),
    ):
        _check.whole("sample", name, value, smallest)
    _check.choice("sample", "batch_per", batch_per, BATCH_PER)
    _check.number("sample", "checkpoint_minutes", checkpoint_minutes, ">= 0", lambda x: x >= 0)
    if dtype is not None:
        _check.choice("sample", "dtype", dtype, _files.STORED_DTYPES)
    typed: Any = _check.key("sample", key)
    sampler = optax.with_extra_args_support(sampler)
    chains = Chains(
        loss_fn,
        sampler,
        params,
        typed,
        aux=aux,
        stochastic=stochastic,
        per_chain=per_chain,
        mesh=mesh,
        specs=specs,
    )
    plan = Plan(
        num_steps=num_warmup + num_draws * thin,
        num_warmup=num_warmup,
        thin=thin,
        gradients_per_step=chains.gradients_per_step,
        gradients_per_batch=chains.gradients_per_step if batch_per == "step" else 1,
        steps_per_dispatch=steps_per_dispatch,
        gradient_axis=int(per_chain),
    )
    if directory is None:
        run = MemoryRun(chains.draw(), _settings.of(sampler))
    else:
        run = DirectoryRun(
            directory,
            chains.draw(),
            settings={
                "num_warmup": num_warmup,
                "thin": thin,
                "batch_per": batch_per,
                "key": np.asarray(jax.random.key_data(typed)).tolist(),
                "per_chain": per_chain,
                "stochastic": stochastic,
                "sampler": _settings.of(sampler),
                "state": chains.layout,
            },
            num_draws=num_draws,
            dtype=dtype,
            resume=resume,
            minutes=checkpoint_minutes,
        )
    bar = _loop.progress_bar(plan.num_steps, "sampling", progress)

    stream, stop = _loop.Stream(batches), False
    place = {"gradient": 0, "num_kept": 0, "stream": stream.place()}
    try:
        if found := run.restore(chains.packed):
            chains.packed, place = found
            stream.go_to(place["stream"])
        else:
            run.checkpoint(chains.packed, place)
        work = _dispatches(stream, plan, place["gradient"], chains)
        with _loop.stop_signals() as wish:
            for dispatch in _loop.prefetched(work, prefetch):
                chains.advance(dispatch.batch, dispatch.is_stacked)
                if dispatch.place is None:
                    continue
                step = dispatch.end // plan.gradients_per_step
                num_kept, is_tick = place["num_kept"], plan.to_tick(step) == thin
                if is_tick:
                    seen = chains.stats()
                    run.tick(seen)
                    if step > num_warmup and np.all(seen["is_draw"]):
                        run.put(num_kept, step, chains.draw(), seen)
                        num_kept += 1
                place = {"gradient": dispatch.end, "num_kept": num_kept, "stream": dispatch.place}
                if is_tick and bar is not None:
                    _show(bar, step, seen)
                if is_tick and callback is not None:
                    callback(step, seen)
                if is_tick or jax.process_count() == 1:
                    stop, due = any_process(wish() is not None, run.is_due())
                    if stop:
                        break
                    if due:
                        run.checkpoint(chains.packed, place)
            run.checkpoint(chains.packed, place)
    except _loop.SecondInterrupt:
        raise
    except KeyboardInterrupt:
        stop = True
    finally:
        if bar is not None:
            bar.close()
        run.close()
    _check_end(plan, place["gradient"], place["num_kept"], num_draws, stop)
    return run.result()


def _check_end(plan: Plan, gradient: int, num_kept: int, num_draws: int, stopped: bool):
    """Say why there are fewer draws than wanted; raise where there are none."""
    step = gradient // plan.gradients_per_step
    if not num_kept:
        if stopped:
            raise KeyboardInterrupt("`sample` was stopped before the first draw.")
        if step == plan.num_steps:
            rule = f"so many that the sampler calls one of the {step} steps a sample"
            remedy = "See its argument `adapt_steps` or `exploration`."
            _check.fail("sample", "num_draws", rule, num_draws, remedy)
        num_batches = plan.num_steps * plan.gradients_per_step // plan.gradients_per_batch
        rule = f"an iterable with a batch for each of the {num_batches} calls"
        _check.fail("sample", "batches", rule, "one that ran out before the first draw")
    if num_kept < num_draws:
        early = "ended early" if step < plan.num_steps else "kept what the sampler calls a sample,"
        message = f"`sample` {early} with {num_kept} of {num_draws} draws per chain."
        warnings.warn(message, stacklevel=3)


def _dispatches(stream: _loop.Stream, plan: Plan, call: int, chains: Chains) -> Iterator[Dispatch]:
    """Cut the run into pieces of work, from a call on; none goes beyond a tick."""
    num_gradients, is_new = plan.num_steps * plan.gradients_per_step, call == 0
    per_step = plan.gradients_per_step // plan.gradients_per_batch
    while call < num_gradients:
        taken, place = [], None
        for _ in range(min(plan.steps_per_dispatch, plan.to_tick(call // plan.gradients_per_step))):
            of_step = list(islice(stream, per_step))
            if len(of_step) < per_step:
                break
            taken += of_step
            place = stream.place()
        if not taken:
            return
        if is_new:
            chains.check(taken[0])
            is_new = False
        calls = [batch for batch in taken for _ in range(plan.gradients_per_batch)]
        several = len(taken) > per_step
        stacked = _loop.stack(calls, axis=plan.gradient_axis) if several else None
        if stacked is not None:
            call += len(calls)
            yield Dispatch(call, chains.put(stacked, True), True, place)
            continue
        for left, batch in zip(reversed(range(len(calls))), calls, strict=True):
            call += 1
            yield Dispatch(call, chains.put(batch), False, None if left else place)


def _show(bar: Any, step: int, stats: Mapping[str, np.ndarray]):
    """Move the bar on, with what a person watches while a chain runs."""
    shown = {"step_size": f"{np.median(stats['step_size']):.2e}"}
    if np.all(np.isfinite(stats["energy_mean"])):
        shown["energy"] = f"{np.median(stats['energy_mean']):.2g}"
    bar.set_postfix(shown, refresh=False, rejections=int(np.sum(stats["num_rejected"])))
    bar.update(step - bar.n)
