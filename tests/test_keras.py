"""A sampler as the optimizer of `model.fit`."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import numpy as np
import optax
import pytest

import optax_smile
from optax_smile.interop import keras_optimizer

keras = pytest.importorskip("keras")
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")
NUM_DATA = 120
rng = np.random.default_rng(0)
X = rng.normal(size=(NUM_DATA, 2)).astype(np.float32)
Y = (X @ [[1.0], [-2.0]] + 0.5 + rng.normal(size=(NUM_DATA, 1))).astype(np.float32)
DESIGN = np.column_stack([X, np.ones(NUM_DATA)])
COVARIANCE = np.linalg.inv(DESIGN.T @ DESIGN + np.eye(3))
EXACT = COVARIANCE @ DESIGN.T @ Y[:, 0]


@pytest.fixture(autouse=True)
def as_keras_needs_it():
    """Layers of Keras add a bias to rows of outputs."""
    with jax.numpy_rank_promotion("allow"):
        yield


def recorded(**options):
    sampler = optax_smile.psmile(num_data=NUM_DATA, key=0, **options)
    return optax_smile.recorded(sampler, num_warmup=600, thin=3)


def linear_model(tx, **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras_optimizer(tx), half_mse, **options)
    return model


@keras.saving.register_keras_serializable()
def half_mse(y, prediction):
    """Minus the log likelihood of noise of variance 1."""
    return keras.ops.mean((y - prediction) ** 2, axis=-1) / 2


def fit(model, epochs):
    """Three steps in each epoch, each on all data."""
    x, y = (np.tile(values, (3, 1)) for values in (X, Y))
    model.fit(x, y, batch_size=NUM_DATA, epochs=epochs, verbose=0, shuffle=False)


def test_fit_samples_the_posterior_also_several_steps_at_a_time():
    tx = recorded()
    model = linear_model(tx, steps_per_execution=3)
    fit(model, 1_200)
    draws = tx.draws()
    assert draws.num_draws == 1_000
    weights = np.concatenate([draws.params[0][0], draws.params[1][0][:, None, :]], axis=1)[..., 0]
    np.testing.assert_allclose(weights.mean(0), EXACT, atol=0.01)
    np.testing.assert_allclose(weights.std(0), np.diag(COVARIANCE) ** 0.5, rtol=0.2)
    optimizer = model.optimizer
    assert optax_smile.stats(optimizer.state).num_gradients == 3_600
    last = [x[0, -1] for x in draws.params]
    for mine, theirs in zip(optimizer.last_accepted(), last, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)


def test_a_saved_model_goes_on_as_if_it_had_not_been_saved(tmp_path):
    expected = linear_model(optax_smile.psmile(num_data=NUM_DATA, key=0))
    fit(expected, 20)
    half = linear_model(optax_smile.psmile(num_data=NUM_DATA, key=0))
    fit(half, 10)
    half.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    fit(loaded, 10)
    for mine, theirs in zip(loaded.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)
    # A function cannot be saved: the model can, and tells what to do when it is loaded.
    other = linear_model(optax_smile.psmile(lambda count: 1e-3, num_data=NUM_DATA, key=0))
    fit(other, 1)
    other.save(tmp_path / "other.keras")
    with pytest.raises(Exception, match="compile=False"):
        keras.models.load_model(tmp_path / "other.keras")
    assert keras.models.load_model(tmp_path / "other.keras", compile=False).count_params() == 3


def test_frozen_layers_stay_and_wrong_optimizers_are_refused():
    tx = optax_smile.recorded(optax_smile.psmile(num_data=NUM_DATA, key=0), num_warmup=0, thin=3)
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)]
    )
    model.layers[0].trainable = False
    before = model.layers[0].get_weights()
    model.compile(keras_optimizer(tx), half_mse)
    fit(model, 4)
    assert [x.shape for x in tx.draws().params] == [(1, 4, 3, 1), (1, 4, 1)]
    for mine, theirs in zip(model.layers[0].get_weights(), before, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    with pytest.raises(ValueError, match="read after `fit` has begun"):
        keras_optimizer(tx).state  # noqa: B018
    with pytest.raises(ValueError, match="exactly one optax_smile sampler"):
        fit(linear_model(optax.adam(1e-3)), 1)
