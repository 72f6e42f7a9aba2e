"""What holds for every public sampler: they are found by listing the folder, not by a register."""

import contextlib
import functools
import importlib
import inspect
import pkgutil
import warnings
from typing import Any

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from hypothesis import strategies as st
from jax.sharding import AxisType
from paper import PAPER

import optax_smile
from optax_smile import samplers

# A scale within the few calls of a test: see conftest.py.
SHORT_WINDOWS = True
CALLS = 17
NAN_CALL, OUTLIER_CALL = 5, 15
RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(CALLS, 16, 4)).astype(np.float32)
TARGETS = RNG.normal(size=(CALLS, 16, 8)).astype(np.float32)
INPUTS[NAN_CALL, 0, 0] = np.nan
TARGETS[OUTLIER_CALL] *= 10
PARAMS = {
    "layer": {
        "w": jnp.asarray(RNG.normal(size=(4, 8)), jnp.float32),
        "b": jnp.asarray(RNG.normal(size=8), jnp.float32),
    }
}

apply_updates: Any = optax.apply_updates
last_accepted: Any = optax_smile.last_accepted


# A step size of the user's, a tuner and a guardrail that need energies.
PUBLISHED: Any = PAPER | {"integrator": "leapfrog"}
# What is enough of samplers that share a driver; between smile and psmile any two choices meet.
ENOUGH = {
    "smile": ["leapfrog", "minimal_norm-own", "leapfrog-random"],
    "psmile": ["minimal_norm", "leapfrog-own", "minimal_norm-random"],
    **dict.fromkeys(["smile_naive", "psmile_naive", "mclmc"], ["minimal_norm-random"]),
}
# Neither.
OWN_STEP_SIZE = {
    "step_size": None,
    "tuner": optax_smile.angle_tuner(),
    "reject_quantile": None,
    "decoherence_length": "matched",
}


def accepts(fn, *names):
    return set(names) <= set(inspect.signature(fn).parameters)


def build(fn, **options) -> Any:
    values = {"step_size": 1e-2, "num_data": 100, "decoherence_length": 1.0, "key": 0}
    parameters = inspect.signature(fn).parameters.values()
    needed = {p.name: values[p.name] for p in parameters if p.default is p.empty}
    if accepts(fn, "tuner"):
        needed |= PUBLISHED | {"step_size": values["step_size"]}
    if accepts(fn, "key"):
        needed["key"] = jax.random.key(0)
    return fn(**needed | options)


def find_samplers():
    for info in pkgutil.iter_modules(samplers.__path__, "optax_smile.samplers."):
        for name, fn in vars(importlib.import_module(info.name)).items():
            public = inspect.isfunction(fn) and fn.__module__ == info.name and name[0] != "_"
            if public and accepts(fn, "step_size", "num_data"):
                if isinstance(build(fn), optax.GradientTransformationExtraArgs):
                    yield name, fn


def find_cases(fn):
    random = {"reject_momentum": "refresh", "decoherence_length": 1.0, "exploration": 0.0}
    random = {name: value for name, value in random.items() if accepts(fn, name)}
    for integrator in ("leapfrog", "minimal_norm") if accepts(fn, "integrator") else (None,):
        options = {} if integrator is None else {"integrator": integrator}
        yield "-".join(options.values()) or "default", options
        if accepts(fn, "tuner"):
            yield "-".join([*options.values(), "own"]), options | OWN_STEP_SIZE
        if random:
            yield "-".join([*options.values(), "random"]), options | random


SAMPLERS = dict(find_samplers())
CASES = {
    f"{name}-{label}": (fn, options)
    for name, fn in SAMPLERS.items()
    for label, options in find_cases(fn)
}
LABELS = {
    name: ENOUGH.get(name, [label for label, _ in find_cases(fn)]) for name, fn in SAMPLERS.items()
}
PLAIN = [f"{name}-{labels[0]}" for name, labels in LABELS.items()]
RICH = [f"{name}-{labels[-1]}" for name, labels in LABELS.items()]


def marked(case):
    """The other combinations are nightly."""
    name, label = case.split("-", 1)
    return pytest.param(case, marks=() if label in LABELS[name] else pytest.mark.nightly)


every_case = pytest.mark.parametrize("case", list(map(marked, CASES)))
outer_cases = pytest.mark.parametrize("case", sorted({*PLAIN, *RICH}))
plain_cases = pytest.mark.parametrize("case", PLAIN)
rich_cases = pytest.mark.parametrize("case", RICH)


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


@functools.cache
def compiled(case) -> Any:
    return jax.jit(functools.partial(advance, make(case)))


def run(step, params, state, calls) -> Any:
    for call in calls:
        params, state = step(params, state, batch(call))
    return params, state


def is_key(leaf):
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def bare(tree):
    return jax.tree.map(lambda x: np.asarray(jax.random.key_data(x) if is_key(x) else x), tree)


def types(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, getattr(x, "weak_type", False)), tree)


def assert_equal(actual, expected):
    chex.assert_trees_all_equal(bare(actual), bare(expected))


def assert_close(actual, expected):
    chex.assert_trees_all_close(bare(actual), bare(expected), rtol=1e-3, atol=2e-4)


def moved(before, after):
    return {name: bool(jnp.any(after[name] != before[name])) for name in before}


def fields(state):
    for name, value in zip(state._fields, state, strict=True):
        if jax.tree.leaves(value):
            yield name, value
        if hasattr(value, "_fields"):
            yield from fields(value)


def test_samplers_are_found():
    assert {"smile", "psmile", "smile_naive", "psmile_naive"} <= set(SAMPLERS)
    assert all(getattr(optax_smile, name) is fn for name, fn in SAMPLERS.items())


@every_case
def test_init_needs_shapes_only(case):
    tx = make(case)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
    expected = types(tx.init(PARAMS))
    assert types(tx.init(abstract)) == expected
    assert types(jax.eval_shape(tx.init, abstract)) == expected
    assert types(jax.eval_shape(tx.init, PARAMS)) == expected


@every_case
def test_jit_equals_eager(case):
    """At the start, at a number that is not finite, at an outlier, and right after each."""
    tx = make(case)
    params, state = PARAMS, tx.init(PARAMS)
    for call in range(CALLS):
        actual = compiled(case)(params, state, batch(call))
        if call in (0, 1, NAN_CALL, NAN_CALL + 1, OUTLIER_CALL, OUTLIER_CALL + 1):
            with jax.disable_jit():
                expected = advance(tx, params, state, batch(call))
            assert_close(actual, expected)
            chex.assert_trees_all_close(actual[0], expected[0], rtol=0, atol=1e-5)
        params, state = actual
    assert optax_smile.stats(state)["num_nonfinite"] == 1


@every_case
def test_one_compilation(case):
    step, tx = compiled(case), make(case)
    params, state = step(PARAMS, tx.init(PARAMS), batch(0))
    compilations = step._cache_size()
    params, state = run(step, params, state, range(1, 4))
    step(params, jax.jit(tx.init)(PARAMS), batch(4))
    assert step._cache_size() == compilations


@every_case
@pytest.mark.filterwarnings("ignore:.*got no `value`")
def test_state_is_stable_in_control_flow(case):
    tx = make(case)

    def with_value(params, state):
        return tx.update(PARAMS, state, params, value=jnp.float32(1))

    def without_value(params, state):
        return tx.update(PARAMS, state, params)

    def skip(params, state):
        return jax.tree.map(jnp.zeros_like, params), state

    def body(carry, branch):
        params, state = carry
        updates, state = jax.lax.switch(branch, (with_value, without_value, skip), params, state)
        return (apply_updates(params, updates), state), optax_smile.stats(state)

    start = PARAMS, tx.init(PARAMS)
    end, _ = jax.eval_shape(functools.partial(jax.lax.scan, body), start, jnp.arange(3))
    assert types(end) == types(start)
    for branch in (with_value, without_value):
        assert types(jax.eval_shape(branch, *start)[1]) == types(start[1])


@every_case
def test_value_is_optional(case, no_jit):
    fn, _ = CASES[case]
    tx = make(case)
    warned = pytest.warns(UserWarning, match=f"`{fn.__name__}` got no `value`")
    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(2):
        warns = accepts(fn, "tuner") and "own" not in case
        with warned if warns else contextlib.nullcontext():
            updates, state = tx.update(PARAMS, state, params)
        params = apply_updates(params, updates)
    assert optax_smile.stats(state)["energy_level"] == 0
    assert jnp.isnan(optax_smile.stats(state)["energy_change"])
    assert all(moved(PARAMS["layer"], params["layer"]).values())
    _, state = tx.update(PARAMS, state, params, value=1.0)
    assert optax_smile.stats(state)["energy_level"] == 1


@plain_cases
def test_missing_value_warns_once_per_trace(case):
    tx = make(case)
    update = jax.jit(tx.update)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            update.lower(PARAMS, tx.init(PARAMS), PARAMS)
    assert len(caught) == accepts(CASES[case][0], "tuner")


@plain_cases
def test_unknown_extra_args_change_nothing(case, no_jit):
    tx = make(case)
    state = tx.init(PARAMS)
    expected = tx.update(PARAMS, state, PARAMS, value=2.0)
    actual = tx.update(PARAMS, state, PARAMS, value=2.0, batch=3, grad_fn=jax.grad)
    assert_equal(actual, expected)


@outer_cases
def test_schedule_is_read_once_per_step(case, no_jit):
    def schedule(count):
        return 1e-2 / (1 + count)

    changes = {"tuner": None} if accepts(CASES[case][0], "tuner") else {}
    tx = make(case, step_size=schedule, **changes)
    params, state = PARAMS, tx.init(PARAMS)
    sizes = []
    for call in range(4):
        params, state = advance(tx, params, state, batch(call))
        sizes.append(optax_smile.stats(state)["step_size"])
    per_step = 2 if "minimal_norm" in case else 1
    # The cosine of a cyclical sampler has lost 1e-6 after three of 5,000 steps.
    expected = [1e-2 / (1 + call // per_step) for call in range(4)]
    np.testing.assert_allclose(sizes, expected, rtol=1e-5)
    assert all(size.dtype == jnp.float32 for size in sizes)


@plain_cases
def test_a_schedule_may_touch_zero(case, no_jit):
    changes = {"tuner": None} if accepts(CASES[case][0], "tuner") else {}
    tx = make(case, step_size=lambda count: jnp.where(count % 3 == 0, 0, 1e-2), **changes)
    params, state = run(functools.partial(advance, tx), PARAMS, tx.init(PARAMS), range(5))
    assert all(moved(PARAMS["layer"], params["layer"]).values())
    chex.assert_tree_all_finite((params, last_accepted(state, params)))


@plain_cases
def test_a_leaf_without_gradient_takes_no_long_steps(case, no_jit):
    """Such as the bias of a dead unit: averages over its gradients are exactly zero."""
    tx = make(case, prior_precision=0.0)
    params, state = PARAMS, tx.init(PARAMS)
    for call in range(5):
        grads = jax.grad(mean_loss)(params, batch(call if call < NAN_CALL else 0))
        grads["layer"]["b"] = jnp.zeros(8)
        updates, state = tx.update(grads, state, params, value=1.0)
        params = apply_updates(params, updates)
        lengths = {name: jnp.abs(x).max() for name, x in updates["layer"].items()}
        assert lengths["b"] <= 100 * lengths["w"]


def injected(case, **changes):
    """The key is a static argument: as a hyperparameter it would be a second field `key`."""
    fn, options = CASES[case]
    static = [name for name in ("key",) if accepts(fn, name)]
    return build(optax.inject_hyperparams(fn, static_args=static), **options | changes)


@rich_cases
def test_inject_hyperparams_changes_nothing(case):
    tx = injected(case)
    expected = run(compiled(case), PARAMS, make(case).init(PARAMS), range(6))
    with jax.disable_jit():
        params, state = run(functools.partial(advance, tx), PARAMS, tx.init(PARAMS), range(6))
    assert_close((params, state.inner_state), expected)
    assert_equal(optax_smile.stats(state), optax_smile.stats(state.inner_state))
    assert_close(last_accepted(state, params), state.inner_state.last_accepted(params))
    jax.eval_shape(tx.update, PARAMS, state, params, value=jnp.float32(1))


@plain_cases
def test_inject_hyperparams_sets_the_step_size_under_jit(case):
    """The step size comes out of a program in which it is an argument: of init, the smallest."""
    tx = injected(case)

    @jax.jit
    def step_size_after(size):
        state = optax.tree.set(tx.init(PARAMS), step_size=size)
        _, after = tx.update(PARAMS, state, PARAMS, value=1.0)
        assert types(after) == types(state)
        return optax_smile.stats(after)["step_size"]

    np.testing.assert_allclose(step_size_after(jnp.float32(0.5)), 0.5, rtol=1e-5)


@plain_cases
def test_inject_hyperparams_takes_a_schedule(case, no_jit):
    tx = injected(case, step_size=lambda count: 0.5**count)
    state = tx.init(PARAMS)
    for call in range(3):
        _, state = tx.update(PARAMS, state, PARAMS, value=1.0)
        size = optax_smile.stats(state)["step_size"]
        # The wrapper counts calls, and a sampler looks where a step begins.
        begun = call - call % 2 if "minimal_norm" in case else call
        np.testing.assert_allclose(size, 0.5**begun, rtol=1e-5)


@rich_cases
def test_multi_steps_samples_with_mean_gradient_and_last_value(case, no_jit):
    inner = make(case)
    tx = optax.MultiSteps(inner, every_k_schedule=2)
    params, state = PARAMS, tx.init(PARAMS)
    with jax.disable_jit(False):
        update = functools.partial(tx.update, value=jnp.float32(1))
        assert types(jax.eval_shape(update, PARAMS, state, PARAMS)[1]) == types(state)
    expected_params, expected_state = PARAMS, inner.init(PARAMS)
    for call in (0, 2, 6):
        grads = [jax.grad(mean_loss)(params, batch(call + i)) for i in range(2)]
        first, state = tx.update(grads[0], state, params, value=1e3)
        assert all(jnp.all(leaf == 0) for leaf in jax.tree.leaves(first))
        second, state = tx.update(grads[1], state, params, value=1.0 + call)
        params = apply_updates(params, second)
        mean = jax.tree.map(lambda x, y: (x + y) / 2, *grads)
        updates, expected_state = inner.update(
            mean, expected_state, expected_params, value=1.0 + call
        )
        expected_params = apply_updates(expected_params, updates)
    assert_close((params, state.inner_opt_state), (expected_params, expected_state))
    assert_close(optax_smile.stats(state), optax_smile.stats(expected_state))
    assert_close(
        last_accepted(state, params),
        last_accepted(expected_state, expected_params),
    )


@rich_cases
def test_chain_behind_clipping(case, no_jit):
    inner = make(case)
    clip = optax.clip_by_global_norm(0.1)
    tx: Any = optax.chain(clip, inner)
    params, state = PARAMS, tx.init(PARAMS)
    expected_params, expected_state = PARAMS, inner.init(PARAMS)
    for call in range(4):
        params, state = advance(tx, params, state, batch(call))
        loss, grads = jax.value_and_grad(mean_loss)(expected_params, batch(call))
        grads = optax.tree.scale(0.1 / optax.tree.norm(grads), grads)
        updates, expected_state = inner.update(grads, expected_state, expected_params, value=loss)
        expected_params = apply_updates(expected_params, updates)
    assert_close((params, state[1]), (expected_params, expected_state))
    assert_close(optax_smile.stats(state), optax_smile.stats(expected_state))
    assert_close(
        last_accepted(state, params),
        last_accepted(expected_state, expected_params),
    )


def masked_part(tx):
    return optax.chain(
        optax.masked(tx, {"w": True, "b": False}),
        optax.masked(optax.set_to_zero(), {"w": False, "b": True}),
    )


def partitioned_part(tx):
    parts: Any = {"sampled": tx, "frozen": optax.set_to_zero()}
    labels: Any = {"w": "sampled", "b": "frozen"}
    return optax.partition(parts, labels)


@rich_cases
def test_part_of_the_network(case, no_jit):
    inner, start = make(case), PARAMS["layer"]
    calls = [jax.value_and_grad(mean_loss)({"layer": start}, batch(call)) for call in range(3)]
    part, part_state = {"w": start["w"]}, inner.init({"w": start["w"]})
    for loss, grads in calls:
        grad = {"w": grads["layer"]["w"]}
        updates, part_state = inner.update(grad, part_state, part, value=loss)
        part = apply_updates(part, updates)
    for nest in (masked_part, partitioned_part):
        tx = nest(inner)
        params, state = start, tx.init(start)
        for loss, grads in calls:
            updates, state = tx.update(grads["layer"], state, params, value=loss)
            params = apply_updates(params, updates)
        assert moved(start, params) == {"w": True, "b": False}
        assert_close(params["w"], part["w"])
        assert_close(optax_smile.stats(state), optax_smile.stats(part_state))
        last = last_accepted(state, params)
        assert_close(last["w"], last_accepted(part_state, part)["w"])
        assert_equal(last["b"], start["b"])


@every_case
def test_field_names_are_unique(case):
    state = make(case).init(PARAMS)
    names = [name for name, _ in fields(state)]
    assert len(names) == len(set(names))
    outer = injected(case).init(PARAMS)
    for name, value in fields(state):
        assert_equal(optax.tree.get(state, name), value)
        assert_equal(optax.tree.get(outer, name), value)


@plain_cases
def test_set_step_size_factor(case, no_jit):
    tx = make(case)
    state = optax.tree.set(tx.init(PARAMS), step_size_factor=jnp.float32(0.25))
    _, state = tx.update(PARAMS, state, PARAMS, value=1.0)
    assert optax_smile.stats(state)["step_size"] == jnp.float32(0.0025)


@every_case
def test_map_params(case):
    tx = make(case)
    state = tx.init(PARAMS)
    mapped = optax.tree.map_params(
        tx,
        lambda _, name: name,
        state,
        {"layer": {"w": "W", "b": "B"}},
        transform_non_params=lambda _: None,
    )
    assert set(jax.tree.leaves(mapped)) == {"W", "B"}


def cast(tree, w, b):
    return {"layer": {"w": tree["layer"]["w"].astype(w), "b": tree["layer"]["b"].astype(b)}}


@rich_cases
@pytest.mark.parametrize(
    ("w", "b"), [("float32", "float32"), ("float64", "float64"), ("float64", "float32")]
)
def test_precision_of_the_parameters_is_kept_under_x64(case, w, b):
    tx = make(case)
    with jax.enable_x64(True):
        params = cast(PARAMS, w, b)
        start = tx.init(params)
        after, state = jax.eval_shape(functools.partial(advance, tx), params, start, batch(0))
        chex.assert_trees_all_equal_dtypes(after, params)
        assert types(state) == types(start)
        floats = {x.dtype.name for x in jax.tree.leaves(state) if "float" in str(x.dtype)}
        assert floats == {w, b}
        stats, last = jax.eval_shape(
            lambda *x: (optax_smile.stats(x[0]), last_accepted(*x)), state, after
        )
        assert stats["step_size"].dtype == w
        chex.assert_trees_all_equal_dtypes(last, params)


@plain_cases
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_gradients_give_full_precision_updates(case, dtype, no_jit):
    """With so many data that num_data times the gradient leaves float16."""
    tx = make(case, num_data=1e6)
    grads = jax.tree.map(lambda x: x.astype(dtype), PARAMS)
    state = tx.init(PARAMS)
    updates, after = tx.update(grads, state, PARAMS, value=dtype(1))
    chex.assert_trees_all_equal_dtypes(updates, PARAMS)
    assert types(after) == types(state)
    assert optax_smile.stats(after)["num_nonfinite"] == 0


@rich_cases
def test_donated_buffers(case):
    key = jax.random.key(0)
    tx = make(case, key=key) if accepts(CASES[case][0], "key") else make(case)
    start = jax.tree.map(jnp.copy, PARAMS)
    start = start, tx.init(start)
    step = jax.jit(lambda x: jax.tree.map(lambda x: x * jnp.ones_like(x), x), donate_argnums=0)
    # No buffer twice, none of the user's: XLA refuses the one, and takes the other away.
    jax.block_until_ready(step(start))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(start))
    assert 0 < jax.random.uniform(key) < 1


@rich_cases
def test_vmap_equals_a_loop_over_chains(case):
    tx, keys = make(case), jax.random.key_data(jax.random.split(jax.random.key(7), 3))
    starts = jax.tree.map(lambda x: jnp.stack([x] * len(keys)), PARAMS)
    states = optax.tree.set(jax.vmap(tx.init)(starts), key=keys)
    step = jax.jit(jax.vmap(functools.partial(advance, tx), in_axes=(0, 0, None)))
    params, states = run(step, starts, states, range(CALLS))
    lasts = jax.vmap(last_accepted)(states, params)
    for chain, key in enumerate(keys):
        state = optax.tree.set(tx.init(PARAMS), key=key)
        expected = run(compiled(case), PARAMS, state, range(CALLS))
        last = last_accepted(expected[1], expected[0])
        actual = jax.tree.map(lambda x, i=chain: x[i], (params, states, lasts))
        assert_close(actual, (*expected, last))
    first, second, third = params["layer"]["w"]
    assert jnp.all(first != second) and jnp.all(second != third) and jnp.all(first != third)


def like_params(state):
    structure = jax.tree.structure(PARAMS)

    def is_like(node):
        return jax.tree.structure(node) == structure

    return [node for node in jax.tree.leaves(state, is_leaf=is_like) if is_like(node)]


def assert_sharded_like(state, params):
    trees = like_params(state)
    assert trees
    for tree in trees:
        for leaf, expected in zip(jax.tree.leaves(tree), jax.tree.leaves(params), strict=True):
            assert leaf.sharding.is_equivalent_to(expected.sharding, leaf.ndim)


def shard(axis_type):
    mesh = jax.make_mesh((8,), ("model",), axis_types=(axis_type,))
    specs = {"layer": {"w": jax.P(None, "model"), "b": jax.P("model")}}
    shardings = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs)
    return mesh, jax.device_put(PARAMS, shardings)


@rich_cases
def test_state_is_sharded_like_the_parameters(case):
    mesh, params = shard(AxisType.Auto)
    tx = make(case)
    expected = run(compiled(case), PARAMS, tx.init(PARAMS), range(8))
    with jax.set_mesh(mesh):
        state = tx.init(params)
        assert_sharded_like(state, params)
        step = jax.jit(functools.partial(advance, tx))
        after, state = run(step, params, state, range(8))
        assert_sharded_like((after, state), params)
        assert_close((after, state), expected)


@rich_cases
def test_state_is_sharded_like_the_parameters_where_types_say_so(case):
    """Explicit axes: no program is needed to see where everything is."""
    mesh, params = shard(AxisType.Explicit)
    tx = make(case)
    with jax.set_mesh(mesh):
        assert_sharded_like(tx.init(params), params)
        params = jax.eval_shape(lambda x: x, params)
        start = jax.eval_shape(tx.init, params)
        after = jax.eval_shape(functools.partial(advance, tx), params, start, batch(0))
        for state in (start, after):
            assert_sharded_like(state, params)


def through_orbax(state, folder) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
        checkpointer.wait_until_finished()
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        return checkpointer.restore(folder / "state", abstract)


def through_numpy(state, folder):
    leaves, structure = jax.tree.flatten(state)
    np.savez(folder / "state.npz", *jax.tree.leaves(bare(leaves)))
    with np.load(folder / "state.npz") as file:
        saved = [file[name] for name in file]
    wrapped = [
        jax.random.wrap_key_data(new) if is_key(old) else jnp.asarray(new)
        for new, old in zip(saved, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, wrapped)


@rich_cases
def test_save_and_restore_is_exact(case, tmp_path):
    tx, step = make(case), compiled(case)
    params, state = halfway = run(step, PARAMS, tx.init(PARAMS), range(9))
    expected = run(step, params, state, range(9, CALLS))
    for round_trip in (through_orbax, through_numpy):
        restored = round_trip(halfway, tmp_path)
        assert types(restored) == types(halfway)
        assert_equal(restored, halfway)
    params, state = restored
    assert_equal(run(step, params, state, range(9, CALLS)), expected)


@rich_cases
def test_old_style_keys(case, no_jit):
    if not accepts(CASES[case][0], "key"):
        pytest.skip("draws no random numbers")
    new, old = make(case, key=jax.random.key(5)), make(case, key=jax.random.PRNGKey(5))
    expected = new.update(PARAMS, new.init(PARAMS), PARAMS, value=1.0)
    assert_equal(old.update(PARAMS, old.init(PARAMS), PARAMS, value=1.0), expected)


def containers(children):
    return st.one_of(
        st.lists(children, max_size=2),
        st.lists(children, max_size=2).map(tuple),
        st.dictionaries(st.sampled_from("abc"), children, max_size=3),
    )


SHAPES = st.sampled_from([(), (1,), (3,), (2, 3)])
TREES = st.recursive(SHAPES.map(np.ones) | st.none(), containers, max_leaves=5)


@pytest.mark.parametrize("case", [case for case in PLAIN if "random" not in case])
@hypothesis.settings(max_examples=8, deadline=None, derandomize=True)
@hypothesis.given(tree=TREES)
def test_any_tree(case, tree):
    hypothesis.assume(sum(leaf.size for leaf in jax.tree.leaves(tree)) >= 2)
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)
    tx = make(case)
    state = tx.init(params)
    noise = np.random.default_rng(0)
    for call in range(3):
        grads = jax.tree.map(lambda x: jnp.asarray(noise.normal(size=x.shape), x.dtype), params)
        with jax.disable_jit():
            updates, state = tx.update(grads, state, params, value=1.0 + call)
        chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
        params = apply_updates(params, updates)
        direction = optax.tree.get(state, "direction")
        if direction is not None:
            np.testing.assert_allclose(optax.tree.norm(direction), 1, atol=1e-5)
    chex.assert_tree_all_finite(last_accepted(state, params))
