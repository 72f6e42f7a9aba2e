"""A state of few arrays: a Python loop pays for every array that a compiled call takes and returns.

Scalars of a state are the fields that its class declares as `Real`, `Count` or `Flag`, in a module
whose annotations are not evaluated. Between calls all real numbers of a chain are one array, and
all counters and flags another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from optax_smile._types import Tree

Real = Count = Flag = jax.Array
KINDS = {"Real": float, "Count": int, "Flag": bool}


def pack(state: Tree) -> tuple[Tree, jax.Array, jax.Array]:
    """Move the scalars of a state to two arrays.

    Returns:
        The state, with None in the place of each scalar; its real numbers, `[scalar]`, in the
        precision of the parameters; its counters and flags, `[scalar]`, int32.
    """
    reals: list[jax.Array] = []
    counts: list[jax.Array] = []
    arrays = _map(lambda kind, x: (reals if kind is float else counts).append(x), state)
    return arrays, jnp.stack(reals), jnp.stack([x.astype(jnp.int32) for x in counts])


def unpack(arrays: Tree, reals: jax.Array, counts: jax.Array) -> Tree:
    """Undo `pack`, of one chain or with leading axes."""
    each_real, each_count = iter(_scalars(reals)), iter(_scalars(counts))

    def scalar(kind: type, _: object) -> jax.Array:
        if kind is float:
            return next(each_real)
        return next(each_count) if kind is int else next(each_count) != 0

    return _map(scalar, arrays)


def _map(function: Callable[[type, Tree], Tree], state: Tree) -> Tree:
    """Replace the scalars of a state by `function(kind, scalar)`, in the order of the fields."""
    if not hasattr(state, "_fields"):
        return state
    kinds = _kinds(type(state))
    fields = zip(state._fields, state, strict=True)
    return type(state)(
        *(function(kinds[name], x) if name in kinds else _map(function, x) for name, x in fields)
    )


@functools.cache
def _kinds(state: type) -> dict[str, type]:
    """Return the kind of each scalar of a class of this package, by the name of its field."""
    if not state.__module__.startswith("optax_smile."):
        return {}
    names = {x: getattr(hint, "__forward_arg__", "") for x, hint in state.__annotations__.items()}
    return {field: KINDS[name] for field, name in names.items() if name in KINDS}


def _scalars(array: jax.Array) -> Sequence[jax.Array]:
    """Split an array along its last axis, in one program outside of compiled functions."""
    return _split(array) if isinstance(array, jax.Array) else _split.__wrapped__(array)


@functools.partial(jax.jit, inline=True)
def _split(array: jax.Array) -> Sequence[jax.Array]:
    return [array[..., place] for place in range(array.shape[-1])]
