"""A page about a run, from its directory alone: `python -m optax_smile.report DIRECTORY`.

Example:
    The script that sampled keeps what it predicted beside the draws::

        prediction = optax_smile.predict(..., targets=labels, per="draw")
        optax_smile.report.store("run", "test", prediction, targets=labels)

    Then `python -m optax_smile.report run` writes `run/report.html`.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from math import isnan
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike

from optax_smile import _check, _disk, diagnostics, metrics, plots
from optax_smile.draws import _manifest
from optax_smile.draws._stored import FIELDS, FILE, Stored, is_name
from optax_smile.draws.prediction import Prediction
from optax_smile.draws.snapshots import StoredSnapshots

LEVEL = 0.95
# What `score` calls the arguments of metrics.
IN_SCORE = {"labels": "targets", "mask": "targets", "log_density": "prediction"}
IN_SCORE |= dict.fromkeys(("probabilities", "mean", "std"), "prediction")
# Parameters that stay in memory to draw the paths of the chains; 512 MiB in float32.
MOST_PARAMETERS = 1 << 27
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em;
       color: #222; }
table { border-collapse: collapse; margin: 1em 0; }
th, td { padding: .2em .9em; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; }
pre { background: #f6f6f6; padding: 1em; overflow-x: auto; } img { max-width: 100%; }
"""


@_check.called("report.score", *metrics.__all__, **IN_SCORE)
def score(prediction: Prediction, targets: ArrayLike) -> dict[str, float]:
    """Score a prediction by what is usual for its kind.

    Args:
        prediction: what `predict` gave, with targets.
        targets: the same ones.

    Returns:
        Scores of `optax_smile.metrics` by name: LPPD with accuracy, F1, Brier score, ECE and AURC
        for classes; with RMSE, CRPS, and the coverage and width of the 95 % interval where there is
        a variance, for which the prediction counts as a normal distribution. The perplexity alone
        for `"tokens"`.

    Raises:
        ValueError: a prediction without log densities, targets that do not fit.

    Example:
        >>> import numpy as np, optax_smile
        >>> probabilities, density = np.array([[0.9, 0.1]]), np.log([0.9])
        >>> prediction = optax_smile.Prediction(probabilities, density, uncertainty="entropy")
        >>> optax_smile.report.score(prediction, [0])["accuracy"]
        1.0
    """
    _check.kind("report.score", "prediction", prediction, Prediction, "what `predict` returned")
    if prediction.log_density is None:
        rule = "one made with targets"
        _check.fail("report.score", "prediction", rule, "none", "Give them to `predict`.")
    mean, targets = prediction.mean, _check.host("report.score", "targets", targets)
    if mean is None and prediction.log_density.ndim == targets.ndim == 2:
        return {"perplexity": metrics.perplexity(prediction.log_density, targets >= 0)}
    told = {"LPPD": metrics.lppd(prediction.log_density)}
    if prediction.uncertainty == "entropy":
        probabilities, labels = _classes(prediction, targets)
        of = {
            "accuracy": metrics.accuracy,
            "F1": metrics.f1,
            "Brier": metrics.brier,
            "ECE": metrics.ece,
            "AURC": metrics.aurc,
        }
        return told | {name: metric(probabilities, labels) for name, metric in of.items()}
    if mean is not None and np.shape(mean) == targets.shape:
        told["RMSE"] = metrics.rmse(mean, targets)
    if prediction.uncertainty != "variance" or mean is None:
        return told
    mean, std, targets = (np.ravel(x) for x in (mean, np.sqrt(prediction.total), targets))
    ends = metrics.interval(mean, std, LEVEL)
    return told | {
        "CRPS": metrics.crps(mean, std, targets),
        "95 % coverage": metrics.coverage(*ends, targets),
        "95 % width": metrics.interval_width(*ends),
    }


def _classes(prediction: Prediction, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities `[input, class]` and labels `[input]`; of 0 or 1 they are two classes."""
    mean = np.asarray(prediction.mean)
    if mean.shape != targets.shape:
        return mean, targets
    ones = mean.ravel()
    return np.stack([1 - ones, ones], axis=1), targets.ravel().astype(int)


def store(
    directory: str | os.PathLike,
    name: str,
    prediction: Prediction,
    *,
    targets: ArrayLike | None = None,
    scores: Mapping[str, float] | None = None,
):
    """Keep a prediction beside the draws it came from, for the report.

    Args:
        directory: of the run.
        name: of the data, such as `"test"` or `"shuffled pixels"`: at most 100 letters, digits,
            spaces, `-` and `_`.
        prediction: what `predict` gave; with `per="draw"` the report can tell whether the chains
            agree, as long as there are no more draws. Of `each`, the `Outcome` of single draws, it
            keeps one number per input: log density and mean, but no class probabilities.
        targets: what was observed.
        scores: to show, by name; None: those of `score(prediction, targets)`, if there are
            targets.

    Raises:
        ValueError: a directory without a run, a name that is none, scores that are no numbers.
        OSError: a file that cannot be written.

    Example:
        Beside the draws of which the prediction is::

            optax_smile.report.store("run", "test", prediction, targets=labels)
    """
    directory = _check.path("report.store", "directory", directory)
    _manifest.read("report.store", directory)
    _check.kind("report.store", "prediction", prediction, Prediction, "what `predict` returned")
    if not is_name(name):
        rule = "a name of letters, digits, spaces, - and _, at most 100"
        _check.fail("report.store", "name", rule, _check.show(name))
    if scores is None:
        told = _check.called("report.store", "report.score")(score)
        scores = {} if targets is None else told(prediction, targets)
    _check.kind("report.store", "scores", scores, Mapping, "a dict of numbers by name")
    for value in scores.values():
        _check.number("report.store", "scores", value, "a number each", lambda _: True)
    scores = {metric: float(value) for metric, value in scores.items()}
    kept = {field: getattr(prediction, field) for field in FIELDS} | {"targets": targets}
    draws = prediction.each
    if draws is not None and np.ndim(draws.log_density) == np.ndim(prediction.log_density) + 2:
        kept |= {"each_log_density": draws.log_density}
        kept |= {"each_mean": draws.mean if np.ndim(draws.mean) == 3 else None}
    arrays = {field: np.asarray(array) for field, array in kept.items() if array is not None}
    if targets is not None and arrays["targets"].dtype.kind not in "biuf":
        _check.fail("report.store", "targets", "numbers", f"an array of {arrays['targets'].dtype}")
    header = {"name": name, "scores": scores, "uncertainty": prediction.uncertainty}
    _disk.write(directory / FILE.format(name), _disk.pack(header, arrays))


def write(directory: str | os.PathLike, output: str | os.PathLike | None = None) -> Path:
    """Write a page about a run: settings, scores, diagnostics, pictures.

    Args:
        directory: what `sample(directory=...)` wrote, and `store`, if it was called.
        output: the HTML file; None: `report.html` in the directory.

    Returns:
        The path of the file; it holds everything that it shows.

    Raises:
        ValueError: a directory without a run, or without draws; a damaged file.
        ImportError: matplotlib or arviz is not installed.
        OSError: a file that cannot be read or written.

    Cost: each draw is read once, and forgotten but for a few that the picture of the paths needs.

    Example:
        As `python -m optax_smile.report run`::

            optax_smile.report.write("run")
    """
    directory = _check.path("report.write", "directory", directory)
    page_of = directory / "report.html" if output is None else output
    output = _check.path("report.write", "output", page_of)
    if output.suffix not in (".html", ".htm"):
        _check.fail("report.write", "output", "a file .html or .htm", output)
    snapshots = _ReadOnce(directory, _manifest.read("report.write", directory), None, False)
    if not snapshots.num_draws:
        _check.fail("report.write", "directory", "a directory with draws", directory)
    stored = [Stored(file) for file in sorted(directory.glob(FILE.format("*")))]
    parts = [*_head(directory, snapshots), *_scores(stored), *_chains(snapshots, stored)]
    parts += [*_predictions(stored), *_settings(snapshots)]
    title = f"<title>{html.escape(directory.name)}</title>"
    page = f'<!doctype html><meta charset="utf-8">{title}<style>{STYLE}</style>' + "\n".join(parts)
    output.parent.mkdir(parents=True, exist_ok=True)
    _disk.write(output, page.encode())
    return output


class _ReadOnce(StoredSnapshots):
    """Draws on disk of which a few stay in memory, as `kept`, when somebody has gone over them."""

    @property
    def size(self) -> int:
        """Number of parameters of a chain."""
        return sum(int(np.prod(leaf.shape)) for leaf in self.leaves)

    def __iter__(self) -> Iterator[Any]:
        every, kept = -(-len(self) * self.size // MOST_PARAMETERS), []
        for number, params in enumerate(super().__iter__()):
            # The last draw is among them.
            if (self.num_draws - 1 - number // self.num_chains) % every == 0:
                kept.append(params)
            yield params

        def by_chain(*leaves):
            by_draw = np.stack(leaves).reshape(-1, self.num_chains, *leaves[0].shape)
            return by_draw.swapaxes(0, 1)

        self.kept = jax.tree.map(by_chain, *kept)


def _head(directory: Path, snapshots: _ReadOnce) -> Iterator[str]:
    settings = snapshots.manifest["settings"]
    name = (settings.get("sampler") or {}).get("name", "a sampler")
    thin, num_warmup = (html.escape(str(settings.get(x, "?"))) for x in ("thin", "num_warmup"))
    yield f"<h1>{html.escape(str(directory))}</h1>"
    yield (
        f"<p>{snapshots.num_chains} chains of {html.escape(name)}, {snapshots.num_draws} draws"
        f" each, {snapshots.size:,} parameters. Draws are {thin} steps apart, after"
        f" {num_warmup} steps of warm-up.</p>"
    )


def _scores(stored: list[Stored]) -> Iterator[str]:
    yield "<h2>Scores</h2>"
    scored = [each for each in stored if each.scores]
    if not scored:
        yield (
            "<p>The run stored none: <code>optax_smile.report.store(directory, name, prediction,"
            " targets=...)</code> does.</p>"
        )
        return
    names = list(dict.fromkeys(name for each in scored for name in each.scores))
    rows = [
        [each.name, *(f"{each.scores[name]:.4g}" if name in each.scores else "" for name in names)]
        for each in scored
    ]
    yield _table(["data", *names], rows)


def _chains(snapshots: _ReadOnce, stored: list[Stored]) -> Iterator[str]:
    yield "<h2>Can the chains be trusted?</h2>"
    axes = snapshots.num_chains, snapshots.num_draws
    by_draw = [one for one in stored if one.prediction.each is not None]
    told = [one for one in by_draw if one.prediction.each.log_density.shape[:2] == axes]
    if by_draw and not told:
        yield (
            "<p>The stored predictions are of fewer draws than there are now: store them again to"
            " have the chains judged by what they predict.</p>"
        )
    summary = diagnostics.summary(snapshots, told[0].prediction if told else None)
    yield f"<pre>{html.escape(str(summary))}</pre>"
    yield "<h2>The chains</h2>"
    trace, nominal = snapshots.trace, summary.nominal_rate
    draw = [
        lambda ax: plots.step_size(trace, ax=ax),
        lambda ax: plots.energy_error(trace, ax=ax),
        lambda ax: plots.rejections(trace, nominal=None if isnan(nominal) else nominal, ax=ax),
        lambda ax: plots.chain_paths(snapshots.kept, start=snapshots.start, ax=ax),
    ]
    yield _image(draw)


def _settings(snapshots: StoredSnapshots) -> Iterator[str]:
    yield "<h2>Settings</h2>"
    told = {**snapshots.manifest["settings"], **snapshots.manifest["versions"]}
    sampler = told.pop("sampler", None) or {}
    for entries in (sampler, told):
        yield _table(["", ""], [[name, json.dumps(value)] for name, value in entries.items()])


def _table(head: list[str], rows: list[list[str]]) -> str:
    def line(cells, tag):
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{line(head, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"


def _predictions(stored: list[Stored]) -> Iterator[str]:
    for each in stored:
        if draw := list(_of_prediction(each)):
            yield f"<h2>Predictions: {html.escape(each.name)}</h2>{_image(draw)}"
    entropies = {
        each.name: each.prediction.total
        for each in stored
        if each.prediction.uncertainty == "entropy" and np.ndim(each.prediction.total) == 1
    }
    if len(entropies) > 1:
        yield "<h2>What the network has not seen</h2>"
        yield _image([lambda ax: plots.entropy(entropies, ax=ax)])


def _of_prediction(stored: Stored) -> Iterator[Callable]:
    """Pictures of one prediction."""
    prediction, targets = stored.prediction, stored.targets
    if prediction.each is not None and prediction.each.log_density is not None:
        density = prediction.each.log_density
        density = density.reshape(*density.shape[:2], -1)
        yield lambda ax: plots.lppd(density, ax=ax)
    if targets is None or prediction.mean is None:
        return
    if prediction.uncertainty == "entropy":
        classes = _classes(prediction, targets)
        yield lambda ax: plots.reliability(*classes, ax=ax)
        yield lambda ax: plots.risk_coverage(*classes, ax=ax)
    elif prediction.uncertainty == "variance" and np.ndim(prediction.mean) == 1:
        std = np.sqrt(prediction.total)
        yield lambda ax: plots.regression_band(None, prediction.mean, std, targets, ax=ax)


def _image(draw: list[Callable]) -> str:
    """Draw pictures in two columns and put them into the page."""
    from matplotlib.figure import Figure

    rows = -(-len(draw) // 2)
    figure = Figure(figsize=(10, 4 * rows), layout="constrained")
    for axes, one in zip(figure.subplots(rows, 2, squeeze=False).flat, draw, strict=False):
        try:
            one(axes)
        except ValueError as error:
            # Such as of a single draw; one picture less is no reason to have none.
            axes.text(0.5, 0.5, str(error), ha="center", va="center", wrap=True, size="small")
            axes.set_axis_off()
    for axes in list(figure.axes)[len(draw) :]:
        axes.remove()
    content = io.BytesIO()
    figure.savefig(content, dpi=110)
    image = base64.b64encode(content.getvalue()).decode()
    return f'<img alt="pictures" src="data:image/png;base64,{image}">'


def main(arguments: list[str] | None = None):
    """Write the report of the directory on the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m optax_smile.report", description="Write a page about a run of sample()."
    )
    parser.add_argument("directory", type=Path, help="what sample(directory=...) wrote")
    parser.add_argument("--output", type=Path, help="HTML file (default: DIRECTORY/report.html)")
    given = parser.parse_args(arguments)
    try:
        print(write(given.directory, given.output))
    except (ValueError, OSError, ImportError) as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
