"""Microcanonical Langevin Monte Carlo with full-batch gradients, and its tuning."""

from typing import Any

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from test_momentum import (
    CALLS_PER_STEP,
    INTEGRATORS,
    REFERENCE_INTEGRATORS,
    banana,
    banana_start,
    plain,
    textbook_kick,
)

import optax_smile
from optax_smile import _tree
from optax_smile.samplers.tune_mclmc import _steps_per_draw

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


@pytest.mark.parametrize("sampler", ["mclmc", "smile"])
@pytest.mark.parametrize("integrator", INTEGRATORS)
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


# The tuning.


def isotropic(x):
    return jnp.sum(x**2) / 2


def ill_conditioned(x):
    return jnp.sum(x**2 / jnp.asarray(np.logspace(-2, 2, 10), x.dtype)) / 2


def tune(loss_fn, key, start, **options):
    common: dict[str, Any] = {"num_data": 1, "prior_precision": 0.0, "num_steps": 9_000}
    return optax_smile.tune_mclmc(loss_fn, start, key=key, **common | options)


def tuned_by_blackjax(loss_fn, integrator, start, key):
    def log_density(x):
        return -loss_fn(x)

    start_key, key = jax.random.split(key)
    kernel = blackjax.mclmc.build_kernel(integrator=REFERENCE_INTEGRATORS[integrator])
    thirds: Any = dict.fromkeys(["frac_tune1", "frac_tune2", "frac_tune3"], 1 / 3)
    _, found, _ = blackjax.mclmc_find_L_and_step_size(
        mclmc_kernel=kernel, logdensity_fn=log_density, num_steps=9_000, rng_key=key,
        state=blackjax.mclmc.init(start, log_density, start_key), diagonal_preconditioning=False,
        **thirds,
    )  # fmt: skip
    return found.step_size, found.L


@pytest.mark.nightly
@pytest.mark.parametrize(
    "loss_fn, size, integrator, factor, length_factor",
    [
        # Measured: step sizes 12.3 and 11.9, 0.213 and 0.212; lengths 8.21 and 8.29, 9.8 and 9.6.
        (isotropic, 100, "minimal_norm", 1.07, 1.45),
        (ill_conditioned, 10, "leapfrog", 1.2, 1.45),
    ],
)
def test_tuned_settings_are_those_of_blackjax(loss_fn, size, integrator, factor, length_factor):
    """Means of logarithms over 16 seeds; each factor is at least 4 of their standard errors."""
    start, keys = jnp.ones(size), jax.random.split(jax.random.key(0), (2, 16))
    found = jax.vmap(lambda key: tune(loss_fn, key, start, integrator=integrator)[:2])(keys[0])
    other = jax.vmap(lambda key: tuned_by_blackjax(loss_fn, integrator, start, key))(keys[1])
    ours, theirs = (np.log(np.array(x, float)) for x in (found, other))
    standard_errors = np.sqrt((ours.var(axis=1, ddof=1) + theirs.var(axis=1, ddof=1)) / 16)
    bounds = np.log([factor, length_factor])
    assert np.all(4 * standard_errors < bounds)
    assert np.all(abs(ours.mean(axis=1) - theirs.mean(axis=1)) < bounds)


def test_tuning_finds_the_same_settings_from_everywhere():
    """The same energy in other units, the mode, and a first step that is 2,400 times too short.

    U = (num_data loss + precision / 2 |x|^2) / temperature has unit variance in all cases. Energy
    errors grow with the third power of the step size, so that another aim gives another.
    """
    cases: Any = {
        "num_data": jnp.array([1.0, 1.0, 12.0, 1.0]),
        "prior_precision": jnp.array([0.0, 0.0, 8.0, 0.0]),
        "temperature": jnp.array([1.0, 1.0, 20.0, 1.0]),
        "energy_variance": jnp.array([5e-4, 5e-4, 5e-4, 5e-4 / 64]),
    }
    starts = jnp.ones((4, 100)).at[1].set(0)

    def one(start, options):
        return tune(isotropic, jax.random.key(1), start, num_steps=2_000, **options)

    settings = jax.jit(jax.vmap(one))(starts, cases)
    found = np.array([settings.step_size, settings.decoherence_length]).T
    # What 9,000 steps from elsewhere come to, and BlackJAX with them.
    np.testing.assert_allclose(found[:3], [[12.2, 8.2]] * 3, rtol=0.15)
    np.testing.assert_allclose(found[0, 0] / found[3, 0], 2, rtol=0.15)


def test_a_loss_that_is_nan_far_out():
    """The first step size is a hundred times too long, and ends where there is no loss.

    The settings have the tree and the precision of the start.
    """
    unit_length, border, size = 3e-3, 5.0, 10

    def loss_fn(tree):
        x = jnp.concatenate([tree["x"], tree["y"][0].ravel()]) / unit_length
        return jnp.where(jnp.linalg.norm(x) < border, jnp.sum(x**2) / 2, jnp.nan)

    options = {"integrator": "leapfrog", "num_steps": 3_000, "first_step_size": 1.0}
    with jax.enable_x64(True):
        start = {"x": jnp.full(4, unit_length), "y": (jnp.full((2, 3), unit_length),)}
        settings = tune(loss_fn, jax.random.key(0), start, **options)
        assert jax.tree.structure(settings.params) == jax.tree.structure(start)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(settings)} == {"float64"}
        radius = np.linalg.norm(ravel_pytree(settings.params)[0]) / unit_length
    # Without a border 1.8 units for the step and 3.1 for the length.
    step_size, length = (float(x) / unit_length for x in settings[:2])
    assert 0.9 < step_size < 7 and 1 < length < 7
    assert 0.5 < radius < border
    assert abs(radius - np.sqrt(size)) > 1e-3, "the chain has not left its start"


def test_tuning_does_not_depend_on_where_the_posterior_lies():
    """The number of steps per independent draw is that of centred draws."""
    draws = jnp.cumsum(jax.random.normal(jax.random.key(0), (300, 4)), axis=0)
    near = _steps_per_draw(draws - draws.mean(axis=0, keepdims=True))
    np.testing.assert_allclose(_steps_per_draw(draws + 100), near, rtol=1e-2)
