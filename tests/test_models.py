"""The example networks: sizes as the paper tells them, and what makes each what it is."""

import sys
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
import models  # noqa: E402
from models.convolutional import FilterResponse, row_products  # noqa: E402

COLOUR, GREY, LETTERS = (2, 32, 32, 3), (2, 28, 28, 1), (2, 256)
NETWORKS = {
    "FullyConnected": (models.FullyConnected(), (2, 5), 657),
    "LeNet": (models.LeNet(), GREY, 61_706),
    "ResNet7": (models.ResNet7(), COLOUR, 427_722),
    "ResNet18": (models.ResNet18(), COLOUR, 11_178_762),
    "ViT": (models.ViT(), (2, 160, 160, 3), 22_033_290),
    "GPT": (models.GPT(), LETTERS, 10_770_048),
}
SMALL = {
    "FullyConnected": (models.FullyConnected, {"widths": (8,)}, (2, 5)),
    "LeNet": (models.LeNet, {"width": 0.5}, GREY),
    "ResNet7": (models.ResNet7, {"width": 0.125}, (2, 8, 8, 3)),
    "ResNet18": (models.ResNet18, {"width": 0.0625}, (2, 16, 16, 3)),
    "ViT": (models.ViT, {"width": 0.125, "depth": 1}, (2, 32, 32, 3)),
    "GPT": (models.GPT, {"width": 0.125, "depth": 1, "context": 8}, (2, 8)),
}


def as_array(outputs: Any) -> Any:
    """What `apply` gives without mutable collections."""
    return outputs


def inputs_of(shape):
    generator = np.random.default_rng(0)
    if len(shape) == 2 and shape[1] >= 8:
        return jnp.asarray(generator.integers(65, size=shape))
    return jnp.asarray(generator.normal(size=shape), jnp.float32)


@pytest.mark.parametrize("name", NETWORKS)
def test_has_the_papers_size(name):
    network, shape, size = NETWORKS[name]
    params = jax.eval_shape(network.init, jax.random.key(0), inputs_of(shape))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == size
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("name", SMALL)
def test_computes_in_half_precision_on_float32_parameters(name):
    kind, options, shape = SMALL[name]
    x = inputs_of(shape)
    params = jax.jit(kind(**options).init)(jax.random.key(0), x)
    half = kind(**options, dtype=jnp.bfloat16)
    assert jax.tree.all(jax.tree.map(lambda x: x.dtype == jnp.float32, params))
    full, rough = (jax.jit(network.apply)(params, x) for network in (kind(**options), half))
    assert full.dtype == rough.dtype == jnp.float32
    assert 0 < jnp.abs(full - rough).max() < 0.1
    assert "bf16" in str(jax.make_jaxpr(half.apply)(params, x))
    classes = {"FullyConnected": (1,), "GPT": (8, 65)}.get(name, (10,))
    assert full.shape == (2, *classes)


@pytest.mark.parametrize("name", ["ResNet7", "ResNet18", "LeNet", "ViT"])
def test_no_example_sees_another(name):
    kind, options, shape = SMALL[name]
    x = inputs_of(shape)
    params, apply = jax.jit(kind(**options).init)(jax.random.key(0), x), kind(**options).apply
    both, alone = (jax.jit(apply)(params, y) for y in (x, x[:1]))
    np.testing.assert_allclose(both[:1], alone, atol=1e-5)


def test_gpt_sees_no_later_letter():
    kind, options, shape = SMALL["GPT"]
    tokens = inputs_of(shape)
    params = jax.jit(kind(**options).init)(jax.random.key(0), tokens)
    changed = tokens.at[:, 5].add(1)
    one, other = (jax.jit(kind(**options).apply)(params, x) for x in (tokens, changed))
    np.testing.assert_allclose(one[:, :5], other[:, :5], atol=1e-6)
    assert jnp.abs(one[:, 5:] - other[:, 5:]).min(axis=-1).max() > 0


def test_filter_response_is_its_formula():
    x = np.random.default_rng(1).normal(size=(3, 4, 5, 2))
    scale, shift, tau = np.array([2.0, -1.0]), np.array([0.1, 0.2]), np.array([-0.3, 0.4])
    params = {"scale": scale, "shift": shift, "tau": tau}
    params = {"params": jax.tree.map(jnp.float32, params)}
    found: Any = FilterResponse().apply(params, jnp.float32(x))
    normal = x / np.sqrt((x**2).mean(axis=(1, 2), keepdims=True) + 1e-6)
    expected = np.maximum(scale * normal + shift, tau)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_constant_image_is_no_division_by_zero():
    x = jnp.zeros((1, 2, 2, 1))
    params = FilterResponse().init(jax.random.key(0), x)
    slopes = jax.grad(lambda x: jnp.sum(as_array(FilterResponse().apply(params, x))))(x)
    assert jnp.all(jnp.isfinite(slopes))


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_row_products_are_a_convolution(padding):
    x = inputs_of((2, 9, 9, 3))
    plain, rows = (nn.Conv(4, (5, 5), padding=padding, conv_general_dilated=f)
                   for f in (None, row_products))  # fmt: skip
    params = plain.init(jax.random.key(0), x)

    def outputs_and_slopes(network):
        def total(params, x):
            out = network.apply(params, x)
            return jnp.sum(out**2), out

        return jax.value_and_grad(total, (0, 1), has_aux=True)(params, x)

    found, expected = outputs_and_slopes(rows), outputs_and_slopes(plain)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-3), found, expected
    )
    with pytest.raises(ValueError, match="strides must be 1"):
        nn.Conv(4, (5, 5), 2, conv_general_dilated=row_products).init(jax.random.key(0), x)
