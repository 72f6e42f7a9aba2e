"""The program on the devices: all chains, and what a host loop asks of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from optax_smile import _check, _on_host, _reuse, _settings, parallel
from optax_smile._types import Batch, Output, Tree
from optax_smile.chains import _checks
from optax_smile.diagnostics.findings import Check
from optax_smile.state import check_place, find, last_accepted, stats

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
        start_loss: loss of the first batch at the start, scalar.
        gradients: record of the gradients.
    """

    params: optax.Params
    state: optax.OptState
    aux: Tree
    key: jax.Array | None
    loss: jax.Array
    start_loss: jax.Array
    gradients: _checks.Gradients


class Chains:
    """Many chains: `tree` is their carry, `like` the shapes of one; `advance` moves them on."""

    def __init__(
        self,
        loss_fn: Callable[..., Output],
        params: optax.Params,
        sampler: optax.GradientTransformationExtraArgs,
        *,
        key: jax.Array,
        aux: Tree = None,
        stochastic: bool = False,
        per_chain: bool = False,
        mesh: Mesh | None = None,
        specs: Tree = None,
        hint: str = "",
    ):
        self.mesh, self.specs, self.per_chain = mesh, specs, per_chain
        self.number = parallel.num_chains("sample", params)
        if aux is not None and parallel.num_chains("sample", aux, "aux") != self.number:
            rule = f"a tree whose leaves have a leading axis of {self.number} chains"
            _check.fail("sample", "aux", rule, jax.tree.map(jnp.shape, aux))
        loss = _checks.loss_of("sample", loss_fn, aux is not None, stochastic)
        sampler_key, loss_key = jax.random.split(key) if stochastic else (key, None)
        params = parallel.place(params, mesh=mesh, specs=specs)
        # `sampler_key` replaces the sampler's own key, the field `key` of its state.
        chains = Chain(
            params=params,
            state=parallel.init(sampler, params, mesh=mesh, specs=specs, key=sampler_key),
            aux=None if aux is None else parallel.place(aux, mesh=mesh),
            key=None if loss_key is None else parallel._split_key(loss_key, self.number, mesh=mesh),
            gradients=parallel.place(_checks.no_gradients(self.number, aux), mesh=mesh),
            **parallel.place(dict.fromkeys(LOSSES, jnp.zeros(self.number)), mesh=mesh),
        )
        check_place("sample", "sampler", chains.state, params)
        self.gradients_per_step = find(chains.state, "sample", "sampler").gradients_per_step
        # In `optax.MultiSteps` the sampler gets one gradient for several calls.
        self.accumulates = bool(optax.tree.get_all_with_path(chains.state, "mini_step"))
        self.like = _on_host.shapes_of_one(chains)
        self.sampler, self.settings = sampler, _settings.of(sampler, self.like.params)
        self.tree = chains

        one_call = _call_of_chain(loss, sampler)

        def many(chain, batches):
            return jax.lax.scan(lambda x, batch: (one_call(x, batch), None), chain, batches)[0]

        of_all = {"carry": self._carry, "mesh": mesh, "per_chain": per_chain}
        compiled = functools.partial(parallel.step, **of_all)
        self._one, self._many = (_reuse.Program(x, compiled, mesh) for x in (one_call, many))
        self._record = _compiled(_record_of_chain, mesh)
        self.loss = loss
        number = (self.settings or {}).get("num_data")
        # Another loss may need arrays that are spread over devices.
        is_read = specs is None and (mesh is None or parallel.DATA not in mesh.shape)
        self.counted = _checks.Counted(number, per_chain, loss if is_read else None, self.like)
        self._losses = _checks.Losses("sample", loss, self.number, per_chain, mesh, hint)
        self._draw = _compiled(_draw_of_chain, mesh)

    def losses(self, batch: Batch, params: Tree = None, aux: Tree = None) -> jax.Array:
        """Compute the loss of each chain `[chain]`, at its current point or at another one."""
        chains = self.tree
        if params is not None:
            placed = parallel.place(params, mesh=self.mesh, specs=self.specs)
            chains = chains._replace(params=placed)
        if aux is not None:
            chains = chains._replace(aux=parallel.place(aux, mesh=self.mesh))
        return self._losses(chains, batch)

    def misfit(self, batch: Batch) -> str:
        """Say why the loss does not take a batch; "" if it does."""
        try:
            self._losses.check(self.tree, batch)
        except _check.ArgumentError as error:
            return f"does not fit `loss_fn`: {error.got}"
        return ""

    def check(self, where: str, batch: Batch, warns: bool):
        """Require finite losses on the first batch, and chains that differ."""
        losses = _on_host.local(self.losses(batch))
        lost = np.flatnonzero(~np.isfinite(losses)).tolist()
        if lost:
            if not _checks.is_finite(batch):
                _check.fail("sample", "batches", "finite", "nan or inf in the first batch")
            rule = "a start at which the loss of every chain is finite"
            got = f"{losses[lost[0]]} in the chains {lost}"
            _check.fail("sample", "params", rule, got, _checks.NOT_FINITE)
        # Also parameters that the loss does not use.
        _check.Tree(finite=True)("sample", "params", self.tree.params)
        if len(set(losses.tolist())) < len(losses) and not self.per_chain:
            self._check_different()
        if warns:
            if self.like.key is None:
                _checks.warn_of_sum(where, self.losses, batch, self.counted, self.mesh)
            for check in (_checks.at_least(batch, self.counted), *self.tests(batch)):
                _checks.warn_if_failed(where, check)

    def _check_different(self):
        """Require chains that differ in anything, such as the key of their noise."""
        if self.like.key is not None:
            # The loss of each chain has its own key.
            return
        first = _on_host.first_alike(_on_host.local(self.tree))
        copies = [chain for chain, like in enumerate(first) if like != chain]
        if copies:
            rule = "chains with different starts, or a sampler or loss that draws random numbers"
            advice = (
                "Nothing here is random, so identical chains would stay identical. See"
                " `chains_from_weights`, or the sampler's `key`."
            )
            _check.fail("sample", "params", rule, f"copies in the chains {copies}", advice)

    def tests(self, batch: Batch) -> Iterator[Check]:
        """Make the tests of the posterior and, unless parameters are sharded, of the program."""
        start, params = _on_host.local(self.losses(batch)), self.tree.params
        if found := _checks.rise(self.losses, batch, params, start, self.settings):
            yield found
        if self.counted.loss is None or not _settings.are_posterior(self.settings):
            return
        one = jax.tree.map(lambda x: x[0], batch) if self.per_chain else batch
        program = _checks.traced(self.counted.loss, self.like, one)
        has_log_prior = (self.settings or {}).get("log_prior") is not None
        yield from _checks.check_leaves(program, self.like, has_log_prior)
        if self.mesh is None:
            yield from _checks.check_program(program, params, self.losses, batch, self.per_chain)

    def advance(self, batches: list[Batch]):
        """Make an update with each batch; those of several steps in one call if shapes agree."""
        stacked = None
        if len(batches) > self.gradients_per_step:
            stacked = _stack(batches, axis=int(self.per_chain))
        if stacked is not None:
            self._carry = self._many(self._carry, self._losses.put(stacked, stacked=True))
        else:
            for batch in batches:
                self._carry = self._one(self._carry, self._losses.put(batch))

    @property
    def tree(self) -> Chain:
        """Carry of all chains, arrays `[chain, ...]`; `advance` donates them."""
        return self._carry

    @tree.setter
    def tree(self, tree: Chain):
        self._carry = parallel._copy(tree)

    def record(self) -> tuple[dict[str, np.ndarray], _checks.Gradients]:
        """Return statistics and record of the gradients, `[chain, ...]` of this process."""
        return _on_host.local(self._record(self._carry))

    def num_gradients(self) -> int:
        """Wait for the chains, and return how many gradients their samplers have received."""
        counts = self._record(self._carry)[0]["num_gradients"]
        return int(np.max(_on_host.everywhere(counts)))

    def draw(self) -> Tree:
        """Return the last accepted step ends, `[chain, ...]`."""
        return self._draw(self._carry)


def _stack(batches: Sequence[Batch], axis: int) -> Batch | None:
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


def _call_of_chain(
    loss: Callable[..., tuple[jax.Array, Tree]], sampler: optax.GradientTransformationExtraArgs
) -> Callable[[Chain, Batch], Chain]:
    """Make one gradient and one update of a chain; a rejected step leaves `aux` unchanged."""

    def one_call(chain: Chain, batch: Batch) -> Chain:
        key, used = (None, None) if chain.key is None else jax.random.split(chain.key)
        value_and_grad = jax.value_and_grad(loss, has_aux=True)
        (value, aux), grads = value_and_grad(chain.params, chain.aux, used, batch)

        def value_fn(params: optax.Params) -> jax.Array:
            """Compute the loss for the line search of an optimizer."""
            return loss(params, chain.aux, used, batch)[0]

        aux, are_lost = _checks.keep_finite(aux, chain.aux, value)
        given: dict[str, Tree] = {"value": value, "value_fn": value_fn}
        if are_lost is not None:
            given["reject"] = jnp.any(are_lost)
        updates, state = sampler.update(grads, chain.state, chain.params, **given)
        sampler_state = find(state, "sample", "sampler")
        now, value = sampler_state.stats(), value.astype(chain.loss.dtype)
        before = stats(chain.state).num_gradients
        is_first = now.num_gradients == 1
        past = _checks.count_others(chain.gradients, grads, updates, sampler_state, are_lost)
        record = _checks.record_gradient(past, grads, value, before, sampler_state)
        return Chain(
            params=optax.apply_updates(chain.params, updates),
            state=state,
            aux=optax.tree.where(now.accepted, aux, chain.aux),
            key=key,
            loss=jnp.where(now.accepted & (now.step_end | is_first), value, chain.loss),
            start_loss=jnp.where(is_first, value, chain.start_loss),
            gradients=record,
        )

    return one_call


def _record_of_chain(chain: Chain) -> tuple[dict[str, jax.Array], _checks.Gradients]:
    losses = {name: getattr(chain, name) for name in LOSSES}
    return stats(chain.state)._asdict() | losses, chain.gradients


def _draw_of_chain(chain: Chain) -> Tree:
    """Copy the last accepted step end."""
    draw = last_accepted(chain.state, chain.params)
    if chain.aux is not None:
        draw = {"params": draw, "aux": chain.aux}
    return jax.tree.map(jnp.copy, draw)
