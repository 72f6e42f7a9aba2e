"""The report of a run contains what the run has stored, in all cases."""

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
from optax_smile import diagnostics, plots, report

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(40, 3)).astype(np.float32)
LABELS = RNG.integers(0, 4, 40)
TARGETS = RNG.normal(size=40).astype(np.float32)
CHAINS, DRAWS = 3, 24


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
    return optax_smile.load_snapshots(run)


@pytest.fixture(autouse=True)
def without_pixels(monkeypatch):
    """Most of the time of a page goes into them; the test of the command looks at them."""
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda _, file, **__: None)


def predict(draws, model: Any = logits, likelihood="categorical", targets: Any = LABELS, **given):
    given = {"inputs": INPUTS, "likelihood": likelihood, "targets": targets, "per": "draw"} | given
    return optax_smile.predict(model, draws, **given)


def band():
    """A plot to be shown."""
    return plots.regression_band(INPUTS[:, 0], TARGETS, np.ones(40), TARGETS)


CAPTION = re.compile(r"<figcaption>([^<]*)")


def test_what_is_on_the_page(run, draws):
    prediction = predict(draws)
    given: Any = {"pictures": {"calibration": plots.reliability(prediction.mean, LABELS)}}
    page = html.unescape(report.write(run, prediction=prediction, **given).read_text())
    # Step sizes, energy errors, paths and what was given.
    captions = CAPTION.findall(page)
    assert len(captions) == 4 and captions[3] == "calibration" and "No paths" not in page
    assert '"reject_quantile": 0.98' in page and '"num_data": 10' in page
    assert "3 chains of 24 draws" in page and "12 numbers per draw" in page and str(run) in page
    summary = diagnostics.summary(draws, prediction)
    assert summary.findings and str(summary).partition("\n\n")[0] in page
    assert all(x.text in page and x.advice in page for x in summary.findings)
    assert f"{summary.lppd:.5g}" in page and "Monte Carlo standard error of the LPPD" in page
    page = report.write(run, prediction=prediction.tempered(2.0)).read_text()
    assert "temperature of the prediction: 2;" in page
    # Without a prediction, and of tokens.
    page = html.unescape(report.write(run).read_text())
    assert str(diagnostics.summary(draws)).partition("\n\n")[2] in page
    labels, inputs = LABELS.reshape(8, 5), INPUTS.reshape(8, 5, 3)
    tokens = predict(draws, lambda p, x: x @ p["w"][None], "tokens", labels, inputs=inputs)
    assert "Monte Carlo" in report.write(run, prediction=tokens).read_text()


def test_a_page_that_fails_leaves_the_one_before(run, draws, tmp_path):
    path = report.write(run, tmp_path / "new" / "page.html", title="Digits & more")
    page = path.read_text()
    assert "<h1>Digits &amp; more</h1>" in page and "<title>Digits &amp; more</title>" in page
    assert "<1>" not in page
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    file = next(copy.glob("draw-00000003.*"))
    file.write_bytes(file.read_bytes()[:-9])
    refused("The snapshot .*draw-00000003.* is damaged", report.write, copy, path)
    assert path.read_text() == page and len(list(path.parent.iterdir())) == 1


@pytest.mark.nightly
def test_the_command(run):
    """Warnings of Python itself, such as of a module imported twice, are errors."""
    words = [sys.executable, "-W", "error::RuntimeWarning", "-m", "optax_smile.report"]
    given: dict[str, Any] = {"capture_output": True, "text": True}
    done = subprocess.run([*words, run, "--title", "<my> run"], **given)
    assert (done.returncode, done.stdout) == (0, f"{run / 'report.html'}\n"), done.stderr
    page = (run / "report.html").read_text()
    assert "<h1>&lt;my&gt; run</h1>" in page
    sources = re.findall(r'\b(?:src|href)="data:image/png;base64,([^"]*)"', page)
    assert len(sources) == page.count("src=") == 3 and "url(" not in page
    for source in sources:
        assert np.ptp(matplotlib.image.imread(io.BytesIO(base64.b64decode(source)))) > 0.5
    wrong = subprocess.run([*words, run.parent], **given)
    assert wrong.returncode == 1 and "Traceback" not in wrong.stderr
    assert "must be a directory of stored draws, with a manifest.json, got" in wrong.stderr


def test_what_does_not_fit_is_named(run, draws, tmp_path):
    form = r"`report.write\("
    rule = form + r"prediction=...\)` must be made by .* from these draws \(3 chains with 24"
    for unfit in predict(draws.thinned(2)), predict(draws, targets=None):
        refused(rule, report.write, run, prediction=unfit)
    refused(
        form + r"pictures=...\)` must be a dict of matplotlib axes",
        report.write,
        run,
        pictures={1: 2},
    )
    refused(form + r"directory=...\)` must be a directory", report.write, tmp_path)
    (tmp_path / "manifest.json").write_bytes((run / "manifest.json").read_bytes())
    refused(form + r"directory=...\)` must be .* with draws", report.write, tmp_path)
    rule = r"write\(output=...\)` must be a path that ends in .html or"
    refused(rule, report.write, run, tmp_path / "a.txt")


def test_no_text_of_a_user_is_part_of_the_page(run, tmp_path):
    script, copy = "<script>alert('1')</script>\"'", Path(shutil.copytree(run, tmp_path / "run"))
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest.pop("checksum")
    manifest["settings"] |= {script: script, "key": {script: script}}
    manifest["settings"]["sampler"] = {"name": script, script: [script]}
    manifest["versions"][script] = script
    checksum = f"{zlib.crc32(json.dumps(manifest, sort_keys=True).encode()):08x}"
    (copy / "manifest.json").write_text(json.dumps(manifest | {"checksum": checksum}))
    path = tmp_path / f"{script.replace('/', '')}.html"
    page = report.write(copy, path, title=script, pictures={script: band()}).read_text()
    assert "<script" not in page and page.count("&lt;script&gt;") >= 8
