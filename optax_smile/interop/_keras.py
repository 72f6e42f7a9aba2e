"""A sampler as the optimizer of a Keras model."""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import jax.core
import jax.numpy as jnp
import keras
import numpy as np
import optax

import optax_smile
from optax_smile import _check, state
from optax_smile._types import Options
from optax_smile._warn import warn
from optax_smile.stages.step_size import Tuner

NAME = "sampler"
TUNERS = {"angle_tuner", "quantile_tuner"}


@keras.saving.register_keras_serializable(package="optax_smile")
class SamplerOptimizer(keras.Optimizer):
    """The optimizer that `keras_optimizer` returns: the sampler's state in variables of Keras."""

    def __init__(self, sampler: optax.GradientTransformation, name: str = NAME):
        super().__init__(learning_rate=1.0, name=name)
        self._learning_rate.assign = functools.partial(_keep_rate, self._learning_rate)
        # In an object, since Keras would rebuild a tuple that is an attribute.
        self._hidden = types.SimpleNamespace(
            sampler=sampler, update=optax.with_extra_args_support(sampler).update, structure=None
        )
        self._of_state = []

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Start a chain at the current weights."""
        if (policy := keras.config.dtype_policy().name) == "mixed_float16":
            rule, remedy = "float32 or mixed_bfloat16", "Gradients in float16 lose small numbers."
            _check.fail("keras_optimizer", "dtype_policy", rule, policy, remedy)
        super().build(variables)
        begun = self._hidden.sampler.init([jnp.asarray(x.value) for x in variables])
        state.find(begun, "keras_optimizer", "sampler")
        leaves, self._hidden.structure = jax.tree.flatten(begun)
        self._of_state = []
        for number, leaf in enumerate(leaves):
            initial = functools.partial(_copy, leaf)
            of_leaf = {"shape": leaf.shape, "dtype": str(leaf.dtype), "name": f"state_{number}"}
            self._of_state.append(self.add_variable(initializer=cast(Any, initial), **of_leaf))

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        if len(grads) != len(self._trainable_variables):
            missing = [x.path for x in self._trainable_variables if x not in trainable_variables]
            rule, remedy = "one that depends on all trainable variables", "Freeze the others."
            _check.fail("keras_optimizer", "loss", rule, f"no gradient of {missing}", remedy)
        params = [x.value for x in trainable_variables]
        before = jax.tree.unflatten(self._hidden.structure, [x.value for x in self._of_state])
        updates, after = self._hidden.update(list(grads), before, params)
        moved = optax.apply_updates(params, updates)
        for variable, value in zip(trainable_variables, jax.tree.leaves(moved), strict=True):
            variable.assign(value)
        for variable, value in zip(self._of_state, jax.tree.leaves(after), strict=True):
            variable.assign(value)

    def scale_loss(self, loss):
        """Warn once per compilation if layers add losses; `fit` calls this with the whole loss."""
        if sys._getframe(1).f_locals.get("losses"):
            warn(
                "`keras_optimizer`: layers add losses, by a regularizer or `add_loss`. On weights,"
                " that is a second prior, times `num_data`. Remove it, and set `prior_precision` or"
                " `log_prior` of the sampler."
            )
        return super().scale_loss(loss)

    # Keras' own setter takes a schedule without assigning it.
    learning_rate = property(
        lambda self: self._learning_rate, lambda self, rate: self._learning_rate.assign(rate)
    )

    @property
    def state(self) -> optax.OptState:
        """State of the sampler, for `stats` and `last_accepted`."""
        if self._hidden.structure is None:
            _check.fail("keras_optimizer", "state", "read after `fit` has begun", "none yet")
        return jax.tree.unflatten(self._hidden.structure, [x.value for x in self._of_state])

    def last_accepted(self) -> list[jax.Array]:
        """Return the current draw, in the order of `model.trainable_variables`."""
        return state.last_accepted(self.state, [x.value for x in self._trainable_variables])

    def get_config(self) -> Options:
        """Describe the sampler, if plain numbers suffice."""
        return {"name": self.name, "sampler": _written(self._hidden.sampler)}

    @classmethod
    def from_config(cls, config: Options, custom_objects: object = None) -> SamplerOptimizer:
        """Rebuild the sampler."""
        if config["sampler"] is None:
            rule = "built from numbers alone, so that a saved model can hold it"
            remedy = "Call `load_model(..., compile=False)` and `compile` the model."
            _check.fail("keras_optimizer", "sampler", rule, "a saved model without it", remedy)
        return cls(_built(config["sampler"]), config["name"])


def _copy(leaf: jax.Array, shape: object, dtype: object = None) -> jax.Array:
    """Initialize a variable."""
    return jnp.array(leaf)


def _keep_rate(variable: keras.Variable, value: object) -> object:
    """Refuse another learning rate; Keras itself assigns the old one after a compiled step."""
    if not isinstance(value, jax.core.Tracer) and value != 1:
        rule, remedy = "left at 1", "Remove the callback, and set `step_size` of the sampler."
        _check.fail("keras_optimizer", "learning_rate", rule, _check.show(value), remedy)
    return type(variable).assign(variable, value)


def _may_be_built(name: str, arguments: Mapping[str, object]) -> bool:
    """Whether a saved model may name a function: a sampler or a tuner that writes no files."""
    if name == "recorded":
        return arguments.get("directory") is None
    declared = _check.DECLARED.get(name, ((), ()))[1]
    return name in TUNERS or {"step_size", "num_data"} <= {*declared}


def _written(sampler: object) -> Options | None:
    """Return name and arguments of a sampler in a form for JSON; None if that is impossible."""
    # What a sampler says of itself; other transformations say nothing.
    init = getattr(sampler, "init", None)
    name_of_sampler, arguments = getattr(init, "name", ""), getattr(init, "arguments", {})
    if not _may_be_built(name_of_sampler, arguments):
        return None
    described: Options = {}
    for name, value in arguments.items():
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = {"key": np.asarray(jax.random.key_data(value)).tolist()}
        elif isinstance(value, optax.GradientTransformation):
            value = {"built": _written(value)}
        elif isinstance(value, Tuner) and value.name in TUNERS:
            value = {"built": {"name": value.name, "arguments": vars(value)}}
        is_plain = value is None or isinstance(value, (bool, int, float, str, dict))
        if not is_plain or value == {"built": None}:
            return None
        described[name] = value
    return {"name": name_of_sampler, "arguments": described}


def _built(described: Options) -> optax.GradientTransformation:
    """Build what `_written` described."""

    def read(value):
        if not isinstance(value, dict):
            return value
        if "built" in value:
            return _built(value["built"])
        return jax.random.wrap_key_data(jnp.asarray(value["key"], jnp.uint32))

    name, given = described["name"], described["arguments"]
    if not _may_be_built(name, given):
        rule, remedy = "a sampler of optax_smile that writes no files", "Do not trust this file."
        _check.fail("keras_optimizer", "sampler", rule, _check.show(name), remedy)
    return operator.attrgetter(name)(optax_smile)(**{x: read(y) for x, y in given.items()})
