"""Size of the campaigns, and records of their results."""

import json
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "benchmarks" / "results" / "faults.jsonl"


@pytest.fixture(scope="session")
def full(request) -> bool:
    """Whether the campaigns run in full: `pytest tests/faults --full -m ""`."""
    return request.config.getoption("full")


@pytest.fixture
def record(full, request):
    """Record the result of a full campaign; a short one writes nothing.

    `record(campaign, cases=, silent=, raw=, lost=)`, and `of=` where a campaign has parts: `silent`
    are wrong results without an error, `raw` tracebacks that are not ours, `lost` draws or chains.
    """

    def write(campaign: str, **figures):
        if not full:
            return
        describe = ["git", "describe", "--always", "--dirty"]
        commit = subprocess.run(describe, capture_output=True, text=True, cwd=ROOT, check=False)
        figures["date"], figures["commit"] = time.strftime("%Y-%m-%d"), commit.stdout.strip()
        file = request.path.relative_to(ROOT).as_posix()
        figures["command"] = f'pytest {file} --full -m ""'
        with RECORDS.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"campaign": campaign, **figures}) + "\n")

    return write
