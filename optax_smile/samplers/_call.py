"""What every sampler does when a loop calls `init` and `update`."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Literal, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _check, _settings, _tree
from optax_smile._types import Options, StepSize, Tree, Unchecked
from optax_smile.potential import PerParameter
from optax_smile.samplers import _eager, _leaves, _tracked
from optax_smile.samplers._leaves import DriverState
from optax_smile.samplers._tracked import TrackedState
from optax_smile.state import check_format, noise_id

Builder = TypeVar("Builder", bound=Callable)
State = TypeVar("State", bound=DriverState)
Update = Callable[[optax.Updates, State, optax.Params, Tree], tuple[optax.Updates, State]]
# Constraints of the arguments that define the posterior.
POSTERIOR: dict[str, _check.Constraint] = {
    "num_data": _check.Real(1, large=True),
    "prior_precision": PerParameter(_check.NONNEGATIVE),
    "prior_mean": PerParameter(_check.Real()) | _check.OneOf(Literal["start"]),
    "log_prior": _check.Function("(params)") | None,
    "temperature": _check.POSITIVE,
    "key": _check.Key(),
}
# Constraints of the arguments that all samplers share.
SHARED = POSTERIOR | {"track_params": _check.FLAG}
# Wrong names under which loops pass the mean loss; other keywords are for other parts of a chain.
MISNAMED = ("losses", "loss_value", "mean_loss", "val", "values")


class Built(optax.GradientTransformationExtraArgs):
    """The transformation that a builder returns to `sampler`.

    Attributes:
        core: `core(updates, state, params, value)`, one call on checked trees of arrays.
        facing: makes the `update` that loops call from `core`.
        chosen: arguments that the builder replaced.
        settings: further settings, a function of the parameters.
    """

    core: Callable
    facing: Callable[[Callable], Callable]
    chosen: Mapping[str, object]
    settings: Callable[[Tree], Options]

    def __new__(cls, init: Callable, core: Callable, facing: Callable, **more: object):
        built = super().__new__(cls, init, facing(core))
        vars(built).update(core=core, facing=facing, **more)
        return built


def sampler(build: Builder, **fixed: object) -> Builder:
    """Make a transformation that knows its settings and compiles `update` in an eager loop.

    Args:
        build: function of keywords that returns what `transformation` returns.
        fixed: settings for which it has no parameter.
    """
    signature = inspect.signature(build)

    @functools.wraps(build)
    def wrapper(*args: Unchecked, **kwargs: Unchecked) -> _settings.Sampler:
        # First, so that Python's own errors about missing arguments name the function.
        built = cast(Built, build(*args, **kwargs))
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        arguments = dict(given.arguments)
        if "key" in arguments:
            arguments["key"] = _check.Key()(build.__name__, "key", arguments["key"])
        run = functools.partial(_eager.run, _eager.Recipe(build, arguments), built.core)
        named = {name: built.chosen.get(name, x) for name, x in given.arguments.items()}
        settings = {"name": build.__name__, **fixed, **named}
        init = _settings.reporting(built.init, settings, built.settings)
        return _settings.Sampler(init, built.facing(run), build.__name__, named)

    return cast(Builder, wrapper)


def transformation(
    where: str,
    init: Callable[[Tree], State],
    update: Update[State],
    kind: type[State],
    track_params: bool,
    chosen: Mapping[str, object] = _check.NOTHING,
    settings: Callable[[Tree], Options] = lambda params: {},
) -> Built:
    """Add the checks of arguments and the choice of the leaves that move.

    Args:
        where: name of the sampler.
        init: `init(params)`, the state, of floating leaves only.
        update: `update(updates, state, params, value)`, displacement and state, of the leaves that
            move only.
        kind: of the state.
        track_params: whether the state holds the parameters.
        chosen, settings: see `Built`.
    """

    def checked_init(params: optax.Params) -> Tree:
        params = _leaves.candidates(f"{where}.init", params)
        state = init(params)
        return _tracked.begin(state, params) if track_params else state

    def core(
        updates: optax.Updates, state: Tree, params: optax.Params | None, value: Tree
    ) -> tuple[optax.Updates, Tree]:
        """One call, on trees of arrays: gradients and parameters have None for leaves at rest."""
        before: State = state.sampler if track_params else state
        expected = jax.eval_shape(init, before.like_params)
        if jax.tree.structure(before) != jax.tree.structure(expected):
            _check.fail(f"{where}.update", "state", _is_state_of(where), OTHERWISE)
        moves, is_seen = _leaves.moving(updates, before.like_params), params is not None
        differs = jnp.zeros_like(before.sampled.is_inconsistent)
        if track_params:
            params, differs = _tracked.here(state, params, moves)
        params = cast(optax.Params, params)
        updates = jax.tree.map(lambda g, x: g.astype(x.dtype), updates, params)
        if all(moves):
            displacement, after = update(updates, before, params, value)
        else:
            like = jax.eval_shape(init, _leaves.only(before.like_params, moves))
            displacement, after = update(updates, _leaves.narrow(before, like), params, value)
            after = _leaves.widen(after, before)
        is_first = before.last_update.num_gradients == 0
        sampled = before.sampled.observe(moves, _tree.size(updates), is_first, differs)
        after = after._replace(sampled=sampled)
        if track_params:
            after = _tracked.proceed(state, after, params, displacement, is_seen)
        return displacement, after

    facing = functools.partial(_facing, where, kind, track_params)
    return Built(checked_init, core, facing, chosen=chosen, settings=settings)


OTHERWISE = "one of a sampler with other settings"


def _is_state_of(where: str) -> str:
    return f"what `init` or `update` of {where} returned"


def _facing(where: str, kind: type, track_params: bool, run: Callable) -> Callable:
    """Make the `update` that a loop calls: check its arguments, then run the core."""
    where_called = f"{where}.update"

    def update(
        updates: optax.Updates,
        state: Tree,
        params: optax.Params | None = None,
        *,
        value: Unchecked = None,
        loss: Unchecked = None,
        **others: Unchecked,
    ) -> tuple[optax.Updates, Tree]:
        if params is None and not track_params:
            raise ValueError(_tree.MISSING_PARAMS)
        value = mean_loss(where_called, value, loss, others)
        is_kind = isinstance(getattr(state, "sampler", state), kind)
        if isinstance(state, TrackedState) != track_params or not is_kind:
            got = OTHERWISE if is_kind else _check.show(state)
            _check.fail(where_called, "state", _is_state_of(where), got)
        state = cast(DriverState | TrackedState, state)
        check_format(where_called, "state", state)
        chosen = _leaves.select(where_called, updates, params, state.like_params)
        displacement, after = run(chosen.updates, state, chosen.params, value)
        if _leaves.is_known_true(after.sampled.is_inconsistent):
            _explain(where_called, state, updates)
        return chosen.put_back(displacement), after

    return update


def _explain(where: str, before: DriverState | TrackedState, updates: optax.Updates):
    """Raise the error of a call that does not fit those before it."""
    before.sampled.require_consistent(where)
    sampler = before.sampler if isinstance(before, TrackedState) else before
    if sampler.last_update.num_gradients > 0:
        _leaves.check_same(where, before.sampled, updates, before.like_params)
    advice = "If you replaced the weights, begin again with `init`."
    _check.fail(where, "params", _tracked.FOREIGN, "others", advice)


def mean_loss(where: str, value: Unchecked, loss: Unchecked, others: Mapping[str, object]) -> Tree:
    """Require one scalar mean loss, under one of its two names, or none.

    Args:
        where: the function that was called.
        value, loss: what it received under these names.
        others: its other keywords.
    """
    if value is not None and loss is not None:
        advice = "Both are the mean loss: pass it once."
        _check.fail(where, "loss", "left out where `value` is given", _check.show(loss), advice)
    name, given = ("value", value) if loss is None else ("loss", loss)
    if given is None:
        if misnamed := [name for name in MISNAMED if name in others]:
            rule = "named `value`, if it is the mean loss"
            advice = "Otherwise pass `value` as well."
            _check.fail(where, misnamed[0], rule, "nothing of that name", advice)
        return None
    if isinstance(given, bool) or not _check.is_real(getattr(given, "dtype", type(given))):
        _check.fail(where, name, "the scalar mean loss", _check.show(given))
    if jnp.shape(given) != ():
        _check.fail(where, name, "the scalar mean loss", f"shape {jnp.shape(given)}")
    return given


def shared_stats(state: DriverState) -> Options:
    """Return the part of `Stats` that both drivers know."""
    return {
        "num_rejected": state.guardrail.num_rejected,
        "num_nonfinite": state.guardrail.num_nonfinite,
        "num_altered": state.probe.num_altered,
        "is_altered": state.probe.is_altered | state.sampled.is_inconsistent,
        "num_parameters": state.sampled.num_parameters,
        "noise_id": noise_id(state.key, state.last_update.num_gradients),
        **state.last_update.stats(),
    }


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
    """Turn a number into a constant schedule, and check the numbers of any other schedule."""
    if not callable(step_size):
        return lambda count: step_size

    def size(count: Tree) -> Tree:
        number = step_size(count)
        is_number = _check.is_real(getattr(number, "dtype", type(number))) and np.ndim(number) == 0
        if not is_number or isinstance(number, bool):
            rule = "a schedule that gives a number for each count of steps"
            _check.fail(where, "step_size", rule, f"one that gives {_check.show(number)}")
        return number

    return size
