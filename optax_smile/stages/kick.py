"""One kick of the isokinetic momentum by a gradient."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Heading(NamedTuple):
    """The unit momentum by its old direction u, the descent direction e and the explicit noise z.

    Attributes:
        cosine: between the momentum and e.
        along_old: coefficient of the old unit direction.
        along_descent: coefficient of e.
        along_noise: coefficient of z, which is no unit vector.
        moving: whether there is a direction at all.
        gradient_norm: of the whitened gradient, nats per unit length.
        old_norm: norm of the tree that holds the old direction, which rounding keeps off 1.
    """

    cosine: jax.Array
    along_old: jax.Array
    along_descent: jax.Array
    along_noise: jax.Array
    moving: jax.Array
    gradient_norm: jax.Array
    old_norm: jax.Array


def heading(
    moving: jax.Array,
    direction_square: jax.Array,
    direction_dot_gradient: jax.Array,
    gradient_square: jax.Array,
) -> Heading:
    """Describe u, if the chain is moving, and e = -g / |g| by the inner products of their trees."""
    old_norm, gradient_norm = jnp.sqrt(direction_square), jnp.sqrt(gradient_square)
    product = old_norm * gradient_norm
    cosine = -direction_dot_gradient / jnp.where(product > 0, product, 1)
    return Heading(
        cosine=jnp.where(moving, jnp.clip(cosine, -1, 1), 0),
        along_old=jnp.where(moving, jnp.ones_like(cosine), 0),
        along_descent=jnp.zeros_like(cosine),
        along_noise=jnp.zeros_like(cosine),
        moving=moving,
        gradient_norm=gradient_norm,
        old_norm=old_norm,
    )


def log_growth(cosine: jax.Array, delta: jax.Array) -> jax.Array:
    """Compute log(cosh delta + cosine sinh delta) without loss of digits for small delta."""
    small = jnp.minimum(delta, 1)
    near = jnp.log1p(2 * jnp.sinh(small / 2) ** 2 + cosine * jnp.sinh(small))
    far = jnp.logaddexp(jnp.log((1 + cosine) / 2) + delta, jnp.log((1 - cosine) / 2) - delta)
    return jnp.where(delta < 1, near, far)


def kick(towards: Heading, length: jax.Array, num_parameters: int) -> tuple[Heading, jax.Array]:
    """Turn the momentum towards e for a time `length`.

    u <- (u + (sinh D + p (cosh D - 1)) e) / (cosh D + p sinh D), p = e . u,
    D = length |g| / (d - 1); the kinetic energy grows by (d - 1) log(cosh D + p sinh D).
    Written with z = exp(-D), which cannot overflow. u = 0 becomes e, and p = -1 changes nothing
    but the energy (Robnik et al. 2023, Microcanonical Hamiltonian Monte Carlo; with the sign of e
    that the published code has, not the one of Sommer et al. 2026, appendix on the integrator).

    Returns:
        The new heading and the kinetic energy gained, in nats.
    """
    delta = length * towards.gradient_norm / (num_parameters - 1)
    p, z = towards.cosine, jnp.exp(-delta)
    opposed = p <= -1
    denominator = jnp.where(opposed, 1, (1 + p) + (1 - p) * z * z)
    old = jnp.where(opposed, 1, 2 * z / denominator)
    descent = (-jnp.expm1(-2 * delta) + p * jnp.expm1(-delta) ** 2) / denominator
    descent = jnp.where(opposed, 0, descent)
    starts = ~towards.moving & (delta > 0)
    kicked = towards._replace(
        cosine=jnp.where(starts, 1, jnp.clip(old * p + descent, -1, 1)),
        along_old=jnp.where(starts, 0, old * towards.along_old),
        along_descent=jnp.where(starts, 1, old * towards.along_descent + descent),
        along_noise=jnp.where(starts, 0, old * towards.along_noise),
        moving=towards.moving | starts,
    )
    return kicked, (num_parameters - 1) * log_growth(p, delta)
