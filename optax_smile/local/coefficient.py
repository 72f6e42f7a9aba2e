"""The local learning coefficient, a measure of how degenerate the loss is at trained weights."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _check, _tree
from optax_smile._table import aligned
from optax_smile._types import Batch, Options, Tree, by_identity
from optax_smile.draws._checks import Posterior
from optax_smile.draws.snapshots import Snapshots, StoredSnapshots
from optax_smile.local import _around
from optax_smile.potential import START, Potential, energy_change, watanabe_beta

# A trend is reported if it exceeds this many standard errors and this share of the coefficient.
CLEAR_ERRORS = 3.0
MOST_TREND = 0.05
# Number of parts of a chain with nearly independent means. The control variate has to explain this
# share of the variance of the means; if it explains less, it does not hold between parts.
NUM_BLOCKS = 10
LEAST_EXPLAINED = 0.95


class Finding(NamedTuple):
    """A problem with an estimated coefficient.

    Attributes:
        kind: such as "out of balance".
        text: a sentence with the numbers and advice.
    """

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@by_identity
class LearningCoefficient(NamedTuple):
    """Result of `llc`; print it for a table.

    Attributes:
        loss: L(v) of the draws v, over all batches, `[chain, draw]`.
        slope: (v - w) . grad L(v) of the draws, `[chain, draw]`.
        square: |v - w|^2 of the draws, `[chain, draw]`.
        start_loss: loss L(w) of the weights w.
        num_parameters: number of parameters, d.
        num_data: number of examples, n.
        beta: inverse temperature.
        localization: gamma.
    """

    loss: np.ndarray
    slope: np.ndarray
    square: np.ndarray
    start_loss: float
    num_parameters: int
    num_data: float
    beta: float
    localization: float

    @property
    def trace(self) -> np.ndarray:
        """n beta (L(v) - L(w)) of each draw, `[chain, draw]`; its mean is the coefficient."""
        return self._nats(self.loss - self.start_loss)

    @property
    def balance(self) -> np.ndarray:
        """(v - w) . grad U(v) / d of each draw, `[chain, draw]`; its mean at equilibrium is 1."""
        push = self._nats(self.slope) + self.localization * self.square
        return push / self.num_parameters

    @property
    def is_balanced(self) -> bool:
        """Whether the mean of `balance` is 1 within three standard errors."""
        blocks = _blocks(self.balance)
        return bool(abs(blocks.mean() - 1) <= CLEAR_ERRORS * blocks.std() / np.sqrt(blocks.size))

    @property
    def per_chain(self) -> np.ndarray:
        """The coefficient estimated by each chain, `[chain]`.

        It is the mean of `trace`. If `balance`, whose mean is known, explains nearly all of the
        variance, it serves as a control variate.
        """
        trace, balance = (_blocks(x) - x.mean() for x in (self.trace, self.balance))
        square = np.sum(balance**2)
        factor = np.sum(trace * balance) / square if square > 0 else 0.0
        left = np.sum((trace - factor * balance) ** 2)
        is_explained = left <= (1 - LEAST_EXPLAINED) * np.sum(trace**2)
        if not (self.is_balanced and is_explained):
            factor = 0.0
        return (self.trace - factor * (self.balance - 1)).mean(axis=1)

    @property
    def llc(self) -> float:
        """The local learning coefficient."""
        return _around.mean_and_error(self.per_chain)[0]

    @property
    def standard_error(self) -> float:
        """Standard error of the coefficient over the chains; NaN for a single chain."""
        return _around.mean_and_error(self.per_chain)[1]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Problems with the coefficient; empty if there are none."""
        return tuple(self._findings())

    def _nats(self, loss: np.ndarray) -> np.ndarray:
        potential = Potential(self.num_data, temperature=1 / self.beta)
        return energy_change(potential, cast(jax.Array, loss), 0.0)

    def _findings(self) -> Iterator[Finding]:
        if not np.all(np.isfinite(self.loss)):
            text = "the loss of some draws is infinite or NaN. Try shorter steps."
            yield Finding("not finite", text)
            return
        change, error = _trend(_blocks(self.trace))
        if abs(change) > max(CLEAR_ERRORS * error, MOST_TREND * abs(self.llc)):
            yield Finding(
                "still falling" if change < 0 else "still rising",
                f"{change:+.3g} from the first draws to the last. Try a larger num_warmup or more"
                " draws; or a larger `localization`, if the loss keeps falling along flat"
                " directions.",
            )
        if self.llc < 0:
            yield Finding(
                "negative",
                "the draws have a smaller loss than the weights, which are not at a minimum of this"
                " loss. Try training longer, or a larger `localization`.",
            )
        balance = self.balance.mean()
        if not self.is_balanced and abs(balance - 1) > MOST_TREND:
            yield Finding(
                "out of balance",
                f"the mean of (v - w) . grad U / d is {balance:.3g}, but 1 at equilibrium. Either"
                " the chains have not reached equilibrium, or gradient noise or the step size bias"
                " them. Try a larger num_warmup, larger batches or shorter steps.",
            )
        if self.standard_error > MOST_TREND * abs(self.llc):
            text = "the standard error is above 5 %. Try more draws or more chains."
            yield Finding("uncertain", text)

    def __str__(self) -> str:
        table = {
            "chain": [str(chain) for chain in range(len(self.loss))] + ["all"],
            "llc": [f"{x:.4g}" for x in (*self.per_chain, self.llc)],
            "error": ["-"] * len(self.loss) + [f"{self.standard_error:.2g}"],
            "loss": [f"{x:.5g}" for x in (*self.loss.mean(axis=1), self.loss.mean())],
        }
        about = (
            f"loss of the weights {self.start_loss:.5g}, n = {self.num_data:g}, beta ="
            f" {self.beta:.4g}, localization = {self.localization:g}, draws of each chain:"
            f" {self.loss.shape[1]}"
        )
        notes = map(str, self.findings or ("Nothing looks wrong.",))
        return "\n".join([*aligned(table), "", about, *notes])


def _blocks(values: np.ndarray) -> np.ndarray:
    """Compute means over the parts of each chain, `[chain, part]`."""
    parts = np.array_split(values, min(NUM_BLOCKS, values.shape[1]), axis=1)
    return np.stack([part.mean(axis=1) for part in parts], axis=1)


def _trend(blocks: np.ndarray) -> tuple[float, float]:
    """Fit a line through the parts of the chains; return its total change and standard error."""
    chains, parts = blocks.shape
    if parts < 3:
        return 0.0, np.inf
    time = np.linspace(-0.5, 0.5, parts)
    centred = blocks - blocks.mean(axis=1, keepdims=True)
    slope = np.sum(centred * time) / (chains * np.sum(time**2))
    rest = np.sum((centred - slope * time) ** 2) / (chains * (parts - 1) - 1)
    return float(slope), float(np.sqrt(rest / (chains * np.sum(time**2))))


@_check.arguments(
    **_around.constraints(2),
    beta=_check.Real(0, open="low", traced=False) | None,
    localization=_check.Real(0, traced=False),
    draws=Posterior(_check.kind((Snapshots, StoredSnapshots), "the result of `sample`")) | None,
    key=_check.Key(),
    steps_per_dispatch=_check.Whole(1),
    directory=_check.PathLike() | None,
)
def llc(
    loss_fn: _around.Loss,
    params: optax.Params,
    batches: Iterable[Batch],
    *,
    num_data: float,
    beta: float | None = None,
    localization: float = 100.0,
    draws: Snapshots | StoredSnapshots | None = None,
    make_sampler: _around.Maker = _around.SAMPLER,
    num_chains: int = 4,
    num_warmup: int = 2000,
    num_draws: int = 200,
    thin: int = 20,
    key: jax.Array | int | None = None,
    steps_per_dispatch: int = 1,
    directory: str | os.PathLike[str] | None = None,
    check: bool = True,
    progress: bool = True,
) -> LearningCoefficient:
    """Estimate the local learning coefficient of trained weights.

    With draws v from exp(-n beta L(v) - gamma / 2 |v - w|^2) around the weights w, it is

        llc = n beta (E[L(v)] - L(w))

    For a regular model with d parameters it is d / 2, and less if the loss is degenerate (Watanabe
    2013; Lau et al. 2023). At equilibrium the mean of (v - w) . grad U is d, for any loss. The
    attribute `balance` checks this, and reduces the variance of the estimate (to zero if the loss
    is homogeneous around w, such as quadratic).

    Args:
        loss_fn: mean loss `loss_fn(params, batch)`, as for `sample`, without random numbers.
        params: w, trained weights of one network.
        batches: batches of the data, repeated as often as needed; not an iterator. The loss of a
            draw is the mean over all batches.
        num_data: n >= 2, the number of terms averaged in the mean loss, see `psmile`.
        beta: inverse temperature, > 0; None: 1 / log n.
        localization: gamma >= 0, not tempered; use 0 if the loss alone confines the chain.
        draws: draws of a run with this posterior, in memory or on disk; None: sample new draws and
            keep only their losses.
        make_sampler: called with `num_data=`, `prior_precision=`, `prior_mean=`, `temperature=` and
            `key=`, such as `functools.partial(optax_smile.sgld, 1e-5)`; the default is `psmile`
            with `decoherence_length="turning"` and `angle_tuner(0.02)`, steps shorter than usual.
        num_chains: number of chains, >= 1; error bars need at least two.
        num_warmup: steps of each chain before the first draw, >= 0.
        num_draws: draws of each chain, >= 1.
        thin: steps between draws, >= 1.
        key: JAX key or seed, required without `draws`.
        steps_per_dispatch: steps to run in one call of the device, >= 1, see `sample`.
        directory: where the losses of the draws are stored, and from where a killed run resumes.
        check: warn of a loss that looks like a sum, see `sample`.
        progress: show a progress bar, if tqdm is installed.

    Returns:
        A `LearningCoefficient`: print it.

    Raises:
        ValueError: an argument out of range, a loss that is not finite, `draws` of another
            posterior or of an optimizer; as for `sample`.

    Cost: `num_warmup + num_draws * thin` gradients per chain and, per draw, a pass over the
    batches, at about the cost of two forward passes.

    Example:
        >>> import jax.numpy as jnp, optax_smile
        >>> coefficient = optax_smile.local.llc(
        ...     lambda w, batch: jnp.sum(w**2), jnp.zeros(20), [jnp.zeros(1)], num_data=1000,
        ...     localization=0.0, num_warmup=200, num_draws=50, key=0, progress=False,
        ... )
        >>> 9 < coefficient.llc < 11
        True

    Source: Watanabe 2013; Lau et al., The local learning coefficient, AISTATS 2025.
    """
    where = "llc"
    beta = watanabe_beta(num_data) if beta is None else beta
    posterior = {
        "num_data": num_data,
        "prior_precision": localization / beta,
        "temperature": 1 / beta,
    }
    start_loss = _around.check_loss(where, loss_fn, params, batches, check)

    def of_batch(draw: optax.Params, batch: Batch) -> Tree:
        moved = jax.tree.map(lambda x, w: (x - w).astype(x.dtype), draw, params)
        loss, slope = jax.jvp(lambda v: loss_fn(v, batch), (draw,), (moved,))
        square = sum(jnp.sum(x**2) for x in jax.tree.leaves(moved))
        return {"loss": loss, "slope": slope, "square": square}

    observe = _around.over_batches(of_batch, batches)
    settings: Options = {
        "start_loss": start_loss,
        "num_parameters": _tree.size(params),
        "num_data": float(num_data),
        "beta": float(beta),
        "localization": float(localization),
    }
    if draws is not None:
        _check_posterior(where, draws, posterior, params)
        seen = [observe(jax.tree.map(lambda x: np.asarray(x)[None], draw)) for draw in draws]
        by_chain = jax.tree.map(lambda *x: np.reshape(x, (-1, draws.num_chains)).T, *seen)
        return LearningCoefficient(**by_chain, **settings)
    kept = _around.watch(
        where,
        (loss_fn, _around.copies(params, num_chains), batches),
        make_sampler,
        posterior,
        observe,
        _check.Key(True, "for new draws")(where, "key", key),
        num_warmup=num_warmup,
        num_draws=num_draws,
        thin=thin,
        steps_per_dispatch=steps_per_dispatch,
        directory=directory,
        progress=progress,
    )
    return LearningCoefficient(**kept.params, **settings)


def _check_posterior(
    where: str,
    draws: Snapshots | StoredSnapshots,
    posterior: Mapping[str, float],
    params: optax.Params,
):
    """Require draws of this posterior, as far as the settings of their run are known."""
    settings = draws.settings or {}
    for name, wanted in posterior.items():
        got = settings.get(name, wanted)
        if isinstance(got, int | float) and not np.isclose(got, wanted, rtol=1e-4):
            rule = f"draws of a run with {name}={wanted:.6g}"
            rule += " (`localization / beta`)" * (name == "prior_precision")
            remedy = "Pass the `num_data`, `beta` and `localization` of that run."
            _check.fail(where, "draws", rule, f"{name}={got:.6g}", remedy)
    mean = settings.get("prior_mean")
    if not posterior["prior_precision"] or not (mean == START or isinstance(mean, int | float)):
        return
    centre = draws.start if mean == START else jax.tree.map(lambda x: mean, params)
    near = jax.tree.map(lambda m, x: np.allclose(m, x, rtol=1e-3, atol=1e-6), centre, params)
    if not all(jax.tree.leaves(near)):
        rule = "draws of a run whose prior is centred at `params`"
        _check.fail(where, "draws", rule, f"prior_mean={mean!r} with another centre")
