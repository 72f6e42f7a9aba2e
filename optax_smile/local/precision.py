"""Precisions of priors: from the norm of trained weights, and from the curvature of the loss."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _check, _on_host
from optax_smile._types import Options
from optax_smile.mistakes.batches import require_usable
from optax_smile.mistakes.start import curvature
from optax_smile.potential import Potential, strength_for

# Number of batches used to estimate the curvature of the loss.
MOST_BATCHES = 20


FLOATING: Options = {"traced": False, "finite": True, "floating": True}


@_check.arguments(
    params=_check.Tree("a tree of floating-point arrays", **FLOATING),
    temperature=_check.Real(0, open="low", traced=False),
)
def norm_precision(params: optax.Params, temperature: float | jax.Array = 1.0) -> float:
    """Compute the precision of a prior whose draws have the norm of trained weights.

    A cold network trained with few passes has many directions about which the data say little.
    There a sampler diffuses, and with a weak prior the norm of the weights grows for as long as the
    run lasts. A draw from the prior N(0, 1 / P) at the temperature T has the expected squared norm
    T d / P. With P = T d / |w|**2 that is the one of the d trained weights w, so the draws stay at
    their scale. At this precision, the temperature makes the likelihood cold, but not the prior.

    Args:
        params: weights of a trained network, not all zero, or of several.
        temperature: of the posterior, > 0.

    Returns:
        P > 0, the temperature over the mean square of all weights, to pass as `prior_precision`.

    Example:
        >>> import jax.numpy as jnp, optax_smile
        >>> optax_smile.local.norm_precision({"w": jnp.full((2, 10), 0.5)}, temperature=0.1)
        0.4

    Source: the rule is ours, see `benchmarks/notes/matrices.md`.
    """
    leaves = [np.asarray(x, float) for x in jax.tree.leaves(params)]
    square = sum(float(np.sum(x**2)) for x in leaves)
    if not 0 < square < np.inf:
        _check.fail("params", "finite weights that are not all zero", f"a squared norm of {square}")
    return float(temperature) * sum(x.size for x in leaves) / square


@_check.arguments(
    loss_fn=_check.Function("(params, batch)"),
    params=_check.Tree(
        "a tree of floating-point arrays [chain, ...]", axes="[chain, ...]", **FLOATING
    ),
    batches=_check.REPEATABLE,
    num_data=_check.Real(1, large=True, traced=False),
    allowed=_check.Real(0, open="low", traced=False),
    temperature=_check.Real(0, open="low", traced=False),
)
def curvature_precision(
    loss_fn: Callable[..., jax.Array],
    params: optax.Params,
    batches: Iterable[object],
    *,
    num_data: float,
    allowed: float = 0.03,
    temperature: float = 1.0,
) -> float:
    """Compute the precision of a prior around trained weights from the curvature of the loss.

    If a network has more parameters than data, its posterior is far wider than the neighbourhood of
    its trained weights w. A prior N(w, 1 / P) keeps the draws near w. If the loss is quadratic
    there, the expected mean loss of a draw is at most `allowed` nats per example above that of w
    with

        P = T H / (2 a) - N H / d

    where H is the trace of the Hessian of the mean loss, d the number of parameters, N `num_data`,
    T the temperature and a = `allowed`. H is estimated from differences of the loss along a random
    direction per network, at a distance of 2 % of the size of the weights: the median over the
    networks, averaged over the batches. Sample with `psmile(prior_mean="start",
    prior_precision=P, decoherence_length="turning", tuner=angle_tuner(0.1))`.

    Args:
        loss_fn: mean loss `loss_fn(params, batch)`, without random numbers.
        params: trained networks, each leaf `[chain, ...]`.
        batches: batches of the data; only the first 20 are read. Held-out batches are better if the
            networks fit their training data closely, see `docs/local.md`.
        num_data: N >= 1, see `psmile`; that of the training data.
        allowed: largest expected rise of the mean loss, nats per example, > 0.
        temperature: temperature of the posterior, > 0.

    Returns:
        P >= 0, to pass as `prior_precision`. It is 0 if the data alone keep the rise below
        `allowed`; batches whose estimate of H is negative or not finite count as 0.

    Raises:
        ArgumentError (a ValueError): an argument is out of range, or the loss of the networks is
            not a finite scalar.

    Cost: three forward passes per network for each of at most 20 batches, and memory for two copies
    of the networks.

    Example:
        >>> import jax.numpy as jnp, optax_smile
        >>> loss_fn = lambda params, batch: jnp.sum((params - batch.mean(axis=0)) ** 2) / 2
        >>> given = loss_fn, jnp.zeros((4, 500)), [jnp.zeros((10, 500))]
        >>> found = optax_smile.local.curvature_precision(*given, num_data=10, allowed=0.1)
        >>> 2_000 < found < 3_000  # 500 / (2 * 0.1) - 10
        True

    Source: the rule is ours. Hutchinson 1990 estimates traces by random directions.
    """
    number = len(jax.tree.leaves(params)[0])
    losses = jax.jit(lambda batch, at: jax.vmap(loss_fn, (0, None))(at, batch))
    convert = functools.partial(_on_host.as_numeric, "batches", copy=True)
    seen = [*map(convert, itertools.islice(iter(batches), MOST_BATCHES))]
    require_usable(seen, per_chain=False)
    rule = "trained networks, arrays [chain, ...], each a valid argument of `loss_fn`"
    loss = _check.traced("params", losses, seen[0], params, rule=rule)
    is_scalar = getattr(loss, "shape", None) == (number,)
    if not is_scalar or not jnp.issubdtype(loss.dtype, jnp.floating):
        rule = "a function that returns a scalar mean loss"
        of_one = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape[1:])}", loss)
        _check.fail("loss_fn", rule, f"one that returns {of_one}")

    curvatures = []
    for batch in seen:
        start = np.asarray(losses(batch, params))
        if not np.all(np.isfinite(start)):
            rule, got = "weights at which the loss is finite", f"losses of {_check.cut(start)}"
            _check.fail("params", rule, got, "Are the batches finite?")
        curvatures.append(curvature(losses, batch, params, start))
    size = sum(math.prod(x.shape[1:]) for x in jax.tree.leaves(params))
    potential = Potential(num_data, temperature=temperature)
    return strength_for(potential, float(np.mean(curvatures)), size, allowed)
