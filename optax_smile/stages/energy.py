"""The energy error of a step, and the averages that judge the next ones."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.special

from optax_smile import _tree, potential
from optax_smile.stages.products import LARGEST_ENERGY, Sums

# Before so many energies their averages say nothing: neither adaptation nor outlier test.
ENERGIES_TO_SETTLE = 10
# An energy enters the averages with at most so many times the outlier threshold, so that one
# jump cannot open the test for the jumps that follow.
WINSOR_FACTOR = 3.0
# Weight of the old value in the averages of the energy error; 1 - beta in the paper.
ENERGY_DECAY = 0.99


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


def no_step(dtype: jnp.dtype) -> OpenStep:
    """No step has begun."""
    return OpenStep(
        opening_value=jnp.zeros((), dtype),
        opening_known=jnp.zeros((), bool),
        kinetic_change=jnp.zeros((), dtype),
        prior_change=jnp.zeros((), dtype),
    )


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
    first energies makes the outlier test lenient for a while, never a trap that rejects every step.
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
