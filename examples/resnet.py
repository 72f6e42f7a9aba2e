"""ResNets with filter response normalisation on CIFAR-10: an ensemble, and chains from it.

Crops and mirrors images while it trains and samples, and compares on test images and on those of
CIFAR-100, which the networks never saw: a table, and a page with pictures.

    python examples/resnet.py --smoke                             # seconds
    python examples/resnet.py                                     # ResNet-7, small: an hour
    python examples/resnet.py --network resnet18 --preset paper   # the paper's, for a GPU

On a CPU, JAX_NUM_CPU_DEVICES=2 before the command gives each of the two chains a device of its own,
and makes their gradients three times as fast. The posterior is that of as many images as there are,
whatever is cropped from them.
"""

import functools

import data
import experiment
import models
import optax
from experiment import Experiment, Settings

SMALL = Settings(
    num_members=2,
    num_epochs=12,
    num_warmup=1_000,
    num_draws=20,
    thin=50,
    sampling_batch_size=64,
    num_train=9_000,
)
PAPER = Settings(
    num_members=8,
    num_epochs=360,
    num_warmup=5_000,
    num_draws=100,
    thin=100,
    sampling_batch_size=512,
    dtype="bfloat16",
)
SMOKE = Settings(
    num_members=2,
    num_epochs=1,
    num_warmup=4,
    num_draws=2,
    thin=1,
    num_train=256,
    num_test=64,
    width=0.125,
)
PRESETS = {"smoke": SMOKE, "laptop": SMALL, "paper": PAPER}


def optimizer(num_steps: int) -> optax.GradientTransformation:
    """AdamW as in the paper: up to 2e-3 within the first fiftieth, then down by a cosine."""
    rate = optax.warmup_cosine_decay_schedule(1e-5, 2e-3, max(1, num_steps // 50), num_steps, 5e-4)
    return optax.adamw(rate, weight_decay=1e-4)


def build(settings: Settings, network: str = "resnet7") -> Experiment:
    """Load CIFAR-10; images of CIFAR-100 are what the network never saw."""
    splits = data.cifar10(settings.seed, settings.num_train or 45_000)
    kind = {"resnet7": models.ResNet7, "resnet18": models.ResNet18}[network]
    return Experiment(
        kind(width=settings.width, dtype=settings.dtype),
        experiment.shortened(splits, settings),
        "categorical",
        optimizer,
        functools.partial(data.standardize, name="cifar10"),
        data.crop_and_flip,
        ("CIFAR-100", data.cifar100_test()[0][: settings.num_test]),
    )


if __name__ == "__main__":
    experiment.main("resnet", __doc__, PRESETS, build, networks=("resnet7", "resnet18"))
