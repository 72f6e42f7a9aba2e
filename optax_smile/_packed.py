"""A state of few arrays: a Python loop pays for every array that a compiled call takes and returns.

Scalars of a state are the fields that its class declares as `Real`, `Count` or `Flag`, in a module
whose annotations are not evaluated. Between calls all real numbers of a chain are one array, and
all counters and flags another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from optax_smile._types import Tree

Real = Count = Flag = jax.Array
KINDS = {"Real": float, "Count": int, "Flag": bool}


class Packed(NamedTuple):
    """A state without its scalars, which are in two arrays.

    Attributes:
        arrays: the state, with None in the place of each scalar.
        reals: `[scalar]`, in the precision of the parameters.
        counts: counters and flags, `[scalar]`, int32.
    """

    arrays: Tree
    reals: jax.Array
    counts: jax.Array


def pack(state: Tree) -> Packed:
    """Move the scalars of a state to two arrays."""
    reals: list[jax.Array] = []
    counts: list[jax.Array] = []
    arrays = _map(lambda kind, x: (reals if kind is float else counts).append(x), state)
    return Packed(arrays, jnp.stack(reals), jnp.stack([x.astype(jnp.int32) for x in counts]))


def unpack(packed: Packed) -> Tree:
    """Undo `pack`, of one chain or with leading axes."""
    reals, counts = iter(_scalars(packed.reals)), iter(_scalars(packed.counts))

    def scalar(kind: type, _: object) -> jax.Array:
        if kind is float:
            return next(reals)
        return next(counts) if kind is int else next(counts) != 0

    return _map(scalar, packed.arrays)


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
