"""Bias on known posteriors, and the paper's figures."""

import math
from collections.abc import Sequence

from benchmarks.tabulated.table import Record, Table, short, value_error

TARGETS = ("gaussian", "rosenbrock", "funnel")
NOISES = ("isotropic", "diagonal", "correlated", "varied")
PLACES = [(target, noise) for target in TARGETS for noise in NOISES]
LEAPFROG, LENGTH = "psmile_naive leapfrog", "psmile_naive leapfrog L=10"
LONG, SHORT = 1_000_000, 200_000
FORMS = ("psmile", LEAPFROG, LENGTH)
PUBLISHED = ("smile_naive", "sgld", "sghmc", "psmile_naive")
OTHERS = {
    LEAPFROG: "psmile_naive",
    LENGTH: "psmile_naive, L = 10",
    "smile_naive leapfrog": "smile_naive",
    "psgld": "psgld",
    "scale_adapted_sghmc": "scale-adapted SGHMC",
    "cyclical_sgld": "cyclical SGLD",
}


class _Cells:
    """Biases of runs of one length and of the paper; `used` are the records in the table."""

    def __init__(self, found: Sequence[Record], gradients: int, paper: Sequence[Record] = ()):
        self.found = {
            (cell["target"], cell["noise"], cell["sampler"], cell["kind"]): record
            for record in found
            for cell in [record["cell"]]
            if cell["gradients"] == gradients
        }
        self.paper = [record for record in paper if record["quantity"] == "b2"]
        self.used: list[Record] = []

    def of_paper(self, place: tuple[str, str], sampler: str, kind: str) -> list[Record]:
        wanted = {"target": place[0], "noise": place[1], "sampler": sampler, "kind": kind}
        return [record for record in self.paper if wanted.items() <= record["cell"].items()]

    def ours(
        self,
        place: tuple[str, str],
        sampler: str,
        kind: str = "gaussian",
        mixing: bool = True,
        with_step: bool = False,
    ) -> str:
        """Bias ± error, of chains that mix or of all."""
        record = self.found.get((*place, sampler, kind))
        if record is None:
            return ""
        self.used.append(record)
        return _bias(record["mixing"] if mixing else record, with_step)

    def theirs(self, place: tuple[str, str], sampler: str, kind: str = "gaussian") -> str:
        """The same of the paper."""
        given = self.of_paper(place, sampler, kind)
        self.used += given
        return "".join(value_error(record["value"], record["error"]) for record in given)


def _bias(record: Record | None, with_step: bool = False) -> str:
    """Bias ± error; `record["mixing"]` is None where no chains mix."""
    if record is None:
        return "none"
    step = f" ({short(record['step_size'])})" if with_step and record["step_size"] else ""
    return value_error(record["bias"], record["error"]) + step


def summary(found: Sequence[Record], paper: Sequence[Record]) -> Table:
    """`psmile` without a chosen setting, and the paper's best step size."""
    cells, rows = _Cells(found, LONG, paper), []
    for noise in NOISES:
        rows.append([noise])
        for place in ((target, noise) for target in TARGETS):
            rows[-1] += [cells.ours(place, "psmile"), cells.theirs(place, "psmile_naive")]
    header = ["noise: psmile / paper's pSMILE-naive, best step"]
    return Table(header + [x for target in TARGETS for x in (target, "paper")], rows, cells.used)


def forms(found: Sequence[Record], paper: Sequence[Record]) -> Table:
    """`psmile` without a chosen setting, and searched step sizes of chains that mix."""
    cells, rows = _Cells(found, LONG, paper), []
    for place in PLACES:
        ours = (cells.ours(place, name, with_step=True) for name in FORMS)
        rows.append([", ".join(place), *ours, cells.theirs(place, "psmile_naive")])
    header = ["target, noise", "**psmile**, nothing chosen", "psmile_naive, best step"]
    return Table([*header, "the same, L = 10", "paper: pSMILE-naive, best step"], rows, cells.used)


def competitive(found: Sequence[Record]) -> str:
    """How often `psmile` is within two standard errors of the better searched form."""
    cells, good = _Cells(found, LONG).found, 0
    for place in PLACES:
        ours, *theirs = (cells[*place, name, "gaussian"]["mixing"] for name in FORMS)
        best = min((r for r in theirs if r), key=lambda r: r["bias"])
        good += ours["bias"] - best["bias"] <= 2 * math.hypot(ours["error"], best["error"])
    return f"{good} of {len(PLACES)}"


def behind(found: Sequence[Record], paper: Sequence[Record]) -> str:
    """How often `psmile` is beyond two standard errors above the paper's searched pSMILE-naive."""
    cells, worse = _Cells(found, LONG, paper), 0
    for place in PLACES:
        ours = cells.found[*place, "psmile", "gaussian"]
        theirs = cells.of_paper(place, "psmile_naive", "gaussian")[0]
        error = math.hypot(ours["error"], theirs["error"])
        worse += ours["bias"] - theirs["value"] > 2 * error
    return f"{worse} of {len(PLACES)}"


def smallest(found: Sequence[Record], paper: Sequence[Record]) -> Table:
    """The published rule, smallest bias of all step sizes, in pairs of rows."""
    cells, rows, samplers = _Cells(found, LONG, paper), [], (*PUBLISHED, LEAPFROG, LENGTH)
    for place in PLACES:
        ours = (cells.ours(place, name, mixing=False) for name in samplers)
        rows.append([", ".join(place), *ours])
        rows.append(["paper", *(cells.theirs(place, name) for name in samplers)])
    return Table(["target, noise", *samplers], rows, cells.used)


def others(found: Sequence[Record]) -> Table:
    """Shorter runs of all samplers, of chains that mix."""
    cells = _Cells(found, SHORT)
    rows = [[", ".join(p), *(cells.ours(p, name) for name in OTHERS)] for p in PLACES]
    return Table(["target, noise", *OTHERS.values()], rows, cells.used)


def heavy_tails(found: Sequence[Record], paper: Sequence[Record]) -> Table:
    """Laplace and Student noise of the same covariance."""
    cells, rows, header = _Cells(found, SHORT, paper), [], ["target, noise"]
    kinds = ("gaussian", "laplace", "student")
    for place in PLACES:
        rows.append([", ".join(place)])
        for kind in kinds:
            theirs = cells.theirs(place, "psmile_naive", kind)
            rows[-1] += [cells.ours(place, LEAPFROG, kind), theirs]
    header += [x for kind in kinds for x in (kind.capitalize(), "paper")]
    return Table(header, rows, cells.used)


def skewed(found: Sequence[Record]) -> Table:
    """Log-normal noise, from the records of the runs."""
    used = [r for r in found if r["cell"]["kind"].startswith("lognormal:")]
    used.sort(key=lambda r: float(r["cell"]["kind"].partition(":")[2]))
    sigmas = [r["cell"]["kind"].partition(":")[2] for r in used]
    rows = [
        ["b^2", *(_bias(r) for r in used)],
        ["best step size", *(short(r["step_size"]) for r in used)],
    ]
    return Table(["sigma", *sigmas], rows, used)


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
