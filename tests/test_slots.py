"""Another stage is one file and one argument; `published` is the driver with other stages."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paper import PAPER
from test_contract import follow

import optax_smile
from optax_smile import _settings
from optax_smile.potential import Potential
from optax_smile.samplers._microcanonical import compose
from optax_smile.stages.guardrail import guardrail
from optax_smile.stages.momentum import microcanonical
from optax_smile.stages.preconditioner import Preconditioner, identity, moving_variance, whiten

LOSSES = 2.0 + 0.1 * np.arange(8)
PARAMS = {"w": jnp.arange(1.0, 7).reshape(2, 3) / 4, "b": jnp.full(3, 0.5)}


class Fixed(NamedTuple):
    """A scale that was known before."""

    known: Any

    def inverse_scale(self):
        return jax.tree.map(lambda x: 1 / x, self.known)


def fixed_scale(known) -> Preconditioner:
    return Preconditioner(
        init=lambda params: Fixed(known),
        whiten=whiten,
        deviation=lambda state, gradient: None,
        observe=lambda state, gradient, worth, direction: state,
    )


def path(tx, num_gradients=8) -> Any:
    grads = [jax.tree.map(lambda x, n=n: jnp.sin(9 * x + 2 * n), PARAMS) for n in range(8)]
    with jax.disable_jit():
        return follow(tx, PARAMS, list(zip(grads, LOSSES, strict=True))[:num_gradients])[0]


def composed(preconditioner):
    stages = {"momentum": microcanonical("mine", "leapfrog"), "guardrail": guardrail("mine")}
    return compose("mine", Potential(10), preconditioner=preconditioner, step_size=0.1, **stages)


def test_a_preconditioner_of_ones_own():
    """A scale of one changes nothing; another one moves along u / s."""
    ones = jax.tree.map(jnp.ones_like, PARAMS)
    expected = path(optax_smile.smile(0.1, tuner=None, decoherence_length=None, num_data=10))
    for own in (identity(), fixed_scale(ones)):
        chex.assert_trees_all_close(path(composed(own)), expected, rtol=1e-5, atol=1e-6)
    moved = path(composed(fixed_scale({"w": 10 * ones["w"], "b": ones["b"]})), 1)
    assert np.abs(moved["w"] - PARAMS["w"]).max() < 0.2 * np.abs(moved["b"] - 0.5).max()


@pytest.mark.parametrize("name", ["smile", "psmile", "smile_naive", "psmile_naive"])
def test_the_papers_samplers(name):
    """The paper's arguments of `smile`; `psmile` has another preconditioner."""
    prior = {"prior_mean": 0.5, "prior_precision": 2.0, "temperature": 3.0, "num_data": 10}
    tx = getattr(optax_smile.published, name)(0.1, **prior)
    # What the summary of a run judges rejections and drifts by.
    told: Any = _settings.of(tx, PARAMS)
    naive, state = name.endswith("naive"), tx.init(PARAMS)
    assert told["name"] == f"published.{name}" and told["integrator"] == "minimal_norm"
    assert told["reject_quantile"] == (None if naive else 0.98)
    assert told["tuner"] is None if naive else told["tuner"]["name"] == "quantile_tuner"
    assert state.gradients_per_step == 2 and state.key is None
    if name.startswith("psmile"):
        chex.assert_trees_all_equal_structs(state.preconditioner, moving_variance().init(PARAMS))
        assert np.abs(path(tx)["b"] - 0.5).max() > 0.01
    else:
        options = PAPER | ({"tuner": None, "reject_quantile": None} if naive else {})
        chex.assert_trees_all_equal(path(tx), path(optax_smile.smile(0.1, **options, **prior)))
