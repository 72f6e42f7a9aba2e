"""Plots of a run and its predictions: did the chains run well, and can the result be trusted?

Each function draws one plot onto `ax`, or onto a new figure, and returns the axes. They need
matplotlib (`pip install 'optax-smile[plots]'`) and raise an `ImportError` without it. They raise
ValueError for missing, empty or mismatched arrays, and for NaN unless gaps are allowed. `trace` is
an attribute of the result of `sample`: arrays `[chain, tick]`, warm-up included. For other plots of
a run use ArviZ, after `diagnostics.to_arviz`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import numpy as np
from numpy.typing import ArrayLike

from optax_smile import _check, _trace, metrics
from optax_smile._types import Options
from optax_smile.draws.snapshots import Snapshots

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from optax_smile.chains.select import Selection

# Okabe and Ito 2008, distinct for colour-blind readers, without yellow, which is too pale for
# lines; and three muted colours of Tol 2021.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255")
PALETTE += ("#999933", "#AAAAAA")
# Style of a band, and size of a new figure in inches.
BAND: Options = {"color": PALETTE[0], "alpha": 0.25, "lw": 0}
FIGURE_SIZE = (5.6, 4.4)
# Legends: characters per row and per handle; distance below the axes in font sizes, which leaves
# room for ticks and label.
LEGEND_WIDTH, LEGEND_HANDLE, BELOW_AXES = 60, 6, 4.3
# Area of the largest and smallest dot of a reliability diagram, in square points.
LARGEST_DOT, SMALLEST_DOT = 350.0, 12.0
# Ratio of largest to smallest value up to which a linear axis works well.
LINEAR_SPREAD = 3.0
# Enough windows to see a trend, and enough values in each that the 5 % quantile is not the minimum.
MOST_WINDOWS, LEAST_VALUES = 40, 20
# In nats per input; candidates further below the best of their round do not affect the scale.
FAR_FROM_BEST = 1.0
# Horizontal distance between two candidates of a round, as a fraction of its steps.
NEXT_TO = 0.015

AXES = _check.Where("matplotlib axes", lambda value: hasattr(value, "transAxes")) | None
LABEL = _check.kind(str, "a name") | None
FINITE = _check.Tree(finite=True)
SELECTION = _check.Where("the result of `select`", lambda value: hasattr(value, "final_lppd"))


@_check.arguments("plots.reliability", num_bins=_check.Whole(1), label=LABEL, ax=AXES)
@_check.called("plots.reliability", "reliability", "ece")
def reliability(
    probabilities: ArrayLike,
    labels: ArrayLike,
    *,
    num_bins: int = 15,
    label: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Plot accuracy against confidence; calibrated predictions lie on the diagonal.

    Dots below the diagonal are overconfident, dots above it underconfident; their area is
    proportional to the share of the inputs. The legend gives the expected calibration error (ECE)
    with these bins. Calls with the same `ax` compare methods.

    Args:
        probabilities: class probabilities, `[input, class]`, rows that sum to one.
        labels: true classes, integers, `[input]`.
        num_bins: number of bins of equal width between 0 and 1, >= 1.
        label: name of the method in the legend.
        ax: where to draw; None makes a new figure.
    """
    bins = metrics.reliability(probabilities, labels, num_bins)
    error = metrics.ece(probabilities, labels, num_bins)
    ax, filled = _open(ax), bins.count > 0
    places = bins.confidence[filled], bins.accuracy[filled]
    areas = np.maximum(SMALLEST_DOT, LARGEST_DOT * bins.count[filled] / bins.count.sum())
    name, color = f"{label or 'predictions'} (ECE {error:.3f})", _next_color(ax)
    # Draw the line faintly: it means little where bins hold single inputs.
    ax.plot(*places, color=color, lw=1, alpha=0.5, label=name)
    ax.scatter(*places, areas, color=color, alpha=0.7, lw=0, zorder=3)
    ax.plot([0, 1], [0, 1], color="0.5", ls=":", lw=1)
    ax.set(title="Reliability (dot area: share of inputs)", xlabel="confidence", ylabel="accuracy")
    ax.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), aspect="equal")
    return _with_legend(ax)


@_check.arguments("plots.risk_coverage", label=LABEL, ax=AXES)
@_check.called("plots.risk_coverage", "risk_coverage", "aurc")
def risk_coverage(
    probabilities: ArrayLike,
    labels: ArrayLike,
    *,
    label: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Plot the error rate among the most confident predictions.

    A good model is wrong where it is uncertain: its curve falls towards zero on the left. The
    legend gives the area under the curve (AURC). Calls with the same `ax` compare methods.

    Args:
        probabilities: class probabilities, `[input, class]`, rows that sum to one.
        labels: true classes, integers, `[input]`.
        label: name of the method in the legend.
        ax: where to draw; None makes a new figure.
    """
    coverage, risk = metrics.risk_coverage(probabilities, labels)
    name = f"{label or 'predictions'} (AURC {metrics.aurc(probabilities, labels):.3g})"
    ax = _open(ax)
    ax.plot(coverage, risk, color=_next_color(ax), lw=1.5, label=name)
    ax.set(title="Risk against coverage", ylabel="share wrong among them")
    ax.set(xlabel="share of inputs answered, the most confident first", xlim=(0, 1))
    ax.set_ylim(bottom=0, auto=True)
    return _with_legend(ax)


@_check.arguments("plots.regression_band", ax=AXES)
@_check.called("plots.regression_band", "interval")
def regression_band(
    inputs: ArrayLike | None,
    mean: ArrayLike,
    std: ArrayLike,
    targets: ArrayLike | None = None,
    *,
    level: float = 0.95,
    ax: Axes | None = None,
) -> Axes:
    """Plot the predictive mean and its central band.

    A calibrated band contains its nominal share of the targets, which the title gives. It should
    widen where there were no training data.

    Args:
        inputs: one-dimensional, `[input]`, in any order; None, for inputs of more dimensions, sorts
            the predictions by their means.
        mean: predictive mean, `[input]`, or that of each draw of a Gaussian mixture,
            `[draw, input]`.
        std: predictive standard deviation, noise included, > 0: of the shape of `mean`, a scalar,
            or `[draw, 1]`.
        targets: observed values, `[input]`.
        level: probability inside the band, in (0, 1).
        ax: where to draw; None makes a new figure.
    """
    lower, upper = metrics.interval(mean, std, level)
    middle = np.atleast_2d(np.asarray(mean, float)).mean(axis=0)
    like = _check.Array(like="mean")
    along = like("inputs", middle if inputs is None else inputs, {"mean": lower})
    order = np.argsort(along, kind="stable")
    along = np.arange(middle.size) if inputs is None else along[order]
    observed = (like | None)("targets", targets, {"mean": lower})
    ax, title = _open(ax), f"{100 * level:g} % band"
    ax.fill_between(along, lower[order], upper[order], **BAND, label=title)
    if observed is not None:
        dots = {"ms": 4, "alpha": 0.6, "mec": "none", "label": "targets"}
        ax.plot(along, observed[order], ".", color=PALETTE[1], **dots)
        share = metrics.coverage(lower, upper, observed)
        title += f": holds {100 * share:.1f} % of {middle.size} targets"
    ax.plot(along, middle[order], color=PALETTE[0], lw=1.5, label="mean")
    xlabel = "rank of the predicted mean" if inputs is None else "input"
    ax.set(title=title, xlabel=xlabel, ylabel="target")
    return _with_legend(ax)


@_check.arguments("plots.step_size", trace=_trace.TRACE, ax=AXES)
def step_size(trace: Mapping[str, ArrayLike], *, ax: Axes | None = None) -> Axes:
    """Plot the step size of every chain; in a good run the chains end at the same constant level.

    If the step size still falls at the end, use a longer warm-up. The axis is logarithmic if step
    sizes differ by more than a factor of 3. The legend names the chains if there are at most ten.

    Args:
        trace: with `step_size` and `num_gradients`, `[chain, tick]`; non-finite values leave gaps.
        ax: where to draw; None makes a new figure.
    """
    sizes, gradients = _trace.read(trace, "step_size", "num_gradients")
    ax = _open(ax)
    # A line of a single point would be invisible.
    marker = "o" if sizes.shape[1] == 1 else ""
    for chain, size in enumerate(sizes):
        label = f"chain {chain}" if len(sizes) <= len(PALETTE) else None
        ax.plot(gradients[chain], size, color=_color(chain), label=label, lw=1, marker=marker)
    known = sizes[np.isfinite(sizes) & (sizes > 0)]
    if known.size and known.max() > LINEAR_SPREAD * known.min():
        ax.set_yscale("log")
    else:
        ax.set_ylim(bottom=0)
    ax.set(title="Step size", ylabel="step size")
    _count_gradients(ax)
    return _with_legend(ax)


@_check.arguments("plots.energy_error", trace=_trace.TRACE, ax=AXES)
def energy_error(trace: Mapping[str, ArrayLike], *, ax: Axes | None = None) -> Axes:
    """Plot |energy change| of the steps; a good run keeps a flat, narrow band.

    The band is the central 90 % over all chains and neighbouring ticks. It rises when the step size
    is too large for the region that a chain has reached. If no tick has an energy, the title says
    so.

    Args:
        trace: with `energy_change` (nats, NaN or infinite where unknown) and `num_gradients`,
            `[chain, tick]`; with `accepted`, rejected steps get their own colour.
        ax: where to draw; None makes a new figure.
    """
    names = ["energy_change", "num_gradients", *["accepted"] * ("accepted" in trace)]
    change, gradients, *marks = _trace.read(trace, *names)
    accepted = marks[0] if marks else np.array(1)
    error = np.where(np.isfinite(change), np.abs(change), np.nan)
    ax = _open(ax)
    if (error > 0).any():
        ax.set_yscale("log")
    for kept, color, size in (1, PALETTE[5], 3), (0, PALETTE[1], 6):
        shown, label = (accepted == kept) & (error > 0), None if kept else "rejected step"
        if shown.any():
            dots = {"color": color, "ms": size, "alpha": 0.5, "mec": "none", "label": label}
            ax.plot(gradients[shown], error[shown], ".", **dots)
    number = np.clip(error.size // LEAST_VALUES, 1, min(MOST_WINDOWS, error.shape[1]))
    windows = zip(*(np.array_split(x, number, axis=1) for x in (gradients, error)), strict=True)
    known = [(x.mean(), y[~np.isnan(y)]) for x, y in windows if not np.isnan(y).all()]
    if known:
        middle = [x for x, _ in known]
        low, median, high = np.transpose([np.quantile(y, [0.05, 0.5, 0.95]) for _, y in known])
        ax.fill_between(middle, low, high, **BAND, label="5 to 95 %")
        style = "o-" if len(known) == 1 else "-"
        ax.plot(middle, median, style, color=PALETTE[0], lw=1.5, label="median")
    title = "Energy error of the steps" if known else "No energy error: the loop passed no value"
    ax.set(title=title, ylabel="|energy change| (nats)")
    _count_gradients(ax)
    return _with_legend(ax)


@_check.arguments("plots.chain_paths", params=FINITE, start=FINITE | None, ax=AXES)
def chain_paths(params: object, *, start: object = None, ax: Axes | None = None) -> Axes:
    """Plot the paths of the chains in the plane in which the draws vary most.

    Overlapping paths explore the same region. Separate clouds are different modes. A path that
    still moves in one direction has not converged. The axis labels give the plane's share of the
    variance: if it is small, do not rely on distances in the plane. A cross marks the start of a
    path (its first draw without `start`), a dot its end.

    Args:
        params: a tree of arrays `[chain, draw, ...]`, such as the `params` of what `sample`
            returns.
        start: initial parameters of the chains `[chain, ...]`. They do not affect the plane.
        ax: where to draw; None makes a new figure.

    Cost: time n * d * min(n, d) for n draws in all and d dimensions, and three copies of the draws
        in float64: thin them to a few thousand.

    Source: principal components of the draws, as Li et al. 2018 draw paths of training.
    """
    with _check.called("plots.chain_paths", "Snapshots"):
        given = Snapshots(params, start=start)
    num_chains, draws = given.num_chains, _joined(params, len(given))
    middle = draws.mean(axis=0)
    _, lengths, axes = np.linalg.svd(draws - middle, full_matrices=False)
    shares = lengths**2 / (np.sum(lengths**2) or 1)
    # A single dimension has no second axis.
    missing = 2 - len(axes[:2])
    axes = np.pad(axes[:2], ((0, missing), (0, 0))).T
    paths = ((draws - middle) @ axes).reshape(num_chains, -1, 2)
    if start is not None:
        begins = (_joined(start, num_chains) - middle) @ axes
        paths = np.concatenate([begins[:, None], paths], axis=1)
    ax = _open(ax)
    for chain, path in enumerate(paths):
        color, label = _color(chain), f"chain {chain}" if num_chains <= len(PALETTE) else None
        ax.plot(*path.T, "-", color=color, lw=0.9, alpha=0.6, label=label)
        ax.plot(*path[0], "x", color=color, ms=7, mew=2, zorder=3)
        ax.plot(*path[-1], "o", color=color, ms=7, mec="white", mew=0.8, zorder=3)
    ax.plot([], [], "x", color="0.3", label="first draw" if start is None else "start")
    ax.plot([], [], "o", color="0.3", label="last draw")
    shares = np.pad(shares[:2], (0, missing))
    first, second = (f"principal axis ({100 * share:.1f} % of variance)" for share in shares)
    ax.set(title="Paths of the chains", xlabel=f"first {first}", ylabel=f"second {second}")
    ax.set_aspect("equal", adjustable="datalim")
    return _with_legend(ax)


def _joined(tree: object, num_points: int) -> np.ndarray:
    """Return the leaves of a tree as one array `[point, column]`."""
    leaves = [np.asarray(leaf).reshape(num_points, -1) for leaf in jax.tree.leaves(tree)]
    return np.concatenate(leaves, axis=1).astype(float)


@_check.arguments("plots.selection", selection=SELECTION, ax=AXES)
def selection(selection: Selection, *, ax: Axes | None = None) -> Axes:
    """Plot the validation score of each candidate at the end of each round.

    Error bars are standard errors of the difference in projected LPPD from the best of the round.
    The star is the LPPD of all draws of the chosen candidate. A triangle at the bottom stands for a
    value far below the best of its round, a cross for a candidate that failed.

    Args:
        selection: result of `optax_smile.select`.
        ax: where to draw; None makes a new figure.
    """
    steps, lppd, names = selection.num_steps, selection.lppd, selection.names
    start, final = selection.start_lppd, selection.final_lppd
    best = np.nanmax(lppd, axis=1, keepdims=True)
    near = np.append(lppd[lppd >= best - FAR_FROM_BEST], final)
    low, high = near[np.isfinite(near)].min(), near[np.isfinite(near)].max()
    if start >= low - FAR_FROM_BEST:
        low, high = min(low, start), max(high, start)
    # Leave room even if all values are equal.
    room = max(0.06 * (high - low), 1e-3)
    ax = _open(ax)
    ax.set(ylim=(low - room, high + room))
    ax.axhline(start, color="0.5", ls="--", lw=1, label=f"start: {start:.4g}")
    for place, name in enumerate(names):
        values, error = lppd[:, place], np.nan_to_num(selection.standard_error[:, place])
        finite = np.isfinite(values)
        look: Options = {"color": _color(place), "zorder": 2.5 if name == selection.best else 2}
        # Shift candidates so that their error bars do not overlap.
        at = steps * (1 + NEXT_TO * (place - (len(names) - 1) / 2))
        ax.errorbar(at[finite], values[finite], error[finite], fmt="o-", label=name, **look)
        for off, marker in (finite & (values < low), "v"), (np.isneginf(values), "x"):
            ax.plot(at[off], 0 * at[off] + low - room, marker, ls="", clip_on=False, **look)
        if name == selection.best:
            ax.plot(selection.total_steps, final, "*", color=_color(place), ms=14, zorder=3)
    ends = sorted({*steps.tolist(), selection.total_steps})
    ax.set_xscale("log")
    ax.set_xticks(ends, [f"{x:,}" for x in ends])
    ax.set_xticks([], minor=True)
    ax.set(title=f"Chosen: {selection.best}, LPPD {final:.4g}", xlabel="steps per chain")
    ax.set_ylabel("LPPD of validation data (nats per input)")
    return _with_legend(ax)


def _open(ax: Axes | None) -> Axes:
    """Return `ax`, or the axes of a new figure."""
    with _check.needed("`optax_smile.plots` needs matplotlib", "plots"):
        import matplotlib.pyplot as plt
    return plt.subplots(figsize=FIGURE_SIZE, layout="constrained")[1] if ax is None else ax


def _color(place: int) -> str:
    return PALETTE[place % len(PALETTE)]


def _next_color(ax: Axes) -> str:
    """Return the colour after those of the curves with a label."""
    return _color(len(ax.get_legend_handles_labels()[1]))


def _count_gradients(ax: Axes):
    """Set up a horizontal axis of gradients: its ticks are integers."""
    ax.set_xlabel("gradients per chain")
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.locator_params(axis="x", nbins=6, integer=True, min_n_ticks=1)


def _with_legend(ax: Axes) -> Axes:
    """Add a legend below the axes, where it covers nothing."""
    if labels := ax.get_legend_handles_labels()[1]:
        columns = max(1, LEGEND_WIDTH // (max(map(len, labels)) + LEGEND_HANDLE))
        look = {"fontsize": "small", "frameon": False, "ncols": min(len(labels), columns)}
        place = {"bbox_to_anchor": (0.5, 0), "borderaxespad": BELOW_AXES}
        ax.legend(loc="upper center", **place, **look)
    return ax
