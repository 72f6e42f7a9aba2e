"""The pictures of the pages, from the records, and one of a small regression.

    python benchmarks/pictures.py            those of the pages, into benchmarks/figures
    python benchmarks/pictures.py uci        one

The same records give the same files.
"""
# pandas has no stubs, and its methods several return types.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false, reportIndexIssue=false

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.tables import ENSEMBLE, JOINT, STEPS, frame_of

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import pandas as pd
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


def _against_step_size(axis: Any, runs: pd.DataFrame):
    """LPPD above that of the deep ensemble, for every method at its step sizes."""
    ensemble = runs[runs["method"] == ENSEMBLE].set_index("split")["lppd"]
    gains = (runs["lppd"] - runs["split"].map(ensemble)).clip(lower=-LOST)
    groups = gains.groupby([runs["method"], runs["step_size"].fillna(0)])
    found = groups.agg(["mean", "sem", "size"])
    for method, (color, label) in METHODS.items():
        of = found.loc[method]
        if (of.index == 0).any():
            ((mean, error, _),) = of.to_numpy()
            axis.axhspan(mean - error, mean + error, color=color, alpha=0.25, lw=0)
            axis.axhline(mean, color=color, lw=2, label=label)
            continue
        # Lost chains are drawn at the lower edge.
        drawn, errors = of["mean"].clip(lower=-BELOW), of["sem"].where(of["mean"] >= -BELOW)
        axis.errorbar(of.index, drawn, errors, fmt="-", color=color, lw=1, capsize=3, label=label)
        for is_single, face in ((True, "white"), (False, color)):
            points = drawn[(of["size"] == 1) == is_single]
            axis.plot(points.index, points, "o", color=color, mfc=face, ms=5)
    axis.axhline(0, color="k", ls="--", lw=1, label=ENSEMBLE)
    best = max(found.loc[[*METHODS], "mean"].max(), 0)
    axis.set(xscale="log", xlabel="step size", ylim=(-BELOW - ABOVE, best + ABOVE))


def uci(runs: pd.DataFrame) -> Figure:
    """LPPD above the deep ensemble against the step size, on two data sets."""
    drawn, axes = plt.subplots(1, 2, figsize=(9, 4.6), layout="constrained")
    for axis, data in zip(axes, ("energy", "airfoil"), strict=True):
        _against_step_size(axis, runs.query(f"{JOINT} and data == @data", engine="python"))
        axis.set(title=f"UCI {data}")
    axes[0].set_ylabel("test LPPD - deep ensemble (nats)")
    drawn.legend(*axes[0].get_legend_handles_labels(), ncols=3, loc="outside lower center")
    return drawn


def step_cost(runs: pd.DataFrame) -> Figure:
    """Time per parameter against size; arrays moved and needed besides."""
    usual = "part == 'update' and leaves == 20 and chains == 1 and grads == 'float32'"
    sizes = runs.query(usual).sort_values("parameters", kind="stable")
    drawn, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name in STEPS:
        known = sizes.dropna(subset=[f"methods.{name}.ms"])
        x, milliseconds = known["parameters"], known[f"methods.{name}.ms"]
        left.loglog(x, 1e6 * milliseconds / x, marker="o", label=name)
    left.set(xlabel="parameters", ylabel="ns per parameter", title="One update")
    left.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    large = sizes[sizes["parameters"] == LARGE].iloc[-1]
    for shift, key in ((-0.2, "traffic"), (0.2, "temporary")):
        values = [large[f"methods.{name}.{key}"] for name in STEPS]
        right.bar(np.arange(len(STEPS)) + shift, values, 0.4, label=f"arrays: {key}")
    right.set_xticks(range(len(STEPS)), STEPS, rotation=30, ha="right")
    right.set_title("10⁷ parameters, from the compiled program")
    right.legend(fontsize=8)
    return drawn


def ladder(runs: pd.DataFrame) -> Figure:
    """LPPD above the ensemble of the starts against the angle, by size and prior."""
    drawn, axes = plt.subplots(
        1, 4, figsize=(12, 3.6), sharex=True, sharey=True, layout="constrained"
    )
    colors = {"N(0, 1)": RED, "fan in": GREEN, "around the start": BLUE}
    for axis, (size, of_size) in zip(axes, runs.groupby("size"), strict=True):
        for prior, color in colors.items():
            of = of_size[of_size["prior"] == prior].sort_values("angle")
            for budget, style in (("3000", "o-"), ("12000", "s--")):
                gains = (of[f"{budget}.lppd"] - of["ensemble.lppd"]).dropna()
                if len(gains):
                    label = f"{prior}, {int(budget):,} gradients"
                    axis.plot(
                        of["angle"][gains.index], gains, style, color=color, label=label, ms=4
                    )
        axis.axhline(0, color="k", lw=0.8)
        ratio = (of_size["num_parameters"] / of_size["num_data"]).iloc[0]
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


def appendix(runs: pd.DataFrame) -> Figure:
    """Energy errors on the Gaussian and two fits; draws of the 25 modes."""
    (errors,) = runs.loc[runs["part"] == "energies", "record"]
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
    grids = runs[runs["part"] == "modes"].set_index("sampler")["grids"]
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


# Each takes the records of the file with its name, except the first.
PICTURES: dict[str, Callable[..., Figure]] = {"regression": regression}
PICTURES |= {x.__name__: x for x in (uci, step_cost, ladder, appendix)}


def main():
    """Draw some pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", default=list(PICTURES), help=f"of {', '.join(PICTURES)}"
    )
    for name in parser.parse_args().names:
        found = [] if name == "regression" else [frame_of(name)]
        # Without the version of the software, so that a file changes only with its records.
        path = FOLDER / "figures" / f"{name}.png"
        PICTURES[name](*found).savefig(path, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
