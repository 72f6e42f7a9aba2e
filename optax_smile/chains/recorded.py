"""Draws from a loop that hides its optimizer's state, such as the `fit()` of another library."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn, cast

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

# Calls of `init` before one of `draws` without a warning; some loops make a second one.
MOST_CALLS = 2
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
        """Wait for all draws since the last call of `init` that has any, and return them.

        Returns:
            `Snapshots`, as `sample` returns them; with a `directory`, `StoredSnapshots`.

        Raises:
            ValueError: no draws were recorded, or the loop did not add the updates unchanged.
            OSError: a draw could not be written.

        Warns:
            UserWarning: recording ended at call 2**31 - 1; `init` was called more than twice, such
                as in every epoch; the loop does not pass `params` to `update`, so that changes of
                the updates are not detected.
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
    over chains. After the loop, `draws()` returns them. With `track_params=True` the loop may call
    `update` without parameters; then no check can detect that it changes the updates.

    Args:
        sampler: sampler, alone, last in an `optax.chain`, or in a wrapper like `optax.MultiSteps`.
        num_warmup: steps without draws, >= 0. The first draw is step num_warmup + thin.
        thin: steps between two draws, >= 1.
        directory: folder for the draws, new or of the same fit, if its loop continues from its own
            checkpoint or is started again. `load_snapshots` can read it while the loop runs. Stored
            draws are never replaced or deleted: one that the loop makes again must be the same to
            the bit. From `init` to `draws()` no other process can record there. None: host memory.

    Returns:
        An Optax transformation with the method `draws`. Several chains need one `vmap` of `init`.

    Raises:
        ValueError: an argument is out of range. From `init`: the transformation has no sampler, or
            `init` is called inside `shard_map`, or the folder is in use or of another sampler. From
            `draws()`: the folder holds draws of another fit, or a loop that went back to an earlier
            state made other draws. In the loop, JAX raises a `JaxRuntimeError` instead.

    Cost: one copy of the parameters to the host per draw. Each step takes about .01 ms more inside
    `scan`, and about 1.5 ms more (on a CPU) if Python calls a compiled function for each step.

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
        return RecordedState(begun, recorder.number(params))

    def update(updates, before, params=None, **others) -> tuple[optax.Updates, RecordedState]:
        if not isinstance(before, RecordedState):
            rule = "what `init` or `update` of the recorded sampler returned"
            _check.fail("recorded", "state", rule, _check.show(before))
        recorder.is_blind |= params is None
        updates, after = inner.update(updates, before.sampler, params, **others)
        after = RecordedState(after, before.fit)
        recorder.hand_over(after, None if params is None else optax.apply_updates(params, updates))
        return updates, after

    # JAX and `copy` rebuild named tuples from `init` and `update`.
    arguments = {"sampler": sampler, "num_warmup": num_warmup, "thin": thin}
    arguments["directory"] = None if directory is None else os.fspath(directory)
    vars(init).update(recorder=recorder, name="recorded", arguments=arguments)
    return RecordedSampler(init, cast(optax.TransformUpdateExtraArgsFn, update))


def _on_host(function: Callable[..., Tree], depth: int = 0) -> Callable[..., Tree]:
    """Batch a function of arrays with `depth` leading axes, so that one call takes all chains.

    `vmap` of a callback would call it once per chain and, in a `cond` whose predicate differs
    between chains, at every step.
    """
    batched = custom_vmap(functools.partial(function, depth))

    @batched.def_vmap
    def rule(axis_size, is_batched, *arguments):
        whole = jax.tree.map(
            lambda x, has_axis: x if has_axis else jnp.broadcast_to(x, (axis_size, *jnp.shape(x))),
            arguments,
            tuple(is_batched),
        )
        result = _on_host(function, depth + 1)(*whole)
        return result, jax.tree.map(lambda _: True, result)

    return batched


def _flatten(depth: int, tree: Tree) -> Tree:
    """Join the leading axes into one of chains."""
    return jax.tree.map(lambda x: jnp.reshape(x, (-1, *jnp.shape(x)[depth:])), tree)


class _Fit:
    """What the host keeps for one call of `init`; `start` is None if it was in another process."""

    def __init__(self, start: Tree):
        self.start = start
        # Statistics and parameters by number of the draw and by chain.
        self.draws: dict[int, dict[int, Tree]] = {}
        # In a directory: how to write, and the draws there by step.
        self.files: _format.DrawFiles | None = None
        self.stored: dict[int, list[_format.Block]] = {}


class _Recorder:
    """Counts draws on the device, and keeps them on the host.

    Callbacks run in threads of JAX, where a call of JAX may wait forever. They use NumPy only.
    """

    # Of all recorders: for threads, and locks of their directories.
    lock = threading.Lock()
    locked: dict[str, contextlib.ExitStack] = {}

    def __init__(self, num_warmup: int, thin: int, directory: Path | None):
        self.num_warmup, self.thin, self.directory = num_warmup, thin, directory
        if directory is not None:
            _disk.import_safetensors()
            self.directory = directory.absolute()
        self.fits: dict[int, _Fit] = {}
        self.num_read = 0  # Fits at the last call of `draws`.
        self.failure: BaseException | None = None
        self.settings: Options | None = None
        self.is_blind = False
        # Compiled once for all eager calls of `update`.
        self.number = jax.jit(_on_host(self._number))
        self.hand_over = jax.jit(_on_host(self._hand_over))

    def _number(self, depth: int, params: Tree) -> jax.Array:
        """Ask the host for the number of a fit."""
        like = jax.ShapeDtypeStruct((), jnp.int32)
        fit = io_callback(self._begin, like, _flatten(depth, params))
        return jnp.full(jnp.shape(jax.tree.leaves(params)[0])[:depth], fit, jnp.int32)

    def _begin(self, params: Tree) -> np.ndarray:
        with self.lock:
            number = len(self.fits) + 1
            self.fits[number] = _Fit(jax.tree.map(np.array, params))
        return np.asarray(number, np.int32)

    def _hand_over(self, depth: int, after: RecordedState, params: Tree) -> tuple[()]:
        """Send the draws of all chains to the host if this call ends a tick."""
        after, params = _flatten(depth, (after, params))
        per_step = state.find(after.sampler, "recorded").gradients_per_step
        stats = jax.vmap(state.stats)(after.sampler)
        step, part = jnp.divmod(stats.num_gradients, per_step)
        count, rest = jnp.divmod(step - self.num_warmup, self.thin)
        is_tick = (part == 0) & (rest == 0) & (count > 0) & stats.is_draw
        # The counter stays at its largest number.
        is_tick &= stats.num_gradients < _check.LARGEST_WHOLE

        def send():
            draw = jax.vmap(state.last_accepted)(after.sampler, params)
            place = is_tick, after.fit, count - 1
            io_callback(self._put, None, place, {**stats._asdict(), "step": step}, draw)

        jax.lax.cond(jnp.any(is_tick), send, lambda: None)
        return ()

    def _put(self, place: Tree, stats: Tree, draw: Tree):
        (is_tick, fits, numbers), *made = jax.tree.map(np.array, (place, stats, draw))
        with self.lock:
            try:
                if self.failure is None:
                    self._keep(np.flatnonzero(is_tick).tolist(), fits, numbers.tolist(), made)
            except BaseException as error:
                self.failure = error
                raise

    def _keep(self, chains: list[int], fits: np.ndarray, numbers: list[int], made: Tree):
        if len(np.unique(fits)) > 1:
            rule = "that of one call of `init`, as of `jax.vmap(init)` for several chains"
            _check.fail("recorded", "state", rule, f"one of the calls {np.unique(fits)}")
        fit = self.fits.setdefault(int(fits[0]), _Fit(None))
        for chain in chains:
            draws, one = fit.draws.setdefault(numbers[chain], {}), jax.tree.map(_row(chain), made)
            # A loop that restored an earlier state makes draws again.
            if not _are_same(draws.setdefault(chain, one)[1], one[1]):
                rule = "that of a loop that repeats its draws, or of a new call of `init`"
                got = f"one with another draw {numbers[chain]}"
                _check.fail("recorded", "state", rule, got, REPEAT)
            if self.directory is not None and len(draws) == len(fits):
                with _check.called("recorded", "load_snapshots"):
                    self._write(self.directory, fit, *_stacked(fit.draws.pop(numbers[chain])))

    def _write(self, directory: Path, fit: _Fit, stats: Tree, params: Tree):
        """Write a draw while the device waits: it is on disk before a loop can checkpoint."""
        step, number = int(stats.pop("step")[0]), len(stats["is_draw"])
        if fit.files is None:
            fit.files = self._open(directory, fit, params)
        self.claim()
        # Another recorder of this process may have written meanwhile.
        for blocks in _format.find_draws(directory, {"num_chains": number})[len(fit.stored) :]:
            fit.stored[_format.read_header(blocks[0])["step"]] = blocks
        last, skips = max(fit.stored, default=None), SKIPPING & {*(self.settings or ())}
        if step in fit.stored:
            found = _format.read_chains(fit.stored[step], fit.files.leaves, number)
            if not _are_same(found, jax.tree.leaves(params)):
                self._refuse(f"another draw at step {step}")
        elif last in (None, step - self.thin) or last < step and skips:
            fit.stored[step] = fit.files.write(len(fit.stored), step, params, stats)
        else:
            self._refuse(f"the draws of another fit, up to step {last}")

    def _open(self, directory: Path, fit: _Fit, params: Tree) -> _format.DrawFiles:
        """Begin a folder, or require that it is of this fit."""
        start = params
        if fit.start is not None:
            start = jax.tree.map(lambda x, y: np.broadcast_to(x, y.shape), fit.start, params)
        settings = {"num_warmup": self.num_warmup, "thin": self.thin, "sampler": self.settings}
        manifest = _format.manifest_of(start, None, settings)
        files, before = _format.DrawFiles(directory, _format.leaves_of(start)), self.claim()
        if before is None:
            if _format.has_draws(directory):
                self._refuse(f"draws and no {_format.MANIFEST}")
            # In this order, so that a kill between them leaves no folder that cannot be used.
            files.write(_format.START, 0, start, {})
            _format.write_manifest(directory, manifest)
            return files
        if self.settings is None:  # `init` was not called in this process.
            manifest["settings"]["sampler"] = before["settings"]["sampler"]
        if before | {"versions": None} != manifest | {"versions": None}:
            self._refuse("draws of another sampler or model")
        begun = _format.read_start(directory, files.leaves, before["num_chains"])
        if fit.start is not None and not _are_same(jax.tree.leaves(start), begun):
            self._refuse("draws of another start")
        return files

    def claim(self) -> _disk.Json | None:
        """Lock the directory until `draws`, require its sampler, and return its manifest."""
        if self.directory is None:
            return None
        if (place := os.path.realpath(self.directory)) not in self.locked:
            with contextlib.ExitStack() as closing:
                closing.enter_context(_directory.lock("recorded", self.directory))
                _disk.remove_drafts(self.directory)
                self.locked[place] = closing.pop_all()
        if not os.path.lexists(self.directory / _format.MANIFEST):
            return None
        before = _format.read_manifest("recorded", self.directory)
        if self.settings not in (None, before["settings"].get("sampler")):
            self._refuse("draws of another sampler")
        return before

    def _refuse(self, what: str) -> NoReturn:
        rule = "new, or hold draws of the same fit"
        _check.fail("recorded", "directory", rule, f"{self.directory} with {what}", REPEAT)

    def result(self) -> Snapshots | StoredSnapshots:
        """Return the draws of the last fit that has any."""
        with self.lock:
            if self.failure is not None:
                raise self.failure
            calls, self.num_read = len(self.fits) - self.num_read, len(self.fits)
            again = f"`init` was called {calls} times" if calls > MOST_CALLS else ""
            fits = [fit for fit in self.fits.values() if fit.files or fit.draws]
            if not fits:
                first = self.num_warmup + self.thin
                wrong = f"nothing is recorded yet. The first draw is step {first}. {again}"
                raise ValueError(f"`draws`: {wrong}")
            draws = self._load(fits[-1])
        if np.any(draws.trace["is_altered"]):
            raise ValueError(
                "`draws`: the loop changed the sampler's updates, so the recorded points are not"
                " posterior draws."
            )
        if again:
            warn(f"`draws`: {again}, and these are the draws after the last call.")
        if self.is_blind:
            warn(
                "`draws`: the loop does not pass `params` to `update`. If it changes the updates"
                " before it adds them, these are not posterior draws, and no check detects it."
            )
        per_tick = self.thin * _settings.gradients_per_step(draws.settings)
        if int(np.max(draws.trace["num_gradients"])) + per_tick >= _check.LARGEST_WHOLE:
            warn(
                f"`draws`: recording ends at call {_check.LARGEST_WHOLE} of `update`, the last that"
                " is counted. To go on, call `init` with the last draw."
            )
        return draws

    def _load(self, fit: _Fit) -> Snapshots | StoredSnapshots:
        if self.directory is not None:
            if closing := self.locked.pop(os.path.realpath(self.directory), None):
                closing.close()
            like = None if fit.start is None else jax.tree.map(_row(0), fit.start)
            return load_snapshots(self.directory, like=like)
        number = max(map(len, fit.draws.values()))
        whole = [_stacked(x) for _, x in sorted(fit.draws.items()) if len(x) == number]
        trace, params = jax.tree.map(lambda *x: np.stack(x, axis=1), *whole)
        start = fit.start
        if start is not None:
            start = jax.tree.map(lambda x, y: np.broadcast_to(x, y[:, 0].shape), start, params)
        return Snapshots(params, trace, self.settings, start)


def _row(number: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: x[number]


def _stacked(chains: dict[int, Tree]) -> Tree:
    """Stack statistics and parameters of all chains, `[chain, ...]`."""
    return jax.tree.map(lambda *x: np.stack(x), *(chains[number] for number in sorted(chains)))


def _are_same(first: Tree, second: Tree) -> bool:
    """Return whether two trees of arrays have the same bits."""
    leaves = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in leaves)
