"""Turn any Optax training loop into a Bayesian sampler."""

from optax_smile import metrics
from optax_smile._state import last_accepted, stats
from optax_smile.predict import Likelihood, Prediction, predict
from optax_smile.samplers.smile import psmile, psmile_naive, smile, smile_naive
from optax_smile.sampling import sample
from optax_smile.snapshots import Snapshots
from optax_smile.stages.preconditioner import scale_by_gradient_noise
from optax_smile.stages.tuner import quantile_tuner
from optax_smile.warmstart import warmstart

__version__ = "0.1.0"

__all__ = [
    "Likelihood",
    "Prediction",
    "Snapshots",
    "last_accepted",
    "metrics",
    "predict",
    "psmile",
    "psmile_naive",
    "quantile_tuner",
    "sample",
    "scale_by_gradient_noise",
    "smile",
    "smile_naive",
    "stats",
    "warmstart",
]
