import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_quickstart(tmp_path):
    sampler, picture = "smile_naive", tmp_path / "quickstart.png"
    command = [EXAMPLES / "quickstart.py", "--smoke", "--sampler", sampler, "--output", picture]
    run = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, check=True
    )
    header, ensemble, sampled = run.stdout.splitlines()[:3]
    assert header.split() == ["test", "set", "LPPD", "accuracy", "Brier", "ECE"]
    assert ensemble.startswith("deep ensemble") and sampled.startswith(sampler)
    assert picture.read_bytes().startswith(b"\x89PNG")
