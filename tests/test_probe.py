"""What comes after the sampler: by the structure of a state, and by where parameters arrive."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_smile
from optax_smile.stages import probe

KEY = jax.random.key(0)
SAMPLERS: dict[str, Any] = {
    "psmile, rejections": lambda: optax_smile.psmile(
        num_data=100, key=KEY, reject_quantile=0.9, integrator="minimal_norm"
    ),
    "sghmc": lambda: optax_smile.sghmc(1e-3, num_data=100, key=KEY),
}
START = {"matrix": jnp.ones((30, 20)), "offset": jnp.ones(7), "scalar": jnp.ones(())}
NUM_GRADIENTS = 200
IN_A_ROW = [1 - 0.5 * ((np.arange(200) >= 20) & (np.arange(200) < 20 + n)) for n in (1, 2, 3)]
# Of `factor * updates - decay * params + offset` the numbers, and whether gradients are lost.
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


@functools.cache
def told(name):
    """What `stats` says in all of `RUNS`, `[call]` each."""
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
    for run in ("as sent", "poisoned"):
        seen = told(name)[run]
        assert seen.num_altered[-1] == 0 and not seen.is_altered.any()
        assert (seen.num_nonfinite[-1] > 0) == (run == "poisoned")
        assert (seen.num_rejected[-1] > 0) == ("rejections" in name)
    for run in ("half", "turned", "decayed", "shifted", "by a thousandth"):
        seen = told(name)[run]
        assert seen.is_altered[-1] and not seen.is_altered[:3].any()
        assert seen.num_altered[-1] > 0.5 * NUM_GRADIENTS
    for number in (1, 2, 3):
        seen = told(name)[number]
        assert seen.num_altered[-1] <= number
        if "rejections" not in name:
            assert seen.num_altered[-1] == number
            assert np.array_equal(seen.is_altered, seen.num_altered >= 3)


WINDOW = 512


def flags(is_altered):
    """Of a run with these calls altered, `is_altered` after each call."""
    params = {"w": jnp.ones(3)}

    def call(state, offset):
        state = probe.look(state, {"w": params["w"] + offset}, [jnp.zeros(3)], jnp.array(False))
        # As if the loop went on from where it began.
        return state._replace(start=params["w"]), state.is_altered

    offsets = jnp.concatenate([jnp.zeros(1), jnp.float32(is_altered)])
    return np.asarray(jax.lax.scan(call, probe.init(params), offsets)[1])[1:]


def test_one_percent_of_the_last_calls_is_too_much():
    calls = np.arange(1, 4 * WINDOW + 1)
    for period in (5, 20, 50):
        found = flags(calls % period == 0)
        assert not found[: 3 * period - 1].any() and found[3 * period - 1 : WINDOW].all(), period
        assert found[WINDOW:].mean() > 0.7
    assert not flags(calls % 300 == 0).any()
    for number in (1, 3, 5, 6, 10):
        found = flags((calls > 3 * WINDOW - number) & (calls <= 3 * WINDOW))
        assert found[3 * WINDOW - 1] == found.any() == (number > 5)
        # It is forgotten, if this was long ago.
        assert not found[-1]


@pytest.mark.parametrize("shape", [(), (1, 256), (300, 200), (3, 3, 64, 128), (70_000,), (2, 1000)])
def test_a_leaf_is_read_on_a_grid(shape):
    """Its first number, hundreds of them if there are as many, and others along each axis."""
    axes = [jax.lax.broadcasted_iota(jnp.float32, shape, axis) for axis in range(len(shape))]
    (found,) = probe.entries(jnp.zeros(shape))
    assert min(200, np.prod(shape)) <= len(found) <= probe.MOST_READ
    for axis, (places,) in enumerate(map(probe.entries, axes)):
        assert places[0] == 0 and places[-1] >= 0.75 * (shape[axis] - 1)
        assert len(np.unique(places)) >= min(shape[axis], 3)
    # And every leaf.
    assert len(probe.entries([jnp.zeros(shape)] * 30)) == 30


SMILE = optax_smile.smile(0.3, num_data=100, tuner=None, decoherence_length=None)


@functools.cache
def program(tx):
    """`num_altered` after a loop with a projection, or an average with the start."""

    def step(floor, share, carry, factor):
        params, state = carry
        grads = jax.tree.map(lambda x: factor * (x + 0.1), params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        params = jax.tree.map(lambda x: jnp.maximum(x, floor), params)
        return (jax.tree.map(lambda x, y: x + share * (y - x), params, START), state), None

    def run(floor, share, factors):
        one = functools.partial(step, floor, share)
        (_, state), _ = jax.lax.scan(one, (START, tx.init(START)), factors)
        return optax_smile.stats(state).num_altered

    return jax.jit(run)


def altered(tx, lost_at=(), floor=-np.inf, share=0.0):
    return program(tx)(floor, share, jnp.ones(18).at[jnp.array(lost_at, int)].set(jnp.nan))


def test_projections_are_counted_and_undone_steps_are_not():
    """Wrappers that leave the steps alone: see also `test_wrappers_change_nothing`."""
    assert altered(SMILE, lost_at=(3, 4, 11)) == 0
    assert altered(SMILE, floor=0.97) > 0
    assert altered(SMILE, share=0.1) > 10
    # In a `named_chain` the order is lost, so that only the parameters can tell.
    assert altered(optax.named_chain(("sampler", SMILE), ("rate", optax.scale(0.5)))) > 10


IS_MASKED = {"matrix": True, "offset": True, "scalar": False}
LATE = {
    "scale": (SMILE, optax.scale(-1.0)),
    "masked": (optax.masked(SMILE, IS_MASKED), optax.clip(1.0)),
}


@pytest.mark.parametrize("name", LATE)
def test_a_chain_that_goes_on_after_the_sampler_is_refused(name):
    tx = optax.chain(optax.clip(1.0), *LATE[name])
    state, start = tx.init(START), jax.tree.map(lambda x: x[None], START)
    counts: Any = {"num_warmup": 1, "num_draws": 1, "key": 0}
    sample: Any = functools.partial(optax_smile.sample, lambda params, batch: params["scalar"])
    for function, argument, *given in (
        (optax_smile.stats, "stats(state", state),
        (optax_smile.last_accepted, "last_accepted(state", state, START),
        (functools.partial(sample, **counts), "sample(sampler", start, [0], tx),
    ):
        kind = "an `optax.chain`" if "sampler" in argument else "the state of an `optax.chain`"
        rule = re.escape(f"`{argument}=...)` must be {kind} that ends with the sampler")
        with pytest.raises(ValueError, match=rule):
            function(*given)
    # A tuple of a loop's own is no chain.
    assert optax_smile.stats((SMILE.init(START), jnp.zeros(3), {"ema": START})).num_altered == 0
