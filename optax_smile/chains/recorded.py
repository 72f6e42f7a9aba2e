"""Draws from a loop that hides its optimizer's state, such as the `fit()` of another library."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.custom_batching import custom_vmap
from jax.experimental import io_callback
from jax.sharding import AxisType

from optax_smile import _check, _paths, _settings, state
from optax_smile._types import Options
from optax_smile._warn import warn
from optax_smile.chains import _directory
from optax_smile.draws import _format
from optax_smile.draws.snapshots import Snapshots, StoredSnapshots, load_snapshots
from optax_smile.mistakes import gradients
from optax_smile.mistakes.loss import warn_of

REPEAT = "Use the same data, seeds and program. For another fit, choose a new directory."
SKIPPING = {"exploration", "adapt_steps"}  # Arguments of samplers with steps without draws.


class RecordedState(NamedTuple):
    """State of a sampler, and the number of the call of `init`, int32 from 1."""

    sampler: optax.OptState
    fit: jax.Array


class RecordedSampler(optax.GradientTransformationExtraArgs):
    """A sampler that sends its draws to the host, made by `recorded`; use it as an optimizer."""

    def draws(self) -> Snapshots | StoredSnapshots:
        """Return the draws so far, see `recorded`, once all have arrived."""
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
    Before JAX 0.8 a compiled function that does not return the state sends no draws.

    Args:
        sampler: sampler, alone, last in an `optax.chain`, or in a wrapper like `optax.MultiSteps`.
        num_warmup: steps without draws, >= 0. The first draw is step num_warmup + thin.
        thin: steps between two draws, >= 1.
        directory: folder for the draws, new or of the same fit, which continues from its own
            checkpoint or is started again. A draw that is made again must be the same to the bit.
            The folder is locked from `init` to `draws()`.

    Returns:
        An Optax transformation. Several chains need one `vmap` of its `init`, and take their steps
        together. Its method `draws()` returns the draws since the last `init` that has any, as
        `sample` does. It warns if recording ended at call 2**31 - 1, and if changes of the updates
        could not be detected, as the loop does not pass `params` to `update`.

    Raises:
        ValueError: an argument is out of range. From `init`: there is no sampler, the call is
            inside `shard_map`, or the folder is in use. From `draws()`: there are none, the loop
            changed the updates, the folder is of another fit, or a draw that was made again
            differs; JAX raises the last two in the loop, too.
        OSError: from `draws()` and in the loop: a draw could not be written.

    Example:
        >>> import jax, jax.numpy as jnp, optax, optax_smile
        >>> sampler = optax_smile.sgld(0.1, num_data=1, key=0)
        >>> tx = optax_smile.recorded(sampler, num_warmup=10, thin=5)
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

    @_check.called("recorded")
    def init(params: optax.Params) -> RecordedState:
        begun = inner.init(params)
        state.check_place("sampler", begun, params)
        received = state.find(begun, "sampler").last_received()
        recorder.sampled = _paths.names(params if received is None else received[0])
        if AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types:
            rule, got = "called outside of `shard_map`", "a call inside"
            _check.fail("init", rule, got, "Use `sample`, which takes a mesh.")
        if recorder.directory is not None:
            recorder.lock(recorder.directory)
        return RecordedState(begun, recorder.begin(params))

    @_check.called("recorded")
    def update(updates, before, params=None, **others) -> tuple[optax.Updates, RecordedState]:
        if not isinstance(before, RecordedState):
            rule = "what `init` or `update` of the recorded sampler returned"
            _check.fail("state", rule, _check.show(before))
        if not recorder.settings:
            shapes = jax.eval_shape(lambda x: x, updates if params is None else params)
            with jax.ensure_compile_time_eval():
                recorder.settings = _settings.of(sampler, shapes) or {}
        recorder.is_blind |= params is None
        recorder.leaves = _paths.names(updates)
        are_driven = [jnp.any(x != 0) for x in jax.tree.leaves(updates)]
        updates, after = inner.update(updates, before.sampler, params, **others)
        after = RecordedState(after, before.fit)
        moved = None if params is None else optax.apply_updates(params, updates)
        return updates, after._replace(fit=recorder.send(after, moved, are_driven))

    # JAX and `copy` rebuild named tuples from `init` and `update`.
    vars(init).update(recorder=recorder)
    return RecordedSampler(init, cast(optax.TransformUpdateExtraArgsFn, update))


def _for_all_chains(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Convert a function of arrays `[chain, ...]` to one of a single chain for use under `vmap`.

    `vmap` of a callback calls it once per chain, and at every step even inside a `cond`.
    """

    @custom_vmap
    def of_one(*arguments):
        return function(*jax.tree.map(lambda x: x[None], arguments))[0]

    @of_one.def_vmap
    def of_all(size, is_batched, *arguments):
        def join(x, has_axis):
            return x if has_axis else jnp.broadcast_to(x, (size, *x.shape))

        return function(*jax.tree.map(join, arguments, tuple(is_batched))), True

    # Compiled once for all eager calls of `update`.
    return jax.jit(of_one)


class _Recorder:
    """Sends draws to the host and keeps them.

    Callbacks run in threads of JAX, where calling JAX may deadlock. They use NumPy only.
    """

    # Shared by all recorders, since a lock cannot be copied or pickled.
    threads = threading.Lock()

    def __init__(self, num_warmup: int, thin: int, directory: Path | None):
        self.num_warmup, self.thin = num_warmup, thin
        self.directory = None if directory is None else directory.absolute()
        self.settings: Options = {}
        self.failure: BaseException | None = None
        self.is_blind = False
        self.leaves, self.sampled = list[str](), list[str]()  # Names: all leaves; sampled leaves.
        self.driven, self.num_seen = set[str](), 0  # Leaves with a gradient; number of draws seen.
        self.locked: contextlib.ExitStack | None = None
        self.starts: dict[int, Any] = {}  # Parameters in each call of `init`.
        self.number = 0  # Number of the `init` call that the draws belong to.
        self.draws: dict[int, Any] = {}  # Draws by step, or in a directory their files.
        self.kept: _directory.DirectoryRun | None = None
        self.begin, self.send = _for_all_chains(self._begin), _for_all_chains(self._send)

    def _begin(self, params: optax.Params) -> jax.Array:
        chains = jax.tree.leaves(params)[0].shape[:1]

        def begin(params: optax.Params) -> np.ndarray:
            with self.threads:
                number = max(self.number, *self.starts, 0) + 1
                self.starts[number] = jax.tree.map(np.array, params)
                return np.full(chains, number, np.int32)

        return io_callback(begin, jax.ShapeDtypeStruct(chains, jnp.int32), params)

    def _send(self, after: RecordedState, params: optax.Params, driven: object) -> jax.Array:
        """Send the draws of all chains to the host if this call ends a tick.

        It returns the number of the fit: before JAX 0.8, calls without a result were dropped.
        """
        per_step = state.find(after.sampler).gradients_per_step
        stats = jax.vmap(state.stats)(after.sampler)
        step, part = jnp.divmod(stats.num_gradients, per_step)
        count, rest = jnp.divmod(step - self.num_warmup, self.thin)
        is_tick = (part == 0) & (rest == 0) & (count > 0) & stats.is_draw
        # The counter saturates at its largest number.
        is_tick &= stats.num_gradients < _check.LARGEST_WHOLE

        def send():
            draw = jax.vmap(state.last_accepted)(after.sampler, params)
            ends = {**stats._asdict(), "step": step}
            io_callback(self._receive, None, is_tick, after.fit, ends, draw, driven)

        jax.lax.cond(jnp.any(is_tick), send, lambda: None)
        return after.fit

    # Callbacks run in another thread, where the context of the call is not set.
    @_check.called("recorded")
    def _receive(self, *sent: object):
        with self.threads:
            try:
                if self.failure is None:
                    self._keep(*jax.tree.map(np.array, sent))
            except BaseException as error:
                self.failure = error
                self._unlock()
                raise

    def _keep(self, is_tick: np.ndarray, fits: np.ndarray, stats: Any, params: Any, driven: Any):
        """Keep a draw of all chains; write it to disk before the loop can write a checkpoint."""
        step, num_chains, own = int(stats["step"][0]), len(fits), int(fits[0])
        if np.any(fits != own) or np.any(stats["step"] != step) or own < self.number:
            rule = "that of one call of `init`, the newest, with all chains at the same step"
            got = f"that of the calls {fits.tolist()}, at the steps {stats['step'].tolist()}"
            _check.fail("state", rule, got)
        if not is_tick.all():  # For some chain, this point is not a draw.
            return
        if own > self.number:
            self.number, self.draws, self.kept = own, {}, None
            self.driven, self.num_seen = set(), 0
            self.starts = {x: start for x, start in self.starts.items() if x >= own}
        self.driven |= {*itertools.compress(self.leaves, map(np.any, driven))}
        self.num_seen += 1
        files = None if self.directory is None else self._open(self.directory, params).files
        found, last = self.draws.get(step), max(self.draws, default=step - self.thin)
        if found is not None:
            if files is not None:
                found = None, _format.read_chains(found, files.leaves, num_chains)
            pairs = zip(jax.tree.leaves(found[1]), jax.tree.leaves(params), strict=True)
            is_right = all(x.tobytes() == y.tobytes() for x, y in pairs)
        elif is_right := files is None:
            self.draws[step] = stats, params
        elif is_right := last == step - self.thin or last < step and SKIPPING & {*self.settings}:
            self.draws[step] = files.write(len(self.draws), step, params, stats)
        if not is_right:
            argument, got = ("directory", self.directory) if self.directory else ("state", "one")
            rule = "new, or of a loop that repeats its draws to the bit"
            got = f"{got} with other draws, up to step {last}, at step {step}"
            _check.fail(argument, rule, got, REPEAT)

    def _open(self, directory: Path, params: optax.Params) -> _directory.DirectoryRun:
        """Create the directory, or require that it belongs to this sampler and model."""
        closing = self.lock(directory)
        if self.kept is None:
            settings = {"num_warmup": self.num_warmup, "thin": self.thin, "sampler": self.settings}
            given = self._start(params), settings, None, math.inf, closing, "recorded"
            self.kept = _directory.DirectoryRun(directory, *given)
            stored = self.kept.result().draws
            self.draws = {_format.read_header(blocks[0])["step"]: blocks for blocks in stored}
        return self.kept

    def _start(self, draw: object) -> Any:
        """Return the start of all chains; a draw, if `init` was called in another process."""
        start = self.starts.get(self.number, draw)
        return jax.tree.map(lambda x, y: np.broadcast_to(x, y.shape), start, draw)

    def lock(self, directory: Path) -> contextlib.ExitStack:
        """Lock the directory until `draws`."""
        self.locked = self.locked or _directory.lock(directory)
        return self.locked

    def _unlock(self):
        if self.locked is not None:
            self.locked.close()
        # Another process may write to the directory now, so `kept` must be read again.
        self.locked = self.kept = None

    def result(self) -> Snapshots | StoredSnapshots:
        """Return the draws of the last fit that has any."""
        with self.threads:
            self._unlock()
            if self.failure is not None:
                raise self.failure
            if not self.draws:
                first = f"The first draw is step {self.num_warmup + self.thin}."
                raise ValueError(f"`draws`: nothing is recorded yet. {first}")
            start = self.starts.get(self.number)
            if self.directory is None:
                whole = [draw for _, draw in sorted(self.draws.items())]
                trace, params = jax.tree.map(lambda *x: np.stack(x, axis=1), *whole)
                start = None if start is None else self._start(whole[0][1])
                draws = Snapshots(params, trace, self.settings, start)
            else:
                like = None if start is None else jax.tree.map(lambda x: x[0], start)
                draws = load_snapshots(self.directory, like=like)
        if np.any(draws.trace["is_altered"]):
            raise ValueError("`draws`: the loop changed the updates. These are no posterior draws.")
        resting = [x for x in self.leaves if x in self.sampled and x not in self.driven]
        with _check.called("draws"):
            warn_of([gradients.resting(resting, self.num_seen)])
        if self.is_blind:
            blind = "changes of the updates, which make draws wrong, go unnoticed"
            warn(f"`draws`: the loop does not pass `params` to `update`, so that {blind}.")
        if np.max(draws.trace["num_gradients"]) >= _check.LARGEST_WHOLE - 2 * self.thin:
            ends = f"recording ends at call {_check.LARGEST_WHOLE} of `update`"
            warn(f"`draws`: {ends}. To go on, call `init` with the last draw.")
        return draws
