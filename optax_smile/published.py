"""The four samplers of the paper with its settings: for comparisons, and to reproduce it.

Minimal norm with two gradients per step and no explicit noise; `smile` and `psmile` with the
quantile tuner and the reset of outliers. The preconditioner is the formula of the paper, which has
no absolute bounds.

    >>> import optax_smile
    >>> sampler = optax_smile.published.psmile(1e-3, num_data=50_000)

Both gradients of a step belong on one batch: `sample(..., batch_per="step")`.

Source: Sommer et al., Stochastic microcanonical Langevin ensembles, ICML 2026, section 3 and
appendix. Differs: as `optax_smile.smile` says of the sign of e and of rejected points, and in how
the averages start.
"""

from typing import Any

import jax
import optax

from optax_smile import _settings
from optax_smile.potential import Potential
from optax_smile.samplers._microcanonical import compose
from optax_smile.stages.guardrail import guardrail
from optax_smile.stages.momentum import microcanonical
from optax_smile.stages.preconditioner import Preconditioner, identity, moving_variance
from optax_smile.stages.tuner import quantile_tuner

# 1 - alpha, kappa, and what becomes of the momentum of a rejected step.
NOISE_DECAY = 0.99
RESET_QUANTILE = 0.98
RESET_MOMENTUM = "zero"


def _compose(
    name: str, step_size: Any, posterior: Potential, preconditioner: Preconditioner, tuned: bool
) -> optax.GradientTransformationExtraArgs:
    """Build one of the four; `tuned` adds tuner and reset."""
    name = f"published.{name}"
    return compose(
        name,
        posterior,
        preconditioner=preconditioner,
        momentum=microcanonical(name, "minimal_norm"),
        guardrail=guardrail(name, RESET_QUANTILE if tuned else None, RESET_MOMENTUM),
        tuner=quantile_tuner() if tuned else None,
        step_size=step_size,
    )


@_settings.recorded
def smile(
    step_size: float | jax.Array | optax.Schedule,
    *,
    num_data: float | jax.Array,
    prior_precision: Any = 1.0,
    prior_mean: Any = 0.0,
    temperature: float | jax.Array = 1.0,
) -> optax.GradientTransformationExtraArgs:
    """SMILE as published; arguments and errors as `optax_smile.smile`, two calls per step."""
    posterior = Potential(num_data, prior_precision, temperature, prior_mean)
    return _compose("smile", step_size, posterior, identity(), tuned=True)


@_settings.recorded
def psmile(
    step_size: float | jax.Array | optax.Schedule,
    *,
    num_data: float | jax.Array,
    prior_precision: Any = 1.0,
    prior_mean: Any = 0.0,
    temperature: float | jax.Array = 1.0,
) -> optax.GradientTransformationExtraArgs:
    """pSMILE as published; arguments and errors as `optax_smile.psmile`, two calls per step."""
    posterior = Potential(num_data, prior_precision, temperature, prior_mean)
    return _compose("psmile", step_size, posterior, moving_variance(NOISE_DECAY), tuned=True)


@_settings.recorded
def smile_naive(
    step_size: float | jax.Array | optax.Schedule,
    *,
    num_data: float | jax.Array,
    prior_precision: Any = 1.0,
    prior_mean: Any = 0.0,
    temperature: float | jax.Array = 1.0,
) -> optax.GradientTransformationExtraArgs:
    """SMILE-naive as published: `smile` with the step size as given and no reset."""
    posterior = Potential(num_data, prior_precision, temperature, prior_mean)
    return _compose("smile_naive", step_size, posterior, identity(), tuned=False)


@_settings.recorded
def psmile_naive(
    step_size: float | jax.Array | optax.Schedule,
    *,
    num_data: float | jax.Array,
    prior_precision: Any = 1.0,
    prior_mean: Any = 0.0,
    temperature: float | jax.Array = 1.0,
) -> optax.GradientTransformationExtraArgs:
    """pSMILE-naive as published: `psmile` with the step size as given and no reset."""
    posterior = Potential(num_data, prior_precision, temperature, prior_mean)
    return _compose("psmile_naive", step_size, posterior, moving_variance(NOISE_DECAY), tuned=False)
