"""The format of draws on disk, and the thread that writes them."""

import os
import queue
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_smile import _disk, _tree
from optax_smile.draws import _manifest
from optax_smile.draws._manifest import Leaf

# Draws that may wait for the disk: more would only hide that it is too slow.
QUEUE_SIZE = 2
# Parameters before the first step, from which leaves that never move are read.
START = "start"
_FILE = re.compile(r"(draw-(\d+)|start)\.chains-(\d+)-(\d+)\.safetensors")


class Block(NamedTuple):
    """A file and what its name says.

    Attributes:
        path: of the file.
        draw: its number, or `START`.
        first: its first chain.
        last: its last chain.
    """

    path: Path
    draw: int | str
    first: int
    last: int


def find(directory: Path, num_chains: int) -> dict[int | str, list[Block]]:
    """Find the files of every draw that all chains have written, and those of the start."""
    blocks: dict[int | str, list[Block]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        if match := _FILE.fullmatch(path.name):
            draw = START if match[2] is None else int(match[2])
            block = Block(path, draw, int(match[3]), int(match[4]))
            if block.first <= block.last < num_chains:
                blocks.setdefault(draw, []).append(block)

    def is_whole(parts):
        done = 0
        for part in sorted(parts, key=lambda part: part.first):
            if part.first <= done:
                done = max(done, part.last + 1)
        return done == num_chains

    return {draw: parts for draw, parts in blocks.items() if is_whole(parts)}


def _check_header(header: Mapping[str, Any], block: Block):
    """Require a header that fits the name of its file."""
    _, draw, first, last = block
    if (header["draw"], header["chains"]) != (draw, [first, last]):
        raise ValueError(f"it holds draw {header['draw']} of the chains {header['chains']}")
    values = {"step": [header["step"]] * (last - first + 1), **header["stats"]}
    for name, of_chains in values.items():
        kinds = {type(x) for x in of_chains}
        if not kinds <= {int, float, bool} or len(of_chains) != last - first + 1:
            raise ValueError(f"its `{name}` is no number for each chain")


def read_header(block: Block) -> dict[str, Any]:
    """Read what a file says about its draw, and test its checksum."""
    with _disk.naming(block.path):
        return _disk.read_header(block.path, lambda header: _check_header(header, block))


def _is_rounded(dtype: Any) -> bool:
    """Whether numbers may lose digits on their way to disk: whole ones may not."""
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def rounded(params: Any, dtype: str | None) -> Any:
    """Parameters as they come back from a disk on which they are rounded."""
    return jax.tree.map(
        lambda x: (
            x.astype(dtype).astype(x.dtype) if _is_rounded(dtype) and _is_rounded(x.dtype) else x
        ),
        params,
    )


def read_arrays(block: Block, leaves: list[Leaf]) -> dict[str, np.ndarray]:
    """Read the arrays of a file and test their checksums."""

    def check(header: Mapping[str, Any]):
        _check_header(header, block)
        told, rows = header["arrays"], block.last - block.first + 1
        expected = {leaf.name: ([rows, *leaf.shape], leaf.dtype) for leaf in leaves}
        for name, (dtype, shape, _) in told.items():
            wanted, own = expected.get(name, (None, None))
            rounded = _manifest.STORED_DTYPES if _is_rounded(own) else ()
            if shape != wanted or dtype not in (own, *rounded):
                raise ValueError(f"its array {name!r}, {dtype} {shape}, is none of the manifest's")
        if block.draw == START and told.keys() != expected.keys():
            raise ValueError(f"it lacks {sorted(expected.keys() - told.keys())}")

    with _disk.naming(block.path):
        return _disk.read(block.path, check)[1]


def read_chains(
    blocks: list[Block],
    leaves: list[Leaf],
    num_chains: int,
    start: Callable[[], dict[str, np.ndarray]],
) -> dict[str, np.ndarray]:
    """Read a draw of all chains, arrays `[chain, ...]`; what a file lacks is as at the start."""
    stored = [(slice(block.first, block.last + 1), read_arrays(block, leaves)) for block in blocks]
    arrays = {}
    for name, _, shape, dtype in leaves:
        # All are there before memory is asked for.
        parts = [
            (rows, here[name] if name in here else start()[name][rows]) for rows, here in stored
        ]
        arrays[name] = np.empty((num_chains, *shape), dtype)
        for rows, part in parts:
            arrays[name][rows] = part
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


class DrawFiles:
    """Write draws into a directory.

    The chains of a draw that one process holds are one safetensors file of arrays `[chain, ...]`
    (on several processes one per device), written under another name first and then renamed. Its
    header holds, as JSON, what `optax_smile.stats` said, the step, and checksums. Leaves that
    equal those of the start, such as the frozen part of a network, are stored there alone.

    Args:
        directory: where to; it is made.
        start: stacked parameters `[chain, ...]` before the first step, on any device.
        dtype: what to round to on disk, `"float16"`, `"float32"` or `"float64"`; None rounds
            nothing.
        resumed: whether the directory holds the start of this run already, which counts then.

    Raises:
        ValueError: a resumed directory without a readable start.
        OSError: a file that cannot be written.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        start: Any,
        *,
        dtype: str | None = None,
        resumed: bool = False,
    ):
        self.directory, self.dtype = Path(directory).absolute(), dtype
        leaves = _manifest.leaves_of(start)
        self.names = [leaf.name for leaf in leaves]
        if resumed:
            num_chains = jax.tree.leaves(start)[0].shape[0]
            start = read_start(self.directory, leaves, num_chains)
        else:
            self.write(START, 0, start, {})
        self.unmoved: dict[str, dict[int, np.ndarray]] = {name: {} for name in self.names}
        for first, last, arrays in self._blocks(start):
            for name, array in arrays.items():
                self.unmoved[name] |= dict(zip(range(first, last + 1), array.copy(), strict=True))

    def write(self, draw: int | str, step: int, params: Any, stats: Mapping[str, Any]):
        """Write a draw.

        Args:
            draw: its number, from 0, or `START`.
            step: steps done by each chain.
            params: stacked parameters `[chain, ...]`, on any device.
            stats: arrays `[chain]` of the chains of this process.
        """
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
            done = rows.stop

    def _blocks(self, params: Any) -> Iterator[tuple[int, int, dict[str, np.ndarray]]]:
        """Chains of this process, rounded as they are stored."""
        for first, last, leaves in _tree.local_blocks(params):
            rounded = [
                np.ascontiguousarray(x, self.dtype if _is_rounded(x.dtype) else None)
                for x in leaves
            ]
            yield first, last, dict(zip(self.names, rounded, strict=True))

    def _moved(self, first: int, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Leave out what is as at the start; a leaf that has moved once is stored ever after."""
        for name in list(self.unmoved):
            before = self.unmoved[name]
            if not all(np.array_equal(x, before[first + i]) for i, x in enumerate(arrays[name])):
                del self.unmoved[name]
        return {name: array for name, array in arrays.items() if name not in self.unmoved}


class SnapshotWriter:
    """Write draws from a thread of its own.

    Args:
        files: where to.

    Raises:
        OSError: a file that cannot be written, at the next `put`, `flush` or `close`.
    """

    def __init__(self, files: DrawFiles):
        self.files = files
        self.failure: BaseException | None = None
        self.waiting: queue.Queue = queue.Queue(QUEUE_SIZE)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def put(self, draw: int, step: int, params: Any, stats: Mapping[str, Any]):
        """Hand over a draw, see `DrawFiles.write`; waits only if the disk is behind."""
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
                    self.files.write(*item)
                except BaseException as error:
                    self.failure = error
            self.waiting.task_done()
