"""SGLD, SGHMC and their kin: every update against the formula in NumPy, in float64.

Without jit, since compilation would take most of the time; `test_contract.py` compares both.
"""

import itertools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_smile

CALLS = 7
NUM_DATA, TEMPERATURE = 50.0, 2.5
PRIOR = {"b": 4.0, "w": {"inner": 0.5, "outer": 0.0}}
SIZE = 8
PRIOR_OF_EACH = np.array([4.0] * 3 + [0.5] * 4 + [0.0])
MEAN = np.arange(-4, 4) / 4
RNG = np.random.default_rng(0)
START = RNG.normal(size=SIZE)
ROOT = RNG.normal(size=(SIZE, SIZE))
PRECISION = ROOT @ ROOT.T / SIZE + np.eye(SIZE)
NOISE_OF_THE_BATCH = RNG.normal(size=(400, SIZE))
# Up and down by factors between 0.3 and 3.
FACTORS = np.exp(RNG.uniform(np.log(0.3), np.log(3.0), size=400))
OF_STEP_SIZE = 1e-3


def loss_gradient(x, call):
    return (PRECISION @ x + NOISE_OF_THE_BATCH[call]) / NUM_DATA


def schedule(count):
    return OF_STEP_SIZE * jnp.asarray(FACTORS)[count]


def build(name, step_size: Any = OF_STEP_SIZE, **options) -> Any:
    common = {"num_data": NUM_DATA, "prior_precision": PRIOR, "temperature": TEMPERATURE, "key": 3}
    common["prior_mean"] = as_tree(MEAN)
    return getattr(optax_smile, name)(step_size, **common | options)


def as_tree(vector, dtype: Any = None):
    x = np.asarray(vector, dtype)
    tree = {"b": x[:3], "w": {"inner": x[3:7].reshape(2, 2), "outer": x[7]}}
    return jax.tree.map(jnp.asarray, tree)


def flat(tree):
    return np.concatenate([np.ravel(np.asarray(leaf)) for leaf in jax.tree.leaves(tree)])


def noise_of(state, params):
    """The standard normal numbers that the next call draws."""
    leaves = jax.tree.leaves(params)
    keys = jax.random.split(jax.random.split(optax.tree.get(state, "key"))[1], len(leaves))
    pairs = zip(keys, leaves, strict=True)
    return np.concatenate([np.ravel(jax.random.normal(k, x.shape, x.dtype)) for k, x in pairs])


class Trace(NamedTuple):
    positions: np.ndarray
    noise: np.ndarray
    states: list[Any]

    def stat(self, name):
        return np.array([getattr(optax_smile.stats(state), name) for state in self.states])


def follow(tx, calls=CALLS):
    """Positions `[call + 1, d]`, noise `[call, d]` and states of a chain in float64."""
    with jax.enable_x64(True):
        params = as_tree(START)
        positions, noise, states = [flat(params)], [], [tx.init(params)]
        for call in range(calls):
            noise.append(noise_of(states[-1], params))
            grads = as_tree(loss_gradient(positions[-1], call))
            updates, state = tx.update(grads, states[-1], params)
            params = jax.tree.map(jnp.add, params, updates)
            positions.append(flat(params))
            states.append(state)
    return Trace(np.array(positions), np.array(noise), states)


def textbook(move, noise):
    """Positions of a chain with `move(call, grad U, its history, noise)`, in plain NumPy."""
    positions, history = [START], []
    for call, z in enumerate(noise):
        x = positions[-1]
        history.append(loss_gradient(x, call))
        gradient = (NUM_DATA * history[-1] + PRIOR_OF_EACH * (x - MEAN)) / TEMPERATURE
        positions.append(x + move(call, gradient, history, z))
    return np.array(positions)


def assert_moves(trace, move):
    assert np.abs(np.diff(trace.positions, axis=0)).min(axis=1).min() > 0
    expected, atol = textbook(move, trace.noise), 1e-12 * np.abs(START).max()
    np.testing.assert_allclose(trace.positions, expected, rtol=1e-11, atol=atol)


def test_sgld():
    def move(call, gradient, history, z):
        eps = OF_STEP_SIZE * FACTORS[call]
        return -eps * gradient + np.sqrt(2 * eps) * z

    trace = follow(build("sgld", schedule))
    assert_moves(trace, move)
    np.testing.assert_allclose(trace.stat("step_size")[1:], OF_STEP_SIZE * FACTORS[:CALLS])


def test_psgld(decay=0.6, smallest_root=0.3):
    def move(call, gradient, history, z):
        weights = decay ** np.arange(call, -1, -1)
        root = np.sqrt(weights @ np.square(history) / weights.sum())
        step = OF_STEP_SIZE * FACTORS[call] / (smallest_root * np.sqrt(np.mean(root**2)) + root)
        return -step * gradient + np.sqrt(2 * step) * z

    options = {"square_decay": decay, "smallest_root": smallest_root}
    assert_moves(follow(build("psgld", schedule, **options)), move)


def test_sghmc(friction=0.4, noise=9e3):
    """Uses the velocity of the formula, not the displacement that the state stores."""
    velocity, amplitudes = np.zeros(SIZE), []

    def move(call, gradient, history, z):
        nonlocal velocity
        eps = 1e-2 * FACTORS[call]
        amplitudes.append(np.sqrt(np.maximum(2 * friction - eps**2 * noise, 0)))
        velocity = (1 - friction) * velocity - eps * gradient + amplitudes[-1] * z
        return eps * velocity

    options = {"friction": friction, "gradient_noise": noise}
    assert_moves(follow(build("sghmc", lambda count: 10 * schedule(count), **options)), move)
    # The formula adds noise in some calls only.
    assert 0 < np.mean(np.equal(amplitudes, 0)) < 1


def test_scale_adapted_sghmc():
    friction, adapt_steps, calls = 0.2, 5, 9
    velocity, mean, square = np.zeros(SIZE), np.zeros(SIZE), np.zeros(SIZE)
    window, scales, variances = np.ones(SIZE), [], []

    def move(call, gradient, history, z):
        nonlocal velocity, mean, square, window
        eps = 300 * OF_STEP_SIZE * FACTORS[call]
        if call < adapt_steps:
            rate = 1 / (window + 1)
            mean = (1 - rate) * mean + rate * gradient
            square = (1 - rate) * square + rate * gradient**2
            window = window * (1 - mean**2 / square) + 1
        scales.append((window, mean, square))
        root = np.sqrt(square) + 1e-3 * np.sqrt(np.mean(square))
        velocity = (1 - friction) * velocity - eps * gradient / root
        variances.append(2 * friction / root - eps**2)
        velocity = velocity + np.sqrt(np.maximum(variances[-1], 0)) * z
        return eps * velocity

    options = {"friction": friction, "adapt_steps": adapt_steps}
    tx = build("scale_adapted_sghmc", lambda count: 300 * schedule(count), **options)
    trace = follow(tx, calls)
    assert_moves(trace, move)
    # Noise that would have a negative variance is omitted.
    assert 0.05 < np.mean(np.less(variances, 0)) < 0.95
    memories = np.array([[flat(x) for x in s.unpack().dynamics.memory] for s in trace.states])
    np.testing.assert_allclose(memories[1:], scales, rtol=1e-11)
    changes = np.any(memories[1:] != memories[:-1], axis=(1, 2))
    np.testing.assert_array_equal(changes, np.arange(calls) < adapt_steps)
    # The point that the call was given is the end of the step before it.
    adapts = np.arange(calls) <= adapt_steps
    np.testing.assert_array_equal(trace.stat("is_draw")[1:], ~adapts)


@pytest.mark.parametrize("name", ["psgld", "scale_adapted_sghmc"])
def test_without_any_gradient_nothing_moves(name):
    tx, zeros = build(name, prior_precision=0.0), as_tree(np.zeros(SIZE))
    updates, after = tx.update(zeros, tx.init(zeros), zeros)
    displacement = after.unpack().dynamics.displacement
    assert not np.any(flat(updates)) and np.all(np.isfinite(flat(displacement)))


def test_cyclical_sgld(total=15, cycles=2, exploration=0.3):
    """Two and a half cycles: the cycles continue after `total_steps`."""
    length = int(np.ceil(total / cycles))
    counts = np.arange(5 * length // 2)
    place = counts % length / length
    # Zhang et al. equation 1, with k = call + 1.
    expected = OF_STEP_SIZE * FACTORS[: len(counts)] / 2 * (np.cos(np.pi * place) + 1)
    options = {"total_steps": total, "num_cycles": cycles, "exploration": exploration}
    trace = follow(build("cyclical_sgld", schedule, **options), len(counts))
    # The position in the cycle is a float32 number, whatever the precision of the parameters.
    sizes, samples = trace.stat("step_size")[1:], place >= exploration
    np.testing.assert_allclose(sizes, expected, rtol=1e-5)

    def move(call, gradient, history, z):
        return -sizes[call] * gradient + np.sqrt(2 * sizes[call]) * z * samples[call]

    assert_moves(trace, move)
    # Nothing is a draw before the first step has ended.
    np.testing.assert_array_equal(trace.stat("is_draw")[1:], [False, *samples[:-1]])


def test_exploration_ends_at_the_right_step(length=100):
    """A share of a cycle that ends exactly at a step is not to be decided by rounding.

    In float32, and with jit: a division by a constant may then become a product with its rounded
    inverse.
    """
    counts, params, percents = np.arange(2 * length + 1), jnp.ones(2), (10, 33, 60)

    def are_draws(percent):
        cycles: Any = {"total_steps": 4 * length, "num_cycles": 4, "exploration": percent / 100}
        tx: Any = optax_smile.cyclical_sgld(1e-2, num_data=1, key=0, **cycles)
        _, state = tx.update(params, tx.init(params), params)

        def one(count):
            state_then = state._replace(num_steps=count)
            return optax_smile.stats(tx.update(params, state_then, params)[1]).is_draw

        return jax.vmap(one)(jnp.asarray(counts + 1, jnp.int32))

    found = jax.jit(lambda: [are_draws(percent) for percent in percents])()
    for percent, got in zip(percents, found, strict=True):
        expected = counts % length * 100 >= percent * length
        np.testing.assert_array_equal(got, expected, err_msg=f"exploration {percent / 100}")


@pytest.mark.parametrize("name, options", [("sgld", {}), ("smile", {"integrator": "minimal_norm"})])
def test_a_step_of_negative_size_is_not_made_and_counts_as_non_finite(name, options):
    sizes = jnp.array([1e-3, 1e-3, -1e-3])
    tx: Any = getattr(optax_smile, name)(lambda n: sizes[n], num_data=1, key=0, **options)
    params = jnp.ones(3)
    state = tx.init(params)
    for _ in range(12):
        updates, state = tx.update(params, state, params)
        params = params + updates
    told = optax_smile.stats(state)
    assert told.num_nonfinite >= 6 and told.step_size < 0 and not told.accepted
    np.testing.assert_array_equal(optax_smile.last_accepted(state, params), params)
    assert np.all(np.isfinite(params)) and 0 < np.linalg.norm(params - 1) < 0.1


def good_call(params, call=0):
    return as_tree(loss_gradient(flat(params).astype(float), call), jnp.float32), jnp.float32(1)


def bad_inputs(params):
    grads, value = good_call(params)
    yield grads | {"b": grads["b"].at[2].set(-jnp.inf)}, value
    yield grads, jnp.float32(jnp.nan)


def ulps(got, start, proposal):
    """Largest difference in units in the last place of the larger of start and proposal."""
    got, start, proposal = flat(got), flat(start), flat(proposal)
    unit = np.spacing(np.maximum(np.abs(start), np.abs(proposal)))
    return np.max(np.abs(got.astype(float) - start.astype(float)) / unit)


def run(tx, params, state, calls):
    trail = [(params, state)]
    for call in calls:
        grads, value = good_call(params, call)
        updates, state = tx.update(grads, state, params, value=value)
        params = optax.apply_updates(params, updates)
        trail.append((params, state))
    return trail


def test_nonfinite_inputs_are_taken_back():
    """After good calls, whose `last_accepted` is the point that was judged."""
    tx, start = build("scale_adapted_sghmc", adapt_steps=10), as_tree(START, jnp.float32)
    trail = run(tx, start, tx.init(start), range(CALLS))
    assert np.all(flat(optax_smile.last_accepted(trail[0][1], start)) == flat(start))
    for (judged, _), (proposal, state) in itertools.pairwise(trail):
        assert ulps(optax_smile.last_accepted(state, proposal), judged, proposal) <= 2
        assert np.any(flat(proposal) != flat(judged))
    shown = [optax_smile.stats(state) for _, state in trail[1:]]
    assert [bool(x.step_end) for x in shown] == [False] + [True] * (CALLS - 1)
    assert [int(x.num_gradients) for x in shown] == list(range(1, CALLS + 1))
    unknown = shown[-1].energy_change, shown[-1].energy_mean, shown[-1].energy_std
    assert np.all(np.isnan(unknown)) and shown[-1].energy_level == 1
    assert trail[-1][1].gradients_per_step == 1
    # At the first call there is nothing to take back.
    for calls, judged in ((0, start), (CALLS, trail[-2][0])):
        params, state = trail[calls]
        before, num_steps = state.unpack().dynamics, state.num_steps
        for grads, value in bad_inputs(params):
            updates, after = tx.update(grads, state, params, value=value)
            np.testing.assert_array_equal(flat(updates), -flat(before.displacement))
            back: Any = optax.apply_updates(params, updates)
            assert ulps(back, judged, params) <= 2
            assert np.all(flat(optax_smile.last_accepted(after, back)) == flat(back))
            stats, dynamics = optax_smile.stats(after), after.unpack().dynamics
            counts = stats.num_gradients, stats.num_nonfinite, stats.num_rejected
            assert counts == (calls + 1, 1, 0) and after.num_steps == num_steps
            assert not stats.accepted and stats.step_end == (calls > 0)
            assert np.isnan(stats.energy_change) and not np.any(flat(dynamics.displacement))
            chex.assert_trees_all_equal(dynamics.memory, before.memory)
            # The chain goes on from there, at rest and with fresh noise.
            assert np.all(noise_of(after, back) != noise_of(state, params))
            onwards = run(tx, back, after, [calls])[-1][1]
            stats = optax_smile.stats(onwards)
            assert stats.accepted and not stats.step_end and stats.num_nonfinite == 1
            assert onwards.num_steps == num_steps + 1


def test_is_sample_speaks_of_the_last_accepted_step_end():
    """The first step after the exploration is rejected, so the step before it remains."""
    tx = build("cyclical_sgld", total_steps=10, num_cycles=1, exploration=0.5)
    start = as_tree(START, jnp.float32)
    params, state = run(tx, start, tx.init(start), range(6))[-1]
    assert state.num_steps == 6 and not optax_smile.stats(state).is_draw
    for (grads, value), is_draw in ((next(bad_inputs(params)), False), (good_call(params), True)):
        after = tx.update(grads, state, params, value=value)[1]
        assert optax_smile.stats(after).is_draw == is_draw


def test_below_resolution():
    params = jax.tree.map(lambda x: 1e6 + 0 * x, as_tree(START, jnp.float32))
    grads = jax.tree.map(lambda x: 1e-6 * x, params)
    tx = build("sghmc", lambda count: jnp.where(count == 0, 1e-16, 10.0), prior_precision=0.0)
    state = tx.init(params)
    for expected in (True, False):
        _, state = tx.update(grads, state, params)
        assert optax_smile.stats(state).below_resolution == expected
