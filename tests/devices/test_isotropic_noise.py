"""The explicit noise of parameters that are spread over several devices."""

from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

from optax_smile import _tree


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_isotropic_noise_does_not_depend_on_the_sharding(kind):
    tree = {"w": jnp.zeros((200, 320)), "b": jnp.zeros((40, 2)), "s": jnp.zeros(())}
    expected = _tree.isotropic_like(jax.random.key(0), tree)
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        spec = {"w": jax.P("a", "b"), "b": jax.P(None, "b"), "s": jax.P()}
        sharded: Any = jax.device_put(tree, jax.tree.map(partial(jax.NamedSharding, mesh), spec))
        noisy = jax.jit(lambda key, x: jax.tree.map(jnp.add, x, _tree.isotropic_like(key, x)))
        got = noisy(jax.random.key(0), sharded)
    chex.assert_trees_all_equal(jax.device_get(got), jax.device_get(expected))
    assert got["w"].sharding.is_equivalent_to(sharded["w"].sharding, 2)
