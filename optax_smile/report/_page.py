"""The page of a report and its plots."""

from __future__ import annotations

import base64
import glob
import html
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from optax_smile import _check, _disk, _settings, _table, diagnostics, plots
from optax_smile._types import Tree
from optax_smile.diagnostics.findings import ADVICE
from optax_smile.diagnostics.summarize import name_chains
from optax_smile.draws._checks import of_targets
from optax_smile.draws.prediction import classes, labelled
from optax_smile.draws.snapshots import StoredSnapshots, load_snapshots
from optax_smile.metrics import NUM_BINS
from optax_smile.plots._axes import add_legend, chain_style, count_along
from optax_smile.report._predictions import BETTER, FILE, Stored

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# How to read a plot, and what draws it, `draw(ax=...)`.
Picture: TypeAlias = tuple[str, Callable[..., object]]
# Inches of a plot and dots per inch: labels are readable on a screen of 400 pixels.
SIZE, DENSITY = (4.8, 4.0), 230
# Number of parameters in memory to plot the paths of the chains; 512 MiB in float32.
MOST_PARAMETERS = 1 << 27
# Findings that mean the draws are not from the posterior; the others deserve a look.
TROUBLE = {"copies", "altered", "not finite", "diverged", "frozen", "still on its way"}
TROUBLE |= {"not settled"}
NO_POSTERIOR = (
    "These draws are optimizer iterates, not posterior draws, so the chains are not diagnosed."
)
SUBSET = (
    "These draws are a subset chosen on held-out data, so the chains are not diagnosed. Judge the"
    " run from which they were chosen."
)
HINT = '<p class="note hint">Scroll sideways to see all columns.</p>'
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 1120px; margin: 0 auto; padding: 1em;
       color: #222; background: #fff; overflow-wrap: break-word; }
h1 { font-size: 1.6em; line-height: 1.25; margin: .5em 0; }
h2 { font-size: 1.2em; margin: 2em 0 .5em; border-bottom: 2px solid #0072b2; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25em .8em; border-bottom: 1px solid #ddd; text-align: right;
         white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
.wide { overflow-x: auto; margin: .5em 0; background-repeat: no-repeat; background-color: #fff;
        /* A shadow at an edge shows that there is more to scroll to. */
        background-image: linear-gradient(90deg, #fff, #fff), linear-gradient(90deg, #fff, #fff),
          linear-gradient(90deg, #999, #fff0), linear-gradient(270deg, #999, #fff0);
        background-size: 24px 100%, 24px 100%, 10px 100%, 10px 100%;
        background-position: 0 0, 100% 0, 0 0, 100% 0;
        background-attachment: local, local, scroll, scroll; }
.hint { display: none; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .1em 1em; }
dt { color: #666; } dd { margin: 0; }
.lights { list-style: none; padding: 0; }
.lights li { display: grid; grid-template-columns: 4.6em minmax(0, 1fr); gap: .7em;
             padding: .4em 0; border-bottom: 1px solid #ddd; }
.light { align-self: start; border-radius: 1em; text-align: center; font-size: .85em;
         font-weight: 600; padding: .05em 0; }
.trouble { background: #b3261e; color: #fff; } .look { background: #f3c13a; color: #222; }
.fine { background: #1c7c54; color: #fff; }
.lights li > span + span { white-space: pre-line; } .advice { display: block; }
.pictures { display: grid; gap: 1em 2em;
            grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
figure { margin: 0; max-width: 620px; break-inside: avoid; } img { width: 100%; height: auto; }
figcaption, .note { font-size: .9em; color: #555; }
pre { padding: .8em 0; font-size: .85em; }
@media (max-width: 500px) {
  th, td { padding: .25em .4em; font-size: .9em; } .hint { display: block; }
  figcaption { font-size: 1em; } }
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
    """Write an HTML report of a run: settings, scores, diagnostics, plots.

    Args:
        directory: directory of a run, written by `sample(directory=...)` and, optionally, `store`.
        output: the HTML file; None: `report.html` in the directory.
        title: title of the page; None: sampler, chains and draws.

    Returns:
        The path of the file. The page is self-contained and needs no network. An error leaves an
        earlier page unchanged.

    Raises:
        ValueError: a directory without a run or without draws; a damaged file.
        ImportError: matplotlib or arviz is not installed.
        OSError: a file that cannot be read or written.

    Cost: reads each draw once, and again those for the plot of the paths, at most 2^27 numbers (512
    MiB in float32).

    Example:
        As `python -m optax_smile.report run`::

            optax_smile.report.write("run")
    """
    where, directory = "report.write", Path(directory)
    output = directory / "report.html" if output is None else Path(output)
    if output.suffix not in (".html", ".htm"):
        _check.fail(where, "output", "a path that ends in .html or .htm", output)
    with _check.called(where, "load_snapshots"):
        snapshots = load_snapshots(directory)
    if not snapshots.num_draws:
        _check.fail(where, "directory", "a directory with draws", directory)
    stored = [Stored(file) for file in sorted(directory.glob(FILE.format("*")))]
    sampler: Mapping = snapshots.settings or {"name": "a sampler"}
    name, sentence = _described(snapshots, sampler["name"])
    title = html.escape(title or name)
    parts = [
        f"<h1>{title}</h1><p>{html.escape(sentence)}</p>",
        *_facts(snapshots, sampler),
        *_scores(stored),
        *_chains(snapshots, stored),
        *_predictions(stored),
        *_written_settings(snapshots),
    ]
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head><body>"
        + "\n".join(parts)
        + "</body></html>"
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    for draft in output.parent.glob(f".{glob.escape(output.name)}.*"):
        # Of a killed report.
        if draft.suffix[1:].isdigit():
            draft.unlink(missing_ok=True)
    _disk.write(output, page.encode(errors="replace"))
    return output


def _described(snapshots: StoredSnapshots, sampler: str) -> tuple[str, str]:
    """Return a title and a sentence that say which draws these are."""
    counted, settings = _table.counted, snapshots.manifest["settings"]
    draws, size = counted(snapshots.num_draws, "draw"), counted(_size(snapshots), "parameter")
    if snapshots.subset is not None:
        source = snapshots.manifest["subset"]["of"]["directory"]
        place = f" in {source}" if source and Path(source).is_dir() else ""
        chosen = f"a subset chosen on held-out data from a run{place}"
        return f"{sampler}: a subset of {draws}", f"{draws} of {sampler}, {size}: {chosen}."
    chains, steps = counted(snapshots.num_chains, "chain"), ""
    if "thin" in settings:
        thin, warmup = (counted(settings.get(x, 0), "step") for x in ("thin", "num_warmup"))
        steps = f" One draw every {thin}, after {warmup} of warm-up."
    sentence = f"{chains} of {sampler}, {draws} each, {size}.{steps}"
    return f"{sampler}: {chains} of {draws}", sentence


def _facts(snapshots: StoredSnapshots, sampler: Mapping) -> Iterator[str]:
    manifest = snapshots.manifest
    seeds = {"sample": manifest["settings"].get("key"), sampler["name"]: sampler.get("key")}
    known = {name: _seed(key) for name, key in seeds.items()}
    facts = {
        "seed": ", ".join(f"{x} ({name})" for name, x in known.items() if x is not None),
        "data": _data(manifest["data"], sampler.get("num_data")),
        "libraries": ", ".join(f"{name} {x}" for name, x in manifest["versions"].items()),
        "directory": str(snapshots.directory),
        "stopping": str(snapshots.stopping or ""),
    }
    if not _settings.are_posterior(sampler):
        yield f"<p><b>{NO_POSTERIOR}</b></p>"
    shown = (f"<dt>{x}</dt><dd>{html.escape(text)}</dd>" for x, text in facts.items() if text)
    yield f"<dl>{''.join(shown)}</dl>"


def _size(snapshots: StoredSnapshots) -> int:
    """Return the number of parameters of a chain."""
    return sum(math.prod(leaf.shape) for leaf in snapshots._leaves)


def _seed(key: object) -> int | None:
    """Return the seed from which `jax.random.key` made a key; None for a key of another kind."""
    if type(key) is int:
        return key
    if not isinstance(key, list) or [type(word) for word in key] != [int, int]:
        return None
    return (key[0] << 32) + key[1]


def _data(described: Mapping, num_data: object) -> str:
    """Describe the amount of data; empty if it is unknown.

    A list of batches may repeat examples, so the number of examples comes from the sampler.
    """
    batches, parts = described.get("num_batches"), []
    if isinstance(num_data, int | float) and math.isfinite(num_data):
        parts.append(_table.counted(round(num_data), "example"))
    if type(batches) is int:
        parts.append(f"{batches:,} batch{'' if batches == 1 else 'es'}")
    return " in ".join(parts)


def _scores(stored: list[Stored]) -> Iterator[str]:
    yield "<h2>Scores</h2>"
    scored = [each for each in stored if each.scores]
    if not scored:
        yield (
            "<p>The run has no stored scores. To add some, call"
            " <code>optax_smile.report.store(directory, name, prediction, targets=...)</code>.</p>"
        )
        return
    names = list(dict.fromkeys(name for each in scored for name in each.scores))
    rows = [_row("th", ["", *map(_with_arrow, names)])]
    for each in scored:
        scores = (f"{each.scores[name]:.4g}" if name in each.scores else "" for name in names)
        rows.append(_row("td", [html.escape(each.name), *scores]))
    yield f'{HINT}<div class="wide"><table>{"".join(rows)}</table></div>'
    if "ECE" in names:
        yield f'<p class="note">ECE in {NUM_BINS} bins of equal width, here and below.</p>'


def _row(tag: str, cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in cells)}</tr>"


def _with_arrow(score: str) -> str:
    if score not in BETTER:
        return html.escape(score)
    sign, meaning = BETTER[score]
    return f'{html.escape(score)} <span title="{meaning}">{sign}</span>'


def _chains(snapshots: StoredSnapshots, stored: list[Stored]) -> Iterator[str]:
    if snapshots.subset is not None:
        yield f"<h2>Can the chains be trusted?</h2><p><b>{SUBSET}</b></p>"
        return
    if not _settings.are_posterior(snapshots.settings):
        yield "<h2>How the optimizer ran</h2>"
        yield _plots_of(snapshots, 0.0)
        return
    yield "<h2>Can the chains be trusted?</h2>"
    axes = snapshots.num_chains, snapshots.num_draws
    by_draw = [one for one in stored if one.prediction.each is not None]
    fitting = [one for one in by_draw if one.prediction.each.log_density.shape[:2] == axes]
    if by_draw and not fitting:
        yield (
            "<p>The stored predictions cover fewer draws than the run now has. Store them again to"
            " include predictions in the diagnostics.</p>"
        )
    summary = diagnostics.summary(snapshots, fitting[0].prediction if fitting else None)
    if fitting:
        yield (
            f"<p>The diagnostics use the prediction “{html.escape(fitting[0].name)}”, of which one"
            " number per input is stored. `summary` of the whole prediction may show other R-hats."
            "</p>"
        )
    yield from _lights(summary)
    yield (
        f"<details><summary>All figures, chain by chain</summary>{HINT}"
        f'<pre class="wide">{html.escape(str(summary))}</pre></details>'
    )
    yield "<h2>How the chains ran</h2>"
    yield _plots_of(snapshots, summary.nominal_rate)


def _plots_of(snapshots: StoredSnapshots, nominal: float) -> str:
    every = -(-len(snapshots) * _size(snapshots) // MOST_PARAMETERS)
    return _figures(_of_chains(snapshots, snapshots.thinned(every).params, nominal))


def _lights(summary: diagnostics.Summary) -> Iterator[str]:
    """Yield a light for each check with its text and advice, worst first."""
    found = sorted(summary.findings, key=lambda check: check.kind not in TROUBLE)
    lights = [
        (
            "trouble" if check.kind in TROUBLE else "look",
            check.kind,
            f" ({name_chains(check.chains, len(summary.copy_of))}): {check.text}",
            f'<span class="advice"><b>Try</b> {_marked(check.advice)}</span>',
        )
        for check in found
    ]
    passed: dict[str, list[str]] = {}
    for check in summary.checks:
        # A kind with a finding is not listed as passed.
        if check.kind not in {x.kind for x in found}:
            passed.setdefault(check.kind, []).append(check.text)
    lights += [("fine", kind, ": " + "\n".join(texts), "") for kind, texts in passed.items()]
    items = [
        f'<li><span class="light {light}">{light}</span>'
        f"<span><b>{html.escape(kind)}</b>{_marked(text)}{advice}</span></li>"
        for light, kind, text, advice in lights
    ]
    yield f'<ul class="lights">{"".join(items)}</ul>'
    tested = {check.kind for check in summary.checks}
    if untested := [kind for kind in ADVICE if kind not in tested]:
        yield (
            f'<p class="note">Not tested: {", ".join(untested)}. These tests need more draws, a'
            " prediction of every draw, a loss at every step, a sampler that rejects steps, or"
            " chains that have settled, mix fast enough and share their modes.</p>"
        )
    if not found:
        yield f"<p>{html.escape(str(summary).splitlines()[-1])}</p>"


def _predictions(stored: list[Stored]) -> Iterator[str]:
    if drawn := _figures(_of_predictions(stored)):
        yield f"<h2>What they predict</h2>{drawn}"
    if drawn := _figures(_of_images(stored)):
        yield f"<h2>Examples</h2>{drawn}"


def _written_settings(snapshots: StoredSnapshots) -> Iterator[str]:
    yield "<h2>Settings</h2>"
    names = ("settings", "data", "loss", "versions", "subset", "stopping")
    parts = {x: snapshots.manifest[x] for x in names if x in snapshots.manifest}
    whole = html.escape(json.dumps(parts, indent=1))
    yield f'<details><summary>The manifest</summary><pre class="wide">{whole}</pre></details>'


def _figures(pictures: Iterable[Picture]) -> str:
    """Return HTML with these plots; in place of a plot that fails, the reason."""
    drawn = "".join(_figure(*picture) for picture in pictures)
    return f'<div class="pictures">{drawn}</div>' if drawn else ""


def _figure(caption: str, draw: Callable[..., object]) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    try:
        draw(ax=axes)
    except ValueError as error:
        # One plot that fails, such as that of a single draw, must not stop the others.
        return f'<p class="note">No plot ({_marked(caption)}): {_marked(str(error))}</p>'
    content = io.BytesIO()
    figure.savefig(content, dpi=DENSITY)
    image = base64.b64encode(content.getvalue()).decode()
    return (
        f'<figure><img alt="{html.escape(axes.get_title())}" src="data:image/png;base64,{image}">'
        f"<figcaption>{_marked(caption)}</figcaption></figure>"
    )


def _marked(text: str) -> str:
    """Convert a text with code between backticks to HTML."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text))


def _of_chains(snapshots: StoredSnapshots, draws: Tree, nominal: float) -> Iterator[Picture]:
    """Yield plots of the run and of some of its draws; plots without data are left out."""
    trace, stopping = snapshots.trace, snapshots.stopping
    rate = nominal if nominal > 0 else None
    if stopping is not None and len(stopping.num_draws):
        yield (
            "The run stops where the evidence of held-out data reaches the dashed line.",
            partial(plots.stopping, stopping),
        )
    if np.isfinite(trace.get("step_size", np.nan)).any():
        yield (
            "In a good run all chains end at the same level.",
            partial(plots.step_size, trace),
        )
    if np.isfinite(trace.get("energy_change", np.nan)).any():
        yield (
            "In a good run the band stays at one level.",
            partial(plots.energy_error, trace),
        )
    if "num_rejected" in trace and (rate or np.any(trace["num_rejected"])):
        yield (
            "After the warm-up a good run stays near the nominal rate, if it has one.",
            partial(plots.rejections, trace, nominal=rate),
        )
    yield (
        "Overlapping paths explore the same region; a path that keeps moving in one direction has"
        " not reached equilibrium.",
        partial(plots.chain_paths, draws, start=snapshots.start),
    )


def _of_predictions(stored: list[Stored]) -> Iterator[Picture]:
    """Yield plots of the predictions, with methods and data sets overlaid where possible."""
    classified = {
        _label(one): labelled(one.prediction.mean, one.targets)
        for one in stored
        if one.prediction.uncertainty == "entropy"
        if one.prediction.mean is not None and one.targets is not None
    }
    if classified:
        yield (
            "Calibrated predictions lie on the dotted line; below it they are overconfident.",
            partial(_overlay, plots.reliability, classified),
        )
        yield (
            "A good method is wrong where it is uncertain: its curve is low on the left.",
            partial(_overlay, plots.risk_coverage, classified),
        )
    entropies = {
        _label(one): one.prediction.total
        # Methods keep their colours of the earlier plots.
        for one in sorted(stored, key=lambda one: one.targets is None)
        if one.prediction.uncertainty == "entropy" and np.ndim(one.prediction.total) == 1
    }
    if len(entropies) > 1:
        yield (
            "Out-of-distribution inputs should lie to the right of in-distribution inputs.",
            partial(plots.entropy, entropies),
        )
    for one in stored:
        yield from _of_one(one)


def _label(stored: Stored) -> str:
    """Return a legend label; matplotlib skips labels that begin with an underscore."""
    return f" {stored.name}" if stored.name.startswith("_") else stored.name


def _overlay(plot: Callable, classified: Mapping[str, tuple], ax: Axes):
    for label, (probabilities, labels) in classified.items():
        plot(probabilities, labels, label=label, ax=ax)


def _of_one(stored: Stored) -> Iterator[Picture]:
    """Yield plots that show a single prediction."""
    name, prediction, targets = stored.name, stored.prediction, stored.targets
    draws = prediction.each
    if draws is not None and draws.log_density.shape[1] > 1:
        density = draws.log_density.reshape(*draws.log_density.shape[:2], -1)
        values, what = draws.mean, "prediction for"
        if values is None:
            values, what = density, "log likelihood of"
        yield (
            f"{name}: if flat at the end, more draws would not help. Higher is better.",
            partial(plots.lppd, of_targets(draws.log_density)),
        )
        yield (
            f"{name}: the input whose prediction varies most. In a good run the chains fluctuate"
            " around the same level, without trends or long excursions.",
            partial(_draw_trace, values, what),
        )
    is_normal = prediction.uncertainty == "variance" and np.ndim(prediction.mean) == 1
    if is_normal and targets is not None:
        normal = prediction.mean, np.sqrt(prediction.total)
        yield (
            f"{name}: the band should contain its nominal share of the targets.",
            partial(plots.regression_band, None, *normal, targets),
        )


def _draw_trace(values: np.ndarray, what: str, ax: Axes):
    """Plot the numbers `[chain, draw, input]` of the input that varies most, draw by draw."""
    with np.errstate(invalid="ignore"):
        place = int(np.nan_to_num(values.var(axis=(0, 1)), nan=-1.0).argmax())
    for style, chain in zip(chain_style(len(values)), values[:, :, place], strict=True):
        ax.plot(np.arange(1, len(chain) + 1), chain, **style)
    ax.set(title="A prediction, draw by draw", ylabel=f"{what} input {place}")
    count_along(ax, "draw")
    add_legend(ax)


def _of_images(stored: list[Stored]) -> Iterator[Picture]:
    """Yield plots of the stored images with their predictions."""
    for one in stored:
        if one.images is not None:
            prediction, shown, targets = one.prediction, one.shown, one.targets
            mean = np.asarray(prediction.mean)
            if prediction.uncertainty == "entropy":
                mean = classes(mean, np.shape(prediction.total))
            targets = None if targets is None else targets[shown]
            yield (
                f"{one.name}: would you be certain of the first ones, and uncertain of the others?",
                partial(plots.examples, one.images, mean[shown], prediction.total[shown], targets),
            )
