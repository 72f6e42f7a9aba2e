"""Bias on a Gaussian with variances from 0.01 to 100 under strong gradient noise."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_smile

DIM, NUM_STEPS, NUM_CHAINS = 10, 200_000, 10
VARIANCES = np.logspace(-2, 2, DIM)
STEP_SIZES = jnp.array([0.01, 0.03, 0.1])
# The bias depends on how the target lies to the noise: between rotations the ratio of the two
# samplers goes from 0.16 to 0.56.
ROTATIONS = [
    np.linalg.qr(np.random.default_rng(seed).normal(size=(DIM, DIM)))[0] for seed in range(8)
]
COVARIANCES = np.stack([r.T @ np.diag(VARIANCES) @ r for r in ROTATIONS])


def squared_bias(sampler, noise_std):
    """b^2 of second moments, averaged over coordinates, chains and rotations, at the best step."""

    def second_moments(key, step_size, precision):
        tx = sampler(step_size, num_data=1, prior_precision=0.0, decoherence_length=None)

        def step(carry, key):
            params, state, moments = carry
            gradient = precision @ params + noise_std * jax.random.normal(key, (DIM,))
            updates, state = tx.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state, moments + params**2), None

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
    return np.mean((moments - exact) ** 2 / (2 * exact**2), axis=(0, 2, 3)).min()


@pytest.mark.nightly
def test_preconditioner_halves_the_bias_of_diagonal_noise():
    # Measured 0.11 against 0.37; 0.026 under isotropic noise, with a standard error of 0.002.
    noise = jnp.asarray(16 * np.sqrt(VARIANCES), jnp.float32)
    preconditioned = squared_bias(optax_smile.psmile, noise)
    assert preconditioned <= squared_bias(optax_smile.smile, noise) / 2
    assert squared_bias(optax_smile.psmile, 16 * jnp.ones(DIM)) <= 0.03
