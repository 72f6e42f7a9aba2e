"""A prior that is a function: the same chains as the Gaussian where it is one, and others."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_contract import INPUTS, PARAMS, SAMPLERS, TARGETS, build

import optax_smile

PRECISION = 3.0
# One that is not finite is a test of its own.
CALLS = [0, 1, 2, 3, 4, 6, 7, 8, 9]


def loss_fn(params, batch):
    inputs, targets = batch
    errors = inputs @ params["layer"]["w"] + params["layer"]["b"][None] - targets
    return jnp.mean(errors**2)


def gaussian(params):
    shifted = jax.tree.map(lambda x: x - 0.5, params)
    return -PRECISION / 2 * optax.tree.norm(shifted, squared=True)


def path(tx):
    """Parameters of each call, and what the sampler says of the last one."""
    params, state, seen = PARAMS, tx.init(PARAMS), []

    @jax.jit
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    for call in CALLS:
        params, state = step(params, state, (INPUTS[call], TARGETS[call]))
        seen.append(params)
    return seen, optax_smile.stats(state)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_gaussian_function_is_the_gaussian_prior(name):
    common = {"temperature": 0.5}
    by_function, told = path(build(SAMPLERS[name], prior_precision=0, log_prior=gaussian, **common))
    by_numbers, expected = path(
        build(SAMPLERS[name], prior_precision=PRECISION, prior_mean=0.5, **common)
    )
    without, _ = path(build(SAMPLERS[name], prior_precision=0, **common))
    for a, b in zip(by_function, by_numbers, strict=True):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5), a, b)
    assert told["num_rejected"] == expected["num_rejected"] == 0
    np.testing.assert_allclose(
        told["energy_change"], expected["energy_change"], rtol=1e-3, atol=2e-3
    )
    moved = jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), by_function[-1], without[-1])
    assert max(jax.tree.leaves(moved)) > 1e-4


def draws_of(tx, params, num_steps, num_chains=16, num_warmup=500):
    """Draws `[chain, step, d]` of the prior alone: the loss is zero."""

    def chain(key):
        state = optax.tree.set(tx.init(params), key=jax.random.key_data(key))

        def call(carry, _):
            at, state = carry
            updates, state = tx.update(jnp.zeros_like(at), state, at, value=jnp.zeros(()))
            after = optax.apply_updates(at, updates)
            return (after, state), optax_smile.last_accepted(state, after)

        return jax.lax.scan(call, (params, state), length=num_warmup + num_steps)[1][num_warmup:]

    return np.asarray(jax.jit(jax.vmap(chain))(jax.random.split(jax.random.key(0), num_chains)))


def test_another_prior_is_sampled():
    """A logistic density: variance pi^2 / 3, mean |x| 2 log 2."""

    def log_prior(x):
        return jnp.sum(-x - 2 * jnp.log1p(jnp.exp(-x)))

    tuner = optax_smile.angle_tuner(0.1)
    tx = optax_smile.smile(num_data=7, prior_precision=0, log_prior=log_prior, tuner=tuner, key=0)
    draws = draws_of(tx, jnp.linspace(-2, 2, 20), 2_000)
    for values, expected in ((draws**2, np.pi**2 / 3), (np.abs(draws), 2 * np.log(2)), (draws, 0)):
        chains = values.mean(axis=(1, 2))
        error = chains.std(ddof=1) / np.sqrt(len(chains))
        assert abs(chains.mean() - expected) < 4.5 * error
        assert error < 0.06


@pytest.mark.parametrize("name", ["psmile", "sgld"])
def test_where_there_is_no_density_a_step_is_rejected(name):
    def log_prior(x: jax.Array) -> jax.Array:
        inside = jnp.all(x > 0)
        return jnp.where(inside, -jnp.sum(jnp.where(inside, x, 1.0)), -jnp.inf)

    step_size = {"sgld": 0.05, "psmile": None}[name]
    tx: Any = SAMPLERS[name](step_size, num_data=7, prior_precision=0, log_prior=log_prior, key=0)
    draws = draws_of(tx, jnp.ones(20), 300, num_chains=4, num_warmup=0)
    assert (draws > 0).all()
    assert draws.std() > 0.1


def test_wrong_priors_are_named():
    def make(log_prior, **others):
        return optax_smile.psmile(num_data=9, log_prior=log_prior, key=0, **others)

    with pytest.raises(ValueError, match=r"prior_precision=.* 0 where `log_prior` .*got 1\.0"):
        make(gaussian)
    with pytest.raises(ValueError, match=r"log_prior=.*a function of \(params\), got 3"):
        make(3.0, prior_precision=0)
    with pytest.raises(ValueError, match=r"log_prior=.*a function of \(params\)"):
        make(lambda a, b: a, prior_precision=0)
    for wrong in (lambda params: params["layer"]["b"], lambda params: params["none"], lambda _: 1):
        with pytest.raises(ValueError, match=r"log_prior=.*that returns a scalar"):
            make(wrong, prior_precision=0).init(PARAMS)
    with pytest.raises(ValueError, match=r"log_prior=.*finite at the parameters.*got -inf"):
        make(lambda _: -jnp.inf * jnp.ones(()), prior_precision=0).init(PARAMS)


def test_hyperparameters_take_it_as_static():
    """Other functions are schedules to them."""
    static = "log_prior", "prior_precision"
    injected = optax.inject_hyperparams(optax_smile.psmile, static_args=static)
    arguments: Any = {"num_data": 192, "prior_precision": 0, "log_prior": gaussian}
    tx, plain = injected(**arguments, key=jax.random.key(0)), optax_smile.psmile(**arguments, key=0)
    grads = jax.grad(lambda params: loss_fn(params, (INPUTS[0], TARGETS[0])))(PARAMS)
    found, expected = (
        optax.tree.norm(t.update(grads, t.init(PARAMS), PARAMS, value=jnp.float32(0.5))[0])
        for t in (tx, plain)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_run_tells_its_prior():
    tx = optax_smile.psmile(num_data=192, prior_precision=0, log_prior=gaussian, key=0)
    batches = [(INPUTS[0], TARGETS[0])] * 12
    draws = optax_smile.sample(
        loss_fn,
        jax.tree.map(lambda x: x[None], PARAMS),
        batches,
        tx,
        num_warmup=4,
        num_draws=4,
        thin=2,
        key=0,
        progress=False,
    )
    assert "gaussian" in str((draws.settings or {})["log_prior"])
