from functools import cache, partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_smile
from optax_smile import _tree
from optax_smile.stages import preconditioner
from optax_smile.stages.evidence import Worth

DECAY = 0.99


def slow_scale(gradients, estimate="differences"):
    """The scale after gradients [time, coordinate], in float64 and textbook steps."""
    gradients = np.asarray(gradients, np.float64)
    if estimate == "published":
        mean, variance, weight = *np.zeros((2, gradients.shape[1])), 1.0
        for g in gradients:
            mean = DECAY * mean + (1 - DECAY) * g
            variance = DECAY * variance + (1 - DECAY) * (g - mean) ** 2
            weight *= DECAY
        return relative(variance, weight)
    squares = gradients**2 if estimate == "squares" else np.diff(gradients, axis=0) ** 2 / 2
    scale, first, length = np.ones(gradients.shape[1]), 0, 64
    while first + length <= len(squares):
        scale = relative(squares[first : first + length].mean(0), 10 / (10 + length))
        first, length = first + length, length + length // 2
    return scale


def relative(average, weight):
    """Square root of an average over its mean, and that of an isotropic one."""
    if not average.any():
        return np.ones(len(average))
    mixed = weight + (1 - weight) * average / average.mean()
    return np.sqrt(np.clip(mixed, 1e-4, 1e4))


ESTIMATES = {
    "differences": preconditioner.mean_square(differences=True),
    "squares": preconditioner.mean_square(),
    "published": preconditioner.moving_variance(DECAY),
}
every_estimate = pytest.mark.parametrize("estimate", ESTIMATES)
windowed = pytest.mark.parametrize("estimate", ["differences", "squares"])


def observe(estimate, state, gradient, trust=1.0, counts=True, anew=False):
    """One gradient, as a sampler passes it on."""
    deviation = ESTIMATES[estimate].deviation(state, gradient)
    worth = Worth(
        trust=jnp.float32(trust),
        counts=jnp.asarray(counts, bool),
        anew=jnp.asarray(anew, bool),
        square=_tree.inner(deviation, deviation),
    )
    return ESTIMATES[estimate].observe(state, gradient, worth, gradient)


def scale_of(state):
    """The scale of a state, a tree like the gradients."""
    return jax.tree.map(lambda x: 1 / x, state.inverse_scale())


def scales(gradients, estimate="differences"):
    """The scale after each of the gradients [time, coordinate]."""

    def step(state, gradient):
        state = observe(estimate, state, gradient)
        return state, scale_of(state)

    gradients = jnp.asarray(gradients, jnp.float32)
    start = ESTIMATES[estimate].init(gradients[0])
    return np.asarray(jax.jit(lambda x: jax.lax.scan(step, start, x)[1])(gradients))


def noisy_gradients(num, size, seed=0):
    """Anisotropic noise about a mean that differs from coordinate to coordinate."""
    rng = np.random.default_rng(seed)
    spread = np.geomspace(0.1, 10, size)
    return 3 * rng.standard_normal(size) + spread * rng.standard_normal((num, size))


# The formula.


@every_estimate
def test_scale_is_that_of_the_formula(estimate):
    gradients = noisy_gradients(300, 12)
    got = scales(gradients, estimate)
    for count in (1, 2, 63, 64, 65, 66, 159, 160, 161, 300):
        expected = slow_scale(gradients[:count], estimate)
        np.testing.assert_allclose(got[count - 1], expected, rtol=2e-5)
    # The forms differ.
    for other in set(ESTIMATES) - {estimate}:
        assert not np.allclose(got[-1], slow_scale(gradients, other), rtol=0.05)


@windowed
def test_a_scale_is_that_of_the_window_before(estimate):
    """Windows of 64, 96, 144: nothing else in the run has a say, and inside of one s stays."""
    gradients = noisy_gradients(600, 4)
    edges = np.cumsum([64, 96, 144, 216]) - (estimate == "squares")
    got = scales(gradients, estimate)
    changes = np.flatnonzero(np.any(np.diff(got, axis=0) != 0, axis=1)) + 1
    np.testing.assert_array_equal(changes, edges)
    gradients[: edges[1]] *= [1000, 100, 10, 1]
    gradients[edges[2] + 1 :] *= 7
    other = scales(gradients, estimate)
    np.testing.assert_allclose(other[edges[2]], got[edges[2]], rtol=1e-5)
    assert not np.allclose(other[edges[1]], got[edges[1]], rtol=0.5)


@every_estimate
def test_scale_starts_isotropic(estimate):
    start = ESTIMATES[estimate].init(jnp.zeros(4))
    np.testing.assert_array_equal(np.asarray(scale_of(start)), np.ones(4))
    gradients = np.array([[0.0, 0, 0, 0], [0.0, 1.0, 2.0, 1000.0]])
    second = scales(gradients, estimate)[1] ** 2
    # The published one believes 2 % of its anisotropy: the largest s^2 is .98 + .02 d.
    believed = 1 - DECAY**2 if estimate == "published" else 0
    np.testing.assert_allclose(second, [1 - believed] * 3 + [1 + 3 * believed], rtol=1e-3)


@every_estimate
def test_a_coordinate_with_little_noise_keeps_its_digits(estimate):
    """As 1 - slope * mean the offset was rounding noise below 3e-4 of the rms."""
    spread = np.geomspace(1e-4, 1, 8)
    variance = jnp.asarray(spread**2, jnp.float32)
    mean = jnp.asarray(np.mean(spread**2), jnp.float32)
    got: Any = preconditioner.inverse_scale(variance, mean, jnp.float32(1e-7))
    relative = 1e-7 + (1 - 1e-7) * spread**2 / np.mean(spread**2)
    np.testing.assert_allclose(1 / got, np.sqrt(np.clip(relative, 1e-4, 1e4)), rtol=1e-5)
    gradients = noisy_gradients(3000, 8) * spread
    got = scales(gradients, estimate)
    for count in (500, 3000):
        expected = slow_scale(gradients[:count], estimate)
        np.testing.assert_allclose(got[count - 1], expected, rtol=1e-4)


def test_scale_is_clipped_at_both_ends():
    size = 20_000
    spread = np.ones(size)
    # Relative to the rms of 7.1: one coordinate at 1e-4 of it, one at 141 of it.
    spread[0], spread[1] = 7e-4, 1e3
    signs = np.where(np.arange(1200)[:, None] % 2, 1.0, -1.0) * np.ones((1, size))
    gradients = (spread * signs).astype(np.float32)
    got = scales(gradients, "published")[-1]
    np.testing.assert_allclose(got, slow_scale(gradients, "published"), rtol=1e-4)
    root = np.sqrt(1 + 1e6 / size)
    np.testing.assert_allclose(got[0] / got[2], 1e-2 * root, rtol=1e-2)
    np.testing.assert_allclose(got[1] / got[2], 1e2 * root, rtol=1e-2)


@every_estimate
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_mean_square_of_the_scale_is_one(size, estimate):
    got = scales(noisy_gradients(200, size, seed=size), estimate).astype(float)
    np.testing.assert_allclose(np.mean(got**2, axis=1), 1, rtol=1e-5)


@every_estimate
def test_scale_of_a_tree_is_that_of_the_flat_vector(estimate):
    gradients = noisy_gradients(50, 11).astype(np.float32)

    def tree(g):
        return {"a": g[:4].reshape(2, 2), "b": [g[4], g[5:]]}

    state = ESTIMATES[estimate].init(tree(jnp.asarray(gradients[0])))
    update = jax.jit(partial(observe, estimate))
    for g in gradients:
        state = update(state, tree(jnp.asarray(g)))
    got = jax.tree.leaves(scale_of(state))
    np.testing.assert_allclose(
        np.concatenate([np.ravel(leaf) for leaf in got]), slow_scale(gradients, estimate), rtol=2e-5
    )


@every_estimate
def test_what_does_not_count_changes_nothing(estimate):
    gradients = jnp.asarray(noisy_gradients(20, 6), jnp.float32)
    state = ESTIMATES[estimate].init(gradients[0])
    for gradient in gradients[:-1]:
        state = observe(estimate, state, gradient)
    chex.assert_trees_all_equal(observe(estimate, state, gradients[-1], counts=False), state)


@every_estimate
def test_an_outlying_gradient_counts_for_what_it_is_trusted(estimate):
    gradients = jnp.asarray(noisy_gradients(20, 6), jnp.float32)
    state = ESTIMATES[estimate].init(gradients[0])
    for gradient in gradients[:-1]:
        state = observe(estimate, state, gradient)
    expected = getattr(state, {"published": "gradient_mean"}.get(estimate, "last_gradient"), None)
    expected = 0 if expected is None else expected
    got = observe(estimate, state, expected + 1e6 * gradients[-1], trust=3e-6)
    shortened = observe(estimate, state, expected + 3 * gradients[-1])
    chex.assert_trees_all_close(got, shortened, rtol=1e-5)


@windowed
def test_a_chain_on_its_way_begins_anew(estimate):
    """Nothing is left of what was seen, and the gradient there is the first to compare with."""
    gradients = jnp.asarray(noisy_gradients(170, 6), jnp.float32)
    state, update = ESTIMATES[estimate].init(gradients[0]), jax.jit(partial(observe, estimate))
    for gradient in gradients[:100]:
        state = update(state, 1e3 * gradient)
    assert np.ptp(np.asarray(scale_of(state))) > 0.1
    state = observe(estimate, state, gradients[100], anew=True)
    np.testing.assert_array_equal(scale_of(state), np.ones(6))
    for gradient in gradients[101:]:
        state = update(state, gradient)
    np.testing.assert_allclose(scale_of(state), slow_scale(gradients[100:], estimate), rtol=1e-5)


# Statistics.


def test_scale_measures_constant_diagonal_noise():
    """Variance condition number 10^4, 64 chains, a last window of 5,530 gradients.

    s^2 is the mean of n squared normal differences, of which neighbours share a gradient: a
    variance of 2 (1 + 1/2) / n, 1.16 % of s for one chain and 0.15 % for the mean of 64.
    """
    num_chains, size, num_steps = 64, 50, 16_467
    spread = jnp.asarray(np.geomspace(0.1, 10, size), jnp.float32)
    mean = jnp.asarray(np.random.default_rng(2).standard_normal(size), jnp.float32)
    exact = np.asarray(spread, float) / np.sqrt(np.mean(np.asarray(spread, float) ** 2))

    def chain(key):
        def step(state, key):
            gradient = mean + spread * jax.random.normal(key, (size,))
            return observe("differences", state, gradient), None

        start = ESTIMATES["differences"].init(spread)
        return scale_of(jax.lax.scan(step, start, jax.random.split(key, num_steps))[0])

    keys = jax.random.split(jax.random.key(0), num_chains)
    last = np.asarray(jax.jit(jax.vmap(chain))(keys), float)
    isotropic = 10 / 5540
    expected = np.sqrt(isotropic + (1 - isotropic) * exact**2)
    assert np.sqrt(np.mean((last / expected - 1) ** 2)) <= 0.015
    assert np.abs(last.mean(0) / expected - 1).max() <= 0.005


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


def test_both_gradients_of_a_step_may_share_a_batch():
    """Differences are of successive step ends: two gradients on one batch would show no noise."""
    spread = np.geomspace(0.1, 10, 12)
    # Of one length, so that none is outlying.
    noises = (spread * np.random.default_rng(5).choice([-1, 1], (70, 12))).astype(np.float32)
    tx = optax_smile.psmile_naive(1e-6, num_data=1, prior_precision=0.0, integrator="minimal_norm")
    params = jnp.zeros(12)
    state: Any = tx.init(params)
    update = jax.jit(tx.update)
    for noise in np.repeat(noises, 2, axis=0):
        updates, state = update(jnp.asarray(noise), state, params)
        params: Any = optax.apply_updates(params, updates)
    # 69 differences of 70 batches, 64 of them in the first window; the first count for less.
    assert (state.preconditioner.num_in_window, state.preconditioner.window) == (5, 96)
    np.testing.assert_allclose(scale_of(state.preconditioner), slow_scale(noises), rtol=0.02)
    latest = np.mean(np.diff(noises[-6:], axis=0) ** 2 / 2, axis=0)
    np.testing.assert_allclose(state.preconditioner.mean_square, latest, rtol=1e-5)
    assert np.ptp(slow_scale(noises)) > 1


# Units and reductions.


@every_estimate
def test_scale_does_not_depend_on_the_unit_of_the_gradient(estimate):
    gradients = noisy_gradients(120, 9).astype(np.float32)
    expected = scales(gradients, estimate)
    for power in (-30, -3, 1, 25):
        got = scales(gradients * np.float32(2.0**power), estimate)
        np.testing.assert_array_equal(got, expected)
    for factor in (1e-3, 3.0, 1e3, 7e9):
        got = scales(gradients * np.float32(factor), estimate)
        np.testing.assert_allclose(got, expected, rtol=2e-5)


def test_noise_of_one_modulus_makes_it_smile():
    """Random signs have a variance alike in every coordinate: then the scale is one."""
    common = {"num_data": 1, "prior_precision": 0.0, "step_size": 0.05}
    smile, psmile = optax_smile.smile_naive(**common), optax_smile.psmile_naive(**common)
    signs = np.where(np.arange(100)[:, None] % 2, 1.0, -1.0) * np.random.default_rng(3).choice(
        [-1.0, 1.0], 33
    )
    states: list[Any] = [smile.init(jnp.zeros(33)), psmile.init(jnp.zeros(33))]
    params: list[Any] = [jnp.zeros(33)] * 2
    updates = [jax.jit(smile.update), jax.jit(psmile.update)]
    for g in signs.astype(np.float32):
        for which in (0, 1):
            move, states[which] = updates[which](jnp.asarray(g), states[which], params[which])
            params[which] = optax.apply_updates(params[which], move)
        np.testing.assert_allclose(params[0], params[1], rtol=1e-4, atol=1e-6)
    assert np.abs(params[0]).max() > 0.01 and states[1].preconditioner.window == 96


# Extreme gradients.


@cache
def transformation() -> Any:
    """The public transformation, its update jitted once for all tests."""
    tx = optax_smile.scale_by_gradient_noise()
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


@pytest.mark.parametrize("name", EXTREME)
@pytest.mark.parametrize("calls, ordinary_calls", [(30, range(0, 30, 3)), (300, [])])
def test_extreme_gradients_stay_finite(name, calls, ordinary_calls):
    """Among ordinary ones, and from the first."""
    tx, update = transformation()
    extreme = np.asarray(EXTREME[name], np.float32)
    ordinary = np.asarray([1.0, -2.0, 0.5, 0.0], np.float32)
    state = tx.init(jnp.asarray(extreme))
    for count in range(calls):
        gradient = ordinary if count in ordinary_calls else extreme * (-1) ** count
        updates, state = update(gradient, state)
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((updates, state)))
        scale = np.asarray(scale_of(state), float)
        np.testing.assert_allclose(np.mean(scale**2), 1, rtol=1e-5)
        assert scale.min() > 0


# The public transformation.


def test_public_transformation_divides_by_the_scale_before():
    gradients = noisy_gradients(80, 8).astype(np.float32)
    tx, update = transformation()
    state = tx.init(jnp.zeros(8))
    for count, gradient in enumerate(gradients):
        updates, state = update(gradient, state)
        expected = gradient / slow_scale(gradients[:count]) if count else gradient
        np.testing.assert_allclose(updates, expected, rtol=2e-5)
    assert sum(leaf.size == 8 for leaf in jax.tree.leaves(state)) == 3


def test_sampler_whitens_the_gradient_of_the_energy_with_the_scale_before():
    """Prior and num_data included; a drift has its length in the coordinates of the new scale."""
    size = 60
    # Without a mean, which would tell that the chain is on its way.
    gradients = noisy_gradients(80, size).astype(np.float32)
    gradients -= gradients.mean(axis=0)
    tx = optax_smile.psmile_naive(0.3, num_data=20.0, prior_precision=0.1, temperature=4.0)
    params, energies = jnp.linspace(-2, 2, size), []
    state: Any = tx.init(params)
    update = jax.jit(tx.update)
    scale = np.ones(size)
    for gradient in gradients:
        raw = (20 * gradient.astype(float) + 0.1 * np.asarray(params, float)) / 4
        energies.append(raw)
        u = np.asarray(state.momentum.direction, float)
        updates, state = update(jnp.asarray(gradient), state, params)
        # Both kicks turn u in the plane of it and of the gradient whitened by the old scale.
        plane, turned = np.stack([u, raw / scale], 1), np.asarray(state.momentum.direction, float)
        rest = turned - plane @ np.linalg.lstsq(plane, turned, rcond=None)[0]
        assert np.linalg.norm(rest) < 1e-5
        scale = slow_scale(np.stack(energies))
        np.testing.assert_allclose(scale_of(state.preconditioner), scale, rtol=1e-4)
        np.testing.assert_allclose(np.linalg.norm(np.asarray(updates) * scale), 0.3, rtol=1e-4)
        params = optax.apply_updates(params, updates)
    assert scale.std() > 0.05


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e25])
@pytest.mark.parametrize("call", [0, 1, 20])
def test_public_transformation_forgets_a_non_finite_gradient(bad, call):
    gradients = noisy_gradients(40, 5).astype(np.float32)
    tx, update = transformation()
    state = tx.init(jnp.zeros(5))
    for gradient in gradients[:call]:
        _, state = update(gradient, state)
    gradients[call, 2] = bad
    updates, after = update(gradients[call], state)
    chex.assert_trees_all_equal(after, state)
    # It passes through: whoever comes next in the chain sees what was given.
    assert np.isfinite(updates[2]) == np.isfinite(bad)
    assert np.all(np.isfinite(np.delete(updates, 2)))
