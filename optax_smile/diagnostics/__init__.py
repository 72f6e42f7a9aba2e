"""Can these chains be trusted? `summary` looks at a whole run, the other functions at one figure.

They need ArviZ (`pip install 'optax-smile[diagnostics]'`), and take arrays `[chain, draw, ...]` as
`Snapshots.params` and `predict(..., per="draw")` give them. A `trace` is `Snapshots.trace`: arrays
`[chain, tick]`, in memory with the ticks of the warm-up, which `num_draws=` leaves out.

Chains of networks need not agree in their weights, which can be permuted; nor in what they predict,
where the posterior has many modes. So every chain is first judged alone.

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

from optax_smile.diagnostics.paths import travel, weight_rhat
from optax_smile.diagnostics.results import Check, Summary
from optax_smile.diagnostics.statistics import (
    autocorrelation,
    disagreement,
    ess,
    mcse_lppd,
    rhat,
    rhat_within,
    to_arviz,
)
from optax_smile.diagnostics.summarize import summary
from optax_smile.diagnostics.traces import EnergyFit, energy_fit, rejection_rate, step_size_trend

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
