"""Shared by the runs around trained weights: their sampler, and the loss of their draws."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
import optax

from optax_smile import _check, _tree
from optax_smile._types import Batch, Tree
from optax_smile.chains import _checks, _optimizer
from optax_smile.chains.sample import sample
from optax_smile.draws.snapshots import Snapshots, StoredSnapshots
from optax_smile.potential import START
from optax_smile.samplers.smile import psmile
from optax_smile.stages.step_size import angle_tuner

Loss: TypeAlias = Callable[[Tree, Batch], jax.Array]
Maker: TypeAlias = Callable[..., optax.GradientTransformation]

# Arguments of `make_sampler`.
POSTERIOR = "(num_data=, prior_precision=, prior_mean=, temperature=, key=)"
# The default sampler: explicit noise, which noiseless gradients need, and steps short enough for
# variances that are accurate to half a percent.
SAMPLER = functools.partial(psmile, decoherence_length="turning", tuner=angle_tuner(0.02))


class Weights(_check.Constraint):
    """Trained weights of one network."""

    text = "a tree of finite float32 or float64 arrays with at least 2 parameters"

    def __call__(self, where, argument, value, given=_check.NOTHING):
        _tree.check_params(where, value, smallest=2)
        return _check.Tree(self.text, traced=False, finite=True)(where, argument, value)


def constraints(least: int) -> dict[str, _check.Constraint]:
    """Return the constraints of shared arguments; `num_data` is at least `least`."""
    advice = "Bind other arguments with functools.partial, such as the step size of `sgld`."
    return {
        "loss_fn": _check.Function("(params, batch)"),
        "params": Weights(),
        "batches": _check.REPEATABLE,
        "num_data": _check.Real(least, traced=False),
        "make_sampler": _check.Function(POSTERIOR, advice),
        "num_chains": _check.Whole(1),
        "num_warmup": _check.Whole(0),
        "num_draws": _check.Whole(1),
        "thin": _check.Whole(1),
    }


def build(
    where: str, make_sampler: Maker, key: jax.Array, **posterior: float
) -> optax.GradientTransformation:
    """Make the sampler of a posterior around the start of its chains."""
    made = make_sampler(prior_mean=START, key=key, **posterior)
    if not isinstance(made, optax.GradientTransformation):
        rule, got = f"a function of {POSTERIOR} that returns a sampler", _check.show(made)
        _check.fail(where, "make_sampler", rule, f"one that returns {got}")
    return made


def watch(
    where: str,
    model: tuple[Loss, optax.Params, Iterable[Batch]],
    make_sampler: Maker,
    posterior: Mapping[str, float],
    observe: Callable[[Tree], Tree],
    key: jax.Array,
    **run: Any,
) -> Snapshots | StoredSnapshots:
    """Sample the posterior around the start of the chains, and keep what `observe` returns.

    `model` has the loss, the chains and the batches; `run` has other arguments of `sample`.
    """
    sampler = build(where, make_sampler, key, **posterior)
    if _optimizer.is_optimizer(sampler, model[1]):
        rule = f"a function of {POSTERIOR} that returns a sampler"
        _check.fail(where, "make_sampler", rule, "one that returns an optimizer")
    with _check.called(where, "sample", sampler="make_sampler"):
        return sample(*model, sampler, observe=observe, key=key, check=False, **run)


def over_batches(
    of_batch: Callable[[Tree, Batch], Tree], batches: Iterable[Batch]
) -> Callable[[Tree], Tree]:
    """Make a function of draws `[chain, ...]` that averages `of_batch` over all batches.

    Batches are weighted by their number of examples, where it can be inferred.

    Args:
        of_batch: `of_batch(draw, batch)` of a single draw, a tree of scalars.
        batches: iterated over in each call.

    Returns:
        A function that returns a tree of float64 arrays `[chain]`.
    """
    mapped = jax.jit(jax.vmap(of_batch, in_axes=(0, None)))

    def average(draws: optax.Params) -> Tree:
        sums, sizes = [], []
        for batch in batches:
            sizes.append(_checks.num_rows(batch, False) or 1)
            of_draws = mapped(draws, batch)
            sums.append(jax.tree.map(lambda x: sizes[-1] * np.asarray(x, float), of_draws))
        return jax.tree.map(lambda *x: sum(x) / sum(sizes), *sums)

    return average


def check_loss(
    where: str, loss_fn: Loss, params: optax.Params, batches: Iterable[Batch], warns: bool
) -> float:
    """Require a finite scalar loss of trained weights, and return the loss over all batches.

    If `warns`, warn of a loss that looks like a sum.
    """
    first = next(iter(batches), None)
    if first is None:
        _check.fail(where, "batches", "at least one batch", "none")
    rule = "a function that returns the mean loss, a scalar"
    shapes = [_check.cut(jax.tree.map(np.shape, x)) for x in (params, first)]
    remedy = (
        f"It was called with the params {shapes[0]} and the batch {shapes[1]} (shapes). Of several"
        " networks with a chain axis, pass one."
    )
    loss = _check.traced(where, "loss_fn", loss_fn, params, first, rule=rule, advice=remedy)
    if getattr(loss, "shape", None) != ():
        _check.fail(where, "loss_fn", rule, f"one that returns {_check.show(loss)}")
    alone = copies(params, 1)
    if warns:
        _checks.warn_of_sum(
            where, lambda part: over_batches(loss_fn, [part])(alone), first, False, None
        )
    loss = float(over_batches(loss_fn, batches)(alone)[0])
    if not np.isfinite(loss):
        rule = "weights at which the loss is finite"
        _check.fail(where, "params", rule, loss, "Are the batches finite?")
    return loss


def copies(params: optax.Params, number: int) -> Tree:
    """Start `number` chains from the same weights; the keys of their samplers differ."""
    return jax.tree.map(lambda x: np.repeat(np.asarray(x)[None], number, axis=0), params)


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    """Return the mean over chains `[chain]` and its standard error, NaN for a single chain."""
    number = len(values)
    error = values.std(ddof=1) / np.sqrt(number) if number > 1 else np.nan
    return float(values.mean()), float(error)
