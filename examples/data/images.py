"""Images of the paper as uint8 `[image, row, column, channel]`, with labels as int32."""

import gzip
import importlib.util
import io
from pathlib import Path
from typing import Any

import numpy as np

from data import sources
from data.batches import Arrays, Splits, hold_out

# Mean and standard deviation of the training images over 255, by channel.
STANDARDS = {
    "fashion_mnist": ((0.2860,), (0.3530,)),
    "mnist": ((0.1307,), (0.3081,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "imagenette": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}

# Of a training file of CIFAR-10, and what is left of it to train on.
BLOCK, BLOCK_TO_TRAIN = 10_000, 9_000
# A side of the images of Imagenette in the folder.
SAMPLED_PIXELS = 64
# Of each class of CIFAR-100: 2,000 images.
PER_CLASS = 20


def standardize(images: Any, name: str) -> Any:
    """Images of 0 to 255 as the network wants them, by the training images of a data set."""
    if name not in STANDARDS:
        raise ValueError(f"`standardize(name=...)` must be one of {[*STANDARDS]}, got {name!r}.")
    mean, deviation = np.asarray(STANDARDS[name], np.float32)[:, None, None, None]
    return (images / 255.0 - mean) / deviation


def mnist(seed: int = 0) -> Splits:
    """Handwritten digits in 28 x 28 grey pixels; split as `fashion_mnist`."""
    return _grey_splits("mnist", seed)


def mnist_test() -> Arrays:
    """The 10,000 handwritten digits to test on."""
    return _grey("mnist", "test")


def fashion_mnist(seed: int = 0) -> Splits:
    """Clothes in 28 x 28 grey pixels: 54,000 to train, 6,000 to stop early by, 10,000 to test."""
    return _grey_splits("fashion_mnist", seed)


def cifar10(seed: int = 0, num_train: int = 45_000) -> Splits:
    """Objects in 32 x 32 colour pixels: 75 % to train, 8.3 % to stop early by, 16.7 % to test.

    With fewer to train there are fewer to stop early by as well, and less is read.
    """
    if not 1 <= num_train <= 5 * BLOCK_TO_TRAIN:
        raise ValueError(
            f"`cifar10(num_train=...)` must be from 1 to {5 * BLOCK_TO_TRAIN}, got {num_train}."
        )
    num_blocks = -(-num_train // BLOCK_TO_TRAIN)
    blocks = [
        _colour("cifar10", f"cifar10/train_{i + 1}.npz", f"train[{i * BLOCK}:{(i + 1) * BLOCK}]")
        for i in range(num_blocks)
    ]
    images, labels = (np.concatenate(arrays) for arrays in zip(*blocks, strict=True))
    (inputs, targets), valid = hold_out((images, labels), len(images) // 10, seed)
    test = _colour("cifar10", "cifar10/test.npz", "test")
    return Splits((inputs[:num_train], targets[:num_train]), valid, test)


def cifar100_test() -> Arrays:
    """20 test images of each of 100 classes, none of them one of CIFAR-10: unseen data for it."""
    images, labels = _colour("cifar100", "ood/cifar100_test_2000.npz", "test")
    if len(images) <= 100 * PER_CLASS:
        return images, labels
    rows = np.concatenate([np.flatnonzero(labels == i)[:PER_CLASS] for i in range(100)])
    return images[rows], labels[rows]


def imagenette(seed: int = 0, pixels: int = 160) -> Splits:
    """Ten easy classes of ImageNet, squeezed to `pixels` x `pixels` in colour.

    A tenth of the training images is to stop early by; the published validation images are to
    test. The paper uses 160 pixels. The folder has a sample of 64 pixels a side: 3,600, 400, 1,000.
    """
    if pixels < 1:
        raise ValueError(f"`imagenette(pixels=...)` must be >= 1, got {pixels}.")
    if pixels > SAMPLED_PIXELS and sources.files("imagenette/train_64.npz"):
        raise ValueError(
            f"`imagenette(pixels=...)` must be at most {SAMPLED_PIXELS} with the sample in the"
            f" folder OPTAX_SMILE_DATA, got {pixels}. Set OPTAX_SMILE_DATA to another folder to"
            " read what TensorFlow Datasets has prepared."
        )
    train, test = _squeezed("train", "train", pixels), _squeezed("val", "validation", pixels)
    train, valid = hold_out(train, len(train[0]) // 10, seed)
    return Splits(train, valid, test)


def _grey_splits(name: str, seed: int) -> Splits:
    everything = _grey(name, "train")
    train, valid = hold_out(everything, len(everything[0]) // 10, seed)
    return Splits(train, valid, _grey(name, "test"))


def _grey(name: str, part: str) -> Arrays:
    stem = f"{name}/{'t10k' if part == 'test' else part}"
    names = f"{stem}-images-idx3-ubyte.gz", f"{stem}-labels-idx1-ubyte.gz"
    if paths := sources.files(*names):
        images, labels = (_idx(path) for path in paths)
        return images[..., None], labels.astype(np.int32)
    return _stacked(sources.prepared(name, names[0], part, _pair))


def _colour(name: str, file: str, part: str) -> Arrays:
    """Read packed colour images by the codec that lies beside them."""
    paths = sources.files(file, "imgcodec.py")
    if not paths:
        return _stacked(sources.prepared(name, file, part, _pair))
    spec = importlib.util.spec_from_file_location("imgcodec", paths[1])
    assert spec and spec.loader
    codec = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(codec)
    images, labels, _ = codec.load(paths[0])
    return images, labels.astype(np.int32)


def _squeezed(part: str, split: str, pixels: int) -> Arrays:
    """Resize images of Imagenette, which lie as JPEGs one after the other."""
    from PIL import Image

    def squeeze(image: Any) -> np.ndarray:
        size = pixels, pixels
        return np.asarray(image.convert("RGB").resize(size, Image.Resampling.LANCZOS))

    file = f"imagenette/{part}_64.npz"
    if paths := sources.files(file):
        with np.load(paths[0]) as arrays:
            content, ends, labels = arrays["jpeg"].tobytes(), arrays["offsets"], arrays["y"]
        opened = (
            Image.open(io.BytesIO(content[first:last]))
            for first, last in zip(ends[:-1], ends[1:], strict=True)
        )
        return np.stack([squeeze(image) for image in opened]), labels.astype(np.int32)

    def read(example: Any) -> tuple[np.ndarray, int]:
        return squeeze(Image.fromarray(example["image"])), example["label"]

    return _stacked(sources.prepared("imagenette/160px-v2", file, split, read))


def _pair(example: Any) -> tuple[np.ndarray, int]:
    return example["image"], example["label"]


def _stacked(examples: list[Any]) -> Arrays:
    images, labels = zip(*examples, strict=True)
    return np.stack(images), np.asarray(labels, np.int32)


def _idx(path: Path) -> np.ndarray:
    """Read an array of bytes in MNIST's format."""
    content = gzip.decompress(path.read_bytes())
    shape = np.frombuffer(content, ">i4", content[3], offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)
