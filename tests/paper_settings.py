"""Settings of the paper for `smile` and `psmile`, but for the step size."""

from typing import Any

import optax_smile

PAPER: dict[str, Any] = {
    "integrator": "minimal_norm",
    "tuner": optax_smile.quantile_tuner(),
    "reject_quantile": 0.98,
    "decoherence_length": None,
    "key": None,
}
