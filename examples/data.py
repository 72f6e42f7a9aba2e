"""Data of the paper: splits, and batches that are a function of seed and number.

Each data set comes from the folder `OPTAX_SMILE_DATA` if that is set. Images stay uint8 until a
network standardizes them on the device.
"""

import gzip
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Arrays = tuple[np.ndarray, np.ndarray]

# Mean and standard deviation of the training images over 255, by channel.
STANDARDS = {
    "fashion_mnist": ((0.2860,), (0.3530,)),
    "mnist": ((0.1307,), (0.3081,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "imagenette": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


class Splits(NamedTuple):
    """Inputs and targets to train on, to stop early by, and to test on.

    Attributes:
        train, valid, test: pairs of arrays, the first axis is that of the examples.
        classes: names of the classes, or characters of the tokens.
    """

    train: Arrays
    valid: Arrays
    test: Arrays
    classes: Sequence[str] = ()


class Batches:
    """Shuffled anew for every pass; batch `i` is a function of seed and `i` alone.

    A pass leaves out the examples that do not fill a batch. Each `iter` is the next pass.
    """

    def __init__(
        self,
        examples: Arrays,
        size: int,
        seed: int,
        augment: Callable[[np.ndarray, np.random.Generator], np.ndarray] | None = None,
    ):
        self.examples, self.size, self.seed, self.augment = examples, size, seed, augment
        self.next_pass = 0
        self._order: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.examples[0]) // self.size

    def __getitem__(self, number: int) -> Arrays:
        which, place = divmod(number, len(self))
        if self._order is None or self._order[0] != which:
            generator = np.random.default_rng((self.seed, which))
            self._order = which, generator.permutation(len(self.examples[0]))
        rows = self._order[1][place * self.size : (place + 1) * self.size]
        inputs, targets = (array[rows] for array in self.examples)
        if self.augment:
            inputs = self.augment(inputs, np.random.default_rng((self.seed, number, 1)))
        return inputs, targets

    def __iter__(self) -> Iterator[Arrays]:
        first = self.next_pass * len(self)
        self.next_pass += 1
        return (self[first + i] for i in range(len(self)))


def crop_and_flip(images: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Move images `[image, row, column, channel]` by up to 4 pixels, and mirror half of them."""
    count, height, width, _ = images.shape
    padded = np.pad(images, ((0, 0), (4, 4), (4, 4), (0, 0)), mode="reflect")
    top, left = generator.integers(9, size=(2, count))
    rows = top[:, None] + np.arange(height)
    columns = left[:, None] + np.arange(width)
    columns = np.where(generator.random(count)[:, None] < 0.5, columns[:, ::-1], columns)
    return padded[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None]]


def standardize(images: Any, name: str) -> Any:
    """Images of 0 to 255 as the network wants them, by the training images of a data set."""
    mean, deviation = np.asarray(STANDARDS[name], np.float32)[:, None, None, None]
    return (images / 255.0 - mean) / deviation


def _folder() -> Path:
    return Path(os.environ["OPTAX_SMILE_DATA"])


def _idx(path: Path) -> np.ndarray:
    """Read an array of bytes in MNIST's format."""
    content = gzip.decompress(path.read_bytes())
    shape = np.frombuffer(content, ">i4", content[3], offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


def _unpack(path: Path) -> Arrays:
    """Read packed colour images by the codec that lies beside them."""
    spec = importlib.util.spec_from_file_location("imgcodec", _folder() / "imgcodec.py")
    assert spec and spec.loader
    codec = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(codec)
    images, labels, _ = codec.load(path)
    return images, labels.astype(np.int32)


def hold_out(examples: Arrays, count: int, seed: int) -> tuple[Arrays, Arrays]:
    """Split off `count` examples at random."""
    order = np.random.default_rng(seed).permutation(len(examples[0]))
    rest, held = order[count:], order[:count]
    inputs, targets = examples
    return (inputs[rest], targets[rest]), (inputs[held], targets[held])


def mnist_test() -> Arrays:
    """Handwritten digits."""
    folder = _folder() / "mnist"
    images = _idx(folder / "t10k-images-idx3-ubyte.gz")[..., None]
    return images, _idx(folder / "t10k-labels-idx1-ubyte.gz").astype(np.int32)


def fashion_mnist(seed: int = 0) -> Splits:
    """Clothes in 28 x 28 grey pixels: 54,000 to train, 6,000 to stop early by, 10,000 to test."""
    folder = _folder() / "fashion_mnist"

    def read(part: str) -> Arrays:
        images = _idx(folder / f"{part}-images-idx3-ubyte.gz")[..., None]
        return images, _idx(folder / f"{part}-labels-idx1-ubyte.gz").astype(np.int32)

    train, valid = hold_out(read("train"), 6_000, seed)
    return Splits(train, valid, read("t10k"))


def cifar10(seed: int = 0, num_train: int = 45_000) -> Splits:
    """Objects in 32 x 32 colour pixels: 75 % to train, 8.3 % to stop early by, 16.7 % to test."""
    folder = _folder() / "cifar10"
    num_files = -(-num_train // 9_000)
    files = [_unpack(folder / f"train_{i}.npz") for i in range(1, num_files + 1)]
    images, labels = (np.concatenate(arrays) for arrays in zip(*files, strict=True))
    train, valid = hold_out((images, labels), len(images) // 10, seed)
    return Splits(tuple(x[:num_train] for x in train), valid, _unpack(folder / "test.npz"))


def shakespeare(name: str = "modern_shakespeare", context: int = 256) -> Splits:
    """Characters in pieces of `context`, and what follows each: 90 % to train, 5 % and 5 %."""
    text = (_folder() / "text" / f"{name}.txt").read_text(encoding="utf-8")
    characters, tokens = np.unique(list(text), return_inverse=True)
    parts = np.split(tokens.astype(np.int32), [int(0.9 * len(tokens)), int(0.95 * len(tokens))])
    return Splits(*(_pieces(part, context) for part in parts), list(characters))


def _pieces(tokens: np.ndarray, context: int) -> Arrays:
    end = (len(tokens) - 1) // context * context
    return tokens[:end].reshape(-1, context), tokens[1 : end + 1].reshape(-1, context)


def cifar100_test() -> Arrays:
    """Objects of a hundred other kinds."""
    return _unpack(_folder() / "ood" / "cifar100_test_2000.npz")
