"""The four samplers of the paper with its settings, for comparison and reproduction.

They use the minimal-norm integrator with two gradients per step and no explicit noise; `smile` and
`psmile` add the quantile tuner and the rejection of outliers. The preconditioner uses the formula
of the paper, which has no absolute bounds.

    >>> import optax_smile
    >>> sampler = optax_smile.published.psmile(1e-3, num_data=50_000)

Compute both gradients of a step on the same batch: `sample(..., batch_per="step")`. With a batch
for each in a loop of your own, shuffle every pass, see `integrator` of `smile`.

Source: Sommer et al., Can Microcanonical Langevin Dynamics Leverage Mini-Batch Gradient Noise?,
ICML 2026, section 3 and appendix. Differences from the paper: the sign of e and the treatment of
rejected points, see `optax_smile.smile`, and the initial averages.
"""

from __future__ import annotations

from typing import Any

import jax
import optax

from optax_smile import _check
from optax_smile._types import LogPrior, PriorMean, StepSize
from optax_smile.samplers._microcanonical import sampler
from optax_smile.stages.scale import MovingVariance, Preconditioner
from optax_smile.stages.step_size import quantile_tuner

# kappa in the paper.
REJECT_QUANTILE = 0.98


def _published(name: str, preconditioner: Preconditioner[Any], tuned: bool):
    """Make one of the four samplers; `tuned` adds the tuner and the rejection of outliers."""
    fixed = {
        "integrator": "minimal_norm",
        "tuner": quantile_tuner() if tuned else None,
        "reject_quantile": REJECT_QUANTILE if tuned else None,
    }

    def define(
        step_size: StepSize,
        *,
        num_data: float | jax.Array,
        prior_precision: optax.Params = 1.0,
        prior_mean: PriorMean = 0.0,
        log_prior: LogPrior | None = None,
        temperature: float | jax.Array = 1.0,
    ) -> Preconditioner[Any]:
        return preconditioner

    # The name in a run's settings, distinct from that of our own sampler.
    define.__name__ = define.__qualname__ = f"published.{name}"
    ours = f"optax_smile.{name.removesuffix('_naive')}"
    define.__doc__ = (
        f"Make {name} as published; arguments, units and errors as for `{ours}`.\n\n"
        "Cost: two gradients and two calls of `update` per step."
    )
    return sampler(fixed, step_size=_check.STEP_SIZE)(define)


smile = _published("smile", Preconditioner(), tuned=True)
psmile = _published("psmile", MovingVariance(), tuned=True)
smile_naive = _published("smile_naive", Preconditioner(), tuned=False)
psmile_naive = _published("psmile_naive", MovingVariance(), tuned=False)
