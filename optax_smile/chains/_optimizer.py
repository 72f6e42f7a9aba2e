"""An Optax optimizer in the place of a sampler: its iterates are the draws."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _settings, _table, _tree
from optax_smile.chains import _loop
from optax_smile.state import STATE_FORMAT, Stats, number

ANNOUNCEMENT = (
    "`sample`: `sampler` is an optimizer. Its iterates are checkpoints, not posterior draws."
)


class OptimizerState(NamedTuple):
    """State of an optimizer that answers what the state of a sampler does, see `state.py`.

    Attributes:
        optimizer: its own state.
        accepted: whether the last step led to finite parameters, and was taken.
        num_nonfinite: calls with a gradient, a loss or an iterate that is not finite, int32.
        num_gradients: calls so far, int32.
        state_format: see `state.STATE_FORMAT`.
    """

    optimizer: Any
    accepted: jax.Array
    num_nonfinite: jax.Array
    num_gradients: jax.Array
    state_format: jax.Array

    @property
    def gradients_per_step(self) -> int:
        """One."""
        return 1

    def stats(self) -> Stats:
        """What an optimizer can tell; NaN for step size and energies."""
        unknown = jnp.full(self.num_gradients.shape, jnp.nan, jnp.float32)
        none, no = jnp.zeros_like(self.num_gradients), jnp.zeros_like(self.accepted)
        return Stats(
            step_size=unknown,
            energy_change=unknown,
            energy_mean=unknown,
            energy_std=unknown,
            energy_level=jnp.ones_like(none),
            accepted=self.accepted,
            step_end=~no,
            is_draw=~no,
            num_rejected=none,
            num_nonfinite=self.num_nonfinite,
            num_outlying=none,
            num_gradients=self.num_gradients,
            temperature=unknown,
            change_share=unknown,
            descent=unknown,
            fall=unknown,
            on_its_way=no,
            below_resolution=no,
            num_altered=none,
            is_altered=no,
            num_parameters=none,
            noise_id=none,
        )

    def last_accepted(self, params: optax.Params) -> optax.Params:
        """Give the iterate itself."""
        return params

    def last_gradient(self) -> None:
        """Nothing is asked of what an optimizer does with a gradient."""


def is_optimizer(transformation: optax.GradientTransformation, params: optax.Params) -> bool:
    """Whether a transformation contains no sampler.

    A sampler shows in the state, and tells its settings where a wrapper hides its state.

    Args:
        transformation: any of Optax.
        params: start of the chains, arrays `[chain, ...]`.
    """
    like = _loop.one_of(jax.eval_shape(lambda x: x, params))
    if _settings.of(transformation, like) is not None:
        return False
    return number(jax.eval_shape(transformation.init, like)) == 0


def as_sampler(
    optimizer: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Let chains run an optimizer as they run a sampler.

    A step to parameters that are not finite is left out, as by `optax.apply_if_finite`: parameters
    and state stay as they are.
    """

    def init(params: Any) -> OptimizerState:
        return OptimizerState(
            optimizer=optimizer.init(params),
            accepted=jnp.ones((), bool),
            num_nonfinite=jnp.zeros((), jnp.int32),
            num_gradients=jnp.zeros((), jnp.int32),
            state_format=jnp.asarray(STATE_FORMAT, jnp.int32),
        )

    def update(updates: Any, state: Any, params: Any = None, **given: Any) -> Any:
        given["grad"] = updates
        moves, inner = optimizer.update(updates, state.optimizer, params, **given)
        accepted = _is_finite(optax.apply_updates(params, moves))
        is_sound = accepted & _is_finite((updates, given.get("value")))
        still = jax.tree.map(jnp.zeros_like, moves)
        return _tree.where(accepted, moves, still), OptimizerState(
            optimizer=_tree.where(accepted, inner, state.optimizer),
            accepted=accepted,
            num_nonfinite=_tree.count(state.num_nonfinite, ~is_sound),
            num_gradients=_tree.count(state.num_gradients),
            state_format=state.state_format,
        )

    told = _settings.telling(init, lambda params: _settings.OPTIMIZER)
    return optax.GradientTransformationExtraArgs(told, update)


def _is_finite(tree: Any) -> jax.Array:
    """Whether all numbers of a tree are finite."""
    found = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
    return jnp.all(jnp.stack(found))


def nonfinite_warner() -> Callable[[int, Mapping[str, np.ndarray]], None]:
    """Make a function of step and stats that warns once, of chains that are not finite."""
    has_warned = False

    def warn(step: int, stats: Mapping[str, np.ndarray]):
        nonlocal has_warned
        chains = np.flatnonzero(stats["num_nonfinite"]).tolist()
        if has_warned or not chains:
            return
        has_warned = True
        steps = _table.counted(int(np.sum(stats["num_nonfinite"])), "step")
        message = (
            f"`sample`: by step {step}, {steps} of the chains {chains} met a gradient, a loss"
            " or an iterate that is not finite. A step to such an iterate is left out: the chain"
            " stays where it was. The run goes on; see `num_nonfinite` in its trace. Try a smaller"
            " learning rate."
        )
        warnings.warn(message, stacklevel=7)

    return warn
