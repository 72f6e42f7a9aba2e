"""Can these chains be trusted? `summary` checks a whole run; `to_arviz` converts it for ArviZ.

`summary` needs arviz-stats (`pip install 'optax-smile[diagnostics]'`), `to_arviz` needs ArviZ
(`optax-smile[arviz]`). For a single statistic, such as R-hat, call ArviZ on its result.

Chains of networks need not have the same weights, since units can be permuted, nor the same
predictions, since the posterior can have many modes. So each chain is first checked separately.
"""

from optax_smile.diagnostics.findings import Check
from optax_smile.diagnostics.statistics import to_arviz
from optax_smile.diagnostics.summarize import Summary, summary

__all__ = ["Check", "Summary", "summary", "to_arviz"]
