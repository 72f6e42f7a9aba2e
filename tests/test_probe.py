"""Changes after the sampler, found from the structure of a state and from the parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_smile

KEY = jax.random.key(0)
REJECTING: dict[str, Any] = {"reject_quantile": 0.9, "integrator": "minimal_norm"}
SAMPLERS: dict[str, Any] = {
    "rejections": lambda: optax_smile.smile(num_data=100, key=KEY, **REJECTING),
    "sghmc": lambda: optax_smile.sghmc(1e-3, num_data=100, key=KEY),
}
START = {"matrix": jnp.ones((30, 20)), "offset": jnp.ones(7), "scalar": jnp.ones(())}
NUM_GRADIENTS = 200
IN_A_ROW = [1 - 0.5 * ((np.arange(200) >= 20) & (np.arange(200) < 20 + n)) for n in (1, 2, 3)]
# Numbers in `factor * updates - decay * params + offset`, and whether gradients are lost.
RUNS: dict[Any, Any] = {
    "as sent": (1, 0, 0, False),
    "poisoned": (1, 0, 0, True),
    "half": (0.5, 0, 0, False),
    "turned": (-1, 0, 0, False),
    "decayed": (1, 1e-3, 0, False),
    "shifted": (1, 0, 1e-3, False),
    "by a thousandth": (1 + 5e-4, 0, 0, False),
    **{number: (factors, 0, 0, False) for number, factors in enumerate(IN_A_ROW, 1)},
}


def told(name):
    """`stats` in all of `RUNS`, `[call]` each."""
    tx = SAMPLERS[name]()

    def chain(factors, decay, offset, is_poisoned):
        def step(carry, count):
            params, state = carry
            noise = optax.tree.random_like(jax.random.fold_in(KEY, count), params)
            lost = jnp.where(is_poisoned & (count % 37 == 5), jnp.nan, 0)
            grads = jax.tree.map(lambda x, z: x + 0.3 * z + lost, params, noise)
            value = optax.tree.norm(params, squared=True) / 2
            updates, state = tx.update(grads, state, params, value=value)
            sent = jax.tree.map(lambda u, x: factors[count] * u - decay * x, updates, params)
            params = jax.tree.map(lambda x, y: x + (y + offset), params, sent)
            return (params, state), optax_smile.stats(state)

        return jax.lax.scan(step, (START, tx.init(START)), jnp.arange(NUM_GRADIENTS))[1]

    factors, *others = zip(*RUNS.values(), strict=True)
    factors = np.stack([np.broadcast_to(x, NUM_GRADIENTS) for x in factors]).astype(np.float32)
    others = [np.asarray(x, dtype) for x, dtype in zip(others, "ff?", strict=True)]
    found = jax.tree.map(np.asarray, jax.jit(jax.vmap(chain))(factors, *others))
    return {run: jax.tree.map(lambda x, i=i: x[i], found) for i, run in enumerate(RUNS)}


@pytest.mark.parametrize("name", SAMPLERS)
def test_what_is_changed_on_its_way_is_counted_all_else_is_silent(name):
    """Two calls are counted, and the third sets the flag."""
    of_runs = told(name)
    for run in ("as sent", "poisoned"):
        seen = of_runs[run]
        assert seen.num_altered[-1] == 0 and not seen.is_altered.any()
        assert (seen.num_nonfinite[-1] > 0) == (run == "poisoned")
        assert (seen.num_rejected[-1] > 0) == (name == "rejections")
    for run in ("half", "turned", "decayed", "shifted", "by a thousandth"):
        seen = of_runs[run]
        assert seen.is_altered[-1] and not seen.is_altered[:3].any()
        assert seen.num_altered[-1] > 0.5 * NUM_GRADIENTS
    for number in (1, 2, 3):
        seen = of_runs[number]
        assert seen.num_altered[-1] <= number
        if name != "rejections":
            assert seen.num_altered[-1] == number
            assert np.array_equal(seen.is_altered, seen.num_altered >= 3)


WINDOW = 512


def told_of_a_loop(params: Any, offsets: Any) -> Any:
    """`stats` after each call of a loop that adds something to the parameters before it."""
    tx: Any = optax_smile.sgld(1e-12, num_data=1, prior_precision=0.0, key=0)
    zeros = jax.tree.map(jnp.zeros_like, params)

    def call(carry, offset):
        params, state = carry
        params = jax.tree.map(jnp.add, params, offset)
        updates, state = tx.update(zeros, state, params)
        return (optax.apply_updates(params, updates), state), optax_smile.stats(state)

    return jax.lax.scan(call, (params, tx.init(params)), offsets)[1]


@jax.jit
def flags(is_altered):
    """`is_altered` after each call but the first, in a run with these calls altered."""
    offsets = jnp.append(0.0, is_altered).astype(jnp.float32)[:, None] * jnp.ones(3)[None]
    return told_of_a_loop(jnp.ones(3), offsets).is_altered[1:]


def test_one_percent_of_the_last_calls_is_too_much():
    calls = np.arange(1, 4 * WINDOW + 1)
    for period in (5, 20, 50):
        found = np.asarray(flags(calls % period == 0))
        assert not found[: 3 * period - 1].any() and found[3 * period - 1 : WINDOW].all(), period
        assert found[WINDOW:].mean() > 0.7
    assert not flags(calls % 300 == 0).any()
    for number in (1, 3, 5, 6, 10):
        found = np.asarray(flags((calls > 3 * WINDOW - number) & (calls <= 3 * WINDOW)))
        assert found[3 * WINDOW - 1] == found.any() == (number > 5)
        # It is forgotten, if this was long ago.
        assert not found[-1]


@pytest.mark.parametrize("shape", [(), (1, 256), (300, 200), (3, 3, 64, 128), (70_000,), (2, 1000)])
def test_a_change_of_any_part_of_a_leaf_is_seen(shape):
    """Change one half of a leaf along any axis, on either side, in any of several leaves."""
    for axis in range(max(len(shape), 1)):
        half = np.ones(shape, np.float32)
        if shape and shape[axis] > 1:
            half = np.moveaxis(half, axis, 0).copy()
            half[: len(half) // 2] = 0
            half = np.moveaxis(half, 0, axis)
        for part in (half, half[tuple(slice(None, None, -1) for _ in shape)]):
            offsets = [jnp.zeros((2, *shape)), jnp.stack([0 * part, part])]
            params = [jnp.ones(shape)] * 2
            assert told_of_a_loop(params, offsets).num_altered[-1] == 1
