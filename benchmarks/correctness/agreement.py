"""Are the draws right? Mini-batch samplers against long NUTS runs, and calibration by ranks.

    networks     two Bayesian networks of about 100 parameters; chains of a warm start are compared
                 with NUTS from there, in what they predict; every sampler at batches N to N/32
    posteriors   the default pSMILE on posteriors that others use, batches of a tenth
    calibration  simulation-based calibration of the default pSMILE: over 500 data sets drawn from
                 the model, truths must rank uniformly among the draws (Talts et al. 2018)

Chains make 60,000 gradients, the first third of which is warm-up; batches go through permutations
of the rows. Models and data: `posteriors.py`. References are made once and kept in `--references`
(not in the repository); `--only-references` makes them and stops. A sampler without a step size of
its own gets that of its grid whose draws agree best on a seed which is not reported. A cell is one
line of the output; cells that it already holds are skipped.

    export OPTAX_SMILE_DATA=path/to/data
    python benchmarks/correctness/agreement.py --part networks --output out/agreement.jsonl
"""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import records
from benchmarks.correctness import reference
from benchmarks.correctness.chains import (
    DEFAULT,
    FULL,
    FULL_BATCH,
    METHODS,
    NUTS,
    SMOKE,
    Method,
    Scale,
    chain_of,
    fit,
    sample,
)
from benchmarks.correctness.posteriors import (
    CALIBRATED,
    NETWORKS,
    NUM_INPUTS,
    POSTERIORS,
    Posterior,
)
from benchmarks.tables import BOUNDS

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

SEARCH_SEED, MOST_EXTENSIONS = 1_000, 2
# Of a posterior.
NUM_CHAINS = 8
# Of a calibrated chain, so few that they are nearly independent: 20 ranks.
NUM_DRAWS = 19
# Variance of the ranks, as shares, if they are uniform.
UNIFORM = (1 - (NUM_DRAWS + 1) ** -2) / 12
# Data sets for which effective sample sizes are computed.
NUM_CHECKED = 50
DATA: dict[str, dict[str, Callable[[], Posterior]]] = {
    "networks": NETWORKS,
    "posteriors": POSTERIORS,
    "calibration": CALIBRATED,
}
USUAL_SHARES = {"networks": (1, 2, 8, 32), "posteriors": (10,), "calibration": (8,)}


def compare(draws: np.ndarray, target: np.ndarray, summaries: dict[str, Any]) -> dict[str, Any]:
    """`reference.agreement`, infinitely bad where a chain was lost."""
    if np.all(np.isfinite(draws)):
        return reference.agreement(draws, target, summaries)
    lost = dict.fromkeys(("raw", "error", "net"), float("inf"))
    names = [f"{measure} {name}" for measure in BOUNDS for name in summaries]
    none = {"ess": 0.0, "smallest_ess": 0.0, "sd_ratio": float("inf"), "is_lost": True}
    return none | dict.fromkeys(names, lost)


def over_inputs(summary: Callable) -> Callable:
    """Summarize the test inputs only."""
    return lambda values: summary(values[:NUM_INPUTS])


NETWORK_SUMMARIES = {
    "median": over_inputs(np.median),
    "p90": over_inputs(lambda values: np.quantile(values, 0.9)),
}
POSTERIOR_SUMMARIES = {"max": np.max, "p90": lambda values: np.quantile(values, 0.9)}


def starts_of(posterior: Posterior, with_prior: bool, number: int, num_steps: int) -> jax.Array:
    """Descend from random points `[start, parameter]`."""
    rows = jax.tree.map(jnp.asarray, posterior.rows)
    num_data = len(jax.tree.leaves(rows)[0])

    def loss(theta):
        likelihood = jnp.mean(posterior.log_likelihood(theta, rows))
        return -likelihood - with_prior * posterior.log_prior(theta) / num_data

    def start_of(key):
        return fit(loss, posterior.size, key, num_steps)

    return jax.jit(jax.vmap(start_of))(jax.random.split(jax.random.key(0), number))


@functools.cache
def setting_of(
    part: str, name: str, scale: Scale, folder: Path
) -> tuple[Posterior, reference.Reference]:
    """Make or read the reference of a network or posterior, with the places where chains start.

    Those of a network from few modes, several from each; those of a posterior from descents of
    their own, by the likelihood only: the prior would pull the scale of centred groups to zero.
    """
    posterior = DATA[part][name]()

    def make():
        if part == "networks":
            starts = starts_of(posterior, True, scale.num_starts, scale.fit_steps)
            chains = jnp.repeat(starts[:, None], scale.chains_per_start, axis=1)
            acceptance, enough = 0.8, 1_000
        else:
            starts = starts_of(posterior, False, NUM_CHAINS, scale.fit_steps)
            chains = starts[None, : NUM_CHAINS // 2]
            acceptance, enough = 0.9, 4_000
        lengths = scale.nuts_warmup, scale.nuts_block, scale.most_blocks
        found = reference.run(posterior, chains, acceptance, *lengths, enough, seed=1)
        return found._replace(starts=np.asarray(starts))

    stem = f"{part}_{name}".replace(", ", "_").replace(" ", "_")
    return posterior, reference.stored(folder / f"{stem}.npz", make)


def quality_of(target: reference.Reference) -> dict[str, Any]:
    """Quality of the reference."""
    return target.statistics | {
        "rhat": np.round(target.rhat, 4).tolist(),
        "ess": np.round(target.ess).tolist(),
    }


def search(
    posterior: Posterior,
    target: reference.Reference,
    method: Method,
    share: int,
    scale: Scale,
    seed: int,
) -> list[tuple[float, float]]:
    """Step sizes, and the sum of the median deviations of one chain from each of two starts.

    The grid grows by two where its best step size is its smallest or largest.
    """
    starts, found = jnp.asarray(target.starts[:2]), []
    step_sizes = method.step_sizes
    for _ in range(1 + MOST_EXTENSIONS):
        draws, _ = sample(posterior, method, step_sizes, starts, share, scale, seed)
        for step_size, of_step in zip(step_sizes, draws, strict=True):
            totals = []
            for chain, of_start in zip(of_step, target.draws, strict=False):
                measures = reference.deviations(chain, of_start.reshape(-1, of_start.shape[-1]))
                totals.append(sum(np.median(x[:NUM_INPUTS]) for x in measures.values()))
            found.append((step_size, float(np.nan_to_num(np.mean(totals), nan=np.inf))))
        found.sort()
        best = min(found, key=lambda pair: pair[1])
        if best not in (found[0], found[-1]):
            break
        factor = np.sqrt(10) ** (1 if best == found[-1] else -1)
        step_sizes = (best[0] * factor, best[0] * factor**2)
    return found


def run_network(cell: records.Cell, scale: Scale, folder: Path) -> records.Record:
    """One sampler and batch: search the step size, then compare start by start."""
    posterior, target = setting_of("networks", cell["data"], scale, folder)
    method, share, seed = METHODS[cell["method"]], cell["share"], cell["seed"]
    grid, best = [], ()
    if method.step_sizes:
        grid = search(posterior, target, method, share, scale, SEARCH_SEED + seed)
        best = (min(grid, key=lambda pair: pair[1])[0],)
    starts = jnp.repeat(jnp.asarray(target.starts), scale.chains_per_start, axis=0)
    draws, used_steps = sample(posterior, method, best, starts, share, scale, seed)
    by_start = draws[0].reshape(-1, scale.chains_per_start, *draws.shape[2:])
    summaries = dict(NETWORK_SUMMARIES)
    if draws.shape[-1] > NUM_INPUTS:
        summaries["log sigma"] = lambda values: values[NUM_INPUTS]
    return {
        "starts": [
            compare(mine, one, summaries) for mine, one in zip(by_start, target.draws, strict=True)
        ],
        "step_size": best[0] if best else None,
        "median_step": float(used_steps[0]),
        "searched_step_deviation": grid,
        "reference": quality_of(target),
    }


def run_posterior(cell: records.Cell, scale: Scale, folder: Path) -> records.Record:
    """Eight chains of one sampler on one posterior."""
    posterior, target = setting_of("posteriors", cell["data"], scale, folder)
    method, starts = METHODS[cell["method"]], jnp.asarray(target.starts)
    draws, used_steps = sample(
        posterior, method, method.step_sizes[:1], starts, cell["share"], scale, cell["seed"]
    )
    found = compare(draws[0], target.draws[0], POSTERIOR_SUMMARIES)
    deviations = reference.deviations(
        draws[0].reshape(-1, draws.shape[-1]), target.draws[0].reshape(-1, draws.shape[-1])
    )
    return found | {
        "median_step": float(used_steps[0]),
        "each": {name: np.round(x, 3).tolist() for name, x in deviations.items()},
        "reference": quality_of(target),
    }


def calibrated(
    posterior: Posterior, method: Method | None, share: int, scale: Scale, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Truths `[data set, quantity]` and draws `[data set, draw, quantity]`; None is NUTS."""
    simulate: Any = posterior.simulate
    own, fit_keys, keys = jax.random.split(jax.random.key(seed), (3, scale.num_simulations))
    truths, rows = jax.jit(jax.vmap(simulate))(own)
    num_data = len(jax.tree.leaves(rows)[0][0])

    def start_of(rows, key):
        loss = functools.partial(posterior.mean_loss, batch=rows, num_data=num_data)
        return fit(loss, posterior.size, key, scale.fit_steps // 3)

    starts = jax.jit(jax.vmap(start_of))(rows, fit_keys)
    if method is None:
        adapt, draw = reference.nuts(
            posterior, 0.9, scale.nuts_warmup, scale.nuts_block, rows_axis=0
        )
        draws = draw(adapt(starts, keys, rows), fit_keys, rows)[1]
    else:
        chain = chain_of(posterior, method, num_data, share, scale.num_gradients, scale.thin)
        run = jax.jit(jax.vmap(functools.partial(chain, None)))
        draws = run(starts, keys, rows)[0][:, round(scale.num_draws * scale.warmup) :]
    truths = jax.vmap(posterior.quantities)(truths, rows)
    return np.asarray(truths), np.asarray(draws, np.float64)


def run_calibration(cell: records.Cell, scale: Scale) -> records.Record:
    """Ranks of the truth among a few draws."""
    posterior = CALIBRATED[cell["data"]]()
    method = METHODS.get(cell["method"])
    truths, draws = calibrated(posterior, method, cell["share"], scale, cell["seed"])
    ess = [reference.sizes(x[None]) for x in draws[:NUM_CHECKED]]
    draws = draws[:, :: draws.shape[1] // NUM_DRAWS][:, -NUM_DRAWS:]
    centred = draws - draws.mean(axis=1, keepdims=True)
    lag = np.sum(centred[:, 1:] * centred[:, :-1], axis=1) / np.sum(centred**2, axis=1)
    ranks = np.sum(draws < truths[:, None], axis=1)
    counts = np.array([np.bincount(rank, minlength=NUM_DRAWS + 1) for rank in ranks.T])
    p_values = stats.chisquare(counts, axis=1).pvalue
    unit = (ranks + 0.5) / (NUM_DRAWS + 1)
    return {
        "p": p_values.tolist(),
        "mean_rank": unit.mean(axis=0).tolist(),
        "variance_ratio": (unit.var(axis=0) / UNIFORM).tolist(),
        "lag_one": np.nanmedian(lag, axis=0).tolist(),
        "ess": np.median(ess, axis=0).tolist(),
        "num_lost": int(np.sum(~np.isfinite(draws).all(axis=(1, 2)))),
        "is_uniform": bool(np.min(p_values) * len(p_values) > 0.05),
        "counts": counts.tolist(),
    }


def cells_of(arguments: argparse.Namespace) -> list[records.Cell]:
    """Requested cells; full-batch MCLMC only on all rows."""
    part, seed = arguments.part, arguments.seed
    data = [name for name in DATA[part] if not arguments.data or name in arguments.data]
    methods = arguments.methods or (list(METHODS) if part == "networks" else [DEFAULT])
    cells = [
        {"part": part, "data": name, "share": share, "method": method, "seed": seed}
        for name in data
        for share in arguments.shares or USUAL_SHARES[part]
        for method in methods
    ]
    return [cell for cell in cells if cell["share"] == 1 or cell["method"] != FULL_BATCH]


def run_cell(cell: records.Cell, scale: Scale, folder: Path) -> records.Record:
    """Run a cell of any part."""
    if cell["part"] == "calibration":
        return run_calibration(cell, scale)
    return (run_network if cell["part"] == "networks" else run_posterior)(cell, scale, folder)


def main():
    """Run the cells that are missing, print the tables."""
    parser = records.parser(__doc__)
    parser.add_argument("--part", choices=DATA, required=True)
    parser.add_argument("--data", nargs="+", help="some networks, posteriors or models")
    parser.add_argument("--methods", nargs="+", choices=[*METHODS, NUTS])
    parser.add_argument("--shares", nargs="+", type=int, help="N over the batch size")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="tiny runs, as a check")
    parser.add_argument("--only-references", action="store_true")
    parser.add_argument("--references", type=Path, default=Path("out/references"))
    arguments = parser.parse_args()
    scale = SMOKE if arguments.smoke else FULL
    folder = arguments.references / "smoke" if arguments.smoke else arguments.references
    cells = cells_of(arguments)
    if arguments.only_references:
        for name in dict.fromkeys(cell["data"] for cell in cells):
            print(name, setting_of(arguments.part, name, scale, folder)[1].statistics, flush=True)
        return

    def run(cell: records.Cell) -> records.Record:
        return run_cell(cell, scale, folder)

    table = "nuts-networks" if arguments.part == "networks" else arguments.part
    records.complete(arguments, cells, run, "seconds", table, scale=list(scale))


if __name__ == "__main__":
    main()
