"""Stop a run once held-out examples are evidence that its draws predict better than the start.

    python examples/stop_early.py

A look compares, on held-out examples, the predictive density p_T of the first T draws of each
chain with that of their start, p_0. The null hypothesis is that the draws predict no better:

    E[d] <= 0,  d = log p(y) - log p_0(y),  p = (p_0 + T p_T) / (T + 1)

p counts the start as one more draw, so d >= -log(T + 1). The evidence of a look with examples
1 ... n is the e-value

    e = mean over f of prod_i (1 + f d_i / log(T + 1)),  f = 1, 1/2, ..., 1/32

the average final wealth of gamblers who start with 1 and bet a fraction on each example. Given the
draws, the examples are independent, so under the null the expected wealth is at most 1, however
dependent the draws are. Look k stops the run if e >= k (k + 1) / alpha. By Markov's inequality it
does so under its null with probability at most alpha / (k (k + 1)), and these sum to alpha over all
looks. The e-values of several looks use the same examples, so they cannot be multiplied.

The held-out examples must be independent, used neither for training nor to choose settings, and
not the test data. The idea of the null is that of Sommer et al. 2026, arXiv 2604.18089; the
construction is ours. Betting on a bounded mean: Waudby-Smith and Ramdas 2024.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_diabetes

import optax_smile

# Bets, as fractions of the largest bet that cannot lose more than everything.
FRACTIONS = 2.0 ** -np.arange(6)


def log_e_value(score: np.ndarray, bound: float) -> float:
    """Return the log of an e-value for the null that scores have a mean of at most 0.

    Args:
        score: one per example, `[example]`, >= -bound.
        bound: > 0.
    """
    with np.errstate(divide="ignore"):
        # Rounding must not take a score below its bound.
        wealth = np.log1p(np.maximum(FRACTIONS[:, None] * score / bound, -1)).sum(axis=1)
    return float(np.logaddexp.reduce(wealth) - math.log(len(FRACTIONS)))


def looks(
    start: np.ndarray, densities: Iterator[np.ndarray], every: int
) -> Iterator[tuple[int, float]]:
    """Yield the number of draws and the log of the e-value of each look.

    Args:
        start: log density of each held-out example under the start, `[example]`.
        densities: for each draw, the log density of each example, averaged over the chains.
        every: draws between two looks.
    """
    total = np.full(start.shape, -np.inf)
    for number, density in enumerate(densities, 1):
        total = np.logaddexp(total, density)
        if number % every == 0:
            bound = math.log(number + 1)
            score = np.logaddexp(start, total) - bound - start
            yield number, log_e_value(score, bound)


def threshold(look: int, alpha: float) -> float:
    """Return the log of the e-value at which a look, counted from 1, stops the run."""
    return math.log(look * (look + 1) / alpha)


def sample_until_better(
    run: optax_smile.Run,
    density: Callable[[Any], np.ndarray],
    start: Any,
    *,
    num_draws: int,
    thin: int,
    every: int = 10,
    alpha: float = 0.05,
) -> int | None:
    """Make draws until a look stops the run, and return their number; None if none did.

    Args:
        run: a run after its warm-up.
        density: log density of each held-out example under chains `[chain, ...]`, averaged.
        start: initial parameters of the chains, `[chain, ...]`.
        num_draws, thin: see `Run.draws`.
        every: draws between two looks.
        alpha: bound on the probability that any look stops the run although its null is true.
    """
    densities = (np.asarray(density(draw), float) for draw in run.draws(num_draws, thin=thin))
    begun = np.asarray(density(start), float)
    for look, (number, evidence) in enumerate(looks(begun, densities, every), 1):
        print(f"{number} draws: log e-value {evidence:.2f}, needed {threshold(look, alpha):.2f}")
        if evidence >= threshold(look, alpha):
            return number
    return None


def main():
    """Sample a small network for the diabetes data, and stop early."""
    x, y = load_diabetes(return_X_y=True)
    x, y = (x / x.std(axis=0)).astype(np.float32), ((y - y.mean()) / y.std()).astype(np.float32)
    train, held_out = (x[:300], y[:300]), (x[300:], y[300:])

    def init_fn(key):
        first, second = jax.random.split(key)
        hidden = jax.random.normal(first, (10, 16)) / 10**0.5
        return {"hidden": hidden, "out": jax.random.normal(second, (16, 2)) / 4}

    def apply_fn(params, x):
        out = jnp.tanh(x @ params["hidden"]) @ params["out"]
        return out[..., 0], out[..., 1]

    def loss_fn(params, batch):
        mean, log_std = apply_fn(params, batch[0])
        return jnp.mean(log_std + (batch[1] - mean) ** 2 * jnp.exp(-2 * log_std) / 2)

    @jax.jit
    def density(chains):
        mean, log_std = jax.vmap(apply_fn, (0, None))(chains, held_out[0])
        each = jax.scipy.stats.norm.logpdf(held_out[1], mean, jnp.exp(log_std))
        return jax.nn.logsumexp(each, axis=0) - jnp.log(len(each))

    start = optax_smile.warmstart(
        loss_fn, init_fn, [train], optax.adam(1e-2), num_members=4, num_epochs=1_000, key=0
    )
    sampler = optax_smile.psmile(num_data=len(train[0]), key=0)
    with optax_smile.Run(loss_fn, start, [train], sampler, key=0) as run:
        run.advance(1_000)
        number = sample_until_better(run, density, start, num_draws=100, thin=20)
    print(f"Stopped at {number} draws." if number else "Not stopped: keep all draws.")
    print(optax_smile.diagnostics.summary(run.snapshots()))


if __name__ == "__main__":
    main()
