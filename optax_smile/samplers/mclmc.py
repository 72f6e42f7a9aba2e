"""Microcanonical Langevin Monte Carlo with full-batch gradients."""

from __future__ import annotations

from typing import Any

import jax
import optax

from optax_smile import _check
from optax_smile._types import LogPrior, PriorMean, StepSize
from optax_smile.samplers._microcanonical import sampler
from optax_smile.stages.integrator import IntegratorName
from optax_smile.stages.scale import Preconditioner, ScaleState
from optax_smile.stages.step_size import Tuner


@sampler(
    decoherence_length=_check.POSITIVE,
    key=_check.Key(needed=True),
)
def mclmc(
    step_size: StepSize | None = None,
    *,
    num_data: float | jax.Array,
    decoherence_length: float | jax.Array,
    prior_precision: optax.Params = 1.0,
    prior_mean: PriorMean = 0.0,
    log_prior: LogPrior | None = None,
    temperature: float | jax.Array = 1.0,
    integrator: IntegratorName = "minimal_norm",
    tuner: Tuner[Any] | None = None,
    key: jax.Array | int | None = None,
) -> Preconditioner[ScaleState]:
    """Sample with microcanonical Langevin Monte Carlo: `smile` for full-batch gradients.

    Full-batch gradients have no noise, so explicit noise is added to the direction u after each
    step of length h: u <- (u + nu z) / |u + nu z|, nu^2 = (exp(2 h / L) - 1) / d, z ~ N(0, I).

    Args:
        step_size: length of one step, > 0: a number or an Optax schedule of the number of steps.
            None: `angle_tuner` chooses it.
        decoherence_length: L > 0, the distance over which u decorrelates. `examples/mile.py` finds
            it together with `step_size`.
        integrator: `"minimal_norm"` with two gradients per step, `"leapfrog"` with one.
        tuner: rule for the step size, such as `angle_tuner(0.1)`, see `psmile`.
        key: JAX key or seed for the noise, needed. For the other arguments, the return value and
            the errors see `psmile`.

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
    return Preconditioner()
