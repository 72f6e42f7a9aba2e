"""Plot of a choice between samplers and optimizers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from optax_smile import _check
from optax_smile.plots._axes import AXES, add_legend, open_axes, pick_colors, returned_by

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from optax_smile.chains.select import Selection

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
        the difference from the best candidate of the round. The star is the LPPD of all draws of
        the chosen candidate. Values more than one nat below the best of their round may be off the
        scale; a marker at the bottom shows them, a cross if the candidate failed.

    Raises:
        ValueError: not a `Selection`.
        ImportError: matplotlib is not installed.

    Example:
        >>> import numpy as np
        >>> from matplotlib.figure import Figure
        >>> from optax_smile import Selection
        >>> result = Selection(
        ...     best="psmile", draws=None, names=("psmile", "adam"), num_steps=np.array([100]),
        ...     lppd=np.array([[-1.0, -1.2]]), expected=np.array([[-0.9, -1.2]]),
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
    at_bottom: dict[str, Any] = {"transform": ax.get_xaxis_transform(), "clip_on": False, "ls": ""}
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
    ax.set(title=f"Chosen: {selection.best}, LPPD {final:.4g}")
    ax.set(xlabel="steps per chain", ylabel="LPPD of validation data (nats per input)")
    add_legend(ax)
    return ax
