"""Bayesian neural networks as scikit-learn estimators (extra `sklearn`)."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_random_state, multiclass, validation

from optax_smile import _check
from optax_smile._types import Options
from optax_smile.chains.sample import sample
from optax_smile.chains.warmstart import warmstart
from optax_smile.draws.likelihoods import NAMED, Name
from optax_smile.draws.predict import Prediction, predict
from optax_smile.samplers.smile import psmile

# Train with small batches and sample with large ones.
OPTIMIZER, HELD_OUT, BATCH, LARGE_BATCH = optax.adamw(3e-3), 0.1, 64, 256
WIDTHS = _check.Where(
    "a sequence of integers >= 1",
    lambda x: (
        isinstance(x, (Sequence, np.ndarray))
        and all(isinstance(n, (int, np.integer)) and n >= 1 for n in x)
    ),
)

WEIGHTS = _check.Array("[input]", _check.NONNEGATIVE, like="y")


class _Batches:
    """Batches of examples, shuffled in each pass."""

    def __init__(self, size: int, seed: int, *data: np.ndarray):
        self.rng, self.data, self.size = np.random.default_rng(seed), data, min(size, len(data[0]))

    def __iter__(self):
        order = self.rng.permutation(len(self.data[0]))
        for end in range(self.size, len(order) + 1, self.size):
            yield tuple(x[order[end - self.size : end]] for x in self.data)


def _init(key: jax.Array, sizes: Sequence[int]) -> list[tuple[jax.Array, jax.Array]]:
    """Initialise layers of the given sizes, inputs first: He's rule for weights, zero biases."""
    he, keys = jax.nn.initializers.he_normal(), jax.random.split(key, len(sizes) - 1)
    shapes = zip(keys, sizes[:-1], sizes[1:], strict=True)
    return [(he(key, (n, m)), jnp.zeros((1, m))) for key, n, m in shapes]


def _apply(layers: Sequence[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
    """Map inputs `[input, feature]` to outputs `[input, output]`, with ReLU between layers."""
    for weight, bias in layers[:-1]:
        x = jax.nn.relu(x @ weight + bias)
    return x @ layers[-1][0] + layers[-1][1]


def _weighted(X: np.ndarray, y: np.ndarray, weight: ArrayLike | None) -> tuple[np.ndarray, ...]:
    """Return the rows that have a weight, and the weights."""
    weight = np.ones(len(y)) if weight is None else weight
    weight = np.asarray(WEIGHTS("sample_weight", weight, {"y": y}))
    if np.count_nonzero(weight) < 2:
        _check.fail("sample_weight", "above zero for at least two rows", _check.show(weight))
    return X[weight > 0], y[weight > 0], weight[weight > 0]


def _scaler(columns: np.ndarray, weight: np.ndarray) -> Any:
    """Fit in float64, scaled by powers of two so that no square overflows or underflows."""
    largest = np.abs(columns).max(axis=0)
    exponents = np.frexp(largest)[1]
    scaler: Any = StandardScaler().fit(np.ldexp(columns, -exponents), sample_weight=weight)
    mean, scale = (np.ldexp(x, exponents) for x in (scaler.mean_, scaler.scale_))
    # After this scaling, a standard deviation of 1 means that a column is constant.
    is_constant = (scaler.scale_ == 1) & (largest > 0)
    scaler.mean_ = np.where(is_constant, columns[0], mean)
    scaler.scale_ = np.where(is_constant, largest, scale)
    return scaler


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class _Bayesian(BaseEstimator):
    init: Callable[..., optax.Params] | None = None
    apply: Callable[..., jax.Array] = _apply
    widths: Sequence[int] = (32, 32)
    sampler: Callable[..., optax.GradientTransformation] = psmile
    prior_precision: float = 1.0
    num_chains: int = 8
    num_epochs: int = 500
    num_warmup: int = 1_000
    num_draws: int = 50
    thin: int = 40
    random_state: int | np.random.RandomState | None = None
    _likelihood: ClassVar[Name] = "categorical"
    _code: ClassVar[Callable[..., np.ndarray]]

    @_check.called("prediction")
    def prediction(self, X: Any, y: Any = None) -> Prediction:
        """Average over the draws: a `Prediction`, with log densities if `y` is given."""
        validation.check_is_fitted(self)
        X = validation.validate_data(self, X, reset=False)
        x = np.asarray(self.scaler_.transform(np.asarray(X, float)), np.float32)
        y = y if y is None else self._code(y)
        found = predict(self._outputs, self.draws_, x, likelihood=self._likelihood, targets=y)
        return found._replace(mean=np.asarray(found.mean, float))

    def _outputs(self, params: Any, x: jax.Array) -> Any:
        return self.apply(params["network"], x)

    def _fit(
        self,
        x: np.ndarray,
        y: np.ndarray,
        weight: np.ndarray,
        num_outputs: int,
        **others: jax.Array,
    ):
        _check.Function("(num_data=, prior_precision=, key=)")("sampler", self.sampler)
        x = np.asarray(x, float)
        self.scaler_ = _scaler(x, weight)
        data = np.asarray(self.scaler_.transform(x), np.float32), self._code(y)
        # The sum of the weights is `num_data`; in the loss they are normalized to mean one.
        data += (np.asarray(weight / weight.mean(), np.float32),)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        split = train_test_split(*data, test_size=HELD_OUT, random_state=seed)
        train, held = ([*map(np.asarray, part)] for part in (split[::2], split[1::2]))
        sizes = x.shape[1], *WIDTHS("widths", self.widths), num_outputs

        def init_fn(key):
            network = self.init(key, train[0][:1]) if self.init else _init(key, sizes)
            return {"network": network, **others}

        def loss_fn(params, batch):
            outputs = self._outputs(params, batch[0])
            return -(NAMED[self._likelihood].log_density(outputs, batch[1]) * batch[2]).mean()

        small = _Batches(BATCH, seed, *train)
        large = _Batches(LARGE_BATCH, seed, *data)
        num_data = float(weight.sum())
        posterior: Options = {"num_data": num_data, "prior_precision": self.prior_precision}
        begin: Options = {"num_members": self.num_chains, "num_epochs": self.num_epochs}
        steps: Options = {x: getattr(self, x) for x in ("num_warmup", "num_draws", "thin")}
        begin["validation"], steps["steps_per_dispatch"] = held, self.thin
        shared: Options = {"key": seed, "check": False, "progress": False}
        with _check.called("fit", "warmstart", "sample", num_members="num_chains"):
            self.members_ = warmstart(loss_fn, init_fn, small, OPTIMIZER, **begin, **shared)
            sampler = self.sampler(**posterior, key=seed)
            self.draws_ = sample(loss_fn, self.members_, large, sampler, **steps, **shared)
        return self


class BayesianClassifier(ClassifierMixin, _Bayesian):
    """Bayesian neural network classifier: a deep ensemble, sampled from each member.

    Features are standardised. A tenth of the rows is held out to stop the members early; the chains
    use all rows. Predictions are averages over the draws.

    Args:
        init, apply: `init(key, x)` for x `[1, feature]`, and `apply(params, x)`, which returns
            logits `[input, class]`; the default is a network with ReLU layers of `widths`.
        sampler: called with `num_data=`, `prior_precision=`, `key=`.
        num_chains, num_epochs, num_warmup, num_draws, thin: see `warmstart` and `sample`.

    Example:
        >>> import functools, optax_smile
        >>> few = {"num_chains": 2, "num_warmup": 20, "num_draws": 5, "thin": 4}
        >>> few["sampler"] = functools.partial(optax_smile.sgld, 1e-3)
        >>> short = BayesianClassifier(widths=(8,), **few, random_state=0)
        >>> short.fit([[0], [1], [2], [3]], ["no", "no", "yes", "yes"]).predict([[9]]).tolist()
        ['yes']
    """

    @_check.called("fit")
    def fit(self, X: Any, y: Any, sample_weight: ArrayLike | None = None):
        """Train and sample with features `X` `[input, feature]` and labels `y` `[input]`.

        A row of `sample_weight` 3 counts as three rows. None: all count as one.
        """
        X, y = validation.validate_data(self, X, y, ensure_min_samples=2)
        X, y, weight = _weighted(X, y, sample_weight)
        multiclass.check_classification_targets(y)
        self.classes_ = np.unique(y)
        if len(self.classes_) < 2:
            _check.fail("y", "labels of at least two classes", repr(self.classes_[0]))
        return self._fit(X, y, weight, len(self.classes_))

    def predict_proba(self, X: Any) -> np.ndarray:
        """Predict the probabilities of `classes_`, `[input, class]`."""
        mean = self.prediction(X).mean
        return mean / mean.sum(axis=1, keepdims=True)

    def predict(self, X: Any) -> np.ndarray:
        """Predict the most probable classes, `[input]`."""
        # Predict first, since it raises if the estimator is not fitted.
        most = self.predict_proba(X).argmax(axis=1)
        return self.classes_[most]

    def _code(self, y: Any) -> np.ndarray:
        # Test equality: NumPy would truncate "catfish" to the length of "cat", and round 0.7.
        codes = {label: code for code, label in enumerate(self.classes_.tolist())}
        labels = validation.column_or_1d(y, warn=True).tolist()
        if unknown := [label for label in labels if label not in codes]:
            _check.fail("y", f"labels of {_check.cut([*codes])}", repr(unknown[0]))
        return np.array([codes[label] for label in labels])


class BayesianRegressor(RegressorMixin, _Bayesian):
    """Bayesian neural network regressor with normal noise, whose log std is sampled too.

    The target is standardised. Arguments as for `BayesianClassifier`, except that `apply` returns
    means `[input]` or `[input, 1]`.
    """

    _likelihood = "gaussian"

    @_check.called("fit")
    def fit(self, X: Any, y: Any, sample_weight: ArrayLike | None = None):
        """Train and sample with targets `y` `[input]`; the rest as for `BayesianClassifier`."""
        X, y = validation.validate_data(self, X, y, ensure_min_samples=2, y_numeric=True)
        X, y, weight = _weighted(X, y, sample_weight)
        scaler = _scaler(_check.host("y", y).astype(float)[:, None], weight)
        self.center_, self.width_ = scaler.mean_[0], scaler.scale_[0]
        return self._fit(X, y, weight, 1, log_std=jnp.zeros(()))

    def prediction(self, X: Any, y: Any = None) -> Prediction:
        """Average over the draws: a `Prediction`, with log densities if `y` is given."""
        found = super().prediction(X, y)
        density = None if y is None else found.log_density - np.log(self.width_)
        changed: Options = {"mean": found.mean * self.width_ + self.center_, "log_density": density}
        with np.errstate(over="ignore"):
            for name in ("total", "aleatoric", "epistemic"):
                changed[name] = getattr(found, name) * self.width_ * self.width_
        return found._replace(**changed)

    def predict(
        self, X: Any, return_std: bool = False
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """Predict the mean, `[input]`, and with `return_std` a pair of it and `predict_std`."""
        found = super().prediction(X)
        mean = found.mean * self.width_ + self.center_
        return (mean, np.sqrt(found.total) * self.width_) if return_std else mean

    def predict_std(self, X: Any) -> np.ndarray:
        """Predict the standard deviation, noise and model uncertainty combined, `[input]`."""
        return self.predict(X, return_std=True)[1]

    def _code(self, y: Any) -> np.ndarray:
        y = _check.host("y", y).astype(float)
        return ((y - self.center_) / self.width_).astype(np.float32)

    def _outputs(self, params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self.apply(params["network"], x).reshape(len(x)), params["log_std"]
