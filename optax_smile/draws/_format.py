"""The directory of a run: its manifest, the files of its draws and the thread that writes them."""

import collections
import concurrent.futures
import contextlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from optax_smile import _check, _disk, _on_host, _paths
from optax_smile._disk import Json
from optax_smile._version import __version__

FORMAT = 5
MANIFEST = "manifest.json"
# Precisions to which draws may be rounded on disk.
StoredDtype = Literal["float16", "float32", "float64"]
REMEDY = "Restore it: a run with the same arguments in a new directory writes an identical one."
# Number of draws that may wait for the disk.
QUEUE_SIZE = 2
# Parameters before the first step.
START = "start"
_FILE = re.compile(r"(draw-([0-9]{8,10})|start)\.chains-([0-9]{5,10})-([0-9]{5,10})\.safetensors")
CHECKPOINT = re.compile(r"checkpoint-([0-9]{10})\.part-([0-9]{5})-of-([0-9]{5})\.safetensors")
# Statistics of the draws of some chains, arrays `[chain]`.
Stats: TypeAlias = Mapping[str, np.ndarray]


class Leaf(NamedTuple):
    """One array of the parameters of one chain, with a unique name; files may be less precise.

    `path` has pairs of kind (`key`, `index` or `attribute`) and entry.
    """

    name: str
    path: list[list[str | int]]
    shape: list[int]
    dtype: str


def leaves_of(params: object, axes: int = 1) -> list[Leaf]:
    """Describe the leaves of parameters; `axes` counts the axes before those of one chain."""
    leaves = []
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        path = [_paths.entry(key) for key in keys]
        # A bare array has no path, and safetensors reserves one name.
        name = _paths.name(path) if path else "params"
        name = "~" + name if name == "__metadata__" else name
        shape, dtype = np.shape(leaf)[axes:], str(getattr(leaf, "dtype", type(leaf)))
        leaves.append(Leaf(name, path, list(shape), dtype))
    return leaves


def manifest_of(params: object, dtype: str | None, settings: Mapping) -> Json:
    """Make the manifest of a run with stacked parameters, whose draws are rounded to `dtype`."""
    leaves, libraries = leaves_of(params), (jax, optax, np, _disk.import_safetensors())
    if len({leaf.name for leaf in leaves}) < len(leaves):
        rule = "a tree whose leaves have distinct paths"
        _check.fail("params", rule, sorted(leaf.name for leaf in leaves))
    described = {
        "format": FORMAT,
        "num_chains": int(jax.tree.leaves(params)[0].shape[0]),
        "leaves": [leaf._asdict() for leaf in leaves],
        "stored_dtype": dtype,
        "settings": dict(settings),
        "versions": {"optax-smile": __version__, **{x.__name__: x.__version__ for x in libraries}},
    }
    return json.loads(json.dumps(described))


def write_manifest(directory: Path, manifest: Json):
    """Write a manifest with its checksum, in the first of several processes."""
    if jax.process_index() == 0:
        _disk.write_json(directory / MANIFEST, manifest)


def read_manifest(directory: Path) -> Json:
    """Read the manifest of a directory; an error if it is missing, damaged or of another format."""
    file = directory / MANIFEST

    def refuse(rule: str, got: object, advice: str = REMEDY) -> NoReturn:
        _check.fail("directory", f"a directory {rule}", got, advice)

    if not os.path.lexists(file):
        what = "without one" if directory.is_dir() else "which is none"
        refuse(f"of stored draws, with a {MANIFEST}", f"{directory}, {what}", "")
    try:
        manifest, is_intact = _disk.read_json(file)
        version, writer = manifest["format"], manifest["versions"]["optax-smile"]
    except (ValueError, KeyError, TypeError) as error:
        refuse(f"with a readable {MANIFEST}", f"{file} ({error})")
    if version != FORMAT:
        got = f"format {version} in {file}, written by optax_smile {writer}"
        refuse(f"of snapshots of format {FORMAT}", got, "Read it with that version.")
    if not is_intact:
        refuse(f"whose {MANIFEST} matches its checksum", file)
    return manifest


class Block(NamedTuple):
    """A file of a draw, or of the `START`, and the first and last chain in it."""

    path: Path
    draw: int | str
    first: int
    last: int


def has_draws(directory: Path) -> bool:
    """Return whether there are files of draws."""
    return any((match := _FILE.fullmatch(x.name)) and match[2] for x in directory.glob("draw-*"))


def find(directory: Path, num_chains: int) -> dict[int | str, list[Block]]:
    """Find the files of the start and of every draw that is complete for all chains."""
    found: dict[int | str, list[Block]] = {}
    for path in sorted(directory.iterdir()):
        if match := _FILE.fullmatch(path.name):
            if path.is_symlink() or not path.is_file():
                rule, got = "a directory whose draws are regular files", f"{path}, a link or device"
                _check.fail("directory", rule, got)
            draw = START if match[2] is None else int(match[2])
            block = Block(path, draw, int(match[3]), int(match[4]))
            if block.first <= block.last < num_chains:
                found.setdefault(draw, []).append(block)

    def is_whole(parts: list[Block]) -> bool:
        chains = set().union(*(range(part.first, part.last + 1) for part in parts))
        return len(chains) == num_chains

    return {draw: parts for draw, parts in found.items() if is_whole(parts)}


def find_draws(directory: Path, manifest: Json) -> list[list[Block]]:
    """Return the files of all draws; an error if some before the newest checkpoint are missing."""
    number = 0
    # Read this before listing the draws, since a run may write more meanwhile. Draws stay readable
    # if the checkpoint is damaged.
    for files in [*find_checkpoints(directory).values()][-1:]:
        with contextlib.suppress(ValueError), _disk.naming(files[0]):
            number = int(_disk.read(files[0], only_header=True)[0]["place"].get("num_kept", 0))
    found = find(directory, manifest["num_chains"])
    found.pop(START, None)
    number = max([number, *(x + 1 for x in found if isinstance(x, int))])
    if len(found) < number:
        missing = next(x for x in range(number) if x not in found)
        rule = f"a directory with the files of all its {number} draws"
        _check.fail("directory", rule, f"{directory} without draw-{missing:08d}.*", REMEDY)
    return [found[x] for x in range(number)]


def find_checkpoints(directory: Path) -> dict[int, list[Path]]:
    """Find the files of all checkpoints that every process has written, in order."""
    found: dict[tuple[int, int], list[Path]] = {}
    for path in sorted(directory.glob("checkpoint-*")):
        if match := CHECKPOINT.fullmatch(path.name):
            found.setdefault((int(match[1]), int(match[3])), []).append(path)
    whole = ((number, x) for (number, parts), x in sorted(found.items()) if len(x) == parts)
    return dict(whole)


def read_header(block: Block) -> Json:
    """Read the header of a file, and verify its checksum."""
    with _disk.naming(block.path):
        return _disk.read(block.path, only_header=True)[0]


def _is_rounded(dtype: DTypeLike) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def fits(leaf: np.ndarray, dtype: str | None) -> bool:
    """Return whether finite numbers of a leaf stay finite and precise in a stored dtype."""
    if dtype is None or not _is_rounded(leaf.dtype):
        return True
    kind = jnp.finfo(dtype)
    if float(jnp.finfo(leaf.dtype).max) <= float(kind.max):
        return True
    largest = float(np.max(np.abs(np.where(np.isfinite(leaf), leaf, 0)), initial=0))
    return largest == 0 or float(kind.tiny) <= largest <= float(kind.max)


def read_chains(blocks: list[Block], leaves: list[Leaf], num_chains: int) -> list[np.ndarray]:
    """Read the leaves of a draw `[chain, ...]`, and verify names, shapes and checksums."""
    read: list[np.ndarray] = []
    for block in blocks:
        rows = slice(block.first, block.last + 1)
        with _disk.naming(block.path):
            _, arrays = _disk.read(block.path)
            if arrays.keys() != {leaf.name for leaf in leaves}:
                raise ValueError(f"it holds {sorted(arrays)}")
            for name, _, shape, dtype in leaves:
                array, allowed = arrays[name], get_args(StoredDtype) if _is_rounded(dtype) else ()
                wanted = (block.last - block.first + 1, *shape)
                if array.shape != wanted or str(array.dtype) not in (dtype, *allowed):
                    raise ValueError(f"its array {name!r} is {array.dtype} {array.shape}")
        # Allocate only after the first file agrees with the shapes in the manifest.
        read = read or [np.empty((num_chains, *leaf.shape), leaf.dtype) for leaf in leaves]
        for whole, leaf in zip(read, leaves, strict=True):
            whole[rows] = arrays[leaf.name]
    return read


class DrawFiles:
    """Writes draws to a directory, now or in a background thread.

    Each process writes its chains of a draw to one file of arrays `[chain, ...]`, with several
    processes one per device. The header has the step and the result of `optax_smile.stats`. Numbers
    are rounded to `dtype`, unless it is None. A leaf that is too large or too small for it keeps
    its own precision in that draw, and `wide` has its name.
    """

    def __init__(self, directory: Path, leaves: list[Leaf], dtype: str | None = None):
        self.directory, self.leaves, self.dtype = directory.absolute(), leaves, dtype
        self.wide, self.has_failed = set[str](), False
        self.thread = concurrent.futures.ThreadPoolExecutor(1)
        self.waiting: collections.deque[concurrent.futures.Future] = collections.deque()

    def write(self, draw: int | str, step: int, params: object, stats: Stats) -> list[Block]:
        """Write a draw `[chain, ...]`, on any device, with the statistics of this process."""
        blocks: list[Block] = []
        stem, done = START if draw == START else f"draw-{draw:08d}", 0
        for first, last, leaves in _on_host.local_blocks(params):
            rows = slice(done, done := done + last - first + 1)
            file = self.directory / f"{stem}.chains-{first:05d}-{last:05d}.safetensors"
            mine = {name: np.asarray(value)[rows].tolist() for name, value in stats.items()}
            names = [leaf.name for leaf in self.leaves]
            arrays = dict(zip(names, map(self.rounded, names, leaves), strict=True))
            header = {"file": file.name, "step": step, "stats": mine}
            _disk.write(file, _disk.pack(header, arrays))
            blocks.append(Block(file, draw, first, last))
        return blocks

    def rounded(self, name: str, leaf: np.ndarray) -> np.ndarray:
        """Return a leaf as it is stored."""
        if not (is_narrow := fits(leaf, self.dtype)):
            self.wide.add(name)
        return leaf.astype(self.dtype) if is_narrow and _is_rounded(leaf.dtype) else leaf

    def put(self, draw: int, step: int, params: object, stats: Stats):
        """Queue a draw, see `write`; blocks only if the queue is full.

        A draw that could not be written raises an error here, in `flush` or in `close`.
        """

        def write():
            # None after a draw that could not be written.
            if not self.has_failed:
                self.has_failed = True
                self.write(draw, step, params, stats)
                self.has_failed = False

        while self.waiting and (self.waiting[0].done() or len(self.waiting) > QUEUE_SIZE):
            self.waiting.popleft().result()
        self.waiting.append(self.thread.submit(write))

    def flush(self):
        """Wait until every queued draw is on disk."""
        while self.waiting:
            self.waiting.popleft().result()

    def close(self):
        """Write the queued draws and end the thread."""
        with self.thread:
            self.flush()
