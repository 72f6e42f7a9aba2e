"""What the pictures share: axes, colours, legends, windows."""

from typing import TYPE_CHECKING, Any

import numpy as np

from optax_smile import _check

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito 2008, tellable apart by the colour-blind; without yellow, too pale for a line.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
BAND_ALPHA = 0.25
# More names than that cover the picture.
MOST_NAMED_CHAINS = 10
# A linear axis shows smaller spreads well.
LINEAR_SPREAD = 3.0
# Enough to see a trend, few enough that each window averages over many ticks.
MOST_WINDOWS = 40


def open_axes(where: str, ax: "Axes | None") -> "Axes":
    """Return `ax`, or the axes of a new figure."""
    try:
        import matplotlib.pyplot as plt
        from matplotlib.axes import Axes
    except ImportError as error:
        raise ImportError(
            "`optax_smile.plots` needs matplotlib: pip install 'optax-smile[plots]'"
        ) from error
    if ax is not None:
        _check.kind(where, "ax", ax, Axes, "matplotlib axes, or None")
    return plt.subplots(figsize=(6.0, 4.2), layout="constrained")[1] if ax is None else ax


def check_label(where: str, label: Any):
    """Require a name for the legend, or none."""
    _check.kind(where, "label", label, (str, type(None)), "a name, or None")


def pick_colors(number: int) -> list[Any]:
    """Give one colour each: the palette while it lasts, else shades of one scale."""
    if number <= len(PALETTE):
        return list(PALETTE[:number])
    import matplotlib

    return list(matplotlib.colormaps["viridis"](np.linspace(0, 0.9, number)))


def next_color(ax: "Axes", what: str) -> str:
    """Give the colour of one more method drawn onto the same axes; `what` marks its line."""
    return PALETTE[sum(line.get_gid() == what for line in ax.lines) % len(PALETTE)]


def chain_style(num_chains: int) -> list[dict[str, Any]]:
    """Give the line style of each chain; only few chains are named in the legend."""
    if num_chains <= MOST_NAMED_CHAINS:
        colors = enumerate(pick_colors(num_chains))
        return [{"color": color, "lw": 1.0, "label": f"chain {chain}"} for chain, color in colors]
    return [{"color": PALETTE[0], "lw": 0.6, "alpha": 0.4}] * num_chains


def add_legend(ax: "Axes", loc: Any = "upper right", columns: int | None = None):
    """Name what has a label; the place is fixed because matplotlib's search for one is slow."""
    handles, _ = ax.get_legend_handles_labels()
    if handles:
        columns = columns or (1 if len(handles) <= 4 else 2)
        ax.legend(loc=loc, fontsize="small", ncols=columns, framealpha=0.8)


def make_room(ax: "Axes", top: float = 0.0, bottom: float = 0.0):
    """Lengthen the vertical axis by these shares of it, for a legend."""
    scale = ax.yaxis.get_transform()
    low, high = scale.transform(ax.get_ylim())
    ends = [low - bottom * (high - low), high + top * (high - low)]
    ax.set_ylim(*scale.inverted().transform(ends))


def count_gradients(ax: "Axes"):
    """Name the horizontal axis of pictures of a trace."""
    ax.set_xlabel("gradients per chain")
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.locator_params(axis="x", nbins=6)
    ax.margins(x=0.02)


def split_windows(num_ticks: int, least: float = 1) -> list[np.ndarray]:
    """Split the ticks into windows of one length, at least `least` if there are so many."""
    number = int(min(MOST_WINDOWS, max(1, num_ticks // max(least, 1))))
    return np.array_split(np.arange(num_ticks), number)


def dot_if_single(number: int) -> dict[str, Any]:
    """Mark a line of a single point, which would not be seen."""
    return {"marker": "o", "ms": 4} if number == 1 else {}
