"""An HTML report of a run, made from its directory alone: `python -m optax_smile.report DIRECTORY`.

It is `DIRECTORY/report.html`. First, `store` adds predictions and their scores to the directory.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from numpy.typing import ArrayLike

from optax_smile import _check, _disk, _settings, _table, diagnostics, plots
from optax_smile._types import Options
from optax_smile.draws import _format
from optax_smile.draws.prediction import Outcome, Prediction, labelled
from optax_smile.draws.snapshots import StoredSnapshots, load_snapshots
from optax_smile.metrics import score

__all__ = ["store", "write"]

FILE = "prediction-{}.safetensors"
# Fields of a prediction that are stored.
FIELDS = ("mean", "log_density", "total")
# What a good score is; scores of the user have no arrow.
ARROWS = dict.fromkeys(("LPPD", "accuracy", "F1"), " ↑") | {"95 % coverage": " → 0.95"}
ARROWS |= dict.fromkeys(("perplexity", "Brier", "ECE", "AURC", "RMSE", "CRPS", "95 % width"), " ↓")
# Inches of a plot and dots per inch: labels are readable on a screen of 400 pixels.
SIZE, DENSITY = (4.8, 4.0), 230
# Number of parameters for the plot of the paths, which needs a gigabyte for as many.
MOST_PARAMETERS = 1 << 25
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 1120px; margin: 0 auto; padding: 1em;
       color: #222; background: #fff; overflow-wrap: anywhere; }
h1 { font-size: 1.6em; } h2 { font-size: 1.2em; border-bottom: 2px solid #0072b2; }
.wide { overflow-x: auto; } .wide th, .wide td { white-space: nowrap; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25em 1.2em .25em 0; border-bottom: 1px solid #ddd; vertical-align: top; }
span { background: #f3c13a; border-radius: 1em; padding: .1em .8em; font-size: .8em; }
.pictures { display: grid; gap: 1em 2em;
            grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
figure { margin: 0; max-width: 620px; color: #555; } img { width: 100%; height: auto; }
"""


@_check.arguments(
    "report.write",
    directory=_check.PathLike(),
    output=_check.PathLike() | None,
    title=_check.kind(str, "a string") | None,
)
def write(
    directory: str | os.PathLike,
    output: str | os.PathLike | None = None,
    *,
    title: str | None = None,
) -> Path:
    """Write an HTML report of a run: scores, `summary`, plots, settings. Returns its path.

    It needs no network. An error leaves an earlier page unchanged.

    Args:
        directory: directory of a run, written by `sample(directory=...)` and, optionally, `store`.
        output: the HTML file; None: `report.html` in the directory.
        title: title of the page; None: the name of the sampler.

    Raises:
        ValueError: a directory without a run or without draws; a damaged file.

    Cost: one pass over the draws, and one over those whose paths are drawn, at most 2^25 numbers.
    """
    where, directory = "report.write", Path(directory)
    output = directory / "report.html" if output is None else Path(output)
    if output.suffix not in (".html", ".htm"):
        _check.fail(where, "output", "a path that ends in .html or .htm", output)
    with _check.called(where, "load_snapshots"):
        run = load_snapshots(directory)
    if not run.num_draws:
        _check.fail(where, "directory", "a directory with draws", directory)
    stored = [_read(file) for file in sorted(directory.glob(FILE.format("*")))]
    size = sum(np.size(leaf) for leaf in jax.tree.leaves(run[0]))
    name, counted = (run.settings or {"name": "a sampler"})["name"], _table.counted
    described = f"{name}: {counted(run.num_chains, 'chain')} of {counted(run.num_draws, 'draw')}"
    described += f", {counted(size, 'parameter')}"
    title = html.escape(title or f"A run of {name}")
    parts = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title><style>{STYLE}</style></head><body><h1>{title}</h1>",
        f"<p>{html.escape(described)}</p>",
        *_scores(stored),
        *_judgement(run, stored),
        '<h2>Plots</h2><div class="pictures">',
        *(_figure(draw, caption) for draw, caption in _pictures(run, size, stored)),
        f"</div><h2>Settings</h2>{_table.in_html(_settings_of(run))}</body></html>",
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    _disk.write(output, "\n".join(parts).encode(errors="replace"))
    return output


def _scores(stored: list[Stored]) -> Iterator[str]:
    names = list(dict.fromkeys(name for one in stored for name in one.scores))
    head = ["", *(name + ARROWS.get(name, "") for name in names)]
    rows = []
    for name, scores in ((one.name, one.scores) for one in stored if one.scores):
        rows.append([name, *(f"{scores[x]:.4g}" if x in scores else "" for x in names)])
    if rows:
        yield f'<h2>Scores</h2><div class="wide">{_table.in_html(rows, head)}</div>'


def _judgement(run: StoredSnapshots, stored: list[Stored]) -> Iterator[str]:
    """Yield the result of `summary`, of the predictions if one covers all draws."""
    if not _settings.are_posterior(run.settings):
        yield "<p>These draws are optimizer iterates, not posterior draws: no diagnostics.</p>"
        return
    axes = run.num_chains, run.num_draws
    by_draw = [one for one in stored if one.prediction.each is not None]
    of = next((x for x in by_draw if x.prediction.each.log_density.shape[:2] == axes), None)
    summary = diagnostics.summary(run, of and of.prediction)
    mark = f"<span>{len(summary.findings)} found</span>" * bool(summary.findings)
    by = f"the prediction “{of.name}”" if of else "weights: `store` added none of all draws"
    yield f"<h2>Can the chains be trusted? {mark}</h2><p>Judged by {html.escape(by)}.</p>"
    table, _, notes = str(summary).partition("\n\n")
    yield f'<div class="wide"><pre>{html.escape(table)}</pre></div>'
    yield f'<p style="white-space: pre-line">{html.escape(notes)}</p>'


def _figure(draw: Callable[..., object], caption: str) -> str:
    """Return HTML with a plot; in place of one that fails, the reason."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained")
    axes, content = figure.subplots(), io.BytesIO()
    try:
        draw(ax=axes)
    except ValueError as error:
        return f"<p>No plot: {html.escape(f'{error} ({caption})')}</p>"
    figure.savefig(content, dpi=DENSITY)
    image = base64.b64encode(content.getvalue()).decode()
    return (
        f'<figure><img alt="{html.escape(axes.get_title())}" src="data:image/png;base64,{image}">'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )


def _pictures(run: StoredSnapshots, size: int, stored: list[Stored]) -> Iterator[tuple]:
    """Yield what draws a plot, `draw(ax=...)`, and how to read it, where there are data."""
    trace, draws = run.trace, run.thinned(-(-len(run) * size // MOST_PARAMETERS))
    if np.isfinite(trace.get("step_size", np.nan)).any():
        yield partial(plots.step_size, trace), "In a good run all chains end at the same level."
    if np.isfinite(trace.get("energy_change", np.nan)).any():
        yield partial(plots.energy_error, trace), "In a good run the band stays at one level."
    paths = partial(plots.chain_paths, draws.params, start=run.start)
    yield paths, "In a good run the paths overlap, and none keeps moving in one direction."
    known = [one for one in stored if one.targets is not None and one.prediction.mean is not None]
    if classes := [x for x in known if x.prediction.uncertainty == "entropy"]:

        def reliability(ax):
            for x in classes:
                pair = labelled(x.prediction.mean, np.asarray(x.targets))
                plots.reliability(*pair, label=x.name, ax=ax)

        yield (
            reliability,
            "Calibrated predictions lie on the dotted line; below it they are overconfident.",
        )
    for one in known:
        mean, total = one.prediction.mean, one.prediction.total
        if one.prediction.uncertainty == "variance" and np.ndim(mean) == 1:
            draw = partial(plots.regression_band, None, mean, np.sqrt(total), one.targets)
            yield draw, f"{one.name}: the band should contain its nominal share of the targets."


def _settings_of(run: StoredSnapshots) -> Iterator[tuple[str, str]]:
    """Yield names and values of the arguments of the sampler and of `sample`."""
    given = {f"sample: {name}": x for name, x in run.manifest["settings"].items()}
    given |= given.pop("sample: sampler", None) or {}
    given |= {"versions": run.manifest["versions"], "directory": str(run.directory)}
    yield from ((name, x if isinstance(x, str) else json.dumps(x)) for name, x in given.items())


class Stored(NamedTuple):
    """A prediction that `store` stored."""

    name: str
    scores: dict[str, float]
    targets: np.ndarray | None
    prediction: Prediction


def _read(file: Path) -> Stored:
    with _disk.naming(file, "stored prediction", "Remove it, or store it again."):
        header, kept = _disk.read(file)
        each = kept.get("each")
        fields: Options = {field: kept.get(field) for field in FIELDS}
        fields["each"] = None if each is None else Outcome(kept.get("each_mean"), None, None, each)
        prediction = Prediction(**fields, uncertainty=header["uncertainty"])
        name = file.stem.removeprefix("prediction-")
        return Stored(name, header["scores"], kept.get("targets"), prediction)


@_check.arguments(
    "report.store",
    directory=_check.PathLike(),
    name=_check.Where(
        "a letter or digit and at most 99 letters, digits, spaces, - and _ after it",
        lambda name: isinstance(name, str) and re.fullmatch(r"[^\W_][\w -]{0,99}", name),
    ),
    prediction=_check.kind(Prediction, "the result of `predict`"),
    targets=_check.Array(dtype=None) | None,
    scores=_check.kind(Mapping, "a dict of numbers by name") | None,
)
def store(
    directory: str | os.PathLike,
    name: str,
    prediction: Prediction,
    *,
    targets: ArrayLike | None = None,
    scores: Mapping[str, float] | None = None,
):
    """Store a prediction beside the draws it was made from, for the report.

    Args:
        directory: directory of the run.
        name: name of method or data, such as `"test"`: letters, digits, spaces, `-` and `_`.
        prediction: result of `predict`. With `per="draw"`, of all draws, the report judges the
            chains by it. Of each draw, the log density and a single mean per input are stored.
        targets: observed values.
        scores: scores by name; None: those of `metrics.score`, if there are targets.

    Raises:
        ValueError: a directory without a run, an invalid name, scores that are not numbers.
    """
    directory = Path(directory)
    _format.read_manifest("report.store", directory)
    if scores is None:
        with _check.called("report.store", "score"):
            scores = {} if targets is None else score(prediction, targets)
    number = _check.Real(infinite=True)
    scores = {x: float(number("report.store", f"scores[{x!r}]", y)) for x, y in scores.items()}
    kept = {field: getattr(prediction, field) for field in FIELDS} | {"targets": targets}
    draws = prediction.each
    if draws is not None and np.ndim(draws.log_density) == np.ndim(prediction.log_density) + 2:
        mean = draws.mean if np.ndim(draws.mean) == 3 else None
        kept |= {"each": draws.log_density, "each_mean": mean}
    arrays = {field: np.asarray(array) for field, array in kept.items() if array is not None}
    file = directory / FILE.format(name)
    header = {"file": file.name, "scores": scores, "uncertainty": prediction.uncertainty}
    _disk.write(file, _disk.pack(header, arrays))


def main(arguments: list[str] | None = None):
    """Write the report of the directory given on the command line."""
    about = "Write a report of a run: can its chains be trusted, and what do they predict?"
    parser = argparse.ArgumentParser(prog="python -m optax_smile.report", description=about)
    parser.add_argument("directory", type=Path, help="directory given to sample(directory=...)")
    parser.add_argument("--output", type=Path, help="HTML file (default: DIRECTORY/report.html)")
    parser.add_argument("--title", help="title of the page (default: the sampler)")
    given = parser.parse_args(arguments)
    try:
        print(write(given.directory, given.output, title=given.title))
    except (ValueError, OSError, ImportError) as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
