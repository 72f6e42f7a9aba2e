"""The momentum whose norm is a sum of nuclear norms, `smile(norm="spectral")`."""

import math
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from optax.contrib import MuonDimensionNumbers
from runs import refused

import optax_smile

SHAPES = {"w": (2, 5), "k": (3, 2, 4), "b": (3,)}
# Axes of the leaf "k", whose first axis indexes matrices.
STACKED = {"w": MuonDimensionNumbers(), "k": MuonDimensionNumbers(-1, 1), "b": None}
POSTERIOR: dict[str, Any] = {"num_data": 1, "prior_precision": 0.0}


def spectral(step_size: Any = None, **given) -> Any:
    given = {"norm": "spectral", "decoherence_length": None} | POSTERIOR | given
    return optax_smile.smile(step_size, **given)


def velocity(momentum: Any, matrices: Any = None) -> Any:
    """The gradient of the norm: the first step of a chain at rest is along that of -g."""
    tx = spectral(1.0, matrices=matrices)
    gradient = jax.tree.map(jnp.negative, momentum)
    return tx.update(gradient, tx.init(jax.tree.map(jnp.zeros_like, momentum)), momentum)[0]


def tree(seed: int = 0, shapes: Any = SHAPES, dtype: Any = np.float32) -> Any:
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in shapes.items()}


def nuclear(momentum, size, matrices) -> Any:
    """The norm by an SVD; the rows of "k" are axis 2."""
    total = 0
    for name, x in momentum.items():
        if name == "k" and matrices is None:
            x = x.reshape(6, 4)
        if name == "b":
            total += math.sqrt(x.size / size) * jnp.linalg.norm(x)
        else:
            values = jnp.linalg.svd(x, compute_uv=False)
            total += math.sqrt(max(x.shape[-2:]) / size) * jnp.sum(values)
    return total


@pytest.mark.parametrize("matrices", [None, lambda params: STACKED])
def test_the_velocity_is_the_gradient_of_the_norm(matrices):
    """Also for huge or tiny momenta; small singular values grow, but not above one."""
    with jax.enable_x64(True):
        p, size = tree(dtype=float), 37
        expected = jax.grad(partial(nuclear, size=size, matrices=matrices))(p)
        for factor in (1, 1e-100, 1e100):
            v = velocity(optax.tree.scale(factor, p), matrices)
            chex.assert_trees_all_close(v, expected, atol=1e-5)
            assert optax.tree.norm(v) == pytest.approx(1, abs=1e-5)
        left, _, right = np.linalg.svd(np.random.default_rng(1).normal(size=(4, 4)))
        spread = velocity({"w": jnp.asarray(left * np.geomspace(1, 1e-4, 4) @ right)})["w"]
        values = np.linalg.svd(2 * spread, compute_uv=False)
        assert np.all(values < 1 + 1e-5) and np.all(values > 0.01)


def test_leaves_without_a_direction_stay_finite():
    p: Any = {"zero": jnp.zeros((3, 4)), "empty": jnp.zeros((0, 3)), "row": jnp.ones((1, 4))}
    p |= {"one": jnp.outer(jnp.arange(3.0), jnp.ones(4)), "scalar": jnp.float32(-2)}
    v = velocity(p)
    assert not v["zero"].any() and v["empty"].shape == (0, 3) and v["scalar"] < 0
    np.testing.assert_allclose(v["row"], np.sqrt(4 / 29) / 2 * np.ones((1, 4)), rtol=1e-5)
    np.testing.assert_allclose(np.linalg.svd(v["one"])[1], [np.sqrt(4 / 29), 0, 0], atol=1e-5)
    # A leaf without a gradient does not move; a first gradient of zero throws no chain out.
    tx, params = spectral(), tree()
    updates, state = tx.update({**params, "k": None}, tx.init(params), params)
    assert updates["k"] is None and optax_smile.stats(state).num_parameters == 13
    updates, state = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    assert optax.tree.norm(updates) == 0 and optax_smile.stats(state).accepted
    updates, _ = tx.update(jax.tree.map(jnp.bfloat16, params), state, params)
    assert 0 < optax.tree.norm(updates) < 1e-3
    # A gradient exactly uphill, so large that nothing of the momentum remains.
    tx, slope = spectral(1.0), tree(1)
    _, state = tx.update(slope, tx.init(params), params, value=1.0)
    steep = jax.tree.map(lambda x: -1e4 * x, slope)
    told = optax_smile.stats(tx.update(steep, state, params, value=1.0)[1])
    assert told.accepted and jnp.isfinite(told.energy_change)


def cone(number: int) -> Any:
    """Momenta of density exp(-||p||) for "w" and "b", by 300 Metropolis steps for the matrix."""
    rng, weight = np.random.default_rng(0), np.sqrt([5 / 13, 3 / 13])

    def norm(x):
        return weight[0] * np.linalg.svd(x, compute_uv=False).sum(axis=-1)

    w = 3 * rng.normal(size=(number, 2, 5))
    for _ in range(300):
        new = w + rng.normal(size=w.shape)
        accepted = np.log(rng.uniform(size=number)) < norm(w) - norm(new)
        w = np.where(accepted[:, None, None], new, w)
    b = rng.normal(size=(number, 3))
    radius = rng.gamma(3, size=(number, 1)) / weight[1]
    return {"w": w, "b": b / np.linalg.norm(b, axis=1, keepdims=True) * radius}


@pytest.mark.nightly
def test_full_batches_keep_a_gaussian(number=256, redraws=400, length=40):
    """With a momentum drawn anew every 20 steps; 13 variances within 4.5 standard errors.

    Standard errors of 256 chains are .6 % of a variance: a false alarm in one of 10,000 seeds.
    """
    widths = jnp.geomspace(0.3, 3, 13)
    width: Any = {"w": widths[:10].reshape(2, 5), "b": widths[10:]}
    # Omelyan, Mryglod, Folk 2003.
    tx, kick, drift = spectral(0.4, integrator="minimal_norm"), 0.1931833275037836, 0.5

    def gradient(x):
        return jax.tree.map(lambda a, s: a / s**2, x, width)

    def kicked(p, g, time):
        p = jax.tree.map(lambda a, b: a - time / 12 * b, p, g)
        norm = optax.tree.vdot(p, velocity(p))
        return jax.tree.map(lambda a: a / norm, p)

    def redrawn(carry, p):
        """Make the kick that opens the next step by hand."""
        x, state = carry
        time = 0.4 * kick
        slope: Any = -1 / 12 * optax.tree.vdot(gradient(x), velocity(p))
        p = kicked(kicked(p, gradient(x), 0.0), gradient(x), time * (1 + slope * time / 2))
        v = velocity(p)
        state = state._replace(conjugate=p, direction=v)
        x = jax.tree.map(lambda a, b: a + 0.4 * drift * b, x, v)

        def call(carry, _):
            x, state = carry
            updates, state = tx.update(gradient(x), state, x)
            return (optax.apply_updates(x, updates), state), x

        (_, state), seen = jax.lax.scan(call, (x, state), length=length)
        last = jax.tree.map(lambda a: a[-1], seen)
        # Every second call ends a step.
        return (last, state), jax.tree.map(lambda a: jnp.mean(a[1::2] ** 2, axis=0), seen)

    def chain(key, momenta):
        keys = dict(zip(width, jax.random.split(key), strict=True))
        x = jax.tree.map(lambda s, k: s * jax.random.normal(k, s.shape), width, keys)
        _, state = tx.update(gradient(x), tx.init(x), x)
        squares = jax.lax.scan(redrawn, (x, state), momenta)[1]
        return jax.tree.map(lambda a, s: jnp.mean(a, axis=0) / s**2, squares, width)

    momenta = jax.tree.map(
        lambda a: jnp.float32(a.reshape(number, redraws, *a.shape[1:])), cone(number * redraws)
    )
    found = jax.jit(jax.vmap(chain))(jax.random.split(jax.random.key(1), number), momenta)
    ratios = np.concatenate([np.asarray(x).reshape(number, -1) for x in found.values()], axis=1)
    errors = ratios.std(axis=0, ddof=1) / np.sqrt(number)
    assert errors.max() < 0.01
    assert np.abs((ratios.mean(axis=0) - 1) / errors).max() < 4.5


def test_pure_noise_turns_the_momentum_by_the_angle_of_the_tuner():
    """The turn is half the angle, phi, so a kick costs d phi^2 / 2 as with a Euclidean norm.

    The noise has rank one, like that of small batches, and always the same length.
    """
    params = tree(shapes={"w": (16, 16), "b": (4,)})
    keys = jax.random.split(jax.random.key(0), 600)
    for angle in (0.2, 0.6):
        tx = spectral(tuner=optax_smile.angle_tuner(angle))

        def call(carry, key, tx=tx):
            params, state = carry
            rows, columns = (x / jnp.linalg.norm(x) for x in jax.random.normal(key, (2, 16)))
            noise = {"w": jnp.outer(rows, columns), "b": jnp.zeros(4)}
            updates, state = tx.update(noise, state, params, value=0.0)
            moved = optax.apply_updates(params, updates)
            return (moved, state), optax_smile.stats(state).energy_change

        _, gained = jax.lax.scan(call, (params, tx.init(params)), keys)
        # With the Euclidean length of the noise, it would be .69 and .54 times this.
        cost = 260 / 2 * (angle / 2) ** 2
        assert np.mean(gained[300:]) == pytest.approx(cost, rel=0.1)


def test_a_run_with_matrices_of_its_own_is_resumed_and_says_what_it_samples(tmp_path):
    def matrices(params):
        return {"w": MuonDimensionNumbers(1, 0), "b": None}

    start = {"w": jnp.arange(12.0).reshape(2, 2, 3), "b": jnp.ones((2, 3))}
    given: Any = {"num_warmup": 5, "thin": 1, "key": 0, "progress": False, "check": False}
    given |= {"sampler": spectral(num_data=40, matrices=matrices), "directory": tmp_path}
    given["batches"] = [np.ones((4, 1), np.float32)]

    def loss(params, batch):
        return optax.tree.norm(params, squared=True) / 40 + 0 * jnp.sum(batch)

    for number in (10, 20):
        found = optax_smile.sample(loss, start, num_draws=number, **given)
    text = str(optax_smile.diagnostics.summary(found))
    assert "norm='spectral': not the Bayesian posterior unless" in text


def test_what_does_not_fit_is_refused():
    rule = r"smile\(decoherence_length=...\)` must be None .*norm='spectral', got 'matched'"
    refused(rule, spectral, decoherence_length="matched")

    class Scale(optax_smile.Preconditioner): ...

    refused(r"smile\(preconditioner=...\)` must be None", spectral, preconditioner=Scale())
    rule = r"smile\(matrices=...\)` must be None unless"
    refused(rule, spectral, norm="euclidean", matrices=tree)
    params = tree()
    for entry, got in (
        (MuonDimensionNumbers(0, 2), "2 axes"),
        (MuonDimensionNumbers(1, -1), "2 axes"),
        (MuonDimensionNumbers((), 1), "2 axes"),
        ("w", "'w'"),
    ):
        tx = spectral(matrices=lambda _, entry=entry: {**STACKED, "w": entry})
        rule = rf"smile\(matrices=...\)` must be a function .*\['w'\], got .*{got}"
        refused(rule, tx.init, params)
    refused("that returns a tree of the structure", spectral(matrices=lambda _: {}).init, params)
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,))
    params["w"] = jax.device_put(params["w"], NamedSharding(mesh, PartitionSpec("x")))
    tx = spectral(0.1)
    rule = r"smile\(params=...\)` must be .* explicit axes, .*AxisType.Auto"
    refused(rule, jax.jit(tx.update), params, tx.init(params), params)
