"""Shared by all plots: arguments, axes, colours, legends, windows."""

import textwrap
from typing import TYPE_CHECKING

import numpy as np

from optax_smile import _check
from optax_smile._types import Options

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito 2008, distinct for colour-blind readers; without yellow, too pale for a line.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# Line styles for when the colours are used up.
DASHES = ("-", "--", "-.", ":")
BAND_ALPHA = 0.25
# Size of a new figure, in inches.
FIGURE_SIZE = (5.6, 4.4)
# A longer legend would cover the plot.
MOST_NAMED_CHAINS = 10
# Characters in a row of a legend; longer names wrap.
LEGEND_WIDTH = 60
# Width of a legend handle, in characters; distance of the legend below the axes, in font sizes.
LEGEND_HANDLE, BELOW_AXES = 6, 3.6
# Ratio of largest to smallest value up to which a linear axis works well.
LINEAR_SPREAD = 3.0
# Enough windows to see a trend, few enough that each averages over many ticks.
MOST_WINDOWS = 40


AXES = _check.Where("matplotlib axes", lambda value: hasattr(value, "transAxes")) | None


def returned_by(function: str, attribute: str, also: str = "") -> _check.Constraint:
    """Require the result of another package's function, recognised by an attribute."""
    return _check.Where(
        f"the result of `{function}` {also}".rstrip(),
        lambda value: hasattr(value, attribute) and not isinstance(value, type),
    )


def open_axes(ax: "Axes | None") -> "Axes":
    """Return `ax`, or the axes of a new figure."""
    with _check.needed("`optax_smile.plots` needs matplotlib", "plots"):
        import matplotlib.pyplot as plt
    return plt.subplots(figsize=FIGURE_SIZE, layout="constrained")[1] if ax is None else ax


def pick_colors(number: int) -> list:
    """Return distinct colours: the palette if it suffices, else shades of one scale."""
    if number <= len(PALETTE):
        return list(PALETTE[:number])
    import matplotlib

    return list(matplotlib.colormaps["viridis"](np.linspace(0, 0.9, number)))


def next_style(ax: "Axes", what: str) -> Options:
    """Return the line style of the next method on the same axes; `what` tags its line."""
    before = sum(line.get_gid() == what for line in ax.lines)
    dashes = DASHES[before // len(PALETTE) % len(DASHES)]
    return {"color": PALETTE[before % len(PALETTE)], "ls": dashes, "gid": what}


def chain_style(num_chains: int) -> list[Options]:
    """Return the line style of each chain; the legend names chains only if they are few."""
    if num_chains <= MOST_NAMED_CHAINS:
        colors = enumerate(pick_colors(num_chains))
        return [{"color": color, "lw": 1.0, "label": f"chain {chain}"} for chain, color in colors]
    return [{"color": PALETTE[0], "lw": 0.6, "alpha": 0.4}] * num_chains


def add_legend(ax: "Axes"):
    """Add a legend below the axes, where it covers nothing."""
    handles, labels = ax.get_legend_handles_labels()
    if not handles:
        return
    import matplotlib
    from matplotlib.transforms import ScaledTranslation

    down = BELOW_AXES * matplotlib.rcParams["font.size"] / 72
    below = ax.transAxes + ScaledTranslation(0, -down, ax.figure.dpi_scale_trans)
    longest = max(map(len, labels))
    columns = min(len(labels), max(1, LEGEND_WIDTH // (longest + LEGEND_HANDLE)))
    lines = [textwrap.fill(label, LEGEND_WIDTH) for label in labels]
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "bbox_transform": below}
    ax.legend(
        handles, lines, **place, ncols=columns, borderaxespad=0, fontsize="small", frameon=False
    )


def count_along(ax: "Axes", what: str):
    """Set up a horizontal axis that counts gradients or draws: its ticks are integers."""
    ax.set_xlabel(what)
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.locator_params(axis="x", nbins=6, integer=True, min_n_ticks=1)
    ax.margins(x=0.02)


def split_windows(num_ticks: int, least: float = 1) -> list[np.ndarray]:
    """Split the ticks into windows of equal length, of at least `least` ticks if possible."""
    number = int(min(MOST_WINDOWS, max(1, num_ticks // max(least, 1))))
    return np.array_split(np.arange(num_ticks), number)


def dot_if_single(number: int) -> Options:
    """Return a marker for a line of a single point, which would otherwise be invisible."""
    return {"marker": "o", "ms": 4} if number == 1 else {}
