"""States of samplers, sums, noise and chains if each array is sharded over several devices."""

import functools
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from runs import as_read, nightly
from test_contract import PARAMS, advance, assert_close, batch, make, run, scale
from test_wrappers import SEVERAL_DEVICES, WRAPPERS, assert_plain_chain

import optax_smile

# Nightly tests compare with the same chains as fast ones.
OPTIMIZED = False
COLLECTIVES = r"(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("


def assert_sharded_like(state, params):
    def is_like(node):
        return jax.tree.structure(node) == jax.tree.structure(PARAMS)

    def same(x, y):
        return x.sharding.is_equivalent_to(y.sharding, x.ndim)

    trees = [node for node in jax.tree.leaves(state, is_leaf=is_like) if is_like(node)]
    assert trees and all(jax.tree.all(jax.tree.map(same, tree, params)) for tree in trees)


def shard(axis_type):
    mesh = jax.make_mesh((8,), ("model",), axis_types=(axis_type,))
    specs = {"layer": {"w": jax.P(None, "model"), "b": jax.P("model")}}
    shardings = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs)
    return mesh, jax.device_put(PARAMS, shardings)


@pytest.mark.slow
def test_state_is_sharded_like_the_parameters():
    mesh, params = shard(AxisType.Auto)
    tx = make("psmile, rich")
    step = jax.jit(functools.partial(advance, tx))
    expected = run(step, PARAMS, tx.init(PARAMS), range(7))
    with jax.set_mesh(mesh):
        state = tx.init(params)
        assert_sharded_like(state, params)
        after, state = run(step, params, state, range(7))
    assert_sharded_like((after, state), params)
    assert not np.any(state.num_altered) and np.any(state.num_read)
    assert_close((after, state), as_read((expected[0], expected[1]), (after, state)))


def test_altered_parameters_are_seen_on_several_devices():
    """A chain that continues on one device, where more entries are read, is not flagged."""
    mesh, params = shard(AxisType.Auto)
    tx = make("sghmc")
    step = jax.jit(functools.partial(advance, tx))
    with jax.set_mesh(mesh):
        params, state = run(step, params, tx.init(params), range(2))
        _, altered = step(scale(0.999, params), state, batch(2))
    assert state.num_altered == 0 and altered.num_altered == 1
    params, state = jax.device_get((params, state))
    params, state = run(step, params, state, range(2, 4))
    _, altered = step(scale(0.999, params), state, batch(4))
    assert state.num_altered == 0 and altered.num_altered == 1
    assert altered.num_read == len(altered.start) == optax.tree.size(PARAMS)


@pytest.mark.parametrize("case", ["psmile, rich", "sghmc"])
def test_state_is_sharded_like_the_parameters_where_types_say_so(case):
    """With explicit axes, shardings are part of types, so no program needs to run."""
    mesh, params = shard(AxisType.Explicit)
    tx = make(case)
    with jax.set_mesh(mesh):
        assert_sharded_like(tx.init(params), params)
        params = jax.eval_shape(lambda x: x, params)
        start = jax.eval_shape(tx.init, params)
        after = jax.eval_shape(functools.partial(advance, tx), params, start, batch(0))
    for state in (start, after):
        assert_sharded_like(state, params)


@pytest.mark.slow
def test_sums_and_noise_across_devices():
    """The explicit noise does not depend on the sharding, and a direction keeps the norm one."""
    rng, tx = np.random.default_rng(1), optax_smile.smile(0.1, num_data=9, key=0)
    spec = {"w": jax.P("a", "b"), "v": jax.P("a", "b"), "b": jax.P(None, "b"), "s": jax.P()}
    shapes = {"w": (200, 320), "v": (200, 320), "b": (40, 2), "s": ()}
    tree = {k: jnp.asarray(1 + rng.normal(size=shape), jnp.float32) for k, shape in shapes.items()}

    @jax.jit
    def turned(tree):
        updates, state = tx.update(tree, tx.init(tree), tree, value=1.0)
        return optax.apply_updates(tree, updates), optax.tree.get(state, "direction")

    _, expected = turned(tree)
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)
        with jax.set_mesh(mesh):
            placed = {
                k: jax.device_put(x, jax.NamedSharding(mesh, spec[k])) for k, x in tree.items()
            }
            moved, direction = turned(placed)
        assert moved["w"].sharding.is_equivalent_to(placed["w"].sharding, 2)
        squares = [np.sum(np.float64(x) ** 2) for x in direction.values()]
        np.testing.assert_allclose(sum(squares), 1, rtol=3e-6)
        chex.assert_trees_all_close(jax.device_get(direction), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.nightly
def test_three_hundred_sharded_leaves_take_three_collectives():
    """Sharded along either axis; the compiler joins no more than 256 sums that cross devices."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    specs = {(64, 128): jax.P("data", None), (128, 64): jax.P(None, "data"), (64,): jax.P("data")}
    params: Any = [jax.ShapeDtypeStruct(x, jnp.float32) for x in [*specs] * 100]
    tx: Any = optax_smile.psmile(num_data=1000, key=jax.random.key(0))

    def place(leaf):
        own = jax.NamedSharding(mesh, specs.get(leaf.shape, jax.P()))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=own)

    def step(params, state, grads, value):
        updates, state = tx.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(mesh):
        params, state = jax.tree.map(place, (params, jax.eval_shape(tx.init, params)))
        given = params, state, params, jax.ShapeDtypeStruct((), jnp.float32)
        quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
        text: Any = jax.jit(step, donate_argnums=(0, 1)).lower(*given).compile(quick).as_text()
    assert 1 <= len(re.findall(COLLECTIVES, text)) <= 3


# `optax.tree.map_params` cannot map over the state of `optax.flatten`.
FAST, MAPPED = ("tracked", "partition"), [name for name in WRAPPERS if name != "flatten"]


@pytest.mark.parametrize("loop", SEVERAL_DEVICES)
@pytest.mark.parametrize("wrapper", [x if x in FAST else nightly(x) for x in MAPPED])
def test_the_chain_is_that_of_one_device(wrapper, loop):
    """Chains on several devices, and a chain on several devices."""
    assert_plain_chain(wrapper, loop)
