"""Data of the paper: a function for each set, batches, and corruptions of images.

A set comes from the folder `OPTAX_SMILE_DATA` where that has it, else from TensorFlow Datasets or
OpenML (`sources`, `tables`). Images stay uint8 until a network standardizes them on the device.
"""

from data.batches import Arrays, Batches, Splits, crop_and_flip, hold_out, loader
from data.corruptions import CORRUPTIONS, corrupt
from data.images import (
    STANDARDS,
    cifar10,
    cifar100_test,
    fashion_mnist,
    imagenette,
    mnist,
    mnist_test,
    standardize,
)
from data.tables import uci
from data.text import shakespeare

__all__ = [
    "CORRUPTIONS",
    "STANDARDS",
    "Arrays",
    "Batches",
    "Splits",
    "cifar10",
    "cifar100_test",
    "corrupt",
    "crop_and_flip",
    "fashion_mnist",
    "hold_out",
    "imagenette",
    "loader",
    "mnist",
    "mnist_test",
    "shakespeare",
    "standardize",
    "uci",
]
