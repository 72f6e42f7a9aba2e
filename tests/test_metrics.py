import itertools
import math
import re
from typing import Any

import numpy as np
import pytest
import scipy.integrate
import scipy.optimize
import scipy.stats
import sklearn.metrics
from hypothesis import given, settings
from hypothesis import strategies as st

from optax_smile import metrics

PROBABILITIES = np.array(
    [[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4], [0.05, 0.05, 0.9], [0.5, 0.25, 0.25]]
)
LABELS = np.array([0, 1, 0, 2, 1])


def mass_ece(probabilities, labels):
    return metrics.ece(probabilities, labels, num_bins=7, equal="mass")


SCORES = [  # and the largest value
    (metrics.accuracy, 1),
    (metrics.f1, 1),
    (metrics.auroc, 1),
    (metrics.brier, 2),
    (metrics.ece, 1),
    (mass_ece, 1),
    (metrics.aurc, 1),
]


def random_predictions(seed, num_inputs=40, num_classes=4):
    generator = np.random.default_rng(seed)
    probabilities = generator.dirichlet(np.ones(num_classes), num_inputs)
    return probabilities, generator.integers(0, num_classes, num_inputs)


def tied_predictions(seed, num_inputs=40, num_classes=4):
    """Probabilities are multiples of a tenth, so that many are equal; every class occurs."""
    generator = np.random.default_rng(seed)
    tenths = generator.multinomial(10, np.ones(num_classes) / num_classes, num_inputs)
    labels = np.arange(num_inputs) % num_classes
    return tenths / 10, generator.permutation(labels)


def random_normals(seed, num_draws=7, num_inputs=5):
    generator = np.random.default_rng(seed)
    mean = generator.normal(0, 2, (num_draws, num_inputs))
    return mean, generator.uniform(0.2, 2, mean.shape), generator.normal(0, 3, num_inputs)


def mixture_cdf(mean, std, column):
    parts = scipy.stats.norm(mean[:, column], std[:, column])
    return lambda x: float(parts.cdf(x).mean())


@pytest.mark.parametrize("predictions", [random_predictions, tied_predictions])
def test_scores_agree_with_scikit_learn(predictions):
    for seed in range(5):
        probabilities, labels = predictions(seed)
        probabilities = 0.999 * probabilities + 0.00025  # none is zero, so logarithms are finite
        classes = np.arange(4)
        assert metrics.accuracy(probabilities, labels) == sklearn.metrics.accuracy_score(
            labels, probabilities.argmax(1)
        )
        density = np.log(probabilities[np.arange(40), labels])
        expected = -sklearn.metrics.log_loss(labels, probabilities, labels=classes)
        assert metrics.lppd(density) == pytest.approx(expected, abs=1e-12)
        assert metrics.nll(density) == pytest.approx(-expected, abs=1e-12)
        assert metrics.perplexity(density) == pytest.approx(np.exp(-expected), abs=1e-12)
        expected = sklearn.metrics.f1_score(labels, probabilities.argmax(1), average="macro")
        assert metrics.f1(probabilities, labels) == pytest.approx(expected, abs=1e-12)
        expected = sklearn.metrics.roc_auc_score(labels, probabilities, multi_class="ovr")
        assert metrics.auroc(probabilities, labels) == pytest.approx(expected, abs=1e-12)
        brier_score_loss: Any = sklearn.metrics.brier_score_loss
        expected = brier_score_loss(labels, probabilities, labels=classes, scale_by_half=False)
        assert metrics.brier(probabilities, labels) == pytest.approx(expected, abs=1e-12)


def test_auroc_of_two_classes_agrees_with_scikit_learn():
    for seed in range(5):
        probabilities, labels = tied_predictions(seed, num_classes=2)
        expected = sklearn.metrics.roc_auc_score(labels, probabilities[:, 1])
        assert metrics.auroc(probabilities, labels) == pytest.approx(expected, abs=1e-12)


def test_f1_leaves_out_a_class_that_never_occurs():
    probabilities = np.eye(5)[[0, 0, 1, 2]]  # 3 is a label but never predicted, 4 neither
    labels = np.array([0, 1, 1, 3])
    by_class = [2 / 3, 2 / 3, 0, 0]
    assert metrics.f1(probabilities, labels) == pytest.approx(np.mean(by_class), abs=1e-12)
    expected = sklearn.metrics.f1_score(labels, [0, 0, 1, 2], average="macro")
    assert metrics.f1(probabilities, labels) == pytest.approx(expected, abs=1e-12)


def test_perplexity_counts_tokens_of_the_mask_only():
    log_density = np.log([[0.5, 0.25], [0.125, np.nan]])
    mask = np.array([[True, True], [True, False]])
    assert metrics.perplexity(log_density, mask) == pytest.approx(4, abs=1e-12)  # (2 · 4 · 8)^1/3
    assert metrics.perplexity(np.full((3, 7), -np.log(50))) == pytest.approx(50, abs=1e-10)
    assert metrics.perplexity([-1e6]) == math.inf


def test_loss_of_single_draws_is_above_that_of_their_average():
    density = np.random.default_rng(0).uniform(0.1, 1, (8, 20))  # [draw, input]
    single = metrics.nll(np.log(density))
    assert single == pytest.approx(-np.log(density).sum() / 160, abs=1e-12)
    assert single > metrics.nll(np.log(density.mean(axis=0))) + 0.1


def test_rmse_agrees_with_scikit_learn():
    mean, _, targets = random_normals(0)
    expected = sklearn.metrics.root_mean_squared_error(targets, mean[0])
    assert metrics.rmse(mean[0], targets) == pytest.approx(expected, abs=1e-12)
    assert metrics.rmse(targets, targets) == 0


def test_risk_coverage_is_the_mean_over_orders_of_equal_confidences():
    confidence = np.array([0.6, 0.9, 0.6, 0.6, 0.8, 0.8, 0.7])
    wrong = np.array([1, 0, 0, 1, 1, 0, 1])
    curves = []
    for order in map(list, itertools.permutations(range(7))):
        falling = sorted(order, key=lambda row: -confidence[row])  # stable: ties as in `order`
        curves.append([wrong[falling[:k]].mean() for k in range(1, 8)])
    probabilities = np.stack([confidence, 1 - confidence], axis=1)
    got = metrics.risk_coverage(probabilities, wrong)
    np.testing.assert_allclose(got.risk, np.mean(curves, axis=0), atol=1e-12)
    np.testing.assert_allclose(got.coverage, np.arange(1, 8) / 7, atol=1e-12)
    assert metrics.aurc(probabilities, wrong) == pytest.approx(np.mean(curves), abs=1e-12)


def test_aurc_by_hand():
    # Falling: .9 right, .8 right, .7 right, .5 wrong, .4 wrong.
    expected = np.mean([0, 0, 0, 1 / 4, 2 / 5])
    assert metrics.aurc(PROBABILITIES, LABELS) == pytest.approx(expected, abs=1e-12)


def test_aurc_of_a_constant_confidence_is_the_error_rate():
    probabilities = np.tile([0.6, 0.4], (10, 1))
    labels = (np.arange(10) >= 7).astype(int)
    assert metrics.aurc(probabilities, labels) == pytest.approx(0.3, abs=1e-12)
    assert metrics.aurc(probabilities, np.ones(10, int)) == 1


def test_a_predictor_that_knows_nothing():
    """The bounds are four standard errors or more, each at most .006; the seeds are fixed."""
    probabilities, labels = random_predictions(0, num_inputs=10_000)
    assert metrics.auroc(probabilities, labels) == pytest.approx(0.5, abs=0.025)
    assert metrics.aurc(probabilities, labels) == pytest.approx(0.75, abs=0.025)
    assert metrics.f1(probabilities, labels) == pytest.approx(0.25, abs=0.025)
    inside, outside = np.random.default_rng(0).normal(size=(2, 10_000))
    assert metrics.ood_auroc(inside, outside) == pytest.approx(0.5, abs=0.025)
    assert metrics.fpr95(inside, outside) == pytest.approx(0.95, abs=0.025)


@pytest.mark.parametrize("num_bins", [1, 3, 8, 40])
def test_equal_mass_against_a_sorted_split(num_bins):
    probabilities, labels = random_predictions(1, num_inputs=120)
    confidence = probabilities.max(axis=1)
    right = probabilities.argmax(axis=1) == labels
    parts = np.array_split(np.argsort(confidence), num_bins)
    bins = metrics.reliability(probabilities, labels, num_bins, equal="mass")
    np.testing.assert_allclose(bins.confidence, [confidence[p].mean() for p in parts], atol=1e-12)
    np.testing.assert_allclose(bins.accuracy, [right[p].mean() for p in parts], atol=1e-12)
    expected = np.mean([abs(right[p].mean() - confidence[p].mean()) for p in parts])
    got = metrics.ece(probabilities, labels, num_bins, equal="mass")
    assert got == pytest.approx(expected, abs=1e-12)


@settings(deadline=None, max_examples=30)
@given(num_inputs=st.integers(1, 60), num_bins=st.integers(1, 40))
def test_equal_mass_counts_differ_by_one_at_most(num_inputs, num_bins):
    predictions = random_predictions(num_inputs, num_inputs)
    count = metrics.reliability(*predictions, num_bins, equal="mass").count
    assert count.sum() == num_inputs and count.max() - count.min() <= 1


def test_equal_mass_keeps_equal_confidences_together():
    probabilities = np.array([[0.6, 0.4]] * 5 + [[0.8, 0.2]] * 3)
    bins = metrics.reliability(probabilities, [0, 1] * 4, num_bins=4, equal="mass")
    assert sorted(bins.count.tolist()) == [0, 0, 3, 5]
    # 3 of 5 right at .6, 1 of 3 right at .8: errors 0 and .8 - 1/3.
    expected = 3 / 8 * (0.8 - 1 / 3)
    got = metrics.ece(probabilities, [0, 1] * 4, num_bins=4, equal="mass")
    assert got == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("decimals", [0, 8])
@pytest.mark.parametrize("num_inputs", [1, 19, 20, 21, 100, 237])
def test_scores_outside_the_distribution_agree_with_scikit_learn(num_inputs, decimals):
    generator = np.random.default_rng(num_inputs)
    inside = generator.normal(0, 1, num_inputs).round(decimals)
    outside = generator.normal(1, 2, 150).round(decimals)
    is_inside = np.repeat([True, False], [num_inputs, 150])
    score = np.concatenate([inside, outside])
    expected = sklearn.metrics.roc_auc_score(~is_inside, score)
    assert metrics.ood_auroc(inside, outside) == pytest.approx(expected, abs=1e-12)
    fpr, tpr, _ = sklearn.metrics.roc_curve(is_inside, -score, drop_intermediate=False)
    expected = fpr[np.argmax(tpr >= 0.95)]
    assert metrics.fpr95(inside, outside) == pytest.approx(expected, abs=1e-12)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000))
def test_monotone_transforms_leave_rankings_alone(seed):
    generator = np.random.default_rng(seed)
    inside, outside = generator.normal(0, 1, 30).round(1), generator.normal(1, 1, 50).round(1)
    for score in (metrics.ood_auroc, metrics.fpr95):
        assert score(np.exp(inside), np.exp(outside)) == score(inside, outside)
    assert metrics.ood_auroc(outside, inside) == pytest.approx(
        1 - metrics.ood_auroc(inside, outside), abs=1e-12
    )
    probabilities, labels = tied_predictions(seed, num_classes=2)
    squared = np.stack([1 - probabilities[:, 1] ** 2, probabilities[:, 1] ** 2], axis=1)
    assert metrics.auroc(squared, labels) == metrics.auroc(probabilities, labels)


def test_ranking_of_separated_scores():
    assert metrics.ood_auroc([0.0, 1.0], [2.0, 3.0]) == 1
    assert metrics.ood_auroc([2.0, 3.0], [0.0, 1.0]) == 0
    assert metrics.ood_auroc([1.0, 1.0], [1.0]) == 0.5
    assert metrics.fpr95([0.0, 1.0], [2.0, np.inf]) == 0
    assert metrics.fpr95([2.0, 3.0], [0.0, 1.0]) == 1


@pytest.mark.parametrize("level", [0.1, 0.95, 0.999_999])
def test_interval_of_a_normal(level):
    mean, std, _ = random_normals(0)
    lower, upper = metrics.interval(mean[0], std[0], level)
    expected = scipy.stats.norm(mean[0], std[0]).interval(level)
    np.testing.assert_allclose((lower, upper), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("level", [0.1, 0.95, 0.999_999])
@pytest.mark.parametrize("spread", [1, 1e4])
def test_interval_of_a_mixture_against_root_finding(level, spread):
    mean, std, _ = random_normals(1)
    mean[0] *= spread
    got = np.array(metrics.interval(mean, std, level))
    reach = 10 + 1.5 * np.abs(mean).max()
    for column, end in itertools.product(range(5), (0, 1)):
        probability = (1 - level) / 2 if end == 0 else (1 + level) / 2
        parameters = mixture_cdf(mean, std, column), probability
        root: Any = scipy.optimize.brentq(lambda x, f, p: f(x) - p, -reach, reach, args=parameters)
        assert got[end, column] == pytest.approx(root, rel=1e-7)


def test_a_standard_deviation_may_be_shared():
    mean, _, targets = random_normals(2)
    by_draw = np.linspace(0.5, 2, len(mean))[:, None]
    pairs = [(by_draw, np.broadcast_to(by_draw, mean.shape)), (0.7, np.full(mean.shape, 0.7))]
    for shared, full in pairs:
        np.testing.assert_array_equal(metrics.interval(mean, shared), metrics.interval(mean, full))
        assert metrics.crps(mean, shared, targets) == metrics.crps(mean, full, targets)
    with pytest.raises(ValueError, match=r"of shape \(7, 5\) or \(7, 1\), got shape \(5,\)"):
        metrics.interval(mean, np.ones(5))


def test_coverage_and_width_by_hand():
    lower, upper = [0.0, 0.0, -1.0, 2.0], [1.0, 1.0, 1.0, 5.0]
    assert metrics.coverage(lower, upper, [0.0, 1.0, 1.1, 3.0]) == 0.75
    assert metrics.interval_width(lower, upper) == (1 + 1 + 2 + 3) / 4


def test_intervals_cover_what_they_promise():
    """The bound is five standard errors of a share of 40 000."""
    generator = np.random.default_rng(0)
    mean, std, _ = random_normals(3)
    drawn = generator.integers(0, 7, 40_000), generator.integers(0, 5, 40_000)
    targets = generator.normal(mean[drawn], std[drawn])
    lower, upper = metrics.interval(mean, std, 0.8)
    share = metrics.coverage(lower[drawn[1]], upper[drawn[1]], targets)
    assert share == pytest.approx(0.8, abs=5 * np.sqrt(0.8 * 0.2 / 40_000))


@pytest.mark.parametrize("num_draws", [1, 7])
def test_crps_against_its_integral(num_draws):
    mean, std, targets = random_normals(4, num_draws)
    expected = []
    for column, target in enumerate(targets):
        cdf = mixture_cdf(mean, std, column)
        below, _ = scipy.integrate.quad(lambda x, f: f(x) ** 2, -40, target, (cdf,), limit=200)
        above, _ = scipy.integrate.quad(lambda x, f: (1 - f(x)) ** 2, target, 40, (cdf,), limit=200)
        expected.append(below + above)
    assert metrics.crps(mean, std, targets) == pytest.approx(np.mean(expected), abs=1e-7)
    if num_draws == 1:
        got = metrics.crps(mean[0], std[0], targets)
        assert got == pytest.approx(np.mean(expected), abs=1e-7)


def test_crps_limits():
    mean, std, targets = random_normals(5, num_draws=1)
    repeated = metrics.crps(np.repeat(mean, 4, axis=0), np.repeat(std, 4, axis=0), targets)
    assert repeated == pytest.approx(metrics.crps(mean, std, targets), abs=1e-12)
    distance = np.mean(np.abs(mean[0] - targets))
    assert metrics.crps(mean, 1e-9, targets) == pytest.approx(distance, abs=1e-8)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000), scale=st.floats(0.1, 10))
def test_regression_scores_follow_order_and_units(seed, scale):
    mean, std, targets = random_normals(seed)
    generator = np.random.default_rng(seed)
    draws, inputs = generator.permutation(7), generator.permutation(5)
    value = metrics.crps(mean, std, targets)
    assert 0 <= value <= np.mean(np.abs(mean - targets)) + std.max()
    moved = (scale * x + 3 for x in (mean[draws][:, inputs], targets[inputs]))
    moved_mean, moved_targets = moved
    moved_std = scale * std[draws][:, inputs]
    assert metrics.crps(moved_mean, moved_std, moved_targets) == pytest.approx(scale * value)
    ends = np.array(metrics.interval(mean, std))
    assert (ends[0] < ends[1]).all()
    moved_ends = np.array(metrics.interval(moved_mean, moved_std))
    np.testing.assert_allclose(moved_ends, scale * ends[:, inputs] + 3, rtol=1e-9, atol=1e-9)


def test_ece_by_hand():
    # Bins of .2: (.3, .3, .4) and (.5, ...) are wrong with confidence .4 (bin 2) and .5 (bin 3),
    # .7 and .8 are right (bin 4 holds both), .9 is right (bin 5).
    expected = (0.4 + 0.5 + 2 * abs(1 - 0.75) + abs(1 - 0.9)) / 5
    assert metrics.ece(PROBABILITIES, LABELS, num_bins=5) == pytest.approx(expected, abs=1e-12)
    bins = metrics.reliability(PROBABILITIES, LABELS, num_bins=5)
    assert bins.count.tolist() == [0, 1, 1, 2, 1]
    assert np.isnan(bins.accuracy[0])


def test_entropy_by_hand():
    got = metrics.entropy([[1.0, 0.0], [0.5, 0.5], [0.25, 0.75]])
    expected = [0.0, np.log(2), -0.25 * np.log(0.25) - 0.75 * np.log(0.75)]
    np.testing.assert_allclose(got, expected, atol=1e-12)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000), order=st.integers(0, 10_000))
def test_order_of_rows_and_classes_does_not_matter(seed, order):
    generator = np.random.default_rng(order)
    rows, classes = generator.permutation(40), generator.permutation(4)
    for predictions in (random_predictions, tied_predictions):
        probabilities, labels = predictions(seed)
        labels[:4] = range(4)  # every class occurs
        if predictions is tied_predictions:  # the first of equal classes is predicted: keep names
            classes = np.arange(4)
        moved = probabilities[rows][:, classes], np.argsort(classes)[labels[rows]]
        for score, largest in SCORES:
            value = score(probabilities, labels)
            assert 0 <= value <= largest + 1e-12
            assert score(*moved) == pytest.approx(value, abs=1e-12)


def test_perfect_predictor():
    probabilities = np.eye(3)[LABELS]
    for score in (metrics.accuracy, metrics.f1, metrics.auroc):
        assert score(probabilities, LABELS) == 1
    for score in (metrics.brier, metrics.ece, mass_ece, metrics.aurc):
        assert score(probabilities, LABELS) == 0


@pytest.mark.parametrize(
    ("probabilities", "labels", "message"),
    [
        (PROBABILITIES[0], LABELS, "an array \\[input, class\\], not empty, got shape \\(3,\\)"),
        (PROBABILITIES * 2, LABELS, "rows that sum to 1, got a sum of (2.0|1.99)"),
        (PROBABILITIES * np.nan, LABELS, ">= 0, got nan at \\(0, 0\\)"),
        (PROBABILITIES, LABELS + 1, "classes from 0 to 2, got 1 to 3"),
        (PROBABILITIES, LABELS[:2], "integers of shape \\(5,\\)"),
        (PROBABILITIES, LABELS * 1.0, "integers of shape \\(5,\\), got float64"),
        ([[1.5, -0.5]], [0], ">= 0, got -0.5 at \\(0, 1\\)"),
        (np.ones((0, 3)), np.ones(0, int), "not empty, got shape \\(0, 3\\)"),
    ],
)
def test_bad_predictions(probabilities, labels, message):
    for score, _ in SCORES:
        with pytest.raises(ValueError, match=message):
            score(probabilities, labels)


ONES = np.ones(4)


@pytest.mark.parametrize(
    ("score", "arguments", "message"),
    [
        (
            metrics.lppd,
            ([-1.0, np.nan],),
            "`lppd(log_density=...)` must be below infinity",
        ),
        (
            metrics.nll,
            ([[-1.0], [np.nan]],),
            "`nll(log_density=...)` must be below infinity",
        ),
        (metrics.nll, ([],), "`nll(log_density=...)` must be not empty, got shape (0,)"),
        (metrics.perplexity, ([-1.0, np.nan],), "below infinity, not NaN, got nan at (1,)"),
        (metrics.perplexity, ([],), "`perplexity(log_density=...)` must be not empty"),
        (
            metrics.perplexity,
            (-ONES, ONES),
            "booleans of shape (4,), that of `log_density`, got float64 of shape (4,)",
        ),
        (
            metrics.perplexity,
            (-ONES, [True]),
            "booleans of shape (4,), that of `log_density`, got bool of shape (1,)",
        ),
        (metrics.perplexity, (-ONES, ONES < 0), "True for one token or more, got False for all"),
        (metrics.rmse, (ONES[:, None], ONES), "`rmse(targets=...)` must be of shape (4, 1) to go"),
        (metrics.rmse, (ONES, ONES * np.nan), "`rmse(targets=...)` must be finite, got nan"),
        (
            metrics.auroc,
            (PROBABILITIES, LABELS * 0),
            "every class from 0 to 2, got none of class 1",
        ),
        (metrics.auroc, ([[1.0]], [0]), "of two classes or more, got one class"),
        (metrics.ece, (PROBABILITIES, LABELS, 0), "(num_bins=...)` must be an integer >= 1, got 0"),
        (metrics.ece, (PROBABILITIES, LABELS, 5, "size"), "one of 'width', 'mass', got 'size'"),
        (metrics.ood_auroc, (ONES, []), "`ood_auroc(outside=...)` must be an array [input], not"),
        (metrics.ood_auroc, (ONES, [np.nan]), "`ood_auroc(outside=...)` must be free of NaN"),
        (
            metrics.fpr95,
            (ONES[None], ONES),
            "(inside=...)` must be an array [input], not empty, got",
        ),
        (metrics.interval, (ONES, 0.0), "`interval(std=...)` must be > 0 and finite, got 0.0"),
        (metrics.interval, (ONES, ONES, 1.0), "`interval(level=...)` must be between 0 and 1"),
        (metrics.interval, (1.0, 1.0), "an array [input] or [draw, input], not empty, got sh"),
        (metrics.interval, (ONES * np.inf, 1.0), "`interval(mean=...)` must be finite, got inf"),
        (metrics.interval, (ONES, ONES[:2]), "a scalar or of shape (4,) or (1,), got shape (2,)"),
        (metrics.coverage, (ONES, ONES, ONES[:, None]), "(4,) to go with `lower`, got shape (4,"),
        (metrics.interval_width, (ONES, ONES[:1]), "`interval_width(upper=...)` must be of shape"),
        (metrics.crps, (ONES, ONES, ONES[:1]), "`crps(targets=...)` must be of shape (4,) to"),
        (metrics.crps, (ONES, ONES, ONES * np.nan), "`crps(targets=...)` must be finite, got nan"),
    ],
)
def test_bad_input(score, arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        score(*arguments)
