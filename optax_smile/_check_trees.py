"""Requirements on trees of parameters and gradients."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from optax_smile import _check, _paths, _tree

# The sampler keeps full-precision parameters: 1 + 1e-3 is 1 in bfloat16 and float16.
PRECISIONS = (jnp.float32, jnp.float64)
MISSING_PARAMS = (
    "You are using a transformation that requires the current value of parameters, "
    "but you are not passing `params` when calling `update`. Pass them, or use"
    " `optax_smile.tracked(sampler)`, whose state holds them."
)


def check_params(params: object, smallest: int):
    """Require a tree of float32 or float64 leaves with at least `smallest` parameters.

    A node without leaves that is not a container passes: Optax uses such nodes as placeholders when
    it maps over a state.
    """
    containers = (Mapping, list, tuple, type(None))
    if not isinstance(params, containers) and not jax.tree.leaves(params):
        return
    rule = "a tree of float32 or float64 arrays"
    advice = (
        "Keep the sampled parameters in float32 and cast inside the model. Exclude leaves that are"
        " not sampled with optax.partition and optax.set_to_zero."
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not hasattr(leaf, "dtype") or leaf.dtype not in PRECISIONS:
            got = getattr(leaf, "dtype", type(leaf).__name__)
            at = _paths.place(path)
            _check.fail("params", rule, f"{got} at {at}", advice)
    if (number := _tree.size(params)) < smallest:
        _check.fail("params", f"a tree of at least {smallest} parameters", number)


def check_gradients(updates: object, params: object, name: str):
    """Require gradients of these parameters, in any floating-point precision."""
    check_alike("updates", updates, params, name)
    for path, leaf in jax.tree_util.tree_leaves_with_path(updates):
        if not jnp.issubdtype(getattr(leaf, "dtype", type(leaf)), jnp.floating):
            got = f"{_check.show(leaf)} at {_paths.place(path)}"
            _check.fail("updates", "a tree of floating-point gradients", got)


def check_alike(argument: str, tree: object, expected: object, expected_name: str):
    """Require the structure and the leaf shapes of `expected`."""
    own, structure = jax.tree.structure(tree), jax.tree.structure(expected)
    if own != structure:
        _check.fail(argument, f"a tree of the structure of {expected_name}, {structure}", own)
    shapes = jax.tree_util.tree_leaves_with_path(expected)
    for (path, want), leaf in zip(shapes, jax.tree.leaves(tree), strict=True):
        if np.shape(leaf) != np.shape(want):
            at = _paths.place(path)
            rule = f"of shape {np.shape(want)} at {at}, as {expected_name}"
            _check.fail(argument, rule, np.shape(leaf))


def check_structure(argument: str, tree: object, known: object, name: str):
    """Require the structure of `known`, with None as a leaf."""
    own, other = (jax.tree.structure(x, is_leaf=lambda y: y is None) for x in (tree, known))
    if own != other:
        rule = f"a tree of the structure of {name}, {jax.tree.structure(known)}"
        _check.fail(argument, rule, jax.tree.structure(tree))
