"""A prior that is a function: the same chains as the Gaussian where it is one, and others."""

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

PRECISION = 3.0


def gaussian(params):
    shifted = jax.tree.map(lambda x: x - 0.5, params)
    return -PRECISION / 2 * optax.tree.norm(shifted, squared=True)


@pytest.mark.parametrize("case", ["sghmc", "psmile, rich"])
def test_a_gaussian_function_is_the_gaussian_prior(case):
    common: Any = {"step_size": 0.1, "num_data": 3, "temperature": 0.5}
    gauss = common | {"prior_precision": PRECISION, "prior_mean": 0.5}
    function = common | {"prior_precision": 0, "log_prior": gaussian}
    # The third closes a step of two gradients.
    calls = [call for call in GRADIENTS if np.isfinite(call[1])]
    with jax.disable_jit():
        params, seen, _ = follow(make(case, **gauss), PARAMS, calls)
        got, told, _ = follow(make(case, **function), PARAMS, calls)
    chex.assert_trees_all_close(got, params, rtol=2e-4, atol=2e-5)
    assert told.num_rejected == told.num_nonfinite == 0
    np.testing.assert_allclose(told.energy_change, seen.energy_change, rtol=1e-3, atol=2e-3)


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
