"""Judge a run."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from optax_smile import _check, _trace
from optax_smile.diagnostics import statistics, traces
from optax_smile.diagnostics.advice import fits_energies
from optax_smile.diagnostics.findings import Run, copy_of, judge, nominal_rate
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
    """Look at a whole run and say what looks wrong and what to try.

    Found are chains that are copies, whose updates were altered, that have diverged, are frozen,
    still on their way, not settled or slow; different modes among the others, or chains that differ
    in their predictions; far more rejections than nominal; a tuner that still changes the step
    size. Each of the `checks` has the numbers that were tested. From weights alone it finds neither
    slow chains nor different modes, nor chains that all predict badly.

    Args:
        snapshots: what `sample` or `load_snapshots` returns, or `Snapshots.from_draws`; weights
            without a sampler, such as a deep ensemble, get a short summary.
        prediction: of the same draws, `predict(..., per="draw", targets=...)`, on test or training
            data: chains are then judged by what they predict, not by their weights. Of several
            outputs that of each input which varies most is taken.
        max_inputs: how many predictions at random, or weights, R-hat and ESS look at, >= 1.
        seed: of the choice, >= 0.

    Returns:
        A `Summary`: print it.

    Raises:
        ValueError: an argument out of range; the iterates of an optimizer, which are no posterior
            draws; a subset that `thin_to` chose, from which convergence cannot be judged; a
            prediction without single draws or targets, or of other draws.
        ImportError: ArviZ is missing, unless there are too few draws for it.

    Cost: a millisecond per chain and prediction, and a pass over the draws, which need not fit into
    memory.

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
            "step_size_trend": traces.step_size_trend(seen),
            "rejection_rate": traces.rejection_rate(seen),
            "num_nonfinite": np.asarray(seen["num_nonfinite"], float)[:, -1],
        }
        if "temperature" in seen:
            figures["temperature"] = np.asarray(seen["temperature"], float)[:, -1]
        if fits_energies(settings):
            figures["energy_distance"] = traces.energy_fit(seen).distance
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
    """One number per input `[chain, draw, input]` of a random choice of inputs."""
    values = density if prediction.each.mean is None else prediction.each.mean
    number = values.shape[2]
    rows = np.random.default_rng(seed).permutation(number)[:max_inputs]
    values = np.asarray(values[:, :, np.sort(rows)], float)
    values = values.reshape(*values.shape[:3], -1)
    most = values.var(axis=(0, 1)).argmax(axis=-1)
    # An impossible target is far below a possible one.
    lowest = np.finfo(np.float32).min
    return np.maximum(np.take_along_axis(values, most[None, None, :, None], 3)[..., 0], lowest)
