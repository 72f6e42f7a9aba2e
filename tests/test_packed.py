"""The arrays of a state: between calls the scalars of a chain are three of them."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_smile
from optax_smile._packed import pack, unpack

WIDTHS = 8, 16, 16, 16, 1
PARAMS = {
    f"layer {i}": {"kernel": jnp.ones(shape), "bias": jnp.zeros(shape[1])}
    for i, shape in enumerate(zip(WIDTHS[:-1], WIDTHS[1:], strict=True))
}


@pytest.mark.parametrize(
    ("name", "most"), [("psmile", 40), ("published.psmile", 48), ("psgld", 25)]
)
def test_a_state_has_few_arrays_and_gives_back_its_scalars(name, most):
    make: Any = operator.attrgetter(name)(optax_smile)
    options: Any = {"key": 0} if name != "published.psmile" else {}
    options |= {"step_size": 1e-3} if name != "psmile" else {}
    state: Any = make(num_data=100, **options).init(PARAMS)
    assert len(jax.tree.leaves(state)) <= most
    scalars = [x for x in jax.tree.leaves(state.arrays) if x.ndim == 0]
    # Those of a tuner, or the factor that a user sets.
    assert len(scalars) <= 2
    of_chains = jax.tree.map(lambda x: jnp.stack([x, jnp.ones_like(x)]), state)
    opened = state.unpack(), jax.tree.map(lambda x: x[1], of_chains).unpack()
    for one, expected in zip((0, 1), opened, strict=True):
        jax.tree.map(
            lambda x, y, one=one: np.testing.assert_array_equal(x[one], y, strict=True),
            of_chains.unpack(),
            expected,
        )
    again = pack(unpack(*state[:4]))
    jax.tree.map(np.testing.assert_array_equal, again, state[:4])
    kinds = {x.dtype.name for x in jax.tree.leaves(opened[0]) if x.ndim == 0}
    assert kinds == {"float32", "int32", "bool"}


def test_float64_arguments_do_not_widen_a_float32_state():
    with jax.enable_x64(True):
        numbers = {"num_data": 9.0, "temperature": 0.5, "decoherence_length": 2.0}
        given: Any = {name: np.float64(number) for name, number in numbers.items()}
        tuner = optax_smile.angle_tuner(np.float64(0.1))
        tx = optax_smile.psmile(**given, tuner=tuner, key=0)
        params = jax.tree.map(lambda x: x.astype(jnp.float32), PARAMS)
        state = jax.eval_shape(tx.init, params)
        value = jax.ShapeDtypeStruct((), jnp.float32)
        after = jax.eval_shape(
            lambda *x: tx.update(*x[:3], value=x[3]), params, state, params, value
        )[1]
        kinds, expected = (jax.tree.map(lambda x: x.dtype, x) for x in (after, state))
        assert kinds == expected
