"""The documentation: all code in it runs while it is built, and it names all that is public."""

import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from test_imports import public_objects

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("[!_]*.md"))
RECIPES = sorted((ROOT / "docs" / "recipes").glob("[!i]*.md"))
# Commands are those of README.md and .ci/run; the rest is no code.
NOT_RUN = {"bash", "text", "diff", "{toctree}", "{eval-rst}"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_of_code_are_cells(page):
    """Only `{code-cell}` is run, and only on pages that say that they are notebooks."""
    text = page.read_text()
    kinds = set(re.findall(r"^ *(?:```|:::)(\S+)", text, re.MULTILINE))
    assert kinds <= NOT_RUN | {"{code-cell}"}
    assert ("{code-cell}" in kinds) == text.startswith("---\nfile_format: mystnb\n")


@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.stem)
def test_recipes_end_in_a_prediction_that_is_checked(page):
    assert page.name in (page.parent / "index.md").read_text()
    text = page.read_text()
    predicted = text.index("optax_smile.predict(")
    assert "± {sd" in text[predicted:] and "\nassert abs(mean" in text[predicted:]


def names_in(inventory):
    """Names of Python objects that Sphinx has written down."""
    header = inventory.read_bytes().split(b"\n", 4)
    lines = zlib.decompress(header[-1]).decode().splitlines()
    return {name for name, kind, *_ in map(str.split, lines) if kind.startswith("py:")}


@pytest.mark.slow
def test_build(tmp_path):
    """Warnings are errors: dead links, cells that fail or warn, names that do not exist."""
    site = tmp_path / "html"
    options = ["-q", "-W", "--keep-going", "-j", "2", "-c", "docs", ".", str(site)]
    run = subprocess.run(
        [sys.executable, "-m", "sphinx", *options], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    public = {f"optax_smile.{name}" for name, _ in public_objects()}
    assert public - names_in(site / "objects.inv") == set()
    assert "docs/index.html" in (site / "index.html").read_text()
    fetched = re.compile(r'<(?:script|link|img)[^>]* (?:src|href)="(https?:[^"]*)')
    for page in site.rglob("*.html"):
        assert not fetched.search(page.read_text()), page.name
