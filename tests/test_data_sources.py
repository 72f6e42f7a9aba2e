"""Where data sets come from: the folder, TensorFlow Datasets' prepared files, or a clear error."""

import sys
from pathlib import Path
from typing import Any

import data
import numpy as np
import pytest
import test_data
from data import images, sources
from test_data import COLOURS, PICTURES, TEXT, grey_files, rows_of, text_of

# A fixture: an empty folder of data, beside what is prepared.
folder = test_data.folder


def prepare(root: Path, name: str, version: str, parts: Any, shape: Any = None, classes: int = 10):
    """Write a set as array_record, by a builder that yields Pillow's images."""
    tfds = pytest.importorskip("tensorflow_datasets", reason="tensorflow-datasets not installed")
    stem, _, config = name.partition("/")
    described: dict[str, Any] = {"text": tfds.features.Text()}
    if shape is not None:
        described = {"image": tfds.features.Image(shape=shape)}
        described["label"] = tfds.features.ClassLabel(num_classes=classes)
    with tfds.core.registered.skip_registration():

        class Tiny(tfds.core.GeneratorBasedBuilder):
            VERSION = tfds.core.Version(version)
            BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=config)] if config else []

            _generate_examples = None

            def _info(self):
                described_set = tfds.features.FeaturesDict(described)
                return tfds.core.DatasetInfo(builder=self, features=described_set)

            def _split_generators(self, dl_manager):
                return {part: enumerate(rows) for part, rows in parts.items()}

        Tiny.name = stem
        Tiny(data_dir=root, file_format="array_record").download_and_prepare()


def labelled(arrays: Any) -> list[dict[str, Any]]:
    from PIL import Image

    opened = (Image.fromarray(x[..., 0] if x.shape[-1] == 1 else x) for x in arrays)
    return [{"image": image, "label": i % 10} for i, image in enumerate(opened)]


@pytest.fixture
def prepared(folder):
    return folder.parent / "prepared"


@pytest.mark.parametrize("version", ["3.0.1", "9.8.7"])
def test_prepared_grey_images(prepared, version):
    """The version that TensorFlow Datasets knows today, and one that it does not."""
    parts = {"train": labelled(PICTURES), "test": labelled(PICTURES[:10])}
    prepare(prepared, "fashion_mnist", version, parts, (28, 28, 1))
    splits = data.fashion_mnist()
    assert [part[0].shape for part in splits[:3]] == [(n, 28, 28, 1) for n in (36, 4, 10)]
    train, valid, test = rows_of(splits)
    label_of = {x.tobytes(): i % 10 for i, x in enumerate(PICTURES)}
    assert train | valid == label_of.keys() and not train & valid
    assert test == {x.tobytes() for x in PICTURES[:10]}
    assert [label_of[x.tobytes()] for x in splits.train[0]] == list(splits.train[1])
    assert splits.train[0].dtype == np.uint8 and splits.train[1].dtype == np.int32


def test_prepared_colour_images(prepared, monkeypatch):
    """Only as many of the training images are read as are asked for."""
    monkeypatch.setattr(images, "BLOCK", 10)
    monkeypatch.setattr(images, "BLOCK_TO_TRAIN", 9)
    parts = {"train": labelled(COLOURS), "test": labelled(COLOURS[:5])}
    prepare(prepared, "cifar10", "3.0.2", parts, (32, 32, 3))
    splits = data.cifar10(num_train=11)
    assert [part[0].shape for part in splits[:3]] == [(n, 32, 32, 3) for n in (11, 2, 5)]
    monkeypatch.setattr(images, "PER_CLASS", 3)
    many = np.tile(COLOURS, (10, 1, 1, 1))
    rows = [row | {"label": i % 100} for i, row in enumerate(labelled(many))]
    prepare(prepared, "cifar100", "3.0.2", {"test": rows}, (32, 32, 3), 100)
    inputs, targets = data.cifar100_test()
    assert inputs.shape == (300, 32, 32, 3) and (np.bincount(targets) == 3).all()


def test_prepared_imagenette_is_squeezed(prepared):
    """Images of different shapes become squares; the left half stays left."""
    halves = [np.zeros((20 + i, 30, 3), np.uint8) for i in range(10)]
    for image in halves:
        image[:, 15:] = 200, 100, 50
    parts = {"train": labelled(halves), "validation": labelled(halves[:3])}
    prepare(prepared, "imagenette/160px-v2", "1.0.0", parts, (None, None, 3))
    splits = data.imagenette(pixels=12)
    assert [part[0].shape for part in splits[:3]] == [(n, 12, 12, 3) for n in (9, 1, 3)]
    assert (splits.test[0][:, :, :3] == 0).all()
    assert (splits.test[0][:, :, -3:] == (200, 100, 50)).all()


def test_prepared_text(prepared):
    cut = {"train": TEXT[:900], "validation": TEXT[900:950], "test": TEXT[950:]}
    parts = {part: [{"text": text}] for part, text in cut.items()}
    prepare(prepared, "tiny_shakespeare", "1.0.0", parts)
    splits = data.shakespeare("tiny_shakespeare", context=8)
    assert text_of(splits, splits.train[0]) == TEXT[: splits.train[0].size]


def test_mocked_sets(prepared, monkeypatch):
    """The names, splits and fields that TensorFlow Datasets itself declares."""
    tfds = pytest.importorskip("tensorflow_datasets", reason="tensorflow-datasets not installed")
    versions = {"cifar100": "3.0.2", "160px-v2": "1.0.0"}
    monkeypatch.setattr(sources, "_version", lambda path: versions.get(path.name, "3.0.1"))
    with tfds.testing.mock_data(num_examples=20, data_dir=str(prepared)):
        for splits in (data.mnist(), data.fashion_mnist()):
            assert [part[0].shape for part in splits[:3]] == [(n, 28, 28, 1) for n in (18, 2, 20)]
        assert data.cifar100_test()[0].shape == (20, 32, 32, 3)
        assert data.imagenette(pixels=8).train[0].shape == (18, 8, 8, 3)


def test_the_folder_comes_first_and_lacks_may_be_filled(folder, prepared):
    prepare(prepared, "mnist", "3.0.1", {"test": labelled(PICTURES[20:])}, (28, 28, 1))
    assert len(data.mnist_test()[0]) == 20
    grey_files(folder, "mnist")
    assert len(data.mnist_test()[0]) == 10


def test_newest_complete_version(tmp_path):
    info, part = "dataset_info.json", "x-test.array_record-00000-of-00001"
    for version, files in {
        "3.0.9": [info, part],
        "3.0.10": [info, part],
        "4.0.0": [info, part.replace("array_", "tf")],
        "5.0.0": [part],
        "6.0.0.incompleteABC": [info, part],
    }.items():
        (tmp_path / version).mkdir()
        for file in files:
            (tmp_path / version / file).touch()
    assert sources._version(tmp_path) == "3.0.10"


NOWHERE = {
    "mnist": "mnist/train-images-idx3-ubyte.gz",
    "mnist_test": "mnist/t10k-images-idx3-ubyte.gz",
    "cifar10": "cifar10/train_1.npz",
    "cifar100_test": "ood/cifar100_test_2000.npz",
    "imagenette": "imagenette/train_64.npz",
}


@pytest.mark.parametrize("is_set", [True, False])
def test_missing_data_say_how_to_get_them(folder, monkeypatch, is_set):
    """At once: TensorFlow Datasets, which would try for minutes, is not even imported."""
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    if not is_set:
        monkeypatch.delenv("OPTAX_SMILE_DATA")
    for name, file in NOWHERE.items():
        with pytest.raises(FileNotFoundError) as caught:
            getattr(data, name)()
        text, stem = str(caught.value), name.removesuffix("_test")
        assert f"No data for {stem}" in text and file in text
        assert ("OPTAX_SMILE_DATA" in text) and ("is not set" in text) != is_set
        assert f"`tfds build {stem}" in text and "--file_format=array_record`" in text
        assert "pip install tensorflow" in text and str(folder.parent / "prepared") in text
    with pytest.raises(FileNotFoundError, match="modern_shakespeare.txt.*has no public loader"):
        data.shakespeare()
    with pytest.raises(FileNotFoundError, match="tfds build tiny_shakespeare --file_format"):
        data.shakespeare("tiny_shakespeare")
    # Prepared, but TensorFlow Datasets is not installed.
    monkeypatch.setattr(sources, "_version", lambda path: "3.0.1")
    with pytest.raises(ImportError, match=r"mnist is prepared in .*'optax-smile\[data\]'"):
        data.mnist()
