"""Matrices that move as matrices: a momentum p whose norm is a sum of nuclear norms.

    ||p|| = sum of w |P| over the leaves P,    theta' = grad ||p||,    p' = -||p|| grad U / (d - 1)

`|P|` is the nuclear norm of a matrix, with w = sqrt(max(rows, columns) / d), and the Euclidean norm
of any other leaf, with w = sqrt(size / d). The velocity v = grad ||p|| has the parts w U V^T of the
singular vectors of P, the direction of the optimizer Muon, and w P / |P|. It has the length 1.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType
from optax.contrib import MuonDimensionNumbers

from optax_smile import _check, _sums, _tree
from optax_smile._types import Tree, Unchecked
from optax_smile.stages.evidence import StepEnd, Sums
from optax_smile.stages.integrator import Momentum, MomentumState

Norm = Literal["euclidean", "spectral"]
# Quintic polynomials a s + b s^3 + c s^5, one after the other, take a singular value s of a matrix
# of Frobenius norm 1 to 1: those between .01 and 1 within 3e-6, smaller ones to less. Each is the
# best one in the maximum norm for what the one before leaves (as by Amsel et al. 2025, The Polar
# Express).
POLYNOMIALS = (
    (8.0934, -23.6206, 17.4463),
    (3.6366, -2.7219, 0.5365),
    (2.6613, -1.9772, 0.4526),
    (1.9562, -1.3375, 0.3838),
    (1.8751, -1.2501, 0.3750),
)
# Angle, in radians, of the smallest kick that shows in the velocity: the change after a smaller one
# is mostly rounding.
SMALLEST_KICK = 1e-2
# Most by which a kick raises the log of the momentum's norm.
LARGEST_GROWTH = 30.0


class Pulled(NamedTuple):
    """The momentum after the kicks of a call, in place of a `Heading`.

    Attributes:
        momentum: of norm 1, a tree like the parameters.
        velocity: gradient of its norm, likewise.
        moving: whether there is a direction after the call.
        growth: log of the factor by which the kicks lengthen the momentum.
        closing_growth: log of that of the kick that closes a step.
        turn_rate: angle per unit length by which the gradient turns the momentum; 0 if unknown.
    """

    momentum: optax.Updates
    velocity: optax.Updates
    moving: jax.Array
    growth: jax.Array
    closing_growth: jax.Array
    turn_rate: jax.Array


@dataclass(frozen=True)
class Spectral(Momentum):
    """The momentum of this module, without explicit noise.

    Attributes:
        where: name of the sampler, for errors.
        matrices: see `smile`.
    """

    is_elementwise = False
    # Half of it for gradients that are noise.
    angle = 0.6
    where: str = ""
    matrices: Callable[[optax.Params], Tree] | None = None

    def init(self, params: optax.Params, step_length: jax.Array) -> MomentumState:
        """Start at rest; `direction` is the velocity."""
        self._axes(params)
        zeros = jax.tree.map(jnp.zeros_like, params)
        return super().init(params, step_length)._replace(conjugate=zeros)

    def pull(self, state: MomentumState, gradient: optax.Updates, sums: Sums) -> Pulled:
        """Carry out the kick that closes a step and the one that opens the next, as one.

        Both have the length of the step that ends, so that a call computes one velocity. A kick of
        length s is p <- p - tau g / (d - 1), and dtau / ds = f(tau), the norm on its way. From the
        slopes a and b of f at both ends, -<g, v> / (d - 1),

            tau = (exp(a s) - 1) / a,    f(t) = 1 + a t + (b - a) t^2 / (2 tau)

        to second order in s, and to all orders if g is along p. The slopes are the work that drifts
        along v do, so that the energy stays conserved where v is inexact. With f = <p, v> it would
        not. Where the chain is at rest, p becomes -g.
        """
        num_drifts, rest = len(self.scheme.drifts), _tree.size(state.direction) - 1
        closing = self._length(self.scheme.kicks[1:], state)
        opening = self._length((*[0.0] * (num_drifts - 1), self.scheme.kicks[0]), state)
        slope = -sums.direction_dot_whitened / rest

        def time_of(length: jax.Array) -> jax.Array:
            exponent = jnp.minimum(slope * length, LARGEST_GROWTH)
            is_zero = exponent == 0
            mean = jnp.expm1(exponent) / jnp.where(is_zero, 1, exponent)
            return length * jnp.where(is_zero, 1, mean)

        time, closing_time = time_of(closing + opening), time_of(closing)
        factor = jnp.where(state.moving, time / rest, 1)

        def kicked(p: jax.Array, g: jax.Array) -> jax.Array:
            return (jnp.where(state.moving, p, 0) - factor * g).astype(p.dtype)

        momentum = jax.tree.map(kicked, state.conjugate, gradient)
        velocity = self.velocity(momentum)
        pairs = (momentum, velocity), (gradient, velocity)
        norm, product = _sums.sums([jax.tree.map(jnp.multiply, *pair) for pair in pairs])
        moving = norm > 0
        # The square of an angle per length, as |g|^2 / (d - 1)^2 for a Euclidean norm.
        bend = jnp.maximum(-product / rest - slope, 0) / jnp.where(time > 0, time, 1)

        def growth_at(at: jax.Array) -> jax.Array:
            return jnp.where(state.moving, jnp.log1p(slope * at + bend * at**2 / 2), 0)

        is_evident = state.moving & (time * jnp.sqrt(sums.whitened_square) >= SMALLEST_KICK * rest)
        scale = jnp.where(moving, norm, 1)
        return Pulled(
            momentum=jax.tree.map(lambda p: (p / scale).astype(p.dtype), momentum),
            velocity=velocity,
            moving=moving,
            growth=growth_at(time),
            closing_growth=growth_at(closing_time),
            turn_rate=jnp.where(is_evident, jnp.sqrt(bend), 0),
        )

    def close(
        self, state: MomentumState, sums: Sums, pulled: Pulled, rate_square: jax.Array | None = None
    ) -> tuple[Pulled, StepEnd]:
        """Describe the part of the kick that closes the step."""
        _, end = super().close(state, sums, pulled)
        is_known = pulled.turn_rate > 0
        turn_rate = jnp.where(is_known, pulled.turn_rate, end.turn_rate)
        norm = jnp.sqrt(sums.whitened_square) / jnp.where(is_known, pulled.turn_rate, 1)
        return pulled, end._replace(
            kinetic_change=(end.num_parameters - 1) * pulled.closing_growth,
            turn_rate=turn_rate,
            turning_norm=jnp.where(is_known, norm, end.turning_norm),
        )

    def diffuse(self, end: StepEnd, heading: Pulled, *given: Unchecked) -> Pulled:
        """Add no noise: that of a sphere would not keep the cone measure of another norm."""
        return heading

    def open(
        self,
        end: StepEnd,
        heading: Pulled,
        step_length: jax.Array,
        rate_square: jax.Array | None = None,
    ) -> tuple[Pulled, jax.Array]:
        """Return the energy of the part of the kick that opens the next step."""
        change = heading.growth - heading.closing_growth
        return heading, (end.num_parameters - 1) * change

    def proceed(
        self, state: MomentumState, heading: Tree, step_length: jax.Array, reject: jax.Array
    ) -> MomentumState:
        """Keep the momentum as well, which a rejected call leaves as it was."""
        after = super().proceed(state, heading, step_length, reject)
        kept = optax.tree.where(reject, state.conjugate, heading.momentum)
        return after._replace(conjugate=kept)

    def turn(
        self, direction: Tree, heading: Pulled, whitened: Tree, noise: Tree | None
    ) -> optax.Updates:
        """Return the new velocity."""
        return heading.velocity

    def velocity(self, momentum: optax.Updates) -> optax.Updates:
        """Compute the gradient of the norm, w U V^T or w P / |P|, a tree like the parameters."""
        size, stacks = _tree.size(momentum), defaultdict(list)
        leaves, structure = jax.tree.flatten(momentum)
        found: list[Tree] = [None] * len(leaves)
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
                # What a permutation does is undone by its transpose.
                back = jax.linear_transpose(lambda x, axes=axes: _matrices(x, axes), leaves[index])
                (found[index],) = back(part)
        return jax.tree.unflatten(structure, found)

    def _require_whole(self, leaf: jax.Array):
        """Refuse explicit axes, for which every product needs a sharding of its own."""
        sharding = jax.typeof(leaf).sharding
        if any(sharding.spec) and AxisType.Explicit in sharding.mesh.axis_types:
            rule = "a tree whose matrices are not sharded over explicit axes, with norm='spectral'"
            advice = "Make the mesh with `AxisType.Auto`."
            _check.fail(self.where, "params", rule, sharding.spec, advice)

    def _axes(self, tree: Tree) -> list[Axes | None]:
        """Find the axes of rows and of columns of each leaf; None for one that is no matrix."""
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        if self.matrices is None:
            return [default_axes(leaf) for _, leaf in leaves]

        def is_entry(node: Unchecked) -> bool:
            return node is None or isinstance(node, MuonDimensionNumbers)

        chosen = self.matrices(tree)
        entries = jax.tree.leaves(chosen, is_leaf=is_entry)
        expected = jax.tree.structure(tree, is_leaf=lambda x: x is None)
        if jax.tree.structure(chosen, is_leaf=is_entry) != expected:
            rule = f"a function that returns a tree of the structure {expected}"
            _check.fail(self.where, "matrices", rule, jax.tree.structure(chosen, is_leaf=is_entry))
        nodes = jax.tree.leaves(tree, is_leaf=lambda x: x is None)
        entries = [x for x, node in zip(entries, nodes, strict=True) if node is not None]
        return [
            _checked(self.where, entry, jax.tree_util.keystr(path), leaf)
            for entry, (path, leaf) in zip(entries, leaves, strict=True)
        ]


# Axes of the rows and of the columns of matrices in a leaf; others number the matrices.
Axes = tuple[tuple[int, ...], tuple[int, ...]]


def default_axes(leaf: jax.Array) -> Axes | None:
    """Take the last axis for the columns and all others for the rows, as in kernels of Flax."""
    return None if leaf.ndim < 2 else (tuple(range(leaf.ndim - 1)), (leaf.ndim - 1,))


def _checked(where: str, entry: Unchecked, place: str, leaf: jax.Array) -> Axes | None:
    """Check what the user's function says of a leaf, and count axes from the first."""
    if entry is None:
        return None
    rule = f"a function that gives None or MuonDimensionNumbers of different axes at {place}"
    if not isinstance(entry, MuonDimensionNumbers):
        _check.fail(where, "matrices", rule, _check.show(entry))
    both = [tuple(x) if isinstance(x, Sequence) else (x,) for x in entry]
    fit = all(isinstance(x, int) and -leaf.ndim <= x < leaf.ndim for x in both[0] + both[1])
    rows, columns = ([x % leaf.ndim for x in axes] for axes in both) if fit else ([], [])
    if not rows or not columns or len({*rows, *columns}) < len(rows) + len(columns):
        got = f"{entry} for an array of {leaf.ndim} axes"
        _check.fail(where, "matrices", rule, got)
    return tuple(rows), tuple(columns)


def _matrices(leaf: jax.Array, axes: Axes) -> jax.Array:
    """Bring a leaf into the form `[matrix, row, column]`, with no more rows than columns."""
    rows, columns = axes
    others = [x for x in range(leaf.ndim) if x not in rows + columns]
    sizes = [math.prod(leaf.shape[x] for x in part) for part in (others, rows, columns)]
    matrices = leaf.transpose(*others, *rows, *columns).reshape(sizes)
    return matrices.swapaxes(1, 2) if sizes[1] > sizes[2] else matrices


def _unit(x: jax.Array, axes: tuple[int, ...] | None = None) -> jax.Array:
    """Divide by the Euclidean norm, without overflow; 0 stays."""
    if not x.size:
        return x
    largest = jnp.max(jnp.abs(x), axis=axes, keepdims=True)
    x = x / jnp.where(largest > 0, largest, 1)
    norm = jnp.sqrt(jnp.sum(x * x, axis=axes, keepdims=True))
    return x / jnp.where(norm > 0, norm, 1)


def orthogonal(matrices: jax.Array) -> jax.Array:
    """Replace the singular values of matrices `[matrix, row, column]` by one, see `POLYNOMIALS`.

    For long matrices the polynomials are multiplied first, which takes products of square matrices
    in place of long ones. Rounding then changes a singular value s by about 1e-7 / s^2 of itself.
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
