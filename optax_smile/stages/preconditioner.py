"""Stage 1: the scale of the mini-batch noise, coordinate by coordinate.

The microcanonical dynamics sample the right distribution if the gradient noise is isotropic.
A diagonal scale s makes it so: the sampler works with the whitened gradient grad U / s, and
divides a displacement by s on its way back to the parameters.
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
        fill: `fill(state)`, the variance of explicit noise in each coordinate; None for isotropic.

    A state is None, for a scale of one, or has a method `scale()`, a tree like the parameters. The
    scale comes from the gradients *before* the one that is whitened: no gradient changes its own
    coordinates, and a step closes in those in which it drifted.
    """

    init: Callable[[Any], Any]
    whiten: Callable[[Any, Any], Any]
    observe: Callable[..., Any]
    fill: Callable[[Any], Any] = lambda state: None


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


class GradientNoiseState(NamedTuple):
    """Averages over the mini-batch gradients of the kept step ends since the chain has arrived.

    Attributes:
        last_gradient: the one before, a tree like the parameters.
        gradient_variance: v, mean of half the squared differences of successive ones, likewise.
        gradient_square: q, mean of the squared gradients, likewise; None if only v counts.
        signal_mean: mean over all coordinates of q - v, scalar.
        blend_mean: mean over all coordinates of `_blend`, scalar.
        noise_mean: mean over all coordinates of v over `_blend`, the noise after whitening, scalar.
        power_mean: mean over all coordinates of q over `_blend`, scalar.
        isotropic_weight: weight of the isotropic start, scalar.
        num_gradients: how many entered, int32.
    """

    last_gradient: optax.Updates
    gradient_variance: optax.Updates
    gradient_square: optax.Updates | None
    signal_mean: jax.Array
    blend_mean: jax.Array
    noise_mean: jax.Array
    power_mean: jax.Array
    isotropic_weight: jax.Array
    num_gradients: jax.Array

    def scale(self) -> optax.Updates:
        """Compute the scale s, a tree like the parameters."""
        blend = _blend(self.gradient_variance, self.gradient_square, self.signal_mean)
        return relative_scale(blend, self.blend_mean, self.isotropic_weight)

    def fill(self) -> optax.Updates | None:
        """Variance that explicit noise is to have in each coordinate, with mean one.

        1 + (mean(n) - n) / mean(m), n and m what noise and gradient have of variance and of mean
        square after whitening: with explicit noise as strong as the gradient, both together are
        then isotropic. Where one coordinate has more noise than that, it gets none.
        """
        if self.gradient_square is None:
            return None
        blend = _blend(self.gradient_variance, self.gradient_square, self.signal_mean)
        believed = (1 - self.isotropic_weight) / jnp.where(self.power_mean > 0, self.power_mean, 1)

        def leaf(n):
            return jnp.maximum(1 + believed * (self.noise_mean - n), 0).astype(n.dtype)

        return jax.tree.map(leaf, _ratio(self.gradient_variance, blend))


def _blend(
    variance: optax.Updates, square: optax.Updates | None, signal_mean: jax.Array
) -> optax.Updates:
    """Square of the scale up to a factor: v + sqrt((q - v) mean(q - v)), or v alone.

    The noise in full. Of the signal, which is the curvature where the chain is at rest, the root:
    q follows the excursions of the chain a little, and the root halves what that does.
    """
    if square is None:
        return variance
    root = jnp.sqrt(signal_mean)

    def leaf(v, q):
        return (v + root * jnp.sqrt(jnp.maximum(q - v, 0))).astype(v.dtype)

    return jax.tree.map(leaf, variance, square)


def _ratio(over: optax.Updates, under: optax.Updates) -> optax.Updates:
    """Divide; zero where there is nothing to divide by."""
    return jax.tree.map(lambda x, y: jnp.where(y > 0, x / jnp.where(y > 0, y, 1), 0), over, under)


def gradient_noise(fills: bool = False) -> Preconditioner:
    """Measure the mini-batch noise by the differences of successive gradients.

    v <- (1 - r) v + r (g - g_before)^2 / 2,  q <- (1 - r) q + r g^2,  r = min(1/100, 1 / t)

    after t gradients since the chain has arrived: a gradient changes little by a step of the chain
    and much by another batch. The averages settle as the chain goes on, so that the scale hardly
    depends on the place.

    Args:
        fills: with explicit noise to shape, s^2 is v + sqrt((q - v) mean(q - v)), which also evens
            out the curvature, and the explicit noise fills up what v leaves anisotropic. Without,
            s^2 is v, which makes the gradient's noise isotropic by itself.
    """

    def init(params: optax.Params) -> GradientNoiseState:
        dtype = _tree.dtype(params)

        def zeros():
            return jax.tree.map(jnp.zeros_like, params)

        return GradientNoiseState(
            zeros(),
            zeros(),
            zeros() if fills else None,
            *(jnp.zeros((), dtype) for _ in range(4)),
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

        trusted = jax.tree.map(lambda g: (trust * g).astype(g.dtype), gradient)
        halves = jax.tree.map(lambda g, h: jnp.square(g - h) / 2, trusted, state.last_gradient)
        variance = jax.tree.map(average, state.gradient_variance, halves)
        square: Any = None
        signal, noise, power = (jnp.zeros_like(state.signal_mean) for _ in range(3))
        if fills:
            powers = jax.tree.map(jnp.square, trusted)
            square = jax.tree.map(average, state.gradient_square, powers)
            signal = _mean(jax.tree.map(lambda v, q: jnp.maximum(q - v, 0), variance, square))
        blend = _blend(variance, square, signal)
        if fills:
            noise, power = _mean(_ratio(variance, blend)), _mean(_ratio(square, blend))
        weight = kept * state.isotropic_weight + jnp.where(anew, 1, 0)
        return GradientNoiseState(
            last_gradient=_tree.where(counts, trusted, state.last_gradient),
            gradient_variance=variance,
            gradient_square=square,
            signal_mean=signal,
            blend_mean=_mean(blend),
            noise_mean=noise,
            power_mean=power,
            isotropic_weight=weight.astype(state.isotropic_weight.dtype),
            num_gradients=_tree.count(number, counts),
        )

    return Preconditioner(init, whiten, observe, fill=lambda state: state.fill())


def _mean(tree: optax.Updates) -> jax.Array:
    return _tree.total(tree) / _tree.size(tree)


def scale_by_gradient_noise() -> optax.GradientTransformation:
    """Divide the updates by the normalized standard deviation of the mini-batch noise.

    After it the noise of the gradient has about the same variance in every coordinate, while
    isotropic noise passes unchanged: updates <- updates / s with mean(s^2) = 1 and the scale s of
    `psmile`, from the gradients before this one.

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
    noise = gradient_noise()

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
