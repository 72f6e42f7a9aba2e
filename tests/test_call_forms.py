"""Each way in which loops call `update`: the same chain as in a loop that passes everything."""

from typing import Any

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

# With it `stats` and `last_accepted` look for variables in a state.
from flax import nnx  # noqa: F401
from test_contract import make

import optax_smile

CALLS, KEY = 12, jax.random.key(0)
RNG = np.random.default_rng(0)
BATCHES = jnp.asarray(RNG.normal(size=(CALLS, 16, 3)), jnp.float32)
START = {"mean": jnp.ones(3), "offset": jnp.zeros(2)}
apply_updates: Any = optax.apply_updates
last_accepted: Any = optax_smile.last_accepted
tracked: Any = optax_smile.tracked
stats = optax_smile.stats


def loss_fn(params, batch):
    offset = params["offset"] - 1 - 0 * batch.mean()  # A penalty otherwise.
    return jnp.mean((params["mean"][None] - batch) ** 2) + jnp.sum(offset**2) / 2


def sghmc(**options) -> Any:
    return optax_smile.sghmc(1e-2, num_data=100, key=KEY, **options)


def follow(tx, call, start: Any = START):
    """Parameters and state after calls `call(tx, grads, state, params, loss)`."""

    def step(carry, batch):
        params, state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = call(tx, grads, state, params, loss)
        return (apply_updates(params, updates), state), None

    return jax.jit(lambda *start: jax.lax.scan(step, start, BATCHES)[0])(start, tx.init(start))


def plain(tx, grads, state, params, loss):
    return tx.update(grads, state, params, value=loss)


def without_params(tx, grads, state, params, loss):
    return tx.update(grads, state, value=loss)


@pytest.fixture(scope="module")
def expected():
    params, state = follow(sghmc(), plain)
    return params, last_accepted(state, params), stats(state)


def assert_same(found, expected):
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)


def test_without_params_the_state_has_those_of_the_loop(expected):
    params, state = follow(tracked(sghmc()), without_params)
    assert_same((params, last_accepted(state), stats(state)), expected)
    chex.assert_trees_all_close(state.tracked_params, params, rtol=1e-6)
    for part in state, state.sampler_state:
        for name in part._fields:
            chex.assert_trees_all_equal(optax.tree.get(state, name), getattr(part, name))


def test_arguments_may_have_names():
    tx = sghmc()
    state = tx.init(START)
    expected = tx.update(START, state, START, value=2.0)
    chex.assert_trees_all_equal(tx.update(START, state, START, loss=2.0), expected)
    named = tx.update(value=2.0, params=START, state=state, updates=START)
    chex.assert_trees_all_equal(named, expected)


def injected(**options) -> Any:
    build: Any = optax.inject_hyperparams(optax_smile.sghmc, static_args=("key",))
    return build(step_size=1e-2, num_data=100, key=KEY, **options)


LABELS: Any = {"mean": "sampled", "offset": "sampled", "table": "frozen"}
WRAPPED: dict[str, Any] = {
    "inject_hyperparams": lambda tx: tracked(injected()),
    "partition": lambda tx: optax.partition(
        {"sampled": tracked(tx), "frozen": optax.set_to_zero()}, LABELS
    ),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_wrappers_pass_on_that_there_are_no_params(name, expected):
    tx, has_table = WRAPPED[name](sghmc()), name == "partition"
    start = START | ({"table": jnp.arange(3.0)} if has_table else {})
    params, state = follow(tx, without_params, start)
    table, drawn = params.pop("table", None), last_accepted(state)
    if has_table:
        # In the place of what the sampler does not see; with `params` the whole tree comes back.
        assert drawn.pop("table") == optax.MaskedNode()
        np.testing.assert_array_equal(table, start["table"])
        whole = last_accepted(state, params | {"table": table})
        chex.assert_trees_all_equal(whole["table"], table)
        chex.assert_trees_all_close(whole["mean"], drawn["mean"], rtol=1e-6)
    assert_same((params, drawn, stats(state)), expected)


def test_a_bfloat16_model_with_a_master_copy(expected):
    """The loop has half-precision weights alone; gradients are in half precision."""
    tx = tracked(sghmc())

    @jax.jit
    def step(model, state, batch):
        grads = jax.grad(loss_fn)(model, batch)
        assert grads["mean"].dtype == jnp.bfloat16
        _, state = tx.update(grads, state)
        return optax.tree.cast(state.tracked_params, jnp.bfloat16), state

    model, state = optax.tree.cast(START, jnp.bfloat16), tx.init(START)
    for batch in BATCHES:
        model, state = step(model, state, batch)
    chex.assert_trees_all_close(last_accepted(state), expected[1], atol=3e-2)
    assert last_accepted(state)["mean"].dtype == jnp.float32
    with pytest.raises(ValueError, match=r"with float32\[3\] at \['mean'\], got bfloat16"):
        last_accepted(state, model)


# Eager calls.


def test_eager_calls_equal_compiled_ones_to_the_bit():
    tx = make("psmile, rich")
    update: Any = jax.jit(tx.update)
    states = [tx.init(START)] * 2
    for seed in range(3):
        grads = optax.tree.random_like(jax.random.key(seed), START)
        (updates, *states[:1]), (wanted, *states[1:]) = (
            call(grads, state, START, value=1.5)
            for call, state in zip((tx.update, update), states, strict=True)
        )
        chex.assert_trees_all_equal((updates, states[0]), (wanted, states[1]))


@pytest.mark.parametrize("build", [sghmc, injected])
def test_eager_calls_compile_nothing_after_the_first(build, caplog):
    """Also through `inject_hyperparams`, which builds its sampler in every call."""
    tx = tracked(build())
    state = tx.init(START)
    for number in range(3):
        with jax.log_compiles(number == 2):
            _, state = tx.update(START, state)
    assert stats(state).num_gradients == 3
    assert "Compiling" not in caplog.text


# Trees.


class Model(eqx.Module):
    layer: eqx.nn.Linear
    activation: Any
    count: jax.Array
    rate: float = 0.5

    def __call__(self, x):
        return self.activation(self.layer(x))


MODEL = Model(eqx.nn.Linear(3, 3, key=KEY), jax.nn.relu, jnp.arange(2))
SPEC = eqx.tree_at(lambda m: m.layer.bias, jax.tree.map(eqx.is_inexact_array, MODEL), False)


def model_loop(tx, start, passes=lambda model: model):
    @eqx.filter_jit
    def step(model, state, batch):
        moving, others = eqx.partition(model, SPEC)

        def loss(moving):
            return jnp.mean(jax.vmap(eqx.combine(moving, others))(batch) ** 2)

        updates, state = tx.update(jax.grad(loss)(moving), state, passes(model))
        return eqx.apply_updates(model, updates), state

    model, state = MODEL, tx.init(start)
    for batch in BATCHES[:3]:
        model, state = step(model, state, batch)
    return model, state


def test_whole_models_and_gradients_that_are_none():
    """As a sampler that never saw the frozen leaf, which a loop may well change."""
    moving = eqx.filter(MODEL, SPEC)
    wanted, alone = model_loop(sghmc(), moving, lambda model: eqx.filter(model, SPEC))
    model, state = model_loop(sghmc(), MODEL)
    assert stats(state).num_parameters == optax.tree.size(moving)
    chex.assert_trees_all_close(
        eqx.filter(model, SPEC), eqx.filter(wanted, SPEC), rtol=1e-4, atol=1e-5
    )
    chex.assert_trees_all_close(stats(state), stats(alone), rtol=1e-3, atol=1e-4)
    changed = eqx.tree_at(lambda m: m.layer.bias, model, jnp.full(3, jnp.inf))
    drawn, expected = last_accepted(state, changed), last_accepted(alone, eqx.filter(wanted, SPEC))
    chex.assert_trees_all_equal(drawn.layer.bias, changed.layer.bias)
    chex.assert_trees_all_close(eqx.filter(drawn, SPEC), expected, atol=1e-5)
    assert drawn.activation is jax.nn.relu and drawn.rate == 0.5
    # What the loop makes of a leaf without a gradient is its own.
    _, state = model_loop(tracked(sghmc()), MODEL, lambda model: None)
    at = eqx.combine(eqx.filter(state.tracked_params, SPEC), changed)
    chex.assert_trees_all_equal(last_accepted(state, at).layer.bias, changed.layer.bias)
    chex.assert_trees_all_equal(last_accepted(state).layer.bias, MODEL.layer.bias)


def test_integers_get_no_update():
    params: Any = {"w": jnp.ones(3), "table": jnp.arange(2), "mask": jnp.ones(2, bool)}
    tx = sghmc()
    grads = jax.grad(lambda x: jnp.sum(x["w"] ** 2), allow_int=True)(params)
    for update in (tx.update, jax.jit(tx.update)):
        given = grads if update is tx.update else grads | {"table": None, "mask": None}
        updates, state = update(given, tx.init(params), params)
        after = eqx.apply_updates(params, updates)
        chex.assert_trees_all_equal(after["table"], params["table"])
        chex.assert_trees_all_equal_dtypes(after, params)
        chex.assert_trees_all_equal(last_accepted(state, after)["mask"], params["mask"])
    # As Optax applies them.
    updates, _ = tx.update(grads, tx.init(params), params)
    chex.assert_trees_all_equal(apply_updates(params, updates)["table"], params["table"])


# What does not fit.


WHOSE_CALLS = r"\(state=...\)` must be a state whose calls"


def test_parameters_that_a_loop_passes_replace_the_tracked_ones():
    """And what changes them is counted, as without `tracked`."""
    tx = tracked(sghmc())
    params, state = follow(tx, without_params)
    chex.assert_trees_all_close(last_accepted(state, params), last_accepted(state), rtol=1e-6)
    with pytest.raises(ValueError, match=r"`last_accepted\(params=...\)` must be those that the"):
        last_accepted(state, jax.tree.map(lambda x: 0.9 * x, params))
    for altered in range(1, 4):
        params = jax.tree.map(lambda x: x + 0.1, params)
        updates, state = tx.update(START, state, params)
        params = apply_updates(params, updates)
        chex.assert_trees_all_equal(state.tracked_params, params)
        assert stats(state).num_altered == altered
    with pytest.raises(ValueError, match="only the sampler changes the parameters"):
        last_accepted(state)


def test_what_has_no_parameters_or_another_state_is_refused():
    with pytest.raises(ValueError, match=r"`last_accepted\(params=...\)` must be the .*tracked"):
        last_accepted(sghmc().init(START))
    with pytest.raises(ValueError, match=r"`tracked.update\(state=...\)` must be what `init` or"):
        tracked(sghmc()).update(START, sghmc().init(START))
    with pytest.raises(ValueError, match="must be what `init` or `update` of sghmc returned"):
        sghmc().update(START, tracked(sghmc()).init(START), START)
    # Buffers of the loop may be donated.
    params = jax.tree.map(jnp.copy, START)
    state = tracked(sghmc()).init(params)
    jax.tree.map(lambda x: x.delete(), params)
    chex.assert_trees_all_equal(last_accepted(state), START)


def test_gradients_for_other_leaves_than_at_first_are_refused():
    part: Any = {"mean": jnp.ones(3), "offset": None}
    for tx in (sghmc(), tracked(sghmc())):
        updates, state = tx.update(part, tx.init(START), START)
        params: Any = eqx.apply_updates(START, updates)
        assert updates["offset"] is None and stats(state).num_parameters == 3
        assert optax.tree.get(state, "displacement")["offset"] is None
        for update in tx.update, jax.jit(tx.update):
            with pytest.raises(ValueError, match=r"updates=...\)` must be None at \['offset'\]"):
                update(START, state, params)
        _, whole = tx.update(START, tx.init(START), START)
        with pytest.raises(ValueError, match=r"None at \['offset'\], where the first call had"):
            tx.update(part, whole, START)
        # A compiled call can raise nothing.
        for _ in range(2):
            _, whole = jax.jit(tx.update)(part, whole, START)
            assert stats(whole).is_altered and stats(whole).num_parameters == 3
            with pytest.raises(ValueError, match=f"`last_accepted{WHOSE_CALLS}"):
                last_accepted(whole, START)
    # The number is that of one chain.
    chains = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    number: Any = jax.vmap(stats)(chains).num_parameters
    with pytest.warns(UserWarning, match="equal keys"):
        np.testing.assert_array_equal(stats(chains).num_parameters, [3, 3])
    np.testing.assert_array_equal(number, [3, 3])
    with pytest.raises(ValueError, match=r"`sghmc.update\(updates=...\)` must be None at .*'n'"):
        params = START | {"n": 3.0}
        sghmc().update(params | {"n": jnp.ones(())}, sghmc().init(params), params)
    with pytest.raises(ValueError, match="at least 2 parameters, got 0"):
        sghmc().update({"mean": None, "offset": None}, sghmc().init(START), START)
