"""Splits, batches that are a function of seed and number, and a Grain loader of them."""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

Arrays = tuple[np.ndarray, np.ndarray]
Augment = Callable[[np.ndarray, np.random.Generator], np.ndarray]

# How far `crop_and_flip` moves an image, in pixels: the usual padding of CIFAR-10.
MARGIN = 4


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

    Args:
        examples: inputs and targets, of one length.
        size: examples of a batch, at most as many as there are.
        seed: of order and augmentation, at least 0.
        augment: changes the inputs of a batch by random numbers that it is given.
    """

    def __init__(self, examples: Arrays, size: int, seed: int, augment: Augment | None = None):
        count = len(examples[0])
        if len(examples[1]) != count:
            raise ValueError(
                f"`Batches(examples=...)` must have as many targets as inputs, got"
                f" {len(examples[1])} and {count}."
            )
        if not 1 <= size <= count:
            raise ValueError(
                f"`Batches(size=...)` must be from 1 to the number of examples, {count},"
                f" got {size}."
            )
        if seed < 0:
            raise ValueError(f"`Batches(seed=...)` must be >= 0, got {seed}.")
        self.examples, self.size, self.seed, self.augment = examples, size, seed, augment
        self.next_pass = 0
        self._order: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.examples[0]) // self.size

    def __getitem__(self, number: int) -> Arrays:
        if number < 0:
            raise IndexError(f"The number of a batch must be >= 0, got {number}.")
        which, place = divmod(number, len(self))
        # Read once: the threads of `loader` may be in different passes.
        order = self._order
        if order is None or order[0] != which:
            generator = np.random.default_rng((self.seed, which))
            self._order = order = which, generator.permutation(len(self.examples[0]))
        rows = order[1][place * self.size : (place + 1) * self.size]
        inputs, targets = (array[rows] for array in self.examples)
        if self.augment:
            inputs = self.augment(inputs, np.random.default_rng((self.seed, number, 1)))
        return inputs, targets

    def __iter__(self) -> Iterator[Arrays]:
        first = self.next_pass * len(self)
        self.next_pass += 1
        return (self[first + i] for i in range(len(self)))


class _Passes:
    """Many passes as one sequence, which is what Grain reads from."""

    def __init__(self, batches: Batches, count: int | None):
        self.batches = batches
        self.length = sys.maxsize if count is None else count * len(batches)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Arrays:
        return self.batches[index]


def loader(batches: Batches, num_passes: int | None = None, read_ahead: int = 16) -> Any:
    """Read `batches` ahead in threads, by Grain; element `i` is `batches[i]`.

    An iterator of it has `get_state` and `set_state`, by which `optax_smile.sample` resumes in the
    middle of a pass. Every `iter` starts at batch 0, unlike that of `Batches`.

    Args:
        batches: what to read.
        num_passes: passes until it ends; None does not end.
        read_ahead: batches that are held ready, at least 1.

    Returns:
        A `grain.IterDataset`.

    Raises:
        ImportError: Grain is not installed.
        ValueError: a number is below 1.
    """
    for name, value in (("num_passes", num_passes), ("read_ahead", read_ahead)):
        if value is not None and value < 1:
            raise ValueError(f"`loader({name}=...)` must be >= 1, got {value}.")
    try:
        import grain
    except ImportError as error:
        raise ImportError(
            "`loader` needs Grain: pip install 'optax-smile[data]'. `Batches` alone does not."
        ) from error
    passes: Any = _Passes(batches, num_passes)
    options = grain.ReadOptions(num_threads=min(read_ahead, 4), prefetch_buffer_size=read_ahead)
    return grain.MapDataset.source(passes).to_iter_dataset(options)


def crop_and_flip(images: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Move images `[image, row, column, channel]` by up to 4 pixels, and mirror half of them."""
    count, height, width, _ = images.shape
    around = (MARGIN, MARGIN)
    padded = np.pad(images, ((0, 0), around, around, (0, 0)), mode="reflect")
    top, left = generator.integers(2 * MARGIN + 1, size=(2, count))
    rows = top[:, None] + np.arange(height)
    columns = left[:, None] + np.arange(width)
    columns = np.where(generator.random(count)[:, None] < 0.5, columns[:, ::-1], columns)
    return padded[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None]]


def hold_out(examples: Arrays, count: int, seed: int) -> tuple[Arrays, Arrays]:
    """Split off `count` examples at random."""
    total = len(examples[0])
    if not 0 <= count < total:
        raise ValueError(
            f"`hold_out(count=...)` must be from 0 to below the number of examples, {total},"
            f" got {count}."
        )
    order = np.random.default_rng(seed).permutation(total)
    rest, held = order[count:], order[:count]
    inputs, targets = examples
    return (inputs[rest], targets[rest]), (inputs[held], targets[held])
