"""Stop a run once held-out examples are evidence that more draws gain little.

    python examples/stop_early.py

A look after T draws of each chain compares the predictive density p_T of these draws, on held-out
examples, with that of their first half. The null hypothesis is that doubling the draws gained at
least a tolerance, in nats per example:

    E[g] >= tolerance,  g = min(log p_T(y) - log p_m(y), log 2),  m = T // 2

The test needs an upper bound of g, so the gain of an example counts up to log 2. It is about the
doubling from m to T; the next one usually gains less. The evidence of a look with examples 1 ... n
is the e-value

    e = mean over f of prod_i (1 + f x_i / b),  f = 1, 1/2, ..., 1/32

with x = tolerance - g and b = log 2 - tolerance: the average final wealth of gamblers who start
with 1 and bet a fraction on each example. Given the draws, the examples are independent, so under
the null the expected wealth is at most 1, however dependent the draws are. Look k stops the run if
e >= k (k + 1) / alpha. By Markov's inequality it does so under its null with probability at most
alpha / (k (k + 1)), and these sum to alpha over all looks. The e-values of several looks use the
same examples, so they cannot be multiplied.

The held-out examples must be independent, used neither for training nor to choose settings, and
not the test data. With a tolerance of .01, about 500 are needed. The idea to stop by e-values is
that of Sommer et al. 2026, arXiv 2604.18089; the construction is ours. Betting on a bounded mean:
Waudby-Smith and Ramdas 2024.
"""

import math
from argparse import ArgumentParser, RawDescriptionHelpFormatter
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
    densities: Iterator[np.ndarray], every: int, tolerance: float
) -> Iterator[tuple[int, float]]:
    """Yield the number of draws and the log of the e-value of each look.

    Args:
        densities: for each draw, the log density of each example, averaged over the chains.
        every: draws between two looks, >= 2.
        tolerance: gain of a doubling, in nats per example, between 0 and log 2.
    """
    # Log of the average density of the first draws, by their number.
    total, averages = -np.inf, {}
    for number, density in enumerate(densities, 1):
        total = np.logaddexp(total, density)
        averages[number] = total - math.log(number)
        if number % every == 0:
            gain = np.minimum(averages[number] - averages[number // 2], math.log(2))
            yield number, log_e_value(tolerance - gain, math.log(2) - tolerance)


def threshold(look: int, alpha: float) -> float:
    """Return the log of the e-value at which a look, counted from 1, stops the run."""
    return math.log(look * (look + 1) / alpha)


def sample_until_settled(
    run: optax_smile.Run,
    density: Callable[[Any], Any],
    *,
    num_draws: int,
    thin: int,
    every: int = 10,
    tolerance: float = 0.01,
    alpha: float = 0.05,
) -> int | None:
    """Make draws until a look stops the run, and return their number; None if none did.

    Args:
        run: a run after its warm-up.
        density: log density of each held-out example under chains `[chain, ...]`, averaged.
        num_draws, thin: see `Run.draws`.
        every, tolerance: see `looks`.
        alpha: bound on the probability that any look stops the run although its null is true.
    """
    densities = (np.asarray(density(draw), float) for draw in run.draws(num_draws, thin=thin))
    for look, (number, evidence) in enumerate(looks(densities, every, tolerance), 1):
        print(f"{number} draws: log e-value {evidence:.2f}, needed {threshold(look, alpha):.2f}")
        if evidence >= threshold(look, alpha):
            return number
    return None


def main():
    """Sample a small network for the diabetes data, and stop early."""
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    x, y = map(np.asarray, load_diabetes(return_X_y=True))
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
        loss_fn, init_fn, [train], optax.adam(1e-2), num_members=4, num_epochs=100, key=0
    )
    sampler = optax_smile.psmile(num_data=len(train[0]), key=0)
    with optax_smile.Run(loss_fn, start, [train], sampler, key=0) as run:
        run.advance(1_000)
        number = sample_until_settled(run, density, num_draws=200, thin=20, tolerance=0.05)
    print(f"Stopped at {number} draws." if number else "Not stopped: keep all draws.")
    print(optax_smile.diagnostics.summary(run.snapshots()))


if __name__ == "__main__":
    main()
