"""The arguments of a sampler, for the manifest of a run."""

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _disk
from optax_smile._types import Options

LARGEST_ARRAY = 16  # Larger arrays are described by shape and checksum.
_REPORTS: ContextVar[dict[str, object] | None] = ContextVar("reports", default=None)
# Settings of a run whose draws an optimizer made.
OPTIMIZER: Mapping[str, object] = {"name": "optimizer", "is_posterior": False}
# Settings of draws that were selected by index.
CHOSEN: Mapping[str, object] = {"name": "chosen draws", "is_posterior": False}


def reporting(init: optax.TransformInitFn, settings: Mapping[str, object]) -> optax.TransformInitFn:
    """Make an `init` that reports settings to `of`; wrappers of Optax call what they wrap."""

    def reported(params: optax.Params) -> optax.OptState:
        _report(settings)
        return init(params)

    return reported


def _report(settings: Mapping[str, object]):
    """Report settings; not a closure, since a pickled sampler must not hold a context variable."""
    if (reports := _REPORTS.get()) is not None:
        reports.update(settings)


def are_posterior(settings: Mapping[str, object] | None) -> bool:
    """Whether draws with these settings may be posterior draws: no optimizer made them."""
    return bool((settings or {}).get("is_posterior", True))


def origin(settings: Mapping[str, object] | None) -> str:
    """Say where draws come from that are not posterior draws."""
    return "draws chosen by their indices" if settings == CHOSEN else "iterates of an optimizer"


def of(transformation: optax.GradientTransformation, params: optax.Params) -> Options | None:
    """Return name and arguments of a sampler, also in a wrapper, as JSON types; None if none."""
    return {x: _describe(value) for x, value in given(transformation, params).items()} or None


def given(transformation: optax.GradientTransformation, params: optax.Params) -> Options:
    """Return name and arguments of a sampler, also in a wrapper; empty if there is no sampler."""

    def numbers() -> dict[str, jax.Array]:
        """Return values of `optax.inject_hyperparams`, which only compiled code knows."""
        transformation.init(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params))
        return {name: x for name, x in reports.items() if isinstance(x, jax.core.Tracer)}

    reports: dict[str, object] = {}
    before = _REPORTS.set(reports)
    try:
        injected = jax.jit(numbers)() if jax.eval_shape(numbers) else {}
    finally:
        _REPORTS.reset(before)
    return reports | injected


def _describe(value: Any) -> object:
    """Convert a value to JSON types, the same in every process; functions to their names."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(value)).tolist()
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        if isinstance(value, jax.core.Tracer):
            return f"traced {value.shape}"
        array = np.asarray(value)
        if array.size <= LARGEST_ARRAY:
            return array.tolist()
        return f"array {array.shape} {_disk.checksum(array.tobytes())}"
    if isinstance(value, (tuple, list)):
        return [_describe(entry) for entry in value]
    if isinstance(value, Mapping):
        return {str(name): _describe(entry) for name, entry in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _describe({"name": getattr(value, "name", type(value).__name__), **vars(value)})
    if isinstance(value, functools.partial):
        return [_describe(x) for x in (value.func, value.args, value.keywords)]
    if callable(value):
        value = value if inspect.ismethod(value) else inspect.unwrap(value)
        return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__name__)}"
    return type(value).__name__
