"""Draws around trained weights of networks with far more parameters than data."""

from collections.abc import Sequence

from benchmarks.tabulated.table import Record, Table, number

import numpy as np

NAMES = {"mlp": "perceptron, digits", "cnn": "convolutions, MNIST"}


def around(found: Sequence[Record]) -> Table:
    """One row per network, prior and number of calls: means over the seeds."""
    rows = []
    for network, prior in dict.fromkeys((x["cell"]["network"], x["cell"]["prior"]) for x in found):
        mine = [x for x in found if (x["cell"]["network"], x["cell"]["prior"]) == (network, prior)]
        for calls in dict.fromkeys(name for x in mine for name in x["calls"]):
            seen = [x["calls"][calls] for x in mine if calls in x["calls"]]
            start = float(np.mean([x["start_loss"] for x in mine]))
            precisions = [x["precision"] for x in mine]
            ends = sorted({f"{min(precisions):.3g}", f"{max(precisions):.3g}"}, key=float)
            rows.append(
                [
                    NAMES[network],
                    f"around the weights, {' … '.join(ends)}" if prior == "local" else prior,
                    f"{int(calls):,}",
                    number(start, 4),
                    *(_mean(seen, name) for name in ("train_excess", "excess", "gain")),
                    str(len(seen)),
                ]
            )
    header = ["network", "prior, precision", "calls", "loss of the weights"]
    header += ["draws, training", "draws, test", "LPPD of the average", "seeds"]
    return Table(header, rows, list(found))


def _mean(seen: Sequence[Record], name: str) -> str:
    """Mean over the seeds and its standard error, with a sign."""
    values = np.array([x[name] for x in seen])
    error = values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
    return f"{values.mean():+.4f} ± {error:.4f}"
