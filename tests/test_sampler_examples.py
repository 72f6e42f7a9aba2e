"""`own_sampler.py` samples what it should, and `mile.py` finds known settings."""

from typing import Any

import jax
import jax.numpy as jnp
import mile
import numpy as np
import own_sampler
import pytest
import runs

import optax_smile

# Long loops of few numbers run twice as fast.
OPTIMIZED = True
# A test on a fresh seed would fail by chance once in 50,000 times for each of its statistics.
LIMIT = 4.5
PRECISIONS = np.geomspace(0.5, 2, 8)
STEP_SIZE, FRICTION = 0.05, 0.1
# Standard deviations of the gradient's noise; the larger one is as strong as the noise added.
NOISES = (0.0, np.sqrt(2 * FRICTION) / STEP_SIZE)


@pytest.mark.nightly
def test_own_sampler_on_a_gaussian_with_noise_of_unknown_strength():
    """Squares in units of the target's, and the thermostat, in standard errors of 128 chains.

    Chains start from the target; the first fifth is left out.
    """
    given: Any = {"num_data": 1, "prior_precision": 0.0, "friction": FRICTION}
    tx, precisions = own_sampler.sgnht(STEP_SIZE, **given), jnp.asarray(PRECISIONS, jnp.float32)

    def chain(noise, key):
        start_key, own_key, key = jax.random.split(key, 3)
        x = jax.random.normal(start_key, (len(PRECISIONS),)) / jnp.sqrt(precisions)

        def gradient(x, key):
            return precisions * x + noise * jax.random.normal(key, x.shape)

        def see(state, x, _):
            return jnp.mean(precisions * x**2), state.thermostat

        path = runs.follow(tx, own_key, x, gradient, jax.random.split(key, 5_000), see)
        return jax.tree.map(lambda values: values[1_000:].mean(), path)

    keys = jax.random.split(jax.random.key(1), (len(NOISES), 128))
    both = jax.jit(jax.vmap(jax.vmap(chain, in_axes=(None, 0))))
    squares, thermostats = both(jnp.asarray(NOISES, jnp.float32), keys)
    for noise, square, xi in zip(NOISES, squares, thermostats, strict=True):
        for values, expected in ((square, 1), (xi, FRICTION + STEP_SIZE**2 * noise**2 / 2)):
            error = np.std(values, ddof=1) / np.sqrt(len(values))
            assert abs(np.mean(values) - expected) < LIMIT * error < 0.01 * LIMIT * expected


def test_own_sampler_in_a_run():
    """Its chains have noise of their own, and take back a step to a gradient that is not finite."""

    def loss_fn(w, batch):
        return jnp.where(batch == 7, jnp.nan, 1.0) * jnp.sum(w**2) / 2

    batches = np.arange(20.0, dtype=np.float32)
    start = np.ones((2, 3), np.float32)
    given: Any = {"num_warmup": 0, "num_draws": 20, "key": 0, "check": False, "progress": False}
    tx = own_sampler.sgnht(0.1, num_data=1, key=0)
    draws = optax_smile.sample(loss_fn, start, batches, tx, **given)
    steps = np.diff(np.asarray(draws.params), axis=1)
    # The step that ended there is taken back: one draw is that of the call before.
    assert (np.abs(steps).max(axis=(0, 2)) == 0).sum() == 1
    assert np.all(draws.trace["num_nonfinite"][:, -1] == 1)
    # The first draw is the start.
    assert not np.any(draws.params[0][1:] == draws.params[1][1:])
    with pytest.warns(UserWarning, match="equal keys|the same"):
        states = jax.vmap(tx.init)(start)
        optax_smile.stats(states)


@pytest.mark.nightly
def test_tuning_of_mile():
    """Settings that BlackJAX finds on a Gaussian: 11.9 and 8.3 in the mean of 16 seeds.

    Energy errors grow with the third power of the step size, so that another target gives another.
    """

    def tune(variance):
        given: Any = {"num_data": 1, "prior_precision": 0.0, "key": jax.random.key(1)}
        given |= {"phases": (1 / 3, 1 / 3, 1 / 3), "energy_variance": (variance, variance)}
        return mile.tune(lambda x: jnp.sum(x**2) / 2, jnp.ones(100), 2_000, **given)

    found = jax.jit(jax.vmap(tune))(jnp.array([5e-4, 5e-4 / 64]))
    np.testing.assert_allclose(found.step_size, [12.2, 6.1], rtol=0.15)
    np.testing.assert_allclose(found.decoherence_length[0], 8.2, rtol=0.15)
