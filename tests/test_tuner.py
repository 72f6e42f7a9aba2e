import itertools
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_smile
from optax_smile import _tree, angle_tuner, quantile_tuner
from optax_smile.chains import _checks
from optax_smile.stages import evidence, step_size

REJECT_QUANTILE = 0.98
DTYPE = jnp.dtype("float32")
PARAMS = jnp.zeros(4, DTYPE)


def averages(mean, std, count=1000):
    return evidence.EnergyAverages(jnp.float32(mean), jnp.float32(std), jnp.int32(count))


def known(change):
    change = jnp.asarray(change, jnp.float32)
    return evidence.EnergyError(change, jnp.ones_like(change, bool), jnp.ones_like(change, bool))


def slow_quantile(mean, std, probability):
    """Wilson and Hilferty by shape and scale; heavier tails than the formula bears are cut off."""
    z = NormalDist().inv_cdf(probability)
    shape = max((mean / std) ** 2, (2 / (3 * z)) ** 2 if z > 0 else 0)
    cube_root = 1 - 1 / (9 * shape) + z / (3 * np.sqrt(shape))
    return mean * max(cube_root, 0) ** 3


def slow_averages(energies, decay=0.99):
    """Bias-corrected exponential averages of the textbook, with the caps of the settled ones."""
    raw_mean = raw_variance = 0.0
    history = []
    for count, energy in enumerate(np.abs(energies), start=1):
        if count > evidence.ENERGIES_TO_SETTLE:
            mean, std = history[-1]
            energy = min(energy, 3 * slow_quantile(mean, std, REJECT_QUANTILE))
        correction = 1 - decay**count
        raw_mean = decay * raw_mean + (1 - decay) * energy
        deviation = energy - raw_mean / correction
        raw_variance = decay * raw_variance + (1 - decay) * deviation**2
        history.append((raw_mean / correction, np.sqrt(raw_variance / correction)))
    return np.array(history)


@jax.jit
def observe_all(errors):
    def step(state, error):
        state = state.observe(error, REJECT_QUANTILE)
        return state, state

    return jax.vmap(lambda x: jax.lax.scan(step, evidence.init(PARAMS).energies, x)[1])(errors)


@pytest.mark.parametrize("probability", [1e-4, 0.1 / 3, 0.5, 1 - 0.2 / 3, REJECT_QUANTILE, 0.9999])
def test_quantile_is_that_of_the_formula(probability):
    """Finite and not negative for every shape, and zero before the first energy."""
    shapes = np.geomspace(1e-6, 1e6, 121)
    for mean in (1e-30, 1e-6, 1.0, 3e4, 1e12):
        got = averages(np.full(121, mean), mean / np.sqrt(shapes)).quantile(probability)
        assert np.all(np.isfinite(got)) and np.all(np.asarray(got) >= 0)
        expected = [slow_quantile(mean, mean / np.sqrt(x), probability) for x in shapes]
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6 * mean)
        # A threshold of zero would reject every step.
        assert np.all(np.asarray(got) >= mean) or probability < REJECT_QUANTILE
    for std in (0.0, 1.0):
        assert averages(0.0, std).quantile(probability) == 0


def test_averages_are_bias_corrected_exponential_averages():
    rng, number = np.random.default_rng(0), np.arange(1500)
    energies = (rng.gamma(2.0, 1.5, 500) * rng.choice([-1, 1], 500)).astype(np.float32)
    energies[[60, 200]] = -1e9, 3e38
    mixed = np.where(number % 3 == 1, np.nan, 1e30)
    mixed[::3] = energies
    error = known(mixed)._replace(known=jnp.asarray(number % 3 == 0))
    got = jax.tree.map(lambda x: x[0], observe_all(jax.tree.map(lambda x: x[None], error)))
    mean, std = np.repeat(slow_averages(energies), 3, axis=0).T
    np.testing.assert_allclose(got.energy_mean, mean, rtol=1e-5)
    np.testing.assert_allclose(got.energy_std, std, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(got.num_energies, number // 3 + 1)


def test_a_jump_among_the_first_energies_is_no_trap():
    """It may make the test lenient, but never one that takes every later step for an outlier."""
    cases = [(jump, at) for jump in (1e3, 1e6, 1e12, 1e18, 1e20, 1e25, 3e38) for at in range(10)]
    energies = np.random.default_rng(4).gamma(2.0, 1.0, (len(cases), 4000))
    energies[np.arange(len(cases)), [at for _, at in cases]] = [jump for jump, _ in cases]
    got = observe_all(known(energies))
    # The square of some overflows.
    assert np.all(np.isfinite(got.energy_mean)) and np.all(np.isfinite(got.energy_std))
    thresholds = np.asarray(got.quantile(REJECT_QUANTILE))
    outliers = energies[:, 10:] > thresholds[:, 9:-1]
    # At most one in five of any hundred steps: .02 is the rate of the settled averages.
    assert outliers[:, :3900].reshape(len(cases), -1, 100).mean(-1).max() <= 0.2


def shown(change, state, num_gradients=1000, smallest_factor=0.0, is_known=True, **others):
    start, error = evidence.init(PARAMS), known(change)
    weight = jnp.float32(1), jnp.ones((), bool), jnp.zeros((), bool), jnp.float32(0)
    given: Any = {"turns": start.turns, "changes": start.changes, "descent": start.descent}
    given |= {"weight": evidence.GradientWeight(*weight), "energies": state}
    given |= {"turn_rate": jnp.float32(1), "change_rate": jnp.float32(0)}
    given |= {"num_gradients": jnp.int32(num_gradients), "base": jnp.float32(0.25)}
    given |= {"resolution": jnp.float32(0.25 * smallest_factor), "num_parameters": 10}
    error = error._replace(known=error.known & is_known)
    return evidence.Evidence(error=error, **given | others)


def factor_after(tuner, given, factor=1.0):
    state = step_size.FactorState(jnp.asarray(factor, jnp.float32))
    return float(tuner.update(state, given).step_size_factor)


@pytest.mark.parametrize("probability, rate", [(0.1, 0.02), (0.6, 0.5)])
def test_step_size_rises_after_small_and_falls_after_large_errors(probability, rate):
    tuner, state = quantile_tuner(probability, rate), averages(1.0, 0.5)
    low = slow_quantile(1, 0.5, probability / 3)
    high = slow_quantile(1, 0.5, 1 - 2 * probability / 3)
    assert low > 0
    energies = 0.0, 0.999 * low, -1.001 * low, 0.999 * high, -1.001 * high, 1e30
    factors = 1 + rate, 1 + rate, 1.0, 1.0, 1 - rate, 1 - rate
    for energy, expected in zip(energies, factors, strict=True):
        got = factor_after(tuner, shown(energy, state), factor=3.0)
        np.testing.assert_allclose(got, 3 * expected, rtol=1e-6)


def test_unknown_errors_and_unsettled_averages_change_nothing():
    """Nor does any after `adapt_steps`, or for a step size below the resolution.

    But a smaller one of the user is kept.
    """
    tuner, settled, early = quantile_tuner(), averages(1.0, 0.5), averages(1.0, 0.5, count=9)
    for change in (0.0, 1e3, np.nan):
        assert factor_after(tuner, shown(change, settled, is_known=False)) == 1
        assert factor_after(tuner, shown(change, early)) == 1
    assert factor_after(tuner, shown(0.0, averages(1.0, 0.5, count=10))) > 1
    for count, adapt_steps, moves in ((49, 50, 1), (50, 50, 0), (10**6, 50, 0), (0, 0, 0)):
        for change, rate in ((0.0, 0.02), (1e3, -0.02)):
            given = shown(change, settled, num_gradients=count)
            got = factor_after(quantile_tuner(adapt_steps=adapt_steps), given)
            np.testing.assert_allclose(got, 1 + moves * rate, rtol=1e-6)
    raised = [(0.3, 0.3, 0.306), (5.0, 1, 1.02)]
    lowered = [(0.99, 1, 0.99), (0.3, 0.302, 0.3), (0.3, 0.3, 0.3), (5.0, 1, 1)]
    for energy, cases in ((0.0, raised), (9.0, lowered)):
        for smallest, factor, expected in cases:
            given = shown(energy, settled, smallest_factor=smallest)
            np.testing.assert_allclose(factor_after(tuner, given, factor), expected, rtol=1e-6)


def slow_turns(rates):
    """Average over the last quarter, more or less: each rate with the weight of the textbook."""
    mean, history = 0.0, []
    for count, rate in enumerate(rates, start=1):
        if count > 1:
            rate = min(rate, 3 * mean)
        weight = min(4 / count, 1)
        mean = (1 - weight) * mean + weight * rate
        history.append(mean)
    return np.array(history)


ALIKE = evidence.Sums(*[jnp.ones(())] * 10)


def test_what_is_rejected_does_not_enter_the_turns():
    rates = np.random.default_rng(0).gamma(2.0, 3.0, 600).astype(np.float32)
    rates[[5, 50, 301]] *= 1e4
    kept = np.arange(600) % 3 > 0

    def step(state, given):
        rate, keep = given
        state = state.observe(rate, state.trust(rate, ALIKE, jnp.int32(0)), keep)
        return state, state

    given = jnp.asarray(np.where(kept, rates, np.nan)), jnp.asarray(kept)
    got = jax.lax.scan(step, evidence.init(PARAMS).turns, given)[1]
    np.testing.assert_allclose(got.mean_turn_rate[kept], slow_turns(rates[kept]), rtol=1e-5)
    np.testing.assert_array_equal(got.num_turns, np.cumsum(kept))
    assert np.all(np.isfinite(got.mean_turn_rate)) and got.num_outlying[-1] >= 3


def test_what_a_gradient_says_of_the_turns():
    """One along the momentum turns it by little; one that is zero says nothing at first."""
    sums = evidence.Sums(*[jnp.full(4, 9.0)] * 10)
    rates = evidence.turn_rate(sums, jnp.array([-0.9, 0.0, 0.6, 1.0]), 4)
    np.testing.assert_allclose(rates, [1, 1, 0.64, 0.03], rtol=1e-6)
    average = evidence.TurnAverage(jnp.float32(2), jnp.int32(9), jnp.int32(0))
    for rate, calls, others, expected in [
        (5.0, 9, {}, 1.0),
        (12.0, 9, {}, 0.5),
        (5.0, 99, {"updates_square": 0.0}, 0.0),
        (5.0, 100, {"updates_square": 0.0}, 1.0),
        (5.0, 100, {"whitened_square": 1e-40}, 0.0),
        (5.0, 100, {"whitened_square": np.inf}, 0.0),
    ]:
        others = {name: jnp.float32(x) for name, x in others.items()}
        got = average.trust(jnp.float32(rate), ALIKE._replace(**others), jnp.int32(calls))
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    # The usual rate is a third of the present one or more, if that says anything.
    given = shown(0.0, averages(1.0, 0.5))
    turns = given.turns._replace(mean_turn_rate=jnp.float32(2))
    for rate, trust, expected in [(12, 0.5, 4), (3, 1, 2), (12, 0, 2)]:
        weight = given.weight._replace(trust=jnp.float32(trust))
        now: Any = given._replace(turn_rate=jnp.float32(rate), weight=weight, turns=turns)
        np.testing.assert_allclose(now.rates(), [expected, expected, 0])


LONG: Any = step_size.AngleState(jnp.float32(1e6), jnp.float32(1e6))


def turned(
    tuner, rate, mean, change=None, num_gradients=100, state: Any = LONG, width=None, **given
):
    """The step size and the new state after one gradient; after long steps, or the first."""
    given = {"share": 0.1, "base": 1.0, "resolution": 0.0, "changed": 0.0, "kurtosis": 1.0} | given
    share, base, resolution, changed, kurtosis = map(jnp.float32, given.values())
    square = jnp.float32(0 if change is None else change) ** 2
    changes = evidence.init(PARAMS).changes._replace(
        mean_change_square=square,
        mean_gradient_square=square / share,
        kurtosis=kurtosis,
        num_changes=jnp.int32(change is not None),
    )
    turns = evidence.TurnAverage(jnp.float32(mean), jnp.int32(num_gradients + 1), jnp.int32(0))
    others = {"turns": turns, "changes": changes, "turn_rate": jnp.float32(rate), "base": base}
    others |= {"change_rate": changed, "resolution": resolution, "width": width}
    evident = shown(0.0, averages(1.0, 0.5), num_gradients, **others)
    state = tuner.update(tuner.init(DTYPE) if state is None else state, evident)
    return float(state.step_size_factor * base), state


@pytest.mark.parametrize("base", [1e-6, 1.0, 10.0])
def test_step_size_is_the_angle_over_the_change(base):
    """Half way from the step before; half the angle where all is noise, or no change is known."""
    tuner = angle_tuner(0.04)
    before = step_size.AngleState(jnp.float32(0.04 / base), jnp.float32(0.04))
    # A step of angle 1, and one that its own gradient shortens to an angle of three times .08.
    for rate, mean, change, share, expected in [
        (5, 4, None, 1, 0.005),
        (0, 4, None, 1, 0.005),
        (12, 4, None, 1, 0.005),
        (24, 4, None, 1, 0.0025),
        (4, 4, 1, 0.7, 0.04),
        (4, 4, 4, 0.1, 0.02),
        (4, 4, 1, 0.8, 0.04 * (0.5 / 0.64) ** 0.5),
        (4, 4, 1, 1, 0.04 * 0.5**0.5),
        (4, 4, 1, 1.5, 0.04 * (0.5 / 1.5**2) ** 0.5),
        (24, 4, 4, 0.1, 0.01),
        (40, 40, 1, 0.1, 0.025),
        (80, 40, 1, 0.1, 0.0125),
    ]:
        got = turned(tuner, rate, mean, change, share=share, base=base, state=before)[0]
        assert got == pytest.approx(expected, rel=1e-5)
    # A change of four times the usual shortens its own step, one of twice the usual does not.
    for changed, expected in [(2, 0.04), (4, 0.03)]:
        got = turned(tuner, 4, 4, 1, share=0.1, base=base, state=before, changed=changed)[0]
        assert got == pytest.approx(expected, rel=1e-5)
    assert turned(tuner, 1, 1e30, base=base, resolution=1e-7)[0] == pytest.approx(1e-7, rel=1e-5)


@pytest.mark.parametrize("width, angle", [(np.inf, 0.06), (1.0, 0.25), (2.0, 8 / 63), (9.0, 0.06)])
def test_momentum_lasts_for_twice_the_width_of_the_posterior(width, angle):
    """Also after steps too short to tell a change: what is left of earlier ones is no rate."""
    before = step_size.AngleState(jnp.float32(angle / 8), jnp.float32(angle / 8))
    for change, resolution in ((4, 0), (1e-6, 2e-3)):
        given = {"share": 1, "resolution": resolution, "width": width, "state": before}
        assert turned(angle_tuner(), 4, 4, change, **given)[0] == pytest.approx(angle / 8, rel=1e-5)


def test_steps_follow_the_width_of_the_posterior_where_gradients_have_little_noise():
    """Those of ten parameters; the noise is bounded in two ways, see `AngleTuner._angle`."""
    shares, kurtoses = (0.1, 0.5, 0.65, 0.8, 1.5), (0.9, 1.6)
    for width, share, kurtosis in itertools.product((0.3, 1, 4), shares, kurtoses):
        per_angle = min(0.5 / max(share, 0.5) ** 2, 1)
        noisiness = min(2 * (1 - per_angle), 1)
        noise = width**2 * 16 / share - 1
        clean = min(noise, share / (1 - share) if share < 1 else np.inf)
        noise = noise if noisiness == 1 else noisiness * noise + (1 - noisiness) * clean
        widest = max(0.35 * (1 - 2 / 10) / max(kurtosis, 1) ** max(1 - share, 0), 0.06)
        widest = noisiness * 0.25 + (1 - noisiness) * widest
        wide = widest if noise <= 0 else width / (2 * noise) * 4 / per_angle
        length = per_angle * np.clip(wide, 0.06, widest) / 4
        before = step_size.AngleState(jnp.float32(length), jnp.float32(length))
        given = {"share": share, "width": width, "state": before, "kurtosis": kurtosis}
        assert turned(angle_tuner(), 4, 4, 4, **given)[0] == pytest.approx(length, rel=1e-5)
    # A large gradient shortens its own step less than where the width is unknown.
    for factor, expected in ((8, 0.06), (18, 0.03)):
        state = step_size.AngleState(jnp.float32(0.06), jnp.float32(0.06))
        given = {"share": 0.5, "width": 1, "state": state, "kurtosis": 49 / 36}
        got = turned(angle_tuner(), 4 * factor, 4, 4, **given)[0]
        assert got == pytest.approx(expected, rel=1e-5)


def test_average_of_the_angle_tuner_stays_after_adapt_steps():
    """And so does the step size without a finite gradient."""
    tuner = angle_tuner(0.04, adapt_steps=50)
    length, state = turned(tuner, 4, 4, num_gradients=49)
    assert length == pytest.approx(0.005)
    assert turned(tuner, 1, 1, num_gradients=50, state=state)[0] == pytest.approx(0.005)
    # A gradient more than three times as large as usual still shortens its own step.
    assert turned(tuner, 40, 4, num_gradients=51, state=state)[0] == pytest.approx(0.0015)
    tuner, nothing = angle_tuner(), shown(np.nan, averages(1.0, 0.5))
    assert turned(tuner, 0, 0, base=0.3)[0] == pytest.approx(1)
    nothing = nothing._replace(
        error=nothing.error._replace(all_finite=jnp.zeros((), bool)),
        turn_rate=jnp.float32(np.nan),
        turns=nothing.turns._replace(num_turns=jnp.int32(100)),
    )
    after = tuner.update(turned(tuner, 4, 4)[1], nothing)
    assert after.step_size_factor * nothing.base == pytest.approx(step_size.ANGLE / 2 / 4)
    # That of the tuner, which `chains` does not import.
    assert _checks.ANGLE == step_size.ANGLE


class Moved(NamedTuple):
    is_end: bool
    opens_step: bool
    turning_norm: float = 3


def test_changes_are_between_step_ends_that_are_kept():
    """Against a loop of the textbook, with the gradients themselves.

    The first call of each three is in the middle of a step; some are rejected, or change the scale,
    or belong to steps that are too short, and one gradient is absurd.
    """
    rng, number = np.random.default_rng(0), 400
    gradients = rng.normal(size=(number, 4)).astype(np.float32) + 1
    gradients[200] *= 1e4
    ends, kept, counts, stays = np.arange(number) % 3 > 0, *(rng.random((3, number)) > 0.1)
    # Nothing changes at first: squares that underflow do not enter.
    gradients[:40] = gradients[0]
    last, mean, whole, fourth, count, expected = None, 0.0, 0.0, 0.0, 0, []
    for g, is_end, is_kept, is_long, same in zip(gradients, ends, kept, counts, stays, strict=True):
        rate = 0.0
        if is_end and is_kept and is_long and last is not None and np.any(g != last):
            square, count = np.sum((g - last) ** 2) / 2 / 9, count + 1
            rate = square**0.5
            trust = min(1, 9 * mean / square) if count > 1 else 1
            weight = min(4 / count, 1)
            mean = (1 - weight) * mean + weight * trust * square
            both = (np.sum(g**2) + np.sum(last**2)) / 2 / 9
            whole = (1 - weight) * whole + weight * trust * both
            fourth = (1 - weight) * fourth + weight * (trust * square / mean) ** 2
        last = (g if is_end else last) if is_kept and same else None
        expected.append((mean, whole, fourth, count, rate))

    def step(past, given):
        g, is_end, is_kept, is_long, same = given
        (square,), sketch = _tree.sums_and_sketch([g * g], g)
        sums, end = ALIKE._replace(whitened_square=square), Moved(is_end, is_end)
        after, rate = past.observe(sketch, end, sums, is_kept, is_long)
        return after._replace(is_comparable=after.is_comparable & same), (after, rate)

    given = tuple(map(jnp.asarray, (gradients, ends, kept, counts, stays)))
    got, rates = jax.lax.scan(step, evidence.init(PARAMS).changes, given)[1]
    found = got.mean_change_square, got.mean_gradient_square, got.kurtosis, got.num_changes, rates
    np.testing.assert_allclose(np.transpose(found), expected, rtol=1e-5)
    share = jax.vmap(evidence.ChangeAverage.share)(got)
    assert np.isnan(share[0]) and share[-1] == pytest.approx(0.5, abs=0.1)


def test_steps_of_the_angle_tuner_grow_at_most_tenfold():
    eps = float(np.finfo(np.float32).eps)
    for resolution in (1e-6, 0.0):
        tuner, state, shortest = angle_tuner(0.04), None, max(resolution, eps)
        for expected in shortest * 10.0 ** np.arange(8):
            got, state = turned(tuner, 1e-9, 1e-9, resolution=resolution, state=state)
            assert got == pytest.approx(max(expected, shortest), rel=1e-5)
        got, state = turned(tuner, 4, 4, resolution=resolution, state=state)
        assert got == pytest.approx(0.005)
        # A gradient that vanishes once lengthens its step by no more.
        got, state = turned(tuner, 1e-9, 1e-9, resolution=resolution, state=state)
        assert got == pytest.approx(0.05)


def test_any_unit_gives_the_same_angle(angle=0.01, size=50):
    """Of pure noise, which gets half the angle of the tuner."""
    tx = optax_smile.smile(tuner=angle_tuner(2 * angle), num_data=1, prior_precision=0.0, key=0)
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


def test_a_chain_whose_loss_still_falls_is_on_its_way():
    """By more than batches and the energy of a chain that has arrived, sqrt(50) nats, explain."""
    number, num_data, noise = 4000, 1000, 0.05
    trends = np.linspace(0, 1, number) * np.array([[0.0], [-0.2], [0.2], [-0.002]])
    # The way there is forgotten.
    trends[[0, 3], :400] += 10.0
    drawn = np.random.default_rng(0).normal(size=(100, 1, number))
    kept = np.arange(number) % 5 > 0
    # What is rejected does not enter.
    values = np.where(kept, 2 + trends + noise * drawn, np.nan).astype(np.float32)

    @jax.jit
    @jax.vmap
    @jax.vmap
    def falling(values):
        def call(past, given):
            after = past.observe(given[0], num_data, 100, given[1])
            return after, (after.fall, after.is_falling)

        return jax.lax.scan(call, evidence.init(jnp.zeros(3)).loss, (values, kept))[1]

    fall, is_falling = map(np.asarray, falling(values))
    assert is_falling[:, [0, 3], 1920:].mean() < 0.005 and is_falling[:, 2].mean() < 0.005
    assert is_falling[:, [0, 3], 600].all() and is_falling[:, 1, number // 2 :].all()
    # From the calls 1,024 to 2,047 that are kept to those from there on, 3,200 in all.
    middles = (1024 + 2047) / 2 - (2048 + 3200) / 2
    np.testing.assert_allclose(fall[:, 1, -1].mean(), -num_data * 0.2 * middles / 3200, rtol=0.03)
