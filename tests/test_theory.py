"""What docs/theory.md says and no other test shows, and that every test which it names exists."""

import ast
import functools
import itertools
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_momentum import moving_along, textbook_kick, unit

import optax_smile

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "theory.md"
LINK = re.compile(r"\[`(test_\w+)`\]\((\S+?)\)")


@functools.cache
def functions_of(file):
    nodes = ast.parse(file.read_text()).body
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def test_the_page_names_tests_that_exist():
    named = LINK.findall(PAGE.read_text())
    assert len(named) >= 15
    for name, path in named:
        file = (PAGE.parent / path).resolve()
        assert file.parent == PAGE.parents[1] / "tests" and name in functions_of(file), (name, path)


def test_the_page_mentions_no_test_without_a_link_and_no_file_that_is_missing():
    text = PAGE.read_text()
    assert not re.findall(r"test_\w+", re.sub(r"\]\(\S+?\)", "]", LINK.sub("", text)))
    for path in re.findall(r"\]\((?!http)([^)#\s]+)", text):
        assert (PAGE.parent / path).exists(), path


def test_the_page_names_every_test_of_this_file():
    named, here = {name for name, _ in LINK.findall(PAGE.read_text())}, pathlib.Path(__file__)
    tests = {name for name in functions_of(here) if name.startswith("test_") and "page" not in name}
    assert len(tests) >= 10 and tests <= named, tests - named


# The kick.


def test_a_kick_is_a_flow_and_its_energy_is_the_volume_that_it_takes():
    """exp(-change of kinetic energy) is the determinant of the kick's Jacobian on the sphere."""
    rng, size, step = np.random.default_rng(0), 5, 1e-5
    for length in (1e-2, 0.7, 3.0):
        g, u = 3 * rng.standard_normal(size), unit(rng, size)
        kicked, gain = textbook_kick(u, g, length)
        halfway, _ = textbook_kick(u, g, 0.3 * length)
        np.testing.assert_allclose(textbook_kick(halfway, g, 0.7 * length)[0], kicked, atol=1e-14)
        velocity = (textbook_kick(u, g, step)[0] - textbook_kick(u, g, -step)[0]) / (2 * step)
        np.testing.assert_allclose(velocity, -(g - u * (u @ g)) / (size - 1), atol=1e-8)
        before, after = (np.linalg.svd(x[None])[2][1:] for x in (u, kicked))
        ends = [
            [textbook_kick((u + s * t) / np.linalg.norm(u + s * t), g, length)[0] for t in before]
            for s in (step, -step)
        ]
        jacobian = (np.array(ends[0]) - ends[1]) @ after.T / (2 * step)
        np.testing.assert_allclose(abs(np.linalg.det(jacobian)), np.exp(-gain), rtol=1e-7)


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
        kicked = [textbook_kick(u, g, length)[0] for g in (*points, *-points)]
        change = np.mean([x @ form @ x for x in kicked]) - u @ form @ u
        found = change / (length / (size - 1)) ** 2
        stratonovich, more = generator(form, variances, u)
        assert abs(found - stratonovich) < 1e-4 * abs(more)


# Densities that stay as they are, by derivatives of the Fokker-Planck equation.

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
    return theta, u, np.asarray(run(jnp.asarray(theta), jnp.asarray(u)))


def test_isotropic_noise_keeps_the_target_though_its_strength_depends_on_the_place():
    with jax.enable_x64(True):
        assert np.abs(changes()[2]).max() < 1e-12


def test_anisotropic_noise_changes_the_target_at_a_rate():
    """Ito's generator of the paper does so d / (d - 1) times as fast."""
    root = np.random.default_rng(3).standard_normal((SIZE, SIZE))
    with jax.enable_x64(True):
        covariance = jnp.asarray(root @ root.T)
        _, directions, found = changes(root=lambda theta: jnp.asarray(root))
        for u, change in zip(jnp.asarray(directions), found, strict=True):
            expected = (SIZE - 1) / 2 * (SIZE * u @ covariance @ u - jnp.trace(covariance))
            np.testing.assert_allclose(change, expected, rtol=1e-10)
            # The paper's has half of P covariance u more in what turns u.
            more = divergence(on_the_sphere(lambda u: project(u, covariance @ u) / 2), u)
            np.testing.assert_allclose(change - more, change * SIZE / (SIZE - 1), rtol=1e-9)


def scale_of_all(theta):
    return jnp.full(SIZE, 1 + jnp.sum(theta**2))


def scale_of_each(theta):
    return jnp.sqrt(0.1 + theta**2)


@pytest.mark.parametrize(
    "scale, factor",
    [
        (lambda theta: jnp.array([0.2, 1.0, 3.0]), None),
        (scale_of_all, lambda theta: scale_of_all(theta)[0]),
        (scale_of_each, lambda theta: jnp.prod(scale_of_each(theta))),
    ],
)
def test_a_scale_that_depends_on_the_place_becomes_a_factor_of_the_target(scale, factor):
    """One for all parameters by itself, one for each by the product, a constant one not at all."""
    with jax.enable_x64(True):
        plain = np.abs(changes(scale=scale)[2]).max()
        if factor is None:
            assert plain < 1e-11
            return
        assert plain > 0.1
        assert np.abs(changes(scale=scale, factor=factor)[2]).max() < 1e-11


# How anisotropic noise heats.


def along_the_axis(size, first, other):
    """Of noise diag(first, other, ..., other): E[u_1^2] d, and variance over the target's.

    z = u_1 is a diffusion by itself, spread D and mean m, with the density exp(2 int m / D) / D.
    Where noise prevails theta_1 spreads by int E[u_1(0) u_1(t)] dt and yields to a force by the
    answer of E[u_1] to it; their ratio is the variance. Both come from phi, L phi = -u_1.
    """
    z, step = np.linspace(-1, 1, 400_003, retstep=True)
    z = z[1:-1]
    square = first * z**2 + other * (1 - z**2)
    spread = first * (1 - z**2) ** 2 + other * z**2 * (1 - z**2)
    mean = square * z - (first + first + (size - 1) * other) * z / 2

    def integral(y):
        return np.concatenate([[0], np.cumsum((y[1:] + y[:-1]) / 2)]) * step

    log_density = 2 * integral(mean / spread) - np.log(spread)
    density = np.exp(log_density - log_density.max())
    density /= np.sum(density) * step
    slope = -2 * integral(density * z) / (density * spread)
    diffusion = np.sum(density * z * integral(slope))
    mobility = np.sum(density * (1 - z**2) * slope) / (size - 1)
    return size * np.sum(density * z**2) * step, diffusion / mobility


@pytest.mark.parametrize("size", [4, 10, 50])
def test_heating_to_first_order(size):
    excess = 1e-2
    noise, heat = along_the_axis(size, 1 + excess, 1 - excess / (size - 1))
    np.testing.assert_allclose((noise - 1) / excess, (size - 1) / (size + 2), rtol=0.02)
    np.testing.assert_allclose((heat - 1) / excess, size / (size + 2), rtol=0.02)


LARGE, NOISE_VARIANCE, ANGLE, EXCESS, PASS = 400, 44.0, 0.15, 0.5, 10


def heated(matched, permuted):
    """Of the noisier and the calmer half of theta: mean squares by chain, and their expectation.

    The target is N(0, I), the noise prevails, and its variance is 44 (1 + .5) in one half and
    44 (1 - .5) in the other. Where it is that of permutations it sums to zero over 10 gradients.
    """
    step_size = ANGLE * np.sqrt((LARGE - 1) / NOISE_VARIANCE)
    tx: Any = optax_smile.smile(
        step_size,
        num_data=1,
        prior_precision=0.0,
        tuner=None,
        reject_quantile=None,
        decoherence_length="matched" if matched else None,
        key=0 if matched else None,
    )
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
@pytest.mark.parametrize("matched, permuted", [(False, False), (True, False), (True, True)])
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


# Orders of the batches.


def test_noise_of_permutations_has_no_long_waves():
    """All permutations of four batches, and all batches of two of six examples."""
    batches = np.array([1.0, -3.0, 4.0, -2.0])
    n, variance = batches.size, np.mean(batches**2)
    passes = np.array(list(itertools.permutations(batches)))
    lags = np.arange(1, n)
    found = [np.mean(np.sum(passes[:, lag:] * passes[:, :-lag], axis=1)) / n for lag in lags]
    expected = -variance * (n - lags) / (n * (n - 1))
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    for frequency in (0.0, 0.3, 2.0):
        spectrum = variance + 2 * np.sum(expected * np.cos(frequency * lags))
        fejer = abs(np.sum(np.exp(1j * frequency * np.arange(n)))) ** 2 / n
        np.testing.assert_allclose(spectrum, variance * (n - fejer) / (n - 1), atol=1e-12)
    examples = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    means = [np.mean(batch) for batch in itertools.combinations(examples, 2)]
    np.testing.assert_allclose(np.var(means), np.var(examples) / 2 * (6 - 2) / (6 - 1))


def test_what_a_pass_leaves_is_a_rotation():
    """Of the order of two kicks; with the same order of batches in every pass it adds up."""
    rng, size, n, length = np.random.default_rng(5), 4, 4, 1e-3
    noise, start = rng.standard_normal((n, size)), unit(rng, size)
    noise -= noise.mean(axis=0)

    def after(order, u):
        for batch in order:
            u, _ = textbook_kick(u, noise[batch], length)
        return u

    def rotation(order):
        turns = -length / (size - 1) * noise[list(order)]
        before = np.cumsum(turns, axis=0) - turns
        return (turns.T @ before - before.T @ turns) / 2

    orders = list(itertools.permutations(range(n)))
    left = np.array([after(order, start) - start for order in orders])
    expected = np.array([rotation(order) @ start for order in orders])
    largest = np.abs(expected).max()
    assert np.abs(left - expected).max() < 1e-2 * largest
    # Its mean over all orders vanishes.
    assert np.abs(left.mean(axis=0)).max() < 1e-2 * largest
    u = start
    for _ in range(50):
        u = after(orders[1], u)
    assert np.abs(u - start - 50 * expected[1]).max() < 1e-2 * np.abs(50 * expected[1]).max()


# Limits.


@pytest.mark.slow
def test_where_noise_prevails_the_reach_does_not_depend_on_the_step_size():
    """On a flat target theta spreads by 4 (d - 1) / (d V) per step, as SGLD of step size 2 / V.

    The cosine c between successive directions gives (1 + c) / (1 - c) steps' worth, and a last
    one's less for those that are not over; 5 standard errors.
    """
    size, variance, num_chains, num_steps = 10, 3.0, 1_000, 300
    rng = np.random.default_rng(6)

    def chain(step_size, key):
        tx: Any = optax_smile.smile_naive(step_size, num_data=1, prior_precision=0.0)

        def call(carry, key):
            theta, state = carry
            gradient = np.sqrt(variance) * jax.random.normal(key, (size,))
            updates, state = tx.update(gradient, state, theta)
            return (optax.apply_updates(theta, updates), state), None

        start = jnp.zeros(size)
        keys = jax.random.split(key, num_steps)
        return jax.lax.scan(call, (start, tx.init(start)), keys)[0][0]

    keys = jax.random.split(jax.random.key(7), num_chains)
    step_sizes = np.array([0.2, 0.5]) * np.sqrt((size - 1) / variance)
    run = jax.jit(jax.vmap(jax.vmap(chain, (None, 0)), (0, None)))
    ends = np.asarray(run(jnp.asarray(step_sizes, jnp.float32), keys), float)
    for step_size, squares in zip(step_sizes, np.mean(ends**2, axis=-1), strict=True):
        u = np.eye(size)[0]
        noise = np.sqrt(variance) * rng.standard_normal((20_000, size))
        c = np.mean([textbook_kick(u, g, step_size)[0][0] for g in noise])
        steps = num_steps * (1 + c) / (1 - c) - 2 * c * (1 - c**num_steps) / (1 - c) ** 2
        error = 5 * squares.std() / np.sqrt(num_chains)
        assert abs(squares.mean() - steps * step_size**2 / size) < error
        limit = 4 * (size - 1) / (size * variance)
        assert abs(steps * step_size**2 / size / num_steps / limit - 1) < 0.2


@pytest.mark.slow
def test_with_many_parameters_each_moves_like_sghmc():
    """Autocorrelation on N(0, I) against Langevin's with friction sqrt(d) / L, mass and time one.

    A step of eps is one of eps / sqrt(d) there. 5 standard errors and terms of the order 1 / d.
    """
    size, num_chains, num_steps, time_step, friction = 400, 100, 40, 0.1, 1.0
    step_size = time_step * np.sqrt(size)
    tx: Any = optax_smile.smile_naive(
        step_size,
        num_data=1,
        prior_precision=0.0,
        decoherence_length=np.sqrt(size) / friction,
        key=0,
    )

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
