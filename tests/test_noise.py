"""The random numbers of the explicit noise: unit covariance, no memory, the same on any shape."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_smile


def noise(key, tree: Any) -> Any:
    """The noise of a network: a chain at rest moves along it. Trees of 500 numbers and more."""
    given: dict[str, Any] = {"num_data": 1, "prior_precision": 0.0, "integrator": "leapfrog"}
    tx = optax_smile.mclmc(1.0, decoherence_length=1.0, key=0, **given)
    state = optax.tree.set(tx.init(tree), key=jax.random.key_data(key))
    updates: Any = tx.update(tree, state, tree)[0]
    return jax.tree.map(jnp.sign, updates)


def test_noise_of_a_network_has_unit_covariance():
    """Signs of neighbours, of different leaves and of different keys are uncorrelated."""
    tree = {"w": jnp.zeros((20, 10)), "large": jnp.zeros((800, 45)), "b": jnp.zeros(()), "v": {}}
    # Three small leaves are joined.
    tree["c"] = jnp.zeros(4)
    draw = jax.jit(noise)
    draws = [draw(key, tree) for key in jax.random.split(jax.random.key(0), 400)]
    parts = np.array(
        [[*np.ravel(x["w"]), x["b"], *x["c"], *np.ravel(x["large"][:4])] for x in draws]
    )
    assert set(np.unique(parts)) == {-1, 1}
    # 6 standard errors for the largest of 385 means and 73,920 covariances.
    assert np.abs(parts.mean(axis=0)).max() < 6 / 400**0.5
    assert np.abs(parts.T @ parts / 400 - np.eye(385)).max() < 6 / 400**0.5
    assert abs(np.mean(draws[0]["large"])) < 5 / 36_000**0.5


def test_noise_of_a_network_has_no_memory():
    """Mean products of signs at a distance, in a call and from call to call; 2^24 of each.

    A hash of two multiplications instead of three is 6 standard errors off at some of them.
    """
    lags, size, num_keys = (1, 2, 3, 4, 5, 7, 8, 16, 32, 100, 256, 1000, 1024, 2**16), 2**22, 4
    draw, found = jax.jit(lambda key: noise(key, jnp.zeros(size))), []
    for pair in jax.random.split(jax.random.key(0), (num_keys, 2)):
        z, after = (np.asarray(draw(key)) for key in pair)
        # Sums of so many signs are exact in float32.
        sums = [np.sum(z), z @ after, *(z[:-lag] @ z[lag:] for lag in lags)]
        found.append(np.array(sums, float) / size)
    assert np.abs(np.mean(found, axis=0)).max() < 4 / (num_keys * size) ** 0.5


def test_noise_does_not_depend_on_the_shape_of_a_leaf():
    key = jax.random.key(0)
    flat = noise(key, jnp.zeros(8 * 9 * 10 * 2))
    for shape in ((8, 9, 10, 2), (72, 20)):
        np.testing.assert_array_equal(noise(key, jnp.zeros(shape)).ravel(), flat)


def test_noise_of_few_parameters_is_normal():
    """Its length varies as that of normal numbers, and leaves have numbers of their own."""
    tx = optax_smile.sgld(0.5, num_data=1, prior_precision=0.0, key=0)
    zeros: Any = {"a": jnp.zeros(3), "b": jnp.zeros(3)}

    def draw(key):
        state = optax.tree.set(tx.init(zeros), key=jax.random.key_data(key))
        updates: Any = tx.update(zeros, state, zeros)[0]
        return jnp.concatenate([updates["a"], updates["b"]])

    drawn = np.asarray(jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(1), 20_000)))
    # The noise of sgld has the variance 2 * step_size; 6 standard errors.
    assert np.abs(drawn.mean(axis=0)).max() < 6 / 20_000**0.5
    assert np.abs(drawn.T @ drawn / 20_000 - np.eye(6)).max() < 6 * (2 / 20_000) ** 0.5
    assert abs(np.mean(drawn**4) - 3) < 6 * (96 / 120_000) ** 0.5
