"""The README: what it shows is what happens, and what it names exists."""

import re
import tomllib
from pathlib import Path

import jax
import pytest

import optax_smile

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
# The first block of each language.
FIRST = dict(reversed(BLOCKS))
NUMBER = r"-?\d+\.\d+"


@pytest.mark.slow
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


def test_the_line_that_changes_makes_a_sampler():
    names = {"train": range(10), "optax_smile": optax_smile, "jax": jax}
    exec(re.findall(r"^\+ (.*)", FIRST["diff"], re.MULTILINE)[0], names)
    assert optax_smile.stats(names["tx"].init(jax.numpy.zeros(3)))


def test_extras_and_links_exist():
    links = re.findall(r"\]\((?!https?:)([^)#]+)", TEXT)
    assert len(links) > 10 and not [link for link in links if not (ROOT / link).exists()]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pages = TEXT + "".join(page.read_text() for page in ROOT.glob("docs/**/[!_]*.md"))
    named = re.findall(r"""(?:\.|optax-smile)\[([\w,]+)\]['"]""", pages)
    assert len(named) > 4
    assert set(",".join(named).split(",")) <= project["optional-dependencies"].keys()
