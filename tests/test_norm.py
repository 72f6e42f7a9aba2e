"""Norms of a user's own, `smile(norm=...)`: those of `examples/own_norm.py` and of this file.

`test_examples.py` tests that a chain with such a norm preserves the posterior.
"""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from own_norm import Signs
from runs import refused

import optax_smile

SHAPES = {"a": (3, 4), "b": (5,), "c": (2, 2), "d": (40, 40)}


class Blocks(optax_smile.Norm):
    """The spectral norm without matrices."""

    angle = 0.6

    def velocity(self, momentum):
        size = optax.tree.size(momentum)
        return jax.tree.map(lambda p: (p.size / size) ** 0.5 * p / jnp.linalg.norm(p), momentum)


class Scaled(optax_smile.Preconditioner):
    """A known scale of every entry."""

    class State(NamedTuple):
        scale: Any

        def inverse_scale(self):
            return jax.tree.map(jnp.reciprocal, self.scale)

    def init(self, params):
        return self.State(scale_of(params))


def scale_of(params) -> Any:
    return jax.tree.map(lambda x: 1 + jnp.arange(x.size).reshape(x.shape) / x.size, params)


def follow(norm, start, scale=None, calls=20, **arguments) -> Any:
    """Places of a chain in a quartic, of which `start` and the places are in coordinates x / s."""
    arguments = {"num_data": 1, "prior_precision": 0.0, "decoherence_length": None} | arguments
    tx: Any = optax_smile.smile(norm=norm, **arguments)

    def energy(y):
        x = y if scale is None else jax.tree.map(jnp.divide, y, scale)
        return sum(jnp.sum(each**2 + each**4) for each in jax.tree.leaves(x))

    def call(carry, _):
        x, state = carry
        value, gradient = jax.value_and_grad(energy)(x)
        updates, state = tx.update(gradient, state, x, value=value)
        return (optax.apply_updates(x, updates), state), x

    return jax.lax.scan(call, (start, tx.init(start)), length=calls)[1]


@pytest.fixture
def start():
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        yield {name: jnp.asarray(rng.normal(size=shape)) for name, shape in SHAPES.items()}


def test_a_norm_of_blocks_is_the_spectral_norm_without_matrices(start):
    """Also with two gradients per step, and after rejected steps."""
    vectors: Any = {"norm": "spectral", "matrices": lambda tree: dict.fromkeys(tree)}
    rare: Any = {"step_size": 0.2, "integrator": "minimal_norm", "reject_quantile": 0.5}
    for given in ({}, rare):
        chex.assert_trees_all_close(
            follow(Blocks(), start, **given), follow(start=start, **vectors, **given), rtol=1e-9
        )


def test_a_norm_of_entries_takes_a_preconditioner_and_joined_leaves(start):
    """A scale s is another energy, that of x / s. Small leaves of a network are joined."""

    class Apart(Signs):
        is_elementwise = False

    given: Any = {"step_size": 0.1, "calls": 10}
    scale = scale_of(start)
    scaled = follow(Signs(), start, **given, preconditioner=Scaled())
    places = follow(Apart(), jax.tree.map(jnp.multiply, start, scale), scale, **given)
    expected = jax.tree.map(lambda y, s: y / s[None], places, scale)
    chex.assert_trees_all_close(scaled, expected, rtol=1e-9)
    assert all(jnp.all(x[0] != x[-1]) for x in jax.tree.leaves(scaled))


def test_a_velocity_of_another_type_does_not_change_the_state(start):
    class Wide(Signs):
        def velocity(self, momentum):
            return jax.tree.map(jnp.float64, super().velocity(momentum))

    start = jax.tree.map(jnp.float32, start)
    chex.assert_trees_all_equal(
        follow(Wide(), start, calls=3, step_size=0.1),
        follow(Signs(), start, calls=3, step_size=0.1),
    )


def test_what_does_not_fit_is_refused():
    given: Any = {"num_data": 1, "decoherence_length": None}
    rule = r"smile\(norm=...\)` must be an optax_smile.Norm, or .*got the class Signs. Call it"
    refused(rule, optax_smile.smile, norm=Signs, **given)
    rule = r"smile\(decoherence_length=...\)` must be None together with norm=Signs\(\), got 2.0"
    refused(rule, optax_smile.smile, norm=Signs(), num_data=1, decoherence_length=2.0, key=0)
    rule = (
        r"smile\(preconditioner=...\)` must be None together with norm=Blocks\(\), got Scaled\(\)"
    )
    refused(rule, optax_smile.smile, norm=Blocks(), preconditioner=Scaled(), **given)

    class Wrong(optax_smile.Norm):
        def __init__(self, function):
            self.velocity = function

    for function, rule in {
        lambda p: p["other"]: r"norm=...\)` must be .* like the parameters, got KeyError: 'other'",
        lambda p: [p["w"]]: r"norm.velocity=...\)` must be a tree of the structure of params",
        lambda p: {
            "w": jnp.sum(p["w"])
        }: r"norm.velocity=...\)` must be of shape \(3,\) at \['w'\]",
    }.items():
        tx = optax_smile.smile(norm=Wrong(function), **given)
        refused(rule, tx.init, {"w": jnp.ones(3)})
