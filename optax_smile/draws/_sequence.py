"""Draws as a sequence of parameter trees, with consistent length, iteration and indexing."""

import abc
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex, overload

import numpy as np

from optax_smile import _check, _settings, _table
from optax_smile.draws._manifest import Leaf
from optax_smile.draws.stopping import Stopping
from optax_smile.draws.subset import Subset


class Draws(abc.ABC):
    """A sequence of parameter trees: the first draw of every chain, then the second, ...

    Tree i is draw `i // num_chains` of chain `i % num_chains`.
    """

    @property
    @abc.abstractmethod
    def num_chains(self) -> int:
        """Number of chains."""

    @property
    @abc.abstractmethod
    def num_draws(self) -> int:
        """Number of draws per chain."""

    @property
    @abc.abstractmethod
    def settings(self) -> Mapping[str, Any] | None:
        """Name and arguments of the sampler."""

    @property
    @abc.abstractmethod
    def subset(self) -> Subset | None:
        """Which draws these are, if `thin_to` chose them."""

    @property
    @abc.abstractmethod
    def stopping(self) -> Stopping | None:
        """What the stopping rule of the run found, if it had one."""

    @abc.abstractmethod
    def _arrays(self) -> list[Leaf]:
        """Describe the arrays of one draw of one chain."""

    @abc.abstractmethod
    def _place(self) -> dict[str, str]:
        """Describe, for `repr`, where the draws are and what is known about them."""

    @abc.abstractmethod
    def _of_draw(self, draw: int, chains: Sequence[int]) -> Iterator[Any]:
        """Yield one draw of the given chains."""

    def __len__(self) -> int:
        return self.num_chains * self.num_draws

    def __iter__(self) -> Iterator[Any]:
        return self._pick(range(len(self)))

    @overload
    def __getitem__(self, index: SupportsIndex) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
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

    def _wrong(self, rule: str, got: Any) -> str:
        remedy = "For all draws of one chain, index the arrays [chain, draw, ...] of `params`."
        return f"`{type(self).__name__}[...]` must be {rule}, got {got}. {remedy}"

    def _pick(self, numbers: Iterable[int]) -> Iterator[Any]:
        """Yield trees by their numbers; consecutive trees of one draw are read together."""
        num_chains = self.num_chains
        for draw, group in itertools.groupby(numbers, lambda number: number // num_chains):
            yield from self._of_draw(draw, [number % num_chains for number in group])

    def __repr__(self) -> str:
        return _table.described(self._title(), self._rows())

    def _repr_html_(self) -> str:
        return _table.described_in_html(self._title(), self._rows())

    def _title(self) -> str:
        chains = _table.counted(self.num_chains, "chain")
        return f"{type(self).__name__}: {chains} of {_table.counted(self.num_draws, 'draw')}"

    def _rows(self) -> dict[str, str]:
        leaves = self._arrays()
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


def _sampler(settings: Mapping[str, Any]) -> str:
    """Format a sampler with its numeric arguments."""
    known = {name: x for name, x in settings.items() if name != "key"}
    numeric = ((name, x) for name, x in known.items() if type(x) in (int, float))
    return f"{settings.get('name')}({', '.join(f'{name}={x}' for name, x in numeric)})"
