"""The dynamics of SMILE, pSMILE and MCLMC: how a call of `update` passes through the stages.

For the six names of a gradient on this way see `docs/architecture.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_smile import _check, _noise, _tree, _xla, potential
from optax_smile._places import Places
from optax_smile._sums import Sketch
from optax_smile._types import Options, T
from optax_smile._warn import warn
from optax_smile.samplers import _transformation
from optax_smile.samplers._chain import ChainState
from optax_smile.samplers._transformation import Arguments, Call, Dynamics, Maker
from optax_smile.stages import evidence, probe, rejection, scale
from optax_smile.stages.evidence import EvidenceState
from optax_smile.stages.integrator import (
    SCHEMES,
    Euclidean,
    Heading,
    IntegratorName,
    Momentum,
    MomentumState,
    Noise,
    Norm,
    step_start,
)
from optax_smile.stages.scale import Preconditioner, ScaleState
from optax_smile.stages.spectral import Spectral
from optax_smile.stages.step_size import Tuner, TunerState, choose

NormName = Literal["euclidean", "spectral"]
CONSTRAINTS = {
    "step_size": _check.STEP_SIZE | None,
    "integrator": _check.OneOf(IntegratorName),
    "tuner": _check.kind(Tuner, "a tuner such as angle_tuner()") | None,
    "reject_quantile": _check.PROBABILITY | None,
    "decoherence_length": _check.POSITIVE | _check.OneOf(Noise) | None,
    "norm": _check.kind(Norm, "an optax_smile.Norm") | _check.OneOf(NormName),
    "matrices": _check.Function("(params)") | None,
}


class MicrocanonicalState(NamedTuple):
    """State of the dynamics of `smile`, `psmile` and `mclmc`.

    The state of the preconditioner is None if the scale is one.
    """

    preconditioner: ScaleState | None
    momentum: MomentumState
    tuner: TunerState
    evidence: EvidenceState

    @property
    def like_params(self) -> optax.Params:
        """A tree like the parameters."""
        return self.momentum.direction

    @property
    def gradients_per_step(self) -> int:
        """Gradients, and calls of `update`, per step."""
        return 1 if self.momentum.anchor is None else 2

    def stats(self) -> dict[str, jax.Array]:
        """Return the fields of `Stats` that only the dynamics know."""
        history, matrix = self.evidence, getattr(self.preconditioner, "matrix", None)
        width = {}
        if matrix is not None and matrix.entries is not None:
            width["width"] = matrix.last_width
        return width | {
            "step_size": self.momentum.step_length,
            "energy_mean": history.energies.energy_mean,
            "energy_std": history.energies.energy_std,
            "num_outlying": history.turns.num_outlying,
            "change_share": history.changes.share(),
            "descent": history.descent.descent_score,
            "on_its_way": history.descent.on_its_way,
        }

    def last_accepted(self, params: T) -> T:
        """Start of the open step."""
        return step_start(self.momentum, params, scale.inverse_of(self.preconditioner))


class Reading(NamedTuple):
    """Results of the first pass over the arrays, and the explicit noise of the call.

    `fingerprint` belongs to the gradient that the loop passed. `arrived` has the entries that
    `probe` compares, `moved` their displacement by the last drift. `heading` is the momentum after
    the kick that closes the step, `end` describes this kick. `key` is the key of the next call.
    """

    sums: evidence.Sums
    sketch: Sketch
    fingerprint: jax.Array
    arrived: list[jax.Array]
    moved: list[jax.Array]
    noise: optax.Updates | None
    key: jax.Array | None
    heading: Heading
    end: evidence.StepEnd


Chain = ChainState[MicrocanonicalState]


class Decision(NamedTuple):
    """Decisions of a call: `reject`, the heading of the next drift, the weight of the gradient.

    `state` is the state after the call, except for the arrays that `move` writes.
    """

    reject: jax.Array
    heading: Heading
    weight: evidence.GradientWeight
    state: Chain


@dataclass(frozen=True, kw_only=True, eq=False)
class Microcanonical(Dynamics[MicrocanonicalState]):
    """Dynamics at constant speed, in which gradients turn the direction."""

    preconditioner: Preconditioner[Any]
    momentum: Momentum
    reject_quantile: float | None
    tuner: Tuner[Any]

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

    def is_elementwise(self, state: Chain) -> bool:
        """See `Dynamics`."""
        scaling = self.preconditioner
        if not (scaling.is_elementwise or type(scaling) is Preconditioner):
            return False
        inverse_scale = scale.inverse_of(state.dynamics.preconditioner)
        return self.momentum.norm.is_elementwise and not isinstance(inverse_scale, _tree.Matrix)

    def process(self, call: Call, state: Chain) -> tuple[optax.Updates, Chain]:
        """Read, decide and move."""
        if call.value is None and (self.tuner.uses_energy or self.reject_quantile is not None):
            warn(
                f"`{self.name}.update` got no loss. Without it, `quantile_tuner` does not adapt the"
                " step size, and `reject_quantile` rejects only non-finite steps. Pass `value=loss`"
                " to `update`."
            )
        reading = self.read(call, state)
        decision = self.decide(call, state, reading)
        call, state, decision = _xla.second_pass(call, state, decision)
        return self.move(call, state, reading.noise, decision)

    def read(self, call: Call, state: Chain) -> Reading:
        """Compute all sums that the decision needs in one pass over memory, and close the step."""
        before, scaling = state.dynamics.momentum, state.dynamics.preconditioner
        posterior, updates, params, places = call.posterior, call.updates, call.params, call.places
        key, noise_key = self.split(state.key)
        noise = None if noise_key is None else _noise.isotropic_like(noise_key, params, places)
        gradient = potential.gradient(posterior, updates, params)
        inverse_scale, u = scale.inverse_of(scaling), before.direction
        whitened = scale.whiten(scaling, gradient)
        deviation = self.preconditioner.deviation(scaling, gradient)
        pairs = {
            "direction_square": (u, u),
            "direction_dot_whitened": (u, whitened),
            "whitened_square": (whitened, whitened),
            "params_square": (params, params),
            "updates_square": (updates, updates),
        }
        if deviation is not None:
            pairs["deviation_square"] = deviation, deviation
        if noise is not None:
            if not _noise.has_signs(noise):
                pairs["noise_square"] = noise, noise
            pairs |= {"noise_dot_direction": (noise, u), "noise_dot_whitened": (noise, whitened)}
        terms = {name: jax.tree.map(jnp.multiply, *pair) for name, pair in pairs.items()}
        # The last drift added as much to the prior's energy as its reverse would subtract.
        back = jax.tree.map(jnp.negative, self.momentum.last_drift(before, inverse_scale))
        added = potential.prior_terms(posterior, params, back)
        terms["prior_change"] = jax.tree.map(jnp.negative, added)
        sums, sketch, fingerprint = evidence.measure(terms, updates, call.passed, whitened, places)
        if noise is not None and _noise.has_signs(noise):
            square = jnp.full_like(sums.noise_square, _tree.size(noise))
            sums = sums._replace(noise_square=square)
        width, rate_square = self.preconditioner.width(scaling), None
        if width is not None:
            square = state.dynamics.evidence.changes.mean_gradient_square
            rate_square = jnp.where(jnp.isfinite(width), square, 0)
        heading, end = self.momentum.close(before, whitened, sums, rate_square)
        arrived, moved = probe.entries(params, places), self._moved(before, inverse_scale, places)
        return Reading(sums, sketch, fingerprint, arrived, moved, noise, key, heading, end)

    def _moved(
        self, before: MomentumState, inverse_scale: _tree.Scale, places: Places
    ) -> list[jax.Array]:
        """Displacement by the last drift of the entries for `probe`; XLA stores no drift."""
        if isinstance(inverse_scale, _tree.Matrix):
            return probe.entries(self.momentum.last_drift(before, inverse_scale), places)
        few = before._replace(direction=probe.entries(before.direction, places))
        few_scales = None if inverse_scale is None else probe.entries(inverse_scale, places)
        return jax.tree.leaves(self.momentum.last_drift(few, few_scales))

    def decide(self, call: Call, state: Chain, reading: Reading) -> Decision:
        """Accept or reject the step that ends, and choose the next, without reading trees."""
        momentum, sums, posterior = self.momentum, reading.sums, call.posterior
        before, history, end = state.dynamics.momentum, state.dynamics.evidence, reading.end

        # Accept or reject the step by the energy that it gained.
        error = evidence.energy_error(posterior, history.open_step, end, sums, call.value)
        is_outlier = history.energies.is_outlier(error, self.reject_quantile)
        base = jnp.asarray(self.step_size(state.num_steps), before.step_length.dtype)
        is_finite = error.all_finite & (base >= 0)
        guard, reject = rejection.judge(state.guardrail, is_finite, is_outlier, call.reject)
        probed = probe.look(state.probe, reading.arrived, reading.moved, reject)

        # Add the gradient to the averages, and choose the length of the next step.
        num_gradients = state.last_update.num_gradients
        measured = evidence.collect(
            history, end, error, sums, reading.sketch, base, num_gradients, ~reject
        )._replace(width=self.preconditioner.width(state.dynamics.preconditioner))
        tuned = self.tuner.update(state.dynamics.tuner, measured)
        length = base * tuned.step_size_factor * guard.step_backoff

        # Open the next step: noise, a turn of the direction, and the first kick.
        heading = momentum.diffuse(end, reading.heading, sums, measured, posterior.temperature)
        heading, opening_kick = momentum.open(end, heading, length)
        after = momentum.proceed(before, heading, length, reject)
        opened = history.open_step.advance(end, opening_kick, sums, call.value)
        kept = opened, _tree.count(state.num_steps, end.opens_step)
        rejected = history.open_step, state.num_steps
        open_step, num_steps = optax.tree.where(reject, rejected, kept)

        scale_stays = self.preconditioner.stays(state.dynamics.preconditioner, measured.weight)
        is_comparable = measured.changes.is_comparable & scale_stays
        averages = EvidenceState(
            open_step=open_step,
            energies=history.energies.observe(error, self.reject_quantile),
            turns=measured.turns,
            changes=measured.changes._replace(is_comparable=is_comparable),
            descent=measured.descent,
        )
        state = state._replace(
            dynamics=state.dynamics._replace(momentum=after, tuner=tuned, evidence=averages),
            guardrail=guard,
            probe=probed,
            num_steps=num_steps,
            key=reading.key,
            last_update=state.last_update.proceed(
                posterior.temperature,
                call.value,
                reject,
                reading.fingerprint,
                energy_change=jnp.where(error.known, error.change, 0),
                has_energy=error.known,
                step_end=end.is_end,
                below_resolution=after.step_length < measured.resolution,
            ),
        )
        return Decision(reject, heading, measured.weight, state)

    def move(
        self, call: Call, state: Chain, noise: optax.Updates | None, decision: Decision
    ) -> tuple[optax.Updates, Chain]:
        """Write all arrays in a second pass, which computes the gradient of the energy again.

        A rejected call returns to where its step began.
        """
        before, scaling = state.dynamics.momentum, state.dynamics.preconditioner
        reject, dynamics = decision.reject, decision.state.dynamics
        gradient = potential.gradient(call.posterior, call.updates, call.params)
        whitened = scale.whiten(scaling, gradient)
        after = self.momentum.turn(
            reject, before, dynamics.momentum, decision.heading, whitened, noise, call.params
        )
        drift = self.momentum.last_drift(before, None)
        drift = jax.tree.map(lambda x: jnp.where(reject, 0, x), drift)
        scaling = self.preconditioner.observe(
            scaling, gradient, decision.weight, after.direction, drift
        )
        inverse_scale = scale.inverse_of(scaling)
        displacement = self.momentum.displace(reject, before, after, call.params, inverse_scale)
        dynamics = dynamics._replace(preconditioner=scaling, momentum=after)
        return displacement, decision.state._replace(dynamics=dynamics)


def _assemble(name: str, preconditioner: Preconditioner[Any], arguments: Options) -> Microcanonical:
    momentum = _momentum(preconditioner, arguments)
    length, step_size = momentum.decoherence_length, arguments["step_size"]
    purpose = "because `decoherence_length` is not None"
    seed = _check.Key(length is not None, purpose)("key", arguments.get("key"))
    tuner = choose(arguments.get("tuner"), step_size, momentum.norm.angle)
    return Microcanonical(
        name=name,
        posterior=_transformation.posterior_of(arguments),
        step_size=_transformation.schedule(1.0 if step_size is None else step_size),
        seed=None if length is None else seed,
        chosen={"tuner": tuner} if tuner.sets_step_size else {},
        preconditioner=preconditioner,
        momentum=momentum,
        reject_quantile=arguments.get("reject_quantile"),
        tuner=tuner,
    )


def _momentum(preconditioner: Preconditioner[Any], arguments: Options) -> Momentum:
    scheme, length = SCHEMES[arguments["integrator"]], arguments.get("decoherence_length")
    norm, matrices = arguments.get("norm", "euclidean"), arguments.get("matrices")
    if matrices is not None and norm != "spectral":
        _check.fail("matrices", "None unless norm='spectral'", _check.show(matrices))
    rule = f"None together with norm={norm!r}"
    if isinstance(norm, str):
        norm = Spectral(matrices) if norm == "spectral" else Euclidean()
    if length is not None and type(norm).diffuse is Norm.diffuse:
        advice = "Isotropic noise would change what a chain with that norm samples."
        _check.fail("decoherence_length", rule, repr(length), advice)
    if type(preconditioner) is not Preconditioner and not norm.is_elementwise:
        advice = "With this norm parameters move together, and a scale would change that."
        _check.fail("preconditioner", rule, preconditioner, advice)
    return Momentum(scheme, norm, length)


def sampler(
    fixed: Mapping[str, object] = _check.NOTHING, **constraints: _check.Constraint
) -> Callable[[Callable[Arguments, Preconditioner[Any]]], Maker[Arguments]]:
    """Make a sampler from a function that returns its preconditioner."""
    return _transformation.sampler(_assemble, CONSTRAINTS | constraints, fixed)
