"""Plot of the paths of the chains."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import numpy as np

from optax_smile import _check
from optax_smile._types import Tree
from optax_smile.plots._axes import AXES, MOST_NAMED_CHAINS, add_legend, open_axes, pick_colors

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Number of coordinates held in float64 at a time.
COLUMNS_AT_A_TIME = 1 << 16
# Fraction of the variance below which a direction consists of float64 rounding errors.
RANK_TOLERANCE = 1e-12


def _points(where: str, params: Tree, start: Tree) -> tuple[list[np.ndarray], tuple[int, int]]:
    """Return leaves as `[point, column]`, draws then starts; and numbers of chains and draws."""
    leaves, structure = jax.tree.flatten_with_path(params)
    shapes = {jax.tree_util.keystr(path) or "array": np.shape(leaf) for path, leaf in leaves}
    listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items()) or "nothing"
    axes = {shape[:2] for shape in shapes.values()}
    if len(axes) != 1 or len(next(iter(axes))) != 2 or 0 in next(iter(axes)):
        rule = "arrays [chain, draw, ...] with the same two leading axes, neither empty"
        _check.fail(where, "params", rule, listed)
    num_chains, num_draws = next(iter(axes))
    starts = [None] * len(leaves)
    if start is not None:
        expected = [(num_chains, *shape[2:]) for shape in shapes.values()]
        starts, given = jax.tree.flatten(start)
        got = [np.shape(leaf) for leaf in starts]
        if given != structure or got != expected:
            rule = f"a tree like `params` of arrays [chain, ...] with shapes {expected}"
            _check.fail(where, "start", rule, f"{given} with {got}")
    matrices = []
    for (path, leaf), first in zip(leaves, starts, strict=True):
        rows = np.asarray(leaf).reshape(num_chains * num_draws, -1)
        first = np.asarray(first).reshape(num_chains, -1) if first is not None else rows[:0]
        for argument, values in ("params", rows), ("start", first):
            if not np.isfinite(values).all():
                name = jax.tree_util.keystr(path) or "the array"
                _check.fail(where, argument, "finite", f"NaN or inf in {name}")
        matrices.append(np.concatenate([rows, first]) if len(first) else rows)
    if not sum(rows.shape[1] for rows in matrices):
        _check.fail(where, "params", "of at least one dimension", listed)
    return matrices, (num_chains, num_draws)


def _principal_plane(matrices: list[np.ndarray], num_draws: int) -> tuple[np.ndarray, np.ndarray]:
    """Project all points on the first two principal axes of the draws; return variance shares too.

    With `X` the centred draws and `X X^T = U diag(l) U^T`, the coordinates are `U sqrt(l)`; those
    of another point `x` are `x X^T U / sqrt(l)`. In few dimensions it uses the smaller `X^T X`.
    """
    blocks = [
        rows[:, first : first + COLUMNS_AT_A_TIME]
        for rows in matrices
        for first in range(0, rows.shape[1], COLUMNS_AT_A_TIME)
    ]
    centred = (block.astype(float) - block[:num_draws].astype(float).mean(0) for block in blocks)
    if sum(block.shape[1] for block in blocks) > num_draws:
        products = sum((block @ block[:num_draws].T for block in centred), start=np.zeros(()))
        square = products[:num_draws]
        values, vectors = np.linalg.eigh(square)
        scale = np.sqrt(np.maximum(values, 0))
    else:
        products = np.concatenate(list(centred), axis=1)
        square = products[:num_draws].T @ products[:num_draws]
        values, vectors = np.linalg.eigh(square)
        scale = np.ones_like(values)
    total = np.trace(square)
    places, shares = np.zeros((len(products), 2)), np.zeros(2)
    spread = [at for at in (-1, -2)[: len(values)] if values[at] > RANK_TOLERANCE * total]
    for axis, at in enumerate(spread):
        places[:, axis] = products @ (vectors[:, at] / scale[at])
        shares[axis] = values[at] / total
    return places, shares


@_check.arguments("plots.chain_paths", params=_check.Tree(), start=_check.Tree() | None, ax=AXES)
def chain_paths(params: Tree, *, start: Tree = None, ax: Axes | None = None) -> Axes:
    """Plot the paths of the chains in the plane in which the draws vary most.

    Overlapping paths explore the same region. Separate clouds are different modes, the reason to
    run several chains. A path that still moves in one direction has not reached equilibrium.
    Distances are Euclidean and projected; check the shares of variance before you rely on them.

    Args:
        params: draws `[chain, draw, dimension]`, or a tree of arrays `[chain, draw, ...]`, such as
            the `params` of what `sample` returns; all leaves count.
        start: initial parameters of the chains, such as `warmstart` returns: like `params` without
            the draw axis. The start does not affect the plane.
        ax: where to draw; None makes a new figure.

    Returns:
        The axes: a coloured path per chain, with a cross at its start (its first draw without
        `start`) and a dot at its end. Axis labels give the share of the variance of all draws.

    Raises:
        ValueError: leading axes that disagree, an empty axis, NaN or inf, or a `start` that does
            not match the draws.
        ImportError: matplotlib is not installed.

    Cost: with n draws in total and d dimensions, time n * d * min(n, d) and memory min(n, d)^2
        plus one copy of the draws: thin them to a few thousand.

    Example:
        >>> import numpy as np
        >>> from matplotlib.figure import Figure
        >>> ax = chain_paths(np.eye(3)[None] * [2, 1, 0], ax=Figure().subplots())
        >>> ax.get_xlabel()
        'first principal axis (86.1 % of variance)'

    Source: principal components of the draws, as Li et al. 2018 draw paths of training.
    """
    matrices, (num_chains, num_draws) = _points("plots.chain_paths", params, start)
    places, shares = _principal_plane(matrices, num_chains * num_draws)
    paths = places[: num_chains * num_draws].reshape(num_chains, num_draws, 2)
    begins = paths[:, 0] if start is None else places[num_chains * num_draws :]
    ax = open_axes(ax)
    named = num_chains <= MOST_NAMED_CHAINS
    for chain, color in enumerate(pick_colors(num_chains)):
        label = f"chain {chain}" if named else None
        way = paths[chain] if start is None else np.vstack([begins[chain], paths[chain]])
        ax.plot(*way.T, "-", color=color, lw=0.9, alpha=0.6, label=label)
        size = 8 if named else 5
        ax.plot(*begins[chain], "x", color=color, ms=size, mew=size / 4, zorder=3)
        ax.plot(*paths[chain, -1], "o", color=color, ms=size, mec="white", mew=0.8, zorder=3)
    ax.plot([], [], "x", color="0.3", label="start" if start is not None else "first draw")
    ax.plot([], [], "o", color="0.3", label="last draw")
    first, second = (f"principal axis ({100 * share:.1f} % of variance)" for share in shares)
    ax.set(title="Paths of the chains", xlabel=f"first {first}", ylabel=f"second {second}")
    ax.set_aspect("equal", adjustable="datalim")
    add_legend(ax)
    return ax
