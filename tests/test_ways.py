"""One known posterior through `sample`, by kinds of batches and integrators.

Bayesian linear regression of two weights and a bias on 240 rows with unit noise. With two gradients
a step, the batches of a list must not meet the same half of a step in each pass.
"""

import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_smile

NUM_ROWS, SIZE, NUM_CHAINS, NUM_STEPS, NUM_WARMUP, THIN = 240, 60, 32, 4_000, 500, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(NUM_ROWS, 2)).astype(np.float32)
Y = (X @ [1.0, -2.0] + 0.5 + RNG.normal(size=NUM_ROWS)).astype(np.float32)
DESIGN = np.column_stack([X, np.ones(NUM_ROWS)]).astype(float)
COVARIANCE = np.linalg.inv(DESIGN.T @ DESIGN + np.eye(3))
MEAN = COVARIANCE @ DESIGN.T @ Y
STARTS = jnp.float32(RNG.multivariate_normal(MEAN, COVARIANCE, NUM_CHAINS))


class Passes:
    """Batches of permuted rows, a new order in each pass, in the same memory."""

    def __init__(self):
        self.rng = np.random.default_rng(2)
        self.memory = np.empty((SIZE, 2), np.float32), np.empty(SIZE, np.float32)

    def __iter__(self) -> Iterator[Any]:
        for rows in self.rng.permutation(NUM_ROWS).reshape(-1, SIZE):
            self.memory[0][:], self.memory[1][:] = X[rows], Y[rows]
            yield self.memory


def loss(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((batch[0] @ params[:2] + params[2] - batch[1]) ** 2) / 2


# Number of batches, ends of runs that continue each other, arguments of the sampler and `sample`.
TWO, RESUMED = {"integrator": "minimal_norm"}, (601, 3_333, NUM_STEPS)
WAYS: dict[str, tuple[Any, tuple[int, ...], Any, Any]] = {
    "minimal norm, list of 4, resumed": (4, RESUMED, TWO, {}),
    **{f"minimal norm, list of {n}": (n, (NUM_STEPS,), TWO, {}) for n in (1, 2, 3, 5, 6)},
    "minimal norm, batch per step": (4, (NUM_STEPS,), TWO, {"batch_per": "step"}),
    "one step a call": (4, (NUM_STEPS,), {}, {"steps_per_dispatch": 1}),
    "passes, extended": (None, RESUMED, {}, {}),
}
# The others are nightly.
MARKS = [pytest.mark.slow] + [pytest.mark.nightly] * (len(WAYS) - 1)
MARKED = [pytest.param(*x, id=n, marks=m) for (n, x), m in zip(WAYS.items(), MARKS, strict=True)]


@pytest.mark.parametrize("count, ends, options, given", MARKED)
def test_a_way_samples_the_posterior(count, ends, options, given):
    # A false alarm in one of a thousand means; the errors of the variances are at most .05.
    parts: Any = (np.split(x, count or 1) for x in (X, Y))
    batches = list(zip(*parts, strict=True)) if count else Passes()
    # With a large angle, short runs are precise.
    tuner = optax_smile.angle_tuner(0.25)
    tx = optax_smile.psmile(num_data=NUM_ROWS, key=0, tuner=tuner, **options)
    given = {"progress": False, "check": False, "steps_per_dispatch": THIN, "key": 0} | given
    given |= {"num_warmup": NUM_WARMUP, "thin": THIN}
    with tempfile.TemporaryDirectory() as folder:
        given["directory"] = folder if len(ends) > 1 else None
        for end in ends:
            number = (end - NUM_WARMUP) // THIN
            found = optax_smile.sample(loss, STARTS, batches, tx, num_draws=number, **given)
        draws = (np.array(found.params, float) - MEAN) / np.sqrt(np.diag(COVARIANCE))
    error = draws.mean(axis=1).std(axis=0, ddof=1) / NUM_CHAINS**0.5
    assert np.abs(draws.mean(axis=(0, 1)) / error).max() <= 4
    assert np.abs(draws.var(axis=(0, 1)) - 1).max() <= 0.15
