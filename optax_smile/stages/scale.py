"""The scale of the gradients, coordinate by coordinate.

The microcanonical dynamics sample the right distribution if the gradient noise is isotropic. A
diagonal scale s brings it closer to that: the sampler works with the whitened gradient
grad U / s, and divides a displacement by s on its way back to the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import optax

from optax_smile import _check, _check_trees, _tree, _xla
from optax_smile.stages.evidence import GradientWeight

# Bounds of (sigma / rms(sigma))^2: a coordinate without noise moves at most 100 times as far as a
# typical one, and a few very noisy ones cannot stop the others.
SMALLEST_RELATIVE_VARIANCE = 1e-4
LARGEST_RELATIVE_VARIANCE = 1e4
# Weight of the old value in the moving averages; 1 - alpha in the paper.
NOISE_DECAY = 0.99
# Gradients in the first window of `MeanSquare`, and in the longest: float32 loses smaller weights.
FIRST_WINDOW, LONGEST_WINDOW = 64, 2**22
# Weight of the assumption that all coordinates are alike, in gradients of a window.
ISOTROPIC = 10


class ScaleState(Protocol):
    """State of a preconditioner."""

    def inverse_scale(self) -> _tree.Scale:
        """Return 1 / s, a tree like the parameters, or a matrix."""
        ...


S = TypeVar("S", bound=ScaleState)


class Preconditioner(Generic[S]):
    """The coordinates in which a chain moves. This base class does not change them.

    For a rule of your own, inherit from it, preferably as a frozen dataclass, override the methods,
    and pass an instance as `preconditioner=` to `smile`. All methods are pure functions that JAX
    can trace.

    A state is None, for a scale of one, or an object of arrays with a method `inverse_scale()` that
    returns 1 / s, a tree like the parameters. The scale depends only on gradients *before* the one
    that it divides: no gradient changes its own coordinates, and a step ends in the coordinates in
    which it drifted.

    Attributes:
        is_elementwise: whether the methods treat all entries alike, in whichever leaf they are.
            Then they may receive trees whose small leaves are joined.

    Example:
        >>> from typing import NamedTuple
        >>> import jax, jax.numpy as jnp, optax, optax_smile
        >>> class Known(NamedTuple):
        ...     scale: optax.Updates
        ...     def inverse_scale(self):
        ...         return jax.tree.map(jnp.reciprocal, self.scale)
        >>> class KnownScale(optax_smile.Preconditioner[Known]):
        ...     def init(self, params):
        ...         return Known(jax.tree.map(lambda x: 10 * jnp.ones_like(x), params))
        >>> sampler = optax_smile.smile(num_data=100, preconditioner=KnownScale(), key=0)
    """

    is_elementwise: ClassVar[bool] = False

    def init(self, params: optax.Params) -> S | None:
        """Return the initial state."""
        return None

    def deviation(self, state: S, gradient: optax.Updates) -> optax.Updates | None:
        """Return the tree whose squared norm `observe` receives as `weight.square`, or None.

        Args:
            state: before the call.
            gradient: of the energy U, nats per unit of the parameters.
        """
        return None

    def width(self, state: S) -> jax.Array | None:
        """Return the square root of the trace of the posterior's covariance, scalar.

        It refers to the coordinates in which the chain moves. It is inf if it is not known yet,
        None if it is never known.
        """
        return None

    def observe(
        self,
        state: S,
        gradient: optax.Updates,
        weight: GradientWeight,
        direction: optax.Updates,
        drift: optax.Updates,
    ) -> S:
        """Return the next state.

        Args:
            state: before the call.
            gradient: of the energy U, nats per unit of the parameters.
            weight: the weight of this gradient: `trust` in [0, 1], whether it `counts`, whether
                averages `restart`, and the squared norm of the deviation, `square`.
            direction: the new direction of the chain, computed with the scale of `state`.
            drift: displacement of the chain since the last call, in the coordinates of `state`; 0
                if the call is rejected.
        """
        return state

    def stays(self, state: S, weight: GradientWeight) -> jax.Array | bool:
        """Return whether `observe` leaves the scale as it is."""
        return True

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def whiten(state: ScaleState | None, gradient: optax.Updates) -> optax.Updates:
    """Divide a gradient by the scale of a state."""
    scale = inverse_of(state)
    if isinstance(scale, _tree.Matrix):
        return scale.transposed_times(gradient)
    return _tree.scaled(gradient, scale)


def inverse_of(state: ScaleState | None) -> _tree.Scale:
    """Return 1 / s for the state of a preconditioner; None for a scale of one."""
    return None if state is None else state.inverse_scale()


def inverse_scale(
    variance: optax.Updates, mean: jax.Array, isotropic_weight: jax.Array
) -> optax.Updates:
    """Compute 1 / s for s = sigma / rms(sigma), clipped, a tree like the parameters.

    It is not s, since gradients and drifts would have to be divided by s, and XLA stores quotients.
    s_i^2 = w + (1 - w) v_i / mean(v), so mean(s^2) = 1 except for the clipping. This is a sum of
    two positive numbers: 1 - (1 - w) would lose all digits of a coordinate with little noise.
    `variance` is v up to a factor, `isotropic_weight` is w in [0, 1].
    """
    # If the mean is a denormal number, there is no noise yet, and the quotient would overflow.
    noisy = ~(mean < jnp.finfo(mean.dtype).tiny)
    offset = jnp.where(noisy, isotropic_weight, 1)
    slope = jnp.where(noisy, (1 - isotropic_weight) / jnp.where(noisy, mean, 1), 0)

    def leaf(v):
        relative = (offset + slope * v).astype(v.dtype)
        bounded = jnp.clip(relative, SMALLEST_RELATIVE_VARIANCE, LARGEST_RELATIVE_VARIANCE)
        return jax.lax.rsqrt(bounded)

    return jax.tree.map(leaf, variance)


class MovingVarianceState(NamedTuple):
    """Exponential averages of the mini-batch gradients, over accepted calls that open a step.

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

    def inverse_scale(self) -> optax.Updates:
        """Compute one over the scale, a tree like the parameters."""
        return inverse_scale(self.gradient_variance, self.variance_mean, self.isotropic_weight)


@dataclass(frozen=True)
class MovingVariance(Preconditioner[MovingVarianceState]):
    """Measure the noise as published: exponential averages of squares about a moving mean.

    gradient_mean <- a gradient_mean + (1 - a) gradient, then
    gradient_variance <- a gradient_variance + (1 - a) (gradient - gradient_mean)^2,
    with a = noise_decay and the new mean (Sommer et al. 2026, section 3.2: their alpha = 1 - a).
    If there is little noise, the scale follows the gradient along the path of the chain, and the
    chain no longer samples the posterior.
    """

    noise_decay: float = NOISE_DECAY
    is_elementwise: ClassVar[bool] = True

    def init(self, params: optax.Params) -> MovingVarianceState:
        """Return averages of zero with weight zero."""
        dtype = _tree.dtype(params)
        return MovingVarianceState(
            gradient_mean=jax.tree.map(jnp.zeros_like, params),
            gradient_variance=jax.tree.map(jnp.zeros_like, params),
            variance_mean=jnp.zeros((), dtype),
            isotropic_weight=jnp.ones((), dtype),
        )

    def deviation(self, state: MovingVarianceState, gradient: optax.Updates) -> optax.Updates:
        """Return the deviation from the mean so far."""
        return jax.tree.map(jnp.subtract, gradient, state.gradient_mean)

    def observe(self, state, gradient, weight, direction, drift) -> MovingVarianceState:
        """Average the deviation and its square."""
        rate, size = jnp.where(weight.counts, 1 - self.noise_decay, 0), _tree.size(gradient)
        # The deviation from the new mean is (1 - rate) times that from the old one.
        factor = jnp.square((1 - rate) * weight.trust)

        def average(old, new):
            return jnp.where(weight.counts, old + rate * (new - old), old).astype(old.dtype)

        deviation = self.deviation(state, gradient)
        return MovingVarianceState(
            gradient_mean=jax.tree.map(
                lambda m, x: average(m, m + weight.trust * x), state.gradient_mean, deviation
            ),
            gradient_variance=jax.tree.map(
                lambda v, x: average(v, factor * jnp.square(x)), state.gradient_variance, deviation
            ),
            variance_mean=average(state.variance_mean, factor * weight.square / size),
            isotropic_weight=average(state.isotropic_weight, 0),
        )

    def stays(self, state: MovingVarianceState, weight: GradientWeight) -> bool:
        """Return False: every gradient changes the scale."""
        return False


class MeanSquareState(NamedTuple):
    """The scale in use, and the averages for the next one.

    Attributes:
        in_use: 1 / s, measured in the previous window, a tree like the parameters.
        mean_square: of the gradients in the open window, or of their differences, likewise.
        mean: of `mean_square` over all parameters, scalar.
        last_gradient: the previous gradient, likewise; None if differences are not used.
        num_in_window: gradients in the open window, int32; -1 before the first difference.
        window: length of the open window in gradients, int32.
        matrix: the state of `matrix.FullMatrix`, whose matrix replaces `in_use`; or None.
    """

    in_use: optax.Updates
    mean_square: optax.Updates
    mean: jax.Array
    last_gradient: optax.Updates | None
    num_in_window: jax.Array
    window: jax.Array
    matrix: Any = None

    def inverse_scale(self) -> _tree.Scale:
        """Return one over the scale, a tree like the parameters or a matrix."""
        entries = getattr(self.matrix, "entries", None)
        return self.in_use if entries is None else _tree.Matrix(entries)


@dataclass(frozen=True)
class MeanSquare(Preconditioner[MeanSquareState]):
    """Measure the root mean square of the gradients, or of their noise alone.

    s^2 = q / mean(q). The average q of one window of gradients gives the s of the next window,
    which is 1.5 times as long. Within a window s is constant, so it does not bias the posterior,
    and it settles as the windows grow. The first window, of `first_window` gradients, begins once
    `descent_score` is at most 3; in it s = 1.

    | `differences` | q is the mean of       | which evens out   | for samplers           |
    |---------------|------------------------|-------------------|------------------------|
    | False | g^2                    | noise, curvature  | with explicit noise    |
    | True          | (g - g_before)^2 / 2   | the noise alone   | without explicit noise |

    A step of the chain changes a gradient little; another batch changes it much.

    Source: adaptation in windows that grow, Stan Reference Manual, "HMC algorithm parameters".
    """

    differences: bool = False
    first_window: int = FIRST_WINDOW
    is_elementwise: ClassVar[bool] = True

    def init(self, params: optax.Params) -> MeanSquareState:
        """Return a scale of one and an empty window."""
        zeros = jax.tree.map(jnp.zeros_like, params)
        return MeanSquareState(
            in_use=jax.tree.map(jnp.ones_like, params),
            mean_square=zeros,
            mean=jnp.zeros((), _tree.dtype(params)),
            last_gradient=jax.tree.map(jnp.zeros_like, params) if self.differences else None,
            num_in_window=jnp.full((), -1 if self.differences else 0, jnp.int32),
            window=jnp.full((), self.first_window, jnp.int32),
        )

    def deviation(self, state: MeanSquareState, gradient: optax.Updates) -> optax.Updates:
        """Return the gradient, or its difference from the previous one."""
        if state.last_gradient is None:
            return gradient
        return jax.tree.map(jnp.subtract, gradient, state.last_gradient)

    def _advance(
        self, state: MeanSquareState, weight: GradientWeight
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Number of the gradient in its window, the length of the window, and whether it closes."""
        none_yet = -1 if self.differences else 0
        before = jnp.where(weight.restart, none_yet, state.num_in_window)
        number = _tree.count(before, weight.counts)
        window = jnp.where(weight.restart, self.first_window, state.window)
        return number, window, number >= window

    def stays(self, state: MeanSquareState, weight: GradientWeight) -> jax.Array:
        """Return whether no window closes and no scale is reset."""
        # The scale is one in the first window, and while the chain is on its way.
        closes = self._advance(state, weight)[-1]
        return ~closes & ~(weight.restart & (state.window > self.first_window))

    def observe(self, state, gradient, weight, direction, drift) -> MeanSquareState:
        """Average the squares, and use the average when its window closes."""
        number, window, closes = self._advance(state, weight)
        count = number.astype(state.mean.dtype)
        rate = jnp.where(weight.counts & (number > 0), 1 / jnp.maximum(count, 1), 0)
        share = rate * jnp.square(weight.trust) / (2 if self.differences else 1)

        # Not q + rate * (new - q), which would lose small numbers after a huge one.
        def average(old, square):
            return jnp.where(rate > 0, (1 - rate) * old + share * square, old).astype(old.dtype)

        deviation = self.deviation(state, gradient)
        squares = jax.tree.map(lambda q, x: average(q, x * x), state.mean_square, deviation)
        mean = average(state.mean, weight.square / _tree.size(gradient))
        isotropic_weight = jnp.where(weight.restart, 1, ISOTROPIC / (ISOTROPIC + count))
        measured = inverse_scale(squares, mean, isotropic_weight)
        last, made, trust = state.last_gradient, [direction], weight.trust
        if last is not None:
            mixed = jax.tree.map(lambda g, h: trust * g + (1 - trust) * h, gradient, last)
            last = _xla.replace(weight.counts, mixed, last, squares)
            made.append(last)
        return MeanSquareState(
            in_use=_xla.replace(closes | weight.restart, measured, state.in_use, *made),
            mean_square=squares,
            mean=mean,
            last_gradient=last,
            num_in_window=jnp.where(closes, 0, number),
            window=jnp.where(closes, jnp.minimum(window + window // 2, LONGEST_WINDOW), window),
        )


def scale_by_gradient_noise() -> optax.GradientTransformation:
    """Divide the updates by the normalized standard deviation of the mini-batch noise.

    The noise of the result has about the same variance in every coordinate; isotropic noise does
    not change. updates <- updates / s with mean(s^2) = 1 and the scale s of
    `psmile(decoherence_length=None)` from earlier gradients; s = 1 for the first 65.

    Returns:
        An Optax transformation. A non-finite gradient passes through and does not change the
        averages.

    Cost: three parameter-sized arrays of state, no gradient.

    Example:
        >>> import jax.numpy as jnp, optax, optax_smile
        >>> tx = optax.chain(optax_smile.scale_by_gradient_noise(), optax.sgd(0.1))
        >>> params = jnp.zeros(2)
        >>> updates, _ = tx.update(jnp.array([1.0, -1.0]), tx.init(params), params)

    Source: Sommer et al., ICML 2026, section 3.2, noise preconditioning.
    Differences from the paper: see `psmile`.
    """
    noise = MeanSquare(differences=True)

    @_check.called("scale_by_gradient_noise.init")
    def init_fn(params: optax.Params) -> Any:
        _check_trees.check_params(params, smallest=1)
        _check.Tree(finite=True)("params", params)
        return noise.init(params)

    @_check.called("scale_by_gradient_noise.update")
    def update_fn(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Any]:
        del params
        if not isinstance(state, MeanSquareState):
            _check.fail("state", "the state that `init` or `update` returned", _check.show(state))
        known = state.mean_square
        _check_trees.check_gradients(updates, known, "the one given to init")
        square = _tree.inner(updates, updates)
        counts = jnp.isfinite(square) & (square >= jnp.finfo(square.dtype).tiny)
        finite = optax.tree.where(counts, updates, jax.tree.map(jnp.zeros_like, updates))
        deviation = noise.deviation(state, finite)
        weight = GradientWeight(
            trust=jnp.ones_like(square),
            counts=counts,
            restart=~jnp.ones((), bool),
            square=_tree.inner(deviation, deviation),
        )
        return whiten(state, updates), noise.observe(state, finite, weight, finite, finite)

    return optax.GradientTransformation(init_fn, update_fn)
