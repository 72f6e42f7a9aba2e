"""Constraints of arguments, declared once per function, and the error if a value violates one.

    @_check.arguments(thin=_check.Whole(1), mesh=_check.kind(Mesh, "a mesh") | None)
    def sample(..., thin=1, mesh=None, resume: bool = True): ...

`DECLARED` holds the declarations of all functions. The tests generate bad input from them.

Errors name the function that the user called. `arguments` records its name; `called` does so for
functions without constraints, and for code that runs later or in another thread.
"""

import contextlib
import contextvars
import functools
import inspect
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar, cast, get_args

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

# Counters are int32.
LARGEST_WHOLE = 2**31 - 1
# Longest representation of a value in an error.
LONGEST = 200
NOTHING: Mapping[str, Any] = {}
# Errors that a user's function raises when it gets wrong arguments.
MISUSE = (TypeError, ValueError, AttributeError, LookupError, AssertionError)

DECLARED: dict[str, tuple[Callable, Mapping[str, "Constraint"]]] = {}
Function_ = TypeVar("Function_", bound=Callable)


class ArgumentError(ValueError):
    """An argument that breaks its rule: `` `psmile(step_size=...)` must be a finite number > 0, got
    -0.1. ``

    Attributes:
        function: name of the function that was called.
        argument: name of its argument.
        rule: what the argument must be.
        got: what it was.
        advice: what to do; may be empty.
    """

    def __init__(self, function: str, argument: str, rule: str, got: object, advice: str = ""):
        super().__init__(function, argument, rule, got, advice)
        self.function, self.argument = function, argument
        self.rule, self.got, self.advice = rule, str(got), advice

    def __str__(self) -> str:
        message = f"`{self.function}({self.argument}=...)` must be {self.rule}, got {self.got}."
        return f"{message} {self.advice}".rstrip()


class Context(NamedTuple):
    """A call by the user; `parts` are public functions that it calls, with arguments `renamed`."""

    function: str = "optax_smile"
    parts: Set[str] = frozenset()
    renamed: Mapping[str, str] = NOTHING


_NO_CALL = Context()
_CONTEXT = contextvars.ContextVar("context", default=_NO_CALL)


class called(contextlib.ContextDecorator):
    """Let errors name this function, also errors of the `parts` that it calls, see `Context`.

    If the function is itself a part of an outer call, errors keep the name of the outer function.
    """

    def __init__(self, function: str, /, *parts: str, **renamed: str):
        self.call = Context(function, frozenset(parts), renamed)

    def _recreate_cm(self) -> "called":
        # For each call of a decorated function, since several may run at once.
        return called(self.call.function, *self.call.parts, **self.call.renamed)

    def __enter__(self):
        call, (function, parts, renamed) = _CONTEXT.get(), self.call
        if function == call.function or function in call.parts:
            renamed = {x: call.renamed.get(y, y) for x, y in renamed.items()}
            new = Context(call.function, {*call.parts, *parts}, {**call.renamed, **renamed})
        else:
            new = self.call
        self.token = _CONTEXT.set(new)

    def __exit__(self, *error: object):
        _CONTEXT.reset(self.token)


def function_name() -> str:
    """Return the name of the function that the user called."""
    return _CONTEXT.get().function


def fail(argument: str, rule: str, got: object, advice: str = "") -> NoReturn:
    """Raise the error of an argument that breaks a rule."""
    call = _CONTEXT.get()
    raise ArgumentError(call.function, call.renamed.get(argument, argument), rule, got, advice)


def own_flags(function: Function_, *, compiles: bool = False) -> Function_:
    """Make a function that ignores JAX's debugging flags, since its placeholders are NaN or inf.

    With `compiles` it also ignores `jax_disable_jit`, which changes the rounding of results.
    """

    @functools.wraps(function)
    def run(*args: object, **kwargs: object) -> object:
        jit = jax.disable_jit(False) if compiles else contextlib.nullcontext()
        with jit, jax.debug_nans(False), jax.debug_infs(False):
            with jax.numpy_dtype_promotion("standard"):
                return function(*args, **kwargs)

    return cast(Function_, run)


on_host = functools.partial(own_flags, compiles=True)


@contextlib.contextmanager
def calling(argument: str, rule: str, advice: str = "") -> Iterator[None]:
    """Turn errors that a user's function raises on wrong arguments into an `ArgumentError`."""
    try:
        yield
    except ArgumentError:
        raise
    except MISUSE as error:
        first = (str(error).strip().splitlines() or [""])[0][:LONGEST].rstrip(".")
        fail(argument, rule, f"{type(error).__name__}: {first}", advice)


@contextlib.contextmanager
def needed(needs: str, extra: str) -> Iterator[None]:
    """Say how to install a missing library; `needs` names the library and what requires it."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{needs}: pip install 'optax-smile[{extra}]'") from error


def traced(argument: str, function: Callable, *given: object, rule: str, advice: str = "") -> Any:
    """Return the shapes of the result of a user's function, without running it."""
    with calling(argument, rule, advice):
        return jax.eval_shape(function, *given)


def arguments(name: str = "", /, **constraints: "Constraint") -> Callable[[Function_], Function_]:
    """Check the arguments of a function before it runs, and pass what the constraints return.

    Arguments annotated as `bool` have to be True or False. `name` is that of the function, if not
    its `__name__`.
    """

    def decorate(function: Function_) -> Function_:
        called_name = name or function.__name__
        signature = inspect.signature(function)
        annotations = {x: given.annotation for x, given in signature.parameters.items()}
        flags = {x: FLAG for x, kind in annotations.items() if kind in (bool, "bool")}
        declared = flags | constraints
        assert set(declared) <= set(signature.parameters), (called_name, set(declared))

        @functools.wraps(function)
        def checked(*args: object, **kwargs: object) -> object:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:
                # Python's own error names the function.
                return function(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            with called(called_name):
                for argument, constraint in declared.items():
                    given[argument] = constraint(argument, given[argument], given)
                return function(*bound.args, **bound.kwargs)

        DECLARED[called_name] = checked, declared
        return cast(Function_, checked)

    return decorate


class Constraint:
    """A rule for an argument. Calling it returns the value, possibly converted, or raises."""

    text: str

    @property
    def rule(self) -> str:
        """The rule in words, for errors."""
        return self.text

    def __call__(self, argument: str, value: Any, given: Mapping[str, Any] = NOTHING) -> Any:
        """Check a value; `given` has the arguments whose constraints were declared before."""
        raise NotImplementedError

    def __or__(self, other: "Constraint | None") -> "Constraint":
        return Either((self, NONE if other is None else other))


@dataclass(frozen=True)
class Either(Constraint):
    """A value that satisfies one of several constraints."""

    options: tuple[Constraint, ...]

    @property
    def rule(self) -> str:
        return ", or ".join(option.rule for option in self.options)

    def __call__(self, argument, value, given=NOTHING) -> object:
        errors = []
        for option in self.options:
            try:
                return option(argument, value, given)
            except ArgumentError as error:
                # Keeping the error would keep this frame and its arguments alive.
                errors.append((error.rule, error.got, error.advice))
        fail(argument, ", or ".join(rule for rule, *_ in errors), *errors[0][1:])


@dataclass(frozen=True)
class Where(Constraint):
    """A value for which `holds(value)` is true; `text` states this rule in words."""

    text: str
    holds: Callable[[Any], object]
    advice: str = ""

    def __call__(self, argument, value, given=NOTHING) -> Any:
        if not self.holds(value):
            advice = self.advice or ("Call it." if callable(value) else "")
            fail(argument, self.text, show(value), advice)
        return value


def kind(kinds: type | tuple[type, ...], text: str, advice: str = "") -> Where:
    """Require an instance of a class, or of one of several."""
    return Where(text, lambda value: isinstance(value, kinds), advice)


@dataclass(frozen=True)
class OneOf(Constraint):
    """One of the words of a `Literal` type."""

    words: object

    @property
    def rule(self) -> str:
        words = [*map(repr, get_args(self.words))]
        return f"one of {', '.join(words)}" if len(words) > 1 else words[0]

    def __call__(self, argument, value, given=NOTHING) -> str:
        if not isinstance(value, str) or value not in get_args(self.words):
            fail(argument, self.rule, written(value))
        return value


@dataclass(frozen=True)
class Real(Constraint):
    """A number in an interval from `low` to `high`.

    Attributes:
        open: the ends that are excluded: "low", "high", "both" or "".
        traced: whether traced scalars pass, unchecked.
        large: whether integers beyond int32 pass.
        infinite: whether infinite numbers pass.
        dtype: the number must be finite in this dtype; None: JAX's default float dtype.
    """

    low: float = -math.inf
    high: float = math.inf
    open: str = ""
    traced: bool = True
    large: bool = False
    infinite: bool = False
    dtype: type | None = None

    @property
    def rule(self) -> str:
        """The interval, as docstrings write it."""
        left, right = self.open in ("low", "both"), self.open in ("high", "both")
        if not math.isinf(self.high):
            high = "pi / 2" if self.high == math.pi / 2 else f"{self.high:g}"
            return f"a number in {'[('[left]}{self.low:g}, {high}{'])'[right]}"
        number = "a number" if self.infinite else "a finite number"
        return number if math.isinf(self.low) else f"{number} {'>' if left else '>='} {self.low:g}"

    def holds(self, numbers: np.ndarray | np.floating) -> np.ndarray:
        """Whether numbers lie in the interval; JAX flushes denormal ones to zero."""
        kind = np.finfo(self.dtype or jax.dtypes.canonicalize_dtype(np.float64))
        above, below = numbers >= self.low, numbers <= self.high
        if self.open in ("low", "both"):
            above = numbers >= kind.tiny if self.low == 0 else numbers > self.low
        if self.open in ("high", "both"):
            below = numbers < self.high
        return above & below & (self.infinite | (abs(numbers) <= kind.max))

    def __call__(self, argument, value, given=NOTHING) -> object:
        if isinstance(value, jax.core.Tracer) and self.traced and value.ndim == 0:
            return value
        is_number = is_real(_dtype(value)) and not isinstance(value, (bool, jax.core.Tracer))
        number = np.float64(math.nan)
        if is_number and np.ndim(value) == 0:
            with contextlib.suppress(OverflowError):
                number = np.float64(value)
        if not self.holds(number):
            fail(argument, self.rule, written(value))
        if isinstance(value, int) and abs(value) > LARGEST_WHOLE and not self.large:
            fail(argument, f"{self.rule}, a float beyond {LARGEST_WHOLE}", written(value))
        # A strongly typed float64 would widen the float32 state of a chain.
        return float(value) if isinstance(value, np.floating) else value


@dataclass(frozen=True)
class Whole(Constraint):
    """An integer of at least `low` that fits an int32, converted to an int unless it is traced."""

    low: int
    traced: bool = False

    @property
    def rule(self) -> str:
        return f"an integer >= {self.low}"

    def __call__(self, argument, value, given=NOTHING) -> int | jax.Array:
        if isinstance(value, jax.core.Tracer) and self.traced:
            return value
        is_whole = jnp.issubdtype(_dtype(value), jnp.integer)
        is_whole &= not isinstance(value, (bool, jax.core.Tracer))
        if not is_whole or np.ndim(value) or value < self.low:
            fail(argument, self.rule, written(value))
        if value > LARGEST_WHOLE:
            fail(argument, f"an integer <= {LARGEST_WHOLE}", written(value))
        return int(value)


@dataclass(frozen=True)
class PathLike(Constraint):
    """The name of a file or folder, which becomes a `Path`; `~` is the home directory."""

    text = "a path"

    def __call__(self, argument, value, given=NOTHING) -> Path:
        if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
            fail(argument, self.text, show(value))
        try:
            return Path(os.fsdecode(value)).expanduser()
        except RuntimeError:
            fail(argument, self.text, repr(value), "There is no such home directory.")


@dataclass(frozen=True)
class Key(Constraint):
    """A single JAX key or an integer seed, which becomes a typed key.

    JAX uses the last 32 bits of a seed, so that 0 and 2**32 would be equal. None is refused if
    `needed`, for a `purpose` such as "for a jitter".
    """

    needed: bool = False
    purpose: str = ""

    @property
    def rule(self) -> str:
        rule = "a single JAX key, such as jax.random.key(0), or an integer seed from 0 to 2**32 - 1"
        return f"{rule}, {self.purpose}".rstrip(", ")

    def __call__(self, argument, value, given=NOTHING) -> Any:
        if NONE.holds(value) and not self.needed:
            return None
        # Raw words may have the wrong shape for a key, and a seed may exceed 64 bits.
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            dtype, ndim = _dtype(value), np.ndim(value)
            if jnp.issubdtype(dtype, jax.dtypes.prng_key) and ndim == 0:
                return value
            if isinstance(value, jax.Array) and dtype == jnp.uint32 and ndim == 1:
                return jax.random.wrap_key_data(value)
            is_whole = jnp.issubdtype(dtype, jnp.integer) and type(value) is not bool and ndim == 0
            if is_whole and (isinstance(value, jax.core.Tracer) or 0 <= int(value) < 2**32):
                return jax.random.key(value)
        fail(argument, self.rule, written(value))


@dataclass(frozen=True)
class Function(Constraint):
    """A function that can be called as `form` says, such as "(params, batch, key=)"."""

    form: str
    advice: str = ""
    name: str = ""

    @property
    def rule(self) -> str:
        return self.name or f"a function of {self.form}"

    def __call__(self, argument, value, given=NOTHING) -> Callable:
        is_model = hasattr(value, "apply") and hasattr(value, "init")
        if not callable(value) or isinstance(value, type) or is_model:
            method = "init" if argument == "init_fn" else "apply"
            advice = f"Pass `model.{method}`, not the model." if is_model else self.advice
            fail(argument, self.rule, show(value), advice)
        names = [name for name in self.form.strip("()").split(", ") if name]
        keywords = {name.removesuffix("="): None for name in names if name.endswith("=")}
        try:
            signature = inspect.signature(value)
        except ValueError:
            # Some built-in functions have none.
            return value
        try:
            signature.bind(*names[: len(names) - len(keywords)], **keywords)
        except TypeError as error:
            fail(argument, self.rule, f"one with the arguments {signature} ({error})", self.advice)
        return value


@dataclass(frozen=True)
class Tree(Constraint):
    """A tree of numbers or arrays, on any devices.

    Attributes:
        text: the rule, if it requires more than the axes.
        axes: leading axes that all arrays share, not empty, such as "[chain, ...]".
        like: name of an earlier argument, a tree whose axes must have the same lengths.
        keys, traced: whether JAX keys and traced arrays pass.
        finite: whether all numbers must be finite.
        floating: whether all must be floating-point numbers.
        advice: what to do about unequal axes.

    Arrays in another byte order are converted.
    """

    text: str = ""
    axes: str = ""
    like: str = ""
    keys: bool = True
    traced: bool = True
    finite: bool = False
    floating: bool = False
    advice: str = ""

    @property
    def rule(self) -> str:
        if self.axes and not self.text:
            kind = "floating-point arrays" if self.floating else "arrays"
            return f"a tree of {kind} {self.axes} with equal leading axes, none of them empty"
        return self.text or "a tree of arrays of numbers"

    def __call__(self, argument, value, given=NOTHING) -> object:
        kinds = (jnp.number, jnp.bool_, *(jax.dtypes.prng_key,) * self.keys)
        kinds = (jnp.floating,) if self.floating else kinds
        is_swapped = False
        for path, leaf in jax.tree_util.tree_leaves_with_path(value):
            at, is_traced = jax.tree_util.keystr(path), isinstance(leaf, jax.core.Tracer)
            is_known = isinstance(leaf, (bool, int, float, complex)) or hasattr(leaf, "shape")
            is_known &= self.traced or not is_traced
            is_known &= not isinstance(leaf, int) or abs(leaf) <= LARGEST_WHOLE
            is_known &= not np.ma.is_masked(leaf)
            if not is_known or not any(jnp.issubdtype(_dtype(leaf), one) for one in kinds):
                fail(argument, self.rule, f"{show(leaf)} at {at}" if at else show(leaf))
            is_swapped |= isinstance(leaf, np.ndarray) and not leaf.dtype.isnative
            is_array = isinstance(leaf, (np.ndarray, jax.Array)) and not is_traced
            # With several processes, all of them would have to run the check at the same time.
            if self.finite and is_array and getattr(leaf, "is_fully_addressable", True):
                with jax.ensure_compile_time_eval():
                    if not bool(jnp.isfinite(leaf).all()):
                        fail(argument, "finite", f"nan or inf at {at or 'the only leaf'}")
        rule, number = "", self.axes.count(",")
        lengths = {np.shape(leaf)[:number] for leaf in jax.tree.leaves(value)}
        if self.axes and (len(lengths) != 1 or any(len(x) < number or 0 in x for x in lengths)):
            rule = self.rule
        elif self.like:
            like = np.shape(jax.tree.leaves(given[self.like])[0])[:number]
            if lengths != {like}:
                rule = f"a tree of arrays {self.axes} that begin with the axes {like}"
        if rule:
            shapes = cut(f"the shapes {jax.tree.map(np.shape, value)}")
            fail(argument, rule, shapes, self.advice)
        return jax.tree.map(native, value) if is_swapped else value


def native(leaf: object) -> object:
    """Convert an array of NumPy to the byte order of the machine."""
    if isinstance(leaf, np.ndarray) and not leaf.dtype.isnative:
        return leaf.astype(leaf.dtype.newbyteorder("="))
    return leaf


@dataclass(frozen=True)
class Array(Constraint):
    """An array on the host, not empty, whose every number satisfies a rule.

    Attributes:
        axes: their names, "[input, class]"; "..." stands for further axes, " or " for a choice;
            empty: any axes.
        each: rule of the numbers.
        like: name of an earlier argument whose shape it must have.
        dtype: the array is converted to it; None keeps the array's own.
    """

    axes: str = ""
    each: Real | Where = Real(infinite=True)
    like: str = ""
    dtype: type | None = float

    @property
    def rule(self) -> str:
        return f"a non-empty array {self.axes}".rstrip()

    def __call__(self, argument, value, given=NOTHING) -> np.ndarray:
        array = host(argument, value)
        array = array if self.dtype is None else array.astype(self.dtype)
        if not array.size or not any(_has_axes(array.ndim, x) for x in self.axes.split(" or ")):
            fail(argument, self.rule, f"shape {array.shape}")
        like = np.shape(given[self.like]) if self.like in given else array.shape
        if array.shape != like:
            fail(argument, f"of shape {like} to go with `{self.like}`", f"shape {array.shape}")
        wrong = ~np.asarray(self.each.holds(array), bool)
        if wrong.any():
            place = tuple(np.argwhere(wrong)[0].tolist())
            rule = f"an array whose every entry is {self.each.rule}"
            fail(argument, rule, f"{array[place]} at {place}")
        return array


def _has_axes(number: int, axes: str) -> bool:
    names = axes.strip("[]").split(", ")
    return number >= len(names) - 1 if names[-1] in ("", "...") else number == len(names)


def host(argument: str, value: Any) -> np.ndarray:
    """Convert a value to an array of real numbers or booleans on the host."""
    got = show(value)
    if any(map(np.ma.is_masked, jax.tree.leaves(value))):
        fail(argument, "an array without masked entries", got)
    if not isinstance(value, (jax.core.Tracer, Mapping)):
        # Ragged lists, values that are not arrays, and tensors that need gradients.
        with contextlib.suppress(ValueError, TypeError, RuntimeError):
            found = np.asarray(value)
            if is_real(found.dtype) or found.dtype == bool:
                return found
            got = show(value) if found.dtype == object else f"an array of {found.dtype}"
    fail(argument, "an array of numbers", got)


def is_real(dtype: Any) -> bool:
    """Whether a dtype is of integers or floating-point numbers, half precision included."""
    return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)


def _dtype(value: object) -> Any:
    return getattr(value, "dtype", type(value))


def show(value: object) -> str:
    """Describe a value in a few words."""
    if isinstance(value, (np.ndarray, jax.Array, jax.ShapeDtypeStruct)):
        kind = "a traced " if isinstance(value, jax.core.Tracer) else ""
        kind = "a masked " if np.ma.is_masked(value) else kind
        return f"{kind}{value.dtype}{list(value.shape)}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)[:LONGEST]
    return f"a {type(value).__name__}"


def cut(value: object) -> str:
    """Write a value, cut after `LONGEST` characters."""
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def written(value: object) -> str:
    """Write a value as code, or describe it if that is long, has lines or is an array."""
    is_array, text = isinstance(value, (np.ndarray, jax.Array)), repr(value)
    return show(value) if is_array or len(text) > LONGEST or "\n" in text else text


NONE = Where("None", lambda value: value is None)
FLAG = kind((bool, np.bool_), "True or False")
POSITIVE = Real(0, open="low")
NONNEGATIVE = Real(0)
PROBABILITY = Real(0, 1, open="both")
STEP_SIZE = POSITIVE | Function("(count)", name="an Optax schedule")
TRANSFORMATION = Where(
    "an Optax transformation",
    lambda value: (
        not isinstance(value, type)
        and all(callable(getattr(value, name, None)) for name in ("init", "update"))
    ),
)
BATCHES = Where(
    "an iterable of batches, such as a list",
    lambda value: (
        isinstance(value, Iterable)
        and not isinstance(value, (str, bytes, Mapping))
        and getattr(value, "ndim", 1)
    ),
)
REPEATABLE = Where(
    "an iterable of batches that can be repeated, such as a list",
    lambda value: BATCHES.holds(value) and not isinstance(value, Iterator),
)
