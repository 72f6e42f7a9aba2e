"""The same run gives the same bits, whatever does not belong to it.

Tested elsewhere: a run in pieces, after a signal or a crash, for every kind of batches
(`test_resume.py`), after kills, in other processes (`test_kills.py`), on every mesh, up to rounding
(`test_parallel.py`), in several processes (`test_multi_host.py`), draws against a loop written by
hand (`test_sampling.py`), jitted against eager calls (`test_contract.py`).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import optax_smile

CHAINS, WIDTH, NUM_DATA = 4, 8, 120
DEFAULTS: dict[str, Any] = {"num_warmup": 40, "num_draws": 10, "thin": 4, "key": jax.random.key(3)}


def loss(params, batch, *, key):
    x, y = batch
    hidden = jnp.tanh(x @ params["in"] + params["bias"][None])
    kept = jax.random.bernoulli(key, 0.9, hidden.shape)
    return jnp.mean((jnp.where(kept, hidden, 0) @ params["out"] - y) ** 2) / 2


def run(**arguments) -> Any:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(6, 20, 3)).astype(np.float32)
    shapes = {"in": (CHAINS, 3, WIDTH), "bias": (CHAINS, WIDTH), "out": (CHAINS, WIDTH)}
    start = {k: jnp.float32(generator.normal(size=shape)) for k, shape in shapes.items()}
    batches = list(zip(x, np.sin(x.sum(axis=-1)), strict=True))
    options: Any = DEFAULTS | {"stochastic": True, "progress": False} | arguments
    sampler = optax_smile.psmile(num_data=NUM_DATA, key=0)
    return optax_smile.sample(loss, start, batches, sampler, **options)


def test_bits_where_a_thread_reads_and_on_disk(tmp_path):
    """The trace on disk has the draws alone, with their steps, and numbers of Python."""
    usual = run()
    for got in (run(prefetch=2), run(directory=tmp_path / "run")):
        assert set(got.params) == set(usual.params)
        assert set(got.trace) - set(usual.trace) <= {"step"} and set(usual.trace) <= set(got.trace)
        for field, values in usual.params.items():
            np.testing.assert_array_equal(got.params[field], values, field)
            assert got.params[field].dtype == values.dtype
        for field, values in usual.trace.items():
            values, found = np.asarray(values), np.asarray(got.trace[field])
            np.testing.assert_array_equal(found, values[:, -found.shape[1] :], field)
