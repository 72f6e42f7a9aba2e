"""How every benchmark runs and records its cells: one JSON line each, with commit and device."""

import argparse
import functools
import itertools
import json
import platform
import subprocess
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

# Settings of one run, and what is recorded of it; the fields depend on the script.
Cell = dict[str, Any]
Record = dict[str, Any]
ROOT = Path(__file__).parents[1]
# New files elsewhere are not imported; records and figures are written.
CODE = ("optax_smile", "benchmarks", "examples")
WRITTEN = (":(exclude)benchmarks/results", ":(exclude)benchmarks/figures")
# Warning of `sample`, `select` or `warmstart` that a signal, or the end of the batches, has cut
# short. What they then return is not recorded.
INTERRUPTED = r"`\w+` (ended early|was stopped)"


def environment(allow_dirty: bool = False) -> Record:
    """Commit, version of JAX, device and date of this run.

    Args:
        allow_dirty: whether files may differ from the commit; they are listed as `dirty`.
    """
    commit, changed = tree(ROOT)
    refuse(changed, allow_dirty)
    provenance = {
        "commit": f"{commit}-dirty" if changed else commit,
        "jax": jax.__version__,
        "device": f"{jax.devices()[0].device_kind} {platform.machine()}",
        "time": time.strftime("%Y-%m-%d %H:%M"),
    }
    return provenance | {"dirty": changed} if changed else provenance


@functools.cache
def tree(root: Path) -> tuple[str, list[str]]:
    """Commit of a checkout and the files that differ from it, at the first call."""

    def git(*arguments: str) -> list[str]:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True).stdout.splitlines()

    commit = git("describe", "--always")
    changed = git("diff", "--name-only", "HEAD", "--", ".", *WRITTEN)
    changed += git("ls-files", "--others", "--exclude-standard", "--", *CODE, *WRITTEN)
    return (commit[0], changed) if commit else ("", ["no checkout of git"])


def refuse(changed: list[str], allow_dirty: bool):
    """End a run whose files differ from the commit that its record would name."""
    if changed and not allow_dirty:
        shown = ", ".join(changed[:5]) + ", ..." * (len(changed) > 5)
        raise SystemExit(
            f"These files differ from the commit that the record would name: {shown}. Commit them, "
            "or pass --allow-dirty: the record is marked, and `tables.py --check` rejects it."
        )


def read(path: Path | None) -> list[Record]:
    """All records of a file; an incomplete line is skipped."""
    if path is None or not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def append(path: Path | None, record: Record):
    """Add one record as a line, if there is a path."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    is_cut = path.exists() and path.read_text()[-1:] not in ("", "\n")
    with path.open("a") as lines:
        lines.write(("\n" if is_cut else "") + json.dumps(record) + "\n")


class Parser(argparse.ArgumentParser):
    """A command line that refuses to record uncommitted code, before anything runs."""

    def parse_args(self, *arguments, **options) -> Any:
        """Without `--output` nothing is recorded, and files may differ."""
        found = super().parse_args(*arguments, **options)
        found.allow_dirty |= found.output is None
        refuse(tree(ROOT)[1], found.allow_dirty)
        return found


def parser(description: str | None, **axes: Iterable[Any]) -> Parser:
    """A command line whose help is the docstring of its script, with the options of `complete`.

    Args:
        description: the docstring.
        axes: values of fields of a cell, see `cells_of`; the plural of a field is an option, such
            as `--seeds 0 1`.
    """
    made = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--output", type=Path, help="JSON lines, read first and appended to")
    made.add_argument(
        "--allow-dirty", action="store_true", help="mark records of files that are not committed"
    )
    made.add_argument("--cells", type=int, help="run at most this number of missing cells")
    for name, values in axes.items():
        values = list(values)
        plural = name if name == "data" or name.endswith("s") else f"{name}s"
        choices = None if not isinstance(values[0], str) or len(values) == 1 else values
        given: dict[str, Any] = {"nargs": "+", "type": type(values[0]), "choices": choices}
        option = f"--{plural.replace('_', '-')}"
        made.add_argument(option, dest=name, default=values, **given)
    made.set_defaults(axes=tuple(axes))
    return made


def cells_of(arguments: argparse.Namespace, **fixed: Any) -> list[Cell]:
    """Cells with every combination of the axes; the last one varies fastest."""
    chosen = {name: getattr(arguments, name) for name in arguments.axes}
    chosen |= {name: [value] for name, value in fixed.items()}
    return [dict(zip(chosen, of, strict=True)) for of in itertools.product(*chosen.values())]


def complete(
    arguments: argparse.Namespace,
    cells: Iterable[Cell],
    run: Callable[[Cell], Record],
    shown: str,
    *names: str,
    **settings: Any,
):
    """Run the cells that a file lacks, and print tables of its records and the new ones.

    Args:
        arguments: of `parser`. Without `--output` nothing is written.
        cells: requested cells.
        run: result of a cell.
        shown: field of the result that is printed after each cell.
        names: of tables.
        settings: more fields of each record; a cell with other settings is run again.
    """
    found = read(arguments.output)
    warnings.filterwarnings("error", message=INTERRUPTED)
    done = [record.get("cell") for record in found if settings.items() <= record.items()]
    missing = (cell for cell in cells if cell not in done)
    for cell in itertools.islice(missing, arguments.cells):
        begun = time.monotonic()
        result = run(cell)
        # A result may have a more precise time.
        seconds = {"seconds": time.monotonic() - begun}
        provenance = environment(arguments.allow_dirty)
        record = {"cell": cell, **settings, **seconds, **result, **provenance}
        append(arguments.output, record)
        found.append(record)
        done.append(cell)
        # Each compiled program keeps memory maps, of which a process has 65,530.
        jax.clear_caches()
        print(*cell.values(), shown, record[shown], flush=True)
    if names:
        # Where `records` alone is imported, no pandas is needed.
        from benchmarks import tables

        print(*(tables.shown(name, found) for name in names), sep="\n\n")


def main(
    description: str | None,
    run: Callable[[Cell], Record],
    shown: str,
    *names: str,
    **axes: Iterable[Any],
):
    """Be the whole command line of a script; see `parser` and `complete`."""
    arguments = parser(description, **axes).parse_args()
    complete(arguments, cells_of(arguments), run, shown, *names)
