"""What the published code does and the paper does not say, for the comparison in `uci.py` alone.

Facts from a run of that code: its preconditioner averages the squares of the gradient of the log
density minus one, and the momentum is set to zero where the warm-up ends.
"""

from typing import Any
from unittest import mock

import jax
import optax

from optax_smile.stages import preconditioner

# A share of the newest gradient is lost with the mean that the published code forgets.
SHARE = 0.99


def as_shipped(
    sampler: optax.GradientTransformationExtraArgs, warmup_calls: int
) -> optax.GradientTransformationExtraArgs:
    """Wrap a sampler with `centered=False`, or without a preconditioner.

    Args:
        sampler: one of the SMILE family.
        warmup_calls: calls of `update` after which the chain comes to rest, once; >= 1.

    Returns:
        The transformation that the published code amounts to.
    """

    def observe(state: Any, gradient: Any, noise_decay: Any, as_usual=preconditioner.observe):
        shifted = jax.tree.map(lambda g: SHARE * (-g - 1), gradient)
        return as_usual(state, shifted, noise_decay)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any):
        moving = state.momentum.moving & (state.last_call.num_calls != warmup_calls)
        state = state._replace(momentum=state.momentum._replace(moving=moving))
        with mock.patch.object(preconditioner, "observe", observe):
            return sampler.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(sampler.init, update)
