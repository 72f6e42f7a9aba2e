"""`sample` and `warmstart` on a mesh give what they give on one device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_parallel import (
    EXPLICIT,
    NUM_DATA,
    SHAPES,
    SPECS,
    STEPS,
    assert_close,
    assert_spread,
    bare,
    batch_of,
    gathering_loss,
    loss_for,
    make_mesh,
    mean_loss,
    shardings_of,
    start,
)

import optax_smile

# A scale within the few calls of a test: see conftest.py.
SHORT_WINDOWS = True


def batches(chains=None):
    return [batch_of(call, chains) for call in range(STEPS)]


def draw(mesh=None, specs=None, loss_fn=None, **arguments) -> Any:
    defaults: dict[str, Any] = {"num_warmup": 4, "num_draws": 3, "thin": 4, "key": 0}
    defaults |= {"progress": False, "batches": batches(), "mesh": mesh, "specs": specs}
    sampler = optax_smile.smile(0.02, num_data=NUM_DATA, decoherence_length=None)
    loss_fn = loss_fn or loss_for(mesh, specs)
    return optax_smile.sample(loss_fn, start(), sampler=sampler, **defaults | arguments)


drawn = functools.cache(draw)


def assert_same_draws(got, expected):
    assert_close(got.params, expected.params)
    if isinstance(got, optax_smile.Snapshots):
        assert_close(dict(got.trace), dict(expected.trace))


def test_sample_on_a_mesh(tmp_path):
    seen = set()

    def watched_loss(params, batch):
        seen.add((jax.typeof(params["in"]).sharding.spec, jax.typeof(batch[0]).sharding.spec))
        return gathering_loss(params, batch)

    options: dict[str, Any] = {"loss_fn": watched_loss, "directory": tmp_path, "prefetch": 2}
    got = draw(make_mesh((4, 2), EXPLICIT), SPECS, steps_per_dispatch=4, **options)
    assert_same_draws(got, drawn())
    assert seen == {(jax.P(None, "data"), jax.P("data", None))}


def noisy_loss(params, batch, aux, key):
    loss = mean_loss(params, batch) + 0.1 * jax.random.normal(key, ()) * jnp.sum(params["in"])
    return loss, aux + loss


def test_sample_with_auxiliary_state_random_losses_and_batches_of_their_own():
    options: dict[str, Any] = {"loss_fn": noisy_loss, "aux": np.zeros(8, np.float32)}
    options |= {"stochastic": True, "batches": batches(8), "per_chain": True}
    got = draw(make_mesh((4, 2)), steps_per_dispatch=4, **options)
    assert_same_draws(got, draw(steps_per_dispatch=4, **options))
    assert np.ptp(got.params["aux"], axis=0).min() > 0


def test_a_run_goes_on_on_another_mesh(tmp_path):
    for mesh, number in ((make_mesh((8, 1)), 1), (make_mesh((4, 2)), 2), (None, 3)):
        got = draw(mesh, directory=tmp_path, num_draws=number)
        assert got.num_draws == number
    assert_same_draws(got, drawn())


def test_a_summed_loss_is_warned_of():
    def summed(params, batch):
        return len(batch[0]) * mean_loss(params, batch)

    with pytest.warns(UserWarning, match=r"looks like a sum.* 1\.000 of"):
        draw(make_mesh((2, 4)), loss_fn=summed, num_warmup=0, num_draws=1, thin=1)


def train(mesh=None, specs=None, **arguments) -> Any:
    defaults: dict[str, Any] = {"num_members": 8, "key": 0, "num_epochs": 3, "progress": False}
    defaults |= {"validation": batch_of(0), "batches": batches(), "mesh": mesh, "specs": specs}

    def initial(key):
        numbers = jax.random.normal(key, (48,))
        return {"in": numbers[:32].reshape(SHAPES["in"]), "out": numbers[32:].reshape(8, 2)}

    optimizer, loss = optax.adamw(optax.cosine_decay_schedule(1e-2, 50)), loss_for(mesh, specs)
    return optax_smile.warmstart(loss, initial, optimizer=optimizer, **defaults | arguments)


trained = functools.cache(train)


def test_warmstart_on_a_mesh(tmp_path):
    mesh = make_mesh((4, 2))
    got = train(mesh, SPECS, directory=tmp_path)
    assert_close(bare(got), bare(trained()))
    assert_spread(shardings_of(got), mesh, SPECS)
    with pytest.warns(UserWarning, match="epochs loaded from .* is finished"):
        finished = train(mesh, SPECS, directory=tmp_path)
    jax.tree.map(np.testing.assert_array_equal, bare(finished), bare(got))
    assert_spread(shardings_of(finished), mesh, SPECS)


def test_warmstart_with_batches_of_their_own():
    own: dict[str, Any] = {"batches": batches(8), "per_member": True}
    expected = bare(train(**own))
    assert_close(bare(train(make_mesh((4, 2)), **own)), expected)
    assert np.abs(expected["in"] - bare(trained())["in"]).max() > 0.01


def test_meshes_that_do_not_fit():
    other = make_mesh((4, 2), names=("model", "data"))
    for function, name in ((draw, "sample"), (train, "warmstart")):
        with pytest.raises(ValueError, match=rf"`{name}\(mesh=...\)` .* an axis 'chain'"):
            function(other)
        with pytest.raises(ValueError, match=rf"`{name}\(specs=...\)` must be a tree of jax.P"):
            function(make_mesh((1, 8)), {})
    message = r"mesh=...\)` must be a mesh whose axis 'chain' divides the 6 chains, got 8 rows"
    with pytest.raises(ValueError, match=message):
        train(make_mesh((8, 1)), num_members=6)
