"""What the published code does and the paper does not say, for the comparison in `uci.py` alone.

Facts from runs of that code: it averages the squares of the whitened-back gradient of the log
density minus one, from one gradient per step; its bounds of the noise scale are absolute; and the
momentum is set to zero where the warm-up ends.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_smile.potential import Potential
from optax_smile.samplers._microcanonical import compose
from optax_smile.stages.guardrail import guardrail
from optax_smile.stages.momentum import microcanonical
from optax_smile.stages.preconditioner import Preconditioner, identity, whiten

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


def shipped_noise() -> Preconditioner:
    """The published preconditioner: no mean, no correction of the start, absolute bounds."""

    def observe(state, gradient, worth, direction):
        del direction

        def leaf(square, g):
            shifted = DECAY * (-jnp.clip(g, -LARGEST_GRADIENT, LARGEST_GRADIENT) - 1)
            blended = DECAY * square + (1 - DECAY) * shifted**2
            return jnp.where(worth.counts, jnp.maximum(blended, SMALLEST_SQUARE), square)

        return ShippedState(jax.tree.map(leaf, state.squares, gradient))

    return Preconditioner(
        init=lambda params: ShippedState(jax.tree.map(jnp.ones_like, params)),
        whiten=whiten,
        deviation=lambda state, gradient: None,
        observe=observe,
        stays=lambda state, worth: False,
    )


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
    sampler = compose(
        f"as_shipped.{name}",
        Potential(num_data),
        preconditioner=shipped_noise() if name == "psmile_naive" else identity(),
        momentum=microcanonical(name, "minimal_norm"),
        guardrail=guardrail(),
        step_size=step_size,
    )

    def update(updates: Any, state: Any, params: Any = None, **extra: Any):
        moving = state.momentum.moving & (state.last_update.num_gradients != warmup_calls)
        state = state._replace(momentum=state.momentum._replace(moving=moving))
        return sampler.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(sampler.init, update)
