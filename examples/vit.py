"""A Vision Transformer on Imagenette: a deep ensemble, and a chain from each member.

Trains with AdamW, stops early, samples, and compares the two on Imagenette's validation images: a
table, and a page with pictures.

    python examples/vit.py --smoke             # seconds
    python examples/vit.py                     # small, on images of 64 x 64: half an hour
    python examples/vit.py --preset paper      # 22 million parameters, for a GPU
"""

import functools

import data
import experiment
import models
import optax
from experiment import Experiment, Settings

PRESETS = {
    "smoke": Settings(
        num_members=2,
        num_epochs=1,
        num_warmup=4,
        num_draws=2,
        thin=1,
        num_train=128,
        num_test=32,
        width=0.125,
        depth=1,
        pixels=64,
    ),
    "laptop": Settings(
        num_members=2,
        num_epochs=20,
        num_warmup=500,
        num_draws=20,
        thin=25,
        sampling_batch_size=64,
        width=0.25,
        depth=4,
        pixels=64,
    ),
    "paper": Settings(
        num_epochs=300, batch_size=128, num_warmup=5_000, num_draws=100, thin=100, dtype="bfloat16"
    ),
}


def optimizer(num_steps: int) -> optax.GradientTransformation:
    """AdamW as in the paper: up to 1e-3 within the first thirtieth, then down by a cosine."""
    rate = optax.warmup_cosine_decay_schedule(1e-6, 1e-3, max(1, num_steps // 30), num_steps, 1e-5)
    return optax.adamw(rate, weight_decay=0.1)


def build(settings: Settings) -> Experiment:
    """Load Imagenette."""
    splits = data.imagenette(settings.seed, settings.pixels)
    network = models.ViT(width=settings.width, depth=settings.depth or 12, dtype=settings.dtype)
    return Experiment(
        network,
        experiment.shortened(splits, settings),
        "categorical",
        optimizer,
        functools.partial(data.standardize, name="imagenette"),
        data.crop_and_flip,
    )


if __name__ == "__main__":
    experiment.main("vit", __doc__, PRESETS, build)
