"""The loop around a sampler: warm-up, thinning, draws."""

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _check, _loop, _state
from optax_smile.snapshots import Snapshots, SnapshotWriter, StoredSnapshots, load_snapshots


def sample(
    loss_fn: Callable[[optax.Params, Any], jax.Array],
    params: optax.Params,
    batches: Iterable[Any],
    sampler: optax.GradientTransformation,
    *,
    num_warmup: int,
    num_samples: int,
    thin: int = 1,
    key: jax.Array,
    per_chain: bool = False,
    directory: str | os.PathLike | None = None,
    dtype: str | None = None,
    progress: bool = True,
    callback: Callable[[int, Mapping[str, np.ndarray]], None] | None = None,
) -> Snapshots | StoredSnapshots:
    """Run many chains and keep every `thin`-th accepted step end after the warm-up.

    Args:
        loss_fn: mean loss `loss_fn(params, batch)`, scalar, without the prior.
        params: start of the chains, each leaf `[chain, ...]`, such as `warmstart` returns.
        batches: gone through again when it ends. Each call of the sampler takes one batch; batches
            of one shape compile once.
        sampler: a sampler of this library, alone or inside an `optax.chain`.
        num_warmup: steps per chain before the first draw counts, >= 0.
        num_samples: draws to keep per chain, >= 1. Where the sampler says that a point is no
            sample (`is_sample` of `optax_smile.stats`: the search of `cyclical_sgld`, the burn-in
            of `scale_adapted_sghmc`), none is kept: there are fewer, and a warning says so.
        thin: steps between draws, >= 1.
        key: JAX key, from which every chain's sampler gets one of its own if it needs one.
        per_chain: whether each batch has a leading chain axis; otherwise chains share them.
        directory: where to write the draws, by a thread of its own while the chains run on; new or
            empty. None keeps them in host memory.
        dtype: what the draws are rounded to on disk: `"float16"`, `"float32"`, `"float64"`; None
            rounds nothing.
        progress: show a progress bar with step size, energy error and resets, if tqdm is
            installed.
        callback: `callback(step, stats)` at every thinning tick, with the arrays `[chain]` that
            `optax_smile.stats` gives.

    Returns:
        `Snapshots` with `params` `[chain, draw, ...]` and the statistics at every tick; with a
        `directory` the `StoredSnapshots` that `load_snapshots` gives. A keyboard interrupt, or
        batches that run out, end the run early: a warning says so, and the draws made until then
        are returned.

    Raises:
        ValueError: an argument out of range, leading axes that disagree, a loss that is not a
            scalar, a state without a sampler, batches that run out before the first draw, or a
            sampler that has not begun to sample at the end; a `directory` that holds draws already.
        OSError: a draw that cannot be written, such as on a full disk: the message names the file,
            and the draws before it can be loaded.

    Cost: one gradient per chain and call (a step of `"minimal_norm"` is two calls). Without
    `directory` the draws lie in host memory.

    Example:
        >>> import jax, jax.numpy as jnp, optax_smile
        >>> loss_fn = lambda params, batch: jnp.sum((params["w"] - batch) ** 2) / 2
        >>> draws = optax_smile.sample(
        ...     loss_fn, {"w": jnp.zeros((3, 2))}, [jnp.ones(2)],
        ...     optax_smile.smile_naive(0.1, num_data=10),
        ...     num_warmup=20, num_samples=5, thin=2, key=jax.random.key(0), progress=False,
        ... )
        >>> draws.params["w"].shape
        (3, 5, 2)
    """
    _check.whole("sample", "num_warmup", num_warmup, 0)
    _check.whole("sample", "num_samples", num_samples, 1)
    _check.whole("sample", "thin", thin, 1)
    num_chains = _loop.num_rows("sample", params)
    sampler = optax.with_extra_args_support(sampler)

    def one_call(params, state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = sampler.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.array, params)
    state = jax.jit(jax.vmap(sampler.init))(params)
    calls_per_step = _state.find(state).calls_per_step
    try:
        if optax.tree.get(state, "key") is not None:
            state = optax.tree.set(state, key=jax.random.split(key, num_chains))
    except KeyError:
        rule = "a transformation whose state has one field `key`"
        remedy = 'Pass static_args=("key",) to optax.inject_hyperparams.'
        _check.fail("sample", "sampler", rule, "several", remedy)

    in_axes = (0, 0, 0 if per_chain else None)
    advance = jax.jit(jax.vmap(one_call, in_axes=in_axes), donate_argnums=(0, 1))
    last_accepted = jax.jit(jax.vmap(_state.last_accepted))

    disk = None if directory is None else SnapshotWriter(directory, params, dtype=dtype)
    draws, num_draws, trace, step = [], 0, [], 0
    num_steps = num_warmup + num_samples * thin
    num_calls = num_steps * calls_per_step
    bar = _loop.progress_bar(num_steps, "sampling", progress)
    try:
        for call, batch in enumerate(islice(_loop.endless(batches), num_calls)):
            if call == 0:
                _loop.check_batch("sample", loss_fn, params, batch, per_chain, num_chains)
            params, state = advance(params, state, batch)
            step, unfinished = divmod(call + 1, calls_per_step)
            if unfinished or (num_steps - step) % thin:
                continue
            trace.append(jax.device_get(_state.stats(state)))
            if step > num_warmup and np.all(trace[-1]["is_sample"]):
                draw = last_accepted(state, params)
                if disk is None:
                    draws.append(jax.device_get(draw))
                else:
                    disk.put(num_draws, step, draw, trace[-1])
                num_draws += 1
            if bar is not None:
                _show(bar, step, trace[-1])
            if callback is not None:
                callback(step, trace[-1])
    except KeyboardInterrupt:
        if not num_draws:
            raise
    finally:
        if bar is not None:
            bar.close()
        if disk is not None:
            disk.close()
    if not num_draws and step == num_steps:
        rule = f"so many that the sampler calls one of the {num_steps} steps a sample"
        remedy = "See its argument `adapt_steps` or `exploration`."
        _check.fail("sample", "num_samples", rule, num_samples, remedy)
    if not num_draws:
        rule = f"an iterable with a batch for each of the {num_calls} calls"
        _check.fail("sample", "batches", rule, "one that ran out before the first draw")
    if num_draws < num_samples:
        early = "ended early" if step < num_steps else "kept what the sampler calls a sample,"
        message = f"`sample` {early} with {num_draws} of {num_samples} draws per chain."
        warnings.warn(message, stacklevel=2)

    if directory is not None:
        return load_snapshots(directory, like=jax.tree.map(lambda x: x[0], params))

    def stack(*leaves):
        return np.stack(leaves, axis=1)

    return Snapshots(jax.tree.map(stack, *draws), jax.tree.map(stack, *trace))


def _show(bar: Any, step: int, stats: Mapping[str, np.ndarray]):
    """Move the bar on, with what a person watches while a chain runs."""
    shown = {"step_size": f"{np.median(stats['step_size']):.2e}"}
    if np.all(np.isfinite(stats["energy_mean"])):
        shown["energy"] = f"{np.median(stats['energy_mean']):.2g}"
    bar.set_postfix(shown, refresh=False, resets=int(np.sum(stats["num_resets"])))
    bar.update(step - bar.n)
