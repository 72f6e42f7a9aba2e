from functools import cache
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from paper_settings import PAPER
from public_samplers import quick_psmile
from test_langevin import flat, ulps
from test_momentum import CALLS_PER_STEP
from test_tuner import slow_quantile

import optax_smile

LEAVES = {"large": (1e3, (4,)), "one": (1.0, ()), "small": (1e-2, (2, 3)), "tiny": (1e-6, (3,))}
RNG = np.random.default_rng(0)
PARAMS = {k: np.array(x * RNG.standard_normal(y), "float32") for k, (x, y) in LEAVES.items()}
# A value that makes any step an outlier.
HUGE = 1e7
NAN, INF = np.nan, np.inf
# One sampler for each way back: of a single drift with a scale, and of two drifts.
SCALED = "psmile", "leapfrog"
ANCHORED = "smile", "minimal_norm"


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
    """As optax.apply_updates, without a compilation."""
    return jax.tree.map(lambda x, dx: np.asarray(x) + np.asarray(dx), params, updates)


class Record(NamedTuple):
    """One call: the parameters that it judged, those that it proposed, the state after it.

    And what that says of itself.
    """

    judged: Any
    proposal: Any
    state: Any
    stats: Any


see = jax.jit(optax_smile.stats)


def drive(update, params, state, inputs):
    grads, values = inputs
    records = []
    for index, value in enumerate(values):
        updates, state = update(at(grads, index), state, params, value=value)
        records.append(Record(params, add(params, updates), state, see(state)))
        params = records[-1].proposal
    return records


def trace_of(records, *names):
    return [np.array([getattr(record.stats, name) for record in records]) for name in names]


def without_energy(state):
    """The state without its key and the one number that may be NaN, energy_change."""
    state = state.unpack()
    return state._replace(last_update=state.last_update._replace(energy_change=None), key=None)


@cache
def at_an_open_step(case, **arguments) -> Any:
    """A sampler, its update, parameters and state: averages settled, the next call ends a step."""
    tx, update = build(*case, **arguments)
    records = drive(update, PARAMS, tx.init(PARAMS), draw_inputs(1, 60))
    last = [record for record in records if record.stats.step_end and record.stats.accepted][-1]
    middle = draw_inputs(2, CALLS_PER_STEP[case[1]] - 1)
    last = [last, *drive(update, last.proposal, last.state, middle)][-1]
    return tx, update, last.proposal, last.state


def matrix_of(state):
    return np.asarray(state.unpack().dynamics.preconditioner.inverse_scale().entries, float)


def test_nothing_else_of_a_rejected_point_survives():
    _, update, params, before = at_an_open_step(SCALED)
    grads, values = draw_inputs(3, 2)
    kept = update(at(grads, 0), before, params, value=values[0])[1]
    first, after = update(at(grads, 0), before, params, value=np.float32(HUGE))
    other_grads = jax.tree.map(lambda g: -40 * g + 3, at(grads, 1))
    second, other = update(other_grads, before, params, value=np.float32(-30 * HUGE))
    assert not after.unpack().last_update.accepted and not other.unpack().last_update.accepted
    chex.assert_trees_all_equal(first, second)
    chex.assert_trees_all_equal(without_energy(after), without_energy(other))

    # The energy is reported as it is.
    stats, old, expected = see(after), see(before), float(see(kept).energy_change)
    np.testing.assert_allclose(stats.energy_change, expected + HUGE - values[0], rtol=1e-6)
    # What stays as it was before that point, bit by bit, and what is counted and adapted.
    chex.assert_trees_all_equal(*(x.unpack().dynamics.preconditioner for x in (after, before)))
    chex.assert_trees_all_equal(*(x.unpack().dynamics.evidence.turns for x in (after, before)))
    assert after.unpack().num_steps == before.unpack().num_steps
    assert stats.num_rejected == old.num_rejected + 1 and stats.num_nonfinite == 0
    factors = [x.arrays.dynamics.tuner.step_size_factor for x in (after, before)]
    np.testing.assert_allclose(factors[0], 0.98 * factors[1], rtol=1e-6)
    # The energy enters the averages with three times the threshold.
    mean, capped = float(old.energy_mean), 3 * slow_quantile(old.energy_mean, old.energy_std, 0.98)
    count = int(after.unpack().dynamics.evidence.energies.num_energies)
    weight = 0.01 / (1 - 0.99**count)
    np.testing.assert_allclose(stats.energy_mean, mean + weight * (capped - mean), rtol=1e-5)

    # The next step goes down the gradient.
    updates, last = update(at(grads, 1), after, add(params, first), value=values[1])
    whitened = matrix_of(after).T @ flat(at(grads, 1))
    direction = -whitened / np.linalg.norm(whitened)
    np.testing.assert_allclose(flat(last.arrays.dynamics.momentum.direction), direction, atol=1e-6)
    moved = float(see(last).step_size) * matrix_of(last) @ direction
    np.testing.assert_allclose(flat(updates), moved, rtol=1e-4, atol=1e-6)


def test_threshold_is_that_of_the_energies_before_the_step():
    tx, update = build(*SCALED)
    grads, values = draw_inputs(6, 300)
    values *= np.exp(np.sin(np.arange(300, dtype=np.float32)))
    names = "energy_change", "accepted", "energy_mean", "energy_std", "num_rejected"
    records = drive(update, PARAMS, tx.init(PARAMS), (grads, values))
    changes, accepted, means, stds, rejections = trace_of(records, *names)
    known = np.flatnonzero(np.isfinite(changes))
    assert np.all(accepted[np.isnan(changes)]) and np.all(accepted[known[:10]])
    for index in known[10:]:
        threshold = slow_quantile(float(means[index - 1]), float(stds[index - 1]), 0.98)
        assert accepted[index] == (abs(changes[index]) <= threshold)
    assert rejections[-1] == np.sum(~accepted) >= 3


NUM_CALLS = 40
# A leaf of the gradient, where in it and what, or the value.
POISONS = [("tiny", (1,), NAN, None), ("large", (0,), INF, None), ("one", (), -INF, None)]
POISONS += [("small", (0, 1), 1e25, None), ("tiny", (1,), NAN, -INF)]
POISONS += [("one", (), 0, value) for value in (NAN, INF)]
# Before and after the averages have settled, at step ends and in the middle of a step.
CASES = [(poison, call) for poison in POISONS for call in (0, 1, 2, 3, 4, 5, 12, 30, 31)]


def test_a_non_finite_number_leaves_the_chain_sound():
    """Every kind at every one of the calls, each in a vmapped chain of its own."""
    grads, values = jax.tree.map(
        lambda x: np.repeat(x[:, None], len(CASES), 1), draw_inputs(11, NUM_CALLS)
    )
    for index, ((leaf, place, bad, value), call) in enumerate(CASES):
        grads[leaf][(call, index, *place)] = bad
        if value is not None:
            values[call, index] = value
    tx, _ = build(*ANCHORED)
    update = jax.jit(jax.vmap(lambda g, s, p, value: tx.update(g, s, p, value=value)))
    params = jax.tree.map(lambda x: np.stack([x] * len(CASES)), PARAMS)
    state = jax.vmap(tx.init)(params)
    records = jax.tree.map(np.asarray, drive(update, params, state, (grads, values)))
    for record in records:
        parts = record.judged, record.proposal, without_energy(record.state)
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(parts))

    for index, (_, call) in enumerate(CASES):
        chain = [at(record, index) for record in records]
        last_calls = [record.state.unpack().last_update for record in chain]
        accepted = [last.accepted for last in last_calls]
        counted = [record.state.unpack().guardrail.num_nonfinite for record in chain]
        np.testing.assert_array_equal(counted, np.arange(NUM_CALLS) >= call)
        assert [last.num_gradients for last in last_calls] == list(range(1, NUM_CALLS + 1))
        assert not accepted[call] and not last_calls[call].has_energy
        # Nothing of that call stays: averages and step size are as before it.
        before, after = at(state, index) if call == 0 else chain[call - 1].state, chain[call].state
        opened = [x.unpack() for x in (before, after)]
        for part in ("energies", "turns", "preconditioner", "tuner", "num_steps"):
            chex.assert_trees_all_equal(*(optax.tree.get(x, part) for x in opened))
        # The parameters are where the open step began, and the chain goes on from there. A step
        # opens at first, after a rejected call, and where another ends.
        opens = (c == 0 or not accepted[c - 1] or last_calls[c].step_end for c in range(call))
        start = max((c for c, is_open in enumerate(opens) if is_open and accepted[c]), default=0)
        assert ulps(chain[call].proposal, chain[start].judged, chain[call].judged) <= 2
        moved = flat(chain[-1].proposal) - flat(chain[call].proposal)
        assert np.linalg.norm(moved) > 0.5
        assert np.mean(accepted[call + 1 :]) > 0.5


def after_bad_calls(case, bad):
    """Step sizes over calls whose gradients are NaN where `bad`, relative to the first."""
    tx, update = build(*case, tuner=None, reject_quantile=None)
    grads, values = draw_inputs(14, len(bad))
    grads["one"] = np.where(bad, np.float32(NAN), grads["one"])
    # A loop that passes gradients only; nor does a value reject anything without a quantile.
    values[3::4] *= HUGE
    values = [None] * len(bad) if case == SCALED else values
    records = drive(update, PARAMS, tx.init(PARAMS), (grads, values))
    names = "step_size", "num_nonfinite", "accepted", "num_rejected"
    lengths, counts, accepted, rejected = trace_of(records, *names)
    assert counts[-1] == sum(bad) and rejected[-1] == 0
    np.testing.assert_array_equal(accepted, ~np.array(bad))
    return lengths / 0.5


def test_step_size_after_non_finite_calls_with_and_without_values():
    many = [False] * 5 + [True] * 9 + [False] * 120
    backoff = [1.0] * 9 + [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 16] + [1 / 16] * 99 + [1.0] * 21
    np.testing.assert_allclose(after_bad_calls(SCALED, many), backoff, rtol=1e-6)
    # With two gradients it is read where a step is opened, which good calls do at every other.
    got = np.delete(after_bad_calls(ANCHORED, many), [113, 114])
    np.testing.assert_allclose(got, np.delete(backoff, [113, 114]))
    # Few in a row leave it, and the good ones are counted from the last bad one on.
    few = ([True] * 4 + [False]) * 6
    np.testing.assert_array_equal(after_bad_calls(SCALED, few), np.ones(30))
    got = after_bad_calls(SCALED, [True] * 6 + [False] * 60 + [True] + [False] * 110)
    np.testing.assert_allclose(got[5 : 67 + 99], 1 / 4)
    np.testing.assert_allclose(got[67 + 99 :], 1)


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
    """Of a step of two gradients; what is passed in between makes no difference."""
    _, update, params, state = at_an_open_step(ANCHORED)
    grads, _ = draw_inputs(15, 24)

    def call(index, value):
        value = None if value is None else np.float32(value)
        updates, after = update(at(grads, index), state, params, value=value)
        return add(params, updates), after, see(after)

    # No step is open after a rejected one.
    values = 0.0, None, None, HUGE, HUGE, None, 0.1, HUGE, 0.2, 0.1
    with_energy, accepted = (0, 4, 7, 9), (0, 1, 2, 3, 4, 5, 6, 8, 9)
    for index, value in enumerate(values):
        has_energy, kept = index in with_energy, index in accepted
        before = see(state)
        params, state, stats = call(2 * index, value)
        assert int(stats.energy_level) == (value is not None)
        assert np.isfinite(stats.energy_change) == has_energy, index
        assert bool(stats.accepted) == kept, index
        # Only a known energy enters the averages.
        assert (stats.energy_mean != before.energy_mean) == has_energy
        if kept:
            middle = [None, 0.0, HUGE][index % 3]
            params, state, inside = call(2 * index + 1, middle)
            assert not inside.step_end and inside.accepted and np.isnan(inside.energy_change)
            assert int(inside.energy_level) == (middle is not None)
            assert inside.energy_mean == stats.energy_mean
    assert int(see(state).num_nonfinite) == 0
