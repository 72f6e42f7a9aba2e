"""Control variates of a run, one for each chain: what the chains hold and compute."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_smile import _tree
from optax_smile._on_host import num_examples
from optax_smile._types import Batch, Tree
from optax_smile.mistakes.loss import FullLoss

# Pairs of parts of a batch with which the noise is measured.
PAIRS = 4
# Most bytes for gradients of all batches.
LARGEST_STORE = 2**28


class Center(NamedTuple):
    """A point, and what a control variate needs to know of all data there.

    Attributes:
        params: c, the parameters of one chain.
        loss: L, the mean loss, scalar.
        gradient: G, its gradient, a tree like `params`.
    """

    params: Tree
    loss: jax.Array
    gradient: Tree


def residual(loss: jax.Array, gradient: Tree, center: Center, params: Tree) -> jax.Array:
    """Difference between the linear functions that touch the losses of a batch and of all data."""
    excess = jax.tree.map(jnp.subtract, gradient, center.gradient)
    moved = jax.tree.map(jnp.subtract, params, center.params)
    terms = jax.tree.map(lambda x, y: jnp.sum(x * y), excess, moved)
    return loss - center.loss + _tree.total(terms)


class Centered(NamedTuple):
    """What the carry of a chain has of its control variate.

    Attributes:
        center: where the chain was when it was renewed.
        excess: number, sum and sum of squares of differences between the loss of a batch at the
            centre and that of all data, `[3]`.
        noise: sums of squares, of differences of gradients and of what the control variate left of
            them, when they were measured last, `[2]`; those before count half as much.
        num_reduced: calls with a control variate, int32.
        stored: losses and gradients of the batches of a list at the centre, `[batch, ...]`; None to
            compute them in each call.
    """

    center: Center
    excess: jax.Array
    noise: jax.Array
    num_reduced: jax.Array
    stored: tuple[jax.Array, Tree] | None

    def stats(self) -> dict[str, jax.Array]:
        """Return what the trace tells of it."""
        return {"noise_left": self.noise[1] / self.noise[0], "num_reduced": self.num_reduced}

    def reduced(self, loss: FullLoss) -> FullLoss:
        """Return a loss with the control variate, and the excess beside its `aux`.

        If losses are stored, a batch comes as a pair with its place in the list.
        """

        def with_center(params: Tree, aux: Tree, key: Tree, batch: Batch) -> tuple[jax.Array, Tree]:
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

    def moved(self, params: Tree) -> Centered:
        """Put the centre at a point, where nothing is known of the data."""
        center = jax.tree.map(jnp.zeros_like, self.center)._replace(params=params)
        none = jnp.zeros_like(self.excess)
        return self._replace(center=center, excess=none, noise=self.noise / 2)

    def gathered(
        self, loss: FullLoss, aux: Tree, key: Tree, batch: Batch, number: float
    ) -> Centered:
        """Add the loss and the gradient of a batch at the centre, of a `number` of examples."""
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
        self, loss: FullLoss, params: Tree, aux: Tree, key: Tree, batch: Batch, number: float
    ) -> Centered:
        """Measure the variance of the gradients, and what the control variate leaves of it.

        The noise of a random loss in the gradient of all data stays until the next centre: it adds
        up over as many passes.
        """
        rows = num_examples(batch, False) or 0
        pairs = min(PAIRS, rows // 2)
        length = rows // (2 * pairs)

        def parts(leaf: Tree) -> jax.Array:
            if not jnp.ndim(leaf):
                return jnp.broadcast_to(leaf, (pairs, 2))
            return leaf[: 2 * pairs * length].reshape(pairs, 2, length, *leaf.shape[1:])

        def square(x: Tree, y: Tree) -> jax.Array:
            return optax.tree.norm(optax.tree.sub(x, y), squared=True)

        def of_pair(given: tuple[Batch, Tree]) -> jax.Array:
            pair, keys = given

            def gradient(at: Tree, place: int, key: int) -> Tree:
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


def start(params: Tree, number: int, num_stored: int = 0) -> Centered:
    """Return what the carry has before the first centre, arrays `[chain, ...]`."""

    def store(leaf: jax.Array) -> jax.Array:
        return jnp.zeros((number, num_stored, *leaf.shape[1:]), leaf.dtype)

    zeros = jax.tree.map(jnp.zeros_like, params)
    return Centered(
        center=Center(zeros, jnp.zeros(number), jax.tree.map(jnp.copy, zeros)),
        excess=jnp.zeros((number, 3)),
        noise=jnp.zeros((number, 2)),
        num_reduced=jnp.zeros(number, jnp.int32),
        stored=jax.tree.map(store, (jnp.zeros(number), params)) if num_stored else None,
    )


def num_stored(
    all_data: object, batches: object, params: Tree, specs: Tree, is_stochastic: bool
) -> int:
    """Return of how many batches gradients like `params` `[chain, ...]` are stored, if they fit.

    A random loss needs the same key at both points.
    """
    if all_data is not batches or not isinstance(batches, (list, tuple)):
        return 0
    if specs is not None or is_stochastic:
        return 0
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    return len(batches) * (len(batches) * size <= LARGEST_STORE)


class Plan(NamedTuple):
    """When the host looks at the centres next, in a form for JSON.

    Attributes:
        length: steps of a pass over the data, at least `SHORTEST`; 0 before the first look.
        interval: steps between two centres.
        is_on: whether gradients have a control variate.
        is_placed: whether the centres were placed at the last look.
        due: step of the next look.
        num_passes: over all data so far.
    """

    length: int = 0
    interval: int = 0
    is_on: bool = False
    is_placed: bool = False
    due: int = 0
    num_passes: int = 0
