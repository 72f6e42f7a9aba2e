"""Scripts of examples and benchmarks: `--help`, the commit of a record, and tables of records."""

import ast
import runpy
import subprocess
from pathlib import Path

from benchmarks import frames, records, tables

import pandas as pd
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


# Files that runs write, and files that no run executes, may be changed.
@pytest.mark.parametrize("name", ["optax_smile/a.py", "examples/new.py"])
def test_a_record_is_of_a_commit(checkout, name, monkeypatch):
    for clean in ("benchmarks/results/new.jsonl", "docs/new.md"):
        (checkout / clean).write_text("changed")
    parse = records.parser("").parse_args
    output = ["--output", str(checkout / "benchmarks" / "results" / "a.jsonl")]
    commit = records.environment()["commit"]
    assert len(commit) >= 7 and "dirty" not in records.environment()
    assert not parse(output).allow_dirty
    (checkout / name).parent.mkdir(exist_ok=True)
    (checkout / name).write_text("changed")
    for refused in (records.environment, lambda: parse(output)):
        with pytest.raises(SystemExit, match=f"{name}.*--allow-dirty"):
            refused()
    # Nothing is recorded, or the record is marked.
    assert parse([]).allow_dirty and parse([*output, "--allow-dirty"]).allow_dirty
    marked = records.environment(allow_dirty=True)
    assert marked["dirty"] == [name] and marked["commit"] == f"{commit}-dirty"
    (checkout / ".git").rename(checkout / "git")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(checkout.parent))
    with pytest.raises(SystemExit, match="no checkout of git"):
        records.environment()


TABLE = "| a |\n| --- |\n| 1 |\n\n*2 records · commit 0123456*"
WRONG = {
    "<!-- table uci -->| 1 |<!-- end -->": "table `uci` is stale",
    "<!-- table none -->| 1 |<!-- end -->": "there is no table `none`",
    "<!-- figure posteriors met -->": "the marker of `posteriors met` is not closed",
    TABLE: "neither between markers nor frozen: `| a |",
    TABLE + " Frozen: records are in the history.": "neither between markers nor frozen",
    TABLE + " Frozen: records are in the history at commit 0123456.": "",
    f"```\n{TABLE}\n```\n": "",
}


@pytest.mark.parametrize("text, complaint", WRONG.items())
def test_pages_have_tables_of_records_or_frozen_ones(text, complaint):
    found = [*tables.complaints(text, "page")]
    assert len(found) == bool(complaint) and complaint in "".join(found)


def test_no_table_is_stale(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["tables.py", "--check"])
    assert (tables.main(), capsys.readouterr().out) == (0, "")


# Tables that scripts print about their own runs.
PRINTED = ("quickstart", "uci", "ladder", "posteriors", "nuts-networks", "calibration")
PRINTED += ("bias-forms", "tall", "step-cost-all", "compilation", "which-method digits")


@pytest.mark.parametrize("name", PRINTED)
def test_a_table_can_have_a_single_record(name):
    _, query, (file, *_) = tables.TABLES[name]
    runs = tables.frame_of(file)
    record = (runs.query(query, engine="python") if query else runs)["record"].iloc[-1]
    rows, line = tables.shown(name, [record]).split("\n\n")
    assert len(rows.splitlines()) > 2 and line.startswith("*1 record · commit"), rows
    assert tables.shown(name, []) == frames.NO_RECORD


def test_records_are_written_as_csv(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["tables.py", "--csv", str(tmp_path)])
    assert tables.main() == 0
    names = {path.stem for path in frames.RESULTS.glob("*.jsonl")}
    assert {path.stem for path in tmp_path.glob("*.csv")} == names
    written = pd.read_csv(tmp_path / "tall.csv")
    found = records.read(frames.RESULTS / "tall.jsonl")
    assert list(written["mean_error"]) == [record["mean_error"] for record in found]
    assert list(written["method"]) == [record["cell"]["method"] for record in found]
