"""How fast the gradients turn the momentum: what sets a length for every step and every network."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# The average looks back over this share of all calls, so that it settles as a chain goes on.
SHARE = 0.25
# Before so many gradients each enters as it is; later ones with at most `LARGEST_RATIO` times the
# average, so that one jump cannot stop the chain.
SETTLED_AFTER = 10
LARGEST_RATIO = 3.0


class TurnAverage(NamedTuple):
    """Average of the rate |g| / (d - 1) at which the whitened gradients g turn the momentum.

    Attributes:
        mean_turn_rate: radians per unit length, scalar; 0 before the first gradient.
        num_turns: gradients that entered, int32.
    """

    mean_turn_rate: jax.Array
    num_turns: jax.Array


def init(dtype: jnp.dtype) -> TurnAverage:
    """Start with nothing seen."""
    return TurnAverage(jnp.zeros((), dtype), jnp.zeros((), jnp.int32))


def observe(average: TurnAverage, turn_rate: jax.Array, kept: jax.Array) -> TurnAverage:
    """Take the rate of one gradient into the average, where the call is kept.

    mean <- mean + w (rate - mean) with w = 1 / (SHARE t), at most 1, after t gradients.
    """
    mean, count = average.mean_turn_rate, average.num_turns + kept
    bounded = jnp.minimum(turn_rate, LARGEST_RATIO * mean)
    rate = jnp.where(average.num_turns < SETTLED_AFTER, turn_rate, bounded)
    weight = jnp.minimum(1 / (SHARE * jnp.maximum(count, 1)), 1)
    blended = (mean + weight * (rate - mean)).astype(mean.dtype)
    return TurnAverage(jnp.where(kept, blended, mean), count)
