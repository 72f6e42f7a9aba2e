"""Regression on UCI data: protocol *joint*, by which the defaults are judged, and the paper's."""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from benchmarks.tabulated.table import Record, Table, mean_error, number, short, value_error

DATA = ("energy", "airfoil", "bikesharing", "concrete", "yacht", "kin8nm", "power")
USUAL = {"protocol": "joint", "num_chains": 10, "num_gradients": 60_000}
# Fields that most cells lack.
OPTIONAL = {"seed", "batches_per_pass", "replacement", "gap"}
RHAT = {"within chains": "rhat_within", "across chains": "rhat_across"}
METHODS = (
    *("scale_adapted_sghmc", "sgld", "cyclical_sgld", "checkpoints", "psmile_naive", "psmile"),
    "mile",
)
# Standard deviations of the targets, which networks see divided by them.
SCALES = {"energy": 10.0836, "concrete": 16.6976, "yacht": 15.1359, "kin8nm": 0.26359}
SCALES["power"] = 17.0661
# Negative log likelihoods that others published for ensembles of ten networks, and the best log
# likelihoods on gap splits that we know of.
PUBLISHED = {"energy": 0.61, "concrete": 3.20, "yacht": 0.73, "kin8nm": -1.17, "power": 3.18}
PUBLISHED_GAPS = {"energy": -7.9, "concrete": -3.30, "yacht": -1.58}
# The default of `psmile` before, whose steps came from the size of the gradient.
WHOLE = "psmile, whole gradient"


def select(found: Iterable[Record], **wanted: Any) -> list[Record]:
    """Records whose cells have these values, and no option that is not asked for."""
    return [
        record
        for record in found
        if wanted.items() <= record["cell"].items()
        and not (OPTIONAL - wanted.keys()) & record["cell"].keys()
    ]


def by_split(records: Iterable[Record]) -> dict[int, float]:
    """LPPD of each split."""
    return {record["cell"]["split"]: record["lppd"] for record in records}


def best(found: Iterable[Record], **wanted: Any) -> list[Record]:
    """Records of a method at the best of the step sizes that ran on most splits."""
    groups: dict[float | None, list[Record]] = {}
    for record in select(found, **wanted):
        groups.setdefault(record["cell"]["step_size"], []).append(record)
    if not groups:
        return []
    most = max(map(len, groups.values()))
    complete = [group for group in groups.values() if len(group) == most]
    return max(complete, key=lambda group: fmean(record["lppd"] for record in group))


def paired(ours: Iterable[Record], theirs: Iterable[Record]) -> list[float]:
    """Differences of LPPD on the splits that both have."""
    first, second = by_split(ours), by_split(theirs)
    return [first[split] - second[split] for split in sorted(first.keys() & second.keys())]


def shown(records: Sequence[Record], with_step: bool = True) -> str:
    """Mean ± standard error of LPPD, with the step size that was chosen."""
    text = mean_error([record["lppd"] for record in records])
    if records and with_step and records[0]["cell"]["step_size"]:
        text += f" ({short(records[0]['cell']['step_size'])})"
    return text


def joint(found: Sequence[Record]) -> Table:
    """LPPD of the main methods, each at its best step size."""
    methods = ("deep ensemble", "scale_adapted_sghmc", "psmile_naive", "psmile", "mile")
    rows, used = [], []
    for data in DATA:
        groups = {m: best(found, data=data, method=m, **USUAL) for m in methods}
        used += [record for group in groups.values() for record in group]
        if not groups["psmile"]:
            continue
        difference = paired(groups["psmile"], groups["scale_adapted_sghmc"])
        cells = [shown(groups[m]) for m in methods]
        rows.append([data, *cells[:4], mean_error(difference, sign="+"), cells[4]])
    header = [
        *("data", "deep ensemble", "scale-adapted SGHMC", "psmile_naive, fixed step"),
        *("**psmile**, its own step", "psmile - SGHMC", "MILE, full batch"),
    ]
    return Table(header, rows, used)


def wins(found: Sequence[Record], against: str) -> str:
    """On how many data sets `psmile` beats a method at its best step size."""
    differences = [
        paired(*(best(found, data=d, method=m, **USUAL) for m in ("psmile", against))) for d in DATA
    ]
    known = [fmean(x) for x in differences if x]
    return f"{sum(x > 0 for x in known)} of {len(known)}"


def losses(found: Sequence[Record], against: str) -> str:
    """On how many it does not."""
    won, known = map(int, wins(found, against).split(" of "))
    return f"{known - won} of {known}"


def lost(found: Sequence[Record], data: str) -> str:
    """Single chains of `psmile` that score below a constant prediction."""
    group = select(found, data=data, method="psmile", **USUAL)
    return f"{sum(r['num_lost'] for r in group)} of {10 * len(group)}"


def differences(found: Sequence[Record]) -> Table:
    """`psmile` minus each method at its best step size, paired by split."""
    others = [method for method in METHODS if method != "psmile"]
    rows, used = [], []
    for data in DATA:
        ours, cells = best(found, data=data, method="psmile", **USUAL), []
        used += ours
        for method in others:
            theirs = best(found, data=data, method=method, **USUAL)
            used += theirs
            values = paired(ours, theirs)
            splits = "" if len(values) != 1 else " (1 split)"
            cells.append(mean_error(values, sign="+") + splits)
        rows.append([data, *cells])
    return Table(["psmile minus", *others], rows, used)


def mixing(found: Sequence[Record]) -> Table:
    """Share of test points whose R-hat is below 1.05, and chains that were lost."""
    rows, used = [], []
    for data in DATA:
        for method in ("psmile", "psmile_naive", "scale_adapted_sghmc", "mile"):
            group = best(found, data=data, method=method, **USUAL)
            if not group:
                continue
            used += group
            shares = [number(fmean(r[field] for r in group), 2) for field in RHAT.values()]
            lost = sum(record["num_lost"] for record in group)
            sigma = fmean(record["sigma"][0] for record in group)
            end = fmean(record["sigma"][-1] for record in group)
            places = f"{number(sigma)} ... {number(end)}"
            rows.append([data, method, *shares, f"{lost} of {10 * len(group)}", places])
    header = ["data", "method", *RHAT, "chains lost", "sigma, first to last draw"]
    return Table(header, rows, used)


def step_rules(found: Sequence[Record]) -> Table:
    """Steps by the change of the gradient against those by its size, and against rivals."""
    rivals = (WHOLE, "checkpoints", "psmile_naive", "mile")
    rows, used, means = [], [], []
    for data in DATA:
        ours = select(found, data=data, method="psmile", **USUAL)
        groups = [best(found, data=data, method=method, **USUAL) for method in rivals]
        if not ours:
            continue
        used += [*ours, *(record for group in groups for record in group)]
        differences = [paired(ours, group) for group in groups]
        means.append(fmean(differences[0]))
        rows.append([data, shown(ours), *(mean_error(x, sign="+") for x in differences)])
    rows.append(["mean", "", mean_error(means, sign="+"), "", "", ""])
    header = ["data", "psmile", "minus steps by the whole gradient", "minus checkpoints of AdamW"]
    return Table([*header, "minus the best fixed step", "minus MILE, full batch"], rows, used)


def batches(found: Sequence[Record]) -> Table:
    """Order and number of the batches of a pass, with steps by the whole gradient."""
    rows, used = [], []
    for number_of in (2, 20, 200):
        cells = []
        for data in DATA[:2]:
            wanted = USUAL | {"data": data, "method": WHOLE, "batches_per_pass": number_of}
            permuted, drawn = select(found, **wanted), select(found, **wanted, replacement=True)
            used += [*permuted, *drawn]
            cells += [shown(permuted), shown(drawn)]
        if any(cells):
            rows.append([str(number_of), *cells])
    header = ["batches per pass"]
    header += [f"{d}: {way}" for d in DATA[:2] for way in ("permutations", "with replacement")]
    return Table(header, rows, used)


def few_chains(found: Sequence[Record]) -> Table:
    """Bike sharing with three chains, where full batches were affordable."""
    usual = USUAL | {"num_chains": 3, "data": "bikesharing"}
    ours = best(found, method="psmile", **usual)
    rows, used = [], []
    for method in ("deep ensemble", "psmile", "psmile_naive", "mile"):
        group = best(found, method=method, **usual)
        used += group
        rows.append([method, shown(group), mean_error(paired(group, ours), sign="+")])
    return Table(["bike sharing, 3 chains", "LPPD", "minus psmile"], rows if used else [], used)


def in_published_units(found: Sequence[Record]) -> Table:
    """Negative log likelihood in the units of the targets, and published figures."""
    rows, used = [], []
    for data, published in PUBLISHED.items():
        cells = []
        for method in ("deep ensemble", "psmile"):
            group = select(found, data=data, method=method, **USUAL)
            used += group
            cells.append(mean_error([math.log(SCALES[data]) - r["lppd"] for r in group]))
        rows.append([data, number(published, 2), *cells])
    return Table(["NLL", "published, ten networks", "our ten networks", "psmile"], rows, used)


def gaps(found: Sequence[Record]) -> Table:
    """Log likelihood in the units of the targets on gap splits, a split for each feature."""
    rows, used = [], []
    for data, published in PUBLISHED_GAPS.items():
        methods = ("deep ensemble", "checkpoints", "psmile")
        groups = [best(found, data=data, method=method, gap=True, **USUAL) for method in methods]
        used += [record for group in groups for record in group]
        scores = [[r["lppd"] - math.log(SCALES[data]) for r in group] for group in groups]
        cells = [mean_error(x) for x in scores]
        rows.append([data, str(len(groups[-1])), number(published, 2), *cells])
    header = ["log likelihood", "splits", "best published", "deep ensemble", "checkpoints"]
    return Table([*header, "psmile"], rows, used)


# The protocol of the paper: batch-wise and epoch-wise, with the paper's figures.

# Row: method of our records, that of the paper, gradients of our run on each data set. Epoch-wise
# the number of passes is that of full-batch MILE's steps: 2, 4 and 47 batches a pass.
PLANS = {
    "batch-wise": (
        ("scale_adapted_sghmc", "scale_adapted_sghmc", (60_000, 60_000, 60_000)),
        ("smile_naive as shipped", "smile_naive", (120_000, 120_000, 120_000)),
        ("smile_naive published", "smile_naive", (120_000, 120_000, 120_000)),
        ("psmile_naive as shipped", "psmile_naive", (120_000, 120_000, 120_000)),
        ("psmile_naive published", "psmile_naive", (120_000, 120_000, 120_000)),
        ("psmile", "", (60_000, 60_000, 60_000)),
        ("mile", "mile", (120_000, 120_000, 120_000)),
    ),
    "epoch-wise": (
        ("scale_adapted_sghmc", "scale_adapted_sghmc", (120_000, 240_000, 2_820_000)),
        ("smile_naive published", "smile_naive", (240_000, 480_000, 5_640_000)),
        ("psmile_naive relative bounds", "psmile_naive", (240_000, 480_000, 5_640_000)),
        ("psmile", "", (120_000, 240_000, 2_820_000)),
        ("mile", "mile", (120_000, 120_000, 120_000)),
    ),
}


def beside_paper(found: Sequence[Record], paper: Sequence[Record], budget: str) -> Table:
    """The same number of steps, or of passes through the data, for every method."""
    paper = [r for r in paper if r["quantity"] == "lppd" and "data" in r["cell"]]
    rows, used, protocol = [], [], {"protocol": "paper"}
    for method, theirs, gradients in PLANS[budget]:
        rows.append([method])
        for data, count in zip(DATA, gradients, strict=False):
            ours = select(found, data=data, method=method, num_gradients=count, **protocol)
            wanted = {"data": data, "method": theirs}
            wanted |= {"budget": "full batch" if theirs == "mile" else budget}
            given = [r for r in paper if wanted.items() <= r["cell"].items()]
            used += [*ours, *given]
            text = mean_error([record["lppd"] for record in ours])
            rows[-1].append(f"{text} ({len(ours)})" if ours else "not run")
            rows[-1].append("".join(value_error(r["value"], r["error"]) for r in given))
    header = ["LPPD (number of splits)"]
    header += [name for data in DATA[:3] for name in (data, "paper")]
    return Table(header, rows, used)


def distributional(found: Sequence[Record]) -> Table:
    """LPPD on bike sharing by step size and batches of a pass; other methods in batches of 256."""
    wanted = {"protocol": "distributional", "data": "bikesharing", "num_chains": 3}
    found = [r for r in found if wanted.items() <= r["cell"].items()]
    counts = sorted({r["cell"].get("batches_per_pass", 0) for r in found} - {0}, reverse=True)
    rows: dict[str, dict[int | None, list[float]]] = {}
    for record in found:
        cell = record["cell"]
        step = f", step {short(cell['step_size'])}" if cell["step_size"] else ""
        row = rows.setdefault(cell["method"] + step, {})
        row.setdefault(cell.get("batches_per_pass"), []).append(record["lppd"])
    cells = [
        [name, *(mean_error(row.get(n, [])) for n in (*counts, None))] for name, row in rows.items()
    ]
    header = ["method", *(f"{n} batches a pass" for n in counts), "256 rows a batch"]
    return Table(header, cells, found)
