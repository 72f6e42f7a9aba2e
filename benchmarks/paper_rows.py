"""Every table and figure of the paper: what it shows, its figures, ours, and how to run ours."""
# pandas has no stubs, and its methods several return types.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from collections.abc import Callable, Iterable, Sequence
from statistics import stdev
from typing import Any, NamedTuple

from benchmarks.frames import mean_error, number, short, text_of, value_error

import numpy as np
import pandas as pd

# In full: size, methods, chains and splits of the paper. In part, or not at all.
FULL, PART, NONE = "●", "◐", "○"
TARGETS = ("gaussian", "rosenbrock", "funnel")
NOISES = ("isotropic", "diagonal", "correlated", "varied")
DATA = ("airfoil", "bikesharing", "energy")
ENSEMBLE, SGHMC, CYCLES = "deep ensemble", "scale_adapted_sghmc", "cyclical_sgld"
NAMES = {SGHMC: "SGHMC", CYCLES: "cSGLD", "smile": "SMILE", "psmile": "pSMILE"}
NAMES |= {"smile_naive": "SMILE-naive", "psmile_naive": "pSMILE-naive", "paper's smile": "SMILE"}
# Our samplers, where those of the paper are called "... published".
OWN = ("smile", "psmile")
BREAK = "<br>"
# A figure that no record has, or one of fewer gradients: half as many, or 200,000.
MISSING, HALF_AS_LONG, FEWER = "–", " (half)", " (short)"
ANALYTIC = "`correctness/analytic.py --preset paper`"
UCI = "† `prediction/uci.py --protocol published --num-gradients N`"
FILES = ("analytic", "paper", "uci", "networks", "appendix")


class Source:
    """Frames of the files; `used` are the records that were found in them."""

    def __init__(self, frames: Sequence[pd.DataFrame]):
        self.frames, self.used = frames, []

    def find(self, file: str, **fields: Any) -> pd.DataFrame:
        """Records with these values."""
        runs = self.frames[FILES.index(file)]
        runs = runs[np.logical_and.reduce([runs[name] == x for name, x in fields.items()])]
        self.used += [*runs["record"]]
        return runs


Cell = str | Callable[[Source], str]


class Row(NamedTuple):
    """A table or figure; the cells are its figures there and here."""

    what: str
    status: str
    paper: Cell
    ours: Cell
    how: str


def text(cell: Cell, source: Source) -> str:
    """Write a cell."""
    return cell(source) if callable(cell) else cell


def join(*cells: Cell, sep: str = "") -> Cell:
    """Cells one after the other."""
    return lambda source: sep.join(text(cell, source) for cell in cells)


def lines(names: Iterable[str], of: Callable[[Source, str], str], sep: str = BREAK) -> Cell:
    """A line for each name."""
    return lambda source: sep.join(f"{called(name)} {of(source, name)}" for name in names)


def called(method: str) -> str:
    """Name of a method in the paper."""
    name = method.removesuffix(" published")
    return NAMES.get(name, name)


def estimates(found: pd.DataFrame, value: str = "value", digits: int = 3) -> str:
    """Values ± errors."""
    pairs = zip(found[value], found["error"], strict=True)
    return ", ".join(value_error(*pair, digits) for pair in pairs)


# Biases of known posteriors, by target.


def bias(sampler: str, kind: str = "gaussian", gradients: int = 2_000_000) -> Cell:
    """Smallest bias with each kind of noise, of the longest chains that there are."""
    tries = [(sampler, gradients, ""), (sampler.split()[0], 1_000_000, HALF_AS_LONG)]
    tries.append(("psmile_naive leapfrog", 200_000, FEWER))

    def of_target(source: Source, target: str) -> str:
        shown = []
        for noise in NOISES:
            place = {"target": target, "noise": noise, "kind": kind}
            for name, length, mark in tries:
                found = source.find("analytic", sampler=name, gradients=length, **place)
                if len(found):
                    shown.append(estimates(found[:1], "bias") + mark)
                    break
        return ", ".join(shown)

    return lines(TARGETS, of_target)


def papers_bias(sampler: str, kind: str = "gaussian") -> Cell:
    """The same of the paper."""
    wanted = {"quantity": "b2", "sampler": sampler, "kind": kind}
    return lines(TARGETS, lambda source, x: estimates(source.find("paper", target=x, **wanted)))


def papers_baseline(source: Source, target: str) -> str:
    """Full-batch MCLMC in the paper."""
    return short(source.find("paper", noise="none", target=target)["value"].iloc[0])


def baseline(source: Source, target: str) -> str:
    """Full-batch MCLMC at the better of two lengths, and with its own step size."""
    found = source.find("analytic", target=target, noise="none")
    is_own = found["sampler"] == "mclmc"
    both = found[~is_own].nsmallest(1, "bias"), found[is_own]
    return ", its own step ".join(estimates(x, "bias", 4) for x in both if len(x)) or MISSING


SKEWED = {f"σ {sigma}:": f"lognormal:{sigma}" for sigma in (0.01, 0.03, 0.1, 0.3, 1.0)}


def skewed(source: Source, name: str) -> str:
    """Bias, and the step size, of log-normal noise; of the longest chains that there are."""
    run = source.find("analytic", kind=SKEWED[name]).nlargest(1, "gradients")
    mark = FEWER if run["gradients"].iloc[0] < 2_000_000 else ""
    return f"{estimates(run, 'bias')}{mark} (step {short(run['step_size'].iloc[0])})"


# Regression. Steps of two gradients, or of one, of the two budgets.
BATCHWISE: dict[str, int] = dict.fromkeys(DATA, 120_000)
EPOCHWISE = {"energy": 240_000, "airfoil": 480_000, "bikesharing": 5_640_000}


def uci(method: str, gradients: dict[str, int]) -> Cell:
    """LPPD ± standard error over splits, and RMSE."""

    def of_data(source: Source, data: str) -> str:
        wanted = {"data": data, "method": method}
        # Steps of SGHMC take one gradient.
        wanted["num_gradients"] = gradients[data] // (2 if method == SGHMC else 1)
        # A run again replaces the older ones.
        found = source.find("uci", protocol="published", **wanted)
        if not len(found) and not len(found := source.find("uci", protocol="paper", **wanted)):
            return MISSING
        chains, splits = found["num_chains"].iloc[0], len(found)
        cut = "" if (splits, chains) == (3, 10) else f", splits {splits}, chains {chains}"
        return f"{mean_error(found['lppd'])} ({mean_error(found['rmse'])}{cut})"

    return lines(DATA, of_data)


def papers_uci(method: str, budget: str) -> Cell:
    """The same of the paper, with standard deviations over splits."""

    def of_data(source: Source, data: str) -> str:
        of = {"method": method, "budget": budget, "data": data}
        lppd, rmse = (estimates(source.find("paper", quantity=x, **of)) for x in ("lppd", "rmse"))
        return f"{lppd} ({rmse})"

    return lines(DATA, of_data)


PER_PASS = {f"{number_of} batches a pass:": number_of for number_of in (12, 47, 190, 760)}


def bikes(source: Source, name: str) -> str:
    """LPPD at batches of a size, the best of the step sizes."""
    wanted = {
        "protocol": "distributional",
        "data": "bikesharing",
        "batches_per_pass": PER_PASS[name],
    }
    found = source.find("uci", method="smile_naive published", **wanted)
    best = found.nlargest(1, "lppd").iloc[0]
    return f"{number(best['lppd'])} (step {short(best['step_size'])})"


# Networks.
Method = tuple[str, dict[str, Any]]


def step(method: str, size: float, **options: Any) -> Method:
    """A method at a step size."""
    return method, {"step_size": size, **options}


def above(task: str, *methods: Method, form: str, base: str, path: str = "lppd") -> Cell:
    """What methods in a form are above the ensemble; ± the error over parts of the test data."""

    def gap(source: Source, method: str, options: dict[str, Any]) -> str:
        wanted = {"task": task, "form": form, "method": method, "options": text_of(options)}
        start = {"task": task, "form": base, "method": ENSEMBLE, "options": text_of({})}
        ours = source.find("networks", **wanted)[-1:]
        pair = ours.merge(source.find("networks", **start), on="seed", suffixes=("", " start"))
        if not len(pair):
            return ""
        both, error = pair.iloc[-1], None
        if path == "lppd" and pair[["parts", "parts start"]].notna().all(axis=None):
            parts = [x - y for x, y in zip(both["parts"], both["parts start"], strict=True)]
            error = stdev(parts) / len(parts) ** 0.5
        settings = [short(x) if isinstance(x, int | float) else str(x) for x in options.values()]
        name = " ".join([f"`{method}`" if method in OWN else called(method), *settings])
        return f"{name} {value_error(both[path] - both[f'{path} start'], error, 4, '+')}"

    return lambda source: ", ".join(filter(None, (gap(source, *method) for method in methods)))


def tiny(task: str, *methods: Method, form: str = "tiny", path: str = "lppd") -> Cell:
    """The same in the tiny form; "–" if none has run."""
    told = above(task, *methods, form=form, base="tiny", path=path)
    return lambda source: f"tiny, LPPD minus the ensemble's: {text(told, source) or MISSING}"


def papers_network(quantity: str, task: str, *methods: str) -> Cell:
    """Figures of the paper."""
    wanted = {"quantity": quantity, "task": task}
    of = lambda source, method: estimates(source.find("paper", method=method, **wanted))  # noqa: E731
    return lines(methods, of, ", ")


def papers_best(quantity: str, task: str, *methods: str) -> Cell:
    """The paper's figures over step sizes: the best; a line for each method."""

    def best(source: Source, method: str) -> str:
        found = source.find("paper", quantity=quantity, task=task, method=method)
        values = found["value"]
        return number(values.min() if quantity == "perplexity" else values.max(), ".4f")

    return lines(methods, best)


def papers_tuned(name: str, values: Iterable[float | None]) -> Cell:
    """The paper's LPPD at values of a setting of the tuner."""

    def cell(source: Source) -> str:
        records = source.find("paper", quantity="lppd", method="paper's smile")["record"]
        found = {r["cell"][name]: number(r["value"]) for r in records if name in r["cell"]}
        return ", ".join(f"{value}: {found[value]}" for value in values)

    return cell


MODES = {"cSGLD:": CYCLES, "pSMILE-naive:": "psmile_naive published"}


def modes(source: Source, name: str) -> str:
    """Modes that one chain and ten chains found."""
    run = source.find("appendix", part="modes", sampler=MODES[name]).iloc[-1]
    one, ten = run["found_by_one"], run["found_by_all"]
    return f"one chain {min(one)} to {max(one)} of 25, ten chains {ten:.0f}"


def energies(source: Source) -> str:
    """What lies above the quantiles of two fits."""
    run = source.find("appendix", part="energies").iloc[-1]
    gamma, normal = f"{run['above_gamma']:.2%}", f"{run['above_normal']:.2%}"
    return f"above the 98 % quantile of the Gamma fit {gamma}, of the half-normal {normal}"


def settled(source: Source) -> str:
    """First and last step sizes of the chains of the paper's SMILE, tiny."""
    wanted = {"task": "resnet18", "form": "tiny", "method": "smile published"}
    (chains,) = source.find("networks", **wanted)["chains"]
    sizes = [chain["step_size"] for chain in chains]
    return f"tiny, step sizes: {', '.join(f'{short(x[0])} to {short(x[-1])}' for x in sizes)}"


TUNED = ("smile published", "psmile published")
NAIVE = ("smile_naive", "psmile_naive")
# One chain of LeNet at the paper's size; `psmile` has the gradients of the naive forms.
ONE_CHAIN, AS_LONG = "paper num_members=1", "paper num_members=1 num_warmup=10000 thin=200"
ABOVE = [f"{score} above the deep ensemble" for score in ("lppd", "accuracy")]
LENET = {SGHMC: 1e-3, "smile_naive": 1e-4, "psmile_naive": 1e-2, "smile": 1e-3}


def published(method: str) -> str:
    """Our name of a method of the paper."""
    return method if method == SGHMC else f"{method} published"


def on_lenet(path: str) -> Cell:
    """What the paper's methods and our default are above their start."""
    methods = [step(published(x), size) for x, size in LENET.items()]
    theirs = above("lenet", *methods, form=ONE_CHAIN, base=ONE_CHAIN, path=path)
    ours = above("lenet", ("psmile", {}), form=AS_LONG, base=ONE_CHAIN, path=path)
    return join(theirs, ours, sep=", ")


def by_batch(size: int) -> Cell:
    """LeNet in the tiny form with batches of one size."""
    methods, form = (step(TUNED[0], 1e-3), ("psmile", {})), f"tiny sampling_batch_size={size}"
    return join(f"batches of {size}, ", tiny("lenet", *methods, form=form))


def analytic(what: str, paper: Cell, ours: Cell) -> Row:
    """A row on known posteriors."""
    return Row(what, FULL, paper, ours, ANALYTIC)


def of_table_2(budget: str, status: str, gradients: dict[str, int]) -> list[Row]:
    """Samplers on the UCI data at one of the two budgets."""
    cells = {x: (papers_uci(x, budget), uci(published(x), gradients)) for x in (SGHMC, *NAIVE)}
    return [Row(f"Table 2: {called(x)}, {budget}", status, *of, UCI) for x, of in cells.items()]


def large(what: str, table: str, paper: Cell, ours: Cell) -> Row:
    """A row on large networks, and the table of `networks.py` that has it in the paper's form."""
    how = f"needs a GPU: † `prediction/networks.py --table {table} --form paper`"
    return Row(what, NONE, paper, ours, how)


def of_tuner(symbol: str, name: str, values: Sequence[float | None]) -> Row:
    """The paper's SMILE at values of a setting."""
    ours = tiny("resnet18", *(step("paper's smile", 0.015, **{name: x}) for x in values))
    what = f"Table: ResNet-18 by {symbol}, SMILE, LPPD"
    return large(what, symbol, papers_tuned(name, values), ours)


SHORT_CYCLES = step(CYCLES, 1e-6, num_cycles=4)
SCHEDULED = [step(x, 1e-3, **of) for x in NAIVE for of in ({}, {"schedule": "cosine"})]
RESNETS = [*(step(x, 0.015) for x in TUNED), step(SGHMC, 1e-3, friction=0.05), SHORT_CYCLES]
SINGLE = (ENSEMBLE, "laplace", "ivon", SGHMC, CYCLES, *TUNED)
VITS = [*(step(TUNED[1], x) for x in (0.2, 0.15, 0.1, 0.05)), step(SGHMC, 1.5e-4), SHORT_CYCLES]
GPTS = [step(SGHMC, x) for x in (2e-6, 2e-5, 2e-4, 2e-3)]
GPTS += [step(TUNED[0], x) for x in (2e-6, 2e-5)]
ROWS = [
    analytic(
        "Table 1: full-batch MCLMC, bias b²",
        lines(TARGETS, papers_baseline),
        lines(TARGETS, baseline),
    ),
    analytic(
        "Table 1: SMILE-naive; noise isotropic, diagonal, correlated, varied",
        papers_bias("smile_naive"),
        bias("smile_naive"),
    ),
    analytic("Table 1: SGLD", papers_bias("sgld"), bias("sgld", gradients=1_000_000)),
    analytic("Table 1: SGHMC", papers_bias("sghmc"), bias("sghmc", gradients=1_000_000)),
    analytic("Table 1: pSMILE-naive", papers_bias("psmile_naive"), bias("psmile_naive published")),
    Row(
        "Table 2: MILE, LPPD (RMSE)",
        PART,
        papers_uci("mile", "full batch"),
        uci("mile", BATCHWISE),
        f"{UCI}; no bike sharing",
    ),
    *of_table_2("batch-wise", FULL, BATCHWISE),
    *of_table_2("epoch-wise", PART, EPOCHWISE),
    large(
        "Figures: ResNet-7, naive and tuned, by schedule and batch size",
        '"resnet7 batch"',
        "naive forms diverge, tuned ones and SGHMC do not",
        tiny("resnet7", *SCHEDULED, form="tiny sampling_batch_size=256"),
    ),
    large(
        "Table 3 and its errors in the appendix: ResNet-18, eight chains, LPPD",
        "resnet18",
        papers_network("lppd", "resnet18", ENSEMBLE, CYCLES, SGHMC, *TUNED),
        tiny("resnet18", *RESNETS),
    ),
    large(
        "Table 3 and by step size: ViT, four chains, LPPD",
        "vit",
        papers_best("lppd", "vit", ENSEMBLE, CYCLES, SGHMC, TUNED[1]),
        tiny("vit", *VITS),
    ),
    large(
        "Figure and table: nanoGPT by step size, perplexity",
        "nanogpt",
        papers_best("perplexity", "nanogpt", SGHMC, *TUNED),
        tiny("nanogpt", *GPTS),
    ),
    Row(
        "Table: data sets",
        PART,
        "seven",
        "the same, but for 5,000 images of Imagenette with 64 pixels a side",
        "`examples/data`",
    ),
    Row(
        "Figure: energy errors on the Gaussian (isotropic noise, step 0.1)",
        FULL,
        "lighter than Gamma and half-normal",
        energies,
        "`correctness/appendix.py`",
    ),
    analytic(
        "Table: Laplace noise, b² of pSMILE-naive",
        papers_bias("psmile_naive", "laplace"),
        bias("psmile_naive published", "laplace"),
    ),
    analytic(
        "The same: Student's t",
        papers_bias("psmile_naive", "student"),
        bias("psmile_naive published", "student"),
    ),
    analytic(
        "Figure: log-normal noise, Gaussian",
        "flat below σ = 0.1, then the step shrinks",
        lines(SKEWED, skewed),
    ),
    Row(
        "Figure: 25 modes",
        FULL,
        "one chain several modes, ten chains all",
        lines(MODES, modes),
        "`correctness/appendix.py`",
    ),
    Row(
        "Figure: bike sharing by batch and step size, SMILE-naive, LPPD",
        PART,
        "a figure",
        lines(PER_PASS, bikes),
        "history: three chains, one split",
    ),
    Row(
        "Figure: LeNet by batch size",
        NONE,
        "larger batches help a little",
        join(*map(by_batch, (64, 256, 512, 1_024)), sep=BREAK),
        '† `prediction/networks.py --table "lenet batch" --form paper`',
    ),
    Row(
        "Table: LeNet, LPPD and accuracy minus the ensemble's",
        PART,
        join(*(papers_network(quantity, "lenet", *LENET) for quantity in ABOVE), sep=BREAK),
        join("one chain, one run: ", on_lenet("lppd"), BREAK, "accuracy: ", on_lenet("accuracy")),
        "† `prediction/networks.py --table lenet --form paper`",
    ),
    Row("Table: ResNet-7", FULL, "428k weights", "the same", "`tests/test_models.py`"),
    Row("Table: ResNet-18", FULL, "11.2M weights", "the same", "`tests/test_models.py`"),
    large(
        "Table: ResNet-18, one chain, LPPD (IVON and Laplace: history)",
        "resnet18",
        papers_network("single lppd", "resnet18", *SINGLE),
        tiny("resnet18", ("ivon", {}), ("laplace", {}), RESNETS[1], path="single.lppd"),
    ),
    of_tuner("kappa", "reject_quantile", (0.9, 0.95, 0.98, 0.99, None)),
    of_tuner("a", "adapt_probability", (0.0, 0.05, 0.1, 0.2, 0.4)),
    Row(
        "Figure: step size and energies of ResNet-18",
        NONE,
        "they settle",
        settled,
        "needs a GPU, as Table 3",
    ),
    large(
        "Figure: step size and energies of nanoGPT; examples of text",
        "nanogpt",
        "they settle",
        "not run",
    ),
]


def table(*frames: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The table of all rows with the first and last commit of our figures, and the records used.

    A status is in part where a figure is missing or of a shorter run.
    """
    rows, used = [], []
    for what, status, paper, ours, how in ROWS:
        source = Source(frames)
        shown = text(ours, source)
        dated = sorted((r for r in source.used if "commit" in r), key=lambda r: r["time"])
        commits = [record["commit"] for record in dated]
        ends = " … ".join(dict.fromkeys((*commits[:1], *commits[-1:])))
        shown += f" ({ends})" if ends else ""
        if status == FULL and any(x in shown for x in (MISSING, HALF_AS_LONG, FEWER, "-dirty")):
            status = PART
        rows.append((what, status, text(paper, source), shown, how))
        used += source.used
    titles = ["table or figure", "", "paper", "here (commits)", "command"]
    return pd.DataFrame(rows, columns=titles), pd.DataFrame({"record": used})


def tally(*frames: pd.DataFrame) -> str:
    """How many rows have each status."""
    found = table(*frames)[0][""]
    return ", ".join(f"{x} {sum(found == x)}" for x in (FULL, PART, NONE))
