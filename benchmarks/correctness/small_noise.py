"""Variances of Gaussians whose gradients have little noise, isotropic or not.

20 chains with the defaults, 40,000 gradients each from the mode, without the first quarter. Second
moments are averaged over the chains before they are compared, which reduces the Monte Carlo error.
b^2 is the mean squared relative error of the variances over the coordinates, without a factor 1/2.
`smile` is exact for isotropic noise, so it shows the Monte Carlo error.

    python benchmarks/correctness/small_noise.py --output benchmarks/results/small_noise.jsonl
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from benchmarks import records
from benchmarks.correctness.analytic import standardized_noise

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_smile

NUM_GRADIENTS = 40_000
CURVATURES = (0.2, 3.1)
LAPLACE, STUDENT = (partial(standardized_noise, kind) for kind in ("laplace", "student"))
METHODS = {"smile": optax_smile.smile, "psmile": optax_smile.psmile}


class Case(NamedTuple):
    """A Gaussian and the noise of its gradients.

    Attributes:
        precision: `[d, d]`.
        noise: `noise(params, standardized)`, what is added to the gradient.
        draw: `draw(key, shape)`, entries with mean 0 and variance 1.
        is_isotropic: whether `smile` is right.
    """

    precision: np.ndarray
    noise: Callable[[jax.Array, jax.Array], jax.Array]
    draw: Callable[..., jax.Array] = jax.random.normal
    is_isotropic: bool = False


def rotation(size: int, seed: int) -> np.ndarray:
    """Random orthogonal matrix."""
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(size, size)))[0]


def gaussian(size: int, seed: int) -> np.ndarray:
    """Precision with eigenvalues from .2 to 3.1, randomly rotated."""
    turn = rotation(size, seed)
    return turn.T @ np.diag(np.geomspace(*CURVATURES, size)) @ turn


def spread(*deviations: float) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Noise with these standard deviations."""
    return lambda params, drawn: jnp.asarray(deviations, jnp.float32) * drawn


def cases() -> dict[str, Case]:
    """All of the table."""
    found = {}
    for size, seed in ((6, 1), (6, 2), (20, 3), (20, 4), (100, 5)):
        for deviation in (0.0, 0.1, 0.5, 2.0, 8.0):
            name = f"d = {size} ({seed}), isotropic {deviation:g}"
            found[name] = Case(gaussian(size, seed), spread(deviation), is_isotropic=True)
    six, turn = gaussian(6, 1), jnp.asarray(rotation(6, 9), jnp.float32)
    narrow, wide = np.geomspace(0.02, 2, 6), np.geomspace(0.1, 10, 6)
    found |= {
        "one coordinate 2": Case(six, spread(2, 0, 0, 0, 0, 0)),
        "one coordinate .5": Case(six, spread(0.5, 0, 0, 0, 0, 0)),
        "half of them 2": Case(six, spread(2, 2, 2, 0, 0, 0)),
        "log-spaced .02 to 2": Case(six, spread(*narrow)),
        "log-spaced .1 to 10": Case(six, spread(*wide)),
        "2 |theta|": Case(six, lambda params, drawn: 2 * jnp.abs(params) * drawn),
        "rotated .02 to 2": Case(six, lambda params, drawn: turn @ (narrow * drawn)),
        "rotated .1 to 10": Case(six, lambda params, drawn: turn @ (wide * drawn)),
        "Laplace 2": Case(six, spread(2.0), LAPLACE),
        "Student 2": Case(six, spread(2.0), STUDENT),
        "Laplace, .1 to 10": Case(six, spread(*wide), LAPLACE),
    }
    return found


def run_cell(cell: records.Cell) -> dict[str, float]:
    """Sample, and compare the variances."""
    case, num_chains, seed = cases()[cell["case"]], cell["num_chains"], cell["seed"]
    size = len(case.precision)
    precision = jnp.asarray(case.precision, jnp.float32)
    tx = METHODS[cell["method"]](num_data=1, prior_precision=0.0, key=seed)
    starts = jnp.zeros((num_chains, size))
    states = optax_smile.parallel.init(tx, starts, key=jax.random.key(1_000 + seed))

    def chain(params, state, key):
        def call(carry, count):
            params, state, total = carry
            drawn = case.draw(jax.random.fold_in(key, count), (size,))
            gradient = precision @ params + case.noise(params, drawn)
            updates, state = tx.update(gradient, state, params)
            params: Any = optax.apply_updates(params, updates)
            return (params, state, total + (count >= NUM_GRADIENTS // 4) * params**2), None

        carry = params, state, jnp.zeros(size)
        return jax.lax.scan(call, carry, jnp.arange(NUM_GRADIENTS))[0][2]

    keys = jax.random.split(jax.random.key(2_000 + seed), num_chains)
    totals = np.asarray(jax.jit(jax.vmap(chain))(starts, states, keys), float)
    variances = totals / (NUM_GRADIENTS - NUM_GRADIENTS // 4)
    exact = np.diag(np.linalg.inv(case.precision))
    pooled = variances.mean(axis=0) / exact - 1
    error = np.std(variances / exact, axis=0, ddof=1) / num_chains**0.5
    return {
        "b2": float(np.mean(pooled**2)),
        "worst": float(np.abs(pooled).max()),
        "b2_of_chains": float(np.mean((variances / exact - 1) ** 2)),
        "monte_carlo_b2": float(np.mean(error**2)),
    }


if __name__ == "__main__":
    axes = {"case": cases(), "method": METHODS, "num_chains": [20], "seed": [0]}
    records.main(__doc__, run_cell, "b2", "small-noise", **axes)
