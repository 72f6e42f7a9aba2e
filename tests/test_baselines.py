"""Checkpoints, IVON and Laplace's approximation of `benchmarks/`, against closed forms."""

import contextlib
import dataclasses
import types
from pathlib import Path
from typing import Any, cast

import baselines
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from baselines import Run
from data import Splits
from experiment import Experiment, Settings
from scipy.special import log_softmax, logsumexp, softmax

SETTINGS = Settings(num_warmup=5, num_draws=3, thin=2, sampling_batch_size=8)
NUMBERS = {"momentum_decay": 0.9, "hessian_decay": 0.999, "hess_init": 0.5, "weight_decay": 0.1}
# A row's inputs are far from zero mean, and its classes far from equally likely.
SCALES = np.array([0.5, 1.0, 2.0])
KERNEL = np.array([[1.0, -0.5, 0.2], [0.3, 0.8, -1.0], [-0.4, 0.1, 0.6]])


def logistic(shape, likelihood, seed=0):
    """Softmax regression without a bias; inputs `[*shape, 3]`, targets as its kernel has them."""
    generator = np.random.default_rng(seed)
    inputs = (SCALES * generator.normal(0.3, 1.0, (*shape, 3))).astype(np.float32)
    noisy = inputs @ KERNEL + generator.gumbel(size=(*shape, 3))
    both = inputs, noisy.argmax(-1).astype(np.int32)
    half = shape[0] // 2
    splits = Splits(both, (both[0][:half], both[1][:half]), both)
    network = nn.Dense(3, use_bias=False)
    return Experiment(network, splits, likelihood, lambda num_steps: optax.sgd(0.1))


def weights(kernel=KERNEL):
    return {"params": {"kernel": jnp.asarray(kernel, jnp.float32)}}


def member(params):
    """As a warm start gives it."""
    return jax.tree.map(lambda x: x[None], params)


def assert_same(mine, theirs):
    jax.tree.map(np.testing.assert_array_equal, mine, theirs)


def test_checkpoints_are_those_of_adamw(tmp_path):
    """Bit for bit, over the end of a pass: 11 steps of 4 batches a pass."""
    task, start = logistic((35,), "categorical"), weights()
    optimizer = optax.adamw(0.03, weight_decay=0.2)

    @jax.jit
    def step(params, state, batch):
        updates, state = optimizer.update(jax.grad(task.mean_loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    batches, kept = task.batches(SETTINGS.sampling_batch_size, 7), []
    params, state = start, optimizer.init(start)
    for number in range(11):
        params, state = step(params, state, batches[number])
        if number + 1 in (7, 9, 11):
            kept.append(params)
    options, given = {"learning_rate": 0.03, "weight_decay": 0.2}, member(start)
    draws = baselines.checkpoints(Run(task, SETTINGS, given, 7, tmp_path), options)
    assert len(kept) == len(draws) == 3
    assert_same(list(draws), kept)
    assert_same(given, member(start))
    assert draws.settings == {"name": "checkpoints", **options}


OTHER_SETTINGS: dict[str, tuple[type[BaseException], str]] = {
    "checkpoints": (ValueError, "with settings.thin = 3"),
    "ivon": (SystemExit, "is of other settings"),
}


@pytest.mark.parametrize("method", ["checkpoints", "ivon"])
@pytest.mark.parametrize("cut", [1, 8, 11])
def test_training_that_was_cut_off_goes_on(method, cut, tmp_path, monkeypatch):
    """Bit for bit: before the first draw, between draws, after the last."""
    task, start = logistic((35,), "categorical"), member(weights())
    baseline, passes = baselines.METHODS[method], task.batches(8, 7)
    run = Run(task, SETTINGS, start, 7, tmp_path / "cut")
    whole = baseline(run._replace(directory=tmp_path / "whole"), {})

    class Cut(Exception): ...

    class Batches:
        left = cut

        def __iter__(self):
            for batch in passes:
                if self.left == 0:
                    raise Cut
                self.left -= 1
                yield batch

    with monkeypatch.context() as patch:
        patch.setattr(Experiment, "batches", lambda *_: Batches())
        with pytest.raises(Cut) if cut < 11 else contextlib.nullcontext():
            baseline(run, {})
    is_finished = method == "checkpoints" and cut == 11
    finished = pytest.warns(UserWarning, match="the run is finished")
    with finished if is_finished else contextlib.nullcontext():
        assert_same(baseline(run, {}).params, whole.params)
    if cut > 7:
        other = run._replace(settings=dataclasses.replace(SETTINGS, thin=3))
        error, message = OTHER_SETTINGS[method]
        with pytest.raises(error, match=message):
            baseline(other, {})


def test_ivon_steps_are_those_of_the_paper():
    """Algorithm 1 in NumPy and float64, three steps with given gradients."""
    generator = np.random.default_rng(1)
    lam, delta, b1, b2, h0, rate = 20.0, 0.1, 0.9, 0.8, 0.5, (0.3, 0.2, 0.1)
    # Some estimates of the Hessian are so negative that they alone would make the variance so.
    gradients, shifts = generator.normal(size=(2, 3, 50)) * np.reshape([5, 0.5], (2, 1, 1))
    start = generator.normal(size=50)
    numbers = NUMBERS | {"hessian_decay": b2, "num_data": lam}
    optimizer = cast(Any, baselines.ivon_optimizer)(lambda t: jnp.asarray(rate)[t], **numbers)
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


def test_ivon_finds_a_gaussian(tmp_path):
    """Of a quadratic loss: (A + delta)^-1 A mu, variance 1 / (lambda (diag A + delta)).

    400 copies with the same A, which is not diagonal. Of the variance over copies and draws 0.5 %
    is noise, and the quadratic term in the step of h makes it up to 1 % smaller; the mean has noise
    of 2e-4.
    """
    matrix, goal, lam, delta = np.array([[2.0, 0.6], [0.6, 0.5]]), np.array([1.0, -2.0]), 1e3, 0.1

    def mean_loss(params, batch):
        away = params - jnp.float32(goal)[None]
        return jnp.sum(away * (away @ jnp.float32(matrix))) / 2

    batches = lambda size, seed: [np.zeros(1)]  # noqa: E731
    task: Any = types.SimpleNamespace(mean_loss=mean_loss, num_data=lam, batches=batches)
    settings = Settings(num_warmup=1_750, num_draws=250, thin=1)
    options = NUMBERS | {"learning_rate": 0.1, "hessian_decay": 0.995}
    run = Run(task, settings, jnp.zeros((1, 400, 2)), 3, tmp_path)
    draws = baselines.ivon(run, options).params[0]
    expected = np.linalg.solve(matrix + delta * np.eye(2), matrix @ goal)
    np.testing.assert_allclose(draws.mean((0, 1)), expected, atol=2e-3)
    variance = 1 / (lam * (np.diag(matrix) + delta))
    np.testing.assert_allclose(draws.var(0).mean(0), variance, rtol=0.03)
    # The rate falls to zero: where it ends is hardly noisier than the mean of the draws.
    assert np.all(draws.mean(0).std(0) < 1.6 * np.sqrt(variance / 250))


@pytest.mark.parametrize("shape, likelihood", [((4096,), "categorical"), ((512, 8), "tokens")])
def test_fisher_is_that_of_softmax_regression(shape, likelihood):
    """Mean of x_j^2 p_c (1 - p_c), within 4.5 of its standard errors: false alarms 1 in 8,000.

    Targets that are given have no part in it, nor has the size of a chunk.
    """
    task = logistic(shape, likelihood)
    task = task._replace(splits=task.splits._replace(train=(task.splits.train[0], np.zeros(shape))))
    params, settings = weights(), Settings(sampling_batch_size=128)
    found = [baselines.fisher(task, settings, params, seed, 48) for seed in (0, 1)]
    mine = np.mean([x["params"]["kernel"] for x in found], axis=0)
    x = task.splits.train[0].reshape(-1, 3, 1).astype(float)
    p = softmax(x[..., 0] @ KERNEL, axis=-1)[:, None]
    expected = np.mean(x**2 * p * (1 - p), axis=0)
    # Variance of the square of a sum of independent scores: cumulants, and twice F^2.
    pieces = (x**2 * p * (1 - p)).reshape(shape[0], -1, 3, 3)
    fourth = (x**4 * p * (1 - p) * ((1 - p) ** 3 + p**3)).reshape(pieces.shape)
    variance = np.sum(fourth - 3 * pieces**2, axis=1) + 2 * np.sum(pieces, axis=1) ** 2
    error = np.sqrt(np.sum(variance, axis=0) / 2) / len(x)
    assert np.max(error / expected) < 0.06
    assert np.max(np.abs(mine - expected) / error) < 4.5


def test_laplace_has_the_precision_of_data_and_prior():
    """Variance 1 / (N F + delta), of 900 draws: 4.7 % each, 21 % at 4.5 standard errors."""
    task, start = logistic((256,), "categorical"), weights()
    settings = Settings(num_draws=900, sampling_batch_size=64)
    run, options = Run(task, settings, member(start), 5, Path()), {"prior_precisions": [30.0]}
    draws = baselines.laplace(run, options | {"num_tried": 1}).params["params"]["kernel"]
    information = baselines.fisher(task, settings, start, 5, 16)["params"]["kernel"]
    expected = 1 / (256 * np.asarray(information) + 30.0)
    np.testing.assert_allclose(draws[0].var(0), expected, rtol=0.21)
    bound = 4.5 * np.sqrt(expected / 900)
    assert np.all(np.abs(draws[0].mean(0) - KERNEL) < bound)
    # Neither part is negligible.
    assert np.min(expected) < 0.5 / 30 and np.max(expected) > 0.3 / 30
    with pytest.raises(ValueError, match="classes or tokens, got 'gaussian'"):
        baselines.laplace(Run(logistic((16,), "gaussian"), *run[1:]), {})


@pytest.mark.parametrize("scale, best", [(1.0, 1e3), (8.0, 1.0)], ids=["trained", "too sure"])
def test_laplace_chooses_its_prior_by_validation(scale, best):
    """By the LPPD of its draws, computed here in NumPy; weights too large want more variance."""
    task, start = logistic((256,), "categorical"), member(weights(scale * KERNEL))
    settings = Settings(num_draws=10, sampling_batch_size=64)
    inputs, targets = task.splits.valid

    def lppd(draws):
        logs = log_softmax(inputs @ draws.params["params"]["kernel"][0], axis=-1)
        density = logs[:, np.arange(len(targets)), targets]
        return np.mean(logsumexp(density, axis=0) - np.log(len(density)))

    grid, run = [1.0, 1e3], Run(task, settings, start, 5, Path())

    of = lambda grid: baselines.laplace(run, {"prior_precisions": grid})  # noqa: E731
    alone = [of([delta]) for delta in grid]
    with pytest.warns(UserWarning, match="an end of the grid"):
        found = of(grid)
    told: Any = found.settings
    assert told["prior_precision"] == best
    np.testing.assert_allclose(told["tried"], [lppd(draws) for draws in alone], rtol=1e-5)
    assert_same(found.params, alone[grid.index(best)].params)
