"""Long NUTS runs, the references of `agreement.py`, and the distance of draws from them."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.correctness.posteriors import Posterior

import arviz
import blackjax
import jax
import jax.numpy as jnp
import numpy as np
from blackjax.adaptation.base import get_filter_adapt_info_fn

LARGEST_RHAT = 1.01
# Draws of one chain that are stored.
STORED = 5_000
# Quantiles whose mean distance is W1.
QUANTILES = (np.arange(400) + 0.5) / 400
# Smallest number of comparisons without bias, for each quantity and over all quantities.
REPEATS, COMPARISONS = 4, 400


class Reference(NamedTuple):
    """A NUTS run.

    Attributes:
        starts: of the sampler's chains `[start, parameter]`.
        draws: quantities `[start, chain, draw, quantity]`.
        rhat: largest of the quantities of each start `[start]`.
        ess: smallest of the quantities of each start `[start]`.
        statistics: number of draws of a chain, gradients, divergences, seconds and acceptance.
    """

    starts: Any
    draws: np.ndarray
    rhat: np.ndarray
    ess: np.ndarray
    statistics: dict[str, float]


def nuts(
    posterior: Posterior,
    acceptance: float,
    num_warmup: int,
    num_draws: int,
    rows_axis: int | None = None,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return compiled functions that adapt NUTS in every chain and draw the next block.

    Args:
        posterior: what to sample.
        acceptance: rate at which the step size aims.
        num_warmup: draws by which step size and diagonal mass are adapted, in windows.
        num_draws: length of a block.
        rows_axis: 0 if each chain has its own rows.

    Returns:
        Functions `adapt(starts, keys, rows)`, which returns a carry, and `draw(carry, keys, rows)`,
        which returns the next one, quantities `[chain, draw, quantity]` and means `[chain]` of
        gradients per draw, divergences and acceptance.
    """
    kernel = blackjax.nuts.build_kernel()

    def adapt(start, key, rows):
        adaptation: Any = blackjax.window_adaptation(
            blackjax.nuts,
            lambda theta: posterior.log_density(theta, rows),
            target_acceptance_rate=acceptance,
            adaptation_info_fn=get_filter_adapt_info_fn(),
        )
        (state, settings), _ = adaptation.run(key, start, num_warmup)
        return state, settings

    def draw(carry, key, rows):
        state, settings = carry

        def one(state, key):
            state, info = kernel(
                key, state, lambda theta: posterior.log_density(theta, rows), **settings
            )
            seen = info.num_integration_steps, info.is_divergent, info.acceptance_rate
            return state, (posterior.quantities(state.position, rows), seen)

        state, (draws, seen) = jax.lax.scan(one, state, jax.random.split(key, num_draws))
        return (state, settings), draws, [jnp.mean(1.0 * x) for x in seen]

    axes = (0, 0, rows_axis)
    return jax.jit(jax.vmap(adapt, axes)), jax.jit(jax.vmap(draw, axes))


def run(
    posterior: Posterior,
    starts: jax.Array,
    acceptance: float,
    num_warmup: int,
    block: int,
    most_blocks: int,
    enough: float,
    seed: int,
) -> Reference:
    """Run NUTS until the chains `[start, chain, parameter]` that share a start agree.

    They are checked after every block of draws. The run ends when R-hat is small and the effective
    size is at least `enough` for every quantity, or after `most_blocks` blocks.
    """
    began, (num_starts, per_start) = time.monotonic(), starts.shape[:2]
    keys = jax.random.split(jax.random.key(seed), num_starts * per_start)
    rows = jax.tree.map(jnp.asarray, posterior.rows)
    adapt, draw = nuts(posterior, acceptance, num_warmup, block)
    carry = adapt(starts.reshape(-1, posterior.size), keys, rows)
    draws_so_far, seen = [], []
    while True:
        block_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, len(draws_so_far))
        carry, new, statistics = jax.device_get(draw(carry, block_keys, rows))
        draws_so_far.append(new)
        seen.append(statistics)
        draws = np.concatenate(draws_so_far, axis=1)
        draws = draws.reshape(num_starts, per_start, -1, draws.shape[-1])
        thinned = draws[:, :, :: -(-draws.shape[2] // STORED)]
        rhat = np.array([np.max(by_arviz("rhat", x)) for x in thinned])
        ess = np.array([np.min(by_arviz("ess", x)) for x in thinned])
        print(
            f"{draws.shape[2]} draws, R-hat {rhat.round(3)}, ESS {ess.round()},"
            f" {np.mean(statistics[0]):.0f} gradients per draw, {time.monotonic() - began:.0f} s",
            flush=True,
        )
        good = np.all(rhat <= LARGEST_RHAT) and np.all(ess >= enough)
        if good or len(seen) == most_blocks:
            break
    gradients, divergent, accepted = (float(np.mean([x[i] for x in seen])) for i in range(3))
    statistics = {
        "draws": draws.shape[2],
        "gradients": gradients * draws.shape[2],
        "divergent": divergent,
        "acceptance": accepted,
        "seconds": time.monotonic() - began,
    }
    return Reference(starts, thinned, rhat, ess, statistics)


def stored(path: Path, make: Any) -> Reference:
    """Read a reference, or make and write it."""
    if path.exists():
        with np.load(path, allow_pickle=False) as arrays:
            statistics = {k[5:]: float(v) for k, v in arrays.items() if k.startswith("told_")}
            return Reference(
                **{k: arrays[k] for k in Reference._fields[:-1]}, statistics=statistics
            )
    found = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    statistics = {f"told_{name}": value for name, value in found.statistics.items()}
    arrays = {name: getattr(found, name) for name in Reference._fields[:-1]}
    np.savez(path, **arrays, **statistics)
    return found


def deviations(draws: np.ndarray, reference: np.ndarray) -> dict[str, np.ndarray]:
    """Distances of two sets of draws `[draw, quantity]` for each quantity, in units of its sd.

    `mean`: |difference of the means| / sd; `sd`: |ratio of the sd - 1|; `w1`: Wasserstein
    distance / sd.
    """
    sd = reference.std(axis=0)
    quantiles = [np.quantile(x, QUANTILES, axis=0) for x in (draws, reference)]
    return {
        "mean": np.abs(draws.mean(axis=0) - reference.mean(axis=0)) / sd,
        "sd": np.abs(draws.std(axis=0) / sd - 1),
        "w1": np.mean(np.abs(quantiles[0] - quantiles[1]), axis=0) / sd,
    }


def by_arviz(statistic: str, draws: np.ndarray) -> np.ndarray:
    """R-hat or ESS `[quantity]` of chains `[chain, draw, quantity]`; NaN where nothing moves."""
    found: Any = getattr(arviz, statistic)({"x": draws})
    return np.where(np.ptp(draws, axis=(0, 1)) > 0, found["x"].values, np.nan)


def sizes(draws: np.ndarray) -> np.ndarray:
    """Independent draws `[quantity]` in chains `[chain, draw, quantity]`: of mean or of variance.

    The smaller of the two, over all chains together, so that chains that disagree have few.
    """
    squares = (draws - draws.mean(axis=(0, 1))) ** 2
    found = [by_arviz("ess", x) for x in (draws, squares)]
    return np.nan_to_num(np.fmin(*found), nan=1.0)


def expected_deviations(
    reference: np.ndarray, size: np.ndarray, reference_size: np.ndarray
) -> list[dict[str, np.ndarray]]:
    """Deviations of the same number of independent draws from the reference itself.

    Both sides are drawn with replacement from the reference `[draw, quantity]`; their numbers are
    the effective sizes of the two sides.
    """
    rng, found = np.random.default_rng(0), []

    def resampled(values, number):
        number = int(np.clip(number, 2, 4 * STORED))
        return values[rng.integers(0, len(values), number)]

    for _ in range(max(REPEATS, COMPARISONS // len(size))):
        per_quantity = [
            deviations(resampled(x, n)[:, None], resampled(x, m)[:, None])
            for x, n, m in zip(reference.T, size, reference_size, strict=True)
        ]
        found.append(
            {name: np.concatenate([d[name] for d in per_quantity]) for name in per_quantity[0]}
        )
    return found


def agreement(
    draws: np.ndarray, reference: np.ndarray, summaries: dict[str, Any]
) -> dict[str, Any]:
    """Compare chains `[chain, draw, quantity]` with those of the reference, pooled.

    Args:
        draws: of the sampler.
        reference: of NUTS.
        summaries: functions from the deviations of all quantities to a number, by name.

    Returns:
        For each measure and summary the figure itself (`raw`), that of an unbiased sampler with the
        same number of independent draws (`error`), and the difference in quadrature (`net`).
        Median and smallest number of independent draws; median ratio of the sd, with its side.
    """
    size, reference_size = sizes(draws), sizes(reference)
    pooled, target = (x.reshape(-1, x.shape[-1]) for x in (draws, reference))
    measured = deviations(pooled, target)
    unbiased = expected_deviations(target, size, reference_size)
    statistics: dict[str, Any] = {
        "ess": float(np.median(size)),
        "smallest_ess": float(np.min(size)),
        "sd_ratio": float(np.median(pooled.std(axis=0) / target.std(axis=0))),
    }
    for measure, values in measured.items():
        for name, summary in summaries.items():
            raw = float(summary(values))
            error = float(np.sqrt(np.mean([summary(x[measure]) ** 2 for x in unbiased])))
            net = float(np.sqrt(max(raw**2 - error**2, 0.0)))
            statistics[f"{measure} {name}"] = {"raw": raw, "error": error, "net": net}
    return statistics
