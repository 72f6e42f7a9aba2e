"""Measurements of a call of `update`, and the averages on which the stages base decisions.

A call computes inner products of its trees, the energy that the step gained, and the rates at which
the gradient and its change turn the momentum. Stages exchange the types of this module: `Evidence`
describes one call, `EvidenceState` has the averages over the calls before.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.special
import optax

from optax_smile import _sums, _tree, potential
from optax_smile._places import Places
from optax_smile._sums import Sketch

# Averages of the gradients cover this share of all calls, so their fluctuations decrease, but at
# most this many calls: float32 loses smaller weights.
SHARE, LONGEST_AVERAGE = 0.25, 2**22
# Weight of the old value in the averages of the energy error; 1 - beta in the paper.
ENERGY_DECAY = 0.99
# Number of energies before their averages are used.
ENERGIES_TO_SETTLE = 10
# An energy counts in its averages as at most this many times the outlier threshold, so that the
# test stays strict after a jump, and as at most this many nats: float32 holds their square.
WINSOR_FACTOR, LARGEST_ENERGY = 3.0, 1e18
# Without a `reject_quantile`, the outlier threshold is this quantile.
WINSOR_QUANTILE = 0.98
# A gradient counts in its averages as at most this many times the average, so that one jump cannot
# stop the chain.
LARGEST_RATIO = 3.0
# A gradient along the momentum does not turn it; this share of it still counts.
SMALLEST_SHARE = 0.03
# Rounding loses steps shorter than this many units in the last place of the parameters' norm. If a
# step is less than `SMALLEST_STEP` times as long, the change of a gradient is mostly rounding.
RESOLUTION_ULPS, SMALLEST_STEP = 4, 30.0
# A loss gradient of zero is ignored during this many calls; later it may be correct.
PATIENCE = 100
# A converged chain exceeds this `descent_score` by chance in less than one in a hundred cases.
ON_ITS_WAY = 3.0


class Sums(NamedTuple):
    """Inner products over all parameters of the trees of a call, 0 for missing ones.

    `direction_square` is u . u, 1 up to rounding. `prior_change` is the change of the prior's part
    of the energy by the last drift, nats.
    """

    direction_square: jax.Array
    direction_dot_whitened: jax.Array
    whitened_square: jax.Array
    params_square: jax.Array
    updates_square: jax.Array
    prior_change: jax.Array
    deviation_square: jax.Array
    noise_square: jax.Array
    noise_dot_direction: jax.Array
    noise_dot_whitened: jax.Array

    def cosine(self, moving: jax.Array) -> jax.Array:
        """Cosine of the angle between the velocity and -g; 0 for a chain at rest."""
        product = jnp.sqrt(self.direction_square) * jnp.sqrt(self.whitened_square)
        cosine = -self.direction_dot_whitened / jnp.where(product > 0, product, 1)
        return jnp.where(moving, jnp.clip(cosine, -1, 1), 0)


def measure(
    terms: dict[str, optax.Params],
    updates: optax.Updates,
    passed: optax.Updates | None,
    whitened: optax.Updates,
    places: Places,
) -> tuple[Sums, Sketch, jax.Array]:
    """Sum the terms of all inner products of a call, by name, in one pass over memory.

    Returns also a sketch of the whitened gradient, and the fingerprint of the gradient that the
    loop passed (see `_sums`).
    """
    marks = [_sums.signed(updates if passed is None else passed, places)]
    if passed is not None:
        marks.append(jax.tree.map(jnp.square, passed))
    numbers, sketch = _sums.sums_and_sketch([*terms.values(), *marks], whitened, places)
    sums = Sums(*[jnp.zeros((), numbers[0].dtype)] * len(Sums._fields))
    sums = sums._replace(**dict(zip(terms, numbers, strict=False)))
    product, *square = numbers[len(terms) :]
    norm = jnp.sqrt(square[0] if square else sums.updates_square)
    return sums, sketch, jnp.stack([norm, product])


class StepEnd(NamedTuple):
    """Position of a call inside a step, and the kick that closes a step.

    Attributes:
        is_end: whether the parameters are the end of the open step.
        opens_step: whether the next kick begins a step: one has ended, or none is open.
        kinetic_change: energy gained by the closing kick, nats.
        step_length: step size of the open step.
        turn_rate: angle per unit length by which the gradient turns the momentum.
        cosine: between the velocity and the descent direction, before the kick.
        largest_fall: energy that the drift would have lost along the descent direction, nats.
        turning_norm: norm of a gradient orthogonal to the momentum that turns it by one radian per
            unit length: d - 1 for a Euclidean norm.
        rate_square: see `Momentum.kick_factor`.
        num_parameters: d.
    """

    is_end: jax.Array
    opens_step: jax.Array
    kinetic_change: jax.Array
    step_length: jax.Array
    turn_rate: jax.Array
    cosine: jax.Array
    largest_fall: jax.Array
    turning_norm: float | jax.Array
    rate_square: jax.Array | None
    num_parameters: int


def turn_rate(sums: Sums, moving: jax.Array, rest: int) -> jax.Array:
    """Compute |g| / rest max(1 - max(p, 0)^2, 0.03), rest = d - 1, at which a gradient turns u.

    Far from a mode, u points down the gradient, so p = cos(u, -g) is about 1. A large gradient then
    hardly turns u; if all of it counted, the steps would be too short to reach the mode. Near a
    mode p is about 0. Uphill (p < 0), deviations from -1 grow, so the whole gradient counts.
    """
    share = jnp.maximum(1 - jnp.maximum(sums.cosine(moving), 0) ** 2, SMALLEST_SHARE)
    return jnp.sqrt(sums.whitened_square) / rest * share


class OpenStep(NamedTuple):
    """Terms of the energy that the open step has gained so far.

    Attributes:
        opening_value: mean loss at the start of the step, on the batch of the call that opened it;
            valid if `opening_known`.
        opening_known: whether that call received a loss.
        kinetic_change: kinetic energy that its kicks have added so far, nats.
        prior_change: change of the prior's part of the energy by its drifts except the last, nats.
    """

    opening_value: jax.Array
    opening_known: jax.Array
    kinetic_change: jax.Array
    prior_change: jax.Array

    def advance(
        self, end: StepEnd, opening_kick: float | jax.Array, sums: Sums, value: jax.Array | None
    ) -> OpenStep:
        """Add the kicks and the drift of a call; reset if the call opens a step.

        `opening_kick` is the energy that the opening kick gains, nats.
        """
        opens = end.opens_step
        at = self.opening_value if value is None else jnp.where(opens, value, self.opening_value)
        kinetic_change = self.kinetic_change + end.kinetic_change
        return OpenStep(
            opening_value=at,
            opening_known=jnp.where(opens, value is not None, self.opening_known),
            kinetic_change=jnp.where(opens, opening_kick, kinetic_change),
            prior_change=jnp.where(opens, 0, self.prior_change + sums.prior_change),
        )


class EnergyError(NamedTuple):
    """Energy gained by the step that a call closes.

    Attributes:
        change: nats, positive = gained; NaN unless `known`.
        known: whether a step has ended, with a loss at both ends and a finite energy.
        all_finite: whether all numbers that the call received, and the energy if a step ends, are
            finite.
    """

    change: jax.Array
    known: jax.Array
    all_finite: jax.Array


def energy_error(
    posterior: potential.Potential,
    step: OpenStep,
    end: StepEnd,
    sums: Sums,
    value: jax.Array | None,
) -> EnergyError:
    """Compute the energy gained by the open step, if it ends here with a loss at both ends."""
    given = jnp.stack([*sums, end.kinetic_change, *(() if value is None else (value,))])
    finite = jnp.all(jnp.isfinite(given))
    if value is None:
        return EnergyError(jnp.full_like(given[0], jnp.nan), jnp.zeros_like(finite), finite)
    prior_change = step.prior_change + sums.prior_change
    change = potential.energy_change(posterior, value - step.opening_value, prior_change)
    change += step.kinetic_change + end.kinetic_change
    closes = end.is_end & step.opening_known
    finite &= jnp.isfinite(change) | ~closes
    known = closes & finite
    return EnergyError(jnp.where(known, change, jnp.nan), known, finite)


class EnergyAverages(NamedTuple):
    """Moving averages of |energy change| in nats, over the steps for which it is known.

    Attributes:
        energy_mean: weighted mean, scalar; 0 before the first entry.
        energy_std: weighted standard deviation, scalar.
        num_energies: number of entries, int32.
    """

    energy_mean: jax.Array
    energy_std: jax.Array
    num_energies: jax.Array

    def settled(self) -> jax.Array:
        """Whether there were enough energies to judge the next one."""
        return self.num_energies >= ENERGIES_TO_SETTLE

    def quantile(self, probability: float | jax.Array) -> jax.Array:
        """Quantile of the Gamma distribution with this mean and standard deviation.

        Wilson and Hilferty 1931: mean (1 - r^2 / 9 + z r / 3)^3 with r = std / mean = shape^(-1/2)
        and the normal quantile z, clamped at 0. For z > 0 it grows with r up to r = 3 z / 2 and
        then falls below zero. For larger r the maximum is used: after a jump among the first
        energies the outlier test is lenient for a while, but it never rejects every step.
        """
        z = jax.scipy.special.ndtri(jnp.asarray(probability, self.energy_mean.dtype))
        mean = self.energy_mean
        ratio = jnp.where(mean > 0, self.energy_std / jnp.where(mean > 0, mean, 1), 0)
        ratio = jnp.minimum(ratio, jnp.where(z > 0, 1.5 * z, jnp.inf))
        return mean * jnp.maximum(1 - ratio**2 / 9 + z * ratio / 3, 0) ** 3

    def is_outlier(self, error: EnergyError, reject_quantile: float | None) -> jax.Array | bool:
        """Whether |energy change| exceeds this quantile of the earlier ones; None: never."""
        if reject_quantile is None:
            return False
        threshold = self.quantile(reject_quantile)
        return error.known & self.settled() & (jnp.abs(error.change) > threshold)

    def observe(self, error: EnergyError, reject_quantile: float | None) -> EnergyAverages:
        """Add |energy change| if it is known.

        mean <- mean + w (energy - mean), variance <- (1 - w) variance + w (energy - mean)^2 with
        w = (1 - a) / (1 - a^t), a = `ENERGY_DECAY`: bias-corrected exponential averages. An energy
        counts as at most `WINSOR_FACTOR` times the `reject_quantile`; None: `WINSOR_QUANTILE`.
        """
        energy, known = jnp.minimum(jnp.abs(error.change), LARGEST_ENERGY), error.known
        count = _tree.count(self.num_energies, known)
        cap = WINSOR_QUANTILE if reject_quantile is None else reject_quantile
        bounded = jnp.minimum(energy, WINSOR_FACTOR * self.quantile(cap))
        energy = jnp.where(self.settled(), bounded, energy)
        power = jnp.maximum(count, 1).astype(energy.dtype)
        weight = (1 - ENERGY_DECAY) / (1 - ENERGY_DECAY**power)
        mean = self.energy_mean + weight * (energy - self.energy_mean)
        variance = (1 - weight) * self.energy_std**2 + weight * (energy - mean) ** 2
        return EnergyAverages(
            energy_mean=jnp.where(known, mean, self.energy_mean).astype(mean.dtype),
            energy_std=jnp.where(known, jnp.sqrt(variance), self.energy_std).astype(mean.dtype),
            num_energies=count,
        )


def _average(mean: jax.Array, new: jax.Array, count: jax.Array, enters: jax.Array) -> jax.Array:
    """Average over the last `SHARE` of all entries; the new one is number `count`."""
    number = jnp.minimum(SHARE * jnp.maximum(count, 1), LONGEST_AVERAGE)
    weight = jnp.minimum(1 / number, 1)
    # Not mean + weight * (new - mean), which would lose small numbers after a huge mean.
    return jnp.where(enters, (1 - weight) * mean + weight * new, mean).astype(mean.dtype)


class TurnAverage(NamedTuple):
    """Average of the rate at which the whitened gradients turn the momentum.

    Attributes:
        mean_turn_rate: average in radians per unit length, scalar; 0 before the first gradient.
        num_turns: number of gradients in the average, int32.
        num_outlying: gradients of accepted calls with a reduced weight, int32.
    """

    mean_turn_rate: jax.Array
    num_turns: jax.Array
    num_outlying: jax.Array

    def trust(self, rate: jax.Array, sums: Sums, num_gradients: jax.Array) -> jax.Array:
        """Weight of a gradient: less than 1 if it is outlying, 0 if it carries no information.

        It carries none if its square is a denormal number. In the first calls this also holds for a
        loss gradient of zero, since the prior alone would drive the chain away from its mode.
        """
        largest = LARGEST_RATIO * self.mean_turn_rate
        bounded = (self.num_turns > 0) & (rate > largest)
        shortened = jnp.where(bounded, largest / jnp.where(rate > 0, rate, 1), 1)
        tiny = jnp.finfo(sums.updates_square.dtype).tiny
        evident = (sums.whitened_square >= tiny) & jnp.isfinite(sums.whitened_square)
        evident &= (sums.updates_square >= tiny) | (num_gradients >= PATIENCE)
        return jnp.where(evident, shortened, 0)

    def observe(self, rate: jax.Array, trust: jax.Array, accepted: jax.Array) -> TurnAverage:
        """Add the rate of one gradient, if the call is accepted.

        mean <- (1 - w) mean + w trust rate with w = 1 / (SHARE t), at most 1, after t gradients.
        The first four replace the average, so that even an extreme first gradient is forgotten.
        """
        evident = accepted & (trust > 0)
        count = _tree.count(self.num_turns, evident)
        return TurnAverage(
            mean_turn_rate=_average(self.mean_turn_rate, trust * rate, count, evident),
            num_turns=count,
            num_outlying=_tree.count(self.num_outlying, accepted & (trust < 1)),
        )


class ChangeAverage(NamedTuple):
    """Averages of the change of the whitened gradient from one step end to the next.

    Attributes:
        sketch: sketch of the gradient at the last step end, see `_sums.sums_and_sketch`.
        last_square: (|g| / (d - 1))^2 there, the square of an angle per unit length, scalar.
        is_comparable: whether the next step end can be compared with the last: the call was
            accepted, and the scale has not changed since.
        mean_change_square: average of (|g - g_before| / (d - 1))^2 / 2, scalar.
        mean_gradient_square: average of the mean of (|g| / (d - 1))^2 and the one before, scalar.
        kurtosis: average of the square of (|g - g_before|^2 / its average), at least 1, scalar.
        num_changes: number of changes in the averages, int32.
    """

    sketch: Sketch
    last_square: jax.Array
    is_comparable: jax.Array
    mean_change_square: jax.Array
    mean_gradient_square: jax.Array
    kurtosis: jax.Array
    num_changes: jax.Array

    def share(self) -> jax.Array:
        """Mean squared change over mean squared gradient; NaN before the first change."""
        known = (self.num_changes > 0) & (self.mean_gradient_square > 0)
        gradient_square = jnp.where(known, self.mean_gradient_square, 1)
        return jnp.where(known, self.mean_change_square / gradient_square, jnp.nan)

    def observe(
        self, sketch: Sketch, end: StepEnd, sums: Sums, accepted: jax.Array, counts: jax.Array
    ) -> tuple[ChangeAverage, jax.Array]:
        """Compare the gradient with that at the last step end, if both calls are accepted.

        `counts` is true if the gradient carries information, and its step was so long that the
        change is more than rounding.

        Returns:
            The averages, and the angle per unit length by which this change turns the momentum; 0
            if unknown.
        """
        unit = end.turning_norm**2
        square = _sums.distance_square(sketch, self.sketch) / 2 / unit
        gradient_square = sums.whitened_square / unit
        # Exclude squares that underflow: after an average of 0, all changes would have the weight
        # 0.
        is_evident = (square >= jnp.finfo(square.dtype).tiny) & jnp.isfinite(square)
        enters = self.is_comparable & end.is_end & accepted & counts & is_evident
        most = LARGEST_RATIO**2 * self.mean_change_square
        bounded = (self.num_changes > 0) & (square > most)
        trust = jnp.where(bounded, most / jnp.where(square > 0, square, 1), 1)
        mean_square = trust * (gradient_square + self.last_square) / 2
        count = _tree.count(self.num_changes, enters)
        new, last = (sketch, gradient_square), (self.sketch, self.last_square)
        sketch, gradient_square = optax.tree.where(end.opens_step & accepted, new, last)
        mean_change_square = _average(self.mean_change_square, trust * square, count, enters)
        relative = trust * square / jnp.where(mean_change_square > 0, mean_change_square, 1)
        averages = ChangeAverage(
            sketch=sketch,
            last_square=gradient_square,
            is_comparable=jnp.where(end.opens_step, True, self.is_comparable) & accepted,
            mean_change_square=mean_change_square,
            mean_gradient_square=_average(self.mean_gradient_square, mean_square, count, enters),
            kurtosis=_average(self.kurtosis, relative**2, count, enters),
            num_changes=count,
        )
        return averages, jnp.sqrt(jnp.where(enters, square, 0))


class DescentAverage(NamedTuple):
    """Averages that show whether a chain still moves downhill, over the last quarter of its calls.

    Attributes:
        energy_fall: energy that a drift loses according to the gradient at its end, eps |g| cos
            of the angle between u and -g, nats, scalar.
        fall_square: square of that energy for a drift along -g, divided by d, nats^2, scalar.
        descent_score: energy lost, in standard deviations of the loss of a converged chain by
            chance, scalar.
        on_its_way: whether `descent_score` is more than `ON_ITS_WAY`.
    """

    energy_fall: jax.Array
    fall_square: jax.Array
    descent_score: jax.Array
    on_its_way: jax.Array

    def observe(
        self, end: StepEnd, trust: jax.Array, turns: TurnAverage, accepted: jax.Array
    ) -> DescentAverage:
        """Add the drift that ended with a gradient, if the gradient counts.

        Over the last n = t / 4 of t gradients, a converged chain loses no energy on average. By
        chance it loses energy with the variance n v + min(d / 2, n^2 v): noise of variance v in
        each gradient, and fluctuations of its own energy.
        """
        count, enters = turns.num_turns, accepted & (trust > 0)
        most = jnp.minimum(trust * end.largest_fall, LARGEST_ENERGY)
        fall = _average(self.energy_fall, most * end.cosine, count, enters)
        square = _average(self.fall_square, most**2 / end.num_parameters, count, enters)
        number = jnp.minimum(SHARE * count.astype(square.dtype), LONGEST_AVERAGE)
        own = jnp.minimum(number**2 * square, end.num_parameters / 2)
        # With the weights of `_average`, it has the variance of an equally weighted mean of n (2 -
        # SHARE).
        deviation = jnp.sqrt(own + number * square / (2 - SHARE))
        score = number * fall / jnp.where(deviation > 0, deviation, 1)
        score = jnp.where(deviation > 0, score, 0).astype(fall.dtype)
        return DescentAverage(fall, square, score, score > ON_ITS_WAY)


class EvidenceState(NamedTuple):
    """Averages of a chain over its past calls."""

    open_step: OpenStep
    energies: EnergyAverages
    turns: TurnAverage
    changes: ChangeAverage
    descent: DescentAverage


def init(params: optax.Params) -> EvidenceState:
    """Begin without any calls."""
    # Each number needs its own buffer, since loops donate the state.
    kinds = _tree.dtype(params), jnp.int32, bool
    zero, none, no = (partial(jnp.zeros, (), kind) for kind in kinds)
    return EvidenceState(
        open_step=OpenStep(zero(), no(), zero(), zero()),
        energies=EnergyAverages(zero(), zero(), none()),
        turns=TurnAverage(zero(), none(), none()),
        changes=ChangeAverage(
            _sums.empty_sketch(params), zero(), no(), zero(), zero(), zero(), none()
        ),
        descent=DescentAverage(zero(), zero(), zero(), no()),
    )


class GradientWeight(NamedTuple):
    """The weight of a gradient in the averages of a preconditioner.

    Attributes:
        trust: factor for its deviation, in (0, 1], less than 1 if it is outlying; 0 if it carries
            no information.
        counts: whether it enters averages: it carries information, and an accepted call opens a
            step.
        restart: whether the chain is still on its way to the posterior: averages must begin again.
        square: squared norm of its deviation; 0 if there is none.
    """

    trust: jax.Array
    counts: jax.Array
    restart: jax.Array
    square: jax.Array


class Evidence(NamedTuple):
    """Results of one call, from which the tuner chooses the step size.

    Measurements and their averages:

    | attribute     | in this call                                                | average    |
    |---------------|-------------------------------------------------------------|------------|
    | `error`       | energy error of the step that ended                         | `energies` |
    | `turn_rate`   | angle per unit length by which the gradient turns u         | `turns`    |
    | `change_rate` | the same for the change of the gradient since the last step | `changes`  |
    |               | end; 0 if it was not measured                               |            |
    |               | energy that the drift lost                                  | `descent`  |

    The averages include this call if it is accepted; `energies` includes only earlier steps.

    Attributes:
        weight: weight of this gradient in averages.
        num_gradients: calls of `update` before this one, int32.
        base: the user's step size, which the tuner's factor multiplies.
        resolution: step size below which the parameters stop moving in their precision.
        num_parameters: d.
        width: see `Preconditioner.width`.
    """

    error: EnergyError
    energies: EnergyAverages
    turn_rate: jax.Array
    turns: TurnAverage
    change_rate: jax.Array
    changes: ChangeAverage
    descent: DescentAverage
    weight: GradientWeight
    num_gradients: jax.Array
    base: jax.Array
    resolution: jax.Array
    num_parameters: int
    width: jax.Array | None = None

    def rates(self) -> tuple[jax.Array, jax.Array, float | jax.Array]:
        """Return the rates for explicit noise, see `Momentum.diffuse`.

        The first two are the average angles per unit length by which whole gradients and their
        change turn u. The first is at least a third of the rate of this call, since the average
        lags behind if the chain starts in a mode, with very small gradients. The second equals the
        first until it is known. The third is the share of the gradient that stays from step to
        step, divided by the width of the posterior; 0 until the width is known.
        """
        least = jnp.where(self.weight.trust > 0, self.turn_rate, 0) / LARGEST_RATIO
        turn = jnp.maximum(self.turns.mean_turn_rate, least)
        known = self.changes.num_changes > 0
        change = jnp.where(known, jnp.sqrt(self.changes.mean_change_square), turn)
        if self.width is None:
            return turn, change, 0.0
        stays = jnp.where(known, jnp.maximum(1 - self.changes.share(), 0), 0)
        return turn, change, stays / self.width


def resolution(params_square: jax.Array) -> jax.Array:
    """Length of the shortest step that changes parameters of this squared norm."""
    return RESOLUTION_ULPS * jnp.finfo(params_square.dtype).eps * jnp.sqrt(params_square)


def collect(
    history: EvidenceState,
    end: StepEnd,
    error: EnergyError,
    sums: Sums,
    sketch: Sketch,
    base: jax.Array,
    num_gradients: jax.Array,
    accepted: jax.Array,
) -> Evidence:
    """Add the measurements of a call to the averages.

    `history` has the averages before the call, `base` is the user's step size, `num_gradients`
    counts earlier calls. A rejected call does not change these averages. Only `energies` includes
    rejected steps, which the caller adds.
    """
    shortest = resolution(sums.params_square)
    trust = history.turns.trust(end.turn_rate, sums, num_gradients)
    turns = history.turns.observe(end.turn_rate, trust, accepted)
    descent = history.descent.observe(end, trust, turns, accepted)
    counts = (trust > 0) & (end.step_length >= SMALLEST_STEP * shortest)
    changes, change_rate = history.changes.observe(sketch, end, sums, accepted, counts)
    return Evidence(
        error=error,
        energies=history.energies,
        turn_rate=end.turn_rate,
        turns=turns,
        change_rate=change_rate,
        changes=changes,
        descent=descent,
        weight=GradientWeight(
            trust=trust,
            counts=end.opens_step & (trust > 0) & accepted,
            restart=descent.on_its_way & accepted,
            square=sums.deviation_square,
        ),
        num_gradients=num_gradients,
        base=base,
        resolution=shortest,
        num_parameters=end.num_parameters,
    )
