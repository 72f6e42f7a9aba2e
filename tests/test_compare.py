"""Rivals and scores of `examples/compare.py` against closed forms, and a run of all methods."""

import math
import types
from typing import Any

import compare
import jax.numpy as jnp
import numpy as np
import pytest
import verdict
from methods import METHODS
from rivals import ivon_optimizer, last_layer_laplace


def test_last_layer_laplace_of_linear_regression():
    """Covariance (X^T X / sigma^2 + delta I)^-1 of two weights, 20,000 draws: 4.5 errors of a
    variance are 4.5 %; the noise level is no part of the last layer.
    """
    x = np.random.default_rng(0).normal(size=(30, 2)).astype(np.float32)
    params = {"last": jnp.ones((1, 2, 1)), "log_std": jnp.full((1,), np.log(0.5))}

    def apply(params, x):
        return (x @ params["last"])[:, 0], params["log_std"]

    made = last_layer_laplace(apply, params, [(x, None)], "gaussian", "last")
    draws = made(3.0, 20_000, 0).params
    exact = np.linalg.inv(x.T @ x / 0.25 + 3.0 * np.eye(2))
    covariance = np.cov(draws["last"][0, :, :, 0].T)
    scale = np.sqrt(np.outer(np.diag(exact), np.diag(exact)))
    np.testing.assert_array_less(np.abs(covariance - exact) / scale, 0.045)
    assert np.all(draws["log_std"] == np.float32(np.log(0.5)))
    with pytest.raises(ValueError, match="must be part of the path of a parameter, got 'first'"):
        last_layer_laplace(apply, params, [], "gaussian", "first")


def test_ivon_steps_are_those_of_the_paper():
    """Algorithm 1 in NumPy and float64, three steps with given gradients."""
    generator = np.random.default_rng(1)
    lam, delta, b1, b2, h0, rate = 20.0, 0.1, 0.9, 0.8, 0.5, (0.3, 0.2, 0.1)
    # Some estimates of the Hessian are so negative that they alone would make the variance so.
    gradients, shifts = generator.normal(size=(2, 3, 50)) * np.reshape([5, 0.5], (2, 1, 1))
    start = generator.normal(size=50)
    numbers: Any = {"momentum_decay": b1, "hessian_decay": b2, "hess_init": h0}
    numbers |= {"weight_decay": delta, "num_data": lam}
    optimizer: Any = ivon_optimizer(lambda t: jnp.asarray(rate)[t], **numbers)
    params = jnp.asarray(start, jnp.float32)
    state, lowest = optimizer.init(params), np.inf
    m, g, h = start, np.zeros(50), np.full(50, h0)
    for t in (1, 2, 3):
        theta, gradient = m + shifts[t - 1], gradients[t - 1]
        sigma2 = 1 / (lam * (h + delta))
        estimate = gradient * (theta - m) / sigma2
        lowest = min(lowest, np.min(b2 * h + (1 - b2) * estimate + delta))
        g = b1 * g + (1 - b1) * gradient
        h = b2 * h + (1 - b2) * estimate + 0.5 * (1 - b2) ** 2 * (h - estimate) ** 2 / (h + delta)
        m = m - rate[t - 1] * (h0 + delta) * (g / (1 - b1**t) + delta * m) / (h + delta)
        point, slope = jnp.float32(theta), jnp.float32(gradient)
        moves, state = optimizer.update(slope, state, params, point=point)
        params = params + moves
        np.testing.assert_allclose(state.hessian, h, rtol=2e-3)
        np.testing.assert_allclose(state.momentum, g, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(params, m, rtol=1e-3, atol=1e-4)
    assert lowest < 0 < np.min(h) + delta


def test_scores_of_classes_and_of_numbers():
    """A temperature fitted to validation data that are right in 2 of 3 cases at 0.8 is 2."""
    made = types.SimpleNamespace
    wrong = np.array([[0.8, 0.2], [0.8, 0.2], [0.2, 0.8]])
    valid = made(mean=wrong)
    test = made(mean=wrong, log_density=np.log([0.8, 0.2, 0.8]))
    found = compare.scores("categorical", valid, test, np.array([0, 1, 1]), np.array([0, 1, 1]))
    assert found["temperature"] == pytest.approx(2)
    assert found["ece"] == pytest.approx(0.8 - 2 / 3)
    assert found["ece_tempered"] == pytest.approx(0, abs=1e-6)
    assert found["lppd"] == pytest.approx(np.log(0.128) / 3)
    test = made(mean=np.zeros(2), total=np.ones(2), log_density=np.zeros(2))
    found = compare.scores("gaussian", None, test, None, np.array([1.0, 2.0]))
    assert found == {"lppd": 0, "coverage": 0.5, "rmse": pytest.approx(np.sqrt(2.5))}


@pytest.mark.nightly
def test_all_methods_run_in_seconds():
    """One seed, tiny; gradients are equal but for rounding, and `select` takes a third more."""
    (rows,) = found = compare.compare(compare.short(compare.digits), [0])
    assert list(rows) == list(METHODS)
    assert all(math.isfinite(row["lppd"]) for row in rows.values())
    assert rows["psmile"]["passes"] == rows["MC dropout"]["passes"] == 10
    assert len({row["gradients"] for name, row in rows.items() if name != "select"}) == 1
    assert len(verdict.sentences(found)) == 3
