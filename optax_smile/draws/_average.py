"""Running averages over snapshots, in constant memory and with compensated summation."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_smile import _tree
from optax_smile.draws.prediction import Outcome, Prediction


class Average(NamedTuple):
    """Average over the snapshots so far.

    Attributes:
        count: number of snapshots, int32.
        mean, variance, entropy: averages of these fields of an `Outcome`.
        rest: rounding error of `mean`, carried by compensated summation.
        spread: sum of squared deviations of the means from their average; None without `variance`.
        largest: largest log density of each target.
        relative: sum of exp(log density - largest).
        invalid: index of the first snapshot whose prediction is not finite, or -1; int32.
    """

    count: jax.Array
    mean: Any
    variance: Any
    entropy: Any
    rest: Any
    spread: Any
    largest: Any
    relative: Any
    invalid: jax.Array


def zero(outcome: Outcome) -> Average:
    """Return the empty average for predictions of the shapes of `outcome`."""

    def zeros(tree, fill=0.0):
        return jax.tree.map(lambda x: jnp.full_like(x, fill), tree)

    return Average(
        count=jnp.zeros((), jnp.int32),
        mean=zeros(outcome.mean),
        variance=zeros(outcome.variance),
        entropy=zeros(outcome.entropy),
        rest=zeros(outcome.mean),
        spread=None if outcome.variance is None else zeros(outcome.mean),
        largest=zeros(outcome.log_density, -jnp.inf),
        relative=zeros(outcome.log_density),
        invalid=jnp.full((), -1, jnp.int32),
    )


def add(average: Average, outcome: Outcome, number: jax.Array) -> Average:
    """Add one snapshot; a negative `number` leaves the average unchanged."""
    one = Average(
        count=jnp.ones((), jnp.int32),
        mean=outcome.mean,
        variance=outcome.variance,
        entropy=outcome.entropy,
        rest=jax.tree.map(jnp.zeros_like, average.rest),
        spread=jax.tree.map(jnp.zeros_like, average.spread),
        largest=outcome.log_density,
        relative=jax.tree.map(jnp.ones_like, average.relative),
        invalid=jnp.where(_is_valid(outcome), -1, number),
    )
    return _tree.where(number >= 0, join(average, one), average)


def _is_valid(outcome: Outcome) -> jax.Array:
    """Return whether a prediction is finite; a log density may be minus infinity."""
    finite = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(outcome._replace(log_density=None))]
    if outcome.log_density is not None:
        finite.append(jnp.all(outcome.log_density < jnp.inf))
    return jnp.all(jnp.array(finite))


def join(first: Average, second: Average) -> Average:
    """Combine two averages into the average over the snapshots of both.

    Means and squared deviations follow Chan, Golub and LeVeque 1979; densities are stored relative
    to the largest.
    """
    count = first.count + second.count

    def share(x):
        return second.count.astype(x.dtype) / jnp.maximum(count, 1).astype(x.dtype)

    def mean(x, y):
        return x + (y - x) * share(x)

    def moved(x, y, rest_of_x, rest_of_y):
        return rest_of_x + ((y - x) + (rest_of_y - rest_of_x)) * share(x)

    def spread(x, y, at, to):
        return x + y + (to - at) ** 2 * share(x) * first.count.astype(x.dtype)

    def relative(x, y, of_x, of_y):
        largest = jnp.maximum(of_x, of_y)
        base = jnp.where(jnp.isfinite(largest), largest, 0)
        return x * jnp.exp(of_x - base) + y * jnp.exp(of_y - base)

    largest = first.largest, second.largest
    means = (first.mean, second.mean) if first.spread is not None else (None, None)
    # Kahan 1965: the rounding error of a sum is added to the next one.
    moves = jax.tree.map(moved, first.mean, second.mean, first.rest, second.rest)
    center = jax.tree.map(jnp.add, first.mean, moves)
    both = first.invalid, second.invalid
    earliest = jnp.where(jnp.minimum(*both) < 0, jnp.maximum(*both), jnp.minimum(*both))
    return Average(
        count=count,
        mean=center,
        variance=jax.tree.map(mean, first.variance, second.variance),
        entropy=jax.tree.map(mean, first.entropy, second.entropy),
        rest=jax.tree.map(lambda x, move, to: move - (to - x), first.mean, moves, center),
        spread=jax.tree.map(spread, first.spread, second.spread, *means),
        largest=jax.tree.map(jnp.maximum, *largest),
        relative=jax.tree.map(relative, first.relative, second.relative, *largest),
        invalid=earliest,
    )


def outcome_of(average: Average, entropy_of: Callable[[Any], jax.Array] | None) -> Outcome:
    """Return the prediction of an average; `entropy_of` returns the entropy of its mean."""
    density = None
    if average.relative is not None:
        density = average.largest + jnp.log(average.relative / average.count)
    variance = average.variance
    if variance is not None:
        variance += average.spread / average.count
    return Outcome(
        mean=average.mean,
        variance=variance,
        entropy=None if entropy_of is None else entropy_of(average.mean),
        log_density=density,
    )


def prediction_of(average: Average, entropy_of: Callable[[Any], jax.Array] | None) -> Prediction:
    """Return the prediction of an average, with its uncertainty split in two."""
    outcome = outcome_of(average, entropy_of)
    prediction = Prediction(outcome.mean, outcome.log_density)
    if average.variance is not None:
        return prediction._replace(
            total=outcome.variance,
            aleatoric=average.variance,
            epistemic=average.spread / average.count,
        )
    if average.entropy is not None:
        return prediction._replace(
            total=outcome.entropy,
            aleatoric=average.entropy,
            epistemic=jnp.maximum(outcome.entropy - average.entropy, 0),
        )
    return prediction
