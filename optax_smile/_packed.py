"""A state of few arrays: a Python loop pays for every array that a compiled call takes and returns.

Scalars of a state are the fields that its class declares as `Real`, `Count` or `Flag`, in a module
with `from __future__ import annotations`. Between calls all scalars of a kind are one array.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from optax_smile._types import Tree

Real = Count = Flag = jax.Array
KINDS = {"Real": jnp.floating, "Count": jnp.integer, "Flag": jnp.bool_}


def pack(state: Tree) -> tuple[Tree, jax.Array, jax.Array, jax.Array]:
    """Move the scalars of a state, of one chain or with leading axes, to three arrays.

    Returns:
        The state, with None in the place of each scalar; its real numbers, in the precision of the
        parameters, its counters, int32, and its flags, bool, `[scalar]` each.
    """
    scalars: dict[str, list[jax.Array]] = {kind: [] for kind in KINDS}

    def move(kind: str, scalar: jax.Array):
        assert jnp.issubdtype(scalar.dtype, KINDS[kind]), f"{scalar.dtype} declared as {kind}"
        scalars[kind].append(scalar)

    arrays = _map(move, state)
    reals, counts, flags = (jnp.stack(x, axis=-1) for x in scalars.values())
    return arrays, reals, counts, flags


def unpack(arrays: Tree, *scalars: jax.Array) -> Tree:
    """Undo `pack`."""
    rest = {kind: iter(_split_last(array)) for kind, array in zip(KINDS, scalars, strict=True)}
    return _map(lambda kind, _: next(rest[kind]), arrays)


def _map(function: Callable[[str, Tree], object], state: Tree) -> Tree:
    """Replace the scalars of a state by `function(kind, scalar)`, in the order of the fields."""
    if not type(state).__module__.startswith("optax_smile."):
        return state
    kinds = _kinds(type(state))
    fields = zip(state._fields, state, strict=True)
    return type(state)(
        *(function(kinds[name], x) if name in kinds else _map(function, x) for name, x in fields)
    )


@functools.cache
def _kinds(state: type) -> dict[str, str]:
    """Return the kind of each scalar of a class, by the name of its field."""
    names = {x: getattr(hint, "__forward_arg__", "") for x, hint in state.__annotations__.items()}
    return {field: name for field, name in names.items() if name in KINDS}


def _split_last(array: jax.Array) -> Sequence[jax.Array]:
    """Split an array along its last axis, in one program outside of compiled functions."""
    return _split(array) if isinstance(array, jax.Array) else _split.__wrapped__(array)


@functools.partial(jax.jit, inline=True)
def _split(array: jax.Array) -> Sequence[jax.Array]:
    return [array[..., place] for place in range(array.shape[-1])]
