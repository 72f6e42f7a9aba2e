"""Can these chains be trusted? `summary` judges a whole run; `to_arviz` hands it to ArviZ.

`summary` needs arviz-stats (`pip install 'optax-smile[diagnostics]'`), `to_arviz` needs ArviZ
(`optax-smile[arviz]`). For a single statistic, such as R-hat, call ArviZ on its result.

Chains of networks need not agree in their weights, which can be permuted, nor in their predictions
if the posterior has many modes. So each chain is first judged on its own.
"""

from optax_smile.diagnostics.findings import Check
from optax_smile.diagnostics.statistics import to_arviz
from optax_smile.diagnostics.summarize import Summary, summary

__all__ = ["Check", "Summary", "summary", "to_arviz"]
