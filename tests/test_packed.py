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
