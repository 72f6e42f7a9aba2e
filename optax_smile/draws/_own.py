"""Draws of a loop of one's own: a list of parameter trees becomes arrays `[chain, draw, ...]`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_smile import _check


def stacked(where: str, draws: Iterable[Any], num_chains: int | None) -> tuple[Any, int]:
    """Stack parameter trees.

    Args:
        where: function that the user called.
        draws: a tree per draw; with `num_chains` its arrays are `[chain, ...]`.
        num_chains: number of chains; None: one, without an axis.

    Returns:
        The tree of arrays `[chain, draw, ...]`, and the number of draws.

    Raises:
        ValueError: no draws, or one that is not finite or unlike the first.
    """
    trees = [_on_host(where, number, tree) for number, tree in enumerate(draws)]
    if not trees:
        _check.fail(where, "draws", "at least one parameter tree", "none")
    _require_chains(where, trees[0], num_chains)
    for number, tree in enumerate(trees):
        if (got := _shapes(tree)) != (first := _shapes(trees[0])):
            rule = f"a tree with the arrays of draw 0, {first}"
            _check.fail(where, f"draws[{number}]", rule, got)
        _require_finite(where, number, tree, num_chains)
    if num_chains is None:
        return jax.tree.map(lambda *x: np.stack(x)[None], *trees), len(trees)
    return jax.tree.map(lambda *x: np.stack(x, axis=1), *trees), len(trees)


def _on_host(where: str, number: int, tree: Any) -> Any:
    argument = f"draws[{number}]"
    _check.Tree(keys=False, traced=False)(where, argument, tree)
    if not jax.tree.leaves(tree):
        _check.fail(where, argument, "a tree with at least one array", _check.show(tree))
    # Copy: the loop may reuse the arrays.
    return jax.tree.map(np.array, tree)


def _shapes(tree: Any) -> Any:
    return jax.tree.map(np.shape, tree)


def _require_chains(where: str, first: Any, num_chains: int | None):
    """Require the axis of chains; later draws are compared with the first one."""
    if num_chains is None:
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(first):
        if leaf.shape[:1] != (num_chains,):
            rule = f"a tree of arrays [chain, ...] of {num_chains} chains"
            got = f"shape {leaf.shape} at {jax.tree_util.keystr(path) or 'the only leaf'}"
            _check.fail(where, "draws[0]", rule, got)


def _require_finite(where: str, number: int, tree: Any, num_chains: int | None):
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and not (is_finite := np.isfinite(leaf)).all():
            at = jax.tree_util.keystr(path) or "the only leaf"
            chain = "" if num_chains is None else f" of chain {np.argwhere(~is_finite)[0][0]}"
            _check.fail(where, f"draws[{number}]", "finite", f"nan or inf at {at}{chain}")


def trace_of(
    where: str, trace: Iterable[Any], num_draws: int, num_chains: int | None
) -> dict[str, np.ndarray]:
    """Stack the statistics of the draws, `[chain, draw]`.

    Raises:
        ValueError: another number of entries than draws, an entry that is not what `stats` returns,
            or that of a point that is no draw.
    """
    entries = list(trace)
    if len(entries) != num_draws:
        rule = f"one entry for each of the {num_draws} draws"
        _check.fail(where, "trace", rule, f"{len(entries)} entries")
    shape = () if num_chains is None else (num_chains,)
    rows: list[dict[str, np.ndarray]] = []
    for number, entry in enumerate(entries):
        argument, rule = f"trace[{number}]", "what `optax_smile.stats` returns"
        if not hasattr(entry, "_asdict"):
            _check.fail(where, argument, rule, _check.show(entry))
        row = {x: _check.host(where, argument, value) for x, value in entry._asdict().items()}
        if row.keys() != (rows or [row])[0].keys():
            _check.fail(where, argument, f"{rule}, as the first entry", f"the fields {[*row]}")
        if wrong := next((x for x, value in row.items() if value.shape != shape), None):
            rule = f"{rule}, in arrays of shape {shape}"
            advice = "" if num_chains else "Pass `num_chains` for arrays of several chains."
            _check.fail(where, argument, rule, f"shape {row[wrong].shape} at {wrong}", advice)
        if not np.all(row.get("is_draw", True)):
            advice = "Keep no draws while `stats(state).is_draw` is False."
            _check.fail(where, argument, "that of a draw", "`is_draw` False", advice)
        rows.append(row)
    return {name: np.stack([np.atleast_1d(row[name]) for row in rows], axis=1) for name in rows[0]}
