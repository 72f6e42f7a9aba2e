"""All public samplers, found by listing the folder, and valid values of their arguments."""

import dataclasses
import functools
import importlib
import inspect
import pkgutil
from typing import Any

import optax_smile
from optax_smile import _settings, samplers

settings_of = _settings.of


def accepts(fn, *names):
    return set(names) <= set(inspect.signature(fn).parameters)


def find_samplers():
    for info in pkgutil.iter_modules(samplers.__path__, "optax_smile.samplers."):
        for name, fn in vars(importlib.import_module(info.name)).items():
            is_own = inspect.isfunction(fn) and fn.__module__ == info.name
            if is_own and name != "build" and accepts(fn, "step_size", "num_data"):
                yield name, fn


@functools.wraps(optax_smile.psmile)
def quick_psmile(*args, **arguments):
    """Make `psmile`, but measure the scale within the few calls of a test."""
    scale: Any = inspect.unwrap(optax_smile.psmile)(*args, **arguments)
    scale = dataclasses.replace(scale, first_window=4)
    arguments.pop("largest_matrix", None)
    return optax_smile.smile(*args, **arguments, preconditioner=scale)


SAMPLERS = dict(find_samplers())
# Samplers of the Langevin family.
LANGEVIN = [name for name, fn in SAMPLERS.items() if not accepts(fn, "integrator")]
# A valid value for each argument that has a range; all others keep their default.
VALID: dict[str, Any] = {
    "step_size": 1e-2,
    "num_data": 100,
    "decoherence_length": None,
    "integrator": "leapfrog",
    "square_decay": 0.9,
    "friction": 0.1,
    "adapt_steps": 3,
    "total_steps": 8,
    "num_cycles": 2,
    "exploration": 0.5,
    "largest_matrix": 10,
    "tuner": optax_smile.quantile_tuner(),
    "reject_quantile": 0.9,
    "preconditioner": optax_smile.Preconditioner(),
}
# Values for those without a default.
NEEDED = VALID | {"decoherence_length": 1.0}


def valid_arguments(fn, **given):
    """A valid value for each argument of a sampler."""
    valid = {
        name: (NEEDED if x.default is x.empty else VALID).get(name, x.default)
        for name, x in inspect.signature(fn).parameters.items()
    }
    return valid | given
