"""Another stage is one file and one argument."""

import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_smile
from optax_smile import _settings
from optax_smile.potential import Potential
from optax_smile.samplers._microcanonical import compose
from optax_smile.stages.guardrail import guardrail
from optax_smile.stages.momentum import microcanonical
from optax_smile.stages.preconditioner import Preconditioner, identity, whiten

PARAMS = {"w": jnp.ones((2, 3)), "b": jnp.full(3, 0.5)}


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


def path(tx, num_gradients=20) -> Any:
    params: Any = PARAMS
    state, update = tx.init(PARAMS), jax.jit(tx.update)
    for call in range(num_gradients):
        grads = jax.tree.map(lambda x, call=call: jnp.sin(3 * x + call), params)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


def composed(preconditioner, integrator="leapfrog"):
    return compose(
        "mine",
        Potential(10),
        preconditioner=preconditioner,
        momentum=microcanonical("mine", integrator),
        guardrail=guardrail("mine"),
        step_size=0.1,
    )


def test_a_preconditioner_of_ones_own():
    """A scale of one is `smile_naive`; another one moves along u / s."""
    ones = jax.tree.map(jnp.ones_like, PARAMS)
    expected = path(optax_smile.smile_naive(0.1, num_data=10))
    for own in (identity(), fixed_scale(ones)):
        for got, leaf in zip(
            jax.tree.leaves(path(composed(own))), jax.tree.leaves(expected), strict=True
        ):
            np.testing.assert_allclose(got, leaf, rtol=1e-5, atol=1e-6)
    tens = jax.tree.map(lambda x: 10 * x, ones)
    moved = path(composed(fixed_scale({"w": tens["w"], "b": ones["b"]})), 1)
    assert np.abs(moved["w"] - 1).max() < 0.2 * np.abs(moved["b"] - 0.5).max()


@pytest.mark.parametrize("name", ["smile_naive", "psmile_naive"])
def test_the_published_code_is_an_exchanged_stage(name):
    file = Path(__file__).parent.parent / "benchmarks" / "as_shipped.py"
    spec: Any = importlib.util.spec_from_file_location("as_shipped", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    moved = path(module.as_shipped(name, 0.1, 10, 100))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(moved))
    assert np.abs(moved["b"] - 0.5).max() > 0.01


@pytest.mark.parametrize("name", ["smile", "psmile", "smile_naive", "psmile_naive"])
@pytest.mark.filterwarnings("ignore:.*got no `value`")
def test_the_papers_samplers(name):
    """`published` is the same driver with the paper's stages."""
    tx = getattr(optax_smile.published, name)(0.1, num_data=10, prior_mean=0.5)
    # What the summary of a run judges rejections and drifts by.
    told: Any = _settings.of(tx, PARAMS)
    tuned = not name.endswith("naive")
    assert told["name"] == f"published.{name}" and told["integrator"] == "minimal_norm"
    assert told["reject_quantile"] == (0.98 if tuned else None)
    assert (told["tuner"] is not None) == tuned
    state: Any = tx.init(PARAMS)
    assert state.gradients_per_step == 2 and state.key is None
    assert (state.preconditioner is None) == name.startswith("smile")
    moved = path(tx)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(moved))
    assert np.abs(moved["b"] - 0.5).max() > 0.01
    with pytest.raises(ValueError, match=r"`published\.\w+\(step_size=...\)` must be > 0"):
        getattr(optax_smile.published, name)(-0.1, num_data=10)


def test_the_papers_samplers_know_the_posterior():
    """Four times the data and the precision at four times the temperature are the same."""

    def moved(num_data, precision, temperature) -> Any:
        posterior = {"num_data": num_data, "prior_precision": precision, "prior_mean": 0.5}
        build = optax_smile.published.psmile_naive
        return path(build(0.1, temperature=temperature, **posterior), 4)["w"]

    one, hot, other = jax.jit(jax.vmap(moved))(
        jnp.array([1.0, 4.0, 1.0]), jnp.array([3.0, 12.0, 0.3]), jnp.array([1.0, 4.0, 1.0])
    )
    np.testing.assert_allclose(hot, one, atol=1e-5)
    assert np.abs(other - one).max() > 1e-3
