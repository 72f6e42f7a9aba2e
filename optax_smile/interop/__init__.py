"""Bridges to other libraries: models of NumPyro, estimators of scikit-learn."""

import importlib
from typing import TYPE_CHECKING, Any

from optax_smile.interop.numpyro_model import NumpyroModel, from_numpyro

if TYPE_CHECKING:
    from optax_smile.interop import estimators

__all__ = ["NumpyroModel", "estimators", "from_numpyro"]


def __getattr__(name: str) -> Any:
    """Import `estimators` when it is asked for: its classes are scikit-learn's."""
    if name != "estimators":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return importlib.import_module("optax_smile.interop.estimators")
    except ImportError as error:
        needs = "scikit-learn: pip install 'optax-smile[sklearn]'"
        raise ImportError(f"`optax_smile.interop.estimators` needs {needs}") from error
