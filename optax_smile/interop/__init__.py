"""Interfaces to other libraries: NumPyro models and scikit-learn estimators."""

import importlib
from typing import TYPE_CHECKING, Any

from optax_smile.interop.numpyro_model import NumpyroModel, from_numpyro

if TYPE_CHECKING:
    from optax_smile.interop import estimators

__all__ = ["NumpyroModel", "estimators", "from_numpyro"]


def __getattr__(name: str) -> Any:
    """Import `estimators` on first access, since it needs scikit-learn."""
    if name != "estimators":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return importlib.import_module("optax_smile.interop.estimators")
    except ImportError as error:
        needs = "scikit-learn: pip install 'optax-smile[sklearn]'"
        raise ImportError(f"`optax_smile.interop.estimators` needs {needs}") from error
