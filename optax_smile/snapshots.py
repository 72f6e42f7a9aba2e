"""Posterior draws, in memory and on disk."""

import dataclasses
import json
import os
import queue
import threading
import zlib
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from optax_smile import _check

FORMAT = 1
MANIFEST = "manifest.json"
# What numbers may be rounded to on their way to disk.
STORED_DTYPES = ("float16", "float32", "float64")
# Draws that may wait for the disk: more would only hide that it is too slow.
QUEUE_SIZE = 2


@dataclasses.dataclass(frozen=True)
class Snapshots:
    """Draws of several chains, an iterable of parameter trees chain by chain.

    Attributes:
        params: tree of NumPy arrays, each `[chain, draw, ...]`.
        trace: what `optax_smile.stats` said at every thinning tick, warm-up included: arrays
            `[chain, tick]`, the draws being the last ticks (of those with `is_sample`). Empty for
            weights without a sampler.

    Example:
        >>> import numpy as np, optax_smile
        >>> draws = optax_smile.Snapshots({"w": np.zeros((2, 5, 3))})
        >>> len(draws), next(iter(draws))["w"].shape
        (10, (3,))
    """

    params: Any
    trace: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        axes = {np.shape(leaf)[:2] for leaf in jax.tree.leaves(self.params)}
        if len(axes) != 1 or len(next(iter(axes))) != 2:
            rule = "a tree of arrays [chain, draw, ...] with the same two leading axes"
            _check.fail("Snapshots", "params", rule, sorted(axes))

    @classmethod
    def from_members(cls, params: optax.Params) -> "Snapshots":
        """Take stacked members `[member, ...]`, such as `warmstart` returns, as one draw each."""
        return cls(jax.tree.map(lambda x: np.asarray(x)[:, None], params))

    @property
    def num_chains(self) -> int:
        """Number of chains."""
        return jax.tree.leaves(self.params)[0].shape[0]

    @property
    def num_draws(self) -> int:
        """Number of draws per chain."""
        return jax.tree.leaves(self.params)[0].shape[1]

    def __len__(self) -> int:
        return self.num_chains * self.num_draws

    def __iter__(self) -> Iterator[Any]:
        for chain in range(self.num_chains):
            for draw in range(self.num_draws):
                yield jax.tree.map(lambda x, at=(chain, draw): x[at], self.params)


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


def _describe(params: Any) -> list[Leaf]:
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


def _draw_file(directory: Path, draw: int) -> Path:
    return directory / f"draw-{draw:08d}.safetensors"


def _draw_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("draw-*.safetensors"))


def _checksum(arrays: Mapping[str, np.ndarray]) -> str:
    value = 0
    for name in sorted(arrays):
        value = zlib.crc32(
            np.ascontiguousarray(arrays[name]).data, zlib.crc32(name.encode(), value)
        )
    return f"{value:08x}"


def _write(path: Path, content: bytes):
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


def _import_safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            "Draws on disk need safetensors: pip install 'optax-smile[storage]'."
        ) from error
    return safetensors


class SnapshotWriter:
    """Write draws into a directory from a thread of its own.

    A draw is one safetensors file with the arrays of all chains `[chain, ...]`, written under
    another name first and then renamed. Its header holds, as JSON, what `optax_smile.stats` said,
    the step, and a checksum. `manifest.json` describes the tree and the versions of the libraries.

    Args:
        directory: new or without draws; it is made.
        params: stacked parameters `[chain, ...]` or their shapes.
        dtype: what to round to on disk, `"float16"`, `"float32"` or `"float64"`; None rounds
            nothing.
        settings: anything that JSON can hold, kept in the manifest.

    Raises:
        ValueError: an unknown dtype, or a directory with draws.
        OSError: a file that cannot be written, here or at the next `put` or `close`.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        params: Any,
        *,
        dtype: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ):
        _import_safetensors()
        if dtype is not None:
            _check.choice("sample", "dtype", dtype, STORED_DTYPES)
        self.directory, self.dtype = Path(directory), dtype
        if _draw_files(self.directory):
            rule = "a directory without draws"
            got = f"{self.directory}, which holds those of another run"
            _check.fail("sample", "directory", rule, got, "Choose another, or remove it.")
        self.leaves = _describe(params)
        self.directory.mkdir(parents=True, exist_ok=True)
        manifest = {
            "format": FORMAT,
            "num_chains": int(jax.tree.leaves(params)[0].shape[0]),
            "leaves": [leaf._asdict() for leaf in self.leaves],
            "stored_dtype": dtype,
            "settings": dict(settings or {}),
            "versions": {
                name: metadata.version(name)
                for name in ("optax-smile", "jax", "optax", "numpy", "safetensors")
            },
        }
        _write(self.directory / MANIFEST, json.dumps(manifest, indent=1).encode())
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
            stats: arrays `[chain]`.
        """
        self._raise_failure()
        self.waiting.put((draw, step, params, stats))

    def close(self):
        """Wait until every draw is on disk."""
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

    def _store(self, draw: int, step: int, params: Any, stats: Mapping[str, Any]):
        arrays = {
            leaf.name: np.ascontiguousarray(np.asarray(x, dtype=self.dtype))
            for leaf, x in zip(self.leaves, jax.tree.leaves(params), strict=True)
        }
        header = {
            "draw": draw,
            "step": step,
            "stats": {name: np.asarray(value).tolist() for name, value in stats.items()},
            "checksum": _checksum(arrays),
        }
        save = _import_safetensors().numpy.save
        content = save(arrays, metadata={"optax_smile": json.dumps(header)})
        _write(_draw_file(self.directory, draw), content)


class StoredSnapshots:
    """Draws in a directory, read when they are needed: an iterable of trees draw by draw.

    Made by `load_snapshots`. `trace` holds the statistics of the draws, `[chain, draw]`; `params`
    reads all draws into memory, `[chain, draw, ...]`.
    """

    def __init__(self, directory: Path, manifest: Mapping[str, Any], like: Any, flat: bool):
        self.directory, self.manifest, self.flat = directory, manifest, flat
        self.leaves = [Leaf(**leaf) for leaf in manifest["leaves"]]
        self.structure = None if like is None else jax.tree.structure(like)
        self.files = _draw_files(directory)

    @property
    def num_chains(self) -> int:
        """Number of chains."""
        return self.manifest["num_chains"]

    @property
    def num_draws(self) -> int:
        """Number of draws per chain that were on disk when the directory was loaded."""
        return len(self.files)

    def __len__(self) -> int:
        return self.num_chains * self.num_draws

    def __iter__(self) -> Iterator[Any]:
        for file in self.files:
            arrays = self._read(file)
            for chain in range(self.num_chains):
                yield self._tree({name: array[chain] for name, array in arrays.items()})

    @property
    def params(self) -> Any:
        """All draws in memory, a tree of arrays `[chain, draw, ...]`."""
        read = [self._read(file) for file in self.files]
        names = [leaf.name for leaf in self.leaves]
        return self._tree({name: np.stack([one[name] for one in read], 1) for name in names})

    @property
    def trace(self) -> dict[str, np.ndarray]:
        """What `optax_smile.stats` said at each draw, arrays `[chain, draw]`, and the steps."""
        headers = [self._header(file) for file in self.files]
        names = headers[0]["stats"] if headers else ()
        traced = {name: np.stack([h["stats"][name] for h in headers], axis=1) for name in names}
        steps = np.array([header["step"] for header in headers])
        return traced | {"step": np.broadcast_to(steps, (self.num_chains, len(steps)))}

    def _header(self, file: Path) -> dict[str, Any]:
        safetensors = _import_safetensors()
        try:
            with safetensors.safe_open(file, framework="numpy") as content:
                return json.loads(content.metadata()["optax_smile"])
        except Exception as error:
            raise _damaged(file, error) from error

    def _read(self, file: Path) -> dict[str, np.ndarray]:
        header = self._header(file)
        try:
            arrays = _import_safetensors().numpy.load_file(file)
        except Exception as error:
            raise _damaged(file, error) from error
        if _checksum(arrays) != header["checksum"]:
            raise _damaged(file, "its checksum does not fit its content")
        return {leaf.name: arrays[leaf.name].astype(leaf.dtype) for leaf in self.leaves}

    def _tree(self, arrays: dict[str, np.ndarray]) -> Any:
        if self.flat:
            return arrays
        if self.structure is not None:
            return jax.tree.unflatten(self.structure, [arrays[leaf.name] for leaf in self.leaves])
        return _nest([(leaf.path, arrays[leaf.name]) for leaf in self.leaves])


def _damaged(file: Path, error: Any) -> ValueError:
    return ValueError(
        f"The snapshot {file} is damaged ({error}). Remove it: the other draws stay readable."
    )


def _nest(leaves: list[tuple[list[list[Any]], np.ndarray]]) -> Any:
    """Rebuild nested dicts and lists from paths."""
    if len(leaves) == 1 and not leaves[0][0]:
        return leaves[0][1]
    groups: dict[Any, list] = {}
    for (first, *rest), array in leaves:
        groups.setdefault(first[1], []).append((rest, array))
    nested = {entry: _nest(group) for entry, group in groups.items()}
    is_list = leaves[0][0][0][0] == "index" and list(nested) == list(range(len(nested)))
    return list(nested.values()) if is_list else nested


def load_snapshots(
    directory: str | os.PathLike, *, like: Any = None, flat: bool = False
) -> StoredSnapshots:
    """Open the draws that `sample(directory=...)` wrote, also while it still writes.

    Needs none of the training code and no device: arrays are NumPy's.

    Args:
        directory: where the draws are.
        like: parameters of one chain, or their shapes, whose tree the draws get back. Without it
            they are nested dicts and lists.
        flat: give each draw as a dict from path to array instead.

    Returns:
        `StoredSnapshots`, an iterable of parameter trees that `predict` takes. Draws that are
        written later are found by loading again.

    Raises:
        ValueError: no manifest, a manifest of another format, `like` with other leaves than the
            draws; when a draw is read, a damaged file, which the message names.

    Cost: reads the manifest and the names of the files; a draw is read when it is asked for.

    Example:
        >>> import jax, jax.numpy as jnp, optax_smile, tempfile
        >>> loss_fn = lambda params, batch: jnp.sum((params["w"] - batch) ** 2) / 2
        >>> directory = tempfile.mkdtemp()
        >>> _ = optax_smile.sample(
        ...     loss_fn, {"w": jnp.zeros((3, 2))}, [jnp.ones(2)],
        ...     optax_smile.smile_naive(0.1, num_data=10), num_warmup=0, num_samples=5,
        ...     key=jax.random.key(0), directory=directory, progress=False,
        ... )
        >>> draws = optax_smile.load_snapshots(directory)
        >>> len(draws), draws.params["w"].shape
        (15, (3, 5, 2))
    """
    directory = Path(directory)
    file = directory / MANIFEST
    if not file.exists():
        rule = f"a directory with a {MANIFEST}"
        _check.fail("load_snapshots", "directory", rule, directory)
    try:
        manifest = json.loads(file.read_text())
        version = manifest["format"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        rule = f"a directory with a readable {MANIFEST}"
        _check.fail("load_snapshots", "directory", rule, f"{file} ({error})")
    if version != FORMAT:
        rule = f"a directory of snapshots of format {FORMAT}"
        remedy = "Read it with the version of optax_smile that its manifest names."
        _check.fail("load_snapshots", "directory", rule, f"format {version} in {file}", remedy)
    if like is not None:
        stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), like)
        given = [(leaf.name, leaf.shape) for leaf in _describe(stacked)]
        stored = [(leaf["name"], leaf["shape"]) for leaf in manifest["leaves"]]
        if given != stored:
            differing = [pair for pair in given if pair not in stored] or given
            rule = f"a tree with the leaves of the draws in {directory}, {stored}"
            _check.fail("load_snapshots", "like", rule, differing)
    return StoredSnapshots(directory, manifest, like, flat)
