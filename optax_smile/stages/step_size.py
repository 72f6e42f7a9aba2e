"""Choice of the step size from the evidence of the last step.

A tuner's state has the field `step_size_factor`; the step size is step_size(count) times this
factor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp

from optax_smile import _check
from optax_smile._types import StepSize
from optax_smile.stages.evidence import LARGEST_RATIO, SMALLEST_STEP, Evidence

# Angle in radians by which the change of the gradients turns the momentum in a step, and its factor
# if the change is as large as for independent noise.
ANGLE = 0.06
NOISE_PART = 0.5
# Largest angle for a known width of the posterior, with noisy and with noise-free gradients, and
# the angle while a chain is on its way.
WIDEST_ANGLE, CLEAN_ANGLE, ANGLE_ON_THE_WAY = 0.25, 0.35, 1.0
# Largest angle by which a whole gradient may turn the momentum.
LARGEST_ANGLE = 1.0
# In a round posterior of known width, longer steps are accurate: limits for large gradients are
# this many times larger, since shorter steps for large gradients weaken the pull to the mode.
SLACK = 3.0
# Each step of `angle_tuner` is at most this many times as long as the one before.
GROWTH = 10.0


class TunerState(Protocol):
    """State of a tuner."""

    @property
    def step_size_factor(self) -> jax.Array:
        """Factor of the user's step size, scalar > 0."""
        ...


S = TypeVar("S", bound=TunerState)


class Tuner(Generic[S]):
    """A rule for the step size.

    For a rule of your own, inherit from it, preferably as a frozen dataclass, override `update`,
    and `init` if the state has more fields than `step_size_factor`. Both are pure functions that
    JAX can trace. Pass an instance as `tuner=` to `smile`, `psmile` or `mclmc`.

    Attributes:
        name: name of the function that builds the tuner.
        uses_energy: whether it needs the `value` of a loop.
        sets_step_size: whether it finds the step size by itself, so that users pass none.

    Example:
        >>> import optax_smile
        >>> class Halving(optax_smile.Tuner):
        ...     name = "halving"
        ...     def update(self, state, evidence):
        ...         shrinks = (evidence.num_gradients + 1) % 10_000 == 0
        ...         factor = state.step_size_factor
        ...         return state._replace(step_size_factor=factor * (1 - 0.5 * shrinks))
        >>> sampler = optax_smile.psmile(1e-2, num_data=100, tuner=Halving(), key=0)
    """

    name = "tuner"
    uses_energy = False
    sets_step_size = False

    def init(self, dtype: jnp.dtype) -> S | FactorState:
        """Return the initial state, with numbers in the precision of the parameters."""
        return FactorState(jnp.ones((), dtype))

    def update(self, state: S, evidence: Evidence) -> S:
        """Return the next state.

        Args:
            state: before the call.
            evidence: scalars about the call, among them `error.change`, the energy gained by the
                step that ended, in nats; `turns.mean_turn_rate`, the average angle per unit length
                by which gradients turn the momentum; `base`, the user's step size;
                `num_gradients`, the calls so far.
        """
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{x}={value!r}' for x, value in vars(self).items())})"


class FactorState(NamedTuple):
    """State of a tuner that needs only the factor.

    Attributes:
        step_size_factor: factor of the user's step size, scalar > 0. To give each chain its own
            step size, use `optax.tree.set(state, step_size_factor=...)`.
    """

    step_size_factor: jax.Array


@dataclass(frozen=True, repr=False)
class Fixed(Tuner[FactorState]):
    """Keep the user's step size."""

    def update(self, state: FactorState, evidence: Evidence) -> FactorState:
        """Return the state unchanged."""
        return state


@dataclass(frozen=True, repr=False)
class QuantileTuner(Tuner[FactorState]):
    """The rule of `quantile_tuner`, with its arguments."""

    adapt_probability: float
    adapt_rate: float
    adapt_steps: int | None
    name = "quantile_tuner"
    uses_energy = True

    def update(self, state: FactorState, evidence: Evidence) -> FactorState:
        """Compare the energy error with earlier ones."""
        low, high = self.adapt_probability / 3, 1 - 2 * self.adapt_probability / 3
        factor = state.step_size_factor
        energy, averages = jnp.abs(evidence.error.change), evidence.energies
        raised = jnp.where(energy < averages.quantile(low), 1 + self.adapt_rate, 1)
        lowered = jnp.where(energy > averages.quantile(high), 1 - self.adapt_rate, raised)
        floor = jnp.minimum(evidence.resolution / evidence.base, factor)
        last = math.inf if self.adapt_steps is None else self.adapt_steps
        adapts = evidence.error.known & averages.settled() & (evidence.num_gradients < last)
        adapted = jnp.maximum(factor * lowered, floor)
        return FactorState(jnp.where(adapts, adapted, factor).astype(factor.dtype))


@_check.arguments(
    adapt_probability=_check.PROBABILITY,
    adapt_rate=_check.PROBABILITY,
    adapt_steps=_check.Whole(0, traced=True) | None,
)
def quantile_tuner(
    adapt_probability: float = 0.1, adapt_rate: float = 0.02, adapt_steps: int | None = None
) -> Tuner[FactorState]:
    """Raise the step size after small energy errors and lower it after large ones.

    With the quantile function Q of a Gamma distribution fitted to the errors so far,
    factor <- factor (1 + adapt_rate) if |dE| < Q(a / 3), factor (1 - adapt_rate) if
    |dE| > Q(1 - 2 a / 3), a = adapt_probability.

    The rule compares errors with each other, not with a target. It has no fixed point: with
    mini-batch energies the step size falls as long as it adapts (by about 1e-4 per step in our
    measurements). `adapt_steps` ends that.

    Args:
        adapt_probability: share of the steps that change the step size, in (0, 1).
        adapt_rate: relative change, in (0, 1).
        adapt_steps: number of calls of `update` after which the factor no longer changes, >= 0;
            None: never.

    Returns:
        A tuner for the argument `tuner` of `smile` and `psmile`.

    Raises:
        ValueError: an argument out of range.

    Cost: a few scalars; no gradient. Does nothing in a loop that does not pass `value`.

    Example:
        >>> import optax_smile
        >>> tuner = optax_smile.quantile_tuner(adapt_steps=5_000)
        >>> sampler = optax_smile.smile(
        ...     1e-2, num_data=50_000, tuner=tuner, decoherence_length=None
        ... )

    Source: Sommer et al., ICML 2026, equation of the adaptive step size and appendix on the
    Wilson-Hilferty quantiles. Differences from the paper: no adaptation below the resolution of
    float32.
    """
    return QuantileTuner(adapt_probability, adapt_rate, adapt_steps)


class AngleState(NamedTuple):
    """State of `angle_tuner`.

    Attributes:
        step_size_factor: factor of the user's step size, scalar > 0; 0 before the first call.
        usual_length: step size before the gradient of this call shortened it, scalar; 0 likewise.
    """

    step_size_factor: jax.Array
    usual_length: jax.Array


@dataclass(frozen=True, repr=False)
class AngleTuner(Tuner[AngleState]):
    """The rule of `angle_tuner`, with its arguments."""

    angle: float | None
    adapt_steps: int | None
    name = "angle_tuner"
    sets_step_size = True

    def init(self, dtype: jnp.dtype) -> AngleState:
        """Return the state before the first gradient."""
        return AngleState(jnp.zeros((), dtype), jnp.zeros((), dtype))

    def _angle(
        self, evidence: Evidence, rate: jax.Array, share: jax.Array, noisiness: jax.Array
    ) -> float | jax.Array:
        """Return the angle at which the momentum lasts for twice the width of the posterior.

        Let W be the width, and n the ratio of noise to signal in the squared gradients. With
        matched explicit noise, the momentum lasts for 2 W if the steps are W / (2 n) long. In a
        regression with mostly noise, this is the angle 1 / sqrt(batches in a pass). With larger
        angles, permutations would narrow the posterior. If there is little noise, the accuracy of
        the steps limits the angle: at `CLEAN_ANGLE` they are .7 W long.

        In round coordinates, n = W^2 |g|^2 / (d - 1)^2 - 1. With little noise, coordinates become
        round slowly; n is then at most S / (1 - S), where S is `share`, see `ChangeAverage.share`.
        `noisiness`, in [0, 1], grows with S.
        """
        if self.angle is not None:
            return self.angle
        if evidence.width is None:
            return ANGLE
        is_known = jnp.isfinite(evidence.width)
        width, smallest = jnp.where(is_known, evidence.width, 1), jnp.finfo(rate.dtype).eps
        noise = width**2 * rate**2 / share - 1
        clean = jnp.minimum(noise, share / jnp.maximum(1 - share, smallest))
        noise = jnp.maximum(clean + noisiness * (noise - clean), smallest)
        # Long steps are less accurate with few parameters, and if the curvature varies, which shows
        # in varying changes unless these are noise.
        varies = jnp.maximum(evidence.changes.kurtosis, 1) ** jnp.maximum(1 - share, 0)
        widest = CLEAN_ANGLE * (1 - 2 / evidence.num_parameters) / varies
        widest = jnp.maximum(widest, ANGLE)
        widest += noisiness * (WIDEST_ANGLE - widest)
        angle = width / (2 * noise) * rate / self._per_angle(share)
        angle = jnp.where(is_known, jnp.clip(angle, ANGLE, widest), ANGLE)
        return jnp.where(evidence.descent.on_its_way, ANGLE_ON_THE_WAY, angle)

    @staticmethod
    def _per_angle(share: jax.Array) -> jax.Array:
        """Factor of the angle: 1/2 if gradients are noise."""
        return jnp.minimum(NOISE_PART / jnp.maximum(share, NOISE_PART) ** 2, 1)

    def update(self, state: AngleState, evidence: Evidence) -> AngleState:
        """Follow the average change of the gradients."""
        turn_rate, changes = evidence.turns.mean_turn_rate, evidence.changes
        change, resolution = jnp.sqrt(changes.mean_change_square), evidence.resolution
        is_finite = evidence.error.all_finite

        def over(angle, rate):
            return angle / jnp.where(rate > 0, rate, angle)

        # Use whole gradients if steps are too short to change a gradient, or they would stay short.
        known = state.usual_length >= SMALLEST_STEP * resolution
        known &= changes.num_changes > 0
        share = jnp.where(known, jnp.nan_to_num(changes.share(), nan=1.0), 1)
        per_angle = self._per_angle(share)
        rate = jnp.where(known, change, turn_rate)
        noisiness = jnp.minimum((1 - per_angle) / (1 - NOISE_PART), 1)
        angle = per_angle * self._angle(evidence, rate, share, noisiness)
        # Move half way from the last length on a logarithmic scale: the change may be proportional
        # to the length, and a full correction would overshoot forever.
        length = over(angle, rate)
        wanted = jnp.where(known, jnp.sqrt(state.usual_length) * jnp.sqrt(length), length)
        wanted = jnp.minimum(wanted, over(LARGEST_ANGLE, turn_rate))
        shortest = jnp.maximum(resolution, jnp.finfo(wanted.dtype).eps)
        longest = jnp.maximum(shortest, GROWTH * state.step_size_factor * evidence.base)
        longest = jnp.where(evidence.turns.num_turns > 0, longest, shortest)
        last = math.inf if self.adapt_steps is None else self.adapt_steps
        adapts = is_finite & (evidence.num_gradients < last)
        usual = jnp.maximum(jnp.minimum(wanted, longest), resolution)
        usual = jnp.where(adapts, usual, jnp.maximum(state.usual_length, shortest))

        slack = 1.0
        if self.angle is None and evidence.width is not None:
            slack = jnp.where(jnp.isfinite(evidence.width), SLACK, 1)
        turned = jnp.where(is_finite & (evidence.weight.trust > 0), evidence.turn_rate, 0)
        largest = slack * jnp.minimum(LARGEST_RATIO * usual * turn_rate, LARGEST_ANGLE)
        length = jnp.where(turned > 0, jnp.minimum(usual, over(largest, turned)), usual)
        changed = jnp.where(is_finite & known, evidence.change_rate, 0)
        largest = slack * LARGEST_RATIO * usual * change
        length = jnp.where(changed > 0, jnp.minimum(length, over(largest, changed)), length)
        return AngleState((length / evidence.base).astype(wanted.dtype), usual.astype(wanted.dtype))


@_check.arguments(
    angle=_check.Real(0, math.pi / 2, open="low") | None,
    adapt_steps=_check.Whole(1, traced=True) | None,
)
def angle_tuner(angle: float | None = None, adapt_steps: int | None = None) -> Tuner[AngleState]:
    """Choose steps in which the change of the gradients turns the momentum by a given angle.

        step size = angle min(1, 1 / (2 S^2)) / r,    r = |g - g_before| / sqrt(2) / (d - 1)
        S = |g - g_before|^2 / (2 |g|^2)

    with the gradients g, in scaled coordinates, at the ends of successive steps. The squares are
    averages over about the last quarter of all steps. If gradients are pure noise, S = 1, and a
    gradient turns the momentum by half the angle. If they have no noise, the change is curvature
    times step size, and the rule finds the longest step that still follows the curve. It needs no
    first guess, no unit and no energy. In detail:

    - Each step moves the step size half way to the rule, on a logarithmic scale: the change grows
      with the step, and a full correction would overshoot forever.
    - A whole gradient turns the momentum by at most 1 radian, and a gradient or its change by at
      most three times the average: a large gradient, or change, shortens its own step at once.
      Without `angle`, both limits are three times as large once the width (see below) is known.
      Only the part orthogonal to the momentum counts, |g| / (d - 1) max(1 - max(p, 0)^2, .03) with
      the cosine p between the momentum and -g: on the way down to a mode a gradient is large but
      hardly turns the momentum.
    - Gradients are compared across one step and on one scale. The change across a rejected step or
      a new scale of `psmile` does not count, nor that of a step shorter than 30 times the shortest
      step that moves the parameters in their precision.
    - The first step is the shortest that moves the parameters, and each is at most ten times as
      long as the one before. Until a change is known, r is the average of |g| / (d - 1) and S = 1.

    Args:
        angle: angle by which the change of the gradients turns a momentum orthogonal to it, in
            radians, in (0, pi / 2]; half of it if gradients are noise. None: 0.06. Where `psmile`
            uses a matrix because there are few parameters, and knows the width W of the posterior,
            it is the angle at which the momentum lasts for 2 W: at least 0.06, and at most 0.25 if
            gradients are noise. If they are not, it is at most 0.35 (1 - 2 / d) k^(S - 1), where k
            is the kurtosis of the change: steps of up to 0.7 W if the curvature does not vary.
            While the chain is on its way the angle is 1. With larger angles posteriors of few
            parameters mix faster. But if each pass of n batches is a permutation of the data, and
            gradients are mostly noise, variances are underestimated by a fraction of about 0.04 n
            angle^2, at most 0.25.
        adapt_steps: number of calls of `update` after which the step size no longer adapts (large
            gradients still shorten their own step), >= 1; None: never.

    Returns:
        A tuner for the argument `tuner` of `smile` and `psmile`, which then take no `step_size`.

    Raises:
        ValueError: an argument out of range.

    Cost: a sketch that estimates the change: about 1.6 % of the size of leaves of 16,384 or more
    entries, the full size of leaves of at most 1,024; no gradient, no `value`.

    Example:
        >>> import jax, optax_smile
        >>> tuner = optax_smile.angle_tuner(0.03)
        >>> sampler = optax_smile.smile(num_data=50_000, tuner=tuner, key=jax.random.key(0))

    Source: ours, see benchmarks/notes/which-angle.md. The sketch: Alon, Matias and
    Szegedy, The space complexity of approximating the frequency moments, 1996.
    """
    return AngleTuner(angle, adapt_steps)


def choose(
    tuner: Tuner[Any] | None, step_size: StepSize | None, angle: float | None = None
) -> Tuner[Any]:
    """Return the tuner for the arguments `tuner` and `step_size` of a sampler."""
    if tuner is None:
        return angle_tuner(angle) if step_size is None else Fixed()
    if tuner.sets_step_size and step_size is not None:
        rule = "None or a tuner such as `quantile_tuner(...)` if `step_size` is given"
        advice = "This tuner chooses the step size itself: leave out `tuner` or `step_size`."
        _check.fail("tuner", rule, tuner, advice)
    if not tuner.sets_step_size and step_size is None:
        rule = f"a number > 0 or a schedule, from which {tuner.name} starts"
        _check.fail("step_size", rule, None)
    return tuner
