"""What a person wants to know about a run, see `optax_smile.diagnostics.summary`."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from optax_smile import _check
from optax_smile.diagnostics import statistics
from optax_smile.diagnostics.statistics import LEAST_DRAWS, LEAST_DRAWS_WITHIN
from optax_smile.draws.predict import Prediction
from optax_smile.draws.snapshots import Snapshots, StoredSnapshots

# With fewer independent draws the R-hat within a chain is above `HIGH_RHAT` by chance at one value
# in twenty (1.28 at 20 draws, simulated).
LEAST_DRAWS_JUDGED = 20
# The four quarters of a chain with n independent draws have an R-hat of about 1 + 2 / n: beyond
# this it says no more than six. Two chains with it differ by more than a standard deviation.
HIGH_RHAT = 1.3
# Weights of networks wander while their predictions mix: a random walk has a median of 1.65, as
# have good runs (digits, psmile); a chain that goes somewhere has 2 to 3.1.
HIGH_WEIGHT_RHAT = 2.0
# Differences at single inputs are chance or a matter of taste.
MANY_INPUTS = 0.25
# Reported beside each other: the usual bound of Gelman and Rubin and half of it.
GOOD_RHATS = (1.05, 1.1)
# Step sizes and distances of healthy chains differ by factors of two or three.
MUCH = 10.0
# A step size that changes more while it samples targets no single distribution.
MOST_DRIFT = 2.0
# Energy errors have heavier tails than the Gamma fit: twice the nominal rate is common.
MOST_RESETS = 3.0
# Fewer events tell no rate, and rarer ones leave the chain its way.
LEAST_EVENTS, LEAST_RESET_RATE = 10, 0.01
# Healthy runs have none or a handful.
MOST_NONFINITE = 0.01
# Nats per input by which the modes of one posterior hardly differ: targets 26 % less probable.
FAR_BELOW = 0.3
# More groups of chains are counted, not listed.
MOST_GROUPS = 6


class Finding(NamedTuple):
    """Something that looks wrong.

    Attributes:
        chains: in which chains.
        problem: a word for it and how it shows.
        advice: what to try.
    """

    chains: tuple[int, ...]
    problem: str
    advice: str


def aligned(columns: Mapping[str, list[str]]) -> list[str]:
    """Lines of a table, cells on the right of their columns."""
    with_heads = [(head, *cells) for head, cells in columns.items()]
    widths = [max(map(len, cells)) for cells in with_heads]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in zip(*with_heads, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class Summary:
    """Figures of a run, NaN where something is unknown; `str(summary)` is a table in plain words.

    Attributes:
        num_draws: per chain.
        of: what the R-hats are of: `"predictions"` or `"weights"`.
        first_step_size: at the first tick, `[chain]`.
        last_step_size: at the last tick, `[chain]`.
        drift: see `step_size_drift`, of the draws, `[chain]`.
        reset_rate: see `reset_rate`, of the draws, `[chain]`.
        nominal_rate: what `reset_quantile` makes of it for a perfect fit; NaN without one.
        energy_distance: see `energy_fit`, of the draws, `[chain]`.
        num_nonfinite: calls with a non-finite gradient or value, `[chain]`.
        travelled: see `travel`, at the last draw, `[chain]`.
        rhat_within: see `rhat_within`, `[chain, point]`: of single predictions, or weights.
        rhat_across: see `rhat`, of predictions, `[point]`; empty without them.
        ess: see `ess`, of predictions, `[point]`; empty without them.
        chain_lppd: log pointwise predictive density of each chain alone, nats, `[chain]`.
        lppd: of all chains together.
        mcse: Monte Carlo standard error of `lppd`.
        findings: what looks wrong.
    """

    num_draws: int
    of: str
    first_step_size: np.ndarray
    last_step_size: np.ndarray
    drift: np.ndarray
    reset_rate: np.ndarray
    nominal_rate: float
    energy_distance: np.ndarray
    num_nonfinite: np.ndarray
    travelled: np.ndarray
    rhat_within: np.ndarray
    rhat_across: np.ndarray
    ess: np.ndarray
    chain_lppd: np.ndarray
    lppd: float
    mcse: float
    findings: tuple[Finding, ...] = ()

    def __str__(self) -> str:
        return "\n".join([*self._table(), "", *self._notes(), "", *self._judgement()])

    def _table(self) -> list[str]:
        def column(values: ArrayLike, form: str, overall: float = np.nan) -> list[str]:
            return [_figure(value, form) for value in (*np.asarray(values), overall)]

        first, last = (
            column(sizes, ".2g") for sizes in (self.first_step_size, self.last_step_size)
        )
        rhats = [_median(chain) for chain in self.rhat_within]
        rate = self.reset_rate / (self.nominal_rate if self.nominal_rate > 0 else 1)
        columns = {
            "chain": [*map(str, range(len(first) - 1)), "all"],
            "step size": [
                x if x == "-" else f"{x} -> {y}" for x, y in zip(first, last, strict=True)
            ],
            "drift": column(self.drift, ".2f"),
            "resets": column(rate, ".2g"),
            "non-finite": column(self.num_nonfinite, ".0f"),
            "travelled": column(self.travelled, ".2g"),
            "R-hat": column(rhats, ".2f", _median(self.rhat_across)),
            "LPPD": column(self.chain_lppd, ".5g", self.lppd),
        }
        return aligned({head: cells for head, cells in columns.items() if set(cells) != {"-"}})

    def _notes(self) -> list[str]:
        num_chains, num_draws = len(self.drift), self.num_draws
        notes = [f"chains: {num_chains}, draws of each: {num_draws}"]
        if not np.isnan(self.first_step_size).all():
            of = f" / the nominal {self.nominal_rate:.2g}" if self.nominal_rate > 0 else ""
            notes.append("drift: step size at the end of the draws / at their beginning")
            notes.append(f"resets: undone steps per gradient{of}")
        if not np.isnan(self.energy_distance).all():
            worst = np.nanmax(self.energy_distance)
            notes[-1] += f"; the energy errors miss their Gamma fit by up to {worst:.2g}"
        if not np.isnan(self.travelled).all():
            notes.append("travelled: distance of the last draw from the start / norm of the start")
        if num_draws < LEAST_DRAWS_WITHIN:
            notes.append(f"R-hat within a chain needs {LEAST_DRAWS_WITHIN} draws.")
        else:
            notes.append(f"R-hat: the quarters of a chain with each other; median of the {self.of}")
            notes.append(f"  within chains {_shares(self.rhat_within)}")
        if self.rhat_across.size:
            notes.append(f"  across chains (all) {_shares(self.rhat_across)}")
        if self.ess.size:
            size = _figure(_median(self.ess), ".0f")
            notes.append(f"ESS: median of the predictions {size} of {num_chains * num_draws} draws")
            notes.append(
                f"Monte Carlo standard error of the LPPD of all: {_figure(self.mcse, '.2g')}"
            )
        if self.of == "weights":
            notes.append(
                "For R-hat across chains, ESS and LPPD of the predictions, which matter more"
            )
            notes.append('than weights, pass what `predict(..., per="draw", targets=...)` returns.')
        return notes

    def _judgement(self) -> list[str]:
        if not self.findings:
            seen = " in weights and trace" if self.of == "weights" else ""
            few = (
                f", but that is hard to tell from fewer than {LEAST_DRAWS_JUDGED} draws of a chain"
            )
            return [f"Nothing looks wrong{seen}{few * (self.num_draws < LEAST_DRAWS_JUDGED)}."]
        return [
            f"{_named(finding.chains, len(self.drift))}: {finding.problem}\n  Try: {finding.advice}"
            for finding in self.findings
        ]


def summary(
    snapshots: Snapshots | StoredSnapshots,
    prediction: Prediction | None = None,
    *,
    max_inputs: int = 200,
    seed: int = 0,
) -> Summary:
    """Look at a whole run and say what looks wrong and what to try.

    Found are chains that have diverged, are frozen, still on their way or not settled; different
    modes among the others; far more resets than nominal; a tuner that still changes the step size.
    The module's constants are the bounds. From weights alone it cannot tell different modes, nor
    chains that all predict badly.

    Args:
        snapshots: what `sample` or `load_snapshots` returns; weights without a sampler, such as a
            deep ensemble, get a short summary.
        prediction: of the same draws, `predict(..., per="draw", targets=...)`, on test or training
            data: chains are then judged by what they predict, not by their weights. Of several
            outputs that of each input which varies most is taken.
        max_inputs: how many predictions at random, or weights, R-hat and ESS look at, >= 1.
        seed: of the choice, >= 0.

    Returns:
        A `Summary`: print it.

    Raises:
        ValueError: an argument out of range; a prediction without single draws or targets, or of
            other draws.
        ImportError: ArviZ is missing, unless there are too few draws for it.

    Cost: a millisecond per chain and prediction, and a pass over the draws, which need not fit into
    memory.
    """
    _check.whole("summary", "max_inputs", max_inputs, 1)
    _check.whole("summary", "seed", seed, 0)
    num_draws, paths = snapshots.num_draws, statistics.walk(snapshots, max_inputs, seed)
    trace, settings = snapshots.trace, snapshots.settings or {}
    seen = statistics.of_draws(trace, num_draws)
    unknown, values, density = np.full(snapshots.num_chains, np.nan), None, None
    figures: dict[str, Any] = {field.name: unknown for field in dataclasses.fields(Summary)}
    figures |= {"num_draws": num_draws, "of": "weights", "lppd": np.nan, "mcse": np.nan}
    figures |= {"rhat_within": unknown[:, None], "rhat_across": np.empty(0), "ess": np.empty(0)}
    figures |= {"nominal_rate": _nominal_rate(settings), "findings": ()}
    if trace:
        figures |= {
            "first_step_size": np.asarray(trace["step_size"], float)[:, 0],
            "last_step_size": np.asarray(seen["step_size"], float)[:, -1],
            "drift": statistics.step_size_drift(seen),
            "reset_rate": statistics.reset_rate(seen),
            "energy_distance": statistics.energy_fit(seen).distance,
            "num_nonfinite": np.asarray(seen["num_nonfinite"], float)[:, -1],
        }
    figures["travelled"] = statistics.relative(paths)[:, -1]
    if prediction is not None:
        density = statistics.log_density_of("summary", snapshots, prediction)
        values = _scalars(prediction, density, max_inputs, seed)
        by_chain = statistics.log_mean_exp(density, (1,))
        lppd = float(statistics.log_mean_exp(by_chain, (0,)).mean())
        figures |= {"of": "predictions", "chain_lppd": by_chain.mean(axis=1), "lppd": lppd}
        if num_draws >= LEAST_DRAWS:
            figures["ess"] = statistics.ess(values)
            figures["mcse"] = statistics.mcse_lppd(density) if np.isfinite(lppd) else np.nan
            if len(values) > 1:
                figures["rhat_across"] = statistics.rhat(values)
    series = paths.weights if values is None else values
    if num_draws >= LEAST_DRAWS_WITHIN and series.shape[2]:
        figures["rhat_within"] = statistics.rhat_within(series)
    found = Summary(**figures)
    with np.errstate(divide="ignore", invalid="ignore"):
        findings = _findings(found, _Run(paths, settings, seen, values, density))
    return dataclasses.replace(found, findings=tuple(findings))


class _Run(NamedTuple):
    """What findings are made from: paths, settings, the trace at the draws, single predictions."""

    paths: statistics.Paths
    settings: Mapping[str, Any]
    trace: dict[str, np.ndarray]
    values: np.ndarray | None
    density: np.ndarray | None


def _findings(found: Summary, run: _Run) -> list[Finding]:
    """Judge each chain; a kind of trouble is told once per chain, by its first sign."""
    findings, sick = [], np.zeros(len(found.drift), bool)

    def find(chains: np.ndarray, problem: str, advice: str):
        if chains.any():
            findings.append(Finding(tuple(np.flatnonzero(chains).tolist()), problem, advice))

    rhats = np.array([_median(chain) for chain in found.rhat_within])
    for signs, kind, advice in (
        (
            _diverged(run),
            "diverged",
            "a smaller step size, or a start closer by; leave these chains out of the prediction.",
        ),
        (
            _frozen(found, run, mixes=rhats < HIGH_RHAT),
            "frozen",
            "larger steps; `angle_tuner()`, or `quantile_tuner(adapt_steps=...)` with few steps.",
        ),
    ):
        told = np.zeros_like(sick)
        for chains, problem in signs:
            find(chains & ~told, f"{kind}: {problem}", advice)
            told |= chains
        sick |= told
    falling = np.zeros_like(sick)
    if "on_its_way" in run.trace:
        falling = (_ends(np.asarray(run.trace["on_its_way"], float))[1] > 0.5) & ~sick
    find(
        falling,
        "still on its way: the gradients say that the energy was falling until the end.",
        "a larger num_warmup; a start from trained weights, as `warmstart` makes them.",
    )
    enough = found.num_draws >= LEAST_DRAWS_JUDGED
    bound = HIGH_WEIGHT_RHAT if run.values is None else HIGH_RHAT
    unsettled = (rhats > bound) & enough & ~sick & ~falling
    find(
        unsettled,
        "not settled: the draws at the beginning differ from those at the end (R-hat above"
        f" {bound:g}).",
        "a larger num_warmup, if there is a trend; a larger thin, more draws or a larger step size,"
        " if the chain moves too slowly.",
    )
    steady = ~sick & ~unsettled & ~falling
    if run.values is not None and enough:
        members = np.flatnonzero(steady)
        groups = [members[group].tolist() for group in _groups(run.values[steady])]
        if len(groups) > 1:
            listed = f": {' and '.join(map(str, groups))}" if len(groups) <= MOST_GROUPS else ""
            find(
                steady,
                f"different modes: {len(groups)} groups of steady chains predict differently"
                f"{listed}.",
                "nothing, for networks, where this is normal: average over all chains, and do not"
                " read R-hat across chains as convergence to one posterior. More chains or"
                " `cyclical_sgld` find more modes.",
            )
    if run.trace:
        resets = np.asarray(run.trace["num_resets"], float)
        often = found.reset_rate > np.maximum(MOST_RESETS * found.nominal_rate, LEAST_RESET_RATE)
        find(
            often & (resets[:, -1] - resets[:, 0] >= LEAST_EVENTS),
            f"undone steps: over {MOST_RESETS:g} times as many as `reset_quantile` stands for.",
            "a smaller step size, larger batches, or a higher `reset_quantile`, up to 0.9999.",
        )
        # Without a tuner the step size follows a schedule that was asked for.
        tuned = not run.settings or run.settings.get("tuner") is not None
        find(
            (np.maximum(found.drift, 1 / found.drift) > MOST_DRIFT) & tuned & ~sick,
            f"drift: the step size changed more than {MOST_DRIFT:g}-fold among the draws.",
            "a longer warm-up: the steps of `angle_tuner` follow the gradients, whose size still"
            " changes; `quantile_tuner` needs `adapt_steps` within it.",
        )
    return findings


def _diverged(run: _Run) -> Iterator[tuple[np.ndarray, str]]:
    """Signs that a chain has left the region of good parameters."""
    if run.trace:
        broken, calls = (
            values[:, -1] - values[:, 0]
            for values in (run.trace["num_nonfinite"], run.trace["num_calls"])
        )
        yield broken > MOST_NONFINITE * calls, "gradients keep being infinite or NaN."
    precision, temperature = (run.settings.get(x) for x in ("prior_precision", "temperature"))
    prior = 0.0
    # From a start near 0 a chain may grow to the norm of a draw from the prior.
    if isinstance(precision, int | float) and isinstance(temperature, int | float) and precision:
        prior = np.sqrt(run.paths.size * temperature / precision)
    expected = np.maximum(run.paths.start_norm, prior)
    blown = (expected > 0) & (_ends(run.paths.norm)[1] > MUCH * expected)
    yield blown, f"the parameters are more than {MUCH:g} times as large as at the start."
    if run.density is not None:
        by_draw, by_input = run.density.mean(axis=2), run.density.mean(axis=1)
        spread = np.subtract(*np.quantile(by_input, (0.75, 0.25), axis=1))
        # Where likelihoods differ a lot from input to input, less is no news.
        far = max(FAR_BELOW, float(np.median(spread)))
        first, last = _ends(by_draw)
        yield _others(last) - last > far, "the log likelihood is far below the other chains'."
        yield first - last > far, "the log likelihood fell far below where it was at first."


def _frozen(found: Summary, run: _Run, mixes: np.ndarray) -> Iterator[tuple[np.ndarray, str]]:
    """Signs that a chain moves too little; small steps are no harm if it mixes all the same."""
    if found.num_draws < 2:
        return
    moves = run.paths.moved
    yield moves.max(axis=1) == 0, "the parameters do not move at all."
    if run.trace:
        below = np.mean(run.trace["below_resolution"], axis=1) > 0.5
        yield below, "the steps are too short for the precision of the parameters."
        # The largest of the last third, for a schedule that goes in cycles.
        sizes = np.asarray(run.trace["step_size"], float)
        size = sizes[:, 2 * sizes.shape[1] // 3 :].max(axis=1)
        fell = (MUCH * size < found.first_step_size) & ~mixes
        yield fell, f"the step size fell more than {MUCH:g}-fold."
        small = (MUCH * size < _others(size)) & ~mixes
        yield small, f"the step size is less than 1/{MUCH:g} of the other chains'."
    last = _ends(moves)[1]
    near = (MUCH * last < _others(last)) & ~mixes
    yield near, f"draws are less than 1/{MUCH:g} as far apart as in the other chains."


def _groups(values: np.ndarray) -> list[list[int]]:
    """Join chains of which a series of pairs agrees, in the averages of most values."""
    centre, variance = values.mean(axis=1), values.var(axis=1)
    groups: list[list[int]] = []
    for chain in range(len(values)):
        # (R-hat)^2 - 1 of two long chains.
        excess = (centre - centre[chain]) ** 2 / (variance + variance[chain])
        agrees = (excess > HIGH_RHAT**2 - 1).mean(axis=1) < MANY_INPUTS
        joined = [group for group in groups if agrees[group].any()]
        groups = [group for group in groups if group not in joined]
        groups.append(sorted([chain, *(member for group in joined for member in group)]))
    return sorted(groups)


def _nominal_rate(settings: Mapping[str, Any]) -> float:
    """Undone steps per gradient if energy errors are as fitted; NaN without an outlier test."""
    quantile = settings.get("reset_quantile")
    if not isinstance(quantile, float):
        return np.nan
    return (1 - quantile) / (2 if settings.get("integrator") == "minimal_norm" else 1)


def _scalars(prediction: Prediction, density: np.ndarray, max_inputs: int, seed: int) -> np.ndarray:
    """One number per input `[chain, draw, input]` of a random choice of inputs."""
    values = density if prediction.each.mean is None else prediction.each.mean
    number = values.shape[2]
    rows = np.random.default_rng(seed).permutation(number)[:max_inputs]
    values = np.asarray(values[:, :, np.sort(rows)], float)
    values = values.reshape(*values.shape[:3], -1)
    most = values.var(axis=(0, 1)).argmax(axis=-1)
    # An impossible target is far below a possible one.
    lowest = np.finfo(np.float32).min
    return np.maximum(np.take_along_axis(values, most[None, None, :, None], 3)[..., 0], lowest)


def _ends(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Medians of the first and of the last third, `[chain]`."""
    third = max(1, values.shape[1] // 3)
    return np.median(values[:, :third], axis=1), np.median(values[:, -third:], axis=1)


def _others(values: np.ndarray) -> np.ndarray:
    """Median of the other chains, for each; NaN for a chain alone."""
    return np.array([_median(np.delete(values, chain)) for chain in range(len(values))])


def _median(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if known.size else np.nan


def _figure(value: float, form: str = ".3g") -> str:
    return "-" if np.isnan(value) else format(value, form)


def _shares(rhats: np.ndarray) -> str:
    known = rhats[~np.isnan(rhats)]
    parts = [f"{np.mean(known < bound):.0%} below {bound}" for bound in GOOD_RHATS]
    return ", ".join(parts) if known.size else "unknown for all"


def _named(chains: tuple[int, ...], num_chains: int) -> str:
    if len(chains) == num_chains > 1:
        return f"All {num_chains} chains"
    return f"Chain{'s' * (len(chains) > 1)} {', '.join(map(str, chains))}"
