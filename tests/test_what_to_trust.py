"""The page of findings: it shows each of them, and its runs are sick and healthy as it says."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from test_diagnostics import SICK

pytest.importorskip("matplotlib")
ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("findings_page", ROOT / "docs" / "findings.py")
assert spec and spec.loader
findings = sys.modules["findings_page"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(findings)
BLOCK = re.compile(r"<!-- finding (.*?) -->\n(.*?)\n<!-- end -->", re.DOTALL)


def test_the_page_shows_every_case_and_what_summary_says_of_it():
    cases, shown = findings.cases(), dict(BLOCK.findall(findings.PAGE.read_text()))
    assert set(cases) == {name.partition(",")[0] for name in SICK} | set(findings.UNTOLD)
    assert set(shown) == {"healthy", *cases}
    for name, case in cases.items():
        path = findings.path_of(name).relative_to(findings.FOLDER)
        assert f"![{case.alt}]({path.as_posix()})" in shown[name]
        said = "Nothing looks wrong" if name in findings.UNTOLD else f": {name}: "
        assert said in shown[name]
    assert shown["healthy"].endswith("Nothing looks wrong.\n```")
    files = list(findings.PICTURES.glob("*.png"))
    assert {file.stem for file in files} == {findings.path_of(x).stem for x in cases}
    assert sum(file.stat().st_size for file in files) < 1_500_000


# Each also runs a healthy one. Those of two findings run before each merge.
CASES = [
    pytest.param(x, marks=pytest.mark.slow if x in ("diverged", "frozen") else pytest.mark.nightly)
    for x in findings.cases()
]


@pytest.mark.parametrize("name", CASES)
def test_summary_finds_it_in_the_sick_run_alone(name):
    findings.judge(name)
