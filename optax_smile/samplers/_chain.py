"""State of a chain."""

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
    """State of the dynamics, which each family of samplers adds to `ChainState`."""

    @property
    def like_params(self) -> optax.Params: ...

    @property
    def gradients_per_step(self) -> int: ...

    def stats(self) -> dict[str, jax.Array]: ...

    def last_accepted(self, params: T) -> T: ...


D = TypeVar("D", bound=DynamicsState)


class ChainState(NamedTuple, Generic[D]):
    """State of any sampler inside a call of `update`.

    Attributes:
        dynamics: state of the dynamics, a `LangevinState` or a `MicrocanonicalState`.
        guardrail, probe, last_update: see their classes.
        prior_centre: the parameters at the start if they are the prior's mean, else None.
        num_steps: number of steps begun, the argument of a step-size schedule, int32.
        key: key for the noise of the next call, raw key data, uint32; None without noise.
        has_lost_leaf: whether a gradient of the first call was None in a later one, bool.
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
        """A tree of the leaves that are sampled, with None for the others."""
        return self.dynamics.like_params

    @property
    def gradients_per_step(self) -> int:
        """See `state.SamplerState`."""
        return self.dynamics.gradients_per_step

    def stats(self) -> Stats:
        """See `state.SamplerState`."""
        number = self.last_update.num_gradients
        # The statistics of one chain.
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
