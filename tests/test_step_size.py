"""The search for a step size, where the posterior is known."""

import functools
import signal
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")

import numpy as np
import pytest
from scipy.stats import norm

import optax_smile
from optax_smile import StepSizeSearch, find_step_size
from optax_smile.chains import find_step_size as searching
from optax_smile.draws.prediction import Outcome

NUM_DATA, NUM_VALID, NOISE = 100, 50, 0.5
GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(NUM_DATA + NUM_VALID, 3)).astype(np.float32)
Y = (X @ [1, -2, 0.5] + NOISE * GENERATOR.normal(size=len(X))).astype(np.float32)
TRAIN, VALID = (X[:NUM_DATA], Y[:NUM_DATA]), (X[NUM_DATA:], Y[NUM_DATA:])
START = jnp.asarray(GENERATOR.normal(size=(3, 3)), jnp.float32)
BUDGET: dict[str, Any] = {"num_warmup": 90, "num_draws": 60, "thin": 3, "steps_per_dispatch": 1}


def apply_fn(params, inputs):
    return inputs @ params, jnp.log(NOISE)


def mean_loss(params, batch):
    """NaN far from the posterior, as the losses of networks are."""
    inputs, targets = batch
    loss = jnp.mean((inputs @ params - targets) ** 2) / (2 * NOISE**2)
    return jnp.where(jnp.sum(params**2) < 100**2, loss, jnp.nan)


def make_sgld(size):
    return optax_smile.sgld(size, num_data=NUM_DATA, key=jax.random.key(1))


def arguments(**changes) -> dict[str, Any]:
    return {
        "loss_fn": mean_loss,
        "params": START,
        "batches": [TRAIN],
        "make_sampler": make_sgld,
        "apply_fn": apply_fn,
        "validation": VALID,
        "likelihood": "gaussian",
        "key": jax.random.key(0),
        "step_sizes": (1e-8, 5e-4, 1e3),
        "progress": False,
        **BUDGET,
        **changes,
    }


@functools.cache
def searched() -> StepSizeSearch:
    return find_step_size(**arguments())


def exact_lppd():
    precision = TRAIN[0].T @ TRAIN[0] / NOISE**2 + np.eye(3)
    mean = np.linalg.solve(precision, TRAIN[0].T @ TRAIN[1] / NOISE**2)
    variance = NOISE**2 + np.sum(VALID[0] * np.linalg.solve(precision, VALID[0].T).T, axis=1)
    return norm.logpdf(VALID[1], VALID[0] @ mean, np.sqrt(variance)).mean()


def test_the_best_predicts_like_the_posterior_and_absurd_ones_do_not():
    search = searched()
    assert search.best == 5e-4 and str(search).split("LPPD")[0].strip() == "step size"
    # Chains that hardly move, that reach the posterior, and that try to go where no loss is.
    assert search.lppd[0] == pytest.approx(search.start_lppd, abs=0.01)
    assert search.lppd[1] == pytest.approx(exact_lppd(), abs=0.02)
    # The last ones are still at the start, but must not score like it.
    assert search.lppd[2] == -np.inf and np.all(search.chain_lppd[2] == -np.inf)
    assert search.rejected[:2].tolist() == [0, 0] and search.rejected[2] > 0.4


def test_each_is_a_run_of_sample_and_predict_by_hand():
    search = searched()
    draws = optax_smile.sample(
        mean_loss, START, [TRAIN], make_sgld(5e-4), key=jax.random.key(0), progress=False, **BUDGET
    )
    prediction = optax_smile.predict(
        apply_fn, draws, VALID[0], likelihood="gaussian", targets=VALID[1], per="chain"
    )
    assert search.lppd[1] == optax_smile.metrics.lppd(prediction.log_density)
    chain_lppd = [optax_smile.metrics.lppd(chain) for chain in prediction.each.log_density]
    assert search.chain_lppd[1].tolist() == chain_lppd


def test_the_first_ctrl_c_ends_the_search():
    class Interrupted:
        def __iter__(self):
            for number in range(30):
                if number == 20:
                    signal.raise_signal(signal.SIGINT)
                yield TRAIN

    with (
        pytest.warns(UserWarning, match="ended early"),
        pytest.raises(KeyboardInterrupt, match="stopped at step size 1e-08"),
    ):
        find_step_size(**arguments(batches=Interrupted(), num_warmup=0))


class Fake:
    """`sample` and `predict` that give what they are told, and note what they got."""

    def __init__(self, monkeypatch, densities=(), nonfinite=0):
        self.densities = iter([*densities, *np.zeros((9, 2, 50))])
        counts = {"num_gradients": 200, "num_rejected": 14, "num_nonfinite": nonfinite}
        self.trace = {name: np.full((2, 90), count) for name, count in counts.items()}
        self.sampled, self.predicted = [], []
        monkeypatch.setattr(searching, "sample", self.sample)
        monkeypatch.setattr(searching, "predict", self.predict)

    def sample(self, *arguments, **options):
        self.sampled.append((*arguments, options))
        return optax_smile.Snapshots(np.zeros((2, 1, 3)), self.trace)

    def predict(self, *arguments, **options):
        self.predicted.append((*arguments, options))
        density = next(self.densities)
        if np.isnan(density).any():
            raise ValueError("not finite")
        each = Outcome(None, None, None, density)
        return optax_smile.Prediction(None, np.logaddexp(*density) - np.log(2), each=each)


def test_all_get_the_same_start_key_and_budget(monkeypatch):
    fake, batches, sizes = Fake(monkeypatch), [TRAIN], []

    def make_sampler(size):
        sizes.append(size)
        return make_sgld(size)

    search = find_step_size(**arguments(batches=batches, make_sampler=make_sampler))
    assert sizes == [1e-8, 5e-4, 1e3] and len(fake.sampled) == 3 and len(fake.predicted) == 4
    checks = [options.pop("check") for *_, options in fake.sampled]
    assert checks == [True, False, False]
    for loss_fn, params, got, _, options in fake.sampled:
        assert loss_fn is mean_loss and params is START and got is batches
        assert options.pop("key") == jax.random.key(0)
        assert options == {"progress": False, **BUDGET}
    for apply, _, inputs, options in fake.predicted:
        assert apply is apply_fn and inputs is VALID[0]
        assert options.pop("targets") is VALID[1]
        assert options == {"likelihood": "gaussian", "per": "chain"}
    np.testing.assert_allclose(search.rejected, 14 / 200)


def test_scores_of_known_densities(monkeypatch):
    densities = GENERATOR.normal(-1, 0.3, (4, 2, 50)) + [[[-2]], [[-0.5]], [[0]], [[-1]]]
    densities[3, 1, 7] = np.nan
    Fake(monkeypatch, densities)
    search = find_step_size(**arguments())
    together = np.log(np.exp(densities).mean(axis=1))
    assert search.start_lppd == pytest.approx(together[0].mean())
    np.testing.assert_allclose(search.start_chain_lppd, densities[0].mean(axis=1))
    np.testing.assert_allclose(search.lppd, [*together[1:3].mean(axis=1), -np.inf])
    np.testing.assert_allclose(search.chain_lppd[:2], densities[1:3].mean(axis=2))
    assert np.all(search.chain_lppd[2] == -np.inf)
    error = float(np.std(together[1] - together[2], ddof=1) / np.sqrt(50))
    np.testing.assert_allclose(search.standard_error, [error, 0, np.nan])


def test_scores_of_tokens_and_of_a_single_input(monkeypatch):
    densities = GENERATOR.normal(-1, 0.3, (3, 2, 20, 6)) + [[[[-2]]], [[[-0.5]]], [[[0]]]]
    together = np.log(np.exp(densities).mean(axis=1))
    difference = (together[1] - together[2]).mean(axis=1)
    Fake(monkeypatch, densities)
    search = find_step_size(**arguments(step_sizes=(0.1, 1)))
    np.testing.assert_allclose(search.lppd, together[1:].mean(axis=(1, 2)))
    error = float(np.std(difference, ddof=1) / np.sqrt(20))
    np.testing.assert_allclose(search.standard_error, [error, 0])
    Fake(monkeypatch, densities[:, :, :1])
    search = find_step_size(**arguments(step_sizes=(0.1, 1)))
    assert np.isnan(search.standard_error).all() and str(search)
    # A target may be impossible.
    densities[1, :, 4] = -np.inf
    Fake(monkeypatch, densities)
    assert find_step_size(**arguments(step_sizes=(0.1, 1))).lppd[0] == -np.inf


def test_more_than_one_percent_of_the_gradients_may_not_be_broken(monkeypatch):
    Fake(monkeypatch, nonfinite=2)
    assert np.all(np.isfinite(find_step_size(**arguments()).lppd))
    Fake(monkeypatch, nonfinite=3)
    rule = r"^`find_step_size\(step_sizes=...\)` must be .*finite, got \(1e-08, .*\)\. Try smaller"
    with pytest.raises(ValueError, match=rule):
        find_step_size(**arguments())


def make_search(lppd: Any, start=-9.0) -> StepSizeSearch:
    lppd = np.array(lppd, float)
    finite = np.isfinite(lppd)
    return StepSizeSearch(
        step_sizes=10.0 ** np.arange(-len(lppd), 0),
        lppd=lppd,
        standard_error=np.where(finite, 0.1 * (lppd < lppd.max()), np.nan),
        chain_lppd=np.stack([lppd - 0.1, lppd - 0.3], axis=1),
        rejected=np.where(finite, 0, 0.5),
        start_lppd=start,
        start_chain_lppd=np.array([start, start - 1]),
    )


def test_table():
    head, *lines = str(make_search([-2, -1.5, -1.4, -np.inf])).splitlines()
    assert head.split() == "step size LPPD of one chain below best error rejected".split()
    rows = [line.split() for line in lines[:5]]
    assert rows[0] == ["start", "-9", "-9.5", "-", "-", "-"]
    assert rows[1] == ["0.0001", "-2", "-2.2", "0.6", "0.1", "0"]
    assert rows[3] == ["0.01", "-1.4", "-1.6", "0", "0", "0"]
    assert rows[4] == ["0.1", "-inf", "-inf", "inf", "-", "0.5"]
    assert lines[5:] == [
        "",
        "Best: 0.01",
        "Not clearly worse (2 standard errors): 0.001",
        "-inf: chains or predictions left the finite numbers.",
    ]


def test_notes():
    for lppd, start, notes in (
        ([-2, -1, -2], -9, []),
        ([-1, -2, -3], -9, ["The best is the smallest step size that was tried: try smaller"]),
        ([-3, -2, -1], -9, ["The best is the largest step size that was tried: try larger"]),
        ([-2, -1, -2], -1, ["No step size predicts better than the start"]),
    ):
        best, *rest = str(make_search(lppd, start)).split("\n\n")[1].splitlines()
        assert best.startswith("Best: ") and len(rest) == len(notes)
        assert all(line.startswith(note) for line, note in zip(rest, notes, strict=True))


def no_work(*_, **__):
    raise AssertionError("something ran before the arguments were checked")


def test_bad_arguments_are_named_before_any_work():
    for argument, value, rule, got in (
        ("step_sizes", (1.0, 0.1), "at least 2 ascending numbers > 0", r"\(1.0, 0.1\)"),
        ("step_sizes", [0, 1], "> 0 and finite", "0"),
        ("batches", iter([TRAIN]), "can be read again, such as a list", "a list_iterator"),
        ("validation", (VALID[0], None), "a pair of inputs and targets", "a tuple"),
        ("make_sampler", lambda size: None, "a function", "one that gives None"),
    ):
        match = rf"^`find_step_size\({argument}=...\)` must be .*{rule}.*, got {got}"
        with pytest.raises(ValueError, match=match):
            find_step_size(**arguments(loss_fn=no_work, apply_fn=no_work, **{argument: value}))


def test_a_sampler_that_cannot_be_built_ends_the_search_at_once():
    def make_sampler(size):
        return optax_smile.sgld(size, num_data=-1, key=0)

    with pytest.raises(ValueError, match=r"`sgld\(num_data=...\)` must be"):
        find_step_size(**arguments(make_sampler=make_sampler, apply_fn=no_work))


def test_a_model_that_does_not_fit_is_an_error_and_no_failed_step_size(monkeypatch):
    monkeypatch.setattr(searching, "sample", no_work)
    with pytest.raises(ValueError, match=r"`find_step_size\(likelihood=...\)` must be"):
        find_step_size(**arguments(likelihood="categorical"))
    broken = START.at[1, 0].set(jnp.nan)
    with pytest.raises(ValueError, match="predictions are finite, got nan or inf from chain 1"):
        find_step_size(**arguments(params=broken))
