"""Checkpoints of `benchmarks/` and IVON of `examples/`, against loops of their own."""

from typing import Any, cast

from benchmarks.prediction import baselines
from benchmarks.prediction.baselines import Run

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from data import Splits
from experiment import Experiment, Settings
from rivals import ivon_optimizer

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


def test_ivon_steps_are_those_of_the_paper():
    """Algorithm 1 in NumPy and float64, three steps with given gradients."""
    generator = np.random.default_rng(1)
    lam, delta, b1, b2, h0, rate = 20.0, 0.1, 0.9, 0.8, 0.5, (0.3, 0.2, 0.1)
    # Some estimates of the Hessian are so negative that they alone would make the variance so.
    gradients, shifts = generator.normal(size=(2, 3, 50)) * np.reshape([5, 0.5], (2, 1, 1))
    start = generator.normal(size=50)
    numbers = NUMBERS | {"hessian_decay": b2, "num_data": lam}
    optimizer = cast(Any, ivon_optimizer)(lambda t: jnp.asarray(rate)[t], **numbers)
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
