"""Plots of a run: step size, energy error, rejected steps, paths of the chains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import numpy as np
from numpy.typing import ArrayLike

from optax_smile import _check, _trace
from optax_smile._types import Tree
from optax_smile.draws.snapshots import Snapshots
from optax_smile.plots._axes import (
    AXES,
    BAND_ALPHA,
    LINEAR_SPREAD,
    MOST_NAMED_CHAINS,
    PALETTE,
    add_legend,
    chain_style,
    count_along,
    dot_if_single,
    open_axes,
    pick_colors,
    split_windows,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# With fewer values the 5 % quantile is their minimum.
LEAST_VALUES = 20
# With fewer events the standard error of a rate is about half of it or more.
LEAST_EVENTS = 5
# More dots would be indistinguishable in one plot.
MOST_DOTS = 5_000
# Number of coordinates held in float64 at a time.
COLUMNS_AT_A_TIME = 1 << 16
# Fraction of the variance below which a direction consists of float64 rounding errors.
RANK_TOLERANCE = 1e-12
FINITE = _check.Tree(finite=True)


@_check.arguments("plots.step_size", trace=_trace.TRACE, ax=AXES)
def step_size(trace: Mapping[str, ArrayLike], *, ax: Axes | None = None) -> Axes:
    """Plot the step size of every chain; in a good run the chains end at the same constant level.

    If the step size still falls at the end, use a longer warm-up.

    Args:
        trace: with `step_size` and `num_gradients`, `[chain, tick]`; non-finite values leave gaps.
        ax: where to draw; None makes a new figure.

    Returns:
        The axes: a line per chain, logarithmic if they spread over more than a factor of 3; with
        more than ten chains the legend names only their median.

    Raises:
        ValueError: the trace lacks these arrays, or their shapes differ.
        ImportError: matplotlib is not installed.

    Example:
        >>> from matplotlib.figure import Figure
        >>> trace = {"step_size": [[0.1, 0.2]], "num_gradients": [[10, 20]]}
        >>> step_size(trace, ax=Figure().subplots()).get_ylabel()
        'step size'
    """
    sizes, gradients = _trace.read("plots.step_size", trace, "step_size", "num_gradients")
    ax = open_axes(ax)
    for chain, style in enumerate(chain_style(len(sizes))):
        ax.plot(gradients[chain], sizes[chain], **style, **dot_if_single(sizes.shape[1]))
    if len(sizes) > MOST_NAMED_CHAINS:
        label = f"median of {len(sizes)} chains"
        ax.plot(np.median(gradients, 0), np.median(sizes, 0), "k", lw=1.5, label=label)
    known = sizes[np.isfinite(sizes) & (sizes > 0)]
    if known.size and known.max() > LINEAR_SPREAD * known.min():
        ax.set_yscale("log")
    else:
        ax.set_ylim(0, 1.1 * known.max() if known.size else 1)
    ax.set(title="Step size", ylabel="step size")
    count_along(ax, "gradients per chain")
    add_legend(ax)
    return ax


@_check.arguments("plots.energy_error", trace=_trace.TRACE, ax=AXES)
def energy_error(trace: Mapping[str, ArrayLike], *, ax: Axes | None = None) -> Axes:
    """Plot |energy change| of the steps; a good run keeps a flat, narrow band.

    The band is the central 90 % over all chains and neighbouring ticks. It rises when the step size
    is too large for the region that a chain has reached.

    Args:
        trace: with `energy_change` (nats, NaN or infinite where unknown) and `num_gradients`,
            `[chain, tick]`; with `accepted`, rejected steps get their own colour.
        ax: where to draw; None makes a new figure.

    Returns:
        The axes: a dot per tick (evenly thinned beyond 5,000), median and band, logarithmic. If no
        tick has an energy, a text says so.

    Raises:
        ValueError: the trace lacks these arrays, or their shapes differ.
        ImportError: matplotlib is not installed.

    Example:
        >>> from matplotlib.figure import Figure
        >>> trace = {"energy_change": [[0.1, -0.2]], "num_gradients": [[10, 20]]}
        >>> energy_error(trace, ax=Figure().subplots()).get_yscale()
        'log'
    """
    where = "plots.energy_error"
    change, gradients = _trace.read(where, trace, "energy_change", "num_gradients")
    accepted = np.ones_like(change)
    if "accepted" in trace:
        _, accepted = _trace.read(where, trace, "energy_change", "accepted")
    error = np.where(np.isfinite(change), np.abs(change), np.nan)
    ax = open_axes(ax)
    ax.set(title="Energy error of the steps", ylabel="|energy change| (nats)")
    count_along(ax, "gradients per chain")
    if np.isnan(error).all():
        text = "no energy: the loop passed no value"
        ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", wrap=True)
        ax.set(xlim=(0, gradients.max()), yticks=[])
        return ax
    if np.nanmax(error) > 0:
        ax.set_yscale("log")
    every = -(-error.size // MOST_DOTS)
    for kept, color, label in (1, PALETTE[5], None), (0, PALETTE[1], "rejected step"):
        shown = (accepted == kept) & (error > 0)
        if shown.any():
            dots = {"ms": 3 if kept else 6, "alpha": 0.5, "label": label, "rasterized": True}
            # Do not thin the few rejected steps.
            thin = slice(None, None, every if kept else 1)
            ax.plot(
                gradients[shown][thin], error[shown][thin], ".", color=color, mec="none", **dots
            )
    middle, quantiles = [], []
    for window in split_windows(error.shape[1], -(-LEAST_VALUES // len(error))):
        known = error[:, window][~np.isnan(error[:, window])]
        if known.size:
            middle.append(gradients[:, window].mean())
            quantiles.append(np.quantile(known, [0.05, 0.5, 0.95]))
    low, median, high = np.transpose(quantiles)
    ax.fill_between(middle, low, high, color=PALETTE[0], alpha=BAND_ALPHA, lw=0, label="5 to 95 %")
    ax.plot(middle, median, color=PALETTE[0], lw=1.5, label="median", **dot_if_single(len(middle)))
    add_legend(ax)
    return ax


@_check.arguments(
    "plots.rejections",
    trace=_trace.TRACE,
    nominal=_check.Real(0, 1, traced=False) | None,
    ax=AXES,
)
def rejections(
    trace: Mapping[str, ArrayLike], *, nominal: float | None = None, ax: Axes | None = None
) -> Axes:
    """Plot the rate of rejected steps; after the warm-up it should stay near the nominal rate.

    Args:
        trace: with the cumulative counts `num_rejected` and `num_gradients`, `[chain, tick]`, and
            at least two ticks; with `num_nonfinite`, the title counts those after the first tick.
        nominal: expected rejected steps per gradient, in [0, 1], such as
            (1 - `reject_quantile`) / (gradients per step).
        ax: where to draw; None makes a new figure.

    Returns:
        The axes: rejected steps per gradient in windows of ticks, for each chain (with more than
        ten chains: their range) and for all chains together; the title gives the rate over the
        whole trace. If the trace is long enough, windows contain about 5 events per chain (with
        more than ten chains: in total). If the rates spread widely, the scale is logarithmic, and
        linear below the smallest positive rate.

    Raises:
        ValueError: the trace lacks these arrays, their shapes differ, there is only one tick, or no
            gradient between two ticks.
        ImportError: matplotlib is not installed.

    Example:
        >>> from matplotlib.figure import Figure
        >>> trace = {"num_rejected": [[0, 1, 1]], "num_gradients": [[10, 20, 30]]}
        >>> ax = rejections(trace, nominal=0.1, ax=Figure().subplots())
        >>> ax.get_legend().get_texts()[-1].get_text()
        'nominal: 0.1'
    """
    where = "plots.rejections"
    rejected, gradients = _trace.read(where, trace, "num_rejected", "num_gradients")
    if rejected.shape[1] < 2 or not (np.diff(gradients) > 0).all():
        rule = "of at least 2 ticks with gradients in between"
        _check.fail(where, "trace", rule, f"num_gradients {gradients.tolist()}"[:200])
    num_nonfinite = 0.0
    if "num_nonfinite" in trace:
        _, count = _trace.read(where, trace, "num_rejected", "num_nonfinite")
        num_nonfinite = (count[:, -1] - count[:, 0]).sum()
    ax = open_axes(ax)
    total = (rejected[:, -1] - rejected[:, 0]).sum()
    num_gaps = rejected.shape[1] - 1
    num_lines = len(rejected) if len(rejected) <= MOST_NAMED_CHAINS else 1
    windows = split_windows(num_gaps, LEAST_EVENTS * num_lines * num_gaps / max(total, 1))
    ends = np.array([0, *(window[-1] + 1 for window in windows)])
    rejected, gradients = rejected[:, ends], gradients[:, ends]
    rates = np.diff(rejected) / np.diff(gradients)
    if len(rates) > MOST_NAMED_CHAINS:
        band = {"color": PALETTE[0], "alpha": BAND_ALPHA, "label": "range of the chains"}
        edges = gradients.mean(axis=0)
        ax.stairs(rates.max(axis=0), edges, baseline=rates.min(axis=0), fill=True, lw=0, **band)
    else:
        for chain, style in enumerate(chain_style(len(rates))):
            ax.stairs(rates[chain], gradients[chain], baseline=None, **style)
    together = np.diff(rejected.sum(axis=0)) / np.diff(gradients.sum(axis=0))
    label = f"all {len(rates)} chains"
    ax.stairs(together, gradients.mean(axis=0), baseline=None, color="k", lw=2, label=label)
    levels = np.append(rates, [] if nominal is None else nominal)
    # Matplotlib's scales cannot handle denormal numbers.
    levels = levels[levels > np.finfo(np.float32).tiny]
    if nominal is not None:
        ax.axhline(nominal, color="k", ls="--", lw=1, label=f"nominal: {nominal:.2g}")
    if levels.size and levels.max() > LINEAR_SPREAD**2 * levels.min():
        ax.set_yscale("symlog", linthresh=levels.min())
        ax.set_ylim(-levels.min() / 10, 1.2 * levels.max())
    else:
        ax.set_ylim(0, 1.1 * levels.max() if levels.size else 1)
        ax.ticklabel_format(axis="y", scilimits=(-2, 3))
    overall = total / (gradients[:, -1] - gradients[:, 0]).sum()
    title = f"Rejections: {total:,.0f} steps rejected, {overall:.2g} per gradient"
    broken = f"\n{num_nonfinite:,.0f} non-finite gradients or values" if num_nonfinite else ""
    ax.set(title=title + broken, ylabel="rejected steps per gradient")
    count_along(ax, "gradients per chain")
    add_legend(ax)
    return ax


def _matrices(tree: Tree, num_points: int) -> list[np.ndarray]:
    """Return the leaves of a tree as `[point, column]`."""
    return [np.asarray(leaf).reshape(num_points, -1) for leaf in jax.tree.leaves(tree)]


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


@_check.arguments("plots.chain_paths", params=FINITE, start=FINITE | None, ax=AXES)
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
    with _check.called("plots.chain_paths", "Snapshots"):
        draws = Snapshots(params, start=start)
    num_chains, num_points = draws.num_chains, len(draws)
    matrices = _matrices(params, num_points)
    if not sum(rows.shape[1] for rows in matrices):
        got = f"the shapes {jax.tree.map(np.shape, params)}"
        _check.fail("plots.chain_paths", "params", "of at least one dimension", _check.cut(got))
    if start is not None:
        pairs = zip(matrices, _matrices(start, num_chains), strict=True)
        matrices = [np.concatenate(pair) for pair in pairs]
    places, shares = _principal_plane(matrices, num_points)
    paths = places[:num_points].reshape(num_chains, -1, 2)
    begins = paths[:, 0] if start is None else places[num_points:]
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
