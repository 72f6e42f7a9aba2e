"""Mistakes at the start: too few data for the parameters, steps that are too short, equal keys."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _check, _noise, _on_host, parallel
from optax_smile._types import Options
from optax_smile.diagnostics.findings import Check, chooser
from optax_smile.mistakes.batches import is_finite
from optax_smile.mistakes.gradients import NOT_FINITE
from optax_smile.mistakes.loss import Losses
from optax_smile.potential import Potential, excess_loss, least_excess_loss
from optax_smile.state import MOST_RISE, find

# Losses `[chain]` of a batch at parameters.
LossesAt: TypeAlias = Callable[[object, Any], np.ndarray | jax.Array]

TOO_FEW = "Too many parameters for these data: see `optax_smile.local.curvature_precision`."
# Angle of `angle_tuner`, and the factor by which a step size of the user must be below the step of
# that tuner to be too short.
ANGLE, MOST_SHORT = 0.06, 10.0
# Displacement relative to the size of the weights: losses are nearly quadratic at this distance,
# and float32 still resolves the difference.
DISTURBANCE = 0.02
SEED = 0
NUM_PAIRS = 8  # Random directions; the error of the trace of the squared Hessian is about a third.
STACK = "Stack a list of networks: `chains_from_weights([params, ...], num_chains=4, key=0)`."
STARTS = dataclasses.replace(parallel.STACKED, floating=True, advice=STACK)
WITHOUT_KEYS = "a tree of arrays of numbers [chain, ...]; a `stochastic` loss gets keys as `key=`"
AUX = dataclasses.replace(parallel.STACKED, text=WITHOUT_KEYS, keys=False)


def require(losses: Losses, chains: Any, batch: object):
    """Require finite losses on the first batch, and chains that differ."""
    values = losses(chains, batch)
    if lost := np.flatnonzero(~np.isfinite(values)).tolist():
        if not is_finite(batch):
            _check.fail("batches", "finite", "nan or inf in the first batch")
        rule = "a start at which the loss of every chain is finite"
        _check.fail("params", rule, f"{values[lost[0]]} in the chains {lost}", NOT_FINITE)
    # This includes parameters that the loss does not use.
    _check.Tree(finite=True)("params", chains.params)
    # With keys, each chain has its own random loss.
    if len({*values.tolist()}) < len(values) and not losses.per_chain and chains.key is None:
        # The chains may differ in any part of their state, such as the key of their noise.
        first = _on_host.first_alike(_on_host.local(chains))
        if copies := [chain for chain, like in enumerate(first) if like != chain]:
            rule = "chains with different starts, or a sampler or loss that draws random numbers"
            advice = (
                "Nothing here is random, so identical chains would stay identical. See"
                " `chains_from_weights`, or the sampler's `key`."
            )
            _check.fail("params", rule, f"copies in the chains {copies}", advice)


def rise(losses: Losses, chains: Any, batch: object) -> Iterator[Check]:
    """Find a posterior whose draws must have a far larger loss than the start.

    The test uses a lower bound for a quadratic loss, since the rise of the loss of a network cannot
    be predicted from the curvature at its start. If the bound is unknown, there is no test.
    """
    settings, params = losses.settings, chains.params
    if not settings or not {"num_data", "temperature", "prior_precision"} <= settings.keys():
        return
    number, temperature = settings["num_data"], settings["temperature"]
    precisions = jax.tree.leaves(settings["prior_precision"])
    are_known = all(isinstance(x, int | float) for x in (number, temperature, *precisions))
    if not are_known or not precisions or settings.get("log_prior") is not None:
        return
    posterior = Potential(number, max(precisions), temperature)
    size = sum(math.prod(x.shape[1:]) for x in jax.tree.leaves(params))
    # For most runs, the largest possible value, without curvature, is small enough.
    excess = excess_loss(posterior, np.inf, size)
    if excess > MOST_RISE:
        moments = _moments(partial(losses, chains), batch, params, losses(chains, batch))
        excess = least_excess_loss(posterior, *moments)
    passed = excess <= MOST_RISE
    outcome = "should stay near that of the start"
    if not passed:
        outcome = f"will be more than {MOST_RISE:g} nat per example above that of the start"
    text = (
        f"the loss of the draws {outcome}: {size} parameters, num_data={number:g}"
        f" (d / N = {size / number:.3g}), prior_precision={max(precisions):g} and"
        f" temperature={temperature:g}."
    )
    yield Check.of("start", (excess,), MOST_RISE, passed, text, TOO_FEW)


def _moments(
    losses: LossesAt, batch: object, params: optax.Params, start: np.ndarray
) -> tuple[float, float]:
    """Estimate the traces of the Hessian H of the mean loss and of its square, from losses alone.

    For random y and z, the mean of y H y is the first trace, that of (y H z)**2 the second.
    """
    along, traces, squares = _curvature_along(losses, batch, params, start), [], []
    for pair in jax.random.split(jax.random.key(SEED), NUM_PAIRS):
        y, z = (_noise.normal_like(key, params) for key in jax.random.split(pair))
        both = [jax.tree.map(combine, y, z) for combine in (jnp.add, jnp.subtract)]
        plus, minus = map(along, both)
        traces.append((plus + minus) / 4)
        squares.append(((plus - minus) / 4) ** 2)
    moments = float(np.mean(traces)), float(np.mean(squares))
    return moments if np.all(np.isfinite(moments)) else (0.0, 0.0)


def curvature(losses: LossesAt, batch: object, params: optax.Params, start: np.ndarray) -> float:
    """Estimate the trace of the Hessian of the mean loss, from one random direction per chain."""
    noise = _noise.normal_like(jax.random.key(SEED), params)
    with np.errstate(all="ignore"):
        trace = float(np.median(_curvature_along(losses, batch, params, start)(noise)))
    return max(trace, 0.0) if np.isfinite(trace) else 0.0


def _curvature_along(
    losses: LossesAt, batch: object, params: optax.Params, start: np.ndarray
) -> Callable[[object], np.ndarray]:
    """Return the function y H y `[chain]` of a direction y, for the Hessian H of the loss.

    `start` has the losses at `params`.
    """
    leaves = jax.tree.leaves(params)
    square = sum(jnp.sum(x**2) for x in leaves) / sum(x.size for x in leaves)
    width = DISTURBANCE * (float(jnp.sqrt(square)) or 1.0)

    def at(place: float, direction: object) -> np.ndarray:
        moved = jax.tree.map(lambda x, y: x + place * width * y, params, direction)
        return np.asarray(losses(batch, moved), float)

    return lambda y: (at(1, y) + at(-1, y) - 2 * np.asarray(start, float)) / width**2


def step_size(settings: Options | None, state: object) -> Iterator[Check]:
    """Find a step size of the user that is far too short, as learning rates usually are."""
    names = "mean_change_square", "num_changes", "mean_turn_rate", "change_share", "step_size"
    sampler: Any = find(state)
    stats = sampler.stats()._asdict()
    known = [stats[name] if name in stats else optax.tree.get(sampler, name) for name in names]
    if chooser(settings or {}) != "number" or any(x is None for x in known):
        return
    square, number, turn_rate, share, length = (np.asarray(_on_host.local(x), float) for x in known)
    # If steps are too short to change a gradient, the mean turn by whole gradients is a bound.
    rate = np.where(number > 0, np.sqrt(square), turn_rate)
    angle = ANGLE * np.minimum(0.5 / np.fmax(share, 0.5) ** 2, 1)
    # Without noise the change grows with the step, so the angle grows with its square.
    with np.errstate(all="ignore"):
        factor = float(np.median(np.sqrt(angle / (rate * length))))
    size, short = float(np.median(length)), factor > MOST_SHORT
    many = int(np.max(stats["num_parameters"]))
    fits = "too short for them" if short else "long enough for them"
    text = f"step_size={size:.3g} is the length of a step of all {many} parameters, and {fits}."
    each = f"each parameter moves by about {size / math.sqrt(many):.2g}"
    advice = (
        f"It is not a learning rate: {each}. Leave it out, or try at least {size * factor:.2g}."
    )
    yield Check.of("step size", (factor,), MOST_SHORT, not short, text, advice)


def shared_keys(state: optax.OptState, params: optax.Params) -> Check:
    """Find chains of a loop that share their random numbers."""
    keys = optax.tree.get(state, "key", filtering=lambda _, x: jnp.result_type(x) == jnp.uint32)
    alike = _on_host.first_alike(_on_host.local(keys if keys is not None else (state, params)))
    copies = tuple(chain for chain, first in enumerate(alike) if first != chain)
    subject = f"chains {list(copies)} use" if copies else "no chains use"
    text = f"{subject} the same random numbers as earlier chains."
    advice = "Make their states with `optax_smile.parallel.init(sampler, params, key=...)`."
    values = tuple(float(alike[chain]) for chain in copies)
    return Check("random numbers", copies, values, 0.0, not copies, advice * bool(copies), text)
