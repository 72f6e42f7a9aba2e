"""Scores against scikit-learn, SciPy's integrals and roots, and counting by hand."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import scipy.integrate
import scipy.optimize
import scipy.stats
import sklearn.metrics

from optax_smile import metrics

PROBABILITIES = np.array(
    [[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4], [0.05, 0.05, 0.9], [0.5, 0.25, 0.25]]
)
LABELS = np.array([0, 1, 0, 2, 1])


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
        assert metrics.nll(density.reshape(2, 20)) == pytest.approx(-expected, abs=1e-12)
        assert metrics.perplexity(density) == pytest.approx(np.exp(-expected), abs=1e-12)
        expected = sklearn.metrics.f1_score(labels, probabilities.argmax(1), average="macro")
        assert metrics.f1(probabilities, labels) == pytest.approx(expected, abs=1e-12)
        expected = sklearn.metrics.roc_auc_score(labels, probabilities, multi_class="ovr")
        assert metrics.auroc(probabilities, labels) == pytest.approx(expected, abs=1e-12)
        brier_score_loss: Any = sklearn.metrics.brier_score_loss
        expected = brier_score_loss(labels, probabilities, labels=classes, scale_by_half=False)
        assert metrics.brier(probabilities, labels) == pytest.approx(expected, abs=1e-12)
        probabilities, labels = tied_predictions(seed, num_classes=2)
        expected = sklearn.metrics.roc_auc_score(labels, probabilities[:, 1])
        assert metrics.auroc(probabilities, labels) == pytest.approx(expected, abs=1e-12)


def test_f1_leaves_out_a_class_that_never_occurs():
    probabilities = np.eye(5)[[0, 0, 1, 2]]  # 3 is a label but never predicted, 4 neither
    labels = np.array([0, 1, 1, 3])
    by_class = [2 / 3, 2 / 3, 0, 0]
    assert metrics.f1(probabilities, labels) == pytest.approx(np.mean(by_class), abs=1e-12)


def test_perplexity_counts_tokens_of_the_mask_only():
    log_density = np.log([[0.5, 0.25], [0.125, np.nan]])
    mask = np.array([[True, True], [True, False]])
    assert metrics.perplexity(log_density, mask) == pytest.approx(4, abs=1e-12)  # (2 · 4 · 8)^1/3
    assert metrics.perplexity(np.full((3, 7), -np.log(50))) == pytest.approx(50, abs=1e-10)
    assert metrics.perplexity([-1e6]) == math.inf
    # An impossible target is no error.
    assert metrics.lppd([-1.0, -np.inf]) == -math.inf and metrics.nll([-np.inf]) == math.inf


def test_rmse_agrees_with_scikit_learn():
    mean, _, targets = random_normals(0)
    expected = sklearn.metrics.root_mean_squared_error(targets, mean[0])
    assert metrics.rmse(mean[0], targets) == pytest.approx(expected, abs=1e-12)


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


def test_ece_by_hand():
    # Bins of .2: (.3, .3, .4) and (.5, ...) are wrong with confidence .4 (bin 2) and .5 (bin 3),
    # .7 and .8 are right (bin 4 holds both), .9 is right (bin 5).
    expected = (0.4 + 0.5 + 2 * abs(1 - 0.75) + abs(1 - 0.9)) / 5
    assert metrics.ece(PROBABILITIES, LABELS, num_bins=5) == pytest.approx(expected, abs=1e-12)
    bins = metrics.reliability(PROBABILITIES, LABELS, num_bins=5)
    assert bins.count.tolist() == [0, 1, 1, 2, 1]
    np.testing.assert_allclose(bins.confidence[1:], [0.4, 0.5, 0.75, 0.9])
    np.testing.assert_array_equal(bins.accuracy, [np.nan, 0, 0, 1, 1])
    # Guo et al. have 15.
    assert metrics.reliability(PROBABILITIES, LABELS).count.size == 15
    assert metrics.ece(np.eye(3), [0, 1, 2]) == 0 and metrics.ece(np.eye(3), [1, 2, 0]) == 1


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


def test_equal_mass_counts_differ_by_one_at_most():
    for num_inputs, num_bins in itertools.product((1, 2, 7, 41), (1, 2, 3, 7, 40)):
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


def test_entropy_by_hand():
    got = metrics.entropy([[1.0, 0.0], [0.5, 0.5], [0.25, 0.75]])
    expected = [0.0, np.log(2), -0.25 * np.log(0.25) - 0.75 * np.log(0.75)]
    np.testing.assert_allclose(got, expected, atol=1e-12)


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
    assert metrics.fpr95(inside, [np.inf]) == 0


@pytest.mark.parametrize("level", [0.1, 0.95, 0.999_999])
@pytest.mark.parametrize("spread", [1, 1e4])
def test_interval_of_a_mixture_against_root_finding(level, spread):
    mean, std, _ = random_normals(1)
    expected = scipy.stats.norm(mean[0], std[0]).interval(level)
    np.testing.assert_allclose(metrics.interval(mean[0], std[0], level), expected, rtol=1e-9)
    mean[0] *= spread
    got = np.array(metrics.interval(mean, std, level))
    reach = 10 + 1.5 * np.abs(mean).max()
    for column, end in itertools.product(range(5), (0, 1)):
        probability = (1 - level) / 2 if end == 0 else (1 + level) / 2
        parameters = mixture_cdf(mean, std, column), probability
        root: Any = scipy.optimize.brentq(lambda x, f, p: f(x) - p, -reach, reach, args=parameters)
        assert got[end, column] == pytest.approx(root, rel=1e-7)
    assert metrics.interval([0.0], 1e-300)[1] > 0  # zero in float32


def test_a_standard_deviation_may_be_shared():
    mean, _, targets = random_normals(2)
    by_draw = np.linspace(0.5, 2, len(mean))[:, None]
    pairs = [(by_draw, np.broadcast_to(by_draw, mean.shape)), (0.7, np.full(mean.shape, 0.7))]
    for shared, full in pairs:
        expected = metrics.interval(mean, full, 0.95)
        np.testing.assert_array_equal(metrics.interval(mean, shared), expected)
        assert metrics.crps(mean, shared, targets) == metrics.crps(mean, full, targets)


def test_coverage_and_width_by_hand():
    lower, upper = [0.0, 0.0, -1.0, 2.0], [1.0, 1.0, 1.0, 5.0]
    assert metrics.coverage(lower, upper, [0.0, 1.0, 1.1, 3.0]) == 0.75
    assert metrics.interval_width(lower, upper) == (1 + 1 + 2 + 3) / 4


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
        distance = np.mean(np.abs(mean[0] - targets))
        assert metrics.crps(mean, 1e-9, targets) == pytest.approx(distance, abs=1e-8)


ONES, CLASSES = np.ones(4), PROBABILITIES
MIXTURE = np.ones((7, 5))


@pytest.mark.parametrize(
    ("score", "arguments", "message"),
    [
        (metrics.entropy, (CLASSES * 2,), "(probabilities=.*rows that sum to 1, got a sum of"),
        (metrics.aurc, (CLASSES, LABELS - 1), "(labels=.*classes from 0 to 2, got -1 to 1"),
        (metrics.ece, (CLASSES, LABELS[:2]), r"(labels=.*integers of shape \(5,\)"),
        (metrics.accuracy, (CLASSES, LABELS * 1.0), "(labels=.*integers .* got float64"),
        (metrics.auroc, (CLASSES, LABELS * 0), "(labels=.*every class .* none of class 1"),
        (metrics.auroc, ([[1.0]], [0]), "(probabilities=.*of two classes or more"),
        (metrics.perplexity, ([-1.0, np.nan],), r"(log_density=.*not NaN, got nan at \(1,\)"),
        (metrics.perplexity, (-ONES, [True]), r"(mask=.*of shape \(4,\) to go with"),
        (metrics.perplexity, (-ONES, ONES < 0), "(mask=.*True for one token or more"),
        (metrics.interval, (MIXTURE, MIXTURE[0]), r"(std=.*scalar or of shape \(7, 5\) or \(7, 1"),
        (metrics.crps, (MIXTURE, 1.0, MIXTURE), r"(targets=.*shape \(5,\) to go with `mean`"),
        (metrics.coverage, (ONES, ONES, ONES[:, None]), r"(targets=.*to go with `lower`"),
        (metrics.coverage, (ONES, ONES - 1, ONES), "(upper=.*not below `lower`, got 0.0 above 1.0"),
    ],
)
def test_arguments_that_do_not_fit(score, arguments, message):
    with pytest.raises(ValueError, match=rf"`{score.__name__}\{message}"):
        score(*arguments)
