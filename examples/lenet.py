"""LeNet (61,706 parameters) on Fashion-MNIST: a deep ensemble, and a chain from each member.

Trains with AdamW, stops early, samples, and compares the two on test images and on digits of MNIST,
which the networks never saw: a table, and a page with pictures. An hour on two cores.

    python examples/lenet.py --smoke             # seconds
    python examples/lenet.py                     # writes lenet.html
    python examples/lenet.py --preset paper      # the paper's settings, for a GPU
"""

import functools
from typing import Any

import data
import experiment
import jax
import models
import optax
from experiment import Experiment, Settings
from models.convolutional import row_products

PRESETS = {
    "smoke": Settings(
        num_members=2,
        num_epochs=1,
        num_warmup=8,
        num_draws=4,
        thin=2,
        num_train=512,
        num_test=200,
        width=0.5,
    ),
    "laptop": Settings(),
    "paper": Settings(
        num_members=8, num_warmup=5_000, num_draws=100, thin=100, sampling_batch_size=512
    ),
}


def build(settings: Settings) -> Experiment:
    """Load Fashion-MNIST; digits of MNIST are what the network never saw."""
    splits = experiment.shortened(data.fashion_mnist(settings.seed), settings)
    conv: Any = row_products if jax.default_backend() == "cpu" else None
    return Experiment(
        models.LeNet(width=settings.width, dtype=settings.dtype, conv=conv),
        splits,
        "categorical",
        lambda num_steps: optax.adamw(1e-3, weight_decay=0.02),
        functools.partial(data.standardize, name="fashion_mnist"),
        unseen=("MNIST", data.mnist_test()[0][: settings.num_test]),
    )


if __name__ == "__main__":
    experiment.main("lenet", __doc__, PRESETS, build)
