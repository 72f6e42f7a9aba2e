"""What the host loops of `warmstart` and `sample` share."""

import base64
import contextlib
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from optax_smile import _check, _tree
from optax_smile.diagnostics.results import Check

# A loss whose halves add up to so nearly the whole is a sum.
NEAR_ONE = 0.05


def one_of(chains: Any) -> Any:
    """Shapes of one chain."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), chains)


def check_loss(
    where: str,
    losses: Callable[[Any, Any], Any],
    carry: Any,
    batch: Any,
    put: Callable[[Any], Any],
    has_rows: bool,
    num_rows: int,
):
    """Require a scalar loss and, where a batch has one row each, as many rows as parameters.

    Args:
        where: the public function.
        losses: of all chains, from what travels and a batch on the devices.
        carry: what travels.
        batch: the first one.
        put: brings a batch onto the devices.
        has_rows: whether a batch has a leading chain axis.
        num_rows: number of chains.
    """
    of_arrays = _check.Tree("an iterable of batches, trees of arrays of numbers")
    of_arrays(where, "batches", batch)
    if has_rows:
        rows = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
        if rows != {(num_rows,)}:
            name = "per_member" if where == "warmstart" else "per_chain"
            rule = f"batches whose leaves have a leading axis of {num_rows}, with `{name}`"
            _check.fail(where, "batches", rule, f"the leading axes {sorted(rows)}")
    rule = "a function that returns a scalar mean loss"
    shapes = jax.tree.map(np.shape, batch)
    told = {"rule": rule, "advice": f"It got `params` and the first of `batches`, {shapes}."}
    found = _check.traced(where, "loss_fn", losses, carry, put(batch), **told)
    if not hasattr(found, "shape") or found.shape != (num_rows,):
        got = jax.tree.map(lambda x: x.shape[1:], found)
        _check.fail(where, "loss_fn", rule, f"shape {got}")
    if not jnp.issubdtype(found.dtype, jnp.floating):
        _check.fail(where, "loss_fn", rule, str(found.dtype))


def warn_of_sum(
    where: str, losses: Callable[[Any], Any], batch: Any, per_chain: bool, mesh: Mesh | None
):
    """Warn of a loss that looks like a sum, see `check_mean`."""
    found = check_mean(losses, batch, per_chain, mesh)
    if found is not None and not found.passed:
        rule = f"`{where}(loss_fn=...)` must be a mean over the examples"
        warnings.warn(
            f"{rule}, and {found.text} {found.advice}, or pass check=False.", stacklevel=2
        )


def check_mean(
    losses: Callable[[Any], Any], batch: Any, per_chain: bool, mesh: Mesh | None
) -> Check | None:
    """Find a loss that looks like a sum: those of two halves add up to that of the whole.

    None where it cannot be told: no axis of examples that all leaves share, or a loss that takes
    no half batch.

    Args:
        losses: of all chains, from a batch.
        batch: the first one.
        per_chain: whether it has a leading chain axis.
        mesh: over whose axis `"data"` the examples have to fit.
    """
    rows, least = num_rows(batch, per_chain), 1 if mesh is None else mesh.shape.get("data", 1)
    half = 0 if rows is None else rows // 2 // least * least
    if not half:
        return None

    def of_part(first: int, stop: int) -> np.ndarray:
        rows = slice(first, stop)
        part = jax.tree.map(lambda x: x[:, rows] if per_chain else x[rows], batch)
        return np.asarray(_tree.local(losses(part)), float)

    try:
        halves = of_part(0, half), of_part(half, 2 * half)
        whole = of_part(0, 2 * half)
    except Exception:
        return None
    with np.errstate(all="ignore"):
        ratio = float(np.median(sum(halves) / whole))
    passed = not abs(ratio - 1) < NEAR_ONE
    text = (
        f"the losses of two halves of the first batch add up to {ratio:.3f} of that of the whole;"
        " those of a mean, to 2."
    )
    return Check(
        kind="mean loss",
        chains=(),
        value=(ratio,),
        bound=1.0,
        passed=passed,
        advice="" if passed else "Divide by the number of examples",
        text=text if passed else f"looks like a sum: {text}",
    )


def num_rows(batch: Any, per_chain: bool) -> int | None:
    """Number of examples, the common length of the first axis after that of chains, if any."""
    axis = int(per_chain)
    lengths = {np.shape(leaf)[axis : axis + 1] for leaf in jax.tree.leaves(batch)}
    return lengths.pop()[0] if len(lengths) == 1 and lengths != {()} else None


class Position(NamedTuple):
    """A place in a `Stream`, as JSON can hold it.

    Attributes:
        passes: whole passes before.
        taken: batches of this one.
        state: of the iterator where it tells one, or None.
        is_bytes: whether that is text in base 64 for bytes.
    """

    passes: int
    taken: int
    state: Any = None
    is_bytes: bool = False


class Stream:
    """Batches again and again, with the place in them, which a checkpoint can hold.

    Ends where a pass yields nothing, or after the only pass of an iterator. The place is that of
    the iterator itself where it has `get_state` and `set_state`, as Grain's have; otherwise the
    number of batches to skip.
    """

    def __init__(self, batches: Iterable[Any]):
        self.batches = batches
        self.passes = self.taken = 0
        self.iterator: Any = iter(batches)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self.iterator)
        except StopIteration:
            again = iter(self.batches)
            if not self.taken or again is self.iterator:
                raise
            self.passes, self.taken, self.iterator = self.passes + 1, 0, again
            return next(self)
        self.taken += 1
        return batch

    def position(self) -> Position:
        """Tell where the next batch comes from."""
        state, is_bytes = None, False
        if hasattr(self.iterator, "get_state"):
            state = self.iterator.get_state()
            if is_bytes := isinstance(state, bytes):
                state = base64.b64encode(state).decode()
        return Position(self.passes, self.taken, state, is_bytes)

    def go_to(self, position: Position):
        """Continue where `position` was told."""
        if position.state is not None:
            self.passes, self.taken, state, is_bytes = position
            self.iterator.set_state(base64.b64decode(state) if is_bytes else state)
            return
        if isinstance(self.batches, Sequence):
            self.passes = position.passes
        wanted = position.passes, position.taken
        with contextlib.suppress(StopIteration):
            while (self.passes, self.taken) < wanted:
                next(self)
        if (self.passes, self.taken) != wanted:
            rule = f"those of the run in the directory, which took {wanted[1]} in pass {wanted[0]}"
            _check.fail("sample", "batches", rule, f"{self.taken} in pass {self.passes}")


def skip_passes(batches: Iterable[Any], passes: int):
    """Go through batches so many times, unless each pass is the same for certain."""
    if isinstance(batches, Sequence):
        return
    for _ in range(passes):
        for _ in batches:
            pass


def stack(batches: Sequence[Any], axis: int) -> Any | None:
    """Stack batches along a new axis; None where their shapes differ."""

    def join(*leaves):
        return (jnp if isinstance(leaves[0], jax.Array) else np).stack(leaves, axis=axis)

    try:
        return jax.tree.map(join, *batches)
    except ValueError:
        return None


class SecondInterrupt(KeyboardInterrupt):
    """Ctrl-C where a signal has asked for the end already."""


@contextlib.contextmanager
def stop_signals() -> Iterator[Callable[[], str | None]]:
    """Turn Ctrl-C and SIGTERM into a wish to stop, which the loop can grant at a good moment.

    Yields:
        A function that gives the name of the signal, or None. A second Ctrl-C raises
        `SecondInterrupt` at once.
    """
    received: list[str] = []

    def note(number, frame):
        if received and number == signal.SIGINT:
            raise SecondInterrupt
        received.append(signal.Signals(number).name)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received[0] if received else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Bar(contextlib.AbstractContextManager["Bar"]):
    """A progress bar by tqdm; nothing where it is not wanted or tqdm is not installed.

    Args:
        total: of what there is to do.
        label: in front of it.
        show: whether it is wanted.
        compiles: whether it says "compiling" until `begin`.
    """

    def __init__(self, total: int, label: str, show: bool, *, compiles: bool = False):
        self._bar: Any = None
        self._compiles = compiles
        if show and not jax.process_index():
            with contextlib.suppress(ImportError):
                from tqdm.auto import tqdm

                self._bar = tqdm(total=total, desc=label)
                if compiles:
                    self._bar.set_postfix_str("compiling")

    def begin(self):
        """Say that the first step is done, once."""
        if self._bar is not None and self._compiles:
            self._bar.set_postfix_str("")
        self._compiles = False

    def show(self, done: int, **told: Any):
        """Move on to so many, and tell some figures."""
        if self._bar is not None:
            self._bar.set_postfix(told, refresh=False)
            self._bar.update(done - self._bar.n)

    def __exit__(self, *_: object):
        if self._bar is not None:
            self._bar.close()


@dataclass(frozen=True)
class Loss(_check.Constraint):
    """A loss, with the arguments that `aux` and `stochastic` ask for."""

    text = "a function of (params, batch), of `aux=` if there is one and of `key=` if `stochastic`"

    def __call__(self, where, argument, value, given=_check.NOTHING):
        extras = ["aux="] * (given.get("aux") is not None) + ["key="] * bool(given["stochastic"])
        advice = "It gets `aux` where there is one, and `key` if it is `stochastic`."
        form = ", ".join(["params", "batch", *extras])
        return _check.Function(f"({form})", advice)(where, argument, value)


def loss_of(
    where: str, loss_fn: Callable[..., Any], has_aux: bool, is_stochastic: bool
) -> Callable[[Any, Any, Any, Any], tuple[jax.Array, Any]]:
    """Give every loss the form `(params, aux, key, batch) -> (loss, aux)`."""

    def loss(params, aux, key, batch) -> Any:
        extras = {"aux": aux} if has_aux else {}
        if is_stochastic:
            extras["key"] = key
        found = loss_fn(params, batch, **extras)
        if has_aux and not (isinstance(found, tuple) and len(found) == 2):
            rule = "a function that with `aux` returns a pair of loss and new aux"
            _check.fail(where, "loss_fn", rule, f"one that returns {_check.show(found)}")
        if not has_aux and isinstance(found, tuple):
            rule = "a function that returns a scalar mean loss"
            remedy = "With `aux=` it returns a pair of loss and new aux."
            _check.fail(where, "loss_fn", rule, "one that returns a tuple", remedy)
        return found if has_aux else (found, None)

    return loss
