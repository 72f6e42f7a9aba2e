"""Control variates of a run, one for each chain: their state and computations."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from optax_smile import _tree, parallel
from optax_smile._on_host import num_examples
from optax_smile.mistakes.loss import FullLoss

# Number of pairs of parts of a batch that measure the noise.
PAIRS = 4
# Maximum size of the stored gradients, in bytes.
LARGEST_STORE = 2**28


class Center(NamedTuple):
    """A point, and the loss and gradient of all data there, for a control variate.

    Attributes:
        params: c, the parameters of one chain.
        loss: L, the mean loss, scalar.
        gradient: G, its gradient, a tree like `params`.
    """

    params: Any
    loss: jax.Array
    gradient: optax.Updates


def residual(loss: jax.Array, gradient: object, center: Center, params: object) -> jax.Array:
    """Difference between the tangents to the losses of a batch and of all data at the centre."""
    excess = jax.tree.map(jnp.subtract, gradient, center.gradient)
    moved = jax.tree.map(jnp.subtract, params, center.params)
    terms = jax.tree.map(lambda x, y: jnp.sum(x * y), excess, moved)
    return loss - center.loss + _tree.total(terms)


class Centered(NamedTuple):
    """Control variate of a chain, a part of its carry.

    Attributes:
        center: position of the chain at the last renewal, see `Center`.
        excess: number, sum and sum of squares of the differences between the loss of a batch and
            that of all data, both at the centre, `[3]`.
        noise: sums of the squared differences of gradients without and with the control variate,
            `[2]`; each renewal halves the weight of earlier ones.
        num_reduced: calls with a control variate, int32.
        stored: losses and gradients at the centre of each batch in a list, `[batch, ...]`; None if
            each call computes them.
    """

    center: Center
    excess: jax.Array
    noise: jax.Array
    num_reduced: jax.Array
    stored: tuple[jax.Array, optax.Updates] | None

    def stats(self) -> dict[str, jax.Array]:
        """Return its entries in the trace."""
        return {"noise_left": self.noise[1] / self.noise[0], "num_reduced": self.num_reduced}

    def reduced(self, loss: FullLoss) -> FullLoss:
        """Return a loss with the control variate, which returns the excess together with `aux`.

        If losses are stored, a batch is a pair of its index in the list and the batch itself.
        """

        def with_center(params, aux, key, batch) -> tuple[jax.Array, Any]:
            if self.stored is None:
                of_center = jax.value_and_grad(loss, has_aux=True)
                (there, _), gradient = of_center(self.center.params, aux, key, batch)
            else:
                place, batch = batch
                there, gradient = jax.tree.map(lambda x: x[place], self.stored)
            value, new = loss(params, aux, key, batch)
            value -= residual(there, gradient, self.center, params)
            return value, (new, there - self.center.loss)

        return with_center

    def count(self, excess: jax.Array) -> Centered:
        """Record a call with a control variate."""
        known = jnp.isfinite(excess)
        excess = jnp.where(known, excess, 0)
        sums = self.excess + jnp.stack([known.astype(excess.dtype), excess, excess**2])
        return self._replace(excess=sums, num_reduced=_tree.count(self.num_reduced))

    def moved(self, params: optax.Params) -> Centered:
        """Move the centre to a point, and reset what was measured at the old centre."""
        center = jax.tree.map(jnp.zeros_like, self.center)._replace(params=params)
        none = jnp.zeros_like(self.excess)
        return self._replace(center=center, excess=none, noise=self.noise / 2)

    def gathered(
        self, loss: FullLoss, aux: object, key: jax.Array | None, batch: Any, number: float
    ) -> Centered:
        """Add the loss and the gradient of a batch at the centre to those of `number` examples."""
        center, stored, place = self.center, self.stored, None
        if stored is not None:
            place, batch = batch
        share = (num_examples(batch, False) or 0) / number
        of_center = jax.value_and_grad(loss, has_aux=True)
        (value, _), gradient = of_center(center.params, aux, key, batch)
        if stored is not None:
            stored = jax.tree.map(lambda x, y: x.at[place].set(y), stored, (value, gradient))

        def add(total: jax.Array, x: jax.Array) -> jax.Array:
            return total + (share * x).astype(total.dtype)

        gradient = jax.tree.map(add, center.gradient, gradient)
        center = center._replace(loss=add(center.loss, value), gradient=gradient)
        return self._replace(center=center, stored=stored)

    def measured(
        self,
        loss: FullLoss,
        params: optax.Params,
        aux: object,
        key: jax.Array | None,
        batch: object,
        number: float,
    ) -> Centered:
        """Measure the variance of the gradients, without and with the control variate.

        The gradient of all data has noise if the loss is random. It is the same until the next
        centre, so its effect adds up over all passes until then.
        """
        rows = num_examples(batch, False) or 0
        pairs = min(PAIRS, rows // 2)
        length = rows // (2 * pairs)

        def parts(leaf: jax.Array) -> jax.Array:
            if not jnp.ndim(leaf):
                return jnp.broadcast_to(leaf, (pairs, 2))
            return leaf[: 2 * pairs * length].reshape(pairs, 2, length, *leaf.shape[1:])

        def square(x: optax.Updates, y: optax.Updates) -> jax.Array:
            return optax.tree.norm(optax.tree.sub(x, y), squared=True)

        def of_pair(given: tuple[object, jax.Array | None]) -> jax.Array:
            pair, keys = given

            def gradient(at: optax.Params, place: int, key: int) -> optax.Updates:
                part = jax.tree.map(lambda x: x[place], pair)
                used = None if keys is None else keys[key]
                return jax.grad(lambda x: loss(x, aux, used, part)[0])(at)

            here, there = ([gradient(at, i, i) for i in range(2)] for at in (params, center))
            left = square(*map(optax.tree.sub, here, there))
            if keys is not None:
                left += passes * square(here[0], gradient(params, 0, 2))
            return jnp.stack([square(*here), left])

        center = self.center.params
        passes = jnp.maximum(self.excess[0] * rows / number, 1)
        keys = None if key is None else jax.random.split(key, (pairs, 3))
        found = jax.lax.map(of_pair, (jax.tree.map(parts, batch), keys))
        return self._replace(noise=self.noise + jnp.sum(found, axis=0))


def start(
    params: optax.Params, num_stored: int | None, mesh: Mesh | None, specs: object
) -> Centered | None:
    """Return the state before the first centre; None without a control variate.

    `params` `[chain, ...]` are already placed on their devices.
    """
    if num_stored is None:
        return None

    def store(leaf: jax.Array) -> jax.Array:
        return jnp.zeros((number, num_stored, *leaf.shape[1:]), leaf.dtype)

    number, zeros = len(jax.tree.leaves(params)[0]), jax.tree.map(jnp.zeros_like, params)
    stored = jax.tree.map(store, (jnp.zeros(number), params)) if num_stored else None
    numbers = jnp.zeros((number, 3)), jnp.zeros((number, 2)), jnp.zeros(number, jnp.int32)
    loss, *others = parallel.place((jnp.zeros(number), *numbers, stored), mesh=mesh)
    point, gradient = (parallel.place(zeros, mesh=mesh, specs=specs) for _ in range(2))
    return Centered(Center(point, loss, gradient), *others)


def num_stored(
    all_data: object, batches: object, params: optax.Params, specs: object, is_stochastic: bool
) -> int | None:
    """Return the number of batches whose gradients are stored, 0 if they do not fit.

    0 for a random loss, which needs the same key at both points. None without control variate.
    """
    if all_data is None:
        return None
    if all_data is not batches or not isinstance(batches, (list, tuple)):
        return 0
    if specs is not None or is_stochastic:
        return 0
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    return len(batches) * (len(batches) * size <= LARGEST_STORE)


class Plan(NamedTuple):
    """When the host checks the centres next, serializable as JSON.

    Attributes:
        length: steps of a pass over the data, at least `SHORTEST`; 0 before the first check.
        interval: steps between two centres.
        is_on: whether the control variate is in use.
        is_placed: whether the last check placed the centres.
        due: step of the next check.
        num_passes: passes over all data so far.
    """

    length: int = 0
    interval: int = 0
    is_on: bool = False
    is_placed: bool = False
    due: int = 0
    num_passes: int = 0
