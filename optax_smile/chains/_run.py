"""Where a run keeps its draws, and what it needs to go on: in memory or in a directory."""

import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from optax_smile import _check, _disk, _tree
from optax_smile.chains import _checkpoint, _identity, _loop
from optax_smile.chains._chains import Chains
from optax_smile.chains._loop import Position
from optax_smile.draws import _format
from optax_smile.draws.snapshots import Snapshots, Stopping, StoredSnapshots, load_snapshots


class Place(NamedTuple):
    """How far a run has got.

    Attributes:
        num_gradients: of each chain.
        num_kept: draws of each chain that are kept.
        position: of the next batch.
    """

    num_gradients: int
    num_kept: int
    position: Position


class MemoryRun:
    """Keeps the draws of a run in host memory."""

    def __init__(self, start: Any, settings: Mapping[str, Any] | None):
        self.start, self.settings = _tree.local(start), settings
        self.draws, self.trace = [], []
        self.stopping: Stopping | None = None

    def restore(self, chains: Chains) -> None:
        """There is nothing to go on with."""

    def tell_finished(self, num_draws: int):
        """Nothing is finished before it begins."""

    def tick(self, stats: Mapping[str, np.ndarray]):
        """Note what a sampler said at a tick."""
        self.trace.append(stats)

    def put(self, number: int, step: int, draw: Any, stats: Mapping[str, np.ndarray]):
        """Keep a draw."""
        self.draws.append(_tree.local(draw))

    def before(self, number: int) -> list[Any]:
        """There are no draws of an earlier call."""
        return []

    def note(self, stopping: Stopping):
        """Keep what a stopping rule found so far."""
        self.stopping = stopping

    def is_due(self) -> bool:
        """There are no checkpoints."""
        return False

    def checkpoint(self, chains: Chains, place: Place):
        """There are no checkpoints."""

    def result(self, num_draws: int) -> Snapshots:
        """Draws `[chain, draw, ...]`, all there are, and the trace `[chain, tick]`."""

        def stack(*leaves):
            return np.stack(leaves, axis=1)

        params, trace = jax.tree.map(stack, *self.draws), jax.tree.map(stack, *self.trace)
        found = Snapshots(params, trace, self.settings, self.start)
        vars(found).update(stopping=self.stopping)
        return found


class DirectoryRun:
    """Holds a directory against other runs and keeps draws, manifest and checkpoints there.

    Args:
        directory: new, empty, or that of the same run.
        chains: before the first step.
        closing: closes what is opened here.
        settings: what tells a run from another, as JSON can hold it.
        dtype: what the draws are rounded to, or None.
        resume: whether to go on with a run that is there.
        minutes: between two checkpoints.
        data: what can be told of the batches.
        accept: what may differ from the run in the directory, see `_identity`.

    Raises:
        ValueError: a directory in use, of another run, or with draws and no checkpoint.
    """

    def __init__(
        self,
        directory: Path,
        chains: Chains,
        closing: ExitStack,
        *,
        settings: Mapping[str, Any],
        dtype: _format.StoredDtype | None,
        resume: bool,
        minutes: float,
        data: _identity.Data,
        accept: Sequence[_identity.Accepted],
    ):
        _disk.import_safetensors()
        start = chains.draw()
        self.directory, self.like = directory.absolute(), _loop.one_of(start)
        # Before anything is created there.
        if not (self.directory / "checkpoints").exists():
            self._refuse_draws_alone()
        closing.enter_context(_checkpoint.lock("sample", self.directory))
        if jax.process_index() == 0:
            _disk.remove_drafts(self.directory)
        # Waits for all processes.
        self.checkpoints = _checkpoint.Checkpoints(self.directory, minutes)
        closing.callback(self.checkpoints.close)
        manifest = _format.manifest_of(start, dtype, settings)
        before = self._resumed(manifest, chains, resume)
        self.resumed = before is not None
        rounded = _format.rounded(start, dtype)
        if before is not None:
            stored = self.result().start
            _warn_of_start(self.directory, rounded, stored)
            rounded = stored
        # What was observed of the start of an earlier run does not tell its loss.
        at = None if chains.observe else rounded
        manifest |= _identity.of_run(data, lambda batch: chains.losses(batch, at))
        if before is not None:
            _identity.check_same("sample", self.directory, before, manifest, accept)
        self.manifest = manifest
        if jax.process_index() == 0:
            _format.write_manifest(self.directory, manifest)
        files = _format.DrawFiles(self.directory, start, dtype=dtype, resumed=self.resumed)
        self.writer = _format.SnapshotWriter(files)
        closing.callback(self.writer.close)

    def _resumed(
        self, manifest: dict[str, Any], chains: Chains, resume: bool
    ) -> dict[str, Any] | None:
        """The manifest of the run to go on with, if any; an error where it is something else."""
        has_draws = any(self.directory.glob("draw-*"))
        if not has_draws and self.checkpoints.newest() == 0:
            self.checkpoints.remove()
        has_checkpoint = self.checkpoints.newest() is not None
        if not resume and (has_draws or has_checkpoint):
            rule = "a directory without draws where `resume` is False"
            got = f"{self.directory}, which holds those of another run"
            _check.fail("sample", "directory", rule, got, "Choose another, or remove it.")
        if not has_checkpoint:
            self._refuse_draws_alone()
            return None
        self.checkpoints.check_format("sample", chains.tree)
        before = _format.read_manifest("sample", self.directory)
        theirs, other = _flat(before), {"versions", "data", "loss"}
        if before["versions"] != manifest["versions"]:
            # Another version of Optax may have other names inside.
            other |= {"settings.chain", "settings.observe"}
        for name, mine in _flat(manifest).items():
            is_compared = not other & {name, name.split(".")[0]}
            if is_compared and mine != theirs.get(name):
                rule = f"a new one or that of the same run, with {name} = {mine!r}"
                remedy = "Choose another, or give the arguments of that run."
                got = f"{self.directory} with {theirs.get(name)!r}"
                _check.fail("sample", "directory", rule, got, remedy)
        return before

    def _refuse_draws_alone(self):
        if any(self.directory.glob("draw-*")):
            rule = "a directory with a checkpoint to resume from, or without draws"
            got = f"{self.directory}, which holds draws alone"
            _check.fail("sample", "directory", rule, got, "Choose another, or remove it.")

    def restore(self, chains: Chains) -> Place | None:
        """Bring the chains to where the newest checkpoint is, if there is one, and tell where."""
        found = self.checkpoints.restore(chains.tree)
        if found is None:
            return None
        chains.tree, told = found
        return Place(told["num_gradients"], told["num_kept"], Position(**told["position"]))

    def tell_finished(self, num_draws: int):
        """Say that there was nothing to do."""
        draws = self.result(num_draws)
        newest = max(block.path.stat().st_mtime for block in draws.draws[-1])
        date = time.strftime("%Y-%m-%d", time.localtime(newest))
        message = f"{draws.num_draws} draws of {date} loaded from {self.directory}: it is finished."
        warnings.warn(f"`sample`: {message}", stacklevel=4)

    def tick(self, stats: Mapping[str, np.ndarray]):
        """The statistics go to disk with the draws."""

    def put(self, number: int, step: int, draw: Any, stats: Mapping[str, np.ndarray]):
        """Hand a draw to the thread that writes."""
        self.writer.put(number, step, draw, stats)

    @property
    def start(self) -> Any:
        """Start of the chains, as the directory holds it."""
        return self.result().start

    def before(self, number: int) -> StoredSnapshots:
        """Return so many draws of an earlier call."""
        return self.result(number)

    def note(self, stopping: Stopping):
        """Write what a stopping rule found so far."""
        self.manifest["stopping"] = stopping.to_json()
        _format.write_manifest(self.directory, self.manifest)

    def is_due(self) -> bool:
        """Whether it is time for a checkpoint."""
        return self.checkpoints.is_due()

    def checkpoint(self, chains: Chains, place: Place):
        """Write a checkpoint, after the draws before it."""
        self.writer.flush()
        told = place._asdict() | {"position": place.position._asdict()}
        self.checkpoints.save(place.num_gradients, chains.tree, told)

    def result(self, num_draws: int | None = None) -> StoredSnapshots:
        """The first draws, or all there are, as they are read from the directory."""
        found = load_snapshots(self.directory, like=self.like)
        found.draws = found.draws[:num_draws]
        return found


def _warn_of_start(directory: Path, given: Any, stored: Any):
    """Say that the run goes on from its own start, where another one was passed."""
    if jax.process_count() == 1 and not all(
        np.array_equal(mine, theirs, equal_nan=True)
        for mine, theirs in zip(jax.tree.leaves(given), jax.tree.leaves(stored), strict=True)
    ):
        message = (
            f"`sample`: the run in {directory} goes on from its checkpoint. It began at another"
            " start than the `params` passed now, which are not used."
        )
        warnings.warn(message, stacklevel=5)


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Name the entries of nested dicts."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    entries = [_flat(value, f"{prefix}.{name}".lstrip(".")) for name, value in tree.items()]
    return {name: value for entry in entries for name, value in entry.items()}
