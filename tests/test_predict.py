import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

import optax_smile

GENERATOR = np.random.default_rng(0)
WEIGHTS = GENERATOR.normal(size=(4, 25, 3, 5)).astype(np.float32) * 3
INPUTS = GENERATOR.normal(size=(30, 3)).astype(np.float32)
LABELS = GENERATOR.integers(0, 5, 30)


def apply_fn(params, inputs):
    return inputs @ params["w"]


def test_categorical_equals_the_average_over_everything_at_once():
    got = optax_smile.predict(
        apply_fn,
        optax_smile.Snapshots({"w": WEIGHTS}),
        INPUTS,
        likelihood="categorical",
        targets=LABELS,
    )
    logits = np.einsum("ij,cdjk->cdik", INPUTS.astype(float), WEIGHTS.astype(float))
    log_probabilities = scipy.special.log_softmax(logits, axis=-1).reshape(100, 30, 5)
    np.testing.assert_allclose(got.mean, np.exp(log_probabilities).mean(0), atol=1e-5)
    chosen = log_probabilities[:, np.arange(30), LABELS]
    expected = scipy.special.logsumexp(chosen, axis=0) - np.log(100)
    np.testing.assert_allclose(got.log_density, expected, atol=1e-4)


def test_gaussian():
    targets = GENERATOR.normal(size=30).astype(np.float32)

    def mean_and_log_std(params, inputs):
        return (inputs @ params["w"])[:, 0], params["log_std"]

    params = {"w": WEIGHTS, "log_std": GENERATOR.normal(size=(4, 25)).astype(np.float32)}
    got = optax_smile.predict(
        mean_and_log_std,
        optax_smile.Snapshots(params),
        INPUTS,
        likelihood="gaussian",
        targets=targets,
    )
    means = np.einsum("ij,cdj->cdi", INPUTS, WEIGHTS[..., 0]).reshape(100, 30)
    densities = scipy.stats.norm.logpdf(
        targets, means, np.exp(params["log_std"]).reshape(100, 1).astype(float)
    )
    np.testing.assert_allclose(got.mean, means.mean(0), atol=1e-4)
    expected = scipy.special.logsumexp(densities, axis=0) - np.log(100)
    np.testing.assert_allclose(got.log_density, expected, rtol=1e-4, atol=1e-4)


def test_one_own_likelihood_and_a_generator_without_targets():
    likelihood = optax_smile.Likelihood(
        mean=jax.nn.sigmoid, log_density=lambda logits, y: jax.nn.log_sigmoid((2 * y - 1) * logits)
    )
    params = ({"w": w} for w in WEIGHTS[0, :3])
    got = optax_smile.predict(apply_fn, params, INPUTS, likelihood=likelihood)
    expected = scipy.special.expit(INPUTS @ WEIGHTS[0, :3]).mean(0)
    np.testing.assert_allclose(got.mean, expected, atol=1e-5)
    assert got.log_density is None


def test_extreme_log_densities_do_not_underflow():
    params = [{"w": jnp.tile(100.0 * jnp.arange(5), (3, 1))}] * 3
    got = optax_smile.predict(
        apply_fn, params, jnp.ones((1, 3)), likelihood="categorical", targets=jnp.array([0])
    )
    np.testing.assert_allclose(got.log_density, [-1200.0], rtol=1e-6)


@pytest.mark.parametrize(
    ("snapshots", "likelihood", "message"),
    [
        ([], "categorical", r"`predict\(snapshots=...\)` must be at least one parameter tree"),
        ([{"w": WEIGHTS[0, 0]}], "normal", r"`predict\(likelihood=...\)` must be one of 'cat"),
    ],
)
def test_bad_input(snapshots, likelihood, message):
    with pytest.raises(ValueError, match=message):
        optax_smile.predict(apply_fn, snapshots, INPUTS, likelihood=likelihood)
