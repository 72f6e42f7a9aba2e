"""The same run gives the same bits, whatever does not belong to it.

Tested elsewhere: a run in pieces, after a signal or a crash, for every kind of batches
(`test_resume.py`), after kills, in other processes (`test_kills.py`), on every mesh, up to rounding
(`test_parallel.py`), in several processes (`test_multi_host.py`), draws against a loop written by
hand (`test_sampling.py`), jitted against eager calls (`test_contract.py`).
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from runs import NUM_DATA, mean_loss, run

import optax_smile


def noisy_loss(params, batch, *, key):
    x, y = batch
    return mean_loss(params, (jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0), y))


def test_bits_in_memory_and_on_disk(tmp_path):
    """The trace on disk has the draws alone, with their steps, and numbers of Python."""
    sampler = optax_smile.psmile(num_data=NUM_DATA, key=0)
    others = {}, {"directory": tmp_path / "run"}
    common: Any = {"loss": noisy_loss, "sampler": sampler, "stochastic": True}
    usual, got = (run(**common | x) for x in others)
    jax.tree.map(np.testing.assert_array_equal, got.params, usual.params)
    chex.assert_trees_all_equal_shapes_and_dtypes(got.params, usual.params)
    assert set(usual.trace) <= set(got.trace) <= {*usual.trace, "step"}
    for field, values in usual.trace.items():
        values, on_disk = np.asarray(values), np.asarray(got.trace[field])
        np.testing.assert_array_equal(on_disk, values[:, -on_disk.shape[1] :], field)
