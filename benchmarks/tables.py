"""Make every table and figure of the pages from the records.

    python benchmarks/tables.py            rewrite what stands between markers
    python benchmarks/tables.py --check    list what is stale, and exit with 1

Pages are `README.md`, `notes/*.md`, and `faults.md` and `which-method.md` in `../docs`; records are
`results/*.jsonl`, those of the paper `results/paper.jsonl`.

Markers of a table, on separate lines, and of a figure, within a line:

    <!-- table NAME --> <!-- end -->
    ... better by <!-- figure NAME -->0.05 ± 0.01<!-- end --> nats ...
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

# So that it runs where nothing is installed.
sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.tabulated import (  # noqa: E402
    agreement,
    analytic,
    costs,
    draws,
    ensembles,
    gaussians,
    llc,
    networks,
    public_loops,
    selection,
    starts,
    uci,
    which_method,
)
from benchmarks.tabulated.table import Record, Table, block, read  # noqa: E402

FOLDER = Path(__file__).parent


@cache
def records_of(name: str) -> list[Record]:
    """Records of a file; none if it is not there."""
    return read(FOLDER / "results" / f"{name}.jsonl")


def made_of(build: Callable[..., Any], *files: str, **options: Any) -> Callable[[], Any]:
    """How to make a table or figure: a function, the files of its records, and options."""
    return lambda: build(*map(records_of, files), **options)


TABLES: dict[str, Callable[[], Table]] = {
    "quickstart": made_of(ensembles.quickstart, "quickstart_seeds"),
    "uci": made_of(uci.joint, "uci"),
    "uci-differences": made_of(uci.differences, "uci"),
    "uci-mixing": made_of(uci.mixing, "uci"),
    "uci-step-rules": made_of(uci.step_rules, "uci"),
    "uci-batches": made_of(uci.batches, "uci"),
    "order": made_of(gaussians.order, "order"),
    "ways": made_of(gaussians.ways, "ways"),
    "uci-few-chains": made_of(uci.few_chains, "uci"),
    "uci-published": made_of(uci.in_published_units, "uci"),
    "uci-gaps": made_of(uci.gaps, "uci"),
    "uci-batch-wise": made_of(uci.beside_paper, "uci", "paper", budget="batch-wise"),
    "uci-epoch-wise": made_of(uci.beside_paper, "uci", "paper", budget="epoch-wise"),
    "uci-distributional": made_of(uci.distributional, "uci"),
    "scale": made_of(networks.gains, "networks"),
    "scale-cells": made_of(networks.cells, "networks"),
    "scale-pairs": made_of(networks.pairs, "network_pairs"),
    "scale-tiny": made_of(networks.tiny, "networks"),
    "scale-corruptions": made_of(networks.corruptions, "corruptions"),
    "scale-paper": made_of(networks.paper, "networks", "paper"),
    "selection": made_of(selection.choices, "selection"),
    "ladder": made_of(networks.ladder, "ladder"),
    "ladder-cells": made_of(networks.ladder_cells, "ladder"),
    "angles": made_of(networks.angles, "uci", "uci_before", "lenet_small"),
    "lora": made_of(ensembles.lora, "lora"),
    "lora-all": made_of(ensembles.lora_cells, "lora"),
    "posteriors": made_of(agreement.posteriors, "agreement"),
    "nuts-networks": made_of(agreement.networks, "agreement"),
    "nuts-references": made_of(agreement.references, "agreement"),
    "calibration": made_of(agreement.calibration, "agreement"),
    "bias": made_of(analytic.summary, "analytic", "paper"),
    "bias-forms": made_of(analytic.forms, "analytic", "paper"),
    "bias-smallest": made_of(analytic.smallest, "analytic", "paper"),
    "bias-others": made_of(analytic.others, "analytic"),
    "bias-heavy-tails": made_of(analytic.heavy_tails, "analytic", "paper"),
    "bias-skewed": made_of(analytic.skewed, "analytic"),
    "decoherence": made_of(analytic.decoherence, "analytic_figures"),
    "small-noise": made_of(gaussians.small_noise, "small_noise"),
    "starts": made_of(starts.summary, "starts"),
    "starts-all": made_of(starts.cells, "starts"),
    "step-cost": made_of(costs.steps_summary, "step_cost"),
    "step-cost-all": made_of(costs.steps, "step_cost"),
    "step-details": made_of(costs.details, "step_cost"),
    "compilation": made_of(costs.compilation, "step_cost"),
    "predictions": made_of(costs.predictions, "predict_cost"),
    "loops": made_of(costs.loops, "loop_overhead"),
    "faults": made_of(public_loops.campaigns, "faults"),
    "before-sampler": made_of(gaussians.before_sampler, "before_sampler"),
    "around-trained-weights": made_of(ensembles.around, "local"),
    "known-coefficients": made_of(llc.known, "llc"),
    "coefficients-sgld": made_of(llc.beside_sgld, "llc"),
    "transformer-coefficient": made_of(llc.transformer, "llc_transformer"),
    "temperature": made_of(ensembles.temperatures, "calibration"),
    "conformal": made_of(ensembles.sets_and_intervals, "calibration"),
    "estimators": made_of(ensembles.estimators, "estimators"),
    "public-loops": made_of(public_loops.counts, "public_loops"),
    "public-loops-all": made_of(public_loops.loops, "public_loops"),
    "public-loops-fits": made_of(public_loops.fits, "public_loops"),
    "distil": made_of(draws.distilled, "distil"),
    "stopping": made_of(draws.stopping, "stopping"),
    "few-draws": made_of(draws.few, "few_draws"),
    "few-draws-optimism": made_of(draws.optimism, "few_draws"),
    "which-method-short": made_of(which_method.short, "which_method", "networks"),
    "which-method": made_of(which_method.decisions, "uci", "networks", "selection", "few_draws"),
}
FIGURES: dict[str, Callable[[], str]] = {
    "uci wins, scale_adapted_sghmc": made_of(uci.wins, "uci", against="scale_adapted_sghmc"),
    "uci losses, psmile_naive": made_of(uci.losses, "uci", against="psmile_naive"),
    "yacht lost": made_of(uci.lost, "uci", data="yacht"),
    "lora LPPD": made_of(ensembles.lora_difference, "lora", method="psmile", score="LPPD"),
    "posteriors met": made_of(agreement.posteriors_met, "agreement"),
    "bias competitive": made_of(analytic.competitive, "analytic"),
    "bias behind paper": made_of(analytic.behind, "analytic", "paper"),
    "small noise met": made_of(gaussians.small_noise_met, "small_noise"),
    "coefficients met": made_of(llc.met, "llc", estimate="llc"),
    "coefficients met, mean loss": made_of(llc.met, "llc", estimate="plain"),
    "coefficients met, sgld": made_of(llc.sgld_met, "llc"),
    "estimators won": made_of(ensembles.estimators_won, "estimators"),
    "ways that are right": made_of(gaussians.ways_right, "ways"),
    "public loops run": made_of(public_loops.run, "public_loops"),
    "public repositories": made_of(public_loops.repositories, "public_loops"),
}
for score in ("LPPD", "ECE"):
    FIGURES |= {
        f"quickstart {score}": made_of(
            ensembles.quickstart_difference, "quickstart_seeds", score=score
        ),
        f"{score} after temperature": made_of(
            ensembles.tempered_difference, "calibration", when="after", score=score
        ),
    }
for network in ("lenet", "gpt"):
    name = f"step {network}, psmile"
    FIGURES[name] = made_of(costs.whole_step, "step_cost", network=network, method="psmile")
for method in ("smile", "psmile"):
    FIGURES[f"update {method}"] = made_of(costs.update, "step_cost", method=method)
for problem in ("digits", "energy", "airfoil"):
    name = f"which-method {problem}"
    TABLES[name] = made_of(which_method.scores(problem), "which_method")
    FIGURES[name] = made_of(which_method.advice(problem), "which_method")
MARKED = re.compile(r"<!-- (table|figure) ([^>]*?) -->(.*?)<!-- end -->", re.DOTALL)
OPENED = re.compile(r"<!-- (?:table|figure) ([^>]*?) -->")
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def made(kind: str, name: str) -> str:
    """The content between the markers."""
    return f"\n{block(TABLES[name]())} " if kind == "table" else FIGURES[name]()


def is_known(kind: str, name: str) -> bool:
    """Whether there is such a table or figure."""
    return name in (TABLES if kind == "table" else FIGURES)


def rewritten(text: str) -> str:
    """A page with the content of all known markers replaced."""

    def replace(found: re.Match[str]) -> str:
        kind, name, _ = found.groups()
        if not is_known(kind, name) or OPENED.search(found[3]):
            return found[0]
        return f"<!-- {kind} {name} -->{made(kind, name)}<!-- end -->"

    return MARKED.sub(replace, text)


def complaints(text: str, page: str) -> Iterator[str]:
    """Sentences that say what is wrong with a page."""
    for found in MARKED.finditer(text):
        kind, name, content = found.groups()
        inner = OPENED.search(content)
        if inner:
            yield f"{page}: the marker of {kind} `{name}` is not closed before `{inner[1]}` begins."
        elif not is_known(kind, name):
            yield f"{page}: there is no {kind} `{name}` in benchmarks/tables.py."
        elif content != made(kind, name):
            yield f"{page}: {kind} `{name}` is stale; run `python benchmarks/tables.py`."
    rest = MARKED.sub("", text)
    yield from (f"{page}: the marker of `{name}` is not closed." for name in OPENED.findall(rest))
    if "<!-- end -->" in rest:
        yield f"{page}: an end marker closes nothing."
    tables = [line for line in CODE.sub("", rest).splitlines() if line.lstrip().startswith("|")]
    if tables:
        yield f"{page}: a table stands outside markers: `{tables[0][:60]}`."


def uncommitted() -> Iterator[str]:
    """Sentences on records of uncommitted code."""
    for path in sorted((FOLDER / "results").glob("*.jsonl")):
        for number, record in enumerate(read(path), 1):
            chains = record.get("chains")
            parts = [record, *(chains if isinstance(chains, list) else [])]
            if any(isinstance(part, dict) and part.get("dirty") for part in parts):
                yield f"{path.name}: record {number} was made with --allow-dirty."


def main() -> int:
    """Rewrite the pages, or check them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing, list what is stale")
    arguments = parser.parse_args()
    wrong = []
    notes = sorted((FOLDER / "notes").glob("*.md"))
    docs = [FOLDER.parent / "docs" / name for name in ("faults.md", "which-method.md")]
    for page in (FOLDER / "README.md", *notes, *docs):
        text = page.read_text(encoding="utf-8")
        if not arguments.check:
            text = rewritten(text)
            page.write_text(text, encoding="utf-8")
        wrong += complaints(text, page.relative_to(FOLDER.parent).as_posix())
    if arguments.check:
        wrong += uncommitted()
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
