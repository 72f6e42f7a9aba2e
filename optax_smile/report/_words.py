"""Format settings, times and data of a run for people."""

from __future__ import annotations

import html
import math
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

from optax_smile import _table
from optax_smile.draws._sessions import Session

# Characters in a line of code.
LONGEST_LINE = 76
# Shown elsewhere on the page, or checksums.
NOT_WRITTEN = ("sampler", "chain", "observe")
DOTTED = re.compile(r"[A-Za-z_][\w.<>]*\.[\w<>]+")
MINUTE, HOUR = 60, 3600


def seed(key: Any) -> int | None:
    """Return the seed from which `jax.random.key` made a key; None for a key of another kind."""
    if type(key) is int:
        return key
    is_key = isinstance(key, list) and len(key) == 2 and {type(word) for word in key} == {int}
    return (key[0] << 32) + key[1] if is_key else None


def call(name: str, arguments: Mapping[str, Any]) -> str:
    """Format a call with its arguments."""
    written = [f"{argument}={_value(argument, value)}" for argument, value in arguments.items()]
    line = f"{name}({', '.join(written)})"
    if len(line) <= LONGEST_LINE:
        return line
    return "\n".join([f"{name}(", *(f"    {argument}," for argument in written), ")"])


def _value(argument: str, value: Any) -> str:
    if argument == "key" and isinstance(value, list) and seed(value) is not None:
        return f"jax.random.key({seed(value)})"
    if isinstance(value, list):
        built = {_builder(part) for part in value if isinstance(part, list)}
        whole = _builder(value)
        if whole or len(built) == 1 and None not in built:
            return whole or built.pop() or ""
        return f"[{', '.join(_value('', part) for part in value)}]"
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        # A part of the sampler, such as a tuner.
        settings = (f"{key}={_value(key, x)}" for key, x in value.items() if key != "name")
        return f"{value['name']}({', '.join(settings)})"
    return repr(value)


def _builder(value: list[Any]) -> str | None:
    """Return the builder of a function from its name in `_settings`; None if not a function."""
    if len(value) != 2 or not isinstance(value[0], str) or not DOTTED.fullmatch(value[0]):
        return None
    builder, *inside = value[0].split(".<locals>", 1)
    return builder.rsplit(".", 1)[-1] + ("(...)" if inside else "")


def duration(seconds: float) -> str:
    """Format a duration in its two largest units."""
    if seconds < 1:
        return "less than a second"
    whole = round(seconds)
    if whole < MINUTE:
        return f"{whole} s"
    if whole < HOUR:
        return f"{whole // MINUTE} min {whole % MINUTE} s"
    return f"{whole // HOUR:,} h {whole % HOUR // MINUTE} min"


def times(sessions: list[Session]) -> dict[str, str]:
    """Return date, total run time and machines of the sessions of a run."""
    if not sessions:
        return dict.fromkeys(("begun", "run time", "machine"), "not recorded")
    began = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(sessions[0].began))
    ran = duration(sum(session.seconds for session in sessions))
    several = f" in {len(sessions)} sessions" if len(sessions) > 1 else ""
    machines = dict.fromkeys(session.machine for session in sessions)
    return {"begun": began, "run time": ran + several, "machine": "; ".join(machines)}


def data(described: Mapping[str, Any], num_data: Any) -> str | None:
    """Describe the amount of data; None if it is unknown.

    A list of batches may repeat examples, so the number of examples comes from the sampler.
    """
    batches, parts = described.get("num_batches"), []
    if type(num_data) in (int, float) and math.isfinite(num_data):
        parts.append(_table.counted(round(num_data), "example"))
    if type(batches) is int:
        parts.append(f"{batches:,} batch{'' if batches == 1 else 'es'}")
    return " in ".join(parts) or None


def marked(text: str) -> str:
    """Convert a text with code between backticks to HTML."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text))


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Make an HTML table that may be wider than the page."""

    def line(cells, tag):
        return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f'<div class="wide"><table>{line(head, "th")}{body}</table></div>'
