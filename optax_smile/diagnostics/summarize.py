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

    It reports chains that

    - are identical (copies), or whose updates did not reach the parameters unchanged (altered);
    - have non-finite gradients (not finite), or left the region of good parameters (diverged);
    - hardly move (frozen), still fall towards the posterior (still on its way), have a trend (not
      settled) or few independent draws (slow);
    - form groups that predict differently (different modes), or disagree (chains differ);
    - have a far larger loss than the start (worse than the start), reject far more steps than
      expected (rejected steps), or still change their step size (step size).

    Each of the `checks` has the numbers that were tested. Without a prediction it cannot find slow
    chains, different modes, or chains that all predict badly.

    Args:
        snapshots: result of `sample`, `load_snapshots` or `Snapshots.from_draws`. Weights without a
            sampler, such as a deep ensemble, get a short summary.
        prediction: result of `predict(..., per="draw", targets=...)` for the same draws, on test or
            training data. Chains are then judged by their predictions instead of their weights. If
            an input has several outputs, the one that varies most is used.
        max_inputs: number of randomly chosen predictions, or weights, for R-hat and ESS, >= 1.
        seed: seed of this choice, >= 0.

    Returns:
        A `Summary`: print it.

    Raises:
        ValueError: an argument is out of range; there are no draws, or they are iterates of an
            optimizer or a subset that `thin_to` chose, from which convergence cannot be judged; the
            prediction lacks single draws or targets, or is of other draws.
        ImportError: ArviZ is missing and there are enough draws to need it.

    Cost: about a millisecond per chain and chosen input, and a pass over the draws, of which two
    per chain are in memory.

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
        density = log_density_of("summary", snapshots, prediction)
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
