"""Which sampler is right? Bias on known posteriors under strong explicit gradient noise.

Three 10-dimensional targets, four noise covariances, every sampler at the same number of gradients;
full-batch MCLMC without noise is the baseline of the paper.
A cell is one target, noise and sampler: all step sizes and chains run in one compiled loop, the
step size with the smallest bias is run again with fresh seeds, and that is what is reported.
A sampler that chooses its own step size is not searched.

    python benchmarks/correctness/analytic.py --preset quick
    python benchmarks/correctness/analytic.py --preset paper --output out/analytic.jsonl
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

from benchmarks import records, samplers

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_smile

DIM = 10
VARIANCES = np.logspace(-2, 2, DIM)
NOISE_VARIANCE = 256.0
# Steps whose mean leaves the compiled loop: sums in float32 stay short.
CHUNK = 500
DECADES = 10.0 ** np.arange(-6, 1)
FINE = 15
# Number of chains in the search for the decade of the step size, at full length.
COARSE_CHAINS = 4
# A search on fewer gradients is followed by one at full length over these factors.
FACTORS = np.array([1 / 8, 1 / 4, 1 / 2, 1, 2])
# Independent draws per chain above which a chain counts as mixing.
ENOUGH = 10.0


@dataclasses.dataclass(frozen=True)
class Target:
    """A posterior with known moments of the squared coordinates.

    Attributes:
        energy: U, `[10]` to a scalar.
        mean: where chains start.
        square: E[theta_i^2].
        square_variance: Var[theta_i^2].
        second_std: standard deviation of the second coordinate.
        total: how the biases of the coordinates become one number.
    """

    energy: Callable[[jax.Array], jax.Array]
    mean: np.ndarray
    square: np.ndarray
    square_variance: np.ndarray
    second_std: float
    total: Callable[..., Any]


def rotated(variances: np.ndarray, seed: int) -> np.ndarray:
    """Covariance of the ten coordinates with its axes randomly rotated."""
    rotation = np.linalg.qr(np.random.default_rng(seed).normal(size=(DIM, DIM)))[0]
    return rotation.T @ np.diag(variances) @ rotation


def gaussian() -> Target:
    """Ill-conditioned Gaussian."""
    covariance = rotated(VARIANCES, seed=0)
    precision = jnp.asarray(np.linalg.inv(covariance), jnp.float32)
    variances = np.diag(covariance)
    return Target(
        energy=lambda x: x @ precision @ x / 2,
        mean=np.zeros(DIM),
        square=variances,
        square_variance=2 * variances**2,
        second_std=float(np.sqrt(variances[1])),
        total=np.mean,
    )


def rosenbrock() -> Target:
    """Five pairs x ~ N(1, 1), y ~ N(x^2, 0.1), the x first."""
    width = 0.1

    def energy(theta):
        x, y = jnp.split(theta, 2)
        return jnp.sum((x**2 - y) ** 2 / width + (x - 1) ** 2) / 2

    return Target(
        energy=energy,
        mean=np.repeat([1.0, 2.0], 5),
        square=np.repeat([2.0, 10.1], 5),
        square_variance=np.repeat([6.0, 668.02], 5),
        second_std=1.0,
        total=np.mean,
    )


def funnel() -> Target:
    """Neal's funnel: the first coordinate N(0, 3^2), the others N(0, exp(first))."""

    def energy(theta):
        first, rest = theta[0], theta[1:]
        return first**2 / 18 + (DIM - 1) * first / 2 + jnp.exp(-first) * jnp.sum(rest**2) / 2

    rest = np.full(DIM - 1, np.exp(4.5))
    return Target(
        energy=energy,
        mean=np.zeros(DIM),
        square=np.concatenate([[9.0], rest]),
        square_variance=np.concatenate([[162.0], 3 * np.exp(18.0) - rest**2]),
        second_std=float(np.exp(2.25)),
        total=np.max,
    )


TARGETS = {"gaussian": gaussian(), "rosenbrock": rosenbrock(), "funnel": funnel()}
# Roots of the covariances of the noise.
ROOTS = {
    "isotropic": np.sqrt(NOISE_VARIANCE) * np.eye(DIM),
    "diagonal": np.diag(np.sqrt(NOISE_VARIANCE * VARIANCES)),
    "correlated": np.linalg.cholesky(rotated(NOISE_VARIANCE * VARIANCES, seed=1)),
    "none": np.zeros((DIM, DIM)),
}
NOISES = ("isotropic", "diagonal", "correlated", "varied")


def noise_root(noise: str, target: Target) -> Callable[[jax.Array], jax.Array]:
    """Matrix that gives standardized noise its covariance at a point."""
    root = jnp.asarray(ROOTS.get(noise, ROOTS["correlated"]), jnp.float32)
    if noise != "varied":
        return lambda theta: root
    return lambda theta: root * jnp.exp(-theta[1] / (2 * target.second_std))


def standardized_noise(kind: str, key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Draw independent noise of variance one: gaussian, laplace, student or lognormal:SIGMA."""
    if kind == "gaussian":
        return jax.random.normal(key, shape)
    if kind == "laplace":
        return jax.random.laplace(key, shape) / jnp.sqrt(2)
    if kind == "student":
        return jax.random.t(key, 5.0, shape) / jnp.sqrt(5 / 3)
    sigma = float(kind.removeprefix("lognormal:"))
    raw = jnp.expm1(sigma * jax.random.normal(key, shape)) - np.expm1(sigma**2 / 2)
    return raw / np.sqrt(np.expm1(sigma**2) * np.exp(sigma**2))


PUBLISHED, LEAPFROG = {"integrator": "minimal_norm"}, {"integrator": "leapfrog"}
# Column: name for `samplers.build`, and arguments.
# Every sampler also gets num_data, prior and key, and those that are searched a step size.
SAMPLERS: dict[str, tuple[str, dict[str, Any]]] = {
    "smile_naive": ("smile_naive", PUBLISHED),
    "sgld": ("sgld", {}),
    "sghmc": ("sghmc", {}),
    "psmile_naive": ("psmile_naive", PUBLISHED),
    "psmile_naive leapfrog": ("psmile_naive", LEAPFROG),
    "psmile_naive leapfrog L=10": ("psmile_naive", LEAPFROG | {"decoherence_length": 10.0}),
    "psgld": ("psgld", {}),
    "scale_adapted_sghmc": ("scale_adapted_sghmc", {"adapt_steps": 20_000}),
    "cyclical_sgld": ("cyclical_sgld", {}),
    "smile_naive leapfrog": ("smile_naive", LEAPFROG),
    "psmile": ("psmile", {}),
    "smile": ("smile", {}),
    # With the scale of the paper, a moving variance.
    "psmile_naive published": ("psmile_naive published", {}),
    **{f"mclmc L={length}": ("mclmc", {"decoherence_length": length}) for length in (10, 30)},
    "mclmc": ("mclmc", {"decoherence_length": 10.0}),
}
# These choose their own step size.
DEFAULTS = ("psmile", "smile", "mclmc")
TWO_GRADIENTS = ("smile_naive", "psmile_naive", "psmile_naive published")
TABLE_1 = (*tuple(SAMPLERS)[:6], "psmile", "smile")
OURS, PAPERS = "psmile_naive leapfrog", "psmile_naive published"


def make_sampler(column: str, step_size: jax.Array, key: jax.Array) -> Any:
    """Build the sampler of a column for an energy that is the loss itself."""
    name, options = SAMPLERS[column]
    chosen = None if column in DEFAULTS else step_size
    return samplers.build(name, chosen, key=key, num_data=1, prior_precision=0.0, **options)


@functools.partial(jax.jit, static_argnames=("column", "target", "noise", "kind", "num_chunks"))
def run_chains(column, target, noise, kind, num_chunks, step_sizes, keys):
    """Run a chain for every step size and key.

    Chains with the same key share their random numbers over the step sizes.

    Returns:
        Means of theta^2 over the step ends of each chunk `[step size, chain, chunk, 10]`, and how
        many there were `[step size, chain, chunk]`.
    """
    posterior = TARGETS[target]
    root = noise_root(noise, posterior)
    # As in the paper, both gradients of a step have the same noise.
    repeats = 2 if column in TWO_GRADIENTS else 1

    def one_chain(step_size, key):
        tx = make_sampler(column, step_size, jax.random.fold_in(key, 0))

        def call(carry, noise):
            params, state, total, count = carry
            gradient = jax.grad(posterior.energy)(params) + root(params) @ noise
            updates, state = tx.update(gradient, state, params)
            seen = optax_smile.stats(state)
            counts = seen.step_end & seen.accepted & seen.is_draw
            total = total + jnp.where(counts, params**2, 0)
            return (optax.apply_updates(params, updates), state, total, count + counts), None

        def chunk(carry, key):
            noises = standardized_noise(kind, key, (CHUNK // repeats, DIM)).repeat(repeats, 0)
            start = (*carry, jnp.zeros(DIM), jnp.zeros((), jnp.int32))
            (*carry, total, count), _ = jax.lax.scan(call, start, noises)
            return tuple(carry), (total / jnp.maximum(count, 1), count)

        start = jnp.asarray(posterior.mean, jnp.float32)
        keys = jax.random.split(jax.random.fold_in(key, 1), num_chunks)
        return jax.lax.scan(chunk, (start, tx.init(start)), keys)[1]

    over_chains = jax.vmap(one_chain, (None, 0))
    return jax.vmap(over_chains, (0, None))(step_sizes, keys)


def biases(target: Target, means, counts) -> np.ndarray:
    """Squared bias of each chain `[step size, chain]`."""
    weights = np.asarray(counts, float)[..., None]
    squares = np.sum(weights * np.asarray(means, float), axis=2)
    squares /= np.maximum(np.sum(weights, axis=2), 1)
    return target.total((squares - target.square) ** 2 / target.square_variance, axis=-1)


def effective_sizes(means, counts) -> np.ndarray:
    """Independent draws of theta^2 in a chain `[step size]`, median of chains and coordinates.

    From the chunk means by Geyer's initial sequence, so at most the number of chunks. A chain that
    only drifts away from its start has little more than one.
    """
    # Chunks without draws, such as those of a burn-in, are ignored.
    used = np.flatnonzero(np.any(np.asarray(counts) > 0, axis=(0, 1)))
    chunks = len(used) // 2 * 2
    series = np.asarray(means, float)[:, :, used[:chunks]]
    series = series - series.mean(axis=2, keepdims=True)
    spectrum = np.abs(np.fft.rfft(series, 2 * chunks, axis=2)) ** 2
    covariance = np.fft.irfft(spectrum, axis=2)[:, :, :chunks]
    correlation = covariance / np.maximum(covariance[:, :, :1], 1e-300)
    pairs = correlation.reshape(*series.shape[:2], chunks // 2, 2, -1).sum(axis=3)
    time = 2 * np.sum(pairs * np.cumprod(pairs > 0, axis=2), axis=2) - 1
    return np.median(chunks / np.maximum(time, 1), axis=(1, 2))


def bootstrap_error(values: np.ndarray) -> float:
    """Standard deviation of the mean over resampled chains."""
    rows = np.random.default_rng(0).integers(0, len(values), (2_000, len(values)))
    return float(values[rows].mean(axis=1).std())


def run_cell(cell: records.Cell, seed: int, num_chains: int, num_fresh: int) -> records.Record:
    """Search the step size on one set of seeds, report it on fresh ones.

    The smallest bias of all step sizes, as published, and the smallest among chains that mix: all
    start at the posterior mean, where a chain that hardly moves can look good. A cell that is
    `searched_on` fewer gradients has only the first.
    """
    target = TARGETS[cell["target"]]
    keys = jax.random.split(jax.random.key(seed), num_chains + num_fresh)
    grid_keys, fresh_keys = keys[:num_chains], keys[num_chains:]
    arguments = [cell[name] for name in ("sampler", "target", "noise", "kind")]

    def run(step_sizes, keys, gradients=cell["gradients"]):
        step_sizes, num_chunks = jnp.asarray(step_sizes, jnp.float32), gradients // CHUNK
        means, counts = jax.device_get(run_chains(*arguments, num_chunks, step_sizes, keys))
        return biases(target, means, counts), effective_sizes(means, counts)

    def search(mixing: bool):
        """Step size with the smallest bias; None where none mixes."""
        sizes, bias = [], []
        for grid in (DECADES, None):
            if grid is None:
                best = np.log10(sizes[np.argmin(bias)])
                grid = np.logspace(best - 1, best + 1, FINE)
            found, effective = searched(
                tuple(grid), COARSE_CHAINS if grid is DECADES else num_chains, on
            )
            sizes, bias = grid, np.where((effective >= ENOUGH) | (not mixing), found, np.inf)
            if np.all(np.isinf(bias)):
                return None
        best = sizes[np.argmin(bias)]
        if on < cell["gradients"]:
            sizes = best * FACTORS
            bias = searched(tuple(sizes), COARSE_CHAINS, cell["gradients"])[0]
        return float(sizes[np.argmin(bias)])

    @functools.cache
    def searched(step_sizes, chains, on):
        bias, effective = run(step_sizes, grid_keys[:chains], on)
        grids.extend(zip(step_sizes, bias.mean(axis=1).tolist(), effective.tolist(), strict=True))
        return bias.mean(axis=1), effective

    begun, grids, step_sizes = time.perf_counter(), [], [None]
    on = cell.get("searched_on", cell["gradients"])
    has_own = cell["sampler"] in DEFAULTS
    if not has_own:
        mixing = (False, True) if on == cell["gradients"] else (False,)
        step_sizes = [size for size in map(search, mixing) if size]
    seconds = time.perf_counter() - begun
    fresh, effective = run([size or 0.0 for size in step_sizes], fresh_keys)
    names = ("bias", "error", "step_size", "effective_size")
    values = [
        (float(f.mean()), bootstrap_error(f), size, float(number))
        for f, size, number in zip(fresh, step_sizes, effective, strict=True)
    ]
    mixes = bool(effective[0] >= ENOUGH) if has_own else len(values) > 1
    return {
        **dict(zip(names, values[0], strict=True)),
        "mixing": dict(zip(names, values[-1], strict=True)) if mixes else None,
        "searched_step_bias_effective": grids,
        "seconds_search": seconds,
        "seconds": time.perf_counter() - begun,
    }


def cells(samplers, kinds, gradients, noises=NOISES) -> list[records.Cell]:
    """All targets for some samplers and noises."""
    return [
        {"target": target, "noise": noise, "kind": kind, "sampler": name, "gradients": gradients}
        for name in samplers
        for kind in kinds
        for noise in noises
        for target in TARGETS
    ]


def preset(name: str) -> list[records.Cell]:
    """List the cells of a preset, those of table 1 first."""
    if name == "quick":
        return [
            cell for cell in cells(TABLE_1, ["gaussian"], 20_000) if cell["target"] == "gaussian"
        ]
    sweep = [f"lognormal:{sigma}" for sigma in (0.01, 0.03, 0.1, 0.3, 1.0)]
    published = ("smile_naive", PAPERS, *(name for name in SAMPLERS if name.startswith("mclmc")))
    others = [OURS, *(name for name in SAMPLERS if name not in (*TABLE_1, *published))]
    at_full_size = [
        *cells(published[2:], ["gaussian"], 2_000_000, ["none"]),
        *cells(published[:2], ["gaussian"], 2_000_000),
        *[
            cell
            for cell in cells([PAPERS], sweep, 2_000_000, ["correlated"])
            if cell["target"] == "gaussian"
        ],
        *cells([PAPERS], ["laplace", "student"], 2_000_000),
    ]
    return [
        *(cell | {"searched_on": 200_000} for cell in at_full_size),
        *cells(TABLE_1, ["gaussian"], 1_000_000),
        *cells(others, ["gaussian"], 200_000),
    ]


def main():
    """Run the cells of a preset that are not in the file yet."""
    parser = records.parser(__doc__)
    parser.add_argument("--preset", choices=["quick", "paper"], default="quick")
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, help="some columns only")
    parser.add_argument("--full-size", action="store_true", help="10^6 steps of two gradients only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chains", type=int, default=10, help="chains per step size in the search")
    parser.add_argument("--fresh-chains", type=int, default=20, help="chains that are reported")
    arguments = parser.parse_args()
    settings = [arguments.seed, arguments.chains, arguments.fresh_chains]
    chosen = arguments.samplers or SAMPLERS
    cells = [cell for cell in preset(arguments.preset) if cell["sampler"] in chosen]
    cells = [cell for cell in cells if "searched_on" in cell or not arguments.full_size]

    def run(cell: records.Cell) -> records.Record:
        return run_cell(cell, *settings)

    records.complete(arguments, cells, run, "bias", "bias-forms", settings=settings)


if __name__ == "__main__":
    main()
