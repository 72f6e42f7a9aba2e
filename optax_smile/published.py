"""The four samplers of the paper with its settings, for comparison and reproduction.

They use the minimal-norm integrator with two gradients per step and no explicit noise; `smile` and
`psmile` add the quantile tuner and the rejection of outliers. The preconditioner uses the formula
of the paper, which has no absolute bounds.

    >>> import optax_smile
    >>> sampler = optax_smile.published.psmile(1e-3, num_data=50_000)

Compute both gradients of a step on the same batch: `sample(..., batch_per="step")`.

Source: Sommer et al., Stochastic microcanonical Langevin ensembles, ICML 2026, section 3 and
appendix. Differs: in the sign of e and the treatment of rejected points, see `optax_smile.smile`,
and in the initial averages.
"""

from __future__ import annotations

import jax
import optax

from optax_smile import _check
from optax_smile._types import LogPrior, StepSize, Tree
from optax_smile.potential import Potential
from optax_smile.samplers import _call
from optax_smile.samplers._call import SHARED
from optax_smile.samplers._microcanonical import build as build_microcanonical
from optax_smile.stages.scale import MovingVariance, Preconditioner
from optax_smile.stages.step_size import quantile_tuner

PUBLISHED = {name: rule for name, rule in SHARED.items() if name != "key"}
PUBLISHED |= {"step_size": _check.STEP_SIZE}
# kappa in the paper.
REJECT_QUANTILE = 0.98
INTEGRATOR = "minimal_norm"


def _published(name: str, preconditioner: Preconditioner, tuned: bool):
    """Make one of the four samplers; `tuned` adds the tuner and the rejection of outliers."""
    where = f"published.{name}"
    tuner, reject_quantile = (quantile_tuner(), REJECT_QUANTILE) if tuned else (None, None)

    @_check.arguments(where, **PUBLISHED)
    def build(
        step_size: StepSize,
        *,
        num_data: float | jax.Array,
        prior_precision: Tree = 1.0,
        prior_mean: Tree = 0.0,
        log_prior: LogPrior | None = None,
        temperature: float | jax.Array = 1.0,
        track_params: bool = False,
    ) -> optax.GradientTransformationExtraArgs:
        return build_microcanonical(
            where,
            Potential(num_data, prior_precision, temperature, prior_mean, log_prior),
            preconditioner,
            integrator=INTEGRATOR,
            reject_quantile=reject_quantile,
            tuner=tuner,
            step_size=step_size,
            track_params=track_params,
        )

    # The name in a run's settings, distinct from that of our own sampler.
    build.__name__ = build.__qualname__ = where
    ours = f"optax_smile.{name.removesuffix('_naive')}"
    build.__doc__ = (
        f"Make {name} as published; arguments, units and errors as for `{ours}`.\n\n"
        "Cost: two gradients and two calls of `update` per step."
    )
    return _call.sampler(build, integrator=INTEGRATOR, tuner=tuner, reject_quantile=reject_quantile)


smile = _published("smile", Preconditioner(), tuned=True)
psmile = _published("psmile", MovingVariance(), tuned=True)
smile_naive = _published("smile_naive", Preconditioner(), tuned=False)
psmile_naive = _published("psmile_naive", MovingVariance(), tuned=False)
