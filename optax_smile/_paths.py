"""The leaves of a tree by the names on their paths."""

import sys
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp

from optax_smile import _check
from optax_smile._types import T


class Misfit(ValueError):
    """A leaf of a tree is missing or has another shape: the rule, and what was found."""


def map_sampled(
    function: Callable[[jax.Array, jax.Array], jax.Array], sampled: object, params: T
) -> T:
    """Map over the leaves that the sampler receives, and leave all others of `params` unchanged.

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


def without_variables(tree: T) -> T:
    """Replace variables of Flax nnx by their arrays, if Flax nnx has been imported."""
    return getattr(sys.modules.get("flax.nnx"), "as_pure", lambda same: same)(tree)


def leaves_like(sampled: object, tree: object) -> list[jax.Array] | None:
    """Return the leaves of a tree that the sampler receives, matched as by `map_sampled`.

    None if one of them is missing or has another shape, as behind `optax.flatten`.
    """
    leaves = _by_names(tree)
    pairs = [(leaf, leaves.get(at)) for at, leaf in _by_names(sampled).items()]
    fit = [x for like, x in pairs if x is not None and jnp.shape(x) == jnp.shape(like)]
    return fit if len(fit) == len(pairs) else None


def _by_names(tree: object) -> dict[tuple[str | int, ...], jax.Array]:
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
    """Join the entries of a path, pairs of kind and entry, to a unique name.

    Inside an entry, `~`, `/` and the separator are written `~0`, `~1` and `~2`.
    """
    codes = {char: f"~{number}" for number, char in enumerate(dict.fromkeys("~/" + separator))}
    return separator.join(str(entry).translate(str.maketrans(codes)) for _, entry in path)


def place(path: tuple) -> str:
    """Write a path as code; an empty path means the only leaf."""
    return jax.tree_util.keystr(path) or "the only leaf"


def names(tree: object) -> list[str]:
    """Name the leaves of a tree by their paths."""
    return [place(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
