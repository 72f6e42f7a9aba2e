"""Can these chains be trusted? `summary` judges a whole run; `to_arviz` hands it to ArviZ.

They need ArviZ (`pip install 'optax-smile[diagnostics]'`). For a single statistic, such as R-hat,
call ArviZ on the result of `to_arviz`.

Chains of networks need not agree in their weights, which can be permuted, nor in their predictions
if the posterior has many modes. So each chain is first judged on its own.
"""

from optax_smile.diagnostics.findings import Check
from optax_smile.diagnostics.statistics import to_arviz
from optax_smile.diagnostics.summarize import Summary, summary

__all__ = ["Check", "Summary", "summary", "to_arviz"]
