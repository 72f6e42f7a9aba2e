"""Compile `update` where a loop calls it outside of `jax.jit`.

A compiled program outlives the transformation for which it was made: `optax.inject_hyperparams`
builds its transformation in every call. So a program is known by the function that built the
sampler and its arguments, from which it builds the sampler again while it is traced. Arguments
that are arrays are arguments of the program; numbers of Python are constants in it, as they are
where a loop compiles `update` itself; all other objects are known by identity, and their programs
go when they go.
"""

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar, cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from optax_smile import _check, _settings

Builder = TypeVar("Builder", bound=Callable)
# Programs that are kept; the one that was not used for the longest time goes first.
MOST_PROGRAMS = 32
_PROGRAMS: dict[Hashable, Callable] = {}
_LOCK = threading.RLock()
PLAIN = bool, int, float, str, np.bool_
ARRAYS = jax.Array, np.ndarray, np.generic


def compiled(build: Builder) -> Builder:
    """Let the sampler that a builder returns compile its `update` where it is called eagerly.

    Args:
        build: a function of keywords that returns what `_call.transformation` returns.
    """
    signature, has_key = inspect.signature(build), "key" in inspect.signature(build).parameters

    @functools.wraps(build)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        built = build(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        arguments = dict(given.arguments)
        if has_key:
            arguments["key"] = _check.Key()(build.__name__, "key", arguments["key"])
        run = functools.partial(_run, _Recipe(build, arguments), built.core)
        told = {**vars(built), "core": run}
        return _settings.Sampler(built.init, built.facing(run), **told)

    return cast(Builder, wrapper)


def _run(recipe: "_Recipe", core: Callable, *given: Any) -> Any:
    """Call the core of `update`, compiled where all that it gets is known."""
    config, arrays = cast(Any, jax.config), (*ARRAYS, int, float)
    is_eager = recipe.key is not None and not config.jax_disable_jit
    is_eager = is_eager and all(
        isinstance(leaf, arrays) and not isinstance(leaf, jax.core.Tracer)
        for leaf in jax.tree.leaves(given)
    )
    return recipe.program()(recipe.numbers, *given) if is_eager else core(*given)


class _Recipe:
    """How to build a sampler again.

    Attributes:
        key: of its program; None if there can be none.
        numbers: arguments of its program.
    """

    def __init__(self, build: Callable, arguments: Mapping[str, Any]):
        leaves, self.structure = jax.tree.flatten(arguments)
        self.build, self.leaves = build, leaves
        self.numbers = [leaf for leaf in leaves if _is_number(leaf)]
        key = build, self.structure, tuple(map(_known_by, leaves))
        try:
            hash(key)
        except TypeError:
            key = None
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        self.key = None if is_traced else key

    def program(self) -> Callable:
        """Find the compiled program, or make it."""
        with _LOCK:
            # The last one in order is the one that was used last.
            program = _PROGRAMS.pop(self.key, None) or self._make()
            _PROGRAMS[self.key] = program
            while len(_PROGRAMS) > MOST_PROGRAMS:
                _PROGRAMS.pop(next(iter(_PROGRAMS)))
        return program

    def _make(self) -> Callable:
        """The program holds objects weakly: who calls it holds them."""
        build, structure = self.build, self.structure
        sources = [_source(leaf, functools.partial(_forget, self.key)) for leaf in self.leaves]

        def update(numbers: list[Any], *given: Any) -> Any:
            left = iter(numbers)
            leaves = [next(left) if source is None else source() for source in sources]
            return build(**jax.tree.unflatten(structure, leaves)).core(*given)

        return jax.jit(update)


def _forget(key: Hashable, _: Any):
    with _LOCK:
        _PROGRAMS.pop(key, None)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, ARRAYS) and not isinstance(leaf, np.bool_) and not _is_key(leaf)


def _known_by(leaf: Any) -> Hashable:
    """What distinguishes an argument of a sampler in the key of a program."""
    if _is_key(leaf):
        # `init` alone reads the numbers in it.
        return "key", jax.random.key_impl(leaf)
    if _is_number(leaf):
        return "array"
    # 1, 1.0 and True are equal, and so are 0.0 and -0.0.
    return (type(leaf), repr(leaf)) if isinstance(leaf, PLAIN) else ("object", id(leaf))


def _source(leaf: Any, forget: Callable[[Any], None]) -> Callable[[], Any] | None:
    """Where a program takes an argument of its sampler from; None for an argument of its own."""
    if _is_key(leaf):
        return functools.partial(jax.random.key, 0, impl=jax.random.key_impl(leaf))
    if _is_number(leaf):
        return None
    if not isinstance(leaf, PLAIN):
        try:
            return weakref.ref(leaf, forget)
        except TypeError:
            # Such as functions that are built in.
            pass
    return lambda: leaf
