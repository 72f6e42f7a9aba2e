"""Bias on a Gaussian with variances from 0.01 to 100 under strong explicit gradient noise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_smile

DIM = 10
NUM_STEPS = 200_000
NUM_CHAINS = 10
VARIANCES = np.logspace(-2, 2, DIM)
STEP_SIZES = jnp.array([0.01, 0.03, 0.1])
NOISE = {"isotropic": 16 * np.ones(DIM), "diagonal": 16 * np.sqrt(VARIANCES)}
# The bias depends on how the target lies to the noise: the mean over several rotations does not
# hang on the luck of one. Between them the ratio of the two samplers goes from 0.16 to 0.56.
ROTATIONS = [
    np.linalg.qr(np.random.default_rng(seed).normal(size=(DIM, DIM)))[0] for seed in range(8)
]
COVARIANCES = np.stack([r.T @ np.diag(VARIANCES) @ r for r in ROTATIONS])


@functools.cache
def squared_biases(sampler, noise):
    """b^2 of second moments, averaged over coordinates, chains and rotations, `[step size]`."""
    noise_std = jnp.asarray(NOISE[noise], jnp.float32)

    def second_moments(key, step_size, precision):
        tx = sampler(step_size, num_data=1, prior_precision=0.0)

        def step(carry, key):
            params, state, moments = carry
            gradient = precision @ params + noise_std * jax.random.normal(key, (DIM,))
            updates, state = tx.update(gradient, state, params)
            moments += params**2
            return (optax.apply_updates(params, updates), state, moments), None

        start = jnp.zeros(DIM)
        keys = jax.random.split(key, NUM_STEPS)
        (_, _, moments), _ = jax.lax.scan(step, (start, tx.init(start), start), keys)
        return moments / NUM_STEPS

    precisions = jnp.asarray(np.linalg.inv(COVARIANCES), jnp.float32)
    keys = jax.random.split(jax.random.key(0), (len(ROTATIONS), NUM_CHAINS))
    run = jax.vmap(second_moments, (0, None, None))
    run = jax.vmap(jax.vmap(run, (None, 0, None)), (0, None, 0))
    moments = jax.jit(run)(keys, STEP_SIZES, precisions)
    exact = np.diagonal(COVARIANCES, axis1=1, axis2=2)[:, None, None]
    return np.mean((moments - exact) ** 2 / (2 * exact**2), axis=(0, 2, 3))


@pytest.mark.parametrize(
    "sampler",
    [
        pytest.param(optax_smile.smile_naive, marks=pytest.mark.nightly),
        pytest.param(optax_smile.psmile_naive, marks=pytest.mark.slow),
    ],
)
def test_small_bias_under_isotropic_noise(sampler):
    # Measured 0.026; over 80 chains the standard error is about 0.002.
    assert squared_biases(sampler, "isotropic").min() <= 0.03


@pytest.mark.slow
def test_preconditioner_halves_the_bias_of_diagonal_noise():
    # Measured 0.11 against 0.37.
    preconditioned = squared_biases(optax_smile.psmile_naive, "diagonal").min()
    plain = squared_biases(optax_smile.smile_naive, "diagonal").min()
    assert preconditioned <= plain / 2
