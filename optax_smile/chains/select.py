"""Choose the sampler or optimizer whose averaged draws predict validation data best."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from optax_smile import _check, _disk, _on_host, _settings
from optax_smile._bar import Bar
from optax_smile._table import aligned
from optax_smile._types import Batch, Options, Output, Tree, Unchecked, by_identity
from optax_smile._warn import warn
from optax_smile.chains import _renewal
from optax_smile.chains.run import EXIT, Interrupted, Run
from optax_smile.draws import _checks as _draw_checks
from optax_smile.draws.likelihoods import Likelihood
from optax_smile.draws.predict import Predictor, predict
from optax_smile.draws.snapshots import Snapshots, StoredSnapshots
from optax_smile.state import MOST_NONFINITE, gradients_per_step

BURN_IN = 0.5  # Fraction of the steps of a round before the draws that score it.
# Draws per chain that score a round, evenly spaced over the rest of its steps. With two instead of
# six draws per chain, the average of a hot sampler lost .006 nats on LeNet, a third of its gain.
NUM_SCORED = 16
# Part of the gain from twice as many draws that each further doubling is assumed to add, and the
# largest such gain of an input, in nats: see `benchmarks/notes/temperature.md`.
GAIN_KEPT, LARGEST_GAIN = 0.5, float(np.log(2))
CLEARLY = 2  # Standard errors by which another must lead the chosen one to run again.
# Files with the scores of all rounds, and with the predictions of a candidate in its round.
ROUNDS, PART = "rounds.json", "round.safetensors"
PARTS = "Run Run.advance Run.draws sample predict Predictor Predictor.update".split()
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
        # Only NaN differs from itself.
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
    validation=_draw_checks.INPUTS_AND_TARGETS,
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
    control_variate: Iterable[Batch] | None = None,
    steps_per_dispatch: int = 1,
    mesh: Mesh | None = None,
    specs: Tree = None,
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
    again. Start from trained networks: who improves late may be dropped.

    Arguments not listed are those of `sample`.

    Args:
        batches: iterable of batches; no iterator, since each candidate iterates over it.
        candidates: dict of samplers and Optax optimizers by name, such as those of
            `local.network_candidates`.
        apply_fn, likelihood: see `predict`.
        control_variate: as for `sample`; optimizers run without.
        batch_size: validation inputs to run at once, >= 1; None: all.
        validation: pair of inputs and targets on which no candidate is trained. They select the
            candidate, so they are no test data.
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
    read: Options = {"likelihood": likelihood, "targets": validation[1]}
    read |= {"batch_size": batch_size, "mesh": mesh, "specs": specs}
    plan = _Plan(num_warmup, num_draws, thin, steps_per_dispatch)
    rounds = plan.rounds(len(candidates), largest_cost)
    given: Options = {"key": key, "stochastic": stochastic, "per_chain": per_chain, "check": check}
    given |= {"steps_per_dispatch": steps_per_dispatch, "mesh": mesh, "specs": specs}
    runs: dict[str, Run] = {}
    repeated: dict[str, int] = {}  # Steps of dropped candidates that ran again.

    def run(name: str) -> Run:
        if name not in runs:
            own = None if folder is None else folder / name
            repeated[name] = done.get(name, 0) if own is None else 0
            control = control_variate if settings[name] else None
            more: Options = {"directory": own, "control_variate": control}
            runs[name] = _Quiet(loss_fn, params, batches, candidates[name], **more, **given)
        return runs[name]

    def close(names: Iterable[str], *error: Unchecked):
        for name in runs.keys() & names:
            runs.pop(name).__exit__(*error or (None, None, None))

    with _check.called("select", *PARTS, **RENAMED), contextlib.ExitStack() as closing:
        closing.push(lambda *error: close(candidates, *error))
        start = predict(apply_fn, Snapshots.from_members(params), validation[0], **read)
        start_lppd = _mean(_by_input(start.log_density))
        shapes = _on_host.shapes_of_one(params)
        settings = {name: _settings.of(x, shapes) or {} for name, x in candidates.items()}
        per_step = {name: gradients_per_step(x, shapes) for name, x in candidates.items()}
        # The LPPD identifies inputs, targets, likelihood, model and start.
        identity: Options = {"candidates": settings, "rounds": [end for end, _ in rounds]}
        identity["LPPD of the start"] = float(f"{start_lppd:.3g}")
        found = _read(folder, identity)
        # Steps of each candidate.
        done = {x: end for (end, _), scores in zip(rounds, found, strict=True) for x in scores}
        total = plan.end + sum(end * num_dropped for end, num_dropped in rounds)
        bar = closing.enter_context(Bar(total, "selecting", progress))

        def show(name: str, step: int):
            done[name] = step
            bar.show(sum(done.values()), candidate=name)

        predictor = Predictor(apply_fn, validation[0], **read)
        running, latest = [*candidates], Scores()
        try:
            for (end, num_dropped), scores in zip(rounds, found, strict=True):
                for name in _contenders(running, latest, scores):
                    part = None if folder is None else folder / name / PART
                    shown = functools.partial(show, name)
                    scores[name] = _score(run(name), plan, predictor, end, part, shown)
                    if folder is not None:
                        _disk.write_json(folder / ROUNDS, {**identity, "found": found})
                are_finite = np.isfinite([_mean(x.density) for x in scores.values()])
                if num_dropped and not are_finite.any():
                    rule = "candidates of which one keeps all chains and predictions finite"
                    _check.fail("candidates", rule, [*scores])
                running = _survivors(scores, len(running) - num_dropped, settings, per_step)
                latest |= scores
                if len(running) > 1:
                    close(runs.keys() - running)
            close(runs.keys() - running)
            (best,) = running
            for step in plan.steps(run(best), num_warmup):
                show(best, step)
            for _ in run(best).making(num_draws, thin):
                show(best, run(best).num_steps)
        except Interrupted as interrupt:
            if len(running) > 1 or not run(running[0]).num_draws:
                raise
            warn(f"{interrupt} {EXIT}")
        (best,) = running
        draws, total_steps, final_lppd = run(best).snapshots(), run(best).num_steps, -np.inf
        # A chain may have become non-finite after the last round.
        with contextlib.suppress(ValueError):
            final = predict(apply_fn, draws, validation[0], **read)
            final_lppd = _mean(_by_input(final.log_density))
    if not final_lppd > start_lppd:
        numbers = f"LPPD {final_lppd:.4g}, start {start_lppd:.4g}"
        advice = "Predict with the networks that you passed, or try fewer steps."
        told = f"the draws of {best!r} predict no better than the start: {numbers}. {advice}"
        warn(f"`select`: {told}")
    found = [scores for scores in found if scores]
    ends = np.array([end for end, _ in rounds[: len(found)]], int)
    steps = {x: repeated.get(x, 0) + done[x] * (x != best) for x in done}
    spent = sum(steps[x] * per_step[x] for x in steps)
    cost = spent / int(np.asarray(draws.trace["num_gradients"])[0, -1])
    names, (lppd, projected, error) = tuple(candidates), _table(found, [*candidates])
    return Selection(
        best, draws, names, ends, lppd, projected, error, start_lppd, final_lppd, total_steps, cost
    )


class _Quiet(Run):
    """A run that does not warn of an optimizer."""

    announces = False


class _Plan(NamedTuple):
    """Where the draws of each candidate lie, see `sample`."""

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
            # One of at most three is chosen at once: who leads in the end may lead late.
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
        """Run to a step as `sample` does; yield now, at ticks, and at dispatches that are due."""
        yield (step := run.num_steps)
        while run.num_steps == step < end:
            tick = step + (self.num_warmup - step - 1) % self.thin + 1
            dispatches = range(step + self.steps_per_dispatch, tick, self.steps_per_dispatch)
            step = next(filter(is_due, dispatches), tick)
            number = max(0, -(-(step - self.num_warmup) // self.thin))
            # The first call fixes where the draws lie.
            draws = run.making(number, self.thin) if number else ()
            if number and step == tick:
                for _ in draws:
                    pass
            else:
                run.advance(step, trace=step == tick)
            yield run.num_steps


class Score(NamedTuple):
    """Log density of each input, see `_by_input`, now and with the draws to come."""

    density: list[float]
    projected: list[float]


BROKEN = Score([-np.inf], [-np.inf])
Scores = dict[str, Score]


def _score(
    run: Run, plan: _Plan, predictor: Predictor, end: int, file: Path | None, show: Callable
) -> Score:
    """Run to the end of a round, and score the draws in the last half of its steps.

    `file` keeps the predictions so far: a run that continues from a checkpoint repeats some steps.
    """
    # Step of the last draw; number of draws and log of their summed densities, for each half.
    scored, counts, sums = 0, [0, 0], [np.array(-np.inf), np.array(-np.inf)]
    if file is not None and file.exists():
        with _disk.naming(file, "file", "Remove the folder of this candidate."):
            header, arrays = _disk.read(file)
            if header["end"] == end:
                scored, counts = header["scored"], header["counts"]
                sums = [arrays["early"], arrays["late"]]

    def num_due(step: int) -> int:
        """Count the draws of each chain that score the round until a step."""
        first = BURN_IN * end
        return max(0, int(NUM_SCORED * (step - first) / (end - first)))

    def is_due(step: int) -> bool:
        return num_due(step) > num_due(scored)

    for step in plan.steps(run, end, is_due):
        show(step)
        is_draw = run.stats["is_draw"]
        # Points of exploration do not score, unless there is no draw.
        if is_due(step) and (is_draw.all() or (step == end and not scored)):
            points, half = run.last_accepted(), int(step > (1 + BURN_IN) / 2 * end)
            predictor.restart()
            for chain in range(len(is_draw)):
                predictor.update(jax.tree.map(lambda x, chain=chain: x[chain], points))
            sums[half] = _log_sum(sums[half], predictor)
            counts[half] += predictor.count
            scored = step
            if file is not None:
                header = {"file": file.name, "end": end, "scored": scored, "counts": counts}
                _disk.write(file, _disk.pack(header, {"early": sums[0], "late": sums[1]}))
    run.checkpoint()
    if run.num_steps != end or not scored:
        got = f"one with a run of {run.num_steps} steps"
        _check.fail("directory", "new, or hold the same selection", got)
    if np.any(run.stats["num_nonfinite"] > MOST_NONFINITE * run.stats["num_gradients"]):
        return BROKEN
    doublings = np.log2(plan.num_draws * plan.thin / ((1 - BURN_IN) * end))
    return _projected(counts, sums, max(0.0, doublings))


def _log_sum(before: np.ndarray, predictor: Predictor) -> np.ndarray:
    """Add densities of draws; NaN for padding, and everywhere if predictions are not finite."""
    # Predictions of the start were finite, so an error means non-finite draws.
    with contextlib.suppress(ValueError), np.errstate(invalid="ignore"):
        log_density = np.asarray(predictor.finalize().log_density, float)
        return np.logaddexp(before, log_density + np.log(predictor.count))
    return np.full_like(before, np.nan)


def _projected(counts: Sequence[int], sums: Sequence[np.ndarray], doublings: float) -> Score:
    """Score the average of two halves; its gain over each is that of twice as many draws."""
    if any(np.isnan(x).all() for x in sums):
        return BROKEN
    # NumPy warns of the NaN of padding.
    with np.errstate(invalid="ignore"):
        density = _by_input(np.logaddexp(*sums) - np.log(sum(counts)))
    gain = np.zeros_like(density)
    if all(counts) and np.isfinite(density).all():
        halves = [_by_input(x - np.log(count)) for x, count in zip(sums, counts, strict=True)]
        gain = np.minimum(density - np.average(halves, 0, counts), LARGEST_GAIN)
    return Score(density.tolist(), (density + GAIN_KEPT * doublings * gain).tolist())


def _contenders(running: Sequence[str], latest: Scores, scores: Scores) -> Iterator[str]:
    """Yield who is left and not in `scores`, then those whose latest is clearly better than all."""
    yield from [name for name in running if name not in scores]

    def leads(name: str) -> bool:
        before, best = latest[name].density, _best(scores)
        return _mean(before) - _mean(best) > CLEARLY * np.nan_to_num(_error(before, best))

    while ahead := [name for name in latest if name not in scores and leads(name)]:
        yield max(ahead, key=lambda name: _mean(latest[name].density))


def _survivors(
    scores: Scores, number: int, settings: Mapping[str, Options], per_step: Mapping[str, int]
) -> list[str]:
    """Return the best `number`; a single one may be equal to the best, and preferred to it."""
    ranked = sorted(scores, key=lambda name: -_mean(scores[name].projected))
    if number > 1:
        return ranked[:number]
    best = _best(scores)

    def is_equal(name: str) -> bool:
        mine = scores[name].projected
        return name == ranked[0] or _mean(best) - _mean(mine) <= _error(mine, best)

    def preference(name: str) -> tuple[int, bool]:
        mine = settings[name]
        is_bayes = mine.get("temperature") == 1 and mine.get("prior_mean") != "start"
        return per_step[name], not is_bayes

    return [min(filter(is_equal, ranked), key=preference)]


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


def _read(folder: Path | None, identity: Options) -> list[Scores]:
    """Read the scores of an earlier call, for each round by name."""
    if folder is None or not os.path.lexists(file := folder / ROUNDS):
        return [{} for _ in identity["rounds"]]
    with _disk.naming(file, "file", "Restore it, or choose another directory."):
        stored, is_intact = _disk.read_json(file)
        if not is_intact:
            raise ValueError("its checksum does not match")
    for what, mine in identity.items():
        if (theirs := stored.get(what)) != mine:
            rule = f"new, or hold a selection with the same {what}: {_check.cut(mine)}"
            _check.fail("directory", rule, f"{folder} with {_check.cut(theirs)}")
    return [{name: Score(*x) for name, x in scores.items()} for scores in stored["found"]]


def _table(found: list[Scores], names: list[str]) -> np.ndarray:
    """Return LPPD, the projected one and its standard error, `[3, round, candidate]`."""
    table = np.full((3, len(found), len(names)), np.nan)
    for row, scores in enumerate(found):
        for name, (density, projected) in scores.items():
            numbers = _mean(density), _mean(projected), _error(projected, _best(scores))
            table[:, row, names.index(name)] = numbers
    return table
