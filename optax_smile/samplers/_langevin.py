"""The dynamics of SGLD, SGHMC and their relatives: one gradient in, one displacement out.

A sampler of this family is a `Rule` for the displacement. Everything else is here: the energy, the
step size, the random keys, and the rejection of steps that end in a non-finite number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from optax_smile import _check, _noise, _paths, _sums, _tree, potential
from optax_smile._types import Options, T
from optax_smile.samplers import _transformation
from optax_smile.samplers._chain import ChainState
from optax_smile.samplers._transformation import Arguments, Call, Dynamics, Maker
from optax_smile.stages import evidence, probe, rejection


class Step(NamedTuple):
    """Inputs from which a rule computes its displacement.

    Attributes:
        gradient: grad U, nats per unit of the parameter.
        loss_gradient: gradient of the mean loss, as the loop passed it.
        displacement: displacement of the step that ends; zero at the start and after a rejection.
        step_size: step size of the step that begins, scalar.
        step_ratio: `step_size` / step size of the step that ends, scalar; 0 if the latter is 0.
        num_steps: number of steps begun before, int32.
        noise: standard normal, a tree like the parameters.
    """

    gradient: optax.Updates
    loss_gradient: optax.Updates
    displacement: optax.Updates
    step_size: jax.Array
    step_ratio: jax.Array
    num_steps: jax.Array
    noise: optax.Updates


Memory = TypeVar("Memory")


class Rule(NamedTuple, Generic[Memory]):
    """A sampler as two pure functions, `init` and `move`.

    Attributes:
        move: `move(memory, step)`, the displacement and the new memory.
        init: `init(params)`, the memory before the first call.
        is_draw: whether the step with this count, 0 for the first, ends in a draw from the
            posterior.
        step_size: a schedule that replaces the argument of the sampler; None keeps the argument.
    """

    move: Callable[[Memory, Step], tuple[optax.Updates, Memory]]
    init: Callable[[optax.Params], Memory | None] = lambda params: None
    is_draw: Callable[[jax.Array], jax.Array] = lambda count: jnp.ones_like(count, bool)
    step_size: optax.Schedule | None = None


class LangevinState(NamedTuple):
    """State of the dynamics of a `Rule`.

    Attributes:
        memory: memory of the rule, such as averages over gradients.
        displacement: of the open step, added by the last call, a tree like the parameters; for
            SGHMC also the velocity. Zero before the first call and after a rejection.
        step_length: step size of the open step, or of the rejected one.
        step_size_factor: factor of the user's step size, scalar.
    """

    memory: object
    displacement: optax.Updates
    step_length: jax.Array
    step_size_factor: jax.Array

    gradients_per_step = 1

    @property
    def like_params(self) -> optax.Params:
        """A tree like the parameters."""
        return self.displacement

    def stats(self) -> dict[str, jax.Array]:
        """Return the fields of `Stats` that only the dynamics know."""
        return {"step_size": self.step_length}

    def last_accepted(self, params: T) -> T:
        """Start of the open step."""
        return _paths.map_sampled(lambda move, x: x - move, self.displacement, params)


def euler_step(step: Step, amplitude: jax.Array) -> optax.Updates:
    """Step of overdamped Langevin dynamics: -eps grad U + amplitude z."""
    return jax.tree.map(
        lambda g, z: (-step.step_size * g + amplitude * z).astype(g.dtype),
        step.gradient,
        step.noise,
    )


def inverse(roots: optax.Updates, smallest: float | jax.Array) -> optax.Updates:
    """Compute 1 / (smallest * rms + root) for each parameter; 0 where no root is above zero.

    Without the first term, a parameter whose gradient was always zero would take unbounded steps.
    """
    rms = jnp.sqrt(_tree.inner(roots, roots) / _tree.size(roots))
    seen = rms > 0
    floor = jnp.where(seen, smallest * rms, 1)
    return jax.tree.map(lambda x: jnp.where(seen, 1 / (floor + x), 0).astype(x.dtype), roots)


@dataclass(frozen=True, kw_only=True, eq=False)
class Langevin(Dynamics[LangevinState]):
    """Dynamics that follow a rule."""

    rule: Rule[Any]

    def begin(self, params: optax.Params) -> LangevinState:
        """Start at rest."""
        dtype, memory = _tree.dtype(params), self.rule.init(params)
        return LangevinState(
            # Make the states of two samplers without memory differ in their structure.
            memory={self.name: None} if memory is None else memory,
            displacement=jax.tree.map(jnp.zeros_like, params),
            step_length=jnp.asarray(self.step_size(jnp.zeros((), jnp.int32)), dtype),
            step_size_factor=jnp.ones((), dtype),
        )

    def process(
        self, call: Call, state: ChainState[LangevinState]
    ) -> tuple[optax.Updates, ChainState[LangevinState]]:
        """Reject a step that ends in a non-finite number; otherwise move by the rule."""
        before, last, params = state.dynamics, state.last_update, call.params
        gradient = potential.gradient(call.posterior, call.updates, params)
        passed = call.updates if call.passed is None else call.passed
        read = [jax.tree.map(jnp.square, tree) for tree in (gradient, params, passed)]
        square, params_square, *mark = _sums.sums([*read, _sums.signed(passed, call.places)])
        given = square if call.value is None else jnp.stack([square, call.value])
        length, last_length = self.step_size(state.num_steps), before.step_length
        is_finite = jnp.all(jnp.isfinite(given)) & jnp.greater_equal(length, 0)
        guard, reject = rejection.judge(state.guardrail, is_finite, is_refused=call.reject)
        length = jnp.asarray(
            length * before.step_size_factor * guard.step_backoff, last_length.dtype
        )
        key, noise_key = self.split(state.key)
        moved = last_length > 0
        displacement, memory = self.rule.move(
            before.memory,
            Step(
                gradient=gradient,
                loss_gradient=passed,
                displacement=before.displacement,
                step_size=length,
                step_ratio=jnp.where(moved, length / jnp.where(moved, last_length, 1), 0),
                num_steps=state.num_steps,
                noise=_noise.normal_like(noise_key, params),
            ),
        )

        arrived, sent = (probe.entries(x, call.places) for x in (params, before.displacement))
        back = jax.tree.map(jnp.negative, before.displacement)
        still = jax.tree.map(jnp.zeros_like, params)
        resolution = evidence.resolution(params_square)
        step_end = last.accepted & (last.num_gradients > 0)
        is_draw = self.is_draw(state.num_steps - 1)
        return optax.tree.where(reject, back, displacement), state._replace(
            dynamics=LangevinState(
                memory=optax.tree.where(reject, before.memory, memory),
                displacement=optax.tree.where(reject, still, displacement),
                step_length=length,
                step_size_factor=before.step_size_factor,
            ),
            guardrail=guard,
            probe=probe.look(state.probe, arrived, sent, reject),
            num_steps=_tree.count(state.num_steps, ~reject),
            key=key,
            last_update=last.proceed(
                call.posterior.temperature,
                call.value,
                reject,
                _sums.fingerprint_of(*mark),
                step_end=step_end,
                is_draw=jnp.where(step_end & ~reject, is_draw, last.is_draw),
                below_resolution=_tree.inner(displacement, displacement) < resolution**2,
            ),
        )


def _assemble(name: str, rule: Rule[Any], arguments: Options) -> Langevin:
    return Langevin(
        name=name,
        posterior=_transformation.posterior_of(arguments),
        step_size=rule.step_size or _transformation.schedule(arguments["step_size"]),
        seed=_check.Key(needed=True)("key", arguments["key"]),
        is_draw=rule.is_draw,
        rule=rule,
    )


def sampler(
    **constraints: _check.Constraint,
) -> Callable[[Callable[Arguments, Rule[Any]]], Maker[Arguments]]:
    """Make a sampler from a function that returns its rule."""
    return _transformation.sampler(_assemble, constraints)
