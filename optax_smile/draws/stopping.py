"""What a stopping rule found at each of its looks at the draws."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

ARRAYS = {"num_draws": int, "log_e_value": float, "lppd": float}


class Stopping(NamedTuple):
    """What `EvidenceStop` found; print it for a sentence.

    Look k rejects the null if its e-value is at least k (k + 1) / alpha. Only the last look can
    have done so, since it stops the run.

    Attributes:
        null: `"improvement"` or `"doubling"`.
        alpha: bound on the probability that any look rejects a null that is true.
        tolerance: gain of the null `"doubling"`, nats per example.
        num_examples: number of held-out examples.
        start_lppd: log pointwise predictive density (LPPD) of the start of the chains on these
            examples, nats per target.
        num_draws: draws of each chain at each look, `[look]`.
        log_e_value: log of the e-value of each look, `[look]`; NaN once a prediction was not
            finite.
        lppd: LPPD of the average of all draws so far, `[look]`.
    """

    null: str
    alpha: float
    tolerance: float
    num_examples: int
    start_lppd: float
    num_draws: np.ndarray
    log_e_value: np.ndarray
    lppd: np.ndarray

    @property
    def log_threshold(self) -> np.ndarray:
        """Log e-value at which each look rejects the null, `[look]`."""
        look = np.arange(1, len(self.num_draws) + 1)
        return np.log(look * (look + 1) / self.alpha)

    @property
    def has_stopped(self) -> bool:
        """Whether the last look rejected the null."""
        return bool((self.log_e_value[-1:] >= self.log_threshold[-1:]).any())

    def __str__(self) -> str:
        if not len(self.num_draws):
            return f"Not stopped: no look yet (null: {self.null})."
        claim = "the draws improve the prediction of the start"
        if self.null == "doubling":
            claim = f"doubling the draws gains less than {self.tolerance:g} nats per example"
        evidence, threshold = self.log_e_value[-1], self.log_threshold[-1]
        found, sign = ("Stopped", ">=") if self.has_stopped else ("Not stopped", "<")
        if math.isnan(evidence):
            sign, claim = "against", f"{claim}, as predictions were not finite"
        evident = "evidence" if self.has_stopped else "not enough evidence"
        return (
            f"{found} at {self.num_draws[-1]} draws per chain: {evident} that {claim} (log e-value"
            f" {evidence:.3g} {sign} {threshold:.3g}, alpha {self.alpha:g}). Held-out LPPD"
            f" {self.lppd[-1]:.4g}, of the start {self.start_lppd:.4g}."
        )


def described(stopping: Stopping) -> dict[str, Any]:
    """Describe a result for the manifest."""
    return stopping._asdict() | {name: getattr(stopping, name).tolist() for name in ARRAYS}


def read(described: Mapping[str, Any]) -> Stopping:
    """Read a result from a manifest."""
    arrays = {name: np.asarray(described[name], kind) for name, kind in ARRAYS.items()}
    return Stopping(**{**described, **arrays})


def is_described(value: Any) -> bool:
    """Return whether a value is a valid description."""
    if not isinstance(value, dict) or value.keys() != set(Stopping._fields):
        return False
    numbers = "alpha", "tolerance", "start_lppd"
    lists = [value[name] for name in ARRAYS]
    return (
        isinstance(value["null"], str)
        and type(value["num_examples"]) is int
        and all(type(value[name]) is float for name in numbers)
        and 0 < value["alpha"] < 1
        and all(isinstance(x, list) for x in lists)
        and len({len(x) for x in lists}) == 1
        and all(type(x) is kind for name, kind in ARRAYS.items() for x in value[name])
    )
