"""The page of a report."""

from __future__ import annotations

import glob
import html
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import jax
import numpy as np

from optax_smile import _check, _disk, _settings, _table, diagnostics
from optax_smile._types import Tree
from optax_smile.diagnostics.findings import ADVICE
from optax_smile.draws import _format
from optax_smile.draws.snapshots import StoredSnapshots
from optax_smile.metrics.classification import NUM_BINS
from optax_smile.report import _pictures
from optax_smile.report._pictures import marked
from optax_smile.report._predictions import BETTER, FILE, Stored

# Number of parameters kept in memory to plot the paths of the chains; 512 MiB in float32.
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

    Cost: reads each draw once; keeps only the few draws that the plot of the paths needs.

    Example:
        As `python -m optax_smile.report run`::

            optax_smile.report.write("run")
    """
    where, directory = "report.write", Path(directory)
    output = directory / "report.html" if output is None else Path(output)
    if output.suffix not in (".html", ".htm"):
        _check.fail(where, "output", "a path that ends in .html or .htm", output)
    snapshots = _ReadOnce(directory, _format.read_manifest(where, directory), None, False)
    if not snapshots.num_draws:
        _check.fail(where, "directory", "a directory with draws", directory)
    stored = [Stored(file) for file in sorted(directory.glob(FILE.format("*")))]
    title = html.escape(title or _title(snapshots))
    parts = [
        f"<h1>{title}</h1>",
        *_head(snapshots),
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
    _remove_drafts(output)
    _disk.write(output, page.encode(errors="replace"))
    return output


def _remove_drafts(output: Path):
    """Remove the temporary files that killed reports left behind."""
    for draft in output.parent.glob(f".{glob.escape(output.name)}.*"):
        if draft.suffix[1:].isdigit():
            draft.unlink(missing_ok=True)


class _ReadOnce(StoredSnapshots):
    """Draws on disk; iterating over them keeps a few in memory, as `kept`."""

    @property
    def size(self) -> int:
        """Number of parameters of a chain."""
        return sum(int(np.prod(leaf.shape)) for leaf in self._leaves)

    def __iter__(self) -> Iterator[Tree]:
        every, kept = -(-len(self) * self.size // MOST_PARAMETERS), []
        for number, params in enumerate(super().__iter__()):
            # Always keep the last draw.
            if (self.num_draws - 1 - number // self.num_chains) % every == 0:
                kept.append(params)
            yield params

        def by_chain(*leaves):
            by_draw = np.stack(leaves).reshape(-1, self.num_chains, *leaves[0].shape)
            return by_draw.swapaxes(0, 1)

        self.kept = jax.tree.map(by_chain, *kept)


def _sampler(snapshots: _ReadOnce) -> Mapping:
    """Return the known part of the sampler's name and arguments."""
    return snapshots.settings or {"name": "a sampler"}


def _title(snapshots: _ReadOnce) -> str:
    chains, draws = _size(snapshots)
    size = f"{chains} of {draws}" if snapshots.subset is None else f"a subset of {draws}"
    return f"{_sampler(snapshots)['name']}: {size}"


def _size(snapshots: _ReadOnce) -> tuple[str, str]:
    counted = _table.counted
    return counted(snapshots.num_chains, "chain"), counted(snapshots.num_draws, "draw")


def _head(snapshots: _ReadOnce) -> Iterator[str]:
    manifest = snapshots.manifest
    settings, sampler = manifest["settings"], _sampler(snapshots)
    size = _table.counted(snapshots.size, "parameter")
    yield f"<p>{_drawn(snapshots, html.escape(sampler['name']), size)}</p>"
    seeds = {"sample": settings.get("key"), sampler["name"]: sampler.get("key")}
    known = {name: _seed(key) for name, key in seeds.items()}
    facts: dict[str, str] = {}
    facts["seed"] = ", ".join(f"{x} ({name})" for name, x in known.items() if x is not None)
    facts["data"] = _data(manifest["data"], sampler.get("num_data"))
    versions = manifest["versions"].items()
    facts["libraries"] = ", ".join(f"{name} {version}" for name, version in versions)
    facts["directory"] = str(snapshots.directory)
    facts["stopping"] = str(snapshots.stopping or "")
    shown = {name: html.escape(text) for name, text in facts.items() if text}
    if not _settings.are_posterior(sampler):
        yield f"<p><b>{NO_POSTERIOR}</b></p>"
    yield f"<dl>{''.join(f'<dt>{name}</dt><dd>{text}</dd>' for name, text in shown.items())}</dl>"


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


def _drawn(snapshots: _ReadOnce, sampler: str, size: str) -> str:
    """Say which draws these are."""
    (chains, draws), settings = _size(snapshots), snapshots.manifest["settings"]
    if snapshots.subset is not None:
        source = snapshots.manifest["subset"]["of"]["directory"]
        place = f" in {html.escape(source)}" if source and Path(source).is_dir() else ""
        return f"{draws} of {sampler}, {size}: a subset chosen on held-out data from a run{place}."
    steps = ""
    if "thin" in settings:
        apart = _table.counted(settings["thin"], "step")
        warmup = _table.counted(settings.get("num_warmup", 0), "step")
        steps = f" One draw every {apart}, after {warmup} of warm-up."
    return f"{chains} of {sampler}, {draws} each, {size}.{steps}"


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
    rows = [
        [
            html.escape(each.name),
            *(f"{each.scores[name]:.4g}" if name in each.scores else "" for name in names),
        ]
        for each in scored
    ]
    yield _table_of(["", *map(_with_arrow, names)], rows)
    if "ECE" in names:
        yield f'<p class="note">ECE in {NUM_BINS} bins of equal width, here and below.</p>'


def _table_of(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Make an HTML table that may be wider than the page."""

    def line(cells: Iterable[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f'{HINT}<div class="wide"><table>{line(head, "th")}{body}</table></div>'


def _with_arrow(score: str) -> str:
    if score not in BETTER:
        return html.escape(score)
    sign, meaning = BETTER[score]
    return f'{html.escape(score)} <span title="{meaning}">{sign}</span>'


def _chains(snapshots: _ReadOnce, stored: list[Stored]) -> Iterator[str]:
    if snapshots.subset is not None:
        yield f"<h2>Can the chains be trusted?</h2><p><b>{SUBSET}</b></p>"
        return
    if not _settings.are_posterior(snapshots.settings):
        for _ in snapshots:
            # Iterating keeps some draws in memory for the plot of the paths.
            pass
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


def _plots_of(snapshots: _ReadOnce, nominal: float) -> str:
    seen = snapshots.trace, snapshots.kept, snapshots.start, nominal, snapshots.stopping
    pictures = _pictures.of_chains(*seen)
    return _pictures.draw(pictures)


def _lights(summary: diagnostics.Summary) -> Iterator[str]:
    """Yield a light for each check with its text and advice, worst first."""
    num_chains = len(summary.copy_of)
    found = sorted(summary.findings, key=lambda check: check.kind not in TROUBLE)
    items = [
        _light(
            "trouble" if check.kind in TROUBLE else "look",
            check.kind,
            f" ({_chosen(check.chains, num_chains)}): {check.text}",
            check.advice,
        )
        for check in found
    ]
    passed: dict[str, list[str]] = {}
    for check in summary.checks:
        # A kind with a finding is not listed as passed.
        if check.kind not in {x.kind for x in found}:
            passed.setdefault(check.kind, []).append(check.text)
    items += [_light("fine", kind, ": " + chr(10).join(texts)) for kind, texts in passed.items()]
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


def _light(light: str, kind: str, shown: str, advice: str = "") -> str:
    tried = f'<span class="advice"><b>Try</b> {marked(advice)}</span>' if advice else ""
    text = f"<span><b>{html.escape(kind)}</b>{marked(shown)}{tried}</span>"
    return f'<li><span class="light {light}">{light}</span>{text}</li>'


def _chosen(chains: tuple[int, ...], num_chains: int) -> str:
    if len(chains) == num_chains:
        return "all chains"
    return f"chain{'s' * (len(chains) > 1)} {', '.join(map(str, chains))}"


def _predictions(stored: list[Stored]) -> Iterator[str]:
    if drawn := _pictures.draw(_pictures.of_predictions(stored)):
        yield f"<h2>What they predict</h2>{drawn}"
    if drawn := _pictures.draw(_pictures.of_images(stored)):
        yield f"<h2>Examples</h2>{drawn}"


def _written_settings(snapshots: StoredSnapshots) -> Iterator[str]:
    yield "<h2>Settings</h2>"
    names = ("settings", "data", "loss", "versions", "subset", "stopping")
    parts = {x: snapshots.manifest[x] for x in names if x in snapshots.manifest}
    whole = html.escape(json.dumps(parts, indent=1))
    yield f'<details><summary>The manifest</summary><pre class="wide">{whole}</pre></details>'
