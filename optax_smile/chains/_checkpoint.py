"""What a killed run needs to go on: checkpoints, and a lock against a second run."""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from optax_smile import _check, _disk, _tree
from optax_smile.state import STATE_FORMAT

# The newest and, should the disk have eaten it, the one before.
KEPT = 2
# In the folder of a checkpoint, written last: sizes and checksums of all its files. One without it
# is unfinished.
SUMS = "checksums.json"
# Field of the samplers' states, and entry of what JSON holds of a checkpoint.
FORMAT = "state_format"


def _import_orbax() -> Any:
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError(
            "Runs in a directory need Orbax: pip install 'optax-smile[storage]'."
        ) from error
    return orbax.checkpoint


def state_format(tree: Any) -> int | None:
    """Format of the samplers' states in a tree; None without a sampler."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree) if path]
    has_sampler = any(_tree.entry(path[-1]) == ["attribute", FORMAT] for path in paths)
    return STATE_FORMAT if has_sampler else None


class Checkpoints:
    """The newest states of a run in a directory, each written whole or not at all.

    Args:
        directory: of the run; the checkpoints lie in a folder of it.
        minutes: between two checkpoints.
    """

    def __init__(self, directory: Path, minutes: float):
        self.orbax = _import_orbax()
        self.directory, self.minutes = directory.absolute() / "checkpoints", minutes
        if self.directory.is_symlink() or self.directory.exists():
            for path in (self.directory, *self.directory.iterdir()):
                _disk.check_own(path)
        options = self.orbax.CheckpointManagerOptions(
            max_to_keep=KEPT, cleanup_tmp_directories=True, enable_async_checkpointing=False
        )
        self.manager = self.orbax.CheckpointManager(self.directory, options=options)
        self.finished = [n for n in self.manager.all_steps() if self._sums(n).exists()]
        self.saved_at = time.monotonic()

    def _sums(self, number: int) -> Path:
        return self.directory / str(number) / SUMS

    def newest(self) -> int | None:
        """Number of the newest checkpoint; None without one."""
        return max(self.finished, default=None)

    def remove(self):
        """Forget the checkpoints of a run that did not get anywhere."""
        for number in self.manager.all_steps():
            self.manager.delete(number)
        self.finished = []

    def is_due(self) -> bool:
        """Whether so many minutes have passed."""
        return time.monotonic() - self.saved_at >= 60 * self.minutes

    def save(self, number: int, carry: Any, place: dict[str, Any]):
        """Write arrays and what JSON can hold; a number that is there already is left alone."""
        args = self.orbax.args
        if self.newest() != number:
            try:
                for unfinished in set(self.manager.all_steps()) - set(self.finished):
                    self.manager.delete(unfinished)
                place = place | {FORMAT: state_format(carry)}
                both = args.Composite(
                    carry=args.StandardSave(_flat(carry)), place=args.JsonSave(place)
                )
                self.manager.save(number, args=both, force=True)
                if jax.process_index() == 0:
                    sums = _disk.sums(self.directory / str(number), SUMS)
                    content = json.dumps({"number": number, "files": sums}, indent=1)
                    _disk.write(self._sums(number), content.encode())
            except Exception as error:
                raise OSError(
                    f"The checkpoint {self.directory / str(number)} could not be written ({error})."
                    " The draws and the checkpoint before it are safe: make room and run again."
                ) from error
            self.finished.append(number)
        self.saved_at = time.monotonic()

    def place(self) -> dict[str, Any] | None:
        """What JSON holds of the newest checkpoint; None without one."""
        number = self.newest()
        if number is None:
            return None
        with self._reading(number):
            args = self.orbax.args.Composite(place=self.orbax.args.JsonRestore())
            return self.manager.restore(number, args=args).place

    def check_format(self, where: str, tree: Any):
        """Require that the newest checkpoint has samplers' states of the format of `tree`."""
        place, mine = self.place(), state_format(tree)
        if place is None or mine is None or place.get(FORMAT) == mine:
            return
        theirs = place.get(FORMAT)
        found = "an older format, without a number" if theirs is None else f"format {theirs}"
        rule = f"one whose checkpoints have a sampler's state of format {mine}"
        advice = (
            "Continue that run with the version of optax_smile that wrote it, or choose another"
            " directory. The draws stay readable."
        )
        got = f"{self.directory / str(self.newest())} of {found}"
        _check.fail(where, "directory", rule, got, advice)

    @contextlib.contextmanager
    def _reading(self, number: int) -> Iterator[None]:
        """Require the files that were written, and say which checkpoint cannot be read."""
        file = self.directory / str(number)
        try:
            told = {"number": number, "files": _disk.sums(file, SUMS)}
            if json.loads(_disk.read_text(self._sums(number))) != told:
                raise ValueError(f"{SUMS} does not fit its files")
            yield
        except Exception as error:
            raise ValueError(
                f"The checkpoint {file} cannot be read ({error}). It is damaged, or the model or"
                " the sampler has changed. Remove it to go on from the one before; the draws stay"
                " readable."
            ) from error

    def restore(self, like: Any) -> tuple[Any, dict[str, Any]] | None:
        """Read the newest checkpoint into the shapes and shardings of `like`; None without one."""
        number = self.newest()
        if number is None:
            return None

        def abstract(leaf):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

        args = self.orbax.args
        with self._reading(number):
            wanted = _flat(jax.tree.map(abstract, like))
            both = args.Composite(carry=args.StandardRestore(wanted), place=args.JsonRestore())
            read = self.manager.restore(number, args=both)
            leaves = [read.carry[name] for name in wanted]
        return jax.tree.unflatten(jax.tree.structure(like), leaves), read.place

    def close(self):
        """Let go of the files."""
        self.manager.close()


def _flat(tree: Any) -> dict[str, Any]:
    """Name the leaves of a tree: Orbax takes `a.b` and `b` inside `a` for the same."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {_tree.name(map(_tree.entry, path), "."): leaf for path, leaf in leaves}


@contextlib.contextmanager
def lock(where: str, directory: Path) -> Iterator[None]:
    """Keep a second run out of a directory; a killed process lets go of it.

    Raises:
        ValueError: another live process holds it, or its file is a link.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f".lock-{jax.process_index()}"
    if os.path.lexists(path):
        _disk.check_own(path)
    with contextlib.ExitStack() as closing:
        file = closing.enter_context(path.open("a+"))
        if os.fstat(file.fileno()).st_nlink > 1:
            got = f"{path}, which has another name elsewhere"
            _check.fail(where, "directory", "one with files of its own", got, "Remove it.")
        with contextlib.suppress(ImportError):
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                got = f"{directory}, where process {file.read(20)} is at work"
                _check.fail(where, "directory", "in use by no live run", got)
            # A process forked meanwhile, such as to read batches, would hold it on.
            closing.callback(fcntl.flock, file, fcntl.LOCK_UN)
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
        yield


def any_process(*flags: bool) -> list[bool]:
    """Whether each flag is raised in any process; all of them must ask together."""
    if jax.process_count() == 1:
        return list(flags)
    from jax.experimental import multihost_utils

    return np.any(multihost_utils.process_allgather(np.array(flags)), axis=0).tolist()
