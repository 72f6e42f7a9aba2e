"""Make every table and figure of the pages from the records.

    python benchmarks/tables.py            rewrite what stands between markers
    python benchmarks/tables.py --check    list what is stale, and exit with 1

Pages are `README.md`, `notes/*.md`, `faults.md`, `paper.md` and `which-method.md` in `../docs`, and
our paper, `../paper/paper.md`; records are `results/*.jsonl`, those of Sommer et al.
`results/paper.jsonl`.
Markers of a table stand on separate lines, those of a figure within a line:

    <!-- table NAME --> <!-- end -->
    ... better by <!-- figure NAME -->0.05 ± 0.01<!-- end --> nats ...

A table without markers is frozen: "Frozen:" and the commit that has its records follow the line on
its records.
"""

import argparse
import math
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

# So that it runs where nothing is installed.
sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import paper_rows, pivot  # noqa: E402
from benchmarks.pivot import (  # noqa: E402
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
    look,
    mean,
    mean_error,
    minus,
    number,
    plain,
    short,
    stat,
    under,
    value_error,
    versus,
)

import verdict  # noqa: E402

FOLDER = Path(__file__).parent
ENSEMBLE, OURS, SGHMC = "deep ensemble", "psmile", "scale_adapted_sghmc"
# Of all parts of a campaign.
LAST = Pick(last="of")
COUNTS = ("cases", "silent", "raw", "lost")
COMMAND = lambda record: f"`{record['command']}`"  # noqa: E731


def d_n(record: Record) -> float:
    """Weights per example."""
    return record["num_parameters"] / record["num_data"]


# UCI regression by the protocol *joint*, with no option: fields that most cells lack.
JOINT: Record = dict.fromkeys(("seed", "batches_per_pass", "replacement", "gap"))
JOINT |= {"protocol": "joint", "num_chains": 10, "num_gradients": 60_000}
DATA = ("energy", "airfoil", "bikesharing", "concrete", "yacht", "kin8nm", "power")
RIVALS = (SGHMC, "sgld", "cyclical_sgld", "checkpoints", "psmile_naive", "mile")
TABULAR = {"tabular": "mean and sigma", "tabular mean": "mean, one sigma"}
BEST = Pick(best="step_size")
SIGMA = [mean(f"sigma.{place}", error=False, pick=BEST) for place in (0, -1)]


def at_best(method: str, **where: Any) -> Pick:
    """Records of a method at the best of its step sizes that ran on most splits."""
    return BEST._replace(where={"method": method, **where})


def scored(title: str, method: str) -> tuple[str, Cell]:
    """A column of LPPD, with the step size that was chosen."""
    pick = at_best(method)
    step = stat("step_size", lambda sizes: f" ({short(sizes[0])})", "", pick)
    return title, join(mean("lppd", pick=pick), step)


def ahead(view: View, method: str) -> str:
    """`psmile` minus a method, paired by split."""
    gaps = view.gaps("lppd", at_best(method), at_best(OURS), "split")
    return mean_error(gaps, sign="+") + " (1 split)" * (len(gaps) == 1)


def wins(view: View, against: str, sign: int = 1) -> str:
    """On how many data sets `psmile` is two standard errors above a method, or below it."""
    pairs = [(at_best(against, data=data), at_best(OURS, data=data)) for data in DATA]
    gaps = [view.gaps("lppd", theirs, ours, "split") for theirs, ours in pairs]
    known = [of for of in gaps if len(of) > 1]
    clear = [of for of in known if sign * fmean(of) > 2 * stdev(of) / len(of) ** 0.5]
    return f"{len(clear)} of {len(known)}"


def lost(view: View, pick: Pick = BEST) -> str:
    """Single chains that score below a constant prediction."""
    return f"{sum(view.values('num_lost', pick))} of {10 * len(view.records(pick))}"


# Networks on images and text, and the ladder of sizes.
NAMES = {"lenet": "LeNet", "resnet7": "ResNet-7", "resnet18": "ResNet-18", "vit": "ViT"}
NAMES |= {"nanogpt": "GPT", "perceptron": "perceptron"}
SCORES = {"LPPD": "lppd", "accuracy": "accuracy", "ECE": "ece", "AUROC, foreign": "ood_auroc"}
VARIANTS = {"": "", "allowed": ", around the start", "angle temperature": ", cold"}
START = Pick({"method": ENSEMBLE, "options": {}})
NETWORKS = found("task", "form", "method", "options", task=NAMES)
ON_LADDER = ("N(0, 1)", "fan in", "around the start", "cold", "training on")
ANGLES = (0.003, 0.01, 0.03, 0.1, 0.3)
SEEN = {"LPPD": 4, "accuracy": 4, "single": 3, "loss": 3, "norm": 0, "distance": 1, "R-hat": 2}


def varied(options: Mapping[str, Any]) -> str:
    """Names of the options of a cell."""
    return " ".join(sorted(options))


def variant(view: View) -> str:
    """A method and, for `psmile`, what it samples."""
    return view.first("method") + VARIANTS[varied(view.first("options"))]


# Of the small form: the samplers and baselines at their usual settings.
SMALL = {"form": "small", "method": lambda x: x != ENSEMBLE}
SMALL["options"] = lambda x: varied(x) in VARIANTS


def listed(view: View) -> str:
    """Options of a cell."""
    options = sorted(view.first("options").items())
    return ", ".join(f"{name} {short(x) if isinstance(x, float) else x}" for name, x in options)


def named(view: View) -> str:
    """Name of a network, with what differs from its form."""
    return ", ".join([NAMES[view.first("task")], *view.first("form").split()[1:]])


def seconds(view: View) -> str:
    """Of one chain."""
    known = view.values("chains.*.seconds.1")
    return number(fmean(known), ".0f") if known else "resumed"


# Every method at the setting that validation data choose, and the same for its rivals.
TRAINED_ON = {"checkpoints": "AdamW trains on", "muon": "Muon trains on", "spectral": "spectral"}
MATRICES = (ENSEMBLE, "checkpoints", "muon", OURS, "spectral")


def at_chosen(view: View, rival: str = "") -> Pick:
    """Records of the row or a rival at the setting with the best validation LPPD."""
    method = rival or view.scope["method"]
    return Pick({"method": method}, best="options", score="valid_lppd")


def of_chosen(path: str, digits: int = 4) -> Cell:
    """Mean ± standard error over seeds."""
    return lambda view: mean_error(view.values(path, at_chosen(view)), digits)


def over(rival: str, path: str = "lppd") -> Cell:
    """Difference from a rival; its error is over seeds, or over parts of the data of one or two."""

    def cell(view: View) -> str:
        both = at_chosen(view, rival), at_chosen(view)
        gaps = view.gaps(path, *both)
        if view.scope["method"] in (rival, ENSEMBLE) or not gaps:
            return ""
        theirs, ours = (
            {look(r, "seed")[0]: r["parts"] for r in view.records(pick) if "parts" in r}
            for pick in both
        )
        seeds = ours.keys() & theirs.keys()
        if len(gaps) > 2 or path != "lppd" or len(seeds) < len(gaps):
            return mean_error(gaps, 4, "+")
        parts, before = (
            [fmean(of) for of in zip(*(x[seed] for seed in seeds), strict=True)]
            for x in (ours, theirs)
        )
        return mean_error([a - b for a, b in zip(parts, before, strict=True)], 4, "+")

    return cell


def setting(view: View) -> str:
    """A method and the setting that validation data chose."""
    options = {"options": view.records(at_chosen(view))[0]["cell"]["options"]}
    method = view.scope["method"]
    chosen = listed(View(view.files, {}, options))
    return ", ".join(filter(None, [TRAINED_ON.get(method, method), chosen]))


def at_end(view: View, name: str, digits: int) -> str:
    """What was seen at the longest budget of a run of the ladder."""
    record = view.records()[0]
    seen = record[max(filter(str.isdigit, record), key=int)]
    value = {key.lower(): x for key, x in seen.items()}[name.lower().replace("-", "_")]
    return "n/a" if math.isnan(value) else number(value, f".{digits}f")


def above(angle: float) -> tuple[str, Cell]:
    """A column of LPPD above the ensemble of the starts, at both budgets."""

    def at(budget: str) -> Cell:
        gap = lambda r: r[budget]["lppd"] - r["ensemble"]["lppd"] if budget in r else None  # noqa: E731
        return mean(gap, 3, "+", pick=Pick({"angle": angle}))

    return f"angle {angle}", join(at("3000"), at("12000"), sep=" / ")


# Draws against NUTS, and known posteriors.
FIXED_ANGLES = ("0.06", "0.12", "0.25", "0.5", "1.0")


def regular(method: str) -> Cell:
    """Error of the variance, and in parentheses the bias of the pooled one."""
    pick = Pick({"method": method})
    error = stat("variance_error", max, ".3f", pick), stat("variance_error_se", max, ".3f", pick)
    return join(join(*error, sep=" ± "), " (", stat("bias", max, "+.3f", pick), ")")


# Fewer independent draws than these do not show whether a bound is met.
ENOUGH_DRAWS = 100
BOUNDS = {"mean": 0.1, "sd": 0.1, "w1": 0.12}
NOISES = ("isotropic", "diagonal", "correlated", "varied")
TARGETS = ("gaussian", "rosenbrock", "funnel")
PLACES = each(target=TARGETS, noise=NOISES)
LEAPFROG, LENGTH = "psmile_naive leapfrog", "psmile_naive leapfrog L=10"
SEARCHED = ("smile_naive", "sgld", "sghmc", "psmile_naive", LEAPFROG, LENGTH)
LONG, SHORT = {"gradients": 1_000_000}, {"gradients": 200_000}


def within(record: Record) -> str:
    """Whether the largest net errors are small; few draws cannot show it."""
    if record["smallest_ess"] < ENOUGH_DRAWS:
        return "too few draws"
    is_met = all(record[f"{name} max"]["net"] <= BOUNDS[name] for name in ("mean", "sd"))
    return "yes" if is_met else "no"


def met(view: View) -> str:
    """How many posteriors are within the bounds."""
    verdicts = view.values(within, Pick({"part": "posteriors"}))
    return f"{verdicts.count('yes')} of {len(verdicts)}"


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


def furthest(ratios: list[float]) -> float:
    """From one."""
    return max(ratios, key=lambda ratio: abs(ratio - 1))


def yes(flags: list[bool]) -> str:
    """A word."""
    return "yes" if all(flags) else "no"


def bias(sampler: str, kind: str = "gaussian", part: str = "mixing", step=False, **of: Any) -> Cell:
    """Bias ± error, of chains that mix or, without `part`, of all."""

    def cell(view: View) -> str:
        records = view.records(Pick({"sampler": sampler, "kind": kind, **of}))
        if not records or (record := records[0][part] if part else records[0]) is None:
            return "none" * len(records)
        size = f" ({short(record['step_size'])})" if step and record["step_size"] else ""
        return value_error(record["bias"], record["error"]) + size

    return cell


def skewed(sigma: str) -> tuple[str, Cell, Cell]:
    """A column of log-normal noise: bias and step size."""
    pick = Pick({"kind": f"lognormal:{sigma}"})
    return sigma, bias(LEAPFROG, **pick.where, part=""), stat("step_size", max, ".2g", pick)


def variances(method: str) -> list[Cell]:
    """Error of the variances of Gaussians, and the worst one."""
    pick = Pick({"method": method})
    return [stat("b2", max, ".4f", pick), stat("worst", max, ".2f", pick)]


def in_paper(sampler: str = "psmile_naive", kind: str = "gaussian", **of: Any) -> Cell:
    """The paper's bias."""
    pick = Pick({"quantity": "b2", "sampler": sampler, "kind": kind, **of}, "paper")
    return lambda view: "".join(value_error(r["value"], r["error"]) for r in view.records(pick))


def beside(name: str, ours: Cell, paper: Cell) -> list[tuple]:
    """Two columns."""
    return [(name, ours), ("paper", paper)]


def chose(record: Record) -> str:
    """Bias of the ten chains that chose the step size, after the decades with four chains."""
    fine = record["searched_step_bias_effective"][7:]
    return number(next(b for size, b, _ in fine if math.isclose(size, record["step_size"])))


def by_validation(view: View, method: str, **where: Any) -> dict[tuple, float]:
    """LPPD of each data set and split, at the setting with the best validation score."""
    groups: dict[tuple, list[Record]] = {}
    for record in view.records(Pick({"method": method, **where})):
        if "valid" in record:
            at = record["cell"]
            groups.setdefault((at["data"], at["split"]), []).append(record)
    return {x: max(of, key=lambda one: one["valid"])["lppd"] for x, of in groups.items()}


def validated(method: str, **where: Any) -> Cell:
    """Mean over the splits."""
    return lambda view: pivot.mean_error([*by_validation(view, method, **where).values()])


def ahead_of(theirs: str, ours: str = "centres", which: Any = None, **where: Any) -> Cell:
    """Mean difference, paired by data set and split."""

    def cell(view: View) -> str:
        mine = by_validation(view, ours, **which or {})
        other = by_validation(view, theirs, **where)
        both = [x for x in mine if x in other]
        return pivot.mean_error([mine[x] - other[x] for x in both], sign="+")

    return cell


def tally(view: View, of_paper: bool) -> str:
    """How often `psmile` is competitive with its searched forms, or behind the paper.

    That is by at most two standard errors, or by more.
    """
    count, places = 0, [place | {"kind": "gaussian"} for place, _ in PLACES([])]
    for place in places:
        picks = (Pick(place | LONG | {"sampler": x}) for x in (OURS, LEAPFROG, LENGTH))
        ours, *forms = (view.records(pick)[0]["mixing"] for pick in picks)
        best = min(filter(None, forms), key=lambda r: r["bias"])
        if of_paper:
            wanted = place | {"quantity": "b2", "sampler": "psmile_naive"}
            best = view.records(Pick(wanted, "paper"))[0]
        gap = ours["bias"] - best["value" if of_paper else "bias"]
        count += of_paper == (gap > 2 * math.hypot(ours["error"], best["error"]))
    return f"{count} of {len(places)}"


def noise_bound(view: View) -> str:
    """Allowed b^2 of `psmile`: at least twice that of `smile`."""
    least = 0.003 if "isotropic" in view.first("case") else 0.01
    smile, psmile = (view.first("b2", Pick({"method": name})) for name in ("smile", OURS))
    if smile is None or psmile is None:
        return ""
    bound = max(least, 2 * smile)
    return number(bound, ".4f") + " (missed)" * (psmile > bound)


def noise_met(view: View) -> str:
    """How many cases are within their bounds."""
    cases = dict.fromkeys(view.values("case"))
    bounds = [noise_bound(View(view.files, {}, {"case": case})) for case in cases]
    return f"{sum('missed' not in bound for bound in bounds)} of {len(bounds)}"


# Costs, and other people's loops.
USUAL = {"part": "update", "leaves": 20, "chains": 1, "grads": "float32"}
STEPS = ("adamw", "sgd", "blackjax sgld", "sgld", "smile_naive", "smile", "psmile_naive", OURS)
FLOATS = {"grads": (None, "float32")}
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


def ratios(title: str, field: str, *names: str, where: Record = {}) -> Table:  # noqa: B006
    """Costs in units of AdamW's."""
    columns = [(x, f"{{methods.{x}.{field}:.2f}}") for x in names or STEPS]
    return Table("step_cost", every(), {"of": None} | where).shows((title, step_name), *columns)


def step_of(spec: str, method: str, **where: Any) -> Cell:
    """The same of one method."""
    path = f"methods.{method}.ratio"
    return lambda view: number(view.first(path, Pick({"chains": 1, **where})), spec)


def changed(view: View) -> str:
    """A line as it was, and as it is now."""
    return " → ".join(f"`{part}`" for part in view.first("line").split(" -> "))


def verdicts(view: View, *named: str) -> tuple[int, int]:
    """Loops that have one of these verdicts, and all."""
    known = view.values("verdict", Pick({"kind": "loop", "verdict": VERDICTS}))
    return sum(x in named for x in known), len(known)


def share(view: View) -> str:
    """Of the loops with the verdict of the row."""
    count, number_of = verdicts(view, view.scope["verdict"])
    return f"{count / max(number_of, 1):.0%}"


# Which method, and which candidate.
MUON = "checkpoints of Muon"
SHOWN = (ENSEMBLE, "checkpoints", MUON, OURS, "psmile, cold")
PROBLEMS = {
    "digits": "digits, d / N = 4.5, 4,000 gradients",
    "energy": "energy, d / N = 1.3, 10,000 gradients",
    "airfoil": "airfoil, d / N = 0.63, 10,000 gradients",
    "LeNet": "LeNet, d / N = 1.1, 12,000 gradients",
}
# What of LeNet is in each column.
ON_LENET = {ENSEMBLE: {}, "checkpoints": {"learning_rate": 0.002}, OURS: {}}
ON_LENET |= {MUON: {"learning_rate": 0.008}, "psmile, cold": {"temperature": "auto", "angle": 0.3}}
CANDIDATES = (
    OURS,
    "psmile, cold",
    "psmile, long steps",
    "psmile, around the start",
    "optimizer",
    "Muon",
)
ONE = ("trained", "average weights")
SIZED = ("energy", "digits", "2,000 images", "54,000 images", "LeNet")


def compared(view: View) -> list[Any]:
    """Results of `compare.py` on a problem: methods by seed; later records replace rows."""
    by_seed: dict[int, dict[str, Any]] = {}
    for record in view.records():
        by_seed.setdefault(record["cell"]["seed"], {}).update(record["methods"])
    return [rows for _, rows in sorted(by_seed.items())]


def all_methods(view: View) -> list[tuple]:
    """Columns of the table of `compare.py`, which depend on the problem."""
    if not (rows := compared(view)):
        return []
    header, lines = verdict.cells(rows)
    return [*zip(header, *lines, strict=True)]


def advice(view: View) -> str:
    """The three sentences of `compare.py`."""
    rows = compared(view)
    return " ".join(verdict.sentences(rows)) if rows else pivot.NO_RECORD


def best_of_others(view: View) -> str:
    """The best method that has no column."""
    rows, others = compared(view), {}
    for name in (rows or [{}])[0]:
        if name not in (*SHOWN, verdict.CHOOSER) and (lppd := verdict.column(rows, name, "lppd")):
            others[name] = lppd
    best = max(others, key=lambda name: fmean(others[name]), default=None)
    return f"{best}: {mean_error(others[best])}" if best else ""


def of_method(view: View, name: str) -> str:
    """LPPD on a problem of `compare.py`, or of LeNet in the benchmark of networks."""
    if view.scope["problem"] != "LeNet":
        return mean_error([rows[name]["lppd"] for rows in compared(view) if name in rows])
    where = {"problem": None, "task": "lenet", "form": "small", "options": ON_LENET[name]}
    where["method"] = "muon" if name == MUON else name.partition(",")[0]
    return mean_error(view.values("lppd", Pick(where, "networks")))


def candidate(view: View, name: str) -> str:
    """Its test LPPD, bold if `select` chose it."""
    shown = number(view.first("lppd", Pick({"method": name})))
    return f"**{shown}**" if name == view.records()[0]["chosen"] else shown or "–"


def regret(view: View) -> str:
    """The best candidate minus the chosen one."""
    alone = {name: view.first("lppd", Pick({"method": name})) for name in CANDIDATES}
    mine = alone.get(view.records()[0]["chosen"])
    return "" if mine is None else number(max(filter(None, alone.values())) - mine)


QUICK = {x: x for x in ("LPPD", "accuracy", "F1", "Brier", "ECE", "AURC")}
QUICK |= {"entropy": "entropy, digits", "shuffled": "entropy, shuffled pixels"}


def quick(score: str, title: str = "") -> tuple:
    """A score of the quickstart: the ensemble's, ours, and the difference."""
    return versus(title, f"scores.{ENSEMBLE}.{score}", f"scores.{OURS}.{score}")


def tempered(score: str, when: str) -> tuple:
    """The same before or after one temperature."""
    theirs, ours = (f"methods.{x}.{when}.{score}" for x in (ENSEMBLE, OURS))
    return versus(f"{score}, {when}", theirs, ours, error=True)


def fitted(method: str) -> Cell:
    """The temperature."""
    return mean(lambda record: fmean(record["methods"][method]["temperature"]))


def drawn(count: int) -> tuple:
    """LPPD of this many draws: chosen, evenly spaced, and what choosing gains."""
    chosen, evenly = f"chosen.{count}", f"evenly.{count}"
    gained = (mean(minus(chosen, x), 3, "+") for x in (evenly, "all"))
    return f"k = {count}", mean(chosen), mean(evenly), *gained


DIFFERENCE = "difference, paired"
CENTRES_GAINS = (
    ("data", "{data}"),
    ("centres 100 - psmile 100", ahead_of("psmile", which={"batch": 100}, batch=100)),
    ("two gradients - psmile, 100", ahead_of("psmile", "two gradients", batch=100)),
    ("centres - psmile, both by validation", ahead_of("psmile")),
    ("centres - AdamW", ahead_of("AdamW")),
    ("centres - Muon", ahead_of("Muon")),
    ("centres - ensemble", ahead_of(ENSEMBLE)),
    ("centres - CatBoost", ahead_of("CatBoost")),
)
TABLES: dict[str, Table] = {
    "paper": paper_rows.TABLE,
    "paper-chosen": Table("analytic paper", PLACES, LONG | {"sampler": LEAPFROG}).shows(
        ("target, noise", "{target}, {noise}"),
        ("b², ten chains that chose the step", lambda view: "".join(map(chose, view.records()))),
        ("20 fresh chains", "{bias:.3f} ± {error:.3f}"),
        ("paper, chains that chose it", in_paper()),
    ),
    "paper-literal": Table("literal paper", found("target", "noise", "scale")).shows(
        *under("target, noise, scale", "{target}", "{noise}", "{scale}"),
        ("b², chains that chose the step", "{chosen:.3f} ± {chosen_error:.3f}"),
        ("fresh chains at this step", "{bias:.3f} ± {error:.3f}"),
        ("step", "{step_size:.2g}"),
        ("paper", in_paper(scale=None)),
    ),
    "quickstart": Table("quickstart_seeds", each()).shows(
        ("test, mean over seeds", ENSEMBLE, OURS, DIFFERENCE),
        *(quick(name, title) for name, title in QUICK.items()),
    ),
    "uci": Table("uci", each(data=DATA), JOINT).shows(
        *plain("data"),
        scored(ENSEMBLE, ENSEMBLE),
        scored("scale-adapted SGHMC", SGHMC),
        scored("psmile_naive, fixed step", "psmile_naive"),
        scored("**psmile**, its own step", OURS),
        ("psmile - SGHMC", lambda view: ahead(view, SGHMC)),
        scored("MILE, full batch", "mile"),
    ),
    "uci-differences": Table("uci", each(data=DATA), JOINT).shows(
        ("psmile minus", "{data}"), *((x, lambda view, x=x: ahead(view, x)) for x in RIVALS)
    ),
    "tabular": Table(
        "uci", found("protocol", "data"), {"protocol": ("tabular", "tabular mean")}
    ).shows(
        *under("data, network", "{data}", lambda view: TABULAR[view.scope["protocol"]]),
        *(scored(x, x) for x in ("CatBoost", ENSEMBLE, OURS)),
    ),
    "uci-mixing": Table(
        "uci", each(data=DATA, method=(OURS, "psmile_naive", SGHMC, "mile")), JOINT
    ).shows(
        *plain("data", "method"),
        ("within chains", mean("rhat_within", 2, error=False, pick=BEST)),
        ("across chains", mean("rhat_across", 2, error=False, pick=BEST)),
        ("chains lost", lost),
        ("sigma, first to last draw", join(*SIGMA, sep=" ... ")),
    ),
    "scale": Table("networks", NETWORKS, SMALL).shows(
        *under("network, method", named, variant),
        *under(f"{ENSEMBLE}, LPPD", mean("lppd", 4, pick=START), mean("lppd", 4)),
        *((f"{name}, gain", gain(x, START, digits=4)) for name, x in SCORES.items()),
        ("seeds", stat("lppd", len, "d")),
    ),
    "scale-cells": Table("networks", NETWORKS, {"form": lambda x: x.split()[0] == "small"}).shows(
        *under("network, method, options", named, "{method}", listed),
        *((name, mean(x, 4)) for name, x in SCORES.items()),
        ("one chain", mean("single.lppd", 4, error=False)),
        *under("seconds, MiB", seconds, stat("chains.*.peak_mib", max, ".0f")),
    ),
    "matrices": Table(
        "networks",
        found("task", "form", "method", task=NAMES, method=MATRICES),
        {"valid_lppd": lambda x: x is not None, "form": lambda x: x.startswith("small")},
    ).shows(
        ("network", named),
        ("method, setting by validation data", setting),
        ("LPPD", of_chosen("lppd")),
        *under("over AdamW, over Muon", over("checkpoints"), over("muon")),
        ("accuracy", of_chosen("accuracy")),
        *under(
            "ECE after a temperature, over Muon",
            of_chosen("calibrated_ece"),
            over("muon", "calibrated_ece"),
        ),
        *under("AUROC foreign, over Muon", of_chosen("ood_auroc"), over("muon", "ood_auroc")),
        (
            "one chain",
            lambda view: number(fmean(view.values("single.lppd", at_chosen(view))), ".4f"),
        ),
        ("seeds", lambda view: f"{len(view.records(at_chosen(view)))}"),
    ),
    "ladder": Table(
        "ladder", found("size", "prior", size=("1e4", "1e5", "1e6", "1e7"), prior=ON_LADDER)
    ).shows(
        ("weights", stat("num_parameters", lambda x: pivot.thousands(x[0]), "")),
        ("d / N", stat(d_n, max, ".2f")),
        *plain("prior"),
        *map(above, ANGLES),
    ),
    "ladder-cells": Table("ladder", every("size", "prior")).shows(
        *under("weights, prior, angle", "{size}", "{prior}", "{angle}"),
        ("gradients", "{num_gradients:,}"),
        ("precision", stat(lambda r: r["precision"] or None, max, ".2g")),
        *((x, lambda view, x=x, n=n: at_end(view, x, n)) for x, n in SEEN.items()),
    ),
    "regular": Table(
        "regular",
        found("size", "per_pass", "num_gradients", "order"),
        {"features": "independent", "start": "mode"},
    ).shows(
        *under("weights, batches per pass, order", "{size}", "{per_pass}", "{order}"),
        ("gradients", "{num_gradients:,}"),
        *((x, regular(x)) for x in (OURS, *(f"diagonal {x}" for x in FIXED_ANGLES))),
    ),
    "correlated": Table(
        "regular", found("size", "order", "method"), {"features": "correlated"}
    ).shows(
        *under("weights, order, method", "{size}", "{order}", "{method}"),
        *under(
            "smallest, largest variance / exact",
            stat("variances.*", min, ".2f"),
            stat("variances.*", max, ".2f"),
        ),
        ("mean of them - 1", mean("bias", 3, "+")),
        *under("error of variance, of mean", *map(mean, ("variance_error", "mean_error"))),
        *under(
            "at 6,000: error of variance, of mean ",
            *map(mean, ("early.variance_error", "early.mean_error")),
        ),
    ),
    "from-zeros": Table("regular", found("size", "method"), {"start": "zeros"}).shows(
        *under("weights, method, gradients", "{size}", "{method}", "{arrival:,.0f}"),
        ("arrived", "{num_arrived} of {num_chains}"),
    ),
    "tall": Table("tall", found("problem", "num_data", "size", "method")).shows(
        *under("posterior, data, size, method", "{problem}", "{num_data:,}", "{size}", "{method}"),
        *under("error of the mean, of variances", *map(mean, ("mean_error", "variance_error"))),
        *under(
            "smallest, largest variance / exact",
            stat("variances.0", min, ".2f"),
            stat("variances.2", max, ".2f"),
        ),
        ("effective draws", stat("ess.1", min, ",.0f")),
        ("examples per effective draw", mean("examples", 0)),
        ("effective draws per second", mean("per_second", 1)),
        ("R-hat", stat("rhat", max, ".2f")),
    ),
    "centres": Table("centers", each(data=DATA)).shows(
        *plain("data"),
        *((f"psmile, {x}", validated("psmile", batch=x)) for x in (100, 400, 1_600, "full")),
        *((f"centres, {x}", validated("centres", batch=x)) for x in (100, 400)),
        ("two gradients, 100", validated("two gradients")),
        ("angle .12, 100", validated("larger angle")),
        *((x, validated(x)) for x in ("AdamW", "Muon", ENSEMBLE, "CatBoost")),
    ),
    "centres-gains": Table("centers", each(data=DATA)).shows(*CENTRES_GAINS),
    "centres-mean": Table("centers", each()).shows(*CENTRES_GAINS[1:]),
    "posteriors": Table("agreement", every(), {"part": "posteriors"}).shows(
        *under("posterior, sampler", "{data}", "{method}"),
        *under("mean, net", "{mean max.raw:.3f}", "{mean max.net:.3f}"),
        *under("sd, net", "{sd max.raw:.3f}", "{sd max.net:.3f}"),
        ("smallest ESS", "{smallest_ess:,.0f}"),
        ("within 0.1", stat(within, max, "")),
    ),
    "nuts-networks": Table("agreement", found("method"), {"part": "networks"}).shows(
        ("mean, sd, W1 (ESS)", "{method}"),
        *(
            (f"{x}, N/{n}".removesuffix("/1"), lambda view, x=x, n=n: agreement(view, x, n))
            for x in ("energy", "moons")
            for n in (1, 2, 8, 32)
        ),
    ),
    "nuts-references": Table(
        "agreement", found("data", "part"), {"part": ("posteriors", "networks")}
    ).shows(
        ("reference", "{data} ({part})"),
        ("largest R-hat", stat("reference.rhat.*", max, ".3f", Pick(last="data"))),
        ("smallest ESS", stat("reference.ess.*", min, ",.0f", Pick(last="data"))),
    ),
    "calibration": Table("agreement", every(), {"part": "calibration"}).shows(
        *under("model, sampler, data sets", "{data}", "{method}", stat("counts.0.*", sum, "")),
        *under("smallest p, of", stat("p.*", min, ".2g"), stat("p.*", len, "")),
        ("largest shift, s.e.", stat(shift, max, ".1f")),
        ("variance / uniform", stat("variance_ratio.*", furthest, ".2f")),
        *under("lost, uniform", "{num_lost}", stat("is_uniform", yes, "")),
    ),
    "bias": Table("analytic paper", each(noise=NOISES), LONG).shows(
        ("noise: psmile / paper's pSMILE-naive, best step", "{noise}"),
        *(y for x in TARGETS for y in beside(x, bias(OURS, target=x), in_paper(target=x))),
    ),
    "bias-forms": Table("analytic paper", PLACES, LONG).shows(
        ("target, noise", "{target}, {noise}"),
        ("**psmile**, nothing chosen", bias(OURS, step=True)),
        ("psmile_naive, best step", bias(LEAPFROG, step=True)),
        ("the same, L = 10", bias(LENGTH, step=True)),
        ("paper: pSMILE-naive, best step", in_paper()),
    ),
    "bias-smallest": Table("analytic paper", PLACES, LONG).shows(
        ("target, noise", "{target}, {noise}", "paper"),
        *((name, bias(name, part=""), in_paper(name)) for name in SEARCHED),
    ),
    "bias-heavy-tails": Table("analytic paper", PLACES, SHORT).shows(
        ("target, noise", "{target}, {noise}"),
        *(
            column
            for x in ("gaussian", "laplace", "student")
            for column in beside(x.capitalize(), bias(LEAPFROG, x), in_paper(kind=x))
        ),
    ),
    "bias-skewed": Table("analytic", each()).shows(
        ("sigma", "b^2", "best step size"),
        *map(skewed, ("0.01", "0.03", "0.1", "0.3", "1.0")),
    ),
    "small-noise": Table("small_noise", found("case")).shows(
        ("noise of the gradients", lambda view: view.first("case").replace("|theta|", "abs theta")),
        *under("smile: b^2, worst variance", *variances("smile")),
        *under("psmile: b^2, worst variance", *variances(OURS)),
        ("Monte Carlo b^2", stat("monte_carlo_b2", max, ".4f", Pick({"method": OURS}))),
        ("bound", noise_bound),
    ),
    "step-cost": ratios(
        *("time / AdamW", "ratio", "sgd", "sgld", "smile_naive", "smile", "psmile_naive", OURS),
        where={"chains": 1, "parameters": (None, 1_000, 10**7), "leaves": (None, 20)} | FLOATS,
    ),
    "step-cost-all": ratios("time / AdamW", "ratio"),
    "step-cost-matrices": ratios(
        *("time / AdamW", "ratio", OURS, "muon", "spectral"), where={"of": "matrices"}
    ),
    "compilation": ratios("compilation / AdamW", "compile_ratio"),
    "large-rows": Table("large_rows", found("network")).shows(
        *plain("network"),
        ("weights", "{num_parameters:,}"),
        ("batch", "{batch_size}"),
        ("TFLOP per gradient", "{teraflop:.2f}"),
        ("ms per step", "{step_ms:.0f}"),
        ("chains x steps", "{num_chains} x {steps:,}"),
        ("memory of a chain, GiB", "{gib:.1f}"),
        ("draws, GiB", "{draws_gib:.1f}"),
        ("hours in all", "{hours:.1f}"),
    ),
    "faults": Table("faults", found("campaign")).shows(
        *plain("campaign"),
        *((x, lambda view, x=x: f"{sum(view.values(x, LAST)):,}") for x in COUNTS),
        ("date", lambda view: ", ".join(sorted({*view.values("date", LAST)}))),
        ("command", lambda view: ", ".join(dict.fromkeys(view.values(COMMAND, LAST)))),
    ),
    "public-loops": Table("public_loops", each(kind=("loop",), verdict=VERDICTS)).shows(
        *plain("verdict"),
        ("loops", lambda view: f"{verdicts(view, view.scope['verdict'])[0]}"),
        ("share", share),
    ),
    "public-loops-all": Table("public_loops", every(), {"kind": "loop"}).shows(
        *under("loop, version, changed line", "{repository}, {path}", "{version}", changed),
        *under("verdict, what was seen", "{verdict}", "{note}"),
    ),
    "public-loops-fits": Table("public_loops", every(), {"kind": "recorded"}).shows(
        *under("loop, version, changed line", "{repository}, {path}", "{version}", changed),
        ("worst mean", stat("mean_off.*.*", lambda of: max(map(abs, of)), ".2f")),
        ("sd", stat("sd_ratio.*.*", lambda of: f"{min(of):.2f} to {max(of):.2f}", "")),
        *under("verdict, what was seen", "{verdict}", "{note}"),
    ),
    "temperature": Table("calibration", each(), {"data": "digits"}).shows(
        ("quickstart, mean over seeds", ENSEMBLE, OURS, DIFFERENCE),
        ("temperature", *map(fitted, (ENSEMBLE, OURS)), ""),
        *(tempered(score, when) for score in ("ECE", "LPPD") for when in ("before", "after")),
    ),
    "few-draws": Table("few_draws", each(problem=SIZED)).shows(
        ("test LPPD", *["{problem}"] * 4),
        ("draws", "`choose`", "evenly spaced", DIFFERENCE, "`choose` - all, paired"),
        *map(drawn, (1, 2, 4, 8, 16)),
        ("all", *[join(mean("all"), " ({num_draws:,})")] * 2, "", ""),
    ),
    "one-network": Table("few_draws", found("problem", problem=SIZED), {"one": bool}).shows(
        ("test LPPD", "{problem}"),
        *((x, mean(f"one.{x}")) for x in ("one draw", *ONE)),
        ("average weights - all draws", mean(minus("one.average weights", "all"), 3, "+")),
        *((f"{x}, all chains", mean(f"one.{x}, of all chains")) for x in ONE),
        ("all draws", mean("all")),
    ),
    "few-draws-optimism": Table("few_draws", each(problem=SIZED)).shows(
        *under("data, validation examples", "{problem}", "{num_validation:,}"),
        ("draws", "{num_draws:,}"),
        ("on validation data", mean(minus("validation.15", "validation_all"), 3, "+")),
        ("on test data", mean(minus("chosen.16", "all"), 3, "+")),
    ),
    "selection": Table("selection", found("problem", "seed"), {"method": "select"}).shows(
        ("problem, seed", "{problem}, {seed}"),
        ("d / N", stat(d_n, max, ".2g")),
        (ENSEMBLE, stat("lppd", max, ".3f", Pick({"method": ENSEMBLE}))),
        *((x, lambda view, x=x: candidate(view, x)) for x in CANDIDATES),
        *under("best - chosen, cost", regret, "{cost:.2f}"),
    ),
    "which-method-short": Table(
        "which_method networks", each(problem=PROBLEMS), {"smoke": None}
    ).shows(
        ("problem", lambda view: PROBLEMS[view.scope["problem"]]),
        *((x, lambda view, x=x: of_method(view, x)) for x in SHOWN),
        ("best of the others", best_of_others),
    ),
}
FIGURES: dict[str, tuple] = {
    "paper rows": (paper_rows.TABLE.files, paper_rows.tally),
    "quickstart LPPD": ("quickstart_seeds", quick("LPPD")[-1]),
    "quickstart ECE": ("quickstart_seeds", quick("ECE")[-1]),
    "LPPD after temperature": ("calibration", tempered("LPPD", "after")[-1], {"data": "digits"}),
    "ECE after temperature": ("calibration", tempered("ECE", "after")[-1], {"data": "digits"}),
    "uci wins, scale_adapted_sghmc": ("uci", lambda view: wins(view, SGHMC), JOINT),
    "uci losses, psmile_naive": ("uci", lambda view: wins(view, "psmile_naive", -1), JOINT),
    "yacht lost": ("uci", lambda view: lost(view, at_best(OURS, data="yacht")), JOINT),
    "posteriors met": ("agreement", met),
    "bias competitive": ("analytic paper", lambda view: tally(view, of_paper=False)),
    "bias behind paper": ("analytic paper", lambda view: tally(view, of_paper=True)),
    "small noise met": ("small_noise", noise_met),
    "public loops run": ("public_loops", lambda view: "{} of {}".format(*verdicts(view, *RUNS))),
    "public repositories": ("public_loops", stat("repository", lambda of: len({*of}), "")),
    "step lenet, psmile": ("step_cost", step_of(".2f", OURS, network="lenet")),
    "step gpt, psmile": ("step_cost", step_of(".2f", OURS, network="gpt")),
    "update psmile": ("step_cost", step_of(".1f", OURS, parameters=10**7, **USUAL)),
    "update smile": ("step_cost", step_of(".1f", "smile", parameters=10**7, **USUAL)),
}
for problem in ("digits", "energy", "airfoil"):
    where = {"problem": problem, "smoke": None}
    TABLES[f"which-method {problem}"] = Table("which_method", each(), where, all_methods)
    FIGURES[f"which-method {problem}"] = ("which_method", advice, where)


# Pages.

MARKED = re.compile(r"<!-- (table|figure) ([^>]*?) -->(.*?)<!-- end -->", re.DOTALL)
OPENED = re.compile(r"<!-- (?:table|figure) ([^>]*?) -->")
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
# Lines of a table, and not below them a line on records and the commit that has them.
BARE = re.compile(
    r"(?:^ *\|.*\n)+(?! *\||\n\*(?:\d+ records? · |paper: ).*\* Frozen: .*\bcommit [0-9a-f]{7}\b)",
    re.MULTILINE,
)


@cache
def records_of(name: str) -> list[Record]:
    """Records of a file; none if it is not there."""
    return pivot.read(FOLDER / "results" / f"{name}.jsonl")


def shown(name: str, records: list[Record] | None = None) -> str:
    """A table made from the files, or from some records in place of its first file."""
    files = {x: records_of(x) for x in TABLES[name].files.split()}
    if records is not None:
        files[next(iter(files))] = records
    return pivot.block(TABLES[name], files)


def made(kind: str, name: str) -> str | None:
    """The content between the markers; None if there is no such table or figure."""
    if name not in (TABLES if kind == "table" else FIGURES):
        return None
    if kind == "table":
        return f"\n{shown(name)} "
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
    for marked in MARKED.finditer(text):
        kind, name, content = marked.groups()
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
        for place, record in enumerate(pivot.read(path), 1):
            chains = record.get("chains")
            parts = [record, *(chains if isinstance(chains, list) else [])]
            if any(isinstance(part, dict) and part.get("dirty") for part in parts):
                yield f"{path.name}: record {place} was made with --allow-dirty."


def main() -> int:
    """Rewrite the pages, or check them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing, list what is stale")
    arguments = parser.parse_args()
    wrong = []
    notes = sorted((FOLDER / "notes").glob("*.md"))
    others = ("docs/faults.md", "docs/paper.md", "docs/which-method.md", "paper/paper.md")
    for page in (FOLDER / "README.md", *notes, *(FOLDER.parent / name for name in others)):
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
