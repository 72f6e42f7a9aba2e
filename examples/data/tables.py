"""Regression on tables of the UCI repository."""

from typing import Any

import numpy as np

from data import sources
from data.batches import Splits

# All columns but the last are features, the last one is the target.
FILES = {
    "energy": "energy.data",
    "airfoil": "airfoil.data",
    "concrete": "concrete.txt",
    "bikesharing": "bikesharing.data",
    "kin8nm": "kin8nm.txt.gz",
    "naval": "naval-propulsion-plant.txt.gz",
    "power": "power-plant.txt",
    "protein": "protein-tertiary-structure.txt.gz",
    "wine": "wine-quality-red.txt",
    "yacht": "yacht.txt",
}
# Where the same table is on OpenML.
OPENML = {
    "energy": "energy_efficiency",
    "airfoil": "airfoil_self_noise",
    "concrete": "concrete_compressive_strength",
    "kin8nm": "kin8nm",
}
# A second target comes last.
TWO_TARGETS = ("naval",)


def uci(name: str, seed: int = 0, download: bool = False) -> Splits:
    """70 % to train, 10 % and 20 %, standardized by the training part.

    Args:
        name: of `FILES`, or "diabetes", which comes with scikit-learn.
        seed: of the split, that which scikit-learn's `train_test_split` makes by it.
        download: whether to ask OpenML for a table that is not in the folder, or to fail.

    Returns:
        Features `[row, feature]` and targets `[row]`, float32. A column that is constant in the
        training part is only centred.

    Raises:
        FileNotFoundError: the table is not to be had.
    """
    if name not in (*FILES, "diabetes"):
        raise ValueError(f"`uci(name=...)` must be one of {[*FILES, 'diabetes']}, got {name!r}.")
    table = _read(name, download)
    # A fifth, and an eighth of what is left, both rounded up.
    rest, test = _split(table, -(-len(table) // 5), seed)
    train, valid = _split(rest, -(-len(rest) // 8), seed)
    center = np.mean(train, axis=0)
    scale = np.where(np.ptp(train, axis=0) > 0, np.std(train, axis=0), 1.0)
    parts = ((part - center) / scale for part in (train, valid, test))
    train, valid, test = (
        (part[:, :-1].astype(np.float32), part[:, -1].astype(np.float32)) for part in parts
    )
    return Splits(train, valid, test)


def _split(table: np.ndarray, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split off `count` rows, the same ones as scikit-learn."""
    order = np.random.RandomState(seed).permutation(len(table))
    return table[order[count:]], table[order[:count]]


def _read(name: str, download: bool) -> np.ndarray:
    """Features and target `[row, column]`."""
    if name == "diabetes":
        from sklearn.datasets import load_diabetes

        features, targets = load_diabetes(return_X_y=True)
        return _joined(features, targets)
    file = f"uci/{FILES[name]}"
    if paths := sources.files(file):
        table = np.loadtxt(paths[0])
        return table[:, :-1] if name in TWO_TARGETS else table
    remedy = f"Set OPTAX_SMILE_DATA to a folder with {file}"
    if name not in OPENML:
        told = f"No data for {name}, which is not on OpenML in this form. {remedy}"
        raise FileNotFoundError(told)
    if not download:
        told = f"No data for {name}. `download=True` (`--download`) asks OpenML for it. {remedy}"
        raise FileNotFoundError(told)
    from sklearn.datasets import fetch_openml

    try:
        features, targets = fetch_openml(
            OPENML[name], version=1, return_X_y=True, as_frame=False, parser="liac-arff"
        )
    except OSError as error:
        raise FileNotFoundError(
            f"No data for {name}: OpenML cannot be reached ({error}). {remedy}"
        ) from error
    return _joined(features, targets)


def _joined(features: Any, targets: Any) -> np.ndarray:
    return np.column_stack([np.asarray(features, float), np.asarray(targets, float)])
