"""Mistakes in the inputs of a run, one file per kind. `checks` in each file yields `Check`s."""

from collections.abc import Iterator
from typing import Any

from optax_smile.diagnostics.findings import Check
from optax_smile.mistakes import batches, gradients, loss, start

__all__ = ["batches", "before", "gradients", "loss", "start"]


def before(losses: loss.Losses, chains: Any, batch: object) -> Iterator[Check]:
    """Test the start and the program of the loss, on a batch before the first step."""
    yield from start.rise(losses, chains, batch)
    yield from loss.checks(losses, chains, batch)
