"""Many chains as a leading axis, on one device or on a mesh of devices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from optax_smile import _check, _on_host

__all__ = ["init", "over_chains", "place", "place_batch", "step"]

Carry = TypeVar("Carry")
Function = TypeVar("Function", bound=Callable[..., object])
CHAIN, DATA = "chain", "data"
OLDEST = (0, 7)  # Oldest JAX version that supports meshes.


class ChainMesh(_check.Constraint):
    """A mesh of devices with an axis for the chains."""

    text = f"a jax.sharding.Mesh with an axis {CHAIN!r}"

    def __call__(self, argument, value, given=_check.NOTHING):
        if not isinstance(value, Mesh) or CHAIN not in value.shape:
            got = f"the axes {tuple(value.shape)}" if isinstance(value, Mesh) else repr(value)
            advice = 'Make one with `jax.make_mesh((jax.device_count(),), ("chain",))`.'
            _check.fail(argument, self.text, got, advice)
        if jax.__version_info__ < OLDEST:
            _check.fail(argument, f"{self.text} and JAX 0.7 or newer", jax.__version__)
        return value


def _are_specs(tree: object) -> bool:
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, PartitionSpec))
    return all(isinstance(leaf, PartitionSpec) for leaf in leaves)


def _are_axes(in_axes: object) -> bool:
    axes = in_axes if isinstance(in_axes, tuple) else (in_axes,)
    are_known = all(axis is None or type(axis) is int and axis == 0 for axis in axes)
    return are_known and any(axis == 0 for axis in axes)


STACKED = _check.Tree(axes="[chain, ...]")
MESH = ChainMesh() | None
SPECS = _check.Where("a tree of jax.P", _are_specs) | None


def check_mesh(mesh: Mesh | None, num_chains: int = 0):
    """Require a mesh whose `chain` axis divides the number of chains."""
    MESH("mesh", mesh)
    if mesh is not None and num_chains % mesh.shape[CHAIN]:
        rule = f"a mesh whose axis {CHAIN!r} divides the number of chains, {num_chains}"
        _check.fail("mesh", rule, f"an axis of length {mesh.shape[CHAIN]}")


def num_chains(tree: object, argument: str = "params") -> int:
    """Return the length of the leading axis that all leaves share, at least one."""
    return np.shape(jax.tree.leaves(STACKED(argument, tree))[0])[0]


def _put(leaf: jax.typing.ArrayLike, sharding: NamedSharding) -> jax.Array:
    """Shard an array over devices; it must be the same in every process."""
    if sharding.is_fully_addressable or isinstance(leaf, jax.Array) and len(leaf.devices()) > 1:
        return jax.device_put(leaf, sharding)
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


# Copy, since the results may be donated.
_copy = jax.jit(functools.partial(jax.tree.map, jnp.copy))


@_check.arguments("parallel.place", tree=STACKED, mesh=MESH, specs=SPECS)
def place(tree: object, *, mesh: Mesh | None = None, specs: object = None) -> Any:
    """Copy a tree to the devices, with the chains spread over the axis `"chain"`.

    The copy may be donated.

    Args:
        tree: arrays `[chain, ...]`, the same in every process.
        mesh: devices with an axis `"chain"`; None: JAX's default device.
        specs: a tree like `tree` of `jax.P`: how each array of one chain is sharded over the other
            axes of the mesh; None: not sharded.

    Raises:
        ValueError: leading axes that disagree; a mesh without the axis `"chain"`, or whose axis
            does not divide the number of chains; specs without a mesh.
    """
    own = _shardings(tree, mesh, specs)
    return _copy(tree if own is None else jax.tree.map(_put, tree, own))


def _shardings(tree: object, mesh: Mesh | None, specs: object, argument: str = "tree") -> Any:
    """Return the shardings of arrays `[chain, ...]`, or of their shapes; None without a mesh."""
    check_mesh(mesh, num_chains(tree, argument))
    if mesh is None:
        if specs is not None:
            _check.fail("specs", "None without a mesh", _check.show(specs))
        for leaf in jax.tree.leaves(tree):
            given = jax.typeof(leaf).sharding.mesh
            if AxisType.Explicit in given.axis_types and given.size > 1:
                got = f"None, but `{argument}` is on the explicit mesh {given}"
                _check.fail("mesh", "that of the parameters", got)
        return None
    if specs is None:
        return jax.tree.map(lambda _: _chain_sharding(mesh), tree)
    given, of_chain = jax.tree.flatten(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    rule = f"a tree of jax.P with the structure of the parameters, {jax.tree.structure(tree)}"
    if of_chain != jax.tree.structure(tree):
        _check.fail("specs", rule, of_chain)
    try:
        own = [NamedSharding(mesh, PartitionSpec(CHAIN, *spec)) for spec in given]
    except ValueError as error:
        _check.fail("specs", f"a tree of jax.P with axes of {mesh}", str(error)[:200])
    return jax.tree.unflatten(of_chain, own)


@_check.arguments("parallel.place_batch", batch=_check.Tree(), mesh=MESH)
def place_batch(
    batch: object, *, mesh: Mesh | None = None, per_chain: bool = False, stacked: bool = False
) -> Any:
    """Put a batch on the devices, with examples sharded over the axis `"data"` if it divides them.

    Args:
        batch: arrays `[example, ...]`, the same in every process. JAX arrays that are already on
            several devices stay there.
        mesh: devices; None: return the batch unchanged.
        per_chain: whether an axis of chains precedes the examples, `[chain, example, ...]`.
        stacked: whether an axis of calls precedes the examples, after the axis of chains.
    """
    if mesh is None:
        return batch
    batch = _on_host.as_numeric("batch", batch)
    before = (CHAIN,) * per_chain + (None,) * stacked
    size = mesh.shape.get(DATA, 1)

    def put(leaf):
        if isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1:
            return leaf
        shape = np.shape(leaf)
        divides = len(shape) > len(before) and shape[len(before)] % size == 0
        after = (DATA,) if size > 1 and divides else ()
        return _put(leaf, NamedSharding(mesh, PartitionSpec(*before, *after)))

    return jax.tree.map(put, batch)


@_check.arguments(
    "parallel.over_chains",
    function=_check.Where("a function", callable),
    mesh=MESH,
    in_axes=_check.Where("0, or a tuple of 0 and None", _are_axes),
)
def over_chains(
    function: Function, *, mesh: Mesh | None = None, in_axes: int | tuple[int | None, ...] = 0
) -> Function:
    """Map a function of one chain over all chains, to compile with `jax.jit`.

    The axis `"chain"` is a manual axis of `jax.shard_map`, so chains cannot communicate. The
    compiler handles the other axes of the mesh. All results have a leading chain axis.

    Args:
        function: function of arrays of one chain.
        mesh: devices, or None.
        in_axes: for each argument 0 or None, as for `jax.vmap`: whether it has a chain axis.
    """
    mapped, own = jax.vmap(function, in_axes=in_axes), PartitionSpec(CHAIN)
    if mesh is None:
        return mapped
    in_specs = own
    if isinstance(in_axes, tuple):
        in_specs = tuple(PartitionSpec() if axis is None else own for axis in in_axes)
    return jax.shard_map(mapped, mesh=mesh, in_specs=in_specs, out_specs=own, axis_names={CHAIN})


@_check.arguments(
    "parallel.init",
    sampler=_check.TRANSFORMATION,
    params=STACKED,
    mesh=MESH,
    specs=SPECS,
    key=_check.Key(),
)
def init(
    sampler: optax.GradientTransformation,
    params: optax.Params,
    *,
    mesh: Mesh | None = None,
    specs: object = None,
    key: jax.Array | int | None = None,
) -> optax.OptState:
    """Initialise the state of every chain, sharded like its parameters.

    Every leaf has a leading chain axis, including scalars and keys.

    Args:
        sampler: a sampler, or any other Optax transformation.
        params: placed parameters `[chain, ...]`, such as `place` returns.
        mesh: devices, or None.
        specs: specs of the parameters, see `place`; arrays of the state that correspond to
            parameters are sharded like them.
        key: JAX key or seed. Each chain's state gets its own `key` from it, if the state has one.
            For several chains it is then required: without it they would draw the same numbers.

    Raises:
        ValueError: as for `place`; several chains with random numbers but without a key; a state
            with several random keys called `key`.
    """
    own, chains = None, num_chains(params)
    of_params = _shardings(params, mesh, specs, "params")
    if mesh is not None:
        own = optax.tree.map_params(
            sampler,
            lambda leaf, like: leaf if _is_missing(leaf) else like,
            jax.eval_shape(jax.vmap(sampler.init), params),
            of_params,
            transform_non_params=lambda _: _chain_sharding(mesh),
            is_leaf=_is_missing,
        )
    state = jax.jit(over_chains(sampler.init, mesh=mesh), out_shardings=own)(params)
    if key is None and chains == 1:
        return state
    try:
        known = optax.tree.get(state, "key", filtering=_is_random_key)
    except KeyError:
        rule = "a transformation with one random key in its state"
        remedy = 'Use only one sampler. With `inject_hyperparams`, pass `static_args=("key",)`.'
        _check.fail("sampler", rule, "several", remedy)
    if known is None:
        return state
    purpose = f"to derive a key for each of the {chains} chains"
    own_key = _check.Key(True, purpose)("key", key)
    keys = jax.random.key_data(_split_key(own_key, chains, mesh=mesh))
    if keys.shape != known.shape:
        rule = f"a key with {known.shape[-1]} words of data, like the sampler's"
        _check.fail("key", rule, f"{keys.shape[-1]} words")
    return optax.tree.set(state, _is_random_key, key=keys)


def _is_random_key(_, value: object) -> bool:
    """Return whether a leaf is a random key, not the moment of an attention layer called `key`."""
    return getattr(value, "dtype", None) == jnp.uint32


def _is_missing(leaf: object) -> bool:
    """Return whether a state has no array for this leaf of the parameters."""
    return leaf is None or isinstance(leaf, optax.MaskedNode)


def _chain_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array `[chain, ...]` over the chains only."""
    return NamedSharding(mesh, PartitionSpec(CHAIN))


def _split_key(key: jax.Array, chains: int, *, mesh: Mesh | None = None) -> jax.Array:
    """Make keys `[chain]`, each on the devices of its chain."""
    if mesh is None:
        return jax.random.split(key, chains)
    split = functools.partial(jax.random.split, num=chains)
    return jax.jit(split, out_shardings=_chain_sharding(mesh))(key)


def _loss_keys(
    key: jax.Array, is_stochastic: bool, chains: int, *, mesh: Mesh | None
) -> tuple[jax.Array, jax.Array | None]:
    """Return keys `[chain]` for the loss if it is random, and a key for everything else."""
    if not is_stochastic:
        return key, None
    key, of_loss = jax.random.split(key)
    return key, _split_key(of_loss, chains, mesh=mesh)


@_check.arguments(
    "parallel.step", function=_check.Function("(carry, batch)"), carry=STACKED, mesh=MESH
)
def step(
    function: Callable[[Carry, Any], Carry],
    carry: Carry,
    *,
    mesh: Mesh | None = None,
    per_chain: bool = False,
) -> Callable[[Carry, Any], Carry]:
    """Compile the step of one chain for all chains, a function of the carry and a batch.

    The carry is donated. Chains on different devices do not communicate.

    Args:
        function: `function(carry, batch)` of one chain; returns the next carry.
        carry: placed parameters, state and anything else passed from step to step, every leaf
            `[chain, ...]`. Later carries have the same shardings.
        mesh: devices, or None.
        per_chain: whether each chain has its own batch.

    Example:
        >>> import jax, jax.numpy as jnp, optax, optax_smile
        >>> from optax_smile import parallel
        >>> tx = optax_smile.smile(0.1, num_data=10, decoherence_length=None)
        >>> def one_step(carry, batch):
        ...     params, state = carry
        ...     grads = jax.grad(lambda w: jnp.mean((w - batch) ** 2))(params)
        ...     updates, state = tx.update(grads, state, params)
        ...     return optax.apply_updates(params, updates), state
        >>> axis_types = (jax.sharding.AxisType.Auto,) * 2
        >>> mesh = jax.make_mesh((1, 1), ("chain", "data"), axis_types=axis_types)
        >>> params = parallel.place(jnp.zeros((4, 3)), mesh=mesh)
        >>> carry = params, parallel.init(tx, params, mesh=mesh)
        >>> advance = parallel.step(one_step, carry, mesh=mesh)
        >>> params, state = advance(carry, parallel.place_batch(jnp.ones(3), mesh=mesh))
        >>> optax_smile.stats(state).num_gradients.tolist()
        [1, 1, 1, 1]
    """
    check_mesh(mesh, num_chains(carry, "carry"))
    mapped = over_chains(function, mesh=mesh, in_axes=(0, 0 if per_chain else None))
    if mesh is None:
        return jax.jit(mapped, donate_argnums=0)
    own = jax.tree.map(lambda leaf: leaf.sharding, carry)
    return jax.jit(mapped, donate_argnums=0, out_shardings=own)
