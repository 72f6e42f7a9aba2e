"""Judge a run."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from optax_smile import _check, _trace
from optax_smile.diagnostics import statistics
from optax_smile.diagnostics.findings import Run, copy_of, fits_energies, judge, nominal_rate
from optax_smile.diagnostics.paths import relative, walk
from optax_smile.diagnostics.results import Summary
from optax_smile.diagnostics.statistics import LEAST_DRAWS, LEAST_DRAWS_WITHIN
from optax_smile.draws._checks import PREDICTION, log_density_of
from optax_smile.draws.prediction import Prediction
from optax_smile.draws.snapshots import Snapshots, StoredSnapshots


@_check.arguments(
    snapshots=statistics.SNAPSHOTS,
    prediction=PREDICTION | None,
    max_inputs=_check.Whole(1),
    seed=_check.Whole(0),
)
def summary(
    snapshots: Snapshots | StoredSnapshots,
    prediction: Prediction | None = None,
    *,
    max_inputs: int = 200,
    seed: int = 0,
) -> Summary:
    """Check a whole run: what looks wrong, and what to try.

    It reports the following problems of chains. The name of each check is in parentheses.

    - They are identical (copies), or something changed the updates before they reached the
      parameters (altered).
    - Gradients are not finite (not finite), or a chain predicts far worse than the others, or than
      its first draws (diverged).
    - They hardly move (frozen), their energy still falls (still on its way), their predictions
      drift (not settled), or they have few independent draws (slow).
    - Groups of chains predict differently (different modes), or chains disagree (chains differ).
    - Their loss is far above that of the start (worse than the start), far more steps are rejected
      than expected (rejected steps), or the step size still changes (step size).

    The attribute `checks` of the result lists every check with its numbers and its bound. Without a
    prediction, R-hats are those of weights, which may differ although the predictions agree. Then
    `summary` does not look for slow chains, different modes, or chains that all predict badly.

    Args:
        snapshots: result of `sample`, `load_snapshots` or `Snapshots.from_draws`. Weights without a
            sampler, such as a deep ensemble, get a short summary.
        prediction: result of `predict(..., per="draw", targets=...)` for the same draws, on test or
            training data. Chains are then judged by their predictions instead of their weights. Of
            several outputs per input, the one that varies most over the draws is used.
        max_inputs: R-hat and ESS use at most this many randomly chosen inputs (without a
            prediction: weights), >= 1.
        seed: seed of this choice, >= 0.

    Returns:
        A `Summary`: print it.

    Raises:
        ValueError: an argument is out of range; convergence cannot be judged, because there are no
            draws, or they are iterates of an optimizer, or `thin_to` chose them; the prediction was
            made without `per="draw"` or `targets`, or of other draws.
        ImportError: ArviZ is not installed. It is needed for R-hat and ESS, which are computed if
            each chain has at least 4 draws.

    Cost: about a millisecond per chain and chosen input, and one pass over the draws. At most two
    draws of each chain are in memory.

    Example:
        >>> import numpy as np, optax_smile
        >>> draws = optax_smile.Snapshots(np.random.default_rng(0).normal(size=(2, 40, 3)))
        >>> optax_smile.diagnostics.summary(draws).findings
        ()
    """
    num_draws, paths = snapshots.num_draws, walk(snapshots, max_inputs, seed)
    trace, settings = snapshots.trace, snapshots.settings or {}
    seen = _trace.of_draws(trace, num_draws)
    unknown, values, density = np.full(snapshots.num_chains, np.nan), None, None
    figures: dict[str, Any] = {field.name: unknown for field in dataclasses.fields(Summary)}
    figures |= {"num_draws": num_draws, "of": "weights", "lppd": np.nan, "mcse": np.nan}
    figures |= {"rhat_within": unknown[:, None], "rhat_across": np.empty(0), "ess": np.empty(0)}
    figures |= {"nominal_rate": nominal_rate(settings), "checks": ()}
    figures |= {"stopping": snapshots.stopping}
    if trace:
        figures |= {
            "first_step_size": np.asarray(trace["step_size"], float)[:, 0],
            "last_step_size": np.asarray(seen["step_size"], float)[:, -1],
            "step_size_trend": statistics.step_size_trend(seen),
            "rejection_rate": statistics.rejection_rate(seen),
            "num_nonfinite": np.asarray(seen["num_nonfinite"], float)[:, -1],
        }
        if "temperature" in seen:
            figures["temperature"] = np.asarray(seen["temperature"], float)[:, -1]
        if fits_energies(settings):
            figures["energy_distance"] = statistics.energy_fit(seen).distance
    figures["copy_of"] = copies = copy_of(paths)
    figures["travelled"] = relative(paths)[:, -1]
    if prediction is not None:
        axes = snapshots.num_chains, snapshots.num_draws
        density = log_density_of("summary", axes, prediction)
        values = _scalars(prediction, density, max_inputs, seed)
        by_chain = statistics.log_mean_exp(density, (1,))
        lppd = float(statistics.log_mean_exp(by_chain, (0,)).mean())
        figures |= {"of": "predictions", "chain_lppd": by_chain.mean(axis=1), "lppd": lppd}
        if num_draws >= LEAST_DRAWS:
            own = np.unique(copies)
            figures["ess"] = statistics.ess(values[own])
            figures["mcse"] = statistics.mcse_lppd(density[own]) if np.isfinite(lppd) else np.nan
            if len(own) > 1:
                figures["rhat_across"] = statistics.rhat(values[own])
    series = paths.weights if values is None else values
    if num_draws >= LEAST_DRAWS_WITHIN and series.shape[2]:
        figures["rhat_within"] = statistics.rhat_within(series)
    found = Summary(**figures)
    with np.errstate(divide="ignore", invalid="ignore"):
        checks = judge(found, Run(paths, settings, seen, values, density))
    return dataclasses.replace(found, checks=tuple(checks))


def _scalars(prediction: Prediction, density: np.ndarray, max_inputs: int, seed: int) -> np.ndarray:
    """Return one number per input `[chain, draw, input]` for randomly chosen inputs."""
    values = density if prediction.each.mean is None else prediction.each.mean
    number = values.shape[2]
    rows = np.random.default_rng(seed).permutation(number)[:max_inputs]
    values = np.asarray(values[:, :, np.sort(rows)], float)
    values = values.reshape(*values.shape[:3], -1)
    most = values.var(axis=(0, 1)).argmax(axis=-1)
    # Give impossible targets a finite density.
    lowest = np.finfo(np.float32).min
    return np.maximum(np.take_along_axis(values, most[None, None, :, None], 3)[..., 0], lowest)
