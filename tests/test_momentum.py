from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from blackjax.mcmc import integrators as blackjax_integrators
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType

import optax_smile
from optax_smile import _tree
from optax_smile.stages import kick as kicking
from optax_smile.stages import momentum
from optax_smile.stages.products import Sums

NUM_PARAMETERS = 10**7
COSINES = (-1, -0.9, -1e-3, 0, 1e-3, 0.9, 1)
INTEGRATORS = tuple(momentum.INTEGRATORS)
CALLS_PER_STEP = {"leapfrog": 1, "minimal_norm": 2}
REFERENCE_INTEGRATORS = {
    "leapfrog": blackjax_integrators.isokinetic_velocity_verlet,
    "minimal_norm": blackjax_integrators.isokinetic_mclachlan,
}


def exact_log_growth(p, delta):
    """log(((1 + p) e^D + (1 - p) e^-D) / 2) in float64, without cancellation on either side."""
    small = np.minimum(delta, 1)
    near = np.log1p(((1 + p) * np.expm1(small) + (1 - p) * np.expm1(-small)) / 2)
    with np.errstate(divide="ignore"):
        far = delta + np.log(((1 + p) + (1 - p) * np.exp(-2 * delta)) / 2)
    return np.where(p == -1, -delta, np.where(delta < 1, near, far))


def textbook_kick(u, g, length):
    """The formula of the literature, in float64, for a unit vector u."""
    size, norm = u.size, np.linalg.norm(g)
    if norm == 0:
        return u, 0.0
    e, delta = -g / norm, length * norm / (size - 1)
    p = e @ u
    growth = np.cosh(delta) + p * np.sinh(delta)
    turned = (u + (np.sinh(delta) + p * (np.cosh(delta) - 1)) * e) / growth
    return turned, (size - 1) * np.log(growth)


def unit(rng, size):
    vector = rng.standard_normal(size)
    return vector / np.linalg.norm(vector)


def with_cosine(rng, g, cosine):
    """A unit vector at a given cosine to the descent direction of g."""
    e = -g / np.linalg.norm(g)
    other = unit(rng, g.size)
    other -= (other @ e) * e
    u = cosine * e + np.sqrt(1 - cosine**2) * other / np.linalg.norm(other)
    return u / np.linalg.norm(u)


def standing(u, moving=True):
    """The momentum stage with the direction u and no open step."""
    state = momentum.init(u, momentum.INTEGRATORS["leapfrog"], jnp.asarray(1.0, u.dtype))
    return state._replace(direction=u, moving=jnp.asarray(moving))


def kick_and_turn(state, g, *lengths) -> Any:
    """Kick with one gradient for each of the lengths, then turn the tree once."""
    u = state.direction
    heading = kicking.heading(state.moving, jnp.vdot(u, u), jnp.vdot(u, g), jnp.vdot(g, g))
    gained = []
    for length in lengths:
        heading, change = kicking.kick(heading, jnp.asarray(length, u.dtype), u.size)
        gained.append(change)
    opened = momentum.Opened(heading, gained[-1], *[jnp.zeros(())] * 3)
    return momentum.turn(state, opened, g, None, u).direction, heading, gained


# The kinetic energy in float32.


@pytest.mark.parametrize("p", COSINES)
def test_kinetic_energy_of_kicks_at_ten_million_parameters(p):
    short, long = (np.geomspace(*ends, 2001).astype(np.float32) for ends in ((1e-9, 1), (1, 1e4)))
    delta = np.append(short, long)
    p = np.full_like(delta, p)
    exact = (NUM_PARAMETERS - 1) * exact_log_growth(p.astype(float), delta.astype(float))
    got = (NUM_PARAMETERS - 1) * kicking.log_growth(jnp.asarray(p), jnp.asarray(delta))
    assert got.dtype == jnp.float32
    error, bound = np.abs(np.asarray(got, float) - exact), 1e-3 + 1e-6 * np.abs(exact)
    assert np.all(error[:2001] <= bound[:2001])
    assert np.all(error[2001:] <= 1e-6 * (NUM_PARAMETERS - 1) * long)


@pytest.mark.parametrize("p", COSINES)
def test_kick_gives_that_kinetic_energy(p):
    """The whole way from the length of a kick and |g|, not log_growth alone."""
    length = np.geomspace(1e-6, 1e3, 501).astype(np.float32)
    norm = np.float32(1e4)
    shape = length.shape

    def full(x):
        return jnp.full(shape, x, jnp.float32)

    heading = kicking.Heading(
        full(p), full(1), full(0), full(0), jnp.ones(shape, bool), full(norm), full(1)
    )
    _, got = kicking.kick(heading, jnp.asarray(length), NUM_PARAMETERS)
    delta = length.astype(float) * float(norm) / (NUM_PARAMETERS - 1)
    exact = (NUM_PARAMETERS - 1) * exact_log_growth(float(np.float32(p)), delta)
    error = np.abs(np.asarray(got, float) - exact)
    assert delta.min() < 1e-8 and delta.max() > 0.9
    assert np.all(error <= 1e-3 + 1e-6 * np.abs(exact))


# Kick and turn against the textbook formula.


@pytest.mark.parametrize("size", [2, 3, 57])
@pytest.mark.parametrize("cosine", [-0.999, -0.7, -0.01, 0.0, 0.2, 0.99, 1.0])
def test_kick_is_that_of_the_textbook(size, cosine):
    rng = np.random.default_rng([size, int(1000 * (cosine + 1))])
    with jax.enable_x64(True):
        for delta in (1e-8, 1e-4, 0.03, 0.9, 1.1, 3.0, 12.0):
            g = 40 * rng.standard_normal(size)
            u = with_cosine(rng, g, cosine)
            length = delta * (size - 1) / np.linalg.norm(g)
            expected, expected_gain = textbook_kick(u, g, length)
            got, _, (gain,) = kick_and_turn(standing(jnp.asarray(u)), jnp.asarray(g), length)
            # Near p = -1 a rounded cosine is worth 1 / (1 + p) rounding errors.
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12 / (1 + cosine + 1e-2))
            np.testing.assert_allclose(gain, expected_gain, rtol=1e-10, atol=1e-12 * size)


def test_two_kicks_with_one_gradient_are_two_textbook_kicks():
    rng = np.random.default_rng(1)
    with jax.enable_x64(True):
        for first, second in [(1e-3, 2e-3), (0.3, 0.3), (0.01, 2.0), (4.0, 0.1)]:
            g, u = 7 * rng.standard_normal(20), unit(rng, 20)
            middle, first_gain = textbook_kick(u, g, first)
            expected, second_gain = textbook_kick(middle, g, second)
            state = standing(jnp.asarray(u))
            got, heading, gains = kick_and_turn(state, jnp.asarray(g), first, second)
            np.testing.assert_allclose(got, expected, atol=1e-13)
            np.testing.assert_allclose(gains, [first_gain, second_gain], rtol=1e-12)
            cosine = -(expected @ g) / np.linalg.norm(g)
            np.testing.assert_allclose(heading.cosine, cosine, rtol=1e-12)


def test_kick_does_not_need_a_unit_vector():
    """Rounding, and the explicit noise, leave the direction off the unit sphere."""
    rng = np.random.default_rng(2)
    with jax.enable_x64(True):
        g, u = rng.standard_normal(9), unit(rng, 9)
        expected, _ = textbook_kick(u, g, 2.0)
        got, _, _ = kick_and_turn(standing(jnp.asarray(1.7 * u)), jnp.asarray(g), 2.0)
        np.testing.assert_allclose(got, expected, atol=1e-14)


def test_kick_is_reversible():
    """u -> u', then -u' with the same gradient and length -> -u, with the energy given back."""
    rng = np.random.default_rng(3)
    with jax.enable_x64(True):
        for length in (1e-3, 0.5, 4.0):
            g, u = jnp.asarray(11 * rng.standard_normal(31)), jnp.asarray(unit(rng, 31))
            forth, _, (gain,) = kick_and_turn(standing(u), g, length)
            back, _, (loss,) = kick_and_turn(standing(-forth), g, length)
            assert np.linalg.norm(forth - u) > 1e-4
            np.testing.assert_allclose(back, -u, atol=1e-12)
            # Back from close to the gradient's direction: the rounding of 1 + p, times exp(2 D).
            delta = length * np.linalg.norm(g) / 30
            conditioning = 30 * np.finfo(float).eps * np.exp(2 * delta)
            np.testing.assert_allclose(gain, -loss, rtol=1e-10, atol=conditioning)


# Limits.


@pytest.mark.parametrize("delta", [1e-7, 1e-3, 0.5, 3.0, 200.0])
def test_a_chain_at_rest_starts_down_the_gradient(delta):
    g = jnp.asarray([3.0, -4.0, 12.0], jnp.float32)
    length = delta * 2 / 13
    got, heading, (gain,) = kick_and_turn(standing(jnp.zeros(3), moving=False), g, length)
    np.testing.assert_allclose(got, [-3 / 13, 4 / 13, -12 / 13], rtol=1e-6)
    assert bool(heading.moving)
    expected = 2 * np.logaddexp(delta, -delta) - 2 * np.log(2)
    if delta < 1e-2:
        expected = delta**2
    np.testing.assert_allclose(gain, expected, rtol=1e-5)


def test_a_direction_that_does_not_count_leaves_no_trace():
    g = jnp.asarray([3.0, -4.0, 12.0], jnp.float32)
    stale = jnp.asarray([0.6, 0.8, 0.0], jnp.float32)
    at_rest, _, gain = kick_and_turn(standing(jnp.zeros(3), moving=False), g, 0.3)
    got, _, stale_gain = kick_and_turn(standing(stale, moving=False), g, 0.3)
    np.testing.assert_array_equal(got, at_rest)
    np.testing.assert_array_equal(stale_gain, gain)


def test_no_gradient_changes_nothing():
    u = jnp.asarray(unit(np.random.default_rng(4), 6), jnp.float32)
    got, heading, gains = kick_and_turn(standing(u), jnp.zeros(6), 0.5, 0.5)
    np.testing.assert_allclose(got, u, rtol=0, atol=1e-7)
    np.testing.assert_array_equal(gains, [0, 0])
    assert bool(heading.moving)


def test_no_gradient_leaves_a_chain_at_rest():
    got, heading, gains = kick_and_turn(standing(jnp.zeros(6), moving=False), jnp.zeros(6), 1, 1)
    np.testing.assert_array_equal(got, np.zeros(6))
    np.testing.assert_array_equal(gains, [0, 0])
    assert not bool(heading.moving)


@pytest.mark.parametrize("delta", [1e-6, 0.1, 5.0, 300.0])
def test_straight_uphill_changes_nothing_but_the_energy(delta):
    g = jnp.asarray([0.0, 2.0, 0.0, 0.0], jnp.float32)
    u = jnp.asarray([0.0, 1.0, 0.0, 0.0], jnp.float32)
    got, heading, (gain,) = kick_and_turn(standing(u), g, delta * 3 / 2)
    np.testing.assert_array_equal(got, u)
    np.testing.assert_allclose(gain, -3 * delta, rtol=1e-6)
    assert float(heading.cosine) == -1


def test_no_nan_at_any_size_of_kick_and_gradient():
    u = jnp.asarray(unit(np.random.default_rng(5), 8), jnp.float32)
    for moving in (True, False):
        for direction in (u, -u, jnp.roll(u, 1), jnp.eye(8)[0]):
            state = standing(direction, moving)
            for gradient in (0.0, 1e-38, 1e-25, 1e-19, 1.0, 1e10, 1e18):
                for length in (0.0, 1e-30, 1e-6, 1.0, 1e6):
                    got, heading, gains = kick_and_turn(state, gradient * u, length, length)
                    chex.assert_tree_all_finite((got, heading, gains))
                    norm = float(jnp.linalg.norm(got))
                    assert abs(norm - 1) < 1e-5 or (norm == 0 and not bool(heading.moving))


# The norm.


def kicked_norms(size, largest_delta, num_kicks):
    """| |u| - 1 | after each of many kicks with random gradients and random lengths, float32."""
    rng = np.random.default_rng(size)

    def step(u, inputs):
        key, delta = inputs
        g = jax.random.normal(key, (size,))
        length = delta * (size - 1) / jnp.linalg.norm(g)
        turned, _, _ = kick_and_turn(standing(u), g, length)
        return turned, jnp.abs(jnp.linalg.norm(turned) - 1)

    deltas = np.exp(rng.uniform(np.log(1e-5), np.log(largest_delta), num_kicks))
    keys = jax.random.split(jax.random.key(0), num_kicks)
    start = jnp.asarray(unit(rng, size), jnp.float32)
    run = jax.jit(lambda *inputs: jax.lax.scan(step, start, inputs)[1])
    return np.asarray(run(keys, jnp.asarray(deltas, jnp.float32)))


@pytest.mark.parametrize("size, largest_delta", [(2, 1.0), (10, 10.0), (1000, 1e3)])
def test_norm_after_a_hundred_thousand_kicks(size, largest_delta):
    assert kicked_norms(size, largest_delta, 100_000).max() <= 1e-5


@pytest.mark.parametrize("delta", [3.0, 7.0, 12.0])
def test_norm_after_a_long_kick_of_an_almost_opposed_direction(delta):
    """Two parameters and a step far too long: 1 + p is rounding there, and so is the norm.

    The next kick measures the norm and restores it, whatever the last one did.
    """
    angle = np.geomspace(1e-5, 1e-2, 301)
    directions = jnp.asarray(np.stack([np.cos(angle), np.sin(angle)], 1), jnp.float32)
    g = jnp.asarray([0.6, 0.8], jnp.float32)
    rotation = jnp.asarray([[0.6, 0.8], [-0.8, 0.6]], jnp.float32)
    turn = jax.jit(jax.vmap(lambda u: kick_and_turn(standing(u @ rotation), g, delta)[0]))
    turned = turn(directions)
    assert np.all(np.isfinite(turned))
    again = jax.jit(jax.vmap(lambda u: kick_and_turn(standing(u), g[::-1], 0.1)[0]))(turned)
    assert np.abs(np.linalg.norm(np.asarray(again, float), axis=1) - 1).max() <= 1e-6


# Whole trajectories in float64.


def banana(params):
    x, y = jnp.append(params["x"], params["last"]), jnp.ravel(params["y"])
    return jnp.sum(x**2) / 2 + jnp.sum((y - x**2 + 0.1 * jnp.roll(x, 1)) ** 2) / 1.4


def banana_start(seed=6):
    rng = np.random.default_rng(seed)
    return {
        "x": jnp.asarray(rng.standard_normal(3)),
        "y": jnp.asarray(rng.standard_normal((2, 2))),
        "last": jnp.asarray(rng.standard_normal()),
    }


def moving_along(state, direction):
    """State of a chain that has the unit momentum `direction` and no open step."""
    moving = jnp.ones_like(state.momentum.moving)
    return state._replace(momentum=state.momentum._replace(direction=direction, moving=moving))


@pytest.mark.parametrize("integrator", INTEGRATORS)
def test_full_batch_trajectory_and_energies_are_those_of_blackjax(integrator):
    num_steps, calls, step_size = 100, CALLS_PER_STEP[integrator], 0.2
    with jax.enable_x64(True):
        params = banana_start()
        position, unravel = ravel_pytree(params)
        direction = jnp.asarray(unit(np.random.default_rng(7), position.size))

        def log_density(flat):
            return -banana(unravel(flat))

        def reference_step(state, _):
            state, kinetic_change = REFERENCE_INTEGRATORS[integrator](log_density)(state, step_size)
            return state, (state, kinetic_change)

        start = blackjax_integrators.IntegratorState(
            position, direction, *jax.value_and_grad(log_density)(position)
        )
        reference = jax.jit(lambda x: jax.lax.scan(reference_step, x, length=num_steps)[1])
        ends, kinetic_changes = reference(start)
        energies = -np.append(start.logdensity, ends.logdensity)

        tx = optax_smile.smile_naive(
            step_size, num_data=1, prior_precision=0.0, integrator=integrator
        )

        def call(carry, _):
            params, state = carry
            value, grads = jax.value_and_grad(banana)(params)
            updates, state = tx.update(grads, state, params, value=value)
            judged = ravel_pytree(params)[0], optax_smile.stats(state)["energy_change"]
            return (optax.apply_updates(params, updates), state), judged

        started = params, moving_along(tx.init(params), unravel(direction))
        num_gradients = 1 + calls * num_steps
        chain = jax.jit(lambda x: jax.lax.scan(call, x, length=num_gradients)[1])
        judged, changes = chain(started)
    np.testing.assert_allclose(judged[calls::calls], ends.position, rtol=0, atol=1e-10)
    expected = np.asarray(kinetic_changes) + np.diff(energies)
    np.testing.assert_allclose(changes[calls::calls], expected, rtol=0, atol=1e-10)
    # The chain has been somewhere, and its energy error is far above the tolerance.
    assert np.ptp(ends.position, axis=0).min() > 1
    assert np.abs(expected).max() > 1e-3


def slow_steps(integrator, position, batches, step_size, gradient, energy):
    """Kick, drift, ..., kick in float64; every gradient on a batch of its own, from rest."""
    b = 0.1931833275037836
    kicks, drifts = {
        "leapfrog": ((0.5, 0.5), (1.0,)),
        "minimal_norm": ((b, 1 - 2 * b, b), (0.5, 0.5)),
    }[integrator]
    g, value = gradient(position, batches[0]), energy(position, batches[0])
    u = -g / np.linalg.norm(g)
    batches, first = list(batches[1:]), True
    while batches:
        start_value, gained = value, 0.0
        for index, kick in enumerate(kicks):
            if index:
                position = position + drifts[index - 1] * step_size * u
                batch = batches.pop(0)
                g, value = gradient(position, batch), energy(position, batch)
            if first:
                delta = kick * step_size * np.linalg.norm(g) / (g.size - 1)
                gain, first = (g.size - 1) * np.log(np.cosh(delta)), False
            else:
                u, gain = textbook_kick(u, g, kick * step_size)
            gained += gain
        yield position, gained + value - start_value


@pytest.mark.parametrize("integrator", INTEGRATORS)
def test_mini_batches_prior_and_temperature_against_a_slow_integrator(integrator):
    """Starts at rest, has a batch of its own for each gradient and a prior for each leaf."""
    calls, step_size, num_steps, size = CALLS_PER_STEP[integrator], 0.15, 20, 6
    rng = np.random.default_rng(8)
    precision, num_data, temperature = np.repeat([0.5, 3.0], [2, 4]), 12.0, 1.7
    batches = rng.standard_normal((1 + calls * num_steps, size))
    start = rng.standard_normal(size)

    def energy(x, batch):
        loss = np.mean(np.cosh(x - batch / 3))
        return (num_data * loss + np.sum(precision * x**2) / 2) / temperature

    def gradient(x, batch):
        return (num_data * np.sinh(x - batch / 3) / size + precision * x) / temperature

    def mean_loss(params, batch):
        return jnp.mean(jnp.cosh(jnp.append(params["a"], params["b"]) - batch / 3))

    with jax.enable_x64(True):
        tx = optax_smile.smile_naive(
            step_size,
            num_data=num_data,
            prior_precision={"a": 0.5, "b": 3.0},
            temperature=temperature,
            integrator=integrator,
        )

        @jax.jit
        def call(params, state, batch):
            value, grads = jax.value_and_grad(mean_loss)(params, batch)
            updates, state = tx.update(grads, state, params, value=value)
            return optax.apply_updates(params, updates), state

        params = {"a": jnp.asarray(start[:2]), "b": jnp.asarray(start[2:])}
        params, state = call(params, tx.init(params), batches[0])
        steps = slow_steps(integrator, start, batches, step_size, gradient, energy)
        for index, (position, change) in enumerate(steps):
            for batch in batches[1 + index * calls : 1 + (index + 1) * calls]:
                judged = params
                params, state = call(params, state, batch)
            got = np.append(judged["a"], judged["b"])
            np.testing.assert_allclose(got, position, rtol=0, atol=1e-11)
            np.testing.assert_allclose(
                optax_smile.stats(state)["energy_change"], change, rtol=0, atol=1e-10
            )
        assert index == num_steps - 1


def energy_errors(integrator, step_size, positions, directions, potential):
    """Energy change of one step from each of many states."""
    tx = optax_smile.smile_naive(step_size, num_data=1, prior_precision=0.0, integrator=integrator)

    def one(params, direction):
        state = moving_along(tx.init(params), direction)
        for _ in range(CALLS_PER_STEP[integrator] + 1):
            value, grads = jax.value_and_grad(potential)(params)
            updates, state = tx.update(grads, state, params, value=value)
            params = optax.apply_updates(params, updates)
        return optax_smile.stats(state)["energy_change"]

    return jax.vmap(one)(positions, directions)


def test_energy_error_falls_with_the_third_power_of_the_step_size():
    """Over 400 exact draws of the posterior and an isotropic momentum: the stationary states."""
    num_states, pairs = 400, 20
    step_sizes = np.geomspace(0.01, 0.08, 6)
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(9), 3)
        x = jax.random.normal(keys[0], (num_states, pairs))
        y = x**2 + jax.random.normal(keys[1], (num_states, pairs))
        u = jax.random.normal(keys[2], (num_states, 2, pairs))
        u = u / jnp.sqrt(jnp.sum(u**2, (1, 2), keepdims=True))

        def potential(params):
            return jnp.sum(params["x"] ** 2 + (params["y"] - params["x"] ** 2) ** 2) / 2

        positions, directions = {"x": x, "y": y}, {"x": u[:, 0], "y": u[:, 1]}

        @partial(jax.jit, static_argnums=0)
        def error(integrator, step_size):
            changes = energy_errors(integrator, step_size, positions, directions, potential)
            return jnp.sqrt(jnp.mean(changes**2))

        errors = {name: [float(error(name, eps)) for eps in step_sizes] for name in INTEGRATORS}
    for name in INTEGRATORS:
        slope = np.polyfit(np.log(step_sizes), np.log(errors[name]), 1)[0]
        assert abs(slope - 3) <= 0.06, (name, slope)
    assert np.min(np.divide(errors["leapfrog"], errors["minimal_norm"])) >= 10


# Explicit noise.


def expected_cosine(nu, size):
    """E[u . normalise(u + nu z)] for a unit vector u, by a million draws, with standard error."""
    rng = np.random.default_rng(10)
    along = 1 + nu * rng.standard_normal(1_000_000)
    across = nu**2 * rng.chisquare(size - 1, 1_000_000)
    cosine = along / np.sqrt(along**2 + across)
    return cosine.mean(), cosine.std() / 1000


@pytest.mark.parametrize(
    "integrator, size, relative_length",
    [("leapfrog", 2, 0.1), ("leapfrog", 200, 1.0), ("minimal_norm", 5, 0.5)],
)
def test_explicit_noise_turns_the_direction_by_the_right_angle(integrator, size, relative_length):
    """On a flat potential the noise alone turns u; it is drawn between two steps.

    Bounds of 5 standard errors, those of the prediction included: with the 200 coordinates of the
    largest case the false-alarm rate is 1e-4.
    """
    num_chains, decoherence_length = 10_000, 0.7
    step_size = relative_length * decoherence_length
    calls = CALLS_PER_STEP[integrator]
    tx = optax_smile.smile_naive(
        step_size,
        num_data=1,
        prior_precision=0.0,
        integrator=integrator,
        decoherence_length=decoherence_length,
        key=jax.random.key(0),
    )
    params, start, update = jnp.zeros(size), jnp.eye(size)[0], jax.jit(tx.update)

    def one(key):
        state = moving_along(tx.init(params), start)._replace(key=jax.random.key_data(key))
        at = params
        for _ in range(calls):
            updates, state = update(jnp.zeros(size), state, at)
            at = optax.apply_updates(at, updates)
        before = state.momentum.direction
        _, state = update(jnp.zeros(size), state, at)
        return at, before, state.momentum.direction

    keys = jax.random.split(jax.random.key(11), num_chains)
    displacement, before, after = jax.jit(jax.vmap(one))(keys)
    np.testing.assert_allclose(before, np.broadcast_to(start, before.shape), atol=1e-6)
    np.testing.assert_allclose(displacement, step_size * np.asarray(before), atol=1e-6)
    after = np.asarray(after, float)
    assert np.abs(np.linalg.norm(after, axis=1) - 1).max() < 1e-5
    cosines = after[:, 0]
    nu = np.sqrt(np.expm1(2 * step_size / decoherence_length) / size)
    expected, its_error = expected_cosine(nu, size)
    standard_error = np.hypot(cosines.std() / np.sqrt(num_chains), its_error)
    assert abs(cosines.mean() - expected) < 5 * standard_error
    if size == 200:
        np.testing.assert_allclose(
            cosines.mean(), np.exp(-step_size / decoherence_length), rtol=0.01
        )
    # Isotropic around u: the other coordinates have mean 0 and equal variances.
    across = after[:, 1:]
    assert np.abs(across.mean(0)).max() < 5 * across.std() / np.sqrt(num_chains)
    assert len(np.unique(cosines)) > 0.9 * num_chains


def test_explicit_noise_differs_between_calls_and_starts_with_the_second():
    tx = optax_smile.smile_naive(
        0.5, num_data=1, prior_precision=0.0, decoherence_length=1.0, key=jax.random.key(3)
    )
    params, update, directions = jnp.zeros(50), jax.jit(tx.update), []
    state = moving_along(tx.init(params), jnp.eye(50)[0])
    for _ in range(4):
        updates, state = update(jnp.zeros(50), state, params)
        params = optax.apply_updates(params, updates)
        directions.append(np.asarray(state.momentum.direction))
    np.testing.assert_allclose(directions[0], np.eye(50)[0], atol=1e-6)
    turns = np.diff(directions, axis=0)
    assert np.all(np.linalg.norm(turns, axis=1) > 0.1)
    cosine = turns @ turns.T / np.outer(*2 * [np.linalg.norm(turns, axis=1)])
    # Independent turns of 50 coordinates: a repeated draw would give 1.
    assert np.abs(cosine - np.eye(3)).max() < 0.8


def test_isotropic_noise_of_a_network_has_unit_covariance():
    """Signs of neighbours, of other leaves and of other keys have nothing to do with each other."""
    tree = {"w": jnp.zeros((20, 10)), "large": jnp.zeros((800, 45)), "b": jnp.zeros(()), "v": {}}
    draw = jax.jit(_tree.isotropic_like)
    draws = [draw(key, tree) for key in jax.random.split(jax.random.key(0), 400)]
    parts = [[*np.ravel(x["w"]), x["b"], *np.ravel(x["large"][:4])] for x in draws]
    parts = np.array(parts)
    assert set(np.unique(parts)) == {-1, 1}
    # 6 standard errors for the largest of 381 means and 72,390 covariances.
    assert np.abs(parts.mean(axis=0)).max() < 6 / 400**0.5
    assert np.abs(parts.T @ parts / 400 - np.eye(381)).max() < 6 / 400**0.5
    assert abs(np.mean(draws[0]["large"])) < 5 / 36_000**0.5
    assert jax.tree.map(jnp.shape, draws[0]) == jax.tree.map(jnp.shape, tree)


def test_isotropic_noise_has_no_memory():
    """Mean products of signs at a distance, in a call and from call to call; 2^26 of each.

    A hash of two multiplications instead of three is 13 standard errors off at some of them.
    """
    lags, size, num_keys = (1, 2, 3, 4, 5, 7, 8, 16, 32, 100, 256, 1000, 1024, 2**16), 2**22, 16

    def products(pair):
        z, after = (_tree.isotropic_like(key, jnp.zeros(size)) for key in pair)
        inside = [jnp.mean(z[:-lag] * z[lag:]) for lag in lags]
        return jnp.stack([jnp.mean(z), jnp.mean(z * after), *inside])

    keys = jax.random.split(jax.random.key(0), (num_keys, 2))
    found = np.mean([jax.jit(products)(pair) for pair in keys], axis=0)
    assert np.abs(found).max() < 4 / (num_keys * size) ** 0.5


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_isotropic_noise_does_not_depend_on_the_sharding(kind):
    tree = {"w": jnp.zeros((200, 320)), "b": jnp.zeros((40, 2)), "s": jnp.zeros(())}
    expected = _tree.isotropic_like(jax.random.key(0), tree)
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        spec = {"w": jax.P("a", "b"), "b": jax.P(None, "b"), "s": jax.P()}
        sharded: Any = jax.device_put(tree, jax.tree.map(partial(jax.NamedSharding, mesh), spec))
        noisy = jax.jit(lambda key, x: jax.tree.map(jnp.add, x, _tree.isotropic_like(key, x)))
        got = noisy(jax.random.key(0), sharded)
    chex.assert_trees_all_equal(jax.device_get(got), jax.device_get(expected))
    assert got["w"].sharding.is_equivalent_to(sharded["w"].sharding, 2)


@partial(jax.jit, static_argnames=("size", "num_chains"))
def matched_cosines(turn_rate, size, step_size=0.1, num_chains=400):
    """Cosines between u before and after the noise of one step, and errors of what is told."""
    params = jnp.zeros(size)
    scheme = momentum.INTEGRATORS["leapfrog"]
    state = momentum.init(params, scheme, jnp.float32(step_size))
    state = state._replace(
        direction=jnp.full(size, size**-0.5), moving=jnp.ones((), bool), drift_index=jnp.int32(1)
    )
    gradient = jax.random.normal(jax.random.key(1), (size,))
    u: Any = state.direction

    def cosine(key):
        noise = _tree.isotropic_like(key, u)
        sums = Sums(
            direction_square=jnp.vdot(u, u),
            direction_dot_gradient=jnp.vdot(u, gradient),
            gradient_square=jnp.vdot(gradient, gradient),
            params_square=jnp.zeros(()),
            loss_square=jnp.zeros(()),
            prior_change=jnp.zeros(()),
            deviation_square=jnp.zeros(()),
            noise_square=jnp.vdot(noise, noise),
            noise_dot_direction=jnp.vdot(noise, u),
            noise_dot_gradient=jnp.vdot(noise, gradient),
        )
        heading = kicking.heading(state.moving, *sums[:3])
        rate = jnp.float32(turn_rate)
        towards = momentum.diffuse(state, scheme, heading, sums, "matched", rate)
        opened = momentum.Opened(towards, *[jnp.zeros(())] * 4)
        turned: Any = momentum.turn(state, opened, gradient, noise, params).direction
        # What the scalars say of the tree is so.
        told = jnp.vdot(turned, -gradient) / jnp.linalg.norm(gradient) - towards.cosine
        return jnp.vdot(turned, u), jnp.abs(jnp.linalg.norm(turned) - 1), jnp.abs(told)

    return jax.vmap(cosine)(jax.random.split(jax.random.key(0), num_chains))


@pytest.mark.parametrize("size", [100, 2000])
def test_matched_noise_turns_the_direction_by_the_angle_of_the_gradients(size):
    """Its mean cosine is that of a decoherence length L = 2 / (eps r^2): exp(-eps / L)."""
    cosines, *errors = map(np.asarray, matched_cosines(5.0, size))
    standard_error = cosines.std() / len(cosines) ** 0.5
    assert abs(cosines.mean() - np.exp(-(0.5**2) / 2)) < 5 * standard_error + 2 / size
    assert np.max(errors) < 1e-5
    cosines, *errors = map(np.asarray, matched_cosines(0.0, size))
    assert cosines.mean() == pytest.approx(1, abs=1e-5) and np.max(errors) < 1e-5
