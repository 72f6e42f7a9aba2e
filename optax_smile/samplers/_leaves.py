"""Which leaves of a parameter tree a sampler moves.

`init` fixes the candidates: arrays of floating-point numbers. The state has None in the place of
all other leaves, as `equinox.filter` leaves it. Of the candidates those whose gradient is None in
`update` do not move: they count in no sum, and not in the number of parameters. The state keeps an
entry for them, so that its structure never changes: a call narrows it to the leaves that move, and
widens the result.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from optax_smile import _check, _tree

# Counters are int32.
MOST_PARAMETERS = 2**31 - 1


class SampledState(NamedTuple):
    """Which leaves the calls of `update` were about.

    Attributes:
        has_gradient: whether a leaf had a gradient in the first call `[leaf]`; all before it.
        num_parameters: d, the parameters of these leaves, int32.
        is_inconsistent: whether a later call had gradients for other leaves, or parameters that
            are not the tracked ones; it stays true.
    """

    has_gradient: jax.Array
    num_parameters: jax.Array
    is_inconsistent: jax.Array

    def require_consistent(self, where: str):
        """Refuse to go on where a compiled program met what would have been an error outside."""
        if is_known_true(self.is_inconsistent):
            rule = (
                "that of calls of `update` with gradients for the same leaves, and with the"
                " parameters that the state tracks"
            )
            got = "one in which a call had gradients for other leaves, or other parameters"
            _check.fail(where, "state", rule, got, "Begin again with `init`.")


def begin(params: Any) -> SampledState:
    """All candidates, before the first call."""
    return SampledState(
        has_gradient=jnp.ones(len(jax.tree.leaves(params)), bool),
        num_parameters=jnp.asarray(min(_tree.size(params), MOST_PARAMETERS), jnp.int32),
        is_inconsistent=jnp.zeros((), bool),
    )


def observe(
    state: SampledState, moving: Sequence[bool], size: int, is_first: jax.Array, differs: jax.Array
) -> SampledState:
    """Keep which leaves the first call moves, and whether a later one moves others.

    Args:
        state: before the call.
        moving: whether each candidate has a gradient.
        size: number of parameters of those that have one.
        is_first: whether this is the first call.
        differs: whether the parameters are not the tracked ones.
    """
    now = jnp.asarray(moving, bool)
    others = ~is_first & jnp.any(state.has_gradient != now)
    return SampledState(
        has_gradient=jnp.where(is_first, now, state.has_gradient),
        num_parameters=jnp.where(is_first, min(size, MOST_PARAMETERS), state.num_parameters),
        is_inconsistent=state.is_inconsistent | others | differs,
    )


def is_known_true(flag: Any) -> bool:
    """Tell a flag that is set from one that is not, or that only a compiled program knows."""
    is_known = not isinstance(flag, (jax.core.Tracer, jax.ShapeDtypeStruct))
    return is_known and getattr(flag, "is_fully_addressable", True) and bool(np.any(flag))


def is_none(leaf: Any) -> bool:
    """Make None a leaf of a tree."""
    return leaf is None


def is_floating(leaf: Any) -> bool:
    """Tell an array of floating-point numbers, or of complex ones, from everything else."""
    dtype = getattr(leaf, "dtype", None)
    return (
        isinstance(dtype, np.dtype)
        and hasattr(leaf, "shape")
        and jnp.issubdtype(dtype, jnp.inexact)
    )


def floating(params: Any) -> Any:
    """Put None in the place of leaves that are no arrays of floating-point numbers."""
    return jax.tree.map(lambda leaf: leaf if is_floating(leaf) else None, params)


def candidates(where: str, params: Any) -> Any:
    """Take the leaves that a sampler may move, and require some of them."""
    found = floating(params)
    others = jax.tree_util.tree_leaves_with_path(params)
    if others and not jax.tree.leaves(found):
        path, leaf = others[0]
        rule = "a tree with float32 or float64 arrays, which alone are sampled"
        got = f"none, but {_check.show(leaf)} at {jax.tree_util.keystr(path) or 'the only leaf'}"
        _check.fail(where, "params", rule, got)
    _tree.check_params(where, found, smallest=2)
    _check.Tree(finite=True)(where, "params", found)
    return found


def moving(updates: Any, known: Any) -> list[bool]:
    """Tell which of the candidates `known` have a gradient."""
    pairs = zip(*(jax.tree.leaves(x, is_leaf=is_none) for x in (known, updates)), strict=True)
    return [grad is not None for candidate, grad in pairs if candidate is not None]


def only(tree: Any, moves: Sequence[bool]) -> Any:
    """Put None in the place of candidates that do not move."""
    leaves, structure = jax.tree.flatten(tree)
    kept = (leaf if move else None for leaf, move in zip(leaves, moves, strict=True))
    return jax.tree.unflatten(structure, kept)


def narrow(state: Any, like: Any) -> Any:
    """Take the leaves out of a state that `like` has; an array with a place for each leaf shrinks.

    Args:
        state: of all candidates.
        like: shapes of the state of those that move.
    """
    found = dict(jax.tree_util.tree_leaves_with_path(state))

    def leaf(path: Any, wanted: Any) -> Any:
        return found[path][tuple(slice(length) for length in wanted.shape)]

    return jax.tree_util.tree_map_with_path(leaf, like)


def widen(narrowed: Any, state: Any) -> Any:
    """Put what `narrow` took out, and a call changed, back into the whole state."""
    found = dict(jax.tree_util.tree_leaves_with_path(narrowed))

    def leaf(path: Any, old: Any) -> Any:
        if path not in found:
            return old
        new = found[path]
        if new.shape == old.shape:
            return new
        return jax.lax.dynamic_update_slice(old, new, (0,) * old.ndim)

    return jax.tree_util.tree_map_with_path(leaf, state)


class Selected(NamedTuple):
    """The leaves of a call that move.

    Attributes:
        updates: their gradients; None in the place of all others.
        params: their parameters, likewise; None if the loop passes none.
        put_back: `put_back(moves)`, a tree like the gradients that the loop passed.
    """

    updates: Any
    params: Any
    put_back: Callable[[Any], Any]


def select(where: str, updates: Any, params: Any, known: Any) -> Selected:
    """Take the leaves that move, and require gradients and parameters that fit the state.

    Args:
        where: the function that was called.
        updates: gradients, None for leaves that do not move.
        params: parameters; whatever is no candidate may be in them. None if the loop passes none.
        known: the candidates, a tree of the state.
    """
    of_init = "the one given to init"
    candidates, structure = jax.tree.flatten(known, is_leaf=is_none)
    if params is not None:
        here = _leaves(where, "params", params, known, of_init)
    grads = _leaves(where, "updates", updates, known, "params")
    for i, (candidate, grad) in enumerate(zip(candidates, grads, strict=True)):
        if candidate is None and is_floating(grad):
            rule = f"None at {_place(known, i)}, which `init` got as no array of floats"
            _check.fail(where, "updates", rule, _check.show(grad))
    pairs = zip(candidates, grads, strict=True)
    moves = [candidate is not None and grad is not None for candidate, grad in pairs]

    def taken(leaves: Sequence[Any]) -> Any:
        kept = (leaf if move else None for leaf, move in zip(leaves, moves, strict=True))
        return jax.tree.unflatten(structure, kept)

    slopes, expected, name = taken(grads), taken(candidates), of_init
    _tree.check_params(where, expected, smallest=2)
    if params is not None:
        params, name = taken(here), "params"
        _tree.check_params(where, params, smallest=2)
        _tree.check_alike(where, "params", params, expected, of_init)
        expected = params
    _tree.check_gradients(where, slopes, expected, name)

    def put_back(found: Any) -> Any:
        if all(moves):
            return found
        # Integers have gradients without a type; False is added to them without effect.
        still = (None if g is None else jnp.zeros(jnp.shape(g), bool) for g in grads)
        pairs = zip(jax.tree.leaves(found, is_leaf=is_none), still, strict=True)
        return jax.tree.unflatten(structure, [x if move is None else move for move, x in pairs])

    return Selected(slopes, params, put_back)


def check_same(where: str, before: SampledState, updates: Any, known: Any, is_first: bool):
    """Name the leaf whose gradient is None in this call alone, or in all but this call."""
    now = moving(updates, known)
    changed = np.flatnonzero(np.asarray(before.has_gradient) != now)
    if is_first or not len(changed):
        return
    at, has_now = _place(known, changed[0], only_candidates=True), now[changed[0]]
    rule = "None at the same leaves in every call"
    got = f"a gradient at {at}, where the first call had None" if has_now else f"None at {at}"
    _check.fail(where, "updates", rule, got)


def _leaves(where: str, argument: str, tree: Any, known: Any, name: str) -> list[Any]:
    """Flatten a tree with its Nones, and require the structure of `known`."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_none)
    if structure != jax.tree.structure(known, is_leaf=is_none):
        rule = f"a tree of the structure of {name}, {jax.tree.structure(known)}"
        _check.fail(where, argument, rule, jax.tree.structure(tree))
    return leaves


def _place(known: Any, number: int, only_candidates: bool = False) -> str:
    """Name the place of a leaf."""
    is_leaf = None if only_candidates else is_none
    paths = jax.tree_util.tree_leaves_with_path(known, is_leaf=is_leaf)
    return jax.tree_util.keystr(paths[number][0]) or "the only leaf"
