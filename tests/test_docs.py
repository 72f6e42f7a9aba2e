"""The documentation as text; `.ci/run` builds it, and `.ci/nightly` runs its code."""

import re
from pathlib import Path

from test_imports import public_objects

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("[!_]*.md"))
RECIPES = sorted((ROOT / "docs" / "recipes").glob("[!i]*.md"))
# Commands are those of README.md and .ci/run; the rest is no code.
NOT_RUN = {"bash", "text", "diff", "{toctree}", "{eval-rst}"}


def test_blocks_of_code_are_cells():
    """Only `{code-cell}` is run, only on notebooks; recipes end in a prediction that is checked."""
    for page in PAGES:
        text = page.read_text()
        kinds = set(re.findall(r"^ *(?:```|:::)(\S+)", text, re.MULTILINE))
        assert kinds <= NOT_RUN | {"{code-cell}"}, page
        assert ("{code-cell}" in kinds) == text.startswith("---\nfile_format: mystnb\n"), page
    for page in RECIPES:
        _, _, rest = page.read_text().partition("optax_smile.predict(")
        assert "± {sd" in rest and "\nassert abs(mean" in rest, page


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


def test_every_page_is_two_clicks_away():
    """From the first page to a page or a folder, and from there to each of its pages."""
    docs = ROOT / "docs"
    first = (docs / "index.md").read_text()
    for page in docs.glob("[!i]*.md"):
        assert re.search(rf"^(.* <)?{page.stem}>?$", first, re.MULTILINE), page.name
    for folder in ("recipes", "notebooks", "api"):
        assert f"{folder}/index" in first
        index = (docs / folder / "index.md").read_text()
        for page in (docs / folder).glob("[!i]*.md"):
            assert f"({page.name})" in index and f"\n{page.stem}\n" in index, page.name
