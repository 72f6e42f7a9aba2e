"""Wrong calls: every argument of every public function in turn replaced by wrong values.

The values are hostile ones for all arguments, and those that a declared constraint must reject. A
call may succeed if the value is allowed, or raise an `ArgumentError` that names the function and
the argument. An exception from inside JAX, NumPy or Python, or a meaningless success, is a failure.
All cases: `pytest tests/faults --full`. Tests of messages cover rules beyond the declarations.
"""

import inspect
import math
import pickle
import random
import re
import warnings
from typing import Any, get_args

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import pytest
import runs
from calls import BATCHES, KEY, PARAMS, loss_fn, run_in, valid_calls

import optax_smile
from optax_smile import ArgumentError, _check


class Model:
    """A model with the interface of Flax, whose function is `apply`."""

    init = apply = __call__ = staticmethod(lambda *_: None)


def hostile() -> dict[str, Any]:
    """Make new values for each call; a tracer comes from inside a compiled function."""
    made: dict[str, Any] = {"none": None, "nan": math.nan, "inf": math.inf, "minus": -1, "zero": 0}
    made |= {"denormal": 1e-320, "huge": 10**30, "true": True, "complex": 1j, "text": "x"}
    made |= {"bytes": b"x", "list": [], "dict": {}, "object": object(), "class": dict}
    made |= {"function": lambda: None, "model": Model(), "ragged": [[1.0, 2.0], [3.0]]}
    made |= {"texts": np.array(["1", "2", "3"]), "nans": np.full(3, np.nan), "tracer": TRACER}
    made |= {"masked": {"w": np.ma.masked_array(np.ones((2, 3)), np.eye(2, 3) > 0)}}
    made |= {"empty": np.zeros((0, 3)), "odd": np.ones((7, 5, 3, 2)), "key": jax.random.key(1)}
    made |= {"ints": {"w": jnp.ones((2, 3), int), "b": jnp.ones(3, int)}}
    made |= {"other": {"other": jnp.ones((2, 2))}, "keys": jax.random.split(KEY, 2)}
    return made | {"optimizer": optax.adam(1e-3), "state": optax.adam(1e-3).init(PARAMS)}


TRACER, NUMBERS = object(), "minus zero denormal"
# Allowed values of arguments, besides that of the valid call and those that declarations allow:
# numbers, words, keys, switches, paths and None.
LAWFUL_OF = {
    # The result of a function without this argument.
    "targets inputs start like mean entropy variance loss Likelihood.check": "none",
    "Likelihood.has_target Snapshots.from_draws.trace": "none",
    "prior_precision": "zero denormal ints tracer",
    "prior_mean": f"ints tracer {NUMBERS}",
    "value": f"none nan inf huge tracer {NUMBERS}",
    "metrics.lppd.log_density": f"true odd {NUMBERS}",
    "std": "denormal true",
    "out_axis": "minus zero",
    # Any tree with two parameters or more; leaves that are not floating-point arrays do not change.
    "psmile.init.params sgld.init.params": "odd other state",
    "scale_by_gradient_noise.init.params": "odd other tracer",
    "parallel.init.params Snapshots.params": "odd other",
    "cold_temperature.params": "odd other nans masked state tracer",
    "local.norm_precision.params": "odd",
    "Snapshots.from_members.params": "odd other nans",
    # Anything with a leading axis; the caller is responsible for its contents.
    "parallel.place.tree parallel.step.carry": "odd other nans keys",
    "parallel.init.sampler tracked.sampler sample.sampler Run.sampler optimizer": "optimizer",
    # Without a mesh a batch is not converted; a number, or a row of an array, can be a batch.
    "parallel.place_batch.batch": " ".join(hostile()),
    "warmstart.validation": f"none true {NUMBERS}",
    "interop.from_numpyro.batch": "nans",
    "local.curvature_precision.batches local.network_candidates.batches": "odd",
    # A finding.
    "check.batch": "nans empty",
    "parallel.over_chains.function": "class function model",
    "parallel.over_chains.in_axes": "none zero",
    "report.write.title label": "text",
    "Snapshots.trace settings": "dict ints other masked",
    "Snapshots.from_draws.draws": "other",
    "report.write.pictures": "dict",
}
LAWFUL = {name: kinds.split() for names, kinds in LAWFUL_OF.items() for name in names.split()}
# The function that checks an argument which another one passes on: the sampler checks the
# parameters of a chain, `predict` reads a likelihood, and a container holds the draws.
HANDED_ON = dict.fromkeys(("sample", "Run", "check", "parallel.init"), "smile.init")
HANDED_ON |= {"Likelihood": "Predictor", "thinned": "load_snapshots"}
# Each success of these compiles or draws.
SLOW = {"sample", "check", "warmstart", "select", "predict", "Predictor", "Likelihood"}
SLOW |= {"report.write", "diagnostics.summary", "Run"}
SLOW |= {"NumpyroModel.sample", "tall.find_mode", "tall.center_at"}
PLAIN = (_check.Real, _check.Whole, _check.OneOf, _check.Key, _check.PathLike)
NONE, FLAG = _check.NONE, _check.FLAG


def options(constraint: Any) -> tuple[Any, ...]:
    return tuple(y for x in getattr(constraint, "options", ()) for y in options(x)) or (constraint,)


def refuses(constraint: Any, which: str, value: Any, given: dict[str, Any]) -> bool:
    try:
        constraint(which, value, given)
    except Exception as error:
        return isinstance(error, ArgumentError)
    return False


def is_lawful(name: str, which: str, kind: str, value: Any) -> bool:
    """Allowed by the table, its own declaration, or that of the function that receives it."""
    found = [LAWFUL[x] for x in (f"{name}.{which}", which) if x in LAWFUL]
    others = [each[which] for _, each in _check.DECLARED.values() if which in each]
    own = declaration(name)[1].get(which)
    whole = [own] if own else others
    plain = [x for one in whole for x in options(one) if isinstance(x, PLAIN) or x in (NONE, FLAG)]
    if value is TRACER:
        is_plain = any(getattr(x, "traced", False) for x in plain)
    else:
        is_plain = any(not refuses(x, which, value, {}) for x in plain)
    return is_plain or bool(found) and kind in found[0]


def beyond(constraint: Any) -> list[Any]:
    """Values just outside a constraint, which it must reject."""
    match constraint:
        case _check.Either():
            values = [x for one in options(constraint) for x in beyond(one)]
            return [x for x in values if refuses(constraint, "x", x, {})]
        case _check.Real(low=low, high=high):
            opens_low, opens_high = (constraint.open in (end, "both") for end in ("low", "high"))
            outside = [low if opens_low else math.nextafter(low, -math.inf)] * (low > -math.inf)
            outside += [high if opens_high else math.nextafter(high, math.inf)] * (high < math.inf)
            # Numbers that float32 rounds to 0 or inf; scores use float64.
            if constraint.dtype is None and math.isinf(high):
                outside += [1e-39] * (low == 0 and opens_low) + [1e39] * (not constraint.infinite)
            return [*outside, math.nan, np.float32(math.nan), np.ones(2)]
        case _check.Whole(low=low):
            return [low - 1, low + 0.5, float(low), 2**31, np.ones(2)]
        case _check.Key():
            return [-1, 2**32, 2**70, np.int64(2**32), np.int32(-1)]
        case _check.OneOf(words=words):
            return ["", get_args(words)[0].upper() + "x", ["x"]]
        case _check.Function():
            return [jnp.ones(2), lambda a, b, c, d, e, f, g: None]
        case _check.Tree(axes=axes, finite=finite):
            uneven = [{"a": np.ones((2, 3)), "b": np.ones((3, 3))}, np.ones((0, 3)), np.ones(())]
            leaves = [{"w": "x"}, {"w": object()}, {"w": 10**30}]
            return leaves + [{"w": np.full(3, np.nan)}] * finite + uneven * bool(axes)
        case _check.Array(axes=axes, each=each):
            ndim = max(len(re.findall(r"\w+", axes.split(" or ")[0])), 1)
            ones = np.ones((2,) * ndim)
            wrong = beyond(each) if isinstance(each, _check.Real) else [math.inf]
            of_each = ones * next(x for x in wrong if isinstance(x, float))
            masked = np.ma.masked_array(ones, np.arange(2**ndim).reshape(ones.shape) == 1)
            many = [np.ones((1,) * 7)] * bool(axes and "..." not in axes)
            return [KEY, np.array(["1"]), of_each, masked, *many]
        case _ if hasattr(constraint, "each"):
            wrong = [x for x in beyond(constraint.each) if isinstance(x, float)]
            return [{"w": "x"}, np.ones(3, bool), *wrong, *({"w": np.full(3, x)} for x in wrong)]
        case _ if constraint is _check.TRANSFORMATION:
            return [optax.adam, Model]
        case _ if constraint is _check.BATCHES:
            return [{"x": 1}, lambda: [1], np.ones(())]
    return []


def declaration(name: str) -> tuple[str, Any]:
    """Name of a function of `valid_calls` in `DECLARED`, and its constraints."""
    known = [x for x in (name, name.rpartition(".")[2]) if x in _check.DECLARED]
    return (known[0], _check.DECLARED[known[0]][1]) if known else ("", {})


# Other arguments that an error may name: those that receive the value, or must fit it.
TOLD = {"batches": "loss_fn", "data": "loss_fn", "inputs": "targets", "mean": "likelihood"}
TOLD |= {"num_chains": "trace", "params": "loss_fn|apply_fn"} | dict.fromkeys(
    ("variance", "log_density", "entropy", "check", "has_target"), "likelihood"
)


def judge(call: Any, which: str, kind: str, value: Any, is_refused: bool) -> str:
    """Empty for an error in the form or a lawful call, else what happened instead."""
    name, function, given = call
    declared, _ = declaration(name)
    own = {name, name.rpartition(".")[2], f"{name}.init", f"{name}.update", HANDED_ON.get(name)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            if value is TRACER:
                jax.eval_shape(lambda x: (function(**given | {which: x}), 0)[1], 1.0)
            else:
                function(**given | {which: value})
    except ArgumentError as error:
        is_named = re.search(rf"\b({which}|{TOLD.get(which, which)})\b", str(error))
        if is_refused:
            is_named = error.function == declared and error.argument.split("[")[0] == which
        return "" if error.got and error.function in own and is_named else f"raw, unnamed: {error}"
    except Exception as error:
        # `update` without parameters raises the message of all Optax transformations, with advice.
        is_known = which == "params" and "`optax_smile.tracked(sampler)`" in str(error)
        return "" if is_known else f"raw {type(error).__name__}: {str(error)[:200]}"
    return "" if kind != "beyond" and is_lawful(name, which, kind, value) else "silent"


def cases(call: Any, full: bool) -> Any:
    """All values that a constraint must reject; of others, all if `full`, else six wrong ones."""
    (name, _, given), others, made = call, [], hostile()
    for which in given:
        constraint = declaration(name)[1].get(which)
        wrong = [("beyond", x) for x in (beyond(constraint) if constraint else [])]
        for kind, value in made.items():
            if constraint and value is not TRACER and refuses(constraint, which, value, given):
                wrong.append((kind, value))
            elif full or not is_lawful(name, which, kind, value):
                others.append((which, kind, value, False))
        assert constraint is None or wrong, (name, which)
        yield from ((which, kind, value, True) for kind, value in wrong)
    yield from others if full else random.Random(name).sample(others, min(len(others), 6))


@pytest.fixture(scope="module")
def called(tmp_path_factory):
    return [*valid_calls(run_in(tmp_path_factory.mktemp("arguments") / "run"))]


def test_wrong_calls(called, full, record, tmp_path, monkeypatch):
    found, number = [], 0
    for call in called:
        # The text "x" is a directory here.
        (folder := tmp_path / call[0]).mkdir()
        monkeypatch.chdir(folder)
        if full or call[0] not in SLOW:
            call[1](**call[2])
        for case in cases(call, full):
            verdict, number = judge(call, *case), number + 1
            if verdict:
                found.append((verdict, call[0], *case))
        # Without `ax` a plot opens a figure.
        plt.close("all")
    silent = sum(verdict == "silent" for verdict, *_ in found)
    record("arguments", cases=number, raw=len(found) - silent, silent=silent)
    assert number > 2000 and not found, "\n".join(map(str, found))


def test_every_declaration_is_called_with_the_ranges_of_its_docstring(called):
    """Closed ends of ranges pass; docstrings that refer to another one need no entry."""
    assert set(_check.DECLARED) == {declaration(name)[0] for name, *_ in called} - {""}
    for name, (function, constraints) in _check.DECLARED.items():
        section = re.search(r"(?ms)^Args:\n(.*?)^\S", f"{inspect.getdoc(function)}\n.")
        entries = re.split(r"(?m)^    (?=\w)", section[1] if section else "")
        for which, one in ((x, y) for x, whole in constraints.items() for y in options(whole)):
            if isinstance(one, _check.Whole) or (isinstance(one, _check.Real) and one.open == ""):
                for end in (one.low, getattr(one, "high", math.inf)):
                    assert math.isinf(end) or one(which, end, {}) == end
            one = one if isinstance(one, _check.Array) else getattr(one, "each", one)
            is_number = isinstance(one, (_check.Real, _check.Whole))
            bound = re.sub("^an? (finite )?(number|integer)( in)? ?", "", one.rule) * is_number
            for entry in entries:
                names, _, told = entry.partition(": ")
                assert which not in names.split(", ") or bound in " ".join(told.split()), name


# Values that functions reject beyond the declarations.


def build(name="psmile", step_size: Any = 1e-2, **options) -> Any:
    given = {"num_data": 100, "key": KEY} | options
    return getattr(optax_smile, name)(step_size, **given)


def update(name="psmile", updates: Any = PARAMS, state: Any = None, **given) -> Any:
    """The state after an update, without its values."""
    tx = build(name)
    first = tx.init if state is None else lambda _: state
    return jax.eval_shape(lambda: tx.update(updates, first(PARAMS), PARAMS, **given)[1])


def train_integers() -> Any:
    given: Any = {"num_members": 2, "num_epochs": 1, "key": 0}
    init = lambda key: {"w": jnp.ones(3, int)}  # noqa: E731
    return optax_smile.warmstart(loss_fn, init, BATCHES, optax.sgd(0.1), **given)


ANGLE, QUANTILE = optax_smile.angle_tuner(), optax_smile.quantile_tuner()
KEYS = jax.random.split(jax.random.key(0))
MESSAGES: dict[str, Any] = {
    # How a sampler gets its step size, and its prior.
    r"psmile\(tuner.* if `step_size` is given": lambda: build(tuner=ANGLE),
    r"psmile\(step_size.* from which quantile_tuner": lambda: build(step_size=None, tuner=QUANTILE),
    r"sgld\(step_size.* got one that gives 'x'": lambda: build("sgld", lambda n: "x").init(PARAMS),
    "gives no number below 0": lambda: build("sgld", lambda count: -1e-3).init(PARAMS),
    "an integer >= 7, a step for": lambda: build("cyclical_sgld", total_steps=6, num_cycles=7),
    # Messages describe keys, since their numbers do not help.
    r"integer seed from.* got uint32\[2, 2\]\.$": lambda: build(key=jax.random.key_data(KEYS)),
    # Parameters, gradients and their loss.
    "of floating-point gradients": lambda: update(updates=jax.tree.map(jnp.int32, PARAMS)),
    "mean_loss=.* left out unless `value`": lambda: update(mean_loss=0.5),
    # States.
    "got one of another sampler": lambda: update(state=build("sgld").init(PARAMS)),
    "got the transformation": lambda: optax_smile.stats(build("sgld")),
    # Functions of the user.
    "got a Model. Pass `model.apply`": lambda: runs.train(loss=Model()),
    r"init_fn=.* of \(key\) that returns float": train_integers,
}


@pytest.mark.parametrize("text", MESSAGES)
def test_messages(text):
    with pytest.raises(ArgumentError, match=text) as error:
        MESSAGES[text]()
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_traced_numbers_and_others_mean_the_same():
    """For all arguments of samplers that may be traced; also integers beyond int32."""

    def first_step(value: Any = 1.0, **options):
        tx = build("sgld", **options)
        updates, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=value)
        return updates["w"], optax_smile.stats(state).energy_level

    def first_steps(temperature, *numbers):
        values = 1, 1.5, np.float64(2), np.ones(()), jnp.float32(3)
        updates = [first_step(temperature=temperature, **given)[0] for given in numbers]
        many = [first_step(num_data=n)[0] for n in (10**10, np.int64(10**10))]
        return updates + many, [first_step(value)[1] for value in values]

    numbers = {"num_data": 50.0, "prior_precision": 2.0, "step_size": 0.5}
    found, levels = jax.jit(first_steps)(2.0, numbers)
    many = first_step(num_data=1e10)[0]
    expected = [first_step(temperature=2.0, **numbers)[0], many, many]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert levels == [1] * 5
    seeds: Any = 7, 0, 2**31, 2**32 - 1, np.int64(7), np.uint32(7), jnp.int32(7)
    for seed in seeds:
        for key in (seed, jax.random.PRNGKey(seed)):
            found = build("sgld", key=key).init(PARAMS).key
            np.testing.assert_array_equal(found, jax.random.key_data(jax.random.key(seed)))
    with jax.enable_x64(True):
        build("sgld", 1e-39)
    for name, arguments in {
        "psmile": ("decoherence_length", "reject_quantile", "temperature", "num_data"),
        "sghmc": ("friction", "gradient_noise"),
        "psgld": ("square_decay",),
        "cyclical_sgld": ("exploration",),
    }.items():
        for argument in arguments:
            jax.eval_shape(lambda x, n=name, a=argument: build(n, **{a: x}).init(PARAMS), 0.9)
