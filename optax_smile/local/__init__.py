"""Sampling around trained weights: precisions of priors, and candidates for `select`."""

from optax_smile.local.candidates import network_candidates
from optax_smile.local.precision import curvature_precision, norm_precision

__all__ = ["curvature_precision", "network_candidates", "norm_precision"]
