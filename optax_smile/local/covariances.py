"""Influence of examples: covariances of losses over the draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _check
from optax_smile.draws._checks import Posterior

# Number of draws whose losses are held at a time.
DRAWS_AT_ONCE = 64


@_check.arguments(
    losses_fn=_check.Function("(params, examples)"),
    draws=Posterior(
        _check.Where(
            "an iterable of parameter trees",
            lambda draws: np.iterable(draws) and not isinstance(draws, (dict, str, bytes)),
        )
    ),
    examples=_check.Tree(keys=False, traced=False),
    queries=_check.Tree(keys=False, traced=False) | None,
    temperature=_check.Real(0, open="low", traced=False) | None,
    batch_size=_check.Whole(1) | None,
)
def influence(
    losses_fn: Callable[[Any, Any], jax.Array],
    draws: Iterable[optax.Params],
    examples: Any,
    queries: Any = None,
    *,
    temperature: float | None = None,
    batch_size: int | None = None,
) -> np.ndarray:
    """Estimate the effect of each example on the loss of each query, from draws of one posterior.

    If an example is left out of the data, the expected loss of a query changes by about

        Cov(loss of the query, loss of the example) / temperature

    where the covariance is over the draws. This is first order in the weight of the example and
    needs no retraining (Bayesian influence function).

    Args:
        losses_fn: `losses_fn(params, examples)`, the loss of each example, `[example]`, in nats:
            the terms of the sampler's mean loss, of which there are `num_data`.
        draws: parameter trees: the result of `sample`, in memory or on disk, or any other iterable,
            such as a generator that your own loop feeds; it is read once.
        examples: argument of `losses_fn`, arrays `[example, ...]`, at least one example.
        queries: the same for queries, `[query, ...]`; None: the examples.
        temperature: temperature of the posterior, > 0; None: that of the draws if known, else 1.
        batch_size: examples to run at once, >= 1; None: all.

    Returns:
        Nats `[query, example]`: positive if leaving the example out increases the query's loss.

    Raises:
        ValueError: an argument out of range, fewer than two draws, losses that are not finite or
            not `[example]`, a `temperature` that differs from that of the draws, or draws that are
            iterates of an optimizer.

    Cost: one forward pass over examples and queries per draw. Memory for the result in float64 and
    for the losses of 64 draws.

    Example:
        >>> import jax.numpy as jnp, optax_smile
        >>> draws = ({"w": jnp.array([w, -w])} for w in (-1.0, 0.0, 1.0))
        >>> losses_fn = lambda params, x: x @ params["w"]
        >>> optax_smile.local.influence(losses_fn, draws, jnp.eye(2)).tolist()
        [[1.0, -1.0], [-1.0, 1.0]]

    Source: Kreer et al., Bayesian influence functions, 2025; Giordano, Broderick and Jordan 2018,
    for the covariance as a derivative.
    """
    where = "influence"
    temperature = _temperature(where, draws, temperature)
    number = _rows(where, "examples", examples)
    whole, num_queries = examples, 0
    if queries is not None:
        num_queries = _rows(where, "queries", queries)
        try:
            whole = jax.tree.map(lambda x, y: np.concatenate([x, y]), examples, queries)
        except ValueError as error:
            rule = "arrays like the examples except for the first axis"
            _check.fail(where, "queries", rule, str(error).splitlines()[0])
    size = number + num_queries
    step = size if batch_size is None else batch_size
    slices = [slice(first, first + step) for first in range(0, size, step)]
    blocks = [jax.tree.map(lambda x, rows=rows: jnp.asarray(x[rows]), whole) for rows in slices]
    compiled = jax.jit(losses_fn)

    def losses(draw: Any) -> np.ndarray:
        parts = [np.asarray(compiled(draw, block), float) for block in blocks]
        shapes = [np.shape(x) for x in parts]
        if [*map(len, shapes)].count(1) < len(shapes) or sum(x[0] for x in shapes) != size:
            rule = "a function that returns the loss of each example, [example]"
            _check.fail(where, "losses_fn", rule, f"one that returns shape {shapes[0]}")
        return np.concatenate(parts)

    moments = _Moments(slice(number, None) if num_queries else slice(number), slice(number))
    held: list[np.ndarray] = []
    for draw in draws:
        if not moments.count and not held:
            rule = "a function that returns the loss of each example, [example]"
            remedy = "Does it match these `draws`, `examples` and `queries`?"
            _check.traced(where, "losses_fn", losses_fn, draw, blocks[0], rule=rule, advice=remedy)
        held.append(losses(draw))
        if not np.isfinite(held[-1]).all():
            got = f"NaN or inf for draw {moments.count + len(held) - 1}"
            _check.fail(where, "losses_fn", "a function that returns finite losses", got)
        if len(held) == DRAWS_AT_ONCE:
            moments.add(np.stack(held))
            held = []
    if held:
        moments.add(np.stack(held))
    if moments.count < 2:
        _check.fail(where, "draws", "at least two draws", moments.count)
    return moments.covariance() / temperature


class _Moments:
    """Covariance between columns, updated by blocks of rows (Chan, Golub, LeVeque 1983)."""

    def __init__(self, rows: slice, columns: slice):
        self.rows, self.columns, self.count = rows, columns, 0
        self.mean: Any = 0.0
        self.products: Any = 0.0

    def add(self, block: np.ndarray):
        """Add a block of rows."""
        mean, count = block.mean(axis=0), len(block)
        centred, shift = block - mean, mean - self.mean
        weight = self.count * count / (self.count + count)
        between = weight * np.outer(shift[self.rows], shift[self.columns])
        self.products = self.products + centred[:, self.rows].T @ centred[:, self.columns] + between
        self.count += count
        self.mean = self.mean + shift * count / self.count

    def covariance(self) -> np.ndarray:
        """Return the unbiased covariance of all rows so far."""
        return self.products / (self.count - 1)


def _rows(where: str, argument: str, tree: Any) -> int:
    """Return the common length of the first axis, at least one."""
    lengths = {np.shape(x)[:1] for x in jax.tree.leaves(tree)}
    if len(lengths) != 1 or lengths & {(), (0,)}:
        rule = "a tree of arrays with the same first axis, not empty"
        _check.fail(where, argument, rule, jax.tree.map(np.shape, tree))
    return lengths.pop()[0]


def _temperature(where: str, draws: Any, given: float | None) -> float:
    """Return the temperature of the draws if it is known; `given` must agree with it."""
    known = (getattr(draws, "settings", None) or {}).get("temperature")
    known = float(known) if isinstance(known, int | float) else None
    if given is None:
        return 1.0 if known is None else known
    if known is not None and not np.isclose(known, given, rtol=1e-4):
        _check.fail(where, "temperature", f"that of the draws, {known:g}", given)
    return float(given)
