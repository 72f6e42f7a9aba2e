"""The tests of a run, and how it shows if one fails; what to try is in `advice`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain as joined
from typing import Any, NamedTuple

import numpy as np

from optax_smile.diagnostics.advice import advise, has_tuner
from optax_smile.diagnostics.paths import Paths
from optax_smile.diagnostics.results import (
    GOOD_RHATS,
    LEAST_DRAWS_JUDGED,
    Check,
    Summary,
    median_of,
    share_above,
)
from optax_smile.diagnostics.statistics import ess, log_mean_exp, rhat
from optax_smile.state import MOST_NONFINITE, MOST_RISE

# The four quarters of a chain with n independent draws have an R-hat of about 1 + 2 / n: beyond
# this it says no more than six. Two chains with it differ by more than a standard deviation.
HIGH_RHAT = 1.3
# Weights of networks wander while their predictions mix: a random walk has a median of 1.65, as
# have good runs (digits, psmile); a chain that goes somewhere has 2 to 3.1.
HIGH_WEIGHT_RHAT = 2.0
# Differences at single inputs are chance or a matter of taste.
MANY_INPUTS = 0.25
# Of fewer draws independent ones too have R-hats above 1.1: 28 % at 20 draws, 8 % at 40, 2 % at 60,
# simulated.
LEAST_DRAWS_SLOW = 60
# Vehtari et al. 2021 and ArviZ recommend so many for each chain. Chains of networks are many and
# short: here all together must have them, and only where so many draws could have been more.
LEAST_ESS, LEAST_DRAWS_ESS = 100, 400
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
# Two chains may meet in a draw, rounded to float16; copies do so in all of them, or from a draw on.
MOST_EQUAL = 0.1
# More groups of chains are counted, not listed.
MOST_GROUPS = 6


class Run(NamedTuple):
    """What is tested: paths, settings, the trace at the draws, single predictions."""

    paths: Paths
    settings: Mapping[str, Any]
    trace: dict[str, np.ndarray]
    values: np.ndarray | None
    density: np.ndarray | None


class Sign(NamedTuple):
    """A test of all chains.

    Attributes:
        kind: a key of `advice.ADVICE`.
        chains: where something is wrong, booleans `[chain]`.
        values: the number that was tested, `[chain]`.
        bound: of healthy values.
        text: how it shows, with "{}" for the numbers of some chains.
        form: of a number.
    """

    kind: str
    chains: np.ndarray
    values: np.ndarray
    bound: float
    text: str
    form: str = ".3g"


def judge(found: Summary, run: Run) -> list[Check]:
    """Judge each chain; that it does not arrive or move is reported once, by the first sign.

    Tests that pass are reported of the chains that arrive, where these have known numbers.
    """
    rhats = np.array([median_of(chain) for chain in found.rhat_within])
    none = np.zeros(len(rhats), bool)
    stuck = _frozen(found, run, mixes=rhats < HIGH_RHAT)
    lost = [*_once(joined(_nonfinite(run), _diverged(run), stuck))]
    sick = np.any([none, *(sign.chains for sign in lost)], axis=0)
    altered = [*_altered(run)]
    signs = [*_copied(found, run), *altered, *lost]
    arrives, own = ~sick, ~np.any([none, *(sign.chains for sign in altered)], axis=0)
    for sign in (*_on_its_way(run), *_unsettled(found, rhats, run)):
        # Where an altered chain goes is not the sampler's doing.
        signs.append(sign._replace(chains=sign.chains & arrives & own))
        arrives = arrives & ~sign.chains
    signs += _mixing(found, run, arrives)
    if "start_loss" in run.trace:
        signs.append(_risen(found, run, sick))
    if run.trace:
        signs += [_often_rejected(found, run), *_step_size_changed(found, run, sick)]
    last = np.asarray(run.trace.get("change_share", [[np.nan]]), float)[:, -1]
    share = float(np.median(last))
    checks = (_check_of(sign, arrives, run.settings, share) for sign in signs)
    return [check for check in checks if check.chains]


def _check_of(
    sign: Sign, arrives: np.ndarray, settings: Mapping[str, Any], change_share: float
) -> Check:
    passed = not sign.chains.any()
    chains = np.isfinite(sign.values) & arrives if passed else sign.chains
    value = tuple(sign.values[chains].tolist())
    ends = (
        dict.fromkeys(format(end, sign.form) for end in (min(value), max(value))) if value else ""
    )
    return Check(
        kind=sign.kind,
        chains=tuple(np.flatnonzero(chains).tolist()),
        value=value,
        bound=float(sign.bound),
        passed=passed,
        advice="" if passed else advise(sign.kind, settings, change_share),
        text=sign.text.format(" to ".join(ends)),
    )


def _once(signs: Iterator[Sign]) -> Iterator[Sign]:
    """Leave of each chain its first sign."""
    before = np.array(False)
    for sign in signs:
        yield sign._replace(chains=sign.chains & ~before)
        before = before | sign.chains


def _copied(found: Summary, run: Run) -> Iterator[Sign]:
    first = found.copy_of
    groups = [np.flatnonzero(first == chain).tolist() for chain in np.unique(first)]
    groups = [group for group in groups if len(group) > 1]
    shared = shared_draws(run.paths)
    np.fill_diagonal(shared, 0)
    yield Sign(
        "copies",
        np.isin(np.arange(len(first)), sum(groups, [])),
        shared.max(axis=1),
        MOST_EQUAL * found.num_draws,
        f"{{}} of {found.num_draws} draws are those of another chain, bit for bit"
        f"{_listed(groups)}.",
        ".0f",
    )


def shared_draws(paths: Paths) -> np.ndarray:
    """Number of draws that are the same in two chains, `[chain, chain]`."""
    return np.array([(paths.alike == chain).sum(axis=1) for chain in paths.alike])


def copy_of(paths: Paths) -> np.ndarray:
    """The first chain of which each is a copy, `[chain]`; its own number, if of none."""
    return (shared_draws(paths) > MOST_EQUAL * paths.alike.shape[1]).argmax(axis=1)


def _altered(run: Run) -> Iterator[Sign]:
    if "num_altered" in run.trace:
        altered, gradients = (
            np.asarray(run.trace[name], float)[:, -1] for name in ("num_altered", "num_gradients")
        )
        yield Sign(
            "altered",
            altered > 0,
            altered,
            0,
            f"{{}} of {gradients.max():.0f} updates did not arrive at the parameters as the sampler"
            " sent them.",
            ".0f",
        )


def _nonfinite(run: Run) -> Iterator[Sign]:
    """Signs of numbers that are not finite: bad data meet all chains, a chain diverges alone."""
    if run.trace:
        broken, gradients = (
            values[:, -1] - values[:, 0]
            for values in (run.trace["num_nonfinite"], run.trace["num_gradients"])
        )
        text = "{} of the gradients are infinite or NaN."
        share, is_broken = broken / gradients, broken > MOST_NONFINITE * gradients
        of_all = is_broken & is_broken.all()
        yield Sign("not finite", of_all, share, MOST_NONFINITE, text, ".2%")
        yield Sign("diverged", is_broken & ~of_all, share, MOST_NONFINITE, text, ".2%")


def _diverged(run: Run) -> Iterator[Sign]:
    """Signs that a chain has left the region of good parameters."""
    precision, temperature = (run.settings.get(x) for x in ("prior_precision", "temperature"))
    prior = 0.0
    # From a start near 0 a chain may grow to the norm of a draw from the prior.
    if isinstance(precision, int | float) and isinstance(temperature, int | float) and precision:
        prior = np.sqrt(run.paths.size * temperature / precision)
    expected = np.maximum(run.paths.start_norm, prior)
    size = _ends(run.paths.norm)[1] / expected
    text = f"the parameters are {{}} times as large as start or prior make them (above {MUCH:g})."
    # How large another prior lets them be is not known.
    if run.settings.get("log_prior") is None:
        yield Sign("diverged", (expected > 0) & (size > MUCH), size, MUCH, text)
    if run.density is not None:
        # Of what the draws of a third predict together: single draws are far off here and there
        # where their average is not. Impossible targets are far below possible ones.
        third = max(1, run.density.shape[1] // 3)
        first, last = (
            np.maximum(log_mean_exp(draws, (1,)), np.finfo(np.float32).min)
            for draws in (run.density[:, :third], run.density[:, -third:])
        )
        # Where likelihoods differ a lot from input to input, less is no news.
        spread = np.subtract(*np.quantile(last, (0.75, 0.25), axis=1))
        far = max(FAR_BELOW, float(np.median(spread)))
        text = f"the log likelihood of most inputs is {{}} nats below {{}} (above {far:.3g})."
        below, fallen = _middle(_others(last) - last), _middle(first - last)
        # A chain that has come closer by more than what is left is not settled, which takes so many
        # draws to tell.
        closer = (-fallen > below) & (run.density.shape[1] >= LEAST_DRAWS_JUDGED)
        of_others, at_first = "the other chains'", "where it was at first"
        is_below = (below > far) & ~closer
        yield Sign("diverged", is_below, below, far, text.format("{}", of_others))
        yield Sign("diverged", fallen > far, fallen, far, text.format("{}", at_first))


def _frozen(found: Summary, run: Run, mixes: np.ndarray) -> Iterator[Sign]:
    """Signs that a chain moves too little; small steps are no harm if it mixes all the same."""
    if found.num_draws < 2:
        return
    moves, still = run.paths.moved, (run.paths.moved == 0).sum(axis=1)
    half = moves.shape[1] / 2
    text = f"{{}} of {moves.shape[1]} draws are the same as the draw before."
    yield Sign("frozen", still > half, still, half, text, ".0f")
    if run.trace:
        below = np.mean(run.trace["below_resolution"], axis=1)
        text = "the steps of {} of the draws are too short for the precision of the parameters."
        yield Sign("frozen", below > 0.5, below, 0.5, text, ".0%")
        # The largest of the last third, for a schedule that goes in cycles.
        sizes = np.asarray(run.trace["step_size"], float)
        size = sizes[:, 2 * sizes.shape[1] // 3 :].max(axis=1)
        for before, than in ((found.first_step_size, "first"), (_others(size), "other chains'")):
            share = size / before
            text = f"the step size is {{}} of the {than} (below {1 / MUCH:g})."
            yield Sign("frozen", (share < 1 / MUCH) & ~mixes, share, 1 / MUCH, text)
    last = _ends(moves)[1]
    share = last / _others(last)
    text = f"draws are {{}} times as far apart as in the other chains (below {1 / MUCH:g})."
    yield Sign("frozen", (share < 1 / MUCH) & ~mixes, share, 1 / MUCH, text)


def _on_its_way(run: Run) -> Iterator[Sign]:
    if "on_its_way" in run.trace:
        falls = np.asarray(run.trace["on_its_way"], float)
        share = falls[:, -max(1, falls.shape[1] // 3) :].mean(axis=1)
        text = "the energy was still falling at {} of the last draws."
        yield Sign("still on its way", share > 0.5, share, 0.5, text, ".0%")


def _unsettled(found: Summary, rhats: np.ndarray, run: Run) -> Iterator[Sign]:
    if found.num_draws >= LEAST_DRAWS_JUDGED:
        bound = HIGH_WEIGHT_RHAT if run.values is None else HIGH_RHAT
        text = (
            "the draws at the beginning and those at the end have a median R-hat of {}"
            f" (above {bound:g})."
        )
        yield Sign("not settled", rhats > bound, rhats, bound, text, ".2f")


def _mixing(found: Summary, run: Run, arrived: np.ndarray) -> Iterator[Sign]:
    """Signs that there are few independent draws, or that chains do not agree."""
    if run.values is None or found.num_draws < LEAST_DRAWS_JUDGED or not arrived.any():
        return
    bound, least = GOOD_RHATS[-1], found.num_draws >= LEAST_DRAWS_SLOW
    share = np.array([share_above(chain) for chain in found.rhat_within])
    # All chains together: in a single one many inputs may go wrong by one and the same chance.
    is_slow = least and share_above(found.rhat_within[arrived]) > MANY_INPUTS
    text = (
        f"{{}} of the R-hats within the chain are above {bound}, as of fewer than"
        f" {2 / (bound - 1):.0f} independent draws (above {MANY_INPUTS:.0%})."
    )
    if least:
        slow = arrived & is_slow & (share > MANY_INPUTS)
        yield Sign("slow", slow, share, MANY_INPUTS, text, ".0%")
    if not is_slow:
        yield from _few_independent(found, run.values, arrived)
    steady = arrived & (found.copy_of == np.arange(len(arrived)))
    if steady.sum() < 2:
        return
    chains = np.flatnonzero(steady)
    groups, nearest = _groups(run.values[steady])
    apart = np.full(len(steady), np.nan)
    apart[steady] = nearest
    if len(groups) > 1:
        text = (
            f"{len(groups)} groups of chains predict differently at {nearest.min():.0%} of the"
            f" inputs, or more (from {MANY_INPUTS:.0%} on)"
            f"{_listed([chains[x].tolist() for x in groups])}."
        )
        yield Sign("different modes", steady, apart, MANY_INPUTS, text)
        return
    text = (
        "a chain and the one most like it predict differently at {} of the inputs"
        f" (from {MANY_INPUTS:.0%} on)."
    )
    yield Sign("different modes", np.zeros_like(steady), apart, MANY_INPUTS, text, ".0%")
    if least and not is_slow:
        across = np.full(len(steady), share_above(rhat(run.values[steady])))
        differ = steady & (across > MANY_INPUTS)
        text = (
            f"{{}} of the R-hats across these chains are above {bound} (above {MANY_INPUTS:.0%})."
        )
        yield Sign("chains differ", differ, across, MANY_INPUTS, text, ".0%")


def _few_independent(found: Summary, values: np.ndarray, arrived: np.ndarray) -> Iterator[Sign]:
    """Sign that chains, each by itself since modes may differ, have few independent draws."""
    counted = arrived & (found.copy_of == np.arange(len(arrived)))
    if counted.sum() * found.num_draws < LEAST_DRAWS_ESS:
        return
    own = np.full(len(arrived), np.nan)
    own[counted] = [median_of(ess(values[[chain]])) for chain in np.flatnonzero(counted)]
    total = np.nansum(own)
    text = (
        f"{{}} of the {found.num_draws} draws count as independent, in all chains together"
        f" {total:.0f} (below {LEAST_ESS}, which ArviZ recommends for each chain)."
    )
    yield Sign("slow", counted & (total < LEAST_ESS), own, LEAST_ESS, text, ".0f")


def _risen(found: Summary, run: Run, sick: np.ndarray) -> Sign:
    losses, start = (np.asarray(run.trace[name], float) for name in ("loss", "start_loss"))
    losses = losses[:, -found.num_draws :]
    with np.errstate(invalid="ignore"):
        rise = losses.mean(axis=1) - start[:, -1]
        # The start was judged by one batch: how far it may be off, as a standard deviation.
        noise = np.diff(losses, axis=1).std(axis=1) / np.sqrt(2) if losses.shape[1] > 1 else 0.0
    text = (
        "the loss of the draws is {} nats per example above that of the start (above"
        f" {MOST_RISE:g}, and what batches differ by)."
    )
    has_risen = (rise > MOST_RISE + noise) & ~sick
    return Sign("worse than the start", has_risen, rise, MOST_RISE, text)


def _listed(groups: list[list[int]]) -> str:
    return f": {' and '.join(map(str, groups))}" if 0 < len(groups) <= MOST_GROUPS else ""


def _often_rejected(found: Summary, run: Run) -> Sign:
    events = np.asarray(run.trace["num_rejected"], float)
    most = np.maximum(MOST_REJECTIONS * found.nominal_rate, LEAST_REJECTION_RATE)
    return Sign(
        "rejected steps",
        (found.rejection_rate > most) & (events[:, -1] - events[:, 0] >= LEAST_EVENTS),
        found.rejection_rate / found.nominal_rate,
        MOST_REJECTIONS,
        f"{{}} times as many as `reject_quantile` means (above {MOST_REJECTIONS:g}).",
    )


def _step_size_changed(found: Summary, run: Run, sick: np.ndarray) -> Iterator[Sign]:
    # Without a tuner the step size follows a schedule that was asked for.
    if not run.settings or has_tuner(run.settings):
        changed = np.maximum(found.step_size_trend, 1 / found.step_size_trend)
        text = f"it changed {{}}-fold among the draws (above {MOST_TREND:g})."
        yield Sign("step size", (changed > MOST_TREND) & ~sick, changed, MOST_TREND, text)


def _groups(values: np.ndarray) -> tuple[list[list[int]], np.ndarray]:
    """Join chains of which a series of pairs agrees, in the averages of most values.

    Returns:
        The groups, and the share of values at which each chain differs from the one most like it:
        of another group, if there are several.
    """
    centre, variance = values.mean(axis=1), values.var(axis=1)
    groups: list[list[int]] = []
    apart = np.zeros((len(values), len(values)))
    for chain in range(len(values)):
        # (R-hat)^2 - 1 of two long chains.
        excess = (centre - centre[chain]) ** 2 / (variance + variance[chain])
        apart[chain] = (excess > HIGH_RHAT**2 - 1).mean(axis=1)
        agrees = apart[chain] < MANY_INPUTS
        joined = [group for group in groups if agrees[group].any()]
        groups = [group for group in groups if group not in joined]
        groups.append(sorted([chain, *(other for group in joined for other in group)]))
    of = np.array([[chain in group for chain in range(len(values))] for group in groups])
    same = of.T @ of if len(groups) > 1 else np.eye(len(values), dtype=bool)
    return sorted(groups), np.where(same, np.inf, apart).min(axis=1)


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
    if len(values) == 1:
        return np.full_like(values, np.nan)
    return np.array([np.median(np.delete(values, c, axis=0), axis=0) for c in range(len(values))])


def _middle(values: np.ndarray) -> np.ndarray:
    """Average of the middle half of the inputs `[chain, input]`: a few of them decide nothing."""
    quarter = values.shape[1] // 4
    return np.sort(values, axis=1)[:, quarter : values.shape[1] - quarter].mean(axis=1)
