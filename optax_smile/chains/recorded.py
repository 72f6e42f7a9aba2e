"""Draws from a loop that hides its optimizer's state, such as the `fit()` of another library."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.custom_batching import custom_vmap
from jax.experimental import io_callback

from optax_smile import _check, _disk, _settings, _tree, state
from optax_smile._types import Options, Tree
from optax_smile._warn import warn
from optax_smile.chains import _directory
from optax_smile.draws import _format
from optax_smile.draws.snapshots import Snapshots, StoredSnapshots, load_snapshots

UNCHECKED = (
    "`draws`: the loop does not pass `params` to `update`. If it changes the updates before it adds"
    " them, for example by a clip, these are not posterior draws, and no check detects it."
)
# Calls of `init` before one of `draws` without a warning; some loops make a second one.
MOST_CALLS = 2
SAME_FIT = "new, or hold draws of the same fit"
REPEAT = (
    "A loop that goes back to an earlier state must repeat its draws to the bit, with the same"
    " data, seeds and program. For another fit, choose a new directory or call `init`."
)
# Arguments of the samplers that have steps without draws.
SKIPPING = {"exploration", "adapt_steps"}
# What keeps the directories locked that this process writes to, and who wrote last.
_CLAIMED: dict[str, tuple[contextlib.ExitStack, _Fit | None]] = {}
# Share of the draws at which the energy may still fall without a warning.
MOST_FALLING = 0.25


class RecordedState(NamedTuple):
    """State of a recorded sampler.

    Attributes:
        sampler: state of the sampler.
        fit: number of the call of `init`, from 1; int32.
        chain: number of the chain among those of the call, int32.
    """

    sampler: optax.OptState
    fit: jax.Array
    chain: jax.Array


class RecordedSampler(optax.GradientTransformationExtraArgs):
    """A sampler that sends its draws to the host; made by `recorded`.

    Use it where a loop takes an Optax optimizer, and call `draws()` after the loop.
    """

    @_check.arguments("draws", fit=_check.Whole(1) | None)
    def draws(self, fit: int | None = None) -> Snapshots | StoredSnapshots:
        """Wait for all draws and return them.

        Args:
            fit: number of the call of `init` that the draws belong to, >= 1; None: the last one
                with draws.

        Returns:
            `Snapshots`, as `sample` returns them; with a `directory`, `StoredSnapshots`.

        Raises:
            ValueError: no draws were recorded, the chains took different numbers of steps, or the
                loop did not add the updates unchanged.
            OSError: a draw could not be written.

        Warns:
            UserWarning: recording ended at call 2**31 - 1; `init` was called more than twice since
                `draws` was, such as in every epoch; more than a quarter of the draws were taken
                while the energy was still decreasing; some chains are copies of others; the loop
                does not pass `params` to `update`, so that changes of the updates are not detected.
        """
        jax.effects_barrier()
        return vars(self.init)["recorder"].draws(fit)


@_check.arguments(
    sampler=_check.TRANSFORMATION,
    num_warmup=_check.Whole(0),
    thin=_check.Whole(1),
    directory=_check.PathLike() | None,
    max_draws=_check.Whole(1) | None,
)
def recorded(
    sampler: optax.GradientTransformation,
    *,
    num_warmup: int,
    thin: int = 1,
    directory: str | os.PathLike[str] | None = None,
    max_draws: int | None = None,
) -> RecordedSampler:
    """Record the draws of a sampler in a loop that does not return the optimizer's state.

    Every `thin` steps the sampler sends a draw to the host, from inside `jit`, `scan` and `vmap`
    over chains. After the loop, `draws()` returns them:

        tx = optax_smile.recorded(
            optax_smile.psmile(num_data=n, key=0, track_params=True), num_warmup=1_000, thin=50
        )
        fit(model, data, optimizer=tx)
        draws = tx.draws()

    With `track_params=True` the loop may call `update` without parameters. The sampler then cannot
    detect whether the loop adds the updates unchanged, and `draws()` warns of this.

    Args:
        sampler: sampler, alone, last in an `optax.chain`, or in a wrapper like `optax.MultiSteps`.
        num_warmup: steps without draws, >= 0. The first draw is step num_warmup + thin.
        thin: steps between two draws, >= 1.
        directory: new folder for the draws. `load_snapshots` can read it while the loop runs. If a
            loop continues from its own checkpoint, or is started again, pass the folder of that
            fit. Stored draws are never replaced: one that the loop makes again must be the same to
            the bit. From `init` to `draws()` no other process can record there. None: host memory.
        max_draws: stop recording after this many draws of each chain, >= 1; None: no limit.

    Returns:
        An Optax transformation with the method `draws`.

    Raises:
        ValueError: an argument is out of range. From `init`: the transformation has no sampler, or
            `init` is called inside `shard_map` (use `sample` with a mesh), or the folder is in use
            or of another sampler. From `draws()`: the folder holds draws of another fit, or a loop
            that went back to an earlier state made other draws. In the loop, JAX raises a
            `JaxRuntimeError` instead.

    Cost: one copy of the parameters to the host per draw. Each step takes about .01 ms more inside
    `scan`, and about 1.5 ms more (on a CPU) if Python calls a compiled function for each step,
    since JAX starts programs with callbacks in Python. Store `last_accepted` in such a loop.

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
    given = dict(locals())  # The arguments.
    folder = None if directory is None else Path(directory).absolute()
    recorder = _Recorder(num_warmup, thin, folder, max_draws)
    inner = optax.with_extra_args_support(sampler)

    def init(params: optax.Params) -> RecordedState:
        begun = inner.init(params)
        state.find(begun, "recorded", "sampler")
        if jax.sharding.get_abstract_mesh().manual_axes:
            raise ValueError(
                "`recorded`: `init` was called inside `shard_map`, where draws cannot be recorded."
                " Use `sample`, which takes a mesh."
            )
        with jax.ensure_compile_time_eval():
            recorder.settings = _settings.of(sampler, jax.eval_shape(lambda x: x, params))
            recorder.skips = bool(SKIPPING & {*(recorder.settings or ())})
        recorder.claim()
        return RecordedState(begun, *recorder.number(params))

    def update(updates, before, params=None, **others) -> tuple[optax.Updates, RecordedState]:
        if not isinstance(before, RecordedState):
            rule = "what `init` or `update` of the recorded sampler returned"
            _check.fail("recorded", "state", rule, _check.show(before))
        recorder.is_blind |= params is None
        updates, after = inner.update(updates, before.sampler, params, **others)
        after = RecordedState(after, before.fit, before.chain)
        recorder.hand_over(after, None if params is None else optax.apply_updates(params, updates))
        return updates, after

    # JAX and `copy` rebuild named tuples from `init` and `update`.
    arguments = given | {"directory": None if directory is None else os.fspath(directory)}
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
    """What the host keeps for one call of `init`.

    Args:
        start: parameters `[chain, ...]`; None if the state comes from another process.
        num_chains: smallest possible number of chains.
    """

    def __init__(self, start: Tree, num_chains: int):
        self.first, self.num_chains = start, num_chains
        self.files: _format.DrawFiles | None = None
        # On disk: files of the draws by step, description and values of the start's leaves.
        self.stored: dict[int, list[_format.Block]] = {}
        self.leaves: list[_format.Leaf] = []
        self.begun: Callable[[], list[np.ndarray]] = list
        # Statistics and parameters by number of the draw and by chain.
        self.draws: dict[int, dict[int, Tree]] = {}

    @property
    def start(self) -> Tree:
        """Parameters `[chain, ...]` before the first step; None if unknown."""
        return jax.tree.map(
            lambda x: np.broadcast_to(x, (self.num_chains, *x.shape[1:])), self.first
        )

    def numbers(self) -> list[int]:
        """Return the numbers of the draws that all chains have made."""
        return sorted(x for x, chains in self.draws.items() if len(chains) == self.num_chains)

    def stacked(self, number: int) -> Tree:
        """Return statistics and parameters of a draw, `[chain, ...]`."""
        chains = [self.draws[number][chain] for chain in range(self.num_chains)]
        return jax.tree.map(lambda *x: np.stack(x), *chains)


class _Recorder:
    """Counts draws on the device, and keeps them on the host.

    Callbacks run in threads of JAX, where a call of JAX may wait forever. They use NumPy only.
    """

    # Of all recorders, which may write to the same folder.
    lock = threading.Lock()

    def __init__(self, num_warmup: int, thin: int, directory: Path | None, max_draws: int | None):
        self.num_warmup, self.thin, self.max_draws = num_warmup, thin, max_draws
        self.directory = directory
        if directory is not None:
            _disk.import_safetensors()
        self.fits: dict[int, _Fit] = {}
        self.num_read = 0  # Fits at the last call of `draws`.
        self.failure: BaseException | None = None
        self.settings: Options | None = None
        self.is_blind = self.skips = False
        # Compiled once for all eager calls of `update`.
        self.number = jax.jit(_on_host(self._number))
        self.hand_over = jax.jit(_on_host(self._hand_over))

    def _number(self, depth: int, params: Tree) -> tuple[jax.Array, jax.Array]:
        """Ask the host for the number of a fit, and number its chains."""
        axes = jnp.shape(jax.tree.leaves(params)[0])[:depth]
        like = jax.ShapeDtypeStruct((), jnp.int32)
        fit = io_callback(self._begin, like, _flatten(depth, params))
        chains = jnp.arange(math.prod(axes), dtype=jnp.int32)
        return jnp.full(axes, fit, jnp.int32), chains.reshape(axes)

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
        if self.max_draws is not None:
            is_tick &= count <= self.max_draws

        def send():
            draw = jax.vmap(state.last_accepted)(after.sampler, params)
            place = is_tick, after.fit, after.chain, count - 1
            io_callback(self._put, None, place, {**stats._asdict(), "step": step}, draw)

        jax.lax.cond(jnp.any(is_tick), send, lambda: None)
        return ()

    def _begin(self, params: Tree) -> np.ndarray:
        start = jax.tree.map(np.array, params)
        with self.lock:
            number = len(self.fits) + 1
            self.fits[number] = _Fit(start, len(jax.tree.leaves(start)[0]))
        return np.asarray(number, np.int32)

    def _put(self, place: Tree, stats: Tree, draw: Tree):
        place, stats, draw = jax.tree.map(np.array, (place, stats, draw))
        with self.lock:
            if self.failure is not None:
                return
            try:
                self._keep(place, (stats, draw))
            except BaseException as error:
                self.failure = error
                raise

    def _keep(self, place: Tree, of_chains: Tree):
        is_tick, fits, chains, numbers = place
        if len(np.unique(np.stack([fits, chains]), axis=1).T) < len(fits):
            # One call of `init` began all chains.
            chains = np.arange(len(fits))
        for row in np.flatnonzero(is_tick):
            number, chain = int(numbers[row]), int(chains[row])
            fit = self.fits.setdefault(int(fits[row]), _Fit(None, len(fits)))
            fit.num_chains = max(fit.num_chains, chain + 1, *chains[fits == fits[row]] + 1)
            made = jax.tree.map(lambda x, row=row: x[row], of_chains)
            kept = fit.draws.setdefault(number, {}).setdefault(chain, made)
            # A loop that restored an earlier state makes draws again.
            if not _are_same(kept[1], made[1]):
                rule = "that of a loop that repeats its draws, or of a new call of `init`"
                _check.fail("recorded", "state", rule, f"one with another draw {number}", REPEAT)
            if self.directory is not None and len(fit.draws[number]) == fit.num_chains:
                self._write(fit, number)

    def _write(self, fit: _Fit, number: int):
        """Write a draw while the device waits: it is on disk before a loop can checkpoint."""
        stats, params = fit.stacked(number)
        with _check.called("recorded", "load_snapshots"):
            files, step = self._open(fit, params), int(stats.pop("step")[0])
        last = max(fit.stored, default=None)
        if step in fit.stored:
            found = _format.read_chains(fit.stored[step], fit.leaves, fit.num_chains, fit.begun)
            if not _are_same(found, jax.tree.leaves(params)):
                self._refuse(f"another draw at step {step}")
        # Some samplers have steps without draws.
        elif last in (None, step - self.thin) or last < step and self.skips:
            fit.stored[step] = files.write(len(fit.stored), step, params, stats)
        else:
            self._refuse(f"the draws of another fit, up to step {last}")
        del fit.draws[number]

    def _refuse(self, what: str) -> NoReturn:
        _check.fail("recorded", "directory", SAME_FIT, f"{self.directory} with {what}", REPEAT)

    def claim(self):
        """Lock the directory until `draws` is called, and require that it is of this sampler."""
        if self.directory is None:
            return
        if (place := os.path.realpath(self.directory)) not in _CLAIMED:
            closing = contextlib.ExitStack()
            closing.enter_context(_directory.lock("recorded", self.directory))
            _CLAIMED[place] = closing, None
        if self.settings is not None and os.path.lexists(self.directory / _format.MANIFEST):
            before = _format.read_manifest("recorded", self.directory)["settings"]
            if before.get("sampler") != json.loads(json.dumps(self.settings)):
                self._refuse("draws of another sampler")

    def _open(self, fit: _Fit, params: Tree) -> _format.DrawFiles:
        """Create a folder, or continue in that of the same fit."""
        assert self.directory is not None
        place = os.path.realpath(self.directory)
        if fit.files and _CLAIMED.get(place, (None, None))[1] is fit:
            return fit.files
        self.claim()
        start = params if fit.first is None else fit.start
        settings = {"num_warmup": self.num_warmup, "thin": self.thin, "sampler": self.settings}
        manifest = _format.manifest_of(start, None, settings)
        fit.leaves = _format.leaves_of(start)
        is_new = not os.path.lexists(self.directory / _format.MANIFEST)
        if is_new and _format.has_draws(self.directory):
            self._refuse(f"draws and no {_format.MANIFEST}")
        if not is_new:
            before = _format.read_manifest("recorded", self.directory)
            if self.settings is None:  # `init` was not called in this process.
                manifest["settings"]["sampler"] = before["settings"].get("sampler")
            if before | {"versions": None} != manifest | {"versions": None}:
                self._refuse("draws of another sampler or model")
        _disk.remove_drafts(self.directory)
        fit.files = _format.DrawFiles(self.directory, start, resumed=not is_new)
        if is_new:
            # After the start, so that a kill between them leaves no folder that cannot be used.
            _format.write_manifest(self.directory, manifest)
        begun = _format.read_start(self.directory, fit.leaves, fit.num_chains)
        if fit.first is not None and not _are_same(jax.tree.leaves(start), begun):
            self._refuse("draws of another start")
        fit.begun = lambda: begun
        draws = _format.find_draws(self.directory, manifest)
        fit.stored = {_format.read_header(blocks[0])["step"]: blocks for blocks in draws}
        _CLAIMED[place] = _CLAIMED[place][0], fit
        return fit.files

    def draws(self, number: int | None) -> Snapshots | StoredSnapshots:
        """Return what was recorded."""
        with self.lock:
            if self.failure is not None:
                raise self.failure
            begun = [x for x, fit in self.fits.items() if fit.files or fit.numbers()]
            calls, self.num_read = len(self.fits) - self.num_read, len(self.fits)
            again = f"`init` was called {calls} times" * (calls > MOST_CALLS)
            if not begun:
                first = self.num_warmup + self.thin
                raise ValueError(
                    f"`draws`: nothing is recorded yet. The first draw is step {first}."
                    + f" {again}: call it once, before the loop." * bool(again)
                )
            if number not in (None, *begun):
                rule = f"None, or the number of a call of `init` that has draws: one of {begun}"
                _check.fail("draws", "fit", rule, number)
            fit = self.fits[number or begun[-1]]
            if fit.files:
                if place := _CLAIMED.pop(os.path.realpath(fit.files.directory), None):
                    place[0].close()
                like = None if fit.first is None else jax.tree.map(lambda x: x[0], fit.first)
                draws = load_snapshots(fit.files.directory, like=like)
            else:
                stacked = [fit.stacked(number) for number in fit.numbers()]
                trace, params = jax.tree.map(lambda *x: np.stack(x, axis=1), *stacked)
                draws = Snapshots(params, trace, self.settings, fit.start)
        if np.any(draws.trace["is_altered"]):
            raise ValueError(
                "`draws`: the loop changed the sampler's updates, so the recorded points are not"
                " posterior draws."
            )
        if again and number is None:
            warn(
                f"`draws`: {again}, and these are the draws after the last call. Call it once,"
                " before the loop. For the draws of another call, pass `fit`."
            )
        if self.is_blind:
            warn(UNCHECKED)
        for doubt in _doubts(draws, self.thin):
            warn(f"`draws`: {doubt}")
        return draws


def _doubts(draws: Snapshots | StoredSnapshots, thin: int) -> Iterator[str]:
    """Say why the draws may not be a sample of the posterior."""
    per_tick = thin * _settings.gradients_per_step(draws.settings)
    if int(np.max(draws.trace["num_gradients"])) + per_tick >= _check.LARGEST_WHOLE:
        yield (
            f"recording ends at call {_check.LARGEST_WHOLE} of `update`, the last that is counted."
            " To go on, call `init` with the last draw."
        )
    falling = np.mean(draws.trace["on_its_way"])
    if falling > MOST_FALLING:
        yield (
            f"{falling:.0%} of the draws were taken while the energy was still decreasing. Raise"
            " `num_warmup`, or start from trained weights if the loop did not."
        )
    last = draws[-draws.num_chains :]
    alike = _tree.first_alike(jax.tree.map(lambda *x: np.stack(x), *last))
    copies = [chain for chain, first in enumerate(alike) if first != chain]
    if copies:
        yield (
            f"chains {copies} are copies of earlier ones. Give each chain its own start or key, as"
            " `optax_smile.parallel.init(sampler, params, key=...)` does."
        )


def _are_same(first: Tree, second: Tree) -> bool:
    """Return whether two trees of arrays have the same bits."""
    leaves = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in leaves)
