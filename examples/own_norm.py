"""A norm of your own, by public names alone: all parameters move equally far, up or down.

A chain of `smile` has a momentum p and moves with the velocity v = grad ||p||. It keeps the
posterior for any norm, if its gradients are those of all data. `Signs` below is the sum of absolute
values. So its chains move along signs, as the optimizers signSGD and Lion do:

    ||p|| = sum_i |p_i| / sqrt(d),    v_i = sign(p_i) / sqrt(d)

A norm is a subclass of `optax_smile.Norm` with one method. The docstrings of its other methods say
when `smile` calls them, and which ones to override for a norm whose kicks have a closed form.

The script samples a linear regression whose posterior is known. It runs in seconds.

    python examples/own_norm.py
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_smile


class Signs(optax_smile.Norm):
    """The sum of absolute values over sqrt(d), for which velocities have the length one."""

    # It sees entries and not leaves: `smile` may join small leaves, and scale single entries.
    is_elementwise = True

    def velocity(self, momentum: optax.Updates) -> optax.Updates:
        """Return sign(p) / sqrt(d)."""
        length = optax.tree.size(momentum) ** 0.5
        return jax.tree.map(lambda p: jnp.sign(p) / length, momentum)


def main():
    """Sample a linear regression, and print its posterior by draws and in closed form."""
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 6)).astype(np.float32)
    # Features with correlations of about one half.
    x += rng.normal(size=(600, 1)).astype(np.float32)
    y = x @ np.array([1.0, -2.0, 0.5, 0, 0, 0], np.float32)
    y += rng.normal(size=600).astype(np.float32)

    def loss_fn(w, batch):
        return jnp.mean((batch[0] @ w - batch[1]) ** 2) / 2

    draws = optax_smile.sample(
        loss_fn,
        np.zeros((16, 6), np.float32) + 0.1 * rng.normal(size=(16, 6)).astype(np.float32),
        [(x, y)],
        optax_smile.smile(0.02, num_data=600, norm=Signs(), decoherence_length=None),
        num_warmup=1_000,
        num_draws=500,
        thin=10,
        steps_per_dispatch=20,
        key=1,
        progress=False,
    )
    print(draws)
    covariance = np.linalg.inv(x.T @ x + np.eye(6))
    found = np.asarray(draws.params).reshape(-1, 6)
    for what, values in {
        "means": (found.mean(axis=0), covariance @ x.T @ y),
        "standard deviations": (found.std(axis=0), np.sqrt(np.diag(covariance))),
    }.items():
        print(f"{what}: {values[0].round(3)}, exactly {values[1].round(3)}")


if __name__ == "__main__":
    main()
