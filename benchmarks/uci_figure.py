r"""How much the step size matters: LPPD against it and against the length of the run, one picture.

    python benchmarks/uci_figure.py benchmarks/results/uci.jsonl \
        --lenet benchmarks/results/lenet_small.jsonl --output benchmarks/results/uci.png
"""

import argparse
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import records
import uci

METHODS = (
    "deep ensemble",
    "mile",
    "sgld",
    "scale_adapted_sghmc",
    "cyclical_sgld",
    "psmile published",
    "psmile_naive relative bounds",
    "psmile_naive",
    "psmile",
)
COLORS = {method: plt.get_cmap("tab10")(i) for i, method in enumerate(METHODS)}
NUM_GRADIENTS = 60_000


def against_step_size(axis, found: list[dict[str, Any]], depth: float):
    """LPPD of every method at its step sizes, down to `depth` below the best."""
    best = max(record["lppd"] for record in found)
    for method, color in COLORS.items():
        of = [record for record in found if record["cell"]["method"] == method]
        points = sorted((record["cell"]["step_size"] or 0, record["lppd"]) for record in of)
        look: dict[str, Any] = {"label": method, "color": color}
        if points and points[0][0]:
            sizes, scores = zip(*points, strict=True)
            axis.plot(sizes, np.maximum(scores, best - depth), "o-", **look)
        elif points:
            axis.axhline(points[0][1], ls="--", **look)
    axis.set(xscale="log", xlabel="step size", ylim=(best - depth, best + depth / 20))
    axis.set(ylabel="test LPPD (nats)")


def against_length(axis, found: list[dict[str, Any]]):
    """LPPD of every setting that ran for several lengths."""
    settings: dict[tuple, list[tuple[int, float]]] = {}
    for record in found:
        cell = record["cell"]
        of = settings.setdefault((cell["method"], cell["step_size"]), [])
        of.append((cell["num_gradients"], record["lppd"]))
    for (method, step_size), points in sorted(settings.items(), key=str):
        if len(points) > 1:
            lengths, scores = zip(*sorted(points), strict=True)
            label = method if step_size is None else f"{method}, {step_size:g}"
            axis.plot(lengths, scores, "o-", label=label, color=COLORS[method])
    axis.set(xscale="log", xlabel="gradients per chain")
    axis.legend(fontsize=7)


def figure(found: list[dict[str, Any]], lenet: list[dict[str, Any]], path: Path):
    """LPPD against the first step size, and on energy against the length of the run.

    Split 0 and seed 0.
    """
    drawn, axes = plt.subplots(1, 4, figsize=(20, 4.5), layout="constrained")
    found = [r for r in found if not uci.OPTIONAL & r["cell"].keys()]
    found = [r for r in found if (r["cell"]["protocol"], r["cell"]["split"]) == ("joint", 0)]
    energy = [r for r in found if r["cell"]["data"] == "energy"]
    airfoil = [r for r in found if r["cell"]["data"] == "airfoil"]
    for of, name, axis in ((energy, "energy", axes[0]), (airfoil, "airfoil", axes[1])):
        against_step_size(axis, [r for r in of if r["cell"]["num_gradients"] == NUM_GRADIENTS], 2)
        axis.set(title=f"{name}, {NUM_GRADIENTS:,} gradients")
    axes[0].legend(fontsize=7)
    first = [r for r in lenet if (r["cell"]["task"], r["cell"]["seed"]) == ("lenet", 0)]
    against_step_size(axes[2], first, 0.15)
    axes[2].set(title="LeNet, Fashion-MNIST, 2,400 gradients")
    against_length(axes[3], energy)
    axes[3].set(title="energy")
    drawn.savefig(path, dpi=110)


def main():
    """Draw the records of `uci.py` and `lenet_small.py`."""
    parser = argparse.ArgumentParser(description="LPPD against step size and length.")
    parser.add_argument("table", type=Path, help="output of uci.py")
    parser.add_argument("--lenet", type=Path, required=True, help="output of lenet_small.py")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    figure(records.read(arguments.table), records.read(arguments.lenet), arguments.output)


if __name__ == "__main__":
    main()
