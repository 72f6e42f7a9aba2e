"""Bad input: a test made from declared constraints, and messages picked by hand.

Each declared constraint gets values that it must refuse, in a call that is valid otherwise. The
error names the function that was called and the argument. What functions refuse beyond their
constraints (relations, trees, states) has a message here or a test beside the feature.
"""

import inspect
import math
import pickle
import re
from typing import Any, get_args

import calls
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from calls import FAMILIES, KEY, PARAMS, family

import optax_smile
from optax_smile import ArgumentError, _check, published
from optax_smile.potential import PerParameter
from optax_smile.state import STATE_FORMAT

NOT_NUMBERS = ["x", None, True, np.ones(2), 1j]


class Model:
    """A model of which `apply` is the function."""

    def init(self):
        """As Flax has it."""

    def apply(self, params, inputs):
        """Outputs."""

    __call__ = apply


def wrong(constraint: Any) -> list[Any]:
    """Values that a constraint has to refuse."""
    match constraint:
        case _check.Either():
            values = [value for option in constraint.options for value in wrong(option)]
            return [v for v in values if all(refuses(option, v) for option in constraint.options)]
        case _check.Real(low=low, high=high):
            outside = [math.nextafter(low, -math.inf)] * (low > -math.inf)
            outside += [math.nextafter(high, math.inf)] * (high < math.inf)
            outside += [low] * (constraint.open in ("low", "both"))
            outside += [1e-320] * (low == 0 and constraint.open in ("low", "both"))
            outside += [high] * (constraint.open in ("high", "both"))
            outside += [math.inf] * (not constraint.infinite)
            # What float32 holds as 0 or inf; scores have float64.
            if constraint.dtype is None and math.isinf(high):
                outside += [1e-39] * (low == 0 and constraint.open == "low")
                outside += [1e39] * (not constraint.infinite)
            return [*outside, math.nan, np.float32(math.nan), *NOT_NUMBERS]
        case _check.Whole(low=low):
            return [low - 1, low + 0.5, float(low), 2**31, math.nan, *NOT_NUMBERS]
        case _check.OneOf():
            words = get_args(constraint.words) or list(constraint.words)
            return ["", words[0].upper() + "x", None, 3, ["x"]]
        case _check.Key():
            many = jax.random.split(KEY, 2)
            return ["x", 1.5, True, many, *[None] * constraint.needed]
        case _check.Function():
            return [None, 3, "x", [], dict, Model(), jnp.ones(2), lambda a, b, c, d, e, f, g: None]
        case _check.Tree():
            nans = [{"w": np.full(3, np.nan)}] * constraint.finite
            uneven = [{"a": np.ones((2, 3)), "b": np.ones((3, 3))}, np.ones((0, 3)), np.ones(())]
            uneven *= bool(constraint.axes)
            nans.append({"w": masked((2, 2, 2))})
            return ["x", {"w": "x"}, {"w": object()}, {"w": 10**30}, *nans, *uneven]
        case _check.Array(axes=axes, each=each):
            values = [None, "x", {}, [[1.0], [1.0, 2.0]], np.array(["1"]), KEY, np.zeros((0, 3))]
            sized = np.ones((1,) * (7 if "..." not in axes else 0)) if axes else None
            if sized is not None and not _check._has_axes(sized.ndim, axes.split(" or ")[0]):
                values.append(sized)
            numbers = wrong(each) if isinstance(each, _check.Real) else [math.inf]
            number = next(x for x in numbers if isinstance(x, float))
            values.append(masked((2,) * axes_of(axes)))
            return [*values, np.full((2,) * axes_of(axes), number)]
        case PerParameter():
            bad = [x for x in wrong(constraint.each) if isinstance(x, float)]
            return [
                "x",
                True,
                {"w": "x"},
                np.ones(3, bool),
                *bad,
                *({"w": np.full(3, x)} for x in bad),
            ]
        case _check.Where() if constraint is _check.TRANSFORMATION:
            return [None, 3, "x", optax.adam, dict, Model]
        case _check.Where() if constraint is _check.BATCHES:
            return [None, 3, "x", {"x": 1}, lambda: [1], np.ones(())]
        case _check.Where():
            return [object(), 3 + 1j]
        case _:
            return [object()]


def masked(shape: tuple[int, ...]) -> np.ndarray:
    """Ones, but for an entry that is masked."""
    return np.ma.masked_array(np.ones(shape), mask=np.arange(math.prod(shape)) == 1)


def axes_of(axes: str) -> int:
    names = axes.split(" or ")[0].strip("[]").split(", ")
    return len([name for name in names if name not in ("", "...")]) or 1


def refuses(constraint, value) -> bool:
    try:
        constraint("f", "x", value)
    except ArgumentError:
        return True
    return False


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Directory of a run."""
    return calls.run_in(tmp_path_factory.mktemp("arguments") / "run")


def declared_as(name: str) -> str | None:
    """What a function of `calls` is called in `DECLARED`."""
    return next((x for x in (name, name.rpartition(".")[2]) if x in _check.DECLARED), None)


@pytest.mark.parametrize("which", FAMILIES)
def test_values_that_constraints_refuse(which, run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    faults, number = [], 0
    for name, function, arguments in family(which, run):
        if (declared := declared_as(name)) is None:
            continue
        for argument, constraint in _check.DECLARED[declared][1].items():
            values = wrong(constraint)
            assert values, (name, argument)
            for value in values:
                number += 1
                try:
                    function(**arguments | {argument: value})
                    faults.append(f"{name}({argument}={value!r}) passed")
                except ArgumentError as error:
                    if (error.function, error.argument) != (declared, argument) or not error.got:
                        faults.append(f"{name}({argument}={value!r}): {error}")
    assert not faults, "\n".join(faults)
    assert number > 20


def test_every_declaration_has_a_valid_call(run):
    known = {declared_as(name) for which in FAMILIES for name, _, _ in family(which, run)}
    assert set(_check.DECLARED) == known - {None}


def documented(function) -> dict[str, str]:
    """Entries of the section Args of a docstring."""
    text = inspect.getdoc(function) or ""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", text, re.DOTALL | re.MULTILINE)
    entries = re.split(r"^    (?=\w)", section[1] if section else "", flags=re.MULTILINE)[1:]
    found = {}
    for entry in entries:
        names, _, told = entry.partition(": ")
        found |= {name.strip(): " ".join(told.split()) for name in names.split(",")}
    return found


def bounds(constraint) -> list[str]:
    """Ranges of numbers in a constraint, as docstrings write them."""
    if isinstance(constraint, _check.Either):
        return [bound for option in constraint.options for bound in bounds(option)]
    if isinstance(constraint, PerParameter):
        return bounds(constraint.each)
    if isinstance(constraint, _check.Whole):
        return [f">= {constraint.low}"]
    if isinstance(constraint, _check.Real):
        return [re.sub("^a (finite )?number( in)? ?", "", constraint.rule)]
    return []


def test_docstrings_tell_the_ranges():
    """Of each number; those that refer to another function have fewer entries."""
    faults = []
    for name, (function, constraints) in _check.DECLARED.items():
        entries = documented(function)
        for argument, constraint in constraints.items():
            for bound in bounds(constraint):
                if bound and argument in entries and bound not in entries[argument]:
                    faults.append(f"{name}({argument}): {bound!r} not in {entries[argument]!r}")
    assert not faults, "\n".join(faults)


# ----------------------------------------------------------------- messages and relations

SAMPLERS = ["smile", "psmile", "mclmc", "sgld", "psgld", "sghmc"]
SAMPLERS += ["scale_adapted_sghmc", "cyclical_sgld"]


def build(name, **options) -> Any:
    needed = {"decoherence_length": 1.0} if name == "mclmc" else {}
    given = {"step_size": 1e-2, "num_data": 100, "key": KEY} | needed | options
    return getattr(optax_smile, name)(**given)


def update(name="psmile", updates=PARAMS, state=None, params=PARAMS, **given):
    tx = build(name)
    return tx.update(updates, tx.init(PARAMS) if state is None else state, params, **given)


def loss_fn(params, batch):
    return jnp.mean((params["w"] - batch) ** 2)


def sample(**changes):
    given: dict[str, Any] = {"loss_fn": loss_fn, "params": {"w": jnp.ones((2, 3))}, "key": 0}
    given |= {"batches": [jnp.ones(3)], "sampler": calls.fixed(), "num_warmup": 0, "num_draws": 2}
    given |= {"progress": False} | changes
    return optax_smile.sample(**given)


def warmstart(**changes):
    given: dict[str, Any] = {"loss_fn": loss_fn, "batches": [jnp.ones(3)], "num_members": 2}
    given |= {
        "init_fn": lambda key: {"w": jax.random.normal(key, (3,))},
        "optimizer": optax.sgd(0.1),
        "key": 0,
    }
    return optax_smile.warmstart(**given | {"num_epochs": 1, "progress": False} | changes)


BAD = {"w": jnp.ones((2, 3)).at[1, 1].set(jnp.nan), "b": jnp.ones(3)}
HALF = {"w": jnp.ones((2, 3), "bfloat16"), "b": jnp.ones(3)}
metrics, psmile = optax_smile.metrics, optax_smile.psmile
ones = np.ones(2)
MESSAGES: list[tuple[Any, str]] = [
    (
        lambda: psmile(num_data=9, prior_mean="init"),
        "must be a finite number, or a tree of such numbers, or 'start', got 'init'",
    ),
    # How a sampler gets its step size, and its key.
    (
        lambda: warmstart(init_fn=lambda key: {"w": jnp.ones(3, int)}),
        "`warmstart(init_fn=...)` must be a function of (key) that returns floating-point param",
    ),
    (
        lambda: build("sgld", key=None),
        "`sgld(key=...)` must be a single JAX key, such as jax.random.key(0), or an integer seed"
        " from 0 to 2**32 - 1, got None.",
    ),
    (
        lambda: psmile(1e-3, tuner=optax_smile.angle_tuner(), num_data=9, key=0),
        "`psmile(tuner=...)` must be None or a tuner such as `quantile_tuner(...)` if `step_size`"
        " is given, got angle_tuner(angle=0.06, adapt_steps=None). This tuner chooses the step",
    ),
    (
        lambda: psmile(tuner=optax_smile.quantile_tuner(), num_data=9, key=0),
        "`psmile(step_size=...)` must be a number > 0 or a schedule, from which quantile_tuner",
    ),
    (
        lambda: build("psmile", decoherence_length="match"),
        "or one of 'matched', 'turning', or None",
    ),
    (
        lambda: build("cyclical_sgld", total_steps=6, num_cycles=7),
        "an integer >= 7, a step for each",
    ),
    (lambda: build("sgld", step_size=lambda count: "x").init(PARAMS), "one that gives 'x'"),
    (
        lambda: build("psmile", log_prior=jnp.sum),
        "must be 0 together with `log_prior`, got 1.0",
    ),
    (
        lambda: build("psmile", prior_precision={"x": 1.0}).init(PARAMS),
        "`psmile(prior_precision=...)` must be a number or a prefix of the parameter tree",
    ),
    (
        lambda: build("sgld", prior_mean={"w": np.ones((3, 2)), "b": 0.0}).init(PARAMS),
        "`sgld(prior_mean=...)` must be a number or of the shape (2, 3) at ['w'], got (3, 2)",
    ),
    (
        lambda: optax.inject_hyperparams(optax_smile.sgld)(-1.0, num_data=9, key=0).init(PARAMS),
        "`sgld(step_size=...)` must be a finite number > 0",
    ),
    # Parameters.
    (
        lambda: build("psmile").init({}),
        "`psmile.init(params=...)` must be a tree of at least 2 para",
    ),
    (lambda: build("psmile").init(HALF), "got bfloat16 at ['w']. Keep the sampled parameters in"),
    (
        lambda: build("sghmc").init({"w": 1.0}),
        "must be a tree with at least one float32 or float64 array, got 1.0 at ['w']",
    ),
    # A call of `update`.
    (
        lambda: update(updates={"w": PARAMS["w"]}),
        "`psmile.update(updates=...)` must be a tree of the",
    ),
    (
        lambda: update(updates=PARAMS | {"b": jnp.ones(2)}),
        "of shape (3,) at ['b'], as params, got (2,)",
    ),
    (lambda: update(updates=jax.tree.map(jnp.int32, PARAMS)), "a tree of floating-point gradients"),
    (lambda: update("sgld", value=(0.5, {})), "must be the scalar mean loss, got a tuple"),
    (
        lambda: update(mean_loss=0.5),
        "`psmile.update(mean_loss=...)` must be left out unless `value` is passed",
    ),
    (
        lambda: update(state=optax.adam(1.0).init(PARAMS)),
        "must be what `init` or `update` of psmile",
    ),
    (
        lambda: update(state=build("psmile", integrator="minimal_norm").init(PARAMS)),
        "got one of another sampler, or with other settings",
    ),
    (
        lambda: update(state=optax.tree.set(build("psmile").init(PARAMS), state_format=1)),
        f"must be a state of format {STATE_FORMAT}, got format 1. Another version of optax_smile",
    ),
    # What a state can be asked for.
    (lambda: optax_smile.stats(build("sgld")), "sampler, got the transformation. Pass what `init`"),
    (
        lambda: build("sgld", step_size=lambda count: -1e-3).init(PARAMS),
        "`sgld(step_size=...)` must be a schedule that gives no number below 0, got one that gives",
    ),
    (
        lambda: optax_smile.stats(()),
        "`stats(state=...)` must be the state of a transformation with exactly one optax_smile",
    ),
    (
        lambda: optax_smile.stats(optax.chain(build("sgld"), build("sgld")).init(PARAMS)),
        "exactly one optax_smile sampler, got one with 2",
    ),
    (
        lambda: optax_smile.last_accepted(
            optax.chain(build("sgld"), optax.scale_by_adam()).init(PARAMS), PARAMS
        ),
        "ends with the sampler, got one transformation after it. Remove what comes after",
    ),
    (
        lambda: optax_smile.stats(
            optax.chain(build("sgld"), optax.masked(optax.scale(0.5), True)).init(PARAMS)
        ),
        "chain` that ends with the sampler, got one transformation after it",
    ),
    # Losses and models.
    (
        lambda: sample(loss_fn=Model()),
        "a function of (params, batch), got a Model. Pass `model.apply`",
    ),
    (lambda: warmstart(loss_fn=lambda p, b: p["v"]), "got KeyError: 'v'"),
]


@pytest.mark.parametrize("number", range(len(MESSAGES)))
def test_messages(number):
    call, text = MESSAGES[number]
    with pytest.raises(ArgumentError) as error:
        call()
    assert text in str(error.value)
    assert isinstance(error.value, ValueError)


def test_missing_params():
    """In the words of Optax, and with what to do."""
    weights = optax.add_decayed_weights(0.1)
    with pytest.raises(ValueError) as expected:
        weights.update(PARAMS, weights.init(PARAMS), None)
    for name in ("psmile", "sgld"):
        with pytest.raises(ValueError) as error:
            update(name, params=None)
        assert str(error.value).startswith(str(expected.value))
        assert "`optax_smile.tracked(sampler)`" in str(error.value)


def test_traced_numbers_pass_and_mean_the_same():
    """Wherever a sampler may be built inside a compiled function."""
    numbers = {"num_data": 50.0, "prior_precision": 2.0, "temperature": 2.0, "step_size": 0.5}
    for argument, number in numbers.items():

        def first_update(number, argument=argument):
            tx = build("sgld", **{argument: number})
            return tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=1.0)[0]

        traced, plain = jax.jit(first_update)(number), first_update(number)
        np.testing.assert_allclose(traced["w"], plain["w"], rtol=1e-5)
        jax.eval_shape(lambda x, a=argument: build("psmile", **{a: x}).init(PARAMS), -1.0)
    options = {"psmile": ["decoherence_length", "reject_quantile"], "psgld": ["square_decay"]}
    options |= {"sghmc": ["friction", "gradient_noise"], "cyclical_sgld": ["exploration"]}
    for name, arguments in options.items():
        for argument in arguments:
            jax.eval_shape(lambda x, n=name, a=argument: build(n, **{a: x}).init(PARAMS), 0.9)


def test_ends_of_ranges_pass():
    build("cyclical_sgld", exploration=0, total_steps=np.int64(7), num_cycles=jnp.asarray(7))
    build("sghmc", gradient_noise=0, friction=1e-9)
    build("scale_adapted_sghmc", adapt_steps=1, friction=1 - 1e-9)
    build("sgld", prior_precision=0, num_data=1)
    build("psmile", step_size=np.float64(1e30), prior_mean="start")
    optax_smile.angle_tuner(math.pi / 2)
    with jax.enable_x64(True):
        build("sgld", step_size=1e-39)
    for constraint, value in ((_check.Real(0, 1), 1), (_check.Real(0, 1), 0), (_check.Whole(3), 3)):
        assert constraint("f", "x", value) == value


def test_seeds_are_keys():
    for name in ("psmile", "sgld"):
        expected = build(name, key=jax.random.key(7)).init(PARAMS).key
        for seed in (7, np.int64(7), jnp.int32(7), jax.random.PRNGKey(7)):
            np.testing.assert_array_equal(build(name, key=seed).init(PARAMS).key, expected)


def test_every_scalar_is_a_value():
    for value in (1, 1.5, np.float64(2), np.ones(()), jnp.float32(3)):
        assert optax_smile.stats(update("sgld", value=value)[1]).energy_level == 1
    update(value=1.0, losses=2.0, grad=PARAMS, value_fn=None, hessian=1)


def test_states_of_other_samplers_are_refused():
    states = {name: build(name).init(PARAMS) for name in SAMPLERS}
    states["published.psmile"] = published.psmile(1e-2, num_data=9).init(PARAMS)
    for name in ("psmile", "smile", "sgld", "psgld"):
        own = jax.tree.structure(states[name])
        others = [x for x in states.values() if jax.tree.structure(x) != own]
        assert len(others) >= len(states) - 3
        for state in others:
            with pytest.raises(ArgumentError, match=rf"`{name}.update\(state="):
                update(name, state=state)


def test_more_data_than_int32_holds():
    """Under a traced temperature NumPy's integers wrapped round in silence."""
    for number in (10**10, np.int64(10**10)):

        def first_update(temperature, number: Any = number):
            tx = build("sgld", num_data=number, temperature=temperature)
            return tx.update(PARAMS, tx.init(PARAMS), PARAMS)[0]["w"]

        expected = first_update(jnp.float32(2), 1e10)
        np.testing.assert_allclose(jax.jit(first_update)(2.0), expected, rtol=1e-5)


def test_errors_survive_pickling():
    error = ArgumentError("f", "x", "> 0", -1, "Try 1.")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
