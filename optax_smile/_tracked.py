"""A wrapper of a sampler whose state holds the parameters, for loops that do not pass them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_smile import _check, _tree

# Rounding errors of a long run add up to less than this fraction of the parameters' norm.
ROUNDING = 1e-3


class TrackedState(NamedTuple):
    """State of `tracked`: parameters after `optax.apply_updates`, and the state of the sampler."""

    tracked_params: optax.Params
    sampler_state: optax.OptState


@_check.arguments(sampler=_check.TRANSFORMATION)
def tracked(sampler: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Keep the parameters in the state of a sampler, for loops that call `update` without them.

    `update(grads, state)` adds its updates to the parameters in the state, as
    `optax.apply_updates` does. If the loop passes parameters, the updates are added to these.

    A loop that never passes parameters must apply the updates unchanged. If it scales or clips
    them, the draws are wrong and no check detects it. A loop that passes parameters is checked as
    that of any sampler, see `is_altered` of `Stats`.

    Args:
        sampler: sampler, alone or last in an `optax.chain`. For a loop that also hides the state
            use `recorded(tracked(sampler), ...)`.

    Returns:
        An Optax transformation. Its state has `tracked_params`, the floating-point arrays of the
        parameters, with None in the place of all other leaves; arrays without a gradient stay as
        `init` got them. `last_accepted(state)` needs no `params`.

    Raises:
        ArgumentError (a ValueError): `sampler` is not an Optax transformation.

    Cost: one array of the size of the parameters.

    Example:
        >>> import jax.numpy as jnp, optax_smile
        >>> tx = optax_smile.tracked(optax_smile.sgld(1e-3, num_data=1, key=0))
        >>> state = tx.init(jnp.ones(2))
        >>> for _ in range(3):
        ...     updates, state = tx.update(state.tracked_params, state)
        >>> optax_smile.last_accepted(state).shape
        (2,)
    """
    inner = optax.with_extra_args_support(sampler)

    def init(params: optax.Params) -> TrackedState:
        state = inner.init(params)
        # A copy: the buffers of the loop may be donated.
        own = jax.tree.map(
            lambda x: jnp.array(x, copy=True) if _tree.is_floating(x) else None, params
        )
        return TrackedState(own, state)

    def update(updates, state, params=None, **extra) -> tuple[optax.Updates, TrackedState]:
        if not isinstance(state, TrackedState):
            rule = "what `init` or `update` of the tracked sampler returned"
            with _check.called("tracked.update"):
                _check.fail("state", rule, _check.show(state))
        own = state.tracked_params
        params = own if params is None else params
        updates, after = inner.update(updates, state.sampler_state, params, **extra)

        def leaf(kept, x, move):
            return kept if kept is None or move is None else optax.apply_updates(x, move)

        own = jax.tree.map(leaf, own, params, updates, is_leaf=lambda x: x is None)
        return updates, TrackedState(own, after)

    return optax.GradientTransformationExtraArgs(init, update)


def params_of(state: object) -> optax.Params | None:
    """Return the tracked parameters inside a larger state; None if there are none."""

    def is_tracked(node: object) -> bool:
        return isinstance(node, TrackedState)

    nodes = jax.tree.leaves(state, is_leaf=is_tracked)
    return next((node.tracked_params for node in nodes if is_tracked(node)), None)


@jax.jit
def are_alike(given: list[jax.Array], own: list[jax.Array]) -> jax.Array:
    """Whether the parameters of a loop equal the tracked ones up to rounding."""
    off = optax.tree.sub(given, own)
    return optax.tree.norm(off) <= ROUNDING * optax.tree.norm(own)
