import warnings
from functools import cache
from statistics import NormalDist
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from paper import PAPER
from test_momentum import CALLS_PER_STEP, textbook_kick

import optax_smile

SAMPLERS = {"smile": optax_smile.smile, "psmile": optax_smile.psmile}
PLAIN: Any = {"tuner": None, "reject_quantile": None}
# A scale within the few calls of a test: see conftest.py.
SHORT_WINDOWS = True
MAGNITUDES = {"large": 1e3, "one": 1.0, "small": 1e-2, "tiny": 1e-6}
SHAPES = {"large": (4,), "one": (), "small": (2, 3), "tiny": (3,)}
SIZE = 14
# A value that makes any step an outlier.
HUGE = 1e7
# One sampler for each way back: of a single drift with a scale, and of two drifts.
SCALED = "psmile", "leapfrog"
ANCHORED = "smile", "minimal_norm"
one_of_each = pytest.mark.parametrize("case", [SCALED, ANCHORED])


def start_params(seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(MAGNITUDES[name] * rng.standard_normal(SHAPES[name]), jnp.float32)
        for name in SHAPES
    }


def draw_inputs(seed, num):
    """Gradients and values that do not depend on the parameters, [call, ...]."""
    rng = np.random.default_rng([seed, num])
    grads = {name: rng.standard_normal((num, *SHAPES[name])).astype(np.float32) for name in SHAPES}
    return grads, (0.5 * rng.standard_normal(num)).astype(np.float32)


def build(name, integrator, **arguments):
    """A sampler as published but for its integrator, and its jitted update; built once."""
    return compiled(name, integrator, tuple(sorted(arguments.items())))


@cache
def compiled(name, integrator, arguments):
    options: Any = PAPER | {"integrator": integrator} | dict(arguments)
    is_random = options["reject_momentum"] == "refresh" or options["decoherence_length"]
    options |= {"key": jax.random.key(0) if is_random else None}
    tx = SAMPLERS[name](0.5, num_data=1, prior_precision=0.0, **options)
    return tx, jax.jit(tx.update)


def at(tree, index):
    return jax.tree.map(lambda leaf: leaf[index], tree)


def add(params, updates):
    """As optax.apply_updates, without a compilation."""
    return jax.tree.map(lambda x, dx: np.asarray(x) + np.asarray(dx), params, updates)


class Record(NamedTuple):
    """One call: the parameters that it judged, those that it proposed, the state after it."""

    judged: Any
    proposal: Any
    state: Any

    @property
    def stats(self):
        return optax_smile.stats(self.state)


def drive(update, params, state, inputs):
    """Call after call with given gradients and values."""
    grads, values = inputs
    records = []
    for index, value in enumerate(values):
        updates, state = update(at(grads, index), state, params, value=value)
        records.append(Record(params, add(params, updates), state))
        params = records[-1].proposal
    return records


def trace_of(records, *names):
    """The named statistics, [call]."""
    return [np.array([getattr(record.stats, name) for record in records]) for name in names]


def flat(tree):
    return np.concatenate([np.ravel(np.asarray(leaf)) for leaf in jax.tree.leaves(tree)])


def without_energy(state):
    """The state without its key and the one number that may be NaN, energy_change."""
    return state._replace(last_update=state.last_update._replace(energy_change=None), key=None)


def assert_finite(*trees):
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(trees))


def ulps(got, start, proposal):
    """Largest difference in units in the last place of the larger of start and proposal."""
    got, start, proposal = flat(got), flat(start), flat(proposal)
    unit = np.spacing(np.maximum(np.abs(start), np.abs(proposal)))
    return np.max(np.abs(got.astype(float) - start.astype(float)) / unit)


def at_an_open_step(tx, update, integrator, seed=1):
    """A chain with settled averages whose next call ends a step, and where that step began."""
    params = start_params()
    records = drive(update, params, tx.init(params), draw_inputs(seed, 41))
    for attempt in range(20):
        last = records[-1]
        inputs = draw_inputs(seed + 100 + attempt, 1)
        last = drive(update, last.proposal, last.state, inputs)[0]
        records.append(last)
        if last.stats.step_end and last.stats.accepted:
            break
    assert last.stats.step_end and last.stats.accepted
    start = last.judged
    middle = draw_inputs(seed + 200, CALLS_PER_STEP[integrator] - 1)
    records += drive(update, last.proposal, last.state, middle)
    return records[-1].proposal, records[-1].state, start


# What survives of a rejected point.


def slow_threshold(mean, std, probability=0.98):
    z = NormalDist().inv_cdf(probability)
    ratio = min(std / mean, 1.5 * z)
    return mean * (1 - ratio**2 / 9 + z * ratio / 3) ** 3


@pytest.mark.parametrize(
    "name, integrator, reject_momentum", [(*SCALED, "zero"), (*ANCHORED, "refresh")]
)
def test_nothing_else_of_a_rejected_point_survives(name, integrator, reject_momentum):
    """Two rejected points that have nothing in common leave the same behind."""
    tx, update = build(name, integrator, reject_momentum=reject_momentum)
    params, before, _ = at_an_open_step(tx, update, integrator)
    grads, values = draw_inputs(3, 2)
    kept = update(at(grads, 0), before, params, value=values[0])[1]
    first, after = update(at(grads, 0), before, params, value=np.float32(HUGE))
    other_grads = jax.tree.map(lambda g: -40 * g + 3, at(grads, 1))
    second, other = update(other_grads, before, params, value=np.float32(-30 * HUGE))
    assert not after.last_update.accepted and not other.last_update.accepted
    chex.assert_trees_all_equal(first, second)
    chex.assert_trees_all_equal(without_energy(after), without_energy(other))
    if reject_momentum == "refresh":
        assert np.array_equal(after.key, other.key)
        assert not np.array_equal(after.key, before.key)

    # The energy that is told is the true one.
    told, expected = optax_smile.stats(after), float(optax_smile.stats(kept).energy_change)
    np.testing.assert_allclose(told.energy_change, expected + HUGE - values[0], rtol=1e-6)
    # What stays as it was before that point, bit by bit, and what is counted and adapted.
    chex.assert_trees_all_equal(after.preconditioner, before.preconditioner)
    assert after.num_steps == before.num_steps
    assert told.num_rejected == optax_smile.stats(before).num_rejected + 1
    assert told.num_nonfinite == 0 and after.evidence.turns == before.evidence.turns
    factor = before.tuner.step_size_factor * 0.98
    np.testing.assert_allclose(after.tuner.step_size_factor, factor, rtol=1e-6)
    # The energy enters the averages with three times the threshold.
    mean = float(optax_smile.stats(before).energy_mean)
    std = float(optax_smile.stats(before).energy_std)
    capped, count = 3 * slow_threshold(mean, std), int(after.evidence.energies.num_energies)
    weight = 0.01 / (1 - 0.99**count)
    np.testing.assert_allclose(told.energy_mean, mean + weight * (capped - mean), rtol=1e-5)


def test_threshold_is_that_of_the_energies_before_the_step():
    tx, update = build(*SCALED)
    params = start_params()
    grads, values = draw_inputs(6, 300)
    values *= np.exp(np.sin(np.arange(300, dtype=np.float32)))
    records = drive(update, params, tx.init(params), (grads, values))
    changes, accepted, means, stds, rejections = trace_of(
        records, "energy_change", "accepted", "energy_mean", "energy_std", "num_rejected"
    )
    known = np.flatnonzero(np.isfinite(changes))
    assert np.all(accepted[np.isnan(changes)]) and np.all(accepted[known[:10]])
    for index in known[10:]:
        threshold = slow_threshold(float(means[index - 1]), float(stds[index - 1]))
        assert accepted[index] == (abs(changes[index]) <= threshold)
    assert rejections[-1] == np.sum(~accepted) >= 3


# The momentum after a rejection.


@one_of_each
def test_zero_momentum_goes_down_the_next_gradient(case):
    name, integrator = case
    tx, update = build(name, integrator)
    params, state, _ = at_an_open_step(tx, update, integrator)
    grads, values = draw_inputs(8, 2)
    updates, state = update(at(grads, 0), state, params, value=np.float32(HUGE))
    scale, next_scale = 1.0, 1.0
    if name == "psmile":
        scale = 1 / flat(state.preconditioner.inverse_scale()).astype(float)
    whitened = flat(at(grads, 1)) / scale
    updates, state = update(at(grads, 1), state, add(params, updates), value=values[1])
    if name == "psmile":
        next_scale = 1 / flat(state.preconditioner.inverse_scale()).astype(float)
    expected = -whitened / np.linalg.norm(whitened)
    np.testing.assert_allclose(flat(state.momentum.direction), expected, atol=1e-6)
    length = float(optax_smile.stats(state).step_size) / CALLS_PER_STEP[integrator]
    moved = length * expected / next_scale
    np.testing.assert_allclose(flat(updates), moved, rtol=1e-4, atol=1e-6)


def test_refreshed_momentum_is_where_the_next_kick_begins():
    tx, update = build(*ANCHORED, reject_momentum="refresh")
    params, state, _ = at_an_open_step(tx, update, "minimal_norm")
    grads, values = draw_inputs(9, 2)
    updates, state = update(at(grads, 0), state, params, value=np.float32(HUGE))
    fresh, step_size = flat(state.momentum.direction), float(optax_smile.stats(state).step_size)
    _, state = update(at(grads, 1), state, add(params, updates), value=values[1])
    g = flat(at(grads, 1)).astype(float)
    expected, _ = textbook_kick(fresh.astype(float), g, 0.1931833275037836 * step_size)
    np.testing.assert_allclose(flat(state.momentum.direction), expected, atol=1e-6)


def test_refreshed_momenta_are_isotropic_and_differ_between_resets_and_chains():
    """4,000 chains with keys of their own, two rejections each.

    Every bound is 5.5 standard errors; with about 250 comparisons the false-alarm rate is 1e-5.
    """
    num_chains = 4000
    tx, update = build(*ANCHORED, reject_momentum="refresh")
    params, state, _ = at_an_open_step(tx, update, "minimal_norm")
    grads, values = draw_inputs(10, 2)

    def call(params, before, value):
        updates, after = tx.update(at(grads, 0), before, params, value=value)
        state: Any = after
        direction = [jnp.ravel(leaf) for leaf in jax.tree.leaves(state.momentum.direction)]
        accepted = state.last_update.accepted
        return optax.apply_updates(params, updates), state, jnp.concatenate(direction), accepted

    def each_chain(leaf):
        return np.broadcast_to(leaf, (num_chains, *np.shape(leaf)))

    call = jax.jit(jax.vmap(call, in_axes=(0, 0, None)))
    keys = jax.random.key_data(jax.random.split(jax.random.key(1), num_chains))
    state = jax.tree.map(each_chain, state._replace(key=None))._replace(key=keys)
    params, rejections = jax.tree.map(each_chain, params), []
    script = (HUGE, False), (values[0], True), (values[0], True), (-HUGE, False)
    for value, expected in script:
        params, state, direction, accepted = call(params, state, np.float32(value))
        assert np.all(accepted == expected)
        rejections.append(np.asarray(direction, float))
    first, *_, second = rejections
    for direction in (first, second):
        np.testing.assert_allclose(np.linalg.norm(direction, axis=1), 1, rtol=1e-5)
        # Mean 0 and second moments I / d, whose standard errors are those of a unit vector.
        assert np.abs(direction.mean(0)).max() <= 5.5 / np.sqrt(SIZE * num_chains)
        moments = direction.T @ direction / num_chains - np.eye(SIZE) / SIZE
        error = np.sqrt(2 / (SIZE * (SIZE + 2)) / num_chains)
        assert np.abs(moments).max() <= 5.5 * error
        assert len(np.unique(direction[:, 0])) > 0.99 * num_chains
    # The second rejection of a chain is independent of its first.
    cosine = np.sum(first * second, axis=1)
    assert np.abs(cosine).max() < 0.95
    assert abs(cosine.mean()) <= 5.5 / np.sqrt(SIZE * num_chains)


# Numbers that are not finite.

NUM_CALLS = 40
NAN, INF = np.nan, np.inf
# A leaf of the gradient, where in it and what, or the value.
POISONS = [
    ("tiny", (1,), NAN, None),
    ("large", (0,), INF, None),
    ("one", (), -INF, None),
    ("small", (0, 1), 1e25, None),
    ("tiny", (1,), NAN, -INF),
    ("one", (), 0, NAN),
    ("one", (), 0, INF),
]
# Before and after the averages have settled, at step ends and in the middle of a step.
CASES = [(poison, call) for poison in POISONS for call in (0, 1, 2, 3, 4, 5, 12, 30, 31)]


@one_of_each
def test_a_non_finite_number_leaves_the_chain_sound(case):
    """Every kind at every one of the calls, each in a vmapped chain of its own."""
    grads, values = jax.tree.map(
        lambda x: np.repeat(x[:, None], len(CASES), 1), draw_inputs(11, NUM_CALLS)
    )
    for index, ((leaf, place, bad, value), call) in enumerate(CASES):
        grads[leaf][(call, index, *place)] = bad
        if value is not None:
            values[call, index] = value
    tx, _ = build(*case)
    update = jax.jit(jax.vmap(lambda g, s, p, value: tx.update(g, s, p, value=value)))
    params = jax.tree.map(lambda x: np.stack([x] * len(CASES)), start_params())
    state = jax.vmap(tx.init)(params)
    records = drive(update, params, state, (grads, values))
    records = [jax.tree.map(np.asarray, record) for record in records]
    for record in records:
        assert_finite(record.judged, record.proposal, without_energy(record.state))

    for index, (_, call) in enumerate(CASES):
        chain = [at(record, index) for record in records]
        last_calls = [record.state.last_update for record in chain]
        counted = [record.state.guardrail.num_nonfinite for record in chain]
        np.testing.assert_array_equal(counted, np.arange(NUM_CALLS) >= call)
        assert [last.num_gradients for last in last_calls] == list(range(1, NUM_CALLS + 1))
        assert not last_calls[call].accepted
        assert np.isnan(last_calls[call].energy_change)
        # Nothing of that call stays: averages and step size are as before it.
        before, after = at(state, index) if call == 0 else chain[call - 1].state, chain[call].state
        kept = [
            (x.evidence.energies, x.evidence.turns, x.preconditioner, x.tuner, x.num_steps)
            for x in (before, after)
        ]
        chex.assert_trees_all_equal(*kept)
        # The parameters are where the open step began, and the chain goes on from there.
        start = max((c for c in range(call) if opened(last_calls, c)), default=0)
        assert ulps(chain[call].proposal, chain[start].judged, chain[call].judged) <= 2
        moved = flat(chain[-1].proposal) - flat(chain[call].proposal)
        assert np.linalg.norm(moved) > 0.5
        assert np.mean([last.accepted for last in last_calls[call + 1 :]]) > 0.5


def opened(last_calls, call):
    """Whether a call has opened a step, from what it and the one before it reported."""
    if not last_calls[call].accepted:
        return False
    return call == 0 or not last_calls[call - 1].accepted or last_calls[call].step_end


def test_an_energy_that_overflows_counts_as_non_finite():
    tx, update = build(*SCALED)
    params, grads = start_params(), draw_inputs(13, 2)[0]
    values = np.array([-3e38, 3e38], np.float32)
    first, second = drive(update, params, tx.init(params), (grads, values))
    assert_finite(second.proposal, without_energy(second.state))
    assert first.stats.accepted and not second.stats.accepted
    assert second.stats.num_nonfinite == 1 and second.stats.num_rejected == 0
    assert ulps(second.proposal, params, second.judged) <= 2


def after_bad_calls(case, bad):
    """Step sizes over calls whose gradients are NaN where `bad`, relative to the first."""
    tx, update = build(*case, **PLAIN)
    grads, values = draw_inputs(14, len(bad))
    grads["one"] = np.where(bad, np.float32(np.nan), grads["one"])
    params = start_params()
    if case == SCALED:
        # A loop that passes gradients only.
        values = [None] * len(bad)
    else:
        # Nor does a value reject anything where no quantile is given.
        values[3::4] *= HUGE
    records = drive(update, params, tx.init(params), (grads, values))
    for record in records:
        assert_finite(record.proposal, without_energy(record.state))
    lengths, counts, accepted, rejected = trace_of(
        records, "step_size", "num_nonfinite", "accepted", "num_rejected"
    )
    assert counts[-1] == sum(bad) and rejected[-1] == 0
    np.testing.assert_array_equal(accepted, ~np.array(bad))
    return lengths / 0.5


MANY_BAD = [False] * 5 + [True] * 9 + [False] * 120
BACKOFF = [1.0] * 9 + [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 16] + [1 / 16] * 99 + [1.0] * 21


def test_step_size_after_non_finite_calls_without_values():
    np.testing.assert_allclose(after_bad_calls(SCALED, MANY_BAD), BACKOFF, rtol=1e-6)
    # Few in a row leave it, and the good ones are counted from the last bad one on.
    few = ([True] * 4 + [False]) * 6
    np.testing.assert_array_equal(after_bad_calls(SCALED, few), np.ones(30))
    later = [True] * 6 + [False] * 60 + [True] + [False] * 110
    got = after_bad_calls(SCALED, later)
    np.testing.assert_allclose(got[5 : 67 + 99], 1 / 4)
    np.testing.assert_allclose(got[67 + 99 :], 1)


def test_step_size_after_non_finite_calls_of_the_two_gradient_integrator():
    """It is read where a step is opened, which good calls do at every other."""
    got = after_bad_calls(ANCHORED, MANY_BAD)
    np.testing.assert_allclose(got[:14], BACKOFF[:14])
    np.testing.assert_allclose(got[14 : 14 + 99], 1 / 16)
    np.testing.assert_allclose(got[14 + 101 :], 1)


# The way back.


def noisy_loss(params, batch):
    """Bounded gradients, so that no step explodes by itself."""
    distances = jax.tree.map(lambda x, b: jnp.sum(jnp.sqrt(1 + (x - b) ** 2)), params, batch)
    return sum(jax.tree.leaves(distances)) / 3


value_and_gradient = jax.jit(jax.value_and_grad(noisy_loss))


class Replay:
    """A chain by hand: what a call says is about the parameters it was given."""

    def __init__(self, initial, calls_per_step):
        self.calls_per_step, self.place, self.num_back = calls_per_step, 0, 0
        self.start = self.accepted = initial
        self.num_rejected, self.reach = 0, np.abs(flat(initial))

    def judge(self, judged, proposal, last, stats):
        assert stats.step_end == (self.place == self.calls_per_step)
        if stats.accepted:
            if stats.step_end:
                self.accepted, self.num_back = judged, 0
                self.reach = np.abs(flat(judged))
            if self.place in (0, self.calls_per_step):
                self.start, self.place = judged, 0
            self.place += 1
        else:
            assert ulps(proposal, self.start, judged) <= 2
            self.start, self.num_back, self.place = proposal, self.num_back + 1, 0
            self.num_rejected += bool(stats.step_end)
        # Two ulp for the subtraction, two more for each way back since that step end.
        self.reach = np.max([self.reach, *(np.abs(flat(x)) for x in (judged, proposal))], axis=0)
        error = np.abs(flat(last).astype(float) - flat(self.accepted))
        assert np.max(error / np.spacing(self.reach)) <= 2 + 2 * self.num_back


def replay(tx, update, integrator, num_calls, num_rejected):
    """A loop with outliers and NaN, and steps far below and far above the parameters."""
    rng, params = np.random.default_rng(30), start_params()
    odds = [0.85, 0.05, 0.05, 0.05]
    added = rng.choice([0, HUGE, -HUGE, NAN], num_calls, p=odds).astype(np.float32)
    batches, _ = draw_inputs(31, num_calls)
    state, seen = tx.init(params), Replay(params, CALLS_PER_STEP[integrator])
    chex.assert_trees_all_equal(optax_smile.last_accepted(state, params), params)
    for index in range(num_calls):
        factor = jnp.float32([1, 2e-3, 60][index // 3 % 3])
        state = optax.tree.set(state, step_size_factor=factor)
        value, grads = value_and_gradient(params, at(batches, index))
        proposal, state = update(params, state, grads, value + added[index])
        stats = optax_smile.stats(state)
        assert not (np.isnan(added[index]) and stats.accepted)
        seen.judge(params, proposal, optax_smile.last_accepted(state, proposal), stats)
        params = proposal
    assert seen.num_rejected >= num_rejected


@pytest.mark.parametrize("case, reject_momentum", [(SCALED, "zero"), (ANCHORED, "refresh")])
def test_rejected_steps_are_taken_back_to_two_ulp(case, reject_momentum):
    """And `last_accepted` is the last step end that was kept."""
    tx, update = build(*case, reject_momentum=reject_momentum)

    def call(params, state, grads, value):
        updates, state = update(grads, state, params, value=value)
        return add(params, updates), state

    replay(tx, call, case[1], num_calls=200, num_rejected=5)


@pytest.mark.slow
@pytest.mark.parametrize("compiles", [True, pytest.param(False, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("case", [SCALED, ANCHORED, ("psmile", "minimal_norm")])
def test_rejected_steps_are_taken_back_however_they_are_compiled(case, compiles):
    """With explicit noise, too, which turns the direction whether or not the step is rejected."""
    tx, _ = build(*case, decoherence_length=0.2)

    def call(params, state, grads, value):
        updates, state = tx.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    num_calls, num_rejected = (200, 5) if compiles else (60, 1)
    replay(tx, jax.jit(call) if compiles else call, case[1], num_calls, num_rejected)


# Levels of knowledge.


def call_at_any_level(update):
    """Parameters and state after a call with a value or, if it is None, without."""

    def call(params, state, grads, value):
        if value is not None:
            updates, state = update(grads, state, params, value=np.float32(value))
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                updates, state = update(grads, state, params)
        return add(params, updates), state

    return call


def test_a_value_at_one_end_only_gives_no_energy():
    """Of a step of two gradients; what is passed in between makes no difference."""
    tx, update = build(*ANCHORED)
    params, state, _ = at_an_open_step(tx, update, "minimal_norm")
    call = call_at_any_level(update)
    grads, _ = draw_inputs(15, 24)
    # (value at the end, whether the step that ends has an energy, whether it is kept)
    script = [
        (0.0, True, True),
        (None, False, True),
        (None, False, True),
        (HUGE, False, True),
        (HUGE, True, True),
        (None, False, True),
        (0.1, False, True),
        (HUGE, True, False),
        # No step is open after a rejected one.
        (0.2, False, True),
        (0.1, True, True),
    ]
    for index, (value, has_energy, kept) in enumerate(script):
        before = optax_smile.stats(state)
        params, state = call(params, state, at(grads, 2 * index), value)
        stats = optax_smile.stats(state)
        assert int(stats.energy_level) == (value is not None)
        assert np.isfinite(stats.energy_change) == has_energy, index
        assert bool(stats.accepted) == kept, index
        # Only a known energy enters the averages.
        assert (stats.energy_mean != before.energy_mean) == has_energy
        if kept:
            middle = [None, 0.0, HUGE][index % 3]
            params, state = call(params, state, at(grads, 2 * index + 1), middle)
            inside = optax_smile.stats(state)
            assert not inside.step_end and inside.accepted and np.isnan(inside.energy_change)
            assert int(inside.energy_level) == (middle is not None)
            assert inside.energy_mean == stats.energy_mean
    assert int(stats.num_nonfinite) == 0
