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
        wrong = ~np.asarray(holds(array), bool)
        if wrong.any():
            place = tuple(int(i) for i in np.argwhere(wrong)[0])
            fail(where, argument, rule, f"{array[place]} at {place}")
        return
    number(where, argument, value, rule, holds)


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
