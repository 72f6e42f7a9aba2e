"""Calibration on held-out data against slow textbook versions, and its promise of coverage."""

import itertools
import math
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import scipy.special

from optax_smile import calibrate, metrics

P, Y = np.array([[0.9, 0.1], [0.2, 0.8]]), np.array([0, 1])


def random_classes(seed, num_inputs=200, num_classes=4, spread=2.0):
    """Labels drawn from softmax(logits), so that the logits' own temperature is 1."""
    generator = np.random.default_rng(seed)
    logits = spread * generator.normal(size=(num_inputs, num_classes))
    gumbel = generator.gumbel(size=logits.shape)
    return logits, np.argmax(logits + gumbel, axis=1)


def softmax(logits):
    return scipy.special.softmax(logits, axis=1)


def textbook_loss(inverse, probabilities, labels):
    logits = inverse * np.log(probabilities)
    density = logits[np.arange(len(labels)), labels] - scipy.special.logsumexp(logits, axis=1)
    return -float(np.mean(density))


def test_temperature_against_a_minimiser():
    logits, labels = random_classes(0)
    for heat in (0.3, 1.0, 4.0):
        probabilities = softmax(logits * heat)
        found: Any = scipy.optimize.minimize_scalar(
            lambda log, p: textbook_loss(math.exp(log), p, labels),
            bounds=(-4, 4), args=(probabilities,), method="bounded", options={"xatol": 1e-10},
        )  # fmt: skip
        got = calibrate.fit_temperature(probabilities, labels)
        assert math.log(got) == pytest.approx(-found.x, abs=1e-6)


def test_temperature_undoes_one_that_was_applied():
    logits, labels = random_classes(0)
    for temperature in (0.05, 0.7, 1, 2.5, 20):
        heated = calibrate.with_temperature(softmax(logits), temperature)
        np.testing.assert_allclose(heated, softmax(logits / temperature), rtol=1e-9)
    once = calibrate.fit_temperature(softmax(logits), labels)
    heated = calibrate.with_temperature(softmax(logits), 2.5)
    assert calibrate.fit_temperature(heated, labels) == pytest.approx(once / 2.5, rel=1e-9)


def test_temperature_keeps_what_is_impossible_impossible():
    got = calibrate.with_temperature([[0.8, 0.2, 0.0], [0.0, 0.0, 1.0]], 0.5)
    np.testing.assert_allclose(got, [[16 / 17, 1 / 17, 0], [0, 0, 1]], rtol=1e-12)
    # Other classes that are impossible do not disturb the fit.
    logits, labels = random_classes(3)
    expected = calibrate.fit_temperature(softmax(logits), labels)
    wider = np.pad(softmax(logits), ((0, 0), (0, 1)))
    assert calibrate.fit_temperature(wider, labels) == expected


def test_temperature_at_the_ends_of_its_range():
    ends: list[tuple[list[int], dict[str, float], float]] = [
        ([0, 1], {}, 0.05), ([1, 0], {}, 20), ([0, 1], {"smallest": 0.5}, 0.5),
        ([1, 0], {"largest": 3.0}, 3),
    ]  # fmt: skip
    for labels, options, end in ends:
        with pytest.warns(
            UserWarning, match=rf"`fit_temperature`: .* at the end of the range, {end}\."
        ) as warned:
            assert calibrate.fit_temperature(P, labels, **options) == end
        assert warned[0].filename == __file__
    for row in ([0.25] * 4, [0.5, 0.5, 0, 0], [1.0, 0, 0, 0]):
        assert calibrate.fit_temperature([row, row], [0, 0]) == 1


def textbook_rank(num_inputs, level):
    return math.ceil((num_inputs + 1) * Fraction(str(level)))


def textbook_sets(probabilities, labels, new, level):
    """A class is in the set if its score is at most the rank-th smallest held-out one."""
    scores = sorted(1 - Fraction(float(p[y])) for p, y in zip(probabilities, labels, strict=True))
    rank = textbook_rank(len(scores), level)
    limit = scores[rank - 1] if rank <= len(scores) else math.inf
    return [[1 - Fraction(float(p)) <= limit for p in row] for row in new]


CASES = list(itertools.product([19, 20, 99], [0.5, 0.55, 0.8, 0.9, 0.95]))


def test_sets_against_the_textbook():
    for num_inputs, level in CASES:
        logits, labels = random_classes(num_inputs, num_inputs)
        probabilities = softmax(logits).astype(np.float32)
        new = softmax(random_classes(5, 30)[0])
        new[:5] = probabilities[:5]  # ties count as inside
        got = calibrate.prediction_sets(probabilities, labels, new, level)
        assert got.dtype == bool
        assert got.tolist() == textbook_sets(probabilities, labels, new, level)


def test_intervals_against_the_textbook():
    for num_inputs, level in CASES:
        generator = np.random.default_rng(num_inputs)
        mean, targets, new = generator.normal(size=(3, num_inputs))
        for std, new_std in (generator.gamma(3, size=(2, num_inputs)), (1.0, 2.0)):
            ratios = sorted(abs(targets - mean) / std)
            width = ratios[textbook_rank(num_inputs, level) - 1] * new_std
            got = calibrate.prediction_intervals(mean, std, targets, new, new_std, level)
            np.testing.assert_allclose(got, (new - width, new + width), rtol=1e-12)


@pytest.mark.parametrize(("num_inputs", "level"), [(19, 0.9), (10, 0.5), (30, 0.95)])
def test_coverage_of_exchangeable_inputs_is_exact(num_inputs, level):
    """Each of n + 1 inputs in turn is the new one, whatever the model, and scores have no ties."""
    generator, inside = np.random.default_rng(0), []
    targets = generator.standard_t(3, size=num_inputs + 1)
    mean, std = targets + generator.exponential(size=targets.size), generator.gamma(2, size=(1,))
    logits, labels = random_classes(0, targets.size)
    probabilities = softmax(3 * logits)
    for new in range(num_inputs + 1):
        old, new = np.arange(num_inputs + 1) != new, [new]
        ends = calibrate.prediction_intervals(mean[old], std, targets[old], mean[new], std, level)
        sets = calibrate.prediction_sets(probabilities[old], labels[old], probabilities[new], level)
        covered = calibrate.set_coverage(sets, labels[new])
        inside.append((metrics.coverage(*ends, targets[new]), covered))
    for share in np.mean(inside, axis=0):
        assert level <= share + 1e-12 and share < level + 1 / (num_inputs + 1)


def test_too_few_held_out_inputs():
    probabilities, labels = np.full((8, 2), 0.5), np.zeros(8, int)
    message = r"`{}`: level 0.9 needs 9 held-out inputs, but there are only 8"
    with pytest.warns(UserWarning, match=message.format("prediction_sets")) as warned:
        sets = calibrate.prediction_sets(probabilities, labels, probabilities)
    assert sets.all() and warned[0].filename == __file__
    with pytest.warns(UserWarning, match=message.format("prediction_intervals")):
        lower, upper = calibrate.prediction_intervals(labels, 1.0, labels, [1.0], 1.0)
    assert lower.tolist() == [-math.inf] and upper.tolist() == [math.inf]
    assert metrics.coverage(lower, upper, [5.0]) == 1
    assert metrics.interval_width(lower, upper) == math.inf
    nine = np.full((9, 2), 0.5), np.zeros(9, int)
    assert calibrate.prediction_sets(*nine, [[0.4, 0.6]], 0.9).tolist() == [[False, True]]


def test_coverage_and_size_of_sets_by_hand():
    sets = [[True, False, True], [False, False, False], [False, True, False]]
    assert calibrate.set_coverage(sets, [2, 0, 1]) == pytest.approx(2 / 3)
    assert calibrate.set_size(sets) == 1


def test_arguments_that_do_not_fit():
    fit, intervals = calibrate.fit_temperature, calibrate.prediction_intervals
    wrong: list[Any] = [
        (fit, ([[1.0, 0.0], [0.5, 0.5]], [1, 0]), "probabilities", "> 0 for every label, got 0.0"),
        (calibrate.prediction_sets, (P, Y, np.ones((3, 1))), "new_probabilities", "of 2 classes"),
        (intervals, (Y, 1.0, Y[:1], Y, 1.0), "targets", "of shape (2,) to go with `mean`"),
        (intervals, (Y, 1.0, Y, np.ones(4), [1.0] * 2), "new_std", "a scalar or of shape (4,) or"),
        (calibrate.set_coverage, (P > 0.5, [0, 2]), "labels", "classes from 0 to 1, got 0 to 2"),
    ]
    for function, arguments, name, rule in wrong:
        message = f"`{function.__name__}({name}=...)` must be {rule}"
        with pytest.raises(ValueError, match=re.escape(message)):
            function(*arguments)
    with pytest.raises(ValueError, match="largest=.*must be > `smallest`, 3.0, got 3.0"):
        fit(P, Y, smallest=3.0, largest=3.0)
