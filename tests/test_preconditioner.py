from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from public_samplers import quick_psmile
from test_momentum import plain

import optax_smile
from optax_smile import _tree
from optax_smile.stages import scale as scaling
from optax_smile.stages.evidence import GradientWeight

DECAY = 0.99
# Of the gradients [time, coordinate] in most tests: one program for each estimate.
SHAPE = 600, 12


def slow_scale(gradients, estimate="differences"):
    """The scale after gradients [time, coordinate], in float64 and textbook steps."""
    gradients = np.asarray(gradients, np.float64)
    if estimate == "published":
        mean, variance, weight = *np.zeros((2, gradients.shape[1])), 1.0
        for g in gradients:
            mean = DECAY * mean + (1 - DECAY) * g
            variance = DECAY * variance + (1 - DECAY) * (g - mean) ** 2
            weight *= DECAY
        return relative(variance, weight)
    squares = gradients**2 if estimate == "squares" else np.diff(gradients, axis=0) ** 2 / 2
    scale, first, length = np.ones(gradients.shape[1]), 0, 64
    while first + length <= len(squares):
        scale = relative(squares[first : first + length].mean(0), 10 / (10 + length))
        first, length = first + length, length + length // 2
    return scale


def relative(average, weight):
    """Square root of an average over its mean, and that of an isotropic one."""
    if not average.any():
        return np.ones(len(average))
    mixed = weight + (1 - weight) * average / average.mean()
    return np.sqrt(np.clip(mixed, 1e-4, 1e4))


ESTIMATES = {
    "differences": scaling.MeanSquare(differences=True),
    "squares": scaling.MeanSquare(),
    "published": scaling.MovingVariance(DECAY),
}
every_estimate = pytest.mark.parametrize("estimate", ESTIMATES)
windowed = pytest.mark.parametrize("estimate", ["differences", "squares"])


def observe(estimate, state, gradient, trust=1.0, counts=True, restart=False):
    deviation = ESTIMATES[estimate].deviation(state, gradient)
    square = _tree.inner(deviation, deviation)
    weight = GradientWeight(jnp.float32(trust), jnp.asarray(counts), jnp.asarray(restart), square)
    return ESTIMATES[estimate].observe(state, gradient, weight, gradient, gradient)


def scale_of(state):
    return jax.tree.map(lambda x: 1 / x, state.inverse_scale())


@partial(jax.jit, static_argnames="estimate")
def _scales(gradients, estimate):
    def step(state, gradient):
        state = observe(estimate, state, gradient)
        return state, scale_of(state)

    start = ESTIMATES[estimate].init(jax.tree.map(lambda g: g[0], gradients))
    return jax.lax.scan(step, start, gradients)[1]


def scales(gradients, estimate="differences") -> Any:
    return jax.tree.map(np.asarray, _scales(gradients, estimate))


def noisy_gradients(num, size, seed=0):
    """Anisotropic noise about a mean that differs from coordinate to coordinate."""
    rng = np.random.default_rng(seed)
    spread = np.geomspace(0.1, 10, size)
    return 3 * rng.standard_normal(size) + spread * rng.standard_normal((num, size))


@every_estimate
def test_scale_is_that_of_the_formula(estimate):
    """From the first gradient on, with mean square one, in any unit, for a tree as for a vector."""
    start = ESTIMATES[estimate].init(jnp.zeros(SHAPE[1]))
    np.testing.assert_array_equal(scale_of(start), np.ones(SHAPE[1]))
    gradients = noisy_gradients(*SHAPE).astype(np.float32)
    got = scales(gradients, estimate)
    for count in (1, 2, 63, 64, 65, 66, 159, 160, 161, 600):
        expected = slow_scale(gradients[:count], estimate)
        np.testing.assert_allclose(got[count - 1], expected, rtol=2e-5)
    np.testing.assert_allclose(np.mean(got.astype(float) ** 2, axis=1), 1, rtol=1e-5)
    # The forms differ.
    for other in set(ESTIMATES) - {estimate}:
        assert not np.allclose(got[-1], slow_scale(gradients, other), rtol=0.05)
    for factor, rtol in ((2.0**-30, 0), (2.0**25, 0), (7e9, 2e-5)):
        same = scales(gradients * np.float32(factor), estimate)
        np.testing.assert_allclose(same, got, rtol=rtol)
    tree = {"a": gradients[:, :4].reshape(-1, 2, 2), "b": [gradients[:, 4], gradients[:, 5:]]}
    leaves = [leaf.reshape(SHAPE[0], -1) for leaf in jax.tree.leaves(scales(tree, estimate))]
    np.testing.assert_allclose(np.concatenate(leaves, axis=1), got, rtol=2e-5)


@windowed
def test_a_scale_is_that_of_the_window_before(estimate):
    """Windows of 64, 96, 144: nothing else in the run has a say, and inside of one s stays."""
    gradients = noisy_gradients(*SHAPE)
    edges = np.cumsum([64, 96, 144, 216]) - (estimate == "squares")
    got = scales(np.float32(gradients), estimate)
    changes = np.flatnonzero(np.any(np.diff(got, axis=0) != 0, axis=1)) + 1
    np.testing.assert_array_equal(changes, edges)
    gradients[: edges[1]] *= np.geomspace(1000, 1, SHAPE[1])
    gradients[edges[2] + 1 :] *= 7
    other = scales(np.float32(gradients), estimate)
    np.testing.assert_allclose(other[edges[2]], got[edges[2]], rtol=1e-5)
    assert not np.allclose(other[edges[1]], got[edges[1]], rtol=0.5)


def test_scale_keeps_its_digits_and_is_clipped_at_both_ends():
    """As 1 - slope * mean the offset was rounding noise below 3e-4 of the rms."""
    spread = np.append(np.geomspace(1e-6, 1, 20_000), 1e3)
    variance, weight = jnp.asarray(spread**2, jnp.float32), jnp.float32(1e-7)
    mean = jnp.asarray(np.mean(spread**2), jnp.float32)
    got: Any = scaling.inverse_scale(variance, mean, weight)
    relative = 1e-7 + (1 - 1e-7) * spread**2 / np.mean(spread**2)
    assert relative.min() < 1e-6 and relative.max() > 1.9e4
    np.testing.assert_allclose(1 / got, np.sqrt(np.clip(relative, 1e-4, 1e4)), rtol=1e-5)


def after(estimate, gradients, state=None):
    state = ESTIMATES[estimate].init(gradients[0]) if state is None else state
    return jax.lax.scan(lambda x, g: (observe(estimate, x, g), None), state, gradients)[0]


@every_estimate
def test_what_a_gradient_counts_for(estimate):
    """Nothing where it does not enter, and where it is outlying what it is trusted."""
    *gradients, last = jnp.asarray(noisy_gradients(20, 6), jnp.float32)
    state = after(estimate, jnp.stack(gradients))
    chex.assert_trees_all_equal(observe(estimate, state, last, counts=False), state)
    expected = getattr(state, {"published": "gradient_mean"}.get(estimate, "last_gradient"), None)
    expected = 0 if expected is None else expected
    got = observe(estimate, state, expected + 1e6 * last, trust=3e-6)
    shortened = observe(estimate, state, expected + 3 * last)
    chex.assert_trees_all_close(got, shortened, rtol=1e-5)


@windowed
def test_a_chain_on_its_way_begins_again(estimate):
    """Nothing is left of what was seen, and the gradient there is the first to compare with."""
    gradients = jnp.asarray(noisy_gradients(170, 6), jnp.float32)
    state = after(estimate, 1e3 * gradients[:100])
    assert np.ptp(np.asarray(scale_of(state))) > 0.1
    state = observe(estimate, state, gradients[100], restart=True)
    np.testing.assert_array_equal(scale_of(state), np.ones(6))
    state = after(estimate, gradients[101:], state)
    np.testing.assert_allclose(scale_of(state), slow_scale(gradients[100:], estimate), rtol=1e-5)


def test_both_gradients_of_a_step_may_share_a_batch():
    """Differences are of successive step ends: two gradients on one batch would show no noise."""
    spread = np.geomspace(0.1, 10, 12)
    # Of one length, so that none is outlying.
    noises = (spread * np.random.default_rng(5).choice([-1, 1], (70, 12))).astype(np.float32)
    tx = plain(1e-6, optax_smile.psmile, largest_matrix=0, integrator="minimal_norm")
    params, update = jnp.zeros(12), jax.jit(tx.update)
    state = tx.init(params)
    for noise in np.repeat(noises, 2, axis=0):
        updates, state = update(noise, state, params)
        params = optax.apply_updates(params, updates)
    found = state.unpack().dynamics.preconditioner
    # 69 differences of 70 batches, 64 of them in the first window; the first count for less.
    assert (found.num_in_window, found.window) == (5, 96)
    np.testing.assert_allclose(scale_of(found), slow_scale(noises), rtol=0.02)
    latest = np.mean(np.diff(noises[-6:], axis=0) ** 2 / 2, axis=0)
    np.testing.assert_allclose(found.mean_square, latest, rtol=1e-5)
    assert np.ptp(slow_scale(noises)) > 1


# Among them huge ones, squares that overflow, denormal numbers, one that dominates, none at all.
LARGE = [[1e18, -2e18, 5e17, 1e18], [1e25, 1.0, -1e25, 2.0], [1e12, 1e-3, -1e-3, 1e-6]]
SMALL = [[1e-20, -3e-20, 1e-20, 2e-20], [1e-40, 1e-42, 0.0, -1e-40], [0.0] * 4]
EXTREME = [*LARGE, *SMALL, [1e18, 1e-20, 0.0, 1.0]]


def test_extreme_gradients_stay_finite():
    """Among ordinary ones at every third of the first 30 calls, and alone."""
    tx, calls = optax_smile.scale_by_gradient_noise(), np.arange(300)
    alone = np.array(EXTREME, np.float32)[:, None] * np.where(calls % 2, -1, 1)[:, None]
    is_ordinary = (calls % 3 == 0) & (calls < 30)
    mixed = np.where(is_ordinary[:, None], np.array([1.0, -2.0, 0.5, 0.0]), alone)

    def call(state, gradient):
        updates, state = tx.update(gradient, state)
        return state, (updates, state, scale_of(state))

    each = jax.vmap(lambda x: jax.lax.scan(call, tx.init(jnp.zeros(4)), x)[1])
    trace = jax.jit(each)(np.concatenate([alone, mixed]).astype(np.float32))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(trace))
    scale = np.asarray(trace[2], float)
    np.testing.assert_allclose(np.mean(scale**2, axis=-1), 1, rtol=1e-5)
    assert scale.min() > 0


def test_public_transformation_divides_by_the_scale_before():
    """And forgets a gradient that is not finite, which passes through."""
    gradients = noisy_gradients(80, 8).astype(np.float32)
    tx = optax_smile.scale_by_gradient_noise()
    update, state = jax.jit(tx.update), tx.init(jnp.zeros(8))
    for count, gradient in enumerate(gradients):
        for bad in (np.nan, -np.inf, 1e25) if count in (0, 1, 20) else ():
            poisoned = np.where(np.arange(8) == 2, np.float32(bad), gradient)
            updates, unchanged = update(poisoned, state)
            chex.assert_trees_all_equal(unchanged, state)
            assert np.isfinite(updates[2]) == np.isfinite(bad)
            assert np.all(np.isfinite(np.delete(updates, 2)))
        updates, state = update(gradient, state)
        expected = gradient / slow_scale(gradients[:count]) if count else gradient
        np.testing.assert_allclose(updates, expected, rtol=2e-5)
    assert sum(leaf.size == 8 for leaf in jax.tree.leaves(state)) == 3


def test_sampler_whitens_the_gradient_of_the_energy_with_the_scale_before():
    """Prior and num_data included; a drift has its length in the coordinates of the new scale."""
    size = 60
    # Without a mean, which would tell that the chain is on its way.
    gradients = noisy_gradients(80, size).astype(np.float32)
    gradients -= gradients.mean(axis=0)
    posterior = {"num_data": 20.0, "prior_precision": 0.1, "temperature": 4.0}
    tx = plain(0.3, optax_smile.psmile, largest_matrix=0, **posterior)
    params, energies = jnp.linspace(-2, 2, size), []
    update, scale, state = jax.jit(tx.update), np.ones(size), tx.init(params)
    for gradient in gradients:
        raw = (20 * gradient.astype(float) + 0.1 * np.asarray(params, float)) / 4
        energies.append(raw)
        u = np.asarray(state.arrays.dynamics.momentum.direction, float)
        updates, state = update(jnp.asarray(gradient), state, params)
        # Both kicks turn u in the plane of it and of the gradient whitened by the old scale.
        plane, turned = np.stack([u, raw / scale], 1), state.arrays.dynamics.momentum.direction
        rest = turned - plane @ np.linalg.lstsq(plane, np.asarray(turned, float), rcond=None)[0]
        assert np.linalg.norm(rest) < 1e-5
        scale = slow_scale(np.stack(energies))
        found = scale_of(state.unpack().dynamics.preconditioner)
        np.testing.assert_allclose(found, scale, rtol=1e-4)
        np.testing.assert_allclose(np.linalg.norm(np.asarray(updates) * scale), 0.3, rtol=1e-4)
        params = optax.apply_updates(params, updates)
    assert scale.std() > 0.05


def test_gradients_are_not_compared_across_a_change_of_the_scale():
    """At the end of each window of `psmile`; after the first call there is nothing to compare."""
    tx: Any = quick_psmile(0.1, num_data=1, prior_precision=0.0, key=0)
    deviations = jnp.geomspace(0.1, 10.0, 12)

    def call(carry, key):
        gradient = deviations * jax.random.normal(key, deviations.shape)
        updates, state = tx.update(gradient, carry[1], carry[0])
        number = state.unpack().dynamics.evidence.changes.num_changes
        seen = number, state.arrays.dynamics.preconditioner.matrix.entries
        return (optax.apply_updates(carry[0], updates), state), seen

    keys, params = jax.random.split(jax.random.key(0), 40), jnp.zeros(12)
    numbers, scales = jax.lax.scan(call, (params, tx.init(params)), keys)[1]
    changed = np.any(np.diff(scales, axis=0) != 0, axis=(1, 2))
    assert 3 <= changed.sum() <= 5
    np.testing.assert_array_equal(np.diff(numbers)[1:] == 0, changed[:-1])
