"""Many chains on eight virtual CPU devices, see conftest.py: what lies where, what is equal."""

import functools
import itertools
import re
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding

import optax_smile
from optax_smile import parallel

# A scale within the few calls of a test: see conftest.py.
SHORT_WINDOWS = True
STEPS = 20
NUM_DATA = 100
RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(STEPS, 16, 4)).astype(np.float32)
TARGETS = RNG.normal(size=(STEPS, 16, 2)).astype(np.float32)
# No two shapes of one chain are alike: the shape tells which parameter an array is like.
SHAPES = {"in": (4, 8), "out": (8, 2)}
SPECS = {"in": jax.P(None, "data"), "out": jax.P("data")}
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda: optax.adamw(1e-2),
    "clipped psmile": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax_smile.psmile(num_data=NUM_DATA, key=jax.random.key(1))
    ),
    "psmile": lambda: optax_smile.psmile(
        0.02,
        num_data=NUM_DATA,
        integrator="minimal_norm",
        decoherence_length=1.0,
        key=jax.random.key(0),
    ),
    "sghmc": lambda: optax_smile.sghmc(1e-3, num_data=NUM_DATA, key=jax.random.key(0)),
}
MESHES = [(8, 1), (4, 2), (2, 4), (1, 8)]
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
# Gradients, and with them parameters and energies, are summed in another order: 20 steps of
# rounding gave relative differences of up to 5e-5 in the state.
TOLERANCES = {"rtol": 1e-3, "atol": 2e-5}
COLLECTIVES = r"all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"


class Run(NamedTuple):
    """Twenty compiled steps.

    Attributes:
        text: of the compiled program.
        carry: parameters and state after them, on the host.
        shardings: of the carry, before and after.
    """

    text: str
    carry: Any
    shardings: tuple[Any, Any]


def make_mesh(shape, axis_type=AUTO, names=("chain", "data")) -> Mesh:
    return jax.make_mesh(shape, names[: len(shape)], axis_types=(axis_type,) * len(shape))


def start(chains=8) -> Any:
    generator = np.random.default_rng(1)
    return {
        name: (generator.normal(size=(chains, *shape)) / 2).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def batch_of(call, chains=None):
    """One batch for all chains, or one for each of them."""
    if chains is None:
        return INPUTS[call], TARGETS[call]
    rows = [np.roll(np.arange(STEPS), chain)[call] for chain in range(chains)]
    return INPUTS[rows], TARGETS[rows]


def mean_loss(params, batch):
    inputs, targets = batch
    return jnp.mean((jnp.tanh(inputs @ params["in"]) @ params["out"] - targets) ** 2)


def gathering_loss(params, batch):
    """Under explicit axes the arrays of a sharded network are gathered by its author."""
    return mean_loss(jax.tree.map(lambda x: jax.reshard(x, jax.P()), params), batch)


def loss_for(mesh, specs):
    explicit = isinstance(mesh, Mesh) and EXPLICIT in mesh.axis_types
    return gathering_loss if explicit and specs is not None else mean_loss


def one_step(optimizer, loss_fn):
    optimizer = optax.with_extra_args_support(optimizer)

    def advance(carry, batch):
        params, state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = optimizer.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    return advance


def begin(optimizer, mesh=None, specs=None, chains=8):
    params = parallel.place(start(chains), mesh=mesh, specs=specs)
    key = jax.random.key(3)
    return params, parallel.init(optimizer, params, mesh=mesh, specs=specs, key=key)


@functools.cache
def run(name, mesh=None, is_sharded=False, chains=8, per_chain=False) -> Run:
    """A compiled program refuses arrays of other types or shardings than it was made for."""
    specs, optimizer = SPECS if is_sharded else None, OPTIMIZERS[name]()
    carry = begin(optimizer, mesh, specs, chains)
    before = shardings_of(carry)
    step: Any = parallel.step(
        one_step(optimizer, loss_for(mesh, specs)), carry, mesh=mesh, per_chain=per_chain
    )

    def batch(call):
        found = batch_of(call, chains if per_chain else None)
        return parallel.place_batch(found, mesh=mesh, per_chain=per_chain)

    compiled = step.lower(carry, batch(0)).compile()
    for call in range(STEPS):
        carry = compiled(carry, batch(call))
    return Run(compiled.as_text(), bare(carry), (before, shardings_of(carry)))


def is_key(leaf):
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def bare(tree):
    return jax.tree.map(lambda x: np.asarray(jax.random.key_data(x) if is_key(x) else x), tree)


def shardings_of(carry):
    return [(leaf.shape, leaf.sharding) for leaf in jax.tree.leaves(carry)]


def assert_close(actual, expected):
    chex.assert_trees_all_close(actual, expected, **TOLERANCES)


def assert_spread(shardings, mesh, specs):
    """Arrays shaped like a parameter lie like it, all others over the chains alone."""
    like = {SHAPES[name]: spec for name, spec in (specs or {}).items()}
    for shape, sharding in shardings:
        spec = jax.P("chain", *like.get(shape[1:], ()))
        assert sharding.is_equivalent_to(NamedSharding(mesh, spec), len(shape)), shape


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("axis_type", "specs"), [(AUTO, None), (AUTO, SPECS), (EXPLICIT, SPECS)])
def test_state_is_spread_over_the_chains(name, axis_type, specs):
    mesh = make_mesh((4, 2), axis_type)
    optimizer = OPTIMIZERS[name]()
    params, state = begin(optimizer, mesh, specs)
    assert_spread(shardings_of((params, state)), mesh, specs)
    shapes = {shape[1:] for shape, _ in shardings_of(state)}
    assert {(), *SHAPES.values()} <= shapes, "scalars, and arrays like each parameter"
    chex.assert_trees_all_equal(bare(params), start())
    plain = jax.vmap(optimizer.init)(start())
    key = optax.tree.get(plain, "key")
    if key is not None:
        keys = jax.random.key_data(jax.random.split(jax.random.key(3), 8))
        plain = optax.tree.set(plain, key=keys)
    chex.assert_trees_all_equal(bare(state), bare(plain))


@pytest.mark.parametrize("key", [jax.random.key(0), jax.random.PRNGKey(0)])
def test_a_layer_may_be_called_key(key):
    """As in attention; the averages over its gradients are no random key."""
    params: Any = {"key": {"kernel": jnp.ones((3, 2))}, "value": jnp.ones((3, 2))}
    sampler = optax_smile.psmile(num_data=10, key=key)
    state = optax_smile.parallel.init(sampler, params, key=jax.random.key(1))
    expected: Any = jax.vmap(sampler.init)(params)
    keys = jax.random.split(jax.random.key(1), 3)
    expected = expected._replace(key=None if key is None else jax.random.key_data(keys))
    chex.assert_trees_all_equal(state, expected)


NOISY = {
    "psmile": optax_smile.psmile(num_data=10, key=0),
    "sgld in a chain": optax.chain(optax.clip(1.0), optax_smile.sgld(0.1, num_data=10, key=0)),
}


@pytest.mark.parametrize("name", NOISY)
def test_chains_with_noise_need_a_key(name):
    """Otherwise each would draw the same numbers, and chains from one start be copies."""
    with pytest.raises(
        ValueError, match=r"`parallel.init\(key=...\)` must be a JAX key .* the 3 chains"
    ):
        parallel.init(NOISY[name], start(3))
    keys = optax.tree.get(parallel.init(NOISY[name], start(3), key=1), "key")
    assert len(np.unique(keys, axis=0)) == 3
    alone = optax.tree.get(parallel.init(NOISY[name], start(1)), "key")
    assert alone.shape == (1, *keys.shape[1:])
    parallel.init(optax_smile.psmile_naive(0.1, num_data=10), start(3))


def assert_as_on_one_device(name, mesh, is_sharded=False, **options):
    got = run(name, mesh, is_sharded, **options)
    assert_close(got.carry, run(name, **options).carry)
    assert_spread(got.shardings[0], mesh, SPECS if is_sharded else None)
    assert_spread(got.shardings[1], mesh, SPECS if is_sharded else None)
    collectives = set(re.findall(COLLECTIVES, got.text))
    if mesh.shape["chain"] == mesh.size:
        assert not collectives
    else:
        assert "all-reduce" in collectives


@pytest.mark.parametrize(
    ("shape", "axis_type", "is_sharded"),
    [
        *[(shape, AUTO, False) for shape in MESHES],
        ((4, 2), AUTO, True),
        ((4, 2), EXPLICIT, True),
        ((2, 4), EXPLICIT, True),
    ],
)
def test_a_mesh_changes_nothing_but_the_place(shape, axis_type, is_sharded):
    """Devices communicate only where a chain has several."""
    assert_as_on_one_device("adamw", make_mesh(shape, axis_type), is_sharded)


@pytest.mark.parametrize("shape", [(4, 2), (2, 4)])
def test_devices_of_different_chains_do_not_communicate(shape):
    """XLA writes groups of devices either as rows of all of them or one by one."""
    text = run("adamw", make_mesh(shape)).text
    rows = np.arange(8).reshape(shape).tolist()
    written = f"[{shape[0]},{shape[1]}]<=[8]", str(rows).replace(" ", "")
    groups = re.findall(r"(?:replica_groups|source_target_pairs)=(\{\{.*?\}\}|.*?\])[, ]", text)
    assert groups
    assert {group.translate(str.maketrans("{}", "[]")) for group in groups} <= set(written)


def test_a_sampler_on_a_mesh():
    assert_as_on_one_device("clipped psmile", make_mesh((8, 1)))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["adamw", "clipped psmile"])
@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_every_mesh(name, shape, axis_type, is_sharded):
    assert_as_on_one_device(name, make_mesh(shape, axis_type), is_sharded)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["psmile", "sghmc"])
@pytest.mark.parametrize(
    ("shape", "axis_type", "is_sharded"),
    [((8, 1), AUTO, False), ((4, 2), AUTO, True), ((4, 2), EXPLICIT, True), ((1, 8), AUTO, False)],
)
def test_random_numbers_on_a_mesh(name, shape, axis_type, is_sharded):
    assert_as_on_one_device(name, make_mesh(shape, axis_type), is_sharded)


@pytest.mark.parametrize(
    ("shape", "per_chain"), [((8,), False), ((8,), True), ((8, 1), False), ((4, 2), True)]
)
def test_more_chains_than_devices(shape, per_chain):
    assert_as_on_one_device("adamw", make_mesh(shape), chains=16, per_chain=per_chain)


def test_batches_of_their_own_tell_chains_apart():
    """Else a batch per chain that were shared after all would go unseen."""
    shared, own = run("adamw", chains=16).carry, run("adamw", chains=16, per_chain=True).carry
    assert np.abs(shared[0]["in"] - own[0]["in"]).max() > 0.01


@pytest.mark.slow
def test_within_set_mesh():
    mesh = make_mesh((4, 2), EXPLICIT)
    with jax.set_mesh(mesh):
        got = run.__wrapped__("adamw", mesh)
    assert_close(got.carry, run("adamw").carry)


@pytest.mark.parametrize(
    ("mesh", "specs"),
    [(None, None), (make_mesh((8, 1)), None), (make_mesh((4, 2), EXPLICIT), SPECS)],
    ids=["one device", "8x1", "4x2"],
)
@pytest.mark.parametrize("name", ["adamw", pytest.param("psmile", marks=pytest.mark.slow)])
def test_one_compilation_donation_and_the_parameters_of_the_user(mesh, specs, name, caplog):
    traced = itertools.count()

    def counted(params, batch):
        next(traced)
        return loss_for(mesh, specs)(params, batch)

    given = jax.tree.map(jnp.asarray, start())
    if mesh is not None:
        given = parallel.place(given, mesh=mesh, specs=specs)
    optimizer = OPTIMIZERS[name]()
    params = parallel.place(given, mesh=mesh, specs=specs)
    carry = params, parallel.init(optimizer, params, mesh=mesh, specs=specs, key=jax.random.key(0))
    step = parallel.step(one_step(optimizer, counted), carry, mesh=mesh)
    for call in range(4):
        before, traces = carry, next(traced)
        with jax.log_compiles():
            carry = step(carry, parallel.place_batch(batch_of(call), mesh=mesh))
        compiled = [x for x in caplog.messages if re.search("Finished XLA compilation.*advance", x)]
        assert len(compiled) == 1
        assert (next(traced) == traces + 1) is (call > 0)
        # Scalars that are written and not read, such as the last energy change, need not be.
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before) if leaf.ndim > 1)
    chex.assert_trees_all_equal(bare(given), start())


def test_the_carry_keeps_its_place_whatever_is_written_into_it():
    mesh = make_mesh((4, 2))
    carry = parallel.place(np.zeros((8, 16)), mesh=mesh)
    step = parallel.step(lambda carry, batch: carry + 2 * batch, carry, mesh=mesh)
    after = step(carry, parallel.place_batch(np.ones(16, np.float32), mesh=mesh))
    assert_spread(shardings_of(after), mesh, None)
    np.testing.assert_array_equal(after, np.full((8, 16), 2.0))


def test_place_keeps_the_parameters_of_the_user_on_one_device():
    given = jnp.ones((8, 3))
    jax.jit(lambda x: 2 * x, donate_argnums=0)(parallel.place(given))
    assert given.sum() == 24


@pytest.mark.parametrize(
    ("shape", "options", "spec"),
    [
        ((16, 3), {}, ("data",)),
        ((16,), {}, ("data",)),
        ((15, 3), {}, ()),
        ((), {}, ()),
        ((8, 16, 3), {"per_chain": True}, ("chain", "data")),
        ((8, 15, 3), {"per_chain": True}, ("chain",)),
        ((5, 16, 3), {"stacked": True}, (None, "data")),
        ((8, 5, 16), {"stacked": True, "per_chain": True}, ("chain", None, "data")),
    ],
)
def test_examples_are_spread_over_the_data_axis(shape, options, spec):
    mesh = make_mesh((4, 2))
    leaf = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    placed = parallel.place_batch({"x": leaf}, mesh=mesh, **options)["x"]
    assert placed.sharding.is_equivalent_to(NamedSharding(mesh, jax.P(*spec)), leaf.ndim)
    np.testing.assert_array_equal(placed, leaf)
    assert parallel.place_batch({"x": leaf}, **options)["x"] is leaf
    alone = parallel.place_batch({"x": leaf}, mesh=make_mesh((8,)), **options)["x"]
    chains = jax.P(*spec[:1]) if "per_chain" in options else jax.P()
    assert alone.sharding.is_equivalent_to(NamedSharding(alone.sharding.mesh, chains), leaf.ndim)


def test_a_batch_that_is_spread_already_stays():
    mesh = make_mesh((4, 2))
    spread = jax.device_put(np.ones((16, 3)), NamedSharding(mesh, jax.P(None, None)))
    assert parallel.place_batch(spread, mesh=mesh) is spread
    lone = jax.device_put(np.ones((16, 3)), jax.devices()[3])
    assert len(parallel.place_batch(lone, mesh=mesh).sharding.device_set) == 8


def place(**changes):
    given: dict[str, Any] = {"tree": start(), "mesh": make_mesh((4, 2)), "specs": SPECS} | changes
    return parallel.place(given.pop("tree"), **given)


OTHER_AXES = make_mesh((4, 2), names=("model", "data"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"mesh": OTHER_AXES},
            r"`parallel.place\(mesh=...\)` must be a jax.sharding.Mesh with .*, got the axes"
            r" \('model', 'data'\). Make one by jax.make_mesh",
        ),
        (
            {"mesh": 8},
            r"`parallel.place\(mesh=...\)` must be a jax.sharding.Mesh .*, got 8. Make one",
        ),
        (
            {"tree": start(6), "specs": None},
            r"`parallel.place\(mesh=...\)` must be .* divides the 6 chains, got 4 rows of devices",
        ),
        (
            {"tree": {"w": np.ones((4, 2)), "b": np.ones(3)}},
            r"`parallel.place\(tree=...\)` must be .* share a leading chain axis, got .*\(3,\)",
        ),
        ({"tree": {"w": np.float32(1)}}, "share a leading chain axis"),
        ({"tree": {}}, "share a leading chain axis"),
        ({"tree": {"w": np.ones((0, 4))}}, "of at least one chain .* got the shapes"),
        (
            {"specs": {"w": jax.P()}},
            r"`parallel.place\(specs=...\)` must be a tree of jax.P of the structure .*'out'",
        ),
        ({"specs": jax.P("data")}, r"`parallel.place\(specs=...\)` must be a tree of jax.P"),
        ({"mesh": None}, r"`parallel.place\(specs=...\)` must be None where there is no mesh, got"),
    ],
)
def test_bad_places(changes, message):
    with pytest.raises(ValueError, match=message):
        place(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"mesh": OTHER_AXES},
            r"`parallel.init\(mesh=...\)` must be .* an axis 'chain', got the axes",
        ),
        (
            {"mesh": make_mesh((8, 1))},
            r"`parallel.init\(mesh=...\)` must be .* the 4 chains, got 8 rows",
        ),
        ({"specs": {"w": jax.P()}}, r"\(specs=...\)` must be a tree of jax.P"),
    ],
)
def test_bad_states(changes, message):
    with pytest.raises(ValueError, match=message):
        parallel.init(optax.adamw(0.1), start(4), **{"mesh": make_mesh((4, 2))} | changes)


def batches():
    return [batch_of(call) for call in range(STEPS)]


def draw(sampler, mesh=None, specs=None, **arguments) -> Any:
    defaults: dict[str, Any] = {
        "num_warmup": 8,
        "num_draws": 3,
        "thin": 8,
        "key": jax.random.key(0),
        "progress": False,
    }
    return optax_smile.sample(
        arguments.pop("loss_fn", loss_for(mesh, specs)),
        start(),
        arguments.pop("batches", batches()),
        sampler,
        mesh=mesh,
        specs=specs,
        **defaults | arguments,
    )


def assert_same_draws(got, expected):
    assert_close(got.params, expected.params)
    if isinstance(got, optax_smile.Snapshots):
        assert_close(dict(got.trace), dict(expected.trace))


@functools.cache
def drawn(name, **arguments) -> Any:
    return draw(SAMPLERS[name](), **arguments)


SAMPLERS: dict[str, Any] = {
    "smile_naive": lambda: optax_smile.smile_naive(0.02, num_data=NUM_DATA),
    **{name: OPTIMIZERS[name] for name in ("clipped psmile", "psmile", "sghmc")},
}


def test_sample_on_a_mesh(tmp_path):
    """Everything at once; apart in the slow suite."""
    seen = set()

    def watched_loss(params, batch):
        seen.add((jax.typeof(params["in"]).sharding.spec, jax.typeof(batch[0]).sharding.spec))
        return gathering_loss(params, batch)

    got = draw(
        SAMPLERS["smile_naive"](),
        make_mesh((4, 2), EXPLICIT),
        SPECS,
        loss_fn=watched_loss,
        directory=tmp_path,
        steps_per_dispatch=4,
        prefetch=2,
    )
    assert_same_draws(got, drawn("smile_naive"))
    assert seen == {(jax.P(None, "data"), jax.P("data", None))}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "axis_type", "specs"),
    [
        ((8, 1), AUTO, None),
        ((4, 2), AUTO, SPECS),
        ((4, 2), EXPLICIT, None),
        ((2, 4), EXPLICIT, SPECS),
    ],
)
@pytest.mark.parametrize(
    ("arguments", "is_stored"),
    [({}, False), ({}, True), ({"steps_per_dispatch": 4}, False), ({"prefetch": 2}, True)],
    ids=["plain", "stored", "in one go", "stored and prefetched"],
)
def test_sample_on_every_mesh(shape, axis_type, specs, arguments, is_stored, tmp_path):
    mesh, directory = make_mesh(shape, axis_type), tmp_path if is_stored else None
    got = draw(SAMPLERS["smile_naive"](), mesh, specs, directory=directory, **arguments)
    assert_same_draws(got, drawn("smile_naive"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axis_type", "specs"),
    [("clipped psmile", AUTO, None), ("psmile", EXPLICIT, SPECS), ("sghmc", AUTO, SPECS)],
)
def test_sample_with_other_samplers(name, axis_type, specs):
    got = draw(SAMPLERS[name](), make_mesh((4, 2), axis_type), specs, steps_per_dispatch=4)
    assert_same_draws(got, drawn(name))


@pytest.mark.slow
@pytest.mark.parametrize("batch_per", ["gradient", "step"])
@pytest.mark.parametrize("steps_per_dispatch", [1, 4])
def test_sample_with_batches_of_their_own(batch_per, steps_per_dispatch):
    sampler = optax_smile.smile_naive(0.02, num_data=NUM_DATA, integrator="minimal_norm")
    options: dict[str, Any] = {
        "batches": [batch_of(call, 8) for call in range(STEPS)],
        "per_chain": True,
        "batch_per": batch_per,
        "steps_per_dispatch": steps_per_dispatch,
    }
    assert_same_draws(draw(sampler, make_mesh((4, 2)), **options), draw(sampler, **options))


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_dispatch", [1, 4])
def test_sample_with_auxiliary_state_and_random_losses(steps_per_dispatch):
    def noisy_loss(params, batch, aux, key):
        loss = mean_loss(params, batch) + 0.1 * jax.random.normal(key, ()) * jnp.sum(params["in"])
        return loss, aux + loss

    options: dict[str, Any] = {
        "loss_fn": noisy_loss,
        "aux": np.zeros(8, np.float32),
        "stochastic": True,
        "steps_per_dispatch": steps_per_dispatch,
    }
    sampler = SAMPLERS["smile_naive"]()
    got = draw(sampler, make_mesh((4, 2)), **options)
    assert_same_draws(got, draw(sampler, **options))
    assert np.ptp(got.params["aux"], axis=0).min() > 0


@pytest.mark.slow
def test_a_run_goes_on_on_another_mesh(tmp_path):
    sampler = SAMPLERS["smile_naive"]()
    draw(sampler, make_mesh((8, 1)), directory=tmp_path, num_draws=1)
    draw(sampler, make_mesh((4, 2)), directory=tmp_path, num_draws=2)
    assert_same_draws(draw(sampler, directory=tmp_path), drawn("smile_naive"))


def train(mesh=None, specs=None, **arguments) -> Any:
    defaults: dict[str, Any] = {
        "num_members": 8,
        "key": jax.random.key(0),
        "num_epochs": 3,
        "validation": batch_of(0),
        "progress": False,
    }

    def initial(key):
        numbers = jax.random.normal(key, (48,))
        return {"in": numbers[:32].reshape(SHAPES["in"]), "out": numbers[32:].reshape(8, 2)}

    return optax_smile.warmstart(
        loss_for(mesh, specs),
        initial,
        arguments.pop("batches", batches()),
        optax.adamw(optax.cosine_decay_schedule(1e-2, 50)),
        mesh=mesh,
        specs=specs,
        **defaults | arguments,
    )


@functools.cache
def trained() -> Any:
    return train()


def test_warmstart_on_a_mesh(tmp_path):
    mesh, specs = make_mesh((4, 2)), SPECS
    got = train(mesh, specs, directory=tmp_path, checkpoint_minutes=0)
    assert_close(bare(got), bare(trained()))
    assert_spread(shardings_of(got), mesh, specs)
    with pytest.warns(UserWarning, match="epochs loaded from .* is finished"):
        finished = train(mesh, specs, directory=tmp_path)
    chex.assert_trees_all_equal(bare(finished), bare(got))
    assert_spread(shardings_of(finished), mesh, specs)


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT])
@pytest.mark.parametrize("shape", [(8, 1), (4, 2), (1, 8)])
@pytest.mark.parametrize("specs", [None, SPECS], ids=["whole", "sharded"])
def test_warmstart_on_every_mesh(axis_type, shape, specs):
    mesh = make_mesh(shape, axis_type)
    got = train(mesh, specs)
    assert_close(bare(got), bare(trained()))
    assert_spread(shardings_of(got), mesh, specs)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(8, 1), (4, 2)])
def test_warmstart_with_batches_of_their_own(shape):
    own: dict[str, Any] = {
        "batches": [batch_of(call, 8) for call in range(STEPS)],
        "per_member": True,
    }
    expected = bare(train(**own))
    assert_close(bare(train(make_mesh(shape), **own)), expected)
    assert np.abs(expected["in"] - bare(trained())["in"]).max() > 0.01


@pytest.mark.parametrize("function", [draw, train])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mesh": OTHER_AXES}, r"mesh=...\)` must be .* an axis 'chain'"),
        ({"mesh": "cpu"}, r"mesh=...\)` must be a jax.sharding.Mesh .*got 'cpu'"),
        ({"mesh": make_mesh((1, 8)), "specs": {}}, r"specs=...\)` must be a tree of jax.P"),
    ],
)
def test_bad_meshes_of_the_loops(function, arguments, message):
    function = functools.partial(draw, OPTIMIZERS["adamw"]()) if function is draw else function
    with pytest.raises(ValueError, match=message):
        function(**arguments)


def test_chains_that_do_not_divide():
    message = r"mesh=...\)` must be a mesh whose axis 'chain' divides the 6 chains, got 8 rows"
    with pytest.raises(ValueError, match=message):
        train(make_mesh((8, 1)), num_members=6)
