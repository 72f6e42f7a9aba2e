"""An HTML report of a run: what `summary` and `plots` say about it, and its settings.

`python -m optax_smile.report DIRECTORY` makes it from a directory alone: `DIRECTORY/report.html`.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import jax
import numpy as np

from optax_smile import _check, _disk, _settings, diagnostics, plots
from optax_smile.draws._constraints import PREDICTION
from optax_smile.draws.prediction import Prediction
from optax_smile.draws.snapshots import StoredSnapshots, load_snapshots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["write"]

# Size of a plot in inches and dots per inch: labels are readable on a screen of 400 pixels.
SIZE, DENSITY = (4.8, 4.0), 230
# Largest number of parameters for the plot of the paths, which then needs a gigabyte.
MOST_PARAMETERS = 1 << 25
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 1120px; margin: 0 auto; padding: 1em;
       color: #222; background: #fff; overflow-wrap: anywhere; }
pre { overflow-x: auto; } h1 { font-size: 1.6em; }
h2 { font-size: 1.2em; border-bottom: 2px solid #0072b2; }
.pictures { display: grid; gap: 1em 2em;
            grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
figure { margin: 0; max-width: 620px; color: #555; } img { width: 100%; height: auto; }
"""
PICTURES = _check.Where(
    "a dict of matplotlib axes",
    lambda x: isinstance(x, Mapping) and all(hasattr(ax, "transAxes") for ax in x.values()),
)


@_check.arguments(
    "report.write",
    directory=_check.PathLike(),
    output=_check.PathLike() | None,
    title=_check.kind(str, "a string") | None,
    prediction=PREDICTION | None,
    pictures=PICTURES,
)
@_check.called("report.write", "load_snapshots", "summary", snapshots="directory")
def write(
    directory: str | os.PathLike,
    output: str | os.PathLike | None = None,
    *,
    title: str | None = None,
    prediction: Prediction | None = None,
    pictures: Mapping[str, Axes] = _check.NOTHING,
) -> Path:
    """Write an HTML report of a run: `summary`, plots, settings. Returns its path.

    It needs no network. An error leaves an earlier page unchanged.

    Args:
        directory: directory of a run, written by `sample(directory=...)`.
        output: the HTML file; None: `report.html` in the directory.
        title: title of the page; None: the name of the sampler.
        prediction: result of `predict(..., per="draw", targets=...)` for these draws. `summary`
            checks the chains by it; None: by their weights. It may be `tempered`.
        pictures: axes with more plots by caption, such as
            `{"Dots below the line are overconfident.": plots.reliability(chances, labels)}`.

    Raises:
        ValueError: a directory without a run or without draws; a damaged file; a prediction from
            other draws.

    Cost: one pass over the draws, and one over those whose paths are drawn, at most 2^25 numbers.
    """
    directory = Path(directory)
    output = directory / "report.html" if output is None else Path(output)
    if output.suffix not in (".html", ".htm"):
        _check.fail("output", "a path that ends in .html or .htm", output)
    run = load_snapshots(directory)
    if not run.num_draws:
        _check.fail("directory", "a directory with draws", directory)
    title = html.escape(title or f"A run of {(run.settings or {}).get('name', 'a sampler')}")
    table, notes = "", "These draws are optimizer iterates, not posterior draws: no diagnostics."
    if _settings.are_posterior(run.settings):
        table, _, notes = str(diagnostics.summary(run, prediction)).partition("\n\n")
    settings = json.dumps({x: run.manifest[x] for x in ("settings", "versions")}, indent=1)
    texts = repr(run), table, settings
    about, table, settings = (f"<pre>{html.escape(text)}</pre>" for text in texts)
    parts = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title><style>{STYLE}</style></head><body><h1>{title}</h1>",
        f"{about}<h2>Can the chains be trusted?</h2>{table}",
        f'<p style="white-space: pre-line">{html.escape(notes)}</p>',
        '<h2>Plots</h2><div class="pictures">',
        *(_figure(*one) for one in [*_pictures(run), *pictures.items()]),
        f"</div><h2>Settings</h2>{settings}</body></html>",
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    _disk.write(output, "\n".join(parts).encode(errors="replace"))
    return output


def _figure(caption: str, axes: Axes) -> str:
    content = io.BytesIO()
    cast("Figure", axes.figure).savefig(content, dpi=DENSITY)
    image = base64.b64encode(content.getvalue()).decode()
    return (
        f'<figure><img alt="{html.escape(axes.get_title())}" src="data:image/png;base64,{image}">'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )


def _pictures(run: StoredSnapshots) -> Iterator[tuple[str, Axes]]:
    """Yield pairs of a caption and a plot, for all plots that have data."""
    from matplotlib.figure import Figure

    trace, size = run.trace, sum(np.size(leaf) for leaf in jax.tree.leaves(run[0]))
    draws = run.thinned(-(-len(run) * size // MOST_PARAMETERS))
    axes = [Figure(figsize=SIZE, layout="constrained").subplots() for _ in range(3)]
    if np.isfinite(trace.get("step_size", np.nan)).any():
        yield "In a good run all chains end at the same level.", plots.step_size(trace, ax=axes[0])
    if np.isfinite(trace.get("energy_change", np.nan)).any():
        yield "In a good run the band stays at one level.", plots.energy_error(trace, ax=axes[1])
    caption = "In a good run the paths overlap, and none keeps moving in one direction."
    try:
        plots.chain_paths(draws.params, start=run.start, ax=axes[2])
    except ValueError as error:
        caption = f"No paths: {error}"
    yield caption, axes[2]


def main(arguments: list[str] | None = None):
    """Write the report of the directory given on the command line."""
    about = "Write a report of a run: can its chains be trusted?"
    parser = argparse.ArgumentParser(prog="python -m optax_smile.report", description=about)
    parser.add_argument("directory", type=Path, help="directory given to sample(directory=...)")
    parser.add_argument("--output", type=Path, help="HTML file (default: DIRECTORY/report.html)")
    parser.add_argument("--title", help="title of the page (default: the sampler)")
    given = vars(parser.parse_args(arguments))
    try:
        print(write(**given))
    except (ValueError, OSError, ImportError) as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
