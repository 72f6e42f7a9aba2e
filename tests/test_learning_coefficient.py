"""`learning_coefficient.py` on losses whose coefficient is known."""

from typing import Any

import jax.numpy as jnp
import learning_coefficient
import numpy as np
import pytest

# Optimized without fusion emitters, the two gradients that `sample` compares round differently.
OPTIMIZED = False


@pytest.mark.nightly
@pytest.mark.parametrize("power, expected", [(2, 30), (4, 15)])
def test_sum_of_powers(power, expected):
    """d / power, by the balance exactly. The loss alone is not corrected."""
    given: Any = {"num_data": 10**6, "localization": 0.0, "num_draws": 100, "key": 0}
    loss_fn = lambda w, batch: jnp.sum(w**power) + 0.1  # noqa: E731
    found = learning_coefficient.estimate(loss_fn, jnp.zeros(60), [np.zeros(1)], **given)
    assert found.llc == pytest.approx(expected, abs=0.01)
    error = found.trace.mean(axis=1).std(ddof=1) / 2
    assert abs(found.trace.mean() - expected) < 4.5 * error < 0.2 * expected
    assert found.findings == () and "Nothing looks wrong" in str(found)
