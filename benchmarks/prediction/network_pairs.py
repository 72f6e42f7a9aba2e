r"""Differences between two methods of `networks.py`, paired over test data, chains and seeds.

Reads the files of `networks.py` in `--work` and runs nothing. For each task one rival is the rate
of checkpoints with the best validation LPPD of the ensemble, chosen for each seed.

    python benchmarks/prediction/network_pairs.py --table lenet --form small --seeds 0 1 2 \
        --work out/networks --output benchmarks/results/network_pairs.jsonl
"""

import itertools
from collections.abc import Sequence
from typing import Any

from benchmarks import records
from benchmarks.prediction import network_chains, networks
from benchmarks.prediction.network_cells import TABLES, cells_of
from benchmarks.prediction.networks import averaged

import numpy as np

COLD = ("psmile", {"temperature": "auto", "angle": 0.3})
CHECKPOINTS = "checkpoints"
SELECTED = (CHECKPOINTS, {"learning_rate": "validation"})


def main():
    """Record the pairs for which all chains are there."""
    arguments = networks.parser(__doc__, form="small").parse_args()
    given = arguments.table, arguments.form, arguments.seeds, arguments.settings
    pairs = [cell for cell, _ in cells_of(*given)]
    methods = [(c["method"], c["options"]) for c in pairs if c["seed"] == arguments.seeds[0]]
    rates = [other for other in methods if other[0] == CHECKPOINTS]

    def chains(method: tuple[str, Any], seed: int) -> list[dict[str, np.ndarray]] | None:
        """Predictions of each chain; None where one is missing."""
        if method == SELECTED:
            tried = [found for rate in rates if (found := chains(rate, seed))]
            scores = [averaged([c["valid_density"] for c in found]).mean() for found in tried]
            return tried[int(np.argmax(scores))] if tried else None
        cell = next(c for c in pairs if (c["method"], c["options"], c["seed"]) == (*method, seed))
        paths = [network_chains.path_of(cell, i, arguments.work) for i in range(cell["num_chains"])]
        return [dict(np.load(p)) for p in paths] if all(p.exists() for p in paths) else None

    def run(cell: records.Cell) -> records.Record:
        ours, theirs = ((cell[name]["method"], cell[name]["options"]) for name in ("ours", "rival"))
        return differences(*([chains(x, seed) for seed in cell["seeds"]] for x in (ours, theirs)))

    common = {"task": TABLES[arguments.table][0], "form": pairs[0]["form"]}
    cells = []
    for ours, rival in itertools.product([COLD], [SELECTED, *methods]):
        seeds = [s for s in arguments.seeds if chains(ours, s) and chains(rival, s)]
        if rival != ours and seeds:
            named = [{"method": method, "options": options} for method, options in (ours, rival)]
            cells.append(common | {"ours": named[0], "rival": named[1], "seeds": seeds})
    records.complete(arguments, cells, run, "lppd")


def differences(ours: Sequence[Any], theirs: Sequence[Any]) -> dict[str, list[float]]:
    """Mean and standard error of the difference in LPPD: of all chains, and of single chains."""

    def density(chains):
        found = averaged([c["density"] for c in chains])
        return found.reshape(len(found), -1).mean(axis=1)  # tokens of a piece are one datum

    together = [density(a) - density(b) for a, b in zip(ours, theirs, strict=True)]
    alone = [
        np.mean([density([x]) - density([y]) for x, y in zip(a, b, strict=True)], axis=0)
        for a, b in zip(ours, theirs, strict=True)
    ]
    return {"lppd": mean_error(np.stack(together)), "single": mean_error(np.stack(alone))}


def mean_error(values: np.ndarray) -> list[float]:
    """Mean of `[seed, datum]`, and its error over both: seeds share the test data."""
    num_seeds, num_data = values.shape
    of_data = values.mean(axis=0).var(ddof=1) / num_data
    of_seeds = values.mean(axis=1).var(ddof=1) / num_seeds if num_seeds > 1 else 0.0
    return [float(values.mean()), float(np.sqrt(of_data + of_seeds))]


if __name__ == "__main__":
    main()
