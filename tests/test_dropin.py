"""Training loops whose `tx` is a sampler, and what else holds states and parameters.

They are those of any optimizer, which ignores the `value=loss`. `TrainState.apply_gradients` can
pass none.
"""

from typing import Any

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx, serialization
from flax.training.train_state import TrainState

import optax_smile

STEPS, RBG = 4, jax.random.key(7, impl="rbg")
RNG = np.random.default_rng(0)
INPUTS, TARGETS = (RNG.normal(size=x).astype(np.float32) for x in ((STEPS, 64, 10), (STEPS, 64)))


def loss_of(outputs, targets):
    return jnp.mean((outputs - targets) ** 2)


def train(step, *carry):
    for batch in zip(INPUTS, TARGETS, strict=True):
        *carry, loss = step(*carry, *batch)
    return loss, *carry


def train_state_loop(tx):
    model = linen.Sequential([linen.Dense(8), jnp.tanh, linen.Dense(1), jnp.ravel])
    start = model.init(jax.random.key(0), INPUTS[0])["params"]

    def loss_fn(params, inputs, targets):
        return loss_of(model.apply({"params": params}, inputs), targets)

    @jax.jit
    def step(state, inputs, targets):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, inputs, targets)
        return state.apply_gradients(grads=grads), loss

    loss, state = train(step, TrainState.create(apply_fn=model.apply, params=start, tx=tx))
    return loss, start, state.params, state.opt_state, loss_fn


def test_one_line_swap():
    tx = optax_smile.sghmc(1e-3, num_data=100, key=0)
    loss, start, params, state, loss_at = train_state_loop(tx)
    chex.assert_tree_all_finite(params)
    moved = jax.tree.map(lambda x, y: bool(jnp.all(x != y)), start, params)
    assert all(jax.tree.leaves(moved))
    stats = optax_smile.stats(state)
    assert stats.num_gradients == STEPS
    assert stats.energy_level == 0
    assert stats.num_nonfinite == 0 and stats.accepted
    last = optax_smile.last_accepted(state, params)
    assert jax.tree.structure(last) == jax.tree.structure(params)
    batch = INPUTS[-1], TARGETS[-1]
    np.testing.assert_allclose(loss_at(last, *batch), loss, rtol=1e-4)
    assert abs(loss_at(params, *batch) / loss - 1) > 1e-3


def test_an_nnx_optimizer_and_a_state_with_more_in_it():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(3, 2, rngs=rngs), nnx.BatchNorm(2, rngs=rngs), jnp.tanh)
    tx = optax_smile.sgld(1e-2, num_data=10, key=0)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    before = jax.tree.map(jnp.copy, nnx.as_pure(nnx.state(model)))
    grads = nnx.grad(lambda model: jnp.sum(model(INPUTS[0, :4, :3]) ** 3))(model)
    optimizer.update(model, grads, value=1.0)
    stats = optax_smile.stats(optimizer.opt_state)
    assert int(stats.num_gradients) == 1
    last = optax_smile.last_accepted(optimizer.opt_state, nnx.state(model))
    leaves = jax.tree.leaves(last, is_leaf=lambda x: isinstance(x, nnx.Variable))
    assert all(isinstance(leaf, jax.Array) for leaf in (*leaves, *stats))
    # The step is taken back, and the running statistics stay what the loop made of them.
    now = nnx.as_pure(nnx.state(model))
    for part, name in [(0, "kernel"), (1, "scale"), (1, "bias")]:
        got = last["layers"][part][name]
        np.testing.assert_allclose(got, before["layers"][part][name], rtol=1e-6, atol=1e-7)
        assert np.any(got != now["layers"][part][name])
    np.testing.assert_array_equal(last["layers"][1]["mean"], now["layers"][1]["mean"])
    nnx.update(model, last)
    np.testing.assert_array_equal(model.layers[0].kernel[...], last["layers"][0]["kernel"])
    alone = optax_smile.last_accepted(optimizer.opt_state, nnx.state(model, nnx.Param))
    assert set(alone["layers"][1]) == {"scale", "bias"}


def test_other_trees_and_states_are_refused():
    tx, params = optax_smile.sgld(1e-2, num_data=10, key=0), {"a": {"w": jnp.ones(3)}}
    state: Any = tx.init(params)
    last = optax_smile.last_accepted
    others = (("v", 3, "a/w"), ("w", 4, r"float32\[3\] at \['a'\]\['w'\]"))
    for name, size, told in others:
        rule = r"^`last_accepted\(params=...\)` must be a tree .*" + told
        with pytest.raises(ValueError, match=rule):
            last(state, {"a": {name: jnp.ones(size)}})
    for wrong in (params, (state, state)):
        with pytest.raises(
            ValueError,
            match=r"`stats\(state=...\)` must be the state of a transformation with exactly one",
        ):
            optax_smile.stats(wrong)
    with pytest.raises(ValueError, match=r"`stats\(state=...\)` must be a state of format"):
        optax_smile.stats((optax.tree.set(state, state_format=state.state_format + 1),))
    chains = {"a": {"w": jnp.ones((2, 3))}}
    states = jax.vmap(tx.init)(chains)
    with pytest.raises(ValueError, match=r"`last_accepted\(state=...\)` must .*Use `jax.vmap"):
        last(states, chains)
    assert jax.vmap(last)(states, chains)["a"]["w"].shape == (2, 3)
    # Keys of another implementation.
    ours, theirs = (optax_smile.psmile(num_data=50, key=key) for key in (0, RBG))
    with pytest.raises(ValueError, match=r"`psmile.update\(state=...\)` must be .* uint32\[2\]"):
        ours.update(params, theirs.init(params), params)
    with pytest.raises(ValueError, match=r"`parallel.init\(key=...\)` must be .* 2 words"):
        optax_smile.parallel.init(ours, chains, key=RBG)


def round_trips(state, folder):
    yield serialization.from_bytes(state, serialization.to_bytes(state))
    eqx.tree_serialise_leaves(folder / "state.eqx", state)
    yield eqx.tree_deserialise_leaves(folder / "state.eqx", state)
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
        checkpointer.wait_until_finished()
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        yield checkpointer.restore(folder / "state", abstract)


def test_a_state_of_arrays_survives_any_library(tmp_path):
    tx = optax_smile.sghmc(0.01, num_data=50, key=RBG)
    params = {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}
    update = jax.jit(tx.update)
    _, state = update(params, tx.init(params), params)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    assert not any(jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in jax.tree.leaves(state))
    expected = update(params, state, params)
    for restored in round_trips(state, tmp_path):
        chex.assert_trees_all_equal_shapes_and_dtypes(restored, state)
        chex.assert_trees_all_equal(update(params, restored, params), expected)
