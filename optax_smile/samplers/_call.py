"""What every sampler checks when a loop calls `update`."""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _check, _tree

StepSize: TypeAlias = float | jax.Array | optax.Schedule


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
    if params is None:
        raise ValueError(_tree.MISSING_PARAMS)
    _tree.check_params(where, params, smallest=2)
    _tree.check_alike(where, "params", params, known, "the one given to init")
    _tree.check_alike(where, "updates", updates, params, "params")
    if value is None:
        return None
    if not isinstance(value, (int, float, np.number, np.ndarray, jax.Array)):
        _check.fail(where, "value", "the scalar mean loss", type(value).__name__)
    if jnp.shape(value) != ():
        _check.fail(where, "value", "the scalar mean loss", f"shape {jnp.shape(value)}")
    return jnp.asarray(value, dtype)


def key(where: str, data: jax.Array, like: jax.Array) -> jax.Array:
    """Make a typed key like `like` of the raw one in a state, which any checkpoint can hold."""
    expected = jax.eval_shape(jax.random.key_data, like)
    if jnp.shape(data) != expected.shape or jnp.result_type(data) != expected.dtype:
        rule = f"the state of {where}, whose key is {expected.dtype}{list(expected.shape)}"
        got = f"a key of {jnp.result_type(data)}{list(jnp.shape(data))}"
        _check.fail(where, "state", rule, got)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(like))


def schedule(step_size: StepSize) -> optax.Schedule:
    """Take a number as a schedule that stays."""
    return step_size if callable(step_size) else lambda count: step_size
