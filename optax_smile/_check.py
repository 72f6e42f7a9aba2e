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


def key(where: str, value: Any):
    """Require one JAX key or None; many chains write theirs into the state."""
    if value is None:
        return
    typed = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    raw = isinstance(value, jax.Array) and value.dtype == jnp.uint32
    if not (typed and value.ndim == 0 or raw and value.ndim == 1):
        fail(where, "key", "a JAX key such as jax.random.key(0), a single one", repr(value))
