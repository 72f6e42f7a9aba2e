"""Draws that are chosen on held-out data: compared with a greedy choice by hand; not a sample."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

import optax_smile
from optax_smile import diagnostics


def lppd(density):
    """LPPD of an average, by the textbook formula."""
    return np.log(np.exp(np.asarray(density, np.float64)).mean(axis=0)).mean()


def one_by_one(density: Any) -> optax_smile.Snapshots:
    """Chains of numbers, each its place in the sequence of the draws."""
    chains, draws = np.shape(density)[:2]
    return optax_smile.Snapshots(np.arange(chains * draws).reshape(draws, chains).T)


def test_each_draw_is_the_best_addition():
    """Against averages of densities in float64, for all candidates one by one."""
    density = np.random.default_rng(0).normal(size=(3, 4, 7))
    draws, flat = one_by_one(density), density.swapaxes(0, 1).reshape(12, 7)
    chosen = draws.choose(density, 12).tolist()
    assert sorted(chosen) == list(range(12))
    for number in range(1, 13):
        before = chosen[: number - 1]
        rest = [s for s in range(12) if s not in before]
        scores = {s: lppd(flat[[*before, s]]) for s in rest}
        assert chosen[number - 1] == max(scores, key=lambda s: scores[s])
    # It is better than most subsets of its size, and differs from the best single draws.
    others = [lppd(flat[list(each)]) for each in itertools.combinations(range(12), 3)]
    assert np.mean(np.array(others) > lppd(flat[chosen[:3]])) < 0.02
    alone = sorted(range(12), key=lambda s: -flat[s].mean())
    assert set(chosen[:3]) != set(alone[:3])
    np.testing.assert_array_equal(draws.choose(density, 5), chosen[:5])
    np.testing.assert_array_equal(draws[draws.choose(density, 5)].params, [chosen[:5]])


def test_tiny_and_impossible_densities():
    """Densities far below the smallest float64, and targets that no single draw allows."""
    density = np.array([[[-1e6, -2000.0], [-3000.0, -1e6], [-5e5, -5e5]]])
    assert one_by_one(density).choose(density, 2).tolist() == [2, 0]
    impossible = np.array([[[0.0, -np.inf, -np.inf], [-np.inf, 0, 0], [0, -np.inf, -np.inf]]])
    assert one_by_one(impossible).choose(impossible, 2).tolist() == [1, 0]
    # Padding is NaN in all draws.
    padded = np.array([[[[-1.0, np.nan], [-1, np.nan]], [[-0.5, np.nan], [-1.2, np.nan]]]])
    assert one_by_one(padded).choose(padded, 1).tolist() == [1]


def test_chosen_draws_predict_but_are_no_sample(tmp_path):
    """In memory and on disk, and scores of the first k of them."""
    in_memory, (x, y) = runs.run(), runs.regression(1)[0]
    runs.run(tmp_path / "run")
    outputs = lambda params, x: (x @ params["w"], jnp.log(0.5))  # noqa: E731
    given: dict[str, Any] = {"likelihood": "gaussian", "targets": y}
    for draws in (in_memory, optax_smile.load_snapshots(tmp_path / "run", flat=True)):
        prediction: Any = optax_smile.predict(outputs, draws, x, per="draw", **given)
        indices = draws.choose(prediction.each.log_density, 5)
        few = draws[indices]
        assert isinstance(few, optax_smile.Snapshots) and (few.num_chains, few.num_draws) == (1, 5)
        for one, index in zip(few, indices, strict=True):
            jax.tree.map(np.testing.assert_array_equal, one, draws[index])
        density = prediction.each.log_density[indices % 3, indices // 3]
        for number in (1, 5):
            found = optax_smile.predict(outputs, few[:number], x, **given).log_density
            assert found.mean() == pytest.approx(lppd(density[:number]), rel=1e-4)
        assert "draws chosen by their indices, not posterior draws" in repr(few)
        for function in (diagnostics.summary, diagnostics.to_arviz):
            runs.refused("from a posterior, got draws chosen by their", function, few)


def test_what_does_not_fit_is_named():
    density = np.zeros((3, 4, 5))
    draws = one_by_one(density)
    for rule, scores, number in (
        (r"number=...\)` must be at most the 12 draws .* 13", density, 13),
        (r"first axes are \(3, 4\), got shape \(3, 3, 5\)", density[:, 1:], 2),
    ):
        runs.refused(rule, draws.choose, scores, number)
