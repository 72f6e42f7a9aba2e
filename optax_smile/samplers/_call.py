"""From the definition of a sampler to the transformation that a loop calls."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Literal, ParamSpec

import jax.core
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _check, _settings, _tree, potential
from optax_smile._types import Options, StepSize, Tree, Unchecked
from optax_smile.potential import PerParameter, Potential
from optax_smile.samplers import _chain, _leaves
from optax_smile.samplers._chain import Dynamics, PackedState
from optax_smile.state import check_format, is_concrete

Arguments = ParamSpec("Arguments")
Definition = Callable[Arguments, object]
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
# Wrong names under which loops pass the mean loss; other keywords are for other parts of a chain.
MISNAMED = ("losses", "loss_value", "mean_loss", "val", "values")


def sampler(
    assemble: Callable[[str, Tree, Options], Dynamics],
    constraints: Mapping[str, _check.Constraint],
    fixed: Mapping[str, object] = _check.NOTHING,
) -> Callable[[Definition[Arguments]], Maker[Arguments]]:
    """Turn the definition of a sampler into the function that users call.

    The definition is a function with the arguments and the docstring of the sampler. It returns
    what is particular to the sampler, such as the rule by which it moves, from which
    `assemble(name, particular, arguments)` makes the dynamics. The `constraints` come besides those
    of `SHARED`; `fixed` are arguments that the definition does not have.
    """

    def decorate(define: Definition[Arguments]) -> Maker[Arguments]:
        where, signature = define.__name__, inspect.signature(define)
        rules = {**SHARED, **constraints}
        rules = {argument: rules[argument] for argument in signature.parameters}

        @_check.arguments(where, **rules)
        @functools.wraps(define)
        def build(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Dynamics:
            # First, so that Python's own errors about missing arguments name the function.
            particular = define(*args, **kwargs)
            return assemble(where, particular, {**fixed, **_bound(signature, args, kwargs)})

        @functools.wraps(define)
        def make(
            *args: Arguments.args, **kwargs: Arguments.kwargs
        ) -> optax.GradientTransformationExtraArgs:
            dynamics, given = build(*args, **kwargs), _bound(signature, args, kwargs)

            @_check.own_flags
            def init(params: optax.Params) -> Tree:
                return dynamics.init(_leaves.candidates(f"{where}.init", params))

            settings = {"name": where, **fixed, **given, **dynamics.chosen}
            reporting = _settings.reporting(init, settings)
            update = _update(dynamics, _compiled(dynamics.update, given))
            return optax.GradientTransformationExtraArgs(reporting, update)

        # Users see the type that they get, not that of the definition.
        returned = optax.GradientTransformationExtraArgs
        make.__annotations__ = define.__annotations__ | {"return": returned}
        text = f"optax.{returned.__name__}"
        vars(make)["__signature__"] = signature.replace(return_annotation=text)
        return make

    return decorate


def _bound(signature: inspect.Signature, args: tuple, kwargs: Options) -> Options:
    """Arguments of a call by name, defaults included."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def posterior_of(where: str, arguments: Options) -> Potential:
    """Return the posterior that the arguments of a sampler define."""
    posterior = Potential(**{x: arguments[x] for x in Potential._fields if x in arguments})
    potential.check(where, posterior)
    return posterior


def _compiled(update: Callable, arguments: Options) -> Callable:
    """Compile `update` where a loop calls it outside of `jax.jit`.

    `optax.inject_hyperparams` makes its numbers arrays and builds a sampler in every call, which
    would be compiled each time.
    """

    def is_injected(leaf: Unchecked) -> bool:
        is_array = isinstance(leaf, jax.Array) and leaf.ndim == 0
        return is_array and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)

    if any(map(is_injected, jax.tree.leaves(arguments))):
        return update
    program = jax.jit(update)

    def run(*given: Tree) -> Tree:
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(given))
        return update(*given) if is_traced else program(*given)

    return run


def _update(dynamics: Dynamics, run: Callable) -> Callable:
    """Make the `update` that a loop calls: check its arguments, then run the call."""
    where = f"{dynamics.name}.update"

    def update(
        updates: optax.Updates,
        state: Tree,
        params: optax.Params | None = None,
        *,
        value: Unchecked = None,
        loss: Unchecked = None,
        **others: Unchecked,
    ) -> tuple[optax.Updates, PackedState]:
        if params is None:
            raise ValueError(_tree.MISSING_PARAMS)
        value = mean_loss(where, value, loss, others)
        if not isinstance(state, PackedState):
            _check.fail(where, "state", _chain.state_of(dynamics.name), _check.show(state))
        check_format(where, "state", state)
        known = state.like_params
        moving, params = _leaves.select(where, updates, params, known)
        if jax.tree.structure(moving) != jax.tree.structure(known):
            # A compiled call sets `is_altered`.
            number = state.unpack().last_update.num_gradients
            if is_concrete(number) and np.any(np.asarray(number) > 0):
                _leaves.require_all(where, moving, known)
        displacement, after = run(moving, state, params, value)
        return _leaves.put_back(displacement, updates), after

    update.__qualname__ = where
    return _check.own_flags(update)


def mean_loss(where: str, value: Unchecked, loss: Unchecked, others: Mapping[str, object]) -> Tree:
    """Require one scalar mean loss, under one of its two names, or none; `others` are keywords."""
    if value is not None and loss is not None:
        advice = "Both are the mean loss: pass it once."
        _check.fail(where, "loss", "left out where `value` is given", _check.show(loss), advice)
    name, given = ("value", value) if loss is None else ("loss", loss)
    if given is None:
        if misnamed := [name for name in MISNAMED if name in others]:
            rule = "left out unless `value` is passed"
            advice = "If it is the mean loss, pass it as `value=`; if not, pass `value=` as well."
            _check.fail(where, misnamed[0], rule, "no `value`", advice)
        return None
    is_number = _check.is_real(getattr(given, "dtype", type(given))) and type(given) is not bool
    if not is_number or jnp.shape(given) != ():
        got = f"shape {jnp.shape(given)}" if is_number else _check.show(given)
        _check.fail(where, name, "the scalar mean loss", got)
    return given


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
        # The dynamics reject the step of a traced one.
        if not isinstance(number, jax.core.Tracer) and np.less(number, 0):
            rule = "a schedule that gives no number below 0"
            _check.fail(where, "step_size", rule, f"one that gives {number}")
        return number

    return size
