"""Samplers preserve trees of all kinds, or reject them."""

import dataclasses
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from test_contract import make

import optax_smile

FORM = re.compile(r"`[\w.]+\([\w.\[\]']+=\.\.\.\)` must be ")
SAMPLE, FULL = 5, 300


class Layer(NamedTuple):
    w: Any
    b: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Block:
    inner: Any
    gate: Any


SHAPES = st.sampled_from([(), (1,), (3,), (2, 2), (0,), (2, 0)])
DTYPES = st.sampled_from([jnp.bfloat16, jnp.float16, jnp.int32, jnp.bool_, jnp.complex64])
PRECISE = st.builds(lambda shape: np.full(shape, 0.5, np.float32), SHAPES)
OTHERS = st.builds(jnp.ones, SHAPES, DTYPES)


def trees(leaves):
    """Nested containers, empty ones as well."""
    return st.recursive(
        leaves | st.none(),
        lambda inner: (
            st.dictionaries(st.sampled_from("abc/→ "), inner, max_size=3)
            | st.lists(inner, max_size=3)
            | st.tuples(inner, inner)
            | st.builds(Layer, inner, inner)
            | st.builds(Block, inner, inner)
        ),
        max_leaves=5,
    )


def kinds(tree):
    return jax.tree.map(lambda x: (np.shape(x), str(x.dtype)), tree)


@pytest.mark.parametrize("name", ["psgld", pytest.param("psmile", marks=pytest.mark.nightly)])
def test_a_sampler_keeps_a_tree_or_refuses_it(name, full):
    """A direction keeps the norm one; each short run has the same examples."""
    number, checks = FULL if full else SAMPLE, [*HealthCheck]  # pyright: ignore
    quiet: Any = {"deadline": None, "database": None, "suppress_health_check": checks}
    tx: Any = make(name)
    empty = np.full(3, 0.5, np.float32), np.zeros((2, 0), np.float32)

    @settings(max_examples=number, derandomize=not full, **quiet)
    @example(empty)
    @given(trees(PRECISE) | trees(PRECISE | OTHERS))
    def follow(tree):
        leaves = jax.tree.leaves(tree)
        if not leaves and isinstance(tree, Block):
            # Nodes of one's own without a leaf pass: Optax maps over states with such placeholders.
            return
        # Integers and booleans are no parameters, and have no gradient.
        grads = jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) else None, tree)
        sampled = jax.tree.leaves(grads)
        if sum(x.size for x in sampled) < 2 or any(x.dtype != np.float32 for x in sampled):
            with pytest.raises(ValueError, match=FORM):
                tx.init(tree)
            return
        state = tx.init(tree)
        with jax.disable_jit():
            updates, after = tx.update(grads, state, tree, value=1.0)
        assert kinds(updates) == kinds(grads) and kinds(after) == kinds(state)
        assert optax_smile.stats(after).num_parameters == sum(x.size for x in sampled)
        last = optax_smile.last_accepted(after, optax.apply_updates(tree, updates))
        assert kinds(last) == kinds(tree)
        for x, y in zip(jax.tree.leaves(last), leaves, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6)
        direction = optax.tree.get(after, "direction")
        if direction is not None:
            np.testing.assert_allclose(optax.tree.norm(direction), 1, atol=1e-5)

    follow()
