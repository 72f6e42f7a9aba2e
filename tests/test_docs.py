"""The documentation as text; `.ci/run` builds it, which runs its code and follows its links."""

import re
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
    text = page.read_text()
    predicted = text.index("optax_smile.predict(")
    assert "± {sd" in text[predicted:] and "\nassert abs(mean" in text[predicted:]


def test_reference_has_every_public_name():
    """A directive for each, or one for its module; `-W` refuses those that lead nowhere."""
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    assert set(re.findall(r"currentmodule:: (\S+)", pages)) == {"optax_smile"}
    found = re.findall(r"^\.\. auto(class|function|module):: (\S+)", pages, re.MULTILINE)
    assert len(found) == len(set(found))
    modules = {name.split(".")[1] for kind, name in found if kind == "module"}
    named = {name for kind, name in found if kind != "module"}
    public = {name for name, _ in public_objects()}
    assert {name for name in public if "." not in name} == named
    assert {name.partition(".")[0] for name in public if "." in name} == modules


@pytest.mark.parametrize("folder", ["recipes", "notebooks", "api"])
def test_two_clicks(folder):
    """From the first page to a folder, and from there to each of its pages."""
    docs = ROOT / "docs"
    assert f"{folder}/index" in (docs / "index.md").read_text()
    index = (docs / folder / "index.md").read_text()
    for page in (docs / folder).glob("[!i]*.md"):
        assert f"({page.name})" in index and f"\n{page.stem}\n" in index, page.name


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "index.md").read_text()
    for page in (ROOT / "docs").glob("[!i]*.md"):
        assert re.search(rf"^(.* <)?{page.stem}>?$", index, re.MULTILINE), page.name
