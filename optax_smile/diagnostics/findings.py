"""What is wrong with a run, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from optax_smile.diagnostics.paths import Paths
from optax_smile.diagnostics.results import LEAST_DRAWS_JUDGED, Finding, Summary, median_of
from optax_smile.state import MOST_NONFINITE

# The four quarters of a chain with n independent draws have an R-hat of about 1 + 2 / n: beyond
# this it says no more than six. Two chains with it differ by more than a standard deviation.
HIGH_RHAT = 1.3
# Weights of networks wander while their predictions mix: a random walk has a median of 1.65, as
# have good runs (digits, psmile); a chain that goes somewhere has 2 to 3.1.
HIGH_WEIGHT_RHAT = 2.0
# Differences at single inputs are chance or a matter of taste.
MANY_INPUTS = 0.25
# Step sizes and distances of healthy chains differ by factors of two or three.
MUCH = 10.0
# A step size that changes more while it samples targets no single distribution.
MOST_TREND = 2.0
# Energy errors have heavier tails than the Gamma fit: twice the nominal rate is common.
MOST_REJECTIONS = 3.0
# Fewer events tell no rate, and rarer ones leave the chain its way.
LEAST_EVENTS, LEAST_REJECTION_RATE = 10, 0.01
# Nats per input by which the modes of one posterior hardly differ: targets 26 % less probable.
FAR_BELOW = 0.3
# More groups of chains are counted, not listed.
MOST_GROUPS = 6


class Run(NamedTuple):
    """What findings are made from: paths, settings, the trace at the draws, single predictions."""

    paths: Paths
    settings: Mapping[str, Any]
    trace: dict[str, np.ndarray]
    values: np.ndarray | None
    density: np.ndarray | None


# Which chains, how it shows, what to try.
Sign = tuple[np.ndarray, str, str]


def judge(found: Summary, run: Run) -> list[Finding]:
    """Judge each chain; a kind of trouble is told once per chain, by its first sign."""
    rhats = np.array([median_of(chain) for chain in found.rhat_within])
    lost = [
        *_by_first_sign(
            "diverged",
            _diverged(run),
            "a smaller step size, or a start closer by; leave these chains out of the prediction.",
        ),
        *_by_first_sign(
            "frozen",
            _frozen(found, run, mixes=rhats < HIGH_RHAT),
            "larger steps; `angle_tuner()`, or `quantile_tuner(adapt_steps=...)` with few steps.",
        ),
    ]
    sick = np.any([np.zeros(len(rhats), bool), *(chains for chains, *_ in lost)], axis=0)
    falling = np.zeros_like(sick)
    if "on_its_way" in run.trace:
        falling = (_ends(np.asarray(run.trace["on_its_way"], float))[1] > 0.5) & ~sick
    enough = found.num_draws >= LEAST_DRAWS_JUDGED
    bound = HIGH_WEIGHT_RHAT if run.values is None else HIGH_RHAT
    unsettled = (rhats > bound) & enough & ~sick & ~falling
    signs = [
        *lost,
        (
            falling,
            "still on its way: the gradients say that the energy was falling until the end.",
            "a larger num_warmup; a start from trained weights, as `warmstart` makes them.",
        ),
        (
            unsettled,
            "not settled: the draws at the beginning differ from those at the end (R-hat above"
            f" {bound:g}).",
            "a larger num_warmup, if there is a trend; a larger thin, more draws or a larger step"
            " size, if the chain moves too slowly.",
        ),
    ]
    if enough:
        signs += _different_modes(run.values, steady=~(sick | falling | unsettled))
    if run.trace:
        signs += [_often_rejected(found, run), _step_size_changed(found, run, sick)]
    return [
        Finding(tuple(np.flatnonzero(chains).tolist()), problem, advice)
        for chains, problem, advice in signs
        if chains.any()
    ]


def _by_first_sign(
    kind: str, signs: Iterator[tuple[np.ndarray, str]], advice: str
) -> Iterator[Sign]:
    told = np.array(False)
    for chains, problem in signs:
        yield chains & ~told, f"{kind}: {problem}", advice
        told = told | chains


def _different_modes(values: np.ndarray | None, steady: np.ndarray) -> Iterator[Sign]:
    chains = np.flatnonzero(steady)
    groups = [] if values is None else [chains[x].tolist() for x in _groups(values[steady])]
    if len(groups) < 2:
        return
    listed = f": {' and '.join(map(str, groups))}" if len(groups) <= MOST_GROUPS else ""
    yield (
        steady,
        f"different modes: {len(groups)} groups of steady chains predict differently{listed}.",
        "nothing, for networks, where this is normal: average over all chains, and do not read"
        " R-hat across chains as convergence to one posterior. More chains or `cyclical_sgld` find"
        " more modes.",
    )


def _often_rejected(found: Summary, run: Run) -> Sign:
    events = np.asarray(run.trace["num_rejected"], float)
    most = np.maximum(MOST_REJECTIONS * found.nominal_rate, LEAST_REJECTION_RATE)
    return (
        (found.rejection_rate > most) & (events[:, -1] - events[:, 0] >= LEAST_EVENTS),
        f"rejected steps: over {MOST_REJECTIONS:g} times as many as `reject_quantile` means.",
        "a smaller step size, larger batches, or a higher `reject_quantile`, up to 0.9999.",
    )


def _step_size_changed(found: Summary, run: Run, sick: np.ndarray) -> Sign:
    # Without a tuner the step size follows a schedule that was asked for.
    tuned = not run.settings or run.settings.get("tuner") is not None
    trend = found.step_size_trend
    return (
        (np.maximum(trend, 1 / trend) > MOST_TREND) & tuned & ~sick,
        f"step size: it changed more than {MOST_TREND:g}-fold among the draws.",
        "a longer warm-up: the steps of `angle_tuner` follow the gradients, whose size still"
        " changes; `quantile_tuner` needs `adapt_steps` within it.",
    )


def _diverged(run: Run) -> Iterator[tuple[np.ndarray, str]]:
    """Signs that a chain has left the region of good parameters."""
    if run.trace:
        broken, gradients = (
            values[:, -1] - values[:, 0]
            for values in (run.trace["num_nonfinite"], run.trace["num_gradients"])
        )
        yield broken > MOST_NONFINITE * gradients, "gradients keep being infinite or NaN."
    precision, temperature = (run.settings.get(x) for x in ("prior_precision", "temperature"))
    prior = 0.0
    # From a start near 0 a chain may grow to the norm of a draw from the prior.
    if isinstance(precision, int | float) and isinstance(temperature, int | float) and precision:
        prior = np.sqrt(run.paths.size * temperature / precision)
    expected = np.maximum(run.paths.start_norm, prior)
    blown = (expected > 0) & (_ends(run.paths.norm)[1] > MUCH * expected)
    yield blown, f"the parameters are more than {MUCH:g} times as large as at the start."
    if run.density is not None:
        by_draw, by_input = run.density.mean(axis=2), run.density.mean(axis=1)
        spread = np.subtract(*np.quantile(by_input, (0.75, 0.25), axis=1))
        # Where likelihoods differ a lot from input to input, less is no news.
        far = max(FAR_BELOW, float(np.median(spread)))
        first, last = _ends(by_draw)
        yield _others(last) - last > far, "the log likelihood is far below the other chains'."
        yield first - last > far, "the log likelihood fell far below where it was at first."


def _frozen(found: Summary, run: Run, mixes: np.ndarray) -> Iterator[tuple[np.ndarray, str]]:
    """Signs that a chain moves too little; small steps are no harm if it mixes all the same."""
    if found.num_draws < 2:
        return
    moves = run.paths.moved
    yield moves.max(axis=1) == 0, "the parameters do not move at all."
    if run.trace:
        below = np.mean(run.trace["below_resolution"], axis=1) > 0.5
        yield below, "the steps are too short for the precision of the parameters."
        # The largest of the last third, for a schedule that goes in cycles.
        sizes = np.asarray(run.trace["step_size"], float)
        size = sizes[:, 2 * sizes.shape[1] // 3 :].max(axis=1)
        fell = (MUCH * size < found.first_step_size) & ~mixes
        yield fell, f"the step size fell more than {MUCH:g}-fold."
        small = (MUCH * size < _others(size)) & ~mixes
        yield small, f"the step size is less than 1/{MUCH:g} of the other chains'."
    last = _ends(moves)[1]
    near = (MUCH * last < _others(last)) & ~mixes
    yield near, f"draws are less than 1/{MUCH:g} as far apart as in the other chains."


def _groups(values: np.ndarray) -> list[list[int]]:
    """Join chains of which a series of pairs agrees, in the averages of most values."""
    centre, variance = values.mean(axis=1), values.var(axis=1)
    groups: list[list[int]] = []
    for chain in range(len(values)):
        # (R-hat)^2 - 1 of two long chains.
        excess = (centre - centre[chain]) ** 2 / (variance + variance[chain])
        agrees = (excess > HIGH_RHAT**2 - 1).mean(axis=1) < MANY_INPUTS
        joined = [group for group in groups if agrees[group].any()]
        groups = [group for group in groups if group not in joined]
        groups.append(sorted([chain, *(other for group in joined for other in group)]))
    return sorted(groups)


def nominal_rate(settings: Mapping[str, Any]) -> float:
    """Rejected steps per gradient if energy errors are as fitted; NaN without an outlier test."""
    quantile = settings.get("reject_quantile")
    if not isinstance(quantile, float):
        return np.nan
    return (1 - quantile) / (2 if settings.get("integrator") == "minimal_norm" else 1)


def _ends(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Medians of the first and of the last third, `[chain]`."""
    third = max(1, values.shape[1] // 3)
    return np.median(values[:, :third], axis=1), np.median(values[:, -third:], axis=1)


def _others(values: np.ndarray) -> np.ndarray:
    """Median of the other chains, for each; NaN for a chain alone."""
    return np.array([median_of(np.delete(values, chain)) for chain in range(len(values))])
