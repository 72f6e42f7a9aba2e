"""Plots of predictions, and of images with their predictions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from optax_smile import _check, metrics
from optax_smile._types import Options
from optax_smile.metrics import DENSITY, NUM_BINS
from optax_smile.plots._axes import (
    AXES,
    BAND_ALPHA,
    LINEAR_SPREAD,
    PALETTE,
    add_legend,
    chain_style,
    dot_if_single,
    next_style,
    open_axes,
    pick_colors,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Area of the largest and smallest dot of a reliability diagram, in square points.
LARGEST_DOT, SMALLEST_DOT = 350.0, 12.0
# Number of bins of a histogram.
LEAST_BINS, MOST_BINS = 5, 30
# Only the images that are drawn are checked, later.
ANYTHING = _check.Where("a number", lambda numbers: np.ones(np.shape(numbers), bool))
IMAGES = _check.Array(
    "[input, height, width] or [input, height, width, channel]", ANYTHING, dtype=None
)
MEAN = _check.Array("[input, class] or [input]")
TARGETS = _check.Array("[input]") | None
# Entropies computed from float32 probabilities fall below zero by less.
UNCERTAINTY = _check.Array("[input]", _check.Real(-1e-5))
LABEL = _check.kind(str, "a name") | None
# Grey, red-green-blue, and the same with opacity.
CHANNELS = (1, 3, 4)
IMAGES_IN_ROW = 6
# Space between images, for a caption and for the name of a row, in widths of an image.
IMAGE_GAP, CAPTION_HEIGHT, HEADING_HEIGHT = 0.12, 0.5, 0.3


@_check.arguments("plots.reliability", num_bins=_check.Whole(1), label=LABEL, ax=AXES)
@_check.called("plots.reliability", "reliability", "ece")
def reliability(
    probabilities: ArrayLike,
    labels: ArrayLike,
    *,
    num_bins: int = NUM_BINS,
    label: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Plot accuracy against confidence; calibrated predictions lie on the diagonal.

    Dots below the diagonal are overconfident, dots above it underconfident. Call it repeatedly with
    the same `ax` to compare methods; each gets its own colour.

    Args:
        probabilities: class probabilities, `[input, class]`, rows that sum to one.
        labels: true classes, integers, `[input]`.
        num_bins: number of bins of equal width between 0 and 1, >= 1.
        label: name of the method in the legend.
        ax: where to draw; None makes a new figure.

    Returns:
        The axes: a dot per bin, with area proportional to its share of the inputs, and the
        diagonal. The legend gives the expected calibration error (ECE) with these bins.

    Raises:
        ValueError: as for `optax_smile.metrics.reliability`.
        ImportError: matplotlib is not installed.

    Example:
        >>> from matplotlib.figure import Figure
        >>> ax = reliability([[0.75, 0.25], [0.75, 0.25]], [0, 1], ax=Figure().subplots())
        >>> ax.get_legend().get_texts()[0].get_text()
        'ECE 0.250'
    """
    bins = metrics.reliability(probabilities, labels, num_bins)
    error = metrics.ece(probabilities, labels, num_bins)
    ax = open_axes(ax)
    style = next_style(ax, "reliability")
    if not any(line.get_gid() == "reliability" for line in ax.lines):
        ax.plot([0, 1], [0, 1], color="0.5", ls=":", lw=1)
    filled = bins.count > 0
    confidence, accuracy = bins.confidence[filled], bins.accuracy[filled]
    areas = np.maximum(SMALLEST_DOT, LARGEST_DOT * bins.count[filled] / bins.count.sum())
    name = f"ECE {error:.3f}" if label is None else f"{label} (ECE {error:.3f})"
    # Draw the line faintly: it means little where bins hold single inputs.
    ax.plot(confidence, accuracy, **style, lw=1, alpha=0.5, label=name)
    ax.scatter(confidence, accuracy, areas, color=style["color"], alpha=0.7, lw=0, zorder=3)
    ax.set(title="Reliability (dot area: share of inputs)", xlabel="confidence", ylabel="accuracy")
    ax.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), aspect="equal")
    add_legend(ax)
    return ax


@_check.arguments("plots.risk_coverage", label=LABEL, ax=AXES)
@_check.called("plots.risk_coverage", "risk_coverage", "aurc")
def risk_coverage(
    probabilities: ArrayLike,
    labels: ArrayLike,
    *,
    label: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Plot the error rate among the most confident predictions.

    A good model is wrong where it is uncertain: its curve falls towards zero on the left. Call it
    repeatedly with the same `ax` to compare methods.

    Args:
        probabilities: class probabilities, `[input, class]`, rows that sum to one.
        labels: true classes, integers, `[input]`.
        label: name of the method in the legend.
        ax: where to draw; None makes a new figure.

    Returns:
        The axes: the share of wrong predictions against the share of inputs answered, most
        confident first. The legend gives the area under the curve (AURC).

    Raises:
        ValueError: as for `optax_smile.metrics.risk_coverage`.
        ImportError: matplotlib is not installed.

    Example:
        >>> from matplotlib.figure import Figure
        >>> ax = risk_coverage([[0.9, 0.1], [0.6, 0.4]], [0, 1], ax=Figure().subplots())
        >>> ax.get_ylabel()
        'share wrong among them'
    """
    coverage, risk = metrics.risk_coverage(probabilities, labels)
    area = metrics.aurc(probabilities, labels)
    ax = open_axes(ax)
    style = next_style(ax, "risk_coverage")
    name = f"AURC {area:.3g}" if label is None else f"{label} (AURC {area:.3g})"
    ax.plot(coverage, risk, **style, lw=1.5, label=name)
    ax.set(title="Risk against coverage", ylabel="share wrong among them")
    ax.set(xlabel="share of inputs answered, the most confident first", xlim=(0, 1))
    curves = [line.get_ydata() for line in ax.lines if line.get_gid() == "risk_coverage"]
    top = max(float(np.max(curve)) for curve in curves)
    # If nothing is wrong, the curve has no height.
    ax.set_ylim(0, 1.05 * top if top > 0 else 1)
    add_legend(ax)
    return ax


@_check.arguments("plots.regression_band", ax=AXES)
@_check.called("plots.regression_band", "interval")
def regression_band(
    inputs: ArrayLike | None,
    mean: ArrayLike,
    std: ArrayLike,
    targets: ArrayLike | None = None,
    *,
    level: float = 0.95,
    ax: Axes | None = None,
) -> Axes:
    """Plot the predictive mean and its central band.

    A calibrated band contains its nominal share of the targets. It should widen where there were no
    training data.

    Args:
        inputs: one-dimensional, `[input]`, in any order; None, for inputs of more dimensions, sorts
            the predictions by their means.
        mean: predictive mean, `[input]`, or that of each draw of a Gaussian mixture,
            `[draw, input]`.
        std: predictive standard deviation, noise included, > 0: of the shape of `mean`, a scalar,
            or `[draw, 1]`.
        targets: observed values, `[input]`.
        level: probability inside the band, in (0, 1).
        ax: where to draw; None makes a new figure.

    Returns:
        The axes: mean, band, and the targets as dots; the title gives the share of targets inside.

    Raises:
        ValueError: mismatched shapes, NaN or no inputs; for `mean`, `std` and `level` as in
            `optax_smile.metrics.interval`.
        ImportError: matplotlib is not installed.

    Example:
        >>> from matplotlib.figure import Figure
        >>> ax = regression_band([1, 0], [2, 3], [1, 1], [2, 9], ax=Figure().subplots())
        >>> ax.get_title()
        '95 % band: holds 50.0 % of 2 targets'
    """
    where = "plots.regression_band"
    lower, upper = metrics.interval(mean, std, level)
    middle, like = np.atleast_2d(np.asarray(mean, float)).mean(axis=0), {"mean": lower}
    if inputs is None:
        order, horizontal = np.argsort(middle, kind="stable"), np.arange(middle.size)
    else:
        horizontal = _check.Array(like="mean")(where, "inputs", inputs, like)
        order = np.argsort(horizontal, kind="stable")
        horizontal = horizontal[order]
    title = f"Predictive mean and {100 * level:g} % band"
    observed = None
    if targets is not None:
        observed = _check.Array(like="mean")(where, "targets", targets, like)
        share = metrics.coverage(lower, upper, observed)
        title = f"{100 * level:g} % band: holds {100 * share:.1f} % of {len(observed)} targets"
    ax = open_axes(ax)
    band = {"color": PALETTE[0], "alpha": BAND_ALPHA, "lw": 0, "label": f"{100 * level:g} % band"}
    ax.fill_between(horizontal, lower[order], upper[order], **band)
    if observed is not None:
        dots = {"ms": 4, "alpha": 0.6, "mec": "none", "label": "targets"}
        ax.plot(horizontal, observed[order], ".", color=PALETTE[1], **dots)
    ax.plot(horizontal, middle[order], color=PALETTE[0], lw=1.5, label="mean")
    rank = "rank of the predicted mean"
    ax.set(title=title, xlabel=rank if inputs is None else "input", ylabel="target")
    add_legend(ax)
    return ax


@_check.arguments(
    "plots.lppd",
    log_likelihood=_check.Array("[chain, draw, input]", DENSITY, dtype=None),
    ax=AXES,
)
def lppd(log_likelihood: ArrayLike, *, ax: Axes | None = None) -> Axes:
    """Plot the log pointwise predictive density (LPPD) against the number of draws.

    Higher is better. If the curve is flat at the end, more draws would not help. The gap between
    single chains and all chains is the gain from running several.

    With the first m draws of each chain, `LPPD(m) = mean_i log mean_s p(y_i | draw s)`.

    Args:
        log_likelihood: log likelihood of each target under each draw, nats,
            `[chain, draw, input]`, without padding; -inf is a likelihood of zero.
        ax: where to draw; None makes a new figure.

    Returns:
        The axes: LPPD against m, logarithmic, of all chains (thick) and of each chain (thin).

    Raises:
        ValueError: another shape, an empty axis, NaN or +inf.
        ImportError: matplotlib is not installed.

    Cost: one pass over the draws; memory for the likelihoods of one draw of all chains.

    Example:
        >>> import numpy as np
        >>> from matplotlib.figure import Figure
        >>> ax = lppd(np.log([[[0.2], [0.6]]]), ax=Figure().subplots())
        >>> ax.lines[-1].get_ydata().round(3).tolist()
        [-1.609, -0.916]
    """
    log_likelihood = np.asarray(log_likelihood)
    num_chains, num_draws, _ = log_likelihood.shape
    single, together = np.empty((num_chains, num_draws)), np.empty(num_draws)
    total = np.full_like(log_likelihood[:, 0], -np.inf, float)
    for draw in range(num_draws):
        total = np.logaddexp(total, log_likelihood[:, draw])
        single[:, draw] = (total - np.log(draw + 1)).mean(axis=1)
        averaged = np.logaddexp.reduce(total, axis=0) - np.log(num_chains * (draw + 1))
        together[draw] = averaged.mean()
    ax = open_axes(ax)
    draws, mark = np.arange(1, num_draws + 1), dot_if_single(num_draws)
    if num_chains > 1:
        for chain, style in enumerate(chain_style(num_chains)):
            ax.plot(draws, single[chain], **style, **mark)
    label = f"all {num_chains} chains" if num_chains > 1 else "chain 0"
    ax.plot(draws, together, color="k", lw=2.5, label=label, **mark)
    ax.set(title=f"LPPD of all draws: {together[-1]:.4g} (higher is better)")
    ax.set(xlabel="draws per chain", ylabel="LPPD (nats per input)", xscale="log")
    ax.xaxis.set_major_formatter("{x:,g}")
    # Within a single decade there are only minor ticks.
    ax.xaxis.set_minor_formatter("{x:,g}" if num_draws < 10 else "")
    add_legend(ax)
    return ax


@_check.arguments(
    "plots.entropy",
    entropies=_check.Where(
        "a dict of arrays [input], at least one", lambda x: isinstance(x, Mapping) and x
    ),
    ax=AXES,
)
def entropy(entropies: Mapping[str, ArrayLike], *, ax: Axes | None = None) -> Axes:
    """Plot histograms of predictive entropies.

    Out-of-distribution data should lie to the right of in-distribution data.

    Args:
        entropies: by name, such as `{"test": ..., "OOD": ...}`, nats, `[input]`, such as
            `Prediction.total` of classes.
        ax: where to draw; None makes a new figure.

    Returns:
        The axes: outlines of the densities over the same bins, logarithmic if they spread over more
        than a factor of 30; the legend gives the means.

    Raises:
        ValueError: no entropies, another shape, negative, infinite or NaN.
        ImportError: matplotlib is not installed.

    Example:
        >>> from matplotlib.figure import Figure
        >>> ax = entropy({"test": [0.1, 0.2], "OOD": [0.9, 1.1]}, ax=Figure().subplots())
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['test: mean 0.15', 'OOD: mean 1']
    """
    arrays = {
        name: UNCERTAINTY("plots.entropy", f"entropies[{name!r}]", array)
        for name, array in entropies.items()
    }
    largest = max(array.max() for array in arrays.values())
    # Twice the square root of the number of values, a rule of thumb.
    number = 2 * np.sqrt(min(array.size for array in arrays.values()))
    number = int(np.clip(number, LEAST_BINS, MOST_BINS))
    edges = np.linspace(0, largest if largest > 0 else 1, number + 1)
    ax, levels = open_axes(ax), np.empty(0)
    for (name, array), color in zip(arrays.items(), pick_colors(len(arrays)), strict=True):
        height, _ = np.histogram(np.maximum(array, 0), edges, density=True)
        ax.stairs(height, edges, color=color, lw=1.5, label=f"{name}: mean {array.mean():.2g}")
        levels = np.append(levels, height[height > 0])
    if levels.max() > 10 * LINEAR_SPREAD * levels.min():
        ax.set_yscale("log")
        ax.set_ylim(bottom=levels.min() / 2)
    ax.set(title="Predictive entropy", xlabel="entropy (nats)", ylabel="density (1 / nats)")
    add_legend(ax)
    return ax


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
        name, labels = "wrong, worst first", targets.astype(int)
        wrong = np.flatnonzero(mean.argmax(axis=1) != labels)
        off = -mean[wrong, labels[wrong]]
    else:
        name, wrong = "largest errors, in standard deviations", np.arange(len(mean))
        off = np.abs(targets - mean) / np.sqrt(np.maximum(uncertainty, np.finfo(float).tiny))
    worst = wrong[np.argsort(-off, kind="stable")][:number]
    return rows | ({name: worst} if len(worst) else {})


@_check.arguments("plots.examples", number=_check.Whole(1), ax=AXES)
def examples(
    images: ArrayLike,
    mean: ArrayLike,
    uncertainty: ArrayLike,
    targets: ArrayLike | None = None,
    *,
    number: int = IMAGES_IN_ROW,
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
    given, mean, uncertainty, targets = _checked(images, mean, uncertainty, targets)
    images = _scaled(given)
    ax = open_axes(ax)
    rows = pick(mean, uncertainty, targets, number)
    columns, height = max(map(len, rows.values())), images.shape[1] / images.shape[2]
    top = 0.0
    for name, chosen in rows.items():
        middle = top + 0.6 * HEADING_HEIGHT
        ax.text(0, middle, name, va="center", size="small", weight="bold")
        top += HEADING_HEIGHT
        for column, at in enumerate(chosen):
            left = column * (1 + IMAGE_GAP)
            # The vertical axis points down.
            place = {"extent": (left, left + 1, top + height, top), "interpolation": "nearest"}
            ax.imshow(images[at], cmap="gray", vmin=0, vmax=1, zorder=2, **place)
            caption, is_wrong = _caption(mean[at], float(uncertainty[at]), targets, at)
            color = PALETTE[1] if is_wrong else "black"
            text: Options = {"ha": "center", "va": "top", "size": "small", "color": color}
            ax.text(left + 0.5, top + height + 0.04, caption, **text)
        top += height + CAPTION_HEIGHT
    ax.set(xlim=(0, columns * (1 + IMAGE_GAP) - IMAGE_GAP), ylim=(top, 0), aspect="equal")
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
    images: ArrayLike, mean: ArrayLike, uncertainty: ArrayLike, targets: ArrayLike | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """Require images and a prediction for each of them."""
    where = "plots.examples"
    given: np.ndarray = IMAGES(where, "images", images)
    means: np.ndarray = MEAN(where, "mean", mean)
    spread: np.ndarray = UNCERTAINTY(where, "uncertainty", uncertainty)
    labels: np.ndarray | None = TARGETS(where, "targets", targets)
    for argument, array in {"mean": means, "uncertainty": spread, "targets": labels}.items():
        if array is not None and len(array) != len(given):
            rule = f"of {len(given)} inputs, as many as `images`"
            _check.fail(where, argument, rule, f"shape {array.shape}")
    classes = np.arange(means.shape[-1])
    if labels is not None and means.ndim == 2 and not (known := np.isin(labels, classes)).all():
        rule = f"classes from 0 to {means.shape[1] - 1}"
        _check.fail(where, "targets", rule, f"{labels[~known][0]:g}")
    return given, means, spread, labels


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
    images: ArrayLike, mean: ArrayLike, uncertainty: ArrayLike, targets: ArrayLike | None
) -> tuple[np.ndarray, np.ndarray]:
    """Select the images that `examples` draws: their indices, and the images as bytes.

    Arguments and errors as for `examples`, except that only the selected images must be finite.
    """
    given, means, spread, labels = _checked(images, mean, uncertainty, targets)
    rows = pick(means, spread, labels, IMAGES_IN_ROW)
    places = np.unique(np.concatenate(list(rows.values())))
    return places, np.round(255 * _scaled(given[places])).astype(np.uint8)
