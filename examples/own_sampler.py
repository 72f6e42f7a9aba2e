"""A sampler of your own, by public names alone: the stochastic gradient Nosé-Hoover thermostat.

A sampler is an Optax transformation whose state is a NamedTuple with four members: `stats`,
`last_accepted`, `last_received` and `gradients_per_step` (`ThermostatState` below). `sample`,
`recorded`, `select`, `stats` and `last_accepted` then accept it like one of the package.

SGNHT is `sghmc` whose friction xi rises while the velocity r is larger than a standard normal one,
and falls while it is smaller. For d parameters, and the energy U in nats

    r <- (1 - xi) r - eps grad U + sqrt(2 f) z,  z ~ N(0, I)
    theta <- theta + eps r
    xi <- min(xi + eps^2 ((1 - xi / 2) |r|^2 / d - 1), 1)

So xi settles where it balances the added noise and that of the batches, whose variance it need not
know. It is one number: where the noise differs between parameters, it is right only on average.

Source: Ding, Fang, Babbush, Chen, Skeel, Neven, NeurIPS 2014, algorithm 2 with h = eps, p = r,
A = f / eps and their xi times h. Differences from the paper: |r|^2 has the factor 1 - xi / 2, that
of velocities halfway through the friction, without which the variance of theta is xi / 2 of itself
too small however small the step size; xi is at most 1; the velocity starts at zero.

The script samples a linear regression whose posterior is known. It runs in seconds.

    python examples/own_sampler.py
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_smile


class ThermostatState(NamedTuple):
    """State of `sgnht`. With many chains, every array has a leading chain axis.

    Attributes:
        displacement: what the last call added to the parameters, eps r.
        thermostat: share xi of the velocity that the next step loses.
        key: for the noise, as raw key data. The name `key` is reserved for it: `sample` and
            `parallel.init` give each chain its own.
        accepted: whether the last call got a finite gradient.
        num_nonfinite: calls with other gradients, int32.
        num_gradients: calls so far, int32.
    """

    displacement: Any
    thermostat: jax.Array
    key: jax.Array
    accepted: jax.Array
    num_nonfinite: jax.Array
    num_gradients: jax.Array

    @property
    def gradients_per_step(self) -> int:
        """Calls of `update` that make one step."""
        return 1

    def stats(self) -> optax_smile.Stats:
        """Return what `optax_smile.stats` and the trace of a run have; NaN for what is unknown."""
        return optax_smile.Stats.of(
            self.num_gradients,
            accepted=self.accepted,
            step_end=self.num_gradients > 0,
            num_nonfinite=self.num_nonfinite,
            temperature=jnp.ones_like(self.thermostat),
            # By it `sample` and `stats` find chains with equal noise.
            noise_id=self.key[..., 0] ^ self.key[..., -1],
        )

    def last_accepted(self, params: Any) -> Any:
        """Return the point before the last update: the next call may still undo that one."""
        return jax.tree.map(jnp.subtract, params, self.displacement)

    def last_received(self) -> None:
        """Return None: the state does not keep the last gradient."""


def sgnht(
    step_size: float,
    *,
    num_data: float,
    prior_precision: float = 1.0,
    friction: float = 0.05,
    key: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Make the sampler; its arguments are those of `optax_smile.sghmc`."""
    eps = step_size

    def init(params) -> ThermostatState:
        count = jnp.zeros((), jnp.int32)
        return ThermostatState(
            displacement=jax.tree.map(jnp.zeros_like, params),
            thermostat=jnp.full((), friction, jnp.result_type(*jax.tree.leaves(params))),
            key=jax.random.key_data(jax.random.key(key)),
            accepted=jnp.ones((), bool),
            num_nonfinite=count,
            num_gradients=count,
        )

    def update(updates, state: Any, params: Any = None, **_):
        # `updates` is the gradient of the mean loss; U = num_data * loss + prior.
        gradient = jax.tree.map(lambda g, x: num_data * g + prior_precision * x, updates, params)
        accepted = jnp.isfinite(optax.tree.norm(gradient))
        key, noise_key = jax.random.split(jax.random.wrap_key_data(state.key))
        noise = optax.tree.random_like(noise_key, params, jax.random.normal)
        xi, amplitude = state.thermostat, eps * jnp.sqrt(2 * friction)

        def move(last, g, z):
            return ((1 - xi) * last - eps**2 * g + amplitude * z).astype(g.dtype)

        displacement = jax.tree.map(move, state.displacement, gradient, noise)
        square = optax.tree.norm(displacement, squared=True) / optax.tree.size(params)
        moved = displacement, jnp.minimum(xi + (1 - xi / 2) * square - eps**2, 1)
        # After a gradient that is not finite: back to where the chain came from, and to rest.
        back = jax.tree.map(jnp.negative, state.displacement)
        rest = jax.tree.map(jnp.zeros_like, state.displacement), xi
        displacement, xi = optax.tree.where(accepted, moved, rest)
        return optax.tree.where(accepted, displacement, back), ThermostatState(
            displacement=displacement,
            thermostat=xi,
            key=jax.random.key_data(key),
            accepted=accepted,
            num_nonfinite=state.num_nonfinite + ~accepted,
            num_gradients=state.num_gradients + 1,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def main():
    """Sample a linear regression, and print its posterior by draws and in closed form."""
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 3)).astype(np.float32)
    y = x @ np.array([1.0, -2.0, 0.5], np.float32) + rng.normal(size=600).astype(np.float32)
    # With replacement, so that the noise of one batch says nothing about the next.
    batches = [(x[rows], y[rows]) for rows in rng.integers(600, size=(5_000, 100))]

    def loss_fn(w, batch):
        return jnp.mean((batch[0] @ w - batch[1]) ** 2) / 2

    draws = optax_smile.sample(
        loss_fn,
        np.zeros((4, 3), np.float32),
        batches,
        sgnht(0.01, num_data=600, key=0),
        num_warmup=1_000,
        num_draws=500,
        thin=20,
        steps_per_dispatch=20,
        key=1,
        progress=False,
    )
    print(draws)
    covariance = np.linalg.inv(x.T @ x + np.eye(3))
    found = np.asarray(draws.params).reshape(-1, 3)
    for what, values in {
        "means": (found.mean(axis=0), covariance @ x.T @ y),
        "standard deviations": (found.std(axis=0), np.sqrt(np.diag(covariance))),
    }.items():
        print(f"{what}: {values[0].round(3)}, exactly {values[1].round(3)}")


if __name__ == "__main__":
    main()
