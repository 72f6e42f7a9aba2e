"""All chains on their devices, and what a host loop asks of them."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from optax_smile import _check, _tree, parallel
from optax_smile.chains import _data, _gradients, _loop
from optax_smile.chains._packing import SMALL, Packed, Packing
from optax_smile.chains._rise import rise
from optax_smile.diagnostics.results import Check
from optax_smile.state import find, last_accepted, stats

# What a chain tells in its trace besides what its sampler does.
LOSSES = ("loss", "start_loss")


class Chain(NamedTuple):
    """What travels from gradient to gradient in one chain.

    Attributes:
        params: a proposal, which the next gradient judges.
        state: of the sampler.
        aux: auxiliary state of the model at the last accepted point, or None.
        key: of a stochastic loss, or None.
        loss: of a batch at the last accepted step end, scalar.
        start_loss: of the first batch at the start, scalar.
        gradients: what was seen of them.
    """

    params: Any
    state: Any
    aux: Any
    key: jax.Array | None
    loss: jax.Array
    start_loss: jax.Array
    gradients: _gradients.Gradients


class Chains:
    """Many chains: `tree` is all that they are, `like` the shapes of one; `advance` moves them on.

    Arguments are those of `sample`; `key` is a typed one.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        sampler: optax.GradientTransformationExtraArgs,
        params: optax.Params,
        key: jax.Array,
        *,
        aux: Any,
        stochastic: bool,
        per_chain: bool,
        mesh: Mesh | None,
        specs: Any,
        observe: Callable[[Any], Any] | None,
    ):
        self.mesh, self.specs, self.per_chain, self.observe = mesh, specs, per_chain, observe
        self.number = parallel.num_chains("sample", params)
        if aux is not None and parallel.num_chains("sample", aux, "aux") != self.number:
            rule = f"a tree whose leaves have a leading axis of {self.number} chains"
            _check.fail("sample", "aux", rule, jax.tree.map(jnp.shape, aux))
        self.loss = _loop.loss_of("sample", loss_fn, aux is not None, stochastic)
        sampler_key, loss_key = jax.random.split(key) if stochastic else (key, None)
        params = parallel.place(params, mesh=mesh, specs=specs)
        chains = Chain(
            params=params,
            state=parallel.init(sampler, params, mesh=mesh, specs=specs, key=sampler_key),
            aux=None if aux is None else parallel.place(aux, mesh=mesh),
            key=None if loss_key is None else parallel.split_key(loss_key, self.number, mesh=mesh),
            gradients=parallel.place(_gradients.nothing_seen(self.number), mesh=mesh),
            **parallel.place(dict.fromkeys(LOSSES, jnp.zeros(self.number)), mesh=mesh),
        )
        self.gradients_per_step = find(chains.state, "sample", "sampler").gradients_per_step
        self.like = _loop.one_of(chains)
        # Parameters that are sharded inside a chain keep their arrays.
        self.packing = packing = Packing(self.like, SMALL if specs is None else 0)
        has_small = bool(packing.groups)
        self._join = self._compile(packing.join) if has_small else packing.join
        self._part = self._compile(packing.part) if has_small else packing.part
        self.tree = chains

        one_call = _call_of_chain(self.loss, sampler)

        def one(packed, batch):
            return packing.pack(one_call(packing.unpack(packed), batch))

        def many(packed, batches):
            def step(chain, batch):
                return one_call(chain, batch), None

            return packing.pack(jax.lax.scan(step, packing.unpack(packed), batches)[0])

        self._one = parallel.step(one, self.packed, mesh=mesh, per_chain=per_chain)
        self._many = parallel.step(many, self.packed, mesh=mesh, per_chain=per_chain)
        self._told = self._compile(lambda packed: _told_of_chain(packing.unpack(packed)))
        self._losses = self._compile(
            lambda chain, batch: self.loss(chain.params, chain.aux, chain.key, batch)[0],
            in_axes=(0, 0 if per_chain else None),
        )
        self._draw = self._compile(lambda packed: _draw_of_chain(packing.unpack(packed)))

    def _compile(self, function: Callable, in_axes: Any = 0) -> Callable:
        own = None if self.mesh is None else parallel.chain_sharding(self.mesh)
        mapped = parallel.over_chains(function, mesh=self.mesh, in_axes=in_axes)
        return jax.jit(mapped, out_shardings=own)

    def put(self, batch: Any, is_stacked: bool = False) -> Any:
        """Bring a batch of one gradient, or of several, onto the devices."""
        if self.mesh is None:
            return batch
        arguments: dict[str, Any] = {"per_chain": self.per_chain, "stacked": is_stacked}
        return parallel.place_batch(batch, mesh=self.mesh, **arguments)

    def losses(self, batch: Any, start: Any = None) -> jax.Array:
        """Loss of each chain `[chain]`, where it is, or where the draw `start` is; a scalar."""
        chains = self.tree
        arguments = chains, batch, self.put, self.per_chain, self.number
        _loop.check_loss("sample", self._losses, *arguments)
        if start is not None:
            params, aux = (start, None) if chains.aux is None else (start["params"], start["aux"])
            params = parallel.place(params, mesh=self.mesh, specs=self.specs)
            aux = None if aux is None else parallel.place(aux, mesh=self.mesh)
            chains = chains._replace(params=params, aux=aux)
        return self._losses(chains, self.put(batch))

    def _losses_at(self, batch: Any, params: Any) -> jax.Array:
        aux = self.tree.aux
        return self.losses(batch, params if aux is None else {"params": params, "aux": aux})

    def check(self, batch: Any, settings: Mapping[str, Any] | None, warns: bool):
        """Require a loss of every chain that is a scalar and finite, and chains that differ.

        Args:
            batch: the first one.
            settings: of the sampler.
            warns: whether to warn of what looks wrong in the loss and in `num_data`.
        """
        found = _tree.local(self.losses(batch))
        lost = np.flatnonzero(~np.isfinite(found)).tolist()
        if lost:
            rule = "a start at which the loss of every chain is finite"
            got, remedy = f"{found[lost[0]]} in the chains {lost}", "Are the batches finite?"
            _check.fail("sample", "params", rule, got, remedy)
        # Also those that the loss does not use.
        _check.Tree(finite=True)("sample", "params", self.tree.params)
        if len(set(found.tolist())) < len(found) and not self.per_chain:
            self._check_different()
        if warns:
            if self.like.key is None:
                _loop.warn_of_sum("sample", self.losses, batch, self.per_chain, self.mesh)
            _data.tell("sample", self.check_count(batch, settings))
            _data.tell("sample", self.check_rise(batch, settings))

    def _check_different(self):
        """Require chains that differ in anything, such as the key of their noise."""
        if self.like.key is not None:
            # Each chain has a key of its own for its loss.
            return
        first = _tree.first_alike(_tree.local(self.tree))
        copies = [chain for chain, like in enumerate(first) if like != chain]
        if copies:
            rule = "chains that start apart, or a sampler or a loss that draws random numbers"
            remedy = "Copies stay copies. See `chains_from_weights`, or the sampler's `key`."
            _check.fail("sample", "params", rule, f"copies in the chains {copies}", remedy)

    def check_count(self, batch: Any, settings: Mapping[str, Any] | None) -> Check | None:
        """Compare the sampler's `num_data` with the size of a batch; None if one is unknown."""
        return _data.at_least(batch, (settings or {}).get("num_data"), self.per_chain)

    def check_rise(self, batch: Any, settings: Mapping[str, Any] | None) -> Check | None:
        """Find a posterior whose draws are far worse than the start, see `_rise`."""
        start = _tree.local(self.losses(batch))
        return rise(self._losses_at, batch, self.tree.params, start, settings)

    def advance(self, batch: Any, is_stacked: bool):
        """Do the update, or the updates, of a batch."""
        self.packed = (self._many if is_stacked else self._one)(self.packed, batch)

    @property
    def tree(self) -> Chain:
        """All that the chains are, arrays `[chain, ...]` as their names say."""
        return self.packing.assemble(self._part(self.packed.small), self.packed.large)

    @tree.setter
    def tree(self, tree: Chain):
        small, large = self.packing.split(tree)
        self.packed = Packed(self._join(small), large)

    def stats(self) -> dict[str, np.ndarray]:
        """What the sampler says, arrays `[chain]` of the chains of this process."""
        return self.look()[0]

    def look(self) -> tuple[dict[str, np.ndarray], _gradients.Gradients]:
        """What the sampler says, and what was seen of the gradients, arrays `[chain, ...]`."""
        return _tree.local(self._told(self.packed))

    def draw(self) -> Any:
        """Last accepted step ends, or what is observed of them, arrays `[chain, ...]` to keep."""
        draw = self._draw(self.packed)
        return draw if self.observe is None else self._observed(self.observe(draw))

    def _observed(self, found: Any) -> Any:
        """Require arrays of all chains."""
        rule = f"a function that gives a tree of arrays [chain, ...] of the {self.number} chains"
        shapes = [np.shape(x)[:1] for x in jax.tree.leaves(found)]
        if not shapes or set(shapes) != {(self.number,)}:
            got = f"one that gives {_check.show(jax.tree.map(np.shape, found))}"
            _check.fail("sample", "observe", rule, got)

        def in_precision_of_jax(x: Any) -> Any:
            """In which it comes back from a directory."""
            own = jax.dtypes.canonicalize_dtype(x.dtype)
            return x if isinstance(x, jax.Array) else np.asarray(x, own)

        return jax.tree.map(in_precision_of_jax, found)


def _call_of_chain(loss: Callable, sampler: optax.GradientTransformationExtraArgs) -> Callable:
    """One gradient and one update of a chain; what a rejected step did to `aux` is dropped."""

    def one_call(chain: Chain, batch: Any) -> Chain:
        key, used = (None, None) if chain.key is None else jax.random.split(chain.key)
        value_and_grad = jax.value_and_grad(loss, has_aux=True)
        (value, aux), grads = value_and_grad(chain.params, chain.aux, used, batch)

        def value_fn(params: Any) -> jax.Array:
            """What the line search of an optimizer calls."""
            return loss(params, chain.aux, used, batch)[0]

        given: dict[str, Any] = {"value": value, "value_fn": value_fn}
        updates, state = sampler.update(grads, chain.state, chain.params, **given)
        sampler_state = find(state, "sample", "sampler")
        told, value = sampler_state.stats(), value.astype(chain.loss.dtype)
        before = stats(chain.state).num_gradients
        is_first = told.num_gradients == 1
        return Chain(
            params=optax.apply_updates(chain.params, updates),
            state=state,
            aux=_tree.where(told.accepted, aux, chain.aux),
            key=key,
            loss=jnp.where(told.accepted & (told.step_end | is_first), value, chain.loss),
            start_loss=jnp.where(is_first, value, chain.start_loss),
            gradients=_gradients.observe(chain.gradients, grads, value, before, sampler_state),
        )

    return one_call


def _told_of_chain(chain: Chain) -> tuple[dict[str, jax.Array], _gradients.Gradients]:
    losses = {name: getattr(chain, name) for name in LOSSES}
    return stats(chain.state)._asdict() | losses, chain.gradients


def _draw_of_chain(chain: Chain) -> Any:
    """Copy the last accepted step end."""
    draw = last_accepted(chain.state, chain.params)
    if chain.aux is not None:
        draw = {"params": draw, "aux": chain.aux}
    return jax.tree.map(jnp.copy, draw)
