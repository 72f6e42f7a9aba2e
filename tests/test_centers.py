"""`control_variate=` of a run: centres that move with the chains."""

import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpyro.diagnostics import effective_sample_size
from runs import Shuffled, assert_same_bits, posterior, refused

import optax_smile

CHAINS, SIZE, NUM_DATA, BATCH = 6, 4, 3_000, 50
RNG = np.random.default_rng(3)
X: Any = np.float32(RNG.normal(size=(NUM_DATA, SIZE)) @ (np.eye(SIZE) + 0.3))
Y: Any = np.float32(X @ np.ones(SIZE) + RNG.normal(size=NUM_DATA))
SAMPLER = optax_smile.sgld(2e-5, num_data=NUM_DATA, key=0)
ADAPTIVE = optax_smile.psmile(num_data=NUM_DATA, key=0)


def shuffled(size=BATCH, **given):
    return Shuffled((X, Y), size, **given)


WHOLE, SHUFFLED = [(X, Y)], [*shuffled()]


def linear(w, batch):
    return jnp.mean((batch[0] @ w - batch[1]) ** 2) / 2


def disturbed(w, batch, *, key, scale=0.02):
    """Random targets, which a centre cannot know."""
    return linear(w, (batch[0], batch[1] + scale * jax.random.normal(key, batch[1].shape)))


def start() -> Any:
    return 1 + np.random.default_rng(0).normal(size=(CHAINS, SIZE)).astype(np.float32) / 50


def draw(loss: Any = linear, sampler=SAMPLER, control: Any = WHOLE, batches: Any = None, **others):
    given: dict[str, Any] = dict(num_warmup=300, num_draws=40, thin=5, key=1, progress=False)
    given |= {"steps_per_dispatch": 20, "control_variate": control} | others
    batches = batches or shuffled()
    return optax_smile.sample(loss, given.pop("params", start()), batches, sampler, **given)


def with_average(w, batch, *, aux):
    return linear(w, batch), 0.9 * aux + 0.1 * batch[1].mean()


OWN = [tuple(np.stack([x[i::60]] * CHAINS) for x in (X, Y)) for i in range(60)]
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stored": {"batches": SHUFFLED, "control": SHUFFLED},
    "keys": {"loss": disturbed, "stochastic": True},
    "aux": {"loss": with_average, "aux": jnp.zeros(CHAINS)},
    "own batches": {"per_chain": True, "batches": OWN, "control": OWN},
}
SLOW = [pytest.param(form, marks=pytest.mark.slow) for form in FORMS if form != "plain"]


@pytest.mark.parametrize("form", ["plain", *SLOW])
def test_posterior_and_effective_draws(form):
    """Compare with the exact posterior, also with `aux` and random losses."""
    mean, covariance = posterior(X, Y)
    root = np.linalg.cholesky(covariance)
    draws = draw(sampler=ADAPTIVE, num_warmup=2_000, num_draws=500, thin=4, **FORMS[form])
    w = draws.params
    if form == "aux":
        assert abs(w["aux"][:, -1] - Y.mean()).max() < 0.5
        w = w["params"]
    z = np.linalg.solve(root, (np.asarray(w, float) - mean)[..., None])[..., 0]
    np.testing.assert_allclose(z.var((0, 1)), 1, atol=0.12)
    np.testing.assert_allclose(z.mean((0, 1)), 0, atol=0.1)
    assert np.median(effective_sample_size(z)) > 600
    trace = {x: np.asarray(draws.trace[x][:, -1], float) for x in draws.trace}
    assert (trace["noise_left"] < 0.1).all() and (trace["num_reduced"] > 3_800).all()
    # A pass has 60 batches. The centres move after 120 steps, and then every 240.
    assert (trace["num_passes"] == 17).all()


def test_gradients_are_those_of_all_data():
    """With the same curvature in all examples, a control variate leaves no noise."""
    data = X + 3.0

    def loss(w, x):
        return jnp.mean(jnp.sum((x - w[None]) ** 2, -1)) / 2

    def run(**others):
        sampler = optax_smile.sgld(1e-5, num_data=NUM_DATA, key=0)
        others |= {"params": data.mean(0) + start() / 10}
        return draw(loss, sampler, num_warmup=60, thin=1, **others)

    reduced = run(batches=Shuffled(data, BATCH), control=[data[:999], data[999:]])
    assert np.all(reduced.trace["noise_left"][:, -40:] < 1e-9)
    gap = reduced.params.astype(float) - data.astype(float).mean(0)
    # As without gradient noise: (1 - step) gap + sqrt(2 step / N) z, with z of the same key.
    whole = run(batches=[data], control=None)
    gap_of_all = whole.params.astype(float) - data.astype(float).mean(0)
    step = 1e-5 * NUM_DATA
    noise, noise_of_all = (x[:, 1:] - (1 - step) * x[:, :-1] for x in (gap, gap_of_all))
    np.testing.assert_allclose(noise, noise_of_all, atol=1e-5)


@pytest.mark.slow
def test_stored_gradients_are_those_that_would_be_computed():
    """Two gradients per step and an even number of batches: every second pass is rotated."""
    given: dict[str, Any] = {"num_data": NUM_DATA, "integrator": "minimal_norm"}
    sampler = optax_smile.mclmc(1e-3, decoherence_length=0.1, key=0, **given)
    stored, computed = (draw(linear, sampler, x, SHUFFLED) for x in (SHUFFLED, WHOLE))
    assert stored.trace["num_passes"][:, -1].min() > 2
    np.testing.assert_allclose(stored.params, computed.params, rtol=2e-4)


@pytest.mark.parametrize("sampler", [SAMPLER, pytest.param(ADAPTIVE, marks=pytest.mark.slow)])
def test_a_run_in_pieces_gives_the_bits_of_one_in_one_go(tmp_path, sampler):
    """Stopped before, at and after the centres are renewed."""

    def begin(directory, **others):
        given: dict[str, Any] = {"key": 0, "steps_per_dispatch": 7, "directory": directory}
        return optax_smile.Run(linear, start(), SHUFFLED, sampler, **given, **others)

    def run(directory, *ends):
        for end in (*ends, 210):
            with begin(directory, control_variate=SHUFFLED) as pieces:
                pieces.advance(end)
                if end == 210:
                    collections.deque(pieces.draws(3, thin=70), maxlen=0)
        return pieces.snapshots()

    whole, pieces = run(tmp_path / "whole"), run(tmp_path / "pieces", 7, 70, 140, 203)
    assert_same_bits(pieces, whole)
    assert whole.trace["num_passes"].max() >= 2
    refused("control_variate", begin, tmp_path / "whole")


@pytest.mark.slow
def test_where_it_does_not_pay_the_run_is_the_plain_one():
    """It takes one gradient per call, and warns."""
    loss = functools.partial(disturbed, scale=3.0)
    with pytest.warns(UserWarning, match="`control_variate` does not pay here: after a pass"):
        draws = draw(loss, stochastic=True, num_warmup=1_000)
    assert (draws.trace["num_reduced"] == 0).all() and (draws.trace["num_passes"] == 0).all()
    assert np.median(draws.trace["noise_left"][:, -1]) > 0.5

    # Without keys, which the measurements would split, the runs are bit-identical.
    def rough(w, batch):
        return jnp.mean(jnp.sin(1e4 * (batch[0] @ w)) * batch[1]) * 1e-2

    with pytest.warns(UserWarning, match="The run goes on without"):
        tried = draw(rough, num_warmup=1_000, check=False)
    plain = draw(rough, num_warmup=1_000, control=None, check=False)
    np.testing.assert_array_equal(tried.params, plain.params)


SHIFTED = (X, Y + 1)


def test_a_batch_that_is_not_finite_ends_no_run():
    """Its own steps are rejected, as without a control variate."""
    spoilt = [*SHUFFLED]
    spoilt[7] = (spoilt[7][0], np.full_like(spoilt[7][1], np.nan))
    with pytest.warns(UserWarning) as seen:
        draws = draw(batches=spoilt, control=spoilt, num_warmup=600)
    assert any("loss of all data is not finite at a draw" in str(x.message) for x in seen)
    assert (draws.trace["num_reduced"] == 0).all() and np.isfinite(draws.params).all()
    assert np.ptp(draws.params, axis=1).min() > 0


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "dropped rows": (
        r"=...\)` must be a pass over all data, `num_data` = 3000 rows, got 2950 rows\. Pass each",
        {"control": [(X[50:], Y[50:])]},
    ),
    "endless": ("got more than 3000 rows", {"control": 4 * SHUFFLED}),
    "drawn with replacement": (
        "got other examples than in the pass before",
        {"control": shuffled(order=lambda: RNG.integers(0, NUM_DATA, NUM_DATA))},
    ),
    "other data": ("must be the data of `batches`, got data whose mean", {"control": [SHIFTED]}),
    "another form": ("got a batch that does not fit", {"control": [(X[:, :2], Y)]}),
    "an optimizer": ("a sampler with a number `num_data`", {"sampler": optax.sgd(1e-3)}),
    "single examples": ("batches of 2 to 2999 examples, .*one of 1", {"batches": shuffled(1)}),
    "statistics of the batch": (
        r"`sample\(loss_fn=...\)` must be the mean of numbers of single examples",
        {"loss": lambda w, b: linear(w, (b[0] - b[0].mean(0, keepdims=True), b[1]))},
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", REFUSED)
def test_what_would_give_a_wrong_gradient_of_all_data_is_refused(case):
    message, given = REFUSED[case]
    refused(message, draw, **given)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("sampler", [SAMPLER, optax.adamw(1e-4)])
def test_select_gives_it_to_samplers(sampler):
    """An optimizer beside them keeps its gradients."""
    validation, apply_fn = (X[:50], Y[:50]), lambda w, x: (x @ w, jnp.zeros(()))
    given: dict[str, Any] = {"num_warmup": 200, "num_draws": 40, "thin": 5, "key": 0}
    given |= {"likelihood": "gaussian", "control_variate": WHOLE, "progress": False}
    candidates = {"only": sampler}
    found = optax_smile.select(
        linear, start(), shuffled(), candidates, apply_fn, validation, **given
    )
    trace = found.draws.trace
    is_used = "num_reduced" in trace and trace["num_reduced"].max() > 0
    assert is_used == (sampler is SAMPLER)
