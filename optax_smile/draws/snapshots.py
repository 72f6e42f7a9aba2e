"""Posterior draws, in memory and on disk."""

from __future__ import annotations

import abc
import copy
import dataclasses
import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from optax_smile import _check, _disk, _settings, _table, _trace, parallel
from optax_smile.draws import _checks, _files, _manifest, _own
from optax_smile.draws import stopping as _stopping
from optax_smile.draws import subset as _subset
from optax_smile.draws._sequence import Draws
from optax_smile.draws.prediction import Prediction
from optax_smile.draws.stopping import Stopping
from optax_smile.draws.subset import Subset


class _Thinnable(Draws):
    """Draws from which `thin_to` can choose."""

    @abc.abstractmethod
    def _numbers(self) -> Sequence[int]:
        """Number the draws of a chain; those on disk by their files."""

    @abc.abstractmethod
    def _leaves_at(self, chain: int, draw: int) -> list[np.ndarray]:
        """Give the leaves of one draw, `[1, ...]`."""

    @abc.abstractmethod
    def _manifest_of_one(self) -> dict[str, Any]:
        """Describe a directory with one chain of such draws."""

    @abc.abstractmethod
    def _like(self) -> Any:
        """Give a tree of the structure of a draw; None if it is unknown."""

    @_check.arguments(
        "thin_to",
        number=_check.Whole(1),
        prediction=_checks.PREDICTION,
        directory=_check.PathLike() | None,
    )
    def thin_to(
        self,
        number: int,
        prediction: Prediction,
        directory: str | os.PathLike[str] | None = None,
    ) -> Snapshots | StoredSnapshots:
        """Choose a few draws whose average predicts held-out data best.

        The first is the best single draw. Each next one is the draw that, added to the average so
        far, gives the highest log pointwise predictive density (LPPD):

            s_k = argmax_s sum_i log((p_i + L_si) / k),  p_i = sum of L_ji over the chosen draws j

        with the likelihood L_si of target i under draw s. No draw is chosen twice.

        The result predicts, with `number` forward passes per input. It is no sample of the
        posterior: `summary`, `to_arviz` and estimates of the posterior refuse it. Choose on
        validation data like those to come, and enough of them: the choice fits them, and a score on
        them is too good. From some number on, each further draw lowers `subset.lppd`.

        Args:
            number: how many draws to choose from all chains together, >= 1.
            prediction: of the same draws for held-out data,
                `predict(..., per="draw", targets=...)`, with any likelihood.
            directory: a new or empty folder for the draws, which `load_snapshots` reads. Its
                manifest says which draws these are and how they were chosen; `sample` does not
                resume from it. None: host memory.

        Returns:
            `Snapshots` of one chain of `number` draws in the order of the choice, so that the first
            k of them are the subset of k; with a `directory`, `StoredSnapshots`, in the precision
            of draws that are stored already. `subset` says which draws they are, and `trace` has
            their statistics.

        Raises:
            ValueError: more draws than there are; a prediction without single draws or targets, or
                of other draws; log densities that are NaN or plus infinity; a directory that is not
                empty; a subset.
            OSError: a draw could not be written.

        Cost: `number` passes over the log densities `[draw, target]`, held twice in float64, and a
        copy of each chosen draw. Of draws on disk it reads all headers, and the chosen draws one at
        a time.

        Example:
            >>> import numpy as np, optax_smile
            >>> draws = optax_smile.Snapshots(np.array([[0.0, 1.0, 2.0, 3.0]]))
            >>> prediction = optax_smile.predict(
            ...     lambda w, x: (w * x, 0.0), draws, np.ones(3), likelihood="gaussian",
            ...     targets=np.array([0.8, 1.2, 2.9]), per="draw",
            ... )
            >>> draws.thin_to(2, prediction).params.tolist()
            [[2.0, 1.0]]

        Source: forward selection of an ensemble, Caruana et al., ICML 2004, by the log score and
        without replacement.
        """
        where = "thin_to"
        if self.subset is not None:
            advice = (
                "Choose from the draws that it was chosen from; its first draws are smaller ones."
            )
            _check.fail(where, "draws", "all draws of each chain", "a subset of draws", advice)
        if number > len(self):
            _check.fail(where, "number", f"at most the {len(self)} draws of all chains", number)
        density = _density(where, self, prediction)
        place = None if directory is None else Path(directory)
        if place is not None:
            _files.require_new(where, place)
        # In the order of the draws: the first of all chains, then the second.
        by_draw = density.swapaxes(0, 1).reshape(len(self), -1)
        chosen, lppd = _subset.choose(by_draw, number)
        rows, chains = np.divmod(chosen, self.num_chains)
        stats = {name: x[chains, rows] for name, x in _stats(self).items()}
        subset = Subset(chains, np.asarray(self._numbers())[rows], stats.get("step"), lppd)
        if place is None:
            trees = [self[at] for at in chosen]
            params = jax.tree.map(lambda *x: np.stack(x)[None], *trees)
            found = Snapshots(params, {name: x[None] for name, x in stats.items()}, self.settings)
            vars(found).update(subset=subset)
            return found
        self._write_chosen(place, subset, rows, stats, by_draw.shape[1])
        flat = isinstance(self, StoredSnapshots) and self.flat
        return load_snapshots(place, like=self._like(), flat=flat)

    def _write_chosen(
        self,
        directory: Path,
        subset: Subset,
        rows: np.ndarray,
        stats: Mapping[str, np.ndarray],
        num_targets: int,
    ):
        """Write a subset to a new directory.

        Args:
            directory: a new or empty one.
            subset: of these draws.
            rows: place of each of its draws in a chain, `[draw]`.
            stats: of its draws, arrays `[draw]`.
            num_targets: number of held-out targets.
        """
        source = str(self.directory) if isinstance(self, StoredSnapshots) else None
        of = {"directory": source, "num_chains": self.num_chains, "num_draws": self.num_draws}
        with _check.called("thin_to", "sample", params="draws"):
            manifest = self._manifest_of_one()
        manifest["subset"] = _subset.described(subset, num_targets, of)
        steps = range(len(rows)) if subset.step is None else subset.step
        shown = {name: x for name, x in stats.items() if name != "step"}
        on_disk = (
            (
                int(steps[i]),
                self._leaves_at(chain, row),
                {name: x[i : i + 1] for name, x in shown.items()},
            )
            for i, (chain, row) in enumerate(zip(subset.chain, rows, strict=True))
        )
        _files.write_all(directory, manifest, on_disk)


@dataclasses.dataclass(frozen=True, repr=False, init=False)
class Snapshots(_Thinnable):
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
        subset: a `Subset` that says which draws these are, if `thin_to` chose them; else None.
        stopping: a `Stopping` with what the stopping rule of the run found; None without a rule.

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
    subset: Subset | None = dataclasses.field(default=None, init=False)
    stopping: Stopping | None = dataclasses.field(default=None, init=False)

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
        vars(self).update(subset=None, stopping=None)

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

    @classmethod
    @_check.arguments(
        "Snapshots.from_draws",
        draws=_checks.TREES,
        trace=_checks.ENTRIES | None,
        num_chains=_check.Whole(1) | None,
        directory=_check.PathLike() | None,
    )
    def from_draws(
        cls,
        draws: Iterable[optax.Params],
        trace: Iterable[Any] | None = None,
        *,
        num_chains: int | None = None,
        directory: str | os.PathLike[str] | None = None,
    ) -> Snapshots | StoredSnapshots:
        """Make snapshots of the draws that a loop of your own collected.

        The result goes wherever that of `sample` goes: `predict(per="draw")`, `summary`, `thin_to`,
        plots and, with a directory, `report.write`.

        Args:
            draws: parameter trees in the order of the loop, such as a list of
                `last_accepted(state, params)`. A list of lists is one chain whose trees are lists.
            trace: `stats(state)` at each draw, in the same order: `summary` then judges step sizes,
                gradients and updates as well. None: unknown.
            num_chains: number of chains, >= 1, where the arrays of each tree have an axis of chains
                `[chain, ...]`, as in a loop over `jax.vmap`; so have those of `trace`. None: one
                chain, without that axis.
            directory: a new or empty folder for the draws, for `load_snapshots` and `report.write`.
                None: host memory.

        Returns:
            `Snapshots`; with a `directory`, `StoredSnapshots`. Their `start` and `settings` are
            None.

        Raises:
            ValueError: no draws, a draw that is not finite, has other arrays than the first or
                another number of chains (the message names the draw); a trace of another length, or
                of points that are no draws; a directory that is not empty.
            OSError: a draw could not be written.

        Cost: a copy of the draws in host memory.

        Example:
            >>> import jax, jax.numpy as jnp, optax, optax_smile
            >>> sampler = optax_smile.psmile(num_data=1, key=0)
            >>> w, draws, trace = jnp.ones(3), [], []
            >>> state = sampler.init(w)
            >>> for step in range(60):
            ...     updates, state = sampler.update(w, state, w)
            ...     w = optax.apply_updates(w, updates)
            ...     if step >= 20 and step % 2:
            ...         draws.append(optax_smile.last_accepted(state, w))
            ...         trace.append(optax_smile.stats(state))
            >>> found = optax_smile.Snapshots.from_draws(draws, trace)
            >>> found.num_chains, found.num_draws, found.trace["step_size"].shape
            (1, 20, (1, 20))
        """
        where, number = "Snapshots.from_draws", num_chains
        params, num_draws = _own.stacked(where, draws, number)
        stats = {} if trace is None else _own.trace_of(where, trace, num_draws, number)
        snapshots = cls(params, stats)
        if directory is None:
            return snapshots
        directory = Path(directory)
        _files.require_new(where, directory)
        steps = stats["num_gradients"][0] if "num_gradients" in stats else np.arange(num_draws)
        leaves = jax.tree.leaves(params)
        draws_on_disk = (
            (int(steps[i]), [x[:, i] for x in leaves], {name: x[:, i] for name, x in stats.items()})
            for i in range(num_draws)
        )
        with _check.called(where, "sample", params="draws"):
            manifest = _manifest.of_run(jax.tree.map(lambda x: x[:, 0], params), None, {})
        _files.write_all(directory, manifest, draws_on_disk)
        return load_snapshots(directory, like=snapshots[0])

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

    def _numbers(self) -> Sequence[int]:
        return range(self.num_draws)

    def _leaves_at(self, chain: int, draw: int) -> list[np.ndarray]:
        return [np.asarray(x[chain : chain + 1, draw]) for x in jax.tree.leaves(self.params)]

    def _manifest_of_one(self) -> dict[str, Any]:
        first = jax.tree.map(lambda x: x[:1, 0], self.params)
        return _manifest.of_run(first, None, {"sampler": _settings.described(self.settings)})

    def _like(self) -> Any:
        return self[0]

    def _place(self) -> dict[str, str]:
        ticks = {np.shape(values)[-1] for values in self.trace.values()}
        names = f"{_table.some(self.trace)} at {_table.counted(max(ticks, default=0), 'tick')}"
        return {"trace": names} if self.trace else {}


class StoredSnapshots(_Thinnable):
    """Draws in a directory, read on demand: a sequence of parameter trees, ordered draw by draw.

    Made by `load_snapshots`. Indices, slices and length are those of `Snapshots`; `draws[i]` reads
    one draw. `trace` holds the statistics of the draws, `[chain, draw]`. `params` reads all draws
    into memory, `[chain, draw, ...]`, and `start` the initial parameters, `[chain, ...]`.
    `manifest` is the content of the manifest, and `settings` the name and arguments of the sampler
    or optimizer, as in `Snapshots`; so are `subset`, `stopping` and `thin_to`.
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

    @property
    def subset(self) -> Subset | None:
        """Which draws these are, if `thin_to` chose them."""
        described = self.manifest.get("subset")
        return None if described is None else _subset.read(described, self._numbers())

    @property
    def stopping(self) -> Stopping | None:
        """What the stopping rule of the run found, if it had one."""
        described = self.manifest.get("stopping")
        return None if described is None else _stopping.read(described)

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
        """Initial parameters of the chains, a tree of arrays `[chain, ...]`; None if unknown."""
        return self._tree(self._start()) if self.manifest.get("has_start", True) else None

    @functools.cached_property
    def trace(self) -> dict[str, np.ndarray]:
        """Results of `optax_smile.stats` and the step at each draw, arrays `[chain, draw]`.

        Empty for draws that were stored without statistics.
        """
        draws = []
        for blocks in self.draws:
            seen: dict[str, np.ndarray] = {}
            for block in blocks:
                header = _files.read_header(block)
                stats = {**header["stats"], "step": header["step"]} if header["stats"] else {}
                for name, values in stats.items():
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

    def _numbers(self) -> Sequence[int]:
        return [int(blocks[0].draw) for blocks in self.draws]

    def _leaves_at(self, chain: int, draw: int) -> list[np.ndarray]:
        arrays = self._read(self.draws[draw])
        return [arrays[leaf.name][chain : chain + 1] for leaf in self.leaves]

    def _manifest_of_one(self) -> dict[str, Any]:
        # The rule stopped the run, not the subset.
        of_run = {name: x for name, x in self.manifest.items() if name != "stopping"}
        return {**of_run, "num_chains": 1}

    def _like(self) -> Any:
        return None if self.structure is None else self[0]

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


def _density(where: str, draws: Draws, prediction: Prediction) -> np.ndarray:
    """Log densities `[chain, draw, target]`, all below infinity."""
    density = _checks.log_density_of(where, draws, prediction)
    if not density.shape[2]:
        _check.fail(where, "prediction", "one with at least one target", "none")
    wrong = np.argwhere(~(density < np.inf))
    if len(wrong):
        chain, draw, target = wrong[0].tolist()
        got = f"{density[chain, draw, target]} at target {target} of chain {chain}, draw {draw}"
        _check.fail(where, "prediction", "one without NaN or infinite densities", got)
    return density


def _stats(draws: Any) -> dict[str, np.ndarray]:
    """Statistics and step of the draws, `[chain, draw]`; the step only if it is known."""
    axes = draws.num_chains, draws.num_draws
    stats = _trace.of_draws(draws.trace, draws.num_draws)
    stats = {name: x for name, x in stats.items() if x.shape == axes}
    if "step" not in stats and "num_gradients" in stats:
        # In a loop of one's own a step is a call of `update`.
        per_step = 2 if (draws.settings or {}).get("integrator") == "minimal_norm" else 1
        stats["step"] = stats["num_gradients"] // per_step
    return stats


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

    So are those of `Snapshots.from_draws` and `thin_to` with a directory, and of `recorded`.

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
