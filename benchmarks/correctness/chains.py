"""Every sampler on a posterior: all chains and step sizes in one compiled loop."""

from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks import samplers
from benchmarks.correctness.posteriors import Posterior

import jax
import jax.numpy as jnp
import mile
import numpy as np
import optax

import optax_smile

# Permutations of the rows of which each pass takes one at random.
NUM_ORDERS = 512
# Of AdamW.
FIT_RATE = 1e-2


class Scale(NamedTuple):
    """Sizes of a run; `SMOKE` is only a check that it works."""

    num_gradients: int = 60_000
    warmup: float = 1 / 3
    thin: int = 20
    num_starts: int = 3
    chains_per_start: int = 2
    fit_steps: int = 3_000
    num_simulations: int = 500
    nuts_warmup: int = 600
    nuts_block: int = 500
    most_blocks: int = 20

    @property
    def num_draws(self) -> int:
        """Of one chain, warm-up included."""
        return self.num_gradients // self.thin


FULL = Scale()
SMOKE = Scale(1_000, 1 / 3, 5, 2, 2, 300, 20, 50, 20, 1)


class Method(NamedTuple):
    """A sampler of the table.

    Attributes:
        make: from its settings for one chain, number of rows and key; the prior is in the loss.
        step_sizes: the grid of these settings; none if it has its own step size.
        is_tuned: whether `examples/mile.py` tunes them, on all rows.
    """

    make: Callable[..., Any]
    step_sizes: tuple[float, ...] = ()
    is_tuned: bool = False


def simple(name: str, *step_sizes: float) -> Method:
    """A method that is one function of the library."""

    def make(step_size, num_data, key):
        chosen = step_size if step_sizes else None
        return samplers.build(name, chosen, num_data=num_data, prior_precision=0.0, key=key)

    return Method(make, step_sizes)


def tuned_mclmc(settings, num_data, key):
    """MCLMC with the settings of its tuner."""
    step_size, length = settings
    return optax_smile.mclmc(
        step_size, num_data=num_data, decoherence_length=length, prior_precision=0.0, key=key
    )


DEFAULT, FULL_BATCH, NUTS = "psmile", "mile", "nuts"
METHODS = {
    DEFAULT: simple("psmile"),
    "smile": simple("smile"),
    "psmile_naive": simple("psmile_naive", 3e-3, 1e-2, 3e-2, 1e-1),
    "smile_naive": simple("smile_naive", 3e-3, 1e-2, 3e-2, 1e-1),
    "scale_adapted_sghmc": simple("scale_adapted_sghmc", 1e-3, 3e-3, 1e-2, 3e-2),
    "sgld": simple("sgld", 1e-6, 1e-5, 1e-4, 1e-3),
    "psgld": simple("psgld", 1e-7, 1e-6, 1e-5, 1e-4),
    FULL_BATCH: Method(tuned_mclmc, is_tuned=True),
}


def fit(
    loss: Callable[[jax.Array], jax.Array], size: int, key: jax.Array, num_steps: int
) -> jax.Array:
    """Descend with AdamW from a random point to the start of a chain."""
    # A short memory of the steep gradients at the random point.
    optimizer = optax.adamw(optax.cosine_decay_schedule(FIT_RATE, num_steps), b2=0.99)

    def step(carry, _):
        theta, state = carry
        updates, state = optimizer.update(jax.grad(loss)(theta), state, theta)
        return (theta + updates, state), None

    theta = 0.5 * jax.random.normal(key, (size,))
    (theta, _), _ = jax.lax.scan(step, (theta, optimizer.init(theta)), length=num_steps)
    return theta


def chain_of(
    posterior: Posterior, method: Method, num_data: int, share: int, num_gradients: int, thin: int
) -> Callable[..., Any]:
    """Return `chain(settings, start, key, rows)`, to be mapped over chains and compiled.

    It returns the quantities after every `thin` gradients `[draw, quantity]`, and its step sizes.
    """
    size = max(num_data // share, 1)
    per_pass = num_data // size
    rng = np.random.default_rng(0)
    orders = rng.permuted(np.tile(np.arange(num_data), (NUM_ORDERS, 1)), axis=1)
    orders = jnp.asarray(orders[:, : per_pass * size].reshape(NUM_ORDERS, per_pass, size))

    def chain(settings, start, key, rows):
        own, order_key = jax.random.split(key)
        tx = method.make(settings, num_data, own)
        passes = jax.random.randint(order_key, (num_gradients // per_pass + 1,), 0, NUM_ORDERS)

        def batch_at(i):
            if per_pass == 1:
                return rows
            chosen = orders[passes[i // per_pass], i % per_pass]
            return jax.tree.map(lambda x: x[chosen], rows)

        def step(carry, i):
            theta, state = carry
            grads = jax.grad(posterior.mean_loss)(theta, batch_at(i), num_data)
            updates, state = tx.update(grads, state, theta)
            return (optax.apply_updates(theta, updates), state), None

        def draw(carry, steps):
            (theta, state), _ = jax.lax.scan(step, carry, steps)
            at = optax_smile.last_accepted(state, theta)
            sizes = optax_smile.stats(state).step_size
            return (theta, state), (posterior.quantities(at, rows), sizes)

        steps = jnp.arange(num_gradients // thin * thin).reshape(-1, thin)
        return jax.lax.scan(draw, (start, tx.init(start)), steps)[1]

    return chain


def tuned(posterior: Posterior, starts: jax.Array, keys: jax.Array, num_steps: int) -> Any:
    """Tune step size, length and start of every chain, as BlackJAX does."""
    rows = jax.tree.map(jnp.asarray, posterior.rows)
    num_data = len(jax.tree.leaves(rows)[0])

    def one(start, key):
        return mile.tune(
            lambda theta: posterior.mean_loss(theta, rows, num_data),
            start,
            num_steps,
            phases=(1 / 3, 1 / 3, 1 / 3),
            energy_variance=(5e-4, 5e-4),
            num_data=num_data,
            prior_precision=0.0,
            key=key,
        )

    return jax.jit(jax.vmap(one))(starts, keys)


def sample(
    posterior: Posterior,
    method: Method,
    step_sizes: tuple[float, ...],
    starts: jax.Array,
    share: int,
    scale: Scale,
    seed: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Run chains from every start for all step sizes at once.

    Returns:
        Draws after the warm-up `[step size, chain, draw, quantity]` and the median step size in
        `stats` `[step size]`.
    """
    rows = jax.tree.map(jnp.asarray, posterior.rows)
    num_data = len(jax.tree.leaves(rows)[0])
    keys = jax.random.split(jax.random.key(seed), len(starts))
    num_gradients, num_warmup = scale.num_gradients, round(scale.num_gradients * scale.warmup)
    grid = np.asarray(step_sizes or (np.nan,), np.float32)
    settings: Any = jnp.broadcast_to(grid[:, None], (len(grid), len(starts)))
    if method.is_tuned:  # the tuner's chain is the warm-up, and a step costs two gradients
        found = tuned(posterior, starts, keys, num_warmup // 2)
        settings, starts = (found.step_size[None], found.decoherence_length[None]), found.params
        num_gradients, num_warmup = num_gradients - num_warmup, 0
    chain = chain_of(posterior, method, num_data, share, num_gradients, scale.thin)
    run = jax.vmap(jax.vmap(chain, (0, 0, 0, None)), (0, None, None, None))
    draws, sizes = jax.device_get(jax.jit(run)(settings, starts, keys, rows))
    first = num_warmup // scale.thin
    return draws[:, :, first:], np.median(sizes[:, :, first:], axis=(1, 2))
