"""One known posterior through every public way to sample it; a benchmark has the table."""

from benchmarks.correctness import ways
from benchmarks.tabulated.gaussians import is_right

import pytest

# The others are nightly.
SLOW = {
    "own loop: scan, gradients alone",
    "sample: minimal norm, list of 4, resumed",
}
MARKED = [
    pytest.param(x, marks=getattr(pytest.mark, "slow" if x in SLOW else "nightly"))
    for x in ways.WAYS
]


@pytest.mark.parametrize("name", MARKED)
def test_a_way_samples_the_posterior(name):
    # A false alarm in one of a thousand means; the errors of the variances are at most .05.
    found = ways.run_cell({"way": name})
    assert is_right(found), found
