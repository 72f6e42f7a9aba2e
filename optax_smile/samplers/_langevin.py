"""The driver of SGLD, SGHMC and their relatives: one gradient in, one displacement out.

A sampler of this family is a `Rule` for the displacement. Everything else is here: the energy, the
step size, the random keys, and the rejection of steps that end in a non-finite number.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_smile import _check, _tree, potential
from optax_smile._types import StepSize, Tree
from optax_smile.samplers import _call, _leaves
from optax_smile.samplers._leaves import SampledState
from optax_smile.stages import evidence, probe, rejection
from optax_smile.state import STATE_FORMAT, LastUpdate, Stats, no_update


class Move(NamedTuple):
    """What a rule computes its displacement from.

    Attributes:
        gradient: grad U, nats per unit of the parameter.
        updates: gradient of the mean loss as the loop passed it.
        displacement: of the step that ends here; zero at the start and after a rejected step.
        step_size: of the step that begins, scalar.
        step_ratio: `step_size` over that of the step that ends here, scalar; 0 if that was 0.
        num_steps: steps begun before, int32.
        noise: standard normal, a tree like the parameters.
    """

    gradient: optax.Updates
    updates: optax.Updates
    displacement: optax.Updates
    step_size: jax.Array
    step_ratio: jax.Array
    num_steps: jax.Array
    noise: optax.Updates


class Rule(NamedTuple):
    """A sampler: memory from parameters, displacement and memory from a `Move`, both pure.

    Attributes:
        move: `move(memory, move)`, the displacement and the new memory.
        init: `init(params)`, the memory before the first call.
        is_draw: whether the step with this count, 0 for the first, ends in a draw from the
            posterior.
    """

    move: Callable[[Tree, Move], tuple[optax.Updates, Tree]]
    init: Callable[[Tree], Tree] = lambda params: None
    is_draw: Callable[[jax.Array], jax.Array] = lambda count: jnp.ones_like(count, bool)


class LangevinState(NamedTuple):
    """State of a sampler with a `Rule`.

    Attributes:
        memory: of the rule, such as averages over gradients.
        displacement: of the open step, a tree like the parameters: what the last call added, and
            for SGHMC the velocity. Zero before the first call and after a rejected step.
        step_length: step size of the open step, or of the rejected one.
        step_size_factor: factor of the user's step size, scalar.
        guardrail: counters of rejected steps.
        probe: whether the parameters arrive where they were sent.
        prior_mean: the parameters at the start, if the prior is around them; or None.
        num_steps: steps begun, the count that a step-size schedule gets, int32.
        key: for the noise of the next call, as raw numbers, uint32.
        last_update: facts about the last call.
        sampled: which leaves are sampled.
        state_format: `state.STATE_FORMAT` of the version that made the state, int32.
    """

    memory: Tree
    displacement: optax.Updates
    step_length: jax.Array
    step_size_factor: jax.Array
    guardrail: rejection.GuardrailState
    probe: probe.ProbeState
    prior_mean: optax.Params | None
    num_steps: jax.Array
    key: jax.Array
    last_update: LastUpdate
    sampled: SampledState
    state_format: jax.Array

    @property
    def like_params(self) -> Tree:
        """A tree like the parameters that `init` got."""
        return self.displacement

    @property
    def gradients_per_step(self) -> int:
        """Gradients, and calls of `update`, per step."""
        return 1

    def stats(self) -> Stats:
        """Scalars that describe the last call, see `optax_smile.stats`."""
        unknown = jnp.full_like(self.step_length, jnp.nan)
        unmeasured = "energy_mean", "energy_std", "change_share", "descent", "fall"
        return Stats(
            step_size=self.step_length,
            num_outlying=jnp.zeros_like(self.guardrail.num_nonfinite),
            on_its_way=jnp.zeros_like(self.last_update.accepted),
            **dict.fromkeys(unmeasured, unknown),
            **_call.shared_stats(self),
        )

    def last_accepted(self, params: optax.Params) -> Tree:
        """Start of the open step, see `optax_smile.last_accepted`."""
        self.sampled.require_consistent("last_accepted")
        has_gradient = self.sampled.has_gradient
        return _tree.map_sampled(lambda move, x: x - move, self.displacement, params, has_gradient)

    def last_received(self) -> tuple[optax.Updates, jax.Array]:
        """See `state.SamplerState`."""
        return self.displacement, self.last_update.received


def euler_step(call: Move, amplitude: jax.Array) -> optax.Updates:
    """Step of overdamped Langevin dynamics: -eps grad U + amplitude z."""
    return jax.tree.map(
        lambda g, z: (-call.step_size * g + amplitude * z).astype(g.dtype),
        call.gradient,
        call.noise,
    )


def inverse(roots: optax.Updates, smallest: float | jax.Array) -> optax.Updates:
    """Compute 1 / (smallest * rms + root) for each parameter; 0 where no root is above zero.

    A parameter whose gradient has always been zero would otherwise take a step without bound.
    """
    rms = jnp.sqrt(_tree.inner(roots, roots) / _tree.size(roots))
    seen = rms > 0
    floor = jnp.where(seen, smallest * rms, 1)
    return jax.tree.map(lambda x: jnp.where(seen, 1 / (floor + x), 0).astype(x.dtype), roots)


class _Parts(NamedTuple):
    """The arguments of `build`."""

    name: str
    posterior: potential.Potential
    rule: Rule
    step_size: optax.Schedule
    seed: jax.Array


def build(
    name: str,
    step_size: StepSize,
    posterior: potential.Potential,
    key: jax.Array | int | None,
    rule: Rule,
    track_params: bool,
) -> _call.Built:
    """Build the sampler that moves by a rule."""
    potential.check(name, posterior)
    seed = _check.Key(needed=True)(name, "key", key)
    parts = _Parts(name, posterior, rule, _call.schedule(name, step_size), seed)
    init, update = functools.partial(_init, parts), functools.partial(_update, parts)
    return _call.transformation(name, init, update, LangevinState, track_params)


def _init(parts: _Parts, params: optax.Params) -> LangevinState:
    posterior = potential.begin(parts.name, parts.posterior, params)
    dtype, count = _tree.dtype(params), jnp.zeros((), jnp.int32)
    last_update = no_update(dtype, posterior.temperature)
    return LangevinState(
        memory=parts.rule.init(params),
        displacement=jax.tree.map(jnp.zeros_like, params),
        step_length=jnp.asarray(parts.step_size(count), dtype),
        step_size_factor=jnp.ones((), dtype),
        guardrail=rejection.init(dtype),
        probe=probe.init(params),
        prior_mean=potential.centre(posterior, params),
        num_steps=count,
        key=jnp.copy(jax.random.key_data(parts.seed)),
        last_update=last_update._replace(is_draw=parts.rule.is_draw(count - 1)),
        sampled=_leaves.begin(params),
        state_format=jnp.asarray(STATE_FORMAT, jnp.int32),
    )


def _update(
    parts: _Parts, updates: optax.Updates, state: LangevinState, params: optax.Params, value: Tree
) -> tuple[optax.Updates, LangevinState]:
    dtype, last = state.step_length.dtype, state.last_update
    value = None if value is None else jnp.asarray(value, dtype)
    posterior = potential.of_chain(parts.posterior, params, state.prior_mean)
    loss_gradient, value = potential.with_log_prior(posterior, updates, value, params)
    gradient = potential.gradient(posterior, loss_gradient, params)
    given = (_tree.inner(gradient, gradient), *(() if value is None else (value,)))
    error = evidence.error(None, last.accepted, given)
    guard, reject = rejection.judge(state.guardrail, error)

    step_length = parts.step_size(state.num_steps) * state.step_size_factor * guard.step_backoff
    step_length = jnp.asarray(step_length, dtype)
    key, noise_key = jax.random.split(_call.key(parts.name, state.key, parts.seed))
    step_end = last.accepted & (last.num_gradients > 0)
    last_length = state.step_length
    moved = last_length > 0
    call = Move(
        gradient=gradient,
        updates=updates,
        displacement=state.displacement,
        step_size=step_length,
        step_ratio=jnp.where(moved, step_length / jnp.where(moved, last_length, 1), 0),
        num_steps=state.num_steps,
        noise=_tree.normal_like(noise_key, params),
    )
    displacement, memory = parts.rule.move(state.memory, call)

    back = jax.tree.map(jnp.negative, state.displacement)
    still = jax.tree.map(jnp.zeros_like, params)
    resolution = evidence.resolution(_tree.inner(params, params))
    is_draw = parts.rule.is_draw(state.num_steps - 1)
    return _tree.where(reject, back, displacement), LangevinState(
        memory=_tree.where(reject, state.memory, memory),
        displacement=_tree.where(reject, still, displacement),
        step_length=step_length,
        step_size_factor=state.step_size_factor,
        guardrail=guard,
        probe=probe.look(state.probe, params, probe.entries(state.displacement), reject),
        prior_mean=state.prior_mean,
        num_steps=_tree.count(state.num_steps, ~reject),
        key=jax.random.key_data(key),
        last_update=LastUpdate(
            energy_change=last.energy_change,
            has_energy=last.has_energy,
            energy_level=jnp.full_like(last.energy_level, value is not None),
            accepted=~reject,
            step_end=step_end,
            is_draw=jnp.where(step_end & ~reject, is_draw, last.is_draw),
            below_resolution=_tree.inner(displacement, displacement) < resolution**2,
            last_temperature=_call.alike(posterior.temperature, step_length),
            num_gradients=_tree.count(last.num_gradients),
            received=jnp.where(reject, 0, _tree.fingerprint(updates)),
        ),
        sampled=state.sampled,
        state_format=state.state_format,
    )
