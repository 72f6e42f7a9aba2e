"""Control what XLA stores, and in which order, without changing any number.

Measurements: compiled updates on the CPU with JAX 0.10.2, in arrays of the size of the parameters,
10^7 of them in 20 leaves, or 705 in 8 leaves (`write_once`). If any one of these functions is
removed, a test in `tests/test_step_cost.py` fails.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile._types import T


def fence(tree: T) -> T:
    """Make XLA recompute values from the result instead of storing them, on the CPU.

    Without it `psmile` stores a gradient: 1.12 temporary arrays instead of 0.12.
    """
    return jax.lax.platform_dependent(
        tree, cpu=jax.lax.optimization_barrier, default=lambda same: same
    )


def second_pass(call: Any, state: Any, decision: Any) -> tuple[Any, Any, Any]:
    """Separate the memory pass of a sampler's `move` from that of its `read` and `decide`.

    `altered_share` is the last number that `read` and `decide` compute from arrays.
    """
    dynamics = state.dynamics
    given = call.updates, call.params, dynamics.momentum, dynamics.preconditioner
    updates, params, momentum, preconditioner = fence(given)
    dynamics = dynamics._replace(momentum=momentum, preconditioner=preconditioner)
    reject = known_after(decision.reject, decision.state.probe.altered_share)
    call = call._replace(updates=updates, params=params)
    return call, state._replace(dynamics=dynamics), decision._replace(reject=reject)


def known_after(condition: jax.Array, *others: jax.Array) -> jax.Array:
    """Make a condition depend on other numbers, none of them NaN, without changing its value.

    XLA then computes these numbers before it writes arrays that are selected by the condition.
    Otherwise it copies their inputs: `psmile` moves 27.4 arrays instead of 21.4, and keeps 0.67
    temporary ones instead of 0.12.
    """
    return functools.reduce(jnp.logical_and, (other == other for other in others), condition)


def replace(
    condition: jax.Array, new: optax.Updates, old: optax.Updates, *others: optax.Updates
) -> optax.Updates:
    """Select a new tree where a condition holds, after all other uses of the old one.

    Otherwise XLA copies the old tree: `psmile` keeps 1.11 temporary arrays instead of 0.12.
    """

    def leaf(x, y, *others):
        return jnp.where(known_after(condition, *others), x, y).astype(y.dtype)

    return jax.tree.map(leaf, new, old, *others)


def stack(arrays: list[jax.Array]) -> jax.Array:
    """Stack along a new last axis, in one pass over the arrays.

    `jnp.stack` writes each array first: `psmile` moves 21.47 arrays instead of 21.43. For scalars,
    use `jnp.stack`: with a single kernel, a step of 705 parameters takes 1.6 times as long.
    """
    *columns, last = [x[..., None] for x in arrays]
    is_at = [jnp.arange(len(arrays)) == place for place in range(len(columns))]
    return jnp.select(is_at, columns, last)


def write_once(arrays: list[jax.Array]) -> list[jax.Array]:
    """Make XLA compute each array once on the CPU if several leaves are sliced from it.

    Otherwise XLA recomputes it for every leaf: `psmile` has 8,341 instructions, not 4,871. XLA
    stores the result of a reduction: here the larger of two equal numbers.
    """

    def largest(arrays: list[jax.Array]) -> list[jax.Array]:
        twice = tuple(jnp.broadcast_to(x, (2, *x.shape)) for x in arrays)
        least = tuple(np.array(-np.inf, x.dtype) for x in arrays)
        larger = functools.partial(jax.tree.map, jnp.maximum)
        return list(jax.lax.reduce(twice, least, larger, (0,)))

    if len(arrays) < 2:
        return arrays
    return jax.lax.platform_dependent(arrays, cpu=largest, default=lambda same: same)
