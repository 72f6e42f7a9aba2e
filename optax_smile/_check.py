"""One form for every error: `` `psmile(step_size=...)` must be > 0, got -0.1. ``."""

import math
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.core
import jax.numpy as jnp
import numpy as np


def fail(where: str, argument: str, rule: str, got: Any, remedy: str = "") -> NoReturn:
    """Raise the ValueError of the house form."""
    message = f"`{where}({argument}=...)` must be {rule}, got {got}."
    raise ValueError(f"{message} {remedy}".rstrip())


def number(where: str, argument: str, value: Any, rule: str, holds: Callable[[float], bool]):
    """Require a scalar that satisfies `rule`; traced values pass unchecked."""
    if isinstance(value, jax.core.Tracer):
        return
    is_number = isinstance(value, (int, float, np.number, np.ndarray, jax.Array))
    if isinstance(value, bool) or not is_number or np.ndim(value) != 0:
        fail(where, argument, f"a number {rule}", repr(value))
    number = float(value)
    if math.isnan(number) or not holds(number):
        fail(where, argument, rule, repr(value))


def numbers(where: str, argument: str, value: Any, rule: str, holds: Callable[[Any], Any]):
    """Require a number, or an array of numbers, that satisfies `rule`; traced values pass."""
    if isinstance(value, (np.ndarray, jax.Array)) and np.ndim(value) > 0:
        if isinstance(value, jax.core.Tracer):
            return
        array = np.asarray(value)
        if not np.issubdtype(array.dtype, np.number) and array.dtype != jnp.bfloat16:
            fail(where, argument, f"numbers {rule}", f"an array of {array.dtype}")
        return _every(where, argument, array, rule, holds)
    number(where, argument, value, rule, holds)


def array(
    where: str,
    argument: str,
    value: Any,
    axes: str = "",
    *,
    like: tuple[str, tuple[int, ...]] | None = None,
    rule: str = "free of NaN",
    holds: Callable[[np.ndarray], np.ndarray] = lambda array: ~np.isnan(array),
    dtype: Any = float,
) -> np.ndarray:
    """Make an array on the host, not empty, whose every number satisfies `rule`.

    Args:
        where: the function that asks.
        argument: its argument.
        value: what it was given.
        axes: names of the axes, `"[input, class]"`; `"..."` stands for any more, `" or "` for a
            choice; empty: whatever they are.
        like: name and shape of an argument that this one has to go with.
        rule: in words.
        holds: `holds(array)`, where it is satisfied.
        dtype: None keeps that of the value.

    Raises:
        ValueError: the array is another one.
    """
    array = np.asarray(value, dtype)
    if not array.size or not any(_has_axes(array.ndim, one) for one in axes.split(" or ")):
        named = f"an array {axes}, not empty" if axes else "not empty"
        fail(where, argument, named, f"shape {array.shape}")
    if like is not None and array.shape != like[1]:
        fail(where, argument, f"of shape {like[1]} to go with `{like[0]}`", f"shape {array.shape}")
    _every(where, argument, array, rule, holds)
    return array


def _has_axes(number: int, axes: str) -> bool:
    names = axes.strip("[]").split(", ")
    return number >= len(names) - 1 if names[-1] in ("", "...") else number == len(names)


def _every(where: str, argument: str, array: np.ndarray, rule: str, holds: Callable[[Any], Any]):
    wrong = ~np.asarray(holds(array), bool)
    if wrong.any():
        place = tuple(np.argwhere(wrong)[0].tolist())
        fail(where, argument, rule, f"{array[place]} at {place}")


def positive(where: str, argument: str, value: Any):
    """Require a finite number above zero."""
    number(where, argument, value, "> 0 and finite", lambda x: 0 < x < math.inf)


def probability(where: str, argument: str, value: Any):
    """Require a number strictly between zero and one."""
    number(where, argument, value, "between 0 and 1 (exclusive)", lambda x: 0 < x < 1)


def whole(where: str, argument: str, value: Any, smallest: Any):
    """Require an integer of at least `smallest`; traced values pass unchecked."""
    if isinstance(value, jax.core.Tracer) or isinstance(smallest, jax.core.Tracer):
        return
    array = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.integer)
    is_whole = isinstance(value, (int, np.integer)) or array and value.ndim == 0
    if isinstance(value, bool) or not is_whole or value < smallest:
        fail(where, argument, f"an integer >= {smallest}", repr(value))


def choice(where: str, argument: str, value: Any, choices: Any):
    """Require one of the names in `choices`."""
    if not isinstance(value, str) or value not in choices:
        names = ", ".join(repr(name) for name in choices)
        fail(where, argument, f"one of {names}", repr(value))


def key(where: str, value: Any) -> jax.Array | None:
    """Make a typed key of one JAX key or an integer seed; None stays None.

    Many chains write theirs into the state, so that only a single key will do here.
    """
    if value is None:
        return None
    if isinstance(value, jax.Array):
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) and value.ndim == 0:
            return value
        if value.dtype == jnp.uint32 and value.ndim == 1:
            return jax.random.wrap_key_data(value)
    whole = jnp.issubdtype(getattr(value, "dtype", type(value)), jnp.integer) or type(value) is int
    if whole and jnp.ndim(value) == 0:
        return jax.random.key(value)
    fail(where, "key", "a JAX key such as jax.random.key(0), a single one, or a seed", repr(value))


def needed_key(where: str, value: Any, purpose: str = "") -> jax.Array:
    """Make a typed key as `key` does where there has to be one, such as `"for a jitter"`."""
    typed = key(where, value)
    if typed is None:
        rule = "a JAX key such as jax.random.key(0), or a seed"
        fail(where, "key", f"{rule} {purpose}".rstrip(), None)
    return typed
