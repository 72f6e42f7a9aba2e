"""Which leaves of a parameter tree a sampler moves.

`init` fixes the candidates: arrays of floating-point numbers. The state has None in the place of
all other leaves, as `equinox.filter` leaves it. Candidates whose gradient is None in `update` do
not move: they count in no sum, nor in the number of parameters. The state keeps an entry for them,
so that its structure never changes: a call narrows it to the leaves that move, and widens the
result.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _check, _tree
from optax_smile._types import Tree, Unchecked
from optax_smile.state import is_concrete

OF_INIT = "the one given to init"


class SampledState(NamedTuple):
    """Which leaves the calls of `update` were about.

    Attributes:
        has_gradient: whether a leaf had a gradient in the first call `[leaf]`; all before it.
        num_parameters: d, the parameters of these leaves, int32.
        is_inconsistent: whether a later call had gradients for other leaves; it stays true.
    """

    has_gradient: jax.Array
    num_parameters: jax.Array
    is_inconsistent: jax.Array

    def observe(self, moves: Sequence[bool], size: int, is_first: jax.Array) -> "SampledState":
        """Record which leaves the first call moves, and whether a later one moves others.

        `size` is their number of parameters.
        """
        now = jnp.asarray(moves, bool)
        others = ~is_first & jnp.any(self.has_gradient != now)
        return SampledState(
            has_gradient=jnp.where(is_first, now, self.has_gradient),
            num_parameters=jnp.where(
                is_first, min(size, _check.LARGEST_WHOLE), self.num_parameters
            ),
            is_inconsistent=self.is_inconsistent | others,
        )

    def require_consistent(self, where: str):
        """Raise the error that a call would have raised outside of a compiled program."""
        if is_concrete(self.is_inconsistent) and np.asarray(self.is_inconsistent).any():
            rule = "a state whose calls of `update` all had gradients for the same leaves"
            got = "one after a call with gradients for other leaves"
            _check.fail(where, "state", rule, got, "Start again with `init`.")


def begin(params: optax.Params) -> SampledState:
    """All candidates, before the first call."""
    return SampledState(
        has_gradient=jnp.ones(len(jax.tree.leaves(params)), bool),
        num_parameters=jnp.asarray(min(_tree.size(params), _check.LARGEST_WHOLE), jnp.int32),
        is_inconsistent=jnp.zeros((), bool),
    )


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


def moving(updates: optax.Updates, known: optax.Params) -> list[bool]:
    """Tell which of the candidates `known` have a gradient."""
    pairs = zip(*(jax.tree.leaves(x, is_leaf=_is_none) for x in (known, updates)), strict=True)
    return [update is not None for candidate, update in pairs if candidate is not None]


def only(tree: Tree, other: Tree) -> Tree:
    """Put None in the place of leaves where another tree has None."""
    return jax.tree.map(lambda x, y: None if y is None else x, tree, other, is_leaf=_is_none)


def narrow(state: Tree, like: Tree) -> Tree:
    """Take the leaves out of a state that `like` has; an array with a place for each leaf shrinks.

    `like` has the shapes of the state of the leaves that move.
    """
    leaves = dict(jax.tree_util.tree_leaves_with_path(state))

    def leaf(path: Tree, wanted: jax.ShapeDtypeStruct) -> jax.Array:
        return leaves[path][tuple(slice(length) for length in wanted.shape)]

    return jax.tree_util.tree_map_with_path(leaf, like)


def widen(narrowed: Tree, state: Tree) -> Tree:
    """Put what `narrow` took out, and a call changed, back into the whole state."""
    leaves = dict(jax.tree_util.tree_leaves_with_path(narrowed))

    def leaf(path: Tree, old: jax.Array) -> jax.Array:
        new = leaves.get(path, old)
        if new.shape == old.shape:
            return new
        return jax.lax.dynamic_update_slice(old, new, (0,) * old.ndim)

    return jax.tree_util.tree_map_with_path(leaf, state)


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
            rule = f"None at {_place(path)}, where `init` got no floating-point array"
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


def refuse(where: str, before: SampledState, updates: optax.Updates, known: optax.Params):
    """Name the leaf whose gradient is None only in this call, or in all calls but this one."""
    now = moving(updates, known)
    changed = np.flatnonzero(np.asarray(before.has_gradient) != now)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(known)]
    has_now = now[changed[0]]
    one, other = ("a gradient", "None") if has_now else ("None", "a gradient")
    got = f"{one} at {_place(paths[changed[0]])}, where the first call had {other}"
    _check.fail(where, "updates", "None at the same leaves in every call", got)


def _check_structure(where: str, argument: str, tree: Unchecked, known: optax.Params, name: str):
    """Require the structure of `known`, with None as a leaf."""
    if jax.tree.structure(tree, is_leaf=_is_none) != jax.tree.structure(known, is_leaf=_is_none):
        rule = f"a tree of the structure of {name}, {jax.tree.structure(known)}"
        _check.fail(where, argument, rule, jax.tree.structure(tree))


def _place(path: Tree) -> str:
    """Name the place of a leaf."""
    return jax.tree_util.keystr(path) or "the only leaf"
