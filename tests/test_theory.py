"""Statements of docs/theory.md that no other test checks, and the tests that it names."""

import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference import Chain, kick

import optax_smile

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "theory.md"
LINK = re.compile(r"\[`(test_\w+)`\]\((\S+?)\)")


def test_the_page_names_tests_and_files_that_exist():
    text = PAGE.read_text()
    for name, path in LINK.findall(text):
        assert f"\ndef {name}(" in (PAGE.parent / path).read_text(), (name, path)
    assert not re.findall(r"test_\w+(?!\w|\.py)", re.sub(r"\]\(\S+?\)", "]", LINK.sub("", text)))
    for path in re.findall(r"\]\((?!http)([^)#\s]+)", text):
        assert (PAGE.parent / path).exists(), path
    tests = re.findall(r"^def (test_(?!the_page)\w+)", pathlib.Path(__file__).read_text(), re.M)
    assert len(tests) >= 3 and set(tests) <= {name for name, _ in LINK.findall(text)}


# The kick of the reference, from which that of the samplers differs by rounding.


def unit(rng, size):
    vector = rng.standard_normal(size)
    return vector / np.linalg.norm(vector)


def test_a_kick_is_a_flow_and_its_energy_is_the_volume_that_it_takes():
    """exp(-change of kinetic energy) is the determinant of the kick's Jacobian on the sphere."""
    rng, size, step = np.random.default_rng(0), 5, 1e-5
    g, u = 3 * rng.standard_normal(size), unit(rng, size)
    for length in (1e-2, 0.7, 3.0):
        turned, gain = kick(u, g, length)
        half, first = kick(u, g, 0.3 * length)
        whole, second = kick(half, g, 0.7 * length)
        np.testing.assert_allclose(whole, turned, atol=1e-14)
        np.testing.assert_allclose(first + second, gain, rtol=1e-12)
        back, loss = kick(-turned, g, length)
        np.testing.assert_allclose(back, -u, atol=1e-12)
        np.testing.assert_allclose(loss, -gain, rtol=1e-9)
        before, after = (np.linalg.svd(x[None])[2][1:] for x in (u, turned))
        starts = np.concatenate([u + step * before, u - step * before])
        ends = np.array([kick(x / np.linalg.norm(x), g, length)[0] for x in starts])
        volume = np.linalg.det((ends[: size - 1] - ends[size - 1 :]) @ after.T / (2 * step))
        np.testing.assert_allclose(abs(volume), np.exp(-gain), rtol=1e-7)


@pytest.mark.parametrize("shapes", [None, [(6, 6), (3, 7)]])
@pytest.mark.parametrize("integrator", ["leapfrog", "minimal_norm"])
def test_energy_errors_fall_with_the_third_power_of_the_step_size(integrator, shapes):
    """In the median of starts: where a singular value vanishes the spectral norm bends sharply."""

    def error(start, length):
        given = {"step_size": length, "integrator": integrator, "shapes": shapes}
        chain, x, errors = Chain(start, **given), start, []
        for _ in range(30):
            x = x + chain.call(x + 0.4 * x**3, np.sum(x**2 / 2 + x**4 / 10), x)
            errors.append(chain.gained)
        return np.sqrt(np.nansum(np.square(errors[3:])))

    starts = np.random.default_rng(3).standard_normal((12, 57))
    ratios = [error(start, 0.04) / error(start, 0.02) for start in starts]
    assert np.log2(np.median(ratios)) == pytest.approx(3, abs=0.1)


def generator(form, variances, u):
    """Half of sum_i V_i sigma_i sigma_i, applied to f(u) = u^T form u; and what Ito's has more."""
    projection = np.eye(u.size) - np.outer(u, u)
    spread = projection @ np.diag(variances) @ projection
    slope, turn = projection @ np.diag(variances) @ u, np.trace(spread)
    stratonovich = np.trace(spread @ form) - (slope + turn * u) @ form @ u
    return stratonovich, slope @ form @ u


def test_a_kick_by_noise_has_the_generator_of_stratonovich():
    """Noise of covariance V from 2 d equally likely points: the mean is a sum, nothing is drawn."""
    rng, length = np.random.default_rng(1), 1e-3
    for size in (2, 3, 7):
        form, u = rng.standard_normal((size, size)), unit(rng, size)
        form, variances = form + form.T, np.geomspace(0.2, 5, size)
        points = np.diag(np.sqrt(size * variances))
        turned = [kick(u, g, length)[0] for g in np.concatenate([points, -points])]
        change = np.mean([x @ form @ x for x in turned]) - u @ form @ u
        found = change / (length / (size - 1)) ** 2
        stratonovich, more = generator(form, variances, u)
        assert abs(found - stratonovich) < 1e-4 * abs(more)


# How anisotropic noise heats.

LARGE, NOISE_VARIANCE, ANGLE, EXCESS, PASS = 400, 44.0, 0.15, 0.5, 10


def heated(permuted):
    """Mean squares by chain for the noisier and the calmer half of theta, and their expectation.

    The target is N(0, I), the noise prevails, and its variance is 44 (1 + .5) in one half and
    44 (1 - .5) in the other. Where it is that of permutations it sums to zero over 10 gradients.
    """
    step_size = ANGLE * np.sqrt((LARGE - 1) / NOISE_VARIANCE)
    tx = optax_smile.smile(step_size, num_data=1, prior_precision=0.0, key=0)
    excess = np.repeat([EXCESS, -EXCESS], LARGE // 2)
    deviations = jnp.asarray(np.sqrt(NOISE_VARIANCE * (1 + excess)), jnp.float32)

    def one_pass(carry, key):
        noise = deviations[None] * jax.random.normal(key, (PASS, LARGE))
        if permuted:
            noise = (noise - noise.mean(axis=0, keepdims=True)) * np.sqrt(PASS / (PASS - 1))

        def call(carry, batch):
            theta, state = carry
            updates, state = tx.update(theta + batch, state, theta)
            theta: Any = optax.apply_updates(theta, updates)
            return (theta, state), theta**2

        carry, squares = jax.lax.scan(call, carry, noise)
        return carry, squares.mean(axis=0).reshape(2, -1).mean(axis=1)

    def chain(key):
        keys = jax.random.split(key, 201)
        theta = jax.random.normal(keys[0], (LARGE,))
        state: Any = optax.tree.set(tx.init(theta), key=jax.random.key_data(keys[0]))
        (_, state), squares = jax.lax.scan(one_pass, (theta, state), keys[1:])
        return squares[50:].mean(axis=0), optax.tree.get(state, "mean_turn_rate")

    squares, rates = jax.jit(jax.vmap(chain))(jax.random.split(jax.random.key(4), 40))
    # Explicit noise over that of the gradients, as strengths: about one where it matches.
    turned = np.mean(np.asarray(rates, float)) ** 2 * (LARGE - 1) ** 2 / (LARGE * NOISE_VARIANCE)
    return np.asarray(squares, float), 1 / (1 + turned)


@pytest.mark.nightly
@pytest.mark.parametrize("permuted", [False, True])
def test_noise_heats_what_it_prefers_and_as_much_explicit_noise_halves_that(permuted):
    """Each parameter gets its share of the noise as its variance.

    That of permutations heats none. While a pass is under way it turns the direction away from
    where it returns to, by a mean square of (n + 1) / 6 of that of one gradient: all are colder by
    as much. 5 standard errors of the chains, and the terms of the order 1 / d.
    """
    squares, share = heated(permuted)
    assert abs(share - 1 / 2) < 0.01
    excess = -(PASS + 1) / 6 * ANGLE**2 if permuted else np.array([EXCESS, -EXCESS]) * share
    errors = 5 * squares.std(axis=0, ddof=1) / np.sqrt(len(squares)) + 2 / LARGE
    assert np.all(errors < 0.05)
    assert np.all(np.abs(squares.mean(axis=0) - 1 - excess) < errors)
