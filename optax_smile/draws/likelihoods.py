"""Likelihoods: how to interpret the outputs of a model."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import entr

from optax_smile import _check

# Arguments of the functions of a likelihood.
FORMS = {"mean": "(outputs)", "variance": "(outputs)", "entropy": "(mean)"}
FORMS |= {"log_density": "(outputs, targets)", "check": "(outputs, targets)"}
FORMS |= {"has_target": "(targets)"}
Name = Literal["categorical", "bernoulli", "gaussian", "tokens"]
# Rounding error of a sum of probabilities in half precision, and minimum count for the test.
SUM_ROUNDING, LEAST_NUMBERS = 0.01, 20


class Likelihood(NamedTuple):
    """How to interpret the outputs of a model.

    Attributes:
        mean: `mean(outputs)`, predictive mean or probabilities of one snapshot, `[input, ...]`;
            None if the average is not wanted.
        log_density: `log_density(outputs, targets)`, log likelihood of each target, nats,
            `[input]`.
        entropy: `entropy(mean)`, entropy of the predictive distribution, nats, `[input]`, if the
            mean determines it, as probabilities do. The uncertainty is then split by entropy.
        variance: `variance(outputs)`, variance of the predictive distribution of one snapshot, of
            the shape of the mean. The uncertainty is then split by variance instead.
        check: `check(outputs, targets)` gets the shapes and dtypes of the outputs, and targets or
            None, and raises a ValueError if they do not match.
        has_target: `has_target(targets)`, False for padding: there the log density is NaN, and no
            score counts it. None: every entry has a target.

    Example:
        >>> import jax.numpy as jnp, optax_smile
        >>> from jax.scipy.stats import poisson
        >>> likelihood = optax_smile.Likelihood(
        ...     mean=jnp.exp,
        ...     log_density=lambda log_rate, count: poisson.logpmf(count, jnp.exp(log_rate)),
        ...     variance=jnp.exp,
        ... )
        >>> apply_fn = lambda params, x: x * params
        >>> optax_smile.predict(apply_fn, [0.0], jnp.ones(2), likelihood=likelihood).mean.tolist()
        [1.0, 1.0]
    """

    mean: Callable[[Any], jax.Array] | None
    log_density: Callable[[Any, Any], jax.Array]
    entropy: Callable[[Any], jax.Array] | None = None
    variance: Callable[[Any], jax.Array] | None = None
    check: Callable[[Any, Any], None] | None = None
    has_target: Callable[[Any], jax.Array] | None = None


def _check_logits(name: str, axes: str, smallest_label: int, outputs: Any, targets: object):
    """Require logits with these axes, and integer labels that match them."""
    if not hasattr(outputs, "shape") or len(outputs.shape) != axes.count(",") + 1:
        rule = f"a function that returns logits {axes} for {name!r}"
        _check.fail("apply_fn", rule, jax.tree.map(lambda x: x.shape, outputs))
    if targets is None:
        return
    *shape, num_classes = outputs.shape
    targets = np.asarray(targets)
    if targets.shape != tuple(shape) or not np.issubdtype(targets.dtype, np.integer):
        rule = f"integers of shape {tuple(shape)}"
        _check.fail("targets", rule, f"{targets.dtype} of shape {targets.shape}")
    if targets.size and not smallest_label <= targets.min() <= targets.max() < num_classes:
        rule = f"classes from {smallest_label} to {num_classes - 1}"
        _check.fail("targets", rule, f"{targets.min()} to {targets.max()}")


def _check_bernoulli(outputs: Any, targets: Any):
    if not hasattr(outputs, "shape"):
        rule = "a function that returns one logit per target for 'bernoulli'"
        _check.fail("apply_fn", rule, _check.show(outputs))
    if targets is not None:
        _check_real_targets(outputs.shape, targets)
        if not np.all(np.isin(targets, (0, 1))):
            wrong = np.asarray(targets)[~np.isin(targets, (0, 1))]
            _check.fail("targets", "0 or 1", f"{wrong.flat[0]}")


def _check_gaussian(outputs: Any, targets: object):
    rule = (
        "a function that returns a pair (mean, log_std) for 'gaussian', where log_std is a scalar"
        " or has as many axes as mean and broadcasts to it"
    )
    is_pair = isinstance(outputs, (tuple, list)) and len(outputs) == 2
    if not is_pair or not all(hasattr(x, "shape") for x in outputs):
        _check.fail("apply_fn", rule, _check.show(outputs))
    shapes = [x.shape for x in outputs]
    fits = [b in (a, 1) for a, b in zip(*shapes, strict=False)]
    if not all(fits) or len(shapes[1]) not in (0, len(shapes[0])):
        _check.fail("apply_fn", rule, f"the shapes {shapes[0]} and {shapes[1]}")
    if targets is not None:
        _check_real_targets(shapes[0], targets)


def _check_real_targets(shape: tuple[int, ...], targets: object):
    """Require targets of the shape of the mean: `[input, 1]` and `[input]` would broadcast."""
    targets = np.asarray(targets)
    if targets.shape != shape:
        _check.fail("targets", f"of the shape of the mean, {shape}", f"{targets.shape}")
    if not np.all(np.isfinite(targets)):
        rows = np.argwhere(~np.isfinite(targets))[0].tolist()
        _check.fail("targets", "finite", f"{targets[tuple(rows)]} at {rows}")


def _categorical_log_density(logits: jax.Array, labels: jax.Array) -> jax.Array:
    # A gather fails along a class axis that is sharded over devices.
    is_label = jax.nn.one_hot(labels, logits.shape[-1], dtype=bool)
    return jnp.sum(jnp.where(is_label, jax.nn.log_softmax(logits), 0), axis=-1)


def _gaussian_log_density(outputs: tuple[jax.Array, jax.Array], targets: jax.Array) -> jax.Array:
    mean, log_std = outputs
    standardized = (targets - mean) * jnp.exp(-log_std)
    return _over_outputs(-0.5 * standardized**2 - log_std - 0.5 * math.log(2 * math.pi))


def _over_outputs(log_density: jax.Array) -> jax.Array:
    """Sum over the outputs of each input."""
    return jnp.sum(log_density, axis=tuple(range(1, log_density.ndim)))


def form_of(likelihood: Likelihood, outputs: Any) -> jax.Array:
    """Count properties of outputs for `are_probabilities`; counts of several calls add up."""
    counted: tuple[jax.Array, ...] = (jnp.ones(1),)
    if likelihood is NAMED["bernoulli"]:
        counted = (outputs < 0) | (outputs > 1), outputs < 0.1, outputs > 0.9
    elif likelihood in (NAMED["categorical"], NAMED["tokens"]):
        is_probability = jnp.all((outputs >= 0) & (outputs <= 1), axis=-1)
        counted = (~is_probability | (jnp.abs(outputs.sum(axis=-1) - 1) > SUM_ROUNDING),)
    sums = (jnp.sum(x, dtype=jnp.float32) for x in counted)
    return jnp.stack([*sums, jnp.float32(counted[0].size)])


def are_probabilities(counts: np.ndarray) -> bool:
    """Whether outputs look like probabilities instead of logits."""
    others, *extremes, number = counts
    # With two classes, numbers that are all near one half may be logits.
    is_clear = number >= LEAST_NUMBERS and min(extremes, default=number) >= number / LEAST_NUMBERS
    return not others and (is_clear or not extremes)


NAMED: dict[Name, Likelihood] = {
    "categorical": Likelihood(
        jax.nn.softmax,
        _categorical_log_density,
        entropy=lambda probabilities: jnp.sum(entr(probabilities), axis=-1),
        check=partial(_check_logits, "categorical", "[input, class]", 0),
    ),
    "bernoulli": Likelihood(
        jax.nn.sigmoid,
        lambda logits, y: _over_outputs(jax.nn.log_sigmoid(jnp.where(y > 0, logits, -logits))),
        entropy=lambda probability: entr(probability) + entr(1 - probability),
        check=_check_bernoulli,
    ),
    "gaussian": Likelihood(
        lambda outputs: outputs[0],
        _gaussian_log_density,
        variance=lambda outputs: jnp.broadcast_to(jnp.exp(2 * outputs[1]), outputs[0].shape),
        check=_check_gaussian,
    ),
    "tokens": Likelihood(
        None,
        _categorical_log_density,
        check=partial(_check_logits, "tokens", "[input, token, class]", -1),
        has_target=lambda labels: labels >= 0,
    ),
}
