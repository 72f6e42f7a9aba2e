"""The posterior: from the mean loss that a training loop has to an energy in nats.

    U(theta) = (num_data * mean_loss(theta) + prior_precision / 2 * |theta|^2) / temperature

This is -log posterior / temperature up to a constant. No other file multiplies by `num_data`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_smile import _check, _tree


class Potential(NamedTuple):
    """What turns a mean loss into the energy of a posterior.

    Attributes:
        num_data: number of terms that the mean loss averages, >= 1: examples, or tokens for a
            language model. A summed loss makes every energy wrong by a factor that nothing
            downstream can detect.
        prior_precision: of the prior N(0, 1 / precision), per parameter, >= 0: a number, or a
            prefix of the parameter tree with a number for each part.
        temperature: of the posterior, > 0; 1 is Bayes.
    """

    num_data: float | jax.Array
    prior_precision: Any = 1.0
    temperature: float | jax.Array = 1.0


def check(where: str, potential: Potential):
    """Require the ranges that `Potential` gives; traced values pass."""
    _check.number(
        where,
        "num_data",
        potential.num_data,
        ">= 1 and finite",
        lambda x: 1 <= x < float("inf"),
    )
    for precision in jax.tree.leaves(potential.prior_precision):
        _check.number(
            where,
            "prior_precision",
            precision,
            ">= 0 and finite",
            lambda x: 0 <= x < float("inf"),
        )
    _check.positive(where, "temperature", potential.temperature)


def check_prior(where: str, potential: Potential, params: optax.Params):
    """Require `prior_precision` to be a number or a prefix of the parameter tree."""
    try:
        _prior_weights(potential, params)
    except (ValueError, TypeError) as error:
        rule = "a number or a prefix of the parameter tree"
        _check.fail(where, "prior_precision", rule, potential.prior_precision, str(error))


def _prior_weights(potential: Potential, params: optax.Params) -> optax.Params:
    """Spread the prior precision over the leaves, divided by the temperature."""
    return jax.tree.map(
        lambda precision, part: jax.tree.map(lambda _: precision / potential.temperature, part),
        potential.prior_precision,
        params,
    )


def energy(potential: Potential, mean_loss: jax.Array, params: optax.Params) -> jax.Array:
    """Compute the energy U in nats.

    Args:
        potential: the posterior.
        mean_loss: scalar, mean over the batch.
        params: where the loss was evaluated.

    Returns:
        The energy, a scalar in nats.

    Example:
        >>> import jax.numpy as jnp
        >>> float(energy(Potential(num_data=10), jnp.float32(0.5), {"w": jnp.ones(4)}))
        7.0
    """
    origin = jax.tree.map(jnp.zeros_like, params)
    return energy_change(potential, mean_loss, prior_change(potential, origin, params))


def gradient(
    potential: Potential, mean_loss_gradient: optax.Updates, params: optax.Params
) -> optax.Updates:
    """Compute grad U from the gradient of the mean loss, in nats per unit of the parameter."""
    weight = potential.num_data / potential.temperature
    return jax.tree.map(
        lambda precision, grad, x: (weight * grad.astype(x.dtype) + precision * x).astype(x.dtype),
        _prior_weights(potential, params),
        mean_loss_gradient,
        params,
    )


def prior_change(
    potential: Potential, params: optax.Params, displacement: optax.Updates
) -> jax.Array:
    """Compute what a displacement from `params` adds to the prior's part of the energy, in nats.

    As the sum of precision * displacement * (params + displacement / 2): the difference of the two
    squared norms loses half a nat in float32 at 10^7 parameters.
    """
    return _tree.total(
        jax.tree.map(
            lambda weight, x, dx: weight * dx * (x + dx / 2),
            _prior_weights(potential, params),
            params,
            displacement,
        )
    )


def energy_change(
    potential: Potential, loss_change: jax.Array, prior_change: jax.Array
) -> jax.Array:
    """Compute the change of U in nats from that of the mean loss and that of the prior's part."""
    return potential.num_data / potential.temperature * loss_change + prior_change
