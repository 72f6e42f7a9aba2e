"""The inner products of a call: one pass over the trees."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_smile import _tree

# And with at most this many nats, whose square float32 still holds.
LARGEST_ENERGY = 1e18


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


def measure(seen: Seen, received: optax.Updates | None) -> tuple[Sums, Any, jax.Array]:
    """Compute what a call needs to know of its trees.

    Args:
        seen: the trees.
        received: gradient as the loop passed it, or None if that is the one of the mean loss.

    Returns:
        The inner products, the sketch of the whitened gradient, and `_tree.fingerprint` of the
        gradient that was received.
    """

    def product(first: Any, second: Any) -> Any:
        return None if first is None else jax.tree.map(jnp.multiply, first, second)

    signs = seen.noise is not None and _tree.has_signs(seen.noise)
    terms: Any = Sums(
        direction_square=product(seen.direction, seen.direction),
        direction_dot_gradient=product(seen.direction, seen.gradient),
        gradient_square=product(seen.gradient, seen.gradient),
        params_square=product(seen.params, seen.params),
        loss_square=product(seen.loss_gradient, seen.loss_gradient),
        prior_change=jax.tree.map(jnp.negative, seen.prior_terms),
        deviation_square=product(seen.deviation, seen.deviation),
        noise_square=product(None if signs else seen.noise, seen.noise),
        noise_dot_direction=product(seen.noise, seen.direction),
        noise_dot_gradient=product(seen.noise, seen.gradient),
    )
    known = [tree is not None for tree in terms]
    marks = [_tree.signed(seen.loss_gradient if received is None else received)]
    if received is not None:
        marks.append(product(received, received))
    found, sketch = _tree.sums_and_sketch(
        [*(tree for tree in terms if tree is not None), *marks], seen.gradient
    )
    numbers, zero = iter(found), jnp.zeros((), _tree.dtype(seen.params))
    sums = Sums(*(next(numbers) if is_known else zero for is_known in known))
    if signs:
        sums = sums._replace(noise_square=jnp.full_like(zero, _tree.size(seen.noise)))
    along, *square = found[-len(marks) :]
    norm = jnp.sqrt(square[0] if square else sums.loss_square)
    return sums, sketch, jnp.stack([norm, along])
