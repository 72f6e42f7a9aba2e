"""The plots of the page."""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from optax_smile import plots
from optax_smile._types import Tree
from optax_smile.draws.snapshots import StoredSnapshots
from optax_smile.plots._axes import add_legend, chain_style, count_along
from optax_smile.report._predictions import Stored, classes, labelled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Inches of a plot and dots per inch: labels are readable on a screen of 400 pixels.
SIZE, DENSITY = (4.8, 4.0), 230


# How to read a plot, and what draws it, `draw(ax=...)`.
Picture: TypeAlias = tuple[str, Callable[..., object]]


def draw(pictures: Iterable[Picture]) -> str:
    """Return HTML with these plots; in place of a plot that fails, the reason."""
    drawn = "".join(_draw(*picture) for picture in pictures)
    return f'<div class="pictures">{drawn}</div>' if drawn else ""


def _draw(caption: str, draw: Callable[..., object]) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    try:
        draw(ax=axes)
    except ValueError as error:
        # One plot that fails, such as that of a single draw, must not stop the others.
        return f'<p class="note">No plot: {marked(str(error))}</p>'
    content = io.BytesIO()
    figure.savefig(content, dpi=DENSITY)
    image = base64.b64encode(content.getvalue()).decode()
    return (
        f'<figure><img alt="{html.escape(axes.get_title())}" src="data:image/png;base64,{image}">'
        f"<figcaption>{marked(caption)}</figcaption></figure>"
    )


def marked(text: str) -> str:
    """Convert a text with code between backticks to HTML."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text))


def of_chains(snapshots: StoredSnapshots, draws: Tree, nominal: float) -> Iterator[Picture]:
    """Yield plots of the run and of some of its draws; plots without data are left out."""
    trace, stopping = snapshots.trace, snapshots.stopping
    rate = nominal if nominal > 0 else None
    if stopping is not None and len(stopping.num_draws):
        yield (
            "The run stops where the evidence of held-out data reaches the dashed line.",
            partial(plots.stopping, stopping),
        )
    if trace and np.isfinite(trace["step_size"]).any():
        yield (
            "In a good run all chains end at the same level.",
            partial(plots.step_size, trace),
        )
    if trace and np.isfinite(trace["energy_change"]).any():
        yield (
            "In a good run the band stays at one level.",
            partial(plots.energy_error, trace),
        )
    if trace and (rate or np.any(trace["num_rejected"])):
        yield (
            "After the warm-up a good run stays near the nominal rate, if it has one.",
            partial(plots.rejections, trace, nominal=rate),
        )
    yield (
        "Overlapping paths explore the same region; a path that keeps moving in one direction has"
        " not reached equilibrium.",
        partial(plots.chain_paths, draws, start=snapshots.start),
    )


def of_predictions(stored: list[Stored]) -> Iterator[Picture]:
    """Yield plots of the predictions, with methods and data sets overlaid where possible."""
    classified = {
        _label(one): labelled(one.prediction.mean, one.targets)
        for one in stored
        if one.prediction.uncertainty == "entropy"
        if one.prediction.mean is not None and one.targets is not None
    }
    if classified:
        yield (
            "Calibrated predictions lie on the dotted line; below it they are overconfident.",
            partial(_overlay, plots.reliability, classified),
        )
        yield (
            "A good method is wrong where it is uncertain: its curve is low on the left.",
            partial(_overlay, plots.risk_coverage, classified),
        )
    entropies = {
        _label(one): one.prediction.total
        # Methods keep their colours of the earlier plots.
        for one in sorted(stored, key=lambda one: one.targets is None)
        if one.prediction.uncertainty == "entropy" and np.ndim(one.prediction.total) == 1
    }
    if len(entropies) > 1:
        yield (
            "Out-of-distribution inputs should lie to the right of in-distribution inputs.",
            partial(plots.entropy, entropies),
        )
    for one in stored:
        yield from _of_one(one)


def _label(stored: Stored) -> str:
    """Return a legend label; matplotlib skips labels that begin with an underscore."""
    return f" {stored.name}" if stored.name.startswith("_") else stored.name


def _overlay(plot: Callable, classified: Mapping[str, tuple], ax: Axes):
    for label, (probabilities, labels) in classified.items():
        plot(probabilities, labels, label=label, ax=ax)


def _of_one(stored: Stored) -> Iterator[Picture]:
    """Yield plots that show a single prediction."""
    name, prediction, targets = stored.name, stored.prediction, stored.targets
    each = None if prediction.each is None else prediction.each.log_density
    if each is not None and each.shape[1] > 1:
        density = each.reshape(*each.shape[:2], -1)
        of_mean = prediction.each.mean is not None
        yield (
            f"{name}: if flat at the end, more draws would not help. Higher is better.",
            partial(plots.lppd, density),
        )
        yield (
            f"{name}: the input whose prediction varies most. In a good run the chains fluctuate"
            " around the same level, without trends or long excursions.",
            partial(
                _draw_trace,
                prediction.each.mean if of_mean else density,
                "prediction for" if of_mean else "log likelihood of",
            ),
        )
    if (
        targets is not None
        and prediction.uncertainty == "variance"
        and np.ndim(prediction.mean) == 1
    ):
        yield (
            f"{name}: the band should contain its nominal share of the targets.",
            partial(
                plots.regression_band, None, prediction.mean, np.sqrt(prediction.total), targets
            ),
        )


def _draw_trace(values: np.ndarray, what: str, ax: Axes):
    """Plot the numbers `[chain, draw, input]` of the input that varies most, draw by draw."""
    with np.errstate(invalid="ignore"):
        place = int(np.nan_to_num(values.var(axis=(0, 1)), nan=-1.0).argmax())
    for style, chain in zip(chain_style(len(values)), values[:, :, place], strict=True):
        ax.plot(np.arange(1, len(chain) + 1), chain, **style)
    ax.set(title="A prediction, draw by draw", ylabel=f"{what} input {place}")
    count_along(ax, "draw")
    add_legend(ax)


def of_images(stored: list[Stored]) -> Iterator[Picture]:
    """Yield plots of the stored images with their predictions."""
    for one in stored:
        if one.images is not None:
            prediction, shown, targets = one.prediction, one.shown, one.targets
            mean = np.asarray(prediction.mean)
            if prediction.uncertainty == "entropy":
                mean = classes(mean, np.shape(prediction.total))
            targets = None if targets is None else targets[shown]
            yield (
                f"{one.name}: would you be certain of the first ones, and uncertain of the others?",
                partial(plots.examples, one.images, mean[shown], prediction.total[shown], targets),
            )
