"""What a release says about itself fits the package."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import optax_smile

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_citation_names_this_version_and_the_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == optax_smile.__version__
    assert citation["license"] == PROJECT["license"]
    (paper,) = citation["references"]
    assert [author["family-names"] for author in paper["authors"]][::4] == ["Sommer", "Rügamer"]
    assert paper["year"] == 2026 and "Mini-Batch Gradient Noise" in paper["title"]


def test_classifiers_begin_with_the_oldest_python_that_is_supported():
    minors = re.findall(r"Python :: 3\.(\d+)", "\n".join(PROJECT["classifiers"]))
    oldest, newest = int(minors[0]), int(minors[-1])
    assert PROJECT["requires-python"] == f">=3.{oldest}"
    assert list(map(int, minors)) == list(range(oldest, newest + 1))


WRONG_WORDS = (
    ("psmile(num_data=100, key=1)", 'psmile(num_data=100, key=1, integrator="leapfrogg")'),
    ("psmile(num_data=100, key=1)", 'psmile(num_data=100, key=1, decoherence_length="match")'),
    ("num_draws=4,", 'num_draws=4, batch_per="call",'),
    ('per="draw"', 'per="draws"'),
    ("stats(state).step_size", "stats(state).step_sise"),
)


@pytest.mark.slow
def test_a_wrong_word_is_an_error_of_the_type_checker(tmp_path):
    """In a user's file, which is right as it stands."""
    text = (ROOT / "tests" / "user.py").read_text()
    wrong = {right_wrong[1]: text.replace(*right_wrong) for right_wrong in WRONG_WORDS}
    assert all(changed != text for changed in wrong.values())
    for number, changed in enumerate([*wrong.values(), text]):
        (tmp_path / f"user_{number}.py").write_text(changed)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)]}))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    errors = json.loads(run.stdout)["generalDiagnostics"]
    found = {int(re.findall(r"user_(\d+)", error["file"])[0]) for error in errors}
    assert [word for number, word in enumerate(wrong) if number not in found] == []
    assert len(wrong) not in found, errors
