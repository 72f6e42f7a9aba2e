"""The Bayesian model average, one snapshot at a time."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_smile import _check


class Likelihood(NamedTuple):
    """How a model's outputs are read.

    Attributes:
        mean: `mean(outputs)`, predictive mean or probabilities of one snapshot, `[input, ...]`.
        log_density: `log_density(outputs, targets)`, log likelihood of each target, `[input]`.
    """

    mean: Callable[[Any], jax.Array]
    log_density: Callable[[Any, Any], jax.Array]


class Prediction(NamedTuple):
    """Average over all snapshots.

    Attributes:
        mean: predictive mean or class probabilities, `[input, ...]`.
        log_density: log of the average likelihood of each target, nats, `[input]`; its mean is the
            log pointwise predictive density (LPPD). None without targets.
    """

    mean: jax.Array
    log_density: Any


def _categorical_log_density(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return -optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def _gaussian_log_density(outputs: tuple[jax.Array, jax.Array], targets: jax.Array) -> jax.Array:
    mean, log_std = outputs
    standardized = (targets - mean) * jnp.exp(-log_std)
    return -0.5 * standardized**2 - log_std - 0.5 * jnp.log(2 * jnp.pi)


LIKELIHOODS = {
    "categorical": Likelihood(jax.nn.softmax, _categorical_log_density),
    "gaussian": Likelihood(lambda outputs: outputs[0], _gaussian_log_density),
}


def predict(
    apply_fn: Callable[[optax.Params, Any], Any],
    snapshots: Iterable[optax.Params],
    inputs: Any,
    *,
    likelihood: str | Likelihood,
    targets: Any = None,
) -> Prediction:
    """Average the predictions of all snapshots, holding the outputs of one at a time.

    Args:
        apply_fn: `apply_fn(params, inputs)`, the outputs of one model for all inputs.
        snapshots: parameter trees: what `sample` returns, `Snapshots.from_members(members)` for a
            deep ensemble, or any other iterable, also a generator.
        inputs: what `apply_fn` takes, `[input, ...]`.
        likelihood: `"categorical"` (outputs are logits `[input, class]`, targets labels
            `[input]`), `"gaussian"` (outputs are a pair of mean and log standard deviation,
            targets `[input]`), or a `Likelihood` of one's own.
        targets: what was observed, `[input, ...]`.

    Returns:
        A `Prediction`: mean `[input, ...]` and, with targets, the log density `[input]`.

    Raises:
        ValueError: an unknown likelihood, or no snapshots.

    Cost: one forward pass per snapshot; memory for the outputs of one.

    Example:
        >>> import jax.numpy as jnp, optax_smile
        >>> apply_fn = lambda params, x: x @ params
        >>> prediction = optax_smile.predict(
        ...     apply_fn, [jnp.eye(2), -jnp.eye(2)], jnp.eye(2), likelihood="categorical"
        ... )
        >>> prediction.mean.tolist()
        [[0.5, 0.5], [0.5, 0.5]]
    """
    if not isinstance(likelihood, Likelihood):
        _check.choice("predict", "likelihood", likelihood, LIKELIHOODS)
        likelihood = LIKELIHOODS[likelihood]

    @jax.jit
    def evaluate(params):
        outputs = apply_fn(params, inputs)
        if targets is None:
            return Prediction(likelihood.mean(outputs), None)
        return Prediction(likelihood.mean(outputs), likelihood.log_density(outputs, targets))

    @jax.jit
    def average(so_far, new, count):
        mean = so_far.mean + (new.mean - so_far.mean) / count
        if so_far.log_density is None:
            return Prediction(mean, None)
        return Prediction(mean, jnp.logaddexp(so_far.log_density, new.log_density))

    total, count = None, 0
    for count, params in enumerate(snapshots, start=1):
        new = evaluate(params)
        total = new if total is None else average(total, new, count)
    if total is None:
        _check.fail("predict", "snapshots", "at least one parameter tree", "none")
    if total.log_density is None:
        return total
    return total._replace(log_density=total.log_density - jnp.log(count))
