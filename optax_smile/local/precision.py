"""Choose the precision of a prior around trained weights by the excess loss of the draws."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _check, _check_trees, _noise, _tree
from optax_smile._bar import Bar
from optax_smile._table import aligned
from optax_smile._types import Batch, Tree, by_identity
from optax_smile.chains import _checks, _optimizer
from optax_smile.chains.run import Run
from optax_smile.potential import START
from optax_smile.samplers.smile import psmile
from optax_smile.stages.step_size import angle_tuner

Loss: TypeAlias = Callable[[Tree, Batch], jax.Array]
Maker: TypeAlias = Callable[..., optax.GradientTransformation]

# A strong prior makes the posterior nearly isotropic, so that steps of 0.1 of its radius are
# accurate; 64 steps give several independent draws. Gradients without noise need explicit noise
# (`benchmarks/notes/around-trained-weights.md`).
LONG_STEPS = functools.partial(psmile, decoherence_length="turning", tuner=angle_tuner(angle=0.1))
# Arguments of `make_sampler`.
POSTERIOR = "(num_data=, prior_precision=, prior_mean=, temperature=, key=)"
# Stop the search if the excess is within this factor of the allowed excess.
NEAR = 1.25
# Largest number of widths to try for the isotropic noise that starts the search.
MOST_WIDTHS = 12
# First and largest width of this noise, relative to the size of the weights.
FIRST_WIDTH, LARGEST_WIDTH = 0.01, 1.0
# Largest factor by which the precision changes: short chains do not support a larger extrapolation.
LARGEST_JUMP = 10.0
# If the likelihood narrows the draws, the excess falls more slowly than 1 / precision.
FLATTEST = 0.3


@by_identity
class PrecisionSearch(NamedTuple):
    """Result of `local_precision`; print it for a table.

    Attributes:
        precisions: precisions in the order in which they were tried, `[candidate]`.
        excess: excess loss of the draws, see `local_precision`, nats per example, `[candidate]`.
        standard_error: standard error of the excess over the chains, `[candidate]`.
        loss: mean loss of single draws, `[candidate]`.
        distance: mean Euclidean distance of the draws from the weights, `[candidate]`.
        start_loss: loss of the weights.
        allowed, num_data, temperature, make_sampler: arguments of the search.
    """

    precisions: np.ndarray
    excess: np.ndarray
    standard_error: np.ndarray
    loss: np.ndarray
    distance: np.ndarray
    start_loss: float
    allowed: float
    num_data: float
    temperature: float
    make_sampler: Maker

    @property
    def best(self) -> int:
        """Index of the candidate whose excess is closest to the allowed one, as a ratio."""
        return int(np.argmin(np.abs(np.log(np.maximum(self.excess, 1e-12) / self.allowed))))

    @property
    def prior_precision(self) -> float:
        """The precision to sample with."""
        return float(self.precisions[self.best])

    @_check.arguments("PrecisionSearch.sampler", key=_check.Key(needed=True))
    def sampler(self, *, key: jax.Array | int) -> optax.GradientTransformation:
        """Make the sampler of the best candidate, with the prior centred at each chain's start."""
        posterior = {"num_data": self.num_data, "temperature": self.temperature}
        posterior |= {"prior_precision": self.prior_precision}
        return self.make_sampler(prior_mean=START, key=key, **posterior)

    def __str__(self) -> str:
        table = {
            "precision": [f"{x:.3g}" for x in self.precisions],
            "excess loss": [f"{x:.3g}" for x in self.excess],
            "error": [f"{x:.1g}" for x in self.standard_error],
            "loss of draws": [f"{x:.4g}" for x in self.loss],
            "distance": [f"{x:.3g}" for x in self.distance],
        }
        excess = self.excess[self.best]
        notes = [
            f"Prior precision {self.prior_precision:.3g} around the weights: excess loss"
            f" {excess:.3g}, allowed {self.allowed:g}; loss of the weights {self.start_loss:.4g}."
        ]
        if not 1 / NEAR <= excess / self.allowed <= NEAR:
            notes.append(
                "No precision came close to the allowed excess. Try more runs or longer ones."
            )
        return "\n".join([*aligned(table), "", *notes])


@_check.arguments(
    loss_fn=_check.Function("(params, batch)"),
    params=_check.Tree("a tree of finite arrays", traced=False, finite=True),
    batches=_check.REPEATABLE,
    num_data=_check.Real(1, traced=False),
    make_sampler=_check.Function(
        POSTERIOR, "Bind other arguments with functools.partial, such as the step size of `sgld`."
    ),
    num_chains=_check.Whole(1),
    num_warmup=_check.Whole(0),
    num_draws=_check.Whole(1),
    thin=_check.Whole(1),
    allowed=_check.Real(0, open="low", traced=False),
    temperature=_check.Real(0, open="low", traced=False),
    max_runs=_check.Whole(1),
    key=_check.Key(needed=True),
)
def local_precision(
    loss_fn: Loss,
    params: optax.Params,
    batches: Iterable[Batch],
    *,
    num_data: float,
    allowed: float = 0.01,
    temperature: float = 1.0,
    make_sampler: Maker = LONG_STEPS,
    num_chains: int = 2,
    num_warmup: int = 100,
    num_draws: int = 20,
    thin: int = 5,
    max_runs: int = 5,
    key: jax.Array | int,
    check: bool = True,
    progress: bool = True,
) -> PrecisionSearch:
    """Choose the precision of a prior around trained weights by the excess loss that it allows.

    If a network has more parameters than data, its posterior is far wider than the neighbourhood of
    its trained weights w. With a prior N(w, 1 / g) the draws stay near w, at the cost of

        excess = E[L(w + x) + L(w - x)] / 2 - L(w),  x = draw - w

    nats per example. Averaging over +x and -x removes the first-order gain if w is not a minimum.
    Short chains search for the g whose excess equals `allowed`, from that of isotropic noise
    N(0, 1 / g) with this excess. Print the result, and sample with `search.sampler(key=0)`.

    Args:
        loss_fn: mean loss `loss_fn(params, batch)`, as for `sample`, without random numbers.
        params: trained weights of one network.
        batches: batches of the data, repeated as often as needed; not an iterator. The loss of a
            draw is the mean over all batches.
        num_data: >= 1, the number of terms averaged in the mean loss, see `psmile`.
        allowed: excess loss of a single draw, nats per example, > 0.
        temperature: temperature of the posterior, > 0.
        make_sampler: called with `num_data=`, `prior_precision=`, `prior_mean=`, `temperature=` and
            `key=`; the default is `psmile` with `decoherence_length="turning"` and
            `angle_tuner(0.1)`.
        num_chains: chains per precision, >= 1.
        num_warmup: steps of each chain before the first draw, >= 0.
        num_draws: draws of each chain, >= 1.
        thin: steps between draws, >= 1.
        max_runs: largest number of precisions to try, >= 1.
        key: JAX key or seed.
        check: warn of a loss that looks like a sum, see `sample`.
        progress: show a progress bar, if tqdm is installed.

    Raises:
        ValueError: a loss that is not finite, or that does not grow around the weights.
        KeyboardInterrupt: stopped before the last run is done.

    Cost: per precision, of which there are two or three, `num_warmup + num_draws * thin` gradients
    per chain, two passes over the batches per draw, and one compilation.

    Example:
        >>> import jax, jax.numpy as jnp, optax_smile
        >>> loss_fn = lambda params, batch: jnp.mean(jnp.sum((params - batch) ** 2, axis=1)) / 2
        >>> given = loss_fn, jnp.zeros((1, 500)), [jnp.zeros((10, 500))]
        >>> asked = {"num_data": 10, "allowed": 0.1, "key": 0, "progress": False}
        >>> search = optax_smile.local.local_precision(*given, **asked)
        >>> 2e3 < search.prior_precision < 3e3
        True
    """
    where, typed = "local_precision", cast(jax.Array, key)
    _check_trees.check_params(where, params, smallest=2)
    # The keys of their samplers differ.
    chains = jax.tree.map(lambda x: np.repeat(np.asarray(x)[None], num_chains, axis=0), params)
    mapped = jax.jit(jax.vmap(loss_fn, in_axes=(0, None)))

    def losses(draws: optax.Params, parts: Iterable[Batch] = batches) -> Tree:
        """Average the losses `[chain]` of draws over batches, weighted by their examples."""
        sums, sizes = [], []
        for batch in parts:
            sizes.append(_checks.num_rows(batch, False) or 1)
            sums.append(sizes[-1] * np.asarray(mapped(draws, batch), float))
        return sum(sums) / sum(sizes)

    first = _check_loss(where, loss_fn, params, batches)
    if check:
        counted = _checks.Counted(None, per_chain=False)
        _checks.warn_of_sum(where, lambda part: losses(chains, [part]), first, counted, None)
    start_loss = float(losses(chains)[0])
    if not np.isfinite(start_loss):
        rule = "weights at which the loss is finite"
        _check.fail(where, "params", rule, start_loss, "Are the batches finite?")

    def observe(draws: optax.Params) -> np.ndarray:
        """Return loss, excess and distance of the draws `[chain, ...]`, `[3, chain]`."""
        loss, mirrored = losses(draws), jax.tree.map(lambda w, x: 2 * w - x, chains, draws)
        excess = (loss + losses(mirrored)) / 2 - start_loss
        return np.stack([loss, excess, _distance(chains, draws)])

    def run(precision: float) -> tuple[float, ...]:
        posterior = {"num_data": num_data, "temperature": temperature, "prior_precision": precision}
        sampler = make_sampler(prior_mean=START, key=typed, **posterior)
        is_optax = isinstance(sampler, optax.GradientTransformation)
        if not is_optax or _optimizer.is_optimizer(sampler, chains):
            rule = f"a function of {POSTERIOR} that returns a sampler"
            got = "an optimizer" if is_optax else _check.show(sampler)
            _check.fail(where, "make_sampler", rule, f"one that returns {got}")
        with _check.called(where, "Run", "Run.advance", "Run.draws", sampler="make_sampler"):
            chain = Run(loss_fn, chains, batches, sampler, key=typed, check=False)
            chain.advance(num_warmup)
            seen = np.stack([observe(x) for x in chain.draws(num_draws, thin=thin)], axis=2)
        loss, excess, distance = seen
        # Chains with non-finite losses have infinite excess.
        excess = np.nan_to_num(excess.mean(axis=1), nan=np.inf)
        with np.errstate(invalid="ignore"):
            error = excess.std(ddof=1) / np.sqrt(num_chains) if num_chains > 1 else np.nan
        return precision, excess.mean(), error, loss.mean(), distance.mean()

    tried = [run(1 / _width(where, lambda x: observe(x)[1], chains, typed, allowed) ** 2)]
    with Bar(max_runs, "precisions", progress) as bar:
        while len(tried) < max_runs and not 1 / NEAR <= tried[-1][1] / allowed <= NEAR:
            bar.show(len(tried), last=f"{tried[-1][0]:.3g}", excess=f"{tried[-1][1]:.3g}")
            tried.append(run(_next(tried, allowed)))
    return PrecisionSearch(
        *map(np.array, zip(*tried, strict=True)),
        start_loss=start_loss,
        allowed=float(allowed),
        num_data=float(num_data),
        temperature=float(temperature),
        make_sampler=make_sampler,
    )


def _check_loss(where: str, loss_fn: Loss, params: Tree, batches: Iterable[Batch]) -> Batch:
    """Require a scalar loss of trained weights, and return the first batch."""
    first = next(iter(batches), None)
    if first is None:
        _check.fail(where, "batches", "at least one batch", "none")
    rule = "a function that returns the mean loss, a scalar"
    remedy = "Pass the parameters of one network."
    loss = _check.traced(where, "loss_fn", loss_fn, params, first, rule=rule, advice=remedy)
    if getattr(loss, "shape", None) != ():
        _check.fail(where, "loss_fn", rule, f"one that returns {_check.show(loss)}", remedy)
    return first


def _distance(one: Tree, other: Tree) -> np.ndarray:
    """Return the Euclidean distances `[chain]` between trees `[chain, ...]`."""
    squares = jax.tree.map(lambda x, y: jnp.sum((x - y) ** 2, axis=range(1, x.ndim)), one, other)
    return np.sqrt(np.asarray(sum(jax.tree.leaves(squares)), float))


def _width(
    where: str,
    excess_of: Callable[[Tree], np.ndarray],
    chains: optax.Params,
    key: jax.Array,
    allowed: float,
) -> float:
    """Find the standard deviation of isotropic noise that has the allowed excess."""
    noise, leaves = _noise.normal_like(key, chains), jax.tree.leaves(chains)
    square = sum(np.sum(np.asarray(x, float) ** 2) for x in leaves)
    size = float(np.sqrt(square / sum(x.size for x in leaves))) or 1.0
    width = FIRST_WIDTH * size
    for _ in range(MOST_WIDTHS):
        moved = jax.tree.map(lambda x, z, s=width: (x + s * z).astype(x.dtype), chains, noise)
        excess = float(np.median(np.nan_to_num(excess_of(moved), nan=np.inf)))
        if 1 / NEAR <= excess / allowed <= NEAR:
            break
        if width > LARGEST_WIDTH * size and excess <= 0:
            rule = "a loss that grows around the weights"
            got = f"an excess of {excess:.2g} with noise as large as the weights"
            _check.fail(where, "loss_fn", rule, got)
        factor = np.sqrt(allowed / excess) if excess > 0 else LARGEST_JUMP
        width *= float(np.clip(factor, 1 / LARGEST_JUMP, LARGEST_JUMP))
    return width


def _next(tried: list[tuple[float, ...]], allowed: float) -> float:
    """Extrapolate to the allowed excess by a line through the last two runs, in logarithms."""
    ends = allowed / LARGEST_JUMP, allowed * LARGEST_JUMP
    logs = np.log([(x[0], np.clip(x[1], *ends)) for x in tried[-2:]])
    slope = -1.0
    if len(logs) == 2 and logs[0, 0] != logs[1, 0]:
        slope = min(-FLATTEST, (logs[1, 1] - logs[0, 1]) / (logs[1, 0] - logs[0, 0]))
    most = np.log(LARGEST_JUMP)
    jump = np.clip((np.log(allowed) - logs[-1, 1]) / slope, -most, most)
    return float(np.exp(logs[-1, 0] + jump))


@_check.arguments(
    scale=_check.Real(0, open="low", traced=False),
    out_axis=_check.Where("0 or -1", lambda axis: type(axis) is int and axis in (0, -1)),
)
def fan_in_precision(
    params: optax.Params, *, scale: float = 1.0, out_axis: Literal[0, -1] = -1
) -> Tree:
    """Compute the prior precisions that match fan-in initialisation of the weights.

    Args:
        params: parameters of one network, or their shapes.
        scale: variance of a weight times its fan-in, > 0: 1 for LeCun's rule, 2 for He's.
        out_axis: output axis of arrays with two or more axes, 0 or -1: -1 in Flax, 0 in Equinox;
            the fan-in is the product of the other axes.

    Returns:
        A tree of numbers like the parameters, for `prior_precision`: fan-in / scale, and
        1 / scale for biases and other arrays with fewer than two axes.
    """

    for x in jax.tree.leaves(params) or [None]:
        if not _tree.is_floating(x) or 0 in x.shape:
            rule = "a tree of arrays of floating-point numbers, not empty"
            _check.fail("fan_in_precision", "params", rule, _check.show(x))

    def precision(x: jax.Array) -> float:
        shape = np.shape(x)
        return float(np.prod(shape) / shape[out_axis] / scale) if len(shape) > 1 else 1.0 / scale

    return jax.tree.map(precision, params)
