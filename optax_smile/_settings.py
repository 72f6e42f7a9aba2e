"""What a sampler was built with, for the manifest of a run."""

import contextlib
import dataclasses
import functools
import inspect
import json
import zlib
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar, cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _check

Builder = TypeVar("Builder", bound=Callable)
CHOSEN = "chosen", "found"
# Larger arrays are described by shape and checksum.
LARGEST_ARRAY = 16
# Functions inside functions inside functions, such as joined schedules.
DEEPEST = 4
WHOLE = 16
_LISTENERS: ContextVar[tuple[dict[str, Any], ...]] = ContextVar("listeners", default=())
# What a run has in place of a sampler's settings where an optimizer made its draws.
OPTIMIZER: Mapping[str, Any] = {"name": "optimizer", "is_posterior": False}


class Sampler(optax.GradientTransformationExtraArgs):
    """An Optax transformation that knows how it was built.

    Attributes:
        name: of the function that built it.
        arguments: with which it was built, defaults included.
        chosen: arguments that the function chose itself.
        found: arguments that depend on the parameters, a function of these.
    """

    name = "sampler"
    arguments: Mapping[str, Any] = {}
    chosen: Mapping[str, Any] = {}
    found: Callable[[Any], Mapping[str, Any]] = staticmethod(lambda params: {})

    def __new__(cls, init: Callable, update: Callable, **told: Any):
        built = super().__new__(cls, init, update)
        vars(built).update(told)
        return built

    def __repr__(self) -> str:
        written = (f"{name}={_check.written(value)}" for name, value in self.arguments.items())
        return f"{self.name}({', '.join(written)})"


def recorded(build: Builder, **fixed: Any) -> Builder:
    """Let the transformation that a builder returns know its name and arguments.

    In `init`, which every wrapper of Optax calls, it also tells them to whoever asks with `of`.

    Args:
        build: function that returns a transformation.
        fixed: arguments that it has no parameter for.
    """
    signature = inspect.signature(build)

    @functools.wraps(build)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        built = build(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        chosen, found = (getattr(built, name, getattr(Sampler, name)) for name in CHOSEN)
        arguments = {name: chosen.get(name, x) for name, x in given.arguments.items()}
        settings = {"name": build.__name__, **fixed, **arguments}
        init = telling(built.init, lambda params: {**settings, **found(params)})
        return Sampler(init, built.update, name=build.__name__, arguments=arguments)

    return cast(Builder, wrapper)


def telling(
    init: Callable[..., Any], settings: Callable[[Any], Mapping[str, Any]]
) -> Callable[..., Any]:
    """Let the `init` of a transformation tell settings, a function of the parameters, to `of`."""

    def told(params: Any) -> Any:
        for listener in _LISTENERS.get():
            listener.update(settings(params))
        return init(params)

    return told


def are_posterior(settings: Mapping[str, Any] | None) -> bool:
    """Whether draws with these settings may come from a posterior: no optimizer made them."""
    return (settings or {}).get("is_posterior", True)


def of(transformation: optax.GradientTransformation, params: Any) -> dict[str, Any] | None:
    """Ask a sampler what it was built with, also inside `optax.chain` and its like.

    Args:
        transformation: sampler, or what contains one.
        params: parameters of one chain, or their shapes.

    Returns:
        Name and arguments as JSON can hold them; None without a sampler.
    """
    heard: dict[str, Any] = {}

    def numbers() -> dict[str, jax.Array]:
        """What `optax.inject_hyperparams` injects is known to a compiled program alone."""
        before = _LISTENERS.set((heard,))
        try:
            transformation.init(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params))
        finally:
            _LISTENERS.reset(before)
        return {name: x for name, x in heard.items() if isinstance(x, jax.core.Tracer)}

    injected = jax.jit(numbers)()
    return {name: _describe(value) for name, value in (heard | injected).items()} or None


def functions(
    transformation: optax.GradientTransformation, params: optax.Params
) -> dict[str, Callable]:
    """Return the functions among the arguments of a sampler, such as `log_prior`, by name.

    Args:
        transformation: sampler, or what contains one.
        params: parameters of one chain, or their shapes.
    """
    heard: dict[str, Any] = {}
    before = _LISTENERS.set((heard,))
    try:
        jax.eval_shape(transformation.init, params)
    finally:
        _LISTENERS.reset(before)
    return {name: value for name, value in heard.items() if callable(value)}


def described(settings: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Put settings that a user may have written into JSON, with a name."""
    if settings is None:
        return None
    told = {str(name): _describe(value) for name, value in settings.items()}
    return told if isinstance(told.get("name"), str) else {**told, "name": "a sampler"}


def checksum(transformation: tuple[Any, ...]) -> str:
    """Tell a whole transformation, such as a chain, from another, or other functions.

    It goes by the names of functions and by what they enclose, which hangs on the version of Optax.
    """
    described = _describe(tuple(transformation), deepest=WHOLE)
    # Optax makes some whole numbers others of the same value when they are first used.
    told = jax.tree.map(lambda x: float(x) if isinstance(x, int) else x, described)
    return f"{zlib.crc32(json.dumps(told, sort_keys=True).encode()):08x}"


def _enclosed(function: Any) -> list[Any]:
    """Values of a function's closure; a variable that was never set has none."""
    values = []
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):
            values.append(cell.cell_contents)
    return values


def _describe(value: Any, depth: int = 0, deepest: int = DEEPEST) -> Any:
    """Put a value into JSON, the same in every process."""
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
        # What samplers are made of their settings tell; they also keep what they have seen.
        is_told = value.__module__.startswith("optax_smile.samplers.")
        enclosed = [*_enclosed(value)] if depth < deepest and not is_told else []
        if depth < deepest and inspect.ismethod(value):
            enclosed.append(getattr(value.__self__, "__dict__", None))
        inside = [_describe(entry, depth + 1, deepest) for entry in enclosed]
        return [
            f"{value.__module__}.{getattr(value, '__qualname__', type(value).__name__)}",
            inside,
        ]
    return type(value).__name__
