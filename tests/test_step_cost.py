"""What a compiled step moves and keeps, and the sums that it makes in one pass.

What it sends between devices: `devices/test_sharded_states.py`.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_smile
from optax_smile import _tree

# Traffic and temporary memory are those of optimized programs.
OPTIMIZED = True
NAIVE: dict[str, Any] = {"step_size": 0.1, "tuner": None, "decoherence_length": None}
# Options, and parameter-sized arrays read and written; then come a few thousand block sums.
TRAFFIC = {"psmile": ({}, 21.1), "psmile without noise": (NAIVE, 29.1)}


@pytest.mark.parametrize("name", TRAFFIC)
def test_a_call_moves_and_keeps_little(name):
    """AdamW moves 10; 0.15 of the parameters besides, and no array is copied whole."""
    options, traffic = TRAFFIC[name]
    tx: Any = optax_smile.psmile(num_data=1000, key=jax.random.key(0), **options)
    params = [jax.ShapeDtypeStruct((5000, 100), jnp.float32)] * 20

    def step(params, state, grads, value):
        updates, state = tx.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    given = params, jax.eval_shape(tx.init, params), params, jax.ShapeDtypeStruct((), jnp.float32)
    program: Any = jax.jit(step, donate_argnums=(0, 1)).lower(*given).compile()
    array = 4 * 10**7
    assert program.cost_analysis()["bytes accessed"] <= traffic * array
    assert program.memory_analysis().temp_size_in_bytes <= 0.15 * array
    assert not re.findall(r"f32\[5000,100\]\S* copy\(", program.as_text())


SHAPES = ((), (20_000, 300), (5_999_993,), (3, 3, 512, 300), (1_500_000, 4), (200_003, 64))
SHAPES += ((2, 3_000_000),)


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_keep_their_digits(shape):
    """Added one after the other float32 loses one percent of ten million numbers."""
    rng = np.random.default_rng(0)
    x, y = (np.asarray(1 + rng.standard_normal(shape, np.float32)) for _ in range(2))
    got = jax.jit(lambda x, y: _tree.sums([{"a": x * x, "b": y}, {"a": x * y, "b": x}]))(x, y)
    x, y = np.asarray(x, float), np.asarray(y, float)
    expected = [np.sum(x * x) + np.sum(y), np.sum(x * y) + np.sum(x)]
    np.testing.assert_allclose(got, expected, rtol=3e-6)


def test_sums_of_two_precisions():
    with jax.enable_x64(True):
        (got,) = _tree.sums([{x: jnp.full(10, 0.1, x) for x in ("float32", "float64")}])
        assert got.dtype == jnp.float64
        np.testing.assert_allclose(got, 10 * np.float64(np.float32(0.1)) + 1, rtol=1e-7)
