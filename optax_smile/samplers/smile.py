"""SMILE and pSMILE: stochastic microcanonical Langevin samplers as Optax transformations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

from optax_smile import _check
from optax_smile._types import LogPrior, PriorMean, StepSize
from optax_smile.samplers._microcanonical import NormName, sampler
from optax_smile.stages.integrator import Decoherence, IntegratorName, Norm
from optax_smile.stages.matrix import LARGEST, FullMatrix
from optax_smile.stages.scale import Preconditioner
from optax_smile.stages.step_size import Tuner


@sampler(preconditioner=_check.kind(Preconditioner, "a Preconditioner") | None)
def smile(
    step_size: StepSize | None = None,
    *,
    num_data: float | jax.Array,
    prior_precision: optax.Params = 1.0,
    prior_mean: PriorMean = 0.0,
    log_prior: LogPrior | None = None,
    temperature: float | jax.Array = 1.0,
    integrator: IntegratorName = "leapfrog",
    tuner: Tuner[Any] | None = None,
    reject_quantile: float | None = None,
    decoherence_length: Decoherence | None = "matched",
    preconditioner: Preconditioner[Any] | None = None,
    norm: Norm | NormName = "euclidean",
    matrices: Callable[[Any], object] | None = None,
    key: jax.Array | int | None = None,
) -> Preconditioner[Any]:
    """Sample with stochastic microcanonical Langevin dynamics.

    The chain moves through the parameters at constant speed. The mini-batch gradient of the energy
    U turns the direction u of the chain. The noise of this gradient is part of the dynamics. The
    sampler also adds isotropic noise of its own, the explicit noise. By default, this noise turns u
    in each step by about as much as the change of the gradient since the last step does (see
    `decoherence_length` of `psmile`). The step size adapts itself. The sampler of the paper, with
    its tuner and outlier test and without explicit noise, is
    `optax_smile.published.smile(1e-3, num_data=...)`.

    Example:
        >>> import jax, jax.numpy as jnp, optax, optax_smile
        >>> loss_fn = lambda params: jnp.sum(params["w"] ** 2) / 2
        >>> tx = optax_smile.smile(num_data=100, key=jax.random.key(0))
        >>> params = {"w": jnp.ones(3)}
        >>> state = tx.init(params)
        >>> for _ in range(20):
        ...     loss, grads = jax.value_and_grad(loss_fn)(params)
        ...     updates, state = tx.update(grads, state, params, value=loss)
        ...     params = optax.apply_updates(params, updates)
        >>> int(optax_smile.stats(state).num_gradients)
        20

    Args:
        step_size: Euclidean length of one step of the whole parameter vector, > 0. A number, or an
            Optax schedule (a function of the step count). None: `angle_tuner` chooses it.
        preconditioner: the coordinates in which the chain moves, see `Preconditioner`; None: the
            parameters themselves. `psmile` is `smile` with a preconditioner.
        norm: of the momentum. `"spectral"`: the chain moves each matrix by a multiple of U V^T,
            where U and V are the singular vectors of its momentum, as the optimizer Muon does. The
            default angle of the tuner is then 0.6. A `Norm`: one of your own. Both are for networks
            that are sampled at a low temperature, see `cold_temperature`: mini-batch noise distorts
            the posterior of such a chain, so that it samples the posterior for full batches only.
            It has no explicit noise: pass `decoherence_length=None`. It takes a preconditioner only
            if its `Norm` is elementwise.
        matrices: for `norm="spectral"`, a function of a tree like the parameters. It returns such a
            tree of `optax.contrib.MuonDimensionNumbers`, the axes of rows and columns, and of None
            for leaves that are not matrices; these move along their own momentum. None: the last
            axis of a leaf with at least two axes has the columns, all others the rows.

            For the other arguments, the return value and the errors see `psmile`.

    Cost: one gradient per call. State: one array of the size of the parameters, and a random
    projection ("sketch") of the last gradient. The sketch is as large as a leaf of at most 1,024
    entries, and about 1.6 % as large as a leaf of 16,384 or more. `"minimal_norm"` and any
    `norm` but the Euclidean one each add one array of the size of the parameters. `"spectral"` also
    takes five Newton-Schulz iterations per call, like Muon: ten products of each matrix with a
    square one; two, and 17 of square ones, if it is at least twice as long as wide.

    Step: one leapfrog step with step size eps and d parameters is

        kick   u <- (u + (sinh D + p (cosh D - 1)) e) / (cosh D + p sinh D) for eps / 2
        drift  theta <- theta + eps u
        kick   again for eps / 2, with the gradient and batch of the new theta

        e = -grad U / |grad U|, p = e . u, D = (eps / 2) |grad U| / (d - 1)
        U = (num_data * mean_loss + prior_precision / 2 |theta - prior_mean|^2) / temperature

    Every call of `update` closes one step and opens the next: one gradient per step.

    Source: Sommer et al., Can Microcanonical Langevin Dynamics Leverage Mini-Batch Gradient Noise?,
    ICML 2026, algorithm 1. Differences from the paper: leapfrog with a fresh batch per gradient
    instead of two gradients on one batch; the sign of e; neither the gradient nor the loss at a
    rejected point is used. The rules for step size and explicit noise are ours, see
    `benchmarks/notes/which-angle.md`.
    """
    return Preconditioner() if preconditioner is None else preconditioner


@sampler(largest_matrix=_check.Whole(0) | None)
def psmile(
    step_size: StepSize | None = None,
    *,
    num_data: float | jax.Array,
    prior_precision: optax.Params = 1.0,
    prior_mean: PriorMean = 0.0,
    log_prior: LogPrior | None = None,
    temperature: float | jax.Array = 1.0,
    integrator: IntegratorName = "leapfrog",
    tuner: Tuner[Any] | None = None,
    reject_quantile: float | None = None,
    decoherence_length: Decoherence | None = "matched",
    largest_matrix: int | None = None,
    key: jax.Array | int | None = None,
) -> FullMatrix:
    """Sample like `smile`, in scaled coordinates whose gradient entries are about equally large.

    If the gradient noise is stronger in some directions, the draws of `smile` are too wide there. A
    chain also mixes slowly if the posterior is much narrower in some directions than in others. So
    `psmile` divides gradients and displacements by a scale s, which it takes from the gradients.

    The sampler also adds isotropic noise of its own, the explicit noise (see
    `decoherence_length`). It reduces the bias that remains because the gradient noise is not
    equally strong in all directions.

    Example:
        >>> import jax, jax.numpy as jnp, optax_smile
        >>> tx = optax_smile.psmile(num_data=50_000, key=jax.random.key(0))
        >>> state = tx.init({"w": jnp.zeros((2, 3)), "b": jnp.zeros(3)})

    Args:
        step_size: Euclidean length of one step of the whole parameter vector in the scaled
            coordinates, > 0. A number, or an Optax schedule (a function of the step count). It is
            not a learning rate: with d parameters, each one moves by about step_size / sqrt(d).
            None: `angle_tuner` chooses it.
        num_data: number of examples, or tokens, in the whole data set, not in a batch, >= 1. A loss
            summed over n examples acts like n times as many data, and the posterior is too narrow.
            The sampler cannot detect this. `sample` and `check` test the first batch for it, if
            the loss is not `stochastic`.
        prior_precision: precision (inverse variance) of the Gaussian prior, >= 0. A number, or a
            tree prefix of the parameters. The leaves of the prefix are numbers, or arrays of the
            shapes of the parameters. Leave weight decay and penalties out of the loss.
        prior_mean: mean of that prior, in the same form, or `"start"`: the initial parameters of
            the chain, which the state then stores. See `optax_smile.local`.
        log_prior: differentiable function `log_prior(params)` that returns the log density of
            another prior, a scalar, up to a constant. It replaces the Gaussian, so pass
            `prior_precision=0` as well. Steps to points where it is -inf are rejected. This
            distorts the draws near such a boundary: transform bounded parameters. With
            `optax.inject_hyperparams`, pass `static_args=("log_prior", "prior_precision")`.
        temperature: of the posterior, > 0; 1 is the Bayesian posterior. Below 1 it is colder, see
            `cold_temperature`.
        integrator: `"leapfrog"`: one call of `update` per step. `"minimal_norm"`: the integrator of
            the paper, two calls per step. If every pass of your own loop has the same even number
            of batches in the same order, each always gets the same of two unequal weights, which
            shifts the posterior mean: shuffle them.
        tuner: rule for the step size. None: a given `step_size` stays; without one,
            `angle_tuner()` chooses it. With `angle_tuner(...)`, leave out `step_size`.
            `quantile_tuner(...)`, the tuner of the paper, requires a `step_size`.
        reject_quantile: number in (0, 1). A step is rejected if it changes the total energy, U plus
            kinetic energy, by an unusual amount: if |energy change| exceeds this quantile of a
            Gamma distribution, which is fitted to its values in earlier steps. The chain then
            returns to the start of the step. None: only steps with non-finite numbers are rejected.
        decoherence_length: distance over which the explicit noise turns u into a new direction.
            At the start and after each rejected step, u is random; if there is no explicit noise,
            it is the direction of the negative gradient.

            - A number > 0: over this distance, the noise alone reduces the mean cosine between u
              and its earlier value to 1 / e.
            - `"matched"`: the explicit noise turns u about as much as the change of the gradient
              between two steps does. Most of this change is gradient noise. Let b be the average
              angle by which a gradient g turns u in a step. A gradient of
              (g - g_before) / sqrt(2) would turn u by an average angle a. In each step, the
              explicit noise turns u by an angle whose square is about
              min((1 + 40 / d) a^2, 2 b^2) * min(T, 1)^2, where T is the temperature. At T = 1, this
              noise halves, to first order, the bias that anisotropic gradient noise causes. With a
              matrix whose width W is known, the square is larger by 2 (1 - S) eps / W, with the
              step size eps and the share S of the change (`change_share` of `stats`).
            - `"turning"`: the distance 1 / R, where R is the angle in radians by which the
              gradients turn u per unit length. The chain mixes faster than with `"matched"` if
              gradients have little noise and the posterior is about equally wide in all directions,
              such as with a strong prior around trained weights. Otherwise it mixes more slowly.
            - None: no explicit noise, as in the paper.
        largest_matrix: number of parameters, >= 0, up to which the scale is a matrix. None: 256; 0:
            never.
        key: JAX key or seed. Required unless `decoherence_length` is None. To give chains under
            `vmap` different keys, use `optax_smile.parallel.init(sampler, params, key=key)`.

    Returns:
        An Optax transformation. In an `optax.chain` it must be the last. Pass the mean loss of the
        batch to `update(grads, state, params, value=loss)`, as `value` or as `loss`, to get
        `energy_change` in `stats`. Only `quantile_tuner` and `reject_quantile` need it, and warn
        without it.

        The float32 and float64 arrays of a tree are sampled; leaves that are not floating-point
        arrays do not change. An array whose gradient is None in every call does not move. Its
        update is None, and it is not counted in d. The first call removes it from the state, as
        in `optax.adamw`: inside `jax.lax.scan`, call `init` without it. Arrays whose gradient is
        zero are sampled: the prior and the noise move them. Exclude them with `optax.partition`.
        `log_prior` receives only the sampled leaves.

        Outside of `jax.jit`, `update` compiles itself. It donates no buffers: during a call the old
        and the new state are both in memory.

    Raises:
        ArgumentError (a ValueError): an argument is out of range, or `key` is missing. From `init`:
            floating-point parameters of another precision than float32 and float64, parameters that
            are not finite, fewer than two parameters, or a `log_prior` that is not finite at them.
            From `update`: a tree that does not have the structure of the parameters; the state of
            another transformation or version; gradients that are not floating-point numbers, or are
            None at other leaves than in the first call; a mean loss that is not a scalar, or is
            passed as both `value` and `loss`. Non-finite gradients and losses never raise: such
            steps are rejected and counted.
        ValueError: from `update`, `params` is missing, see `tracked`.

    Cost: one gradient per call. State: three arrays of the size of the parameters, and a random
    projection ("sketch") of the last gradient; for its size see `smile`. With a matrix, also two
    arrays of d^2 entries for d parameters: a step of a regression of 30 weights takes 1.2
    times as long as with a diagonal scale, of 256 weights twice as long.
    `decoherence_length=None` and `"minimal_norm"` each add one array of the size of the parameters.

    Scale: with the step size eps, the direction u and the energy U of `smile`, a step is
    theta <- theta + eps u / s. The scale s is one number per parameter,

        s^2 = q / (mean of q over all parameters)

    where q is the mean of g^2 over a window of steps, and g is the gradient of U at a step. Then
    s^2 is replaced by (1 - w) s^2 + w, where w is .14 after the first window and smaller after
    longer ones. The result is clipped to [1e-4, 1e4]. The sampler uses the s of one window in the
    next window, which is 1.5 times as long. Within a window s is constant, so it does not bias the
    posterior. The first window has 64 steps. It begins when the energy has stopped decreasing:
    `stats(state).descent` <= 3. `descent` is a z-score: the recent decrease of U, divided by the
    standard deviation of such decreases in a stationary chain. Until the first window ends, s = 1.
    If `descent` exceeds 3 later, s is reset to 1 and the windows start again.

    With at most `largest_matrix` parameters, the scale becomes a matrix from the second window on:
    theta <- theta + eps A u, and A^T grad U turns u. A A^T is the inverse of the mean of g g^T up
    to a factor, shrunk towards that of the window before. So the sampler also removes correlations,
    such as those of the features of a regression. If the posterior is round in these coordinates,
    its width follows from the mean curvature. With the default step size, the momentum then lasts
    for twice this width, see `angle_tuner`. If whole gradients turn u by the angle k in a step, the
    kicks of the leapfrog are longer by the factor 1 + k^2 / 12: otherwise long steps would widen
    the posterior.

    With `decoherence_length=None`, q is instead the mean of (g - g_before)^2 / 2, where g_before is
    the gradient of the step before. This measures mainly the noise of the gradients, as in the
    paper (see Source).

    Source: Sommer et al., ICML 2026, section 3.2 and algorithm 1. Differences from the paper: those
    of `smile`; the rule for the scale and the matrix are ours. The paper uses the variance of the
    gradient about a moving mean (`published.psmile`). If there is little noise, the scale of the
    paper changes with the gradient while the chain moves. The chain then no longer samples the
    posterior.
    """
    largest = LARGEST if largest_matrix is None else largest_matrix
    return FullMatrix(differences=decoherence_length is None, largest=largest)
