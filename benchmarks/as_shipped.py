"""What the published code does and the paper does not say, for the comparison in `uci.py` alone.

Facts from runs of that code: it averages the squares of the whitened-back gradient of the log
density minus one, from one gradient per step; its bounds of the noise scale are absolute; and the
momentum is set to zero where the warm-up ends.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import optax_smile

# Weight of the old value, also of the share of a gradient that the forgotten mean leaves.
DECAY = 0.99
# Of sigma, in nats per unit length, and of its square.
BOUNDS = (1e-2, 1e4)
SMALLEST_SQUARE = 1e-7
LARGEST_GRADIENT = 1e6


class ShippedState(NamedTuple):
    """The published averages: squares of the gradient of the log density minus one."""

    squares: Any

    def inverse_scale(self) -> Any:
        """Root mean square of sigma over sigma, which is within absolute bounds."""
        sigma = jax.tree.map(lambda v: jnp.clip(jnp.sqrt(v), *BOUNDS), self.squares)
        size = sum(leaf.size for leaf in jax.tree.leaves(sigma))
        rms = jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(sigma)) / size)
        return jax.tree.map(lambda x: rms / x, sigma)


class ShippedNoise(optax_smile.Preconditioner):
    """The published preconditioner: no mean, no correction of the start, absolute bounds."""

    def init(self, params):
        """Begin with averages of one."""
        return ShippedState(jax.tree.map(jnp.ones_like, params))

    def observe(self, state, gradient, worth, direction):
        """Average the shifted squares of the gradients that count."""
        del direction

        def leaf(square, g):
            shifted = DECAY * (-jnp.clip(g, -LARGEST_GRADIENT, LARGEST_GRADIENT) - 1)
            blended = DECAY * square + (1 - DECAY) * shifted**2
            return jnp.where(worth.counts, jnp.maximum(blended, SMALLEST_SQUARE), square)

        return ShippedState(jax.tree.map(leaf, state.squares, gradient))

    def stays(self, state, worth):
        """Return False: every gradient changes the scale."""
        return False


def as_shipped(
    name: str, step_size: float, warmup_calls: int, num_data: float
) -> optax.GradientTransformationExtraArgs:
    """Build what the published code amounts to.

    Args:
        name: `"smile_naive"` or `"psmile_naive"`.
        step_size: of the whole vector.
        warmup_calls: calls of `update` after which the chain comes to rest, once; >= 1.
        num_data: number of terms of the mean loss.

    Returns:
        The transformation.
    """
    is_scaled = name == "psmile_naive"
    sampler = optax_smile.compose(
        ShippedNoise() if is_scaled else optax_smile.Preconditioner(),
        num_data=num_data,
        step_size=step_size,
        integrator="minimal_norm",
        decoherence_length=None,
    )

    def update(updates: Any, state: Any, params: Any = None, **extra: Any):
        moving = state.momentum.moving & (state.last_update.num_gradients != warmup_calls)
        state = state._replace(momentum=state.momentum._replace(moving=moving))
        return sampler.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(sampler.init, update)
