"""The page on findings shows each of them, and runs of real samplers have the stated findings."""

from typing import Any

import findings
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from findings import NOISE, NUM_DATA, SICK, UNTOLD, X, Y

import optax_smile
from optax_smile import diagnostics


def test_the_page_shows_every_finding_and_what_summary_says_of_it():
    page = findings.PAGE.read_text()
    assert findings.page() == page, "run `python docs/findings.py`"
    shown = {name: text for name, _, text in findings.BLOCK.findall(page)}
    assert {*shown} == {"healthy", *findings.PICTURED}
    assert {*findings.PICTURED} == {name.partition(",")[0] for name in SICK} | {*UNTOLD}
    assert all("Nothing looks wrong" in shown[name] for name in ("healthy", *UNTOLD))
    found = (diagnostics.summary(*findings.made(**x)).findings for x in findings.RIGHT.values())
    assert [{x.kind for x in each} for each in found] == [set(), {"different modes"}, set()]
    files = list(findings.PICTURES.glob("*.png"))
    assert {*files} == {findings.path_of(name) for name in findings.PICTURED}
    assert sum(file.stat().st_size for file in files) < 1_500_000


def shrunk(sampler: Any) -> Any:
    """Shrink the weights after every 200 steps: `sample` tolerates so few altered updates."""

    def update(updates, state, params=None, **extra):
        updates, state = sampler.update(updates, state, params, **extra)
        share = 0.3 * (optax_smile.stats(state).num_gradients % 200 == 0)
        return jax.tree.map(lambda move, x: move - share * x, updates, params), state

    return optax.GradientTransformationExtraArgs(sampler.init, update)


GIVEN: dict[str, Any] = {"num_data": NUM_DATA, "key": jax.random.key(7)}
PLAIN: dict[str, Any] = {"num_data": NUM_DATA, "decoherence_length": None}
PSMILE, TUNER = optax_smile.psmile(**GIVEN), optax_smile.quantile_tuner(adapt_rate=0.02)
OUTLIER, MISSING = Y + 3 * (np.arange(NUM_DATA) == 23), Y + np.where(X == X[-1], np.nan, 0)
SINGLE = {"y": OUTLIER, "batch_size": 1, "num_warmup": 500}
# Runs of a user: a sampler, and options of the run.
RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "healthy": (PSMILE, {"thin": 300}),
    "altered": (shrunk(PSMILE), {}),
    "not finite": (PSMILE, {"y": MISSING, "thin": 300}),
    "diverged": (optax_smile.smile(100.0, **PLAIN), {}),
    "frozen": (optax_smile.smile(optax.cosine_decay_schedule(0.05, 7_000), **PLAIN), {}),
    "rejected steps": (optax_smile.psmile(0.02, reject_quantile=0.993, **GIVEN), SINGLE),
    "still on its way": (optax_smile.psmile(0.005, **GIVEN), {"away": 3, "thin": 4}),
    "not settled": (optax_smile.sgld(1e-5, **GIVEN), {"away": 1, "thin": 20}),
    "slow": (PSMILE, {"thin": 3}),
    "step size": (optax_smile.smile(0.05, reject_quantile=0.98, tuner=TUNER, **PLAIN), {}),
    "worse than the start": (optax_smile.psmile(temperature=60.0, **GIVEN), {"batch_size": 40}),
}
# Seconds for each. Those of two findings run before each merge.
MARKS = {name: pytest.mark.nightly for name in RUNS}
MARKS |= {name: pytest.mark.slow for name in ("diverged", "frozen")}


@pytest.mark.filterwarnings("ignore:.*(the loss of the draws will be|were not finite)")
@pytest.mark.parametrize("name", [pytest.param(x, marks=MARKS[x]) for x in RUNS])
def test_a_real_run_has_the_finding_alone(name):
    sampler, given = RUNS[name]
    away, y, size = given.get("away", 0), given.get("y", Y), given.get("batch_size", 10)
    thin, rng = given.get("thin", 100), np.random.default_rng(0)
    # A prime number of orders: ticks do not see the same batches again and again.
    orders = [rng.permutation(NUM_DATA) for _ in range(47)]
    features = findings.bumps(X).astype(np.float32)
    draws = optax_smile.sample(
        lambda w, batch: jnp.mean((batch[0] @ w - batch[1]) ** 2) / (2 * NOISE**2),
        jnp.asarray(findings.posterior()[0] + away + 0.3 * rng.normal(size=(4, 7)), jnp.float32),
        [(features[r], y[r]) for order in orders for r in np.split(order, NUM_DATA // size)],
        sampler,
        num_warmup=0 if away else given.get("num_warmup", 2_000),
        num_draws=100,
        thin=thin,
        steps_per_dispatch=thin,
        key=0,
        progress=False,
    )
    prediction = optax_smile.predict(
        lambda w, x: (x @ w, jnp.log(NOISE)),
        draws,
        features,
        per="draw",
        likelihood="gaussian",
        targets=Y,
    )
    found = diagnostics.summary(draws, prediction).findings
    assert {x.kind for x in found} == {name} - {"healthy"}
