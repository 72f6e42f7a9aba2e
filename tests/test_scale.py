"""The coordinates of `psmile`, and the memory that follows from them; `scale_by_gradient_noise`."""

import functools
from types import SimpleNamespace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from public_samplers import quick_psmile
from reference import Scale

import optax_smile
from optax_smile import parallel

SIZE, WINDOW = 5, 8
MIXING = np.random.default_rng(3).normal(size=(SIZE, SIZE))
# Among them huge ones, squares that overflow, denormal numbers, one that dominates, none at all.
LARGE = [[1e18, -2e18, 5e17, 1e18], [1e25, 1.0, -1e25, 2.0], [1e12, 1e-3, -1e-3, 1e-6]]
SMALL = [[1e-20, -3e-20, 1e-20, 2e-20], [1e-40, 1e-42, 0.0, -1e-40], [0.0] * 4]
EXTREME = [*LARGE, *SMALL, [1e18, 1e-20, 0.0, 1.0]]


def observed(kind, gradients, drifts=None, has_matrix=True, first_window=WINDOW):
    """The scale of the reference, which that of the package equals, after some gradients."""
    given = SimpleNamespace(scale=kind, first_window=first_window, has_matrix=has_matrix)
    scale, drifts = Scale(given, gradients.shape[1]), 0 * gradients if drifts is None else drifts
    for gradient, drift in zip(gradients, drifts, strict=True):
        scale.observe(gradient, 1.0, True, False, drift)
    return scale


def slow_matrix(deviations):
    """A A^T after the window of `MeanSquare` and those of matrices, in float64."""
    size = deviations.shape[1]
    squares = (deviations[:WINDOW] ** 2).mean(0)
    relative = (10 + WINDOW * squares / squares.mean()) / (10 + WINDOW)
    found, mean = np.diag(1 / relative), squares.mean()
    first, length = WINDOW, WINDOW + WINDOW // 2
    while first + length <= len(deviations):
        part = deviations[first : first + length]
        raised = np.eye(size)[np.arange(1, length + 1) % size] * np.sqrt(1e-3 * size * mean)
        moment = np.linalg.inv(found) * 4 * size + (part + raised).T @ (part + raised) / mean
        inverse = np.linalg.inv(moment / (4 * size + length))
        square = np.einsum("ti,ij,tj->", part, found, part) / size
        smoothed = (4 * size * mean + square) / (4 * size + length)
        found, mean = inverse * smoothed / mean, smoothed
        first, length = first + length, length + length // 2
    return found


@pytest.mark.parametrize("kind", ["squares", "differences"])
def test_matrix_is_the_inverse_of_the_second_moment(kind):
    gradients = np.random.default_rng(1).normal(size=(400, SIZE)) @ MIXING
    found = observed(kind, gradients).A
    deviations = np.diff(gradients, axis=0) / np.sqrt(2) if kind == "differences" else gradients
    expected = slow_matrix(deviations)
    np.testing.assert_allclose(found @ found.T, expected, rtol=1e-9, atol=1e-9 * expected.max())
    covariance = np.linalg.inv(MIXING.T @ MIXING)
    ratio = np.linalg.eigvalsh(np.linalg.solve(covariance, expected))
    assert ratio.max() / ratio.min() < 3 < np.linalg.cond(covariance) / 100


def test_width_is_that_of_a_gaussian_before_it_is_explored():
    """From the slope of noisy gradients over places that cover a small part of it."""
    curvature, random = 50.0, np.random.default_rng(2)
    drifts = random.normal(size=(3_000, SIZE)) * 2e-4
    places = drifts.cumsum(0)
    gradients = curvature * places + random.normal(size=drifts.shape)
    # In coordinates that are round already the matrix stays near one.
    scale = observed("squares", gradients, drifts)
    explored = np.sqrt(places.var(0).sum())
    assert explored < 0.1 * scale.last_width <= 0.1 * scale.width
    np.testing.assert_allclose(scale.last_width, np.sqrt(SIZE / curvature), rtol=0.2)


def test_public_transformation_divides_by_the_scale_before():
    """A non-finite gradient passes through and does not change the averages."""
    rng, tx = np.random.default_rng(0), optax_smile.scale_by_gradient_noise()
    gradients = rng.standard_normal(8) + np.geomspace(0.1, 10, 8) * rng.standard_normal((80, 8))
    update, state = jax.jit(tx.update), tx.init(jnp.zeros(8))
    for count, gradient in enumerate(gradients.astype(np.float32)):
        for bad in (np.nan, -np.inf, 1e25) if count in (0, 1, 20) else ():
            poisoned = np.where(np.arange(8) == 2, np.float32(bad), gradient)
            updates, unchanged = update(poisoned, state)
            chex.assert_trees_all_equal(unchanged, state)
            assert np.isfinite(updates[2]) == np.isfinite(bad)
            assert np.all(np.isfinite(np.delete(updates, 2)))
        updates, state = update(gradient, state)
        inverse = np.diag(observed("differences", gradients[:count], None, False, 64).A)
        np.testing.assert_allclose(updates, gradient * inverse, rtol=2e-5)
    assert np.ptp(inverse) > 1
    assert sum(leaf.size == 8 for leaf in jax.tree.leaves(state)) == 3


def test_extreme_gradients_stay_finite():
    """Among ordinary ones at every third of the first 30 calls, and alone."""
    tx, calls = optax_smile.scale_by_gradient_noise(), np.arange(300)
    alone = np.array(EXTREME, np.float32)[:, None] * np.where(calls % 2, -1, 1)[:, None]
    is_ordinary = (calls % 3 == 0) & (calls < 30)
    mixed = np.where(is_ordinary[:, None], np.array([1.0, -2.0, 0.5, 0.0]), alone)

    def call(state: Any, gradient):
        updates, state = tx.update(gradient, state)
        return state, (updates, state, state.inverse_scale())

    each = jax.vmap(lambda x: jax.lax.scan(call, tx.init(jnp.zeros(4)), x)[1])
    trace = jax.jit(each)(np.concatenate([alone, mixed]).astype(np.float32))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(trace))
    inverse = np.asarray(trace[2], float)
    np.testing.assert_allclose(np.mean(inverse**-2, axis=-1), 1, rtol=1e-5)


def test_extreme_gradients_keep_the_matrix_finite():
    alone = np.array(EXTREME, np.float32)[:, None] * np.where(np.arange(60) % 2, -1, 1)[:, None]
    tx: Any = quick_psmile(num_data=1, key=0)

    def call(carry, gradient):
        updates, state = tx.update(gradient, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), state

    start = jnp.ones(4), tx.init(jnp.ones(4))
    each = jax.jit(jax.vmap(lambda x: jax.lax.scan(call, start, x)[1]))(alone)
    assert np.all(np.isfinite(each.entries)) and np.all(np.isfinite(each.next_entries))


@pytest.mark.slow
@pytest.mark.parametrize("integrator", ["leapfrog", "minimal_norm"])
def test_long_steps_keep_the_variances(integrator, size=10):
    """The target is a Gaussian, without noise; the standard error of the mean variance is .002.

    The error is .032 for the leapfrog without its correction, .035 for the minimal norm with it.
    """
    precision = jnp.geomspace(1.0, 10.0, size)
    tx: Any = optax_smile.psmile(num_data=1, prior_precision=0.0, integrator=integrator, key=0)

    def call(carry, _):
        params, state = carry
        updates, state = tx.update(precision * params, state, params)
        params: Any = optax.apply_updates(params, updates)
        return (params, state), precision * optax_smile.last_accepted(state, params) ** 2

    starts = jax.random.normal(jax.random.key(1), (16, size)) / jnp.sqrt(precision)[None]
    states = parallel.init(tx, starts, key=jax.random.key(2))
    run = jax.jit(jax.vmap(lambda *carry: jax.lax.scan(call, carry, None, 8_000)))
    (_, states), squares = run(starts, states)
    stats = jax.vmap(optax_smile.stats)(states)
    assert jnp.all(stats.step_size > 0.4 * stats.width)
    assert abs(squares[:, 2_000:].mean() - 1) < 0.015


NUM_DATA, BATCH, CHAINS, CALLS = 600, 12, 16, 12_000


@functools.cache
def regression():
    """Correlated features: their values, targets, and the exact posterior."""
    random = np.random.default_rng(7)
    x = random.normal(size=(NUM_DATA, SIZE)) @ MIXING
    y = x @ random.normal(size=SIZE) + random.normal(size=NUM_DATA)
    covariance = np.linalg.inv(x.T @ x + np.eye(SIZE))
    return np.float32(x), np.float32(y), covariance @ x.T @ y, covariance


@pytest.mark.slow
def test_correlated_features():
    """In each eigendirection of the posterior; with a diagonal scale .56 to 1.04."""
    x, y, mean, covariance = regression()
    tx = optax_smile.psmile(num_data=NUM_DATA, key=0)

    def loss(w, rows):
        return jnp.mean((jnp.asarray(x)[rows] @ w - jnp.asarray(y)[rows]) ** 2) / 2

    def call(carry, rows):
        updates, state = tx.update(jax.grad(loss)(carry[0], rows), carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), carry[0]

    def one_pass(carry, key):
        permuted = jax.random.permutation(key, NUM_DATA).reshape(-1, BATCH)
        return jax.lax.scan(call, carry, permuted)

    starts = jnp.tile(jnp.asarray(mean, jnp.float32), (CHAINS, 1))
    states = parallel.init(tx, starts, key=jax.random.key(1))
    keys = jax.random.split(jax.random.key(2), (CHAINS, CALLS * BATCH // NUM_DATA))
    run = jax.jit(jax.vmap(lambda *x: jax.lax.scan(one_pass, x[:2], x[2])[1]))
    draws = run(starts, states, keys).reshape(CHAINS, CALLS, SIZE)
    draws = np.asarray(draws[:, CALLS // 4 :], float)
    values, axes = np.linalg.eigh(covariance)
    relative = (draws - mean) @ axes / np.sqrt(values)
    variances = (relative**2).mean((0, 1))
    assert np.all((variances > 0.85) & (variances < 1.15)), variances
    # The noise of permutations cancels over a pass: at twice the angle the mean is .92.
    assert variances.mean() > 0.96
    # Errors of single chains; .48 and .33 with a diagonal scale and its longer memory.
    assert np.sqrt(np.mean((relative.var(1) - 1) ** 2)) < 0.35
    assert np.sqrt(np.mean(relative.mean(1) ** 2)) < 0.16


def test_larger_trees_keep_one_number_per_parameter():
    for largest, has_matrix in ((SIZE, True), (SIZE - 1, False)):
        tx: Any = optax_smile.psmile(num_data=1, largest_matrix=largest, key=0)
        state = tx.init({"a": jnp.ones((2, 2)), "b": jnp.ones(1)})
        assert (state.entries is not None) == has_matrix
