"""The page about a run: what the run stored is in it, whatever the run stored."""

import base64
import html
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest

import optax_smile
from optax_smile import metrics, report

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(40, 3)).astype(np.float32)
LABELS = RNG.integers(0, 4, 40)
TARGETS = RNG.normal(size=40).astype(np.float32)
CHAINS, DRAWS = 3, 24


def logits(params: Any, inputs) -> Any:
    return inputs @ params["w"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("some run <1>")
    optax_smile.sample(
        lambda params, batch: jnp.mean((params["w"] - batch) ** 2),
        {"w": jnp.asarray(RNG.normal(size=(CHAINS, 3, 4)), jnp.float32)},
        [INPUTS[:3, :1] + np.zeros((1, 4), np.float32), INPUTS[3:6, :1] + np.zeros((1, 4), "f4")],
        optax_smile.psmile(
            0.1, num_data=10, reset_momentum="refresh", tuner=None, key=jax.random.key(1)
        ),
        num_warmup=1,
        num_samples=DRAWS,
        thin=5,
        key=jax.random.key(0),
        progress=False,
        directory=directory,
    )
    return directory


@pytest.fixture
def draws(run):
    for stored in run.glob("prediction-*"):
        stored.unlink()
    return optax_smile.load_snapshots(run)


def classify(draws, targets: Any = LABELS, **arguments):
    return optax_smile.predict(
        logits, draws, INPUTS, likelihood="categorical", targets=targets, **arguments
    )


def pictures(page: str) -> list[np.ndarray]:
    found = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    return [matplotlib.image.imread(io.BytesIO(base64.b64decode(each))) for each in found]


def test_classification(run, draws, tmp_path):
    prediction = classify(draws, per="draw")
    report.store(run, "test", prediction, targets=LABELS)
    report.store(run, "unseen", classify(draws, None))
    path = report.write(run, tmp_path / "page.html")
    page = path.read_text()
    for name, score in {
        "LPPD": metrics.lppd(prediction.log_density),
        "accuracy": metrics.accuracy(prediction.mean, LABELS),
        "Brier": metrics.brier(prediction.mean, LABELS),
        "AURC": metrics.aurc(prediction.mean, LABELS),
    }.items():
        assert f"<th>{name}</th>" in page and f"<td>{score:.4f}</td>" in page
    assert html.escape(str(run)) in page and "<1>" not in page
    assert "3 chains of psmile, 24 draws each, 12 parameters" in page
    assert "across chains" in page
    assert [image.shape[1] for image in pictures(page)] == [1100] * 3
    assert all(np.ptp(image) > 0.5 for image in pictures(page))
    assert "reset_quantile" in page and "0.98" in page


def test_regression(run, draws):
    def outputs(params, inputs):
        return logits(params, inputs)[:, 0], 0.3

    prediction = optax_smile.predict(
        outputs, draws, INPUTS, likelihood="gaussian", targets=TARGETS, per="draw"
    )
    report.store(run, "test", prediction, targets=TARGETS)
    page = report.write(run).read_text()
    lower, upper = metrics.interval(prediction.mean, np.sqrt(prediction.total), 0.95)
    for score in (
        metrics.rmse(prediction.mean, TARGETS),
        metrics.coverage(lower, upper, TARGETS),
        metrics.interval_width(lower, upper),
    ):
        assert f"<td>{score:.4f}</td>" in page
    assert len(pictures(page)) == 2


def test_tokens(run, draws):
    labels = LABELS.reshape(8, 5)
    prediction = optax_smile.predict(
        lambda params, inputs: inputs @ params["w"][None],
        draws,
        INPUTS.reshape(8, 5, 3),
        likelihood="tokens",
        targets=labels,
        per="draw",
    )
    report.store(run, "test", prediction, targets=labels)
    perplexity = np.exp(-classify(draws).log_density.mean())
    assert f"<td>{perplexity:.4f}</td>" in report.write(run).read_text()


def test_a_run_that_stored_nothing(run, draws):
    page = report.write(run).read_text()
    assert "The run stored none" in page and len(pictures(page)) == 1


def test_what_is_stored_comes_back(run, draws):
    prediction = classify(draws, per="draw")
    report.store(run, "test", prediction, targets=LABELS, scores={"mine": 0.25})
    stored = report.Stored(run / "prediction-test.npz")
    assert (stored.name, stored.scores) == ("test", {"mine": 0.25})
    np.testing.assert_array_equal(stored.targets, LABELS)
    for field in ("mean", "log_density", "total", "aleatoric"):
        kept, given = getattr(stored.prediction, field), getattr(prediction, field)
        np.testing.assert_array_equal(kept, given)
    np.testing.assert_array_equal(stored.prediction.each.log_density, prediction.each.log_density)


def command(*arguments) -> subprocess.CompletedProcess:
    """Warnings of Python itself, such as of a module imported twice, are errors."""
    words = [sys.executable, "-W", "error::RuntimeWarning", "-m", "optax_smile.report", *arguments]
    return subprocess.run(list(map(str, words)), capture_output=True, text=True)


def test_the_command(run, draws, tmp_path):
    done = command(run)
    assert (done.returncode, done.stdout) == (0, f"{run / 'report.html'}\n"), done.stderr
    wrong = command(tmp_path)
    assert wrong.returncode == 1 and "Traceback" not in wrong.stderr
    assert "must be a directory with a manifest.json, got" in wrong.stderr


def test_bad_input(run, draws, tmp_path):
    prediction = classify(draws)
    with pytest.raises(ValueError, match=r"`report.store\(name=...\)` must be a name of letters"):
        report.store(run, "../test", prediction)
    with pytest.raises(ValueError, match=r"`report.store\(directory=...\)` must be a directory"):
        report.store(tmp_path, "test", prediction)
    with pytest.raises(ValueError, match="classes from 0 to 3, got 1 to 4"):
        report.store(run, "test", prediction, targets=LABELS + 1)
    assert not list(run.glob("prediction-*"))
    for draw in list(run.glob("draw-*")):
        draw.rename(tmp_path / draw.name)
    with pytest.raises(ValueError, match=r"`report.write\(directory=...\)` must be .* with draws"):
        report.write(run)
    for draw in tmp_path.glob("draw-*"):
        draw.rename(run / draw.name)
