"""Models whose local learning coefficient is known, each with its exact value.

With w ~ exp(-n beta L(w) - gamma / 2 |w - w*|^2) the coefficient is n beta (E[L(w)] - L(w*)): one
number for each n and gamma, by quadrature, in closed form, or by Gibbs sampling, none of which
uses the gradients that a sampler takes. The limit for n -> infinity without gamma is from the
literature on singular models.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Quadrature ends where a density has fallen below exp(-TAIL).
TAIL = 60.0
NUM_NODES = 40_001
# Singular values below this share of the largest are rounding errors.
ZERO = 1e-10


class Exact(NamedTuple):
    """Value, and the standard error of it where it comes from draws."""

    value: float
    error: float = 0.0


class Known(NamedTuple):
    """A model at trained weights.

    Attributes:
        loss_fn: mean loss of a batch, `loss_fn(params, batch)`.
        params: the trained weights w*.
        batches: of all data; a single one stands for the whole loss.
        num_data: n.
        localization: gamma.
        exact: of the coefficient at this n and gamma, and beta = 1 / log n.
        asymptotic: its limit for n -> infinity.
    """

    loss_fn: Callable[[Any, Any], jax.Array]
    params: Any
    batches: Any
    num_data: int
    localization: float
    exact: Callable[[], Exact]
    asymptotic: float


def sharpness(num_data: float) -> float:
    """Compute n beta at beta = 1 / log n."""
    return num_data / np.log(num_data)


def _mean(log_density: Callable, value: Callable, reach: float) -> float:
    """Mean of an even function under an even density; trapezoids converge geometrically."""
    places = np.linspace(0, reach, NUM_NODES)
    logs = log_density(places)
    weights = np.exp(logs - logs.max())
    weights[0] /= 2
    return float(np.sum(weights * value(places)) / np.sum(weights))


def monomial(power: int, strength: float, localization: float) -> float:
    """One weight with n beta L = strength w^power: n beta E[L], by quadrature."""
    reach = (TAIL / strength) ** (1 / power)
    if localization > 0:
        reach = min(reach, np.sqrt(2 * TAIL / localization))
    energy = functools.partial(_monomial, power=power, strength=strength)
    return _mean(lambda w: -energy(w) - localization / 2 * w**2, energy, reach)


def _monomial(w: np.ndarray, power: int, strength: float) -> np.ndarray:
    return strength * w**power


def product(power: int, strength: float, localization: float) -> float:
    """Two weights with n beta L = strength v^2 w^power: v is Gaussian given w, w by quadrature."""

    def stiffness(w):
        return localization + 2 * strength * w**power

    def log_density(w):
        return -localization / 2 * w**2 - np.log(stiffness(w)) / 2

    reach = np.sqrt(2 * TAIL / localization)
    return _mean(log_density, lambda w: strength * w**power / stiffness(w), reach)


def quadratic(curvatures: np.ndarray, strength: float, localization: float) -> float:
    """n beta L = strength sum h w^2 / 2: in closed form."""
    return float(np.sum(strength * curvatures / (strength * curvatures + localization)) / 2)


class LinearNetwork(NamedTuple):
    """Loss |(W_k ... W_1 - target) root|^2 / 2 + constant, and where the chain is held.

    Attributes:
        target: the map of least squares, `[output, input]`.
        moments: mean of x x^T, `[input, input]`.
        centre: layers, first to last, `[output, input]` each.
    """

    target: np.ndarray
    moments: np.ndarray
    centre: Sequence[np.ndarray]

    def loss(self, layers: Sequence[np.ndarray]) -> np.ndarray:
        """Compute the loss without its constant; leading axes are of chains."""
        left = _chain(layers[::-1]) - self.target
        return np.einsum("...ij,jk,...ik->...", left, self.moments, left) / 2


def _chain(factors: Sequence[np.ndarray]) -> np.ndarray:
    return functools.reduce(np.matmul, factors)


class _Layer(NamedTuple):
    """A layer given the others: left @ (independent Gaussian entries) @ right.

    Attributes:
        left: rotation of the outputs.
        right: of the inputs.
        mean: of the entries.
        precision: of them.
        share: of that precision which is of the loss.
    """

    left: np.ndarray
    right: np.ndarray
    mean: np.ndarray
    precision: np.ndarray
    share: np.ndarray

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        noise = rng.standard_normal((*self.left.shape[:-2], *self.mean.shape[-2:]))
        return self.left @ (self.mean + noise / np.sqrt(self.precision)) @ self.right


def _given_others(
    network: LinearNetwork,
    layers: Sequence[np.ndarray],
    index: int,
    strength: float,
    localization: float,
) -> _Layer:
    before = _chain([*layers[:index][::-1], np.eye(layers[0].shape[-1])])
    after = _chain([np.eye(layers[-1].shape[-2]), *layers[index + 1 :][::-1]])
    before_t, after_t = np.swapaxes(before, -1, -2), np.swapaxes(after, -1, -2)
    a, left = np.linalg.eigh(after_t @ after)
    b, right = np.linalg.eigh(before @ network.moments @ before_t)
    pull = strength * after_t @ network.target @ network.moments @ before_t
    pull = pull + localization * network.centre[index]
    curvature = strength * np.maximum(a[..., :, None] * b[..., None, :], 0)
    precision = curvature + localization
    left = np.broadcast_to(left, (len(layers[0]), *left.shape[-2:]))
    mean = np.swapaxes(left, -1, -2) @ pull @ right / precision
    return _Layer(left, np.swapaxes(right, -1, -2), mean, precision, curvature / precision)


def gibbs(
    network: LinearNetwork,
    strength: float,
    localization: float,
    *,
    num_sweeps: int,
    num_chains: int = 32,
    seed: int = 0,
) -> Exact:
    """Linear network of any depth: each layer given the others is Gaussian, and drawn at once.

    Half of the chains start at the centre, half from the prior around it. The first fifth of the
    sweeps is discarded. The mean of the loss over the last layer given the others, not the loss at
    its draw, enters the average. In float64.

    Returns:
        Mean over chains, and its standard error by them. It is not finite where the two halves
        differ by more than four standard errors.
    """
    rng = np.random.default_rng(seed)
    layers = [np.repeat(np.asarray(w, float)[None], num_chains, 0) for w in network.centre]
    spread = np.arange(num_chains) % 2 / np.sqrt(localization)
    layers = [w + spread[:, None, None] * rng.standard_normal(w.shape) for w in layers]
    start, levels = network.loss(network.centre), []
    for sweep in range(num_sweeps):
        for index in range(len(layers) - 1):
            layers[index] = _given_others(network, layers, index, strength, localization).draw(rng)
        last = _given_others(network, layers, len(layers) - 1, strength, localization)
        layers[-1] = last.draw(rng)
        if sweep >= num_sweeps // 5:
            at_mean = network.loss([*layers[:-1], last.left @ last.mean @ last.right])
            level = strength * (at_mean - start) + np.sum(last.share, axis=(-2, -1)) / 2
            # A single layer has the same mean in every chain.
            levels.append(np.broadcast_to(level, num_chains))
    of_chains = np.mean(levels, axis=0)
    halves = of_chains[::2], of_chains[1::2]
    between = np.hypot(*[np.std(half, ddof=1) / np.sqrt(len(half)) for half in halves])
    if abs(halves[0].mean() - halves[1].mean()) > 4 * between:
        return Exact(float("nan"), float("nan"))
    return Exact(float(of_chains.mean()), float(np.std(of_chains, ddof=1) / np.sqrt(num_chains)))


def linear_asymptotic(widths: Sequence[int], rank: int) -> float:
    """Coefficient of a linear network at its most singular point, where its multiplicity is one.

    Source: Aoyagi, Consideration on the learning efficiency of multiple-layered neural networks
    with linear units, 2024, theorem 1; for two layers Aoyagi and Watanabe 2005.

    Raises:
        ValueError: for a multiplicity above one.
    """
    excess = sorted(width - rank for width in widths)
    # The narrowest widths that satisfy the condition of the theorem.
    count = max(c for c in range(2, len(excess) + 1) if sum(excess[:c]) >= (c - 1) * excess[c - 1])
    chosen, between, total = excess[:count], count - 1, sum(excess[:count])
    if total % between:
        raise ValueError(f"Widths {widths} of rank {rank} have a multiplicity above one.")
    pairs = (total**2 - sum(m**2 for m in chosen)) / 2
    outer = rank * (widths[0] + widths[-1] - rank) / 2
    return outer - between * (between - 1) / 4 * (total / between) ** 2 + pairs / 2


def balanced(target: np.ndarray, widths: Sequence[int]) -> list[np.ndarray]:
    """Layers with this product and balanced singular values, padded with zeros."""
    left, values, right = np.linalg.svd(target)
    depth = len(widths) - 1
    narrow = min(widths)
    root = np.zeros(narrow)
    # Set rounding errors to zero: their roots would not be small.
    kept = np.where(values[:narrow] > ZERO * values[0], values[:narrow], 0)
    root[: len(kept)] = kept ** (1 / depth)
    layers = []
    for index, (wide_in, wide_out) in enumerate(zip(widths, widths[1:], strict=False)):
        layer = np.zeros((wide_out, wide_in))
        layer[range(narrow), range(narrow)] = root
        layer = layer @ right if index == 0 else layer
        layers.append(left @ layer if index == depth - 1 else layer)
    return layers


def size(params: Any) -> int:
    """Number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _separable(loss: Callable, count: int, localization: float, each: Callable, asymptotic: float):
    num_data = 1_000_000
    strength = sharpness(num_data)
    return Known(
        loss_fn=lambda w, batch: loss(w),
        params=jnp.zeros(count),
        batches=[np.zeros(1, np.float32)],
        num_data=num_data,
        localization=localization,
        exact=lambda: Exact(each(strength, localization)),
        asymptotic=asymptotic,
    )


def monomials(power: int, count: int, localization: float) -> Known:
    """Sum of w_i^power."""

    def each(strength, localization):
        return count * monomial(power, strength, localization)

    def loss(w):
        return jnp.sum(w**power)

    return _separable(loss, count, localization, each, count / power)


def products(count: int, localization: float) -> Known:
    """Sum of v_i^2 w_i^4 over pairs."""

    def each(strength, localization):
        return count * product(4, strength, localization)

    def loss(w):
        return jnp.sum(w[:count] ** 2 * w[count:] ** 4)

    return _separable(loss, 2 * count, localization, each, count / 4)


def quadratics(curvatures: np.ndarray, localization: float) -> Known:
    """A regular model: Gaussian around its mode."""
    h = jnp.asarray(curvatures, jnp.float32)

    def each(strength, localization):
        return quadratic(curvatures, strength, localization)

    def loss(w):
        return jnp.sum(h * w**2) / 2

    return _separable(loss, len(curvatures), localization, each, len(curvatures) / 2)


def _truth(widths: Sequence[int], rank: int, seed: int) -> np.ndarray:
    """Draw a map of this rank with singular values from 1 to 2."""
    rng = np.random.default_rng(seed)
    left, right = (np.linalg.qr(rng.standard_normal((w, w)))[0] for w in (widths[-1], widths[0]))
    return left[:, :rank] * np.linspace(1, 2, rank) @ right[:rank]


def linear_population(
    widths: Sequence[int], rank: int, localization: float, num_sweeps: int, num_data: int = 100_000
) -> Known:
    """Linear network on the noise-free loss of inputs of covariance I, one full batch."""
    truth = _truth(widths, rank, seed=3)
    network = LinearNetwork(truth, np.eye(widths[0]), balanced(truth, widths))
    target = jnp.asarray(truth, jnp.float32)

    def loss_fn(layers, batch):
        return jnp.sum((_product(layers) - target) ** 2) / 2

    return Known(
        loss_fn=loss_fn,
        params=[jnp.asarray(w, jnp.float32) for w in network.centre],
        batches=[np.zeros(1, np.float32)],
        num_data=num_data,
        localization=localization,
        exact=lambda: gibbs(network, sharpness(num_data), localization, num_sweeps=num_sweeps),
        asymptotic=linear_asymptotic(widths, rank),
    )


def _product(layers: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.matmul, layers[::-1])


def linear_data(
    widths: Sequence[int],
    rank: int,
    localization: float,
    num_sweeps: int,
    num_data: int = 100_000,
    batch_size: int = 1_000,
) -> Known:
    """Linear network with unit noise in the outputs, in mini-batches, at its least squares."""
    rng = np.random.default_rng(4)
    inputs = rng.standard_normal((num_data, widths[0])) * np.linspace(0.5, 1.5, widths[0])
    noise = rng.standard_normal((num_data, widths[-1]))
    outputs = inputs @ _truth(widths, rank, seed=3).T + noise
    inputs, outputs = inputs.astype(np.float32), outputs.astype(np.float32)
    moments = inputs.T.astype(float) @ inputs / num_data
    ordinary = np.linalg.solve(moments, inputs.T.astype(float) @ outputs / num_data).T
    # The best map of a lower rank keeps the largest singular values of target times root.
    values, vectors = np.linalg.eigh(moments)
    root = vectors * np.sqrt(values) @ vectors.T
    left, kept, right = np.linalg.svd(ordinary @ root)
    narrow = min(widths)
    reduced = left[:, :narrow] * kept[:narrow] @ right[:narrow] @ np.linalg.inv(root)
    centre = [w.astype(np.float32) for w in balanced(reduced, widths)]
    network = LinearNetwork(ordinary, moments, centre)

    def loss_fn(layers, batch):
        x, y = batch
        return jnp.mean(jnp.sum((x @ _product(layers).T - y) ** 2, axis=1)) / 2

    batches = [
        (inputs[start : start + batch_size], outputs[start : start + batch_size])
        for start in range(0, num_data, batch_size)
    ]
    return Known(
        loss_fn=loss_fn,
        params=[jnp.asarray(w) for w in centre],
        batches=batches,
        num_data=num_data,
        localization=localization,
        exact=lambda: gibbs(network, sharpness(num_data), localization, num_sweeps=num_sweeps),
        asymptotic=linear_asymptotic(widths, rank),
    )


# Name: what makes it. Without gamma where the density is proper anyway.
MODELS: dict[str, Callable[[], Known]] = {
    "quadratic, 2": lambda: quadratics(np.array([1.0, 1.0]), 0.0),
    "quadratic, 20": lambda: quadratics(np.ones(20), 0.0),
    "quadratic 1e-3 to 10, 200": lambda: quadratics(np.geomspace(1e-3, 10, 200), 0.0),
    "the same, gamma 100": lambda: quadratics(np.geomspace(1e-3, 10, 200), 100.0),
    "quadratic, 2000": lambda: quadratics(np.ones(2_000), 0.0),
    "w^4, 60": lambda: monomials(4, 60, 0.0),
    "w^4, 60, gamma 100": lambda: monomials(4, 60, 100.0),
    "w^6, 400": lambda: monomials(6, 400, 0.0),
    "v^2 w^4, 40 pairs": lambda: products(40, 10.0),
    "reduced rank 10-8-10 of 4": lambda: linear_population((10, 8, 10), 4, 100.0, 10_000),
    "reduced rank 40-10-40 of 10": lambda: linear_population((40, 10, 40), 10, 100.0, 4_000),
    "deep linear 8-8-8-8 of 2": lambda: linear_population((8, 8, 8, 8), 2, 100.0, 10_000),
    "reduced rank 10-8-10 of 4, data": lambda: linear_data((10, 8, 10), 4, 100.0, 10_000),
    "reduced rank 8-4-8 of 4, data": lambda: linear_data((8, 4, 8), 4, 100.0, 10_000),
}
