"""Choose the sampler or optimizer whose averaged draws predict validation data best."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from optax_smile import _check, _disk, _settings, _tree, parallel
from optax_smile._table import aligned
from optax_smile._types import Batch, Options, Output, Tree, by_identity
from optax_smile.chains import _checks, _host
from optax_smile.chains._directory import check_real, how_to_resume
from optax_smile.chains.sample import Run, Setup, check_end
from optax_smile.chains.stopping import split
from optax_smile.draws import _checks as _draw_checks
from optax_smile.draws.likelihoods import Likelihood
from optax_smile.draws.predict import Predictor, predict
from optax_smile.draws.prediction import Prediction
from optax_smile.draws.snapshots import Snapshots, StoredSnapshots
from optax_smile.state import MOST_NONFINITE

# A round is scored by the draws after this fraction of its steps; earlier ones depend on the start.
BURN_IN = 0.5
# Draws per chain that score a round, evenly spaced over the rest of its steps. With two instead of
# six draws per chain, the average of a hot sampler lost .006 nats on LeNet, a third of its gain.
NUM_SCORED = 16
# Part of the gain from twice as many draws that each further doubling is assumed to add, and the
# largest such gain of an input, in nats: see `benchmarks/notes/temperature.md`.
GAIN_KEPT, LARGEST_GAIN = 0.5, float(np.log(2))
# Standard errors by which a finalist must be ahead of the chosen one to run again.
CLEARLY = 2
# File in the directory with the results of the rounds.
ROUNDS = "rounds.json"
# File in the folder of a candidate with the predictions of its draws in the current round.
PART = "round.safetensors"
NOT_IN_NAMES = set('/\\:*?"<>|\0')


@by_identity
class Selection(NamedTuple):
    """Result of `select`; print it for a table.

    Attributes:
        best: name of the chosen candidate.
        draws: draws of its whole run, as `sample` returns them.
        names: names of all candidates, `[candidate]`.
        num_steps: steps of each chain from the start to the end of each round, `[round]`; each is
            about twice the one before. In the later rounds only the chosen candidate runs, see
            `select`.
        lppd: log pointwise predictive density of the validation data, nats per input (for
            `"tokens"`, per token), of the average over at most 16 draws of each chain in the last
            half of these steps, `[round, candidate]`; NaN for candidates that did not run in the
            round, -inf if chains or predictions became non-finite.
        projected: `lppd` plus an estimate of what more draws will add until the end of the run,
            `[round, candidate]`, see `select`. It ranks the candidates.
        standard_error: standard error, over the inputs, of the difference of `projected` from the
            best of the round, `[round, candidate]`; NaN if a value is not finite or there is only
            one input.
        start_lppd: `lppd` of the initial parameters of the chains.
        final_lppd: `lppd` of all draws of the chosen candidate.
        total_steps: steps of each chain of the chosen candidate.
        cost: gradients of the dropped candidates divided by those of the chosen one.
        best_round_error: standard error, over the inputs, of `final_lppd` minus the highest
            `lppd` of the round that chose; NaN if there is none.
    """

    best: str
    draws: Snapshots | StoredSnapshots
    names: tuple[str, ...]
    num_steps: np.ndarray
    lppd: np.ndarray
    projected: np.ndarray
    standard_error: np.ndarray
    start_lppd: float
    final_lppd: float
    total_steps: int
    cost: float
    best_round_error: float = np.nan

    @property
    def interrupted(self) -> str | None:
        """`"SIGINT"` or `"SIGTERM"` if this signal ended the run of the chosen candidate, or None.

        A script that is to be started again must then exit with a status other than 0.
        """
        return getattr(self.draws, "interrupted", None)

    def __str__(self) -> str:
        rows = [("0", "start", self.start_lppd, np.nan, np.nan, np.nan)]
        rounds = self.num_steps, self.lppd, self.projected, self.standard_error
        for steps, lppd, projected, error in zip(*rounds, strict=True):
            order = [place for place in np.argsort(-projected) if not np.isnan(projected[place])]
            for place in order:
                head = str(steps) if place == order[0] else ""
                below = projected[order[0]] - projected[place]
                numbers = lppd[place], projected[place], below, error[place]
                rows.append((head, self.names[place], *numbers))
        rows.append((str(self.total_steps), self.best, self.final_lppd, np.nan, np.nan, np.nan))
        steps, names, *columns = zip(*rows, strict=True)
        table = {"steps": [*steps], "candidate": [*names]}
        heads = "LPPD", "projected", "below best", "error"
        for head, form, values in zip(heads, (".5g", ".5g", ".2g", ".2g"), columns, strict=True):
            table[head] = ["-" if np.isnan(x) else format(x, form) for x in values]
        return "\n".join([*aligned(table), "", *self._notes()])

    def _notes(self) -> Iterator[str]:
        yield f"Chosen: {self.best}, with LPPD {self.final_lppd:.5g} over all its draws."
        yield f"The dropped candidates used {self.cost:.2f} times its number of gradients."
        if not _settings.are_posterior(getattr(self.draws, "settings", None)):
            yield "It is an optimizer: its draws are iterates, not posterior draws."
        if not self.final_lppd > self.start_lppd:
            yield "No better than the start: keep the start, or change the candidates or the steps."
        row = len(_num_dropped(len(self.names))) - 1
        for steps, lppd in zip(self.num_steps[row + 1 :], self.lppd[row + 1 :], strict=True):
            ran = [name for name, x in zip(self.names, lppd, strict=True) if not np.isnan(x)]
            if len(ran) > 1:
                yield (
                    f"After {steps} steps, the candidate that led had become worse than another in"
                    f" an earlier round. Compared again: {', '.join(ran)}."
                )
        if len(self.num_steps):
            place = int(np.nanargmax(self.lppd[row]))
            lppd = self.lppd[row, place]
            if lppd - self.final_lppd > CLEARLY * self.best_round_error:
                had = f"{self.names[place]} had an LPPD of {lppd:.5g}"
                yield (
                    f"After {self.num_steps[row]} steps, {had}, more than {self.best} at its end:"
                    " its later draws may overfit."
                )
            yield "Projected: with an estimate of what the draws of the rest of the run will add."
        if np.isneginf([*self.lppd.ravel(), self.final_lppd]).any():
            yield "-inf: chains or predictions became non-finite."


class _Candidates(_check.Constraint):
    """Transformations by name, converted to a dict."""

    text = "a dict of at least one sampler or optimizer by name, such as {'psmile': psmile(...)}"

    def __call__(self, where, argument, value, given=_check.NOTHING):
        if not isinstance(value, Mapping) or not value:
            got = "an empty dict" if isinstance(value, Mapping) else _check.show(value)
            _check.fail(where, argument, self.text, got)
        for name, candidate in value.items():
            is_text = isinstance(name, str) and name.strip(". ") and name != ROUNDS
            if not is_text or NOT_IN_NAMES & set(name):
                rule = "a dict whose names are valid folder names"
                _check.fail(where, argument, rule, repr(name))
            _check.TRANSFORMATION(where, f"{argument}[{name!r}]", candidate)
        return dict(value)


class Part(NamedTuple):
    """Predictions so far of the draws of a round.

    Attributes:
        end: last step of the round.
        step: step of the last draw.
        counts: numbers of draws of all chains, in the earlier and in the later half of the steps.
        log_sums: for each half, log of the sum over draws of the density of each target; NaN for
            padding, and for all targets if predictions were not finite.
    """

    end: int
    step: int = 0
    counts: tuple[int, int] = (0, 0)
    log_sums: tuple[np.ndarray, np.ndarray] = (np.array(-np.inf), np.array(-np.inf))

    def joined(self, predictor: Predictor, step: int, half: int) -> Part:
        """Add the draws of a predictor to a half."""
        log_sum = np.array(np.nan)
        # Predictions of the start were finite, so an error means non-finite draws.
        with contextlib.suppress(ValueError):
            log_density = np.asarray(predictor.finalize().log_density, float)
            log_sum = log_density + np.log(predictor.count)
        counts, log_sums = [*self.counts], [*self.log_sums]
        counts[half] += predictor.count
        with np.errstate(invalid="ignore"):
            log_sums[half] = np.logaddexp(log_sums[half], log_sum)
        return Part(self.end, step, (counts[0], counts[1]), (log_sums[0], log_sums[1]))

    def density(self) -> np.ndarray:
        """Log density of each input under the average; -inf if predictions are not finite."""
        if any(np.isnan(x).all() for x in self.log_sums):
            return np.array([-np.inf])
        # NumPy warns of the NaN of padding.
        with np.errstate(invalid="ignore"):
            return _by_input(np.logaddexp(*self.log_sums) - np.log(sum(self.counts)))

    def gain(self) -> np.ndarray:
        """What twice as many draws add to `density`: all draws compared with each half of them."""
        density = self.density()
        if not all(self.counts) or not np.isfinite(density).all():
            return np.zeros_like(density)
        pairs = zip(self.log_sums, self.counts, strict=True)
        halves = [_by_input(log_sum - np.log(count)) for log_sum, count in pairs]
        mean = np.average(halves, axis=0, weights=self.counts)
        return np.minimum(density - mean, LARGEST_GAIN)


class Judged(NamedTuple):
    """Result of a candidate in a round.

    Attributes:
        density: see `_by_input`; -inf if the candidate became non-finite.
        num_steps: steps of each chain.
        gradients_per_step: gradients per step.
        is_bayes: whether it samples the posterior of the model.
        projected: `density` with what the draws of the rest of the run are assumed to add.
    """

    density: list[float]
    num_steps: int
    gradients_per_step: int
    is_bayes: bool
    projected: list[float]

    @property
    def lppd(self) -> float:
        """Mean of `density`."""
        return float(np.mean(self.density))

    @property
    def projected_lppd(self) -> float:
        """Mean of `projected`."""
        return float(np.mean(self.projected))


@_check.arguments(
    params=_checks.Starts(),
    batches=_check.REPEATABLE,
    candidates=_Candidates(),
    validation=_draw_checks.INPUTS_AND_TARGETS,
    num_warmup=_check.Whole(0),
    num_draws=_check.Whole(1),
    thin=_check.Whole(1),
    key=_check.Key(needed=True),
    batch_size=_check.Whole(1) | None,
    largest_cost=_check.Real(0, 100, open="low", traced=False),
    loss_fn=_checks.Loss(),
    steps_per_dispatch=_check.Whole(1),
    mesh=parallel.MESH,
    specs=parallel.SPECS,
    directory=_check.PathLike() | None,
)
@_check.on_host
def select(
    loss_fn: Callable[..., jax.Array],
    params: optax.Params,
    batches: Iterable[Batch],
    candidates: Mapping[str, optax.GradientTransformation],
    apply_fn: Callable[[Tree, Batch], Output],
    validation: tuple[Batch, Batch],
    *,
    likelihood: str | Likelihood,
    num_warmup: int,
    num_draws: int,
    thin: int = 1,
    key: jax.Array | int,
    batch_size: int | None = None,
    largest_cost: float = 1 / 3,
    stochastic: bool = False,
    per_chain: bool = False,
    steps_per_dispatch: int = 1,
    mesh: Mesh | None = None,
    specs: Tree = None,
    directory: str | os.PathLike[str] | None = None,
    check: bool = True,
    progress: bool = True,
) -> Selection:
    """Run several samplers or optimizers, and keep the one that predicts validation data best.

    All candidates start from the same parameters with the same key, and run in rounds. Each round
    ends at about twice as many steps as the one before. The score of a candidate is the log
    pointwise predictive density (LPPD) of the validation data, predicted by the average over at
    most 16 draws of each chain in the last half of the steps so far. Candidates whose draws differ
    much will gain more from the draws to come. To account for this, `select` compares the LPPD of
    all these draws with the mean LPPD of the earlier and of the later half of them. The difference
    is the gain from twice as many draws, for each input at most log 2. The projected LPPD adds half
    of this gain for each doubling of the number of draws until the end of the run. It ranks the
    candidates, and each round drops the worse half, until at most three finalists remain.

    The next round chooses one of the finalists. Those whose projected LPPD is within one standard
    error of the best count as equal. Among them, `select` chooses by these criteria, in this order:
    fewer gradients per step; a sampler of the posterior of the model (temperature 1, and a prior
    that is not centred at the start); larger projected LPPD. The chosen candidate finishes its run.
    Its draws are those of `sample` with that candidate. The others together take at most about
    `largest_cost` times the steps of the chosen one.

    The chosen candidate is scored again each time that its number of steps has doubled. It may have
    begun to overfit: if its projected LPPD is more than two standard errors below the LPPD that
    another finalist had, this one runs as many steps, and `select` chooses again. Only then do the
    others take more steps than `largest_cost` allows.

    Use a warm start, such as that of `warmstart`. Rounds are short: a candidate that predicts badly
    at first and improves late may be dropped. The printed result says if the chosen one ends below
    the start, or clearly below the best finalist of the round that chose. A larger `largest_cost`
    makes longer rounds.

    For a grid of settings, pass a dict such as
    `{f"{T:g}": psmile(num_data=N, temperature=T, key=0) for T in (0.01, 0.1, 1)}`.

    Arguments not listed are those of `sample`.

    Args:
        batches: iterable of batches, see `sample`. It cannot be an iterator, such as a generator,
            since each candidate iterates over it. If each pass is shuffled, candidates see
            different orders.
        candidates: dict of samplers and Optax optimizers by name. `local.network_candidates` makes
            the usual ones for a network.
        apply_fn: `apply_fn(params, inputs)`, for `predict`.
        validation: pair of inputs and targets that no candidate is trained on. Because they select
            the candidate, do not use them as test data.
        likelihood: see `predict`.
        batch_size: validation inputs to run at once, >= 1; None: all.
        largest_cost: steps of all other candidates until one is chosen, relative to those of a
            whole run, in (0, 100]. Larger values make longer rounds.
        directory: directory with a folder per candidate and a file for the rounds. After a kill the
            same call resumes; `load_snapshots(directory / name)` reads the draws. It is an error if
            the steps of the rounds, the LPPD of the start, or the arguments of a candidate have
            changed. The code of functions among them is not compared. For the other arguments see
            `resume` of `sample`. None: in memory.
        progress: show a progress bar over the steps of all candidates, if tqdm is installed.

    Returns:
        A `Selection`: print it, or plot it with `plots.selection`.

    Raises:
        ValueError: an argument is out of range; there are several processes; no candidate has
            finite predictions; the `directory` holds another selection; as for `sample` and
            `predict`.
        KeyboardInterrupt: interrupted before a candidate was chosen, or before its first draw.
            With a `directory` the same call resumes.

    Cost: (1 + largest_cost) times the steps of `sample`, more if a chosen candidate overfits; the
    states of all candidates on the device until they are dropped, those of the finalists until the
    last round; one forward pass over the validation data per scored draw; compiling each candidate.

    Example:
        >>> import jax, jax.numpy as jnp, optax, optax_smile
        >>> x = jnp.linspace(-1, 1, 20)
        >>> apply_fn = lambda params, x: (params["w"][0] * x + params["w"][1], jnp.zeros(()))
        >>> loss_fn = lambda params, y: jnp.mean((apply_fn(params, x)[0] - y) ** 2) / 2
        >>> selection = optax_smile.select(
        ...     loss_fn, {"w": 3 * jnp.eye(2)}, [2 * x],
        ...     {"near": optax.sgd(1e-6), "psmile": optax_smile.psmile(num_data=20, key=0)},
        ...     apply_fn, (x, 2 * x), likelihood="gaussian", num_warmup=200, num_draws=30,
        ...     key=jax.random.key(0), progress=False,
        ... )
        >>> selection.best, selection.draws.num_draws
        ('psmile', 30)
    """
    given = locals()  # The arguments, with a typed `key`.
    validation = _tree.as_numeric("select", "validation", tuple(validation), copy=True)
    if jax.process_count() > 1:
        got = f"{jax.process_count()} processes"
        _check.fail("select", "params", "arrays of a single process", got)
    setup: Options = {name: given[name] for name in Setup._fields if name in given}
    read: Options = {"likelihood": likelihood, "targets": validation[1]}
    read |= {"batch_size": batch_size, "mesh": mesh, "specs": specs}
    renamed = {"inputs": "validation", "targets": "validation", "sampler": "candidates"}
    renamed |= {"snapshots": "params"}
    parts = "sample", "predict", "Predictor", "Predictor.update"
    num_steps = num_warmup + num_draws * thin
    dropped = _num_dropped(len(candidates))
    ends = _round_ends(dropped, num_warmup, thin, num_steps, largest_cost)
    numbers = [*(len(candidates) - np.cumsum(dropped)).tolist(), *[1] * (len(ends) - len(dropped))]
    num_all = num_steps + int(np.dot(dropped, ends[: len(dropped)]))
    with _check.called("select", *parts, **renamed), ExitStack() as closing:
        start = predict(apply_fn, Snapshots.from_members(params), validation[0], **read)
        folder = None if directory is None else Path(directory).absolute()
        for path in [folder / name for name in candidates] if folder is not None else []:
            check_real("select", path)
        identity = _identity(candidates, params, ends, start)
        rounds = _read(folder, identity)
        bar = closing.enter_context(_host.Bar(num_all, "selecting", progress, compiles=True))
        done = {name: one.num_steps for judged in rounds for name, one in judged.items()}
        opened = {
            name: _Candidate(name, sampler, setup, folder, bar, done)
            for name, sampler in candidates.items()
        }
        for candidate in opened.values():
            closing.callback(candidate.close)
        predictor = Predictor(apply_fn, validation[0], **read)

        def run_round(names: list[str], judged: dict[str, Judged], end: int):
            for name in names:
                if name not in judged:
                    judged[name] = opened[name].judge(predictor, end, num_draws * thin)
                    _write(folder, identity, rounds)

        running, latest, is_stopped = [*candidates], dict[str, Judged](), False
        for judged, end, number in zip(rounds, ends, numbers, strict=True):
            try:
                run_round(running, judged, end)
                if len(running) > 1:
                    _check_finite(judged)
                while ahead := _ahead(judged, latest):
                    run_round(ahead, judged, end)
            except KeyboardInterrupt:
                # After the choice, the draws of the chosen one are returned as those of `sample`.
                if len(running) > 1:
                    raise
                is_stopped = True
                break
            latest |= judged
            running = _survivors(judged, number)
            for name in latest.keys() - set(running) if number > 1 else ():
                opened[name].close()
                del latest[name]
        (best,) = running
        for name in latest.keys() - {best}:
            opened[name].close()
        run = opened[best].run
        is_stopped = is_stopped or not opened[best].finish(num_steps)
        check_end("select", run, num_steps, num_draws, is_stopped)
        draws, density = run.result(num_draws), [-np.inf]
        # A chain may have become non-finite after the last round.
        with contextlib.suppress(ValueError):
            final = predict(apply_fn, draws, validation[0], **read)
            density = _by_input(final.log_density).tolist()
        rounds = [judged for judged in rounds if judged]
        finalists = rounds[len(dropped) - 1].values() if rounds else ()
        best_density = max((x.density for x in finalists), key=np.mean, default=[np.nan])
    lppd, projected, error = _scores(rounds, [*candidates])
    return Selection(
        best=best,
        draws=draws,
        names=tuple(candidates),
        num_steps=np.array(ends[: len(rounds)], int),
        lppd=lppd,
        projected=projected,
        standard_error=error,
        start_lppd=_lppd(start),
        final_lppd=float(np.mean(density)),
        total_steps=run.num_steps,
        cost=_cost(rounds, best, draws),
        best_round_error=_standard_error(density, best_density),
    )


def _num_dropped(number: int) -> list[int]:
    """Return how many of `number` candidates each round drops, until one is chosen.

    It is chosen among at most three: a candidate that leads in the end may lead late.
    """
    dropped = []
    while number > 1:
        kept = max(number // 2, 3) if number > 3 else 1
        dropped.append(number - kept)
        number = kept
    return dropped


def _round_ends(
    dropped: list[int], num_warmup: int, thin: int, num_steps: int, largest_cost: float
) -> list[int]:
    """Return the last steps of the rounds until one is chosen, and of those after it.

    Each is twice the one before. Up to rounding to ticks, dropped candidates take `largest_cost`
    times a whole run in total, or all of their runs.
    """
    shares = 2.0 ** np.arange(len(dropped))
    # A single candidate has no rounds.
    steps = largest_cost * num_steps * shares / (np.dot(dropped, shares) or 1)
    first = (num_warmup - 1) % thin + 1

    def end(steps: float) -> int:
        return min(first + thin * max(0, int((steps - first) // thin)), num_steps)

    ends = [end(x) for x in steps]
    while ends and end(2 * ends[-1]) not in (ends[-1], num_steps):
        ends.append(end(2 * ends[-1]))
    return ends


def _check_finite(judged: Mapping[str, Judged]):
    if not np.isfinite([x.lppd for x in judged.values()]).any():
        rule = "candidates of which at least one keeps all chains and predictions finite"
        _check.fail("select", "candidates", rule, [*judged])


def _ahead(judged: Mapping[str, Judged], latest: Mapping[str, Judged]) -> list[str]:
    """Return a finalist that was clearly better before than all are in this round, or none."""
    best = max(judged.values(), key=lambda one: one.projected_lppd)

    def is_ahead(one: Judged) -> bool:
        error = np.nan_to_num(_standard_error(one.density, best.projected))
        return bool(one.lppd - best.projected_lppd > CLEARLY * error)

    ahead = [name for name, one in latest.items() if name not in judged and is_ahead(one)]
    return sorted(ahead, key=lambda name: -latest[name].lppd)[:1]


def _survivors(judged: Mapping[str, Judged], number: int) -> list[str]:
    """Return the best `number`; a single one may be equal to the best, and preferred to it."""
    ranked = sorted(judged, key=lambda name: -judged[name].projected_lppd)
    if number > 1:
        return ranked[:number]
    best = judged[ranked[0]]

    def is_equal(name: str) -> bool:
        below = best.projected_lppd - judged[name].projected_lppd
        return name == ranked[0] or below <= _standard_error(judged[name].projected, best.projected)

    def preference(name: str) -> tuple[int, bool]:
        return judged[name].gradients_per_step, not judged[name].is_bayes

    return [min(filter(is_equal, ranked), key=preference)]


def _standard_error(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the standard error of the mean difference; NaN if it is not finite or of one input."""
    with np.errstate(invalid="ignore"):
        difference = np.subtract(first, second)
    if len(difference) < 2 or not np.isfinite(difference).all():
        return np.nan
    return float(difference.std(ddof=1) / len(difference) ** 0.5)


class _Candidate:
    """A candidate, whose run is started on first use.

    Args:
        name: name of the candidate.
        sampler: its sampler or optimizer.
        setup: arguments of `Setup` shared by all candidates.
        folder: directory of all candidates, or None.
        bar: progress bar over the steps of all candidates.
        done: steps of each candidate so far, by name.
    """

    def __init__(
        self,
        name: str,
        sampler: optax.GradientTransformation,
        setup: Options,
        folder: Path | None,
        bar: _host.Bar,
        done: dict[str, int],
    ):
        self.name, self.bar, self.done, self.closing = name, bar, done, ExitStack()
        self.folder = None if folder is None else folder / name
        self.setup = Setup(**setup | {"sampler": sampler, "directory": self.folder})

    @functools.cached_property
    def run(self) -> Run:
        """The run, at its start or at its newest checkpoint."""
        return Run(self.setup, self.closing)

    def close(self):
        """Close the files and free the chains."""
        self.closing.close()
        vars(self).pop("run", None)

    def judge(self, predictor: Predictor, end: int, num_sampling: int) -> Judged:
        """Run to the end of a round, and score the draws in the last half of the steps.

        Args:
            predictor: predicts the validation data.
            end: last step of the round.
            num_sampling: steps of the whole run after the warm-up.
        """
        run, part = self.run, self._part(end)
        num_scored = _num_due(part.step, end)

        def watch(step: int, seen: Mapping[str, np.ndarray] | None):
            nonlocal num_scored, part
            self._show(step, seen)
            num_due = _num_due(step, end)
            # A run that resumes from a checkpoint repeats some steps.
            is_only_point = step == end and not num_scored
            if num_due > num_scored and (is_only_point or self._is_draw()):
                num_scored = num_due
                predictor.restart()
                self._predict(predictor)
                part = part.joined(predictor, step, half=int(step > (1 + BURN_IN) / 2 * end))
                if self.folder is not None:
                    self._write(part)

        if not run.advance(end, watch):
            message = f"`select` was stopped in the run of the candidate {self.name!r}."
            raise KeyboardInterrupt(f"{message} {how_to_resume(self.folder)}")
        if run.num_steps != end or not any(part.counts):
            rule = "new, or hold the same selection"
            got = f"{self.folder} with a run of {run.num_steps} steps"
            _check.fail("select", "directory", rule, got)
        counts, _ = run.chains.record()
        is_sound = np.all(counts["num_nonfinite"] <= MOST_NONFINITE * counts["num_gradients"])
        settings = run.chains.settings or {}
        density = part.density() if is_sound else np.array([-np.inf])
        doublings = max(0.0, np.log2(num_sampling / ((1 - BURN_IN) * end)))
        added = GAIN_KEPT * doublings * part.gain() if is_sound else 0.0
        return Judged(
            density=density.tolist(),
            num_steps=run.num_steps,
            gradients_per_step=run.per_step,
            is_bayes=_is_bayes(settings),
            projected=(density + added).tolist(),
        )

    def finish(self, num_steps: int) -> bool:
        """Run to the end; return whether it finished without an interrupt."""
        is_finished = self.run.advance(num_steps, self._show)
        self.close()
        return is_finished

    def _is_draw(self) -> bool:
        """Whether the current points of all chains are draws."""
        return bool(np.all(self.run.chains.record()[0]["is_draw"]))

    def _predict(self, predictor: Predictor):
        for draw in split(_tree.local(self.run.chains.draw()), self.run.chains.number):
            predictor.update(draw)

    def _show(self, step: int, seen: Mapping[str, np.ndarray] | None):
        self.bar.begin()
        if seen is not None:
            self.done[self.name] = step
            self.bar.show(sum(self.done.values()), candidate=self.name)

    def _part(self, end: int) -> Part:
        """Return the stored predictions of an interrupted round, or an empty `Part`."""
        if self.folder is None or not (file := self.folder / PART).exists():
            return Part(end)
        with _disk.naming(file, "file", "Remove the folder of this candidate."):
            header, arrays = _disk.read(file)
            sums = arrays["first"], arrays["second"]
            part = Part(header["end"], header["step"], tuple(header["counts"]), sums)
        return part if part.end == end else Part(end)

    def _write(self, part: Part):
        assert self.folder is not None
        header = {name: getattr(part, name) for name in ("end", "step", "counts")}
        first, second = part.log_sums
        _disk.write(self.folder / PART, _disk.pack(header, {"first": first, "second": second}))


def _is_bayes(settings: Mapping[str, object]) -> bool:
    """Whether draws come from the posterior of the model, not a cold one or one near the start."""
    is_model = settings.get("temperature") == 1 and settings.get("prior_mean") != "start"
    return _settings.are_posterior(settings) and is_model


def _num_due(step: int, end: int) -> int:
    """Return how many draws of each chain score a round until a step."""
    first = BURN_IN * end
    return max(0, int(NUM_SCORED * (step - first) / (end - first)))


def _by_input(log_density: np.ndarray | None) -> np.ndarray:
    """Return a log density for each input, whose mean is that of all targets.

    If s_i is the sum over the n_i targets of an input and r = sum_i s_i / sum_i n_i, the values are
    r + (s_i - r n_i) / mean(n). Their standard error is that of r by the delta method.
    """
    density = np.asarray(log_density, float)
    density = density.reshape(len(density), -1)
    sums, number = np.nansum(density, axis=1), (~np.isnan(density)).sum(axis=1)
    ratio = sums.sum() / number.sum()
    shift = ratio * (1 - number / number.mean()) if np.isfinite(ratio) else 0
    return sums / number.mean() + shift


def _lppd(prediction: Prediction) -> float:
    return float(np.mean(_by_input(prediction.log_density)))


def _identity(
    candidates: Mapping[str, optax.GradientTransformation],
    params: optax.Params,
    ends: list[int],
    start: Prediction,
) -> Options:
    """Return what identifies a selection, in a form for JSON."""
    shapes = _tree.shapes_of_one(params)
    described = {name: _settings.of(x, shapes) for name, x in candidates.items()}
    return {
        "candidates": json.loads(json.dumps(described)),
        "rounds that end after": ends,
        # Identifies inputs, targets, likelihood, model and start.
        "LPPD of the start": float(f"{_lppd(start):.3g}"),
    }


def _read(folder: Path | None, identity: Options) -> list[dict[str, Judged]]:
    """Read the results of an earlier call, for each round by name."""
    if folder is None or not os.path.lexists(file := folder / ROUNDS):
        return [{} for _ in identity["rounds that end after"]]
    try:
        stored, is_intact = _disk.read_json(file)
        reason = "" if is_intact else "its checksum does not match its content"
    except ValueError as error:
        reason = str(error)
    if reason:
        rule, got = f"a directory with an intact {ROUNDS}", f"{file} ({reason})"
        _check.fail("select", "directory", rule, got, "Restore it, or choose another directory.")
    for what, mine in identity.items():
        if (theirs := stored.get(what)) != mine:
            rule = f"new, or hold a selection with the same {what}: {_check.cut(mine)}"
            _check.fail("select", "directory", rule, f"{folder} with {_check.cut(theirs)}")
    return [{name: Judged(*x) for name, x in judged.items()} for judged in stored["found"]]


def _write(folder: Path | None, identity: Options, rounds: list[dict[str, Judged]]):
    if folder is not None:
        _disk.write_json(folder / ROUNDS, identity | {"found": rounds})


def _scores(rounds: list[dict[str, Judged]], names: list[str]) -> np.ndarray:
    """Return LPPD, the projected one and its standard error, `[3, round, candidate]`."""
    scores = np.full((3, len(rounds), len(names)), np.nan)
    for row, judged in enumerate(rounds):
        best = max(judged.values(), key=lambda one: one.projected_lppd)
        for name, one in judged.items():
            error = _standard_error(one.projected, best.projected)
            scores[:, row, names.index(name)] = one.lppd, one.projected_lppd, error
    return scores


def _cost(rounds: list[dict[str, Judged]], best: str, draws: Snapshots | StoredSnapshots) -> float:
    """Return the gradients of the dropped candidates divided by those of the chosen one."""
    last = {name: one for judged in rounds for name, one in judged.items() if name != best}
    spent = sum(one.num_steps * one.gradients_per_step for one in last.values())
    return spent / int(np.asarray(draws.trace["num_gradients"])[0, -1])
