"""The stopping rule: e-values in closed form, false stops of dependent chains, and runs."""

import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

import optax_smile
from optax_smile import ArgumentError, EvidenceStop, Snapshots, diagnostics, load_snapshots, report
from optax_smile.chains.stopping import FRACTIONS, Looks, log_e_value

EXAMPLES = 300


def outputs(params, x):
    return x @ params["w"] + params["b"], jnp.zeros(())


def held_out(size: int = EXAMPLES, seed: int = 9):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(size, 2)).astype(np.float32)
    return x, (x.sum(axis=-1) + generator.normal(size=size)).astype(np.float32)


def rule(apply_fn: Any = outputs, validation: Any = None, **arguments) -> EvidenceStop:
    given: dict[str, Any] = {"likelihood": "gaussian", "every": 2}
    return EvidenceStop(apply_fn, validation or held_out(), **given | arguments)


def test_e_value_in_closed_form():
    """Wealth of each bet, multiplied out; two examples, so that no sum of logs can hide."""
    score, bound = np.array([0.5, -1.5]), 2.0
    expected = np.mean([(1 + f / 4) * (1 - f * 0.75) for f in FRACTIONS])
    assert math.exp(log_e_value(score, bound)) == pytest.approx(expected, rel=1e-12)
    # Everything lost by the largest bet alone.
    expected = np.mean([1 - f for f in FRACTIONS])
    assert math.exp(log_e_value(np.array([-2.0]), bound)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("null", ["improvement", "doubling"])
def test_looks_in_closed_form(null):
    """Predictors at each look, from densities in the textbook's way; examples of two targets."""
    density = np.random.default_rng(0).uniform(0.1, 3, size=(7, 5, 2))
    looks = Looks(rule(null=null, every=3, tolerance=0.1), np.log(density[0]))
    for draw in density[1:]:
        looks.add(np.log(draw))
    found = looks.result()
    assert found.num_draws.tolist() == [3, 6] and found.num_examples == 5
    for look, number in enumerate(found.num_draws):
        draws = density[1 : number + 1]
        if null == "improvement":
            score = np.log(density[: number + 1].mean(axis=0) / density[0])
            bound = math.log(number + 1)
        else:
            gain = np.log(draws.mean(axis=0) / draws[: number // 2].mean(axis=0))
            score, bound = 0.1 - np.minimum(gain, math.log(2)), math.log(2) - 0.1
            assert (gain > math.log(2)).any() or look
        x = score.mean(axis=1)
        expected = np.mean([np.prod(1 + f * x / bound) for f in FRACTIONS])
        assert math.exp(found.log_e_value[look]) == pytest.approx(expected, rel=1e-12)
        assert found.lppd[look] == pytest.approx(np.log(draws.mean(axis=0)).mean(), rel=1e-12)
    assert np.exp(found.log_threshold).tolist() == pytest.approx([2 / 0.05, 6 / 0.05])


def test_impossible_targets():
    """Impossible under both: no difference. Under the start alone: infinite, and finite here."""
    looks = Looks(rule(every=1), np.array([-np.inf, 0.0]))
    looks.add(np.array([-np.inf, 0.0]))
    assert looks.result().log_e_value[0] == 0
    looks.add(np.array([0.0, 0.0]))
    assert 10 < looks.result().log_e_value[1] < 1000
    looks = Looks(rule(every=1), np.array([0.0, 0.0]))
    looks.add(np.array(np.nan))
    assert not looks.has_stopped and "not finite" in str(looks.result())


@pytest.mark.parametrize("null", ["improvement", "doubling"])
def test_padding_is_no_evidence(null):
    """As many examples of unequal length as without the padding, and one without any target."""
    density = np.random.default_rng(1).normal(size=(5, 4, 3))
    padding = np.array([[0, 0, 1], [0, 1, 1], [1, 1, 1], [0, 0, 1]], bool)
    padded = np.where(padding, np.nan, density)
    means = np.nanmean(padded[:, [0, 1, 3]], axis=2)
    # Of one target each, which is the mean: its draws differ from the start by constants.
    shift = np.arange(5.0)[:, None, None]
    looks, expected = Looks(rule(null=null), padded[0]), Looks(rule(null=null), means[0])
    for draw in range(1, 5):
        looks.add(padded[0] + shift[draw])
        expected.add(means[0] + shift[draw, 0])
    found, wanted = looks.result(), expected.result()
    np.testing.assert_allclose(found.log_e_value, wanted.log_e_value, rtol=1e-12)
    assert len(found.num_draws) == 2
    assert found.start_lppd == pytest.approx(np.nanmean(padded[0]))
    for _ in range(2):
        looks.add(np.array(np.nan))
    assert np.isnan(looks.result().log_e_value[-1]) and not looks.has_stopped


GROUPS, SIMULATED_DRAWS, RUNS = 20, 64, 1_000


def chains_at_the_boundary(generator, growth: float) -> np.ndarray:
    """Densities `[draw, group, sign]`, for which the null is true with equality at every look.

    The start has density 1. The average density over the start (or without it, where averages grow
    by `growth` with each doubling) is a of the examples with one sign, as autoregressive chains
    with correlation .9 make it, and 1 / a of those with the other: the mean log is 0 whatever the
    chains do, and the differences are far from 0.
    """
    noise = generator.normal(size=(SIMULATED_DRAWS, GROUPS))
    path = [noise[0]]
    for fresh in noise[1:]:
        path.append(0.9 * path[-1] + math.sqrt(1 - 0.9**2) * fresh)
    one, count = 1 + 0.3 * np.tanh(np.array(path)), np.arange(1, SIMULATED_DRAWS + 1)[:, None]
    if not growth:
        count = np.arange(1, SIMULATED_DRAWS + 2)[:, None]
        one = np.concatenate([np.ones((1, GROUPS)), one])
    average = np.cumsum(one, axis=0) / count
    scale = count ** (growth / math.log(2))
    total = count[..., None] * np.stack([scale * average, scale / average], axis=2)
    density = np.diff(total, axis=0, prepend=0)
    assert (density > 0).all()
    return density if growth else density[1:]


def simulate(
    null: str, growth: float, tolerance: float, size: int = EXAMPLES, number: int = RUNS
) -> np.ndarray:
    """Log e-values `[run, look]`, with held-out examples of random group and sign."""
    generator, found = np.random.default_rng(7), []
    # Almost impossible to stop: all looks are seen.
    stop = rule(null=null, every=4, tolerance=tolerance, alpha=1e-30)
    for _ in range(number):
        density = chains_at_the_boundary(generator, growth)
        group, sign = generator.integers(GROUPS, size=size), generator.integers(2, size=size)
        looks = Looks(stop, np.zeros(size))
        for draw in np.log(density[:, group, sign]):
            looks.add(draw)
        found.append(looks.result().log_e_value)
    return np.array(found)


def share_stopped(log_e: np.ndarray, alpha: float) -> float:
    look = np.arange(1, log_e.shape[1] + 1)
    return float(np.mean((log_e >= np.log(look * (look + 1) / alpha)).any(axis=1)))


@pytest.mark.parametrize("null, growth", [("improvement", 0.0), ("doubling", 0.1)])
def test_false_stops_of_dependent_chains(null, growth):
    """At most alpha, up to two standard errors of the share: .05 + .014 of 1,000 runs.

    On the same runs, e-values multiplied over looks stop too often.
    """
    alpha = 0.05
    bound = alpha + 2 * math.sqrt(alpha * (1 - alpha) / RUNS)
    log_e = simulate(null, growth, 0.1)
    product = np.mean((np.cumsum(log_e, axis=1) >= math.log(1 / alpha)).any(axis=1))
    print(f"{null}: {share_stopped(log_e, alpha):.3f} stop, with products {product:.3f}")
    assert share_stopped(log_e, alpha) <= bound < product
    # The same chains stop where the null is wrong by little.
    if null == "doubling":
        assert share_stopped(simulate(null, growth, 0.15, number=50), alpha) > 0.9


@pytest.mark.parametrize("null, growth", [("improvement", 0.0), ("doubling", 0.1)])
def test_e_values_have_mean_1_at_the_boundary(null, growth):
    """At every look, within 4.5 standard errors: 1 false alarm in 4,000 for 32 looks.

    With 30 examples, so that the mean does not rest on a few runs.
    """
    e = np.exp(simulate(null, growth, 0.1, size=30))
    error = e.std(axis=0) / math.sqrt(RUNS)
    assert (abs(e.mean(axis=0) - 1) < 4.5 * error).all() and (error < 0.05).all()


def test_a_run_stops_and_another_does_not():
    whole: Any = runs.run(num_draws=12)
    early: Any = runs.run(num_draws=12, stop=rule())
    found = early.stopping
    assert found.has_stopped and early.num_draws == found.num_draws[-1] < 12
    # The draws are the first ones of the run without a rule.
    assert whole.stopping is None
    for mine, other in zip(
        jax.tree.leaves(early.params), jax.tree.leaves(whole.params), strict=True
    ):
        np.testing.assert_array_equal(mine, other[:, : early.num_draws])
    # LPPD and evidence are those of the predictions.
    x, y = held_out()
    given: dict[str, Any] = {"likelihood": "gaussian", "targets": y}
    density = optax_smile.predict(outputs, early, x, **given).log_density
    start = optax_smile.predict(outputs, Snapshots.from_members(runs.start()), x, **given)
    assert found.lppd[-1] == pytest.approx(density.mean(), abs=1e-5)
    assert found.start_lppd == pytest.approx(start.log_density.mean(), abs=1e-5)
    # Judged afterwards, the whole run would have stopped there as well.
    judged = rule().judge(whole)
    np.testing.assert_array_equal(judged.num_draws, found.num_draws)
    np.testing.assert_allclose(judged.log_e_value, found.log_e_value, atol=1e-4)
    never: Any = runs.run(num_draws=12, stop=rule(null="doubling", tolerance=1e-4))
    assert never.num_draws == 12 and len(never.stopping.num_draws) == 6
    assert not never.stopping.has_stopped


def test_resumed_runs_keep_the_evidence(tmp_path):
    """After a crash, after the stop, and beyond it without a rule; of draws that are rounded."""
    given: dict[str, Any] = {"num_draws": 12, "dtype": "float16"}
    stop = rule(alpha=1e-6)
    first: Any = runs.run(tmp_path / "whole", stop=stop, **given)
    assert first.stopping.has_stopped and 4 <= first.num_draws < 12
    step = runs.WARMUP + 3 * runs.THIN
    with pytest.raises(runs.Crash):
        crashing: Any = {"callback": runs.at(step, runs.crash), "checkpoint_minutes": 0}
        runs.run(tmp_path / "cut", stop=stop, **given | crashing)
    resumed: Any = runs.run(tmp_path / "cut", stop=stop, **given)
    runs.assert_same_bits(resumed, first)
    for name, mine in resumed.stopping._asdict().items():
        np.testing.assert_array_equal(mine, getattr(first.stopping, name))
    # A run that has stopped stays stopped, with more draws as well.
    with pytest.warns(UserWarning, match="the run in .* is finished"):
        again: Any = runs.run(tmp_path / "cut", stop=stop, **given | {"num_draws": 20})
    assert again.num_draws == first.num_draws and again.stopping.has_stopped
    for changed in ({"alpha": 0.5}, {"validation": held_out(seed=1)}):
        with pytest.raises(ArgumentError, match=r"stop=...\)` must be .* the run in"):
            runs.run(tmp_path / "cut", stop=rule(**{"alpha": 1e-6} | changed), **given)
    on = runs.run(tmp_path / "cut", **given)
    assert on.num_draws == 12 and on.stopping is None


def test_what_says_that_it_stopped(tmp_path):
    draws: Any = runs.run(tmp_path, num_draws=12, stop=rule())
    sentence = str(draws.stopping)
    assert sentence.startswith(f"Stopped at {draws.num_draws} draws per chain")
    assert sentence in str(diagnostics.summary(draws)) and "Stopped at" in repr(draws)
    page = report.write(tmp_path).read_text()
    assert "Stopped at" in page and "The run stops where the evidence" in page
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["settings"]["stop"]["null"] == "improvement"
    stored: Any = load_snapshots(tmp_path)
    assert stored.stopping.has_stopped


def test_several_devices_and_aux_fit(tmp_path):
    """With a mesh of one device, and draws that are a dict of params and aux."""
    mesh = jax.make_mesh((1, 1), ("chain", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def loss(params, batch, aux):
        return runs.mean_loss(params, batch), aux

    def apply_fn(draw, x):
        return outputs(draw["params"], x)

    aux = {"count": jnp.zeros(runs.CHAINS)}
    found: Any = runs.run(loss=loss, aux=aux, mesh=mesh, num_draws=12, stop=rule(apply_fn))
    assert found.stopping.has_stopped


def test_bad_arguments():
    for wrong in (
        {"null": "half"},
        {"alpha": 1.0},
        {"tolerance": 0.7},
        {"every": 0},
        {"likelihood": "normal"},
    ):
        with pytest.raises(ArgumentError, match=f"EvidenceStop.{next(iter(wrong))}"):
            rule(**wrong)
    x, y = held_out()
    wrong_data: Any = (x, (x, y[:-1]), (x, None))
    for validation in wrong_data:
        with pytest.raises(ArgumentError, match="EvidenceStop.validation"):
            EvidenceStop(outputs, validation, likelihood="gaussian")
    with pytest.raises(ArgumentError, match=r"sample\(stop=.*None with `observe`"):
        runs.run(stop=rule(), observe=lambda draw: draw["b"])
    with pytest.raises(ArgumentError, match=r"sample\(stop=.*an `EvidenceStop`"):
        runs.run(stop="improvement")
    with pytest.raises(ArgumentError, match=r"EvidenceStop\(apply_fn=.*for \'gaussian\'"):
        runs.run(stop=rule(lambda params, x: x @ params["w"]))
    with pytest.raises(ArgumentError, match=r"sample\(params=.*finite"):
        runs.run(stop=rule(lambda params, x: (x @ params["w"] + jnp.nan, 0.0)))
    with pytest.raises(ArgumentError, match=r"EvidenceStop.judge\(draws=.*`start`"):
        rule().judge(Snapshots.from_members(runs.start()))
