"""Sessions of a run: when, how long and on which machine it ran, one entry per start or resume."""

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
# Python has no dates after the year 9999.
LATEST = 253_370_764_800


class Session(NamedTuple):
    """One session of a run, from the start of the program to its end.

    Attributes:
        began: seconds since 1970.
        seconds: run time up to the newest checkpoint.
        machine: description of the machine.
    """

    began: float
    seconds: float
    machine: str


def machine() -> str:
    """Describe devices, processors and operating system."""
    devices, cores = jax.devices(), os.cpu_count()
    system = f"{cores} CPU cores, {platform.system()} {platform.machine()}"
    if devices[0].platform == "cpu":
        return system
    return f"{len(devices)} x {devices[0].device_kind}, {system}"


def read(directory: Path) -> list[Session]:
    """Read the sessions of a run; an empty list if there is no record.

    Raises:
        ValueError: a damaged file.
    """
    file = directory / FILE
    if not file.is_symlink() and not file.exists():
        return []
    with _disk.naming(file, "record of times", "Remove it: only the times are lost."):
        record = json.loads(_disk.read_text(file))
        if record["checksum"] != _disk.checksum(json.dumps(record["sessions"])):
            raise ValueError("its checksum does not match its content")
        sessions = [Session(**session) for session in record["sessions"]]
        if not all(_is_session(session) for session in sessions):
            raise ValueError("its entries are not valid sessions")
    return sessions


def _is_session(session: Session) -> bool:
    times = session.began, session.seconds
    is_times = all(type(time) in (int, float) and 0 <= time < LATEST for time in times)
    return is_times and isinstance(session.machine, str)


class Clock:
    """Record the run time in the directory of a run.

    Args:
        directory: an existing directory.
        resumed: whether it already holds the run; earlier sessions are then kept.

    Raises:
        ValueError: a damaged record of earlier sessions.
    """

    def __init__(self, directory: Path, resumed: bool):
        self.directory, self.before = directory, read(directory) if resumed else []
        self.began, self.start = time.time(), time.monotonic()

    def write(self):
        """Write the run time so far."""
        session = Session(self.began, time.monotonic() - self.start, machine())
        sessions: list[Mapping[str, Any]] = [x._asdict() for x in (*self.before, session)]
        content = {"sessions": sessions, "checksum": _disk.checksum(json.dumps(sessions))}
        _disk.write(self.directory / FILE, json.dumps(content, indent=1).encode())
