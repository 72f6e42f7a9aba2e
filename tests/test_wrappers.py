"""Samplers inside the wrappers of Optax, in all kinds of loops: the plain chain or a clear error.

Each pair of `WRAPPERS` and `LOOPS` gives the chain of the sampler alone in a compiled loop that
passes everything, or the error in `ERRORS`. The fast tests have each wrapper in the plain loop, and
each loop with the sampler alone and with `optax.partition`; all other pairs are nightly. Loops on
several devices: `devices/test_sharded_states.py`. `docs/long-runs.md` has the same verdicts.
"""

import copy
import dataclasses
import functools
import operator
import warnings
from typing import Any, NamedTuple

import chex
import cloudpickle
import equinox as eqx
import equinox.internal
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from optax import contrib
from public_samplers import quick_psmile, settings_of
from runs import nightly, refused
from test_contract import make

import optax_smile

# Also for nightly tests: they compare numbers with results of fast ones.
OPTIMIZED = False
KEY, RBG = jax.random.key(0), jax.random.key(7, impl="rbg")
CALLS, SKIPPED = 12, 5
RNG = np.random.default_rng(0)
BATCHES = jnp.asarray(RNG.normal(size=(CALLS, 16, 8)), jnp.float32)
# The first one is weakly typed, as what is made from a number of Python.
START = {"mean": jnp.full(8, 1.0), "offset": jnp.zeros(8)}
# A leaf with a gradient that a wrapper hides from the sampler.
AT_REST = {"table": jnp.arange(8.0)}
apply_updates: Any = optax.apply_updates
last_accepted: Any = optax_smile.last_accepted
tracked: Any = optax_smile.tracked
stats = optax_smile.stats


def loss_fn(params, batch):
    table = jnp.sum(params.get("table", jnp.zeros(())))
    # The table has a gradient, but does not change the loss.
    others = jnp.sum((params["offset"] - 1) ** 2) / 2 + table - jax.lax.stop_gradient(table)
    return jnp.mean((params["mean"][None] - batch) ** 2) + others


def sghmc() -> Any:
    return optax_smile.sghmc(1e-2, num_data=100, key=KEY)


def injected() -> Any:
    build: Any = optax.inject_hyperparams(optax_smile.sghmc, static_args=("key",))
    return build(step_size=1e-2, num_data=100, key=KEY)


SAMPLERS: dict[str, Any] = {"sghmc": sghmc, "psmile": lambda: make("psmile, rich")}


# Wrappers.


class Wrapper(NamedTuple):
    wrap: Any = lambda tx: tx  # From a sampler to a transformation.
    batches: Any = lambda batches: batches  # From those of the plain loop to those it needs.
    kept: Any = slice(None)  # Calls after which the parameters are those of the plain loop.
    at_rest: bool = False  # Whether the loop has a leaf that the sampler does not see.


def is_sampled(tree):
    return jax.tree_util.tree_map_with_path(lambda path, _: "table" not in str(path), tree)


def masked(tx):
    def is_at_rest(tree):
        return jax.tree.map(operator.not_, is_sampled(tree))

    zero = optax.masked(optax.set_to_zero(), is_at_rest)
    return optax.chain(optax.masked(tx, is_sampled), zero)


def partition(tx):
    return optax.partition({True: tx, False: optax.set_to_zero()}, is_sampled)


def split(batches):
    """Make two batches of each, the mean of whose gradients is its gradient."""
    return jnp.stack([batches + 0.5, batches - 0.5], axis=1).reshape(-1, *batches.shape[1:])


def with_one_more(number):
    """Insert a batch whose call the wrapper must skip."""
    kept = np.delete(np.arange(CALLS + 1), SKIPPED)
    return lambda batches: jnp.insert(batches, SKIPPED, number, axis=0), kept


IN_PAIRS = split, slice(1, None, 2)
CLIP, Config = optax.clip_by_global_norm(1e9), dataclasses.make_dataclass("Config", ["tx"])
WRAPPERS: dict[str, Wrapper] = {
    "none": Wrapper(),
    "chain": Wrapper(lambda tx: optax.chain(CLIP, tx)),
    "named_chain": Wrapper(lambda tx: optax.named_chain(("clip", CLIP), ("sampler", tx))),
    "MultiSteps": Wrapper(lambda tx: optax.MultiSteps(tx, 2), *IN_PAIRS),
    "masked": Wrapper(masked, at_rest=True),
    "partition": Wrapper(partition, at_rest=True),
    "inject_hyperparams": Wrapper(lambda tx: injected()),
    "apply_if_finite": Wrapper(lambda tx: optax.apply_if_finite(tx, 5), *with_one_more(jnp.nan)),
    "conditionally_mask": Wrapper(
        lambda tx: optax.conditionally_mask(tx, lambda step, **_: step != SKIPPED),
        *with_one_more(7.0),
    ),
    "tracked": Wrapper(tracked),
    "tracked chain": Wrapper(lambda tx: tracked(optax.chain(CLIP, tx))),
    "tracked inject_hyperparams": Wrapper(lambda tx: tracked(injected())),
    "MultiSteps of tracked": Wrapper(lambda tx: optax.MultiSteps(tracked(tx), 2), *IN_PAIRS),
    "partition of tracked": Wrapper(lambda tx: partition(tracked(tx)), at_rest=True),
    # Copies of a sampler, which is a pair of functions.
    "tree.map": Wrapper(lambda tx: jax.tree.map(lambda x: x, tx)),
    "deepcopy": Wrapper(lambda tx: copy.deepcopy({"tx": tx})["tx"]),
    "asdict": Wrapper(lambda tx: dataclasses.asdict(Config(tx))["tx"]),
    "cloudpickle": Wrapper(lambda tx: cloudpickle.loads(cloudpickle.dumps(tx))),
    # Wrappers that cannot be correct.
    "masked alone": Wrapper(lambda tx: optax.masked(tx, is_sampled), at_rest=True),
    "flatten": Wrapper(optax.flatten),
    "conditionally_transform": Wrapper(
        lambda tx: optax.conditionally_transform(tx, lambda step, **_: jnp.mod(step, 3) > 0)
    ),
    "named_chain with another after it": Wrapper(
        lambda tx: optax.named_chain(("sampler", tx), ("scale", optax.scale(0.5)))
    ),
}
COPIES = "tree.map", "deepcopy", "asdict", "cloudpickle"


# Loops: `loop(tx, start, batches)` returns the parameters after each call, `[call, ...]`, what
# `last_accepted` returns at the end, and the state.


def plain(tx, grads, state, params, loss):
    return tx.update(grads, state, params, value=loss)


def by_name(tx, grads, state, params, loss):
    return tx.update(loss=loss, params=params, state=state, updates=grads)


def without_params(tx, grads, state, params, loss):
    return tx.update(grads, state, value=loss)


def stack(trees):
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


gradient = jax.jit(jax.value_and_grad(loss_fn))


def in_python(tx, start, batches, compiled: Any = jax.jit, call=plain):
    update, params, state, seen = compiled(functools.partial(call, tx)), start, tx.init(start), []
    for batch in batches:
        loss, grads = gradient(params, batch)
        updates, state = update(grads, state, params, loss)
        params = apply_updates(params, updates)
        seen.append(params)
    return stack(seen), last_accepted(state, params), state


def as_sent(count, after):
    return after


def scan(tx, batches, params, state, call=plain, change=as_sent, loss_fn=loss_fn):
    def step(carry, given):
        (before, state), (count, batch) = carry, given
        loss, grads = jax.value_and_grad(loss_fn)(before, batch)
        updates, state = call(tx, grads, state, before, loss)
        params = change(count, apply_updates(before, updates))
        return (params, state), params

    (params, state), seen = jax.lax.scan(step, (params, state), (jnp.arange(len(batches)), batches))
    return seen, params, state


def in_scan(tx, start, batches, **options):
    program = jax.jit(functools.partial(scan, tx, **options), donate_argnums=(1, 2))
    params = jax.tree.map(jnp.copy, start)
    seen, params, state = program(batches, params, tx.init(params))
    return seen, last_accepted(state, params), state


def in_scan_without_params(tx, start, batches):
    program = jax.jit(functools.partial(scan, tx, call=without_params))
    seen, params, state = program(batches, start, tx.init(start))
    drawn, last = last_accepted(state), last_accepted(state, params)
    own = optax.tree.get(state, "tracked_params")
    for name in START:
        np.testing.assert_allclose(own[name], params[name], rtol=1e-6)
        np.testing.assert_allclose(drawn[name], last[name], rtol=1e-6)
    # Placeholder for leaves that the sampler does not see; with `params`, all are returned.
    assert "table" not in start or drawn["table"] == optax.MaskedNode()
    return seen, last, state


def in_scan_with_x64(tx, start, batches):
    with jax.enable_x64(True):
        return in_scan(tx, start, batches)


def in_vmap(tx, start, batches, is_shared=False):
    """The first of several chains, each with its own key, and on its own device if shared."""
    number = jax.device_count() if is_shared else 3
    mesh = jax.make_mesh((number,), ("chain",), axis_types=(AxisType.Auto,)) if is_shared else None
    chains = jax.tree.map(lambda x: jnp.stack([x] * number), start)
    states = optax_smile.parallel.init(tx, chains, mesh=mesh, key=1)
    keys = optax.tree.get(states, "key").at[0].set(jax.random.key_data(KEY))
    states = optax.tree.set(states, key=keys)
    program = optax_smile.parallel.over_chains(functools.partial(scan, tx, batches), mesh=mesh)
    found = jax.jit(program)(chains, states)
    seen, params, state = jax.tree.map(lambda x: x[0], found)
    assert len(np.unique(found[0]["mean"][:, -1, 0])) == number
    return seen, last_accepted(state, params), state


def on_a_mesh(tx, start, batches):
    """Each leaf lies on all devices."""
    mesh = jax.make_mesh((jax.device_count(),), ("model",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        start = jax.device_put(start, jax.P("model"))
        seen, last, state = in_scan(tx, start, jax.device_put(batches, jax.P(None, None, "model")))
    own = optax.tree.get(state, "tracked_params", start)
    assert own["mean"].sharding == last["mean"].sharding == start["mean"].sharding
    return seen, last, state


class Model(eqx.Module):
    mean: Any
    offset: Any
    table: Any
    activation: Any = jax.nn.relu
    rate: float = 0.5


def in_equinox(tx, start, batches, is_whole=False):
    """With the leaves that move, or with the whole model, functions included."""
    model, seen = Model(**AT_REST | start), []
    moves = Model(*(name in start for name in vars(model)))
    passed: Any = (lambda model: model) if is_whole else lambda model: eqx.filter(model, moves)

    @eqx.filter_jit
    def step(model, state, batch):
        moving, others = eqx.partition(model, moves)

        def loss_at(moving):
            return loss_fn(vars(eqx.combine(moving, others)), batch)

        loss, grads = jax.value_and_grad(loss_at)(moving)
        updates, state = tx.update(grads, state, passed(model), value=loss)
        return eqx.apply_updates(model, updates), state

    state = tx.init(passed(model))
    for batch in batches:
        model, state = step(model, state, batch)
        seen.append({name: vars(model)[name] for name in start})
    if is_whole:
        # A loop may change what has no gradient.
        model = eqx.tree_at(lambda m: m.table, model, jnp.full(8, jnp.inf))
    last = last_accepted(state, passed(model))
    assert not is_whole or np.all(np.isinf(last.table)) and last.activation is jax.nn.relu
    return stack(seen), {name: vars(last)[name] for name in start}, state


class Network(nnx.Module):
    def __init__(self, start):
        for name, x in start.items():
            setattr(self, name, nnx.Param(x))
        self.running = nnx.BatchStat(jnp.zeros(()))


def in_nnx(tx, start, batches):
    """Running statistics stay what the loop makes of them."""
    network, seen = Network(start), []
    optimizer = nnx.Optimizer(network, tx, wrt=nnx.Param)

    def values(kind: Any = nnx.Param) -> Any:
        return dict(nnx.as_pure(nnx.state(network, kind)))

    @nnx.jit
    def step(network, optimizer, batch):
        def loss_at(network):
            network.running[...] += 1
            return loss_fn(dict(nnx.as_pure(nnx.state(network, nnx.Param))), batch)

        loss, grads = nnx.value_and_grad(loss_at)(network)
        optimizer.update(network, grads, value=loss)

    for batch in batches:
        step(network, optimizer, batch)
        seen.append(jax.tree.map(jnp.copy, values()))
    alone = last_accepted(optimizer.opt_state, nnx.state(network, nnx.Param))
    nnx.update(network, last_accepted(optimizer.opt_state, nnx.state(network)))
    assert set(alone) == set(start) and values(nnx.BatchStat)["running"] == len(batches)
    assert all(isinstance(x, jax.Array) for x in stats(optimizer.opt_state))
    return stack(seen), values(), optimizer.opt_state


# Changes of the parameters by loops between two calls: `change(count, after)`.
CHANGES: dict[str, Any] = {
    "decay now and then": lambda count, x: optax.tree.scale(1 - 1e-3 * (count % 3 == 0), x),
    "restarts": lambda count, x: optax.tree.where(count % 3 == 2, START, x),
}
LOOPS: dict[str, Any] = {
    "jit": in_python,
    "eager": functools.partial(in_python, compiled=lambda function: function),
    "named arguments": functools.partial(in_python, call=by_name),
    "scan with donated buffers": in_scan,
    "scan without parameters": in_scan_without_params,
    "scan with x64": in_scan_with_x64,
    "vmap": in_vmap,
    "Equinox": in_equinox,
    "whole Equinox model": functools.partial(in_equinox, is_whole=True),
    "nnx.Optimizer": in_nnx,
    **{name: functools.partial(in_scan, change=change) for name, change in CHANGES.items()},
}
SEVERAL_DEVICES: dict[str, Any] = {
    "shard_map": functools.partial(in_vmap, is_shared=True),
    "mesh": on_a_mesh,
}
# Loops that not all wrappers run in. A state that leaves out a leaf in the first call does not fit
# into the `cond` of some wrappers.
OF_LOOPS: dict[str, Any] = {"whole Equinox model": ("none", "chain", "tracked")}
OF_LOOPS |= dict.fromkeys(CHANGES, ("none",))
CHANGED = (
    r"`last_accepted\(state=...\)` must be .* in which only the sampler changes the parameters"
)
# Errors by wrapper and by loop.
ERRORS: dict[str, str] = dict.fromkeys(CHANGES, CHANGED) | {
    "masked alone": r"`last_accepted\(state=...\)` must .* `optax.masked` alone.*set_to_zero",
    "flatten": r"`last_accepted\(params=...\)` must be a tree with the leaves .* given to `init`",
    "conditionally_transform": CHANGED,
    "named_chain with another after it": CHANGED,
}


@functools.cache
def plain_chain(sampler):
    seen, last, state = in_python(SAMPLERS[sampler](), START, BATCHES)
    return seen, last, stats(state)


def assert_plain_chain(wrapper, loop, sampler="sghmc"):
    """Or the error, which comes in the loop or from `last_accepted` after it."""
    one, run = WRAPPERS[wrapper], (LOOPS | SEVERAL_DEVICES)[loop]
    start = START | (AT_REST if one.at_rest else {})
    given = one.wrap(SAMPLERS[sampler]()), start, one.batches(BATCHES)
    lacks_params = loop == "scan without parameters" and "tracked" not in wrapper
    error = "optax_smile.tracked" if lacks_params else ERRORS.get(wrapper, ERRORS.get(loop))
    if error is not None:
        return refused(error, run, *given)
    seen, last, state = run(*given)
    for tree in (seen, last) if one.at_rest else ():
        assert np.all(np.equal(tree.pop("table"), np.arange(8.0)))
    found = jax.tree.map(lambda x: x[one.kept], seen), last, stats(state)
    *expected, told = plain_chain(sampler)
    if wrapper == "none" and loop in ("eager", "named arguments"):
        chex.assert_trees_all_equal(found, (*expected, told))
    chex.assert_trees_all_close(found, (*expected, told), rtol=1e-5, atol=1e-6)


def pairs():
    for wrapper in WRAPPERS:
        for loop in LOOPS:
            if wrapper in OF_LOOPS.get(loop, WRAPPERS):
                is_fast = loop == "jit" or wrapper in ("none", "partition")
                is_fast |= loop == "scan without parameters" and "tracked" in wrapper
                is_fast |= (wrapper, loop) == ("tracked", "scan with donated buffers")
                yield (wrapper, loop) if is_fast else nightly(wrapper, loop)


@pytest.mark.parametrize("wrapper, loop", [*pairs()])
def test_the_chain_is_that_of_the_plain_loop_or_there_is_a_clear_error(wrapper, loop):
    assert_plain_chain(wrapper, loop)


@pytest.mark.slow
@pytest.mark.parametrize("wrapper, loop", [("none", "eager"), nightly("tracked", "scan with x64")])
def test_a_sampler_that_needs_the_loss_takes_that_chain_too(wrapper, loop):
    assert_plain_chain(wrapper, loop, "psmile")


# Transformations that follow the sampler, or compute with its state.

SGLD = optax_smile.sgld(0.1, num_data=20, key=0)
AFTER: dict[str, Any] = {
    "scale": optax.scale(-1e-3),
    "trace": optax.trace(0.9),
    "masked": optax.masked(optax.clip(1.0), {"mean": True, "offset": False}),
}


@pytest.mark.parametrize("name", AFTER)
def test_what_follows_a_sampler_in_a_chain_is_refused(name):
    """It is refused also if other wrappers surround the chain."""
    for around in ("none", "partition", "MultiSteps"):
        state = WRAPPERS[around].wrap(optax.chain(SGLD, AFTER[name])).init(START)
        rule = r"must be (the state of )?an `optax.chain` that ends with the sampler"
        refused(rule, stats, state)
        refused(rule, last_accepted, state, START)


def after_calls(tx, params):
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(8):
        updates, state = update(START, state, params)
        params = apply_updates(params, updates)
    return stats(state)


def test_optimizers_that_average_states_are_refused_and_lookahead_is_flagged():
    """Sums of states have numbers in the place of booleans."""
    rule, both = "one whose booleans are numbers", optax.LookaheadParams(START, START)
    refused(rule, after_calls, contrib.sam(SGLD, optax.sgd(0.1)), START)
    refused(rule, after_calls, optax.lookahead(SGLD, 2, 0.5, reset_state=True), both)
    assert after_calls(optax.lookahead(SGLD, 2, 0.5), both).is_altered


def test_parameters_that_a_loop_passes_replace_the_tracked_ones():
    """Changes of them are counted, as without `tracked`."""
    tx = tracked(sghmc())
    seen, _, state = in_scan_without_params(tx, START, BATCHES[:3])
    params = jax.tree.map(lambda x: x[-1], seen)
    rule = r"`last_accepted\(params=...\)` must be those that the"
    refused(rule, last_accepted, state, jax.tree.map(lambda x: 0.9 * x, params))
    for altered in range(1, 4):
        params = jax.tree.map(lambda x: x + 0.1, params)
        updates, state = tx.update(START, state, params)
        params = apply_updates(params, updates)
        chex.assert_trees_all_equal(state.tracked_params, params)
        assert stats(state).num_altered == altered
    refused(CHANGED, last_accepted, state)
    # A compiled call can raise nothing.
    jax.jit(last_accepted)(state)


# Transformations before the sampler: `sample` compares its gradients with those of the loss.

SIZE = 5
SAMPLER = optax_smile.sgld(1e-5, num_data=50, key=0)
# Batches of single examples, which `sample` does not split.
EXAMPLES: Any = np.random.default_rng(0).normal(size=(10, 1, SIZE)).astype(np.float32)


def linear_loss(params, batch):
    return jnp.mean((batch @ params["w"] + params["b"] - batch.sum(axis=1) - 1) ** 2) / 2


def sample(tx, loss=linear_loss):
    start = {"w": jnp.full((2, SIZE), 0.3).at[1].set(0.7), "b": jnp.zeros(2)}
    steps: dict[str, Any] = {"num_warmup": 24, "num_draws": 3, "thin": 4, "key": 0}
    return optax_smile.sample(loss, start, [*EXAMPLES], tx, progress=False, **steps)


def beside(off):
    return optax.partition({"on": SAMPLER, "off": off}, {"w": "on", "b": "off"})


DECAY, COSINE = optax.add_decayed_weights(1e-4), optax.cosine_decay_schedule(1.0, 20)
PRIOR: dict[str, Any] = {"prior_precision": 0, "log_prior": lambda w: -w["w"].sum(), "key": 0}
FREE: dict[str, Any] = {"integrator": "minimal_norm", "decoherence_length": None}
# A transformation, and what is wrong with it.
BEFORE: dict[str, Any] = {
    "scale": (optax.chain(optax.scale(-1e-3), SAMPLER), "gradients multiplied by -0.001"),
    "decay": (optax.chain(DECAY, SAMPLER), "gradients with another direction"),
    "accumulated": (optax.MultiSteps(SAMPLER, 4), None),
    "optimizer of other leaves": (beside(optax.adam(1e-3)), None),
    "masked": (optax.masked(SAMPLER, {"w": True, "b": False}), "one in `optax.masked` alone"),
    "flat": (optax.flatten(SAMPLER), "one in `optax.flatten`"),
    "gradients of other leaves": (beside(optax.identity()), "one .*added"),
}
NIGHTLY: dict[str, Any] = {
    "schedule": (optax.chain(optax.scale_by_schedule(COSINE), SAMPLER), "gr.* by numbers"),
    "clip": (optax.chain(optax.clip_by_global_norm(1.0), DECAY, SAMPLER), "gr.* another direction"),
    "sum": (optax.MultiSteps(SAMPLER, 2, use_grad_mean=False), "gradients multiplied by 2"),
    "another prior": (optax_smile.sgld(1e-5, num_data=50, **PRIOR), None),
    "two gradients": (optax_smile.smile(1e-2, num_data=50, **FREE), None),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BEFORE, *map(nightly, NIGHTLY)])
def test_sample_refuses_what_changes_the_gradients_before_the_sampler(name):
    """Warnings are errors."""
    tx, wrong = (BEFORE | NIGHTLY)[name]
    if wrong is None:
        assert sample(tx).num_draws == 3
        return
    rule = rf"`sample\(sampler=...\)` must be .*, got {wrong}"
    with pytest.raises(ValueError, match=rule) as error:
        sample(tx)
    if "added" in wrong:
        params: Any = {"w": jnp.ones(SIZE), "b": jnp.zeros(())}
        found = optax_smile.check(linear_loss, params, [*EXAMPLES], tx).findings
        assert [x.kind for x in found] == ["other leaves"]
    assert "put it before" not in str(error.value)


@pytest.mark.slow
def test_gradients_whose_squares_underflow_are_not_compared():
    """A network that fits a batch to the bit was refused for their rounding."""
    tx = optax.chain(optax.scale(1.001), SAMPLER)
    assert sample(tx, lambda *x: 1e-14 * linear_loss(*x)).num_draws == 3


@pytest.mark.parametrize("norm, share", [(1.0, r"\d+\.\d%"), nightly(0.05, r"100\.0%")])
def test_sample_warns_of_a_clip_that_acts_with_its_share(norm, share):
    """Also if it shortens every gradient, so that it cannot be identified as a clip."""
    with pytest.warns(UserWarning, match=f"^`sample`: A clip before .* shortens {share} of the"):
        sample(optax.chain(optax.clip_by_global_norm(norm), SAMPLER))


# Leaves and gradients.


def test_a_bfloat16_model_with_a_master_copy_follows_the_chain():
    """The loop has half-precision weights alone; gradients are in half precision."""
    tx, model = tracked(sghmc()), optax.tree.cast(START, jnp.bfloat16)
    state, update = tx.init(START), jax.jit(tx.update)
    for batch in BATCHES:
        _, state = update(jax.grad(loss_fn)(model, batch), state)
        model = optax.tree.cast(state.tracked_params, jnp.bfloat16)
    chex.assert_trees_all_close(last_accepted(state), plain_chain("sghmc")[1], atol=3e-2)
    assert last_accepted(state)["mean"].dtype == jnp.float32
    refused(r"float32\[8\] at \['mean'\], got bfloat16", last_accepted, state, model)


def test_integers_and_booleans_get_no_update():
    tx, at_rest = sghmc(), {"table": jnp.arange(2), "mask": jnp.ones(2, bool)}
    params = START | at_rest
    grads = jax.grad(lambda x: jnp.sum(x["mean"] ** 2), allow_int=True)(params)
    # JAX passes no gradients of integers into compiled functions.
    for update, given in (tx.update, grads), (jax.jit(tx.update), grads | dict.fromkeys(at_rest)):
        updates, state = update(given, tx.init(params), params)
        for apply in [eqx.apply_updates, apply_updates][: 1 + (given is grads)]:
            after: Any = apply(params, updates)
            for tree in after, last_accepted(state, after):
                chex.assert_trees_all_equal({name: tree[name] for name in at_rest}, at_rest)
                chex.assert_trees_all_equal_dtypes(tree, params)


def test_gradients_for_other_leaves_than_at_first_are_refused():
    part: Any = {"mean": jnp.ones(8), "offset": None}
    for tx in (sghmc(), tracked(sghmc())):
        updates, state = tx.update(part, tx.init(START), START)
        params: Any = eqx.apply_updates(START, updates)
        assert updates["offset"] is None and stats(state).num_parameters == 8
        assert optax.tree.get(state, "displacement")["offset"] is None
        for update in tx.update, jax.jit(tx.update):
            refused(r"updates=...\)` must be None at \['offset'\]", update, START, state, params)
        _, whole = tx.update(START, tx.init(START), START)
        rule = r"None at \['offset'\], where the first call had"
        refused(rule, tx.update, part, whole, START)
        # A compiled call can raise nothing.
        for _ in range(2):
            _, whole = jax.jit(tx.update)(part, whole, START)
            assert stats(whole).is_altered and stats(whole).num_parameters == 8
            rule = r"`last_accepted\(state=...\)` must be a state whose calls"
            refused(rule, last_accepted, whole, START)
    tx, more = sghmc(), START | {"n": 3.0}
    rule = r"`sghmc.update\(updates=...\)` must be None at .*'n'"
    refused(rule, tx.update, START | {"n": jnp.ones(())}, tx.init(more), more)


def test_other_parameters_and_states_are_refused():
    tx, params = sghmc(), {"a": {"w": jnp.ones(3)}}
    chains: Any = {"a": {"w": jnp.ones((2, 3))}}
    state, states = tx.init(params), jax.vmap(tx.init)(chains)
    rule = r"^`last_accepted\(params=...\)` must be a tree .*"
    what = r"float32\[3\] at \['a'\]\['w'\]"
    refused(rule + what, last_accepted, state, {"a": {"w": jnp.ones(4)}})
    refused(r"`last_accepted\(state=...\)` must .*Use `jax.vmap", last_accepted, states, chains)
    assert jax.vmap(last_accepted)(states, chains)["a"]["w"].shape == (2, 3)
    refused(r"`last_accepted\(params=...\)` must be the .*tracked", last_accepted, state)
    rule = r"`stats\(state=...\)` must be the state of a transformation with exactly one"
    refused(rule, stats, (state, state))
    other = optax.tree.set(state, state_format=optax.tree.get(state, "state_format") + 1)
    refused(r"`stats\(state=...\)` must be a state of format", stats, (other,))
    rule = "must be what `init` or `update` of"
    refused(f"{rule} the tracked sampler returned", tracked(tx).update, params, state)
    # Keys of another implementation.
    ours, theirs = (optax_smile.psmile(num_data=50, key=key) for key in (0, RBG))
    rule = r"`psmile.update\(state=...\)` must be .* uint32\[2\]"
    refused(rule, ours.update, params, theirs.init(params), params)
    rule = r"`parallel.init\(key=...\)` must be .* 2 words"
    refused(rule, optax_smile.parallel.init, ours, chains, key=RBG)


# States.

SHAPES = {"a": (10,), "b": (40, 50), "c": (3, 4), "d": (), "e": (600,), "f": (2, 300)}
MANY = {name: jnp.asarray(RNG.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()}
PRECISION: dict[str, Any] = dict.fromkeys(SHAPES, 2.0) | {"c": jnp.full((3, 4), 0.5)}


def joined(tree):
    return jnp.concatenate([jnp.ravel(x).astype(jnp.float32) for x in jax.tree.leaves(tree)])


def network_loss(params, shift):
    x = joined(params)
    return jnp.mean((x - shift) ** 2 * jnp.linspace(0.5, 2, x.size, dtype=jnp.float32))


def network_chain(params, precision):
    """20 calls, which measure and replace a scale: where they end, and `stats`."""
    given: dict[str, Any] = {"num_data": 100, "key": 0, "integrator": "minimal_norm"}
    tx, shifts = quick_psmile(2.0, prior_precision=precision, **given), jnp.linspace(-1, 1, 20)
    program = functools.partial(scan, tx, shifts.astype(jnp.float32), loss_fn=network_loss)
    _, end, state = jax.jit(program)(params, tx.init(params))
    return joined(end), stats(state)


@pytest.mark.slow
@pytest.mark.parametrize("is_mixed", [False, nightly(True)])
def test_a_chain_does_not_depend_on_how_its_numbers_are_cut_into_leaves(is_mixed):
    """Many small leaves, also of two precisions, and one large leaf."""
    whole = joined(jax.tree.map(jnp.broadcast_to, PRECISION, SHAPES))
    expected = network_chain([joined(MANY)], [whole])
    assert np.abs(expected[0] - joined(MANY)).max() > 0.5
    with jax.enable_x64(is_mixed):
        found = network_chain(MANY | {"c": MANY["c"].astype(float)}, PRECISION)
    chex.assert_trees_all_close(found, expected, rtol=1e-3, atol=1e-3)
    assert found[1].num_altered == 0


@pytest.mark.parametrize(
    "make, most",
    [
        (functools.partial(optax_smile.psmile, key=0), 32),
        (functools.partial(optax_smile.published.psmile, 1e-3), 37),
        (functools.partial(optax_smile.psgld, 1e-3, key=0), 21),
    ],
)
def test_a_state_has_few_arrays_and_its_scalars_can_be_read(make, most):
    """Also those of several chains at once."""
    state = make(num_data=100).init(MANY)
    leaves = jax.tree.leaves(state)
    assert len(leaves) <= most and all(isinstance(leaf, jax.Array) for leaf in leaves)
    later = optax.tree.set(jax.tree.map(jnp.ones_like, state), state_format=state.state_format)
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # Equal keys.
        both: Any = stats(stack([state, later]))
    np.testing.assert_array_equal(both.num_gradients, [0, 1])
    for place, one in enumerate((state, later)):
        for x, y in zip(both, stats(one), strict=True):
            np.testing.assert_array_equal(x[place], y, strict=True)


def test_float64_arguments_do_not_widen_a_float32_state():
    with jax.enable_x64(True):
        numbers = {"num_data": 9.0, "temperature": 0.5, "decoherence_length": 2.0}
        given: Any = {name: np.float64(number) for name, number in numbers.items()}
        tx = optax_smile.psmile(**given, tuner=optax_smile.angle_tuner(np.float64(0.1)), key=0)
        state, value = jax.eval_shape(tx.init, MANY), jax.ShapeDtypeStruct((), jnp.float32)
        _, after = jax.eval_shape(lambda x, *y: tx.update(*y, value=x), value, MANY, state, MANY)
    kinds, expected = (jax.tree.map(lambda x: x.dtype, tree) for tree in (after, state))
    assert kinds == expected and jnp.float64 not in jax.tree.leaves(kinds)


@pytest.mark.slow
def test_a_state_survives_the_libraries_that_store_it(tmp_path):
    """`docs/recipes/checkpoints.md` asserts the same of Orbax and Flax."""
    tx = optax_smile.sghmc(0.01, num_data=50, key=RBG)
    update = jax.jit(tx.update)
    _, state = update(START, tx.init(START), START)
    expected = update(START, state, START)
    eqx.tree_serialise_leaves(tmp_path / "state.eqx", state)
    read = eqx.tree_deserialise_leaves(tmp_path / "state.eqx", state)
    for restored in (read, cloudpickle.loads(cloudpickle.dumps(state))):
        chex.assert_trees_all_equal_shapes_and_dtypes(restored, state)
        chex.assert_trees_all_equal(update(START, restored, START), expected)


# Copies of samplers: see also `WRAPPERS`.

SMALL: dict[str, Any] = {"num_data": 40, "key": 0}
KINDS: dict[str, Any] = {
    "published.psmile": lambda: optax_smile.published.psmile(1e-3, num_data=40),
    "cyclical_sgld": lambda: optax_smile.cyclical_sgld(1e-3, total_steps=9, num_cycles=2, **SMALL),
    "schedule": lambda: optax_smile.sghmc(lambda count: 0.1, **SMALL),
    "noise": optax_smile.scale_by_gradient_noise,
    "recorded": lambda: optax_smile.recorded(optax_smile.sgld(1e-3, **SMALL), num_warmup=1),
}


@pytest.mark.parametrize("name", KINDS)
def test_copies_of_a_sampler_have_its_settings(name):
    tx = KINDS[name]()
    for made in (copy.copy(tx), *(WRAPPERS[way].wrap(tx) for way in COPIES)):
        assert type(made) is type(tx) and settings_of(made, START) == settings_of(tx, START)
        if name != "recorded":
            chex.assert_trees_all_equal(made.init(START), tx.init(START))


@pytest.mark.parametrize("name", ["schedule", nightly("recorded"), nightly("noise")])
def test_a_sampler_can_be_an_argument_of_a_compiled_function(name):
    tx, traces = KINDS[name](), []

    @eqx.filter_jit
    def step(tx, *given):
        traces.append(1)
        return tx.update(*given)[0]

    expected, _ = tx.update(START, tx.init(START), START)
    for made in (tx, jax.tree.map(lambda x: x, tx)):
        found = step(made, START, made.init(START), START)
        chex.assert_trees_all_close(found, expected, rtol=1e-4)
    assert len(traces) == 1
    # Optimistix makes what functions enclose static, which JAX hashes.
    closed = equinox.internal.closure_to_pytree(tx.update)
    call = eqx.filter_jit(lambda update, *given: update(*given)[0])
    call.lower(closed, START, tx.init(START), START)


# Settings of JAX, and eager calls.


@pytest.mark.parametrize("build", [sghmc, injected])
def test_eager_calls_compile_nothing_after_the_first(build, caplog):
    """Also through `inject_hyperparams`, which builds its sampler in every call."""
    tx = tracked(build())
    state = tx.init(START)
    for number in range(3):
        with jax.log_compiles(number == 2):
            _, state = tx.update(START, state)
    assert stats(state).num_gradients == 3
    assert "Compiling" not in caplog.text


def test_an_eager_update_and_stats_do_not_wait_for_the_device():
    state = SGLD.init(START)
    states = stack([state, state])

    @jax.jit
    def slow(x, number):
        matrix = jax.lax.fori_loop(0, number, lambda _, a: a @ a / 800, jnp.ones((800, 800)))
        return x * matrix[0, 0].astype(x.dtype)

    def two_calls(grads):
        updates, after = SGLD.update(grads, state, START)
        return SGLD.update(grads, after, apply_updates(START, updates))

    def slow_grads(number) -> Any:
        return START | {"mean": slow(START["mean"], number)}

    # Compile all.
    jax.block_until_ready((slow(states.key, 1), two_calls(slow_grads(1))))
    stats(state)
    grads = slow_grads(20)
    two_calls(grads)
    assert not grads["mean"].is_ready()
    waiting = optax.tree.set(states, key=slow(states.key, 20))
    with warnings.catch_warnings(action="error"):
        told: Any = stats(waiting)
    assert not told.noise_id.is_ready()
    with pytest.warns(UserWarning, match="equal keys"):
        stats(jax.block_until_ready(waiting))


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        (jax.debug_nans(True), jax.debug_infs(True)),
        (jax.disable_jit(True), jax.numpy_dtype_promotion("strict")),
    ],
    ids=["debug", "eager and strict"],
)
def test_flags_of_jax_are_for_the_users_code(flags):
    def outputs(params, x):
        return x @ params["w"] + params["b"], jnp.float32(0)

    x = EXAMPLES[:, 0]
    with flags[0], flags[1]:
        draws = sample(SAMPLER)
        shown: Any = {"likelihood": "gaussian", "targets": x.sum(axis=1), "per": "draw"}
        found = optax_smile.predict(outputs, draws, x, **shown)
        assert str(optax_smile.diagnostics.summary(draws, found))
        _, state = SGLD.update(START, SGLD.init(START), START)
        last_accepted(state, START)
        assert np.all(np.isfinite(draws.params["w"])) and str(stats(state))
