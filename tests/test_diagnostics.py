"""Statistics of `summary` against ArviZ and by hand, and its findings.

Runs that have a finding, and runs that have none, are in `docs/findings.py`.
"""

import functools
import re
import sys
from collections import OrderedDict
from typing import Any

import arviz
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from findings import ALL, LAST, NEAR, RNG, SICK, autoregressive, changed, made, predicted
from runs import refused

import optax_smile
from optax_smile import Snapshots
from optax_smile.diagnostics import summary, to_arviz


def judged(values: Any = None, density: Any = None, params: Any = None, **given):
    """Summary of chains with predictions `[chain, draw, input]`."""
    density = np.zeros(values.shape) if density is None else density
    draws = Snapshots(values if params is None else params)
    return summary(draws, predicted(values, density), **given)


def kinds(found):
    """Kinds of the findings, and their chains."""
    return {(check.kind, check.chains) for check in found.findings}


def test_rhat_and_ess_are_those_of_arviz():
    """ArviZ 0.23 has formulas of its own. Within a chain, its halves are the chains."""
    for shape in (2, 9), (3, 8), (4, 50):
        values = autoregressive((*shape, 3))
        values[0] += 0.7
        values[1, :, :2] += np.linspace(0, 15, shape[1])[:, None]
        found, late = judged(values), values[:, shape[1] % 2 :]
        halves = late.reshape(shape[0], 2, shape[1] // 2, 3)
        within = [[arviz.rhat(x[..., i]) for i in range(3)] for x in halves]
        np.testing.assert_allclose(found.rhat_within, within, rtol=1e-9)
        for figures, function in ((found.rhat_across, arviz.rhat), (found.ess, arviz.ess)):
            expected = [function(values[..., i]) for i in range(3)]
            np.testing.assert_allclose(figures, expected, rtol=1e-9)
    assert found.rhat_within[1, :2].min() > 1.9 > 1.6 > found.rhat_within[[0, 2, 3]].max()


def test_values_that_do_not_move_have_neither_ess_nor_rhat():
    values = autoregressive((2, 40, 3))
    values[..., 1] = values[0, :, 2] = 7.0
    found = judged(values)
    for figures in found.rhat_across, found.ess:
        assert np.isnan(figures).tolist() == [False, True, False]
    assert np.isnan(found.rhat_within).tolist() == [[False, True, True], [False, True, False]]
    # If no chain has one, NumPy would warn about an empty average.
    shown = str(summary(Snapshots(np.ones((2, 40, 3)))))
    assert "within chains all unknown" in shown and "frozen" in shown
    # NaN would be an ESS of its own.
    values[1, 3, 0] = np.nan
    rule = r"...\)` must be without NaN"
    refused(r"`summary\(prediction=" + rule, judged, values, params=np.zeros((2, 40, 3)))
    refused(r"`summary\(snapshots=" + rule, summary, Snapshots(values))
    # Only weights that move count.
    moving = autoregressive((2, 40, 5)) + np.array([0, 9])[:, None, None]
    params = {"a": np.zeros((2, 40, 7)), "b": moving, "c": np.zeros((2, 40))}
    got = summary(Snapshots(params)).rhat_within
    np.testing.assert_allclose(np.sort(got), np.sort(judged(moving).rhat_within))
    some = summary(Snapshots(params), max_inputs=2, seed=1).rhat_within
    assert some.shape == (2, 2) and np.isin(some, got).all() and got.max() < 1.5


def test_mcse_is_the_spread_of_the_lppd_over_replications():
    """Spread of 400 LPPDs, known to 3.5 %; the estimates vary little around their average."""
    x = RNG(1).normal(size=30)
    slopes = [RNG(i + 10).normal(1, 0.5, size=(2, 50, 1)) for i in range(400)]
    densities = [-((slope * x - 2 * x) ** 2) / 2 for slope in slopes]
    lppds = [np.mean(np.log(np.mean(np.exp(x), axis=(0, 1)))) for x in densities]

    def error(density):
        params = RNG(0).normal(size=(*density.shape[:2], 2))
        return judged(density=density, params=params, max_inputs=1).mcse

    np.testing.assert_allclose(np.mean([*map(error, densities[:20])]), np.std(lppds), rtol=0.15)
    independent = error(autoregressive((4, 500, 20), 0.0))
    shared = np.repeat(autoregressive((4, 500, 1), 0.95), 20, axis=2)
    # One value instead of 20; (1 + rho) / (1 - rho) = 39 draws instead of one.
    assert 0.5 < error(shared) / independent / np.sqrt(20 * 39) < 1.6
    impossible = np.zeros((2, 50, 3))
    assert error(impossible) == 0
    impossible[0, 0, 0] = -np.inf
    assert np.isfinite(error(impossible))
    assert np.isnan(error(impossible - np.array([0, 0, np.inf])))


def test_figures_of_a_trace_count_from_the_first_draw():
    rejections = np.concatenate([np.arange(40) * 5, 195 + np.arange(61)[1:]])[None]
    whole = {"num_gradients": 10 * np.arange(1, 101)[None], "num_rejected": rejections}
    sizes = np.geomspace(1, 0.01, 100)[None]
    whole |= {"step_size": sizes, "is_draw": np.ones((1, 100), bool)}

    def found(num_draws, trace=whole):
        return summary(Snapshots(np.zeros((1, num_draws, 2)), trace))

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


@pytest.mark.parametrize("name", SICK)
def test_a_sick_run_has_its_finding_alone_with_its_numbers(name):
    (changes, chains, message), kind = SICK[name], name.partition(",")[0]
    found = summary(*made(**changes))
    assert kinds(found) == {(kind, chains)}
    check = found.findings[0]
    assert re.search(message, check.text), check.text
    assert check in found.checks and check.advice and len(check.value) == len(chains)
    # For these, healthy values are above the bound.
    is_below = name in ("frozen, by its step size", "frozen, by its draws")
    assert all((x < check.bound) == is_below and x != check.bound for x in check.value)
    named = "All 4 chains" if chains == ALL else f"Chain{'s' * (len(chains) > 1)} {chains[0]}"
    assert re.search(rf"(?m)^{named}.*: {kind}: .*\n  Try: ", str(found))


@pytest.mark.parametrize("name", NEAR)
def test_what_is_a_finding_and_what_is_none(name):
    changes, expected = NEAR[name]
    draws, prediction = made(**changes)
    found = summary(draws, None if "weights" in name else prediction)
    assert kinds(found) == expected
    # Without a finding, the last sentence has R-hats above the bound.
    above = np.mean(found.rhat_within > 1.1)
    said = f"{' in weights and trace' * ('weights' in name)}, but {above:.0%} of the R-hats within"
    assert (f"Nothing looks wrong{said}" in str(found)) == (above >= 0.005 and not expected)


def test_chains_with_few_independent_draws_are_slow():
    """n draws are worth n (1 - r) / (1 + r) independent ones: 42 or 431 of 800, about 11 of 100."""
    for shape, correlation, seed, said in (
        ((1, 800, 3), 0.9, 0, "all chains together (flagged below 100)"),
        ((4, 25, 3), 0.8, 2, ": slow: "),
        ((2, 50, 3), 0.8, 2, ": slow: "),
        # Slow by the R-hats alone, and by the ESS alone.
        ((2, 59, 3), 0.7, 0, "of the R-hats within the chain are above 1.1"),
        ((2, 59, 3), 0.7, 3, "the ESS of the chain's 59 draws is"),
        ((1, 800, 3), 0.3, 0, ""),
        ((4, 25, 3), 0.0, 2, ""),
        ((2, 50, 3), 0.0, 2, ""),
    ):
        found = judged(autoregressive(shape, correlation, seed))
        assert ("slow" in {check.kind for check in found.findings}) == bool(said)
        assert bool(found.findings) == bool(said)
        assert (said or "Nothing looks wrong") in str(found)
    # Whatever the others have: 30 of 400 in the last chain, 215 in the others.
    paths = autoregressive((4, 400, 3), 0.3)
    paths[3] = autoregressive((1, 400, 3), 0.86, seed=1)[0]
    found = judged(paths)
    assert kinds(found) == {("slow", (3,))} and "(flagged below 50)" in found.findings[0].text


def test_summary_holds_the_figures_of_the_run():
    sizes = np.geomspace(1, 1.5, 100) * np.arange(1, 5)[:, None]
    rejected, broken = (np.arange(4)[:, None] * np.arange(100) // part for part in (9, 40))
    draws, prediction = made(step_size=sizes, num_rejected=rejected, num_nonfinite=broken)
    whole, found = summary(draws, prediction), summary(draws, prediction, max_inputs=5, seed=1)
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
    cells, ratio = rows[3].split(), found.rejection_rate[2] / found.nominal_rate
    assert cells[4:6] == [f"{found.step_size_trend[2]:.2f}", f"{ratio:.2g}"]
    assert cells[-2:] == [f"{np.median(found.rhat_within[2]):.2f}", f"{found.chain_lppd[2]:.5g}"]
    assert f"{np.mean(found.rhat_across < 1.05):.0%} below 1.05" in str(found)


def test_healthy_chains_pass_every_test_with_their_numbers():
    draws, prediction = made()
    found, alone = summary(draws, prediction), summary(draws)
    assert found.findings == alone.findings == () and all(check.passed for check in found.checks)
    by_kind = {check.kind: check for check in found.checks}
    assert set(by_kind) == {name.partition(",")[0] for name in SICK}
    for check in found.checks:
        assert (check.chains, check.advice) == (ALL, "")
        assert len(check.value) == 4 and np.isfinite(check.value).all()
    text = "0 of 100 draws equal those of another chain, bit for bit."
    assert by_kind["copies"] == ("copies", ALL, (0.0,) * 4, 10.0, True, "", text)
    text = "it changed by a factor of 1 during the draws (flagged above 2)."
    assert by_kind["step size"] == ("step size", ALL, (1.0,) * 4, 2.0, True, "", text)
    rise = draws.trace["loss"].mean(axis=1) - 0.2
    assert by_kind["worse than the start"].value == pytest.approx(rise)
    assert {"slow", "chains differ", "different modes"}.isdisjoint(x.kind for x in alone.checks)
    # Tests that pass are of chains that arrive; one that has diverged is reported once.
    found = summary(*made(**SICK["diverged, alone"][0], step_size=changed([1], LAST, 3)))
    assert kinds(found) == {("diverged", (1,))}
    (steps,) = [check for check in found.checks if check.kind == "step size"]
    assert steps.passed and steps.chains == (0, 2, 3) and steps.value == (1.0,) * 3
    found = summary(*made(**SICK["not finite"][0]))
    assert found.checks == found.findings


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
def test_confidence_is_compared_with_accuracy(likelihood):
    """Outputs that are those of the data times a number are too cautious below 1."""
    rng, outputs = RNG(0), lambda w, x: w * x
    logits = rng.normal(scale=2, size=(2_000, 3)).astype("float32")
    targets = np.argmax(logits + rng.gumbel(size=logits.shape), axis=1)
    if likelihood == "bernoulli":
        logits = logits[:, 0]
        targets = (logits + rng.logistic(size=2_000) > 0).astype(int)
    given: dict[str, Any] = {"likelihood": likelihood, "targets": targets, "per": "draw"}
    for sharpness in (0.5, 1.0, 2.0):
        draws = Snapshots(sharpness + 0.01 * rng.normal(size=(2, 10)))
        prediction = optax_smile.predict(outputs, draws, logits, **given)
        found, chances = summary(draws, prediction, max_inputs=2), np.asarray(prediction.mean)
        chances = np.stack([1 - chances, chances], axis=1) if chances.ndim == 1 else chances
        surplus = np.mean((chances.argmax(axis=1) == targets) - chances.max(axis=1))
        np.testing.assert_allclose(found.surplus[0], surplus, atol=1e-6)
        assert ("underconfident" in str(found)) == (sharpness < 1)
        assert ("overconfident" in str(found)) == (sharpness > 1)
        best = optax_smile.metrics.temperature(prediction, targets)
        after = summary(draws, prediction.tempered(best), max_inputs=2)
        assert "confident" not in str(after) and after.lppd == found.lppd
        assert f"temperature of the prediction: {best:.3g};" in str(after)
    # If two probabilities are equal, one class is right.
    mean, log_density = np.full((2_000, 2), 0.5), np.full(2_000, -np.log(2))
    even = prediction._replace(mean=mean, log_density=log_density)
    assert summary(draws, even, max_inputs=2).surplus == (0, 0)


def test_copies_count_once():
    """In ESS, R-hat across chains and Monte Carlo error; other statistics do not change."""
    alone, (draws, prediction) = summary(*made()), made()
    for which, copies in (([0, 1, 2, 3, 0, 1], (0, 1, 4, 5)), ([2] * 4, ALL)):
        same = functools.partial(jax.tree.map, lambda x, which=which: x[which])
        trace, each = same(dict(draws.trace)), same(prediction.each)
        kept = Snapshots(same(draws.params), trace, draws.settings, same(draws.start))
        found = summary(kept, prediction._replace(each=each))
        assert ("copies", copies) in kinds(found)
        if copies == ALL:
            assert found.rhat_across.size == 0 and np.nanmedian(found.ess) <= 150
            continue
        assert len(found.findings) == 1 and "[0, 4] and [1, 5]" in str(found)
        assert found.copy_of.tolist() == which and "of 400 draws" in str(found)
        for name in "ess", "rhat_across", "mcse":
            np.testing.assert_array_equal(getattr(found, name), getattr(alone, name))
    found = summary(Snapshots.from_members(np.array([[0.0], [1], [0], [3]])))
    assert kinds(found) == {("copies", (0, 2))} and "1 of 1 draws" in str(found)


@pytest.mark.parametrize(
    "settings, advice",
    [
        ({"tuner": {"name": "angle_tuner"}}, "a smaller `angle_tuner("),
        ({"tuner": {"name": "quantile_tuner"}}, "a smaller step size at the start"),
        ({"tuner": None, "step_size": "f"}, "a schedule of smaller steps"),
        ({"tuner": None, "step_size": 0.1}, "a smaller step size,"),
        # Draws of a loop of one's own have no settings, so the origin of the step size is unknown.
        (None, "shorter steps"),
    ],
)
def test_advice_fits_what_chooses_the_step_size(settings, advice):
    is_given, is_number = "schedule" in advice, "a smaller step size," == advice

    def found(**changes):
        return summary(made(**changes | {"settings": settings})[0])

    (finding,) = found(**SICK["diverged, alone"][0]).findings
    assert finding.advice.startswith(advice)
    assert ("step size" in finding.advice) == ("step size" in advice)
    # A change is a finding, unless the user asked for it.
    assert bool(found(step_size=changed([1], LAST, 3)).findings) != (is_given or is_number)
    for kind in "frozen, one chain", "still on its way":
        (finding,) = found(**SICK[kind][0]).findings
        assert settings or "step size" not in finding.advice
        assert ("The step size was given" in finding.advice) == is_number
    assert "If the chains did not start from trained weights" in finding.advice


def test_runs_of_few_draws_or_chains_and_members_are_summarized():
    draws, prediction = made(params=lambda x: x[..., :2], start=lambda x: x[..., :2])
    for num_draws in (1, 2, 4, 7, 8):
        last = functools.partial(jax.tree.map, lambda x, n=num_draws: x[:, -n:])
        few = Snapshots(last(draws.params), dict(draws.trace), draws.settings, draws.start)
        for one in (None, prediction._replace(each=last(prediction.each))):
            found = summary(few, one)
            assert found.findings == () and "hard to tell from fewer than 20" in str(found)
            assert np.isfinite(found.rhat_within).any() == (num_draws >= 8)
    # Members of an ensemble, without a sampler.
    found = summary(Snapshots(last(draws.params)), one)
    assert np.isfinite(found.chain_lppd).all() and "LPPD" in str(found)
    assert "trend" not in str(found) and "step size" not in str(found)
    # One chain, and impossible targets.
    first = functools.partial(jax.tree.map, lambda x: x[:1])
    single, each = Snapshots(*map(first, (draws.params, dict(draws.trace)))), first(prediction.each)
    impossible = np.where(np.arange(16) == 0, -np.inf, each.log_density)
    for one in each, each._replace(log_density=impossible):
        found = summary(single, prediction._replace(each=one))
        assert found.findings == () and found.rhat_across.size == 0 and str(found)


def test_a_trace_may_have_any_part_of_the_statistics():
    """Each statistic alone and all but one: what is missing is unknown, and no check fails."""
    draws, _ = made(params=lambda x: x[..., :1], start=lambda x: x[..., :1])
    for name, values in draws.trace.items():
        others = {x: y for x, y in draws.trace.items() if x != name}
        for trace in ({name: values}, others):
            found = summary(Snapshots(draws.params, trace, None, draws.start))
            assert found.findings == () and str(found) and repr(found)
            known = 0 if "num_nonfinite" in trace else np.nan
            np.testing.assert_array_equal(found.num_nonfinite, known)
    for wrong in ({"loss": np.ones(60)}, {"loss": np.ones((8, 60)), "step": np.ones((8, 9))}):
        rule = r"trace=...\)` must be .*\[chain, tick\] with equal"
        refused(rule, lambda trace=wrong: summary(Snapshots(draws.params, trace)))


def test_tokens_leave_padding_out():
    labels = np.array([[0, 1, -1], [1, -1, -1]])
    density = np.where(labels >= 0, -1 - 0.1 * RNG(0).random((2, 40, 2, 3)), np.nan)
    prediction = predicted(None, density, whole=density.mean(axis=(0, 1)))
    found = summary(Snapshots(autoregressive((2, 40, 2))), prediction)
    assert found.rhat_within.shape == (2, 3)
    known = np.exp(density).mean(axis=(0, 1))[labels >= 0]
    assert found.lppd == pytest.approx(np.mean(np.log(known)))


# Version 0.23 announces the next one.
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_arviz_reads_a_run_with_every_variable_under_a_name_of_its_own(tmp_path):
    """A name of an axis would become an index, and two variables of a name one."""
    draws, prediction = made()
    # The trace begins before the draws.
    params, each = jax.tree.map(lambda x: x[:, 40:], (draws.params, prediction.each))
    converted = to_arviz(Snapshots(params, dict(draws.trace)), prediction._replace(each=each))
    for values, expected in (
        (converted.posterior["params"], params),
        (converted.sample_stats["step_size"], draws.trace["step_size"][:, -60:]),
        (converted.sample_stats["energy_error"], draws.trace["energy_change"][:, -60:]),
        (converted.log_likelihood["target"], each.log_density),
    ):
        np.testing.assert_allclose(values.values, expected, rtol=1e-6)
    assert arviz.summary(converted).shape[0] == params.shape[-1]

    def of(*shape):
        return RNG(0).normal(size=(2, 5, *shape))

    for params, names in (
        ({"layer": {"w": of(3)}, "a/b": [of()]}, ["a~1b.0", "layer.w"]),
        ({"a": {"b": of()}, "a.b": of(), "a/b": of()}, ["a.b", "a~2b", "a~1b"]),
        ({"chain": of(3), "draw": of(), "sample": of(2)}, ["chain_", "draw_", "sample_"]),
        ({"w": of(3), "w_dim_0": of(3), "w_dim_1": of()}, ["w", "w_dim_0_", "w_dim_1"]),
        (OrderedDict({1: of(2), "1": of()}), ["1", "1_"]),
    ):
        found = to_arviz(Snapshots(params)).posterior
        for name, leaf in zip(names, jax.tree.leaves(params), strict=True):
            np.testing.assert_array_equal(found[name].values, leaf)
        assert set(found.data_vars) == set(names) and set(found.sizes) >= {"chain", "draw"}
    draws = Snapshots({"w": of()}, trace={"loss": of(), "draw": of()})
    assert set(to_arviz(draws).sample_stats.data_vars) == {"loss", "draw_"}

    # NetCDF has fewer dtypes.
    dtypes = ("bfloat16", "int4", "bool", ">f8")
    leaves = {x: (np.arange(20).reshape(2, 5, 2) % 7).astype(jnp.dtype(x)) for x in dtypes}
    converted = to_arviz(Snapshots(leaves))
    converted.to_netcdf(tmp_path / "draws.nc")
    for name, leaf in leaves.items():
        np.testing.assert_array_equal(converted.posterior[name].values, leaf.astype(float))


def test_a_prediction_must_be_by_draw_with_targets_of_these_draws():
    draws, prediction = made()
    density, fewer = prediction.each.log_density, Snapshots(draws.params[:, 1:])
    of_chains = prediction.each._replace(log_density=density.mean(axis=1))
    for function, kept, each in (
        (summary, draws, None),
        (summary, draws, of_chains),
        (summary, draws, prediction.each._replace(log_density=None)),
        (to_arviz, fewer, prediction.each),
    ):
        rule = r"^`\w+\(prediction=...\)` must be .*per=.draw"
        refused(rule, function, kept, prediction._replace(each=each))


def test_without_arviz_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz", None)
    monkeypatch.setitem(sys.modules, "arviz_stats.base.array", None)
    with pytest.raises(ImportError, match=r"needs ArviZ: pip install 'optax-smile\[arviz\]'"):
        to_arviz(Snapshots(np.zeros((2, 8, 2))))
    with pytest.raises(ImportError, match=r"arviz-stats: pip install 'optax-smile\[diagnostics\]'"):
        summary(Snapshots(autoregressive((2, 8, 2))))
    assert summary(Snapshots.from_members(np.ones((2, 3)))).num_draws == 1
