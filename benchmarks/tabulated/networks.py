"""The paper's networks, in small and in full, and the ladder of sizes."""

import math
from collections.abc import Sequence
from statistics import fmean

from benchmarks.tabulated.table import Record, Table, mean_error, number, short, thousands
from benchmarks.tabulated.uci import DATA, USUAL, by_split, select

NAMES = {
    "lenet": "LeNet",
    "resnet7": "ResNet-7",
    "resnet18": "ResNet-18",
    "vit": "ViT",
    "nanogpt": "GPT",
}
ENSEMBLE = "deep ensemble"
SCORES = {"LPPD": "lppd", "accuracy": "accuracy", "ECE": "ece", "AUROC, foreign": "ood_auroc"}
SIZES = ("1e4", "1e5", "1e6", "1e7")
ANGLES = (0.003, 0.01, 0.03, 0.1, 0.3)
TASKS = {"lenet": "LeNet", "gpt": "small GPT"}
UCI_ANGLES = {"psmile": "0.03", "psmile, angle .04": "0.04", "psmile, angle .05": "0.05"}
LADDER = {"LPPD": 4, "accuracy": 4, "single": 3, "loss": 3, "norm": 0, "distance": 1, "r_hat": 2}


def _groups(found: Sequence[Record]) -> dict[tuple, list[Record]]:
    """Records of one cell but for the seed, in the order of tasks."""
    groups: dict[tuple, list[Record]] = {}
    for record in sorted(found, key=lambda r: list(NAMES).index(r["cell"]["task"])):
        cell = record["cell"]
        options = tuple(sorted(cell["options"].items(), key=str))
        key = cell["task"], cell["form"], cell["method"], options
        groups.setdefault(key, []).append(record)
    return groups


def _paired(group: Sequence[Record], base: Sequence[Record], score: str) -> list[float]:
    of = {record["cell"]["seed"]: record for record in base}
    pairs = [(record, of.get(record["cell"]["seed"])) for record in group]
    return [a[score] - b[score] for a, b in pairs if b and a.get(score) is not None]


def _variant(options: tuple) -> str:
    """What `psmile` samples, by the options of a cell."""
    names = {frozenset({"allowed"}): ", around the start"}
    names |= {frozenset({"temperature", "angle"}): ", cold"}
    return names.get(frozenset(dict(options)), "")


def gains(found: Sequence[Record]) -> Table:
    """`psmile` and an ensemble of checkpoints above the deep ensemble, in the small form."""
    groups, rows, used = _groups(found), [], []
    for (task, form, method, options), group in groups.items():
        variant = _variant(options)
        if form != "small" or method == ENSEMBLE or options and not variant:
            continue
        base = groups.get((task, form, ENSEMBLE, ()), [])
        differences = [_paired(group, base, score) for score in SCORES.values()]
        if not differences[0]:
            continue
        used += [r for r in (*group, *base) if r not in used]
        rows.append(
            [
                *(NAMES[task], method + variant),
                mean_error([r["lppd"] for r in base], 4),
                mean_error([r["lppd"] for r in group], 4),
                *(mean_error(values, 4, "+") for values in differences),
                str(len(group)),
            ]
        )
    header = ["network", "method", "deep ensemble", "LPPD"]
    return Table([*header, *(f"{s}, gain" for s in SCORES), "seeds"], rows, used)


def _told(options: Sequence[tuple]) -> str:
    return ", ".join(f"{name} {short(x) if isinstance(x, float) else x}" for name, x in options)


def cells(found: Sequence[Record]) -> Table:
    """Every method of the small form, mean over the seeds; time is that of one chain."""
    rows, used = [], []
    for (task, form, method, options), group in _groups(found).items():
        kind, *varied = form.split()
        if kind != "small":
            continue
        used += group
        chains = [chain for record in group for chain in record["chains"]]
        seconds = [x["seconds"][1] for x in chains if x["seconds"][1] is not None]
        rows.append(
            [
                *(", ".join([NAMES[task], *varied]), method, _told(options)),
                *(mean_error([r[s] for r in group if s in r], 4) for s in SCORES.values()),
                number(fmean(r["single"]["lppd"] for r in group), 4),
                number(fmean(seconds), 0) if seconds else "resumed",
                number(max(chain["peak_mib"] for chain in chains), 0),
            ]
        )
    header = ["network", "method", "options", *SCORES]
    return Table([*header, "one chain", "seconds", "MiB"], rows, used)


def pairs(found: Sequence[Record]) -> Table:
    """The cold `psmile` above its rivals, paired over test data and seeds, with 95 % limits."""
    rows = []
    for record in found:
        cell, rival = record["cell"], record["cell"]["rival"]
        _, *varied = cell["form"].split()
        shown = []
        for mean, error in (record["lppd"], record["single"]):
            shown += [f"{mean:+.4f} ± {error:.4f}", f"{mean - 1.96 * error:+.4f}"]
        rows.append(
            [
                ", ".join([NAMES[cell["task"]], *varied]),
                rival["method"],
                _told([*rival["options"].items()]),
                *shown,
                ", ".join(map(str, cell["seeds"])),
            ]
        )
    header = ["network", "rival", "options", "all chains", "at least", "one chain", "at least"]
    return Table([*header, "seeds"], rows, found)


def tiny(found: Sequence[Record]) -> Table:
    """Every method and setting of the paper's tables in the tiny form, and how its chains went.

    Energy errors are those of the first and of the last tenth of the draws; paths are in units of
    the norm of the weights that they began with.
    """
    groups, rows, used = _groups(found), [], []
    for (task, form, method, options), group in groups.items():
        kind, *settings = form.split()
        if kind != "tiny":
            continue
        used += group
        varied = [(name, x) for name, _, x in (setting.partition("=") for setting in settings)]
        base = groups.get((task, form, ENSEMBLE, ()), [])
        chains = [chain for record in group for chain in record["chains"]]
        gone = [c["distance"] / c["norms"][0] for c in chains if "distance" in c]
        undone = [c["num_rejected"] for c in chains if "num_rejected" in c]
        rows.append(
            [
                NAMES[task],
                method,
                _told([*options, *varied]),
                mean_error([r["lppd"] for r in group], 4),
                "" if method == ENSEMBLE else mean_error(_paired(group, base, "lppd"), 4, "+"),
                mean_error([r["accuracy"] for r in group], 3),
                number(fmean(r["single"]["lppd"] for r in group), 4),
                *(_ends(chains, name) for name in ("energy_mean", "energy_std")),
                number(fmean(undone), 0) if undone else "",
                short(fmean(gone)) if gone else "",
            ]
        )
    header = ["network", "method", "options", "LPPD", "gain", "accuracy", "one chain"]
    return Table([*header, "energy error", "its SD", "undone", "path"], rows, used)


def _ends(chains: Sequence[Record], name: str) -> str:
    """Means over chains of the first and the last tenth of the draws."""
    tenths = [[x[0], x[-1]] for chain in chains if (x := chain.get(name))]
    return " to ".join(number(fmean(x), 0) for x in zip(*tenths, strict=True) if None not in x)


def corruptions(found: Sequence[Record]) -> Table:
    """LPPD of corrupted images by severity, and what a method gains."""
    groups = _groups(found)
    severities = sorted({s for r in found for s in r["severities"]}, key=int)
    rows = []
    for (task, form, method, options), group in groups.items():
        base = groups.get((task, form, ENSEMBLE, ()), [])
        row = [NAMES[task], form, method + _variant(options)]
        for severity in severities:
            of = {r["cell"]["seed"]: r["severities"][severity]["lppd"] for r in base}
            values = {r["cell"]["seed"]: r["severities"][severity]["lppd"] for r in group}
            row.append(mean_error(list(values.values()), 4))
            shared = [values[s] - of[s] for s in values if s in of and method != ENSEMBLE]
            row.append(mean_error(shared, 4, "+"))
        rows.append(row)
    header = [x for s in severities for x in (f"severity {s}", "gain")]
    return Table(["network", "form", "method", *header], rows, found)


def paper(found: Sequence[Record], given: Sequence[Record]) -> Table:
    """LPPD of the paper's large networks, and ours in the same form."""
    groups, rows, used = _groups(found), [], []
    for record in given:
        cell = record["cell"]
        if record["quantity"] not in ("lppd", "perplexity") or cell.get("task") not in NAMES:
            continue
        if cell["task"] == "lenet" or "beside" in cell:
            continue
        options = {k: v for k, v in cell.items() if k not in ("task", "method")}
        ours = [
            r[record["quantity"]]
            for (task, form, method, _), group in groups.items()
            for r in group
            if (task, form, method) == (cell["task"], "paper", cell["method"])
            and options.items() <= r["cell"]["options"].items()
        ]
        used.append(record)
        rows.append(
            [
                NAMES[cell["task"]],
                cell["method"],
                _told([*options.items()]),
                record["quantity"].replace("lppd", "LPPD"),
                number(record["value"], 4),
                mean_error(ours, 4) if ours else "not run",
            ]
        )
    return Table(["network", "method", "options", "score", "paper", "ours"], rows, used)


def _gain(record: Record, budget: str) -> float:
    return record[budget]["lppd"] - record["ensemble"]["lppd"]


def ladder(found: Sequence[Record]) -> Table:
    """LPPD above the ensemble of the starts, by size, prior and angle, at both budgets."""
    rows, used = [], []
    for size in SIZES:
        for prior in dict.fromkeys(r["cell"]["prior"] for r in found):
            of = [r for r in found if (r["cell"]["size"], r["cell"]["prior"]) == (size, prior)]
            if not of:
                continue
            used += of
            some = of[0]
            ratio = some["num_parameters"] / some["num_data"]
            row = [thousands(some["num_parameters"]), number(ratio, 2), prior]
            for angle in ANGLES:
                gains = {
                    b: [_gain(r, b) for r in of if r["cell"]["angle"] == angle and b in r]
                    for b in ("3000", "12000")
                }
                row.append(" / ".join(mean_error(x, 3, "+") for x in gains.values() if x))
            rows.append(row)
    header = ["weights", "d / N", "prior", *(f"angle {angle}" for angle in ANGLES)]
    return Table(header, rows, used)


def ladder_cells(found: Sequence[Record]) -> Table:
    """Everything that was seen of each run, at its longest budget."""
    rows = []
    for record in sorted(found, key=lambda r: (r["cell"]["size"], r["cell"]["prior"])):
        cell, budget = record["cell"], max((b for b in record if b.isdigit()), key=int)
        seen = {k.lower(): v for k, v in record[budget].items()}
        rows.append(
            [
                *(cell["size"], cell["prior"], str(cell["angle"]), f"{int(budget):,}"),
                short(record["precision"]) if record["precision"] else "",
                *(
                    "n/a" if math.isnan(seen[name.lower()]) else number(seen[name.lower()], digits)
                    for name, digits in LADDER.items()
                ),
            ]
        )
    header = ["weights", "prior", "angle", "gradients", "precision", *LADDER]
    return Table([x.replace("r_hat", "R-hat") for x in header], rows, found)


def angles(uci: Sequence[Record], earlier: Sequence[Record], networks: Sequence[Record]) -> Table:
    """Test LPPD at three angles; differences paired by split or seed.

    On UCI the three angles ran on the scale of `uci_before.jsonl`.
    """
    rows, used = [], []
    for data in DATA:
        groups = []
        for method in UCI_ANGLES:
            source = earlier if method == "psmile" else uci
            groups.append(select(source, data=data, method=method, **USUAL))
        used += [record for group in groups for record in group]
        rows.append(_angle_row(data, [by_split(group) for group in groups]))
    for task in TASKS:
        groups = []
        for method in UCI_ANGLES:
            group = [
                r for r in networks if (r["cell"]["task"], r["cell"]["method"]) == (task, method)
            ]
            used += group
            groups.append({record["cell"]["seed"]: record["lppd"] for record in group})
        rows.append(_angle_row(TASKS[task], groups))
    pairs = [f"{angle} - 0.03" for angle in list(UCI_ANGLES.values())[1:]]
    return Table(["test LPPD, angle", *UCI_ANGLES.values(), *pairs], rows, used)


def _angle_row(name: str, groups: list[dict[int, float]]) -> list[str]:
    means = [number(fmean(x.values()), 4) if x else "not run" for x in groups]
    differences = []
    for other in groups[1:]:
        shared = sorted(other.keys() & groups[0].keys())
        differences.append(mean_error([other[s] - groups[0][s] for s in shared], 4, "+"))
    return [name, *means, *differences]
