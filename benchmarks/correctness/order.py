"""Few batches in a pass, permuted or with replacement, where the posterior is known.

Bayesian linear regression of 20 weights on 512 rows with unit noise, in passes of m batches. 20
chains of the default `psmile`, 40,000 gradients each, the first quarter discarded; b^2 is the mean
squared relative error of the variances, pooled over the chains.

    python benchmarks/correctness/order.py --output benchmarks/results/order.jsonl
"""

from typing import Any

from benchmarks import records
from benchmarks.tabulated.gaussians import ORDERS, order

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_smile

NUM_ROWS, SIZE, NUM_GRADIENTS, NUM_CHAINS = 512, 20, 40_000, 20
KEPT = NUM_GRADIENTS * 3 // 4


def run_cell(cell: records.Cell) -> dict[str, float]:
    """Sample, and compare the variances."""
    per_pass, is_permuted = cell["batches"], cell["order"] == "permutations"
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(NUM_ROWS, SIZE)) * np.geomspace(0.3, 3, SIZE)
    targets = rows @ rng.normal(size=SIZE) + rng.normal(size=NUM_ROWS)
    covariance = np.linalg.inv(rows.T @ rows + np.eye(SIZE))
    start = jnp.asarray(covariance @ rows.T @ targets, jnp.float32)
    x, y = jnp.asarray(rows, jnp.float32), jnp.asarray(targets, jnp.float32)
    tx = optax_smile.psmile(num_data=NUM_ROWS, key=0)

    def batch_of(key: jax.Array, count: jax.Array) -> jax.Array:
        if not is_permuted:
            drawn = jax.random.fold_in(key, count)
            return jax.random.randint(drawn, (NUM_ROWS // per_pass,), 0, NUM_ROWS)
        order = jax.random.permutation(jax.random.fold_in(key, count // per_pass), NUM_ROWS)
        return order.reshape(per_pass, -1)[count % per_pass]

    def chain(state, key):
        def call(carry, count):
            params, state, total = carry
            taken = batch_of(key, count)
            gradient = x[taken].T @ (x[taken] @ params - y[taken]) * per_pass / NUM_ROWS
            updates, state = tx.update(gradient, state, params)
            params: Any = optax.apply_updates(params, updates)
            kept = (count >= NUM_GRADIENTS - KEPT) * (params - start) ** 2
            return (params, state, total + kept), None

        carry = start, state, jnp.zeros(SIZE)
        _, state, total = jax.lax.scan(call, carry, jnp.arange(NUM_GRADIENTS))[0]
        seen = optax_smile.stats(state)
        return total, seen.change_share, seen.step_size

    starts = jnp.broadcast_to(start, (NUM_CHAINS, SIZE))
    states = optax_smile.parallel.init(tx, starts, key=jax.random.key(1))
    keys = jax.random.split(jax.random.key(2), NUM_CHAINS)
    totals, shares, steps = (np.asarray(a, float) for a in jax.jit(jax.vmap(chain))(states, keys))
    ratio = totals / KEPT / np.diag(covariance)
    return {
        "b2": float(np.mean((ratio.mean(axis=0) - 1) ** 2)),
        "monte_carlo_b2": float(np.mean(ratio.var(axis=0, ddof=1) / NUM_CHAINS)),
        "mean_ratio": float(ratio.mean()),
        "change_share": float(np.median(shares)),
        "step_size": float(np.median(steps)),
    }


if __name__ == "__main__":
    axes = {"batches": (1, 2, 4, 8), "order": ORDERS}
    records.main(__doc__, run_cell, "b2", order, **axes)
