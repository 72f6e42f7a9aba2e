"""A sampler is a pair of functions, which JAX, `copy` and cloudpickle rebuild; and its edges."""

import copy
import dataclasses
import warnings
from typing import Any

import chex
import cloudpickle
import equinox as eqx
import equinox.internal
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from public_samplers import settings_of

import optax_smile

PARAMS = {"w": jnp.arange(1.0, 4.0)}
X = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
Y = X @ np.ones(3, np.float32)
SMALL: dict[str, Any] = {"num_data": 40, "key": 0}


TRANSFORMATIONS: dict[str, Any] = {
    "sghmc": lambda: optax_smile.sghmc(lambda count: 0.1, **SMALL),
    "recorded": lambda: optax_smile.recorded(optax_smile.sgld(1e-3, **SMALL), num_warmup=1),
    "scale_by_gradient_noise": optax_smile.scale_by_gradient_noise,
}
UNMOVED: dict[str, Any] = {
    "published.psmile": lambda: optax_smile.published.psmile(1e-3, num_data=40),
    "psmile": lambda: optax_smile.psmile(**SMALL),
    "cyclical_sgld": lambda: optax_smile.cyclical_sgld(1e-3, total_steps=9, num_cycles=2, **SMALL),
}


@dataclasses.dataclass
class Config:
    tx: Any


def moved(tx):
    updates, _ = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    return updates["w"]


def copies_of(tx):
    leaves, structure = jax.tree.flatten(tx)
    return {
        "tree": jax.tree.unflatten(structure, leaves),
        "map": jax.tree.map(lambda x: x, tx),
        "copy": copy.copy(tx),
        "deepcopy": copy.deepcopy({"tx": tx})["tx"],
        "asdict": dataclasses.asdict(Config(tx))["tx"],
        "pickle": cloudpickle.loads(cloudpickle.dumps(tx)),
    }


@pytest.mark.parametrize("name", [*UNMOVED, *TRANSFORMATIONS])
def test_it_survives_what_rebuilds_it(name):
    tx = (UNMOVED | TRANSFORMATIONS)[name]()
    copies, settings = copies_of(tx), settings_of(tx, PARAMS)
    for way, made in copies.items():
        assert type(made) is type(tx) and settings_of(made, PARAMS) == settings, way
        if name in UNMOVED:
            chex.assert_trees_all_equal(made.init(PARAMS), tx.init(PARAMS))
    if name in UNMOVED:
        return
    expected = moved(tx)
    for way, made in copies.items():
        np.testing.assert_array_equal(moved(made), expected, err_msg=way)
    traces = []

    @eqx.filter_jit
    def step(params, state, tx):
        traces.append(1)
        return tx.update(params, state, params)

    for made in (tx, copies["tree"]):
        updates, _ = step(PARAMS, made.init(PARAMS), made)
        # Compiled as one program, with other rounding than the call by itself.
        np.testing.assert_allclose(updates["w"], expected, rtol=1e-4)
    assert len(traces) == 1
    # Optimistix makes what functions enclose static, which JAX hashes.
    closed = eqx.internal.closure_to_pytree(tx.update)
    call = eqx.filter_jit(lambda update, *given: update(*given)[0])
    call.lower(closed, PARAMS, tx.init(PARAMS), PARAMS)


def test_copies_of_a_recorded_sampler_have_its_draws():
    tx = TRANSFORMATIONS["recorded"]()
    made = jax.tree.map(lambda x: x, tx)
    state, params = made.init(PARAMS), PARAMS
    for _ in range(4):
        updates, state = made.update(params, state, params)
        params = optax.apply_updates(params, updates)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert copy.deepcopy(tx).draws().num_draws == made.draws().num_draws > 0


def test_seeds_are_those_of_jax_and_others_are_refused():
    seeds: Any = 0, 2**31, 2**32 - 1, np.uint32(7)
    for seed in seeds:
        state: Any = optax_smile.psmile(num_data=40, key=seed).init(PARAMS)
        np.testing.assert_array_equal(state.key, jax.random.key_data(jax.random.key(seed)))
    wrong: Any = -1, 2**32, np.int64(2**32), np.int32(-1), 2**70
    for seed in wrong:
        with pytest.raises(ValueError, match=r"key=...\)` must be .* from 0 to 2\*\*32 - 1"):
            optax_smile.psmile(num_data=40, key=seed)


def test_an_eager_update_and_stats_do_not_wait_for_the_device():
    tx, params = optax_smile.sgld(1e-3, **SMALL), PARAMS
    state = tx.init(params)
    states = jax.tree.map(lambda x: jnp.stack([x, x]), state)

    @jax.jit
    def slow(x, number=20):
        matrix = jax.lax.fori_loop(0, number, lambda _, a: a @ a / 800, jnp.ones((800, 800)))
        return x * matrix[0, 0].astype(x.dtype)

    # Compile all.
    jax.block_until_ready((slow(params["w"], 1), slow(states.key, 1)))
    updates, after = tx.update(params, state, params)
    jax.block_until_ready(tx.update(params, after, optax.apply_updates(params, updates)))
    optax_smile.stats(state)
    gradient = {"w": slow(params["w"])}
    updates, after = tx.update(gradient, state, params)
    tx.update(gradient, after, optax.apply_updates(params, updates))
    assert not gradient["w"].is_ready()
    waiting = optax.tree.set(states, key=slow(states.key))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        told = optax_smile.stats(waiting)
    noise_id: Any = told.noise_id
    assert not noise_id.is_ready()
    with pytest.warns(UserWarning, match="equal keys"):
        optax_smile.stats(jax.block_until_ready(waiting))


def loss(params, batch):
    return jnp.mean((batch[0] @ params["w"] - batch[1]) ** 2) / 2


def outputs(params, x):
    return x @ params["w"], jnp.float32(0)


@pytest.mark.parametrize(
    "flags",
    [
        {"jax_debug_nans": True, "jax_debug_infs": True},
        {"jax_disable_jit": True, "jax_numpy_dtype_promotion": "strict"},
    ],
)
def test_flags_of_jax_are_for_the_users_code(flags):
    start = {"w": jnp.stack([PARAMS["w"], 2 * PARAMS["w"]])}
    given: Any = {"num_warmup": 1, "num_draws": 2, "key": 0, "progress": False}
    tx = optax_smile.sgld(1e-3, **SMALL)
    before = {flag: getattr(jax.config, flag) for flag in flags}
    for flag, value in flags.items():
        jax.config.update(flag, value)
    try:
        draws = optax_smile.sample(loss, start, [(X, Y)], tx, **given)
        found = optax_smile.predict(outputs, draws, X, likelihood="gaussian", targets=Y, per="draw")
        assert str(optax_smile.diagnostics.summary(draws, found))
        _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
        optax_smile.last_accepted(state, PARAMS)
        assert np.all(np.isfinite(draws.params["w"])) and str(optax_smile.stats(state))
    finally:
        for flag, value in before.items():
            jax.config.update(flag, value)


def test_any_zero_is_a_precision_of_zero():
    for zero in 0, 0.0, np.float32(0), np.int64(0), jnp.zeros(()):
        optax_smile.smile(log_prior=lambda p: jnp.zeros(()), prior_precision=zero, **SMALL)
    with pytest.raises(ValueError, match="must be 0 together"):
        optax_smile.smile(log_prior=lambda p: jnp.zeros(()), prior_precision=np.float32(1), **SMALL)
