"""The local learning coefficient: how degenerate the loss is at trained weights.

With draws v from exp(-n beta L(v) - gamma / 2 |v - w|^2) around the weights w, it is

    llc = n beta (E[L(v)] - L(w))

For a regular model with d parameters it is d / 2, and less if the loss is degenerate. It depends on
gamma, the `localization`: compare networks at the same one. At equilibrium the mean of
(v - w) . grad U, U = n beta L + gamma / 2 |v - w|^2, is d for any loss; `balance` is that over d.

The script estimates a coefficient that is known, d / 4 for L = sum w^4. It runs in seconds.

    python examples/learning_coefficient.py

Source: Watanabe, JMLR 2013; Lau et al., The local learning coefficient, AISTATS 2025.
"""

import math
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import optax_smile

# A finding exceeds this many standard errors, and this share of the coefficient.
CLEAR_ERRORS, MOST_OFF = 3.0, 0.05
# Parts of a chain with nearly independent means. The balance has to explain this share of the
# variance of the means to correct the coefficient; if it explains less, it does not hold in them.
NUM_BLOCKS, LEAST_EXPLAINED = 10, 0.95


class LearningCoefficient(NamedTuple):
    """Result of `estimate`; print it for the coefficient and what is wrong with it.

    Attributes:
        loss: L(v) of the draws over all batches, `[chain, draw]`.
        trace: n beta (L(v) - L(w)) of the draws; its mean is the coefficient.
        balance: (v - w) . grad U / d of the draws; its mean at equilibrium is 1.
    """

    loss: np.ndarray
    trace: np.ndarray
    balance: np.ndarray

    @property
    def is_balanced(self) -> bool:
        """Whether the mean of `balance` is 1 within three standard errors."""
        blocks = _blocks(self.balance)
        return bool(abs(blocks.mean() - 1) <= CLEAR_ERRORS * blocks.std() / np.sqrt(blocks.size))

    @property
    def per_chain(self) -> np.ndarray:
        """The mean of `trace`, with the balance as a control variate if it explains it."""
        trace, balance = (_blocks(x) - x.mean() for x in (self.trace, self.balance))
        square = np.sum(balance**2)
        factor = np.sum(trace * balance) / square if square > 0 else 0.0
        left = np.sum((trace - factor * balance) ** 2)
        is_explained = left <= (1 - LEAST_EXPLAINED) * np.sum(trace**2)
        factor = factor if self.is_balanced and is_explained else 0.0
        return (self.trace - factor * (self.balance - 1)).mean(axis=1)

    @property
    def llc(self) -> float:
        """The local learning coefficient."""
        return float(self.per_chain.mean())

    @property
    def standard_error(self) -> float:
        """Standard error of the coefficient over the chains."""
        return float(self.per_chain.std(ddof=1) / np.sqrt(len(self.trace)))

    @property
    def findings(self) -> tuple[str, ...]:
        """Reasons not to trust the coefficient; empty if there are none."""
        if not np.all(np.isfinite(self.loss)):
            return ("not finite: try shorter steps",)
        change, error = _trend(_blocks(self.trace))
        balance = self.balance.mean()
        is_off = not self.is_balanced and abs(balance - 1) > MOST_OFF
        found = {
            f"trend of {change:+.3g}: try a larger num_warmup or a larger localization": (
                abs(change) > max(CLEAR_ERRORS * error, MOST_OFF * abs(self.llc))
            ),
            "negative: the weights are not at a minimum of this loss": self.llc < 0,
            f"out of balance, {balance:.3g}: not at equilibrium, or heated by the noise of the"
            " batches or the step size; try a larger num_warmup or larger batches": is_off,
            "uncertain: try more draws": self.standard_error > MOST_OFF * abs(self.llc),
        }
        return tuple(text for text, holds in found.items() if holds)

    def __str__(self) -> str:
        text = f"learning coefficient {self.llc:.4g} +- {self.standard_error:.2g}"
        return "\n".join([text, *(self.findings or ["Nothing looks wrong."])])


def _blocks(values: np.ndarray) -> np.ndarray:
    """Compute means over the parts of each chain, `[chain, part]`."""
    parts = np.array_split(values, min(NUM_BLOCKS, values.shape[1]), axis=1)
    return np.stack([part.mean(axis=1) for part in parts], axis=1)


def _trend(blocks: np.ndarray) -> tuple[float, float]:
    """Fit a line through the parts of the chains; return its total change and standard error."""
    chains, parts = blocks.shape
    time = np.linspace(-0.5, 0.5, parts)
    centred = blocks - blocks.mean(axis=1, keepdims=True)
    slope = np.sum(centred * time) / (chains * np.sum(time**2))
    rest = np.sum((centred - slope * time) ** 2) / (chains * (parts - 1) - 1)
    return float(slope), float(np.sqrt(rest / (chains * np.sum(time**2))))


def default_sampler(**posterior: Any):
    """Make `psmile` with steps short enough for variances that are accurate to half a percent."""
    tuner = optax_smile.angle_tuner(0.02)
    return optax_smile.psmile(decoherence_length="turning", tuner=tuner, **posterior)


def estimate(
    loss_fn: Callable[[Any, Any], jax.Array],
    params: Any,
    batches: Iterable[Any],
    *,
    num_data: float,
    key: int,
    beta: float | None = None,
    localization: float = 100.0,
    make_sampler: Callable[..., Any] = default_sampler,
    num_chains: int = 4,
    num_warmup: int = 2_000,
    num_draws: int = 200,
    thin: int = 20,
    steps_per_dispatch: int = 20,
) -> LearningCoefficient:
    """Estimate the local learning coefficient of the trained weights of one network.

    Args:
        loss_fn: mean loss `loss_fn(params, batch)`, without random numbers.
        params: w.
        batches: batches of the data, a list; L is the mean over their examples.
        num_data: n, the number of terms averaged in the mean loss.
        key: a seed.
        beta: inverse temperature; None: 1 / log n.
        localization: gamma, not tempered; 0 if the loss alone confines the chain.
        make_sampler: called with `num_data=`, `prior_precision=`, `prior_mean=`, `temperature=` and
            `key=`, such as `functools.partial(optax_smile.sgld, 1e-5)`.
        num_chains, num_warmup, num_draws, thin, steps_per_dispatch: see `optax_smile.sample`.
    """
    beta = 1 / math.log(num_data) if beta is None else beta
    posterior = {"prior_precision": localization / beta, "prior_mean": "start"}
    chains = jax.tree.map(lambda x: np.repeat(np.asarray(x)[None], num_chains, axis=0), params)
    draws = optax_smile.sample(
        loss_fn,
        chains,
        batches,
        make_sampler(num_data=num_data, temperature=1 / beta, key=key, **posterior),
        num_warmup=num_warmup,
        num_draws=num_draws,
        thin=thin,
        key=key,
        steps_per_dispatch=steps_per_dispatch,
        check=False,
        progress=False,
    )

    def of_batch(draw, batch):
        """Loss, (v - w) . grad L, and |v - w|^2."""
        moved = jax.tree.map(lambda x, w: (x - w).astype(x.dtype), draw, params)
        loss, slope = jax.jvp(lambda v: loss_fn(v, batch), (draw,), (moved,))
        return jnp.stack([loss, slope, sum(jnp.sum(x**2) for x in jax.tree.leaves(moved))])

    def over_batches(draw):
        sizes = [len(jax.tree.leaves(batch)[0]) for batch in batches]
        found = [np.asarray(compiled(draw, batch), float) for batch in batches]
        return np.average(found, axis=0, weights=sizes)

    compiled = jax.jit(jax.vmap(of_batch, in_axes=(0, None)))
    start_loss = over_batches(jax.tree.map(lambda x: x[:1], chains))[0, 0]
    each = (jax.tree.map(lambda x, i=i: x[:, i], draws.params) for i in range(num_draws))
    loss, slope, square = np.stack([over_batches(draw) for draw in each], axis=-1).swapaxes(0, 1)
    size = sum(x.size for x in jax.tree.leaves(params))
    push = num_data * beta * slope + localization * square
    return LearningCoefficient(loss, num_data * beta * (loss - start_loss), push / size)


def main():
    """Estimate the coefficient of sum w^4 with 60 weights, 15."""
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    weights, batches = jnp.zeros(60), [np.zeros(1)]
    given: Any = {"num_data": 10**6, "localization": 0.0, "key": 0}
    print(estimate(lambda w, batch: jnp.sum(w**4), weights, batches, **given))


if __name__ == "__main__":
    main()
