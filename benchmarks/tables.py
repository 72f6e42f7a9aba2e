"""Make every table and figure of the pages from the records.

    python benchmarks/tables.py            rewrite what stands between markers
    python benchmarks/tables.py --check    list what is stale, and exit with 1

Pages are `README.md`, `notes/*.md`, and `faults.md` and `which-method.md` in `../docs`; records are
`results/*.jsonl`, those of the paper `results/paper.jsonl`. Markers of a table stand on separate
lines, those of a figure within a line:

    <!-- table NAME --> <!-- end -->
    ... better by <!-- figure NAME -->0.05 ± 0.01<!-- end --> nats ...

A table without markers is frozen: "Frozen:" and the commit that has its records follow the line on
its records.
"""

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

# So that it runs where nothing is installed.
sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import pivot  # noqa: E402
from benchmarks.pivot import (  # noqa: E402
    ALL,
    Cell,
    Pick,
    Record,
    Table,
    View,
    each,
    every,
    found,
    gain,
    join,
    mean,
    mean_error,
    minus,
    number,
    short,
    stat,
    value_error,
    versus,
)

import verdict  # noqa: E402

FOLDER = Path(__file__).parent
ENSEMBLE, OURS, SGHMC = "deep ensemble", "psmile", "scale_adapted_sghmc"


def of(method: str, best: str = "", source: str = "", **where: Any) -> Pick:
    """Records of a method."""
    return Pick({"method": method, **where}, source, best)


# UCI regression by the protocol *joint*, with no option: fields that most cells lack.
JOINT: Record = dict.fromkeys(("seed", "batches_per_pass", "replacement", "gap"))
JOINT |= {"protocol": "joint", "num_chains": 10, "num_gradients": 60_000}
DATA = ("energy", "airfoil", "bikesharing", "concrete", "yacht", "kin8nm", "power")
# Logarithms of the standard deviations of the targets, which networks see divided by them.
SCALES = {"energy": 10.0836, "concrete": 16.6976, "yacht": 15.1359, "kin8nm": 0.26359}
SCALES = {name: math.log(scale) for name, scale in (SCALES | {"power": 17.0661}).items()}
# Negative log likelihoods that others published for ensembles of ten networks, and the best log
# likelihoods on gap splits that we know of.
PUBLISHED = {"energy": 0.61, "concrete": 3.20, "yacht": 0.73, "kin8nm": -1.17, "power": 3.18}
PUBLISHED_GAPS = {"energy": -7.9, "concrete": -3.30, "yacht": -1.58}
# Each method at the best of its step sizes that ran on most splits.
BEST = Pick(best="step_size")
OURS_BEST, SGHMC_BEST = of(OURS, "step_size"), of(SGHMC, "step_size")


def scored(pick: Pick) -> Cell:
    """LPPD, with the step size that was chosen."""
    step = stat("step_size", lambda sizes: f" ({short(sizes[0])})", "", pick)
    return join(mean("lppd", pick=pick), step)


def ahead(view: View, method: str) -> str:
    """`psmile` minus a method, paired by split."""
    gaps = view.gaps("lppd", of(method, "step_size"), OURS_BEST, "split")
    return mean_error(gaps, sign="+") + " (1 split)" * (len(gaps) == 1)


def wins(view: View, against: str, sign: int = 1) -> str:
    """On how many data sets `psmile` is above a method, or below it."""
    pairs = ([of(x, "step_size", data=data) for x in (against, OURS)] for data in DATA)
    known = [fmean(gaps) for pair in pairs if (gaps := view.gaps("lppd", *pair, "split"))]
    return f"{sum(sign * gap > 0 for gap in known)} of {len(known)}"


def lost(view: View, pick: Pick) -> str:
    """Single chains that score below a constant prediction."""
    return f"{sum(view.values('num_lost', pick))} of {10 * len(view.records(pick))}"


def in_units(sign: int, pick: Pick) -> Cell:
    """LPPD in the units of the targets, or minus it."""
    return mean(lambda r: sign * (r["lppd"] - SCALES[r["cell"]["data"]]), pick=pick)


# Networks on images and text, and the ladder of sizes.
NAMES = {"lenet": "LeNet", "resnet7": "ResNet-7", "resnet18": "ResNet-18", "vit": "ViT"}
NAMES["nanogpt"] = "GPT"
SCORES = {"LPPD": "lppd", "accuracy": "accuracy", "ECE": "ece", "AUROC, foreign": "ood_auroc"}
VARIANTS = {"": "", "allowed": ", around the start", "angle temperature": ", cold"}
BASE = of(ENSEMBLE, options={})
NETWORKS = found("task", "form", "method", "options", task=NAMES)
ON_LADDER = ("N(0, 1)", "fan in", "around the start", "cold", "training on")
SEEN = {"LPPD": 4, "accuracy": 4, "single": 3, "loss": 3, "norm": 0, "distance": 1, "R-hat": 2}


def varied(options: Mapping[str, Any]) -> str:
    """Names of the options of a cell."""
    return " ".join(sorted(options))


def variant(view: View) -> str:
    """A method and, for `psmile`, what it samples."""
    return view.first("method") + VARIANTS[varied(view.first("options"))]


def listed(view: View) -> str:
    """Options of a cell."""
    options = sorted(view.first("options").items())
    return ", ".join(f"{name} {short(x) if isinstance(x, float) else x}" for name, x in options)


def named(view: View) -> str:
    """Name of a network, with what differs from its form."""
    return ", ".join([NAMES[view.first("task")], *view.first("form").split()[1:]])


def at_end(view: View, name: str, digits: int) -> str:
    """What was seen at the longest budget of a run of the ladder."""
    record = view.records()[0]
    seen = record[max(filter(str.isdigit, record), key=int)]
    value = {key.lower(): x for key, x in seen.items()}[name.lower().replace("-", "_")]
    return "n/a" if math.isnan(value) else number(value, f".{digits}f")


def above(budget: str, angle: float) -> Cell:
    """LPPD above the ensemble of the starts."""
    gains = lambda r: r[budget]["lppd"] - r["ensemble"]["lppd"] if budget in r else None  # noqa: E731
    return mean(gains, 3, "+", pick=Pick({"angle": angle}))


# Draws against NUTS, and known posteriors.
# Fewer independent draws than these do not show whether a bound is met.
ENOUGH_DRAWS = 100
BOUNDS = {"mean": 0.1, "sd": 0.1, "w1": 0.12}
NOISES = ("isotropic", "diagonal", "correlated", "varied")
TARGETS = ("gaussian", "rosenbrock", "funnel")
PLACES = each(target=TARGETS, noise=NOISES)
LEAPFROG, LENGTH = "psmile_naive leapfrog", "psmile_naive leapfrog L=10"
SEARCHED = ("smile_naive", "sgld", "sghmc", "psmile_naive", LEAPFROG, LENGTH)
OTHERS = {LEAPFROG: "psmile_naive", LENGTH: "psmile_naive, L = 10"}
OTHERS |= {"smile_naive leapfrog": "smile_naive", "psgld": "psgld", SGHMC: "scale-adapted SGHMC"}
OTHERS["cyclical_sgld"] = "cyclical SGLD"
LONG, SHORT = {"gradients": 1_000_000}, {"gradients": 200_000}


def within(record: Record) -> str:
    """Whether the largest net errors are small; few draws cannot show it."""
    if record["smallest_ess"] < ENOUGH_DRAWS:
        return "too few draws"
    is_met = all(record[f"{name} max"]["net"] <= BOUNDS[name] for name in ("mean", "sd"))
    return "yes" if is_met else "no"


def agreement(view: View, data: str, share: int) -> str:
    """Median errors of mean, deviation and W1 over the test inputs, and the ESS."""
    starts = view.values("starts.*", Pick({"data": data, "share": share}))
    if not starts:
        return ""
    net = [fmean(start[f"{name} median"]["net"] for start in starts) for name in BOUNDS]
    ess = fmean(start["ess"] for start in starts)
    is_met = all(x <= bound for x, bound in zip(net, BOUNDS.values(), strict=True))
    shown = f"{', '.join(number(x, '.2f') for x in net)} ({ess:,.0f})"
    return f"**{shown}**" if is_met and ess >= ENOUGH_DRAWS else shown


def shift(record: Record) -> float:
    """Largest mean rank in standard errors, which sees a shift that chi^2 over 20 bins does not."""
    scale = math.sqrt(12 * sum(record["counts"][0]))
    return max(((rank - 0.5) * scale for rank in record["mean_rank"]), key=abs)


def bias(sampler: str, kind: str = "gaussian", part: str = "mixing", step=False, **of: Any) -> Cell:
    """Bias ± error, of chains that mix or, without `part`, of all."""

    def cell(view: View) -> str:
        records = view.records(Pick({"sampler": sampler, "kind": kind, **of}))
        if not records or (record := records[0][part] if part else records[0]) is None:
            return "none" * len(records)
        size = f" ({short(record['step_size'])})" if step and record["step_size"] else ""
        return value_error(record["bias"], record["error"]) + size

    return cell


def in_paper(sampler: str = "psmile_naive", kind: str = "gaussian", **of: Any) -> Cell:
    """The paper's bias."""
    pick = Pick({"quantity": "b2", "sampler": sampler, "kind": kind, **of}, "paper")
    return lambda view: "".join(value_error(r["value"], r["error"]) for r in view.records(pick))


def tally(view: View, is_so: Callable[..., bool]) -> str:
    """In how many places something is so of the biases of `psmile`, its searched forms, the paper.

    Each has a value and an error; a form that does not mix is None.
    """
    count = 0
    for place, _ in PLACES([]):
        where = place | {"kind": "gaussian"}
        ours, *forms = (
            view.records(Pick(where | {"sampler": x} | LONG))[0]["mixing"]
            for x in (OURS, LEAPFROG, LENGTH)
        )
        paper = view.records(Pick(where | {"quantity": "b2", "sampler": "psmile_naive"}, "paper"))
        best = min(filter(None, forms), key=lambda r: r["bias"])
        count += is_so(ours, best, {"bias": paper[0]["value"], "error": paper[0]["error"]})
    return f"{count} of {len(PLACES([]))}"


def is_above(first: Record, second: Record) -> bool:
    """By more than two standard errors."""
    return first["bias"] - second["bias"] > 2 * math.hypot(first["error"], second["error"])


def noise_bound(view: View) -> float:
    """Allowed b^2 of `psmile`: at least twice that of `smile`."""
    least = 0.003 if "isotropic" in view.first("case") else 0.01
    return max(least, 2 * view.values("b2", of("smile"))[0])


def noise_missed(view: View) -> bool:
    """Whether it is exceeded."""
    return view.values("b2", of(OURS))[0] > noise_bound(view)


def noise_met(view: View) -> str:
    """How many cases are within their bounds."""
    cases = [View(view.files, {}, {"case": case}) for case in dict.fromkeys(view.values("case"))]
    return f"{len(cases) - sum(map(noise_missed, cases))} of {len(cases)}"


# Costs, and other people's loops.
USUAL = {"part": "update", "leaves": 20, "chains": 1, "grads": "float32"}
LARGE = USUAL | {"parameters": 10**7}
STEPS = ("adamw", "sgd", "blackjax sgld", "sgld", "smile_naive", "smile", "psmile_naive", OURS)
DETAILS = {"time / AdamW": "ratio", "ms": "ms", "arrays moved": "traffic"}
DETAILS |= {"temporary": "temporary", "peak": "peak", "compilation, s": "compile_s"}
RUNS = ("runs, sane", "runs, flagged")
VERDICTS = (*RUNS, "refused, with advice", "failed", "wrong without a word")


def step_name(view: View) -> str:
    """What a cell of costs measures."""
    cell = view.records()[0]["cell"]
    chains = f", {cell['chains']} chains" if cell["chains"] > 1 else ""
    if cell["part"] == "network":
        loop = ", Python loop" if "per_program" in cell else ""
        return f"whole step, {cell['network']}{chains}{loop}"
    count = cell["leaves"]
    leaves = "" if count == 20 else f", {count} {'leaf' if count == 1 else 'leaves'}"
    kind = "" if cell["grads"] == "float32" else f", {cell['grads']}"
    return f"update, 10^{len(str(cell['parameters'])) - 1} parameters{leaves}{kind}{chains}"


def ratios(title: str, field: str, names: Sequence[str] = STEPS) -> list[tuple]:
    """Columns in units of AdamW."""
    return [(title, step_name), *((x, f"{{methods.{x}.{field}:.2f}}") for x in names)]


def detail(field: str) -> list[Cell]:
    """A line for each method: three digits, and no more than three after the point."""
    shown = lambda values: f"{round(values[0], 3):.3g}"  # noqa: E731
    return [stat(f"methods.{name}.{field}", shown, "") for name in STEPS]


def changed(view: View) -> str:
    """A line as it was, and as it is now."""
    return " → ".join(f"`{part}`" for part in view.first("line").split(" -> "))


def verdicts(view: View) -> tuple[int, int]:
    """Loops that have one of the verdicts of the row, and all."""
    named = view.scope.get("verdict", RUNS)
    every = view.values("verdict", Pick({"verdict": VERDICTS}))
    return sum(x in named for x in every), len(every)


# Which method, and which candidate.
SHOWN = (ENSEMBLE, "checkpoints", OURS, "psmile, cold")
PROBLEMS = {
    "digits": "digits, d / N = 4.5, 4,000 gradients",
    "energy": "energy, d / N = 1.3, 10,000 gradients",
    "airfoil": "airfoil, d / N = 0.63, 10,000 gradients",
}
LENET = {"task": "lenet", "form": "small", "source": "networks"}
COLD = {"temperature": "auto", "angle": 0.3}
CANDIDATES = (OURS, "psmile, cold", "psmile, long steps", "psmile, around the start", "optimizer")
SIZED = ("energy", "digits", "2,000 images", "54,000 images", "LeNet")
FEW = (1, 2, 4, 8, 16)
LEVEL = 0.9


def compared(view: View, problem: str) -> list[Any]:
    """Results of `compare.py` on a problem: methods by seed."""
    records = view.records(Pick({"problem": problem, "smoke": None}))
    return [r["methods"] for r in sorted(records, key=lambda r: r["cell"]["seed"])]


def best_of_others(view: View, problem: str) -> str:
    """The best method that has no column."""
    rows, others = compared(view, problem), {}
    for name in (rows or [{}])[0]:
        if name not in (*SHOWN, verdict.CHOOSER) and (lppd := verdict.column(rows, name, "lppd")):
            others[name] = lppd
    best = max(others, key=lambda name: fmean(others[name]), default=None)
    return f"{best}: {mean_error(others[best])}" if best else ""


def all_methods(problem: str) -> Callable[..., str]:
    """The table of `compare.py`, whose columns depend on the problem."""

    def made(files: Mapping[str, Sequence[Record]]) -> str:
        view = View({"which_method": files.get("which_method", [])}, {}, {})
        rows = compared(view, problem)
        if not rows:
            return pivot.NO_RECORD
        return pivot.markdown(*verdict.cells(rows), [*view.used.values()])

    return made


def short_line(problem: str) -> list[Cell]:
    """Our four methods, and the best of the others."""
    pick = Pick({"problem": problem, "smoke": None})
    cells = (mean(f"methods.{name}.lppd", pick=pick) for name in SHOWN)
    return [PROBLEMS[problem], *cells, lambda view: best_of_others(view, problem)]


SHORT_LINES = [short_line(problem) for problem in PROBLEMS]
SHORT_LINES.append(
    [
        "LeNet, d / N = 1.1, 12,000 gradients",
        mean("lppd", pick=of(ENSEMBLE, options={}, **LENET)),
        mean("lppd", pick=of("checkpoints", options={"learning_rate": 0.002}, **LENET)),
        mean("lppd", pick=of(OURS, options={}, **LENET)),
        mean("lppd", pick=of(OURS, options=COLD, **LENET)),
        "",
    ]
)


def candidate(view: View, name: str) -> str:
    """Its test LPPD, bold if `select` chose it."""
    shown = number(view.first("lppd", of(name)))
    return f"**{shown}**" if name == view.first("chosen", of("select")) else shown or "–"


def regret(view: View) -> str:
    """The best candidate minus the chosen one."""
    alone = {name: view.first("lppd", of(name)) for name in CANDIDATES}
    mine = alone.get(view.first("chosen", of("select")))
    return "" if mine is None else number(max(filter(None, alone.values())) - mine)


def intervals(name: str) -> list[Cell]:
    """Splits, coverage over all of them, what is allowed, whether it is met, and sizes."""
    at, low = f"methods.{name}", LEVEL - 0.01
    # The splits of a seed share their rows.
    by_seed = {x: lambda r, x=x: fmean(r["methods"][name][x]) for x in ("coverage", "size")}
    high = lambda view: LEVEL + 0.01 + fmean(view.values(f"{at}.slack.*"))  # noqa: E731
    is_met = lambda view: low <= fmean(view.values(f"{at}.coverage.*")) <= high(view)  # noqa: E731
    return [
        name,
        stat(f"{at}.coverage.*", len, ""),
        mean(by_seed["coverage"], 4),
        lambda view: f"{low:.4f} to {high(view):.4f}",
        lambda view: "yes" if is_met(view) else "no",
        mean(by_seed["size"]),
        mean(f"{at}.own.coverage", 4),
    ]


def advice(view: View, problem: str) -> str:
    """The three sentences of `compare.py`."""
    rows = compared(view, problem)
    return " ".join(verdict.sentences(rows)) if rows else pivot.NO_RECORD


def ratio(name: str, digits: int) -> Cell:
    """Weights per example of a problem of `select`."""
    pick = Pick({"problem": name, "lppd": lambda x: x is not None}, "selection")
    return lambda view: number(fmean(view.values(D_N, pick)), f".{digits}f")


D_N = lambda r: r["num_parameters"] / r["num_data"]  # noqa: E731


def decision(case: str, size: Cell, advice: str, gained: Cell, what: str) -> list[Cell]:
    """A line of the page on methods."""
    return [case, size, advice, join(gained, what)]


def tabular(data: str) -> list[Cell]:
    """UCI data."""
    pair = (of(x, "step_size", "uci", data=data, **JOINT) for x in ("checkpoints", OURS))
    case = f"tabular data ({data}), thousands of passes over the data, 4,000 draws"
    rates = " psmile over checkpoints at their best rate"
    return decision(case, ratio(data, 1), OURS, gain("lppd", *pair, "split"), rates)


def few_images(name: str, advice: str) -> list[Cell]:
    """2,000 images."""
    pair = (of(x, "", "selection", problem="2,000 images", seed=0) for x in (ENSEMBLE, name))
    gained = gain("lppd", *pair)
    case, size = "2,000 images, a wide layer", ratio("2,000 images", 0)
    return decision(case, size, advice, gained, f" {name} over the deep ensemble")


ON_LENET = (of("checkpoints", "options", **LENET), of(OURS, options=COLD, **LENET))
FEW_LENET = Pick({"problem": "LeNet"}, "few_draws")
DECISIONS = [
    tabular("energy"),
    tabular("airfoil"),
    decision(
        "image network (LeNet), 14 passes over the data, 128 draws",
        "1.1",
        "cold psmile, or checkpoints",
        gain("lppd", *ON_LENET),
        " cold psmile over checkpoints at their best rate",
    ),
    few_images("psmile, around the start", "around the start, or the ensemble"),
    few_images(OURS, "not psmile"),
    decision(
        "at most 8 forward passes per prediction",
        "",
        "psmile, then `choose`",
        mean(minus("chosen.8", "all"), 3, "+", pick=FEW_LENET),
        ": 8 chosen draws, compared with all 72 (LeNet)",
    ),
]

QUICK = {"LPPD": "LPPD", "accuracy": "accuracy", "F1": "F1", "Brier": "Brier", "ECE": "ECE"}
QUICK |= {"AURC": "AURC", "entropy": "entropy, digits", "shuffled": "entropy, shuffled pixels"}
DIFFERENCE = "difference, paired"
TABLES: dict[str, Table | Callable[..., str]] = {
    "quickstart": Table(
        ("quickstart_seeds",),
        each(),
        [
            ("test, mean over seeds", ENSEMBLE, OURS, DIFFERENCE),
            *(versus(x, f"scores.{ENSEMBLE}.{name}", f"scores.{OURS}.{name}", 4) for name, x in QUICK.items()),
        ],
    ),
    "uci": Table(
        ("uci",),
        each(data=DATA),
        [
            ("data", "{data}"),
            (ENSEMBLE, scored(of(ENSEMBLE, "step_size"))),
            ("scale-adapted SGHMC", scored(SGHMC_BEST)),
            ("psmile_naive, fixed step", scored(of("psmile_naive", "step_size"))),
            ("**psmile**, its own step", scored(OURS_BEST)),
            ("psmile - SGHMC", gain("lppd", SGHMC_BEST, OURS_BEST, "split")),
            ("MILE, full batch", scored(of("mile", "step_size"))),
        ],
        JOINT,
    ),
    "uci-differences": Table(
        ("uci",),
        each(data=DATA),
        [
            ("psmile minus", "{data}"),
            *((x, lambda view, x=x: ahead(view, x)) for x in (SGHMC, "sgld", "cyclical_sgld", "checkpoints", "psmile_naive", "mile")),
        ],
        JOINT,
    ),
    "uci-mixing": Table(
        ("uci",),
        each(data=DATA, method=(OURS, "psmile_naive", SGHMC, "mile")),
        [
            ("data", "{data}"),
            ("method", "{method}"),
            ("within chains", mean("rhat_within", 2, error=False, pick=BEST)),
            ("across chains", mean("rhat_across", 2, error=False, pick=BEST)),
            ("chains lost", lambda view: lost(view, BEST)),
            (
                "sigma, first to last draw",
                join(*(mean(f"sigma.{i}", error=False, pick=BEST) for i in (0, -1)), sep=" ... "),
            ),
        ],
        JOINT,
    ),
    "uci-few-chains": Table(
        ("uci",),
        each(method=(ENSEMBLE, OURS, "psmile_naive", "mile")),
        [
            ("bike sharing, 3 chains", "{method}"),
            ("LPPD", scored(BEST)),
            ("minus psmile", gain("lppd", OURS_BEST, BEST, "split")),
        ],
        JOINT | {"num_chains": 3, "data": "bikesharing"},
    ),
    "uci-published": Table(
        ("uci",),
        each(data=PUBLISHED),
        [
            ("NLL", "{data}"),
            ("published, ten networks", lambda view: f"{PUBLISHED[view.scope['data']]:.2f}"),
            ("our ten networks", in_units(-1, of(ENSEMBLE))),
            ("psmile", in_units(-1, of(OURS))),
        ],
        JOINT,
    ),
    "uci-gaps": Table(
        ("uci",),
        each(data=PUBLISHED_GAPS),
        [
            ("log likelihood", "{data}"),
            ("splits", stat("lppd", len, "d", OURS_BEST)),
            ("best published", lambda view: f"{PUBLISHED_GAPS[view.scope['data']]:.2f}"),
            *((x, in_units(1, of(x, "step_size"))) for x in (ENSEMBLE, "checkpoints", OURS)),
        ],
        JOINT | {"gap": True},
    ),
    "scale": Table(
        ("networks",),
        NETWORKS,
        [
            ("network", named),
            ("method", variant),
            (ENSEMBLE, mean("lppd", 4, pick=BASE)),
            ("LPPD", mean("lppd", 4)),
            *((f"{name}, gain", gain(x, BASE, digits=4)) for name, x in SCORES.items()),
            ("seeds", stat("lppd", len, "d")),
        ],
        {
            "form": "small",
            "method": lambda x: x != ENSEMBLE,
            "options": lambda x: varied(x) in VARIANTS,
        },
    ),
    "scale-cells": Table(
        ("networks",),
        NETWORKS,
        [
            ("network", named),
            ("method", "{method}"),
            ("options", listed),
            *((name, mean(x, 4)) for name, x in SCORES.items()),
            ("one chain", mean("single.lppd", 4, error=False)),
            (
                "seconds",
                lambda view: number(fmean(of) if (of := view.values("chains.*.seconds.1")) else "resumed", ".0f"),
            ),
            ("MiB", stat("chains.*.peak_mib", max, ".0f")),
        ],
        {"form": lambda x: x.split()[0] == "small"},
    ),
    "scale-corruptions": Table(
        ("corruptions",),
        NETWORKS,
        [
            ("network", named),
            ("form", "{form}"),
            ("method", variant),
            *(
                column
                for s in (1, 3, 5)
                for column in (
                    (f"severity {s}", mean(f"severities.{s}.lppd", 4)),
                    ("gain", gain(f"severities.{s}.lppd", BASE, digits=4)),
                )
            ),
        ],
    ),
    "ladder": Table(
        ("ladder",),
        found("size", "prior", size=("1e4", "1e5", "1e6", "1e7"), prior=ON_LADDER),
        [
            ("weights", stat("num_parameters", lambda x: pivot.thousands(x[0]), "")),
            ("d / N", stat(D_N, fmean, ".2f")),
            ("prior", "{prior}"),
            *((f"angle {x}", join(above("3000", x), above("12000", x), sep=" / ")) for x in (0.003, 0.01, 0.03, 0.1, 0.3)),
        ],
    ),
    "ladder-cells": Table(
        ("ladder",),
        every("size", "prior"),
        [
            ("weights", "{size}"),
            ("prior", "{prior}"),
            ("angle", "{angle}"),
            ("gradients", "{num_gradients:,}"),
            ("precision", stat("precision", lambda x: short(x[0]) if x[0] else "", "")),
            *((x, lambda view, x=x, n=n: at_end(view, x, n)) for x, n in SEEN.items()),
        ],
    ),
    "posteriors": Table(
        ("agreement",),
        every(),
        [
            ("posterior", "{data}"),
            ("sampler", "{method}"),
            *((h, f"{{{x} max.{k}:.3f}}") for x in ("mean", "sd") for h, k in ((x, "raw"), ("net", "net"))),
            ("smallest ESS", "{smallest_ess:,.0f}"),
            ("within 0.1", stat(within, lambda x: x[0], "")),
        ],
        {"part": "posteriors"},
    ),
    "nuts-networks": Table(
        ("agreement",),
        found("method"),
        [
            ("mean, sd, W1 (ESS)", "{method}"),
            *(
                (f"{x}, N/{n}".removesuffix("/1"), lambda view, x=x, n=n: agreement(view, x, n))
                for x in ("energy", "moons")
                for n in (1, 2, 8, 32)
            ),
        ],
        {"part": "networks"},
    ),
    "nuts-references": Table(
        ("agreement",),
        found("data", "part"),
        [
            ("reference", "{data} ({part})"),
            ("largest R-hat", stat("reference.rhat.*", max, ".3f", Pick(last="data"))),
            ("smallest ESS", stat("reference.ess.*", min, ",.0f", Pick(last="data"))),
        ],
        {"part": ("posteriors", "networks")},
    ),
    "calibration": Table(
        ("agreement",),
        every(),
        [
            ("model", "{data}"),
            ("sampler", "{method}"),
            ("data sets", stat("counts.0.*", sum, "")),
            ("smallest p", stat("p.*", min, ".2g")),
            ("of", stat("p.*", len, "")),
            ("largest shift, s.e.", stat(shift, max, ".1f")),
            ("variance / uniform", stat("variance_ratio.*", lambda of: max(of, key=lambda x: abs(x - 1)), ".2f")),
            ("lost", "{num_lost}"),
            ("uniform", stat(lambda r: "yes" if r["is_uniform"] else "no", max, "")),
        ],
        {"part": "calibration"},
    ),
    "bias": Table(
        ("analytic", "paper"),
        each(noise=NOISES),
        [
            ("noise: psmile / paper's pSMILE-naive, best step", "{noise}"),
            *(
                column
                for x in TARGETS
                for column in ((x, bias(OURS, target=x)), ("paper", in_paper(target=x)))
            ),
        ],
        LONG,
    ),
    "bias-forms": Table(
        ("analytic", "paper"),
        PLACES,
        [
            ("target, noise", "{target}, {noise}"),
            ("**psmile**, nothing chosen", bias(OURS, step=True)),
            ("psmile_naive, best step", bias(LEAPFROG, step=True)),
            ("the same, L = 10", bias(LENGTH, step=True)),
            ("paper: pSMILE-naive, best step", in_paper()),
        ],
        LONG,
    ),
    "bias-smallest": Table(
        ("analytic", "paper"),
        PLACES,
        [
            ("target, noise", "{target}, {noise}", "paper"),
            *((name, bias(name, part=""), in_paper(name)) for name in SEARCHED),
        ],
        LONG,
    ),
    "bias-others": Table(
        ("analytic",),
        PLACES,
        [("target, noise", "{target}, {noise}"), *((x, bias(name)) for name, x in OTHERS.items())],
        SHORT,
    ),
    "bias-heavy-tails": Table(
        ("analytic", "paper"),
        PLACES,
        [
            ("target, noise", "{target}, {noise}"),
            *(
                column
                for x in ("gaussian", "laplace", "student")
                for column in ((x.capitalize(), bias(LEAPFROG, x)), ("paper", in_paper(kind=x)))
            ),
        ],
        SHORT,
    ),
    "bias-skewed": Table(
        ("analytic",),
        each(),
        [
            ("sigma", "b^2", "best step size"),
            *(
                (x, "{bias:.3f} ± {error:.3f}", "{step_size:.2g}")
                for x in ("0.01", "0.03", "0.1", "0.3", "1.0")
            ),
        ],
    ),
    "small-noise": Table(
        ("small_noise",),
        found("case"),
        [
            ("noise of the gradients", lambda view: view.first("case").replace("|", "abs ", 1).replace("|", "")),
            *((h, stat(x, max, f".{n}f", of(m))) for m in ("smile", OURS) for h, x, n in ((f"{m}: b^2", "b2", 4), ("worst variance", "worst", 2))),
            ("Monte Carlo b^2", stat("monte_carlo_b2", max, ".4f", of(OURS))),
            ("bound", lambda view: number(noise_bound(view), ".4f") + " (missed)" * noise_missed(view)),
        ],
    ),
    "step-cost": Table(
        ("step_cost",),
        every(),
        ratios("time / AdamW", "ratio", ("sgd", "sgld", "smile_naive", "smile", "psmile_naive", OURS)),
        {"chains": 1, "parameters": (None, 1_000, 10**7), "leaves": (None, 20), "grads": (None, "float32")},
    ),
    "step-cost-all": Table(("step_cost",), every(), ratios("time / AdamW", "ratio")),
    "step-details": Table(
        ("step_cost",),
        every(),
        [
            ("update, 10^7 parameters, 20 leaves", *STEPS),
            *((name, *detail(field)) for name, field in DETAILS.items()),
        ],
        LARGE,
    ),
    "compilation": Table(("step_cost",), every(), ratios("compilation / AdamW", "compile_ratio")),
    "faults": Table(
        ("faults",),
        found("campaign"),
        [
            ("campaign", "{campaign}"),
            *((x, stat(x, sum, ",", Pick(last="of"))) for x in ("cases", "silent", "raw", "lost")),
            ("date", stat("date", lambda x: ", ".join(sorted({*x})), "", Pick(last="of"))),
            ("command", stat("command", lambda x: ", ".join(dict.fromkeys(f"`{c}`" for c in x)), "", Pick(last="of"))),
        ],
    ),
    "public-loops": Table(
        ("public_loops",),
        each(verdict=[(x,) for x in VERDICTS]),
        [
            ("verdict", lambda view: view.scope["verdict"][0]),
            ("loops", lambda view: f"{verdicts(view)[0]}"),
            ("share", lambda view: "{:.0%}".format(verdicts(view)[0] / verdicts(view)[1])),
        ],
        {"kind": "loop"},
    ),
    "public-loops-all": Table(
        ("public_loops",),
        every(),
        [
            ("loop", "{repository}, {path}"),
            ("version", "{version}"),
            ("changed line", changed),
            ("verdict", "{verdict}"),
            ("what was seen", "{note}"),
        ],
        {"kind": "loop"},
    ),
    "public-loops-fits": Table(
        ("public_loops",),
        every(),
        [
            ("loop", "{repository}, {path}"),
            ("version", "{version}"),
            ("changed line", changed),
            ("worst mean", stat("mean_off.*.*", lambda of: max(map(abs, of)), ".2f")),
            ("sd", join(stat("sd_ratio.*.*", min, ".2f"), " to ", stat("sd_ratio.*.*", max, ".2f"))),
            ("verdict", "{verdict}"),
            ("what was seen", "{note}"),
        ],
        {"kind": "recorded"},
    ),
    "temperature": Table(
        ("calibration",),
        each(),
        [
            ("quickstart, mean over seeds", ENSEMBLE, OURS, DIFFERENCE),
            (
                "temperature",
                *(mean(lambda r, x=x: fmean(r["methods"][x]["temperature"])) for x in (ENSEMBLE, OURS)),
                "",
            ),
            *(
                versus(f"{score}, {when}", *(f"methods.{x}.{when}.{score}" for x in (ENSEMBLE, OURS)), 4, True)
                for score in ("ECE", "LPPD")
                for when in ("before", "after")
            ),
        ],
        {"data": "digits"},
    ),
    "conformal": Table(
        ("calibration",),
        each(data=("digits", "energy")),
        [
            ("data", "{data}", "{data}"),
            *zip(
                ("predictions", "splits", f"coverage of {LEVEL:.0%}", "allowed", "met", "classes or width", "own interval's coverage"),
                intervals(ENSEMBLE),
                intervals(OURS),
                strict=True,
            ),
        ],
    ),
    "few-draws": Table(
        ("few_draws",),
        each(problem=SIZED),
        [
            ("test LPPD", *["{problem}"] * 4),
            ("draws", "`choose`", "evenly spaced", DIFFERENCE, "`choose` - all, paired"),
            *(
                (
                    *versus(f"k = {k}", f"chosen.{k}", f"evenly.{k}", 3, True)[:3],
                    mean(minus(f"chosen.{k}", f"evenly.{k}"), 3, "+"),
                    mean(minus(f"chosen.{k}", "all"), 3, "+"),
                )
                for k in FEW
            ),
            ("all", *[join(mean("all"), " ({num_draws:,})")] * 2, "", ""),
        ],
    ),
    "few-draws-optimism": Table(
        ("few_draws",),
        each(problem=SIZED),
        [
            ("data", "{problem}"),
            ("validation examples", "{num_validation:,}"),
            ("draws", "{num_draws:,}"),
            ("on validation data", mean(minus("validation.15", "validation_all"), 3, "+")),
            ("on test data", mean(minus("chosen.16", "all"), 3, "+")),
        ],
    ),
    "selection": Table(
        ("selection",),
        found("problem", "seed"),
        [
            ("problem, seed", "{problem}, {seed}"),
            ("d / N", stat(D_N, fmean, ".2g", of("select"))),
            (ENSEMBLE, stat("lppd", fmean, ".3f", of(ENSEMBLE))),
            *((x, lambda view, x=x: candidate(view, x)) for x in CANDIDATES),
            ("best - chosen", regret),
            ("cost", stat("cost", fmean, ".2f", of("select"))),
        ],
        {"method": "select"},
    ),
    "which-method-short": Table(
        ("which_method", "networks"),
        each(),
        [*zip(("problem", *SHOWN, "best of the others"), *SHORT_LINES, strict=True)],
    ),
    "which-method": Table(
        ("uci", "networks", "selection", "few_draws"),
        each(),
        [
            *zip(("your case", "d / N", "try first", "gain in test LPPD, nats"), *DECISIONS, strict=True)
        ],
    ),
    **{f"which-method {problem}": all_methods(problem) for problem in PROBLEMS},
}


def quick_gain(score: str) -> Cell:
    """A score of the quickstart above the deep ensemble's."""
    return mean(minus(f"scores.{OURS}.{score}", f"scores.{ENSEMBLE}.{score}"), 4, "+")


def tempered(score: str) -> Cell:
    """The same after the best temperature."""
    names = (f"methods.{x}.after.{score}" for x in (OURS, ENSEMBLE))
    return mean(minus(*names), 4, "+", pick=Pick({"data": "digits"}))


def step_of(where: Record, spec: str = ".2f", method: str = OURS) -> Cell:
    """Time in units of AdamW's."""
    return stat(f"methods.{method}.ratio", lambda of: number(of[0], spec), "", Pick(where))


def met(view: View) -> str:
    """How many posteriors are within the bounds."""
    verdicts = view.values(within, Pick({"part": "posteriors"}))
    return f"{verdicts.count('yes')} of {len(verdicts)}"


ONE_CHAIN = {"part": "network", "chains": 1}
FIGURES: dict[str, tuple] = {
    "quickstart LPPD": ("quickstart_seeds", quick_gain("LPPD")),
    "quickstart ECE": ("quickstart_seeds", quick_gain("ECE")),
    "LPPD after temperature": ("calibration", tempered("LPPD")),
    "ECE after temperature": ("calibration", tempered("ECE")),
    "uci wins, scale_adapted_sghmc": ("uci", lambda view: wins(view, SGHMC), JOINT),
    "uci losses, psmile_naive": ("uci", lambda view: wins(view, "psmile_naive", -1), JOINT),
    "yacht lost": ("uci", lambda view: lost(view, of(OURS, data="yacht")), JOINT),
    "posteriors met": ("agreement", met),
    "bias competitive": (
        "analytic paper",
        lambda view: tally(view, lambda ours, best, paper: not is_above(ours, best)),
    ),
    "bias behind paper": (
        "analytic paper",
        lambda view: tally(view, lambda ours, best, paper: is_above(ours, paper)),
    ),
    "small noise met": ("small_noise", noise_met),
    "public loops run": ("public_loops", lambda view: "{} of {}".format(*verdicts(view))),
    "public repositories": ("public_loops", stat("repository", lambda of: len({*of}), "")),
    "step lenet, psmile": ("step_cost", step_of(ONE_CHAIN | {"network": "lenet"})),
    "step gpt, psmile": ("step_cost", step_of(ONE_CHAIN | {"network": "gpt"})),
    "update psmile": ("step_cost", step_of(LARGE, ".1f")),
    "update smile": ("step_cost", step_of(LARGE, ".1f", "smile")),
    **{
        f"which-method {problem}": ("which_method", lambda view, x=problem: advice(view, x))
        for problem in PROBLEMS
    },
}


# Pages.

MARKED = re.compile(r"<!-- (table|figure) ([^>]*?) -->(.*?)<!-- end -->", re.DOTALL)
OPENED = re.compile(r"<!-- (?:table|figure) ([^>]*?) -->")
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
BARE = re.compile(r"(?:^ *\|.*\n)+(?!\n\*\d+ records? · .*\* Frozen: .*\bcommit [0-9a-f]{7}\b)", re.MULTILINE)


@cache
def records_of(name: str) -> list[Record]:
    """Records of a file; none if it is not there."""
    return pivot.read(FOLDER / "results" / f"{name}.jsonl")


class _Files(dict):
    """All files of records, read when they are asked for."""

    def get(self, name: str, default: Any = None) -> list[Record]:
        return records_of(name)


def shown(name: str, files: Mapping[str, Sequence[Record]]) -> str:
    """A table made from some records."""
    table = TABLES[name]
    return pivot.block(table, files) if isinstance(table, Table) else table(files)


def made(kind: str, name: str) -> str | None:
    """The content between the markers; None if there is no such table or figure."""
    if name not in (TABLES if kind == "table" else FIGURES):
        return None
    if kind == "table":
        return f"\n{shown(name, _Files())} "
    files, cell, *where = FIGURES[name]
    view = View({x: records_of(x) for x in files.split()}, where[0] if where else {}, {})
    return pivot.text(cell, view)


def rewritten(text: str) -> str:
    """A page with the content of all known markers replaced."""

    def replace(found: re.Match[str]) -> str:
        kind, name, content = found.groups()
        if OPENED.search(content) or (new := made(kind, name)) is None:
            return found[0]
        return f"<!-- {kind} {name} -->{new}<!-- end -->"

    return MARKED.sub(replace, text)


def complaints(text: str, page: str) -> Iterator[str]:
    """Sentences that say what is wrong with a page."""
    for found in MARKED.finditer(text):
        kind, name, content = found.groups()
        inner = OPENED.search(content)
        if inner:
            yield f"{page}: the marker of {kind} `{name}` is not closed before `{inner[1]}` begins."
        elif (new := made(kind, name)) is None:
            yield f"{page}: there is no {kind} `{name}` in benchmarks/tables.py."
        elif content != new:
            yield f"{page}: {kind} `{name}` is stale; run `python benchmarks/tables.py`."
    rest = MARKED.sub("", text)
    yield from (f"{page}: the marker of `{name}` is not closed." for name in OPENED.findall(rest))
    if "<!-- end -->" in rest:
        yield f"{page}: an end marker closes nothing."
    for table in BARE.findall(CODE.sub("", rest)):
        yield f"{page}: a table is neither between markers nor frozen: `{table[:60]}`."


def uncommitted() -> Iterator[str]:
    """Sentences on records of uncommitted code."""
    for path in sorted((FOLDER / "results").glob("*.jsonl")):
        for number, record in enumerate(pivot.read(path), 1):
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
