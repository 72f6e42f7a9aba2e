"""The exact coefficients that `llc` is measured against, each by two ways that share nothing.

And `llc` against them, by its own number of steps.
"""

from typing import Any

from benchmarks.correctness import known_coefficients as known

import numpy as np
import pytest

from optax_smile.local import llc


def jacobian_rank(network: known.LinearNetwork) -> int:
    """Of the derivative of the map at the centre, twice the coefficient where smooth."""
    centre = [np.asarray(w, float) for w in network.centre]
    columns = []
    for index, layer in enumerate(centre):
        before = known._chain([*centre[:index][::-1], np.eye(centre[0].shape[1])])
        after = known._chain([np.eye(centre[-1].shape[0]), *centre[index + 1 :][::-1]])
        columns.append(np.kron(after, before.T).reshape(-1, layer.size))
    return int(np.linalg.matrix_rank(np.concatenate(columns, axis=1)))


def test_a_monomial():
    for power in (2, 4, 6, 10):
        assert known.monomial(power, 7e4, 0.0) == pytest.approx(1 / power, rel=1e-9)
    for localization in (1.0, 1e3, 1e6):
        expected = known.quadratic(np.array([2.0]), 7e4, localization)
        assert known.monomial(2, 7e4, localization) == pytest.approx(expected, rel=1e-9)
    # Draws of the prior, weighted, with a standard error of 3e-4.
    w = np.random.default_rng(0).standard_normal(2_000_000) / np.sqrt(100.0)
    drawn = np.average(7e4 * w**4, weights=np.exp(-7e4 * w**4))
    assert known.monomial(4, 7e4, 100.0) == pytest.approx(drawn, abs=1.5e-3)


def test_a_product_on_a_grid():
    v, w = np.meshgrid(np.linspace(-3, 3, 1001), np.linspace(-3, 3, 1001))
    energies = 50 * v**2 * w**4
    on_grid = np.average(energies, weights=np.exp(-energies - 4 / 2 * (v**2 + w**2)))
    assert known.product(4, 50.0, 4.0) == pytest.approx(on_grid, rel=1e-6)


def test_gibbs_on_one_layer_is_the_closed_form():
    """One layer is linear regression: curvatures of the inputs, once for each output."""
    curvatures, target = np.array([1e-3, 0.1, 2.0]), np.ones((2, 3))
    expected = 2 * known.quadratic(curvatures, 500.0, 3.0)
    # A centre off the least squares pulls, and is the level that losses are told from.
    shrunk = 3 * 1e-3 / (500 * curvatures + 3)
    bias = np.sum(500 * curvatures * (shrunk**2 - 1e-3**2))
    for centre, value in ((target, expected), (target + 1e-3, expected + bias)):
        network = known.LinearNetwork(target, np.diag(curvatures), [centre])
        assert known.gibbs(network, 500.0, 3.0, num_sweeps=10).value == pytest.approx(value)


def test_gibbs_on_two_layers_of_one_weight_is_the_quadrature():
    """L = (a b)^2 / 2, at its singular point."""
    zero = np.zeros((1, 1))
    network = known.LinearNetwork(zero, np.eye(1), [zero, zero])
    drawn = known.gibbs(network, 2_000.0, 10.0, num_sweeps=4_000)
    expected = known.product(2, 1_000.0, 10.0)
    assert drawn.error < 0.01 * expected
    assert abs(drawn.value - expected) < 4 * drawn.error
    # Chains that do not meet: after one sweep a product of two is still what it began with.
    assert np.isnan(known.gibbs(network, 1e3, 1e-4, num_sweeps=1).value)


# Every case of the theorem; the sum of widths and rank is even in the first, for multiplicity one.
def test_two_layers_are_reduced_rank_regression():
    """Aoyagi and Watanabe 2005, as they write it."""
    cases = ((10, 10, 8), 4), ((10, 8, 10), 4), ((4, 2, 10), 1), ((12, 3, 4), 1), ((3, 10, 3), 0)
    for widths, rank in cases:
        m, h, n = widths
        if n + rank <= m + h and m + rank <= n + h and h + rank <= m + n:
            by_case = -((h + rank) ** 2) - m**2 - n**2 + 2 * (h + rank) * (m + n) + 2 * m * n
            by_case /= 8
        elif m + h < n + rank:
            by_case = (h * m - h * rank + n * rank) / 2
        elif n + h < m + rank:
            by_case = (h * n - h * rank + m * rank) / 2
        else:
            by_case = m * n / 2
        assert known.linear_asymptotic(widths, rank) == by_case


def test_at_a_smooth_point_it_is_half_the_rank_of_the_derivative():
    for widths in ((5, 3, 6), (6, 4, 4, 5)):
        truth = known._truth(widths, min(widths), seed=0)
        network = known.LinearNetwork(truth, np.eye(widths[0]), known.balanced(truth, widths))
        assert jacobian_rank(network) / 2 == known.linear_asymptotic(widths, min(widths))
        assert network.loss(network.centre) == pytest.approx(0, abs=1e-20)
    with pytest.raises(ValueError, match="multiplicity"):
        known.linear_asymptotic((4, 3, 4), 0)


@pytest.mark.slow
def test_llc_is_the_exact_value():
    """With 16 chains, 4.5 standard errors are passed by chance in one of 2,000 runs."""
    model = known.MODELS["the same, gamma 100"]()
    data = {"num_data": model.num_data, "localization": model.localization}
    run: dict[str, Any] = {"num_chains": 16, "key": 0, "progress": False}
    found = llc(model.loss_fn, model.params, model.batches, **data, **run)
    expected = model.exact().value
    assert found.standard_error < 0.02 * expected
    assert abs(found.llc - expected) < 4.5 * found.standard_error
    # The loss alone, which its balance has not corrected.
    plain = found.trace.mean(axis=1)
    assert abs(plain.mean() - expected) < 4.5 * plain.std(ddof=1) / 4
    assert found.is_balanced and not found.findings
