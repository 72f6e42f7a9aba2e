"""What a compiled step moves, keeps and sends, and the sums that it makes in one pass."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import optax_smile
from optax_smile import _tree

SAMPLERS = {
    "smile": lambda: optax_smile.smile(num_data=1000, key=jax.random.key(0)),
    "psmile": lambda: optax_smile.psmile(num_data=1000, key=jax.random.key(0)),
    "smile_naive": lambda: optax_smile.smile_naive(0.1, num_data=1000),
    "psmile_naive": lambda: optax_smile.psmile_naive(0.1, num_data=1000),
}
COLLECTIVES = r"(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("


def compiled(tx, params, shardings=None, **options) -> Any:
    """The program of a step `(params, state, grads, value)` that gives parameters and state."""

    def step(params, state, grads, value):
        updates, state = tx.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(tx.init, params)
    if shardings is not None:
        own, other = shardings

        def place(leaf):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=own.get(leaf.shape, other))

        params, state = jax.tree.map(place, (params, state))
    value = jax.ShapeDtypeStruct((), jnp.float32)
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, params, value)
    return lowered.compile(compiler_options=options or None)


# Parameter-sized arrays read and written, on top of which come a few thousand block sums.
TRAFFIC = {"smile_naive": 10.1, "smile": 10.1, "psmile": 21.1, "psmile_naive": 29.1}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_call_moves_and_keeps_little(name):
    """AdamW moves 10; 0.15 of the parameters besides, and no array is copied whole."""
    leaves = [jax.ShapeDtypeStruct((5000, 100), jnp.float32)] * 20
    program = compiled(SAMPLERS[name](), leaves)
    array = 4 * 10**7
    assert program.cost_analysis()["bytes accessed"] <= TRAFFIC[name] * array
    assert program.memory_analysis().temp_size_in_bytes <= 0.15 * array
    copies = re.findall(r"f32\[5000,100\]\S* copy\(", program.as_text())
    assert not copies


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smile", "psmile"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_four_hundred_sharded_leaves_take_three_collectives(name, kind):
    """Sharded along either axis; the compiler joins no more than 256 sums that cross devices."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    specs = {(64, 128): jax.P("data", None), (128, 64): jax.P(None, "data"), (64,): jax.P("data")}
    own = {shape: jax.NamedSharding(mesh, spec) for shape, spec in specs.items()}
    shapes = [shape for shape in specs for _ in range(134)][:400]
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    with jax.set_mesh(mesh):
        shardings = own, jax.NamedSharding(mesh, jax.P())
        text = compiled(SAMPLERS[name](), params, shardings, **quick).as_text()
    assert 1 <= len(re.findall(COLLECTIVES, text)) <= 3


# Sums.

SHAPES = {
    "scalar": (),
    "small": (7, 3),
    "rows": (20_000, 300),
    "one long axis": (6_000_000,),
    "a prime number": (5_999_993,),
    "a convolution": (3, 3, 512, 300),
    "short rows": (1_500_000, 4),
    "many blocks": (200_003, 64),
    "long rows": (2, 3_000_000),
}


@pytest.mark.parametrize("name", SHAPES)
def test_sums_keep_their_digits(name):
    """Added one after the other float32 loses one percent of ten million numbers."""
    rng = np.random.default_rng(0)
    first, second = (1 + rng.standard_normal(SHAPES[name]).astype(np.float32) for _ in range(2))

    def products(x, y):
        return _tree.sums([{"leaf": x * x, "b": y}, {"leaf": x * y, "b": x}])

    got = jax.jit(products)(first, second)
    x, y = np.asarray(first, float), np.asarray(second, float)
    expected = [np.sum(x * x) + np.sum(y), np.sum(x * y) + np.sum(x)]
    np.testing.assert_allclose(got, expected, rtol=3e-6)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sums_across_devices(kind):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)
    rng = np.random.default_rng(1)
    spec = {"w": jax.P("a", "b"), "v": jax.P("a", "b"), "b": jax.P(None), "s": jax.P()}
    tree = {"w": (200, 320), "v": (200, 320), "b": (40,), "s": ()}
    tree = {key: 1 + rng.normal(size=shape).astype(np.float32) for key, shape in tree.items()}
    expected = [sum(np.sum(np.float64(x) ** power) for x in tree.values()) for power in (1, 2)]
    with jax.set_mesh(mesh):
        placed = {k: jax.device_put(x, jax.NamedSharding(mesh, spec[k])) for k, x in tree.items()}
        got = jax.jit(lambda x: _tree.sums([x, jax.tree.map(jnp.square, x)]))(placed)
    np.testing.assert_allclose(got, expected, rtol=3e-6)


def test_sums_of_two_precisions():
    with jax.enable_x64(True):
        tree = {"a": jnp.full(10, 0.1, jnp.float32), "b": jnp.full(10, 0.1, jnp.float64)}
        (got,) = _tree.sums([tree])
        assert got.dtype == jnp.float64
        np.testing.assert_allclose(got, 10 * np.float64(np.float32(0.1)) + 1, rtol=1e-7)
