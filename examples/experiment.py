"""The loop that the scripts of large networks share: train, sample, predict, report."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from data import Batches, Splits

import optax_smile


@dataclasses.dataclass(frozen=True)
class Settings:
    """Of one run. A width below one, fewer training examples and fewer draws make it small."""

    num_members: int = 4
    num_epochs: int = 100
    patience: int = 20
    batch_size: int = 64
    num_warmup: int = 4_000
    num_draws: int = 50
    thin: int = 160
    sampling_batch_size: int = 128
    num_train: int | None = None
    width: float = 1.0
    depth: int | None = None
    context: int = 256
    pixels: int = 160
    dtype: str = "float32"
    seed: int = 0


class Experiment(NamedTuple):
    """A network and its data.

    Attributes:
        network: of Flax, whose `init` and `apply` take inputs as `prepare` makes them.
        splits: inputs and targets.
        likelihood: see `optax_smile.predict`.
        optimizer: of the warm start, as a function of the number of its steps.
        prepare: what the device does with inputs before the network sees them.
        augment: see `Batches`.
        unseen: name and inputs of other data, to be unsure about.
    """

    network: nn.Module
    splits: Splits
    likelihood: str
    optimizer: Callable[[int], optax.GradientTransformation]
    prepare: Callable[[Any], Any] = lambda inputs: inputs
    augment: Callable[[np.ndarray, np.random.Generator], np.ndarray] | None = None
    unseen: tuple[str, np.ndarray] | None = None

    @property
    def num_data(self) -> int:
        """Number of targets: of images, or of characters."""
        return self.splits.train[1].size

    def init(self, key: jax.Array) -> Any:
        """Parameters of a fresh network."""
        return self.network.init(key, self.prepare(self.splits.train[0][:1]))

    def outputs_of(self, params: Any, inputs: Any) -> Any:
        """Logits."""
        return self.network.apply(params, self.prepare(inputs))

    def mean_loss(self, params: Any, batch: Any) -> jax.Array:
        """Cross-entropy, mean over the targets, nats."""
        inputs, targets = batch
        logits = self.outputs_of(params, inputs)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets))

    def batches(self, size: int, seed: int) -> Batches:
        """Batches to train on."""
        return Batches(self.splits.train, size, seed, self.augment)


def warm_start(
    experiment: Experiment, settings: Settings, seed: int, num_members: int, **options: Any
) -> Any:
    """Train members side by side; the weights with the best validation loss."""
    batches = experiment.batches(settings.batch_size, seed)
    return optax_smile.warmstart(
        experiment.mean_loss,
        experiment.init,
        batches,
        experiment.optimizer(settings.num_epochs * len(batches)),
        num_members=num_members,
        num_epochs=settings.num_epochs,
        patience=settings.patience,
        validation=experiment.splits.valid,
        key=jax.random.key(seed),
        **options,
    )


def draw(
    experiment: Experiment, settings: Settings, members: Any, sampler: Any, seed: int, **options
) -> Any:
    """Run a chain from every member."""
    return optax_smile.sample(
        experiment.mean_loss,
        members,
        experiment.batches(settings.sampling_batch_size, seed),
        sampler,
        num_warmup=settings.num_warmup,
        num_draws=settings.num_draws,
        thin=settings.thin,
        key=jax.random.key(seed),
        **options,
    )
