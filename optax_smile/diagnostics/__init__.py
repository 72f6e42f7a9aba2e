"""Can these chains be trusted? `summary` judges a whole run; the others compute one statistic.

They need ArviZ (`pip install 'optax-smile[diagnostics]'`). They take arrays `[chain, draw, ...]`,
such as `Snapshots.params` and the result of `predict(..., per="draw")`. A `trace` is
`Snapshots.trace`: arrays `[chain, tick]`. In memory it includes the warm-up, which `num_draws=`
leaves out.

Chains of networks need not agree in their weights, which can be permuted, nor in their predictions
if the posterior has many modes. So each chain is first judged on its own.

Example:
    >>> import jax, jax.numpy as jnp, optax_smile
    >>> from optax_smile import diagnostics
    >>> draws = optax_smile.sample(
    ...     lambda params, batch: jnp.sum((params - batch) ** 2) / 2, jnp.zeros((2, 3)),
    ...     [jnp.ones(3)], optax_smile.sgld(0.05, num_data=10, key=jax.random.key(0)),
    ...     num_warmup=50, num_draws=100, thin=3, key=jax.random.key(1), progress=False,
    ... )
    >>> diagnostics.summary(draws).findings
    ()
"""

from optax_smile.diagnostics.findings import Check
from optax_smile.diagnostics.paths import travel, weight_rhat
from optax_smile.diagnostics.statistics import (
    EnergyFit,
    autocorrelation,
    disagreement,
    energy_fit,
    ess,
    mcse_lppd,
    rejection_rate,
    rhat,
    rhat_within,
    step_size_trend,
    to_arviz,
)
from optax_smile.diagnostics.summarize import Summary, summary

__all__ = [
    "Check",
    "EnergyFit",
    "Summary",
    "autocorrelation",
    "disagreement",
    "energy_fit",
    "ess",
    "mcse_lppd",
    "rejection_rate",
    "rhat",
    "rhat_within",
    "step_size_trend",
    "summary",
    "to_arviz",
    "travel",
    "weight_rhat",
]
