"""Will draws around trained weights be far worse than these, before a run begins?"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _tree
from optax_smile.diagnostics.results import Check
from optax_smile.potential import Potential, excess_loss, least_excess_loss
from optax_smile.state import MOST_RISE

# Of the size of the weights: losses are quadratic so near, and float32 still shows it.
DISTURBANCE = 0.02
SEED = 0
# Of directions: so many estimate the trace of the square to a third.
NUM_PAIRS = 8


def rise(
    losses: Callable[..., jax.Array],
    batch: Any,
    params: optax.Params,
    start: np.ndarray,
    settings: Mapping[str, Any] | None,
) -> Check | None:
    """Find a posterior whose draws certainly have a far larger loss than the start.

    It goes by a lower bound of a quadratic loss. How far the loss of a network rises the curvature
    at its start does not tell, so no number is given. None where it cannot be told: no sampler's
    settings, a prior that is a function, or a precision in arrays; in a tree of numbers the largest
    counts.

    Args:
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
        return None
    posterior = Potential(number, max(precisions), temperature)
    size = sum(math.prod(x.shape[1:]) for x in jax.tree.leaves(params))
    # Without curvature it would be the most there can be: most runs need no look at it.
    found = excess_loss(posterior, np.inf, size)
    if found > MOST_RISE:
        found = least_excess_loss(posterior, *_moments(losses, batch, params, start))
    passed = found <= MOST_RISE
    text = f"{size} parameters for num_data={number:g}"
    if not passed:
        text = (
            f"the loss will rise by more than {MOST_RISE:g} nat per example: the data determine too"
            f" few of {text} (d / N = {size / number:.3g}) at prior_precision={max(precisions):g}"
            f" and temperature={temperature:g}."
        )
    advice = "To sample around trained weights see `optax_smile.local.local_precision`."
    return Check(
        "worse than the start", (), (found,), MOST_RISE, passed, "" if passed else advice, text
    )


def _moments(
    losses: Callable[..., jax.Array], batch: Any, params: optax.Params, start: np.ndarray
) -> tuple[float, float]:
    """Estimate the traces of the Hessian of the mean loss and of its square.

    With two random directions y and z in each chain, from losses alone: y H z is a difference of
    four of them, and the mean of its square is the trace of the square.
    """
    width = _width(params)
    traces, squares = [], []
    for pair in jax.random.split(jax.random.key(SEED), NUM_PAIRS):
        first, second = (_tree.normal_like(key, params) for key in jax.random.split(pair))

        def at(one: int, other: int, y: Any = first, z: Any = second) -> np.ndarray:
            moved = jax.tree.map(lambda x, y, z: x + width * (one * y + other * z), params, y, z)
            return np.asarray(_tree.local(losses(batch, moved)), float)

        along, across = at(1, 1) + at(-1, -1), at(1, -1) + at(-1, 1)
        traces.append((along + across - 4 * np.asarray(start, float)) / (4 * width**2))
        squares.append(((along - across) / (4 * width**2)) ** 2)
    found = float(np.mean(traces)), float(np.mean(squares))
    return found if np.all(np.isfinite(found)) else (0.0, 0.0)


def curvature(
    losses: Callable[..., jax.Array], batch: Any, params: optax.Params, start: np.ndarray
) -> float:
    """Estimate the trace of the Hessian of the mean loss, from one random direction per chain."""
    noise = _tree.normal_like(jax.random.key(SEED), params)
    width = _width(params)

    def at(sign: int) -> np.ndarray:
        moved = jax.tree.map(lambda x, z: x + sign * width * z, params, noise)
        return np.asarray(_tree.local(losses(batch, moved)), float)

    with np.errstate(all="ignore"):
        found = float(np.median((at(1) + at(-1) - 2 * np.asarray(start, float)) / width**2))
    return max(found, 0.0) if np.isfinite(found) else 0.0


def _width(params: optax.Params) -> float:
    """Length of a disturbance of each weight."""
    leaves = jax.tree.leaves(params)
    square = sum(jnp.sum(x**2) for x in leaves) / sum(x.size for x in leaves)
    return DISTURBANCE * (float(jnp.sqrt(square)) or 1.0)
