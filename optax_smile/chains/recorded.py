"""Draws from a loop that hides its optimizer's state, such as the `fit()` of another library."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.custom_batching import custom_vmap
from jax.experimental import io_callback

from optax_smile import _check, _disk, _settings, state
from optax_smile._types import Options, Tree
from optax_smile._warn import warn
from optax_smile.chains import _directory
from optax_smile.draws import _format
from optax_smile.draws.snapshots import Snapshots, StoredSnapshots, load_snapshots

REPEAT = (
    "A loop that goes back to an earlier state must repeat its draws to the bit, with the same"
    " data, seeds and program. For another fit, choose a new directory or call `init`."
)
# Arguments of the samplers that have steps without draws.
SKIPPING = {"exploration", "adapt_steps"}


class RecordedState(NamedTuple):
    """State of a sampler, and the number of the call of `init`, int32 from 1."""

    sampler: optax.OptState
    fit: jax.Array


class RecordedSampler(optax.GradientTransformationExtraArgs):
    """A sampler that sends its draws to the host, made by `recorded`; use it as an optimizer."""

    def draws(self) -> Snapshots | StoredSnapshots:
        """Return the draws since the last call of `init` that has any, once all have arrived.

        Returns:
            `Snapshots`, as `sample` returns them; with a `directory`, `StoredSnapshots`.

        Raises:
            ValueError: no draws were recorded, or the loop did not add the updates unchanged.
            OSError: a draw could not be written.

        Warns:
            UserWarning: recording ended at call 2**31 - 1, or no check can detect changes of the
                updates, as the loop does not pass `params` to `update`.
        """
        jax.effects_barrier()
        return vars(self.init)["recorder"].result()


@_check.arguments(
    sampler=_check.TRANSFORMATION,
    num_warmup=_check.Whole(0),
    thin=_check.Whole(1),
    directory=_check.PathLike() | None,
)
def recorded(
    sampler: optax.GradientTransformation,
    *,
    num_warmup: int,
    thin: int = 1,
    directory: str | os.PathLike[str] | None = None,
) -> RecordedSampler:
    """Record the draws of a sampler in a loop that does not return the optimizer's state.

    Every `thin` steps the sampler sends a draw to the host, from inside `jit`, `scan` and `vmap`
    over chains, at the cost of one copy of the parameters. After the loop, `draws()` returns them.

    Args:
        sampler: sampler, alone, last in an `optax.chain`, or in a wrapper like `optax.MultiSteps`.
        num_warmup: steps without draws, >= 0. The first draw is step num_warmup + thin.
        thin: steps between two draws, >= 1.
        directory: folder for the draws, new or of the same fit, if its loop continues from its own
            checkpoint or is started again. Stored draws are never replaced: one that is made again
            must be the same to the bit. From `init` to `draws()` nothing else can record there.

    Returns:
        An Optax transformation with the method `draws`. Several chains need one `vmap` of `init`.

    Raises:
        ValueError: an argument is out of range. From `init`: there is no sampler, the call is
            inside `shard_map`, or the folder is in use. From `draws()`: the folder is of another
            fit, or a draw that was made again differs; JAX raises this in the loop, too.

    Example:
        >>> import jax, jax.numpy as jnp, optax, optax_smile
        >>> tx = optax_smile.recorded(optax_smile.psmile(num_data=1, key=0), num_warmup=10, thin=5)
        >>> def step(carry, _):
        ...     w, state = carry
        ...     updates, state = tx.update(w, state, w)
        ...     return (optax.apply_updates(w, updates), state), None
        >>> w = jnp.ones(3)
        >>> _ = jax.lax.scan(step, (w, tx.init(w)), length=110)
        >>> tx.draws().num_draws
        20
    """
    recorder = _Recorder(num_warmup, thin, None if directory is None else Path(directory))
    inner = optax.with_extra_args_support(sampler)

    def init(params: optax.Params) -> RecordedState:
        begun = inner.init(params)
        state.find(begun, "recorded", "sampler")
        if jax.sharding.get_abstract_mesh().manual_axes:
            rule, got = "called outside of `shard_map`", "a call inside"
            _check.fail("recorded", "init", rule, got, "Use `sample`, which takes a mesh.")
        with jax.ensure_compile_time_eval():
            recorder.settings = _settings.of(sampler, jax.eval_shape(lambda x: x, params))
        recorder.claim()
        return RecordedState(begun, recorder.begin(params))

    def update(updates, before, params=None, **others) -> tuple[optax.Updates, RecordedState]:
        if not isinstance(before, RecordedState):
            rule = "what `init` or `update` of the recorded sampler returned"
            _check.fail("recorded", "state", rule, _check.show(before))
        recorder.is_blind |= params is None
        updates, after = inner.update(updates, before.sampler, params, **others)
        after = RecordedState(after, before.fit)
        recorder.send(after, None if params is None else optax.apply_updates(params, updates))
        return updates, after

    # JAX and `copy` rebuild named tuples from `init` and `update`.
    vars(init).update(recorder=recorder)
    return RecordedSampler(init, cast(optax.TransformUpdateExtraArgsFn, update))


def _for_all_chains(function: Callable[..., Tree]) -> Callable[..., Tree]:
    """Make a function of one chain from one of arrays `[chain, ...]`, called once under `vmap`.

    `vmap` of a callback would call it once per chain and, in a `cond` whose predicate differs
    between chains, at every step.
    """
    whole = custom_vmap(function)

    @whole.def_vmap
    def rule(size, is_batched, *arguments):
        def join(x, has_axis):
            x = x if has_axis else jnp.broadcast_to(x, (size, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        result = whole(*jax.tree.map(join, arguments, tuple(is_batched)))
        result = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), result)
        return result, jax.tree.map(lambda _: True, result)

    def of_one(*arguments):
        result = whole(*jax.tree.map(lambda x: x[None], arguments))
        return jax.tree.map(lambda x: x[0], result)

    # Compiled once for all eager calls of `update`.
    return jax.jit(of_one)


class _Fit:
    """What the host has of one call of `init`; `start` is None if it was in another process."""

    def __init__(self, start: Tree):
        self.start = start
        # By step: what some chains have sent, and whole draws or, in a directory, their files.
        self.parts: dict[int, dict[int, Tree]] = {}
        self.draws: dict[int, Tree] = {}
        self.files: _format.DrawFiles | None = None

    def start_of(self, draw: Tree) -> Tree:
        """Return the start of all chains of a draw, or the draw."""
        start = draw if self.start is None else self.start
        return jax.tree.map(lambda x, y: np.broadcast_to(x, y.shape), start, draw)


class _Recorder:
    """Sends draws to the host and keeps them.

    Callbacks run in threads of JAX, where a call of JAX may wait forever. They use NumPy only.
    """

    # Of all recorders, as a lock cannot be copied or pickled.
    threads = threading.Lock()

    def __init__(self, num_warmup: int, thin: int, directory: Path | None):
        self.num_warmup, self.thin, self.directory = num_warmup, thin, directory
        if directory is not None:
            _disk.import_safetensors()
            self.directory = directory.absolute()
        self.fits: dict[int, _Fit] = {}
        self.failure: BaseException | None = None
        self.settings: Options | None = None
        self.is_blind = False
        self.locked: contextlib.ExitStack | None = None
        self.begin, self.send = _for_all_chains(self._begin), _for_all_chains(self._send)

    def _begin(self, params: Tree) -> jax.Array:
        """Ask the host for the number of a fit."""
        chains = jax.tree.leaves(params)[0].shape[:1]

        def begin(params: Tree) -> np.ndarray:
            with self.threads:
                self.fits[len(self.fits) + 1] = _Fit(jax.tree.map(np.array, params))
                return np.full(chains, len(self.fits), np.int32)

        return io_callback(begin, jax.ShapeDtypeStruct(chains, jnp.int32), params)

    def _send(self, after: RecordedState, params: Tree) -> tuple[()]:
        """Send the draws of all chains to the host if this call ends a tick."""
        per_step = state.find(after.sampler, "recorded").gradients_per_step
        stats = jax.vmap(state.stats)(after.sampler)
        step, part = jnp.divmod(stats.num_gradients, per_step)
        count, rest = jnp.divmod(step - self.num_warmup, self.thin)
        is_tick = (part == 0) & (rest == 0) & (count > 0) & stats.is_draw
        # The counter stays at its largest number.
        is_tick &= stats.num_gradients < _check.LARGEST_WHOLE

        def send():
            draw = jax.vmap(state.last_accepted)(after.sampler, params)
            made = {**stats._asdict(), "step": step}, draw
            io_callback(self._receive, None, is_tick, after.fit, made)

        jax.lax.cond(jnp.any(is_tick), send, lambda: None)
        return ()

    def _receive(self, *sent: Tree):
        is_tick, fits, made = jax.tree.map(np.array, sent)
        with self.threads:
            try:
                if self.failure is None:
                    self._collect(np.flatnonzero(is_tick).tolist(), fits, made)
            except BaseException as error:
                self.failure = error
                self._release()
                raise

    def _collect(self, chains: list[int], fits: np.ndarray, made: Tree):
        if len(np.unique(fits)) > 1:
            rule = "that of one call of `init`, as of `jax.vmap(init)` for several chains"
            _check.fail("recorded", "state", rule, f"one of the calls {np.unique(fits)}")
        fit = self.fits.setdefault(int(fits[0]), _Fit(None))
        for chain in chains:
            step = int(made[0]["step"][chain])
            parts = fit.parts.setdefault(step, {})
            parts[chain] = jax.tree.map(lambda x, at=chain: x[at], made)
            if len(parts) == len(fits):
                parts = [x for _, x in sorted(fit.parts.pop(step).items())]
                with _check.called("recorded", "load_snapshots"):
                    self._keep(fit, step, *jax.tree.map(lambda *x: np.stack(x), *parts))

    def _keep(self, fit: _Fit, step: int, stats: Tree, params: Tree):
        """Keep a draw of all chains; on disk it is before the loop can write a checkpoint."""
        if self.directory is not None:
            self._open(self.directory, fit, params)
        last, wrong = max(fit.draws, default=step - self.thin), None
        if (found := fit.draws.get(step)) is not None:
            if fit.files is not None:
                found = None, _format.read_chains(found, fit.files.leaves, len(stats["step"]))
            if not _are_same(found[1], params):
                wrong = f"another draw at step {step}"
        elif fit.files is None:
            fit.draws[step] = stats, params
        elif last == step - self.thin or last < step and SKIPPING & {*(self.settings or ())}:
            del stats["step"]
            fit.draws[step] = fit.files.write(len(fit.draws), step, params, stats)
        else:
            wrong = f"the draws of another fit, up to step {last}"
        if wrong is not None:
            argument, got = ("directory", self.directory) if self.directory else ("state", "one")
            rule = "new, or of a loop that repeats its draws"
            _check.fail("recorded", argument, rule, f"{got} with {wrong}", REPEAT)

    def claim(self):
        """Lock the directory until `draws`."""
        if self.directory is not None and self.locked is None:
            closing = contextlib.ExitStack()
            closing.enter_context(_directory.lock("recorded", self.directory))
            self.locked = closing

    def _open(self, directory: Path, fit: _Fit, params: Tree):
        """Begin the directory, or require that it is of this sampler and model."""
        self.claim()
        if fit.files is not None:
            return
        start = fit.start_of(params)
        settings = {"num_warmup": self.num_warmup, "thin": self.thin, "sampler": self.settings}
        manifest = _format.manifest_of(start, None, settings)
        files = _format.DrawFiles(directory, _format.leaves_of(start))
        if _format.has_draws(directory) or os.path.lexists(directory / _format.MANIFEST):
            if self.settings is None:  # `init` was not called in this process.
                del manifest["settings"]["sampler"]
            before = _format.read_manifest("recorded", directory)
            _directory.check_run("recorded", directory, before, manifest)
        else:
            # In this order, so that a kill between them leaves no folder that cannot be used.
            files.write(_format.START, 0, start, {})
            _format.write_manifest(directory, manifest)
        draws = _format.find_draws(directory, manifest)
        fit.draws = {_format.read_header(blocks[0])["step"]: blocks for blocks in draws}
        fit.files = files

    def _release(self):
        """Unlock the directory."""
        if self.locked is not None:
            self.locked.close()
        self.locked = None
        # What others may write there is to be read.
        for fit in self.fits.values():
            fit.files = None

    def result(self) -> Snapshots | StoredSnapshots:
        """Return the draws of the last fit that has any."""
        with self.threads:
            self._release()
            if self.failure is not None:
                raise self.failure
            fit = next((x for x in reversed(self.fits.values()) if x.draws), None)
            if fit is None:
                first = f"The first draw is step {self.num_warmup + self.thin}."
                raise ValueError(f"`draws`: nothing is recorded yet. {first}")
            if self.directory is None:
                whole = [draw for _, draw in sorted(fit.draws.items())]
                trace, params = jax.tree.map(lambda *x: np.stack(x, axis=1), *whole)
                start = None if fit.start is None else fit.start_of(whole[0][1])
                draws = Snapshots(params, trace, self.settings, start)
            else:
                like = None if fit.start is None else jax.tree.map(lambda x: x[0], fit.start)
                draws = load_snapshots(self.directory, like=like)
        if np.any(draws.trace["is_altered"]):
            raise ValueError("`draws`: the loop changed the updates. These are no posterior draws.")
        if self.is_blind:
            warn(
                "`draws`: the loop does not pass `params` to `update`. Changes of the updates,"
                " after which these are no posterior draws, are not detected."
            )
        per_tick = self.thin * _settings.gradients_per_step(draws.settings)
        if int(np.max(draws.trace["num_gradients"])) + per_tick >= _check.LARGEST_WHOLE:
            ends = f"recording ends at call {_check.LARGEST_WHOLE} of `update`"
            warn(f"`draws`: {ends}. To go on, call `init` with the last draw.")
        return draws


def _are_same(first: Tree, second: Tree) -> bool:
    """Return whether two trees of arrays have the same bits."""
    leaves = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in leaves)
