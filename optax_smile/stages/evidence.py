"""What the calls have shown so far: energy errors and how fast the gradients turn the momentum.

The stages tell each other nothing but this: `Evidence` of one call, and the averages behind it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.special
import optax

from optax_smile import _tree, potential
from optax_smile.samplers import _call

# Before so many energies their averages say nothing: neither adaptation nor outlier test.
ENERGIES_TO_SETTLE = 10
# An energy enters the averages with at most so many times the outlier threshold, so that one
# jump cannot open the test for the jumps that follow.
WINSOR_FACTOR = 3.0
# Weight of the old value in the averages of the energy error; 1 - beta in the paper.
ENERGY_DECAY = 0.99
# And with at most this many nats, whose square float32 still holds.
LARGEST_ENERGY = 1e18
# The average of the turns looks back over this share of all gradients, so that it settles as a
# chain goes on.
SHARE = 0.25
# A gradient counts for at most so many times the average, so that one jump cannot stop the chain.
LARGEST_RATIO = 3.0
# A chain whose `descent` is larger still goes down: by chance in less than one in a hundred.
ON_ITS_WAY = 3.0
# Of a gradient that lies along the momentum, which it does not turn, so much still counts.
SMALLEST_SHARE = 0.03
# Loss gradients of zero say nothing at first; after so many calls they may be all there is.
PATIENCE = 100


class Seen(NamedTuple):
    """The trees of a call, all like the parameters.

    Attributes:
        direction: u.
        gradient: of the energy, in whitened coordinates.
        noise: explicit noise, or None.
        params: the parameters.
        loss_gradient: of the mean loss.
        energy_gradient: of the energy.
        deviation: of that from what the preconditioner expected, or None.
        prior_terms: what the last drift, backwards, would add to the prior's part of the energy.
    """

    direction: optax.Updates
    gradient: optax.Updates
    noise: optax.Updates | None
    params: optax.Params
    loss_gradient: optax.Updates
    energy_gradient: optax.Updates
    deviation: optax.Updates | None
    prior_terms: optax.Updates


class Sums(NamedTuple):
    """Inner products over all parameters: one pass over the trees.

    Attributes:
        direction_square: of the direction u with itself, which rounding keeps off 1.
        direction_dot_gradient: of u with the whitened gradient.
        gradient_square: of the whitened gradient with itself.
        params_square: of the parameters with themselves.
        loss_square: of the gradient of the mean loss with itself.
        prior_change: what the last drift added to the prior's part of the energy, nats.
        deviation_square: of what the preconditioner did not expect with itself; 0 without one.
        noise_square: of the explicit noise with itself; 0 without.
        noise_dot_direction: of it with u, likewise.
        noise_dot_gradient: of it with the whitened gradient, likewise.
    """

    direction_square: jax.Array
    direction_dot_gradient: jax.Array
    gradient_square: jax.Array
    params_square: jax.Array
    loss_square: jax.Array
    prior_change: jax.Array
    deviation_square: jax.Array
    noise_square: jax.Array
    noise_dot_direction: jax.Array
    noise_dot_gradient: jax.Array


class OpenStep(NamedTuple):
    """What the energy of the open step is computed from.

    Attributes:
        opening_value: mean loss at its start, on the batch of the call that opened it; means
            something where `opening_known`.
        opening_known: whether that call was given one.
        kinetic_change: kinetic energy that its kicks have added so far, nats.
        prior_change: what its drifts but the last have added to the prior's part of the energy,
            nats.
    """

    opening_value: jax.Array
    opening_known: jax.Array
    kinetic_change: jax.Array
    prior_change: jax.Array


class EnergyError(NamedTuple):
    """Energy gained by the step that a call has closed.

    Attributes:
        change: nats, positive = gained; means something where `known`.
        known: whether a step was closed, had a value at both ends, and is finite.
        finite: whether every number that the call was given is finite.
    """

    change: jax.Array
    known: jax.Array
    finite: jax.Array


class EnergyAverages(NamedTuple):
    """Moving averages of |energy change| in nats over the steps that had one.

    Attributes:
        energy_mean: weighted mean, scalar; 0 before the first.
        energy_std: weighted standard deviation about the mean of its time, scalar.
        num_energies: how many entered, int32.
    """

    energy_mean: jax.Array
    energy_std: jax.Array
    num_energies: jax.Array


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


class EvidenceState(NamedTuple):
    """What a chain remembers of its past calls.

    Attributes:
        open_step: what its energy is computed from.
        energies: averages of |energy change| over all judged steps.
        turns: average of what the gradients of the kept calls turn the momentum by.
        descent: average of the energy that the drifts of the kept calls lose.
    """

    open_step: OpenStep
    energies: EnergyAverages
    turns: TurnAverage
    descent: DescentAverage


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
        descent: averages of the energy that is lost, likewise.
        worth: what this gradient is worth to averages.
        num_calls: calls of `update` before this one, int32.
        base: the user's step size, which the factor multiplies.
        resolution: step size below which the parameters stop moving in their precision.
    """

    error: EnergyError
    energies: EnergyAverages
    turn_rate: jax.Array
    turns: TurnAverage
    descent: DescentAverage
    worth: Worth
    num_calls: jax.Array
    base: jax.Array
    resolution: jax.Array


def init(dtype: jnp.dtype) -> EvidenceState:
    """Start with nothing seen."""

    def zero():
        return jnp.zeros((), dtype)

    return EvidenceState(
        open_step=no_step(dtype),
        energies=EnergyAverages(zero(), zero(), jnp.zeros((), jnp.int32)),
        turns=TurnAverage(zero(), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)),
        descent=DescentAverage(zero(), zero(), zero(), jnp.zeros((), bool)),
    )


def no_step(dtype: jnp.dtype) -> OpenStep:
    """No step has begun."""
    return OpenStep(
        opening_value=jnp.zeros((), dtype),
        opening_known=jnp.zeros((), bool),
        kinetic_change=jnp.zeros((), dtype),
        prior_change=jnp.zeros((), dtype),
    )


def measure(seen: Seen) -> Sums:
    """Compute the inner products that a call needs."""

    def product(first: Any, second: Any) -> Any:
        return None if first is None else jax.tree.map(jnp.multiply, first, second)

    terms: Any = Sums(
        direction_square=product(seen.direction, seen.direction),
        direction_dot_gradient=product(seen.direction, seen.gradient),
        gradient_square=product(seen.gradient, seen.gradient),
        params_square=product(seen.params, seen.params),
        loss_square=product(seen.loss_gradient, seen.loss_gradient),
        prior_change=jax.tree.map(jnp.negative, seen.prior_terms),
        deviation_square=product(seen.deviation, seen.deviation),
        noise_square=product(seen.noise, seen.noise),
        noise_dot_direction=product(seen.noise, seen.direction),
        noise_dot_gradient=product(seen.noise, seen.gradient),
    )
    known = [tree is not None for tree in terms]
    found = iter(_tree.sums([tree for tree in terms if tree is not None]))
    zero = jnp.zeros((), _tree.dtype(seen.params))
    return Sums(*(next(found) if is_known else zero for is_known in known))


def settled(averages: EnergyAverages) -> jax.Array:
    """Tell whether enough energies were seen to judge the next."""
    return averages.num_energies >= ENERGIES_TO_SETTLE


def proceed(
    step: OpenStep, closed: Any, opened: Any, sums: Sums, value: jax.Array | None
) -> OpenStep:
    """Account for the kicks and the drift of a call; where it opens a step, for that step alone.

    `closed` and `opened` are what the momentum answers, see `Momentum`.
    """
    opens = closed.opens_step
    kinetic_change = step.kinetic_change + closed.kinetic_change
    at = step.opening_value if value is None else jnp.where(opens, value, step.opening_value)
    return OpenStep(
        opening_value=at,
        opening_known=jnp.where(opens, value is not None, step.opening_known),
        kinetic_change=jnp.where(opens, opened.kinetic_change, kinetic_change),
        prior_change=jnp.where(opens, 0, step.prior_change + sums.prior_change),
    )


def error(change: jax.Array | None, closes: jax.Array, given: tuple[jax.Array, ...]) -> EnergyError:
    """Judge the numbers of a call.

    Args:
        change: energy gained since the open step began, nats; None without `value`.
        closes: whether a step ends here whose start had a value.
        given: scalars that are finite if and only if the call's gradient and value are.
    """
    finite = jnp.all(jnp.isfinite(jnp.stack(given)))
    if change is None:
        return EnergyError(jnp.full_like(given[0], jnp.nan), jnp.zeros_like(finite), finite)
    finite &= jnp.isfinite(change) | ~closes
    known = closes & finite
    return EnergyError(jnp.where(known, change, jnp.nan), known, finite)


def quantile(averages: EnergyAverages, probability: float | jax.Array) -> jax.Array:
    """Quantile of the Gamma distribution with the mean and standard deviation seen.

    Wilson and Hilferty 1931, mean (1 - r^2 / 9 + z r / 3)^3 with r = std / mean = shape^(-1/2)
    and the normal quantile z, clamped at 0. For z > 0 it grows with r up to r = 3 z / 2 and then
    falls below zero: heavier tails than that keep the largest value, so that a jump among the
    first energies makes the outlier test lenient for a while, never a trap that undoes every step.
    """
    z = jax.scipy.special.ndtri(jnp.asarray(probability, averages.energy_mean.dtype))
    mean = averages.energy_mean
    ratio = jnp.where(mean > 0, averages.energy_std / jnp.where(mean > 0, mean, 1), 0)
    ratio = jnp.minimum(ratio, jnp.where(z > 0, 1.5 * z, jnp.inf))
    return mean * jnp.maximum(1 - ratio**2 / 9 + z * ratio / 3, 0) ** 3


def observe_energy(
    averages: EnergyAverages, error: EnergyError, cap: float | jax.Array
) -> EnergyAverages:
    """Take |energy change| into the averages where it is known.

    mean <- mean + w (energy - mean), variance <- (1 - w) variance + w (energy - mean)^2 with
    w = (1 - a) / (1 - a^t), a = `ENERGY_DECAY`: exponential averages without the bias of their
    start. `cap` is the probability whose quantile times `WINSOR_FACTOR` bounds what enters.
    """
    energy, known = jnp.minimum(jnp.abs(error.change), LARGEST_ENERGY), error.known
    count = _tree.count(averages.num_energies, known)
    bounded = jnp.minimum(energy, WINSOR_FACTOR * quantile(averages, cap))
    energy = jnp.where(settled(averages), bounded, energy)
    weight = (1 - ENERGY_DECAY) / (1 - ENERGY_DECAY ** jnp.maximum(count, 1).astype(energy.dtype))
    mean = averages.energy_mean + weight * (energy - averages.energy_mean)
    variance = (1 - weight) * averages.energy_std**2 + weight * (energy - mean) ** 2
    return EnergyAverages(
        energy_mean=jnp.where(known, mean, averages.energy_mean).astype(mean.dtype),
        energy_std=jnp.where(known, jnp.sqrt(variance), averages.energy_std).astype(mean.dtype),
        num_energies=count,
    )


def turn_rate(sums: Sums, cosine: jax.Array, num_parameters: int) -> jax.Array:
    """Compute the rate |g| / (d - 1) max(1 - max(p, 0)^2, 0.03) at which a gradient turns u.

    Far from a mode u points down the gradient, p = cos(u, -g) is about one, and a large gradient
    turns it by little: its whole length would make the steps too short to arrive. Near a mode p is
    about zero. Uphill the smallest deviation from -1 grows: there the whole gradient counts.
    """
    share = jnp.maximum(1 - jnp.maximum(cosine, 0) ** 2, SMALLEST_SHARE)
    return jnp.sqrt(sums.gradient_square) / (num_parameters - 1) * share


def trust(average: TurnAverage, rate: jax.Array, sums: Sums, num_calls: jax.Array) -> jax.Array:
    """Tell what a gradient counts for: 0 if it says nothing, less than 1 if it is absurdly large.

    A gradient whose square is below the normal numbers is none, and in the first calls, where the
    prior alone would throw the chain out of its mode, a gradient of the loss that is zero.
    """
    largest = LARGEST_RATIO * average.mean_turn_rate
    bounded = (average.num_turns > 0) & (rate > largest)
    shortened = jnp.where(bounded, largest / jnp.where(rate > 0, rate, 1), 1)
    tiny = jnp.finfo(sums.loss_square.dtype).tiny
    evident = (sums.gradient_square >= tiny) & jnp.isfinite(sums.gradient_square)
    evident &= (sums.loss_square >= tiny) | (num_calls >= PATIENCE)
    return jnp.where(evident, shortened, 0)


def observe_turn(
    average: TurnAverage, rate: jax.Array, trust: jax.Array, kept: jax.Array
) -> TurnAverage:
    """Take the rate of one gradient into the average, where the call is kept.

    mean <- (1 - w) mean + w trust rate with w = 1 / (SHARE t), at most 1, after t gradients: the
    first four replace what was before, so that no first gradient is too absurd to be forgotten.
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
    weight = jnp.minimum(1 / (SHARE * jnp.maximum(count, 1)), 1)
    # Not mean + weight * (new - mean), which leaves nothing of a small new after an absurd mean.
    return jnp.where(enters, (1 - weight) * mean + weight * new, mean).astype(mean.dtype)


def usual_rate(shown: Evidence) -> jax.Array:
    """Average rate, but no less than a third of the present one, to which the average is to rise.

    Where the first gradients were absurdly small, in a mode, the average lags behind for long.
    """
    now = jnp.where(shown.worth.trust > 0, shown.turn_rate, 0) / LARGEST_RATIO
    return jnp.maximum(shown.turns.mean_turn_rate, now)


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
    number = SHARE * count.astype(square.dtype)
    own = jnp.minimum(number**2 * square, closed.num_parameters / 2)
    # The weights of `_average` give an average the variance of one over n (2 - SHARE) equal ones.
    deviation = jnp.sqrt(own + number * square / (2 - SHARE))
    score = number * fall / jnp.where(deviation > 0, deviation, 1)
    score = jnp.where(deviation > 0, score, 0).astype(fall.dtype)
    return DescentAverage(fall, square, score, score > ON_ITS_WAY)


def energy_error(
    posterior: potential.Potential, step: OpenStep, closed: Any, sums: Sums, value: jax.Array | None
) -> EnergyError:
    """Energy which the step that ends here gained, where both of its ends had a value.

    Args:
        posterior: whose energy.
        step: the step that ends, if one does.
        closed: what the momentum says of its end.
        sums: finite where the gradient is.
        value: mean loss at its end, or None.
    """
    given = *sums, closed.kinetic_change
    if value is None:
        return error(None, closed.step_end, given)
    loss_change = value - step.opening_value
    prior_change = step.prior_change + sums.prior_change
    change = potential.energy_change(posterior, loss_change, prior_change)
    change += step.kinetic_change + closed.kinetic_change
    known = closed.step_end & step.opening_known
    return error(change, known, (*given, value))


def show(
    past: EvidenceState,
    closed: Any,
    error: EnergyError,
    sums: Sums,
    base: jax.Array,
    num_calls: jax.Array,
    kept: jax.Array,
) -> Evidence:
    """Collect what a call shows."""
    trusted = trust(past.turns, closed.turn_rate, sums, num_calls)
    turns = observe_turn(past.turns, closed.turn_rate, trusted, kept)
    descent = observe_descent(past.descent, closed, trusted, turns, kept)
    return Evidence(
        error=error,
        energies=past.energies,
        turn_rate=closed.turn_rate,
        turns=turns,
        descent=descent,
        worth=Worth(
            trust=trusted,
            counts=closed.opens_step & (trusted > 0) & kept,
            anew=descent.on_its_way & kept,
            square=sums.deviation_square,
        ),
        num_calls=num_calls,
        base=base,
        resolution=_call.resolution(sums.params_square),
    )


def remember(
    past: EvidenceState, shown: Evidence, open_step: OpenStep, cap: float | jax.Array
) -> EvidenceState:
    """Keep what a call showed."""
    return EvidenceState(
        open_step=open_step,
        energies=observe_energy(past.energies, shown.error, cap),
        turns=shown.turns,
        descent=shown.descent,
    )
