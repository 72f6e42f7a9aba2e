"""Constraints of the arguments of draws and predictions."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import numpy as np

from optax_smile import _check, _settings
from optax_smile.draws import likelihoods

SNAPSHOTS = _check.Where(
    "an iterable of parameter trees",
    lambda value: (
        hasattr(value, "__iter__")
        and not isinstance(value, (Mapping, str, bytes, os.PathLike, type))
    ),
    "Make them with `Snapshots`, `Snapshots.from_members` or `load_snapshots`.",
)


@dataclass(frozen=True)
class Posterior(_check.Constraint):
    """Draws that satisfy another constraint and are not iterates of an optimizer."""

    draws: _check.Constraint

    @property
    def rule(self) -> str:
        """The rule of the other constraint."""
        return self.draws.rule

    def __call__(self, where, argument, value, given=_check.NOTHING):
        value = self.draws(where, argument, value, given)
        if not _settings.are_posterior(getattr(value, "settings", None)):
            rule, got = "draws from a posterior, made by a sampler", "iterates of an optimizer"
            advice = "These are checkpoints, which `predict` and the metrics accept."
            _check.fail(where, argument, rule, got, advice)
        return value


class Curve(_check.Constraint):
    """Numbers of snapshots, converted to a tuple."""

    text = "an ascending sequence of integers >= 1"

    def __call__(self, where, argument, value, given=_check.NOTHING):
        if not np.iterable(value) or isinstance(value, jax.core.Tracer):
            _check.fail(where, argument, self.text, _check.show(value))
        curve = tuple(int(_check.Whole(1)(where, argument, number)) for number in value)
        if list(curve) != sorted(set(curve)):
            _check.fail(where, argument, self.text, curve)
        return curve


class Reading(_check.Constraint):
    """A likelihood or its name, converted to a `Likelihood`."""

    text = f"{_check.OneOf(likelihoods.Name).rule}, or a `Likelihood`"

    def __call__(self, where, argument, value, given=_check.NOTHING):
        if not isinstance(value, likelihoods.Likelihood):
            if not isinstance(value, str) or value not in likelihoods.NAMED:
                _check.fail(where, argument, self.rule, _check.written(value))
            return likelihoods.NAMED[value]
        for name, part in value._asdict().items():
            if part is not None:
                _check.Function(likelihoods.FORMS[name])(where, f"{argument}.{name}", part)
        return value


@dataclass(frozen=True)
class Inputs(_check.Tree):
    """Arrays `[input, ...]` of the same length."""

    text: str = "arrays [input, ...] of the same length, at least 1"

    def __call__(self, where, argument, value, given=_check.NOTHING):
        super().__call__(where, argument, value, given)
        lengths = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(value)}
        if len(lengths) != 1 or lengths & {(), (0,)}:
            _check.fail(where, argument, self.text, jax.tree.map(np.shape, value))
        return value


@dataclass(frozen=True)
class Targets(_check.Tree):
    """Arrays `[input, ...]`, as long as `inputs`; a single array for a named likelihood."""

    text: str = "arrays [input, ...] as long as `inputs`"

    def __call__(self, where, argument, value, given=_check.NOTHING):
        if value is not None and given["likelihood"] in likelihoods.NAMED.values():
            value = _check.host(where, argument, value)
        super().__call__(where, argument, value, given)
        number = num_inputs(given["inputs"])
        if {np.shape(leaf)[:1] for leaf in jax.tree.leaves(value)} - {(number,)}:
            rule = f"arrays [input, ...] of {number} inputs"
            _check.fail(where, argument, rule, jax.tree.map(np.shape, value))
        return value


def num_inputs(inputs: Any) -> int:
    """Return the length of arrays `[input, ...]`."""
    return np.shape(jax.tree.leaves(inputs)[0])[0]


@dataclass(frozen=True)
class Stacked(_check.Tree):
    """Arrays `[chain, draw, ...]`."""

    text: str = "a tree of arrays [chain, draw, ...] with the same two leading axes, neither empty"
    keys: bool = False

    def __call__(self, where, argument, value, given=_check.NOTHING):
        super().__call__(where, argument, value, given)
        axes = {np.shape(leaf)[:2] for leaf in jax.tree.leaves(value)}
        if len(axes) != 1 or len(next(iter(axes))) != 2 or 0 in next(iter(axes)):
            _check.fail(where, argument, self.text, sorted(axes))
        return value
