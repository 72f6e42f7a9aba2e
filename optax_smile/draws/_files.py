"""The format of draws on disk, and the thread that writes them."""

import json
import os
import queue
import re
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from optax_smile import _check, _tree

FORMAT = 2
MANIFEST = "manifest.json"
# What numbers may be rounded to on their way to disk.
STORED_DTYPES = ("float16", "float32", "float64")
# Draws that may wait for the disk: more would only hide that it is too slow.
QUEUE_SIZE = 2
# Parameters before the first step, from which leaves that never move are read.
START = "start"
_FILE = re.compile(r"(draw-(\d+)|start)\.chains-(\d+)-(\d+)\.safetensors")


class Leaf(NamedTuple):
    """One array of the parameter tree, as the manifest describes it.

    Attributes:
        name: path of the leaf, joined by slashes; the name of the array in the files.
        path: the same as pairs of kind (`key`, `index` or `attribute`) and entry.
        shape: of one chain.
        dtype: of the parameters in the run; a file may hold a shorter one.
    """

    name: str
    path: list[list[Any]]
    shape: list[int]
    dtype: str


def describe(params: Any) -> list[Leaf]:
    """Describe the leaves of stacked parameters `[chain, ...]`."""

    def entry(key) -> list[Any]:
        for kind, attribute in (("key", "key"), ("index", "idx"), ("attribute", "name")):
            if hasattr(key, attribute):
                return [kind, getattr(key, attribute)]
        return ["key", str(key)]

    return [
        Leaf(
            name=jax.tree_util.keystr(path, simple=True, separator="/") or "params",
            path=[entry(key) for key in path],
            shape=list(leaf.shape[1:]),
            dtype=str(leaf.dtype),
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    ]


class Block(NamedTuple):
    """A file and the chains in it.

    Attributes:
        path: of the file.
        first: its first chain.
        last: its last chain.
    """

    path: Path
    first: int
    last: int


def find(directory: Path, num_chains: int) -> dict[int | str, list[Block]]:
    """Find the files of every draw that all chains have written, and those of the start."""
    blocks: dict[int | str, list[Block]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        if match := _FILE.fullmatch(path.name):
            draw = START if match[2] is None else int(match[2])
            blocks.setdefault(draw, []).append(Block(path, int(match[3]), int(match[4])))

    def is_whole(parts):
        return len({c for part in parts for c in range(part.first, part.last + 1)}) == num_chains

    return {draw: parts for draw, parts in blocks.items() if is_whole(parts)}


def read_header(file: Path) -> dict[str, Any]:
    """Read what a file says about its draw."""
    safetensors = import_safetensors()
    try:
        with safetensors.safe_open(file, framework="numpy") as content:
            return json.loads(content.metadata()["optax_smile"])
    except Exception as error:
        raise _damaged(file, error) from error


def read_arrays(file: Path) -> dict[str, np.ndarray]:
    """Read the arrays of a file and test its checksum."""
    safetensors = import_safetensors()
    try:
        with safetensors.safe_open(file, framework="numpy") as content:
            checksum = json.loads(content.metadata()["optax_smile"])["checksum"]
            arrays = {name: content.get_tensor(name) for name in content.keys()}
    except Exception as error:
        raise _damaged(file, error) from error
    if _checksum(arrays) != checksum:
        raise _damaged(file, "its checksum does not fit its content")
    return arrays


def read_chains(
    blocks: list[Block],
    leaves: list[Leaf],
    num_chains: int,
    start: Callable[[], dict[str, np.ndarray]],
) -> dict[str, np.ndarray]:
    """Read a draw of all chains, arrays `[chain, ...]`; what a file lacks is as at the start."""
    stored = [(slice(first, last + 1), read_arrays(file)) for file, first, last in blocks]
    arrays = {}
    for name, _, shape, dtype in leaves:
        arrays[name] = np.empty((num_chains, *shape), dtype)
        for rows, block in stored:
            arrays[name][rows] = block[name] if name in block else start()[name][rows]
    return arrays


def read_start(directory: Path, leaves: list[Leaf], num_chains: int) -> dict[str, np.ndarray]:
    """Read the parameters before the first step, arrays `[chain, ...]`.

    Raises:
        ValueError: their file is missing, or damaged.
    """
    blocks = find(directory, num_chains).get(START)
    if blocks is None:
        raise ValueError(
            f"{directory} lacks the file {START}.chains-*.safetensors, in which leaves that never"
            " moved are kept. Bring it back; draws without such leaves stay readable."
        )
    return read_chains(blocks, leaves, num_chains, dict)


def _damaged(file: Path, error: Any) -> ValueError:
    return ValueError(
        f"The snapshot {file} is damaged ({error}). Remove it: the other draws stay readable."
    )


def _checksum(arrays: Mapping[str, np.ndarray]) -> str:
    value = 0
    for name in sorted(arrays):
        value = zlib.crc32(
            np.ascontiguousarray(arrays[name]).data, zlib.crc32(name.encode(), value)
        )
    return f"{value:08x}"


def write(path: Path, content: bytes):
    """Write a file that is either whole or absent, also after a power failure."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise OSError(
            error.errno,
            f"{error.strerror}: this file could not be written. The draws before it are safe and"
            " can be loaded; make room or choose another directory",
            str(path),
        ) from error


def remove_drafts(directory: Path):
    """Remove what killed runs were about to write."""
    for draft in directory.glob(".*.safetensors.*"):
        draft.unlink(missing_ok=True)


def import_safetensors() -> Any:
    """Import safetensors, or say how to get it."""
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            "Draws on disk need safetensors: pip install 'optax-smile[storage]'."
        ) from error
    return safetensors


def read_manifest(where: str, directory: Path) -> dict[str, Any]:
    """Read the manifest of a directory.

    Raises:
        ValueError: there is none, it cannot be read, or it is of another format.
    """
    file = directory / MANIFEST
    if not file.exists():
        _check.fail(where, "directory", f"a directory with a {MANIFEST}", directory)
    try:
        manifest = json.loads(file.read_text())
        version = manifest["format"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        rule = f"a directory with a readable {MANIFEST}"
        _check.fail(where, "directory", rule, f"{file} ({error})")
    if version != FORMAT:
        rule = f"a directory of snapshots of format {FORMAT}"
        remedy = "Read it with the version of optax_smile that its manifest names."
        _check.fail(where, "directory", rule, f"format {version} in {file}", remedy)
    return manifest


def manifest(params: Any, dtype: str | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a run: its tree, its settings, the libraries."""
    described = {
        "format": FORMAT,
        "num_chains": int(jax.tree.leaves(params)[0].shape[0]),
        "leaves": [leaf._asdict() for leaf in describe(params)],
        "stored_dtype": dtype,
        "settings": dict(settings),
        "versions": {
            name: metadata.version(name)
            for name in ("optax-smile", "jax", "optax", "numpy", "safetensors")
        },
    }
    return json.loads(json.dumps(described))


class SnapshotWriter:
    """Write draws into a directory from a thread of its own.

    The chains of a draw that one process holds are one safetensors file of arrays `[chain, ...]`
    (on several processes one per device), written under another name first and then renamed. Its
    header holds, as JSON, what `optax_smile.stats` said, the step, and a checksum. Leaves that
    equal those of the start, such as the frozen part of a network, are stored there alone.

    Args:
        directory: where to; it is made.
        start: stacked parameters `[chain, ...]` before the first step, on any device.
        dtype: what to round to on disk, `"float16"`, `"float32"` or `"float64"`; None rounds
            nothing.
        resumed: whether the directory holds the start of this run already, which counts then.

    Raises:
        ValueError: a resumed directory without a readable start.
        OSError: a file that cannot be written, here or at the next `put` or `close`.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        start: Any,
        *,
        dtype: str | None = None,
        resumed: bool = False,
    ):
        self.directory, self.dtype = Path(directory), dtype
        leaves = describe(start)
        self.names = [leaf.name for leaf in leaves]
        if resumed:
            num_chains = jax.tree.leaves(start)[0].shape[0]
            start = read_start(self.directory, leaves, num_chains)
        else:
            self._store(START, 0, start, {})
        self.unmoved: dict[str, dict[int, np.ndarray]] = {name: {} for name in self.names}
        for first, last, arrays in self._blocks(start):
            for name, array in arrays.items():
                self.unmoved[name] |= dict(zip(range(first, last + 1), array.copy(), strict=True))
        self.failure: BaseException | None = None
        self.waiting: queue.Queue = queue.Queue(QUEUE_SIZE)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def put(self, draw: int, step: int, params: Any, stats: Mapping[str, Any]):
        """Hand over a draw; waits only if the disk is behind.

        Args:
            draw: its number, from 0.
            step: steps done by each chain.
            params: stacked parameters `[chain, ...]`, on any device.
            stats: arrays `[chain]` of the chains of this process.
        """
        self._raise_failure()
        self.waiting.put((draw, step, params, stats))

    def flush(self):
        """Wait until every draw is on disk."""
        self.waiting.join()
        self._raise_failure()

    def close(self):
        """Write what waits and end the thread."""
        self.waiting.put(None)
        self.thread.join()
        self._raise_failure()

    def _raise_failure(self):
        if self.failure is not None:
            raise self.failure

    def _run(self):
        while (item := self.waiting.get()) is not None:
            if self.failure is None:
                try:
                    self._store(*item)
                except BaseException as error:
                    self.failure = error
            self.waiting.task_done()

    def _blocks(self, params: Any) -> Iterator[tuple[int, int, dict[str, np.ndarray]]]:
        """Chains of this process, rounded as they are stored."""
        for first, last, leaves in _tree.local_blocks(params):
            rounded = [np.ascontiguousarray(np.asarray(x, dtype=self.dtype)) for x in leaves]
            yield first, last, dict(zip(self.names, rounded, strict=True))

    def _moved(self, first: int, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Leave out what is as at the start; a leaf that has moved once is stored ever after."""
        for name in list(self.unmoved):
            before = self.unmoved[name]
            if not all(np.array_equal(x, before[first + i]) for i, x in enumerate(arrays[name])):
                del self.unmoved[name]
        return {name: array for name, array in arrays.items() if name not in self.unmoved}

    def _store(self, draw: int | str, step: int, params: Any, stats: Mapping[str, Any]):
        stem, done = START if draw == START else f"draw-{draw:08d}", 0
        for first, last, arrays in self._blocks(params):
            rows = slice(done, done + last - first + 1)
            arrays = arrays if draw == START else self._moved(first, arrays)
            header = {
                "draw": draw,
                "step": step,
                "stats": {name: np.asarray(value)[rows].tolist() for name, value in stats.items()},
                "checksum": _checksum(arrays),
            }
            save = import_safetensors().numpy.save
            content = save(arrays, metadata={"optax_smile": json.dumps(header)})
            file = f"{stem}.chains-{first:05d}-{last:05d}.safetensors"
            write(self.directory / file, content)
            done = rows.stop
