"""The microcanonical integrator: a unit momentum u over the whole parameter tree.

A **kick** turns u towards the descent direction e of the energy, a **drift** moves the parameters
along u. Kicks and explicit noise z change u to a sum of u, e and z with three coefficients
(`Heading`). A call computes these first and then the tree, once (`turn`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_smile import _paths, _tree
from optax_smile._types import Tree
from optax_smile.stages.evidence import StepEnd, Sums, turn_rate


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


class MomentumState(NamedTuple):
    """Where the chain is inside a step.

    Attributes:
        direction: u at the time of the last drift, a tree like the parameters.
        moving: False stands for u = 0, before the first kick and after a rejection; `direction` is
            then ignored.
        drift_index: number of drifts done since the step was opened; 0 if no step is open.
        step_length: step size of the open step, or of the next one if none is open.
        anchor: parameters at the start of the open step; None for an integrator with a single
            drift, which can be undone with `direction`.
        conjugate: momentum, of which `direction` is the gradient of its norm; None for a Euclidean
            norm, for which they are the same.
    """

    direction: optax.Updates
    moving: jax.Array
    drift_index: jax.Array
    step_length: jax.Array
    anchor: optax.Params | None
    conjugate: optax.Updates | None = None


class Heading(NamedTuple):
    """The unit momentum in terms of the old direction u, the descent direction e and the noise z.

    Attributes:
        cosine: between the momentum and e.
        along_old: coefficient of the old unit direction.
        along_descent: coefficient of e.
        along_noise: coefficient of z, which is no unit vector.
        moving: whether there is a direction at all.
        gradient_norm: norm of the whitened gradient, nats per unit length.
        old_norm: norm of the tree that holds the old direction, which rounding keeps off 1.
    """

    cosine: jax.Array
    along_old: jax.Array
    along_descent: jax.Array
    along_noise: jax.Array
    moving: jax.Array
    gradient_norm: jax.Array
    old_norm: jax.Array


def step_start(state: MomentumState, params: optax.Params, inverse_scale: _tree.Scale) -> Tree:
    """Parameters at the start of the open step, given the scale of its drift; else `params`."""
    is_open = state.drift_index > 0
    if state.anchor is not None:
        began = state.anchor
        return _paths.map_sampled(lambda x, at: jnp.where(is_open, x, at), began, params)
    length = jnp.where(is_open, state.step_length, 0)
    drifted = Momentum.drift(state.direction, length, inverse_scale)
    return _paths.map_sampled(lambda move, x: x - move, drifted, params)


@dataclass(frozen=True)
class Momentum:
    """How a chain moves: at constant speed, turned by gradients and explicit noise.

    A subclass gives the momentum another norm by replacing three methods:

    - `kick` turns the momentum of a `Heading`, whose norm stays 1. Two kicks with one gradient are
      one kick of their total length, and a kick of length 0 changes nothing.
    - `drift` computes a displacement. That of a negative length is the exact negative, to the bit,
      since `displace` undoes a step by it. It works entry by entry, also on parts of a tree. A
      drift of another form also needs another `step_start`.
    - `kinetic_change` is the energy that a kick adds. For short lengths it is the length times the
      energy that a drift of unit length loses, so that the exact dynamics conserve the total.

    `heading` says what `kick` and `kinetic_change` start from. Its products, the noise of `diffuse`
    and the norms in `turn` are Euclidean. For a norm whose steepest descent is not along the
    gradient see `spectral.Spectral`, which has a `pull` in place of these methods.

    Attributes:
        scheme: the order of kicks and drifts.
        decoherence_length: of the explicit noise, > 0, `"matched"` or `"turning"`; None for none.
        is_elementwise: whether it takes trees whose small leaves are joined.
        angle: that of the default tuner; None: that of `angle_tuner`.
    """

    scheme: Scheme
    decoherence_length: Decoherence | None = None
    is_elementwise: ClassVar[bool] = True
    angle: ClassVar[float | None] = None

    def heading(self, moving: jax.Array, sums: Sums) -> Heading:
        """Describe u, if the chain is moving, and e = -g / |g| by inner products of their trees."""
        old_norm, gradient_norm = jnp.sqrt(sums.direction_square), jnp.sqrt(sums.whitened_square)
        product = old_norm * gradient_norm
        cosine = -sums.direction_dot_whitened / jnp.where(product > 0, product, 1)
        return Heading(
            cosine=jnp.where(moving, jnp.clip(cosine, -1, 1), 0),
            along_old=jnp.where(moving, jnp.ones_like(cosine), 0),
            along_descent=jnp.zeros_like(cosine),
            along_noise=jnp.zeros_like(cosine),
            moving=moving,
            gradient_norm=gradient_norm,
            old_norm=old_norm,
        )

    def kick(self, heading: Heading, length: jax.Array, num_parameters: int) -> Heading:
        """Turn the momentum towards e for a time `length`.

        u <- (u + (sinh D + p (cosh D - 1)) e) / (cosh D + p sinh D), p = e . u,
        D = length |g| / (d - 1). Written with z = exp(-D), which cannot overflow. u = 0 becomes e,
        and p = -1 stays (Robnik et al. 2023, Microcanonical Hamiltonian Monte Carlo; with the sign
        of e that the published code has, not the one of Sommer et al. 2026, appendix on the
        integrator).
        """
        delta = length * heading.gradient_norm / (num_parameters - 1)
        p, z = heading.cosine, jnp.exp(-delta)
        opposed = p <= -1
        denominator = jnp.where(opposed, 1, (1 + p) + (1 - p) * z * z)
        old = jnp.where(opposed, 1, 2 * z / denominator)
        descent = (-jnp.expm1(-2 * delta) + p * jnp.expm1(-delta) ** 2) / denominator
        descent = jnp.where(opposed, 0, descent)
        starts = ~heading.moving & (delta > 0)
        return heading._replace(
            cosine=jnp.where(starts, 1, jnp.clip(old * p + descent, -1, 1)),
            along_old=jnp.where(starts, 0, old * heading.along_old),
            along_descent=jnp.where(starts, 1, old * heading.along_descent + descent),
            along_noise=jnp.where(starts, 0, old * heading.along_noise),
            moving=heading.moving | starts,
        )

    def kinetic_change(self, heading: Heading, length: jax.Array, num_parameters: int) -> jax.Array:
        """Energy that this kick adds, (d - 1) log(cosh D + p sinh D), nats; to all digits."""
        cosine, delta = heading.cosine, length * heading.gradient_norm / (num_parameters - 1)
        small = jnp.minimum(delta, 1)
        near = jnp.log1p(2 * jnp.sinh(small / 2) ** 2 + cosine * jnp.sinh(small))
        far = jnp.logaddexp(jnp.log((1 + cosine) / 2) + delta, jnp.log((1 - cosine) / 2) - delta)
        return (num_parameters - 1) * jnp.where(delta < 1, near, far)

    @staticmethod
    def drift(
        direction: optax.Updates, length: jax.Array, inverse_scale: _tree.Scale
    ) -> optax.Updates:
        """Displacement: length times u in whitened coordinates, over s in the parameters."""
        moved = jax.tree.map(lambda u: (length * u).astype(u.dtype), direction)
        return _tree.scaled(moved, inverse_scale)

    def init(self, params: optax.Params, step_length: jax.Array) -> MomentumState:
        """Start at rest, u = 0: `diffuse` draws u, or the first kick makes it -g / |g|."""
        zeros = jax.tree.map(jnp.zeros_like, params)
        return MomentumState(
            direction=zeros,
            moving=jnp.zeros((), bool),
            drift_index=jnp.zeros((), jnp.int32),
            step_length=jnp.asarray(step_length, _tree.dtype(params)),
            anchor=None if len(self.scheme.drifts) == 1 else jax.tree.map(jnp.copy, zeros),
        )

    def _length(self, fractions: tuple[float, ...], state: MomentumState) -> jax.Array:
        """Length that belongs to the place inside the step; 0 if no step is open."""
        table = jnp.asarray((0.0, *fractions), state.step_length.dtype)
        return table[state.drift_index] * state.step_length

    def kick_factor(
        self, step_length: jax.Array, rate_square: jax.Array | None, num_parameters: int
    ) -> float | jax.Array:
        """Compute the factor of a kick's length that keeps long steps from widening the posterior.

        A kick turns u by less than its length times the gradient, since u turns no further than to
        e. The leapfrog then acts as if the temperature were higher by (1 + 2 / d) k^2 / 12, where
        k^2 is the mean square of eps |g| / d. In a round Gaussian with isotropic noise this is the
        leading error of the variances at the ends of steps. `"minimal_norm"` hardly has one.

        Args:
            step_length: eps.
            rate_square: mean square of |g| / (d - 1), or 0; None for a factor of one.
            num_parameters: d.
        """
        if rate_square is None or not self.scheme.heat:
            return 1.0
        relative = (1 - 1 / num_parameters) ** 2 * (1 + 2 / num_parameters)
        return 1 + self.scheme.heat * relative * jnp.minimum(rate_square * step_length**2, 1)

    def last_drift(self, state: MomentumState, inverse_scale: _tree.Scale) -> optax.Updates:
        """Displacement of the drift that ends where a call begins; zero if no step is open."""
        return self.drift(state.direction, self._length(self.scheme.drifts, state), inverse_scale)

    def pull(self, state: MomentumState, gradient: optax.Updates, sums: Sums) -> Tree:
        """Return what `close` needs besides inner products of the trees; nothing here."""
        return None

    def close(
        self, state: MomentumState, sums: Sums, pulled: Tree, rate_square: jax.Array | None = None
    ) -> tuple[Heading, StepEnd]:
        """Kick after the last drift, the end of a step or its middle; none if no step is open.

        For `rate_square` see `kick_factor`.
        """
        num_parameters, num_drifts = _tree.size(state.direction), len(self.scheme.drifts)
        before = self.heading(state.moving, sums)
        length = self._length(self.scheme.kicks[1:], state)
        length *= self.kick_factor(state.step_length, rate_square, num_parameters)
        opens_step = state.drift_index % num_drifts == 0
        if num_drifts == 1:
            # The compiler leaves out what would follow inside a step.
            opens_step = jnp.ones_like(opens_step)
        return self.kick(before, length, num_parameters), StepEnd(
            is_end=state.drift_index == num_drifts,
            opens_step=opens_step,
            kinetic_change=self.kinetic_change(before, length, num_parameters),
            step_length=state.step_length,
            turn_rate=turn_rate(sums, before.cosine, num_parameters),
            cosine=before.cosine,
            largest_fall=self._length(self.scheme.drifts, state) * before.gradient_norm,
            turning_norm=float(num_parameters - 1),
            num_parameters=num_parameters,
        )

    def diffuse(
        self,
        end: StepEnd,
        heading: Heading,
        sums: Sums,
        rates: tuple[jax.Array, jax.Array, float | jax.Array],
        temperature: float | jax.Array,
    ) -> Heading:
        """Add explicit isotropic noise where a step has just ended; draw u if the chain is at rest.

        u <- (u + nu z) / |u + nu z|, nu^2 = (exp(x) - 1) / d, z of covariance I
        (Robnik and Seljak 2024, Fluctuation without dissipation). With the step size eps, and the
        `rates` R and r at which whole gradients and their change turn u, and F:

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
        turns, changes, forgetting = rates
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
        amplitude = jnp.where(heading.moving, amplitude, 1)

        def over(product: jax.Array, norm: jax.Array) -> jax.Array:
            return product / jnp.where(norm > 0, norm, 1)

        along_u = over(sums.noise_dot_direction, heading.old_norm)
        along_e = -over(sums.noise_dot_whitened, heading.gradient_norm)
        along_momentum = heading.along_old * along_u + heading.along_descent * along_e
        square = jnp.where(heading.moving, 1, 0) + amplitude * (
            2 * along_momentum + amplitude * sums.noise_square
        )
        norm = jnp.sqrt(square)
        return heading._replace(
            cosine=jnp.clip((heading.cosine + amplitude * along_e) / norm, -1, 1),
            along_old=heading.along_old / norm,
            along_descent=heading.along_descent / norm,
            along_noise=amplitude / norm,
            moving=jnp.ones_like(heading.moving),
        )

    def open(
        self,
        end: StepEnd,
        heading: Heading,
        step_length: jax.Array,
        rate_square: jax.Array | None = None,
    ) -> tuple[Heading, jax.Array]:
        """Kick with the first kick of a step, none inside one, and return also its energy, nats."""
        length = self.scheme.kicks[0] * step_length.astype(end.step_length.dtype)
        length *= self.kick_factor(step_length, rate_square, end.num_parameters)
        given = heading, jnp.where(end.opens_step, length, 0), end.num_parameters
        return self.kick(*given), self.kinetic_change(*given)

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
        self, direction: Tree, heading: Heading, whitened: Tree, noise: Tree | None
    ) -> optax.Updates:
        """Carry out kicks and noise on the trees, and restore |u| = 1."""

        def over(coefficient: jax.Array, norm: jax.Array) -> jax.Array:
            return jnp.where(norm > 0, coefficient / jnp.where(norm > 0, norm, 1), 0)

        old = over(heading.along_old, heading.old_norm)
        descent = over(heading.along_descent, heading.gradient_norm)
        turned = jax.tree.map(lambda u, w: old * u - descent * w, direction, whitened)
        if noise is not None:
            turned = jax.tree.map(lambda u, z: u + heading.along_noise * z, turned, noise)
        return jax.tree.map(lambda new, u: new.astype(u.dtype), turned, direction)

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
            return self.drift(after.direction, jnp.where(reject, back, forth), inverse_scale)
        back = jax.tree.map(jnp.subtract, step_start(before, params, inverse_scale), params)
        return optax.tree.where(reject, back, self.drift(after.direction, forth, inverse_scale))
