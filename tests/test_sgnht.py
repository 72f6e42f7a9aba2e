"""The Nosé-Hoover thermostat: its formula, and that it absorbs noise of unknown strength."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import runs
from test_langevin import FACTORS, SIZE, build, follow, textbook

import optax_smile

with warnings.catch_warnings():
    # Version 0.23 announces the next one.
    warnings.simplefilter("ignore", FutureWarning)
    import arviz

# Long loops of few numbers run twice as fast.
OPTIMIZED = True
# A test on a fresh seed would fail by chance once in 50,000 times for each of its statistics.
LIMIT = 4.5
PRECISIONS = np.geomspace(0.5, 2, 8)
STEP_SIZE, FRICTION = 0.05, 0.1
# Standard deviations of the gradient's noise; the larger one is as strong as the noise added.
NOISES = (0.0, np.sqrt(2 * FRICTION) / STEP_SIZE)


def test_algorithm_2_of_ding_with_changing_step_sizes():
    """With the kinetic energy taken halfway through the friction, which is at most one.

    A step of no length leaves the thermostat as it is, and the next one starts from rest.
    """
    friction, sizes = 0.4, 0.25 * FACTORS[:40]
    sizes[[10, 11, 25]] = 0
    velocity, xi = np.zeros(SIZE), [friction]

    def move(call, gradient, history, z):
        nonlocal velocity
        eps = sizes[call]
        velocity = (1 - xi[-1]) * velocity * (call == 0 or sizes[call - 1] > 0)
        velocity = velocity - eps * gradient + np.sqrt(2 * friction) * z
        kinetic = (1 - xi[-1] / 2) * np.mean(velocity**2)
        xi.append(min(1, xi[-1] + eps**2 * (kinetic - 1)))
        return eps * velocity

    trace = follow(build("sgnht", lambda count: jnp.asarray(sizes)[count], friction=friction), 40)
    moved = np.any(np.diff(trace.positions, axis=0) != 0, axis=1)
    np.testing.assert_array_equal(moved, sizes > 0)
    np.testing.assert_allclose(trace.positions, textbook(move, trace.noise), rtol=1e-9)
    thermostats = [float(state.dynamics.memory.thermostat) for state in trace.states]
    np.testing.assert_allclose(thermostats, xi, rtol=1e-9)
    assert 1 in xi


def chains(num_chains, num_steps, every=10):
    """Squares in units of the target's, `[noise, chain, draw, d]`, and the states at the draws.

    Chains start from the target; the first fifth is left out.
    """
    options: Any = {"num_data": 1, "prior_precision": 0.0, "friction": FRICTION, "key": 0}
    tx: Any = optax_smile.sgnht(STEP_SIZE, **options)
    precisions = jnp.asarray(PRECISIONS, jnp.float32)

    def chain(noise, key):
        start_key, own_key, key = jax.random.split(key, 3)
        x = jax.random.normal(start_key, (len(PRECISIONS),)) / jnp.sqrt(precisions)

        def gradient(x, key):
            return precisions * x + noise * jax.random.normal(key, x.shape)

        def see(state, x, _):
            return precisions * x**2, state.dynamics.memory

        path = runs.follow(tx, own_key, x, gradient, jax.random.split(key, num_steps), see)
        return jax.tree.map(lambda values: values[num_steps // 5 :: every], path)

    keys = jax.random.split(jax.random.key(1), (len(NOISES), num_chains))
    both = jax.jit(jax.vmap(jax.vmap(chain, in_axes=(None, 0))))
    found = both(jnp.asarray(NOISES, jnp.float32), keys)
    return jax.tree.map(lambda values: np.asarray(values, float), found)


def in_standard_errors(values, expected):
    """How far the mean of `[chain, draw]` is off, by the chains' own effective sample size."""
    size = arviz.ess(values, method="mean")
    error = values.std() / np.sqrt(size)
    assert error < 0.01 * expected
    return (values.mean() - expected) / error


def test_variance_and_friction_with_noise_of_unknown_strength():
    squares, memory = chains(num_chains=128, num_steps=5_000)
    for noise, square, thermostat in zip(NOISES, squares, memory.thermostat, strict=True):
        assert abs(in_standard_errors(square.mean(axis=-1), 1)) < LIMIT
        friction = FRICTION + STEP_SIZE**2 * noise**2 / 2
        assert abs(in_standard_errors(thermostat, friction)) < LIMIT
        # Of the linear equations of xi and of the velocity's square about their means; what is
        # left out are squares of the relative deviation of xi, 3 % and 1 %.
        factor = (2 - 2 * friction + friction**2) / (2 - friction)
        deviation = STEP_SIZE * np.sqrt(factor / len(PRECISIONS))
        np.testing.assert_allclose(thermostat.std(), deviation, rtol=0.03)
