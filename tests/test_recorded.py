"""Draws that a sampler sends to the host from inside the loop of another library."""

import copy
import fcntl
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runs import content_of, stub

import optax_smile

NUM_WARMUP, THIN, NUM_DRAWS, NUM_CHAINS = 200, 5, 20, 4
START = np.arange(3.0 * NUM_CHAINS).reshape(NUM_CHAINS, 3)
MEAN, STD = np.array([1.0, -2.0, 0.5]), np.array([0.5, 1.0, 2.0])


def gradient(w):
    """Gradient of a normal posterior with a flat prior."""
    return (w - jnp.asarray(MEAN)) / jnp.asarray(STD) ** 2


def psmile(**options):
    return optax_smile.psmile(num_data=1, prior_precision=0.0, key=0, **options)


def recorded(sampler: Any = None, **options):
    sampler = sampler or stub(0.01)
    return optax_smile.recorded(sampler, num_warmup=NUM_WARMUP, thin=THIN, **options)


def fit(tx, w, num_steps=NUM_WARMUP + NUM_DRAWS * THIN, state=None) -> Any:
    """A loop that returns the parameters and, as no `fit()` does, the state."""

    def step(carry, _):
        w, state = carry
        updates, state = tx.update(gradient(w), state, w)
        return (optax.apply_updates(w, updates), state), None

    begun = (w, tx.init(w) if state is None else state)
    return jax.lax.scan(step, begun, length=num_steps)[0]


def refuse(message, tx, *given, **options):
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(fit(tx, *given, **options))
        jax.effects_barrier()


@pytest.fixture
def doubles():
    """For programs that round differently: 300 steps enlarge a difference of floats to 1e-3."""
    with jax.enable_x64(True):
        yield


def test_draws_are_those_that_the_loop_itself_could_keep(doubles, tmp_path):
    """Four chains under `vmap`; without parameters the draws are the same, with a warning.

    Also if `init` was called only with shapes, and in a directory.
    """
    sampler = psmile()

    def step(carry, _):
        w, state = carry
        updates, state = sampler.update(gradient(w), state, w)
        w = optax.apply_updates(w, updates)
        return (w, state), optax_smile.last_accepted(state, w)

    def kept(w):
        return jax.lax.scan(step, (w, sampler.init(w)), length=NUM_WARMUP + NUM_DRAWS * THIN)[1]

    expected = jax.jit(jax.vmap(kept))(START)[:, NUM_WARMUP + THIN - 1 :: THIN]
    assert len(np.unique(expected[:, -1, 0])) == NUM_CHAINS
    tx = recorded(sampler)
    jax.jit(jax.vmap(lambda w: fit(tx, w)))(START)
    draws: Any = tx.draws()
    np.testing.assert_allclose(draws.params, expected, rtol=1e-5)
    np.testing.assert_array_equal(draws.start, START)
    every = np.arange(NUM_WARMUP + THIN, NUM_WARMUP + NUM_DRAWS * THIN + 1, THIN)
    np.testing.assert_array_equal(draws.trace["step"], np.tile(every, (NUM_CHAINS, 1)))
    assert draws.settings["name"] == "psmile"
    tx = recorded(optax_smile.tracked(sampler), directory=tmp_path)
    assert jax.eval_shape(tx.init, START[0]).sampler is not None
    blind: Any = tx._replace(update=lambda updates, state, params: tx.update(updates, state))
    jax.jit(jax.vmap(lambda w: fit(blind, w)))(START)
    with pytest.warns(UserWarning, match="does not pass `params` to `update`"):
        draws = tx.draws()
    np.testing.assert_allclose(draws.params, expected, rtol=1e-5)
    np.testing.assert_array_equal(draws.start, START)


def test_each_fit_has_draws_of_its_own_and_eager_calls_are_recorded():
    tx = optax_smile.recorded(stub(), num_warmup=1, thin=2)
    # Rebuild the transformation, like `equinox.filter_jit` does.
    update = jax.jit(jax.tree.map(lambda function: function, tx).update)
    for length, number in ((5, 2), (9, 4)):
        w, state = START[1], tx.init(START[1])
        for _ in range(length):
            updates, state = update(gradient(w), state, w)
            w = optax.apply_updates(w, updates)
        assert tx.draws().num_draws == copy.deepcopy(tx).draws().num_draws == number
    tx.init(START[1])
    assert tx.draws().num_draws == number
    states = jax.tree.map(lambda *x: jnp.stack(x), *map(tx.init, START))
    with pytest.raises(Exception, match=r"state=...\)` must be that of one call of `init`"):
        for _ in range(3):
            states = jax.vmap(tx.update)(START, states, START)[1]
        jax.effects_barrier()


def test_a_loop_that_goes_on_from_its_checkpoint_neither_loses_nor_doubles(tmp_path):
    tx = recorded(directory=tmp_path)
    w, state = fit(tx, START[0], NUM_WARMUP + 4 * THIN)
    fit(tx, w, 5 * THIN, state)
    expected = tx.draws().params
    assert expected.shape == (1, 9, 3)
    before = content_of(tmp_path)
    # The same process resumes from an earlier state, then another process does, or it starts again.
    fit(tx, w, 2 * THIN, state)
    np.testing.assert_array_equal(tx.draws().params, expected)
    again, in_memory = recorded(directory=tmp_path), recorded()
    fit(again, w, 3 * THIN, state)
    for other in again, in_memory:
        fit(other, START[0], NUM_WARMUP + 4 * THIN)
    for length in (5, 2):
        fit(in_memory, w, length * THIN, state)
    for other in again, in_memory:
        np.testing.assert_array_equal(other.draws().params, expected)
    refuse(
        r"recorded\(state=...\).* with other draws.* at step 225", in_memory, w + 0.1, THIN, state
    )
    # Rejected: other draws of the same fit, draws of another fit, later draws, another sampler.
    other = r"recorded\(directory=...\).* with other draws, up to step 245, at"
    length = NUM_WARMUP + THIN
    refuse(f"{other} step 205", recorded(directory=tmp_path), START[1], length)
    refuse(f"{other} step 225", recorded(directory=tmp_path), w + 0.1, THIN, state)
    w, state = fit(recorded(), w, 10 * THIN, state)
    refuse(f"{other} step 275", recorded(directory=tmp_path), w, THIN, state)
    sgld = recorded(optax_smile.sgld(1e-3, num_data=1, key=0), directory=tmp_path)
    refuse(r"recorded\(sampler=...\)` must be one with name = None", sgld, START[0], length)
    with pytest.raises(Exception, match=r"recorded\(params=...\)` must be one with leaves"):
        other = recorded(directory=tmp_path)
        w, state = jnp.ones(2), other.init(jnp.ones(2))
        for _ in range(length):
            _, state = other.update(w, state, w)
        jax.effects_barrier()
    assert content_of(tmp_path) == before


def test_a_folder_is_locked_from_init_to_draws(tmp_path):
    lock = "import fcntl, sys; fcntl.flock(open(sys.argv[1], 'a+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"

    def is_free() -> bool:
        command = [sys.executable, "-c", lock, str(tmp_path / ".lock-0")]
        return not subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode

    tx = recorded(directory=tmp_path)
    state = tx.init(START[0])
    assert not is_free()
    w, state = fit(tx, START[0], NUM_WARMUP + THIN, state)
    # Draws are read meanwhile, and another fit of this process may follow.
    jax.effects_barrier()
    assert optax_smile.load_snapshots(tmp_path).num_draws == 1 and not is_free()
    assert tx.draws().num_draws == 1 and is_free()
    fit(tx, w, THIN, state)
    jax.effects_barrier()
    assert not is_free() and tx.draws().num_draws == 2 and is_free()
    with (tmp_path / ".lock-0").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="no other live run"):
            recorded(directory=tmp_path).init(START[0])


def test_steps_that_are_no_draws_leave_no_gap(tmp_path):
    given = {"num_data": 1, "key": 0, "total_steps": 40, "num_cycles": 2, "exploration": 0.5}
    cyclic = optax_smile.cyclical_sgld(1e-3, **given)
    tx = optax_smile.recorded(cyclic, num_warmup=0, thin=5, directory=tmp_path)
    fit(tx, START[0], 40)
    assert tx.draws().trace["step"].tolist() == [[15, 20, 35, 40]]


def test_what_fails_reaches_the_user(tmp_path, monkeypatch):
    tx = recorded()
    message = f"nothing is recorded yet. The first draw is step {NUM_WARMUP + THIN}"
    with pytest.raises(ValueError, match=message):
        tx.draws()
    with pytest.raises(ValueError, match=r"`recorded\(state=...\)` must be what `init` or"):
        tx.update(START[0], stub().init(START[0]), START[0])

    scaled = recorded(psmile())

    def halve(*given):
        updates, state = scaled.update(*given)
        return optax.tree.scale(0.5, updates), state

    fit(scaled._replace(update=halve), START[0], NUM_WARMUP + THIN)
    with pytest.raises(ValueError, match="the loop changed the updates"):
        scaled.draws()

    full = recorded(directory=tmp_path / "full")
    replace = os.replace

    def failing(draft, path):
        if path.name.startswith("draw-00000002"):
            raise OSError(28, "No space left on device", str(path))
        replace(draft, path)

    monkeypatch.setattr(os, "replace", failing)
    refuse("No space left", full, START[0], NUM_WARMUP + 5 * THIN)
    with pytest.raises(OSError, match="No space left"):
        full.draws()
    assert optax_smile.load_snapshots(tmp_path / "full").num_draws == 2


def test_recording_ends_with_a_warning_where_the_counter_does():
    # The counter stays where a draw would be.
    tx = optax_smile.recorded(stub(), num_warmup=(2**31 - 1) % THIN, thin=THIN)
    state = optax.tree.set(tx.init(jnp.asarray(MEAN)), num_gradients=jnp.int32(2**31 - 24))
    fit(tx, jnp.asarray(MEAN), 40, state)
    with pytest.warns(UserWarning, match=r"`draws`: recording ends at call 2147483647 of `update`"):
        draws = tx.draws()
    counts = draws.trace["num_gradients"][0]
    assert np.all(np.diff(counts) == THIN) and 2**31 - 1 - THIN <= counts[-1] < 2**31 - 1


def test_a_leaf_whose_gradient_is_always_zero_is_named():
    """The loop hides the loss: `stop_gradient` shows as zeros at all draws."""
    sampler = optax_smile.sgld(0.1, num_data=1, key=0)
    labels = {"body": "frozen", "head": "sampled"}
    frozen = optax.partition({"sampled": sampler, "frozen": optax.set_to_zero()}, labels)
    start = {"body": jnp.ones(3), "head": jnp.ones(3)}

    def draws_of(tx, calls) -> Any:
        tx = optax_smile.recorded(tx, num_warmup=0)

        def step(carry, _):
            params, state = carry
            grads = {"body": 0 * params["body"], "head": params["head"]}
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        jax.block_until_ready(jax.lax.scan(step, (start, tx.init(start)), length=calls))
        return tx.draws()

    said = r"^`draws`: the gradient of \['body'\] was zero at all 40 draws\. .* `optax.partition`"
    with pytest.warns(UserWarning, match=said):
        draws_of(sampler, 40)
    draws_of(sampler, 9)
    assert np.all(draws_of(frozen, 40).params["body"] == 1)
    with pytest.raises(ValueError, match=r"`recorded\(sampler=...\)` must .* in `optax.masked` al"):
        draws_of(optax.masked(sampler, {"body": False, "head": True}), 9)
