"""What a sampler was built with, for the manifest of a run."""

import contextlib
import dataclasses
import functools
import inspect
import json
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _check, _disk
from optax_smile._types import Options, Tree, Unchecked

# Larger arrays are described by shape and checksum.
LARGEST_ARRAY = 16
# Depth to which nested functions, such as joined schedules, are described.
DEEPEST = 4
# Folders of installed packages.
INSTALLED = {"site-packages", "dist-packages"}
_REPORTS: ContextVar[Options | None] = ContextVar("reports", default=None)
# Settings of a run whose draws an optimizer made.
OPTIMIZER: Mapping[str, object] = {"name": "optimizer", "is_posterior": False}


def reporting(
    init: optax.TransformInitFn,
    settings: Mapping[str, object],
    of_params: Callable[[Tree], Mapping[str, object]] = lambda params: {},
) -> optax.TransformInitFn:
    """Make an `init` that reports settings to `of`, and others that depend on the parameters.

    Every wrapper of Optax calls the `init` of what it wraps.
    """

    def reported(params: optax.Params) -> Tree:
        _report(settings, of_params, params)
        return init(params)

    return reported


def _report(settings: Mapping[str, object], of_params: Callable, params: optax.Params):
    """Apart from `reporting`: a sampler that is pickled may not hold a context variable."""
    if (reports := _REPORTS.get()) is not None:
        reports.update({**settings, **of_params(params)})


@contextlib.contextmanager
def _listening() -> Iterator[Options]:
    """Collect what `reporting` reports."""
    reports: Options = {}
    before = _REPORTS.set(reports)
    try:
        yield reports
    finally:
        _REPORTS.reset(before)


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

    def numbers() -> dict[str, jax.Array]:
        """Only a compiled program knows what `optax.inject_hyperparams` injects."""
        transformation.init(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params))
        return {name: x for name, x in reports.items() if isinstance(x, jax.core.Tracer)}

    with _listening() as reports:
        injected = jax.jit(numbers)()
    return {name: _describe(value) for name, value in (reports | injected).items()} or None


def functions(
    transformation: optax.GradientTransformation, params: optax.Params
) -> dict[str, Callable]:
    """Return the functions among the arguments of a sampler, such as `log_prior`, by name."""
    with _listening() as reports:
        jax.eval_shape(transformation.init, params)
    return {name: value for name, value in reports.items() if callable(value)}


def described(settings: Mapping[str, object] | None) -> Options | None:
    """Convert settings, possibly written by a user, to JSON types with a name."""
    if settings is None:
        return None
    named = {str(name): _describe(value) for name, value in settings.items()}
    return named if isinstance(named.get("name"), str) else {**named, "name": "a sampler"}


def checksum(value: object) -> str:
    """Compute a checksum of a function, of a transformation or of arrays.

    It covers the values that functions enclose and, unless they are part of an installed package,
    their code and the values and functions that this uses. Code depends on the version of Python.
    """
    return _disk.checksum(json.dumps(_parts(value, [])))


def _parts(value: Unchecked, seen: list[object]) -> list[object]:
    """List the parts of a value, and of the values that it uses."""
    value = inspect.unwrap(value) if callable(value) else value
    if isinstance(value, (int, float)):
        # Optax replaces some integers by floats of the same value when they are first used.
        return [float(value)]
    if value is None or isinstance(value, (str, np.ndarray, np.generic, jax.Array)):
        return [_describe(value)]
    for number, one in enumerate(seen):
        if one is value:
            return [number]
    seen.append(value)
    own: list[object] = [getattr(value, "__qualname__", type(value).__qualname__)]
    inside: Iterable[object] = ()
    if isinstance(value, functools.partial):
        inside = value.func, value.args, value.keywords
    elif isinstance(value, types.MethodType):
        held = value.__self__
        inside = value.__func__, held if isinstance(held, tuple) else getattr(held, "__dict__", {})
    elif isinstance(value, types.FunctionType) and not _is_of_sampler(value):
        inside = *_enclosed(value), *(value.__defaults__ or ())
        is_ours = str(value.__module__).startswith("optax_smile.")
        if not is_ours and not INSTALLED & set(Path(value.__code__.co_filename).parts):
            names = _read_code(value.__code__, value.__doc__, own)
            used = (value.__globals__[name] for name in names if name in value.__globals__)
            inside = *inside, *used
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inside = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    elif isinstance(value, (list, tuple)):
        inside = value
    elif isinstance(value, Mapping):
        names = sorted(value, key=str)
        own.append([*map(str, names)])
        inside = [value[name] for name in names]
    return [*own, *(_parts(x, seen) for x in inside)]


def _read_code(code: types.CodeType, doc: str | None, own: list[object]) -> list[str]:
    """Append what code does, with functions defined in it; return the names that it uses."""
    names = [*code.co_names]
    own.append(code.co_code.hex())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _read_code(constant, None, own)
        elif isinstance(constant, frozenset):
            own.append(sorted(map(repr, constant)))
        elif constant != doc:
            own.append(repr(constant))
    return names


def _is_of_sampler(function: Callable) -> bool:
    """Whether settings describe a function, whose closure also holds caches."""
    return str(function.__module__).startswith("optax_smile.samplers.")


def _enclosed(function: object) -> list[object]:
    """Values of a function's closure; a variable that was never set has none."""
    values = []
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):
            values.append(cell.cell_contents)
    return values


def _describe(value: Unchecked, depth: int = 0) -> Tree:
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
        return f"array {array.shape} {_disk.checksum(array)}"
    if isinstance(value, (tuple, list)):
        return [_describe(entry, depth + 1) for entry in value]
    if isinstance(value, Mapping):
        return {str(name): _describe(entry, depth + 1) for name, entry in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = {"name": getattr(value, "name", type(value).__name__), **vars(value)}
        return _describe(named, depth)
    if isinstance(value, functools.partial):
        return [_describe(x, depth + 1) for x in (value.func, value.args, value.keywords)]
    if callable(value):
        name = f"{value.__module__}.{getattr(value, '__qualname__', type(value).__name__)}"
        if depth == DEEPEST or _is_of_sampler(value):
            return [name, []]
        enclosed = [*_enclosed(value)]
        if inspect.ismethod(value):
            enclosed.append(getattr(value.__self__, "__dict__", None))
        return [name, [_describe(entry, depth + 1) for entry in enclosed]]
    return type(value).__name__
