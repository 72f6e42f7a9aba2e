"""The leaves of a tree by the names on their paths."""

import sys
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp

from optax_smile import _check
from optax_smile._types import Tree


class Misfit(ValueError):
    """A tree lacks a leaf, or has another in its place: what it must be, and what it is."""


def map_sampled(function: Callable, sampled: Tree, params: Tree) -> Tree:
    """Map over the leaves that the sampler sees, and leave all others of `params` unchanged.

    Leaves are matched by the names on their paths. Raises `Misfit`.
    """
    seen = _by_names(sampled)

    def leaf(path, x):
        if (own := _names(path)) not in seen:
            return x
        move = seen.pop(own)
        if jnp.shape(x) != jnp.shape(move) or getattr(x, "dtype", None) != move.dtype:
            at = jax.tree_util.keystr(path)
            rule = f"a tree like the one given to `init`, with {_check.show(move)} at {at}"
            raise Misfit(rule, _check.show(x))
        return function(move, x)

    mapped = jax.tree_util.tree_map_with_path(leaf, params)
    if seen:
        rule = "a tree with the leaves of the parameters given to `init`"
        missing = ", ".join(name(zip(at, at, strict=True)) for at in seen)
        raise Misfit(rule, f"one without {_check.cut(missing)}")
    return mapped


def without_variables(tree: Tree) -> Tree:
    """Replace variables of Flax nnx by their arrays; there are none before it is imported."""
    return getattr(sys.modules.get("flax.nnx"), "as_pure", lambda same: same)(tree)


def leaves_like(sampled: Tree, tree: Tree) -> list[Tree] | None:
    """Return the leaves of a tree that the sampler sees, matched as by `map_sampled`.

    None if one of them is missing or has another shape, as behind `optax.flatten`.
    """
    leaves = _by_names(tree)
    pairs = [(leaf, leaves.get(at)) for at, leaf in _by_names(sampled).items()]
    if any(leaf is None or jnp.shape(leaf) != jnp.shape(like) for like, leaf in pairs):
        return None
    return [leaf for _, leaf in pairs]


def _by_names(tree: Tree) -> dict[tuple[str | int, ...], Tree]:
    return {_names(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _names(path: Iterable[object]) -> tuple[str | int, ...]:
    return tuple(entry(key)[1] for key in path)


def entry(key: object) -> list[str | int]:
    """Return the kind (`key`, `index` or `attribute`) and the entry of one step of a path."""
    for kind, attribute in (("key", "key"), ("index", "idx"), ("attribute", "name")):
        if hasattr(key, attribute):
            value = getattr(key, attribute)
            return [kind, value if isinstance(value, (str, int)) else str(value)]
    return ["key", str(key)]


def name(path: Iterable[Iterable[str | int]], separator: str = "/") -> str:
    """Join the entries of a path, pairs of kind and entry, to a name that no other path has.

    Inside an entry, `~`, `/` and the separator are written `~0`, `~1` and `~2`.
    """
    codes = {char: f"~{number}" for number, char in enumerate(dict.fromkeys("~/" + separator))}
    return separator.join(str(entry).translate(str.maketrans(codes)) for _, entry in path)


def place(path: tuple) -> str:
    """Write a path as code; a leaf without one is the only leaf."""
    return jax.tree_util.keystr(path) or "the only leaf"


def names(tree: Tree) -> list[str]:
    """Name the leaves of a tree by their paths."""
    return [place(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
