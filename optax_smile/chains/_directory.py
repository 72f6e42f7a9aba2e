"""Storage of a run's draws and checkpoints, in memory or in a directory."""

import contextlib
import json
import os
import re
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from optax_smile import _check, _disk, _on_host, _paths
from optax_smile._disk import Json
from optax_smile._types import Options
from optax_smile._version import __version__
from optax_smile._warn import warn
from optax_smile.draws import _format
from optax_smile.draws.snapshots import Snapshots, StoredSnapshots, load_snapshots
from optax_smile.state import STATE_FORMAT

KEPT = 2  # Checkpoints: if the newest is damaged, the previous one is used.
FORMATS = [_format.FORMAT, STATE_FORMAT]  # Formats of the files, and of the sampler states in them.
# Temporary files of killed runs.
DRAFT = re.compile(r"\.(draw-|start\.|checkpoint-|manifest\.).*(safetensors|json)\.\d+")
# Error for a checkpoint that cannot be read.
_reading = partial(
    _disk.naming,
    what="checkpoint",
    remedy="If it is not damaged, the model or the sampler has changed. Remove a damaged"
    " checkpoint: the next call resumes from the one before. The draws stay readable.",
)


class MemoryRun:
    """Keeps the draws of a run in host memory, from a `start` `[chain, ...]` on the host."""

    def __init__(self, start: object, settings: Options | None):
        self.start, self.settings = start, settings
        self.begun: Json | None = None
        self.draws: list[Any] = []
        self.trace: list[Mapping[str, np.ndarray]] = []

    def begin(self, num_warmup: int, thin: int):
        """Record at which steps the draws are."""
        self.begun = {"num_warmup": num_warmup, "thin": thin}

    def put(self, number: int, step: int, stats: Mapping[str, np.ndarray], draw: object | None):
        """Keep the statistics of a tick and, if it is not None, the draw."""
        self.trace.append(stats)
        if draw is not None:
            self.draws.append(_on_host.local(draw))

    def is_due(self) -> bool:
        """Return False: there are no checkpoints."""
        return False

    def result(self) -> Snapshots:
        """Return all draws `[chain, draw, ...]` and the trace `[chain, tick]`."""
        rows = self.draws, self.trace
        params, trace = (jax.tree.map(lambda *x: np.stack(x, axis=1), *part) for part in rows)
        return Snapshots(params, trace, self.settings, self.start)


class Checkpoints:
    """The newest checkpoints of a run; each process writes its shards to one file."""

    def __init__(self, directory: Path, minutes: float, of: str = "sample"):
        self.directory, self.minutes, self.of = directory.absolute(), minutes, of
        self.saved_at = time.monotonic()

    def newest(self) -> int | None:
        """Return the number of the newest checkpoint; None without one."""
        return max(_format.find_checkpoints(self.directory), default=None)

    def is_due(self) -> bool:
        """Return whether it is time for a checkpoint."""
        return time.monotonic() - self.saved_at >= 60 * self.minutes

    def save(self, number: int, carry: object, place: Json):
        """Write arrays and JSON, unless there is a checkpoint of this number > 0."""
        if number == 0 or self.newest() != number:
            arrays: dict[str, np.ndarray] = {}
            for name, leaf in named(carry).items():
                for shard in leaf.addressable_shards:
                    first = ",".join(str(part.start or 0) for part in shard.index)
                    if shard.replica_id == 0:
                        arrays[f"{name}@{first}"] = np.asarray(shard.data)
            part = f"part-{jax.process_index():05d}-of-{jax.process_count():05d}"
            file = self.directory / f"checkpoint-{number:010d}.{part}.safetensors"
            header = {"file": file.name, "of": self.of, "place": place}
            header |= {"formats": FORMATS, "version": __version__}
            _disk.write(file, _disk.pack(header, arrays))
            if jax.process_index() == 0:
                self._remove_old(number)
        _wait_for_all()
        self.saved_at = time.monotonic()

    def _remove_old(self, number: int):
        """Remove old checkpoints, and files of this one with another number of parts."""
        oldest = min(sorted(_format.find_checkpoints(self.directory))[-KEPT:], default=0)
        for file in self.directory.glob("checkpoint-*"):
            if match := _format.CHECKPOINT.fullmatch(file.name):
                is_other = int(match[1]) == number and int(match[3]) != jax.process_count()
                if int(match[1]) < oldest or is_other:
                    file.unlink(missing_ok=True)

    def place(self) -> Json | None:
        """Return the JSON of the newest checkpoint; it must be of this function and format."""
        if (newest := self.newest()) is None:
            return None
        file = _format.find_checkpoints(self.directory)[newest][0]
        with _reading(file):
            header, _ = _disk.read(file, only_header=True)
        if header["formats"] != FORMATS:
            rule = f"a directory with checkpoints of the formats {FORMATS}"
            got = f"{header['formats']} in {file}, written by optax_smile {header['version']}"
            advice = "Continue with that version, or choose another directory."
            _check.fail("directory", rule, got, advice)
        if header["of"] != self.of:
            rule = f"new, or that of a run of `{self.of}`"
            got = f"{self.directory}, which holds a run of `{header['of']}`"
            _check.fail("directory", rule, got, "Choose another.")
        return header["place"]

    def restore(self, like: object) -> tuple[Any, Json] | None:
        """Read the newest checkpoint with the shapes and shardings of `like`; None without one."""
        if (place := self.place()) is None:
            return None
        leaves = named(like)
        whole = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in leaves.items()}
        missing = {name: array.size for name, array in whole.items()}
        files = [*_format.find_checkpoints(self.directory).values()][-1]
        for file in files:
            with _reading(file):
                for entry, array in _disk.read(file)[1].items():
                    name, _, first = entry.rpartition("@")
                    if name not in whole:
                        raise ValueError(f"its array {name!r} is unknown")
                    starts = zip(map(int, filter(None, first.split(","))), array.shape, strict=True)
                    target = whole[name][tuple(slice(at, at + size) for at, size in starts)]
                    if (target.shape, target.dtype) != (array.shape, array.dtype):
                        raise ValueError(f"its array {name!r} is {array.dtype} {array.shape}")
                    target[...] = array
                    missing[name] -= array.size
                if file == files[-1] and any(missing.values()):
                    raise ValueError(f"it lacks {next(filter(missing.get, missing))}")

        def placed(leaf: jax.Array, raw: jax.Array, array: np.ndarray) -> jax.Array:
            made = jax.make_array_from_callback(raw.shape, raw.sharding, lambda at: array[at])
            if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                return made
            return jax.random.wrap_key_data(made, impl=jax.random.key_impl(leaf))

        made = map(placed, jax.tree.leaves(like), leaves.values(), whole.values())
        return jax.tree.unflatten(jax.tree.structure(like), list(made)), place


class DirectoryRun(Checkpoints):
    """Keeps draws, manifest and checkpoints in a directory that is locked, until `closing`.

    A loop that hides its state, `of="recorded"`, keeps checkpoints of its own.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        start: object,
        settings: Options,
        dtype: str | None,
        minutes: float,
        closing: contextlib.ExitStack,
        of: str = "sample",
    ):
        super().__init__(Path(directory), minutes, of)
        self.like = _on_host.shapes_of_one(start)
        self.manifest = _format.manifest_of(start, dtype, settings)
        self.files = _format.DrawFiles(self.directory, _format.leaves_of(start), dtype)
        closing.callback(self.files.close)
        self.warned = set[str]()
        self.is_resumed = self._find()
        # With several processes, some would have to read the chains of others.
        if self.is_resumed and of == "sample" and jax.process_count() == 1:
            names, leaves = (leaf.name for leaf in self.files.leaves), jax.tree.leaves(start)
            given = map(self.files.rounded, names, map(np.asarray, leaves))
            same = partial(np.array_equal, equal_nan=True)
            if not all(map(same, given, jax.tree.leaves(self.result().start))):
                ignored = "Your `params` differ from its start and are ignored."
                warn(f"`sample`: the run in {directory} continues from its checkpoint. {ignored}")
        # No process writes before all have checked the directory.
        _wait_for_all()
        _format.write_manifest(self.directory, self.manifest)
        if not self.is_resumed:
            self.files.write(_format.START, 0, start, {})

    def _find(self) -> bool:
        """Return whether there is a run to resume, and require that it is this one."""
        has_draws, newest = _format.has_draws(self.directory), self.newest()
        self.place()
        if newest is None and has_draws and self.of == "sample":
            rule = "a directory with a checkpoint to resume from"
            got = f"{self.directory} with a run but no checkpoint"
            _check.fail("directory", rule, got, "Choose another, or remove it.")
        has_manifest = os.path.lexists(self.directory / _format.MANIFEST)
        if newest is None and not has_draws and not has_manifest:
            return False
        before = _format.read_manifest(self.directory)
        if not newest and not has_draws:
            return False
        names = ("num_chains", "leaves")  # Versions may differ.
        theirs, mine = (
            {"params": {x: of[x] for x in names}, "dtype": of["stored_dtype"], **of["settings"]}
            for of in (before, self.manifest)
        )
        check_settings(self.directory, theirs, mine)
        # Also the steps of its draws.
        self.manifest["settings"] = before["settings"] | self.manifest["settings"]
        return True

    @property
    def begun(self) -> Json | None:
        """Return `num_warmup` and `thin` once draws have begun."""
        return self.manifest["settings"] if "thin" in self.manifest["settings"] else None

    def begin(self, num_warmup: int, thin: int):
        """Write to the manifest at which steps the draws are."""
        self.manifest["settings"] |= {"num_warmup": num_warmup, "thin": thin}
        _format.write_manifest(self.directory, self.manifest)

    def put(self, number: int, step: int, stats: Mapping[str, np.ndarray], draw: object | None):
        """Pass a draw and its statistics to the writer thread."""
        if draw is not None:
            self.files.put(number, step, draw, stats)

    def restore(self, like: object) -> tuple[Any, Json] | None:
        """Read the checkpoint of the run to resume; None for a new run."""
        return super().restore(like) if self.is_resumed else None

    def checkpoint(self, carry: object, place: Json):
        """Write a checkpoint, after the draws before it; `place` has `num_gradients`."""
        self.files.flush()
        if wide := sorted(self.files.wide - self.warned):
            self.warned.update(wide)
            had = f"had numbers that are too large or too small for {self.files.dtype}"
            warn(f"`sample`: {', '.join(wide)} {had}; these draws were stored in full precision.")
        self.save(place["num_gradients"], carry, place)

    def result(self) -> StoredSnapshots:
        """Load the draws."""
        with _check.called(_check.function_name(), "load_snapshots"):
            return load_snapshots(self.directory, like=self.like)


def _wait_for_all():
    """Wait for the other processes."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("optax_smile directory")


def how_to_resume(directory: object) -> str:
    """Say how to resume a call that was stopped; `directory` may be None."""
    if directory is None:
        return "To be able to resume, pass a `directory`."
    return f"A checkpoint is in {directory}: repeat the call to resume."


def stopped(signal: str, made: str, directory: object) -> str:
    """Say that a signal stopped a call, what had been made, and how to resume."""
    how = how_to_resume(directory)
    return f"`{_check.function_name()}` was stopped by {signal} after {made}. {how}"


def named(tree: object) -> dict[str, jax.Array]:
    """Name the leaves of a tree, with keys converted to integers."""

    def raw(leaf):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(leaf) if is_key else leaf

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {_paths.name(map(_paths.entry, path), "."): raw(leaf) for path, leaf in leaves}


def lock(directory: Path) -> contextlib.ExitStack:
    """Lock a directory until the result is closed, and remove temporary files of killed runs."""
    _disk.import_safetensors()
    with contextlib.ExitStack() as closing:
        path = directory / f".lock-{jax.process_index()}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            # Do not write to the file: it may belong to another program.
            file = closing.enter_context(_disk.open_file(path, os.O_RDWR | os.O_CREAT))
        except OSError as error:
            got = f"{directory} ({error.strerror or f'{path.name}: {error}'})"
            advice = "`load_snapshots` reads the draws of a directory that is read-only."
            _check.fail("directory", "a directory that can be written", got, advice)
        with contextlib.suppress(ImportError):
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                got = f"{directory}, which another run is using"
                _check.fail("directory", "used by no other live run", got)
            # Unlock explicitly, since a forked process, such as a loader's, would keep the lock.
            closing.callback(fcntl.flock, file, fcntl.LOCK_UN)
        for draft in directory.glob(".*"):
            if jax.process_index() == 0 and DRAFT.fullmatch(draft.name):
                draft.unlink(missing_ok=True)
        return closing.pop_all()


def describe_batches(batches: object) -> Json:
    """Describe repeatable batches: their number, and the structure and shapes of the first."""
    if not isinstance(batches, (list, tuple)) or not batches:
        return {}
    first = _on_host.as_numeric("batches", batches[0])
    shapes = jax.tree.map(lambda x: f"{getattr(x, 'dtype', 'number')}{[*np.shape(x)]}", first)
    return {"num_batches": len(batches), "shapes": str(shapes)}


def check_settings(directory: Path, before: Json, now: Json):
    """Require the same settings as the run in a directory; functions are compared by name."""
    theirs = _flat(before)
    for name, mine in _flat(json.loads(json.dumps(now))).items():
        argument, _, inside = name.partition(".")
        # Batches may be a list in one call and an iterator in another.
        if mine != theirs.get(name) and (argument != "batches" or name in theirs):
            rule = f"one with {inside} = " * bool(inside) + repr(theirs.get(name))
            rule = f"{rule}, as in the run in {directory}"
            _check.fail(argument, rule, repr(mine), "Or choose another directory.")


def _flat(tree: object, prefix: str = "") -> dict[str, object]:
    """Flatten nested dicts, with names for their entries."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    entries = [_flat(value, f"{prefix}.{name}".lstrip(".")) for name, value in tree.items()]
    return {name: value for entry in entries for name, value in entry.items()}
