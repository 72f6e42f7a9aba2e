"""Stage 2: the microcanonical momentum, a unit vector u over the whole parameter tree.

A **kick** turns u towards the descent direction e of the energy, a **drift** moves the
parameters along u. What becomes of u in a call lies in the space of u, e and the explicit noise:
it is computed with scalars (`Heading`), and u itself is turned once (`turn`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_smile import _check, _tree
from optax_smile.stages.evidence import Rates, turn_rate
from optax_smile.stages.kick import Heading, heading, kick
from optax_smile.stages.products import Sums

# Decoherence lengths, times two, in one step from which on u is a fresh direction anyway.
FORGOTTEN = 40.0


class Integrator(NamedTuple):
    """One step as fractions of the step size: kick, drift, kick, drift, ..., kick.

    Attributes:
        kicks: lengths of the kicks, one more than drifts, sum 1.
        drifts: lengths of the drifts, sum 1. As many gradients per step.
    """

    kicks: tuple[float, ...]
    drifts: tuple[float, ...]


# Omelyan, Mryglod, Folk 2003, the minimal-norm scheme of second order with five stages.
MINIMAL_NORM_KICK = 0.1931833275037836
INTEGRATORS = {
    "leapfrog": Integrator(kicks=(0.5, 0.5), drifts=(1.0,)),
    "minimal_norm": Integrator(
        kicks=(MINIMAL_NORM_KICK, 1 - 2 * MINIMAL_NORM_KICK, MINIMAL_NORM_KICK),
        drifts=(0.5, 0.5),
    ),
}
IntegratorName = Literal["leapfrog", "minimal_norm"]
# Explicit noise that turns u by as much as the change of the gradients does; or by which u forgets
# itself over so many radii of the curve that the gradients make it follow.
MATCHED, TURNING = "matched", "turning"
NUM_RADII = 1.0
Noise = Literal["matched", "turning"]
# Matched noise has 1 + `DILUTION` / d times the square of that angle: among few parameters a noisy
# one has much of the gradients' noise to itself, which more isotropic noise makes up for. It has no
# more than `MOST_DILUTED` times the square of the angle by which whole gradients turn u.
DILUTION, MOST_DILUTED = 40, 2
Decoherence = float | jax.Array | Noise


class Momentum(NamedTuple):
    """How a chain moves: pure functions, most of them on scalars alone.

    Attributes:
        init: `init(params, step_length)`, at rest.
        draw: `draw(key, params)`, the explicit noise of a call, a tree like the parameters, or
            None.
        last_drift: `last_drift(state, inverse_scale)`, the displacement that ends where a call
            begins.
        close: `close(state, sums)`, what becomes of the momentum where the open step ends.
        open: `open(state, closed, step_length, sums, rates, temperature)`, on to the next drift.
        turn: `turn(state, opened, gradient, noise, params)`, the state with that drift under way.
        stop: `stop(state, step_length)`, where a rejected step began.
        displace: `displace(reject, before, after, params, inverse_scale)`, the next drift, or the
            way back.
        uses_key: whether it draws random numbers.
    """

    init: Callable[..., MomentumState]
    draw: Callable[..., optax.Updates | None]
    last_drift: Callable[..., optax.Updates]
    close: Callable[..., Closed]
    open: Callable[..., Opened]
    turn: Callable[..., MomentumState]
    stop: Callable[..., MomentumState]
    displace: Callable[..., optax.Updates]
    uses_key: bool


def microcanonical(
    where: str = "microcanonical",
    integrator: IntegratorName = "leapfrog",
    decoherence_length: Decoherence | None = None,
    key: jax.Array | int | None = None,
) -> Momentum:
    """Move with constant speed; the gradient turns the direction, and so may explicit noise.

    Args:
        where: name of the sampler, for errors.
        integrator: a name in `INTEGRATORS`.
        decoherence_length: of the explicit noise, > 0, `"matched"` or `"turning"`; None for none.
        key: with which that is drawn; needed for it alone.

    Raises:
        ValueError: a key that is missing.
    """
    scheme = INTEGRATORS[integrator]
    if decoherence_length is not None:
        _check.Key(True, "where `decoherence_length` is set")(where, "key", key)

    def draw(key, params):
        return None if decoherence_length is None else _tree.isotropic_like(key, params)

    def open_(state, closed, step_length, sums, rates, temperature):
        towards = closed.heading
        if decoherence_length is not None:
            of_noise = decoherence_length, rates, temperature
            towards = diffuse(state, scheme, towards, sums, *of_noise)
        return advance(state, scheme, towards, step_length, closed.num_parameters)

    return Momentum(
        init=lambda params, step_length: init(params, scheme, step_length),
        draw=draw,
        last_drift=lambda state, scale: last_drift(state, scheme, scale),
        close=lambda state, sums: _close(state, scheme, sums),
        open=open_,
        turn=turn,
        stop=stop,
        displace=lambda *arguments: _displace(scheme, *arguments),
        uses_key=decoherence_length is not None,
    )


class MomentumState(NamedTuple):
    """Where the chain stands inside a step.

    Attributes:
        direction: u at the time of the last drift, a tree like the parameters.
        moving: whether `direction` counts; False stands for u = 0, before the first kick and
            after a rejection.
        drift_index: number of drifts done since the step was opened; 0 if no step is open.
        step_length: step size of the open step, or of the next one if none is open.
        anchor: parameters at the start of the open step; None for an integrator with a single
            drift, which `direction` gives back.
    """

    direction: optax.Updates
    moving: jax.Array
    drift_index: jax.Array
    step_length: jax.Array
    anchor: optax.Params | None


class Closed(NamedTuple):
    """What becomes of the momentum where the open step ends.

    Attributes:
        heading: the momentum after the closing kick; as before where no step is open.
        kinetic_change: energy gained by that kick, nats.
        step_end: whether the parameters are the end of the open step.
        opens_step: whether the next kick begins a step: at the end of one, or where none is open.
        step_length: of the open step.
        turn_rate: angle per unit length by which the gradient turns the momentum.
        cosine: between the momentum and the descent direction, before that kick.
        largest_fall: energy that the drift would have lost along the descent direction, nats.
        num_parameters: d.
    """

    heading: Heading
    kinetic_change: jax.Array
    step_end: jax.Array
    opens_step: jax.Array
    step_length: jax.Array
    turn_rate: jax.Array
    cosine: jax.Array
    largest_fall: jax.Array
    num_parameters: int


class Opened(NamedTuple):
    """The momentum before the next drift.

    Attributes:
        heading: after the opening kick.
        kinetic_change: energy gained by that kick, nats.
        begins: whether the drift is the first of a step.
        drift_index: its number, from 1 on.
        step_length: of the step that it belongs to.
    """

    heading: Heading
    kinetic_change: jax.Array
    begins: jax.Array
    drift_index: jax.Array
    step_length: jax.Array


def init(params: optax.Params, integrator: Integrator, step_length: jax.Array) -> MomentumState:
    """Start at rest: the first kick sets the direction to steepest descent."""
    zeros = jax.tree.map(jnp.zeros_like, params)
    dtype = _tree.dtype(params)
    return MomentumState(
        direction=zeros,
        moving=jnp.zeros((), bool),
        drift_index=jnp.zeros((), jnp.int32),
        step_length=jnp.asarray(step_length, dtype),
        anchor=None if len(integrator.drifts) == 1 else jax.tree.map(jnp.copy, zeros),
    )


def _lengths(fractions: tuple[float, ...], state: MomentumState) -> jax.Array:
    """Length that belongs to the place inside the step; 0 if no step is open."""
    table = jnp.asarray((0.0, *fractions), state.step_length.dtype)
    return table[state.drift_index] * state.step_length


def drift(
    direction: optax.Updates, length: jax.Array, inverse_scale: optax.Updates | None
) -> optax.Updates:
    """Displacement of a drift: length times u in whitened coordinates, over s in the parameters."""
    moved = jax.tree.map(lambda u: (length * u).astype(u.dtype), direction)
    return moved if inverse_scale is None else jax.tree.map(jnp.multiply, moved, inverse_scale)


def last_drift(
    state: MomentumState, integrator: Integrator, inverse_scale: optax.Updates | None
) -> optax.Updates:
    """Displacement of the drift that ends where a call begins; zero if no step is open."""
    return drift(state.direction, _lengths(integrator.drifts, state), inverse_scale)


def is_step_end(state: MomentumState, integrator: Integrator) -> jax.Array:
    """Tell whether the parameters are the end of the open step, up to its last kick."""
    return state.drift_index == len(integrator.drifts)


def opens_step(state: MomentumState, integrator: Integrator) -> jax.Array:
    """Tell whether the next kick begins a step: at the end of one, or where none is open."""
    return state.drift_index % len(integrator.drifts) == 0


def turn(
    state: MomentumState,
    opened: Opened,
    gradient: optax.Updates,
    noise: optax.Updates | None,
    params: optax.Params,
) -> MomentumState:
    """Carry out on the trees what became of the momentum, with |u| = 1 restored."""
    towards, anchor = opened.heading, None

    def over(coefficient, norm):
        return jnp.where(norm > 0, coefficient / jnp.where(norm > 0, norm, 1), 0)

    old = over(towards.along_old, towards.old_norm)
    descent = over(towards.along_descent, towards.gradient_norm)
    direction = jax.tree.map(lambda u, g: old * u - descent * g, state.direction, gradient)
    if noise is not None:
        direction = jax.tree.map(lambda u, z: u + towards.along_noise * z, direction, noise)
    if state.anchor is not None:
        anchor = _tree.where(opened.begins, params, state.anchor)
    return MomentumState(
        direction=jax.tree.map(lambda new, u: new.astype(u.dtype), direction, state.direction),
        moving=towards.moving,
        drift_index=opened.drift_index,
        step_length=opened.step_length,
        anchor=anchor,
    )


def _close(state: MomentumState, integrator: Integrator, sums: Sums) -> Closed:
    """Kick with the gradient at the end of the last drift; nothing if no step is open."""
    length, num_parameters = _lengths(integrator.kicks[1:], state), _tree.size(state.direction)
    towards = heading(
        state.moving, sums.direction_square, sums.direction_dot_gradient, sums.gradient_square
    )
    kicked, gained = kick(towards, length, num_parameters)
    return Closed(
        heading=kicked,
        kinetic_change=gained,
        step_end=is_step_end(state, integrator),
        opens_step=opens_step(state, integrator),
        step_length=state.step_length,
        turn_rate=turn_rate(sums, towards.cosine, num_parameters),
        cosine=towards.cosine,
        largest_fall=_lengths(integrator.drifts, state) * towards.gradient_norm,
        num_parameters=num_parameters,
    )


def diffuse(
    state: MomentumState,
    integrator: Integrator,
    towards: Heading,
    sums: Sums,
    decoherence_length: Decoherence,
    rates: Rates,
    temperature: float | jax.Array,
) -> Heading:
    """Add explicit isotropic noise where a step has just ended; draw u where the chain is at rest.

    u <- (u + nu z) / |u + nu z|, nu^2 = (exp(2 eps / L) - 1) / d, z of covariance I and
    L = decoherence_length (Robnik and Seljak 2024, Fluctuation without dissipation). Matched noise
    has L = 2 / (eps q), q = min((1 + 40 / d) r^2, 2 R^2), with the rates at which the change of the
    gradients, r, and whole gradients, R, turn u; below temperature 1 q is T^2 times that: cold
    chains explore by the noise of the gradients, since isotropic noise costs loss in all
    directions. `"turning"` has L = 1 / R, the radius of the curve
    that the gradients make it follow.
    Between the kicks of one step it would turn up in the energy error of that step, as eps^(3/2).
    """
    length = jnp.where(is_step_end(state, integrator), state.step_length, 0)
    if isinstance(decoherence_length, str) and decoherence_length == MATCHED:
        diluted = (1 + DILUTION / _tree.size(state.direction)) * rates.change**2
        square = jnp.minimum(diluted, MOST_DILUTED * rates.gradient**2)
        exponent = square * (length * jnp.minimum(temperature, 1)) ** 2
    elif isinstance(decoherence_length, str):
        exponent = 2 * length * rates.gradient / NUM_RADII
    else:
        exponent = 2 * length / decoherence_length
    exponent = jnp.minimum(exponent, FORGOTTEN)
    amplitude = jnp.sqrt(jnp.expm1(exponent) / _tree.size(state.direction))
    amplitude = jnp.where(towards.moving, amplitude, 1)

    def over(product, norm):
        return product / jnp.where(norm > 0, norm, 1)

    along_u = over(sums.noise_dot_direction, towards.old_norm)
    along_e = -over(sums.noise_dot_gradient, towards.gradient_norm)
    along_momentum = towards.along_old * along_u + towards.along_descent * along_e
    square = jnp.where(towards.moving, 1, 0) + amplitude * (
        2 * along_momentum + amplitude * sums.noise_square
    )
    norm = jnp.sqrt(square)
    return towards._replace(
        cosine=jnp.clip((towards.cosine + amplitude * along_e) / norm, -1, 1),
        along_old=towards.along_old / norm,
        along_descent=towards.along_descent / norm,
        along_noise=amplitude / norm,
        moving=jnp.ones_like(towards.moving),
    )


def advance(
    state: MomentumState,
    integrator: Integrator,
    towards: Heading,
    step_length: jax.Array,
    num_parameters: int,
) -> Opened:
    """Open a step where none is under way, else go on with it, up to the next drift."""
    begins = opens_step(state, integrator)
    step_length = jnp.where(begins, step_length, state.step_length).astype(state.step_length.dtype)
    kick_length = jnp.where(begins, integrator.kicks[0] * step_length, 0)
    towards, gained = kick(towards, kick_length, num_parameters)
    index = state.drift_index % len(integrator.drifts) + 1
    return Opened(towards, gained, begins, index, step_length)


def stop(state: MomentumState, step_length: jax.Array) -> MomentumState:
    """Stand at rest where the open step began."""
    return MomentumState(
        direction=state.direction,
        moving=jnp.zeros_like(state.moving),
        drift_index=jnp.zeros_like(state.drift_index),
        step_length=step_length.astype(state.step_length.dtype),
        anchor=state.anchor,
    )


def _displace(
    integrator: Integrator,
    reject: jax.Array,
    before: MomentumState,
    after: MomentumState,
    params: optax.Params,
    inverse_scale: optax.Updates | None,
) -> optax.Updates:
    """Displacement that a call answers: the next drift, or the way back to the start of the step.

    The way back of a single drift is that drift with its sign changed, by the same operations on
    the same numbers (`after` and the scale are those from before a rejected call): computed in
    another way it would miss the start by many units in the last place.
    """
    forth = _lengths(integrator.drifts, after)
    if before.anchor is None:
        back = -_lengths(integrator.drifts, before)
        return drift(after.direction, jnp.where(reject, back, forth), inverse_scale)
    back = jax.tree.map(jnp.subtract, step_start(before, params, inverse_scale), params)
    return _tree.where(reject, back, drift(after.direction, forth, inverse_scale))


def step_start(
    state: MomentumState,
    params: optax.Params,
    inverse_scale: optax.Updates | None,
    moves: jax.Array | None = None,
) -> optax.Params:
    """Parameters at the start of the open step, given the scale of its drift; else `params`.

    `moves` tells which leaves of the state do, `[leaf]`; None: all.
    """
    is_open = state.drift_index > 0
    if state.anchor is not None:
        began = state.anchor
        return _tree.map_sampled(lambda x, at: jnp.where(is_open, x, at), began, params, moves)
    length = jnp.where(is_open, state.step_length, 0)
    drifted = drift(state.direction, length, inverse_scale)
    return _tree.map_sampled(lambda move, x: x - move, drifted, params, moves)
