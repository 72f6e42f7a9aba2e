"""Documentation, README and release as text: outputs are correct, and names exist.

`.ci/run` builds the pages, and `.ci/nightly` runs their code.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_imports import public_objects

import optax_smile

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEXT = (ROOT / "README.md").read_text()
# The first block of each language.
FIRST = dict(re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)[::-1])
NUMBER = r"-?\d+\.\d+"
PAGES = sorted((ROOT / "docs").rglob("[!_]*.md"))
RECIPES = sorted((ROOT / "docs" / "recipes").glob("[!i]*.md"))
# Commands are those of README.md and .ci/run; the rest is no code.
NOT_RUN = {"bash", "text", "diff", "{eval-rst}"}


def test_blocks_of_code_are_cells():
    """Sphinx runs Python blocks; recipes end in a prediction that is checked."""
    for page in PAGES:
        text = page.read_text()
        kinds = set(re.findall(r"^ *(?:```|:::)(\S+)", text, re.MULTILINE))
        assert kinds <= NOT_RUN | {"python"}, page
        fences = re.findall(r"^```python(.*)", text, re.MULTILINE)
        assert all(re.fullmatch(r"( tags=\[.*\])?", fence) for fence in fences), page
    for page in RECIPES:
        _, _, rest = page.read_text().partition(".predict(")
        assert "± {sd" in rest and "\nassert abs(mean" in rest, page


def test_reference_has_every_public_name():
    """Each name has a directive, or its module has one; Sphinx's `-W` rejects wrong targets."""
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


def test_help_begins_with_a_map_of_all_public_names():
    words = set(re.findall(r"\w+", optax_smile.__doc__ or ""))
    assert [name for name in optax_smile.__all__ if name not in words] == []


SEARCHED = """resume; burn-in; convergence; early stopping; calibration; SWAG; Laplace; deploy;
memory; GPUs; NaN; temperature; which sampler; Keras; slower than AdamW"""


def test_words_that_users_search_for_have_an_entry():
    """An index entry or a heading, which the site's search puts first."""
    pages = "".join(page.read_text() for page in PAGES)
    found = " ".join(re.findall(r"^(?:<!-- \{index\}|#).*", pages, re.MULTILINE)).lower()
    assert [word for word in SEARCHED.split(";") if word.strip().lower() not in found] == []


@pytest.mark.nightly
def test_hero_prints_what_is_shown(capsys):
    """The exact columns to the digit. Another compiler rounds the chain elsewhere: over five seeds
    means differ by 0.02 standard deviations, standard deviations by 12 %.
    """
    shown = FIRST["text"]
    exec(compile(FIRST["python"], "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert re.sub(NUMBER, "", printed) == re.sub(NUMBER, "", shown)
    for ran, told in zip(printed.splitlines(), shown.splitlines(), strict=True):
        assert ran.split("exact")[1] == told.split("exact")[1]
        for line in (ran, told):
            mean, sd, exact_mean, exact_sd = map(float, re.findall(NUMBER, line))
            assert abs(mean - exact_mean) < 0.2 * exact_sd and 0.6 < sd / exact_sd < 1.5


def test_extras_and_links_exist():
    links = re.findall(r"\]\((?!https?:)([^)#]+)", TEXT)
    assert len(links) > 10 and not [link for link in links if not (ROOT / link).exists()]
    pages = TEXT + "".join(page.read_text() for page in PAGES)
    named = re.findall(r"""(?:\.|optax-smile)\[([\w,]+)\]['"]""", pages)
    assert len(named) > 4
    assert set(",".join(named).split(",")) <= PROJECT["optional-dependencies"].keys()


def test_a_release_needs_the_tag_of_its_version():
    """Runs the command of release.yml. The citation names the same version."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    steps = {step.get("name"): step for step in workflow["jobs"]["build"]["steps"]}
    command = ["bash", "-e", "-c", steps["The tag names the version"]["run"]]
    version = optax_smile.__version__
    for tag, status in ((f"v{version}", 0), ("v0.0.0", 1), (f"v{version}1", 1)):
        run = subprocess.run(command, cwd=ROOT, env=os.environ | {"GITHUB_REF_NAME": tag})
        assert run.returncode == status, tag
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version


def test_the_paper_cites_its_bibliography():
    """In the form of the Journal of Open Source Software."""
    _, head, text = (ROOT / "paper" / "paper.md").read_text().split("---\n", 2)
    fields = {"title", "tags", "authors", "affiliations", "date", "bibliography"}
    assert yaml.safe_load(head).keys() == fields
    bibliography = (ROOT / "paper" / "paper.bib").read_text()
    entries = re.findall(r"^@\w+\{(\w+),$", bibliography, re.MULTILINE)
    assert sorted(entries) == sorted(set(re.findall(r"@(\w+)", text)))


WRONG_WORDS = (
    ("psmile(num_data=100, key=1)", 'psmile(num_data=100, key=1, integrator="leapfrogg")'),
    ("psmile(num_data=100, key=1)", 'psmile(num_data=100, key=1, decoherence_length="match")'),
    ("num_draws=4,", 'num_draws=4, batch_per="call",'),
    ('per="draw"', 'per="draws"'),
    ("stats(state).step_size", "stats(state).step_sise"),
)


@pytest.mark.nightly
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
