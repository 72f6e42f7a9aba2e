"""Paths of the chains in weight space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from optax_smile.draws.snapshots import Snapshots, StoredSnapshots


class Paths(NamedTuple):
    """Norms of the draws, and distances from the draw before, `[chain, draw]`.

    `start_norm` is NaN if the start is unknown. `weights` are randomly chosen scalars that change,
    `size` is the number of parameters of a chain. `alike` is the first chain with an equal draw.
    """

    norm: np.ndarray
    moved: np.ndarray
    start_norm: np.ndarray
    weights: np.ndarray
    size: int
    alike: np.ndarray


Leaves = list[np.ndarray]


def walk(snapshots: Snapshots | StoredSnapshots, num_weights: int, seed: int) -> Paths:
    """Follow the chains in one pass over the draws, holding two draws per chain in memory."""
    num_chains, num_draws, start = snapshots.num_chains, snapshots.num_draws, snapshots.start
    starts = [_leaves(jax.tree.map(lambda x, c=c: x[c], start)) for c in range(num_chains)]
    norm, moved = (np.full((num_chains, num_draws - x), np.nan) for x in (0, 1))
    alike = np.zeros((num_chains, num_draws), int)
    first, last = _leaves(snapshots[0]), _leaves(snapshots[(num_draws - 1) * num_chains])
    # Choose more than needed, since some entries may not change.
    places = _choose(first, last, 4 * num_weights, seed)
    each, before, weights = map(_leaves, snapshots), (), []
    for draw, chains in enumerate(zip(*[each] * num_chains, strict=False)):
        norm[:, draw] = [_distance(leaves) for leaves in chains]
        alike[:, draw] = _first_alike(chains, norm[:, draw])
        if draw:
            moved[:, draw - 1] = [_distance(*pair) for pair in zip(chains, before, strict=True)]
        weights.append([[leaves[leaf].flat[at] for leaf, at in places] for leaves in chains])
        before = chains
    series = np.array(weights, float).swapaxes(0, 1)
    moves = (series != series[:, :1]).any(axis=(0, 1))
    return Paths(
        norm=norm,
        moved=moved,
        start_norm=np.array([_distance(leaves) if leaves else np.nan for leaves in starts]),
        weights=series[:, :, moves][:, :, :num_weights],
        size=sum(leaf.size for leaf in first),
        alike=alike,
    )


def _leaves(tree: object) -> Leaves:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def _first_alike(chains: Sequence[Leaves], norms: np.ndarray) -> list[int]:
    """Find the first chain with equal arrays; only chains of equal norm are compared."""

    def are_alike(one: int, other: int) -> bool:
        equal = map(np.array_equal, chains[one], chains[other])
        return one == other or (norms[one] == norms[other] and all(equal))

    return [next(x for x in range(c + 1) if are_alike(x, c)) for c in range(len(chains))]


def _choose(first: Leaves, last: Leaves, number: int, seed: int) -> list[tuple[int, int]]:
    """Choose scalars of leaves that differ between two draws, as pairs of leaf and index."""
    moves = np.array([np.any(x != y) for x, y in zip(first, last, strict=True)])
    sizes = np.array([leaf.size for leaf in first]) * (moves | ~moves.any())
    ends, total = np.cumsum(sizes), int(sizes.sum())
    chosen = np.random.default_rng(seed).choice(total, min(number, total), replace=False)
    leaves = np.searchsorted(ends, chosen, side="right")
    return [*zip(leaves.tolist(), (chosen - (ends - sizes)[leaves]).tolist(), strict=True)]


def _distance(leaves: Leaves, others: Leaves | None = None) -> float:
    """Compute the norm of the difference in float64."""
    pairs = zip(leaves, others or [0.0] * len(leaves), strict=True)
    differences = (np.subtract(leaf, other, dtype=float) for leaf, other in pairs)
    return float(np.sqrt(sum(np.vdot(x, x) for x in differences)))
