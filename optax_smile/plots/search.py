"""Which step size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from optax_smile import _check
from optax_smile.plots._axes import AXES, PALETTE, add_legend, open_axes, returned_by

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from optax_smile.chains.find_step_size import StepSizeSearch

# Nats per input; a step size with which targets are so much less probable is no candidate.
FAR_FROM_BEST = 1.0


@_check.arguments(
    "plots.step_size_search",
    search=returned_by("find_step_size", "start_chain_lppd"),
    ax=AXES,
)
def step_size_search(search: StepSizeSearch, *, ax: Axes | None = None) -> Axes:
    """Draw what chains with each step size predict; a good search has its best in the middle.

    To the left the chains hardly leave their start, to the right they miss the posterior.

    Args:
        search: what `optax_smile.find_step_size` returned.
        ax: where to draw; None makes a new figure.

    Returns:
        The axes: LPPD against step size, logarithmic, of all chains, with the standard error of the
        difference to the best, and of each chain as a dot. The scale is that of what lies within a
        nat of the best; the others are marked at the bottom, with a cross if they failed.

    Raises:
        ValueError: something else than a `StepSizeSearch`.
        ImportError: matplotlib is missing.

    Example:
        >>> import numpy as np
        >>> from matplotlib.figure import Figure
        >>> from optax_smile import StepSizeSearch
        >>> search = StepSizeSearch(
        ...     np.array([0.1, 1]), np.array([-2.0, -np.inf]), np.array([0, np.nan]),
        ...     np.array([[-2.5], [-np.inf]]), np.array([0, 0.5]), -4.0, np.array([-5.0]),
        ... )
        >>> step_size_search(search, ax=Figure().subplots()).get_title()
        'Best step size: 0.1, LPPD -2'
    """
    sizes, lppd, chain_lppd = search.step_sizes, search.lppd, search.chain_lppd
    best, num_chains = lppd.max(), chain_lppd.shape[1]
    shown = np.concatenate([[search.start_lppd], lppd, chain_lppd.ravel()])
    shown = shown[shown >= best - FAR_FROM_BEST]
    failed = np.isneginf(lppd)
    below = ~failed & (lppd < shown.min())
    ax = open_axes(ax)
    ax.axhline(
        search.start_lppd, color="0.5", ls="--", lw=1, label=f"start: {search.start_lppd:.4g}"
    )
    label: Any = ["single chains", *[None] * (num_chains - 1)]
    ax.plot(sizes, chain_lppd, ".", color=PALETTE[5], ms=7, mec="none", label=label)
    error = np.nan_to_num(search.standard_error[~failed])
    label = f"all {num_chains} chains"
    line = {"fmt": "o-", "color": PALETTE[0], "label": label}
    ax.errorbar(sizes[~failed], lppd[~failed], error, **line)
    ax.plot(search.best, best, "*", color=PALETTE[1], ms=14, zorder=3, label="best")
    at_bottom = {"transform": ax.get_xaxis_transform(), "clip_on": False, "ls": "", "color": "k"}
    for marked, marker, label in (below, "v", "further down"), (failed, "x", "failed"):
        if marked.any():
            ax.plot(sizes[marked], 0 * sizes[marked], marker=marker, label=label, **at_bottom)
    # A scale of no height has no room.
    room = max(0.06 * np.ptp(shown), 1e-3)
    ax.set(xscale="log", ylim=(shown.min() - room, shown.max() + room))
    ax.set(title=f"Best {search.name}: {search.best:.3g}, LPPD {best:.4g}")
    ax.set(xlabel=search.name, ylabel="LPPD of validation data (nats per input)")
    add_legend(ax)
    return ax
