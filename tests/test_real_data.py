"""Regression with a network on real data: UCI energy."""

import os
import runpy
from pathlib import Path
from typing import Any

import data
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_smile

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.nightly
@pytest.mark.skipif("OPTAX_SMILE_DATA" not in os.environ, reason="needs OPTAX_SMILE_DATA")
def test_preconditioned_chains_predict_better_than_where_they_start_and_than_plain_ones():
    """One seed, a fixed step and no explicit noise: LPPD 1.41, 1.37 without scale, 1.53 with it."""
    train, validation, (inputs, targets), _ = data.uci("energy")
    network = runpy.run_path(str(EXAMPLES / "uci.py"))["Network"](16)
    size, generator = len(train[0]) // 2, np.random.default_rng(1)
    shuffled = [generator.permutation(len(train[0]))[:size] for _ in range(100)]
    batches = [tuple(array[rows] for array in train) for rows in shuffled]

    def mean_loss(params, batch):
        mean, log_std = network.apply(params, batch[0])
        return jnp.mean((batch[1] - mean) ** 2) * jnp.exp(-2 * log_std) / 2 + log_std

    def lppd(draws) -> float:
        options: Any = {"likelihood": "gaussian", "targets": targets}
        found = optax_smile.predict(network.apply, draws, inputs, **options)
        return optax_smile.metrics.lppd(found.log_density)

    members = optax_smile.warmstart(
        mean_loss,
        lambda key: network.init(key, inputs[:1]),
        batches[:5],
        optax.adamw(0.01, weight_decay=0.005),
        num_members=4,
        num_epochs=200,
        validation=validation,
        key=jax.random.key(0),
        progress=False,
    )
    scores = [lppd(optax_smile.Snapshots.from_members(members))]
    for sampler in (optax_smile.smile, optax_smile.psmile):
        draws = optax_smile.sample(
            mean_loss,
            members,
            batches,
            sampler(2e-3, decoherence_length=None, num_data=len(train[0])),
            num_warmup=5_000,
            num_draws=100,
            thin=50,
            key=jax.random.key(1),
            progress=False,
        )
        assert np.all(draws.trace["num_nonfinite"] == 0)
        scores.append(lppd(draws))
    assert scores[2] > max(scores[:2]), scores
