"""Data of the examples: splits, batches and their loader, and where the sets come from."""

import gzip
import itertools
import os
import sys

import data
import numpy as np
import pytest
from data import images, sources, tables
from runs import refused

REAL = pytest.mark.skipif(
    "OPTAX_SMILE_DATA" not in os.environ, reason="needs OPTAX_SMILE_DATA, the folder of data"
)
NUMBERS = np.random.default_rng(0)
PICTURES = NUMBERS.integers(256, size=(40, 28, 28, 1), dtype=np.uint8)
LABELS = np.arange(40) % 10
COLOURS = NUMBERS.integers(256, size=(40, 32, 32, 3), dtype=np.uint8)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """An empty folder of data, and nothing prepared elsewhere."""
    monkeypatch.setenv("OPTAX_SMILE_DATA", str(tmp_path / "folder"))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "prepared"))
    return tmp_path / "folder"


def rows_of(splits: data.Splits) -> list[set[bytes]]:
    return [{row.tobytes() for row in part[0]} for part in splits[:3]]


def are_disjoint(splits: data.Splits) -> bool:
    return all(not x & y for x, y in itertools.combinations(rows_of(splits), 2))


def test_a_batch_is_a_function_of_seed_and_number():
    """A pass has every example at most once."""
    pair = np.arange(10), 10 * np.arange(10)
    some, other = (data.Batches(pair, 3, seed) for seed in (0, 1))
    passes = [[list(inputs) for inputs, _ in some] for _ in range(3)]
    assert all(len(set(sum(each, []))) == 9 for each in passes)
    assert passes[0] != passes[1] != passes[2]
    assert all((targets == 10 * inputs).all() for inputs, targets in some)
    for number in (5, 0, 3, 2):
        assert list(data.Batches(pair, 3, 0)[number][0]) == passes[number // 3][number % 3]
    assert any(list(other[i][0]) != passes[0][i] for i in range(3))


def test_crop_and_flip_gives_windows_of_the_padded_image():
    changed = data.crop_and_flip(np.repeat(COLOURS[:1], 200, axis=0), np.random.default_rng(0))
    padded, windows = np.pad(COLOURS[0], ((4, 4), (4, 4), (0, 0)), mode="reflect"), {}
    for top, left in itertools.product(range(9), repeat=2):
        window = padded[top : top + 32, left : left + 32]
        windows[window.tobytes()] = top, left, False
        windows[window[:, ::-1].tobytes()] = top, left, True
    tops, lefts, flips = zip(*[windows[image.tobytes()] for image in changed], strict=True)
    # Sides of a coin: 100 +- 7; each row and column of nine is missed by 200 in 5e-10 of all runs.
    assert 70 < sum(flips) < 130 and {*tops} == {*lefts} == {*range(9)}


def test_loader_gives_the_same_batches_and_resumes_in_the_middle_of_a_pass(monkeypatch):
    pytest.importorskip("grain")
    some = data.Batches((COLOURS, LABELS), 6, 3, data.crop_and_flip)
    plain, number = data.Batches((COLOURS, LABELS), 6, 3)[2], 3 * len(some)
    assert (plain[0] != some[2][0]).any() and (plain[1] == some[2][1]).all()
    iterator, other = (iter(data.loader(some, num_passes=3, read_ahead=4)) for _ in range(2))
    begun = [next(iterator) for _ in range(8)]
    other.set_state(iterator.get_state())
    endless, expected = (
        itertools.islice(data.loader(some), number),
        [some[x] for x in range(number)],
    )
    for found in ([*begun, *iterator], [*begun, *other], endless):
        for one, wanted in zip(found, expected, strict=True):
            assert (one[0] == wanted[0]).all() and (one[1] == wanted[1]).all()
    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(ImportError, match=r"pip install 'optax-smile\[data\]'"):
        data.loader(some)


def test_grey_images(folder):
    (folder / "mnist").mkdir(parents=True)
    for (part, last), (kind, array) in itertools.product(
        (("train", 40), ("t10k", 10)), (("images-idx3", PICTURES[..., 0]), ("labels-idx1", LABELS))
    ):
        # MNIST's format: two zeros, type 8, rank, sizes, bytes.
        array = array[:last].astype(np.uint8)
        head = bytes([0, 0, 8, array.ndim]) + np.asarray(array.shape, ">i4").tobytes()
        path = folder / "mnist" / f"{part}-{kind}-ubyte.gz"
        path.write_bytes(gzip.compress(head + array.tobytes()))
    splits, again, other = (data.mnist(seed=seed) for seed in (1, 1, 2))
    assert [len(part[0]) for part in splits[:3]] == [36, 4, 10]
    assert splits.train[0].dtype == np.uint8 and splits.train[1].dtype == np.int32
    train, valid, _ = rows_of(splits)
    assert train | valid == {x.tobytes() for x in PICTURES} and not train & valid
    assert (splits.test[0] == PICTURES[:10]).all() and (splits.test[1] == LABELS[:10]).all()
    assert (data.mnist_test()[0] == PICTURES[:10]).all()
    assert (again.valid[0] == splits.valid[0]).all() and (other.valid[0] != splits.valid[0]).any()


TEXT = "".join(chr(97 + i) for i in np.random.default_rng(0).integers(26, size=1_000)) + "–é"


def test_shakespeare(folder):
    (folder / "text").mkdir(parents=True)
    (folder / "text" / "modern_shakespeare.txt").write_text(TEXT, encoding="utf-8")
    splits = data.shakespeare(context=8)
    assert splits.train[0].shape == (112, 8) and splits.valid[0].shape == (6, 8)
    assert splits.train[0].dtype == np.int32
    for (inputs, targets), first in zip(splits[:3], (0, 901, 951), strict=True):
        text = "".join(str(splits.classes[i]) for i in inputs.ravel())
        assert text == TEXT[first:][: inputs.size]
        assert (targets.ravel()[:-1] == inputs.ravel()[1:]).all()


def test_uci_is_split_and_standardized_by_the_training_part(folder):
    from sklearn.model_selection import train_test_split

    (folder / "uci").mkdir(parents=True)
    table = NUMBERS.normal(size=(103, 6)) * [1, 5, 1, 1, 1, 3] + 7
    table[:, 2] = 0.977
    np.savetxt(folder / "uci" / "energy.data", table)
    np.savetxt(folder / "uci" / "naval-propulsion-plant.txt.gz", np.hstack([table, table[:, :1]]))
    splits, naval = data.uci("energy", seed=3), data.uci("naval", seed=3)
    rest, test = train_test_split(table, test_size=0.2, random_state=3)
    train, valid = train_test_split(rest, test_size=0.125, random_state=3)
    scale = np.std(train, axis=0) + (np.arange(6) == 2)
    for part, (inputs, targets) in zip((train, valid, test), splits[:3], strict=True):
        found = np.column_stack([inputs, targets])
        np.testing.assert_allclose(found, (part - np.mean(train, axis=0)) / scale, 1e-5, 1e-6)
        assert inputs.dtype == targets.dtype == np.float32
    assert [len(x) for x, _ in splits[:3]] == [71, 11, 21] and are_disjoint(splits)
    assert (naval.train[0] == splits.train[0]).all() and (naval.test[1] == splits.test[1]).all()
    # Comes with scikit-learn.
    assert data.uci("diabetes").train[0].shape == (308, 10)


def test_wrong_arguments(folder):
    (folder / "imagenette").mkdir(parents=True)
    (folder / "imagenette" / "train_64.npz").touch()
    pair = np.arange(5), np.arange(5)
    refused("to the number of examples, 5, got 6", data.Batches, pair, 6, 0)
    refused(r"`uci\(name=...\)` must be one of", data.uci, "boston")
    # A sample of small images is not passed off as large ones.
    refused("at most 64 with the sample .*, got 160", data.imagenette)


@REAL
@pytest.mark.nightly
def test_real_images_tables_and_texts():
    """Data sets that no nightly test of an example reads."""
    standard = data.standardize(data.fashion_mnist().train[0][::10], "fashion_mnist")
    assert abs(np.mean(standard)) < 0.02 and abs(np.std(standard) - 1) < 0.02
    assert data.cifar100_test()[0].shape == (2_000, 32, 32, 3)
    assert len(data.shakespeare("tiny_shakespeare").classes) == 65
    for name in tables.FILES.keys() - {"protein"}:
        assert all(np.isfinite(array).all() for part in data.uci(name)[:3] for array in part)


def test_prepared_images(folder, monkeypatch):
    """The newest complete version is read, also if TensorFlow Datasets does not know it, and only
    as many training images as requested.
    """
    tfds = pytest.importorskip("tensorflow_datasets", reason="tensorflow-datasets not installed")
    from PIL import Image

    prepared, parts = folder.parent / "prepared", {"train": COLOURS, "test": COLOURS[:5]}
    for version in ("3.0.1", "9.8.8.incompleteABC"):
        (prepared / "cifar10" / version).mkdir(parents=True)
    features = {"image": tfds.features.Image(shape=(32, 32, 3))}
    features["label"] = tfds.features.ClassLabel(num_classes=10)
    with tfds.core.registered.skip_registration():

        class Tiny(tfds.core.GeneratorBasedBuilder):
            VERSION, name = tfds.core.Version("9.8.7"), "cifar10"

            def _info(self):
                described = tfds.features.FeaturesDict(features)
                return tfds.core.DatasetInfo(builder=self, features=described)

            def _split_generators(self, dl_manager):
                return {part: self._generate_examples(x) for part, x in parts.items()}

            def _generate_examples(self, images):
                for i, image in enumerate(images):
                    yield i, {"image": Image.fromarray(image), "label": i % 10}

        Tiny(data_dir=prepared, file_format="array_record").download_and_prepare()
    monkeypatch.setattr(images, "BLOCK", 10)
    monkeypatch.setattr(images, "BLOCK_TO_TRAIN", 9)
    splits = data.cifar10(num_train=11)
    assert [part[0].shape for part in splits[:3]] == [(n, 32, 32, 3) for n in (11, 2, 5)]
    train, valid, test = rows_of(splits)
    label_of = {x.tobytes(): i % 10 for i, x in enumerate(COLOURS)}
    assert train | valid <= label_of.keys() and not train & valid
    assert test == {x.tobytes() for x in COLOURS[:5]}
    assert [label_of[x.tobytes()] for x in splits.train[0]] == list(splits.train[1])
    assert splits.train[0].dtype == np.uint8 and splits.train[1].dtype == np.int32


@pytest.mark.parametrize("is_set", [True, False])
def test_missing_data_say_how_to_get_them(folder, monkeypatch, is_set):
    """At once: TensorFlow Datasets, which would try for minutes, is not even imported."""
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    if not is_set:
        monkeypatch.delenv("OPTAX_SMILE_DATA")
    for name in ("mnist", "imagenette", "cifar10", "cifar100_test"):
        with pytest.raises(FileNotFoundError) as caught:
            getattr(data, name)()
        text, stem = str(caught.value), name.removesuffix("_test")
        assert f"No data for {stem}" in text and f"`tfds build {stem}" in text
        assert ("is not set" in text) != is_set and str(folder.parent / "prepared") in text
    # Prepared, but TensorFlow Datasets is not installed.
    monkeypatch.setattr(sources, "_version", lambda path: "3.0.1")
    with pytest.raises(ImportError, match=r"mnist is prepared in .*'optax-smile\[data\]'"):
        data.mnist()
