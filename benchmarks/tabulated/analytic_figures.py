"""Further checks on the known posteriors, from the records of `analytic_figures.py`."""

from collections.abc import Sequence
from statistics import fmean, median

from benchmarks.tabulated.analytic import TARGETS
from benchmarks.tabulated.table import (
    Record,
    Table,
    number,
    short,
    standard_error,
    thousands,
    value_error,
)


def _of(found: Sequence[Record], figure: str) -> list[Record]:
    return [record for record in found if record["figure"] == figure]


def rotations(found: Sequence[Record]) -> Table:
    """Correlated noise under other random rotations."""
    used, columns = _of(found, "rotations"), {}
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
    used = _of(found, "decoherence")
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


def friction(found: Sequence[Record]) -> Table:
    """SGHMC and SGLD on Rosenbrock at equal speeds of diffusion."""
    used = _of(found, "friction")
    rows = [
        [
            *(record["sampler"], short(record["speed"])),
            value_error(record["bias"], record["error"]),
            *(number(record["x_square"], 2), number(record["y_square"], 1)),
        ]
        for record in used
    ]
    return Table(["sampler", "speed h", "b^2", "E[x^2] (2)", "E[y^2] (10.1)"], rows, used)


def mixture(found: Sequence[Record]) -> Table:
    """Modes found."""
    used = _of(found, "mixture")
    rows = []
    for record in used:
        shares = (record["smallest_share_times_25"], record["largest_share_times_25"])
        rows.append(
            [
                *(record["sampler"], f"{record['steps']:,}", short(record["step_size"])),
                *(str(min(record["modes_by_each_chain"])), str(record["modes_by_ten_chains"])),
                *(" ... ".join(number(x, 2) for x in shares), number(record["update_norm"], 2)),
            ]
        )
    header = ["sampler", "steps", "step size", "modes by the worst of ten chains", "by all ten"]
    return Table([*header, "share of a mode times 25", "mean update"], rows, used)


def energy(found: Sequence[Record]) -> Table:
    """Energy errors beyond the quantile of their Gamma fit."""
    used = _of(found, "energy")
    rows = [
        [
            *(thousands(record[name]) for name in ("steps", "mean", "std")),
            number(record["share_beyond"], 4),
        ]
        for record in used
    ]
    return Table(["steps", "mean, nats", "deviation, nats", "beyond 0.98 of the fit"], rows, used)


def decay(found: Sequence[Record]) -> Table:
    """Bias of SMILE-naive against the number of steps."""
    used, rows = _of(found, "decay"), []
    for record in used:
        places = (-5, -3, -1)
        cells = [value_error(record["bias"][i], record["error"][i], 4) for i in places]
        rows.append([record["target"], *cells, number(record["slope_last_decade"], 2)])
    steps = [f"{used[0]['steps'][i]:,.0f} steps" for i in (-5, -3, -1)] if used else []
    return Table(["b^2", *steps, "slope of the last decade"], rows, used)


def baseline(found: Sequence[Record], paper: Sequence[Record]) -> Table:
    """Full-batch MCLMC as tuned and with the best of a grid."""
    used = _of(found, "baseline")
    cells = {(record["target"], record["settings"]): record for record in used}
    rows = []
    for target in TARGETS if used else ():
        row = [target]
        for settings in ("grid", "tuned"):
            record = cells[target, settings]
            step, length = short(record["step_size"]), short(record["decoherence_length"])
            bias = value_error(record["bias"], record["error"], 5)
            row.append(f"{bias} (step {step}, L {length})")
        wanted = {"target": target, "sampler": "mclmc"}
        given = [r for r in paper if wanted.items() <= r["cell"].items()]
        used += given
        rows.append([*row, *(number(record["value"], 4) for record in given)])
    return Table(["b^2", "best of a grid", "`tune_mclmc`", "paper"], rows, used)


def sgld_limit(found: Sequence[Record]) -> Table:
    """Expected bias of SGLD at its best step size, in closed form."""
    used = _of(found, "sgld")
    rows = [
        [f"{r['steps']:,}", *(number(r[name]) for name in ("ours", "least", "largest"))]
        for r in used
    ]
    return Table(["steps", "our rotation", "least of 100", "largest of 100"], rows, used)
