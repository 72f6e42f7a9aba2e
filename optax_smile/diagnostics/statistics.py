"""Statistics of chains, see `optax_smile.diagnostics`."""

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import ArrayLike

from optax_smile import _check
from optax_smile.draws.predict import Prediction
from optax_smile.draws.snapshots import Snapshots, StoredSnapshots

ESS_METHODS = ("bulk", "tail", "mean")
# What ArviZ needs of a chain; within a chain its halves are the chains.
LEAST_DRAWS, LEAST_DRAWS_WITHIN = 4, 8


class EnergyFit(NamedTuple):
    """Gamma distribution fitted to |energy change|, arrays `[chain]`, NaN where there is no energy.

    Attributes:
        shape: (mean / std)^2.
        scale: variance / mean, nats.
        distance: Kolmogorov-Smirnov distance, 0 to 1: the largest difference of the distribution
            functions.
    """

    shape: np.ndarray
    scale: np.ndarray
    distance: np.ndarray


class Paths(NamedTuple):
    """Where chains went.

    Attributes:
        norm: of the parameters of each draw, `[chain, draw]`.
        from_start: distance from the start of the chain, `[chain, draw]`; NaN without a start.
        moved: distance from the draw before, `[chain, draw - 1]`.
        start_norm: of the start, `[chain]`; NaN without one.
        weights: a random choice of the scalar parameters that move, `[chain, draw, weight]`.
        size: number of parameters of a chain.
    """

    norm: np.ndarray
    from_start: np.ndarray
    moved: np.ndarray
    start_norm: np.ndarray
    weights: np.ndarray
    size: int


def rhat(values: ArrayLike) -> np.ndarray:
    """Compare chains with each other: rank-normalised split R-hat.

    Square root of the variance of all draws over the variance within half chains, of the ranks of
    the values and of their distances from the median, the larger of both: 1 for chains that agree.

    Args:
        values: arrays `[chain, draw, ...]` of at least two chains and four draws.

    Returns:
        R-hat `[...]`, about 1 or more; NaN where nothing moves.

    Raises:
        ValueError: another shape, too few chains or draws, NaN.
        ImportError: ArviZ is missing.

    Cost: about half a millisecond per value.

    Example:
        >>> import numpy as np
        >>> from optax_smile import diagnostics
        >>> chains = np.random.default_rng(0).normal(size=(2, 500, 1))
        >>> float(diagnostics.rhat(chains)[0].round(1))
        1.0
        >>> float(diagnostics.rhat(chains + [[[0]], [[9]]])[0].round(1))
        1.8

    Source: Vehtari, Gelman, Simpson, Carpenter, Buerkner, Bayesian Analysis 2021, by ArviZ.
    """
    values = checked_values("rhat", "values", values, LEAST_DRAWS)
    if len(values) < 2:
        remedy = "See `rhat_within` for chains alone."
        _check.fail("rhat", "values", "of at least two chains", f"shape {values.shape}", remedy)
    return _by_arviz("rhat", values)


def rhat_within(values: ArrayLike) -> np.ndarray:
    """Compare the beginning of each chain with its end: R-hat of the quarters of one chain.

    The halves of a chain are the chains of `rhat`, which splits them once more.

    Args:
        values: arrays `[chain, draw, ...]` of at least eight draws; an odd first one is left out.

    Returns:
        R-hat `[chain, ...]`, NaN where a chain does not move; about 1 + 2 / n for a stationary
        chain with n independent draws.

    Raises:
        ValueError: another shape, too few draws, NaN.
        ImportError: ArviZ is missing.

    Source: the idea of a chainwise R-hat is of Sommer et al., Connecting the dots, ICML 2024.
    """
    values = checked_values("rhat_within", "values", values, LEAST_DRAWS_WITHIN)
    num_chains, num_draws, *rest = values.shape
    halves = values[:, num_draws % 2 :].reshape(num_chains, 2, num_draws // 2, *rest)
    return _by_arviz("rhat", np.moveaxis(halves, 0, 2))


def ess(values: ArrayLike, method: str = "bulk") -> np.ndarray:
    """Effective sample size: the number of independent draws that would tell as much.

    Args:
        values: arrays `[chain, draw, ...]` of at least four draws.
        method: `"bulk"`, for the middle of the distribution; `"tail"`, the smaller one of its 5 %
            and 95 % quantiles; `"mean"`, for averages of the values as they are.

    Returns:
        ESS of all chains together, `[...]`; NaN where nothing moves.

    Raises:
        ValueError: another shape, too few draws, NaN, an unknown method.
        ImportError: ArviZ is missing.

    Source: see `rhat`.
    """
    _check.choice("ess", "method", method, ESS_METHODS)
    values = checked_values("ess", "values", values, LEAST_DRAWS)
    tails = {"prob": (0.05, 0.95)} if method == "tail" else {}
    size = _by_arviz("ess", values, method=method, **tails)
    return np.where(np.ptp(values, axis=(0, 1)) > 0, size, np.nan)


def mcse_lppd(log_likelihood: ArrayLike) -> float:
    """Monte Carlo standard error of the log pointwise predictive density, by the delta method.

    With L_si the likelihood of target i under draw s, LPPD = sum_i log(p_i) / n where p_i is the
    average of L_si over the S draws. To first order in the error of p_i it is off by

        sum_i (error of p_i) / p_i / n = sum_s (z_s - 1) / S,  z_s = sum_i (L_si / p_i) / n,

    so that its standard error is the one of the average of z: std(z) / sqrt(ESS of z). Chains in
    modes of their own have a small ESS, and it is large. Where few draws carry the average of an
    input it is too small, as that of any average is which a rare large value would move.

    Args:
        log_likelihood: nats, `[chain, draw, input]`, at least four draws, as `each.log_density` of
            `predict(..., per="draw", targets=...)`.

    Returns:
        Standard error in nats per input; 0 if no draw differs from another.

    Raises:
        ValueError: another shape, too few draws, NaN, plus infinity, an input that no draw allows.
        ImportError: ArviZ is missing.

    Source: the delta method; the error of an average from its ESS: see `rhat`.
    """
    axes = "[chain, draw, input]"
    values = checked_values("mcse_lppd", "log_likelihood", log_likelihood, LEAST_DRAWS, axes, 3)
    average = log_mean_exp(values, (0, 1))
    if not np.isfinite(average).all():
        rule, got = "finite in at least one draw of each input", average[~np.isfinite(average)][0]
        _check.fail("mcse_lppd", "log_likelihood", rule, got)
    return float(_by_arviz("mcse", np.exp(values - average).mean(axis=2), method="mean"))


def weight_rhat(params: Any, *, num_weights: int = 100, seed: int = 0) -> np.ndarray:
    """Compute `rhat_within` for a random choice of the weights that move.

    Args:
        params: tree of arrays `[chain, draw, ...]` with at least eight draws.
        num_weights: how many scalar weights, >= 1; all, if fewer move.
        seed: of the choice, >= 0.

    Returns:
        R-hat `[chain, weight]`; no weights if none moves.

    Raises:
        ValueError: an argument out of range, too few draws, NaN.
        ImportError: ArviZ is missing.
    """
    _check.whole("weight_rhat", "num_weights", num_weights, 1)
    _check.whole("weight_rhat", "seed", seed, 0)
    weights = walk(Snapshots(params), num_weights, seed).weights
    if not weights.shape[2]:
        return np.empty(weights.shape[::2])
    return rhat_within(checked_values("weight_rhat", "params", weights, LEAST_DRAWS_WITHIN))


def travel(params: Any, start: Any) -> np.ndarray:
    """Distance of every draw from the start of its chain, relative to the norm of the start.

    Args:
        params: tree of arrays `[chain, draw, ...]`.
        start: tree of arrays `[chain, ...]`, as `Snapshots.start`.

    Returns:
        |theta - start| / |start| over all parameters, `[chain, draw]`; infinite for a start at 0.

    Raises:
        ValueError: trees or shapes that do not fit.

    Example:
        >>> import numpy as np
        >>> from optax_smile import diagnostics
        >>> start = np.array([[3.0, 4.0]])
        >>> diagnostics.travel({"w": start[:, None] * [[1], [2]]}, {"w": start})
        array([[0., 1.]])
    """
    shapes = jax.tree.map(lambda x: (*np.shape(x)[:1], *np.shape(x)[2:]), params)
    if jax.tree.map(np.shape, start) != shapes:
        rule = f"a tree of arrays [chain, ...] as in `params`, {shapes}"
        _check.fail("travel", "start", rule, jax.tree.map(np.shape, start))
    return relative(walk(Snapshots(params, start=start), 1, 0))


def relative(paths: Paths) -> np.ndarray:
    """Distances from the start over its norm, `[chain, draw]`."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return paths.from_start / paths.start_norm[:, None]


def disagreement(mean: ArrayLike, *, classes: bool = True) -> np.ndarray:
    """Tell how much each pair of chains differs in what it predicts.

    Args:
        mean: what the draws of each chain predict, as `each.mean` of `predict(..., per="draw")`:
            class probabilities `[chain, draw, input, class]`, or averages of chains
            `[chain, input, class]`; without `classes` numbers `[chain, draw, input, ...]`.
        classes: whether they are class probabilities.

    Returns:
        `[chain, chain]`, 0 on the diagonal. For classes the share of inputs on which the averages
        of two chains have different classes at the top, 0 to 1. For numbers the root mean square
        difference of the averages of two chains over that of the draws of a chain about its
        average, all inputs and chains together: at 1 chains are as far apart as one is wide.

    Raises:
        ValueError: another shape, NaN.
    """
    values = checked_values("disagreement", "mean", mean, 1, "[chain, draw, input, ...]")
    rule = "an array [chain, draw, input, class] or [chain, input, class]"
    if not (values.ndim in (3, 4) if classes else values.ndim >= 3):
        rule = rule if classes else "an array [chain, draw, input, ...]"
        _check.fail("disagreement", "mean", rule, f"shape {values.shape}")
    if classes:
        top = (values.mean(axis=1) if values.ndim == 4 else values).argmax(axis=-1)
        return (top[:, None] != top).mean(axis=-1)
    centre = values.mean(axis=1).reshape(len(values), -1)
    differences = np.sqrt(np.mean((centre[:, None] - centre) ** 2, axis=-1))
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = differences / np.sqrt(np.mean(values.var(axis=1)))
    return np.where(differences == 0, 0.0, relative)


def autocorrelation(values: ArrayLike, max_lag: int) -> np.ndarray:
    """Correlation of each chain with itself some draws later.

    Args:
        values: arrays `[chain, draw, ...]`.
        max_lag: in draws, >= 0 and less than there are.

    Returns:
        sum_t (x_t - m) (x_(t+k) - m) / sum_t (x_t - m)^2 for the lags k = 0 to `max_lag` with the
        average m of the chain, `[chain, lag, ...]`; NaN where a chain does not move.

    Raises:
        ValueError: an argument out of range, NaN.

    Cost: a fast Fourier transform.
    """
    values = checked_values("autocorrelation", "values", values, 2)
    _check.whole("autocorrelation", "max_lag", max_lag, 0)
    num_draws = values.shape[1]
    if max_lag >= num_draws:
        rule = f"less than the {num_draws} draws"
        _check.fail("autocorrelation", "max_lag", rule, max_lag)
    centred = values - values.mean(axis=1, keepdims=True)
    # Zeros keep the end of a chain from meeting its beginning.
    power = np.abs(np.fft.rfft(centred, n=2 * num_draws, axis=1)) ** 2
    products = np.fft.irfft(power, n=2 * num_draws, axis=1)[:, : max_lag + 1]
    moves = np.ptp(values, axis=1, keepdims=True) > 0
    return np.where(moves, products, np.nan) / np.where(moves, products[:, :1], 1)


def reset_rate(trace: Mapping[str, Any], num_draws: int | None = None) -> np.ndarray:
    """Count undone steps per gradient, from the first tick to the last.

    Args:
        trace: arrays `[chain, tick]`, with `num_resets` and `num_calls`.
        num_draws: count the draws alone, the last so many ticks that are samples; None: all ticks.

    Returns:
        Rate `[chain]`, 0 to 1; NaN from a single tick. For a perfect fit of the energy errors a
        `reset_quantile` of 0.98 gives 0.02, with two gradients per step 0.01.

    Raises:
        ValueError: entries that the trace lacks.
    """
    resets, calls = _read("reset_rate", trace, num_draws, "num_resets", "num_calls")
    with np.errstate(invalid="ignore"):
        return (resets[:, -1] - resets[:, 0]) / (calls[:, -1] - calls[:, 0])


def step_size_drift(trace: Mapping[str, Any], num_draws: int | None = None) -> np.ndarray:
    """Compare the step size at the end with that near the beginning: is this still a sampler?

    Args:
        trace: arrays `[chain, tick]`, with `step_size`.
        num_draws: see `reset_rate`.

    Returns:
        Median of the last tenth of the ticks / median of the second tenth, `[chain]`: 1 for a
        constant step size.

    Raises:
        ValueError: entries that the trace lacks.
    """
    (sizes,) = _read("step_size_drift", trace, num_draws, "step_size")
    tenth = max(1, sizes.shape[1] // 10)
    second = sizes[:, tenth : 2 * tenth] if sizes.shape[1] > 1 else sizes
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.median(sizes[:, -tenth:], axis=1) / np.median(second, axis=1)


def energy_fit(trace: Mapping[str, Any], num_draws: int | None = None) -> EnergyFit:
    """Fit a Gamma distribution to |energy change|, as the outlier test and the tuner do.

    Args:
        trace: arrays `[chain, tick]`, with `energy_change`.
        num_draws: see `reset_rate`.

    Returns:
        An `EnergyFit`; the fit by moments of all ticks weighs them alike, the sampler the recent.

    Raises:
        ValueError: entries that the trace lacks.

    Source: Sommer et al., ICML 2026: the fit; the test statistic of Kolmogorov 1933.
    """
    from scipy.special import gammainc

    (energies,) = _read("energy_fit", trace, num_draws, "energy_change")
    fits = []
    for chain in np.abs(energies):
        energy = np.sort(chain[np.isfinite(chain)])
        if energy.size < 2 or np.ptp(energy) == 0:
            fits.append((np.nan,) * 3)
            continue
        shape, scale = (energy.mean() / energy.std()) ** 2, energy.var() / energy.mean()
        below, fitted = np.arange(energy.size) / energy.size, gammainc(shape, energy / scale)
        distance = max(np.max(fitted - below), np.max(below + 1 / energy.size - fitted))
        fits.append((shape, scale, distance))
    return EnergyFit(*np.array(fits).T)


def to_arviz(snapshots: Snapshots | StoredSnapshots, prediction: Prediction | None = None) -> Any:
    """Convert a run for ArviZ and what builds on it.

    Args:
        snapshots: what `sample` or `load_snapshots` returns.
        prediction: of the same draws, `predict(..., per="draw", targets=...)`.

    Returns:
        `InferenceData` of ArviZ 0.x, the `DataTree` of ArviZ 1.x, with the groups `posterior`: a
        variable per leaf, named by its path (`layer.w`); `sample_stats`: the trace of the draws,
        its `energy_change` named `energy_error` as ArviZ does; `log_likelihood`: `target`.

    Raises:
        ValueError: a prediction without single draws or targets, or of other draws.
        ImportError: ArviZ is missing.

    Cost: the draws in memory.
    """
    arviz = _import_arviz()
    leaves = jax.tree_util.tree_leaves_with_path(snapshots.params)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}
    # The DataTree keeps "/" for its groups.
    groups = {"posterior": {name.replace("/", ".") or "params": x for name, x in named.items()}}
    if stats := of_draws(snapshots.trace, snapshots.num_draws):
        groups["sample_stats"] = stats | {"energy_error": stats.pop("energy_change")}
    if prediction is not None:
        groups["log_likelihood"] = {"target": log_density_of("to_arviz", snapshots, prediction)}
    with warnings.catch_warnings():
        # A deep ensemble has one draw.
        warnings.filterwarnings("ignore", "More chains .* than draws")
        if "InferenceData" in vars(arviz):
            return arviz.from_dict(**groups)
        return arviz.from_dict(groups, check_conventions=False)


def _import_arviz() -> Any:
    try:
        with warnings.catch_warnings():
            # Version 0.23 announces the next one.
            warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing", FutureWarning)
            import arviz
    except ImportError as error:
        raise ImportError(
            "`optax_smile.diagnostics` needs ArviZ: pip install 'optax-smile[diagnostics]'"
        ) from error
    return arviz


def _by_arviz(statistic: str, values: np.ndarray, **options: Any) -> np.ndarray:
    """Call what all versions share, a function of a data set, for all values at once."""
    function = getattr(_import_arviz(), statistic)
    import xarray

    points = values.reshape(*values.shape[:2], -1)
    data = xarray.Dataset({"x": (("chain", "draw", "point"), points)})
    # Of values that stay as they are.
    with np.errstate(divide="ignore", invalid="ignore"):
        return function(data, **options)["x"].values.reshape(values.shape[2:])


def checked_values(
    where: str,
    argument: str,
    values: ArrayLike,
    least_draws: int,
    axes: str = "[chain, draw, ...]",
    ndim: int | None = None,
) -> np.ndarray:
    """Require an array of chains without NaN."""
    array = np.asarray(values, float)
    if array.ndim < 2 or array.ndim != (ndim or array.ndim) or 0 in array.shape:
        _check.fail(where, argument, f"an array {axes}, not empty", f"shape {array.shape}")
    if array.shape[1] < least_draws:
        rule = f"at least {least_draws} draws per chain, {axes}"
        _check.fail(where, argument, rule, f"shape {array.shape}")
    if np.isnan(array).any():
        index = tuple(np.argwhere(np.isnan(array))[0].tolist())
        _check.fail(where, argument, "free of NaN", f"nan at {index}")
    return array


def of_draws(trace: Mapping[str, Any], num_draws: int | None) -> dict[str, np.ndarray]:
    """The trace at the draws, the last ticks that were samples in all chains; None: all of it."""
    if num_draws is None or not trace:
        return {name: np.asarray(values) for name, values in trace.items()}
    is_sample = np.asarray(trace.get("is_sample", trace["num_calls"]), bool)
    ticks = np.flatnonzero(is_sample.all(axis=0))[-num_draws:]
    return {name: np.asarray(values)[:, ticks] for name, values in trace.items()}


def _read(
    where: str, trace: Mapping[str, Any], num_draws: int | None, *names: str
) -> list[np.ndarray]:
    """Entries of a trace as numbers."""
    for name in names:
        if name not in trace:
            rule = f"a trace with {name!r}, such as `Snapshots.trace`"
            _check.fail(where, "trace", rule, sorted(trace))
    draws = of_draws(trace, num_draws)
    return [draws[name].astype(float) for name in names]


def walk(snapshots: Snapshots | StoredSnapshots, num_weights: int, seed: int) -> Paths:
    """Follow the chains in one pass over the draws, of which it holds two per chain."""
    num_chains, num_draws, start = snapshots.num_chains, snapshots.num_draws, snapshots.start
    starts = [_leaves(jax.tree.map(lambda x, c=c: x[c], start)) for c in range(num_chains)]
    norm, from_start = np.full((2, num_chains, num_draws), np.nan)
    moved = norm[:, 1:].copy()
    before: list[list[np.ndarray]] = [[] for _ in range(num_chains)]
    waiting, chosen, weights = [], None, []

    def pick(leaves: list[np.ndarray]):
        weights.append([leaves[leaf].flat[place] for leaf, place in chosen or ()])

    for number, params in enumerate(snapshots):
        draw, chain = divmod(number, num_chains)
        leaves = _leaves(params)
        norm[chain, draw] = _distance(leaves)
        if starts[chain]:
            from_start[chain, draw] = _distance(leaves, starts[chain])
        if draw:
            moved[chain, draw - 1] = _distance(leaves, before[chain])
        before[chain] = leaves
        if chosen is not None:
            pick(leaves)
            continue
        waiting.append(leaves)
        # Two draws tell which leaves move at all.
        if number + 1 == num_chains * min(2, num_draws):
            # More than are asked for, since single entries may not move.
            chosen = _choose(waiting, num_chains, 4 * num_weights, seed)
            for leaves in waiting:
                pick(leaves)
            waiting = []
    series = np.array(weights, float).reshape(num_draws, num_chains, -1).swapaxes(0, 1)
    moves = (series != series[:, :1]).any(axis=(0, 1))
    return Paths(
        norm=norm,
        from_start=from_start,
        moved=moved,
        start_norm=np.array([_distance(leaves) if leaves else np.nan for leaves in starts]),
        weights=series[:, :, moves][:, :, :num_weights],
        size=sum(leaf.size for leaf in before[0]),
    )


def _leaves(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def _choose(
    draws: list[list[np.ndarray]], num_chains: int, number: int, seed: int
) -> list[tuple[int, int]]:
    """Choose scalars of leaves that differ between two draws, as pairs of leaf and place."""
    pairs = list(zip(draws[:num_chains], draws[num_chains:], strict=False))
    moves = [any(np.any(x[leaf] != y[leaf]) for x, y in pairs) for leaf in range(len(draws[0]))]
    sizes = np.array(
        [x.size * (move or not any(moves)) for x, move in zip(draws[0], moves, strict=True)]
    )
    ends, total = np.cumsum(sizes), int(sizes.sum())
    places = np.random.default_rng(seed).choice(total, min(number, total), replace=False)
    leaves = np.searchsorted(ends, places, side="right")
    firsts = ends - sizes
    return [(int(leaf), int(at - firsts[leaf])) for leaf, at in zip(leaves, places, strict=True)]


def _distance(leaves: list[np.ndarray], others: list[np.ndarray] | None = None) -> float:
    """Norm of the difference, in float64."""
    total = 0.0
    for index, leaf in enumerate(leaves):
        difference = np.asarray(leaf, float)
        if others is not None:
            difference = difference - others[index]
        total += np.vdot(difference, difference)
    return float(np.sqrt(total))


def log_mean_exp(values: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Logarithm of the mean of exponentials over axes."""
    number = np.prod([values.shape[axis] for axis in axes])
    for axis in sorted(axes, reverse=True):
        values = np.logaddexp.reduce(values, axis=axis)
    return values - np.log(number)


def log_density_of(where: str, snapshots: Any, prediction: Prediction) -> np.ndarray:
    """Log likelihoods `[chain, draw, target]` of a prediction by draw."""
    axes, each = (snapshots.num_chains, snapshots.num_draws), prediction.each
    density = None if each is None else each.log_density
    if density is None or density.ndim < 3 or density.shape[:2] != axes:
        got = "none of single draws" if density is None else f"log densities {density.shape}"
        rule = f'`predict(..., per="draw", targets=...)` of the {axes} chains and draws'
        _check.fail(where, "prediction", rule, got)
    flat = density.reshape(*axes, -1).astype(float)
    # Padding of "tokens" is 0 in all draws.
    return flat if density.ndim == 3 else flat[:, :, (flat != 0).any(axis=(0, 1))]
