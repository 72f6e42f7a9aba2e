"""Which leaves of a parameter tree a sampler moves.

`init` fixes the candidates: arrays of floating-point numbers. The state has None in the place of
all other leaves, as `equinox.filter` leaves it. Candidates whose gradient is None in the first call
do not move: from then on the state has None in their place, as that of `optax.adamw`.
"""

import jax
import jax.numpy as jnp
import optax

from optax_smile import _check, _tree
from optax_smile._types import Tree, Unchecked

OF_INIT = "the one given to init"


def _is_none(leaf: object) -> bool:
    """Make None a leaf of a tree."""
    return leaf is None


def candidates(where: str, params: Unchecked) -> Tree:
    """Return the leaves that a sampler may move, with None for the others; require some."""
    floating = jax.tree.map(lambda leaf: leaf if _tree.is_floating(leaf) else None, params)
    others = jax.tree_util.tree_leaves_with_path(params)
    if others and not jax.tree.leaves(floating):
        path, leaf = others[0]
        rule = "a tree with at least one float32 or float64 array"
        got = f"{_check.show(leaf)} at {jax.tree_util.keystr(path) or 'the only leaf'}"
        advice = "Convert Python numbers by `jnp.asarray`." if isinstance(leaf, float) else ""
        _check.fail(where, "params", rule, got, advice)
    _tree.check_params(where, floating, smallest=2)
    _check.Tree(finite=True)(where, "params", floating)
    return floating


def only(tree: Tree, other: Tree) -> Tree:
    """Put None in the place of leaves where another tree has None."""
    return jax.tree.map(lambda x, y: None if y is None else x, tree, other, is_leaf=_is_none)


def take_over(state: Tree, fresh: Tree) -> Tree:
    """Replace arrays of a fresh state of fewer leaves by those of a state, by path and shape."""
    arrays = dict(jax.tree_util.tree_leaves_with_path(state))

    def leaf(path: Tree, new: jax.Array) -> jax.Array:
        old = arrays.get(path, new)
        return old if jnp.shape(old) == jnp.shape(new) else new

    return jax.tree_util.tree_map_with_path(leaf, fresh)


def select(
    where: str, updates: Unchecked, params: Unchecked, known: optax.Params
) -> tuple[optax.Updates, optax.Params]:
    """Take the leaves that move, and require gradients and parameters that fit the state.

    The gradients are None for leaves that do not move. The parameters may have any leaves besides
    the candidates `known`.
    """
    _check_structure(where, "params", params, known, OF_INIT)
    _check_structure(where, "updates", updates, known, "params")
    candidates = jax.tree_util.tree_leaves_with_path(known, is_leaf=_is_none)
    gradients = jax.tree.leaves(updates, is_leaf=_is_none)
    for (path, candidate), gradient in zip(candidates, gradients, strict=True):
        if candidate is None and _tree.is_floating(gradient):
            rule = f"None at {_place(path)}, which is no leaf of the state"
            _check.fail(where, "updates", rule, _check.show(gradient))

    kept = only(updates, known)
    params = only(params, kept)
    _tree.check_params(where, params, smallest=2)
    _tree.check_alike(where, "params", params, only(known, kept), OF_INIT)
    _tree.check_gradients(where, kept, params, "params")
    return kept, params


def put_back(displacement: optax.Updates, updates: optax.Updates) -> optax.Updates:
    """Make a displacement a tree like the gradients that the loop passed."""

    def leaf(move: Tree, gradient: Tree) -> Tree:
        if move is not None or gradient is None:
            return move
        # Integers have gradients without a type; adding False changes nothing.
        return jnp.zeros(jnp.shape(gradient), bool)

    return jax.tree.map(leaf, displacement, updates, is_leaf=_is_none)


def require_all(where: str, updates: optax.Updates, known: optax.Params):
    """Name the first leaf of the state whose gradient is None."""
    gradients = jax.tree.leaves(only(updates, known), is_leaf=_is_none)
    leaves = jax.tree_util.tree_leaves_with_path(known, is_leaf=_is_none)
    for (path, leaf), gradient in zip(leaves, gradients, strict=True):
        if leaf is not None and gradient is None:
            got = f"None at {_place(path)}, where the first call had a gradient"
            _check.fail(where, "updates", "None at the same leaves in every call", got)


def _check_structure(where: str, argument: str, tree: Unchecked, known: optax.Params, name: str):
    """Require the structure of `known`, with None as a leaf."""
    if jax.tree.structure(tree, is_leaf=_is_none) != jax.tree.structure(known, is_leaf=_is_none):
        rule = f"a tree of the structure of {name}, {jax.tree.structure(known)}"
        _check.fail(where, argument, rule, jax.tree.structure(tree))


def _place(path: Tree) -> str:
    """Name the place of a leaf."""
    return jax.tree_util.keystr(path) or "the only leaf"
