"""Interfaces to other libraries: NumPyro models and scikit-learn estimators."""

import importlib
from typing import TYPE_CHECKING

from optax_smile import _check

if TYPE_CHECKING:
    from optax_smile.interop import estimators
    from optax_smile.interop.numpyro_model import NumpyroModel, from_numpyro

__all__ = ["NumpyroModel", "estimators", "from_numpyro"]


def __getattr__(name: str) -> object:
    """Import modules that need another library on first access."""
    if name == "estimators":
        with _check.needed("`optax_smile.interop.estimators` needs scikit-learn", "sklearn"):
            return importlib.import_module("optax_smile.interop.estimators")
    if name in ("NumpyroModel", "from_numpyro"):
        with _check.needed(f"`optax_smile.interop.{name}` needs NumPyro", "numpyro"):
            return getattr(importlib.import_module("optax_smile.interop.numpyro_model"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
