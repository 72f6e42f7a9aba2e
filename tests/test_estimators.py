"""Estimators of scikit-learn: units, labels, what it wants of parameters, and its own checks."""

import functools
from typing import Any

import numpy as np
import pytest
from runs import refused, stub
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.utils.estimator_checks import parametrize_with_checks

import optax_smile
from optax_smile.interop import estimators

# The same bits from a fixture and from a slow test.
OPTIMIZED = False
RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 2))
LABELS = np.where(X[:, 0] + X[:, 1] > 0, "yes", "no")
POSTERIORS: list[dict[str, Any]] = []
TARGETS = X[:, 0] - 2 * X[:, 1] + 0.3 * RNG.normal(size=60)


def cheap(**posterior):
    """Compiles faster than the default; remembers the arguments."""
    POSTERIORS.append(posterior)
    return stub(0.01)


SHORT: dict[str, Any] = {"num_epochs": 3, "num_warmup": 4, "num_draws": 4, "thin": 2}
SHORT |= {"num_chains": 2, "sampler": cheap, "random_state": 0}


def short_classifier(**changes) -> Any:
    return estimators.BayesianClassifier(**{"widths": (np.int64(4),), **SHORT, **changes})


def short_regressor(**changes) -> Any:
    return estimators.BayesianRegressor(**{"widths": (), **SHORT, **changes})


@pytest.fixture(scope="module")
def classifier():
    return short_classifier(num_epochs=200).fit(X, LABELS)


def test_labels_and_probabilities(classifier):
    assert classifier.classes_.tolist() == ["no", "yes"]
    assert classifier.n_features_in_ == 2
    probabilities = classifier.predict_proba(X)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-12)
    expected = np.where(probabilities[:, 1] > 0.5, "yes", "no")
    np.testing.assert_array_equal(classifier.predict(X), expected)
    assert classifier.score(X, LABELS) > 0.9
    of_label = probabilities[np.arange(60), (LABELS == "yes").astype(int)]
    found = classifier.prediction(X, LABELS)
    np.testing.assert_allclose(found.log_density, np.log(of_label), rtol=1e-5)
    # Chains begin at the members and leave them.
    members, draws = classifier.members_["network"], classifier.draws_.params["network"]
    assert draws[0][0].shape == (2, 4, 2, 4) and members[0][0].shape == (2, 2, 4)
    assert np.all(np.any(draws[0][0][:, -1] != np.asarray(members[0][0]), axis=(1, 2)))


def test_labels_are_known_by_equality(classifier):
    """They are not cast to the type of the classes, which would truncate text and round numbers."""
    numbers = short_classifier().fit(X, (LABELS == "yes").astype(int))
    for fitted, first, unknown in (
        (classifier, "yes", ["yesterday", "Yes", None, 1]),
        (numbers, 1, [0.7, 5, -1, 2**40, np.nan, "1"]),
    ):
        for other in unknown:
            for labels in (np.array([first, other], object), [first, other]):
                refused(
                    r"`prediction\(y=...\)` must be labels of", fitted.prediction, X[:2], labels
                )
    for fitted, labels in ((classifier, ["no", "yes"]), (numbers, [0.0, 1]), (numbers, [False, 1])):
        found, expected = (fitted.prediction(X[:2], y) for y in (labels, fitted.classes_))
        np.testing.assert_array_equal(found.log_density, expected.log_density)


@pytest.mark.slow
def test_units_of_features_and_target_do_not_matter():
    """Tested far beyond the range of float32."""
    fitted = short_regressor().fit(X, TARGETS)
    # The chains see the rows that were held out for the warm start as well.
    assert POSTERIORS[-1]["num_data"] == len(X)
    mean, std = fitted.predict(X, return_std=True)
    np.testing.assert_array_equal(mean, fitted.predict(X))
    whole = fitted.prediction(X, TARGETS)
    density = whole.log_density
    np.testing.assert_allclose(std, np.sqrt(whole.total))
    for of_features, shift, unit, offset, (rtol, atol, of_density) in (
        (1e3, -7e4, 0.01, 5, (0, 1e-2, 0.02)),
        (1e-310, 0, 1e200, 0, (1e-3, 1e-3, 1e-3)),
        (1e200, 0, 1e-40, 0, (1e-3, 1e-3, 1e-3)),
    ):
        x, y = of_features * X + shift, unit * TARGETS + offset
        moved = short_regressor().fit(x, y)
        found, spread = moved.predict(x, return_std=True)
        np.testing.assert_allclose((found - offset) / unit, mean, rtol=rtol, atol=atol)
        np.testing.assert_allclose(spread / unit, std, rtol=atol)
        np.testing.assert_array_equal(moved.predict_std(x), spread)
        whole = moved.prediction(x, y)
        np.testing.assert_allclose(whole.mean, found, rtol=1e-6)
        density_of_unit = whole.log_density + np.log(unit)
        np.testing.assert_allclose(density_of_unit, density, atol=of_density)


def test_constant_features_and_targets_have_no_unit():
    found = []
    for unit in (1e-30, 1e30):
        constant = np.full((60, 2), 3.3 * unit)
        fitted = short_regressor().fit(constant, constant[:, 0])
        found.append(np.divide(fitted.predict(constant, return_std=True), unit))
        assert np.isfinite(found[-1]).all() and (found[-1][1] > 0).all()
    np.testing.assert_allclose(*found, rtol=1e-3)


@pytest.mark.parametrize("kind", ["regressor", pytest.param("classifier", marks=pytest.mark.slow)])
def test_a_weight_counts_as_rows(kind):
    """At the mode, where almost all of a cold posterior is: its place depends on loss and prior."""
    counts = np.random.default_rng(1).integers(0, 4, 60)
    cold = functools.partial(optax_smile.sgld, 1e-10, temperature=1e-6)
    given: dict[str, Any] = {"sampler": cold, "prior_precision": 20.0, "widths": ()}
    given |= {"num_epochs": 100, "num_warmup": 2_000, "thin": 50}
    make, y = short_regressor, TARGETS
    if kind == "classifier":
        # No row with a weight is of the third class.
        make, y = short_classifier, np.where(counts > 0, LABELS, "never")
    fitted = make(**given).fit(X, y, sample_weight=counts)
    repeated = make(**given).fit(X.repeat(counts, axis=0), y.repeat(counts))
    third = make(**given).fit(X, y, counts / 3)
    found, expected, other = (
        x.predict_proba(X) if kind == "classifier" else np.stack(x.predict(X, return_std=True))
        for x in (fitted, repeated, third)
    )
    np.testing.assert_allclose(found, expected, atol=2e-3)
    assert np.abs(found - other).max() > 0.02
    assert fitted.draws_.settings["num_data"] == counts.sum()


def test_parameters_and_clones(classifier):
    copy: Any = clone(classifier)
    assert copy.get_params() == classifier.get_params() and not hasattr(copy, "draws_")
    assert copy.set_params(thin=3).thin == 3 and classifier.thin == SHORT["thin"]
    names = ["predict", "predict_proba", "predict_std", "prediction"]
    unfitted = [
        (one, x) for one in (copy, estimators.BayesianRegressor()) for x in names if hasattr(one, x)
    ]
    assert len(unfitted) == 6
    for one, method in unfitted:
        with pytest.raises(NotFittedError):
            getattr(one, method)(X)
    refused("features", classifier.predict, X[:, :1])


# Changes of a call of `fit`, and the messages.
WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    *(({"widths": x}, r"widths=...\)` must be a sequence of integers") for x in (8, ["8"], [0])),
    ({"y": LABELS[:1].repeat(60)}, r"`fit\(y=...\)` must be labels of at least two classes"),
    ({"sampler": stub()}, r"sampler=...\)` must be a function of .* a GradientTransformationExtra"),
    *(
        ({"sample_weight": x}, r"^`fit\(sample_weight=...\)` must be ")
        for x in (np.ones(59), np.ones((60, 1)), -np.ones(60), np.full(60, np.nan), np.eye(60)[0])
    ),
)


def test_what_does_not_fit_is_refused_before_the_training():
    for changes, rule in WRONG:
        data = {"y": LABELS, "sample_weight": None}
        given = {name: changes.get(name, value) for name, value in data.items()}
        others = {name: value for name, value in changes.items() if name not in data}
        refused(rule, short_classifier(**others).fit, X, **given)


@pytest.mark.nightly
@parametrize_with_checks(
    # Pass the default sampler, so that the names of the tests contain no memory address.
    [
        short(num_epochs=100, widths=(4,), sampler=optax_smile.psmile)
        for short in (short_classifier, short_regressor)
    ],
    # Equivalent only in distribution, see above: other rows get other random numbers.
    expected_failed_checks=lambda _: {"check_sample_weight_equivalence_on_dense_data": "random"},
)
def test_what_scikit_learn_checks(estimator, check):
    check(estimator)
