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
from optax_smile.potential import Potential
from optax_smile.potential import gradient as potential_gradient

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
        rule = 'finite(, or "start")?, got (nan at \\(0, 1\\)|inf at \\(0, 2\\))'
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
    with pytest.raises(ValueError, match=house_form(name, "key", "a JAX key .*", None)):
        getattr(optax_smile, name)(1e-2, num_data=100)


@pytest.mark.parametrize("name", ["smile", "psmile"])
def test_a_sampler_without_a_key_says_what_to_write(name):
    with pytest.raises(ValueError, match="got None. Write `key=0`, or any other seed") as error:
        getattr(optax_smile, name)(num_data=100)
    assert str(error.value).startswith(f"`{name}(key=...)` must be a JAX key such as")
    with pytest.raises(TypeError, match="num_data"):
        getattr(optax_smile, name)(key=0)


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


def first(name="psmile", **options):
    tx: Any = build(name, **{"key": KEY} | options)
    return tx, tx.init(PARAMS)


class NotCalled:
    """A model of which `apply` is the function."""

    def init(self):
        """As Flax has it."""

    def apply(self, params, inputs):
        """Outputs."""

    def __call__(self, inputs):
        raise RuntimeError("not bound")


ODD_FUNCTIONS = [None, 3, "x", [], dict, lambda: None, NotCalled(), jnp.ones(2)]
ODD_FUNCTION_NAMES = ["None", "int", "str", "list", "class", "arity", "model", "array"]
odd_functions = pytest.mark.parametrize("wrong", ODD_FUNCTIONS, ids=ODD_FUNCTION_NAMES)
STARTS = {"w": jnp.ones((2, 3))}


def mean_loss(params, batch):
    return jnp.mean((params["w"] - batch) ** 2)


def sample_with(**changes):
    given: dict[str, Any] = {"loss_fn": mean_loss, "params": STARTS, "batches": [jnp.ones(3)]}
    given |= {"sampler": build("smile_naive"), "num_warmup": 0, "num_draws": 2, "key": 0}
    given |= {"progress": False, **changes}
    return optax_smile.sample(**given)


def warm_with(**changes):
    given: dict[str, Any] = {"loss_fn": mean_loss, "batches": [jnp.ones(3)], "num_members": 2}
    given |= {"init_fn": lambda key: {"w": jnp.ones(3)}, "optimizer": optax.sgd(0.1), "key": 0}
    return optax_smile.warmstart(**given | {"num_epochs": 1, "progress": False} | changes)


def predict_with(**changes):
    given: dict[str, Any] = {"apply_fn": lambda params, x: x * params, "snapshots": [jnp.ones(())]}
    given |= {"inputs": jnp.ones((3, 2)), "likelihood": "categorical"}
    return optax_smile.predict(**given | changes)


FUNCTIONS = {
    "sample.loss_fn": sample_with,
    "sample.callback": sample_with,
    "warmstart.loss_fn": warm_with,
    "warmstart.init_fn": warm_with,
    "predict.apply_fn": predict_with,
}


@odd_functions
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_no_function_of_these_arguments(name, wrong):
    called, argument = name.split(".")
    if argument == "callback" and wrong is None:
        return
    with pytest.raises(ValueError, match=rf"^`{called}\({argument}=...\)` must be a function of"):
        FUNCTIONS[name](**{argument: wrong})


def test_a_model_is_told_to_pass_its_function():
    with pytest.raises(ValueError, match="A model is none: its `apply` is"):
        predict_with(apply_fn=NotCalled())


LOSSES: dict[str, tuple[Any, str]] = {
    "tuple": (lambda params, batch: (mean_loss(params, batch), {}), "With `aux=`"),
    "vector": (lambda params, batch: (params["w"] - batch) ** 2, "scalar mean loss"),
    "dict": (lambda params, batch: {"loss": mean_loss(params, batch)}, "scalar mean loss"),
    "integer": (lambda params, batch: jnp.sum(batch > 0), "scalar mean loss, got int"),
    "unknown leaf": (lambda params, batch: params["v"], "got KeyError: 'v'"),
    "branch": (lambda params, batch: 1.0 if batch.sum() > 0 else 0.0, "got TracerBoolConv"),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("called", ["sample", "warmstart"])
def test_a_loss_that_is_none(called, name):
    loss, message = LOSSES[name]
    form = rf"(?s)^`{called}\(loss_fn=...\)` must be .*{re.escape(message)}"
    with pytest.raises(ValueError, match=form):
        {"sample": sample_with, "warmstart": warm_with}[called](loss_fn=loss)


def test_an_error_of_the_users_own_comes_through():
    def broken(params, batch):
        raise FloatingPointError("mine")

    with pytest.raises(FloatingPointError, match="mine"):
        sample_with(loss_fn=broken)


@pytest.mark.parametrize(
    "wrong", [None, 3, "x", [], optax.adam, dict, NotCalled()], ids=lambda x: type(x).__name__
)
@pytest.mark.parametrize(
    ("call", "argument"),
    [(sample_with, "sampler"), (warm_with, "optimizer")],
    ids=["sample", "warmstart"],
)
def test_what_is_no_transformation(call, argument, wrong):
    with pytest.raises(ValueError, match=rf"\({argument}=...\)` must be an Optax transformation"):
        call(**{argument: wrong})


@pytest.mark.parametrize("call", [sample_with, warm_with])
@pytest.mark.parametrize(
    "wrong", [None, 3, "x", {"x": 1}, lambda: [1]], ids=lambda x: type(x).__name__
)
def test_what_are_no_batches(call, wrong):
    with pytest.raises(ValueError, match=r"\(batches=...\)` must be an iterable of batches, got"):
        call(batches=wrong)
    with pytest.raises(ValueError, match=r"\(batches=...\)` must be an iterable of batches, trees"):
        call(batches=[np.array(["x", "y"])])


@pytest.mark.parametrize("argument", ["progress", "resume", "stochastic", "per_chain"])
@pytest.mark.parametrize("wrong", ["yes", 1, None])
def test_flags_are_true_or_false(argument, wrong):
    form = rf"^`sample\({argument}=...\)` must be True or False, got {wrong!r}"
    with pytest.raises(ValueError, match=form):
        sample_with(**{argument: wrong})


def test_flags_of_other_functions(tmp_path):
    for call in (
        lambda: optax_smile.load_snapshots(tmp_path, flat="x"),  # pyright: ignore
        lambda: optax_smile.diagnostics.disagreement(np.ones((2, 2, 2)), classes="no"),  # pyright: ignore
        lambda: warm_with(progress="yes"),
    ):
        with pytest.raises(ValueError, match=r"=...\)` must be True or False"):
            call()


@pytest.mark.parametrize("name", ["psmile", "smile", "sgld", "psgld", "mclmc"])
def test_the_state_of_another_transformation(name):
    tx, _ = first(name)
    others = [build(other, key=KEY).init(PARAMS) for other in ALL if other != name]
    others += [optax.adam(1e-3).init(PARAMS), (), None, PARAMS, jnp.ones(3)]
    own = tx.init(PARAMS)
    alike = [x for x in others if jax.tree.structure(x) == jax.tree.structure(own)]
    for state in others:
        if any(state is x for x in alike):
            continue
        with pytest.raises(
            ValueError, match=in_update(name, "state", f"returned.*{name}|{name}", "")
        ):
            tx.update(PARAMS, state, PARAMS, value=1.0)
    assert len(alike) <= 2


@pytest.mark.parametrize("options", [{"integrator": "leapfrog"}, {"decoherence_length": 1.0}])
def test_the_state_of_a_sampler_built_otherwise(options):
    tx, _ = first()
    with pytest.raises(
        ValueError, match=in_update("psmile", "state", "returned", "one of a sampler")
    ):
        tx.update(PARAMS, first(**options)[1], PARAMS, value=1.0)


@every_sampler
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_parameters_that_are_not_finite(name, bad):
    tree = with_leaf(jnp.ones((2, 3)).at[1, 1].set(bad))
    with pytest.raises(
        ValueError, match=in_init(name, "finite", r"nan or inf at \['layer'\]\['w'\]")
    ):
        build(name).init(tree)


def test_parameters_that_are_not_finite_elsewhere():
    """Also where the loss does not see them."""
    bad = {"w": jnp.ones((2, 3)), "unused": jnp.array([1.0, jnp.nan])}
    with pytest.raises(ValueError, match=r"^`sample\(params=...\)` must be finite, .*'unused'"):
        sample_with(params=bad)
    with pytest.raises(ValueError, match=r"^`chains_from_weights\(weights=...\)` must be finite"):
        optax_smile.chains_from_weights([{"w": jnp.full(3, jnp.nan)}])


@pytest.mark.parametrize("value", [1e-320, 1e-39, 1e39])
def test_step_sizes_that_are_zero_or_infinite_in_float32(value):
    assert_rejected("psmile_naive", "step_size", value, "> 0 and finite in float32")


def test_step_sizes_that_float64_knows():
    with jax.enable_x64(True):
        build("psmile_naive", step_size=1e-39)


@pytest.mark.parametrize("value", [0, 2.0, 10, -0.1, math.nan])
def test_an_angle_is_one(value):
    form = house_form("angle_tuner", "angle", "> 0 and at most pi / 2", re.escape(repr(value)))
    with pytest.raises(ValueError, match=form):
        optax_smile.angle_tuner(value)
    optax_smile.angle_tuner(math.pi / 2)


@pytest.mark.parametrize("schedule", [lambda: 0.1, lambda count: "0.1", lambda count: None, dict])
def test_what_is_no_schedule(schedule):
    for name in ("smile_naive", "sgld", "cyclical_sgld"):
        with pytest.raises(ValueError, match=rf"^`{name}\(step_size=...\)` must be a (func|sched)"):
            build(name, step_size=schedule).init(PARAMS)


@every_sampler
@pytest.mark.parametrize("misnamed", ["loss", "values", "val"])
def test_a_loss_by_another_name(name, misnamed):
    tx, state = first(name)
    with pytest.raises(ValueError, match=in_update(name, misnamed, "named `value`", "")):
        tx.update(PARAMS, state, PARAMS, **{misnamed: 1.0})


def test_keywords_of_other_transformations_pass():
    tx, state = first("psmile_naive")
    tx.update(PARAMS, state, PARAMS, value=1.0, loss=2.0, grad=PARAMS, value_fn=None, hessian=1)
    tx.update(PARAMS, state, PARAMS, grad=PARAMS, value_fn=None, hessian=1)


@every_sampler
@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_gradients_are_floating_point(name, dtype):
    tx, state = first(name)
    wrong = jax.tree.map(lambda x: x.astype(dtype), PARAMS)
    with pytest.raises(ValueError, match=in_update(name, "updates", "floating-point", dtype)):
        tx.update(wrong, state, PARAMS, value=1.0)


def test_what_gradients_in_bfloat16_cost():
    """The variance of a normal posterior, from the gradients as the sampler sees them."""
    x = jnp.linspace(-8, 8, 4001)
    posterior = Potential(num_data=1e6, prior_precision=0.0, temperature=1e6)
    force = np.asarray(potential_gradient(posterior, x.astype(jnp.bfloat16), x), float)
    energy = np.concatenate([[0], np.cumsum((force[1:] + force[:-1]) / 2)]) * float(x[1] - x[0])
    weight = np.exp(energy.min() - energy)
    variance = np.sum(weight * np.asarray(x, float) ** 2) / weight.sum()
    assert force.dtype == float and np.abs(force - np.asarray(x)).max() > 0.01
    assert abs(variance - 1) < 2**-9


def test_more_data_than_int32_holds():
    """Under a traced temperature NumPy's integers wrapped round in silence."""
    for number in (10**10, np.int64(10**10)):

        def first_update(temperature, number: Any = number):
            tx = build("sgld", num_data=number, temperature=temperature)
            return tx.update(PARAMS, tx.init(PARAMS), PARAMS)[0]["layer"]["w"]

        expected = first_update(jnp.float32(2), 1e10)
        np.testing.assert_allclose(jax.jit(first_update)(2.0), expected, rtol=1e-5)


def test_from_members_needs_members():
    for network in (
        {"w": jnp.ones((2, 3)), "b": jnp.ones(3)},
        {"w": jnp.ones(3), "s": jnp.ones(())},
    ):
        form = r"^`Snapshots.from_members\(params=...\)` must be a tree .* leading chain axis"
        with pytest.raises(ValueError, match=form):
            optax_smile.Snapshots.from_members(network)


@pytest.mark.parametrize("name", ["summary", "to_arviz"])
@pytest.mark.parametrize("tree", [PARAMS, np.ones((2, 3)), None, optax_smile.Snapshots])
def test_a_tree_is_no_run(name, tree):
    form = rf"^`{name}\(snapshots=...\)` must be what `sample` or `load_snapshots` returns"
    with pytest.raises(ValueError, match=form):
        getattr(optax_smile.diagnostics, name)(tree)


NO_ARRAYS = [
    [[1.0, 2.0], [3.0]],
    ["1", "2"],
    np.array(["1.0"]),
    {"a": 1.0},
    None,
    1j,
    KEY,
    object(),
]


@pytest.mark.parametrize("wrong", NO_ARRAYS, ids=lambda x: type(x).__name__)
def test_what_metrics_take(wrong):
    ones, metrics = np.ones(2), optax_smile.metrics
    for call in (
        lambda: metrics.rmse(wrong, ones),
        lambda: metrics.accuracy(wrong, [0, 1]),
        lambda: metrics.accuracy([[1.0, 0.0]], wrong),
        lambda: metrics.lppd(wrong),
        lambda: metrics.perplexity(ones, wrong) if wrong is not None else metrics.perplexity(None),  # pyright: ignore
        lambda: metrics.crps(ones, ones, wrong),
        lambda: metrics.ood_auroc(ones, wrong),
    ):
        with pytest.raises(ValueError, match=r"^`\w+\(\w+=...\)` must be an array of numbers, got"):
            call()


@pytest.mark.parametrize("bad", [math.inf, -math.inf])
def test_infinite_predictions_are_no_score(bad):
    wrong, ones, metrics = np.array([1.0, bad]), np.ones(2), optax_smile.metrics
    for call in (
        lambda: metrics.rmse(wrong, ones),
        lambda: metrics.rmse(ones, wrong),
        lambda: metrics.crps(ones, ones, wrong),
    ):
        with pytest.raises(ValueError, match="must be finite, got -?inf at"):
            call()
    if bad > 0:
        with pytest.raises(ValueError, match="must be below infinity"):
            metrics.lppd(wrong)
        with pytest.raises(ValueError, match=r"`interval_width\(upper=.*below `lower`, got 1.0 ab"):
            metrics.interval_width(wrong, ones)
        assert metrics.interval_width(ones, wrong) == bad
    else:
        assert metrics.lppd(wrong) == bad
        assert metrics.interval_width(wrong, ones) == -bad
        with pytest.raises(ValueError, match=r"`coverage\(upper=.*below `lower`, got -inf above"):
            metrics.coverage(ones, wrong, ones)


def test_errors_name_the_function_that_was_called(tmp_path):
    metrics, diagnostics, plots = optax_smile.metrics, optax_smile.diagnostics, optax_smile.plots
    mesh: Any = "x"
    for name, call in {
        "sample(mesh": lambda: sample_with(mesh=mesh),
        "sample(specs": lambda: sample_with(specs=STARTS),
        "warmstart(mesh": lambda: warm_with(mesh=mesh),
        "warmstart(specs": lambda: warm_with(specs=STARTS),
        "predict(mesh": lambda: predict_with(mesh=mesh),
        "predict(specs": lambda: predict_with(specs=STARTS),
        "predict(inputs": lambda: predict_with(inputs=3.0),
        "ece(labels": lambda: metrics.ece([[1.0]], ["x"]),
        "aurc(labels": lambda: metrics.aurc([[1.0]], ["x"]),
        "travel(params": lambda: diagnostics.travel(np.ones(2), np.ones(2)),
        "weight_rhat(params": lambda: diagnostics.weight_rhat(np.ones(2)),
        "plots.reliability(labels": lambda: plots.reliability([[1.0]], ["x"]),
        "plots.regression_band(std": lambda: plots.regression_band(None, [1.0], [-1.0]),
        "parallel.init(params": lambda: optax_smile.parallel.init(build("sgld"), PARAMS),
        "load_snapshots(directory": lambda: optax_smile.load_snapshots(tmp_path),
        "report.write(directory": lambda: optax_smile.report.write(tmp_path),
    }.items():
        with pytest.raises(ValueError) as error:
            call()
        assert str(error.value).startswith(f"`{name}=...)` must be "), error.value


def test_a_report_is_a_page(tmp_path):
    for output in (tmp_path / "page.pdf", tmp_path / "page"):
        form = r"^`report.write\(output=...\)` must be a file .html or .htm"
        with pytest.raises(ValueError, match=form):
            optax_smile.report.write(tmp_path, output)
