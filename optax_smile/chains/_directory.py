"""Where a run keeps its draws, and what it needs to resume: in memory or in a directory."""

import contextlib
import json
import logging
import os
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from pathlib import Path

import jax
import numpy as np

from optax_smile import _check, _disk, _tree
from optax_smile._disk import Json
from optax_smile._types import Batch, Options, Tree
from optax_smile._warn import warn
from optax_smile.chains._checks import num_rows
from optax_smile.draws import _format
from optax_smile.draws._format import CHECKPOINTS, SUMS
from optax_smile.draws.snapshots import Snapshots, StoredSnapshots, load_snapshots
from optax_smile.state import STATE_FORMAT, samplers

# Number of checkpoints to keep: if the newest is damaged, the one before it serves.
KEPT = 2
# What Orbax writes into the folder of a checkpoint, among others.
PARTS = {"carry", "place", "_CHECKPOINT_METADATA", "commit_success.txt"}
# Digits of the number of a process.
LONGEST_NUMBER = 20
# Entry of the JSON of a checkpoint.
FORMAT = "state_format"
# Relative differences that another machine may cause, in the loss and in sums over all examples.
LOSS_TOLERANCE, SUM_TOLERANCE = 1e-3, 1e-6
# Parts of the description of data, in words.
WORDS = {
    "tree": "the structure",
    "shapes": "the shapes",
    "num_batches": "the number of batches",
    "examples": "the same examples",
}


class MemoryRun:
    """Keeps the draws of a run in host memory. Such runs are never resumed."""

    def __init__(self, start: Tree, settings: Options | None):
        self.start, self.settings = start, settings
        self.begun: Json | None = None
        self.draws: list[Tree] = []
        self.trace: list[Mapping[str, np.ndarray]] = []

    def begin(self, num_warmup: int, thin: int):
        """Keep where the draws lie."""
        self.begun = {"num_warmup": num_warmup, "thin": thin}

    def restore(self, carry: Tree) -> tuple[Tree, Json] | None:
        """Return None: there is nothing to resume."""

    def put(self, number: int, step: int, stats: Mapping[str, np.ndarray], draw: Tree | None):
        """Keep the statistics of a tick and, if it is not None, the draw."""
        self.trace.append(stats)
        if draw is not None:
            self.draws.append(_tree.local(draw))

    def is_due(self) -> bool:
        """Return False: there are no checkpoints."""
        return False

    def checkpoint(self, carry: Tree, place: Json):
        """Do nothing: there are no checkpoints."""

    def result(self, num_draws: int | None = None) -> Snapshots:
        """Return all draws `[chain, draw, ...]` and the trace `[chain, tick]`."""

        def stack(*leaves):
            return np.stack(leaves, axis=1)

        params, trace = jax.tree.map(stack, *self.draws), jax.tree.map(stack, *self.trace)
        return Snapshots(params, trace, self.settings, self.start)


class DirectoryRun:
    """Locks a directory, and keeps draws, manifest and checkpoints there.

    Raises:
        ValueError: a directory in use, of another run, or with draws but no checkpoint.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        start: Tree,
        carry: Tree,
        settings: Options,
        *,
        dtype: str | None,
        resume: bool,
        minutes: float,
        closing: contextlib.ExitStack,
    ):
        _disk.import_safetensors()
        check_names("sample", "params", start)
        self.directory, self.like = Path(directory).absolute(), _tree.shapes_of_one(start)
        # Before anything is created there.
        check_real("sample", self.directory / CHECKPOINTS)
        if not (self.directory / CHECKPOINTS).exists():
            self._refuse_draws_alone()
        for path, leaf in jax.tree_util.tree_leaves_with_path(start):
            if not _format.fits(leaf, dtype, tiny=0):
                rule = "a precision that holds the start, or None"
                got = f"{dtype!r}, in which {jax.tree_util.keystr(path) or 'it'} is infinite"
                _check.fail("sample", "dtype", rule, got)
        closing.enter_context(lock("sample", self.directory))
        if jax.process_index() == 0:
            _disk.remove_drafts(self.directory)
        # Waits for all processes.
        self.checkpoints = Checkpoints(self.directory, minutes)
        closing.callback(self.checkpoints.close)
        self.manifest = _format.manifest_of(start, dtype, settings)
        self.manifest["whole"] = {}
        before = self._before(carry, resume)
        rounded = _format.rounded(start, dtype)
        self.begun: Json | None = None
        if before is not None:
            self._start(rounded)
            kept = before["settings"]
            if "thin" in kept:
                self.begun = {name: kept[name] for name in ("num_warmup", "thin")}
                self.manifest["settings"] |= self.begun
        if jax.process_index() == 0:
            _format.write_manifest(self.directory, self.manifest)
        files = _format.DrawFiles(self.directory, start, dtype=dtype, resumed=before is not None)
        self.writer, self.warned = _format.SnapshotWriter(files), set[str]()
        closing.callback(self.writer.close)

    def begin(self, num_warmup: int, thin: int):
        """Write where the draws lie."""
        self.begun = {"num_warmup": num_warmup, "thin": thin}
        self.manifest["settings"] |= self.begun
        if jax.process_index() == 0:
            _format.write_manifest(self.directory, self.manifest)

    def _before(self, carry: Tree, resume: bool) -> Json | None:
        """Return the manifest of the run to resume, if there is one."""
        has_draws = _format.has_draws(self.directory)
        if not has_draws and self.checkpoints.newest() == 0:
            self.checkpoints.remove()
        has_checkpoint = self.checkpoints.newest() is not None
        if not resume and (has_draws or has_checkpoint):
            rule = "a directory without draws, since `resume` is False"
            got = f"{self.directory}, which holds a run"
            advice = "Choose another, remove it, or pass resume=True."
            _check.fail("sample", "directory", rule, got, advice)
        if not has_checkpoint:
            self._refuse_draws_alone()
            return None
        self.checkpoints.previous("sample", carry)
        before = _format.read_manifest("sample", self.directory)
        check_settings("sample", self.directory, before, self.manifest)
        return before

    def _refuse_draws_alone(self):
        if _format.has_draws(self.directory):
            rule = "a directory with a checkpoint to resume from, or without draws"
            got = f"{self.directory}, which has draws but no checkpoint"
            _check.fail("sample", "directory", rule, got, "Choose another, or remove it.")

    def _start(self, given: Tree) -> Tree:
        """Return the stored start; warn if another one was passed."""
        stored = self.start
        if jax.process_count() == 1 and not all(
            np.array_equal(mine, theirs, equal_nan=True)
            for mine, theirs in zip(jax.tree.leaves(given), jax.tree.leaves(stored), strict=True)
        ):
            warn(
                f"`sample`: the run in {self.directory} continues from its checkpoint. Your"
                " `params` differ from its start and are ignored."
            )
        return stored

    def restore(self, carry: Tree) -> tuple[Tree, Json] | None:
        """Return carry and place of the newest checkpoint; None without one."""
        return self.checkpoints.restore(carry)

    def put(self, number: int, step: int, stats: Mapping[str, np.ndarray], draw: Tree | None):
        """Pass a draw and its statistics to the thread that writes."""
        if draw is not None:
            self.writer.put(number, step, draw, stats)

    @property
    def start(self) -> Tree:
        """Start of the chains, as stored."""
        return self.result().start

    def is_due(self) -> bool:
        """Return whether it is time for a checkpoint."""
        return self.checkpoints.is_due()

    def checkpoint(self, carry: Tree, place: Json):
        """Write a checkpoint, after the draws before it."""
        self.writer.flush()
        if wide := sorted(self.writer.files.wide - self.warned):
            self.warned.update(wide)
            warn(
                f"`sample`: {', '.join(wide)} had numbers that are too large or too small for"
                f" {self.writer.files.dtype}, and these draws were stored in full precision."
            )
        self.checkpoints.save(place["num_gradients"], carry, place)

    def result(self, num_draws: int | None = None) -> StoredSnapshots:
        """Load the first draws, or all of them."""
        with _check.called("sample", "load_snapshots"):
            snapshots = load_snapshots(self.directory, like=self.like)
        snapshots.draws = snapshots.draws[:num_draws]
        return snapshots


# Checkpoints.


def _import_orbax() -> types.ModuleType:
    with _check.needed("Runs in a directory need Orbax", "storage"):
        import orbax.checkpoint
    return orbax.checkpoint


def state_format(tree: Tree) -> int | None:
    """Return the format of the samplers' states in a tree; None without a sampler."""
    return STATE_FORMAT if samplers(tree) else None


class Checkpoints:
    """The newest states of a run in a directory, each written completely or not at all."""

    def __init__(self, directory: Path, minutes: float, where: str = "sample"):
        self.orbax = _import_orbax()
        self.directory, self.minutes = directory.absolute() / CHECKPOINTS, minutes
        # Orbax deletes numbered folders.
        check_real(where, self.directory)
        for folder in filter(lambda x: x.name.isdecimal(), self.directory.glob("*")):
            check_real(where, folder)
            if (names := {x.name for x in folder.iterdir()}) and not names & PARTS:
                rule = f"a directory whose {CHECKPOINTS} are those of a run"
                _check.fail(where, "directory", rule, f"{folder} with {min(names)}")
        options = self.orbax.CheckpointManagerOptions(
            max_to_keep=KEPT, cleanup_tmp_directories=True, enable_async_checkpointing=False
        )
        self.manager = self.orbax.CheckpointManager(self.directory, options=options)
        self.finished = [n for n in self.manager.all_steps() if self._sums(n).exists()]
        self.saved_at = time.monotonic()

    def _sums(self, number: int) -> Path:
        return self.directory / str(number) / SUMS

    def newest(self) -> int | None:
        """Return the number of the newest checkpoint; None without one."""
        return max(self.finished, default=None)

    def remove(self):
        """Delete the checkpoints of a run that stopped before its first draw."""
        for number in self.manager.all_steps():
            self.manager.delete(number)
        self.finished = []

    def is_due(self) -> bool:
        """Return whether it is time for a checkpoint."""
        return time.monotonic() - self.saved_at >= 60 * self.minutes

    def save(self, number: int, carry: Tree, place: Json):
        """Write arrays and JSON, unless there is a checkpoint of this number."""
        if self.newest() != number:
            # Orbax logs and raises pages of tracebacks; the message has their first line.
            logger = logging.getLogger("absl")
            level = logger.level
            logger.setLevel(logging.CRITICAL)
            try:
                self._save(number, carry, place)
            except Exception as error:
                first = next(iter(str(error).strip().splitlines()), type(error).__name__)
                raise OSError(
                    f"The checkpoint {self.directory / str(number)} could not be written ({first})."
                    " The draws and the checkpoint before it are safe: free disk space and repeat"
                    " the call to resume."
                ) from None
            finally:
                logger.setLevel(level)
            self.finished.append(number)
        self.saved_at = time.monotonic()

    def _save(self, number: int, carry: Tree, place: Json):
        args = self.orbax.args
        for unfinished in set(self.manager.all_steps()) - set(self.finished):
            self.manager.delete(unfinished)
        place = place | {FORMAT: state_format(carry)}
        both = args.Composite(carry=args.StandardSave(named(carry)), place=args.JsonSave(place))
        self.manager.save(number, args=both, force=True)
        if jax.process_index() == 0:
            sums = _disk.sums(self.directory / str(number), SUMS)
            content = {"number": number, "files": sums, "num_draws": place.get("num_kept", 0)}
            _disk.write_json(self._sums(number), content)

    def previous(self, where: str, carry: Tree) -> Json | None:
        """Return the JSON of the newest checkpoint; None without one.

        Raises:
            ValueError: another function than `where` wrote it, or it has another format.
        """
        number = self.newest()
        if number is None:
            return None
        with self._reading(number):
            args = self.orbax.args.Composite(place=self.orbax.args.JsonRestore())
            place = self.manager.restore(number, args=args).place
        writer = "warmstart" if "run" in place else "sample"
        if writer != where:
            got = f"{self.directory.parent}, which holds a run of `{writer}`"
            rule = f"new, or that of a run of `{where}`"
            _check.fail(where, "directory", rule, got, "Choose another.")
        theirs, mine = place.get(FORMAT), state_format(carry)
        if mine not in (None, theirs):
            older = "an older format, without a number" if theirs is None else f"format {theirs}"
            rule = f"a directory with checkpoints of format {mine}"
            advice = (
                "Continue that run with the version of optax_smile that wrote it, or choose another"
                " directory. The draws stay readable."
            )
            got = f"{self.directory / str(number)} of {older}"
            _check.fail(where, "directory", rule, got, advice)
        return place

    @contextlib.contextmanager
    def _reading(self, number: int) -> Iterator[None]:
        """Verify the checksums, and name the checkpoint in errors."""
        file = self.directory / str(number)
        try:
            content = {"number": number, "files": _disk.sums(file, SUMS)}
            stored, _ = _disk.read_json(self._sums(number))
            if {name: stored.get(name) for name in content} != content:
                raise ValueError(f"{SUMS} does not match its files")
            yield
        except Exception as error:
            raise ValueError(
                f"The checkpoint {file} cannot be read ({error}). It is damaged, or the model or"
                " the sampler has changed. Remove this checkpoint if it is damaged: the next call"
                " resumes from the one before. The draws stay readable."
            ) from error

    def restore(self, like: Tree) -> tuple[Tree, Json] | None:
        """Read the newest checkpoint with the shapes and shardings of `like`; None without one."""
        number = self.newest()
        if number is None:
            return None

        args = self.orbax.args
        with self._reading(number):
            wanted = {
                name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
                for name, leaf in named(like).items()
            }
            both = args.Composite(carry=args.StandardRestore(wanted), place=args.JsonRestore())
            read = self.manager.restore(number, args=both)
            leaves = [read.carry[name] for name in wanted]
        return jax.tree.unflatten(jax.tree.structure(like), leaves), read.place

    def close(self):
        """Close the files."""
        self.manager.close()


def how_to_resume(directory: object) -> str:
    """Say how to resume a call that was stopped; `directory` may be None."""
    if directory is None:
        return "To be able to resume, pass a `directory`."
    return f"A checkpoint is in {directory}: repeat the call to resume."


def check_real(where: str, folder: Path):
    """Require a folder inside of a directory, no link or file in its place, if there is one."""
    if os.path.lexists(folder) and (folder.is_symlink() or not folder.is_dir()):
        rule = f"a directory whose {folder.name} is a folder"
        _check.fail(where, "directory", rule, f"{folder}, a link or file")


def check_names(where: str, argument: str, tree: Tree):
    """Require keys of a tree that can be written to a file."""
    for path, _ in jax.tree_util.tree_leaves_with_path(tree):
        name = _tree.name(map(_tree.entry, path))
        if any("\ud800" <= letter <= "\udfff" for letter in name):
            _check.fail(where, argument, "a tree whose keys are valid Unicode", ascii(name))


def named(tree: Tree) -> dict[str, jax.Array]:
    """Name the leaves of a tree: for Orbax, `a.b` and `b` inside `a` are the same."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {_tree.name(map(_tree.entry, path), "."): leaf for path, leaf in leaves}


@contextlib.contextmanager
def lock(where: str, directory: Path) -> Iterator[None]:
    """Lock a directory against a second run. The system unlocks it when the process ends.

    Raises:
        ValueError: another live process holds it.
    """
    if directory.exists() and not directory.is_dir():
        _check.fail(where, "directory", "a directory", f"the file {directory}")
    with contextlib.ExitStack() as closing:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            path = directory / f".lock-{jax.process_index()}"
            file = closing.enter_context(_disk.open_file(path, os.O_RDWR | os.O_CREAT))
            # The number of a process; another file may have this name.
            if not (held := file.read(LONGEST_NUMBER + 1)).isdigit() and held:
                raise OSError("it is the file of another program")
        except OSError as error:
            got = f"{directory} ({error.strerror or f'{path.name}: {error}'})"
            advice = "`load_snapshots` reads the draws of a directory that is read-only."
            _check.fail(where, "directory", "a directory that can be written", got, advice)
        with contextlib.suppress(ImportError):
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                got = f"{directory}, which process {held.decode()} is using"
                _check.fail(where, "directory", "used by no other live run", got)
            # Otherwise a process forked meanwhile, such as to read batches, would keep the lock.
            closing.callback(fcntl.flock, file, fcntl.LOCK_UN)
            file.seek(0)
            file.truncate()
            file.write(str(os.getpid()).encode())
            file.flush()
        yield


# Whether a directory holds the same run: the same settings, shapes and data.


def describe_batches(batches: object, per_chain: bool) -> tuple[Json, Batch]:
    """Describe batches without consuming them: only a list or tuple can be read twice.

    Returns:
        `tree`, `shapes`, `num_batches` and, as `examples`, number, sum and sum of squares of a
        projection of each example, independent of the order of the examples. For batches that are
        not a list or tuple, at most their number. And a batch of the examples with the smallest
        projections, as many as in the first batch, so that it is the same after a shuffle; None
        without a list.
    """
    if isinstance(batches, (list, tuple)) and batches:
        # Batches of other things than arrays, or of incompatible shapes, have their own checks.
        with contextlib.suppress(TypeError, ValueError, IndexError):
            return _describe_list(batches, per_chain)
    return {"num_batches": len(batches)} if isinstance(batches, Sized) else {}, None


def _describe_list(batches: Sequence[Batch], per_chain: bool) -> tuple[Json, Batch]:
    structure, rows = jax.tree.structure(batches[0]), num_rows(batches[0], per_chain)
    shapes = {str([(x.shape, str(x.dtype)) for x in _arrays(batch)]) for batch in batches}
    examples = [_examples(batch, per_chain) for batch in batches]
    projections = [_project(leaves) for leaves in examples]
    values, sizes = np.concatenate(projections), [one.size for one in projections]
    description = {
        "tree": str(structure),
        "shapes": sorted(shapes),
        "num_batches": len(batches),
        "examples": [values.size, float(values.sum()), float((values**2).sum())],
    }
    batch_of = np.repeat(np.arange(len(batches)), sizes)
    row_of = np.concatenate([np.arange(size) for size in sizes])
    chosen = np.argsort(values, kind="stable")[: rows or 1]
    picked = [[leaf[row_of[at]] for leaf in examples[batch_of[at]]] for at in chosen]
    leaves = [np.stack(column) for column in zip(*picked, strict=True)]
    if rows is None:
        leaves = [leaf[0] for leaf in leaves]
    elif per_chain:
        chains = len(jax.tree.leaves(batches[0])[0])
        leaves = [np.repeat(leaf[None], chains, axis=0) for leaf in leaves]
    return description, jax.tree.unflatten(structure, leaves)


def _arrays(batch: Batch) -> list[np.ndarray]:
    numeric = _tree.as_numeric("sample", "batches", batch)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(numeric)]


def _examples(batch: Batch, per_chain: bool) -> list[np.ndarray]:
    """Return leaves `[example, ...]` of all chains; a batch without rows is one example."""
    leaves = _arrays(batch)
    if num_rows(batch, per_chain) is None:
        return [leaf[None] for leaf in leaves]
    return [leaf.reshape(-1, *leaf.shape[2:]) if per_chain else leaf for leaf in leaves]


def _project(examples: list[np.ndarray]) -> np.ndarray:
    """Compute a random projection of each example to a scalar."""
    projection = np.zeros(len(examples[0]))
    for place, leaf in enumerate(examples):
        rows = leaf.reshape(len(leaf), -1).astype(float)
        weights = np.random.default_rng(place).standard_normal(rows.shape[1])
        projection += rows @ weights / max(rows.shape[1], 1) ** 0.5
    return projection


def describe_run(batches: object, per_chain: bool, losses: Callable[[Batch], jax.Array]) -> Json:
    """Describe the data and, if they are a list, the loss of each chain at the start."""
    description, batch = describe_batches(batches, per_chain)
    loss = None
    if batch is not None:
        loss = np.asarray(_tree.everywhere(losses(batch)), float).tolist()
    return {"data": description, "loss": loss}


def check_settings(where: str, directory: Path, before: Json, now: Json):
    """Require the settings and shapes of the run in a directory; warn of changed functions."""
    others = {"versions", "data", "loss", "validation", "functions", "whole", "stopping", "state"}
    theirs = _flat(before)
    for name, mine in _flat(now).items():
        parts = name.split(".")
        # Functions among the settings of a sampler are compared below.
        is_function = parts[:2] == ["settings", "sampler"] and _has_names(mine)
        if parts[0] not in others and not is_function and mine != theirs.get(name):
            wanted, got = repr(theirs.get(name)), repr(mine)
            if name == "arguments.validation":
                wanted, got = ("None", "a batch") if mine else ("a batch", "None")
            # "arguments.thin", "settings.sampler.step_size", "stored_dtype", or "leaves".
            argument, *inside = parts[1:] or (
                ["dtype"] if name == "stored_dtype" else ["params", name]
            )
            same = "the same" if inside or argument == "key" else wanted
            rule = f"one with {'.'.join(inside)} = {wanted}" if inside else wanted
            advice = f"Pass {same}, or choose another directory."
            _check.fail(where, argument, f"{rule}, as in the run in {directory}", got, advice)
    for name, mine in now["whole"].items():
        # Runs of earlier versions have none, and the inside of a transformation changes with Optax.
        first = before.get("whole", {}).get(name, mine)
        if first != json.loads(json.dumps(mine)) and before["versions"] == now["versions"]:
            warn(
                f"`{where}`: values that `{name}` or a function in it uses have changed since the"
                f" run in {directory} began. If the results may differ from before, choose another"
                " directory."
            )


def _has_names(described: object) -> bool:
    """Return whether a described setting is a function or contains one."""
    return isinstance(described, list) and any(
        isinstance(x, str) or _has_names(x) for x in described
    )


def check_same(where: str, directory: Path, before: Json, now: Json):
    """Require the data of the run in a directory; warn of another loss at the start.

    `now` then takes sampler and loss from `before`, so that later calls compare with the first.
    """
    for argument, field in (("batches", "data"), ("validation", "validation")):
        theirs, mine = before.get(field, {}), now.get(field, {})
        for name in [x for x in WORDS if x in theirs and x in mine]:
            if not _is_same(name, theirs[name], mine[name]):
                rule = f"the data of the run in {directory}, with {WORDS[name]}"
                advice = "To sample from other data, choose another directory."
                if name != "examples":
                    _check.fail(where, argument, f"{rule} {theirs[name]}", mine[name], advice)
                number, count = theirs[name][0], mine[name][0]
                how = " with other content" if number == count else f", not {number}"
                _check.fail(where, argument, rule, f"{count} examples{how}", advice)
    if before["loss"] is not None and now["loss"] is not None:
        first, second = np.array(before["loss"]), np.array(now["loss"])
        if not np.all(np.abs(first - second) <= LOSS_TOLERANCE * np.abs(first).max()):
            number = int(np.argmax(np.abs(first - second)))
            one = f"{'member' if where == 'warmstart' else 'chain'} {number}"
            warn(
                f"`{where}`: `loss_fn` is not that of the run in {directory}. The loss at the start"
                f" of {one} was {first[number]:.6g} and is {second[number]:.6g} now. If you did not"
                " mean to change the loss, choose another directory."
            )
    now |= {name: before[name] for name in ("whole", "loss") if before.get(name) is not None}


def _is_same(name: str, theirs: list[float], mine: list[float]) -> bool:
    if name != "examples":
        return theirs == mine
    number, _, square = theirs
    # Sums of numbers of either sign may be near zero.
    tolerance = SUM_TOLERANCE * np.array([0, (number * square) ** 0.5, square])
    return bool(np.all(np.abs(np.subtract(theirs, mine)) <= tolerance))


def _flat(tree: object, prefix: str = "") -> dict[str, object]:
    """Name the entries of nested dicts."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    entries = [_flat(value, f"{prefix}.{name}".lstrip(".")) for name, value in tree.items()]
    return {name: value for entry in entries for name, value in entry.items()}
