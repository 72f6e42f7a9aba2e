"""Fully connected networks."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp


class FullyConnected(nn.Module):
    """Hidden layers of `widths`, ReLU between them, `num_outputs` outputs.

    The paper's for UCI data has widths (16, 16, 16).
    """

    widths: Sequence[int] = (16, 16, 16)
    num_outputs: int = 1
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        """Map inputs `[input, ...]` to outputs `[input, output]`."""
        x = x.reshape(len(x), -1)
        for width in self.widths:
            x = nn.relu(nn.Dense(width, dtype=self.dtype)(x))
        return nn.Dense(self.num_outputs, dtype=self.dtype)(x).astype(jnp.float32)
