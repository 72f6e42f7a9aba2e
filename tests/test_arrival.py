"""Starts far from the mode, gradients that are absurd, and what a chain says of itself."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_smile
from optax_smile.stages import evidence, products

SAMPLERS = {"smile": optax_smile.smile, "psmile": optax_smile.psmile}
NUM_DATA, NUM_BATCHES = 500, 5
FEATURES = jnp.concatenate(
    [jax.random.normal(jax.random.key(0), (NUM_DATA, 4)), jnp.ones((NUM_DATA, 1))], axis=1
)
TARGETS = FEATURES @ jnp.array([1.0, -2.0, 0.5, 0.0, 0.0])
PRECISION = np.asarray(FEATURES.T @ FEATURES, float) + np.eye(5)
MEAN = np.linalg.solve(PRECISION, np.asarray(FEATURES.T @ TARGETS, float))
DEVIATION = np.sqrt(np.diag(np.linalg.inv(PRECISION)))


def mean_loss(params, rows):
    return jnp.mean((FEATURES[rows] @ params - TARGETS[rows]) ** 2) / 2


# Calls that a disturbance can change, and one that changes none.
NUM_DISTURBED = 3300
UNDISTURBED = np.ones(NUM_DISTURBED, np.float32), np.zeros(NUM_DISTURBED, np.float32)


@functools.cache
def chains(name, num_gradients):
    """A program of many chains: of keys, a start, factors and offsets of the gradients."""
    tx = SAMPLERS[name](num_data=NUM_DATA, key=0)

    def chain(key, start, factors, offsets):
        state: Any = tx.init(start)
        state = state._replace(key=jax.random.key_data(key))

        def call(carry, count):
            params, state = carry
            order = jax.random.permutation(jax.random.fold_in(key, count // NUM_BATCHES), NUM_DATA)
            rows = order.reshape(NUM_BATCHES, -1)[count % NUM_BATCHES]
            gradient = jax.grad(mean_loss)(params, rows) * factors[count] + offsets[count]
            updates, state = tx.update(gradient, state, params)
            params = optax.apply_updates(params, updates)
            told = optax_smile.stats(state)
            draw = optax_smile.last_accepted(state, params)
            return (params, state), (draw, told, jnp.linalg.norm(updates))

        return jax.lax.scan(call, (start, state), jnp.arange(num_gradients))[1]

    return jax.jit(jax.vmap(chain, in_axes=(0, None, None, None)))


def run(name, start, num_gradients, factors, offsets):
    """Draws `[chain, call, parameter]`, stats and path lengths; batches by permutations."""
    keys = jax.random.split(jax.random.key(1), 8)
    found = chains(name, num_gradients)(keys, jnp.asarray(start, jnp.float32), factors, offsets)
    return jax.tree.map(np.asarray, found)


@functools.cache
def undisturbed():
    return run("psmile", MEAN, NUM_DISTURBED, *UNDISTURBED)


@pytest.mark.parametrize("name", SAMPLERS)
def test_chains_from_zeros_arrive(name):
    """The first block of the README, 45 posterior deviations away.

    Pooled over 8 chains the deviations have a Monte Carlo error of a tenth, single ones half.
    """
    draws, stats, _ = run(name, np.zeros(5), 4000, np.ones(4000), np.zeros(4000))
    z = (np.asarray(draws, float)[:, 2000:] - MEAN) / DEVIATION
    assert np.abs(z.mean(axis=1)).max() < 0.3
    assert np.abs(z.mean(axis=(0, 1))).max() < 0.1
    assert np.sqrt(np.mean(z**2)) == pytest.approx(1, abs=0.2)
    told = np.asarray(stats["on_its_way"])
    # Before, it is told; and not any more afterwards.
    assert np.all(told[:, 100:600]) and not np.any(told[:, -300:])
    assert np.abs((np.asarray(draws)[:, 300] - MEAN) / DEVIATION).max(axis=1).min() > 10


@pytest.mark.parametrize("noise", [0.0, 0.5, 8.0])
def test_a_chain_that_has_arrived_is_silent(noise):
    """Of 100 chains from exact draws; a false alarm in less than one in a hundred at any call."""
    curvature = jnp.geomspace(0.2, 3.1, 6)
    tx = optax_smile.smile(num_data=1, prior_precision=0.0, key=0)

    def chain(key):
        params = jax.random.normal(key, (6,)) / jnp.sqrt(curvature)
        state: Any = tx.init(params)
        state = state._replace(key=jax.random.key_data(jax.random.fold_in(key, 0)))

        def call(carry, count):
            params, state = carry
            drawn = jax.random.normal(jax.random.fold_in(key, count), (6,))
            updates, state = tx.update(curvature * params + noise * drawn, state, params)
            told = optax_smile.stats(state)["on_its_way"]
            return (optax.apply_updates(params, updates), state), told

        return jax.lax.scan(call, (params, state), jnp.arange(1, 3001))[1]

    told = np.asarray(jax.jit(jax.vmap(chain))(jax.random.split(jax.random.key(2), 100)))
    assert told[:, 1000:].mean() < 0.01
    assert told[:, 20:].mean() < 0.02


@pytest.mark.parametrize("factor", [1e6, 1e15])
@pytest.mark.parametrize("at", [0, 1, 4, 9, 1000])
def test_an_absurd_gradient_is_forgotten(at, factor):
    factors, offsets = UNDISTURBED
    factors = np.where(np.arange(NUM_DISTURBED) == at, np.float32(factor), factors)
    _, stats, lengths = run("psmile", MEAN, NUM_DISTURBED, factors, offsets)
    _, clean, expected = undisturbed()
    after = at + 201
    ratio = stats["step_size"][:, after] / clean["step_size"][:, after]
    assert 1 / 1.5 < np.median(ratio) < 1.5
    path = np.sum(lengths[:, after : after + 2000], axis=1)
    assert 1 / 1.5 < np.median(path / np.sum(expected[:, after : after + 2000], axis=1)) < 1.5
    if at:
        counted = stats["num_outlying"][:, at] - stats["num_outlying"][:, at - 1]
        unfinished = stats["num_nonfinite"][:, at]
        assert np.all(counted + unfinished >= 1)


@pytest.mark.parametrize("tiny", [0.0, 1e-40])
def test_gradients_of_zero_do_not_throw_the_chain_out(tiny):
    factors, offsets = (x.copy() for x in UNDISTURBED)
    factors[:50], offsets[:50] = 0, tiny
    draws, stats, lengths = run("psmile", MEAN, NUM_DISTURBED, factors, offsets)
    _, clean, expected = undisturbed()
    z = (np.asarray(draws, float) - MEAN) / DEVIATION
    assert np.abs(z).max() < 8
    assert np.all(stats["num_outlying"][:, 49] == 50)
    # The run is that without them, fifty calls later.
    ratio = stats["step_size"][:, 250] / clean["step_size"][:, 200]
    assert 1 / 1.5 < np.median(ratio) < 1.5
    path = np.sum(lengths[:, 250:2250], 1) / np.sum(expected[:, 200:2200], 1)
    assert 1 / 1.5 < np.median(path) < 1.5


def test_a_flat_likelihood_is_sampled_all_the_same():
    """After some patience the gradients of the prior count, so that a chain can sample it."""
    tx = optax_smile.smile(num_data=10, prior_precision=4.0, key=0)
    params = jnp.ones(20)

    def call(carry, _):
        params, state = carry
        updates, state = tx.update(jnp.zeros(20), state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    path = jax.lax.scan(call, (params, tx.init(params)), length=20_000)[1]
    assert np.mean(np.asarray(path)[5000:] ** 2) == pytest.approx(0.25, rel=0.15)


def test_the_turn_rate_is_what_the_gradient_turns():
    """Of a gradient across u all, along it downhill little, uphill all."""
    sums = products.Sums(*(jnp.float32(x) for x in (1, 0, 16.0, 1, 1, *[0] * 5)))
    for cosine, share in ((0.0, 1.0), (0.6, 0.64), (1.0, 0.03), (-1.0, 1.0)):
        rate = evidence.turn_rate(sums, jnp.float32(cosine), 9)
        assert rate == pytest.approx(4 / 8 * share, rel=1e-5)
