"""Compile `update` where a loop calls it outside of `jax.jit`.

A compiled program outlives the transformation for which it was made: `optax.inject_hyperparams`
builds its transformation in every call. So the key of a program is the function that built the
sampler and its arguments, from which the program builds the sampler again while it is traced.
Arguments that are arrays become arguments of the program. Numbers of Python become constants in it,
as where a loop compiles `update` itself. All other objects are identified by `id`, and their
programs are removed with them.
"""

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from optax_smile._types import Options, Tree

# Number of programs kept; the least recently used one is removed first.
MOST_PROGRAMS = 32
_PROGRAMS: dict[Hashable, Callable[..., Tree]] = {}
# Reentrant: an object may be removed while this module holds the lock.
_LOCK = threading.RLock()
PLAIN = bool, int, float, str, np.bool_
ARRAYS = jax.Array, np.ndarray, np.generic


class Recipe:
    """How to build a sampler again.

    Attributes:
        numbers: arguments of the sampler that are arguments of its program.
        has_program: whether the sampler can be compiled here.
    """

    def __init__(self, build: Callable, arguments: Options):
        self.build = build
        self.leaves, self.structure = jax.tree.flatten(arguments)
        identities = tuple(map(_identity, self.leaves))
        self.key = build, self.structure, identities
        pairs = zip(self.leaves, identities, strict=True)
        self.numbers = [leaf for leaf, identity in pairs if identity is None]
        self.has_program = not any(isinstance(leaf, jax.core.Tracer) for leaf in self.leaves)
        try:
            hash(self.key)
        except TypeError:
            self.has_program = False

    def __reduce__(self):
        # The key has identities of this process.
        return Recipe, (self.build, jax.tree.unflatten(self.structure, self.leaves))

    def run(self, update: Callable, *given: Tree) -> Tree:
        """Call `update`, compiled if all of its arguments are concrete."""
        is_eager = self.has_program and not cast(Tree, jax.config).jax_disable_jit
        is_eager = is_eager and all(
            isinstance(leaf, (*ARRAYS, int, float)) and not isinstance(leaf, jax.core.Tracer)
            for leaf in jax.tree.leaves(given)
        )
        return self._program()(self.numbers, *given) if is_eager else update(*given)

    def _program(self) -> Callable[..., Tree]:
        with _LOCK:
            # Reinserted as the last one, which is the most recently used.
            program = _PROGRAMS.pop(self.key, None) or self._make()
            _PROGRAMS[self.key] = program
            while len(_PROGRAMS) > MOST_PROGRAMS:
                _PROGRAMS.pop(next(iter(_PROGRAMS)))
        return program

    def _make(self) -> Callable[..., Tree]:
        """The program holds objects weakly: its caller holds them."""
        build, structure, key = self.build, self.structure, self.key

        def forget(_: object):
            with _LOCK:
                _PROGRAMS.pop(key, None)

        sources = [
            None if identity is None else _source(leaf, forget)
            for leaf, identity in zip(self.leaves, self.key[2], strict=True)
        ]

        def update(numbers: list[jax.Array], *given: Tree) -> Tree:
            rest = iter(numbers)
            leaves = [next(rest) if source is None else source() for source in sources]
            return build(**jax.tree.unflatten(structure, leaves)).update(*given)

        return jax.jit(update)


def _identity(leaf: object) -> Hashable:
    """What identifies a constant of the program; None for an argument of it."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        # Only `init` reads the numbers in it.
        return "key", jax.random.key_impl(leaf)
    if isinstance(leaf, PLAIN):
        # 1, 1.0 and True are equal, and so are 0.0 and -0.0.
        return type(leaf), repr(leaf)
    return None if isinstance(leaf, ARRAYS) else ("object", id(leaf))


def _source(leaf: object, forget: Callable[[object], None]) -> Callable[[], object]:
    """Return what gives a constant to the program."""
    if not isinstance(leaf, (*PLAIN, jax.Array)):
        try:
            return weakref.ref(leaf, forget)
        except TypeError:
            # Some objects, such as built-in functions, have no weak references.
            pass
    return lambda: leaf
