"""Every table and figure of the pages, made from the records.

    python benchmarks/tables.py            rewrite what stands between markers
    python benchmarks/tables.py --check    say what is stale, and exit with 1

Pages are `README.md`, `notes/*.md`, and `faults.md` and `which-method.md` in `../docs`; records are
`results/*.jsonl`, those of the paper `results/paper.jsonl`.

Markers, a table on lines of its own, a figure within a line:

    <!-- table NAME --> <!-- end -->
    ... better by <!-- figure NAME -->0.05 ± 0.01<!-- end --> nats ...
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

# So that it runs where nothing is installed.
sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.tabulated import (  # noqa: E402
    agreement,
    analytic,
    before_sampler,
    calibration,
    costs,
    distil,
    estimators,
    faults,
    few_draws,
    lenet,
    llc,
    local,
    lora,
    networks,
    order,
    paper_protocol,
    public_loops,
    quickstart,
    selection,
    small_noise,
    starts,
    stopping,
    uci,
    which_method,
)
from benchmarks.tabulated.table import Record, Table, block, read  # noqa: E402

FOLDER = Path(__file__).parent
# Name: what makes it, and the files whose records it takes.
TABLES: dict[str, tuple[Callable[..., Table], tuple[str, ...]]] = {
    "quickstart": (quickstart.scores, ("quickstart_seeds",)),
    "uci": (uci.joint, ("uci",)),
    "uci-differences": (uci.differences, ("uci",)),
    "uci-mixing": (uci.mixing, ("uci",)),
    "uci-scales": (uci.scales, ("uci", "uci_before")),
    "uci-step-rules": (uci.step_rules, ("uci",)),
    "uci-batches": (uci.batches, ("uci",)),
    "order": (order.known, ("order",)),
    "uci-lengths": (uci.lengths, ("uci",)),
    "uci-few-chains": (uci.few_chains, ("uci",)),
    "uci-batch-wise": (paper_protocol.batch_wise, ("uci", "paper")),
    "uci-epoch-wise": (paper_protocol.epoch_wise, ("uci", "paper")),
    "uci-distributional": (paper_protocol.distributional, ("uci",)),
    "scale": (networks.gains, ("networks",)),
    "scale-cells": (networks.cells, ("networks",)),
    "scale-pairs": (networks.pairs, ("network_pairs",)),
    "scale-tiny": (networks.tiny, ("networks",)),
    "scale-corruptions": (networks.corruptions, ("corruptions",)),
    "scale-paper": (networks.paper, ("networks", "paper")),
    "selection": (selection.choices, ("selection",)),
    "ladder": (networks.ladder, ("ladder",)),
    "ladder-cells": (networks.ladder_cells, ("ladder",)),
    "networks-all": (lenet.cells, ("lenet_small",)),
    "angles": (lenet.angles, ("uci", "uci_before", "lenet_small")),
    "lora": (lora.scores, ("lora",)),
    "lora-all": (lora.cells, ("lora",)),
    "posteriors": (agreement.posteriors, ("agreement",)),
    "nuts-networks": (agreement.networks, ("agreement",)),
    "nuts-references": (agreement.references, ("agreement",)),
    "calibration": (agreement.calibration, ("agreement",)),
    "bias": (analytic.summary, ("analytic", "paper")),
    "bias-forms": (analytic.forms, ("analytic", "paper")),
    "bias-smallest": (analytic.smallest, ("analytic", "paper")),
    "bias-others": (analytic.others, ("analytic",)),
    "bias-heavy-tails": (analytic.heavy_tails, ("analytic", "paper")),
    "bias-skewed": (analytic.skewed, ("analytic",)),
    "rotations": (analytic.rotations, ("analytic_figures",)),
    "decoherence": (analytic.decoherence, ("analytic_figures",)),
    "small-noise": (small_noise.variances, ("small_noise",)),
    "starts": (starts.summary, ("starts",)),
    "starts-all": (starts.cells, ("starts",)),
    "step-cost": (costs.steps_summary, ("step_cost",)),
    "step-cost-all": (costs.steps, ("step_cost",)),
    "step-details": (costs.details, ("step_cost",)),
    "compilation": (costs.compilation, ("step_cost",)),
    "predictions": (costs.predictions, ("predict_cost",)),
    "loops": (costs.loops, ("loop_overhead",)),
    "faults": (faults.campaigns, ("faults",)),
    "before-sampler": (before_sampler.variances, ("before_sampler",)),
    "around-trained-weights": (local.around, ("local",)),
    "known-coefficients": (llc.known, ("llc",)),
    "coefficients-sgld": (llc.beside_sgld, ("llc",)),
    "transformer-coefficient": (llc.transformer, ("llc_transformer",)),
    "temperature": (calibration.temperatures, ("calibration",)),
    "conformal": (calibration.sets_and_intervals, ("calibration",)),
    "estimators": (estimators.scores, ("estimators",)),
    "public-loops": (public_loops.counts, ("public_loops",)),
    "public-loops-all": (public_loops.loops, ("public_loops",)),
    "public-loops-fits": (public_loops.fits, ("public_loops",)),
    "distil": (distil.scores, ("distil",)),
    "stopping": (stopping.saved, ("stopping",)),
    "few-draws": (few_draws.scores, ("few_draws",)),
    "few-draws-optimism": (few_draws.optimism, ("few_draws",)),
    "which-method": (
        which_method.decisions,
        ("uci", "networks", "selection", "few_draws"),
    ),
    **{
        f"which-method {problem}": (which_method.scores(problem), ("which_method",))
        for problem in ("digits", "energy", "airfoil")
    },
}
FIGURES: dict[str, tuple[Callable[..., str], tuple[str, ...]]] = {
    **{
        f"quickstart {x}": (quickstart.difference(x), ("quickstart_seeds",))
        for x in ("LPPD", "ECE")
    },
    "uci wins, scale_adapted_sghmc": (uci.wins("scale_adapted_sghmc"), ("uci",)),
    "uci losses, psmile_naive": (uci.wins("psmile_naive", is_loss=True), ("uci",)),
    "yacht lost": (uci.lost("yacht"), ("uci",)),
    **{
        f"paper's LeNet, {method}": (lenet.paper_gain(method), ("paper",))
        for method in ("scale_adapted_sghmc", "psmile_naive", "smile")
    },
    "lora LPPD": (lora.difference("psmile", "LPPD"), ("lora",)),
    "posteriors met": (agreement.posteriors_met, ("agreement",)),
    "bias competitive": (analytic.competitive, ("analytic",)),
    "bias behind paper": (analytic.behind, ("analytic", "paper")),
    "small noise met": (small_noise.met, ("small_noise",)),
    **{
        f"step {network}, psmile": (costs.whole_step(network, "psmile"), ("step_cost",))
        for network in ("lenet", "gpt")
    },
    "coefficients met": (llc.met("llc"), ("llc",)),
    "coefficients met, mean loss": (llc.met("plain"), ("llc",)),
    "coefficients met, sgld": (llc.sgld_met, ("llc",)),
    **{f"update {m}": (costs.update(m), ("step_cost",)) for m in ("smile", "psmile")},
    "ECE after temperature": (calibration.after("ECE"), ("calibration",)),
    "LPPD after temperature": (calibration.after("LPPD"), ("calibration",)),
    "estimators won": (estimators.won, ("estimators",)),
    "public loops run": (public_loops.run, ("public_loops",)),
    **{
        f"which-method {problem}": (which_method.advice(problem), ("which_method",))
        for problem in ("digits", "energy", "airfoil")
    },
    "public repositories": (public_loops.repositories, ("public_loops",)),
}
MARKED = re.compile(r"<!-- (table|figure) ([^>]*?) -->(.*?)<!-- end -->", re.DOTALL)
OPENED = re.compile(r"<!-- (?:table|figure) ([^>]*?) -->")
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


@cache
def records_of(name: str) -> list[Record]:
    """Records of a file; none if it is not there."""
    return read(FOLDER / "results" / f"{name}.jsonl")


def made(kind: str, name: str) -> str:
    """What belongs between the markers."""
    if kind == "table":
        build, files = TABLES[name]
        return f"\n{block(build(*map(records_of, files)))} "
    tell, files = FIGURES[name]
    return tell(*map(records_of, files))


def is_known(kind: str, name: str) -> bool:
    """Whether there is such a table or figure."""
    return name in (TABLES if kind == "table" else FIGURES)


def rewritten(text: str) -> str:
    """A page with all that is known between its markers made anew."""

    def replace(found: re.Match[str]) -> str:
        kind, name, _ = found.groups()
        if not is_known(kind, name) or OPENED.search(found[3]):
            return found[0]
        return f"<!-- {kind} {name} -->{made(kind, name)}<!-- end -->"

    return MARKED.sub(replace, text)


def complaints(text: str, told: str) -> Iterator[str]:
    """Sentences on what is wrong with a page, which is called `told` in them."""
    for found in MARKED.finditer(text):
        kind, name, content = found.groups()
        inner = OPENED.search(content)
        if inner:
            yield f"{told}: the marker of {kind} `{name}` is not closed before `{inner[1]}` begins."
        elif not is_known(kind, name):
            yield f"{told}: there is no {kind} `{name}` in benchmarks/tables.py."
        elif content != made(kind, name):
            yield f"{told}: {kind} `{name}` is stale; run `python benchmarks/tables.py`."
    rest = MARKED.sub("", text)
    yield from (f"{told}: the marker of `{name}` is not closed." for name in OPENED.findall(rest))
    if "<!-- end -->" in rest:
        yield f"{told}: an end marker closes nothing."
    tables = [line for line in CODE.sub("", rest).splitlines() if line.lstrip().startswith("|")]
    if tables:
        yield f"{told}: a table stands outside markers: `{tables[0][:60]}`."


def uncommitted() -> Iterator[str]:
    """Sentences on records of runs whose files were not those of a commit."""
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
    parser.add_argument("--check", action="store_true", help="change nothing, tell what is stale")
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
