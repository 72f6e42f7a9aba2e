"""Compile `update` where a loop calls it outside of `jax.jit`.

A compiled program outlives the transformation for which it was made: `optax.inject_hyperparams`
builds its transformation in every call. So the key of a program is the function that built the
sampler and its arguments, from which the program builds the sampler again while it is traced.
Arguments that are arrays become arguments of the program. Numbers of Python become constants in it,
as where a loop compiles `update` itself. All other objects are identified by `id`.
"""

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from optax_smile._types import Options, Tree

# Number of programs kept, with the objects that they use; the least recently used one goes first.
MOST_PROGRAMS = 32
PLAIN = bool, int, float, str, np.bool_
ARRAYS = jax.Array, np.ndarray, np.generic


@dataclass(frozen=True)
class Constant:
    """An argument of a sampler that is a constant in its program."""

    identity: Hashable
    value: object = field(compare=False)


class Recipe:
    """How to build a sampler again.

    Attributes:
        numbers: arguments of the sampler that are arguments of its program.
    """

    def __init__(self, build: Callable, arguments: Options):
        leaves, structure = jax.tree.flatten(arguments)
        constants = tuple(map(_constant, leaves))
        pairs = zip(leaves, constants, strict=True)
        self.numbers = [leaf for leaf, constant in pairs if constant is None]
        self.is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        self.program = functools.partial(_program, build, structure, constants)

    def run(self, update: Callable, *given: Tree) -> Tree:
        """Call `update`, compiled if all of its arguments are concrete."""
        is_eager = not self.is_traced and not cast(Tree, jax.config).jax_disable_jit
        is_eager = is_eager and all(
            isinstance(leaf, (*ARRAYS, int, float)) and not isinstance(leaf, jax.core.Tracer)
            for leaf in jax.tree.leaves(given)
        )
        return self.program()(self.numbers, *given) if is_eager else update(*given)


def _constant(leaf: object) -> Constant | None:
    """An argument that is a constant of the program; None for one that is an argument of it."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        # Only `init` reads the numbers in it.
        return Constant(("key", jax.random.key_impl(leaf)), leaf)
    if isinstance(leaf, PLAIN):
        # 1, 1.0 and True are equal, and so are 0.0 and -0.0.
        return Constant((type(leaf), repr(leaf)), leaf)
    return None if isinstance(leaf, ARRAYS) else Constant(("object", id(leaf)), leaf)


@functools.lru_cache(MOST_PROGRAMS)
def _program(
    build: Callable, structure: Tree, constants: tuple[Constant | None, ...]
) -> Callable[..., Tree]:
    def update(numbers: list[jax.Array], *given: Tree) -> Tree:
        rest = iter(numbers)
        leaves = [next(rest) if x is None else x.value for x in constants]
        return build(**jax.tree.unflatten(structure, leaves)).update(*given)

    return jax.jit(update)
