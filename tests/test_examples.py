"""Every example runs in seconds and prints what it says; formulas of some against closed forms."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import compare
import jax
import jax.numpy as jnp
import learning_coefficient
import local_precision
import mile
import numpy as np
import own_norm
import own_sampler
import pytest
import runs
import verdict
from methods import METHODS
from rivals import ivon_optimizer, last_layer_laplace

import optax_smile

# Optimized without fusion emitters, the two gradients that `sample` compares round differently.
OPTIMIZED = False
EXAMPLES = Path(__file__).parents[1] / "examples"
CLASSES, RUN = "test set LPPD accuracy F1", "--directory {0}/run --output {0}/page.html"
SCORES = "test set LPPD NLL accuracy F1"
# Commands, the words of the header, and beginnings of lines.
SMOKE = {
    "quickstart --sampler smile --step-size 0.1 --output {0}/page.html": (SCORES, "smile"),
    "uci --data diabetes --directory {0}": ("test set LPPD NLL RMSE CRPS", "psmile", "report: {0}"),
    "multi_device --data 2 --directory {0}": ("mesh: {{'chain': 4, 'data': 2}} of 8", "psmile: "),
    "local_precision": ("By curvature: prior precision", "precision excess", "Prior precision"),
    "lora --sampler smile": ("held-out text LPPD perplexity", "MAP", "smile, partition"),
    f"lenet {RUN}": (CLASSES, "psmile", "report: "),
    f"resnet {RUN}": (CLASSES, "psmile", "report: "),
    f"vit {RUN}": (CLASSES, "psmile", "report: "),
    f"nanogpt {RUN}": ("test set perplexity", "psmile", "report: "),
}
REAL = pytest.mark.skipif("OPTAX_SMILE_DATA" not in os.environ, reason="needs OPTAX_SMILE_DATA")
MARKS = {x: [pytest.mark.nightly, *[REAL] * (RUN in x)] for x in SMOKE}


@pytest.mark.parametrize("line", [pytest.param(x, marks=MARKS[x]) for x in SMOKE])
def test_an_example_runs_in_seconds(line, tmp_path):
    name, *arguments = line.format(tmp_path).split()
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    if name == "lora":
        environment["OPTAX_SMILE_DATA"] = ""
    command = [sys.executable, EXAMPLES / f"{name}.py", "--smoke", *arguments]
    options: Any = {"capture_output": True, "text": True, "check": True}
    lines = subprocess.run(command, env=environment, **options).stdout.splitlines()
    printed = [" ".join(each.split()) for each in lines]
    for start in SMOKE[line]:
        assert any(each.startswith(start.format(tmp_path)) for each in printed), printed
    if (page := tmp_path / "page.html").exists():
        assert "data:image/png" in page.read_text()


@pytest.mark.nightly
def test_all_methods_run_in_seconds():
    """One seed, tiny; gradients are equal but for rounding, and `select` takes a third more."""
    (rows,) = found = compare.compare(compare.short(compare.digits), [0])
    assert list(rows) == list(METHODS) and np.isfinite([x["lppd"] for x in rows.values()]).all()
    assert rows["psmile"]["passes"] == rows["MC dropout"]["passes"] == 10
    assert len({row["gradients"] for name, row in rows.items() if name != "select"}) == 1
    assert len(verdict.sentences(found)) == 3


@pytest.mark.nightly
def test_own_sampler_on_a_gaussian_with_noise_of_unknown_strength():
    """Squares in units of the target's, and the thermostat, in 4.5 standard errors of 128 chains:
    a fresh seed would fail by chance once in 50,000 times for each. Noise as strong as that added.
    """
    step_size, friction = 0.05, 0.1
    noises = (0.0, np.sqrt(2 * friction) / step_size)
    given: Any = {"num_data": 1, "prior_precision": 0.0, "friction": friction}
    tx, precisions = own_sampler.sgnht(step_size, **given), jnp.geomspace(0.5, 2, 8)

    def chain(noise, key):
        start_key, own_key, key = jax.random.split(key, 3)
        x = jax.random.normal(start_key, precisions.shape) / jnp.sqrt(precisions)

        def gradient(x, key):
            return precisions * x + noise * jax.random.normal(key, x.shape)

        def see(state, x, _):
            return jnp.mean(precisions * x**2), state.thermostat

        path = runs.follow(tx, own_key, x, gradient, jax.random.split(key, 5_000), see)
        return jax.tree.map(lambda values: values[1_000:].mean(), path)

    keys = jax.random.split(jax.random.key(1), (2, 128))
    both = jax.jit(jax.vmap(jax.vmap(chain, in_axes=(None, 0))))
    squares, thermostats = both(jnp.asarray(noises, jnp.float32), keys)
    for noise, square, xi in zip(noises, squares, thermostats, strict=True):
        for values, expected in ((square, 1), (xi, friction + step_size**2 * noise**2 / 2)):
            error = np.std(values, ddof=1) / np.sqrt(len(values))
            assert abs(np.mean(values) - expected) < 4.5 * error < 0.045 * expected


def test_own_sampler_in_a_run():
    """Its chains have noise of their own, and take back a step to a gradient that is not finite."""

    def loss_fn(w, batch):
        return jnp.where(batch == 7, jnp.nan, 1.0) * jnp.sum(w**2) / 2

    start, batches = np.ones((2, 3), np.float32), np.arange(20.0, dtype=np.float32)
    given: Any = {"num_warmup": 0, "num_draws": 20, "key": 0, "check": False, "progress": False}
    tx = own_sampler.sgnht(0.1, num_data=1, key=0)
    draws = optax_smile.sample(loss_fn, start, batches, tx, **given)
    steps = np.diff(np.asarray(draws.params), axis=1)
    # The step that ended there is taken back: its draw is that of the call before, where the next
    # gradient is taken again. A draw is the sum of a point and a step, less that step.
    assert (np.abs(steps).max(axis=(0, 2)) < 1e-6).sum() == 2
    assert np.all(draws.trace["num_nonfinite"][:, -1] == 1)
    # The first draw is the start.
    assert not np.any(draws.params[0][1:] == draws.params[1][1:])
    with pytest.warns(UserWarning, match="equal keys|the same"):
        optax_smile.stats(jax.vmap(tx.init)(start))


@pytest.mark.slow
def test_own_norm_keeps_a_gaussian_and_the_momenta_of_its_norm(number=8192, step_size=0.1):
    """Six variances in each quarter of 400 steps, in 4.5 standard errors of the chains: a fresh
    seed would fail by chance once in 6,000 times. Chains start at draws of the target. With normal
    momenta in place of Laplace's, the largest deviation is 10 standard errors.
    """
    size = 6
    axes = np.linalg.qr(np.random.default_rng(0).normal(size=(size, size)))[0]
    root = jnp.asarray(axes * np.geomspace(0.5, 2, size), jnp.float32)
    precision: Any = jnp.linalg.inv(root @ root.T)
    given: Any = {"num_data": 1, "prior_precision": 0.0, "decoherence_length": None}
    tx: Any = optax_smile.smile(step_size, norm=own_norm.Signs(), **given)

    def chain(key):
        x_key, p_key = jax.random.split(key)
        x, p = root @ jax.random.normal(x_key, (size,)), jax.random.laplace(p_key, (size,))
        # The kick that opens a step, by hand; the first gradient makes it the momentum.
        p, g = p / jnp.sum(jnp.abs(p)) * jnp.sqrt(size), precision @ x
        growth = -jnp.sign(p) @ g / jnp.sqrt(size) / (size - 1)
        time = step_size / 2 * (1 + growth * step_size / 4)
        updates, state = tx.update(time * g / (size - 1) - p, tx.init(x), x)

        def call(carry, _):
            x, state = carry
            updates, state = tx.update(precision @ x, state, x)
            return (x + updates, state), x

        path: Any = jax.lax.scan(call, (x + updates, state), length=400)[1]
        squares = jnp.linalg.solve(root, path.T) ** 2
        return squares.reshape(size, 4, 100).mean(axis=2)

    squares = np.asarray(jax.jit(jax.vmap(chain))(jax.random.split(jax.random.key(1), number)))
    errors = squares.std(axis=0, ddof=1, dtype=float) / np.sqrt(number)
    assert errors.max() < 0.015
    assert np.all(np.abs(squares.mean(axis=0, dtype=float) - 1) < 4.5 * errors)


@pytest.mark.nightly
def test_own_norm_samples_a_regression(capsys, monkeypatch):
    """16 chains: standard errors of the means are 2 % of a deviation, of the deviations 1.5 %."""
    monkeypatch.setattr(sys, "argv", ["own_norm.py"])
    own_norm.main()
    for line in capsys.readouterr().out.splitlines()[-2:]:
        found, exact = (np.fromstring(x, sep=" ") for x in re.findall(r"\[(.*?)\]", line))
        np.testing.assert_allclose(found, exact, atol=0.004)


@pytest.mark.nightly
def test_tuning_of_mile():
    """Settings that BlackJAX finds on a Gaussian: 11.9 and 8.3 in the mean of 16 seeds. Energy
    errors grow with the third power of the step size, so that another target gives another.
    """

    def tune(variance):
        given: Any = {"num_data": 1, "prior_precision": 0.0, "key": jax.random.key(1)}
        given |= {"phases": (1 / 3, 1 / 3, 1 / 3), "energy_variance": (variance, variance)}
        return mile.tune(lambda x: jnp.sum(x**2) / 2, jnp.ones(100), 2_000, **given)

    found = jax.jit(jax.vmap(tune))(jnp.array([5e-4, 5e-4 / 64]))
    np.testing.assert_allclose(found.step_size, [12.2, 6.1], rtol=0.15)
    np.testing.assert_allclose(found.decoherence_length[0], 8.2, rtol=0.15)


@pytest.mark.nightly
@pytest.mark.parametrize("power, expected", [(2, 30), (4, 15)])
def test_learning_coefficient_of_a_sum_of_powers(power, expected):
    """d / power, by the balance exactly. The loss alone is not corrected."""
    given: Any = {"num_data": 10**6, "localization": 0.0, "num_draws": 100, "key": 0}
    loss_fn = lambda w, batch: jnp.sum(w**power) + 0.1  # noqa: E731
    found = learning_coefficient.estimate(loss_fn, jnp.zeros(60), [np.zeros(1)], **given)
    assert found.llc == pytest.approx(expected, abs=0.01)
    error = found.trace.mean(axis=1).std(ddof=1) / 2
    assert abs(found.trace.mean() - expected) < 4.5 * error < 0.2 * expected
    assert found.findings == () and "Nothing looks wrong" in str(found)


@pytest.mark.nightly
def test_local_precision_has_the_allowed_excess():
    """A quadratic loss that narrows the draws, in closed form, and a line with some curvature."""
    curvatures, start, batches = jnp.geomspace(1e-2, 3, 400), jnp.ones(400), [np.zeros(1)] * 2
    bowl = lambda w, batch: jnp.sum(curvatures * (w - 1) ** 2) / 2 + 0.3  # noqa: E731
    slope = lambda w, batch: jnp.sum(w) + jnp.sum(w**2) / 20  # noqa: E731

    def found(loss_fn, step_size, **options):
        make_sampler = functools.partial(optax_smile.sgld, step_size)
        given: Any = {"allowed": 0.1, "key": 0, "make_sampler": make_sampler} | options
        return local_precision.search(loss_fn, start, batches, **given)

    narrow = found(bowl, 2e-4, num_data=200, temperature=0.5)
    exact = np.sum(curvatures / (200 * curvatures + narrow.prior_precision)) / 4
    assert len(narrow.precisions) > 1 and exact == pytest.approx(0.1, rel=0.4)
    assert f"Prior precision {narrow.prior_precision:.3g}" in str(narrow)
    assert "came close" not in str(narrow) and "came close" in str(narrow._replace(allowed=9.0))
    down = found(slope, 1e-3, num_data=1)
    assert down.loss.max() < down.start_loss and down.excess[-1] == pytest.approx(0.1, rel=0.25)
    with pytest.raises(ValueError, match="grows around the weights"):
        found(lambda w, batch: 0 * jnp.sum(w), 1e-3, num_data=1)


@pytest.mark.nightly
def test_last_layer_laplace_of_linear_regression():
    """Covariance (X^T X / sigma^2 + delta I)^-1 of two weights, 20,000 draws: 4.5 errors of a
    variance are 4.5 %; the noise level is no part of the last layer.
    """
    x = np.random.default_rng(0).normal(size=(30, 2)).astype(np.float32)
    params = {"last": jnp.ones((1, 2, 1)), "log_std": jnp.full((1,), np.log(0.5))}
    apply = lambda params, x: ((x @ params["last"])[:, 0], params["log_std"])  # noqa: E731
    made = last_layer_laplace(apply, params, [(x, None)], "gaussian", "last")
    draws = made(3.0, 20_000, 0).params
    exact = np.linalg.inv(x.T @ x / 0.25 + 3.0 * np.eye(2))
    scale = np.sqrt(np.outer(np.diag(exact), np.diag(exact)))
    error = np.abs(np.cov(draws["last"][0, :, :, 0].T) - exact)
    np.testing.assert_array_less(error / scale, 0.045)
    assert np.all(draws["log_std"] == np.float32(np.log(0.5)))


@pytest.mark.nightly
def test_ivon_steps_are_those_of_the_paper():
    """Algorithm 1 in NumPy and float64, three steps with given gradients. Some estimates of the
    Hessian are so negative that they alone would make the variance so.
    """
    generator = np.random.default_rng(1)
    lam, delta, b1, b2, h0, rate = 20.0, 0.1, 0.9, 0.8, 0.5, (0.3, 0.2, 0.1)
    gradients, shifts = generator.normal(size=(2, 3, 50)) * np.reshape([5, 0.5], (2, 1, 1))
    numbers: Any = {"momentum_decay": b1, "hessian_decay": b2, "hess_init": h0}
    numbers |= {"weight_decay": delta, "num_data": lam}
    optimizer: Any = ivon_optimizer(lambda t: jnp.asarray(rate)[t], **numbers)
    m, g, h, lowest = generator.normal(size=50), np.zeros(50), np.full(50, h0), np.inf
    state = optimizer.init(params := jnp.asarray(m, jnp.float32))
    for t in (1, 2, 3):
        theta, gradient = m + shifts[t - 1], gradients[t - 1]
        estimate = gradient * (theta - m) * lam * (h + delta)
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
