"""Wrong arguments raise at the earliest moment and name the argument, the rule and the value."""

import inspect
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from paper import PAPER

import optax_smile

MICROCANONICAL = ["smile", "psmile", "smile_naive", "psmile_naive", "mclmc"]
LANGEVIN = ["sgld", "psgld", "sghmc", "sgnht", "scale_adapted_sghmc", "cyclical_sgld"]
ALL = MICROCANONICAL + LANGEVIN
TUNED = ["smile", "psmile"]
KEY = jax.random.key(0)
PARAMS = {"layer": {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}}

# What a sampler cannot be built without.
NEEDED: dict[str, Any] = {"mclmc": {"decoherence_length": 1.0, "key": KEY}}
NEEDED |= {name: {"key": KEY} for name in LANGEVIN}
NEEDED |= {name: PAPER for name in TUNED}

every_sampler = pytest.mark.parametrize("name", ALL)


def accepts(name, argument):
    return argument in inspect.signature(getattr(optax_smile, name)).parameters


def build(name, **options):
    fn = getattr(optax_smile, name)
    return fn(**{"step_size": 1e-2, "num_data": 100} | NEEDED.get(name, {}) | options)


def with_leaf(leaf):
    return {"layer": {"w": leaf, "b": jnp.ones(3)}}


def in_init(name, rule, got):
    return house_form(f"{name}.init", "params", rule, got)


def in_update(name, argument, rule, got):
    return house_form(f"{name}.update", argument, rule, got)


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
    "friction": (r"between 0 and 1 \(exclusive\)", [0, 1, 0.0, 1.0, -0.1, 1.5, math.nan]),
    "gradient_noise": (">= 0", [-1, -1e-9, math.nan, math.inf]),
    "square_decay": (r"between 0 and 1 \(exclusive\)", [0, 1.0, -0.5, math.nan]),
    "smallest_root": ("> 0", [0, -1e-5, math.nan, math.inf]),
    "exploration": (r"in \[0, 1\)", [-0.1, 1, 1.0, 1.5, math.nan]),
    # By default there are 4 cycles.
    "total_steps": ("an integer >= 4", [3, 0, -1, 20_000.0, math.nan, True, "20000", None]),
    "num_cycles": ("an integer >= 1", [0, -1, 2.0, True, None]),
    "adapt_steps": ("an integer >= 1", [0, -1, 1.5, 1e3, "100", True, None]),
}
NOT_NUMBERS = ["0.1", True, [0.1], (0.1,), np.ones(2), {"a": 1.0}]


@pytest.mark.parametrize(
    ("name", "argument", "value", "rule"),
    [
        (name, argument, value, rule)
        for name in ALL
        for argument, (rule, values) in NUMBERS.items()
        for value in values
        if accepts(name, argument)
    ],
)
def test_numbers_out_of_range(name, argument, value, rule):
    assert_rejected(name, argument, value, rule, key=KEY)


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("psmile", "step_size"),
        ("psmile", "num_data"),
        ("psmile", "temperature"),
        ("sgld", "step_size"),
        ("cyclical_sgld", "step_size"),
        ("cyclical_sgld", "exploration"),
        ("psgld", "smallest_root"),
        ("sghmc", "gradient_noise"),
    ],
)
@pytest.mark.parametrize("value", [*NOT_NUMBERS, None], ids=str)
def test_not_a_number(name, argument, value):
    assert_rejected(name, argument, value, "a number")


@pytest.mark.parametrize(
    ("name", "argument"),
    [("sghmc", "friction"), ("scale_adapted_sghmc", "friction"), ("psgld", "square_decay")],
)
@pytest.mark.parametrize("value", [*NOT_NUMBERS, None], ids=str)
def test_not_a_probability(name, argument, value):
    assert_rejected(name, argument, value, r"a number between 0 and 1 \(exclusive\)")


def test_mclmc_needs_a_decoherence_length():
    assert_rejected("mclmc", "decoherence_length", None, "> 0")


def test_a_cycle_has_at_least_one_step():
    assert_rejected("cyclical_sgld", "total_steps", 6, "an integer >= 7", num_cycles=7)
    for total, cycles in ((7, 7), (1, 1), (np.int64(8), jnp.asarray(7))):
        build("cyclical_sgld", total_steps=total, num_cycles=cycles)


def test_the_ends_of_the_ranges_pass():
    build("cyclical_sgld", exploration=0)
    build("sghmc", gradient_noise=0, friction=1e-9)
    build("scale_adapted_sghmc", adapt_steps=1, friction=1 - 1e-9)


@every_sampler
@pytest.mark.parametrize("argument", ["prior_precision", "prior_mean"])
@pytest.mark.parametrize("value", ["1.0", True], ids=str)
def test_prior_is_not_a_number(name, argument, value):
    assert_rejected(name, argument, value, "a number")


@pytest.mark.parametrize("argument", ["prior_precision", "prior_mean"])
def test_prior_arrays_are_checked(argument):
    for bad in (np.array([[1.0, np.nan, 1.0]] * 2), jnp.array([[1.0, 1.0, jnp.inf]] * 2)):
        rule = "finite, got (nan at \\(0, 1\\)|inf at \\(0, 2\\))"
        with pytest.raises(ValueError, match=rule):
            build("psmile", **{argument: with_leaf(bad) | {}})
    with pytest.raises(ValueError, match="numbers .*, got an array of bool"):
        build("psmile", **{argument: np.ones(3, bool)})
    for wrong in (np.ones(2), {"layer": np.ones((2, 3))}, with_leaf(np.ones((3, 2)))):
        with pytest.raises(ValueError, match=r"of the shape .* at .*, got \("):
            build("psmile", **{argument: wrong}).init(PARAMS)
    build("psmile", **{argument: with_leaf(np.ones((2, 3)))}).init(PARAMS)


def test_seeds_are_keys():
    """An integer serves as in Optax."""
    for name in ("psmile", "sgld"):
        for seed in (7, np.int64(7), jnp.int32(7), jax.random.PRNGKey(7)):
            state: Any = build(name, key=seed).init(PARAMS)
            expected: Any = build(name, key=jax.random.key(7)).init(PARAMS)
            np.testing.assert_array_equal(optax.tree.get(state, "key"), expected.key)


@pytest.mark.parametrize("value", [jnp.float32(-1), jnp.nan, np.float64(0)], ids=str)
def test_array_scalars_are_checked(value):
    assert_rejected("smile", "step_size", value, "> 0")


@pytest.mark.parametrize("name", TUNED)
@pytest.mark.parametrize("value", [0, 0.0, 1, 1.0, -0.5, 98, math.nan, "0.98", True])
def test_reset_quantile(name, value):
    assert_rejected(name, "reject_quantile", value, r"between 0 and 1 \(exclusive\)")


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


CHOICES = {
    "integrator": ("'leapfrog', 'minimal_norm'", ["Leapfrog", "mclachlan", "", None, 2]),
    "friction_step": ("'euler', 'exact'", ["Euler", "obabo", "", None, True]),
}


@pytest.mark.parametrize(
    ("name", "argument", "value", "choices"),
    [
        (name, argument, value, choices)
        for name in ALL
        for argument, (choices, values) in CHOICES.items()
        for value in values
        if accepts(name, argument)
    ],
)
def test_unknown_choice(name, argument, value, choices):
    with pytest.raises(ValueError, match=house_form(name, argument, "one of", "")) as error:
        build(name, **{argument: value})
    assert choices in str(error.value) and repr(value) in str(error.value)


@pytest.mark.parametrize("name", TUNED)
@pytest.mark.parametrize("value", ["quantile", "quantile_tuner", 0.02, True, False])
def test_unknown_tuner(name, value):
    assert_rejected(name, "tuner", value, r"a tuner such as angle_tuner\(\), or None")


def test_tuner_that_was_not_called():
    with pytest.raises(ValueError, match=house_form("smile", "tuner", "a tuner", "<function")):
        build("smile", tuner=optax_smile.quantile_tuner)


@pytest.mark.parametrize("name", TUNED)
@pytest.mark.parametrize("value", ["refersh", "none", None, True])
def test_unknown_reset_momentum(name, value):
    got = re.escape(repr(value))
    with pytest.raises(
        ValueError, match=house_form(name, "reject_momentum", "one of 'zero', 'refresh'", got)
    ):
        build(name, reject_momentum=value)


@pytest.mark.parametrize("name", TUNED)
def test_refresh_needs_a_key(name):
    assert_rejected(name, "key", None, 'a JAX key .*"refresh"', reject_momentum="refresh")


@pytest.mark.parametrize("name", MICROCANONICAL)
def test_explicit_noise_needs_a_key(name):
    assert_rejected(name, "key", None, "a JAX key .*decoherence_length", decoherence_length=1.0)


@pytest.mark.parametrize("name", LANGEVIN)
def test_langevin_noise_needs_a_key(name):
    assert_rejected(name, "key", None, "a JAX key")
    with pytest.raises(TypeError, match="'key'"):
        getattr(optax_smile, name)(1e-2, num_data=100)


@pytest.mark.parametrize(
    "value",
    [4.2, "key", True, np.zeros(2), jax.random.split(KEY, 3)],
    ids=["float", "str", "bool", "floats", "many keys"],
)
@pytest.mark.parametrize("name", ["psmile", "mclmc", "sgld"])
def test_key_is_not_one_key(name, value):
    options = {"decoherence_length": 1.0} if accepts(name, "decoherence_length") else {}
    assert_rejected(name, "key", value, "a JAX key", **options)


@every_sampler
@pytest.mark.parametrize("tree", [{}, [], None, {"a": None, "b": ()}], ids=str)
def test_empty_tree(name, tree):
    with pytest.raises(ValueError, match=in_init(name, "at least 2", "0")):
        build(name).init(tree)


@every_sampler
@pytest.mark.parametrize("tree", [jnp.ones(()), jnp.ones(1), {"a": jnp.ones((1, 1)), "b": None}])
def test_one_parameter_is_too_few(name, tree):
    with pytest.raises(ValueError, match=in_init(name, "at least 2", "1")):
        build(name).init(tree)


@every_sampler
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32", "uint8", "bool", "complex64"])
def test_dtype_of_the_parameters(name, dtype):
    got = re.escape(f"{dtype} at ['layer']['w']")
    rule = in_init(name, "float32 or float64", got)
    for leaf in (jnp.ones((2, 3), dtype), jax.ShapeDtypeStruct((2, 3), jnp.dtype(dtype))):
        with pytest.raises(ValueError, match=rule):
            build(name).init(with_leaf(leaf))


@pytest.mark.parametrize(("leaf", "got"), [(1.0, "float"), (2, "int"), ("w", "str")])
def test_parameters_that_are_not_arrays(leaf, got):
    rule = house_form(
        "psmile.init", "params", "float32 or float64", re.escape(f"{got} at ['layer']")
    )
    with pytest.raises(ValueError, match=rule):
        build("psmile").init(with_leaf(leaf))


def test_key_as_a_parameter():
    rule = house_form(
        "psmile.init", "params", "float32 or float64", re.escape("key<fry> at ['layer']")
    )
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
    rule = in_update(name, "updates", "a tree of the structure of params", "PyTreeDef")
    with pytest.raises(ValueError, match=rule):
        tx.update(tree, tx.init(PARAMS), PARAMS, value=1.0)


@every_sampler
def test_shape_of_updates(name):
    tx = build(name)
    where = re.escape("of shape (2, 3) at ['layer']['w']")
    with pytest.raises(ValueError, match=in_update(name, "updates", where, r"\(3, 2\)")):
        tx.update(RESHAPED, tx.init(PARAMS), PARAMS, value=1.0)


@every_sampler
@pytest.mark.parametrize("tree", [FLAT, SHORT, WITH_NONE])
def test_structure_that_changes_between_calls(name, tree):
    tx = build(name)
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=1.0)
    rule = house_form(
        f"{name}.update", "params", "a tree of the structure of the one given to init", ""
    )
    with pytest.raises(ValueError, match=rule):
        tx.update(tree, state, tree, value=1.0)


@every_sampler
def test_shape_that_changes_between_calls(name):
    tx = build(name)
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=1.0)
    where = re.escape("of shape (2, 3) at ['layer']['w'], as the one given to init")
    with pytest.raises(ValueError, match=in_update(name, "params", where, r"\(3, 2\)")):
        tx.update(RESHAPED, state, RESHAPED, value=1.0)


@every_sampler
@pytest.mark.parametrize("shape", [(1,), (16,), (1, 1), (0,)])
def test_shape_of_value(name, shape):
    tx = build(name)
    rule = house_form(
        f"{name}.update", "value", "the scalar mean loss", re.escape(f"shape {shape}")
    )
    with pytest.raises(ValueError, match=rule):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=jnp.ones(shape))
    with pytest.raises(ValueError, match=rule):
        jax.jit(tx.update)(PARAMS, tx.init(PARAMS), PARAMS, value=jnp.ones(shape))


@pytest.mark.parametrize("name", ["smile", "sgld"])
@pytest.mark.parametrize("value", [(0.5, {}), {"loss": 0.5}, "0.5"], ids=str)
def test_value_is_no_number(name, value):
    tx, got = build(name), "'0.5'" if value == "0.5" else f"a {type(value).__name__}"
    with pytest.raises(ValueError, match=in_update(name, "value", "scalar", got)):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=value)


@pytest.mark.parametrize("name", ["smile", "sgld"])
@pytest.mark.parametrize("value", [1, 1.5, np.float64(2), np.ones(()), jnp.float32(3)])
def test_every_scalar_is_a_value(name, value):
    tx = build(name)
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


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("psmile", "decoherence_length"),
        ("psmile", "reject_quantile"),
        ("mclmc", "decoherence_length"),
        ("sgld", "step_size"),
        ("psgld", "square_decay"),
        ("psgld", "smallest_root"),
        ("sghmc", "friction"),
        ("sghmc", "gradient_noise"),
        ("scale_adapted_sghmc", "friction"),
        ("cyclical_sgld", "step_size"),
        ("cyclical_sgld", "exploration"),
    ],
)
def test_optional_tracers_pass(name, argument):
    def first_update(number, key):
        tx = build(name, **{argument: number, "key": key})
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
