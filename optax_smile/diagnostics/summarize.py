"""Judge a run: `summary`, its result and how it is printed."""

from __future__ import annotations

import dataclasses
import textwrap

import numpy as np
from numpy.typing import ArrayLike

from optax_smile import _check, _table, _trace
from optax_smile.diagnostics import statistics
from optax_smile.diagnostics.findings import (
    GOOD_RHATS,
    LEAST_DRAWS_JUDGED,
    Check,
    Facts,
    checks,
    copy_of,
    median_of,
    nominal_rate,
    rejection_rate,
    share_above,
    step_size_trend,
)
from optax_smile.diagnostics.paths import walk
from optax_smile.diagnostics.statistics import LEAST_DRAWS, LEAST_DRAWS_WITHIN, Posterior
from optax_smile.draws._constraints import PREDICTION, log_density_of
from optax_smile.draws.prediction import Prediction
from optax_smile.draws.snapshots import Snapshots, StoredSnapshots

COLD = "a cold posterior, narrower than the Bayesian one"
OTHER_NORM = "not the Bayesian posterior unless gradients are those of all data"
# Entries of a trace that checks need; NaN where they are missing.
NEEDED = ("step_size", "num_rejected", "num_gradients", "num_nonfinite", "below_resolution")
NEEDED += ("temperature", "loss", "num_parameters")
# Report under- or overconfidence only if the gap exceeds this size and so many standard errors.
LARGE_SURPLUS, MOST_ERRORS = 0.02, 3
# Findings that `repr` shows, and characters of each.
MOST_SHOWN, LONGEST_SHOWN = 4, 100


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Summary:
    """Statistics of a run, NaN where unknown; `print(summary)` shows them with the findings.

    Attributes:
        num_draws: number of draws per chain.
        of: what R-hat is computed on: `"predictions"` or `"weights"`.
        first_step_size, last_step_size: step size at the first and the last tick, `[chain]`.
        step_size_trend: median step size of the last tenth of the draws / that of the second tenth,
            `[chain]`.
        rejection_rate: rejected steps per gradient among the draws, `[chain]`.
        nominal_rate: this rate for a perfect fit with the given `reject_quantile`, or NaN.
        num_nonfinite: number of gradients or values that were not finite, `[chain]`.
        temperature: temperature of the posterior, 1 for Bayes, `[chain]`.
        norm: norm of the momentum, `"euclidean"`, `"spectral"` or the name of another class.
        copy_of: the first chain with equal draws, bit for bit, `[chain]`. Copies count once in
            `rhat_across`, `ess` and `mcse`.
        rhat_within: R-hat of the quarters of single predictions or weights, `[chain, point]`.
        rhat_across, ess: R-hat and effective sample size of all chains for single predictions,
            `[point]`; empty without them.
        chain_lppd: log pointwise predictive density of each single chain, nats, `[chain]`.
        lppd, mcse: the same for all chains together, and its Monte Carlo standard error.
        surplus: accuracy minus mean confidence of the average of all chains, and its standard
            error; NaN without class probabilities. Positive: underconfident.
        tempered: temperature of a tempered prediction, which acts on `surplus` alone.
        checks: all tests for which there was enough information, passed or not.
    """

    num_draws: int
    of: str
    first_step_size: np.ndarray
    last_step_size: np.ndarray
    step_size_trend: np.ndarray
    rejection_rate: np.ndarray
    nominal_rate: float
    num_nonfinite: np.ndarray
    temperature: np.ndarray
    norm: str
    copy_of: np.ndarray
    rhat_within: np.ndarray
    rhat_across: np.ndarray
    ess: np.ndarray
    chain_lppd: np.ndarray
    lppd: float
    mcse: float
    surplus: tuple[float, float] = (np.nan, np.nan)
    tempered: float | None = None
    checks: tuple[Check, ...] = ()

    @property
    def findings(self) -> tuple[Check, ...]:
        """The tests that failed."""
        return tuple(check for check in self.checks if not check.passed)

    def __str__(self) -> str:
        table = _table.aligned(self._columns())
        return "\n".join([*table, "", *self._notes(), "", *self._judgement()])

    def __repr__(self) -> str:
        # First the most important findings, then those without advice.
        chains = _table.counted(len(self.step_size_trend), "chain")
        title = f"Summary: {chains} of {_table.counted(self.num_draws, 'draw')}"
        rhats = [median_of(rhats) for rhats in (self.rhat_within, self.rhat_across)]
        error = "" if np.isnan(self.mcse) else f", Monte Carlo standard error {self.mcse:.2g}"
        rows = {"LPPD": f"{self.lppd:.5g}{error}"} if not np.isnan(self.lppd) else {}
        if not np.all(np.isnan(rhats)):
            within, across = (_figure(rhat, ".2f") for rhat in rhats)
            rows["R-hat"] = f"median {within} within chains, {across} across"
        for number, line in enumerate(self._judgement()[:MOST_SHOWN], 1):
            head = f"finding {number}" if self.findings else "findings"
            rows[head] = textwrap.shorten(line.splitlines()[0], LONGEST_SHOWN, placeholder=" ...")
        if self.findings:
            rows["print it"] = "for all findings and advice"
        return _table.described(title, rows)

    def _columns(self) -> dict[str, list[str]]:
        def column(values: ArrayLike, form: str, overall: float = np.nan) -> list[str]:
            return [_figure(value, form) for value in (*np.asarray(values), overall)]

        first, last = column(self.first_step_size, ".2g"), column(self.last_step_size, ".2g")
        steps = [x if x == "-" else f"{x} -> {y}" for x, y in zip(first, last, strict=True)]
        rhats = [median_of(chain) for chain in self.rhat_within]
        rate = self.rejection_rate / (self.nominal_rate if self.nominal_rate > 0 else 1)
        rejects = self.nominal_rate > 0 or (self.rejection_rate > 0).any()
        columns = {
            "chain": [*map(str, range(len(first) - 1)), "all"],
            "step size": steps,
            "trend": column(self.step_size_trend, ".2f"),
            "rejections": column(rate, ".2g") if rejects else ["-"],
            "non-finite": column(self.num_nonfinite, ".0f"),
            "R-hat": column(rhats, ".2f", median_of(self.rhat_across)),
            "LPPD": column(self.chain_lppd, ".5g", self.lppd),
        }
        return {head: cells for head, cells in columns.items() if set(cells) != {"-"}}

    def _notes(self) -> list[str]:
        num_draws, columns = self.num_draws, self._columns()
        notes = [f"chains: {len(self.copy_of)}, draws of each: {num_draws}"]
        if np.isnan(self.first_step_size).all():
            notes.append("no trace: the chains may still be on their way. To see that, pass")
            notes.append("  `stats(state)` of each draw to `Snapshots.from_draws(draws, trace)`.")
        if np.any(self.temperature < 1):
            notes.append(f"temperature {np.nanmin(self.temperature):.3g}: {COLD}")
        if self.norm != "euclidean":
            notes.append(f"norm={self.norm!r}: {OTHER_NORM}")
        of = f" / the nominal {self.nominal_rate:.2g}" if self.nominal_rate > 0 else ""
        meanings = {
            "step size": "at the first record of the run -> at the last draw",
            "trend": "step size at the end of the draws / near their beginning",
            "rejections": f"rejected steps per gradient{of}",
        }
        notes += [f"{head}: {text}" for head, text in meanings.items() if head in columns]
        if num_draws < LEAST_DRAWS_WITHIN:
            notes.append(f"R-hat within a chain needs {LEAST_DRAWS_WITHIN} draws.")
        else:
            parts = "the quarters of a chain, or all chains"
            notes.append(f"R-hat: compares {parts}; median over the {self.of}")
            notes.append(f"  within chains {_shares(self.rhat_within)}")
        if self.rhat_across.size:
            notes.append(f"  across chains (all) {_shares(self.rhat_across)}")
        if self.ess.size:
            size, error = _figure(median_of(self.ess), ".0f"), _figure(self.mcse, ".2g")
            number = len(np.unique(self.copy_of)) * num_draws
            notes.append(f"ESS: {size} of {number} draws, median over the predictions")
            notes.append(f"Monte Carlo standard error of the LPPD (all): {error}")
        if self.tempered is not None:
            notes.append(f"temperature of the prediction: {self.tempered:.3g}; R-hat, ESS and LPPD")
            notes.append("  are those of the draws, without it")
        gap, error = self.surplus
        if abs(gap) > max(LARGE_SURPLUS, MOST_ERRORS * error):
            kind = "underconfident" if gap > 0 else "overconfident"
            notes.append(f"{kind}: accuracy minus mean confidence is {gap:+.3f} +- {error:.3f};")
            fitted = "metrics.temperature(held_out, held_out_targets)"
            notes.append(f"  correct it: `prediction.tempered({fitted})`")
        if self.of == "weights":
            notes.append("Predictions matter more than weights. To get their R-hat, ESS and LPPD,")
            notes.append('pass the result of `predict(..., per="draw", targets=...)`.')
        return notes

    def _judgement(self) -> list[str]:
        if not self.findings:
            seen = " in weights and trace" if self.of == "weights" else ""
            return [f"Nothing looks wrong{seen}{self._reservation()}."]
        lines = []
        for x in self.findings:
            name = f"Chain{'s' * (len(x.chains) > 1)} {', '.join(map(str, x.chains))}"
            if len(x.chains) == len(self.copy_of) > 1:
                name = f"All {len(x.chains)} chains"
            lines.append(f"{name}: {x.kind}: {x.text}\n  Try: {x.advice}")
        return lines

    def _reservation(self) -> str:
        """Return a reservation about a run without findings."""
        if self.num_draws < LEAST_DRAWS_JUDGED:
            few = f"fewer than {LEAST_DRAWS_JUDGED} draws per chain"
            return f", but that is hard to tell from {few}"
        bound = GOOD_RHATS[-1]
        shares = {"within": share_above(self.rhat_within), "across": share_above(self.rhat_across)}
        above = [f"{share:.0%} of the R-hats {x}" for x, share in shares.items() if share >= 0.005]
        if not above:
            return ""
        apart = ", which for weights may be harmless" * (self.of == "weights")
        return f", but {' and '.join(above)} chains are above {bound}{apart}"


def _figure(value: float, form: str = ".3g") -> str:
    return "-" if np.isnan(value) else format(value, form)


def _shares(rhats: np.ndarray) -> str:
    known = rhats[~np.isnan(rhats)]
    if not known.size:
        return "all unknown"
    return ", ".join(f"{np.mean(known < bound):.0%} below {bound}" for bound in GOOD_RHATS)


@_check.arguments(
    snapshots=Posterior(),
    prediction=PREDICTION | None,
    max_inputs=_check.Whole(1),
    seed=_check.Whole(0),
)
@_check.on_host
def summary(
    snapshots: Snapshots | StoredSnapshots,
    prediction: Prediction | None = None,
    *,
    max_inputs: int = 200,
    seed: int = 0,
) -> Summary:
    """Check a whole run: what looks wrong, and what to try. Print the result.

    - copies: chains have equal draws.
    - equal keys: other chains use equal random numbers.
    - altered: updates were changed, the gradients were clipped, or the state of the sampler was
      initialized again.
    - not finite: in every chain, more than 1 % of the gradients or losses are not finite.
    - diverged: a chain has very large parameters, or predicts far worse than other chains or its
      own first draws; or more than 1 % of its gradients or losses are not finite.
    - frozen: a chain hardly moves.
    - still on its way: the energy of a chain is still decreasing.
    - not settled: the predictions (without a `prediction`, the weights) of a chain still drift.
    - slow: a chain has few independent draws.
    - different modes: groups of chains predict differently at many inputs.
    - chains differ: there are no such groups, but R-hat across chains is high at many inputs.
    - worse than the start: the loss is far above that of the start, or slightly above it if there
      are more parameters than examples.
    - rejected steps: many more than the `reject_quantile` of the sampler implies.
    - step size: a tuner still changes the step size.

    For class probabilities, a note may say "underconfident" or "overconfident".

    Without a `prediction`, the R-hats are those of weights, which may differ between chains whose
    predictions agree, and "slow", "different modes" and "chains differ" are not checked.

    Args:
        snapshots: result of `sample`, `load_snapshots` or `Snapshots.from_draws`.
        prediction: result of `predict(..., per="draw", targets=...)` for the same draws. If an
            input has several outputs, the one with the largest variance over the draws is used.
        max_inputs: largest number of randomly chosen inputs (without a prediction: of weights) for
            R-hat and ESS, >= 1.
        seed: seed of this choice, >= 0.

    Raises:
        ValueError: no draws, iterates of an optimizer or draws chosen by their indices; a
            prediction without single draws or targets, or of other numbers of draws; NaN.
        ImportError: arviz-stats is not installed. R-hat and ESS need at least 8 draws per chain,
            or 4 with a `prediction`.

    Cost: about a millisecond per chain and chosen input, and one pass over the draws. At most two
    draws of each chain are in memory.

    Example:
        >>> import numpy as np, optax_smile
        >>> draws = optax_smile.Snapshots(np.random.default_rng(0).normal(size=(2, 40, 3)))
        >>> optax_smile.diagnostics.summary(draws).findings
        ()
    """
    num_chains, num_draws, settings = snapshots.num_chains, snapshots.num_draws, snapshots.settings
    settings, unknown = settings or {}, np.full(num_chains, np.nan)
    paths = walk(snapshots, max_inputs, seed)
    of_draws = _trace.of_draws(snapshots.trace, num_draws)
    trace = dict.fromkeys(NEEDED, np.full((num_chains, num_draws), np.nan))
    trace |= {name: np.asarray(values, float) for name, values in of_draws.items()}
    with _check.called("Snapshots"):
        _trace.read(trace, *NEEDED)
    first_step_size = np.asarray(snapshots.trace.get("step_size", trace["step_size"]), float)[:, 0]
    copies = copy_of(paths)
    own = np.unique(copies)
    values, density, chain_lppd, lppd, mcse = None, None, unknown, np.nan, np.nan
    rhat_within, rhat_across, sizes = unknown[:, None], np.empty(0), np.empty(0)
    series, source, least = paths.weights, "snapshots", LEAST_DRAWS_WITHIN
    if prediction is not None:
        density = log_density_of((num_chains, num_draws), prediction)
        values = _scalars(prediction, density, max_inputs, seed)
        by_chain = statistics.log_mean_exp(density, (1,))
        chain_lppd = by_chain.mean(axis=1)
        lppd = float(statistics.log_mean_exp(by_chain, (0,)).mean())
        series, source, least = values, "prediction", LEAST_DRAWS
    if num_draws >= least and np.isnan(series).any():
        _check.fail(source, "without NaN", "NaN in some draws")
    if values is not None and density is not None and num_draws >= LEAST_DRAWS:
        sizes = statistics.ess(values[own])
        mcse = statistics.mcse_lppd(density[own]) if np.isfinite(lppd) else np.nan
        rhat_across = statistics.rhat(values[own]) if len(own) > 1 else rhat_across
    if num_draws >= LEAST_DRAWS_WITHIN and series.shape[2]:
        rhat_within = statistics.rhat_within(series)
    facts = Facts(paths, settings, trace, values, density, copies, first_step_size, rhat_within)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = checks(facts)
        trend, rejections = step_size_trend(trace["step_size"]), rejection_rate(trace)
    norm = settings.get("norm", "euclidean")
    return Summary(
        num_draws=num_draws,
        of="weights" if values is None else "predictions",
        first_step_size=first_step_size,
        last_step_size=trace["step_size"][:, -1],
        step_size_trend=trend,
        rejection_rate=rejections,
        nominal_rate=nominal_rate(settings),
        num_nonfinite=trace["num_nonfinite"][:, -1],
        temperature=trace["temperature"][:, -1],
        norm=str(norm.get("name") if isinstance(norm, dict) else norm),
        copy_of=copies,
        rhat_within=rhat_within,
        rhat_across=rhat_across,
        ess=sizes,
        chain_lppd=chain_lppd,
        lppd=lppd,
        mcse=mcse,
        surplus=(np.nan, np.nan) if prediction is None else _surplus(prediction),
        tempered=None if prediction is None else prediction.temperature,
        checks=found,
    )


def _surplus(prediction: Prediction) -> tuple[float, float]:
    """Return accuracy minus confidence of class probabilities, and its standard error."""
    chances, target = np.asarray(prediction.mean), np.exp(np.asarray(prediction.log_density, float))
    is_known = target.ndim == 1 and len(target) > 1 and not np.isnan(target).any()
    if prediction.uncertainty != "entropy" or not is_known:
        return np.nan, np.nan
    if chances.ndim == 1:
        chances = np.stack([chances, 1 - chances], axis=1)
    if chances.ndim != 2 or not np.allclose(chances.sum(axis=1), 1, atol=1e-3):
        # Several outputs of two classes each.
        return np.nan, np.nan
    confidence = chances.max(axis=1)
    # The most probable class is right if the target has this probability. Classes of equal
    # probability share the average rate.
    ties = np.isclose(chances, confidence[:, None], rtol=1e-5).sum(axis=1)
    gaps = np.isclose(target, confidence, rtol=1e-5) / ties - confidence
    return float(gaps.mean()), float(gaps.std(ddof=1) / np.sqrt(len(gaps)))


def _scalars(prediction: Prediction, density: np.ndarray, max_inputs: int, seed: int) -> np.ndarray:
    """Return one number per input `[chain, draw, input]` for randomly chosen inputs."""
    values = density if prediction.each.mean is None else prediction.each.mean
    number = values.shape[2]
    rows = np.random.default_rng(seed).permutation(number)[:max_inputs]
    # Give impossible targets a finite density.
    values = np.maximum(np.asarray(values[:, :, np.sort(rows)], float), np.finfo(np.float32).min)
    values = values.reshape(*values.shape[:3], -1)
    most = values.var(axis=(0, 1)).argmax(axis=-1)
    return np.take_along_axis(values, most[None, None, :, None], 3)[..., 0]
