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
# Gradients in the first window of `mean_square`, and in the longest.
FIRST_WINDOW, LONGEST_WINDOW = 64, 2**30
# So many gradients of a window weigh as much as that all coordinates are alike.
ISOTROPIC = 10


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
    """The scale in use, and what the next one will come from.

    Attributes:
        in_use: the scale s, measured in the window before, a tree like the parameters.
        mean_square: of the gradients of the open window, or of their differences, likewise.
        last_gradient: the one before, likewise; None where differences do not matter.
        num_gradients: how many entered in the open window, int32; -1 before the first difference.
        window: length of the open window in gradients, int32.
    """

    in_use: optax.Updates
    mean_square: optax.Updates
    last_gradient: optax.Updates | None
    num_gradients: jax.Array
    window: jax.Array

    def scale(self) -> optax.Updates:
        """Give the scale s, a tree like the parameters."""
        return self.in_use


def mean_square(differences: bool = False) -> Preconditioner:
    """Measure the root mean square of the gradients, or of their noise alone.

    s^2 = q / mean(q) with the mean q of g^2, or with differences of (g - g_before)^2 / 2, which is
    noise: a gradient changes little by a step of the chain and much by another batch. What is
    measured in one window of gradients is used in the next, half as long again: within a window s
    does not depend on the place, so that the posterior stays as it is, and it settles as the chain
    goes on. The windows begin when the chain has arrived; in the first s = 1.

    Args:
        differences: without explicit noise that of the gradients must be isotropic by itself,
            which their differences achieve. With it the squares do better: where noise prevails
            they are as good, and elsewhere they even out the curvature.

    Source: adaptation in windows that grow, Stan Reference Manual, "HMC algorithm parameters".
    """
    none_yet = -1 if differences else 0

    def init(params: optax.Params) -> MeanSquareState:
        return MeanSquareState(
            in_use=jax.tree.map(jnp.ones_like, params),
            mean_square=jax.tree.map(jnp.zeros_like, params),
            last_gradient=jax.tree.map(jnp.zeros_like, params) if differences else None,
            num_gradients=jnp.full((), none_yet, jnp.int32),
            window=jnp.full((), FIRST_WINDOW, jnp.int32),
        )

    def observe(state, gradient, trust, counts, anew):
        number = _tree.count(jnp.where(anew, none_yet, state.num_gradients), counts)
        window = jnp.where(anew, FIRST_WINDOW, state.window)
        rate = jnp.where(counts & (number > 0), 1 / jnp.maximum(number, 1), 0)
        last, trusted = None, jax.tree.map(lambda g: (trust * g).astype(g.dtype), gradient)
        if differences:
            squares = jax.tree.map(lambda g, h: jnp.square(g - h) / 2, trusted, state.last_gradient)
            last = _tree.where(counts, trusted, state.last_gradient)
        else:
            squares = jax.tree.map(jnp.square, trusted)
        # Not q + rate * (new - q), which leaves nothing of a small new after an absurd one.
        mean = jax.tree.map(
            lambda q, new: ((1 - rate) * q + rate * new).astype(q.dtype), state.mean_square, squares
        )
        measured = relative_scale(
            mean, _tree.total(mean) / _tree.size(mean), ISOTROPIC / (ISOTROPIC + number)
        )
        closes = number >= window
        held = jax.tree.map(lambda s: jnp.where(anew, 1, s).astype(s.dtype), state.in_use)
        return MeanSquareState(
            in_use=_tree.where(closes, measured, held),
            mean_square=mean,
            last_gradient=last,
            num_gradients=jnp.where(closes, 0, number),
            window=jnp.where(closes, jnp.minimum(window + window // 2, LONGEST_WINDOW), window),
        )

    return Preconditioner(init, whiten, observe)


def scale_by_gradient_noise() -> optax.GradientTransformation:
    """Divide the updates by the normalized standard deviation of the mini-batch noise.

    After it the noise of the gradient has about the same variance in every coordinate, while
    isotropic noise passes unchanged: updates <- updates / s with mean(s^2) = 1 and the scale s of
    `psmile_naive`, from the gradients before this one; s = 1 for the first 65.

    Returns:
        An Optax transformation. A non-finite gradient passes through and leaves the averages
        as they are.

    Cost: three parameter-sized arrays of state, no gradient.

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
