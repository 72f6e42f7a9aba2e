"""Transformers: a Vision Transformer, and a GPT as in nanoGPT. Normalisation comes before."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

PLACES = nn.initializers.normal(0.02)


class Block(nn.Module):
    """Attention and a perceptron of four times the width, each added to what came in."""

    num_heads: int
    is_causal: bool = False
    use_bias: bool = True
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        """Map tokens `[input, token, feature]` to tokens."""
        width, options = x.shape[-1], {"use_bias": self.use_bias, "dtype": self.dtype}
        heads = nn.Dense(3 * width, **options)(nn.LayerNorm(**options)(x))
        query, key, value = jnp.moveaxis(
            heads.reshape(*x.shape[:2], 3, self.num_heads, width // self.num_heads), 2, 0
        )
        seen = jax.nn.dot_product_attention(query, key, value, is_causal=self.is_causal)
        x = x + nn.Dense(width, **options)(seen.reshape(x.shape))
        wide = nn.gelu(nn.Dense(4 * width, **options)(nn.LayerNorm(**options)(x)))
        return x + nn.Dense(width, **options)(wide)


class ViT(nn.Module):
    """Vision Transformer, by default the paper's for images of 160 x 160: 22,033,290 parameters.

    The paper's table leaves open what its head of 1,024 is; here a dense layer with tanh between
    the class token and the logits.
    """

    num_classes: int = 10
    patch: int = 16
    features: int = 384
    depth: int = 12
    num_heads: int = 8
    head: int = 1024
    width: float = 1.0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        """Map images `[input, row, column, channel]` to logits `[input, class]`."""
        features = round(self.width * self.features / self.num_heads) * self.num_heads
        strides = (self.patch, self.patch)
        x = nn.Conv(features, strides, strides, padding="VALID", dtype=self.dtype)(x)
        x = x.reshape(len(x), -1, features)
        first = self.param("class", nn.initializers.zeros, (1, 1, features)).astype(x.dtype)
        x = jnp.concatenate([jnp.broadcast_to(first, (len(x), 1, features)), x], axis=1)
        x = x + self.param("places", PLACES, (1, *x.shape[1:])).astype(x.dtype)
        for _ in range(self.depth):
            x = Block(self.num_heads, dtype=self.dtype)(x)
        x = nn.LayerNorm(dtype=self.dtype)(x[:, 0])
        x = jnp.tanh(nn.Dense(round(self.width * self.head), dtype=self.dtype)(x))
        return nn.Dense(self.num_classes, dtype=self.dtype)(x).astype(jnp.float32)


class GPT(nn.Module):
    """Logits of the next character, without bias and dropout; by default 10,770,048 parameters.

    The paper's 10.8 million leave open whether the last layer shares the weights of the first
    (then 10,745,088); here it has its own.
    """

    num_tokens: int = 65
    context: int = 256
    features: int = 384
    depth: int = 6
    num_heads: int = 6
    width: float = 1.0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, tokens):
        """Map characters `[input, token]` to logits `[input, token, class]`."""
        features = round(self.width * self.features / self.num_heads) * self.num_heads
        x = nn.Embed(self.num_tokens, features, dtype=self.dtype, embedding_init=PLACES)(tokens)
        places = self.param("places", PLACES, (self.context, features))
        x = x + places[None, : tokens.shape[1]].astype(x.dtype)
        for _ in range(self.depth):
            x = Block(self.num_heads, is_causal=True, use_bias=False, dtype=self.dtype)(x)
        x = nn.LayerNorm(use_bias=False, dtype=self.dtype)(x)
        logits = nn.Dense(self.num_tokens, use_bias=False, dtype=self.dtype)(x)
        return logits.astype(jnp.float32)
