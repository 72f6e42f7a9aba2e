import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("sampler", ["psmile", "smile_naive"])
def test_quickstart(sampler, tmp_path):
    picture = tmp_path / "quickstart.png"
    command = [EXAMPLES / "quickstart.py", "--smoke", "--sampler", sampler, "--output", picture]
    run = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, check=True
    )
    header, ensemble, sampled = run.stdout.splitlines()[:3]
    assert header.split() == ["test", "set", "LPPD", "accuracy", "Brier", "ECE"]
    assert ensemble.startswith("deep ensemble") and sampled.startswith(sampler)
    assert picture.read_bytes().startswith(b"\x89PNG")
