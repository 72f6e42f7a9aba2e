"""Rivals of the samplers that `compare.py` needs: Muon, SWAG, IVON, MC dropout, Laplace.

All but Muon give draws for `optax_smile.predict`.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import linalg

import optax_smile


def muon(learning_rate: float, weight_decay: float) -> optax.GradientTransformation:
    """Train every array of two or more axes with Muon, the last one its columns.

    AdamW trains the others, at the rate 1e-3.
    """

    def matrices(params: Any) -> Any:
        def axes(x: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
            last = x.ndim - 1
            both = tuple(range(last)), last
            return optax.contrib.MuonDimensionNumbers(*both) if last > 0 else None

        return jax.tree.map(axes, params)

    return optax.contrib.muon(
        learning_rate,
        weight_decay=weight_decay,
        adam_learning_rate=1e-3,
        muon_weight_dimension_numbers=matrices,
    )


@jax.jit
def gaussian(key: jax.Array, mean: Any, precision: Any) -> Any:
    """Draw from a Gaussian with a diagonal precision."""
    noise = optax.tree.random_like(key, mean)
    return jax.tree.map(lambda m, z, p: m + z / jnp.sqrt(p), mean, noise, precision)


def swag_draws(visited: Any, number: int, rank: int, random: np.random.Generator) -> Any:
    """Draw from a Gaussian with the moments of checkpoints.

    Half of the covariance is the diagonal one, half that of the last `rank` deviations from the
    mean.

    Args:
        visited: checkpoints of one chain, each leaf `[checkpoint, ...]`.
        number: of draws.
        rank: of the second half, at most the number of checkpoints minus one.
        random: generator.

    Returns:
        Draws, each leaf `[draw, ...]`.

    Source: Maddox et al., NeurIPS 2019. Differences from the paper: deviations from the final mean
    in place of the running one.
    """
    rank = min(rank, len(jax.tree.leaves(visited)[0]) - 1)
    weights = random.normal(size=(number, rank))

    def gaussians(values):
        last = values[-rank:] - values.mean(0)
        noise = random.normal(size=(number, *values.shape[1:])) * values.std(0)
        low = np.tensordot(weights, last, 1) / np.sqrt(max(1, rank - 1))
        return (values.mean(0) + (noise + low) / np.sqrt(2)).astype(values.dtype)

    return jax.tree.map(gaussians, visited)


class IvonState(NamedTuple):
    """Steps so far, and moving averages of the gradient and of the Hessian's diagonal per datum."""

    count: jax.Array
    momentum: Any
    hessian: Any


def ivon_optimizer(
    learning_rate: optax.ScalarOrSchedule,
    *,
    num_data: float,
    momentum_decay: float,
    hessian_decay: float,
    hess_init: float,
    weight_decay: float,
) -> optax.GradientTransformationExtraArgs:
    r"""Improved variational online Newton: a Gaussian N(m, sigma^2) with a diagonal covariance.

    The gradient g' of the mean loss belongs to theta ~ N(m, sigma^2), which the update gets as
    `point`; the parameters are m. The last term of h keeps h + delta positive.

        h' = g' (theta - m) / sigma^2,                  sigma^2 = 1 / (lambda (h + delta))
        g <- beta1 g + (1 - beta1) g'
        h <- beta2 h + (1 - beta2) h' + (1 - beta2)^2 (h - h')^2 / (2 (h + delta))
        m <- m - alpha (h_0 + delta) (g / (1 - beta1^t) + delta m) / (h + delta)

    Args:
        learning_rate: alpha, a number or a schedule.
        num_data: lambda, the effective sample size.
        momentum_decay, hessian_decay: beta1 and beta2, in [0, 1).
        hess_init: h_0, > 0.
        weight_decay: delta, > 0: the prior's precision over lambda.

    Source: Shen et al., ICML 2024, algorithm 1, with its rescaling of alpha by h_0 + delta.
    """

    def init(params):
        hessian = jax.tree.map(lambda x: jnp.full_like(x, hess_init), params)
        return IvonState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params), hessian)

    def update(updates, state, params=None, *, point=None, **_):
        rate: Any = learning_rate(state.count) if callable(learning_rate) else learning_rate
        count = state.count + 1

        def averaged(h, g, theta, m):
            change = (1 - hessian_decay) * (g * (theta - m) * num_data * (h + weight_decay) - h)
            return h + change + change**2 / (2 * (h + weight_decay))

        def moved(g, h, m):
            force = g / (1 - momentum_decay**count) + weight_decay * m
            return -rate * (hess_init + weight_decay) * force / (h + weight_decay)

        momentum = optax.tree.update_moment(updates, state.momentum, momentum_decay, 1)
        hessian = jax.tree.map(averaged, state.hessian, updates, point, params)
        moves = jax.tree.map(moved, momentum, hessian, params)
        return moves, IvonState(count, momentum, hessian)

    return optax.GradientTransformationExtraArgs(init, update)


class NoisyState(NamedTuple):
    """Mean of the Gaussian, state of `ivon_optimizer`, and random key."""

    mean: Any
    inner: IvonState
    key: jax.Array


def noisy_ivon(
    learning_rate: optax.ScalarOrSchedule, *, num_data: float, key: int, **options: float
) -> optax.GradientTransformation:
    """IVON whose parameters are draws theta of its Gaussian, and whose mean is in the state.

    So `optax_smile.sample` runs it as it runs any optimizer, and where the learning rate has fallen
    to zero the iterates are draws of the result. Options as for `ivon_optimizer`.
    """
    given: Any = {"num_data": num_data, **options}
    inner: Any = ivon_optimizer(learning_rate, **given)
    delta = given["weight_decay"]

    def init(params):
        return NoisyState(params, inner.init(params), jax.random.key_data(jax.random.key(key)))

    def update(updates, state, params=None):
        moves, hidden = inner.update(updates, state.inner, state.mean, point=params)
        mean = optax.apply_updates(state.mean, moves)
        key, used = jax.random.split(jax.random.wrap_key_data(state.key))
        precision = jax.tree.map(lambda h: num_data * (h + delta), hidden.hessian)
        moved = jax.tree.map(jnp.subtract, gaussian(used, mean, precision), params)
        return moved, NoisyState(mean, hidden, jax.random.key_data(key))

    return optax.GradientTransformation(init, update)


def dropout_draws(networks: Any, num_masks: int) -> optax_smile.Snapshots:
    """Pair each network `[network, ...]` with numbered dropout masks: a draw has `params`, `mask`.

    Source: Gal & Ghahramani, ICML 2016.
    """
    number = len(jax.tree.leaves(networks)[0])
    masks = np.arange(number * num_masks, dtype=np.float32).reshape(number, num_masks)
    repeated = jax.tree.map(lambda x: np.repeat(np.asarray(x)[:, None], num_masks, 1), networks)
    return optax_smile.Snapshots({"params": repeated, "mask": masks})


def masked(apply_dropout: Callable[[Any, Any, jax.Array], Any]) -> Callable[[Any, Any], Any]:
    """Make the `apply_fn` that predicts with a draw of `dropout_draws`."""

    def apply(draw, x):
        key = jax.random.fold_in(jax.random.key(0), draw["mask"].astype(jnp.int32))
        return apply_dropout(draw["params"], x, key)

    return apply


def last_layer_laplace(
    apply: Callable[[Any, Any], Any],
    params: Any,
    batches: Iterable[Any],
    likelihood: str,
    last_layer: str,
) -> Callable[[float, int, int], optax_smile.Snapshots]:
    r"""Gaussian over the last layer of each network, all other weights fixed.

    The precision is sum_i J_i^T F_i J_i + delta I: J_i the Jacobian of the outputs for input i in
    the p weights of the last layer, F_i the Fisher information of the outputs.

    Args:
        apply: outputs of one network: logits `[input, class]`, or mean and log sigma.
        params: trained networks, each leaf `[network, ...]`.
        batches: one pass through the training data.
        likelihood: `"categorical"` or `"gaussian"`.
        last_layer: text in the path of the leaves of the last layer, such as `"Dense_2"`.

    Returns:
        `draws(delta, number, seed)`: so many draws of each network for a prior precision delta.

    Cost: a Jacobian per example and network; p^2 numbers per network, p^3 operations per delta.

    Source: Daxberger et al., NeurIPS 2021.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(params)
    leaves = [leaf for _, leaf in paths]
    is_last = [last_layer in jax.tree_util.keystr(path) for path, _ in paths]
    if not any(is_last):
        raise ValueError(
            f"`last_layer` must be part of the path of a parameter, got {last_layer!r}."
        )
    chosen = [x for x, last in zip(leaves, is_last, strict=True) if last]
    sizes = np.cumsum([x[0].size for x in chosen])[:-1]
    flat = jnp.concatenate([x.reshape(len(x), -1) for x in chosen], axis=1)

    def put(leaves, flat):
        """One network with other weights in its last layer."""
        parts = iter(jnp.split(flat, sizes))
        new = [
            next(parts).reshape(x.shape) if y else x for x, y in zip(leaves, is_last, strict=True)
        ]
        return jax.tree.unflatten(structure, new)

    def outputs(flat, leaves, x):
        found = apply(put(leaves, flat), x[None])
        if likelihood == "categorical":
            return found[0]
        return jnp.stack([found[0][0], jnp.broadcast_to(found[1], (1,))[0]])

    def rooted(flat, leaves, x):
        """L^T J with L L^T = F, `[output, weight]`."""
        out, jacobian = outputs(flat, leaves, x), jax.jacrev(outputs)(flat, leaves, x)
        if likelihood == "categorical":
            p = jax.nn.softmax(out)
            root = jnp.diag(jnp.sqrt(p)) - jnp.outer(p, jnp.sqrt(p))
        else:
            root = jnp.diag(jnp.stack([jnp.exp(-out[1]), jnp.sqrt(2.0)]))
        return root.T @ jacobian

    @jax.jit
    def information(flat, leaves, x):
        a = jax.vmap(rooted, (None, None, 0))(flat, leaves, x).reshape(-1, flat.size)
        return a.T @ a

    total = np.zeros((len(flat), flat.shape[1], flat.shape[1]))
    for x, _ in batches:
        for i in range(len(flat)):
            total[i] += np.asarray(information(flat[i], [leaf[i] for leaf in leaves], x))

    def draws(delta: float, number: int, seed: int) -> optax_smile.Snapshots:
        noise = np.random.default_rng(seed).normal(size=(len(flat), flat.shape[1], number))
        moved = []
        for precision, z in zip(total, noise, strict=True):
            lower = linalg.cholesky(precision + delta * np.eye(len(precision)), lower=True)
            moved.append(linalg.solve_triangular(lower, z, lower=True, trans=1).T)
        new = jnp.asarray(flat)[:, None] + np.asarray(moved, np.float32)
        every = jax.vmap(jax.vmap(put, (None, 0)), (0, 0))
        return optax_smile.Snapshots(jax.device_get(every(leaves, new)))

    return draws
