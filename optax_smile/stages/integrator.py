"""The microcanonical integrator: a momentum p over the whole parameter tree.

A **kick** turns p by the gradient g of the energy, a **drift** moves the parameters along the
velocity v = grad ||p||, which the state calls `direction`. The product of g and v is a **slope**.
`Norm` has the code that depends on the norm of p, `Momentum` the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_smile import _check, _check_trees, _paths, _sums, _tree
from optax_smile._types import T
from optax_smile.stages.evidence import Evidence, StepEnd, Sums, turn_rate


class Scheme(NamedTuple):
    """One step as fractions of the step size: kick, drift, kick, drift, ..., kick.

    Attributes:
        kicks: lengths of the kicks, one more than drifts, sum 1.
        drifts: lengths of the drifts, sum 1. Each takes one gradient. One or two, since the number
            is read from the state, see `gradients_per_step`.
        heat: coefficient of the widening of a posterior by long steps, see `Momentum.kick_factor`.
    """

    kicks: tuple[float, ...]
    drifts: tuple[float, ...]
    heat: float


# Omelyan, Mryglod, Folk 2003, the minimal-norm scheme of second order with five stages.
MINIMAL_NORM_KICK = 0.1931833275037836
SCHEMES = {
    "leapfrog": Scheme(kicks=(0.5, 0.5), drifts=(1.0,), heat=1 / 12),
    "minimal_norm": Scheme(
        kicks=(MINIMAL_NORM_KICK, 1 - 2 * MINIMAL_NORM_KICK, MINIMAL_NORM_KICK),
        drifts=(0.5, 0.5),
        heat=0.0,
    ),
}
IntegratorName = Literal["leapfrog", "minimal_norm"]
# Rules for the decoherence length, see `Momentum.diffuse`.
Noise = Literal["matched", "turning"]
Decoherence = float | jax.Array | Noise
# The squared angle of matched noise has the factor 1 + `DILUTION` / d: with few parameters, the
# gradient noise of a single one is a large part of the total, so more isotropic noise is needed. It
# is at most `MOST_DILUTED` times the squared angle by which whole gradients turn u.
DILUTION, MOST_DILUTED = 40, 2
# Bound on the exponent in half decoherence lengths; after as many, u is a new random direction.
FORGOTTEN = 40.0
# Smallest kick, an angle in radians, that visibly changes the velocity: after smaller ones, the
# change is mostly rounding. Largest increase of the log of the momentum's norm by a kick.
SMALLEST_KICK, LARGEST_GROWTH = 1e-2, 30.0
Number = float | jax.Array
Lengths = tuple[jax.Array, jax.Array]


class MomentumState(NamedTuple):
    """Position and momentum of the chain inside a step.

    Attributes:
        direction: velocity v of the last drift, a tree like the parameters.
        moving: False for a chain at rest, at the start and after a rejection; it has no momentum.
        drift_index: number of drifts since the step was opened; 0 if no step is open.
        step_length: step size of the open step; if none is open, of the next one.
        anchor: parameters at the start of the open step; None for an integrator with a single
            drift, since `direction` suffices to undo it.
        conjugate: momentum p; None for a Euclidean norm, where it equals the velocity.
    """

    direction: optax.Updates
    moving: jax.Array
    drift_index: jax.Array
    step_length: jax.Array
    anchor: optax.Params | None
    conjugate: optax.Updates | None


def step_start(state: MomentumState, params: T, inverse_scale: _tree.Scale) -> T:
    """Parameters at the start of the open step, given the scale of its drift; else `params`."""
    is_open = state.drift_index > 0
    if state.anchor is not None:
        return _paths.map_sampled(lambda x, at: jnp.where(is_open, x, at), state.anchor, params)
    drifted = drift(state.direction, jnp.where(is_open, state.step_length, 0), inverse_scale)
    return _paths.map_sampled(lambda move, x: x - move, drifted, params)


def drift(direction: optax.Updates, length: jax.Array, inverse_scale: _tree.Scale) -> optax.Updates:
    """Displacement of the parameters: length times v in whitened coordinates, divided by s.

    For the negative length it is the exact negative, by which `displace` undoes a step. It works
    entry by entry, also on parts of a tree.
    """
    moved = jax.tree.map(lambda u: (length * u).astype(u.dtype), direction)
    return _tree.scaled(moved, inverse_scale)


class Heading(NamedTuple):
    """The momentum of a call: a sum of the old one p, of e = -g / |g| and of explicit noise z.

    Attributes:
        moving: whether there is a momentum.
        turn_rate: angle per unit length by which the gradient g turns the momentum.
        turning_norm: see `evidence.StepEnd`.
        along_old: coefficient of p / `old_norm`.
        along_descent: coefficient of e.
        gradient_norm: length of g, nats per unit length.
        old_norm: norm of the tree p, 1 up to rounding.
        along_noise: coefficient of z, which is not normalized.
        cosine: cosine between the momentum and e, for closed forms.
        velocity: tree of the velocity; None if it equals the momentum.
        opening_energy: energy gained by the opening kick, if `Norm.close` computes it, nats.
    """

    moving: jax.Array
    turn_rate: jax.Array
    turning_norm: Number
    along_old: jax.Array
    along_descent: jax.Array
    gradient_norm: jax.Array
    old_norm: Number = 1.0
    along_noise: Number = 0.0
    cosine: Number = 0.0
    velocity: optax.Updates | None = None
    opening_energy: Number = 0.0


def over(number: Number, norm: Number) -> jax.Array:
    """Divide by a norm; 0 where the norm is 0."""
    return jnp.where(norm > 0, number / jnp.where(norm > 0, norm, 1), 0)


class Norm:
    """The norm ||p|| of a chain's momentum p. The chain moves with its gradient, the velocity v.

        theta' = v = grad ||p||,    p' = -||p|| grad U / (d - 1)

    With gradients of all data, this preserves the posterior for every norm. For a norm of your own,
    inherit from this class, override `velocity`, and pass an instance as `norm=` to `smile`, with
    `decoherence_length=None`. All methods are pure functions that JAX can trace.

    Attributes:
        is_elementwise: whether it treats all entries alike, in whichever leaf they are. Then small
            leaves may be joined, and `smile` accepts a preconditioner.
        angle: angle of the default tuner; None: the default of `angle_tuner`.

    Example:
        >>> import jax, jax.numpy as jnp, optax, optax_smile
        >>> class Signs(optax_smile.Norm):
        ...     def velocity(self, momentum):
        ...         length = optax.tree.size(momentum) ** 0.5
        ...         return jax.tree.map(lambda p: jnp.sign(p) / length, momentum)
        >>> sampler = optax_smile.smile(num_data=100, norm=Signs(), decoherence_length=None)
    """

    is_elementwise: ClassVar[bool] = False
    angle: ClassVar[float | None] = None

    def velocity(self, momentum: optax.Updates) -> optax.Updates:
        """Return grad ||p||, a tree like p; it is the same for p and 2 p, and 0 if p is 0.

        Called by `close`, and by `init` for its shapes. If its Euclidean length is one, step sizes
        are Euclidean lengths.
        """
        raise NotImplementedError

    def init(self, params: optax.Params) -> optax.Updates | None:
        """Return the initial momentum, 0; None if `close` needs no tree."""
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        rule = "a norm whose `velocity` takes and returns a tree like the parameters"
        with _check.called("smile"):
            found = _check.traced("norm", self.velocity, like, rule=rule)
            _check_trees.check_alike("norm.velocity", found, like, "params")
        return jax.tree.map(jnp.zeros_like, params)

    def close(
        self,
        momentum: optax.Updates | None,
        moving: jax.Array,
        whitened: optax.Updates,
        sums: Sums,
        lengths: Lengths,
    ) -> tuple[Heading, jax.Array]:
        """Kick after a drift; return the new momentum and the energy that the kick adds, nats.

        Called before `diffuse` and `open`, and before the step is accepted or rejected. Only this
        method computes trees. Here it also makes the kick that opens the next step, so that a call
        computes one velocity. The kicks of the total length s are p <- p - tau g / (d - 1) with
        dtau / ds = f(tau), the norm relative to the first. With the slopes of f at both ends, a and
        b = -<g, v> / (d - 1),

            tau = (exp(a s) - 1) / a,    f(t) = 1 + a t + (b - a) t^2 / (2 tau)

        to second order in s, and to all orders if g is along p. The slopes are the work of drifts
        along v, so the energy is conserved even if v is inexact; with f = <p, v> it would not be.
        If the chain is at rest, p becomes -g.

        Args:
            momentum: p after the last call, see `init`.
            moving: False for a chain at rest, which has no momentum.
            whitened: gradient g in the coordinates of the chain.
            sums: products of g, the velocity and the noise.
            lengths: lengths of this kick and of the opening kick, if the next step is as long as
                the last; 0 for no kick.
        """
        rest, (closing, opening) = _tree.size(whitened) - 1, lengths
        slope = -sums.direction_dot_whitened / rest

        def time_of(length: jax.Array) -> jax.Array:
            exponent = jnp.minimum(slope * length, LARGEST_GROWTH)
            is_zero = exponent == 0
            mean = jnp.expm1(exponent) / jnp.where(is_zero, 1, exponent)
            return length * jnp.where(is_zero, 1, mean)

        time, closing_time = time_of(closing + opening), time_of(closing)
        old, factor = jnp.where(moving, 1, 0), jnp.where(moving, time / rest, 1)
        new = jax.tree.map(lambda p, g: (old * p - factor * g).astype(p.dtype), momentum, whitened)
        velocity = self.velocity(new)
        pairs = (new, velocity), (whitened, velocity)
        norm, product = _sums.sums([jax.tree.map(jnp.multiply, *pair) for pair in pairs])
        scale, size = jnp.where(norm > 0, norm, 1), jnp.sqrt(sums.whitened_square)
        # Square of an angle per unit length, like |g|^2 / (d - 1)^2 for a Euclidean norm.
        bend = jnp.maximum(-product / rest - slope, 0) / jnp.where(time > 0, time, 1)

        def energy_at(at: jax.Array) -> jax.Array:
            return rest * jnp.where(moving, jnp.log1p(slope * at + bend * at**2 / 2), 0)

        is_known = moving & (bend > 0) & (time * size >= SMALLEST_KICK * rest)
        rate, energy = jnp.sqrt(jnp.where(is_known, bend, 1)), energy_at(closing_time)
        return Heading(
            moving=norm > 0,
            turn_rate=jnp.where(is_known, rate, turn_rate(sums, moving, rest)),
            turning_norm=jnp.where(is_known, size / rate, rest),
            along_old=old / scale,
            along_descent=factor * size / scale,
            gradient_norm=size,
            velocity=velocity,
            opening_energy=energy_at(time) - energy,
        ), energy

    def diffuse(self, heading: Heading, amplitude: jax.Array, sums: Sums) -> Heading:
        """Add explicit noise, `amplitude` times z; norms without this method have no noise.

        Called between kicks. Isotropic noise preserves the posterior only for the Euclidean norm.
        """
        raise NotImplementedError

    def open(self, heading: Heading, length: jax.Array) -> tuple[Heading, Number]:
        """Kick before a drift; return the new momentum and the energy that the kick adds, nats.

        Called last in every call, with length 0 inside a step. Here `close` includes this kick.
        """
        return heading, heading.opening_energy

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Euclidean(Norm):
    """The Euclidean norm: momentum and velocity are a unit vector u. Kicks need no other trees."""

    is_elementwise = True

    def init(self, params: optax.Params) -> None:
        """Return None: no other tree is needed."""

    def close(self, momentum, moving, whitened, sums, lengths) -> tuple[Heading, jax.Array]:
        """Kick in the same way as `open`."""
        cosine, rest = sums.cosine(moving), _tree.size(whitened) - 1
        before = Heading(
            moving=moving,
            turn_rate=turn_rate(sums, moving, rest),
            turning_norm=float(rest),
            along_old=jnp.where(moving, jnp.ones_like(cosine), 0),
            along_descent=jnp.zeros_like(cosine),
            gradient_norm=jnp.sqrt(sums.whitened_square),
            old_norm=jnp.sqrt(sums.direction_square),
            cosine=cosine,
        )
        return self.open(before, lengths[0])

    def diffuse(self, heading: Heading, amplitude: jax.Array, sums: Sums) -> Heading:
        """Replace u by (u + nu z) / |u + nu z|; by z / |z| if the chain is at rest."""
        amplitude = jnp.where(heading.moving, amplitude, 1)
        along_u = over(sums.noise_dot_direction, heading.old_norm)
        along_e = -over(sums.noise_dot_whitened, heading.gradient_norm)
        along_momentum = heading.along_old * along_u + heading.along_descent * along_e
        longer = amplitude * (2 * along_momentum + amplitude * sums.noise_square)
        norm = jnp.sqrt(jnp.where(heading.moving, 1, 0) + longer)
        return heading._replace(
            moving=jnp.ones_like(heading.moving),
            along_old=heading.along_old / norm,
            along_descent=heading.along_descent / norm,
            along_noise=amplitude / norm,
            cosine=jnp.clip((heading.cosine + amplitude * along_e) / norm, -1, 1),
        )

    def open(self, heading: Heading, length: jax.Array) -> tuple[Heading, jax.Array]:
        """Turn u towards e for a time `length`.

        u <- (u + (sinh D + p (cosh D - 1)) e) / (cosh D + p sinh D), p = e . u,
        D = length |g| / (d - 1). Written with z = exp(-D), which cannot overflow. u = 0 becomes e,
        and p = -1 stays (Robnik et al. 2023, Microcanonical Hamiltonian Monte Carlo; with the sign
        of e that the published code has, not the one of Sommer et al. 2026, appendix on the
        integrator). The energy is (d - 1) log(cosh D + p sinh D), computed without cancellation.
        Two kicks with one gradient are one kick of their total length.
        """
        delta = length * heading.gradient_norm / heading.turning_norm
        p, z = heading.cosine, jnp.exp(-delta)
        opposed = p <= -1
        denominator = jnp.where(opposed, 1, (1 + p) + (1 - p) * z * z)
        old = jnp.where(opposed, 1, 2 * z / denominator)
        descent = (-jnp.expm1(-2 * delta) + p * jnp.expm1(-delta) ** 2) / denominator
        descent = jnp.where(opposed, 0, descent)
        starts = ~heading.moving & (delta > 0)
        small = jnp.minimum(delta, 1)
        near = jnp.log1p(2 * jnp.sinh(small / 2) ** 2 + p * jnp.sinh(small))
        far = jnp.logaddexp(jnp.log((1 + p) / 2) + delta, jnp.log((1 - p) / 2) - delta)
        return heading._replace(
            moving=heading.moving | starts,
            along_old=jnp.where(starts, 0, old * heading.along_old),
            along_descent=jnp.where(starts, 1, old * heading.along_descent + descent),
            along_noise=jnp.where(starts, 0, old * heading.along_noise),
            cosine=jnp.where(starts, 1, jnp.clip(old * p + descent, -1, 1)),
        ), heading.turning_norm * jnp.where(delta < 1, near, far)


@dataclass(frozen=True)
class Momentum:
    """How a chain moves: at constant speed, turned by gradients and explicit noise.

    Attributes:
        scheme: the order of kicks and drifts.
        norm: of the momentum.
        decoherence_length: > 0, `"matched"` or `"turning"`; None: no explicit noise.
    """

    scheme: Scheme
    norm: Norm
    decoherence_length: Decoherence | None = None

    def init(self, params: optax.Params, step_length: jax.typing.ArrayLike) -> MomentumState:
        """Start at rest: `diffuse` draws a momentum, or the first kick makes one of -g."""
        zeros = jax.tree.map(jnp.zeros_like, params)
        return MomentumState(
            direction=zeros,
            moving=jnp.zeros((), bool),
            drift_index=jnp.zeros((), jnp.int32),
            step_length=jnp.asarray(step_length, _tree.dtype(params)),
            anchor=None if len(self.scheme.drifts) == 1 else jax.tree.map(jnp.copy, zeros),
            conjugate=self.norm.init(params),
        )

    def _length(self, fractions: tuple[float, ...], state: MomentumState) -> jax.Array:
        """Length at the current position inside the step; 0 if no step is open."""
        table = jnp.asarray((0.0, *fractions), state.step_length.dtype)
        return table[state.drift_index] * state.step_length

    def kick_factor(
        self, step_length: jax.Array, rate_square: jax.Array | None, num_parameters: int
    ) -> Number:
        """Compute a factor of the kicks that keeps long steps from widening the posterior.

        A kick turns u by less than its length times the gradient, since u cannot turn past e. The
        leapfrog then acts as if the temperature were higher by the fraction (1 + 2 / d) k^2 / 12,
        where k^2 is the mean square of eps |g| / d. In a round Gaussian with isotropic noise this
        is the leading error of the variances. For `"minimal_norm"` it is negligible. `step_length`
        is eps, `rate_square` is the mean square of |g| / (d - 1), if known.
        """
        if rate_square is None or not self.scheme.heat or not isinstance(self.norm, Euclidean):
            return 1.0
        relative = (1 - 1 / num_parameters) ** 2 * (1 + 2 / num_parameters)
        return 1 + self.scheme.heat * relative * jnp.minimum(rate_square * step_length**2, 1)

    def last_drift(self, state: MomentumState, inverse_scale: _tree.Scale) -> optax.Updates:
        """Displacement of the drift before this call; zero if no step is open."""
        return drift(state.direction, self._length(self.scheme.drifts, state), inverse_scale)

    def close(
        self,
        state: MomentumState,
        whitened: optax.Updates,
        sums: Sums,
        rate_square: jax.Array | None,
    ) -> tuple[Heading, StepEnd]:
        """Kick after a drift, at the end of a step or inside it; no kick if no step is open.

        For `rate_square` see `kick_factor`.
        """
        num_parameters, num_drifts = _tree.size(state.direction), len(self.scheme.drifts)
        length = self._length(self.scheme.kicks[1:], state)
        length *= self.kick_factor(state.step_length, rate_square, num_parameters)
        opening = self._length((*[0.0] * (num_drifts - 1), self.scheme.kicks[0]), state)
        opens_step = state.drift_index % num_drifts == 0
        if num_drifts == 1:
            # A constant lets the compiler remove code for calls inside a step.
            opens_step = jnp.ones_like(opens_step)
        given = state.conjugate, state.moving, whitened, sums
        heading, kinetic_change = self.norm.close(*given, (length, opening))
        drifted = self._length(self.scheme.drifts, state)
        return heading, StepEnd(
            is_end=state.drift_index == num_drifts,
            opens_step=opens_step,
            kinetic_change=kinetic_change,
            step_length=state.step_length,
            turn_rate=heading.turn_rate,
            cosine=sums.cosine(state.moving),
            largest_fall=drifted * heading.gradient_norm,
            turning_norm=heading.turning_norm,
            rate_square=rate_square,
            num_parameters=num_parameters,
        )

    def diffuse(
        self, end: StepEnd, heading: Heading, sums: Sums, measured: Evidence, temperature: Number
    ) -> Heading:
        """Add explicit isotropic noise if a step has just ended; draw p if the chain is at rest.

        u <- (u + nu z) / |u + nu z|, nu^2 = (exp(x) - 1) / d, z of covariance I
        (Robnik and Seljak 2024, Fluctuation without dissipation). Here eps is the step size, and R,
        r and F are the rates of `Evidence.rates`:

        | decoherence_length | x                                                        |
        |--------------------|----------------------------------------------------------|
        | a number L         | 2 eps / L                                                |
        | `"turning"`        | 2 eps R, so L is the radius of the curve that u follows  |
        | `"matched"`        | (eps min(T, 1))^2 min((1 + 40 / d) r^2, 2 R^2) + 2 eps F |

        F is 0 unless the width of the posterior is known. It shortens the memory of the momentum if
        gradients have little noise. Matched noise decreases with the temperature T, since it raises
        the loss in all directions: cold chains explore by the noise of the gradients. Noise between
        the kicks of one step would add an energy error of order eps^(3/2).
        """
        rule, size = self.decoherence_length, end.num_parameters
        if rule is None:
            return heading
        turns, changes, forgetting = measured.rates()
        length = jnp.where(end.is_end, end.step_length, 0)
        if isinstance(rule, str) and rule == "matched":
            diluted = (1 + DILUTION / size) * changes**2
            square = jnp.minimum(diluted, MOST_DILUTED * turns**2)
            exponent = square * (length * jnp.minimum(temperature, 1)) ** 2
            if isinstance(forgetting, jax.Array):
                exponent += 2 * length * forgetting
        elif isinstance(rule, str):
            exponent = 2 * length * turns
        else:
            exponent = 2 * length / rule
        amplitude = jnp.sqrt(jnp.expm1(jnp.minimum(exponent, FORGOTTEN)) / size)
        return self.norm.diffuse(heading, amplitude, sums)

    def open(
        self, end: StepEnd, heading: Heading, step_length: jax.Array
    ) -> tuple[Heading, Number]:
        """Make the first kick of a step; inside a step, none. Return also its energy, nats."""
        length = self.scheme.kicks[0] * step_length.astype(end.step_length.dtype)
        length *= self.kick_factor(step_length, end.rate_square, end.num_parameters)
        return self.norm.open(heading, jnp.where(end.opens_step, length, 0))

    def proceed(
        self, state: MomentumState, heading: Heading, step_length: jax.Array, reject: jax.Array
    ) -> MomentumState:
        """Count the next drift, or rest if the call is rejected, without changing the trees.

        `step_length` is for a step that begins here; an open step keeps its own.
        """
        drift_index = state.drift_index % len(self.scheme.drifts) + 1
        begins = reject | (drift_index == 1)
        step_length = jnp.where(begins, step_length, state.step_length)
        return state._replace(
            moving=heading.moving & ~reject,
            drift_index=jnp.where(reject, 0, drift_index),
            step_length=step_length.astype(state.step_length.dtype),
        )

    def turn(
        self,
        reject: jax.Array,
        before: MomentumState,
        after: MomentumState,
        heading: Heading,
        whitened: optax.Updates,
        noise: optax.Updates | None,
        params: optax.Params,
    ) -> MomentumState:
        """Write the trees of a heading; a rejected call keeps the old ones."""
        along_old = over(heading.along_old, heading.old_norm)
        descent = over(heading.along_descent, heading.gradient_norm)
        old = before.direction, before.conjugate
        p = before.direction if before.conjugate is None else before.conjugate
        p = jax.tree.map(lambda p, g: along_old * p - descent * g, p, whitened)
        if noise is not None:
            p = jax.tree.map(lambda p, z: p + heading.along_noise * z, p, noise)
        new = (p, None) if before.conjugate is None else (heading.velocity, p)
        new = jax.tree.map(lambda x, like: x.astype(like.dtype), new, old)
        direction, conjugate = optax.tree.where(reject, old, new)
        anchor = before.anchor
        if anchor is not None:
            anchor = optax.tree.where(after.drift_index == 1, params, anchor)
        return after._replace(direction=direction, conjugate=conjugate, anchor=anchor)

    def displace(
        self,
        reject: jax.Array,
        before: MomentumState,
        after: MomentumState,
        params: optax.Params,
        inverse_scale: _tree.Scale,
    ) -> optax.Updates:
        """Displacement that a call returns: the next drift, or the return to the step's start.

        The return of a single drift is the negative drift, by the same operations on the same
        numbers: a rejected call changes neither `direction` nor the scale. If it were computed in
        another way, it would miss the start by many units in the last place.
        """
        forth = self._length(self.scheme.drifts, after)
        if before.anchor is None:
            back = -self._length(self.scheme.drifts, before)
            return drift(after.direction, jnp.where(reject, back, forth), inverse_scale)
        back = jax.tree.map(jnp.subtract, step_start(before, params, inverse_scale), params)
        return optax.tree.where(reject, back, drift(after.direction, forth, inverse_scale))
