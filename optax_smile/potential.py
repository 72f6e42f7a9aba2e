"""The posterior: from the mean loss of a training loop to an energy in nats.

    U(theta) = (num_data * mean_loss(theta) + prior_precision / 2 * |theta|^2) / temperature

With a prior that is a function, -log_prior(theta) takes the place of the second term.

This is -log posterior / temperature up to a constant. No other file multiplies by `num_data`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _check, _paths, _table, _tree
from optax_smile._types import LogPrior, PriorMean, T

# Value of `prior_mean` that means the start of the chain.
START = "start"
PRIOR = "prior_precision", "prior_mean"


@dataclass(frozen=True)
class PerParameter(_check.Constraint):
    """A number, or a tree of numbers and arrays; traced ones pass."""

    each: _check.Real

    @property
    def rule(self) -> str:
        """The rule of the numbers."""
        return f"{self.each.rule}, or a tree of such numbers"

    def __call__(self, argument, value, given=_check.NOTHING) -> object:
        """Check every leaf, see `_check.Constraint`."""
        leaves = jax.tree.leaves(value)
        if isinstance(value, str) or not leaves and not isinstance(value, Mapping | list | tuple):
            _check.fail(argument, self.rule, repr(value))
        for leaf in leaves:
            if not isinstance(leaf, (np.ndarray, jax.Array)) or not leaf.ndim:
                self.each(argument, leaf, given)
            elif not _check.is_real(leaf.dtype):
                _check.fail(argument, self.rule, f"an array of {leaf.dtype}")
            elif not isinstance(leaf, jax.core.Tracer):
                _check.Array(each=self.each, dtype=None)(argument, leaf)
        return value


class Potential(NamedTuple):
    """Arguments of `psmile` that turn a mean loss into the energy of a posterior.

    With a summed loss every energy is wrong by a factor, which later code cannot detect.
    """

    num_data: float | jax.Array
    prior_precision: Any = 1.0
    temperature: Any = 1.0
    prior_mean: PriorMean = 0.0
    log_prior: LogPrior | None = None


def check(potential: Potential):
    """Require that only one prior is given."""
    if potential.log_prior is not None:
        precision = jax.tree.leaves(potential.prior_precision)
        if any(isinstance(x, jax.core.Tracer) or np.any(np.asarray(x) != 0) for x in precision):
            got = f"{potential.prior_precision} (the default is 1.0)"
            advice = "Pass `prior_precision=0`."
            _check.fail("prior_precision", "0 together with `log_prior`", got, advice)


def check_prior(potential: Potential, params: optax.Params):
    """Require the prior to be numbers or prefixes of the parameter tree that fit its leaves.

    `optax.tree.map_params` calls `init` with a placeholder that has no leaves; it passes.
    """
    if not jax.tree.leaves(params):
        return
    for argument in PRIOR:
        prefix = getattr(potential, argument)
        if isinstance(prefix, str):
            # The start has the structure of the parameters.
            continue
        try:
            spread = _spread(prefix, params)
        except (ValueError, TypeError):
            rule, got = "a number or a prefix of the parameter tree", _places(prefix)
            advice = f"The parameters have leaves at {_places(params)}."
            _check.fail(argument, rule, f"one with leaves at {got}", advice)
        shapes = jax.tree_util.tree_leaves_with_path(params)
        for (path, leaf), value in zip(shapes, jax.tree.leaves(spread), strict=True):
            if jnp.shape(value) not in ((), leaf.shape):
                at = _paths.place(path)
                rule = f"a number or of the shape {leaf.shape} at {at}"
                _check.fail(argument, rule, jnp.shape(value))
    if potential.log_prior is not None:
        rule = "a function of `params` that returns a scalar, the log density in nats"
        density = _check.traced("log_prior", potential.log_prior, params, rule=rule)
        is_scalar = getattr(density, "shape", None) == ()
        if not (is_scalar and jnp.issubdtype(density.dtype, jnp.floating)):
            _check.fail("log_prior", rule, f"one that returns {_check.show(density)}")
        start = potential.log_prior(params)
        if not isinstance(start, jax.core.Tracer) and not math.isfinite(start):
            rule = "finite at the initial parameters"
            _check.fail("log_prior", rule, float(start), "No step from there is accepted.")


def _places(tree: object) -> str:
    """List the paths of the leaves of a tree."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return _table.some(jax.tree_util.keystr(path) or "the root" for path in paths) or "no path"


def with_log_prior(
    potential: Potential, updates: optax.Updates, value: jax.Array | None, params: optax.Params
) -> tuple[optax.Updates, jax.Array | None]:
    """Add a prior that is a function to the mean loss, as -log_prior / num_data.

    Where the density is 0, the gradient becomes NaN, the loss infinite, and the step is rejected.
    """
    if potential.log_prior is None:
        return updates, value
    density, slope = jax.value_and_grad(potential.log_prior)(params)
    number, is_outside = _count(potential), jnp.isneginf(density)

    def add(g, s):
        return jnp.where(is_outside, jnp.nan, g - s / number).astype(s.dtype)

    updates = jax.tree.map(add, updates, slope)
    return updates, None if value is None else (value - density / number).astype(value.dtype)


def centre(potential: Potential, params: T) -> T | None:
    """Return a copy of the start of a chain if it is the prior's mean, else None."""
    is_start = isinstance(potential.prior_mean, str)
    return jax.tree.map(lambda x: jnp.array(x, copy=True), params) if is_start else None


def spread(potential: Potential, params: optax.Params) -> Potential:
    """Expand a prior that is not a single number to trees of arrays like the parameters."""

    def arrays(prefix: Any) -> optax.Params:
        if jax.tree_util.all_leaves([prefix]) and jnp.ndim(prefix) == 0:
            return prefix
        full = _spread(prefix, params)
        return jax.tree.map(
            lambda v, x: jnp.broadcast_to(jnp.asarray(v, x.dtype), x.shape), full, params
        )

    return potential._replace(**{name: arrays(getattr(potential, name)) for name in PRIOR})


@_check.arguments(num_data=_check.Real(1, large=True), excess=_check.POSITIVE)
def cold_temperature(
    num_data: float | jax.Array, params: optax.Params, excess: float | jax.Array = 0.08
) -> float | jax.Array:
    """Compute the temperature at which the draws of a network lose little, min(1, 2 e N / d).

    If the loss is quadratic, the expected mean loss of a draw at the temperature T lies
    T d / (2 N) nats per example above the mean loss at the posterior mode, whatever the curvatures.
    At this temperature that is at most e. Below 1 it gives a cold posterior, narrower than the
    Bayesian one. Networks with more weights than data can need a cold posterior to predict well;
    `optax_smile.select` chooses the temperature by validation data.

    Args:
        num_data: N >= 1, see `psmile`.
        params: parameters of one network, without a chain axis, or their shapes. All
            floating-point arrays count in d: leave out those that are not sampled.
        excess: allowed increase e of the mean loss, nats per example, > 0.

    Returns:
        A number in (0, 1], to pass as `temperature`.

    Raises:
        ArgumentError (a ValueError): a number is out of range, or `params` has no floating-point
            array.

    Example:
        >>> import jax, jax.numpy as jnp, optax_smile
        >>> params = {"w": jnp.zeros((100, 20)), "b": jnp.zeros(20)}
        >>> round(optax_smile.cold_temperature(1_000, params), 4)
        0.0792

    Source: the rule is ours, see `benchmarks/notes/temperature.md`.
    """
    size = _tree.size([leaf for leaf in jax.tree.leaves(params) if _tree.is_floating(leaf)])
    if size == 0:
        rule = "the parameters of a network, with at least one floating-point array"
        _check.fail("params", rule, _check.show(params))
    allowed = 2 * excess * _count(Potential(num_data)) / size
    return jnp.minimum(allowed, 1) if isinstance(allowed, jax.Array) else min(allowed, 1.0)


def _spread(prefix: object, params: optax.Params) -> optax.Params:
    """Expand a prefix of the tree: a number or array for every leaf."""
    return jax.tree.map(lambda value, part: jax.tree.map(lambda _: value, part), prefix, params)


def _prior(potential: Potential, params: optax.Params) -> tuple[optax.Params, optax.Params]:
    """Expand the prior's precision over the temperature, and its mean, to every leaf."""
    precision, mean = (_spread(getattr(potential, name), params) for name in PRIOR)
    return jax.tree.map(lambda x: x / potential.temperature, precision), mean


def gradient(potential: Potential, updates: optax.Updates, params: optax.Params) -> optax.Updates:
    """Compute grad U from the gradient of the mean loss, in nats per unit of the parameter."""
    weight = _weight(potential)

    def leaf(precision, mean, grad, x):
        return (weight * grad.astype(x.dtype) + precision * (x - mean)).astype(x.dtype)

    return jax.tree.map(leaf, *_prior(potential, params), updates, params)


def prior_energy(potential: Potential, params: optax.Params) -> jax.Array:
    """Compute the prior's part of the energy, up to a constant, a scalar in nats."""
    if potential.log_prior is not None:
        return -potential.log_prior(params) / potential.temperature

    def leaf(precision, mean, x):
        return jnp.sum(precision / 2 * jnp.square(x - mean))

    return _tree.total(jax.tree.map(leaf, *_prior(potential, params), params))


def prior_terms(
    potential: Potential, params: optax.Params, displacement: optax.Updates
) -> optax.Updates:
    """Compute the change of the prior's part of the energy after a displacement, in nats.

    It is the sum of the terms precision * displacement * (params - mean + displacement / 2), one
    for each parameter, with `params` before the displacement. The difference of two squared norms
    would lose half a nat in float32 at 10^7 parameters.
    """

    def leaf(precision, mean, x, dx):
        return (precision * dx * (x - mean + dx / 2)).astype(x.dtype)

    return jax.tree.map(leaf, *_prior(potential, params), params, displacement)


def energy_change(potential: Potential, loss_change: T, prior_change: T) -> T:
    """Compute the change of U in nats from the changes of the mean loss and of the prior's part."""
    return _weight(potential) * loss_change + prior_change


def excess_loss(potential: Potential, curvature: float, num_parameters: int) -> float:
    """Compute an upper bound on how far the mean loss of draws lies above the minimum.

    The minimum is at the prior's mean. A direction with the curvature h adds T h / (2 (N h + P)),
    which is concave in h. With the trace H of the Hessian, all d directions add at most

        T / 2 * H d / (N H + P d)

    nats per example. This is at most T d / (2 N), and at most T H / (2 P).
    """
    if curvature <= 0:
        return 0.0
    prior = potential.prior_precision / potential.temperature * num_parameters / curvature
    return num_parameters / (2 * (_weight(potential) + prior))


def least_excess_loss(potential: Potential, curvature: float, square: float) -> float:
    """Compute a lower bound on the same excess as `excess_loss`, by the Cauchy-Schwarz inequality.

    With the trace H of the Hessian and the trace S of its square, all directions add at least

        T / 2 * H^2 / (N S + P H)

    nats per example. Equality holds if all directions with nonzero curvature have the same.
    """
    if curvature <= 0 or square <= 0:
        return 0.0
    prior = potential.prior_precision / potential.temperature
    return curvature**2 / (2 * (_weight(potential) * square + prior * curvature))


def strength_for(
    potential: Potential, curvature: float, num_parameters: int, allowed: float
) -> float:
    """Compute the prior precision whose `excess_loss` is `allowed`: P = T H / (2 a) - N H / d.

    0 if the excess is smaller for every prior.
    """
    total = potential.temperature * curvature / (2 * allowed)
    return max(total - potential.num_data * curvature / num_parameters, 0.0)


def _count(potential: Potential) -> Any:
    """num_data as a float, since JAX's integers overflow at 2 10^9 tokens."""
    num_data = potential.num_data
    return num_data if isinstance(num_data, jax.Array) else float(num_data)


def _weight(potential: Potential) -> Any:
    """num_data over the temperature."""
    return _count(potential) / potential.temperature
