"""What the campaigns share: how large they are, and where their figures go."""

import json
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "benchmarks" / "results" / "faults.jsonl"


@pytest.fixture(scope="session")
def full(request) -> bool:
    """Whether the campaigns run as a whole: `pytest tests/faults --full -m ""`."""
    return request.config.getoption("full")


@pytest.fixture
def record(full, request):
    """Write what a whole campaign found; the short form writes nothing.

    `record(campaign, cases=, silent=, raw=, lost=)`, and `of=` where a campaign has parts: `silent`
    are wrong results without a word, `raw` tracebacks that are not ours, `lost` draws or chains.
    """

    def write(campaign: str, **figures):
        if not full:
            return
        describe = ["git", "describe", "--always", "--dirty"]
        commit = subprocess.run(describe, capture_output=True, text=True, cwd=ROOT, check=False)
        told = {
            "date": time.strftime("%Y-%m-%d"),
            "commit": commit.stdout.strip(),
            "command": f'pytest {request.path.relative_to(ROOT).as_posix()} --full -m ""',
        }
        with RECORDS.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"campaign": campaign, **figures, **told}) + "\n")

    return write
