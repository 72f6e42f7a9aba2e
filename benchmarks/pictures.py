"""The pictures of the pages, from the records, and one of a small regression.

    python benchmarks/pictures.py            those of the pages, into benchmarks/figures
    python benchmarks/pictures.py uci        one

The same records give the same files.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.pivot import Record, matches, read
from benchmarks.tables import JOINT

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from matplotlib.figure import Figure
from scipy import stats

import optax_smile

FOLDER = Path(__file__).parent
BLUE, RED, GREEN = "#0072B2", "#D55E00", "#009E73"
# One color for each method, and its name in the legend.
METHODS = {
    "psmile": (BLUE, "psmile, no step size to choose"),
    "mile": ("#000000", "MILE (full-batch MCLMC)"),
    "checkpoints": ("#CC79A7", "checkpoints of AdamW (learning rate)"),
    "scale_adapted_sghmc": (RED, "scale-adapted SGHMC"),
    "psmile_naive": (GREEN, "psmile, fixed step size and no noise"),
    "sgld": ("#E69F00", "SGLD"),
    "cyclical_sgld": ("#56B4E9", "cyclical SGLD"),
}
# Distance from the edges, lowest score that is drawn, and loss of a density of zero, nats.
ABOVE, BELOW, LOST = 0.05, 0.5, 1e3
LARGE = 10**7


def _gain(found: list[Record], ensemble: dict[int, float]) -> tuple[float, float]:
    """Mean difference from the ensemble over splits, and its standard error; NaN for one split."""
    gains = [max(r["lppd"] - ensemble[r["cell"]["split"]], -LOST) for r in found]
    error = np.std(gains, ddof=1) / np.sqrt(len(gains)) if len(gains) > 1 else np.nan
    return float(np.mean(gains)), float(error)


def _against_step_size(axis: Any, found: list[Record]):
    """LPPD above that of the deep ensemble, for every method at its step sizes."""
    of: dict[str, dict[float | None, list[Record]]] = {}
    for record in found:
        cell = record["cell"]
        of.setdefault(cell["method"], {}).setdefault(cell["step_size"], []).append(record)
    ensemble = {r["cell"]["split"]: r["lppd"] for r in of["deep ensemble"][None]}
    best = 0.0
    for method, (color, label) in METHODS.items():
        if None in of[method]:
            mean, error = _gain(of[method][None], ensemble)
            axis.axhspan(mean - error, mean + error, color=color, alpha=0.25, lw=0)
            axis.axhline(mean, color=color, lw=2, label=label)
            best = max(best, mean)
            continue
        sizes = sorted(size for size in of[method] if size is not None)
        gains = [_gain(of[method][size], ensemble) for size in sizes]
        means, errors = (np.array(x) for x in zip(*gains, strict=True))
        best = max(best, means.max())
        # Lost chains are drawn at the lower edge.
        drawn = np.maximum(means, -BELOW)
        errors = np.where(means >= -BELOW, errors, np.nan)
        axis.errorbar(sizes, drawn, errors, fmt="-", color=color, lw=1, capsize=3, label=label)
        single = np.array([len(of[method][size]) == 1 for size in sizes])
        for which, face in ((single, "white"), (~single, color)):
            places = np.array(sizes)[which]
            axis.plot(places, drawn[which], "o", color=color, mfc=face, ms=5)
    axis.axhline(0, color="k", ls="--", lw=1, label="deep ensemble")
    axis.set(xscale="log", xlabel="step size", ylim=(-BELOW - ABOVE, best + ABOVE))


def uci(found: list[Record]) -> Figure:
    """LPPD above the deep ensemble against the step size, on two data sets."""
    drawn, axes = plt.subplots(1, 2, figsize=(9, 4.6), layout="constrained")
    for axis, data in zip(axes, ("energy", "airfoil"), strict=True):
        wanted = JOINT | {"data": data}
        _against_step_size(axis, [record for record in found if matches(record, wanted)])
        axis.set(title=f"UCI {data}")
    axes[0].set_ylabel("test LPPD - deep ensemble (nats)")
    drawn.legend(*axes[0].get_legend_handles_labels(), ncols=3, loc="outside lower center")
    return drawn


def step_cost(found: list[Record]) -> Figure:
    """Time per parameter against size; arrays moved and needed besides."""
    usual = {"part": "update", "leaves": 20, "chains": 1, "grads": "float32"}
    sizes = [r for r in found if usual.items() <= r["cell"].items()]
    sizes.sort(key=lambda record: record["cell"]["parameters"])
    drawn, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name in dict.fromkeys(name for record in sizes for name in record["methods"]):
        rows = [record for record in sizes if name in record["methods"]]
        x = [record["cell"]["parameters"] for record in rows]
        y = [1e6 * r["methods"][name]["ms"] / n for r, n in zip(rows, x, strict=True)]
        left.loglog(x, y, marker="o", label=name)
    left.set(xlabel="parameters", ylabel="ns per parameter", title="One update")
    left.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    for record in [r for r in sizes if r["cell"]["parameters"] == LARGE][-1:]:
        names = [name for name, numbers in record["methods"].items() if "traffic" in numbers]
        for shift, key in ((-0.2, "traffic"), (0.2, "temporary")):
            values = [record["methods"][name][key] for name in names]
            places = [place + shift for place in range(len(names))]
            right.bar(places, values, 0.4, label=f"arrays: {key}")
        right.set_xticks(range(len(names)), names, rotation=30, ha="right")
        right.set_title("10⁷ parameters, from the compiled program")
        right.legend(fontsize=8)
    return drawn


def ladder(found: list[Record]) -> Figure:
    """LPPD above the ensemble of the starts against the angle, by size and prior."""
    sizes = sorted({record["cell"]["size"] for record in found}, key=float)
    drawn, axes = plt.subplots(
        1, len(sizes), figsize=(3 * len(sizes), 3.6), sharex=True, sharey=True, layout="constrained"
    )
    colors = {"N(0, 1)": RED, "fan in": GREEN, "around the start": BLUE}
    for axis, size in zip(axes, sizes, strict=True):
        of = [record for record in found if record["cell"]["size"] == size]
        for prior, color in colors.items():
            for budget, style in (("3000", "o-"), ("12000", "s--")):
                points = sorted(
                    (r["cell"]["angle"], r[budget]["lppd"] - r["ensemble"]["lppd"])
                    for r in of
                    if r["cell"]["prior"] == prior and budget in r
                )
                if points:
                    label = f"{prior}, {int(budget):,} gradients"
                    axis.plot(*zip(*points, strict=True), style, color=color, label=label, ms=4)
        axis.axhline(0, color="k", lw=0.8)
        ratio = of[0]["num_parameters"] / of[0]["num_data"]
        axis.set(
            xscale="log", xlabel="angle", title=f"$10^{size[-1]}$ weights, d / N = {ratio:.3g}"
        )
    axes[0].set_ylabel("LPPD - that of the starts (nats)")
    drawn.legend(*axes[1].get_legend_handles_labels(), ncols=3, loc="outside lower center")
    return drawn


def regression() -> Figure:
    """AdamW's fit to 80 points, and draws from eight chains."""
    generator, noise, wide = np.random.default_rng(1), 0.15, (-6.0, 6.0)
    inputs = np.concatenate([generator.uniform(-4, -1, 40), generator.uniform(1.5, 4, 40)])
    targets = np.sin(inputs) + noise * generator.normal(size=80)
    pairs = inputs[:, None].astype(np.float32), targets.astype(np.float32)
    batches = [(pairs[0][i::4], pairs[1][i::4]) for i in range(4)]
    network = nn.Sequential([nn.Dense(16), nn.tanh, nn.Dense(16), nn.tanh, nn.Dense(1)])

    def outputs(params: Any, x: Any) -> tuple[Any, Any]:
        fitted: Any = network.apply(params, x)
        return fitted[..., 0], jnp.log(noise)

    def mean_loss(params: Any, batch: Any) -> jax.Array:
        return jnp.mean((outputs(params, batch[0])[0] - batch[1]) ** 2) / (2 * noise**2)

    members = optax_smile.warmstart(
        mean_loss,
        lambda key: network.init(key, pairs[0]),
        batches,
        optax.adamw(1e-2),
        num_members=8,
        num_epochs=500,
        key=0,
        progress=False,
    )
    draws = optax_smile.sample(
        mean_loss,
        members,
        batches,
        optax_smile.psmile(num_data=len(inputs), key=0),
        num_warmup=4_000,
        num_draws=100,
        thin=100,
        key=1,
        check=False,
        progress=False,
    )
    grid = np.linspace(*wide, 241, dtype=np.float32)[:, None]
    found = optax_smile.predict(outputs, draws, grid, likelihood="gaussian")
    one = outputs(jax.tree.map(lambda x: x[0], members), grid)[0]
    drawn, axes = plt.subplots(1, 2, figsize=(9, 3), sharey=True, layout="constrained")
    axes[0].plot(grid, one, color=RED, lw=2)
    mean, deviation = np.asarray(found.mean), np.sqrt(np.asarray(found.total))
    band = mean - 2 * deviation, mean + 2 * deviation
    axes[1].fill_between(grid[:, 0], *band, color=BLUE, alpha=0.2)
    axes[1].plot(grid, mean, color=BLUE, lw=2)
    for axis, title in zip(axes, ("AdamW: one fit", "pSMILE: mean ± 2 sd"), strict=True):
        axis.plot(inputs, targets, "k.", ms=3)
        axis.set(title=title, xlim=wide, ylim=(-3, 3), xlabel="input")
    axes[0].set_ylabel("target")
    return drawn


def appendix(records: list[Record]) -> Figure:
    """Energy errors on the Gaussian and two fits; draws of the 25 modes."""
    (errors,) = (r for r in records if r["cell"]["part"] == "energies")
    drawn, axes = plt.subplots(1, 4, figsize=(12, 3), layout="constrained")
    edges, counts = np.array(errors["edges"]), np.array(errors["counts"])
    share = counts / counts.sum() / np.diff(edges)
    axes[0].stairs(share, edges, fill=True, color=BLUE, alpha=0.3, label="|ΔE|")
    at = np.linspace(0.01, 6, 300)
    shape = (errors["mean"] / errors["std"]) ** 2
    width = np.hypot(1, errors["std"] / errors["mean"])
    axes[0].plot(at, stats.gamma.pdf(at, shape, scale=1 / shape), color=RED, label="Gamma")
    axes[0].plot(at, stats.halfnorm.pdf(at, scale=width), color=GREEN, label="half-normal")
    axes[0].axvline(errors["bounds"][0], color=RED, ls=":", label="98 %")
    axes[0].set(title="energy errors", xlabel="|ΔE| / mean", yscale="log", ylim=(1e-5, 3))
    axes[0].legend(fontsize="small")
    grids = {r["cell"]["sampler"]: r["grids"] for r in records if r["cell"]["part"] == "modes"}
    shown = {
        "cSGLD, one chain": grids["cyclical_sgld"][0],
        "pSMILE-naive, one chain": grids["psmile_naive published"][0],
        "pSMILE-naive, ten chains": grids["psmile_naive published"][1],
    }
    for axis, (title, grid) in zip(axes[1:], shown.items(), strict=True):
        axis.imshow(np.array(grid).T, origin="lower", extent=(-6, 6, -6, 6), cmap="Blues")
        axis.set(title=title, xlabel="first dimension")
    axes[1].set_ylabel("second dimension")
    return drawn


# Name: what draws it, and the files whose records it takes.
PICTURES: dict[str, tuple[Callable[..., Figure], tuple[str, ...]]] = {
    "uci": (uci, ("uci",)),
    "step_cost": (step_cost, ("step_cost",)),
    "ladder": (ladder, ("ladder",)),
    "regression": (regression, ()),
    "appendix": (appendix, ("appendix",)),
}


def main():
    """Draw some pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", default=list(PICTURES), help=f"of {', '.join(PICTURES)}"
    )
    for name in parser.parse_args().names:
        draw, files = PICTURES[name]
        found = (read(FOLDER / "results" / f"{file}.jsonl") for file in files)
        # Without the version of the software, so that a file changes only with its records.
        draw(*found).savefig(
            FOLDER / "figures" / f"{name}.png", dpi=110, metadata={"Software": None}
        )


if __name__ == "__main__":
    main()
