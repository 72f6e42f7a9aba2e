"""The plots of the page, and the same plots as files beside it."""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from optax_smile import plots
from optax_smile.draws._stored import Stored
from optax_smile.plots._axes import FIGURE_SIZE
from optax_smile.report._scores import classes, labelled
from optax_smile.report._words import marked

# Dots per inch of plots in the page, sharp on high-density screens.
DENSITY = 200
# Omit dates so that the files are reproducible.
FORMATS: dict[str, dict[str, Any]] = {
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
}


class Picture(NamedTuple):
    """A plot to draw.

    Attributes:
        name: name of its files.
        caption: how to read it, one line.
        draw: `draw(ax)`.
    """

    name: str
    caption: str
    draw: Callable[[Any], Any]


class Pictures:
    """Draw plots and keep them until the page is written.

    Args:
        folder: name of the folder beside the page.

    Attributes:
        files: contents of the files, by name.
    """

    def __init__(self, folder: str):
        self.folder, self.files = folder, {}

    def draw(self, pictures: list[Picture]) -> str:
        """Return HTML with these plots; in place of a plot that fails, the reason."""
        drawn = [self._draw(picture) for picture in pictures]
        return f'<div class="pictures">{"".join(drawn)}</div>' if drawn else ""

    def _draw(self, picture: Picture) -> str:
        import matplotlib
        from matplotlib.figure import Figure

        figure = Figure(figsize=FIGURE_SIZE, layout="constrained")
        axes = figure.subplots()
        try:
            picture.draw(axes)
        except ValueError as error:
            # One plot that fails, such as that of a single draw, must not stop the others.
            missing = html.escape(picture.name)
            return f'<p class="note">No plot of {missing}: {marked(str(error))}</p>'
        name = self._name(picture.name)
        shown = io.BytesIO()
        figure.savefig(shown, dpi=DENSITY)
        # Keep the layout of the first rendering.
        figure.set_layout_engine("none")
        links = []
        for kind, metadata in FORMATS.items():
            content = io.BytesIO()
            with matplotlib.rc_context({"svg.hashsalt": name}):
                figure.savefig(content, format=kind, metadata=metadata, dpi=DENSITY)
            self.files[f"{name}.{kind}"] = content.getvalue()
            place = quote(f"{self.folder}/{name}.{kind}")
            links.append(f'<a href="{html.escape(place)}">{kind.upper()}</a>')
        title = axes.get_title() or picture.name
        image = base64.b64encode(shown.getvalue()).decode()
        return (
            f'<figure><img alt="{html.escape(title)}" src="data:image/png;base64,{image}">'
            f"<figcaption>{marked(picture.caption)} <span>{' '.join(links)}</span></figcaption>"
            "</figure>"
        )

    def _name(self, name: str) -> str:
        """Return a file name that is unique even on case-insensitive file systems."""
        plain = re.sub(r"[^\w-]+", "-", name.lower())
        taken = {file.rsplit(".", 1)[0] for file in self.files}
        numbered = (f"{plain}-{number}" for number in range(2, len(taken) + 3))
        return next(name for name in (plain, *numbered) if name not in taken)


def of_chains(snapshots: Any, nominal: float) -> Iterator[Picture]:
    """Yield plots of the run; plots without data are left out."""
    trace = snapshots.trace
    if trace and np.isfinite(trace["step_size"]).any():
        yield Picture(
            "step size",
            "In a good run all chains end at the same level.",
            lambda ax: plots.step_size(trace, ax=ax),
        )
    if trace and np.isfinite(trace["energy_change"]).any():
        yield Picture(
            "energy error",
            "In a good run the band is flat and narrow.",
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
        lambda ax: plots.chain_paths(snapshots.kept, start=snapshots.start, ax=ax),
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


def of_images(stored: list[Stored]) -> Iterator[Picture]:
    """Yield plots of the stored images with their predictions."""
    for one in stored:
        if one.images is not None:
            yield Picture(
                f"examples, {one.name}",
                f"{one.name}: would you be certain of the first ones, and uncertain of the others?",
                lambda ax, one=one: _draw_examples(one, ax),
            )


def _draw_examples(stored: Stored, ax: Any):
    prediction, shown = stored.prediction, stored.shown
    mean = np.asarray(prediction.mean)
    if prediction.uncertainty == "entropy":
        mean = classes(mean, np.shape(prediction.total))
    targets = None if stored.targets is None else stored.targets[shown]
    images: Any = stored.images
    plots.examples(images, mean[shown], prediction.total[shown], targets, ax=ax)


def _label(stored: Stored) -> str:
    """Return a legend label; matplotlib skips labels that begin with an underscore."""
    return f" {stored.name}" if stored.name.startswith("_") else stored.name
