"""Batches and signals, shared by the host loops of `Run` and `warmstart`."""

import base64
import contextlib
import itertools
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from optax_smile import _check, _on_host


def any_process(*flags: bool) -> list[bool]:
    """Return whether each flag is set in any process; all processes must call this together."""
    if jax.process_count() == 1:
        return list(flags)
    from jax.experimental import multihost_utils

    return np.any(multihost_utils.process_allgather(np.array(flags)), axis=0).tolist()


# Signals that end a run cleanly.
SIGNALS = "SIGINT", "SIGTERM"


def agree(signal: str | None, is_due: bool) -> tuple[str | None, bool]:
    """Return a signal that any process received, and whether a checkpoint is due in any."""
    *received, is_due = any_process(*(signal == name for name in SIGNALS), is_due)
    return next(itertools.compress(SIGNALS, received), None), is_due


class Position(NamedTuple):
    """A position in a `Stream`, serializable as JSON."""

    passes: int  # Complete passes before.
    taken: int  # Batches taken from the current pass.
    state: Any = None  # Result of `get_state` of the iterator, such as one of Grain.
    is_bytes: bool = False  # Whether `state` is bytes in base 64.


class Stream:
    """Batches, restarted when exhausted, with a position that a checkpoint can hold.

    It ends if a pass yields nothing, or after the only pass of an iterator; `defect` gives the
    reason. With `alternates`, every second pass over an even number of batches begins with the
    second and ends with the first: each batch is first in a pair as often as second.
    """

    def __init__(self, batches: Iterable[object], alternates: bool = False):
        self.batches, self.iterator, self.defect = batches, iter(batches), ""
        self.passes = self.taken = 0
        self.alternates, self.is_rotated = alternates, False
        # Unless they are in a list, the loader may reuse the memory of batches.
        self.copies = not isinstance(batches, (list, tuple))

    def __iter__(self) -> Iterator[object]:
        return self

    def __next__(self) -> object:
        try:
            batch = self._read()
        except StopIteration:
            restarted = iter(self.batches)
            if not self.taken or restarted is self.iterator:
                raise
            self._restart(restarted, self.passes + 1, self.taken)
            return next(self)
        self.taken += 1
        return batch

    def _read(self) -> object:
        batch = next(self.iterator)
        # `mistakes.batches.defect` says why a batch cannot be converted.
        with contextlib.suppress(_check.ArgumentError):
            batch = _on_host.as_numeric("batches", batch, copy=self.copies)
        return batch

    def _restart(self, iterator: Iterator[object], passes: int, length: int):
        """Begin a pass after one of the given length; iterators with a state are never rotated."""
        rotates = self.alternates and length % 2 == 0 and not self.is_rotated
        self.is_rotated = rotates and not hasattr(iterator, "set_state")
        self.iterator, self.passes, self.taken = iterator, passes, 0
        if self.is_rotated:
            with contextlib.suppress(StopIteration):
                self.iterator = itertools.chain(iterator, [self._read()])

    @property
    def place(self) -> int:
        """Index of the last batch in a list, or in its pass."""
        length = len(self.batches) if isinstance(self.batches, Sequence) else self.taken
        return (self.taken - 1 + self.is_rotated) % max(length, 1)

    def position(self) -> Position:
        """Return the position of the next batch."""
        get_state = getattr(self.iterator, "get_state", None)
        state = get_state() if get_state and hasattr(self.iterator, "set_state") else None
        if isinstance(state, bytes):
            return Position(self.passes, self.taken, base64.b64encode(state).decode(), True)
        return Position(self.passes, self.taken, state)

    def go_to(self, position: Position):
        """Continue at a position."""
        set_state = getattr(self.iterator, "set_state", None)
        if position.state is not None and set_state is not None:
            self.passes, self.taken, state, is_bytes = position
            set_state(base64.b64decode(state) if is_bytes else state)
            return
        if isinstance(self.batches, Sequence) and position.passes:
            self.is_rotated = position.passes % 2 == 0
            self._restart(iter(self.batches), position.passes, len(self.batches))
        wanted = position.passes, position.taken
        with contextlib.suppress(StopIteration):
            while (self.passes, self.taken) < wanted:
                next(self)
        if (self.passes, self.taken) != wanted:
            at = f"batch {wanted[1]} of pass {wanted[0]}"
            rule = f"a stream that can return to {at}, where the run in the directory stopped"
            _check.fail("batches", rule, f"batch {self.taken} of pass {self.passes}")


@contextlib.contextmanager
def stop_signals() -> Iterator[Callable[[], str | None]]:
    """Yield a function that returns the name of the signal received, or None.

    A second Ctrl-C raises `KeyboardInterrupt` at once. A signal that the process ignores, such as
    SIGINT of a background job, stays ignored.
    """
    received: list[str] = []

    def note(number, frame):
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt("Interrupted twice: stopped at once, without a checkpoint.")
        received.append(signal.Signals(number).name)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    numbers = [signal.Signals[name] for name in SIGNALS]
    handled = [x for x in numbers if signal.getsignal(x) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in handled}
    try:
        yield lambda: received[0] if received else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
