"""Starts far from the mode, zero gradients, and the statistics of the chain."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import follow

import optax_smile

pytestmark = pytest.mark.slow
# Slow tests compile with optimizations; this also applies to their fixture.
OPTIMIZED = True
NUM_DATA, NUM_BATCHES, NUM_CHAINS, NUM_GRADIENTS = 500, 5, 8, 4000
FEATURES = jnp.concatenate(
    [jax.random.normal(jax.random.key(0), (NUM_DATA, 4)), jnp.ones((NUM_DATA, 1))], axis=1
)
TARGETS = FEATURES @ jnp.array([1.0, -2.0, 0.5, 0.0, 0.0])
PRECISION = np.asarray(FEATURES.T @ FEATURES, float) + np.eye(5)
MEAN = np.linalg.solve(PRECISION, np.asarray(FEATURES.T @ TARGETS, float))
DEVIATION = np.sqrt(np.diag(np.linalg.inv(PRECISION)))

# Start, factors and offsets of the gradients; the last two of the first 50, which are zero.
ONE, ZERO, CALL = np.ones(NUM_GRADIENTS), np.zeros(NUM_GRADIENTS), np.arange(NUM_GRADIENTS)
TINY = (0.0, 1e-40)
RUNS: dict[Any, Any] = {
    "from zeros": (np.zeros(5), ONE, ZERO),
    "undisturbed": (MEAN, ONE, ZERO),
    **{tiny: (MEAN, 1.0 * (CALL >= 50), tiny * (CALL < 50)) for tiny in TINY},
}


def mean_loss(params, rows):
    return jnp.mean((FEATURES[rows] @ params - TARGETS[rows]) ** 2) / 2


def seen(state, draw, updates):
    return draw, optax_smile.stats(state), jnp.linalg.norm(updates)


@pytest.fixture(scope="module")
def told():
    """For each run: draws `[chain, call, parameter]`, statistics and path lengths."""
    tx = optax_smile.psmile(num_data=NUM_DATA, key=0)

    def chain(key, start, factors, offsets):
        def gradient(params, count):
            order = jax.random.permutation(jax.random.fold_in(key, count // NUM_BATCHES), NUM_DATA)
            rows = order.reshape(NUM_BATCHES, -1)[count % NUM_BATCHES]
            return jax.grad(mean_loss)(params, rows) * factors[count] + offsets[count]

        return follow(tx, key, start, gradient, CALL, seen)

    keys = jax.random.split(jax.random.key(1), NUM_CHAINS)
    given = [np.stack(x).astype(np.float32) for x in zip(*RUNS.values(), strict=True)]
    program = jax.jit(jax.vmap(jax.vmap(chain, (0, None, None, None)), (None, 0, 0, 0)))
    found = jax.tree.map(np.asarray, program(keys, *given))
    return {run: jax.tree.map(lambda x, i=i: x[i], found) for i, run in enumerate(RUNS)}


def test_chains_from_zeros_arrive(told):
    """The first block of the README, 45 posterior deviations away.

    Pooled over 8 chains the deviations have a Monte Carlo error of a tenth, single ones half.
    """
    draws, stats, _ = told["from zeros"]
    z = (np.asarray(draws, float)[:, 2000:] - MEAN) / DEVIATION
    assert np.abs(z.mean(axis=1)).max() < 0.3
    assert np.abs(z.mean(axis=(0, 1))).max() < 0.1
    assert np.sqrt(np.mean(z**2)) == pytest.approx(1, abs=0.2)
    # `on_its_way` is true until the chain has arrived.
    assert np.all(stats.on_its_way[:, 30:150]) and not np.any(stats.on_its_way[:, -300:])
    distance = np.abs((draws - MEAN) / DEVIATION).max(axis=2)
    assert distance[:, 100].min() > 10 and distance[:, 300].max() < 6


@pytest.mark.nightly
def test_a_chain_that_has_arrived_is_silent():
    """100 chains from exact draws; at any call, less than one in a hundred is a false alarm."""
    curvature = jnp.geomspace(0.2, 3.1, 6)
    tx = optax_smile.smile(num_data=1, prior_precision=0.0, key=0)

    def chain(noise, key):
        def gradient(params, count):
            drawn = jax.random.normal(jax.random.fold_in(key, count), (6,))
            return curvature * params + noise * drawn

        params, own = jax.random.normal(key, (6,)) / jnp.sqrt(curvature), jax.random.fold_in(key, 0)
        return follow(tx, own, params, gradient, jnp.arange(1, 3001), seen)[1].on_its_way

    program = jax.jit(jax.vmap(jax.vmap(chain, (None, 0)), (0, None)))
    keys = jax.random.split(jax.random.key(2), 100)
    told = np.asarray(program(jnp.array([0.0, 0.5, 8.0]), keys))
    assert told[:, :, 1000:].mean(axis=(1, 2)).max() < 0.01
    assert told[:, :, 20:].mean(axis=(1, 2)).max() < 0.02


def test_gradients_of_zero_do_not_throw_the_chain_out(told):
    """Fifty calls later, the run equals one without them. Extremes: `faults/test_injections.py`.

    Step sizes are compared after the windows, which zeros delay, have shown the width.
    """
    _, clean, expected = told["undisturbed"]
    for tiny in TINY:
        draws, stats, lengths = told[tiny]
        assert np.abs((np.asarray(draws, float) - MEAN) / DEVIATION).max() < 8
        assert np.all(stats.num_outlying[:, 49] == 50)
        ratio = stats.step_size[:, 450] / clean.step_size[:, 400]
        path = lengths[:, 250:2250].sum(axis=1) / expected[:, 200:2200].sum(axis=1)
        for one in (ratio, path):
            assert 1 / 1.5 < np.median(one) < 1.5, tiny


@pytest.mark.nightly
def test_a_flat_likelihood_is_sampled_all_the_same():
    """After some patience the gradients of the prior count, so that a chain can sample it."""
    tx, key = optax_smile.smile(num_data=10, prior_precision=4.0, key=0), jax.random.key(0)
    draws = follow(tx, key, jnp.ones(20), lambda *_: jnp.zeros(20), jnp.arange(20_000))
    assert np.mean(np.asarray(draws)[5000:] ** 2) == pytest.approx(0.25, rel=0.15)
