"""`--help` of every script says what it does."""

import ast
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = [
    path
    for folder in ("examples", "benchmarks")
    for path in sorted((ROOT / folder).glob("*.py"))
    if '__name__ == "__main__"' in path.read_text()
]


def test_the_scripts_are_found():
    names = {path.name for path in SCRIPTS}
    assert {"quickstart.py", "lenet.py", "uci.py", "tables.py", "networks.py"} <= names


@pytest.mark.slow
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_help_is_the_docstring(path, monkeypatch, capsys):
    """As it stands there, in a process that has imported what all of them import."""
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    folders = [str(path.parent), *(str(ROOT / name) for name in ("examples", "benchmarks"))]
    monkeypatch.setattr(sys, "path", [*folders, *sys.path])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    shown = capsys.readouterr().out
    told = ast.get_docstring(ast.parse(path.read_text()))
    assert end.value.code == 0
    assert told and told in shown and f"usage: {path.name}" in shown
