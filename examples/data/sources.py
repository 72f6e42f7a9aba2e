"""Where data sets come from: a folder, or what TensorFlow Datasets has prepared.

The folder is that of the environment variable `OPTAX_SMILE_DATA`. A set that it lacks is read from
`TFDS_DATA_DIR` (else `~/tensorflow_datasets`), if it was prepared there as array_record, which can
be read without TensorFlow. Nothing is downloaded: what is in neither place is an error at once.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any


def files(*names: str) -> list[Path] | None:
    """Files of the folder, or None unless all are there."""
    folder = os.environ.get("OPTAX_SMILE_DATA")
    paths = [Path(folder, name) for name in names] if folder else []
    return paths if paths and all(path.is_file() for path in paths) else None


def missing(name: str, file: str, remedy: str) -> FileNotFoundError:
    """What is raised for a data set that is nowhere."""
    folder = os.environ.get("OPTAX_SMILE_DATA")
    state = f"is {folder}, without it" if folder else "is not set"
    return FileNotFoundError(
        f"No data for {name}: OPTAX_SMILE_DATA, which names a folder with {file}, {state}; {remedy}"
    )


def prepared(name: str, file: str, split: str, read: Callable[[Any], Any]) -> list[Any]:
    """Read a split that TensorFlow Datasets has prepared.

    Args:
        name: of the set there, with its configuration.
        file: what the folder would have had, for the error.
        split: such as "test" or "train[:100]".
        read: what to keep of an example, which is a dict.

    Raises:
        FileNotFoundError: the set is not prepared; the text says how to.
        ImportError: it is, but TensorFlow Datasets is not installed.
    """
    root = Path(os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()
    version = _version(root / name)
    if version is None:
        raise missing(
            name,
            file,
            f"TensorFlow Datasets has not prepared it in {root} (TFDS_DATA_DIR). Nothing is"
            f" downloaded here: `tfds build {name} --file_format=array_record` does that, with"
            " `pip install tensorflow tensorflow-datasets importlib_resources`.",
        )
    try:
        import tensorflow_datasets
    except ImportError as error:
        raise ImportError(
            f"{name} is prepared in {root}; to read it: pip install 'optax-smile[data]'."
        ) from error
    source: Any = tensorflow_datasets.data_source(
        f"{name}:{version}", split=split, data_dir=root, download=False
    )
    return [read(source[i]) for i in range(len(source))]


def _version(folder: Path) -> str | None:
    """Newest version below a set's folder that is complete and stored as array_record.

    Looked up by hand, because TensorFlow Datasets asks the network for what is not there, and
    without network tries for minutes.
    """
    found = [
        path.parent
        for path in folder.glob("*/dataset_info.json")
        if re.fullmatch(r"\d+\.\d+\.\d+", path.parent.name)
        and any(path.parent.glob("*.array_record*"))
    ]
    numbers = {tuple(int(part) for part in path.name.split(".")): path.name for path in found}
    return numbers[max(numbers)] if numbers else None
