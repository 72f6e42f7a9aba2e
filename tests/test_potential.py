from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import optax_smile
from optax_smile import _tree, potential
from optax_smile.potential import Potential

SHAPES = {"bias": (), "dense": {"kernel": (4, 3), "offset": (3,)}, "scale": (5,)}
# A prefix of that tree: one number for both leaves of "dense".
PREFIX = {"bias": 0.25, "dense": 3.0, "scale": 0.0}
SPREAD = {"bias": 0.25, "dense": {"kernel": 3.0, "offset": 3.0}, "scale": 0.0}

POTENTIALS = {
    "defaults": (Potential(num_data=1234), 1.0),
    "number": (Potential(num_data=50, prior_precision=2.5), 2.5),
    "flat prior": (Potential(num_data=50, prior_precision=0.0), 0.0),
    "prefix": (Potential(num_data=50, prior_precision=PREFIX), SPREAD),
    "cold": (Potential(num_data=50, prior_precision=PREFIX, temperature=0.125), SPREAD),
    "hot": (Potential(num_data=50, prior_precision=2, temperature=3.0), 2.0),
}


def draw(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(scale * rng.standard_normal(shape), jnp.float32),
        SHAPES,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def double(tree):
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]


def each_leaf(precision, tree):
    """One float64 precision for each leaf."""
    leaves = jax.tree.leaves(precision)
    return leaves if len(leaves) > 1 else leaves * len(jax.tree.leaves(tree))


def slow_energy(posterior, precision, loss, params):
    weights = each_leaf(precision, params)
    prior = sum(w / 2 * np.sum(x**2) for w, x in zip(weights, double(params), strict=True))
    return (posterior.num_data * np.float64(loss) + prior) / posterior.temperature


def mean_loss(params):
    return jnp.mean(jnp.cos(params["dense"]["kernel"])) + jnp.sum(params["scale"] ** 4) / 7


@pytest.mark.parametrize("name", POTENTIALS)
def test_energy_is_that_of_float64(name):
    posterior, precision = POTENTIALS[name]
    params = draw(0)
    loss = jnp.float32(0.731)
    expected = slow_energy(posterior, precision, loss, params)
    np.testing.assert_allclose(potential.energy(posterior, loss, params), expected, rtol=1e-6)


@pytest.mark.parametrize("name", POTENTIALS)
def test_gradient_is_that_of_the_energy(name):
    posterior, _ = POTENTIALS[name]
    params = draw(1)
    expected = jax.grad(lambda p: potential.energy(posterior, mean_loss(p), p))(params)
    got = potential.gradient(posterior, jax.grad(mean_loss)(params), params)
    assert jax.tree.structure(got) == jax.tree.structure(params)
    for a, b in zip(double(got), double(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", POTENTIALS)
def test_gradient_is_that_of_float64(name):
    posterior, precision = POTENTIALS[name]
    params, grads = draw(2), draw(3)
    got = potential.gradient(posterior, grads, params)
    weights = each_leaf(precision, params)
    leaves = zip(double(got), double(grads), double(params), weights, strict=True)
    for a, g, x, w in leaves:
        expected = (posterior.num_data * g + w * x) / posterior.temperature
        np.testing.assert_allclose(a, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", POTENTIALS)
def test_prior_change_is_the_difference_of_energies(name):
    posterior, precision = POTENTIALS[name]
    params, displacement = draw(4), draw(5, scale=0.1)
    moved = [x + dx for x, dx in zip(double(params), double(displacement), strict=True)]
    moved = jax.tree.unflatten(jax.tree.structure(params), moved)
    change = slow_energy(posterior, precision, 0, moved)
    change -= slow_energy(posterior, precision, 0, params)
    (got,) = _tree.sums([potential.prior_terms(posterior, params, displacement)])
    np.testing.assert_allclose(got, change, rtol=1e-5, atol=1e-6)


def test_prior_change_at_a_million_parameters_where_the_difference_of_norms_fails():
    rng = np.random.default_rng(6)
    params = jnp.asarray(3 * rng.standard_normal(10**6), jnp.float32)
    displacement = jnp.asarray(1e-3 * rng.standard_normal(10**6), jnp.float32)
    x, dx = double(params)[0], double(displacement)[0]
    exact = 0.5 * np.sum((x + dx) ** 2) - 0.5 * np.sum(x**2)
    (got,) = _tree.sums([potential.prior_terms(Potential(num_data=1), params, displacement)])
    naive = 0.5 * jnp.sum((params + displacement) ** 2) - 0.5 * jnp.sum(params**2)
    assert abs(float(got) - exact) < 1e-5
    assert abs(float(naive) - exact) > 1e-2


def test_energy_change_adds_loss_and_prior():
    posterior = Potential(num_data=200, prior_precision=7.0, temperature=4.0)
    got = potential.energy_change(posterior, jnp.float32(-0.03), jnp.float32(1.5))
    np.testing.assert_allclose(got, -0.03 * 200 / 4 + 1.5, rtol=1e-6)


def test_no_prior_leaves_the_gradient_of_the_loss():
    params, grads = draw(7), draw(8)
    got = potential.gradient(Potential(num_data=8, prior_precision=0.0), grads, params)
    for a, g in zip(double(got), double(grads), strict=True):
        np.testing.assert_array_equal(a, 8 * g)


def test_double_precision_is_kept():
    with jax.enable_x64(True):
        params = {"w": jnp.linspace(0.1, 1.3, 7, dtype=jnp.float64)}
        posterior = Potential(num_data=3.0, prior_precision=0.7, temperature=1.9)
        grads = jax.tree.map(jnp.sin, params)
        (got,) = jax.tree.leaves(potential.gradient(posterior, grads, params))
        assert got.dtype == jnp.float64
        expected = (3 * np.sin(double(params)[0]) + 0.7 * double(params)[0]) / 1.9
        np.testing.assert_allclose(got, expected, rtol=1e-14)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    shapes=st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=1, max_size=4),
    num_data=st.floats(1, 1e6),
    precision=st.floats(0, 1e3),
    temperature=st.floats(0.01, 10),
    seed=st.integers(0, 2**16),
)
def test_any_tree(shapes, num_data, precision, temperature, seed):
    rng = np.random.default_rng(seed)
    params = [np.asarray(rng.standard_normal(shape), np.float32) for shape in shapes]
    grads = [np.asarray(rng.standard_normal(shape), np.float32) for shape in shapes]
    posterior = Potential(num_data, precision, temperature)
    got = potential.gradient(posterior, grads, params)
    for a, g, x in zip(double(got), double(grads), double(params), strict=True):
        terms = num_data * np.abs(g) + precision * np.abs(x)
        expected = (num_data * g + precision * x) / temperature
        assert a.shape == x.shape
        assert np.all(np.abs(a - expected) <= 1e-6 * terms / temperature)
    loss = 0.25
    expected = slow_energy(posterior, precision, loss, params)
    got = potential.energy(posterior, jnp.float32(loss), jax.tree.map(jnp.asarray, params))
    np.testing.assert_allclose(got, expected, rtol=1e-5)


# A prior with a mean, and trees of arrays.


def prior_trees():
    """Prior precision and mean as arrays for some leaves, numbers for others and for a subtree."""
    rng = np.random.default_rng(8)
    precision = {"bias": 0.5, "dense": 2.0, "scale": rng.gamma(2.0, size=5)}
    mean = {
        "bias": -1.0,
        "dense": {"kernel": rng.normal(size=(4, 3)), "offset": 3.0},
        "scale": rng.normal(size=5),
    }
    return precision, mean


def slow_prior(precision, mean, params, temperature):
    """Energy of the prior in float64, leaf by leaf."""
    kernel, offset = params["dense"]["kernel"], params["dense"]["offset"]
    total = 0.0
    for weight, centre, x in (
        (precision["bias"], mean["bias"], params["bias"]),
        (precision["dense"], mean["dense"]["kernel"], kernel),
        (precision["dense"], mean["dense"]["offset"], offset),
        (precision["scale"], mean["scale"], params["scale"]),
    ):
        total += np.sum(np.asarray(weight) / 2 * (np.asarray(x, np.float64) - centre) ** 2)
    return total / temperature


def test_a_prior_of_trees_has_its_energy_and_its_gradient():
    precision, mean = prior_trees()
    posterior = Potential(30, precision, 2.0, mean)
    params, move = draw(3), draw(4, 0.1)
    potential.check_prior("test", posterior, params)
    got = potential.energy(posterior, jnp.float32(0.7), params)
    expected = 30 * 0.7 / 2.0 + slow_prior(precision, mean, params, 2.0)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    zeros = jax.tree.map(jnp.zeros_like, params)
    got = potential.gradient(posterior, zeros, params)
    expected = jax.grad(lambda params: potential.energy(posterior, jnp.float32(0), params))(params)
    for leaf, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-4, atol=1e-5)
    moved = jax.tree.map(jnp.add, params, move)
    change = slow_prior(precision, mean, moved, 2.0) - slow_prior(precision, mean, params, 2.0)
    (got,) = _tree.sums([potential.prior_terms(posterior, params, move)])
    np.testing.assert_allclose(got, change, rtol=1e-3, atol=1e-4)


SAMPLERS = {
    "smile": lambda **prior: optax_smile.smile(num_data=1, key=0, **prior),
    "psmile": lambda **prior: optax_smile.psmile(num_data=1, key=0, **prior),
    "mclmc": lambda **prior: optax_smile.mclmc(
        0.3, num_data=1, decoherence_length=3.0, key=0, integrator="leapfrog", **prior
    ),
    "sgld": lambda **prior: optax_smile.sgld(1e-2, num_data=1, key=0, **prior),
    "sghmc": lambda **prior: optax_smile.sghmc(0.1, num_data=1, friction=0.1, key=0, **prior),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_sample_a_prior_of_trees(name):
    """Without data, from its mean: half of the coordinates around 5, half around -3 +- 1/2.

    Noise of variance 1 on the gradients of the loss, which have nothing else.
    """
    mean, precision = jnp.repeat(jnp.array([5.0, -3.0]), 10), np.repeat([1.0, 4.0], 10)
    tx = SAMPLERS[name](prior_mean={"w": mean}, prior_precision={"w": precision})
    noise = 0.0 if name == "mclmc" else 0.3

    def call(carry, count):
        params, state = carry
        drawn = jax.random.normal(jax.random.fold_in(jax.random.key(1), count), (20,))
        updates, state = tx.update({"w": noise * drawn}, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), cast(Any, params)["w"]

    start = {"w": mean}
    carry = start, tx.init(start)
    path = jax.jit(lambda carry: jax.lax.scan(call, carry, jnp.arange(40_000))[1])(carry)
    draws = np.asarray(path, float)[5000:].reshape(-1, 2, 10)
    np.testing.assert_allclose(draws.mean(axis=(0, 2)), [5, -3], atol=0.15)
    np.testing.assert_allclose(draws.std(axis=0).mean(axis=1), [1, 0.5], rtol=0.12)
