"""Stage 1: the scale of the mini-batch noise, coordinate by coordinate.

The microcanonical dynamics sample the right distribution if the gradient noise is isotropic.
A diagonal scale s makes it so: the sampler works with the whitened gradient grad U / s, and
divides a displacement by s on its way back to the parameters.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_smile import _check, _tree

# Bounds of (sigma / rms(sigma))^2: a coordinate without noise moves at most 100 times as far as
# the typical one, and a few very noisy ones cannot stop the others.
SMALLEST_RELATIVE_VARIANCE = 1e-4
LARGEST_RELATIVE_VARIANCE = 1e4
# Weight of the old value in the moving averages; 1 - alpha in the paper.
NOISE_DECAY = 0.99


class PreconditionerState(NamedTuple):
    """Moving averages over the mini-batch gradients of all calls that were kept.

    Attributes:
        gradient_mean: mean gradient, a tree like the parameters; None if not centered.
        gradient_variance: mean square about `gradient_mean`, a tree like the parameters.
        variance_mean: mean of `gradient_variance` over all coordinates, scalar.
        isotropic_weight: weight of the isotropic start, noise_decay^t after t gradients, scalar.
        square_norm: mean of the clipped relative variances, which makes mean(s^2) = 1, scalar.
        clip: smallest and largest sigma `[2]`; None for bounds relative to rms(sigma).
    """

    gradient_mean: optax.Updates | None
    gradient_variance: optax.Updates
    variance_mean: jax.Array
    isotropic_weight: jax.Array
    square_norm: jax.Array
    clip: jax.Array | None


def check(where: str, noise_decay: float) -> float:
    """Require 0 < noise_decay <= 1."""
    _check.number(where, "noise_decay", noise_decay, "in (0, 1]", lambda x: 0 < x <= 1)
    return noise_decay


def check_clip(where: str, noise_clip: tuple[float, float] | None):
    """Require bounds 0 < smallest < largest, or None."""
    if noise_clip is None:
        return
    try:
        smallest, largest = noise_clip
        is_good = bool(0 < smallest < largest < math.inf)
    except (TypeError, ValueError):
        is_good = False
    if not is_good:
        rule = "two numbers, 0 < smallest < largest, or None"
        _check.fail(where, "noise_clip", rule, repr(noise_clip))


def init(
    params: optax.Params,
    noise_decay: float | None,
    centered: bool,
    noise_clip: tuple[float, float] | None = None,
) -> PreconditionerState | None:
    """Start isotropic, with a scale of one; None, a scale of one for ever, without a decay."""
    if noise_decay is None:
        return None
    dtype = _tree.dtype(params)
    return PreconditionerState(
        gradient_mean=jax.tree.map(jnp.zeros_like, params) if centered else None,
        gradient_variance=jax.tree.map(jnp.zeros_like, params),
        variance_mean=jnp.zeros((), dtype),
        isotropic_weight=jnp.ones((), dtype),
        square_norm=jnp.ones((), dtype),
        clip=None if noise_clip is None else jnp.asarray(noise_clip, dtype),
    )


def observe(
    state: PreconditionerState | None, gradient: optax.Updates, noise_decay: float | None
) -> PreconditionerState | None:
    """Take one mini-batch gradient into the averages; `normalize` completes the new state.

    gradient_mean <- a gradient_mean + (1 - a) gradient, then
    gradient_variance <- a gradient_variance + (1 - a) (gradient - gradient_mean)^2,
    with a = noise_decay and the new mean (Sommer et al. 2026, section 3.2: their alpha = 1 - a).
    """
    if state is None or noise_decay is None:
        return None

    def blend(old, new):
        return (noise_decay * old + (1 - noise_decay) * new).astype(old.dtype)

    mean = state.gradient_mean
    if mean is None:
        squares = jax.tree.map(jnp.square, gradient)
    else:
        mean = jax.tree.map(blend, mean, gradient)
        squares = jax.tree.map(lambda g, m: jnp.square(g - m), gradient, mean)
    weight = state.isotropic_weight
    return state._replace(
        gradient_mean=mean,
        gradient_variance=jax.tree.map(blend, state.gradient_variance, squares),
        variance_mean=blend(state.variance_mean, _tree.total(squares) / _tree.size(squares)),
        isotropic_weight=(noise_decay * weight).astype(weight.dtype),
    )


def relative_scale(state: PreconditionerState | None) -> optax.Updates | None:
    """Compute sigma / rms(sigma), clipped: the scale s up to its normalization.

    sigma_i^2 = v_i + w mean(v) / (1 - w) with w = `isotropic_weight`, so the relative variance
    sigma_i^2 / mean(sigma^2) is the average of v_i / mean(v) and 1 with weights 1 - w and w.
    """
    if state is None:
        return None
    mean = state.variance_mean
    # Below the normal numbers of the precision the quotient would overflow: no noise was seen.
    noisy = ~(mean < jnp.finfo(mean.dtype).tiny)
    slope = jnp.where(noisy, (1 - state.isotropic_weight) / jnp.where(noisy, mean, 1), 0)
    offset = 1 - slope * mean
    low, high = SMALLEST_RELATIVE_VARIANCE, LARGEST_RELATIVE_VARIANCE
    if state.clip is not None:
        # No relative variance exceeds the number of coordinates; larger bounds could overflow.
        most = _tree.size(state.gradient_variance)
        low, high = jnp.where(noisy, jnp.minimum(state.clip**2 * slope, most), 1)

    def leaf_scale(variance):
        relative = (offset + slope * variance).astype(variance.dtype)
        return jnp.sqrt(jnp.clip(relative, low, high))

    return jax.tree.map(leaf_scale, state.gradient_variance)


def whiten(gradient: optax.Updates, relative: optax.Updates | None) -> optax.Updates:
    """Divide the gradient by a scale; None stands for one."""
    return gradient if relative is None else jax.tree.map(jnp.divide, gradient, relative)


def normalize(
    state: PreconditionerState | None, square_sum: jax.Array
) -> PreconditionerState | None:
    """Set mean(s^2) = 1, given the sum of the squares of `relative_scale`."""
    if state is None:
        return None
    return state._replace(square_norm=square_sum / _tree.size(state.gradient_variance))


def norm(state: PreconditionerState | None) -> jax.Array | float:
    """Ratio of `relative_scale` to the scale s."""
    return 1.0 if state is None else jnp.sqrt(state.square_norm)


def scale(state: PreconditionerState | None) -> optax.Updates | None:
    """Compute the scale s, a tree like the parameters with mean(s^2) = 1; None stands for one."""
    if state is None:
        return None
    return jax.tree.map(lambda x: (x / norm(state)).astype(x.dtype), relative_scale(state))


def scale_by_gradient_noise(
    noise_decay: float = NOISE_DECAY, centered: bool = True
) -> optax.GradientTransformation:
    """Divide the updates by the normalized standard deviation of the mini-batch noise.

    After it the noise of the gradient has about the same variance in every coordinate, while
    isotropic noise passes unchanged: updates <- updates / s with mean(s^2) = 1.

    Args:
        noise_decay: weight of the old value in the moving averages, in (0, 1]; 1 keeps s = 1.
        centered: average squares about the mean gradient, as published; otherwise second moments,
            which saves one parameter-sized array.

    Returns:
        An Optax transformation. A non-finite gradient passes through and leaves the averages
        as they are.

    Raises:
        ValueError: `noise_decay` out of range.

    Cost: two parameter-sized arrays of state (one if not centered), no gradient.

    Example:
        >>> import jax.numpy as jnp, optax, optax_smile
        >>> tx = optax.chain(optax_smile.scale_by_gradient_noise(), optax.sgd(0.1))
        >>> params = jnp.zeros(2)
        >>> updates, _ = tx.update(jnp.array([1.0, -1.0]), tx.init(params), params)

    Source: Sommer et al., ICML 2026, section 3.2, noise preconditioning. Differs: starts
    isotropic and clips s relative to its root mean square, so that neither the first steps nor
    the clipping depend on the unit of the gradient.
    """
    check("scale_by_gradient_noise", noise_decay)

    def init_fn(params: Any) -> Any:
        _tree.check_params("scale_by_gradient_noise", params, smallest=1)
        return init(params, noise_decay, centered)

    def update_fn(updates: Any, state: Any, params: Any = None):
        del params
        observed = observe(state, updates, noise_decay)
        relative = relative_scale(observed)
        observed = normalize(observed, _tree.inner(relative, relative))
        state = _tree.where(jnp.isfinite(norm(observed)), observed, state)
        return jax.tree.map(lambda g, s: (g / s).astype(g.dtype), updates, scale(state)), state

    return optax.GradientTransformation(init_fn, update_fn)
