"""What a chain remembers of its calls."""

from __future__ import annotations

import math
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _check
from optax_smile._types import T
from optax_smile.stages import probe, rejection
from optax_smile.state import LastUpdate, Stats, is_concrete, noise_id


class DynamicsState(Protocol):
    """How a chain moves: what a family of samplers adds to `ChainState`."""

    @property
    def like_params(self) -> optax.Params: ...

    @property
    def gradients_per_step(self) -> int: ...

    def stats(self) -> dict[str, jax.Array]: ...

    def last_accepted(self, params: T) -> T: ...


D = TypeVar("D", bound=DynamicsState)


class ChainState(NamedTuple, Generic[D]):
    """What a sampler remembers of its calls.

    Attributes:
        dynamics: how the chain moves, a `LangevinState` or a `MicrocanonicalState`.
        guardrail, probe, last_update: see their classes.
        prior_centre: the parameters at the start, if the prior is around them; or None.
        num_steps: steps begun, the count that a step-size schedule gets, int32.
        key: for the noise of the next call, as raw numbers, uint32; None without noise.
        has_lost_leaf: whether the gradient of a leaf was None in a later call than the first, bool.
        state_format: `state.STATE_FORMAT` of the version that made the state, int32.
    """

    dynamics: D
    guardrail: rejection.GuardrailState
    probe: probe.ProbeState
    prior_centre: optax.Params | None
    num_steps: jax.Array
    key: jax.Array | None
    last_update: LastUpdate
    has_lost_leaf: jax.Array
    state_format: jax.Array

    @property
    def like_params(self) -> optax.Params:
        """A tree like the leaves that move, with None for the others."""
        return self.dynamics.like_params

    @property
    def gradients_per_step(self) -> int:
        """See `state.SamplerState`."""
        return self.dynamics.gradients_per_step

    def stats(self) -> Stats:
        """See `state.SamplerState`."""
        number = self.last_update.num_gradients
        # Those of one chain.
        sizes = [math.prod(x.shape[number.ndim :]) for x in jax.tree.leaves(self.like_params)]
        array = jnp if isinstance(number, jax.Array) else np
        size: Any = array.full_like(number, min(sum(sizes), _check.LARGEST_WHOLE))
        return Stats.of(
            num_rejected=self.guardrail.num_rejected,
            num_nonfinite=self.guardrail.num_nonfinite,
            num_altered=self.probe.num_altered,
            is_altered=self.probe.is_altered | self.has_lost_leaf,
            num_parameters=size,
            noise_id=noise_id(self.key, number),
            **self.last_update.stats(),
            **self.dynamics.stats(),
        )

    def last_accepted(self, params: T) -> T:
        """See `state.SamplerState`."""
        if is_concrete(self.has_lost_leaf) and self.has_lost_leaf:
            rule = "a state whose calls of `update` all had gradients for the same leaves"
            got = "one after a call with gradients for fewer leaves"
            _check.fail("state", rule, got, "Start again with `init`.")
        return self.dynamics.last_accepted(params)

    def last_received(self) -> tuple[optax.Updates, jax.Array]:
        """See `state.SamplerState`."""
        return self.like_params, self.last_update.fingerprint
