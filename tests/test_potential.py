"""The energy, its gradient and the prior's part of its change, against float64."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs
from public_samplers import SAMPLERS, settings_of
from test_contract import GRADIENTS, PARAMS, follow, injected, make

import optax_smile
from optax_smile import potential
from optax_smile.potential import Potential


def test_prior_change_at_a_million_parameters_where_the_difference_of_norms_fails():
    rng = np.random.default_rng(6)
    params = jnp.asarray(3 * rng.standard_normal(10**6), jnp.float32)
    displacement = jnp.asarray(1e-3 * rng.standard_normal(10**6), jnp.float32)
    x, dx = np.float64(params), np.float64(displacement)
    exact = 0.5 * np.sum((x + dx) ** 2) - 0.5 * np.sum(x**2)
    terms: Any = potential.prior_terms(Potential(num_data=1), params, displacement)
    naive = 0.5 * jnp.sum((params + displacement) ** 2) - 0.5 * jnp.sum(params**2)
    assert abs(float(jnp.sum(terms)) - exact) < 1e-5
    assert abs(float(naive) - exact) > 1e-2


@pytest.mark.parametrize("num_data, expected", [(4_000, 1.0), (50, 2 * 0.02 * 50 / 21)])
def test_cold_temperature_goes_with_the_numbers_of_parameters_and_data(num_data, expected):
    weights = {"scalar": jnp.ones(()), "dense": {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(8)}}
    params = weights | {"table": jnp.arange(9), "activation": jax.nn.relu}
    shapes = jax.eval_shape(lambda: weights)
    for tree in params, shapes:
        found = optax_smile.cold_temperature(num_data, tree, excess=0.02)
        assert isinstance(found, float) and found == expected
    of_traced = jax.jit(lambda number: optax_smile.cold_temperature(number, shapes, 0.02))
    np.testing.assert_allclose(of_traced(jnp.int32(num_data)), expected, rtol=1e-6)
    # The default allows .08 nats; more tokens than an int32 can count.
    assert optax_smile.cold_temperature(1, shapes) == 2 * 0.08 / 21
    assert optax_smile.cold_temperature(3e9, shapes) == 1
    with pytest.raises(ValueError, match=r"params=...\)` must be the parameters of a network"):
        optax_smile.cold_temperature(num_data, {"table": jnp.arange(9)})


def test_a_summary_says_that_a_posterior_is_cold():
    start, batches = jnp.ones((2, 3)), [jnp.ones(3)]
    tx = optax_smile.sgld(0.1, num_data=10, temperature=0.25, key=0)
    steps: Any = {"num_warmup": 0, "num_draws": 3, "key": 0, "progress": False}
    loss = lambda w, batch: jnp.mean((w - batch) ** 2)  # noqa: E731
    cold: Any = optax_smile.sample(loss, start, batches, tx, **steps)
    warm = optax_smile.Snapshots(cold.params, cold.trace | {"temperature": np.ones((2, 3))})
    for draws, temperature in (cold, 0.25), (warm, 1.0):
        found = optax_smile.diagnostics.summary(draws)
        np.testing.assert_array_equal(found.temperature, np.full(2, temperature))
        assert ("temperature 0.25: a cold posterior" in str(found)) == (temperature < 1)


def test_bound_is_exact_for_one_curvature_and_above_for_several():
    """Also the inverse, the prior of an allowed excess; it is 0 if any prior suffices."""
    size, curvatures = 400, np.geomspace(1e-2, 3, 400)
    posterior = Potential(200, 3.0, 2.0)
    bound, least = potential.excess_loss, potential.least_excess_loss
    exact, several = size * 0.5 / (200 * 0.5 + 3), np.sum(curvatures / (200 * curvatures + 3))
    assert bound(posterior, 0.5 * size, size) == pytest.approx(exact)
    assert several < bound(posterior, curvatures.sum(), size) < 3 * several
    of_squares = least(posterior, curvatures.sum(), (curvatures**2).sum())
    assert several / 3 < of_squares < several
    assert least(posterior, 0.5 * size, 0.25 * size) == pytest.approx(exact)
    assert least(posterior, 0.0, 1.0) == bound(posterior, 0.0, size) == 0
    assert bound(posterior, np.inf, size) == pytest.approx(2 * size / 200 / 2)
    for allowed, temperature in (0.01, 1.0), (0.02, 0.5):
        tempered = Potential(200, temperature=temperature)
        strength = potential.strength_for(tempered, 7.0, size, allowed)
        found = bound(tempered._replace(prior_precision=strength), 7.0, size)
        assert found == pytest.approx(allowed)
    assert potential.strength_for(posterior, 7.0, size, 2 * size / 200) == 0


# A prior that is a function.


def gaussian(params):
    return -optax.tree.norm(params, squared=True)


@pytest.mark.parametrize(
    ("name", "step_size", "value"), [("psmile", None, 0.0), ("sgld", 0.05, None)]
)
def test_where_there_is_no_density_a_step_is_rejected(name, step_size, value):
    def log_prior(x: jax.Array) -> jax.Array:
        inside = jnp.all(x > 0)
        return jnp.where(inside, -jnp.sum(jnp.where(inside, x, 1.0)), -jnp.inf)

    tx: Any = SAMPLERS[name](step_size, num_data=7, prior_precision=0, log_prior=log_prior, key=0)

    def chain(key):
        """Draws of the prior alone: the loss is zero."""
        given = lambda x, _: jnp.zeros_like(x), jnp.arange(300)
        return runs.follow(tx, key, jnp.ones(20), *given, value=value)

    draws = np.asarray(jax.jit(jax.vmap(chain))(jax.random.split(jax.random.key(0), 4)))
    assert (draws > 0).all() and draws.std() > 0.1


def test_a_function_has_no_precision_and_gives_a_finite_scalar():
    with pytest.raises(
        ValueError, match=r"prior_precision=.* 0 together with `log_prior`, got 1\.0"
    ):
        make("psmile", log_prior=gaussian)
    for zero in 0, 0.0, np.float32(0), np.int64(0), jnp.zeros(()):
        make("psmile", log_prior=gaussian, prior_precision=zero)
    for wrong in (lambda params: params["layer"]["b"], lambda params: params["none"], lambda _: 1):
        with pytest.raises(ValueError, match=r"log_prior=.*that returns a scalar"):
            make("psmile", log_prior=wrong, prior_precision=0).init(PARAMS)
    with pytest.raises(ValueError, match=r"log_prior=.*finite at the initial parameters.*got -inf"):
        make("psmile", log_prior=lambda _: jnp.float32(-jnp.inf), prior_precision=0).init(PARAMS)


def test_hyperparameters_and_settings_know_it(case="sghmc"):
    """Other functions than `static_args` are schedules to `inject_hyperparams`."""
    function: Any = {"prior_precision": 0, "log_prior": gaussian}
    both = plain, _ = make(case, **function), injected(case, **function)
    with jax.disable_jit():
        ends = [follow(tx, PARAMS, GRADIENTS[:2])[0] for tx in both]
    chex.assert_trees_all_close(*ends, rtol=1e-5)
    assert "gaussian" in str(settings_of(plain, PARAMS))
