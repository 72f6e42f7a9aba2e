"""The plots of the page."""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from optax_smile import plots
from optax_smile._types import Tree
from optax_smile.draws.prediction import Outcome
from optax_smile.plots._axes import add_legend, chain_style, dot_if_single
from optax_smile.report._predictions import Stored, classes, labelled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from optax_smile.draws.snapshots import Stopping

# Inches of a plot and dots per inch: labels are readable on a screen of 400 pixels.
SIZE, DENSITY = (4.8, 4.0), 230


class Picture(NamedTuple):
    """A plot to draw.

    Attributes:
        name: what a text calls it.
        caption: how to read it, one line.
        draw: `draw(ax)`.
    """

    name: str
    caption: str
    draw: Callable[[Axes], object]


def draw(pictures: Iterable[Picture]) -> str:
    """Return HTML with these plots; in place of a plot that fails, the reason."""
    drawn = "".join(map(_draw, pictures))
    return f'<div class="pictures">{drawn}</div>' if drawn else ""


def _draw(picture: Picture) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    try:
        picture.draw(axes)
    except ValueError as error:
        # One plot that fails, such as that of a single draw, must not stop the others.
        missing = html.escape(picture.name)
        return f'<p class="note">No plot of {missing}: {marked(str(error))}</p>'
    content = io.BytesIO()
    figure.savefig(content, dpi=DENSITY)
    title = axes.get_title() or picture.name
    image = base64.b64encode(content.getvalue()).decode()
    return (
        f'<figure><img alt="{html.escape(title)}" src="data:image/png;base64,{image}">'
        f"<figcaption>{marked(picture.caption)}</figcaption></figure>"
    )


def marked(text: str) -> str:
    """Convert a text with code between backticks to HTML."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text))


def of_chains(
    trace: Mapping[str, np.ndarray],
    draws: Tree,
    start: Tree,
    nominal: float,
    stopping: Stopping | None,
) -> Iterator[Picture]:
    """Yield plots of the run; plots without data are left out.

    Args:
        trace: statistics of the draws, `[chain, draw]`.
        draws: some of the draws, a tree of arrays `[chain, draw, ...]`.
        start: start of the chains, a tree of arrays `[chain, ...]`, or None.
        nominal: nominal rate of rejected steps.
        stopping: result of the stopping rule, or None.
    """
    if stopping is not None and len(stopping.num_draws):
        yield Picture(
            "stopping",
            "The run stops where the evidence of held-out data reaches the dashed line.",
            lambda ax: plots.stopping(stopping, ax=ax),
        )
    if trace and np.isfinite(trace["step_size"]).any():
        yield Picture(
            "step size",
            "In a good run all chains end at the same level.",
            lambda ax: plots.step_size(trace, ax=ax),
        )
    if trace and np.isfinite(trace["energy_change"]).any():
        yield Picture(
            "energy error",
            "In a good run the band stays at one level.",
            lambda ax: plots.energy_error(trace, ax=ax),
        )
    if trace and (nominal > 0 or np.any(trace["num_rejected"])):
        yield Picture(
            "rejections",
            "After the warm-up a good run stays near the nominal rate, if it has one.",
            lambda ax: plots.rejections(trace, nominal=nominal if nominal > 0 else None, ax=ax),
        )
    yield Picture(
        "paths",
        "Overlapping paths explore the same region; a path that keeps moving in one direction has"
        " not reached equilibrium.",
        lambda ax: plots.chain_paths(draws, start=start, ax=ax),
    )


def of_predictions(stored: list[Stored]) -> Iterator[Picture]:
    """Yield plots of the predictions, with methods and data sets overlaid where possible."""
    classified = {}
    for one in stored:
        mean, kind = one.prediction.mean, one.prediction.uncertainty
        if kind == "entropy" and mean is not None and one.targets is not None:
            classified[_label(one)] = labelled(mean, one.targets)

    def overlaid(plot):
        def draw(ax):
            for label, pair in classified.items():
                plot(*pair, label=label, ax=ax)

        return draw

    if classified:
        yield Picture(
            "reliability",
            "Calibrated predictions lie on the dotted line; below it they are overconfident.",
            overlaid(plots.reliability),
        )
        yield Picture(
            "risk and coverage",
            "A good method is wrong where it is uncertain: its curve is low on the left.",
            overlaid(plots.risk_coverage),
        )
    entropies = {
        _label(one): one.prediction.total
        # Methods keep their colours of the earlier plots.
        for one in sorted(stored, key=lambda one: one.targets is None)
        if one.prediction.uncertainty == "entropy" and np.ndim(one.prediction.total) == 1
    }
    if len(entropies) > 1:
        yield Picture(
            "entropy",
            "Out-of-distribution inputs should lie to the right of in-distribution inputs.",
            lambda ax: plots.entropy(entropies, ax=ax),
        )
    for one in stored:
        yield from _of_one(one)


def _of_one(stored: Stored) -> Iterator[Picture]:
    """Yield plots that show a single prediction."""
    prediction, targets = stored.prediction, stored.targets
    each = None if prediction.each is None else prediction.each.log_density
    if each is not None and each.shape[1] > 1:
        density = each.reshape(*each.shape[:2], -1)
        yield Picture(
            f"LPPD, {stored.name}",
            f"{stored.name}: if flat at the end, more draws would not help. Higher is better.",
            lambda ax: plots.lppd(density, ax=ax),
        )
        yield Picture(
            f"trace, {stored.name}",
            f"{stored.name}: the input whose prediction varies most. In a good run the chains"
            " fluctuate around the same level, without trends or long excursions.",
            lambda ax: _draw_trace(stored, ax),
        )
    if (
        targets is not None
        and prediction.uncertainty == "variance"
        and np.ndim(prediction.mean) == 1
    ):
        std = np.sqrt(prediction.total)
        yield Picture(
            f"band, {stored.name}",
            f"{stored.name}: the band should contain its nominal share of the targets.",
            lambda ax: plots.regression_band(None, prediction.mean, std, targets, ax=ax),
        )


def _draw_trace(stored: Stored, ax: Axes):
    """Plot the prediction of one input, draw by draw."""
    each: Outcome = stored.prediction.each
    values, what = each.mean, "prediction for"
    if values is None:
        values = each.log_density.reshape(*each.log_density.shape[:2], -1)
        what = "log likelihood of"
    with np.errstate(invalid="ignore"):
        place = int(np.nan_to_num(values.var(axis=(0, 1)), nan=-1.0).argmax())
    for style, chain in zip(chain_style(len(values)), values[:, :, place], strict=True):
        ax.plot(np.arange(1, len(chain) + 1), chain, **style, **dot_if_single(len(chain)))
    ax.set(title="A prediction, draw by draw", xlabel="draw", ylabel=f"{what} input {place}")
    add_legend(ax)


def of_images(stored: list[Stored]) -> Iterator[Picture]:
    """Yield plots of the stored images with their predictions."""
    for one in stored:
        if one.images is not None:
            yield Picture(
                f"examples, {one.name}",
                f"{one.name}: would you be certain of the first ones, and uncertain of the others?",
                lambda ax, one=one: _draw_examples(one, ax),
            )


def _draw_examples(stored: Stored, ax: Axes):
    prediction, shown = stored.prediction, stored.shown
    mean = np.asarray(prediction.mean)
    if prediction.uncertainty == "entropy":
        mean = classes(mean, np.shape(prediction.total))
    targets = None if stored.targets is None else stored.targets[shown]
    assert stored.images is not None
    plots.examples(stored.images, mean[shown], prediction.total[shown], targets, ax=ax)


def _label(stored: Stored) -> str:
    """Return a legend label; matplotlib skips labels that begin with an underscore."""
    return f" {stored.name}" if stored.name.startswith("_") else stored.name
