"""Plots of searches around trained weights: prior precision and learning coefficient."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from optax_smile import _check
from optax_smile.plots._axes import AXES, PALETTE, add_legend, chain_style, open_axes, returned_by

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from optax_smile.local import LearningCoefficient, PrecisionSearch


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
    ax.set(xlabel="draw", ylabel="n beta (L - L(w))")
    add_legend(ax)
    return ax
