"""The microcanonical integrator: a momentum p over the whole parameter tree.

A **kick** turns p by the gradient g of the energy, a **drift** moves the parameters along the
velocity v = grad ||p||, which the state calls `direction`. The product of g and v is a **slope**.
`Norm` is what depends on the norm of p, `Momentum` what does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_smile import _check, _check_trees, _paths, _sums, _tree
from optax_smile._types import Tree
from optax_smile.stages.evidence import Evidence, StepEnd, Sums, turn_rate


class Scheme(NamedTuple):
    """One step as fractions of the step size: kick, drift, kick, drift, ..., kick.

    Attributes:
        kicks: lengths of the kicks, one more than drifts, sum 1.
        drifts: lengths of the drifts, sum 1. Each takes one gradient. At most two: whether it is
            one or two is read from the state, see `gradients_per_step`.
        heat: by how much long steps widen a posterior, see `Momentum.kick_factor`.
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
# The square of the angle of matched noise has the factor 1 + `DILUTION` / d: among few parameters
# the gradient noise of a single one is a large part of all, and more isotropic noise makes up for
# it. It is at most `MOST_DILUTED` times the square of the angle by which whole gradients turn u.
DILUTION, MOST_DILUTED = 40, 2
# After this many half decoherence lengths in one step, u is a fresh direction anyway.
FORGOTTEN = 40.0
# Angle, in radians, of the smallest kick that shows in the velocity: the change after a smaller one
# is mostly rounding. Most by which a kick raises the log of the momentum's norm.
SMALLEST_KICK, LARGEST_GROWTH = 1e-2, 30.0
Number = float | jax.Array
Lengths = tuple[jax.Array, jax.Array]


class MomentumState(NamedTuple):
    """Where the chain is inside a step.

    Attributes:
        direction: velocity v of the last drift, a tree like the parameters.
        moving: False at rest, at the start and after a rejection; the momentum is then ignored.
        drift_index: number of drifts done since the step was opened; 0 if no step is open.
        step_length: step size of the open step; if none is open, that proposed for the next one.
        anchor: parameters at the start of the open step; None for an integrator with a single
            drift, which can be undone with `direction`.
        conjugate: momentum p; None for a Euclidean norm, whose momentum is the velocity.
    """

    direction: optax.Updates
    moving: jax.Array
    drift_index: jax.Array
    step_length: jax.Array
    anchor: optax.Params | None
    conjugate: optax.Updates | None


def step_start(state: MomentumState, params: optax.Params, inverse_scale: _tree.Scale) -> Tree:
    """Parameters at the start of the open step, given the scale of its drift; else `params`."""
    is_open = state.drift_index > 0
    if state.anchor is not None:
        return _paths.map_sampled(lambda x, at: jnp.where(is_open, x, at), state.anchor, params)
    drifted = drift(state.direction, jnp.where(is_open, state.step_length, 0), inverse_scale)
    return _paths.map_sampled(lambda move, x: x - move, drifted, params)


def drift(direction: optax.Updates, length: jax.Array, inverse_scale: _tree.Scale) -> optax.Updates:
    """Displacement: length times v in whitened coordinates, over s in the parameters.

    That of a negative length is the exact negative, to the bit: `displace` undoes a step by it. It
    works entry by entry, also on parts of a tree.
    """
    moved = jax.tree.map(lambda u: (length * u).astype(u.dtype), direction)
    return _tree.scaled(moved, inverse_scale)


class Heading(NamedTuple):
    """The momentum of a call: a sum of the old one p, of e = -g / |g| and of explicit noise z.

    Attributes:
        moving: whether there is a momentum.
        turn_rate: angle per unit length by which the gradient g turns it.
        turning_norm: length of a gradient that turns it by one radian if it lies across it.
        along_old: coefficient of p over `old_norm`.
        along_descent: coefficient of e.
        gradient_norm: length of g, nats per unit length.
        old_norm: of the tree p, which rounding keeps off 1.
        along_noise: coefficient of z, which is no unit vector.
        cosine: between the momentum and e, for a closed form.
        velocity: tree of the velocity; None if that is the momentum.
        opening_energy: that `Norm.open` adds, if `Norm.close` has found it, nats.
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
    """Divide by a norm; 0 where that is 0."""
    return jnp.where(norm > 0, number / jnp.where(norm > 0, norm, 1), 0)


class Norm:
    """The norm ||p|| of a chain's momentum p. The chain moves with its gradient, the velocity v.

        theta' = v = grad ||p||,    p' = -||p|| grad U / (d - 1)

    With gradients of all data, this keeps the posterior for every norm. For a norm of your own,
    inherit from this class, override `velocity`, and pass an instance as `norm=` to `smile`, with
    `decoherence_length=None`. All methods are pure functions that JAX can trace.

    Attributes:
        is_elementwise: whether it sees all entries alike, whichever leaf they are in. Then small
            leaves may be joined, and `smile` takes a preconditioner.
        angle: that of the default tuner; None: that of `angle_tuner`.

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
        """Return grad ||p||, a tree like p, the same for p and for 2 p; 0 if all of p is 0.

        Called by `close`, and by `init` for its shapes. If it has the Euclidean length one, step
        sizes are Euclidean lengths.
        """
        raise NotImplementedError

    def init(self, params: optax.Params) -> optax.Updates | None:
        """Return the first momentum, 0, before any call; None if `close` needs no tree."""
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        rule = "a norm whose `velocity` takes and returns a tree like the parameters"
        with _check.called("smile"):
            found = _check.traced("norm", self.velocity, like, rule=rule)
            _check_trees.check_alike("norm.velocity", found, like, "params")
        return jax.tree.map(jnp.zeros_like, params)

    def close(
        self, momentum: Tree, moving: jax.Array, whitened: Tree, sums: Sums, lengths: Lengths
    ) -> tuple[Heading, jax.Array]:
        """Kick after a drift, and return also the energy that this adds, nats.

        Called before `diffuse` and `open`, and before it is decided whether the step is accepted.
        Trees are formed here alone. This class kicks by slopes, <g, v>. It also makes the kick that
        opens the next step, so that a call computes one velocity. Both together are, for a length
        s, p <- p - tau g / (d - 1), and dtau / ds = f(tau), the norm on its way. From the slopes of
        f at both ends, a and b = -<g, v> / (d - 1),

            tau = (exp(a s) - 1) / a,    f(t) = 1 + a t + (b - a) t^2 / (2 tau)

        to second order in s, and to all orders if g is along p. The slopes are the work that drifts
        along v do, so that the energy stays conserved where v is inexact. With f = <p, v> it would
        not. Where the chain is at rest, p becomes -g.

        Args:
            momentum: p after the last call, see `init`.
            moving: False for a chain at rest, which has no momentum.
            whitened: gradient g in the coordinates of the chain.
            sums: products of g, the velocity and the noise.
            lengths: of this kick, and of the opening one if its step is as long as the last; 0 for
                no kick.
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
        # The square of an angle per length, as |g|^2 / (d - 1)^2 for a Euclidean norm.
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
        """Add explicit noise, `amplitude` times z; a norm without this method has none.

        Called between the kicks. Isotropic noise keeps the posterior for the Euclidean norm alone.
        """
        raise NotImplementedError

    def open(self, heading: Heading, length: jax.Array) -> tuple[Heading, Number]:
        """Kick before a drift, and return also the energy that this adds, nats.

        Called last in every call, with a length of 0 inside a step. Here `close` has done it.
        """
        return heading, heading.opening_energy

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Euclidean(Norm):
    """The Euclidean norm: p is its own velocity, a unit vector u. Kicks need no other trees."""

    is_elementwise = True

    def init(self, params: optax.Params) -> None:
        """Keep no other tree."""

    def close(
        self, momentum: None, moving: jax.Array, whitened: Tree, sums: Sums, lengths: Lengths
    ) -> tuple[Heading, jax.Array]:
        """Kick as `open` does."""
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
        """Make u (u + nu z) / |u + nu z|; z / |z| if the chain is at rest."""
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
        integrator). The energy is (d - 1) log(cosh D + p sinh D), to all digits. Two kicks with one
        gradient are one kick of their total length.
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
        decoherence_length: of the explicit noise, > 0, `"matched"` or `"turning"`; None for none.
    """

    scheme: Scheme
    norm: Norm
    decoherence_length: Decoherence | None = None

    def init(self, params: optax.Params, step_length: jax.Array) -> MomentumState:
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
        """Length that belongs to the place inside the step; 0 if no step is open."""
        table = jnp.asarray((0.0, *fractions), state.step_length.dtype)
        return table[state.drift_index] * state.step_length

    def kick_factor(
        self, step_length: jax.Array, rate_square: jax.Array | None, num_parameters: int
    ) -> Number:
        """Compute the factor of a kick's length that keeps long steps from widening the posterior.

        A kick turns u by less than its length times the gradient, since u turns no further than to
        e. The leapfrog then acts as if the temperature were higher by (1 + 2 / d) k^2 / 12, where
        k^2 is the mean square of eps |g| / d. In a round Gaussian with isotropic noise this is the
        leading error of the variances at the ends of steps. `"minimal_norm"` hardly has one.
        `step_length` is eps, `rate_square` the mean square of |g| / (d - 1) where that is known.
        """
        if rate_square is None or not self.scheme.heat or not isinstance(self.norm, Euclidean):
            return 1.0
        relative = (1 - 1 / num_parameters) ** 2 * (1 + 2 / num_parameters)
        return 1 + self.scheme.heat * relative * jnp.minimum(rate_square * step_length**2, 1)

    def last_drift(self, state: MomentumState, inverse_scale: _tree.Scale) -> optax.Updates:
        """Displacement of the drift that ends where a call begins; zero if no step is open."""
        return drift(state.direction, self._length(self.scheme.drifts, state), inverse_scale)

    def close(
        self, state: MomentumState, whitened: Tree, sums: Sums, rate_square: jax.Array | None
    ) -> tuple[Heading, StepEnd]:
        """Kick after the last drift, the end of a step or its middle; none if no step is open.

        For `rate_square` see `kick_factor`.
        """
        num_parameters, num_drifts = _tree.size(state.direction), len(self.scheme.drifts)
        length = self._length(self.scheme.kicks[1:], state)
        length *= self.kick_factor(state.step_length, rate_square, num_parameters)
        opening = self._length((*[0.0] * (num_drifts - 1), self.scheme.kicks[0]), state)
        opens_step = state.drift_index % num_drifts == 0
        if num_drifts == 1:
            # The compiler leaves out what would follow inside a step.
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
        """Add explicit isotropic noise where a step has just ended; draw p if the chain is at rest.

        u <- (u + nu z) / |u + nu z|, nu^2 = (exp(x) - 1) / d, z of covariance I
        (Robnik and Seljak 2024, Fluctuation without dissipation). With the step size eps, and the
        rates R and r at which whole gradients and their change turn u, and F:

        | decoherence_length | x                                                        |
        |--------------------|----------------------------------------------------------|
        | a number L         | 2 eps / L                                                |
        | `"turning"`        | 2 eps R, so L is the radius of the curve that u follows  |
        | `"matched"`        | (eps min(T, 1))^2 min((1 + 40 / d) r^2, 2 R^2) + 2 eps F |

        F is 0 unless the width of the posterior is known, see `Evidence.rates`: where gradients
        have little noise, the momentum would last too long. Matched noise falls with the
        temperature T, since it costs loss in all directions: cold chains explore by the noise of
        the gradients. Noise between the kicks of one step would show in its energy error as
        eps^(3/2).
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
        """Kick with the first kick of a step, none inside one, and return also its energy, nats."""
        length = self.scheme.kicks[0] * step_length.astype(end.step_length.dtype)
        length *= self.kick_factor(step_length, end.rate_square, end.num_parameters)
        return self.norm.open(heading, jnp.where(end.opens_step, length, 0))

    def proceed(
        self, state: MomentumState, heading: Heading, step_length: jax.Array, reject: jax.Array
    ) -> MomentumState:
        """Count the next drift, or rest if the call is rejected; the trees stay.

        `step_length` is that of a step that begins here; a step under way keeps its own.
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
        """Write the trees of a heading; a rejected call keeps those that were."""
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
        """Displacement that a call returns: the next drift, or the way back to the step's start.

        The way back of a single drift is that drift with its sign changed, by the same operations
        on the same numbers: a rejected call changes neither `direction` nor the scale. Computed in
        another way it would miss the start by many units in the last place.
        """
        forth = self._length(self.scheme.drifts, after)
        if before.anchor is None:
            back = -self._length(self.scheme.drifts, before)
            return drift(after.direction, jnp.where(reject, back, forth), inverse_scale)
        back = jax.tree.map(jnp.subtract, step_start(before, params, inverse_scale), params)
        return optax.tree.where(reject, back, drift(after.direction, forth, inverse_scale))
