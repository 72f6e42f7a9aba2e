"""The contract of every public sampler, and of the code that the families share.

Samplers are found by listing the folder. Shared code of the dynamics is tested with two of them.
Inside wrappers and in all kinds of loops, such as under jit, vmap or with donated buffers:
`test_wrappers.py`. Where the state lies on several devices: `devices/test_sharded_states.py`.
"""

import contextlib
import functools
import inspect
import warnings
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from paper_settings import PAPER
from public_samplers import SAMPLERS, accepts, quick_psmile, settings_of
from runs import refused

import optax_smile
from optax_smile import published

# Slow tests compare no statistics.
OPTIMIZED = False
CALLS, NAN_CALL = 7, 5
RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(CALLS, 16, 4)).astype(np.float32)
TARGETS = RNG.normal(size=(CALLS, 16, 8)).astype(np.float32)
INPUTS[NAN_CALL, 0, 0] = np.nan
W, B = (jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in ((4, 8), 8))
PARAMS = {"layer": {"w": W, "b": B}}
# Gradients and losses for calls without a model.
GRADIENTS = [
    (jax.tree.map(lambda x: jnp.float32(RNG.normal(size=x.shape)), PARAMS), loss)
    for loss in (2.0, 2.1, np.nan, 1.9)
]
apply_updates: Any = optax.apply_updates
last_accepted: Any = optax_smile.last_accepted
scale: Any = optax.tree.scale
stats = optax_smile.stats
assert_equal = chex.assert_trees_all_equal


def build(fn, **options) -> Any:
    values: Any = {"step_size": 1e-2, "num_data": 100, "decoherence_length": 1.0}
    values["key"] = jax.random.key(0)
    parameters = inspect.signature(fn).parameters.items()
    needed = {name for name, x in parameters if x.default is x.empty or name == "key"}
    return fn(**{name: x for name, x in values.items() if name in needed} | options)


# Both parts of a cycle are within the calls of a test.
OPTIONS: dict[str, Any] = {"cyclical_sgld": {"total_steps": 24, "num_cycles": 2}}
PLAIN = {name: (fn, OPTIONS.get(name, {})) for name, fn in SAMPLERS.items()}
PLAIN["psmile"] = quick_psmile, {}
# Stages that need energies, in a step of two gradients.
RICH: Any = PAPER | {"step_size": 1e-2, "key": jax.random.key(0)}
RICH["decoherence_length"] = "turning"
CASES: dict[str, Any] = PLAIN | {
    "psmile, rich": (quick_psmile, RICH),
    "published.psmile": (published.psmile, {}),
    "spectral": (optax_smile.smile, {"norm": "spectral", "decoherence_length": None}),
}
# The others run no further code: `smile` is `psmile` without a scale.
LIKE_OTHERS = "smile", "mclmc", "sgld"
every_case = pytest.mark.parametrize("case", [x for x in CASES if x not in LIKE_OTHERS])


@pytest.fixture
def no_jit():
    with jax.disable_jit():
        yield


def make(case, **changes) -> Any:
    fn, options = CASES[case]
    return build(fn, **options | changes)


def batch(call):
    return INPUTS[call], TARGETS[call]


def mean_loss(params, batch):
    inputs, targets = batch
    outputs = inputs @ params["layer"]["w"] + params["layer"]["b"][None]
    return jnp.mean((outputs - targets) ** 2)


def advance(tx, params, state, batch):
    loss, grads = jax.value_and_grad(mean_loss)(params, batch)
    updates, state = tx.update(grads, state, params, value=loss)
    return apply_updates(params, updates), state


def run(step, params, state, calls) -> Any:
    for call in calls:
        params, state = step(params, state, batch(call))
    return params, state


def follow(tx, params, calls) -> Any:
    state = tx.init(params)
    for grads, loss in calls:
        updates, state = tx.update(grads, state, params, value=loss)
        params = apply_updates(params, updates)
    return params, stats(state), last_accepted(state, params)


def types(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, getattr(x, "weak_type", False)), tree)


def assert_close(actual, expected):
    chex.assert_trees_all_close(actual, expected, rtol=1e-3, atol=2e-4)


def all_moved(after):
    before = jax.tree.leaves(PARAMS)
    return all(np.any(x != y) for x, y in zip(before, jax.tree.leaves(after), strict=True))


# Every sampler.


def test_samplers_are_found():
    assert {"smile", "psmile", "mclmc", "sgld", "psgld", "sghmc"} <= set(SAMPLERS)
    assert {"scale_adapted_sghmc", "cyclical_sgld"} <= set(SAMPLERS)
    assert all(getattr(optax_smile, name) is fn for name, fn in SAMPLERS.items())


@every_case
def test_types_of_a_state_stay(case):
    """Checked from shapes; under x64, types follow the parameters, at least float32."""
    tx = make(case)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
    expected = types(tx.init(PARAMS))
    assert types(tx.init(abstract)) == types(jax.eval_shape(tx.init, PARAMS)) == expected
    grads = optax.tree.cast(PARAMS, jnp.bfloat16)
    for value in (jnp.bfloat16(1), None):
        with warnings.catch_warnings(action="ignore"):
            found = jax.eval_shape(tx.update, grads, tx.init(PARAMS), PARAMS, value=value)
        assert types(found) == (types(PARAMS), expected)
    for w, b in [("float64", "float32"), ("float32", "float32"), ("float32", "float64")]:
        with jax.enable_x64(True):
            # The last one is weakly typed, like an array made from a Python number.
            of_b = jnp.full(B.shape, 0.5) if b == "float64" else B.astype(b)
            params = {"layer": {"w": W.astype(w), "b": of_b}}
            start = tx.init(params)
            after, state = jax.eval_shape(functools.partial(advance, tx), params, start, batch(0))
            told, last = jax.eval_shape(lambda *x: (stats(x[0]), last_accepted(*x)), state, after)
            strong = jax.tree.map(lambda x: jnp.asarray(x, x.dtype), params)
        assert types(after) == types(last) == types(strong)
        assert types(state) == types(start)
        floats = {x.dtype.name for x in jax.tree.leaves(state) if "float" in str(x.dtype)}
        assert floats == {w, b}
        assert told.step_size.dtype == max(w, b)


def test_half_precision_gradients(no_jit, case="sghmc"):
    """With so many data that num_data times the gradient leaves float16."""
    tx, grads = make(case, num_data=1e6), optax.tree.cast(PARAMS, jnp.float16)
    single = optax.tree.cast(grads, jnp.float32)
    expected, _ = tx.update(single, tx.init(PARAMS), PARAMS, value=1.0)
    updates, after = tx.update(grads, tx.init(PARAMS), PARAMS, value=jnp.float16(1))
    assert stats(after).num_nonfinite == 0
    chex.assert_trees_all_close(updates, expected, rtol=1e-6)


@pytest.mark.slow
def test_steps_of_no_length(no_jit, case="psmile"):
    tx = make(case, step_size=lambda count: jnp.where(count % 3 == 0, 0, 1e-2))
    params, state = run(functools.partial(advance, tx), PARAMS, tx.init(PARAMS), range(4))
    assert all_moved(params)
    chex.assert_tree_all_finite((params, last_accepted(state, params)))


def injected(case, **changes):
    """The key is a static argument: as a hyperparameter it would be a second field `key`."""
    fn, options = CASES[case]
    static = [name for name in ("key", "log_prior", "prior_precision") if accepts(fn, name)]
    return build(optax.inject_hyperparams(fn, static_args=static), **options | changes)


@every_case
def test_a_transformation_and_its_field_names(case):
    tx = make(case)
    assert type(tx) is optax.GradientTransformationExtraArgs
    assert tuple(tx) == (tx.init, tx.update)
    state: Any = tx.init(PARAMS)
    wrapped = injected(case)
    outer: Any = wrapped.init(PARAMS)
    # Includes packed scalars, such as the counters.
    for name, value in state._asdict().items():
        assert_equal(optax.tree.get(state, name), value)
        assert_equal(optax.tree.get(outer, name), value)
        assert f"{name}={value!r}" in repr(state)
    assert optax.tree.set(outer, num_data=5).inner_state._fields == state._fields
    later = state._replace(num_gradients=7, step_size_factor=3.0)
    assert (later.num_gradients, later.num_rejected, later.step_size_factor) == (7, 0, 3.0)
    refused("name=.* got a packed scalar", optax.tree.set, state, num_gradients=7)
    # Hyperparameters may be traced.
    update = functools.partial(wrapped.update, value=1.0)
    assert types(jax.eval_shape(update, PARAMS, outer, PARAMS)[1]) == types(outer)
    assert_mapped(tx)


def assert_mapped(tx):
    kinds: Any = {"layer": {"w": "W", "b": "B"}}
    drop: Any = {"transform_non_params": lambda _: None}
    mapped = optax.tree.map_params(tx, lambda _, kind: kind, tx.init(PARAMS), kinds, **drop)
    assert set(jax.tree.leaves(mapped)) == {"W", "B"}


def test_optax_maps_over_states_with_any_prior():
    each: Any = {"layer": {"w": 1.0, "b": 2.0}}
    own = {"log_prior": lambda params: -jnp.sum(params["layer"]["w"] ** 2), "prior_precision": 0}
    for prior in ({"prior_precision": each}, {"prior_mean": each}, own):
        assert_mapped(optax_smile.psmile(num_data=9, key=0, **prior))


# Code that the dynamics share.


@pytest.mark.parametrize("case", ["sghmc", "psmile, rich"])
def test_values_are_optional_and_other_arguments_change_nothing(case, no_jit):
    """A warning in each trace names the sampler if a stage needs energies."""
    is_rich = "rich" in case
    tx, params, state = make(case), PARAMS, make(case).init(PARAMS)
    for _ in range(2):
        warns = pytest.warns(UserWarning, match="`smile.update` got no loss")
        with warns if is_rich else contextlib.nullcontext():
            updates, state = tx.update(PARAMS, state, params)
        params = apply_updates(params, updates)
    assert stats(state).energy_level == 0 and jnp.isnan(stats(state).energy_change)
    assert all_moved(params)
    _, state = tx.update(PARAMS, state, params, value=1.0)
    assert stats(state).energy_level == 1
    with jax.disable_jit(False), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            jax.eval_shape(tx.update, PARAMS, state, PARAMS)
    assert len(caught) <= 1 and (is_rich or not caught)
    # Other keyword arguments, and keys in the old format.
    tx, old = make(case, key=jax.random.key(5)), make(case, key=jax.random.PRNGKey(5))
    state = tx.init(PARAMS)
    expected = tx.update(PARAMS, state, PARAMS, value=2.0)
    assert_equal(tx.update(PARAMS, state, PARAMS, value=2.0, batch=3, grad_fn=jax.grad), expected)
    assert_equal(old.update(PARAMS, old.init(PARAMS), PARAMS, value=2.0), expected)


def test_a_given_step_size_is_the_step_size(no_jit, case="sghmc"):
    """A number and a factor of each chain's own; a schedule is in `test_reference.py`."""
    tx = make(case, step_size=0.5)
    for factor in (1, 0.25):
        state = optax.tree.set(tx.init(PARAMS), step_size_factor=jnp.float32(factor))
        size = stats(tx.update(PARAMS, state, PARAMS, value=1.0)[1]).step_size
        assert size == 0.5 * factor and size.dtype == jnp.float32
    # With `inject_hyperparams`: a schedule of the calls, and an argument under jit.
    tx = injected(case, step_size=lambda count: 0.5**count)
    state = tx.init(PARAMS)
    for call in range(3):
        _, state = tx.update(PARAMS, state, PARAMS, value=1.0)
        np.testing.assert_allclose(stats(state).step_size, 0.5**call, rtol=1e-5)
    tx = injected(case, step_size=0.25)
    state = optax.tree.set(tx.init(PARAMS), step_size=jnp.float32(0.5))
    with jax.disable_jit(False):
        after: Any = jax.jit(functools.partial(tx.update, value=1.0))(PARAMS, state, PARAMS)[1]
    assert types(after) == types(state)
    np.testing.assert_allclose(stats(after).step_size, 0.5, rtol=1e-5)


class Known(NamedTuple):
    scale: Any

    def inverse_scale(self):
        return jax.tree.map(jnp.reciprocal, self.scale)


class KnownScale(optax_smile.Preconditioner):
    def init(self, params):
        return Known({"layer": {"w": jnp.full_like(W, 3), "b": jnp.ones_like(B)}})


def test_a_preconditioner_of_ones_own(no_jit):
    """A chain at rest turns to the gradient over s, and moves along that over s again."""
    given: Any = {"num_data": 10, "prior_precision": 0.0, "decoherence_length": None}
    tx: Any = optax_smile.smile(0.1, preconditioner=KnownScale(), **given)
    grads: Any = GRADIENTS[0][0]
    moved = tx.update(grads, tx.init(PARAMS), PARAMS, value=1.0)[0]["layer"]
    ratio = moved["b"] / grads["layer"]["b"]
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-5)
    assert ratio[0] < 0
    np.testing.assert_allclose(moved["w"], ratio[0] * grads["layer"]["w"] / 3**2, rtol=1e-5)


@pytest.mark.parametrize("name", ["smile", "psmile", "smile_naive", "psmile_naive"])
def test_the_papers_samplers(name, no_jit):
    prior = {"prior_mean": 0.5, "prior_precision": 2.0, "temperature": 3.0, "num_data": 10}
    tx = getattr(published, name)(0.1, **prior)
    # The summary of a run uses these for rejections and drifts.
    told: Any = settings_of(tx, PARAMS)
    naive, state = name.endswith("naive"), tx.init(PARAMS)
    assert told["name"] == f"published.{name}" and told["integrator"] == "minimal_norm"
    assert told["reject_quantile"] == (None if naive else 0.98)
    assert told["tuner"] is None if naive else told["tuner"]["name"] == "quantile_tuner"
    assert state.gradients_per_step == 2 and state.key is None
    assert ("gradient_variance" in state._fields) == name.startswith("psmile")
    if name == "smile":
        samplers = tx, optax_smile.smile(0.1, **PAPER, **prior)
        params, expected = (follow(tx, PARAMS, GRADIENTS[:2])[0] for tx in samplers)
        assert_equal(params, expected)
        assert all_moved(params)


class Tally(NamedTuple):
    """State of a tuner with names of another state, and of tuples, and in half precision."""

    step_size_factor: jax.Array
    mean: jax.Array
    count: jax.Array
    flags: jax.Array


class Counting(optax_smile.Tuner):
    def init(self, dtype):
        return Tally(jnp.ones((), dtype), *(jnp.zeros((), jnp.float16) for _ in range(3)))

    def update(self, state, evidence):
        return state._replace(mean=state.mean + 1)


def test_states_keep_the_precision_of_every_number():
    tx: Any = optax_smile.psmile(0.1, num_data=100, tuner=Counting(), key=0)
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    own = {name: x for name, x in state._asdict().items() if name.startswith("tuner.")}
    assert own == {"tuner.mean": 1, "tuner.count": 0, "tuner.flags": 0}
    assert {x.dtype for x in own.values()} == {np.dtype("float16")}
    refused("unexpected field names: ..meen", state._replace, meen=2)
    with pytest.raises(AttributeError, match="no 'mean', but preconditioner.mean, tuner.mean"):
        optax.tree.get(state, "mean")
    assert "num_rejected=Shape" in repr(jax.eval_shape(tx.init, PARAMS))
    assert "num_rejected=True" in repr(jax.tree.map(lambda _: True, state))
    with jax.enable_x64():
        tree: Any = [jnp.ones(200, f"float{x}") for x in (32, 64, 32, 64)]
        updates, _ = step = tx.update(tree, tx.init(tree), tree)
        assert types(updates) == types(tree) and types(step[1]) == types(tx.init(tree))


class Inverse(NamedTuple):
    rms: Any

    def inverse_scale(self):
        return self.rms


class Rms(optax_smile.Preconditioner):
    """One scale for each leaf."""

    def init(self, params):
        return Inverse(jax.tree.map(lambda x: jnp.ones(()), params))

    def observe(self, state, gradient, weight, direction, drift):
        return Inverse(jax.tree.map(lambda g: jnp.sqrt(jnp.mean(g**2)), gradient))


def test_a_preconditioner_of_ones_own_gets_the_leaves_as_they_are():
    """Small leaves of networks are joined only for scales that are known to be elementwise."""
    tx: Any = optax_smile.smile(num_data=1, prior_precision=0.0, preconditioner=Rms(), key=0)
    tree = {x: jnp.full(n, float(n)) for x, n in (("a", 600), ("b", 3), ("c", 4), ("d", 5))}
    state = tx.update(tree, tx.init(tree), tree)[1]
    assert state.rms == {"a": 600, "b": 3, "c": 4, "d": 5}
