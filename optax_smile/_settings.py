"""What a sampler was built with, for the manifest of a run."""

import contextlib
import dataclasses
import functools
import inspect
import json
import zlib
from collections.abc import Callable, Mapping
from contextvars import ContextVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _check
from optax_smile._types import Options, Tree, Unchecked

# Larger arrays are described by shape and checksum.
LARGEST_ARRAY = 16
# Depth to which nested functions, such as joined schedules, are described; `WHOLE` for checksums.
DEEPEST = 4
WHOLE = 16
_LISTENERS: ContextVar[tuple[Options, ...]] = ContextVar("listeners", default=())
# Settings of a run whose draws an optimizer made.
OPTIMIZER: Mapping[str, object] = {"name": "optimizer", "is_posterior": False}


class Sampler(optax.GradientTransformationExtraArgs):
    """An Optax transformation that knows how it was built.

    Attributes:
        name: of the function that built it.
        arguments: with which it was built, defaults included.
    """

    name = "sampler"
    arguments: Mapping[str, object] = {}

    def __new__(cls, init: Callable, update: Callable, name: str, arguments: Mapping[str, object]):
        built = super().__new__(cls, init, update)
        vars(built).update(name=name, arguments=arguments)
        return built

    def __repr__(self) -> str:
        written = (f"{name}={_check.written(value)}" for name, value in self.arguments.items())
        return f"{self.name}({', '.join(written)})"


def reporting(
    init: optax.TransformInitFn,
    settings: Mapping[str, object],
    of_params: Callable[[Tree], Mapping[str, object]] = lambda params: {},
) -> optax.TransformInitFn:
    """Make an `init` that reports settings to `of`, and others that depend on the parameters.

    Every wrapper of Optax calls the `init` of what it wraps.
    """

    def reported(params: optax.Params) -> Tree:
        for listener in _LISTENERS.get():
            listener.update({**settings, **of_params(params)})
        return init(params)

    return reported


def gradients_per_step(settings: Mapping[str, object] | None) -> int:
    """Return the number of gradients per step of a sampler with these settings."""
    return 2 if (settings or {}).get("integrator") == "minimal_norm" else 1


def are_posterior(settings: Mapping[str, object] | None) -> bool:
    """Whether draws with these settings may be posterior draws: no optimizer made them."""
    return bool((settings or {}).get("is_posterior", True))


def of(transformation: optax.GradientTransformation, params: optax.Params) -> Options | None:
    """Return the settings of a sampler, also inside `optax.chain` and similar wrappers.

    Args:
        transformation: sampler, or a wrapper of one.
        params: parameters of one chain, or their shapes.

    Returns:
        Name and arguments as JSON types; None without a sampler.
    """
    reports: Options = {}

    def numbers() -> dict[str, jax.Array]:
        """Only a compiled program knows what `optax.inject_hyperparams` injects."""
        before = _LISTENERS.set((reports,))
        try:
            transformation.init(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params))
        finally:
            _LISTENERS.reset(before)
        return {name: x for name, x in reports.items() if isinstance(x, jax.core.Tracer)}

    injected = jax.jit(numbers)()
    return {name: _describe(value) for name, value in (reports | injected).items()} or None


def functions(
    transformation: optax.GradientTransformation, params: optax.Params
) -> dict[str, Callable]:
    """Return the functions among the arguments of a sampler, such as `log_prior`, by name.

    Args:
        transformation: sampler, or what contains one.
        params: parameters of one chain, or their shapes.
    """
    reports: Options = {}
    before = _LISTENERS.set((reports,))
    try:
        jax.eval_shape(transformation.init, params)
    finally:
        _LISTENERS.reset(before)
    return {name: value for name, value in reports.items() if callable(value)}


def described(settings: Mapping[str, object] | None) -> Options | None:
    """Convert settings, possibly written by a user, to JSON types with a name."""
    if settings is None:
        return None
    named = {str(name): _describe(value) for name, value in settings.items()}
    return named if isinstance(named.get("name"), str) else {**named, "name": "a sampler"}


def checksum(transformation: tuple[object, ...]) -> str:
    """Compute a checksum of a whole transformation, such as a chain, or of other functions.

    It covers the names of functions and their closures, so it changes with Optax's version.
    """
    described = _describe(tuple(transformation), deepest=WHOLE)
    # Optax replaces some integers by floats of the same value when they are first used.
    numbers = jax.tree.map(lambda x: float(x) if isinstance(x, int) else x, described)
    return f"{zlib.crc32(json.dumps(numbers, sort_keys=True).encode()):08x}"


def _enclosed(function: object) -> list[object]:
    """Values of a function's closure; a variable that was never set has none."""
    values = []
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):
            values.append(cell.cell_contents)
    return values


def _describe(value: Unchecked, depth: int = 0, deepest: int = DEEPEST) -> Tree:
    """Convert a value to JSON types, the same in every process."""
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
        return (
            f"array {array.shape} {zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data):08x}"
        )
    if isinstance(value, (tuple, list)):
        return [_describe(entry, depth + 1, deepest) for entry in value]
    if isinstance(value, Mapping):
        return {str(name): _describe(entry, depth + 1, deepest) for name, entry in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = {"name": getattr(value, "name", type(value).__name__), **vars(value)}
        return _describe(named, depth, deepest)
    if isinstance(value, functools.partial):
        parts = value.func, value.args, value.keywords
        return [_describe(entry, depth + 1, deepest) for entry in parts]
    if callable(value):
        # Settings describe the functions of samplers, whose closures also hold caches.
        is_described = value.__module__.startswith("optax_smile.samplers.")
        enclosed = [*_enclosed(value)] if depth < deepest and not is_described else []
        if depth < deepest and inspect.ismethod(value):
            enclosed.append(getattr(value.__self__, "__dict__", None))
        inside = [_describe(entry, depth + 1, deepest) for entry in enclosed]
        return [
            f"{value.__module__}.{getattr(value, '__qualname__', type(value).__name__)}",
            inside,
        ]
    return type(value).__name__
