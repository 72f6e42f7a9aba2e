"""Statistics against textbook formulas, and checks of chains that are broken on purpose.

What runs of real samplers give is in `docs/findings.py`, which `test_what_to_trust.py` runs.
"""

import functools
import re
import sys
from collections import OrderedDict
from statistics import NormalDist
from typing import Any

import arviz
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import refused

import optax_smile
from optax_smile import Snapshots, diagnostics

RNG = np.random.default_rng


def autoregressive(shape, rho=0.5, seed=0):
    """Chains `[chain, draw, ...]` with the autocorrelation rho^lag and unit variance."""
    noise = RNG(seed).normal(size=shape)
    for draw in range(1, shape[1]):
        noise[:, draw] = rho * noise[:, draw - 1] + np.sqrt(1 - rho**2) * noise[:, draw]
    return noise


def textbook_rhat(x):
    """Equations 1 to 4 and 14 of Vehtari et al. 2021 for `[chain, draw]`, ranks by counting."""

    def of_scores(x):
        flat, (_, n) = x.ravel(), x.shape
        ranks = [np.sum(flat < one) + (np.sum(flat == one) + 1) / 2 for one in flat]
        parts = [(rank - 3 / 8) / (flat.size + 1 / 4) for rank in ranks]
        scores = np.reshape([NormalDist().inv_cdf(part) for part in parts], x.shape)
        within = np.mean(np.var(scores, axis=1, ddof=1))
        between = np.var(scores.mean(axis=1), ddof=1)
        return np.sqrt((n - 1) / n + between / within)

    return max(of_scores(x), of_scores(np.abs(x - np.median(x))))


def predicted(mean, density, whole=None):
    """A prediction with the outcome of each draw."""
    each = optax_smile.Outcome(mean, None, None, density)
    return optax_smile.Prediction(None, whole, each=each)


def judged(values: Any = None, density: Any = None, params: Any = None, **given):
    """Summary of chains with predictions `[chain, draw, input]`."""
    density = np.zeros(values.shape) if density is None else density
    draws = Snapshots(values if params is None else params)
    return diagnostics.summary(draws, predicted(values, density), **given)


def test_rhats_are_the_textbooks():
    for shape in (2, 9), (3, 8), (4, 50):
        values, half = autoregressive((*shape, 3)), shape[1] // 2
        values[0] += 0.7
        values[1, :, :2] += np.linspace(0, 15, shape[1])[:, None]
        found, late = judged(values), values[:, shape[1] % 2 :]
        split = np.concatenate([values[:, :half], values[:, -half:]])
        expected = [textbook_rhat(split[:, :, i]) for i in range(3)]
        np.testing.assert_allclose(found.rhat_across, expected, rtol=1e-9)
        # Within: the quarters of one chain.
        halves, quarter = late.reshape(shape[0], 2, half, 3), half // 2
        chains = [np.concatenate([x[:, :quarter], x[:, -quarter:]]) for x in halves]
        expected = [[textbook_rhat(x[..., i]) for i in range(3)] for x in chains]
        np.testing.assert_allclose(found.rhat_within, expected, rtol=1e-9)
    assert found.rhat_within[1, :2].min() > 1.9 > 1.6 > found.rhat_within[[0, 2, 3]].max()


def test_ess_is_that_of_an_autoregression():
    for rho in 0.5, 0.9:
        values = autoregressive((4, 4_000, 1), rho)
        np.testing.assert_allclose(judged(values).ess, 16_000 * (1 - rho) / (1 + rho), rtol=0.15)
    # Values that do not move have neither ESS nor R-hat.
    values = autoregressive((2, 40, 3))
    values[..., 1] = values[0, :, 2] = 7.0
    found = judged(values)
    for figures in found.rhat_across, found.ess:
        assert np.isnan(figures).tolist() == [False, True, False]
    assert np.isnan(found.rhat_within).tolist() == [[False, True, True], [False, True, False]]
    # If none has one, NumPy would warn about an average of nothing.
    shown = str(diagnostics.summary(Snapshots(np.ones((2, 40, 3)))))
    assert "within chains all unknown" in shown and "frozen" in shown
    # NaN would be an ESS of its own.
    values[1, 3, 0] = np.nan
    params, rule = np.zeros((2, 40, 3)), r"...\)` must be without NaN"
    refused(r"`summary\(prediction=" + rule, judged, values, params=params)
    refused(r"`summary\(snapshots=" + rule, diagnostics.summary, Snapshots(values))


def test_mcse_is_the_spread_of_the_lppd_over_replications():
    """Spread of 400 LPPDs, known to 3.5 %; the estimates vary little around their average."""
    x = RNG(1).normal(size=30)
    slopes = [RNG(i + 10).normal(1, 0.5, size=(2, 50, 1)) for i in range(400)]
    densities = [-((slope * x - 2 * x) ** 2) / 2 for slope in slopes]
    lppds = [np.mean(np.log(np.mean(np.exp(x), axis=(0, 1)))) for x in densities]

    def error(density):
        params = RNG(0).normal(size=(*density.shape[:2], 2))
        return judged(density=density, params=params, max_inputs=1).mcse

    errors = [error(x) for x in densities[:20]]
    np.testing.assert_allclose(np.mean(errors), np.std(lppds), rtol=0.15)
    independent = error(autoregressive((4, 500, 20), 0.0))
    shared = np.repeat(autoregressive((4, 500, 1), 0.95), 20, axis=2)
    # One value in place of 20, (1 + rho) / (1 - rho) = 39 draws in place of one.
    assert 0.5 < error(shared) / independent / np.sqrt(20 * 39) < 1.6
    impossible = np.zeros((2, 50, 3))
    assert error(impossible) == 0
    impossible[0, 0, 0] = -np.inf
    assert np.isfinite(error(impossible))
    assert np.isnan(error(impossible - np.array([0, 0, np.inf])))


def test_r_hat_of_weights_is_of_those_that_move():
    moving = autoregressive((2, 40, 5)) + np.array([0, 9])[:, None, None]
    params = {"a": np.zeros((2, 40, 7)), "b": moving, "c": np.zeros((2, 40))}
    got = diagnostics.summary(Snapshots(params)).rhat_within
    np.testing.assert_allclose(np.sort(got), np.sort(judged(moving).rhat_within))
    assert got.max() < 1.5
    some = diagnostics.summary(Snapshots(params), max_inputs=2, seed=1).rhat_within
    assert some.shape == (2, 2) and np.isin(some, got).all()


def test_figures_of_a_trace_count_from_the_first_draw():
    rejections = np.concatenate([np.arange(40) * 5, 195 + np.arange(61)[1:]])[None]
    whole = {"num_gradients": 10 * np.arange(1, 101)[None], "num_rejected": rejections}
    sizes = np.geomspace(1, 0.01, 100)[None]
    whole |= {"step_size": sizes, "is_draw": np.ones((1, 100), bool)}

    def found(num_draws, trace=whole):
        return diagnostics.summary(Snapshots(np.zeros((1, num_draws, 2)), trace))

    assert found(100).rejection_rate[0] == pytest.approx((195 + 60) / 990)
    assert found(60).rejection_rate[0] == pytest.approx(0.1)
    assert np.isnan(found(1).rejection_rate).all() and found(1).step_size_trend.tolist() == [1.0]
    refused(r"`Snapshots\(num_draws=...\)` must be at most \d+, ", found, 1000)
    # Ticks that are no samples hold no draws.
    explores = whole | {"is_draw": np.arange(100)[None] < 98}
    assert found(60, explores).rejection_rate[0] == pytest.approx((5 + 58) / 590)
    # The trend of the step size compares tenths.
    trend = np.median(sizes[0, 90:]) / np.median(sizes[0, 10:20])
    assert found(100).step_size_trend[0] == pytest.approx(trend)


def kinds(found):
    """What was found, and in which chains."""
    return {(check.kind, check.chains) for check in found.findings}


ALL = (0, 1, 2, 3)


def test_chains_with_few_independent_draws_are_slow():
    """Of n draws n (1 - r) / (1 + r) are independent: 42 or 431 of 800, about 11 of 100."""
    for shape, correlation, is_slow, seed in (
        ((1, 800, 3), 0.9, True, 0),
        ((1, 800, 3), 0.3, False, 0),
        ((4, 25, 3), 0.8, True, 2),
        ((2, 50, 3), 0.8, True, 2),
        ((4, 25, 3), 0.0, False, 2),
        ((2, 50, 3), 0.0, False, 2),
        # By the R-hats alone, and by the ESS alone.
        ((2, 59, 3), 0.7, True, 0),
        ((2, 59, 3), 0.7, True, 3),
    ):
        found = judged(autoregressive(shape, correlation, seed))
        is_found = "slow" in {check.kind for check in found.findings}
        assert is_found == bool(found.findings) == is_slow
        assert ("Nothing looks wrong" in str(found)) != is_slow
        together = "all chains together (flagged below 100)" in str(found)
        assert together == is_slow or shape[1] < 800
    # Whatever the others have: 30 of 400 in the last chain, 215 in the others.
    paths = autoregressive((4, 400, 3), 0.3)
    paths[3] = autoregressive((1, 400, 3), 0.86, seed=1)[0]
    found = judged(paths)
    assert kinds(found) == {("slow", (3,))} and "(flagged below 50)" in found.findings[0].text


NUM_DRAWS, NUM_INPUTS = 100, 10
ANY, LAST, LATE, MOST = (slice(x, None) for x in (0, -40, 80, 20))
COUNT = np.arange(NUM_DRAWS)
RISES = 0.1 * COUNT[:, None]


def made(**changes):
    """Four healthy chains in all that `summary` looks at, and what is changed in them."""
    shape = 4, NUM_DRAWS
    parts: dict[str, Any] = {
        "params": 3 + autoregressive((*shape, 5), 0.2),
        "mean": autoregressive((*shape, NUM_INPUTS), 0.2, seed=1),
        "density": -1 + 0.3 * autoregressive((*shape, NUM_INPUTS), 0.2, seed=2),
        "settings": {"name": "smile", "reject_quantile": 0.98, "tuner": "some tuner"},
        "start": np.full((4, 5), 3.0),
        "step_size": np.ones(shape),
        "energy_change": RNG(3).gamma(2, 1, shape),
        "num_gradients": np.tile(10 * np.arange(1, NUM_DRAWS + 1), (4, 1)),
        **dict.fromkeys(("num_rejected", "num_nonfinite", "num_altered"), np.zeros(shape, int)),
        **dict.fromkeys(("below_resolution", "on_its_way"), np.zeros(shape, bool)),
        "is_draw": np.ones(shape, bool),
        "gradient_norm": RNG(4).gamma(9, 1, shape),
        "loss": np.full(shape, 0.5),
        "start_loss": np.full(shape, 0.2),
    }
    for name, change in changes.items():
        parts[name] = change(np.array(parts[name])) if callable(change) else change
    names = ("params", "mean", "density", "settings", "start")
    params, mean, density, settings, origin = map(parts.pop, names)
    return Snapshots(params, parts, settings, origin), predicted(mean, density)


def changed(chains, draws, values):
    """Put values, or what a function makes of the array, into some draws of some chains."""

    def change(array):
        where = np.ix_(chains, np.arange(NUM_DRAWS)[draws])
        array[where] = values(array) if callable(values) else values
        return array

    return change


def outliers(array):
    """Single draws fail badly at a few inputs each, which their averages do not."""
    array[1, LAST] -= 60 * (RNG(0).random((40, NUM_INPUTS)) < 0.1)
    return array


def shifted(chains, by):
    """Add numbers to all draws and inputs of some chains."""
    return changed(chains, ANY, lambda x: x[list(chains)] + by)


def copy(of, to, draws=ANY):
    return changed([to], draws, lambda x: x[[of]][:, draws])


SLOW = autoregressive((4, NUM_DRAWS, NUM_INPUTS), 0.8)
NATS = r"of most inputs is (1\.9\d|2|2\.0\d)( to .*)? nats below"
FAR = {"params": changed([1, 2], ANY, lambda x: 40 * x[1:3]), "start": np.ones((4, 5))}
NARROW = {"params": changed([0], ANY, lambda x: 3 + (x[0] - 3) / 100)}
NARROW |= {"mean": changed([0], ANY, RISES)}
SOME = {"mean": shifted([0, 2], 9 * (np.arange(NUM_INPUTS) < 4))}
SHORT = {"step_size": changed([0], LAST, 0.02), "mean": changed([0], LAST, 9)}
SICK: dict[str, tuple[dict[str, Any], tuple[int, ...], str]] = {
    "copies": ({"params": copy(1, 3)}, (1, 3), r"100 of 100 draws equal those .*: \[1, 3\]"),
    "copies, in the end": ({"params": copy(0, 3, LAST)}, (0, 3), "40 of 100 draws equal those"),
    "altered": ({"num_altered": changed([0, 2], LAST, [[7], [9]])}, (0, 2), "7 to 9 of 1000 up"),
    "altered, by another init": (
        {"num_gradients": np.tile(10 * (COUNT % 25) + 10, (4, 1))},
        ALL,
        "started again 3 times: the state was initialized again",
    ),
    "altered, before the sampler": (
        {"gradient_norm": changed([1], LAST, lambda x: 2 + 0 * x[1:2, LAST])},
        (1,),
        r"at 40% of the draws .* same norm, as behind a clip \(flagged above 10%\)",
    ),
    "diverged": ({"num_nonfinite": changed([1], ANY, 2 * COUNT)}, (1,), r"20\.00% of the grad"),
    "not finite": ({"num_nonfinite": changed(ALL, ANY, 2 * COUNT)}, ALL, r"20\.00% of the grad"),
    "diverged, far away": (FAR, (1, 2), r"1\d\d to 1\d\d times that of .* \(flagged above 10\)"),
    "diverged, of all": ({"density": shifted([2], -2)}, (2,), NATS + r" that of the .*above 0.3\)"),
    "diverged, by and by": ({"density": shifted(ALL, -0.3 * RISES)}, ALL, NATS + " that of its "),
    "frozen": ({"params": changed([2], slice(30, None), 2.0)}, (2,), "69 of 99 draws equal"),
    "frozen, in bits": ({"below_resolution": changed([3], MOST, True)}, (3,), "at 80% of the"),
    "frozen, by its step size": (SHORT, (0,), r"is 0.02 times the first .*below 0.1\)"),
    "frozen, by its draws": (NARROW, (0,), r"draws are 0\.01\d+ times as far apart"),
    "still on its way": ({"on_its_way": changed([1], LATE, True)}, (1,), "at 61% of the later rec"),
    "not settled": ({"mean": shifted([2], RISES)}, (2,), r"quarters .* \d\.\d\d .*above 1.3"),
    "slow": ({"mean": SLOW}, ALL, r"\d\d% to \d\d% of the R-hats within the chain are above 1.1"),
    "different modes": ({"mean": shifted([1], 9)}, ALL, r"at 100% .*: \[0, 2, 3\] and \[1\]"),
    "different modes, of some": (SOME, ALL, r"2 g.* at 40% .*: \[0, 2\] and \[1, 3\]"),
    "chains differ": ({"mean": shifted([1, 3], 0.9)}, ALL, r"\d+% of .* across .* above 1.1"),
    "worse than the start": ({"loss": changed([1, 3], ANY, 2.2)}, (1, 3), r"2 nats .*ged above 1 "),
    "rejected steps": ({"num_rejected": changed([0], ANY, COUNT)}, (0,), r"5 times .* above 3\)"),
    "step size": ({"step_size": changed([1], LAST, 3)}, (1,), r"a factor of 3 during .* above 2\)"),
}
# Of these the healthy values are above the bound.
BELOW = {"frozen, by its step size", "frozen, by its draws"}


@pytest.mark.parametrize("name", SICK)
def test_a_sick_run_has_its_finding_alone_with_its_numbers(name):
    changes, chains, message = SICK[name]
    found = diagnostics.summary(*made(**changes))
    kind = name.partition(",")[0]
    assert kinds(found) == {(kind, chains)}
    check = found.findings[0]
    assert re.search(message, check.text), check.text
    assert check in found.checks and check.advice and len(check.value) == len(chains)
    assert all((x < check.bound) == (name in BELOW) and x != check.bound for x in check.value)
    named = "All 4 chains" if chains == ALL else f"Chain{'s' * (len(chains) > 1)} {chains[0]}"
    assert re.search(rf"(?m)^{named}.*: {kind}: .*\n  Try: ", str(found))


def test_summary_holds_the_figures_of_the_run():
    sizes = np.geomspace(1, 1.5, NUM_DRAWS) * np.arange(1, 5)[:, None]
    rejected, broken = (np.arange(4)[:, None] * COUNT // part for part in (9, 40))
    draws, prediction = made(step_size=sizes, num_rejected=rejected, num_nonfinite=broken)
    whole = diagnostics.summary(draws, prediction)
    found = diagnostics.summary(draws, prediction, max_inputs=5, seed=1)
    assert found.rhat_within.shape == (4, 5) and found.rhat_across.shape == found.ess.shape == (5,)
    for name in "rhat_across", "ess", "rhat_within":
        some, everything = (np.atleast_2d(getattr(x, name))[-1] for x in (found, whole))
        assert np.isclose(some[:, None], everything).any(axis=1).all()
    chances = np.exp(prediction.each.log_density)
    for name, expected in {
        "lppd": np.log(chances.mean(axis=(0, 1))).mean(),
        "chain_lppd": np.log(chances.mean(axis=1)).mean(axis=1),
        "rejection_rate": (rejected[:, -1] - rejected[:, 0]) / 990,
        "first_step_size": sizes[:, 0],
        "last_step_size": sizes[:, -1],
        "num_nonfinite": broken[:, -1],
    }.items():
        np.testing.assert_allclose(getattr(found, name), expected)
    rows = str(found).splitlines()
    assert len({len(row) for row in rows[:6]}) == 1 and rows[5].split()[0] == "all"
    cells = rows[3].split()
    ratio = found.rejection_rate[2] / found.nominal_rate
    assert cells[4:6] == [f"{found.step_size_trend[2]:.2f}", f"{ratio:.2g}"]
    assert cells[-2:] == [f"{np.median(found.rhat_within[2]):.2f}", f"{found.chain_lppd[2]:.5g}"]
    assert f"{np.mean(found.rhat_across < 1.05):.0%} below 1.05" in str(found)


def test_healthy_chains_pass_every_test_with_their_numbers():
    draws, prediction = made()
    found, alone = diagnostics.summary(draws, prediction), diagnostics.summary(draws)
    assert found.findings == () and all(check.passed for check in found.checks)
    by_kind = {check.kind: check for check in found.checks}
    assert set(by_kind) == {name.partition(",")[0] for name in SICK}
    for check in found.checks:
        assert (check.chains, check.advice) == (ALL, "")
        assert len(check.value) == 4 and np.isfinite(check.value).all()
    text = "0 of 100 draws equal those of another chain, bit for bit."
    assert by_kind["copies"] == ("copies", ALL, (0.0,) * 4, 10.0, True, "", text)
    assert by_kind["step size"][2:5] == ((1.0,) * 4, 2.0, True)
    text = "it changed by a factor of 1 during the draws (flagged above 2)."
    assert by_kind["step size"].text == text
    assert by_kind["worse than the start"].value == pytest.approx((0.3,) * 4)
    assert alone.findings == ()
    assert {"slow", "chains differ", "different modes"}.isdisjoint(x.kind for x in alone.checks)


def test_tests_that_pass_are_of_chains_that_arrive():
    """Chain 1 has diverged and is not reported again, though its step size has changed."""
    found = diagnostics.summary(*made(**SICK["diverged"][0], step_size=changed([1], LAST, 3)))
    assert kinds(found) == {("diverged", (1,))}
    (steps,) = [check for check in found.checks if check.kind == "step size"]
    assert steps.passed and steps.chains == (0, 2, 3) and steps.value == (1.0,) * 3
    found = diagnostics.summary(*made(num_nonfinite=changed(ALL, ANY, 2 * COUNT)))
    assert found.checks == found.findings


WALK = np.cumsum(RNG(0).normal(size=(4, NUM_DRAWS, NUM_INPUTS)), axis=1)
DRIFT = 0.01 * WALK + 0.2 * RISES
FALLS, CYCLES = (np.tile(np.geomspace(1, 0.01, n), (4, NUM_DRAWS // n)) for n in (NUM_DRAWS, 20))
OUTPUTS = [made(**x)[1].each.mean for x in ({"mean": lambda x: 0.1 * x}, {"mean": shifted([1], 9)})]
AROUND: dict[str, Any] = {"start": np.ones((4, NUM_INPUTS)), "settings": None}
# What is found where only this changes: of weights alone, or of predictions too.
FOUND: dict[str, tuple[dict[str, Any], set]] = {
    # The loss at the start is that of one batch.
    "a loss of 60 in a tenth": ({"loss": changed(ALL, slice(None, None, 10), 60.0)}, set()),
    "a few inputs": ({"density": shifted([1], -60.0 * (np.arange(NUM_INPUTS) == 7))}, set()),
    # On UCI energy the best chain was called diverged for the mean over its draws.
    "single draws that fail": ({"density": outliers}, set()),
    "a chain that comes closer": ({"density": shifted([1], RISES / 2 - 5)}, set()),
    "a far one": ({"density": shifted([1], RISES / 2 - 14)}, {("diverged", (1,))}),
    # 2 % are nominal, of 10 gradients per draw; three times as many are common.
    "rejections": ({"num_rejected": np.tile(np.floor(0.4 * COUNT), (4, 1))}, set()),
    "more": ({"num_rejected": np.tile(np.floor(0.8 * COUNT), (4, 1))}, {("rejected steps", ALL)}),
    "small steps that mix": ({"step_size": FALLS}, {("step size", ALL)}),
    "steps of a matrix": ({"step_size": FALLS, "width": np.ones((4, 100))}, set()),
    "small steps": ({"step_size": FALLS, "mean": 0.1 * WALK}, {("frozen", ALL)}),
    "what wanders": ({"step_size": CYCLES, "mean": WALK}, {("not settled", ALL)}),
    "outputs": ({"mean": np.stack(OUTPUTS, axis=-1)}, {("different modes", ALL)}),
    "others": ({"mean": np.stack(OUTPUTS[::-1], axis=-1)}, {("different modes", ALL)}),
    "weights of different modes": ({"params": shifted([1, 3], 2)}, set()),
    "weights of one norm": ({"params": lambda x: np.concatenate([x[:3], -x[1:2]])}, set()),
    "weights that wander": ({"params": 0.1 * WALK, **AROUND}, set()),
    "weights with a trend": ({"params": DRIFT, **AROUND}, {("not settled", ALL)}),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_is_a_finding_and_what_is_none(name):
    changes, expected = FOUND[name]
    draws, prediction = made(**changes)
    found = diagnostics.summary(draws, None if "weights" in name else prediction)
    assert kinds(found) == expected


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
def test_confidence_is_compared_with_accuracy(likelihood):
    """Outputs that are those of the data times a number are too cautious below 1."""
    rng, outputs = RNG(0), lambda w, x: w * x
    logits = rng.normal(scale=2, size=(2_000, 3)).astype("float32")
    if likelihood == "categorical":
        targets = np.argmax(logits + rng.gumbel(size=logits.shape), axis=1)
    else:
        logits = logits[:, 0]
        targets = (logits + rng.logistic(size=2_000) > 0).astype(int)
    given: dict[str, Any] = {"likelihood": likelihood, "targets": targets, "per": "draw"}
    for sharpness in (0.5, 1.0, 2.0):
        draws = Snapshots(sharpness + 0.01 * rng.normal(size=(2, 10)))
        prediction = optax_smile.predict(outputs, draws, logits, **given)
        found, chances = diagnostics.summary(draws, prediction), np.asarray(prediction.mean)
        chances = np.stack([1 - chances, chances], axis=1) if chances.ndim == 1 else chances
        surplus = np.mean((chances.argmax(axis=1) == targets) - chances.max(axis=1))
        np.testing.assert_allclose(found.surplus[0], surplus, atol=1e-6)
        assert ("underconfident" in str(found)) == (sharpness < 1)
        assert ("overconfident" in str(found)) == (sharpness > 1)
    # Of two equal probabilities one is right.
    mean, log_density = np.full((2_000, 2), 0.5), np.full(2_000, -np.log(2))
    even = prediction._replace(mean=mean, log_density=log_density)
    assert diagnostics.summary(draws, even).surplus == (0, 0)


def test_copies_count_once():
    """In ESS, R-hat across chains and Monte Carlo error; nothing else is a copy's fault."""
    alone, (draws, prediction) = diagnostics.summary(*made()), made()
    for which, copies in (([0, 1, 2, 3, 0, 1], (0, 1, 4, 5)), ([2] * 4, ALL)):
        same = functools.partial(jax.tree.map, lambda x, which=which: x[which])
        trace, each = same(dict(draws.trace)), same(prediction.each)
        kept = Snapshots(same(draws.params), trace, draws.settings, same(draws.start))
        found = diagnostics.summary(kept, prediction._replace(each=each))
        assert ("copies", copies) in kinds(found)
        if copies == ALL:
            assert found.rhat_across.size == 0 and np.nanmedian(found.ess) <= 1.5 * NUM_DRAWS
            continue
        assert len(found.findings) == 1 and "[0, 4] and [1, 5]" in str(found)
        assert found.copy_of.tolist() == which and "of 400 draws" in str(found)
        for name in "ess", "rhat_across", "mcse":
            np.testing.assert_array_equal(getattr(found, name), getattr(alone, name))
    members = np.array([[0.0], [1], [0], [3]])
    found = diagnostics.summary(Snapshots.from_members(members))
    assert kinds(found) == {("copies", (0, 2))} and "1 of 1 draws" in str(found)


def test_the_last_sentence_has_r_hats_above_the_bound():
    slow = autoregressive((4, NUM_DRAWS, NUM_INPUTS), 0.9)
    for share, is_found in (0.3, True), (0.2, False):
        bad = np.arange(NUM_INPUTS) < share * NUM_INPUTS
        found = diagnostics.summary(*made(mean=lambda x, bad=bad: np.where(bad, slow, x)))
        assert bool(found.findings) == is_found
    within = np.mean(found.rhat_within > 1.1)
    assert within > 0.1 and f"but {within:.0%} of the R-hats within" in str(found)
    # Weights wander: it is said, and is no finding.
    alone = diagnostics.summary(Snapshots(slow))
    said = f"weights and trace, but {np.mean(alone.rhat_within > 1.1):.0%} of the R-hats within"
    assert alone.findings == () and said in str(alone).splitlines()[-1]


# Settings of what chooses the step size, how advice begins, and whether a change of the step size
# is a finding, or was asked for.
CHOOSERS: dict[str, Any] = {
    "angle": ({"tuner": {"name": "angle_tuner"}}, "a smaller `angle_tuner(", True),
    "quantile": ({"tuner": {"name": "quantile_tuner"}}, "a smaller step size at the start", True),
    "schedule": ({"tuner": None, "step_size": "f"}, "a schedule of smaller steps", False),
    "number": ({"tuner": None, "step_size": 0.1}, "a smaller step size,", False),
    "unknown": (None, "shorter steps", True),
}


@pytest.mark.parametrize("name", CHOOSERS)
def test_advice_fits_what_chooses_the_step_size(name):
    """The draws of a loop of one's own come without settings: nobody gave a step size."""
    settings, advice, is_finding = CHOOSERS[name]
    (finding,) = diagnostics.summary(made(settings=settings, **SICK["diverged"][0])[0]).findings
    assert finding.advice.startswith(advice)
    assert ("step size" in finding.advice) == (name in ("number", "quantile"))
    changes: dict[str, Any] = {"step_size": changed([1], LAST, 3)}
    found = diagnostics.summary(made(settings=settings, **changes)[0])
    assert kinds(found) == ({("step size", (1,))} if is_finding else set())
    for kind, changes in (
        ("frozen", {"params": changed([2], slice(30, None), 2.0)}),
        ("still on its way", {"on_its_way": changed([1], MOST, True)}),
    ):
        (finding,) = diagnostics.summary(made(settings=settings, **changes)[0]).findings
        assert finding.kind == kind and (settings or "step size" not in finding.advice)
        assert ("The step size was given" in finding.advice) == (name == "number")
    assert "If the chains did not start from trained weights" in finding.advice


def test_runs_of_few_draws_or_chains_and_members_are_summarized():
    draws, prediction = made(params=lambda x: x[..., :2], start=np.full((4, 2), 3.0))
    for num_draws in (1, 2, 4, 7, 8):
        last = functools.partial(jax.tree.map, lambda x, n=num_draws: x[:, -n:])
        few = Snapshots(last(draws.params), dict(draws.trace), draws.settings, draws.start)
        for one in (None, prediction._replace(each=last(prediction.each))):
            found = diagnostics.summary(few, one)
            assert found.findings == () and "hard to tell from fewer than 20" in str(found)
            assert np.isfinite(found.rhat_within).any() == (num_draws >= 8)
    # Members of an ensemble, without a sampler.
    found = diagnostics.summary(Snapshots(last(draws.params)), one)
    assert np.isfinite(found.chain_lppd).all() and "LPPD" in str(found)
    assert "trend" not in str(found) and "step size" not in str(found)
    # One chain, and impossible targets.
    first = functools.partial(jax.tree.map, lambda x: x[:1])
    single, each = Snapshots(*map(first, (draws.params, dict(draws.trace)))), first(prediction.each)
    impossible = np.where(np.arange(NUM_INPUTS) == 0, -np.inf, each.log_density)
    for one in each, each._replace(log_density=impossible):
        found = diagnostics.summary(single, prediction._replace(each=one))
        assert found.findings == () and found.rhat_across.size == 0 and str(found)


def test_a_trace_may_have_any_part_of_the_statistics():
    """Each statistic alone and all but one: what is missing is unknown, and no check fails."""
    draws, _ = made(params=lambda x: x[..., :1], start=np.full((4, 1), 3.0))
    for name, values in draws.trace.items():
        others = {x: y for x, y in draws.trace.items() if x != name}
        for trace in ({name: values}, others):
            found = diagnostics.summary(Snapshots(draws.params, trace, None, draws.start))
            assert found.findings == () and str(found) and repr(found)
            known = 0 if "num_nonfinite" in trace else np.nan
            np.testing.assert_array_equal(found.num_nonfinite, known)
    for wrong in ({"loss": np.ones(60)}, {"loss": np.ones((8, 60)), "step": np.ones((8, 9))}):
        rule = r"trace=...\)` must be .*\[chain, tick\] with equal"
        refused(rule, lambda trace=wrong: diagnostics.summary(Snapshots(draws.params, trace)))


def test_tokens_leave_padding_out():
    labels = np.array([[0, 1, -1], [1, -1, -1]])
    density = np.where(labels >= 0, -1 - 0.1 * RNG(0).random((2, 40, 2, 3)), np.nan)
    prediction = predicted(None, density, whole=density.mean(axis=(0, 1)))
    found = diagnostics.summary(Snapshots(autoregressive((2, 40, 2))), prediction)
    assert found.rhat_within.shape == (2, 3)
    known = np.exp(density).mean(axis=(0, 1))[labels >= 0]
    assert found.lppd == pytest.approx(np.mean(np.log(known)))


# Version 0.23 announces the next one.
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_arviz_reads_a_run_with_every_variable_under_a_name_of_its_own(tmp_path):
    """A name of an axis would become an index, and two variables of a name one."""
    draws, prediction = made()
    # The trace begins before the draws.
    late = jax.tree.map(lambda x: x[:, 40:], (draws.params, prediction.each))
    draws = Snapshots(late[0], dict(draws.trace))
    converted = diagnostics.to_arviz(draws, prediction._replace(each=late[1]))
    for values, expected in (
        (converted.posterior["params"], draws.params),
        (converted.sample_stats["step_size"], draws.trace["step_size"][:, -60:]),
        (converted.sample_stats["energy_error"], draws.trace["energy_change"][:, -60:]),
        (converted.log_likelihood["target"], late[1].log_density),
    ):
        np.testing.assert_allclose(values.values, expected, rtol=1e-6)
    assert arviz.summary(converted).shape[0] == 5

    def of(*shape):
        return RNG(0).normal(size=(2, 5, *shape))

    for params, names in (
        ({"layer": {"w": of(3)}, "a/b": [of()]}, ["a~1b.0", "layer.w"]),
        ({"a": {"b": of()}, "a.b": of(), "a/b": of()}, ["a.b", "a~2b", "a~1b"]),
        ({"chain": of(3), "draw": of(), "sample": of(2)}, ["chain_", "draw_", "sample_"]),
        ({"w": of(3), "w_dim_0": of(3), "w_dim_1": of()}, ["w", "w_dim_0_", "w_dim_1"]),
        (OrderedDict({1: of(2), "1": of()}), ["1", "1_"]),
    ):
        found = diagnostics.to_arviz(Snapshots(params)).posterior
        for name, leaf in zip(names, jax.tree.leaves(params), strict=True):
            np.testing.assert_array_equal(found[name].values, leaf)
        assert set(found.data_vars) == set(names) and set(found.sizes) >= {"chain", "draw"}
    draws = Snapshots({"w": of()}, trace={"loss": of(), "draw": of()})
    assert set(diagnostics.to_arviz(draws).sample_stats.data_vars) == {"loss", "draw_"}

    # NetCDF has fewer dtypes.
    dtypes = ("bfloat16", "int4", "bool", ">f8")
    leaves = {x: (np.arange(20).reshape(2, 5, 2) % 7).astype(jnp.dtype(x)) for x in dtypes}
    converted = diagnostics.to_arviz(Snapshots(leaves))
    converted.to_netcdf(tmp_path / "draws.nc")
    for name, leaf in leaves.items():
        np.testing.assert_array_equal(converted.posterior[name].values, leaf.astype(float))


def test_a_prediction_must_be_by_draw_with_targets_of_these_draws():
    draws, prediction = made()
    density, fewer = prediction.each.log_density, Snapshots(draws.params[:, 1:])
    of_chains = prediction.each._replace(log_density=density.mean(axis=1))
    for function, kept, each in (
        (diagnostics.summary, draws, None),
        (diagnostics.summary, draws, of_chains),
        (diagnostics.summary, draws, prediction.each._replace(log_density=None)),
        (diagnostics.to_arviz, fewer, prediction.each),
    ):
        rule = r"^`\w+\(prediction=...\)` must be .*per=.draw"
        refused(rule, function, kept, prediction._replace(each=each))


def test_without_arviz_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz", None)
    monkeypatch.setitem(sys.modules, "arviz_stats.base.array", None)
    with pytest.raises(ImportError, match=r"needs ArviZ: pip install 'optax-smile\[arviz\]'"):
        diagnostics.to_arviz(Snapshots(np.zeros((2, 8, 2))))
    with pytest.raises(ImportError, match=r"arviz-stats: pip install 'optax-smile\[diagnostics\]'"):
        diagnostics.summary(Snapshots(autoregressive((2, 8, 2))))
    assert diagnostics.summary(Snapshots.from_members(np.ones((2, 3)))).num_draws == 1
