"""Pictures of a run and of its predictions: did the chains run well, can the result be trusted?

Each function draws one picture onto `ax`, or onto a new figure, and returns the axes, on which
everything may still be changed. They need matplotlib: `pip install 'optax-smile[plots]'`. A `trace`
is what `sample` returns as `.trace`: arrays `[chain, tick]`, warm-up included.

Example:
    >>> import numpy as np
    >>> from matplotlib.figure import Figure
    >>> from optax_smile import plots
    >>> left, right = Figure(figsize=(10, 4), layout="constrained").subplots(1, 2)
    >>> probabilities, labels = np.array([[0.9, 0.1], [0.4, 0.6]]), np.array([0, 1])
    >>> plots.reliability(probabilities, labels, ax=left).get_xlabel()
    'confidence'
    >>> plots.risk_coverage(probabilities, labels, ax=right) is right
    True
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from numpy.typing import ArrayLike

from optax_smile import _check, metrics
from optax_smile.chains.find_step_size import StepSizeSearch

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
# A 5 % quantile of fewer values is the smallest of them.
LEAST_VALUES = 20
# Chance moves a rate that rests on fewer events by half of itself.
LEAST_EVENTS = 5
# Nats per input; a step size with which targets are so much less probable is no candidate.
FAR_FROM_BEST = 1.0
# More cannot be told apart in one picture.
MOST_DOTS = 5_000
# Of the largest and smallest dot of a reliability diagram, in square points.
LARGEST_DOT, SMALLEST_DOT = 350.0, 12.0
# Of a histogram.
LEAST_BINS, MOST_BINS = 5, 30
# Entropies from probabilities in float32 miss zero by less.
ENTROPY_TOLERANCE = 1e-5
# Coordinates that are held in float64 at a time.
COLUMNS_AT_A_TIME = 1 << 16
# Share of the variance below which a direction is made of rounding errors of float64.
RANK_TOLERANCE = 1e-12


def _open(ax: "Axes | None") -> "Axes":
    """Return `ax`, or the axes of a new figure."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(
            "`optax_smile.plots` needs matplotlib: pip install 'optax-smile[plots]'"
        ) from error
    return plt.subplots(figsize=(6.0, 4.2), layout="constrained")[1] if ax is None else ax


def _colors(number: int) -> list[Any]:
    """Give one colour each: the palette while it lasts, else shades of one scale."""
    if number <= len(PALETTE):
        return list(PALETTE[:number])
    import matplotlib

    return list(matplotlib.colormaps["viridis"](np.linspace(0, 0.9, number)))


def _next_color(ax: "Axes", what: str) -> str:
    """Give the colour of one more method drawn onto the same axes; `what` marks its line."""
    return PALETTE[sum(line.get_gid() == what for line in ax.lines) % len(PALETTE)]


def _chain_style(num_chains: int) -> list[dict[str, Any]]:
    """Give the line style of each chain; only few chains are named in the legend."""
    if num_chains <= MOST_NAMED_CHAINS:
        colors = enumerate(_colors(num_chains))
        return [{"color": color, "lw": 1.0, "label": f"chain {chain}"} for chain, color in colors]
    return [{"color": PALETTE[0], "lw": 0.6, "alpha": 0.4}] * num_chains


def _legend(ax: "Axes", loc: Any = "upper right", columns: int | None = None):
    """Name what has a label; the place is fixed because matplotlib's search for one is slow."""
    handles, _ = ax.get_legend_handles_labels()
    if handles:
        columns = columns or (1 if len(handles) <= 4 else 2)
        ax.legend(loc=loc, fontsize="small", ncols=columns, framealpha=0.8)


def _make_room(ax: "Axes", top: float = 0.0, bottom: float = 0.0):
    """Lengthen the vertical axis by these shares of it, for a legend."""
    scale = ax.yaxis.get_transform()
    low, high = scale.transform(ax.get_ylim())
    ends = [low - bottom * (high - low), high + top * (high - low)]
    ax.set_ylim(*scale.inverted().transform(ends))


def _count_gradients(ax: "Axes"):
    ax.set_xlabel("gradients per chain")
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.locator_params(axis="x", nbins=6)
    ax.margins(x=0.02)


def _listed(shapes: Mapping[str, tuple]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items()) or "nothing"


def _read(where: str, trace: Any, *names: str) -> list[np.ndarray]:
    """Return the arrays `[chain, tick]` of a trace, all of one shape."""
    remedy = "Pass the `trace` of what `sample` returned."
    if not isinstance(trace, Mapping):
        _check.fail(where, "trace", "a dict of arrays", type(trace).__name__, remedy)
    missing = [name for name in names if name not in trace]
    if missing:
        rule = f"a dict with {', '.join(map(repr, missing))}"
        _check.fail(where, "trace", rule, f"the keys {sorted(trace)}", remedy)
    arrays = [np.asarray(trace[name], float) for name in names]
    shapes = {name: array.shape for name, array in zip(names, arrays, strict=True)}
    if len(set(shapes.values())) != 1 or arrays[0].ndim != 2 or not arrays[0].size:
        rule = "a dict of arrays of one shape [chain, tick] with at least one of each"
        _check.fail(where, "trace", rule, _listed(shapes), remedy)
    return arrays


def _array(
    where: str, argument: str, value: Any, axes: str, shape: tuple | None = None
) -> np.ndarray:
    """Return an array without NaN whose axes have these names, and this shape if given."""
    array: np.ndarray = np.asarray(value)
    if not np.issubdtype(array.dtype, np.floating):
        array = array.astype(float)
    if array.ndim != len(axes.split(", ")) or not array.size or shape not in (None, array.shape):
        exact = "" if shape is None else f" and shape {shape}"
        rule = f"an array [{axes}] with at least one of each{exact}"
        _check.fail(where, argument, rule, f"shape {array.shape}")
    if np.isnan(array).any():
        at = tuple(int(index) for index in np.argwhere(np.isnan(array))[0])
        _check.fail(where, argument, "without NaN", f"NaN at {at}")
    return array


def _windows(num_ticks: int, least: float = 1) -> list[np.ndarray]:
    """Split the ticks into windows of one length, at least `least` if there are so many."""
    number = int(min(MOST_WINDOWS, max(1, num_ticks // max(least, 1))))
    return np.array_split(np.arange(num_ticks), number)


def step_size(trace: Mapping[str, ArrayLike], *, ax: "Axes | None" = None) -> "Axes":
    """Draw the step size of every chain; a good run ends on a level on which the chains agree.

    A step size that still falls at the end asks for a longer warm-up.

    Args:
        trace: with `step_size` and `num_calls`, `[chain, tick]`; what is not finite is a gap.
        ax: where to draw; None makes a new figure.

    Returns:
        The axes: a line per chain, logarithmic if they spread over more than a factor of 3; more
        than ten chains have no names, but their median.

    Raises:
        ValueError: the trace lacks these arrays, or their shapes differ.
        ImportError: matplotlib is missing.

    Example:
        >>> from matplotlib.figure import Figure
        >>> trace = {"step_size": [[0.1, 0.2]], "num_calls": [[10, 20]]}
        >>> step_size(trace, ax=Figure().subplots()).get_ylabel()
        'step size'
    """
    sizes, calls = _read("plots.step_size", trace, "step_size", "num_calls")
    ax = _open(ax)
    for chain, style in enumerate(_chain_style(len(sizes))):
        ax.plot(calls[chain], sizes[chain], **style, **_dot_if_single(sizes.shape[1]))
    if len(sizes) > MOST_NAMED_CHAINS:
        label = f"median of {len(sizes)} chains"
        ax.plot(np.median(calls, 0), np.median(sizes, 0), "k", lw=1.5, label=label)
    known = sizes[np.isfinite(sizes) & (sizes > 0)]
    if known.size and known.max() > LINEAR_SPREAD * known.min():
        ax.set_yscale("log")
    else:
        ax.set_ylim(0, 1.1 * known.max() if known.size else 1)
        _make_room(ax, top=0.3)
    ax.set(title="Step size", ylabel="step size")
    _count_gradients(ax)
    _legend(ax)
    return ax


def _dot_if_single(number: int) -> dict[str, Any]:
    """Mark a line of a single point, which would not be seen."""
    return {"marker": "o", "ms": 4} if number == 1 else {}


def energy_error(trace: Mapping[str, ArrayLike], *, ax: "Axes | None" = None) -> "Axes":
    """Draw |energy change| of the steps; a good run keeps a flat, narrow band.

    The band is the central 90 % over all chains and neighbouring ticks. It rises when a step size
    is too long for the place a chain has come to.

    Args:
        trace: with `energy_change` (nats, NaN or infinite where unknown) and `num_calls`,
            `[chain, tick]`; with `accepted`, the steps that were undone get a colour of their own.
        ax: where to draw; None makes a new figure.

    Returns:
        The axes: a dot per tick (evenly thinned beyond 5,000), median and band, logarithmic. It
        says so if no tick has an energy.

    Raises:
        ValueError: the trace lacks these arrays, or their shapes differ.
        ImportError: matplotlib is missing.

    Example:
        >>> from matplotlib.figure import Figure
        >>> trace = {"energy_change": [[0.1, -0.2]], "num_calls": [[10, 20]]}
        >>> energy_error(trace, ax=Figure().subplots()).get_yscale()
        'log'
    """
    where = "plots.energy_error"
    change, calls = _read(where, trace, "energy_change", "num_calls")
    accepted = np.ones_like(change)
    if "accepted" in trace:
        _, accepted = _read(where, trace, "energy_change", "accepted")
    error = np.where(np.isfinite(change), np.abs(change), np.nan)
    ax = _open(ax)
    ax.set(title="Energy error of the steps", ylabel="|energy change| (nats)")
    _count_gradients(ax)
    if np.isnan(error).all():
        text = "no energy: the loop passed no value"
        ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", wrap=True)
        ax.set(xlim=(0, calls.max()), yticks=[])
        return ax
    if np.nanmax(error) > 0:
        ax.set_yscale("log")
    every = -(-error.size // MOST_DOTS)
    for kept, color, label in (1, PALETTE[5], None), (0, PALETTE[1], "undone step"):
        shown = (accepted == kept) & (error > 0)
        if shown.any():
            dots = {"ms": 3 if kept else 6, "alpha": 0.5, "label": label, "rasterized": True}
            # Undone steps are few, and thinning would lose them.
            thin = slice(None, None, every if kept else 1)
            ax.plot(calls[shown][thin], error[shown][thin], ".", color=color, mec="none", **dots)
    middle, quantiles = [], []
    for window in _windows(error.shape[1], -(-LEAST_VALUES // len(error))):
        known = error[:, window][~np.isnan(error[:, window])]
        if known.size:
            middle.append(calls[:, window].mean())
            quantiles.append(np.quantile(known, [0.05, 0.5, 0.95]))
    low, median, high = np.transpose(quantiles)
    ax.fill_between(middle, low, high, color=PALETTE[0], alpha=BAND_ALPHA, lw=0, label="5 to 95 %")
    ax.plot(middle, median, color=PALETTE[0], lw=1.5, label="median", **_dot_if_single(len(middle)))
    _legend(ax)
    return ax


def resets(
    trace: Mapping[str, ArrayLike], *, nominal: float | None = None, ax: "Axes | None" = None
) -> "Axes":
    """Draw how often steps were undone; after the warm-up a good run stays near the nominal rate.

    Args:
        trace: with the cumulative counts `num_resets` and `num_calls`, `[chain, tick]`, and at
            least two ticks; with `num_nonfinite`, the title counts those after the first tick.
        nominal: expected undone steps per gradient, in [0, 1], such as 1 - `reset_quantile`, over
            the gradients per step.
        ax: where to draw; None makes a new figure.

    Returns:
        The axes: undone steps over gradients in windows of the ticks, for each chain (their range,
        for more than ten) and for all of them; the title gives the rate over the whole trace.
        Windows are so long, if the trace is, that each chain has some 5 events in one (all of them
        together, for more than ten). Where the rates spread widely the scale is logarithmic, linear
        below the smallest rate above zero.

    Raises:
        ValueError: the trace lacks these arrays, their shapes differ, there is but one tick, or no
            gradient between two.
        ImportError: matplotlib is missing.

    Example:
        >>> from matplotlib.figure import Figure
        >>> trace = {"num_resets": [[0, 1, 1]], "num_calls": [[10, 20, 30]]}
        >>> ax = resets(trace, nominal=0.1, ax=Figure().subplots())
        >>> ax.get_legend().get_texts()[-1].get_text()
        'nominal: 0.1'
    """
    where = "plots.resets"
    undone, calls = _read(where, trace, "num_resets", "num_calls")
    if undone.shape[1] < 2 or not (np.diff(calls) > 0).all():
        rule = "of at least 2 ticks with gradients in between"
        _check.fail(where, "trace", rule, f"num_calls {calls.tolist()}"[:200])
    if nominal is not None:
        _check.number(where, "nominal", nominal, "in [0, 1]", lambda x: 0 <= x <= 1)
    num_nonfinite = 0.0
    if "num_nonfinite" in trace:
        _, count = _read(where, trace, "num_resets", "num_nonfinite")
        num_nonfinite = (count[:, -1] - count[:, 0]).sum()
    ax = _open(ax)
    total = (undone[:, -1] - undone[:, 0]).sum()
    num_gaps = undone.shape[1] - 1
    num_lines = len(undone) if len(undone) <= MOST_NAMED_CHAINS else 1
    windows = _windows(num_gaps, LEAST_EVENTS * num_lines * num_gaps / max(total, 1))
    ends = np.array([0, *(window[-1] + 1 for window in windows)])
    undone, calls = undone[:, ends], calls[:, ends]
    rates = np.diff(undone) / np.diff(calls)
    if len(rates) > MOST_NAMED_CHAINS:
        band = {"color": PALETTE[0], "alpha": BAND_ALPHA, "label": "range of the chains"}
        edges = calls.mean(axis=0)
        ax.stairs(rates.max(axis=0), edges, baseline=rates.min(axis=0), fill=True, lw=0, **band)
    else:
        for chain, style in enumerate(_chain_style(len(rates))):
            ax.stairs(rates[chain], calls[chain], baseline=None, **style)
    together = np.diff(undone.sum(axis=0)) / np.diff(calls.sum(axis=0))
    label = f"all {len(rates)} chains"
    ax.stairs(together, calls.mean(axis=0), baseline=None, color="k", lw=2, label=label)
    levels = np.append(rates[rates > 0], nominal or [])
    if nominal is not None:
        ax.axhline(nominal, color="k", ls="--", lw=1, label=f"nominal: {nominal:.2g}")
    if levels.size and levels.max() > LINEAR_SPREAD**2 * levels.min():
        ax.set_yscale("symlog", linthresh=levels.min())
        ax.set_ylim(-levels.min() / 10, 1.2 * levels.max())
    else:
        ax.set_ylim(0, 1.1 * levels.max() if levels.size else 1)
        ax.ticklabel_format(axis="y", scilimits=(-2, 3))
    _make_room(ax, top=0.3)
    overall = total / (calls[:, -1] - calls[:, 0]).sum()
    title = f"Resets: {total:,.0f} steps undone, {overall:.2g} per gradient"
    broken = f"\n{num_nonfinite:,.0f} non-finite calls" if num_nonfinite else ""
    ax.set(title=title + broken, ylabel="undone steps per gradient")
    _count_gradients(ax)
    _legend(ax)
    return ax


def reliability(
    probabilities: ArrayLike,
    labels: ArrayLike,
    *,
    num_bins: int = 10,
    label: str | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw accuracy against confidence; on the diagonal the probabilities mean what they say.

    Dots below it are overconfident, above it underconfident. Calls with the same `ax` compare
    methods, each in a colour of its own.

    Args:
        probabilities: of the classes, `[input, class]`, rows that sum to one.
        labels: true classes, integers, `[input]`.
        num_bins: of equal width between 0 and 1, >= 1.
        label: name of the method in the legend.
        ax: where to draw; None makes a new figure.

    Returns:
        The axes: a dot per bin, its area the share of the inputs, and the diagonal. The legend
        gives the expected calibration error (ECE) with these bins.

    Raises:
        ValueError: as `optax_smile.metrics.reliability`, or no inputs.
        ImportError: matplotlib is missing.

    Example:
        >>> from matplotlib.figure import Figure
        >>> ax = reliability([[0.75, 0.25], [0.75, 0.25]], [0, 1], ax=Figure().subplots())
        >>> ax.get_legend().get_texts()[0].get_text()
        'ECE 0.250'
    """
    where = "plots.reliability"
    probabilities = _array(where, "probabilities", probabilities, "input, class")
    bins = metrics.reliability(probabilities, labels, num_bins)
    error = metrics.ece(probabilities, labels, num_bins)
    ax = _open(ax)
    color = _next_color(ax, where)
    if color == PALETTE[0]:
        ax.plot([0, 1], [0, 1], color="0.5", ls=":", lw=1)
    filled = bins.count > 0
    confidence, accuracy = bins.confidence[filled], bins.accuracy[filled]
    areas = np.maximum(SMALLEST_DOT, LARGEST_DOT * bins.count[filled] / bins.count.sum())
    name = f"ECE {error:.3f}" if label is None else f"{label} (ECE {error:.3f})"
    ax.plot(confidence, accuracy, color=color, lw=1.2, gid=where, label=name)
    ax.scatter(confidence, accuracy, areas, color=color, alpha=0.7, lw=0, zorder=3)
    ax.set(title="Reliability (dot area: share of inputs)", xlabel="confidence", ylabel="accuracy")
    ax.set(xlim=(-0.02, 1.05), ylim=(-0.02, 1.05))
    _legend(ax, "upper left")
    return ax


def risk_coverage(
    probabilities: ArrayLike,
    labels: ArrayLike,
    *,
    label: str | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw the error among the most confident inputs; a good model is wrong where it is unsure.

    Then the curve falls towards zero on the left. Calls with the same `ax` compare methods.

    Args:
        probabilities: of the classes, `[input, class]`, rows that sum to one.
        labels: true classes, integers, `[input]`.
        label: name of the method in the legend.
        ax: where to draw; None makes a new figure.

    Returns:
        The axes: the share that is wrong against the share of inputs that are answered, the most
        confident ones first.

    Raises:
        ValueError: as `optax_smile.metrics.risk_coverage`, or no inputs.
        ImportError: matplotlib is missing.

    Example:
        >>> from matplotlib.figure import Figure
        >>> ax = risk_coverage([[0.9, 0.1], [0.6, 0.4]], [0, 1], ax=Figure().subplots())
        >>> ax.get_ylabel()
        'share wrong among them'
    """
    where = "plots.risk_coverage"
    probabilities = _array(where, "probabilities", probabilities, "input, class")
    coverage, risk = metrics.risk_coverage(probabilities, labels)
    ax = _open(ax)
    color = _next_color(ax, where)
    ax.plot(coverage, risk, color=color, lw=1.5, gid=where, label=label)
    ax.set(title="Risk against coverage", ylabel="share wrong among them")
    ax.set(xlabel="share of inputs answered, the most confident first", xlim=(0, 1))
    ax.set_ylim(bottom=0)
    _legend(ax, "upper left")
    return ax


def regression_band(
    inputs: ArrayLike | None,
    mean: ArrayLike,
    std: ArrayLike,
    targets: ArrayLike | None = None,
    *,
    level: float = 0.95,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw predictive mean and central band; a good band holds as many targets as it says.

    It should widen where there were no training data.

    Args:
        inputs: one-dimensional, `[input]`, in any order; None, for inputs of more dimensions, puts
            the predictions in the order of their means.
        mean: predictive mean, `[input]`, or of each member of a Gaussian mixture, `[draw, input]`.
        std: predictive standard deviation, noise included, > 0: of the shape of `mean`, a scalar,
            or `[draw, 1]`.
        targets: what was observed, `[input]`.
        level: probability inside the band, between 0 and 1 (exclusive).
        ax: where to draw; None makes a new figure.

    Returns:
        The axes: mean, band, and the targets as dots; the title gives the share of targets inside.

    Raises:
        ValueError: shapes that do not fit, NaN, no inputs; as `optax_smile.metrics.interval`.
        ImportError: matplotlib is missing.

    Example:
        >>> from matplotlib.figure import Figure
        >>> ax = regression_band([1, 0], [2, 3], [1, 1], [2, 9], ax=Figure().subplots())
        >>> ax.get_title()
        '95 % band: holds 50.0 % of 2 targets'
    """
    where = "plots.regression_band"
    axes = "draw, input" if np.ndim(mean) == 2 else "input"
    means = np.atleast_2d(_array(where, "mean", mean, axes))
    lower, upper = metrics.interval(mean, std, level)
    middle, size = means.mean(axis=0), means.shape[1:]
    if inputs is None:
        order, horizontal = np.argsort(middle, kind="stable"), np.arange(middle.size)
    else:
        horizontal = _array(where, "inputs", inputs, "input", size)
        order = np.argsort(horizontal, kind="stable")
        horizontal = horizontal[order]
    title = f"Predictive mean and {100 * level:g} % band"
    observed = None
    if targets is not None:
        observed = _array(where, "targets", targets, "input", size)
        share = metrics.coverage(lower, upper, observed)
        title = f"{100 * level:g} % band: holds {100 * share:.1f} % of {len(observed)} targets"
    ax = _open(ax)
    band = {"color": PALETTE[0], "alpha": BAND_ALPHA, "lw": 0, "label": f"{100 * level:g} % band"}
    ax.fill_between(horizontal, lower[order], upper[order], **band)
    if observed is not None:
        dots = {"ms": 4, "alpha": 0.6, "mec": "none", "label": "targets"}
        ax.plot(horizontal, observed[order], ".", color=PALETTE[1], **dots)
    ax.plot(horizontal, middle[order], color=PALETTE[0], lw=1.5, label="mean")
    rank = "rank of the predicted mean"
    ax.set(title=title, xlabel=rank if inputs is None else "input", ylabel="target")
    _make_room(ax, top=0.12)
    _legend(ax, "upper left", columns=3)
    return ax


def lppd(log_likelihood: ArrayLike, *, ax: "Axes | None" = None) -> "Axes":
    """Draw the log pointwise predictive density (LPPD) of more and more draws; higher is better.

    Flat at the end: more draws would not help. The distance from the single chains to all of them
    is what several chains are worth.

    For draws `s <= m` of each chain, `LPPD(m) = mean_i log mean_s p(y_i | draw s)`.

    Args:
        log_likelihood: of each target under each draw, nats, `[chain, draw, input]`; -inf is a
            likelihood of zero.
        ax: where to draw; None makes a new figure.

    Returns:
        The axes: LPPD against m, logarithmic, of all chains (thick) and of each (thin).

    Raises:
        ValueError: another shape, an empty axis, NaN or +inf.
        ImportError: matplotlib is missing.

    Cost: one pass over the draws; memory for the likelihoods of one draw of all chains.

    Example:
        >>> import numpy as np
        >>> from matplotlib.figure import Figure
        >>> ax = lppd(np.log([[[0.2], [0.6]]]), ax=Figure().subplots())
        >>> ax.lines[-1].get_ydata().round(3).tolist()
        [-1.609, -0.916]
    """
    where = "plots.lppd"
    log_likelihood = _array(where, "log_likelihood", log_likelihood, "chain, draw, input")
    if np.isposinf(log_likelihood).any():
        _check.fail(where, "log_likelihood", "below infinity", np.inf)
    num_chains, num_draws, _ = log_likelihood.shape
    single, together = np.empty((num_chains, num_draws)), np.empty(num_draws)
    total = np.full_like(log_likelihood[:, 0], -np.inf, float)
    for draw in range(num_draws):
        total = np.logaddexp(total, log_likelihood[:, draw])
        single[:, draw] = (total - np.log(draw + 1)).mean(axis=1)
        averaged = np.logaddexp.reduce(total, axis=0) - np.log(num_chains * (draw + 1))
        together[draw] = averaged.mean()
    ax = _open(ax)
    draws, mark = np.arange(1, num_draws + 1), _dot_if_single(num_draws)
    if num_chains > 1:
        for chain, style in enumerate(_chain_style(num_chains)):
            ax.plot(draws, single[chain], **style, **mark)
    label = f"all {num_chains} chains" if num_chains > 1 else "chain 0"
    ax.plot(draws, together, color="k", lw=2.5, label=label, **mark)
    ax.set(title=f"LPPD of all draws: {together[-1]:.4g} (higher is better)")
    ax.set(xlabel="draws per chain", ylabel="LPPD (nats per input)", xscale="log")
    ax.xaxis.set_major_formatter("{x:,g}")
    _make_room(ax, bottom=0.25)
    _legend(ax, "lower right")
    return ax


def entropy(entropies: Mapping[str, ArrayLike], *, ax: "Axes | None" = None) -> "Axes":
    """Draw histograms of predictive entropies; foreign data should lie to the right of known data.

    Args:
        entropies: by name, such as `{"test": ..., "OOD": ...}`, nats, `[input]`, what
            `optax_smile.metrics.entropy` returns.
        ax: where to draw; None makes a new figure.

    Returns:
        The axes: outlines of the densities over the same bins, logarithmic if they spread over more
        than a factor of 30; the legend gives the means.

    Raises:
        ValueError: no entropies, another shape, negative, infinite or NaN.
        ImportError: matplotlib is missing.

    Example:
        >>> from matplotlib.figure import Figure
        >>> ax = entropy({"test": [0.1, 0.2], "OOD": [0.9, 1.1]}, ax=Figure().subplots())
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['test: mean 0.15', 'OOD: mean 1']
    """
    where = "plots.entropy"
    if not isinstance(entropies, Mapping) or not entropies:
        _check.fail(where, "entropies", "a dict of arrays [input], at least one", repr(entropies))
    arrays = {
        name: _array(where, f"entropies[{name!r}]", array, "input")
        for name, array in entropies.items()
    }
    for name, array in arrays.items():
        if array.min() < -ENTROPY_TOLERANCE or np.isposinf(array).any():
            got = f"{array.min():g} to {array.max():g}"
            _check.fail(where, f"entropies[{name!r}]", ">= 0 and finite", got)
    largest = max(array.max() for array in arrays.values())
    # Twice the square root of the number of values, a rule of thumb.
    number = 2 * np.sqrt(min(array.size for array in arrays.values()))
    number = int(np.clip(number, LEAST_BINS, MOST_BINS))
    edges = np.linspace(0, largest if largest > 0 else 1, number + 1)
    ax = _open(ax)
    heights = {
        name: np.histogram(np.maximum(array, 0), edges, density=True)[0]
        for name, array in arrays.items()
    }
    for (name, height), color in zip(heights.items(), _colors(len(heights)), strict=True):
        label = f"{name}: mean {arrays[name].mean():.2g}"
        ax.stairs(height, edges, color=color, lw=1.5, label=label)
    levels = np.concatenate([height[height > 0] for height in heights.values()])
    if levels.max() > 10 * LINEAR_SPREAD * levels.min():
        ax.set_yscale("log")
        ax.set_ylim(bottom=levels.min() / 2)
    ax.set(title="Predictive entropy", xlabel="entropy (nats)", ylabel="density (1 / nats)")
    _legend(ax)
    return ax


def step_size_search(search: StepSizeSearch, *, ax: "Axes | None" = None) -> "Axes":
    """Draw what chains with each step size predict; a good search has its best in the middle.

    To the left the chains hardly leave their start, to the right they miss the posterior.

    Args:
        search: what `optax_smile.find_step_size` returned.
        ax: where to draw; None makes a new figure.

    Returns:
        The axes: LPPD against step size, logarithmic, of all chains, with the standard error of the
        difference to the best, and of each chain as a dot. The scale is that of what lies within a
        nat of the best; the others are marked at the bottom, with a cross if they failed.

    Raises:
        ValueError: something else than a `StepSizeSearch`.
        ImportError: matplotlib is missing.

    Example:
        >>> import numpy as np
        >>> from matplotlib.figure import Figure
        >>> from optax_smile import StepSizeSearch
        >>> search = StepSizeSearch(
        ...     np.array([0.1, 1]), np.array([-2.0, -np.inf]), np.array([0, np.nan]),
        ...     np.array([[-2.5], [-np.inf]]), np.array([0, 0.5]), -4.0, np.array([-5.0]),
        ... )
        >>> step_size_search(search, ax=Figure().subplots()).get_title()
        'Best step size: 0.1, LPPD -2'
    """
    if not isinstance(search, StepSizeSearch):
        rule = "what `find_step_size` returned"
        _check.fail("plots.step_size_search", "search", rule, f"a {type(search).__name__}")
    sizes, lppd, chain_lppd = search.step_sizes, search.lppd, search.chain_lppd
    best, num_chains = lppd.max(), chain_lppd.shape[1]
    shown = np.concatenate([[search.start_lppd], lppd, chain_lppd.ravel()])
    shown = shown[shown >= best - FAR_FROM_BEST]
    failed = np.isneginf(lppd)
    below = ~failed & (lppd < shown.min())
    ax = _open(ax)
    ax.axhline(
        search.start_lppd, color="0.5", ls="--", lw=1, label=f"start: {search.start_lppd:.4g}"
    )
    label: Any = ["single chains", *[None] * (num_chains - 1)]
    ax.plot(sizes, chain_lppd, ".", color=PALETTE[5], ms=7, mec="none", label=label)
    error = np.nan_to_num(search.standard_error[~failed])
    label = f"all {num_chains} chains"
    line = {"fmt": "o-", "color": PALETTE[0], "label": label}
    ax.errorbar(sizes[~failed], lppd[~failed], error, **line)
    ax.plot(search.best, best, "*", color=PALETTE[1], ms=14, zorder=3, label="best")
    at_bottom = {"transform": ax.get_xaxis_transform(), "clip_on": False, "ls": "", "color": "k"}
    for marked, marker, label in (below, "v", "further down"), (failed, "x", "failed"):
        if marked.any():
            ax.plot(sizes[marked], 0 * sizes[marked], marker=marker, label=label, **at_bottom)
    # A scale of no height has no room.
    ax.set(xscale="log", ylim=(shown.min() - 1e-3, shown.max() + 1e-3))
    _make_room(ax, top=0.1, bottom=0.25)
    ax.set(title=f"Best step size: {search.best:.3g}, LPPD {best:.4g}")
    ax.set(xlabel="step size", ylabel="LPPD of validation data (nats per input)")
    _legend(ax, "lower left", columns=3)
    return ax


def _points(where: str, params: Any, start: Any) -> tuple[list[np.ndarray], tuple[int, int]]:
    """Return the leaves as `[point, column]`: all draws, then the starts; and chains and draws."""
    leaves, structure = jax.tree.flatten_with_path(params)
    shapes = {jax.tree_util.keystr(path) or "array": np.shape(leaf) for path, leaf in leaves}
    axes = {shape[:2] for shape in shapes.values()}
    if len(axes) != 1 or len(next(iter(axes))) != 2 or 0 in next(iter(axes)):
        rule = "arrays [chain, draw, ...] with the same two leading axes, none of them empty"
        _check.fail(where, "params", rule, _listed(shapes))
    num_chains, num_draws = next(iter(axes))
    starts = [None] * len(leaves)
    if start is not None:
        expected = [(num_chains, *shape[2:]) for shape in shapes.values()]
        starts, given = jax.tree.flatten(start)
        got = [np.shape(leaf) for leaf in starts]
        if given != structure or got != expected:
            rule = f"a tree like `params` of arrays [chain, ...] with shapes {expected}"
            _check.fail(where, "start", rule, f"{given} with {got}")
    matrices = []
    for (path, leaf), first in zip(leaves, starts, strict=True):
        rows = np.asarray(leaf).reshape(num_chains * num_draws, -1)
        first = np.asarray(first).reshape(num_chains, -1) if first is not None else rows[:0]
        for argument, values in ("params", rows), ("start", first):
            if not np.isfinite(values).all():
                name = jax.tree_util.keystr(path) or "the array"
                _check.fail(where, argument, "finite", f"NaN or inf in {name}")
        matrices.append(np.concatenate([rows, first]) if len(first) else rows)
    if not sum(rows.shape[1] for rows in matrices):
        _check.fail(where, "params", "of at least one dimension", _listed(shapes))
    return matrices, (num_chains, num_draws)


def _principal_plane(matrices: list[np.ndarray], num_draws: int) -> tuple[np.ndarray, np.ndarray]:
    """Return all points on the two principal axes of the first `num_draws`, and variance shares.

    With `X` the centred draws, `X X^T = U diag(l) U^T`, the coordinates are `U sqrt(l)`; those of
    another point `x` are `x X^T U / sqrt(l)`. In few dimensions `X^T X` is smaller.
    """
    blocks = [
        rows[:, first : first + COLUMNS_AT_A_TIME]
        for rows in matrices
        for first in range(0, rows.shape[1], COLUMNS_AT_A_TIME)
    ]
    centred = (block.astype(float) - block[:num_draws].astype(float).mean(0) for block in blocks)
    if sum(block.shape[1] for block in blocks) > num_draws:
        products = sum((block @ block[:num_draws].T for block in centred), start=np.zeros(()))
        square = products[:num_draws]
        values, vectors = np.linalg.eigh(square)
        scale = np.sqrt(np.maximum(values, 0))
    else:
        products = np.concatenate(list(centred), axis=1)
        square = products[:num_draws].T @ products[:num_draws]
        values, vectors = np.linalg.eigh(square)
        scale = np.ones_like(values)
    total = np.trace(square)
    places, shares = np.zeros((len(products), 2)), np.zeros(2)
    spread = [at for at in (-1, -2)[: len(values)] if values[at] > RANK_TOLERANCE * total]
    for axis, at in enumerate(spread):
        places[:, axis] = products @ (vectors[:, at] / scale[at])
        shares[axis] = values[at] / total
    return places, shares


def chain_paths(params: Any, *, start: Any = None, ax: "Axes | None" = None) -> "Axes":
    """Draw the ways of the chains in the plane in which the draws differ most.

    Chains that walk over each other have found the same region; separate clouds are different
    modes, which several chains are for. A chain whose way still leads in one direction has not
    arrived. Distances are Euclidean, projected; read the shares of variance before believing them.

    Args:
        params: draws `[chain, draw, dimension]`, or a tree of arrays `[chain, draw, ...]`, such as
            the `params` of what `sample` returned; all leaves count.
        start: where the chains began, such as what `warmstart` returned: like `params` without the
            draw axis. It does not influence the plane.
        ax: where to draw; None makes a new figure.

    Returns:
        The axes: a path per chain in its colour, a cross at its start (its first draw, if no
        `start` is given), a dot at its end. Axes carry the share of all the draws' variance.

    Raises:
        ValueError: leading axes that disagree, an empty axis, NaN or inf, or a `start` unlike the
            draws.
        ImportError: matplotlib is missing.

    Cost: of n draws of all chains in d dimensions, time n * d * min(n, d) and memory min(n, d)^2
        beside one copy of the draws: thin them to a few thousand.

    Example:
        >>> import numpy as np
        >>> from matplotlib.figure import Figure
        >>> ax = chain_paths(np.eye(3)[None] * [2, 1, 0], ax=Figure().subplots())
        >>> ax.get_xlabel()
        'first principal axis (86.1 % of variance)'

    Source: principal components of the draws, as Li et al. 2018 draw paths of training.
    """
    matrices, (num_chains, num_draws) = _points("plots.chain_paths", params, start)
    places, shares = _principal_plane(matrices, num_chains * num_draws)
    paths = places[: num_chains * num_draws].reshape(num_chains, num_draws, 2)
    begins = paths[:, 0] if start is None else places[num_chains * num_draws :]
    ax = _open(ax)
    named = num_chains <= MOST_NAMED_CHAINS
    for chain, color in enumerate(_colors(num_chains)):
        label = f"chain {chain}" if named else None
        way = paths[chain] if start is None else np.vstack([begins[chain], paths[chain]])
        ax.plot(*way.T, "-", color=color, lw=0.9, alpha=0.6, label=label)
        size = 8 if named else 5
        ax.plot(*begins[chain], "x", color=color, ms=size, mew=size / 4, zorder=3)
        ax.plot(*paths[chain, -1], "o", color=color, ms=size, mec="white", mew=0.8, zorder=3)
    ax.plot([], [], "x", color="0.3", label="start" if start is not None else "first draw")
    ax.plot([], [], "o", color="0.3", label="last draw")
    first, second = (f"principal axis ({100 * share:.1f} % of variance)" for share in shares)
    ax.set(title="Paths of the chains", xlabel=f"first {first}", ylabel=f"second {second}")
    # Room for the legend; fixed limits would not go together with equal axes.
    low, high = places[:, 1].min(), places[:, 1].max()
    ax.update_datalim([(places[:, 0].mean(), high + 0.25 * (high - low))])
    ax.autoscale_view()
    ax.set_aspect("equal", adjustable="datalim")
    _legend(ax)
    return ax
