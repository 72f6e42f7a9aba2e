"""The energy, its gradient and the prior's part of its change, against float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_smile
from optax_smile import _tree, potential
from optax_smile.potential import Potential

RNG = np.random.default_rng(8)
SHAPES = {"bias": (), "dense": {"kernel": (4, 3), "offset": (3,)}, "scale": (5,)}
# Prefixes of that tree: one number for both leaves of "dense", arrays for others.
PREFIX = {"bias": 0.25, "dense": 3.0, "scale": 0.0}
ARRAYS = {"bias": 0.5, "dense": 2.0, "scale": RNG.gamma(2.0, size=5)}
KERNEL = RNG.normal(size=(4, 3))
MEAN = {"bias": -1.0, "dense": {"kernel": KERNEL, "offset": 3.0}, "scale": RNG.normal(size=5)}
POTENTIALS = {
    "defaults": Potential(num_data=1234),
    "flat prior": Potential(num_data=50, prior_precision=0.0),
    "prefix": Potential(num_data=50, prior_precision=PREFIX, temperature=0.125),
    "hot": Potential(num_data=50, prior_precision=2, temperature=3.0, prior_mean=0.5),
    "arrays": Potential(num_data=30, prior_precision=ARRAYS, temperature=2.0, prior_mean=MEAN),
}


def draw(seed, scale=1.0):
    rng = np.random.default_rng(seed)

    def leaf(shape):
        return jnp.asarray(scale * rng.standard_normal(shape), jnp.float32)

    return jax.tree.map(leaf, SHAPES, is_leaf=lambda node: isinstance(node, tuple))


def double(tree):
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]


def weights_and_means(posterior, params):
    """Of each leaf, where the posterior has prefixes."""
    for prefix in (posterior.prior_precision, posterior.prior_mean):
        yield double(jax.tree.map(lambda x, part: jax.tree.map(lambda _: x, part), prefix, params))


def slow_energy(posterior, loss, params):
    leaves = zip(double(params), *weights_and_means(posterior, params), strict=True)
    prior = sum(np.sum(w / 2 * (x - m) ** 2) for x, w, m in leaves)
    return (posterior.num_data * np.float64(loss) + prior) / posterior.temperature


@pytest.mark.parametrize("name", POTENTIALS)
def test_gradient_and_prior_change(name):
    posterior, params, grads, move = POTENTIALS[name], draw(0), draw(3), draw(5, scale=0.1)
    potential.check_prior("test", posterior, params)
    moved = jax.tree.map(lambda x, dx: np.float64(x) + np.float64(dx), params, move)
    change = slow_energy(posterior, 0, moved) - slow_energy(posterior, 0, params)
    (got,) = _tree.sums([potential.prior_terms(posterior, params, move)])
    np.testing.assert_allclose(got, change, rtol=2e-5, atol=1e-6)
    got = potential.energy_change(posterior, jnp.float32(-0.03), jnp.float32(1.5))
    expected = -0.03 * posterior.num_data / posterior.temperature + 1.5
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    found = double(potential.gradient(posterior, grads, params))
    parts = double(grads), double(params), *weights_and_means(posterior, params)
    for got, g, x, w, m in zip(found, *parts, strict=True):
        expected = (posterior.num_data * g + w * (x - m)) / posterior.temperature
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-5)


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


@pytest.mark.parametrize("num_data, expected", [(4_000, 1.0), (50, 2 * 0.02 * 50 / 21)])
def test_cold_temperature_goes_with_the_numbers_of_parameters_and_data(num_data, expected):
    params = draw(0) | {"table": jnp.arange(9), "activation": jax.nn.relu}
    shapes = jax.eval_shape(lambda: draw(0))
    for tree in params, shapes:
        found = optax_smile.cold_temperature(num_data, tree, excess=0.02)
        assert isinstance(found, float) and found == expected
    of_traced = jax.jit(lambda number: optax_smile.cold_temperature(number, shapes, 0.02))
    np.testing.assert_allclose(of_traced(jnp.int32(num_data)), expected, rtol=1e-6)
    # The default allows .08 nats; more tokens than an int32 can count.
    assert optax_smile.cold_temperature(1, shapes) == 2 * 0.08 / 21
    assert optax_smile.cold_temperature(3e9, shapes) == 1
    with pytest.raises(ValueError, match=r"params=...\)` must be the parameters of a network"):
        optax_smile.cold_temperature(num_data, {"table": jnp.arange(9)})


def test_a_summary_says_that_a_posterior_is_cold():
    given: Any = jnp.ones((2, 3)), [jnp.ones(3)]
    tx = optax_smile.sgld(0.1, num_data=10, temperature=0.25, key=0)
    loss, steps = lambda w, batch: jnp.mean((w - batch) ** 2), {"num_warmup": 0, "num_draws": 3}
    cold: Any = optax_smile.sample(loss, *given, tx, **steps, key=0, progress=False)
    warm = optax_smile.Snapshots(cold.params, cold.trace | {"temperature": np.ones((2, 3))})
    for draws, temperature in (cold, 0.25), (warm, 1.0):
        found = optax_smile.diagnostics.summary(draws)
        np.testing.assert_array_equal(found.temperature, np.full(2, temperature))
        assert ("temperature 0.25: a cold posterior" in str(found)) == (temperature < 1)
