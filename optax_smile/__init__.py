"""Turn any Optax training loop into a Bayesian sampler.

    tx = optax_smile.psmile(num_data=len(train), key=jax.random.key(0))  # was: optax.adamw(1e-3)

The public names, by what you want to do:

    replace an optimizer      psmile (the default), smile, mclmc, sgld, psgld, sghmc,
                              scale_adapted_sghmc, cyclical_sgld; published: as in the paper
    read a sampler's state    last_accepted (the current draw), stats, Stats
    update without params     tracked
    check your own loop       check, CheckReport; ArgumentError is what bad arguments raise
    sample without a loop     warmstart, then sample; chains_from_weights, parallel
    get draws from a fit()    recorded, RecordedSampler; interop: NumPyro, scikit-learn
    watch or steer a run      Run, an iterator over draws; select, Selection
    keep and read draws       Snapshots, StoredSnapshots, load_snapshots
    predict                   predict, Prediction, Outcome, Predictor, Likelihood
    judge                     diagnostics.summary, metrics, plots, report
    regular models            tall: little noise in the gradients of mini-batches
    sample around weights     local: strength of a prior, candidates for networks
    cold posteriors           cold_temperature
    set the step size         angle_tuner (the default), quantile_tuner
    precondition gradients    scale_by_gradient_noise
    parts of your own         Preconditioner, Tuner, Norm

`help(optax_smile.sample)` describes a function, its arguments and its errors. The pages in `docs/`
begin with `docs/start.md`.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from optax_smile import diagnostics, interop, local, metrics, parallel, plots, published, tall
from optax_smile._check import ArgumentError
from optax_smile._tracked import tracked
from optax_smile._version import __version__ as __version__
from optax_smile.chains.check import CheckReport, check
from optax_smile.chains.recorded import RecordedSampler, recorded
from optax_smile.chains.run import Run
from optax_smile.chains.sample import sample
from optax_smile.chains.select import Selection, select
from optax_smile.chains.warmstart import chains_from_weights, warmstart
from optax_smile.draws.likelihoods import Likelihood
from optax_smile.draws.predict import Predictor, predict
from optax_smile.draws.prediction import Outcome, Prediction
from optax_smile.draws.snapshots import Snapshots, StoredSnapshots, load_snapshots
from optax_smile.potential import cold_temperature
from optax_smile.samplers.cyclical_sgld import cyclical_sgld
from optax_smile.samplers.mclmc import mclmc
from optax_smile.samplers.scale_adapted_sghmc import scale_adapted_sghmc
from optax_smile.samplers.sghmc import sghmc
from optax_smile.samplers.sgld import psgld, sgld
from optax_smile.samplers.smile import psmile, smile
from optax_smile.stages.integrator import Norm
from optax_smile.stages.scale import Preconditioner, scale_by_gradient_noise
from optax_smile.stages.step_size import Tuner, angle_tuner, quantile_tuner
from optax_smile.state import Stats, last_accepted, stats

if TYPE_CHECKING:
    from optax_smile import report

__all__ = ["ArgumentError", "CheckReport", "Likelihood", "Norm", "Outcome", "Preconditioner"]
__all__ += ["Prediction", "Predictor", "RecordedSampler", "Run", "Selection", "Snapshots"]
__all__ += ["Stats", "StoredSnapshots", "Tuner", "angle_tuner", "chains_from_weights", "check"]
__all__ += ["cold_temperature", "cyclical_sgld", "diagnostics", "interop", "last_accepted"]
__all__ += ["load_snapshots", "local"]
__all__ += ["mclmc", "metrics", "parallel", "plots", "predict", "psgld", "psmile", "published"]
__all__ += ["quantile_tuner", "recorded", "report", "sample", "scale_adapted_sghmc"]
__all__ += ["scale_by_gradient_noise", "select", "sghmc", "sgld", "smile", "stats", "tall"]
__all__ += ["tracked", "warmstart"]


def __getattr__(name: str) -> ModuleType:
    """Import `report` when it is asked for: it is a command as well."""
    if name == "report":
        return importlib.import_module("optax_smile.report")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
