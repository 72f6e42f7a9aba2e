"""The state of a chain, and what one call of `update` does around the dynamics of a sampler."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _check, _packed, _tree, potential
from optax_smile._packed import Count, Flag
from optax_smile._types import Options, Tree
from optax_smile.samplers import _leaves
from optax_smile.stages import probe, rejection
from optax_smile.state import STATE_FORMAT, LastUpdate, Stats, is_concrete, no_update, noise_id


class ChainState(NamedTuple):
    """What a sampler remembers of its calls.

    Attributes:
        dynamics: how the chain moves, a `LangevinState` or a `MicrocanonicalState`.
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

    @property
    def like_params(self) -> Tree:
        """A tree like the parameters that `init` got."""
        return self.dynamics.like_params

    def stats(self) -> Stats:
        """Scalars that describe the last call, see `optax_smile.stats`."""
        number = self.last_update.num_gradients
        # Those of one chain.
        sizes = [math.prod(x.shape[number.ndim :]) for x in jax.tree.leaves(self.like_params)]
        array = jnp if isinstance(number, jax.Array) else np
        size: Tree = array.full_like(number, min(sum(sizes), _check.LARGEST_WHOLE))
        return Stats(
            num_rejected=self.guardrail.num_rejected,
            num_nonfinite=self.guardrail.num_nonfinite,
            num_altered=self.probe.num_altered,
            is_altered=self.probe.is_altered | self.has_lost_leaf,
            num_parameters=size,
            noise_id=noise_id(self.key, number),
            **self.last_update.stats(),
            **self.dynamics.stats(),
        )

    def last_accepted(self, params: optax.Params) -> Tree:
        """Start of the open step, see `optax_smile.last_accepted`."""
        if is_concrete(self.has_lost_leaf) and self.has_lost_leaf:
            rule = "a state whose calls of `update` all had gradients for the same leaves"
            got = "one after a call with gradients for fewer leaves"
            _check.fail("last_accepted", "state", rule, got, "Start again with `init`.")
        return self.dynamics.last_accepted(params)


class PackedState(NamedTuple):
    """State of a sampler between calls, see `_packed`.

    Attributes:
        arrays, reals, counts: the fields of a packed `ChainState`.
        state_format: `state.STATE_FORMAT` of the version that made the state, int32.
    """

    arrays: ChainState
    reals: jax.Array
    counts: jax.Array
    state_format: jax.Array

    @classmethod
    def pack(cls, state: ChainState) -> PackedState:
        """Return a state without its scalars."""
        return cls(*_packed.pack(state), jnp.asarray(STATE_FORMAT, jnp.int32))

    def unpack(self) -> ChainState:
        """Return the state with its scalars."""
        return _packed.unpack(_packed.Packed(self.arrays, self.reals, self.counts))

    @property
    def key(self) -> jax.Array | None:
        """Key for the noise of the next call, as raw numbers."""
        return self.arrays.key

    @property
    def like_params(self) -> Tree:
        """A tree like the parameters that `init` got."""
        return self.arrays.like_params

    @property
    def gradients_per_step(self) -> int:
        """See `state.SamplerState`."""
        return self.arrays.dynamics.gradients_per_step

    def stats(self) -> Stats:
        """See `state.SamplerState`."""
        return self.unpack().stats()

    def last_accepted(self, params: optax.Params) -> Tree:
        """See `state.SamplerState`."""
        return self.unpack().last_accepted(params)

    def last_received(self) -> tuple[optax.Updates, jax.Array]:
        """See `state.SamplerState`."""
        return self.like_params, self.arrays.last_update.fingerprint


def _shapes(state: PackedState) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a state by path. Those of a sketch depend on the devices."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    shapes = {jax.tree_util.keystr(path): jnp.shape(leaf) for path, leaf in leaves}
    return {path: shape for path, shape in shapes.items() if ".sketch" not in path}


class Call(NamedTuple):
    """What one call receives; its trees have only the leaves that move, None for the others.

    Attributes:
        posterior: with the prior's mean of the chain.
        updates, value: gradient and mean loss, with `log_prior` if there is one.
        passed: gradient as the loop passed it, if that is not `updates`.
    """

    posterior: potential.Potential
    updates: optax.Updates
    passed: optax.Updates | None
    params: optax.Params
    value: jax.Array | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Dynamics:
    """A sampler. The families implement `begin` and `process`.

    Attributes:
        name: of the sampler.
        posterior: that it samples.
        step_size: a schedule of the number of steps.
        seed: key of the noise; None without noise.
        is_draw: whether the step with a count, 0 for the first, ends in a draw.
        chosen: arguments that the sampler chose, where the user gave None.
    """

    name: str
    posterior: potential.Potential
    step_size: optax.Schedule
    seed: jax.Array | None
    is_draw: Callable[[jax.Array], jax.Array] = lambda count: jnp.ones_like(count, bool)
    chosen: Options = field(default_factory=dict)

    def begin(self, params: optax.Params) -> Tree:
        """Return the state of the dynamics before the first call."""
        raise NotImplementedError

    def process(self, call: Call, state: ChainState) -> tuple[optax.Updates, ChainState]:
        """Return the displacement and the state after a call.

        In `state`, `prior_mean` is None. The caller restores it in the result.
        """
        raise NotImplementedError

    def init(self, params: optax.Params) -> PackedState:
        """Return the state before the first call, of floating leaves only."""
        return PackedState.pack(self._init(params))

    def _init(self, params: optax.Params) -> ChainState:
        potential.check_prior(self.name, self.posterior, params)
        dtype, count = _tree.dtype(params), jnp.zeros((), jnp.int32)
        last_update = no_update(dtype, self.posterior.temperature)
        return ChainState(
            dynamics=self.begin(params),
            guardrail=rejection.init(dtype),
            probe=probe.init(params),
            prior_mean=potential.centre(self.posterior, params),
            num_steps=count,
            key=None if self.seed is None else jnp.copy(jax.random.key_data(self.seed)),
            last_update=last_update._replace(is_draw=self.is_draw(count - 1)),
            has_lost_leaf=jnp.zeros((), bool),
        )

    def update(
        self, updates: optax.Updates, packed: PackedState, params: optax.Params, value: Tree
    ) -> tuple[optax.Updates, PackedState]:
        """One call, on trees of arrays: gradients and parameters have None for leaves at rest."""
        known = packed.like_params
        if _shapes(packed) != _shapes(jax.eval_shape(self.init, known)):
            got = "one of another sampler, or with other settings"
            _check.fail(f"{self.name}.update", "state", state_of(self.name), got)
        state = packed.unpack()
        if jax.tree.structure(updates) != jax.tree.structure(known):
            lost = state.has_lost_leaf | (state.last_update.num_gradients > 0)
            state = _leaves.take_over(state, self._init(params))._replace(has_lost_leaf=lost)
        updates = jax.tree.map(lambda g, x: g.astype(x.dtype), updates, params)
        value = None if value is None else jnp.asarray(value, _tree.dtype(known))
        posterior = self.posterior
        if state.prior_mean is not None:
            posterior = posterior._replace(prior_mean=state.prior_mean)
        passed = None if posterior.log_prior is None else updates
        updates, value = potential.with_log_prior(posterior, updates, value, params)
        call = Call(posterior, updates, passed, params, value)
        displacement, after = self.process(call, state._replace(prior_mean=None))
        return displacement, PackedState.pack(after._replace(prior_mean=state.prior_mean))

    def split(self, data: jax.Array | None) -> tuple[jax.Array | None, Tree]:
        """Split the key of a state: the next one, and a typed key for the noise of this call."""
        if data is None or self.seed is None:
            return None, None
        expected = jax.eval_shape(jax.random.key_data, self.seed)
        if jnp.shape(data) != expected.shape or jnp.result_type(data) != expected.dtype:
            rule = f"the state of {self.name}, whose key is {expected.dtype}{list(expected.shape)}"
            got = f"a key of {jnp.result_type(data)}{list(jnp.shape(data))}"
            _check.fail(f"{self.name}.update", "state", rule, got)
        typed = jax.random.wrap_key_data(data, impl=jax.random.key_impl(self.seed))
        key, noise_key = jax.random.split(typed)
        return jax.random.key_data(key), noise_key


def state_of(name: str) -> str:
    """The rule for the state that `update` takes."""
    return f"what `init` or `update` of {name} returned"
