"""Bias on known posteriors, beside the paper's figures."""

import math
from collections.abc import Sequence
from statistics import fmean, median

from benchmarks.tabulated.table import Record, Table, number, short, standard_error, value_error

TARGETS = ("gaussian", "rosenbrock", "funnel")
NOISES = ("isotropic", "diagonal", "correlated", "varied")
PLACES = [(target, noise) for target in TARGETS for noise in NOISES]
LEAPFROG, LENGTH = "psmile_naive leapfrog", "psmile_naive leapfrog L=10"
LONG, SHORT = 1_000_000, 200_000
# Column of ours: that of the paper.
THEIRS = {name: name for name in ("smile_naive", "sgld", "sghmc", "psmile_naive")}


def _cells(found: Sequence[Record], gradients: int) -> dict[tuple[str, ...], Record]:
    """Records by target, noise, sampler and kind of noise."""
    return {
        (cell["target"], cell["noise"], cell["sampler"], cell["kind"]): record
        for record in found
        for cell in [record["cell"]]
        if cell["gradients"] == gradients
    }


def _given(
    paper: Sequence[Record], place: tuple[str, str], sampler: str, kind: str = "gaussian"
) -> list[Record]:
    wanted = {"target": place[0], "noise": place[1], "sampler": sampler, "kind": kind}
    return [r for r in paper if r["quantity"] == "b2" and wanted.items() <= r["cell"].items()]


def _bias(record: Record | None, with_step: bool = False) -> str:
    """Bias ± error; of chains that mix `record["mixing"]`, which is None where none do."""
    if record is None:
        return "none"
    step = f" ({short(record['step_size'])})" if with_step and record["step_size"] else ""
    return value_error(record["bias"], record["error"]) + step


def summary(found: Sequence[Record], paper: Sequence[Record]) -> Table:
    """`psmile`, for which nothing was chosen, beside the paper's best step size."""
    cells, rows, used = _cells(found, LONG), [], []
    for noise in NOISES:
        row = [noise]
        for target in TARGETS:
            record = cells.get((target, noise, "psmile", "gaussian"))
            given = _given(paper, (target, noise), "psmile_naive")
            used += ([record] if record else []) + given
            row += [_bias(record["mixing"]) if record else "", *map(_bias_of_paper, given)]
        rows.append(row)
    header = ["noise: psmile / paper's pSMILE-naive, best step"]
    return Table(header + [x for target in TARGETS for x in (target, "paper")], rows, used)


def forms(found: Sequence[Record], paper: Sequence[Record]) -> Table:
    """What nobody chose, beside searched step sizes of chains that mix."""
    cells, rows, used = _cells(found, LONG), [], []
    for place in PLACES:
        records = [cells.get((*place, name, "gaussian")) for name in ("psmile", LEAPFROG, LENGTH)]
        if any(record is None for record in records):
            continue
        given = _given(paper, place, "psmile_naive")
        used += [*(r for r in records if r), *given]
        shown = [_bias(r["mixing"], with_step=True) for r in records if r]
        rows.append([", ".join(place), *shown, *map(_bias_of_paper, given)])
    header = ["target, noise", "**psmile**, nothing chosen", "psmile_naive, best step"]
    return Table([*header, "the same, L = 10", "paper: pSMILE-naive, best step"], rows, used)


def _bias_of_paper(record: Record) -> str:
    return value_error(record["value"], record["error"])


def competitive(found: Sequence[Record]) -> str:
    """How often `psmile` is within two standard errors of the better searched form."""
    cells, good, count = _cells(found, LONG), 0, 0
    for place in PLACES:
        ours, *theirs = (
            cells[*place, name, "gaussian"]["mixing"] for name in ("psmile", LEAPFROG, LENGTH)
        )
        best = min((r for r in theirs if r), key=lambda r: r["bias"])
        count += 1
        good += ours["bias"] - best["bias"] <= 2 * math.hypot(ours["error"], best["error"])
    return f"{good} of {count}"


def behind(found: Sequence[Record], paper: Sequence[Record]) -> str:
    """How often `psmile` is beyond two standard errors above the paper's searched pSMILE-naive."""
    cells, worse = _cells(found, LONG), 0
    for place in PLACES:
        ours, theirs = cells[*place, "psmile", "gaussian"], _given(paper, place, "psmile_naive")[0]
        error = math.hypot(ours["error"], theirs["error"])
        worse += ours["bias"] - theirs["value"] > 2 * error
    return f"{worse} of {len(PLACES)}"


def smallest(found: Sequence[Record], paper: Sequence[Record]) -> Table:
    """The published rule, smallest bias of all step sizes, in pairs of rows."""
    samplers = [*THEIRS, LEAPFROG, LENGTH]
    cells, rows, used = _cells(found, LONG), [], []
    for place in PLACES:
        records = [cells.get((*place, name, "gaussian")) for name in samplers]
        given = [_given(paper, place, THEIRS.get(name, "")) for name in samplers]
        used += [r for r in records if r] + [r for group in given for r in group]
        rows.append([", ".join(place), *(_bias(r) if r else "" for r in records)])
        rows.append(["paper", *("".join(map(_bias_of_paper, group)) for group in given)])
    return Table(["target, noise", *samplers], rows if used else [], used)


def others(found: Sequence[Record]) -> Table:
    """Shorter runs of all samplers, of chains that mix."""
    names = {
        LEAPFROG: "psmile_naive",
        LENGTH: "psmile_naive, L = 10",
        "smile_naive leapfrog": "smile_naive",
        "psgld": "psgld",
        "scale_adapted_sghmc": "scale-adapted SGHMC",
        "cyclical_sgld": "cyclical SGLD",
    }
    cells, rows, used = _cells(found, SHORT), [], []
    for place in PLACES:
        records = [cells.get((*place, name, "gaussian")) for name in names]
        used += [r for r in records if r]
        rows.append([", ".join(place), *(_bias(r["mixing"]) if r else "" for r in records)])
    return Table(["target, noise", *names.values()], rows if used else [], used)


def heavy_tails(found: Sequence[Record], paper: Sequence[Record]) -> Table:
    """Laplace and Student noise of the same covariance."""
    cells, rows, used = _cells(found, SHORT), [], []
    for place in PLACES:
        row = [", ".join(place)]
        for kind in ("gaussian", "laplace", "student"):
            record, given = (
                cells.get((*place, LEAPFROG, kind)),
                _given(paper, place, "psmile_naive", kind),
            )
            used += ([record] if record else []) + given
            row += [_bias(record["mixing"]) if record else "", *map(_bias_of_paper, given)]
        rows.append(row)
    header = ["target, noise"]
    header += [x for name in ("Gaussian", "Laplace", "Student") for x in (name, "paper")]
    return Table(header, rows if used else [], used)


def skewed(found: Sequence[Record]) -> Table:
    """Log-normal noise, from the records of the runs."""
    used = [r for r in found if r["cell"]["kind"].startswith("lognormal:")]
    used.sort(key=lambda r: float(r["cell"]["kind"].partition(":")[2]))
    sigmas = [r["cell"]["kind"].partition(":")[2] for r in used]
    rows = [
        ["b^2", *(_bias(r) for r in used)],
        ["best step size", *(short(r["step_size"]) for r in used)],
    ]
    return Table(["sigma", *sigmas], rows if used else [], used)


def rotations(found: Sequence[Record]) -> Table:
    """Correlated noise under other random rotations."""
    used, columns = [r for r in found if r["figure"] == "rotations"], {}
    for record in used:
        name, seed = record["cell"].split()
        columns.setdefault(name, {})[int(seed)] = record["bias_error_step"]
    rows = [
        [str(seed), *(value_error(*columns[name][seed][:2]) for name in columns)]
        for seed in sorted(set().union(*columns.values()))
    ]
    values = {name: [of[seed][0] for seed in sorted(of)] for name, of in columns.items()}
    if rows:
        rows.append(["mean", *(value_error(fmean(x), standard_error(x)) for x in values.values())])
        rows.append(["median", *(number(median(x)) for x in values.values())])
    return Table(["rotation", *columns], rows, used)


def decoherence(found: Sequence[Record]) -> Table:
    """Bias against explicit noise in units of that of the gradients."""
    used = [r for r in found if r["figure"] == "decoherence"]
    shares = sorted({entry[0] for r in used for entry in r["share_bias_error_step"]})
    rows = []
    for record in used:
        entries = {entry[0]: entry for entry in record["share_bias_error_step"]}
        cells = [
            value_error(*entries[share][1:3]) if share in entries else "none mixes"
            for share in shares
        ]
        rows.append([", ".join(record["cell"]), *cells])
    return Table(["b^2 at explicit / gradient noise", *map(short, shares)], rows, used)
