"""Stochastic gradient Hamiltonian Monte Carlo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from optax_smile import _check, potential
from optax_smile.samplers import _call, _langevin
from optax_smile.samplers._call import SHARED, StepSize

FRICTION = 0.05
FrictionStep = Literal["euler", "exact"]


@_call.sampler
@_check.arguments(
    **SHARED,
    step_size=_check.STEP_SIZE,
    friction=_check.PROBABILITY,
    friction_step=_check.OneOf(FrictionStep),
    gradient_noise=_check.NONNEGATIVE,
)
def sghmc(
    step_size: StepSize,
    *,
    num_data: float | jax.Array,
    prior_precision: Any = 1.0,
    prior_mean: Any = 0.0,
    log_prior: Callable[[Any], jax.Array] | None = None,
    temperature: float | jax.Array = 1.0,
    friction: float | jax.Array = FRICTION,
    friction_step: FrictionStep = "euler",
    gradient_noise: float | jax.Array = 0.0,
    key: jax.Array | int | None = None,
    track_params: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Sample with stochastic gradient Hamiltonian Monte Carlo.

    Gradient descent with momentum, whose friction is balanced by noise. With a velocity r that is
    standard normal in the posterior

        r <- (1 - f) r - eps grad U + sqrt(2 f - eps^2 V) z,  z ~ N(0, I)
        theta <- theta + eps r

    The mini-batch gradient brings noise of its own; its variance V, if it is known, is left out
    of what is added (and nothing is added where it is too large).

    Args:
        step_size: eps > 0, about how far one parameter moves in a step: a number or an Optax
            schedule of the number of steps. `optax.sgd(lr, momentum)` on the mean loss has
            eps = sqrt(lr / num_data) and f = 1 - momentum.
        friction: share f of the velocity that a step loses, in (0, 1).
        friction_step: `"euler"`, as published, or `"exact"`, which solves the Ornstein-Uhlenbeck
            process of friction and noise: 2 f - f^2 in place of 2 f. With `"euler"` the velocity
            has variance 1 / (1 - f / 2) instead of 1 and the parameters the right one for small
            steps; with `"exact"` the velocity has 1, the parameters 1 - f / 2 times theirs.
        gradient_noise: variance V of the mini-batch gradient of U in each parameter, >= 0.
        key: JAX key or seed, needed. Other arguments, what is returned and errors as `sgld`.

    Cost: as `sgld`.

    Example:
        >>> import jax, jax.numpy as jnp, optax_smile
        >>> tx = optax_smile.sghmc(1e-3, num_data=100, key=jax.random.key(0))
        >>> state = tx.init(jnp.zeros(3))

    Source: Chen, Fox, Guestrin, ICML 2014, equation 15 with eta = eps^2, alpha = f and
    beta = eps^2 V / 2. Differs: the momentum is never resampled.
    """
    balance = 2 * friction - (friction**2 if friction_step == "exact" else 0)

    def move(memory: None, call: _langevin.Move):
        eps = call.step_size
        amplitude = eps * jnp.sqrt(jnp.maximum(balance - eps**2 * gradient_noise, 0))

        def leaf(displacement, g, z):
            kept = (1 - friction) * call.step_ratio * displacement
            return (kept - eps**2 * g + amplitude * z).astype(g.dtype)

        return jax.tree.map(leaf, call.displacement, call.gradient, call.noise), memory

    posterior = potential.Potential(num_data, prior_precision, temperature, prior_mean, log_prior)
    rule = _langevin.Rule(lambda params: None, move)
    return _langevin.sampler("sghmc", step_size, posterior, key, rule, track_params)
