"""What every sampler does when a loop calls `init` and `update`."""

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _check, _settings, _tree
from optax_smile.potential import PerParameter
from optax_smile.samplers import _eager, _leaves, _tracked
from optax_smile.samplers._tracked import TrackedState
from optax_smile.state import check_format

StepSize: TypeAlias = float | jax.Array | optax.Schedule
Builder = TypeVar("Builder", bound=Callable)
# Constraints of the arguments that tell the posterior.
POSTERIOR: dict[str, _check.Constraint] = {
    "num_data": _check.Real(1, large=True),
    "prior_precision": PerParameter(_check.NONNEGATIVE),
    "prior_mean": PerParameter(_check.Real()) | _check.OneOf(Literal["start"]),
    "log_prior": _check.Function("(params)") | None,
    "temperature": _check.POSITIVE,
    "key": _check.Key(),
}
# And of those that all samplers share.
SHARED = POSTERIOR | {"track_params": _check.FLAG}
# What loops call the mean loss by mistake; other keywords are for other parts of a chain.
MISNAMED = ("losses", "loss_value", "mean_loss", "val", "values")


def sampler(build: Builder, **fixed: Any) -> Builder:
    """Let what a builder returns know its settings, and compile `update` in an eager loop.

    Args:
        build: function that returns what `transformation` returns.
        fixed: settings that it has no parameter for.
    """
    return _settings.recorded(_eager.compiled(build), **fixed)


def transformation(
    where: str,
    init: Callable[[Any], Any],
    update: Callable[[Any, Any, Any, Any], tuple[Any, Any]],
    kind: type,
    track_params: bool,
    **told: Any,
) -> _settings.Sampler:
    """Make an Optax transformation that checks its arguments and chooses the leaves that move.

    Args:
        where: name of the sampler.
        init: `init(params)`, the state, of floating leaves alone.
        update: `update(updates, state, params, value)`, displacement and state, of the leaves that
            move alone.
        kind: of the state, which has `like_params` and `sampled`.
        track_params: whether the state holds the parameters.
        told: what `Sampler` is to know.
    """

    def checked_init(params: Any) -> Any:
        params = _leaves.candidates(f"{where}.init", params)
        state = init(params)
        return _tracked.begin(state, params) if track_params else state

    def core(updates: Any, state: Any, params: Any, value: Any) -> tuple[Any, Any]:
        """One call, on trees of arrays: gradients and parameters have None where none moves."""
        before = state.sampler if track_params else state
        expected = jax.eval_shape(init, before.like_params)
        if jax.tree.structure(before) != jax.tree.structure(expected):
            rule, got = _is_state_of(where), "one of a sampler built otherwise"
            _check.fail(f"{where}.update", "state", rule, got)
        moves, is_seen = _leaves.moving(updates, before.like_params), params is not None
        differs = jnp.zeros_like(before.sampled.is_inconsistent)
        if track_params:
            params, differs = _tracked.here(state, params, moves)
        if all(moves):
            displacement, after = update(updates, before, params, value)
        else:
            like = jax.eval_shape(init, _leaves.only(before.like_params, moves))
            narrowed = _leaves.narrow(before, like)
            displacement, after = update(updates, narrowed, params, value)
            after = _leaves.widen(after, before)
        is_first = before.last_update.num_gradients == 0
        size = _tree.size(updates)
        sampled = _leaves.observe(before.sampled, moves, size, is_first, differs)
        after = after._replace(sampled=sampled)
        if track_params:
            after = _tracked.proceed(state, after, params, displacement, is_seen)
        return displacement, after

    facing = functools.partial(_facing, where, kind, track_params)
    return _settings.Sampler(checked_init, facing(core), core=core, facing=facing, **told)


def _is_state_of(where: str) -> str:
    return f"what `init` or `update` of {where} returned"


def _facing(where: str, kind: type, track_params: bool, run: Callable) -> Callable:
    """Make the `update` that a loop calls of one that gets checked trees of arrays."""
    where_called = f"{where}.update"

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        value: Any = None,
        loss: Any = None,
        **others: Any,
    ) -> tuple[Any, Any]:
        if params is None and not track_params:
            raise ValueError(_tree.MISSING_PARAMS)
        value = mean_loss(where_called, value, loss, others)
        if isinstance(state, TrackedState) != track_params or not isinstance(
            getattr(state, "sampler", state), kind
        ):
            is_other = isinstance(getattr(state, "sampler", state), kind)
            got = "one of a sampler built otherwise" if is_other else _check.show(state)
            _check.fail(where_called, "state", _is_state_of(where), got)
        check_format(where_called, "state", state)
        known = state.like_params
        chosen = _leaves.select(where_called, updates, params, known)
        moves, after = run(chosen.updates, state, chosen.params, value)
        if _leaves.is_known_true(after.sampled.is_inconsistent):
            _explain(where_called, state, updates)
        return chosen.put_back(moves), after

    return update


def _explain(where: str, before: Any, updates: Any):
    """Raise the error of a call that does not fit those before it."""
    before.sampled.require_consistent(where)
    sampler = getattr(before, "sampler", before)
    is_first = bool(sampler.last_update.num_gradients == 0)
    _leaves.check_same(where, before.sampled, updates, before.like_params, is_first)
    advice = "After other weights were put in their place, begin again with `init`."
    _check.fail(where, "params", _tracked.FOREIGN, "others", advice)


def mean_loss(where: str, value: Any, loss: Any, others: Any) -> Any:
    """Require one scalar mean loss, under one of its two names, or none.

    Args:
        where: the function that was called.
        value, loss: what it got under these names.
        others: its other keywords.
    """
    if value is not None and loss is not None:
        advice = "Both are the mean loss: pass it once."
        _check.fail(where, "loss", "left out where `value` is given", _check.show(loss), advice)
    name, given = ("value", value) if loss is None else ("loss", loss)
    if given is None:
        if misnamed := [name for name in MISNAMED if name in others]:
            rule = "named `value`, if it is the mean loss"
            got = "nothing of that name"
            _check.fail(where, misnamed[0], rule, got, "Else pass `value` as well.")
        return None
    if isinstance(given, bool) or not _check.is_real(getattr(given, "dtype", type(given))):
        _check.fail(where, name, "the scalar mean loss", _check.show(given))
    if jnp.shape(given) != ():
        _check.fail(where, name, "the scalar mean loss", f"shape {jnp.shape(given)}")
    return given


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
