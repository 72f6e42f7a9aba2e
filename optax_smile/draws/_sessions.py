"""When, how long and on what machine a run ran: an entry for each time that it was begun."""

import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from optax_smile import _disk

FILE = "sessions.json"
# The year 9999, beyond which there are no dates.
LATEST = 253_370_764_800


class Session(NamedTuple):
    """A run from one start of the program to its end.

    Attributes:
        began: seconds since 1970.
        seconds: that it ran up to its newest checkpoint.
        machine: in words.
    """

    began: float
    seconds: float
    machine: str


def machine() -> str:
    """Devices, processors and system."""
    devices, cores = jax.devices(), os.cpu_count()
    system = f"{cores} CPU cores, {platform.system()} {platform.machine()}"
    if devices[0].platform == "cpu":
        return system
    return f"{len(devices)} x {devices[0].device_kind}, {system}"


def read(directory: Path) -> list[Session]:
    """Read the sessions of a run, none where a directory tells none.

    Raises:
        ValueError: a damaged file.
    """
    file = directory / FILE
    if not file.is_symlink() and not file.exists():
        return []
    with _disk.naming(file, "record of times", "Remove it: nothing but the times is lost."):
        told = json.loads(_disk.read_text(file))
        if told["checksum"] != _disk.checksum(json.dumps(told["sessions"])):
            raise ValueError("its checksum does not fit its content")
        sessions = [Session(**session) for session in told["sessions"]]
        if not all(_is_session(session) for session in sessions):
            raise ValueError("its entries are no sessions")
    return sessions


def _is_session(session: Session) -> bool:
    times = session.began, session.seconds
    is_times = all(type(time) in (int, float) and 0 <= time < LATEST for time in times)
    return is_times and isinstance(session.machine, str)


class Clock:
    """Keeps the time of a run in its directory.

    Args:
        directory: which exists.
        resumed: whether it holds the run already, whose earlier sessions count then.

    Raises:
        ValueError: a damaged record of earlier sessions.
    """

    def __init__(self, directory: Path, resumed: bool):
        self.directory, self.before = directory, read(directory) if resumed else []
        self.began, self.start = time.time(), time.monotonic()

    def write(self):
        """Note the time up to now."""
        session = Session(self.began, time.monotonic() - self.start, machine())
        sessions: list[Mapping[str, Any]] = [x._asdict() for x in (*self.before, session)]
        content = {"sessions": sessions, "checksum": _disk.checksum(json.dumps(sessions))}
        _disk.write(self.directory / FILE, json.dumps(content, indent=1).encode())
