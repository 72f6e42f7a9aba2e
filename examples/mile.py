"""MILE: a microcanonical Langevin ensemble, the full-batch baseline of the paper.

Trains a deep ensemble, starts one chain of `mclmc` from each of its members, tunes the step size
and the decoherence length L of each chain, and predicts with all draws. Settings are the paper's:
10 chains, 50,000 steps to tune and 10,000 to sample, of which every tenth is kept.

    python examples/mile.py --data energy      # or with --smoke, a minute

Source: Sommer et al., ICLR 2025, with the tuning of Robnik, De Luca, Silverstein, Seljak, JMLR
2023, section 4. Differences from the paper: no diagonal preconditioning; the warm start fits the
standard deviation of the targets together with the network.
"""

import argparse
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import uci
from jax.flatten_util import ravel_pytree

import optax_smile

# Shares of the tuning for the step size, the width of the posterior, and its independent draws.
PHASES = 0.8, 0.1, 0.1
# Target of the squared energy error of a step, nats^2 per parameter: at the start, and at last.
ENERGY_VARIANCE = 0.5, 0.1
FIRST_STEP_SIZE = 5e-3
# Errors count for little if they are this many sixth roots of e off, or so many steps old.
TRUST, MEMORY = 1.5, 150
# L in units of the distance between independent draws, found by about so many parameters.
LENGTH_FACTOR, NUM_WATCHED = 0.4, 200


class Tuned(NamedTuple):
    """Step size and decoherence length for `mclmc`, and where the tuning ended."""

    step_size: jax.Array
    decoherence_length: jax.Array
    params: jax.Array


def adapt(control, change, tried, target):
    """Choose the step size whose mean squared energy error is the target: it grows as eps^6.

    `control` is the step size, and weighted sums of the squared errors of a step of length one and
    of the weights. `change` is the energy error of a step of length `tried`.
    """
    step_size, error, total = control
    known, decay = jnp.isfinite(change), (MEMORY - 1) / (MEMORY + 1)
    # Smaller errors are rounding.
    square = jnp.clip(jnp.where(known, change, 0) ** 2 / target, 1e-8, 1e24)
    weight = (square > 1e-8) * jnp.exp(-0.5 * (jnp.log(square) / (6 * TRUST)) ** 2)
    error, total = decay * error + weight * square / tried**6, decay * total + weight
    wanted = jnp.where(error > 0, (total / jnp.where(error > 0, error, 1)) ** (1 / 6), jnp.inf)
    largest = jnp.where(known, 10, 1) * step_size
    return jnp.clip(wanted, step_size / 10, largest), error, total


def walk(loss_fn, length, carry, targets, every=1, adapts=False, **posterior):
    """Return chain and control, and the path of every so many parameters `[step, parameter]`."""
    sampler = optax_smile.mclmc(1.0, decoherence_length=length, **posterior)

    def step(carry, target):
        (theta, state), control = carry
        tried, changes = optax_smile.stats(state).step_size, []
        state = optax.tree.set(state, step_size_factor=control[0])
        for _ in range(2):
            loss, grads = jax.value_and_grad(loss_fn)(theta)
            updates, state = sampler.update(grads, state, theta, value=loss)
            theta: Any = optax.apply_updates(theta, updates)
            changes.append(optax_smile.stats(state).energy_change)
        # The first gradient closes the step before, whose length was `tried`.
        control = adapt(control, changes[0], tried, target * theta.size) if adapts else control
        return ((theta, state), control), optax_smile.last_accepted(state, theta)[::every]

    chain, control = carry
    chain = chain if isinstance(chain, tuple) else (chain, sampler.init(chain))
    return jax.lax.scan(step, (chain, control), targets)


def steps_per_draw(path):
    """Autocorrelation time of `[step, parameter]`, by the initial positive sequence of Geyer."""
    length = len(path)
    spectrum = jnp.fft.rfft(path - path.mean(axis=0, keepdims=True), 2 * length, axis=0)
    covariance = jnp.fft.irfft(jnp.abs(spectrum) ** 2, 2 * length, axis=0)[: length // 2 * 2]
    pairs = (covariance / covariance[:1]).reshape(length // 2, 2, -1).sum(axis=1)
    return jnp.mean(jnp.maximum(2 * jnp.sum(pairs * jnp.cumprod(pairs > 0, axis=0), axis=0) - 1, 1))


def tune(loss_fn, theta, num_steps, phases=PHASES, energy_variance=ENERGY_VARIANCE, **posterior):
    """Tune a chain from `theta` `[d]` on the mean loss over all data, in three phases."""
    first, second, third = (round(share * num_steps) for share in phases)
    zero, final = jnp.zeros((), theta.dtype), jnp.full(second, energy_variance[1])
    carry = theta, (zero + FIRST_STEP_SIZE, zero, zero)
    targets, length = jnp.linspace(energy_variance[0], energy_variance[1], first), theta.size**0.5
    carry, _ = walk(loss_fn, length, carry, targets, theta.size, adapts=True, **posterior)
    carry, path = walk(loss_fn, length, carry, final, adapts=True, **posterior)
    length, every = jnp.sqrt(jnp.sum(jnp.var(path, axis=0))), max(theta.size // NUM_WATCHED, 1)
    carry, path = walk(loss_fn, length, carry, jnp.zeros(third), every, **posterior)
    (theta, state), (step_size, *_) = carry
    length = LENGTH_FACTOR * step_size * steps_per_draw(path)
    return Tuned(step_size, length, optax_smile.last_accepted(state, theta))


def main():
    """Train, tune, sample, and print the scores on test data."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--data", default="energy", choices=["energy", "airfoil", "diabetes"])
    parser.add_argument("--smoke", action="store_true", help="run a minute")
    given = parser.parse_args()
    chains, epochs, tuning, draws = (2, 2, 200, 20) if given.smoke else (10, 200, 50_000, 1_000)
    train, valid, (inputs, targets), _ = uci.load(given.data, 0, download=False)
    network, key = uci.Network(16), jax.random.key(0)
    outputs_of: Any = network.apply

    def mean_loss(params, batch) -> Any:
        mean, log_std = outputs_of(params, batch[0])
        return jnp.mean((batch[1] - mean) ** 2) * jnp.exp(-2 * log_std) / 2 + log_std

    batches, optimizer = uci.batches_of(train, 64, 0), optax.adamw(1e-2, weight_decay=5e-3)
    members = optax_smile.warmstart(
        mean_loss, lambda key: network.init(key, train[0][:1]), batches, optimizer,
        num_members=chains, num_epochs=epochs, validation=valid, key=key, progress=False,
    )  # fmt: skip
    unravel = ravel_pytree(jax.tree.map(lambda x: x[0], members))[1]
    posterior: dict[str, Any] = {"num_data": len(train[0])}

    def chain(params, key):
        loss_fn, given = lambda x: mean_loss(unravel(x), train), posterior | {"key": key}
        step_size, length, theta = tune(loss_fn, ravel_pytree(params)[0], tuning, **given)
        carry = theta, (step_size, *jnp.zeros(2))
        _, path = walk(loss_fn, length, carry, jnp.zeros(10 * draws), **given)
        return jax.vmap(unravel)(path[9::10]), (step_size, length)

    sampled, settings = jax.jit(jax.vmap(chain))(members, jax.random.split(key, chains))
    print("step sizes and lengths:", *np.round(settings, 3).tolist())
    ensemble = optax_smile.Snapshots.from_members(members)
    score: Any = {"likelihood": "gaussian", "targets": targets}
    for name, found in {"ensemble": ensemble, "MILE": optax_smile.Snapshots(sampled)}.items():
        seen = optax_smile.predict(outputs_of, found, inputs, **score)
        rmse = np.sqrt(np.mean((seen.mean - targets) ** 2))
        print(f"{name}: LPPD {np.mean(seen.log_density):.3f}, RMSE {rmse:.3f}")


if __name__ == "__main__":
    main()
