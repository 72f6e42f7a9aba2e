import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optax_smile import potential
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
    got = potential.prior_change(posterior, params, displacement)
    np.testing.assert_allclose(got, change, rtol=1e-5, atol=1e-6)


def test_prior_change_at_a_million_parameters_where_the_difference_of_norms_fails():
    rng = np.random.default_rng(6)
    params = jnp.asarray(3 * rng.standard_normal(10**6), jnp.float32)
    displacement = jnp.asarray(1e-3 * rng.standard_normal(10**6), jnp.float32)
    x, dx = double(params)[0], double(displacement)[0]
    exact = 0.5 * np.sum((x + dx) ** 2) - 0.5 * np.sum(x**2)
    got = potential.prior_change(Potential(num_data=1), params, displacement)
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
