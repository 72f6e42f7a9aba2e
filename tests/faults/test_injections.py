"""The effect on a chain of gradients, losses and batches that are temporarily broken.

A case says which value replaces which numbers, from which call and for how long. All cases of a
sampler are one compiled program, in which every poisoned chain has a healthy neighbour.
"""

import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from public_samplers import LANGEVIN, SAMPLERS, accepts

import optax_smile
from optax_smile import published

# Calls of a run, and where a fault begins: at the first, early, in the warm-up, late.
CALLS = 800
PHASES = ((0, 1), (1, 10), (10, 150), (150, 350))
LONGEST = 50
# Values that are written, and factors of gradients.
WRITTEN = [(x, False) for x in (np.nan, np.inf, -np.inf, 1e30, -1e30, 1e38, 1e-40, 0.0)]
WRITTEN += [(1e6, True), (1e15, True)]
PLACES = ("entry", "leaf", "gradient", "value", "batch")
# Transformations before the sampler.
CLIPS: tuple[Any, ...] = optax.identity(), optax.clip_by_global_norm(1.0), optax.clip(1.0)

NUM_DATA, BATCH, NUM_WEIGHTS = 100, 20, 4
RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(NUM_DATA, NUM_WEIGHTS)).astype(np.float32)
TARGETS = (INPUTS.sum(axis=1) + RNG.normal(size=NUM_DATA)).astype(np.float32)
ROWS = RNG.integers(NUM_DATA, size=(CALLS, BATCH))
START = {"w": jnp.zeros(NUM_WEIGHTS), "b": jnp.zeros(1)}

# Step sizes of the samplers that do not find their own; 0.02 for all others. And options.
STEP_SIZES = {"sgld": 1e-3, "psgld": 5e-4, "scale_adapted_sghmc": 0.05}
STEP_SIZES |= {"cyclical_sgld": 2e-3, "smile": None, "psmile": None}
OPTIONS = {"adapt_steps": 400, "total_steps": CALLS, "num_cycles": 2}


def settings(name: str) -> dict[str, Any]:
    found = {option: x for option, x in OPTIONS.items() if accepts(SAMPLERS[name], option)}
    return found | {"step_size": STEP_SIZES.get(name, 0.02)}


PAPERS = {f"published.{x}": x for x in ("smile", "psmile", "smile_naive", "psmile_naive")}
MAKE = {
    **{x: functools.partial(fn, key=0, **settings(x)) for x, fn in SAMPLERS.items()},
    "mclmc": functools.partial(optax_smile.mclmc, 0.05, decoherence_length=0.5, key=0),
    **{x: functools.partial(getattr(published, y), 0.03) for x, y in PAPERS.items()},
}
# Without energies, these samplers follow any finite gradient, however large, and return by steps of
# their usual length. In an adaptive mass the gradient remains, so the chain hardly moves: for
# log(V) / 0.01 gradients with psgld, permanently with scale_adapted_sghmc.
ADAPTIVE = ("psgld", "scale_adapted_sghmc")
# The others are nightly.
SAMPLE = ("psmile",)
# Number of last calls that are compared, and the share that a converged chain accepts.
LAST, MOST_ACCEPTED = 100, 0.9


# A fault in a run; none if its length is zero.
FIELDS = "number multiplies gradient value batch start length clip"
Fault: Any = collections.namedtuple("Fault", FIELDS)


def draw_fault(generator, place: str):
    value, multiplies = WRITTEN[generator.integers(len(WRITTEN))]
    leaf = generator.choice(["w", "b"])
    mask = {name: np.full(x.shape, place == "gradient") for name, x in START.items()}
    if place in ("entry", "leaf"):
        mask[leaf][:] = place == "leaf"
        mask[leaf][generator.integers(mask[leaf].size)] = True
    start = generator.integers(*PHASES[generator.integers(len(PHASES))])
    length = 1 if generator.random() < 0.5 else generator.integers(2, LONGEST + 1)
    clip = generator.choice(len(CLIPS), p=[0.6, 0.2, 0.2])
    where = mask, place == "value", place == "batch"
    return Fault(np.float32(value), multiplies, *where, start, length, clip)


def mean_loss(params, inputs, targets):
    return jnp.mean((inputs @ params["w"] + params["b"] - targets) ** 2) / 2


@functools.cache
def program(name: str) -> Any:
    """Run chains: of keys and faults, whether all is finite, the energy and the step size."""
    tx: Any = MAKE[name](num_data=NUM_DATA)

    def chain(key, fault):
        state = tx.init(START)
        if optax.tree.get(state, "key") is not None:
            state = optax.tree.set(state, key=jax.random.key_data(key))

        def broken(x, here, call):
            worse = jnp.where(fault.multiplies, x * fault.number, fault.number)
            active = (call >= fault.start) & (call < fault.start + fault.length)
            return jnp.where(active & here, worse, x)

        def step(carry, seen):
            (params, state), (call, rows) = carry, seen
            inputs = jnp.asarray(INPUTS)[rows]
            inputs = inputs.at[0, 0].set(broken(inputs[0, 0], fault.batch, call))
            loss, grads = jax.value_and_grad(mean_loss)(params, inputs, jnp.asarray(TARGETS)[rows])
            grads = jax.tree.map(lambda g, here: broken(g, here, call), grads, fault.gradient)
            clipped = [clip.update(grads, clip.init(params))[0] for clip in CLIPS]
            grads = jax.tree.map(lambda *x: jnp.stack(x)[fault.clip], *clipped)
            value = broken(loss, fault.value, call)
            updates, state = tx.update(grads, state, params, value=value)
            params: Any = optax.apply_updates(params, updates)
            draw = optax_smile.last_accepted(state, params)
            numbers = jnp.concatenate(jax.tree.leaves((params, draw)))
            return (params, state), {
                "params": params,
                "finite": jnp.all(jnp.isfinite(numbers)),
                "energy": NUM_DATA * mean_loss(draw, jnp.asarray(INPUTS), jnp.asarray(TARGETS)),
                **optax_smile.stats(state)._asdict(),
            }

        return jax.lax.scan(step, (START, state), (jnp.arange(CALLS), ROWS))

    return jax.jit(jax.vmap(chain))


def late(values):
    """Mean of each chain over the last calls, which begin 350 after the last fault can."""
    return np.mean(values[:, -LAST:], axis=1)


@pytest.mark.parametrize(
    "name", [x if x in SAMPLE else pytest.param(x, marks=pytest.mark.nightly) for x in MAKE]
)
def test_injections(name, full, record):
    """No parameter is lost, no neighbour changes, and every non-finite number is counted.

    350 gradients after a single fault, energy and step size equal those of chains without it,
    unless the sampler follows it. Steps are accepted again even after a burst.
    """
    generator = np.random.default_rng(1)
    # Every place in turn.
    places = PLACES * (200 if full else 10)
    faults = [draw_fault(generator, place) for place in places]
    # The first chain of each pair is poisoned.
    pairs = [x for fault in faults for x in (fault, fault._replace(length=0))]
    broken: Any = jax.tree.map(lambda *x: np.stack(x), *pairs)
    given = broken._replace(length=np.zeros_like(broken.length)), broken
    keys = jax.random.split(jax.random.key(2), len(pairs))
    ends = jax.tree.map(np.asarray, [program(name)(keys, x) for x in given])
    (_, sound), (_, found) = ends
    assert np.all(sound["finite"])
    lost = np.sum(~np.all(found["finite"], axis=1))
    for before, after in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_array_equal(before[1::2], after[1::2])

    poisoned = jax.tree.map(lambda x: x[::2], found)
    trapped = np.sum(late(poisoned["accepted"]) < MOST_ACCEPTED)
    usual, energies = np.max(late(sound["energy"])), late(poisoned["energy"])
    ratios, silent = late(poisoned["step_size"]) / late(sound["step_size"][::2]), 0
    for case, fault in enumerate(faults):
        if not np.isfinite(fault.number) and not fault.clip:
            silent += poisoned["num_nonfinite"][case, -1] != fault.length
        told, bound = (case, fault, energies[case], ratios[case]), 1.1 * usual
        # By its equation, it follows any finite gradient, however large.
        if name in LANGEVIN and fault.multiplies and not fault.clip and not fault.value:
            highest = np.max(poisoned["energy"][case]) / 10
            bound = 1.1 * np.max(sound["energy"]) if name in ADAPTIVE else max(highest, bound)
        else:
            assert fault.length > 1 or 1 / 2 < ratios[case] < 2, told
        assert fault.length > 1 or energies[case] < bound, told
    assert (lost, trapped, silent) == (0, 0, 0)
    record("injections", of=name, cases=len(faults), silent=0, raw=0, lost=0)
