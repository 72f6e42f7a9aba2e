"""Microcanonical Langevin Monte Carlo with full-batch gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from test_momentum import (
    CALLS_PER_STEP,
    banana,
    banana_start,
    plain,
    textbook_kick,
)

import optax_smile
from optax_smile import _tree

FIRST_KICK = 0.1931833275037836
SCHEMES = {
    "leapfrog": ((0.5, 0.5), (1.0,)),
    "minimal_norm": ((FIRST_KICK, 1 - 2 * FIRST_KICK, FIRST_KICK), (0.5, 0.5)),
}
PRECISIONS = {"x": 0.5, "y": 3.0, "last": 0.0}
POSTERIOR: Any = {"num_data": 12.0, "prior_precision": PRECISIONS, "temperature": 1.7}
BATCHES = np.random.default_rng(8).standard_normal((41, 8)) / 3


def loss_fn(params, batch):
    return banana(params) / 12 + jnp.sum(jnp.cosh(ravel_pytree(params)[0] - batch)) / 12


def energy(params, batch):
    """U of that mean loss under `POSTERIOR`."""
    prior = sum(PRECISIONS[name] * jnp.sum(x**2) / 2 for name, x in params.items())
    return (12 * loss_fn(params, batch) + prior) / 1.7


def follow(tx, params):
    """Positions, gradients and values of U, noise drawn and energy changes, by call."""

    def call(carry, batch):
        params, state = carry
        loss, loss_gradient = jax.value_and_grad(loss_fn)(params, batch)
        updates, after = tx.update(loss_gradient, state, params, value=loss)
        noise = jax.tree.map(jnp.zeros_like, params)
        if state.key is not None:
            noise = _tree.isotropic_like(jax.random.split(state.key)[1], params)
        value, gradient = jax.value_and_grad(energy)(params, batch)
        flat = [ravel_pytree(tree)[0] for tree in (params, gradient, noise)]
        seen = *flat, value, optax_smile.stats(after).energy_change
        return (optax.apply_updates(params, updates), after), seen

    run = jax.jit(lambda *start: jax.lax.scan(call, start, jnp.asarray(BATCHES))[1])
    return [np.asarray(leaf) for leaf in run(params, tx.init(params))]


def textbook(integrator, step_size, length, calls):
    """Positions and energy errors from the gradients and the noise of the calls, in NumPy."""
    kicks, drifts = SCHEMES[integrator]
    position, size = calls[0][0], calls[0].shape[1]
    nu = np.sqrt((np.exp(2 * step_size / length) - 1) / size)
    u, stage, kinetic, opening_value = None, len(drifts), 0.0, 0.0
    for _, gradient, noise, value, _ in zip(*calls, strict=True):
        change = np.nan
        if u is not None:
            u, gain = textbook_kick(u, gradient, kicks[stage] * step_size)
            kinetic += gain
        if stage == len(drifts):
            if u is not None:
                change = kinetic + value - opening_value
                u = (u + nu * noise) / np.linalg.norm(u + nu * noise)
            elif noise.any():
                u = noise / np.linalg.norm(noise)
            stage, opening_value = 0, value
            if u is None:
                # From rest the first kick goes straight down, and gains as if across.
                u, delta = -gradient / np.linalg.norm(gradient), kicks[0] * step_size
                delta *= np.linalg.norm(gradient) / (size - 1)
                kinetic = (size - 1) * np.log(np.cosh(delta))
            else:
                u, kinetic = textbook_kick(u, gradient, kicks[0] * step_size)
        yield position, change
        position = position + drifts[stage] * step_size * u
        stage += 1


@pytest.mark.parametrize(
    ("integrator", "sampler"), [("minimal_norm", "mclmc"), ("leapfrog", "smile")]
)
def test_trajectory_and_energies_are_those_of_the_textbook(integrator, sampler):
    """A batch of its own for each gradient, and a prior for each leaf.

    MCLMC starts in a random direction, SMILE from rest; noise is no part of an energy error.
    """
    options: Any = POSTERIOR | {"integrator": integrator}
    with jax.enable_x64(True):
        length, tx = np.inf, plain(0.15, **options)
        if sampler == "mclmc":
            length = 0.4
            tx = optax_smile.mclmc(0.15, decoherence_length=length, key=4, **options)
        calls = follow(tx, banana_start())
    positions, changes = zip(*textbook(integrator, 0.15, length, calls), strict=True)
    np.testing.assert_allclose(calls[0], positions, rtol=0, atol=1e-11)
    np.testing.assert_allclose(calls[-1], changes, rtol=0, atol=1e-10)
    assert np.isfinite(changes).sum() == 40 // CALLS_PER_STEP[integrator]
    assert np.ptp(calls[0], axis=0).min() > 0.1


def test_a_start_at_the_mode_moves():
    """Along the random direction; two gradients per step are the default."""
    tx = optax_smile.mclmc(0.3, num_data=1, decoherence_length=1.0, key=jax.random.key(0))
    mode = jnp.zeros(4)
    updates: Any = jax.jit(tx.update)(mode, tx.init(mode), mode)[0]
    np.testing.assert_allclose(np.linalg.norm(updates), 0.15, rtol=1e-6)
