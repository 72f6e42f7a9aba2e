"""Make every table and figure of the pages from the records.

    python benchmarks/tables.py               rewrite what stands between markers
    python benchmarks/tables.py --check       list what is stale, and exit with 1
    python benchmarks/tables.py --csv FOLDER  write the records of each script as a CSV file

Pages are `README.md`, `notes/*.md`, `faults.md`, `paper.md` and `which-method.md` in `../docs`, and
our paper, `../paper/paper.md`; records are `results/*.jsonl`, those of Sommer et al.
`results/paper.jsonl`.
Markers of a table stand on separate lines, those of a figure within a line:

    <!-- table NAME --> <!-- end -->
    ... better by <!-- figure NAME -->0.05 ± 0.01<!-- end --> nats ...

A table is a function below `@table`. It takes the records of its files as data frames (`frames.py`)
and returns a data frame of texts and the records used. A table without markers is frozen:
"Frozen:" and the commit that has its records follow the line on its records.
"""
# pandas has no stubs, and its methods several return types.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false
# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks import paper_rows
from benchmarks.frames import (
    NO_RECORD,
    RESULTS,
    best,
    frame,
    markdown,
    mean,
    mean_error,
    number,
    numbers,
    ordered,
    short,
    text_of,
    value_error,
)
from benchmarks.paper_rows import ENSEMBLE, NOISES, SGHMC, TARGETS
from benchmarks.records import Record, read

import numpy as np
import pandas as pd
import verdict

FOLDER = Path(__file__).parent
OURS = "psmile"
Made = tuple[pd.DataFrame, pd.DataFrame]
TABLES: dict[str, tuple[Callable[..., Made], str, Sequence[str]]] = {}


def table(*files: str, query: str = "") -> Callable:
    """Declare a table named like its function.

    Args:
        files: of records; the function takes a frame for each.
        query: reduces the first of them, see `DataFrame.query`.
    """

    def add(make: Callable[..., Made]) -> Callable[..., Made]:
        TABLES[make.__name__.replace("_", "-")] = make, query, files
        return make

    return add


TABLES["paper"] = paper_rows.table, "", paper_rows.FILES
# The quickstart.
QUICK = {x: x for x in ("LPPD", "accuracy", "F1", "Brier", "ECE", "AURC")}
QUICK |= {"entropy": "entropy, digits", "shuffled": "entropy, shuffled pixels"}
# With temperatures fitted on validation data.
TEMPERED, AFTER = ", tempered", ("LPPD", "ECE", "T")


def versus(runs: pd.DataFrame, score: str, form: str = "") -> list[str]:
    """Means of the ensemble and of `psmile`, and their difference."""
    theirs, ours = (runs[f"scores.{method}{form}.{score}"] for method in (ENSEMBLE, OURS))
    return [mean(theirs, 4), mean(ours, 4), mean_error(ours - theirs, 4, "+")]


@table("quickstart_seeds")
def quickstart(runs):
    """Scores of both."""
    rows = {"test, mean over seeds": [ENSEMBLE, OURS, "difference, paired"]}
    rows |= {name: versus(runs, x) for x, name in QUICK.items()}
    return pd.DataFrame(rows | {f"{x}, tempered": versus(runs, x, TEMPERED) for x in AFTER}), runs


# UCI regression by the protocol *joint*, with no option: fields that most cells lack.
JOINT = "protocol == 'joint' and num_chains == 10 and num_gradients == 60_000 and seed.isna()"
JOINT += " and batches_per_pass.isna() and replacement.isna() and gap.isna()"
DATA = ("energy", "airfoil", "bikesharing", "concrete", "yacht", "kin8nm", "power")
RIVALS = [SGHMC, "sgld", "cyclical_sgld", "checkpoints", "psmile_naive", "mile"]


def at_best(runs: pd.DataFrame) -> pd.DataFrame:
    """Each method at the best of its step sizes."""
    return best(runs, "data", "method", setting="step_size", score="lppd")


def scored(picked: pd.DataFrame, *by: str) -> pd.DataFrame:
    """LPPD of each method, with the step size that was chosen."""
    groups = picked.groupby([*by, "method"])
    steps = groups["step_size"].first().map(short)
    return (groups["lppd"].agg(mean_error) + steps.map(lambda x: x and f" ({x})")).unstack()


def ahead(picked: pd.DataFrame) -> pd.DataFrame:
    """`psmile` minus each method, by data set and split."""
    scores = picked.pivot(index=["data", "split"], columns="method", values="lppd")
    scores = scores.reindex(columns=[OURS, *RIVALS])
    return -scores.sub(scores[OURS], axis=0)


def ahead_text(gaps: pd.Series) -> str:
    """Mean difference; a single split is named."""
    return mean_error(gaps, sign="+") + (" (1 split)" if gaps.count() == 1 else "")


@table("uci", query=JOINT)
def uci(runs):
    """The main methods."""
    shown = {ENSEMBLE: ENSEMBLE, SGHMC: "scale-adapted SGHMC"}
    shown |= {"psmile_naive": "psmile_naive, fixed step", OURS: "**psmile**, its own step"}
    shown |= {"gap": "psmile - SGHMC", "mile": "MILE, full batch"}
    picked = at_best(runs)
    gap = ahead(picked)[SGHMC].groupby("data").agg(ahead_text)
    rows = scored(picked, "data").assign(gap=gap).reindex(index=DATA, columns=[*shown])
    return rows.rename(columns=shown), picked[picked["method"].isin(shown)]


@table("uci", query=JOINT)
def uci_differences(runs):
    """All methods."""
    picked = at_best(runs)
    rows = ahead(picked).groupby("data").agg(ahead_text).reindex(index=DATA, columns=RIVALS)
    return rows.rename_axis("psmile minus"), picked[picked["method"].isin([OURS, *RIVALS])]


@table("uci", query="protocol in ['tabular', 'tabular mean']")
def tabular(runs):
    """Beside boosted trees."""
    rows = scored(runs, "protocol", "data").reset_index()
    rows = rows.reindex(columns=["protocol", "data", "CatBoost", ENSEMBLE, OURS])
    network = {"tabular": "mean and sigma", "tabular mean": "mean, one sigma"}
    rows.insert(1, "network", rows.pop("protocol").map(network))
    return rows, runs


def lost(runs: pd.DataFrame) -> str:
    """Single chains that score below a constant prediction."""
    return f"{runs['num_lost'].sum():.0f} of {10 * len(runs)}"


@table("uci", query=JOINT)
def uci_mixing(runs):
    """Whether chains agree, and how far sigma still moves."""
    picked = ordered(at_best(runs), data=DATA, method=(OURS, "psmile_naive", SGHMC, "mile"))
    picked = picked.assign(first=picked["sigma"].str[0], last=picked["sigma"].str[-1])
    groups = picked.groupby(["data", "method"], sort=False)
    rows = {
        "within chains": groups["rhat_within"].agg(mean, digits=2),
        "across chains": groups["rhat_across"].agg(mean, digits=2),
        "chains lost": groups[["num_lost"]].apply(lost),
        "sigma, first to last draw": groups["first"].agg(mean) + " ... " + groups["last"].agg(mean),
    }
    return pd.DataFrame(rows), picked


def wins(runs: pd.DataFrame, rival: str, sign: int = 1) -> str:
    """On how many data sets `psmile` is two standard errors above a method, or below it."""
    gaps = ahead(at_best(runs))[rival].groupby("data").agg(["mean", "sem"]).dropna()
    return f"{(sign * gaps['mean'] > 2 * gaps['sem']).sum()} of {len(gaps)}"


def chosen(runs: pd.DataFrame, method: str, batch: Any = None) -> pd.Series:
    """LPPD by data set and split, at the setting with the best validation score."""
    runs = runs[(runs["method"] == method) & runs["valid"].notna()]
    runs = runs if batch is None else runs[runs["batch"] == batch]
    places = runs.groupby(["data", "split"])["valid"].idxmax()
    return runs.loc[places].set_index(["data", "split"])["lppd"]


@table("centers")
def centres(runs):
    """Every method."""
    columns = {f"psmile, {x}": chosen(runs, "psmile", x) for x in (100, 400, 1_600, "full")}
    columns |= {f"centres, {x}": chosen(runs, "centres", x) for x in (100, 400)}
    columns["two gradients, 100"] = chosen(runs, "two gradients")
    columns["angle .12, 100"] = chosen(runs, "larger angle")
    columns |= {x: chosen(runs, x) for x in ("AdamW", "Muon", ENSEMBLE, "CatBoost")}
    return pd.DataFrame(columns).groupby("data").agg(mean_error).reindex(DATA), runs


def gains(runs: pd.DataFrame) -> pd.DataFrame:
    """Differences by data set and split."""
    psmile, ours = chosen(runs, "psmile", 100), chosen(runs, "centres")
    found = {"centres 100 - psmile 100": chosen(runs, "centres", 100) - psmile}
    found["two gradients - psmile, 100"] = chosen(runs, "two gradients") - psmile
    found["centres - psmile, both by validation"] = ours - chosen(runs, "psmile")
    for method in ("AdamW", "Muon", ENSEMBLE, "CatBoost"):
        found[f"centres - {method.removeprefix('deep ')}"] = ours - chosen(runs, method)
    return pd.DataFrame(found)


@table("centers")
def centres_gains(runs):
    """Of each data set."""
    return gains(runs).groupby("data").agg(mean_error, sign="+").reindex(DATA), runs


@table("centers")
def centres_mean(runs):
    """Of all data sets."""
    return gains(runs).apply(mean_error, sign="+").to_frame().T, runs


# Networks on images and text, and the ladder of sizes.
NAMES = {"lenet": "LeNet", "resnet7": "ResNet-7", "resnet18": "ResNet-18", "vit": "ViT"}
NAMES |= {"nanogpt": "GPT", "perceptron": "perceptron"}
SCORES = {"lppd": "LPPD", "accuracy": "accuracy", "ece": "ECE", "ood_auroc": "AUROC, foreign"}
AROUND, COLD = {"allowed": 0.03}, {"angle": 0.3, "temperature": "auto"}
VARIANTS = {text_of({}): "", text_of(AROUND): ", around the start", text_of(COLD): ", cold"}


def named(runs: pd.DataFrame) -> pd.Series:
    """Name of a network, with what differs from its form."""
    changed = runs["form"].str.split().str[1:].map(lambda parts: ", ".join(["", *parts]))
    return runs["task"].map(NAMES) + changed


def listed(options: str) -> str:
    """Options of a cell."""
    pairs = json.loads(options).items()
    return ", ".join(f"{name} {short(x) if isinstance(x, float) else x}" for name, x in pairs)


@table("networks", query="form == 'small'")
def scale(runs):
    """Samplers and baselines at their usual settings, paired with the ensembles by seed."""
    runs = ordered(runs[runs["options"].isin(VARIANTS)], task=NAMES)
    is_start = runs["method"] == ENSEMBLE
    before = runs[is_start].groupby("task")["lppd"].agg(mean_error, digits=4)
    pairs = runs[~is_start].merge(
        runs[is_start], on=["task", "seed"], suffixes=("", " before"), how="left"
    )
    gains = {f"{x}, gain": pairs[name] - pairs[f"{name} before"] for name, x in SCORES.items()}
    pairs = pairs.assign(**gains, network=named(pairs))
    pairs["method"] += pairs["options"].map(VARIANTS)
    groups = pairs.groupby(["network", "method"], sort=False)
    rows = {ENSEMBLE: groups["task"].first().map(before)}
    rows["LPPD"] = groups["lppd"].agg(mean_error, digits=4)
    rows |= {gain: groups[gain].agg(mean_error, digits=4, sign="+") for gain in gains}
    return pd.DataFrame(rows | {"seeds": groups.size()}), runs


# Of networks that AdamW has trained, and of those that Muon has.
BY_ADAMW, BY_MUON = "not form.str.contains('muon_rate')", "form.str.contains('muon_rate')"


@table("networks", query=f"form.str.split().str[0] == 'small' and {BY_ADAMW}")
def scale_cells(runs):
    """All cells of the small form."""
    keys, runs = ["network", "method", "options"], ordered(runs, task=NAMES)
    runs = runs.assign(network=named(runs), options=runs["options"].map(listed))
    chains = runs.explode("chains")
    chains["sampling"] = chains["chains"].str["seconds"].str[1].astype(float)
    chains["peak"] = chains["chains"].str["peak_mib"].astype(float)
    groups, of_chains = (x.groupby(keys, sort=False) for x in (runs, chains))
    rows = {title: groups[name].agg(mean_error, digits=4) for name, title in SCORES.items()}
    rows["one chain"] = groups["single.lppd"].agg(mean, digits=4)
    rows["seconds"] = of_chains["sampling"].agg(mean, digits=0).replace("", "resumed")
    rows["MiB"] = of_chains["peak"].max().map("{:.0f}".format)
    return pd.DataFrame(rows), runs


# Every method at the setting that validation data choose, and the same for its rivals.
TRAINED_ON = {"checkpoints": "AdamW trains on", "muon": "Muon trains on"}
MATRICES = (ENSEMBLE, "checkpoints", "muon", OURS, "spectral")


def over(picked: pd.DataFrame, rival: str, score: str = "lppd") -> pd.Series:
    """Difference from a rival; its error is over seeds, or over parts of the data of one or two."""
    keys = ["task", "form", "seed"]
    theirs = picked.loc[picked["method"] == rival, [*keys, score, "parts"]]
    pairs = picked[~picked["method"].isin([rival, ENSEMBLE])]
    pairs = pairs.merge(theirs, on=keys, suffixes=("", " rival"))

    def gap(of: pd.DataFrame) -> str:
        parts = of[["parts", "parts rival"]].dropna()
        if score == "lppd" and len(of) < 3 and len(parts) == len(of):
            return mean_error(np.subtract(*(np.mean([*parts[x]], axis=0) for x in parts)), 4, "+")
        return mean_error(of[score] - of[f"{score} rival"], 4, "+")

    groups = pairs.groupby(["task", "form", "method"])
    return groups[[score, f"{score} rival", "parts", "parts rival"]].apply(gap)


def beside(picked: pd.DataFrame, groups: Any, rivals: Mapping[str, str]) -> dict[str, pd.Series]:
    """Scores of networks, and their LPPD over those of some methods, by the title of a column."""
    return {
        "LPPD": groups["lppd"].agg(mean_error, digits=4),
        **{title: over(picked, rival) for title, rival in rivals.items()},
        "accuracy": groups["accuracy"].agg(mean_error, digits=4),
        "ECE after a temperature": groups["calibrated_ece"].agg(mean_error, digits=4),
        "over Muon ": over(picked, "muon", "calibrated_ece"),
        "AUROC foreign": groups["ood_auroc"].agg(mean_error, digits=4),
        "over Muon  ": over(picked, "muon", "ood_auroc"),
        "one chain": groups["single.lppd"].agg(mean, digits=4),
        "seeds": groups.size(),
    }


@table("networks", query=f"form.str.startswith('small') and valid_lppd.notna() and {BY_ADAMW}")
def matrices(runs):
    """AdamW, Muon, and samplers that move matrices as matrices."""
    keys = ["task", "form", "method"]
    picked = best(runs, *keys, setting="options", score="valid_lppd")
    picked = ordered(picked, task=NAMES, method=MATRICES)
    groups = picked.groupby(keys, sort=False)
    options = groups["options"].first().map(listed)
    rows = beside(picked, groups, {"over AdamW": "checkpoints", "over Muon": "muon"})
    table = pd.DataFrame(rows).reindex(options.index).reset_index()
    method = table.pop("method").replace(TRAINED_ON) + [x and f", {x}" for x in options]
    table.insert(0, "network", named(table))
    table.insert(1, "method, setting by validation data", method)
    return table.drop(columns=["task", "form"]), picked


@table("networks", query=BY_MUON)
def muon_starts(runs):
    """Chains from starts by Muon. Validation data choose settings of Muon and AdamW alone."""
    keys, is_optimizer = ["task", "form", "method"], runs["method"].isin(TRAINED_ON)
    picked = best(runs[is_optimizer], *keys, setting="options", score="valid_lppd")
    picked = ordered(pd.concat([picked, runs[~is_optimizer]]), method=MATRICES)
    picked = ordered(picked.sort_values("form", kind="stable"), task=NAMES)
    settings = picked["options"].map(listed)
    own = ~picked["method"].isin([*TRAINED_ON, ENSEMBLE])
    picked["method"] += (", " + settings).where(own & (settings != ""), "")
    groups = picked.groupby(keys, sort=False)
    rows = beside(picked, groups, {"over Muon": "muon"})
    table = pd.DataFrame(rows).reindex(groups.size().index).reset_index()
    kept = [
        [x for x in parts if x.split("=")[0] in ("width", "num_train") and x != "width=1.0"]
        for parts in table["form"].str.split().str[1:]
    ]
    names = [", ".join([NAMES[x], *more]) for x, more in zip(table["task"], kept, strict=True)]
    table.insert(0, "network", names)
    table["method"] = table["method"].replace(TRAINED_ON)
    return table.drop(columns=["task", "form"]), picked


@table("ladder")
def ladder(runs):
    """LPPD above the ensemble of the starts, at both budgets."""
    priors = ("N(0, 1)", "fan in", "around the start", "cold", "training on")
    runs = ordered(runs, size=("1e4", "1e5", "1e6", "1e7"), prior=priors)
    budgets = [runs[f"{budget}.lppd"] - runs["ensemble.lppd"] for budget in (3_000, 12_000)]
    gains = [
        " / ".join(filter(None, (number(x, "+.3f") for x in of)))
        for of in zip(*budgets, strict=True)
    ]
    runs = runs.assign(
        gain=gains,
        weights=[
            f"{n:,}" if n < 100_000 else f"{n:.1e}".replace("e+0", "e")
            for n in runs["num_parameters"]
        ],
        share=numbers(runs["num_parameters"] / runs["num_data"], ".2f"),
        column=[f"angle {angle}" for angle in runs["angle"]],
    )
    rows = runs.pivot(index=["weights", "share", "prior"], columns="column", values="gain")
    order = pd.MultiIndex.from_frame(runs[["weights", "share", "prior"]].drop_duplicates())
    return rows.reindex(order).rename_axis(["weights", "d / N", "prior"]), runs


@table("ladder", query="prior in ['N(0, 1)', 'cold']")
def rises(runs):
    """How far the loss of the draws rose, and what their average gained."""
    runs = ordered(runs, size=("1e4", "1e5", "1e6", "1e7"))
    rows = runs[["size", "prior", "angle"]].rename(columns={"size": "weights"})
    rows["d / N"] = numbers(runs["num_parameters"] / runs["num_data"], ".2f")
    for budget in (3_000, 12_000):
        for title, entry in (("rise", "loss"), ("gain", "lppd")):
            change = runs[f"{budget}.{entry}"] - runs[f"ensemble.{entry}"]
            rows[f"{title}, {budget:,}"] = [number(x, "+.3f") for x in change]
    return rows, runs


@table("ladder")
def ladder_cells(runs):
    """What was seen at the longest budget of each run."""
    runs = runs.sort_values(["size", "prior"], kind="stable")
    rows = {
        "weights": runs["size"],
        "prior": runs["prior"],
        "angle": runs["angle"],
        "gradients": numbers(runs["num_gradients"], ","),
        "precision": runs["precision"].map(short),
    }
    seen = {"LPPD": 4, "accuracy": 4, "single": 3, "loss": 3, "norm": 0, "distance": 1, "R-hat": 2}
    for title, digits in seen.items():
        name = title.lower().replace("-", "_")
        at_end = [run[f"{run['num_gradients']}.{name}"] for _, run in runs.iterrows()]
        rows[title] = [number(x, f".{digits}f") or "n/a" for x in at_end]
    return pd.DataFrame(rows), runs


# Draws against NUTS, and known posteriors.
# Fewer independent draws than these do not show whether a bound is met.
ENOUGH_DRAWS = 100
BOUNDS = {"mean": 0.1, "sd": 0.1, "w1": 0.12}


def within(runs: pd.DataFrame) -> pd.Series:
    """Whether the largest net errors are small; few draws cannot show it."""
    is_met = (runs["mean max.net"] <= BOUNDS["mean"]) & (runs["sd max.net"] <= BOUNDS["sd"])
    return is_met.map({True: "yes", False: "no"}).where(
        runs["smallest_ess"] >= ENOUGH_DRAWS, "too few draws"
    )


def posteriors_met(runs: pd.DataFrame) -> str:
    """How many posteriors are within the bounds."""
    return f"{sum(within(runs) == 'yes')} of {len(runs)}"


@table("agreement", query="part == 'posteriors'")
def posteriors(runs):
    """Errors in posterior standard deviations."""
    rows = {
        "posterior": runs["data"],
        "sampler": runs["method"],
        "mean": numbers(runs["mean max.raw"]),
        "net": numbers(runs["mean max.net"]),
        "sd": numbers(runs["sd max.raw"]),
        "net ": numbers(runs["sd max.net"]),
        "smallest ESS": numbers(runs["smallest_ess"], ",.0f"),
        "within 0.1": within(runs),
    }
    return pd.DataFrame(rows), runs


def agreement(starts: list[dict[str, Any]]) -> str:
    """Median errors of mean, deviation and W1 over the test inputs, and the ESS."""
    net = [np.mean([start[f"{name} median"]["net"] for start in starts]) for name in BOUNDS]
    ess = np.mean([start["ess"] for start in starts])
    is_met = all(x <= bound for x, bound in zip(net, BOUNDS.values(), strict=True))
    shown = f"{', '.join(number(x, '.2f') for x in net)} ({ess:,.0f})"
    return f"**{shown}**" if is_met and ess >= ENOUGH_DRAWS else shown


@table("agreement", query="part == 'networks'")
def nuts_networks(runs):
    """Every sampler on two networks, by the size of its batches."""
    texts = runs.assign(text=runs["starts"].map(agreement))
    rows = texts.pivot(index="method", columns=["data", "share"], values="text").sort_index(axis=1)
    rows.columns = [f"{data}, N/{n}".removesuffix("/1") for data, n in rows.columns]
    return rows.reindex(runs["method"].unique()).rename_axis("mean, sd, W1 (ESS)"), runs


@table("agreement", query="part in ['posteriors', 'networks']")
def nuts_references(runs):
    """Quality of the references."""
    rows = runs.groupby(["data", "part"], sort=False).last().reset_index()
    shown = {
        "reference": rows["data"] + " (" + rows["part"] + ")",
        "largest R-hat": numbers(rows["reference.rhat"].map(max)),
        "smallest ESS": numbers(rows["reference.ess"].map(min), ",.0f"),
    }
    return pd.DataFrame(shown), rows


def shift(run: pd.Series) -> float:
    """Largest mean rank in standard errors, which sees a shift that chi^2 over 20 bins does not."""
    scale = math.sqrt(12 * sum(run["counts"][0]))
    return max(((rank - 0.5) * scale for rank in run["mean_rank"]), key=abs)


@table("agreement", query="part == 'calibration'")
def calibration(runs):
    """Ranks of the truth."""
    furthest = [max(ratios, key=lambda x: abs(x - 1)) for ratios in runs["variance_ratio"]]
    rows = {
        "model": runs["data"],
        "sampler": runs["method"],
        "data sets": runs["counts"].str[0].map(sum),
        "smallest p": runs["p"].map(min).map(short),
        "of": runs["p"].map(len),
        "largest shift, s.e.": numbers(runs.apply(shift, axis=1), ".1f"),
        "variance / uniform": [number(x, ".2f") for x in furthest],
        "lost": numbers(runs["num_lost"], ".0f"),
        "uniform": runs["is_uniform"].map({True: "yes", False: "no"}),
    }
    return pd.DataFrame(rows), runs


@table("tall")
def tall(runs):
    """Errors and costs of draws from tall data."""
    keys = ["problem", "num_data", "size", "method"]
    groups = runs.assign(
        num_data=numbers(runs["num_data"], ","),
        least=runs["variances"].str[0],
        most=runs["variances"].str[2],
        draws=runs["ess"].str[1],
    ).groupby(keys, sort=False)
    rows = {
        "error of the mean": groups["mean_error"].agg(mean_error),
        "of variances": groups["variance_error"].agg(mean_error),
        "smallest": numbers(groups["least"].min(), ".2f"),
        "largest variance / exact": numbers(groups["most"].max(), ".2f"),
        "effective draws": numbers(groups["draws"].min(), ",.0f"),
        "examples per effective draw": groups["examples"].agg(mean_error, digits=0),
        "effective draws per second": groups["per_second"].agg(mean_error, digits=1),
        "R-hat": numbers(groups["rhat"].max(), ".2f"),
    }
    return pd.DataFrame(rows).rename_axis(["posterior", "data", "size", "method"]), runs


PLACES = pd.MultiIndex.from_product([TARGETS, NOISES], names=["target", "noise"])
LEAPFROG, LENGTH = "psmile_naive leapfrog", "psmile_naive leapfrog L=10"
SEARCHED = ["smile_naive", "sgld", "sghmc", "psmile_naive", LEAPFROG, LENGTH]
LONG = "gradients == 1_000_000 and kind == 'gaussian'"


def biases(runs: pd.DataFrame, part: str = "mixing.", columns: str = "sampler") -> pd.DataFrame:
    """Bias ± error by place, of chains that mix or, without `part`, of all."""
    texts = map(value_error, runs[f"{part}bias"], runs[f"{part}error"])
    runs = runs.assign(text=[text or "none" for text in texts])
    return runs.pivot(index=["target", "noise"], columns=columns, values="text").reindex(PLACES)


def of_paper(paper: pd.DataFrame, samplers: Sequence[str] = ("psmile_naive",)) -> pd.DataFrame:
    """Biases of the paper, as our records name them."""
    paper = paper.query("quantity == 'b2' and kind == 'gaussian' and sampler in @samplers")
    return paper.rename(columns={"value": "bias"})


def by_place(rows: pd.DataFrame) -> pd.DataFrame:
    """Join target and noise."""
    rows.index = pd.Index([", ".join(place) for place in rows.index], name="target, noise")
    return rows


@table("analytic", "paper", query=f"{LONG} and sampler == '{OURS}'")
def bias(runs, paper):
    """`psmile` beside the paper."""
    found = of_paper(paper)
    ours, theirs = biases(runs)[OURS].unstack("target"), biases(found, "")["psmile_naive"]
    rows = {}
    for target in TARGETS:
        rows |= {target: ours[target], f"paper{len(rows) * ' '}": theirs[target]}
    title = "noise: psmile / paper's pSMILE-naive, best step"
    return pd.DataFrame(rows).reindex(NOISES).rename_axis(title), pd.concat([runs, found])


@table("analytic", "paper", query=f"{LONG} and sampler in {[OURS, LEAPFROG, LENGTH]}")
def bias_forms(runs, paper):
    """Two searched forms, with their step sizes."""
    found = of_paper(paper)
    steps = runs.assign(step=runs["mixing.step_size"].map(lambda x: f" ({short(x)})" if x else ""))
    steps = steps.pivot(index=["target", "noise"], columns="sampler", values="step")
    shown = {OURS: "**psmile**, nothing chosen", LEAPFROG: "psmile_naive, best step"}
    shown |= {LENGTH: "the same, L = 10"}
    rows = (biases(runs) + steps.replace(" ()", "")).reindex(index=PLACES, columns=[*shown])
    rows = rows.rename(columns=shown)
    rows["paper: pSMILE-naive, best step"] = biases(found, "")["psmile_naive"]
    return by_place(rows), pd.concat([runs, found])


@table("analytic", "paper", query=f"{LONG} and sampler in {SEARCHED}")
def bias_smallest(runs, paper):
    """Every searched sampler, and the paper in a second line of each place."""
    found = of_paper(paper, SEARCHED)
    lines = [by_place(biases(runs, "")), biases(found, "").set_axis(["paper"] * len(PLACES))]
    rows = pd.concat(lines).reindex(columns=SEARCHED)
    both = rows.iloc[np.arange(2 * len(PLACES)).reshape(2, -1).T.ravel()]
    return both.rename_axis("target, noise"), pd.concat([runs, found])


@table("analytic", "paper", query=f"{LONG} and sampler == '{LEAPFROG}'")
def paper_chosen(runs, paper):
    """Chains that chose the step size, which come after decades with four chains, and others."""
    found = of_paper(paper)
    searched = [
        number(next(bias for size, bias, _ in searched[7:] if math.isclose(size, step)))
        for searched, step in zip(
            runs["searched_step_bias_effective"], runs["step_size"], strict=True
        )
    ]
    chose = pd.Series(searched, pd.MultiIndex.from_frame(runs[["target", "noise"]]))
    rows = {"b², ten chains that chose the step": chose.reindex(PLACES)}
    rows["20 fresh chains"] = biases(runs, "")[LEAPFROG]
    rows["paper, chains that chose it"] = biases(found, "")["psmile_naive"]
    return by_place(pd.DataFrame(rows)), pd.concat([runs, found])


def compared_biases(ours: pd.DataFrame, theirs: pd.DataFrame, is_behind: bool) -> str:
    """In how many places a bias is above another one by more than two standard errors, or not."""
    pairs = ours.merge(theirs, on=["target", "noise"], suffixes=("", " other"))
    least = 2 * np.hypot(pairs["error"], pairs["error other"])
    gap = pairs["bias"] - pairs["bias other"]
    return f"{sum((gap > least) == is_behind)} of {len(pairs)}"


def mixing(runs: pd.DataFrame, *samplers: str) -> pd.DataFrame:
    """The smallest bias of chains of these samplers that mix, in each place."""
    runs = runs[runs["sampler"].isin(samplers)].sort_values("mixing.bias")
    least = runs.drop_duplicates(["target", "noise"])[
        ["target", "noise", "mixing.bias", "mixing.error"]
    ]
    return least.rename(columns=lambda name: name.removeprefix("mixing."))


# Costs.
STEPS = ("adamw", "sgd", "blackjax sgld", "sgld", "smile_naive", "smile", "psmile_naive", OURS)
ALONE = "`of`.isna()"


def step_name(cell: Record) -> str:
    """What a cell of costs measures."""
    chains = f", {cell['chains']} chains" if cell["chains"] > 1 else ""
    if cell["part"] == "network":
        loop = ", Python loop" if "per_program" in cell else ""
        return f"whole step, {cell['network']}{chains}{loop}"
    count = cell["leaves"]
    leaves = "" if count == 20 else f", {count} {'leaf' if count == 1 else 'leaves'}"
    kind = "" if cell["grads"] == "float32" else f", {cell['grads']}"
    return f"update, 10^{len(str(cell['parameters'])) - 1} parameters{leaves}{kind}{chains}"


def ratios(
    runs: pd.DataFrame,
    methods: Iterable[str] = STEPS,
    title: str = "time / AdamW",
    field: str = "ratio",
) -> Made:
    """Costs in units of AdamW's."""
    rows = {title: [step_name(record["cell"]) for record in runs["record"]]}
    rows |= {x: numbers(runs[f"methods.{x}.{field}"], ".2f").to_list() for x in methods}
    return pd.DataFrame(rows), runs


compiling = partial(ratios, title="compilation / AdamW", field="compile_ratio")
MAIN = [method for method in STEPS if method not in ("adamw", "blackjax sgld")]
LARGE_OR_SMALL = "leaves == 20 and grads == 'float32' and parameters in [1_000, 10_000_000]"
FEW_CELLS = f"{ALONE} and chains == 1 and (part == 'network' or {LARGE_OR_SMALL})"
TABLES |= {
    "step-cost-all": (ratios, ALONE, ["step_cost"]),
    "compilation": (compiling, ALONE, ["step_cost"]),
    "step-cost": (partial(ratios, methods=MAIN), FEW_CELLS, ["step_cost"]),
    "step-cost-matrices": (
        partial(ratios, methods=(OURS, "muon", "spectral")),
        "`of` == 'matrices'",
        ["step_cost"],
    ),
}


# Faults.
@table("faults")
def faults(runs):
    """The last run of each part of a campaign."""
    last = runs.drop_duplicates(["campaign", "of"], keep="last")
    groups = last.groupby("campaign")
    rows = groups[["cases", "silent", "raw", "lost"]].sum().map("{:,.0f}".format)
    rows["date"] = groups["date"].agg(lambda of: ", ".join(sorted({*of})))
    rows["command"] = groups["command"].agg(lambda of: ", ".join(f"`{x}`" for x in of.unique()))
    return rows.reindex(runs["campaign"].unique()), last


# Which method.
MUON = "checkpoints of Muon"
PROBLEMS = {
    "digits": "digits, d / N = 4.5, 4,000 gradients",
    "energy": "energy, d / N = 1.3, 10,000 gradients",
    "airfoil": "airfoil, d / N = 0.63, 10,000 gradients",
}
# What of LeNet is in each column.
ON_LENET = {
    ENSEMBLE: (ENSEMBLE, {}),
    "checkpoints": ("checkpoints", {"learning_rate": 0.002}),
    MUON: ("muon", {"learning_rate": 0.008}),
    OURS: (OURS, {}),
    "psmile, cold": (OURS, COLD),
}
SHOWN = [*ON_LENET]


def compared(runs: pd.DataFrame) -> list[dict[str, Any]]:
    """Results of `compare.py` on a problem: methods by seed; later records replace rows."""
    by_seed: dict[int, dict[str, Any]] = {}
    for record in (record for record in runs["record"] if "smoke" not in record["cell"]):
        by_seed.setdefault(record["cell"]["seed"], {}).update(record["methods"])
    return [rows for _, rows in sorted(by_seed.items())]


def all_methods(runs: pd.DataFrame) -> Made:
    """The table of `compare.py`."""
    header, lines = verdict.cells(compared(runs))
    return pd.DataFrame(lines, columns=header), runs


def advice(runs: pd.DataFrame) -> str:
    """The three sentences of `compare.py`."""
    return " ".join(verdict.sentences(compared(runs)))


@table("which_method", "networks")
def which_method_short(runs, networks):
    """The main methods on all problems, and on LeNet in the benchmark of networks."""
    lenet = networks.query("task == 'lenet' and form == 'small'")
    rows, used = [], [runs]
    for problem, title in PROBLEMS.items():
        results = compared(runs[runs["problem"] == problem])
        lppd = {x: verdict.column(results, x, "lppd") for x in results[0] if x != verdict.CHOOSER}
        others = {x: values for x, values in lppd.items() if values and x not in SHOWN}
        best = max(others, key=lambda name: np.mean(others[name]))
        row = {"problem": title} | {name: mean_error(lppd[name]) for name in SHOWN}
        rows.append(row | {"best of the others": f"{best}: {mean_error(others[best])}"})
    row = {"problem": "LeNet, d / N = 1.1, 12,000 gradients"}
    for name, (method, options) in ON_LENET.items():
        is_of = (lenet["method"] == method) & (lenet["options"] == text_of(options))
        row[name] = mean_error(lenet["lppd"][is_of])
        used.append(lenet[is_of])
    return pd.DataFrame([*rows, row]), pd.concat(used)


# What stands within a line: a function, the filter, and the files.
USUAL = "parameters == 10_000_000 and leaves == 20 and chains == 1 and grads == 'float32'"


def step_of(method: str, digits: int, query: str) -> tuple:
    """Cost of a step in units of AdamW's."""
    cost = f"methods.{method}.ratio"
    return lambda runs: number(runs[cost].iloc[0], f".{digits}f"), query, ["step_cost"]


FIGURES: dict[str, tuple[Callable[..., str], str, Sequence[str]]] = {
    "paper rows": (paper_rows.tally, "", paper_rows.FILES),
    "quickstart LPPD": (lambda runs: versus(runs, "LPPD")[-1], "", ["quickstart_seeds"]),
    "quickstart ECE": (lambda runs: versus(runs, "ECE")[-1], "", ["quickstart_seeds"]),
    "quickstart tempered": (
        lambda runs: versus(runs, "ECE", TEMPERED)[-1],
        "",
        ["quickstart_seeds"],
    ),
    "uci wins, scale_adapted_sghmc": (lambda runs: wins(runs, SGHMC), JOINT, ["uci"]),
    "uci losses, psmile_naive": (lambda runs: wins(runs, "psmile_naive", -1), JOINT, ["uci"]),
    "yacht lost": (lost, f"{JOINT} and data == 'yacht' and method == '{OURS}'", ["uci"]),
    "posteriors met": (posteriors_met, "part == 'posteriors'", ["agreement"]),
    "bias competitive": (
        lambda runs: compared_biases(mixing(runs, OURS), mixing(runs, LEAPFROG, LENGTH), False),
        LONG,
        ["analytic"],
    ),
    "bias behind paper": (
        lambda runs, paper: compared_biases(mixing(runs, OURS), of_paper(paper), True),
        LONG,
        ["analytic", "paper"],
    ),
    "step lenet, psmile": step_of(OURS, 2, "network == 'lenet'"),
    "step gpt, psmile": step_of(OURS, 2, "network == 'gpt'"),
    "update psmile": step_of(OURS, 1, USUAL),
    "update smile": step_of("smile", 1, USUAL),
}
for problem in PROBLEMS:
    where = f"problem == '{problem}'", ["which_method"]
    TABLES[f"which-method {problem}"] = all_methods, *where
    FIGURES[f"which-method {problem}"] = advice, *where


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
def frame_of(name: str) -> pd.DataFrame:
    """Records of a file."""
    return frame(read(RESULTS / f"{name}.jsonl"))


def result(kind: str, name: str, records: list[Record] | None = None) -> Any:
    """What a function makes of the files, or of some records in place of its first file's."""
    make, query, files = (TABLES if kind == "table" else FIGURES)[name]
    runs, *others = map(frame_of, files)
    if records is not None:
        # Fields that only other records have are empty.
        few = frame(records)
        runs = few.reindex(columns=runs.columns.union(few.columns, sort=False))
    runs = runs.query(query, engine="python") if query else runs
    return make(runs, *others) if len(runs) else None


def shown(name: str, records: list[Record] | None = None) -> str:
    """A table in Markdown."""
    made = result("table", name, records)
    return markdown(*made) if made else NO_RECORD


def content(kind: str, name: str) -> str | None:
    """What stands between the markers; None if there is no such table or figure."""
    if name not in (TABLES if kind == "table" else FIGURES):
        return None
    return f"\n{shown(name)} " if kind == "table" else result(kind, name) or NO_RECORD


def rewritten(text: str) -> str:
    """A page with the content of all known markers replaced."""

    def replace(found: re.Match[str]) -> str:
        kind, name, old = found.groups()
        if OPENED.search(old) or (new := content(kind, name)) is None:
            return found[0]
        return f"<!-- {kind} {name} -->{new}<!-- end -->"

    return MARKED.sub(replace, text)


def complaints(text: str, page: str) -> Iterator[str]:
    """Sentences that say what is wrong with a page."""
    for marked in MARKED.finditer(text):
        kind, name, old = marked.groups()
        inner = OPENED.search(old)
        if inner:
            yield f"{page}: the marker of {kind} `{name}` is not closed before `{inner[1]}` begins."
        elif (new := content(kind, name)) is None:
            yield f"{page}: there is no {kind} `{name}` in benchmarks/tables.py."
        elif old != new:
            yield f"{page}: {kind} `{name}` is stale; run `python benchmarks/tables.py`."
    rest = MARKED.sub("", text)
    yield from (f"{page}: the marker of `{name}` is not closed." for name in OPENED.findall(rest))
    if "<!-- end -->" in rest:
        yield f"{page}: an end marker closes nothing."
    for table in BARE.findall(CODE.sub("", rest)):
        yield f"{page}: a table is neither between markers nor frozen: `{table[:60]}`."


def uncommitted() -> Iterator[str]:
    """Sentences on records of uncommitted code."""
    for path in sorted(RESULTS.glob("*.jsonl")):
        for place, record in enumerate(read(path), 1):
            if any(part.get("dirty") for part in (record, *record.get("chains", ()))):
                yield f"{path.name}: record {place} was made with --allow-dirty."


def main() -> int:
    """Rewrite the pages, or check them, or write the records as CSV files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing, list what is stale")
    parser.add_argument("--csv", type=Path, metavar="FOLDER", help="write a file for each script")
    arguments = parser.parse_args()
    if arguments.csv:
        arguments.csv.mkdir(parents=True, exist_ok=True)
        for path in RESULTS.glob("*.jsonl"):
            runs = frame_of(path.stem).drop(columns="record")
            runs.to_csv(arguments.csv / f"{path.stem}.csv", index=False)
        return 0
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
