"""Names for types that several files use."""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypeVar

import jax
import optax

# Keyword arguments, collected before a call.
Options: TypeAlias = dict[str, Any]
# Step size of a sampler: a number, or a schedule, a function of the step count.
StepSize: TypeAlias = float | jax.Array | optax.Schedule
# Mean of a Gaussian prior: a number, a tree prefix of the parameters, or the start of the chain.
PriorMean: TypeAlias = optax.Params | Literal["start"]
# The log density of a prior, a function of the parameters.
LogPrior: TypeAlias = Callable[[Any], jax.Array]
# A type that a function returns unchanged, such as a tree of one structure.
T = TypeVar("T")
Class = TypeVar("Class", bound=type)


def by_identity(kind: Class) -> Class:
    """Compare and hash the instances of a class by identity: `==` of arrays has no truth value."""
    same = {"__eq__": lambda self, other: self is other, "__hash__": object.__hash__}
    for name, method in {**same, "__ne__": lambda self, other: self is not other}.items():
        setattr(kind, name, method)
    return kind
