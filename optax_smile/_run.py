"""The directory of one run: its manifest, its draws, its checkpoints."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from optax_smile import _check, _checkpoint, _disk


class RunDirectory:
    """Holds a directory against other runs and keeps what this one needs to go on.

    Args:
        directory: new, empty, or that of the same run.
        start: stacked parameters `[chain, ...]` before the first step.
        settings: what tells a run from another, as JSON can hold it.
        num_samples: draws wanted, which may grow from one call to the next.
        dtype: see `SnapshotWriter`.
        resume: whether to go on with a run that is there.
        minutes: between two checkpoints.

    Raises:
        ValueError: a directory in use, of another run, or with draws and no checkpoint.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        start: Any,
        *,
        settings: Mapping[str, Any],
        num_samples: int,
        dtype: str | None,
        resume: bool,
        minutes: float,
    ):
        _disk.import_safetensors()
        self.directory = Path(directory)
        self.lock = _checkpoint.Lock("sample", self.directory)
        try:
            self.checkpoints = _checkpoint.Checkpoints(self.directory, minutes)
            manifest = _disk.manifest(start, dtype, settings)
            self.resumed = self._is_resumed(manifest, resume)
            if jax.process_index() == 0:
                manifest["num_samples"] = num_samples
                content = json.dumps(manifest, indent=1).encode()
                _disk.write(self.directory / _disk.MANIFEST, content)
            self.writer = _disk.SnapshotWriter(
                self.directory, start, dtype=dtype, resumed=self.resumed
            )
        except BaseException:
            self.lock.release()
            raise

    def _is_resumed(self, manifest: dict[str, Any], resume: bool) -> bool:
        """Whether there is something to go on with; an error where it is something else."""
        has_draws = any(self.directory.glob("draw-*"))
        if not has_draws and self.checkpoints.newest() == 0:
            self.checkpoints.remove()
        has_checkpoint = self.checkpoints.newest() is not None
        got = f"{self.directory}, which holds those of another run"
        if not resume and (has_draws or has_checkpoint):
            rule = "a directory without draws where `resume` is False"
            _check.fail("sample", "directory", rule, got, "Choose another, or remove it.")
        if has_draws and not has_checkpoint:
            rule = "a directory with a checkpoint to resume from, or without draws"
            got = f"{self.directory}, which holds draws alone"
            _check.fail("sample", "directory", rule, got, "Choose another, or remove it.")
        if not has_checkpoint:
            return False
        before = _disk.read_manifest("sample", self.directory)
        for name, mine in _flat({**manifest, "versions": None}).items():
            theirs = _flat({**before, "versions": None}).get(name)
            if mine != theirs:
                rule = f"a new one or that of the same run, with {name} = {mine!r}"
                remedy = "Choose another, or give the arguments of that run."
                got = f"{self.directory} with {theirs!r}"
                _check.fail("sample", "directory", rule, got, remedy)
        return True

    def checkpoint(self, number: int, carry: Any, place: dict[str, Any]):
        """Write a checkpoint, after the draws before it."""
        self.writer.flush()
        self.checkpoints.save(number, carry, place)

    def close(self):
        """Write the draws that wait; let other runs in."""
        try:
            self.writer.close()
        finally:
            self.checkpoints.close()
            self.lock.release()


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Name the entries of nested dicts."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    entries = [_flat(value, f"{prefix}.{name}".lstrip(".")) for name, value in tree.items()]
    return {name: value for entry in entries for name, value in entry.items()}
