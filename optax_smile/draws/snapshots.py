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
    """Draws of several chains, a sequence of parameter trees draw by draw.

    First come the first draws of all chains, then the second ones: `draws[i]` is the draw
    `i // num_chains` of the chain `i % num_chains`, and `len(draws)` counts all draws of all
    chains. A slice is a list of trees, which `predict` takes. All draws of a chain are in `params`.

    Attributes:
        params: tree of NumPy arrays, each `[chain, draw, ...]`.
        trace: what `optax_smile.stats` said at every thinning tick, warm-up included: arrays
            `[chain, tick]`, the draws being the last ticks (of those with `is_draw`). Empty for
            weights without a sampler.
        settings: name and arguments of the sampler; `{"name": "optimizer", "is_posterior": False}`
            where an optimizer took its place, whose iterates are no posterior draws; None for
            weights without either.
        start: where the chains began, a tree of arrays `[chain, ...]`; None for weights without a
            sampler.

    Example:
        >>> import numpy as np, optax_smile
        >>> draws = optax_smile.Snapshots({"w": np.arange(30.0).reshape(2, 5, 3)})
        >>> len(draws), draws[-1]["w"], len(draws[4:6])
        (10, array([27., 28., 29.]), 2)
        >>> draws
        Snapshots: 2 chains of 5 draws
          size    3 numbers in a draw, 240 bytes in all
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
                rule = f"a tree of arrays [chain, ...] as in `params`, {shapes}"
                _check.fail("Snapshots", "start", rule, got)
        # Nothing can be assigned to a frozen dataclass.
        vars(self).update(params=params, trace=dict(trace), settings=settings, start=start)

    @classmethod
    @_check.arguments(
        "Snapshots.from_members", params=_check.Tree("a tree of arrays [member, ...]", keys=False)
    )
    def from_members(cls, params: optax.Params) -> Snapshots:
        """Take stacked members `[member, ...]`, such as `warmstart` returns, as one draw each."""
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
        told = f"{_table.some(self.trace)} at {_table.counted(max(ticks, default=0), 'tick')}"
        return {"trace": told} if self.trace else {}


class StoredSnapshots(Draws):
    """Draws in a directory, read when they are needed: a sequence of trees draw by draw.

    Made by `load_snapshots`. Numbers, slices and length are those of `Snapshots`, and `draws[i]`
    reads one draw. `trace` holds the statistics of the draws, `[chain, draw]`; `params`
    reads all draws into memory, `[chain, draw, ...]`, `start` where the chains began,
    `[chain, ...]`; `manifest` is the file's content, and `settings` name and arguments of the
    sampler in it, or those of an optimizer, as `Snapshots` has them.
    """

    def __init__(self, directory: Path, manifest: Mapping[str, Any], like: Any, flat: bool):
        # Draws are read later, when the process may work elsewhere.
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
        """Number of draws per chain that were on disk when the directory was loaded."""
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
        """Where the chains began, a tree of arrays `[chain, ...]`."""
        return self._tree(self._start())

    @functools.cached_property
    def trace(self) -> dict[str, np.ndarray]:
        """What `optax_smile.stats` said at each draw, arrays `[chain, draw]`, and the steps."""
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
                        raise ValueError(f"it tells {sorted(seen)}, not {sorted(draws[0])}")
            draws.append(seen)
        names = draws[0] if draws else ()
        return {name: np.stack([seen[name] for seen in draws], axis=1) for name in names}

    @_check.arguments(every=_check.Whole(1))
    def thinned(self, every: int) -> StoredSnapshots:
        """Keep the last draw and each `every`-th (>= 1) before it; nothing is read."""
        thinned = copy.copy(self)
        vars(thinned).pop("trace", None)
        thinned.draws = self.draws[::-1][::every][::-1]
        return thinned

    def _read(self, blocks: list[_files.Block]) -> dict[str, np.ndarray]:
        return _files.read_chains(blocks, self.leaves, self.num_chains, self._start)

    def _start(self) -> dict[str, np.ndarray]:
        if self.arrays_of_start is None:
            found = _files.read_start(self.directory, self.leaves, self.num_chains)
            self.arrays_of_start = found
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
    """Open the draws that `sample(directory=...)` wrote, also while it still writes.

    Needs none of the training code and no device: arrays are NumPy's.

    Args:
        directory: where the draws are.
        like: parameters of one chain, or their shapes, whose tree the draws get back. Without it
            they are nested dicts and lists.
        flat: give each draw as a dict from path to array instead: entries of a path are joined by
            slashes, and a `~` or a `/` in an entry is written `~0` or `~1`.

    Returns:
        `StoredSnapshots`, an iterable of parameter trees that `predict` takes. Draws that are
        written later are found by loading again.

    Raises:
        ValueError: no manifest, a damaged one, or one of another format, `like` with other leaves
            than the draws; when a draw is read, a damaged file or a link, which the message names.

    Cost: reads the manifest and the names of the files; a draw is read when it is asked for, and
    its checksums are tested then.

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
