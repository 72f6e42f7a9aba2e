"""The program on the devices: all chains, and the methods that host loops call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from optax_smile import _check, _noise, _on_host, _settings, parallel
from optax_smile.chains import _centers
from optax_smile.diagnostics.findings import Check
from optax_smile.mistakes.gradients import (
    Gradients,
    count_others,
    keep_finite,
    no_gradients,
    record_gradient,
)
from optax_smile.mistakes.loss import FullLoss, Losses, check_mean, loss_of
from optax_smile.state import NUM_OF_START, check_place, find, last_accepted, stats

# Entries of the trace besides the statistics of the sampler.
LOSSES = ("loss", "start_loss")


class Chain(NamedTuple):
    """Carry of one chain.

    Attributes:
        params: a proposal, which the next gradient judges.
        state: state of the sampler.
        aux: auxiliary state of the model at the last accepted point, or None.
        key: key of a stochastic loss, or None.
        loss: loss of a batch at the last accepted step end, scalar.
        start_loss: mean loss of the first `NUM_OF_START` gradients, scalar.
        gradients: record of the gradients.
        centered: control variate, or None.
    """

    params: optax.Params
    state: optax.OptState
    aux: object
    key: jax.Array | None
    loss: jax.Array
    start_loss: jax.Array
    gradients: Gradients
    centered: _centers.Centered | None


class Chains:
    """Many chains: `tree` is their carry, `like` the shapes of one; `advance` runs them."""

    def __init__(
        self,
        loss_fn: Callable[..., object],
        params: optax.Params,
        sampler: optax.GradientTransformationExtraArgs,
        *,
        key: jax.Array,
        aux: object = None,
        stochastic: bool = False,
        per_chain: bool = False,
        mesh: Mesh | None = None,
        specs: object = None,
        hint: str = "",
        num_stored: int | None = None,
    ):
        self.mesh, self.specs, self.per_chain = mesh, specs, per_chain
        self.number = parallel.num_chains(params)
        if aux is not None and parallel.num_chains(aux, "aux") != self.number:
            rule = f"a tree whose leaves have a leading axis of {self.number} chains"
            _check.fail("aux", rule, jax.tree.map(jnp.shape, aux))
        loss = loss_of(loss_fn, aux is not None, stochastic)
        sampler_key, loss_key = parallel._loss_keys(key, stochastic, self.number, mesh=mesh)
        params = parallel.place(params, mesh=mesh, specs=specs)
        # `sampler_key` replaces the sampler's own key, the field `key` of its state.
        chains = Chain(
            params=params,
            state=parallel.init(sampler, params, mesh=mesh, specs=specs, key=sampler_key),
            aux=None if aux is None else parallel.place(aux, mesh=mesh),
            key=loss_key,
            gradients=parallel.place(no_gradients(self.number, aux), mesh=mesh),
            centered=_centers.start(params, num_stored, mesh, specs),
            **parallel.place(dict.fromkeys(LOSSES, jnp.zeros(self.number)), mesh=mesh),
        )
        check_place("sampler", chains.state, params)
        self.gradients_per_step = find(chains.state, "sampler").gradients_per_step
        # In `optax.MultiSteps` the sampler gets one gradient for several calls.
        self.accumulates = bool(optax.tree.get_all_with_path(chains.state, "mini_step"))
        self.like = _on_host.shapes_of_one(chains)
        self.sampler, self.settings = sampler, _settings.of(sampler, self.like.params)
        self.tree = chains

        def program(function: Callable[[Chain, object], Chain]) -> Callable[[Chain, object], Chain]:
            return parallel.step(function, chains, mesh=mesh, per_chain=per_chain)

        # One without and, if there are centres, one with a control variate.
        self.plan, has_centers = _centers.Plan(), num_stored is not None
        calls = [_call_of_chain(loss, sampler, x) for x in (False, True)[: 1 + has_centers]]
        self._one, self._many = ([program(x) for x in y] for y in (calls, map(_in_turn, calls)))
        self._record = _compiled(_record_of_chain, mesh)
        if has_centers:
            self._move = program(_move_center)
            of_all = loss, float((self.settings or {}).get("num_data") or 0)
            self._gather, self._measure = (
                program(functools.partial(x, *of_all)) for x in (_gather, _measure)
            )
        axes = self.number, per_chain, mesh, specs
        self.losses = Losses(loss, self.like, *axes, hint, self.settings)
        self._draw = _compiled(_draw_of_chain, mesh)

    def misfit(self, batch: object) -> str:
        """Say why the loss does not accept a batch; "" if it does."""
        try:
            self.losses.check(self.tree, batch)
        except _check.ArgumentError as error:
            return f"does not fit `loss_fn`: {error.got}"
        return ""

    def advance(self, batches: list[object], places: Sequence[int] = ()):
        """Make an update with each batch; several steps share one call if their shapes agree.

        `places` are the indices of the batches in the list whose gradients are stored.
        """
        if self.plan.is_on:
            batches = [*map(self._at, batches, places)]
        stacked = None
        if len(batches) > self.gradients_per_step:
            stacked = _stack(batches, axis=int(self.per_chain))
        if stacked is not None:
            batch = self.losses.put(stacked, stacked=True)
            self._carry = self._many[self.plan.is_on](self._carry, batch)
        else:
            for batch in batches:
                self._carry = self._one[self.plan.is_on](self._carry, self.losses.put(batch))

    def move_centers(self):
        """Move the centres of the control variates to the current points of the chains."""
        self._carry = self._move(self._carry, ())

    def gather(self, batch: object, place: int):
        """Add a batch to the loss and the gradient of all data at the centres."""
        self._carry = self._gather(self._carry, self.losses.put(self._at(batch, place)))

    def _at(self, batch: object, place: int) -> object:
        """Add the index of a batch if gradients are stored."""
        if self.like.centered.stored is None:
            return batch
        return np.full((self.number,) * self.per_chain, place, np.int32), batch

    def noise_left(self, batches: Sequence[object]) -> np.ndarray:
        """Measure the share of the noise that remains with the control variates, `[chain]`."""
        for batch in batches:
            self._carry = self._measure(self._carry, self.losses.put(batch))
        return self._everywhere(lambda x: x.noise[:, 1] / x.noise[:, 0])

    def ratio_of_halves(self, batch: object) -> float:
        """Return the sum of the losses of two halves over that of a batch; 2 if it is unknown."""
        found = check_mean(self.losses, self.tree, batch)
        return found.value[0] if isinstance(found, Check) else 2.0

    def excess(self) -> tuple[np.ndarray, np.ndarray]:
        """Return numbers that show if batches and centres have the same data, `[chain, ...]`."""
        return self._everywhere(lambda x: (x.excess, x.center.loss))

    def _everywhere(self, read: Callable[[_centers.Centered], object]) -> Any:
        """Return numbers of the control variates of all chains."""
        assert self._carry.centered is not None
        return _on_host.everywhere(read(self._carry.centered))

    @property
    def tree(self) -> Chain:
        """Carry of all chains, arrays `[chain, ...]`; `advance` donates them."""
        return self._carry

    @tree.setter
    def tree(self, tree: Chain):
        self._carry = parallel._copy(tree)

    def record(self) -> tuple[dict[str, np.ndarray], Gradients]:
        """Return statistics and record of the gradients, `[chain, ...]` of this process."""
        found, gradients = _on_host.local(self._record(self._carry))
        if self._carry.centered is not None:
            found["num_passes"] = np.full_like(found["num_reduced"], self.plan.num_passes)
        return found, gradients

    def num_gradients(self) -> int:
        """Wait for the chains, and return how many gradients their samplers have received."""
        return int(np.max(_on_host.everywhere(self._record(self._carry)[0]["num_gradients"])))

    def draw(self) -> Any:
        """Return the last accepted step ends, `[chain, ...]`."""
        return self._draw(self._carry)


def _stack(batches: Sequence[object], axis: int) -> object | None:
    """Stack batches along a new axis; None if their shapes differ."""

    def join(*leaves):
        return (jnp if isinstance(leaves[0], jax.Array) else np).stack(leaves, axis=axis)

    try:
        return jax.tree.map(join, *batches)
    except ValueError:
        return None


@functools.cache
def _compiled(function: Callable, mesh: Mesh | None) -> Callable:
    """Compile a function of the carry for all chains, once for all runs of the same shapes."""
    own = None if mesh is None else parallel._chain_sharding(mesh)
    return jax.jit(parallel.over_chains(function, mesh=mesh), out_shardings=own)


def _in_turn(one_call: Callable[[Chain, object], Chain]) -> Callable[[Chain, object], Chain]:
    """Make a function that makes a call with each of several batches."""

    def many(chain: Chain, batches: object) -> Chain:
        return jax.lax.scan(lambda x, batch: (one_call(x, batch), None), chain, batches)[0]

    return many


def _call_of_chain(
    loss: FullLoss,
    sampler: optax.GradientTransformationExtraArgs,
    is_reduced: bool = False,
) -> Callable[[Chain, object], Chain]:
    """Make one gradient and one update of a chain; a rejected step leaves `aux` unchanged."""

    def one_call(chain: Chain, batch: object) -> Chain:
        key, used = _noise.split(chain.key)
        centered = chain.centered if is_reduced else None
        of_batch = loss if centered is None else centered.reduced(loss)
        value_and_grad = jax.value_and_grad(of_batch, has_aux=True)
        (value, aux), grads = value_and_grad(chain.params, chain.aux, used, batch)
        if centered is not None:
            aux, excess = aux
            centered = centered.count(excess)

        def value_fn(params: optax.Params) -> jax.Array:
            """Compute the loss for the line search of an optimizer."""
            return of_batch(params, chain.aux, used, batch)[0]

        aux, are_lost = keep_finite(aux, chain.aux, value)
        given: dict[str, Any] = {"value": value, "value_fn": value_fn}
        if are_lost is not None:
            given["reject"] = jnp.any(are_lost)
        updates, state = sampler.update(grads, chain.state, chain.params, **given)
        sampler_state = find(state, "sampler")
        now, value = sampler_state.stats(), value.astype(chain.loss.dtype)
        before = stats(chain.state).num_gradients
        is_first = now.num_gradients == 1
        past = count_others(chain.gradients, grads, updates, sampler_state, are_lost)
        record = record_gradient(past, grads, value, before, sampler_state)
        is_early = (now.num_gradients <= NUM_OF_START) & (jnp.isfinite(value) | is_first)
        change = (value - chain.start_loss) / jnp.maximum(now.num_gradients, 1)
        return Chain(
            params=optax.apply_updates(chain.params, updates),
            state=state,
            aux=optax.tree.where(now.accepted, aux, chain.aux),
            key=key,
            loss=jnp.where(now.accepted & (now.step_end | is_first), value, chain.loss),
            start_loss=chain.start_loss + jnp.where(is_early, change, 0),
            gradients=record,
            centered=chain.centered if centered is None else centered,
        )

    return one_call


def _move_center(chain: Chain, _: object) -> Chain:
    assert chain.centered is not None
    return chain._replace(centered=chain.centered.moved(last_accepted(chain.state, chain.params)))


def _gather(loss: FullLoss, number: float, chain: Chain, batch: object) -> Chain:
    assert chain.centered is not None
    key, used = _noise.split(chain.key)
    centered = chain.centered.gathered(loss, chain.aux, used, batch, number)
    return chain._replace(key=key, centered=centered)


def _measure(loss: FullLoss, number: float, chain: Chain, batch: object) -> Chain:
    assert chain.centered is not None
    key, used = _noise.split(chain.key)
    point = last_accepted(chain.state, chain.params)
    centered = chain.centered.measured(loss, point, chain.aux, used, batch, number)
    return chain._replace(key=key, centered=centered)


def _record_of_chain(chain: Chain) -> tuple[dict[str, jax.Array], Gradients]:
    losses = {name: getattr(chain, name) for name in LOSSES}
    of_center = {} if chain.centered is None else chain.centered.stats()
    return stats(chain.state)._asdict() | losses | of_center, chain.gradients


def _draw_of_chain(chain: Chain) -> optax.Params:
    """Copy the last accepted step end."""
    draw = last_accepted(chain.state, chain.params)
    if chain.aux is not None:
        draw = {"params": draw, "aux": chain.aux}
    return jax.tree.map(jnp.copy, draw)
