import itertools
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

import optax_smile

SAMPLERS = {
    "smile": optax_smile.smile,
    "psmile": optax_smile.psmile,
    "smile_naive": optax_smile.smile_naive,
    "psmile_naive": optax_smile.psmile_naive,
}
GUARDED = ("smile", "psmile")
# A scale within the few calls of a test: see conftest.py.
SHORT_WINDOWS = True
INTEGRATORS = ("leapfrog", "minimal_norm")
CALLS_PER_STEP = {"leapfrog": 1, "minimal_norm": 2}
MAGNITUDES = {"large": 1e3, "one": 1.0, "small": 1e-2, "tiny": 1e-6}
SHAPES = {"large": (4,), "one": (), "small": (2, 3), "tiny": (3,)}
SIZE = 14
# A value that makes any step an outlier.
HUGE = 1e7


def crossed(names, *fast):
    """All samplers with all integrators; those not in `fast`, mostly compilation, are nightly."""
    return [
        pytest.param(*pair, marks=[] if pair in fast else pytest.mark.nightly)
        for pair in itertools.product(names, INTEGRATORS)
    ]


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


def build(name, integrator="leapfrog", **arguments):
    """A sampler without prior, and its jitted update: the same for the same settings."""
    published: Any = PAPER if name in GUARDED else {}
    noisy = arguments.get("reject_momentum") == "refresh" or "decoherence_length" in arguments
    arguments = {"step_size": 0.5} | published | {"integrator": integrator} | arguments
    return compiled(name, noisy, tuple(sorted(arguments.items())))


@cache
def compiled(name, noisy, arguments):
    options: Any = dict(arguments) | ({"key": jax.random.key(0)} if noisy else {})
    tx = SAMPLERS[name](num_data=1, prior_precision=0.0, **options)
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
    return [np.array([record.stats[name] for record in records]) for name in names]


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
        if last.stats["step_end"] and last.stats["accepted"]:
            break
    assert last.stats["step_end"] and last.stats["accepted"]
    start = last.judged
    middle = draw_inputs(seed + 200, CALLS_PER_STEP[integrator] - 1)
    records += drive(update, last.proposal, last.state, middle)
    assert int(last.state.evidence.energies.num_energies) >= 10
    return records[-1].proposal, records[-1].state, start


# The way back.


def stepper(tx, update, mode):
    """Parameters and state after a call, in one of the ways in which a loop may be compiled."""

    def eager(params, state, grads, value):
        updates, state = tx.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    def jitted_update(params, state, grads, value):
        updates, state = update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    return {"eager": eager, "jit": jitted_update, "all in one jit": jax.jit(eager)}[mode]


def varied_step_size(count):
    """Steps far below and far above the parameters."""
    return jnp.asarray([0.5, 1e-3, 30.0])[count % 3]


def worst_way_back(tx, update, integrator, mode, num_rejected):
    """Largest error in ulp of several rejections, whose steps are opened in the same mode."""
    params, state, _ = at_an_open_step(tx, update, integrator)
    call, errors = stepper(tx, update, mode), []
    for index in range(num_rejected):
        grads, values = draw_inputs(300 + index, 20)
        for attempt in range(20):
            start = params
            params, state = call(params, state, at(grads, attempt), values[attempt])
            if state.last_update.step_end and state.last_update.accepted:
                break
        for middle in range(CALLS_PER_STEP[integrator] - 1):
            params, state = call(params, state, at(grads, middle), values[middle])
        proposal, rejections = params, int(state.guardrail.num_rejected)
        params, state = call(params, state, at(grads, -1), np.float32((-1) ** index * HUGE))
        assert state.last_update.step_end and not state.last_update.accepted
        assert int(state.guardrail.num_rejected) == rejections + 1
        assert not np.array_equal(flat(proposal), flat(start))
        errors.append(ulps(params, start, proposal))
    return max(errors)


@pytest.mark.parametrize("integrator", INTEGRATORS)
@pytest.mark.parametrize("name", GUARDED)
def test_an_outlier_is_taken_back_to_two_ulp(name, integrator):
    tx, update = build(name, integrator, step_size=varied_step_size)
    assert worst_way_back(tx, update, integrator, "jit", num_rejected=12) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("mode, num_rejected", [("all in one jit", 12), ("eager", 3)])
@pytest.mark.parametrize("integrator", INTEGRATORS)
@pytest.mark.parametrize("name", GUARDED)
def test_an_outlier_is_taken_back_however_it_is_compiled(name, integrator, mode, num_rejected):
    tx, update = build(name, integrator, step_size=varied_step_size)
    assert worst_way_back(tx, update, integrator, mode, num_rejected) <= 2


@pytest.mark.parametrize("name, integrator", crossed(["psmile"], ("psmile", "minimal_norm")))
def test_explicit_noise_does_not_disturb_the_way_back(name, integrator):
    """It turns the direction whether or not the step is rejected."""
    tx, update = build(name, integrator, decoherence_length=0.2)
    assert worst_way_back(tx, update, integrator, "jit", num_rejected=12) <= 2


@pytest.mark.parametrize("name, integrator", [("psmile", "leapfrog"), ("smile", "minimal_norm")])
def test_resets_inside_a_scan_are_taken_back_to_two_ulp(name, integrator):
    tx, _ = build(name, integrator)
    grads, values = draw_inputs(2, 100)
    values[25::7] = HUGE

    def call(carry, inputs):
        params, state = carry
        updates, state = tx.update(inputs[0], state, params, value=inputs[1])
        proposal = optax.apply_updates(params, updates)
        return (proposal, state), Record(params, proposal, state)

    params = start_params()
    run = jax.jit(lambda carry, inputs: jax.lax.scan(call, carry, inputs)[1])
    trace = jax.tree.map(np.asarray, run((params, tx.init(params)), (grads, values)))
    start, rejected, open_step = params, 0, False
    for index in range(100):
        record = at(trace, index)
        if not record.state.last_update.accepted:
            assert ulps(record.proposal, start, record.judged) <= 2
            rejected += 1
        elif record.state.last_update.step_end or not open_step:
            start = record.judged
        open_step = bool(record.state.last_update.accepted)
    assert rejected >= 4


# What survives of a rejected point.


def slow_threshold(mean, std, probability=0.98):
    z = NormalDist().inv_cdf(probability)
    ratio = min(std / mean, 1.5 * z)
    return mean * (1 - ratio**2 / 9 + z * ratio / 3) ** 3


@pytest.mark.parametrize("reject_momentum", ["zero", "refresh"])
@pytest.mark.parametrize(
    "name, integrator", crossed(GUARDED, ("smile", "minimal_norm"), ("psmile", "leapfrog"))
)
def test_nothing_else_of_a_rejected_point_survives(name, integrator, reject_momentum):
    tx, update = build(name, integrator, reject_momentum=reject_momentum)
    params, before, _ = at_an_open_step(tx, update, integrator)
    grads, values = draw_inputs(3, 2)
    first, after = update(at(grads, 0), before, params, value=np.float32(HUGE))
    other_grads = jax.tree.map(lambda g: -40 * g + 3, at(grads, 1))
    second, other = update(other_grads, before, params, value=np.float32(-30 * HUGE))
    assert not after.last_update.accepted and not other.last_update.accepted
    # Two rejected points that have nothing in common leave the same behind.
    chex.assert_trees_all_equal(first, second)
    chex.assert_trees_all_equal(without_energy(after), without_energy(other))
    if reject_momentum == "refresh":
        assert np.array_equal(after.key, other.key)
        assert not np.array_equal(after.key, before.key)

    # What stays as it was before that point, bit by bit.
    chex.assert_trees_all_equal(after.preconditioner, before.preconditioner)
    chex.assert_trees_all_equal(after.num_steps, before.num_steps)
    # What is counted, averaged and adapted.
    expected = before.guardrail._replace(num_rejected=before.guardrail.num_rejected + 1)
    expected = expected._replace(finite_run=before.guardrail.finite_run + 1)
    chex.assert_trees_all_equal(after.guardrail, expected)
    factor = before.tuner.step_size_factor * 0.98
    np.testing.assert_allclose(after.tuner.step_size_factor, factor, rtol=1e-6)
    mean, std = (
        float(before.evidence.energies.energy_mean),
        float(before.evidence.energies.energy_std),
    )
    count = int(before.evidence.energies.num_energies) + 1
    capped = 3 * slow_threshold(mean, std)
    weight = 0.01 / (1 - 0.99**count)
    mean_after = mean + weight * (capped - mean)
    std_after = np.sqrt((1 - weight) * std**2 + weight * (capped - mean_after) ** 2)
    np.testing.assert_allclose(after.evidence.energies.energy_mean, mean_after, rtol=1e-5)
    np.testing.assert_allclose(after.evidence.energies.energy_std, std_after, rtol=1e-5)
    assert int(after.evidence.energies.num_energies) == count

    # From here on it is the chain that begins at the start of the step and was never there.
    restored = add(params, first)
    twin = tx.init(restored)
    twin = twin._replace(
        preconditioner=before.preconditioner,
        tuner=after.tuner,
        guardrail=after.guardrail,
        evidence=twin.evidence._replace(
            energies=after.evidence.energies,
            turns=after.evidence.turns,
            descent=after.evidence.descent,
        ),
        num_steps=before.num_steps,
        key=after.key,
        last_update=after.last_update,
    )
    if reject_momentum == "refresh":
        fresh = twin.momentum._replace(direction=after.momentum.direction)
        twin = twin._replace(momentum=fresh._replace(moving=jnp.ones((), bool)))
    inputs = draw_inputs(4, 41)
    expected = drive(update, restored, twin, inputs)
    for one, other in zip(drive(update, restored, after, inputs), expected, strict=True):
        chex.assert_trees_all_equal(one.proposal, other.proposal)
        chex.assert_trees_all_equal(one.stats, other.stats)


@pytest.mark.parametrize("integrator", INTEGRATORS)
def test_energy_change_of_a_rejected_step_is_the_true_number(integrator):
    tx, update = build("smile", integrator)
    params, state, _ = at_an_open_step(tx, update, integrator)
    grads, values = draw_inputs(5, 1)
    _, kept = update(at(grads, 0), state, params, value=values[0])
    for jump in (HUGE, -HUGE, 1e12):
        _, rejected = update(at(grads, 0), state, params, value=np.float32(values[0] + jump))
        got = rejected.last_update.energy_change
        expected = float(kept.last_update.energy_change) + jump
        np.testing.assert_allclose(got, expected, rtol=1e-6)
        assert not rejected.last_update.accepted


@pytest.mark.parametrize("name", GUARDED)
def test_threshold_is_that_of_the_energies_before_the_step(name):
    tx, update = build(name)
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


@pytest.mark.parametrize("name", ["psmile", "smile_naive"])
def test_naive_forms_and_no_quantile_keep_an_outlier(name):
    arguments: Any = {"reject_quantile": None} if name in GUARDED else {}
    tx, update = build(name, **arguments)
    grads, values = draw_inputs(7, 41)
    values[30] = HUGE
    params = start_params()
    records = drive(update, params, tx.init(params), (grads, values))
    accepted, changes = trace_of(records, "accepted", "energy_change")
    assert np.all(accepted)
    np.testing.assert_allclose(changes[30], HUGE, rtol=1e-4)


# The momentum after a rejection.


@pytest.mark.parametrize("integrator", INTEGRATORS)
@pytest.mark.parametrize("name", GUARDED)
def test_zero_momentum_goes_down_the_next_gradient(name, integrator):
    tx, update = build(name, integrator, reject_momentum="zero")
    params, state, _ = at_an_open_step(tx, update, integrator)
    grads, values = draw_inputs(8, 2)
    updates, state = update(at(grads, 0), state, params, value=np.float32(HUGE))
    params = add(params, updates)

    def scale_of(state):
        if name != "psmile":
            return 1.0
        return 1 / flat(state.preconditioner.inverse_scale()).astype(float)

    whitened = flat(at(grads, 1)) / scale_of(state)
    updates, state = update(at(grads, 1), state, params, value=values[1])
    scale = scale_of(state)
    expected = -whitened / np.linalg.norm(whitened)
    np.testing.assert_allclose(flat(state.momentum.direction), expected, atol=1e-6)
    length = float(optax_smile.stats(state)["step_size"]) / CALLS_PER_STEP[integrator]
    np.testing.assert_allclose(flat(updates), length * expected / scale, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("integrator", INTEGRATORS)
def test_refreshed_momentum_is_where_the_next_kick_begins(integrator):
    tx, update = build("smile", integrator, reject_momentum="refresh")
    params, state, _ = at_an_open_step(tx, update, integrator)
    grads, values = draw_inputs(9, 2)
    updates, state = update(at(grads, 0), state, params, value=np.float32(HUGE))
    fresh = flat(state.momentum.direction).astype(float)
    np.testing.assert_allclose(np.linalg.norm(fresh), 1, rtol=1e-5)
    step_size = float(optax_smile.stats(state)["step_size"])
    _, state = update(at(grads, 1), state, add(params, updates), value=values[1])
    g = flat(at(grads, 1)).astype(float)
    e = -g / np.linalg.norm(g)
    kick = 0.5 if integrator == "leapfrog" else 0.1931833275037836
    delta, p = kick * step_size * np.linalg.norm(g) / (SIZE - 1), e @ fresh
    expected = fresh + (np.sinh(delta) + p * (np.cosh(delta) - 1)) * e
    expected /= np.cosh(delta) + p * np.sinh(delta)
    np.testing.assert_allclose(flat(state.momentum.direction), expected, atol=1e-6)


def test_refreshed_momenta_are_isotropic_and_differ_between_resets_and_chains():
    """4,000 chains with keys of their own, two rejections each.

    Every bound is 5.5 standard errors; with about 250 comparisons the false-alarm rate is 1e-5.
    """
    num_chains = 4000
    tx, update = build("smile", reject_momentum="refresh")
    params, state, _ = at_an_open_step(tx, update, "leapfrog")
    grads, values = draw_inputs(10, 2)

    def call(params, state, value):
        updates, state = tx.update(at(grads, 0), state, params, value=value)
        direction = [jnp.ravel(leaf) for leaf in jax.tree.leaves(state.momentum.direction)]
        accepted = state.last_update.accepted
        return optax.apply_updates(params, updates), state, jnp.concatenate(direction), accepted

    def each_chain(leaf):
        return np.broadcast_to(leaf, (num_chains, *np.shape(leaf)))

    call = jax.jit(jax.vmap(call, in_axes=(0, 0, None)))
    keys = jax.random.key_data(jax.random.split(jax.random.key(1), num_chains))
    state = jax.tree.map(each_chain, state._replace(key=None))._replace(key=keys)
    params, rejections = jax.tree.map(each_chain, params), []
    for value, expected in ((HUGE, False), (values[0], True), (-HUGE, False)):
        params, state, direction, accepted = call(params, state, np.float32(value))
        assert np.all(accepted == expected)
        rejections.append(np.asarray(direction, float))
    first, _, second = rejections
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
POISONS = ("nan", "inf", "scalar", "all", "overflow", "value nan", "value inf", "both")
# Before and after the averages have settled, at step ends and in the middle of a step.
POISONED_CALLS = (0, 1, 2, 3, 4, 5, 12, 30, 31)


def poison(grads, value, kind):
    """One call's gradient and value with something wrong."""
    grads, nan, inf = jax.tree.map(np.array, grads), np.nan, np.inf
    if kind in ("nan", "both"):
        grads["tiny"][1] = nan
    if kind == "inf":
        grads["large"][0] = inf
    if kind == "scalar":
        grads["one"][...] = -inf
    if kind == "all":
        grads = jax.tree.map(lambda g: np.full_like(g, nan), grads)
    if kind == "overflow":
        grads["small"][0, 1] = 1e25
    return grads, np.float32({"value nan": nan, "value inf": inf, "both": -inf}.get(kind, value))


@pytest.mark.parametrize(
    "name, integrator",
    crossed(
        SAMPLERS,
        ("smile", "minimal_norm"),
        ("psmile", "leapfrog"),
        ("psmile_naive", "minimal_norm"),
    ),
)
def test_a_non_finite_number_leaves_the_chain_sound(name, integrator):
    """Every kind at every one of the calls, each in a vmapped chain of its own."""
    cases = [(kind, call) for kind in POISONS for call in POISONED_CALLS]
    grads, values = draw_inputs(11, NUM_CALLS)
    inputs = []
    for kind, call in cases:
        bad, value = poison(at(grads, call), values[call], kind)
        poisoned = jax.tree.map(np.copy, grads), np.copy(values)
        for leaf, b in zip(jax.tree.leaves(poisoned[0]), jax.tree.leaves(bad), strict=True):
            leaf[call] = b
        poisoned[1][call] = value
        inputs.append(poisoned)
    inputs = jax.tree.map(lambda *leaves: np.stack(leaves, 1), *inputs)
    tx, _ = build(name, integrator)
    update = jax.jit(jax.vmap(lambda g, s, p, value: tx.update(g, s, p, value=value)))
    params = jax.tree.map(lambda x: np.stack([x] * len(cases)), start_params())
    state = jax.vmap(tx.init)(params)
    records = drive(update, params, state, inputs)
    records = [jax.tree.map(np.asarray, record) for record in records]
    for record in records:
        assert_finite(record.judged, record.proposal, without_energy(record.state))

    for index, (_, call) in enumerate(cases):
        chain = [at(record, index) for record in records]
        last_calls = [record.state.last_update for record in chain]
        counted = [record.state.guardrail.num_nonfinite for record in chain]
        np.testing.assert_array_equal(counted, np.arange(NUM_CALLS) >= call)
        assert [last.num_gradients for last in last_calls] == list(range(1, NUM_CALLS + 1))
        assert not last_calls[call].accepted
        assert np.isnan(last_calls[call].energy_change)
        # Nothing of that call stays: noise averages, energies and step size are as before it.
        before, after = at(state, index) if call == 0 else chain[call - 1].state, chain[call].state
        chex.assert_trees_all_equal(after.evidence.energies, before.evidence.energies)
        chex.assert_trees_all_equal(after.evidence.turns, before.evidence.turns)
        for field in ("preconditioner", "tuner", "num_steps"):
            chex.assert_trees_all_equal(getattr(after, field), getattr(before, field))
        assert after.momentum.step_length == before.momentum.step_length
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


def test_a_non_finite_gradient_without_values():
    """Level 0, a loop that passes gradients only, one call after the other and not vmapped."""
    tx, update = build("psmile_naive")
    params = start_params()
    state = tx.init(params)
    grads, _ = draw_inputs(12, 20)
    for index in range(20):
        gradient = at(grads, index)
        kind = {0: "nan", 5: "overflow", 6: "inf", 13: "all"}.get(index)
        if kind is not None:
            gradient, _ = poison(gradient, 0.0, kind)
        updates, state = update(gradient, state, params)
        assert_finite(updates, without_energy(state))
        assert bool(state.last_update.accepted) == (kind is None)
        if kind is None:
            assert 0.2 < np.linalg.norm(flat(updates)) < 1
        params = add(params, updates)
    assert int(optax_smile.stats(state)["num_nonfinite"]) == 4
    assert int(optax_smile.stats(state)["num_rejected"]) == 0


def test_an_energy_that_overflows_counts_as_non_finite():
    tx, update = build("smile")
    params, state, start = at_an_open_step(tx, update, "leapfrog")
    step = state.evidence.open_step._replace(opening_value=jnp.float32(-3e38))
    state = state._replace(evidence=state.evidence._replace(open_step=step))
    grads, _ = draw_inputs(13, 1)
    updates, after = update(at(grads, 0), state, params, value=np.float32(3e38))
    assert_finite(updates, without_energy(after))
    assert int(after.guardrail.num_nonfinite) == int(state.guardrail.num_nonfinite) + 1
    assert ulps(add(params, updates), start, params) <= 2


def step_sizes(name, bad, integrator="leapfrog", **arguments):
    """Step sizes over calls whose gradients are NaN where `bad`, relative to the first."""
    tx, update = build(name, integrator, **arguments)
    grads, values = draw_inputs(14, len(bad))
    grads["one"] = np.where(bad, np.float32(np.nan), grads["one"])
    params = start_params()
    records = drive(update, params, tx.init(params), (grads, values))
    for record in records:
        assert_finite(record.proposal, without_energy(record.state))
    lengths, counts = trace_of(records, "step_size", "num_nonfinite")
    assert counts[-1] == sum(bad)
    return lengths / 0.5


MANY_BAD = [False] * 5 + [True] * 9 + [False] * 120
BACKOFF = [1.0] * 9 + [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 16] + [1 / 16] * 99 + [1.0] * 21


@pytest.mark.parametrize("name, arguments", [("smile_naive", {}), ("smile", {"tuner": None})])
def test_step_size_after_many_non_finite_calls(name, arguments):
    np.testing.assert_allclose(step_sizes(name, MANY_BAD, **arguments), BACKOFF, rtol=1e-6)


def test_step_size_after_many_non_finite_calls_beside_the_tuner():
    got = step_sizes("psmile", MANY_BAD)
    ratio = got[1:] / got[:-1] / np.divide(BACKOFF[1:], BACKOFF[:-1])
    # What is left is a change of 2 % now and then.
    assert np.abs(ratio - 1).max() <= 0.0201


def test_step_size_after_non_finite_calls_of_the_two_gradient_integrator():
    """It is read where a step is opened, which good calls do at every other."""
    got = step_sizes("smile_naive", MANY_BAD, "minimal_norm")
    np.testing.assert_allclose(got[:14], BACKOFF[:14])
    np.testing.assert_allclose(got[14 : 14 + 99], 1 / 16)
    np.testing.assert_allclose(got[14 + 101 :], 1)


def test_few_non_finite_calls_leave_the_step_size():
    bad = ([True] * 4 + [False]) * 6
    np.testing.assert_array_equal(step_sizes("smile_naive", bad), np.ones(30))


def test_good_calls_are_counted_from_the_last_bad_one():
    bad = [True] * 6 + [False] * 60 + [True] + [False] * 110
    got = step_sizes("smile_naive", bad)
    np.testing.assert_allclose(got[5 : 67 + 99], 1 / 4)
    np.testing.assert_allclose(got[67 + 99 :], 1)


# last_accepted.


def noisy_loss(params, batch):
    """Bounded gradients, so that no step explodes by itself."""
    distances = jax.tree.map(lambda x, b: jnp.sum(jnp.sqrt(1 + (x - b) ** 2)), params, batch)
    return sum(jax.tree.leaves(distances)) / 3


def draw_run(seed, num_gradients, rate):
    """Batches, and what is added to value: nothing, an outlier, or NaN."""
    rng = np.random.default_rng(seed)
    batches = {
        n: rng.standard_normal((num_gradients, *SHAPES[n])).astype(np.float32) for n in SHAPES
    }
    odds = [1 - rate, rate / 3, rate / 3, rate / 3]
    return batches, rng.choice([0, HUGE, -HUGE, np.nan], num_gradients, p=odds).astype(np.float32)


class Visit(NamedTuple):
    """What a loop sees of one call."""

    judged: Any
    proposal: Any
    last: Any
    accepted: Any
    step_end: Any


def check_last_accepted(integrator, initial, visits, bad):
    """Replay a trajectory by hand: what a call says is about the parameters it was given.

    Returns:
        How many step ends were rejected.
    """
    accepted_ends, num_back, place, rejected = [initial], 0, 0, []
    reach = np.abs(flat(initial))
    for visit, added in zip(visits, bad, strict=True):
        # The place inside a step, by a counter of our own.
        assert visit.step_end == (place == CALLS_PER_STEP[integrator])
        assert not (np.isnan(added) and visit.accepted)
        if not visit.accepted:
            num_back, place = num_back + 1, 0
            rejected += [flat(visit.judged)] if visit.step_end else []
        else:
            place = place % CALLS_PER_STEP[integrator] + 1
            if visit.step_end:
                accepted_ends.append(visit.judged)
                num_back, reach = 0, np.abs(flat(visit.judged))
        # Two ulp for the subtraction, two more for each way back since that step end.
        reach = np.maximum(
            reach, np.maximum(np.abs(flat(visit.proposal)), np.abs(flat(visit.judged)))
        )
        error = np.abs(flat(visit.last).astype(float) - flat(accepted_ends[-1]))
        assert np.max(error / np.spacing(reach)) <= 2 + 2 * num_back
        for point in rejected:
            assert np.linalg.norm(flat(visit.last) - point) > 1e-3
    return len(rejected)


@pytest.mark.parametrize(
    "name, integrator",
    crossed(SAMPLERS, ("smile", "leapfrog"), ("psmile", "minimal_norm")),
)
def test_last_accepted_against_a_replayed_trajectory(name, integrator):
    """Six vmapped chains whose rejections and NaN come at different calls."""
    num_chains, num_gradients = 6, 120
    arguments = {}
    if name in GUARDED:
        arguments = {"reject_momentum": "refresh", "decoherence_length": 3.0}
    tx, _ = build(name, integrator, **arguments)
    runs = [draw_run(20 + chain, num_gradients, 0.15) for chain in range(num_chains)]
    batches, bad = jax.tree.map(lambda *leaves: np.stack(leaves, 1), *runs)

    @jax.jit
    @jax.vmap
    def call(params, state, batch, added):
        value, grads = jax.value_and_grad(noisy_loss)(params, batch)
        updates, state = tx.update(grads, state, params, value=value + added)
        proposal = optax.apply_updates(params, updates)
        last, stats = optax_smile.last_accepted(state, proposal), optax_smile.stats(state)
        return state, Visit(params, proposal, last, stats["accepted"], stats["step_end"])

    initial = [start_params(seed) for seed in range(num_chains)]
    params = jax.tree.map(lambda *leaves: np.stack(leaves), *initial)
    state, visits = jax.vmap(tx.init)(params), []
    if name in GUARDED:
        keys = jax.random.split(jax.random.key(1), num_chains)
        state = state._replace(key=jax.random.key_data(keys))
    for index in range(num_gradients):
        state, visit = call(params, state, at(batches, index), bad[index])
        visits.append(jax.tree.map(np.asarray, visit))
        params = visit.proposal
    num_rejected, patterns = 0, set()
    for chain in range(num_chains):
        one = [at(visit, chain) for visit in visits]
        num_rejected += check_last_accepted(integrator, initial[chain], one, bad[:, chain])
        patterns.add(tuple(bool(visit.accepted) for visit in one))
    assert num_rejected >= num_chains
    assert len(patterns) == num_chains


@pytest.mark.parametrize("integrator", INTEGRATORS)
def test_last_accepted_of_a_plain_loop(integrator):
    """As in a training loop: update jitted, the rest outside."""
    tx, update = build("psmile", integrator)
    batches, bad = draw_run(30, 60, 0.1)
    bad[[40, 41]] = HUGE
    params = initial = start_params()
    state, visits = tx.init(params), []
    evaluate = jax.jit(jax.value_and_grad(noisy_loss))
    for index in range(60):
        value, grads = evaluate(params, at(batches, index))
        updates, state = update(grads, state, params, value=value + bad[index])
        proposal = optax.apply_updates(params, updates)
        stats, last = optax_smile.stats(state), optax_smile.last_accepted(state, proposal)
        visits.append(Visit(params, proposal, last, stats["accepted"], stats["step_end"]))
        params = proposal
    assert check_last_accepted(integrator, initial, visits, bad) >= 2


def test_last_accepted_before_the_first_call():
    for integrator in INTEGRATORS:
        tx, _ = build("psmile", integrator)
        params = start_params()
        chex.assert_trees_all_equal(optax_smile.last_accepted(tx.init(params), params), params)


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
    tx, update = build("smile")
    params, state, _ = at_an_open_step(tx, update, "leapfrog")
    call = call_at_any_level(update)
    grads, _ = draw_inputs(15, 12)
    # (value, level, whether the step that ends has an energy, whether it is kept)
    script = [
        (0.0, 1, True, True),
        (None, 0, False, True),
        (None, 0, False, True),
        (HUGE, 1, False, True),
        (HUGE, 1, True, True),
        (None, 0, False, True),
        (0.1, 1, False, True),
        (HUGE, 1, True, False),
        # No step is open after a rejected one.
        (0.2, 1, False, True),
        (0.1, 1, True, True),
    ]
    for index, (value, level, has_energy, kept) in enumerate(script):
        energies = state.evidence.energies
        params, state = call(params, state, at(grads, index), value)
        stats = optax_smile.stats(state)
        assert int(stats["energy_level"]) == level
        assert np.isfinite(stats["energy_change"]) == has_energy, index
        assert bool(stats["accepted"]) == kept, index
        assert int(state.evidence.energies.num_energies) == int(energies.num_energies) + has_energy
        if not has_energy:
            chex.assert_trees_all_equal(state.evidence.energies, energies)
    assert int(stats["num_nonfinite"]) == 0


def test_a_step_of_two_gradients_has_an_energy_whatever_is_passed_in_between():
    tx, update = build("smile", "minimal_norm")
    params, state, _ = at_an_open_step(tx, update, "minimal_norm")
    call = call_at_any_level(update)
    grads, values = draw_inputs(16, 4)
    params, state = call(params, state, at(grads, 0), values[0])
    changes = []
    for middle in (None, 0.0, HUGE):
        inside = call(params, state, at(grads, 1), middle)
        stats = optax_smile.stats(inside[1])
        assert not stats["step_end"] and stats["accepted"] and np.isnan(stats["energy_change"])
        assert int(stats["energy_level"]) == (middle is not None)
        chex.assert_trees_all_equal(inside[1].evidence.energies, state.evidence.energies)
        after = call(*inside, at(grads, 2), values[2])[1]
        assert after.last_update.step_end and after.last_update.accepted
        changes.append(float(after.last_update.energy_change))
    np.testing.assert_allclose(changes, changes[0], rtol=1e-5)


@pytest.mark.parametrize("integrator", INTEGRATORS)
def test_step_ends_of_an_undisturbed_chain(integrator):
    tx, update = build("smile_naive", integrator)
    params = start_params()
    records = drive(update, params, tx.init(params), draw_inputs(17, 41))
    calls = np.arange(41)
    expected = (calls > 0) & (calls % CALLS_PER_STEP[integrator] == 0)
    names = "step_end", "energy_change", "energy_level", "accepted"
    step_end, changes, levels, accepted = trace_of(records, *names)
    np.testing.assert_array_equal(step_end, expected)
    np.testing.assert_array_equal(np.isfinite(changes), expected)
    assert np.all(levels == 1) and np.all(accepted)
