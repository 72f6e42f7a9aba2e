"""The example networks: sizes as the paper tells them, and what makes each what it is."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from models.convolutional import FilterResponse, row_products

GREY = (2, 28, 28, 1)
# The network, the shape of its inputs, the paper's number of parameters; then a small one.
NETWORKS = {
    models.FullyConnected: ((2, 5), 657, {"widths": (8,)}, (2, 5)),
    models.LeNet: (GREY, 61_706, {"width": 0.5}, GREY),
    models.ResNet7: ((2, 32, 32, 3), 427_722, {"width": 0.125}, (2, 8, 8, 3)),
    models.ResNet18: ((2, 32, 32, 3), 11_178_762, {"width": 0.0625}, (2, 16, 16, 3)),
    models.ViT: ((2, 160, 160, 3), 22_033_290, {"width": 0.125, "depth": 1}, (2, 32, 32, 3)),
    models.GPT: ((2, 256), 10_770_048, {"width": 0.125, "depth": 1, "context": 8}, (2, 8)),
}


def inputs_of(shape):
    generator = np.random.default_rng(0)
    if len(shape) == 2 and shape[1] >= 8:
        return jnp.asarray(generator.integers(65, size=shape))
    return jnp.asarray(generator.normal(size=shape), jnp.float32)


def random_params(network, x):
    """Weights of the right shapes, drawn by NumPy: nothing is compiled."""
    generator = np.random.default_rng(1)
    shapes = jax.eval_shape(network.init, jax.random.key(0), x)

    def draw(leaf):
        spread = 0.5 * np.prod(leaf.shape[:-1]) ** -0.5 if len(leaf.shape) > 1 else 0.1
        return jnp.asarray(spread * generator.normal(size=leaf.shape), leaf.dtype)

    return jax.tree.map(draw, shapes)


LARGE = [pytest.param(x, marks=pytest.mark.nightly) for x in list(NETWORKS)[2:]]


@pytest.mark.parametrize("kind", [*list(NETWORKS)[:2], *LARGE])
def test_size_precision_and_each_example_alone(kind):
    """Half precision on float32 parameters; GPT sees no later letter."""
    papers, size, options, shape = NETWORKS[kind]
    whole = jax.eval_shape(kind().init, jax.random.key(0), inputs_of(papers))
    assert sum(leaf.size for leaf in jax.tree.leaves(whole)) == size
    assert {leaf.dtype for leaf in jax.tree.leaves(whole)} == {jnp.dtype("float32")}
    x, plain, half = inputs_of(shape), kind(**options), kind(**options, dtype=jnp.bfloat16)
    params, is_text = random_params(plain, x), kind is models.GPT
    dtypes = jax.eval_shape(half.init, jax.random.key(0), x)
    assert jax.tree.all(jax.tree.map(lambda leaf: leaf.dtype == jnp.float32, dtypes))
    assert "bf16" in str(jax.make_jaxpr(half.apply)(params, x))
    # The second example changes, and of a text what follows its fifth letter.
    kept, other = (np.s_[:, :5], np.s_[:, 5:]) if is_text else (np.s_[:1], np.s_[1:])
    others: Any = x.at[:, 5].add(1) if is_text else x.at[1].multiply(-1.0)

    @jax.jit
    def run(params, x, others):
        return plain.apply(params, x), half.apply(params, x), plain.apply(params, others)

    full, rough, changed = run(params, x, others)
    assert full.dtype == rough.dtype == jnp.float32
    assert 0 < jnp.abs(full - rough).max() < 0.1
    classes = {models.FullyConnected: (1,), models.GPT: (8, 65)}.get(kind, (10,))
    assert full.shape == (2, *classes)
    np.testing.assert_allclose(full[kept], changed[kept], atol=1e-6)
    assert jnp.abs(full[other] - changed[other]).max() > 1e-4


@pytest.mark.slow
def test_filter_response_is_its_formula():
    x = np.random.default_rng(1).normal(size=(3, 4, 5, 2))
    scale, shift, tau = np.array([2.0, -1.0]), np.array([0.1, 0.2]), np.array([-0.3, 0.4])
    params = jax.tree.map(jnp.float32, {"params": {"scale": scale, "shift": shift, "tau": tau}})
    apply: Any = functools.partial(FilterResponse().apply, params)
    normal = x / np.sqrt((x**2).mean(axis=(1, 2), keepdims=True) + 1e-6)
    expected = np.maximum(scale * normal + shift, tau)
    np.testing.assert_allclose(apply(jnp.float32(x)), expected, rtol=1e-5, atol=1e-5)
    # A constant image is no division by zero.
    found, slopes = jax.value_and_grad(lambda x: jnp.sum(apply(x)))(jnp.zeros(x.shape))
    assert jnp.all(jnp.isfinite(slopes)) and jnp.isfinite(found)


@pytest.mark.slow
def test_row_products_are_a_convolution():
    x = inputs_of((2, 9, 9, 3))
    plain, rows = (nn.Conv(4, (5, 5), padding="VALID", conv_general_dilated=f)
                   for f in (None, row_products))  # fmt: skip
    params = random_params(plain, x)

    @jax.jit
    def outputs_and_slopes(params, x):
        def total(params, x, network):
            out = network.apply(params, x)
            return jnp.sum(out**2), out

        both = jax.value_and_grad(total, (0, 1), has_aux=True)
        return both(params, x, plain), both(params, x, rows)

    expected, found = outputs_and_slopes(params, x)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-3)
    jax.tree.map(close, found, expected)
    strided = nn.Conv(4, (5, 5), 2, conv_general_dilated=row_products)
    with pytest.raises(ValueError, match="strides must be 1"):
        jax.eval_shape(strided.init, jax.random.key(0), x)
