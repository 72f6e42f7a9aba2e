"""The checks of `summary`: what each tests, how it reports a failure, and what it advises."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain as joined
from typing import NamedTuple

import numpy as np

from optax_smile import _trace
from optax_smile._trace import chains_with_equal_keys
from optax_smile.diagnostics.paths import Paths
from optax_smile.diagnostics.statistics import ess, log_mean_exp, rhat
from optax_smile.state import MOST_NONFINITE, MOST_RISE, NUM_OF_START

Settings = Mapping[str, object]

# With fewer independent draws, the R-hat within a chain exceeds `HIGH_RHAT` by chance for one value
# in twenty (1.28 at 20 draws, simulated).
LEAST_DRAWS_JUDGED = 20
# Both are reported: the usual bound of Gelman and Rubin, and half of it.
GOOD_RHATS = (1.05, 1.1)
# The quarters of a chain with n independent draws have an R-hat of about 1 + 2 / n, so n is at most
# six above this value. Two chains with it differ by more than a standard deviation.
HIGH_RHAT = 1.3
# Weights of networks drift even if their predictions mix: a random walk has a median of 1.65, as do
# good runs (digits, psmile). A chain with a trend has 2 to 3.1.
HIGH_WEIGHT_RHAT = 2.0
# Differences at fewer inputs may be chance.
MANY_INPUTS = 0.25
# With fewer draws, even independent draws have R-hats above 1.1: 28 % at 20 draws, 8 % at 40, 2 %
# at 60, simulated. Then half of the inputs must have one.
LEAST_DRAWS_SLOW, MANY_INPUTS_OF_FEW_DRAWS = 60, 0.5
# Vehtari et al. 2021 and ArviZ recommend an ESS of 100 for each chain, 50 for each of its halves.
# Chains of networks are many and short, so all chains together must have 100. With an ESS below 50,
# the variance of a single chain is off by a fifth. Both are tested only if there are four times as
# many draws. With fewer, a quarter of the draws must be independent.
LEAST_ESS, LEAST_ESS_OF_CHAIN, DRAWS_PER_ESS = 100, 50, 4
# A chain has diverged if its parameters are this many times as large as expected.
DIVERGENCE_RATIO = 10.0
# A chain is frozen if its steps are smaller than this factor. In healthy chains they differ by
# factors of two or three.
FROZEN_RATIO = 0.1
# If the step size changes more during sampling, the draws do not come from one distribution.
MOST_TREND = 2.0
# Energy errors have heavier tails than the Gamma fit: twice the nominal rate is common.
MOST_REJECTIONS = 3.0
# Fewer rejections do not determine a rate; a lower rate hardly slows the chain.
LEAST_EVENTS, LEAST_REJECTION_RATE = 10, 0.01
# A fall of the loss must exceed this many standard deviations of the noise of batches.
FAR_NOISE = 3.0
# Like `MOST_RISE`, for more parameters than examples; equal to the excess of `cold_temperature`.
# After a larger rise, the average of the draws predicted worse than the start or equally well;
# after a smaller one, mostly equally well or better: `benchmarks/notes/ladder.md`.
MOST_RISE_IF_WIDE = 0.08
# Modes of one posterior rarely differ by more nats per input: targets 26 % less probable.
FAR_BELOW = 0.3
# Two chains may share a draw that is rounded to float16. Copies agree in all draws, or in all from
# one draw on.
MOST_EQUAL = 0.1
# Norms of clipped gradients agree up to rounding. Those of other gradients rarely do.
SAME_NORM, MOST_SAME, LEAST_MOVE = 3e-6, 0.1, 1e-4
# If there are more groups of chains, list only their number.
MOST_GROUPS = 6

# What to try for each kind of finding. `STEP_SIZES` has the words in braces for each sampler.
ADVICE = {
    "copies": "a different start for each chain (`chains_from_weights` with a jitter) and a"
    " different key (`parallel.init(key=...)`). Copies count once in R-hat, ESS and Monte Carlo"
    " error.",
    "equal keys": "`parallel.init(sampler, params, key=...)` in place of `vmap(sampler.init)`,"
    " which gives all chains the same key.",
    "altered": "putting the sampler last in `optax.chain`, and adding its updates to the parameters"
    " unchanged. Nothing may surround the sampler: no clipping, learning rate, weight decay,"
    " projection or average of parameters. Call `init` once, before the loop.",
    "not finite": "checking the data: are all batches finite and not empty, and is the gradient of"
    " the loss finite there? Is the step size never negative? If so, {shorter}, or a start closer"
    " to the mode.",
    "diverged": "{shorter}, or a start closer to the mode. Leave these chains out of the"
    " prediction.",
    "frozen": "{longer}.",
    "still on its way": "a larger num_warmup. If the chains did not start from trained weights,"
    " start there (`warmstart`).",
    "not settled": "a larger num_warmup if predictions drift in one direction; a larger thin, more"
    " draws or {longer} if they go up and down slowly.",
    "slow": "more draws, a larger thin, or {longer}. Scores that are averages over inputs,"
    " such as the LPPD, are as accurate as their Monte Carlo standard error; predictions for single"
    " inputs need more draws.",
    "different modes": "averaging over all chains. Different modes are normal for a network: do not"
    " read R-hat across chains as convergence to one posterior. More chains or `cyclical_sgld` find"
    " more modes.",
    "chains differ": "more draws or a larger thin, if longer chains would agree. Otherwise treat"
    " them as different modes: average over all chains, and do not trust a single one.",
    "worse than the start": "comparing the average of the draws with the start on held-out data:"
    " single draws are worse than their average. If it is worse as well: a lower temperature"
    " (`cold_temperature`), a prior around the start (`local.curvature_precision`), or checkpoints"
    " of an optimizer such as Muon. `select` chooses among these, the"
    " `local.network_candidates`.",
    "rejected steps": "{shorter}, larger batches, or a higher `reject_quantile`, up to 0.9999.",
    "step size": "{steadier}.",
}
STEP_SIZES = {
    "angle_tuner": {
        "shorter": "a smaller `angle_tuner(angle=...)`",
        "longer": "a larger `angle_tuner(angle=...)`",
        "steadier": "a larger num_warmup: `angle_tuner` scales the steps by the gradients, whose"
        " size still changes",
    },
    "quantile_tuner": {
        "shorter": "a smaller step size at the start",
        "longer": "a sampler with `angle_tuner()`, or with `quantile_tuner(adapt_steps=...)` that"
        " ends early",
        "steadier": "`quantile_tuner(adapt_steps=...)` with `adapt_steps` below num_warmup:"
        " otherwise the step size never settles",
    },
    "schedule": {"shorter": "a schedule of smaller steps", "longer": "a schedule of larger steps"},
    "number": {"shorter": "a smaller step size", "longer": "a larger step size"},
    "unknown": {
        "shorter": "shorter steps",
        "longer": "longer steps",
        "steadier": "a larger num_warmup, until the steps have their final length",
    },
}
# Advice for a sampler that could find its own step size.
GIVEN = " The step size was given: leave it out, and the sampler finds one."
# Findings of chains that are slow, and the `change_share` above which larger batches would help.
SLOW, NOISY = ("slow", "not settled", "chains differ"), 0.75
UNDERWAY = (*SLOW, "frozen", "still on its way")
NOISE = (
    " Up to {:.0%} of the mean squared gradient is noise of the batches, so larger batches allow"
    " longer steps."
)


def chooser(settings: Settings) -> str:
    """Return the rule for the step size of a sampler, a key of `STEP_SIZES`."""
    tuner = settings.get("tuner")
    if isinstance(tuner, Mapping) and tuner.get("name") in STEP_SIZES:
        return str(tuner["name"])
    step_size = None if tuner is not None else settings.get("step_size")
    # A function is stored by its name.
    return {str: "schedule", type(None): "unknown"}.get(type(step_size), "number")


def nominal_rate(settings: Settings) -> float:
    """Return the rejected steps per gradient of a perfect fit; NaN without an outlier test."""
    quantile = settings.get("reject_quantile")
    if not isinstance(quantile, float):
        return np.nan
    # A loaded run has no state, so the number of gradients per step comes from its settings.
    return (1 - quantile) / (2 if settings.get("integrator") == "minimal_norm" else 1)


class Check(NamedTuple):
    """A test of the chains and its outcome.

    Attributes:
        kind: name of the test, such as "frozen".
        chains: the chains that fail; if the test passed, the chains that were tested.
        value: the measured number for each of these chains.
        bound: bound on healthy values. Some tests have further conditions, such as that the chain
            does not mix.
        passed: whether nothing looks wrong.
        advice: what to try; empty if the test passed.
        text: a sentence with the numbers.
    """

    kind: str
    chains: tuple[int, ...]
    value: tuple[float, ...]
    bound: float
    passed: bool
    advice: str
    text: str

    @staticmethod
    def of(
        kind: str, value: tuple, bound: float, passed: bool, text: str, advice: str = ""
    ) -> Check:
        """Make a check of all chains; its advice is for a failure."""
        return Check(kind, (), value, bound, passed, "" if passed else advice, text)


class Facts(NamedTuple):
    """Input of the checks; predictions and log densities are `[chain, draw, input]`."""

    paths: Paths
    settings: Settings
    trace: dict[str, np.ndarray]
    values: np.ndarray | None
    density: np.ndarray | None
    copy_of: np.ndarray
    first_step_size: np.ndarray
    rhat_within: np.ndarray

    @property
    def num_draws(self) -> int:
        """Number of draws per chain."""
        return self.paths.norm.shape[1]


class Values(tuple[float, ...]):
    """Numbers that are formatted as their range, such as "0.1 to 0.3"."""

    def __format__(self, form: str) -> str:
        return " to ".join(dict.fromkeys(format(end(self), form) for end in (min, max) if self))


def failing(
    kind: str, fails: np.ndarray, values: np.ndarray, bound: float, text: str, flagged: str = ""
) -> Check:
    """Make a draft of a check from flags, true for chains that fail, and numbers `[chain]`.

    Its `text` has a field for the range of the numbers, such as "{:.0%}". `flagged` says on which
    side of the bound, which fills its field, a chain fails.
    """
    chains = tuple(np.flatnonzero(fails).tolist())
    text += f" (flagged {flagged})." if flagged else ""
    return Check(kind, chains, tuple(values.tolist()), float(bound), not chains, "", text)


def checks(facts: Facts) -> tuple[Check, ...]:
    """Run all tests. A chain that does not converge or move is reported only by its first finding.

    Tests that pass are reported for the chains that have converged and whose numbers are known.
    """
    rhats = np.array([median_of(chain) for chain in facts.rhat_within])
    drafts = [*_copied(facts), *_altered(facts)]
    sick = np.zeros(len(rhats), bool)
    for draft in joined(_nonfinite(facts), _diverged(facts), _frozen(facts, rhats < HIGH_RHAT)):
        drafts.append(_among(draft, ~sick))
        sick[[*draft.chains]] = True
    arrives = ~sick
    # The path of an altered chain says nothing about the sampler.
    own = facts.trace["num_altered"][:, -1] == 0 if "num_altered" in facts.trace else True
    for draft in _unsettled(facts, rhats):
        drafts.append(_among(draft, arrives & own))
        arrives[[*draft.chains]] = False
    drafts += [*_mixing(facts, arrives), *_stepping(facts, sick)]
    completed = (_completed(draft, facts, arrives) for draft in drafts)
    return tuple(check for check in completed if check.chains)


def _among(draft: Check, chosen: np.ndarray) -> Check:
    """Restrict a draft to some chains, of flags `[chain]`."""
    chains = tuple(chain for chain in draft.chains if chosen[chain])
    return draft._replace(chains=chains, passed=not chains)


def _completed(draft: Check, facts: Facts, arrives: np.ndarray) -> Check:
    """Add the advice, and insert the numbers of the chains that fail or were tested."""
    chains, advice = draft.chains, ""
    if draft.passed:
        chains = tuple(np.flatnonzero(np.isfinite(draft.value) & arrives).tolist())
    else:
        chosen_by = chooser(facts.settings)
        advice = ADVICE[draft.kind].format(**STEP_SIZES[chosen_by])
        if draft.kind in UNDERWAY and chosen_by == "number" and "tuner" in facts.settings:
            advice += GIVEN
        if draft.kind in SLOW and "change_share" in facts.trace:
            share = np.median(facts.trace["change_share"][:, -1])
            advice += NOISE.format(min(share, 1)) if share > NOISY else ""
    value = Values(draft.value[chain] for chain in chains)
    text = draft.text.format(value, draft.bound)
    return draft._replace(chains=chains, value=tuple(value), advice=advice, text=text)


def shared_draws(paths: Paths) -> np.ndarray:
    """Count the draws that are equal in two chains, `[chain, chain]`."""
    return np.array([(paths.alike == chain).sum(axis=1) for chain in paths.alike])


def copy_of(paths: Paths) -> np.ndarray:
    """Return the first chain of which each is a copy, `[chain]`; its own number if it is none."""
    return (shared_draws(paths) > MOST_EQUAL * paths.alike.shape[1]).argmax(axis=1)


def _copied(facts: Facts) -> Iterator[Check]:
    """Yield findings of chains with equal draws, and of other chains with equal keys."""
    first, shared = facts.copy_of, shared_draws(facts.paths)
    np.fill_diagonal(shared, 0)
    is_copy = np.bincount(first, minlength=len(first))[first] > 1
    groups = [np.flatnonzero(first == chain).tolist() for chain in np.unique(first[is_copy])]
    text = f"{{:.0f}} of {facts.num_draws} draws equal those of another chain, bit for bit"
    most = MOST_EQUAL * facts.num_draws
    yield failing("copies", is_copy, shared.max(axis=1), most, f"{text}{_listed(groups)}.")
    if "noise_id" in facts.trace:
        noise = facts.trace["noise_id"]
        groups = [x for x in chains_with_equal_keys(noise) if not is_copy[x].all()]
        alike = np.isin(np.arange(len(first)), sum(groups, []))
        number = np.where(alike, float(noise.shape[1]), 0.0)
        text = f"{{:.0f}} of {noise.shape[1]} draws use the random numbers of another chain"
        yield failing("equal keys", alike, number, 0, f"{text}{_listed(groups)}.")


def _listed(groups: list[list[int]]) -> str:
    return f": {' and '.join(map(str, groups))}" if 0 < len(groups) <= MOST_GROUPS else ""


def _altered(facts: Facts) -> Iterator[Check]:
    falls = (np.diff(facts.trace["num_gradients"]) < 0).sum(axis=1)
    text = "the count of gradients started again {:.0f} times: the state was initialized again."
    yield failing("altered", falls > 0, falls.astype(float), 0, text)
    if "num_altered" in facts.trace:
        altered, most = facts.trace["num_altered"][:, -1], facts.trace["num_gradients"][:, -1].max()
        text = f"{{:.0f}} of {most:.0f} updates were changed before they reached the parameters."
        yield failing("altered", altered > 0, altered, 0, text)
    if "gradient_norm" in facts.trace and facts.num_draws >= LEAST_DRAWS_JUDGED:
        norms = facts.trace["gradient_norm"][:, 1 - facts.num_draws :]
        # The norm is zero after rejected calls, and repeats if a chain hardly moves.
        moves = facts.paths.moved > LEAST_MOVE * facts.paths.norm[:, 1:]
        norms = np.sort(np.where((norms > 0) & moves, norms, np.nan), axis=1)
        ends = [np.searchsorted(x, x * (1 + SAME_NORM), "right") for x in norms]
        same = np.where(np.isnan(norms), 0, ends - np.arange(norms.shape[1])).max(axis=1)
        share = same / norms.shape[1]
        text = "the gradients at {:.0%} of the draws have the same norm"
        text += ", as behind a clip"
        yield failing("altered", share > MOST_SAME, share, MOST_SAME, text, "above {:.0%}")


def _nonfinite(facts: Facts) -> Iterator[Check]:
    """Yield findings of non-finite numbers: bad data affect all chains, divergence only some."""
    share = _gain(facts.trace["num_nonfinite"]) / _gain(facts.trace["num_gradients"])
    text = "{:.2%} of the gradients, their losses or their norms are infinite or NaN."
    is_broken = share > MOST_NONFINITE
    of_all = is_broken & is_broken.all()
    yield failing("not finite", of_all, share, MOST_NONFINITE, text)
    yield failing("diverged", is_broken & ~of_all, share, MOST_NONFINITE, text)


def _diverged(facts: Facts) -> Iterator[Check]:
    """Yield findings that a chain has left the region of good parameters."""
    precision, temperature = (facts.settings.get(x) for x in ("prior_precision", "temperature"))
    prior = 0.0
    # From a start near 0 a chain may grow to the norm of a draw from the prior.
    if isinstance(precision, int | float) and isinstance(temperature, int | float) and precision:
        prior = np.sqrt(facts.paths.size * temperature / precision)
    expected = np.maximum(facts.paths.start_norm, prior)
    size = _late(facts.paths.norm) / expected
    # The scale of another prior is unknown.
    if facts.settings.get("log_prior") is None:
        text = "the norm of the parameters is {:.3g} times that of the start,"
        text += " or of a draw from the prior if that is larger"
        far = (expected > 0) & (size > DIVERGENCE_RATIO)
        yield failing("diverged", far, size, DIVERGENCE_RATIO, text, "above {:.3g}")
    if facts.density is not None:
        # Compare averages over a third of the draws: single draws may fail at an input where their
        # average does not. Give impossible targets a finite density.
        third = max(1, facts.density.shape[1] // 3)
        first, last = (
            np.maximum(log_mean_exp(draws, (1,)), np.finfo(np.float32).min)
            for draws in (facts.density[:, :third], facts.density[:, -third:])
        )
        # If likelihoods differ a lot between inputs, a small difference means nothing.
        spread = np.subtract(*np.quantile(last, (0.75, 0.25), axis=1))
        far = max(FAR_BELOW, float(np.median(spread)))
        below, fallen = _middle(_others(last) - last), _middle(first - last)
        # A chain that has closed more than half of the gap is not settled, given enough draws.
        closer = (-fallen > below) & (facts.density.shape[1] >= LEAST_DRAWS_JUDGED)
        for nats, fails, reference in (
            (below, (below > far) & ~closer, "that of the other chains"),
            (fallen, fallen > far, "that of its first draws"),
        ):
            text = f"the log likelihood of most inputs is {{:.3g}} nats below {reference}"
            yield failing("diverged", fails, nats, far, text, "above {:.3g}")


def _frozen(facts: Facts, mixes: np.ndarray) -> Iterator[Check]:
    """Yield findings that a chain moves too little; small steps are harmless if the chain mixes."""
    if facts.num_draws < 2:
        return
    moves, still = facts.paths.moved, (facts.paths.moved == 0).sum(axis=1)
    half = moves.shape[1] / 2
    text = f"{{:.0f}} of {moves.shape[1]} draws equal the draw before"
    yield failing("frozen", still > half, still, half, text, "above half")
    below = facts.trace["below_resolution"].mean(axis=1)
    text = "at {:.0%} of the draws, the step is too short for the precision of the parameters"
    yield failing("frozen", below > 0.5, below, 0.5, text, "above {:.0%}")
    # Use the largest of the last third, since a schedule may be cyclical.
    sizes = facts.trace["step_size"]
    size, last = sizes[:, 2 * sizes.shape[1] // 3 :].max(axis=1), _late(moves)
    for text, share in (
        ("the step size is {:.3g} times the first", size / facts.first_step_size),
        ("the step size is {:.3g} times that of other chains", size / _others(size)),
        ("successive draws are {:.3g} times as far apart as in other chains", last / _others(last)),
    ):
        low = (share < FROZEN_RATIO) & ~mixes
        yield failing("frozen", low, share, FROZEN_RATIO, text, "below {:.3g}")


def _unsettled(facts: Facts, rhats: np.ndarray) -> Iterator[Check]:
    """Yield findings that a chain has not converged."""
    if "on_its_way" in facts.trace:
        share = _trace.late_share(facts.trace["on_its_way"])
        text = "the energy was still falling at {:.0%} of the later records"
        yield failing("still on its way", share > 0.5, share, 0.5, text, "above {:.0%}")
    fall = _fall_of_loss(facts)
    text = "from its first to its second half, the loss fell {:.2g} times as far as chance explains"
    yield failing("still on its way", fall > 1, fall, 1.0, text, "above {:.3g}")
    if facts.num_draws >= LEAST_DRAWS_JUDGED:
        bound = HIGH_WEIGHT_RHAT if facts.values is None else HIGH_RHAT
        text = "the median R-hat of the quarters of the chain is {:.2f}"
        yield failing("not settled", rhats > bound, rhats, bound, text, "above {:.3g}")


def _fall_of_loss(facts: Facts) -> np.ndarray:
    """Compare the mean losses of the halves of a chain; NaN where the numbers are not known.

    The energy of a converged chain of d parameters has the standard deviation sqrt(d / 2). The
    means of its halves differ by less than this, plus three standard deviations of the batch noise.
    """
    losses, size = facts.trace["loss"], facts.trace["num_parameters"][:, -1]
    num_data, half = facts.settings.get("num_data"), losses.shape[1] // 2
    if not isinstance(num_data, (int, float)) or facts.num_draws < LEAST_DRAWS_JUDGED:
        return np.full(len(losses), np.nan)
    noise = np.square(np.diff(losses)).mean(axis=1) / half
    own = size / 2 * (facts.trace["temperature"][:, -1] / num_data) ** 2
    fall = losses[:, :half].mean(axis=1) - losses[:, half:].mean(axis=1)
    return fall / np.sqrt(own + FAR_NOISE**2 * noise)


def _mixing(facts: Facts, arrived: np.ndarray) -> Iterator[Check]:
    """Yield findings that there are few independent draws, or that the chains disagree."""
    if facts.values is None or facts.num_draws < LEAST_DRAWS_JUDGED or not arrived.any():
        return
    bound, is_short = GOOD_RHATS[-1], facts.num_draws < LEAST_DRAWS_SLOW
    most = MANY_INPUTS_OF_FEW_DRAWS if is_short else MANY_INPUTS
    share = np.array([*map(share_above, facts.rhat_within)])
    # Test all chains together: inputs are correlated, so many may be high by chance in one chain.
    is_slow = share_above(facts.rhat_within[arrived]) > most
    few = f"fewer than {2 / (bound - 1):.0f} independent draws"
    text = f"{{:.0%}} of the R-hats within the chain are above {bound}, which corresponds to {few}"
    yield failing("slow", arrived & is_slow & (share > most), share, most, text, "above {:.0%}")
    steady = arrived & (facts.copy_of == np.arange(len(arrived)))
    if not is_slow:
        yield from _few_independent(facts.values, steady)
    if steady.sum() < 2:
        return
    chains, apart = np.flatnonzero(steady), np.full(len(steady), np.nan)
    groups, apart[steady] = _groups(facts.values[steady])
    if len(groups) > 1:
        listed = _listed([chains[x].tolist() for x in groups])
        flagged = f"of the inputs (flagged at {MANY_INPUTS:.0%} or more)"
        inputs = f"{np.nanmin(apart):.0%} or more {flagged}{listed}"
        text = f"{len(groups)} groups of chains predict differently at {inputs}."
        yield failing("different modes", steady, apart, MANY_INPUTS, text)
        return
    text = "a chain and the one closest to it predict differently at {:.0%} of the inputs"
    none = np.zeros_like(steady)
    yield failing("different modes", none, apart, MANY_INPUTS, text, "at {:.0%} or more")
    if not is_slow:
        across = np.full(len(steady), share_above(rhat(facts.values[steady])))
        text = f"{{:.0%}} of the R-hats across these chains are above {bound}"
        differ = steady & (across > most)
        yield failing("chains differ", differ, across, most, text, "above {:.0%}")


def _few_independent(values: np.ndarray, steady: np.ndarray) -> Iterator[Check]:
    """Yield a finding that chains have few independent draws, all together or a single one.

    The ESS is computed for each chain, since chains may be in different modes.
    """
    num_draws = values.shape[1]
    least = min(LEAST_ESS, steady.sum() * num_draws // DRAWS_PER_ESS)
    own = np.full(len(steady), np.nan)
    own[steady] = [median_of(ess(values[[chain]])) for chain in np.flatnonzero(steady)]
    total = np.nansum(own)
    text, slow = f", and {total:.0f} for all chains together", steady & (total < least)
    if total >= least and num_draws >= DRAWS_PER_ESS * LEAST_ESS_OF_CHAIN:
        text, least = "", LEAST_ESS_OF_CHAIN
        slow = steady & (own < least)
    text = f"the ESS of the chain's {num_draws} draws is {{:.0f}}{text}"
    yield failing("slow", slow, own, least, text, "below {:.3g}")


def _stepping(facts: Facts, sick: np.ndarray) -> Iterator[Check]:
    """Yield findings of high losses, many rejections and a step size that changes."""
    if "start_loss" in facts.trace:
        losses, most = facts.trace["loss"][:, -facts.num_draws :], MOST_RISE
        rise = losses.mean(axis=1) - facts.trace["start_loss"][:, -1]
        # The loss at the start is that of a few batches.
        noise = np.diff(losses, axis=1).std(axis=1) if losses.shape[1] > 1 else 0.0
        error = noise / np.sqrt(2 * NUM_OF_START)
        text = "the loss of the draws minus that of the start is {:.3g} nats per example"
        size, num_data = facts.trace["num_parameters"][0, -1], facts.settings.get("num_data")
        if isinstance(num_data, (int, float)) and np.isfinite(size):
            if size * facts.trace["temperature"][:, -1].max() > num_data:
                most = MOST_RISE_IF_WIDE
            text += f", with {size:.0f} parameters and num_data={num_data:g}"
        above = "above {:.3g} plus the standard error of the loss of the start"
        has_risen = (rise > most + error) & ~sick
        yield failing("worse than the start", has_risen, rise, most, text, above)
    rate, nominal = rejection_rate(facts.trace), nominal_rate(facts.settings)
    often = rate > np.maximum(MOST_REJECTIONS * nominal, LEAST_REJECTION_RATE)
    often &= _gain(facts.trace["num_rejected"]) >= LEAST_EVENTS
    text, most = "the rate is {:.3g} times the nominal one of `reject_quantile`", MOST_REJECTIONS
    yield failing("rejected steps", often, rate / nominal, most, text, "above {:.3g}")
    # Without a tuner, the step size follows a schedule that the user chose.
    if chooser(facts.settings) not in ("schedule", "number"):
        trend = step_size_trend(facts.trace["step_size"])
        changed = np.maximum(trend, 1 / trend)
        text = "it changed by a factor of {:.3g} during the draws"
        # A known width refers to coordinates that change with the matrix of `psmile`.
        has_matrix = np.isfinite(facts.trace["width"][:, -1]) if "width" in facts.trace else False
        has_changed = (changed > MOST_TREND) & ~sick & ~has_matrix
        yield failing("step size", has_changed, changed, MOST_TREND, text, "above {:.3g}")


def _groups(values: np.ndarray) -> tuple[list[list[int]], np.ndarray]:
    """Group chains whose averages agree for most values, directly or through other chains.

    Returns:
        The groups, and the share of values for which each chain differs from the closest other
        chain (of another group, if there are several).
    """
    from scipy.sparse.csgraph import connected_components

    centre, variance = values.mean(axis=1), values.var(axis=1)
    # This is (R-hat)^2 - 1 for two long chains.
    excess = (centre[:, None] - centre) ** 2 / (variance[:, None] + variance)
    apart = (excess > HIGH_RHAT**2 - 1).mean(axis=-1)
    number, group = connected_components(apart < MANY_INPUTS)
    groups = [np.flatnonzero(group == x).tolist() for x in range(number)]
    same = group[:, None] == group if number > 1 else np.eye(len(values), dtype=bool)
    return groups, np.where(same, np.inf, apart).min(axis=1)


def share_above(rhats: np.ndarray) -> float:
    """Return the share of known R-hats above the larger of `GOOD_RHATS`; NaN if none is known."""
    known = rhats[~np.isnan(rhats)]
    return float(np.mean(known > GOOD_RHATS[-1])) if known.size else np.nan


def median_of(values: np.ndarray) -> float:
    """Return the median of the known values, NaN if there are none."""
    known = values[~np.isnan(values)]
    return float(np.median(known)) if known.size else np.nan


def _gain(counts: np.ndarray) -> np.ndarray:
    """Return what a cumulative count gained during the draws, `[chain]`."""
    return counts[:, -1] - counts[:, 0]


def rejection_rate(trace: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the rejected steps per gradient among the draws, `[chain]`."""
    return _gain(trace["num_rejected"]) / _gain(trace["num_gradients"])


def step_size_trend(sizes: np.ndarray) -> np.ndarray:
    """Return the median of the last tenth of the step sizes over that of the second, `[chain]`."""
    tenth = max(1, sizes.shape[1] // 10)
    second = sizes[:, tenth : 2 * tenth] if sizes.shape[1] > 1 else sizes
    return np.median(sizes[:, -tenth:], axis=1) / np.median(second, axis=1)


def _late(values: np.ndarray) -> np.ndarray:
    """Return the median over the last third of the draws, `[chain]`."""
    return np.median(values[:, -max(1, values.shape[1] // 3) :], axis=1)


def _others(values: np.ndarray) -> np.ndarray:
    """Return the median over the other chains, for each chain; NaN for a single chain."""
    if len(values) == 1:
        return np.full_like(values, np.nan)
    return np.array([np.median(np.delete(values, c, axis=0), axis=0) for c in range(len(values))])


def _middle(values: np.ndarray) -> np.ndarray:
    """Average the middle half of the inputs `[chain, input]`, so that a few do not decide."""
    quarter = values.shape[1] // 4
    return np.sort(values, axis=1)[:, quarter : values.shape[1] - quarter].mean(axis=1)
