"""Compile `update` where a loop calls it outside of `jax.jit`.

A compiled program outlives the transformation for which it was made: `optax.inject_hyperparams`
builds its transformation in every call. So the key of a program is the function that built the
sampler and its arguments, from which the program builds the sampler again while it is traced.
Arguments that are arrays become arguments of the program. Numbers of Python become constants in it,
as where a loop compiles `update` itself. All other objects are identified by `id`, and their
programs are removed with them.
"""

import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from optax_smile._types import Tree

# Number of programs kept; the least recently used one is removed first.
MOST_PROGRAMS = 32
_PROGRAMS: dict[Hashable, Callable] = {}
_LOCK = threading.RLock()
PLAIN = bool, int, float, str, np.bool_
ARRAYS = jax.Array, np.ndarray, np.generic


class Recipe:
    """How to build a sampler again.

    Attributes:
        key: of its program; None if it cannot be compiled here.
        numbers: arguments of its program.
    """

    def __init__(self, build: Callable, arguments: Mapping[str, object]):
        leaves, self.structure = jax.tree.flatten(arguments)
        self.build, self.leaves = build, leaves
        self.numbers = [leaf for leaf in leaves if _is_number(leaf)]
        key = build, self.structure, tuple(map(_identity, leaves))
        try:
            hash(key)
        except TypeError:
            key = None
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        self.key = None if is_traced else key

    def program(self) -> Callable:
        """Return the compiled program, a new one if there is none."""
        with _LOCK:
            # Reinserted as the last one, which is the most recently used.
            program = _PROGRAMS.pop(self.key, None) or self._make()
            _PROGRAMS[self.key] = program
            while len(_PROGRAMS) > MOST_PROGRAMS:
                _PROGRAMS.pop(next(iter(_PROGRAMS)))
        return program

    def _make(self) -> Callable:
        """The program holds objects weakly: its caller holds them."""
        build, structure = self.build, self.structure
        sources = [_source(leaf, functools.partial(_forget, self.key)) for leaf in self.leaves]

        def update(numbers: list[jax.Array], *given: Tree) -> Tree:
            left = iter(numbers)
            leaves = [next(left) if source is None else source() for source in sources]
            return build(**jax.tree.unflatten(structure, leaves)).core(*given)

        return jax.jit(update)


def run(recipe: Recipe, core: Callable, *given: Tree) -> Tree:
    """Call the core of `update`, compiled if all of its arguments are concrete."""
    is_eager = recipe.key is not None and not cast(Tree, jax.config).jax_disable_jit
    is_eager = is_eager and all(
        isinstance(leaf, (*ARRAYS, int, float)) and not isinstance(leaf, jax.core.Tracer)
        for leaf in jax.tree.leaves(given)
    )
    return recipe.program()(recipe.numbers, *given) if is_eager else core(*given)


def _forget(key: Hashable, _: object):
    with _LOCK:
        _PROGRAMS.pop(key, None)


def _is_key(leaf: object) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _is_number(leaf: object) -> bool:
    return isinstance(leaf, ARRAYS) and not isinstance(leaf, np.bool_) and not _is_key(leaf)


def _identity(leaf: Tree) -> Hashable:
    """Part of the key of a program that identifies an argument of its sampler."""
    if _is_key(leaf):
        # Only `init` reads the numbers in it.
        return "key", jax.random.key_impl(leaf)
    if _is_number(leaf):
        return "array"
    # 1, 1.0 and True are equal, and so are 0.0 and -0.0.
    return (type(leaf), repr(leaf)) if isinstance(leaf, PLAIN) else ("object", id(leaf))


def _source(leaf: Tree, forget: Callable[[object], None]) -> Callable[[], object] | None:
    """Where a program takes an argument of its sampler from; None for an argument of its own."""
    if _is_key(leaf):
        return functools.partial(jax.random.key, 0, impl=jax.random.key_impl(leaf))
    if _is_number(leaf):
        return None
    if not isinstance(leaf, PLAIN):
        try:
            return weakref.ref(leaf, forget)
        except TypeError:
            # Some objects, such as built-in functions, have no weak references.
            pass
    return lambda: leaf
