"""Posterior draws, in memory and on disk."""

from __future__ import annotations

import abc
import copy
import dataclasses
import functools
import itertools
import math
import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, SupportsIndex, overload

import jax
import numpy as np
import optax

from optax_smile import _check, _disk, _settings, _table, _trace, _tree
from optax_smile._disk import Json
from optax_smile._types import Options, Tree, by_identity
from optax_smile.draws import _checks, _format
from optax_smile.draws.prediction import Prediction

# Name and arguments of a sampler.
Settings = Mapping[str, object]
# Statistics by name, arrays `[chain, tick]`; `[chain, draw]` where only those of draws are known.
Trace = Mapping[str, np.ndarray]
# Below every log density in float32. Finite, so that draws for which some targets are impossible
# are compared by the number of such targets.
LOWEST = float(np.finfo(np.float32).min)


@by_identity
class Stopping(NamedTuple):
    """Result of the stopping rule `EvidenceStop`; print it for a sentence.

    Look k rejects the null if its e-value is at least k (k + 1) / alpha. Only the last look can
    have done so, since it stops the run.

    Attributes:
        null: `"improvement"` or `"doubling"`.
        alpha: bound on the probability that any look rejects a null that is true.
        tolerance: gain of the null `"doubling"`, nats per example.
        num_examples: number of held-out examples.
        start_lppd: log pointwise predictive density (LPPD) of the start of the chains on these
            examples, nats per target.
        num_draws: draws of each chain at each look, `[look]`.
        log_e_value: log of the e-value of each look, `[look]`; NaN once a prediction was not
            finite.
        lppd: LPPD of the average of all draws so far, `[look]`.
    """

    null: str
    alpha: float
    tolerance: float
    num_examples: int
    start_lppd: float
    num_draws: np.ndarray
    log_e_value: np.ndarray
    lppd: np.ndarray

    @property
    def log_threshold(self) -> np.ndarray:
        """Log e-value at which each look rejects the null, `[look]`."""
        look = np.arange(1, len(self.num_draws) + 1)
        return np.log(look * (look + 1) / self.alpha)

    @property
    def has_stopped(self) -> bool:
        """Whether the last look rejected the null."""
        return bool((self.log_e_value[-1:] >= self.log_threshold[-1:]).any())

    def __str__(self) -> str:
        if not len(self.num_draws):
            return f"Not stopped: no look yet (null: {self.null})."
        claim = "the draws improve the prediction of the start"
        if self.null == "doubling":
            claim = f"doubling the draws gains less than {self.tolerance:g} nats per example"
        evidence, threshold = self.log_e_value[-1], self.log_threshold[-1]
        found, sign = ("Stopped", ">=") if self.has_stopped else ("Not stopped", "<")
        if math.isnan(evidence):
            sign, claim = "against", f"{claim}, as predictions were not finite"
        evident = "evidence" if self.has_stopped else "not enough evidence"
        return (
            f"{found} at {self.num_draws[-1]} draws per chain: {evident} that {claim} (log e-value"
            f" {evidence:.3g} {sign} {threshold:.3g}, alpha {self.alpha:g}). Held-out LPPD"
            f" {self.lppd[-1]:.4g}, of the start {self.start_lppd:.4g}."
        )


@by_identity
class Subset(NamedTuple):
    """Which draws `thin_to` chose, in the order of the choice: arrays `[draw]`.

    Attributes:
        chain: chain of each draw.
        draw: number of the draw in its chain; for draws in a directory, the number of its file.
        step: step of the chain at the draw, or calls of `update` in a loop of your own; None if
            unknown.
        lppd: log pointwise predictive density of the average of the draws up to this one, nats per
            target, on the data that chose them, so it overestimates that of new data.

    Example:
        >>> import numpy as np, optax_smile
        >>> draws = optax_smile.Snapshots(np.array([[0.0, 1.0], [2.0, 3.0]]))
        >>> prediction = optax_smile.predict(
        ...     lambda w, x: (w * x, 0.0), draws, np.ones(1), likelihood="gaussian",
        ...     targets=np.full(1, 2.2), per="draw",
        ... )
        >>> draws.thin_to(2, prediction).subset.chain.tolist()
        [1, 1]
    """

    chain: np.ndarray
    draw: np.ndarray
    step: np.ndarray | None
    lppd: np.ndarray


class Draws(abc.ABC):
    """A sequence of parameter trees: the first draw of every chain, then the second, ...

    Tree i is draw `i // num_chains` of chain `i % num_chains`. A subclass has the attributes that
    are listed here, properties or not.
    """

    num_chains: int
    num_draws: int
    params: Tree
    trace: Trace
    settings: Settings | None
    subset: Subset | None
    stopping: Stopping | None
    interrupted: str | None = None
    # The arrays of one draw of one chain, and the `PyTreeDef` of its tree; None if it is unknown.
    _leaves: list[_format.Leaf]
    _structure: Tree
    # Number of each draw of a chain; on disk, the number of its file.
    _numbers: Sequence[int]
    _flat: bool = False

    @abc.abstractmethod
    def _read(self, draw: int) -> list[np.ndarray]:
        """Return the leaves of a draw, `[chain, ...]`."""

    @abc.abstractmethod
    def _manifest(self) -> Json:
        """Return the manifest of a directory of such draws."""

    @abc.abstractmethod
    def _place(self) -> dict[str, str]:
        """Describe, for `repr`, where the draws are and what is known about them."""

    def __len__(self) -> int:
        return self.num_chains * self.num_draws

    def __iter__(self) -> Iterator[Tree]:
        return self._pick(range(len(self)))

    @overload
    def __getitem__(self, index: SupportsIndex) -> Tree: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tree]: ...
    def __getitem__(self, index):
        if isinstance(index, slice):
            return list(self._pick(range(len(self))[index]))
        try:
            number = operator.index(index)
        except TypeError:
            raise TypeError(self._wrong("an integer or a slice", _check.show(index))) from None
        if not -len(self) <= number < len(self):
            rule = f"at least {-len(self)} and below {len(self)}"
            raise IndexError(self._wrong(rule, number))
        return next(self._pick([number % len(self)]))

    def _wrong(self, rule: str, got: object) -> str:
        remedy = "For all draws of one chain, index the arrays [chain, draw, ...] of `params`."
        return f"`{type(self).__name__}[...]` must be {rule}, got {got}. {remedy}"

    def _pick(self, numbers: Iterable[int]) -> Iterator[Tree]:
        """Yield trees by their numbers; consecutive trees of one draw are read together."""
        for draw, group in itertools.groupby(numbers, lambda number: number // self.num_chains):
            leaves = self._read(draw)
            for number in group:
                yield self._tree([x[number % self.num_chains] for x in leaves])

    def _tree(self, leaves: Sequence[np.ndarray]) -> Tree:
        if self._flat:
            return {leaf.name: x for leaf, x in zip(self._leaves, leaves, strict=True)}
        if self._structure is not None:
            return jax.tree.unflatten(self._structure, leaves)
        return _nest([(leaf.path, x) for leaf, x in zip(self._leaves, leaves, strict=True)])

    def __repr__(self) -> str:
        return _table.described(self._title(), self._rows())

    def _repr_html_(self) -> str:
        return _table.described_in_html(self._title(), self._rows())

    def _title(self) -> str:
        chains = _table.counted(self.num_chains, "chain")
        return f"{type(self).__name__}: {chains} of {_table.counted(self.num_draws, 'draw')}"

    def _rows(self) -> dict[str, str]:
        leaves = self._leaves
        sizes = [math.prod(leaf.shape) for leaf in leaves]
        held = sum(size * np.dtype(x.dtype).itemsize for size, x in zip(sizes, leaves, strict=True))
        arrays = _table.some(f"{leaf.name} {leaf.dtype}{leaf.shape}" for leaf in leaves)
        numbers = _table.counted(sum(sizes), "number")
        size = f"{numbers} per draw, {_table.memory(held * len(self))} in total"
        rows = {"size": size, "arrays": arrays}
        if not _settings.are_posterior(self.settings):
            rows["draws"] = "iterates of an optimizer, not posterior draws"
        elif self.settings is not None:
            rows["sampler"] = _sampler(self.settings)
        if self.subset is not None:
            rows["subset"] = "chosen on held-out data; convergence cannot be judged from it"
        if self.stopping is not None:
            rows["stopping"] = str(self.stopping)
        return rows | self._place()

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

        The result predicts with `number` forward passes per input. It is not a sample of the
        posterior: `summary`, `to_arviz` and estimates of the posterior refuse it. Choose on enough
        validation data from the distribution of the test data. The choice overfits them, so a score
        on them is too high. Beyond some number, each further draw lowers `subset.lppd`.

        Args:
            number: how many draws to choose from all chains together, >= 1.
            prediction: of the same draws for held-out data,
                `predict(..., per="draw", targets=...)`, with any likelihood.
            directory: a new or empty folder for the draws, which `load_snapshots` reads. Its
                manifest says which draws these are and how they were chosen. `sample` cannot resume
                from it. None: host memory.

        Returns:
            `Snapshots` of one chain of `number` draws in the order of the choice, so that the first
            k of them are the subset of size k. With a `directory`, `StoredSnapshots`; draws that
            were already stored keep their precision. `subset` says which draws they are, and
            `trace` has their statistics.

        Raises:
            ValueError: more draws than there are; a prediction without single draws or targets, or
                of another number of draws (only the numbers of chains and draws are compared); log
                densities that are NaN or plus infinity; a directory that is not empty; a subset.
            OSError: a draw could not be written.

        Cost: `number` passes over the log densities `[draw, target]`, which are held twice in
        float64, and a copy of each chosen draw. If the draws are on disk, it reads all headers, and
        the chosen draws one at a time.

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
                "Call `thin_to` of the original draws, or take the first k draws of this subset."
            )
            _check.fail(where, "draws", "all draws of each chain", "a subset of draws", advice)
        if number > len(self):
            _check.fail(where, "number", f"at most the {len(self)} draws of all chains", number)
        density = _density(where, self, prediction)
        place = None if directory is None else Path(directory)
        if place is not None:
            _format.require_new(where, place)
        # In the order of the draws: the first of all chains, then the second.
        by_draw = density.swapaxes(0, 1).reshape(len(self), -1)
        chosen, lppd = choose(by_draw, number)
        rows, chains = np.divmod(chosen, self.num_chains)
        stats = {name: x[None, chains, rows] for name, x in self._stats().items()}
        step = stats["step"][0] if "step" in stats else None
        subset = Subset(chains, np.asarray(self._numbers)[rows], step, lppd)
        leaves = [np.empty((1, number, *leaf.shape), leaf.dtype) for leaf in self._leaves]
        for place_of, (row, chain) in enumerate(zip(rows, chains, strict=True)):
            for kept, x in zip(leaves, self._read(row), strict=True):
                kept[0, place_of] = x[chain]
        if place is None:
            snapshots = Snapshots(self._tree(leaves), stats, self.settings)
            vars(snapshots).update(subset=subset)
            return snapshots
        source = str(self.directory) if isinstance(self, StoredSnapshots) else None
        described = {
            "chosen_by": "the LPPD of the average, one draw after another, on held-out data",
            "num_targets": by_draw.shape[1],
            "of": {"directory": source, "num_chains": self.num_chains, "num_draws": self.num_draws},
            **_format.to_json(subset),
        }
        manifest = self._manifest() | {"num_chains": 1, "subset": described}
        _format.write_all(place, manifest, leaves, stats)
        manifest = _format.read_manifest(where, place)
        return StoredSnapshots(place, manifest, self._structure, self._flat)

    def _stats(self) -> dict[str, np.ndarray]:
        """Return statistics of the draws and, if it is known, their step, `[chain, draw]`."""
        axes = self.num_chains, self.num_draws
        stats = _trace.of_draws(self.trace, self.num_draws)
        stats = {name: x for name, x in stats.items() if x.shape == axes}
        if "step" not in stats and "num_gradients" in stats:
            # In a loop of the user's own a step is a call of `update`.
            per_step = _settings.gradients_per_step(self.settings)
            stats["step"] = stats["num_gradients"] // per_step
        return stats


def _sampler(settings: Settings) -> str:
    """Format a sampler with its numeric arguments."""
    known = {name: x for name, x in settings.items() if name != "key"}
    numeric = ((name, x) for name, x in known.items() if type(x) in (int, float))
    return f"{settings.get('name')}({', '.join(f'{name}={x}' for name, x in numeric)})"


@dataclasses.dataclass(frozen=True, repr=False, init=False, eq=False)
class Snapshots(Draws):
    """Draws of several chains: a sequence of parameter trees, ordered draw by draw.

    The first draws of all chains come first, then the second draws: `draws[i]` is draw
    `i // num_chains` of chain `i % num_chains`, and `len(draws)` is the number of draws of all
    chains. A slice is a list of trees, which `predict` accepts. For all draws of a chain, index
    `params`.

    Attributes:
        params: tree of NumPy arrays, each `[chain, draw, ...]`.
        trace: results of `optax_smile.stats`, arrays `[chain, tick]`. From `sample` every `thin`
            steps, warm-up included: the draws are the last ticks (of those with `is_draw`). From
            `from_draws`, `thin_to` and `recorded` only at the draws. Empty if unknown.
        settings: name and arguments of the sampler; `{"name": "optimizer", "is_posterior": False}`
            for an optimizer, whose iterates are not posterior draws; None if unknown.
        start: initial parameters of the chains, a tree of arrays `[chain, ...]`; None if unknown.
        subset: a `Subset` that says which draws these are, if `thin_to` chose them; else None.
        stopping: a `Stopping`, the result of the stopping rule of the run; None without a rule.
        interrupted: `"SIGINT"` or `"SIGTERM"` if this signal ended the call of `sample` that
            returned these draws; else None.

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

    params: Tree
    trace: Trace
    settings: Settings | None = None
    start: Tree = None
    subset: Subset | None = dataclasses.field(default=None, init=False)
    stopping: Stopping | None = dataclasses.field(default=None, init=False)

    @_check.arguments(
        "Snapshots",
        params=_check.Tree(axes="[chain, draw, ...]", keys=False),
        trace=_check.kind(Mapping, "a dict of arrays [chain, tick]"),
        settings=_check.kind(Mapping, "a dict") | None,
        start=_check.Tree(),
    )
    def __init__(
        self,
        params: Tree,
        trace: Trace = _check.NOTHING,
        settings: Settings | None = None,
        start: Tree = None,
    ):
        if start is not None:
            first = jax.eval_shape(lambda: jax.tree.map(lambda x: x[:, 0], params))
            _tree.check_alike("Snapshots", "start", start, first, "a draw of `params`")
        # A frozen dataclass does not allow assignment.
        vars(self).update(params=params, trace=dict(trace), settings=settings, start=start)
        vars(self).update(subset=None, stopping=None)

    @classmethod
    @_check.arguments(
        "Snapshots.from_members", params=_check.Tree(axes="[member, ...]", keys=False)
    )
    def from_members(cls, params: optax.Params) -> Snapshots:
        """Make snapshots of stacked members `[member, ...]`, such as `warmstart` returns.

        Each member is a chain with one draw.
        """
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
        trace: Iterable[NamedTuple] | None = None,
        *,
        num_chains: int | None = None,
        directory: str | os.PathLike[str] | None = None,
    ) -> Snapshots | StoredSnapshots:
        """Make snapshots of the draws that a loop of your own collected.

        The result can be used like that of `sample`: for `predict(per="draw")`, `summary`,
        `thin_to`, plots and, with a directory, `report.write`.

        Args:
            draws: parameter trees in the order of the loop, such as a list of
                `last_accepted(state, params)`. A list of lists is one chain whose trees are lists.
            trace: `stats(state)` at each draw, in the same order, so that `summary` can also judge
                step sizes, gradients and updates. None: unknown.
            num_chains: number of chains, >= 1, if the arrays of each tree and those of `trace` have
                a chain axis `[chain, ...]`, as in a loop with `jax.vmap`. None: one chain, without
                that axis.
            directory: a new or empty folder for the draws, for `load_snapshots` and `report.write`.
                None: host memory.

        Returns:
            `Snapshots`; with a `directory`, `StoredSnapshots`. Their `start` and `settings` are
            None.

        Raises:
            ValueError: no draws; a draw that is not finite, or whose arrays or number of chains
                differ from the first (the message names the draw); a trace of another length, or
                with points that are not draws; a directory that is not empty.
            OSError: a draw could not be written.

        Cost: a copy of the draws in host memory, and a second one during the call.

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
        where = "Snapshots.from_draws"
        params, num_draws = _stacked(where, draws, num_chains)
        stats = {} if trace is None else _trace_of(where, trace, num_draws, num_chains)
        if "noise_id" in stats:
            _trace.warn_of_equal_keys(where, stats["noise_id"])
        snapshots = cls(params, stats)
        if directory is None:
            return snapshots
        directory = Path(directory)
        _format.require_new(where, directory)
        leaves = jax.tree.leaves(params)
        _format.write_all(directory, snapshots._manifest(), leaves, snapshots._stats())
        return load_snapshots(directory, like=snapshots[0])

    @property
    def num_chains(self) -> int:
        """Number of chains."""
        return jax.tree.leaves(self.params)[0].shape[0]

    @property
    def num_draws(self) -> int:
        """Number of draws per chain."""
        return jax.tree.leaves(self.params)[0].shape[1]

    @property
    def _leaves(self) -> list[_format.Leaf]:
        return _format.leaves_of(self.params, axes=2)

    @property
    def _structure(self) -> Tree:
        return jax.tree.structure(self.params)

    @property
    def _numbers(self) -> Sequence[int]:
        return range(self.num_draws)

    def _read(self, draw: int) -> list[np.ndarray]:
        return [x[:, draw] for x in jax.tree.leaves(self.params)]

    def _manifest(self) -> Json:
        first = jax.tree.map(lambda x: x[:, 0], self.params)
        with _check.called("Snapshots", "sample"):
            settings = {"sampler": _settings.described(self.settings)}
            return _format.manifest_of(first, None, settings)

    def _place(self) -> dict[str, str]:
        ticks = {np.shape(values)[-1] for values in self.trace.values()}
        names = f"{_table.some(self.trace)} at {_table.counted(max(ticks, default=0), 'tick')}"
        return {"trace": names} if self.trace else {}


class StoredSnapshots(Draws):
    """Draws in a directory, read on demand: a sequence of parameter trees, ordered draw by draw.

    Made by `load_snapshots`. Indices, slices and length work as for `Snapshots`; `draws[i]` reads
    one draw. `trace` holds the statistics of the draws, `[chain, draw]`. `params` reads all draws
    into memory, `[chain, draw, ...]`, and `start` the initial parameters, `[chain, ...]`.
    `manifest` is the content of the manifest. `thinned(every)` selects draws without reading them.
    `num_chains`, `settings`, `subset`, `stopping`, `interrupted` and `thin_to` are those of
    `Snapshots`. Before the first draw, `trace` and `params` raise a ValueError.
    """

    def __init__(self, directory: Path, manifest: Json, structure: Tree, flat: bool):
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
    def subset(self) -> Subset | None:
        """Which draws these are, if `thin_to` chose them."""
        if (entry := self.manifest.get("subset")) is None:
            return None
        every = _format.from_json(entry, Subset._fields).items()
        kept: Options = {x: None if y is None else y[self._numbers] for x, y in every}
        return Subset(**kept)

    @property
    def stopping(self) -> Stopping | None:
        """Result of the stopping rule of the run, if it had one."""
        if (entry := self.manifest.get("stopping")) is None:
            return None
        return Stopping(**_format.from_json(entry, Stopping._fields))

    @property
    def params(self) -> Tree:
        """All draws in memory, a tree of arrays `[chain, draw, ...]`."""
        self._require_draws("params")
        read = map(self._read, range(self.num_draws))
        return self._tree([np.stack(column, axis=1) for column in zip(*read, strict=True)])

    @property
    def start(self) -> Tree:
        """Initial parameters of the chains, a tree of arrays `[chain, ...]`; None if unknown."""
        return self._tree(self._start) if self.manifest.get("has_start", True) else None

    @functools.cached_property
    def trace(self) -> dict[str, np.ndarray]:
        """Results of `optax_smile.stats` and the step at each draw, arrays `[chain, draw]`.

        Empty for draws that were stored without statistics.
        """
        self._require_draws("trace")
        draws = []
        for blocks in self.draws:
            seen: dict[str, np.ndarray] = {}
            for block in blocks:
                header = _format.read_header(block)
                stats = {**header["stats"], "step": header["step"]} if header["stats"] else {}
                for name, values in stats.items():
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
                f"`{attribute}` needs at least one draw, and {self.directory} has none yet. The run"
                " is still in its warm-up or ended there. Load the directory again later, or resume"
                " the run."
            )

    @_check.arguments(every=_check.Whole(1))
    def thinned(self, every: int) -> StoredSnapshots:
        """Select the last draw and every `every`-th (>= 1) before it, without reading them."""
        thinned = copy.copy(self)
        vars(thinned).pop("trace", None)
        thinned.draws = self.draws[::-1][::every][::-1]
        return thinned

    @property
    def _numbers(self) -> Sequence[int]:
        return [int(blocks[0].draw) for blocks in self.draws]

    @functools.cached_property
    def _start(self) -> list[np.ndarray]:
        return _format.read_start(self.directory, self._leaves, self.num_chains)

    def _read(self, draw: int) -> list[np.ndarray]:
        blocks, start = self.draws[draw], lambda: self._start
        return _format.read_chains(blocks, self._leaves, self.num_chains, start)

    def _manifest(self) -> Json:
        # The stopping rule belongs to the run, not to a subset.
        return {name: x for name, x in self.manifest.items() if name != "stopping"}

    def _place(self) -> dict[str, str]:
        return {"folder": str(self.directory)}


def choose(log_density: np.ndarray, number: int) -> tuple[list[int], np.ndarray]:
    """Choose draws one after another, each the best addition to the average so far.

    Args:
        log_density: log density of each target under each draw, nats, `[draw, target]`.
        number: how many, at most the number of draws.

    Returns:
        Indices in the order of the choice, and the LPPD after each, `[number]`.
    """
    bounded = np.maximum(log_density, LOWEST)
    free, chosen = np.ones(len(bounded), bool), []
    total = np.full(bounded.shape[1], -np.inf)
    for _ in range(number):
        # The number of draws shifts all candidates alike.
        score = np.where(free, np.logaddexp(total, bounded).mean(axis=1), -np.inf)
        best = int(score.argmax())
        total, free[best] = np.logaddexp(total, bounded[best]), False
        chosen.append(best)
    sums = np.logaddexp.accumulate(log_density[chosen], axis=0)
    return chosen, sums.mean(axis=1) - np.log(np.arange(1, number + 1))


def _density(where: str, draws: Draws, prediction: Prediction) -> np.ndarray:
    """Log densities `[chain, draw, target]`, all below infinity."""
    density = _checks.log_density_of(where, (draws.num_chains, draws.num_draws), prediction)
    if not density.shape[2]:
        _check.fail(where, "prediction", "one with at least one target", "none")
    wrong = np.argwhere(~(density < np.inf))
    if len(wrong):
        chain, draw, target = wrong[0].tolist()
        got = f"{density[chain, draw, target]} at target {target} of chain {chain}, draw {draw}"
        _check.fail(where, "prediction", "one without NaN or infinite densities", got)
    return density


def _nest(leaves: list[tuple[list[list[str | int]], np.ndarray]]) -> Tree:
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
    directory: str | os.PathLike[str], *, like: Tree = None, flat: bool = False
) -> StoredSnapshots:
    """Open the draws that `sample(directory=...)` wrote, or is still writing.

    It also opens the directories of `Snapshots.from_draws`, `thin_to` and `recorded`. It needs
    neither the training code nor a device: the arrays are NumPy arrays.

    Args:
        directory: directory of the run.
        like: parameters of one chain, or their shapes; draws are returned in this tree structure.
            Without it they are nested dicts and lists.
        flat: return each draw as a dict from path to array, even with `like`. Entries of a path are
            joined by slashes; `~` and `/` in an entry are written `~0` and `~1`.

    Returns:
        `StoredSnapshots`, a sequence of parameter trees that `predict` accepts. Load again to see
        draws that were written later.

    Raises:
        ValueError: a manifest that is missing, damaged or of another format; `like` with other
            leaves than the draws. When a draw is read: a damaged file, named in the message.

    Cost: reads the manifest and lists the files. A draw is read, and its checksums are verified, on
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
    manifest = _format.read_manifest("load_snapshots", directory)
    if like is not None:
        shapes = jax.eval_shape(lambda x: x, like)
        given = [(leaf.name, leaf.shape) for leaf in _format.leaves_of(shapes, axes=0)]
        stored = [(leaf["name"], leaf["shape"]) for leaf in manifest["leaves"]]
        if given != stored:
            differing = [pair for pair in given if pair not in stored] or given
            rule = f"the parameters of one chain, with the leaves of {directory}, {stored}"
            _check.fail("load_snapshots", "like", rule, differing)
    structure = None if like is None else jax.tree.structure(like)
    return StoredSnapshots(directory, manifest, structure, flat)


def _stacked(where: str, draws: Iterable[optax.Params], num_chains: int | None) -> tuple[Tree, int]:
    """Stack parameter trees to arrays `[chain, draw, ...]`, and count them.

    With `num_chains`, the arrays of each tree are `[chain, ...]`; else they are of one chain.
    """
    trees: list[Tree] = []
    for number, tree in enumerate(draws):
        argument = f"draws[{number}]"
        _check.Tree(keys=False, traced=False)(where, argument, tree)
        if not jax.tree.leaves(tree):
            _check.fail(where, argument, "a tree with at least one array", _check.show(tree))
        # Copy: the loop may reuse the arrays.
        trees.append(jax.tree.map(np.array, tree))
        _tree.check_alike(where, argument, trees[-1], trees[0], "draws[0]")
        for path, leaf in jax.tree_util.tree_leaves_with_path(trees[-1]):
            at = jax.tree_util.keystr(path) or "the only leaf"
            if num_chains is not None and leaf.shape[:1] != (num_chains,):
                rule = f"a tree of arrays [chain, ...] of {num_chains} chains"
                _check.fail(where, argument, rule, f"shape {leaf.shape} at {at}")
            if not (is_finite := np.isfinite(leaf)).all():
                chain = "" if num_chains is None else f" of chain {np.argwhere(~is_finite)[0][0]}"
                _check.fail(where, argument, "finite", f"nan or inf at {at}{chain}")
    if not trees:
        _check.fail(where, "draws", "at least one parameter tree", "none")
    stacked = jax.tree.map(lambda *x: np.stack(x, axis=0 if num_chains is None else 1), *trees)
    if num_chains is None:
        stacked = jax.tree.map(lambda x: x[None], stacked)
    return stacked, len(trees)


def _trace_of(
    where: str, trace: Iterable[NamedTuple], num_draws: int, num_chains: int | None
) -> dict[str, np.ndarray]:
    """Stack the statistics of the draws, `[chain, draw]`."""
    entries = list(trace)
    if len(entries) != num_draws:
        rule = f"one entry for each of the {num_draws} draws"
        _check.fail(where, "trace", rule, f"{len(entries)} entries")
    shape, rows = () if num_chains is None else (num_chains,), []
    advice = "" if num_chains else "Pass `num_chains` for arrays of several chains."
    for number, entry in enumerate(entries):
        argument, rule = f"trace[{number}]", "what `optax_smile.stats` returns"
        if not hasattr(entry, "_asdict"):
            _check.fail(where, argument, rule, _check.show(entry))
        row = {x: _check.host(where, argument, value) for x, value in entry._asdict().items()}
        rows.append(row)
        if row.keys() != rows[0].keys():
            _check.fail(where, argument, f"{rule}, as the first entry", f"the fields {[*row]}")
        for name, value in row.items():
            if value.shape != shape:
                rule = f"{rule}, in arrays of shape {shape}"
                _check.fail(where, argument, rule, f"shape {value.shape} at {name}", advice)
        if not np.all(row.get("is_draw", True)):
            advice = "Do not keep points at which `stats(state).is_draw` is False."
            _check.fail(where, argument, "one whose `is_draw` is True", "False", advice)
    return {name: np.stack([np.atleast_1d(row[name]) for row in rows], axis=1) for name in rows[0]}
