"""Sampling around trained weights: prior precision, learning coefficient, influence of examples."""

from optax_smile.local.candidates import network_candidates
from optax_smile.local.coefficient import Finding, LearningCoefficient, llc
from optax_smile.local.covariances import influence
from optax_smile.local.precision import PrecisionSearch, fan_in_precision, local_precision

__all__ = [
    "Finding",
    "LearningCoefficient",
    "PrecisionSearch",
    "fan_in_precision",
    "influence",
    "llc",
    "local_precision",
    "network_candidates",
]
