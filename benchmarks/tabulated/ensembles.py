"""The average of draws against the networks that the chains start from, over seeds."""

from collections.abc import Sequence
from statistics import fmean

from benchmarks.tabulated.table import Record, Table, mean_error, minus, number

ENSEMBLE, OURS, MAP = "deep ensemble", "psmile", "MAP"
METHODS = (ENSEMBLE, OURS)
PAIRED = "difference, paired"
TITLES: dict[str, dict[str, str]] = {
    "quickstart": {"entropy": "entropy, digits", "shuffled": "entropy, shuffled pixels"},
    "lora": {"entropy": "entropy, held-out", "foreign": "entropy, foreign"},
}
# Data of the estimators, and the level of sets and intervals.
DATA, LEVEL = ("digits", "diabetes", "energy", "concrete"), 0.9
NETWORKS = {"mlp": "perceptron, digits", "cnn": "convolutions, MNIST"}


def _scores(found: Sequence[Record], method: str, score: str) -> list[float]:
    return [record["scores"][method][score] for record in found]


def _data(found: Sequence[Record], data: str) -> list[Record]:
    return [record for record in found if record["cell"]["data"] == data]


# Quickstart.


def quickstart(found: Sequence[Record]) -> Table:
    """Test scores, and their differences by seed."""
    names: list[str] = list(found[0]["scores"][ENSEMBLE])
    sampler = found[0]["sampler"]
    rows = [
        [method, *(number(fmean(_scores(found, method, name)), 4) for name in names)]
        for method in (ENSEMBLE, sampler)
    ]
    rows.append([PAIRED, *(quickstart_difference(found, name) for name in names)])
    titles = (TITLES["quickstart"].get(name, name) for name in names)
    return Table(["test, mean over seeds", *titles], rows, found)


def quickstart_difference(found: Sequence[Record], score: str) -> str:
    """A score of the sampler minus that of the deep ensemble."""
    ours = _scores(found, found[0]["sampler"], score)
    return minus(ours, _scores(found, ENSEMBLE, score), 4)


# Estimators of scikit-learn.


def estimators(found: Sequence[Record]) -> Table:
    """LPPD and accuracy or RMSE, and their differences by seed."""
    rows = []
    for data in DATA:
        group, second = _data(found, data), "accuracy" if data == "digits" else "RMSE"
        if not group:
            continue
        cells = [data]
        for score in ("LPPD", second):
            theirs, ours = (_scores(group, method, score) for method in METHODS)
            cells += [mean_error(theirs), mean_error(ours), minus(ours, theirs)]
        cells.insert(4, second)
        methods = [record["scores"] for record in group]
        above = sum(x[OURS]["LPPD"] > x[ENSEMBLE]["LPPD"] for x in methods)
        seconds = number(fmean(record["cpu_seconds"] for record in group), 0)
        rows.append([*cells, f"{above} of {len(group)}", seconds])
    header = ["data", *(f"LPPD, {method}" for method in METHODS), PAIRED]
    header += ["beside it", *METHODS, PAIRED, "seeds above it in LPPD", "CPU s"]
    return Table(header, rows, found)


def estimators_won(found: Sequence[Record]) -> str:
    """On how many data sets LPPD is above the deep ensemble's."""
    groups = [group for data in DATA if (group := _data(found, data))]
    means = [[fmean(_scores(group, method, "LPPD")) for method in METHODS] for group in groups]
    return f"{sum(ours > theirs for theirs, ours in means)} of {len(means)}"


# Calibration after the fact.


def temperatures(found: Sequence[Record]) -> Table:
    """ECE and LPPD of the quickstart before and after, and their differences by seed."""
    used = _data(found, "digits")
    columns = [(when, score) for score in ("ECE", "LPPD") for when in ("before", "after")]
    rows = []
    for method in METHODS:
        fitted = [fmean(record["methods"][method]["temperature"]) for record in used]
        scores = (mean_error(_tempered(used, method, *column), 4) for column in columns)
        rows.append([method, mean_error(fitted), *scores])
    rows.append([PAIRED, "", *(tempered_difference(found, *column) for column in columns)])
    header = ["quickstart, mean over seeds", "temperature"]
    return Table(header + [f"{score}, {when}" for when, score in columns], rows, used)


def _tempered(used: Sequence[Record], method: str, when: str, score: str) -> list[float]:
    return [record["methods"][method][when][score] for record in used]


def tempered_difference(found: Sequence[Record], when: str, score: str) -> str:
    """A score of psmile minus the deep ensemble's, before or after temperature."""
    used = _data(found, "digits")
    theirs, ours = (_tempered(used, method, when, score) for method in METHODS)
    return minus(ours, theirs, 4)


def sets_and_intervals(found: Sequence[Record]) -> Table:
    """Coverage over all splits, what is allowed, and how large sets and intervals are."""
    rows = []
    for data in ("digits", "energy"):
        used = _data(found, data)
        for method in METHODS if used else ():
            of = [record["methods"][method] for record in used]
            num_splits = sum(len(one["coverage"]) for one in of)
            # The splits of a seed share their rows.
            coverage = [fmean(one["coverage"]) for one in of]
            low = LEVEL - 0.01
            high = LEVEL + 0.01 + fmean(x for one in of for x in one["slack"])
            is_met = "yes" if low <= fmean(coverage) <= high else "no"
            cells = [str(num_splits), mean_error(coverage, 4)]
            cells += [f"{number(low, 4)} to {number(high, 4)}", is_met]
            size = mean_error([fmean(one["size"]) for one in of])
            own = mean_error([one["own"]["coverage"] for one in of if "own" in one], 4)
            rows.append([data, method, *cells, size, own])
    header = ["data", "predictions", "splits", f"coverage of {LEVEL:.0%}", "allowed", "met"]
    return Table([*header, "classes or width", "own interval's coverage"], rows, found)


# Low-rank weights of a small GPT.


def _best(found: Sequence[Record]) -> dict[str, dict[int, Record]]:
    """Of each method and seed the record whose prior precision is best on validation text."""
    methods = sorted({record["cell"]["method"] for record in found}, key=lambda x: (x != MAP, x))
    best: dict[str, dict[int, Record]] = {method: {} for method in methods}
    for record in sorted(found, key=lambda record: record["valid"]):
        best[record["cell"]["method"]][record["cell"]["seed"]] = record
    return best


def _shared(best: dict[str, dict[int, Record]], method: str) -> list[list[Record]]:
    """Records of a method and of the MAP, of the seeds that both have."""
    seeds = sorted(best[method].keys() & best[MAP].keys())
    return [[best[name][seed] for seed in seeds] for name in (method, MAP)]


def _windows(records: Sequence[Record]) -> list[float]:
    """LPPD of each window of the test text, mean over seeds."""
    return [fmean(of) for of in zip(*(record["windows"] for record in records), strict=True)]


def lora(found: Sequence[Record]) -> Table:
    """Scores on the test text at the precision of each method that is best on validation text."""
    best, rows, differences = _best(found), [], []
    names: list[str] = list(found[0]["scores"])
    for method, records in best.items():
        columns = ([record["scores"][name] for record in records.values()] for name in names)
        rows.append([method, "", *(number(fmean(values), 4) for values in columns)])
        if method != MAP:
            ours, theirs = map(_windows, _shared(best, method))
            shown = (lora_difference(found, method, name) for name in names)
            differences.append([f"{method} - MAP", minus(ours, theirs, 4), *shown])
    used = [record for records in best.values() for record in records.values()]
    header = ["held-out text, mean over seeds", "LPPD, ± over windows"]
    header += [TITLES["lora"].get(name, name) for name in names]
    return Table(header, rows + differences, used)


def lora_cells(found: Sequence[Record]) -> Table:
    """Validation and test LPPD of every method and precision."""
    groups: dict[tuple[str, float], list[Record]] = {}
    for record in found:
        cell = record["cell"]
        groups.setdefault((cell["method"], cell["precision"]), []).append(record)
    rows = []
    for (method, precision), records in sorted(groups.items()):
        valid = [record["valid"] for record in records]
        test = [record["scores"]["LPPD"] for record in records]
        seeds = ", ".join(str(record["cell"]["seed"]) for record in records)
        rows.append([method, f"{precision:g}", seeds, mean_error(valid, 4), mean_error(test, 4)])
    header = ["method", "prior precision", "seeds", "LPPD, validation", "LPPD, held-out"]
    return Table(header, rows, found)


def lora_difference(found: Sequence[Record], method: str, score: str) -> str:
    """A score of the method minus that of the MAP."""
    ours, theirs = ([r["scores"][score] for r in group] for group in _shared(_best(found), method))
    return minus(ours, theirs, 4)


# Networks with far more parameters than data.


def around(found: Sequence[Record]) -> Table:
    """One row per network, prior and number of calls: means over the seeds."""
    rows = []
    for network, prior in dict.fromkeys((x["cell"]["network"], x["cell"]["prior"]) for x in found):
        mine = [x for x in found if (x["cell"]["network"], x["cell"]["prior"]) == (network, prior)]
        precisions = [x["precision"] for x in mine]
        ends = sorted({f"{min(precisions):.3g}", f"{max(precisions):.3g}"}, key=float)
        shown = f"around the weights, {' … '.join(ends)}" if prior == "local" else prior
        start = number(fmean(x["start_loss"] for x in mine), 4)
        for calls in dict.fromkeys(name for x in mine for name in x["calls"]):
            seen = [x["calls"][calls] for x in mine if calls in x["calls"]]
            names = ("train_excess", "excess", "gain")
            means = (mean_error([x[name] for x in seen], 4, "+") for name in names)
            rows.append(
                [NETWORKS[network], shown, f"{int(calls):,}", start, *means, str(len(seen))]
            )
    header = ["network", "prior, precision", "calls", "loss of the weights"]
    header += ["draws, training", "draws, test", "LPPD of the average", "seeds"]
    return Table(header, rows, found)
