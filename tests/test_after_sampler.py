"""What comes after a sampler, around it, or between its calls: refused, named, or right.

The posterior is a Gaussian whose mean and variances under SGLD are known, the step size included.
`docs/long-runs.md` has the same verdicts.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from optax import contrib

import optax_smile

NUM_DATA, STEP_SIZE, NUM_CHAINS, WARMUP, KEPT = 20, 0.1, 128, 100, 400
CURVATURE: Any = {"weights": np.array([0.1, 0.2, 0.3], "f"), "offset": np.array([0.15], "f")}
CENTRE: Any = {"weights": np.array([1, -0.5, 0.1], "f"), "offset": np.array([0], "f")}
# Of num_data * loss and of the prior together.
PRECISION = {name: NUM_DATA * a + 1 for name, a in CURVATURE.items()}
MEAN = {name: NUM_DATA * CURVATURE[name] * CENTRE[name] / PRECISION[name] for name in CENTRE}
# x <- x - h P (x - mean) + sqrt(2 h) z has the variance 2 h / (1 - (1 - h P)^2).
VARIANCE = {name: 1 / (p - STEP_SIZE * p**2 / 2) for name, p in PRECISION.items()}
IS_WEIGHT = {"weights": True, "offset": False}
SGLD = optax_smile.sgld(STEP_SIZE, num_data=NUM_DATA, key=0)


def mostly(step: Any, **others: Any) -> Any:
    return step % 20 > 0


def chained(*later):
    return optax.chain(SGLD, *later)


# Of `optax.chain`: the structure of the state tells.
REFUSED: dict[str, Any] = {
    "scale": chained(optax.scale(-1e-3)),
    "add_decayed_weights": chained(optax.add_decayed_weights(1e-4)),
    "trace": chained(optax.trace(0.9)),
    "reduce_on_plateau": chained(contrib.reduce_on_plateau(patience=5)),
    "masked in a chain": chained(optax.masked(optax.clip(1.0), IS_WEIGHT)),
    "chain inside partition": optax.partition(
        {True: chained(optax.scale(0.5)), False: optax.set_to_zero()}, IS_WEIGHT
    ),
}


def average(x, y):
    return jax.tree.map(lambda x, y: 0.9 * x + 0.1 * y, x, y)


# What a loop does with the parameters after a call, before it, and at the start, and whether that
# is right: `changed(count, after, before, start)`.
LOOPS: dict[str, Any] = {
    "as they are": (True, lambda n, x, *_: x),
    "restored once": (True, lambda n, x, _, start: optax.tree.where(n == 150, start, x)),
    "an average": (False, lambda n, x, before, _: average(x, before)),
    "decay in every tenth": (False, lambda n, x, *_: optax.tree.scale(1 - 1e-3 * (n % 10 == 0), x)),
    "a projection of one leaf": (
        False,
        lambda n, x, *_: x | {"offset": jnp.maximum(x["offset"], 0)},
    ),
    "restored often": (False, lambda n, x, _, start: optax.tree.where(n % 50 == 49, start, x)),
}


def mean_loss(params):
    off = jax.tree.map(lambda a, x, m: jnp.sum(a * (x - m) ** 2) / 2, CURVATURE, params, CENTRE)
    return sum(jax.tree.leaves(off))


def run(tx, change):
    """State and parameters at the end, and the draws `[call, chain, ...]`, of compiled chains."""
    start: Any = jax.tree.map(lambda x: jnp.tile(x, (NUM_CHAINS, 1)), MEAN)

    def step(index, start, carry, count):
        params, state = carry
        updates, state = tx.update(jax.grad(mean_loss)(params), state, params)
        params = change(index, count, optax.apply_updates(params, updates), params, start)
        return (params, state), optax_smile.last_accepted(state, params)

    def chain(index, start, params, state):
        one = functools.partial(step, index, start)
        return jax.lax.scan(one, (params, state), jnp.arange(WARMUP + KEPT))

    indices = jnp.arange(NUM_CHAINS) % len(LOOPS)
    states = optax_smile.parallel.init(tx, start, key=1)
    program = jax.jit(jax.vmap(chain, out_axes=(0, 1)))
    (params, state), draws = program(indices, start, start, states)
    return state, params, jax.tree.map(lambda x: np.asarray(x, float)[WARMUP:], draws)


def unchanged(index, count, after, before, start):
    return after


def by_index(index, *given):
    return jax.lax.switch(index, [function for _, function in LOOPS.values()], *given)


def assert_right(draws):
    """Means and variances within 4.5 standard errors, of which there are eight a case."""
    for name in MEAN:
        z = (draws[name] - MEAN[name]) / np.sqrt(VARIANCE[name])
        assert not np.all(z == 0)
        for moment in (z, z**2 - 1):
            found = moment.mean(axis=0)
            error = found.std(axis=0, ddof=1) / np.sqrt(len(found))
            assert np.all(error < 0.1)
            np.testing.assert_array_less(np.abs(found.mean(axis=0)), 4.5 * error)


def assert_named(state, params):
    told = optax_smile.stats(state)
    assert np.all(told.is_altered)
    with pytest.raises(ValueError, match="in which only the sampler changes the parameters"):
        one, at = jax.tree.map(lambda x: x[0], (state, params))
        optax_smile.last_accepted(one, at)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    state = REFUSED[name].init(MEAN)
    rule = r"must be (the state of )?an `optax.chain` that ends with the sampler"
    for ask in (optax_smile.stats, lambda state: optax_smile.last_accepted(state, MEAN)):
        with pytest.raises(ValueError, match=rule):
            ask(state)


def test_a_wrapper_that_changes_steps_is_named_and_others_are_right():
    """Those that change nothing: see `test_wrappers_change_nothing`."""
    state, params, _ = run(optax.conditionally_transform(SGLD, mostly), unchanged)
    assert_named(state, params)
    state, _, draws = run(optax.conditionally_mask(SGLD, mostly), unchanged)
    assert not np.any(optax_smile.stats(state).num_altered)
    assert_right(draws)


def test_loops():
    state, params, draws = run(SGLD, by_index)
    for index, (name, (is_right, _)) in enumerate(LOOPS.items()):
        every = slice(index, None, len(LOOPS))
        mine = jax.tree.map(lambda x, every=every: x[every], (state, params))
        if not is_right:
            assert_named(*mine)
            continue
        told = optax_smile.stats(mine[0])
        assert not np.any(told.is_altered)
        assert np.all(told.num_altered == ("once" in name))
        optax_smile.last_accepted(*jax.tree.map(lambda x: x[0], mine))
        if name == "as they are":
            assert_right(jax.tree.map(lambda x, every=every: x[:, every], draws))


def test_last_accepted_refuses():
    """Outside of compiled functions; they cannot know."""
    state = SGLD.init(MEAN)
    optax_smile.last_accepted(state, MEAN)
    state = runs.with_fields(state, is_altered=jnp.array(True))
    jax.jit(optax_smile.last_accepted)(state, MEAN)
    with pytest.raises(ValueError, match="in which only the sampler changes the parameters"):
        optax_smile.last_accepted(state, MEAN)


def test_a_state_that_others_compute_with_is_refused():
    """They add up states, which makes numbers of booleans."""
    tx, params = contrib.sam(SGLD, optax.sgd(0.1)), MEAN
    state, update = tx.init(params), jax.jit(tx.update)
    with pytest.raises(ValueError, match="one whose booleans are numbers"):
        for _ in range(3):
            _, state = update(MEAN, state, params)
