"""A state that holds the parameters, for loops that call `update` without them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_smile import _check, _tree
from optax_smile._types import Tree
from optax_smile.samplers import _leaves
from optax_smile.samplers._leaves import DriverState, SampledState
from optax_smile.state import Stats

# Rounding of an addition, in units in the last place: a compiler may round a product and its sum
# together in one program and apart in another.
ROUNDING = 4
# Share of the last displacement by which parameters may differ.
SMALLEST_SHARE = 1e-3
FOREIGN = "the parameters of the last call plus its updates, which the state tracks"


class TrackedState(NamedTuple):
    """State of a sampler with `track_params=True`.

    Attributes:
        sampler: state of the sampler.
        tracked_params: the parameters after `optax.apply_updates`: only floating leaves, with None
            in the place of all others. Leaves without a gradient stay as `init` got them.
        last_length: Euclidean length of the last displacement, scalar.
        num_unseen: calls since the loop last passed its own parameters, int32.
    """

    sampler: DriverState
    tracked_params: optax.Params
    last_length: jax.Array
    num_unseen: jax.Array

    @property
    def gradients_per_step(self) -> int:
        """Gradients, and calls of `update`, per step."""
        return self.sampler.gradients_per_step

    @property
    def state_format(self) -> jax.Array:
        """`state.STATE_FORMAT` of the version that made the state."""
        return self.sampler.state_format

    @property
    def like_params(self) -> Tree:
        """A tree like the parameters that `init` got."""
        return self.sampler.like_params

    @property
    def sampled(self) -> SampledState:
        """Which leaves are sampled."""
        return self.sampler.sampled

    def stats(self) -> Stats:
        """Scalars that describe the last call, see `optax_smile.stats`."""
        return self.sampler.stats()

    def last_received(self) -> tuple[optax.Updates, jax.Array] | None:
        """See `state.SamplerState`."""
        return self.sampler.last_received()

    def last_accepted(self, params: optax.Params) -> Tree:
        """Start of the open step, see `optax_smile.last_accepted`; other parameters are refused."""
        if params is not self.tracked_params:
            given, own = self._pairs(params)
            if _leaves.is_known_true(self.differ(given, own)):
                _check.fail("last_accepted", "params", FOREIGN, "other parameters")
        return self.sampler.last_accepted(params)

    def _pairs(self, params: optax.Params) -> tuple[list[jax.Array], list[jax.Array]]:
        """Parameters of the loop beside the tracked ones, of the leaves that are sampled."""
        pairs = []
        _tree.map_sampled(lambda *pair: pairs.append(pair), self.tracked_params, params)
        tracked = enumerate(jax.tree.leaves(self.tracked_params))
        moves = {id(leaf): self.sampled.has_gradient[number] for number, leaf in tracked}
        # The loop may change leaves without a gradient.
        given = [jnp.where(moves[id(own)], x, own) for own, x in pairs]
        return given, [own for own, _ in pairs]

    def differ(self, given: Tree, own: Tree) -> jax.Array:
        """Tell whether parameters differ from the tracked ones by more than rounding.

        Rounding errors of the calls in which they were not compared add up like a random walk.

        Args:
            given: parameters of the loop.
            own: the tracked ones, of the same leaves.
        """
        off = jax.tree.map(jnp.subtract, given, own)
        eps = ROUNDING * float(jnp.finfo(_tree.dtype(own)).eps)
        rounding = eps * jnp.sqrt(1 + self.num_unseen) * jnp.sqrt(_tree.inner(own, own))
        most = SMALLEST_SHARE * self.last_length + rounding
        # Written so that NaN differs.
        return ~(jnp.sqrt(_tree.inner(off, off)) <= most)


def begin(sampler: DriverState, params: optax.Params) -> TrackedState:
    """Copy the parameters: their buffers may be donated together with the state."""

    def copy(leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jnp.zeros_like(leaf)
        return jnp.array(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype), copy=True)

    return TrackedState(
        sampler=sampler,
        tracked_params=jax.tree.map(copy, params),
        last_length=jnp.zeros((), _tree.dtype(params)),
        num_unseen=jnp.zeros((), jnp.int32),
    )


def here(
    state: TrackedState, params: optax.Params | None, moves: list[bool]
) -> tuple[optax.Params, jax.Array]:
    """Return the parameters of a call, of the leaves that move, and whether they are foreign.

    Args:
        state: before the call.
        params: of the leaves that move, or None.
        moves: which leaves do.
    """
    own = _leaves.only(state.tracked_params, moves)
    if params is None:
        return own, jnp.zeros_like(state.sampled.is_inconsistent)
    given = jax.tree.map(lambda x, old: jnp.asarray(x, old.dtype), params, own)
    return given, state.differ(given, own)


def proceed(
    state: TrackedState,
    sampler: DriverState,
    params: optax.Params,
    displacement: optax.Updates,
    is_seen: bool,
) -> TrackedState:
    """Move the parameters as `optax.apply_updates` does.

    Args:
        state: before the call.
        sampler: state of the sampler after it.
        params: of the leaves that move.
        displacement: by which the call moves them.
        is_seen: whether the loop passed its own parameters.
    """
    after = optax.apply_updates(params, displacement)
    length = jnp.sqrt(_tree.inner(displacement, displacement))
    return TrackedState(
        sampler=sampler,
        tracked_params=_leaves.widen(after, state.tracked_params),
        last_length=length.astype(state.last_length.dtype),
        num_unseen=jnp.zeros_like(state.num_unseen) if is_seen else _tree.count(state.num_unseen),
    )
