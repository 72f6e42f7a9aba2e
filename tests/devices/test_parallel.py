"""Many chains, `sample` and `warmstart` on eight devices: shardings, and equal results."""

import collections
import functools
import itertools
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from public_samplers import quick_psmile
from runs import as_read, quiet, refused, stub, warned

import optax_smile
from optax_smile import parallel

# Compilation for a mesh is most of the cost of the slow tests.
OPTIMIZED = False
STEPS = 20
NUM_DATA = 100
RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(STEPS, 16, 4)).astype(np.float32)
TARGETS = RNG.normal(size=(STEPS, 16, 2)).astype(np.float32)
# All shapes of one chain differ, so that a shape identifies the parameter.
SHAPES = {"in": (4, 8), "out": (8, 2)}
SPECS = {"in": jax.P(None, "data"), "out": jax.P("data")}
CLIP = optax.clip_by_global_norm(1.0)
KEYED: dict[str, Any] = {"num_data": NUM_DATA, "key": 1}
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda: optax.adamw(1e-2),
    "clipped psmile": lambda: optax.chain(CLIP, quick_psmile(**KEYED)),
}
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


# Program and carry of twenty steps, and shardings of the carry before and after.
Run = collections.namedtuple("Run", "text carry shardings")


def make_mesh(shape, axis_type=AUTO, names=("chain", "data")) -> Mesh:
    return jax.make_mesh(shape, names[: len(shape)], axis_types=(axis_type,) * len(shape))


def start(chains=8) -> Any:
    draw = np.random.default_rng(1).normal
    return {x: (draw(size=(chains, *SHAPES[x])) / 2).astype(np.float32) for x in SHAPES}


def batch_of(call, chains=None):
    """One batch for all chains, or one for each of them."""
    rows = call if chains is None else (call - np.arange(chains)) % STEPS
    return INPUTS[rows], TARGETS[rows]


def mean_loss(params, batch):
    inputs, targets = batch
    return jnp.mean((jnp.tanh(inputs @ params["in"]) @ params["out"] - targets) ** 2)


def gathering_loss(params, batch):
    """With explicit axes, the author of a network must gather its sharded arrays."""
    return mean_loss(jax.tree.map(lambda x: jax.reshard(x, jax.P()), params), batch)


def loss_for(mesh, specs):
    return gathering_loss if specs and mesh and EXPLICIT in mesh.axis_types else mean_loss


def one_step(optimizer, loss_fn):
    optimizer = optax.with_extra_args_support(optimizer)

    def advance(carry, batch):
        params, state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = optimizer.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    return advance


def begin(optimizer, mesh, specs, given):
    params = parallel.place(given, mesh=mesh, specs=specs)
    return params, parallel.init(optimizer, params, mesh=mesh, specs=specs, key=jax.random.key(3))


@functools.cache
def run(name, mesh=None, is_sharded=False, chains=8, per_chain=False) -> Run:
    """Run a compiled program, which rejects arrays of other types or shardings."""
    specs, optimizer = SPECS if is_sharded else None, OPTIMIZERS[name]()
    carry = begin(optimizer, mesh, specs, start(chains))
    before, one = shardings_of(carry), one_step(optimizer, loss_for(mesh, specs))
    step: Any = parallel.step(one, carry, mesh=mesh, per_chain=per_chain)

    def batch(call):
        found = batch_of(call, chains if per_chain else None)
        return parallel.place_batch(found, mesh=mesh, per_chain=per_chain)

    compiled = step.lower(carry, batch(0)).compile()
    for call in range(STEPS):
        carry = compiled(carry, batch(call))
    return Run(compiled.as_text(), bare(carry), (before, shardings_of(carry)))


def bare(tree):
    return jax.tree.map(np.asarray, tree)


def shardings_of(carry):
    return [(leaf.shape, leaf.sharding) for leaf in jax.tree.leaves(carry)]


def assert_close(actual, expected):
    """Sums in another order gave relative differences of up to 5e-5 after 20 steps."""
    chex.assert_trees_all_close(actual, expected, rtol=1e-3, atol=2e-5)


def assert_spread(shardings, mesh, specs):
    """Arrays with the shape of a parameter are sharded like it, all others only over the chains."""
    like = {SHAPES[name]: spec for name, spec in (specs or {}).items()}
    for shape, sharding in shardings:
        spec = jax.P("chain", *like.get(shape[1:], ()))
        assert sharding.is_equivalent_to(NamedSharding(mesh, spec), len(shape)), shape


def test_chains_with_noise_need_a_key():
    """Otherwise each would draw the same numbers, and chains from one start be copies."""
    noisy = optax.chain(optax.clip(1.0), optax_smile.sgld(0.1, num_data=10, key=0))
    rule, rbg = r"`parallel.init\(key=...\)` must be a ", jax.random.key(0, impl="rbg")
    refused(rule + "single JAX key.* the 3 chains", parallel.init, noisy, start(3))
    refused(rule + "key with .* words of data", parallel.init, noisy, start(3), key=rbg)
    keys = optax.tree.get(parallel.init(noisy, start(3), key=1), "key")
    assert len(np.unique(keys, axis=0)) == 3
    alone = optax.tree.get(parallel.init(noisy, start(1)), "key")
    assert alone.shape == (1, *keys.shape[1:])
    parallel.init(quiet(), start(3))
    # A layer may be called `key`, as in attention; averages over its gradients are not random keys.
    attention: Any = {"key": {"kernel": jnp.ones((3, 2))}, "value": jnp.ones((3, 2))}
    state = parallel.init(sampler := quick_psmile(**KEYED), attention, key=1)
    expected: Any = jax.vmap(sampler.init)(attention)
    keys = jax.random.key_data(jax.random.split(jax.random.key(1), 3))
    chex.assert_trees_all_equal(state, expected._replace(key=keys))


@pytest.mark.slow
def test_a_mesh_changes_nothing_but_the_place():
    """Devices communicate only where a chain has several."""
    collectives = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
    own: dict[str, Any] = {"chains": 16, "per_chain": True}
    for name, mesh, is_sharded, options in (
        ("adamw", make_mesh((8, 1)), False, {}),
        ("adamw", make_mesh((2, 4)), False, {}),
        ("adamw", make_mesh((4, 2)), True, {}),
        ("clipped psmile", make_mesh((4, 2), EXPLICIT), True, {}),
        # More chains than devices, and batches of their own.
        ("adamw", make_mesh((4, 2)), False, own),
    ):
        got, expected = run(name, mesh, is_sharded, **options), run(name, **options)
        assert_close(got.carry, as_read(expected.carry, got.carry))
        for shardings in got.shardings:
            assert_spread(shardings, mesh, SPECS if is_sharded else None)
            # The state has scalars, and arrays like each parameter.
            assert {(), *SHAPES.values()} <= {shape[1:] for shape, _ in shardings}
        found, is_alone = re.findall(collectives, got.text), mesh.shape["chain"] == mesh.size
        assert not found if is_alone else "all-reduce" in found
    # XLA writes groups of devices either as rows of all of them or one by one.
    text, written = run("adamw", make_mesh((2, 4))).text, {"[2,4]<=[8]", "[[0,1,2,3],[4,5,6,7]]"}
    groups = re.findall(r"(?:replica_groups|source_target_pairs)=(\{\{.*?\}\}|.*?\])[, ]", text)
    assert groups and {x.translate(str.maketrans("{}", "[]")) for x in groups} <= written


def test_one_compilation_donation_and_the_parameters_of_the_user(caplog):
    mesh, specs = make_mesh((4, 2), EXPLICIT), SPECS
    traced = itertools.count()

    def counted(params, batch):
        next(traced)
        return loss_for(mesh, specs)(params, batch)

    given = parallel.place(start(), mesh=mesh, specs=specs)
    carry = begin(optimizer := OPTIMIZERS["adamw"](), mesh, specs, given)
    step = parallel.step(one_step(optimizer, counted), carry, mesh=mesh)
    for call in range(4):
        before, traces = carry, next(traced)
        with jax.log_compiles():
            carry = step(carry, parallel.place_batch(batch_of(call), mesh=mesh))
        compiled = [x for x in caplog.messages if re.search("Finished XLA compilation.*advance", x)]
        assert len(compiled) == 1
        assert (next(traced) == traces + 1) is (call > 0)
        # Scalars that are only written, such as the last energy change, need not be.
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before) if leaf.ndim > 1)
    chex.assert_trees_all_equal(bare(given), start())


def test_the_carry_keeps_its_place_whatever_is_written_into_it():
    mesh = make_mesh((4, 2))
    carry = parallel.place(np.zeros((8, 16)), mesh=mesh)
    step = parallel.step(lambda carry, batch: carry + 2 * batch, carry, mesh=mesh)
    after = step(carry, parallel.place_batch(np.ones(16, np.float32), mesh=mesh))
    assert_spread(shardings_of(after), mesh, None)
    np.testing.assert_array_equal(after, np.full((8, 16), 2.0))


def test_examples_are_spread_over_the_data_axis():
    mesh, alone = make_mesh((4, 2)), make_mesh((8,))
    for shape, options, spec in (
        ((16, 3), {}, ("data",)),
        ((15, 3), {}, ()),
        ((), {}, ()),
        ((8, 16, 3), {"per_chain": True}, ("chain", "data")),
        ((8, 15, 3), {"per_chain": True}, ("chain",)),
        ((5, 16, 3), {"stacked": True}, (None, "data")),
        ((8, 5, 16), {"stacked": True, "per_chain": True}, ("chain", None, "data")),
    ):
        given: dict[str, Any] = options
        leaf = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        chains = jax.P(*spec[:1]) if "per_chain" in options else jax.P()
        for on, wanted in ((mesh, jax.P(*spec)), (alone, chains)):
            placed = parallel.place_batch({"x": leaf}, mesh=on, **given)["x"]
            assert placed.sharding.is_equivalent_to(NamedSharding(on, wanted), leaf.ndim)
            np.testing.assert_array_equal(placed, leaf)
        assert parallel.place_batch({"x": leaf}, **given)["x"] is leaf
    # A batch that is already sharded stays in place.
    spread = jax.device_put(np.ones((16, 3)), NamedSharding(mesh, jax.P(None, None)))
    assert parallel.place_batch(spread, mesh=mesh) is spread
    lone = jax.device_put(np.ones((16, 3)), jax.devices()[3])
    assert len(parallel.place_batch(lone, mesh=mesh).sharding.device_set) == 8


def batches(chains=None):
    return [batch_of(call, chains) for call in range(STEPS)]


def draw(mesh=None, specs=None, loss_fn=None, **arguments) -> Any:
    defaults: dict[str, Any] = {"num_warmup": 4, "num_draws": 3, "thin": 4, "key": 0}
    defaults |= {"progress": False, "batches": batches(), "mesh": mesh, "specs": specs}
    defaults["sampler"] = stub(noise=0.1)
    loss_fn = loss_fn or loss_for(mesh, specs)
    return optax_smile.sample(loss_fn, start(), **defaults | arguments)


@pytest.mark.slow
def test_sample_on_a_mesh(tmp_path):
    seen = set()

    def watched_loss(params, batch):
        seen.add((jax.typeof(params["in"]).sharding.spec, jax.typeof(batch[0]).sharding.spec))
        return gathering_loss(params, batch)

    options: dict[str, Any] = {"loss_fn": watched_loss, "directory": tmp_path}
    got = draw(make_mesh((4, 2), EXPLICIT), SPECS, steps_per_dispatch=4, **options)
    assert_close(got.params, draw().params)
    assert seen == {(jax.P(None, "data"), jax.P("data", None))}
    # With more parameters than data, it draws random directions for the rise of the loss.
    sampler = optax_smile.sgld(1e-5, num_data=16, key=0)
    draw(make_mesh((2,), EXPLICIT), sampler=sampler, num_draws=1, batches=[batch_of(0)])


@pytest.mark.slow
def test_a_run_goes_on_on_another_mesh(tmp_path):
    """With auxiliary state, random losses and batches of their own."""

    def noisy_loss(params, batch, aux, key):
        loss = mean_loss(params, batch) + 0.1 * jax.random.normal(key, ()) * jnp.sum(params["in"])
        return loss, aux + loss

    options: dict[str, Any] = {"loss_fn": noisy_loss, "aux": np.zeros(8, np.float32)}
    options |= {"stochastic": True, "batches": batches(8), "per_chain": True}
    options["steps_per_dispatch"] = 4
    for mesh, number in ((make_mesh((4, 2)), 2), (None, 3)):
        got = draw(mesh, directory=tmp_path, num_draws=number, **options)
    assert got.num_draws == 3
    assert_close(got.params, draw(**options).params)


# The fast case has stored gradients and resumes on one device.
SLOW = [pytest.param(x, marks=pytest.mark.slow) for x in ("stored", "two gradients", "specs")]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["own batches", *SLOW])
def test_control_variates_on_a_mesh(tmp_path, form):
    """The centres equal those on one device, also if the run continues on another mesh."""
    options: dict[str, Any] = {"num_warmup": 36, "thin": 12, "steps_per_dispatch": 4}
    options["sampler"] = optax_smile.sgld(1e-5, num_data=16 * STEPS, key=0)
    own = options["batches"] = batches(8) if form == "own batches" else batches()
    options["per_chain"] = form == "own batches"
    whole = INPUTS.reshape(-1, 4), TARGETS.reshape(-1, 2)
    options["control_variate"] = own if form in ("stored", "own batches") else [whole]
    mesh, specs = make_mesh((4, 2)), SPECS if form == "specs" else None
    for on, number in ((mesh, 2), (None, 4)):
        given = {} if form == "specs" else {"directory": tmp_path}
        got = draw(on, specs if on else None, num_draws=number, **given, **options)
        assert (got.trace["num_passes"][:, -1] > 0).all()
        assert_close(got.params, draw(**options | {"num_draws": number}).params)


def train(mesh=None, specs=None, **arguments) -> Any:
    defaults: dict[str, Any] = {"num_members": 8, "key": 0, "num_epochs": 3, "progress": False}
    defaults |= {"validation": batch_of(0), "batches": batches(), "mesh": mesh, "specs": specs}

    def initial(key):
        numbers = jax.random.normal(key, (48,))
        return {"in": numbers[:32].reshape(SHAPES["in"]), "out": numbers[32:].reshape(8, 2)}

    optimizer, loss = optax.adamw(optax.cosine_decay_schedule(1e-2, 50)), loss_for(mesh, specs)
    return optax_smile.warmstart(loss, initial, optimizer=optimizer, **defaults | arguments)


def test_warmstart_on_a_mesh(tmp_path):
    mesh, alone = make_mesh((4, 2)), train()
    got = train(mesh, SPECS, directory=tmp_path)
    assert_close(bare(got), bare(alone))
    assert_spread(shardings_of(got), mesh, SPECS)
    said = "the training in .* is finished"
    finished = warned(said, train, mesh, SPECS, directory=tmp_path)
    jax.tree.map(np.testing.assert_array_equal, bare(finished), bare(got))
    assert_spread(shardings_of(finished), mesh, SPECS)


def test_parameters_on_an_explicit_mesh_need_it():
    """The default of `jax.make_mesh` is one."""
    mesh = jax.make_mesh((8,), ("chain",))
    params = jax.device_put(jnp.ones((8, 2)), jax.NamedSharding(mesh, jax.P("chain")))
    for place in (parallel.place, functools.partial(parallel.init, optax.adam(0.1))):
        refused(r"mesh=...\)` must be that of the par.* explicit mesh", place, params)
        place(params, mesh=mesh)


def test_meshes_and_specs_that_do_not_fit():
    mesh, other = make_mesh((4, 2)), make_mesh((4, 2), names=("model", "data"))
    for argument, changes, message in (
        ("mesh", {"mesh": other}, r".*, got the axes \('model', 'data'\).* Make one"),
        ("mesh", {"tree": start(6), "specs": None}, ".* of chains, 6, got .* length 4"),
        ("specs", {"specs": {"w": jax.P()}}, "a tree of jax.P with the .*'out'"),
        ("specs", {"specs": SPECS | {"in": jax.P("model")}}, ".* with axes of"),
    ):
        given: dict[str, Any] = {"tree": start(), "mesh": mesh, "specs": SPECS} | changes
        rule = rf"`parallel.place\({argument}=...\)` must be {message}"
        refused(rule, parallel.place, given.pop("tree"), **given)

    init = functools.partial(parallel.init, optax.adamw(0.1), start(), key=0)
    for function, name in ((init, "parallel.init"), (draw, "sample"), (train, "warmstart")):
        refused(rf"`{name}\(mesh=...\)` .* an axis 'chain'", function, mesh=other)
        rule = rf"`{name}\(specs=...\)` must be a tree of jax.P"
        refused(rule, function, mesh=make_mesh((1, 8)), specs={})
    rule = r"mesh=...\)` must be a mesh whose axis 'chain' divides the number of chains, 6, got"
    refused(rule, train, make_mesh((8, 1)), num_members=6)
