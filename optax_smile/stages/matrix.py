"""A scale that is a full matrix, for posteriors of up to a few hundred parameters.

If the gradient noise has the covariance C, it is isotropic in coordinates theta = A phi with A A^T
= C^-1. If the curvature of the posterior is proportional to C, as in a regression, the posterior is
also round in these coordinates. Then a single number, the mean curvature, determines its width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_smile import _tree
from optax_smile.stages.scale import MeanSquare, MeanSquareState

# Largest number of parameters for which `psmile` measures a matrix.
LARGEST = 256
# Weight of the previous window's matrix, in gradients per parameter.
LAST_MATRIX = 4
# Lower bound of the second moment in any direction, relative to its mean: in a network, the
# flattest directions are straight only over short distances.
SMALLEST_MOMENT = 1e-3
# A width that changes by a factor between windows is multiplied by this power of the factor.
EXTRAPOLATION = 3


class MatrixState(NamedTuple):
    """The matrix in use, the next one, and the curvature of the energy in the coordinates phi.

    With many parameters, the arrays are None and the numbers do not change.

    Attributes:
        entries: A, `[entry, entry]`, in the order of the leaves.
        next_entries: A of the next window up to a factor, likewise; not measured in the first.
        mean_whitened: mean of the squares of the whitened gradients, or of their differences, over
            all entries and the open window, scalar.
        mean_before: the same in earlier windows, scalar.
        position: phi relative to the start of the window, `[entry]`.
        mean_position, mean_force: means of phi and of the whitened gradients in the open window.
        covariance: sum of (phi - mean) . (gradient - mean) over the open window, nats.
        spread: sum of |phi - mean|^2 over the open window.
        last_width: width in the previous window, not extrapolated; inf if unknown.
        width: see `Preconditioner.width`, extrapolated.
    """

    entries: jax.Array
    next_entries: jax.Array
    mean_whitened: jax.Array
    mean_before: jax.Array
    position: jax.Array
    mean_position: jax.Array
    mean_force: jax.Array
    covariance: jax.Array
    spread: jax.Array
    last_width: jax.Array
    width: jax.Array


def _begin(
    matrix: jax.Array, mean: jax.Array, last_width: jax.Array, width: jax.Array
) -> MatrixState:
    """Begin a window in the coordinates of a matrix."""
    zero, zeros = jnp.zeros_like(mean), jnp.zeros_like(matrix, shape=len(matrix))
    # Each needs its own buffer, since loops donate the state.
    return MatrixState(
        entries=matrix,
        next_entries=jnp.copy(matrix),
        mean_whitened=zero,
        mean_before=mean,
        position=zeros,
        mean_position=jnp.copy(zeros),
        mean_force=jnp.copy(zeros),
        covariance=jnp.copy(zero),
        spread=jnp.copy(zero),
        last_width=last_width,
        width=width,
    )


@dataclass(frozen=True)
class FullMatrix(MeanSquare):
    """Measure the second moment of the gradients, or of their noise, as a full matrix.

    The first window is as in `MeanSquare`, and gives the scale of the second. After a later window
    of n gradients g, or of (g - g_before) / sqrt(2), with the whitened gradients w = A^T g,

        A <- c A M^(-1/2),    M = (4 d + sum of w w^T / m) / (4 d + n)

    where m is the mean of w^2 over earlier windows, and c preserves it. Directions without
    gradients in a window keep their scale. A rank-one update per gradient computes A M^(-1/2), up
    to a rotation, without a decomposition (the square root form of recursive least squares, Potter
    1963). In no direction does the second moment fall below .001 of its mean.

    The width of the posterior is sqrt(d / h) with h = sum of (phi - mean) . (w - mean) / sum of
    |phi - mean|^2, the slope of the gradient over the position. This is the mean curvature even if
    the chain has explored only a part of the posterior. If the width changed by a factor f since
    the last window, more remains to be explored, and the width is multiplied by f^3.

    With more than `largest` parameters, this is the same as `MeanSquare`.
    """

    largest: int = LARGEST

    def init(self, params: optax.Params) -> MeanSquareState:
        """Return a scale of one and an empty window."""
        state, dtype = super().init(params), _tree.dtype(params)
        one, infinite = jnp.ones((), dtype), jnp.full((), jnp.inf, dtype)
        is_small = _tree.size(params) <= self.largest
        ones = jax.tree.map(lambda x: jnp.ones_like(x, dtype), params)
        # `optax.tree.map_params` passes a placeholder without leaves.
        flat = _tree.flat(ones) if is_small and jax.tree.leaves(params) else jnp.zeros(0, dtype)
        matrix = _begin(jnp.diag(flat), one, infinite, jnp.copy(infinite))
        if not is_small:
            matrix = jax.tree.map(lambda x: None if x.ndim else x, matrix)
        return state._replace(matrix=matrix)

    def width(self, state: MeanSquareState) -> jax.Array | None:
        """Return the width of the posterior, inf if it is unknown; None without a matrix."""
        return None if state.matrix.entries is None else state.matrix.width

    def observe(self, state, gradient, weight, direction, drift) -> MeanSquareState:
        """Add a gradient, and use the next matrix once the window closes."""
        after = super().observe(state, gradient, weight, direction, drift)
        old: MatrixState = state.matrix
        if old.entries is None:
            return after._replace(matrix=old)
        number, window, closes = self._advance(state, weight)
        enters, is_first = weight.counts & (number > 0), window == self.first_window
        count = jnp.maximum(number, 1).astype(old.width.dtype)
        deviation = weight.trust * _tree.flat(self.deviation(state, gradient))
        force = weight.trust * _tree.product(_tree.flat(gradient), old.entries)
        new = self._measure(old, deviation, count, enters & ~is_first)
        new, width = _locate(new, force, _tree.flat(drift), count, enters)

        # The mean of the whitened squares is preserved.
        prior = LAST_MATRIX * len(force)
        smoothed = (prior * new.mean_before + count * new.mean_whitened) / (prior + count)
        factor = jnp.sqrt((prior + count) / prior * smoothed / new.mean_before)
        diagonal = jnp.diag(_tree.flat(after.in_use))
        matrix = jnp.where(is_first, diagonal, factor * new.next_entries)
        has_noise = after.mean >= jnp.finfo(count.dtype).tiny
        mean = jnp.where(is_first, jnp.where(has_noise, after.mean, 1), smoothed)
        change = jnp.maximum(width / old.last_width, old.last_width / width)
        is_known = jnp.isfinite(width) & jnp.isfinite(old.last_width)
        extrapolated = jnp.where(is_known, width * change**EXTRAPOLATION, jnp.inf)
        widths = (jnp.where(weight.restart, jnp.inf, x) for x in (width, extrapolated))
        begun = _begin(matrix, mean, *widths)
        return after._replace(matrix=optax.tree.where(closes | weight.restart, begun, new))

    def _measure(
        self, state: MatrixState, deviation: jax.Array, count: jax.Array, enters: jax.Array
    ) -> MatrixState:
        """Add the deviation of a gradient, number `count` in its window."""
        if self.differences:
            deviation *= math.sqrt(0.5)
        size, before = len(deviation), state.mean_before
        square = jnp.mean(_tree.product(deviation, state.entries) ** 2)
        mean = (1 - 1 / count) * state.mean_whitened + square / count
        # Add a constant to one entry after the other, so that no second moment gets too small.
        is_raised = jnp.arange(size) == count % size
        floor = jnp.sqrt(SMALLEST_MOMENT * size * before) * is_raised
        scaled = (deviation + floor) / jnp.sqrt(LAST_MATRIX * size * before)
        along = jnp.where(enters, _tree.product(scaled, state.next_entries), 0)
        root = jnp.sqrt(1 + along @ along)
        change = _tree.product(state.next_entries, along)
        return state._replace(
            next_entries=state.next_entries - jnp.outer(change, along / (root * (1 + root))),
            mean_whitened=jnp.where(enters, mean, state.mean_whitened),
        )


def _locate(
    state: MatrixState, force: jax.Array, drift: jax.Array, count: jax.Array, enters: jax.Array
) -> tuple[MatrixState, jax.Array]:
    """Add a position and its whitened gradient to the regression of gradients on positions.

    Returns also the width that corresponds to the slope.
    """
    position, rate = state.position + drift, 1 / count
    moved = jnp.where(enters, position - state.mean_position, 0)
    pulled = jnp.where(enters, force - state.mean_force, 0)
    covariance = state.covariance + (1 - rate) * _tree.product(moved, pulled)
    spread = state.spread + (1 - rate) * _tree.product(moved, moved)
    rises = (covariance > 0) & (spread > 0)
    width = jnp.sqrt(len(moved) * spread / jnp.where(rises, covariance, 1))
    state = state._replace(
        position=position,
        mean_position=state.mean_position + rate * moved,
        mean_force=state.mean_force + rate * pulled,
        covariance=covariance,
        spread=spread,
    )
    return state, jnp.where(rises, width, jnp.inf)
