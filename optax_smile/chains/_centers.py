"""Control variates of a run: each chain has a centre of its own, which moves along with it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_smile import _check, _on_host, _tree
from optax_smile._types import Batch, Tree
from optax_smile._warn import warn
from optax_smile.chains import _checks

# Share of the noise of one gradient that two may leave; below the second share, centres are renewed
# half as often.
MOST_NOISE, LITTLE_NOISE = 0.5, 0.25
LONGEST = 4
# Pairs of parts of a batch with which the share is measured, and the fewest steps between that.
PAIRS, SHORTEST = 4, 32
# Most bytes for gradients of all batches.
LARGEST_STORE = 2**28
# Passes after which the run says that it goes on without.
PATIENCE = 15
# Standard errors by which the losses of batches at a centre may differ from that of all data, and
# the fewest batches with which that is tested.
MOST_EXCESS, LEAST_BATCHES = 8.0, 16
# Relative rounding errors of sums over the data in float64, and of losses.
ROUNDING, LOSS_ROUNDING = 1e-9, 1e-5
# Difference from 2 of the ratio of the losses of two halves of a batch and of the whole.
LEAST_OWN = 1e-3
ALL_DATA = "an iterable of batches, no iterator, with each of the `num_data` examples once"
GIVEN = _check.Where(
    ALL_DATA,
    lambda value: (
        _check.REPEATABLE.holds(value)
        and not hasattr(value, "ndim")
        and (not hasattr(value, "__len__") or len(value) > 0)
    ),
)
ONCE = "Pass each example once: none dropped, repeated or augmented, such as `[data]`."


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
        noise_left: share of the variance of the gradients that the control variate left when it
            was measured last; NaN before.
        num_reduced: calls with a control variate, int32.
        stored: losses and gradients of the batches of a list at the centre, `[batch, ...]`; None to
            compute them in each call.
    """

    center: Center
    excess: jax.Array
    noise_left: jax.Array
    num_reduced: jax.Array
    stored: tuple[jax.Array, Tree] | None

    def stats(self) -> dict[str, jax.Array]:
        """Return what the trace tells of it."""
        return {"noise_left": self.noise_left, "num_reduced": self.num_reduced}

    def reduced(self, loss: _checks.FullLoss) -> _checks.FullLoss:
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
        return self._replace(center=center, excess=jnp.zeros_like(self.excess))

    def gathered(
        self, loss: _checks.FullLoss, aux: Tree, key: Tree, batch: Batch, number: float
    ) -> Centered:
        """Add the loss and the gradient of a batch at the centre, of a `number` of examples."""
        center, stored, place = self.center, self.stored, None
        if stored is not None:
            place, batch = batch
        share = (_checks.size(batch, False) or 0) / number
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
        loss: _checks.FullLoss,
        params: Tree,
        aux: Tree,
        key: Tree,
        batch: Batch,
        number: float,
    ) -> Centered:
        """Measure the share of the variance of the gradients that the control variate leaves.

        The noise of a random loss in the gradient of all data stays until the next centre: it adds
        up over as many passes.
        """
        rows = _checks.size(batch, False) or 0
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
        whole, left = jnp.sum(jax.lax.map(of_pair, (jax.tree.map(parts, batch), keys)), axis=0)
        return self._replace(noise_left=left / whole)


def start(params: Tree, number: int, num_stored: int = 0) -> Centered:
    """Return what the carry has before the first centre, arrays `[chain, ...]`."""

    def store(leaf: jax.Array) -> jax.Array:
        return jnp.zeros((number, num_stored, *leaf.shape[1:]), leaf.dtype)

    zeros = jax.tree.map(jnp.zeros_like, params)
    return Centered(
        center=Center(zeros, jnp.zeros(number), jax.tree.map(jnp.copy, zeros)),
        excess=jnp.zeros((number, 3)),
        noise_left=jnp.full(number, jnp.nan),
        num_reduced=jnp.zeros(number, jnp.int32),
        stored=jax.tree.map(store, (jnp.zeros(number), params)) if num_stored else None,
    )


def num_stored(all_data: object, batches: object, params: Tree, specs: Tree) -> int:
    """Return of how many batches gradients like `params` `[chain, ...]` are stored, if they fit."""
    if all_data is not batches or not isinstance(batches, (list, tuple)) or specs is not None:
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


class Moves(Protocol):
    """What the host asks of all chains, see `Chains`."""

    plan: Plan

    def move_centers(self):
        """Put the centres where the chains are."""

    def gather(self, batch: Batch, place: int):
        """Add the batch at a place to the loss and the gradient at the centres."""

    def noise_left(self, batch: Batch) -> np.ndarray:
        """Measure the share of the noise that is left, `[chain]`."""
        ...

    def excess(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the sums `Centered.excess`, `[chain, 3]`, and the losses at the centres."""
        ...

    def ratio_of_halves(self, batch: Batch) -> float:
        """Return the sum of the losses of two halves over that of a batch; 2 if it is unknown."""
        ...

    def misfit(self, batch: Batch) -> str:
        """Say why the loss does not take a batch; "" if it does."""
        ...


@dataclasses.dataclass
class Centers:
    """Renews the centres of all chains, from passes over `all_data` with `number` examples each.

    A centre is used if it leaves a chain that has moved on for a pass less than `LITTLE_NOISE`, and
    renewed before it leaves `MOST_NOISE`. If it leaves more within a pass, the run goes on without,
    and tries again after twice as many steps.
    """

    where: str
    all_data: Iterable[Batch]
    number: float
    per_chain: bool
    plan: Plan = Plan()
    sums: np.ndarray | None = None
    has_warned: bool = False

    def __post_init__(self):
        self.is_list = isinstance(self.all_data, (list, tuple))
        for _ in self.sized() if self.is_list else ():
            pass

    @property
    def most_steps(self) -> int | None:
        """Most steps between two looks; None before the first."""
        return self.plan.interval or None

    def look(self, chains: Moves, step: int, batch: Batch, batches_per_step: int):
        """Renew the centres before a step if it is time; `batch` is the next one."""
        plan = self.plan
        if step < plan.due:
            return
        if not plan.length:
            rows = _checks.size(batch, self.per_chain) or 0
            if rows < 2:
                rule = "batches of at least two examples, for `control_variate`"
                _check.fail(self.where, "batches", rule, _check.show(batch))
            if abs(ratio := chains.ratio_of_halves(batch) - 2) > LEAST_OWN:
                rule = "the mean of numbers of single examples, for `control_variate`"
                got = f"a loss of which halves of a batch have means {ratio:.1%} apart from its own"
                _check.fail(self.where, "loss_fn", rule, got, "Statistics of the batch are none.")
            length = max(math.ceil(self.number / rows / batches_per_step), SHORTEST)
            plan = Plan(length, length)
        if plan.is_placed:
            if plan.is_on:
                self.check_batches(*chains.excess())
            plan = self.judged(plan, step, float(np.median(chains.noise_left(batch))))
        else:
            plan = plan._replace(is_placed=True)
        if plan.is_placed:
            chains.move_centers()
            plan = plan._replace(due=step + plan.interval)
        if plan.is_on:
            self.gather(chains)
            plan = plan._replace(num_passes=plan.num_passes + 1)
        chains.plan = self.plan = plan

    def judged(self, plan: Plan, step: int, left: float) -> Plan:
        """Decide whether the centres are renewed, and how often."""
        interval = plan.interval
        if left < LITTLE_NOISE and (interval < LONGEST * plan.length or not plan.is_on):
            interval *= 2
        elif not left <= MOST_NOISE:
            interval //= 2
        if interval > plan.length or plan.is_on and interval == plan.length:
            return plan._replace(is_on=True, interval=interval)
        if not self.has_warned and step >= PATIENCE * plan.length:
            self.has_warned = True
            warn(
                f"`{self.where}`: `control_variate` does not pay here: within a pass, it comes to"
                f" leave {left:.0%} of the variance of the gradients, and needs two of them. The"
                " run goes on without, and tries again from time to time."
            )
        pause = {"is_on": False, "is_placed": False, "interval": plan.length, "due": 2 * step}
        return plan._replace(**pause)

    def sized(self) -> Iterator[tuple[int, Batch]]:
        """Yield all data with their places, and require that they are."""
        rows = 0
        for place, batch in enumerate(self.all_data):
            batch = _on_host.as_numeric(self.where, "control_variate", batch, copy=not self.is_list)
            if not (size := _checks.size(batch, self.per_chain)):
                _check.fail(self.where, "control_variate", ALL_DATA, "a batch without examples")
            rows += size
            if rows > self.number:
                break
            yield place, batch
        if rows != self.number:
            rule = f"a pass over all data, `num_data` = {self.number:g} rows"
            got = f"more than {self.number:g}" if rows > self.number else f"{rows}"
            _check.fail(self.where, "control_variate", rule, f"{got} rows", ONCE)

    def gather(self, chains: Moves):
        """Make a pass over all data."""
        sums = np.zeros(())
        for place, batch in self.sized():
            if not place and (reason := chains.misfit(batch)):
                _check.fail(self.where, "control_variate", ALL_DATA, f"a batch that {reason}")
            chains.gather(batch, place)
            if not self.is_list:
                sums = sums + np.array([_moments(x) for x in jax.tree.leaves(batch)])
        if not self.is_list:
            before, self.sums = sums if self.sums is None else self.sums, sums
            if np.any(np.abs(sums - before) > ROUNDING * before[:, 1:]):
                got = "other examples than in the pass before"
                _check.fail(self.where, "control_variate", ALL_DATA, got, ONCE)

    def check_batches(self, sums: np.ndarray, losses: np.ndarray):
        """Require that the batches are of the data of the centres, from `Moves.excess`."""
        number, total, squares = np.asarray(sums, float).T
        if number.min() < LEAST_BATCHES:
            return
        mean = total / number
        variance = np.maximum(squares / number - mean**2, 0) / number
        error = np.sqrt(variance + (LOSS_ROUNDING * (1 + np.abs(losses))) ** 2)
        if (ratio := float(np.median(np.abs(mean) / error))) > MOST_EXCESS:
            rule = "the data of `batches`"
            got = (
                f"data whose mean loss is {np.median(losses):.4g} at points where that of the"
                f" batches is {np.median(losses + mean):.4g}, {ratio:.0f} standard errors away"
            )
            _check.fail(self.where, "control_variate", rule, got, ONCE)


def _moments(array: Tree) -> tuple[float, float]:
    """Return the sum of an array, and that of its absolute values."""
    array = np.asarray(array, float)
    return float(array.sum()), float(np.abs(array).sum())
