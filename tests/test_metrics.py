from typing import Any

import numpy as np
import pytest
import sklearn.metrics
from hypothesis import given, settings
from hypothesis import strategies as st

from optax_smile import metrics

PROBABILITIES = np.array(
    [[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4], [0.05, 0.05, 0.9], [0.5, 0.25, 0.25]]
)
LABELS = np.array([0, 1, 0, 2, 1])


def random_predictions(seed, num_inputs=40, num_classes=4):
    generator = np.random.default_rng(seed)
    probabilities = generator.dirichlet(np.ones(num_classes), num_inputs)
    return probabilities, generator.integers(0, num_classes, num_inputs)


def test_scores_agree_with_scikit_learn():
    for seed in range(5):
        probabilities, labels = random_predictions(seed)
        classes = np.arange(4)
        assert metrics.accuracy(probabilities, labels) == sklearn.metrics.accuracy_score(
            labels, probabilities.argmax(1)
        )
        density = np.log(probabilities[np.arange(40), labels])
        expected = -sklearn.metrics.log_loss(labels, probabilities, labels=classes)
        assert metrics.lppd(density) == pytest.approx(expected, abs=1e-12)
        brier_score_loss: Any = sklearn.metrics.brier_score_loss
        expected = brier_score_loss(labels, probabilities, labels=classes, scale_by_half=False)
        assert metrics.brier(probabilities, labels) == pytest.approx(expected, abs=1e-12)


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
    probabilities, labels = random_predictions(seed)
    generator = np.random.default_rng(order)
    rows, classes = generator.permutation(40), generator.permutation(4)
    renamed = probabilities[rows][:, classes], np.argsort(classes)[labels[rows]]
    for score, largest in ((metrics.accuracy, 1), (metrics.brier, 2), (metrics.ece, 1)):
        value = score(probabilities, labels)
        assert 0 <= value <= largest
        assert score(*renamed) == pytest.approx(value, abs=1e-12)


def test_perfect_predictor():
    probabilities = np.eye(3)[LABELS]
    assert metrics.accuracy(probabilities, LABELS) == 1
    assert metrics.brier(probabilities, LABELS) == 0
    assert metrics.ece(probabilities, LABELS) == 0


@pytest.mark.parametrize(
    ("probabilities", "labels", "message"),
    [
        (PROBABILITIES[0], LABELS, "of shape \\[input, class\\], got shape \\(3,\\)"),
        (PROBABILITIES * 2, LABELS, "rows that sum to 1, got a sum of (2.0|1.99)"),
        (PROBABILITIES * np.nan, LABELS, "rows that sum to 1, got a sum of nan in row 0"),
        (PROBABILITIES, LABELS + 1, "classes from 0 to 2, got 1 to 3"),
        (PROBABILITIES, LABELS[:2], "integers of shape \\(5,\\)"),
        (PROBABILITIES, LABELS * 1.0, "integers of shape \\(5,\\), got float64"),
    ],
)
def test_bad_input(probabilities, labels, message):
    with pytest.raises(ValueError, match=message):
        metrics.brier(probabilities, labels)
