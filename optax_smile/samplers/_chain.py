"""The state of a chain, and what one call of `update` does around the dynamics of a sampler."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from optax_smile import _check, _tree, potential
from optax_smile._types import Options, Tree
from optax_smile.samplers import _leaves
from optax_smile.samplers._leaves import SampledState
from optax_smile.stages import probe, rejection
from optax_smile.state import STATE_FORMAT, LastUpdate, Stats, is_concrete, no_update, noise_id

# Rounding of an addition, in units in the last place: a compiler may round a product and its sum
# together in one program and apart in another.
ROUNDING = 4
# Share of the last displacement by which parameters may differ.
SMALLEST_SHARE = 1e-3
FOREIGN = "the parameters of the last call plus its updates, which the state tracks"


class Tracked(NamedTuple):
    """The parameters of a chain, for loops that call `update` without them.

    Attributes:
        tracked_params: the parameters after `optax.apply_updates`: only floating leaves, with None
            in the place of all others. Leaves without a gradient stay as `init` got them.
        last_length: Euclidean length of the last displacement, scalar.
        num_unseen: calls since the loop last passed its own parameters, int32.
    """

    tracked_params: optax.Params
    last_length: jax.Array
    num_unseen: jax.Array

    def differ(self, given: Tree, own: Tree) -> jax.Array:
        """Tell whether parameters of the loop differ from the tracked ones by more than rounding.

        Rounding errors of the calls in which they were not compared add up like a random walk.
        """
        off = jax.tree.map(jnp.subtract, given, own)
        eps = ROUNDING * float(jnp.finfo(_tree.dtype(own)).eps)
        rounding = eps * jnp.sqrt(1 + self.num_unseen) * jnp.sqrt(_tree.inner(own, own))
        most = SMALLEST_SHARE * self.last_length + rounding
        # Written so that NaN differs.
        return ~(jnp.sqrt(_tree.inner(off, off)) <= most)

    def advance(
        self, params: optax.Params, displacement: optax.Updates, is_seen: bool
    ) -> "Tracked":
        """Move parameters, those of the loop if `is_seen`, as `optax.apply_updates` does."""
        length = jnp.sqrt(_tree.inner(displacement, displacement))
        num_unseen = jnp.zeros_like(self.num_unseen) if is_seen else _tree.count(self.num_unseen)
        return Tracked(
            tracked_params=optax.apply_updates(params, displacement),
            last_length=length.astype(self.last_length.dtype),
            num_unseen=num_unseen,
        )


def _track(params: optax.Params) -> Tracked:
    """Copy the parameters: their buffers may be donated together with the state."""

    def copy(leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jnp.zeros_like(leaf)
        return jnp.array(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype), copy=True)

    length = jnp.zeros((), _tree.dtype(params))
    return Tracked(jax.tree.map(copy, params), length, jnp.zeros((), jnp.int32))


class ChainState(NamedTuple):
    """State of a sampler.

    Attributes:
        dynamics: how the chain moves, a `LangevinState` or a `MicrocanonicalState`.
        prior_mean: the parameters at the start, if the prior is around them; or None.
        num_steps: steps begun, the count that a step-size schedule gets, int32.
        key: for the noise of the next call, as raw numbers, uint32; None without noise.
        tracked: the parameters, with `track_params=True`; else None.
        state_format: `state.STATE_FORMAT` of the version that made the state, int32.
    """

    dynamics: Tree
    guardrail: rejection.GuardrailState
    probe: probe.ProbeState
    prior_mean: optax.Params | None
    num_steps: jax.Array
    key: jax.Array | None
    last_update: LastUpdate
    sampled: SampledState
    tracked: Tracked | None
    state_format: jax.Array

    @property
    def like_params(self) -> Tree:
        """A tree like the parameters that `init` got."""
        return self.dynamics.like_params

    @property
    def tracked_params(self) -> optax.Params | None:
        """The parameters, if the state tracks them."""
        return None if self.tracked is None else self.tracked.tracked_params

    @property
    def gradients_per_step(self) -> int:
        """Gradients, and calls of `update`, per step."""
        return self.dynamics.gradients_per_step

    def stats(self) -> Stats:
        """Scalars that describe the last call, see `optax_smile.stats`."""
        return Stats(
            num_rejected=self.guardrail.num_rejected,
            num_nonfinite=self.guardrail.num_nonfinite,
            num_altered=self.probe.num_altered,
            is_altered=self.probe.is_altered | self.sampled.is_inconsistent,
            num_parameters=self.sampled.num_parameters,
            noise_id=noise_id(self.key, self.last_update.num_gradients),
            **self.last_update.stats(),
            **self.dynamics.stats(),
        )

    def last_accepted(self, params: optax.Params) -> Tree:
        """Start of the open step, see `optax_smile.last_accepted`; other parameters are refused."""
        moves, own = self.sampled.has_gradient, self.tracked_params
        draw = self.dynamics.last_accepted(params, moves)
        if self.tracked is not None and params is not own:
            leaves = jax.tree.leaves(own)
            given = _tree.leaves_like(own, params) or leaves
            # The loop may change leaves without a gradient.
            given = [jnp.where(moves[i], x, leaves[i]) for i, x in enumerate(given)]
            differs = self.tracked.differ(given, leaves)
            if is_concrete(differs) and bool(differs):
                _check.fail("last_accepted", "params", FOREIGN, "other parameters")
        self.sampled.require_consistent("last_accepted")
        return draw

    def last_received(self) -> tuple[optax.Updates, jax.Array]:
        """See `state.SamplerState`."""
        return self.like_params, self.last_update.fingerprint


class Call(NamedTuple):
    """What one call receives; its trees have only the leaves that move, None for the others.

    Attributes:
        posterior: with the temperature and the prior's mean of the chain.
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
    """A sampler. The families implement `begin` and `move`.

    Attributes:
        name: of the sampler.
        posterior: that it samples.
        step_size: a schedule of the number of steps.
        seed: key of the noise; None without noise.
        track_params: whether the state holds the parameters.
        is_draw: whether the step with a count, 0 for the first, ends in a draw.
        chosen: arguments that the sampler chose, where the user gave None.
    """

    name: str
    posterior: potential.Potential
    step_size: optax.Schedule
    seed: jax.Array | None
    track_params: bool
    is_draw: Callable[[jax.Array], jax.Array] = lambda count: jnp.ones_like(count, bool)
    chosen: Options = field(default_factory=dict)

    def begin(self, params: optax.Params) -> Tree:
        """Return the state of the dynamics before the first call."""
        raise NotImplementedError

    def move(self, call: Call, state: ChainState) -> tuple[optax.Updates, ChainState]:
        """Return the displacement and the state after a call.

        In `state`, `tracked` and `prior_mean` are None. The caller restores them in the result, and
        updates `sampled`.
        """
        raise NotImplementedError

    def init(self, params: optax.Params) -> ChainState:
        """Return the state before the first call, of floating leaves only."""
        posterior = potential.begin(self.name, self.posterior, params)
        dtype, count = _tree.dtype(params), jnp.zeros((), jnp.int32)
        last_update = no_update(dtype, posterior.temperature)
        return ChainState(
            dynamics=self.begin(params),
            guardrail=rejection.init(dtype),
            probe=probe.init(params),
            prior_mean=potential.centre(posterior, params),
            num_steps=count,
            key=None if self.seed is None else jnp.copy(jax.random.key_data(self.seed)),
            last_update=last_update._replace(is_draw=self.is_draw(count - 1)),
            sampled=_leaves.begin(params),
            tracked=_track(params) if self.track_params else None,
            state_format=jnp.asarray(STATE_FORMAT, jnp.int32),
        )

    def update(
        self, updates: optax.Updates, state: ChainState, params: optax.Params | None, value: Tree
    ) -> tuple[optax.Updates, ChainState]:
        """One call, on trees of arrays: gradients and parameters have None for leaves at rest."""
        known = state.like_params
        expected = jax.eval_shape(self.init, known)
        if jax.tree.structure(state) != jax.tree.structure(expected):
            is_kind = isinstance(state.dynamics, type(expected.dynamics))
            got = "one of another sampler, or with other settings"
            got = got if is_kind else _check.show(state.dynamics)
            _check.fail(f"{self.name}.update", "state", state_of(self.name), got)
        moves, is_seen = _leaves.moving(updates, known), params is not None
        before, differs = state, jnp.zeros_like(state.sampled.is_inconsistent)
        if not all(moves):
            before = _leaves.narrow(state, jax.eval_shape(self.init, _leaves.only(known, updates)))
        own = before.tracked_params
        if before.tracked is not None and params is not None:
            params = jax.tree.map(lambda x, old: jnp.asarray(x, old.dtype), params, own)
            differs = before.tracked.differ(params, own)
        params = cast(optax.Params, own if params is None else params)
        updates = jax.tree.map(lambda g, x: g.astype(x.dtype), updates, params)
        value = None if value is None else jnp.asarray(value, _tree.dtype(known))
        posterior = potential.of_chain(self.posterior, params, before.prior_mean)
        passed = None if posterior.log_prior is None else updates
        updates, value = potential.with_log_prior(posterior, updates, value, params)
        call = Call(posterior, updates, passed, params, value)
        displacement, after = self.move(call, before._replace(tracked=None, prior_mean=None))
        if before.tracked is not None:
            after = after._replace(tracked=before.tracked.advance(params, displacement, is_seen))
        after = after if all(moves) else _leaves.widen(after, state)
        is_first = state.last_update.num_gradients == 0
        sampled = state.sampled.observe(moves, _tree.size(updates), is_first, differs)
        return displacement, after._replace(prior_mean=state.prior_mean, sampled=sampled)

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
