"""The example of low-rank weights: what is sampled, what stays, and what it needs."""

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import optax_smile

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
import lora  # noqa: E402

CONFIG = lora.Config(width=8, context=8, rank=2, base_steps=2, num_train=200, num_test=200)
CONFIG = dataclasses.replace(CONFIG, batch_size=4, num_warmup=2, num_draws=4, thin=2)
LETTERS = np.random.default_rng(0).integers(lora.NUM_LETTERS, size=CONFIG.num_train)


def smile(prior_mean):
    prior = {"prior_mean": prior_mean, "prior_precision": CONFIG.prior_precision}
    return optax_smile.smile(1e-2, num_data=CONFIG.num_train, **prior, key=0)


def by_kind(params):
    """Leaves of low-rank weights, and the others, by path."""
    kinds = {True: {}, False: {}}
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.as_pure(params)):
        name = jax.tree_util.keystr(path)
        kinds["lora" in name][name] = leaf
    return kinds[True], kinds[False]


@pytest.fixture(scope="module")
def network():
    """Model, its batches, and all its weights as they begin."""
    model = lora.pretrain(CONFIG, LETTERS)
    return model, lora.batches_of(LETTERS, CONFIG), nnx.as_pure(nnx.state(model))


def bits(x):
    return np.asarray(x).view(np.uint16 if x.dtype == jnp.bfloat16 else np.uint32)


@pytest.mark.parametrize(
    "method", [lora.sample_loop, pytest.param(lora.sample_partition, marks=pytest.mark.slow)]
)
def test_low_rank_weights_move_and_the_others_keep_their_bits(network, method):
    model, batches, whole = network
    nnx.update(model, whole)
    is_loop = method is lora.sample_loop
    prior_mean = lora.low_rank(model) if is_loop else whole
    draws = list(method(model, CONFIG, batches, smile(prior_mean)))
    assert len(draws) == 4
    sampled, frozen = by_kind(whole)
    assert len(sampled) == 2 * 2 * len(lora.MATRICES)
    assert {x.dtype for x in sampled.values()} == {jnp.dtype(jnp.float32)}
    assert {x.dtype for x in frozen.values()} == {jnp.dtype(jnp.bfloat16)}
    assert jax.eval_shape(lambda x: model(x), LETTERS[None, :8]).dtype == jnp.float32
    for draw in draws:
        moved, stayed = by_kind(draw)
        assert {x.dtype for x in moved.values()} == {jnp.dtype(jnp.float32)}
        assert all(np.any(bits(moved[name]) != bits(sampled[name])) for name in sampled)
        # Draws of the loop are the low-rank weights alone: the others are the model's.
        stayed = by_kind(nnx.state(model))[1] if is_loop else stayed
        assert stayed.keys() == frozen.keys()
        for name, leaf in frozen.items():
            assert stayed[name].dtype == jnp.bfloat16
            np.testing.assert_array_equal(bits(stayed[name]), bits(leaf))


def test_last_accepted_is_where_the_loop_was(network):
    """The parameters of the loop are a proposal; the draw is the point that it was given."""
    model, batches, whole = network
    nnx.update(model, whole)
    tx, before = smile(lora.low_rank(model)), lora.low_rank(model)
    for _, optimizer in lora.train(model, tx, nnx.LoRAParam, batches, 3):
        state, params = nnx.as_pure(optimizer.opt_state), lora.low_rank(model)
        last = optax_smile.last_accepted(state, params)
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), last, before)
        before = params


def test_a_missing_folder_ends_the_program(tmp_path, monkeypatch):
    monkeypatch.setenv("OPTAX_SMILE_DATA", str(tmp_path))
    with pytest.raises(SystemExit, match="Set OPTAX_SMILE_DATA to a folder with text/modern"):
        lora.load(CONFIG)


@pytest.mark.slow
def test_smoke_without_data():
    environment = {name: x for name, x in os.environ.items() if name != "OPTAX_SMILE_DATA"}
    command = [sys.executable, str(EXAMPLES / "lora.py"), "--smoke", "--sampler", "smile"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    header, *rows = run.stdout.splitlines()
    assert header.split()[:4] == ["held-out", "text", "LPPD", "perplexity"]
    assert [row.split("  ")[0] for row in rows] == ["MAP", "smile, loop", "smile, partition"]
    for row in rows:
        lppd, perplexity = map(float, row[20:].split()[:2])
        assert perplexity == pytest.approx(np.exp(-lppd), rel=1e-3)
