"""Read statistics and draws from the state of any sampler, also inside a larger state."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _check, _paths, _sums, _trace, _tracked, _tree
from optax_smile._types import T, by_identity

# Format of the states of all samplers. A state of another format cannot be continued.
STATE_FORMAT = 13
# Largest share of gradients that are not finite; healthy runs have none or very few.
MOST_NONFINITE = 0.01
# Nats per example by which draws may be worse than the start: targets 63 % less probable.
MOST_RISE = 1.0
# Number of gradients whose mean loss is that of the start. After 16, a network has left it.
NUM_OF_START = 8
# Advice if a transformation follows the sampler.
AFTER = (
    "Remove what comes after the sampler: it changes the steps and makes the draws wrong. A sampler"
    " has no learning rate, and its prior replaces weight decay. Only"
    " `optax.clip_by_global_norm` may come before it."
)
# Advice if a wrapper hides leaves from the sampler.
AT_REST = (
    "Optax adds their raw gradients to them. Use"
    ' `optax.partition({"sampled": sampler, "frozen": optax.set_to_zero()}, labels)`.'
)


class LastUpdate(NamedTuple):
    """Facts about the last call of `update`; for fields that are not listed see `Stats`.

    Attributes:
        energy_change: as in `Stats`, but 0 instead of NaN: some loops compare the states of
            replicas, and NaN is not equal to itself.
        has_energy: whether `energy_change` is known.
        last_temperature: temperature of the posterior. A field `temperature` would clash with the
            one that `optax.inject_hyperparams` adds to the state.
        fingerprint: `_sums.fingerprint` of the gradient that the loop passed; zeros if the call was
            rejected.
    """

    energy_change: jax.Array
    has_energy: jax.Array
    energy_level: jax.Array
    accepted: jax.Array
    step_end: jax.Array
    is_draw: jax.Array
    below_resolution: jax.Array
    last_temperature: jax.Array
    num_gradients: jax.Array
    fingerprint: jax.Array

    def proceed(
        self,
        temperature: float | jax.Array,
        value: jax.Array | None,
        reject: jax.Array,
        fingerprint: jax.Array,
        **others: jax.Array,
    ) -> LastUpdate:
        """Record a call; `others` are further fields that change."""
        last = self.last_temperature
        return self._replace(
            energy_level=jnp.full_like(self.energy_level, value is not None),
            accepted=~reject,
            # Inside `shard_map`, the number needs the axes of a scalar of the state.
            last_temperature=jnp.zeros_like(last) + jnp.asarray(temperature, last.dtype),
            num_gradients=_tree.count(self.num_gradients),
            fingerprint=jnp.where(reject, 0, fingerprint),
            **others,
        )

    def stats(self) -> dict[str, jax.Array]:
        """Return the fields of `Stats` that are stored here."""
        stats = self._asdict()
        stats["temperature"] = stats.pop("last_temperature")
        stats["gradient_norm"] = stats.pop("fingerprint")[..., 0]
        has_energy = stats.pop("has_energy")
        change = stats["energy_change"]
        # A state on the host may be float64 even if JAX uses only float32.
        array = jnp if isinstance(change, jax.Array) else np
        stats["energy_change"] = array.where(has_energy, change, array.full_like(change, np.nan))
        return stats


def no_update(dtype: jnp.dtype, temperature: float | jax.Array) -> LastUpdate:
    """Return the state before the first call."""
    return LastUpdate(
        energy_change=jnp.zeros((), dtype),
        has_energy=jnp.zeros((), bool),
        energy_level=jnp.zeros((), jnp.int32),
        accepted=jnp.ones((), bool),
        step_end=jnp.zeros((), bool),
        is_draw=jnp.ones((), bool),
        below_resolution=jnp.zeros((), bool),
        last_temperature=jnp.asarray(temperature, dtype),
        num_gradients=jnp.zeros((), jnp.int32),
        fingerprint=jnp.zeros(_sums.FINGERPRINT, dtype),
    )


_UNKNOWN: Any = np.nan
_NONE: Any = 0
_YES: Any = True
_NO: Any = False


@by_identity
class Stats(NamedTuple):
    """Scalars that describe the last call of a sampler, see `stats`; fields have defaults.

    Attributes:
        step_size: step size of the current step; after a rejected call, of the next step. That of
            `psmile` is a length in scaled coordinates.
        width: width of the posterior in the coordinates of `step_size`: the square root of its
            total variance, estimated from the mean curvature along the chain; inf until it is
            known, NaN if `psmile` uses no matrix.
        energy_change: energy gained by the step that ended, nats; NaN if the call did not end a
            step or its energy is unknown.
        energy_mean, energy_std: moving mean and standard deviation of |energy_change|, nats; NaN
            for samplers without it, such as `sgld`.
        energy_level: 0 if the loop passes only gradients, 1 if it also passes `value`.
        accepted: False if the call rejected the step that led to the parameters passed in.
        step_end: whether the parameters passed in were the end of a whole step.
        is_draw: whether `last_accepted` returns a draw from the posterior; False in the exploration
            part of `cyclical_sgld`.
        num_rejected: steps rejected for an outlying energy.
        num_nonfinite: calls with a gradient or a value that is not finite.
        num_outlying: gradients with reduced weight in the averages, since they are zero or more
            than three times as large as the average; 0 for samplers without averages.
        gradient_norm: norm of the gradient that the loop passed; 0 if the call was rejected.
        num_gradients: calls of `update` so far.
        temperature: of the posterior; below 1 it is colder than the Bayesian posterior.
        change_share: mean |g - g_before|^2 / mean (|g|^2 + |g_before|^2) over the last quarter of
            the steps, with the gradients g of successive steps in scaled coordinates: an upper
            bound on the share of noise in the gradients. NaN before the first change, and for
            samplers that do not measure it.
        descent: energy that the chain has lost over the last quarter of its gradients, estimated
            from them, in standard deviations of the loss of a converged chain by chance; NaN for
            samplers that do not measure it.
        on_its_way: True while the chain still falls towards the posterior: `descent` is more than
            3. These points are not yet draws.
        below_resolution: True if the step is so short that rounding loses it when it is added to
            the parameters.
        num_altered: calls whose parameters were not those that the previous updates lead to.
            Something changed them, such as a later transformation, a projection or an average.
            Calls after a rejected step are not compared.
        is_altered: True if at least three, and more than 1 %, of the last 512 compared calls were
            altered. The points are then not draws. A single restored checkpoint does not set it.
            Inside `jit`, losing the gradient of a leaf after the first call also sets it,
            permanently.
        num_parameters: d, the number of sampled parameters: those of the leaves with a gradient; 0
            for an optimizer.
        noise_id: identifies the random numbers of the next call. If it is equal in two chains, both
            have the same key. 0 if the sampler draws none.
    """

    step_size: jax.Array = _UNKNOWN
    width: jax.Array = _UNKNOWN
    energy_change: jax.Array = _UNKNOWN
    energy_mean: jax.Array = _UNKNOWN
    energy_std: jax.Array = _UNKNOWN
    energy_level: jax.Array = _NONE
    accepted: jax.Array = _YES
    step_end: jax.Array = _YES
    is_draw: jax.Array = _YES
    num_rejected: jax.Array = _NONE
    num_nonfinite: jax.Array = _NONE
    num_outlying: jax.Array = _NONE
    gradient_norm: jax.Array = _UNKNOWN
    num_gradients: jax.Array = _NONE
    temperature: jax.Array = _UNKNOWN
    change_share: jax.Array = _UNKNOWN
    descent: jax.Array = _UNKNOWN
    on_its_way: jax.Array = _NO
    below_resolution: jax.Array = _NO
    num_altered: jax.Array = _NONE
    is_altered: jax.Array = _NO
    num_parameters: jax.Array = _NONE
    noise_id: jax.Array = _NONE

    @classmethod
    def of(cls, num_gradients: jax.Array, **known: jax.Array) -> Stats:
        """Make statistics with the shape of a counter; fields that are not given have defaults."""
        array = jnp if isinstance(num_gradients, jax.Array) else np
        kinds, given = {float: np.float32, int: np.int32, bool: np.bool_}, cls._field_defaults
        # Make one array per value: a busy device accepts only a few calls at a time.
        values = {repr(value): value for value in given.values()}
        made = {x: array.full_like(num_gradients, y, kinds[type(y)]) for x, y in values.items()}
        others = {name: made[repr(value)] for name, value in given.items()}
        return cls(**others | {"num_gradients": num_gradients} | known)

    def __str__(self) -> str:
        return "\n".join(f"{name:<17} {value}" for name, value in self._asdict().items())


def noise_id(key: jax.Array | None, counter: jax.Array) -> jax.Array:
    """Return `Stats.noise_id` of a key, raw numbers; `counter` has the shape of the result."""
    array = jnp if isinstance(counter, jax.Array) else np
    if key is None:
        return array.zeros_like(counter, np.uint32)
    # The constant makes the result nonzero for small seeds.
    return key[..., 0] ^ key[..., -1] ^ np.uint32(0x9E3779B9)


@runtime_checkable
class SamplerState(Protocol):
    """Protocol of the NamedTuple that a sampler's `init` returns.

    A state with random numbers has them in a field `key`, raw key data, uint32. The package's own
    states also have a field `state_format`, the `STATE_FORMAT` of their version. For a sampler
    outside of the package see `examples/own_sampler.py`.
    """

    @property
    def gradients_per_step(self) -> int:
        """Gradients, and calls of `update`, per step."""
        ...

    def stats(self) -> Stats:
        """Scalars that describe the last call, see `optax_smile.stats`."""
        ...

    def last_accepted(self, params: T) -> T:
        """Parameters of the last accepted step end, see `optax_smile.last_accepted`."""
        ...

    def last_received(self) -> tuple[optax.Updates, jax.Array] | None:
        """Sampled leaves, and `_sums.fingerprint` of their last gradient; None if not stored."""
        ...


def find(state: object, argument: str = "state") -> SamplerState:
    """Find the only sampler state inside a larger state; in a chain, the sampler must be last.

    `argument` is the name of the user's argument.
    """
    kind, missing, advice = "a transformation", "one without a sampler", ""
    if argument == "state":
        kind, missing = "the state of a transformation", "a tree without such a state"
        advice = "Pass what `init` or `update` returned."
    rule = f"{kind} with exactly one optax_smile sampler"
    if _check.TRANSFORMATION.holds(state):
        _check.fail(argument, rule, "the transformation", advice)
    states, chains = _samplers(_paths.without_variables(state))
    if not states:
        _check.fail(argument, rule, missing, advice)
    if len(states) > 1:
        _check.fail(argument, rule, f"one with {len(states)}", "Remove all but one.")
    for chain in chains:
        place = next((i for i, part in enumerate(chain) if _samplers(part)[0]), len(chain))
        # Count only states of transformations, not other entries of a loop's tuple.
        later = [part for part in chain[place + 1 :] if hasattr(part, "_fields")]
        if any(isinstance(part, optax.MaskedState) for part in chain[place : place + 1]):
            # The states do not say which leaves belong to which part.
            later = [part for part in later if not isinstance(part, optax.MaskedState)]
        if later:
            kind = "the state of an" if argument == "state" else "an"
            rule = f"{kind} `optax.chain` that ends with the sampler"
            number = "one transformation" if len(later) == 1 else f"{len(later)} transformations"
            _check.fail(argument, rule, f"{number} after it", AFTER)
    check_format(argument, states[0])
    return states[0]


def check_place(argument: str, state: object, params: object = None):
    """Require a sampler that receives leaves of `params` unchanged; other leaves must not move."""
    sampled = getattr(find(state, argument), "like_params", None)
    params, sampled = map(_paths.without_variables, (params, sampled))
    if params is not None and _paths.leaves_like(sampled, params) is None:
        rule, got = "one that gets the leaves of `params` as they are", "one in `optax.flatten`"
        _check.fail(argument, rule, got, "Leave out `optax.flatten`.")

    def is_wrapper(node: object) -> bool:
        # `optax.partition` stores the states of its parts in a field of this name.
        return isinstance(node, optax.MaskedState) or hasattr(node, "inner_states")

    def is_hidden(node: object) -> bool:
        return isinstance(node, optax.MaskedNode)

    nodes = jax.tree.leaves(_paths.without_variables(state), is_leaf=is_wrapper)
    masked = [node for node in nodes if isinstance(node, optax.MaskedState)]
    hidden = [*filter(is_hidden, jax.tree.leaves(sampled, is_leaf=is_hidden))]
    if hidden and len(masked) == 1 and samplers(masked[0]):
        rule, got = "one beside which the other leaves rest", "one in `optax.masked` alone"
        _check.fail(argument, rule, got, AT_REST)


def check_format(argument: str, state: SamplerState):
    """Require the format of this version; a number that is not yet computed passes."""
    number = getattr(state, "state_format", STATE_FORMAT)
    if not is_ready(number) or np.all(np.asarray(number) == STATE_FORMAT):
        return
    rule, got = f"a state of format {STATE_FORMAT}", f"format {np.max(np.asarray(number))}"
    remedy = "Another version of optax_smile wrote it: continue the chain with that version."
    _check.fail(argument, rule, got, remedy)


def is_concrete(number: object) -> bool:
    """Whether this process can read a number of a state, if necessary by waiting for the device."""
    is_shape = isinstance(number, (jax.core.Tracer, jax.ShapeDtypeStruct))
    return not is_shape and getattr(number, "is_fully_addressable", True)


def is_ready(number: object) -> bool:
    """Whether a number can be read without waiting for the device."""
    return is_concrete(number) and getattr(number, "is_ready", lambda: True)()


def _samplers(state: object) -> tuple[list[SamplerState], list[tuple[object, ...]]]:
    """Return sampler states inside a state, and plain tuples, such as states of `optax.chain`."""
    chains = []

    def is_sampler(node: object) -> bool:
        if type(node) is tuple:
            chains.append(node)
        return isinstance(node, SamplerState)

    leaves = jax.tree.leaves(state, is_leaf=is_sampler)
    return [leaf for leaf in leaves if isinstance(leaf, SamplerState)], chains


def samplers(state: object) -> list[SamplerState]:
    """Return the sampler states inside a larger state."""
    return _samplers(_paths.without_variables(state))[0]


def gradients_per_step(transformation: optax.GradientTransformation, like: optax.Params) -> int:
    """Return the number of gradients per step for parameters `like` these; 1 for an optimizer."""
    states = samplers(jax.eval_shape(transformation.init, like))
    return states[0].gradients_per_step if states else 1


@_check.own_flags
@_check.called("stats")
def stats(state: object) -> Stats:
    """Return named scalars that describe the last call of a sampler.

    `accepted`, `step_end` and `energy_change` describe the parameters that were passed *in*. The
    parameters after `optax.apply_updates` are a proposal that the next call accepts or rejects.

    Args:
        state: state of a sampler, alone or anywhere inside the state of `optax.chain`,
            `MultiSteps`, `partition`, `inject_hyperparams`, ... If it has a leading chain axis, so
            has every value, and `stats` warns of chains with equal keys (if the device has
            computed them: it does not wait).

    Returns:
        A `Stats`, a named tuple of scalars that prints one per line.

    Raises:
        ValueError: the state holds no sampler, or more than one, or another transformation comes
            after it in an `optax.chain`, or another version of the library made it.

    Example:
        >>> import jax.numpy as jnp, optax_smile
        >>> sampler = optax_smile.psmile(1e-2, num_data=100, key=0)
        >>> round(float(optax_smile.stats(sampler.init(jnp.zeros(3))).step_size), 3)
        0.01
    """
    sampler = find(state)
    statistics, key = sampler.stats(), getattr(sampler, "key", None)
    if np.ndim(statistics.noise_id) == 1 and key is not None and is_ready(key):
        # Compute on the host, since the device may still be busy with earlier calls.
        raw: Any = np.asarray(key)
        _trace.warn_of_equal_keys(np.asarray(noise_id(raw, raw))[:, None])
    return statistics


@_check.called("last_accepted")
@_check.own_flags
def last_accepted(state: object, params: object = None) -> Any:
    """Return the current draw: the last accepted parameters. Store these, not `params`.

    The parameters in a loop are a proposal until the next call of `update` accepts them.

    Args:
        state: state after `update`, alone or inside a larger one, such as the `opt_state` of an
            `nnx.Optimizer`. For a state with a leading chain axis use
            `jax.vmap(last_accepted)`.
        params: parameters after `optax.apply_updates`. The state of `tracked` has them.

    Returns:
        Parameters like `params`, with variables of Flax nnx replaced by their arrays, which
        `nnx.update(model, ...)` takes. Leaves that the sampler does not see (masked, partitioned,
        or not among those given to `init`, such as functions and running statistics) are returned
        unchanged. Without `params`, a tree like `tracked_params` of the state.

    Raises:
        ValueError: the state holds no sampler, or more than one, or another transformation comes
            after it in an `optax.chain`, or it is one of several chains; the state is concrete and
            its `is_altered` is true, see `Stats`; `params` lacks leaves of those given to `init`,
            or has them in another shape or precision, or is missing; outside of compiled functions,
            `params` is not finite, or is not what the state of `tracked` holds; `update` was
            compiled and got gradients for fewer leaves than at first.

    Cost: two passes over the parameters; no gradient.

    Example:
        >>> import jax.numpy as jnp, optax, optax_smile
        >>> tx = optax_smile.smile(0.1, num_data=1, key=0)
        >>> start = jnp.ones(2)
        >>> updates, state = tx.update(start, tx.init(start), start)
        >>> last = optax_smile.last_accepted(state, optax.apply_updates(start, updates))
        >>> [round(float(x), 5) for x in last]
        [1.0, 1.0]
    """
    sampler = find(state)
    check_place("state", state)
    last = sampler.stats()
    if axes := jnp.shape(last.num_gradients):
        rule, remedy = "that of a single chain", "Use `jax.vmap(optax_smile.last_accepted)`."
        _check.fail("state", rule, f"one with the leading axes {axes}", remedy)
    params, bare = map(_paths.without_variables, (params, state))
    own = _tracked.params_of(bare)
    params = own if params is None else params
    if params is None:
        rule = "the parameters after `optax.apply_updates`"
        _check.fail("params", rule, "None", "Or use `optax_smile.tracked(sampler)`.")
    try:
        draw = sampler.last_accepted(params)
    except _paths.Misfit as error:
        _check.fail("params", *error.args)
    except (ValueError, TypeError) as error:
        if isinstance(error, _check.ArgumentError):
            raise
        _check.fail("params", "a tree like the one given to `init`", _check.show(params))
    # Check only the leaves that the sampler moves; traced ones pass.
    leaves = _paths.leaves_like(getattr(sampler, "like_params", None), params) or []
    known = [leaf for leaf in leaves if is_concrete(leaf)]
    if known and not _tree.all_finite(known):
        advice = (
            "The parameters of the loop are not finite. Samplers reject steps from gradients"
            " that are not: what else changes the parameters?"
        )
        _check.fail("params", "finite", "nan or inf", advice)
    tracked = _paths.leaves_like(getattr(sampler, "like_params", None), own) or []
    if tracked and len(known) == len(tracked) and all(map(is_concrete, tracked)):
        if not _tracked.are_alike(known, tracked):
            remedy = "Did the loop skip, scale or clip updates?"
            _check.fail("params", "those that the state tracks", "others", remedy)
    if is_concrete(last.is_altered) and last.is_altered:
        rule = "that of a loop in which only the sampler changes the parameters"
        got = (
            f"a loop where {last.num_altered} of {last.num_gradients} calls of `update` received"
            " other parameters than `optax.apply_updates(params, updates)` gave"
        )
        _check.fail("state", rule, got, "Did the loop skip, scale or clip updates?")
    return draw
