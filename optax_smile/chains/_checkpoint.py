"""What a killed run needs to go on: checkpoints, and a lock against a second run."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from optax_smile import _check

# The newest and, should the disk have eaten it, the one before.
KEPT = 2


def _import_orbax() -> Any:
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError(
            "Runs in a directory need Orbax: pip install 'optax-smile[storage]'."
        ) from error
    return orbax.checkpoint


class Checkpoints:
    """The newest states of a run in a directory, each written whole or not at all.

    Args:
        directory: of the run; the checkpoints lie in a folder of it.
        minutes: between two checkpoints.
    """

    def __init__(self, directory: Path, minutes: float):
        self.orbax = _import_orbax()
        self.directory, self.minutes = directory / "checkpoints", minutes
        options = self.orbax.CheckpointManagerOptions(
            max_to_keep=KEPT, cleanup_tmp_directories=True, enable_async_checkpointing=False
        )
        self.manager = self.orbax.CheckpointManager(self.directory.absolute(), options=options)
        self.saved_at = time.monotonic()

    def newest(self) -> int | None:
        """Number of the newest checkpoint; None without one."""
        return self.manager.latest_step()

    def remove(self):
        """Forget the checkpoints of a run that did not get anywhere."""
        for number in self.manager.all_steps():
            self.manager.delete(number)

    def is_due(self) -> bool:
        """Whether so many minutes have passed."""
        return time.monotonic() - self.saved_at >= 60 * self.minutes

    def save(self, number: int, carry: Any, place: dict[str, Any]):
        """Write arrays and what JSON can hold; a number that is there already is left alone."""
        args = self.orbax.args
        if self.newest() != number:
            try:
                self.manager.save(
                    number,
                    args=args.Composite(carry=args.StandardSave(carry), place=args.JsonSave(place)),
                    force=True,
                )
            except Exception as error:
                raise OSError(
                    f"The checkpoint {self.directory / str(number)} could not be written ({error})."
                    " The draws and the checkpoint before it are safe: make room and run again."
                ) from error
        self.saved_at = time.monotonic()

    def restore(self, like: Any) -> tuple[Any, dict[str, Any]] | None:
        """Read the newest checkpoint into the shapes and shardings of `like`; None without one."""
        number = self.newest()
        if number is None:
            return None

        def abstract(leaf):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

        args, file = self.orbax.args, self.directory / str(number)
        try:
            read = self.manager.restore(
                number,
                args=args.Composite(
                    carry=args.StandardRestore(jax.tree.map(abstract, like)),
                    place=args.JsonRestore(),
                ),
            )
        except Exception as error:
            raise ValueError(
                f"The checkpoint {file} cannot be read ({error}). It is damaged, or the model or"
                " the sampler has changed. Remove it to go on from the one before; the draws stay"
                " readable."
            ) from error
        return read.carry, read.place

    def close(self):
        """Let go of the files."""
        self.manager.close()


@contextlib.contextmanager
def lock(where: str, directory: Path) -> Iterator[None]:
    """Keep a second run out of a directory; a killed process lets go of it.

    Raises:
        ValueError: another live process holds it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f".lock-{jax.process_index()}").open("a+") as file:
        with contextlib.suppress(ImportError):
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                got = f"{directory}, where process {file.read()} is at work"
                _check.fail(where, "directory", "in use by no live run", got)
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
