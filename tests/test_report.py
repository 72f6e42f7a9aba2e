"""The page about a run: what the run stored is in it, whatever the run stored."""

import base64
import collections
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
import safetensors.numpy

import optax_smile
from optax_smile import metrics, report
from optax_smile.draws import _files

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
            0.1, num_data=10, tuner=None, reject_quantile=0.98, key=jax.random.key(1)
        ),
        num_warmup=1,
        num_draws=DRAWS,
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
        "ECE": metrics.ece(prediction.mean, LABELS),
        "F1": metrics.f1(prediction.mean, LABELS),
        "AURC": metrics.aurc(prediction.mean, LABELS),
    }.items():
        assert f"<th>{name}</th>" in page and f"<td>{score:.4g}</td>" in page
    assert html.escape(str(run)) in page and "<1>" not in page
    assert "3 chains of psmile, 24 draws each, 12 parameters" in page
    assert "across chains" in page
    assert [image.shape[1] for image in pictures(page)] == [1100] * 3
    assert all(np.ptp(image) > 0.5 for image in pictures(page))
    assert "reject_quantile" in page and "0.98" in page


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
        metrics.crps(prediction.mean, np.sqrt(prediction.total), TARGETS),
        metrics.rmse(prediction.mean, TARGETS),
        metrics.coverage(lower, upper, TARGETS),
        metrics.interval_width(lower, upper),
    ):
        assert f"<td>{score:.4g}</td>" in page
    assert len(pictures(page)) == 2


def test_tokens(run, draws):
    labels = LABELS.reshape(8, 5).copy()
    labels[0, 2:] = -1
    prediction = optax_smile.predict(
        lambda params, inputs: logits(params, inputs.reshape(40, 3)).reshape(8, 5, 4),
        draws,
        INPUTS.reshape(8, 5, 3),
        likelihood="tokens",
        targets=labels,
        per="draw",
    )
    report.store(run, "test", prediction, targets=labels)
    perplexity = np.exp(-classify(draws).log_density.reshape(8, 5)[labels >= 0].mean())
    assert f"<td>{perplexity:.4g}</td>" in report.write(run).read_text()


@pytest.mark.parametrize("outputs", [0, slice(0, 2)])
def test_yes_or_no_are_two_classes(run, draws, outputs):
    labels = np.stack([LABELS % 2, LABELS // 2 % 2], axis=1).astype(np.uint8)[:, outputs]
    prediction = optax_smile.predict(
        lambda params, inputs: logits(params, inputs)[:, outputs],
        draws,
        INPUTS,
        likelihood="bernoulli",
        targets=labels,
        per="draw",
    )
    ones = prediction.mean.ravel()
    got = report.score(prediction, labels)
    assert got["accuracy"] == np.mean((ones > 0.5) == labels.ravel())
    assert got["Brier"] == pytest.approx(2 * np.mean((ones - labels.ravel()) ** 2), abs=1e-6)
    report.store(run, "test", prediction, targets=labels)
    assert len(pictures(report.write(run).read_text())) == 2


def test_several_outputs(run, draws):
    """Their variances are no entropies."""
    targets = np.tile(TARGETS[:, None], (1, 4))
    prediction = optax_smile.predict(
        lambda params, inputs: (logits(params, inputs), 0.3),
        draws,
        INPUTS,
        likelihood="gaussian",
        targets=targets,
    )
    assert prediction.uncertainty == "variance"
    assert report.score(prediction, targets)["RMSE"] == metrics.rmse(prediction.mean, targets)
    for name in ("one", "two"):
        report.store(run, name, prediction, targets=targets)
    page = report.write(run).read_text()
    assert len(pictures(page)) == 1 and "has not seen" not in page


def test_an_own_likelihood(draws):
    likelihood = optax_smile.Likelihood(mean=None, log_density=lambda outputs, _: outputs[:, 0])
    prediction = optax_smile.predict(
        logits, draws, INPUTS, likelihood=likelihood, targets=np.zeros(40)
    )
    assert report.score(prediction, np.zeros(40)) == {
        "LPPD": pytest.approx(prediction.log_density.mean())
    }


def test_the_page_says_whether_predictions_were_judged(run, draws):
    report.store(run, "test", classify(draws, per="draw"), targets=LABELS)
    assert "Monte Carlo standard error of the LPPD" in report.write(run).read_text()
    report.store(run, "test", classify(draws, per="chain"), targets=LABELS)
    page = report.write(run).read_text()
    assert "Monte Carlo" not in page and "pass what" in page
    # As a run leaves them that went on later.
    report.store(run, "test", classify(draws.thinned(2), per="draw"), targets=LABELS)
    page = report.write(run).read_text()
    assert "are of fewer draws than there are now" in page and len(pictures(page)) == 2


def test_huge_runs_are_thinned_for_the_picture_of_their_paths(run, draws, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        report.plots, "chain_paths", lambda params, start, ax: drawn.append((params, start))
    )
    rates = []
    monkeypatch.setattr(
        report.plots, "rejections", lambda trace, nominal, ax: rates.append(nominal)
    )
    report.write(run)
    monkeypatch.setattr(report, "MOST_PARAMETERS", CHAINS * 12 * DRAWS // 3)
    report.write(run)
    (all_draws, start), (thinned, _) = drawn
    assert all_draws["w"].shape[1] == DRAWS and thinned["w"].shape[1] == DRAWS // 3
    np.testing.assert_array_equal(thinned["w"][:, -1], all_draws["w"][:, -1])
    np.testing.assert_array_equal(start["w"], draws.start["w"])
    assert rates == pytest.approx([0.02, 0.02])


def test_every_draw_is_read_once(run, draws, monkeypatch):
    report.store(run, "test", classify(draws, per="draw"), targets=LABELS)
    names = {file.name for kind in ("draw", "start") for file in run.glob(f"{kind}*")}
    reads = {}
    for function in ("read_arrays", "read_header"):
        counter, original = collections.Counter(), getattr(_files, function)

        def counted(block, *leaves, counter=counter, original=original):
            counter[block.path.name] += 1
            return original(block, *leaves)

        reads[function] = counter
        monkeypatch.setattr(_files, function, counted)
    report.write(run)
    assert len(names) == DRAWS + 1 and reads["read_arrays"] == dict.fromkeys(names, 1)
    # Headers hold the trace.
    assert reads["read_header"] == {name: 1 for name in names if not name.startswith("start")}


def test_one_draw(run, draws, tmp_path):
    """The first minutes of a run have few pictures, and a page."""
    for file in run.iterdir():
        if file.is_file() and not file.name.startswith("draw-"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    for file in run.glob("draw-00000000*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    page = report.write(tmp_path).read_text()
    assert len(pictures(page)) == 1 and "1 draws each" in page


@pytest.mark.parametrize("damage", ["cut", "empty", "no scores", "garbage"])
def test_a_damaged_prediction_is_named(run, draws, damage):
    report.store(run, "test", classify(draws), targets=LABELS)
    file = run / "prediction-test.safetensors"
    content = file.read_bytes()
    if damage == "no scores":
        file.write_bytes(safetensors.numpy.save({"mean": np.zeros(3)}))
    else:
        file.write_bytes({"cut": content[:-200], "empty": b"", "garbage": b"x" * 99}[damage])
    with pytest.raises(ValueError, match=f"The stored prediction {file} is damaged"):
        report.write(run)


def test_a_run_that_stored_nothing(run, draws):
    page = report.write(run).read_text()
    assert "The run stored none" in page and len(pictures(page)) == 1


def test_what_is_stored_comes_back(run, draws):
    prediction = classify(draws, per="draw")
    report.store(run, "test", prediction, targets=LABELS, scores={"mine": 0.25})
    stored = report.Stored(run / "prediction-test.safetensors")
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


@pytest.mark.slow
def test_the_command(run, draws, tmp_path):
    done = command(run)
    assert (done.returncode, done.stdout) == (0, f"{run / 'report.html'}\n"), done.stderr
    wrong = command(tmp_path)
    assert wrong.returncode == 1 and "Traceback" not in wrong.stderr
    unwritable = command(run, "--output", "/proc/page.html")
    assert unwritable.returncode == 1 and "Traceback" not in unwritable.stderr
    assert "must be a directory with a manifest.json, got" in wrong.stderr


def test_bad_input(run, draws, tmp_path):
    prediction = classify(draws)
    with pytest.raises(ValueError, match=r"`report.store\(name=...\)` must be a name of letters"):
        report.store(run, "../test", prediction)
    with pytest.raises(ValueError, match=r"`report.store\(name=...\)` must be .* at most 100"):
        report.store(run, "x" * 101, prediction)
    with pytest.raises(ValueError, match=r"`report.store\(scores=...\)` must be a number a number"):
        report.store(run, "test", prediction, scores={"LPPD": "high"})  # pyright: ignore
    with pytest.raises(ValueError, match=r"`report.store\(prediction=...\)` must be one made with"):
        report.store(run, "test", classify(draws, None), targets=LABELS)
    with pytest.raises(ValueError, match=r"`report.store\(directory=...\)` must be a directory"):
        report.store(tmp_path, "test", prediction)
    report.store(run, "test", prediction, scores={"mine": np.float32(1e-7)})  # pyright: ignore
    assert "<td>1e-07</td>" in report.write(run, tmp_path / "new" / "page.html").read_text()
    (run / "prediction-test.safetensors").unlink()
    with pytest.raises(ValueError, match="classes from 0 to 3, got 1 to 4"):
        report.store(run, "test", prediction, targets=LABELS + 1)
    assert not list(run.glob("prediction-*"))
    for draw in list(run.glob("draw-*")):
        draw.rename(tmp_path / draw.name)
    with pytest.raises(ValueError, match=r"`report.write\(directory=...\)` must be .* with draws"):
        report.write(run)
    for draw in tmp_path.glob("draw-*"):
        draw.rename(run / draw.name)
