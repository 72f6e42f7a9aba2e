"""From the definition of a sampler to the transformation that a loop calls.

A transformation checks the arguments from the loop and converts them for the dynamics.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _check, _check_trees, _joined, _places, _settings, _tree, potential
from optax_smile._packed import State, pack
from optax_smile._types import Options, StepSize
from optax_smile.potential import PerParameter, Potential
from optax_smile.samplers import _leaves
from optax_smile.samplers._chain import ChainState, D
from optax_smile.stages import probe, rejection
from optax_smile.state import STATE_FORMAT, check_format, no_update

Arguments = ParamSpec("Arguments")
Particular = TypeVar("Particular")
Definition = Callable[Arguments, Particular]
Maker = Callable[Arguments, optax.GradientTransformationExtraArgs]
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
SHARED = POSTERIOR | {"step_size": _check.STEP_SIZE}
# Wrong names for the mean loss; other keywords may be for other parts of a chain.
MISNAMED = ("losses", "loss_value", "mean_loss", "val", "values")
STATE = "what `init` or `update` of"


def sampler(
    assemble: Callable[[str, Particular, Options], Dynamics[Any]],
    constraints: Mapping[str, _check.Constraint],
    fixed: Mapping[str, object] = _check.NOTHING,
) -> Callable[[Definition[Arguments, Particular]], Maker[Arguments]]:
    """Turn the definition of a sampler into the function that users call.

    The definition is a function with the arguments and the docstring of the sampler. It returns the
    part that is specific to the sampler, such as its rule. `assemble(name, particular, arguments)`
    makes the dynamics from it. `constraints` are added to those of `SHARED`; `fixed` are arguments
    that the definition does not have.
    """

    def decorate(define: Definition[Arguments, Particular]) -> Maker[Arguments]:
        name, signature = define.__name__, inspect.signature(define)
        rules = {**SHARED, **constraints}
        rules = {argument: rules[argument] for argument in signature.parameters}

        @_check.arguments(name, **rules)
        @functools.wraps(define)
        def build(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Dynamics[Any]:
            # Call this first, so that Python's own errors about missing arguments name the
            # function.
            particular = define(*args, **kwargs)
            return assemble(name, particular, {**fixed, **_bound(signature, args, kwargs)})

        @functools.wraps(define)
        def make(
            *args: Arguments.args, **kwargs: Arguments.kwargs
        ) -> optax.GradientTransformationExtraArgs:
            dynamics, given = build(*args, **kwargs), _bound(signature, args, kwargs)

            @_check.own_flags
            @_check.called(f"{name}.init")
            def init(params: optax.Params) -> State[Any]:
                return dynamics.init(_leaves.candidates(params))

            settings = {"name": name, **fixed, **given, **dynamics.chosen}
            reporting = _settings.reporting(init, settings)
            update = _update(dynamics, _compiled(dynamics.update, given))
            return optax.GradientTransformationExtraArgs(reporting, update)

        # Show users the return type of the sampler, not that of the definition.
        returned = optax.GradientTransformationExtraArgs
        make.__annotations__ = define.__annotations__ | {"return": returned}
        text = f"optax.{returned.__name__}"
        vars(make)["__signature__"] = signature.replace(return_annotation=text)
        return make

    return decorate


def _bound(signature: inspect.Signature, args: tuple, kwargs: Options) -> Options:
    """Return the arguments of a call by name, defaults included."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _compiled(update: Callable, arguments: Mapping[str, object]) -> Callable:
    """Compile `update` if a loop calls it outside of `jax.jit`.

    Not inside `optax.inject_hyperparams`, which passes arrays and builds a sampler in every call.
    """

    def is_injected(leaf: Any) -> bool:
        is_array = isinstance(leaf, jax.Array) and leaf.ndim == 0
        return is_array and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)

    if any(map(is_injected, jax.tree.leaves(arguments))):
        return update
    program = jax.jit(update)

    def run(*given: object) -> object:
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(given))
        return update(*given) if is_traced else program(*given)

    return run


def _update(dynamics: Dynamics[Any], run: Callable) -> Callable:
    """Make the `update` for loops: check the arguments, then run the call."""
    name = f"{dynamics.name}.update"

    @_check.called(name)
    def update(
        updates: optax.Updates,
        state: object,
        params: optax.Params | None = None,
        *,
        value: object = None,
        loss: object = None,
        reject: Any = None,
        **others: object,
    ) -> tuple[optax.Updates, State[Any]]:
        if params is None:
            raise ValueError(_check_trees.MISSING_PARAMS)
        value = mean_loss(value, loss, others)
        kind = str(getattr(reject, "dtype", type(reject).__name__))
        if reject is not None and (kind != "bool" or np.shape(reject)):
            _check.fail("reject", "a scalar True or False", _check.show(reject))
        if not isinstance(state, State):
            _check.fail("state", f"{STATE} {dynamics.name} returned", _check.show(state))
        check_format("state", state)
        sampled, params = _leaves.select(updates, params, state)
        displacement, after = run(sampled, state, params, value, reject)
        return _leaves.put_back(displacement, updates), after

    update.__qualname__ = name
    return _check.own_flags(update)


class Call(NamedTuple):
    """Arguments of a call; its trees have only the leaves that move, None for the others.

    Attributes:
        posterior: the posterior, with the prior's mean of this chain.
        updates, value: gradient and mean loss, with `log_prior` if there is one.
        passed: gradient as the loop passed it, if it differs from `updates`.
        reject: whether the loop rejects the open step, which the state does not count; or None.
        places: positions of the entries of each leaf, see `_places`.
    """

    posterior: potential.Potential
    updates: optax.Updates
    passed: optax.Updates | None
    params: optax.Params
    value: jax.Array | None
    reject: jax.Array | None
    places: _places.Places


@dataclass(frozen=True, kw_only=True, eq=False)
class Dynamics(Generic[D]):
    """A sampler. The families implement `begin` and `process`.

    Attributes:
        name: name of the sampler.
        posterior: the posterior to sample.
        step_size: schedule, a function of the step count.
        seed: key of the noise; None without noise.
        is_draw: whether the step with a count, 0 for the first, ends in a draw.
        chosen: values that the sampler chose for arguments that are None.
    """

    name: str
    posterior: potential.Potential
    step_size: optax.Schedule
    seed: jax.Array | None
    is_draw: Callable[[jax.Array], jax.Array] = lambda count: jnp.ones_like(count, bool)
    chosen: Mapping[str, object] = field(default_factory=dict)

    def begin(self, params: optax.Params) -> D:
        """Return the state of the dynamics before the first call."""
        raise NotImplementedError

    def is_elementwise(self, state: ChainState[D]) -> bool:
        """Return whether `process` treats all entries alike, in whichever leaf they are."""
        return False

    def process(self, call: Call, state: ChainState[D]) -> tuple[optax.Updates, ChainState[D]]:
        """Return the displacement and the state after a call.

        In `state`, `prior_centre` is None. The caller restores it in the result.
        """
        raise NotImplementedError

    def init(self, params: optax.Params) -> State[ChainState[D]]:
        """Return the state before the first call, of floating leaves only."""
        state = self._init(params)
        return pack(state, state.like_params)

    def _init(self, params: optax.Params) -> ChainState[D]:
        with _check.called(self.name):
            potential.check_prior(self.posterior, params)
        dtype, count = _tree.dtype(params), jnp.zeros((), jnp.int32)
        last_update = no_update(dtype, self.posterior.temperature)
        return ChainState(
            dynamics=self.begin(params),
            guardrail=rejection.init(dtype),
            probe=probe.init(params),
            prior_centre=potential.centre(self.posterior, params),
            num_steps=count,
            key=None if self.seed is None else jnp.copy(jax.random.key_data(self.seed)),
            last_update=last_update._replace(is_draw=self.is_draw(count - 1)),
            has_lost_leaf=jnp.zeros((), bool),
            state_format=jnp.asarray(STATE_FORMAT, jnp.int32),
        )

    def update(
        self,
        updates: optax.Updates,
        packed: State[ChainState[D]],
        params: optax.Params,
        value: jax.Array | None,
        reject: jax.Array | None = None,
    ) -> tuple[optax.Updates, State[ChainState[D]]]:
        """Make one call; gradients and parameters have None for leaves that do not move."""
        known = packed.like_params
        expected = jax.eval_shape(self.init, known)
        if jax.tree.structure(packed) != jax.tree.structure(expected):
            got = "one of another sampler, or with other settings"
            _check.fail("state", f"{STATE} {self.name} returned", got)
        state, params = packed.unpack(), jax.tree.map(_tree.strong, params)
        if jax.tree.structure(updates) != jax.tree.structure(known):
            state = _leaves.narrowed(state, self._init(params))
        updates = jax.tree.map(lambda g, x: g.astype(x.dtype), updates, params)
        value = None if value is None else jnp.asarray(value, _tree.dtype(known))
        posterior = self.posterior
        if state.prior_centre is not None:
            posterior = posterior._replace(prior_mean=state.prior_centre)
        passed = None if posterior.log_prior is None else updates
        updates, value = potential.with_log_prior(posterior, updates, value, params)
        posterior, places = potential.spread(posterior, params), _places.of(params)
        call = Call(posterior, updates, passed, params, value, reject, places)
        process = _joined.around(self.process) if self.is_elementwise(state) else self.process
        displacement, after = process(call, state._replace(prior_centre=None))
        # `pack` casts to the dtypes of the state, which a float64 argument must not widen.
        return displacement, packed.pack(after._replace(prior_centre=state.prior_centre))

    def split(self, data: jax.Array | None) -> tuple[jax.Array | None, Any]:
        """Split the key of a state: the next one, and a typed key for the noise of this call."""
        if data is None or self.seed is None:
            return None, None
        expected = jax.eval_shape(jax.random.key_data, self.seed)
        if jnp.shape(data) != expected.shape or jnp.result_type(data) != expected.dtype:
            rule = f"the state of {self.name}, whose key is {expected.dtype}{list(expected.shape)}"
            _check.fail("state", rule, f"a key of {jnp.result_type(data)}{list(jnp.shape(data))}")
        typed = jax.random.wrap_key_data(data, impl=jax.random.key_impl(self.seed))
        key, noise_key = jax.random.split(typed)
        return jax.random.key_data(key), noise_key


def posterior_of(arguments: Options) -> Potential:
    """Return the posterior that the arguments of a sampler define."""
    posterior = Potential(**{x: arguments[x] for x in Potential._fields if x in arguments})
    potential.check(posterior)
    return posterior


def mean_loss(value: Any, loss: Any, others: Mapping[str, object]) -> Any:
    """Require at most one mean loss, a scalar under either name; `others` are further keywords."""
    if value is not None and loss is not None:
        advice = "Both are the mean loss: pass it once."
        _check.fail("loss", "left out where `value` is given", _check.show(loss), advice)
    name, given = ("value", value) if loss is None else ("loss", loss)
    if given is None:
        if misnamed := [name for name in MISNAMED if name in others]:
            rule = "left out unless `value` is passed"
            advice = "If it is the mean loss, pass it as `value=`; if not, pass `value=` as well."
            _check.fail(misnamed[0], rule, "no `value`", advice)
        return None
    is_number = _check.is_real(getattr(given, "dtype", type(given))) and type(given) is not bool
    if not is_number or jnp.shape(given) != ():
        got = f"shape {jnp.shape(given)}" if is_number else _check.show(given)
        _check.fail(name, "the scalar mean loss", got)
    return given


def schedule(step_size: StepSize) -> optax.Schedule:
    """Turn a number into a constant schedule, and check the numbers of any other schedule."""
    if not callable(step_size):
        return lambda count: step_size

    # The schedule is called later, so store the name of the user's function.
    @_check.called(_check.function_name())
    def size(count: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
        number = step_size(count)
        is_number = _check.is_real(getattr(number, "dtype", type(number))) and np.ndim(number) == 0
        if not is_number or isinstance(number, bool):
            rule = "a schedule that gives a number for each count of steps"
            _check.fail("step_size", rule, f"one that gives {_check.show(number)}")
        # If the number is traced, the dynamics reject the step.
        if not isinstance(number, jax.core.Tracer) and np.less(number, 0):
            rule = "a schedule that gives no number below 0"
            _check.fail("step_size", rule, f"one that gives {number}")
        return number

    return size
