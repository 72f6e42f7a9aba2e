from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from blackjax.mcmc.integrators import esh_dynamics_momentum_update_one_step
from jax.flatten_util import ravel_pytree

import optax_smile
from optax_smile import _tree
from optax_smile.stages import evidence
from optax_smile.stages import integrator as stepping

FIRST_KICK = 0.1931833275037836
CALLS_PER_STEP = {"leapfrog": 1, "minimal_norm": 2}
# Lengths of the kicks and of the drifts between them.
SCHEMES = {
    "leapfrog": ((0.5, 0.5), (1.0,)),
    "minimal_norm": ((FIRST_KICK, 1 - 2 * FIRST_KICK, FIRST_KICK), (0.5, 0.5)),
}


def exact_log_growth(p, delta):
    """log(((1 + p) e^D + (1 - p) e^-D) / 2) in float64, without cancellation on either side."""
    small = np.minimum(delta, 1)
    near = np.log1p(((1 + p) * np.expm1(small) + (1 - p) * np.expm1(-small)) / 2)
    with np.errstate(divide="ignore"):
        far = delta + np.log(((1 + p) + (1 - p) * np.exp(-2 * delta)) / 2)
    return np.where(p == -1, -delta, np.where(delta < 1, near, far))


def textbook_kick(u, g, length):
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


def sums_of(u, g):
    sums = stepping.Sums(*[jnp.zeros(())] * len(stepping.Sums._fields))
    squares = {"direction_square": jnp.vdot(u, u), "whitened_square": jnp.vdot(g, g)}
    return sums._replace(direction_dot_whitened=jnp.vdot(u, g), **squares)


def kick_and_turn(u, g, *lengths, moving: Any = True) -> Any:
    momentum = stepping.Momentum(stepping.SCHEMES["leapfrog"])
    heading = momentum.heading(jnp.asarray(moving), sums_of(u, g))
    gains = []
    for length in lengths:
        given = heading, jnp.asarray(length, u.dtype), u.size
        heading = momentum.kick(*given)
        gains.append(momentum.kinetic_change(*given))
    return momentum.turn(u, heading, g, None), heading, jnp.stack(gains)


@jax.jit
def kicked(directions, gradients, lengths, moving=True):
    """Directions after kicks `[case, kick]`, headings and kinetic energies gained, by case."""
    one = partial(kick_and_turn, moving=moving)
    return jax.vmap(lambda u, g, lengths: one(u, g, *lengths))(directions, gradients, lengths)


def test_kinetic_energy_of_kicks_at_ten_million_parameters():
    """From kicks that are hardly felt to those that turn u all the way, in float32."""
    norm, size = np.float32(1e4), 10**7
    length = np.append(np.geomspace(1e-6, 1e3, 2001), np.geomspace(1e3, 1e7, 2001))
    length = length.astype(np.float32)
    cosines = np.array([-1, -0.9, -1e-3, 0, 1e-3, 0.9, 1], np.float32)
    p = np.repeat(cosines[:, None], length.size, axis=1)
    full = partial(jnp.full, p.shape, dtype=jnp.float32)
    moving = jnp.ones(p.shape, bool)
    heading = stepping.Heading(
        jnp.asarray(p), full(1), full(0), full(0), moving, full(norm), full(1)
    )
    momentum = stepping.Momentum(stepping.SCHEMES["leapfrog"])
    got = momentum.kinetic_change(heading, jnp.broadcast_to(length, p.shape), size)
    assert got.dtype == jnp.float32
    delta = length.astype(float) * float(norm) / (size - 1)
    exact = (size - 1) * exact_log_growth(p.astype(float), delta)
    error = np.abs(np.asarray(got, float) - exact)
    assert delta.min() < 2e-9 and delta.max() > 9e3
    assert np.all(error[:, :2001] <= 1e-3 + 1e-6 * np.abs(exact[:, :2001]))
    assert np.all(error[:, 2001:] <= 1e-6 * (size - 1) * delta[2001:])


@pytest.mark.parametrize("size", [2, 57])
def test_kick_is_that_of_the_textbook(size):
    """And of BlackJAX."""
    rng = np.random.default_rng(size)
    cosines, deltas = (-0.999, -0.7, -0.01, 0.0, 0.2, 0.99, 1.0), (1e-8, 0.03, 0.9, 1.1, 3.0, 12.0)
    cosines, deltas = np.repeat(cosines, len(deltas)), np.tile(deltas, len(cosines))
    gradients, other = rng.standard_normal((2, len(cosines), size))
    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
    e = -gradients / norms
    other -= np.sum(other * e, axis=1, keepdims=True) * e
    other /= np.linalg.norm(other, axis=1, keepdims=True)
    starts = cosines[:, None] * e + np.sqrt(1 - cosines[:, None] ** 2) * other
    gradients, lengths = 40 * gradients, deltas * (size - 1) / (40 * norms[:, 0])
    with jax.enable_x64(True):
        got, _, gains = kicked(jnp.asarray(starts), gradients, jnp.asarray(lengths)[:, None])
        theirs = jax.vmap(lambda u, g, x: esh_dynamics_momentum_update_one_step()(u, g, x, 1.0))
        turned, _, gained = theirs(starts, -gradients, lengths)
    is_near = cosines < -0.9
    np.testing.assert_allclose(turned[~is_near], got[~is_near], rtol=0, atol=1e-12)
    np.testing.assert_allclose(gained[~is_near], gains[~is_near, 0], rtol=1e-9, atol=1e-12 * size)
    for index, cosine in enumerate(cosines):
        expected, gain = textbook_kick(starts[index], gradients[index], lengths[index])
        # Near p = -1 a rounded cosine is worth 1 / (1 + p) rounding errors.
        atol = 1e-12 / (1 + cosine + 1e-2)
        np.testing.assert_allclose(got[index], expected, rtol=0, atol=atol)
        np.testing.assert_allclose(gains[index], [gain], rtol=1e-10, atol=1e-12 * size)


def test_limits_of_a_kick():
    """A chain at rest starts down the gradient, whatever direction it still holds."""
    g = jnp.tile(jnp.asarray([3.0, -4.0, 12.0], jnp.float32), (5, 1))
    delta = np.array([1e-7, 1e-3, 0.5, 3.0, 200.0])
    growth = np.where(delta < 1e-2, delta**2 / 2, np.logaddexp(delta, -delta) - np.log(2))
    for stale in ([0.0, 0.0, 0.0], [0.6, 0.8, 0.0]):
        start, lengths = jnp.tile(jnp.float32(stale), (5, 1)), jnp.float32(delta * 2 / 13)[:, None]
        got, heading, gains = kicked(start, g, lengths, moving=False)
        np.testing.assert_allclose(got, -g / 13, rtol=1e-6)
        assert np.all(heading.moving)
        np.testing.assert_allclose(gains[:, 0], 2 * growth, rtol=1e-5)
    # No gradient changes nothing, and one straight uphill the energy alone.
    u = jnp.asarray(unit(np.random.default_rng(4), 6), jnp.float32)[None]
    zeros, lengths = jnp.zeros((1, 6)), jnp.full((1, 2), 0.5)
    for start, moving in ((u, True), (zeros, False)):
        got, heading, gains = kicked(start, zeros, lengths, moving=moving)
        np.testing.assert_allclose(got, start, rtol=0, atol=1e-7)
        np.testing.assert_array_equal(gains, [[0, 0]])
        assert np.all(np.equal(heading.moving, moving))
    delta, u = jnp.asarray([1e-6, 0.1, 5.0, 300.0]), jnp.tile(jnp.eye(4)[1], (4, 1))
    got, heading, gains = kicked(u, 2 * u, (delta * 3 / 2)[:, None])
    np.testing.assert_array_equal(got, u)
    np.testing.assert_allclose(gains[:, 0], -3 * delta, rtol=1e-6)
    np.testing.assert_array_equal(heading.cosine, -np.ones(4))


def test_no_nan_at_any_size_of_kick_and_gradient():
    u = jnp.asarray(unit(np.random.default_rng(5), 8), jnp.float32)
    sizes, lengths = (0.0, 1e-38, 1e-25, 1e-19, 1.0, 1e10, 1e18), (0.0, 1e-30, 1e-6, 1.0, 1e6)
    starts = (u, -u, jnp.roll(u, 1), jnp.eye(8)[0])
    cases = [(start, size * u, [x, x]) for start in starts for size in sizes for x in lengths]
    inputs = [jnp.asarray(each, jnp.float32) for each in zip(*cases, strict=True)]
    for moving in (True, False):
        got, heading, gains = kicked(*inputs, moving=moving)
        assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves((got, heading, gains)))
        norm = np.linalg.norm(got, axis=1)
        assert np.all((np.abs(norm - 1) < 1e-5) | ((norm == 0) & ~np.asarray(heading.moving)))


@pytest.mark.parametrize("size, largest_delta", [(2, 1.0), (1000, 1e3)])
def test_norm_after_many_kicks(size, largest_delta):
    """Random gradients and lengths, float32: 100,000 kicks, and 5,000 of many parameters."""
    rng, num_kicks = np.random.default_rng(size), 5_000 if size == 1000 else 100_000
    deltas = np.exp(rng.uniform(np.log(1e-5), np.log(largest_delta), num_kicks))
    gradients = rng.standard_normal((num_kicks, size)).astype(np.float32)
    lengths = deltas * (size - 1) / np.linalg.norm(gradients, axis=1)

    def step(u, inputs):
        turned, _, _ = kick_and_turn(u, *inputs)
        return turned, jnp.abs(jnp.linalg.norm(turned) - 1)

    inputs = jnp.asarray(gradients), jnp.asarray(lengths, jnp.float32)
    start = jnp.asarray(unit(rng, size), jnp.float32)
    assert np.max(jax.jit(lambda *x: jax.lax.scan(step, start, x)[1])(*inputs)) <= 1e-5


def test_a_subclass_replaces_kick_drift_and_kinetic_energy():
    class Half(stepping.Momentum):
        def kick(self, heading, length, num_parameters):
            return heading._replace(along_old=0 * length, along_descent=jnp.ones_like(length))

        def kinetic_change(self, heading, length, num_parameters):
            return length * heading.gradient_norm

        @staticmethod
        def drift(direction, length, inverse_scale):
            return stepping.Momentum.drift(direction, length / 2, inverse_scale)

    base = stepping.Momentum(stepping.SCHEMES["minimal_norm"])
    half = Half(base.scheme)
    u, g = jnp.eye(3)[0], jnp.asarray([3.0, 0.0, 4.0])
    state = base.init(u, jnp.float32(0.5))._replace(
        direction=u, moving=jnp.array(True), drift_index=jnp.int32(2)
    )
    closed, end = half.close(state, sums_of(u, g), None)
    opened, gained = half.open(end, closed, state.step_length)
    kick = FIRST_KICK * 0.5 * 5
    np.testing.assert_allclose([end.kinetic_change, gained], [kick, kick], rtol=1e-6)
    direction: Any = half.turn(u, opened, g, None)
    np.testing.assert_allclose(direction, -g / 5, rtol=1e-6)
    after = half.proceed(state, opened, state.step_length, jnp.array(False))
    after = after._replace(direction=direction, anchor=u)
    moved: Any = half.displace(jnp.array(False), state, after, u, None)
    np.testing.assert_allclose(moved, -g / 5 * 0.5 / 2 / 2, rtol=1e-6)
    again: Any = half.last_drift(after, None)
    np.testing.assert_allclose(again, moved, rtol=1e-6)


def plain(step_size, sampler=optax_smile.smile, **options) -> Any:
    """A sampler with the step size as given, no prior, and no noise but that of the gradients."""
    options = {"num_data": 1, "prior_precision": 0.0, "decoherence_length": None} | options
    return sampler(step_size, **options)


def moving_along(state, direction):
    moving = jnp.ones_like(state.unpack().dynamics.momentum.moving)
    return runs.with_fields(state, direction=direction, moving=moving)


def energy_change(integrator, energy, step_size, params, direction):
    tx, moved = plain(step_size, integrator=integrator), params
    state = moving_along(tx.init(params), direction)
    for _ in range(1 + CALLS_PER_STEP[integrator]):
        value, grads = jax.value_and_grad(energy)(moved)
        updates, state = tx.update(grads, state, moved, value=value)
        moved: Any = optax.apply_updates(moved, updates)
    return optax_smile.stats(state).energy_change


def test_energy_error_falls_with_the_third_power_of_the_step_size():
    """Over 400 exact draws of the posterior and an isotropic momentum: the stationary states."""
    num_states, pairs, step_sizes = 400, 20, np.geomspace(0.01, 0.08, 6)
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(9), 3)
        x = jax.random.normal(keys[0], (num_states, pairs))
        y = x**2 + jax.random.normal(keys[1], (num_states, pairs))
        u = jax.random.normal(keys[2], (num_states, 2, pairs))
        u = u / jnp.sqrt(jnp.sum(u**2, (1, 2), keepdims=True))

        def potential(params):
            return jnp.sum(params["x"] ** 2 + (params["y"] - params["x"] ** 2) ** 2) / 2

        @partial(jax.jit, static_argnums=0)
        def error(integrator, step_size):
            step = jax.vmap(partial(energy_change, integrator, potential, step_size))
            changes = step({"x": x, "y": y}, {"x": u[:, 0], "y": u[:, 1]})
            return jnp.sqrt(jnp.mean(changes**2))

        errors = {name: [float(error(name, eps)) for eps in step_sizes] for name in CALLS_PER_STEP}
    for name in CALLS_PER_STEP:
        slope = np.polyfit(np.log(step_sizes), np.log(errors[name]), 1)[0]
        assert abs(slope - 3) <= 0.06, (name, slope)
    assert np.min(np.divide(errors["leapfrog"], errors["minimal_norm"])) >= 10


def each_kick(directions, gradients, length):
    """Textbook kicks, backwards in time for negative lengths, of rows."""
    pairs = zip(directions, gradients, strict=True)
    return np.array([textbook_kick(u, g, length)[0] for u, g in pairs])


STEP, LENGTH = 0.35, 0.7
# Rate at which the gradients of the test turn u.
RATE = 0.5 / STEP


def exponent_of(length, size, pairs, temperature):
    """What belongs to the noise after a step, by the gradients at its ends `[chain, end, d]`.

    Averages of the first four gradients are the last one.
    """
    if length == "matched":
        change = np.mean(np.sum(np.diff(pairs, axis=1) ** 2, axis=(1, 2)) / 2) / (size - 1) ** 2
        whole = np.mean(np.sum(pairs[:, -1] ** 2, axis=1)) / (size - 1) ** 2
        return (min(temperature, 1) * STEP) ** 2 * min((1 + 40 / size) * change, 2 * whole)
    return 2 * STEP * RATE if length == "turning" else 2 * STEP / length


@pytest.mark.parametrize(
    "integrator, size, length, second",
    [
        ("minimal_norm", 5, LENGTH, 1.0),
        ("leapfrog", 100, "matched", 2.0),
        runs.nightly("leapfrog", 20, "matched", -1.0),
        runs.nightly("leapfrog", 100, "turning", -1.0),
    ],
)
def test_explicit_noise_turns_the_direction_by_the_right_angle(integrator, size, length, second):
    """It is drawn between two steps, other numbers each time; kicks before and after are undone.

    A decoherence length L turns u by a mean cosine of exp(-eps / L) where there are many
    parameters; matched noise has L = 2 / (eps q), q = min((1 + 40 / d) r^2, 2 R^2) min(T, 1)^2,
    with the rates at which their changes, r, and they themselves, R, turn u, and "turning" 1 / R.
    Bounds of 5 standard errors: with all coordinates the false-alarm rate is 1e-4.
    """
    # A cold chain explores by the noise of the gradients; a hot one has no more of its own.
    temperature = {-1.0: 3.0, 2.0: 0.8}.get(second, 1.0)
    num_chains, calls = 4_000, CALLS_PER_STEP[integrator]
    kick = SCHEMES[integrator][0][0]
    given: dict[str, Any] = {"decoherence_length": length, "temperature": temperature, "key": 0}
    tx = plain(STEP, integrator=integrator, **given)
    start, across = jnp.eye(size)[:2]
    # Far along the second axis, so that every gradient lies across u where it counts.
    slope = (size - 1) * RATE if isinstance(length, str) else 0.0

    def call(carry, factor):
        params, state = carry
        u = state.arrays.dynamics.momentum.direction
        lateral = across - u * u[1]
        gradient = factor * slope * lateral / jnp.linalg.norm(lateral)
        updates, state = tx.update(temperature * gradient, state, params)
        direction = state.arrays.dynamics.momentum.direction
        seen = gradient, direction, optax_smile.stats(state).step_size
        return (optax.apply_updates(params, updates), state), seen

    def one(key):
        state = moving_along(tx.init(jnp.zeros(size)), start)
        state = optax.tree.set(state, key=jax.random.key_data(key))
        factors = jnp.where(jnp.arange(2 * calls + 1) % 2, second, 1)
        return jax.lax.scan(call, (jnp.zeros(size), state), factors)[1]

    keys = jax.random.split(jax.random.key(11), num_chains)
    gradients, directions, step_sizes = jax.jit(jax.vmap(one))(keys)
    assert np.all(np.asarray(step_sizes) == np.float32(STEP))
    gradients, directions = np.asarray(gradients, float), np.asarray(directions, float)
    assert np.abs(np.linalg.norm(directions, axis=2) - 1).max() < 1e-5
    if slope == 0:
        # Nothing is drawn before the first step has ended.
        assert np.abs(directions[:, :calls] - np.asarray(start)).max() < 1e-6
    added, rng = [], np.random.default_rng(10)
    for end in (calls, 2 * calls):
        # E[u . normalise(u + nu z)] for a unit vector u, by a million draws, with standard error.
        exponent = exponent_of(length, size, gradients[:, [end - calls, end]], temperature)
        nu = np.sqrt(np.expm1(exponent) / size)
        along = 1 + nu * rng.standard_normal(1_000_000)
        cosine = along / np.sqrt(along**2 + nu**2 * rng.chisquare(size - 1, 1_000_000))
        expected, its_error = cosine.mean(), cosine.std() / 1000
        # The kick that closed the step, and the one that opened the next, taken back.
        g = gradients[:, end]
        before = each_kick(directions[:, end - 1], g, kick * STEP)
        after = each_kick(directions[:, end], g, -kick * STEP)
        cosines = np.sum(before * after, axis=1)
        standard_error = np.hypot(cosines.std() / np.sqrt(num_chains), its_error)
        assert abs(cosines.mean() - expected) < 5 * standard_error
        assert len(np.unique(cosines)) > 0.9 * num_chains
        added.append(after - cosines[:, None] * before)
        # Isotropic around u: what is added has mean 0 across it.
        error = added[-1].std(axis=0) / np.sqrt(num_chains) + 1e-6
        assert np.abs(added[-1].mean(axis=0) / error).max() < 5
        assert size != 100 or abs(expected - np.exp(-exponent / 2)) < 2 / size
    products = np.sum(added[0] * added[1], axis=1)
    products = products / np.prod([np.linalg.norm(x, axis=1) for x in added], axis=0)
    assert np.abs(products).mean() < 2 / np.sqrt(size)


def test_isotropic_noise_of_a_network_has_unit_covariance():
    """Signs of neighbours, of other leaves and of other keys have nothing to do with each other."""
    tree = {"w": jnp.zeros((20, 10)), "large": jnp.zeros((800, 45)), "b": jnp.zeros(()), "v": {}}
    draw = jax.jit(_tree.isotropic_like)
    draws = [draw(key, tree) for key in jax.random.split(jax.random.key(0), 400)]
    parts = np.array([[*np.ravel(x["w"]), x["b"], *np.ravel(x["large"][:4])] for x in draws])
    assert set(np.unique(parts)) == {-1, 1}
    # 6 standard errors for the largest of 381 means and 72,390 covariances.
    assert np.abs(parts.mean(axis=0)).max() < 6 / 400**0.5
    assert np.abs(parts.T @ parts / 400 - np.eye(381)).max() < 6 / 400**0.5
    assert abs(np.mean(draws[0]["large"])) < 5 / 36_000**0.5
    assert jax.tree.map(jnp.shape, draws[0]) == jax.tree.map(jnp.shape, tree)


def test_isotropic_noise_has_no_memory():
    """Mean products of signs at a distance, in a call and from call to call; 2^24 of each.

    A hash of two multiplications instead of three is 6 standard errors off at some of them.
    """
    lags, size, num_keys = (1, 2, 3, 4, 5, 7, 8, 16, 32, 100, 256, 1000, 1024, 2**16), 2**22, 4
    draw, found = jax.jit(lambda key: _tree.isotropic_like(key, jnp.zeros(size))), []
    for pair in jax.random.split(jax.random.key(0), (num_keys, 2)):
        z, after = (np.asarray(draw(key)) for key in pair)
        # Sums of so many signs are exact in float32.
        sums = [np.sum(z), z @ after, *(z[:-lag] @ z[lag:] for lag in lags)]
        found.append(np.array(sums, float) / size)
    assert np.abs(np.mean(found, axis=0)).max() < 4 / (num_keys * size) ** 0.5


def test_a_step_keeps_its_length_to_the_end():
    sizes = jnp.asarray([1.0, 3.0, 2.0])
    tx = optax_smile.smile(
        lambda count: sizes[count], num_data=1, integrator="minimal_norm", decoherence_length=None
    )
    params: Any = jnp.ones(3)
    state, lengths = tx.init(params), []
    for _ in range(6):
        updates, state = tx.update(params / 10, state, params)
        params = optax.apply_updates(params, updates)
        lengths.append(float(jnp.linalg.norm(updates)))
    np.testing.assert_allclose(lengths, np.repeat(sizes, 2) / 2, rtol=1e-5)


def test_random_signs_are_those_of_the_place():
    key = jax.random.key(0)
    flat = _tree.isotropic_like(key, jnp.zeros(8 * 9 * 10 * 2))
    for shape in ((8, 9, 10, 2), (72, 20)):
        np.testing.assert_array_equal(_tree.isotropic_like(key, jnp.zeros(shape)).ravel(), flat)


def test_noise_forgets_over_a_length():
    """That of "turning" over 1 / 0.25; "matched" without change over the width that is known."""
    one, yes = jnp.float32(1), jnp.array(True)
    end = evidence.StepEnd(yes, yes, one, one / 5, one, one, one, 1.0, num_parameters=2)
    fields = [one / 2 for _ in stepping.Heading._fields]
    heading = stepping.Heading(*fields)._replace(moving=yes)
    given = end, heading, evidence.Sums(*[one / 3] * 10)
    leapfrog: Any = partial(stepping.Momentum, stepping.SCHEMES["leapfrog"])
    for rule, rates in (("turning", (one / 4, one / 9, 0.0)), ("matched", (one, 0 * one, one / 4))):
        got, expected = (leapfrog(x).diffuse(*given, rates, 1.0) for x in (rule, 4.0))
        np.testing.assert_allclose(jnp.stack(got), jnp.stack(expected), rtol=1e-6)


# With gradients of batches, against a step in NumPy.


def banana(params):
    x, y = jnp.append(params["x"], params["last"]), jnp.ravel(params["y"])
    return jnp.sum(x**2) / 2 + jnp.sum((y - x**2 + 0.1 * jnp.roll(x, 1)) ** 2) / 1.4


def banana_start():
    rng, shapes = np.random.default_rng(6), {"x": (3,), "y": (2, 2), "last": ()}
    return {name: jnp.asarray(rng.standard_normal(shape)) for name, shape in shapes.items()}


PRECISIONS = {"x": 0.5, "y": 3.0, "last": 0.0}
MEANS: Any = {"x": 1.0, "y": np.array([[0.0, 1], [2, 3]]), "last": 2.0}
POSTERIOR: Any = {"num_data": 12.0, "prior_precision": PRECISIONS, "temperature": 1.7}
POSTERIOR["prior_mean"] = MEANS
BATCHES = np.random.default_rng(8).standard_normal((41, 8)) / 3


def loss_fn(params, batch):
    return banana(params) / 12 + jnp.sum(jnp.cosh(ravel_pytree(params)[0] - batch)) / 12


def energy(params, batch):
    prior = sum(
        PRECISIONS[name] * jnp.sum((x - MEANS[name]) ** 2) / 2 for name, x in params.items()
    )
    return (12 * loss_fn(params, batch) + prior) / 1.7


def follow_loss(tx, params):
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


@pytest.mark.parametrize("integrator", CALLS_PER_STEP)
def test_trajectory_and_energies_are_those_of_the_textbook(integrator):
    """A batch of its own for each gradient, and a prior for each leaf.

    MCLMC starts in a random direction, SMILE from rest; noise is no part of an energy error.
    """
    with jax.enable_x64(True):
        length, tx = np.inf, plain(0.15, **POSTERIOR)
        if integrator == "minimal_norm":
            length = 0.4
            tx = optax_smile.mclmc(0.15, decoherence_length=length, key=4, **POSTERIOR)
        calls = follow_loss(tx, banana_start())
    positions, changes = zip(*textbook(integrator, 0.15, length, calls), strict=True)
    np.testing.assert_allclose(calls[0], positions, rtol=0, atol=1e-11)
    np.testing.assert_allclose(calls[-1], changes, rtol=0, atol=1e-10)
    assert np.isfinite(changes).sum() == 40 // CALLS_PER_STEP[integrator]
    assert np.ptp(calls[0], axis=0).min() > 0.1
