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

from optax_smile import _check, _disk, _settings, _tree
from optax_smile._table import aligned
from optax_smile._types import Batch, Options, Output, Tree, Unchecked, by_identity
from optax_smile._warn import warn
from optax_smile.chains import _host
from optax_smile.chains._directory import check_real
from optax_smile.chains.run import Interrupted, Run
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
# Files with the scores of the rounds, and with the predictions of a candidate in its round.
ROUNDS, PART = "rounds.json", "round.safetensors"
PARTS = "Run", "Run.advance", "Run.draws", "sample", "predict", "Predictor", "Predictor.update"
NOT_IN_NAMES = set('/\\:*?"<>|\0')


@by_identity
class Selection(NamedTuple):
    """Result of `select`; print it for a table.

    Attributes:
        best: name of the chosen candidate.
        draws: draws of its whole run, as `sample` returns them.
        names: names of all candidates, `[candidate]`.
        num_steps: steps of each chain from the start to the end of each round, `[round]`.
        lppd: log pointwise predictive density of the validation data, nats per input (for
            `"tokens"`, per token), of the average over at most 16 draws of each chain in the last
            half of these steps, `[round, candidate]`; NaN for candidates that did not run in the
            round, -inf if chains or predictions became non-finite.
        projected: `lppd` plus an estimate of what more draws will add until the end of the run,
            `[round, candidate]`, see `select`. It ranks the candidates.
        standard_error: standard error, over the inputs, of the difference of `projected` from the
            best of the round, `[round, candidate]`; NaN if it is unknown.
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
        unknown = np.nan, np.nan, np.nan
        rows = [("0", "start", self.start_lppd, *unknown)]
        rounds = self.num_steps, self.lppd, self.projected, self.standard_error
        for steps, lppd, projected, error in zip(*rounds, strict=True):
            ranked = [place for place in np.argsort(-projected) if not np.isnan(projected[place])]
            for place in ranked:
                below = projected[ranked[0]] - projected[place]
                head = str(steps) if place == ranked[0] else ""
                numbers = lppd[place], projected[place], below, error[place]
                rows.append((head, self.names[place], *numbers))
        rows.append((str(self.total_steps), self.best, self.final_lppd, *unknown))
        steps, names, *columns = zip(*rows, strict=True)
        table = {"steps": [*steps], "candidate": [*names]}
        forms = {"LPPD": ".5g", "projected": ".5g", "below best": ".2g", "error": ".2g"}
        for (name, form), values in zip(forms.items(), columns, strict=True):
            table[name] = ["-" if np.isnan(x) else format(x, form) for x in values]
        return "\n".join([*aligned(table), "", *self._notes()])

    def _notes(self) -> Iterator[str]:
        yield f"Chosen: {self.best}. The others used {self.cost:.2f} times its gradients."
        if not _settings.are_posterior(getattr(self.draws, "settings", None)):
            yield "It is an optimizer: its draws are iterates, not posterior draws."
        if not self.final_lppd > self.start_lppd:
            yield "No better than the start: keep the start, or change the candidates or the steps."
        row = len(_num_dropped(len(self.names))) - 1
        highest = np.nanmax(self.lppd[row]) if len(self.lppd) else -np.inf
        if highest - self.final_lppd > CLEARLY * self.best_round_error:
            yield f"After {self.num_steps[row]} steps a candidate had an LPPD of {highest:.5g}."
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


class Score(NamedTuple):
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


Scores = dict[str, Score]


@_check.arguments(
    batches=_check.REPEATABLE,
    candidates=_Candidates(),
    validation=_draw_checks.INPUTS_AND_TARGETS,
    num_warmup=_check.Whole(0),
    num_draws=_check.Whole(1),
    thin=_check.Whole(1),
    batch_size=_check.Whole(1) | None,
    largest_cost=_check.Real(0, 100, open="low", traced=False),
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

    All candidates start from the same parameters with the same key, and run in rounds, each to
    about twice as many steps as the one before. The score of a candidate is the log pointwise
    predictive density (LPPD) of the validation data, predicted by the average over at most 16 draws
    of each chain in the last half of the steps so far. Candidates whose draws differ much gain more
    from the draws to come: the difference between the LPPD of all these draws and the mean LPPD of
    their earlier and of their later half is the gain from twice as many draws, for each input at
    most log 2. The projected LPPD adds half of this gain for each doubling until the end of the
    run. It ranks the candidates. Each round drops the worse half, until at most three finalists
    remain, and the next round chooses one.

    Finalists whose projected LPPD is within one standard error of the best count as equal. Among
    them, `select` prefers, in this order: fewer gradients per step; a sampler of the posterior of
    the model (temperature 1, and a prior that is not centred at the start); larger projected LPPD.
    The chosen candidate finishes its run. It is scored again each time that its steps have doubled:
    if its projected LPPD is more than two standard errors below the LPPD that another finalist had,
    this one runs as many steps, and `select` chooses again.

    Use a warm start, such as that of `warmstart`. A candidate that predicts badly at first and
    improves late may be dropped; a larger `largest_cost` makes longer rounds. For a grid, pass a
    dict such as `{f"{T:g}": psmile(num_data=N, temperature=T, key=0) for T in (0.01, 0.1, 1)}`.

    Arguments not listed are those of `sample`.

    Args:
        batches: iterable of batches, see `sample`; no iterator, since each candidate iterates over
            it. If each pass is shuffled, candidates see different orders.
        candidates: dict of samplers and Optax optimizers by name. `local.network_candidates` makes
            the usual ones for a network.
        apply_fn: `apply_fn(params, inputs)`, for `predict`.
        validation: pair of inputs and targets that no candidate is trained on. Because they select
            the candidate, do not use them as test data.
        likelihood: see `predict`.
        batch_size: validation inputs to run at once, >= 1; None: all.
        largest_cost: steps of all other candidates until one is chosen, relative to those of a
            whole run, in (0, 100]. Only a replaced choice costs more.
        directory: directory with a folder per candidate and a file for the rounds. After a kill the
            same call resumes. It is an error if the steps of the rounds, the LPPD of the start, or
            the arguments of a candidate have changed; see also `resume` of `sample`. None: in
            memory.
        progress: show a progress bar over the steps of all candidates, if tqdm is installed.

    Returns:
        A `Selection`: print it, or plot it with `plots.selection`.

    Raises:
        ValueError: an argument is out of range; there are several processes; no candidate has
            finite predictions; the `directory` holds another selection; as for `sample` and
            `predict`.
        KeyboardInterrupt: interrupted before a candidate was chosen, or before its first draw.
            With a `directory` the same call resumes.

    Cost: (1 + largest_cost) times the steps of `sample`; the states of all candidates on the device
    until they are dropped; one forward pass over the validation data per scored draw; compiling
    each candidate.

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
    validation = _tree.as_numeric("select", "validation", tuple(validation), copy=True)
    if jax.process_count() > 1:
        got = f"{jax.process_count()} processes"
        _check.fail("select", "params", "arrays of a single process", got)
    read: Options = {"likelihood": likelihood, "targets": validation[1]}
    read |= {"batch_size": batch_size, "mesh": mesh, "specs": specs}
    folder = None if directory is None else Path(directory).absolute()

    def begin(name: str) -> Run:
        return _Run(
            loss_fn,
            params,
            batches,
            candidates[name],
            key=key,
            stochastic=stochastic,
            per_chain=per_chain,
            steps_per_dispatch=steps_per_dispatch,
            mesh=mesh,
            specs=specs,
            directory=None if folder is None else folder / name,
            check=check,
        )

    num_steps, dropped = num_warmup + num_draws * thin, _num_dropped(len(candidates))
    ends = _round_ends(dropped, num_warmup, thin, num_steps, largest_cost)
    # How many candidates are left after each round.
    left = [*(len(candidates) - np.cumsum(dropped)).tolist(), *[1] * (len(ends) - len(dropped))]
    num_all = num_steps + int(np.dot(dropped, ends[: len(dropped)]))
    renamed = {"inputs": "validation", "targets": "validation", "sampler": "candidates"}
    renamed |= {"snapshots": "params"}
    with _check.called("select", *PARTS, **renamed), ExitStack() as closing:
        start = predict(apply_fn, Snapshots.from_members(params), validation[0], **read)
        for name in candidates if folder is not None else ():
            check_real("select", Path(folder, name))
        identity = _identity(candidates, params, ends, start)
        rounds = _read(folder, identity)
        bar = closing.enter_context(_host.Bar(num_all, "selecting", progress, compiles=True))
        done = {name: one.num_steps for scores in rounds for name, one in scores.items()}

        def show(name: str, step: int):
            done[name] = step
            bar.begin()
            bar.show(sum(done.values()), candidate=name)

        places = num_warmup, num_draws, thin, steps_per_dispatch
        runs = {name: _Candidate(name, begin, show, folder, *places) for name in candidates}
        for candidate in runs.values():
            closing.push(candidate)
        predictor = Predictor(apply_fn, validation[0], **read)
        running, latest, signal = [*candidates], Scores(), None

        def run_round(names: list[str], scores: Scores, end: int):
            for name in names:
                if name not in scores:
                    settings = _settings.of(candidates[name], _tree.shapes_of_one(params)) or {}
                    scores[name] = runs[name].score(predictor, end, settings)
                    _write(folder, identity, rounds)

        try:
            for scores, end, number in zip(rounds, ends, left, strict=True):
                run_round(running, scores, end)
                if len(running) > 1:
                    _check_finite(scores)
                while ahead := _ahead(scores, latest):
                    run_round(ahead, scores, end)
                running = _survivors(scores, number)
                # Finalists stay, as they may replace the chosen one.
                latest = {**latest, **scores}
                for name in [x for x in latest if x not in running and number > 1]:
                    runs[name].close()
                    del latest[name]
            (best,) = running
            for name in latest.keys() - {best}:
                runs[name].close()
            runs[best].finish()
        except Interrupted as interrupt:
            if len(running) > 1 or not runs[running[0]].run.num_draws:
                raise
            signal = interrupt.signal
            warn(
                f"{interrupt} `selection.interrupted` is {signal!r}: a script that is to be started"
                " again must exit with a status other than 0."
            )
        (best,) = running
        total_steps, draws, density = (
            runs[best].run.num_steps,
            runs[best].run.snapshots(),
            [-np.inf],
        )
        vars(draws).update(interrupted=signal)
        # A chain may have become non-finite after the last round.
        with contextlib.suppress(ValueError):
            final = predict(apply_fn, draws, validation[0], **read)
            density = _by_input(final.log_density).tolist()
    rounds = [scores for scores in rounds if scores]
    finalists = rounds[len(dropped) - 1].values() if rounds else ()
    best_density = max((x.density for x in finalists), key=np.mean, default=[np.nan])
    lppd, projected, error = _table_of(rounds, [*candidates])
    return Selection(
        best=best,
        draws=draws,
        names=tuple(candidates),
        num_steps=np.array(ends[: len(rounds)], int),
        lppd=lppd,
        projected=projected,
        standard_error=error,
        start_lppd=float(np.mean(_by_input(start.log_density))),
        final_lppd=float(np.mean(density)),
        total_steps=total_steps,
        cost=_cost(rounds, best, draws),
        best_round_error=_standard_error(density, best_density),
    )


class _Run(Run):
    """A run whose warnings name `select`."""

    where, announces = "select", False


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


def _check_finite(scores: Mapping[str, Score]):
    if not np.isfinite([one.lppd for one in scores.values()]).any():
        rule = "candidates of which at least one keeps all chains and predictions finite"
        _check.fail("select", "candidates", rule, [*scores])


def _ahead(scores: Mapping[str, Score], latest: Mapping[str, Score]) -> list[str]:
    """Return a finalist that was clearly better before than all are in this round, or none."""
    best = max(scores.values(), key=lambda one: one.projected_lppd)

    def is_ahead(one: Score) -> bool:
        error = np.nan_to_num(_standard_error(one.density, best.projected))
        return bool(one.lppd - best.projected_lppd > CLEARLY * error)

    ahead = [name for name, one in latest.items() if name not in scores and is_ahead(one)]
    return sorted(ahead, key=lambda name: -latest[name].lppd)[:1]


def _survivors(scores: Mapping[str, Score], number: int) -> list[str]:
    """Return the best `number`; a single one may be equal to the best, and preferred to it."""
    ranked = sorted(scores, key=lambda name: -scores[name].projected_lppd)
    if number > 1:
        return ranked[:number]
    best = scores[ranked[0]]

    def is_equal(name: str) -> bool:
        below = best.projected_lppd - scores[name].projected_lppd
        return name == ranked[0] or below <= _standard_error(scores[name].projected, best.projected)

    def preference(name: str) -> tuple[int, bool]:
        return scores[name].gradients_per_step, not scores[name].is_bayes

    return [min(filter(is_equal, ranked), key=preference)]


def _standard_error(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the standard error of the mean difference; NaN if it is not finite or of one input."""
    with np.errstate(invalid="ignore"):
        difference = np.subtract(first, second)
    if len(difference) < 2 or not np.isfinite(difference).all():
        return np.nan
    return float(difference.std(ddof=1) / len(difference) ** 0.5)


class Average(NamedTuple):
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

    def joined(self, predictor: Predictor, step: int, half: int) -> Average:
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
        return Average(self.end, step, (counts[0], counts[1]), (log_sums[0], log_sums[1]))

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


class _Candidate:
    """A candidate, whose run begins on first use and is closed on exit.

    Args:
        name: name of the candidate.
        begin: `begin(name)` starts or continues the run.
        show: `show(name, step)` shows progress.
        folder: directory of all candidates, or None.
        num_warmup, num_draws, thin, steps_per_dispatch: see `sample`.
    """

    def __init__(
        self,
        name: str,
        begin: Callable[[str], Run],
        show: Callable[[str, int], None],
        folder: Path | None,
        num_warmup: int,
        num_draws: int,
        thin: int,
        steps_per_dispatch: int,
    ):
        self.name, self.begin, self.show = name, begin, show
        self.file = None if folder is None else folder / name / PART
        self.num_warmup, self.num_draws, self.thin = num_warmup, num_draws, thin
        self.steps_per_dispatch = steps_per_dispatch

    @functools.cached_property
    def run(self) -> Run:
        """The run, at its start or at its newest checkpoint."""
        return self.begin(self.name)

    def __enter__(self) -> _Candidate:
        return self

    def __exit__(self, *error: Unchecked):
        if "run" in vars(self):
            self.run.__exit__(*error)

    def close(self):
        """Close the run, and free its chains."""
        self.__exit__(None, None, None)
        vars(self).pop("run", None)

    def score(self, predictor: Predictor, end: int, settings: Options) -> Score:
        """Run to the end of a round, and score the draws in the last half of the steps."""
        run, average = self.run, self._average(end)
        num_scored = _num_due(average.step, end)
        while True:
            step, num_due = run.num_steps, _num_due(run.num_steps, end)
            # A run that resumes from a checkpoint repeats some steps.
            is_only_point = step == end and not num_scored
            if num_due > num_scored and (is_only_point or np.all(run.stats["is_draw"])):
                num_scored, points = num_due, run.last_accepted()
                predictor.restart()
                for chain in range(len(run.stats["is_draw"])):
                    predictor.update(jax.tree.map(lambda x, chain=chain: x[chain], points))
                average = average.joined(predictor, step, half=int(step > (1 + BURN_IN) / 2 * end))
                self._write(average)
            if step >= end or not self._advance(self._next_stop(end, num_scored)):
                break
        run.checkpoint()
        if run.num_steps != end or not any(average.counts):
            rule, got = (
                "new, or hold the same selection",
                f"one with a run of {run.num_steps} steps",
            )
            _check.fail("select", "directory", rule, got)
        counts = run.stats
        is_sound = np.all(counts["num_nonfinite"] <= MOST_NONFINITE * counts["num_gradients"])
        density = average.density() if is_sound else np.array([-np.inf])
        doublings = max(0.0, np.log2(self.num_draws * self.thin / ((1 - BURN_IN) * end)))
        added = GAIN_KEPT * doublings * average.gain() if is_sound else 0.0
        return Score(
            density=density.tolist(),
            num_steps=run.num_steps,
            gradients_per_step=_settings.gradients_per_step(settings),
            is_bayes=settings.get("temperature") == 1 and settings.get("prior_mean") != "start",
            projected=(density + added).tolist(),
        )

    def finish(self):
        """Run to the end."""
        while self.run.num_steps < self.num_warmup:
            self._advance(self._next_stop(self.num_warmup, NUM_SCORED))
        for _ in self.run.draws(self.num_draws, thin=self.thin):
            self.show(self.name, self.run.num_steps)

    def _next_stop(self, end: int, num_scored: int) -> int:
        """Return the end of the dispatch after which a point is to be scored, or the next tick."""
        stop = step = self.run.num_steps
        tick = step + (self.num_warmup - step - 1) % self.thin + 1
        while stop < tick and (stop == step or _num_due(stop, end) <= num_scored):
            stop = min(stop + self.steps_per_dispatch, tick)
        return stop

    def _advance(self, stop: int) -> bool:
        """Run to a step, and keep draws and trace as `sample` does; False if it is not reached."""
        past, run = stop - self.num_warmup, self.run
        if past <= 0:
            run.advance(stop, trace=past % self.thin == 0)
        else:
            # This call alone fixes where the draws lie.
            draws = run.draws(-(-past // self.thin), thin=self.thin)
            if past % self.thin:
                run.advance(stop, trace=False)
            for _ in draws if past % self.thin == 0 else ():
                pass
        self.show(self.name, self.run.num_steps)
        return run.num_steps == stop

    def _average(self, end: int) -> Average:
        """Return the stored predictions of an interrupted round, or none."""
        if self.file is None or not self.file.exists():
            return Average(end)
        with _disk.naming(self.file, "file", "Remove the folder of this candidate."):
            header, arrays = _disk.read(self.file)
            sums = arrays["first"], arrays["second"]
            average = Average(header["end"], header["step"], tuple(header["counts"]), sums)
        return average if average.end == end else Average(end)

    def _write(self, average: Average):
        if self.file is not None:
            header = {name: getattr(average, name) for name in ("end", "step", "counts")}
            first, second = average.log_sums
            _disk.write(self.file, _disk.pack(header, {"first": first, "second": second}))


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
        "LPPD of the start": float(f"{np.mean(_by_input(start.log_density)):.3g}"),
    }


def _read(folder: Path | None, identity: Options) -> list[Scores]:
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
    return [{name: Score(*x) for name, x in scores.items()} for scores in stored["found"]]


def _write(folder: Path | None, identity: Options, rounds: list[Scores]):
    if folder is not None:
        _disk.write_json(folder / ROUNDS, identity | {"found": rounds})


def _table_of(rounds: list[Scores], names: list[str]) -> np.ndarray:
    """Return LPPD, the projected one and its standard error, `[3, round, candidate]`."""
    table = np.full((3, len(rounds), len(names)), np.nan)
    for row, scores in enumerate(rounds):
        best = max(scores.values(), key=lambda one: one.projected_lppd)
        for name, one in scores.items():
            error = _standard_error(one.projected, best.projected)
            table[:, row, names.index(name)] = one.lppd, one.projected_lppd, error
    return table


def _cost(rounds: list[Scores], best: str, draws: Snapshots | StoredSnapshots) -> float:
    """Return the gradients of the dropped candidates divided by those of the chosen one."""
    last = {name: one for scores in rounds for name, one in scores.items() if name != best}
    spent = sum(one.num_steps * one.gradients_per_step for one in last.values())
    return spent / int(np.asarray(draws.trace["num_gradients"])[0, -1])
