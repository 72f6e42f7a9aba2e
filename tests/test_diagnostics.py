"""Statistics against textbook formulas, and findings on runs that are broken on purpose."""

import functools
import re
import warnings
from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from paper import PAPER
from scipy import stats

import optax_smile
from optax_smile import Snapshots, _settings, diagnostics
from optax_smile.diagnostics.advice import ADVICE, STEP_SIZES

with warnings.catch_warnings():
    # Version 0.23 announces the next one.
    warnings.simplefilter("ignore", FutureWarning)
    arviz = pytest.importorskip("arviz")

KEY = jax.random.key(0)
RNG = np.random.default_rng


def autoregressive(shape, rho=0.5, seed=0):
    """Chains `[chain, draw, ...]` with the autocorrelation rho^lag and unit variance."""
    noise = RNG(seed).normal(size=shape)
    for draw in range(1, shape[1]):
        noise[:, draw] = rho * noise[:, draw - 1] + np.sqrt(1 - rho**2) * noise[:, draw]
    return noise


# Textbook formulas, one value at a time.


def normal_scores(x):
    """Equation 14 of Vehtari et al. 2021, ranks by counting."""
    flat = x.ravel()
    ranks = [np.sum(flat < one) + (np.sum(flat == one) + 1) / 2 for one in flat]
    scores = [NormalDist().inv_cdf((rank - 3 / 8) / (flat.size + 1 / 4)) for rank in ranks]
    return np.reshape(scores, x.shape)


def basic_rhat(x):
    """Their equations 1 to 4, `[chain, draw]`."""
    _, n = x.shape
    between = n * np.var(x.mean(axis=1), ddof=1)
    within = np.mean(np.var(x, axis=1, ddof=1))
    return np.sqrt(((n - 1) / n * within + between / n) / within)


def textbook_rhat(x):
    half = x.shape[1] // 2
    split = np.concatenate([x[:, :half], x[:, -half:]])
    folded = np.abs(split - np.median(split))
    return max(basic_rhat(normal_scores(split)), basic_rhat(normal_scores(folded)))


def textbook_ess(x):
    """Their equations 10 to 13 of split chains, Geyer's pairs made monotone."""
    half = x.shape[1] // 2
    split = np.concatenate([x[:, :half], x[:, -half:]])
    num_chains, n = split.shape
    centred = split - split.mean(axis=1, keepdims=True)
    lags = np.array([np.sum(centred[:, : n - k] * centred[:, k:], axis=1) / n for k in range(n)])
    within = np.mean(lags[0]) * n / (n - 1)
    total = within * (n - 1) / n + np.var(split.mean(axis=1), ddof=1)
    rho = 1 - (within - lags.mean(axis=1)) / total
    rho[0] = 1
    pairs, last = [], 0
    for k in range(0, n - 3, 2):
        last = k
        if rho[k] + rho[k + 1] < 0:
            break
        pairs.append(min(rho[k] + rho[k + 1], *(pairs[-1:] or [np.inf])))
    tail = max(rho[last], 0)
    tau = -1 + 2 * sum(pairs) + tail
    return num_chains * n / max(tau, 1 / np.log10(num_chains * n))


@pytest.mark.parametrize("shape", [(2, 4), (3, 9), (4, 50)])
def test_rhat_is_the_textbooks(shape):
    values = autoregressive((*shape, 2, 3), 0.8)
    values[0] += 0.7
    got = diagnostics.rhat(values)
    expected = [[textbook_rhat(values[:, :, i, j]) for j in range(3)] for i in range(2)]
    np.testing.assert_allclose(got, expected, rtol=1e-9)


def test_rhat_within_compares_the_quarters_of_one_chain():
    values = autoregressive((3, 41, 2), 0.8)
    values[1] += np.linspace(0, 15, 41)[:, None]
    got = diagnostics.rhat_within(values)
    quarters = values[:, 1:].reshape(3, 4, 10, 2)

    def of(x):
        folded = np.abs(x - np.median(x))
        return max(basic_rhat(normal_scores(x)), basic_rhat(normal_scores(folded)))

    expected = [[of(quarters[chain, :, :, point]) for point in range(2)] for chain in range(3)]
    np.testing.assert_allclose(got, expected, rtol=1e-9)
    assert got[1].min() > 1.9 > 1.6 > got[[0, 2]].max()


@pytest.mark.parametrize("rho", [0.5, 0.9])
def test_ess_is_the_textbooks_and_that_of_an_autoregression(rho):
    values = autoregressive((4, 1_000, 3), rho)
    got = diagnostics.ess(values, "mean")
    expected = [textbook_ess(values[:, :, point]) for point in range(3)]
    np.testing.assert_allclose(got, expected, rtol=0.02)
    scores = [textbook_ess(normal_scores(values[:, :, point])) for point in range(3)]
    np.testing.assert_allclose(diagnostics.ess(values), scores, rtol=0.02)
    np.testing.assert_allclose(got, 4_000 * (1 - rho) / (1 + rho), rtol=0.4)
    assert diagnostics.ess(values, "tail").shape == (3,)


def test_values_that_do_not_move_have_neither():
    values = autoregressive((2, 40, 3))
    values[..., 1] = 7.0
    values[0, :, 2] = 7.0
    assert np.isnan(diagnostics.rhat(values)).tolist() == [False, True, False]
    assert np.isnan(diagnostics.ess(values)).tolist() == [False, True, False]
    nothing = [[False, True, True], [False, True, False]]
    assert np.isnan(diagnostics.rhat_within(values)).tolist() == nothing


def test_mcse_is_the_spread_of_the_lppd_over_replications():
    """Spread of 400 LPPDs, known to 3.5 %; the estimates vary little around their average."""
    num_inputs, generator = 30, RNG(1)
    x = generator.normal(size=num_inputs)
    lppds, errors = [], []
    for replication in range(400):
        slopes = RNG(replication + 10).normal(1, 0.5, size=(2, 50, 1))
        density = -((slopes * x - 2 * x) ** 2) / 2
        lppds.append(np.mean(np.log(np.mean(np.exp(density), axis=(0, 1)))))
        if replication < 40:
            errors.append(diagnostics.mcse_lppd(density))
    np.testing.assert_allclose(np.mean(errors), np.std(lppds), rtol=0.15)


def test_mcse_counts_correlated_draws_as_few():
    independent = diagnostics.mcse_lppd(autoregressive((4, 500, 20), 0.0))
    shared = np.repeat(autoregressive((4, 500, 1), 0.95), 20, axis=2)
    # One value in place of 20, (1 + rho) / (1 - rho) = 39 draws in place of one.
    ratio = diagnostics.mcse_lppd(shared) / independent
    assert 0.5 < ratio / np.sqrt(20 * 39) < 1.6
    impossible = np.zeros((2, 50, 3))
    impossible[0, 0, 0] = -np.inf
    assert np.isfinite(diagnostics.mcse_lppd(impossible))
    assert diagnostics.mcse_lppd(np.zeros((2, 50, 3))) == 0


def test_weight_rhat_looks_at_weights_that_move():
    moving = autoregressive((2, 40, 5)) + np.array([0, 9])[:, None, None]
    params = {"a": np.zeros((2, 40, 7)), "b": moving, "c": np.zeros((2, 40))}
    got = diagnostics.weight_rhat(params)
    np.testing.assert_allclose(np.sort(got), np.sort(diagnostics.rhat_within(moving)))
    assert got.max() < 1.5
    some = diagnostics.weight_rhat(params, num_weights=2, seed=1)
    assert some.shape == (2, 2) and np.isin(some, got).all()
    assert diagnostics.weight_rhat({"a": params["a"]}).shape == (2, 0)


def test_travel_is_the_norm_over_all_leaves():
    params = {"a": RNG(0).normal(size=(2, 3, 4)), "b": RNG(1).normal(size=(2, 3))}
    start = {"a": RNG(2).normal(size=(2, 4)), "b": RNG(3).normal(size=2)}
    for chain, draw in np.ndindex(2, 3):
        origin = np.append(start["a"][chain], start["b"][chain])
        point = np.append(params["a"][chain, draw], params["b"][chain, draw])
        expected = np.linalg.norm(point - origin) / np.linalg.norm(origin)
        np.testing.assert_allclose(diagnostics.travel(params, start)[chain, draw], expected)


def test_travel_from_zero_is_finite():
    """Over the norm of the first draw that is not zero; a chain that stays has gone nowhere."""
    draws = np.zeros((2, 4, 3))
    draws[0, 1:] = np.array([[2.0], [4.0], [-6.0]])
    got = diagnostics.travel(draws, np.zeros((2, 3)))
    np.testing.assert_allclose(got, [[0, 1, 2, 3], [0, 0, 0, 0]])


def test_disagreement_counts_classes_and_measures_numbers():
    tops = np.array([[0, 1, 2, 0], [0, 1, 2, 1], [2, 2, 2, 2]])
    averages = np.eye(3)[tops] * 0.7 + 0.1
    expected = [[0, 0.25, 0.75], [0.25, 0, 0.75], [0.75, 0.75, 0]]
    np.testing.assert_allclose(diagnostics.disagreement(averages), expected)
    draws = averages[:, None] + np.array([-0.2, 0.2])[:, None, None] * [1, -1, 0]
    np.testing.assert_allclose(diagnostics.disagreement(draws), expected)

    numbers = np.array([0.0, 3.0])[:, None, None] + np.array([-1.0, 1.0])[:, None] + np.zeros(5)
    np.testing.assert_allclose(diagnostics.disagreement(numbers, classes=False), [[0, 3], [3, 0]])


def test_autocorrelation_is_the_sum_over_pairs():
    values = autoregressive((2, 30, 2), 0.8)
    values[1, :, 1] = 3.0
    got = diagnostics.autocorrelation(values, 6)
    assert got.shape == (2, 7, 2) and np.isnan(got[1, :, 1]).all()
    chain = values[0, :, 1] - values[0, :, 1].mean()
    expected = [sum(chain[: 30 - k] * chain[k:]) / sum(chain**2) for k in range(7)]
    np.testing.assert_allclose(got[0, :, 1], expected, atol=1e-12)


# Figures of a trace.


def trace(num_ticks=100, **entries):
    ticks = np.arange(1, num_ticks + 1)
    plain = {
        "step_size": np.ones((1, num_ticks)),
        "energy_change": np.full((1, num_ticks), np.nan),
        "num_gradients": 10 * ticks[None],
        "num_rejected": np.zeros((1, num_ticks), int),
        "num_nonfinite": np.zeros((1, num_ticks), int),
        "below_resolution": np.zeros((1, num_ticks), bool),
        "is_draw": np.ones((1, num_ticks), bool),
    }
    return plain | entries


def test_rejection_rate_counts_from_the_first_draw():
    rejections = np.concatenate([np.arange(40) * 5, 195 + np.arange(61)[1:]])[None]
    whole = trace(num_rejected=rejections)
    assert diagnostics.rejection_rate(whole)[0] == pytest.approx((195 + 60) / 990)
    assert diagnostics.rejection_rate(whole, num_draws=60)[0] == pytest.approx(0.1)
    assert np.isnan(diagnostics.rejection_rate(whole, num_draws=1)).all()
    # Ticks that are no samples hold no draws.
    explores = np.tile(np.arange(100) < 98, (1, 1))
    got = diagnostics.rejection_rate(whole | {"is_draw": explores}, num_draws=60)
    assert got[0] == pytest.approx((5 + 58) / 590)


def test_the_trend_of_the_step_size_compares_tenths():
    sizes = np.geomspace(1, 0.01, 100)[None]
    got = diagnostics.step_size_trend(trace(step_size=sizes))[0]
    assert got == pytest.approx(np.median(sizes[0, 90:]) / np.median(sizes[0, 10:20]))
    assert diagnostics.step_size_trend(trace(1)).tolist() == [1.0]


def test_energy_fit_recovers_a_gamma_distribution_and_tells_another():
    generator = RNG(0)
    signs = generator.choice([-1, 1], size=(3, 4_000))
    energies = signs * np.stack(
        [
            generator.gamma(2.5, 0.3, size=4_000),
            generator.lognormal(0, 2, size=4_000),
            np.full(4_000, np.nan),
        ]
    )
    energies[0, :10] = np.nan
    fit = diagnostics.energy_fit(trace(energy_change=energies))
    np.testing.assert_allclose([fit.shape[0], fit.scale[0]], [2.5, 0.3], rtol=0.1)
    known = np.abs(energies[0, 10:])
    law = stats.gamma((known.mean() / known.std()) ** 2, scale=known.var() / known.mean())
    assert fit.distance[0] == pytest.approx(stats.kstest(known, law.cdf).statistic)
    assert fit.distance[0] < 0.03 < 0.3 < fit.distance[1]
    assert np.isnan([figure[2] for figure in fit]).all()


# Runs of real samplers: linear regression, whose posterior is a Gaussian.

NUM_DATA, NOISE = 40, 0.5
X = RNG(0).normal(size=(NUM_DATA, 3)).astype(np.float32)
Y = (X @ [1, -2, 0.5] + NOISE * RNG(1).normal(size=NUM_DATA)).astype(np.float32)


def mean_loss(params, batch):
    x, y = batch
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2) / (2 * NOISE**2)


def start(seed=0, num_chains=4) -> Any:
    w, b = jax.random.split(jax.random.key(seed))
    return {"w": jax.random.normal(w, (num_chains, 3)), "b": jax.random.normal(b, (num_chains,))}


def run(sampler, seed=0, loss_fn=mean_loss, params=None, **arguments):
    size = arguments.pop("batch_size", 20)
    rows = [RNG([seed, i]).choice(NUM_DATA, size, replace=False) for i in range(50)]
    defaults: dict[str, Any] = {
        "num_warmup": 195,
        "num_draws": 60,
        "thin": 15,
        "steps_per_dispatch": 15,
        "progress": False,
        "key": jax.random.key(seed),
    }
    batches = [(X[r], Y[r]) for r in rows]
    params = start(seed) if params is None else params
    return optax_smile.sample(loss_fn, params, batches, sampler, **defaults | arguments)


def predict(draws, **arguments):
    def apply_fn(params, x):
        return x @ params["w"] + params["b"], jnp.log(NOISE)

    defaults: dict[str, Any] = {"per": "draw", "targets": Y}
    return optax_smile.predict(apply_fn, draws, X, likelihood="gaussian", **defaults | arguments)


def kinds(found):
    """First words of the findings, and the chains."""
    return {(finding.problem.partition(":")[0], finding.chains) for finding in found.findings}


ALL = (0, 1, 2, 3)
OPTIONS: dict[str, Any] = {"num_data": NUM_DATA}
PUBLISHED: Any = OPTIONS | PAPER | {"integrator": "leapfrog"}
HEALTHY = {
    "smile": optax_smile.smile(
        0.05, **PUBLISHED | {"tuner": optax_smile.quantile_tuner(adapt_steps=100)}
    ),
    "psmile": optax_smile.psmile(0.05, **PUBLISHED | {"tuner": None}),
    "psmile_naive": optax_smile.psmile_naive(0.05, **OPTIONS),
    "smile_naive": optax_smile.smile_naive(0.05, decoherence_length=0.5, key=KEY, **OPTIONS),
    "sgld": optax_smile.sgld(1e-3, key=KEY, **OPTIONS),
    "sghmc": optax_smile.sghmc(0.02, friction=0.2, key=KEY, **OPTIONS),
    "cyclical_sgld": optax_smile.cyclical_sgld(
        4e-3, total_steps=1_200, num_cycles=4, key=KEY, **OPTIONS
    ),
}


@functools.cache
def healthy(name, seed):
    draws = run(HEALTHY[name], seed)
    return draws, predict(draws)


FAST = [("psmile", 0), ("smile", 0), ("sgld", 0), ("cyclical_sgld", 0)]
CASES = [(name, seed) for name in HEALTHY for seed in range(4)]


@pytest.mark.parametrize(
    ("name", "seed"),
    [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in CASES],
)
@pytest.mark.filterwarnings("ignore:`sample` kept what")
def test_nothing_is_found_in_a_healthy_run(name, seed):
    draws, prediction = healthy(name, seed)
    assert diagnostics.summary(draws).findings == ()
    found = diagnostics.summary(draws, prediction)
    assert found.findings == ()
    told = str(found).splitlines()[-1]
    share = np.mean(found.rhat_within > 1.1)
    assert told.startswith("Nothing looks wrong")
    assert share < 0.005 or f", but {share:.0%} of the R-hats within" in told
    assert found.mcse < 0.01 and np.median(found.rhat_across) < 1.1


def test_summary_holds_the_figures_of_the_other_functions():
    draws, prediction = healthy("psmile", 0)
    found = diagnostics.summary(draws, prediction, max_inputs=15, seed=1)
    assert found.rhat_within.shape == (4, 15) and found.rhat_across.shape == found.ess.shape == (
        15,
    )
    everything = diagnostics.rhat(prediction.each.mean)
    assert np.isclose(found.rhat_across[:, None], everything).any(axis=1).all()
    assert found.lppd == pytest.approx(np.mean(prediction.log_density), abs=1e-5)
    alone = np.mean(np.log(np.mean(np.exp(prediction.each.log_density[2]), axis=0)))
    assert found.chain_lppd[2] == pytest.approx(alone, abs=1e-5)
    assert found.nominal_rate == pytest.approx(0.02)
    trace: Any = draws.trace
    rejected, gradients = (
        trace[name][:, -1] - trace[name][:, -60] for name in ("num_rejected", "num_gradients")
    )
    np.testing.assert_allclose(found.rejection_rate, rejected / gradients)
    travelled = diagnostics.travel(draws.params, draws.start)[:, -1]
    np.testing.assert_allclose(found.travelled, travelled)
    rows = str(found).splitlines()
    assert len({len(row) for row in rows[:6]}) == 1 and rows[5].split()[0] == "all"


def test_a_step_size_that_falls_to_nothing_is_frozen():
    schedule = optax.polynomial_schedule(0.05, 1e-6, 2, 800)
    draws = run(optax_smile.smile_naive(schedule, **OPTIONS))
    for prediction in (None, predict(draws)):
        found = diagnostics.summary(draws, prediction)
        assert kinds(found) == {("frozen", ALL)}
        assert "All 4 chains: frozen" in str(found) and "a schedule of larger steps" in str(found)


def test_a_chain_with_steps_below_its_resolution_is_frozen():
    params = start()
    params["w"] = params["w"].at[2].set(1e8)
    draws = run(optax_smile.smile_naive(0.05, **OPTIONS), params=params)
    assert kinds(diagnostics.summary(draws)) == {("frozen", (2,))}
    found = diagnostics.summary(draws, predict(draws))
    assert kinds(found) == {("frozen", (2,)), ("diverged", (2,))}


@pytest.mark.parametrize(("adapt_rate", "kind"), [(0.02, "step size"), (0.1, "frozen")])
def test_a_tuner_that_never_ends_is_told(adapt_rate, kind):
    """The published rule has no fixed point: with noisy energies the step size falls and falls."""
    tuner = optax_smile.quantile_tuner(adapt_rate=adapt_rate)
    sampler = optax_smile.smile(0.05, **PUBLISHED | {"tuner": tuner})
    draws = run(sampler, num_warmup=480, thin=40, steps_per_dispatch=40, batch_size=1)
    # Smaller steps heat the chain less, so that its energy falls as well.
    told = {(kind, ALL)} | ({("still on its way", ALL)} if kind == "step size" else set())
    assert kinds(diagnostics.summary(draws)) == told


def double_well(params: Any, batch):
    return 5 * jnp.mean((params["w"][0] ** 2 - 1) ** 2) + 2 * params["b"] ** 2


def test_chains_in_different_modes_are_told_apart():
    params = {"w": jnp.array([1.0, -1.0, 1.0, -1.0])[:, None], "b": jnp.zeros(4)}
    sampler = optax_smile.sgld(2e-3, num_data=10, key=KEY)
    draws = run(sampler, loss_fn=double_well, params=params, check=False)

    def line(params: Any, x):
        return x * params["w"][0] + params["b"], 0.0

    prediction = optax_smile.predict(
        line,
        draws,
        X[:, 0],
        likelihood="gaussian",
        targets=np.abs(X[:, 0]),
        per="draw",
    )
    found = diagnostics.summary(draws, prediction)
    assert kinds(found) == {("different modes", ALL)}
    assert "[0, 2] and [1, 3]" in str(found) and "normal" in str(found)
    assert np.median(found.rhat_across) > 1.5
    # Weights of networks never agree: from them alone it is not told.
    assert diagnostics.summary(draws).findings == ()


def edge(params: Any, batch):
    """A well around 0 and, far from it, a slope that ends in NaN."""
    w = params["w"][0]
    return jnp.where(w < 5, w**2, 30 * jnp.sqrt(10 - w)) + jnp.sum(params["w"] ** 2) / 2


def test_a_chain_of_nonfinite_gradients_has_diverged():
    params = {"w": jnp.zeros((4, 2)).at[1, 0].set(9.9)}
    sampler = optax_smile.sgld(1e-2, num_data=10, key=KEY)
    draws = run(sampler, loss_fn=edge, params=params, check=False)
    found = diagnostics.summary(draws)
    assert ("diverged", (1,)) in kinds(found)
    assert {chains for _, chains in kinds(found)} == {(1,)}


def test_steps_far_too_large_have_diverged():
    """Steps of 1,000 drown the noise: chains fall into one orbit and may meet in it to the bit."""
    draws = run(optax_smile.smile_naive(1e3, **OPTIONS))
    found = kinds(diagnostics.summary(draws))
    assert ("diverged", ALL) in found
    assert {kind for kind, _ in found} <= {"diverged", "copies"}


def plateau(params: Any, batch):
    bump = 3 * jnp.exp(-jnp.sum(params["w"] ** 2) / 2)
    return (bump - 3) ** 2 / 2


def test_a_chain_with_a_far_lower_likelihood_has_diverged():
    params = {"w": jnp.zeros((4, 3)).at[3].set(20.0)}
    sampler = optax_smile.smile_naive(
        0.3, num_data=10, prior_precision=1e-6, decoherence_length=1.0, key=KEY
    )
    draws = run(sampler, loss_fn=plateau, params=params, check=False)

    def constant(params: Any, x):
        return 3 * jnp.exp(-jnp.sum(params["w"] ** 2) / 2) * x, 0.0

    prediction = optax_smile.predict(
        constant,
        draws,
        np.ones(10),
        likelihood="gaussian",
        targets=3 * np.ones(10),
        per="draw",
    )
    assert ("diverged", (3,)) in kinds(diagnostics.summary(draws, prediction))


def test_a_chain_still_on_its_way_is_not_settled():
    params = jax.tree.map(lambda x: x.at[1].add(10.0), start())
    draws = run(optax_smile.sgld(1e-4, key=KEY, **OPTIONS), params=params, num_warmup=0, thin=5)
    for prediction in (None, predict(draws)):
        found = diagnostics.summary(draws, prediction)
        assert any(kind == "not settled" and 1 in chains for kind, chains in kinds(found))
        assert "num_warmup" in str(found)


# Synthetic runs, for what no sampler does on demand.


def synthetic(params, trace=None, settings=None):
    """Four chains with a trace like that of one."""
    repeated = {name: np.repeat(x, 4, axis=0) for name, x in (trace or {}).items()}
    return Snapshots({"w": params}, repeated, settings, {"w": np.ones((4, params.shape[2]))})


NUM_DRAWS, NUM_INPUTS, LAST = 100, 30, slice(-40, None)


def made(**changes):
    """Four healthy chains in all that `summary` looks at, and what is changed in them."""
    shape, ones = (4, NUM_DRAWS), np.ones((4, NUM_DRAWS))
    parts: dict[str, Any] = {
        "params": 3 + autoregressive((*shape, 5), 0.2),
        "mean": autoregressive((*shape, NUM_INPUTS), 0.2, seed=1),
        "density": -1 + 0.3 * autoregressive((*shape, NUM_INPUTS), 0.2, seed=2),
        "settings": {"name": "smile", "reject_quantile": 0.98, "tuner": "some tuner"},
        "start": np.full((4, 5), 3.0),
        "step_size": ones,
        "energy_change": RNG(3).gamma(2, 1, shape),
        "num_gradients": 10 * np.cumsum(ones, axis=1).astype(int),
        "num_rejected": np.zeros(shape, int),
        "num_nonfinite": np.zeros(shape, int),
        "num_altered": np.zeros(shape, int),
        "below_resolution": np.zeros(shape, bool),
        "on_its_way": np.zeros(shape, bool),
        "is_draw": np.ones(shape, bool),
        "loss": 0.5 * ones,
        "start_loss": 0.2 * ones,
    }
    for name, change in changes.items():
        parts[name] = change(np.array(parts[name])) if callable(change) else change
    params, mean, density, settings, origin = (
        parts.pop(name) for name in ("params", "mean", "density", "settings", "start")
    )
    each = optax_smile.Outcome(mean, None, None, density)
    prediction = optax_smile.Prediction(None, None, each=each)
    return Snapshots(params, parts, settings, origin), prediction


def changed(chains, draws, values):
    """Values put into some draws of some chains."""

    def change(array):
        array[np.ix_(chains, np.arange(NUM_DRAWS)[draws])] = values
        return array

    return change


def copied(array):
    array[3] = array[1]
    return array


def outliers(array):
    """Single draws fail badly at a few inputs each, which their averages do not."""
    array[1, LAST] -= 60 * (RNG(0).random((40, NUM_INPUTS)) < 0.1)
    return array


ANY: Any = slice(None)
COUNT = np.arange(NUM_DRAWS)
SICK: dict[str, tuple[dict[str, Any], tuple[int, ...], str]] = {
    "copies": ({"params": copied}, (1, 3), r"100 of 100 draws are those .*: \[1, 3\]"),
    "copies, in the end": (
        {"params": lambda x: changed([3], LAST, x[:1, LAST])(x)},
        (0, 3),
        "40 of 100 draws are those",
    ),
    "altered": (
        {"num_altered": changed([0, 2], LAST, [[7], [9]])},
        (0, 2),
        "7 to 9 of 1000 updates",
    ),
    "diverged": (
        {"num_nonfinite": changed([1], ANY, 2 * COUNT)},
        (1,),
        r"20\.00% of the gradients",
    ),
    "diverged, far away": (
        {"params": lambda x: changed([1, 2], ANY, 40 * x[1:3])(x), "start": np.ones((4, 5))},
        (1, 2),
        r"1\d\d to 1\d\d times as large as start or prior make them \(above 10\)",
    ),
    "diverged, below others": (
        {"density": lambda x: x - 2 * np.array([0, 0, 1, 0])[:, None, None]},
        (2,),
        r"of most inputs is (1\.9\d|2|2\.0\d) nats below the other chains' \(above 0.3\)",
    ),
    "diverged, by and by": (
        {"density": lambda x: x - 0.03 * COUNT[:, None]},
        ALL,
        r"(1\.9\d|2|2\.0\d)( to .*)? nats below where it was at first",
    ),
    "frozen": ({"params": changed([2], slice(30, None), 2.0)}, (2,), "69 of 99 draws are the same"),
    "frozen, below resolution": (
        {"below_resolution": changed([3], slice(20, None), True)},
        (3,),
        "steps of 80% of the draws",
    ),
    "frozen, by its step size": (
        {"step_size": changed([0], LAST, 0.02), "mean": lambda x: changed([0], LAST, 9)(x)},
        (0,),
        r"the step size is 0.02 of the first \(below 0.1\)",
    ),
    "frozen, by its draws": (
        {
            "params": lambda x: changed([0], ANY, 3 + (x[0] - 3) / 100)(x),
            "mean": lambda x: changed([0], ANY, 0.1 * COUNT[:, None])(x),
        },
        (0,),
        r"draws are 0\.01\d+ times as far apart",
    ),
    "still on its way": (
        {"on_its_way": changed([1], slice(80, None), True)},
        (1,),
        "falling at 61% of the last draws",
    ),
    "not settled": (
        {"mean": lambda x: x + np.array([0, 0, 0.1, 0])[:, None, None] * COUNT[:, None]},
        (2,),
        r"median R-hat of \d\.\d\d \(above 1.3\)",
    ),
    "slow": (
        {"mean": autoregressive((4, NUM_DRAWS, NUM_INPUTS), 0.8)},
        ALL,
        r"\d\d% to \d\d% of the R-hats within the chain are above 1.1",
    ),
    "different modes": (
        {"mean": lambda x: x + np.array([0, 9, 0, 0])[:, None, None]},
        ALL,
        r"2 groups .* at 100% of the inputs.*: \[0, 2, 3\] and \[1\]",
    ),
    "chains differ": (
        {"mean": lambda x: x + np.array([0, 0.9, 0, 0.9])[:, None, None]},
        ALL,
        r"\d+% of the R-hats across these chains are above 1.1",
    ),
    "worse than the start": (
        {"loss": changed([1, 3], ANY, 2.2)},
        (1, 3),
        r"2 nats per example above that of the start \(above 1, and what batches differ by\)",
    ),
    "rejected steps": (
        {"num_rejected": changed([0], ANY, COUNT)},
        (0,),
        r"5 times as many as `reject_quantile` means \(above 3\)",
    ),
    "step size": ({"step_size": changed([1], LAST, 3)}, (1,), r"changed 3-fold .* \(above 2\)"),
}


def test_every_kind_of_finding_is_shown_on_a_sick_run():
    assert {name.partition(",")[0] for name in SICK} == set(ADVICE)


def test_a_first_batch_without_the_outlier_is_not_a_better_start():
    """The loss at the start is that of one batch; here every tenth has a loss of 60."""
    losses = changed([0, 1, 2, 3], slice(None, None, 10), 60.0)
    draws, prediction = made(loss=losses)
    assert (draws.trace["loss"].mean(axis=1) - draws.trace["start_loss"][:, 0] > 5).all()
    assert diagnostics.summary(draws, prediction).findings == ()


def test_nothing_is_found_in_the_healthy_run_that_they_are_made_of():
    for settings in ({"name": "smile", "reject_quantile": 0.98, "tuner": "some tuner"}, None):
        draws, prediction = made(settings=settings)
        assert diagnostics.summary(draws, prediction).findings == ()
        assert diagnostics.summary(draws).findings == ()


@pytest.mark.parametrize("name", SICK)
def test_a_sick_run_has_its_finding_alone_and_it_tells_the_number(name):
    changes, chains, message = SICK[name]
    found = diagnostics.summary(*made(**changes))
    assert kinds(found) == {(name.partition(",")[0], chains)}
    assert re.search(message, found.findings[0].problem), found.findings[0].problem


def test_a_test_that_finds_nothing_tells_its_number_too():
    shown = diagnostics.summary(*made()).passed
    assert {kind for kind, _ in shown} == set(ADVICE) - {"different modes"}
    assert ("copies", "0 of 100 draws are those of another chain, bit for bit.") in shown
    assert ("step size", "it changed 1-fold among the draws (above 2).") in shown
    assert not any("nan" in text or "inf " in text for _, text in shown)
    few = diagnostics.summary(made()[0]).passed
    assert {"slow", "chains differ"}.isdisjoint(kind for kind, _ in few)


def test_the_numbers_of_what_passed_are_those_of_chains_that_arrive():
    """Chain 1 has diverged and is not told of again, though its step size has changed."""
    changes, _, _ = SICK["diverged"]
    found = diagnostics.summary(*made(**changes, step_size=changed([1], LAST, 3)))
    assert kinds(found) == {("diverged", (1,))}
    assert ("step size", "it changed 1-fold among the draws (above 2).") in found.passed
    assert all(chains == (1,) for chains, _, _ in found.findings)
    everywhere = {"num_nonfinite": changed(ALL, ANY, 2 * COUNT)}
    assert diagnostics.summary(*made(**everywhere)).passed == ()


def test_single_draws_that_fail_at_single_inputs_are_no_divergence():
    """As on UCI energy, where the best chain was called diverged for the mean over its draws."""
    draws, prediction = made(density=outliers)
    density = prediction.each.log_density
    single, together = density.mean(axis=1), np.log(np.exp(density).mean(axis=1))
    assert single[1].mean() < single[0].mean() - 2 and together[1].mean() > together[0].mean() - 0.1
    assert diagnostics.summary(draws, prediction).findings == ()


def test_a_few_inputs_do_not_make_a_chain_diverged():
    draws, prediction = made(density=lambda x: x - 60 * (np.arange(NUM_INPUTS) == 7) * (x[1] == x))
    assert diagnostics.summary(draws, prediction).findings == ()


def test_a_chain_that_comes_closer_has_not_diverged():
    rises = 0.05 * (COUNT - NUM_DRAWS)[:, None]
    one = np.array([0, 1, 0, 0])[:, None, None]
    assert diagnostics.summary(*made(density=lambda x: x + one * rises)).findings == ()
    found = diagnostics.summary(*made(density=lambda x: x + one * (rises - 9)))
    assert kinds(found) == {("diverged", (1,))}


def test_the_trace_of_an_older_run_lacks_what_is_new():
    draws, prediction = made()
    trace: Any = {name: x for name, x in draws.trace.items() if name != "num_altered"}
    older = Snapshots(draws.params, trace, draws.settings, draws.start)
    assert diagnostics.summary(older, prediction).findings == ()


def test_copies_count_once():
    """In ESS, R-hat across chains and Monte Carlo error; nothing else is a copy's fault."""
    alone = diagnostics.summary(*made())
    same = functools.partial(jax.tree.map, lambda x: np.concatenate([x, x[:2]]))
    draws, prediction = made()
    found = diagnostics.summary(
        Snapshots(same(draws.params), same(dict(draws.trace)), draws.settings, same(draws.start)),
        prediction._replace(each=same(prediction.each)),
    )
    assert kinds(found) == {("copies", (0, 1, 4, 5))} and "[0, 4] and [1, 5]" in str(found)
    assert found.copy_of.tolist() == [0, 1, 2, 3, 0, 1]
    np.testing.assert_array_equal(found.ess, alone.ess)
    np.testing.assert_array_equal(found.rhat_across, alone.rhat_across)
    assert found.mcse == alone.mcse and "of 400 draws" in str(found)


def test_chains_from_one_weight_without_jitter_or_noise_are_copies():
    """As a loop of one's own makes them; `sample` refuses them."""
    weights = [jax.tree.map(lambda x: x[0], start())]
    one = run(HEALTHY["psmile_naive"])

    def copies(x):
        return np.repeat(x[:1], 4, axis=0)

    params, trace = jax.tree.map(copies, (one.params, dict(one.trace)))
    draws = Snapshots(params, trace, one.settings)
    for found in (diagnostics.summary(draws), diagnostics.summary(draws, predict(draws))):
        assert ("copies", ALL) in kinds(found) and "60 of 60 draws" in str(found)
    assert found.rhat_across.size == 0 and np.nanmedian(found.ess) <= 1.5 * 60
    apart = optax_smile.chains_from_weights(weights, num_chains=4, key=0)
    others = run(HEALTHY["psmile_naive"], params=apart)
    assert "copies" not in {kind for kind, _ in kinds(diagnostics.summary(others))}


def test_members_that_are_equal_are_told():
    members = jax.tree.map(lambda x: x.at[2].set(x[0]), start())
    found = diagnostics.summary(Snapshots.from_members(members))
    assert kinds(found) == {("copies", (0, 2))} and "1 of 1 draws" in str(found)


@pytest.mark.parametrize(("share", "finding"), [(0.3, True), (0.2, False)])
def test_r_hats_above_the_bound_never_stand_under_a_silent_sentence(share, finding):
    bad = np.arange(NUM_INPUTS) < share * NUM_INPUTS
    slow = autoregressive((4, NUM_DRAWS, NUM_INPUTS), 0.9)
    draws, prediction = made(mean=lambda x: np.where(bad, slow, x))
    found = diagnostics.summary(draws, prediction)
    assert bool(found.findings) == finding
    within, across = (np.mean(x > 1.1) for x in (found.rhat_within, found.rhat_across))
    if not finding:
        assert within > 0.1 and f"but {within:.0%} of the R-hats within" in str(found)
    # Weights wander: it is told, and is no finding.
    alone = diagnostics.summary(Snapshots(slow))
    told = str(alone).splitlines()[-1]
    assert alone.findings == () and re.search("weights and trace, but 8.% .* above 1.1, as", told)


TUNERS: dict[str, Any] = {"decoherence_length": None, "key": None, "num_data": 10}
CHOOSERS: dict[str, Any] = {
    "angle_tuner": optax_smile.psmile(num_data=10, key=0),
    "angle_tuner, with a step size": optax_smile.psmile(0.1, num_data=10, key=0),
    "quantile_tuner": optax_smile.smile(0.1, tuner=optax_smile.quantile_tuner(), **TUNERS),
    "quantile_tuner, published": optax_smile.published.psmile(0.1, num_data=10),
    "schedule": optax_smile.smile_naive(optax.constant_schedule(0.1), num_data=10),
    "schedule, no tuner": optax_smile.smile(optax.constant_schedule(0.1), tuner=None, **TUNERS),
    "number": optax_smile.sgld(0.1, num_data=10, key=0),
    "number, inside a chain": optax.chain(
        optax.clip(1.0), optax_smile.smile(0.1, tuner=None, **TUNERS)
    ),
}


@pytest.mark.parametrize("name", CHOOSERS)
def test_advice_fits_who_chooses_the_step_size(name):
    kind = name.partition(",")[0]
    settings = _settings.of(CHOOSERS[name], jnp.zeros(3))
    draws, _ = made(settings=settings, num_nonfinite=changed([1], ANY, 2 * COUNT))
    (finding,) = diagnostics.summary(draws).findings
    assert finding.advice.startswith(STEP_SIZES[kind]["shorter"])
    assert ("smaller step size" in finding.advice) == (kind in ("number", "quantile_tuner"))


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"name": "psmile", "tuner": None, "reject_quantile": None}, False),
        (None, False),
        ({"name": "psmile", "tuner": None, "reject_quantile": 0.98}, True),
        (_settings.of(CHOOSERS["quantile_tuner"], jnp.zeros(3)), True),
    ],
)
def test_a_gamma_fit_is_spoken_of_where_the_sampler_has_one(settings, shown):
    found = diagnostics.summary(made(settings=settings)[0])
    assert ("Gamma" in str(found)) == np.isfinite(found.energy_distance).all() == shown
    rejects = bool(settings) and settings["reject_quantile"] is not None
    assert ("rejections" in str(found)) == rejects
    some = diagnostics.summary(made(settings=settings, num_rejected=changed([0], LAST, 1))[0])
    assert "rejections: " in str(some)


def test_far_too_many_rejections():
    settings = {"name": "smile", "reject_quantile": 0.98}
    params = autoregressive((4, 100, 5))
    for per_tick, expected in ((0, set()), (0.4, set()), (0.8, {("rejected steps", ALL)})):
        rejections = np.floor(per_tick * np.arange(100))[None]
        found = diagnostics.summary(synthetic(params, trace(num_rejected=rejections), settings))
        assert kinds(found) == expected
    settings["integrator"] = "minimal_norm"
    twice = diagnostics.summary(synthetic(params, trace(), settings))
    assert twice.nominal_rate == pytest.approx(0.01)


def test_a_trend_is_told_of_tuners_and_small_steps_that_mix_are_fine():
    params, falls = autoregressive((4, 100, 5)), np.geomspace(1, 0.01, 100)[None]
    fell = trace(step_size=falls)
    assert kinds(diagnostics.summary(synthetic(params, fell, {"tuner": "x"}))) == {
        ("step size", ALL)
    }
    assert kinds(diagnostics.summary(synthetic(params, fell, {"tuner": None}))) == set()
    walk = 0.1 * np.cumsum(RNG(0).normal(size=(4, 100, 5)), axis=1)
    found = diagnostics.summary(synthetic(walk, fell, {"tuner": "x"}))
    assert kinds(found) == {("frozen", ALL)}


def test_weights_that_wander_are_no_finding_but_predictions_are():
    walk = np.cumsum(RNG(0).normal(size=(4, 100, 40)), axis=1)
    assert diagnostics.summary(synthetic(walk * 0.1)).findings == ()
    trend = walk + 2 * np.arange(100)[:, None]
    assert kinds(diagnostics.summary(synthetic(trend * 0.01))) == {("not settled", ALL)}
    draws = synthetic(walk * 0.01)
    prediction = optax_smile.predict(
        lambda params, x: (x @ params["w"], 0.0),  # pyright: ignore
        draws,
        RNG(1).normal(size=(30, 40)),
        likelihood="gaussian",
        targets=np.zeros(30),
        per="draw",
    )
    found = diagnostics.summary(draws, prediction)
    assert {kind for kind, _ in kinds(found)} >= {"not settled"}


def test_a_chain_much_slower_than_the_others_is_frozen():
    params = autoregressive((4, 100, 5))
    params[1] = 0.01 * np.cumsum(params[1], axis=0)
    assert kinds(diagnostics.summary(synthetic(params))) == {("frozen", (1,))}
    params[1] = 3.0
    found = diagnostics.summary(synthetic(params))
    assert kinds(found) == {("frozen", (1,))} and "99 of 99 draws are the" in str(found)


def test_weights_without_a_sampler_get_a_short_summary():
    members = Snapshots.from_members(start())
    bare = str(diagnostics.summary(members))
    assert "step size" not in bare and "Nothing looks wrong" in bare
    found = diagnostics.summary(members, predict(members))
    assert np.isfinite(found.chain_lppd).all() and np.isnan(found.mcse)
    assert "LPPD" in str(found) and "trend" not in str(found)


@pytest.mark.parametrize("num_draws", [1, 2, 4, 7, 8])
def test_runs_of_few_draws_are_summarized(num_draws):
    draws, prediction = healthy("psmile", 0)
    last = functools.partial(jax.tree.map, lambda x: x[:, -num_draws:])
    few = Snapshots(last(draws.params), dict(draws.trace), draws.settings, draws.start)
    for one in (None, prediction._replace(each=last(prediction.each))):
        found = diagnostics.summary(few, one)
        assert found.findings == () and str(found)
        assert np.isfinite(found.rhat_within).any() == (num_draws >= 8)


def test_one_chain_and_impossible_targets_are_summarized():
    draws, prediction = healthy("sgld", 0)
    first = functools.partial(jax.tree.map, lambda x: x[:1])
    prediction = prediction._replace(each=first(prediction.each))
    draws = Snapshots(first(draws.params), first(dict(draws.trace)), draws.settings)
    density = prediction.each.log_density.copy()
    density[:, :, 0] = -np.inf
    for one in (
        prediction,
        prediction._replace(each=prediction.each._replace(log_density=density)),
    ):
        found = diagnostics.summary(draws, one)
        assert found.findings == () and found.rhat_across.size == 0 and str(found)


def test_stored_draws_are_summarized(tmp_path):
    draws, prediction = healthy("psmile", 0)
    stored = run(HEALTHY["psmile"], directory=tmp_path)
    got, expected = (diagnostics.summary(one, prediction) for one in (stored, draws))
    np.testing.assert_array_equal(got.rejection_rate, expected.rejection_rate)
    np.testing.assert_array_equal(got.travelled, expected.travelled)
    assert str(got) == str(expected)


def test_tokens_leave_padding_out():
    labels = np.array([[0, 1, -1], [1, -1, -1]])
    draws = Snapshots(autoregressive((2, 40, 2)))

    def logits(params: Any, x):
        return jnp.broadcast_to(params, (*x.shape, 2))

    prediction = optax_smile.predict(
        logits,
        draws,
        labels,
        likelihood="tokens",
        targets=labels,
        per="draw",
    )
    found = diagnostics.summary(draws, prediction)
    assert found.rhat_within.shape == (2, 3)
    assert found.lppd == pytest.approx(np.sum(prediction.log_density) / 3, rel=1e-5)


def test_arviz_reads_a_run():
    draws, prediction = healthy("sgld", 0)
    told = diagnostics.to_arviz(draws, prediction)
    assert set(told.posterior.data_vars) == {"w", "b"}
    np.testing.assert_array_equal(told.posterior["w"].values, draws.params["w"])
    np.testing.assert_array_equal(
        told.sample_stats["step_size"].values, draws.trace["step_size"][:, -60:]
    )
    assert {"energy_error", "num_rejected"} <= set(told.sample_stats.data_vars)
    np.testing.assert_allclose(
        told.log_likelihood["target"].values, prediction.each.log_density, rtol=1e-6
    )
    assert arviz.summary(told, var_names=["b"]).shape[0] == 1
    nested = Snapshots({"layer": {"w": np.zeros((5, 2, 3))}, "a/b": [np.ones((5, 2))]})
    told = diagnostics.to_arviz(nested)
    assert set(told.posterior.data_vars) == {"layer.w", "a~1b.0"}
    assert set(diagnostics.to_arviz(Snapshots(np.zeros((2, 5)))).posterior.data_vars) == {"params"}
    twins = Snapshots(
        {"a.b": np.zeros((2, 5)), "a/b": np.zeros((2, 5)), "a": {"b": np.ones((2, 5))}}
    )
    told = diagnostics.to_arviz(twins).posterior
    assert set(told.data_vars) == {"a~2b", "a~1b", "a.b"} and np.all(told["a.b"] == 1)


# Wrong arguments.

GOOD = np.zeros((2, 8, 3))
NAN = np.where(np.arange(8)[:, None] == 5, np.nan, GOOD)
WRONG = {
    "rhat values": [np.zeros(4), np.zeros((2, 3, 1)), np.zeros((1, 8)), np.zeros((2, 0)), NAN],
    "rhat_within values": [np.zeros(8), np.zeros((2, 7)), NAN],
    "ess values": [np.zeros(4), np.zeros((2, 3)), NAN],
    "mcse_lppd log_likelihood": [np.zeros((2, 8)), np.zeros((2, 3, 4)), NAN, GOOD - np.inf],
    "weight_rhat params": [
        {},
        GOOD[:0],
        {"a": GOOD, "b": GOOD[:1]},
        GOOD[:, :7] + RNG(0).normal(),
        NAN,
    ],
    "disagreement mean": [np.zeros((2, 3)), np.zeros((2, 3, 4, 5, 6)), NAN],
    "autocorrelation values": [np.zeros(4), np.zeros((2, 1)), NAN],
    "rejection_rate trace": [{}, {"num_gradients": np.ones((1, 2))}],
    "step_size_trend trace": [{}],
    "energy_fit trace": [{}],
}
REST: dict[str, tuple] = {"autocorrelation": (0,)}


@pytest.mark.parametrize(
    ("function", "argument", "value"),
    [(*names.split(), value) for names, values in WRONG.items() for value in values],
)
def test_wrong_values_name_the_argument(function, argument, value):
    if function == "weight_rhat" and np.shape(value) == (2, 7, 3):
        value = autoregressive((2, 7, 3))
    with pytest.raises(ValueError, match=rf"^`({function}|Snapshots)\({argument}=...\)` must "):
        getattr(diagnostics, function)(value, *REST.get(function, ()))


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: diagnostics.ess(GOOD, "local"), "method"),
        (lambda: diagnostics.weight_rhat(GOOD, num_weights=0), "num_weights"),
        (lambda: diagnostics.weight_rhat(GOOD, seed=-1), "seed"),
        (lambda: diagnostics.travel(GOOD, GOOD), "start"),
        (lambda: diagnostics.travel({"a": GOOD}, {"b": GOOD[:, 0]}), "start"),
        (lambda: diagnostics.disagreement(np.zeros((2, 3)), classes=False), "mean"),
        (lambda: diagnostics.autocorrelation(GOOD, 8), "max_lag"),
        (lambda: diagnostics.autocorrelation(GOOD, -1), "max_lag"),
        (lambda: diagnostics.summary(Snapshots(GOOD), max_inputs=0), "max_inputs"),
        (lambda: diagnostics.summary(Snapshots(GOOD), seed=-1), "seed"),
    ],
)
def test_wrong_arguments_are_named(call, argument):
    with pytest.raises(ValueError, match=rf"\({argument}=...\)` must be "):
        call()


def test_a_prediction_must_be_by_draw_with_targets_of_these_draws():
    draws, _ = healthy("sgld", 0)
    for arguments in ({"per": None}, {"per": "chain"}, {"targets": None}):
        with pytest.raises(ValueError, match=r"^`summary\(prediction=...\)` must be .*per=.draw"):
            diagnostics.summary(draws, predict(draws, **arguments))
    other = Snapshots(jax.tree.map(lambda x: x[:, 1:], draws.params))
    with pytest.raises(ValueError, match=r"^`to_arviz\(prediction=...\)` must be .*per=.draw"):
        diagnostics.to_arviz(draws, predict(other))


def test_without_arviz_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "arviz", None)
    with pytest.raises(ImportError, match=r"pip install 'optax-smile\[diagnostics\]'"):
        diagnostics.rhat(GOOD)
    members = Snapshots.from_members(start())
    assert diagnostics.summary(members, predict(members)).num_draws == 1
