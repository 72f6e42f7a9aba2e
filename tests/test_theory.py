"""What docs/theory.md says and no other test shows, and that every test which it names exists."""

import ast
import functools
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_momentum import kicked, moving_along, plain, unit

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "theory.md"
LINK = re.compile(r"\[`(test_\w+)`\]\((\S+?)\)")


@functools.cache
def functions_of(file):
    nodes = ast.parse(file.read_text()).body
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def test_the_page_names_tests_and_files_that_exist():
    """And every test of this file."""
    text = PAGE.read_text()
    named = LINK.findall(text)
    for name, path in named:
        file = (PAGE.parent / path).resolve()
        assert file.parent == PAGE.parents[1] / "tests" and name in functions_of(file), (name, path)
    assert not re.findall(r"test_\w+", re.sub(r"\]\(\S+?\)", "]", LINK.sub("", text)))
    for path in re.findall(r"\]\((?!http)([^)#\s]+)", text):
        assert (PAGE.parent / path).exists(), path
    tests = {x for x in functions_of(pathlib.Path(__file__)) if x.startswith("test_")}
    tests = {x for x in tests if "page" not in x}
    assert len(tests) >= 6 and tests <= {name for name, _ in named}


# The kick.


def kick(directions, gradients, *lengths):
    """Directions after the kicks of the package, and kinetic energies gained, in float64."""
    directions, gradients = jnp.asarray(directions), jnp.asarray(gradients)
    each = jnp.tile(jnp.asarray(lengths), (len(directions), 1))
    kicked_by, _, gains = kicked(directions, gradients, each)
    return np.asarray(kicked_by), np.asarray(gains)


def test_a_kick_is_a_flow_and_its_energy_is_the_volume_that_it_takes():
    """exp(-change of kinetic energy) is the determinant of the kick's Jacobian on the sphere.

    Of a direction that rounding and explicit noise leave off the unit sphere, too.
    """
    rng, size, step = np.random.default_rng(0), 5, 1e-5
    g, u = 3 * rng.standard_normal(size), unit(rng, size)
    with jax.enable_x64(True):
        for length in (1e-2, 0.7, 3.0):
            (kicked_by,), gains = kick(u[None], g[None], length)
            (halfway,), parts = kick(1.7 * u[None], g[None], 0.3 * length, 0.7 * length)
            np.testing.assert_allclose(halfway, kicked_by, atol=1e-14)
            np.testing.assert_allclose(parts.sum(), gains.sum(), rtol=1e-12)
            (back,), losses = kick(-kicked_by[None], g[None], length)
            np.testing.assert_allclose(back, -u, atol=1e-12)
            np.testing.assert_allclose(losses, -gains, rtol=1e-9)
            before, after = (np.linalg.svd(x[None])[2][1:] for x in (u, kicked_by))
            starts = np.concatenate([u + step * before, u - step * before])
            starts /= np.linalg.norm(starts, axis=1, keepdims=True)
            ends, _ = kick(starts, np.tile(g, (len(starts), 1)), length)
            jacobian = (ends[: size - 1] - ends[size - 1 :]) @ after.T / (2 * step)
            np.testing.assert_allclose(
                abs(np.linalg.det(jacobian)), np.exp(-gains.sum()), rtol=1e-7
            )


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
        with jax.enable_x64(True):
            turned, _ = kick(np.tile(u, (2 * size, 1)), np.concatenate([points, -points]), length)
        change = np.mean([x @ form @ x for x in turned]) - u @ form @ u
        found = change / (length / (size - 1)) ** 2
        stratonovich, more = generator(form, variances, u)
        assert abs(found - stratonovich) < 1e-4 * abs(more)


# Densities that stay as they are, by derivatives of the Fokker-Planck equation: nightly, since they
# test what the page says and not the package.

SIZE = 3


def energy(theta):
    return jnp.sum(jnp.cosh(theta)) + theta[0] * theta[1] / 2 + jnp.sin(theta[2])


def divergence(field, at):
    return jnp.trace(jax.jacfwd(field)(at))


def on_the_sphere(field):
    """As a function of x, along which only the direction counts: its divergence is the sphere's."""
    return lambda x: field(x / jnp.linalg.norm(x))


def project(u, vector):
    return vector - u * (u @ vector)


def isotropic(theta):
    return (0.3 + jnp.sum(theta**2)) * jnp.eye(SIZE)


def change_of(theta, u, root=isotropic, scale=jnp.ones_like, factor=lambda theta: 1.0):
    """Rate at which the density factor(theta) exp(-energy) changes, over exp(-energy).

    Gradients are whitened by the scale, and have noise of covariance root(theta) root(theta)^T.
    """

    def density(theta):
        return factor(theta) * jnp.exp(-energy(theta))

    def moved(theta):
        return density(theta) * u / scale(theta)

    def turned(u):
        return -project(u, jax.grad(energy)(theta) / scale(theta)) / (SIZE - 1)

    def spread(column):
        def inner(u):
            return project(u, column)

        def outer(u):
            return project(u, column) * divergence(on_the_sphere(inner), u)

        return divergence(on_the_sphere(outer), u) / 2

    on_u = jnp.sum(jax.vmap(spread)(root(theta).T)) - divergence(on_the_sphere(turned), u)
    return on_u * factor(theta) - divergence(moved, theta) * jnp.exp(energy(theta))


def changes(**options):
    """At three places and directions, in float64."""
    rng = np.random.default_rng(2)
    theta, u = rng.standard_normal((3, SIZE)), np.array([unit(rng, SIZE) for _ in range(3)])
    run = jax.jit(jax.vmap(functools.partial(change_of, **options)))
    return u, np.asarray(run(jnp.asarray(theta), jnp.asarray(u)))


@pytest.mark.nightly
def test_isotropic_noise_keeps_the_target_though_its_strength_depends_on_the_place():
    with jax.enable_x64(True):
        assert np.abs(changes()[1]).max() < 1e-12


@pytest.mark.nightly
def test_anisotropic_noise_changes_the_target_at_a_rate():
    """Ito's generator of the paper does so d / (d - 1) times as fast."""
    root = np.random.default_rng(3).standard_normal((SIZE, SIZE))
    with jax.enable_x64(True):
        covariance = jnp.asarray(root @ root.T)
        directions, found = changes(root=lambda theta: jnp.asarray(root))
        # The paper's has half of P covariance u more in what turns u.
        ito = on_the_sphere(lambda u: project(u, covariance @ u) / 2)
        more = jax.jit(jax.vmap(lambda u: divergence(ito, u)))(jnp.asarray(directions))
    for u, change, extra in zip(directions, found, np.asarray(more), strict=True):
        expected = (SIZE - 1) / 2 * (SIZE * u @ root @ root.T @ u - np.sum(root**2))
        np.testing.assert_allclose(change, expected, rtol=1e-10)
        np.testing.assert_allclose(change - extra, change * SIZE / (SIZE - 1), rtol=1e-9)


@pytest.mark.nightly
def test_a_scale_that_depends_on_the_place_becomes_a_factor_of_the_target():
    """One for all parameters by itself, one for each by the product, a constant one not at all."""

    def constant(theta):
        return jnp.array([0.2, 1.0, 3.0])

    def of_all(theta):
        return jnp.full(SIZE, 1 + jnp.sum(theta**2))

    def of_each(theta):
        return jnp.sqrt(0.1 + theta**2)

    with jax.enable_x64(True):
        assert np.abs(changes(scale=constant)[1]).max() < 1e-11
        for scale, power in ((of_all, 1 / SIZE), (of_each, 1)):
            assert np.abs(changes(scale=scale)[1]).max() > 0.1
            factor = functools.partial(
                lambda theta, s, p: jnp.prod(s(theta)) ** p, s=scale, p=power
            )
            assert np.abs(changes(scale=scale, factor=factor)[1]).max() < 1e-11


# How anisotropic noise heats.


LARGE, NOISE_VARIANCE, ANGLE, EXCESS, PASS = 400, 44.0, 0.15, 0.5, 10


def heated(matched, permuted):
    """Of the noisier and the calmer half of theta: mean squares by chain, and their expectation.

    The target is N(0, I), the noise prevails, and its variance is 44 (1 + .5) in one half and
    44 (1 - .5) in the other. Where it is that of permutations it sums to zero over 10 gradients.
    """
    step_size = ANGLE * np.sqrt((LARGE - 1) / NOISE_VARIANCE)
    options = {"decoherence_length": "matched", "key": 0} if matched else {}
    tx = plain(step_size, **options)
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
        state: Any = tx.init(theta)
        if matched:
            state = optax.tree.set(state, key=jax.random.key_data(keys[0]))
        (_, state), squares = jax.lax.scan(one_pass, (theta, state), keys[1:])
        return squares[50:].mean(axis=0), optax.tree.get(state, "mean_turn_rate")

    squares, rates = jax.jit(jax.vmap(chain))(jax.random.split(jax.random.key(4), 40))
    # Explicit noise over that of the gradients, as strengths: about one where it matches.
    turned = np.mean(np.asarray(rates, float)) ** 2 * (LARGE - 1) ** 2 / (LARGE * NOISE_VARIANCE)
    share = 1 / (1 + turned) if matched else 1.0
    return np.asarray(squares, float), share


@pytest.mark.slow
@pytest.mark.parametrize("matched, permuted", [(True, False), (True, True)])
def test_noise_heats_what_it_prefers_and_as_much_explicit_noise_halves_that(matched, permuted):
    """Each parameter gets its share of the noise as its variance.

    That of permutations heats none. While a pass is under way it turns the direction away from
    where it returns to, by a mean square of (n + 1) / 6 of that of one gradient: all are colder by
    as much. 5 standard errors of the chains, and the terms of the order 1 / d.
    """
    squares, share = heated(matched, permuted)
    assert share == 1 or abs(share - 1 / 2) < 0.01
    excess = np.array([EXCESS, -EXCESS]) * share
    if permuted:
        excess = np.full(2, -(PASS + 1) / 6 * ANGLE**2)
    errors = 5 * squares.std(axis=0, ddof=1) / np.sqrt(len(squares)) + 2 / LARGE
    assert np.all(errors < 0.05)
    assert np.all(np.abs(squares.mean(axis=0) - 1 - excess) < errors)


# Limits.


@pytest.mark.slow
def test_with_many_parameters_each_moves_like_sghmc():
    """Autocorrelation on N(0, I) against Langevin's with friction sqrt(d) / L, mass and time one.

    A step of eps is one of eps / sqrt(d) there. 5 standard errors and terms of the order 1 / d.
    """
    size, num_chains, num_steps, time_step, friction = 400, 100, 40, 0.1, 1.0
    step_size = time_step * np.sqrt(size)
    tx = plain(step_size, decoherence_length=np.sqrt(size) / friction, key=0)

    def chain(key):
        keys = jax.random.split(key, 3)
        start, direction = (jax.random.normal(key, (size,)) for key in keys[:2])
        state = moving_along(tx.init(start), direction / jnp.linalg.norm(direction))
        state = optax.tree.set(state, key=jax.random.key_data(keys[2]))

        def call(carry, _):
            theta, state = carry
            updates, state = tx.update(theta, state, theta)
            return (optax.apply_updates(theta, updates), state), jnp.mean(start * theta)

        return jax.lax.scan(call, (start, state), length=num_steps)[1]

    keys = jax.random.split(jax.random.key(8), num_chains)
    found = np.asarray(jax.jit(jax.vmap(chain))(keys), float)
    time, omega = time_step * np.arange(num_steps), np.sqrt(1 - friction**2 / 4)
    decay = np.exp(-friction * time / 2)
    expected = decay * (np.cos(omega * time) + friction / (2 * omega) * np.sin(omega * time))
    errors = 5 * found.std(axis=0, ddof=1) / np.sqrt(num_chains) + 2 / size
    assert np.abs(expected).min() < 0.1 and errors.max() < 0.06
    assert np.all(np.abs(found.mean(axis=0) - expected) < errors)
