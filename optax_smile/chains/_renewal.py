"""Control variates of a run: when to move their centres, and with which data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from optax_smile import _check, _on_host
from optax_smile._warn import warn
from optax_smile.chains._centers import Plan
from optax_smile.chains._chains import Chains
from optax_smile.mistakes.batches import PASS, require_all
from optax_smile.mistakes.loss import LOSS_ROUNDING

# Largest remaining share of the noise with which a control variate is used; below the second share,
# centres are renewed half as often.
MOST_NOISE, LITTLE_NOISE = 0.5, 0.25
# Most passes and fewest steps between two centres (old centres add noise along narrow directions of
# a curved posterior); passes after which the run warns that the control variate does not pay.
LONGEST, SHORTEST, PATIENCE = 4, 32, 15
# Most batches that measure the noise: gradients of classifiers have heavy tails.
MEASURED = 4
# Largest difference between the losses of batches and of all data at a centre, in standard errors,
# and minimum number of batches for this test.
MOST_EXCESS, LEAST_BATCHES = 8.0, 16
# Relative rounding errors of sums over the data in float64.
ROUNDING = 1e-9
# Largest difference between the mean loss of two halves of a batch and that of the whole, relative
# to half of the latter.
MOST_APART = 1e-3
ALL_DATA = "an iterable of batches, no iterator, with each of the `num_data` examples once"
GIVEN = _check.Where(
    ALL_DATA,
    lambda value: (
        _check.REPEATABLE.holds(value)
        and not hasattr(value, "ndim")
        and (not hasattr(value, "__len__") or len(value) > 0)
    ),
)


@dataclasses.dataclass
class Centers:
    """Renews the centres of all chains, from passes over `all_data` with `number` examples each.

    Centres are renewed so often that the noise stays below `MOST_NOISE`, and less often if it is
    below `LITTLE_NOISE`. If that takes more than one renewal per pass, the run goes on without a
    control variate, and tries again after twice as many steps.
    """

    all_data: Iterable[object]
    number: Any
    per_chain: bool
    sums: np.ndarray | None = None
    has_warned: bool = False

    def __post_init__(self):
        if not isinstance(self.number, int | float):
            rule = "a sampler with a number `num_data`, for `control_variate`"
            _check.fail("sampler", rule, f"one with {self.number}")
        self.is_list = isinstance(self.all_data, (list, tuple))
        for _ in self.sized() if self.is_list else ():
            pass

    def look(self, chains: Chains, step: int, batches: Sequence[object], batches_per_step: int):
        """Renew the centres before a step if they are due; `batches` are the next ones."""
        plan = chains.plan
        if step < plan.due:
            return
        if not plan.length:
            rows = _on_host.num_examples(batches[0], self.per_chain) or 0
            if not 2 <= rows < self.number:
                rule = f"batches of 2 to {self.number - 1:g} examples, for `control_variate`"
                _check.fail("batches", rule, f"one of {rows}")
            if abs(ratio := chains.ratio_of_halves(batches[0]) - 2) > MOST_APART:
                rule = "the mean of numbers of single examples, for `control_variate`"
                got = f"a loss of which halves of a batch have means {ratio:.1%} apart from its own"
                _check.fail("loss_fn", rule, got, "Statistics of the batch are none.")
            length = max(math.ceil(self.number / rows / batches_per_step), SHORTEST)
            plan = Plan(length, length)
        if plan.is_placed:
            if plan.is_on:
                self.check_batches(*chains.excess())
            left = chains.noise_left(batches[:MEASURED])
            plan = self.judged(plan, step, float(np.median(left)))
        else:
            plan = plan._replace(is_placed=True)
        if plan.is_placed:
            chains.move_centers()
            plan = plan._replace(due=step + plan.interval)
        if plan.is_on:
            self.gather(chains)
            plan = plan._replace(num_passes=plan.num_passes + 1)
            if not np.all(np.isfinite(chains.excess()[1])):
                plan = self.paused(plan, step, "the loss of all data is not finite at a draw.")
        chains.plan = plan

    def judged(self, plan: Plan, step: int, left: float) -> Plan:
        """Decide whether the centres are renewed, and how often."""
        interval = plan.interval
        if left < LITTLE_NOISE and (interval < LONGEST * plan.length or not plan.is_on):
            interval *= 2
        elif not left <= MOST_NOISE:
            interval //= 2
        if interval > plan.length or plan.is_on and interval == plan.length:
            return plan._replace(is_on=True, interval=interval)
        share = f"after a pass, it leaves {left:.0%} of the variance of the gradients."
        return self.paused(plan, step, share if step >= PATIENCE * plan.length else "")

    def paused(self, plan: Plan, step: int, reason: str) -> Plan:
        """Stop using the control variate until twice as many steps; warn with the first reason."""
        if reason and not self.has_warned:
            self.has_warned = True
            goes_on = "The run goes on without, and tries again from time to time."
            name = _check.function_name()
            warn(f"`{name}`: `control_variate` does not pay here: {reason} {goes_on}")
        pause = {"is_on": False, "is_placed": False, "interval": plan.length, "due": 2 * step}
        return plan._replace(**pause)

    def sized(self) -> Iterator[tuple[int, object]]:
        """Yield all data with the indices of the batches, and require that they are complete."""
        rows = 0
        for place, batch in enumerate(self.all_data):
            batch = _on_host.as_numeric("control_variate", batch, copy=not self.is_list)
            if not (size := _on_host.num_examples(batch, self.per_chain)):
                _check.fail("control_variate", ALL_DATA, "a batch without examples")
            rows += size
            if rows > self.number:
                break
            yield place, batch
        require_all("control_variate", rows, self.number)

    def gather(self, chains: Chains):
        """Make a pass over all data."""
        sums = np.zeros(())
        for place, batch in self.sized():
            if not place and (reason := chains.misfit(batch)):
                _check.fail("control_variate", ALL_DATA, f"a batch that {reason}")
            chains.gather(batch, place)
            if not self.is_list:
                sums = sums + np.array([_moments(x) for x in jax.tree.leaves(batch)])
        if not self.is_list:
            before, self.sums = sums if self.sums is None else self.sums, sums
            if np.any(np.abs(sums - before) > ROUNDING * before[:, 1:]):
                got = "other examples than in the pass before"
                _check.fail("control_variate", ALL_DATA, got, PASS)

    def check_batches(self, sums: np.ndarray, losses: np.ndarray):
        """Require that batches and centres have the same data, from `Chains.excess`."""
        number, total, squares = np.asarray(sums, float).T
        if number.min() < LEAST_BATCHES:
            return
        mean = total / number
        variance = np.maximum(squares / number - mean**2, 0) / number
        error = np.sqrt(variance + (LOSS_ROUNDING * (1 + np.abs(losses))) ** 2)
        if (ratio := float(np.median(np.abs(mean) / error))) > MOST_EXCESS:
            rule = "the data of `batches`"
            got = (
                f"data whose mean loss is {np.median(losses):.4g} at points where that of the"
                f" batches is {np.median(losses + mean):.4g}, {ratio:.0f} standard errors away"
            )
            _check.fail("control_variate", rule, got, PASS)


def _moments(array: object) -> tuple[float, float]:
    """Return the sum of an array, and that of its absolute values."""
    array = np.asarray(array, float)
    return float(array.sum()), float(np.abs(array).sum())
