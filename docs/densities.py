"""Densities that stay as they are, by derivatives of the Fokker-Planck equation.

They test what theory.md says and not the package, which they do not import: `.ci/nightly densities`
runs them by `pytest docs/densities.py`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SIZE = 3


def energy(theta):
    """Minus the log density of the target."""
    return jnp.sum(jnp.cosh(theta)) + theta[0] * theta[1] / 2 + jnp.sin(theta[2])


def divergence(field, at):
    """Divergence of a vector field at a point."""
    return jnp.trace(jax.jacfwd(field)(at))


def on_the_sphere(field):
    """As a function of x, along which only the direction counts: its divergence is the sphere's."""
    return lambda x: field(x / jnp.linalg.norm(x))


def project(u, vector):
    """The part of a vector across the direction u."""
    return vector - u * (u @ vector)


def change_of(theta, u, root, scale=jnp.ones_like, factor=lambda theta: 1.0):
    """Rate at which the density factor(theta) exp(-energy) changes, over exp(-energy).

    Gradients are whitened by the scale, and have noise of covariance root(theta) root(theta)^T.
    """

    def moved(theta):
        return factor(theta) * jnp.exp(-energy(theta)) * u / scale(theta)

    def turned(u):
        return -project(u, jax.grad(energy)(theta) / scale(theta)) / (SIZE - 1)

    def spread(column):
        inner = on_the_sphere(functools.partial(project, vector=column))
        outer = on_the_sphere(lambda u: project(u, column) * divergence(inner, u))
        return divergence(outer, u) / 2

    on_u = jnp.sum(jax.vmap(spread)(root(theta).T)) - divergence(on_the_sphere(turned), u)
    return on_u * factor(theta) - divergence(moved, theta) * jnp.exp(energy(theta))


def test_noise_and_scales_that_keep_or_change_the_target():
    """At three places and directions, in float64.

    Isotropic noise keeps the target though its strength depends on the place. Anisotropic noise
    changes it; Ito's generator of the paper does so d / (d - 1) times as fast. A scale that depends
    on the place becomes a factor of the target: one for all parameters by itself, one for each by
    the product, a constant one not at all.
    """
    rng = np.random.default_rng(2)
    places, us = rng.standard_normal((2, 3, SIZE))
    us /= np.linalg.norm(us, axis=1, keepdims=True)
    root = np.random.default_rng(3).standard_normal((SIZE, SIZE))

    def changes(root=lambda theta: (0.3 + jnp.sum(theta**2)) * jnp.eye(SIZE), **options):
        run = jax.jit(jax.vmap(functools.partial(change_of, root=root, **options)))
        return np.asarray(run(jnp.asarray(places), jnp.asarray(us)))

    scales: list[Any] = [
        (jnp.ones_like, 0),
        (lambda theta: jnp.array([0.2, 1.0, 3.0]), 0),
        (lambda theta: jnp.full(SIZE, 1 + jnp.sum(theta**2)), 1 / SIZE),
        (lambda theta: jnp.sqrt(0.1 + theta**2), 1),
    ]
    with jax.enable_x64(True):
        for scale, power in scales:
            assert np.abs(changes(scale=scale)).max() > 0.1 or not power
            right: Any = functools.partial(lambda s, p, x: jnp.prod(s(x)) ** p, scale, power)
            assert np.abs(changes(scale=scale, factor=right)).max() < 1e-11
        found = changes(root=lambda theta: jnp.asarray(root))
        # The paper's has half of P covariance u more in what turns u.
        covariance = jnp.asarray(root @ root.T)
        ito = on_the_sphere(lambda u: project(u, covariance @ u) / 2)
        extra = np.asarray(jax.jit(jax.vmap(lambda u: divergence(ito, u)))(jnp.asarray(us)))
    squares = np.sum((us @ root) ** 2, axis=1)
    expected = (SIZE - 1) / 2 * (SIZE * squares - np.sum(root**2))
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    np.testing.assert_allclose(found - extra, found * SIZE / (SIZE - 1), rtol=1e-9)
