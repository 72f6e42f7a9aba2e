"""The result of `summary` and how it is printed."""

from __future__ import annotations

import dataclasses
import html
import textwrap
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from optax_smile import _table
from optax_smile.diagnostics.statistics import LEAST_DRAWS_WITHIN
from optax_smile.draws.snapshots import Stopping

# With fewer independent draws, the R-hat within a chain exceeds `HIGH_RHAT` by chance for one value
# in twenty (1.28 at 20 draws, simulated).
LEAST_DRAWS_JUDGED = 20
# Both are reported: the usual bound of Gelman and Rubin, and half of it.
GOOD_RHATS = (1.05, 1.1)
COLD = "a cold posterior, narrower than the Bayesian one"
# Findings that `repr` shows, and characters of each.
MOST_SHOWN, LONGEST_SHOWN = 4, 100


class Check(NamedTuple):
    """A test of the chains and its outcome.

    Attributes:
        kind: what it tests, such as "frozen".
        chains: the chains that fail; if the test passed, the chains that were tested.
        value: the measured number for each of these chains.
        bound: bound on healthy values. Some tests have further conditions, such as that the chain
            does not mix.
        passed: whether nothing looks wrong.
        advice: what to try; empty if the test passed.
        text: a sentence with the numbers.
    """

    kind: str
    chains: tuple[int, ...]
    value: tuple[float, ...]
    bound: float
    passed: bool
    advice: str
    text: str


@dataclasses.dataclass(frozen=True, repr=False)
class Summary:
    """Statistics of a run, NaN where unknown; `print(summary)` shows them with the findings.

    Attributes:
        num_draws: number of draws per chain.
        of: what R-hat is computed on: `"predictions"` or `"weights"`.
        first_step_size: step size at the first tick, `[chain]`.
        last_step_size: step size at the last tick, `[chain]`.
        step_size_trend: step size at the end of the draws / near their beginning, `[chain]`.
        rejection_rate: rejected steps per gradient among the draws, `[chain]`.
        nominal_rate: this rate for a perfect fit with the given `reject_quantile`; NaN without
            one.
        energy_distance: Kolmogorov-Smirnov distance of the energy errors of the draws from the
            Gamma distribution fitted to them, 0 to 1, `[chain]`; NaN if the sampler fits none.
        num_nonfinite: number of gradients or values that were not finite, `[chain]`.
        temperature: temperature of the posterior, 1 for Bayes, `[chain]`.
        travelled: distance of the last draw from the start / norm of the start, `[chain]`; for a
            start at 0 see `travel`.
        copy_of: the first chain with equal draws, bit for bit, `[chain]`; its own number if there
            is none before it. Copies count once in `rhat_across`, `ess` and `mcse`.
        rhat_within: R-hat of the quarters of one chain, `[chain, point]`, for single predictions or
            weights.
        rhat_across: R-hat of all chains for single predictions, `[point]`; empty without them.
        ess: effective sample size of all chains for single predictions, `[point]`; empty without
            them.
        chain_lppd: log pointwise predictive density of each single chain, nats, `[chain]`.
        lppd: the same for all chains together.
        mcse: Monte Carlo standard error of `lppd`.
        checks: all tests for which there was enough information, passed or not.
        findings: the tests that failed.
        stopping: result of the stopping rule of the run; None without a rule.
    """

    num_draws: int
    of: str
    first_step_size: np.ndarray
    last_step_size: np.ndarray
    step_size_trend: np.ndarray
    rejection_rate: np.ndarray
    nominal_rate: float
    energy_distance: np.ndarray
    num_nonfinite: np.ndarray
    temperature: np.ndarray
    travelled: np.ndarray
    copy_of: np.ndarray
    rhat_within: np.ndarray
    rhat_across: np.ndarray
    ess: np.ndarray
    chain_lppd: np.ndarray
    lppd: float
    mcse: float
    checks: tuple[Check, ...] = ()
    stopping: Stopping | None = None

    @property
    def findings(self) -> tuple[Check, ...]:
        """The tests that failed."""
        return tuple(check for check in self.checks if not check.passed)

    def __str__(self) -> str:
        table = _table.aligned(self._columns())
        return "\n".join([*table, "", *self._notes(), "", *self._judgement()])

    def __repr__(self) -> str:
        return _table.described(self._title(), self._rows())

    def _repr_html_(self) -> str:
        columns = self._columns()
        table = _table.in_html(zip(*columns.values(), strict=True), head=columns)
        texts = (html.escape("\n".join(part)) for part in (self._notes(), self._judgement()))
        notes, judgement = (f'<p style="white-space: pre-line">{text}</p>' for text in texts)
        return f"<p><b>{html.escape(self._title())}</b></p>{table}{judgement}{notes}"

    def _title(self) -> str:
        chains = _table.counted(len(self.step_size_trend), "chain")
        return f"Summary: {chains} of {_table.counted(self.num_draws, 'draw')}"

    def _rows(self) -> dict[str, str]:
        """Return what matters most, and the findings without advice."""
        rhats = [median_of(rhats) for rhats in (self.rhat_within, self.rhat_across)]
        error = "" if np.isnan(self.mcse) else f", Monte Carlo standard error {self.mcse:.2g}"
        rows = {"LPPD": f"{self.lppd:.5g}{error}"} if not np.isnan(self.lppd) else {}
        if not np.all(np.isnan(rhats)):
            within, across = (_figure(rhat, ".2f") for rhat in rhats)
            rows["R-hat"] = f"median {within} within chains, {across} across"
        judgement = [line for line in self._judgement() if line]
        shown = judgement[:MOST_SHOWN]
        for number, line in enumerate(shown, 1):
            line = textwrap.shorten(line.splitlines()[0], LONGEST_SHOWN, placeholder=" ...")
            rows[f"finding {number}" if self.findings else "findings"] = line
        if self.findings:
            more = _table.counted(len(judgement) - len(shown), "more finding")
            more = f"{more}, and " * (judgement != shown)
            rows["print it"] = f"for {more}advice"
        return rows

    def _columns(self) -> dict[str, list[str]]:
        def column(values: ArrayLike, form: str, overall: float = np.nan) -> list[str]:
            return [_figure(value, form) for value in (*np.asarray(values), overall)]

        first, last = (
            column(sizes, ".2g") for sizes in (self.first_step_size, self.last_step_size)
        )
        rhats = [median_of(chain) for chain in self.rhat_within]
        rate = self.rejection_rate / (self.nominal_rate if self.nominal_rate > 0 else 1)
        columns = {
            "chain": [*map(str, range(len(first) - 1)), "all"],
            "step size": [
                x if x == "-" else f"{x} -> {y}" for x, y in zip(first, last, strict=True)
            ],
            "trend": column(self.step_size_trend, ".2f"),
            "rejections": column(rate, ".2g") if self._rejects() else ["-"],
            "non-finite": column(self.num_nonfinite, ".0f"),
            "travelled": column(self.travelled, ".2g"),
            "R-hat": column(rhats, ".2f", median_of(self.rhat_across)),
            "LPPD": column(self.chain_lppd, ".5g", self.lppd),
        }
        return {head: cells for head, cells in columns.items() if set(cells) != {"-"}}

    def _rejects(self) -> bool:
        """Return whether to show rejected steps."""
        return self.nominal_rate > 0 or bool((self.rejection_rate > 0).any())

    def _notes(self) -> list[str]:
        num_chains, num_draws = len(self.step_size_trend), self.num_draws
        notes = [f"chains: {num_chains}, draws of each: {num_draws}"]
        if self.stopping is not None:
            notes.append(str(self.stopping))
        if np.any(self.temperature < 1):
            notes.append(f"temperature {np.nanmin(self.temperature):.3g}: {COLD}")
        if not np.isnan(self.first_step_size).all():
            of = f" / the nominal {self.nominal_rate:.2g}" if self.nominal_rate > 0 else ""
            notes.append("step size: at the first record of the run -> at the last draw")
            notes.append("trend: step size at the end of the draws / near their beginning")
            if self._rejects():
                notes.append(f"rejections: rejected steps per gradient{of}")
        if not np.isnan(self.energy_distance).all():
            worst = np.nanmax(self.energy_distance)
            text = f"energy errors: distance {worst:.2g} from the Gamma fit (Kolmogorov-Smirnov)"
            notes.append(text)
        if not np.isnan(self.travelled).all():
            notes.append("travelled: distance of the last draw from the start / norm of the start")
        if num_draws < LEAST_DRAWS_WITHIN:
            notes.append(f"R-hat within a chain needs {LEAST_DRAWS_WITHIN} draws.")
        else:
            parts = "the quarters of a chain, or all chains"
            notes.append(f"R-hat: compares {parts}; median over the {self.of}")
            notes.append(f"  within chains {_shares(self.rhat_within)}")
        if self.rhat_across.size:
            notes.append(f"  across chains (all) {_shares(self.rhat_across)}")
        if self.ess.size:
            size = _figure(median_of(self.ess), ".0f")
            number = len(np.unique(self.copy_of)) * num_draws
            notes.append(f"ESS: {size} of {number} draws, median over the predictions")
            notes.append(
                f"Monte Carlo standard error of the LPPD (all): {_figure(self.mcse, '.2g')}"
            )
        if self.of == "weights":
            notes.append("Predictions matter more than weights. To get their R-hat, ESS and LPPD,")
            notes.append('pass the result of `predict(..., per="draw", targets=...)`.')
        return notes

    def _judgement(self) -> list[str]:
        if not self.findings:
            seen = " in weights and trace" if self.of == "weights" else ""
            return [f"Nothing looks wrong{seen}{self._reservation()}."]
        num_chains = len(self.step_size_trend)
        return [
            f"{_named(x.chains, num_chains)}: {x.kind}: {x.text}\n  Try: {x.advice}"
            for x in self.findings
        ]

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


def share_above(rhats: np.ndarray) -> float:
    """Return the share of known R-hats above the larger of `GOOD_RHATS`; NaN if none is known."""
    known = rhats[~np.isnan(rhats)]
    return float(np.mean(known > GOOD_RHATS[-1])) if known.size else np.nan


def median_of(values: np.ndarray) -> float:
    """Return the median of the known values, NaN if there are none."""
    known = values[~np.isnan(values)]
    return float(np.median(known)) if known.size else np.nan


def _figure(value: float, form: str = ".3g") -> str:
    return "-" if np.isnan(value) else format(value, form)


def _shares(rhats: np.ndarray) -> str:
    known = rhats[~np.isnan(rhats)]
    parts = [f"{np.mean(known < bound):.0%} below {bound}" for bound in GOOD_RHATS]
    return ", ".join(parts) if known.size else "all unknown"


def _named(chains: tuple[int, ...], num_chains: int) -> str:
    if len(chains) == num_chains > 1:
        return f"All {num_chains} chains"
    return f"Chain{'s' * (len(chains) > 1)} {', '.join(map(str, chains))}"
