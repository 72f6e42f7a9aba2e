"""The state of a chain: what it remembers inside a call, and its few arrays between calls."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _check, _packed
from optax_smile._packed import Count, Flag
from optax_smile._types import Tree
from optax_smile.stages import probe, rejection
from optax_smile.state import STATE_FORMAT, LastUpdate, Stats, is_concrete, noise_id


class ChainState(NamedTuple):
    """What a sampler remembers of its calls.

    Attributes:
        dynamics: how the chain moves, a `LangevinState` or a `MicrocanonicalState`.
        guardrail, probe, last_update: see their classes.
        prior_mean: the parameters at the start, if the prior is around them; or None.
        num_steps: steps begun, the count that a step-size schedule gets, int32.
        key: for the noise of the next call, as raw numbers, uint32; None without noise.
        has_lost_leaf: whether the gradient of a leaf was None in a later call than the first, bool.
    """

    dynamics: Tree
    guardrail: rejection.GuardrailState
    probe: probe.ProbeState
    prior_mean: optax.Params | None
    num_steps: Count
    key: jax.Array | None
    last_update: LastUpdate
    has_lost_leaf: Flag


class PackedState(NamedTuple):
    """State of a sampler between calls, see `_packed`.

    Attributes:
        arrays, reals, counts, flags: what `_packed.pack` makes of a `ChainState`.
        state_format: `state.STATE_FORMAT` of the version that made the state, int32.
    """

    arrays: ChainState
    reals: jax.Array
    counts: jax.Array
    flags: jax.Array
    state_format: jax.Array

    @classmethod
    def pack(cls, state: ChainState) -> PackedState:
        """Return a state without its scalars."""
        return cls(*_packed.pack(state), jnp.asarray(STATE_FORMAT, jnp.int32))

    def unpack(self) -> ChainState:
        """Return the state with its scalars."""
        return _packed.unpack(self.arrays, self.reals, self.counts, self.flags)

    @property
    def key(self) -> jax.Array | None:
        """Key for the noise of the next call, as raw numbers."""
        return self.arrays.key

    @property
    def like_params(self) -> Tree:
        """A tree like the leaves that move, with None for the others."""
        return self.arrays.dynamics.like_params

    @property
    def gradients_per_step(self) -> int:
        """See `state.SamplerState`."""
        return self.arrays.dynamics.gradients_per_step

    def stats(self) -> Stats:
        """See `state.SamplerState`."""
        state = self.unpack()
        number = state.last_update.num_gradients
        # Those of one chain.
        sizes = [math.prod(x.shape[number.ndim :]) for x in jax.tree.leaves(self.like_params)]
        array = jnp if isinstance(number, jax.Array) else np
        size: Tree = array.full_like(number, min(sum(sizes), _check.LARGEST_WHOLE))
        return Stats(
            num_rejected=state.guardrail.num_rejected,
            num_nonfinite=state.guardrail.num_nonfinite,
            num_altered=state.probe.num_altered,
            is_altered=state.probe.is_altered | state.has_lost_leaf,
            num_parameters=size,
            noise_id=noise_id(self.key, number),
            **state.last_update.stats(),
            **state.dynamics.stats(),
        )

    def last_accepted(self, params: optax.Params) -> Tree:
        """See `state.SamplerState`."""
        state = self.unpack()
        if is_concrete(state.has_lost_leaf) and state.has_lost_leaf:
            rule = "a state whose calls of `update` all had gradients for the same leaves"
            got = "one after a call with gradients for fewer leaves"
            _check.fail("last_accepted", "state", rule, got, "Start again with `init`.")
        return state.dynamics.last_accepted(params)

    def last_received(self) -> tuple[optax.Updates, jax.Array]:
        """See `state.SamplerState`."""
        return self.like_params, self.arrays.last_update.fingerprint
