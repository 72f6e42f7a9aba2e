"""Plots show the right numbers, on new and on given axes."""

from functools import partial
from typing import Any

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from runs import refused

import optax_smile

plots: Any = optax_smile.plots
plt.rcParams["figure.max_open_warning"] = 0
NUM_CHAINS = 3
GENERATOR = np.random.default_rng(0)
MEAN, STD = GENERATOR.normal(size=12), GENERATOR.uniform(0.5, 2, 12)
PROBABILITIES = GENERATOR.dirichlet(np.ones(4), 200)
LABELS = GENERATOR.integers(0, 4, 200)
DRAWS = np.cumsum(GENERATOR.normal(size=(NUM_CHAINS, 9, 40)), axis=1)
LPPD = np.array([[-1.0, -1.1, -np.inf, -9], [-0.7, -0.6, np.nan, np.nan]])
SELECTION = optax_smile.Selection(
    best="b",
    draws=None,  # pyright: ignore
    names=("a", "b", "failed", "far"),
    num_steps=np.array([10, 20]),
    lppd=LPPD,
    projected=LPPD + 0.1,
    standard_error=np.array([[0, 0.05, np.nan, 0.3], [0.02, 0, np.nan, np.nan]]),
    **{"start_lppd": -1.3, "final_lppd": -0.5, "total_steps": 100, "cost": 0.3},
)


def make_trace() -> dict[str, Any]:
    generator, shape = np.random.default_rng(1), (NUM_CHAINS, 60)
    return {
        "step_size": np.exp(generator.normal(-3, 1, shape)).astype(np.float32),
        "energy_change": generator.normal(size=shape).astype(np.float32),
        "accepted": generator.random(shape) < 0.9,
        "num_gradients": generator.integers(10, 20, shape).cumsum(axis=1),
    }


WITHOUT_ENERGY = make_trace() | {"energy_change": np.full((3, 60), np.nan)}
DRAW = (
    partial(plots.step_size, make_trace()),
    partial(plots.energy_error, make_trace()),
    partial(plots.reliability, PROBABILITIES, LABELS),
    partial(plots.risk_coverage, PROBABILITIES, LABELS, label="one"),
    partial(plots.regression_band, None, MEAN, STD),
    partial(plots.selection, SELECTION),
    partial(plots.chain_paths, DRAWS),
)


def legend_of(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()] if ax.get_legend() else []


def line_of(ax, label) -> Any:
    (line,) = [line for line in ax.lines if line.get_label() == label]
    return line


def band_at(ax, place: float) -> list[float]:
    """Ends of the band at a place."""
    (band,) = ax.collections
    vertices = band.get_paths()[0].vertices
    ends = vertices[np.isclose(vertices[:, 0], place), 1]
    return [ends.min(), ends.max()]


def test_every_picture_is_drawn_on_new_and_on_given_axes():
    for draw in DRAW:
        given, new = plt.subplots()[1], draw()
        assert draw(ax=given) is given and new.figure is not given.figure
        assert all((new.get_title(), new.get_xlabel(), new.get_ylabel()))
        new.figure.canvas.draw()
        plt.close("all")


def test_step_sizes_of_chains_and_their_scale():
    trace = make_trace()
    line = line_of(plots.step_size(trace), "chain 1")
    expected = np.transpose([trace["num_gradients"][1], trace["step_size"][1]])
    np.testing.assert_allclose(line.get_xydata(), expected)
    trace["step_size"] = np.linspace(0.1, 0.25, 180).reshape(NUM_CHAINS, -1)
    ax = plots.step_size(trace)
    assert ax.get_yscale() == "linear" and ax.get_ylim()[0] == 0
    # A chain that broke is a gap, not an error: this is where a picture is wanted most.
    trace["step_size"][0, 0], trace["step_size"][1] = 0.01, np.nan
    assert plots.step_size(trace).get_yscale() == "log"
    plots.step_size(trace | {"step_size": np.full((3, 60), np.nan)}).figure.canvas.draw()


def test_energy_error_shows_dots_rejected_steps_and_quantiles():
    trace = make_trace()
    for place, value in {(1, 5): np.nan, (2, 7): np.inf, (0, 3): 0}.items():
        trace["energy_change"][place] = value
    ax, gradients = plots.energy_error(trace), trace["num_gradients"]
    error = abs(trace["energy_change"])
    shown = np.isfinite(error) & (error > 0)
    dots = [line for line in ax.lines if line.get_marker() == "."]
    for line, mask in zip(dots, (trace["accepted"], ~trace["accepted"]), strict=True):
        np.testing.assert_allclose(np.sort(line.get_ydata()), np.sort(error[shown & mask]))
    # Windows of 20 values of 3 chains: nine, of 6 or 7 ticks.
    windows = np.array_split(error, 9, axis=1)
    expected = [np.median(window[np.isfinite(window)]) for window in windows]
    median = line_of(ax, "median")
    np.testing.assert_allclose(median.get_ydata(), expected, rtol=1e-6)
    np.testing.assert_allclose(median.get_xdata()[0], gradients[:, :7].mean())
    quantiles = np.quantile(windows[-1], [0.05, 0.95])
    np.testing.assert_allclose(band_at(ax, gradients[:, 54:].mean()), quantiles, rtol=1e-6)
    ax = plots.energy_error(make_trace() | {"energy_change": np.zeros((3, 60))})
    assert not line_of(ax, "median").get_ydata().any() and ax.get_yscale() == "linear"
    assert plots.energy_error(WITHOUT_ENERGY).get_title().startswith("No energy error")


def test_reliability_by_hand_and_overlaid():
    # Confidences .55 (right, wrong), .95 (right, right): |.5 - .55| / 2 + |1 - .95| / 2.
    probabilities = [[0.55, 0.45], [0.55, 0.45], [0.05, 0.95], [0.95, 0.05]]
    ax = plots.reliability(probabilities, [0, 1, 1, 0], label="first")
    line, dots = line_of(ax, "first (ECE 0.050)"), ax.collections[0]
    np.testing.assert_allclose(line.get_xydata(), [[0.55, 0.5], [0.95, 1]])
    np.testing.assert_allclose(dots.get_sizes(), [175, 175])
    # Methods have colours of their own. Bins are those of the metric.
    for number in range(1, 7):
        plots.reliability(PROBABILITIES, LABELS, label=str(number), ax=ax)
    colors = {line.get_color() for line in ax.lines if line.get_linestyle() == "-"}
    assert len(colors) == len(legend_of(ax)) == 7
    error = optax_smile.metrics.ece(PROBABILITIES, LABELS)
    assert legend_of(ax)[-1] == f"6 (ECE {error:.3f})"


def test_risk_coverage():
    ax, order = plots.risk_coverage(PROBABILITIES, LABELS), np.argsort(-PROBABILITIES.max(axis=1))
    wrong = PROBABILITIES.argmax(axis=1)[order] != LABELS[order]
    expected = np.cumsum(wrong) / np.arange(1, 201)
    share, risk = ax.lines[0].get_data()
    answered = np.round(200 * share[share > 0]).astype(int)
    np.testing.assert_allclose(risk[share > 0], expected[answered - 1])
    assert legend_of(ax) == [f"predictions (AURC {np.mean(expected):.3g})"]
    # Methods have other numbers of inputs, and one may never be wrong.
    plots.risk_coverage(PROBABILITIES[:50], PROBABILITIES[:50].argmax(1), label="right", ax=ax)
    assert ax.get_ylim()[0] == 0 and max(expected) < ax.get_ylim()[1] < 1.1 * max(expected)
    assert ax.lines[0].get_color() != ax.lines[1].get_color()


def test_regression_band():
    targets = np.where(np.arange(12) < 9, MEAN + 1.9 * STD, MEAN + 2 * STD)
    ax, order = plots.regression_band(None, MEAN, STD, targets), np.argsort(MEAN)
    np.testing.assert_allclose(line_of(ax, "mean").get_ydata(), MEAN[order])
    np.testing.assert_allclose(line_of(ax, "targets").get_ydata(), targets[order])
    got = [band_at(ax, place) for place in range(12)]
    half = 1.959964 * STD[order]
    np.testing.assert_allclose(got, np.transpose([MEAN[order] - half, MEAN[order] + half]), 1e-5)
    assert ax.get_title() == "95 % band: holds 75.0 % of 12 targets"
    # The band of a mixture; a quarter of it lies below the median of its lower part.
    ax = plots.regression_band([1, 0], np.array([[0.0, 1], [10, 3]]), 1.0, level=0.5)
    np.testing.assert_allclose(line_of(ax, "mean").get_xydata(), [[0, 2], [1, 5]])
    np.testing.assert_allclose(band_at(ax, 1), [0, 10], atol=1e-4)


def test_selection_has_a_line_for_each_candidate():
    ax = plots.selection(SELECTION)
    assert ax.get_title() == "Chosen: b, LPPD -0.5"
    assert line_of(ax, "start: -1.3").get_ydata() == [-1.3, -1.3]
    bars = {x.get_label(): x.lines for x in ax.containers}
    for place, name in enumerate(SELECTION.names):
        values = SELECTION.lppd[:, place]
        known, line = np.isfinite(values), bars[name][0]
        # Candidates of one round are drawn side by side.
        np.testing.assert_allclose(line.get_xdata(), SELECTION.num_steps[known], rtol=0.03)
        np.testing.assert_allclose(line.get_ydata(), values[known])
    ends = [segment[:, 1] for segment in bars["b"][2][0].get_segments()]
    np.testing.assert_allclose(ends, [[-1.15, -1.05], [-0.6, -0.6]])
    # Values far below the best do not affect the scale.
    low, high = ax.get_ylim()
    assert -1.5 < low < -1.3 and -0.5 < high < -0.4
    marks = {"x": ("failed", (10, low)), "v": ("far", (10, low)), "*": ("b", (100, -0.5))}
    for marker, (name, place) in marks.items():
        (mark,) = [x for x in ax.lines if x.get_marker() == marker and len(x.get_xdata())]
        np.testing.assert_allclose(mark.get_xydata(), [place], rtol=0.03)
        assert mark.get_color() == bars[name][0].get_color()


def points_of(ax, num_chains):
    return np.stack([line_of(ax, f"chain {at}").get_xydata() for at in range(num_chains)])


def test_chain_paths_against_svd():
    for size in (2, 5, 40):
        flat = DRAWS[..., :size].reshape(-1, size)
        _, values, axes = np.linalg.svd(flat - flat.mean(axis=0), full_matrices=False)
        tree = {"a": DRAWS[..., :size, None], "b": [jnp.zeros((NUM_CHAINS, 9, 1))]}
        ax = plots.chain_paths(tree)
        points = points_of(ax, NUM_CHAINS)
        got, expected = points.reshape(-1, 2), (flat - flat.mean(axis=0)) @ axes[:2].T
        np.testing.assert_allclose(got, expected * np.sign(got[0] * expected[0]), atol=1e-9)
        shares = 100 * values[:2] ** 2 / np.sum(values**2)
        assert f"{shares[0]:.1f} %" in ax.get_xlabel() and f"{shares[1]:.1f} %" in ax.get_ylabel()
        assert legend_of(ax)[-2:] == ["first draw", "last draw"]
        for marker, draw in {"x": 0, "o": -1}.items():
            ends = [line.get_xydata() for line in ax.lines if line.get_marker() == marker]
            np.testing.assert_array_equal(np.concatenate(ends), points[:, draw])
        # They begin at the start, which does not turn the plane.
        start = 100 + GENERATOR.normal(size=(NUM_CHAINS, size))
        got = points_of(plots.chain_paths(DRAWS[..., :size], start=start), NUM_CHAINS)
        expected = (start - flat.mean(axis=0)) @ axes[:2].T
        np.testing.assert_allclose(np.abs(got[:, 0]), np.abs(expected), rtol=1e-9)
        np.testing.assert_allclose(np.abs(got[:, 1:]), np.abs(points), atol=1e-9)
    # Without a second direction, or any.
    assert "(0.0 %" in plots.chain_paths(DRAWS[..., :1]).get_ylabel()
    for draws in (np.ones((2, 3, 4)), np.ones((1, 1, 4)), np.ones((2, 9, 2), np.float16)):
        assert not points_of(plots.chain_paths(draws), len(draws)).any()


def test_what_does_not_fit_together_is_named_before_a_figure_opens():
    before, trace = plt.get_fignums(), make_trace() | {"num_gradients": np.ones((2, 60))}
    refused("one shape", plots.energy_error, trace)
    refused(r"targets=...\)` must be of shape", plots.regression_band, MEAN, MEAN, STD, MEAN[:9])
    assert plt.get_fignums() == before
