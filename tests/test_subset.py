"""Subsets chosen on held-out data: the greedy choice by hand, on disk as in memory, no sample."""

import itertools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_smile
from optax_smile import ArgumentError, diagnostics, report
from optax_smile.draws.snapshots import choose

CHAINS, DRAWS, TARGETS = 3, 4, 5


def mean_loss(params, batch):
    return jnp.mean((params["w"] - batch) ** 2) + jnp.sum(
        (params["frozen"][0] - 0 * batch.mean()) ** 2
    )


def sample(directory=None, **arguments) -> Any:
    w = jnp.arange(2.0 * CHAINS).reshape(CHAINS, 2)
    start = {"w": w, "frozen": [jnp.zeros((CHAINS, 50))]}
    sampler = optax_smile.smile(0.3, num_data=4, decoherence_length=None)
    given = {"num_warmup": 2, "num_draws": DRAWS, "thin": 2, "key": 0, "directory": directory}
    given |= {"progress": False, "check": False} | arguments
    return optax_smile.sample(mean_loss, start, [jnp.ones(2)], sampler, **given)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    jax.config.update("jax_disable_most_optimizations", True)
    return sample(), sample(tmp_path_factory.mktemp("subset") / "run", dtype="float16")


def outputs(params, x):
    return x @ params["w"], jnp.log(0.5)


def predicted(draws, seed=1, size=TARGETS):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(size, 2)).astype(np.float32)
    y = x.sum(axis=1) + rng.normal(size=size).astype(np.float32)
    given: dict[str, Any] = {"likelihood": "gaussian", "targets": y, "per": "draw"}
    return optax_smile.predict(outputs, draws, x, **given)


def of_densities(density: Any) -> Any:
    """A prediction with these log densities `[chain, draw, ...]`."""
    each = optax_smile.Outcome(None, None, None, np.asarray(density, np.float32))
    return optax_smile.Prediction(None, None, each=each)


def lppd(density):
    """Of an average, the textbook's way."""
    return np.log(np.exp(np.asarray(density, np.float64)).mean(axis=0)).mean()


def test_each_draw_is_the_best_addition():
    """Against averages of densities in float64, for all candidates one by one."""
    density = np.random.default_rng(0).normal(size=(12, 7))
    chosen, curve = choose(density, 12)
    assert sorted(chosen) == list(range(12))
    for number in range(1, 13):
        before = chosen[: number - 1]
        rest = [s for s in range(12) if s not in before]
        scores = {s: lppd(density[[*before, s]]) for s in rest}
        assert chosen[number - 1] == max(scores, key=lambda s: scores[s])
        assert curve[number - 1] == pytest.approx(scores[chosen[number - 1]], abs=1e-12)
    # It beats most subsets of its size, and is not the draws that are best alone.
    others = [lppd(density[list(each)]) for each in itertools.combinations(range(12), 3)]
    assert np.mean(np.array(others) > curve[2]) < 0.02
    alone = sorted(range(12), key=lambda s: -density[s].mean())
    assert set(chosen[:3]) != set(alone[:3])


def test_tiny_and_impossible_densities():
    """Densities far below the smallest float64, and targets that no single draw allows."""
    density = np.array([[-1e6, -2000.0], [-3000.0, -1e6], [-5e5, -5e5]])
    chosen, curve = choose(density, 2)
    assert chosen == [2, 0] and curve[1] == pytest.approx((-5e5 - 2000) / 2 - np.log(2))
    impossible = np.array([[0.0, -np.inf, -np.inf], [-np.inf, 0, 0], [0, -np.inf, -np.inf]])
    chosen, curve = choose(impossible, 2)
    assert chosen == [1, 0] and curve.tolist() == [-np.inf, -np.log(2)]


def test_chain_draw_and_step_of_each(runs):
    """In memory and on disk, where one is rounded, each draw is where `subset` says."""
    for draws in runs:
        prediction = predicted(draws)
        small: Any = draws.thin_to(5, prediction)
        assert (small.num_chains, small.num_draws) == (1, 5)
        at = small.subset.chain, small.subset.draw
        assert len({*zip(*map(np.ndarray.tolist, at), strict=True)}) == 5
        for leaf, whole in zip(*map(jax.tree.leaves, (small.params, draws.params)), strict=True):
            np.testing.assert_array_equal(leaf, whole[at][None])
        assert (small.subset.step == 2 + 2 * (small.subset.draw + 1)).all()
        assert small.trace["step"].tolist() == [small.subset.step.tolist()]
        sizes = draws.trace["step_size"][:, -DRAWS:]
        assert small.trace["step_size"].tolist() == [sizes[at].tolist()]
        density = prediction.each.log_density[at]
        expected = [lppd(density[: k + 1]) for k in range(5)]
        np.testing.assert_allclose(small.subset.lppd, expected, rtol=1e-5)
        curve = [x.log_density.mean() for x in predicted_curve(small)]
        np.testing.assert_allclose(curve, expected, rtol=1e-4)


def predicted_curve(draws):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(TARGETS, 2)).astype(np.float32)
    y = x.sum(axis=1) + rng.normal(size=TARGETS).astype(np.float32)
    given: dict[str, Any] = {"likelihood": "gaussian", "targets": y, "curve": range(1, 6)}
    return optax_smile.predict(outputs, draws, x, **given).curve


@pytest.mark.parametrize("form", ["memory", "disk", "flat", "nested", "thinned"])
def test_a_directory_of_its_own(runs, form, tmp_path):
    memory, disk = runs
    loaded: Any = {"memory": memory, "disk": disk, "thinned": disk.thinned(2)}.get(form)
    if loaded is None:
        loaded = optax_smile.load_snapshots(disk.directory, flat=form == "flat")
    prediction = predicted(loaded) if form != "flat" else of_densities(predicted(disk).each[3])
    wanted: Any = loaded.thin_to(4, prediction)
    small: Any = loaded.thin_to(4, prediction, tmp_path / "few")
    assert jax.tree.structure(small[0]) == jax.tree.structure(loaded[0])
    again: Any = optax_smile.load_snapshots(tmp_path / "few", flat=form == "flat")
    for found in (small, again):
        jax.tree.map(np.testing.assert_array_equal, found.params, wanted.params)
        assert all(np.array_equal(*pair) for pair in zip(found.subset, wanted.subset, strict=True))
        assert found.trace.keys() == wanted.trace.keys()
        assert found.start is None and found.settings == loaded.settings
    # What all draws share is stored once.
    sizes = [path.stat().st_size for path in (tmp_path / "few").glob("draw-*")]
    assert len(sizes) == 4 and max(sizes) < 50 * 4 + min(sizes)
    manifest = json.loads((tmp_path / "few" / "manifest.json").read_text())
    told = manifest["subset"]
    assert "held-out" in told["chosen_by"] and told["num_targets"] == TARGETS
    assert told["of"] == {
        "directory": None if form == "memory" else str(disk.directory),
        "num_chains": CHAINS,
        "num_draws": loaded.num_draws,
    }
    assert told["chain"] == wanted.subset.chain.tolist()
    if form == "thinned":
        assert {*told["draw"]} <= {1, 3}


def test_settings_of_a_user_go_to_disk(tmp_path):
    """What JSON cannot hold is described, and what has no name gets one."""
    settings = {"rate": np.float32(0.5), "is_posterior": False}
    draws = optax_smile.Snapshots(np.ones((2, 3, 2)), settings=settings)
    small: Any = draws.thin_to(2, of_densities(np.zeros((2, 3, 4))), tmp_path / "few")
    assert small.settings == {"name": "a sampler", "rate": 0.5, "is_posterior": False}
    assert small.params.tolist() == [[[1, 1], [1, 1]]]


def test_it_is_no_sample_and_no_run(runs, tmp_path):
    small: Any = runs[1].thin_to(4, predicted(runs[1]), tmp_path / "few")
    assert "convergence cannot be judged" in repr(small)
    rule = (
        "must be all draws of each chain, got a subset of 4 draws. It was chosen on held-out data"
    )
    for function in (diagnostics.summary, diagnostics.to_arviz):
        with pytest.raises(ArgumentError, match=rule):
            function(small)
    with pytest.raises(ArgumentError, match="all draws of each chain"):
        small.thin_to(2, predicted(small))
    files = set((tmp_path / "few").iterdir())
    for resume in (True, False):
        with pytest.raises(ArgumentError, match="few, which has draws but no checkpoint"):
            sample(tmp_path / "few", resume=resume)
    assert set((tmp_path / "few").iterdir()) == files
    report.store(tmp_path / "few", "test", predicted(small))
    page = report.write(tmp_path / "few").read_text()
    assert "4 draws of smile, 52 parameters: a subset chosen on held-out data" in page
    assert "Judge the run from which they were chosen." in page
    assert str(runs[1].directory) in page and "All figures" not in page
    assert len(optax_smile.load_snapshots(tmp_path / "few")) == 4


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "tokens", "own"])
def test_every_likelihood(likelihood):
    """The best pair of three draws, one of which is bad."""
    draws = optax_smile.Snapshots(np.array([[2.0, -9.0], [-2.0, 0.5]], np.float32))
    x, ones = np.ones((4, 1), np.float32), np.array([1, 1, 1, 0])

    def apply_fn(w, x):
        if likelihood == "categorical":
            return jnp.concatenate([0 * x, w * x], axis=1)
        if likelihood == "tokens":
            return jnp.stack([0 * x, w * x], axis=2)
        return w * x[:, 0]

    own = optax_smile.Likelihood(None, lambda z, y: jax.nn.log_sigmoid(jnp.where(y > 0, z, -z)))
    named: Any = own if likelihood == "own" else likelihood
    targets = ones[:, None] if likelihood == "tokens" else ones
    given: dict[str, Any] = {"likelihood": named, "targets": targets, "per": "draw"}
    small: Any = draws.thin_to(3, optax_smile.predict(apply_fn, draws, x, **given))
    logits = np.array([2.0, 0.5, -2.0, -9.0])
    density = -np.log1p(np.exp(np.where(ones > 0, -1, 1) * logits[:, None]))
    best = max(range(4), key=lambda s: density[s].mean())
    assert small.params[0, 0] == logits[best]
    assert -9.0 not in small.params[0, :2].tolist()


def test_padding_counts_nothing():
    draws = optax_smile.Snapshots(np.zeros((1, 2, 1)))
    padded = np.array([[[[-1.0, np.nan], [-1, np.nan]], [[-0.5, np.nan], [-1.2, np.nan]]]])
    small: Any = draws.thin_to(1, of_densities(padded))
    assert small.subset.lppd[0] == pytest.approx(-0.85)


def test_what_does_not_fit_is_named(runs, tmp_path):
    memory, disk = runs
    prediction = predicted(memory)
    with pytest.raises(
        ArgumentError, match=r"number=...\)` must be at most the 12 draws .* got 13"
    ):
        memory.thin_to(13, prediction)
    with pytest.raises(ArgumentError, match=r"number=...\)` must be an integer >= 1, got 0"):
        memory.thin_to(0, prediction)
    fewer = of_densities(prediction.each.log_density[:, 1:])
    with pytest.raises(
        ArgumentError,
        match=r"prediction=...\)`.*3 chains with 4 draws each\), got one with .* of shape \(3, 3",
    ):
        disk.thin_to(2, fewer)
    with pytest.raises(ArgumentError, match="got one without `per="):
        memory.thin_to(2, prediction._replace(each=None))
    broken = prediction.each.log_density.copy()
    broken[2, 1, 3] = np.nan
    with pytest.raises(ArgumentError, match="nan at target 3 of chain 2, draw 1"):
        memory.thin_to(2, of_densities(broken))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note.txt").touch()
    for place in (tmp_path / "full", tmp_path / "full" / "note.txt", disk.directory):
        with pytest.raises(ArgumentError, match="must be a new or empty directory"):
            memory.thin_to(2, prediction, place)


def test_a_choice_that_was_cut_short_cannot_be_loaded(runs, tmp_path, monkeypatch):
    from optax_smile.draws import _format

    write, written = _format.DrawFiles.write, []

    def stop(self, draw, *rest):
        if draw == 2:
            raise OSError("the disk is full")
        written.append(draw)
        write(self, draw, *rest)

    monkeypatch.setattr(_format.DrawFiles, "write", stop)
    with pytest.raises(OSError, match="full"):
        runs[0].thin_to(4, predicted(runs[0]), tmp_path / "few")
    assert written == ["start", 0, 1]
    with pytest.raises(ArgumentError, match=r"with a manifest\.json"):
        optax_smile.load_snapshots(tmp_path / "few")


def test_a_lost_draw_is_named(runs, tmp_path):
    runs[0].thin_to(4, predicted(runs[0]), tmp_path / "few")
    lost = tmp_path / "few" / "draw-00000003.chains-00000-00000.safetensors"
    lost.unlink()
    with pytest.raises(ValueError, match=f"all its 4 draws, got .* without {lost.name}"):
        optax_smile.load_snapshots(tmp_path / "few")
