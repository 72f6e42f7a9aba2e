"""The choice among samplers and optimizers, where the posterior is known."""

import os
import re
from pathlib import Path
from signal import SIGINT
from typing import Any

from benchmarks import records

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runs import Crash, Exploring, Watched, at, refused, send, stub
from scipy.special import logsumexp
from scipy.stats import norm

import optax_smile
from optax_smile import Selection
from optax_smile.chains import select as selecting
from optax_smile.chains.select import Score

NUM_DATA, NUM_VALID, NOISE = 100, 50, 0.5
GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(NUM_DATA + NUM_VALID, 3)).astype(np.float32)
Y = (X @ [1, -2, 0.5] + NOISE * GENERATOR.normal(size=len(X))).astype(np.float32)
TRAIN, VALID = (X[:NUM_DATA], Y[:NUM_DATA]), (X[NUM_DATA:], Y[NUM_DATA:])
START = jnp.asarray(GENERATOR.normal(size=(3, 3)), jnp.float32)
BUDGET: dict[str, Any] = {"num_warmup": 90, "num_draws": 60, "thin": 3}
# Of runs that are stopped: a round of 18 steps for two candidates.
SHORT: dict[str, Any] = {"num_warmup": 30, "num_draws": 10, "thin": 3}


def apply_fn(params, inputs):
    return inputs @ params, jnp.log(NOISE)


def mean_loss(params, batch):
    """NaN far from the posterior, as the losses of networks are."""
    inputs, targets = batch
    loss = jnp.mean((inputs @ params - targets) ** 2) / (2 * NOISE**2)
    return jnp.where(jnp.sum(params**2) < 100**2, loss, jnp.nan)


def sgld(size: float):
    return optax_smile.sgld(size, num_data=NUM_DATA, key=jax.random.key(1))


# The sampler is not the point, but where a chain breaks.
TWO = {"still": stub(1e-8), "noisy": stub(0.05, noise=0.1)}
CANDIDATES = TWO | {"sgd": optax.sgd(2e-3), "bad": sgld(1e3)}


def batches(stop_at: int | None = None):
    """One batch in each pass; Ctrl-C while so many are read."""
    return Watched([TRAIN], at(stop_at or -1, send(SIGINT)))


def find(candidates: Any, /, loss: Any = mean_loss, **changes) -> Selection:
    given: dict[str, Any] = {"likelihood": "gaussian", "key": 0, "progress": False, **BUDGET}
    given |= {"params": START, "apply_fn": apply_fn, "validation": VALID, "batches": batches()}
    return optax_smile.select(loss, candidates=candidates, **given | changes)


def sample(sampler: Any, **changes):
    given: dict[str, Any] = BUDGET | {"key": 0, "progress": False} | changes
    return optax_smile.sample(mean_loss, START, batches(), sampler, **given)


def slow_density(draws: np.ndarray) -> np.ndarray:
    """Log density of each validation input under draws `[draw, parameter]`."""
    density = norm.logpdf(VALID[1], draws.astype(float) @ VALID[0].T, NOISE)
    return logsumexp(density, axis=0) - np.log(len(draws))


@pytest.fixture(scope="module")
def selection():
    return find(CANDIDATES)


@pytest.fixture(scope="module")
def short():
    return find(TWO, **SHORT)


def test_the_best_is_chosen_and_runs_as_in_sample(selection):
    assert selection.best == "noisy" and selection.num_steps.tolist() == [18, 36, 72, 144]
    assert selection.names == ("still", "noisy", "sgd", "bad") and selection.total_steps == 270
    draws = sample(TWO["noisy"])
    np.testing.assert_array_equal(selection.draws.params, draws.params)
    for name, values in draws.trace.items():
        np.testing.assert_array_equal(selection.draws.trace[name], values)
    # One is dropped after 18 steps, two after 36.
    assert selection.cost == (18 + 2 * 36) / 270
    density = slow_density(draws.params.reshape(-1, 3))
    assert selection.final_lppd == pytest.approx(density.mean(), rel=1e-5)


def test_rounds_are_judged_by_draws_of_their_last_half_and_projected(selection):
    assert selection.start_lppd == pytest.approx(slow_density(np.asarray(START)).mean())
    # The last one is still at the start, but must not score like it.
    assert selection.lppd[0, 3] == -np.inf and np.isnan(selection.standard_error[0, 3])
    with pytest.warns(UserWarning, match="is an optimizer"):
        sgd = sample(optax.sgd(2e-3), num_warmup=0, num_draws=36, thin=1)
    draws = sample(TWO["noisy"], num_warmup=0, num_draws=36, thin=1), sgd
    for row, end in enumerate(selection.num_steps[:2].tolist()):
        # The first step at or after each of 16 times.
        steps = np.unique(np.ceil(end / 2 * (1 + np.arange(1, 17) / 16)).astype(int))
        early = steps <= 3 / 4 * end

        def average(chosen, draws=draws):
            scored = [x.params[:, chosen - 1].reshape(-1, 3) for x in draws]
            return np.array([slow_density(x) for x in scored])

        density = average(steps)
        halves = [average(steps[half]) * half.sum() for half in (early, ~early)]
        np.testing.assert_allclose(selection.lppd[row, 1:3], density.mean(axis=1), rtol=1e-5)
        gain = np.minimum(density - np.sum(halves, axis=0) / len(steps), np.log(2))
        assert np.all(gain > -1e-9)
        # The draws of 180 steps come after a window of half of the steps.
        projected = density + gain / 2 * np.log2(180 / (end / 2))
        np.testing.assert_allclose(selection.projected[row, 1:3], projected.mean(axis=1), rtol=1e-4)
        best = int(np.argmax(projected.mean(axis=1)))
        error = np.std(projected[1 - best] - projected[best], ddof=1) / NUM_VALID**0.5
        got = selection.standard_error[row, 1:3]
        assert got[best] == 0 and got[1 - best] == pytest.approx(error, rel=1e-3)
    assert np.isnan(selection.lppd[1]).tolist() == [False, False, False, True]
    # The chosen one alone.
    assert np.isnan(selection.lppd[2:]).tolist() == 2 * [[True, False, True, True]]


def test_the_table_has_all_names(selection):
    table, notes = str(selection).split("\n\n")
    head, *rows = (line.split() for line in table.splitlines())
    assert head == "steps candidate LPPD projected below best error".split()
    assert rows[0][:2] == ["0", "start"] and rows[-1][:2] == ["270", "noisy"]
    assert [row[0] for row in rows if row[0].isdigit()] == ["0", "18", "36", "72", "144", "270"]
    below = [float(row[-2]) for row in rows[1:4]]
    assert len(rows) == 1 + 4 + 3 + 1 + 1 + 1 and below[0] == 0 and below == sorted(below)
    assert rows[4] == ["bad", "-inf", "-inf", "inf", "-"]
    assert notes.splitlines() == [
        "Chosen: noisy. The others used 0.33 times its gradients.",
        "-inf: chains or predictions became non-finite.",
    ]
    assert "No better than the start" in str(selection._replace(start_lppd=0.0))
    with pytest.warns(UserWarning, match=r"^`select`: .*'away' predict no better than the start"):
        find({"away": optax.sgd(-1e-4)}, **SHORT)


def test_an_optimizer_may_be_alone_or_the_best(tmp_path):
    found = find({"sgd": optax.sgd(0.05)}, directory=tmp_path, **SHORT)
    assert found.best == "sgd" and found.cost == 0 and found.lppd.shape == (0, 1)
    assert "It is an optimizer" in str(found)
    found = find({"still": stub(1e-8), "sgd": optax.sgd(0.05)}, **SHORT)
    assert found.best == "sgd" and found.standard_error[0, 0] > 0
    assert found.draws.settings == {"name": "optimizer", "is_posterior": False}


def equal(got: Selection, expected: Selection):
    assert got.best == expected.best and got.cost == expected.cost
    assert got.final_lppd == expected.final_lppd
    np.testing.assert_array_equal(got.draws.params, expected.draws.params)
    for name in ("lppd", "projected", "standard_error"):
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))


# Each reads 18 batches in the first round.
def test_a_stopped_selection_goes_on_to_the_same_result(tmp_path, short):
    rule = "^`select` was stopped by SIGINT after 12 .*noisy: repeat the call"
    with pytest.raises(KeyboardInterrupt, match=rule):
        find(TWO, directory=tmp_path, batches=batches(18 + 12), **SHORT)
    equal(find(TWO, directory=tmp_path, **SHORT), short)


def test_a_selection_stopped_after_the_choice_returns_its_draws(tmp_path, short):
    assert short.best == "noisy" and short.num_steps.tolist() == [18, 36]
    # In the later round of the chosen one, whose first draw is after 33 steps.
    with pytest.warns(UserWarning, match="^`select` was stopped by .* and 1 draw ") as told:
        found = find(TWO, directory=tmp_path, batches=batches(18 + 35), **SHORT)
    assert told[0].filename == __file__ and found.interrupted == "SIGINT"
    assert re.match(records.INTERRUPTED, str(told[0].message))
    assert found.best == "noisy" and found.num_steps.tolist() == [18] and np.isfinite(found.cost)
    with pytest.warns(UserWarning, match="^`select` was stopped by .* and 7 draws"):
        assert find(TWO, directory=tmp_path, batches=batches(53), **SHORT).draws.num_draws == 7
    equal(find(TWO, directory=tmp_path, **SHORT), short)
    # All is there: no step is done, and no file changes.
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("draw-*")}
    equal(find(TWO, directory=tmp_path, **SHORT), short)
    assert files == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("draw-*")}
    draws = optax_smile.load_snapshots(tmp_path / "noisy", like=START[0])
    np.testing.assert_array_equal(draws.params, short.draws.params)


# The file of the first round; a draw for the score, where the newest checkpoint is older.
@pytest.mark.parametrize("name, call", [("rounds.json", 1), ("round.safetensors", 9 + 8)])
def test_a_killed_selection_goes_on_to_the_same_result(tmp_path, short, monkeypatch, name, call):
    replace, calls = os.replace, []

    def killed(source, target):
        calls.append(Path(target).name == name)
        if calls[-1] and sum(calls) == call:
            raise Crash
        replace(source, target)

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(os, "replace", killed)
        find(TWO, directory=tmp_path, **SHORT)
    equal(find(TWO, directory=tmp_path, **SHORT), short)


def test_a_loop_may_use_the_memory_of_the_validation_again(short):
    inputs, targets = map(np.copy, VALID)
    spoilt = Watched([TRAIN], at(5, lambda: (inputs.fill(np.nan), targets.fill(np.nan))))
    equal(find(TWO, validation=(inputs, targets), batches=spoilt, **SHORT), short)


def test_the_directory_of_another_selection_is_refused(tmp_path):
    candidates = TWO | {"sgd": optax.sgd(0.05)}
    found = find(candidates, directory=tmp_path, **SHORT)
    again = dict(reversed(candidates.items()))
    assert find(again, directory=tmp_path, **SHORT).best == found.best

    def refuse(rule: str, others: Any = candidates, **changes):
        with pytest.raises(ValueError, match=rf"^`select\(directory=...\)` must be {rule}"):
            find(others, directory=tmp_path, **SHORT | changes)

    other = optax_smile.sgld(1e-7, num_data=NUM_DATA, key=0)
    refuse("new, or hold a selection", candidates | {"other": optax.sgd(0.05)})
    refuse("new, or hold a selection", candidates | {"still": other})
    refuse("new, or hold a selection", num_draws=20)
    refuse("new, or hold a selection", validation=(VALID[0], VALID[1] + 1))
    # Damaged files are named.
    rounds, generator = tmp_path / "rounds.json", np.random.default_rng(0)
    intact = rounds.read_bytes()
    for number in range(8):
        # Behind them, the last digits of scores may make no difference.
        place = int(generator.integers(100))
        flipped = bytes([intact[place] ^ 1 << number % 5])
        changed = intact[:place] + flipped + intact[place + 1 :], intact[:place]
        rounds.write_bytes(changed[number % 2])
        refused(f"The file {rounds} is damaged", find, candidates, directory=tmp_path, **SHORT)
    # The run of somebody else is not taken for what a round has found.
    rounds.unlink()
    refuse(".* with a run of 60 steps")
    rounds.unlink()
    rounds.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=f"The file {rounds} is damaged .*symbolic link"):
        find(candidates, directory=tmp_path, **SHORT)


@pytest.mark.parametrize("number", (2, 3, 11))
def test_dropped_candidates_take_a_share_of_the_steps(number):
    for num_warmup, num_draws, thin, cost in ((1_001, 40, 50, 1 / 3), (0, 10_000, 1, 0.8)):
        num_steps, left, total = num_warmup + num_draws * thin, number, 0
        rounds = selecting._Plan(num_warmup, num_draws, thin, 1).rounds(number, cost)
        for end, dropped in rounds:
            assert (end - num_warmup) % thin == 0
            # The last decides among three or fewer.
            assert dropped == (left - 1 if left <= 3 else left - max(left // 2, 3))
            assert not dropped or 0 < end <= num_steps * cost
            left, total = left - dropped, total + dropped * end
        assert left == 1 and abs(total - num_steps * cost) <= number * thin
        ends = np.array([end for end, _ in rounds])
        assert np.all(abs(2 * ends[:-1] - ends[1:]) <= 2 * thin)
        assert num_steps / 2 - thin <= ends[-1] < num_steps


def judged(lppd: float) -> Score:
    """Of 100 inputs; the standard error of a difference is about .014."""
    noise = 0.1 * np.random.default_rng(abs(hash(lppd)) % 2**32).normal(size=100)
    return Score(*2 * [(lppd + noise - noise.mean()).tolist()])


def test_the_gain_of_twice_as_many_draws():
    first, second = np.log([0.1, 0.5, 1e-9]), np.log([0.3, 0.5, 0.5])
    sums = first + np.log(3), second + np.log(3)
    density, projected = map(np.array, selecting._projected((3, 3), sums, 2.0))
    gain = [np.log(0.2) - (first[0] + second[0]) / 2, 0, np.log(2)]
    np.testing.assert_allclose(projected - density, gain, atol=1e-12)
    # Only one half has draws; some predictions were not finite; a density is zero.
    alone = selecting._projected((6, 0), (sums[0], np.array(-np.inf)), 2.0)
    assert alone.projected == alone.density
    for broken in (np.nan, -np.inf):
        assert not np.isfinite(selecting._projected((3, 3), [np.full(3, broken)] * 2, 2.0)).any()


BAYES: dict[str, Any] = {"temperature": 1, "prior_mean": 0.0}
COSTLY = {**BAYES, "integrator": "minimal_norm"}
COLD, AROUND = BAYES | {"temperature": 0.1}, BAYES | {"prior_mean": "start"}


def test_among_equals_the_cheaper_then_the_posterior_then_the_better_is_chosen():
    # Within a standard error, then beyond it, where nothing else counts.
    for winner, first, *settings in (
        *(("a", -0.905, BAYES, other) for other in (COSTLY, COLD, AROUND)),
        ("b", -0.905, BAYES, BAYES),
        ("a", -0.905, {}, COSTLY),
        *(("b", -1, BAYES, other) for other in (COSTLY, COLD)),
        ("b", -np.inf, BAYES, COSTLY),
    ):
        found = {"a": judged(first), "b": judged(-0.9)}
        got = selecting._survivors(found, 1, dict(zip("ab", settings, strict=True)))
        assert got == [winner], (first, settings)
    # The error of a single input is unknown.
    single = {"a": Score([-0.905], [-0.905]), "b": Score([-0.9], [-0.9])}
    assert selecting._survivors(single, 1, {"a": BAYES, "b": COSTLY}) == ["b"]
    # Before the last round, only the score counts.
    lppd = {"d": -3, "c": -2, "b": -0.9, "a": -0.905, "e": -np.inf}
    found, settings = {x: judged(y) for x, y in lppd.items()}, dict.fromkeys("abcde", BAYES)
    settings["b"] = COSTLY
    assert selecting._survivors(found, 3, settings) == ["b", "a", "c"]
    assert selecting._survivors(found, 1, settings) == ["a"]


def overfits(rate: float) -> optax.GradientTransformation:
    """Learn quickly, but move away from the data after 50 steps."""
    return optax.sgd(lambda step: jnp.where(jnp.asarray(step) < 50, rate, -0.05))


def test_a_finalist_takes_the_place_of_one_that_overfits_after_it_was_chosen(tmp_path):
    candidates = {"sgd": overfits(0.03), "noisy": stub(0.02, noise=0.1), "still": TWO["still"]}
    found = find(candidates)
    chosen, *later = (np.isfinite(found.lppd[row]).tolist() for row in range(len(found.num_steps)))
    assert found.num_steps.tolist() == [45, 90, 180] and all(chosen)
    assert np.nanargmax(found.projected[0]) == 0 and later[0] == [True, True, False]
    assert found.best == "noisy" and later[1] == [False, True, False]
    np.testing.assert_array_equal(found.draws.params, sample(candidates["noisy"]).params)
    assert found.cost == (90 + 45) / 270
    # Stopped while the other one runs again, and the one that led has no draw.
    with pytest.raises(KeyboardInterrupt, match="and 0 draws per chain"):
        find(candidates, directory=tmp_path, batches=batches(3 * 45 + 45 + 20))
    equal(find(candidates, directory=tmp_path), found)


def test_a_dropped_one_runs_again_where_all_finalists_overfit(tmp_path):
    candidates = {f"sgd {rate}": overfits(rate) for rate in (0.02, 0.025, 0.03)}
    candidates["slow"] = stub(5e-3)
    found = find(candidates)
    ran = np.isfinite(found.lppd[:, 3]).tolist()
    assert found.best == "slow" and ran == [True, False, False, True]
    np.testing.assert_array_equal(found.draws.params, sample(candidates["slow"]).params)
    # All ran for 144 steps. In memory it ran its first 18 steps twice; in a directory it resumes.
    assert found.cost == (3 * 144 + 18) / 270
    stored = find(candidates, directory=tmp_path)
    assert stored.cost == 3 * 144 / 270
    np.testing.assert_array_equal(stored.draws.params, found.draws.params)


def test_who_runs_again_was_clearly_better_than_all_of_the_round():
    latest = {"a": judged(-0.8), "b": judged(-0.9), "c": judged(-0.88), "d": judged(-np.inf)}

    def ahead(scores: dict[str, Score], finalists=latest):
        return next(selecting._contenders(["a"], finalists, scores), None)

    assert ahead({}) == "a"
    for lppd, name in ((-1.0, "c"), (-0.89, None), (-0.8, None), (-np.inf, "c")):
        assert ahead({"a": judged(lppd)}) == name, lppd
    # What the draws to come will add counts only for the one that runs on.
    assert ahead({"a": Score(judged(-1.0).density, judged(-0.88).density)}) is None
    assert ahead({"a": judged(-1.0), "c": judged(-0.9)}) is None
    assert ahead({"a": judged(-np.inf)}, {"a": latest["d"], "d": latest["d"]}) is None


def test_scores_of_tokens_of_impossible_targets_and_of_broken_chains():
    outputs: Any = GENERATOR.normal(size=(2, 5, 6, 4)).astype(np.float32)
    labels = np.where(np.arange(6) < 5, GENERATOR.integers(0, 4, (5, 6)), -1)

    def joined(rows, before: Any = -np.inf):
        given: dict[str, Any] = {"likelihood": "tokens", "targets": labels}
        predictor = optax_smile.Predictor(lambda params, x: params[x], np.arange(5), **given)
        for row in rows:
            predictor.update(row)
        return selecting._log_sum(np.asarray(before), predictor)

    log_p = outputs - logsumexp(outputs, axis=-1, keepdims=True)
    taken = np.take_along_axis(log_p, np.maximum(labels, 0)[None, ..., None], axis=-1)[..., 0]
    expected = np.log(np.exp(taken).mean(axis=0))[:, :5].mean(axis=1)
    none, (first, second), bad = np.array(-np.inf), outputs, np.full_like(outputs[0], np.nan)
    one = joined([first])
    # Together, one after the other, and in two halves.
    for counts, sums in (
        ((2, 0), (joined(outputs), none)),
        ((0, 2), (none, joined([second], one))),
        ((1, 1), (one, joined([second]))),
    ):
        got = selecting._projected(counts, sums, 0.0)
        np.testing.assert_allclose(got.density, expected, rtol=1e-5, atol=1e-6)
    # NaN of any draw is never forgotten, in whichever part it is.
    broken = joined([bad])
    for sums in ((joined([first], broken), none), (broken, one), (one, broken)):
        assert selecting._projected((1, 1), sums, 1.0) == ([-np.inf], [-np.inf])


def test_a_score_of_tokens_and_its_standard_error_count_tokens_not_inputs():
    """Against 20,000 resamplings of the inputs, of which the rank correlation is that of chance."""
    number = GENERATOR.integers(0, 9, 200)
    noise = GENERATOR.normal(size=(200, 9)) - number[:, None] / 9
    padded = np.where(np.arange(9) < number[:, None], noise, np.nan)
    better = padded + 0.5 + GENERATOR.normal(size=(200, 1))
    parts: Any = map(selecting._by_input, (padded, better, padded + 0.25))
    first, second, shifted = parts
    assert np.mean(first) == pytest.approx(np.nanmean(padded), abs=1e-12)
    rows = GENERATOR.integers(0, 200, (20_000, 200))
    ratios = np.nansum(better - padded, axis=1)[rows].sum(axis=1) / number[rows].sum(axis=1)
    assert selecting._error(second, first) == pytest.approx(ratios.std(), rel=0.05)
    # A constant gain has no error, however long the inputs are.
    assert selecting._error(shifted, first) < 1e-12
    # Inputs of equal length count as before, bit for bit.
    full = GENERATOR.normal(size=(7, 3))
    assert selecting._by_input(full).tolist() == full.mean(axis=1).tolist()
    impossible = np.where(np.isnan(padded), np.nan, -np.inf)
    assert np.mean(selecting._by_input(impossible)) == -np.inf


def test_what_does_not_fit_is_refused_before_the_first_step():
    def refuse(rule: str, candidates: Any, **changes):
        refused(rf"^`select\({rule}", find, candidates, **SHORT | changes)

    for name in ("", "..", "a/b", "a\0", 3, "rounds.json"):
        rule = r"candidates=...\)` must be a dict .* by name, a valid folder name, got"
        refuse(rf"{rule} \[{re.escape(repr(name))}\]", {name: sgld(1e-3)})
    refuse(r"candidates=...\)` must be a dict of at least one sampler or optimizer by name", {})
    fine = {"a": sgld(1e-3)}
    refuse(r"candidates\['a'\]=...\)` must be", {"a": None})
    refuse(r"batches=...\)` must be .*can be repeated", fine, batches=iter([TRAIN]))
    refuse(r"largest_cost=...\)` must be a number in \(0, 100\], got 0.0", fine, largest_cost=0.0)
    refuse(r"validation=...\)` must be a pair of inputs", fine, validation=(VALID[0], None))
    refuse(r"apply_fn=...\)` must be", fine, likelihood="categorical")
    refuse(r"params=...\)` must be", fine, params=START.at[1, 0].set(jnp.nan))
    # After the first round.
    rule = r"candidates=...\)` must be candidates of which one keeps .*finite, got \['a', 'b'\]"
    refuse(rule, {"a": sgld(1e3), "b": sgld(1e4)})


class Never(Exploring):
    def stats(self):
        return super().stats()._replace(is_draw=self.num_gradients > 190)


@pytest.mark.filterwarnings("ignore:`select` kept")
@pytest.mark.parametrize("kind, scored", [(Exploring, 12), (Never, 1)])
def test_points_of_exploration_do_not_score(monkeypatch, kind, scored):
    """Unless there is no draw in a round."""
    seen, look = [], optax_smile.Run.last_accepted

    def watched(run):
        seen.append((run.num_steps, bool(run.stats["is_draw"].all())))
        return look(run)

    monkeypatch.setattr(optax_smile.Run, "last_accepted", watched)
    selection = find(dict.fromkeys("ab", stub(kind=kind)))
    first = [is_draw for step, is_draw in seen if step <= selection.num_steps[0]]
    assert len(first) == 2 * scored and all(first) == (scored > 1)
