"""The pictures of the page, and as files beside it."""

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

# Dots per inch of those in the page, which a screen of twice the usual density shows sharply.
DENSITY = 200
# Without dates the same run has the same files.
FORMATS: dict[str, dict[str, Any]] = {
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
}


class Picture(NamedTuple):
    """What to draw.

    Attributes:
        name: of its files.
        caption: how to read it, one line.
        draw: `draw(ax)`.
    """

    name: str
    caption: str
    draw: Callable[[Any], Any]


class Pictures:
    """Draws pictures and keeps them until the page is written.

    Args:
        folder: name of that beside the page.

    Attributes:
        files: contents of the pictures, by name.
    """

    def __init__(self, folder: str):
        self.folder, self.files = folder, {}

    def draw(self, pictures: list[Picture]) -> str:
        """Make HTML with these pictures; where one cannot be drawn it says why."""
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
            # One picture less, such as of a single draw, is no reason to have none.
            missing = html.escape(picture.name)
            return f'<p class="note">No picture of the {missing}: {marked(str(error))}</p>'
        name = self._name(picture.name)
        shown = io.BytesIO()
        figure.savefig(shown, dpi=DENSITY)
        # What is arranged once stays so.
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
        """Name a file as no other one, also where capitals do not count."""
        plain = re.sub(r"[^\w-]+", "-", name.lower())
        taken = {file.rsplit(".", 1)[0] for file in self.files}
        numbered = (f"{plain}-{number}" for number in range(2, len(taken) + 3))
        return next(name for name in (plain, *numbered) if name not in taken)


def of_chains(snapshots: Any, nominal: float) -> Iterator[Picture]:
    """Pictures of how the chains ran; of what there is nothing to see there is none."""
    trace = snapshots.trace
    if np.isfinite(trace["step_size"]).any():
        yield Picture(
            "step size",
            "In a good run all chains end on one level.",
            lambda ax: plots.step_size(trace, ax=ax),
        )
    if np.isfinite(trace["energy_change"]).any():
        yield Picture(
            "energy error",
            "In a good run a flat, narrow band.",
            lambda ax: plots.energy_error(trace, ax=ax),
        )
    if nominal > 0 or np.any(trace["num_rejected"]):
        yield Picture(
            "rejections",
            "After the warm-up a good run stays near the nominal rate, if it has one.",
            lambda ax: plots.rejections(trace, nominal=nominal if nominal > 0 else None, ax=ax),
        )
    yield Picture(
        "paths",
        "Chains that walk over each other have found the same region; a path that leads in one"
        " direction has not arrived.",
        lambda ax: plots.chain_paths(snapshots.kept, start=snapshots.start, ax=ax),
    )


def of_predictions(stored: list[Stored]) -> Iterator[Picture]:
    """Pictures of what was predicted, methods and data laid over each other where they can be."""
    classified = {}
    for one in stored:
        mean, of = one.prediction.mean, one.prediction.uncertainty
        if of == "entropy" and mean is not None and one.targets is not None:
            classified[_label(one)] = labelled(mean, one.targets)

    def overlaid(plot):
        def draw(ax):
            for label, pair in classified.items():
                plot(*pair, label=label, ax=ax)

        return draw

    if classified:
        yield Picture(
            "reliability",
            "On the dotted line probabilities mean what they say; below it they promise too much.",
            overlaid(plots.reliability),
        )
        yield Picture(
            "risk and coverage",
            "A good method is wrong where it is unsure: low on the left.",
            overlaid(plots.risk_coverage),
        )
    entropies = {
        _label(one): one.prediction.total
        # Methods keep the colours of the pictures before.
        for one in sorted(stored, key=lambda one: one.targets is None)
        if one.prediction.uncertainty == "entropy" and np.ndim(one.prediction.total) == 1
    }
    if len(entropies) > 1:
        yield Picture(
            "entropy",
            "Inputs unlike the training data should lie to the right of those like them.",
            lambda ax: plots.entropy(entropies, ax=ax),
        )
    for one in stored:
        yield from _of_one(one)


def _of_one(stored: Stored) -> Iterator[Picture]:
    """Pictures that have room for one prediction alone."""
    prediction, targets = stored.prediction, stored.targets
    each = None if prediction.each is None else prediction.each.log_density
    if each is not None and each.shape[1] > 1:
        density = each.reshape(*each.shape[:2], -1)
        yield Picture(
            f"LPPD, {stored.name}",
            f"{stored.name}: flat at the end, more draws would not help. Higher is better.",
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
            f"{stored.name}: the band should hold as many targets as it says, and no more.",
            lambda ax: plots.regression_band(None, prediction.mean, std, targets, ax=ax),
        )


def of_images(stored: list[Stored]) -> Iterator[Picture]:
    """Images that were kept, with what is predicted of them."""
    for one in stored:
        if one.images is not None:
            yield Picture(
                f"examples, {one.name}",
                f"{one.name}: would you be sure of the first ones, and unsure of the others?",
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
    """Name for a legend; matplotlib leaves out what begins with an underscore."""
    return f" {stored.name}" if stored.name.startswith("_") else stored.name
