"""The driver of SMILE, pSMILE and MCLMC: one call of `update` through four exchangeable stages."""

import functools
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_smile import _check, _joined, _tree, potential
from optax_smile.samplers import _call, _leaves
from optax_smile.samplers._leaves import SampledState
from optax_smile.stages import energy, evidence, momentum, probe, products
from optax_smile.stages import tuner as tuning
from optax_smile.stages.guardrail import Guardrail, GuardrailState
from optax_smile.stages.preconditioner import Preconditioner
from optax_smile.state import STATE_FORMAT, LastUpdate, Stats, no_update, noise_id


class MicrocanonicalState(NamedTuple):
    """State of `smile`, `psmile` and `mclmc`: four stages and what joins them.

    Attributes:
        preconditioner: averages over the gradients of the kept calls; None without one.
        momentum: direction and place inside the open step.
        guardrail: counters of rejected steps.
        tuner: state of the tuner, with the field `step_size_factor`.
        evidence: what the calls so far have shown.
        probe: whether the parameters arrive where they were sent.
        prior_mean: the parameters that the chain began with, if the prior is around them; or None.
        num_steps: steps begun, the count that a step-size schedule gets, int32.
        key: for explicit noise and fresh momenta, as raw numbers, uint32; None if neither is used.
        last_update: what the last call found out.
        sampled: which leaves are sampled.
        state_format: `state.STATE_FORMAT` of the version that made the state, int32.
    """

    preconditioner: Any
    momentum: momentum.MomentumState
    guardrail: GuardrailState
    tuner: Any
    evidence: evidence.EvidenceState
    probe: probe.ProbeState
    prior_mean: Any
    num_steps: jax.Array
    key: jax.Array | None
    last_update: LastUpdate
    sampled: SampledState
    state_format: jax.Array

    @property
    def like_params(self) -> Any:
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
            num_rejected=self.guardrail.num_rejected,
            num_nonfinite=self.guardrail.num_nonfinite,
            num_outlying=self.evidence.turns.num_outlying,
            change_share=self.evidence.changes.share(),
            descent=self.evidence.descent.descent_score,
            fall=self.evidence.loss.fall,
            on_its_way=self.evidence.descent.on_its_way | self.evidence.loss.is_falling,
            num_altered=self.probe.num_altered,
            is_altered=self.probe.is_altered | self.sampled.is_inconsistent,
            num_parameters=self.sampled.num_parameters,
            noise_id=noise_id(self.key, self.last_update.num_gradients),
            **self.last_update.stats(),
        )

    def last_accepted(self, params: optax.Params) -> optax.Params:
        """Start of the open step, see `optax_smile.last_accepted`."""
        self.sampled.require_consistent("last_accepted")
        scale = _inverse_scale(self.preconditioner)
        return momentum.step_start(self.momentum, params, scale, self.sampled.has_gradient)

    def last_gradient(self) -> tuple[Any, jax.Array]:
        """See `state.SamplerState`."""
        return self.momentum.direction, self.last_update.received


def _inverse_scale(state: Any) -> optax.Updates | None:
    return None if state is None else state.inverse_scale()


class _Parts(NamedTuple):
    """What `compose` was given."""

    name: str
    posterior: potential.Potential
    preconditioner: Preconditioner
    momentum: momentum.Momentum
    guardrail: Guardrail
    tuner: tuning.Tuner
    step_size: optax.Schedule
    seed: jax.Array | None


def compose(
    name: str,
    posterior: potential.Potential,
    *,
    preconditioner: Preconditioner,
    momentum: momentum.Momentum,
    guardrail: Guardrail,
    tuner: tuning.Tuner | None = None,
    step_size: float | jax.Array | optax.Schedule | None = None,
    key: jax.Array | int | None = None,
    track_params: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Build a sampler from its four stages.

    Args:
        name: of the sampler, for errors.
        posterior: what to sample.
        preconditioner: in which coordinates.
        momentum: by which dynamics.
        guardrail: which steps are rejected.
        tuner: how long the steps are; None: as `step_size` says, or `angle_tuner()` without one.
        step_size: length of a step, a schedule, or None where the tuner finds it.
        key: for explicit noise and fresh momenta.
        track_params: whether the state holds the parameters.
    """
    tuner = tuning.choose(name, tuner, step_size)
    potential.check(name, posterior)
    seed = _check.Key()(name, "key", key)
    schedule = _call.schedule(name, 1.0 if step_size is None else step_size)
    of = _Parts(name, posterior, preconditioner, momentum, guardrail, tuner, schedule, seed)

    init, update = functools.partial(_init, of), functools.partial(_update, of)
    chosen = {"tuner": tuner} if tuner.sets_step_size else {}
    told = {"chosen": chosen, "found": functools.partial(_found, posterior)}
    return _call.transformation(name, init, update, MicrocanonicalState, track_params, **told)


def _found(posterior: potential.Potential, params: Any) -> dict[str, Any]:
    """Settings that depend on the parameters."""
    return {"temperature": potential.of_chain(posterior, params, None).temperature}


def _init(of: _Parts, params: Any) -> MicrocanonicalState:
    posterior = potential.begin(of.name, of.posterior, params)
    dtype, count = _tree.dtype(params), jnp.zeros((), jnp.int32)
    start = of.tuner.init(dtype)
    seed = of.seed if of.momentum.uses_key or of.guardrail.uses_key else None
    return MicrocanonicalState(
        preconditioner=of.preconditioner.init(params),
        momentum=of.momentum.init(params, of.step_size(count) * start.step_size_factor),
        guardrail=of.guardrail.init(dtype),
        tuner=start,
        evidence=evidence.init(params),
        probe=probe.init(params),
        prior_mean=potential.centre(posterior, params),
        num_steps=count,
        key=None if seed is None else jnp.copy(jax.random.key_data(seed)),
        last_update=no_update(dtype, posterior.temperature),
        sampled=_leaves.begin(params),
        state_format=jnp.asarray(STATE_FORMAT, jnp.int32),
    )


def _update(of: _Parts, updates: Any, state: Any, params: Any, value: Any) -> tuple[Any, Any]:
    """One call, with small leaves joined."""
    dtype, layout = state.momentum.step_length.dtype, _joined.choose(params, _tree.SMALLEST_NETWORK)
    value = None if value is None else jnp.asarray(value, dtype)
    posterior = potential.of_chain(of.posterior, params, state.prior_mean)
    received = None
    if posterior.log_prior is not None:
        received = jax.tree.map(lambda g, x: g.astype(x.dtype), updates, params)
    updates, value = potential.with_log_prior(posterior, updates, value, params)
    posterior = potential.spread(posterior, params)
    given = posterior, updates, state, params, received
    posterior, *given = _joined.join(layout, given)
    found = _step(of._replace(posterior=posterior), value, *given)
    return _joined.part(found)


def _step(
    of: _Parts, value: Any, updates: Any, state: Any, params: Any, received: Any
) -> tuple[Any, Any]:
    here, past = state.momentum, state.evidence
    if value is None and (of.tuner.uses_energy or of.guardrail.uses_energy):
        _warn_without_value(of.name)
    key, noise_key, reject_key = _split(of, state.key)

    # Look at the trees: every inner product in one pass over memory.
    noise = of.momentum.draw(noise_key, params)
    trees = updates, params, here, state.preconditioner
    sums, sketch, mark = products.measure(_look(of, *trees, noise), received)

    # Close the step that ends here, and keep or reject it by the energy that it gained.
    closed = of.momentum.close(here, sums)
    error = energy.energy_error(of.posterior, past.open_step, closed, sums, value)
    guard, reject = of.guardrail.judge(state.guardrail, error, past.energies)
    probed = probe.look(state.probe, params, _moved(of, state), reject)
    reject = reject & probed.is_made()

    # Choose the length of the next step, and open it.
    base = jnp.asarray(of.step_size(state.num_steps), here.step_length.dtype)
    num_gradients = state.last_update.num_gradients
    shown = evidence.show(past, closed, error, sums, sketch, base, num_gradients, ~reject)
    tuned = of.tuner.update(state.tuner, shown)
    length = base * tuned.step_size_factor * guard.step_backoff
    rates, temperature = evidence.usual_rates(shown), of.posterior.temperature
    opened = of.momentum.open(here, closed, length, sums, rates, temperature)

    # Move: every array in a second pass; a rejected call stands where its step began.
    updates, params, here, scale = _tree.fence(trees)
    seen = _look(of, updates, params, here, scale, noise)
    turned = of.momentum.turn(here, opened, seen.gradient, noise, params)
    step = energy.proceed(past.open_step, closed, opened, sums, value)
    kept = turned, step, _tree.count(state.num_steps, closed.opens_step)
    stopped = of.momentum.stop(here, length, of.guardrail.restarts_moving)
    rejected = stopped, past.open_step, state.num_steps
    after, step, num_steps = _tree.where(reject, rejected, kept)
    scale_stays = of.preconditioner.stays(scale, shown.worth)
    scale = of.preconditioner.observe(scale, seen.energy_gradient, shown.worth, after.direction)

    per_nat = potential.energy_change(of.posterior, 1.0, 0.0)
    loss = evidence.observe_loss(past.loss, value, per_nat, closed.num_parameters, ~reject)

    move = of.momentum.displace(reject, here, after, params, _inverse_scale(scale))
    direction = of.guardrail.redirect(reject, after.direction, reject_key)
    return move, MicrocanonicalState(
        preconditioner=scale,
        momentum=after._replace(direction=direction),
        guardrail=guard,
        tuner=tuned,
        evidence=evidence.remember(
            past, shown, step, of.guardrail.winsor_quantile, scale_stays, loss
        ),
        probe=probed,
        prior_mean=state.prior_mean,
        num_steps=num_steps,
        key=key,
        last_update=_told(of.posterior, shown, closed, after, reject, value, mark),
        sampled=state.sampled,
        state_format=state.state_format,
    )


def _split(of: _Parts, data: jax.Array | None) -> tuple[Any, Any, Any]:
    """Keys for the state, the explicit noise and a fresh momentum; None for none."""
    if data is None or of.seed is None:
        return None, None, None
    keys = jax.random.split(_call.key(of.name, data, of.seed), 3 if of.guardrail.uses_key else 2)
    return jax.random.key_data(keys[0]), keys[1], keys[-1]


def _look(
    of: _Parts, updates: Any, params: Any, here: Any, scale: Any, noise: Any
) -> products.Seen:
    """Collect the trees of a call; nothing is computed before it is used."""
    gradient = potential.gradient(of.posterior, updates, params)
    back = jax.tree.map(jnp.negative, of.momentum.last_drift(here, _inverse_scale(scale)))
    return products.Seen(
        direction=here.direction,
        gradient=of.preconditioner.whiten(scale, gradient),
        noise=noise,
        params=params,
        loss_gradient=jax.tree.map(lambda g, x: g.astype(x.dtype), updates, params),
        energy_gradient=gradient,
        deviation=of.preconditioner.deviation(scale, gradient),
        prior_terms=potential.prior_terms(of.posterior, params, back),
    )


def _moved(of: _Parts, state: Any) -> Any:
    """How far the last drift moved a few entries of the parameters."""
    scale = _inverse_scale(state.preconditioner)
    few = state.momentum._replace(direction=probe.entries(state.momentum.direction))
    return of.momentum.last_drift(few, None if scale is None else probe.entries(scale))


def _told(
    posterior: potential.Potential,
    shown: evidence.Evidence,
    closed: momentum.Closed,
    after: momentum.MomentumState,
    reject: jax.Array,
    value: jax.Array | None,
    received: jax.Array,
) -> LastUpdate:
    """Say what a call found out about the parameters that it was given."""
    return LastUpdate(
        energy_change=jnp.where(shown.error.known, shown.error.change, 0),
        has_energy=shown.error.known,
        energy_level=jnp.full_like(shown.num_gradients, value is not None),
        accepted=~reject,
        step_end=closed.step_end,
        is_draw=jnp.ones_like(reject),
        below_resolution=after.step_length < shown.resolution,
        last_temperature=_call.alike(posterior.temperature, after.step_length),
        num_gradients=_tree.count(shown.num_gradients),
        received=jnp.where(reject, 0, received),
    )


def _warn_without_value(where: str):
    warnings.warn(
        f"`{where}` got no `value`: without energies `quantile_tuner` keeps the step size and"
        " `reject_quantile` rejects non-finite steps alone. Pass `value=loss` to `update`, or leave"
        " both out.",
        stacklevel=6,
    )
