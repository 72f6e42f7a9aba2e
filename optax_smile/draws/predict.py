"""The Bayesian model average, one draw at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import optax
from jax.sharding import Mesh

from optax_smile import _check
from optax_smile.draws import _checks
from optax_smile.draws.likelihoods import Likelihood, Name
from optax_smile.draws.prediction import Prediction
from optax_smile.draws.predictor import READ, Per, Predictor


@_check.arguments(snapshots=_checks.SNAPSHOTS, **READ, curve=_checks.Curve())
def predict(
    apply_fn: Callable[[optax.Params, Any], Any],
    snapshots: Iterable[optax.Params],
    inputs: Any,
    *,
    likelihood: Name | Likelihood,
    targets: Any = None,
    batch_size: int | None = None,
    curve: Sequence[int] = (),
    per: Per | None = None,
    mesh: Mesh | None = None,
    specs: Any = None,
) -> Prediction:
    """Average the predictions of all snapshots (Bayesian model average).

    With densities p_s(y | x) of S snapshots the average is p = sum_s p_s / S, with log density
    log p. Its uncertainty is H[p] = sum_s H[p_s] / S + mutual information for class probabilities,
    and Var = sum_s Var_s / S + variance of the means otherwise.

    Args:
        apply_fn: `apply_fn(params, inputs)` returns the outputs of one model for the inputs.
        snapshots: parameter trees: the result of `sample`, `Snapshots.from_members(members)` for a
            deep ensemble, or any other iterable. It is read once, so it may be a generator.
        inputs: argument of `apply_fn`, arrays `[input, ...]`; they stay on the device.
        likelihood: how to interpret the outputs and the targets:

            - `"categorical"`: logits `[input, class]`, labels `[input]`.
            - `"bernoulli"`: logits `[input, ...]`, targets 0 or 1 of the same shape.
            - `"gaussian"`: a pair of mean `[input, ...]` and log standard deviation, predicted or
              sampled as a parameter: a scalar, or with as many axes as the mean, each of the same
              length or of length 1; targets of the shape of the mean.
            - `"tokens"`: logits `[input, token, class]`, labels `[input, token]`, -1 for padding.
            - your own `Likelihood`.
        targets: observed values, `[input, ...]`.
        batch_size: inputs to run at once, >= 1; None: all.
        curve: numbers of snapshots, >= 1, ascending; also return the average after each number.
            Snapshots come draw by draw: with 4 chains, 8 snapshots are two draws of each chain.
        per: `"draw"`: also return the prediction of each draw, `"chain"`: the average of each
            chain; in host memory, as the `Outcome` `each`.
        mesh: devices: the axis `"chain"` runs snapshots in parallel, the axis `"data"` shards the
            inputs; None: JAX's default device.
        specs: a tree of `jax.P` like one snapshot: how each array is sharded over the other axes of
            the mesh; None: not sharded.

    Returns:
        A `Prediction`.

    Raises:
        ValueError: an argument out of range; no snapshots, or snapshots of different models;
            predictions that are not finite (the message names chain and draw); a likelihood that
            does not match the outputs; targets that do not match the likelihood.

    Cost: one forward pass per snapshot, whose parameters pass through the host. Memory for the
    outputs of one snapshot per device and three times their average (with `per="chain"` per
    chain).

    Example:
        >>> import jax.numpy as jnp, optax_smile
        >>> apply_fn = lambda params, x: x @ params
        >>> prediction = optax_smile.predict(
        ...     apply_fn, [jnp.eye(2), -jnp.eye(2)], jnp.eye(2), likelihood="categorical"
        ... )
        >>> prediction.mean.tolist()
        [[0.5, 0.5], [0.5, 0.5]]

    Source: entropy and mutual information: Depeweg et al. 2018.
    """
    of_predictor = _check.called("predict", "Predictor", "Predictor.update", params="snapshots")
    predictor = of_predictor(Predictor)(
        apply_fn,
        inputs,
        likelihood=likelihood,
        targets=targets,
        batch_size=batch_size,
        num_chains=getattr(snapshots, "num_chains", None),
        per=per,
        mesh=mesh,
        specs=specs,
    )
    so_far = []
    for params in snapshots:
        of_predictor(predictor.update)(params)
        if predictor.count in curve:
            so_far.append(of_predictor(predictor._join)()[0])
    if len(so_far) < len(curve) and predictor.count:
        rule = f"at most the {predictor.count} snapshots"
        _check.fail("predict", "curve", rule, curve)
    return of_predictor(predictor.finalize)()._replace(curve=tuple(so_far))
