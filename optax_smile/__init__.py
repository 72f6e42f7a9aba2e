"""Turn any Optax training loop into a Bayesian sampler."""

from optax_smile._state import last_accepted, stats
from optax_smile.samplers.smile import psmile, psmile_naive, smile, smile_naive
from optax_smile.stages.preconditioner import scale_by_gradient_noise
from optax_smile.stages.tuner import quantile_tuner

__version__ = "0.1.0"

__all__ = [
    "last_accepted",
    "psmile",
    "psmile_naive",
    "quantile_tuner",
    "scale_by_gradient_noise",
    "smile",
    "smile_naive",
    "stats",
]
