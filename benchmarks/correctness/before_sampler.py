"""What transformations before the sampler do to the posterior: a Gaussian that is known.

Linear regression with 1,000 examples in 20 dimensions, curvatures of the mean loss from 1 / 100
to 1, batches of 100 by permutations, prior precision 1. 16 chains of 4,000 gradients of warm-up and
8,000 more: variance over its true value, the geometric mean over the directions and the extremes,
and how far the mean lies off, in deviations of the posterior.

    python benchmarks/correctness/before_sampler.py --output benchmarks/results/before_sampler.jsonl
"""

from collections.abc import Callable
from typing import Any

from benchmarks import records, samplers

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_smile

NUM_DATA, DIMENSIONS, BATCH, CHAINS = 1_000, 20, 100, 16
WARMUP, KEPT = 4_000, 8_000
BEFORE: dict[str, Callable[[], optax.GradientTransformation]] = {
    "nothing": optax.identity,
    "clip_by_global_norm(100)": lambda: optax.clip_by_global_norm(100.0),
    "clip_by_global_norm(0.3)": lambda: optax.clip_by_global_norm(0.3),
    "clip(0.03)": lambda: optax.clip(0.03),
    "add_decayed_weights(1e-3)": lambda: optax.add_decayed_weights(1e-3),
    "add_decayed_weights(1e-2)": lambda: optax.add_decayed_weights(1e-2),
    "scale(0.5)": lambda: optax.scale(0.5),
    "trace(0.9)": lambda: optax.trace(0.9),
    "scale_by_rms()": optax.scale_by_rms,
    "scale_by_adam()": optax.scale_by_adam,
}


def problem() -> tuple[jax.Array, jax.Array, np.ndarray, np.ndarray]:
    """Inputs, targets, mean and variances of the posterior in its own directions."""
    rng = np.random.default_rng(0)
    rotation = np.linalg.qr(rng.standard_normal((NUM_DATA, DIMENSIONS)))[0]
    curvature = np.geomspace(0.01, 1, DIMENSIONS)
    inputs = rotation * np.sqrt(NUM_DATA * curvature)
    targets = inputs @ rng.standard_normal(DIMENSIONS) + rng.standard_normal(NUM_DATA)
    variance = 1 / (NUM_DATA * curvature + 1)
    return jnp.asarray(inputs), jnp.asarray(targets), variance * (inputs.T @ targets), variance


def run(cell: dict[str, Any]) -> dict[str, Any]:
    """Variance and mean of one sampler behind one transformation."""
    inputs, targets, mean, variance = problem()
    sampler = samplers.build(cell["sampler"], num_data=NUM_DATA, key=0)
    tx = optax.chain(BEFORE[cell["before"]](), sampler)

    def loss(params, rows):
        return jnp.mean((inputs[rows] @ params - targets[rows]) ** 2) / 2

    def chain(key, params, state):
        def step(carry, count):
            params, state = carry
            order = jax.random.permutation(
                jax.random.fold_in(key, count // (NUM_DATA // BATCH)), NUM_DATA
            )
            rows = order.reshape(-1, BATCH)[count % (NUM_DATA // BATCH)]
            updates, state = tx.update(jax.grad(loss)(params, rows), state, params)
            return (optax.apply_updates(params, updates), state), params

        return jax.lax.scan(step, (params, state), jnp.arange(WARMUP + KEPT))[1]

    keys = jax.random.split(jax.random.key(1), CHAINS)
    start = mean + np.sqrt(variance) * np.random.default_rng(2).standard_normal((CHAINS, 20))
    start = jnp.asarray(start, jnp.float32)
    states = optax_smile.parallel.init(tx, start, key=2)

    draws = np.asarray(jax.jit(jax.vmap(chain))(keys, start, states), float)[:, WARMUP:]
    z = (draws - mean) / np.sqrt(variance)
    ratios = z.var(axis=(0, 1))
    each = np.log(z.var(axis=1)).mean(axis=1)
    return {
        "ratio": float(np.exp(np.log(ratios).mean())),
        "error": float(each.std() / CHAINS**0.5),
        "smallest": float(ratios.min()),
        "largest": float(ratios.max()),
        "mean_off": float(np.abs(z.mean(axis=(0, 1))).max()),
    }


if __name__ == "__main__":
    arguments = records.parser(__doc__).parse_args()
    cells = [{"sampler": name, "before": way} for way in BEFORE for name in ("smile", "psmile")]
    records.complete(arguments, cells, run, told="ratio")
