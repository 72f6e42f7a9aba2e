"""What the loss of draws around trained weights will be, before a run begins."""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _tree
from optax_smile.potential import Potential, excess_loss
from optax_smile.state import MOST_RISE

# Of the size of the weights: losses are quadratic so near, and float32 still shows it.
DISTURBANCE = 0.02
SEED = 0


def warn_of_rise(
    where: str,
    losses: Callable[..., jax.Array],
    batch: Any,
    params: optax.Params,
    start: np.ndarray,
    settings: Mapping[str, Any] | None,
):
    """Warn of a posterior whose draws have a far larger loss than the start.

    Silent where it cannot be told: no sampler's settings, a prior that is a function, or a
    precision in arrays; in a tree of numbers the smallest counts.

    Args:
        where: the public function.
        losses: `losses(batch, params)` of all chains, `[chain]`.
        batch: the first one.
        params: start of the chains, arrays `[chain, ...]`.
        start: loss of each chain there, `[chain]`.
        settings: of the sampler.
    """
    told: Mapping[str, Any] = settings or {}
    precisions = jax.tree.leaves(told.get("prior_precision"))
    number, temperature = (told.get(name, "unknown") for name in ("num_data", "temperature"))
    numbers = number, temperature, *(precisions or "?")
    is_function = told.get("log_prior") is not None
    if is_function or not all(isinstance(x, int | float) for x in numbers):
        return
    posterior = Potential(number, min(precisions), temperature)
    size = sum(math.prod(x.shape[1:]) for x in jax.tree.leaves(params))
    # Without curvature it would be the most there can be: most runs need no look at it.
    if excess_loss(posterior, np.inf, size) <= MOST_RISE:
        return
    rise = excess_loss(posterior, curvature(losses, batch, params, start), size)
    if rise > MOST_RISE:
        message = (
            f"`{where}`: the loss will rise. With {size} parameters for {number:g} examples"
            f" (d / N = {size / number:.3g}), prior_precision={min(precisions):g} and"
            f" temperature={temperature:g}, draws have a loss of up to {rise:.2g} nats per example"
            f" above that of a minimum; at the start it is {np.median(start):.3g}. To sample around"
            " trained weights see `optax_smile.local.local_precision`."
        )
        warnings.warn(message, stacklevel=2)


def curvature(
    losses: Callable[..., jax.Array], batch: Any, params: optax.Params, start: np.ndarray
) -> float:
    """Estimate the trace of the Hessian of the mean loss, from one random direction per chain."""
    noise = _tree.normal_like(jax.random.key(SEED), params)
    leaves = jax.tree.leaves(params)
    square = sum(jnp.sum(x**2) for x in leaves) / sum(x.size for x in leaves)
    width = DISTURBANCE * (float(jnp.sqrt(square)) or 1.0)

    def at(sign: int) -> np.ndarray:
        moved = jax.tree.map(lambda x, z: x + sign * width * z, params, noise)
        return np.asarray(_tree.local(losses(batch, moved)), float)

    with np.errstate(all="ignore"):
        found = float(np.median((at(1) + at(-1) - 2 * np.asarray(start, float)) / width**2))
    return max(found, 0.0) if np.isfinite(found) else 0.0
