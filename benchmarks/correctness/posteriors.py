"""The posteriors of `agreement.py`: log likelihoods that are sums over rows.

    networks     two Bayesian neural networks of about 100 parameters, tanh, standard normal priors
    posteriors   ten models like those of posteriordb, with our own code: five on data of
                 scikit-learn and UCI, five on data that are simulated here
    calibration  three models that can also draw their parameters and data

Priors and parameters are those that a user of Stan would choose: predictors standardized, positive
parameters by their logarithm, nothing whitened. Parameters are one flat array. UCI tables are read
from the folder `OPTAX_SMILE_DATA`.
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln, logsumexp
from jax.scipy.stats import norm, t
from sklearn import datasets

Rows = Any
ENERGY_WIDTHS, MOONS_WIDTHS, SMALL_WIDTHS = (8, 10, 1), (2, 8, 8, 1), (2, 6, 1)
NUM_INPUTS = 100
# Standard deviation of what is added to the standardized targets of energy.
ENERGY_NOISE = 0.3


def standard_normal(theta: jax.Array) -> jax.Array:
    """Log density of the usual prior."""
    return jnp.sum(norm.logpdf(theta))


def parameters(theta: jax.Array, rows: Rows) -> jax.Array:
    """Default quantities of a comparison: the parameters themselves."""
    return theta


@dataclasses.dataclass(frozen=True)
class Posterior:
    """A model with its data.

    Attributes:
        size: number of parameters.
        log_likelihood: of each row, `(theta, rows) -> [row]`.
        rows: the data, a tree of arrays `[row, ...]`; None where only `simulate` makes some.
        log_prior: scalar, of theta.
        quantities: what is compared, `(theta, rows) -> [quantity]`.
        simulate: draws parameters and data, `key -> (theta, rows)`.
    """

    size: int
    log_likelihood: Callable[[jax.Array, Rows], jax.Array]
    rows: Rows = None
    log_prior: Callable[[jax.Array], jax.Array] = standard_normal
    quantities: Callable[[jax.Array, Rows], jax.Array] = parameters
    simulate: Callable[[jax.Array], tuple[jax.Array, Rows]] | None = None

    def log_density(self, theta: jax.Array, rows: Rows) -> jax.Array:
        """Log posterior up to a constant, of all rows."""
        return jnp.sum(self.log_likelihood(theta, rows)) + self.log_prior(theta)

    def mean_loss(self, theta: jax.Array, batch: Rows, num_data: int) -> jax.Array:
        """Loss of a batch whose energy is the posterior's with `prior_precision=0`."""
        return -jnp.mean(self.log_likelihood(theta, batch)) - self.log_prior(theta) / num_data


def gaussian(mean: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    """Log likelihood of targets about a mean, the last parameter being log sigma."""

    def log_likelihood(theta, rows):
        features, targets = rows
        return norm.logpdf(targets, mean(theta, features), jnp.exp(theta[-1]))

    return log_likelihood


def bernoulli(logits: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    """Log likelihood of labels 0 and 1."""

    def log_likelihood(theta, rows):
        features, labels = rows
        return jax.nn.log_sigmoid(jnp.where(labels > 0, 1, -1) * logits(theta, features))

    return log_likelihood


# Networks.


def network(theta: jax.Array, inputs: jax.Array, widths: tuple[int, ...]) -> jax.Array:
    """Output `[input]` of a tanh network whose weights are the first entries of theta."""
    used = 0
    for fan_in, fan_out in zip(widths, widths[1:], strict=False):
        weights = theta[used : used + fan_in * fan_out].reshape(fan_in, fan_out)
        used += (fan_in + 1) * fan_out
        outputs = inputs @ weights + theta[used - fan_out : used]
        inputs = jnp.tanh(outputs)
    return outputs[:, 0]


def num_weights(widths: tuple[int, ...]) -> int:
    """Number of weights and biases."""
    return sum((a + 1) * b for a, b in zip(widths, widths[1:], strict=False))


def network_regression(features, targets, inputs, widths) -> Posterior:
    """Gaussian targets with one log sigma; judged by the mean at the inputs and log sigma."""
    mean = functools.partial(network, widths=widths)

    def quantities(theta, rows):
        return jnp.append(mean(theta, inputs), theta[-1])

    rows = features, targets
    return Posterior(num_weights(widths) + 1, gaussian(mean), rows, quantities=quantities)


def energy_network() -> Posterior:
    """UCI energy, first published split.

    The targets of energy get noise of standard deviation .3. Without it NUTS made no draw within
    five minutes, so there would be no reference.
    """
    folder = Path(os.environ["OPTAX_SMILE_DATA"]) / "uci_reference_splits"
    with np.load(folder / "energy_seed1.npz") as arrays:
        features, targets, inputs = (arrays[k] for k in ("x_train", "y_train", "x_test"))
    noise = np.random.default_rng(0).normal(size=len(targets))
    targets = (targets + ENERGY_NOISE * noise).astype(np.float32)
    return network_regression(features, targets, inputs[:NUM_INPUTS], ENERGY_WIDTHS)


def moons_network() -> Posterior:
    """Two noisy half circles, 500 points; judged by the logit over their bounding box."""
    features, labels = datasets.make_moons(500, noise=0.3, random_state=0)
    rows = standardized(features, labels, False)
    inputs = jax.random.uniform(jax.random.key(0), (NUM_INPUTS, 2), minval=-2.0, maxval=2.0)
    logits = functools.partial(network, widths=MOONS_WIDTHS)
    return Posterior(
        num_weights(MOONS_WIDTHS),
        bernoulli(logits),
        rows,
        quantities=lambda theta, rows: logits(theta, inputs),
    )


NETWORKS = {"energy": energy_network, "moons": moons_network}

# Posteriors that others use.


def standardized(features, targets, with_targets: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Columns of mean 0 and variance 1."""
    features = (features - features.mean(0)) / features.std(0)
    if with_targets:
        targets = (targets - targets.mean()) / targets.std()
    return features.astype(np.float32), np.asarray(targets, np.float32)


def bundled(load: Callable[..., Any]) -> tuple[np.ndarray, np.ndarray]:
    """Features and targets of a data set of scikit-learn."""
    features, targets = load(return_X_y=True)
    return features, targets


def uci(file: str) -> np.ndarray:
    """A table of the shared folder."""
    return np.loadtxt(Path(os.environ["OPTAX_SMILE_DATA"]) / "uci" / file)


def linear_predictor(theta: jax.Array, features: jax.Array) -> jax.Array:
    """Intercept first, then one slope for each column."""
    return theta[0] + features @ theta[1 : 1 + features.shape[1]]


def linear() -> Posterior:
    """Linear regression with sigma: progression of diabetes, 442 patients, 10 predictors."""
    return Posterior(12, gaussian(linear_predictor), standardized(*bundled(datasets.load_diabetes)))


def logistic() -> Posterior:
    """Logistic regression: breast cancer, 569 tumours, 10 predictors, some correlated by .99."""
    features, labels = bundled(datasets.load_breast_cancer)
    rows = standardized(features[:, :10], labels, False)
    return Posterior(11, bernoulli(linear_predictor), rows)


def mixed_logistic() -> Posterior:
    """Logistic regression: 1,000 simulated rows, 20 predictors mixed by a random matrix."""
    rng = np.random.default_rng(3)
    features = rng.normal(size=(1_000, 20)) @ rng.normal(size=(20, 20))
    features /= features.std(axis=0)
    labels = rng.random(1_000) < 1 / (1 + np.exp(-features @ rng.normal(size=20)))
    return Posterior(21, bernoulli(linear_predictor), standardized(features, labels, False))


def robust() -> Posterior:
    """Student regression with sigma and degrees of freedom: red wine, 1,599 wines."""
    table = uci("wine-quality-red.txt")
    rows = standardized(table[:, :-1], table[:, -1])

    def log_likelihood(theta, rows):
        mean = linear_predictor(theta, rows[0])
        return t.logpdf(rows[1], 2 + jnp.exp(theta[-1]), mean, jnp.exp(theta[-2]))

    def log_prior(theta):
        return standard_normal(theta[:-1]) + norm.logpdf(theta[-1], 2.0, 1.0)

    return Posterior(14, log_likelihood, rows, log_prior)


def poisson() -> Posterior:
    """Poisson regression with exposures: 600 simulated counts, 4 predictors."""
    rng = np.random.default_rng(1)
    features = rng.normal(size=(600, 4)).astype(np.float32)
    features[:, 1] += 0.7 * features[:, 0]
    exposure = rng.uniform(0.5, 2, 600).astype(np.float32)
    counts = rng.poisson(exposure * np.exp(0.5 + features @ [0.5, -0.3, 0.2, 0.0]))

    def log_likelihood(theta, rows):
        features, exposure, counts = rows
        log_rate = linear_predictor(theta, features) + jnp.log(exposure)
        return counts * log_rate - jnp.exp(log_rate)

    return Posterior(5, log_likelihood, (features, exposure, counts.astype(np.float32)))


def negative_binomial() -> Posterior:
    """Negative binomial regression: 1,000 hours of bike sharing, 9 predictors."""
    table = uci("bikesharing.data")[np.random.default_rng(2).permutation(17_379)[:1000]]
    hour = 2 * np.pi * table[:, [2]] / 24
    daily = np.hstack([np.sin(hour), np.cos(hour), np.sin(2 * hour), np.cos(2 * hour)])
    features = np.hstack([daily, table[:, [0, 5, 7, 9, 10]]])
    rows = standardized(features, table[:, -1], False)

    def log_likelihood(theta, rows):
        log_mean, size = linear_predictor(theta, rows[0]), jnp.exp(theta[-1])
        counts, total = rows[1], jnp.logaddexp(theta[-1], log_mean)
        known = gammaln(counts + size) - gammaln(size) - gammaln(counts + 1)
        return known + size * (theta[-1] - total) + counts * (log_mean - total)

    def log_prior(theta):
        return norm.logpdf(theta[0], 0.0, 5.0) + standard_normal(theta[1:])

    return Posterior(11, log_likelihood, rows, log_prior)


NUM_GROUPS = 30


@functools.cache
def grouped_rows() -> Rows:
    """Groups of 3 to 40 rows, one predictor of the row and one of the group: made like radon."""
    rng = np.random.default_rng(3)
    group = np.repeat(np.arange(NUM_GROUPS), rng.integers(3, 41, NUM_GROUPS))
    floor = (rng.uniform(size=len(group)) < 0.3).astype(np.float32)
    level = rng.normal(size=NUM_GROUPS).astype(np.float32)
    intercept = 1.2 + 0.4 * level + 0.3 * rng.normal(size=NUM_GROUPS)
    targets = intercept[group] - 0.6 * floor + 0.7 * rng.normal(size=len(group))
    return group, floor, level[group], targets.astype(np.float32)


def varying_intercepts(centred: bool) -> Posterior:
    """Intercepts of 30 simulated groups about a line, with both standard deviations unknown."""

    def log_likelihood(theta, rows):
        group, floor, level, targets = rows
        mean, slope, group_slope, log_tau, log_sigma = theta[:5]
        own = theta[5:][group] if centred else mean + jnp.exp(log_tau) * theta[5:][group]
        expected = own + slope * floor + group_slope * level
        return norm.logpdf(targets, expected, jnp.exp(log_sigma))

    def log_prior(theta):
        spread = (theta[0], jnp.exp(theta[3])) if centred else (0.0, 1.0)
        return standard_normal(theta[:5]) + jnp.sum(norm.logpdf(theta[5:], *spread))

    return Posterior(5 + NUM_GROUPS, log_likelihood, grouped_rows(), log_prior)


def mixture() -> Posterior:
    """Two simulated normals, their means ordered: weight, means and standard deviations."""
    rng = np.random.default_rng(4)
    first = rng.uniform(size=1000) < 0.35
    values = np.where(first, rng.normal(-1.5, 0.8, 1000), rng.normal(1.2, 1.1, 1000))

    def log_likelihood(theta, rows):
        means = jnp.stack([theta[0], theta[0] + jnp.exp(theta[1])])
        weights = jax.nn.log_sigmoid(jnp.stack([theta[4], -theta[4]]))
        parts = norm.logpdf(rows[:, None], means[None], jnp.exp(theta[2:4])[None])
        return logsumexp(parts + weights[None], axis=1)

    def log_prior(theta):
        return norm.logpdf(theta[0], 0.0, 2.0) + standard_normal(theta[1:])

    return Posterior(5, log_likelihood, values.astype(np.float32), log_prior)


def autoregression() -> Posterior:
    """A simulated series of 400 values on its last five: each row holds a value and those."""
    rng, order = np.random.default_rng(5), 5
    values = np.zeros(500)
    for i in range(order, 500):
        values[i] = 0.1 + values[i - order : i][::-1] @ [0.7, -0.4, 0.3, 0.1, -0.1]
        values[i] += 0.5 * rng.normal()
    windows = np.lib.stride_tricks.sliding_window_view(values[100 - order :], order + 1)
    windows = windows.astype(np.float32)
    return Posterior(order + 2, gaussian(linear_predictor), (windows[:, :-1], windows[:, -1]))


def smooth() -> Posterior:
    """A Gaussian process by 12 sines, its length, size and noise unknown: 300 simulated points."""
    rng, size, edge = np.random.default_rng(6), 12, 1.5
    place = np.sort(rng.uniform(-1, 1, 300))
    targets = np.sin(4 * place) * np.exp(-place) + 0.3 * rng.normal(size=300)
    frequency = np.pi * np.arange(1, size + 1) / (2 * edge)
    basis = np.sin(frequency * (place[:, None] + edge)) / np.sqrt(edge)
    frequency = jnp.asarray(frequency, jnp.float32)

    def log_likelihood(theta, rows):
        length, amplitude, sigma = jnp.exp(theta[:3])
        spectrum = jnp.sqrt(jnp.sqrt(2 * jnp.pi) * length) * jnp.exp(
            -((length * frequency) ** 2) / 4
        )
        return norm.logpdf(rows[1], rows[0] @ (amplitude * spectrum * theta[3:]), sigma)

    def log_prior(theta):
        return norm.logpdf(theta[0], -1.0, 0.5) + standard_normal(theta[1:])

    rows = basis.astype(np.float32), targets.astype(np.float32)
    return Posterior(3 + size, log_likelihood, rows, log_prior)


POSTERIORS = {
    "linear": linear,
    "logistic": logistic,
    "logistic, mixed": mixed_logistic,
    "robust": robust,
    "poisson": poisson,
    "negative binomial": negative_binomial,
    "groups, centred": lambda: varying_intercepts(True),
    "groups, non-centred": lambda: varying_intercepts(False),
    "mixture": mixture,
    "autoregression": autoregression,
    "Gaussian process": smooth,
}

# Calibration: parameters and data are drawn together.
NUM_SIMULATED = 256


def simulated_features(size: int) -> jax.Array:
    """Fixed predictors of every simulated data set."""
    return jax.random.normal(jax.random.key(7), (NUM_SIMULATED, size))


def calibrated_logistic() -> Posterior:
    """Intercept and four slopes."""
    features = simulated_features(4)

    def simulate(key):
        own, other = jax.random.split(key)
        theta = jax.random.normal(own, (5,))
        logits = linear_predictor(theta, features)
        return theta, (features, logits > jax.random.logistic(other, (NUM_SIMULATED,)))

    return Posterior(5, bernoulli(linear_predictor), simulate=simulate)


def calibrated_groups() -> Posterior:
    """Eight groups of 32 rows, non-centred: mean, log tau, log sigma and the offsets."""
    group = jnp.arange(NUM_SIMULATED) % 8
    centre, spread = jnp.array([0.0, -1.0, -0.5]), jnp.array([1.0, 0.5, 0.5])

    def expected(theta, group):
        return theta[0] + jnp.exp(theta[1]) * theta[3:][group]

    def log_likelihood(theta, rows):
        return norm.logpdf(rows[1], expected(theta, rows[0]), jnp.exp(theta[2]))

    def log_prior(theta):
        return standard_normal((theta[:3] - centre) / spread) + standard_normal(theta[3:])

    def simulate(key):
        own, other = jax.random.split(key)
        theta = jax.random.normal(own, (11,))
        theta = theta.at[:3].set(centre + spread * theta[:3])
        noise = jnp.exp(theta[2]) * jax.random.normal(other, (NUM_SIMULATED,))
        return theta, (group, expected(theta, group) + noise)

    return Posterior(11, log_likelihood, log_prior=log_prior, simulate=simulate)


def calibrated_network() -> Posterior:
    """Regression 2-6-1 with log sigma; ranked by five predictions and the log likelihood."""
    features = simulated_features(2)
    inputs = jax.random.normal(jax.random.key(8), (5, 2))
    size, mean = num_weights(SMALL_WIDTHS) + 1, functools.partial(network, widths=SMALL_WIDTHS)
    log_likelihood = gaussian(mean)

    def log_prior(theta):
        return standard_normal(theta[:-1]) + norm.logpdf(theta[-1], -1.0, 0.5)

    def quantities(theta, rows):
        return jnp.append(mean(theta, inputs), jnp.sum(log_likelihood(theta, rows)))

    def simulate(key):
        own, other = jax.random.split(key)
        theta = jax.random.normal(own, (size,))
        theta = theta.at[-1].set(-1 + 0.5 * theta[-1])
        noise = jnp.exp(theta[-1]) * jax.random.normal(other, (NUM_SIMULATED,))
        return theta, (features, mean(theta, features) + noise)

    return Posterior(size, log_likelihood, None, log_prior, quantities, simulate)


CALIBRATED = {
    "logistic": calibrated_logistic,
    "groups": calibrated_groups,
    "network": calibrated_network,
}
