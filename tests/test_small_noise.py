"""Bias where the noise of gradients is small, of some coordinates only, or cancels over a pass.

A scale or explicit noise that reckons with its full strength heats coordinates that have none.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import follow

import optax_smile

NUM_CHAINS, NUM_CALLS = 160, 40_000
# Where the rules for the noise differ most; `benchmarks/correctness/small_noise.py` has more.
SPREADS = {"isotropic .5": np.full(6, 0.5), "half": np.array([2.0, 2, 2, 0, 0, 0])}


def mean_squares(sampler, centre, gradient, num_data=1):
    """Squared distances from a centre, over 160 chains together and their last three quarters."""
    tx = sampler(num_data=num_data, prior_precision=0.0, key=0)

    def chain(key):
        of_call = functools.partial(gradient, key)
        draws = follow(tx, key, centre, of_call, jnp.arange(NUM_CALLS))[NUM_CALLS // 4 :]
        return jnp.mean((draws - centre[None]) ** 2, axis=0)

    found = jax.jit(jax.vmap(chain))(jax.random.split(jax.random.key(3), NUM_CHAINS))
    return np.asarray(found, float).mean(axis=0)


def relative_variances(sampler, spread):
    rotation = np.linalg.qr(np.random.default_rng(1).normal(size=(6, 6)))[0]
    precision = rotation.T @ np.diag(np.geomspace(0.2, 3.1, 6)) @ rotation
    curvature = jnp.asarray(precision, jnp.float32)

    def gradient(key, params, count):
        drawn = jax.random.normal(jax.random.fold_in(key, count), (6,))
        return curvature @ params + spread * drawn

    return mean_squares(sampler, jnp.zeros(6), gradient) / np.diag(np.linalg.inv(precision))


@pytest.mark.nightly
@pytest.mark.parametrize("name", SPREADS)
def test_variances(name):
    """The variance about a moving mean gave 2 to 4 times too much with noise up to .5.

    Bounds of the mean square: .003 where the noise is isotropic, .01 where it is not, or twice that
    of `smile`. The Monte Carlo error of 160 chains is .01 to .02.
    """
    spread = jnp.asarray(SPREADS[name], jnp.float32)
    is_isotropic = np.ptp(SPREADS[name]) == 0
    own = relative_variances(optax_smile.psmile, spread) - 1
    bound = 0.003 if is_isotropic else 0.01
    if np.mean(own**2) >= bound:
        bound = 2 * np.mean((relative_variances(optax_smile.smile, spread) - 1) ** 2)
    assert np.mean(own**2) < bound, own
    assert np.abs(own).max() < (0.15 if is_isotropic else 0.3), own


NUM_GROUPS, ROWS_PER_GROUP, NUM_BATCHES = 8, 5, 10


@pytest.mark.nightly
def test_permuted_batches():
    """Explicit noise shaped to fill up that of the gradients had 1.28 for the centre of groups.

    centre ~ N(0, 1), group ~ N(centre, 1), row ~ N(group, 1); the centre comes first. The prior
    alone sees it. The Monte Carlo error of one is .02 to .04, of the mean square .001.
    """
    group = np.repeat(np.arange(NUM_GROUPS), ROWS_PER_GROUP)
    rows = np.random.default_rng(0).normal(size=len(group))
    precision = np.eye(NUM_GROUPS + 1) * (1 + ROWS_PER_GROUP)
    precision[0], precision[:, 0] = -1, -1
    precision[0, 0] = 1 + NUM_GROUPS
    covariance = np.linalg.inv(precision)
    mean = covariance @ np.append(0, np.bincount(group, rows))
    target, members = jnp.asarray(rows, jnp.float32), jnp.asarray(group)

    def loss(theta, batch):
        prior = (theta[0] ** 2 + jnp.sum((theta[1:] - theta[0]) ** 2)) / 2
        return jnp.mean((target[batch] - theta[1:][members[batch]]) ** 2) / 2 + prior / len(rows)

    def gradient(key, params, count):
        order = jax.random.permutation(jax.random.fold_in(key, count // NUM_BATCHES), len(rows))
        return jax.grad(loss)(params, order.reshape(NUM_BATCHES, -1)[count % NUM_BATCHES])

    centre = jnp.asarray(mean, jnp.float32)
    found = mean_squares(optax_smile.psmile, centre, gradient, len(rows))
    ratio = found / np.diag(covariance)
    assert ratio[0] == pytest.approx(1, abs=0.15), ratio
    assert np.mean((ratio - 1) ** 2) < 0.01, ratio
