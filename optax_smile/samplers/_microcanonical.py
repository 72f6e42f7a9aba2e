"""The driver of SMILE, pSMILE and MCLMC: one call of `update` through the stages.

A gradient has these names on its way:

- `updates`: of the mean loss, as the loop passes it, in the precision of the parameters. A
  `log_prior` adds its own gradient to it.
- `received`: the fingerprint of `updates` as the loop passed it (`passed`, if a `log_prior` has
  changed it), which the state keeps for checks.
- `gradient`: of the energy U, in nats per unit of the parameters.
- `deviation`: what the preconditioner measures of `gradient`.
- `whitened`: `gradient` over the scale of the preconditioner.
- `sketch`: of `whitened`, by which the change to the next call is estimated.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_smile import _check, _joined, _tree, potential
from optax_smile._types import Options, StepSize, Tree
from optax_smile._warn import warn
from optax_smile.samplers import _call, _leaves
from optax_smile.samplers._leaves import SampledState
from optax_smile.stages import evidence, probe, rejection, scale
from optax_smile.stages.evidence import Evidence, EvidenceState, StepEnd, Trees
from optax_smile.stages.integrator import (
    SCHEMES,
    Decoherence,
    IntegratorName,
    Momentum,
    MomentumState,
    step_start,
    stop,
    turn,
)
from optax_smile.stages.step_size import Tuner, choose
from optax_smile.state import STATE_FORMAT, LastUpdate, Stats, no_update


class MicrocanonicalState(NamedTuple):
    """State of `smile`, `psmile` and `mclmc`.

    Attributes:
        preconditioner: averages over the gradients of the accepted calls; None without one.
        momentum: direction and place inside the open step.
        guardrail: counters of rejected steps.
        tuner: state of the tuner, with the field `step_size_factor`.
        evidence: averages over the calls so far.
        probe: whether the parameters arrive where they were sent.
        prior_mean: the parameters at the start, if the prior is around them; or None.
        num_steps: steps begun, the count that a step-size schedule gets, int32.
        key: for explicit noise, as raw numbers, uint32; None without it.
        last_update: facts about the last call.
        sampled: which leaves are sampled.
        state_format: `state.STATE_FORMAT` of the version that made the state, int32.
    """

    preconditioner: Tree
    momentum: MomentumState
    guardrail: rejection.GuardrailState
    tuner: Tree
    evidence: EvidenceState
    probe: probe.ProbeState
    prior_mean: optax.Params | None
    num_steps: jax.Array
    key: jax.Array | None
    last_update: LastUpdate
    sampled: SampledState
    state_format: jax.Array

    @property
    def like_params(self) -> Tree:
        """A tree like the parameters that `init` got."""
        return self.momentum.direction

    @property
    def gradients_per_step(self) -> int:
        """Gradients, and calls of `update`, per step."""
        return 1 if self.momentum.anchor is None else 2

    def stats(self) -> Stats:
        """Scalars that describe the last call, see `optax_smile.stats`."""
        return Stats(
            step_size=self.momentum.step_length,
            energy_mean=self.evidence.energies.energy_mean,
            energy_std=self.evidence.energies.energy_std,
            num_outlying=self.evidence.turns.num_outlying,
            change_share=self.evidence.changes.share(),
            descent=self.evidence.descent.descent_score,
            fall=self.evidence.loss.fall,
            on_its_way=self.evidence.descent.on_its_way | self.evidence.loss.is_falling,
            **_call.shared_stats(self),
        )

    def last_accepted(self, params: optax.Params) -> Tree:
        """Start of the open step, see `optax_smile.last_accepted`."""
        self.sampled.require_consistent("last_accepted")
        inverse_scale = scale.inverse_of(self.preconditioner)
        has_gradient = self.sampled.has_gradient
        return step_start(self.momentum, params, inverse_scale, has_gradient)

    def last_received(self) -> tuple[optax.Updates, jax.Array]:
        """See `state.SamplerState`."""
        return self.momentum.direction, self.last_update.received


class _Parts(NamedTuple):
    """The arguments of `build`."""

    name: str
    posterior: potential.Potential
    preconditioner: scale.Preconditioner
    momentum: Momentum
    reject_quantile: float | None
    tuner: Tuner
    step_size: optax.Schedule
    seed: jax.Array | None


def build(
    name: str,
    posterior: potential.Potential,
    preconditioner: scale.Preconditioner,
    *,
    integrator: IntegratorName,
    decoherence_length: Decoherence | None = None,
    reject_quantile: float | None = None,
    tuner: Tuner | None = None,
    step_size: StepSize | None = None,
    key: jax.Array | int | None = None,
    track_params: bool = False,
) -> _call.Built:
    """Build a sampler; for the arguments see `psmile`."""
    is_random = decoherence_length is not None
    purpose = "(or `decoherence_length=None`)" if is_random else ""
    seed = _check.Key(is_random, purpose)(name, "key", key)
    tuner = choose(name, tuner, step_size)
    potential.check(name, posterior)
    parts = _Parts(
        name=name,
        posterior=posterior,
        preconditioner=preconditioner,
        momentum=Momentum(SCHEMES[integrator], decoherence_length),
        reject_quantile=reject_quantile,
        tuner=tuner,
        step_size=_call.schedule(name, 1.0 if step_size is None else step_size),
        seed=seed if is_random else None,
    )

    def settings(params: optax.Params) -> Options:
        return {"temperature": potential.of_chain(posterior, params, None).temperature}

    return _call.transformation(
        name,
        functools.partial(_init, parts),
        functools.partial(_update, parts),
        MicrocanonicalState,
        track_params,
        chosen={"tuner": tuner} if tuner.sets_step_size else {},
        settings=settings,
    )


def _init(parts: _Parts, params: optax.Params) -> MicrocanonicalState:
    posterior = potential.begin(parts.name, parts.posterior, params)
    dtype, count = _tree.dtype(params), jnp.zeros((), jnp.int32)
    start = parts.tuner.init(dtype)
    return MicrocanonicalState(
        preconditioner=parts.preconditioner.init(params),
        momentum=parts.momentum.init(params, parts.step_size(count) * start.step_size_factor),
        guardrail=rejection.init(dtype),
        tuner=start,
        evidence=evidence.init(params),
        probe=probe.init(params),
        prior_mean=potential.centre(posterior, params),
        num_steps=count,
        key=None if parts.seed is None else jnp.copy(jax.random.key_data(parts.seed)),
        last_update=no_update(dtype, posterior.temperature),
        sampled=_leaves.begin(params),
        state_format=jnp.asarray(STATE_FORMAT, jnp.int32),
    )


def _update(
    parts: _Parts,
    updates: optax.Updates,
    state: MicrocanonicalState,
    params: optax.Params,
    value: Tree,
) -> tuple[optax.Updates, MicrocanonicalState]:
    """One call, with small leaves joined."""
    dtype, layout = state.momentum.step_length.dtype, _joined.choose(params, _tree.SMALLEST_NETWORK)
    value = None if value is None else jnp.asarray(value, dtype)
    posterior = potential.of_chain(parts.posterior, params, state.prior_mean)
    passed = None if posterior.log_prior is None else updates
    updates, value = potential.with_log_prior(posterior, updates, value, params)
    posterior = potential.spread(posterior, params)
    given = posterior, updates, state, params, passed
    posterior, *given = _joined.join(layout, given)
    return _joined.part(_step(parts._replace(posterior=posterior), value, *given))


def _step(
    parts: _Parts,
    value: jax.Array | None,
    updates: optax.Updates,
    state: MicrocanonicalState,
    params: optax.Params,
    passed: optax.Updates | None,
) -> tuple[optax.Updates, MicrocanonicalState]:
    """One call; `passed` is the gradient as the loop passed it, if that is not `updates`."""
    momentum, here, past = parts.momentum, state.momentum, state.evidence
    if value is None and (parts.tuner.uses_energy or parts.reject_quantile is not None):
        _warn_without_value(parts.name)
    key, noise_key = _split(parts, state.key)

    # Read the trees: every inner product in one pass over memory.
    noise = momentum.draw(noise_key, params)
    given = updates, params, here, state.preconditioner
    sums, sketch, received = evidence.measure(collect_trees(parts, *given, noise), passed)

    # Close the step that ends here, and accept or reject it by the energy that it gained.
    heading, end = momentum.close(here, sums)
    error = evidence.energy_error(parts.posterior, past.open_step, end, sums, value)
    guard, reject = rejection.judge(state.guardrail, error, past.energies, parts.reject_quantile)
    probed = probe.look(state.probe, params, _entries_moved(parts, state), reject)
    reject = reject & probed.is_made()

    # Choose the length of the next step, and open it.
    base = jnp.asarray(parts.step_size(state.num_steps), here.step_length.dtype)
    num_gradients = state.last_update.num_gradients
    now = evidence.collect(past, end, error, sums, sketch, base, num_gradients, ~reject)
    tuned = parts.tuner.update(state.tuner, now)
    length = base * tuned.step_size_factor * guard.step_backoff
    heading = momentum.diffuse(here, heading, sums, now.rates(), parts.posterior.temperature)
    opened = momentum.open(here, heading, length)

    # Move: every array in a second pass; a rejected call returns to where its step began.
    updates, params, here, averages = _tree.fence(given)
    trees = collect_trees(parts, updates, params, here, averages, noise)
    turned = turn(here, opened, trees.whitened, noise, params)
    step = past.open_step.advance(end, opened.kinetic_change, sums, value)
    kept = turned, step, _tree.count(state.num_steps, end.opens_step)
    rejected = stop(here, length), past.open_step, state.num_steps
    after, step, num_steps = _tree.where(reject, rejected, kept)
    scale_stays = parts.preconditioner.stays(averages, now.worth)
    averages = parts.preconditioner.observe(averages, trees.gradient, now.worth, after.direction)
    per_nat = potential.energy_change(parts.posterior, 1.0, 0.0)
    changes, cap = now.changes, parts.reject_quantile
    cap = rejection.WINSOR_QUANTILE if cap is None else cap
    move = momentum.displace(reject, here, after, params, scale.inverse_of(averages))
    return move, MicrocanonicalState(
        preconditioner=averages,
        momentum=after,
        guardrail=guard,
        tuner=tuned,
        evidence=EvidenceState(
            open_step=step,
            energies=past.energies.observe(error, cap),
            turns=now.turns,
            changes=changes._replace(is_comparable=changes.is_comparable & scale_stays),
            descent=now.descent,
            loss=past.loss.observe(value, per_nat, end.num_parameters, ~reject),
        ),
        probe=probed,
        prior_mean=state.prior_mean,
        num_steps=num_steps,
        key=key,
        last_update=last_update(parts.posterior, now, end, after, reject, value, received),
        sampled=state.sampled,
        state_format=state.state_format,
    )


def _split(
    parts: _Parts, data: jax.Array | None
) -> tuple[jax.Array, jax.Array] | tuple[None, None]:
    """Keys for the state and the explicit noise; None without it."""
    if data is None or parts.seed is None:
        return None, None
    key, noise_key = jax.random.split(_call.key(parts.name, data, parts.seed))
    return jax.random.key_data(key), noise_key


def collect_trees(
    parts: _Parts,
    updates: optax.Updates,
    params: optax.Params,
    here: MomentumState,
    averages: Tree,
    noise: optax.Updates | None,
) -> Trees:
    """Collect the trees of a call; nothing is computed before it is used."""
    gradient = potential.gradient(parts.posterior, updates, params)
    drifted = parts.momentum.last_drift(here, scale.inverse_of(averages))
    back = jax.tree.map(jnp.negative, drifted)
    return Trees(
        direction=here.direction,
        whitened=scale.whiten(averages, gradient),
        noise=noise,
        params=params,
        updates=updates,
        gradient=gradient,
        deviation=parts.preconditioner.deviation(averages, gradient),
        prior_terms=potential.prior_terms(parts.posterior, params, back),
    )


def _entries_moved(parts: _Parts, state: MicrocanonicalState) -> Tree:
    """How far the last drift moved a few entries of the parameters."""
    inverse_scale = scale.inverse_of(state.preconditioner)
    few = state.momentum._replace(direction=probe.entries(state.momentum.direction))
    few_scales = None if inverse_scale is None else probe.entries(inverse_scale)
    return parts.momentum.last_drift(few, few_scales)


def last_update(
    posterior: potential.Potential,
    now: Evidence,
    end: StepEnd,
    after: MomentumState,
    reject: jax.Array,
    value: jax.Array | None,
    received: jax.Array,
) -> LastUpdate:
    """Collect the facts about a call that the state keeps."""
    return LastUpdate(
        energy_change=jnp.where(now.error.known, now.error.change, 0),
        has_energy=now.error.known,
        energy_level=jnp.full_like(now.num_gradients, value is not None),
        accepted=~reject,
        step_end=end.is_end,
        is_draw=jnp.ones_like(reject),
        below_resolution=after.step_length < now.resolution,
        last_temperature=_call.alike(posterior.temperature, after.step_length),
        num_gradients=_tree.count(now.num_gradients),
        received=jnp.where(reject, 0, received),
    )


def _warn_without_value(where: str):
    warn(
        f"`{where}.update` got no loss. Without it, `quantile_tuner` does not adapt the step size,"
        " and `reject_quantile` rejects only non-finite steps. Pass `value=loss` to `update`."
    )
