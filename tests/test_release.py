"""What a release says about itself fits the package."""

import os
import re
import tomllib
from pathlib import Path
from typing import Any

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
    python = [
        tuple(map(int, version.split(".")))
        for version in re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    ]
    oldest = ".".join(map(str, min(python)))
    assert PROJECT["requires-python"] == f">={oldest}"
    assert python == sorted(python) and len(python) == python[-1][1] - python[0][1] + 1


def test_nothing_is_published_before_a_person_turns_it_on():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    publishes = [
        name for name, job in jobs.items() if "pypi-publish" in str(job) or "id-token" in str(job)
    ]
    assert publishes == ["publish"] and jobs["publish"]["needs"] == "build"
    assert "vars.PUBLISH == 'true'" in jobs["publish"]["if"]
    assert "refs/tags/" in jobs["publish"]["if"]
    assert {"run": ".ci/package"} in jobs["build"]["steps"]
    assert os.access(ROOT / ".ci" / "package", os.X_OK)
