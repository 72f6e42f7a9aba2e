"""Scores of telling foreign inputs from familiar ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from optax_smile import _check
from optax_smile.metrics._checks import share_below

SCORES = _check.Array("[input]")


@_check.arguments(inside=SCORES, outside=SCORES)
def ood_auroc(inside: ArrayLike, outside: ArrayLike) -> float:
    """Chance that an input from outside scores above one from inside; higher is better.

    Args:
        inside: a score that is higher for foreign inputs, such as `entropy`, of inputs like the
            training data, `[input]`.
        outside: the same score of other inputs, `[input]`.

    Returns:
        A share of pairs, ties half, in [0, 1]; 1/2 is chance.

    Raises:
        ValueError: another shape, no inputs, NaN.

    Example:
        >>> ood_auroc([0.1, 0.3], [0.2, 0.4])
        0.75

    Source: Hendrycks and Gimpel 2017.
    """
    return float(np.mean(share_below(np.asarray(inside), np.asarray(outside))))


@_check.arguments(inside=SCORES, outside=SCORES)
def fpr95(inside: ArrayLike, outside: ArrayLike) -> float:
    """Share of foreign inputs taken for familiar where 95 % of the familiar are; lower is better.

    Inside counts as positive: the threshold is the smallest score with at least 95 % of `inside` at
    or below it, the result the share of `outside` at or below it.

    Arguments and errors as of `ood_auroc`.

    Returns:
        A share, in [0, 1]; .95 is chance.

    Example:
        >>> fpr95(range(100), [93, 94, 95, 96])
        0.5

    Source: Liang et al. 2018. (Hendrycks et al. 2019 count outside as positive: other results.)
    """
    kept = -(-95 * np.size(inside) // 100)  # 95 % rounded up, in integers as 0.95 is not exact
    return float(np.mean(outside <= np.sort(inside)[kept - 1]))
