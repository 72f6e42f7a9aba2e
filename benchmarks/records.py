"""What every benchmark writes down: one JSON line per run, with what it was run on."""

import argparse
import json
import platform
import subprocess
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
from tabulated.table import read


def environment() -> dict[str, str]:
    """Commit, version, device and date of this run."""
    command = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "commit": commit,
        "jax": jax.__version__,
        "device": f"{jax.devices()[0].device_kind} {platform.machine()}",
        "time": time.strftime("%Y-%m-%d %H:%M"),
    }


def append(path: Path | None, record: dict[str, Any]):
    """Add one record, on a line of its own; nothing without a path."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    is_cut = path.exists() and path.read_text()[-1:] not in ("", "\n")
    with path.open("a") as lines:
        lines.write(("\n" if is_cut else "") + json.dumps(record) + "\n")


def parser(told: str | None) -> argparse.ArgumentParser:
    """A command line whose help is the docstring of its script, with what `complete` reads."""
    made = argparse.ArgumentParser(
        description=told, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--output", type=Path, help="JSON lines, read first and appended to")
    return made


def complete(
    arguments: argparse.Namespace,
    cells: Iterable[dict[str, Any]],
    run: Callable[[dict[str, Any]], dict[str, Any]],
    told: str,
) -> list[dict[str, Any]]:
    """Run the cells that a file lacks, and give its records with the new ones.

    Args:
        arguments: of `parser`. Without `--output` nothing is written.
        cells: what is asked for.
        run: what a cell gives.
        told: field that is printed after each cell.
    """
    found = read(arguments.output)
    # A cell that a signal has cut short is not recorded.
    warnings.filterwarnings("error", message="`sample` ended early")
    for cell in cells:
        if any(record["cell"] == cell for record in found):
            continue
        record = {"cell": cell, **run(cell), **environment()}
        append(arguments.output, record)
        found.append(record)
        jax.clear_caches()
        print(*cell.values(), told, record[told], flush=True)
    return found
