"""Sampling around trained weights: the precision of their prior, and candidates for `select`."""

from optax_smile.local.candidates import network_candidates
from optax_smile.local.precision import PrecisionSearch, fan_in_precision, local_precision

__all__ = [
    "PrecisionSearch",
    "fan_in_precision",
    "local_precision",
    "network_candidates",
]
