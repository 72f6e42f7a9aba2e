"""Selection of the leaves of the parameters that a sampler moves.

`init` selects the candidates: arrays of floating-point numbers. The state stores None for all other
leaves, as `equinox.filter` does. Leaves whose gradient is None in the first call do not move: the
state then stores None for them, as `optax.adamw` does. A gradient that is missing only in a later
call is an error; inside `jit` it sets `has_lost_leaf` instead.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _check, _check_trees, _paths, _tree
from optax_smile._packed import State
from optax_smile._types import T
from optax_smile.samplers._chain import ChainState, D
from optax_smile.state import is_concrete

OF_INIT = "the one given to init"


def candidates(params: object) -> optax.Params:
    """Return the leaves that a sampler may move, with None for the others; require at least one."""
    floating = jax.tree.map(lambda x: _tree.strong(x) if _tree.is_floating(x) else None, params)
    others = jax.tree_util.tree_leaves_with_path(params)
    if others and not jax.tree.leaves(floating):
        path, leaf = others[0]
        rule = "a tree with at least one float32 or float64 array"
        got = f"{_check.show(leaf)} at {_paths.place(path)}"
        advice = "Convert Python numbers by `jnp.asarray`." if isinstance(leaf, float) else ""
        _check.fail("params", rule, got, advice)
    _check_trees.check_params(floating, smallest=2)
    _check.Tree(finite=True)("params", floating)
    return floating


def select(
    updates: optax.Updates, params: optax.Params, state: State[ChainState[Any]]
) -> tuple[optax.Updates, optax.Params]:
    """Select the leaves that move, and require gradients and parameters that fit the state.

    The gradients are None for leaves that do not move. The parameters may have any leaves besides
    the candidates.
    """
    known = state.like_params
    _check_trees.check_structure("params", params, known, OF_INIT)
    _check_trees.check_structure("updates", updates, known, "params")
    candidates = jax.tree_util.tree_leaves_with_path(known, is_leaf=_is_none)
    gradients = jax.tree.leaves(updates, is_leaf=_is_none)
    for (path, candidate), gradient in zip(candidates, gradients, strict=True):
        if candidate is None and _tree.is_floating(gradient):
            rule = f"None at {_paths.place(path)}, which is no leaf of the state"
            _check.fail("updates", rule, _check.show(gradient))
        if gradient is None and candidate is not None and _has_begun(state):
            got = f"None at {_paths.place(path)}, where the first call had a gradient"
            _check.fail("updates", "None at the same leaves in every call", got)

    sampled = only(updates, known)
    params = only(params, sampled)
    _check_trees.check_params(params, smallest=2)
    _check_trees.check_alike("params", params, only(known, sampled), OF_INIT)
    _check_trees.check_gradients(sampled, params, "params")
    return sampled, params


def _has_begun(state: State[ChainState[Any]]) -> bool:
    """Whether there was a call; False inside compiled functions, where it is unknown."""
    number = state.unpack().last_update.num_gradients
    return is_concrete(number) and bool(np.any(np.asarray(number) > 0))


def put_back(displacement: optax.Updates, updates: optax.Updates) -> optax.Updates:
    """Give a displacement the structure of the gradients that the loop passed."""

    def leaf(move: object, gradient: Any) -> object:
        if move is not None or gradient is None:
            return move
        # Gradients of integers have the dtype float0; as an update, False changes nothing.
        return jnp.zeros(jnp.shape(gradient), bool)

    return jax.tree.map(leaf, displacement, updates, is_leaf=_is_none)


def narrowed(state: ChainState[D], fresh: ChainState[D]) -> ChainState[D]:
    """Copy the arrays of a state to a fresh state of fewer leaves, by path and shape."""
    arrays = dict(jax.tree_util.tree_leaves_with_path(state))

    def leaf(path: tuple[object, ...], new: jax.Array) -> jax.Array:
        old = arrays.get(path, new)
        return old if jnp.shape(old) == jnp.shape(new) else new

    after = jax.tree_util.tree_map_with_path(leaf, fresh)
    lost = state.has_lost_leaf | (state.last_update.num_gradients > 0)
    return after._replace(has_lost_leaf=lost)


def only(tree: T, other: object) -> T:
    """Replace leaves by None where another tree has None."""
    return jax.tree.map(lambda x, y: None if y is None else x, tree, other, is_leaf=_is_none)


def _is_none(leaf: object) -> bool:
    """Whether a node is None, for `is_leaf`."""
    return leaf is None
