from functools import cache
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_smile
from optax_smile.stages import preconditioner

DECAY = 0.99


def slow_scale(gradients, decay=DECAY, centered=True, clip=None):
    """The scale after the gradients [time, coordinate], by the formula, in float64."""
    mean, variance = np.zeros(gradients.shape[1]), np.zeros(gradients.shape[1])
    for g in np.asarray(gradients, np.float64):
        if centered:
            mean = decay * mean + (1 - decay) * g
        variance = decay * variance + (1 - decay) * (g - mean) ** 2
    start = decay ** len(gradients)
    sigma = np.sqrt(variance + start * variance.mean() / (1 - start))
    if clip is None:
        clip = np.array([1e-2, 1e2]) * np.sqrt(np.mean(sigma**2))
    sigma = np.clip(sigma, *clip)
    return sigma * np.sqrt(sigma.size) / np.linalg.norm(sigma)


def observe(state, gradient, decay=DECAY):
    """One gradient through the whole stage, as a sampler calls it."""
    return preconditioner.observe(state, gradient, decay)


def scales(gradients, decay=DECAY, centered=True, clip=None):
    """The scale after each of the gradients [time, coordinate]."""

    def step(state, gradient):
        state = observe(state, gradient, decay)
        return state, state.scale()

    gradients = jnp.asarray(gradients, jnp.float32)
    start = preconditioner.init(gradients[0], centered, clip)
    return np.asarray(jax.jit(lambda x: jax.lax.scan(step, start, x)[1])(gradients))


def noisy_gradients(num, size, seed=0):
    """Anisotropic noise about a mean that differs from coordinate to coordinate."""
    rng = np.random.default_rng(seed)
    spread = np.geomspace(0.1, 10, size)
    return 3 * rng.standard_normal(size) + spread * rng.standard_normal((num, size))


# The formula.


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("decay", [0.99, 0.9])
def test_scale_is_that_of_the_formula(centered, decay):
    gradients = noisy_gradients(300, 12)
    got = scales(gradients, decay, centered)
    for count in (1, 2, 3, 10, 100, 300):
        expected = slow_scale(gradients[:count], decay, centered)
        np.testing.assert_allclose(got[count - 1], expected, rtol=2e-5)
    # The two forms differ: a mean of the gradient is no noise.
    assert not np.allclose(got[-1], slow_scale(gradients, decay, not centered), rtol=0.05)


@pytest.mark.parametrize("centered", [True, False])
def test_scale_starts_isotropic(centered):
    gradients = np.ones((3, 4)) * [0.0, 1.0, 2.0, 1000.0]
    start = preconditioner.init(jnp.zeros(4), centered)
    np.testing.assert_array_equal(np.asarray(start.scale()), np.ones(4))
    first = scales(gradients, DECAY, centered)[0]
    # After one gradient 1 % of its anisotropy is believed: the largest s^2 is .99 + .01 d.
    np.testing.assert_allclose(first**2, [0.99, 0.99, 0.99, 1.03], rtol=1e-3)


def test_scale_is_clipped_at_both_ends():
    size = 20_000
    spread = np.ones(size)
    # Relative to the rms of 7.1: one coordinate at 1e-4 of it, one at 141 of it.
    spread[0], spread[1] = 7e-4, 1e3
    signs = np.random.default_rng(1).choice([-1.0, 1.0], (1200, size))
    gradients = (spread * signs).astype(np.float32)
    got = scales(gradients, DECAY, centered=False)[-1]
    expected = slow_scale(gradients, DECAY, centered=False)
    np.testing.assert_allclose(got, expected, rtol=1e-4)
    root = np.sqrt(1 + 1e6 / size)
    np.testing.assert_allclose(got[0] / got[2], 1e-2 * root, rtol=1e-2)
    np.testing.assert_allclose(got[1] / got[2], 1e2 * root, rtol=1e-2)


@pytest.mark.parametrize("unit", [1e-8, 1e-3, 0.1, 1.0, 1e2, 1e6])
@pytest.mark.parametrize("clip", [(1e-2, 1e4), (0.3, 2.0)])
def test_published_clip_is_absolute(clip, unit):
    gradients = unit * noisy_gradients(300, 12)
    got, expected = scales(gradients, clip=clip), slow_scale(gradients, clip=clip)
    np.testing.assert_allclose(got[-1], expected, rtol=2e-5)


def test_published_clip_without_noise_is_isotropic():
    np.testing.assert_array_equal(scales(np.zeros((20, 4)), clip=(1e-2, 1e4)), np.ones((20, 4)))


@pytest.mark.parametrize("sampler", [optax_smile.psmile, optax_smile.psmile_naive])
def test_published_clip_reaches_the_sampler(sampler):
    published: Any = optax_smile.PUBLISHED[sampler.__name__]
    state: Any = sampler(1e-3, num_data=10, **published).init(jnp.zeros(3))
    np.testing.assert_array_equal(state.preconditioner.clip, jnp.float32([1e-2, 1e4]))
    plain: Any = sampler(1e-3, num_data=10, key=jax.random.key(0)).init(jnp.zeros(3))
    assert plain.preconditioner.clip is None


@pytest.mark.parametrize("clip", [1e-2, (0, 1), (2, 1), (1, 2, 3), (1, np.inf), ("a", 1), (1, 1)])
def test_bad_clip(clip):
    rule = r"`psmile_naive\(noise_clip=...\)` must be two numbers, 0 < smallest < largest.*got"
    with pytest.raises(ValueError, match=rule):
        optax_smile.psmile_naive(1e-3, num_data=10, noise_clip=clip)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_mean_square_of_the_scale_is_one(size):
    got = scales(noisy_gradients(200, size, seed=size)).astype(float)
    np.testing.assert_allclose(np.mean(got**2, axis=1), 1, rtol=1e-5)


def test_scale_of_a_tree_is_that_of_the_flat_vector():
    gradients = noisy_gradients(50, 11).astype(np.float32)

    def tree(g):
        return {"a": g[:4].reshape(2, 2), "b": [g[4], g[5:]]}

    state = preconditioner.init(tree(jnp.asarray(gradients[0])), True)
    update = jax.jit(observe)
    for g in gradients:
        state = update(state, tree(jnp.asarray(g)))
    got = jax.tree.leaves(state.scale())
    np.testing.assert_allclose(
        np.concatenate([np.ravel(leaf) for leaf in got]), slow_scale(gradients), rtol=2e-5
    )


# Statistics.


def test_scale_measures_constant_diagonal_noise():
    """Variance condition number 10^4, 10^4 steps.

    The error of a single chain is statistical: an average with decay .99 has a relative standard
    deviation of 5 % in s at any time, and about 1 % in the mean of s over 5,000 steps (25
    independent windows), so that the largest of 50 coordinates exceeds 2 %. The mean over 64
    chains has 0.13 % left and shows the bias: 2 % are 15 of its standard errors. The 8 % are
    the root mean square over 3,200 values whose own standard error is 1 % of it.
    """
    num_chains, size, num_steps = 64, 50, 10_000
    spread = jnp.asarray(np.geomspace(0.1, 10, size), jnp.float32)
    mean = jnp.asarray(np.random.default_rng(2).standard_normal(size), jnp.float32)
    exact = np.asarray(spread, float) / np.sqrt(np.mean(np.asarray(spread, float) ** 2))

    def chain(key):
        def step(carry, inputs):
            state, total = carry
            key, counts = inputs
            state = observe(state, mean + spread * jax.random.normal(key, (size,)))
            return (state, total + counts * state.scale()), None

        start = preconditioner.init(spread, True), jnp.zeros(size)
        counts = jnp.arange(num_steps) >= num_steps // 2
        inputs = jax.random.split(key, num_steps), counts.astype(jnp.float32)
        (state, total), _ = jax.lax.scan(step, start, inputs)
        return state.scale(), total / (num_steps // 2)

    keys = jax.random.split(jax.random.key(0), num_chains)
    last, average = (np.asarray(x, float) for x in jax.jit(jax.vmap(chain))(keys))
    assert np.sqrt(np.mean((last / exact - 1) ** 2)) <= 0.08
    assert np.abs(average.mean(0) / exact - 1).max() <= 0.02


@jax.jit
def lengths_of_the_first_steps(spread, alive, prior_precision):
    """100 calls of psmile_naive on pure noise, step size 1, and its counter of bad calls."""
    tx = optax_smile.psmile_naive(1.0, num_data=1, prior_precision=prior_precision)

    def call(carry, key):
        params, state = carry
        grads = jnp.where(alive, spread * jax.random.normal(key, alive.shape), 0)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), jnp.linalg.norm(updates)

    params = 5 * jax.random.normal(jax.random.key(1), alive.shape)
    keys = jax.random.split(jax.random.key(2), 100)
    (_, state), lengths = jax.lax.scan(call, (params, tx.init(params)), keys)
    return lengths, optax_smile.stats(state)["num_nonfinite"]


@pytest.mark.parametrize("dead", [False, True])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 1e3])
def test_no_step_is_longer_than_the_step_size_at_the_start(spread, dead):
    """LeNet's size, isotropic noise, half of the coordinates dead or none, with and without prior.

    Weights of .05 at a step size of .01, in units of that step size.
    """
    size = 61_706
    alive = (np.arange(size) % 2 == 0) | (not dead)
    for prior_precision in (0.0, 1.0):
        lengths, num_nonfinite = lengths_of_the_first_steps(spread, alive, prior_precision)
        assert num_nonfinite == 0
        assert lengths.max() <= 1.1
        assert lengths.min() >= 0.5


# Units and reductions.


@pytest.mark.parametrize("centered", [True, False])
def test_scale_does_not_depend_on_the_unit_of_the_gradient(centered):
    gradients = noisy_gradients(120, 9).astype(np.float32)
    expected = scales(gradients, DECAY, centered)
    for power in (-30, -3, 1, 25):
        got = scales(gradients * np.float32(2.0**power), DECAY, centered)
        np.testing.assert_array_equal(got, expected)
    for factor in (1e-3, 3.0, 1e3, 7e9):
        got = scales(gradients * np.float32(factor), DECAY, centered)
        np.testing.assert_allclose(got, expected, rtol=2e-5)


def noisy_loss(params, batch):
    return jnp.mean(jnp.cosh(params["w"] - batch)) + params["b"] ** 2


def trajectory(tx, update, num_calls):
    """Parameters, direction and energies after each call, on a noisy potential."""
    params = {"w": jnp.ones((3, 4)), "b": jnp.asarray(0.5)}
    state, visited = tx.init(params), []
    evaluate = jax.jit(jax.value_and_grad(noisy_loss))
    for batch in np.random.default_rng(5).standard_normal((num_calls, 3, 4)).astype(np.float32):
        value, grads = evaluate(params, batch)
        updates, state = update(grads, state, params, value=value)
        params = jax.tree.map(lambda x, dx: np.asarray(x) + np.asarray(dx), params, updates)
        visited.append(
            (params, state.momentum.direction, state.evidence.open_step, state.last_call)
        )
    return visited


@pytest.mark.parametrize(
    "integrator, centered",
    [
        ("leapfrog", True),
        pytest.param("leapfrog", False, marks=pytest.mark.slow),
        pytest.param("minimal_norm", True, marks=pytest.mark.slow),
    ],
)
def test_averages_that_never_move_make_it_exactly_smile(centered, integrator):
    common = {"step_size": 0.05, "num_data": 10, "integrator": integrator}
    smile = optax_smile.smile_naive(**common)
    psmile = optax_smile.psmile_naive(**common, noise_decay=1.0, centered=centered)
    expected = trajectory(smile, jax.jit(smile.update), 40)
    got = trajectory(psmile, jax.jit(psmile.update), 40)
    chex.assert_trees_all_equal(got, expected)


def test_averages_that_never_move_make_it_exactly_smile_eagerly():
    smile = optax_smile.smile_naive(0.05, num_data=10)
    psmile = optax_smile.psmile_naive(0.05, num_data=10, noise_decay=1.0)
    expected, got = trajectory(smile, smile.update, 4), trajectory(psmile, psmile.update, 4)
    chex.assert_trees_all_equal(got, expected)
    # Averages that move change the very first step.
    moving = optax_smile.psmile_naive(0.05, num_data=10)
    other = trajectory(moving, moving.update, 1)
    assert np.abs(other[0][0]["w"] - expected[0][0]["w"]).max() > 1e-6


def test_gradients_of_one_modulus_leave_the_scale_at_one():
    rng = np.random.default_rng(3)
    signs = rng.choice([-1.0, 1.0], (150, 33))
    np.testing.assert_allclose(scales(0.037 * signs, DECAY, centered=False), 1, rtol=1e-6)
    # Centred squares are alike if the signs do not change, or change in all coordinates at once.
    np.testing.assert_allclose(scales(0.037 * signs[:1] + 0 * signs), 1, rtol=1e-5)
    np.testing.assert_allclose(scales(0.037 * signs[:1] * signs[:, :1]), 1, rtol=1e-5)


# Extreme gradients.


@cache
def transformation(centered=True) -> Any:
    """The public transformation, its update jitted once for all tests."""
    tx = optax_smile.scale_by_gradient_noise(centered=centered)
    return tx, jax.jit(tx.update)


EXTREME = {
    "huge": [1e18, -2e18, 5e17, 1e18],
    "beyond its square": [1e25, 1.0, -1e25, 2.0],
    "tiny": [1e-20, -3e-20, 1e-20, 2e-20],
    "denormal": [1e-40, 1e-42, 0.0, -1e-40],
    "one dominates": [1e12, 1e-3, -1e-3, 1e-6],
    "one dominates by everything": [1e18, 1e-20, 0.0, 1.0],
    "nothing": [0.0, 0.0, 0.0, 0.0],
}


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("name", EXTREME)
def test_extreme_gradients_stay_finite(name, centered):
    tx, update = transformation(centered)
    extreme = np.asarray(EXTREME[name], np.float32)
    ordinary = np.asarray([1.0, -2.0, 0.5, 0.0], np.float32)
    state = tx.init(jnp.asarray(extreme))
    for count in range(30):
        updates, state = update(extreme * (-1) ** count if count % 3 else ordinary, state)
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((updates, state)))
        scale = np.asarray(state.scale(), float)
        np.testing.assert_allclose(np.mean(scale**2), 1, rtol=1e-5)
        assert scale.min() > 0


@pytest.mark.parametrize("name", EXTREME)
def test_extreme_gradients_from_the_first(name):
    tx, update = transformation()
    extreme = np.asarray(EXTREME[name], np.float32)
    state = tx.init(jnp.asarray(extreme))
    for count in range(300):
        updates, state = update(extreme * (-1) ** count, state)
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((updates, state)))
    np.testing.assert_allclose(np.mean(np.asarray(state.scale()) ** 2), 1, rtol=1e-5)


# The public transformation.


@pytest.mark.parametrize("centered", [True, False])
def test_public_transformation_divides_by_the_scale(centered):
    gradients = noisy_gradients(60, 8).astype(np.float32)
    tx, update = transformation(centered)
    state = tx.init(jnp.zeros(8))
    for count, gradient in enumerate(gradients, start=1):
        updates, state = update(gradient, state)
        expected = gradient / slow_scale(gradients[:count], DECAY, centered)
        np.testing.assert_allclose(updates, expected, rtol=2e-5)
    averages = jax.tree.leaves(state)
    assert sum(leaf.size == 8 for leaf in averages) == (2 if centered else 1)


def test_sampler_whitens_with_the_scale_of_the_gradient_of_the_energy():
    """psmile_naive's scale is the formula on grad U, prior and num_data included."""
    gradients = noisy_gradients(25, 8).astype(np.float32)
    tx = optax_smile.psmile_naive(0.3, num_data=20.0, prior_precision=2.0, temperature=4.0)
    params, energies = jnp.linspace(-2, 2, 8), []
    state, update = tx.init(params), jax.jit(tx.update)
    for gradient in gradients:
        energies.append((20 * gradient.astype(float) + 2 * np.asarray(params, float)) / 4)
        updates, state = update(jnp.asarray(gradient), state, params)
        scale = slow_scale(np.stack(energies))
        got = np.asarray(state.preconditioner.scale())
        np.testing.assert_allclose(got, scale, rtol=1e-4)
        # A displacement has the length of the step in the scaled coordinates.
        np.testing.assert_allclose(np.linalg.norm(np.asarray(updates) * scale), 0.3, rtol=1e-4)
        params = optax.apply_updates(params, updates)


def test_first_step_of_the_preconditioned_sampler_is_steepest_descent():
    gradient = np.asarray([3.0, -1.0, 0.2, 40.0])
    tx = optax_smile.psmile_naive(0.3, num_data=1, prior_precision=0.0)
    update = jax.jit(tx.update)
    updates, _ = update(jnp.asarray(gradient), tx.init(jnp.zeros(4)), jnp.zeros(4))
    scale = slow_scale(gradient[None])
    whitened = gradient / scale
    expected = -0.3 * whitened / np.linalg.norm(whitened) / scale
    np.testing.assert_allclose(updates, expected, rtol=1e-5)


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e25])
@pytest.mark.parametrize("call", [0, 1, 20])
def test_public_transformation_forgets_a_non_finite_gradient(bad, call, centered):
    gradients = noisy_gradients(40, 5).astype(np.float32)
    tx, update = transformation(centered)
    state = tx.init(jnp.zeros(5))
    for gradient in gradients[:call]:
        _, state = update(gradient, state)
    gradients[call, 2] = bad
    updates, after = update(gradients[call], state)
    chex.assert_trees_all_equal(after, state)
    # It passes through: whoever comes next in the chain sees what was given.
    assert np.isfinite(updates[2]) == np.isfinite(bad)
    assert np.all(np.isfinite(np.delete(updates, 2)))
