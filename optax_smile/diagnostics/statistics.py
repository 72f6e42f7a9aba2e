"""Statistics of chains and traces: R-hat, effective sample size, Monte Carlo errors, rates."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from numpy.typing import ArrayLike

from optax_smile import _check, _trace, _tree
from optax_smile._types import by_identity
from optax_smile.draws._checks import PREDICTION, Posterior, log_density_of
from optax_smile.draws.prediction import Prediction
from optax_smile.draws.snapshots import Snapshots, StoredSnapshots

EssMethod = Literal["bulk", "tail", "mean"]
# ArviZ needs four draws of a chain; within a chain, its halves are the chains.
LEAST_DRAWS, LEAST_DRAWS_WITHIN = 4, 8
NUM_DRAWS = _check.Whole(1) | None
SNAPSHOTS = Posterior(
    _check.kind(
        (Snapshots, StoredSnapshots),
        "the result of `sample` or `load_snapshots`",
        "Make one with `Snapshots` or `Snapshots.from_members`.",
    )
)


@dataclass(frozen=True)
class Chains(_check.Array):
    """An array of chains without NaN, each with at least `least` draws."""

    axes: str = "[chain, draw, ...]"
    least: int = LEAST_DRAWS

    @property
    def rule(self) -> str:
        """The axes and the number of draws."""
        return f"an array {self.axes} with at least {self.least} draws per chain"

    def __call__(self, where, argument, value, given=_check.NOTHING):
        """Check the array, then the number of draws."""
        array = super().__call__(where, argument, value, given)
        if array.shape[1] < self.least:
            _check.fail(where, argument, self.rule, f"shape {array.shape}")
        return array


@_check.arguments(values=Chains())
def rhat(values: ArrayLike) -> np.ndarray:
    """Compare chains with each other: rank-normalised split R-hat.

    It is the square root of the variance of all draws over the variance within half chains, for the
    ranks of the values and for the ranks of their distances from the median; the larger of both.
    Chains that agree have a value of 1.

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
    values = np.asarray(values)
    if len(values) < 2:
        advice = "For single chains, use `rhat_within`."
        _check.fail("rhat", "values", "of at least two chains", f"shape {values.shape}", advice)
    return _by_arviz("rhat", values)


@_check.arguments(values=Chains(least=LEAST_DRAWS_WITHIN))
def rhat_within(values: ArrayLike) -> np.ndarray:
    """Compare the beginning of each chain with its end: R-hat of the quarters of one chain.

    The halves of a chain are the chains of `rhat`, which splits them once more.

    Args:
        values: arrays `[chain, draw, ...]` of at least eight draws; if their number is odd, the
            first is left out.

    Returns:
        R-hat `[chain, ...]`: about 1 + 2 / n for a stationary chain with n independent draws; NaN
        where a chain does not move.

    Raises:
        ValueError: another shape, too few draws, NaN.
        ImportError: ArviZ is missing.

    Example:
        >>> import numpy as np
        >>> from optax_smile import diagnostics
        >>> chains = np.random.default_rng(0).normal(size=(2, 500))
        >>> diagnostics.rhat_within(chains + [[0], [1]] * np.linspace(0, 9, 500)).round(1)
        array([1. , 2.4])

    Source: the idea of a chainwise R-hat: Sommer et al., Connecting the dots, ICML 2024.
    """
    values = np.asarray(values)
    num_chains, num_draws, *rest = values.shape
    halves = values[:, num_draws % 2 :].reshape(num_chains, 2, num_draws // 2, *rest)
    return _by_arviz("rhat", np.moveaxis(halves, 0, 2))


@_check.arguments(values=Chains(), method=_check.OneOf(EssMethod))
def ess(values: ArrayLike, method: EssMethod = "bulk") -> np.ndarray:
    """Effective sample size: the number of independent draws that would be as accurate.

    Args:
        values: arrays `[chain, draw, ...]` of at least four draws.
        method: `"bulk"`: for the middle of the distribution; `"tail"`: for the 5 % and 95 %
            quantiles, the smaller of both; `"mean"`: for the average of the values.

    Returns:
        ESS of all chains together, `[...]`; NaN where nothing moves.

    Raises:
        ValueError: another shape, too few draws, NaN, an unknown method.
        ImportError: ArviZ is missing.

    Example:
        >>> import numpy as np
        >>> from optax_smile import diagnostics
        >>> chains = np.random.default_rng(0).normal(size=(4, 500, 1))
        >>> bool(1_500 < diagnostics.ess(chains)[0] < 2_500)
        True

    Source: Vehtari et al., Bayesian Analysis 2021, by ArviZ.
    """
    values = np.asarray(values)
    tails = {"prob": (0.05, 0.95)} if method == "tail" else {}
    size = _by_arviz("ess", values, method=method, **tails)
    return np.where(np.ptp(values, axis=(0, 1)) > 0, size, np.nan)


@_check.arguments(log_likelihood=Chains("[chain, draw, input]"))
def mcse_lppd(log_likelihood: ArrayLike) -> float:
    """Monte Carlo standard error of the log pointwise predictive density, by the delta method.

    With L_si the likelihood of target i under draw s, LPPD = sum_i log(p_i) / n where p_i is the
    average of L_si over the S draws. To first order in the error of p_i, its error is

        sum_i (error of p_i) / p_i / n = sum_s (z_s - 1) / S,  z_s = sum_i (L_si / p_i) / n,

    so its standard error is that of the average of z: std(z) / sqrt(ESS of z). If chains are in
    different modes, the ESS is small and the error large. If a few draws dominate the average of an
    input, the error is underestimated, as for any average that rare large values would change.

    Args:
        log_likelihood: nats, `[chain, draw, input]`, at least four draws, as `each.log_density` of
            `predict(..., per="draw", targets=...)`.

    Returns:
        Standard error in nats per input; 0 if all draws are equal.

    Raises:
        ValueError: another shape, too few draws, NaN, plus infinity, or an input of probability
            zero under all draws.
        ImportError: ArviZ is missing.

    Example:
        >>> import numpy as np
        >>> from optax_smile import diagnostics
        >>> log_likelihood = np.random.default_rng(0).normal(size=(4, 500, 3))
        >>> round(diagnostics.mcse_lppd(log_likelihood), 2)
        0.02

    Source: the delta method; the error of an average from its ESS: Vehtari et al. 2021.
    """
    values = np.asarray(log_likelihood)
    average = log_mean_exp(values, (0, 1))
    if not np.isfinite(average).all():
        rule, got = "finite in at least one draw of each input", average[~np.isfinite(average)][0]
        _check.fail("mcse_lppd", "log_likelihood", rule, got)
    return float(_by_arviz("mcse", np.exp(values - average).mean(axis=2), method="mean"))


@_check.arguments(mean=_check.Array())
def disagreement(mean: ArrayLike, *, classes: bool = True) -> np.ndarray:
    """Measure how much the predictions of each pair of chains differ.

    Args:
        mean: predictions of the draws of each chain, such as `each.mean` of
            `predict(..., per="draw")`: class probabilities `[chain, draw, input, class]`, or
            averages of chains `[chain, input, class]`. With `classes=False`, numbers
            `[chain, draw, input, ...]`.
        classes: whether they are class probabilities.

    Returns:
        `[chain, chain]`, 0 on the diagonal. For classes, the share of inputs for which the averages
        of two chains have different most probable classes, 0 to 1. For numbers, the root mean
        square difference between the averages of two chains, divided by the root mean square
        deviation of the draws of a chain from its average, over all inputs and chains. At 1, the
        distance between chains equals the width of a chain.

    Raises:
        ValueError: another shape, NaN, or class probabilities that do not sum to 1.

    Example:
        >>> import numpy as np
        >>> from optax_smile import diagnostics
        >>> one, other = [[0.9, 0.1], [0.8, 0.2]], [[0.9, 0.1], [0.3, 0.7]]
        >>> diagnostics.disagreement([one, other])
        array([[0. , 0.5],
               [0.5, 0. ]])
    """
    axes = "[chain, draw, input, class] or [chain, input, class]"
    axes = axes if classes else "[chain, draw, input, ...]"
    values = _check.Array(axes)("disagreement", "mean", mean)
    if classes:
        sums = values.sum(axis=-1)
        if not np.allclose(sums, 1, atol=1e-3):
            got = f"sums from {sums.min():.3g} to {sums.max():.3g}"
            advice = "Apply a softmax to logits. For regression, pass `classes=False`."
            _check.fail("disagreement", "mean", "class probabilities, which sum to 1", got, advice)
        top = (values.mean(axis=1) if values.ndim == 4 else values).argmax(axis=-1)
        return (top[:, None] != top).mean(axis=-1)
    centre = values.mean(axis=1).reshape(len(values), -1)
    differences = np.sqrt(np.mean((centre[:, None] - centre) ** 2, axis=-1))
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = differences / np.sqrt(np.mean(values.var(axis=1)))
    return np.where(differences == 0, 0.0, relative)


@_check.arguments(values=Chains(least=2), max_lag=_check.Whole(0))
def autocorrelation(values: ArrayLike, max_lag: int) -> np.ndarray:
    """Compute the correlation of each chain with itself some draws later.

    Args:
        values: arrays `[chain, draw, ...]`.
        max_lag: largest lag in draws, >= 0 and less than the number of draws.

    Returns:
        sum_t (x_t - m) (x_(t+k) - m) / sum_t (x_t - m)^2 for the lags k = 0 to `max_lag` with the
        average m of the chain, `[chain, lag, ...]`; NaN where a chain does not move.

    Raises:
        ValueError: an argument out of range, NaN.

    Cost: a fast Fourier transform.

    Example:
        >>> import numpy as np
        >>> from optax_smile import diagnostics
        >>> diagnostics.autocorrelation(np.array([[1.0, -1.0, 1.0, -1.0]]), 2)
        array([[ 1.  , -0.75,  0.5 ]])
    """
    values = np.asarray(values)
    num_draws = values.shape[1]
    if max_lag >= num_draws:
        rule = f"less than the {num_draws} draws"
        _check.fail("autocorrelation", "max_lag", rule, max_lag)
    centred = values - values.mean(axis=1, keepdims=True)
    # Pad with zeros, as the transform is periodic.
    power = np.abs(np.fft.rfft(centred, n=2 * num_draws, axis=1)) ** 2
    products = np.fft.irfft(power, n=2 * num_draws, axis=1)[:, : max_lag + 1]
    moves = np.ptp(values, axis=1, keepdims=True) > 0
    return np.where(moves, products, np.nan) / np.where(moves, products[:, :1], 1)


@by_identity
class EnergyFit(NamedTuple):
    """Gamma distribution fitted to |energy change|, arrays `[chain]`; NaN without an energy.

    Attributes:
        shape: (mean / std)^2.
        scale: variance / mean, nats.
        distance: Kolmogorov-Smirnov distance, 0 to 1: the largest difference between the
            distribution functions.
    """

    shape: np.ndarray
    scale: np.ndarray
    distance: np.ndarray


@_check.arguments(trace=_trace.TRACE, num_draws=NUM_DRAWS)
def rejection_rate(trace: Mapping[str, ArrayLike], num_draws: int | None = None) -> np.ndarray:
    """Count rejected steps per gradient, from the first tick to the last.

    Args:
        trace: arrays `[chain, tick]`, with `num_rejected` and `num_gradients`.
        num_draws: use only the last `num_draws` ticks that are draws, >= 1; None: all ticks.

    Returns:
        Rate `[chain]`, 0 to 1; NaN for a single tick. If the energy errors fit perfectly, a
        `reject_quantile` of 0.98 gives 0.02, or 0.01 with two gradients per step.

    Raises:
        ValueError: an entry is missing or has another shape.

    Example:
        >>> trace = {"num_rejected": [[0, 1, 1]], "num_gradients": [[10, 20, 30]]}
        >>> rejection_rate(trace)
        array([0.05])
    """
    names = "num_rejected", "num_gradients"
    rejected, gradients = _trace.read("rejection_rate", trace, *names, num_draws=num_draws)
    with np.errstate(invalid="ignore"):
        return (rejected[:, -1] - rejected[:, 0]) / (gradients[:, -1] - gradients[:, 0])


@_check.arguments(trace=_trace.TRACE, num_draws=NUM_DRAWS)
def step_size_trend(trace: Mapping[str, ArrayLike], num_draws: int | None = None) -> np.ndarray:
    """Compare the step size at the end with that near the beginning.

    If it still changes, the draws target no single distribution.

    Args:
        trace: arrays `[chain, tick]`, with `step_size`.
        num_draws: use only the last `num_draws` ticks that are draws, >= 1; None: all ticks.

    Returns:
        Median of the last tenth of the ticks / median of the second tenth, `[chain]`: 1 for a
        constant step size.

    Raises:
        ValueError: an entry is missing or has another shape.

    Example:
        >>> step_size_trend({"step_size": [[0.5] * 10 + [0.2] * 10]})
        array([0.4])
    """
    (sizes,) = _trace.read("step_size_trend", trace, "step_size", num_draws=num_draws)
    tenth = max(1, sizes.shape[1] // 10)
    second = sizes[:, tenth : 2 * tenth] if sizes.shape[1] > 1 else sizes
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.median(sizes[:, -tenth:], axis=1) / np.median(second, axis=1)


@_check.arguments(trace=_trace.TRACE, num_draws=NUM_DRAWS)
def energy_fit(trace: Mapping[str, ArrayLike], num_draws: int | None = None) -> EnergyFit:
    """Fit a Gamma distribution to |energy change|, as the outlier test and the tuner do.

    Args:
        trace: arrays `[chain, tick]`, with `energy_change`.
        num_draws: use only the last `num_draws` ticks that are draws, >= 1; None: all ticks.

    Returns:
        An `EnergyFit`, by moments with equal weights; the sampler gives recent ticks more weight.

    Raises:
        ValueError: an entry is missing or has another shape.

    Example:
        >>> energy_fit({"energy_change": [[0.1, -0.3, 0.2]]}).shape.round(2)
        array([6.])

    Source: the fit: Sommer et al., ICML 2026; the distance: Kolmogorov 1933.
    """
    from scipy.special import gammainc

    (energies,) = _trace.read("energy_fit", trace, "energy_change", num_draws=num_draws)
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


@_check.arguments(snapshots=SNAPSHOTS, prediction=PREDICTION | None)
def to_arviz(snapshots: Snapshots | StoredSnapshots, prediction: Prediction | None = None) -> Any:
    """Convert a run to the data structure of ArviZ.

    Args:
        snapshots: result of `sample` or `load_snapshots`.
        prediction: result of `predict(..., per="draw", targets=...)` for the same draws.

    Returns:
        `InferenceData` of ArviZ 0.x, or `DataTree` of ArviZ 1.x. The group `posterior` has a
        variable per leaf, named by its path (`layer.w`), with an underscore appended if that is the
        name of an axis (`chain_`); bfloat16 becomes float32. `sample_stats` has the trace of the
        draws; `energy_change` is called `energy_error`, as in ArviZ. `log_likelihood` has `target`.

    Raises:
        ValueError: no draws, the iterates of an optimizer, or draws that were chosen by their
            indices; a prediction without single draws or targets, or of other draws.
        ImportError: ArviZ is missing.

    Cost: the draws in memory.

    Example:
        >>> import numpy as np, optax_smile
        >>> draws = optax_smile.Snapshots({"layer": {"w": np.zeros((2, 5, 3))}})
        >>> list(optax_smile.diagnostics.to_arviz(draws).posterior.data_vars)
        ['layer.w']
    """
    arviz = _import_arviz()
    leaves = jax.tree_util.tree_leaves_with_path(snapshots.params)
    # A `DataTree` uses "/" for groups.
    named = [(_tree.name(map(_tree.entry, path), ".") or "params", x) for path, x in leaves]
    groups = {"posterior": _variables(named)}
    if stats := _trace.of_draws(snapshots.trace, snapshots.num_draws):
        renamed = {"energy_change": "energy_error"}
        groups["sample_stats"] = _variables([(renamed.get(x, x), y) for x, y in stats.items()])
    if prediction is not None:
        axes = snapshots.num_chains, snapshots.num_draws
        density = log_density_of("to_arviz", axes, prediction)
        groups["log_likelihood"] = _variables([("target", density)])
    with warnings.catch_warnings():
        # A deep ensemble has one draw per chain.
        warnings.filterwarnings("ignore", "More chains .* than draws")
        if "InferenceData" in vars(arviz):
            return arviz.from_dict(**groups)
        return arviz.from_dict(groups, check_conventions=False)


def _variables(named: Sequence[tuple[str, ArrayLike]]) -> dict[str, np.ndarray]:
    """Make variables of ArviZ whose names differ from each other and from those of all axes."""
    arrays, names, unique = [np.asarray(x) for _, x in named], [], [name for name, _ in named]
    while names != unique:
        names, lengths = unique, [x.ndim - 2 for x in arrays]
        axes = [f"{n}_dim_{i}" for n, k in zip(names, lengths, strict=True) for i in range(k)]
        taken = {"chain", "draw", "sample", *axes}
        unique = [f"{n}_" if n in taken or n in names[:i] else n for i, n in enumerate(names)]
    # No file format has the numbers of `ml_dtypes`.
    arrays = [x.astype(np.float32) if x.dtype.isbuiltin == 2 else x for x in arrays]
    return dict(zip(names, arrays, strict=True))


def _import_arviz() -> ModuleType:
    needs = "`optax_smile.diagnostics` needs ArviZ"
    with _check.needed(needs, "diagnostics"), warnings.catch_warnings():
        # Version 0.23 announces the next major version.
        warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing", FutureWarning)
        import arviz
    return arviz


def _by_arviz(statistic: str, values: np.ndarray, **options: object) -> np.ndarray:
    """Call a function of ArviZ on a data set of all values, a form that all versions have."""
    function = getattr(_import_arviz(), statistic)
    import xarray

    points = values.reshape(*values.shape[:2], -1)
    data = xarray.Dataset({"x": (("chain", "draw", "point"), points)})
    # Constant values divide by zero.
    with np.errstate(divide="ignore", invalid="ignore"):
        return function(data, **options)["x"].values.reshape(values.shape[2:])


def log_mean_exp(values: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Compute the logarithm of the mean of exponentials over axes."""
    number = np.prod([values.shape[axis] for axis in axes])
    for axis in sorted(axes, reverse=True):
        values = np.logaddexp.reduce(values, axis=axis)
    return values - np.log(number)
