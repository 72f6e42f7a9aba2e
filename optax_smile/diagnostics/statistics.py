"""Statistics of chains: R-hat, effective sample size, Monte Carlo errors."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from numpy.typing import ArrayLike

from optax_smile import _check, _trace, _tree
from optax_smile.draws._checks import PREDICTION, Posterior, log_density_of
from optax_smile.draws.prediction import Prediction
from optax_smile.draws.snapshots import Snapshots, StoredSnapshots

EssMethod = Literal["bulk", "tail", "mean"]
# What ArviZ needs of a chain; within a chain its halves are the chains.
LEAST_DRAWS, LEAST_DRAWS_WITHIN = 4, 8
SNAPSHOTS = Posterior(
    _check.kind(
        (Snapshots, StoredSnapshots),
        "what `sample` or `load_snapshots` returns",
        "`Snapshots` holds arrays [chain, draw, ...], `Snapshots.from_members` members.",
    )
)


@dataclass(frozen=True)
class Chains(_check.Array):
    """An array of chains without NaN, with at least so many draws of each."""

    axes: str = "[chain, draw, ...]"
    least: int = LEAST_DRAWS

    @property
    def rule(self) -> str:
        """Its axes, and how many draws."""
        return f"an array {self.axes} with at least {self.least} draws per chain"

    def __call__(self, where, argument, value, given=_check.NOTHING):
        """Check the numbers, then the draws."""
        array = super().__call__(where, argument, value, given)
        if array.shape[1] < self.least:
            _check.fail(where, argument, self.rule, f"shape {array.shape}")
        return array


@_check.arguments(values=Chains())
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
    values = np.asarray(values)
    if len(values) < 2:
        advice = "`rhat_within` takes chains alone."
        _check.fail("rhat", "values", "of at least two chains", f"shape {values.shape}", advice)
    return _by_arviz("rhat", values)


@_check.arguments(values=Chains(least=LEAST_DRAWS_WITHIN))
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

    Example:
        >>> import numpy as np
        >>> from optax_smile import diagnostics
        >>> chains = np.random.default_rng(0).normal(size=(2, 500))
        >>> diagnostics.rhat_within(chains + [[0], [1]] * np.linspace(0, 9, 500)).round(1)
        array([1. , 2.4])

    Source: the idea of a chainwise R-hat is of Sommer et al., Connecting the dots, ICML 2024.
    """
    values = np.asarray(values)
    num_chains, num_draws, *rest = values.shape
    halves = values[:, num_draws % 2 :].reshape(num_chains, 2, num_draws // 2, *rest)
    return _by_arviz("rhat", np.moveaxis(halves, 0, 2))


@_check.arguments(values=Chains(), method=_check.OneOf(EssMethod))
def ess(values: ArrayLike, method: EssMethod = "bulk") -> np.ndarray:
    """Effective sample size: the number of independent draws that are worth as much.

    Args:
        values: arrays `[chain, draw, ...]` of at least four draws.
        method: `"bulk"`, for the middle of the distribution; `"tail"`, the smaller one of its 5 %
            and 95 % quantiles; `"mean"`, for averages of the values as they are.

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


@_check.arguments(mean=_check.Array(), classes=_check.FLAG)
def disagreement(mean: ArrayLike, *, classes: bool = True) -> np.ndarray:
    """Measure how much each pair of chains differs in what it predicts.

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
        top = (values.mean(axis=1) if values.ndim == 4 else values).argmax(axis=-1)
        return (top[:, None] != top).mean(axis=-1)
    centre = values.mean(axis=1).reshape(len(values), -1)
    differences = np.sqrt(np.mean((centre[:, None] - centre) ** 2, axis=-1))
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = differences / np.sqrt(np.mean(values.var(axis=1)))
    return np.where(differences == 0, 0.0, relative)


@_check.arguments(values=Chains(least=2), max_lag=_check.Whole(0))
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
    # Zeros keep the end of a chain from meeting its beginning.
    power = np.abs(np.fft.rfft(centred, n=2 * num_draws, axis=1)) ** 2
    products = np.fft.irfft(power, n=2 * num_draws, axis=1)[:, : max_lag + 1]
    moves = np.ptp(values, axis=1, keepdims=True) > 0
    return np.where(moves, products, np.nan) / np.where(moves, products[:, :1], 1)


@_check.arguments(snapshots=SNAPSHOTS, prediction=PREDICTION | None)
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
        ValueError: the iterates of an optimizer, or a subset of draws; a prediction without single
            draws or targets, or of other draws.
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
    # The DataTree keeps "/" for its groups.
    named = {_tree.name(map(_tree.entry, path), ".") or "params": x for path, x in leaves}
    groups = {"posterior": named}
    if stats := _trace.of_draws(snapshots.trace, snapshots.num_draws):
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


def log_mean_exp(values: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Logarithm of the mean of exponentials over axes."""
    number = np.prod([values.shape[axis] for axis in axes])
    for axis in sorted(axes, reverse=True):
        values = np.logaddexp.reduce(values, axis=axis)
    return values - np.log(number)
