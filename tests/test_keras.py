"""A sampler as the optimizer of `model.fit`, in `examples/keras_fit.py`."""

import os
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import jax
import numpy as np
import pytest

import optax_smile

keras = pytest.importorskip("keras")
from keras_fit import Sampler  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")
NUM_DATA = 120
rng = np.random.default_rng(0)
X = rng.normal(size=(NUM_DATA, 2)).astype(np.float32)
Y = (X @ [[1.0], [-2.0]] + 0.5 + rng.normal(size=(NUM_DATA, 1))).astype(np.float32)


@pytest.fixture(autouse=True)
def as_keras_needs_it():
    """Layers of Keras add a bias to rows of outputs."""
    with jax.numpy_rank_promotion("allow"):
        yield


@keras.saving.register_keras_serializable()
def half_mse(y, prediction):
    """Minus the log likelihood of noise of variance 1."""
    return keras.ops.mean((y - prediction) ** 2, axis=-1) / 2


def linear_model(optimizer, steps_per_execution=1, **of_layer):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, **of_layer)])
    model.compile(optimizer, half_mse, steps_per_execution=steps_per_execution)
    return model


def fit(model, epochs):
    """Three steps in each epoch, each on all data."""
    x, y = (np.tile(values, (3, 1)) for values in (X, Y))
    model.fit(x, y, batch_size=NUM_DATA, epochs=epochs, verbose=0, shuffle=False)


def test_several_steps_at_a_time_give_the_same_draws():
    """Whether these are those of the posterior, `docs/recipes/keras.md` asserts."""
    found = []
    for number in (1, 3):
        optimizer = Sampler("sgld", step_size=1e-3, num_warmup=3, num_data=NUM_DATA, key=0)
        fit(linear_model(optimizer, steps_per_execution=number), 4)
        found.append(optimizer.draws())
    for one, other in zip(*(x.params for x in found), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert found[1].num_draws == 9


def test_a_saved_model_goes_on_as_if_it_had_not_been_saved(tmp_path):
    sampler: Any = {"sampler": "sgld", "step_size": 1e-3, "num_warmup": 3, "key": 0}
    expected, half = (linear_model(Sampler(**sampler, num_data=NUM_DATA)) for _ in range(2))
    fit(expected, 8)
    fit(half, 4)
    half.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    fit(loaded, 4)
    for mine, theirs in zip(loaded.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)
    assert optax_smile.stats(loaded.optimizer.state).num_gradients == 24


def test_a_saved_model_may_name_samplers_only(tmp_path):
    kinds: Any = ("published.psmile", {}), ("sgld", {"key": 1})
    for name, given in kinds:
        sampler = Sampler(name, step_size=1e-3, num_data=9, **given)
        config = keras.optimizers.serialize(sampler)
        assert keras.optimizers.serialize(keras.optimizers.deserialize(config)) == config
    for name in ("recorded", "load_snapshots", "interop.importlib.import_module"):
        config["config"] = {"sampler": name, "directory": str(tmp_path)}
        with pytest.raises(Exception, match=rf"`sampler` must be one of .*, got '{name}'"):
            keras.optimizers.deserialize(config)
    assert not [*tmp_path.iterdir()]


def sgld():
    return Sampler("sgld", step_size=1e-3, num_data=NUM_DATA, key=0)


@pytest.mark.parametrize("argument", ["kernel_regularizer", "bias_regularizer", "bias_constraint"])
def test_what_layers_add_to_weights_is_refused(argument):
    """A regularizer would be a second prior, times the number of data."""
    part = keras.constraints.NonNeg() if "constraint" in argument else keras.regularizers.L2(0.1)
    model = linear_model(sgld(), **{argument: part})
    with pytest.raises(ValueError, match=r"\['.*(kernel|bias)'\] have a regul.*prior_precision"):
        fit(model, 1)


def test_a_callback_that_sets_a_learning_rate_is_refused():
    model = linear_model(sgld())
    plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=1e9)
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.1 * rate)
    for callback in schedule, plateau:
        with pytest.raises(ValueError, match="no `learning_rate`. .* pass `step_size`"):
            model.fit(X, Y, batch_size=NUM_DATA, epochs=4, verbose=0, callbacks=[callback])


def test_mixed_float16_is_refused():
    """Keras would wrap the sampler, and skip steps unseen."""
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        with pytest.raises(ValueError, match="use mixed_bfloat16 or float32"):
            linear_model(sgld())
    finally:
        keras.config.set_dtype_policy(policy)
