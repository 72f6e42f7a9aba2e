"""Control variates: unchanged posteriors, gains, and cases that are rejected."""

import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from numpyro.diagnostics import effective_sample_size
from runs import Shuffled, posterior, said

import optax_smile
from optax_smile import tall

SIZE, NUM_DATA, BATCH = 8, 6_000, 60
RNG = np.random.default_rng(5)
MIXING = RNG.normal(size=(SIZE, SIZE)) / np.sqrt(SIZE)
X: Any = np.float32(RNG.normal(size=(NUM_DATA, SIZE)) @ MIXING)
TRUTH: Any = np.float32(RNG.normal(size=SIZE))
Y: Any = np.float32(X @ TRUTH + RNG.normal(size=NUM_DATA))
PRECISION = {"w": 1e3, "log scale": 1.0}
SAMPLER = optax_smile.psmile(num_data=NUM_DATA, key=0)


def linear(w, batch):
    return jnp.mean((batch[0] @ w - batch[1]) ** 2) / 2


def logistic(w, batch):
    z = batch[0] @ w
    return jnp.mean(jax.nn.softplus(z) - (batch[1] > 0) * z)


def robust(params, batch):
    """Student's t with four degrees of freedom and an unknown scale."""
    z = (batch[0] @ params["w"] - batch[1]) / jnp.exp(params["log scale"])
    return jnp.mean(2.5 * jnp.log1p(z**2 / 4)) + params["log scale"]


def shuffled(data: Any = (X, Y), size=BATCH):
    return Shuffled(data, size)


@pytest.mark.parametrize("is_stored", [False, True])
def test_mean_and_mean_gradient_are_those_of_the_loss(is_stored):
    """With a centre for each chain, off the mode. The noise falls by a factor of ten or more."""
    w = jnp.stack([TRUTH + 0.03, TRUTH - 0.03])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        at = [tall.center_at(logistic, TRUTH + x, shuffled(), SAMPLER) for x in (0.02, -0.02)]
    centers = jax.tree.map(lambda *x: jnp.stack(x), *at)
    batches = jax.tree.map(lambda *x: jnp.stack(x), *shuffled())
    if is_stored:
        loss, data = tall.stored(logistic, at[0], (X, Y))
        centers = jax.tree.map(lambda x: jnp.stack([x, x]), at[0])
        batches = jax.tree.map(lambda *x: jnp.stack(x), *shuffled(data))

    def of(params, center):
        reduced = loss if is_stored else tall.control_variate(logistic, center)
        return jax.lax.map(lambda batch: jax.value_and_grad(reduced)(params, batch), batches)

    values, slopes = jax.jit(jax.vmap(of))(w, centers)
    plain = jax.vmap(lambda params: jax.value_and_grad(logistic)(params, (X, Y)))
    value, slope = jax.jit(plain)(w)
    np.testing.assert_allclose(values.mean(1), value, rtol=2e-6)
    np.testing.assert_allclose(slopes.mean(1), slope, atol=2e-6)
    whole = (jnp.asarray(X).reshape(-1, BATCH, SIZE), jnp.asarray(Y).reshape(-1, BATCH))
    before = jax.lax.map(lambda batch: jax.grad(logistic)(w[0], batch), whole)
    assert jnp.sum(slopes[0].var(0)) < 0.1 * jnp.sum(before.var(0))


@pytest.mark.slow
def test_draws_of_a_regression_are_those_of_its_posterior():
    """Without any choice: from zeros, 1 % of the data in a batch, 12,000 gradients per chain.

    Bounds: six standard errors of means and variances, and 1.5 % for the length of the steps.
    """
    center = tall.find_mode(linear, jnp.zeros(SIZE), shuffled(), SAMPLER)
    mean, covariance = posterior(X, Y)
    values, axes = np.linalg.eigh(covariance)
    off = (np.asarray(center.params) - mean) @ axes / np.sqrt(values)
    assert np.sqrt(np.mean(off**2)) < 0.1
    loss = tall.control_variate(linear, center)
    starts = optax_smile.chains_from_weights([center.params], num_chains=4, key=0)
    given = {"num_warmup": 2_000, "num_draws": 5_000, "thin": 2, "key": 1, "progress": False}
    draws = optax_smile.sample(loss, starts, shuffled(), SAMPLER, steps_per_dispatch=100, **given)
    z = (np.float64(draws.params) - mean) @ axes / np.sqrt(values)
    size = effective_sample_size(z).min()
    assert size > 2_500
    assert np.abs(z.mean((0, 1))).max() < 6 / np.sqrt(size)
    assert np.abs((z**2).mean((0, 1)) - 1).max() < 6 * np.sqrt(2 / size) + 0.015
    assert np.abs((z**2).mean() - 1) < 0.03
    # The steps are as long as the posterior allows.
    share = draws.trace["step_size"][:, -1] / draws.trace["width"][:, -1]
    assert np.all((0.35 < share) & (share < 0.8))


@pytest.mark.parametrize("is_function", [True, False])
def test_modes_of_other_models(is_function):
    """From far away, where the curvature is negative; with a prior that is a function, or centred.

    At a mode a Newton step is short in posterior standard deviations.
    """

    def log_prior(params):
        each = jax.tree.map(lambda p, x: jnp.sum(p * (x - 0.5) ** 2), PRECISION, params)
        return -(each["w"] + each["log scale"]) / 2

    def energy(params):
        return NUM_DATA * robust(params, (X, Y)) - log_prior(params)

    centred = {"prior_precision": PRECISION, "prior_mean": 0.5}
    own = {"prior_precision": 0, "log_prior": log_prior} if is_function else centred
    sampler = optax_smile.psmile(num_data=NUM_DATA, key=0, **own)
    start = {"w": jnp.full(SIZE, 4.0), "log scale": jnp.float32(0.0)}
    found = tall.find_mode(robust, start, shuffled(size=600), sampler)
    place, unravel = ravel_pytree(found.params)
    slope = np.float64(jax.grad(lambda x: energy(unravel(x)))(place))
    curvature = np.float64(jax.hessian(lambda x: energy(unravel(x)))(place))
    assert np.linalg.eigvalsh(curvature)[0] > 0
    assert slope @ np.linalg.solve(curvature, slope) < 0.1**2 * len(place)


def test_a_bad_centre_is_named():
    mean, covariance = posterior(X, Y)
    root = np.linalg.cholesky(covariance)
    for far in (1, 5):
        place = np.float32(mean + far * root.sum(1))
        found = " ".join(said(tall.center_at, linear, place, shuffled(), SAMPLER))
        told = re.search(r"the mode is about (\S+) posterior standard deviations away", found)
        assert (told is None) == (far == 1)
        assert told is None or abs(float(told[1]) - 5) < 0.5
    maximum = {"w": jnp.full(SIZE, 4.0), "log scale": jnp.float32(-3.0)}
    assert "no mode" in " ".join(said(tall.center_at, robust, maximum, shuffled(), SAMPLER))
    # A posterior of a few data is wide, and that of a logistic regression is not normal.
    few = [(4 * X[i : i + 4], Y[i : i + 4]) for i in (0, 4, 8)]
    sampler = optax_smile.psmile(num_data=12, prior_precision=0.01, key=0)
    found = [" ".join(said(tall.find_mode, f, TRUTH, few, sampler)) for f in (linear, logistic)]
    assert re.search(r"would still have \d+% of the variance", found[0])
    assert "far from normal" in found[1]


def test_bad_data_and_losses_are_refused():
    def search(loss: Any = linear, params: Any = TRUTH, batches: Any = None, number=NUM_DATA):
        sampler = optax_smile.psmile(num_data=number, key=0)
        tall.find_mode(loss, params, shuffled() if batches is None else batches, sampler)

    half, center = [*shuffled()][: NUM_DATA // BATCH // 2], tall.Center(TRUTH, jnp.ones(()), TRUTH)
    for call, text in [
        (lambda: search(batches=half), r"`num_data` = 6000 rows, got 3000 rows"),
        (lambda: search(number=NUM_DATA // 2), r"`num_data` = 3000 rows, got more than 3000"),
        (lambda: search(params=np.full(SIZE, 1e30, np.float32)), r"params=.*are finite"),
        (lambda: search(loss=lambda w, b: (linear(w, b), None)), r"loss_fn=.*without `aux`"),
        (lambda: search(loss=lambda w, b: (b[0] @ w) ** 2), r"loss_fn=.*scalar"),
        (lambda: search(params=np.ones(1_025, np.float32)), r"params=.*at most 1,024 parameters"),
        (lambda: tall.stored(linear, center, (X, Y)), r"data=.*the data of the centre"),
    ]:
        with pytest.raises(optax_smile.ArgumentError, match=text):
            call()
