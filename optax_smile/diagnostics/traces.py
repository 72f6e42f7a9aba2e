"""What the trace of a run shows: rejected steps, step size, energy errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from optax_smile import _check, _trace

NUM_DRAWS = _check.Whole(1) | None


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


@_check.arguments(trace=_trace.TRACE, num_draws=NUM_DRAWS)
def rejection_rate(trace: Mapping[str, Any], num_draws: int | None = None) -> np.ndarray:
    """Count rejected steps per gradient, from the first tick to the last.

    Args:
        trace: arrays `[chain, tick]`, with `num_rejected` and `num_gradients`.
        num_draws: take these alone, the last so many ticks that are draws, >= 1; None: all ticks.

    Returns:
        Rate `[chain]`, 0 to 1; NaN from a single tick. For a perfect fit of the energy errors a
        `reject_quantile` of 0.98 gives 0.02, with two gradients per step 0.01.

    Raises:
        ValueError: entries that the trace lacks, or of other shapes.

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
def step_size_trend(trace: Mapping[str, Any], num_draws: int | None = None) -> np.ndarray:
    """Compare the step size at the end with that near the beginning: is this still a sampler?

    Args:
        trace: arrays `[chain, tick]`, with `step_size`.
        num_draws: take these alone, the last so many ticks that are draws, >= 1; None: all ticks.

    Returns:
        Median of the last tenth of the ticks / median of the second tenth, `[chain]`: 1 for a
        constant step size.

    Raises:
        ValueError: entries that the trace lacks, or of other shapes.

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
def energy_fit(trace: Mapping[str, Any], num_draws: int | None = None) -> EnergyFit:
    """Fit a Gamma distribution to |energy change|, as the outlier test and the tuner do.

    Args:
        trace: arrays `[chain, tick]`, with `energy_change`.
        num_draws: take these alone, the last so many ticks that are draws, >= 1; None: all ticks.

    Returns:
        An `EnergyFit`; the fit by moments of all ticks weighs them alike, the sampler the recent.

    Raises:
        ValueError: entries that the trace lacks, or of other shapes.

    Example:
        >>> energy_fit({"energy_change": [[0.1, -0.3, 0.2]]}).shape.round(2)
        array([6.])

    Source: Sommer et al., ICML 2026: the fit; the test statistic of Kolmogorov 1933.
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
