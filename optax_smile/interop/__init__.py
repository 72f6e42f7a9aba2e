"""Bridges to other libraries: models of NumPyro."""

from optax_smile.interop.numpyro_model import NumpyroModel, from_numpyro

__all__ = ["NumpyroModel", "from_numpyro"]
