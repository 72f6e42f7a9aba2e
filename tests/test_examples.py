import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def multi_device(*arguments) -> list[str]:
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / "multi_device.py"), "--smoke", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"},
    )
    return run.stdout.splitlines()


@pytest.mark.slow
def test_multi_device(tmp_path):
    """The second run computes nothing: it predicts from what the first one wrote."""
    arguments = "--data", 2, "--directory", tmp_path
    mesh, chains, ensemble, sampled = multi_device(*arguments)
    assert mesh == "mesh: {'chain': 4, 'data': 2} of 8 devices, cpu"
    assert chains.endswith("(8, 32, 10) as P('chain',)")
    assert float(ensemble.removeprefix("deep ensemble: LPPD ")) < 0
    assert float(sampled.removeprefix("psmile: LPPD ")) < 0
    assert {path.name for path in tmp_path.iterdir()} == {"warmstart", "draws"}
    assert len(list((tmp_path / "draws").glob("draw-*"))) == 5
    written = [path.stat().st_mtime_ns for path in sorted((tmp_path / "draws").glob("draw-*"))]
    assert multi_device(*arguments) == [mesh, chains, ensemble, sampled]
    again = [path.stat().st_mtime_ns for path in sorted((tmp_path / "draws").glob("draw-*"))]
    assert again == written
