"""Images with their predictions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from optax_smile import _check
from optax_smile._types import Options
from optax_smile.metrics._checks import Each
from optax_smile.plots._axes import AXES, PALETTE, UNCERTAINTY, open_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# Only the images that are drawn are checked, later.
ANYTHING = Each(text="numbers", test=lambda numbers: np.ones(np.shape(numbers), bool))
IMAGES = _check.Array(
    "[input, height, width] or [input, height, width, channel]", ANYTHING, dtype=None
)
MEAN = _check.Array("[input, class] or [input]")
TARGETS = _check.Array("[input]") | None
# Grey, red-green-blue, and the same with opacity.
CHANNELS = (1, 3, 4)
# Images in a row.
NUMBER = 6
# Space between images, for a caption and for the name of a row, in widths of an image.
GAP, CAPTION, NAME = 0.12, 0.5, 0.3


def pick(
    mean: np.ndarray, uncertainty: np.ndarray, targets: np.ndarray | None, number: int
) -> dict[str, np.ndarray]:
    """Pick the inputs of each row, most extreme first; return indices by the row's name.

    Picking again from the picked inputs returns the same ones. Arguments as for `examples`.
    """
    order = np.argsort(uncertainty, kind="stable")
    rows = {"most certain": order[:number], "least certain": order[::-1][:number]}
    if targets is None:
        return rows
    if mean.ndim == 2:
        labels = targets.astype(int)
        wrong = np.flatnonzero(mean.argmax(axis=1) != labels)
        off = -mean[wrong, labels[wrong]]
    else:
        wrong = np.arange(len(mean))
        off = np.abs(targets - mean) / np.sqrt(np.maximum(uncertainty, np.finfo(float).tiny))
    worst = wrong[np.argsort(-off, kind="stable")][:number]
    name = "wrong, worst first"
    if mean.ndim == 1:
        name = "largest errors, in standard deviations"
    return rows | ({name: worst} if len(worst) else {})


@_check.arguments(
    "plots.examples",
    images=IMAGES,
    mean=MEAN,
    uncertainty=UNCERTAINTY,
    targets=TARGETS,
    number=_check.Whole(1),
    ax=AXES,
)
def examples(
    images: ArrayLike,
    mean: ArrayLike,
    uncertainty: ArrayLike,
    targets: ArrayLike | None = None,
    *,
    number: int = NUMBER,
    ax: Axes | None = None,
) -> Axes:
    """Show the images with the most certain, the least certain and the worst predictions.

    Check whether you too would be certain about the first ones and uncertain about the others.

    Args:
        images: `[input, height, width]`, or with 1, 3 or 4 channels as a last axis; in any range:
            the smallest number of all images is drawn black and the largest white.
        mean: class probabilities `[input, class]`, or predicted numbers `[input]`.
        uncertainty: entropy in nats of the probabilities, or variance of the numbers, `[input]`,
            such as `Prediction.total`.
        targets: labels, or numbers, `[input]`.
        number: images in a row, >= 1.
        ax: where to draw; None makes a new figure.

    Returns:
        The axes: one row of images for each group. The third row needs targets and is left out if
        no prediction is wrong. Below an image are the class with its probability, or the number
        with its standard deviation, then the entropy, or the target (coloured if the class is
        wrong).

    Raises:
        ValueError: invalid images, mismatched shapes, or NaN.
        ImportError: matplotlib is not installed.

    Example:
        >>> import numpy as np
        >>> from matplotlib.figure import Figure
        >>> images, probabilities = np.arange(8.0).reshape(2, 2, 2), [[0.9, 0.1], [0.4, 0.6]]
        >>> ax = examples(images, probabilities, [0.33, 0.67], [0, 0], ax=Figure().subplots())
        >>> [text.get_text() for text in ax.texts][:2]
        ['most certain', '0: 90 %\\n0.33 nats']
    """
    images = _scaled(np.asarray(images))
    mean, uncertainty, targets = _checked(len(images), mean, uncertainty, targets)
    ax = open_axes(ax)
    rows = pick(mean, uncertainty, targets, number)
    columns, height = max(map(len, rows.values())), images.shape[1] / images.shape[2]
    top = 0.0
    for name, chosen in rows.items():
        ax.text(0, top + NAME * 0.6, name, ha="left", va="center", size="small", weight="bold")
        top += NAME
        for column, at in enumerate(chosen):
            left = column * (1 + GAP)
            # The vertical axis points down.
            place = {"extent": (left, left + 1, top + height, top), "interpolation": "nearest"}
            ax.imshow(images[at], cmap="gray", vmin=0, vmax=1, zorder=2, **place)
            caption, is_wrong = _caption(mean[at], float(uncertainty[at]), targets, at)
            color = PALETTE[1] if is_wrong else "black"
            text: Options = {"ha": "center", "va": "top", "size": "small", "color": color}
            ax.text(left + 0.5, top + height + 0.04, caption, **text)
        top += height + CAPTION
    ax.set(xlim=(0, columns * (1 + GAP) - GAP), ylim=(top, 0), aspect="equal")
    ax.set_title("Images and their predictions")
    ax.set_axis_off()
    return ax


def _caption(
    mean: np.ndarray, uncertainty: float, targets: np.ndarray | None, at: int
) -> tuple[str, bool]:
    """Return the caption of an image, and whether its predicted class is wrong."""
    if mean.ndim == 0:
        text = f"{mean:.3g} ± {np.sqrt(max(uncertainty, 0)):.2g}"
        return text + ("" if targets is None else f"\nwas {targets[at]:.3g}"), False
    first = mean.argmax()
    text = f"{first}: {mean[first]:.0%}".replace("%", " %")
    if targets is not None and first != targets[at]:
        return f"{text}\nis {targets[at]:.0f}", True
    return f"{text}\n{max(uncertainty, 0):.2f} nats", False


def _checked(
    number: int, mean: ArrayLike, uncertainty: ArrayLike, targets: ArrayLike | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Require a prediction for each of the images."""
    where = "plots.examples"
    means: np.ndarray = MEAN(where, "mean", mean)
    spread: np.ndarray = UNCERTAINTY(where, "uncertainty", uncertainty)
    labels: np.ndarray | None = TARGETS(where, "targets", targets)
    for argument, array in {"mean": means, "uncertainty": spread, "targets": labels}.items():
        if array is not None and len(array) != number:
            rule = f"of {number} inputs, as many as `images`"
            _check.fail(where, argument, rule, f"shape {array.shape}")
    classes = np.arange(means.shape[-1])
    if labels is not None and means.ndim == 2 and not np.isin(labels, classes).all():
        rule = f"classes from 0 to {means.shape[1] - 1}"
        _check.fail(where, "targets", rule, f"{labels.min():g} to {labels.max():g}")
    return means, spread, labels


def _scaled(images: np.ndarray) -> np.ndarray:
    """Scale images to [0, 1], and drop a channel axis of length 1."""
    if images.ndim == 4 and images.shape[-1] not in CHANNELS:
        rule = f"images with {', '.join(map(str, CHANNELS))} channels as the last axis"
        _check.fail("plots.examples", "images", rule, f"shape {images.shape}")
    images = _check.Array(each=_check.Real())("plots.examples", "images", images)
    # The difference of two finite numbers may overflow; after this division it cannot.
    images = images / (np.abs(images).max() or 1)
    low, spread = images.min(), np.ptp(images)
    scaled = (images - low) / spread if spread > 0 else np.zeros_like(images)
    return scaled[..., 0] if scaled.ndim == 4 and scaled.shape[-1] == 1 else scaled


def keep(
    images: ArrayLike,
    mean: ArrayLike,
    uncertainty: ArrayLike,
    targets: ArrayLike | None,
    number: int = NUMBER,
) -> tuple[np.ndarray, np.ndarray]:
    """Select the images that `examples` draws: their indices, and the images as bytes.

    Arguments and errors as for `examples`, except that only the selected images must be finite.
    """
    given: np.ndarray = IMAGES("plots.examples", "images", images)
    rows = pick(*_checked(len(given), mean, uncertainty, targets), number)
    places = np.unique(np.concatenate(list(rows.values())))
    return places, np.round(255 * _scaled(given[places])).astype(np.uint8)
