"""R-hat, effective sample size and Monte Carlo error by arviz-stats, and a run for ArviZ."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike

from optax_smile import _check, _paths, _settings, _trace
from optax_smile.draws._constraints import PREDICTION, log_density_of
from optax_smile.draws.prediction import Prediction
from optax_smile.draws.snapshots import Snapshots, StoredSnapshots

# ArviZ needs four draws per chain. For `rhat_within`, the parts of a chain serve as chains.
LEAST_DRAWS, LEAST_DRAWS_WITHIN = 4, 8


class Posterior(_check.Constraint):
    """All draws of a sampler, at least one; not iterates of an optimizer or selected draws."""

    text = "the result of `sample` or `load_snapshots`"

    def __call__(self, argument, value, given=_check.NOTHING):
        """Check draws, see `_check.Constraint`."""
        if not isinstance(value, Snapshots):
            advice = "Make one with `Snapshots` or `Snapshots.from_members`."
            _check.fail(argument, self.text, _check.show(value), advice)
        if not value.num_draws:
            advice = "The run is still in its warm-up or ended there. Load it again later."
            _check.fail(argument, "draws of a run that has at least one", "none", advice)
        if not _settings.are_posterior(value.settings):
            rule, advice = "draws from a posterior", "`predict` and the metrics accept them."
            _check.fail(argument, rule, _settings.origin(value.settings), advice)
        return value


def rhat(values: np.ndarray) -> np.ndarray:
    """R-hat (Vehtari et al. 2021) of chains `[chain, draw, ...]`; NaN where nothing moves."""
    return _by_arviz_stats("rhat", values)


def rhat_within(values: np.ndarray) -> np.ndarray:
    """Compare the beginning of each chain with its end: R-hat of its quarters, `[chain, ...]`.

    It is about 1 + 2 / n for a stationary chain with n independent draws. The idea of a chainwise
    R-hat: Sommer et al., Connecting the dots, ICML 2024. If the number of draws is odd, the first
    is omitted.
    """
    num_chains, num_draws, *rest = values.shape
    halves = values[:, num_draws % 2 :].reshape(num_chains, 2, num_draws // 2, *rest)
    return rhat(np.moveaxis(halves, 0, 2))


def ess(values: np.ndarray) -> np.ndarray:
    """Bulk ESS (Vehtari et al. 2021) of all chains together, `[...]`; NaN if nothing moves."""
    size = _by_arviz_stats("ess", values, method="bulk")
    return np.where(np.ptp(values, axis=(0, 1)) > 0, size, np.nan)


def mcse_lppd(log_likelihood: np.ndarray) -> float:
    """Monte Carlo standard error of the log pointwise predictive density, by the delta method.

    With L_si the likelihood of target i under draw s, LPPD = sum_i log(p_i) / n where p_i is the
    average of L_si over the S draws. To first order in the error of p_i, its error is

        sum_i (error of p_i) / p_i / n = sum_s (z_s - 1) / S,  z_s = sum_i (L_si / p_i) / n,

    that of the average of z. If few draws dominate the average, the error is underestimated.
    """
    average = log_mean_exp(log_likelihood, (0, 1))
    z = np.exp(log_likelihood - average).mean(axis=2)
    return float(_by_arviz_stats("mcse", z, method="mean"))


@_check.arguments(snapshots=Posterior(), prediction=PREDICTION | None)
def to_arviz(snapshots: Snapshots | StoredSnapshots, prediction: Prediction | None = None) -> Any:
    """Convert a run to the data structure of ArviZ.

    Args:
        snapshots: result of `sample` or `load_snapshots`.
        prediction: result of `predict(..., per="draw", targets=...)` for the same draws.

    Returns:
        `InferenceData` of ArviZ 0.x, or `DataTree` of ArviZ 1.x. The group `posterior` has a
        variable per leaf, named by its path (`layer.w`; `chain_` if that is the name of an axis).
        `sample_stats` has the trace of the draws, with `energy_change` as `energy_error`.
        `log_likelihood` has `target`.

    Raises:
        ValueError: as `summary`.
        ImportError: ArviZ is not installed.
    """
    more: dict[str, Mapping[str, ArrayLike]] = {}
    if prediction is not None:
        axes = snapshots.num_chains, snapshots.num_draws
        more["log_likelihood"] = {"target": log_density_of(axes, prediction)}
    return with_groups(snapshots, more)


def with_groups(
    snapshots: Snapshots | StoredSnapshots, more: Mapping[str, Mapping[str, ArrayLike]]
) -> Any:
    """Convert a run, and `more` groups of variables `[chain, draw, ...]`."""
    # Version 0.23 announces the next major version.
    with _check.needed("`to_arviz` needs ArviZ", "arviz"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing", FutureWarning)
        arviz: Any = importlib.import_module("arviz")
    leaves = jax.tree_util.tree_leaves_with_path(snapshots.params)
    # A `DataTree` uses "/" for groups.
    named = [(_paths.name(map(_paths.entry, path), ".") or "params", x) for path, x in leaves]
    groups = {"posterior": _variables(named)}
    if stats := _trace.of_draws(snapshots.trace, snapshots.num_draws):
        renamed = {"energy_change": "energy_error"}
        groups["sample_stats"] = _variables([(renamed.get(x, x), y) for x, y in stats.items()])
    groups |= {name: _variables([*group.items()]) for name, group in more.items()}
    with warnings.catch_warnings():
        # A deep ensemble has one draw per chain.
        warnings.filterwarnings("ignore", "More chains .* than draws")
        if "InferenceData" in vars(arviz):
            return arviz.from_dict(**groups)
        return arviz.from_dict(groups, check_conventions=False)


def _variables(named: Sequence[tuple[str, ArrayLike]]) -> dict[str, np.ndarray]:
    """Make variables for ArviZ with unique names that differ from those of all axes."""
    arrays, names, unique = [np.asarray(x) for _, x in named], [], [name for name, _ in named]
    while names != unique:
        names, lengths = unique, [x.ndim - 2 for x in arrays]
        axes = [f"{n}_dim_{i}" for n, k in zip(names, lengths, strict=True) for i in range(k)]
        taken = {"chain", "draw", "sample", *axes}
        unique = [f"{n}_" if n in taken or n in names[:i] else n for i, n in enumerate(names)]
    # File formats do not support the dtypes of `ml_dtypes`.
    arrays = [x.astype(np.float32) if x.dtype.isbuiltin == 2 else x for x in arrays]
    return dict(zip(names, arrays, strict=True))


def _by_arviz_stats(statistic: str, values: np.ndarray, **options: object) -> np.ndarray:
    """Call a function of arviz-stats on arrays `[chain, draw, ...]`."""
    with _check.needed("`optax_smile.diagnostics` needs arviz-stats", "diagnostics"):
        from arviz_stats.base.array import array_stats
    # Constant values divide by zero.
    with np.errstate(divide="ignore", invalid="ignore"):
        return getattr(array_stats, statistic)(values, chain_axis=0, draw_axis=1, **options)


def log_mean_exp(values: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Compute the logarithm of the mean of exponentials over axes."""
    number = np.prod([values.shape[axis] for axis in axes])
    for axis in sorted(axes, reverse=True):
        values = np.logaddexp.reduce(values, axis=axis)
    return values - np.log(number)
