"""Limits of float32: non-finite and huge numbers, and the return from a rejected step."""

from functools import cache
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from paper_settings import PAPER
from public_samplers import quick_psmile
from test_langevin import flat, ulps

import optax_smile

LEAVES = {"large": (1e3, (4,)), "one": (1.0, ()), "small": (1e-2, (2, 3)), "tiny": (1e-6, (3,))}
RNG = np.random.default_rng(0)
PARAMS = {k: np.array(x * RNG.standard_normal(y), "float32") for k, (x, y) in LEAVES.items()}
# A value that makes any step an outlier.
HUGE = 1e7
NAN = np.nan
CALLS_PER_STEP = {"leapfrog": 1, "minimal_norm": 2}
# One sampler for each way back: of a single drift with a scale, and of two drifts.
SCALED, ANCHORED = ("psmile", "leapfrog"), ("smile", "minimal_norm")
see = jax.jit(optax_smile.stats)


def draw_inputs(seed, num) -> Any:
    rng = np.random.default_rng([seed, num])
    grads = {k: np.float32(rng.standard_normal((num, *shape))) for k, (_, shape) in LEAVES.items()}
    return grads, np.float32(0.5 * rng.standard_normal(num))


@cache
def build(name, integrator, **arguments):
    """A sampler as published but for its integrator, and its jitted update."""
    options: Any = PAPER | {"integrator": integrator} | arguments
    options |= {"key": jax.random.key(0) if options["decoherence_length"] else None}
    sampler = quick_psmile if name == "psmile" else optax_smile.smile
    tx: Any = sampler(0.5, num_data=1, prior_precision=0.0, **options)
    return tx, jax.jit(tx.update)


def at(tree, index):
    return jax.tree.map(lambda leaf: leaf[index], tree)


def add(params, updates):
    """Like `optax.apply_updates`, but without compilation."""
    return jax.tree.map(lambda x, dx: np.asarray(x) + np.asarray(dx), params, updates)


@pytest.mark.parametrize("integrator", CALLS_PER_STEP)
def test_steps_are_shorter_after_many_calls_that_are_not_finite(integrator):
    """Steps get shorter from the fifth call in a row; a hundred good ones restore their length."""
    tx: Any = optax_smile.smile(
        0.5, num_data=1, integrator=integrator, tuner=None, decoherence_length=None
    )
    many = [False] * 5 + [True] * 9 + [False] * 126
    few = ([True] * 4 + [False]) * 28
    again = [True] * 6 + [False] * 60 + [True] + [False] * 73

    def call(carry, is_bad):
        params, state = carry
        updates, state = tx.update(jnp.where(is_bad, NAN, jnp.cos(params)), state, params)
        return (optax.apply_updates(params, updates), state), optax_smile.stats(state)

    start = jnp.arange(3.0), tx.init(jnp.arange(3.0))
    bad = jnp.array([many, few, again])
    stats = jax.jit(jax.vmap(lambda bad: jax.lax.scan(call, start, bad)[1]))(bad)
    np.testing.assert_array_equal(stats.accepted, ~bad)
    np.testing.assert_array_equal(stats.num_nonfinite[:, -1], bad.sum(axis=1))
    backoff = [1.0] * 9 + [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 16] + [1 / 16] * 99 + [1.0] * 27
    lengths = np.asarray(stats.step_size) / 0.5
    # With two gradients it is read where a step is opened, which good calls do at every other.
    places = np.delete(np.arange(140), [112, 113, 114])
    np.testing.assert_allclose(lengths[0][places], np.array(backoff)[places])
    np.testing.assert_allclose(lengths[1], 1)
    np.testing.assert_allclose(lengths[2][5:], 1 / 4)


@jax.jit
@jax.value_and_grad
def noisy_loss(params, batch):
    distances = jax.tree.map(lambda x, b: jnp.sum(jnp.sqrt(1 + (x - b) ** 2)), params, batch)
    return sum(jax.tree.leaves(distances)) / 3


@pytest.mark.parametrize(
    "case, is_fused",
    [
        (SCALED, False),
        (ANCHORED, False),
        pytest.param(ANCHORED, True, marks=pytest.mark.slow),
        pytest.param(SCALED, True, marks=pytest.mark.nightly),
    ],
)
def test_rejected_steps_are_taken_back_to_two_ulp(case, is_fused):
    """With outliers and NaN, and steps far below and far above the parameters.

    `last_accepted` is the last step end that was kept. Optionally compiled in one with the sum,
    and with noise, which turns the direction whether or not the step is rejected.
    """
    tx, update = build(*case, **({"decoherence_length": 0.2} if is_fused else {}))

    def call(params, state, grads, value):
        updates, state = (tx.update if is_fused else update)(grads, state, params, value=value)
        return (optax.apply_updates if is_fused else add)(params, updates), state

    call = jax.jit(call) if is_fused else call
    rng, params, num_calls = np.random.default_rng(30), PARAMS, 200
    odds = [0.85, 0.05, 0.05, 0.05]
    added = rng.choice([0, HUGE, -HUGE, NAN], num_calls, p=odds).astype(np.float32)
    batches, _ = draw_inputs(31, num_calls)
    state, calls_per_step, place, num_back = tx.init(params), CALLS_PER_STEP[case[1]], 0, 0
    start, kept, reach, num_rejected = params, params, np.abs(flat(params)), 0
    chex.assert_trees_all_equal(optax_smile.last_accepted(state, params), params)
    for index in range(num_calls):
        factor = jnp.float32([1, 2e-3, 60][index // 3 % 3])
        state = optax.tree.set(state, step_size_factor=factor)
        value, grads = noisy_loss(params, at(batches, index))
        proposal, state = call(params, state, grads, value + added[index])
        stats = see(state)
        assert stats.step_end == (place == calls_per_step)
        if stats.accepted:
            assert not np.isnan(added[index])
            if stats.step_end:
                kept, num_back, reach = params, 0, np.abs(flat(params))
            if place in (0, calls_per_step):
                start, place = params, 0
            place += 1
        else:
            assert ulps(proposal, start, params) <= 2
            start, num_back, place = proposal, num_back + 1, 0
            num_rejected += bool(stats.step_end)
        # Two ulp for the subtraction, two more for each way back since that step end.
        reach = np.max([reach, *(np.abs(flat(x)) for x in (params, proposal))], axis=0)
        error = flat(optax_smile.last_accepted(state, proposal)).astype(float) - flat(kept)
        assert np.max(np.abs(error) / np.spacing(reach)) <= 2 + 2 * num_back
        params = proposal
    assert num_rejected >= 5


@pytest.mark.filterwarnings("ignore")
def test_a_value_at_one_end_only_gives_no_energy():
    """The step has two gradients; the value passed between them makes no difference."""
    (tx, update), (grads, _) = build(*ANCHORED), draw_inputs(15, 18)
    params, state, before, stats = PARAMS, tx.init(PARAMS), None, see(tx.init(PARAMS))
    for index, value in enumerate((0.0, 0.1, None, 0.2, 0.1, None, None, 0.3, 0.2)):
        for place, given in enumerate((value, (None, 0.0, HUGE)[index % 3])):
            mean, given = stats.energy_mean, None if given is None else np.float32(given)
            updates, state = update(at(grads, 2 * index + place), state, params, value=given)
            params, stats = add(params, updates), see(state)
            assert stats.accepted and stats.energy_level == (given is not None)
            has_energy = place == 0 and before is not None and value is not None
            assert (abs(stats.energy_change) < 1e3) == has_energy
            # Only a known energy enters the averages.
            assert (stats.energy_mean != mean) == has_energy
        before = value


def second_step(gradients, lengths, size=8) -> Any:
    """Update and stats of chains that start along one gradient `[chain, 2, d]` and meet another."""

    def chain(gradients, length):
        tx = optax_smile.smile(
            length, num_data=1, prior_precision=0.0, decoherence_length=None, tuner=None
        )
        params: Any = jnp.zeros(size)
        updates, state = tx.update(gradients[0], tx.init(params), params, value=0.0)
        params: Any = optax.apply_updates(params, updates)
        updates, state = tx.update(gradients[1], state, params, value=0.0)
        return updates, optax_smile.stats(state)

    return jax.jit(jax.vmap(chain))(gradients, lengths)


def test_steps_of_any_size_and_gradient_are_finite_and_keep_their_length():
    u = jnp.asarray(RNG.normal(size=8), jnp.float32)
    u = u / jnp.linalg.norm(u)
    sizes, lengths = (0.0, 1e-38, 1e-25, 1e-19, 1.0, 1e10, 1e18), (1e-30, 1e-6, 1.0, 1e6)
    starts = (u, -u, jnp.roll(u, 1), jnp.eye(8)[0])
    cases = [(start, size, length) for start in starts for size in sizes for length in lengths]
    gradients = jnp.stack([jnp.stack([u, size * start]) for start, size, _ in cases])
    lengths = jnp.array([length for *_, length in cases], jnp.float32)
    updates, stats = second_step(gradients, lengths)
    assert np.all(stats.accepted) and np.all(np.isfinite(stats.energy_change))
    np.testing.assert_allclose(np.linalg.norm(np.float64(updates), axis=1), lengths, rtol=1e-5)


@pytest.mark.slow
def test_energies_keep_their_digits_among_a_million_parameters():
    """Compared with float64, from tiny kicks to those that turn the direction completely."""
    size, rng = 10**6, np.random.default_rng(3)
    first, across = rng.standard_normal((2, size))
    for length in (1e-2, 30.0, 1e6):
        pair = np.stack([first, 0.3 * across - 0.1 * first])[None] * 100
        exact, found = [], []
        for x64, kept in ((True, exact), (False, found)):
            with jax.enable_x64(x64):
                given = jnp.asarray(pair.astype(np.float32), np.float64 if x64 else np.float32)
                stats = second_step(given, jnp.array([length], given.dtype), size)[1]
                kept.append(float(stats.energy_change[0]))
        assert abs(found[0] - exact[0]) <= 1e-3 + 1e-6 * abs(exact[0])


def test_units_of_the_loss_do_not_matter(angle=0.01, size=50):
    """Gradients of pure noise get half the angle of the tuner, in any unit."""
    tuner = optax_smile.angle_tuner(2 * angle)
    tx = optax_smile.smile(tuner=tuner, num_data=1, prior_precision=0.0, key=0)
    noise, start = jax.random.normal(jax.random.key(1), (300, size)), jnp.zeros(size)

    @jax.jit
    @jax.vmap
    def lengths(unit):
        def call(carry, gradient):
            updates, state = tx.update(unit * gradient, carry[1], carry[0])
            length = optax_smile.stats(state).step_size
            return (optax.apply_updates(carry[0], updates), state), length

        return jax.lax.scan(call, (start, tx.init(start)), noise)[1]

    units = np.array([1e-3, 1, 1e4], np.float32)
    expected = angle * (size - 1) / (units * size**0.5)
    np.testing.assert_allclose(lengths(units)[:, -1], expected, rtol=0.05)
