"""Posterior draws in memory."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import optax

from optax_smile import _check


@dataclasses.dataclass(frozen=True)
class Snapshots:
    """Draws of several chains, an iterable of parameter trees chain by chain.

    Attributes:
        params: tree of NumPy arrays, each `[chain, draw, ...]`.
        trace: what `optax_smile.stats` said at every thinning tick, warm-up included: arrays
            `[chain, tick]`, the draws being the last ticks. Empty for weights without a sampler.

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
