"""Microcanonical Langevin Monte Carlo with full-batch gradients, and its tuning."""

import functools
from typing import Any, NamedTuple

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_momentum import (
    CALLS_PER_STEP,
    INTEGRATORS,
    REFERENCE_INTEGRATORS,
    banana,
    banana_start,
    moving_along,
    textbook_kick,
    unit,
)

import optax_smile
from optax_smile import _tree
from optax_smile.samplers.tune_mclmc import _steps_per_draw

MINIMAL_NORM_KICK = 0.1931833275037836
SCHEMES = {
    "leapfrog": ((0.5, 0.5), (1.0,)),
    "minimal_norm": (
        (MINIMAL_NORM_KICK, 1 - 2 * MINIMAL_NORM_KICK, MINIMAL_NORM_KICK),
        (0.5, 0.5),
    ),
}
every_integrator = pytest.mark.parametrize("integrator", INTEGRATORS)


def flat(tree):
    return np.concatenate([np.ravel(np.asarray(leaf)) for leaf in jax.tree.leaves(tree)])


class Call(NamedTuple):
    position: np.ndarray
    gradient: np.ndarray
    noise: Any
    value: float
    stats: dict[str, Any]


def follow(tx, num_gradients, params, state=None):
    """What each call was given, and the noise that it drew; without jit, in float64."""
    state, calls = tx.init(params) if state is None else state, []
    value_and_grad = jax.jit(jax.value_and_grad(banana))
    for _ in range(num_gradients):
        value, grads = value_and_grad(params)
        noise = None
        if state.key is not None:
            noise = flat(_tree.isotropic_like(jax.random.split(state.key, 3)[1], params))
        updates, state = tx.update(grads, state, params, value=value)
        told = optax_smile.stats(state)
        calls.append(Call(flat(params), flat(grads), noise, float(value), told))
        params = optax.apply_updates(params, updates)
    return calls


# The sampler.


@every_integrator
def test_it_is_smile_naive(integrator):
    options = {
        "step_size": 0.2,
        "num_data": 3,
        "temperature": 2.0,
        "integrator": integrator,
        "decoherence_length": 1.5,
        "key": jax.random.key(2),
    }
    with jax.enable_x64(True):
        got, expected = (
            follow(sampler(**options), 9, banana_start())
            for sampler in (optax_smile.mclmc, optax_smile.smile_naive)
        )
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one.position, other.position)
        assert one.stats == other.stats or np.isnan(one.stats["energy_change"])
    assert np.ptp([call.position for call in got], axis=0).min() > 0


def test_its_default_is_the_published_integrator():
    params = jnp.ones(3)
    tx: Any = optax_smile.mclmc(0.1, num_data=1, decoherence_length=1.0, key=jax.random.key(0))
    assert tx.init(params).gradients_per_step == 2


@every_integrator
def test_smile_without_noise_and_with_full_batches_is_mclmc(integrator):
    """An endless decoherence length adds no noise, and SMILE without tuner or outliers none."""
    common = {"num_data": 1, "prior_precision": 0.0, "integrator": integrator}
    direction = unit(np.random.default_rng(1), 8)
    with jax.enable_x64(True):
        params: Any = banana_start()
        leaves, structure = jax.tree.flatten(params)
        parts = np.split(direction, np.cumsum([leaf.size for leaf in leaves])[:-1])
        along = [jnp.asarray(x).reshape(leaf.shape) for x, leaf in zip(parts, leaves, strict=True)]
        along = jax.tree.unflatten(structure, along)
        mclmc: Any = optax_smile.mclmc(
            0.2, decoherence_length=1e300, key=jax.random.key(0), **common
        )
        smile: Any = optax_smile.smile(0.2, tuner=None, decoherence_length=None, key=None, **common)
        noisy: Any = optax_smile.mclmc(0.2, decoherence_length=1e3, key=jax.random.key(0), **common)
        runs = [
            follow(tx, 30, params, moving_along(tx.init(params), along))
            for tx in (mclmc, smile, noisy)
        ]
        ours, smiles, others = ([call.position for call in run] for run in runs)
    np.testing.assert_allclose(ours, smiles, rtol=0, atol=1e-11)
    assert np.abs(np.subtract(others, smiles))[-1].max() > 1e-3
    changes = [[call.stats["energy_change"] for call in run] for run in runs]
    np.testing.assert_allclose(changes[0], changes[1], rtol=0, atol=1e-10)


def textbook(integrator, step_size, length, calls):
    """Positions and energy errors from the gradients and the noise of the calls, in NumPy."""
    kicks, drifts = SCHEMES[integrator]
    position = calls[0].position
    nu = np.sqrt((np.exp(2 * step_size / length) - 1) / position.size)
    u, stage, kinetic, opening_value = None, 0, 0.0, 0.0
    for call in calls:
        change = np.nan
        if u is None:
            u, stage = call.noise / np.linalg.norm(call.noise), 0
        else:
            u, gain = textbook_kick(u, call.gradient, kicks[stage] * step_size)
            kinetic += gain
            if stage == len(drifts):
                change, stage = kinetic + call.value - opening_value, 0
                u = (u + nu * call.noise) / np.linalg.norm(u + nu * call.noise)
        if stage == 0:
            u, kinetic = textbook_kick(u, call.gradient, kicks[0] * step_size)
            opening_value = call.value
        yield position, change
        position = position + drifts[stage] * step_size * u
        stage += 1


@every_integrator
def test_trajectory_and_energies_are_those_of_the_textbook(integrator):
    """It starts in a random direction; the noise is no part of any step's energy error."""
    step_size, length, num_gradients = 0.15, 0.4, 25
    with jax.enable_x64(True):
        tx = optax_smile.mclmc(
            step_size,
            num_data=1,
            prior_precision=0.0,
            decoherence_length=length,
            integrator=integrator,
            key=jax.random.key(4),
        )
        calls = follow(tx, num_gradients, banana_start())
    expected = list(textbook(integrator, step_size, length, calls))
    np.testing.assert_allclose(
        [call.position for call in calls], [x for x, _ in expected], rtol=0, atol=1e-11
    )
    np.testing.assert_allclose(
        [call.stats["energy_change"] for call in calls],
        [change for _, change in expected],
        rtol=0,
        atol=1e-10,
    )
    per_step = CALLS_PER_STEP[integrator]
    assert np.isfinite([change for _, change in expected]).sum() == (num_gradients - 1) // per_step


def test_a_start_at_the_mode_moves():
    tx = optax_smile.mclmc(0.3, num_data=1, decoherence_length=1.0, key=jax.random.key(0))
    mode = jnp.zeros(4)
    updates: Any = tx.update(mode, tx.init(mode), mode)[0]
    np.testing.assert_allclose(np.linalg.norm(updates), 0.15, rtol=1e-6)


# The tuning.

VARIANCES = np.logspace(-2, 2, 10)


def isotropic(x):
    return jnp.sum(x**2) / 2


def ill_conditioned(x):
    return jnp.sum(x**2 / jnp.asarray(VARIANCES, x.dtype)) / 2


def five_bananas(z):
    x, y = z[:5], z[5:]
    return jnp.sum((x**2 - y) ** 2 / 0.1 + (x - 1) ** 2) / 2


SIZES = {isotropic: 100, ill_conditioned: 10, five_bananas: 10}
NUM_SEEDS, NUM_STEPS = 16, 9_000


def tune(loss_fn, key, start=None, **options):
    start = jnp.ones(SIZES[loss_fn]) if start is None else start
    common: dict[str, Any] = {"num_data": 1, "prior_precision": 0.0, "num_steps": NUM_STEPS}
    return optax_smile.tune_mclmc(loss_fn, start, key=key, **common | options)


@functools.cache
def tuned(loss_fn, integrator):
    keys = jax.random.split(jax.random.key(0), NUM_SEEDS)
    return jax.vmap(lambda key: tune(loss_fn, key, integrator=integrator))(keys)


def tuned_by_blackjax(loss_fn, integrator):
    def log_density(x):
        return -loss_fn(x)

    def one(key):
        start_key, key = jax.random.split(key)
        start = jnp.ones(SIZES[loss_fn])
        _, found, _ = blackjax.mclmc_find_L_and_step_size(
            mclmc_kernel=blackjax.mclmc.build_kernel(integrator=REFERENCE_INTEGRATORS[integrator]),
            logdensity_fn=log_density,
            num_steps=NUM_STEPS,
            state=blackjax.mclmc.init(start, log_density, start_key),
            rng_key=key,
            diagonal_preconditioning=False,
            frac_tune1=1 / 3,
            frac_tune2=1 / 3,
            frac_tune3=1 / 3,
        )
        return found.step_size, found.L

    return jax.vmap(one)(jax.random.split(jax.random.key(1), NUM_SEEDS))


@pytest.mark.slow
@every_integrator
@pytest.mark.parametrize("loss_fn, factor", [(isotropic, 1.07), (ill_conditioned, 1.2)])
def test_tuned_gaussians_are_those_of_blackjax(loss_fn, factor, integrator):
    # Measured: step sizes 6.32 and 6.26, 12.3 and 11.9 (isotropic), 0.213 and 0.212, 0.509 and
    # 0.493; decoherence lengths 9.66 and 9.65, 8.21 and 8.29, 9.8 and 9.6, 11.0 and 12.2.
    assert_tuned_as_blackjax(loss_fn, integrator, factor, length_factor=max(factor, 1.45))


@pytest.mark.slow
@pytest.mark.parametrize(
    "integrator", [pytest.param("leapfrog", marks=pytest.mark.nightly), "minimal_norm"]
)
def test_tuned_banana_is_that_of_blackjax(integrator):
    # Measured: step sizes 0.139 and 0.141, 0.321 and 0.300; lengths 12.1 and 11.0, 13.8 and 13.1.
    assert_tuned_as_blackjax(five_bananas, integrator, factor=1.5, length_factor=1.7)


def assert_tuned_as_blackjax(loss_fn, integrator, factor, length_factor):
    """Means of logarithms over 16 seeds; each factor is at least 4 of their standard errors."""
    ours, theirs = tuned(loss_fn, integrator), tuned_by_blackjax(loss_fn, integrator)
    ours = ours.step_size, ours.decoherence_length
    for one, other, bound in zip(ours, theirs, (factor, length_factor), strict=True):
        one, other = (np.log(np.asarray(x, float)) for x in (one, other))
        standard_error = np.hypot(one.std(ddof=1), other.std(ddof=1)) / np.sqrt(NUM_SEEDS)
        assert 4 * standard_error < np.log(bound)
        assert abs(one.mean() - other.mean()) < np.log(bound)


@pytest.mark.slow
@every_integrator
@pytest.mark.parametrize("loss_fn, factor", [(isotropic, 1.25), (ill_conditioned, 1.8)])
def test_energy_variance_of_the_tuned_sampler(loss_fn, integrator, factor):
    """Geometric mean over 16 chains. Not for the banana: the tuner forgets within 150 steps, the
    errors there have heavy tails, and the mean square is known to a factor of two only (1.5, 3.0
    and 4.6 times the aim were seen); its step size is compared with BlackJAX's instead.
    """
    # Measured, in units of the aim: 0.93 and 1.03, standard error 4 %; 1.1 and 1.3, 16 %.
    settings = tuned(loss_fn, integrator)
    per_step = CALLS_PER_STEP[integrator]

    @jax.vmap
    def mean_square(settings, key):
        tx = optax_smile.mclmc(
            settings.step_size,
            num_data=1,
            prior_precision=0.0,
            integrator=integrator,
            decoherence_length=settings.decoherence_length,
            key=key,
        )

        def call(carry, _):
            params, state = carry
            value, grads = jax.value_and_grad(loss_fn)(params)
            updates, state = tx.update(grads, state, params, value=value)
            told = optax_smile.stats(state)["energy_change"]
            return (optax.apply_updates(params, updates), state), told

        start = settings.params, tx.init(settings.params)
        _, changes = jax.lax.scan(call, start, length=1 + 4_000 * per_step)
        return jnp.mean(changes[per_step::per_step] ** 2)

    squares = jax.jit(mean_square)(settings, jax.random.split(jax.random.key(5), NUM_SEEDS))
    ratio = np.exp(np.mean(np.log(np.asarray(squares, float) / SIZES[loss_fn] / 5e-4)))
    assert 1 / factor < ratio < factor


def test_tuning_goes_to_another_aim():
    """Energy errors grow with the third power of the step size."""
    key, options = jax.random.key(3), {"integrator": "leapfrog", "num_steps": 3_000}
    aims = jnp.array([5e-4, 5e-4 / 64])
    settings = jax.vmap(lambda aim: tune(isotropic, key, energy_variance=aim, **options))(aims)
    np.testing.assert_allclose(settings.step_size[0] / settings.step_size[1], 2, rtol=0.15)


# What 9,000 steps from elsewhere come to, and BlackJAX with them.
TUNED_ISOTROPIC = {"leapfrog": (6.35, 9.65), "minimal_norm": (12.2, 8.2)}


@every_integrator
def test_tuning_from_the_mode(integrator):
    """Where the gradient is zero."""
    options = {"integrator": integrator, "num_steps": 2_000, "first_step_size": 2.5}
    settings = tune(isotropic, jax.random.key(1), jnp.zeros(100), **options)
    np.testing.assert_allclose(settings[:2], TUNED_ISOTROPIC[integrator], rtol=0.15)


def test_tuning_forgets_a_first_step_that_was_far_too_short():
    """It may grow tenfold with each step, and has 1,300 of them for a factor of 2,400."""
    settings = tune(isotropic, jax.random.key(1), num_steps=2_000)
    np.testing.assert_allclose(settings[:2], TUNED_ISOTROPIC["minimal_norm"], rtol=0.15)


@every_integrator
def test_a_loss_that_is_nan_far_out(integrator):
    """The first step size is a hundred times too long, and ends where there is no loss."""
    unit_length, border, size = 3e-3, 5.0, 10
    start = unit_length * jnp.ones(size)

    def loss_fn(x):
        x = x / unit_length
        return jnp.where(jnp.linalg.norm(x) < border, jnp.sum(x**2) / 2, jnp.nan)

    options = {"integrator": integrator, "num_steps": 3_000, "first_step_size": 1.0}
    settings = tune(loss_fn, jax.random.key(0), start, **options)
    # Without a border 1.8 and 5.3 units for the step, 3.1 and 1.7 for the length.
    step_size, length = (float(x) / unit_length for x in settings[:2])
    radius = np.linalg.norm(settings.params) / unit_length
    assert {"leapfrog": 0.9, "minimal_norm": 1.5}[integrator] < step_size < 7
    assert 1 < length < 7
    assert 0.5 < radius < border
    assert abs(radius - np.sqrt(size)) > 1e-3, "the chain has not left its start"


def test_tuning_keeps_tree_and_precision():
    def loss_fn(tree):
        return jnp.sum(tree["x"] ** 2) / 2 + jnp.sum(tree["y"][0] ** 2) + tree["y"][1] ** 2

    with jax.enable_x64(True):
        start = {"x": jnp.ones(3), "y": (jnp.ones((2, 2)), jnp.ones(()))}
        settings = optax_smile.tune_mclmc(
            loss_fn,
            start,
            num_data=10,
            num_steps=30,
            integrator="leapfrog",
            key=jax.random.key(0),
        )
        assert jax.tree.structure(settings.params) == jax.tree.structure(start)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(settings)} == {"float64"}
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(settings))


def test_tuning_uses_prior_temperature_and_number_of_data():
    """U = (num_data loss + precision / 2 |x|^2) / temperature has unit variance in both cases."""
    key, options = jax.random.key(2), {"num_steps": 900, "integrator": "leapfrog"}
    plain = tune(isotropic, key, **options)
    other = tune(isotropic, key, num_data=12, prior_precision=8.0, temperature=20.0, **options)
    np.testing.assert_allclose(other.step_size, plain.step_size, rtol=1e-2)
    np.testing.assert_allclose(other.decoherence_length, plain.decoherence_length, rtol=1e-2)


@pytest.mark.parametrize(
    ("argument", "value", "rule"),
    [
        ("num_steps", 29, "an integer >= 30"),
        ("num_steps", 1e3, "an integer >= 30"),
        ("num_steps", True, "an integer >= 30"),
        ("first_step_size", 0.0, "> 0"),
        ("first_step_size", float("inf"), "> 0"),
        ("energy_variance", 0, "> 0"),
        ("energy_variance", -1.0, "> 0"),
        ("energy_variance", float("nan"), "> 0"),
        ("num_data", 0, ">= 1"),
        ("prior_precision", -1.0, ">= 0"),
        ("temperature", 0.0, "> 0"),
        ("integrator", "mclachlan", "one of 'leapfrog', 'minimal_norm'"),
        ("key", None, "a JAX key"),
        ("key", 3.5, "a JAX key"),
        ("prior_precision", {"w": 1.0}, "a number or a prefix"),
        ("params", jnp.array([1.0, jnp.nan]), "finite"),
        ("params", jnp.ones(1), "at least 2 parameters"),
        ("params", {"w": jnp.ones(3, int)}, "float32 or float64"),
        ("loss_fn", lambda x: x, "a scalar mean loss"),
        ("loss_fn", lambda x: (jnp.sum(x), {}), "a scalar mean loss"),
        ("loss_fn", lambda x: None, "a scalar mean loss"),
    ],
)
def test_wrong_arguments_of_the_tuning(argument, value, rule):
    arguments = {
        "loss_fn": lambda x: jnp.sum(x),
        "params": jnp.ones(3),
        "num_data": 1,
        "key": jax.random.key(0),
    }
    named = rf"^`tune_mclmc\({argument}=...\)` must be .*{rule}.*, got "
    with pytest.raises(ValueError, match=named):
        optax_smile.tune_mclmc(**arguments | {argument: value})


def test_tuning_does_not_depend_on_where_the_posterior_lies():
    """The number of steps per independent draw is that of centred draws."""
    draws = jnp.cumsum(jax.random.normal(jax.random.key(0), (300, 4)), axis=0)
    near, far = (
        _steps_per_draw(x) for x in (draws - draws.mean(axis=0, keepdims=True), draws + 100)
    )
    np.testing.assert_allclose(far, near, rtol=1e-2)
