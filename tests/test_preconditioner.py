import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_smile
from optax_smile.stages import preconditioner

DECAY = 0.99


def slow_scale(gradients, decay=DECAY, centered=True):
    """The scale after the gradients [time, coordinate], by the formula, in float64."""
    mean, variance = np.zeros(gradients.shape[1]), np.zeros(gradients.shape[1])
    for g in np.asarray(gradients, np.float64):
        if centered:
            mean = decay * mean + (1 - decay) * g
        variance = decay * variance + (1 - decay) * (g - mean) ** 2
    start = decay ** len(gradients)
    sigma = np.sqrt(variance + start * variance.mean() / (1 - start))
    sigma = np.clip(sigma / np.sqrt(np.mean(sigma**2)), 1e-2, 1e2)
    return sigma * np.sqrt(sigma.size) / np.linalg.norm(sigma)


def observe(state, gradient, decay=DECAY):
    """One gradient through the whole stage, as a sampler calls it."""
    state = preconditioner.observe(state, gradient, decay)
    relative = preconditioner.relative_scale(state)
    leaves = jax.tree.leaves(relative)
    return preconditioner.normalize(state, sum(jnp.sum(leaf**2) for leaf in leaves))


def scales(gradients, decay=DECAY, centered=True):
    """The scale after each of the gradients [time, coordinate]."""

    def step(state, gradient):
        state = observe(state, gradient, decay)
        return state, preconditioner.scale(state)

    gradients = jnp.asarray(gradients, jnp.float32)
    start = preconditioner.init(gradients[0], decay, centered)
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
    start = preconditioner.init(jnp.zeros(4), DECAY, centered)
    np.testing.assert_array_equal(np.asarray(preconditioner.scale(start)), np.ones(4))
    first = scales(gradients, DECAY, centered)[0]
    # After one gradient 1 % of its anisotropy is believed: the largest s^2 is .99 + .01 d.
    np.testing.assert_allclose(first**2, [0.99, 0.99, 0.99, 1.03], rtol=1e-3)


def test_scale_is_clipped_at_both_ends():
    size = 40_000
    spread = np.full(size, 1.0)
    # Relative to the rms of about 2.2: one coordinate at 1e-3 of it, one far above 100.
    spread[0], spread[1] = 1e-3, 1e3
    rng = np.random.default_rng(1)
    gradients = spread * rng.choice([-1.0, 1.0], (1500, size)).astype(np.float32)
    got = scales(gradients, DECAY, centered=False)[-1]
    expected = slow_scale(gradients, DECAY, centered=False)
    np.testing.assert_allclose(got, expected, rtol=1e-4)
    np.testing.assert_allclose(got[0] / got[2], 1e-2 * np.sqrt(26), rtol=1e-2)
    np.testing.assert_allclose(got[1] / got[2], 1e2 * np.sqrt(26), rtol=1e-2)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_mean_square_of_the_scale_is_one(size):
    got = scales(noisy_gradients(200, size, seed=size)).astype(float)
    np.testing.assert_allclose(np.mean(got**2, axis=1), 1, rtol=1e-5)


def test_scale_of_a_tree_is_that_of_the_flat_vector():
    gradients = noisy_gradients(50, 11).astype(np.float32)

    def tree(g):
        return {"a": g[:4].reshape(2, 2), "b": [g[4], g[5:]]}

    state = preconditioner.init(tree(jnp.asarray(gradients[0])), DECAY, True)
    update = jax.jit(observe)
    for g in gradients:
        state = update(state, tree(jnp.asarray(g)))
    got = jax.tree.leaves(preconditioner.scale(state))
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
            return (state, total + counts * preconditioner.scale(state)), None

        start = preconditioner.init(spread, DECAY, True), jnp.zeros(size)
        counts = jnp.arange(num_steps) >= num_steps // 2
        inputs = jax.random.split(key, num_steps), counts.astype(jnp.float32)
        (state, total), _ = jax.lax.scan(step, start, inputs)
        return preconditioner.scale(state), total / (num_steps // 2)

    keys = jax.random.split(jax.random.key(0), num_chains)
    last, average = (np.asarray(x, float) for x in jax.jit(jax.vmap(chain))(keys))
    assert np.sqrt(np.mean((last / exact - 1) ** 2)) <= 0.08
    assert np.abs(average.mean(0) / exact - 1).max() <= 0.02


@pytest.mark.parametrize("dead", [False, True])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 1e3])
def test_no_step_is_longer_than_the_step_size_at_the_start(spread, dead):
    """LeNet's size, isotropic noise, at 100 calls from the first; half of it dead or none."""
    size, step_size, num_calls = 61_706, 0.01, 100
    alive = jnp.asarray(np.arange(size) % 2 == 0) if dead else jnp.ones(size, bool)
    for prior_precision in (0.0, 1.0):
        tx = optax_smile.psmile_naive(step_size, num_data=1, prior_precision=prior_precision)

        def call(carry, key, tx=tx):
            params, state = carry
            grads = jnp.where(alive, spread * jax.random.normal(key, (size,)), 0)
            updates, state = tx.update(grads, state, params)
            carry = optax.apply_updates(params, updates), state
            return carry, jnp.linalg.norm(updates)

        params = 0.05 * jax.random.normal(jax.random.key(1), (size,))
        keys = jax.random.split(jax.random.key(2), num_calls)
        run = jax.jit(lambda carry, keys, call=call: jax.lax.scan(call, carry, keys))
        (_, state), lengths = run((params, tx.init(params)), keys)
        assert int(optax_smile.stats(state)["num_nonfinite"]) == 0
        assert lengths.max() <= 1.1 * step_size
        assert lengths.min() >= 0.5 * step_size


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


def run_both(first, second, num_calls=40, **arguments):
    """Two samplers on the same noisy potential; the parameters of each after each call."""

    def loss(params, batch):
        return jnp.mean(jnp.cosh(params["w"] - batch)) + params["b"] ** 2

    keys = jax.random.split(jax.random.key(5), num_calls)
    outcomes = []
    for make, extra in ((first, {}), (second, arguments)):
        tx = make(0.05, num_data=10, **extra)

        def call(carry, key, tx=tx):
            params, state = carry
            value, grads = jax.value_and_grad(loss)(params, jax.random.normal(key, (3, 4)))
            updates, state = tx.update(grads, state, params, value=value)
            params = optax.apply_updates(params, updates)
            return (params, state), (params, optax_smile.stats(state)["energy_change"])

        params = {"w": jnp.ones((3, 4)), "b": jnp.asarray(0.5)}
        carry = params, tx.init(params)
        outcomes.append(jax.jit(lambda c, call=call: jax.lax.scan(call, c, keys)[1])(carry))
    return outcomes


@pytest.mark.parametrize("centered", [True, False])
def test_averages_that_never_move_make_it_smile(centered):
    smile, psmile = run_both(
        optax_smile.smile_naive, optax_smile.psmile_naive, noise_decay=1.0, centered=centered
    )
    chex.assert_trees_all_equal(smile, psmile)


def test_averages_that_move_do_not():
    smile, psmile = run_both(optax_smile.smile_naive, optax_smile.psmile_naive)
    assert np.abs(smile[0]["w"][-1] - psmile[0]["w"][-1]).max() > 1e-4


def test_gradients_of_one_modulus_leave_the_scale_at_one():
    rng = np.random.default_rng(3)
    signs = rng.choice([-1.0, 1.0], (150, 33))
    np.testing.assert_allclose(scales(0.037 * signs, DECAY, centered=False), 1, rtol=1e-6)
    # Centred squares are alike if the signs do not change, or change in all coordinates at once.
    np.testing.assert_allclose(scales(0.037 * signs[:1] + 0 * signs), 1, rtol=1e-5)
    np.testing.assert_allclose(scales(0.037 * signs[:1] * signs[:, :1]), 1, rtol=1e-5)


# Extreme gradients.


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
    tx = optax_smile.scale_by_gradient_noise(centered=centered)
    extreme = jnp.asarray(EXTREME[name], jnp.float32)
    state, update = tx.init(extreme), jax.jit(tx.update)
    for count in range(30):
        gradient = extreme * (-1) ** count if count % 3 else jnp.asarray([1.0, -2.0, 0.5, 0.0])
        updates, state = update(gradient, state)
        chex.assert_tree_all_finite((updates, state))
        scale = np.asarray(preconditioner.scale(state), float)
        np.testing.assert_allclose(np.mean(scale**2), 1, rtol=1e-5)
        assert scale.min() > 0


@pytest.mark.parametrize("name", EXTREME)
def test_extreme_gradients_from_the_first(name):
    tx = optax_smile.scale_by_gradient_noise()
    extreme = jnp.asarray(EXTREME[name], jnp.float32)
    state, update = tx.init(extreme), jax.jit(tx.update)
    for count in range(300):
        updates, state = update(extreme * (-1) ** count, state)
        chex.assert_tree_all_finite((updates, state))
    np.testing.assert_allclose(np.mean(np.asarray(preconditioner.scale(state)) ** 2), 1, rtol=1e-5)


# The public transformation.


@pytest.mark.parametrize("centered", [True, False])
def test_public_transformation_divides_by_the_scale(centered):
    gradients = noisy_gradients(60, 8).astype(np.float32)
    tx = optax_smile.scale_by_gradient_noise(centered=centered)
    state, update = tx.init(jnp.zeros(8)), jax.jit(tx.update)
    for count, gradient in enumerate(gradients, start=1):
        updates, state = update(jnp.asarray(gradient), state)
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
        np.testing.assert_allclose(
            np.asarray(preconditioner.scale(state.preconditioner)), scale, rtol=1e-4
        )
        # A displacement has the length of the step in the scaled coordinates.
        np.testing.assert_allclose(np.linalg.norm(np.asarray(updates) * scale), 0.3, rtol=1e-4)
        params = optax.apply_updates(params, updates)


def test_first_step_of_the_preconditioned_sampler_is_steepest_descent():
    gradient = np.asarray([3.0, -1.0, 0.2, 40.0])
    tx = optax_smile.psmile_naive(0.3, num_data=1, prior_precision=0.0)
    updates, _ = tx.update(jnp.asarray(gradient), tx.init(jnp.zeros(4)), jnp.zeros(4))
    scale = slow_scale(gradient[None])
    whitened = gradient / scale
    expected = -0.3 * whitened / np.linalg.norm(whitened) / scale
    np.testing.assert_allclose(updates, expected, rtol=1e-5)


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e25])
@pytest.mark.parametrize("call", [0, 1, 20])
def test_public_transformation_forgets_a_non_finite_gradient(bad, call, centered):
    gradients = noisy_gradients(40, 5).astype(np.float32)
    tx = optax_smile.scale_by_gradient_noise(centered=centered)
    state, update = tx.init(jnp.zeros(5)), jax.jit(tx.update)
    for gradient in gradients[:call]:
        _, state = update(jnp.asarray(gradient), state)
    poisoned = jnp.asarray(gradients[call]).at[2].set(bad)
    updates, after = update(poisoned, state)
    chex.assert_trees_all_equal(after, state)
    # It passes through: whoever comes next in the chain sees what was given.
    assert np.isfinite(updates[2]) == np.isfinite(bad)
    chex.assert_tree_all_finite(jnp.delete(updates, 2))
