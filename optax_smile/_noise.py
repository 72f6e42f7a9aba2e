"""Random trees like the parameters, and keys."""

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from optax_smile import _places, _tree
from optax_smile._types import T

# See `isotropic_like`: with this many parameters, random signs are as good as normal numbers.
SMALLEST_NETWORK = 500


def split(key: jax.Array | None) -> tuple[jax.Array | None, jax.Array | None]:
    """Return the next key and the key to use now; None if the loss is not random."""
    following, used = (None, None) if key is None else jax.random.split(key)
    return following, used


def normal_like(key: jax.Array, tree: T) -> T:
    """Draw a standard normal tree of the shapes and precision of `tree`."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(key, len(leaves))

    def draw(key: jax.Array, leaf: jax.Array) -> jax.Array:
        sharding = jax.typeof(leaf).sharding
        if any(sharding.spec) and not isinstance(leaf, jax.core.Tracer):
            # With explicit axes outside `jit`, JAX draws only on the device of the key.
            return jax.device_put(jax.random.normal(key, leaf.shape, leaf.dtype), leaf.sharding)
        spread = {"out_sharding": sharding} if any(sharding.spec) else {}
        return jax.random.normal(key, leaf.shape, leaf.dtype, **spread)

    return jax.tree.unflatten(structure, [draw(*pair) for pair in zip(keys, leaves, strict=True)])


def isotropic_like(key: jax.Array, tree: T, places: _places.Places) -> T:
    """Draw a tree of independent entries with mean 0 and variance 1.

    Networks get random signs, which are computed from their position where they are used: normal
    numbers would cost as much as the rest of a call. Small trees get normal numbers, since in low
    dimensions random signs are a poor approximation of an isotropic distribution.
    """
    if not has_signs(tree):
        return normal_like(key, tree)
    words = jax.random.key_data(key).reshape(-1)

    def signs(leaf: jax.Array, place: _places.Place) -> jax.Array:
        return _noise_signs(place.through(leaf, words[0]), words[1], leaf)

    return jax.tree.map(signs, tree, places)


def has_signs(tree: object) -> bool:
    """Whether `isotropic_like` draws random signs."""
    return _tree.size(tree) >= SMALLEST_NETWORK


def _noise_signs(bits: jax.Array, second: jax.Array, leaf: jax.Array) -> jax.Array:
    """Draw random signs by a hash of a random number and the numbers of the entries.

    Source: Wellons 2018, "triple32", which mixes 32 bits by three multiplications. With two of them
    ("lowbias32"), signs at some distances had a correlation of .001.
    """
    bits = bits ^ second
    bits = (bits ^ (bits >> 17)) * np.uint32(0xED5AD4BB)
    bits = (bits ^ (bits >> 11)) * np.uint32(0xAC4C1B51)
    bits = (bits ^ (bits >> 15)) * np.uint32(0x31848BAB)
    one = jnp.ones((), leaf.dtype)
    return jnp.where(bits >> 31 == 0, one, -one)
