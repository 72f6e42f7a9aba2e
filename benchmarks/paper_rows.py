"""Every table and figure of the paper: what it shows, its figures, ours, and how to run ours."""

from collections.abc import Mapping, Sequence
from statistics import stdev
from typing import Any, NamedTuple

from benchmarks.pivot import (
    Cell,
    Pick,
    Table,
    View,
    each,
    join,
    look,
    mean_error,
    number,
    short,
    text,
    value_error,
)

# In full: size, methods, chains and splits of the paper. In part, or not at all.
FULL, PART, NONE = "●", "◐", "○"
TARGETS, NOISES = (
    ("gaussian", "rosenbrock", "funnel"),
    ("isotropic", "diagonal", "correlated", "varied"),
)
DATA = ("airfoil", "bikesharing", "energy")
ENSEMBLE, SGHMC, CYCLES = "deep ensemble", "scale_adapted_sghmc", "cyclical_sgld"
NAMES = {
    SGHMC: "SGHMC",
    CYCLES: "cSGLD",
    "smile_naive": "SMILE-naive",
    "psmile_naive": "pSMILE-naive",
    "smile": "SMILE",
    "psmile": "pSMILE",
    "paper's smile": "SMILE",
}
# Our samplers, where those of the paper are called "... published".
OWN = ("smile", "psmile")
BREAK = "<br>"
# A figure that no record has, or one of fewer gradients: half as many, or 200,000.
MISSING, HALF_AS_LONG, FEWER = "–", " (half)", " (short)"
ANALYTIC = "`correctness/analytic.py --preset paper`"
UCI = "† `prediction/uci.py --protocol published --num-gradients N`"


class Row(NamedTuple):
    """A table or figure; the cells are its figures there and here."""

    what: str
    status: str
    paper: Cell
    ours: Cell
    how: str


def called(method: str) -> str:
    """Name of a method in the paper."""
    name = method.removesuffix(" published")
    return NAMES.get(name, name)


def dated(cell: Cell) -> Cell:
    """A cell, and the commits of the records that it took."""

    def shown(view: View) -> str:
        own = View(view.files, view.where, view.scope, view.own)
        value = text(cell, own)
        view.used |= own.used
        taken = [record for record in own.used.values() if "commit" in record]
        taken.sort(key=lambda record: record["time"])
        commits = list(dict.fromkeys(record["commit"] for record in taken))
        ends = list(dict.fromkeys((*commits[:1], *commits[-1:])))
        return f"{value} ({' … '.join(ends)})" if commits else value

    return shown


def row(what: str, status: str, paper: Cell, ours: Cell, how: str) -> Row:
    """A row with the commits of its figures."""
    return Row(what, status, paper, dated(ours), how)


# Biases of known posteriors.


def of_paper(view: View, **cell: Any) -> str:
    """A value ± error of the paper."""
    found = view.records(Pick(cell, "paper"))
    return "".join(value_error(record["value"], record["error"]) for record in found)


def bias(sampler: str, kind: str = "gaussian", gradients_of: int = 2_000_000) -> Cell:
    """Smallest bias by target; a line for each."""

    def cell(view: View) -> str:
        shown = []
        for target in TARGETS:
            values = []
            for noise in NOISES:
                where = {"target": target, "noise": noise, "kind": kind}
                for name, gradients, mark in (
                    (sampler, gradients_of, ""),
                    (sampler.removesuffix(" published"), 1_000_000, HALF_AS_LONG),
                    ("psmile_naive leapfrog", 200_000, FEWER),
                ):
                    found = view.records(Pick(where | {"sampler": name, "gradients": gradients}))
                    if found:
                        value = value_error(found[0]["bias"], found[0]["error"])
                        values.append(value + mark)
                        break
            shown.append(f"{target} {', '.join(values)}")
        return BREAK.join(shown)

    return cell


def papers_bias(sampler: str, kind: str = "gaussian") -> Cell:
    """The same of the paper."""

    def cell(view: View) -> str:
        return BREAK.join(
            f"{target} "
            + ", ".join(
                of_paper(
                    view, quantity="b2", sampler=sampler, kind=kind, target=target, noise=noise
                )
                for noise in NOISES
            )
            for target in TARGETS
        )

    return cell


def papers_baseline(view: View) -> str:
    """Full-batch MCLMC in the paper."""
    found = [view.records(Pick({"noise": "none", "target": x}, "paper"))[0] for x in TARGETS]
    return BREAK.join(f"{r['cell']['target']} {short(r['value'])}" for r in found)


def baseline(view: View) -> str:
    """Full-batch MCLMC at the better of two lengths, and with its own step size."""
    shown = []
    for target in TARGETS:
        found = view.records(Pick({"target": target, "noise": "none"}))
        searched = [record for record in found if record["cell"]["sampler"] != "mclmc"]
        own = [record for record in found if record["cell"]["sampler"] == "mclmc"]
        best = min(searched, key=lambda record: record["bias"], default=None)
        values = [value_error(r["bias"], r["error"], 4) for r in (best, *own) if r]
        shown.append(f"{target} {', its own step '.join(values) or MISSING}")
    return BREAK.join(shown)


def skewed(view: View) -> str:
    """Bias, and the step size, of log-normal noise."""
    shown = []
    for sigma in ("0.01", "0.03", "0.1", "0.3", "1.0"):
        names = "psmile_naive published", "psmile_naive leapfrog"
        found = view.records(Pick({"kind": f"lognormal:{sigma}", "sampler": names}))
        r = max(found, key=lambda record: record["cell"]["gradients"])
        mark = FEWER if r["cell"]["gradients"] < 2_000_000 else ""
        value = value_error(r["bias"], r["error"])
        shown.append(f"σ {sigma}: {value}{mark} (step {short(r['step_size'])})")
    return BREAK.join(shown)


# Regression.


def uci(method: str, num_gradients: Mapping[str, int]) -> Cell:
    """LPPD ± standard error over splits, and RMSE; a line for each data set."""

    def cell(view: View) -> str:
        shown = []
        for data in DATA:
            where = {"data": data, "method": method, "num_gradients": num_gradients[data]}
            # A run again replaces the older ones.
            for protocol in ("published", "paper"):
                found = view.records(Pick(where | {"protocol": protocol}, "uci"))
                if found:
                    break
            density, error = (mean_error([r[x] for r in found]) for x in ("lppd", "rmse"))
            if not found:
                shown.append(f"{data} {MISSING}")
                continue
            chains, splits = found[0]["cell"]["num_chains"], len(found)
            cut = f", splits {splits}, chains {chains}" * ((splits, chains) != (3, 10))
            shown.append(f"{data} {density} ({error}{cut})")
        return BREAK.join(shown)

    return cell


def papers_uci(method: str, budget: str) -> Cell:
    """The same of the paper, with standard deviations over splits."""

    def cell(view: View) -> str:
        shown = []
        for data in DATA:
            of = {"method": method, "budget": budget, "data": data}
            density, error = (of_paper(view, quantity=x, **of) for x in ("lppd", "rmse"))
            shown.append(f"{data} {density} ({error})")
        return BREAK.join(shown)

    return cell


# Steps of two gradients, or of one, of the two budgets.
BATCHWISE: dict[str, int] = dict.fromkeys(DATA, 120_000)
STEPS = {data: number // 2 for data, number in BATCHWISE.items()}
EPOCHWISE = {"energy": 240_000, "airfoil": 480_000, "bikesharing": 5_640_000}
HALF = {data: number // 2 for data, number in EPOCHWISE.items()}


def batches_of_bikes(view: View) -> str:
    """LPPD at batches of four sizes, the best of the step sizes."""
    shown = []
    for per_pass in (12, 47, 190, 760):
        where = {"protocol": "distributional", "data": "bikesharing", "batches_per_pass": per_pass}
        found = view.records(Pick(where | {"method": "smile_naive published"}, "uci"))
        best = max(found, key=lambda r: r["lppd"])
        size = short(best["cell"]["step_size"])
        shown.append(f"{per_pass} batches a pass: {number(best['lppd'])} (step {size})")
    return BREAK.join(shown)


# Networks.


def tiny(task: str, *pairs: tuple[str, dict[str, Any]], form: str = "tiny", path="lppd") -> Cell:
    """What methods in the tiny form are above the ensemble; "–" if none has run."""
    told = above(task, *pairs, form=form, base="tiny", path=path)
    return lambda view: f"tiny, LPPD minus the ensemble's: {text(told, view) or MISSING}"


def above(task: str, *pairs: tuple[str, dict[str, Any]], form: str, base: str, path="lppd") -> Cell:
    """What methods in a form are above the ensemble; ± the error over parts of the test data."""

    def cell(view: View) -> str:
        shown = []
        for method, options in pairs:
            where = {"task": task, "form": form, "options": options, "method": method}
            ours = view.records(Pick(where, "networks"))
            start = where | {"method": ENSEMBLE, "options": {}, "form": base}
            if ours:
                start["seed"] = ours[-1]["cell"]["seed"]
            theirs = view.records(Pick(start, "networks"))
            told = [short(x) if isinstance(x, int | float) else str(x) for x in options.values()]
            name = " ".join([f"`{method}`" if method in OWN else called(method), *told])
            if ours and theirs:
                pair = ours[-1], theirs[-1]
                one, other = (look(record, path)[0] for record in pair)
                both = [r["parts"] for r in pair if "parts" in r]
                has_error = len(both) == 2 and path == "lppd"
                parts = [x - y for x, y in zip(*both, strict=True)] if has_error else []
                error = stdev(parts) / len(parts) ** 0.5 if parts else None
                shown.append(f"{name} {value_error(one - other, error, 4, '+')}")
        return ", ".join(shown)

    return cell


def papers_network(quantity: str, task: str, *methods: str) -> Cell:
    """Figures of the paper."""
    return lambda view: ", ".join(
        f"{called(method)} {of_paper(view, quantity=quantity, task=task, method=method)}"
        for method in methods
    )


def papers_best(quantity: str, task: str, method: str) -> Cell:
    """The paper's figures over step sizes: the best."""

    def cell(view: View) -> str:
        where = {"quantity": quantity, "task": task, "method": method}
        found = view.records(Pick(where, "paper"))
        best = (min if "perplexity" in quantity else max)(found, key=lambda r: r["value"])
        return f"{called(method)} {number(best['value'], '.4f')}"

    return cell


def network(table: str) -> str:
    """The command of a table of networks in the paper's form."""
    return f"needs a GPU: † `prediction/networks.py --table {table} --form paper`"


def step(method: str, size: float, **options: Any) -> tuple[str, dict[str, Any]]:
    """A method at a step size."""
    return method, {"step_size": size, **options}


def papers_tuned(name: str, values: Sequence[float | None]) -> Cell:
    """The paper's LPPD at values of a setting of the tuner."""

    def cell(view: View) -> str:
        tuned = view.records(Pick({"quantity": "lppd", "method": "paper's smile"}, "paper"))
        found = {r["cell"][name]: number(r["value"]) for r in tuned if name in r["cell"]}
        return ", ".join(f"{value}: {found[value]}" for value in values)

    return cell


def found_modes(view: View) -> str:
    """Modes that one chain and ten chains found."""
    shown = []
    for name in ("cyclical_sgld", "psmile_naive published"):
        for r in view.records(Pick({"part": "modes", "sampler": name}, "appendix")):
            one = r["found_by_one"]
            shown.append(
                f"{called(name)}: one chain {min(one)} to {max(one)} of 25, ten chains"
                f" {r['found_by_all']}"
            )
    return BREAK.join(shown) or MISSING


def energies(view: View) -> str:
    """What lies above the quantiles of two fits."""
    return (
        "".join(
            f"above the 98 % quantile of the Gamma fit {r['above_gamma']:.2%}, of the half-normal"
            f" {r['above_normal']:.2%}"
            for r in view.records(Pick({"part": "energies"}, "appendix"))
        )
        or MISSING
    )


def settled(view: View) -> str:
    """First and last step sizes of the chains of the paper's SMILE, tiny."""
    wanted = {"task": "resnet18", "form": "tiny", "method": "smile published"}
    (r,) = view.records(Pick(wanted, "networks"))
    sizes = [chain["step_size"] for chain in r["chains"]]
    ends = [f"{short(of[0])} to {short(of[-1])}" for of in sizes]
    return f"tiny, step sizes: {', '.join(ends)}"


COSINE = {"schedule": "cosine"}
TUNED = ("smile published", "psmile published")
# One chain of LeNet at the paper's size; `psmile` has the gradients of the naive forms.
ONE_CHAIN, AS_LONG = "paper num_members=1", "num_warmup=10000 thin=200"
LENET = (SGHMC, "smile_naive", "psmile_naive", "smile")


def on_lenet(path: str) -> Cell:
    """What the paper's methods and our default are above their start."""
    sizes = dict(zip(LENET, (1e-3, 1e-4, 1e-2, 1e-3), strict=True))
    pairs = [step(x if x == SGHMC else f"{x} published", size) for x, size in sizes.items()]
    ours, form = ("psmile", {}), f"{ONE_CHAIN} {AS_LONG}"
    return join(
        above("lenet", *pairs, form=ONE_CHAIN, base=ONE_CHAIN, path=path),
        above("lenet", ours, form=form, base=ONE_CHAIN, path=path),
        sep=", ",
    )


ROWS = [
    row(
        "Table 1: full-batch MCLMC, bias b²",
        FULL,
        papers_baseline,
        baseline,
        ANALYTIC,
    ),
    row(
        "Table 1: SMILE-naive; noise isotropic, diagonal, correlated, varied",
        FULL,
        papers_bias("smile_naive"),
        bias("smile_naive"),
        ANALYTIC,
    ),
    *(
        row(
            f"Table 1: {name.upper()}",
            FULL,
            papers_bias(name),
            bias(name, gradients_of=10**6),
            ANALYTIC,
        )
        for name in ("sgld", "sghmc")
    ),
    row(
        "Table 1: pSMILE-naive",
        FULL,
        papers_bias("psmile_naive"),
        bias("psmile_naive published"),
        ANALYTIC,
    ),
    row(
        "Table 2: MILE, LPPD (RMSE)",
        PART,
        papers_uci("mile", "full batch"),
        uci("mile", BATCHWISE),
        f"{UCI}; no bike sharing",
    ),
    *(
        row(
            f"Table 2: {name}, batch-wise",
            FULL,
            papers_uci(method, "batch-wise"),
            uci(ours, STEPS if method == SGHMC else BATCHWISE),
            UCI,
        )
        for name, method, ours in (
            ("SGHMC", SGHMC, SGHMC),
            ("SMILE-naive", "smile_naive", "smile_naive published"),
            ("pSMILE-naive", "psmile_naive", "psmile_naive published"),
        )
    ),
    *(
        row(
            f"Table 2: {name}, epoch-wise",
            PART,
            papers_uci(method, "epoch-wise"),
            uci(ours, HALF if method == SGHMC else EPOCHWISE),
            UCI,
        )
        for name, method, ours in (
            ("SGHMC", SGHMC, SGHMC),
            ("SMILE-naive", "smile_naive", "smile_naive published"),
            ("pSMILE-naive", "psmile_naive", "psmile_naive published"),
        )
    ),
    row(
        "Figures: ResNet-7, naive and tuned, by schedule and batch size",
        NONE,
        "naive forms diverge, tuned ones and SGHMC do not",
        tiny(
            "resnet7",
            *(step(f"{x}smile_naive", 1e-3, **of) for x in ("", "p") for of in ({}, COSINE)),
            form="tiny sampling_batch_size=256",
        ),
        network('"resnet7 batch"'),
    ),
    row(
        "Table 3 and its errors in the appendix: ResNet-18, eight chains, LPPD",
        NONE,
        papers_network("lppd", "resnet18", ENSEMBLE, CYCLES, SGHMC, *TUNED),
        tiny(
            "resnet18",
            *(step(f"{x}smile published", 0.015) for x in ("", "p")),
            step(SGHMC, 1e-3, friction=0.05),
            step(CYCLES, 1e-6, num_cycles=4),
        ),
        network("resnet18"),
    ),
    row(
        "Table 3 and by step size: ViT, four chains, LPPD",
        NONE,
        join(
            *(papers_best("lppd", "vit", x) for x in (ENSEMBLE, CYCLES, SGHMC, TUNED[1])),
            sep=BREAK,
        ),
        tiny(
            "vit",
            *(step(TUNED[1], x) for x in (0.2, 0.15, 0.1, 0.05)),
            step(SGHMC, 1.5e-4),
            step(CYCLES, 1e-6, num_cycles=4),
        ),
        network("vit"),
    ),
    row(
        "Figure and table: nanoGPT by step size, perplexity",
        NONE,
        join(
            *(papers_best("perplexity", "nanogpt", x) for x in (SGHMC, *TUNED)),
            sep=BREAK,
        ),
        tiny(
            "nanogpt",
            *(step(SGHMC, x) for x in (2e-6, 2e-5, 2e-4, 2e-3)),
            *(step(TUNED[0], x) for x in (2e-6, 2e-5)),
        ),
        network("nanogpt"),
    ),
    row(
        "Table: data sets",
        PART,
        "seven",
        "the same, but for 5,000 images of Imagenette with 64 pixels a side",
        "`examples/data`",
    ),
    row(
        "Figure: energy errors on the Gaussian (isotropic noise, step 0.1)",
        FULL,
        "lighter than Gamma and half-normal",
        energies,
        "`correctness/appendix.py`",
    ),
    row(
        "Table: Laplace noise, b² of pSMILE-naive",
        FULL,
        papers_bias("psmile_naive", "laplace"),
        bias("psmile_naive published", "laplace"),
        ANALYTIC,
    ),
    row(
        "The same: Student's t",
        FULL,
        papers_bias("psmile_naive", "student"),
        bias("psmile_naive published", "student"),
        ANALYTIC,
    ),
    row(
        "Figure: log-normal noise, Gaussian",
        FULL,
        "flat below σ = 0.1, then the step shrinks",
        skewed,
        ANALYTIC,
    ),
    row(
        "Figure: 25 modes",
        FULL,
        "one chain several modes, ten chains all",
        found_modes,
        "`correctness/appendix.py`",
    ),
    row(
        "Figure: bike sharing by batch and step size, SMILE-naive, LPPD",
        PART,
        "a figure",
        batches_of_bikes,
        "history: three chains, one split",
    ),
    row(
        "Figure: LeNet by batch size",
        NONE,
        "larger batches help a little",
        join(
            *(
                join(
                    f"batches of {size}, ",
                    tiny(
                        "lenet",
                        step("smile published", 1e-3),
                        ("psmile", {}),
                        form=f"tiny sampling_batch_size={size}",
                    ),
                )
                for size in (64, 256, 512, 1_024)
            ),
            sep=BREAK,
        ),
        '† `prediction/networks.py --table "lenet batch" --form paper`',
    ),
    row(
        "Table: LeNet, LPPD and accuracy minus the ensemble's",
        PART,
        join(
            *(
                papers_network(f"{x} above the deep ensemble", "lenet", *LENET)
                for x in ("lppd", "accuracy")
            ),
            sep=BREAK,
        ),
        join("one chain, one run: ", on_lenet("lppd"), BREAK, "accuracy: ", on_lenet("accuracy")),
        "† `prediction/networks.py --table lenet --form paper`",
    ),
    row("Table: ResNet-7", FULL, "428k weights", "the same", "`tests/test_models.py`"),
    row("Table: ResNet-18", FULL, "11.2M weights", "the same", "`tests/test_models.py`"),
    row(
        "Table: ResNet-18, one chain, LPPD (IVON and Laplace: history)",
        NONE,
        papers_network(
            "single lppd", "resnet18", ENSEMBLE, "laplace", "ivon", SGHMC, CYCLES, *TUNED
        ),
        tiny(
            "resnet18",
            ("ivon", {}),
            ("laplace", {}),
            step("psmile published", 0.015),
            path="single.lppd",
        ),
        network("resnet18"),
    ),
    *(
        row(
            f"Table: ResNet-18 by {symbol}, SMILE, LPPD",
            NONE,
            papers_tuned(name, values),
            tiny("resnet18", *(step("paper's smile", 0.015, **{name: x}) for x in values)),
            network(symbol),
        )
        for symbol, name, values in (
            ("kappa", "reject_quantile", (0.9, 0.95, 0.98, 0.99, None)),
            ("a", "adapt_probability", (0.0, 0.05, 0.1, 0.2, 0.4)),
        )
    ),
    row(
        "Figure: step size and energies of ResNet-18",
        NONE,
        "they settle",
        settled,
        "needs a GPU, as Table 3",
    ),
    row(
        "Figure: step size and energies of nanoGPT; examples of text",
        NONE,
        "they settle",
        "not run",
        network("nanogpt"),
    ),
]


def status(of: Row) -> Cell:
    """What a row reproduces; in part where a figure is missing or of a shorter run."""

    def shown(view: View) -> str:
        value = text(of.ours, view)
        is_cut = any(mark in value for mark in (MISSING, HALF_AS_LONG, FEWER, "-dirty"))
        return PART if of.status == FULL and is_cut else of.status

    return shown


def tally(view: View) -> str:
    """How many rows have each status."""
    found = [text(status(of), view) for of in ROWS]
    return ", ".join(f"{x} {found.count(x)}" for x in (FULL, PART, NONE))


TABLE = Table("analytic paper uci networks appendix", each()).shows(
    ("table or figure", *(of.what for of in ROWS)),
    ("", *map(status, ROWS)),
    ("paper", *(of.paper for of in ROWS)),
    ("here (commits)", *(of.ours for of in ROWS)),
    ("command", *(of.how for of in ROWS)),
)
