"""Convolutional networks: LeNet, and residual networks with filter response normalisation."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


def row_products(x, kernel, strides, padding: str, **_):
    """Convolve with stride 1 by one matrix product: every row of the image by a banded matrix.

    As `nn.Conv` calls it. On a CPU core a gradient of LeNet takes two thirds of the time that it
    takes with XLA's convolution, which is slow for few channels, and under `vmap` a small part.
    """
    if tuple(strides) != (1, 1):
        raise ValueError(f"`row_products`: strides must be 1, got {tuple(strides)}.")
    height, width, _, filters = kernel.shape
    if padding == "SAME":
        x = jnp.pad(x, ((0, 0), (height // 2,) * 2, (width // 2,) * 2, (0, 0)))
    num_rows, num_columns = x.shape[1] - height + 1, x.shape[2] - width + 1
    rows = x.reshape(*x.shape[:2], -1)
    rows = jnp.concatenate([rows[:, i : i + num_rows] for i in range(height)], axis=-1)
    places = jnp.stack([jnp.eye(x.shape[2], num_columns, k=-j) for j in range(width)])
    band = jnp.einsum("jab,ijcd->iacbd", places.astype(kernel.dtype), kernel)
    out = rows.reshape(-1, rows.shape[-1]) @ band.reshape(rows.shape[-1], -1)
    return out.reshape(len(x), num_rows, num_columns, filters)


class LeNet(nn.Module):
    """Two convolutions and three dense layers, GELU, average pooling: 61,706 parameters.

    `conv` computes the convolutions: None for XLA's, `row_products` on CPUs.
    """

    num_classes: int = 10
    width: float = 1.0
    dtype: Any = jnp.float32
    conv: Callable[..., Any] | None = None

    @nn.compact
    def __call__(self, x):
        """Map images `[input, 28, 28, 1]` to logits `[input, class]`."""
        filters = [round(self.width * n) for n in (6, 16)]
        for n, padding in zip(filters, ("SAME", "VALID"), strict=True):
            options = {"dtype": self.dtype, "conv_general_dilated": self.conv}
            x = nn.gelu(nn.Conv(n, (5, 5), padding=padding, **options)(x))
            x = nn.avg_pool(x, (2, 2), (2, 2))
        x = x.reshape(len(x), -1)
        for n in (120, 84):
            x = nn.gelu(nn.Dense(round(self.width * n), dtype=self.dtype)(x))
        return nn.Dense(self.num_classes, dtype=self.dtype)(x).astype(jnp.float32)


class FilterResponse(nn.Module):
    """Filter response normalisation and its thresholded ReLU (Singh & Krishnan, CVPR 2020).

    x / sqrt(mean of x^2 over an image + 1e-6), scaled and shifted, at least tau: three parameters a
    channel, and no example sees another.
    """

    @nn.compact
    def __call__(self, x):
        """Normalise images `[input, row, column, channel]`."""
        ones, zeros = nn.initializers.ones, nn.initializers.zeros
        scale, shift, tau = (
            self.param(name, value, (x.shape[-1],)).astype(x.dtype)[None, None, None]
            for name, value in (("scale", ones), ("shift", zeros), ("tau", zeros))
        )
        square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=(1, 2), keepdims=True)
        x = x * jax.lax.rsqrt(square + 1e-6).astype(x.dtype)
        return jnp.maximum(scale * x + shift, tau)


class ConvFRN(nn.Module):
    """A 3 x 3 convolution without bias, and `FilterResponse`."""

    filters: int
    stride: int = 1
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        """Map images to images."""
        strides = (self.stride, self.stride)
        x = nn.Conv(self.filters, (3, 3), strides, use_bias=False, dtype=self.dtype)(x)
        return FilterResponse()(x)


class ResNet7(nn.Module):
    """The paper's small residual network: 427,722 parameters.

    The paper's table leaves open whether convolutions have a bias (then 428,266); here they have
    none.
    """

    num_classes: int = 10
    width: float = 1.0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        """Map images `[input, row, column, channel]` to logits `[input, class]`."""
        narrow, middle, wide = (round(self.width * n) for n in (32, 64, 128))
        x = ConvFRN(narrow, dtype=self.dtype)(x)
        for n, pools in ((middle, True), (middle, False), (wide, True), (wide, True)):
            x = ConvFRN(n, dtype=self.dtype)(x)
            x = nn.max_pool(x, (2, 2), (2, 2)) if pools else x
        x = x + ConvFRN(wide, dtype=self.dtype)(x)
        x = jnp.mean(x, axis=(1, 2))
        return nn.Dense(self.num_classes, dtype=self.dtype)(x).astype(jnp.float32)


class ResNet18(nn.Module):
    """Residual network of 18 layers for images of 32 x 32: 11,178,762 parameters.

    The paper's table leaves open the size of the first pooling (here 2 x 2), the shortcut where
    the shape changes (here a 1 x 1 convolution and `FilterResponse`), and what follows a sum (here
    nothing: the second `ConvFRN` of a block ends in its own threshold).
    """

    num_classes: int = 10
    width: float = 1.0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        """Map images `[input, row, column, channel]` to logits `[input, class]`."""
        x = ConvFRN(round(self.width * 64), dtype=self.dtype)(x)
        x = nn.max_pool(x, (2, 2), (2, 2))
        for stage, n in enumerate((64, 128, 256, 512)):
            filters = round(self.width * n)
            for block in range(2):
                stride = 2 if stage and not block else 1
                shortcut = x
                if shortcut.shape[-1] != filters or stride > 1:
                    one = nn.Conv(filters, (1, 1), (stride,) * 2, use_bias=False, dtype=self.dtype)
                    shortcut = FilterResponse()(one(x))
                x = ConvFRN(filters, stride, dtype=self.dtype)(x)
                x = ConvFRN(filters, dtype=self.dtype)(x) + shortcut
        x = jnp.mean(x, axis=(1, 2))
        return nn.Dense(self.num_classes, dtype=self.dtype)(x).astype(jnp.float32)
