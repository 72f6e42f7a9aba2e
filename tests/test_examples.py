import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.slow
def test_quickstart(tmp_path):
    sampler, page = "smile_naive", tmp_path / "quickstart.html"
    command = [EXAMPLES / "quickstart.py", "--smoke", "--sampler", sampler, "--output", page]
    run = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, check=True
    )
    header, ensemble, sampled = run.stdout.splitlines()[:3]
    assert header.split()[:5] == ["test", "set", "LPPD", "accuracy", "F1"]
    assert ensemble.startswith("deep ensemble") and sampled.startswith(sampler)
    assert page.read_text().count("data:image/png") == 9


@pytest.mark.slow
def test_uci(tmp_path):
    """Diabetes comes with scikit-learn; the second run computes nothing."""
    command = [EXAMPLES / "uci.py", "--smoke", "--data", "diabetes", "--directory", tmp_path]

    def table():
        words = [sys.executable, *map(str, command)]
        run = subprocess.run(words, capture_output=True, text=True, check=True)
        assert "chains: 2, draws of each: 10" in run.stdout
        return run.stdout.splitlines()[-4:]

    header, ensemble, sampled, written = table()
    assert header.split()[:5] == ["test", "set", "LPPD", "RMSE", "CRPS"]
    assert ensemble.startswith("deep ensemble") and sampled.startswith("psmile")
    assert written == f"report: {tmp_path / 'report.html'}"
    assert (tmp_path / "report.html").read_text().count("data:image/png") == 6
    assert table() == [header, ensemble, sampled, written]


def test_uci_without_data_or_network(tmp_path):
    command = [sys.executable, str(EXAMPLES / "uci.py"), "--smoke", "--data", "energy"]
    environment = {name: x for name, x in os.environ.items() if name != "OPTAX_SMILE_DATA"}
    environment |= {"SCIKIT_LEARN_DATA": str(tmp_path), "https_proxy": "http://127.0.0.1:9"}
    for asked, told in ([], "`--download`) asks OpenML"), (["--download"], "OpenML cannot be"):
        run = subprocess.run([*command, *asked], capture_output=True, text=True, env=environment)
        assert run.returncode == 1 and "Traceback" not in run.stderr
        assert "Set OPTAX_SMILE_DATA to a folder with uci/energy.data, or take" in run.stderr
        assert told in run.stderr


def run_multi_device(*arguments, num_devices) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "multi_device.py"), "--smoke", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(num_devices)},
    )


def multi_device(*arguments) -> list[str]:
    run = run_multi_device(*arguments, num_devices=8)
    run.check_returncode()
    return run.stdout.splitlines()


@pytest.mark.slow
def test_multi_device_says_what_to_set():
    alone = run_multi_device(num_devices=1)
    assert alone.returncode == 1 and "Traceback" not in alone.stderr
    assert "JAX_NUM_CPU_DEVICES=8 python examples/multi_device.py" in alone.stderr
    uneven = run_multi_device("--data", 3, num_devices=4)
    rule = "--data must divide the number of devices, 4, got 3."
    assert (uneven.returncode, uneven.stderr.strip()) == (1, rule)


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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lenet", "resnet", "vit", "nanogpt"])
def test_networks_of_the_paper(name, tmp_path):
    """The second run reads what the first one left, and finds the same."""
    if "OPTAX_SMILE_DATA" not in os.environ:
        pytest.skip("needs the folder OPTAX_SMILE_DATA")
    page = tmp_path / f"{name}.html"
    command = [
        EXAMPLES / f"{name}.py",
        "--smoke",
        "--output",
        page,
        "--directory",
        tmp_path / "run",
    ]

    def lines():
        words = [sys.executable, *map(str, command)]
        run = subprocess.run(words, capture_output=True, text=True, check=True)
        return run.stdout.splitlines()

    header, ensemble, sampled, *written = found = lines()
    scores = ["perplexity"] if name == "nanogpt" else ["LPPD", "accuracy", "F1"]
    assert header.split()[: 2 + len(scores)] == ["test", "set", *scores]
    assert ensemble.startswith("deep ensemble") and sampled.startswith("psmile")
    assert ensemble.split()[2:] != sampled.split()[1:]
    assert written[0] == f"report: {page}" and "data:image/png" in page.read_text()
    if name == "nanogpt":
        text = tmp_path / "nanogpt-text.html"
        assert written[1] == f"text: {text}" and text.read_text().count('nats" style') > 30
        assert lines() == found


def test_a_report_that_is_no_page_is_refused_before_the_run():
    command = [sys.executable, str(EXAMPLES / "lenet.py"), "--smoke", "--output", "page.txt"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2 and "--output must end in .html, got page.txt" in run.stderr


@pytest.mark.parametrize("num_chains, num_draws", [(2, 16), (4, 10), (3, 2), (1, 1), (8, 1)])
def test_text_is_written_by_draws_of_every_chain(num_chains, num_draws):
    sys.path[:0] = [str(EXAMPLES)]
    import nanogpt

    chosen = nanogpt.spread(num_chains, num_draws)
    assert len(set(chosen)) == min(nanogpt.NUM_VOICES, num_chains * num_draws)
    counts = np.bincount([place % num_chains for place in chosen], minlength=num_chains)
    assert counts.max() - counts.min() <= 1


def test_networks_without_data():
    """At once, with the command that prepares them; nothing is downloaded."""
    pytest.importorskip("tensorflow_datasets")
    hidden = {"OPTAX_SMILE_DATA", "TFDS_DATA_DIR"}
    environment = {name: x for name, x in os.environ.items() if name not in hidden}
    command = [sys.executable, str(EXAMPLES / "lenet.py"), "--smoke"]
    run = subprocess.run(
        command, capture_output=True, text=True, env=environment | {"TFDS_DATA_DIR": "/nowhere"}
    )
    assert run.returncode == 1 and "Traceback" not in run.stderr
    assert "tfds build fashion_mnist" in run.stderr and "OPTAX_SMILE_DATA" in run.stderr
