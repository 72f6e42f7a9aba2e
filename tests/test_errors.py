"""Wrong arguments raise at the earliest moment and name the argument, the rule and the value."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_smile

ALL = ["smile", "psmile", "smile_naive", "psmile_naive"]
TUNED = ["smile", "psmile"]
PRECONDITIONED = ["psmile", "psmile_naive"]
KEY = jax.random.key(0)
PARAMS = {"layer": {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}}

every_sampler = pytest.mark.parametrize("name", ALL)


def build(name, **options):
    fn = getattr(optax_smile, name)
    return fn(**{"step_size": 1e-2, "num_data": 100} | options)


def with_leaf(leaf):
    return {"layer": {"w": leaf, "b": jnp.ones(3)}}


def house_form(name, argument, rule, got):
    return f"^{re.escape(f'`{name}({argument}=...)` must be ')}.*{rule}.*, got {got}"


def assert_rejected(name, argument, value, rule, **others):
    got = re.escape(str(value) if value is None else repr(value))
    with pytest.raises(ValueError, match=house_form(name, argument, rule, got)):
        build(name, **{argument: value}, **others)


NUMBERS = {
    "step_size": ("> 0", [0, 0.0, -0.1, math.nan, math.inf, np.float32(-1)]),
    "num_data": (">= 1", [0, 0.5, -100, math.nan, math.inf]),
    "prior_precision": (">= 0", [-1, -1e-9, math.nan, math.inf]),
    "temperature": ("> 0", [0, -1.0, math.nan, math.inf]),
    "decoherence_length": ("> 0", [0, -1.0, math.nan, math.inf]),
}
NOT_NUMBERS = ["0.1", True, [0.1], (0.1,), np.ones(2), {"a": 1.0}]


@every_sampler
@pytest.mark.parametrize(
    ("argument", "value", "rule"),
    [(name, value, rule) for name, (rule, values) in NUMBERS.items() for value in values],
)
def test_numbers_out_of_range(name, argument, value, rule):
    assert_rejected(name, argument, value, rule, key=KEY)


@pytest.mark.parametrize("argument", ["step_size", "num_data", "temperature"])
@pytest.mark.parametrize("value", [*NOT_NUMBERS, None], ids=str)
def test_not_a_number(argument, value):
    assert_rejected("psmile", argument, value, "a number")


@pytest.mark.parametrize("value", ["1.0", True, np.ones(2)], ids=str)
def test_prior_precision_is_not_a_number(value):
    assert_rejected("psmile", "prior_precision", value, "a number")


@pytest.mark.parametrize("value", [jnp.float32(-1), jnp.nan, np.float64(0)], ids=str)
def test_array_scalars_are_checked(value):
    assert_rejected("smile", "step_size", value, "> 0")


@pytest.mark.parametrize("name", TUNED)
@pytest.mark.parametrize("value", [0, 0.0, 1, 1.0, -0.5, 98, math.nan, "0.98", True])
def test_reset_quantile(name, value):
    assert_rejected(name, "reset_quantile", value, r"between 0 and 1 \(exclusive\)")


@pytest.mark.parametrize("argument", ["adapt_probability", "adapt_rate"])
@pytest.mark.parametrize("value", [0, 1, -0.1, 1.5, math.nan, "0.1", None])
def test_tuner_probabilities(argument, value):
    got = re.escape(repr(value))
    rule = house_form("quantile_tuner", argument, r"between 0 and 1 \(exclusive\)", got)
    with pytest.raises(ValueError, match=rule):
        optax_smile.quantile_tuner(**{argument: value})


@pytest.mark.parametrize("value", [-1, 1.5, 1e3, "100", True])
def test_tuner_adapt_steps(value):
    rule = house_form("quantile_tuner", "adapt_steps", "an integer >= 0", re.escape(repr(value)))
    with pytest.raises(ValueError, match=rule):
        optax_smile.quantile_tuner(adapt_steps=value)


@every_sampler
@pytest.mark.parametrize("value", ["Leapfrog", "mclachlan", "", None, 2])
def test_unknown_integrator(name, value):
    with pytest.raises(ValueError, match=house_form(name, "integrator", "one of", "")) as error:
        build(name, integrator=value)
    assert "'leapfrog', 'minimal_norm'" in str(error.value) and repr(value) in str(error.value)


@pytest.mark.parametrize("name", TUNED)
@pytest.mark.parametrize("value", ["quantile", "quantile_tuner", 0.02, True, False])
def test_unknown_tuner(name, value):
    assert_rejected(name, "tuner", value, r"a tuner such as quantile_tuner\(\), or None")


def test_tuner_that_was_not_called():
    with pytest.raises(ValueError, match=house_form("smile", "tuner", "a tuner", "<function")):
        build("smile", tuner=optax_smile.quantile_tuner)


@pytest.mark.parametrize("name", TUNED)
@pytest.mark.parametrize("value", ["refersh", "none", None, True])
def test_unknown_reset_momentum(name, value):
    got = re.escape(repr(value))
    with pytest.raises(
        ValueError, match=house_form(name, "reset_momentum", "one of 'zero', 'refresh'", got)
    ):
        build(name, reset_momentum=value)


@pytest.mark.parametrize("name", PRECONDITIONED)
@pytest.mark.parametrize("value", [0, -0.5, 1.01, math.nan, "0.99"])
def test_noise_decay(name, value):
    assert_rejected(name, "noise_decay", value, r"in \(0, 1\]")


@pytest.mark.parametrize("value", [0, -0.5, 1.01, math.nan])
def test_noise_decay_of_scale_by_gradient_noise(value):
    rule = house_form("scale_by_gradient_noise", "noise_decay", r"in \(0, 1\]", repr(value))
    with pytest.raises(ValueError, match=rule):
        optax_smile.scale_by_gradient_noise(noise_decay=value)


@pytest.mark.parametrize("name", PRECONDITIONED)
def test_noise_decay_none_is_not_a_preconditioned_sampler(name):
    assert_rejected(name, "noise_decay", None, r"in \(0, 1\]")


@pytest.mark.parametrize("name", TUNED)
def test_refresh_needs_a_key(name):
    assert_rejected(name, "key", None, 'a JAX key .*"refresh"', reset_momentum="refresh")


@every_sampler
def test_explicit_noise_needs_a_key(name):
    assert_rejected(name, "key", None, "a JAX key .*decoherence_length", decoherence_length=1.0)


@pytest.mark.parametrize(
    "value",
    [42, "key", np.zeros(2), jax.random.split(KEY, 3)],
    ids=["int", "str", "floats", "many keys"],
)
def test_key_is_not_one_key(value):
    assert_rejected("psmile", "key", value, "a JAX key", decoherence_length=1.0)


@every_sampler
@pytest.mark.parametrize("tree", [{}, [], None, {"a": None, "b": ()}], ids=str)
def test_empty_tree(name, tree):
    with pytest.raises(ValueError, match=house_form(name, "params", "at least 2", "0")):
        build(name).init(tree)


@every_sampler
@pytest.mark.parametrize("tree", [jnp.ones(()), jnp.ones(1), {"a": jnp.ones((1, 1)), "b": None}])
def test_one_parameter_is_too_few(name, tree):
    with pytest.raises(ValueError, match=house_form(name, "params", "at least 2", "1")):
        build(name).init(tree)


@every_sampler
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32", "uint8", "bool", "complex64"])
def test_dtype_of_the_parameters(name, dtype):
    got = re.escape(f"{dtype} at ['layer']['w']")
    rule = house_form(name, "params", "float32 or float64", got)
    for leaf in (jnp.ones((2, 3), dtype), jax.ShapeDtypeStruct((2, 3), jnp.dtype(dtype))):
        with pytest.raises(ValueError, match=rule):
            build(name).init(with_leaf(leaf))


@pytest.mark.parametrize(("leaf", "got"), [(1.0, "float"), (2, "int"), ("w", "str")])
def test_parameters_that_are_not_arrays(leaf, got):
    rule = house_form("psmile", "params", "float32 or float64", re.escape(f"{got} at ['layer']"))
    with pytest.raises(ValueError, match=rule):
        build("psmile").init(with_leaf(leaf))


def test_key_as_a_parameter():
    rule = house_form("psmile", "params", "float32 or float64", re.escape("key<fry> at ['layer']"))
    with pytest.raises(ValueError, match=rule):
        build("psmile").init(with_leaf(KEY))


@every_sampler
@pytest.mark.parametrize("precision", [{"other": 1.0}, {"layer": {"w": 1.0}}, [1.0]], ids=str)
def test_prior_precision_is_not_a_prefix(name, precision):
    rule = house_form(name, "prior_precision", "a prefix of the parameter tree", "")
    with pytest.raises(ValueError, match=rule):
        build(name, prior_precision=precision).init(PARAMS)


@every_sampler
def test_negative_prior_precision_inside_a_prefix(name):
    precision = {"layer": {"w": 1.0, "b": -2.0}}
    with pytest.raises(ValueError, match=house_form(name, "prior_precision", ">= 0", "-2.0")):
        build(name, prior_precision=precision)


@every_sampler
def test_missing_params(name):
    tx, optax_tx = build(name), optax.add_decayed_weights(0.1)
    with pytest.raises(ValueError) as expected:
        optax_tx.update(PARAMS, optax_tx.init(PARAMS), None)
    with pytest.raises(ValueError) as error:
        tx.update(PARAMS, tx.init(PARAMS), value=1.0)
    assert str(error.value) == str(expected.value)


RESHAPED = with_leaf(jnp.ones((3, 2)))
FLAT = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
SHORT = {"layer": {"w": jnp.ones((2, 3))}}
WITH_NONE = {"layer": {"w": jnp.ones((2, 3)), "b": None}}


@every_sampler
@pytest.mark.parametrize("tree", [FLAT, SHORT, WITH_NONE, None])
def test_structure_of_updates(name, tree):
    tx = build(name)
    rule = house_form(name, "updates", "a tree of the structure of params", "PyTreeDef")
    with pytest.raises(ValueError, match=rule):
        tx.update(tree, tx.init(PARAMS), PARAMS, value=1.0)


@every_sampler
def test_shape_of_updates(name):
    tx = build(name)
    where = re.escape("of shape (2, 3) at ['layer']['w']")
    with pytest.raises(ValueError, match=house_form(name, "updates", where, r"\(3, 2\)")):
        tx.update(RESHAPED, tx.init(PARAMS), PARAMS, value=1.0)


@every_sampler
@pytest.mark.parametrize("tree", [FLAT, SHORT, WITH_NONE])
def test_structure_that_changes_between_calls(name, tree):
    tx = build(name)
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=1.0)
    rule = house_form(name, "params", "a tree of the structure of the one given to init", "")
    with pytest.raises(ValueError, match=rule):
        tx.update(tree, state, tree, value=1.0)


@every_sampler
def test_shape_that_changes_between_calls(name):
    tx = build(name)
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=1.0)
    where = re.escape("of shape (2, 3) at ['layer']['w'], as the one given to init")
    with pytest.raises(ValueError, match=house_form(name, "params", where, r"\(3, 2\)")):
        tx.update(RESHAPED, state, RESHAPED, value=1.0)


@every_sampler
@pytest.mark.parametrize("shape", [(1,), (16,), (1, 1), (0,)])
def test_shape_of_value(name, shape):
    tx = build(name)
    rule = house_form(name, "value", "the scalar mean loss", re.escape(f"shape {shape}"))
    with pytest.raises(ValueError, match=rule):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=jnp.ones(shape))
    with pytest.raises(ValueError, match=rule):
        jax.jit(tx.update)(PARAMS, tx.init(PARAMS), PARAMS, value=jnp.ones(shape))


@pytest.mark.parametrize("value", [(0.5, {}), {"loss": 0.5}, "0.5"], ids=str)
def test_value_is_no_number(value):
    tx, got = build("smile"), type(value).__name__
    with pytest.raises(ValueError, match=house_form("smile", "value", "scalar", got)):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=value)


@pytest.mark.parametrize("value", [1, 1.5, np.float64(2), np.ones(()), jnp.float32(3)])
def test_every_scalar_is_a_value(value):
    tx = build("smile")
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=value)
    assert optax_smile.stats(state)["energy_level"] == 1


@pytest.mark.parametrize("state", [(), None, {"a": jnp.ones(2)}, optax.adam(1.0).init(PARAMS)])
def test_state_without_a_sampler(state):
    with pytest.raises(ValueError, match="exactly one optax_smile sampler, got 0"):
        optax_smile.stats(state)
    with pytest.raises(ValueError, match="exactly one optax_smile sampler, got 0"):
        optax_smile.last_accepted(state, PARAMS)


def test_state_of_two_samplers():
    tx = optax.chain(build("smile"), build("psmile"))
    with pytest.raises(ValueError, match="exactly one optax_smile sampler, got 2"):
        optax_smile.stats(tx.init(PARAMS))


@pytest.mark.parametrize("argument", ["step_size", "num_data", "prior_precision", "temperature"])
def test_tracers_pass(argument):
    def first_update(number):
        tx = build("psmile", **{argument: number})
        return tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=1.0)[0]

    traced = jax.jit(first_update)(2.0)
    np.testing.assert_allclose(traced["layer"]["w"], first_update(2.0)["layer"]["w"], rtol=1e-5)
    jax.eval_shape(first_update, -1.0)


@pytest.mark.parametrize("argument", ["noise_decay", "decoherence_length", "reset_quantile"])
def test_optional_tracers_pass(argument):
    def first_update(number, key):
        tx = build("psmile", **{argument: number, "key": key})
        return tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=1.0)[0]

    jax.eval_shape(first_update, 0.9, KEY)


def test_schedules_pass():
    tx = build("smile", step_size=optax.linear_schedule(1e-2, 1e-3, 10))
    assert optax_smile.stats(tx.init(PARAMS))["step_size"] == jnp.float32(1e-2)


def test_concrete_hyperparameters_are_checked_by_inject_hyperparams():
    tx = optax.inject_hyperparams(optax_smile.smile_naive)(step_size=-1.0, num_data=100)
    with pytest.raises(ValueError, match=house_form("smile_naive", "step_size", "> 0", "")):
        tx.init(PARAMS)


def test_num_data_is_required_and_named():
    with pytest.raises(TypeError, match="num_data"):
        optax_smile.smile(1e-2)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="positional"):
        optax_smile.smile(1e-2, 100)  # pyright: ignore[reportCallIssue]
