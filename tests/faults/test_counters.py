"""Long runs: counters near 2^24, where float32 stops counting, and near 2^31, where int32 wraps.

A chain that has arrived goes on with counters as large as they come, in one compiled scan, and its
gradients are twice as large from then on: what is averaged has to follow.
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
from optax_smile.stages import evidence

MOST = np.iinfo(np.int32).max
# As after so many gradients; 0 leaves the counters as they are.
COUNTS = (0, 2**24 - 1_000, MOST - 1_000)
# All int32 numbers of the states: those that only grow, and the others.
COUNTERS = (
    "num_gradients",
    "num_steps",
    "num_turns",
    "num_outlying",
    "num_energies",
    "num_rejected",
    "num_nonfinite",
    "finite_run",
)
OTHERS = ("nonfinite_run", "energy_level", "drift_index", "num_in_window", "window")
OTHERS += ("num_altered", "num_running", "state_format")
ARRIVED, BATCH = 5_000, 20
NAMES = ("psmile", "smile", "published.psmile", "psgld", "scale_adapted_sghmc")


def int32_names(state) -> set[str]:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {path[-1].name for path, leaf in leaves if leaf.dtype == jnp.int32}


def counters_of(state) -> jax.Array:
    found = [optax.tree.get(state, name) for name in COUNTERS]
    return jnp.stack([x for x in found if x is not None])


@functools.cache
def program(name: str) -> Any:
    """Chains of all `COUNTS`, with how many steps, by which the gradients grow as an argument."""
    tx: Any = MAKE[name]()

    def advance(factor, carry, call):
        params, state = carry
        rows = (call * BATCH + jnp.arange(BATCH) * 3) % NUM_DATA
        batch = jnp.asarray(INPUTS)[rows], jnp.asarray(TARGETS)[rows]
        loss, grads = jax.value_and_grad(mean_loss)(params, *batch)
        grads = jax.tree.map(lambda g: factor * g, grads)
        updates, state = tx.update(grads, state, params, value=factor * loss)
        return optax.apply_updates(params, updates), state

    def go_on(_, carry):
        inner, seen, call, factor = carry
        params, state = inner = advance(factor, inner, call)
        told = optax_smile.stats(state)
        leaves = jax.tree.leaves((params, state._replace(last_update=None)))
        finite = jnp.stack([jnp.all(jnp.isfinite(x)) for x in leaves])
        energy = mean_loss(params, jnp.asarray(INPUTS), jnp.asarray(TARGETS))
        seen = {
            "finite": seen["finite"] & jnp.all(finite),
            "smallest": jnp.minimum(seen["smallest"], jnp.min(counters_of(state))),
            "energy": seen["energy"] + energy,
            "shortest": jnp.minimum(seen["shortest"], told.step_size),
            "num_accepted": seen["num_accepted"] + told.accepted,
        }
        return inner, seen, call + 1, factor

    def chain(count, num_steps, factor):
        inner = jax.lax.fori_loop(
            0, ARRIVED, lambda call, carry: advance(1.0, carry, call), (START, tx.init(START))
        )
        params, state = inner
        for field in COUNTERS:
            at = optax.tree.get(state, field)
            if at is not None:
                state = optax.tree.set(state, **{field: jnp.maximum(at, count)})
        seen = {"finite": jnp.array(True), "smallest": jnp.full((), MOST)}
        seen |= {"energy": jnp.zeros(()), "num_accepted": jnp.zeros(())}
        seen["shortest"] = jnp.full((), jnp.inf)
        carry = (params, state), seen, jnp.zeros((), jnp.int32), factor
        (_, after), seen, _, _ = jax.lax.fori_loop(0, num_steps, go_on, carry)
        return state, after, seen

    return jax.jit(jax.vmap(chain, in_axes=(0, None, None)))


@pytest.mark.parametrize(
    "name", [x if x == "psmile" else pytest.param(x, marks=pytest.mark.nightly) for x in NAMES]
)
def test_counters(name, full, record):
    """10^6 steps with each, in the sample 10^4."""
    num_steps = 1_000_000 if full else 10_000
    before, after, seen = jax.tree.map(
        np.asarray, program(name)(jnp.array(COUNTS), num_steps, jnp.float32(2))
    )
    assert int32_names(before) <= {*COUNTERS, *OTHERS}
    assert np.all(seen["finite"]) and np.all(seen["smallest"] >= 0)
    # None is stuck, and none leaves the posterior: the energies of all are alike.
    assert np.all(seen["num_accepted"] > 0.9 * num_steps)
    # Down to the resolution, where `quantile_tuner` ends.
    assert np.all(seen["shortest"] > 1e-7)
    energies = NUM_DATA * seen["energy"] / num_steps
    assert np.ptp(energies) < 2, energies
    counts = np.asarray(after.last_update.num_gradients)
    assert counts.tolist() == [min(max(ARRIVED, x) + num_steps, MOST) for x in COUNTS]
    if optax.tree.get(after, "mean_turn_rate") is not None:
        check_averages(before, after, num_steps)
    record("counters near 2^24 and 2^31", of=name, cases=len(COUNTS), silent=0, raw=0, lost=0)


def check_averages(before, after, num_steps):
    """An average over n numbers goes 1 - exp(-steps / n) of the way to what is twice as large."""
    rise = optax.tree.get(after, "mean_turn_rate") / optax.tree.get(before, "mean_turn_rate") - 1
    for one, count in zip(rise, COUNTS, strict=True):
        long = min(evidence.SHARE * max(count, ARRIVED), evidence.LONGEST_AVERAGE)
        share = -math.expm1(-num_steps / long) if count else 1
        assert 0.5 * share < one < 1.5 * share, (count, one, share)
