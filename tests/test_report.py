"""The page about a run: what the run stored is in it, whatever the run stored."""

import base64
import collections
import dataclasses
import functools
import html
import io
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import matplotlib.figure
import matplotlib.image
import numpy as np
import pytest
import safetensors.numpy

import optax_smile
from optax_smile import diagnostics, metrics, plots, report
from optax_smile.diagnostics.findings import ADVICE
from optax_smile.draws import _format
from optax_smile.report import _page
from optax_smile.report._predictions import Stored

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(40, 3)).astype(np.float32)
LABELS = RNG.integers(0, 4, 40)
TARGETS = RNG.normal(size=40).astype(np.float32)
IMAGES = np.arange(40 * 4, dtype=np.uint8).reshape(40, 2, 2)
CHAINS, DRAWS = 3, 24


def logits(params: Any, inputs) -> Any:
    return inputs @ params["w"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("some run <1>")
    start = {"w": jnp.asarray(RNG.normal(size=(CHAINS, 3, 4)), jnp.float32)}
    batches = [x + np.zeros((1, 4), np.float32) for x in (INPUTS[:3, :1], INPUTS[3:6, :1])]
    given: dict[str, Any] = {"num_data": 10, "tuner": None, "key": jax.random.key(1)}
    sampler = optax_smile.psmile(0.1, reject_quantile=0.98, **given)
    given = {"num_warmup": 1, "num_draws": DRAWS, "thin": 5, "key": jax.random.key(0)}
    # A batch is no list of examples, but of the shape of the parameters.
    given |= {"progress": False, "directory": directory, "check": False}
    optax_smile.sample(
        lambda params, batch: jnp.mean((params["w"] - batch) ** 2), start, batches, sampler, **given
    )
    return directory


@pytest.fixture
def draws(run):
    for stored in run.glob("prediction-*"):
        stored.unlink()
    return optax_smile.load_snapshots(run)


@pytest.fixture
def rendered():
    """For tests that look at pictures: most of the time of a page goes into them."""


@pytest.fixture(autouse=True)
def few_pixels(monkeypatch, request):
    monkeypatch.setattr(_page, "DENSITY", 50)
    if "rendered" not in request.fixturenames:
        monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda _, file, **__: None)


def predict(draws, model, likelihood, targets, inputs=INPUTS, per: Any = "draw"):
    given: dict[str, Any] = {"likelihood": likelihood, "targets": targets, "per": per}
    return optax_smile.predict(model, draws, inputs, **given)


def classify(draws, targets: Any = LABELS, per=None):
    return predict(draws, logits, "categorical", targets, per=per)


def pictures(page: str) -> list[np.ndarray]:
    found = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    return [matplotlib.image.imread(io.BytesIO(base64.b64decode(each))) for each in found]


def num_pictures(page: str) -> int:
    return page.count("<figure>")


def page_of(run, prediction, targets, names=("test",)) -> str:
    """Store a prediction under some names and write the page."""
    for name in names:
        report.store(run, name, prediction, targets=targets)
    return report.write(run).read_text()


def lights(page: str) -> list[tuple[str, str]]:
    return re.findall(r'<span class="light \w+">(\w+)</span><span><b>([^<]+)</b>', page)


@pytest.mark.usefixtures("rendered")
def test_classification(run, draws, tmp_path):
    prediction = classify(draws, per="draw")
    report.store(run, "test", prediction, targets=LABELS)
    report.store(run, "unseen", classify(draws, None))
    page = report.write(run, tmp_path / "new" / "page.html").read_text()
    scores = {"LPPD": metrics.lppd(prediction.log_density)}
    for name in "accuracy", "Brier", "ECE", "F1", "AURC":
        scores[name] = getattr(metrics, name.lower())(prediction.mean, LABELS)
    for name, score in scores.items():
        arrow = "↑" if name in ("LPPD", "accuracy", "F1") else "↓"
        assert re.search(rf"<th>{name} <span [^>]*>{arrow}</span></th>", page)
        assert f"<td>{score:.4g}</td>" in page
    # Three of the chains, calibration, risk, entropies of both, LPPD and trace.
    assert len(pictures(page)) == num_pictures(page) == 9
    assert all(np.ptp(image) > 0.5 for image in pictures(page))
    # What ran, with which seeds and data.
    for said in (
        html.escape(str(run)),
        "<title>psmile: 3 chains of 24 draws</title>",
        "3 chains of psmile, 24 draws each, 12 parameters",
        "across chains",
        "&quot;reject_quantile&quot;: 0.98",
        "0 (sample), 1 (psmile)",
        "<dd>10 examples in 2 batches</dd>",
    ):
        assert said in page
    assert "<1>" not in page
    # A light for each check.
    summary = diagnostics.summary(draws, Stored(run / "prediction-test.safetensors").prediction)
    bad = sorted(check.kind for check in summary.findings)
    good = dict.fromkeys(x.kind for x in summary.checks if x.kind not in bad)
    assert sorted(kind for light, kind in lights(page) if light != "fine") == bad
    assert [kind for light, kind in lights(page) if light == "fine"] == list(good)
    text = html.unescape(re.sub("</?code>", "`", page.split("<details>")[0]))
    assert all(x.text in text and x.advice in text for x in summary.findings)
    assert all(x.text in text for x in summary.checks if x.kind in good)


def test_regression(run, draws):
    prediction = predict(draws, lambda p, x: (logits(p, x)[:, 0], 0.3), "gaussian", TARGETS)
    page, std = page_of(run, prediction, TARGETS), np.sqrt(prediction.total)
    ends = metrics.interval(prediction.mean, std, 0.95)
    for score in (
        metrics.crps(prediction.mean, std, TARGETS),
        metrics.rmse(prediction.mean, TARGETS),
        metrics.coverage(*ends, TARGETS),
        metrics.interval_width(*ends),
    ):
        assert f"<td>{score:.4g}</td>" in page
    assert num_pictures(page) == 7 and ">→ 0.95</span>" in page
    # Of several outputs the variances are no entropies.
    targets = np.tile(TARGETS[:, None], (1, 4))
    several = predict(draws, lambda p, x: (logits(p, x), 0.3), "gaussian", targets, per=None)
    assert several.uncertainty == "variance"
    assert report.score(several, targets)["RMSE"] == metrics.rmse(several.mean, targets)
    page = page_of(run, several, targets, ("test", "other"))
    assert num_pictures(page) == 4 and "What they predict" not in page


def test_tokens_and_an_own_likelihood(run, draws):
    labels, inputs = LABELS.reshape(8, 5).copy(), INPUTS.reshape(8, 5, 3)
    labels[0, 2:] = -1
    prediction = predict(draws, lambda p, x: x @ p["w"][None], "tokens", labels, inputs)
    perplexity = np.exp(-classify(draws).log_density.reshape(8, 5)[labels >= 0].mean())
    assert f"<td>{perplexity:.4g}</td>" in page_of(run, prediction, labels)
    likelihood = optax_smile.Likelihood(mean=None, log_density=lambda outputs, _: outputs[:, 0])
    prediction = predict(draws, logits, likelihood, np.zeros(40), per=None)
    lppd = pytest.approx(prediction.log_density.mean())
    assert report.score(prediction, np.zeros(40)) == {"LPPD": lppd}
    with pytest.raises(
        ValueError, match=r"`report.store\(images=...\)` must be None for a prediction without"
    ):
        report.store(run, "test", prediction, images=IMAGES)


def test_yes_or_no_are_two_classes(run, draws):
    labels = np.stack([LABELS % 2, LABELS // 2 % 2], axis=1).astype(np.uint8)
    for of in (0, slice(0, 2)):
        targets = labels[:, of]
        prediction = predict(draws, lambda p, x, of=of: logits(p, x)[:, of], "bernoulli", targets)
        got, ones = report.score(prediction, targets), prediction.mean
        assert got["accuracy"] == np.mean((ones > 0.5) == targets)
        assert got["Brier"] == pytest.approx(2 * np.mean((ones - targets) ** 2), abs=1e-6)
        assert num_pictures(page_of(run, prediction, targets)) == 8
        for unknown in (0.7, 5):
            wrong = np.where(np.arange(targets.size).reshape(targets.shape) == 3, unknown, targets)
            with pytest.raises(
                ValueError, match=rf"score\(targets=...\)` .* 0 or 1, got {unknown}"
            ):
                report.score(prediction, wrong)


def test_the_page_says_whether_predictions_were_judged(run, draws):
    said = "Monte Carlo standard error of the LPPD"
    for kept, per, expected in (
        (draws, "draw", {said: True}),
        (draws, "chain", {said: False, "pass the result": True}),
        # As a run leaves them that went on later.
        (draws.thinned(2), "draw", {"cover fewer draws than the run now has": True}),
    ):
        page = page_of(run, classify(kept, per=per), LABELS)
        assert {text: text in page for text in expected} == expected


def test_huge_runs_are_thinned_for_the_picture_of_their_paths(run, draws, monkeypatch):
    drawn, rates = [], []
    monkeypatch.setattr(plots, "chain_paths", lambda x, start, ax: drawn.append((x, start)))
    monkeypatch.setattr(plots, "rejections", lambda trace, nominal, ax: rates.append(nominal))
    report.write(run)
    monkeypatch.setattr(_page, "MOST_PARAMETERS", CHAINS * 12 * DRAWS // 3)
    report.write(run)
    (all_draws, start), (thinned, _) = drawn
    assert all_draws["w"].shape[1] == DRAWS and thinned["w"].shape[1] == DRAWS // 3
    np.testing.assert_array_equal(thinned["w"][:, -1], all_draws["w"][:, -1])
    np.testing.assert_array_equal(start["w"], draws.start["w"])
    assert rates == pytest.approx([0.02, 0.02])
    quiet: Any = {"num_rejected": np.zeros((1, 2)), "energy_change": np.full((1, 2), np.nan)}
    quiet["step_size"] = np.ones((1, 2))
    run = types.SimpleNamespace(trace=quiet, start=None, stopping=None)
    made = [draw for _, draw in _page._of_chains(cast(Any, run), None, np.nan)]
    assert [cast(Any, draw).func for draw in made] == [plots.step_size, plots.chain_paths]


def test_every_draw_is_read_once_and_those_of_the_paths_again(run, draws, monkeypatch):
    monkeypatch.setattr(_page, "MOST_PARAMETERS", CHAINS * 12 * 3)
    report.store(run, "test", classify(draws, per="draw"), targets=LABELS)
    names = {file.name for kind in ("draw", "start") for file in run.glob(f"{kind}*")}
    reads = collections.Counter()
    for function in (_format.read_chains, _format.read_header):

        def counted(block, *leaves, function=function):
            (first,) = block if isinstance(block, list) else [block]
            reads[function.__name__, first.path.name] += 1
            return function(block, *leaves)

        monkeypatch.setattr(_format, function.__name__, counted)
    report.write(run)
    # Headers hold the trace.
    expected = {("read_header", name): 1 for name in names if not name.startswith("start")}
    assert len(names) == DRAWS + 1 and len(expected) == DRAWS
    plotted = sorted(name for name in names if not name.startswith("start"))[7::8]
    assert len(plotted) == 3
    assert reads == expected | {("read_chains", name): 1 + (name in plotted) for name in names}


def test_one_draw(run, draws, tmp_path):
    """The first minutes of a run have few pictures, and a page."""
    others = {*run.glob("*.*")} - {*run.glob("draw-*"), *run.glob("checkpoint-*")}
    for file in others | {*run.glob("draw-00000000*")}:
        (tmp_path / file.name).write_bytes(file.read_bytes())
    page = report.write(tmp_path).read_text()
    assert num_pictures(page) == 3 and "1 draw each" in page
    assert re.search(
        r"No plot \([^()]+\): <code>plots\.rejections\(trace=...\)</code> must be", page
    )


def test_a_damaged_prediction_is_named(run, draws):
    prediction, file = classify(draws), run / "prediction-test.safetensors"
    report.store(run, "test", prediction, targets=LABELS, images=IMAGES)
    content = file.read_bytes()
    without_scores = safetensors.numpy.save({"mean": np.zeros(3)})
    for damaged in content[:-200], b"", b"x" * 99, without_scores:
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"The stored prediction {file} is damaged"):
            report.write(run)


def test_a_run_that_stored_nothing(run, draws, tmp_path, monkeypatch):
    path = report.write(run, tmp_path / "page.html", title="Digits & more")
    page = path.read_text()
    assert "The run has no stored scores" in page and num_pictures(page) == 4
    assert "<h1>Digits &amp; more</h1>" in page and "<title>Digits &amp; more</title>" in page

    def fail(*_):
        raise OSError("no room")

    # A page that cannot be finished leaves the one before.
    monkeypatch.setattr(_page._disk, "write", fail)
    with pytest.raises(OSError, match="no room"):
        report.write(run, path, title="another")
    assert path.read_text() == page
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["page.html"]


def test_what_is_stored_comes_back(run, draws):
    prediction = classify(draws, per="draw")
    given: dict[str, Any] = {"scores": {"mine": np.float32(1e-7)}, "targets": LABELS}
    report.store(run, "test", prediction, **given)
    stored = Stored(run / "prediction-test.safetensors")
    assert (stored.name, stored.scores) == ("test", {"mine": pytest.approx(1e-7)})
    np.testing.assert_array_equal(stored.targets, LABELS)
    for field in ("mean", "log_density", "total", "aleatoric"):
        kept, given = getattr(stored.prediction, field), getattr(prediction, field)
        np.testing.assert_array_equal(kept, given)
    np.testing.assert_array_equal(stored.prediction.each.log_density, prediction.each.log_density)
    assert "<td>1e-07</td>" in report.write(run).read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("rendered")
def test_the_command(run, draws, tmp_path):
    """Warnings of Python itself, such as of a module imported twice, are errors."""
    words = [sys.executable, "-W", "error::RuntimeWarning", "-m", "optax_smile.report"]
    call = functools.partial(subprocess.run, capture_output=True, text=True)
    done = call([*words, run])
    assert (done.returncode, done.stdout) == (0, f"{run / 'report.html'}\n"), done.stderr
    for arguments, said in (
        ([tmp_path], "must be a directory of stored draws, with a manifest.json, got"),
        ([run, "--output", "/proc/page.html"], ""),
    ):
        wrong = call([*words, *arguments])
        assert wrong.returncode == 1 and said in wrong.stderr and "Traceback" not in wrong.stderr


def test_what_does_not_fit_is_named(run, draws, tmp_path):
    prediction, unknown = classify(draws), classify(draws, None)
    others = classify(
        optax_smile.Snapshots(jax.tree.map(lambda x: x[:1], draws.params)), per="draw"
    )
    of_all: dict[str, Any] = {"name": "test", "prediction": prediction, "directory": run}
    for rule, given in {
        r"name=...\)` must be a name of letters": {"name": "../test"},
        r"name=...\)` must be a name of": {"name": "x" * 101},
        r"scores\['LPPD'\]=...\)` must be a number": {"scores": {"LPPD": "high"}},
        r"prediction=...\)` must be made with": {"prediction": unknown, "targets": LABELS},
        r"prediction=...\)` must be a prediction from the draws in": {"prediction": others},
        r"directory=...\)` must be a directory": {"directory": tmp_path},
        r"targets=...\)` .*classes from 0 to 3, got 1 to 4": {"targets": LABELS + 1},
        r"prediction=...\)` must be of 39 inputs, as many as": {"images": IMAGES[:39]},
        r"images=...\)` must be a non-empty array \[input, height, width\] or": {"images": INPUTS},
        r"images=...\)` must be images with 1, 3, 4 ch": {"images": np.zeros((40, 5, 5, 2))},
        r"images=...\)` must be an array whose every entry is a finite": {
            "images": np.full((40, 2, 2), np.nan)
        },
    }.items():
        with pytest.raises(ValueError, match=r"`report.store\(" + rule):
            report.store(**of_all | given)
    assert not list(run.glob("prediction-*"))
    (tmp_path / "manifest.json").write_bytes((run / "manifest.json").read_bytes())
    for rule, given in (
        (r"directory=...\)` must be .* with draws", (tmp_path,)),
        (r"output=...\)` must be a path that ends in .html or", (run, tmp_path / "a.txt")),
    ):
        with pytest.raises(ValueError, match=r"`report.write\(" + rule):
            report.write(*given)


def test_the_few_images_that_are_kept_are_those_that_all_would_show(run, draws):
    """Drawn of what is kept or of everything, it is the same picture."""
    binary = predict(draws, lambda p, x: logits(p, x)[:, 0], "bernoulli", LABELS % 2, per=None)
    ones, known, unknown = np.asarray(binary.mean), classify(draws), classify(draws, None)
    for prediction, targets, mean, num_texts in (
        (binary, LABELS % 2, np.stack([1 - ones, ones], axis=1), 21),
        (unknown, None, unknown.mean, 14),
        (known, LABELS, known.mean, 21),
    ):
        report.store(run, "test", prediction, targets=targets, images=IMAGES, scores={})
        stored = Stored(run / "prediction-test.safetensors")
        assert stored.images is not None and 12 <= len(stored.shown) <= 18
        of_all, of_kept = matplotlib.figure.Figure().subplots(1, 2)
        plots.examples(IMAGES, mean, prediction.total, targets, ax=of_all)
        ((_, draw),) = _page._of_images([stored])
        draw(ax=of_kept)
        texts = [[text.get_text() for text in ax.texts] for ax in (of_all, of_kept)]
        assert texts[0] == texts[1] and len(texts[0]) == num_texts
        for one, other in zip(of_all.images, of_kept.images, strict=True):
            # Bytes of 256 levels between the smallest and the largest that are kept.
            np.testing.assert_allclose(one.get_array(), other.get_array(), atol=0.1)
    assert '<h2>Examples</h2><div class="pictures"><figure>' in report.write(run).read_text()


def test_methods_share_their_figures(run, draws):
    """As many as were stored, in one figure each, with the ECE of the table."""
    prediction = classify(draws)
    for name in ("psmile", "_deep ensemble"):
        report.store(run, name, prediction, targets=LABELS)
    stored = [Stored(file) for file in sorted(run.glob("prediction-*"))]
    made = [cast(Any, draw) for _, draw in _page._of_predictions(stored)]
    assert [draw.args[0] for draw in made[:2]] == [plots.reliability, plots.risk_coverage]
    assert [draw.func for draw in made[2:]] == [plots.entropy]
    scores = report.score(prediction, LABELS)
    for draw, score in zip(
        made, (f"ECE {scores['ECE']:.3f}", f"AURC {scores['AURC']:.3g}"), strict=False
    ):
        ax: Any = matplotlib.figure.Figure().subplots()
        draw(ax=ax)
        told = [text.get_text() for text in ax.get_legend().get_texts()]
        assert told == [f" _deep ensemble ({score})", f"psmile ({score})"]
    assert ax.get_xlim() == (0, 1)


def test_trouble_comes_first_and_is_named():
    made = diagnostics.summary(optax_smile.Snapshots(RNG.normal(size=(3, 24, 5))))

    def shown(*checks):
        checks = tuple(diagnostics.Check(*check) for check in checks)
        page = "".join(_page._lights(dataclasses.replace(made, checks=checks)))
        return page, lights(page)

    page, found = shown(
        ("copies", (0, 1, 2), (0.0,) * 3, 2.4, True, "", "0 of 24 draws."),
        ("slow", (0, 1, 2), (0.3,) * 3, 0.25, False, "a larger `thin`.", "`30%`."),
        ("slow", (0, 1, 2), (0.1,) * 3, 0.25, True, "", "Another test."),
        ("frozen", (0, 2), (0.0,) * 2, 0.1, False, "x", "99: 99."),
        ("diverged", (1,), (9.0,), 2.0, False, "a smaller step.", "far < off."),
    )
    assert [kind for _, kind in found] == ["frozen", "diverged", "slow", "copies"]
    assert [light for light, _ in found] == ["trouble", "trouble", "look", "fine"]
    for text in (
        "<b>diverged</b> (chain 1): far &lt; off.",
        "<b>frozen</b> (chains 0, 2): 99: 99.",
        "<b>slow</b> (all 3 chains): <code>30%</code>.",
        "<b>Try</b> a larger <code>thin</code>.",
        "Not tested: altered, not finite, still on its way, not settled, different modes",
    ):
        assert text in page
    assert "Another test" not in page
    # Some findings ask for a look alone.
    _, found = shown(*((kind, (1,), (1.0,), 0.0, False, "x", "y") for kind in ADVICE))
    look = {"slow", "different modes", "chains differ", "worse than the start"}
    look |= {"rejected steps", "step size"}
    assert {kind for light, kind in found if light == "look"} == look


def test_seeds_and_data_in_words():
    seeds = [_page._seed(key) for key in ([1, 2], 7, [1, 2, 3, 4], None)]
    assert seeds == [2**32 + 2, 7, None, None]
    assert _page._data({"num_batches": 1}, 7.0) == "7 examples in 1 batch"
    assert _page._data({}, None) == ""


def test_a_killed_report_leaves_nothing_behind(run, draws):
    left, foreign = run / ".report.html.123", run / ".report.html.mine"
    for file in left, foreign:
        file.write_text("half a page")
    report.write(run)
    assert not left.exists() and foreign.exists()
    foreign.unlink()


@pytest.mark.slow
@pytest.mark.usefixtures("rendered")
def test_the_page_needs_nothing_else_and_is_reproducible(run, draws, tmp_path):
    report.store(run, "test", classify(draws), targets=LABELS, images=IMAGES)
    report.store(run, "TEST", classify(draws), images=IMAGES)
    page = report.write(run, tmp_path / "a b.html").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["a b.html"]
    sources = re.findall(r'\b(?:src|href)="([^"]*)"', page)
    assert sources and all(source.startswith("data:") for source in sources)
    assert not any(word in page for word in ("@import", "url(", "<script"))
    assert report.write(run, tmp_path / "a b.html").read_text() == page
