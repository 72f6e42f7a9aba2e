"""What every sampler checks when a loop calls `update`."""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _check, _tree
from optax_smile.potential import PerParameter
from optax_smile.state import check_format

StepSize: TypeAlias = float | jax.Array | optax.Schedule
# Constraints of the arguments that all samplers share.
POSTERIOR: dict[str, _check.Constraint] = {
    "num_data": _check.Real(1, large=True),
    "prior_precision": PerParameter(_check.NONNEGATIVE),
    "prior_mean": PerParameter(_check.Real()) | _check.OneOf(Literal["start"]),
    "log_prior": _check.Function("(params)") | None,
    "temperature": _check.POSITIVE,
    "key": _check.Key(),
}
# What loops call the mean loss by mistake; other keywords are for other parts of a chain.
MISNAMED = ("loss", "losses", "loss_value", "mean_loss", "val", "values")


def transformation(
    where: str,
    init: Callable[[Any], Any],
    update: Callable[[Any, Any, Any, Any], tuple[Any, Any]],
    kind: type,
    like: Callable[[Any], Any],
) -> optax.GradientTransformationExtraArgs:
    """Make an Optax transformation that checks what it is called with.

    Args:
        where: name of the sampler.
        init: `init(params)`, the state.
        update: `update(updates, state, params, value)`, displacement and state.
        kind: of the state.
        like: a tree of a state that is like the parameters given to `init`.
    """

    def checked_init(params: Any) -> Any:
        _tree.check_params(f"{where}.init", params, smallest=2)
        _check.Tree(finite=True)(f"{where}.init", "params", params)
        return init(params)

    def checked_update(
        updates: Any, state: Any, params: Any = None, *, value: Any = None, **others: Any
    ) -> Any:
        if params is None:
            raise ValueError(_tree.MISSING_PARAMS)
        if value is None and (misnamed := [name for name in MISNAMED if name in others]):
            rule = "named `value`, if it is the mean loss"
            got = "nothing of that name"
            _check.fail(f"{where}.update", misnamed[0], rule, got, "Else pass `value` as well.")
        _check_state(state)
        return update(updates, state, params, value)

    def _check_state(state: Any):
        rule, got = f"what `init` or `update` of {where} returned", _check.show(state)
        if not isinstance(state, kind):
            _check.fail(f"{where}.update", "state", rule, got)
        check_format(f"{where}.update", "state", state)
        expected = jax.eval_shape(init, like(state))
        if jax.tree.structure(state) != jax.tree.structure(expected):
            _check.fail(f"{where}.update", "state", rule, "one of a sampler built otherwise")

    return optax.GradientTransformationExtraArgs(checked_init, checked_update)


def check(
    where: str, updates: Any, params: Any, value: Any, known: Any, dtype: jnp.dtype
) -> jax.Array | None:
    """Require what `update` needs, and give `value` the precision of the state.

    Args:
        where: name of the sampler.
        updates: gradient of the mean loss.
        params: where it was evaluated.
        value: mean loss there, or None.
        known: a tree of the state that is like the parameters given to `init`.
        dtype: precision of the state's scalars.
    """
    where = f"{where}.update"
    _tree.check_params(where, params, smallest=2)
    _tree.check_alike(where, "params", params, known, "the one given to init")
    _tree.check_gradients(where, updates, params, "params")
    if value is None:
        return None
    if isinstance(value, bool) or not _check.is_real(getattr(value, "dtype", type(value))):
        _check.fail(where, "value", "the scalar mean loss", _check.show(value))
    if jnp.shape(value) != ():
        _check.fail(where, "value", "the scalar mean loss", f"shape {jnp.shape(value)}")
    return jnp.asarray(value, dtype)


def key(where: str, data: jax.Array, like: jax.Array) -> jax.Array:
    """Make a typed key like `like` of the raw one in a state, which any checkpoint can hold."""
    expected = jax.eval_shape(jax.random.key_data, like)
    if jnp.shape(data) != expected.shape or jnp.result_type(data) != expected.dtype:
        rule = f"the state of {where}, whose key is {expected.dtype}{list(expected.shape)}"
        got = f"a key of {jnp.result_type(data)}{list(jnp.shape(data))}"
        _check.fail(f"{where}.update", "state", rule, got)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(like))


def alike(number: float | jax.Array, scalar: jax.Array) -> jax.Array:
    """Give a number the precision of a scalar of the state, and inside `shard_map` its axes."""
    return jnp.zeros_like(scalar) + jnp.asarray(number, scalar.dtype)


def schedule(where: str, step_size: StepSize) -> optax.Schedule:
    """Take a number as a schedule that stays, and require numbers of any other."""
    if not callable(step_size):
        return lambda count: step_size

    def size(count: Any) -> Any:
        found = step_size(count)
        is_number = _check.is_real(getattr(found, "dtype", type(found))) and np.ndim(found) == 0
        if not is_number or isinstance(found, bool):
            rule = "a schedule that gives a number for each count of steps"
            _check.fail(where, "step_size", rule, f"one that gives {_check.show(found)}")
        return found

    return size
