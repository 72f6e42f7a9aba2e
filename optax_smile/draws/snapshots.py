"""Posterior draws, in memory and on disk."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsIndex, cast, overload

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from optax_smile import _check, _check_trees, _disk, _paths, _settings, _table, _trace
from optax_smile._disk import Json
from optax_smile.draws import _constraints, _format

# Name and arguments of a sampler.
Settings = Mapping[str, object]
# Statistics by name, arrays `[chain, tick]`; `[chain, draw]` if only those of draws are known.
Trace = Mapping[str, np.ndarray]
# Smaller than every log density in float32, but finite, so that draws under which some targets are
# impossible can be compared by the number of such targets.
LOWEST = float(np.finfo(np.float32).min)
DENSITIES = _check.Array(
    "[chain, draw, target, ...]", _check.Where("below infinity", lambda x: x != np.inf)
)


class Snapshots:
    """Draws of several chains: a sequence of parameter trees, ordered draw by draw.

    `draws[i]` is draw `i // num_chains` of chain `i % num_chains`. A slice is a list of trees,
    which `predict` accepts. For all draws of a chain, index `params`. A list of integers, such as
    `choose` returns, makes `Snapshots` of these draws in one chain, which `summary` and `to_arviz`
    refuse, since it is not a sample of the posterior.

    Attributes:
        params: tree of NumPy arrays, each `[chain, draw, ...]`.
        num_chains, num_draws: lengths of their first two axes.
        trace: results of `optax_smile.stats`, arrays `[chain, tick]`. From `sample` every `thin`
            steps, warm-up included: the draws are the last ticks (of those with `is_draw`). From
            `from_draws` and `recorded` only at the draws. Empty if unknown.
        settings: name and arguments of the sampler; None if unknown. `"is_posterior": False` marks
            draws of an optimizer, or chosen by indices.
        start: initial parameters of the chains, a tree of arrays `[chain, ...]`; None if unknown.
        interrupted: `"SIGINT"` or `"SIGTERM"` if this signal ended `sample`; else None.

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

    num_chains: int
    num_draws: int
    start: Any
    interrupted: str | None = None

    @_check.arguments(
        "Snapshots",
        params=_constraints.Numeric(axes="[chain, draw, ...]", keys=False),
        trace=_check.kind(Mapping, "a dict of arrays [chain, tick]"),
        settings=_check.kind(Mapping, "a dict") | None,
        start=_constraints.Numeric(),
    )
    def __init__(
        self,
        params: Any,
        trace: Trace = _check.NOTHING,
        settings: Settings | None = None,
        start: object = None,
    ):
        if start is not None:
            first = jax.eval_shape(lambda: jax.tree.map(lambda x: x[:, 0], params))
            _check_trees.check_alike("start", start, first, "a draw of `params`")
        self.params, self.trace, self.settings, self.start = params, dict(trace), settings, start
        self.num_chains, self.num_draws = jax.tree.leaves(params)[0].shape[:2]
        self._leaves = _format.leaves_of(params, axes=2)
        self._structure = jax.tree.structure(params)

    @staticmethod
    @_check.arguments(
        "Snapshots.from_members", params=_constraints.Numeric(axes="[member, ...]", keys=False)
    )
    def from_members(params: optax.Params) -> Snapshots:
        """Make snapshots of members `[member, ...]` of `warmstart`, each a chain of one draw."""
        return Snapshots(jax.tree.map(lambda x: np.asarray(x)[:, None], params))

    @staticmethod
    @_check.arguments("Snapshots.from_draws", num_chains=_check.Whole(1) | None)
    def from_draws(
        draws: object, trace: object = None, *, num_chains: int | None = None
    ) -> Snapshots:
        """Make snapshots of copies of the draws that a loop of your own collected.

        Args:
            draws: a list of parameter trees, such as `last_accepted(state, params)`; or a tree,
                not a list, of arrays `[draw, ...]`, as `jax.lax.scan` returns.
            trace: `stats(state)` at each draw, in the same form, which shows whether a chain is
                still on its way; then there is a warning. None: unknown.
            num_chains: number of chains, >= 1, if the arrays of each draw have a chain axis
                `[chain, ...]`, as in a loop with `jax.vmap`. None: one chain, without that axis.

        Raises:
            ValueError: no draws; a draw that is not finite or unlike the first (the message names
                it); a trace of other draws.

        Example:
            >>> draws = Snapshots.from_draws([{"w": np.ones(3)}, {"w": np.zeros(3)}])
            >>> draws.num_chains, draws.num_draws, draws.params["w"].shape
            (1, 2, (1, 2, 3))
        """
        params = _stacked("draws", draws, num_chains)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            if len(wrong := np.argwhere(~np.isfinite(leaf))):
                at = f"{_paths.place(path)} of chain {wrong[0][0]}"
                _check.fail(f"draws[{wrong[0][1]}]", "finite", f"nan or inf at {at}")
        if trace is None:
            return Snapshots(params)
        stats, axes = _stacked("trace", trace, num_chains), leaf.shape[:2]
        shapes = {x.shape for x in jax.tree.leaves(stats)}
        is_whole = hasattr(stats, "_asdict") and shapes == {axes}
        if not is_whole or not np.all(getattr(stats, "is_draw", True)):
            rule = f"`stats(state)` of each draw, with `is_draw`, of shape {axes} in all"
            _check.fail("trace", rule, f"the shapes {sorted(shapes)}")
        if hasattr(stats, "noise_id"):
            _trace.warn_of_equal_keys(stats.noise_id)
        if hasattr(stats, "on_its_way"):
            _trace.warn_of_descent(stats.on_its_way)
        return Snapshots(params, stats._asdict())

    def __len__(self) -> int:
        return self.num_chains * self.num_draws

    def __iter__(self) -> Iterator[Any]:
        return self._pick(range(len(self)))

    @overload
    def __getitem__(self, index: SupportsIndex) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    @overload
    def __getitem__(self, index: Sequence[int] | np.ndarray) -> Snapshots: ...
    def __getitem__(self, index):
        if isinstance(index, slice):
            return list(self._pick(range(len(self))[index]))
        several = isinstance(index, (list, np.ndarray)) and np.ndim(index) == 1 and len(index)
        try:
            numbers = [operator.index(x) for x in cast(list, index if several else [index])]
        except TypeError:
            rule = "an integer, a slice or a list of integers"
            raise TypeError(self._wrong(rule, _check.show(index))) from None
        for number in numbers:
            if not -len(self) <= number < len(self):
                rule = f"at least {-len(self)} and below {len(self)}"
                raise IndexError(self._wrong(rule, number))
        trees = self._pick([number % len(self) for number in numbers])
        if not several:
            return next(trees)
        params = jax.tree.map(lambda *x: np.stack(x)[None], *trees)
        return Snapshots(params, settings=_settings.CHOSEN)

    def _wrong(self, rule: str, got: object) -> str:
        remedy = "For all draws of one chain, index the arrays [chain, draw, ...] of `params`."
        return f"`{type(self).__name__}[...]` must be {rule}, got {got}. {remedy}"

    def _pick(self, numbers: Iterable[int]) -> Iterator[Any]:
        """Yield trees by their numbers; consecutive trees of one draw are read together."""
        for draw, group in itertools.groupby(numbers, lambda number: number // self.num_chains):
            leaves = self._read(draw)
            for number in group:
                yield self._tree([x[number % self.num_chains] for x in leaves])

    def _tree(self, leaves: Sequence[np.ndarray]) -> Any:
        return jax.tree.unflatten(self._structure, leaves)

    def __repr__(self) -> str:
        chains, leaves = _table.counted(self.num_chains, "chain"), self._leaves
        title = f"{type(self).__name__}: {chains} of {_table.counted(self.num_draws, 'draw')}"
        sizes = [math.prod(leaf.shape) for leaf in leaves]
        held = sum(size * np.dtype(x.dtype).itemsize for size, x in zip(sizes, leaves, strict=True))
        arrays = _table.some(f"{leaf.name} {leaf.dtype}{leaf.shape}" for leaf in leaves)
        numbers = _table.counted(sum(sizes), "number")
        size = f"{numbers} per draw, {_table.memory(held * len(self))} in total"
        rows = {"size": size, "arrays": arrays}
        if not _settings.are_posterior(self.settings):
            rows["draws"] = f"{_settings.origin(self.settings)}, not posterior draws"
        elif self.settings is not None:
            # Name of the sampler, with its numeric arguments.
            given = self.settings.items()
            numeric = [f"{k}={x}" for k, x in given if k != "key" and type(x) in (int, float)]
            rows["sampler"] = f"{self.settings.get('name')}({', '.join(numeric)})"
        return _table.described(title, rows | self._place())

    @_check.arguments("choose", log_density=DENSITIES, number=_check.Whole(1))
    def choose(self, log_density: ArrayLike, number: int) -> np.ndarray:
        """Choose a few draws whose average predicts held-out data best.

        Each is the draw that, added to the average so far, gives the highest log pointwise
        predictive density (LPPD). No draw is chosen twice. The choice overfits the data, so a
        score on them is too high.

        Args:
            log_density: log likelihood of each held-out target under each draw, nats,
                `[chain, draw, target, ...]`: `predict(..., per="draw").each.log_density`.
            number: how many draws to choose from all chains together, >= 1.

        Returns:
            Indices `[number]` in the order of the choice. `draws[indices]` are these draws.

        Cost: `number` passes over the log densities, which are held twice in float64.

        Example:
            >>> draws = Snapshots(np.array([[0.0, 1.0], [2.0, 3.0]]))
            >>> log_density = [[[-4.0, -3.0], [-1.0, -2.0]], [[-3.0, -1.0], [-9.0, -9.0]]]
            >>> draws[draws.choose(log_density, 2)].params.tolist()
            [[1.0, 2.0]]

        Source: forward selection of an ensemble, Caruana et al., ICML 2004, by the log score.
        """
        density, axes = cast(np.ndarray, log_density), (self.num_chains, self.num_draws)
        if density.shape[:2] != axes:
            rule = f"an array [chain, draw, target, ...] whose first axes are {axes}"
            _check.fail("log_density", rule, f"shape {density.shape}")
        if number > len(self):
            _check.fail("number", f"at most the {len(self)} draws of all chains", number)
        density = _constraints.of_targets(density).swapaxes(0, 1).reshape(len(self), -1)
        if np.isnan(density).any():
            _check.fail("log_density", "without NaN, except for padding", "NaN")
        bounded, total = np.maximum(density, LOWEST), np.full(density.shape[1], -np.inf)
        free, chosen = np.ones(len(self), bool), []
        for _ in range(number):
            # The number of draws shifts all candidates alike.
            score = np.where(free, np.logaddexp(total, bounded).mean(axis=1), -np.inf)
            chosen.append(best := int(score.argmax()))
            total, free[best] = np.logaddexp(total, bounded[best]), False
        return np.array(chosen)

    def mean(self) -> Any:
        """Average the draws of each chain: one network per chain, as SWA averages weights.

        The average is a good network if the draws of a chain stay near one mode, such as with a
        prior around the start. If they do not, it is poor: compare it on held-out data. Statistics
        of BatchNorm are not parameters: compute them again with the averaged weights.

        Returns:
            A tree of arrays `[chain, ...]` with the dtypes of the draws, added up in float64.
            Leaves that are not floating-point arrays are those of the first draw.

        Cost: one pass over the draws; memory for two draws, in float64.

        Example:
            >>> Snapshots(np.array([[0.0, 1.0], [2.0, 5.0]])).mean()
            array([0.5, 3.5])

        Source: Izmailov et al., Averaging weights leads to wider optima and better generalization,
        UAI 2018.
        """
        if not self.num_draws:
            raise ValueError("`mean` needs at least one draw; the run is still in its warm-up.")
        first = self._read(0)
        totals = [np.array(x, np.float64) for x in first]
        for draw in range(1, self.num_draws):
            for total, x in zip(totals, self._read(draw), strict=True):
                total += x
        means = (
            (total / self.num_draws).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
            for total, x in zip(totals, first, strict=True)
        )
        return self._tree(list(means))

    def _read(self, draw: int) -> list[np.ndarray]:
        """Return the leaves of a draw, `[chain, ...]`."""
        return [x[:, draw] for x in jax.tree.leaves(self.params)]

    def _place(self) -> dict[str, str]:
        """Describe, for `repr`, where the draws are and what is known about them."""
        ticks = {np.shape(values)[-1] for values in self.trace.values()}
        names = f"{_table.some(self.trace)} at {_table.counted(max(ticks, default=0), 'tick')}"
        return {"trace": names} if self.trace else {}


class StoredSnapshots(Snapshots):
    """Draws in a directory, made by `load_snapshots`: `draws[i]` reads one draw.

    `manifest` is the content of the manifest. The other attributes and methods are those of
    `Snapshots`; before the first draw, `trace` and `params` raise a ValueError.
    """

    def __init__(self, directory: Path, manifest: Json, structure: object, flat: bool):
        # Draws are read later, when the working directory may have changed.
        self.directory: Path = directory.absolute()
        self.manifest: Json = manifest
        self.num_chains: int = manifest["num_chains"]
        self.settings: Settings | None = manifest["settings"].get("sampler")
        self._flat, self._structure = flat, structure
        self._leaves = [_format.Leaf(**leaf) for leaf in manifest["leaves"]]
        self.draws: list[list[_format.Block]] = _format.find_draws(self.directory, manifest)

    @property
    def num_draws(self) -> int:
        """Number of draws per chain on disk when the directory was loaded."""
        return len(self.draws)

    @property
    def params(self) -> Any:
        """All draws in memory, a tree of arrays `[chain, draw, ...]`."""
        self._require_draws("params")
        read = map(self._read, range(self.num_draws))
        return self._tree([np.stack(column, axis=1) for column in zip(*read, strict=True)])

    @functools.cached_property
    @_check.called("load_snapshots")
    def start(self) -> Any:
        """Initial parameters of the chains, a tree of arrays `[chain, ...]`."""
        blocks = _format.find(self.directory, self.num_chains).get(_format.START)
        if not blocks:
            rule, got = "a directory with the start of its run", f"{self.directory} without start.*"
            _check.fail("directory", rule, got, "Restore it: draws stay readable.")
        return self._tree(_format.read_chains(blocks, self._leaves, self.num_chains))

    @functools.cached_property
    def trace(self) -> dict[str, np.ndarray]:
        """Results of `optax_smile.stats` and the step at each draw, arrays `[chain, draw]`."""
        self._require_draws("trace")
        draws = []
        for blocks in self.draws:
            seen: dict[str, np.ndarray] = {}
            for block in blocks:
                header = _format.read_header(block)
                for name, values in {**header["stats"], "step": header["step"]}.items():
                    default = np.empty(self.num_chains, np.asarray(values).dtype)
                    seen.setdefault(name, default)[block.first : block.last + 1] = values
                with _disk.naming(block.path):
                    if draws and seen.keys() != draws[0].keys():
                        raise ValueError(f"it holds {sorted(seen)}, not {sorted(draws[0])}")
            draws.append(seen)
        return {name: np.stack([seen[name] for seen in draws], axis=1) for name in draws[0]}

    def _require_draws(self, attribute: str):
        if not self.draws:
            raise ValueError(
                f"`{attribute}` needs at least one draw, and {self.directory} has none yet: the run"
                " is still in its warm-up or ended there."
            )

    @_check.arguments(every=_check.Whole(1))
    def thinned(self, every: int) -> StoredSnapshots:
        """Select the last draw and every `every`-th (>= 1) before it, without reading them."""
        thinned = copy.copy(self)
        vars(thinned).pop("trace", None)
        thinned.draws = self.draws[::-1][::every][::-1]
        return thinned

    def _read(self, draw: int) -> list[np.ndarray]:
        return _format.read_chains(self.draws[draw], self._leaves, self.num_chains)

    def _tree(self, leaves: Sequence[np.ndarray]) -> Any:
        if self._flat:
            return {leaf.name: x for leaf, x in zip(self._leaves, leaves, strict=True)}
        if self._structure is not None:
            return super()._tree(leaves)
        return _nest([(leaf.path, x) for leaf, x in zip(self._leaves, leaves, strict=True)])

    def _place(self) -> dict[str, str]:
        return {"folder": str(self.directory)}


def _nest(leaves: list[tuple[list[list[str | int]], np.ndarray]]) -> object:
    """Rebuild nested dicts and lists from paths."""
    if len(leaves) == 1 and not leaves[0][0]:
        return leaves[0][1]
    groups: dict[str | int, list] = {}
    for (first, *rest), array in leaves:
        groups.setdefault(first[1], []).append((rest, array))
    nested = {entry: _nest(group) for entry, group in groups.items()}
    is_list = leaves[0][0][0][0] == "index" and list(nested) == list(range(len(nested)))
    return list(nested.values()) if is_list else nested


@_check.arguments(directory=_check.PathLike(), like=_check.Tree())
def load_snapshots(
    directory: str | os.PathLike[str], *, like: Any = None, flat: bool = False
) -> StoredSnapshots:
    """Open the draws that `sample(directory=...)` or `recorded` wrote, or is still writing.

    The result is a sequence of parameter trees that `predict` accepts. It needs neither the
    training code nor a device. Load again to see draws that were written later.

    Args:
        directory: directory of the run.
        like: parameters of one chain, or their shapes; draws are returned in this tree structure.
            Without it they are nested dicts and lists. In an `nnx.State`, as in the draws of
            `sample`, arrays take the place of variables.
        flat: return each draw as a dict from path to array, even with `like`. Entries of a path are
            joined by slashes; `~` and `/` in an entry are written `~0` and `~1`.

    Raises:
        ValueError: a manifest that is missing, damaged or of another format; `like` with other
            leaves than the draws. On reading a draw: a damaged file, named in the message.

    Cost: reads the manifest and lists the files. A draw is read and verified on access.

    Example:
        >>> import jax.numpy as jnp, optax_smile, tempfile
        >>> directory, sampler = tempfile.mkdtemp(), optax_smile.sgld(0.01, num_data=10, key=0)
        >>> loss_fn = lambda params, x: jnp.sum((params["w"] - x) ** 2)
        >>> steps = {"num_warmup": 0, "num_draws": 5, "directory": directory, "progress": False}
        >>> start, batches = {"w": jnp.eye(3, 2)}, [jnp.ones(2)]
        >>> _ = optax_smile.sample(loss_fn, start, batches, sampler, key=0, **steps)
        >>> draws = optax_smile.load_snapshots(directory)
        >>> len(draws), draws.params["w"].shape
        (15, (3, 5, 2))
    """
    directory = Path(directory)
    manifest = _format.read_manifest(directory)
    structure = None
    if like is not None:
        # `sample` replaces variables of Flax nnx in the parameters, but not in `aux`.
        bare = _paths.without_variables(like)
        if isinstance(like, dict) and "aux" in like:
            bare = bare | {"aux": like["aux"]}
        stored = [(leaf["name"], leaf["shape"]) for leaf in manifest["leaves"]]
        own = [[(x.name, x.shape) for x in _format.leaves_of(tree, 0)] for tree in (like, bare)]
        if stored not in own:
            differing = [pair for pair in own[1] if pair not in stored] or own[1]
            rule = f"the parameters of one chain, with the leaves of {directory}, {stored}"
            _check.fail("like", rule, differing)
        structure = jax.tree.structure((like, bare)[own.index(stored)])
    return StoredSnapshots(directory, manifest, structure, flat)


def _stacked(argument: str, trees: Any, num_chains: int | None) -> Any:
    """Stack trees, or a tree of arrays `[draw, ...]`, to arrays `[chain, draw, ...]`."""
    rows: list[object] = []
    if not _constraints.is_list(trees):
        _check.Tree(axes="[draw, ...]", keys=False, traced=False)(argument, trees)
        leaves, structure = jax.tree.flatten(jax.tree.map(np.asarray, trees))
        trees = (jax.tree.unflatten(structure, x) for x in zip(*leaves, strict=True))
    for number, tree in enumerate(trees):
        at = f"{argument}[{number}]"
        _check.Tree(keys=False, traced=False)(at, tree)
        # Copy: the loop may reuse the arrays.
        rows.append(jax.tree.map(np.array, tree))
        _check_trees.check_alike(at, rows[-1], rows[0], f"{argument}[0]")
    axes = {x.shape[:1] for row in rows[:1] for x in jax.tree.leaves(row)}
    if not axes:
        _check.fail(argument, "at least one tree of arrays", "none")
    if num_chains is None:
        return jax.tree.map(lambda *x: np.stack(x)[None], *rows)
    if axes != {(num_chains,)}:
        rule = f"trees of arrays [chain, ...] of {num_chains} chains"
        _check.fail(argument, rule, f"the leading axes {sorted(axes)}")
    return jax.tree.map(lambda *x: np.stack(x, axis=1), *rows)
