"""The choice among samplers and optimizers, where the posterior is known."""

import json
import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from matplotlib.figure import Figure
from runs import Crash, crash
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


class Batches:
    """One batch in each pass; Ctrl-C while so many are read."""

    def __init__(self, stop_at: int | None = None):
        self.number, self.stop_at = 0, stop_at

    def __iter__(self):
        self.number += 1
        if self.number == self.stop_at:
            signal.raise_signal(signal.SIGINT)
        yield TRAIN


def find(candidates: Any, /, batches: Any = None, **changes) -> Selection:
    given: dict[str, Any] = {"likelihood": "gaussian", "key": 0, "progress": False, **BUDGET}
    arguments: dict[str, Any] = {"params": START, "apply_fn": apply_fn, "validation": VALID}
    given |= arguments | changes
    batches = Batches() if batches is None else batches
    return optax_smile.select(mean_loss, batches=batches, candidates=candidates, **given)


def sample(sampler: Any, **changes):
    given: dict[str, Any] = BUDGET | {"key": 0, "progress": False} | changes
    return optax_smile.sample(mean_loss, START, Batches(), sampler, **given)


def slow_density(draws: np.ndarray) -> np.ndarray:
    """Log density of each validation input under draws `[draw, parameter]`."""
    density = norm.logpdf(VALID[1], draws.astype(float) @ VALID[0].T, NOISE)
    return logsumexp(density, axis=0) - np.log(len(draws))


CANDIDATES = {
    "still": sgld(1e-8),
    "sgld": sgld(5e-4),
    "sgd": optax.sgd(2e-3),
    "bad": sgld(1e3),
}


@pytest.fixture(scope="module")
def selection():
    return find(CANDIDATES)


def test_the_best_is_chosen_and_runs_as_in_sample(selection):
    assert selection.best == "sgld" and selection.num_steps.tolist() == [18, 36, 72, 144]
    assert selection.names == ("still", "sgld", "sgd", "bad") and selection.total_steps == 270
    draws = sample(sgld(5e-4))
    np.testing.assert_array_equal(selection.draws.params, draws.params)
    for name, values in draws.trace.items():
        np.testing.assert_array_equal(selection.draws.trace[name], values)
    assert selection.draws.settings == draws.settings
    # One is dropped after 18 steps, two after 36.
    assert selection.cost == (18 + 2 * 36) / 270
    precision = TRAIN[0].T @ TRAIN[0] / NOISE**2 + np.eye(3)
    mean = np.linalg.solve(precision, TRAIN[0].T @ TRAIN[1] / NOISE**2)
    variance = NOISE**2 + np.sum(VALID[0] * np.linalg.solve(precision, VALID[0].T).T, axis=1)
    exact = norm.logpdf(VALID[1], VALID[0] @ mean, np.sqrt(variance)).mean()
    assert selection.final_lppd == pytest.approx(exact, abs=0.02)


def test_rounds_are_judged_by_draws_of_their_last_half_and_projected(selection):
    assert selection.start_lppd == pytest.approx(slow_density(np.asarray(START)).mean())
    # The last one is still at the start, but must not score like it.
    assert selection.lppd[0, 3] == -np.inf and np.isnan(selection.standard_error[0, 3])
    with pytest.warns(UserWarning, match="is an optimizer"):
        sgd = sample(optax.sgd(2e-3), num_warmup=0, num_draws=36, thin=1)
    draws = sample(sgld(5e-4), num_warmup=0, num_draws=36, thin=1), sgd
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
    assert rows[0][:2] == ["0", "start"] and rows[-1][:2] == ["270", "sgld"]
    assert len(rows) == 1 + 4 + 3 + 1 + 1 + 1 and {"still", "sgd"} < {
        name for row in rows for name in row
    }
    assert [row[0] for row in rows if row[0].isdigit()] == ["0", "18", "36", "72", "144", "270"]
    below = [float(row[-2]) for row in rows[1:4]]
    assert (
        below[0] == 0 and below == sorted(below) and rows[4] == ["bad", "-inf", "-inf", "inf", "-"]
    )
    notes = notes.splitlines()
    assert notes == [
        "Chosen: sgld. The others used 0.33 times its gradients.",
        "-inf: chains or predictions became non-finite.",
    ]
    worse = str(selection._replace(start_lppd=0.0))
    assert "No better than the start" in worse
    best = np.nanmax(selection.lppd[1])
    error = selection.best_round_error
    for below, is_said in ((1.9, False), (2.1, True)):
        printed = str(selection._replace(final_lppd=best - below * error))
        assert ("After 36 steps a candidate had an LPPD of" in printed) == is_said


def test_an_optimizer_may_be_alone_or_the_best(tmp_path):
    """It is named as one, and neither warns nor has rounds."""
    found = find({"sgd": optax.sgd(0.05)}, directory=tmp_path, **SHORT)
    assert found.best == "sgd" and found.cost == 0 and found.lppd.shape == (0, 1)
    assert "It is an optimizer" in str(found)
    found = find({"still": sgld(1e-8), "sgd": optax.sgd(0.05)}, **SHORT)
    assert found.best == "sgd" and found.standard_error[0, 0] > 0
    assert found.draws.settings == {"name": "optimizer", "is_posterior": False}


def crash_as(error: type[Exception]):
    raise error


def equal(got: Selection, expected: Selection):
    assert got.best == expected.best and got.cost == expected.cost
    np.testing.assert_array_equal(got.draws.params, expected.draws.params)
    np.testing.assert_allclose(got.lppd, expected.lppd, rtol=1e-6)
    np.testing.assert_allclose(got.projected, expected.projected, rtol=1e-5)
    np.testing.assert_allclose(got.standard_error, expected.standard_error, rtol=1e-4)
    assert got.final_lppd == expected.final_lppd


def test_a_selection_stopped_in_a_later_round_goes_on_to_the_same_result(tmp_path, selection):
    with pytest.raises(KeyboardInterrupt, match="`select` was stopped by SIGINT after 26 steps"):
        find(CANDIDATES, directory=tmp_path, batches=Batches(4 * 18 + 18 + 9))
    equal(find(CANDIDATES, directory=tmp_path), selection)


def test_a_stopped_selection_goes_on_to_the_same_result(tmp_path, monkeypatch):
    candidates = {"still": sgld(1e-8), "sgld": sgld(5e-4)}
    whole = find(candidates, **SHORT)
    assert whole.best == "sgld" and whole.num_steps.tolist() == [18, 36]

    def stopped(name: str, **changes):
        return find(candidates, directory=tmp_path / name, **SHORT, **changes)

    # In the round each reads 18 batches.
    for stop_at, running in ((5, "still"), (18 + 12, "sgld")):
        with pytest.raises(KeyboardInterrupt, match=f"A checkpoint is in .*{running}: repeat"):
            stopped(f"{stop_at}", batches=Batches(stop_at))
        equal(stopped(f"{stop_at}"), whole)
    with pytest.raises(KeyboardInterrupt, match=r"To be able to resume, pass a `directory`"):
        find(candidates, batches=Batches(5), **SHORT)
    with pytest.warns(UserWarning, match="^`select` was stopped by .* and 7 draws") as told:
        assert stopped("end", batches=Batches(18 + 53)).draws.num_draws == 7
    assert told[0].filename == __file__
    equal(stopped("end"), whole)
    # In the later round of the chosen one, whose first draw is after 33 steps.
    with pytest.warns(UserWarning, match="^`select` was stopped by .* and 1 draw "):
        found = stopped("later", batches=Batches(18 + 35))
    assert found.best == "sgld" and found.num_steps.tolist() == [18] and np.isfinite(found.cost)
    equal(stopped("later"), whole)
    # All is there: no step is done, and no file changes.
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("draw-*")}
    equal(stopped("end"), whole)
    assert files == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("draw-*")}
    draws = optax_smile.load_snapshots(tmp_path / "end" / "sgld", like=START[0])
    np.testing.assert_array_equal(draws.params, whole.draws.params)

    # Killed after the checkpoint of the round, and before what it found is written.
    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(selecting, "_write", crash)
        stopped("unwritten")
    equal(stopped("unwritten"), whole)

    # Killed where the newest checkpoint is older than some draws that were judged.
    advance = selecting._Candidate._advance

    def advance_until(self, stop):
        if (self.name, self.run.num_steps) == ("sgld", 17):
            raise Crash
        return advance(self, stop)

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(selecting._Candidate, "_advance", advance_until)
        stopped("killed")
    equal(stopped("killed"), whole)


def test_the_directory_of_another_selection_is_refused(tmp_path):
    candidates = {"still": sgld(1e-8), "sgd": optax.sgd(0.05)}
    found = find(candidates, directory=tmp_path, **SHORT)
    again = {"sgd": optax.sgd(0.05), "still": sgld(1e-8)}
    assert find(again, directory=tmp_path, **SHORT).best == found.best == "sgd"
    refused: list[tuple[Any, dict[str, Any]]] = [
        ({"still": sgld(1e-8), "other": optax.sgd(0.05)}, {}),
        ({"still": sgld(1e-7), "sgd": optax.sgd(0.05)}, {}),
        ({"still": sgld(1e-8), "sgd": optax.sgd(0.01)}, {}),
        (candidates, {"num_draws": 20}),
        (candidates, {"validation": (VALID[0], VALID[1] + 1)}),
    ]
    for others, changes in refused:
        with pytest.raises(
            ValueError, match=r"^`select\(directory=...\)` must be new, or hold a selection"
        ):
            find(others, directory=tmp_path, **SHORT | changes)
    # A damage is named, and nothing is read or written through a link.
    rounds, generator = tmp_path / "rounds.json", np.random.default_rng(0)
    intact, same = rounds.read_bytes(), 0
    identity = {"rounds that end after": []}
    expected = selecting._disk.read_json(rounds)[0]
    for number in range(400):
        at = int(generator.integers(len(intact)))
        flipped = bytes([intact[at] ^ 1 << number % 8])
        changed = {
            0: intact[:at] + flipped + intact[at + 1 :],
            1: intact[:at],
            2: intact[:at] + generator.bytes(5) + intact[at:],
            3: intact[:at] + bytes(len(intact[at : at + 64])) + intact[at + 64 :],
        }
        rounds.write_bytes(changed[number // 8 % 4])
        try:
            selecting._read(tmp_path, identity)
        except optax_smile.ArgumentError as error:
            assert error.argument == "directory" and str(rounds) in str(error)
        else:
            assert selecting._disk.read_json(rounds)[0] == expected
            same += 1
    assert same < 10
    rounds.unlink()
    rounds.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="intact rounds.json, got .* symbolic link"):
        find(candidates, directory=tmp_path, **SHORT)
    rounds.unlink()
    rounds.write_bytes(intact)
    (tmp_path / "sgd").rename(tmp_path / "moved")
    (tmp_path / "sgd").symlink_to(tmp_path / "moved")
    with pytest.raises(ValueError, match="directory whose sgd is a folder, got"):
        find(candidates, directory=tmp_path, **SHORT)
    (tmp_path / "sgd").unlink()
    (tmp_path / "moved").rename(tmp_path / "sgd")
    # Nor is the run of somebody else taken for what a round has found.
    (tmp_path / "rounds.json").unlink()
    with pytest.raises(ValueError, match=r"^`select\(directory=...\)` .* with a run of 60 steps"):
        find(candidates, directory=tmp_path, **SHORT)


@pytest.mark.parametrize("number", (2, 3, 4, 11))
def test_dropped_candidates_take_a_share_of_the_steps(number):
    for num_warmup, thin, num_steps, cost in (
        (90, 3, 270, 1 / 3),
        (1_001, 50, 3_001, 1 / 3),
        (0, 1, 10_000, 0.8),
    ):
        numbers = selecting._num_dropped(number)
        ends = selecting._round_ends(numbers, num_warmup, thin, num_steps, cost)
        left, dropped = number, 0
        assert all((end - num_warmup) % thin == 0 for end in ends)
        for place, end in enumerate(ends[: len(numbers)]):
            assert 0 < end <= num_steps * cost
            # The last decides among three or fewer.
            assert numbers[place] == (left - 1 if left <= 3 else left - max(left // 2, 3))
            dropped += numbers[place] * end
            left -= numbers[place]
        assert left == 1
        assert abs(dropped - num_steps * cost) <= number * thin
        doubled = 2 * np.array(ends[:-1]) - ends[1:]
        assert np.all(abs(doubled) <= 2 * thin)
        assert num_steps / 2 - thin <= ends[-1] < num_steps


def judged(
    lppd: float, gradients_per_step: int = 1, is_bayes: bool = True, spread: float = 0.1
) -> Score:
    """Of 100 inputs; the standard error of a difference is about a tenth of the spread."""
    noise = spread * np.random.default_rng(abs(hash(lppd)) % 2**32).normal(size=100)
    density = (lppd + noise - noise.mean()).tolist()
    return Score(density, 10, gradients_per_step, is_bayes, density)


def test_the_gain_of_twice_as_many_draws():
    first, second = np.log([0.1, 0.5, 1e-9]), np.log([0.3, 0.5, 0.5])
    part = selecting.Average(8, 8, (3, 3), (first + np.log(3), second + np.log(3)))
    gain = [np.log(0.2) - (first[0] + second[0]) / 2, 0, np.log(2)]
    np.testing.assert_allclose(part.gain(), gain, atol=1e-12)
    # Only one half has draws; some predictions were not finite; a density is zero.
    assert not part._replace(counts=(6, 0)).gain().any()
    for broken in (np.nan, -np.inf):
        bad = np.full(3, broken)
        assert not part._replace(log_sums=(bad, bad)).gain().any()


def test_among_equals_the_cheaper_then_the_posterior_then_the_better_is_chosen():
    winners: list[tuple[str, dict[str, Score]]] = [
        ("b", {"a": judged(-1), "b": judged(-0.9)}),
        # Within a standard error, which is about .014.
        ("a", {"a": judged(-0.905), "b": judged(-0.9, gradients_per_step=2)}),
        ("a", {"a": judged(-0.905), "b": judged(-0.9, is_bayes=False)}),
        ("b", {"a": judged(-0.905), "b": judged(-0.9)}),
        ("a", {"a": judged(-0.905, is_bayes=False), "b": judged(-0.9, gradients_per_step=2)}),
        # Beyond it nothing else counts.
        ("b", {"a": judged(-1), "b": judged(-0.9, gradients_per_step=2, is_bayes=False)}),
        ("a", {"a": judged(-9), "b": judged(-np.inf)}),
        # The error of a single input is unknown.
        (
            "b",
            {
                "a": Score([-0.905], 10, 1, True, [-0.905]),
                "b": Score([-0.9], 10, 2, False, [-0.9]),
            },
        ),
    ]
    for winner, found in winners:
        assert selecting._survivors(found, 1) == [winner], found
    # Before the last round, only the score counts.
    found = {"d": judged(-3), "c": judged(-2, 2), "b": judged(-0.9, 2), "a": judged(-0.905)}
    found["e"] = judged(-np.inf)
    assert selecting._survivors(found, 3) == ["b", "a", "c"]
    assert selecting._survivors(found, 1) == ["a"]
    broken = {"a": judged(-np.inf), "b": judged(-np.inf)}
    rule = r"^`select\(candidates=...\)` must be .*at least one keeps .*finite, got \['a', 'b'\]"
    with pytest.raises(ValueError, match=rule):
        selecting._check_finite(broken)


def overfits(after: int) -> optax.GradientTransformation:
    """Learns quickly, but moves away from the data after so many steps."""

    def rate(step: Any):
        return jnp.where(step < after, 0.03, -0.05)

    return optax.sgd(rate)


def test_a_finalist_takes_the_place_of_one_that_overfits_after_it_was_chosen(tmp_path):
    candidates = {"sgd": overfits(50), "sgld": sgld(2e-4), "still": sgld(1e-8)}
    found = find(candidates)
    chosen, *later = (np.isfinite(found.lppd[row]).tolist() for row in range(len(found.num_steps)))
    assert found.num_steps.tolist() == [45, 90, 180] and all(chosen)
    assert np.nanargmax(found.projected[0]) == 0 and later[0] == [True, True, False]
    assert found.best == "sgld" and later[1] == [False, True, False]
    np.testing.assert_array_equal(found.draws.params, sample(sgld(2e-4)).params)
    assert found.cost == (90 + 45) / 270
    # Stopped while the other one runs again, and the one that led has no draw.
    with pytest.raises(KeyboardInterrupt, match="and 0 draws per chain"):
        find(candidates, directory=tmp_path, batches=Batches(3 * 45 + 45 + 20))
    equal(find(candidates, directory=tmp_path), found)


def test_who_runs_again_was_clearly_better_than_all_of_the_round():
    # The standard error of a difference is about .014.
    latest = {"a": judged(-0.8), "b": judged(-0.9), "c": judged(-0.88), "d": judged(-np.inf)}
    for lppd, ahead in ((-1.0, "c"), (-0.89, None), (-0.8, None), (-np.inf, "c")):
        assert selecting._ahead({"a": judged(lppd)}, latest) == ([ahead] if ahead else []), lppd
    # What the draws to come will add counts only for the one that runs on.
    leader = judged(-1.0)._replace(projected=judged(-0.88).density)
    assert selecting._ahead({"a": leader}, latest) == []
    assert selecting._ahead({"a": judged(-1.0), "c": judged(-0.9)}, latest) == []
    assert selecting._ahead({"a": judged(-np.inf)}, {"a": latest["d"], "d": latest["d"]}) == []


def test_scores_of_tokens_of_impossible_targets_and_of_broken_chains():
    outputs: Any = GENERATOR.normal(size=(2, 5, 6, 4)).astype(np.float32)
    labels = np.where(np.arange(6) < 5, GENERATOR.integers(0, 4, (5, 6)), -1)

    def read(params: Any, x):
        return params[x]

    def part_of(rows, model=outputs):
        predictor = optax_smile.Predictor(read, np.arange(5), likelihood="tokens", targets=labels)
        for row in rows:
            predictor.update(model[row])
        return predictor

    whole = selecting.Average(20).joined(part_of([0, 1]), 20, 0)
    log_p = outputs - logsumexp(outputs, axis=-1, keepdims=True)
    taken = np.take_along_axis(log_p, np.maximum(labels, 0)[None, ..., None], axis=-1)[..., 0]
    expected = np.log(np.exp(taken).mean(axis=0))[:, :5].mean(axis=1)
    np.testing.assert_allclose(whole.density(), expected, rtol=1e-5, atol=1e-6)
    # In two parts, of one half or of both.
    first = selecting.Average(20).joined(part_of([0]), 15, 0)
    for half, counts in enumerate([(2, 0), (1, 1)]):
        parts = first.joined(part_of([1]), 20, half)
        np.testing.assert_allclose(parts.density(), expected, rtol=1e-5, atol=1e-6)
        assert parts.counts == counts
    # NaN of any draw is never forgotten, in whichever part it is.
    broken = np.where(np.arange(2)[:, None, None, None] == 1, np.nan, outputs)
    bad = selecting.Average(20).joined(part_of([1], broken), 15, 0)
    for part in (bad, first.joined(part_of([1], broken), 20, 1), bad.joined(part_of([0]), 20, 1)):
        assert part.density().tolist() == [-np.inf] and part.gain().tolist() == [0]
    assert json.loads(json.dumps(bad.density().tolist())) == [-np.inf]


def test_a_score_of_tokens_and_its_standard_error_count_tokens_not_inputs():
    """Against 20,000 resamplings of the inputs, of which the rank correlation is that of chance."""
    number = GENERATOR.integers(0, 9, 200)
    padded = np.where(
        np.arange(9) < number[:, None],
        GENERATOR.normal(size=(200, 9)) - number[:, None] / 9,
        np.nan,
    )
    better = padded + 0.5 + GENERATOR.normal(size=(200, 1))
    first, second, shifted = (
        selecting._by_input(x).tolist() for x in (padded, better, padded + 0.25)
    )
    assert np.mean(first) == pytest.approx(np.nanmean(padded), abs=1e-12)
    difference = np.nansum(better - padded, axis=1)
    rows = GENERATOR.integers(0, 200, (20_000, 200))
    ratios = difference[rows].sum(axis=1) / number[rows].sum(axis=1)
    assert selecting._standard_error(second, first) == pytest.approx(ratios.std(), rel=0.05)
    # A constant gain has no error, however long the inputs are.
    assert selecting._standard_error(shifted, first) < 1e-12
    # Inputs of equal length count as before, bit for bit.
    full = GENERATOR.normal(size=(7, 3))
    assert selecting._by_input(full).tolist() == full.mean(axis=1).tolist()
    impossible = np.where(np.isnan(padded), np.nan, -np.inf)
    assert np.mean(selecting._by_input(impossible)) == -np.inf


def test_a_winner_that_breaks_after_the_last_round_keeps_its_draws(monkeypatch):
    monkeypatch.setattr(selecting, "predict", lambda *_, **__: next(predictions))
    density = np.full(NUM_VALID, -3.0)
    predictions = (
        optax_smile.Prediction(None, density) if x == 0 else crash_as(ValueError) for x in range(2)
    )
    found = find({"still": sgld(1e-8), "sgld": sgld(5e-4)}, **SHORT)
    assert found.final_lppd == -np.inf and found.draws.num_draws == 10
    assert "-inf: " in str(found) and "No better than the start" in str(found)
    ax = optax_smile.plots.selection(found, ax=Figure().subplots())
    assert ax.get_title() == "Chosen: sgld, LPPD -inf"


def test_what_does_not_fit_is_refused_before_the_first_step():
    fine = {"a": sgld(1e-3)}
    for name in ("", ".", "..", "a/b", "a\\b", "a\0", 3, "rounds.json", 'a"'):
        with pytest.raises(
            ValueError, match=r"candidates=...\)` must be a dict whose names are valid"
        ):
            find({name: sgld(1e-3)})
    refused: list[tuple[Any, dict[str, Any], str]] = [
        ({}, {}, r"candidates=...\)` must be a dict of at least one sampler or optimizer by name"),
        (
            [sgld(1e-3)],
            {},
            r"candidates=...\)` must be a dict of at least one sampler or optimizer by name",
        ),
        ({"a": None}, {}, r"candidates\['a'\]=...\)` must be"),
        (fine, {"batches": iter([TRAIN])}, r"batches=...\)` must be .*can be repeated"),
        (
            fine,
            {"largest_cost": 0.0},
            r"largest_cost=...\)` must be a number in \(0, 100\], got 0.0",
        ),
        (fine, {"validation": (VALID[0], None)}, r"validation=...\)` must be a pair of inputs"),
        (fine, {"validation": (VALID[0], VALID[1][:3])}, r"validation=...\)` must be"),
        (fine, {"likelihood": "categorical"}, r"apply_fn=...\)` must be"),
        (fine, {"params": START.at[1, 0].set(jnp.nan)}, r"params=...\)` must be"),
    ]
    for candidates, changes, rule in refused:
        with pytest.raises(ValueError, match=rf"^`select\({rule}"):
            find(candidates, **changes)


def test_a_loss_with_random_numbers_and_the_bar(monkeypatch):
    """The bar ends where the steps of all candidates are done."""

    def noisy(params, batch, key):
        return mean_loss(params, batch) + 0.01 * jax.random.normal(key)

    shown = []
    bar = selecting._host.Bar
    monkeypatch.setattr(bar, "show", lambda self, done, **told: shown.append((done, told)))
    totals = []
    monkeypatch.setattr(
        bar,
        "__init__",
        lambda self, total, *_, **__: totals.append(total) or setattr(self, "_bar", None),
    )
    monkeypatch.setattr(bar, "begin", lambda self: None)
    given: dict[str, Any] = {"likelihood": "gaussian", "key": 0, "stochastic": True, **SHORT}
    candidates = {"still": sgld(1e-8), "sgld": sgld(5e-4)}
    optax_smile.select(noisy, START, [TRAIN], candidates, apply_fn, VALID, **given)
    assert totals == [60 + 18] and shown[-1] == (78, {"candidate": "sgld"})
    done = [step for step, _ in shown]
    assert done == sorted(done)


@pytest.mark.filterwarnings("ignore:`select` kept")
@pytest.mark.parametrize("num_cycles, scored", [(27, 7), (1, 1)])
def test_points_of_exploration_do_not_score(monkeypatch, num_cycles, scored):
    """Cycles of 10 steps explore for 8; a cycle as long as the run has no draw in the rounds."""
    cyclical: Any = optax_smile.cyclical_sgld(
        1e-4, num_data=NUM_DATA, total_steps=270, num_cycles=num_cycles, exploration=0.8, key=0
    )
    seen = []
    look = optax_smile.Run.last_accepted

    def watched(run):
        seen.append((run.num_steps, bool(run.stats["is_draw"].all())))
        return look(run)

    monkeypatch.setattr(selecting._Run, "last_accepted", watched)
    selection = find({"cyclical": cyclical, "other": cyclical})
    first = [is_draw for step, is_draw in seen if step <= selection.num_steps[0]]
    assert len(first) == 2 * scored and all(first) == (scored > 1)
