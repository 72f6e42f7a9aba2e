"""Scripts of examples and benchmarks: what `--help` says, and what a record says it was run on."""

import ast
import runpy
import subprocess
from pathlib import Path

from benchmarks import records

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = [
    path
    for folder in ("examples", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if '__name__ == "__main__"' in path.read_text()
]


@pytest.mark.slow
def test_help_is_the_docstring(monkeypatch, capsys):
    """As it stands there, in a process that has imported what all of them import."""
    assert len(SCRIPTS) > 25
    for path in SCRIPTS:
        monkeypatch.setattr("sys.argv", [str(path), "--help"])
        monkeypatch.syspath_prepend(str(path.parent))
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(path), run_name="__main__")
        shown = capsys.readouterr().out
        told = ast.get_docstring(ast.parse(path.read_text()))
        assert end.value.code == 0, path
        assert told and told in shown and f"usage: {path.name}" in shown, path


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with a committed package, where `records` looks."""
    for name in ("optax_smile/a.py", "docs/a.md", "benchmarks/results/a.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    monkeypatch.setattr(records, "ROOT", tmp_path)
    monkeypatch.setattr(records, "tree", records.tree.__wrapped__)
    return tmp_path


DIRTY = ["optax_smile/a.py", "examples/new.py"]
# What a run writes, and what runs nothing.
CLEAN = ["benchmarks/results/new.jsonl", "docs/new.md"]


@pytest.mark.parametrize("name", DIRTY + CLEAN)
def test_a_record_is_of_a_commit(checkout, name, monkeypatch):
    clean = records.environment()
    assert len(clean["commit"]) >= 7 and "dirty" not in clean
    path = checkout / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("changed")
    output = ["--output", str(checkout / "benchmarks" / "results" / "a.jsonl")]
    parse = records.parser("").parse_args
    if name in CLEAN:
        assert records.environment() == clean | {"time": records.environment()["time"]}
        assert not parse(output).allow_dirty
        return
    for refused in (records.environment, lambda: parse(output)):
        with pytest.raises(SystemExit, match=f"{name}.*--allow-dirty"):
            refused()
    # Nothing is recorded, or the record is marked.
    assert parse([]).allow_dirty and parse([*output, "--allow-dirty"]).allow_dirty
    marked = records.environment(allow_dirty=True)
    assert marked["dirty"] == [name] and marked["commit"] == f"{clean['commit']}-dirty"
    (checkout / ".git").rename(checkout / "git")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(checkout.parent))
    with pytest.raises(SystemExit, match="no checkout of git"):
        records.environment()
