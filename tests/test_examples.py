import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import lenet
import nanogpt
import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
REAL = pytest.mark.skipif("OPTAX_SMILE_DATA" not in os.environ, reason="needs OPTAX_SMILE_DATA")


def lines_of(script: str, *arguments, **environment: str) -> list[str]:
    """What a script prints when it runs in seconds."""
    command = [sys.executable, EXAMPLES / script, "--smoke", *map(str, arguments)]
    options: Any = {"capture_output": True, "text": True, "check": True}
    return subprocess.run(command, env=os.environ | environment, **options).stdout.splitlines()


@pytest.mark.nightly
def test_quickstart(tmp_path):
    """`.ci/run` runs the whole of it; here with a step size of one's own."""
    page = tmp_path / "quickstart.html"
    given = ["--sampler", "smile", "--step-size", "0.1", "--output", page]
    header, ensemble, sampled = lines_of("quickstart.py", *given)[:3]
    assert header.split()[:5] == ["test", "set", "LPPD", "accuracy", "F1"]
    assert ensemble.startswith("deep ensemble") and sampled.startswith("smile")
    assert page.read_text().count("data:image/png") == 4


@pytest.mark.slow
def test_uci(tmp_path):
    """Diabetes comes with scikit-learn; the second run computes nothing."""
    command = ["uci.py", "--data", "diabetes", "--directory", tmp_path]
    found = lines_of(*command)
    assert "chains: 2, draws of each: 10" in "\n".join(found)
    header, ensemble, sampled, written = found[-4:]
    assert header.split()[:5] == ["test", "set", "LPPD", "RMSE", "CRPS"]
    assert ensemble.startswith("deep ensemble") and sampled.startswith("psmile")
    assert written == f"report: {tmp_path / 'report.html'}"
    assert (tmp_path / "report.html").read_text().count("data:image/png") == 5
    assert lines_of(*command)[-4:] == found[-4:]


DEVICES = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}


@pytest.mark.nightly
def test_multi_device(tmp_path):
    """The second run computes nothing: it predicts from what the first one wrote."""
    arguments = "multi_device.py", "--data", 2, "--directory", tmp_path
    mesh, chains, ensemble, sampled = lines_of(*arguments, **DEVICES)
    assert mesh == "mesh: {'chain': 4, 'data': 2} of 8 devices, cpu"
    assert chains.endswith("(8, 32, 10) as P('chain',)")
    assert float(ensemble.removeprefix("deep ensemble: LPPD ")) < 0
    assert float(sampled.removeprefix("psmile: LPPD ")) < 0
    assert {path.name for path in tmp_path.iterdir()} == {"warmstart", "draws"}
    draws = sorted((tmp_path / "draws").glob("draw-*"))
    written = [path.stat().st_mtime_ns for path in draws]
    assert len(draws) == 5
    assert lines_of(*arguments, **DEVICES) == [mesh, chains, ensemble, sampled]
    assert [path.stat().st_mtime_ns for path in draws] == written
    # What to set is a sentence in place of a traceback.
    for number, given, rule in (
        ("1", [], "JAX_NUM_CPU_DEVICES=8 python examples/multi_device.py"),
        ("4", ["--data", 3], "--data must divide the number of devices, 4, got 3."),
    ):
        with pytest.raises(subprocess.CalledProcessError) as caught:
            lines_of("multi_device.py", *given, **DEVICES | {"JAX_NUM_CPU_DEVICES": number})
        assert caught.value.returncode == 1 and "Traceback" not in caught.value.stderr
        assert rule in caught.value.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["lenet", "resnet", "vit", "nanogpt"])
@REAL
def test_networks_of_the_paper(name, tmp_path):
    """The second run reads what the first one left, and finds the same."""
    page = tmp_path / f"{name}.html"
    command = [f"{name}.py", "--output", page, "--directory", tmp_path / "run"]
    header, ensemble, sampled, *written = found = lines_of(*command)
    scores = ["perplexity"] if name == "nanogpt" else ["LPPD", "accuracy", "F1"]
    assert header.split()[: 2 + len(scores)] == ["test", "set", *scores]
    assert ensemble.startswith("deep ensemble") and sampled.startswith("psmile")
    assert ensemble.split()[2:] != sampled.split()[1:]
    assert written[0] == f"report: {page}" and "data:image/png" in page.read_text()
    if name == "nanogpt":
        text = tmp_path / "nanogpt-text.html"
        assert written[1] == f"text: {text}" and text.read_text().count('nats" style') > 30
        assert lines_of(*command) == found


def test_uci_without_data_or_network(monkeypatch):
    """A sentence in place of a traceback."""
    from sklearn import datasets

    def unreachable(*_, **__):
        raise OSError("no route to host")

    monkeypatch.delenv("OPTAX_SMILE_DATA", raising=False)
    monkeypatch.setattr(datasets, "fetch_openml", unreachable)
    load = runpy.run_path(str(EXAMPLES / "uci.py"))["load"]
    for name, download, told in (
        ("energy.data", False, "`--download`) asks OpenML"),
        ("energy.data", True, "OpenML cannot be reached (no route to host"),
        ("yacht.txt", True, "yacht, which is not on OpenML"),
    ):
        with pytest.raises(SystemExit) as caught:
            load(name.partition(".")[0], 0, download)
        text = str(caught.value)
        assert f"Set OPTAX_SMILE_DATA to a folder with uci/{name}, or take" in text
        assert told in text


def test_networks_end_at_once_without_data_or_page(monkeypatch, capsys):
    """With the command that prepares the data; nothing is downloaded."""
    pytest.importorskip("tensorflow_datasets")
    monkeypatch.delenv("OPTAX_SMILE_DATA", raising=False)
    monkeypatch.setenv("TFDS_DATA_DIR", "/nowhere")
    for given, rule in (
        ([], "(?s)(?=.*tfds build fashion_mnist).*OPTAX_SMILE_DATA"),
        (["--output", "page.txt"], "--output must end in .html, got page.txt"),
    ):
        monkeypatch.setattr(sys, "argv", ["lenet.py", "--smoke", *given])
        with pytest.raises(SystemExit) as caught:
            lenet.experiment.main("lenet", lenet.__doc__, lenet.PRESETS, lenet.build)
        assert re.search(rule, f"{caught.value}\n{capsys.readouterr().err}")


def test_text_is_written_by_draws_of_every_chain():
    for num_chains, num_draws in ((2, 16), (4, 10), (3, 2), (1, 1), (8, 1)):
        chosen = nanogpt.spread(num_chains, num_draws)
        assert len(set(chosen)) == min(nanogpt.NUM_VOICES, num_chains * num_draws)
        assert np.ptp(np.bincount([x % num_chains for x in chosen], minlength=num_chains)) <= 1
