"""The page about a run: what the run stored is in it, whatever the run stored."""

import base64
import html
import io
import json
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import matplotlib.figure
import matplotlib.image
import numpy as np
import pytest
from runs import refused

import optax_smile
from optax_smile import diagnostics, metrics, report

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(40, 3)).astype(np.float32)
LABELS = RNG.integers(0, 4, 40)
TARGETS = RNG.normal(size=40).astype(np.float32)
CHAINS, DRAWS = 3, 24
ARROWS = {"LPPD": "↑", "accuracy": "↑", "F1": "↑", "Brier": "↓", "ECE": "↓", "AURC": "↓"}


def logits(params: Any, inputs) -> Any:
    return inputs @ params["w"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    def loss(params, batch):
        return jnp.mean((params["w"] - batch) ** 2)

    start = {"w": jnp.asarray(RNG.normal(size=(CHAINS, 3, 4)), jnp.float32)}
    # A batch is no list of examples, but of the shape of the parameters.
    batches = [x + np.zeros((1, 4), np.float32) for x in (INPUTS[:3, :1], INPUTS[3:6, :1])]
    sampler = optax_smile.smile(0.1, reject_quantile=0.98, num_data=10, key=1)
    given: dict[str, Any] = {"num_warmup": 1, "num_draws": DRAWS, "thin": 5, "key": 0}
    given |= {"progress": False, "directory": tmp_path_factory.mktemp("<1>"), "check": False}
    optax_smile.sample(loss, start, batches, sampler, **given)
    return given["directory"]


@pytest.fixture
def draws(run):
    for stored in run.glob("prediction-*"):
        stored.unlink()
    return optax_smile.load_snapshots(run)


@pytest.fixture(autouse=True)
def without_pixels(monkeypatch):
    """Most of the time of a page goes into them; the test of the command looks at them."""
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda _, file, **__: None)


def predict(draws, model: Any = logits, likelihood="categorical", targets: Any = LABELS, **given):
    given = {"inputs": INPUTS, "likelihood": likelihood, "targets": targets, "per": "draw"} | given
    return optax_smile.predict(model, draws, **given)


def page_of(run, prediction, targets, names=("test",)) -> str:
    """Store a prediction under some names and write the page."""
    for name in names:
        report.store(run, name, prediction, targets=targets)
    return html.unescape(report.write(run).read_text())


CAPTION = re.compile(r"<figcaption>([^<]*)")


def test_classification(run, draws):
    prediction = predict(draws)
    page = page_of(run, prediction, LABELS)
    scores = {x: getattr(metrics, x.lower())(prediction.mean, LABELS) for x in list(ARROWS)[1:]}
    for name, score in ({"LPPD": metrics.lppd(prediction.log_density)} | scores).items():
        assert f">{name} {ARROWS[name]}</th>" in page and f">{score:.4g}</td>" in page
    # Step sizes, energy errors, paths and the calibration.
    assert len(CAPTION.findall(page)) == 4 and "No plot" not in page
    cell = '</td><td style="text-align: left">'
    assert f"reject_quantile{cell}0.98<" in page and f"num_data{cell}10<" in page
    assert "smile: 3 chains of 24 draws, 12 parameters" in page and str(run) in page
    # Of each draw one number per input is stored: not the probabilities, but the log density.
    by_density = prediction._replace(each=prediction.each._replace(mean=None))
    summary = diagnostics.summary(draws, by_density)
    assert summary.findings and f"<span>{len(summary.findings)} found</span>" in page
    assert all(x.text in page and x.advice in page for x in summary.findings)
    assert f"{summary.lppd:.5g}" in page and "Monte Carlo standard error of the LPPD" in page


def test_regression_and_tokens(run, draws):
    prediction = predict(draws, lambda p, x: (logits(p, x)[:, 0], 0.3), "gaussian", TARGETS)
    page = page_of(run, prediction, TARGETS, ("one", "two"))
    crps = metrics.crps(prediction.mean, np.sqrt(prediction.total), TARGETS)
    assert f">{crps:.4g}</td>" in page and "95 % coverage → 0.95</th>" in page
    assert [x.partition(":")[0] for x in CAPTION.findall(page)[3:]] == ["one", "two"]
    # Tokens have no mean.
    labels, inputs = LABELS.reshape(8, 5), INPUTS.reshape(8, 5, 3)
    tokens = predict(draws, lambda p, x: x @ p["w"][None], "tokens", labels, inputs=inputs)
    assert ">perplexity ↓</th>" in page_of(run, tokens, labels)


def test_a_damaged_prediction_is_named_and_the_page_before_stays(run, draws, tmp_path):
    path = report.write(run, tmp_path / "new" / "page.html", title="Digits & more")
    page, file = path.read_text(), run / "prediction-test.safetensors"
    assert "<h1>Digits &amp; more</h1>" in page and "<title>Digits &amp; more</title>" in page
    assert "<h2>Scores" not in page and "<1>" not in page
    report.store(run, "test", predict(draws), targets=LABELS)
    content = file.read_bytes()
    flipped = content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
    for damaged in content[:-200], b"", b"x" * 99, flipped:
        file.write_bytes(damaged)
        refused("The stored prediction .*test.* is damaged", report.write, run, path)
    assert path.read_text() == page and len(list(path.parent.iterdir())) == 1


@pytest.mark.nightly
def test_the_command(run, draws):
    """Warnings of Python itself, such as of a module imported twice, are errors."""
    report.store(run, "test", predict(draws), targets=LABELS, scores={"mine": 1e-7})
    words = [sys.executable, "-W", "error::RuntimeWarning", "-m", "optax_smile.report"]
    given: dict[str, Any] = {"capture_output": True, "text": True}
    done = subprocess.run([*words, run, "--title", "<my> run"], **given)
    assert (done.returncode, done.stdout) == (0, f"{run / 'report.html'}\n"), done.stderr
    page = (run / "report.html").read_text()
    assert "<h1>&lt;my&gt; run</h1>" in page and ">1e-07</td>" in page
    sources = re.findall(r'\b(?:src|href)="data:image/png;base64,([^"]*)"', page)
    assert len(sources) == page.count("src=") == 4 and "url(" not in page
    for source in sources:
        assert np.ptp(matplotlib.image.imread(io.BytesIO(base64.b64decode(source)))) > 0.5
    wrong = subprocess.run([*words, run.parent], **given)
    assert wrong.returncode == 1 and "Traceback" not in wrong.stderr
    assert "must be a directory of stored draws, with a manifest.json, got" in wrong.stderr


def test_what_does_not_fit_is_named(run, draws, tmp_path):
    unknown = predict(draws, targets=None)
    of_all: dict[str, Any] = {"name": "test", "prediction": predict(draws), "directory": run}
    for rule, given in {
        r"scores\['LPPD'\]=...\)` must be a number": {"scores": {"LPPD": "high"}},
        r"prediction=...\)` must be made with": {"prediction": unknown, "targets": LABELS},
        r"directory=...\)` must be a directory": {"directory": tmp_path},
        r"targets=...\)` .*classes from 0 to 3, got 1 to 4": {"targets": LABELS + 1},
    }.items():
        refused(r"`report.store\(" + rule, report.store, **of_all | given)
    assert not list(run.glob("prediction-*"))
    (tmp_path / "manifest.json").write_bytes((run / "manifest.json").read_bytes())
    refused(r"`report.write\(directory=...\)` must be .* with draws", report.write, tmp_path)
    rule = r"write\(output=...\)` must be a path that ends in .html or"
    refused(rule, report.write, run, tmp_path / "a.txt")


def test_no_text_of_a_user_is_part_of_the_page(run, draws, tmp_path):
    script, copy = "<script>alert('1')</script>\"'", Path(shutil.copytree(run, tmp_path / "run"))
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest.pop("checksum")
    manifest["settings"] |= {script: script, "key": {script: script}}
    manifest["settings"]["sampler"] = {"name": script, script: [script]}
    manifest["versions"][script] = script
    checksum = f"{zlib.crc32(json.dumps(manifest, sort_keys=True).encode()):08x}"
    (copy / "manifest.json").write_text(json.dumps(manifest | {"checksum": checksum}))
    report.store(copy, "test", predict(draws), targets=LABELS, scores={script: 0.5})
    page = report.write(copy, tmp_path / f"{script.replace('/', '')}.html").read_text()
    assert "<script" not in page and page.count("&lt;script&gt;") >= 8
