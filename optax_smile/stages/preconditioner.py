"""Stage 1: the scale of the mini-batch noise, coordinate by coordinate.

The microcanonical dynamics sample the right distribution if the gradient noise is isotropic.
A diagonal scale s makes it so: the sampler works with the whitened gradient grad U / s, and
divides a displacement by s on its way back to the parameters.
"""

import math
from collections.abc import Callable
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


class Preconditioner(NamedTuple):
    """A rule for the coordinates in which a chain moves: pure functions.

    Attributes:
        init: `init(params)`, the first state.
        observe: `observe(state, gradient)`, the next one, from the gradient of the energy.
        whiten: `whiten(state, gradient)`, a tree, and the number that makes it the gradient over
            the scale.
    A state is None, for a scale of one, or has a method `scale()`, a tree like the parameters.
    """

    init: Callable[[Any], Any]
    observe: Callable[[Any, Any], Any]
    whiten: Callable[[Any, Any], tuple[Any, jax.Array | float]]


def identity() -> Preconditioner:
    """Leave the coordinates as they are."""
    return Preconditioner(
        init=lambda params: None,
        observe=lambda state, gradient: None,
        whiten=lambda state, gradient: (gradient, 1.0),
    )


def gradient_noise(
    where: str = "gradient_noise",
    noise_decay: float = NOISE_DECAY,
    centered: bool = True,
    noise_clip: tuple[float, float] | None = None,
) -> Preconditioner:
    """Measure the standard deviation of the mini-batch noise in every coordinate.

    Args:
        where: name of the sampler, for errors.
        noise_decay: weight of the old value in the moving averages, in (0, 1].
        centered: average squares about the moving mean of the gradient.
        noise_clip: smallest and largest sigma; None for bounds relative to rms(sigma).

    Raises:
        ValueError: an argument out of range.
    """
    _check.number(where, "noise_decay", noise_decay, "in (0, 1]", lambda x: 0 < x <= 1)
    check_clip(where, noise_clip)

    def start(params):
        return init(params, centered, noise_clip)

    def take(state, gradient):
        return observe(state, gradient, noise_decay)

    return Preconditioner(init=start, observe=take, whiten=whiten)


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

    def scale(self) -> optax.Updates:
        """Compute the scale s, a tree like the parameters with mean(s^2) = 1."""
        return jax.tree.map(lambda x: (x / norm(self)).astype(x.dtype), relative_scale(self))


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
    params: optax.Params, centered: bool, noise_clip: tuple[float, float] | None = None
) -> PreconditionerState:
    """Start isotropic, with a scale of one."""
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
    state: PreconditionerState, gradient: optax.Updates, noise_decay: float
) -> PreconditionerState:
    """Take one mini-batch gradient into the averages.

    gradient_mean <- a gradient_mean + (1 - a) gradient, then
    gradient_variance <- a gradient_variance + (1 - a) (gradient - gradient_mean)^2,
    with a = noise_decay and the new mean (Sommer et al. 2026, section 3.2: their alpha = 1 - a).
    """

    def blend(old, new):
        return (noise_decay * old + (1 - noise_decay) * new).astype(old.dtype)

    mean = state.gradient_mean
    if mean is None:
        squares = jax.tree.map(jnp.square, gradient)
    else:
        mean = jax.tree.map(blend, mean, gradient)
        squares = jax.tree.map(lambda g, m: jnp.square(g - m), gradient, mean)
    weight = state.isotropic_weight
    observed = state._replace(
        gradient_mean=mean,
        gradient_variance=jax.tree.map(blend, state.gradient_variance, squares),
        variance_mean=blend(state.variance_mean, _tree.total(squares) / _tree.size(squares)),
        isotropic_weight=(noise_decay * weight).astype(weight.dtype),
    )
    relative = relative_scale(observed)
    return observed._replace(square_norm=_tree.inner(relative, relative) / _tree.size(gradient))


def relative_scale(state: PreconditionerState) -> optax.Updates:
    """Compute sigma / rms(sigma), clipped: the scale s up to its normalization.

    sigma_i^2 = v_i + w mean(v) / (1 - w) with w = `isotropic_weight`, so the relative variance
    sigma_i^2 / mean(sigma^2) is the average of v_i / mean(v) and 1 with weights 1 - w and w.
    """
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


def whiten(state: PreconditionerState, gradient: optax.Updates) -> tuple[optax.Updates, jax.Array]:
    """Divide the gradient by `relative_scale`; times `norm` it is the gradient over the scale."""
    return jax.tree.map(jnp.divide, gradient, relative_scale(state)), norm(state)


def norm(state: PreconditionerState) -> jax.Array:
    """Ratio of `relative_scale` to the scale s."""
    return jnp.sqrt(state.square_norm)


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
    noise = gradient_noise("scale_by_gradient_noise", noise_decay, centered)

    def init_fn(params: Any) -> Any:
        _tree.check_params("scale_by_gradient_noise", params, smallest=1)
        return noise.init(params)

    def update_fn(updates: Any, state: Any, params: Any = None):
        del params
        observed = noise.observe(state, updates)
        state = _tree.where(jnp.isfinite(norm(observed)), observed, state)
        return jax.tree.map(lambda g, s: (g / s).astype(g.dtype), updates, state.scale()), state

    return optax.GradientTransformation(init_fn, update_fn)
