"""The Bayesian model average against averages over everything at once, in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas
import pytest
import scipy.special
import scipy.stats
from runs import Tensor, refused

import optax_smile

GENERATOR = np.random.default_rng(0)
CHAINS, DRAWS, NUM_INPUTS, CLASSES = 4, 25, 30, 5
WEIGHTS = GENERATOR.normal(size=(CHAINS, DRAWS, 3, CLASSES)).astype(np.float32) * 3
LOG_STD = GENERATOR.normal(size=(CHAINS, DRAWS)).astype(np.float32)
INPUTS = GENERATOR.normal(size=(NUM_INPUTS, 3)).astype(np.float32)
LABELS = GENERATOR.integers(0, CLASSES, NUM_INPUTS)
TARGETS = GENERATOR.normal(size=NUM_INPUTS).astype(np.float32)
SNAPSHOTS = optax_smile.Snapshots({"w": WEIGHTS, "log_std": LOG_STD})
ONE = [{"w": WEIGHTS[0, 0], "log_std": LOG_STD[0, 0]}]
# Float64 [chain, draw, input, class].
LOGITS = np.einsum("ij,cdjk->cdik", INPUTS.astype(float), WEIGHTS.astype(float))
LOG_PROBABILITIES = scipy.special.log_softmax(LOGITS, axis=-1)
CHOSEN = LOG_PROBABILITIES[..., np.arange(NUM_INPUTS), LABELS]
# In the order of snapshots: the first draw of each chain, then the second draws.
IN_ORDER = LOG_PROBABILITIES.swapaxes(0, 1).reshape(-1, NUM_INPUTS, CLASSES)


def apply_fn(params: Any, inputs) -> Any:
    return inputs @ params["w"]


def predict(outputs, snapshots, likelihood, targets=None, inputs: Any = INPUTS, **arguments):
    """Average models whose outputs are a function of parameters and inputs."""
    return optax_smile.predict(
        outputs, snapshots, inputs, likelihood=likelihood, targets=targets, **arguments
    )


def classify(**arguments):
    return predict(apply_fn, SNAPSHOTS, "categorical", LABELS, **arguments)


def entropy(probabilities):
    return scipy.special.entr(probabilities).sum(-1)


def log_mean(log_density, axis):
    count = np.prod([log_density.shape[i] for i in np.atleast_1d(axis)])
    return scipy.special.logsumexp(log_density, axis=axis) - np.log(count)


def assert_average(got, log_probabilities):
    """A prediction is the average over log probabilities `[snapshot, input, class]`."""
    probabilities = np.exp(log_probabilities)
    average = probabilities.mean(0)
    np.testing.assert_allclose(got.mean, average, atol=1e-6)
    density = log_mean(log_probabilities[:, np.arange(NUM_INPUTS), LABELS], 0)
    np.testing.assert_allclose(got.log_density, density, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got.total, entropy(average), atol=1e-5)
    np.testing.assert_allclose(got.aleatoric, entropy(probabilities).mean(0), atol=1e-5)
    np.testing.assert_allclose(got.epistemic, got.total - got.aleatoric, atol=1e-6)
    assert np.all(got.epistemic >= 0) and got.uncertainty == "entropy"


def test_categorical_equals_the_average_over_everything_at_once():
    got = classify(per="draw", batch_size=7)
    assert_average(got, IN_ORDER)
    probabilities = np.exp(LOG_PROBABILITIES)
    np.testing.assert_allclose(got.each.mean, probabilities, atol=1e-5)
    np.testing.assert_allclose(got.each.log_density, CHOSEN, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got.each.entropy, entropy(probabilities), atol=1e-5)
    # Each chain alone.
    got, average = classify(per="chain").each, probabilities.mean(1)
    np.testing.assert_allclose(got.mean, average, atol=1e-6)
    np.testing.assert_allclose(got.entropy, entropy(average), atol=1e-5)
    np.testing.assert_allclose(got.log_density, log_mean(CHOSEN, 1), rtol=1e-5, atol=1e-5)


def test_in_pieces_by_one_program_in_constant_memory():
    """More snapshots may follow a prediction; nothing is compiled or kept for them."""
    traced, held = [], []

    def counted(params, inputs):
        traced.append(len(inputs))
        return apply_fn(params, inputs)

    given: dict[str, Any] = {"likelihood": "categorical", "targets": LABELS, "batch_size": 10}
    predictor = optax_smile.Predictor(counted, INPUTS, **given)
    for count, params in enumerate(SNAPSHOTS, start=1):
        predictor.update(params)
        held.append(sum(x.nbytes for x in jax.live_arrays()))
        if count == 8:
            assert_average(predictor.finalize(), IN_ORDER[:8])
            after_eight = len(traced)
    assert_average(predictor.finalize(), IN_ORDER)
    assert max(held[2:]) <= held[2]
    predictor.restart()
    for params in SNAPSHOTS[:8]:
        predictor.update(params)
    assert_average(predictor.finalize(), IN_ORDER[:8])
    assert len(traced) == after_eight and set(traced) <= {NUM_INPUTS, 10} and 10 in traced


def test_gaussian():
    def outputs(params, x):
        return (x @ params["w"])[:, 0], params["log_std"]

    got = predict(outputs, SNAPSHOTS, "gaussian", TARGETS, per="chain")
    means, std = LOGITS[..., 0], np.exp(LOG_STD.astype(float))[..., None]
    densities = scipy.stats.norm.logpdf(TARGETS, means, std)
    np.testing.assert_allclose(got.mean, means.mean((0, 1)), atol=1e-5)
    np.testing.assert_allclose(got.log_density, log_mean(densities, (0, 1)), rtol=1e-5, atol=1e-5)
    aleatoric = np.full(NUM_INPUTS, (std**2).mean())
    np.testing.assert_allclose(got.aleatoric, aleatoric, rtol=1e-5)
    np.testing.assert_allclose(got.epistemic, means.var((0, 1)), rtol=1e-5)
    np.testing.assert_allclose(got.total, aleatoric + means.var((0, 1)), rtol=1e-5)
    assert got.uncertainty == "variance"
    of_chains = (std**2).mean(1) + means.var(1)
    np.testing.assert_allclose(got.each.variance, of_chains, rtol=1e-5)


def test_log_densities_of_several_outputs_are_summed():
    """Labels of any type: of unsigned ones nothing can be subtracted."""
    targets, two = GENERATOR.normal(size=(2, NUM_INPUTS, 2)).astype(np.float32)
    log_stds, labels = [np.array([0.0, 1.0], np.float32)], (two > 0).astype(np.uint8)
    pair = predict(lambda params, x: (x[:, :2], params[None]), log_stds, "gaussian", targets)
    logits = predict(lambda params, x: x[:, :2], ONE, "bernoulli", labels)
    for got, expected in (
        (pair, scipy.stats.norm.logpdf(targets, INPUTS[:, :2], [[1, np.e]])),
        (logits, -np.logaddexp(0, np.where(labels == 1, -1, 1) * INPUTS[:, :2])),
    ):
        np.testing.assert_allclose(got.log_density, expected.sum(1), rtol=1e-5)
        assert got.total.shape == (NUM_INPUTS, 2)


def test_bernoulli():
    labels = LABELS % 2 == 1
    got = predict(lambda params, x: apply_fn(params, x)[:, 0], SNAPSHOTS, "bernoulli", labels)
    both = np.stack([scipy.special.expit(sign * LOGITS[..., 0]) for sign in (-1, 1)], axis=-1)
    average = both.mean((0, 1))
    np.testing.assert_allclose(got.mean, average[:, 1], atol=1e-6)
    expected = np.log(np.where(labels, average[:, 1], average[:, 0]))
    np.testing.assert_allclose(got.log_density, expected, atol=1e-5)
    np.testing.assert_allclose(got.total, entropy(average), atol=1e-5)
    np.testing.assert_allclose(got.aleatoric, entropy(both).mean((0, 1)), atol=1e-5)


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
def test_tempered_densities_are_those_of_the_mean_and_follow_without_targets(likelihood):
    is_binary, rows = likelihood == "bernoulli", np.arange(NUM_INPUTS)
    outputs = (lambda params, x: apply_fn(params, x)[:, 0]) if is_binary else apply_fn
    labels = LABELS % 2 if is_binary else LABELS
    whole = predict(outputs, SNAPSHOTS, likelihood, labels, per="draw")
    for temperature in (0.5, 1.0, 3.0):
        found, back = (
            whole.tempered(temperature),
            whole.tempered(temperature).tempered(1 / temperature),
        )
        both = np.stack([1 - found.mean, found.mean], axis=1) if is_binary else found.mean
        np.testing.assert_allclose(found.log_density, np.log(both[rows, labels]), rtol=1e-4)
        assert optax_smile.metrics.score(found, labels)["LPPD"] == found.log_density.mean()
        for got, expected in zip(back[:3], whole[:3], strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)
        assert found.each is whole.each


def test_padding_is_nan_in_every_prediction_and_counts_in_no_score():
    """In batches, with each value of `per`, and with any outputs of the model for padding."""
    tokens, inputs = LABELS.reshape(6, 5).copy(), INPUTS.reshape(6, 5, 3)
    tokens[2, 3:] = -1
    tokens[4] = -1

    def logits(params, x):
        return jnp.where(x[..., :1] == inputs[4:5, :, :1], jnp.nan, x @ params["w"][None])

    def log_density(x, y):
        chosen = jnp.take_along_axis(jax.nn.log_softmax(x), abs(y)[..., None], -1)[..., 0]
        return jnp.where(y < 0, 7.0, chosen)

    own = optax_smile.Likelihood(None, log_density, has_target=lambda y: y >= 0)
    density = CHOSEN.reshape(CHAINS, DRAWS, 6, 5)
    for likelihood, batch_size in (("tokens", None), (own, 4)):
        for per, found_of in (("draw", density), ("chain", log_mean(density, 1))):
            given: dict[str, Any] = {"per": per, "batch_size": batch_size}
            got = predict(logits, SNAPSHOTS, likelihood, tokens, inputs, **given)
            for found, expected in (
                (got.log_density, log_mean(density, (0, 1))),
                (got.each.log_density, found_of),
            ):
                expected = np.where(tokens < 0, np.nan, expected)
                np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        assert got.mean is None and got.total is None and got.uncertainty is None
        lppd = np.nanmean(np.where(tokens < 0, np.nan, log_mean(density, (0, 1))))
        assert optax_smile.metrics.lppd(got.log_density) == pytest.approx(lppd, abs=1e-5)
        score = optax_smile.metrics.score(got, tokens)
        assert score == {"perplexity": pytest.approx(np.exp(-lppd), rel=1e-5)}
        assert f"mean {lppd:.4f}" in repr(got)
    rule = r"targets=...\)` must be one target .*got padding alone"
    refused(rule, predict, logits, SNAPSHOTS[:1], "tokens", tokens * 0 - 1, inputs)


def test_a_likelihood_of_ones_own_and_a_generator_without_targets():
    likelihood = optax_smile.Likelihood(
        mean=jax.nn.sigmoid, log_density=lambda logits, y: jax.nn.log_sigmoid((2 * y - 1) * logits)
    )
    got = predict(apply_fn, ({"w": w} for w in WEIGHTS[0, :3]), likelihood)
    np.testing.assert_allclose(got.mean, scipy.special.expit(LOGITS[0, :3]).mean(0), atol=1e-6)
    assert got.log_density is None and got.total is None


def test_extreme_log_densities_do_not_underflow():
    params = [{"w": jnp.tile(100.0 * jnp.arange(5), (3, 1))}] * 3
    got = predict(apply_fn, params, "categorical", np.array([0]), jnp.ones((1, 3)))
    np.testing.assert_allclose(got.log_density, [-1200.0], rtol=1e-6)
    # A target that is impossible under one draw or all is no error.
    likelihood = own(log_density=lambda outputs, _: jnp.log(outputs))
    draws = [jnp.array([0.0, 0.0]), jnp.array([0.5, 0.0])]
    got = predict(lambda params, x: params * x, draws, likelihood, np.zeros(2), jnp.ones(2))
    np.testing.assert_allclose(got.log_density, [np.log(0.25), -np.inf])


def own(**fields):
    """A likelihood that takes outputs for means and reads nothing else."""
    whole: dict[str, Any] = {"mean": lambda x: x, "log_density": lambda x, _: x}
    return optax_smile.Likelihood(**whole | fields)


def test_half_precision_outputs_are_averaged_in_full_precision():
    def rounded(dtype):
        def outputs(params, x):
            return apply_fn(params, x).astype(jnp.bfloat16).astype(dtype)

        return predict(outputs, SNAPSHOTS[:8], "categorical", LABELS)[:5]

    for half, full in zip(rounded(jnp.bfloat16), rounded(jnp.float32), strict=True):
        np.testing.assert_allclose(half, full, rtol=1e-7, atol=1e-7)
        assert half.dtype == np.float32


def test_averages_of_any_scale_join_as_if_they_were_one():
    rng, count = np.random.default_rng(0), 48
    scale = 10 ** rng.uniform(-2, 2, count)
    values = (scale * (10 + rng.normal(size=(40, count)))).astype(np.float32)
    log_std = np.log(scale).astype(np.float32)
    draws = optax_smile.Snapshots(np.arange(40).reshape(20, 2).T)
    targets = (scale * (10 + 5 * rng.normal(size=count))).astype(np.float32)

    def outputs(number, x):
        return jnp.asarray(values)[number, x], jnp.asarray(log_std)[x]

    got = predict(outputs, draws, "gaussian", targets, np.arange(count), batch_size=20)
    exact = values.astype(float)
    np.testing.assert_allclose(got.mean, exact.mean(0), rtol=1e-6)
    np.testing.assert_allclose(got.aleatoric, scale**2, rtol=1e-5)
    np.testing.assert_allclose(got.epistemic, exact.var(0), rtol=1e-4)
    density = log_mean(scipy.stats.norm.logpdf(targets, exact, np.exp(log_std.astype(float))), 0)
    np.testing.assert_allclose(got.log_density, density, rtol=1e-5, atol=1e-5)


def test_means_far_from_zero_keep_their_digits():
    """A running mean without compensation is off by up to 20 standard errors here."""
    center, spread = np.array([100, 1e4, 1e6]), np.array([0.1, 0.1, 1])
    noise = np.random.default_rng(1).normal(size=(5_000, 3))
    values = (center + spread * noise).astype(np.float32)
    got = predict(lambda params, x: (x * params, 0.0), values, "gaussian", inputs=np.ones(3, "f4"))
    exact = values.astype(float)
    half_ulp = np.spacing(center.astype(np.float32)) / 2
    assert np.all(abs(got.mean - exact.mean(0)) <= 1.01 * half_ulp)
    # The variance is about the rounded mean, whose error is at most a hundredth of the spread.
    np.testing.assert_allclose(got.epistemic, exact.var(0), rtol=1e-3)
    # Double precision is kept.
    values = noise[:50, 0] + 1e6
    with jax.enable_x64(True):
        got = predict(lambda params, x: (x * params, 0.0), values, "gaussian", inputs=np.ones(1))
    np.testing.assert_allclose(got.mean, values.mean(), rtol=1e-15)
    np.testing.assert_allclose(got.epistemic, values.var(), rtol=1e-9)


def with_nan(*places):
    weights = WEIGHTS.copy()
    for chain, draw in places:
        weights[chain, draw, 0, 0] = np.nan
    return optax_smile.Snapshots({"w": weights})


class Draws(list):
    """A user's own container of snapshots."""

    num_chains = 2


MISFITS = (
    ("snapshots", [], "at least one parameter tree, got none"),
    ("snapshots", with_nan((2, 7), (0, 9)), "got nan, inf .* < 0 from chain 2, draw 7. Leave"),
    ("snapshots", [*ONE, ONE[0] | {"w": WEIGHTS[0, 0, :2]}], r"the first one \(this is snapshot"),
    ("targets", LABELS + 1, "classes from 0 to 4, got 1 to 5"),
    ("targets", LABELS * 1.0, r"integers of shape \(30,\), got float64"),
    ("likelihood", own(mean=None, variance=jnp.ones_like), "a `Likelihood` with a `mean`, because"),
    ("likelihood", own(log_density=None), "with a `log_density` for the targets"),
    ("likelihood", own(variance=lambda x: x[:, :1]), r"has the shape \(30, 5\) of its mean, got"),
    ("likelihood", own(mean=jnp.mean), "one that returns arrays .* of 30 inputs"),
    ("snapshots", Draws(ONE), "the same number of draws of each of the 2 chains, got 1"),
    ("per", "draw", r"None for snapshots without `num_chains`.* `Snapshots.from_draws\(snap"),
    # XLA may turn NaN into ordinary numbers, which no check of the outputs would find.
    ("inputs", np.where(INPUTS == INPUTS[3, 1], np.nan, INPUTS), "finite, got nan or inf at"),
)
# For each likelihood: outputs and targets that it rejects.
BROKEN = "got nan, inf or a variance < 0 from snapshot 0"
PAIRS = r"at most one log density for each of the 30 targets, got shape \(30, 30\). Targets \[inp"
OUTPUTS: Any = (
    ("gaussian", lambda x: (x[:, :1], 0.0), TARGETS, r"of the mean, \(30, 1\), got \(30,\)"),
    ("gaussian", lambda x: (x[:, 0], jnp.zeros(7)), TARGETS, "broadcasts to it, got the shapes"),
    ("gaussian", lambda x: (x[:, 0] + 1j, 0.0), TARGETS, "real predictions, got complex64"),
    ("gaussian", lambda x: x[:2], TARGETS, r"a pair \(mean, log_std\) for 'gaussian'"),
    ("gaussian", lambda x: (x[:, 0], 0.0), np.where(LABELS == 2, np.nan, 1), "finite, got nan"),
    ("bernoulli", lambda x: x, LABELS % 2, r"of the mean, \(30, 3\), got \(30,\)"),
    ("bernoulli", lambda x: (x, x), LABELS % 2, "one logit per target for 'bernoulli'"),
    ("bernoulli", lambda x: x[:, 0], np.full(NUM_INPUTS, 2), "0 or 1, got 2"),
    ("tokens", lambda x: x, LABELS, r"returns logits \[inp.* for 'tokens', got"),
    ("tokens", lambda x: x[:, None], np.full((30, 1), -100), "from -1 to 2, got -100 to -100"),
    (own(variance=lambda x: jnp.full_like(x, jnp.nan)), lambda x: x[:, 0], TARGETS, BROKEN),
    (own(log_density=lambda x, _: jnp.full_like(x, jnp.inf)), lambda x: x[:, 0], TARGETS, BROKEN),
    (own(variance=lambda x: -abs(x)), lambda x: x[:, 0], TARGETS, BROKEN),
    (own(log_density=lambda x, y: -((x - y[None]) ** 2)), lambda x: x[:, :1], TARGETS, PAIRS),
)


def test_inputs_and_targets_are_what_numpy_reads():
    """Foreign byte orders, data frames and tensors."""
    expected = classify().log_density
    for of_inputs, of_targets in (
        (lambda x: x.astype(x.dtype.newbyteorder()),) * 2,
        (pandas.DataFrame, pandas.Series),
        (Tensor, Tensor),
    ):
        given: Any = SNAPSHOTS, "categorical", of_targets(LABELS), of_inputs(INPUTS)
        np.testing.assert_array_equal(predict(apply_fn, *given).log_density, expected)
    given = apply_fn, SNAPSHOTS, "categorical"
    rule = r"^`predict\(inputs=...\)` must be .*, got "
    refused(rule, predict, *given, inputs=INPUTS.astype("M8[s]"))
    hidden = np.ma.masked_array(LABELS, LABELS > 2)
    refused(r"^`predict\(targets=...\)` must be .*masked", predict, *given, hidden)


def test_snapshots_are_what_numpy_reads():
    """Foreign byte orders, tensors and half precision, as a list and as `Snapshots`."""
    expected = classify().mean
    for turned in (lambda x: np.asarray(x).astype(">f4"), lambda x: Tensor(np.asarray(x))):
        foreign = [jax.tree.map(turned, draw) for draw in SNAPSHOTS]
        np.testing.assert_array_equal(predict(apply_fn, foreign, "categorical").mean, expected)
    whole = jax.tree.map(lambda *x: np.stack(x).astype(">f4"), *SNAPSHOTS)
    kept = optax_smile.Snapshots
    for each in kept.from_members(whole), kept.from_draws(whole), kept({"w": whole["w"][None]}):
        np.testing.assert_array_equal(predict(apply_fn, each, "categorical").mean, expected)
    rule = r"^`predict\(snapshots=...\)` must be .*, got .*masked"
    refused(rule, predict, apply_fn, [np.ma.masked_array([1.0], [True])], "categorical")


def test_integers_that_jax_would_wrap_are_refused():
    """JAX makes 2**32 a 0 if x64 is off."""

    def rows_of(rows, targets=None):
        outputs, table = (lambda params, x: (params[x % 3], 0.0)), np.arange(3, dtype=np.float32)
        return predict(outputs, [table], "gaussian", targets, rows).mean.tolist()

    rows = np.arange(5)
    for first, kind in ((2**31 - 5, np.int64), (2**32 - 5, np.uint64), (-(2**31), np.int64)):
        fitting = rows.astype(kind) + kind(first)
        assert rows_of(fitting) == (fitting % 3).tolist()
    for wide in (rows + 2**32, rows.astype(np.uint64) + np.uint64(2**63), -rows - 2**31):
        rule = rf"^`predict\(inputs=...\)`.* {wide[-1]} .*Map identifiers .*enable_x64"
        refused(rule, rows_of, wide)
        with jax.enable_x64(True):
            assert rows_of(wide) == (wide % 3).tolist()
    refused(r"^`predict\(targets=...\)` .* \(beyond int32", rows_of, rows, np.full(5, 2**31))


def test_what_does_not_fit_is_named():
    valid: dict[str, Any] = {"snapshots": SNAPSHOTS, "targets": LABELS, "outputs": apply_fn}
    for argument, value, message in MISFITS:
        given = valid | {"likelihood": "categorical", argument: value}
        if argument == "per":
            given["snapshots"] = iter(SNAPSHOTS)
        if isinstance(value, Draws):
            given["per"] = "chain"
        refused(rf"`predict\({argument}=...\)` must be .*{message}", predict, **given)
    for likelihood, outputs, targets, message in OUTPUTS:
        rule = r"`predict\(\w+=...\)` must be .*" + message
        refused(rule, predict, lambda _, x, of=outputs: of(x), ONE, likelihood, targets)
