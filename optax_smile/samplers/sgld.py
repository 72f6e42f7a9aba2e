"""Stochastic gradient Langevin dynamics, plain and with the preconditioner of RMSprop."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_smile import _check, _tree
from optax_smile._types import LogPrior, PriorMean, StepSize
from optax_smile.samplers import _langevin
from optax_smile.samplers._langevin import Rule, Step

# Decay of the moving average of squared gradients; Li et al. 2016.
SQUARE_DECAY = 0.99
# Added to the root of a parameter's average, in units of the root of the mean average.
SMALLEST_ROOT = 1e-3


class SquareAverage(NamedTuple):
    """Moving average of the squared gradients of the mean loss.

    Attributes:
        gradient_square: the average without debiasing, a tree like the parameters.
        start_weight: remaining weight of the initial value 0, decay^t, scalar.
    """

    gradient_square: optax.Updates
    start_weight: jax.Array


@_langevin.sampler()
def sgld(
    step_size: StepSize,
    *,
    num_data: float | jax.Array,
    prior_precision: optax.Params = 1.0,
    prior_mean: PriorMean = 0.0,
    log_prior: LogPrior | None = None,
    temperature: float | jax.Array = 1.0,
    key: jax.Array | int | None = None,
) -> Rule[None]:
    """Sample with stochastic gradient Langevin dynamics.

    Gradient descent on the energy U with the noise that makes its stationary distribution the
    posterior for small steps:

        theta <- theta - eps grad U + sqrt(2 eps) z,  z ~ N(0, I)
        U = (num_data * mean_loss + prior_precision / 2 |theta|^2) / temperature

    Arguments not listed are those of `psmile`.

    Args:
        step_size: eps > 0, the square of a length: a number or an Optax schedule of the number of
            steps. `optax.sgd(lr)` on the mean loss has the drift of eps = lr / num_data.
        temperature: of the posterior, > 0; 1 is the Bayesian posterior.
        key: JAX key or seed for the noise, needed. To give chains under `vmap` different keys, use
            `optax_smile.parallel.init(sampler, params, key=key)`.

    Returns:
        An Optax transformation, as from `psmile`. It needs no `value` and has no energy error; a
        step that ends in a non-finite gradient or value is rejected.

    Raises:
        ArgumentError: as `psmile`.

    Cost: one gradient and as many random numbers as parameters per call; one parameter-sized
    array of state, by which a step is rejected.

    Example:
        >>> import jax, jax.numpy as jnp, optax, optax_smile
        >>> tx = optax_smile.sgld(1e-4, num_data=100, key=jax.random.key(0))
        >>> params = {"w": jnp.ones(3)}
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> params = optax.apply_updates(params, updates)

    Source: Welling and Teh, ICML 2011, equation 4. Differences from the paper: eps is half of
    theirs, as in most libraries.
    """

    def move(memory: None, step: Step) -> tuple[optax.Updates, None]:
        amplitude = jnp.sqrt(2 * step.step_size)
        return _langevin.euler_step(step, amplitude), memory

    return Rule(move)


@_langevin.sampler(
    square_decay=_check.PROBABILITY,
    smallest_root=_check.POSITIVE,
)
def psgld(
    step_size: StepSize,
    *,
    num_data: float | jax.Array,
    prior_precision: optax.Params = 1.0,
    prior_mean: PriorMean = 0.0,
    log_prior: LogPrior | None = None,
    temperature: float | jax.Array = 1.0,
    square_decay: float = SQUARE_DECAY,
    smallest_root: float = SMALLEST_ROOT,
    key: jax.Array | int | None = None,
) -> Rule[SquareAverage]:
    """Sample like `sgld` with one step size per parameter, from the averages of RMSprop.

        V <- a V + (1 - a) grad loss^2,  G = 1 / (r sqrt(mean(V)) + sqrt(V)), V debiased
        theta <- theta - eps G grad U + sqrt(2 eps G) z,  z ~ N(0, I)

    A preconditioner that depends on theta needs the further drift Gamma_i = sum_j dG_ij / dtheta_j.
    It is omitted, as in the experiments of its authors. **This is correct only if mini-batch noise
    dominates V**, which then hardly depends on theta. With full batches and small steps V follows
    theta and the density becomes exp(-U) / G: for a standard normal a second moment of 1.9 instead
    of 1 at eps = 3e-4.

    Args:
        step_size: eps > 0; with G a parameter drifts by about num_data * eps in units of 1. A
            number or an Optax schedule of the number of steps.
        square_decay: weight a of the old value in the average, in (0, 1).
        smallest_root: r > 0, added to the root of a parameter's average, in units of the root of
            the mean average. A parameter without loss gradients, on which only the prior acts, has
            G = 1 / (r sqrt(mean(V))) and needs eps G prior_precision < 2.
        key: JAX key or seed, needed. For the other arguments, the return value and the errors see
            `sgld`.

    Cost: as `sgld`, and one parameter-sized array of state more.

    Example:
        >>> import jax, jax.numpy as jnp, optax_smile
        >>> tx = optax_smile.psgld(1e-6, num_data=100, key=jax.random.key(0))
        >>> state = tx.init(jnp.zeros(3))

    Source: Li, Chen, Carlson, Carin, AAAI 2016, algorithm 1. Differences from the paper: V is
    debiased, else the first step would be ten times the following ones; r is relative, where
    theirs, 1e-5, depends on the unit of the loss; eps is half of theirs.
    """

    def init(params: optax.Params) -> SquareAverage:
        return SquareAverage(
            gradient_square=jax.tree.map(jnp.zeros_like, params),
            start_weight=jnp.ones((), _tree.dtype(params)),
        )

    def move(memory: SquareAverage, step: Step) -> tuple[optax.Updates, SquareAverage]:
        weight = square_decay * memory.start_weight
        squares = jax.tree.map(
            lambda v, g: (
                square_decay * v + (1 - square_decay) * jnp.square(g.astype(v.dtype))
            ).astype(v.dtype),
            memory.gradient_square,
            step.loss_gradient,
        )
        roots = jax.tree.map(lambda v: jnp.sqrt(v / (1 - weight)), squares)
        metric = _langevin.inverse(roots, smallest_root)

        def leaf(metric, g, z):
            size = step.step_size * metric
            return (-size * g + jnp.sqrt(2 * size) * z).astype(g.dtype)

        displacement = jax.tree.map(leaf, metric, step.gradient, step.noise)
        return displacement, SquareAverage(squares, weight.astype(memory.start_weight.dtype))

    return Rule(move, init)
