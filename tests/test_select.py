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
from flax import nnx
from runs import Crash, Exploring, Watched, at, refused, send, stub
from scipy.special import logsumexp
from scipy.stats import norm

import optax_smile
from optax_smile import Selection

# Slow tests compare no statistics.
OPTIMIZED = False
NUM_DATA, NUM_VALID, NOISE = 100, 50, 0.5
GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(NUM_DATA + NUM_VALID, 3)).astype(np.float32)
Y = (X @ [1, -2, 0.5] + NOISE * GENERATOR.normal(size=len(X))).astype(np.float32)
TRAIN, VALID = (X[:NUM_DATA], Y[:NUM_DATA]), (X[NUM_DATA:], Y[NUM_DATA:])
START = jnp.asarray(GENERATOR.normal(size=(3, 3)), jnp.float32)
BUDGET: dict[str, Any] = {"num_warmup": 90, "num_draws": 60, "thin": 3}
# Runs that are stopped have a round of 18 steps for two candidates.
SHORT: dict[str, Any] = {"num_warmup": 30, "num_draws": 10, "thin": 3}


def apply_fn(params, inputs):
    """NaN far from the posterior, as the outputs of networks are."""
    return jnp.where(jnp.sum(params**2) < 100**2, inputs @ params, jnp.nan), jnp.log(NOISE)


def mean_loss(params, batch):
    inputs, targets = batch
    return jnp.mean((apply_fn(params, inputs)[0] - targets) ** 2) / (2 * NOISE**2)


def sgld(size: float):
    return optax_smile.sgld(size, num_data=NUM_DATA, key=jax.random.key(1))


# The test is about broken chains, not about the sampler.
TWO = {"still": stub(1e-8), "noisy": stub(0.05, noise=0.1)}
CANDIDATES = TWO | {"sgd": optax.sgd(2e-3), "bad": sgld(1e3)}


def at_place(place: Any, **given) -> Any:
    """A sampler all of whose chains are at `place(step)`, an array, after each step."""
    like = stub(**given)

    def update(updates, state, params=None, **_):
        state = like.update(updates, state)[1]
        return place(state.num_gradients) - params, state

    return optax.GradientTransformationExtraArgs(like.init, update)


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


def slow_density(draws: Any) -> np.ndarray:
    """Log density of each validation input under draws `[draw, parameter]`."""
    density = norm.logpdf(VALID[1], np.asarray(draws, float) @ VALID[0].T, NOISE)
    return logsumexp(density, axis=0) - np.log(len(draws))


def standard_error(difference: np.ndarray) -> float:
    return np.std(difference, ddof=1) / len(difference) ** 0.5


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
    assert selection.start_lppd == pytest.approx(slow_density(START).mean())
    # The last one is still at the start, but must not score like it.
    assert selection.lppd[0, 3] == -np.inf and np.isnan(selection.standard_error[0, 3])
    running = [[True] * 4, [True, True, True, False], *2 * [[False, True, False, False]]]
    assert (~np.isnan(selection.lppd)).tolist() == running


def test_a_text_has_every_round_and_a_selection_no_better_than_its_start_warns(selection):
    rows = [line.split() for line in str(selection).splitlines()]
    assert ["bad", "-inf", "-inf", "inf", "-"] in rows and ["Chosen:", "noisy."] == rows[-2][:2]
    assert [x[0] for x in rows if x and x[0].isdigit()] == ["0", "18", "36", "72", "144", "270"]
    with pytest.warns(UserWarning, match=r"^`select`: .*'away' predict no better than the start"):
        assert "No better than the start" in str(find({"away": optax.sgd(-1e-4)}, **SHORT))


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


def test_a_stopped_selection_goes_on_to_the_same_result(tmp_path, short):
    """Each of the two candidates reads 18 batches in the first round, and the chosen one 42."""

    def stopped(at: int) -> Any:
        return find(TWO, directory=tmp_path, batches=batches(at), **SHORT)

    with pytest.raises(
        KeyboardInterrupt, match="^`select` was stopped by SIGINT after 12 .*noisy: "
    ):
        stopped(18 + 12)
    # After the choice it returns the draws, the first of which is after 33 steps.
    assert short.best == "noisy" and short.num_steps.tolist() == [18, 36]
    with pytest.warns(UserWarning, match="^`select` was stopped by .* and 1 draw ") as told:
        found = stopped(35)
    assert told[0].filename == __file__ and found.interrupted == "SIGINT"
    assert re.match(records.INTERRUPTED, str(told[0].message))
    assert found.best == "noisy" and found.num_steps.tolist() == [18] and np.isfinite(found.cost)
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


def test_draws_of_flax_nnx_are_like_the_start():
    """In an `nnx.State`, draws have arrays in the place of variables."""
    states = [nnx.State({"w": nnx.Param(x)}) for x in START]
    state = jax.tree.map(lambda *x: jnp.stack(x), *states)
    given: dict[str, Any] = {"apply_fn": lambda p, x: apply_fn(nnx.as_pure(p)["w"], x)}
    found = find(
        TWO, lambda p, batch: mean_loss(nnx.as_pure(p)["w"], batch), params=state, **given, **SHORT
    )
    assert found.best == "noisy" and found.final_lppd > found.start_lppd


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
    rounds = tmp_path / "rounds.json"
    intact = rounds.read_bytes()
    for damaged in (intact[:40], intact[:40] + bytes([intact[40] ^ 1]) + intact[41:]):
        rounds.write_bytes(damaged)
        refused(f"The file {rounds} is damaged", find, candidates, directory=tmp_path, **SHORT)
    # The run of somebody else is not taken for what a round has found.
    rounds.unlink()
    refuse(".* with a run of 60 steps")


@pytest.mark.slow
@pytest.mark.parametrize("largest_cost, running", [(0.8, [2]), (1 / 3, [3]), (1 / 3, [11, 5, 3])])
def test_dropped_candidates_take_a_share_of_the_steps(largest_cost, running):
    """Each round has twice as many steps; the last that drops any decides among at most three."""
    num_warmup, num_draws, thin, num_steps = 201, 20, 10, 401
    given = {"num_warmup": num_warmup, "num_draws": num_draws, "thin": thin}
    candidates = dict.fromkeys("abcdefghijk"[: running[0]], TWO["noisy"])
    found = find(candidates, largest_cost=largest_cost, **given)
    ran, ends = np.isfinite(found.lppd).sum(axis=1).tolist(), found.num_steps
    assert ran == running + [1] * (len(ends) - len(running))
    assert abs(found.cost - largest_cost) <= len(candidates) * thin / num_steps
    assert np.all((ends - num_warmup) % thin == 0)
    assert np.all(abs(2 * ends[:-1] - ends[1:]) <= 2 * thin)
    assert num_steps / 2 - thin <= ends[-1] < num_steps


def test_a_round_is_scored_by_draws_of_the_last_half_of_its_steps_and_their_gain():
    """Chains move in each step, some so far that the gain of an input has its bound, log 2."""
    walks = np.cumsum(np.random.default_rng(1).normal(size=(2, 60, 3)), axis=1) / 6
    paths = np.asarray([1, -2, 0.5] + walks, np.float32)
    tables = dict(zip("ab", map(jnp.asarray, paths), strict=True))
    found = find({x: at_place(lambda step, x=x: tables[x][step - 1]) for x in tables}, **SHORT)
    chosen = int(found.best == "b")
    for row, (end, running) in enumerate([(18, [0, 1]), (36, [chosen])]):
        # The first step at or after each of 16 times.
        steps = np.unique(np.ceil(end / 2 * (1 + np.arange(1, 17) / 16)).astype(int))
        early = steps <= 3 / 4 * end
        density, *halves = (
            np.array([slow_density(paths[x][steps[of] - 1]) for x in running])
            for of in (early | ~early, early, ~early)
        )
        gain = density - np.average(halves, axis=0, weights=[early.sum(), (~early).sum()])
        assert 0 < np.mean(gain > np.log(2)) < 1
        # The 30 steps with draws come after a window of half of the steps.
        projected = density + np.minimum(gain, np.log(2)) / 2 * np.log2(30 / (end / 2))
        best = np.argmax(projected.mean(axis=1))
        for got, expected in (
            (found.lppd, density.mean(axis=1)),
            (found.projected, projected.mean(axis=1)),
            (found.standard_error, [standard_error(x - projected[best]) for x in projected]),
        ):
            np.testing.assert_allclose(got[row, running], expected, rtol=1e-4)


# The most probable place under the validation data. Per unit of distance along the first axis, a
# candidate is worse by 10 standard errors of the difference.
GOOD = np.linalg.lstsq(*VALID)[0].astype(np.float32)
EQUAL, WORSE, MUCH_WORSE = 0.05, 0.15, 0.3


def away(distance: float) -> np.ndarray:
    return GOOD + np.array([distance, 0, 0], np.float32)


def still(make: Any = optax_smile.sgld, **settings) -> Any:
    """A sampler of the package whose steps are too short to move a chain."""
    return make(1e-20, num_data=NUM_DATA, key=0, **settings)


COSTLY = still(optax_smile.smile, decoherence_length=0.1, integrator="minimal_norm")
CHEAP = at_place(lambda step: GOOD)
# Position of the samplers that do not move, the candidates, and the chosen one.
PREFERENCES: dict[str, tuple[float, dict[str, Any], str]] = {
    "fewer gradients": (0, {"a": COSTLY, "b": at_place(lambda step: away(EQUAL))}, "b"),
    "fewer gradients, but worse": (0, {"a": at_place(lambda step: away(WORSE)), "b": COSTLY}, "b"),
    "temperature 1": (0, {"a": still(temperature=0.1), "b": still()}, "b"),
    "a prior that is not at the start": (0, {"a": still(prior_mean="start"), "b": still()}, "b"),
    "the posterior": (EQUAL, {"a": CHEAP, "b": still()}, "b"),
    "the posterior, but worse": (WORSE, {"a": still(), "b": CHEAP}, "b"),
    "the better": (0, {"a": at_place(lambda step: away(EQUAL)), "b": CHEAP}, "b"),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`select`.* predict no better than the start")
@pytest.mark.parametrize("name", PREFERENCES)
def test_within_one_standard_error_cost_counts_then_the_posterior_then_the_score(name):
    distance, candidates, best = PREFERENCES[name]
    params = np.tile(away(distance), (2, 1))
    assert find(candidates, params=params, check=False, **SHORT).best == best


def test_of_a_single_input_only_the_score_counts():
    """Its standard error is unknown."""
    validation = VALID[0][:1], VALID[1][:1]
    better = validation[0][0] * (validation[1][0] - validation[0][0] @ GOOD) / 100
    candidates = {"a": still(), "b": at_place(lambda step: GOOD + better)}
    found = find(candidates, params=np.tile(GOOD, (2, 1)), validation=validation, **SHORT)
    assert found.best == "b" and np.isnan(found.standard_error[0]).any()


# Distances in the two halves of the second round, which takes steps 19 to 36.
@pytest.mark.slow
@pytest.mark.parametrize(
    "early, late, best",
    [(0.0, 0.0, "a"), (0.2, 0.2, "a"), (MUCH_WORSE, MUCH_WORSE, "b"), (0.5, -0.5, "a")],
)
def test_a_candidate_runs_again_that_is_two_standard_errors_better(tmp_path, early, late, best):
    """The projected gain counts only for the candidate that continues: see the last case."""

    def place(step):
        return jnp.where(step <= 18, GOOD, jnp.where(step <= 27, away(early), away(late)))

    candidates = {"a": at_place(place), "b": at_place(lambda step: away(0.02))}
    steps = {"num_warmup": 36, "num_draws": 8, "thin": 3}
    found = find(candidates, **steps)
    halves = [slow_density([away(early)]), slow_density([away(late)])]
    lead = slow_density([away(0.02)]) - (logsumexp(halves, axis=0) - np.log(2))
    is_clear = lead.mean() > 2 * standard_error(lead)
    assert is_clear == (max(early, late) > 0.2)
    assert found.best == best and np.isfinite(found.lppd[1]).tolist() == [True, best == "b"]
    assert found.cost == (36 if best == "b" else 18) / 60
    if best == "b":
        # Stopped while it runs again, and the one that led has no draw.
        with pytest.raises(KeyboardInterrupt, match="and 0 draws per chain"):
            find(candidates, directory=tmp_path, batches=batches(3 * 18 + 9), **steps)
        equal(find(candidates, directory=tmp_path, **steps), found)


def test_a_dropped_one_runs_again_where_all_finalists_overfit(tmp_path):
    overfits = at_place(lambda step: jnp.where(step <= 6, GOOD, away(5)))
    candidates = dict.fromkeys("abc", overfits) | {"slow": at_place(lambda step: away(0.5))}
    found = find(candidates, **SHORT)
    assert found.best == "slow" and found.num_steps.tolist() == [3, 6, 12, 24, 48]
    assert np.isfinite(found.lppd[:, 3]).tolist() == [True, False, True, True, True]
    np.testing.assert_array_equal(found.draws.params, sample(candidates["slow"], **SHORT).params)
    # In memory it makes its first three steps twice; in a directory it resumes.
    assert found.cost == (3 * 12 + 3) / 60
    stored = find(candidates, directory=tmp_path, **SHORT)
    assert stored.cost == 3 * 12 / 60
    np.testing.assert_array_equal(stored.draws.params, found.draws.params)


@pytest.mark.parametrize("is_broken", [lambda step: step == 11, lambda step: step == 16])
def test_a_draw_that_cannot_predict_is_never_forgotten(is_broken):
    """In either half of the draws of a round."""
    broken = at_place(lambda step: jnp.where(is_broken(step), 200.0, GOOD))
    found = find({"broken": broken, "fine": TWO["noisy"]}, **SHORT)
    assert found.best == "fine" and found.lppd[0, 0] == found.projected[0, 0] == -np.inf


@pytest.mark.filterwarnings("ignore:`select`.* predict no better than the start")
def test_a_score_of_tokens_and_its_standard_error_count_tokens_not_inputs():
    """Against 20,000 resamplings of the inputs, which have 0 to 8 tokens."""
    generator = np.random.default_rng(1)
    number = generator.integers(0, 9, 200)
    inputs = generator.normal(size=(200, 9, 3)).astype(np.float32) + number[:, None, None] / 9
    labels = np.where(np.arange(9) < number[:, None], generator.integers(0, 2, (200, 9)), -1)

    def logits(params, inputs):
        scores = inputs @ params[:, None]
        return jnp.concatenate([scores, -scores], axis=-1)

    places = np.array([[0.1, 0.1, 0], [0.3, 0, 0.2]], np.float32)
    candidates = {
        "ab"[i]: at_place(lambda step, place=place: place) for i, place in enumerate(places)
    }
    given: dict[str, Any] = {"likelihood": "tokens", "apply_fn": logits}
    found = find(candidates, validation=(inputs, labels), **given, **SHORT)
    sign = np.where(labels == 0, 2.0, -2.0)
    density = [np.where(labels < 0, np.nan, -np.logaddexp(0, -sign * (inputs @ x))) for x in places]
    np.testing.assert_allclose(found.lppd[0], np.nanmean(density, axis=(1, 2)), rtol=1e-5)
    rows = generator.integers(0, 200, (20_000, 200))
    gain = np.nansum(density[1] - density[0], axis=1)
    ratios = gain[rows].sum(axis=1) / number[rows].sum(axis=1)
    assert found.standard_error[0].max() == pytest.approx(ratios.std(), rel=0.05)


def test_what_does_not_fit_is_refused_before_the_first_step():
    def refuse(rule: str, candidates: Any, **changes):
        refused(rf"^`select\({rule}", find, candidates, **SHORT | changes)

    for name in ("", "..", "a/b", "a\0", 3, "rounds.json"):
        rule = r"candidates=...\)` must be a dict .* by name, a valid folder name, got"
        refuse(rf"{rule} \[{re.escape(repr(name))}\]", {name: sgld(1e-3)})
    refuse(r"candidates=...\)` must be a dict of at least one sampler or optimizer by name", {})
    fine = {"a": sgld(1e-3)}
    refuse(r"candidates\['a'\]=...\)` must be", {"a": None})
    refuse(r"apply_fn=...\)` must be", fine, likelihood="categorical")
    refuse(r"params=...\)` must be", fine, params=START.at[1, 0].set(jnp.nan))
    # After the first round.
    rule = r"candidates=...\)` must be candidates of which one keeps .*finite, got \['a', 'b'\]"
    refuse(rule, {"a": sgld(1e3), "b": sgld(1e4)})


class Never(Exploring):
    def stats(self):
        return super().stats()._replace(is_draw=self.num_gradients > 190)


@pytest.mark.filterwarnings("ignore:`select`")
@pytest.mark.parametrize(
    "kind, is_good", [(Exploring, lambda step: step % 6 >= 3), (Never, lambda step: step == 90)]
)
def test_points_of_exploration_do_not_score(kind, is_good):
    """Unless there is no draw in a round: then its last point, after 90 steps."""
    place = at_place(lambda step: jnp.where(is_good(step), GOOD, GOOD + 9), kind=kind)
    found = find(dict.fromkeys("ab", place))
    assert found.lppd[0].tolist() == pytest.approx([slow_density([GOOD]).mean()] * 2, rel=1e-5)
