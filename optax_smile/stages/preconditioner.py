"""Stage 1: the scale of the gradients, coordinate by coordinate.

The microcanonical dynamics sample the right distribution if the gradient noise is isotropic.
A diagonal scale s brings it closer to that: the sampler works with the whitened gradient
grad U / s, and divides a displacement by s on its way back to the parameters.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_smile import _tree

# Bounds of (sigma / rms(sigma))^2: a coordinate without noise moves at most 100 times as far as
# the typical one, and a few very noisy ones cannot stop the others.
SMALLEST_RELATIVE_VARIANCE = 1e-4
LARGEST_RELATIVE_VARIANCE = 1e4
# Weight of the old value in the moving averages; 1 - alpha in the paper.
NOISE_DECAY = 0.99
# Largest weight of a new difference in the average over the run.
LARGEST_RATE = 0.01


class Preconditioner(NamedTuple):
    """A rule for the coordinates in which a chain moves: pure functions.

    Attributes:
        init: `init(params)`, the first state.
        whiten: `whiten(state, gradient)`, the gradient of the energy over the scale.
        observe: `observe(state, gradient, trust, counts, anew)`, the next state. `trust` in (0, 1]
            is what an outlying gradient is to be multiplied with; `counts` is False for one that
            says nothing, or belongs to a point inside of a step; `anew` is True while the chain is
            still on its way, where averages say nothing of the posterior.

    A state is None, for a scale of one, or has a method `scale()`, a tree like the parameters. The
    scale comes from the gradients *before* the one that is whitened: no gradient changes its own
    coordinates, and a step closes in those in which it drifted.
    """

    init: Callable[[Any], Any]
    whiten: Callable[[Any, Any], Any]
    observe: Callable[..., Any]


def identity() -> Preconditioner:
    """Leave the coordinates as they are."""
    return Preconditioner(
        init=lambda params: None,
        whiten=lambda state, gradient: gradient,
        observe=lambda state, gradient, trust, counts, anew: None,
    )


def whiten(state: Any, gradient: optax.Updates) -> optax.Updates:
    """Divide by the scale of a state."""
    return jax.tree.map(jnp.divide, gradient, state.scale())


def relative_scale(
    variance: optax.Updates, mean: jax.Array, isotropic_weight: jax.Array
) -> optax.Updates:
    """Compute s = sigma / rms(sigma), clipped, a tree like the parameters.

    s_i^2 = w + (1 - w) v_i / mean(v), so that mean(s^2) = 1 but for the clipping. As a sum of two
    positive numbers: 1 - (1 - w) would lose all digits of a coordinate with little noise.

    Args:
        variance: v, up to a factor.
        mean: mean of v over all coordinates, scalar.
        isotropic_weight: w in [0, 1].
    """
    # Below the normal numbers of the precision the quotient would overflow: no noise was seen.
    noisy = ~(mean < jnp.finfo(mean.dtype).tiny)
    offset = jnp.where(noisy, isotropic_weight, 1)
    slope = jnp.where(noisy, (1 - isotropic_weight) / jnp.where(noisy, mean, 1), 0)

    def leaf(v):
        relative = (offset + slope * v).astype(v.dtype)
        return jnp.sqrt(jnp.clip(relative, SMALLEST_RELATIVE_VARIANCE, LARGEST_RELATIVE_VARIANCE))

    return jax.tree.map(leaf, variance)


class MovingVarianceState(NamedTuple):
    """Exponential averages over the mini-batch gradients of the kept step ends.

    Attributes:
        gradient_mean: mean gradient, a tree like the parameters.
        gradient_variance: mean square about `gradient_mean`, a tree like the parameters.
        variance_mean: mean of `gradient_variance` over all coordinates, scalar.
        isotropic_weight: weight of the isotropic start, noise_decay^t after t gradients, scalar.
    """

    gradient_mean: optax.Updates
    gradient_variance: optax.Updates
    variance_mean: jax.Array
    isotropic_weight: jax.Array

    def scale(self) -> optax.Updates:
        """Compute the scale s, a tree like the parameters."""
        return relative_scale(self.gradient_variance, self.variance_mean, self.isotropic_weight)


def moving_variance(noise_decay: float = NOISE_DECAY) -> Preconditioner:
    """Measure the noise as published: exponential averages of the squares about a moving mean.

    gradient_mean <- a gradient_mean + (1 - a) gradient, then
    gradient_variance <- a gradient_variance + (1 - a) (gradient - gradient_mean)^2,
    with a = noise_decay and the new mean (Sommer et al. 2026, section 3.2: their alpha = 1 - a).
    Where there is little noise it follows the gradient along the path of the chain, and the
    posterior is lost.
    """

    def init(params: optax.Params) -> MovingVarianceState:
        dtype = _tree.dtype(params)
        return MovingVarianceState(
            gradient_mean=jax.tree.map(jnp.zeros_like, params),
            gradient_variance=jax.tree.map(jnp.zeros_like, params),
            variance_mean=jnp.zeros((), dtype),
            isotropic_weight=jnp.ones((), dtype),
        )

    def observe(state, gradient, trust, counts, anew):
        del anew
        rate = jnp.where(counts, 1 - noise_decay, 0)

        def average(old, new):
            return (old + rate * (new - old)).astype(old.dtype)

        mean = jax.tree.map(lambda m, g: average(m, trust * g), state.gradient_mean, gradient)
        squares = jax.tree.map(lambda g, m: jnp.square(trust * g - m), gradient, mean)
        return MovingVarianceState(
            gradient_mean=mean,
            gradient_variance=jax.tree.map(average, state.gradient_variance, squares),
            variance_mean=average(state.variance_mean, _tree.total(squares) / _tree.size(squares)),
            isotropic_weight=average(state.isotropic_weight, 0),
        )

    return Preconditioner(init, whiten, observe)


class MeanSquareState(NamedTuple):
    """Averages over the mini-batch gradients of the kept step ends since the chain has arrived.

    Attributes:
        last_gradient: the one before, a tree like the parameters; None where differences do not
            matter.
        mean_square: of the gradients or of their differences, a tree like the parameters.
        total_mean: mean of `mean_square` over all coordinates, scalar.
        isotropic_weight: weight of the isotropic start, scalar.
        num_gradients: how many entered, int32.
    """

    last_gradient: optax.Updates | None
    mean_square: optax.Updates
    total_mean: jax.Array
    isotropic_weight: jax.Array
    num_gradients: jax.Array

    def scale(self) -> optax.Updates:
        """Compute the scale s, a tree like the parameters."""
        return relative_scale(self.mean_square, self.total_mean, self.isotropic_weight)


def mean_square(differences: bool = False) -> Preconditioner:
    """Measure the root mean square of the gradients, or of their noise alone.

    q <- (1 - r) q + r g^2, or with differences (g - g_before)^2 / 2 in place of g^2, and
    r = min(1/100, 1 / t) after t gradients since the chain has arrived. A gradient changes little
    by a step of the chain and much by another batch: differences are noise. The averages are as
    old as the run, so that the scale hardly depends on the place.

    Args:
        differences: without explicit noise the noise of the gradients must be isotropic by
            itself, which their differences achieve. With it the squares do better: where noise
            prevails they are as good, and elsewhere they even out the curvature.
    """

    def init(params: optax.Params) -> MeanSquareState:
        dtype = _tree.dtype(params)
        return MeanSquareState(
            last_gradient=jax.tree.map(jnp.zeros_like, params) if differences else None,
            mean_square=jax.tree.map(jnp.zeros_like, params),
            total_mean=jnp.zeros((), dtype),
            isotropic_weight=jnp.ones((), dtype),
            num_gradients=jnp.zeros((), jnp.int32),
        )

    def observe(state, gradient, trust, counts, anew):
        # The first gradient has none before it.
        number = jnp.where(anew, 0, state.num_gradients)
        rate = jnp.minimum(LARGEST_RATE, 1 / jnp.maximum(number, 1))
        rate = jnp.where(counts & (number > 0), rate, 0)
        kept = jnp.where(anew, 0, 1 - rate)

        def average(old, new):
            return (kept * old + rate * new).astype(old.dtype)

        last, trusted = None, jax.tree.map(lambda g: (trust * g).astype(g.dtype), gradient)
        if differences:
            squares = jax.tree.map(lambda g, h: jnp.square(g - h) / 2, trusted, state.last_gradient)
            last = _tree.where(counts, trusted, state.last_gradient)
        else:
            squares = jax.tree.map(jnp.square, trusted)
        mean = jax.tree.map(average, state.mean_square, squares)
        weight = kept * state.isotropic_weight + jnp.where(anew, 1, 0)
        return MeanSquareState(
            last_gradient=last,
            mean_square=mean,
            total_mean=_tree.total(mean) / _tree.size(mean),
            isotropic_weight=weight.astype(state.isotropic_weight.dtype),
            num_gradients=_tree.count(number, counts),
        )

    return Preconditioner(init, whiten, observe)


def scale_by_gradient_noise() -> optax.GradientTransformation:
    """Divide the updates by the normalized standard deviation of the mini-batch noise.

    After it the noise of the gradient has about the same variance in every coordinate, while
    isotropic noise passes unchanged: updates <- updates / s with mean(s^2) = 1 and the scale s of
    `psmile_naive`, from the gradients before this one.

    Returns:
        An Optax transformation. A non-finite gradient passes through and leaves the averages
        as they are.

    Cost: two parameter-sized arrays of state, no gradient.

    Example:
        >>> import jax.numpy as jnp, optax, optax_smile
        >>> tx = optax.chain(optax_smile.scale_by_gradient_noise(), optax.sgd(0.1))
        >>> params = jnp.zeros(2)
        >>> updates, _ = tx.update(jnp.array([1.0, -1.0]), tx.init(params), params)

    Source: Sommer et al., ICML 2026, section 3.2, noise preconditioning. Differs: see `psmile`.
    """
    noise = mean_square(differences=True)

    def init_fn(params: Any) -> Any:
        _tree.check_params("scale_by_gradient_noise", params, smallest=1)
        return noise.init(params)

    def update_fn(updates: Any, state: Any, params: Any = None):
        del params
        square = _tree.inner(updates, updates)
        counts = jnp.isfinite(square) & (square >= jnp.finfo(square.dtype).tiny)
        finite = _tree.where(counts, updates, jax.tree.map(jnp.zeros_like, updates))
        observed = noise.observe(state, finite, jnp.ones_like(square), counts, ~jnp.ones((), bool))
        return noise.whiten(state, updates), observed

    return optax.GradientTransformation(init_fn, update_fn)
