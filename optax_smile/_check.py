"""One form for every error: `` `psmile(step_size=...)` must be > 0, got -0.1. ``."""

import contextlib
import inspect
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

# Counters are int32.
LARGEST_WHOLE = 2**31 - 1
# Letters of a value that an error shows.
LONGEST = 200
_CALLED: ContextVar[tuple[tuple[str, tuple[str, ...], dict[str, str]], ...]] = ContextVar(
    "called", default=()
)


@contextlib.contextmanager
def called(where: str, *parts: str, **arguments: str) -> Iterator[None]:
    """Let errors of functions that another one calls speak of the one that the user called.

    Args:
        where: the function that the user called.
        parts: functions that it calls.
        arguments: what their arguments are called there, such as `tree="params"`.
    """
    token = _CALLED.set((*_CALLED.get(), (where, parts, arguments)))
    try:
        yield
    finally:
        _CALLED.reset(token)


def fail(where: str, argument: str, rule: str, got: Any, remedy: str = "") -> NoReturn:
    """Raise the ValueError of the house form."""
    for name, parts, arguments in reversed(_CALLED.get()):
        if where in parts:
            where, argument = name, arguments.get(argument, argument)
    message = f"`{where}({argument}=...)` must be {rule}, got {got}."
    raise ValueError(f"{message} {remedy}".rstrip())


def show(value: Any) -> str:
    """Tell in a few words what was given."""
    if isinstance(value, (np.ndarray, jax.Array)):
        traced = "a traced " if isinstance(value, jax.core.Tracer) else ""
        return f"{traced}{value.dtype}{list(value.shape)}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)[:LONGEST]
    return f"a {type(value).__name__}"


def _repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST else show(value)


def is_real(dtype: Any) -> bool:
    """Tell integers and floating-point numbers, of half precision as well, from everything else."""
    return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)


def number(
    where: str,
    argument: str,
    value: Any,
    rule: str,
    holds: Callable[[float], bool],
    *,
    traced: bool = True,
    large: bool = False,
):
    """Require a scalar that satisfies `rule`.

    Args:
        where: the function that asks.
        argument: its argument.
        value: what it was given.
        rule: in words.
        holds: `holds(value)`, whether it is satisfied.
        traced: whether traced values pass, unchecked.
        large: whether integers beyond those of JAX do.
    """
    if isinstance(value, jax.core.Tracer) and traced and value.ndim == 0:
        return
    is_number = not isinstance(value, (bool, jax.core.Tracer))
    is_number &= is_real(getattr(value, "dtype", type(value) if is_number else bool))
    if not is_number or np.ndim(value) != 0:
        fail(where, argument, f"a number {rule}", _repr(value))
    try:
        number = float(value)
    except OverflowError:
        number = math.copysign(math.inf, value)
    if math.isnan(number) or not holds(number):
        fail(where, argument, rule, _repr(value))
    if isinstance(value, int) and abs(value) > LARGEST_WHOLE and not large:
        fail(where, argument, f"{rule}, a float beyond {LARGEST_WHOLE}", _repr(value))


def numbers(where: str, argument: str, value: Any, rule: str, holds: Callable[[Any], Any]):
    """Require a number, or an array of numbers, that satisfies `rule`; traced values pass."""
    if isinstance(value, (np.ndarray, jax.Array)) and np.ndim(value) > 0:
        if not is_real(value.dtype):
            fail(where, argument, f"numbers {rule}", f"an array of {value.dtype}")
        if isinstance(value, jax.core.Tracer):
            return
        return _every(where, argument, np.asarray(value), rule, holds)
    number(where, argument, value, rule, holds)


def host(where: str, argument: str, value: Any) -> np.ndarray:
    """Make an array of real numbers or booleans on the host of what is one."""
    found = None
    if not isinstance(value, (jax.core.Tracer, Mapping)):
        # Ragged lists, and what is no array at all.
        with contextlib.suppress(ValueError, TypeError):
            found = np.asarray(value)
    if found is None or found.dtype == object:
        fail(where, argument, "an array of numbers", show(value))
    if not is_real(found.dtype) and found.dtype != bool:
        fail(where, argument, "an array of numbers", f"an array of {found.dtype}")
    return found


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
    array = host(where, argument, value)
    array = array if dtype is None else array.astype(dtype)
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


def _precision() -> np.finfo:
    """What JAX makes of a number: float32, unless x64 is on."""
    return np.finfo(jax.dtypes.canonicalize_dtype(np.float64))


def smallest() -> float:
    """The smallest number that is not zero in JAX, which knows no denormal ones."""
    return float(_precision().tiny)


def largest() -> float:
    """The largest number that is finite in JAX."""
    return float(_precision().max)


def nonnegative(where: str, argument: str, value: Any, *, traced: bool = True):
    """Require a number that is zero or more, and finite as JAX holds it."""
    number(where, argument, value, ">= 0 and finite", lambda x: 0 <= x <= largest(), traced=traced)


def is_finite(number: Any) -> Any:
    """Whether a number is finite as JAX holds it, too."""
    return abs(number) <= largest()


def positive(where: str, argument: str, value: Any, *, traced: bool = True):
    """Require a number that is above zero and finite, as JAX holds it, too."""
    rule = f"> 0 and finite in {_precision().dtype}"
    number(where, argument, value, rule, lambda x: smallest() <= x <= largest(), traced=traced)


def probability(where: str, argument: str, value: Any, *, traced: bool = True):
    """Require a number strictly between zero and one."""
    rule = "between 0 and 1 (exclusive)"
    number(where, argument, value, rule, lambda x: smallest() <= x < 1, traced=traced)


def whole(where: str, argument: str, value: Any, smallest: Any, *, traced: bool = False):
    """Require an integer of at least `smallest`; traced values pass unchecked if they may."""
    if traced and any(isinstance(x, jax.core.Tracer) for x in (value, smallest)):
        return
    is_whole = not isinstance(value, (bool, jax.core.Tracer))
    is_whole = is_whole and jnp.issubdtype(getattr(value, "dtype", type(value)), jnp.integer)
    if not is_whole or np.ndim(value) or value < smallest:
        fail(where, argument, f"an integer >= {smallest}", _repr(value))
    if value > LARGEST_WHOLE:
        fail(where, argument, f"an integer <= {LARGEST_WHOLE}", _repr(value))


def flags(where: str, **values: Any):
    """Require True or False of each argument."""
    for argument, value in values.items():
        if not isinstance(value, (bool, np.bool_)):
            fail(where, argument, "True or False", show(value))


def minutes(where: str, value: Any):
    """Require the time between two checkpoints."""
    number(where, "checkpoint_minutes", value, ">= 0", lambda x: x >= 0, traced=False)


def kind(where: str, argument: str, value: Any, kinds: Any, rule: str, remedy: str = ""):
    """Require an instance of a class, or of one of several."""
    if not isinstance(value, kinds):
        fail(where, argument, rule, show(value), remedy)


def path(where: str, argument: str, value: Any) -> Path:
    """Require the name of a file or folder."""
    kind(where, argument, value, (str, os.PathLike), "a path")
    if not os.fspath(value):
        fail(where, argument, "a path", repr(value))
    return Path(value)


def batches(where: str, value: Any):
    """Require something that can be gone through, and is no single batch for certain."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        remedy = "Call it." if callable(value) else "A list of batches is one."
        fail(where, "batches", "an iterable of batches", show(value), remedy)
    if isinstance(value, (np.ndarray, jax.Array)) and not value.ndim:
        fail(where, "batches", "an iterable of batches", show(value))


def transformation(where: str, argument: str, value: Any):
    """Require an Optax transformation."""
    parts = (getattr(value, name, None) for name in ("init", "update"))
    if isinstance(value, type) or not all(callable(part) for part in parts):
        remedy = "Call it." if callable(value) else ""
        fail(where, argument, "an Optax transformation", show(value), remedy)


def leaves(
    where: str,
    argument: str,
    tree: Any,
    rule: str = "a tree of arrays of numbers",
    *,
    keys: bool = True,
    traced: bool = True,
):
    """Require numbers, or arrays of them, as leaves; keys and traced ones pass where they may."""
    kinds = (jnp.number, jnp.bool_, *(jax.dtypes.prng_key,) * keys)
    for at, leaf in jax.tree_util.tree_leaves_with_path(tree):
        dtype = getattr(leaf, "dtype", type(leaf))
        is_known = isinstance(leaf, (bool, int, float, complex)) or hasattr(leaf, "shape")
        is_known &= traced or not isinstance(leaf, jax.core.Tracer)
        is_known &= not isinstance(leaf, int) or abs(leaf) <= LARGEST_WHOLE
        if not is_known or not any(jnp.issubdtype(dtype, one) for one in kinds):
            name = jax.tree_util.keystr(at)
            fail(where, argument, rule, f"{show(leaf)} at {name}" if name else show(leaf))


def finite(where: str, argument: str, tree: Any):
    """Require numbers that are finite, on whatever devices; traced values and shapes pass."""
    for at, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.core.Tracer) or not isinstance(leaf, (np.ndarray, jax.Array)):
            continue
        # Of several processes each would have to ask at the same time.
        if not getattr(leaf, "is_fully_addressable", True):
            continue
        with jax.ensure_compile_time_eval():
            if not bool(jnp.isfinite(leaf).all()):
                name = jax.tree_util.keystr(at) or "the only leaf"
                fail(where, argument, "finite", f"nan or inf at {name}")


def step_size(where: str, value: Any):
    """Require a step size, or a schedule of step sizes."""
    if not callable(value):
        return positive(where, "step_size", value)
    function(where, "step_size", value, "(count)")


def function(where: str, argument: str, value: Any, form: str, remedy: str = ""):
    """Require a function that can be called as `form` says, such as `"(params, batch, key=)"`."""
    rule, names = f"a function of {form}", form.strip("()").split(", ")
    is_model = hasattr(value, "apply") and hasattr(value, "init")
    if not callable(value) or isinstance(value, type) or is_model:
        remedy = "A model is none: its `apply` is, or its `init`." if is_model else remedy
        fail(where, argument, rule, show(value), remedy)
    keywords = {name.removesuffix("="): None for name in names if name.endswith("=")}
    try:
        signature = inspect.signature(value)
    except ValueError:
        # Some that are built in have none.
        return
    try:
        signature.bind(*names[: len(names) - len(keywords)], **keywords)
    except TypeError as error:
        fail(where, argument, rule, f"one with the arguments {signature} ({error})", remedy)


def traced(
    where: str, argument: str, function: Callable, *given: Any, rule: str, remedy: str = ""
) -> Any:
    """Shapes of what a user's function gives, `calling` it.

    Args:
        where: the public function.
        argument: the function, called with `given`.
        function: it, or what calls it.
        given: what it gets.
        rule, remedy: as in `fail`.
    """
    with calling(where, argument, rule, remedy):
        return jax.eval_shape(function, *given)


@contextlib.contextmanager
def calling(where: str, argument: str, rule: str, remedy: str = "") -> Iterator[None]:
    """Make an error that wrong arguments make the cause of one in the form; others pass."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, LookupError, AssertionError) as error:
        if str(error).startswith("`"):
            raise
        first = (str(error).strip().splitlines() or [""])[0][:LONGEST].rstrip(".")
        fail(where, argument, rule, f"{type(error).__name__}: {first}", remedy)


def choice(where: str, argument: str, value: Any, choices: Any):
    """Require one of the names in `choices`."""
    if not isinstance(value, str) or value not in choices:
        names = ", ".join(repr(name) for name in choices)
        fail(where, argument, f"one of {names}", _repr(value))


def key(where: str, value: Any) -> jax.Array | None:
    """Make a typed key of one JAX key or an integer seed; None stays None.

    Many chains write theirs into the state, so that only a single key will do here.
    """
    if value is None:
        return None
    # What is no key in itself may be the words of none, or a seed beyond 64 bits.
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        dtype, ndim = getattr(value, "dtype", type(value)), np.ndim(value)
        if jnp.issubdtype(dtype, jax.dtypes.prng_key) and ndim == 0:
            return value
        if isinstance(value, jax.Array) and dtype == jnp.uint32 and ndim == 1:
            return jax.random.wrap_key_data(value)
        if jnp.issubdtype(dtype, jnp.integer) and type(value) is not bool and ndim == 0:
            return jax.random.key(value)
    rule = "a JAX key such as jax.random.key(0), a single one, or a seed"
    fail(where, "key", rule, _repr(value))


def needed_key(where: str, value: Any, purpose: str = "") -> jax.Array:
    """Make a typed key as `key` does where there has to be one, such as `"for a jitter"`."""
    typed = key(where, value)
    if typed is None:
        rule = "a JAX key such as jax.random.key(0), or a seed"
        remedy = "Write `key=0`, or any other seed, among the arguments."
        fail(where, "key", f"{rule} {purpose}".rstrip(), None, remedy)
    return typed
