"""All methods of `examples/compare.py` on one problem, and the sentences that say what to use."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tabulated.table import Record, Table

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import verdict  # noqa: E402


def scores(problem: str) -> Callable[[Sequence[Record]], Table]:
    """Mean and standard error over seeds."""

    def table(found: Sequence[Record]) -> Table:
        used = of(found, problem)
        if not used:
            return Table([], [], [])
        return Table(*verdict.cells([record["methods"] for record in used]), used)

    return table


def advice(problem: str) -> Callable[[Sequence[Record]], str]:
    """The three sentences."""

    def text(found: Sequence[Record]) -> str:
        used = of(found, problem)
        return " ".join(verdict.sentences([r["methods"] for r in used])) if used else ""

    return text


def of(found: Sequence[Record], problem: str) -> list[Record]:
    """Records of a problem, by seed."""
    cells = [(record["cell"], record) for record in found]
    used = [one for cell, one in cells if cell["problem"] == problem and "smoke" not in cell]
    return sorted(used, key=lambda record: record["cell"]["seed"])
