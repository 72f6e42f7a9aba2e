"""Long runs: counters near 2^24, where float32 stops counting, and near 2^31, where int32 wraps.

A converged chain continues with large counters, in one compiled scan, and with gradients that are
twice as large: the averages must follow.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_injections import INPUTS, MAKE, NUM_DATA, START, TARGETS, mean_loss

import optax_smile

MOST = np.iinfo(np.int32).max
# Values of the counters; 0 does not change them.
COUNTS = (0, 2**24 - 1_000, MOST - 1_000)
# The int32 numbers of states that can decrease; all others are raised.
OTHERS = ("nonfinite_run", "energy_level", "drift_index", "num_in_window", "window")
OTHERS += ("num_altered", "num_compared", "num_read")
ARRIVED, BATCH = 5_000, 20
# An average covers this share of all numbers, and at most this many.
SHARE, LONGEST_AVERAGE = 0.25, 2**22
NAMES = ("psmile", "published.psmile", "psgld", "scale_adapted_sghmc")


def counters_of(state) -> dict[str, jax.Array]:
    found = {name: x for name, x in state._asdict().items() if hasattr(x, "dtype")}
    return {name: x for name, x in found.items() if x.dtype == jnp.int32 and name not in OTHERS}


def chains(name: str, num_steps: int) -> Any:
    """States of chains of all `COUNTS` before and after the steps, and what each step has."""
    tx: Any = MAKE[name](num_data=NUM_DATA)

    def step(factor, carry, call):
        params, state = carry
        rows = (call * BATCH + jnp.arange(BATCH) * 3) % NUM_DATA
        batch = jnp.asarray(INPUTS)[rows], jnp.asarray(TARGETS)[rows]
        loss, grads = jax.value_and_grad(mean_loss)(params, *batch)
        grads = jax.tree.map(lambda g: factor * g, grads)
        updates, state = tx.update(grads, state, params, value=factor * loss)
        params: Any = optax.apply_updates(params, updates)
        leaves = jax.tree.leaves((params, state._replace(energy_change=0)))
        return (params, state), {
            "finite": jnp.stack([jnp.all(jnp.isfinite(x)) for x in leaves]).all(),
            "smallest": jnp.stack([*counters_of(state).values()]).min(),
            "energy": NUM_DATA * mean_loss(params, jnp.asarray(INPUTS), jnp.asarray(TARGETS)),
            "step_size": optax_smile.stats(state).step_size,
            "accepted": optax_smile.stats(state).accepted,
        }

    def chain(count):
        usual, double = (functools.partial(step, factor) for factor in (1.0, 2.0))
        start = START, tx.init(START)
        params, state = jax.lax.scan(usual, start, jnp.arange(ARRIVED))[0]
        for counter, x in counters_of(state).items():
            state = state._replace(**{counter: jnp.maximum(x, count)})
        (_, after), seen = jax.lax.scan(double, (params, state), jnp.arange(num_steps))
        return state, after, seen

    return jax.tree.map(np.asarray, jax.jit(jax.vmap(chain))(jnp.array(COUNTS)))


@pytest.mark.parametrize(
    "name", ["smile", *(pytest.param(x, marks=pytest.mark.nightly) for x in NAMES)]
)
def test_counters(name, full, record):
    """10^6 steps with each, in the sample 10^4."""
    num_steps = 1_000_000 if full else 10_000
    before, after, seen = chains(name, num_steps)
    assert np.all(seen["finite"]) and np.all(seen["smallest"] >= 0)
    # No chain is stuck or leaves the posterior: all have similar energies.
    assert np.all(seen["accepted"].mean(axis=1) > 0.9)
    # Until the resolution, at which `quantile_tuner` stops.
    assert np.all(seen["step_size"] > 1e-7)
    energies = seen["energy"].mean(axis=1)
    assert np.ptp(energies) < 2, energies
    counts = np.asarray(after.num_gradients)
    assert counts.tolist() == [min(max(ARRIVED, x) + num_steps, MOST) for x in COUNTS]
    # An average over n numbers moves by a fraction 1 - exp(-steps / n) towards the doubled value.
    before, after = (optax.tree.get(x, "mean_turn_rate") for x in (before, after))
    for one, count in zip([] if after is None else after / before - 1, COUNTS, strict=False):
        long = min(SHARE * max(count, ARRIVED), LONGEST_AVERAGE)
        share = -math.expm1(-num_steps / long) if count else 1
        assert 0.5 * share < one < 1.5 * share, (count, one, share)
    record("counters near 2^24 and 2^31", of=name, cases=len(COUNTS), silent=0, raw=0, lost=0)
