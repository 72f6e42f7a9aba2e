"""Choose the sampler or optimizer whose averaged draws predict validation data best."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from optax_smile import _check, _disk, _on_host, _paths, _settings
from optax_smile._bar import Bar
from optax_smile._table import aligned
from optax_smile._types import Options, by_identity
from optax_smile._warn import warn
from optax_smile.chains import _optimizer, _renewal
from optax_smile.chains.run import EXIT, Interrupted, Run
from optax_smile.draws import _constraints
from optax_smile.draws.likelihoods import Likelihood
from optax_smile.draws.predict import Predictor
from optax_smile.draws.snapshots import Snapshots, StoredSnapshots
from optax_smile.state import MOST_NONFINITE, gradients_per_step

BURN_IN = 0.5  # Fraction of the steps of a round before the draws that score it.
# Draws per chain that score a round, evenly spaced over the rest of its steps. With two instead of
# six draws per chain, the average of a hot sampler lost .006 nats on LeNet, a third of its gain.
NUM_SCORED = 16
# Part of the gain from twice as many draws that each further doubling is assumed to add, and the
# largest such gain of an input, in nats: see `benchmarks/notes/temperature.md`.
GAIN_KEPT, LARGEST_GAIN = 0.5, float(np.log(2))
CLEARLY = 2  # Standard errors by which a candidate must lead the chosen one to run again.
# Files with the scores of all rounds, and with the predictions of a candidate in its round.
ROUNDS, PART = "rounds.json", "round.safetensors"
PARTS = "Run Run.advance Run.draws sample Predictor Predictor.update".split()
PARTS += ["Snapshots.from_members"]
RENAMED = {"inputs": "validation", "targets": "validation", "snapshots": "params"}
RENAMED |= {"sampler": "candidates"}


@by_identity
class Selection(NamedTuple):
    """Result of `select`; print it for a table.

    Attributes:
        best: name of the chosen candidate.
        draws: draws of its whole run, as `sample` returns them.
        names: names of all candidates, `[candidate]`.
        num_steps: steps of each chain from the start to the end of each round, `[round]`.
        lppd: log pointwise predictive density of the validation data, nats per input (for
            `"tokens"`, per token), `[round, candidate]`; NaN for candidates that did not run in the
            round, -inf if chains or predictions became non-finite.
        projected: `lppd` plus the expected gain from the draws to come. It ranks the candidates.
        standard_error: of the difference of `projected` from the best of the round, over the
            inputs; NaN if it is unknown.
        start_lppd: `lppd` of the initial parameters of the chains.
        final_lppd: `lppd` of all draws of the chosen candidate.
        total_steps: steps of each chain of the chosen candidate.
        cost: gradients of the other candidates divided by those of the chosen one.
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

    @property
    def interrupted(self) -> str | None:
        """`"SIGINT"` or `"SIGTERM"` if this signal ended the run of the chosen candidate."""
        return getattr(self.draws, "interrupted", None)

    def __str__(self) -> str:
        rows = [("0", "start", self.start_lppd, *[np.nan] * 3)]
        rounds = zip(self.num_steps, self.lppd, self.projected, self.standard_error, strict=True)
        for number, lppd, projected, error in rounds:
            ranked = np.argsort(-projected)[: np.count_nonzero(~np.isnan(projected))]
            for place in ranked:
                steps = str(number) if place == ranked[0] else ""
                numbers = projected[place], projected[ranked[0]] - projected[place], error[place]
                rows.append((steps, self.names[place], lppd[place], *numbers))
        rows.append((str(self.total_steps), self.best, self.final_lppd, *[np.nan] * 3))
        forms = {"steps": "", "candidate": "", "LPPD": ".5g", "projected": ".5g"}
        forms |= {"below best": ".2g", "error": ".2g"}
        # `x != x` only for NaN.
        table = {
            head: ["-" if x != x else format(x, forms[head]) for x in cells]
            for head, cells in zip(forms, zip(*rows, strict=True), strict=True)
        }
        notes = [f"Chosen: {self.best}. The others used {self.cost:.2f} times its gradients."]
        if not _settings.are_posterior(getattr(self.draws, "settings", None)):
            notes.append("It is an optimizer: its draws are iterates, not posterior draws.")
        if not self.final_lppd > self.start_lppd:
            notes.append("No better than the start: predict with the start, or try fewer steps.")
        if np.isneginf([*self.lppd.ravel(), self.final_lppd]).any():
            notes.append("-inf: chains or predictions became non-finite.")
        return "\n".join([*aligned(table), "", *notes])


class _Candidates(_check.Constraint):
    """Transformations by name, converted to a dict."""

    text = "a dict of at least one sampler or optimizer by name, a valid folder name"

    def __call__(self, argument, value, given=_check.NOTHING):
        def is_name(x) -> bool:
            is_text = isinstance(x, str) and x.strip(". ") and x != ROUNDS
            return bool(is_text) and not {*'/\\:*?"<>|\0'} & {*x}

        if not isinstance(value, Mapping) or not value or not all(map(is_name, value)):
            got = [*value] if isinstance(value, Mapping) else _check.show(value)
            _check.fail(argument, self.text, got)
        for name, candidate in value.items():
            _check.TRANSFORMATION(f"{argument}[{name!r}]", candidate)
        return dict(value)


@_check.arguments(
    batches=_check.REPEATABLE,
    candidates=_Candidates(),
    validation=_constraints.INPUTS_AND_TARGETS,
    num_warmup=_check.Whole(0),
    num_draws=_check.Whole(1),
    thin=_check.Whole(1),
    batch_size=_check.Whole(1) | None,
    control_variate=_renewal.GIVEN | None,
    largest_cost=_check.Real(0, 100, open="low", traced=False),
    directory=_check.PathLike() | None,
)
@_check.on_host
def select(
    loss_fn: Callable[..., jax.Array],
    params: optax.Params,
    batches: Iterable[object],
    candidates: Mapping[str, optax.GradientTransformation],
    apply_fn: Callable[[Any, Any], object],
    validation: Sequence[object],
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
    control_variate: Iterable[object] | None = None,
    steps_per_dispatch: int = 1,
    mesh: Mesh | None = None,
    specs: object = None,
    directory: str | os.PathLike[str] | None = None,
    check: bool = True,
    progress: bool = True,
) -> Selection:
    """Run several samplers or optimizers, and keep the one that predicts validation data best.

    All candidates start from the same parameters with the same key, and run in rounds, each to
    about twice as many steps as the one before. A round is scored by the log pointwise predictive
    density (LPPD) of the validation data under the average over at most 16 draws of each chain in
    the last half of the steps so far. The gain of this average over those of its two halves, for
    each input at most log 2, is that of twice as many draws; half of it is added for each doubling
    until the end of the run. This projected LPPD ranks the candidates. Each round drops the worse
    half, until at most three finalists remain, of which the next round chooses one: within one
    standard error of the best, the one with the fewest gradients per step, then a sampler of the
    posterior of the model (temperature 1, prior not centred at the start).

    The chosen one finishes its run, in further rounds. If its projected LPPD falls more than two
    standard errors below the LPPD of another candidate, this one catches up, and `select` chooses
    again. Start from trained networks: a candidate that improves late may be dropped.

    Arguments not listed are those of `sample`.

    Args:
        batches: iterable of batches; no iterator, since each candidate iterates over it.
        candidates: dict of samplers and Optax optimizers by name, such as those of
            `local.network_candidates`.
        apply_fn, likelihood: see `predict`.
        control_variate: as for `sample`; optimizers run without.
        batch_size: validation inputs to run at once, >= 1; None: all.
        validation: pair of inputs and targets on which no candidate is trained. They select the
            candidate, so do not use them as test data.
        largest_cost: steps of all other candidates until one is chosen, relative to those of a
            whole run, in (0, 100]. Only a replaced choice costs more.
        directory: directory with a folder per candidate and a file for the rounds. After a kill the
            same call resumes; other samplers, steps or data are an error. None: in memory.

    Returns:
        A `Selection`: print it, or plot it with `plots.selection`.

    Warns:
        UserWarning: the draws predict the validation data no better than the start.

    Raises:
        ValueError: an argument is out of range; there are several processes; no candidate has
            finite predictions; the `directory` holds another selection; as for `sample`.
        KeyboardInterrupt: interrupted before a candidate was chosen, or before its first draw.

    Cost: (1 + largest_cost) times the steps of `sample`; the states of all candidates on the device
    until they are dropped; one forward pass over the validation data per scored draw.

    Example:
        >>> import jax, jax.numpy as jnp, optax, optax_smile
        >>> x = jnp.linspace(-1, 1, 20)
        >>> apply_fn = lambda params, x: (params["w"][0] * x + params["w"][1], jnp.zeros(()))
        >>> loss_fn = lambda params, y: jnp.mean((apply_fn(params, x)[0] - y) ** 2) / 2
        >>> selection = optax_smile.select(
        ...     loss_fn, {"w": 3 * jnp.eye(2)}, [2 * x],
        ...     {"near": optax.sgd(1e-6), "sgld": optax_smile.sgld(0.02, num_data=20, key=0)},
        ...     apply_fn, (x, 2 * x), likelihood="gaussian", num_warmup=200, num_draws=30,
        ...     key=jax.random.key(0), progress=False,
        ... )
        >>> selection.best, selection.draws.num_draws
        ('sgld', 30)
    """
    validation = _on_host.as_numeric("validation", tuple(validation), copy=True)
    if (number := jax.process_count()) > 1:
        _check.fail("params", "arrays of a single process", f"{number} processes")
    folder = None if directory is None else Path(directory).absolute()
    places: Options = {"mesh": mesh, "specs": specs}
    given: Options = {"key": key, "stochastic": stochastic, "per_chain": per_chain, "check": check}
    given |= {"steps_per_dispatch": steps_per_dispatch, **places}

    def begin(name: str) -> Run:
        own: Options = {"control_variate": control_variate if settings[name] else None}
        own["directory"] = None if folder is None else folder / name
        sampler = _optimizer.as_sampler(candidates[name], params)
        return Run(loss_fn, params, batches, sampler, **own, **given)

    with _check.called("select", *PARTS, **RENAMED), contextlib.ExitStack() as closing:
        start = Snapshots.from_members(_paths.without_variables(params))
        read: Options = {"likelihood": likelihood, "targets": validation[1], **places}
        read |= {"batch_size": batch_size, "num_chains": start.num_chains}
        predictor = Predictor(apply_fn, validation[0], **read)
        start_lppd = _lppd(predictor, start)
        shapes = _on_host.shapes_of_one(params)
        settings = {name: _settings.of(x, shapes) or {} for name, x in candidates.items()}
        plan = _Plan(num_warmup, num_draws, thin, steps_per_dispatch)
        per_step = {name: gradients_per_step(x, shapes) for name, x in candidates.items()}
        schedule = plan.rounds(len(candidates), largest_cost)
        rounds = _Rounds(schedule, settings, per_step, start_lppd, folder)
        num_steps = plan.end + sum(end * num_dropped for end, num_dropped in schedule)
        bar = closing.enter_context(Bar(num_steps, "selecting", progress))
        runs = closing.enter_context(_Runs(begin, plan, predictor, rounds.done(), folder, bar))
        try:
            _run_rounds(rounds, runs)
        except Interrupted as interrupt:
            if len(rounds.running) > 1 or not runs[rounds.running[0]].num_draws:
                raise
            warn(f"{interrupt} {EXIT}")
        return _result(rounds, runs)


def _run_rounds(rounds: _Rounds, runs: _Runs):
    """Make all rounds, then run the chosen candidate to its end."""
    for end in rounds:
        for name in rounds.contenders():
            rounds.put(name, runs.score(name, end))
        rounds.drop()
        # Finalists may run again.
        if len(rounds.running) > 1:
            runs.keep(rounds.running)
    runs.finish(*rounds.running)


class _Plan(NamedTuple):
    """Steps of the draws of each candidate, see `sample`."""

    num_warmup: int
    num_draws: int
    thin: int
    steps_per_dispatch: int

    @property
    def end(self) -> int:
        """Steps of a whole run."""
        return self.num_warmup + self.num_draws * self.thin

    def rounds(self, number: int, largest_cost: float) -> list[tuple[int, int]]:
        """Return the last step of each round, and how many of `number` candidates it drops.

        Each round doubles the steps; dropped candidates take `largest_cost` of a whole run in all.
        """
        left = [number]
        while left[-1] > 1:
            # Choose one of the last three at once: the best may take the lead only late.
            left.append(max(left[-1] // 2, 3) if left[-1] > 3 else 1)
        dropped = (-np.diff(left)).tolist()
        first = (self.num_warmup - 1) % self.thin + 1

        def tick(steps: float) -> int:
            return min(first + self.thin * max(0, int((steps - first) // self.thin)), self.end)

        shares = 2.0 ** np.arange(len(dropped))
        # A single candidate has no rounds.
        steps = largest_cost * self.end * shares / (np.dot(dropped, shares) or 1)
        ends = [tick(x) for x in steps]
        while ends and tick(2 * ends[-1]) not in (ends[-1], self.end):
            ends.append(tick(2 * ends[-1]))
        return [*zip_longest(ends, dropped, fillvalue=0)]

    def steps(
        self, run: Run, end: int, is_due: Callable[[int], bool] = lambda _: False
    ) -> Iterator[int]:
        """Run to a step as `sample` does; yield at the start, at ticks, and at due dispatches."""
        yield (step := run.num_steps)
        while run.num_steps == step < end:
            tick = step + (self.num_warmup - step - 1) % self.thin + 1
            dispatches = range(step + self.steps_per_dispatch, tick, self.steps_per_dispatch)
            step = next(filter(is_due, dispatches), tick)
            number = max(0, -(-(step - self.num_warmup) // self.thin))
            # The first call fixes the steps of the draws.
            draws = run.making(number, self.thin) if number else ()
            if number and step == tick:
                for _ in draws:
                    pass
            else:
                run.advance(step, trace=step == tick)
            yield run.num_steps


class Score(NamedTuple):
    """Log density of each input, see `_by_input`, for the draws so far and projected to the end."""

    density: list[float]
    projected: list[float]


BROKEN = Score([-np.inf], [-np.inf])
Scores = dict[str, Score]


@dataclasses.dataclass
class _Rounds:
    """The candidates in each round, and their scores, stored in a file."""

    schedule: list[tuple[int, int]]  # Last step of each round, and how many candidates it drops.
    settings: Mapping[str, Options]  # Settings of each candidate.
    per_step: Mapping[str, int]  # Gradients of each candidate.
    start_lppd: float
    folder: Path | None

    def __post_init__(self):
        self.running = [*self.settings]  # Candidates that are left.
        self.latest = Scores()  # Latest score of each candidate in earlier rounds.
        self.found: list[Scores] = [{} for _ in self.schedule]  # All scores, by round and name.
        # The LPPD identifies inputs, targets, likelihood, model and start.
        self.identity: Options = {"candidates": self.settings}
        self.identity["rounds"] = [end for end, _ in self.schedule]
        self.identity["LPPD of the start"] = float(f"{self.start_lppd:.3g}")
        if self.folder is not None and os.path.lexists(self.folder / ROUNDS):
            self._read(self.folder / ROUNDS)

    def _read(self, file: Path):
        """Read the scores of an earlier call."""
        with _disk.naming(file, "file", "Restore it, or choose another directory."):
            stored, is_intact = _disk.read_json(file)
            if not is_intact:
                raise ValueError("its checksum does not match")
        for what, mine in self.identity.items():
            if (theirs := stored.get(what)) != mine:
                rule = f"new, or hold a selection with the same {what}: {_check.cut(mine)}"
                got = f"{file.parent} with {_check.cut(theirs)}"
                _check.fail("directory", rule, got)
        self.found = [{name: Score(*x) for name, x in each.items()} for each in stored["found"]]

    def __iter__(self) -> Iterator[int]:
        """Begin each round, and yield its last step."""
        for (end, num_dropped), scores in zip(self.schedule, self.found, strict=True):
            self.num_dropped, self.scores = num_dropped, scores
            yield end

    def contenders(self) -> Iterator[str]:
        """Yield candidates without a score, then dropped ones whose last score clearly leads."""
        yield from [name for name in self.running if name not in self.scores]

        def leads(name: str) -> bool:
            before, best = self.latest[name].density, _best(self.scores)
            return _mean(before) - _mean(best) > CLEARLY * np.nan_to_num(_error(before, best))

        while ahead := [x for x in self.latest if x not in self.scores and leads(x)]:
            yield max(ahead, key=lambda name: _mean(self.latest[name].density))

    def put(self, name: str, score: Score):
        """Store the score of a candidate in this round."""
        self.scores[name] = score
        if self.folder is not None:
            _disk.write_json(self.folder / ROUNDS, {**self.identity, "found": self.found})

    def drop(self):
        """Keep the best candidates; the last one is the preferred among those equal to the best."""
        scores, best = self.scores, _best(self.scores)
        if self.num_dropped and not np.isfinite([_mean(x.density) for x in scores.values()]).any():
            rule = "candidates of which one keeps all chains and predictions finite"
            _check.fail("candidates", rule, [*scores])
        ranked = sorted(scores, key=lambda name: -_mean(scores[name].projected))

        def is_equal(name: str) -> bool:
            mine = scores[name].projected
            return name == ranked[0] or _mean(best) - _mean(mine) <= _error(mine, best)

        def preference(name: str) -> tuple[int, bool]:
            mine = self.settings[name]
            is_bayes = mine.get("temperature") == 1 and mine.get("prior_mean") != "start"
            return self.per_step[name], not is_bayes

        self.running = ranked[: len(self.running) - self.num_dropped]
        if len(self.running) == 1:
            self.running = [min(filter(is_equal, ranked), key=preference)]
        self.latest |= scores

    def done(self) -> Counter[str]:
        """Return the steps of each candidate that has a score."""
        rows = zip(self.schedule, self.found, strict=True)
        return Counter({name: end for (end, _), scores in rows for name in scores})

    def table(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the last steps of the rounds that have scores, `[round]`, and these scores.

        The scores are the LPPD, the projected LPPD and its standard error, `[3, round, candidate]`.
        """
        rows = [row for row in zip(self.schedule, self.found, strict=True) if row[1]]
        table, names = np.full((3, len(rows), len(self.settings)), np.nan), [*self.settings]
        for row, (_, scores) in enumerate(rows):
            for name, (density, projected) in scores.items():
                numbers = _mean(density), _mean(projected), _error(projected, _best(scores))
                table[:, row, names.index(name)] = numbers
        return np.array([end for (end, _), _ in rows], int), table


@dataclasses.dataclass
class _Runs(contextlib.AbstractContextManager):
    """Runs of candidates, each started when it is first needed."""

    begin: Callable[[str], Run]
    plan: _Plan
    predictor: Predictor
    done: Counter[str]  # Steps of each candidate.
    folder: Path | None
    bar: Bar
    live: dict[str, Run] = dataclasses.field(default_factory=dict)
    repeated: Counter[str] = dataclasses.field(default_factory=Counter)  # Steps made twice.

    def __getitem__(self, name: str) -> Run:
        if name not in self.live:
            # In memory, a candidate that was dropped starts again from the beginning.
            self.repeated[name] = self.done[name] if self.folder is None else 0
            self.live[name] = self.begin(name)
        return self.live[name]

    def keep(self, names: Sequence[str]):
        """Close all other runs."""
        for name in self.live.keys() - names:
            self.live.pop(name).close()

    def __exit__(self, *error: Any):
        while self.live:
            self.live.popitem()[1].__exit__(*error)

    def _show(self, name: str):
        self.done[name] = self[name].num_steps
        self.bar.show(self.done.total(), candidate=name)

    def score(self, name: str, end: int) -> Score:
        """Run a candidate to the end of a round, and score its draws."""
        run, plan = self[name], self.plan
        tally = _Tally(end, None if self.folder is None else self.folder / name / PART)
        for step in plan.steps(run, end, tally.is_due):
            self._show(name)
            is_draw = run.stats["is_draw"]
            # Points of the exploration do not count, unless there is no draw.
            if tally.is_due(step) and (is_draw.all() or (step == end and not tally.scored)):
                tally.add(step, run.last_accepted(), self.predictor)
        run.checkpoint()
        if run.num_steps != end or not tally.scored:
            got = f"one with a run of {run.num_steps} steps"
            _check.fail("directory", "new, or hold the same selection", got)
        if np.any(run.stats["num_nonfinite"] > MOST_NONFINITE * run.stats["num_gradients"]):
            return BROKEN
        doublings = np.log2(plan.num_draws * plan.thin / ((1 - BURN_IN) * end))
        return tally.score(max(0.0, doublings))

    def finish(self, name: str):
        """Run the chosen candidate to its end, and close all others."""
        self.keep([name])
        for _ in self.plan.steps(self[name], self.plan.num_warmup):
            self._show(name)
        for _ in self[name].making(self.plan.num_draws, self.plan.thin):
            self._show(name)


class _Tally:
    """Densities of the draws in the last half of a round, which score it.

    They are stored in `file`, since a run that resumes from a checkpoint repeats some steps.
    """

    def __init__(self, end: int, file: Path | None):
        self.end, self.file = end, file
        # Step of the last draw; for each half, number of draws and log of their summed densities.
        self.scored, self.counts = 0, [0, 0]
        self.sums = [np.array(-np.inf), np.array(-np.inf)]
        if file is not None and file.exists():
            with _disk.naming(file, "file", "Remove the folder of this candidate."):
                header, arrays = _disk.read(file)
                if header["end"] == end:
                    self.scored, self.counts = header["scored"], header["counts"]
                    self.sums = [arrays["early"], arrays["late"]]

    def is_due(self, step: int) -> bool:
        """Whether the next draw counts for the score; such draws are evenly spaced."""
        first = BURN_IN * self.end
        before, now = (
            max(0, int(NUM_SCORED * (x - first) / (self.end - first))) for x in (self.scored, step)
        )
        return now > before

    def add(self, step: int, points: object, predictor: Predictor):
        """Add densities of draws, arrays `[chain, ...]`.

        They are NaN for padding, and everywhere if predictions are not finite.
        """
        half = int(step > (1 + BURN_IN) / 2 * self.end)
        before, self.sums[half] = self.sums[half], np.full_like(self.sums[half], np.nan)
        predictor.restart()
        for chain in range(len(jax.tree.leaves(points)[0])):
            predictor.update(jax.tree.map(lambda x, chain=chain: x[chain], points))
        # Predictions of the start were finite, so an error means non-finite draws.
        with contextlib.suppress(ValueError), np.errstate(invalid="ignore"):
            log_density = np.asarray(predictor.finalize().log_density, float)
            self.sums[half] = np.logaddexp(before, log_density + np.log(predictor.count))
        self.counts[half] += predictor.count
        self.scored = step
        if self.file is not None:
            header = {"file": self.file.name, "end": self.end}
            header |= {"scored": step, "counts": self.counts}
            early, late = self.sums
            _disk.write(self.file, _disk.pack(header, {"early": early, "late": late}))

    def score(self, doublings: float) -> Score:
        """Score the average of both halves; its gain over a half is that of doubling the draws."""
        if any(np.isnan(x).all() for x in self.sums):
            return BROKEN
        # Padding is NaN, of which NumPy would warn.
        with np.errstate(invalid="ignore"):
            density = _by_input(np.logaddexp(*self.sums) - np.log(sum(self.counts)))
        gain = np.zeros_like(density)
        if all(self.counts) and np.isfinite(density).all():
            parts = zip(self.sums, self.counts, strict=True)
            halves = [_by_input(x - np.log(count)) for x, count in parts]
            gain = np.minimum(density - np.average(halves, 0, self.counts), LARGEST_GAIN)
        return Score(density.tolist(), (density + GAIN_KEPT * doublings * gain).tolist())


def _result(rounds: _Rounds, runs: _Runs) -> Selection:
    """Return the draws of the chosen candidate, and all scores."""
    (best,), start_lppd = rounds.running, rounds.start_lppd
    draws, total_steps, final_lppd = runs[best].snapshots(), runs[best].num_steps, -np.inf
    # A chain may have become non-finite after the last round.
    with contextlib.suppress(ValueError):
        final_lppd = _lppd(runs.predictor, draws)
    if not final_lppd > start_lppd:
        numbers = f"LPPD {final_lppd:.4g}, start {start_lppd:.4g}"
        advice = "Predict with the networks that you passed, or try fewer steps."
        no_better = f"the draws of {best!r} predict no better than the start: {numbers}."
        warn(f"`select`: {no_better} {advice}")
    spent = sum(
        (runs.repeated[name] + runs.done[name] * (name != best)) * number
        for name, number in rounds.per_step.items()
    )
    cost = spent / int(np.asarray(draws.trace["num_gradients"])[0, -1])
    names, (ends, (lppd, projected, error)) = tuple(rounds.settings), rounds.table()
    return Selection(
        best, draws, names, ends, lppd, projected, error, start_lppd, final_lppd, total_steps, cost
    )


def _lppd(predictor: Predictor, snapshots: Iterable[optax.Params]) -> float:
    """Compute the LPPD of the average of snapshots."""
    predictor.restart()
    for params in snapshots:
        predictor.update(params)
    return _mean(_by_input(predictor.finalize().log_density))


def _best(scores: Scores) -> list[float]:
    """Return the highest projected density of a round."""
    return max((one.projected for one in scores.values()), key=_mean)


def _mean(values: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(values))


def _error(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the standard error of the mean difference; NaN if it is not finite or of one input."""
    with np.errstate(invalid="ignore"):
        difference = np.subtract(first, second)
    if len(difference) < 2 or not np.isfinite(difference).all():
        return np.nan
    return float(difference.std(ddof=1) / len(difference) ** 0.5)


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
