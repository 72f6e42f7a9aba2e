"""What a release says about itself fits the package."""

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
