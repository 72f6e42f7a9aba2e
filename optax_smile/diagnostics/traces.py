"""What the trace of a run tells: rejected steps, step size, energy errors."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from optax_smile import _check


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


def rejection_rate(trace: Mapping[str, Any], num_draws: int | None = None) -> np.ndarray:
    """Count rejected steps per gradient, from the first tick to the last.

    Args:
        trace: arrays `[chain, tick]`, with `num_rejected` and `num_gradients`.
        num_draws: count the draws alone, the last so many ticks that are samples; None: all ticks.

    Returns:
        Rate `[chain]`, 0 to 1; NaN from a single tick. For a perfect fit of the energy errors a
        `reject_quantile` of 0.98 gives 0.02, with two gradients per step 0.01.

    Raises:
        ValueError: entries that the trace lacks.
    """
    rejections, calls = _read("rejection_rate", trace, num_draws, "num_rejected", "num_gradients")
    with np.errstate(invalid="ignore"):
        return (rejections[:, -1] - rejections[:, 0]) / (calls[:, -1] - calls[:, 0])


def step_size_trend(trace: Mapping[str, Any], num_draws: int | None = None) -> np.ndarray:
    """Compare the step size at the end with that near the beginning: is this still a sampler?

    Args:
        trace: arrays `[chain, tick]`, with `step_size`.
        num_draws: see `rejection_rate`.

    Returns:
        Median of the last tenth of the ticks / median of the second tenth, `[chain]`: 1 for a
        constant step size.

    Raises:
        ValueError: entries that the trace lacks.
    """
    (sizes,) = _read("step_size_trend", trace, num_draws, "step_size")
    tenth = max(1, sizes.shape[1] // 10)
    second = sizes[:, tenth : 2 * tenth] if sizes.shape[1] > 1 else sizes
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.median(sizes[:, -tenth:], axis=1) / np.median(second, axis=1)


def energy_fit(trace: Mapping[str, Any], num_draws: int | None = None) -> EnergyFit:
    """Fit a Gamma distribution to |energy change|, as the outlier test and the tuner do.

    Args:
        trace: arrays `[chain, tick]`, with `energy_change`.
        num_draws: see `rejection_rate`.

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


def of_draws(trace: Mapping[str, Any], num_draws: int | None) -> dict[str, np.ndarray]:
    """The trace at the draws, the last ticks that were samples in all chains; None: all of it."""
    if num_draws is None or not trace:
        return {name: np.asarray(values) for name, values in trace.items()}
    is_draw = np.asarray(trace.get("is_draw", trace["num_gradients"]), bool)
    ticks = np.flatnonzero(is_draw.all(axis=0))[-num_draws:]
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
