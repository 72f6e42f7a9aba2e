"""What a sampler was built with, for the manifest of a run."""

import contextlib
import functools
import inspect
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

Builder = TypeVar("Builder", bound=Callable)
# Larger arrays are described by shape and checksum.
LARGEST_ARRAY = 16
# Functions inside functions inside functions, such as joined schedules.
DEEPEST = 4
_NAME = "optax_smile_settings"


def recorded(build: Builder, **fixed: Any) -> Builder:
    """Let the transformation that a builder returns remember name, arguments and what is fixed."""

    @functools.wraps(build)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        transformation = build(*args, **kwargs)
        given = inspect.signature(build).bind(*args, **kwargs)
        given.apply_defaults()
        setattr(transformation.update, _NAME, {"name": build.__name__, **fixed, **given.arguments})
        return transformation

    return cast(Builder, wrapper)


def of(transformation: Any) -> dict[str, Any] | None:
    """Find what a sampler was built with, also inside `optax.chain` and its like.

    Returns:
        Name and arguments as JSON can hold them; None where Optax builds the sampler itself, as
        under `optax.inject_hyperparams`.
    """
    waiting, seen = [transformation], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if hasattr(node, _NAME):
            return {name: _describe(value) for name, value in getattr(node, _NAME).items()}
        if isinstance(node, (tuple, list)):
            waiting += node
        elif isinstance(node, Mapping):
            waiting += node.values()
        elif callable(node):
            waiting += _enclosed(node)
    return None


def _enclosed(function: Any) -> list[Any]:
    """Values of a function's closure; a variable that was never set has none."""
    values = []
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):
            values.append(cell.cell_contents)
    return values


def _describe(value: Any, depth: int = 0) -> Any:
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
        return f"array {array.shape} {zlib.crc32(np.ascontiguousarray(array).data):08x}"
    if isinstance(value, (tuple, list)):
        return [_describe(entry, depth + 1) for entry in value]
    if isinstance(value, Mapping):
        return {str(name): _describe(entry, depth + 1) for name, entry in value.items()}
    if callable(value):
        enclosed = _enclosed(value) if depth < DEEPEST else ()
        inside = [_describe(entry, depth + 1) for entry in enclosed]
        return [
            f"{value.__module__}.{getattr(value, '__qualname__', type(value).__name__)}",
            inside,
        ]
    return type(value).__name__
