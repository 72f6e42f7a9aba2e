"""LeNet (61,706 parameters) on Fashion-MNIST: a deep ensemble, and chains from its members."""

import functools
from typing import Any

import data
import jax
import models
import optax
from experiment import Experiment, Settings
from models.convolutional import row_products

PRESETS = {
    "smoke": Settings(
        num_members=2, num_epochs=1, num_warmup=8, num_draws=4, thin=2, width=0.5, num_train=512
    ),
    "laptop": Settings(),
    "paper": Settings(
        num_members=8, num_warmup=5_000, num_draws=100, thin=100, sampling_batch_size=512
    ),
}


def build(settings: Settings) -> Experiment:
    """Load Fashion-MNIST; digits of MNIST are what the network never saw."""
    splits = data.fashion_mnist(settings.seed)
    conv: Any = row_products if jax.default_backend() == "cpu" else None
    return Experiment(
        models.LeNet(width=settings.width, dtype=settings.dtype, conv=conv),
        splits._replace(train=tuple(x[: settings.num_train] for x in splits.train)),
        "categorical",
        lambda num_steps: optax.adamw(1e-3, weight_decay=0.02),
        functools.partial(data.standardize, name="fashion_mnist"),
        unseen=("MNIST", data.mnist_test()[0]),
    )
