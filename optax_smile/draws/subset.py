"""A few draws that predict almost as well as all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from optax_smile._disk import Json
from optax_smile._types import Options

# Below every log density in float32. Finite, so that draws for which some targets are impossible
# are compared by the number of such targets.
LOWEST = float(np.finfo(np.float32).min)
RULE = "the LPPD of the average, one draw after another, on held-out data"


class Subset(NamedTuple):
    """Which draws `thin_to` chose, in the order of the choice: arrays `[draw]`.

    Attributes:
        chain: chain of each draw.
        draw: number of the draw in its chain; for draws in a directory, the number of its file.
        step: step of the chain at the draw, or calls of `update` in a loop of your own; None if
            unknown.
        lppd: log pointwise predictive density of the average of the draws up to this one, nats per
            target, on the data that chose them, so it overestimates that of new data.

    Example:
        >>> import numpy as np, optax_smile
        >>> draws = optax_smile.Snapshots(np.array([[0.0, 1.0], [2.0, 3.0]]))
        >>> prediction = optax_smile.predict(
        ...     lambda w, x: (w * x, 0.0), draws, np.ones(1), likelihood="gaussian",
        ...     targets=np.full(1, 2.2), per="draw",
        ... )
        >>> draws.thin_to(2, prediction).subset.chain.tolist()
        [1, 1]
    """

    chain: np.ndarray
    draw: np.ndarray
    step: np.ndarray | None
    lppd: np.ndarray


def choose(log_density: np.ndarray, number: int) -> tuple[list[int], np.ndarray]:
    """Choose draws one after another, each the best addition to the average so far.

    Args:
        log_density: log density of each target under each draw, nats, `[draw, target]`.
        number: how many, at most the number of draws.

    Returns:
        Indices in the order of the choice, and the LPPD after each, `[number]`.
    """
    bounded = np.maximum(log_density, LOWEST)
    free, chosen = np.ones(len(bounded), bool), []
    total = np.full(bounded.shape[1], -np.inf)
    for _ in range(number):
        # The number of draws shifts all candidates alike.
        score = np.where(free, np.logaddexp(total, bounded).mean(axis=1), -np.inf)
        best = int(score.argmax())
        total, free[best] = np.logaddexp(total, bounded[best]), False
        chosen.append(best)
    sums = np.logaddexp.accumulate(log_density[chosen], axis=0)
    return chosen, sums.mean(axis=1) - np.log(np.arange(1, number + 1))


def described(subset: Subset, num_targets: int, of: Mapping) -> Json:
    """Describe a subset for the manifest of its directory."""
    arrays = {name: None if x is None else x.tolist() for name, x in subset._asdict().items()}
    return {"chosen_by": RULE, "num_targets": num_targets, "of": dict(of), **arrays}


def read(described: Json, numbers: Sequence[int]) -> Subset:
    """Read the subset of a manifest, restricted to the draws with these numbers."""
    fields = ((name, described[name]) for name in Subset._fields)
    rows = list(numbers)
    arrays: Options = {name: None if x is None else np.asarray(x)[rows] for name, x in fields}
    return Subset(**arrays)
