"""A momentum p whose norm is a sum of nuclear norms of matrices.

    ||p|| = sum of w |P| over the leaves P,    theta' = grad ||p||,    p' = -||p|| grad U / (d - 1)

`|P|` is the nuclear norm of a matrix, with w = sqrt(max(rows, columns) / d), and the Euclidean norm
of any other leaf, with w = sqrt(size / d). The velocity v = grad ||p|| is w U V^T with the singular
vectors U, V of a matrix, as in the optimizer Muon, and w P / |P| for other leaves. Its length is 1.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType
from optax.contrib import MuonDimensionNumbers

from optax_smile import _check, _tree
from optax_smile.stages.integrator import Norm

# Quintic polynomials a s + b s^3 + c s^5, applied in turn, map a singular value s of a matrix of
# Frobenius norm 1 to 1: values between .01 and 1 up to an error of 3e-6, smaller ones to less than
# 1. Each is the best in the maximum norm on the range of the previous one (as in Amsel et al. 2025,
# The Polar Express).
POLYNOMIALS = (
    (8.0934, -23.6206, 17.4463),
    (3.6366, -2.7219, 0.5365),
    (2.6613, -1.9772, 0.4526),
    (1.9562, -1.3375, 0.3838),
    (1.8751, -1.2501, 0.3750),
)


@dataclass(frozen=True)
class Spectral(Norm):
    """The norm described in the module docstring.

    Attributes:
        matrices: see `smile`.
    """

    # For gradients that are noise, the angle is half of it.
    angle = 0.6
    matrices: Callable[[Any], object] | None = None

    def velocity(self, momentum: optax.Updates) -> optax.Updates:
        """Compute the gradient of the norm, w U V^T or w P / |P|, a tree like the parameters."""
        size, stacks = _tree.size(momentum), defaultdict(list)
        leaves, structure = jax.tree.flatten(momentum)
        found: list[jax.Array | None] = [None] * len(leaves)
        for index, (leaf, axes) in enumerate(zip(leaves, self._axes(momentum), strict=True)):
            if axes is None or not leaf.size:
                found[index] = math.sqrt(leaf.size / size) * _unit(leaf)
            else:
                self._require_whole(leaf)
                matrices = _matrices(leaf, axes)
                stacks[matrices.shape[1:], leaf.dtype].append((index, axes, matrices))
        for (shape, _), group in stacks.items():
            weight = math.sqrt(max(shape) / size)
            done = weight * orthogonal(jnp.concatenate([x for *_, x in group]))
            first = 0
            for index, axes, matrices in group:
                part = done[first : first + len(matrices)]
                first += len(matrices)
                # The transposed permutation undoes a permutation.
                back = jax.linear_transpose(lambda x, axes=axes: _matrices(x, axes), leaves[index])
                (found[index],) = back(part)
        return jax.tree.unflatten(structure, found)

    @_check.called("smile")
    def _require_whole(self, leaf: jax.Array):
        """Reject explicit axes, for which every product would need its own sharding."""
        sharding = jax.typeof(leaf).sharding
        if any(sharding.spec) and AxisType.Explicit in sharding.mesh.axis_types:
            rule = "a tree whose matrices are not sharded over explicit axes, with norm='spectral'"
            _check.fail("params", rule, sharding.spec, "Make the mesh with `AxisType.Auto`.")

    @_check.called("smile")
    def _axes(self, tree: optax.Params) -> list[Axes | None]:
        """Find the axes of rows and columns of each leaf; None if it is not a matrix."""
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        if self.matrices is None:
            return [default_axes(leaf) for _, leaf in leaves]

        def is_entry(node: object) -> bool:
            return node is None or isinstance(node, MuonDimensionNumbers)

        chosen = self.matrices(tree)
        entries = jax.tree.leaves(chosen, is_leaf=is_entry)
        expected = jax.tree.structure(tree, is_leaf=lambda x: x is None)
        if jax.tree.structure(chosen, is_leaf=is_entry) != expected:
            rule = f"a function that returns a tree of the structure {expected}"
            _check.fail("matrices", rule, jax.tree.structure(chosen, is_leaf=is_entry))
        nodes = jax.tree.leaves(tree, is_leaf=lambda x: x is None)
        entries = [x for x, node in zip(entries, nodes, strict=True) if node is not None]
        return [
            _checked(entry, jax.tree_util.keystr(path), leaf)
            for entry, (path, leaf) in zip(entries, leaves, strict=True)
        ]


# Axes of the rows and columns of the matrices in a leaf; other axes index the matrices.
Axes = tuple[tuple[int, ...], tuple[int, ...]]


def default_axes(leaf: jax.Array) -> Axes | None:
    """Use the last axis for columns and all others for rows, as in Flax kernels."""
    return None if leaf.ndim < 2 else (tuple(range(leaf.ndim - 1)), (leaf.ndim - 1,))


def _checked(entry: object, place: str, leaf: jax.Array) -> Axes | None:
    """Check the user's axes for a leaf, and convert negative ones."""
    if entry is None:
        return None
    rule = f"a function that gives None or MuonDimensionNumbers of different axes at {place}"
    if not isinstance(entry, MuonDimensionNumbers):
        _check.fail("matrices", rule, _check.show(entry))
    both = [tuple(x) if isinstance(x, Sequence) else (x,) for x in entry]
    fit = all(isinstance(x, int) and -leaf.ndim <= x < leaf.ndim for x in both[0] + both[1])
    rows, columns = ([x % leaf.ndim for x in axes] for axes in both) if fit else ([], [])
    if not rows or not columns or len({*rows, *columns}) < len(rows) + len(columns):
        _check.fail("matrices", rule, f"{entry} for an array of {leaf.ndim} axes")
    return tuple(rows), tuple(columns)


def _matrices(leaf: jax.Array, axes: Axes) -> jax.Array:
    """Reshape a leaf to `[matrix, row, column]`, with no more rows than columns."""
    rows, columns = axes
    others = [x for x in range(leaf.ndim) if x not in rows + columns]
    sizes = [math.prod(leaf.shape[x] for x in part) for part in (others, rows, columns)]
    matrices = leaf.transpose(*others, *rows, *columns).reshape(sizes)
    return matrices.swapaxes(1, 2) if sizes[1] > sizes[2] else matrices


def _unit(x: jax.Array, axes: tuple[int, ...] | None = None) -> jax.Array:
    """Divide by the Euclidean norm, without overflow; 0 stays 0."""
    if not x.size:
        return x
    largest = jnp.max(jnp.abs(x), axis=axes, keepdims=True)
    x = x / jnp.where(largest > 0, largest, 1)
    norm = jnp.sqrt(jnp.sum(x * x, axis=axes, keepdims=True))
    return x / jnp.where(norm > 0, norm, 1)


def orthogonal(matrices: jax.Array) -> jax.Array:
    """Replace the singular values of matrices `[matrix, row, column]` by one, see `POLYNOMIALS`.

    For long matrices the polynomials are multiplied first, by products of square matrices instead
    of long ones. Rounding then changes a singular value s by a fraction of about 1e-7 / s^2.
    """
    x = _unit(matrices, (1, 2))
    rows, columns = x.shape[1:]
    is_long = columns >= 2 * rows
    square = x @ x.swapaxes(1, 2)
    product = identity = jnp.broadcast_to(jnp.eye(rows, dtype=x.dtype), square.shape)
    for a, b, c in POLYNOMIALS:
        factor = a * identity + b * square + c * square @ square
        if is_long:
            product, square = factor @ product, factor @ square @ factor
        else:
            x = factor @ x
            square = x @ x.swapaxes(1, 2)
    return product @ x if is_long else x
