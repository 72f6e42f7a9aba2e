"""Scores against scikit-learn, SciPy's integrals and roots, and counting by hand."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import scipy.integrate
import scipy.optimize
import scipy.special
import scipy.stats
import sklearn.metrics

import optax_smile
from optax_smile import metrics

PROBABILITIES = np.array(
    [[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4], [0.05, 0.05, 0.9], [0.5, 0.25, 0.25]]
)
LABELS = np.array([0, 1, 0, 2, 1])


def predictions(seed, is_tied, num_classes=4):
    """For 40 inputs; probabilities are multiples of a tenth if many are to be equal."""
    generator = np.random.default_rng(seed)
    probabilities = generator.dirichlet(np.ones(num_classes), 40)
    tenths = generator.multinomial(10, np.ones(num_classes) / num_classes, 40) / 10
    labels = generator.permutation(np.arange(40) % num_classes)
    return (tenths if is_tied else probabilities), labels


def random_normals(seed, num_draws=7, num_inputs=5):
    generator = np.random.default_rng(seed)
    mean = generator.normal(0, 2, (num_draws, num_inputs))
    return mean, generator.uniform(0.2, 2, mean.shape), generator.normal(0, 3, num_inputs)


def mixture_cdf(mean, std, column):
    return lambda x: float(scipy.stats.norm.cdf(x, mean[:, column], std[:, column]).mean())


def test_scores_agree_with_scikit_learn():
    theirs: Any = sklearn.metrics
    for is_tied, seed in itertools.product((False, True), range(5)):
        probabilities, labels = predictions(seed, is_tied)
        probabilities = 0.999 * probabilities + 0.00025  # none is zero, so logarithms are finite
        density, best = np.log(probabilities[np.arange(40), labels]), probabilities.argmax(1)
        every: dict[str, Any] = {"labels": np.arange(4)}
        loss = theirs.log_loss(labels, probabilities, **every)
        brier = theirs.brier_score_loss(labels, probabilities, **every, scale_by_half=False)
        two, binary = predictions(seed, True, num_classes=2)
        area = theirs.roc_auc_score(labels, probabilities, multi_class="ovr")
        for found, expected in (
            (metrics.accuracy(probabilities, labels), theirs.accuracy_score(labels, best)),
            (metrics.f1(probabilities, labels), theirs.f1_score(labels, best, average="macro")),
            (metrics.auroc(probabilities, labels), area),
            (metrics.auroc(two, binary), theirs.roc_auc_score(binary, two[:, 1])),
            (metrics.brier(probabilities, labels), brier),
            (metrics.lppd(density), -loss),
            (metrics.perplexity(density), np.exp(loss)),
        ):
            assert found == pytest.approx(expected, abs=1e-12)
    mean, _, targets = random_normals(0)
    value = theirs.root_mean_squared_error(targets, mean[0])
    assert metrics.rmse(mean[0], targets) == pytest.approx(value, abs=1e-12)


def test_padding_does_not_count():
    """It is NaN beside other tokens; NaN of an input is an error."""
    log_density = np.log([[0.5, 0.25], [0.125, np.nan]])
    assert metrics.lppd(log_density) == pytest.approx(-np.log(4), abs=1e-12)
    assert metrics.perplexity(log_density) == pytest.approx(4, abs=1e-12)  # (2 · 4 · 8)^1/3
    # An impossible target is no error.
    assert metrics.perplexity([-1e6]) == math.inf and metrics.lppd([-1.0, -np.inf]) == -math.inf


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
    np.testing.assert_allclose(bins.confidence, [np.nan, 0.4, 0.5, 0.75, 0.9])
    np.testing.assert_array_equal(bins.accuracy, [np.nan, 0, 0, 1, 1])
    assert metrics.reliability(PROBABILITIES, LABELS).count.size == 15  # as Guo et al.
    assert metrics.ece(np.eye(3), [0, 1, 2]) == 0 and metrics.ece(np.eye(3), [1, 2, 0]) == 1


def test_scores_outside_the_distribution_agree_with_scikit_learn():
    for num_inputs, decimals in itertools.product((1, 19, 20, 21, 100, 237), (0, 8)):
        generator = np.random.default_rng(num_inputs)
        inside = generator.normal(0, 1, num_inputs).round(decimals)
        outside = generator.normal(1, 2, 150).round(decimals)
        given = np.repeat([1, 0], [num_inputs, 150]), -np.concatenate([inside, outside])
        expected = sklearn.metrics.roc_auc_score(*given)
        assert metrics.ood_auroc(inside, outside) == pytest.approx(expected, abs=1e-12)
    assert metrics.ood_auroc([-np.inf, 0], [0, np.inf]) == 7 / 8


def test_interval_of_a_mixture_against_root_finding():
    for level, spread in itertools.product((0.1, 0.95, 0.999_999), (1, 1e4)):
        mean, std, _ = random_normals(1)
        expected = scipy.stats.norm(mean[0], std[0]).interval(level)
        np.testing.assert_allclose(metrics.interval(mean[0], std[0], level), expected, rtol=1e-9)
        mean[0] *= spread
        got = np.array(metrics.interval(mean, std, level))
        reach = 10 + 1.5 * np.abs(mean).max()
        for column, (end, sign) in itertools.product(range(5), enumerate((-1, 1))):
            given = mixture_cdf(mean, std, column), (1 + sign * level) / 2
            root: Any = scipy.optimize.brentq(lambda x, f, p: f(x) - p, -reach, reach, args=given)
            assert got[end, column] == pytest.approx(root, rel=1e-7)
    assert metrics.interval([0.0], 1e-300)[1] > 0  # zero in float32


def test_crps_against_its_integral():
    integral: Any = scipy.integrate.quad
    for num_draws in (7, 1):
        mean, std, targets = random_normals(4, num_draws)
        parts = []
        for column, target in enumerate(targets):
            cdf = mixture_cdf(mean, std, column)
            parts.append(integral(lambda x, f: f(x) ** 2, -40, target, (cdf,), limit=200)[0])
            parts.append(integral(lambda x, f: (1 - f(x)) ** 2, target, 40, (cdf,), limit=200)[0])
        expected = np.sum(parts) / len(targets)
        assert metrics.crps(mean, std, targets) == pytest.approx(expected, abs=1e-7)
    assert metrics.crps(mean[0], std[0], targets) == pytest.approx(expected, abs=1e-7)
    distance = np.mean(np.abs(mean[0] - targets))
    assert metrics.crps(mean, 1e-9, targets) == pytest.approx(distance, abs=1e-8)


def test_arguments_that_do_not_fit():
    ones = np.ones(4)
    wrong: list[Any] = [
        (metrics.accuracy, (PROBABILITIES * 2, LABELS), "(probabilities=.*sum to 1, got a sum of"),
        (metrics.aurc, (PROBABILITIES, LABELS - 1), "(labels=.*classes from 0 to 2, got -1 to 1"),
        (metrics.auroc, (PROBABILITIES, LABELS * 0), r"(labels=.*every class.* \[5, 0, 0\]"),
        (metrics.perplexity, ([-1.0, np.nan],), r"(log_density=.*not NaN, got nan at \(1,\)"),
        (metrics.lppd, (np.full((2, 2), np.nan),), "(log_density=.*a non-empty array"),
        (metrics.coverage, (ones, ones - 1, ones), "(upper=.*>= `lower`.* 0.0 where `lower` is 1"),
        (metrics.coverage, (ones * np.inf,) * 2 + (ones,), "(upper=.*`lower` < inf.*, got inf"),
    ]
    for score, arguments, message in wrong:
        with pytest.raises(ValueError, match=rf"`{score.__name__}\{message}"):
            score(*arguments)


def test_score_has_the_nll_of_single_draws():
    rng = np.random.default_rng(0)
    draws = optax_smile.Snapshots(rng.normal(size=(2, 5, 3)).astype("float32"))
    given: dict[str, Any] = {"likelihood": "categorical", "targets": LABELS}
    logits = rng.normal(size=(5, 3)).astype("float32")
    found = optax_smile.predict(lambda w, x: w[None] * x, draws, logits, per="draw", **given)
    alone = [optax_smile.predict(lambda w, x: w[None] * x, [w], logits, **given) for w in draws]
    expected = -np.mean([metrics.lppd(of.log_density) for of in alone])
    assert metrics.score(found, LABELS)["NLL"] == pytest.approx(expected, abs=1e-6)
    assert "NLL" not in metrics.score(found._replace(each=None), LABELS)


def test_score_of_a_number_takes_the_whole_variance():
    """The variance of the noise plus that of the draws."""
    mean, targets, total = np.ones(9), np.linspace(-3, 5, 9), np.full(9, 5.0)
    given: dict[str, Any] = {"log_density": -mean, "total": total, "uncertainty": "variance"}
    found = metrics.score(optax_smile.Prediction(mean, **given), targets)
    assert found["CRPS"] == pytest.approx(metrics.crps(mean, 5**0.5, targets), rel=1e-5)


def best_of_many(likelihood):
    """The best of 20,001 temperatures, to a relative error of 3e-4."""
    tried = np.exp(np.linspace(-3, 3, 20_001))
    return pytest.approx(tried[np.argmax([likelihood(t).mean() for t in tried])], rel=3e-4)


@pytest.mark.parametrize("is_binary", [False, True])
@pytest.mark.parametrize("sharpness", [0.5, 3.0])
def test_temperature_is_the_best_of_many(is_binary, sharpness):
    """Binary outputs are `[input, 3]`; the logits were multiplied by the sharpness."""
    rng, size = np.random.default_rng(0), (60, 3) if is_binary else (200,)
    logits = rng.normal(size=(*size, 2 if is_binary else 4))
    targets = np.argmax(logits + rng.gumbel(size=logits.shape), axis=-1)
    rows = scipy.special.softmax(sharpness * logits, axis=-1)
    mean, total = (rows[..., 1] if is_binary else rows), scipy.special.entr(rows).sum(-1)
    found = optax_smile.Prediction(mean, None, total, uncertainty="entropy")

    def powers(t):
        return rows ** (1 / t) / (rows ** (1 / t)).sum(-1, keepdims=True)

    def log_density(t):
        return np.log(np.take_along_axis(powers(t), targets[..., None], -1))

    best = metrics.temperature(found, targets)
    assert best == best_of_many(log_density) and best == pytest.approx(sharpness, rel=0.3)
    for got in (found.tempered(best, targets), found.tempered(best / 2).tempered(2, targets)):
        np.testing.assert_allclose(got.mean, powers(best)[..., 1] if is_binary else powers(best))
        np.testing.assert_allclose(got.total, scipy.special.entr(powers(best)).sum(-1))
        np.testing.assert_allclose(got.log_density, log_density(best).reshape(len(mean), -1).sum(1))
        assert got.temperature == pytest.approx(best) and got.epistemic is got.aleatoric is None


def test_temperature_of_a_number_scales_its_variance():
    mean, targets, squares = np.random.default_rng(1).normal(size=(3, 50, 2))
    parts: dict[str, Any] = {"total": squares**2 + 0.1, "aleatoric": squares**2}
    found = optax_smile.Prediction(mean, None, **parts, uncertainty="variance")
    density = lambda t: scipy.stats.norm.logpdf(targets, mean, np.sqrt(t * found.total))  # noqa: E731
    best = metrics.temperature(found, targets)
    assert best == best_of_many(density) and found.tempered(best).log_density is None
    got = found.tempered(best, targets)
    np.testing.assert_allclose(got.log_density, density(best).sum(1))
    np.testing.assert_allclose([got.total, got.aleatoric], best * np.array([*parts.values()]))


def test_what_has_no_temperature():
    found = optax_smile.Prediction(PROBABILITIES, None, uncertainty="entropy")
    tokens, ones = optax_smile.Prediction(None, -np.ones((5, 2))), np.ones(5)
    normal = optax_smile.Prediction(ones, None, np.zeros(5), uncertainty="variance")
    for prediction, targets, message in (
        (found, PROBABILITIES.argmax(1), r"targets=.*above 0.05.* at 0.05\. Predict more"),
        (found, LABELS[:4], r"targets=.*shape \(5,\).* got shape \(4,\)"),
        (found, LABELS - 1, r"targets=.*class from 0 to 2, got -1.0 at \(0,\)"),
        (found._replace(mean=PROBABILITIES * 2), LABELS, r"prediction=.* sum to 1, got the mean"),
        (tokens, LABELS, "prediction=.*one with a variance, or.* None with the uncertainty None"),
        (normal, ones[:4], r"targets=.*shape \(5,\).* got shape \(4,\)"),
        (normal, ones, "prediction=.*> 0, got 0.0"),
    ):
        with pytest.raises(ValueError, match=rf"`temperature\({message}"):
            metrics.temperature(prediction, targets)
