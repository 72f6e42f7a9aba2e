"""The stopping rule of the example: e-values in closed form, false stops, and a run."""

import math

import numpy as np
import pytest
import runs
from scipy.stats import norm
from stop_early import FRACTIONS, log_e_value, looks, sample_until_settled, threshold

import optax_smile

EXAMPLES, GROUPS, DRAWS, RUNS, ALPHA, GAIN = 300, 20, 64, 1_000, 0.05, 0.1


def test_looks_in_closed_form():
    """The wealth of each bet, multiplied out, for densities averaged in the textbook's way."""
    density = np.random.default_rng(0).uniform(0.1, 3, size=(6, 5))
    found = dict(looks(iter(np.log(density)), 3, tolerance=0.1))
    assert list(found) == [3, 6]
    for number, log_e in found.items():
        halves = density[:number].mean(axis=0), density[: number // 2].mean(axis=0)
        score = 0.1 - np.minimum(np.log(halves[0] / halves[1]), math.log(2))
        expected = np.mean([np.prod(1 + f * score / (math.log(2) - 0.1)) for f in FRACTIONS])
        assert math.exp(log_e) == pytest.approx(expected, rel=1e-12)
    # Everything lost by the largest bet alone.
    expected = np.mean([1 - f for f in FRACTIONS])
    assert math.exp(log_e_value(np.array([-2.0]), 2.0)) == pytest.approx(expected, rel=1e-12)


def chains_at_the_boundary(generator) -> np.ndarray:
    """Densities `[draw, group, sign]`, for which each doubling gains exactly `GAIN`.

    The average density of the first draws, over its growth, is a of the examples with one sign, as
    autoregressive chains with correlation .9 make it, and 1 / a of those with the other: the mean
    gain is the growth whatever the chains do.
    """
    path = [generator.normal(size=GROUPS)]
    for fresh in generator.normal(size=(DRAWS - 1, GROUPS)):
        path.append(0.9 * path[-1] + math.sqrt(1 - 0.9**2) * fresh)
    count = np.arange(1, DRAWS + 1)[:, None]
    average = np.cumsum(1 + 0.3 * np.tanh(path), axis=0) / count
    scale = count ** (GAIN / math.log(2))
    total = count[..., None] * np.stack([scale * average, scale / average], axis=2)
    density = np.diff(total, axis=0, prepend=0)
    assert (density > 0).all()
    return density


def simulate(size: int, tolerance: float = GAIN, number: int = RUNS) -> np.ndarray:
    """Log e-values `[run, look]`, with held-out examples of random group and sign."""
    generator, found = np.random.default_rng(7), []
    for _ in range(number):
        density = chains_at_the_boundary(generator)
        group, sign = generator.integers(GROUPS, size=size), generator.integers(2, size=size)
        seen = looks(iter(np.log(density[:, group, sign])), 4, tolerance)
        found.append([log_e for _, log_e in seen])
    return np.array(found)


def share_stopped(log_e: np.ndarray) -> float:
    needed = [threshold(look, ALPHA) for look in range(1, log_e.shape[1] + 1)]
    return float(np.mean((log_e >= needed).any(axis=1)))


def test_false_stops_of_dependent_chains():
    """At most alpha, up to two standard errors; e-values multiplied over looks stop too often."""
    log_e, bound = simulate(EXAMPLES), ALPHA + 2 * math.sqrt(ALPHA * (1 - ALPHA) / RUNS)
    product = np.mean((np.cumsum(log_e, axis=1) >= math.log(1 / ALPHA)).any(axis=1))
    assert share_stopped(log_e) <= bound < product
    # The same chains stop where the null is wrong by little.
    assert share_stopped(simulate(EXAMPLES, GAIN + 0.05, 50)) > 0.9


def test_a_run_stops_if_more_draws_gain_little():
    x, y = (np.concatenate(part) for part in zip(*runs.regression(), strict=True))

    def density(chains):
        mean = np.einsum("nd,cd->cn", x, chains["w"]) + chains["b"][:, None]
        return np.logaddexp.reduce(norm.logpdf(y, mean), axis=0) - math.log(len(mean))

    run = optax_smile.Run(runs.mean_loss, runs.start(), runs.regression(), runs.stub(0.02), key=0)
    run.advance(20)
    given = {"num_draws": 12, "thin": 2, "every": 2, "tolerance": 0.2}
    assert sample_until_settled(run, density, **given) == run.num_draws == 2
