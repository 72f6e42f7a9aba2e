"""Sampling from start to end: warm-up, draws, and resuming after a kill."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from optax_smile import _check
from optax_smile._bar import Bar
from optax_smile._types import Options
from optax_smile._warn import warn
from optax_smile.chains.run import EXIT, BatchPer, Interrupted, Run
from optax_smile.draws._format import StoredDtype
from optax_smile.draws.snapshots import Snapshots, StoredSnapshots


@_check.arguments(num_warmup=_check.Whole(0), num_draws=_check.Whole(1), thin=_check.Whole(1))
def sample(
    loss_fn: Callable[..., object],
    params: optax.Params,
    batches: Iterable[object],
    sampler: optax.GradientTransformation,
    *,
    num_warmup: int,
    num_draws: int,
    thin: int = 1,
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
    dtype: StoredDtype | None = None,
    progress: bool = True,
) -> Snapshots | StoredSnapshots:
    """Run many chains. After a warm-up, store their current draws every `thin` steps.

    Args:
        loss_fn: scalar mean loss `loss_fn(params, batch)` without the prior. With `aux` it is
            called as `loss_fn(params, batch, aux=aux)`, and returns `(loss, new_aux)`.
        params: initial parameters of all chains, each leaf `[chain, ...]`, as `warmstart` returns
            them.
        batches: iterable of batches, arrays or what `np.asarray` converts to them, the same in
            every process. When it is exhausted, `sample` iterates over it again; with a generator,
            the run ends. If a step takes two of an even number of batches, every second pass begins
            with the second and ends with the first, so that both gradients of a step see all
            batches. Each new batch shape causes a compilation.
        sampler: a sampler of this library, alone or last in an `optax.chain`. A step of one in
            `optax.MultiSteps` takes several batches. For comparison, it may be any Optax optimizer,
            which gets `value`, `grad` and `value_fn` if it takes them. A step is then one gradient,
            and is skipped if it leads to non-finite parameters. `sample` warns that its iterates
            are not posterior draws: their settings have `"is_posterior": False`.
        num_warmup: steps of each chain without draws, >= 0.
        num_draws: draws to store per chain, >= 1. Steps with `stats(state).is_draw` False are not
            stored: the exploration of `cyclical_sgld`, and the burn-in of `scale_adapted_sghmc`.
            The result then has fewer draws, with a warning.
        thin: steps between draws, >= 1. The first draw is step num_warmup + thin.
        key: JAX key or seed. The sampler and the loss of each chain get their own keys.
        aux: auxiliary state of the model, such as running means of BatchNorm, each leaf
            `[chain, ...]`. Rejected steps leave it unchanged, and a step after which a number in it
            is no longer finite is rejected, with a warning. Draws are then
            `{"params": ..., "aux": ...}`.
        stochastic: whether the loss is random, as with dropout. It then receives a new `key=` for
            each gradient.
        per_chain: whether each batch has a leading chain axis; otherwise chains share batches.
        batch_per: `"gradient"`: each gradient gets its own batch. `"step"`: with the integrator
            `"minimal_norm"`, both gradients of a step use the same batch, as in Sommer et al. 2026.
        control_variate: all data, an iterable of batches with each of the `num_data` examples once,
            to reduce the noise of the gradients: see `tall`. Each chain has a centre of its own,
            which moves along with it. If this is the same list as `batches`, the gradients at the
            centre are stored, up to 256 MiB of them; otherwise, such as for `[data]`, they are
            computed again. The loss of a batch must be a mean over its examples. The run measures
            whether the control variate pays. It does with many more data than parameters. Where it
            does not, the run goes on without, with a warning. None: no control variate.
        steps_per_dispatch: largest number of steps per compiled call, >= 1; a call also ends every
            `thin` steps. More are faster for small networks. For convolutions on a CPU use 1: their
            gradients are many times slower inside a compiled loop.
        mesh: devices with an axis `"chain"`, over which chains are spread, and optionally an axis
            `"data"`, over which the examples of a batch are spread; see `parallel`. None: one
            device.
        specs: how the parameters of one chain are sharded, see `parallel.place`.
        directory: directory for draws and checkpoints, written while the chains run. If it holds a
            run, `sample` continues it from its newest checkpoint. These must be unchanged: sampler,
            key, shapes, `dtype`, `num_warmup`, `thin`, `batch_per`, `stochastic`, `per_chain` and,
            if `batches` is a list, the number and the shapes of the batches. Other `params` are
            ignored, with a warning. The code of functions is not compared. A larger `num_draws`
            extends a finished run; without it, the stored draws are returned, with a warning. None:
            keep the draws in host memory.
        check: warn of the mistakes that `optax_smile.check` can find from the loss, the batches and
            the first steps; at the end, warn if gradients were not finite, or if a clip before the
            sampler shortened them. This costs a few forward passes, and 32 more if the number of
            parameters exceeds 2 * num_data / temperature.
        checkpoint_minutes: minutes between checkpoints, >= 0. A checkpoint is always written at the
            start and at the end.
        dtype: precision of the draws on disk: `"float16"`, `"float32"` or `"float64"`; None: that
            of the parameters. Requires a `directory`. An array whose largest number is too large or
            too small for it (in `"float16"` above 65504 or below 6e-5) is stored in its own
            precision in that draw, with a warning.
        progress: show a progress bar, if tqdm is installed.

    Returns:
        `Snapshots` with `params` `[chain, draw, ...]` and statistics every `thin` steps; with a
        `directory`, the `StoredSnapshots` that `load_snapshots` returns. Without one, each of
        several processes returns only its own chains. A run ends early on Ctrl-C or SIGTERM, when
        the batches run out, or when a batch is empty or differs in structure from the first. It
        then finishes the step, writes a checkpoint, warns, and returns the draws so far. After a
        signal, `interrupted` of the draws is `"SIGINT"` or `"SIGTERM"`, else None: see the page on
        long runs.

    Raises:
        ValueError: an argument is out of range; the loss is not a scalar, or it or its gradients
            are not finite at the start; chains are identical and nothing is random; the batches run
            out before the first draw; a transformation before the sampler changes gradients (a clip
            of their norm is allowed) or one after it changes updates; no step would be stored; the
            directory is in use, not writable, of another run or of another format.
        OSError: a draw or a checkpoint could not be written, such as on a full disk. The message
            names the file; earlier draws can be loaded.
        KeyboardInterrupt: the run was interrupted before the first draw, or by a second Ctrl-C.

    The flags `jax_debug_nans`, `jax_debug_infs`, `jax_disable_jit` and strict promotion of dtypes
    have no effect inside.

    Cost: one gradient per chain and step, two with `"minimal_norm"`. A control variate takes as
    many again, unless those at the centre are stored, and a pass over all data for each centre. The
    trace then has `num_reduced`, the calls with a control variate, `num_passes`, and `noise_left`,
    the share of the variance of the gradients that is left. Without a `directory`, the draws take
    host memory. With `specs`, every device that holds a part of a chain gathers the whole
    parameters of a draw before the draw is stored. Each run compiles its programs, unless JAX's
    compilation cache has them: see the page on long runs.

    Example:
        >>> import jax, jax.numpy as jnp, optax_smile
        >>> loss_fn = lambda params, batch: jnp.mean((batch @ params["w"] - 1) ** 2)
        >>> draws = optax_smile.sample(
        ...     loss_fn, {"w": jnp.eye(3, 2)}, [jnp.ones((5, 2))],
        ...     optax_smile.sgld(0.01, num_data=5, key=0),
        ...     num_warmup=20, num_draws=5, thin=2, key=jax.random.key(0), progress=False,
        ... )
        >>> draws.params["w"].shape
        (3, 5, 2)
    """
    given: Options = {"key": key, "aux": aux, "stochastic": stochastic, "per_chain": per_chain}
    given |= {"batch_per": batch_per, "control_variate": control_variate, "check": check}
    given |= {"steps_per_dispatch": steps_per_dispatch, "mesh": mesh, "specs": specs}
    given |= {"directory": directory, "checkpoint_minutes": checkpoint_minutes, "dtype": dtype}
    with (
        _check.called("sample", "Run", "Run.advance", "Run.draws"),
        Run(loss_fn, params, batches, sampler, **given) as run,
        Bar(num_warmup + num_draws * thin, "sampling", progress) as bar,
        run.heeding(),
    ):
        _check_warmup(run, num_warmup)
        begun_at = run.num_steps
        try:
            for step in range((num_warmup - 1) % thin + 1, num_warmup + 1, thin):
                run.advance(step)
                _show(bar, run)
            for _ in run.making(num_draws, thin):
                _show(bar, run)
        except Interrupted as interrupt:
            if not run.num_draws:
                raise
            warn(f"{interrupt} {EXIT}")
        draws = run.snapshots()
        if isinstance(draws, StoredSnapshots):
            if run.num_steps == begun_at:
                warn(f"`sample`: the run in {directory} is finished. Its draws are returned.")
            draws.draws = draws.draws[:num_draws]
    return draws


def _check_warmup(run: Run, num_warmup: int):
    """Require the same `num_warmup` as in the run that is continued."""
    made, before = run.num_steps, run.num_warmup
    if before not in (None, num_warmup) or (before is None and made > num_warmup):
        rule = f"at least {made}, the steps made" if before is None else f"{before}"
        advice = "Or choose another directory."
        _check.fail("num_warmup", f"{rule}, as in this run", num_warmup, advice)


def _show(bar: Bar, run: Run):
    """Update the progress bar."""
    stats = run.stats
    figures = {"loss": f"{np.median(stats['loss']):.3g}"}
    # The step size of an optimizer is NaN.
    if not np.all(np.isnan(stats["step_size"])):
        figures["step_size"] = f"{np.median(stats['step_size']):.2e}"
        figures["rejected"] = str(np.sum(stats["num_rejected"]).astype(int))
    bar.show(run.num_steps, **figures)
