"""Further checks on the known posteriors.

Modes found, energy errors, how the bias falls with the steps, full-batch MCLMC, the exact bias of
SGLD, explicit noise on the direction, other random rotations, the friction of SGHMC.

    python benchmarks/correctness/analytic_figures.py mixture --output out/figures.jsonl
    python benchmarks/correctness/analytic_figures.py decoherence --steps 200000

and so on with `energy`, `decay`, `baseline`, `sgld`, `rotations`, `friction`. `mixture` and
`energy` also draw what no record holds, draws and energy errors, into the folder `--pictures`.
"""

import functools
import itertools
import time
from pathlib import Path
from typing import Any

from benchmarks import pictures, records, samplers
from benchmarks.correctness import analytic
from benchmarks.correctness.analytic import DIM

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_smile

CENTERS = np.stack(np.meshgrid(*2 * [np.arange(-4.0, 5.0, 2.0)]), axis=-1).reshape(25, 2)
WIDTH = np.sqrt(0.3)
NOISE_STD = np.sqrt(analytic.NOISE_VARIANCE)
CYCLE = 5_000
# A mode counts as found once so many step ends lay within one standard deviation of it.
VISITS = 100
THIN = 100
BASELINE_STEP_SIZES = (0.05, 0.1, 0.2, 0.4)
BASELINE_LENGTHS = (5.0, 20.0, 80.0)
DECAY_STEP_SIZE = 0.02
# Mean squared move of a parameter per step is about twice that.
DIFFUSION_SPEEDS = (0.0005, 0.001, 0.002, 0.004)
DECOHERENCE_CELLS = (
    ("gaussian", "diagonal"),
    ("rosenbrock", "diagonal"),
    ("funnel", "diagonal"),
    ("gaussian", "correlated"),
    ("rosenbrock", "correlated"),
    ("funnel", "correlated"),
)
TRIED = {
    "gaussian": (1e-3, 3e-3, 1e-2, 2e-2),
    "rosenbrock": (4e-4, 1e-3, 2e-3, 4e-3),
    "funnel": (4e-4, 1e-3, 3e-3, 1e-2),
}
# Explicit noise in units of the noise of the gradients.
SHARES = (0.0, 0.1, 1.0, 10.0)
NUM_ROTATIONS = 8


def mixture_gradient(theta: jax.Array) -> jax.Array:
    """Gradient of U for 25 equal Gaussians in two coordinates, standard normal in eight."""
    plane, rest = theta[:2], theta[2:]
    offsets = (plane[None] - CENTERS) / WIDTH**2
    log_weights = -0.5 * jnp.sum(offsets**2, axis=1) * WIDTH**2
    return jnp.concatenate([jax.nn.softmax(log_weights) @ offsets, rest])


@functools.partial(jax.jit, static_argnames=("name", "num_gradients", "options"))
def explore(name: str, options: tuple, step_size, keys, num_gradients: int):
    """Run a sampler on the mixture under isotropic noise, a chain for each key.

    Returns:
        Step ends in the plane `[chain, draw, 2]`, how many lay nearest to each mode and within one
        standard deviation of it `[chain, 25]`, and the mean norm of an update `[chain]`.
    """

    def one_chain(key):
        key, noise_key = jax.random.split(key)
        given = dict(options, num_data=1, prior_precision=0.0)
        tx = samplers.build(name, step_size, key=key, **given)

        def call(carry, noise):
            params, state, nearest, inside = carry
            updates, state = tx.update(mixture_gradient(params) + noise, state, params)
            seen = optax_smile.stats(state)
            counts = seen.step_end & seen.accepted & seen.is_draw
            distances = jnp.sum((params[None, :2] - CENTERS) ** 2, axis=1)
            mode = jnp.argmin(distances)
            nearest = nearest.at[mode].add(counts)
            inside = inside.at[mode].add(counts & (distances[mode] < WIDTH**2))
            carry = optax.apply_updates(params, updates), state, nearest, inside
            return carry, jnp.linalg.norm(updates)

        def chunk(carry, key):
            noises = NOISE_STD * jax.random.normal(key, (THIN, DIM))
            (params, state, *visited), norms = jax.lax.scan(call, carry, noises)
            is_draw = optax_smile.stats(state).is_draw
            seen = jnp.asarray(params)[:2], is_draw, norms.mean()
            return (params, state, *visited), seen

        start, visits = jnp.zeros(DIM), jnp.zeros(25, jnp.int32)
        carry = start, tx.init(start), visits, visits
        keys = jax.random.split(noise_key, num_gradients // THIN)
        (_, _, nearest, inside), (points, kept, norms) = jax.lax.scan(chunk, carry, keys)
        return points, kept, nearest, inside, norms.mean()

    return jax.vmap(one_chain)(keys)


def matching_step_size(norm: float, options: tuple) -> float:
    """Peak step size of cyclical SGLD whose updates are on average as long as given."""
    low, high = 1e-5, 1.0
    for _ in range(12):
        middle = np.sqrt(low * high)
        keys = jax.random.split(jax.random.key(9), 4)
        *_, path = explore("cyclical_sgld", options, middle, keys, 2 * CYCLE)
        low, high = (middle, high) if np.mean(path) < norm else (low, middle)
    return float(np.sqrt(low * high))


def mixture(folder: Path, num_steps: int) -> list[dict[str, Any]]:
    """Modes found by pSMILE-naive and by cyclical SGLD with updates of the same mean length."""
    keys = jax.random.split(jax.random.key(0), 10)
    cycles = (("total_steps", num_steps), ("num_cycles", max(num_steps // CYCLE, 1)))
    runs, norm = [], 0.0
    for label, name, options, step_size, calls in (
        ("psmile_naive, minimal norm", "psmile_naive", (("integrator", "minimal_norm"),), 0.6, 2),
        ("psmile_naive, leapfrog", "psmile_naive", (("integrator", "leapfrog"),), 0.6, 1),
        ("cyclical_sgld", "cyclical_sgld", cycles, None, 1),
    ):
        if step_size is None:
            step_size = matching_step_size(norm, cycles)
        num_gradients = num_steps * calls
        run = jax.device_get(explore(name, options, step_size, keys, num_gradients))
        norm = float(np.mean(run[-1]))
        runs.append((label, step_size, run))

    exact = np.random.default_rng(0)
    truth = CENTERS[exact.integers(0, 25, 10_000)] + WIDTH * exact.normal(size=(10_000, 2))
    shown = [("independent draws", truth)]
    records = []
    for label, step_size, (points, kept, nearest, inside, path) in runs:
        shares = nearest.sum(axis=0) / nearest.sum()
        records.append(
            {
                "figure": "mixture",
                "sampler": label,
                "step_size": step_size,
                "steps": num_steps,
                "update_norm": float(path.mean()),
                "modes_by_each_chain": np.sum(inside >= VISITS, axis=1).tolist(),
                "modes_by_ten_chains": int(np.sum(inside.sum(axis=0) >= VISITS)),
                "smallest_share_times_25": float(25 * shares.min()),
                "largest_share_times_25": float(25 * shares.max()),
            }
        )
        if "minimal" not in label:
            shown.append((f"{label}, one chain", points[0][kept[0]]))
        if label.endswith("leapfrog"):
            shown.append((f"{label}, ten chains", points[:, ::10][kept[:, ::10]]))
    pictures.modes(shown, CENTERS).savefig(folder / "mixture.png", dpi=100)
    return records


def energy(folder: Path, num_steps: int) -> list[dict[str, Any]]:
    """Energy errors of pSMILE-naive on the Gaussian against the Gamma with their moments."""
    target = analytic.TARGETS["gaussian"]
    root = analytic.noise_root("correlated", target)
    tx = samplers.build("psmile_naive", 0.01, num_data=1, prior_precision=0.0)

    def call(carry, key):
        params, state = carry
        noise = root(params) @ jax.random.normal(key, (DIM,))
        value, gradient = jax.value_and_grad(target.energy)(params)
        value += noise @ params
        updates, state = tx.update(gradient + noise, state, params, value=value)
        return (optax.apply_updates(params, updates), state), optax_smile.stats(state)

    start = jnp.asarray(target.mean, jnp.float32)
    keys = jax.random.split(jax.random.key(0), num_steps)
    _, seen = jax.jit(lambda carry: jax.lax.scan(call, carry, keys))((start, tx.init(start)))
    errors = np.abs(np.asarray(seen.energy_change, float)[1:])
    mean, std = errors.mean(), errors.std()
    fit = np.random.default_rng(0).gamma((mean / std) ** 2, std**2 / mean, 1_000_000)
    threshold = float(np.quantile(fit, 0.98))

    drawn = pictures.energy_errors(errors, fit, threshold)
    drawn.savefig(folder / "energy_errors.png", dpi=120)
    beyond = float(np.mean(errors > threshold))
    record = {"mean": mean, "std": std, "threshold": threshold, "share_beyond": beyond}
    return [{"figure": "energy", "steps": num_steps, **record}]


def decay(folder: Path, num_steps: int) -> list[dict[str, Any]]:
    """Bias of SMILE-naive against the number of steps under isotropic noise, leapfrog."""
    del folder
    records = []
    keys = jax.random.split(jax.random.key(5), 20)
    for name, target in analytic.TARGETS.items():
        arguments = ("smile_naive leapfrog", name, "isotropic", "gaussian")
        num_chunks = num_steps // analytic.CHUNK
        sizes = jnp.array([DECAY_STEP_SIZE], jnp.float32)
        means, counts = jax.device_get(analytic.run_chains(*arguments, num_chunks, sizes, keys))
        shares = np.logspace(-2, 0, 9)
        chains = [analytic.biases(target, means, counts, share)[0] for share in shares]
        bias = np.mean(chains, axis=1)
        slope = np.polyfit(np.log(shares[4:]), np.log(bias[4:]), 1)[0]
        records.append(
            {
                "figure": "decay",
                "target": name,
                "step_size": DECAY_STEP_SIZE,
                "steps": (shares * num_steps).tolist(),
                "bias": bias.tolist(),
                "error": [analytic.bootstrap_error(values) for values in chains],
                "slope_last_decade": slope,
            }
        )
    return records


def baseline(folder: Path, num_steps: int) -> list[dict[str, Any]]:
    """Bias of full-batch MCLMC at `num_steps` gradients, as tuned and with the best of a grid."""
    del folder
    records = []
    search_keys, fresh_keys = jax.random.split(jax.random.key(1), (2, 10))

    def run(name, length, step_sizes, keys):
        column = f"mclmc L={length:.3g}"
        analytic.SAMPLERS[column] = ("mclmc", {"decoherence_length": length})
        arguments = (column, name, "none", "gaussian", num_steps // analytic.CHUNK)
        results = analytic.run_chains(*arguments, jnp.asarray(step_sizes, jnp.float32), keys)
        return analytic.biases(analytic.TARGETS[name], *jax.device_get(results))

    for name, target in analytic.TARGETS.items():
        start = jnp.asarray(target.mean, jnp.float32)
        tuned = optax_smile.tune_mclmc(
            target.energy,
            start,
            num_data=1,
            prior_precision=0.0,
            num_steps=num_steps // 10,
            key=jax.random.key(0),
        )
        found = {
            length: run(name, length, BASELINE_STEP_SIZES, search_keys[:4]).mean(axis=1)
            for length in BASELINE_LENGTHS
        }
        length = min(found, key=lambda length: found[length].min())
        step_size = BASELINE_STEP_SIZES[int(np.argmin(found[length]))]
        settings = {
            "tuned": (float(tuned.step_size), float(tuned.decoherence_length)),
            "grid": (step_size, length),
        }
        for label, (step_size, length) in settings.items():
            bias = run(name, length, [step_size], fresh_keys)[0]
            records.append(
                {
                    "figure": "baseline",
                    "target": name,
                    "settings": label,
                    "step_size": step_size,
                    "decoherence_length": length,
                    "bias": float(bias.mean()),
                    "error": analytic.bootstrap_error(bias),
                }
            )
            print(records[-1], flush=True)
    return records


def best_step_size(column, name, noise, step_sizes, keys, num_steps) -> list[float] | None:
    """Bias, its error and the step size, of chains that mix; None where none does.

    The step size is chosen by the first half of the chains, the second half is reported.
    """
    arguments = (column, name, noise, "gaussian", num_steps // analytic.CHUNK)
    results = analytic.run_chains(*arguments, jnp.asarray(step_sizes, jnp.float32), keys)
    means, counts = jax.device_get(results)
    jax.clear_caches()
    bias, half = analytic.biases(analytic.TARGETS[name], means, counts), len(keys) // 2
    searched = bias[:, :half].mean(axis=1)
    searched[analytic.effective_sizes(means, counts) < analytic.ENOUGH] = np.inf
    if np.isinf(searched.min()):
        return None
    best = int(searched.argmin())
    fresh = bias[best, half:]
    return [float(fresh.mean()), analytic.bootstrap_error(fresh), float(step_sizes[best])]


def decoherence(folder: Path, num_steps: int) -> list[dict[str, Any]]:
    """Bias against the decoherence length, each with the best of its own step sizes.

    Lengths are given in units of the length at which explicit noise turns the direction as fast as
    the noise of the gradients does: the only scale that a sampler could find without tuning.
    """
    keys = jax.random.split(jax.random.key(2), 48)
    variance = analytic.NOISE_VARIANCE * float(analytic.VARIANCES.mean())
    del folder
    found_cells = []
    for name, noise in DECOHERENCE_CELLS:
        found = []
        for share in SHARES:
            column = f"psmile_naive leapfrog, explicit noise {share}"
            options = {}
            if share:
                # Both turn u by a variance per step: 2 eps / (L d) and eps^2 V / (d - 1)^2.
                constant = 2 * (DIM - 1) ** 2 / (DIM * variance * share)
                options = {"decoherence_length": lambda eps, constant=constant: constant / eps}
            analytic.SAMPLERS[column] = ("psmile_naive", analytic.LEAPFROG | options)
            best = best_step_size(column, name, noise, TRIED[name], keys, num_steps)
            if best:
                found.append([share, *best])
        cell = {"figure": "decoherence", "cell": [name, noise], "share_bias_error_step": found}
        found_cells.append(cell)
        print(cell, flush=True)
    return found_cells


def rotations(folder: Path, num_steps: int) -> list[dict[str, Any]]:
    """Bias under correlated noise for several random rotations, of the target and of the noise."""
    del folder
    keys, records = jax.random.split(jax.random.key(3), 24), []
    for seed, name in itertools.product(range(NUM_ROTATIONS), ("gaussian", "funnel")):
        analytic.ROOTS[f"correlated {seed}"] = analytic.correlated_root(2 * seed + 1)
        rotated = f"{name} {seed}"
        target = analytic.gaussian(2 * seed) if name == "gaussian" else analytic.funnel()
        analytic.TARGETS[rotated] = target
        arguments = (rotated, f"correlated {seed}", TRIED[name], keys, num_steps)
        best = best_step_size(analytic.OURS, *arguments)
        records.append({"figure": "rotations", "cell": rotated, "bias_error_step": best})
        print(records[-1], flush=True)
    return records


def sgld(folder: Path, num_steps: int) -> list[dict[str, Any]]:
    """Expected squared bias of SGLD on the Gaussian under isotropic noise, in closed form.

    In the eigenbasis the chain is x <- rho x + noise. Its squares, averaged over the run, are off
    by the stationary variance, by the start at the mean, and by chance: Isserlis, with the
    autocovariances v rho^t.
    """
    del folder
    step_sizes, smallest = np.logspace(-4, -2, 41), []

    def expected(eps, shares):
        rho = 1 - eps / analytic.VARIANCES
        variance = (2 * eps + eps**2 * analytic.NOISE_VARIANCE) / (1 - rho**2)
        exact, weighted = shares @ analytic.VARIANCES, shares * variance
        off = np.sum(weighted * (1 - 1 / (num_steps * (1 - rho**2))), axis=1) - exact
        products = np.outer(rho, rho)
        chance = (
            2 / num_steps * (weighted @ ((1 + products) / (1 - products)) * weighted).sum(axis=1)
        )
        return np.mean((off**2 + chance) / (2 * exact**2))

    for seed in range(100):
        shares = analytic.rotation(seed).T ** 2
        smallest.append(min(expected(eps, shares) for eps in step_sizes))
    quantiles = {"ours": smallest[0], "least": min(smallest), "largest": max(smallest)}
    return [{"figure": "sgld", "steps": num_steps, **{k: float(v) for k, v in quantiles.items()}}]


def friction(folder: Path, num_steps: int) -> list[dict[str, Any]]:
    """Bias of SGLD and SGHMC on Rosenbrock at equal speeds of diffusion h = step_size^2 / friction.

    With the means of x^2 and y^2, the first and the last five coordinates.
    """
    del folder
    records, keys, target = [], jax.random.split(jax.random.key(5), 16), "rosenbrock"
    for rate in (None, 0.05, 0.3, 0.8):
        column = "sgld" if rate is None else f"sghmc friction={rate}"
        if rate is not None:
            analytic.SAMPLERS[column] = ("sghmc", {"friction": rate})
        speeds = jnp.asarray(DIFFUSION_SPEEDS, jnp.float32)
        step_sizes = speeds if rate is None else jnp.sqrt(speeds * rate)
        arguments = (column, target, "isotropic", "gaussian", num_steps // analytic.CHUNK)
        means, counts = jax.device_get(analytic.run_chains(*arguments, step_sizes, keys))
        bias = analytic.biases(analytic.TARGETS[target], means, counts)
        squares = np.asarray(means, float).mean(axis=(1, 2))
        for speed, chains, square in zip(DIFFUSION_SPEEDS, bias, squares, strict=True):
            records.append(
                {
                    "figure": "friction",
                    "sampler": column,
                    "speed": speed,
                    "steps": num_steps,
                    "bias": float(chains.mean()),
                    "error": analytic.bootstrap_error(chains),
                    "x_square": float(square[:5].mean()),
                    "y_square": float(square[5:].mean()),
                }
            )
    return records


FIGURES = {
    "friction": friction,
    "mixture": mixture,
    "energy": energy,
    "decay": decay,
    "baseline": baseline,
    "sgld": sgld,
    "decoherence": decoherence,
    "rotations": rotations,
}


def main():
    """Draw one figure."""
    parser = records.parser(__doc__)
    parser.add_argument("figure", choices=FIGURES)
    parser.add_argument("--pictures", type=Path, default=Path("out"), help="folder")
    parser.add_argument("--steps", type=int, default=1_000_000)
    arguments = parser.parse_args()
    arguments.pictures.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    for record in FIGURES[arguments.figure](arguments.pictures, arguments.steps):
        record |= {"seconds": time.perf_counter() - begun}
        record |= records.environment(arguments.allow_dirty)
        records.append(arguments.output, record)
        print(record)


if __name__ == "__main__":
    main()
