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


@pytest.fixture
def short():
    """Fit two steps of a model whose layers depend on the arguments; this compiles fast."""

    def fit(layers=(), callbacks=(), **options):
        dense = keras.layers.Dense(1, **options)
        model = keras.Sequential([keras.Input((2,)), *layers, dense])
        model.compile(keras_optimizer(optax_smile.sgld(1e-4, num_data=NUM_DATA, key=0)), half_mse)
        model.fit(X, Y, batch_size=NUM_DATA, epochs=2, verbose=0, callbacks=list(callbacks))
        return model

    return fit


class Penalty(keras.layers.Layer):
    def call(self, x):
        self.add_loss(keras.ops.mean(x**2))
        return x


def nested():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, kernel_regularizer="l1")])


@pytest.mark.parametrize(
    "model",
    [
        {"kernel_regularizer": keras.regularizers.L2(1.0)},
        {"bias_regularizer": lambda weights: keras.ops.sum(weights**2)},
        {"activity_regularizer": "l2"},
        {"layers": [Penalty()]},
        {"layers": [nested()]},
    ],
    ids=["kernel", "bias", "activity", "add_loss", "nested"],
)
def test_losses_of_layers_are_a_warning(short, model):
    with pytest.warns(UserWarning, match="by a regularizer or `add_loss`.*prior_precision"):
        short(**model)


class Own(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.learning_rate.assign(0.5)


def test_a_learning_rate_of_keras_is_refused(short):
    schedules, callbacks = keras.optimizers.schedules, keras.callbacks
    decay = schedules.ExponentialDecay(1.0, 10, 0.5)
    message = r"`keras_optimizer\(learning_rate=...\)` must be left at 1.*step_size"
    for callback in (
        callbacks.LearningRateScheduler(lambda epoch, rate: 0.0),
        callbacks.ReduceLROnPlateau(monitor="loss", patience=1, min_delta=1e9),
        Own(),
    ):
        with pytest.raises(ValueError, match=message):
            short(callbacks=[callback])
    same = callbacks.LearningRateScheduler(lambda epoch, rate: rate)
    optimizer = short(callbacks=[same]).optimizer
    assert float(optimizer.learning_rate.value) == 1
    with pytest.raises(ValueError, match=message):
        optimizer.learning_rate = decay


def test_a_policy_of_float16_is_refused(short):
    before = keras.config.dtype_policy()
    try:
        keras.config.set_dtype_policy("mixed_float16")
        with pytest.raises(ValueError, match="dtype_policy=.*mixed_bfloat16, got mixed_float16"):
            short()
        keras.config.set_dtype_policy("mixed_bfloat16")
        assert optax_smile.stats(short().optimizer.state).num_gradients == 2
    finally:
        keras.config.set_dtype_policy(before)


def test_a_saved_model_may_name_samplers_only(tmp_path):
    published, ours = optax_smile.published, optax_smile
    for tx in (
        published.psmile(1e-3, num_data=NUM_DATA),
        published.smile_naive(1e-3, num_data=NUM_DATA),
        ours.smile(num_data=NUM_DATA, tuner=ours.angle_tuner(0.2), key=3),
        ours.recorded(ours.sgld(1e-3, num_data=9, key=1), num_warmup=1, thin=2),
    ):
        config = keras.optimizers.serialize(keras_optimizer(tx))
        assert keras.optimizers.serialize(keras.optimizers.deserialize(config)) == config
    inner = {
        "built": {
            "name": "sgld",
            "arguments": {"step_size": 1e-3, "num_data": 9, "key": {"key": [0, 1]}},
        }
    }
    given = {"sampler": inner, "num_warmup": 0, "thin": 1, "directory": str(tmp_path / "planted")}
    others = [{"directory": str(tmp_path)}, {"path": str(tmp_path / "x")}, {}]
    refused = {"recorded": [given], "load_snapshots": others, "published.sampler": others}
    refused |= {"interop.importlib.import_module": [{"name": "this"}], "report.write": others}
    for name, arguments in refused.items():
        for each in arguments:
            config["config"]["sampler"] = {"name": name, "arguments": each}
            with pytest.raises(Exception, match="sampler of optax_smile that writes no files"):
                keras.optimizers.deserialize(config)
    assert not [*tmp_path.iterdir()]
    # Its folder is for this fit only.
    tx = ours.recorded(ours.sgld(1e-3, num_data=9, key=1), num_warmup=0, thin=1, directory=tmp_path)
    assert keras_optimizer(tx).get_config()["sampler"] is None
