"""Posterior draws, in memory and on disk."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from optax_smile import _check, _disk, _table, parallel
from optax_smile.draws import _checks, _files, _manifest
from optax_smile.draws._sequence import Draws


@dataclasses.dataclass(frozen=True, repr=False, init=False)
class Snapshots(Draws):
    """Draws of several chains: a sequence of parameter trees, ordered draw by draw.

    The first draws of all chains come first, then the second draws: `draws[i]` is draw
    `i // num_chains` of chain `i % num_chains`, and `len(draws)` is the number of draws of all
    chains. A slice is a list of trees, which `predict` accepts. For all draws of a chain, index
    `params`.

    Attributes:
        params: tree of NumPy arrays, each `[chain, draw, ...]`.
        trace: results of `optax_smile.stats` at every thinning tick, warm-up included: arrays
            `[chain, tick]`. The draws are the last ticks (of those with `is_draw`). Empty for
            weights without a sampler.
        settings: name and arguments of the sampler; `{"name": "optimizer", "is_posterior": False}`
            for an optimizer, whose iterates are not posterior draws; None for weights without
            either.
        start: initial parameters of the chains, a tree of arrays `[chain, ...]`; None for weights
            without a sampler.

    Example:
        >>> import numpy as np, optax_smile
        >>> draws = optax_smile.Snapshots({"w": np.arange(30.0).reshape(2, 5, 3)})
        >>> len(draws), draws[-1]["w"], len(draws[4:6])
        (10, array([27., 28., 29.]), 2)
        >>> draws
        Snapshots: 2 chains of 5 draws
          size    3 numbers per draw, 240 bytes in total
          arrays  w float64[3]
    """

    params: Any
    trace: Mapping[str, np.ndarray]
    settings: Mapping[str, Any] | None = None
    start: Any = None

    @_check.arguments(
        "Snapshots",
        params=_checks.Stacked(),
        trace=_check.kind(Mapping, "a dict of arrays [chain, tick]"),
        settings=_check.kind(Mapping, "a dict") | None,
        start=_check.Tree(),
    )
    def __init__(
        self,
        params: Any,
        trace: Mapping[str, np.ndarray] = _check.NOTHING,
        settings: Mapping[str, Any] | None = None,
        start: Any = None,
    ):
        if start is not None:
            shapes = jax.tree.map(lambda x: (*np.shape(x)[:1], *np.shape(x)[2:]), params)
            if (got := jax.tree.map(np.shape, start)) != shapes:
                rule = f"a tree of arrays [chain, ...] that matches `params`, {shapes}"
                _check.fail("Snapshots", "start", rule, got)
        # A frozen dataclass does not allow assignment.
        vars(self).update(params=params, trace=dict(trace), settings=settings, start=start)

    @classmethod
    @_check.arguments(
        "Snapshots.from_members", params=_check.Tree("a tree of arrays [member, ...]", keys=False)
    )
    def from_members(cls, params: optax.Params) -> Snapshots:
        """Make snapshots of stacked members `[member, ...]`, such as `warmstart` returns.

        Each member is a chain with one draw.
        """
        parallel.num_chains("Snapshots.from_members", params)
        return cls(jax.tree.map(lambda x: np.asarray(x)[:, None], params))

    @property
    def num_chains(self) -> int:
        """Number of chains."""
        return jax.tree.leaves(self.params)[0].shape[0]

    @property
    def num_draws(self) -> int:
        """Number of draws per chain."""
        return jax.tree.leaves(self.params)[0].shape[1]

    def _of_draw(self, draw: int, chains: Sequence[int]) -> Iterator[Any]:
        for chain in chains:
            yield jax.tree.map(lambda x, at=(chain, draw): x[at], self.params)

    def _arrays(self) -> list[_manifest.Leaf]:
        return _manifest.leaves_of(
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self.params)
        )

    def _place(self) -> dict[str, str]:
        ticks = {np.shape(values)[-1] for values in self.trace.values()}
        names = f"{_table.some(self.trace)} at {_table.counted(max(ticks, default=0), 'tick')}"
        return {"trace": names} if self.trace else {}


class StoredSnapshots(Draws):
    """Draws in a directory, read on demand: a sequence of parameter trees, ordered draw by draw.

    Made by `load_snapshots`. Indices, slices and length are those of `Snapshots`; `draws[i]` reads
    one draw. `trace` holds the statistics of the draws, `[chain, draw]`. `params` reads all draws
    into memory, `[chain, draw, ...]`, and `start` the initial parameters, `[chain, ...]`.
    `manifest` is the content of the manifest, and `settings` the name and arguments of the sampler
    or optimizer, as in `Snapshots`.
    """

    def __init__(self, directory: Path, manifest: Mapping[str, Any], like: Any, flat: bool):
        # Draws are read later, when the working directory may have changed.
        self.directory: Path = directory.absolute()
        self.manifest: Mapping[str, Any] = manifest
        self.flat: bool = flat
        self.leaves: list[_manifest.Leaf] = [_manifest.Leaf(**leaf) for leaf in manifest["leaves"]]
        self.structure: Any = None if like is None else jax.tree.structure(like)
        found = _files.find(self.directory, self.num_chains)
        found.pop(_files.START, None)
        self.arrays_of_start: dict[str, np.ndarray] | None = None
        self.draws: list[list[_files.Block]] = [found[draw] for draw in sorted(found)]

    @property
    def num_chains(self) -> int:
        """Number of chains."""
        return self.manifest["num_chains"]

    @property
    def settings(self) -> Mapping[str, Any] | None:
        """Name and arguments of the sampler."""
        return self.manifest["settings"].get("sampler")

    @property
    def num_draws(self) -> int:
        """Number of draws per chain on disk when the directory was loaded."""
        return len(self.draws)

    def _arrays(self) -> list[_manifest.Leaf]:
        return self.leaves

    def _place(self) -> dict[str, str]:
        return {"folder": str(self.directory)}

    def _of_draw(self, draw: int, chains: Sequence[int]) -> Iterator[Any]:
        arrays = self._read(self.draws[draw])
        for chain in chains:
            yield self._tree({name: array[chain] for name, array in arrays.items()})

    @property
    def params(self) -> Any:
        """All draws in memory, a tree of arrays `[chain, draw, ...]`."""
        read = [self._read(blocks) for blocks in self.draws]
        names = [leaf.name for leaf in self.leaves]
        return self._tree({name: np.stack([one[name] for one in read], 1) for name in names})

    @property
    def start(self) -> Any:
        """Initial parameters of the chains, a tree of arrays `[chain, ...]`."""
        return self._tree(self._start())

    @functools.cached_property
    def trace(self) -> dict[str, np.ndarray]:
        """Results of `optax_smile.stats` and the step at each draw, arrays `[chain, draw]`."""
        draws = []
        for blocks in self.draws:
            seen: dict[str, np.ndarray] = {}
            for block in blocks:
                header = _files.read_header(block)
                for name, values in {**header["stats"], "step": header["step"]}.items():
                    default = np.empty(self.num_chains, np.asarray(values).dtype)
                    seen.setdefault(name, default)[block.first : block.last + 1] = values
                with _disk.naming(block.path):
                    if draws and seen.keys() != draws[0].keys():
                        raise ValueError(f"it holds {sorted(seen)}, not {sorted(draws[0])}")
            draws.append(seen)
        names = draws[0] if draws else ()
        return {name: np.stack([seen[name] for seen in draws], axis=1) for name in names}

    @_check.arguments(every=_check.Whole(1))
    def thinned(self, every: int) -> StoredSnapshots:
        """Select the last draw and every `every`-th (>= 1) before it, without reading them."""
        thinned = copy.copy(self)
        vars(thinned).pop("trace", None)
        thinned.draws = self.draws[::-1][::every][::-1]
        return thinned

    def _read(self, blocks: list[_files.Block]) -> dict[str, np.ndarray]:
        return _files.read_chains(blocks, self.leaves, self.num_chains, self._start)

    def _start(self) -> dict[str, np.ndarray]:
        if self.arrays_of_start is None:
            arrays = _files.read_start(self.directory, self.leaves, self.num_chains)
            self.arrays_of_start = arrays
        return self.arrays_of_start

    def _tree(self, arrays: dict[str, np.ndarray]) -> Any:
        if self.flat:
            return arrays
        if self.structure is not None:
            return jax.tree.unflatten(self.structure, [arrays[leaf.name] for leaf in self.leaves])
        return _nest([(leaf.path, arrays[leaf.name]) for leaf in self.leaves])


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


@_check.arguments(directory=_check.PathLike(), like=_check.Tree(), flat=_check.FLAG)
def load_snapshots(
    directory: str | os.PathLike[str], *, like: Any = None, flat: bool = False
) -> StoredSnapshots:
    """Open the draws that `sample(directory=...)` wrote, or is still writing.

    Needs neither the training code nor a device: the arrays are NumPy arrays.

    Args:
        directory: directory of the run.
        like: parameters of one chain, or their shapes; draws are returned in this tree structure.
            Without it they are nested dicts and lists.
        flat: return each draw as a dict from path to array instead. Entries of a path are joined by
            slashes; `~` and `/` in an entry are written `~0` and `~1`.

    Returns:
        `StoredSnapshots`, an iterable of parameter trees that `predict` accepts. To see draws
        written later, load again.

    Raises:
        ValueError: a manifest that is missing, damaged or of another format; `like` with other
            leaves than the draws. When a draw is read: a damaged file or a link, named in the
            message.

    Cost: reads the manifest and lists the files; reads a draw, and verifies its checksums, on
    access.

    Example:
        >>> import jax, jax.numpy as jnp, optax_smile, tempfile
        >>> loss_fn = lambda params, batch: jnp.sum((params["w"] - batch) ** 2) / 2
        >>> directory = tempfile.mkdtemp()
        >>> _ = optax_smile.sample(
        ...     loss_fn, {"w": jnp.eye(3, 2)}, [jnp.ones(2)],
        ...     optax_smile.smile(0.1, num_data=10, key=0), num_warmup=0, num_draws=5,
        ...     key=jax.random.key(0), directory=directory, progress=False,
        ... )
        >>> draws = optax_smile.load_snapshots(directory)
        >>> len(draws), draws.params["w"].shape
        (15, (3, 5, 2))
    """
    directory = Path(directory)
    manifest = _manifest.read("load_snapshots", directory)
    if like is not None:
        shapes = jax.eval_shape(lambda x: x, like)
        stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), shapes)
        given = [(leaf.name, leaf.shape) for leaf in _manifest.leaves_of(stacked)]
        stored = [(leaf["name"], leaf["shape"]) for leaf in manifest["leaves"]]
        if given != stored:
            differing = [pair for pair in given if pair not in stored] or given
            rule = f"a tree with the leaves of the draws in {directory}, {stored}"
            _check.fail("load_snapshots", "like", rule, differing)
    return StoredSnapshots(directory, manifest, like, flat)
