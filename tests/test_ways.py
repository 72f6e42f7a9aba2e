"""One known posterior through ways to sample it: own loops, wrappers, `sample`, `recorded`.

Bayesian linear regression of two weights and a bias on 240 rows with unit noise. None of the ways
may change the posterior, so all are compared with the same numbers.
"""

import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_smile

NUM_ROWS, SIZE, NUM_CHAINS, NUM_STEPS, THIN = 240, 60, 32, 4_000, 4
NUM_WARMUP = NUM_STEPS // 8
RNG = np.random.default_rng(0)
X = RNG.normal(size=(NUM_ROWS, 2)).astype(np.float32)
Y = (X @ [1.0, -2.0] + 0.5 + RNG.normal(size=NUM_ROWS)).astype(np.float32)
DESIGN = np.column_stack([X, np.ones(NUM_ROWS)]).astype(float)
COVARIANCE = np.linalg.inv(DESIGN.T @ DESIGN + np.eye(3))
MEAN = COVARIANCE @ DESIGN.T @ Y
POINTS = np.random.default_rng(1).multivariate_normal(MEAN, COVARIANCE, NUM_CHAINS)
STARTS: Any = {"w": jnp.float32(POINTS[:, :2]), "b": jnp.float32(POINTS[:, 2])}
KEPT: Any = {"num_warmup": NUM_WARMUP, "thin": THIN}


def loss(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((batch[0] @ params["w"] + params["b"] - batch[1]) ** 2) / 2


def sampler(make: Any = optax_smile.psmile, **options: Any) -> Any:
    """With a large angle, short runs are precise."""
    tuner = {} if "step_size" in options else {"tuner": optax_smile.angle_tuner(0.25)}
    return make(**{"num_data": NUM_ROWS, "key": 0, **tuner, **options})


class Passes:
    """Batches of permuted rows, a new order in each pass, in the same memory."""

    def __init__(self):
        self.rng = np.random.default_rng(2)
        self.memory = np.empty((SIZE, 2), np.float32), np.empty(SIZE, np.float32)

    def __iter__(self) -> Iterator[Any]:
        for rows in self.rng.permutation(NUM_ROWS).reshape(-1, SIZE):
            self.memory[0][:], self.memory[1][:] = X[rows], Y[rows]
            yield self.memory


def own_loop(record=None, wrap=lambda tx: tx, steps=NUM_STEPS, calls=1, params=True, **options):
    """All chains in a vmap over a scan, from shuffled passes; `record` is of `recorded`."""
    tx = wrap(sampler(**options))
    if record is not None:
        tx = optax_smile.recorded(tx, **KEPT, **record)
    rows = [RNG.permutation(NUM_ROWS) for _ in range(calls * steps * SIZE // NUM_ROWS)]
    rows = jnp.asarray(np.concatenate(rows).reshape(-1, SIZE))

    def chain(point, state):
        def step(carry, at):
            point, state = carry
            grads = jax.grad(loss)(point, (jnp.asarray(X)[at], jnp.asarray(Y)[at]))
            updates, state = tx.update(grads, state, point if params else None)
            point: Any = optax.apply_updates(point, updates)
            kept = point if record is not None else optax_smile.last_accepted(state, point)
            return (point, state), kept

        return jax.lax.scan(step, (point, state), rows)[1]

    states = optax_smile.parallel.init(tx, STARTS, key=jax.random.key(1))
    draws = jax.block_until_ready(jax.jit(jax.vmap(chain))(STARTS, states))
    return tx.draws().params if record is not None else jax.tree.map(
        lambda x: np.asarray(x)[:, steps // 8 :: THIN], draws
    )  # fmt: skip


def sampled(batches: Any, ends=(NUM_STEPS,), wrap=lambda tx: tx, given: Any = (), **options):
    """`sample`, in one run or in several that continue each other."""
    if isinstance(batches, int):
        batches = list(zip(np.split(X, batches), np.split(Y, batches), strict=True))
    given = {"progress": False, "check": False, "steps_per_dispatch": THIN} | dict(given)
    loss_fn = given.pop("loss_fn", loss)
    with tempfile.TemporaryDirectory() as folder:
        for end in ends:
            draws = optax_smile.sample(
                loss_fn, STARTS, batches, wrap(sampler(**options)), num_warmup=NUM_WARMUP, key=0,
                thin=THIN, num_draws=(end - NUM_WARMUP) // THIN, directory=folder if len(ends) > 1 else None, **given,
            )  # fmt: skip
        params: Any = draws.params
        return jax.tree.map(np.array, params["params"] if "aux" in given else params)


def counting(params: Any, batch: Any, aux: Any) -> tuple[jax.Array, Any]:
    return loss(params, batch), {"seen": aux["seen"] + 1}


def noisy(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    return loss(params, batch) + 1e-3 * jax.random.normal(key)


AUX = {"loss_fn": counting, "aux": {"seen": jnp.zeros(NUM_CHAINS)}}
OWN = RNG.integers(NUM_ROWS, size=(200, NUM_CHAINS, SIZE))
NORM: Any = {"integrator": "minimal_norm"}
SLOW = {
    "scan": lambda: own_loop(),
    "minimal norm, list of 4, resumed": lambda: sampled(4, (601, 3_333, NUM_STEPS), **NORM),
}
WAYS = {
    "tracked": lambda: own_loop(wrap=optax_smile.tracked, params=False),
    "clip": lambda: own_loop(wrap=lambda tx: optax.chain(optax.clip_by_global_norm(1e6), tx)),
    "masked": lambda: own_loop(wrap=lambda tx: optax.masked(tx, {"w": True, "b": True})),
    "if finite": lambda: own_loop(wrap=lambda tx: optax.apply_if_finite(tx, 5)),
    "minimal norm": lambda: own_loop(calls=2, **NORM),
    "smile": lambda: own_loop(make=optax_smile.smile),
    "sgld": lambda: own_loop(make=optax_smile.sgld, step_size=2e-4, steps=4 * NUM_STEPS),
    "sghmc": lambda: own_loop(make=optax_smile.sghmc, step_size=1e-2, friction=0.2),
    "recorded": lambda: own_loop({}),
    "passes": lambda: sampled(Passes()),
    "extended": lambda: sampled(Passes(), (600, 3_333, NUM_STEPS)),
    "one step a call": lambda: sampled(4, given={"steps_per_dispatch": 1}),
    "batch per step": lambda: sampled(4, given={"batch_per": "step"}, **NORM),
    "batch per chain": lambda: sampled([(X[i], Y[i]) for i in OWN], given={"per_chain": True}),
    "aux": lambda: sampled(4, given=AUX),
    "stochastic": lambda: sampled(4, given={"loss_fn": noisy, "stochastic": True}),
    "MultiSteps": lambda: sampled(12, wrap=lambda tx: optax.MultiSteps(tx, 3)),
    "partition": lambda: sampled(4, wrap=lambda tx: optax.partition({"all": tx}, "all")),
} | {f"minimal norm, list of {n}": lambda n=n: sampled(n, **NORM) for n in range(1, 7)}
MARKED = [pytest.param(way, id=name, marks=pytest.mark.slow) for name, way in SLOW.items()]
MARKED += [pytest.param(way, id=name, marks=pytest.mark.nightly) for name, way in WAYS.items()]


@pytest.mark.parametrize("way", MARKED)
def test_a_way_samples_the_posterior(way):
    # A false alarm in one of a thousand means; the errors of the variances are at most .05.
    found = way()
    draws = np.concatenate([found["w"], np.asarray(found["b"])[..., None]], axis=2)
    draws = (draws.astype(float) - MEAN) / np.sqrt(np.diag(COVARIANCE))
    error = draws.mean(axis=1).std(axis=0, ddof=1) / NUM_CHAINS**0.5
    assert np.abs(draws.mean(axis=(0, 1)) / error).max() <= 4
    assert np.abs(draws.var(axis=(0, 1)) - 1).max() <= 0.15
