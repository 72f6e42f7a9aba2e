"""Every example runs in seconds, and prints and writes what it says."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
REAL = pytest.mark.skipif("OPTAX_SMILE_DATA" not in os.environ, reason="needs OPTAX_SMILE_DATA")
pytestmark = pytest.mark.nightly


def lines_of(script: str, *arguments, **environment: str) -> list[str]:
    """What a script prints when it runs in seconds."""
    command = [sys.executable, EXAMPLES / script, "--smoke", *map(str, arguments)]
    options: Any = {"capture_output": True, "text": True, "check": True}
    return subprocess.run(command, env=os.environ | environment, **options).stdout.splitlines()


def test_quickstart(tmp_path):
    """`.ci/run` runs the whole of it; here with a step size of one's own."""
    page = tmp_path / "quickstart.html"
    given = ["--sampler", "smile", "--step-size", "0.1", "--output", page]
    header, ensemble, sampled = lines_of("quickstart.py", *given)[:3]
    assert header.split()[:5] == ["test", "set", "LPPD", "accuracy", "F1"]
    assert ensemble.startswith("deep ensemble") and sampled.startswith("smile")
    assert page.read_text().count("data:image/png") == 4


def test_uci(tmp_path):
    """Diabetes comes with scikit-learn; the second run computes nothing."""
    command = ["uci.py", "--data", "diabetes", "--directory", tmp_path]
    found = lines_of(*command)
    assert "chains: 2, draws of each: 10" in "\n".join(found)
    header, ensemble, sampled, written = found[-4:]
    assert header.split()[:5] == ["test", "set", "LPPD", "RMSE", "CRPS"]
    assert ensemble.startswith("deep ensemble") and sampled.startswith("psmile")
    assert written == f"report: {tmp_path / 'report.html'}"
    assert lines_of(*command)[-4:] == found[-4:]


def test_multi_device(tmp_path):
    devices = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    arguments = "multi_device.py", "--data", 2, "--directory", tmp_path
    mesh, chains, ensemble, sampled = lines_of(*arguments, **devices)
    assert mesh == "mesh: {'chain': 4, 'data': 2} of 8 devices, cpu"
    assert chains.endswith("(8, 32, 10) as P('chain',)")
    assert float(ensemble.removeprefix("deep ensemble: LPPD ")) < 0
    assert float(sampled.removeprefix("psmile: LPPD ")) < 0


@pytest.mark.parametrize("name", ["lenet", "resnet", "vit", "nanogpt"])
@REAL
def test_networks_of_the_paper(name, tmp_path):
    page = tmp_path / f"{name}.html"
    command = [f"{name}.py", "--output", page, "--directory", tmp_path / "run"]
    header, ensemble, sampled, *written = lines_of(*command)
    scores = ["perplexity"] if name == "nanogpt" else ["LPPD", "accuracy", "F1"]
    assert header.split()[: 2 + len(scores)] == ["test", "set", *scores]
    assert ensemble.startswith("deep ensemble") and sampled.startswith("psmile")
    assert ensemble.split()[2:] != sampled.split()[1:]
    assert written[0] == f"report: {page}" and "data:image/png" in page.read_text()


def test_lora():
    """Without `OPTAX_SMILE_DATA`."""
    header, *rows = lines_of("lora.py", "--sampler", "smile", OPTAX_SMILE_DATA="")
    assert header.split()[:4] == ["held-out", "text", "LPPD", "perplexity"]
    assert [row.split("  ")[0] for row in rows] == ["MAP", "smile, loop", "smile, partition"]
