"""Plots of searches and of the stopping rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optax_smile import _check
from optax_smile._types import Options
from optax_smile.plots._axes import (
    AXES,
    PALETTE,
    add_legend,
    chain_style,
    count_along,
    dot_if_single,
    open_axes,
    pick_colors,
    returned_by,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from optax_smile.chains.select import Selection
    from optax_smile.draws.snapshots import Stopping
    from optax_smile.local import LearningCoefficient, PrecisionSearch

# Nats per input; candidates further below the best of their round do not affect the scale.
FAR_FROM_BEST = 1.0
# Horizontal distance between two candidates of a round, as a fraction of its steps.
NEXT_TO = 0.015


@_check.arguments("plots.selection", selection=returned_by("select", "final_lppd"), ax=AXES)
def selection(selection: Selection, *, ax: Axes | None = None) -> Axes:
    """Plot the validation score of each candidate at the end of each round.

    Args:
        selection: result of `optax_smile.select`.
        ax: where to draw; None makes a new figure.

    Returns:
        The axes: LPPD of the validation data against steps, logarithmic if there are several
        rounds. A line per candidate ends where it was dropped; error bars are standard errors of
        the difference in projected LPPD from the best of the round. The star is the LPPD of all
        draws of the chosen candidate. Values more than one nat below the best of their round may be
        off the scale; a marker at the bottom shows them, a cross if the candidate failed.

    Raises:
        ValueError: not a `Selection`.
        ImportError: matplotlib is not installed.

    Example:
        >>> import numpy as np
        >>> from matplotlib.figure import Figure
        >>> from optax_smile import Selection
        >>> result = Selection(
        ...     best="psmile", draws=None, names=("psmile", "adam"), num_steps=np.array([100]),
        ...     lppd=np.array([[-1.0, -1.2]]), projected=np.array([[-0.9, -1.2]]),
        ...     standard_error=np.array([[0, 0.1]]),
        ...     start_lppd=-1.5, final_lppd=-0.9, total_steps=300, cost=0.3,
        ... )
        >>> selection(result, ax=Figure().subplots()).get_title()
        'Chosen: psmile, LPPD -0.9'
    """
    steps, lppd, final = selection.num_steps, selection.lppd, selection.final_lppd
    start = selection.start_lppd
    best = np.nanmax(lppd, axis=1, keepdims=True)
    near = np.append(lppd[lppd >= best - FAR_FROM_BEST], final)
    shown = near[np.isfinite(near)]
    if start >= shown.min() - FAR_FROM_BEST:
        shown = np.append(shown, start)
    low, high = shown.min(), shown.max()
    ax = open_axes(ax)
    ax.axhline(start, color="0.5", ls="--", lw=1, label=f"start: {start:.4g}")
    at_bottom: Options = {"transform": ax.get_xaxis_transform(), "clip_on": False, "ls": ""}
    for place, color in enumerate(pick_colors(len(selection.names))):
        name, values = selection.names[place], lppd[:, place]
        error = np.nan_to_num(selection.standard_error[:, place])
        finite = np.isfinite(values)
        style = {"color": color, "zorder": 2.5 if name == selection.best else 2}
        # Shift candidates so that their error bars do not overlap.
        at = steps * (1 + NEXT_TO * (place - (len(selection.names) - 1) / 2))
        ax.errorbar(at[finite], values[finite], error[finite], fmt="o-", label=name, **style)
        for marked, marker in (finite & (values < low), "v"), (np.isneginf(values), "x"):
            ax.plot(at[marked], 0 * at[marked], marker, **style | at_bottom)
        if name == selection.best:
            ax.plot(selection.total_steps, final, "*", color=color, ms=14, zorder=3)
    # Leave room even if all values are equal.
    room = max(0.06 * (high - low), 1e-3)
    ax.set(xscale="log" if len(steps) > 1 else "linear", ylim=(low - room, high + room))
    if len(steps) > 1:
        ends = sorted({*steps.tolist(), selection.total_steps})
        ax.set_xticks(ends, [f"{x:,}" for x in ends])
        ax.set_xticks([], minor=True)
    ax.set(title=f"Chosen: {selection.best}, LPPD {final:.4g}")
    ax.set(xlabel="steps per chain", ylabel="LPPD of validation data (nats per input)")
    add_legend(ax)
    return ax


@_check.arguments(
    "plots.stopping",
    stopping=returned_by(
        "EvidenceStop.judge", "log_e_value", "or `draws.stopping` of a run with `stop=`"
    ),
    ax=AXES,
)
def stopping(stopping: Stopping, *, ax: Axes | None = None) -> Axes:
    """Plot the evidence of a stopping rule at each look, and the evidence that it needs to stop.

    Args:
        stopping: attribute `stopping` of draws, or the result of `EvidenceStop.judge`.
        ax: where to draw; None makes a new figure.

    Returns:
        The axes: log e-value and its threshold against the number of draws of each chain. A point
        at or above the threshold stops the run.

    Raises:
        ValueError: not a `Stopping`.
        ImportError: matplotlib is not installed.
    """
    ax = open_axes(ax)
    draws = stopping.num_draws
    ax.plot(draws, stopping.log_e_value, "o-", color=PALETTE[0], label="log e-value")
    label = f"threshold, alpha {stopping.alpha:g}"
    style = {"color": "0.5", "label": label, **dot_if_single(len(draws))}
    ax.plot(draws, stopping.log_threshold, "--", **style)
    gain = f", LPPD {stopping.start_lppd:.4g} to {stopping.lppd[-1]:.4g}" if len(draws) else ""
    verdict = "Stopped" if stopping.has_stopped else "Not stopped"
    ax.set(title=f"{verdict}{gain}", ylabel="evidence (nats)")
    count_along(ax, "draws per chain")
    add_legend(ax)
    return ax


@_check.arguments(
    "plots.precision_search",
    search=returned_by("local_precision", "precisions"),
    ax=AXES,
)
def precision_search(search: PrecisionSearch, *, ax: Axes | None = None) -> Axes:
    """Plot the excess loss of draws against the precision of the prior around trained weights.

    Args:
        search: result of `optax_smile.local.local_precision`.
        ax: where to draw; None makes a new figure.

    Returns:
        The axes: excess loss of single draws against precision, both logarithmic, with standard
        errors. A star marks the chosen precision, a line the allowed excess.

    Raises:
        ValueError: not a `PrecisionSearch`.
        ImportError: matplotlib is not installed.
    """
    ax = open_axes(ax)
    order = np.argsort(search.precisions)
    error = np.nan_to_num(search.standard_error[order])
    ax.errorbar(
        search.precisions[order],
        search.excess[order],
        error,
        fmt="o-",
        color=PALETTE[0],
        label="draws",
    )
    best = search.prior_precision, search.excess[search.best]
    ax.plot(*best, "*", color=PALETTE[1], ms=14, zorder=3, label="chosen")
    label = f"allowed: {search.allowed:g}"
    ax.axhline(search.allowed, color="0.5", ls="--", lw=1, label=label)
    ax.set(xscale="log", yscale="log" if np.all(search.excess > 0) else "linear")
    ax.set(title=f"Prior precision {search.prior_precision:.3g}, excess loss {best[1]:.2g}")
    ax.set(xlabel="prior precision", ylabel="excess loss of single draws (nats per example)")
    add_legend(ax)
    return ax


@_check.arguments(
    "plots.learning_coefficient",
    found=returned_by("llc", "balance"),
    ax=AXES,
)
def learning_coefficient(found: LearningCoefficient, *, ax: Axes | None = None) -> Axes:
    """Plot the loss of each chain's draws in units of the coefficient; it should not drift.

    Args:
        found: result of `optax_smile.local.llc`.
        ax: where to draw; None makes a new figure.

    Returns:
        The axes: n beta (L - L(w)) of each chain, draw by draw, and the coefficient with its
        standard error as a band.

    Raises:
        ValueError: not a `LearningCoefficient`.
        ImportError: matplotlib is not installed.
    """
    ax = open_axes(ax)
    for style, trace in zip(chain_style(len(found.trace)), found.trace, strict=True):
        ax.plot(np.arange(1, len(trace) + 1), trace, **style)
    error = np.nan_to_num(found.standard_error)
    ax.axhspan(found.llc - error, found.llc + error, color="0.5", alpha=0.4, zorder=3)
    ax.axhline(found.llc, color="k", lw=1, zorder=3, label="llc")
    ax.set(title=f"Learning coefficient {found.llc:.4g} +- {found.standard_error:.2g}")
    ax.set(ylabel="n beta (L - L(w))")
    count_along(ax, "draw")
    add_legend(ax)
    return ax
