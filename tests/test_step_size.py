"""The search for a step size, where the posterior is known."""

import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import crash
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


def find(loss_fn=mean_loss, params=START, batches: Any = None, **changes) -> StepSizeSearch:
    defaults: dict[str, Any] = {"make_sampler": make_sgld, "apply_fn": apply_fn, **BUDGET}
    defaults |= {"validation": VALID, "likelihood": "gaussian", "key": jax.random.key(0)}
    defaults |= {"step_sizes": (1e-8, 5e-4, 1e3), "progress": False}
    return find_step_size(loss_fn, params, batches or [TRAIN], **defaults | changes)


@pytest.fixture(scope="module")
def search():
    return find()


def test_the_best_predicts_like_the_posterior_and_absurd_ones_do_not(search):
    precision = TRAIN[0].T @ TRAIN[0] / NOISE**2 + np.eye(3)
    mean = np.linalg.solve(precision, TRAIN[0].T @ TRAIN[1] / NOISE**2)
    variance = NOISE**2 + np.sum(VALID[0] * np.linalg.solve(precision, VALID[0].T).T, axis=1)
    exact = norm.logpdf(VALID[1], VALID[0] @ mean, np.sqrt(variance)).mean()
    assert search.best == 5e-4 and str(search).split("LPPD")[0].strip() == "step size"
    # Chains that hardly move, that reach the posterior, and that try to go where no loss is.
    assert search.lppd[0] == pytest.approx(search.start_lppd, abs=0.01)
    assert search.lppd[1] == pytest.approx(exact, abs=0.02)
    # The last ones are still at the start, but must not score like it.
    assert search.lppd[2] == -np.inf and np.all(search.chain_lppd[2] == -np.inf)
    assert search.rejected[:2].tolist() == [0, 0] and search.rejected[2] > 0.4
    # Each is a run of `sample` and `predict`.
    steps = BUDGET | {"key": jax.random.key(0), "progress": False}
    draws = optax_smile.sample(mean_loss, START, [TRAIN], make_sgld(5e-4), **steps)
    given: dict[str, Any] = {"likelihood": "gaussian", "targets": VALID[1], "per": "chain"}
    prediction = optax_smile.predict(apply_fn, draws, VALID[0], **given)
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

    with pytest.warns(UserWarning, match="ended early"):
        with pytest.raises(KeyboardInterrupt, match="stopped at step size 1e-08"):
            find(batches=Interrupted(), num_warmup=0)


class Fake:
    """`sample` and `predict` that give what they are told, and note what they got."""

    def __init__(self, monkeypatch, densities=(), nonfinite=0):
        self.densities = iter([*densities, *np.zeros((9, 2, 50))])
        counts = {"num_gradients": 200, "num_rejected": 14, "num_nonfinite": nonfinite}
        self.trace = {name: np.full((2, 90), count) for name, count in counts.items()}
        self.sampled, self.predicted = [], []
        for name in ("sample", "predict"):
            monkeypatch.setattr(searching, name, getattr(self, name))

    def sample(self, *given, **options):
        self.sampled.append((*given, options))
        return optax_smile.Snapshots(np.zeros((2, 1, 3)), self.trace)

    def predict(self, *given, **options):
        self.predicted.append((*given, options))
        density = next(self.densities)
        if np.isnan(density).any():
            raise ValueError("not finite")
        each = Outcome(None, None, None, density)
        return optax_smile.Prediction(None, np.logaddexp(*density) - np.log(2), each=each)


def test_all_get_the_same_start_key_and_budget(monkeypatch):
    fake, batches, sizes = Fake(monkeypatch), [TRAIN], []
    search = find(batches=batches, make_sampler=lambda x: sizes.append(x) or make_sgld(x))
    assert sizes == [1e-8, 5e-4, 1e3] and len(fake.sampled) == 3 and len(fake.predicted) == 4
    for number, (loss_fn, params, got, _, options) in enumerate(fake.sampled):
        assert loss_fn is mean_loss and params is START and got is batches
        assert options.pop("key") == jax.random.key(0)
        assert options == {"progress": False, "check": number == 0, **BUDGET}
    for apply, _, inputs, options in fake.predicted:
        assert apply is apply_fn and inputs is VALID[0] and options.pop("targets") is VALID[1]
        assert options == {"likelihood": "gaussian", "per": "chain"}
    np.testing.assert_allclose(search.rejected, 14 / 200)


def test_scores_of_known_densities(monkeypatch):
    densities = GENERATOR.normal(-1, 0.3, (4, 2, 50)) + [[[-2]], [[-0.5]], [[0]], [[-1]]]
    densities[3, 1, 7] = np.nan
    Fake(monkeypatch, densities)
    search, together = find(), np.log(np.exp(densities).mean(axis=1))
    assert search.start_lppd == pytest.approx(together[0].mean())
    np.testing.assert_allclose(search.start_chain_lppd, densities[0].mean(axis=1))
    np.testing.assert_allclose(search.lppd, [*together[1:3].mean(axis=1), -np.inf])
    chains = [*densities[1:3].mean(axis=2), [-np.inf, -np.inf]]
    np.testing.assert_allclose(search.chain_lppd, chains)
    error = float(np.std(together[1] - together[2], ddof=1) / np.sqrt(50))
    np.testing.assert_allclose(search.standard_error, [error, 0, np.nan])


def test_scores_of_tokens_and_of_a_single_input(monkeypatch):
    def search_of(densities):
        Fake(monkeypatch, densities)
        return find(step_sizes=(0.1, 1))

    densities = GENERATOR.normal(-1, 0.3, (3, 2, 20, 6)) + [[[[-2]]], [[[-0.5]]], [[[0]]]]
    together = np.log(np.exp(densities).mean(axis=1))
    search = search_of(densities)
    np.testing.assert_allclose(search.lppd, together[1:].mean(axis=(1, 2)))
    error = float(np.std((together[1] - together[2]).mean(axis=1), ddof=1) / np.sqrt(20))
    np.testing.assert_allclose(search.standard_error, [error, 0])
    search = search_of(densities[:, :, :1])
    assert np.isnan(search.standard_error).all() and str(search)
    # A target may be impossible.
    densities[1, :, 4] = -np.inf
    assert search_of(densities).lppd[0] == -np.inf
    # More than one percent of the gradients may not be broken.
    Fake(monkeypatch, nonfinite=2)
    assert np.all(np.isfinite(find().lppd))
    Fake(monkeypatch, nonfinite=3)
    rule = r"^`find_step_size\(step_sizes=...\)` must be .*finite, got \(1e-08, .*\)\. Try smaller"
    with pytest.raises(ValueError, match=rule):
        find()


def make_search(lppd: Any, start=-9.0) -> StepSizeSearch:
    lppd = np.array(lppd, float)
    finite = np.isfinite(lppd)
    return StepSizeSearch(
        step_sizes=10.0 ** np.arange(-len(lppd), 0),
        lppd=lppd,
        standard_error=np.where(finite, 0.1 * (lppd < lppd.max()), np.nan),
        chain_lppd=lppd[:, None] - [0.1, 0.3],
        rejected=np.where(finite, 0, 0.5),
        start_lppd=start,
        start_chain_lppd=np.array([start, start - 1]),
    )


def test_table_and_notes():
    head, *lines = str(make_search([-2, -1.5, -1.4, -np.inf])).splitlines()
    assert head.split() == "step size LPPD of one chain below best error rejected".split()
    rows = [" ".join(line.split()) for line in lines]
    assert rows[:2] == ["start -9 -9.5 - - -", "0.0001 -2 -2.2 0.6 0.1 0"]
    assert rows[3:6] == ["0.01 -1.4 -1.6 0 0 0", "0.1 -inf -inf inf - 0.5", ""]
    best = ["Best: 0.01", "Not clearly worse (2 standard errors): 0.001"]
    assert rows[6:] == [*best, "-inf: chains or predictions left the finite numbers."]
    for lppd, start, notes in (
        ([-2, -1, -2], -9, []),
        ([-1, -2, -3], -9, ["The best is the smallest step size that was tried: try smaller"]),
        ([-3, -2, -1], -9, ["The best is the largest step size that was tried: try larger"]),
        ([-2, -1, -2], -1, ["No step size predicts better than the start"]),
    ):
        best, *rest = str(make_search(lppd, start)).split("\n\n")[1].splitlines()
        assert best.startswith("Best: ") and len(rest) == len(notes)
        assert all(line.startswith(note) for line, note in zip(rest, notes, strict=True))


def test_what_does_not_fit_ends_the_search_at_once(monkeypatch):
    """And is no step size that failed."""
    with pytest.raises(ValueError, match=r"`sgld\(num_data=...\)` must be"):
        find(make_sampler=lambda size: optax_smile.sgld(size, num_data=-1, key=0), apply_fn=crash)
    monkeypatch.setattr(searching, "sample", crash)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"step_sizes": (1.0, 0.1)}, r"step_sizes=...\)` must be at least 2 ascending numbers > 0"),
        ({"batches": iter([TRAIN])}, r"batches=...\)` must be .*can be repeated, such as a list"),
        ({"validation": (VALID[0], None)}, r"validation=...\)` must be a pair of inputs and ta"),
        ({"make_sampler": lambda size: None}, r"make_sampler=...\)` .* got one that gives None"),
        ({"likelihood": "categorical"}, r"likelihood=...\)` must be"),
    ]
    for changes, rule in refused:
        with pytest.raises(ValueError, match=rf"^`find_step_size\({rule}"):
            find(**changes)
    with pytest.raises(ValueError, match="predictions are finite, got nan or inf from chain 1"):
        find(params=START.at[1, 0].set(jnp.nan))
