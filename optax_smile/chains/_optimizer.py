"""An Optax optimizer in place of a sampler: its iterates are the draws."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _check, _on_host, _settings, _table, _tree
from optax_smile._warn import warn
from optax_smile.state import STATE_FORMAT, Stats, samplers


class OptimizerState(NamedTuple):
    """State of an optimizer, with the interface of a sampler's state, see `state.py`."""

    optimizer: optax.OptState  # Its own state.
    accepted: jax.Array  # Whether the last step was made, since its parameters were finite.
    num_nonfinite: jax.Array  # Calls with a non-finite gradient, loss or iterate, int32.
    num_gradients: jax.Array  # Calls so far, int32.
    state_format: jax.Array  # See `state.STATE_FORMAT`.
    gradients_per_step = 1

    def stats(self) -> Stats:
        """Return the statistics of an optimizer; NaN for step size and energies."""
        own = {"accepted": self.accepted, "num_nonfinite": self.num_nonfinite}
        return Stats.of(self.num_gradients, energy_level=jnp.ones_like(self.num_gradients), **own)

    def last_accepted(self, params: optax.Params) -> Any:
        """Return the iterate itself."""
        return params

    def last_received(self) -> None:
        """Return None: an optimizer may change its gradients."""


def as_sampler(
    transformation: optax.GradientTransformation, params: optax.Params
) -> optax.GradientTransformationExtraArgs:
    """Convert an optimizer to a sampler; its state must not contain a sampler already.

    Steps to non-finite parameters are skipped.
    """
    optimizer = optax.with_extra_args_support(transformation)
    like = _on_host.shapes_of_one(jax.eval_shape(lambda x: x, params))
    if _settings.of(transformation, like) or samplers(jax.eval_shape(transformation.init, like)):
        return optimizer

    def init(params: optax.Params) -> OptimizerState:
        return OptimizerState(
            optimizer=optimizer.init(params),
            accepted=jnp.ones((), bool),
            num_nonfinite=jnp.zeros((), jnp.int32),
            num_gradients=jnp.zeros((), jnp.int32),
            state_format=jnp.asarray(STATE_FORMAT, jnp.int32),
        )

    def update(updates, state, params: Any = None, **given):
        given["grad"], reject = updates, given.pop("reject", False)
        moves, inner = optimizer.update(updates, state.optimizer, params, **given)
        is_finite = _tree.all_finite(optax.apply_updates(params, moves))
        is_sound = is_finite & _tree.all_finite((updates, given.get("value")))
        accepted = is_finite & ~jnp.asarray(reject)
        still = jax.tree.map(jnp.zeros_like, moves)
        return optax.tree.where(accepted, moves, still), state._replace(
            optimizer=optax.tree.where(accepted, inner, state.optimizer),
            accepted=accepted,
            num_nonfinite=_tree.count(state.num_nonfinite, ~is_sound),
            num_gradients=_tree.count(state.num_gradients),
        )

    described: optax.TransformInitFn = _settings.reporting(init, _settings.OPTIMIZER)
    return optax.GradientTransformationExtraArgs(described, update)


def warn_of_nonfinite(number: np.ndarray):
    """Warn of chains that had non-finite numbers in `number` `[chain]` steps."""
    if chains := np.flatnonzero(number).tolist():
        name = _check.function_name()
        steps = f"{_table.counted(int(np.sum(number)), 'step')} of the chains {chains}"
        advice = "Steps to non-finite iterates were skipped. Try a smaller learning rate."
        warn(f"`{name}`: {steps} had a non-finite gradient, loss or iterate. {advice}")
