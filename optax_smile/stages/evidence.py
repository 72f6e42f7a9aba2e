"""What the calls have shown so far: energy errors and how fast the gradients turn the momentum.

The stages tell each other nothing but this: `Evidence` of one call, and the averages behind it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_smile import _tree
from optax_smile.stages.energy import (
    EnergyAverages,
    EnergyError,
    OpenStep,
    no_step,
    observe_energy,
)
from optax_smile.stages.products import LARGEST_ENERGY, Sums

# The average of the turns looks back over this share of all gradients, so that it settles as a
# chain goes on.
SHARE = 0.25
# And over no more of them: float32 loses what weighs less.
LONGEST_AVERAGE = 2**22
# A gradient counts for at most so many times the average, so that one jump cannot stop the chain.
LARGEST_RATIO = 3.0
# A chain whose `descent` is larger still goes down: by chance in less than one in a hundred.
ON_ITS_WAY = 3.0
# Standard deviations of the noise of batches that an energy must fall by, and so many calls.
FALLING, SHORTEST_WINDOW = 3.0, 256
# Of a gradient that lies along the momentum, which it does not turn, so much still counts.
SMALLEST_SHARE = 0.03
# Steps shorter than so many units in the last place of the parameters' norm are lost when they
# are added to the parameters.
RESOLUTION_ULPS = 4
# The change of a gradient after a step shorter than so many times that is mostly rounding.
SMALLEST_STEP = 30.0
# Loss gradients of zero say nothing at first; after so many calls they may be all there is.
PATIENCE = 100


class TurnAverage(NamedTuple):
    """Average of the rate at which the whitened gradients turn the momentum.

    Attributes:
        mean_turn_rate: radians per unit length, scalar; 0 before the first gradient.
        num_turns: gradients that entered, int32.
        num_outlying: gradients of kept calls that count for less than they are: zero, or over
            `LARGEST_RATIO` times the average; int32.
    """

    mean_turn_rate: jax.Array
    num_turns: jax.Array
    num_outlying: jax.Array


class ChangeAverage(NamedTuple):
    """How much the whitened gradient changes from one step end to the next.

    Attributes:
        sketch: of the gradient at the last step end, see `_tree.sums_and_sketch`.
        last_square: (|g| / (d - 1))^2 there, the square of an angle per unit length, scalar.
        is_comparable: whether the next step end can be compared with it: the call was kept, and the
            scale has stayed since.
        mean_change_square: average of (|g - g_before| / (d - 1))^2 / 2, scalar.
        mean_gradient_square: average of the mean of (|g| / (d - 1))^2 and the one before, scalar.
        num_changes: step ends that entered, int32.
    """

    sketch: Any
    last_square: jax.Array
    is_comparable: jax.Array
    mean_change_square: jax.Array
    mean_gradient_square: jax.Array
    num_changes: jax.Array

    def share(self) -> jax.Array:
        """Share of the change in the gradient's square; NaN before the first."""
        known = (self.num_changes > 0) & (self.mean_gradient_square > 0)
        whole = jnp.where(known, self.mean_gradient_square, 1)
        return jnp.where(known, self.mean_change_square / whole, jnp.nan)


class DescentAverage(NamedTuple):
    """Averages that tell whether a chain still goes down, over the last quarter of its gradients.

    Attributes:
        energy_fall: energy that a drift loses according to the gradient at its end, eps |g| cos
            of the angle between u and -g, nats, scalar.
        fall_square: square of what it would be along the gradient, over d, nats^2, scalar.
        descent_score: energy that was lost, in standard deviations of what chance makes of a chain
            that has arrived, scalar.
        on_its_way: whether that is more than `ON_ITS_WAY`.
    """

    energy_fall: jax.Array
    fall_square: jax.Array
    descent_score: jax.Array
    on_its_way: jax.Array


class LossAverage(NamedTuple):
    """Means of the loss over two windows of kept calls, one twice as long as the one before.

    Attributes:
        last_loss: that of the last call, nats per term.
        loss_before: mean over the window that has closed, likewise.
        loss_now: mean over the open window, likewise.
        loss_noise_square: half the mean square of the differences between successive calls, of the
            last quarter, likewise squared.
        num_losses: how many entered in all, int32.
        fall: by how much the energy of the open window is lower than that of the one before, nats.
        is_falling: whether that is more than chance and a chain that has arrived make it.
    """

    last_loss: jax.Array
    loss_before: jax.Array
    loss_now: jax.Array
    loss_noise_square: jax.Array
    num_losses: jax.Array
    fall: jax.Array
    is_falling: jax.Array


class EvidenceState(NamedTuple):
    """What a chain remembers of its past calls.

    Attributes:
        open_step: what its energy is computed from.
        energies: averages of |energy change| over all judged steps.
        turns: average of what the gradients of the kept calls turn the momentum by.
        changes: average of what they change by from one step end to the next.
        descent: average of the energy that the drifts of the kept calls lose.
        loss: averages of the mean loss, where the loop passes it.
    """

    open_step: OpenStep
    energies: EnergyAverages
    turns: TurnAverage
    changes: ChangeAverage
    descent: DescentAverage
    loss: LossAverage


class Worth(NamedTuple):
    """What a gradient is worth to the averages of a preconditioner.

    Attributes:
        trust: what the deviation of an outlying one is to be multiplied with, in (0, 1]; 0 if it
            says nothing.
        counts: whether it enters: it says something, and belongs to the end of a step that is kept.
        anew: whether the chain is still on its way, where averages say nothing of the posterior.
        square: of its deviation, summed over all parameters; 0 without one.
    """

    trust: jax.Array
    counts: jax.Array
    anew: jax.Array
    square: jax.Array


class Evidence(NamedTuple):
    """What one call shows.

    Attributes:
        error: energy error of the step that ended there.
        energies: averages of |energy change| over the steps before it.
        turn_rate: angle per unit length by which this gradient turns the momentum.
        turns: average of that, with this gradient where the call is kept.
        change_rate: likewise by its change since the last step end; 0 if that does not count.
        changes: average of that.
        descent: averages of the energy that is lost, likewise.
        worth: what this gradient is worth to averages.
        num_gradients: calls of `update` before this one, int32.
        base: the user's step size, which the factor multiplies.
        resolution: step size below which the parameters stop moving in their precision.
    """

    error: EnergyError
    energies: EnergyAverages
    turn_rate: jax.Array
    turns: TurnAverage
    change_rate: jax.Array
    changes: ChangeAverage
    descent: DescentAverage
    worth: Worth
    num_gradients: jax.Array
    base: jax.Array
    resolution: jax.Array


def init(params: Any) -> EvidenceState:
    """Start with nothing seen."""
    dtype = _tree.dtype(params)

    def zero():
        return jnp.zeros((), dtype)

    return EvidenceState(
        open_step=no_step(dtype),
        energies=EnergyAverages(zero(), zero(), jnp.zeros((), jnp.int32)),
        turns=TurnAverage(zero(), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)),
        changes=ChangeAverage(
            sketch=_tree.empty_sketch(params),
            last_square=zero(),
            is_comparable=jnp.zeros((), bool),
            mean_change_square=zero(),
            mean_gradient_square=zero(),
            num_changes=jnp.zeros((), jnp.int32),
        ),
        descent=DescentAverage(zero(), zero(), zero(), jnp.zeros((), bool)),
        loss=LossAverage(
            last_loss=zero(),
            loss_before=zero(),
            loss_now=zero(),
            loss_noise_square=zero(),
            num_losses=jnp.zeros((), jnp.int32),
            fall=zero(),
            is_falling=jnp.zeros((), bool),
        ),
    )


def turn_rate(sums: Sums, cosine: jax.Array, num_parameters: int) -> jax.Array:
    """Compute the rate |g| / (d - 1) max(1 - max(p, 0)^2, 0.03) at which a gradient turns u.

    Far from a mode u points down the gradient, p = cos(u, -g) is about one, and a large gradient
    turns it by little: its whole length would make the steps too short to arrive. Near a mode p is
    about zero. Uphill the smallest deviation from -1 grows: there the whole gradient counts.
    """
    share = jnp.maximum(1 - jnp.maximum(cosine, 0) ** 2, SMALLEST_SHARE)
    return jnp.sqrt(sums.gradient_square) / (num_parameters - 1) * share


def trust(average: TurnAverage, rate: jax.Array, sums: Sums, num_gradients: jax.Array) -> jax.Array:
    """Tell what a gradient counts for: 0 if it says nothing, less than 1 if it is absurdly large.

    A gradient whose square is below the normal numbers is none, and in the first calls, where the
    prior alone would throw the chain out of its mode, a gradient of the loss that is zero.
    """
    largest = LARGEST_RATIO * average.mean_turn_rate
    bounded = (average.num_turns > 0) & (rate > largest)
    shortened = jnp.where(bounded, largest / jnp.where(rate > 0, rate, 1), 1)
    tiny = jnp.finfo(sums.loss_square.dtype).tiny
    evident = (sums.gradient_square >= tiny) & jnp.isfinite(sums.gradient_square)
    evident &= (sums.loss_square >= tiny) | (num_gradients >= PATIENCE)
    return jnp.where(evident, shortened, 0)


def observe_turn(
    average: TurnAverage, rate: jax.Array, trust: jax.Array, kept: jax.Array
) -> TurnAverage:
    """Take the rate of one gradient into the average, where the call is kept.

    mean <- (1 - w) mean + w trust rate with w = 1 / (SHARE t), at most 1, after t gradients: the
    first four replace what was before, so that no first gradient is too absurd to be forgotten,
    and from 2^24 gradients on w stays.
    """
    evident = kept & (trust > 0)
    count = _tree.count(average.num_turns, evident)
    return TurnAverage(
        mean_turn_rate=_average(average.mean_turn_rate, trust * rate, count, evident),
        num_turns=count,
        num_outlying=_tree.count(average.num_outlying, kept & (trust < 1)),
    )


def _average(mean: jax.Array, new: jax.Array, count: jax.Array, enters: jax.Array) -> jax.Array:
    """Average over the last `SHARE` of all entries, of which this one is number `count`."""
    number = jnp.minimum(SHARE * jnp.maximum(count, 1), LONGEST_AVERAGE)
    weight = jnp.minimum(1 / number, 1)
    # Not mean + weight * (new - mean), which leaves nothing of a small new after an absurd mean.
    return jnp.where(enters, (1 - weight) * mean + weight * new, mean).astype(mean.dtype)


def observe_change(
    past: ChangeAverage, sketch: Any, closed: Any, sums: Sums, kept: jax.Array, counts: jax.Array
) -> tuple[ChangeAverage, jax.Array]:
    """Compare the gradient with that at the last step end, where both belong to kept calls.

    Args:
        past: before this call.
        sketch: of its gradient.
        closed: whether a step ends or begins here.
        sums: with the square of the gradient.
        kept: whether the call is kept.
        counts: whether its gradient says something, and its step was long enough to be seen in it:
            the change after a shorter step is rounding.

    Returns:
        The averages, and the angle per unit length by which this change turns the momentum; 0 if it
        does not enter.
    """
    unit = float(closed.num_parameters - 1) ** 2
    square = _tree.distance_square(sketch, past.sketch) / 2 / unit
    gradient_square = sums.gradient_square / unit
    # Of smaller numbers the square is lost: an average of zero would give no change any weight.
    is_evident = (square >= jnp.finfo(square.dtype).tiny) & jnp.isfinite(square)
    enters = past.is_comparable & closed.step_end & kept & counts & is_evident
    most = LARGEST_RATIO**2 * past.mean_change_square
    bounded = (past.num_changes > 0) & (square > most)
    trust = jnp.where(bounded, most / jnp.where(square > 0, square, 1), 1)
    whole = trust * (gradient_square + past.last_square) / 2
    count = _tree.count(past.num_changes, enters)
    here = sketch, gradient_square
    there = past.sketch, past.last_square
    sketch, gradient_square = _tree.where(closed.opens_step & kept, here, there)
    averages = ChangeAverage(
        sketch=sketch,
        last_square=gradient_square,
        is_comparable=jnp.where(closed.opens_step, True, past.is_comparable) & kept,
        mean_change_square=_average(past.mean_change_square, trust * square, count, enters),
        mean_gradient_square=_average(past.mean_gradient_square, whole, count, enters),
        num_changes=count,
    )
    return averages, jnp.sqrt(jnp.where(enters, square, 0))


class Rates(NamedTuple):
    """Angles per unit length by which u turns, on average.

    Attributes:
        gradient: by whole gradients.
        change: by what changes from one gradient to the next; by whole gradients until it is known.
    """

    gradient: jax.Array
    change: jax.Array


def usual_rates(shown: Evidence) -> Rates:
    """Average rates, that of whole gradients no less than a third of the present one.

    To the present one the average is to rise: where the first gradients were absurdly small, in a
    mode, it lags behind for long.
    """
    now = jnp.where(shown.worth.trust > 0, shown.turn_rate, 0) / LARGEST_RATIO
    whole, changes = jnp.maximum(shown.turns.mean_turn_rate, now), shown.changes
    known = changes.num_changes > 0
    return Rates(whole, jnp.where(known, jnp.sqrt(changes.mean_change_square), whole))


def observe_descent(
    average: DescentAverage, closed: Any, trust: jax.Array, turns: TurnAverage, kept: jax.Array
) -> DescentAverage:
    """Take the drift that ended with a gradient into the averages, where the gradient counts.

    Over the last n = t / 4 of t gradients a chain at rest in its posterior loses nothing, but for
    the noise of the gradients, of variance v in each, and for its own energy, which has the
    variance d / 2 there, no more than n^2 v.
    """
    count, enters = turns.num_turns, kept & (trust > 0)
    most = jnp.minimum(trust * closed.largest_fall, LARGEST_ENERGY)
    fall = _average(average.energy_fall, most * closed.cosine, count, enters)
    square = _average(average.fall_square, most**2 / closed.num_parameters, count, enters)
    number = jnp.minimum(SHARE * count.astype(square.dtype), LONGEST_AVERAGE)
    own = jnp.minimum(number**2 * square, closed.num_parameters / 2)
    # The weights of `_average` give an average the variance of one over n (2 - SHARE) equal ones.
    deviation = jnp.sqrt(own + number * square / (2 - SHARE))
    score = number * fall / jnp.where(deviation > 0, deviation, 1)
    score = jnp.where(deviation > 0, score, 0).astype(fall.dtype)
    return DescentAverage(fall, square, score, score > ON_ITS_WAY)


def observe_loss(
    past: LossAverage, value: jax.Array | None, per_nat: Any, size: int, kept: jax.Array
) -> LossAverage:
    """Take the loss of a kept call into the window that is open, the calls 2^k to 2^(k + 1) - 1.

    The energy of a chain of d parameters that has arrived has the standard deviation sqrt(d / 2).
    Its means over two windows differ by less than that, and by the noise of the batches. From the
    middle of a window on it is compared with the one before: the way to the posterior is forgotten
    after at most six times as many calls as it took.

    Args:
        past: before this call.
        value: mean loss, or None.
        per_nat: energy per unit of it, num_data / temperature.
        size: d.
        kept: whether the call is kept.
    """
    if value is None:
        return past
    dtype, count = past.last_loss.dtype, _tree.count(past.num_losses, kept)
    opened = jnp.left_shift(1, 31 - jax.lax.clz(jnp.maximum(count, 1)))
    opens = kept & (count == opened)
    number = (count - opened + 1).astype(dtype)
    before = jnp.where(opens, past.loss_now, past.loss_before)
    now = past.loss_now + (value - past.loss_now) / number
    now = jnp.where(kept, jnp.where(opens, value, now), past.loss_now)
    change = jnp.minimum(jnp.abs(value - past.last_loss), LARGEST_ENERGY)
    square = jnp.where(past.num_losses > 0, change**2 / 2, 0)
    noise = _average(past.loss_noise_square, square, count, kept)
    fall = per_nat * (before - now)
    half = opened.astype(dtype) / 2
    chance = jnp.sqrt(size / 2 + jnp.square(FALLING * per_nat) * noise * (1 / number + 1 / half))
    judges = kept & (count >= SHORTEST_WINDOW) & (number >= half)
    return LossAverage(
        last_loss=jnp.where(kept, value, past.last_loss).astype(dtype),
        loss_before=before,
        loss_now=now.astype(dtype),
        loss_noise_square=noise,
        num_losses=count,
        fall=jnp.where(judges, fall, past.fall).astype(dtype),
        is_falling=jnp.where(judges, fall > chance, past.is_falling),
    )


def resolution(params_square: jax.Array) -> jax.Array:
    """Length of the shortest step that still moves parameters of this squared norm."""
    return RESOLUTION_ULPS * jnp.finfo(params_square.dtype).eps * jnp.sqrt(params_square)


def show(
    past: EvidenceState,
    closed: Any,
    error: EnergyError,
    sums: Sums,
    sketch: Any,
    base: jax.Array,
    num_gradients: jax.Array,
    kept: jax.Array,
) -> Evidence:
    """Collect what a call shows."""
    shortest = resolution(sums.params_square)
    trusted = trust(past.turns, closed.turn_rate, sums, num_gradients)
    turns = observe_turn(past.turns, closed.turn_rate, trusted, kept)
    descent = observe_descent(past.descent, closed, trusted, turns, kept)
    counts = (trusted > 0) & (closed.step_length >= SMALLEST_STEP * shortest)
    changes, change_rate = observe_change(past.changes, sketch, closed, sums, kept, counts)
    return Evidence(
        error=error,
        energies=past.energies,
        turn_rate=closed.turn_rate,
        turns=turns,
        change_rate=change_rate,
        changes=changes,
        descent=descent,
        worth=Worth(
            trust=trusted,
            counts=closed.opens_step & (trusted > 0) & kept,
            anew=descent.on_its_way & kept,
            square=sums.deviation_square,
        ),
        num_gradients=num_gradients,
        base=base,
        resolution=shortest,
    )


def remember(
    past: EvidenceState,
    shown: Evidence,
    open_step: OpenStep,
    cap: float | jax.Array,
    scale_stays: jax.Array | bool,
    loss: LossAverage,
) -> EvidenceState:
    """Keep what a call showed."""
    changes = shown.changes
    return EvidenceState(
        open_step=open_step,
        energies=observe_energy(past.energies, shown.error, cap),
        turns=shown.turns,
        changes=changes._replace(is_comparable=changes.is_comparable & scale_stays),
        descent=shown.descent,
        loss=loss,
    )
