"""SMILE and pSMILE: stochastic microcanonical Langevin samplers as Optax transformations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import optax

from optax_smile import _check
from optax_smile.potential import Potential, Temperature
from optax_smile.samplers import _call
from optax_smile.samplers._call import SHARED, StepSize
from optax_smile.samplers._microcanonical import compose
from optax_smile.stages import momentum, preconditioner
from optax_smile.stages import tuner as tuning
from optax_smile.stages.guardrail import guardrail
from optax_smile.stages.momentum import Decoherence, IntegratorName, Noise

CONSTRAINTS = SHARED | {
    "step_size": _check.STEP_SIZE | None,
    "temperature": _check.POSITIVE | _check.OneOf(Literal["auto"]),
    "excess": _check.POSITIVE,
    "integrator": _check.OneOf(IntegratorName),
    "tuner": _check.kind(tuning.Tuner, "a tuner such as angle_tuner()", _check.CALL_IT) | None,
    "reject_quantile": _check.PROBABILITY | None,
    "decoherence_length": _check.POSITIVE | _check.OneOf(Noise) | None,
}


@_call.sampler
@_check.arguments(**CONSTRAINTS)
def smile(
    step_size: StepSize | None = None,
    *,
    num_data: float | jax.Array,
    prior_precision: Any = 1.0,
    prior_mean: Any = 0.0,
    log_prior: Callable[[Any], jax.Array] | None = None,
    temperature: Temperature = 1.0,
    excess: float | jax.Array = 0.08,
    integrator: IntegratorName = "leapfrog",
    tuner: tuning.Tuner | None = None,
    reject_quantile: float | None = None,
    decoherence_length: Decoherence | None = "matched",
    key: jax.Array | int | None = None,
    track_params: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Sample with stochastic microcanonical Langevin dynamics, which find their own step size.

    The chain moves with constant speed through the parameters; the mini-batch gradient of the
    energy U turns its direction u, and so do the noise of that gradient and as much isotropic
    noise. One leapfrog step with step size eps and d parameters is

        kick   u <- (u + (sinh D + p (cosh D - 1)) e) / (cosh D + p sinh D) for eps / 2
        drift  theta <- theta + eps u
        kick   again for eps / 2, with the gradient and batch of the new theta

        e = -grad U / |grad U|, p = e . u, D = (eps / 2) |grad U| / (d - 1)
        U = (num_data * mean_loss + prior_precision / 2 |theta - prior_mean|^2) / temperature

    and every call of `update` closes one step and opens the next: one gradient per step. As
    published, with the tuner, the outlier test and the noise of the paper, it is
    `optax_smile.published.smile(1e-3, num_data=...)`.

    Args:
        step_size: Euclidean length of one step of the whole parameter vector, > 0: a number or an
            Optax schedule of the number of steps. None: `angle_tuner` finds it. Other arguments,
            what is returned and errors as `psmile`.

    Cost: one gradient per call; one parameter-sized array of state and 1.6 % of one (two more for
    leaves of at most 1,024 entries), one more with `"minimal_norm"`.

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

    Source: Sommer et al., Stochastic microcanonical Langevin ensembles, ICML 2026, algorithm 1.
    Differs: leapfrog with a fresh batch per gradient instead of two gradients on one batch; the
    sign of e; a rejected point leaves neither its gradient nor its value behind. Step size and
    explicit noise: ours, `benchmarks/notes/which-angle.md`.
    """
    posterior = Potential(num_data, prior_precision, temperature, prior_mean, log_prior, excess)
    return compose(
        "smile",
        posterior,
        preconditioner=preconditioner.identity(),
        momentum=momentum.microcanonical("smile", integrator, decoherence_length, key),
        guardrail=guardrail(reject_quantile),
        tuner=tuner,
        step_size=step_size,
        key=key,
        track_params=track_params,
    )


@_call.sampler
@_check.arguments(**CONSTRAINTS)
def psmile(
    step_size: StepSize | None = None,
    *,
    num_data: float | jax.Array,
    prior_precision: Any = 1.0,
    prior_mean: Any = 0.0,
    log_prior: Callable[[Any], jax.Array] | None = None,
    temperature: Temperature = 1.0,
    excess: float | jax.Array = 0.08,
    integrator: IntegratorName = "leapfrog",
    tuner: tuning.Tuner | None = None,
    reject_quantile: float | None = None,
    decoherence_length: Decoherence | None = "matched",
    key: jax.Array | int | None = None,
    track_params: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Sample like `smile`, in coordinates in which every gradient is about equally large.

    Anisotropic noise of the gradients heats `smile` in its strong directions, and a posterior that
    is narrow in some directions and wide in others takes long. With the gradients g of the energy

        s^2 = q / mean(q),  q = mean of g^2

    gradients are divided by s, displacements divided again: theta <- theta + eps u / s. What is
    measured in one window of gradients is used in the next, half as long again: within a window s
    does not depend on the place and the posterior stays as it is. The windows begin with 64
    gradients once the chain has arrived (`stats`); until then s = 1. The explicit noise dilutes
    the anisotropy that remains. Without it (`decoherence_length=None`) q is the mean of
    (g - g_before)^2 / 2, the noise alone, which becomes isotropic by itself, as published.

    Args:
        step_size: Euclidean length of one step of the whole parameter vector in the scaled
            coordinates, > 0: a number or an Optax schedule of the number of steps. About sqrt(d)
            times what one weight moves, so no learning rate. None: `angle_tuner` finds it.
        num_data: number of terms that the mean loss averages, >= 1: examples, or tokens. A summed
            loss cannot be detected and makes the posterior too narrow by that factor.
        prior_precision: of the Gaussian prior, >= 0: a number, or a prefix of the parameter tree
            with numbers or arrays like its leaves. Leave weight decay and penalties out of the
            loss.
        prior_mean: centre of that prior, given likewise, or `"start"`: the parameters that the
            chain begins with, which its state then holds. See `optax_smile.local`.
        log_prior: log density of another prior, `log_prior(params)`, a scalar in nats, up to a
            constant, differentiable; it replaces the Gaussian, so `prior_precision=0` with it.
            Where it is -inf a step is rejected: draws close to such an edge are distorted, so
            transform bounded parameters. For `optax.inject_hyperparams` it is one of
            `static_args`, with `prior_precision`.
        temperature: of the posterior, > 0; 1 is Bayes. `"auto"`: min(1, 2 excess num_data / d) for
            d parameters, at which draws have a mean loss of at most `excess` above that of a
            minimum. Below 1 it is a cold posterior, narrower than that of Bayes, which networks
            with more weights than data can need to predict well: let validation data choose, by
            `optax_smile.select`. Under `optax.partition` or `masked` a sampler counts its own
            parameters: pass a number there.
        excess: nats per example, > 0, for `temperature="auto"`.
        integrator: `"leapfrog"`, or `"minimal_norm"` as published, with two calls per step.
        tuner: rule for the step size. None: `step_size` as given, or `angle_tuner()` without one.
            `angle_tuner(...)` finds the step size and is an error beside a given one;
            `quantile_tuner(...)`, as published, starts from it.
        reject_quantile: a step is rejected if |energy change| exceeds this quantile of a Gamma fit
            to those before it, in (0, 1); None rejects non-finite steps alone. After a rejected
            step the chain starts again down the gradient.
        decoherence_length: adds isotropic noise after each step, by which u forgets itself over
            this distance, > 0; a chain at rest then starts in a random direction. `"matched"`: as
            much as the changes of the gradients turn u (with 1 + 40 / d times the square of that
            angle, at most twice that of whole gradients), which halves what anisotropic gradient
            noise does to the posterior of a network; at temperatures T < 1 only T^2 times as much.
            `"turning"`: the radius of the curve that the gradients make it follow, which is quicker
            where they have little noise and all directions are alike, such as under a strong prior
            around trained weights, and slower elsewhere. None adds none, as published.
        key: JAX key or seed, needed where `decoherence_length` is set. To give chains under `vmap`
            different keys, use `optax_smile.parallel.init(sampler, params, key=key)`.
        track_params: whether the state holds the parameters, for loops that call `update` or
            `last_accepted` without them. It adds the updates to them, as `optax.apply_updates`
            does. Parameters that a loop does pass are used and compared: if they differ from the
            tracked ones by more than rounding, that is an error, or in a compiled program
            `is_altered`, for good. A loop that never passes them must apply the updates as they
            are: other changes go unseen.

    Returns:
        An Optax transformation, the last of a chain. `update(grads, state, params, value=loss)`
        takes the mean loss that belongs to `grads`, as `value` or as `loss`, for the energy errors
        in `stats`. Only `quantile_tuner` and `reject_quantile` need it, and a warning says so when
        a call without it is traced.

        The float32 and float64 arrays of a tree are sampled; all other leaves stay as they are.
        Arrays whose gradient is None, in every call, do not move and are not counted in d, and
        their update is None. Arrays whose gradient is zero are sampled: the prior and the noise
        move them. `optax.partition` or `optax.masked` leave them out. `log_prior` gets the sampled
        leaves alone.

        Outside of `jax.jit`, `update` compiles itself. It donates no buffers: during a call the old
        and the new state are both in memory.

    Raises:
        ArgumentError: a ValueError: an argument out of range, or a key that is missing; in `init` a
            tree that is not float32 or float64, is not finite, has fewer than two parameters, or
            where `log_prior` is not finite; in `update` missing params, a tree that changed, the
            state of another transformation or version, gradients that are no floating-point
            numbers, gradients that are None at other leaves than at first, a mean loss that is not
            a scalar or has both names. Numerical trouble never raises: such steps are rejected and
            counted.

    Cost: one gradient per call; three parameter-sized arrays of state and 1.6 % of one (two more
    for leaves of at most 1,024 entries), one more without explicit noise, one more with
    `"minimal_norm"`, one more with `track_params`.

    Example:
        >>> import jax, jax.numpy as jnp, optax_smile
        >>> tx = optax_smile.psmile(num_data=50_000, key=jax.random.key(0))
        >>> state = tx.init({"w": jnp.zeros((2, 3)), "b": jnp.zeros(3)})

    Source: Sommer et al., ICML 2026, section 3.2 and algorithm 1. Differs: as `smile`; the scale
    and its windows are ours, since the published variance about a moving mean follows the gradient
    along the path where there is little noise and loses the posterior (`published.psmile` has it).
    """
    posterior = Potential(num_data, prior_precision, temperature, prior_mean, log_prior, excess)
    return compose(
        "psmile",
        posterior,
        preconditioner=preconditioner.mean_square(differences=decoherence_length is None),
        momentum=momentum.microcanonical("psmile", integrator, decoherence_length, key),
        guardrail=guardrail(reject_quantile),
        tuner=tuner,
        step_size=step_size,
        key=key,
        track_params=track_params,
    )
