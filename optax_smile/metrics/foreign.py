"""Scores of out-of-distribution detection."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from optax_smile import _check
from optax_smile.metrics._checks import share_below

SCORES = _check.Array("[input]")


@_check.arguments(inside=SCORES, outside=SCORES)
def ood_auroc(inside: ArrayLike, outside: ArrayLike) -> float:
    """Compute the AUROC of out-of-distribution detection; higher is better.

    It is the probability that an out-of-distribution input scores above an in-distribution one.

    Args:
        inside: in-distribution scores, `[input]`, of a score that is higher for unfamiliar inputs,
            such as `entropy`.
        outside: the same score for out-of-distribution inputs, `[input]`.

    Returns:
        A fraction of pairs, ties counted half, in [0, 1]; 1/2 is chance level.

    Raises:
        ValueError: another shape, no inputs, or NaN.

    Example:
        >>> ood_auroc([0.1, 0.3], [0.2, 0.4])
        0.75

    Source: Hendrycks and Gimpel 2017.
    """
    return float(np.mean(share_below(np.asarray(inside), np.asarray(outside))))


@_check.arguments(inside=SCORES, outside=SCORES)
def fpr95(inside: ArrayLike, outside: ArrayLike) -> float:
    """Compute the false positive rate at a true positive rate of 95 %; lower is better.

    In-distribution inputs are the positives. The threshold is the smallest score with at least 95 %
    of `inside` at or below it; the result is the fraction of `outside` at or below it.

    Arguments and errors as for `ood_auroc`.

    Returns:
        A fraction, in [0, 1]; .95 is chance level.

    Example:
        >>> fpr95(range(100), [93, 94, 95, 96])
        0.5

    Source: Liang et al. 2018. (Hendrycks et al. 2019 count `outside` as positive, which differs.)
    """
    kept = -(-95 * np.size(inside) // 100)  # 95 % rounded up, in integers as 0.95 is not exact
    return float(np.mean(outside <= np.sort(inside)[kept - 1]))
