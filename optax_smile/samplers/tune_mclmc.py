"""Step size and decoherence length of MCLMC."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import optax

from optax_smile import _check, _tree, potential
from optax_smile._types import LogPrior, Tree, by_identity
from optax_smile.samplers._call import POSTERIOR
from optax_smile.samplers.mclmc import mclmc
from optax_smile.stages.integrator import IntegratorName
from optax_smile.state import Stats, last_accepted, stats

LossFn = Callable[[Tree], jax.Array]
# Parameters and state of the sampler.
Chain = tuple[Tree, Tree]
# Per step and parameter, nats^2, that the tuned step size aims at.
ENERGY_VARIANCE = 5e-4
# Energy errors further from the aim than this many sixth roots of e count for little.
TRUST = 1.5
# Steps over which the average behind the step size forgets.
MEMORY = 150
# Decoherence length as a share of the distance between independent draws.
LENGTH_FACTOR = 0.4
# Shares of the tuning steps: step size, width of the posterior, distance between draws.
PHASES = (1 / 3, 1 / 3, 1 / 3)
# First guess of the step size: small, so that a trained network is not thrown out of its mode
# before the first energy error is known. It may grow tenfold with each step.
FIRST_STEP_SIZE = 5e-3
# The distance between independent draws is estimated from this many parameters, drawn at random.
LARGEST_WATCH = 1_000
# Squared errors, relative to the aim, are clipped to this range; and the largest factor by which
# one of them may change the step size.
ERROR_RANGE = (1e-8, 1e24)
LARGEST_CHANGE = 10.0
# After a step that ended in a non-finite number, the largest step size in units of that step. It
# grows again with good steps: single accidents must not add up to a chain that stands still.
RETREAT = 0.8


@by_identity
class MclmcSettings(NamedTuple):
    """Result of `tune_mclmc`.

    Attributes:
        step_size: for `mclmc`, scalar.
        decoherence_length: for `mclmc`, scalar.
        params: where the tuning chain ended, a start for sampling.
    """

    step_size: jax.Array
    decoherence_length: jax.Array
    params: optax.Params


@_check.arguments(
    **POSTERIOR | {"key": _check.Key(True, "for the noise")},
    loss_fn=_check.Function("(params)"),
    params=_check.Tree(finite=True),
    num_steps=_check.Whole(30),
    first_step_size=_check.POSITIVE,
    energy_variance=_check.POSITIVE,
    integrator=_check.OneOf(IntegratorName),
)
def tune_mclmc(
    loss_fn: LossFn,
    params: Tree,
    *,
    num_data: float | jax.Array,
    prior_precision: Tree = 1.0,
    prior_mean: Tree = 0.0,
    log_prior: LogPrior | None = None,
    temperature: float | jax.Array = 1.0,
    integrator: IntegratorName = "minimal_norm",
    num_steps: int = 10_000,
    first_step_size: float = FIRST_STEP_SIZE,
    energy_variance: float = ENERGY_VARIANCE,
    key: jax.Array | int | None = None,
) -> MclmcSettings:
    """Find step size and decoherence length for `mclmc` in three phases of one chain.

    1. The step size is adapted until the energy error per step has variance `energy_variance` per
       parameter, by a weighted average of |error|^2 / eps^6, which hardly depends on eps.
    2. It still adapts, and L becomes the width of the posterior, the root of the summed variances.
    3. With both fixed, L becomes 0.4 times the distance between independent draws.

    Args:
        loss_fn: mean loss over the *whole* data, `loss_fn(params)`, scalar, without the prior.
        params: start of the chain, such as trained weights, close to the posterior: the width is
            measured in the second phase.
        num_steps: of all three phases together, >= 30.
        first_step_size: where the step size starts, > 0. If it is too large, the chain can leave
            the mode.
        energy_variance: target of the step size, nats^2 per parameter, > 0.
        key: JAX key or seed. For the other arguments see `mclmc`.

    Returns:
        Step size, decoherence length and the last parameters.

    Raises:
        ValueError: an argument out of range; a loss that is not a scalar, or is not finite at the
            start with its gradient.

    Cost: one compiled loop with `num_steps` integrator steps. Memory for three parameter-sized
    arrays besides `mclmc`'s, and for the last third of the steps times 1,000 parameters.

    Example:
        >>> import jax, jax.numpy as jnp, optax_smile
        >>> loss_fn = lambda params: jnp.sum(params**2) / 2
        >>> tuned = optax_smile.tune_mclmc(
        ...     loss_fn, jnp.ones(20), num_data=1, prior_precision=0.0, num_steps=600,
        ...     key=jax.random.key(0),
        ... )
        >>> 1 < float(tuned.step_size) < 20
        True

    Source: Robnik, De Luca, Silverstein, Seljak, JMLR 2023, section 4, and Sommer et al., ICLR
    2025, appendix on tuning. Differences from the paper: no diagonal preconditioning; phases of
    equal length and a constant `energy_variance`, where MILE has .8, .1, .1 and lowers it; sums of
    1 / eps^6 are kept relative to the current eps, since eps^6 leaves float32.
    """
    where = "tune_mclmc"
    posterior = potential.Potential(num_data, prior_precision, temperature, prior_mean, log_prior)
    potential.check(where, posterior)
    _tree.check_params(where, params, smallest=2)
    potential.check_prior(where, posterior, params)
    seed = _check.Key(needed=True)(where, "key", key)
    params = jax.tree.map(jnp.array, params)
    start = potential.centre(posterior, params)
    prior_mean = prior_mean if start is None else start
    _check_start(where, loss_fn, params)
    dtype, size = _tree.dtype(params), _tree.size(params)

    def sampler(length: jax.Array) -> optax.GradientTransformationExtraArgs:
        return mclmc(
            1.0,
            num_data=num_data,
            decoherence_length=length,
            prior_precision=prior_precision,
            prior_mean=prior_mean,
            log_prior=log_prior,
            temperature=temperature,
            integrator=integrator,
            key=key,
        )

    @jax.jit
    def tune(params):
        first, second, third = (round(share * num_steps) for share in PHASES)
        length = jnp.sqrt(jnp.asarray(size, dtype))
        advance = functools.partial(_advance, loss_fn, sampler(length))
        chain = params, sampler(length).init(params)
        first_size, zero = jnp.asarray(first_step_size, dtype), jnp.zeros((), dtype)
        controller = _Controller(first_size, jnp.full_like(first_size, jnp.inf), zero, zero)
        aim = energy_variance * size
        chain, controller, _ = _adapting_phase(advance, chain, controller, aim, first)
        chain, controller, moments = _adapting_phase(advance, chain, controller, aim, second)
        width = jnp.sqrt(_tree.total(moments.deviation) / moments.weight)
        watched = jax.random.permutation(seed, size)[:LARGEST_WATCH]
        advance = functools.partial(_advance, loss_fn, sampler(width))

        def draw(chain, _):
            chain, _ = advance(chain, controller.step_size)
            flat = jnp.concatenate([x.astype(dtype).ravel() for x in jax.tree.leaves(chain[0])])
            return chain, flat[watched]

        chain, draws = jax.lax.scan(draw, chain, length=third)
        steps = _steps_per_draw(draws)
        length = jnp.where(steps > 0, LENGTH_FACTOR * controller.step_size * steps, width)
        at = last_accepted(chain[1], chain[0])
        return MclmcSettings(controller.step_size, length.astype(dtype), at)

    return tune(params)


def _check_start(where: str, loss_fn: LossFn, params: optax.Params):
    """Require a scalar loss that is finite with its gradient."""
    rule = "a function of `params` that returns a scalar mean loss"
    loss = _check.traced(where, "loss_fn", loss_fn, params, rule=rule)
    if getattr(loss, "shape", None) != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        _check.fail(where, "loss_fn", rule, loss)
    start = jax.jit(jax.value_and_grad(loss_fn))(params)
    known = not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(start))
    if known and not all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(start)):
        rule = "where the loss and its gradient are finite"
        _check.fail(where, "params", rule, f"a loss of {start[0]}")


def _advance(
    loss_fn: LossFn,
    sampler: optax.GradientTransformationExtraArgs,
    chain: Chain,
    step_size: jax.Array,
) -> tuple[Chain, tuple[Stats, jax.Array]]:
    """One integrator step of this size; statistics and step size of the step before it."""
    params, state = chain
    state: Tree = optax.tree.set(state, step_size_factor=step_size)
    seen, tried = [], state.dynamics.momentum.step_length
    for _ in range(state.gradients_per_step):
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = sampler.update(grads, state, params, value=loss)
        params = optax.apply_updates(params, updates)
        seen.append(stats(state))
    # The first call judges the step before; the second can reject the one that it opened.
    whole = seen[-1].accepted
    judged = seen[0]._replace(accepted=seen[0].accepted & whole)
    return (params, state), (judged, jnp.where(whole, tried, state.dynamics.momentum.step_length))


def _adapting_phase(
    advance: Callable, chain: Chain, controller: _Controller, aim: float, steps: int
) -> tuple[Chain, _Controller, _Moments]:
    """Take steps that adapt their size, and measure the moments of their path."""

    def adapt(carry, _):
        chain, controller, moments = carry
        chain, (seen, tried) = advance(chain, controller.step_size)
        controller = _adapt(controller, seen, tried, aim)
        moments = moments.add(chain[0], controller.step_size)
        return (chain, controller, moments), None

    zeros = jax.tree.map(jnp.zeros_like, chain[0])
    moments = _Moments(zeros, zeros, jnp.zeros((), _tree.dtype(zeros)))
    carry, _ = jax.lax.scan(adapt, (chain, controller, moments), length=steps)
    return carry


class _Controller(NamedTuple):
    """Weighted average of the energy errors, in units that they would have at `step_size`."""

    step_size: jax.Array
    largest: jax.Array
    error_sum: jax.Array
    weight_sum: jax.Array


def _adapt(state: _Controller, seen: Stats, tried: jax.Array, aim: float) -> _Controller:
    """Move to the step size whose mean squared energy error would be the aim.

    Squared errors grow with eps^6: `seen` at the size `tried` predicts those at others.
    """
    decay = (MEMORY - 1) / (MEMORY + 1)
    known = jnp.isfinite(seen.energy_change)
    error = jnp.clip(jnp.where(known, seen.energy_change, 0) ** 2 / aim, *ERROR_RANGE)
    measured = known & (error > ERROR_RANGE[0])
    weight = jnp.exp(-0.5 * (jnp.log(error) / (6 * TRUST)) ** 2) * measured
    error_sum = decay * state.error_sum + weight * error * (state.step_size / tried) ** 6
    weight_sum = decay * state.weight_sum + weight
    retreated = jnp.minimum(state.largest, RETREAT * tried)
    largest = jnp.where(seen.accepted, state.largest * (1 + 1 / MEMORY), retreated)
    any_measured = weight_sum > 0
    mean = error_sum / jnp.where(any_measured, weight_sum, 1)
    mean = jnp.where(any_measured, mean, jnp.where(known, ERROR_RANGE[0], 1))
    change = jnp.clip(mean ** (-1 / 6), 1 / LARGEST_CHANGE, LARGEST_CHANGE)
    step_size = jnp.minimum(state.step_size * change, largest)
    return _Controller(
        step_size, largest, error_sum * (step_size / state.step_size) ** 6, weight_sum
    )


class _Moments(NamedTuple):
    """Mean and summed squared deviation along a path, weighted with the length of its steps."""

    mean: optax.Params
    deviation: optax.Params
    weight: jax.Array

    def add(self, params: optax.Params, weight: jax.Array) -> _Moments:
        """Add a point of the path."""
        total = self.weight + weight
        mean = jax.tree.map(lambda m, x: m + weight / total * (x - m), self.mean, params)
        deviation = jax.tree.map(
            lambda d, old, new, x: d + weight * (x - old) * (x - new),
            self.deviation,
            self.mean,
            mean,
            params,
        )
        return _Moments(mean, deviation, total)


def _steps_per_draw(draws: jax.Array) -> jax.Array:
    """Integrated autocorrelation time of a chain `[step, parameter]`, mean over its parameters.

    By the initial positive sequence of Geyer 1992 on the autocorrelations from an FFT. Parameters
    that did not move do not count; 0 if none did.
    """
    length = len(draws)
    centered = draws - draws.mean(axis=0, keepdims=True)
    spectrum = jnp.fft.rfft(centered, 2 * length, axis=0)
    covariance = jnp.fft.irfft(jnp.abs(spectrum) ** 2, 2 * length, axis=0)[:length]
    moved = covariance[0] > 0
    correlation = covariance / jnp.where(moved, covariance[0], 1)[None]
    pairs = correlation[: length // 2 * 2].reshape(length // 2, 2, -1).sum(axis=1)
    positive = jnp.cumprod(pairs > 0, axis=0)
    times = jnp.maximum(2 * jnp.sum(pairs * positive, axis=0) - 1, 1)
    return jnp.sum(jnp.where(moved, times, 0)) / jnp.maximum(jnp.sum(moved), 1)
