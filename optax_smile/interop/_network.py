"""The estimators' default network, and shuffled batches."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


class Batches:
    """Batches of examples, reshuffled in every pass."""

    def __init__(self, size: int, seed: int, *data: np.ndarray):
        self.rng, self.data, self.size = np.random.default_rng(seed), data, min(size, len(data[0]))

    def __iter__(self):
        order = self.rng.permutation(len(self.data[0]))
        for end in range(self.size, len(order) + 1, self.size):
            yield tuple(x[order[end - self.size : end]] for x in self.data)


def init(key: jax.Array, sizes: Sequence[int]) -> list[tuple[jax.Array, jax.Array]]:
    """Initialise layers of the given sizes, inputs first: He's rule for weights, zero biases."""
    he, keys = jax.nn.initializers.he_normal(), jax.random.split(key, len(sizes) - 1)
    shapes = zip(keys, sizes[:-1], sizes[1:], strict=True)
    return [(he(key, (n, m)), jnp.zeros((1, m))) for key, n, m in shapes]


def apply(layers: Sequence[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
    """Map inputs `[input, feature]` to outputs `[input, output]`, with ReLU between layers."""
    for weight, bias in layers[:-1]:
        x = jax.nn.relu(x @ weight + bias)
    return x @ layers[-1][0] + layers[-1][1]
