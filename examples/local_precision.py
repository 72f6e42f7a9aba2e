"""The precision of a prior around trained weights, by the excess loss of short chains.

With a prior N(w, 1 / P) around the trained weights w of a network the draws stay near w. They cost

    excess = E[L(w + x) + L(w - x)] / 2 - L(w),  x = draw - w

nats per example. The average over +x and -x removes what a draw gains to first order where w is not
a minimum. The search begins with the P of isotropic noise N(0, 1 / P) that has the allowed excess,
runs short chains with it, and extrapolates to the P that has it, in logarithms.

`optax_smile.local.curvature_precision` computes a precision from the curvature at w, for three
forward passes a batch. It assumes that the loss is quadratic, and bounds the rise of the loss from
above. Here the rise is measured, for hundreds of gradients for each P of two or three.

The script compares the two on a small network for scikit-learn's digits, in half a minute.

    python examples/local_precision.py
"""

import functools
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import optax_smile

# A strong prior makes the posterior nearly isotropic, so that steps of 0.1 of its radius are
# accurate; 64 steps give several independent draws.
LONG_STEPS = functools.partial(
    optax_smile.psmile, decoherence_length="turning", tuner=optax_smile.angle_tuner(0.1)
)
# The search stops if the excess is within this factor of the allowed excess.
NEAR = 1.25
# Widths to try for the isotropic noise, and the first and largest, relative to the weights' size.
MOST_WIDTHS, FIRST_WIDTH, LARGEST_WIDTH = 12, 0.01, 1.0
# Largest factor by which the precision changes: short chains do not support a larger extrapolation.
LARGEST_JUMP = 10.0
# Where the likelihood narrows the draws, the excess falls more slowly than 1 / precision.
FLATTEST = 0.3


class PrecisionSearch(NamedTuple):
    """Result of `search`; print it for a table.

    Attributes:
        precisions: precisions in the order in which they were tried, `[candidate]`.
        excess: excess loss of the draws, nats per example, `[candidate]`.
        standard_error: standard error of the excess over the chains, `[candidate]`.
        loss: mean loss of single draws, `[candidate]`.
        start_loss: loss of the weights.
        allowed: argument of `search`.
    """

    precisions: np.ndarray
    excess: np.ndarray
    standard_error: np.ndarray
    loss: np.ndarray
    start_loss: float
    allowed: float

    @property
    def prior_precision(self) -> float:
        """The precision whose excess is closest to the allowed one, as a ratio."""
        ratios = np.maximum(self.excess, 1e-12) / self.allowed
        return float(self.precisions[np.argmin(np.abs(np.log(ratios)))])

    def __str__(self) -> str:
        lines = ["   precision      excess       error        loss"]
        lines += ["".join(f"{x:12.3g}" for x in row) for row in zip(*self[:4], strict=True)]
        lines.append(f"Prior precision {self.prior_precision:.3g}, allowed {self.allowed:g}.")
        if not any(is_near(x, self.allowed) for x in self.excess):
            lines.append("No precision came close to the allowed excess: try more or longer runs.")
        return "\n".join(lines)


def is_near(excess: float, allowed: float) -> bool:
    """Whether the search may stop."""
    return 1 / NEAR <= excess / allowed <= NEAR


def width_of(excess_of: Callable[[Any], np.ndarray], chains: Any, key: Any, allowed: float):
    """Find the standard deviation of isotropic noise that has the allowed excess."""
    noise = optax.tree.random_like(key, chains, jax.random.normal)
    square = sum(np.sum(np.asarray(x, float) ** 2) for x in jax.tree.leaves(chains))
    size = float(np.sqrt(square / optax.tree.size(chains))) or 1.0
    width = FIRST_WIDTH * size
    for _ in range(MOST_WIDTHS):
        moved = jax.tree.map(lambda x, z, s=width: (x + s * z).astype(x.dtype), chains, noise)
        excess = float(np.median(np.nan_to_num(excess_of(moved), nan=np.inf)))
        if is_near(excess, allowed):
            break
        if width > LARGEST_WIDTH * size and excess <= 0:
            raise ValueError("`search` needs a loss that grows around the weights.")
        factor = np.sqrt(allowed / excess) if excess > 0 else LARGEST_JUMP
        width *= float(np.clip(factor, 1 / LARGEST_JUMP, LARGEST_JUMP))
    return width


def next_precision(tried: Sequence[tuple[float, ...]], allowed: float) -> float:
    """Extrapolate to the allowed excess by a line through the last two runs, in logarithms."""
    ends = allowed / LARGEST_JUMP, allowed * LARGEST_JUMP
    logs = np.log([(x[0], np.clip(x[1], *ends)) for x in tried[-2:]])
    slope = -1.0
    if len(logs) == 2 and logs[0, 0] != logs[1, 0]:
        slope = min(-FLATTEST, (logs[1, 1] - logs[0, 1]) / (logs[1, 0] - logs[0, 0]))
    most = np.log(LARGEST_JUMP)
    jump = np.clip((np.log(allowed) - logs[-1, 1]) / slope, -most, most)
    return float(np.exp(logs[-1, 0] + jump))


def search(
    loss_fn: Callable[[Any, Any], jax.Array],
    params: Any,
    batches: Sequence[Any],
    *,
    num_data: float,
    key: int,
    allowed: float = 0.01,
    temperature: float = 1.0,
    make_sampler: Callable[..., Any] = LONG_STEPS,
    num_chains: int = 2,
    num_warmup: int = 100,
    num_draws: int = 20,
    thin: int = 5,
    max_runs: int = 5,
) -> PrecisionSearch:
    """Find the precision of a prior around the weights of one network that has the allowed excess.

    Args:
        loss_fn: mean loss `loss_fn(params, batch)`, without random numbers.
        params: w.
        batches: batches of the data, a list. The chains run on them, and the loss of a draw is the
            mean over their examples. Held-out batches measure what new data lose.
        num_data: number of terms averaged in the mean loss of the training data.
        key: a seed.
        allowed: excess of a single draw, nats per example, > 0.
        temperature: temperature of the posterior.
        make_sampler: called with `num_data=`, `prior_precision=`, `prior_mean=`, `temperature=` and
            `key=`, such as `functools.partial(optax_smile.sgld, 1e-5)`.
        num_chains, num_warmup, num_draws, thin: chains of each run, see `optax_smile.sample`.
        max_runs: largest number of precisions to try.
    """
    chains = jax.tree.map(lambda x: np.repeat(np.asarray(x)[None], num_chains, axis=0), params)
    mapped = jax.jit(jax.vmap(loss_fn, in_axes=(0, None)))
    sizes = [len(jax.tree.leaves(batch)[0]) for batch in batches]

    def losses(draws):
        """Losses `[chain]` over all batches."""
        each = [np.asarray(mapped(draws, batch), float) for batch in batches]
        return np.average(each, axis=0, weights=sizes)

    def observe(draws):
        """Loss and excess of draws, `[2, chain]`."""
        loss, mirrored = losses(draws), jax.tree.map(lambda w, x: 2 * w - x, chains, draws)
        return np.stack([loss, (loss + losses(mirrored)) / 2 - start_loss])

    def run(precision: float) -> tuple[float, ...]:
        posterior = {"num_data": num_data, "temperature": temperature, "prior_mean": "start"}
        sampler = make_sampler(prior_precision=precision, key=key, **posterior)
        chain = optax_smile.Run(loss_fn, chains, batches, sampler, key=key, check=False)
        chain.advance(num_warmup)
        seen = np.stack([observe(x) for x in chain.draws(num_draws, thin=thin)], axis=2)
        # Chains whose losses are not finite have an infinite excess.
        excess = np.nan_to_num(seen[1].mean(axis=1), nan=np.inf)
        with np.errstate(invalid="ignore"):
            error = excess.std(ddof=1) / np.sqrt(num_chains) if num_chains > 1 else np.nan
        return precision, excess.mean(), error, seen[0].mean()

    start_loss = float(losses(chains)[0])
    width = width_of(lambda x: observe(x)[1], chains, jax.random.key(key), allowed)
    tried = [run(1 / width**2)]
    while len(tried) < max_runs and not is_near(tried[-1][1], allowed):
        tried.append(run(next_precision(tried, allowed)))
    columns: Any = map(np.array, zip(*tried, strict=True))
    return PrecisionSearch(*columns, start_loss=start_loss, allowed=allowed)


def main():
    """Compare the precision of short chains with that of the curvature."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="run for seconds")
    epochs = 2 if parser.parse_args().smoke else 30
    images, labels = map(np.asarray, load_digits(return_X_y=True))
    images = (images / 8 - 1).astype(np.float32)
    parts = [(images[i : i + 100], labels[i : i + 100]) for i in range(0, 1_400, 100)]
    train, held_out = parts[:10], parts[10:]

    def init_fn(key):
        shapes = {"hidden": np.zeros((64, 32), np.float32), "out": np.zeros((32, 10), np.float32)}
        return jax.tree.map(lambda x: x / 8, optax.tree.random_like(key, shapes))

    def loss_fn(params, batch):
        logits = jax.nn.relu(batch[0] @ params["hidden"]) @ params["out"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    given: Any = {"num_members": 2, "num_epochs": epochs, "key": 0, "progress": False}
    networks = optax_smile.warmstart(loss_fn, init_fn, train, optax.adamw(0.01), **given)
    given = {"num_data": 1_000, "allowed": 0.03}
    found = optax_smile.local.curvature_precision(loss_fn, networks, held_out, **given)
    print(f"By curvature: prior precision {found:.3g}.")
    one = jax.tree.map(lambda x: x[0], networks)
    print(search(loss_fn, one, held_out, key=0, **given))


if __name__ == "__main__":
    main()
