"""When to stop sampling: tests by betting on held-out examples."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Literal

import jax
import numpy as np
from jax.sharding import Mesh

from optax_smile import _check, _disk
from optax_smile._types import Batch, Output, Tree
from optax_smile.draws import _checks
from optax_smile.draws.likelihoods import Likelihood, Name
from optax_smile.draws.predict import Predictor
from optax_smile.draws.snapshots import Snapshots, Stopping, StoredSnapshots

Null = Literal["improvement", "doubling"]
# Bets, as fractions of the largest bet that cannot lose more than everything.
FRACTIONS = 2.0 ** -np.arange(6)
# The gain of an example counts up to this many nats: a doubled density. By doubling the draws no
# example can lose more.
MOST_GAIN = math.log(2)


@dataclasses.dataclass(frozen=True, init=False, eq=False)
class EvidenceStop:
    """Stop `sample` once held-out examples reject a null hypothesis.

    Every `every` draws of each chain it tests the draws so far, a *look*. Let p_0 be the predictive
    density of the start, averaged over the chains, and p_T that of the first T draws of each chain.
    The null hypothesis is one of

    - `"improvement"`: the draws predict no better than the start. If it is rejected, sampling
      helps. At a look after T draws, it is

          E[d] <= 0,  d = log p(y) - log p_0(y),  p = (p_0 + T p_T) / (T + 1)

      The test needs a lower bound of d, so p counts the start as one more draw of each chain:
      d >= -log(T + 1).
    - `"doubling"`: doubling the number of draws gains at least `tolerance`. If it is rejected, it
      gains less. At a look after T draws, it is

          E[g] >= tolerance,  g = min(log p_T(y) - log p_m(y), log 2),  m = T // 2

      The test needs an upper bound of g. So the gain of an example is capped at log 2 nats, and
      gains from a few examples whose density more than doubles are underestimated. The test is
      about the doubling from m to T, not about the next one, which usually gains less.

    The expectation is over new examples, given the draws. The evidence of a look with examples
    1 ... n is the e-value

        e = mean over f of prod_i (1 + f x_i / b),  f = 1, 1/2, ..., 1/32

    with x = d and b = log(T + 1), or x = tolerance - g and b = log 2 - tolerance. It is the average
    final wealth of gamblers who start with 1 and bet the fraction f / b on each example. Given the
    draws, the examples are independent, so under the null the expected wealth is at most 1, however
    dependent the draws are. Look k stops the run if e >= k (k + 1) / alpha. By Markov's inequality,
    look k does so under its null with probability at most alpha / (k (k + 1)). Over all looks,
    these bounds sum to alpha: the probability of ever stopping at a look whose null is true is at
    most alpha, although all looks use the same examples. Their e-values cannot be multiplied.

    The guarantee needs held-out examples that are independent of each other and were used neither
    for training nor to choose settings. They must not be the test data on which you report a score,
    because they choose the number of draws.

    Args:
        apply_fn: `apply_fn(params, inputs)`, for `predict`; `params` is a draw, with `aux` a dict.
        validation: pair of held-out inputs and targets, arrays `[example, ...]`. An example with
            several targets, such as tokens, counts by their mean; padding does not count.
        likelihood: see `predict`.
        null: `"improvement"` or `"doubling"`.
        alpha: bound on the probability of a false stop, in (0, 1).
        tolerance: of `"doubling"`, nats per example, in (0, log 2). Even if more draws gain
            nothing, look k needs about (4 + 2 log k) / tolerance examples to reject it: about 550
            examples at look 2 with tolerance 0.01.
        every: draws of each chain between two looks, >= 1.
        batch_size: examples to run at once, >= 1; None: all.

    Raises:
        ValueError: an argument is out of range. From `sample`: `observe` is given.

    Cost: one forward pass over the examples per draw and chain, repeated for the stored draws when
    a run resumes. Each of several processes gets the draws of all chains. Host memory: 16 bytes per
    target and, with `"doubling"`, 8 more for each look.

    Example:
        >>> import jax, jax.numpy as jnp, optax_smile
        >>> x, noise = jax.random.normal(jax.random.key(0), (2, 400))
        >>> apply_fn = lambda params, x: (params[0] * x + params[1], 0.0)
        >>> loss_fn = lambda params, batch: jnp.mean(
        ...     (apply_fn(params, batch[0])[0] - batch[1]) ** 2) / 2
        >>> stop = optax_smile.EvidenceStop(
        ...     apply_fn, (x[200:], noise[200:]), likelihood="gaussian"
        ... )
        >>> draws = optax_smile.sample(
        ...     loss_fn, jnp.array([[1.0, 2.0], [2.0, 1.0]]), [(x[:200], noise[:200])],
        ...     optax_smile.sgld(1e-3, num_data=200, key=0), num_warmup=50, num_draws=100,
        ...     key=0, progress=False, stop=stop,
        ... )
        >>> draws.num_draws, draws.stopping.has_stopped
        (10, True)

    Source: the idea of the first null, and of e-values for it, is that of Sommer et al. 2026,
    "Towards E-Value Based Stopping Rules for Bayesian Deep Ensembles", arXiv 2604.18089. The
    construction is ours; we could read no more of that paper than its abstract. Betting on a
    bounded mean: Waudby-Smith and Ramdas 2024.
    """

    apply_fn: Callable[[Tree, Batch], Output]
    validation: tuple[Batch, Batch]
    likelihood: Likelihood
    null: Null
    alpha: float
    tolerance: float
    every: int
    batch_size: int | None

    @_check.arguments(
        "EvidenceStop",
        apply_fn=_check.Function("(params, inputs)"),
        likelihood=_checks.Reading(),
        validation=_checks.HeldOut(),
        null=_check.OneOf(Null),
        alpha=_check.Real(0, 1, open="both", traced=False),
        tolerance=_check.Real(0, MOST_GAIN, open="both", traced=False),
        every=_check.Whole(1),
        batch_size=_check.Whole(1) | None,
    )
    def __init__(
        self,
        apply_fn: Callable[[Tree, Batch], Output],
        validation: tuple[Batch, Batch],
        *,
        likelihood: Name | Likelihood,
        null: Null = "improvement",
        alpha: float = 0.05,
        tolerance: float = 0.01,
        every: int = 10,
        batch_size: int | None = None,
    ):
        # A frozen dataclass does not allow assignment.
        vars(self).update(apply_fn=apply_fn, validation=validation, likelihood=likelihood)
        vars(self).update(null=null, alpha=float(alpha), tolerance=float(tolerance))
        vars(self).update(every=int(every), batch_size=batch_size)

    @_check.arguments(
        "EvidenceStop.judge",
        draws=_check.kind(
            (Snapshots, StoredSnapshots), "what `sample` or `load_snapshots` returns"
        ),
    )
    def judge(self, draws: Snapshots | StoredSnapshots) -> Stopping:
        """Return what the rule finds in draws that exist, up to the look at which it stops.

        Raises:
            ValueError: draws without a start, such as those of a loop of your own; see also
                `predict`.
        """
        where = "EvidenceStop.judge"
        if draws.start is None:
            _check.fail(where, "draws", "all draws of a run, with its `start`", "none")
        number = draws.num_chains
        with _check.called(where, "Predictor.update", params="draws"):
            evidence = Evidence(self, draws.start, number)
        for first in range(0, len(draws), number):
            if evidence.has_stopped:
                break
            evidence.add_draws(draws[first : first + number])
        return evidence.result()

    def described(self) -> dict[str, object]:
        """Describe the rule for the manifest of a run; the data by a checksum."""
        numbers = {name: getattr(self, name) for name in ("null", "alpha", "tolerance", "every")}
        data = [_disk.checksum(np.asarray(x)) for x in jax.tree.leaves(self.validation)]
        return {"name": "EvidenceStop", **numbers, "validation": data}


class Looks:
    """The tests, from log densities alone.

    Args:
        stop: the rule.
        start: log density of each target under the start, `[example, ...]`; NaN for padding.
    """

    def __init__(self, stop: EvidenceStop, start: np.ndarray):
        self.stop, self.start, self.count = stop, np.asarray(start, float), 0
        self.has_target = ~np.isnan(self.start)
        # Log of the sum of the densities of all draws so far, and of some earlier numbers of draws.
        self.log_sum, self.earlier = np.full(self.start.shape, -np.inf), {}
        self.results: list[tuple[int, float, float]] = []
        self.has_stopped = False

    def add(self, log_density: np.ndarray) -> bool:
        """Add one draw of each chain, by their average density; return whether it is a look."""
        every, is_doubling = self.stop.every, self.stop.null == "doubling"
        self.log_sum = _log_add(self.log_sum, np.asarray(log_density, float))
        self.count += 1
        if is_doubling and 0 in (2 * self.count % every, (2 * self.count + 1) % every):
            self.earlier[self.count] = self.log_sum
        is_look = self.count % every == 0 and self.count > is_doubling
        if is_look:
            self._look()
        return is_look

    def _look(self):
        number, stop = self.count, self.stop
        average = self.log_sum - math.log(number)
        if stop.null == "doubling":
            half = number // 2
            self.earlier = {m: x for m, x in self.earlier.items() if m >= half}
            gain = _difference(average, self.earlier[half] - math.log(half))
            score, bound = stop.tolerance - np.minimum(gain, MOST_GAIN), MOST_GAIN - stop.tolerance
        else:
            bound = math.log(number + 1)
            with_start = _log_add(self.start, self.log_sum) - bound
            score = _difference(with_start, self.start)
        axes, has_target = tuple(range(1, score.ndim)), self.has_target
        # An example without a target has a score of 0, which is no evidence.
        score = score.sum(axes, where=has_target) / np.maximum(has_target.sum(axes), 1)
        log_e = log_e_value(score, bound)
        self.results.append((number, log_e, float(average.mean(where=has_target))))
        self.has_stopped = self.result().has_stopped

    def result(self) -> Stopping:
        """Return the looks so far."""
        number, log_e, lppd = np.array(self.results, float).reshape(-1, 3).T
        stop = self.stop
        start = float(self.start.mean(where=self.has_target))
        fixed = stop.null, stop.alpha, stop.tolerance, len(self.start), start
        return Stopping(*fixed, number.astype(int), log_e, lppd)


def log_e_value(score: np.ndarray, bound: float) -> float:
    """Return the log of an e-value for the null that scores have a mean of at most 0.

    Args:
        score: one per example, `[example]`, >= -bound.
        bound: > 0.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        # Rounding must not take a score below its bound.
        wealth = np.log1p(np.maximum(FRACTIONS[:, None] * score / bound, -1)).sum(axis=1)
        return float(np.logaddexp.reduce(wealth) - math.log(len(FRACTIONS)))


def _difference(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Subtract log densities; targets that are impossible under both differ by 0."""
    with np.errstate(invalid="ignore"):
        difference = np.where(first == second, 0.0, first - second)
    return np.minimum(difference, np.finfo(np.float32).max)


def _log_add(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.logaddexp(first, second)


class Evidence(Looks):
    """The tests, from draws.

    Args:
        stop: the rule.
        start: of the chains, a tree of arrays `[chain, ...]`.
        number: of chains.
        mesh: see `predict`.
        specs: see `predict`.
    """

    def __init__(
        self,
        stop: EvidenceStop,
        start: Tree,
        number: int,
        mesh: Mesh | None = None,
        specs: Tree = None,
    ):
        inputs, targets = stop.validation
        # Densities alone are needed.
        likelihood = stop.likelihood._replace(mean=None, variance=None, entropy=None)
        with _check.called("EvidenceStop", "Predictor", inputs="validation", targets="validation"):
            self.predictor = Predictor(
                stop.apply_fn,
                inputs,
                likelihood=likelihood,
                targets=targets,
                batch_size=stop.batch_size,
                num_chains=number,
                mesh=mesh,
                specs=specs,
            )
            super().__init__(stop, self._density(split(start, number)))

    def add_draws(self, trees: Iterable[Tree]) -> bool:
        """Add a draw of each chain, a tree each; return whether it is a look."""
        # Predictions of the start were finite, so an error means draws that are not.
        density = np.array(np.nan)
        with contextlib.suppress(ValueError):
            density = self._density(trees)
        return self.add(density)

    def _density(self, trees: Iterable[Tree]) -> np.ndarray:
        self.predictor.restart()
        for tree in trees:
            self.predictor.update(tree)
        return np.asarray(self.predictor.finalize().log_density, float)


def split(stacked: Tree, number: int) -> list[Tree]:
    """Split a tree of arrays `[chain, ...]` into one tree per chain."""
    return [jax.tree.map(lambda x, chain=chain: x[chain], stacked) for chain in range(number)]
