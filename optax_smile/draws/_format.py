"""The directory of a run: its manifest, the files of its draws and the thread that writes them."""

import collections
import concurrent.futures
import contextlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from optax_smile import _check, _disk, _tree
from optax_smile._disk import Json
from optax_smile._types import Options, Tree
from optax_smile._version import __version__

FORMAT = 3
MANIFEST = "manifest.json"
# Precisions to which draws may be rounded on disk.
StoredDtype = Literal["float16", "float32", "float64"]
REMEDY = "Restore it: a run with the same arguments in a new directory writes an identical one."
# Folder of the checkpoints, and file in each of them, written last: sizes and checksums of its
# files, and the number of draws before it. Without it a checkpoint is unfinished.
CHECKPOINTS, SUMS = "checkpoints", "checksums.json"
# Number of draws that may wait for the disk.
QUEUE_SIZE = 2
# Parameters before the first step; leaves that never change are read from there.
START = "start"
_FILE = re.compile(r"(draw-([0-9]{8,10})|start)\.chains-([0-9]{5,10})-([0-9]{5,10})\.safetensors")
# Most missing files that an error names.
MOST_NAMED = 5
# Statistics of the draws of some chains, arrays `[chain]`.
Stats: TypeAlias = Mapping[str, np.ndarray]


class Leaf(NamedTuple):
    """One array of the parameter tree.

    Attributes:
        name: path of the leaf, joined by slashes as in `_tree.name`, and name of its array in the
            files. Names are unique.
        path: the path as pairs of kind (`key`, `index` or `attribute`) and entry.
        shape: shape for one chain.
        dtype: dtype of the parameters in the run; a file may have a lower precision.
    """

    name: str
    path: list[list[str | int]]
    shape: list[int]
    dtype: str


def _name(path: list[list[str | int]]) -> str:
    """Name a leaf; a bare array has no path, and safetensors reserves one name."""
    name = _tree.name(path) if path else "params"
    return "~" + name if name == "__metadata__" else name


def leaves_of(params: Tree, axes: int = 1) -> list[Leaf]:
    """Describe the leaves of parameters; `axes` counts the axes before those of one chain."""
    leaves = []
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        path = [_tree.entry(key) for key in keys]
        leaves.append(Leaf(_name(path), path, list(leaf.shape[axes:]), str(leaf.dtype)))
    return leaves


def versions() -> dict[str, str]:
    """Return the versions of this library and of the libraries that affect a run."""
    libraries = {"jax": jax, "optax": optax, "numpy": np, "safetensors": _disk.import_safetensors()}
    others = {name: library.__version__ for name, library in libraries.items()}
    return {"optax-smile": __version__, **others}


def manifest_of(params: Tree, dtype: str | None, settings: Mapping) -> Json:
    """Make the manifest of a run with stacked parameters, whose draws are rounded to `dtype`."""
    leaves = leaves_of(params)
    if len({leaf.name for leaf in leaves}) < len(leaves):
        rule = "a tree whose leaves have distinct paths"
        _check.fail("sample", "params", rule, sorted(leaf.name for leaf in leaves))
    described = {
        "format": FORMAT,
        "num_chains": int(jax.tree.leaves(params)[0].shape[0]),
        "leaves": [leaf._asdict() for leaf in leaves],
        "stored_dtype": dtype,
        "settings": dict(settings),
        "data": {},
        "loss": None,
        "versions": versions(),
    }
    return json.loads(json.dumps(described))


def write_manifest(directory: Path, manifest: Json):
    """Write a manifest with its checksum."""
    _disk.write_json(directory / MANIFEST, manifest)


def read_manifest(where: str, directory: Path) -> Json:
    """Read the manifest of a directory.

    Raises:
        ValueError: a missing or unreadable manifest, another format, or a wrong checksum.
    """
    file = directory / MANIFEST
    if not os.path.lexists(file):
        rule, got = f"a directory of stored draws, with a {MANIFEST}", "without one"
        if not directory.is_dir():
            got = "which is a file" if directory.exists() else "which does not exist"
        _check.fail(where, "directory", rule, f"{directory}, {got}")
    try:
        manifest, is_intact = _disk.read_json(file)
        version = manifest["format"]
    except (ValueError, KeyError) as error:
        rule = f"a directory with a readable {MANIFEST}"
        _check.fail(where, "directory", rule, f"{file} ({error})", REMEDY)
    if version != FORMAT:
        rule = f"a directory of snapshots of format {FORMAT}"
        remedy = "Read it with the version of optax_smile that its manifest names."
        _check.fail(where, "directory", rule, f"format {version} in {file}", remedy)
    if not is_intact:
        rule = f"a directory whose {MANIFEST} matches its checksum"
        _check.fail(where, "directory", rule, file, REMEDY)
    return manifest


def to_json(record: NamedTuple) -> Json:
    """Convert a tuple of numbers and arrays to an entry of a manifest."""
    fields = record._asdict()
    return {x: y.tolist() if isinstance(y, np.ndarray) else y for x, y in fields.items()}


def from_json(entry: Json, names: Sequence[str]) -> Options:
    """Read the fields of a tuple that `to_json` converted; lists become arrays."""
    fields = {name: entry[name] for name in names}
    return {x: np.array(y) if isinstance(y, list) else y for x, y in fields.items()}


class Block(NamedTuple):
    """A file of draws and the information in its name.

    Attributes:
        path: path of the file.
        draw: index of the draw, or `START`.
        first: first chain in the file.
        last: last chain in the file.
    """

    path: Path
    draw: int | str
    first: int
    last: int


def has_draws(directory: Path) -> bool:
    """Return whether there are files of draws; other files with similar names do not count."""
    return any((match := _FILE.fullmatch(x.name)) and match[2] for x in directory.glob("draw-*"))


def find(directory: Path, num_chains: int) -> dict[int | str, list[Block]]:
    """Find the files of the start and of every draw that is complete for all chains.

    Raises:
        ValueError: one of them is a link, pipe or device.
    """
    blocks: dict[int | str, list[Block]] = {}
    with os.scandir(directory) as entries:
        found = sorted((x.name, x.is_file(follow_symlinks=False)) for x in entries)
    for name, is_file in found:
        if match := _FILE.fullmatch(name):
            if not is_file:
                rule, got = "a directory whose draws are regular files", directory / name
                _check.fail("load_snapshots", "directory", rule, f"{got}, a link or device")
            draw = START if match[2] is None else int(match[2])
            block = Block(directory / name, draw, int(match[3]), int(match[4]))
            if block.first <= block.last < num_chains:
                blocks.setdefault(draw, []).append(block)

    def is_whole(parts):
        chains = {chain for part in parts for chain in range(part.first, part.last + 1)}
        return len(chains) == num_chains

    return {draw: parts for draw, parts in blocks.items() if is_whole(parts)}


def find_draws(directory: Path, manifest: Json) -> list[list[Block]]:
    """Return the files of all draws.

    Raises:
        ValueError: files of draws before the last one, or before the newest checkpoint, are
            missing.
    """
    # Before the files are listed, as a run may write more meanwhile.
    least = max(manifest.get("num_draws", 0), _num_checkpointed(directory))
    found = find(directory, manifest["num_chains"])
    ends = {x.path.name.partition(".")[2] for parts in found.values() for x in parts} or {"*"}
    found.pop(START, None)
    numbers = sorted(x for x in found if isinstance(x, int))
    number = max([least, *(x + 1 for x in numbers[-1:])])
    if len(numbers) < number:
        names = (f"draw-{x:08d}.{end}" for x in range(number) for end in ends if x not in found)
        missing = [x for x in itertools.islice(names, MOST_NAMED) if not (directory / x).exists()]
        rule = f"a directory with the files of all its {number} draws"
        got = f"{directory} without {', '.join(missing)}"
        _check.fail("load_snapshots", "directory", rule, got, REMEDY)
    return [found[x] for x in numbers]


def _num_checkpointed(directory: Path) -> int:
    """Return the number of draws before the newest checkpoint; 0 if it is unknown."""
    files = [x for x in directory.glob(f"{CHECKPOINTS}/*/{SUMS}") if x.parent.name.isdecimal()]
    # A damaged checkpoint leaves the draws readable.
    with contextlib.suppress(ValueError):
        newest = max(files, key=lambda file: int(file.parent.name))
        content, is_intact = _disk.read_json(newest)
        return content.get("num_draws", 0) if is_intact else 0
    return 0


def _check_header(header: Json, block: Block):
    """Require a header that matches the name of its file."""
    if (header["draw"], header["chains"]) != (block.draw, [block.first, block.last]):
        raise ValueError(f"it holds draw {header['draw']} of the chains {header['chains']}")


def read_header(block: Block) -> Json:
    """Read the header of a file, and verify its checksum."""
    with _disk.naming(block.path):
        header = _disk.read_header(block.path)
        _check_header(header, block)
    return header


def _is_rounded(dtype: DTypeLike | None) -> bool:
    """Return whether arrays of this dtype are rounded on disk: floating-point numbers only."""
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def fits(
    leaf: np.ndarray | jax.Array, dtype: str | None, tiny: float | None = None
) -> np.ndarray | jax.Array | bool:
    """Return whether a leaf keeps its finite numbers in a stored dtype, and relative precision.

    Its largest must be 0 or at least `tiny`; None: the smallest normal number of the dtype.
    """
    if dtype is None or not _is_rounded(leaf.dtype):
        return True
    kind, xp = jnp.finfo(dtype), jnp if isinstance(leaf, jax.Array) else np
    if float(jnp.finfo(leaf.dtype).max) <= float(kind.max):
        return True
    largest = xp.max(xp.abs(xp.where(xp.isfinite(leaf), leaf, 0)), initial=0)
    is_large = largest >= (float(kind.tiny) if tiny is None else tiny)
    return (largest <= float(kind.max)) & (is_large | (largest == 0))


def rounded(params: Tree, dtype: str | None) -> Tree:
    """Cast parameters to the precision that `load_snapshots` returns."""
    if dtype is None:
        return params

    def cast(x):
        xp = jnp if isinstance(x, jax.Array) else np
        with np.errstate(over="ignore"):
            return xp.where(fits(x, dtype), x.astype(dtype).astype(x.dtype), x)

    return jax.tree.map(lambda x: cast(x) if _is_rounded(x.dtype) else x, params)


def read_arrays(block: Block, leaves: list[Leaf]) -> dict[str, np.ndarray]:
    """Read the arrays of a file, and verify their checksums."""
    rows, known = block.last - block.first + 1, {leaf.name: leaf for leaf in leaves}
    with _disk.naming(block.path):
        header, arrays = _disk.read(block.path)
        _check_header(header, block)
        stored = header["arrays"]
        for name, (dtype, shape, _) in stored.items():
            own = known.get(name)
            allowed = get_args(StoredDtype) if own and _is_rounded(own.dtype) else ()
            if own is None or shape != [rows, *own.shape] or dtype not in (own.dtype, *allowed):
                raise ValueError(f"its array {name!r}, {dtype} {shape}, is not in the manifest")
        if block.draw == START and stored.keys() != known.keys():
            raise ValueError(f"it lacks {sorted(known.keys() - stored.keys())}")
    return arrays


def read_chains(
    blocks: list[Block],
    leaves: list[Leaf],
    num_chains: int,
    start: Callable[[], list[np.ndarray]] = list,
) -> list[np.ndarray]:
    """Read the leaves of a draw `[chain, ...]`; those that are not stored equal the start's."""
    read = [np.empty((num_chains, *leaf.shape), leaf.dtype) for leaf in leaves]
    for block in blocks:
        rows, stored = slice(block.first, block.last + 1), read_arrays(block, leaves)
        for number, leaf in enumerate(leaves):
            read[number][rows] = stored[leaf.name] if leaf.name in stored else start()[number][rows]
    return read


def read_start(directory: Path, leaves: list[Leaf], num_chains: int) -> list[np.ndarray]:
    """Read the leaves before the first step, `[chain, ...]`.

    Raises:
        ValueError: the file is missing or damaged.
    """
    blocks = find(directory, num_chains).get(START)
    if blocks is None:
        raise ValueError(
            f"{directory} lacks the file {START}.chains-*.safetensors, which holds the leaves that"
            " never changed. Restore it; draws that contain all leaves stay readable."
        )
    return read_chains(blocks, leaves, num_chains)


class DrawFiles:
    """Write draws to a directory.

    Each process writes its chains of a draw to one safetensors file of arrays `[chain, ...]`; with
    several processes, to one file per device. A file is complete or absent. The JSON header holds
    the result of `optax_smile.stats`, the step and checksums. Leaves that still equal the start,
    such as the frozen part of a network, are stored only with the start. A leaf that is too large
    or too small for `dtype` keeps its own precision in that draw, and `wide` has its name.

    Args:
        directory: directory of the draws.
        start: stacked parameters `[chain, ...]` before the first step, on any device.
        dtype: precision on disk, `"float16"`, `"float32"` or `"float64"`; None: that of the
            parameters.
        resumed: whether the directory already holds the start of this run, which is then used.
        names: names of the leaves; None: those of their paths.

    Raises:
        ValueError: a resumed directory without a readable start.
        OSError: a file that cannot be written.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        start: Tree,
        *,
        dtype: str | None = None,
        resumed: bool = False,
        names: Sequence[str] | None = None,
    ):
        self.directory, self.dtype = Path(directory).absolute(), dtype
        leaves = leaves_of(start)
        self.names, self.wide = list(names or (leaf.name for leaf in leaves)), set[str]()
        if resumed:
            num_chains = jax.tree.leaves(start)[0].shape[0]
            start = read_start(self.directory, leaves, num_chains)
        else:
            self.write(START, 0, start, {})
        self.unmoved: dict[str, dict[int, np.ndarray]] = {name: {} for name in self.names}
        for first, last, arrays in self._blocks(start):
            for name, array in arrays.items():
                self.unmoved[name] |= dict(zip(range(first, last + 1), array.copy(), strict=True))

    def write(self, draw: int | str, step: int, params: Tree, stats: Stats) -> list[Block]:
        """Write a draw `[chain, ...]`, on any device, with the statistics of this process."""
        blocks: list[Block] = []
        stem, done = START if draw == START else f"draw-{draw:08d}", 0
        for first, last, arrays in self._blocks(params):
            rows = slice(done, done + last - first + 1)
            arrays = arrays if draw == START else self._moved(first, arrays)
            header = {
                "draw": draw,
                "chains": [first, last],
                "step": step,
                "stats": {name: np.asarray(value)[rows].tolist() for name, value in stats.items()},
            }
            file = f"{stem}.chains-{first:05d}-{last:05d}.safetensors"
            _disk.write(self.directory / file, _disk.pack(header, arrays))
            blocks.append(Block(self.directory / file, draw, first, last))
            done = rows.stop
        return blocks

    def _blocks(self, params: Tree) -> Iterator[tuple[int, int, dict[str, np.ndarray]]]:
        """Yield the chains of this process, rounded to the stored precision."""
        for first, last, leaves in _tree.local_blocks(params):
            arrays = {}
            for name, x in zip(self.names, leaves, strict=True):
                if not (is_narrow := fits(x, self.dtype)):
                    self.wide.add(name)
                dtype = self.dtype if is_narrow and _is_rounded(x.dtype) else None
                arrays[name] = np.ascontiguousarray(x, dtype)
            yield first, last, arrays

    def _moved(self, first: int, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Drop leaves that equal the start; once a leaf has changed, it is always stored."""
        for name in list(self.unmoved):
            before = self.unmoved[name]
            if not all(np.array_equal(x, before[first + i]) for i, x in enumerate(arrays[name])):
                del self.unmoved[name]
        return {name: array for name, array in arrays.items() if name not in self.unmoved}


class SnapshotWriter:
    """Write draws in a background thread; none after one that could not be written.

    Args:
        files: files of the directory.

    Raises:
        OSError: a file that cannot be written, at the next `put`, `flush` or `close`.
    """

    def __init__(self, files: DrawFiles):
        self.files = files
        self.failure: BaseException | None = None
        self.thread = concurrent.futures.ThreadPoolExecutor(1)
        self.waiting: collections.deque[concurrent.futures.Future] = collections.deque()

    def put(self, draw: int, step: int, params: Tree, stats: Stats):
        """Queue a draw, see `DrawFiles.write`; blocks only if the queue is full."""
        while self.waiting and (self.waiting[0].done() or len(self.waiting) > QUEUE_SIZE):
            self.waiting.popleft().result()
        self.waiting.append(self.thread.submit(self._write, draw, step, params, stats))

    def flush(self):
        """Wait until every queued draw is on disk."""
        while self.waiting:
            self.waiting.popleft().result()

    def close(self):
        """Write the queued draws and end the thread."""
        with self.thread:
            self.flush()

    def _write(self, *draw):
        if self.failure is not None:
            raise self.failure
        try:
            self.files.write(*draw)
        except BaseException as error:
            self.failure = error
            raise
