"""Start chains from trained weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_smile import _check, _tree

# Relative to the size of the weights, see `chains_from_weights`. It changes the LPPD of trained
# networks by about .01 nats, at most .05 (energy, concrete, diabetes); 0.1 changes it by up to 2.
JITTER = 0.01


@dataclass(frozen=True)
class _Weights(_check.Constraint):
    """Parameter trees of trained networks."""

    text = "a list of at least one parameter tree"

    def __call__(self, where, argument, value, given=_check.NOTHING):
        if not isinstance(value, (list, tuple)) or not value:
            _check.fail(where, argument, self.text, repr(value)[:80])
        _check.Tree(self.text, finite=True)(where, argument, value)
        if not jax.tree.leaves(value[0]):
            _check.fail(where, argument, self.text, "trees without arrays")
        return value


@_check.arguments(
    weights=_Weights(),
    num_chains=_check.Whole(1) | None,
    jitter=_check.Real(0, traced=False) | None,
    key=_check.Key(),
)
def chains_from_weights(
    weights: Sequence[optax.Params],
    *,
    num_chains: int | None = None,
    jitter: float | None = None,
    key: jax.Array | int | None = None,
) -> optax.Params:
    """Start chains from trained weights, such as checkpoints.

    Args:
        weights: parameter trees of one network each, with equal structure and shapes.
        num_chains: >= 1, at least the number of weights: chain i starts from
            `weights[i % len(weights)]`; None: one chain per tree of weights.
        jitter: standard deviation of Gaussian noise, relative to the root mean square of each
            array, >= 0. Arrays of zeros get no noise, unless all arrays are zero: then the unit is
            1. None: 0.01 if two chains would start from equal weights, else 0. Without jitter,
            chains from equal weights stay identical if they share batches and draw no noise.
        key: JAX key or seed, required for a jitter.

    Returns:
        Parameters `[chain, ...]` for `sample`.

    Raises:
        ValueError: no weights, trees that differ, fewer chains than weights, an argument out of
            range, or no key for a jitter.

    Example:
        >>> import jax, jax.numpy as jnp, optax_smile
        >>> chains = optax_smile.chains_from_weights(
        ...     [{"w": jnp.ones(3)}], num_chains=4, key=jax.random.key(0)
        ... )
        >>> chains["w"].shape
        (4, 3)
    """
    where = "chains_from_weights"
    for tree in weights[1:]:
        _tree.check_alike(where, "weights", tree, weights[0], "the first tree")
    kinds = {jnp.result_type(leaf) for leaf in jax.tree.leaves(weights[0])}
    if others := [x for x in kinds if not jnp.issubdtype(x, jnp.inexact)]:
        _check.fail(where, "weights", "floating-point parameters", f"{others[0]}")
    num_chains = len(weights) if num_chains is None else num_chains
    if num_chains < len(weights):
        rule = f"at least {len(weights)}, the number of `weights`"
        _check.fail(where, "num_chains", rule, num_chains, "Or pass fewer weights.")
    chosen = [weights[chain % len(weights)] for chain in range(num_chains)]
    chains = jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(x) for x in leaves]), *chosen)
    if jitter is None:
        jitter = JITTER if len(set(_tree.first_alike(chains))) < num_chains else 0
    if not jitter:
        return chains
    purpose = "for the jitter that separates chains with equal initial weights"
    drawn: Any = _check.Key(True, purpose)(where, "key", key)

    def size(x):
        return jnp.sqrt(jnp.mean(x**2, axis=tuple(range(1, x.ndim)), keepdims=True))

    sizes = jnp.stack([size(x).ravel() for x in jax.tree.leaves(chains)])
    are_zero = jnp.all(sizes == 0, axis=0)

    def disturb(x, noise):
        unit = jnp.where(are_zero.reshape(-1, *[1] * (x.ndim - 1)), 1, size(x))
        return x + jitter * unit * noise

    return jax.tree.map(disturb, chains, _tree.normal_like(drawn, chains))
