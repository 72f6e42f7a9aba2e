"""The dynamics of SMILE, pSMILE and MCLMC: one call of `update` through the stages.

A gradient has these names on its way:

- `updates`: of the mean loss, as the loop passes it, in the precision of the parameters. A
  `log_prior` adds its own gradient to it.
- `passed`: `updates` before a `log_prior` has changed it; None without one. The state keeps its
  fingerprint, or that of `updates`, for checks.
- `gradient`: of the energy U, in nats per unit of the parameters.
- `deviation`: what the preconditioner measures of `gradient`.
- `whitened`: `gradient` over the scale of the preconditioner.
- `sketch`: of `whitened`, by which the change to the next call is estimated.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_smile import _check, _joined, _tree, potential
from optax_smile._types import Options, Tree
from optax_smile._warn import warn
from optax_smile.samplers import _call
from optax_smile.samplers._chain import Call, ChainState, Dynamics
from optax_smile.stages import evidence, probe, rejection, scale
from optax_smile.stages.evidence import EvidenceState
from optax_smile.stages.integrator import (
    SCHEMES,
    IntegratorName,
    Momentum,
    MomentumState,
    Noise,
    step_start,
    stop,
)
from optax_smile.stages.scale import Preconditioner
from optax_smile.stages.step_size import Tuner, choose

CONSTRAINTS = {
    "step_size": _check.STEP_SIZE | None,
    "integrator": _check.OneOf(IntegratorName),
    "tuner": _check.kind(Tuner, "a tuner such as angle_tuner()") | None,
    "reject_quantile": _check.PROBABILITY | None,
    "decoherence_length": _check.POSITIVE | _check.OneOf(Noise) | None,
}


class MicrocanonicalState(NamedTuple):
    """State of the dynamics of `smile`, `psmile` and `mclmc`.

    The state of the preconditioner is None for a scale of one; that of the tuner has a field
    `step_size_factor`.
    """

    preconditioner: Tree
    momentum: MomentumState
    tuner: Tree
    evidence: EvidenceState

    @property
    def like_params(self) -> Tree:
        """A tree like the parameters."""
        return self.momentum.direction

    @property
    def gradients_per_step(self) -> int:
        """Gradients, and calls of `update`, per step."""
        return 1 if self.momentum.anchor is None else 2

    def stats(self) -> Options:
        """Return what only the dynamics know of `Stats`."""
        past = self.evidence
        return {
            "step_size": self.momentum.step_length,
            "energy_mean": past.energies.energy_mean,
            "energy_std": past.energies.energy_std,
            "num_outlying": past.turns.num_outlying,
            "change_share": past.changes.share(),
            "descent": past.descent.descent_score,
            "fall": past.loss.fall,
            "on_its_way": past.descent.on_its_way | past.loss.is_falling,
        }

    def last_accepted(self, params: optax.Params) -> Tree:
        """Start of the open step."""
        return step_start(self.momentum, params, scale.inverse_of(self.preconditioner))


@dataclass(frozen=True, kw_only=True, eq=False)
class Microcanonical(Dynamics):
    """Move at constant speed, turned by gradients."""

    preconditioner: Preconditioner
    momentum: Momentum
    reject_quantile: float | None
    tuner: Tuner

    def begin(self, params: optax.Params) -> MicrocanonicalState:
        """Start at rest, without any calls."""
        tuner = self.tuner.init(_tree.dtype(params))
        length = self.step_size(jnp.zeros((), jnp.int32)) * tuner.step_size_factor
        return MicrocanonicalState(
            preconditioner=self.preconditioner.init(params),
            momentum=self.momentum.init(params, length),
            tuner=tuner,
            evidence=evidence.init(params),
        )

    def move(self, call: Call, state: ChainState) -> tuple[optax.Updates, ChainState]:
        """Take the next drift, or the way back, with small leaves joined."""
        layout = _joined.choose(call.params, _tree.SMALLEST_NETWORK)
        call = call._replace(posterior=potential.spread(call.posterior, call.params))
        return _joined.part(self._step(*_joined.join(layout, (call, state))))

    def _step(self, call: Call, state: ChainState) -> tuple[optax.Updates, ChainState]:
        momentum, here, past = self.momentum, state.dynamics.momentum, state.dynamics.evidence
        if call.value is None and (self.tuner.uses_energy or self.reject_quantile is not None):
            warn(
                f"`{self.name}.update` got no loss. Without it, `quantile_tuner` does not adapt the"
                " step size, and `reject_quantile` rejects only non-finite steps. Pass `value=loss`"
                " to `update`."
            )
        key, noise_key = self.split(state.key)

        # Read the trees: every inner product in one pass over memory.
        noise = None if noise_key is None else _tree.isotropic_like(noise_key, call.params)
        averages, posterior, params = state.dynamics.preconditioner, call.posterior, call.params
        sums, sketch, fingerprint = self._measure(call, here, averages, noise)

        # Close the step that ends here, and accept or reject it by the energy that it gained.
        heading, end = momentum.close(here, sums)
        error = evidence.energy_error(posterior, past.open_step, end, sums, call.value)
        is_outlier = past.energies.is_outlier(error, self.reject_quantile)
        base = jnp.asarray(self.step_size(state.num_steps), here.step_length.dtype)
        guard, reject = rejection.judge(state.guardrail, error.finite & (base >= 0), is_outlier)
        probed = probe.look(state.probe, params, self._entries_moved(here, averages), reject)
        reject = reject & probed.is_made()

        # Choose the length of the next step, and open it.
        num_gradients = state.last_update.num_gradients
        now = evidence.collect(past, end, error, sums, sketch, base, num_gradients, ~reject)
        tuned = self.tuner.update(state.dynamics.tuner, now)
        length = base * tuned.step_size_factor * guard.step_backoff
        heading = momentum.diffuse(here, heading, sums, now.rates(), posterior.temperature)
        heading, gained = momentum.open(here, heading, length)

        # Move: every array in a second pass, in which the gradient is computed again. A rejected
        # call returns to where its step began.
        read = call.updates, params, here, averages
        updates, params, here, averages = _tree.fence(read)
        gradient = potential.gradient(posterior, updates, params)
        whitened = scale.whiten(averages, gradient)
        turned = momentum.turn(here, heading, length, whitened, noise, params)
        step = past.open_step.advance(end, gained, sums, call.value)
        kept = turned, step, _tree.count(state.num_steps, end.opens_step)
        rejected = stop(here, length), past.open_step, state.num_steps
        after, step, num_steps = optax.tree.where(reject, rejected, kept)
        scale_stays = self.preconditioner.stays(averages, now.worth)
        averages = self.preconditioner.observe(averages, gradient, now.worth, after.direction)
        energy_per_loss, changes = potential.energy_change(posterior, 1.0, 0.0), now.changes
        move = momentum.displace(reject, here, after, params, scale.inverse_of(averages))
        return move, state._replace(
            dynamics=MicrocanonicalState(
                preconditioner=averages,
                momentum=after,
                tuner=tuned,
                evidence=EvidenceState(
                    open_step=step,
                    energies=past.energies.observe(error, self.reject_quantile),
                    turns=now.turns,
                    changes=changes._replace(is_comparable=changes.is_comparable & scale_stays),
                    descent=now.descent,
                    loss=past.loss.observe(
                        call.value, energy_per_loss, end.num_parameters, ~reject
                    ),
                ),
            ),
            guardrail=guard,
            probe=probed,
            num_steps=num_steps,
            key=key,
            last_update=state.last_update.proceed(
                posterior.temperature,
                call.value,
                reject,
                fingerprint,
                energy_change=jnp.where(error.known, error.change, 0),
                has_energy=error.known,
                step_end=end.is_end,
                below_resolution=after.step_length < now.resolution,
            ),
        )

    def _measure(
        self, call: Call, here: MomentumState, averages: Tree, noise: optax.Updates | None
    ) -> tuple[evidence.Sums, Tree, jax.Array]:
        """Compute the trees of a call and their inner products."""
        gradient = potential.gradient(call.posterior, call.updates, call.params)
        drifted = self.momentum.last_drift(here, scale.inverse_of(averages))
        back = jax.tree.map(jnp.negative, drifted)
        return evidence.measure(
            params=call.params,
            updates=call.updates,
            passed=call.passed,
            direction=here.direction,
            whitened=scale.whiten(averages, gradient),
            deviation=self.preconditioner.deviation(averages, gradient),
            noise=noise,
            prior_terms=potential.prior_terms(call.posterior, call.params, back),
        )

    def _entries_moved(self, here: MomentumState, averages: Tree) -> Tree:
        """How far the last drift moved a few entries of the parameters."""
        inverse_scale = scale.inverse_of(averages)
        few = here._replace(direction=probe.entries(here.direction))
        few_scales = None if inverse_scale is None else probe.entries(inverse_scale)
        return self.momentum.last_drift(few, few_scales)


def _assemble(name: str, preconditioner: Preconditioner, arguments: Options) -> Microcanonical:
    length, step_size = arguments.get("decoherence_length"), arguments["step_size"]
    purpose = "because `decoherence_length` is not None"
    seed = _check.Key(length is not None, purpose)(name, "key", arguments.get("key"))
    tuner = choose(name, arguments.get("tuner"), step_size)
    return Microcanonical(
        name=name,
        posterior=_call.posterior_of(name, arguments),
        step_size=_call.schedule(name, 1.0 if step_size is None else step_size),
        seed=None if length is None else seed,
        chosen={"tuner": tuner} if tuner.sets_step_size else {},
        preconditioner=preconditioner,
        momentum=Momentum(SCHEMES[arguments["integrator"]], length),
        reject_quantile=arguments.get("reject_quantile"),
        tuner=tuner,
    )


def sampler(
    fixed: Mapping[str, object] = _check.NOTHING, **constraints: _check.Constraint
) -> Callable[[Callable[_call.Arguments, Preconditioner]], _call.Maker[_call.Arguments]]:
    """Make a sampler of a function that returns its preconditioner, see `_call.sampler`."""
    return _call.sampler(_assemble, CONSTRAINTS | constraints, fixed)
