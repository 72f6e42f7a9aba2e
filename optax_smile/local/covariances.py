"""Influence of examples: covariances of losses over the draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _check
from optax_smile._types import Batch, Tree
from optax_smile.draws import _checks

EXAMPLES = _check.Tree(axes="[example, ...]", keys=False, traced=False, finite=True)


@_check.arguments(
    losses_fn=_check.Function("(params, examples)"),
    draws=_checks.Posterior(_checks.SNAPSHOTS),
    examples=EXAMPLES,
    queries=EXAMPLES | None,
    temperature=_check.Real(0, open="low", traced=False) | None,
    batch_size=_check.Whole(1) | None,
)
def influence(
    losses_fn: Callable[[Tree, Batch], jax.Array],
    draws: Iterable[optax.Params],
    examples: Batch,
    queries: Batch = None,
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

    Cost: one forward pass over examples and queries per draw. Memory for the result and for the
    losses `[draw, example + query]`, in float64.

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
    number = _checks.num_inputs(examples)
    whole = examples
    if queries is not None:
        try:
            whole = jax.tree.map(lambda x, y: np.concatenate([x, y]), examples, queries)
        except ValueError as error:
            rule = "arrays like the examples except for the first axis"
            _check.fail(where, "queries", rule, str(error).splitlines()[0])
    size = _checks.num_inputs(whole)
    step = size if batch_size is None else batch_size
    slices = [slice(first, first + step) for first in range(0, size, step)]
    blocks = [jax.tree.map(lambda x, rows=rows: jnp.asarray(x[rows]), whole) for rows in slices]
    compiled = jax.jit(losses_fn)
    rule = "a function that returns the loss of each example, [example]"
    kept: list[np.ndarray] = []
    for draw in draws:
        if not kept:
            remedy = "Does it match these `draws`, `examples` and `queries`?"
            _check.traced(where, "losses_fn", losses_fn, draw, blocks[0], rule=rule, advice=remedy)
        parts = [np.asarray(compiled(draw, block), float) for block in blocks]
        if [x.shape for x in parts] != [(_checks.num_inputs(block),) for block in blocks]:
            _check.fail(where, "losses_fn", rule, f"one that returns shape {parts[0].shape}")
        kept.append(np.concatenate(parts))
        if not np.isfinite(kept[-1]).all():
            got = f"NaN or inf for draw {len(kept) - 1}"
            _check.fail(where, "losses_fn", "a function that returns finite losses", got)
    if len(kept) < 2:
        _check.fail(where, "draws", "at least two draws", len(kept))
    losses = np.stack(kept)
    losses -= losses.mean(axis=0)
    of_queries = losses if queries is None else losses[:, number:]
    return of_queries.T @ losses[:, :number] / (len(kept) - 1) / temperature


def _temperature(where: str, draws: Iterable[optax.Params], given: float | None) -> float:
    """Return the temperature of the draws if it is known; `given` must agree with it."""
    known = (getattr(draws, "settings", None) or {}).get("temperature")
    known = float(known) if isinstance(known, int | float) else None
    if given is None:
        return 1.0 if known is None else known
    if known is not None and not np.isclose(known, given, rtol=1e-4):
        _check.fail(where, "temperature", f"that of the draws, {known:g}", given)
    return float(given)
