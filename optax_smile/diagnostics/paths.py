"""Paths of the chains in weight space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from optax_smile._types import Tree
from optax_smile.draws.snapshots import Snapshots, StoredSnapshots


class Paths(NamedTuple):
    """Norms of the draws, and distances from the draw before, `[chain, draw]`.

    `start_norm` is NaN without a start. `weights` are randomly chosen scalars that move, `size` is
    the number of parameters of a chain. `alike` is the first chain with an equal draw.
    """

    norm: np.ndarray
    moved: np.ndarray
    start_norm: np.ndarray
    weights: np.ndarray
    size: int
    alike: np.ndarray


def walk(snapshots: Snapshots | StoredSnapshots, num_weights: int, seed: int) -> Paths:
    """Follow the chains in one pass over the draws, holding two draws per chain in memory."""
    num_chains, num_draws, start = snapshots.num_chains, snapshots.num_draws, snapshots.start
    starts = [_leaves(jax.tree.map(lambda x, c=c: x[c], start)) for c in range(num_chains)]
    norm, moved = (np.full((num_chains, num_draws - x), np.nan) for x in (0, 1))
    alike = np.zeros((num_chains, num_draws), int)
    each, before, chosen, weights = map(_leaves, snapshots), [], [], []
    for draw, chains in enumerate(zip(*[each] * num_chains, strict=False)):
        norm[:, draw] = [_distance(leaves) for leaves in chains]
        alike[:, draw] = _first_alike(chains, norm[:, draw])
        if draw:
            moved[:, draw - 1] = [_distance(*pair) for pair in zip(chains, before, strict=True)]
        # Two draws show which leaves move.
        if draw == min(1, num_draws - 1):
            # Choose more than needed, since single entries may not move.
            chosen = _choose(before or chains, chains, 4 * num_weights, seed)
            weights += [_pick(leaves, chosen) for leaves in before]
        if chosen:
            weights += [_pick(leaves, chosen) for leaves in chains]
        before = chains
    series = np.array(weights, float).reshape(num_draws, num_chains, -1).swapaxes(0, 1)
    moves = (series != series[:, :1]).any(axis=(0, 1))
    return Paths(
        norm=norm,
        moved=moved,
        start_norm=np.array([_distance(leaves) if leaves else np.nan for leaves in starts]),
        weights=series[:, :, moves][:, :, :num_weights],
        size=sum(leaf.size for leaf in before[0]),
        alike=alike,
    )


Leaves = list[np.ndarray]


def _leaves(tree: Tree) -> Leaves:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def _first_alike(chains: Sequence[Leaves], norms: np.ndarray) -> list[int]:
    """Find the first chain with equal arrays; only chains of equal norm are compared."""

    def are_alike(one: int, other: int) -> bool:
        equal = map(np.array_equal, chains[one], chains[other])
        return one == other or (norms[one] == norms[other] and all(equal))

    return [next(x for x in range(c + 1) if are_alike(x, c)) for c in range(len(chains))]


def _pick(leaves: Leaves, places: list[tuple[int, int]]) -> list[float]:
    return [leaves[leaf].flat[place] for leaf, place in places]


def _choose(
    first: Sequence[Leaves], second: Sequence[Leaves], number: int, seed: int
) -> list[tuple[int, int]]:
    """Choose scalars of leaves that differ between two draws, as pairs of leaf and index."""
    pairs = [list(zip(x, y, strict=True)) for x, y in zip(first, second, strict=True)]
    moves = np.any([[np.any(x != y) for x, y in pair] for pair in pairs], axis=0)
    sizes = np.array([leaf.size for leaf in first[0]]) * (moves | ~moves.any())
    ends, total = np.cumsum(sizes), int(sizes.sum())
    places = np.random.default_rng(seed).choice(total, min(number, total), replace=False)
    leaves = np.searchsorted(ends, places, side="right")
    firsts = ends - sizes
    return [(int(leaf), int(at - firsts[leaf])) for leaf, at in zip(leaves, places, strict=True)]


def _distance(leaves: Leaves, others: Leaves | None = None) -> float:
    """Compute the norm of the difference in float64."""
    pairs = zip(leaves, others or [0.0] * len(leaves), strict=True)
    differences = (np.subtract(leaf, other, dtype=float) for leaf, other in pairs)
    return float(np.sqrt(sum(np.vdot(x, x) for x in differences)))
