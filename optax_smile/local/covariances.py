"""Influence of examples: covariances of losses over the draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _check, _tree
from optax_smile._types import Batch, Tree
from optax_smile.draws import _checks
from optax_smile.draws.predict import batches_of

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
    data = [examples] if queries is None else [examples, queries]
    one = [jax.tree.map(lambda x: np.asarray(x)[0], tree) for tree in data]
    _tree.check_alike(where, "queries", one[-1], one[0], "an example")
    blocks = [
        batches_of(jax.tree.map(jnp.asarray, tree), batch_size or _checks.num_inputs(tree))
        for tree in data
    ]
    compiled, remedy = jax.jit(losses_fn), "Does it match these `draws`, `examples` and `queries`?"
    rule = "a function that returns the loss of each example, [example]"
    kept: list[list[np.ndarray]] = []
    for number, draw in enumerate(draws):
        kept.append([])
        for of_data in blocks:
            if not number:
                given = draw, of_data[0]
                _check.traced(where, "losses_fn", losses_fn, *given, rule=rule, advice=remedy)
            parts = [np.asarray(compiled(draw, block), float) for block in of_data]
            if [x.shape for x in parts] != [(_checks.num_inputs(block),) for block in of_data]:
                _check.fail(where, "losses_fn", rule, f"one that returns shape {parts[0].shape}")
            kept[-1].append(np.concatenate(parts))
            if not np.isfinite(kept[-1][-1]).all():
                rule, got = "a function that returns finite losses", f"NaN or inf for draw {number}"
                _check.fail(where, "losses_fn", rule, got)
    if len(kept) < 2:
        _check.fail(where, "draws", "at least two draws", len(kept))
    losses = [np.stack(of_draws) for of_draws in zip(*kept, strict=True)]
    centred = [x - x.mean(axis=0) for x in losses]
    return centred[-1].T @ centred[0] / (len(kept) - 1) / temperature


def _temperature(where: str, draws: Iterable[optax.Params], given: float | None) -> float:
    """Return the temperature of the draws if it is known; `given` must agree with it."""
    known = (getattr(draws, "settings", None) or {}).get("temperature")
    known = float(known) if isinstance(known, int | float) else None
    if given is None:
        return 1.0 if known is None else known
    if known is not None and not np.isclose(known, given, rtol=1e-4):
        _check.fail(where, "temperature", f"that of the draws, {known:g}", given)
    return float(given)
