"""From the definition of a sampler to the transformation that a loop calls.

A transformation checks what the loop passes and adapts it to the dynamics, which move. `init` fixes
which leaves may move: arrays of floating-point numbers. The state has None in the place of all
other leaves, as `equinox.filter` leaves it. Leaves whose gradient is None in the first call do not
move: from then on the state has None in their place, as that of `optax.adamw`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, ParamSpec

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _check, _check_trees, _joined, _paths, _places, _settings, _tree, potential
from optax_smile._packed import State, pack
from optax_smile._types import Options, StepSize, Tree, Unchecked
from optax_smile.potential import PerParameter, Potential
from optax_smile.samplers._chain import ChainState
from optax_smile.stages import probe, rejection
from optax_smile.state import STATE_FORMAT, check_format, is_concrete, no_update

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
OF_INIT, STATE = "the one given to init", "what `init` or `update` of"


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
        name, signature = define.__name__, inspect.signature(define)
        rules = {**SHARED, **constraints}
        rules = {argument: rules[argument] for argument in signature.parameters}

        @_check.arguments(name, **rules)
        @functools.wraps(define)
        def build(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Dynamics:
            # First, so that Python's own errors about missing arguments name the function.
            particular = define(*args, **kwargs)
            return assemble(name, particular, {**fixed, **_bound(signature, args, kwargs)})

        @functools.wraps(define)
        def make(
            *args: Arguments.args, **kwargs: Arguments.kwargs
        ) -> optax.GradientTransformationExtraArgs:
            dynamics, given = build(*args, **kwargs), _bound(signature, args, kwargs)

            @_check.own_flags
            @_check.called(f"{name}.init")
            def init(params: optax.Params) -> Tree:
                return dynamics.init(candidates(params))

            settings = {"name": name, **fixed, **given, **dynamics.chosen}
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


def _compiled(update: Callable, arguments: Options) -> Callable:
    """Compile `update` where a loop calls it outside of `jax.jit`.

    Not inside `optax.inject_hyperparams`, which passes arrays and builds a sampler in every call.
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
    name = f"{dynamics.name}.update"

    @_check.called(name)
    def update(
        updates: optax.Updates,
        state: Tree,
        params: optax.Params | None = None,
        *,
        value: Unchecked = None,
        loss: Unchecked = None,
        reject: Unchecked = None,
        **others: Unchecked,
    ) -> tuple[optax.Updates, State]:
        if params is None:
            raise ValueError(_check_trees.MISSING_PARAMS)
        value = mean_loss(value, loss, others)
        kind = str(getattr(reject, "dtype", type(reject).__name__))
        if reject is not None and (kind != "bool" or np.shape(reject)):
            _check.fail("reject", "a scalar True or False", _check.show(reject))
        if not isinstance(state, State):
            _check.fail("state", f"{STATE} {dynamics.name} returned", _check.show(state))
        check_format("state", state)
        known = state.like_params
        sampled, params = select(updates, params, known)
        if jax.tree.structure(sampled) != jax.tree.structure(known):
            # Inside `jit` the number is unknown: `Dynamics.update` sets `has_lost_leaf`.
            number = state.unpack().last_update.num_gradients
            if is_concrete(number) and np.any(np.asarray(number) > 0):
                require_all(sampled, known)
        displacement, after = run(sampled, state, params, value, reject)
        return put_back(displacement, updates), after

    update.__qualname__ = name
    return _check.own_flags(update)


class Call(NamedTuple):
    """What one call receives; its trees have only the leaves that move, None for the others.

    Attributes:
        posterior: with the prior's mean of the chain.
        updates, value: gradient and mean loss, with `log_prior` if there is one.
        passed: gradient as the loop passed it, if that is not `updates`.
        reject: whether the loop rejects the open step, which no counter of the state shows; or
            None.
        places: where the entries of each leaf lie, see `_places`.
    """

    posterior: potential.Potential
    updates: optax.Updates
    passed: optax.Updates | None
    params: optax.Params
    value: jax.Array | None
    reject: jax.Array | None
    places: Tree


@dataclass(frozen=True, kw_only=True, eq=False)
class Dynamics:
    """A sampler. The families implement `begin` and `process`.

    Attributes:
        name: of the sampler.
        posterior: that it samples.
        step_size: a schedule of the number of steps.
        seed: key of the noise; None without noise.
        is_draw: whether the step with a count, 0 for the first, ends in a draw.
        chosen: arguments that the sampler chose, where the user gave None.
    """

    name: str
    posterior: potential.Potential
    step_size: optax.Schedule
    seed: jax.Array | None
    is_draw: Callable[[jax.Array], jax.Array] = lambda count: jnp.ones_like(count, bool)
    chosen: Options = field(default_factory=dict)

    def begin(self, params: optax.Params) -> Tree:
        """Return the state of the dynamics before the first call."""
        raise NotImplementedError

    def is_elementwise(self, state: ChainState) -> bool:
        """Return whether `process` does the same to each entry, wherever it lies in the tree."""
        return False

    def process(self, call: Call, state: ChainState) -> tuple[optax.Updates, ChainState]:
        """Return the displacement and the state after a call.

        In `state`, `prior_centre` is None. The caller restores it in the result.
        """
        raise NotImplementedError

    def init(self, params: optax.Params) -> State:
        """Return the state before the first call, of floating leaves only."""
        return pack(self._init(params))

    def _init(self, params: optax.Params) -> ChainState:
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
        packed: State,
        params: optax.Params,
        value: Tree,
        reject: jax.Array | None = None,
    ) -> tuple[optax.Updates, State]:
        """One call, on trees of arrays: gradients and parameters have None for leaves at rest."""
        known = packed.like_params
        expected = jax.eval_shape(self.init, known)
        if jax.tree.structure(packed) != jax.tree.structure(expected):
            got = "one of another sampler, or with other settings"
            _check.fail("state", f"{STATE} {self.name} returned", got)
        state, params = packed.unpack(), jax.tree.map(_tree.strong, params)
        if jax.tree.structure(updates) != jax.tree.structure(known):
            lost = state.has_lost_leaf | (state.last_update.num_gradients > 0)
            state = take_over(state, self._init(params))._replace(has_lost_leaf=lost)
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
        # A float64 argument does not widen the state.
        return displacement, packed.pack(after._replace(prior_centre=state.prior_centre))

    def split(self, data: jax.Array | None) -> tuple[jax.Array | None, Tree]:
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


def mean_loss(value: Unchecked, loss: Unchecked, others: Mapping[str, object]) -> Tree:
    """Require one scalar mean loss, under one of its two names, or none; `others` are keywords."""
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

    # It is called later.
    @_check.called(_check.function_name())
    def size(count: Tree) -> Tree:
        number = step_size(count)
        is_number = _check.is_real(getattr(number, "dtype", type(number))) and np.ndim(number) == 0
        if not is_number or isinstance(number, bool):
            rule = "a schedule that gives a number for each count of steps"
            _check.fail("step_size", rule, f"one that gives {_check.show(number)}")
        # The dynamics reject the step of a traced one.
        if not isinstance(number, jax.core.Tracer) and np.less(number, 0):
            rule = "a schedule that gives no number below 0"
            _check.fail("step_size", rule, f"one that gives {number}")
        return number

    return size


def candidates(params: Unchecked) -> Tree:
    """Return the leaves that a sampler may move, with None for the others; require some."""
    floating = jax.tree.map(lambda x: _tree.strong(x) if _tree.is_floating(x) else None, params)
    others = jax.tree_util.tree_leaves_with_path(params)
    if others and not jax.tree.leaves(floating):
        path, leaf = others[0]
        rule = "a tree with at least one float32 or float64 array"
        got = f"{_check.show(leaf)} at {_paths.place(path)}"
        advice = "Convert Python numbers by `jnp.asarray`." if isinstance(leaf, float) else ""
        _check.fail("params", rule, got, advice)
    _check_trees.check_params(floating, smallest=2)
    _check.Tree(finite=True)("params", floating)
    return floating


def select(
    updates: Unchecked, params: Unchecked, known: optax.Params
) -> tuple[optax.Updates, optax.Params]:
    """Take the leaves that move, and require gradients and parameters that fit the state.

    The gradients are None for leaves that do not move. The parameters may have any leaves besides
    the candidates `known`.
    """
    _check_trees.check_structure("params", params, known, OF_INIT)
    _check_trees.check_structure("updates", updates, known, "params")
    candidates = jax.tree_util.tree_leaves_with_path(known, is_leaf=_is_none)
    gradients = jax.tree.leaves(updates, is_leaf=_is_none)
    for (path, candidate), gradient in zip(candidates, gradients, strict=True):
        if candidate is None and _tree.is_floating(gradient):
            rule = f"None at {_paths.place(path)}, which is no leaf of the state"
            _check.fail("updates", rule, _check.show(gradient))

    sampled = only(updates, known)
    params = only(params, sampled)
    _check_trees.check_params(params, smallest=2)
    _check_trees.check_alike("params", params, only(known, sampled), OF_INIT)
    _check_trees.check_gradients(sampled, params, "params")
    return sampled, params


def put_back(displacement: optax.Updates, updates: optax.Updates) -> optax.Updates:
    """Make a displacement a tree like the gradients that the loop passed."""

    def leaf(move: Tree, gradient: Tree) -> Tree:
        if move is not None or gradient is None:
            return move
        # Integers have gradients without a type; adding False changes nothing.
        return jnp.zeros(jnp.shape(gradient), bool)

    return jax.tree.map(leaf, displacement, updates, is_leaf=_is_none)


def require_all(updates: optax.Updates, known: optax.Params):
    """Name the first leaf of the state whose gradient is None."""
    gradients = jax.tree.leaves(only(updates, known), is_leaf=_is_none)
    leaves = jax.tree_util.tree_leaves_with_path(known, is_leaf=_is_none)
    for (path, leaf), gradient in zip(leaves, gradients, strict=True):
        if leaf is not None and gradient is None:
            got = f"None at {_paths.place(path)}, where the first call had a gradient"
            _check.fail("updates", "None at the same leaves in every call", got)


def take_over(state: Tree, fresh: Tree) -> Tree:
    """Replace arrays of a fresh state of fewer leaves by those of a state, by path and shape."""
    arrays = dict(jax.tree_util.tree_leaves_with_path(state))

    def leaf(path: Tree, new: jax.Array) -> jax.Array:
        old = arrays.get(path, new)
        return old if jnp.shape(old) == jnp.shape(new) else new

    return jax.tree_util.tree_map_with_path(leaf, fresh)


def only(tree: Tree, other: Tree) -> Tree:
    """Put None in the place of leaves where another tree has None."""
    return jax.tree.map(lambda x, y: None if y is None else x, tree, other, is_leaf=_is_none)


def _is_none(leaf: object) -> bool:
    """Make None a leaf of a tree."""
    return leaf is None
