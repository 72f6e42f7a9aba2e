"""Microcanonical Langevin Monte Carlo with full-batch gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

from optax_smile import _check, potential
from optax_smile.samplers import _call
from optax_smile.samplers._call import SHARED, StepSize
from optax_smile.samplers._microcanonical import compose
from optax_smile.stages import momentum, preconditioner
from optax_smile.stages.guardrail import guardrail
from optax_smile.stages.momentum import IntegratorName


@_call.sampler
@_check.arguments(
    **SHARED,
    step_size=_check.STEP_SIZE,
    decoherence_length=_check.POSITIVE,
    integrator=_check.OneOf(IntegratorName),
)
def mclmc(
    step_size: StepSize,
    *,
    num_data: float | jax.Array,
    decoherence_length: float | jax.Array,
    prior_precision: Any = 1.0,
    prior_mean: Any = 0.0,
    log_prior: Callable[[Any], jax.Array] | None = None,
    temperature: float | jax.Array = 1.0,
    integrator: IntegratorName = "minimal_norm",
    key: jax.Array | int | None = None,
    track_params: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Sample with microcanonical Langevin Monte Carlo: `smile` for full-batch gradients.

    The gradient brings no noise, so the direction u gets an explicit one after each drift of
    length h: u <- (u + nu z) / |u + nu z|, nu^2 = (exp(2 h / L) - 1) / d, z ~ N(0, I).

    Args:
        step_size: length of one step, > 0: a number or an Optax schedule of the number of steps.
        decoherence_length: L > 0, the distance after which u has forgotten itself. `tune_mclmc`
            finds it together with `step_size`.
        integrator: `"minimal_norm"` with two gradients per step, `"leapfrog"` with one.
        key: JAX key or seed for the noise, needed. Other arguments, what is returned and errors as
            `psmile`.

    Cost: as `smile`, and as many random numbers as parameters per call.

    Example:
        >>> import jax, jax.numpy as jnp, optax_smile
        >>> tx = optax_smile.mclmc(
        ...     0.1, num_data=100, decoherence_length=2.0, key=jax.random.key(0)
        ... )
        >>> state = tx.init(jnp.zeros(3))

    Source: Robnik and Seljak, Fluctuation without dissipation, AABI 2024; as the members of MILE
    (Sommer et al., ICLR 2025).
    """
    return compose(
        "mclmc",
        potential.Potential(num_data, prior_precision, temperature, prior_mean, log_prior),
        preconditioner=preconditioner.identity(),
        momentum=momentum.microcanonical("mclmc", integrator, decoherence_length, key),
        guardrail=guardrail(),
        step_size=step_size,
        key=key,
        track_params=track_params,
    )
