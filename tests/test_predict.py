import functools
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

import optax_smile
from optax_smile.draws import _average

GENERATOR = np.random.default_rng(0)
CHAINS, DRAWS, INPUTS_COUNT, CLASSES = 4, 25, 30, 5
WEIGHTS = GENERATOR.normal(size=(CHAINS, DRAWS, 3, CLASSES)).astype(np.float32) * 3
LOG_STD = GENERATOR.normal(size=(CHAINS, DRAWS)).astype(np.float32)
INPUTS = GENERATOR.normal(size=(INPUTS_COUNT, 3)).astype(np.float32)
LABELS = GENERATOR.integers(0, CLASSES, INPUTS_COUNT)
TARGETS = GENERATOR.normal(size=INPUTS_COUNT).astype(np.float32)
SNAPSHOTS = optax_smile.Snapshots({"w": WEIGHTS, "log_std": LOG_STD})


def apply_fn(params: Any, inputs) -> Any:
    return inputs @ params["w"]


def mean_and_log_std(params, inputs):
    return (inputs @ params["w"])[:, 0], params["log_std"]


def classify(snapshots: Any = SNAPSHOTS, inputs=INPUTS, targets: Any = LABELS, **arguments):
    return optax_smile.predict(
        apply_fn, snapshots, inputs, likelihood="categorical", targets=targets, **arguments
    )


@functools.cache
def classified(**arguments):
    """What several tests compare with."""
    return classify(**arguments)


def in_memory():
    """All log probabilities at once `[chain, draw, input, class]`, float64."""
    logits = np.einsum("ij,cdjk->cdik", INPUTS.astype(float), WEIGHTS.astype(float))
    return scipy.special.log_softmax(logits, axis=-1)


def entropy(probabilities):
    return scipy.special.entr(probabilities).sum(-1)


def assert_equal(got, expected, tolerance=2e-6):
    """Leaf by leaf, None alike."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        if isinstance(theirs, str):
            assert mine == theirs
            continue
        np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance)


def test_categorical_equals_the_average_over_everything_at_once():
    got, log_probabilities = classified(per="draw"), in_memory()
    probabilities = np.exp(log_probabilities)
    chosen = log_probabilities[:, :, np.arange(INPUTS_COUNT), LABELS]
    average = probabilities.mean((0, 1))
    np.testing.assert_allclose(got.mean, average, atol=1e-6)
    expected = scipy.special.logsumexp(chosen, axis=(0, 1)) - np.log(CHAINS * DRAWS)
    np.testing.assert_allclose(got.log_density, expected, atol=1e-5)
    np.testing.assert_allclose(got.total, entropy(average), atol=1e-5)
    np.testing.assert_allclose(got.aleatoric, entropy(probabilities).mean((0, 1)), atol=1e-5)
    np.testing.assert_allclose(got.epistemic, got.total - got.aleatoric, atol=1e-6)
    assert np.all(got.epistemic > 0.01)
    np.testing.assert_allclose(got.each.mean, probabilities, atol=1e-5)
    np.testing.assert_allclose(got.each.log_density, chosen, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got.each.entropy, entropy(probabilities), atol=1e-5)


def test_each_chain_alone():
    got = classify(per="chain").each
    for chain in range(CHAINS):
        alone = classify({"w": w} for w in WEIGHTS[chain])
        expected = _average.Outcome(alone.mean, None, alone.total, alone.log_density)
        assert_equal(jax.tree.map(lambda x, chain=chain: x[chain], got), expected, 1e-5)


def test_gaussian():
    got = optax_smile.predict(
        mean_and_log_std, SNAPSHOTS, INPUTS, likelihood="gaussian", targets=TARGETS, per="chain"
    )
    means = np.einsum("ij,cdj->cdi", INPUTS.astype(float), WEIGHTS[..., 0].astype(float))
    std = np.exp(LOG_STD.astype(float))[..., None]
    densities = scipy.stats.norm.logpdf(TARGETS, means, std)
    np.testing.assert_allclose(got.mean, means.mean((0, 1)), atol=1e-5)
    expected = scipy.special.logsumexp(densities, axis=(0, 1)) - np.log(CHAINS * DRAWS)
    np.testing.assert_allclose(got.log_density, expected, rtol=1e-5, atol=1e-5)
    aleatoric = np.full(INPUTS_COUNT, (std**2).mean())
    np.testing.assert_allclose(got.aleatoric, aleatoric, rtol=1e-5)
    np.testing.assert_allclose(got.epistemic, means.var((0, 1)), rtol=1e-5)
    np.testing.assert_allclose(got.total, aleatoric + means.var((0, 1)), rtol=1e-5)
    of_chains = (std**2).mean(1) + means.var(1)
    np.testing.assert_allclose(got.each.variance, of_chains, rtol=1e-5)


def test_gaussian_of_several_outputs_sums_their_log_densities():
    targets = GENERATOR.normal(size=(INPUTS_COUNT, 2)).astype(np.float32)

    def apply_fn(params: Any, inputs):
        return inputs[:, :2], params["log_std"][None]

    got = optax_smile.predict(
        apply_fn,
        [{"log_std": np.array([0.0, 1.0], np.float32)}],
        INPUTS,
        likelihood="gaussian",
        targets=targets,
    )
    expected = scipy.stats.norm.logpdf(targets, INPUTS[:, :2], [[1, np.e]]).sum(1)
    np.testing.assert_allclose(got.log_density, expected, rtol=1e-5)
    assert got.total.shape == (INPUTS_COUNT, 2)


def test_bernoulli():
    labels = LABELS % 2
    got = optax_smile.predict(
        lambda params, inputs: apply_fn(params, inputs)[:, 0],
        SNAPSHOTS,
        INPUTS,
        likelihood="bernoulli",
        targets=labels,
    )
    logits = np.einsum("ij,cdj->cdi", INPUTS.astype(float), WEIGHTS[..., 0].astype(float))
    probability = scipy.special.expit(logits)
    average = probability.mean((0, 1))
    np.testing.assert_allclose(got.mean, average, atol=1e-6)
    expected = np.log(np.where(labels == 1, average, 1 - average))
    np.testing.assert_allclose(got.log_density, expected, atol=1e-5)
    np.testing.assert_allclose(got.total, entropy(np.stack([average, 1 - average], -1)), atol=1e-5)
    aleatoric = entropy(np.stack([probability, 1 - probability], -1)).mean((0, 1))
    np.testing.assert_allclose(got.aleatoric, aleatoric, atol=1e-5)


def test_tokens_are_averaged_each_for_itself_and_padding_counts_nothing():
    tokens = LABELS.reshape(6, 5).copy()
    tokens[2, 3:] = -1

    def apply_fn(params: Any, inputs):
        return inputs @ params["w"][None]

    got = optax_smile.predict(
        apply_fn,
        SNAPSHOTS,
        INPUTS.reshape(6, 5, 3),
        likelihood="tokens",
        targets=tokens,
    )
    expected = np.where(tokens < 0, 0, classified().log_density.reshape(6, 5))
    np.testing.assert_allclose(got.log_density, expected, atol=1e-6)
    assert got.mean is None and got.total is None


def test_one_own_likelihood_and_a_generator_without_targets():
    likelihood = optax_smile.Likelihood(
        mean=jax.nn.sigmoid, log_density=lambda logits, y: jax.nn.log_sigmoid((2 * y - 1) * logits)
    )
    params = ({"w": w} for w in WEIGHTS[0, :3])
    got = optax_smile.predict(apply_fn, params, INPUTS, likelihood=likelihood)
    expected = scipy.special.expit(INPUTS @ WEIGHTS[0, :3]).mean(0)
    np.testing.assert_allclose(got.mean, expected, atol=1e-6)
    assert got.log_density is None and got.total is None


@pytest.mark.parametrize("batch_size", [1, 7, 15, 100])
def test_batches_of_inputs_change_nothing(batch_size):
    assert_equal(classify(batch_size=batch_size, per="draw"), classified(per="draw"))


@pytest.mark.parametrize(
    ("chain", "data", "kind", "per"),
    [
        (4, 2, AxisType.Auto, "draw"),
        (4, 2, AxisType.Explicit, "chain"),
        (2, 1, AxisType.Auto, "chain"),
        (8, 1, AxisType.Explicit, "draw"),
        (1, 8, AxisType.Auto, None),
        (1, 8, AxisType.Explicit, "chain"),
    ],
)
def test_on_a_mesh(chain, data, kind, per):
    """100 snapshots on 8 rows of devices leave the last rows empty."""
    mesh = jax.make_mesh((chain, data), ("chain", "data"), axis_types=(kind,) * 2)
    arguments: dict[str, Any] = {"per": per, "curve": (3, 50), "batch_size": 16}
    assert_equal(classify(**arguments, mesh=mesh), classified(**arguments), 1e-5)


def test_parameters_sharded_inside_a_chain():
    mesh = jax.make_mesh((4, 2), ("chain", "data"), axis_types=(AxisType.Auto,) * 2)
    weights = optax_smile.Snapshots({"w": np.repeat(WEIGHTS, 2, axis=-1)})
    doubled = LABELS * 2
    got = classify(weights, targets=doubled, mesh=mesh, specs={"w": jax.P(None, "data")})
    assert_equal(got, classify(weights, targets=doubled), 1e-5)


def test_the_curve_over_the_number_of_snapshots():
    """Snapshots come draw by draw: eight are two draws of each of the four chains."""
    got = classify(curve=(1, 8, 100))
    for count, point in zip((1, 8, 100), got.curve, strict=True):
        first = WEIGHTS.swapaxes(0, 1).reshape(-1, 3, CLASSES)[:count]
        assert_equal(point, classify({"w": w} for w in first))


def test_draws_come_in_the_same_order_from_disk(tmp_path):
    def run(directory=None) -> Any:
        return optax_smile.sample(
            lambda params, batch: jnp.mean((params["w"] - batch) ** 2),
            {"w": WEIGHTS[:, 0]},
            [INPUTS[:3, :1] + np.zeros((1, CLASSES), np.float32)],
            optax_smile.smile_naive(0.1, num_data=10),
            num_warmup=1,
            num_draws=6,
            key=jax.random.key(0),
            progress=False,
            directory=directory,
        )

    memory, disk = run(), run(tmp_path)
    assert memory.settings is not None
    arguments: dict[str, Any] = {"per": "draw", "curve": (1, 5)}
    assert_equal(classify(disk, **arguments), classify(memory, **arguments))
    assert classify(disk, per="draw").each.mean.shape == (CHAINS, 6, INPUTS_COUNT, CLASSES)
    for one, other in zip(memory, disk, strict=True):
        np.testing.assert_array_equal(one["w"], other["w"])
    np.testing.assert_array_equal(disk.thinned(4).params["w"], memory.params["w"][:, [1, 5]])
    np.testing.assert_array_equal(memory.start["w"], WEIGHTS[:, 0])
    np.testing.assert_array_equal(disk.start["w"], WEIGHTS[:, 0])
    assert memory.settings == disk.settings and memory.settings["name"] == "smile_naive"


def test_in_pieces():
    predictor = optax_smile.Predictor(
        apply_fn, INPUTS, likelihood="categorical", targets=LABELS, batch_size=8
    )
    for count, params in enumerate(SNAPSHOTS, start=1):
        predictor.update(params)
        if count == 8:
            assert_equal(predictor.finalize(), classify(curve=(8,)).curve[0])
    assert_equal(predictor.finalize(), classify())


def test_extreme_log_densities_do_not_underflow():
    params = [{"w": jnp.tile(100.0 * jnp.arange(5), (3, 1))}] * 3
    got = optax_smile.predict(
        apply_fn, params, jnp.ones((1, 3)), likelihood="categorical", targets=jnp.array([0])
    )
    np.testing.assert_allclose(got.log_density, [-1200.0], rtol=1e-6)


def test_what_is_impossible_for_one_draw_or_all_is_no_error():
    likelihood = optax_smile.Likelihood(
        mean=lambda outputs: outputs, log_density=lambda outputs, _: jnp.log(outputs)
    )
    got = optax_smile.predict(
        lambda params, x: params * x,
        [jnp.array([0.0, 0.0]), jnp.array([0.5, 0.0])],
        jnp.ones(2),
        likelihood=likelihood,
        targets=np.zeros(2),
    )
    np.testing.assert_allclose(got.log_density, [np.log(0.25), -np.inf])


def test_half_precision_outputs_are_averaged_in_full_precision():
    got = optax_smile.predict(
        lambda params, x: apply_fn(params, x).astype(jnp.bfloat16),
        SNAPSHOTS,
        INPUTS,
        likelihood="categorical",
        targets=LABELS,
    )
    assert got.mean.dtype == np.float32
    np.testing.assert_allclose(got.mean.sum(-1), 1, atol=0.02)


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 1000),
    count=st.integers(2, 40),
    cut=st.integers(1, 39),
    scale=st.floats(0.01, 100),
)
def test_averages_join_as_if_they_were_one(seed, count, cut, scale):
    """In any order and grouping, also with rows that stand for none."""
    generator, cut = np.random.default_rng(seed), min(cut, count - 1)
    values = (generator.normal(size=(count, 3)) * scale + 10 * scale).astype(np.float32)
    densities = (generator.normal(size=(count, 3)) * scale).astype(np.float32)

    def average(rows):
        outcomes = _average.Outcome(values, values**2, None, densities)
        total = _average.zero(jax.tree.map(lambda x: x[0], outcomes))
        for row in rows:
            outcome = jax.tree.map(lambda x, at=row: jnp.asarray(x[at]), outcomes)
            total = _average.add(total, outcome, jnp.asarray(row))
            total = _average.add(total, outcome, jnp.asarray(-1))
        return total

    order = generator.permutation(count)
    got = _average.join(average(order[:cut]), average(order[cut:]))
    assert got.count == count and got.invalid == -1
    values, densities = values.astype(float), densities.astype(float)
    np.testing.assert_allclose(got.mean, values.mean(0), rtol=1e-5)
    np.testing.assert_allclose(got.spread / count, values.var(0), rtol=1e-4, atol=1e-9 * scale**2)
    expected = scipy.special.logsumexp(densities, axis=0) - np.log(count)
    log_density = got.largest + np.log(got.relative / count)
    np.testing.assert_allclose(log_density, expected, rtol=1e-5, atol=1e-5)


def mixed_up(*places):
    weights = WEIGHTS.copy()
    for chain, draw in places:
        weights[chain, draw, 0, 0] = np.nan
    return optax_smile.Snapshots({"w": weights})


class Draws(list):
    """As somebody's own container of snapshots."""

    num_chains = 2


ONE = [{"w": WEIGHTS[0, 0], "log_std": LOG_STD[0, 0]}]
SAY = r"`predict\({}=...\)` must be "


@pytest.mark.parametrize(
    ("arguments", "argument", "message"),
    [
        ({"snapshots": []}, "snapshots", "at least one parameter tree, got none"),
        ({"likelihood": "normal"}, "likelihood", "one of 'categorical', 'bernoulli', 'gauss"),
        (
            {"snapshots": mixed_up((2, 7), (0, 9))},
            "snapshots",
            "finite, got .* from chain 2, draw 7. Ar",
        ),
        (
            {"snapshots": iter(mixed_up((1, 0)))},
            "snapshots",
            "finite, got nan or inf from snapshot 1",
        ),
        (
            {"snapshots": [*ONE, {"w": WEIGHTS[0, 0, :2]}]},
            "snapshots",
            "snapshots of one model, .* from snapshot 1",
        ),
        ({"snapshots": [{"w": WEIGHTS[0, 0]}, ONE[0]["w"]]}, "snapshots", "snapshots of one mod"),
        ({"targets": LABELS + 1}, "targets", "classes from 0 to 4, got 1 to 5"),
        ({"targets": LABELS - 1}, "targets", "classes from 0 to 4, got -1 to 3"),
        ({"targets": LABELS * 1.0}, "targets", r"integers of shape \(30,\), got float64"),
        ({"targets": LABELS[:29]}, "targets|inputs", r"(integers of shape|arrays \[input, ...\])"),
        ({"likelihood": "gaussian"}, "likelihood", "fits the outputs; 'gaussian' takes a pair"),
        ({"likelihood": "tokens"}, "likelihood", r"fits the outputs; 'tokens' takes logits \[inp"),
        ({"likelihood": "bernoulli"}, "targets", r"of the shape of the mean, \(30, 5\), got \(30,"),
        ({"targets": 3}, "targets", r"arrays \[input, ...\] of 30 inputs"),
        ({"targets": list("ab" * 15)}, "targets", "an array of numbers, got an array of <U1"),
        (
            {"snapshots": ONE[0]},
            "snapshots",
            "an iterable of parameter trees, got a dict. `Snapshots`",
        ),
        ({"snapshots": "run"}, "snapshots", "an iterable of parameter trees, got 'run'"),
        ({"snapshots": None}, "snapshots", "an iterable of parameter trees, got None"),
        ({"snapshots": Draws(ONE), "per": "chain"}, "snapshots", "as many draws of each of the 2"),
        ({"snapshots": Draws(ONE), "per": "draw"}, "snapshots", "as many draws of each of the 2"),
        ({"curve": 3}, "curve", "a sequence of integers, got 3"),
        ({"batch_size": 0}, "batch_size", "an integer >= 1, got 0"),
        ({"curve": (2, 1)}, "curve", r"ascending, got \(2, 1\)"),
        ({"curve": (2, 101)}, "curve", "at most the 100 snapshots"),
        ({"per": "input"}, "per", "one of 'chain', 'draw'"),
        (
            {"per": "draw", "snapshots": iter(SNAPSHOTS)},
            "per",
            "None for snapshots that do not",
        ),
        ({"mesh": 3}, "mesh", "a jax.sharding.Mesh with an axis 'chain', got 3"),
        ({"inputs": np.zeros((0, 3))}, "inputs", r"arrays \[input, ...\] of one length"),
    ],
)
def test_bad_input(arguments, argument, message):
    all_arguments = {
        "snapshots": SNAPSHOTS,
        "inputs": INPUTS,
        "likelihood": "categorical",
        "targets": LABELS,
    }
    with pytest.raises(ValueError, match=f"{SAY.format(f'({argument})')}.*{message}"):
        optax_smile.predict(apply_fn, **all_arguments | arguments)


@pytest.mark.parametrize(
    ("outputs", "targets", "message"),
    [
        (lambda mean: (mean[:, None], 0.0), TARGETS, r"shape of the mean, \(30, 1\), got \(30,\)"),
        (lambda mean: (mean, jnp.zeros((30, 1))), TARGETS, "one that fits the outputs; .* shapes"),
        (lambda mean: (mean, jnp.zeros(7)), TARGETS, "one that fits the outputs; .* shapes"),
        (lambda mean: (None, 0.0), TARGETS, "one that fits the outputs; 'gaussian' takes a pair"),
        (lambda mean: jnp.zeros((2, 30)), TARGETS, "one that fits the outputs; 'gaussian' takes"),
        (
            lambda mean: (mean, 0.0),
            TARGETS * np.where(LABELS == 2, np.nan, 1),
            "finite, got nan at",
        ),
    ],
)
def test_bad_gaussian_outputs(outputs, targets, message):
    def apply_fn(params, inputs):
        return outputs(inputs @ params["w"][:, 0])

    with pytest.raises(ValueError, match=r"`predict\(\w+=...\)` must be .*" + message):
        optax_smile.predict(apply_fn, ONE, INPUTS, likelihood="gaussian", targets=targets)


def test_bad_bernoulli_targets():
    with pytest.raises(ValueError, match=r"`predict\(targets=...\)` must be 0 or 1, got 2"):
        optax_smile.predict(
            lambda params, inputs: inputs[:, 0],
            ONE,
            INPUTS,
            likelihood="bernoulli",
            targets=np.full(INPUTS_COUNT, 2),
        )


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint32, np.float32, bool])
def test_bernoulli_labels_of_any_type(dtype):
    labels = (LABELS % 2).astype(dtype)
    got = optax_smile.predict(
        lambda params, inputs: inputs[:, 0], ONE, INPUTS, likelihood="bernoulli", targets=labels
    )
    signs = np.where(LABELS % 2 == 1, 1, -1)
    np.testing.assert_allclose(
        got.log_density, -np.logaddexp(0, -signs * INPUTS[:, 0]), rtol=1e-5, atol=1e-6
    )


def test_bernoulli_of_several_outputs_sums_their_log_densities():
    labels = np.stack([LABELS % 2, LABELS // 2 % 2], axis=1)
    got = optax_smile.predict(
        lambda params, inputs: inputs[:, :2], ONE, INPUTS, likelihood="bernoulli", targets=labels
    )
    signs = np.where(labels == 1, 1, -1)
    expected = -np.logaddexp(0, -signs * INPUTS[:, :2]).sum(axis=1)
    np.testing.assert_allclose(got.log_density, expected, rtol=1e-5)
    assert got.total.shape == (INPUTS_COUNT, 2)


def test_padding_is_minus_one():
    with pytest.raises(ValueError, match="classes from -1 to 4, got -100 to"):
        optax_smile.predict(
            lambda params, inputs: inputs @ WEIGHTS[0, :1, :, :],
            ONE,
            INPUTS.reshape(6, 5, 3),
            likelihood="tokens",
            targets=np.where(LABELS == 0, -100, LABELS).reshape(6, 5),
        )


@pytest.mark.parametrize("field", ["variance", "log_density"])
def test_what_is_not_finite_besides_the_mean_is_told(field):
    bad: dict[str, Any] = {"variance": lambda x: jnp.full_like(x, jnp.nan)}
    if field == "log_density":
        bad = {"log_density": lambda x, _: jnp.full_like(x, jnp.nan)}
    fields: dict[str, Any] = {
        "mean": lambda x: x,
        "variance": jnp.ones_like,
        "log_density": lambda x, _: x,
    }
    with pytest.raises(ValueError, match="finite, got nan or inf from snapshot 0"):
        optax_smile.predict(
            lambda params, x: x,
            [0.0],
            np.ones(3, np.float32),
            likelihood=optax_smile.Likelihood(**fields | bad),
            targets=np.zeros(3),
        )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mean": None, "variance": jnp.ones_like}, "one with a `mean` to go with"),
        ({"log_density": None}, "one with a `log_density` for the targets"),
        ({"variance": lambda x: x[:, :1]}, r"variance has the shape of its mean, \(30, 5\), got"),
    ],
)
def test_an_own_likelihood_that_lacks_something(fields, message):
    whole: dict[str, Any] = {"mean": lambda x: x, "log_density": lambda x, _: x[:, 0]}
    with pytest.raises(ValueError, match=r"`predict\(likelihood=...\)` must be .*" + message):
        classify_by = optax_smile.Likelihood(**whole | fields)
        optax_smile.predict(apply_fn, ONE, INPUTS, likelihood=classify_by, targets=LABELS)


@pytest.mark.parametrize(("center", "spread"), [(100, 0.1), (1e4, 0.1), (1e6, 1)])
def test_means_far_from_zero_keep_their_digits(center, spread):
    """A running mean without compensation is off by up to 20 standard errors here."""
    values = (center + spread * np.random.default_rng(1).normal(size=5_000)).astype(np.float32)
    got = optax_smile.predict(
        lambda params, inputs: (inputs * params, 0.0),
        values,
        np.ones(1, np.float32),
        likelihood="gaussian",
    )
    exact = values.astype(float)
    half_ulp = np.spacing(np.float32(center)) / 2
    np.testing.assert_allclose(got.mean, exact.mean(), atol=1.01 * half_ulp, rtol=0)
    # Of the deviations from a mean that float32 holds to a hundredth of the spread at worst.
    np.testing.assert_allclose(got.epistemic, exact.var(), rtol=1e-3)


def test_double_precision_is_kept():
    values = np.random.default_rng(1).normal(size=200) + 1e6
    with jax.enable_x64(True):
        got = optax_smile.predict(
            lambda params, inputs: (inputs * params, 0.0), values, np.ones(1), likelihood="gaussian"
        )
    np.testing.assert_allclose(got.mean, values.mean(), rtol=1e-15)
    np.testing.assert_allclose(got.epistemic, values.var(), rtol=1e-9)


def test_half_precision_outputs_are_those_of_float32():
    def rounded(dtype):
        def of(params, inputs):
            return apply_fn(params, inputs).astype(jnp.bfloat16).astype(dtype)

        return optax_smile.predict(of, SNAPSHOTS, INPUTS, likelihood="categorical", targets=LABELS)

    assert_equal(rounded(jnp.bfloat16), rounded(jnp.float32), 1e-7)


def test_arrays_may_change_while_they_wait():
    mesh = jax.make_mesh((4, 1), ("chain", "data"), axis_types=(AxisType.Auto,) * 2)
    predictor = optax_smile.Predictor(apply_fn, INPUTS, likelihood="categorical", mesh=mesh)
    params = {"w": np.empty_like(WEIGHTS[0, 0])}
    for weights in WEIGHTS[0, :6]:
        params["w"][:] = weights
        predictor.update(params)
    assert_equal(predictor.finalize(), classify(({"w": w} for w in WEIGHTS[0, :6]), targets=None))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_classes_spread_over_devices(kind):
    """A gather of the labels' logits ended the process there."""
    mesh = jax.make_mesh((2, 2, 2), ("chain", "data", "model"), axis_types=(kind,) * 3)
    weights = optax_smile.Snapshots({"w": WEIGHTS[..., :4]})
    arguments: dict[str, Any] = {"targets": LABELS % 4}
    specs = {"w": jax.P(None, "model")}
    got = classify(weights, mesh=mesh, specs=specs, **arguments)
    assert_equal(got, classify(weights, **arguments), 1e-5)


def test_one_own_likelihood_that_forgets_the_inputs():
    likelihood = optax_smile.Likelihood(mean=jnp.mean, log_density=lambda outputs, _: outputs)
    with pytest.raises(ValueError, match=r"`predict\(likelihood=...\)` must be one that gives arr"):
        optax_smile.predict(apply_fn, ONE, INPUTS, likelihood=likelihood)


MEMORY = """
import resource, sys, jax, numpy as np, optax_smile
generator = np.random.default_rng(0)
inputs = generator.normal(size=(10_000, 50)).astype(np.float32)
weights, labels = generator.normal(size=(50, 10)).astype(np.float32), np.zeros(10_000, int)
def predict(count):
    snapshots = (weights * scale for scale in np.linspace(.5, 1, count, dtype=np.float32))
    optax_smile.predict(lambda w, x: x @ w, snapshots, inputs, likelihood="categorical",
                        targets=labels)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = predict(1)
print(predict(1_000) - before)
"""


@pytest.mark.slow
def test_a_thousand_snapshots_need_the_memory_of_one():
    """MiB; all outputs of 10,000 inputs would be 381."""
    run = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert float(run.stdout) < 100


def test_nothing_compiles_anew():
    """One program, whatever the number of snapshots."""
    traced = []

    def counted(params, inputs):
        traced.append(len(inputs))
        return apply_fn(params, inputs)

    predictor = optax_smile.Predictor(counted, INPUTS, likelihood="categorical", batch_size=10)
    snapshots = iter(SNAPSHOTS)
    predictor.update(next(snapshots))
    after_one = len(traced)
    for params in snapshots:
        predictor.update(params)
    assert len(traced) == after_one and set(traced) <= {INPUTS_COUNT, 10} and 10 in traced
