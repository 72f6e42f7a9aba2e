"""Pictures hold the numbers that they are of, on new and on given axes."""

import functools
import sys
from typing import Any, cast

import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest

import optax_smile
from optax_smile import plots
from optax_smile.draws.snapshots import Stopping
from optax_smile.plots import _axes, run

NUM_CHAINS, NUM_TICKS = 3, 60
GENERATOR = np.random.default_rng(0)
MEAN, STD = GENERATOR.normal(size=12), GENERATOR.uniform(0.5, 2, 12)
PROBABILITIES = GENERATOR.dirichlet(np.ones(4), 200)
LABELS = GENERATOR.integers(0, 4, 200)
IMAGES = GENERATOR.normal(size=(9, 4, 3, 1))
LOG_LIKELIHOOD = GENERATOR.normal(-1, 2, (NUM_CHAINS, 7, 5))
DRAWS = np.cumsum(GENERATOR.normal(size=(NUM_CHAINS, 9, 40)), axis=1)
SELECTION = optax_smile.Selection(
    best="b",
    draws=cast(Any, None),
    names=("a", "b", "failed", "far"),
    num_steps=np.array([10, 20]),
    lppd=np.array([[-1.0, -1.1, -np.inf, -9], [-0.7, -0.6, np.nan, np.nan]]),
    projected=np.array([[-0.9, -1.0, -np.inf, -9], [-0.6, -0.5, np.nan, np.nan]]),
    standard_error=np.array([[0, 0.05, np.nan, 0.3], [0.02, 0, np.nan, np.nan]]),
    start_lppd=-1.3,
    final_lppd=-0.5,
    total_steps=100,
    cost=0.3,
)


@pytest.fixture(autouse=True)
def no_open_figures():
    assert not plt.get_fignums(), "an earlier test left a figure"
    yield
    plt.close("all")


def make_trace(num_chains=NUM_CHAINS, num_ticks=NUM_TICKS) -> dict[str, Any]:
    generator, shape = np.random.default_rng(1), (num_chains, num_ticks)
    return {
        "step_size": np.exp(generator.normal(-3, 1, shape)).astype(np.float32),
        "energy_change": generator.normal(size=shape).astype(np.float32),
        "accepted": generator.random(shape) < 0.9,
        "num_rejected": generator.poisson(2, shape).cumsum(axis=1),
        "num_nonfinite": np.zeros(shape, np.int32),
        "num_gradients": generator.integers(10, 20, shape).cumsum(axis=1),
    }


LOOKS = np.array([4, 8]), np.array([1.0, 5.0]), np.array([-1.3, -1.2])
STOPPING = Stopping("improvement", 0.05, 0.01, 100, -1.5, *LOOKS)
WITHOUT_ENERGY = make_trace() | {"energy_change": np.full((3, 60), np.nan)}
DRAW = {
    "step_size": functools.partial(plots.step_size, make_trace()),
    "energy_error": functools.partial(plots.energy_error, make_trace()),
    "energy_error, none": functools.partial(plots.energy_error, WITHOUT_ENERGY),
    "rejections": functools.partial(plots.rejections, make_trace(), nominal=0.1),
    "reliability": functools.partial(plots.reliability, PROBABILITIES, LABELS),
    "risk_coverage": functools.partial(plots.risk_coverage, PROBABILITIES, LABELS, label="one"),
    "regression_band": functools.partial(plots.regression_band, MEAN, MEAN, STD, MEAN + 1),
    "regression_band, ranks": functools.partial(plots.regression_band, None, MEAN, STD),
    "lppd": functools.partial(plots.lppd, LOG_LIKELIHOOD),
    "entropy": functools.partial(plots.entropy, {"test": STD, "OOD": STD + 1}),
    "selection": functools.partial(plots.selection, SELECTION),
    "stopping": functools.partial(plots.stopping, STOPPING),
    "chain_paths": functools.partial(plots.chain_paths, DRAWS),
    "examples": functools.partial(plots.examples, IMAGES, PROBABILITIES[:9], STD[:9], LABELS[:9]),
    "examples, numbers": functools.partial(plots.examples, IMAGES, MEAN[:9], STD[:9]),
}


def legend_of(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def lines_of(ax) -> list[Any]:
    return list(ax.lines)


def line_of(ax, label) -> Any:
    (line,) = [line for line in ax.lines if line.get_label() == label]
    return line


def outline_of(ax) -> np.ndarray:
    """Corners of the one filled band."""
    (band,) = ax.collections
    return band.get_paths()[0].vertices


def stairs_of(ax):
    return {patch.get_label(): patch.get_data() for patch in ax.patches}


def test_every_picture_is_drawn_on_new_and_on_given_axes():
    for name, draw in DRAW.items():
        figure, (left, right) = plt.subplots(1, 2)
        assert draw(ax=right) is right, name
        assert not left.lines and not left.collections and not left.patches
        new = draw()
        assert new.figure is not figure and len(plt.get_fignums()) == 2
        # Images have no scales.
        assert new.get_title() and (new.images or new.get_xlabel() and new.get_ylabel()), name
        new.figure.canvas.draw()
        plt.close("all")


def test_few_ticks_and_many_chains():
    for num_chains, num_ticks in ((1, 2), (9, 3), (30, 5)):
        trace = make_trace(num_chains, num_ticks)
        axes = [draw(trace) for draw in (plots.step_size, plots.energy_error, plots.rejections)]
        axes.append(plots.lppd(GENERATOR.normal(size=(num_chains, num_ticks, 3))))
        axes.append(plots.chain_paths(GENERATOR.normal(size=(num_chains, num_ticks, 4))))
        for ax in axes:
            names = [name for name in legend_of(ax) if name.startswith("chain ")]
            assert len(names) in ((0, num_chains) if num_chains <= 10 else (0,))
            if num_chains == 1:
                ax.figure.canvas.draw()
        plt.close("all")
    # Single points are seen.
    trace = make_trace(2, 1)
    assert plots.step_size(trace).lines[0].get_marker() == "o"
    assert line_of(plots.energy_error(trace), "median").get_marker() == "o"
    assert line_of(plots.lppd(LOG_LIKELIHOOD[:, :1]), "all 3 chains").get_marker() == "o"


def test_step_sizes_of_chains_and_their_scale():
    trace, many = make_trace(), make_trace(11)
    line = line_of(plots.step_size(trace), "chain 1")
    np.testing.assert_array_equal(line.get_xdata(), trace["num_gradients"][1])
    np.testing.assert_allclose(line.get_ydata(), trace["step_size"][1])
    median = line_of(plots.step_size(many), "median of 11 chains")
    np.testing.assert_allclose(median.get_ydata(), np.median(many["step_size"], axis=0))
    trace["step_size"] = np.linspace(0.1, 0.25, NUM_CHAINS * NUM_TICKS).reshape(NUM_CHAINS, -1)
    ax = plots.step_size(trace)
    assert ax.get_yscale() == "linear" and ax.get_ylim()[0] == 0
    # A chain that broke is a gap, not an error: this is where a picture is wanted most.
    for place, value in (((0, 0), 0.01), (1, np.nan)):
        trace["step_size"][place] = value
        assert plots.step_size(trace).get_yscale() == "log"
    trace["step_size"][:] = np.nan
    plots.step_size(trace).figure.canvas.draw()


def test_energy_error_shows_dots_rejected_steps_and_quantiles():
    trace = make_trace()
    for place, value in {(1, 5): np.nan, (2, 7): np.inf, (0, 3): 0}.items():
        trace["energy_change"][place] = value
    ax, error, gradients = (
        plots.energy_error(trace),
        abs(trace["energy_change"]),
        trace["num_gradients"],
    )
    shown = np.isfinite(error) & (error > 0)
    dots = [line for line in lines_of(ax) if line.get_marker() == "."]
    for line, mask in zip(dots, (trace["accepted"], ~trace["accepted"]), strict=True):
        np.testing.assert_allclose(np.sort(line.get_ydata()), np.sort(error[shown & mask]))
    median = line_of(ax, "median")
    # Windows of 7 ticks hold 20 values of 3 chains: 8 windows, the first four of 8 ticks.
    windows = np.split(error, (8, 16, 24, 32, 39, 46, 53), axis=1)
    expected = [np.median(window[np.isfinite(window)]) for window in windows]
    np.testing.assert_allclose(median.get_ydata(), expected, rtol=1e-6)
    np.testing.assert_allclose(median.get_xdata()[0], gradients[:, :8].mean())
    vertices = outline_of(ax)
    at_end = vertices[np.isclose(vertices[:, 0], gradients[:, 53:].mean()), 1]
    quantiles = np.quantile(windows[-1], [0.05, 0.95])
    np.testing.assert_allclose([at_end.min(), at_end.max()], quantiles, rtol=1e-6)


def test_energies_that_are_many_or_all_zero_or_unknown():
    """Many are thinned, but rejected steps are kept."""
    trace = make_trace(20, 1000)
    usual, rejected = (x for x in lines_of(plots.energy_error(trace)) if x.get_marker() == ".")
    assert usual.get_ydata().size <= run.MOST_DOTS
    assert rejected.get_ydata().size == np.sum(~trace["accepted"])
    ax = plots.energy_error(make_trace() | {"energy_change": np.zeros((3, 60))})
    assert not line_of(ax, "median").get_ydata().any()
    ax.figure.canvas.draw()
    told = [text.get_text() for text in plots.energy_error(WITHOUT_ENERGY).texts]
    assert told == ["no energy: the loop passed no value"]


def test_rejections_are_counted_per_gradient():
    trace = make_trace()
    ax = plots.rejections(trace, nominal=0.1)
    rejected, counts = trace["num_rejected"], trace["num_gradients"]
    stairs = stairs_of(ax)
    for chain in range(NUM_CHAINS):
        values, edges, _ = stairs[f"chain {chain}"]
        ends = np.searchsorted(counts[chain], edges)
        np.testing.assert_array_equal(counts[chain, ends], edges)
        assert ends[0] == 0 and ends[-1] == NUM_TICKS - 1
        rates = np.diff(rejected[chain, ends]) / np.diff(counts[chain, ends])
        np.testing.assert_allclose(values, rates)
    values, edges, _ = stairs["all 3 chains"]
    gained, gradients = (sum(x[:, -1] - x[:, 0]) for x in (rejected, counts))
    assert np.sum(values * np.diff(edges) * NUM_CHAINS) == pytest.approx(gained)
    # About five events in a window of one chain.
    assert 4 <= gained / (len(values) * NUM_CHAINS) <= 7
    assert f"{gained} steps rejected, {gained / gradients:.2g} per gradient" in ax.get_title()
    assert line_of(ax, "nominal: 0.1").get_ydata()[0] == 0.1
    assert "non-finite" not in ax.get_title()
    # Of many chains the range of their rates is shown.
    stairs = stairs_of(plots.rejections(make_trace(12)))
    top, edges, bottom = stairs["range of the chains"]
    middle = stairs["all 12 chains"].values
    assert np.all(bottom <= middle) and np.all(middle <= top)
    assert len(edges) == _axes.MOST_WINDOWS + 1
    # A quiet run, and a broken one.
    trace["num_rejected"] = np.zeros_like(rejected)
    assert plots.rejections(trace).get_ylim()[1] > 0
    trace["num_rejected"][1, 30:] = 7
    trace["num_nonfinite"][0, 20:] = 4
    ax = plots.rejections(trace, nominal=1e-4)
    assert ax.get_yscale() == "symlog"
    assert "4 non-finite gradients or values" in ax.get_title()
    ax.figure.canvas.draw()


def test_reliability_by_hand_and_overlaid():
    # Confidences .55 (right, wrong), .95 (right, right): |.5 - .55| / 2 + |1 - .95| / 2.
    probabilities = [[0.55, 0.45], [0.55, 0.45], [0.05, 0.95], [0.95, 0.05]]
    ax = plots.reliability(probabilities, [0, 1, 1, 0], label="first")
    assert legend_of(ax) == ["first (ECE 0.050)"]
    # Bins are those of the metric.
    error = optax_smile.metrics.ece(PROBABILITIES, LABELS)
    assert error != optax_smile.metrics.ece(PROBABILITIES, LABELS, 10)
    assert legend_of(plots.reliability(PROBABILITIES, LABELS)) == [f"ECE {error:.3f}"]
    line, dots = line_of(ax, "first (ECE 0.050)"), ax.collections[0]
    np.testing.assert_allclose(line.get_xydata(), [[0.55, 0.5], [0.95, 1]])
    np.testing.assert_allclose(dots.get_sizes(), [175, 175])  # pyright: ignore
    # More methods than colours have lines of their own, and one diagonal.
    for number in range(1, 9):
        assert plots.reliability(PROBABILITIES, LABELS, label=str(number), ax=ax) is ax
    lines = {(x.get_color(), x.get_linestyle()) for x in lines_of(ax) if x.get_gid()}
    assert len(lines) == len(legend_of(ax)) == 9 and len(lines_of(ax)) == 10
    assert sum(list(line.get_xdata()) == [0, 1] for line in lines_of(ax)) == 1


def test_risk_coverage_by_a_loop():
    ax = plots.risk_coverage(PROBABILITIES, LABELS)
    (line,) = lines_of(ax)
    ranked = sorted(range(200), key=lambda at: -PROBABILITIES[at].max())
    wrong = [PROBABILITIES[at].argmax() != LABELS[at] for at in ranked]
    expected = [sum(wrong[:k]) / k for k in range(1, 201)]
    for share, risk in line.get_xydata():
        assert share == 0 or risk == pytest.approx(expected[round(share * 200) - 1])
    assert legend_of(ax) == [f"AURC {np.mean(expected):.3g}"]
    # Methods have other numbers of inputs, and one may never be wrong.
    plots.risk_coverage(PROBABILITIES[:50], PROBABILITIES[:50].argmax(1), label="right", ax=ax)
    assert ax.get_ylim() == (0, 1.05 * max(expected))
    assert lines_of(ax)[0].get_color() != lines_of(ax)[1].get_color()


def test_regression_band():
    targets = np.where(np.arange(12) < 9, MEAN + 1.9 * STD, MEAN + 2 * STD)
    for inputs in np.roll(MEAN, 3), None:
        ax = plots.regression_band(inputs, MEAN, STD, targets)
        order = np.argsort(MEAN if inputs is None else inputs)
        horizontal = np.arange(12) if inputs is None else inputs[order]
        line, vertices = line_of(ax, "mean"), outline_of(ax)
        np.testing.assert_allclose(line.get_xydata(), np.transpose([horizontal, MEAN[order]]))
        np.testing.assert_allclose(line_of(ax, "targets").get_ydata(), targets[order])
        for place, at in zip(horizontal, order, strict=True):
            ends = vertices[np.isclose(vertices[:, 0], place), 1]
            expected = MEAN[at] + STD[at] * np.array([-1.959964, 1.959964])
            np.testing.assert_allclose([ends.min(), ends.max()], expected, rtol=1e-5)
        assert ax.get_title() == "95 % band: holds 75.0 % of 12 targets"
    # Of a mixture; a quarter of it lies below the median of its lower part.
    ax = plots.regression_band([1, 0], np.array([[0.0, 1], [10, 3]]), 1.0, level=0.5)
    np.testing.assert_allclose(line_of(ax, "mean").get_xydata(), [[0, 2], [1, 5]])
    vertices = outline_of(ax)
    ends = vertices[vertices[:, 0] == 1, 1]
    np.testing.assert_allclose([ends.min(), ends.max()], [0, 10], atol=1e-4)


def test_lppd_by_the_textbook_formula():
    ax, number = plots.lppd(LOG_LIKELIHOOD), np.arange(1, 8)
    cases = {f"chain {at}": LOG_LIKELIHOOD[at : at + 1] for at in range(NUM_CHAINS)}
    for name, chains in (cases | {"all 3 chains": LOG_LIKELIHOOD}).items():
        parts = [np.exp(chains[:, :m]).mean(axis=(0, 1)) for m in number]
        expected = np.transpose([number, np.log(parts).mean(axis=1)])
        np.testing.assert_allclose(line_of(ax, name).get_xydata(), expected)
    assert f"{expected[-1, 1]:.4g}" in ax.get_title() and ax.get_xscale() == "log"
    # Impossible targets, and one chain.
    impossible = np.where(np.arange(7)[None, :, None] == 0, -np.inf, LOG_LIKELIHOOD[:1])
    ax = plots.lppd(impossible.astype(np.float32))
    assert [line.get_label() for line in lines_of(ax)] == ["chain 0"]
    assert lines_of(ax)[0].get_ydata()[0] == -np.inf
    ax.figure.canvas.draw()
    # Large magnitudes in float32 neither overflow nor vanish.
    ax = plots.lppd(np.full((2, 3, 4), -2000, np.float32))
    np.testing.assert_allclose(lines_of(ax)[-1].get_ydata(), -2000)


def test_entropy_histograms_share_bins_and_have_area_one():
    inside, outside = GENERATOR.gamma(1, 0.2, 500), GENERATOR.gamma(5, 0.3, 300)
    stairs = stairs_of(plots.entropy({"test": inside, "OOD": outside}))
    first, second = stairs.values()
    np.testing.assert_array_equal(first.edges, second.edges)
    assert first.edges[0] == 0 and first.edges[-1] == max(inside.max(), outside.max())
    for values, edges, _ in stairs.values():
        assert np.sum(values * np.diff(edges)) == pytest.approx(1)
    in_first_bin = np.mean(inside < first.edges[1]) / first.edges[1]
    assert first.values[0] == pytest.approx(in_first_bin)
    plots.entropy({"certain": np.zeros(3) - 1e-7}).figure.canvas.draw()


def test_examples_by_hand():
    """Surest and least sure, and of the wrong ones first whose class was given least."""
    ones = np.array([0.9, 0.6, 0.2, 0.45, 0.05])
    probabilities, labels = np.stack([1 - ones, ones], axis=1), [1, 1, 1, 1, 1]
    images = np.arange(5)[:, None, None, None] * np.array([100.0, 200, 300])
    ax = plots.examples(images + np.zeros((5, 3, 2, 1)), probabilities, ones, labels, number=2)
    told = "|".join(text.get_text() for text in ax.texts).replace("\n", " ").split("|")
    assert told[:3] == ["most certain", "0: 95 % is 1", "0: 80 % is 1"]
    assert told[3:6] == ["least certain", "1: 90 % 0.90 nats", "1: 60 % 0.60 nats"]
    assert told[6:] == ["wrong, worst first", "0: 95 % is 1", "0: 80 % is 1"]
    for image, at in zip(ax.images, [4, 2, 0, 1, 4, 2], strict=True):
        expected = at * np.array([100, 200, 300]) / 1200
        np.testing.assert_allclose(np.asarray(image.get_array())[0, 0], expected)
        # Two wide and three high, the first row at the top.
        left, right, bottom, top = image.get_extent()
        assert (bottom - top) / (right - left) == pytest.approx(3 / 2)
    assert ax.get_ylim()[0] > ax.get_ylim()[1]
    right = plots.examples(np.zeros((5, 2, 2)), probabilities, ones, probabilities.argmax(1))
    assert len(right.images) == 10 and not any("wrong" in x.get_text() for x in right.texts)
    # Of numbers: those furthest off, in standard deviations.
    mean, variance, targets = np.array([1.0, 20, 3]), np.array([1.0, 4, 0.25]), np.array([3, 20, 2])
    ax = plots.examples(np.ones((3, 2, 2)), mean, variance, targets, number=1)
    told = [text.get_text() for text in ax.texts if "\n" in text.get_text()]
    assert told == ["3 ± 0.5\nwas 2", "20 ± 2\nwas 20", "1 ± 1\nwas 3"]


def test_stopping_has_the_evidence_and_its_threshold():
    ax = plots.stopping(STOPPING)
    evidence, threshold = (np.asarray(line.get_ydata()) for line in ax.lines)
    np.testing.assert_allclose(evidence, [1, 5])
    np.testing.assert_allclose(threshold, np.log([2 / 0.05, 6 / 0.05]))
    assert ax.get_title() == "Stopped, LPPD -1.5 to -1.2"
    assert legend_of(ax) == ["log e-value", "threshold, alpha 0.05"]
    # Few looks have integer ticks, one look as well.
    for looks in (1, 2):
        few = STOPPING._replace(**{x: getattr(STOPPING, x)[:looks] for x in STOPPING._fields[5:]})
        ticks = plots.stopping(few).get_xticks()
        assert len(ticks) and np.all(ticks == np.round(ticks))


def test_selection_has_a_line_for_each_candidate():
    ax = plots.selection(SELECTION)
    assert ax.get_title() == "Chosen: b, LPPD -0.5" and ax.get_xscale() == "log"
    assert legend_of(ax) == ["start: -1.3", *SELECTION.names]
    assert line_of(ax, "start: -1.3").get_ydata() == [-1.3, -1.3]
    expected = {"a": [(10, -1), (20, -0.7)], "b": [(10, -1.1), (20, -0.6)], "far": [(10, -9)]}
    expected["failed"] = []
    colors, at = {}, {}
    for bars in cast(Any, ax.containers):
        line, _, (errors,) = bars.lines
        points = expected.pop(bars.get_label())
        steps, values = np.reshape(points, (-1, 2)).T
        # Candidates of one round are drawn side by side.
        np.testing.assert_allclose(line.get_xdata(), steps, rtol=0.03)
        np.testing.assert_allclose(line.get_ydata(), values)
        at[bars.get_label()] = line.get_xdata()
        colors[bars.get_label()] = line.get_color()
        if bars.get_label() == "b":
            ends = [segment[:, 1] for segment in errors.get_segments()]
            np.testing.assert_allclose(ends, [[-1.15, -1.05], [-0.6, -0.6]])
    assert not expected and len(set(colors.values())) == 4 and at["a"][0] < at["b"][0]
    (star,) = [line for line in lines_of(ax) if line.get_marker() == "*"]
    assert star.get_xydata().tolist() == [[100, -0.5]] and star.get_color() == colors["b"]
    for marker, name in (("x", "failed"), ("v", "far")):
        (mark,) = [x for x in lines_of(ax) if x.get_marker() == marker and len(x.get_xdata())]
        assert mark.get_xdata() == pytest.approx(10, rel=0.03) and mark.get_ydata() == 0
        assert mark.get_color() == colors[name]
    # What is far below does not set the scale.
    low, high = ax.get_ylim()
    assert -1.5 < low < -1.3 and -0.5 < high < -0.4


def test_selection_of_one_round_and_of_none():
    one = SELECTION._replace(
        num_steps=np.array([10]),
        lppd=SELECTION.lppd[:1],
        standard_error=SELECTION.standard_error[:1],
        start_lppd=-7.0,
    )
    ax = plots.selection(one)
    ax.figure.canvas.draw()
    assert ax.get_xscale() == "linear" and -1.2 < ax.get_ylim()[0] < -1.1
    none = SELECTION._replace(
        names=("b",),
        num_steps=np.array([], int),
        lppd=np.zeros((0, 1)),
        standard_error=np.zeros((0, 1)),
        start_lppd=-0.5,
    )
    ax = plots.selection(none)
    ax.figure.canvas.draw()
    assert legend_of(ax) == ["start: -0.5", "b"]


def points_of(ax, num_chains):
    return np.stack([line_of(ax, f"chain {at}").get_xydata() for at in range(num_chains)])


def plane_by_svd(draws, others=None):
    """Coordinates on the two principal axes, up to their signs, and shares of variance."""
    flat = np.asarray(draws, float).reshape(-1, draws.shape[-1])
    _, values, axes = np.linalg.svd(flat - flat.mean(axis=0), full_matrices=False)
    shown = flat if others is None else others
    return (shown - flat.mean(axis=0)) @ axes[:2].T, values[:2] ** 2 / np.sum(values**2)


def test_chain_paths_against_svd():
    for size in (2, 5, 40):
        draws = DRAWS[..., :size]
        ax = plots.chain_paths(draws)
        points = points_of(ax, NUM_CHAINS)
        got, (expected, shares) = points.reshape(-1, 2), plane_by_svd(draws)
        np.testing.assert_allclose(got, expected * np.sign(got[0] * expected[0]), atol=1e-9)
        for share, label in zip(shares, (ax.get_xlabel(), ax.get_ylabel()), strict=True):
            assert f"{100 * share:.1f} %" in label
        assert legend_of(ax)[-2:] == ["first draw", "last draw"]
        for marker, draw in {"x": 0, "o": -1}.items():
            ends = [line.get_xydata() for line in lines_of(ax) if line.get_marker() == marker]
            np.testing.assert_array_equal(np.concatenate(ends), points[:, draw])
        # They begin at the start, which does not turn the plane.
        start = 100 + GENERATOR.normal(size=(NUM_CHAINS, size))
        got = points_of(plots.chain_paths(draws, start=start), NUM_CHAINS)
        expected, _ = plane_by_svd(draws, start)
        np.testing.assert_allclose(np.abs(got[:, 0]), np.abs(expected), rtol=1e-9)
        np.testing.assert_allclose(np.abs(got[:, 1:]), np.abs(points), atol=1e-9)


def test_chain_paths_of_a_tree_in_blocks_of_columns(monkeypatch):
    tree = {"a": DRAWS[..., :6].reshape(NUM_CHAINS, 9, 2, 3), "b": [jnp.asarray(DRAWS[..., 6:])]}
    monkeypatch.setattr(run, "COLUMNS_AT_A_TIME", 7)
    got, (expected, _) = points_of(plots.chain_paths(tree), NUM_CHAINS), plane_by_svd(DRAWS)
    np.testing.assert_allclose(np.abs(got.reshape(-1, 2)), np.abs(expected), atol=1e-4)
    # Without a second direction, or any.
    ax = plots.chain_paths(DRAWS[..., :1])
    assert "(100.0 %" in ax.get_xlabel() and "(0.0 %" in ax.get_ylabel()
    for draws in (np.ones((2, 3, 4)), np.ones((1, 1, 4)), np.ones((2, 9, 2), np.float16)):
        assert not points_of(plots.chain_paths(draws), len(draws)).any()


def begun_at(start):
    return functools.partial(plots.chain_paths, start=start)


NAN = np.where(np.arange(40) == 3, np.nan, DRAWS)
BAD: Any = (
    (plots.rejections, [{}], "'num_rejected', 'num_gradients', got the keys"),
    (plots.energy_error, [make_trace() | {"num_gradients": np.ones((2, 60))}], "one shape"),
    (plots.step_size, [make_trace(2, 0)], "at least one of each"),
    (plots.rejections, [make_trace(2, 1)], "at least 2 ticks"),
    (plots.rejections, [make_trace() | {"num_gradients": np.ones((3, 60))}], "gradients"),
    (plots.regression_band, [None, MEAN, -STD], r"std=...\)` must be .* is a finite number > 0"),
    (plots.regression_band, [MEAN[:9], MEAN, STD], r"inputs=...\)` must be of shape \(12,"),
    (plots.regression_band, [MEAN, MEAN, STD, MEAN[:9]], r"targets=...\)` must be of shape"),
    (plots.entropy, [{"test": -STD}], r"entropies\['test'\]=...\)` must"),
    (plots.examples, [np.ones((12, 2, 2, 5)), MEAN, STD], "images with 1, 3, 4 channels"),
    (
        plots.examples,
        [np.full((12, 2, 2), np.inf), MEAN, STD],
        r"images=...\)` must be .* is a fin",
    ),
    (plots.examples, [IMAGES, MEAN, STD[:9]], r"mean=...\)` must be of 9"),
    (plots.examples, [IMAGES, MEAN[:9], STD], r"uncertainty=...\)` must be of 9"),
    (plots.examples, [IMAGES, PROBABILITIES[:9], STD[:9], LABELS[:9] + 4], "from 0 to 3, got 5"),
    (
        plots.chain_paths,
        [{"a": DRAWS, "b": DRAWS[:, 1:]}],
        r"leading axes.*'b': \(3, 8, 40\)",
    ),
    (plots.chain_paths, [{"a": NAN}], r"nan or inf at \['a'\]"),
    (begun_at(DRAWS[0, 0]), [DRAWS], r"start=...\)` must be .* \(3, 40\)"),
    (begun_at({"a": DRAWS[:, 0]}), [DRAWS], "start"),
    (begun_at(NAN[:, 3]), [DRAWS], r"plots.chain_paths\(start=...\)` must be finite"),
)


def test_what_does_not_fit_together_is_named_before_a_figure_opens():
    for draw, arguments, message in BAD:
        with pytest.raises(ValueError, match=message):
            draw(*arguments)
    assert not plt.get_fignums()


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    for name in "matplotlib", "matplotlib.pyplot":
        monkeypatch.setitem(sys.modules, name, None)
    for draw in DRAW.values():
        with pytest.raises(ImportError, match=r"pip install 'optax-smile\[plots\]'"):
            draw()
